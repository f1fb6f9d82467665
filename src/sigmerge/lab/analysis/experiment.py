"""Everything `sigmerge analyze` writes about an experiment: tables, figures and one page."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from sigmerge.lab.analysis import charts, paper_tables, statistics
from sigmerge.lab.analysis.derived import Skipped
from sigmerge.lab.analysis.results import NotInStore, Results
from sigmerge.pages import html
from sigmerge.pages.table import As, Cell, Column, Table, csv_text, latex, markdown, printed


@dataclass(frozen=True)
class Analysis:
    """What the results gave, and what they did not give, with the reason."""

    tables: Sequence[Table]
    plots: Sequence[charts.Plot]
    skipped: Sequence[Skipped]


PAGE_SECTIONS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("What holds of the paper's statements", (), ("statements",)),
    (
        "The repair against its anchors",
        ("domain_gain_matrix",),
        ("main_gain", "paired_statistics", "paired_intervals"),
    ),
    ("Deficit-driven allocation", ("motivation", "deficit_gain"), ("residual_gap", "recovered")),
    ("Against other methods", (), ("baselines", "ranks", "baseline_dom")),
    (
        "Is every part needed?",
        ("ablation_bar", "ablation_domain", "directional"),
        ("ablation_full", "directional_full", "variant_intervals"),
    ),
    ("Where the capacity comes from", ("layerwise",), ("single_view", "view_correlations")),
    (
        "Claim order and constants",
        ("sensitivity",),
        ("order", "sens_*", "hyperparameter_protocol", "ours"),
    ),
    ("Which anchor to repair", (), ("anchor_regret", "anchor_statistics")),
    ("Cost, seeds and splits", (), ("efficiency", "perseed", "partitions", "split_membership")),
    ("By domain and metric", ("submetric_heatmap", "radar*"), ("dom_*", "sub_*")),
)
"""Title, figures and tables of each section of the page, in order."""


def analyse(results: Results) -> Analysis:
    made, missing = paper_tables.make_tables(results)
    drawn, undrawn = charts.make_plots(results)
    return Analysis(made, drawn, [*missing, *undrawn])


def write_analysis(results: Results, out: Path, title: str = "The experiment") -> Analysis:
    """Write `tables/` (Markdown, CSV, LaTeX), `figures/` (SVG, PNG), analysis.md and index.html."""
    found = analyse(results)
    folder = out / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    for table in found.tables:
        renders = {"md": markdown, "csv": csv_text, "tex": latex}
        for suffix, render in renders.items():
            _write(folder / f"{table.label}.{suffix}", render(table))
    for plot in found.plots:
        plot.write(out / "figures")
    _write(out / "analysis.md", analysis_text(results, found, title))
    _write(out / "index.html", page(results, found, title))
    return found


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8", newline="\n")


def headline(results: Results) -> list[tuple[str, str, str]]:
    """The few numbers to take away, each with what it is and what stands beside it."""
    try:
        pairs, triples = results.main, results.main_by_domain.drop_nulls("gap_before")
    except NotInStore:
        return []
    before, after, gain = (pairs[name].to_numpy() for name in ("before", "after", "gain"))
    facts = [
        (
            "Pairs improved",
            str(statistics.Count(int((gain > 0).sum()), gain.size)),
            "pool × anchor",
        ),
        ("Mean gain", printed(float(gain.mean()), "points"), f"points of {results.macro_name}"),
        (
            "Relative gain",
            f"{100 * statistics.relative_gain(before, after):.1f} %",
            "mean of the pairs",
        ),
        ("Wilcoxon", f"p = {printed(statistics.wilcoxon(before, after), 'p')}", "two-sided, exact"),
    ]
    if not triples.is_empty():
        gap, left = triples["gap_before"].to_numpy().mean(), triples["gap_after"].to_numpy().mean()
        facts.append(
            (
                "Residual gap",
                f"{printed(gap, 'percent')} → {printed(left, 'percent')}",
                "points, before and after",
            )
        )
        rank = statistics.spearman(triples["gap_before"], triples["gain"])
        if not math.isnan(rank):
            facts.append(("Deficit and gain", f"{rank:+.2f}".replace("-", "−"), "Spearman"))
    return facts


def _lead(results: Results) -> str:
    pools, anchors = len(results.pools), len(results.anchors())
    return (
        f"{pools} {'pool' if pools == 1 else 'pools'}, {anchors} "
        f"{'anchor' if anchors == 1 else 'anchors'}, {results.runs.height} runs; scores on the "
        f"{results.split} split, in percent; differences in points. Tables and figures carry the "
        "paper's labels."
    )


def analysis_text(results: Results, found: Analysis, title: str) -> str:
    """All tables and links to all figures, section by section."""
    lines = [f"# {title}", "", _lead(results), ""]
    lines += [f"- {what}: **{number}** ({beside})" for what, number, beside in headline(results)]
    for heading, figures, labels in PAGE_SECTIONS:
        drawn = [p for p in found.plots if _named(p.label, figures)]
        made = [t for t in found.tables if _named(t.label, labels)]
        if drawn or made:
            lines += ["", f"## {heading}", ""]
        for plot in drawn:
            lines += [
                f"![{plot.title}](figures/{plot.label}.svg)",
                "",
                f"{plot.title}. {plot.caption}",
                "",
            ]
        for table in made:
            lines += [markdown(table)]
    if found.skipped:
        lines += ["", "## Not in this experiment", ""]
        lines += [f"- `{item.label}`: {item.reason}" for item in found.skipped]
    return "\n".join(lines) + "\n"


def page(results: Results, found: Analysis, title: str) -> str:
    """One self-contained HTML file with everything."""
    sections = []
    for heading, figures, labels in PAGE_SECTIONS:
        drawn = [_figure(plot) for plot in found.plots if _named(plot.label, figures)]
        made = [_table(table) for table in found.tables if _named(table.label, labels)]
        if drawn or made:
            sections.append({"title": heading, "plots": drawn, "tables": made})
    return html.page(
        "experiment.html.j2",
        title=title,
        lead=_lead(results),
        headline=headline(results),
        sections=sections,
        skipped=found.skipped,
    )


def _named(label: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(label, pattern) for pattern in patterns)


def _figure(plot: charts.Plot) -> dict[str, str]:
    data = base64.b64encode(plot.svg.encode()).decode()
    source = f"data:image/svg+xml;base64,{data}"
    return {"label": plot.label, "title": plot.title, "caption": plot.caption, "source": source}


def _table(table: Table) -> dict[str, object]:
    """A table for the page: every cell with its class, words to the left, gains in colour."""
    printed_rows = table.printed()
    kinds = []
    for number, column in enumerate(table.columns):
        longest = max((len(row[number]) for row in printed_rows), default=0)
        kinds.append(("long" if longest > 32 else "words") if column.form == "text" else "")
    rows = [
        [
            (cell, f"{kinds[number]} {_colour(value, cell, column)}".strip())
            for number, (value, cell, column) in enumerate(
                zip(values, cells, table.columns, strict=True)
            )
        ]
        for values, cells in zip(table.rows, printed_rows, strict=True)
    ]
    return {
        "label": table.label,
        "caption": table.caption,
        "head": [(column.title, kind) for column, kind in zip(table.columns, kinds, strict=True)],
        "rows": rows,
        "whole": "long" in kinds,
    }


def _colour(value: Cell, cell: str, column: Column) -> str:
    """Green where a score rose, red where it fell; a gap is better when it falls: no colour."""
    form = value.form if isinstance(value, As) else column.form
    if cell == "NO":
        return "down"
    if form != "points" or column.title == "reduction":
        return ""
    return "up" if cell.startswith("+") and cell.strip("+0.") else "down" if cell[0] == "−" else ""
