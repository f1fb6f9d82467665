"""The figures hold what they should, are the same each time, and are skipped with a reason."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.container import ErrorbarContainer

from sigmerge.lab.analysis import charts as charts_module
from sigmerge.lab.analysis.charts import PLOT_BUILDERS, Plot, _wrapped, make_plots
from sigmerge.lab.analysis.experiment import Analysis
from sigmerge.lab.analysis.results import Results
from sigmerge.lab.experiments.store import StoredRun, create
from tests.lab.analysis import experiment
from tests.lab.analysis.experiment import ANCHORS, DOMAINS, POOLS


def words(plot: Plot) -> str:
    """All text of a figure, one piece a line."""
    tree = ElementTree.fromstring(plot.svg)
    found = (
        "".join(element.itertext()).strip()
        for element in tree.iter()
        if element.tag.endswith("text")
    )
    return "\n".join(found)


@pytest.fixture(scope="module")
def plots(analysis: Analysis) -> dict[str, Plot]:
    return {plot.label: plot for plot in analysis.plots}


EXPECTED = {
    "motivation": [*DOMAINS, "anchor", "+ repair", "residual expert gap (points)"],
    "deficit_gain": [*DOMAINS, "full recovery", "deficit at the anchor (points)"],
    "directional": ["inverted capacity", "all random", "retained part of the gain (%)"],
    "layerwise": [
        "representation",
        "direction",
        "sign",
        "conflict",
        "openness",
        "capacity",
        "layer",
    ],
    "domain_gain_matrix": [*DOMAINS, *ANCHORS],
    "ablation_bar": ["uniform capacity", "equal share", "sparse update"],
    "ablation_domain": ["uniform capacity", *DOMAINS],
    "sensitivity": ["Macro-5", *DOMAINS, "0.35", "0.65"],
    "radar1": [*DOMAINS, "Linear", "TA", "TIES", "math expert", "anchor", "+ repair"],
    "radar2": [*DOMAINS, "DARE", "Fisher"],
    "submetric_heatmap": ["GSM8K flex", "MBPP+ pass@10", "Macro-5", *ANCHORS],
}


def test_many_pools_are_drawn_below_each_other() -> None:
    """Three beside each other at most; what is left over stays empty."""
    figure, axes = _wrapped(5, (3.0, 2.0), high=2, sharey=True)
    assert tuple(figure.get_size_inches()) == (9.0, 8.0) and axes.shape == (2, 5)
    top = [[axis.get_subplotspec().rowspan.start for axis in row] for row in axes]
    assert top == [[0, 0, 0, 2, 2], [1, 1, 1, 3, 3]]
    assert sum(not axis.axison for axis in figure.axes) == 2
    figure, axes = _wrapped(2, (3.0, 2.0))
    assert tuple(figure.get_size_inches()) == (6.0, 2.0) and axes.shape == (1, 2)


def test_every_figure_is_drawn(plots: dict[str, Plot]) -> None:
    assert set(plots) == set(EXPECTED)


@pytest.mark.parametrize("label", EXPECTED)
def test_labels(plots: dict[str, Plot], label: str) -> None:
    text = words(plots[label])
    pools = ["(a)", "(b)"] if label == "deficit_gain" else POOLS[:2]
    assert [name for name in [*EXPECTED[label], *pools] if name not in text] == []


def test_numbers_in_the_figures_are_those_of_the_results(
    plots: dict[str, Plot], results: Results
) -> None:
    gains = words(plots["domain_gain_matrix"]).splitlines()
    for gain in results.main_by_domain["gain"]:
        assert f"{100 * gain:+.1f}".replace("-", "−") in gains
    bars = words(plots["motivation"]).splitlines()
    rows = results.main_by_domain.filter(results.main_by_domain["pool"] == POOLS[0])
    for domain in DOMAINS:
        here = rows.filter(rows["domain"] == domain)
        assert f"{100 * here['gap_before'].mean():.1f}" in bars
        assert f"{100 * here['gap_after'].mean():.1f}" in bars


def test_a_point_for_every_triple_and_a_star_for_every_domain(plots: dict[str, Plot]) -> None:
    scatter, bars = plots["deficit_gain"].figure.axes
    points = [line for line in scatter.get_lines() if line.get_linestyle() == "None"]
    assert len(points) == 2 * len(ANCHORS) * len(DOMAINS)
    assert len(bars.patches) == 2 * len(DOMAINS)
    for axis in plots["sensitivity"].figure.axes:
        stars = [line for line in axis.get_lines() if line.get_marker() == "*"]
        assert len(stars) == 1 + len(DOMAINS)
        for star in stars:
            (line,) = [
                line
                for line in axis.get_lines()
                if line.get_marker() == "o" and line.get_color() == star.get_color()
            ]
            assert star.get_ydata()[0] == max(line.get_ydata())


def changed(folder: Path, kinds: tuple[str, ...], points: float, *wanted: str) -> dict[str, Plot]:
    """Figures of one pool whose runs of these kinds have the default's scores and so much."""
    records = experiment.records(1)
    [default] = [r for r in records if (r.kind, r.anchor, r.anchor_seed) == ("default", "DARE", 0)]
    scores = tuple(
        replace(score, value=score.value + points, item_scores=()) for score in default.scores
    )
    with create(folder / "s") as store:
        for r in records:
            store.append(replace(r, scores=scores) if r.kind in kinds else r)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            charts_module, "PLOT_BUILDERS", {name: PLOT_BUILDERS[name] for name in wanted}
        )
        return {plot.label: plot for plot in make_plots(experiment.read(folder / "s"))[0]}


