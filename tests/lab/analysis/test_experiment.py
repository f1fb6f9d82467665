"""What `sigmerge analyze` writes: one folder with tables, figures and a page."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from sigmerge.lab.analysis import experiment as written
from sigmerge.lab.analysis.derived import Skipped
from sigmerge.lab.analysis.experiment import Analysis, write_analysis
from sigmerge.lab.analysis.results import Results
from tests.lab.analysis import experiment

NAMED = [label for _, figures, tables in written.PAGE_SECTIONS for label in (*figures, *tables)]


def test_every_table_and_figure_has_its_place_on_the_page(analysis: Analysis) -> None:
    labels = {item.label for item in (*analysis.tables, *analysis.plots)}
    homeless = {label for label in labels if not written._named(label, NAMED)}
    assert homeless == {"ablation"}  # the short form of ablation_full


def test_the_page_is_one_file_with_everything(results: Results, analysis: Analysis) -> None:
    page = written.page(results, analysis, "Two pools <b>")
    assert "Two pools &lt;b&gt;" in page and "<b>" not in page.split("<style>")[0]
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:|//)", page)
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert [base64.b64decode(p).decode() for p in pictures] == [
        plot.svg
        for _, figures, _ in written.PAGE_SECTIONS
        for plot in analysis.plots
        if written._named(plot.label, figures)
    ]
    gain = 100 * results.main["gain"].mean()
    assert f"{gain:+.2f}" in page and "10 of 10" in page
    for table in analysis.tables:
        if table.label != "ablation":
            assert f"<code>{table.label}</code>" in page
    assert "Not in this experiment" not in page


def test_colours_say_which_way_a_score_went(results: Results, analysis: Analysis) -> None:
    """A rise is green, a fall red; a gap that falls, a name and a list of numbers are neither."""
    page = written.page(results, analysis, "x")
    gains = {table.label: table for table in analysis.tables}["main_gain"]
    shown = [row[2:] for row in gains.printed() if row[1] == "gain"]
    for cell in (cell for row in shown for cell in row):
        kind = "up" if cell[0] == "+" else "down"
        assert f'<td class="{kind}">{cell}</td>' in page
    reduction = {t.label: t for t in analysis.tables}["residual_gap"].printed()[0][3]
    assert reduction[0] == "−" and f'<td class="">{reduction}</td>' in page
    assert '<td class="words">+ repair</td>' in page
    assert '<td class="long">−6.46, −5.32, −10.38</td>' in page


def test_reasons_are_on_the_page(results: Results, analysis: Analysis) -> None:
    less = Analysis(analysis.tables[:1], [], [Skipped("sens", "the store holds no sweep")])
    page = written.page(results, less, "x")
    assert "Not in this experiment" in page and "the store holds no sweep" in page
    assert "`sens`: the store holds no sweep" in written.analysis_text(results, less, "x")


def test_the_folder(tmp_path: Path) -> None:
    kept = ("expert", "anchor", "default")
    small = experiment.make_store(
        tmp_path / "s", lambda r: r.kind in kept and r.anchor in ("", "TA", "TIES"), 1
    )
    found = write_analysis(experiment.read(small), tmp_path / "out", "Small")
    names = {
        str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()
    }
    expected = {"analysis.md", "index.html"}
    expected |= {
        f"tables/{t.label}.{suffix}" for t in found.tables for suffix in ("md", "csv", "tex")
    }
    expected |= {f"figures/{p.label}.{suffix}" for p in found.plots for suffix in ("svg", "png")}
    assert names == expected
    assert {"baselines", "directional", "sensitivity"} <= {item.label for item in found.skipped}
    text = (tmp_path / "out/analysis.md").read_text()
    assert "2 of 2" in text and "](figures/motivation.svg)" in text


def test_a_store_without_repairs_has_no_headline(tmp_path: Path) -> None:
    bare = experiment.make_store(tmp_path / "s", lambda r: r.kind in ("expert", "anchor"), pools=1)
    found = experiment.read(bare)
    assert written.headline(found) == []
    assert "anchors" in written.page(found, Analysis([], [], []), "Bare")


@pytest.mark.parametrize(("value", "shown"), [(0.0674, "+6.74"), (-0.0012, "−0.12")])
def test_points(value: float, shown: str) -> None:
    assert written.printed(value, "points") == shown
