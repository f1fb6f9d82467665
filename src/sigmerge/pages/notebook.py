"""Notebook displays of results: the page's figures and tables, with the page's style.

Every display is one frame that holds a whole document, so that neither its style nor the
notebook's reaches the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from markupsafe import Markup, escape

from sigmerge.messages import size
from sigmerge.method.deficit import DomainScores
from sigmerge.pages import svg
from sigmerge.pages.figures import Drawn, Figure, drawn, sections
from sigmerge.pages.table import Table, number_columns, text_columns
from sigmerge.records import PAGE, MergePlan, Provenance

FRAME_WIDTH = 960
"""Pixels beyond which a frame does not grow: two figures side by side."""
PAGE_HEIGHT = 720
"""Height of the page of a run; it scrolls."""
ROW, FIGURES, LINE = 37, 490, 62
"""Heights of a table's row, of a row of figures and of a notice."""


def merged(out: str, plan: MergePlan, provenance: Provenance) -> str:
    """A merge: what was written, and for a repair the figures of its plan."""
    facts = [
        ("folder", out),
        ("operator", plan.operator),
        ("written", size(provenance.bytes_written)),
        ("time", f"{provenance.wall_seconds:.1f} s"),
        ("peak memory", size(provenance.peak_memory_bytes)),
    ]
    table = Table(text_columns("result", ""), facts)
    return _frame([table], _figures(drawn(plan)), plan.warnings)


def tables(*grids: Table, notes: Sequence[str] = ()) -> str:
    """Tables, and notes below them."""
    return _frame(grids, [], notes)


def profile(plan: Drawn, warnings: Sequence[str]) -> str:
    """Views, conflict and capacity per layer."""
    return _frame([], _figures(plan), warnings)


def deficits(plan: Drawn, anchor: DomainScores, missing: Mapping[str, Sequence[str]]) -> str:
    """The deficit of every domain, and the shares."""
    rows = [
        (
            domain,
            f"{100 * anchor[domain]:.2f}",
            f"{100 * plan.deficit[domain]:.2f}",
            f"{plan.share[domain]:.3f}",
        )
        for domain in plan.domains
    ]
    notes = [
        f"{domain}: without {', '.join(names)}, which have no data"
        for domain, names in missing.items()
    ]
    table = Table(number_columns("domain", "anchor", "deficit", "share"), rows)
    return _frame([table], _figures(plan), notes)


def page(out: str, name: str = PAGE) -> str:
    """The page that a run wrote into its folder, or a line if it is gone."""
    try:
        text = (Path(out) / name).read_text(encoding="utf-8")
    except OSError:
        return str(Markup("<p>{} holds no {} any more.</p>").format(out, name))
    return _framed(text, PAGE_HEIGHT)


def _figures(plan: Drawn) -> list[Figure]:
    kinds = {name: f"d{i % svg.COLOURS}" for i, name in enumerate(plan.names)}
    return [figure for section in sections(plan, None, kinds) for figure in section.figures]


def _frame(tables: Sequence[Table], figures: Sequence[Figure], notes: Sequence[str]) -> str:
    style = resources.files("sigmerge.pages").joinpath("page.css").read_text(encoding="utf-8")
    body = Markup("").join(
        [
            *map(_grid, tables),
            *(Markup("<p class='notice'>{}</p>").format(note) for note in notes),
            Markup("<div class='figures' style='margin-top: 16px'>{}</div>").format(
                Markup("").join(map(_figure, figures))
            ),
        ]
    )
    rows = sum(len(table.rows) + 1 for table in tables)
    height = 24 + ROW * rows + LINE * len(notes) + FIGURES * ((len(figures) + 1) // 2)
    document = (
        "<!doctype html><meta charset='utf-8'><meta name='color-scheme' content='light dark'>"
        f"<style>{style} main {{ padding: 8px; }}</style><main>{body}</main>"
    )
    return _framed(document, height)


def _figure(figure: Figure) -> Markup:
    marks = Markup("").join(
        Markup("<li><span class='key {}'></span>{}</li>").format(kind, label)
        for kind, label in figure.legend
    )
    text = Markup(
        "<figure><h4>{}</h4><ul class='legend'>{}</ul><div class='chart'>{}</div>"
        "<div class='words'><figcaption>{}</figcaption>"
        "<details><summary>Exact values</summary>{}</details></div></figure>"
    )
    chart = Markup(figure.chart)
    return text.format(figure.title, marks, chart, figure.caption, _grid(figure.grid))


def _grid(grid: Table) -> Markup:
    def row(cells: Sequence[str], tag: str) -> Markup:
        return Markup("<tr>{}</tr>").format(
            Markup("").join(Markup(f"<{tag}>{{}}</{tag}>").format(cell) for cell in cells)
        )

    head = Markup("<thead>{}</thead>").format(row(grid.head, "th"))
    body = Markup("").join(row(cells, "td") for cells in grid.printed())
    kind = Markup(" class='wordy'" if grid.wordy else "")
    return Markup("<table{}>{}<tbody>{}</tbody></table>").format(kind, head, body)


def _framed(document: str, height: int) -> str:
    return (
        f'<iframe srcdoc="{escape(document)}" sandbox="allow-scripts" '
        f'style="width: 100%; max-width: {FRAME_WIDTH}px; height: {height}px; border: 0"></iframe>'
    )
