"""docs/claims.md has README's numbers, in README's order, and they are those of the stores."""

from __future__ import annotations

import json
import lzma
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl
import pytest

from sigmerge.lab.analysis.intervals import variant_intervals
from sigmerge.lab.analysis.results import Results, results
from sigmerge.lab.experiments.store import STORE, open_read_only

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"
README = (DOCS.parent / "README.md").read_text(encoding="utf-8")
PAGE = (DOCS / "claims.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"(?<![\w.-])[+−]?\d[\d,]*(?:\.\d+)*(?!\w)")
POOLS = ("nano-0", "nano-1", "nano-2", "harsh-3", "harsh-4", "nano-5", "harsh-6")


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^#+ ", text, flags=re.M)[1:]
    return {title: body for title, _, body in (part.partition("\n") for part in parts)}


def readme_numbers(text: str) -> list[str]:
    """Those of prose, tables and printed output, but none of code, addresses and marks of lists."""
    text = re.sub(r"^```(?:sh|yaml)\n.*?^```", "", text, flags=re.S | re.M)
    text = re.sub(r"^\d+\. ", "", text, flags=re.M)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]+`", "", text))
    return [number.rstrip(",") for number in NUMBER.findall(text)]


def rows(text: str) -> list[list[str]]:
    """Claim, figures, command, store, interval, what it does not say."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


CLAIMED = {title: rows(body) for title, body in sections(PAGE).items()}


def figures(title: str, claim: str) -> list[str]:
    """The figures of the row whose claim begins so."""
    [row] = [row for row in CLAIMED[title] if row[0].startswith(claim)]
    return row[1].split(" · ")


def numbers(given: Iterable[str]) -> list[float]:
    return [float(each.replace(",", "").replace("−", "-")) for each in given]


@pytest.mark.parametrize("title", sections(README))
def test_the_numbers_of_the_readme_are_the_figures_of_the_page(title: str) -> None:
    said = readme_numbers(sections(README)[title])
    assert said == [each for row in CLAIMED.get(title, []) for each in row[1].split(" · ")]


def test_every_claim_has_its_command_and_says_what_it_does_not_say() -> None:
    every = [row for claimed in CLAIMED.values() for row in claimed]
    assert len(every) > 40
    for row in every:
        assert len(row) == 6 and all(row), row
        assert row[2].startswith(("`sigmerge ", "`python -m ", "the same")), row
        links = re.findall(r"\]\(([^)#]+)\)", row[3])
        assert links or "the same" in row[3] or "none" in row[3] or "calibration" in row[3], row
        assert [link for link in links if not (DOCS / link).exists()] == []
    assert not CLAIMED["What README claims"]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("grid")
    packed = (RESULTS / "embedded/grid.sqlite.xz").read_bytes()
    (folder / STORE).write_bytes(lzma.decompress(packed))
    with open_read_only(folder / STORE) as store:
        return results(*store.frames())


def near(values: Iterable[float]) -> Any:
    """As printed with two decimals, a half either way."""
    return pytest.approx(list(values), abs=0.00501)


TUNED = {
    "task arithmetic, 0.4 each": "plain-task_arithmetic",
    "with the paper's repair": "paper-task_arithmetic",
    "its genetic algorithm": "merge3-240",
    "the same in the box": "merge3-240-box4",
    "`sigmerge tune`, 8": "tune-8",
    "24 calls": "tune-24",
}
EXPERTS, CALL, TITLE = 3_000, 600, "The strongest merge of a pool"


@pytest.fixture(scope="module")
def tuning() -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(
        (RESULTS / "embedded/tuning.json").read_text()
    )
    return found


@pytest.mark.parametrize("claim", TUNED)
def test_a_row_of_the_tuning_is_that_of_the_store(
    claim: str, tuning: dict[str, dict[str, dict[str, Any]]]
) -> None:
    row = tuning[TUNED[claim]]
    calls, answers, *macro, mean = numbers(figures(TITLE, claim))
    found = [100 * row[pool]["macro"] for pool in POOLS]
    assert {row[pool]["calls"] for pool in POOLS} == {calls}
    counted = TUNED[claim].startswith(("paper", "plain"))  # the experts are among the calls
    assert answers == CALL * calls + (0 if counted else EXPERTS)
    assert macro == near(found) and [mean] == near([fmean(found)])
    assert {row[pool]["commit"] for pool in POOLS} == {"33f71b2"}


def test_where_evolution_is_ahead_is_counted(tuning: dict[str, dict[str, dict[str, Any]]]) -> None:
    def ahead(of: str, row: str) -> int:
        return sum(tuning[row][pool]["macro"] > tuning[of][pool]["macro"] for pool in POOLS)

    counts = [
        8, ahead("tune-8", "merge3-240"), len(POOLS), 24, ahead("tune-24", "merge3-240"),
        ahead("tune-8", "merge3-240-box4"), ahead("tune-24", "merge3-240-box4"),
    ]  # fmt: skip
    assert numbers(figures(TITLE, "pools where the evolution")) == counts


def test_merge3_is_that_of_the_grid(grid: Results) -> None:
    calls, answers, *macro = numbers(figures(TITLE, "MERGE³ after its library"))
    runs = grid.checkpoints.filter(method="merge3").group_by("pool").agg(pl.col("macro").mean())
    found = {row["pool"]: 100 * row["macro"] for row in runs.to_dicts()}
    others = [(POOLS.index(pool), score) for pool, score in found.items()]
    assert len(others) == 4
    assert [macro[i] for i, _ in others] == near(score for _, score in others)
    tables_of_all = (RESULTS / "nano-suite/analysis.md").read_text()
    [row] = re.findall(r"\| Macro-5 \| nano-2 \| merge3 \|.*", tables_of_all)
    assert macro[2] == float(row.split(" | ")[6])
    spent = grid.runs.filter(method="merge3")
    assert set(spent["evaluation_calls"]) == {calls} and set(spent["spent_labelled"]) == {answers}
    per = figures(TITLE, "answers of a call")
    assert numbers(per) == [CALL, 100, EXPERTS, answers - 100 * calls]


@pytest.mark.parametrize("claim", ["linear", "task_arithmetic", "ties", "dare_linear", "dare_ties",
                                   "fisher", "regmean"])  # fmt: skip
def test_the_demo_is_the_grid_on_the_shipped_pool(claim: str, grid: Results) -> None:
    title = {"linear": "linear soup", "task_arithmetic": "task arithmetic", "ties": "TIES",
             "dare_linear": "DARE", "dare_ties": "DARE-TIES", "fisher": "Fisher",
             "regmean": "RegMean"}[claim]  # fmt: skip
    [row] = [row for row in CLAIMED["The demo"] if row[0] == title]
    pairs = grid.pairs.filter(pool="nano-0", anchor=claim, anchor_seed=0).to_dicts()
    keys = ("before", "after", "gain", "gap_before", "gap_after")
    assert numbers(row[1].split(" · ")) == near(100 * pairs[0][key] for key in keys)


def test_the_first_run_is_the_grids_task_arithmetic(grid: Results) -> None:
    made = grid.main_by_domain.filter(pool="nano-0", anchor="task_arithmetic")
    assert made.height == 5
    for row in made.to_dicts():
        shown = numbers(figures("A first repair", row["domain"]))
        assert shown == near(100 * row[key] for key in ("before", "after", "gain"))


def test_uniform_capacity_is_that_of_both_analyses(grid: Results) -> None:
    found = []
    for page in ("nano-suite", "real"):
        text = (RESULTS / page / "analysis.md").read_text()
        [line] = re.findall(r"\| uniform capacity is worse than .*", text)
        found.append(numbers(line.split(" | ")[2].split(", ")))
    pools, worst, embedded, real = numbers(figures("What it does", "pools where"))
    assert [len(each) for each in found] == [embedded, real] and pools == embedded + real
    assert -min(value for each in found for value in each) == worst
    [table] = variant_intervals(grid)
    best = [str(row[3]) for row in table.rows if row[2] == "uniform capacity"]
    assert max(best) in PAGE


def test_the_repair_hurts_as_many_anchors_as_it_says(grid: Results) -> None:
    harsh = [row for pool in ("harsh-3", "harsh-4") for row in grid.pairs.filter(
        pool=pool, anchor_seed=0).to_dicts()]  # fmt: skip
    hurt = [row for row in harsh if row["gain"] < 0]
    assert [len(hurt), len(harsh)] == numbers(figures("The demo", "anchors that the repair"))


def test_the_real_tunings_are_those_of_the_records() -> None:
    def score(folder: str, which: str) -> float:
        with tarfile.open(RESULTS / "real/logs.tar.xz") as records:
            file = records.extractfile(f"{folder}/tune.json")
            assert file is not None
            scores = json.load(file)["evaluation"][which]
        return 100 * fmean(scores.values())

    pools = ("long-0", "mild-0")
    wanted = {
        "real models": ("again/tuned-{}-guided-24", "tuned"),
        "RegMean with no call": ("again/tuned-{}-guided-24", "plain"),
        "evolution over": ("tuned-{}-merge3-240", "tuned"),
        "`tune` without RegMean": ("tuned-{}-guided-24", "tuned"),
    }
    for claim, (folder, which) in wanted.items():
        shown = [each for each in numbers(figures(TITLE, claim)) if 60 < each < 80]
        assert shown == near(score(folder.format(pool), which) for pool in pools), claim


FASTER = re.compile(r"^\| (linear|task_arithmetic|ties|dare_ties|ties, e832815) \| sigmerge \|(.*)")


def test_the_ranges_beside_mergekit_are_those_of_the_tables() -> None:
    page = (RESULTS / "dense-merge.md").read_text().splitlines()
    faster: dict[str, list[float]] = {}
    smaller: list[float] = []
    for line in page:
        if found := FASTER.match(line):
            ratios = [float(each) for each in re.findall(r"\| (\d+\.\d)×", found[2])]
            faster.setdefault(found[1].split(",")[0], []).append(ratios[0])
            smaller.append(ratios[2])
    shown = {"linear": "mergekit's wall time", "task_arithmetic": "task arithmetic",
             "dare_ties": "DARE-TIES", "ties": "TIES"}  # fmt: skip
    for method, claim in shown.items():
        ratios = faster[method]
        assert len(ratios) == int(figures("Why", "machines on which")[0])
        assert numbers(figures("Why", claim)) == [min(ratios), max(ratios)]
    parts = numbers(figures("Why", "memory, of"))
    assert parts == [1, round(min(smaller)), 1, round(max(smaller))]


def test_the_first_runs_beside_mergekit_are_those_of_the_table() -> None:
    first, _, _ = (RESULTS / "dense-merge.md").read_text().partition("\n## ")
    cells = [line.strip("| ").split(" | ") for line in first.splitlines()]
    seconds: dict[str, dict[str, float]] = {}
    method = ""
    for row in cells:
        if len(row) > 3 and row[1] == "sigmerge":
            method = row[0]
        elif row[0] in ("mergekit", "sigmerge, first run"):
            seconds.setdefault(method, {})[row[0]] = float(row[1])
    ratios = [
        seconds[method]["mergekit"] / seconds[method]["sigmerge, first run"]
        for method in ("linear", "task_arithmetic", "dare_ties", "ties")
    ]
    assert numbers(figures("Why", "first run")) == [round(ratio, 1) for ratio in ratios]


GPU = re.compile(
    r"\| (ties|repair|linear|task_arithmetic|dare_\w+) \| ([\d.]+) \| ([\d.]+) \| .* \| yes \|"
)


def test_wudi_is_that_of_its_page() -> None:
    text = (RESULTS / "methods.md").read_text()
    [shown] = figures(TITLE, "WUDI as published")
    assert f"`wudi`, `step: absolute` (as published) | 1: **{shown}** |" in text


def test_the_memory_is_that_of_the_scaling_tables() -> None:
    text = (RESULTS / "scaling.md").read_text()
    peaks = []
    for heading, place in (("### Since then\n", 3), ("## 2 cores\n", 4)):
        table = text.partition(heading)[2].partition("\nWall seconds")[0]
        rows = re.findall(r"^\| (?:\w*linear|task_\w+|\w*ties|repair) \| (.*)", table, re.M)
        peaks += [int(row.split(" | ")[place]) for row in rows]
    assert len(peaks) == 10
    assert [min(peaks), max(peaks)] == numbers(figures("Why", "memory of merges"))


def test_scaling_and_the_gpu_are_their_tables() -> None:
    scaling = (RESULTS / "scaling.md").read_text().partition("### Since then")[2]
    seconds = {}
    for method in ("linear", "repair"):
        row = re.findall(rf"^\| {method} \| (.*)", scaling, re.M)[0].split(" | ")
        seconds[method] = [float(cell.split()[0]) for cell in row[1:3]]
    second, first = zip(seconds["linear"], seconds["repair"], strict=True)
    shown = numbers(figures("Measured", "cores; GB"))
    assert shown[2:] == [*second, *first]
    assert f"{shown[1]} GB" in scaling
    ratios: dict[bool, list[float]] = {}
    for line in (RESULTS / "gpu.md").read_text().splitlines():
        if found := GPU.match(line):
            plain = found[1] in ("linear", "task_arithmetic")
            ratios.setdefault(plain, []).append(float(found[3]) / float(found[2]))
    few, many, _, least, most = numbers(figures("Measured", "GPU time"))
    assert [few, many] == [round(min(ratios[False]), 2), round(max(ratios[False]), 2)]
    assert [least, most] == [round(min(ratios[True]), 2), round(max(ratios[True]), 2)]
    sizes = re.findall(r"(\d+) B", (DOCS / "scale.md").read_text())
    assert {str(int(each)) for each in numbers(figures("Measured", "parameters of the pools"))} <= {
        *sizes
    }


def test_the_recipes_are_counted_as_their_page_does() -> None:
    text = (RESULTS / "recipes.md").read_text()
    shown = figures("Why", "recipes that both")
    counted = (rf"and {shown[0]} agree", rf"within {shown[1]} units in the last place",
               rf"to {shown[2]}%", rf"all but {shown[3]}%")  # fmt: skip
    assert all(re.search(each, text) for each in counted)
    mergekit = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(mergekit) == int(figures("Why", "methods of mergekit")[0])
