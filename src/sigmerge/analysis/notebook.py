"""How results look in a notebook: the page's figures and tables, with the page's style.

Every display is one frame that holds a whole document, so that neither its style nor the
notebook's reaches the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from sigmerge.analysis.figures import Figure, Grid, sections
from sigmerge.records import Plan, Provenance
from sigmerge.words import size

HEIGHT = 620
COLOURS = 8


def merged(out: str, plan: Plan, provenance: Provenance) -> str:
    """A merge: what was written, and for a repair the figures of its plan."""
    facts = [
        ("folder", out),
        ("operator", plan.operator),
        ("written", size(provenance.bytes_written)),
        ("time", f"{provenance.wall_seconds:.1f} s"),
        ("peak memory", size(provenance.peak_memory_bytes)),
    ]
    notes = [Markup("<p class='notice warning'>{}</p>").format(text) for text in plan.warnings]
    return _frame(
        [_grid(Grid(("what", "value"), facts, wordy=True)), *notes, *_figures(plan.as_json())]
    )


def profile(content: Mapping[str, Any]) -> str:
    """Views, conflict and capacity per layer."""
    return _frame(_figures(content))


def deficits(content: Mapping[str, Any]) -> str:
    """What the anchor lost on every domain, and the shares."""
    rows = [
        (
            domain,
            f"{100 * content['anchor'][domain]:.2f}",
            f"{100 * content['deficit'][domain]:.2f}",
            f"{content['share'][domain]:.3f}",
        )
        for domain in content["domains"]
    ]
    table = _grid(Grid(("domain", "anchor", "deficit", "share"), rows))
    return _frame([table, *_figures(content)])


def page(out: str) -> str:
    """The page that a run wrote."""
    text = (Path(out) / "report.html").read_text(encoding="utf-8")
    return _framed(text)


def _figures(plan: Mapping[str, Any]) -> list[Markup]:
    names = list(plan.get("domains") or plan.get("share") or ())
    kinds = {name: f"d{i % COLOURS}" for i, name in enumerate(names)}
    return [
        _figure(figure) for section in sections(plan, None, kinds) for figure in section.figures
    ]


def _figure(figure: Figure) -> Markup:
    text = Markup("<figure><h3>{}</h3>{}<figcaption>{}</figcaption></figure>")
    return text.format(figure.title, Markup(figure.chart), figure.caption)


def _grid(grid: Grid) -> Markup:
    def row(cells: Sequence[str], tag: str) -> Markup:
        return Markup("<tr>{}</tr>").format(
            Markup("").join(Markup(f"<{tag}>{{}}</{tag}>").format(cell) for cell in cells)
        )

    body = Markup("").join(row(cells, "td") for cells in grid.rows)
    return Markup("<table>{}{}</table>").format(row(grid.head, "th"), body)


def _frame(parts: Sequence[Markup]) -> str:
    style = resources.files("sigmerge.analysis").joinpath("page.css").read_text(encoding="utf-8")
    body = Markup("").join(parts)
    return _framed(
        f"<!doctype html><meta charset='utf-8'><style>{style}</style><main>{body}</main>"
    )


def _framed(document: str) -> str:
    return (
        f'<iframe srcdoc="{escape(document)}" style="width: 100%; height: {HEIGHT}px; border: 0" '
        'sandbox="allow-scripts"></iframe>'
    )
