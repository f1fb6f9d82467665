"""The Python interface as its page describes it: the page runs, the types hold, results display."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import sigmerge
from sigmerge import api, results
from sigmerge.checkpoints.verify import Finding, Report
from sigmerge.evaluation.run import Result
from sigmerge.jobs import options
from sigmerge.lab.experiments import runner
from sigmerge.lab.experiments.analyze import Analyzed
from sigmerge.lab.experiments.anchors import Ranked, RankedAnchor, RankedPool
from sigmerge.nano.files import POOL
from sigmerge.probing.generate import Usage
from sigmerge.records import GuardVerdict, Part, Winner
from tests.method_stubs import table

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/python-api.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the page's code defines, run from top to bottom."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "pool").symlink_to(POOL)
    scope: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in BLOCKS:
            exec(block, scope)
    return scope | {"folder": folder}


def test_the_page_runs(ran: dict[str, Any]) -> None:
    assert ran["decided"].deficit == pytest.approx({"math": 0.3, "coding": 0.3})
    assert ran["lost"].share == pytest.approx({"math": 0.5, "coding": 0.5})
    assert ran["profile"].capacity == ran["decided"].capacity
    assert ran["planned"].evaluation_calls == 4
    assert not (ran["folder"] / "wrong").exists() and not (ran["folder"] / "new").exists()


def test_the_page_names_every_export() -> None:
    assert sorted(sigmerge.__all__) == sigmerge.__all__
    assert set(dir(sigmerge)) == {*sigmerge.__all__, "__version__"}
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    for name in sigmerge.__all__:
        assert callable(getattr(sigmerge, name))
        assert re.search(rf"`{name}\(", rows), name


def test_the_page_has_the_methods_as_they_are() -> None:
    assert table() in PAGE, "run python -m tests.method_stubs"


def test_verbs_have_typed_keywords() -> None:
    """No verb takes arbitrary keywords: each is spelt out, or named in Keywords."""
    for name, verb in vars(api).items():
        public = inspect.isfunction(verb) and not name.startswith("_") and name != "verb"
        if not public or verb.__module__ != api.__name__:
            continue
        signature = inspect.signature(verb)
        assert signature.return_annotation is not signature.empty, name
        for parameter in signature.parameters.values():
            assert parameter.annotation is not parameter.empty, (name, parameter)
            if parameter.kind is parameter.VAR_KEYWORD:
                assert parameter.annotation == "Unpack[Keywords]", (name, parameter)


USER = """
from pathlib import Path
import sigmerge

recipe = {"merge_method": "linear", "models": [{"model": Path("a")}]}
merged = sigmerge.merge(recipe, "out", threads=2)
reveal_type(merged.plan)
reveal_type(sigmerge.profile("recipe.yaml").capacity)
reveal_type(sigmerge.run(recipe, Path("out")).evaluation)
reveal_type(sigmerge.merge.plan(recipe, "out", threads=2))
plan = sigmerge.Pool("reference", math="math").plan(sigmerge.Ties(density=0.2))
reveal_type(plan.save("out"))
sigmerge.Ties(densty=0.2)
sigmerge.merge(recipe, "out", thread=2)
sigmerge.merge.plan(recipe)
sigmerge.marge(recipe, "out")
"""


def test_a_users_type_checker_sees_the_types(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(USER)
    ran = subprocess.run(  # with the project's settings and cache: `make lint` has filled it
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(file)],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    lines = [line.split(": ", 1)[1] for line in ran.stdout.splitlines() if ": " in line]
    text = "\n".join(lines)
    assert 'Revealed type is "sigmerge.records.MergePlan"' in text, ran.stdout
    assert 'Revealed type is "tuple[float, ...]"' in text.replace("builtins.", "")
    assert 'Revealed type is "sigmerge.records.PairedScores | None"' in text
    assert 'Revealed type is "sigmerge.jobs.steps.Description"' in text
    assert 'Revealed type is "sigmerge.results.Merged"' in text
    assert [line for line in lines if line.startswith("error")] == [
        'error: Unexpected keyword argument "densty" for "Ties"; did you mean "density"?  '
        "[call-arg]",
        'error: Unexpected keyword argument "thread" for "__call__" of "Verb"; did you mean '
        '"threads"?  [call-arg]',
        'error: Missing positional argument "out" in call to "plan" of "Verb"  [call-arg]',
        'error: Module has no attribute "marge"; maybe "merge"?  [attr-defined]',
    ]


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src/sigmerge/py.typed").is_file()
    assert 'packages = ["src/sigmerge"]' in (ROOT / "pyproject.toml").read_text()


class Reader(HTMLParser):
    """The words of a display, and the document in its frame."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.frame = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.frame = dict(attributes).get("srcdoc") or self.frame

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def displayed(result: Any) -> Reader:
    """What the frame of a notebook shows."""
    outside = Reader(result._repr_html_())
    assert outside.tags == ["iframe"]
    return Reader(outside.frame)