def test_no_star_leaves_the_default_for_a_value_that_is_level(tmp_path: Path) -> None:
    figure = changed(tmp_path, ("sweep",), 0.0, "sensitivity")["sensitivity"].figure
    for axis, usual in zip(figure.axes, experiment.CONSTANTS.values(), strict=True):
        stars = [line for line in axis.get_lines() if line.get_marker() == "*"]
        assert {line.get_xdata()[0] for line in stars} == {usual}


def test_no_part_of_a_loss_is_drawn_as_a_part_of_a_gain(tmp_path: Path) -> None:
    """Anchors that score higher than the repair: what a control retains of that is nothing."""
    plots = changed(tmp_path, ("anchor",), 0.1, "directional", "deficit_gain")
    assert not plots["directional"].figure.axes[0].patches
    assert "the default repair gains nothing here" in words(plots["directional"])
    labels = [word for word in words(plots["deficit_gain"]).splitlines() if word.endswith("%")]
    assert labels and all(label.startswith("−") for label in labels)


def test_error_bars_only_where_there_are_seeds(plots: dict[str, Plot]) -> None:
    for axis in plots["directional"].figure.axes:
        several = sum(seeds > 1 for seeds, _ in experiment.CONTROLS.values())
        assert sum(isinstance(box, ErrorbarContainer) for box in axis.containers) == several


def test_nothing_leaves_the_canvas(plots: dict[str, Plot]) -> None:
    for plot in plots.values():
        box = plot.figure.get_tightbbox()
        width, height = plot.figure.get_size_inches()
        assert box.x0 > -0.02 and box.y0 > -0.02, plot.label
        assert box.x1 < width + 0.02 and box.y1 < height + 0.02, plot.label


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    """Of one anchor: all figures are written by the same lines."""
    small = experiment.read(experiment.make_store(tmp_path / "s", of_ties, pools=1))
    (first, _), (again, _) = make_plots(small), make_plots(small)
    assert len(first) == len(again) == 4
    for one, other in zip(first, again, strict=True):
        assert one.svg == other.svg
        assert "<dc:date>" not in one.svg


def of_ties(record: StoredRun) -> bool:
    return record.kind in ("anchor", "default") and record.anchor == "TIES"


def test_both_forms_are_written(plots: dict[str, Plot], tmp_path: Path) -> None:
    plots["ablation_bar"].write(tmp_path)
    ElementTree.parse(tmp_path / "ablation_bar.svg")
    picture = (tmp_path / "ablation_bar.png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert picture[:4] == b"\x89PNG" and width > height > 200


@pytest.mark.parametrize(
    ("kept", "drawn"),
    [
        (lambda r: r.kind == "expert", set()),
        (
            of_ties,
            {"domain_gain_matrix", "layerwise", "radar1", "submetric_heatmap"},
        ),
    ],
)
def test_what_was_not_run_is_not_drawn(tmp_path: Path, kept, drawn: set[str]) -> None:
    made, skipped = make_plots(
        experiment.read(experiment.make_store(tmp_path / "s", kept, pools=1))
    )
    assert {plot.label for plot in made} == drawn
    assert all(item.reason for item in skipped)
    for plot in made:
        ElementTree.fromstring(plot.svg)