def test_a_repair_displays_its_figures(ran: dict[str, Any]) -> None:
    shown = displayed(ran["repaired"])
    words = " ".join(shown.words)
    assert str(ran["folder"] / "repaired") in words and "checkpoint" in words
    for title in ("Conflict over depth", "Capacity over depth", "Deficits", "Claimed coordinates"):
        assert title in shown.words
    assert shown.tags.count("figure") == shown.tags.count("svg") >= 6
    claimed = f"{sum(sum(layer) for layer in ran['decided'].claimed):,} coordinates"
    assert claimed in words


def test_a_merge_displays_what_it_wrote(ran: dict[str, Any]) -> None:
    shown = displayed(ran["merged"])
    assert "figure" not in shown.tags and shown.tags.count("tr") == 6


def test_profile_and_deficits_display_their_numbers(ran: dict[str, Any]) -> None:
    capacity = displayed(ran["profile"])
    assert capacity.tags.count("figure") == 2 and "conflict S̄" in capacity.words
    lost = displayed(ran["lost"])
    assert {"30.00", "0.500", "math"} <= set(lost.words)


def test_text_from_a_recipe_is_escaped() -> None:
    deficits = results.Deficits(
        domains=("<b>",), experts={}, anchor={"<b>": 0.5}, deficit={"<b>": 0.1}, share={"<b>": 1.0},
        missing={"<b>": ("<i>",)},
    )  # fmt: skip
    shown = displayed(deficits)
    assert "b" not in shown.tags and "i" not in shown.tags and "<b>" in shown.words


def rows(result: Any) -> list[str]:
    """The rows of a display's tables, cells joined by |; all is escaped in this frame."""
    document = Reader(result._repr_html_()).frame
    return [
        "|".join(unescape(cell) for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", row))
        for row in re.findall(r"<tr>(.*?)</tr>", document)
    ]


def test_an_evaluation_displays_domains_benchmarks_and_what_is_missing() -> None:
    used = Usage()
    result = Result(
        domains={"math": 0.5}, macro=0.25, benchmarks={"<gsm>": {"strict": 0.125}},
        items={"<gsm>": 1200}, missing={"coding": ["humaneval"]}, judges=[], unparsed={},
        item_scores={}, checkpoint="c", suite="own", split="all", limit=None, items_sha256="0",
        settings_sha256="0", absent={"humaneval": "no <file>"}, reused_items=0, usage_of_run=used,
        usage_of_results=used, sandbox=None,
    )  # fmt: skip
    assert rows(result) == [
        "all split of own|score", "math|50.00", "macro|25.00",
        "benchmark|items|metric|score", "<gsm>|1,200|strict|12.50",
    ]  # fmt: skip
    shown = displayed(result)
    assert {"coding: without humaneval", "no <file>"} <= set(shown.words)
    assert "gsm" not in shown.tags


def test_a_search_displays_its_winner() -> None:
    result = results.SearchResult(
        out="o", winner="o/winner", operator="ties", experts=("math", "<coding>"), settings={},
        evaluation_calls=1024, ability_runs=2, labelled_items={}, items_per_call={},
        candidates_in_flight=1, best_by_generation=(0.5,), test={"math": 0.75},
        held_out_error={}, replayed=12, wall_seconds=3.25, peak_memory_bytes=0,
        best=Winner(
            candidate=3, estimate=0.5, estimates={"math": 0.5, "<coding>": 0.25},
            settings={"math": {"weight": 0.5, "density": 0.25}, "<coding>": {"weight": 1.0}},
        ),
    )  # fmt: skip
    assert rows(result) == [
        "search|", "winner|o/winner", "operator|ties", "evaluation calls|1,024 (12 replayed)",
        "time|3.2 s",
        "domain|estimate|unseen items", "math|50.00|75.00", "<coding>|25.00|–",
        "expert|weight|density", "math|0.5000|0.2500", "<coding>|1.0000|–",
    ]  # fmt: skip
    assert "coding" not in displayed(result).tags


def test_captures_and_reports_display_a_row_each() -> None:
    captured = results.Captured(
        expert="<math>", kind="features", exemplars=1000, peak_memory_bytes=0, key="k",
        folder="f", state="captured",
    )  # fmt: skip
    assert rows(results.Captures([captured]))[1:] == ["<math>|features|1,000|captured|f"]
    good = Report(Path("a"), ("headers", "recomputed"), {"inputs": "the record lists none"}, (),
                  {"recomputed": "4 of 9 blocks"})  # fmt: skip
    bad = Report(Path("b"), ("digests",), {}, (Finding("digests", "<w>", "is missing"),))
    both = results.Reports([good, bad])
    assert not both.ok and results.Reports([good]).ok
    assert rows(both)[1:] == [
        "a|headers|ok|", "a|recomputed|ok|4 of 9 blocks",
        "a|inputs|not checked|the record lists none", "b|digests|PROBLEM|",
    ]  # fmt: skip
    assert "b: digests: <w>: is missing" in displayed(both).words


def test_anchors_and_results_side_by_side_display_their_scores() -> None:
    ranked = Ranked(
        pools=(RankedPool(pool="<p>", anchors=(
            RankedAnchor(anchor="ties", scores={"math": 0.5}, statistics={"macro": 0.5}),)),),
        evidence={},
    )  # fmt: skip
    assert rows(ranked) == ["anchors of <p>|math|macro", "ties|50.00|50.00"]
    row = results.AggregatedRow(
        file="<a>.json", checkpoint="c", suite="s", split="all", limit=None, judges=(),
        domains={"math": 0.5}, macro=0.5, submetrics={}, residual_gaps={},
    )  # fmt: skip
    alone = results.Aggregated(rows=(row,), experts={})
    assert rows(alone) == ["result|math|macro", "<a>.json|50.00|50.00"]
    lacking = row.model_copy(update={"residual_gaps": {"math": 0.125}})
    beside = results.Aggregated(rows=(lacking,), experts={"math": {"math": 0.625}})
    assert rows(beside)[2:] == ["residual gap|math", "<a>.json|12.50"]


def test_an_analysis_displays_its_page_in_a_frame(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>tables</h1>")
    found = Analyzed(out=str(tmp_path), headline={}, statements=(), tables=(), figures=(),
                     skipped={})  # fmt: skip
    assert displayed(found).words == ["tables"]


def test_other_records_display_their_names_and_values() -> None:
    guard = GuardVerdict(verdict="<worse>", before=0.5, scores={"math": 0.25}, kept="anchor")
    shown = Reader(guard._repr_html_())
    assert shown.words == [
        "verdict", "<worse>", "before", "0.5", "scores", '{"math": 0.25}', "kept", "anchor",
    ]  # fmt: skip
    assert shown.tags.count("tr") == 4 and "worse" not in shown.tags
    long = guard.model_copy(update={"verdict": "x" * 1000})
    assert Reader(long._repr_html_()).words[1] == "x" * 200 + " …"


DISPLAYED = (results, options, sys.modules[Result.__module__], sys.modules[Analyzed.__module__],
             sys.modules[Ranked.__module__], runner)  # fmt: skip


def test_every_verb_returns_what_a_notebook_displays() -> None:
    kinds = {name: kind for module in DISPLAYED for name, kind in vars(module).items()}
    returned = {
        inspect.signature(verb).return_annotation.removeprefix("Job[")
        for name, verb in vars(api).items()
        if name in sigmerge.__all__ and inspect.isfunction(verb) and name != "report"
    }
    assert len(returned) >= 14
    for name in returned:
        each = name.removeprefix("tuple[").rstrip(",.] ")
        assert hasattr(kinds[each], "_repr_html_"), name


def test_a_run_whose_folder_is_gone_still_displays(tmp_path: Path) -> None:
    gone = results.DemoResult(rows=(), page="", out=str(tmp_path / "<gone>"))
    assert "holds no report.html any more" in gone._repr_html_()
    assert "&lt;gone&gt;" in gone._repr_html_()


def test_every_result_is_plain_values_too() -> None:
    kinds = [kind for kind in vars(results).values() if inspect.isclass(kind)]
    assert all(hasattr(kind, "as_json") for kind in kinds if issubclass(kind, Part))
