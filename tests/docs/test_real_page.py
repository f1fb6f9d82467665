"""docs/results/real.md and its tables are what the store beside them gives."""

from __future__ import annotations

import json
import lzma
import re
import tarfile
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from sigmerge.analysis import tables
from sigmerge.analysis.forms import markdown
from sigmerge.analysis.intervals import paired_intervals
from sigmerge.analysis.results import Results, results
from sigmerge.experiments.store import STORE, open_read_only

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE = (RESULTS / "real.md").read_text(encoding="utf-8")
ANALYSIS = (RESULTS / "real" / "analysis.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _stored(tmp_path_factory.mktemp("real"), f"{STORE}.xz")


def test_the_analysis_is_that_of_the_store(found: Results) -> None:
    builders = (tables.main_gain, tables.statements, tables.baselines, paired_intervals)
    for build in builders:
        for table in build(found):
            assert markdown(table) in ANALYSIS, table.label


def test_the_page_shows_tables_of_the_analysis() -> None:
    shown = [line for line in PAGE.splitlines() if line.startswith("| long-") and "anchor" in line]
    shown += [line for line in PAGE.splitlines() if re.match(r"\| (lot|lines|cabs|margin)", line)]
    shown += [line for line in PAGE.splitlines() if "| gain |" in line and "+" in line]
    assert len(shown) == 2 + 4 + 4
    assert set(shown) <= set(ANALYSIS.splitlines())


def test_the_page_counts_the_intervals(found: Results) -> None:
    [table] = paired_intervals(found)
    ends = [re.findall(r"[+−][0-9.]+", str(row[2])) for row in table.rows]
    above = sum(low[0] == "+" and float(low[1:]) > 0 for _, low, _ in ends)
    below = [
        f"{r[1]} {r[0]}" for r, (*_, high) in zip(table.rows, ends, strict=True) if "−" in high
    ]
    assert (len(ends), above) == (28, 24)
    assert below == ["dare_ties mild-0", "dare_ties long-1", "dare_ties mild-1"]
    text = " ".join(PAGE.split())
    assert f"of the 28 gains {above} have an interval above 0, three one below 0" in text
    assert "(DARE-TIES on mild-0, long-1 and mild-1)" in text


def test_the_seconds_of_the_trainings_are_those_of_the_records() -> None:
    seconds: dict[str, list[float]] = {}
    with tarfile.open(RESULTS / "real" / "logs.tar.xz") as records:
        for name in records.getnames():
            if re.match(r"[a-z]+-\d/training/", name) and (file := records.extractfile(name)):
                seconds.setdefault(name.split("/")[0], []).append(json.load(file)["seconds"])
    assert all(len(five) == 5 for five in seconds.values()) and len(seconds) == 4

    def spread(*pools: str) -> str:
        every = [s for pool in pools for s in seconds[pool]]
        return f"{min(every):.0f} to {max(every):.0f} s"

    text = " ".join(PAGE.split())
    assert f"{spread('long-0')} for 300 steps on long-0 and {spread('long-1')} on long-1" in text
    assert f"{spread('mild-0', 'mild-1')} for 150 steps" in text


def test_the_seconds_of_a_scored_checkpoint_are_those_of_the_records() -> None:
    with tarfile.open(RESULTS / "real" / "logs.tar.xz") as records:
        file = records.extractfile("evaluation/seconds.json")
        assert file is not None
        seconds = json.load(file)
    text = " ".join(PAGE.split())
    assert f"takes {median(seconds.values()):.0f} s (median of {len(seconds)})" in text


def _stored(folder: Path, name: str) -> Results:
    (folder / STORE).write_bytes(lzma.decompress((RESULTS / "real" / name).read_bytes()))
    with open_read_only(folder / STORE) as store:
        return results(*store.frames())


def _repaired(found: Results) -> dict[tuple[str, str, str], float]:
    """Macro-5 by pool, row and anchor, as the page's first table has it."""
    [table] = tables.main_gain(found)
    heads, *lines = [line.strip("| ").split(" | ") for line in markdown(table).splitlines()
                     if line.startswith("| ")]  # fmt: skip
    return {
        (pool, row, anchor): float(score)
        for pool, row, *scores in lines
        for anchor, score in zip(heads[2:], scores, strict=True)
        if row in ("anchor", "+ repair") and anchor in ("regmean", "task_arithmetic")
    }


def _read(records: tarfile.TarFile, name: str) -> Any:
    file = records.extractfile(name)
    assert file is not None
    return json.load(file)


def test_what_is_said_of_the_second_tunings_is_in_their_records(
    found: Results, tmp_path: Path
) -> None:
    text = " ".join(PAGE.split())
    before, again = _repaired(found), _repaired(_stored(tmp_path, "again.sqlite.xz"))
    assert max(abs(score - before[key]) for key, score in again.items()) <= 0.05
    strongest = [again[pool, "+ repair", "regmean"] for pool in ("long-0", "mild-0")]
    assert f"({strongest[0]:.2f} and {strongest[1]:.2f} on these trainings" in text
    with tarfile.open(RESULTS / "real" / "logs.tar.xz") as records:
        tuned, repairs, means, same = {}, [], {}, 0
        for pool in ("long-0", "mild-0", "long-1", "mild-1"):
            record = _read(records, f"again/tuned-{pool}-guided-24/tune.json")
            scores, calls = record["evaluation"]["tuned"], record["calls"]
            tuned[pool] = 100 * sum(scores.values()) / len(scores)
            winner = calls[record["chosen"]]
            means[pool] = sum(winner["weights"].values()) / len(winner["weights"])
            repairs += [100 * (winner["value"] - c["value"]) for c in calls if c.get("repair")]
            for domain in winner["weights"]:
                first = _read(records, f"{pool}/training/{domain}.json")
                second = _read(records, f"again/{pool}/training/{domain}.json")
                same += first["weights"] == second["weights"]
    assert f"the weights of {same} of the 20 experts are the same bits" in text
    assert (
        f"({tuned['long-0']:.2f} and 67.42)" in text and f"({tuned['mild-0']:.2f} and 66.27" in text
    )
    assert f"{means['long-0']:.2f} and {means['long-1']:.2f} on the long pools" in text
    assert f"{means['mild-0']:.2f} and {means['mild-1']:.2f} on the mild ones" in text
    assert (
        f"score {min(repairs):.1f} to {max(repairs):.1f} points below" in text
        and len(repairs) == 12
    )


def test_the_tunings_on_the_page_are_those_of_the_records() -> None:
    cells = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    rows = [(pool, *row.split("-"), *rest) for pool, row, *rest in cells if len(rest) == 6]
    rows = [row for row in rows if row[1] in ("tune", "random", "merge3", "regmean")]
    with tarfile.open(RESULTS / "real" / "logs.tar.xz") as records:
        names = {name for name in records.getnames() if name.endswith("tune.json")}
        assert len(rows) == len(names) == 18
        for number, (pool, method, budget, calls, plain, tuned, gain, chosen, seconds) in enumerate(
            rows
        ):
            kind = "guided" if method == "tune" else method
            folder = f"tuned-{pool}-{kind}-{budget}"
            record = _read(records, f"{folder if number < 12 else f'again/{folder}'}/tune.json")
            scores = record["evaluation"]
            numbers = [
                f"{100 * sum(scores[k].values()) / len(scores[k]):.2f}" for k in ("plain", "tuned")
            ]
            middle, low, high = (
                f"{100 * scores['gain'][k]:+.2f}" for k in ("difference", "low", "high")
            )
            assert [str(len(record["calls"])), *numbers] == [calls, plain, tuned]
            assert gain == f"{middle} [{low}, {high}]"
            winner = record["calls"][record["chosen"]]
            assert chosen == winner["anchor"] + (" + repair" if winner.get("repair") else "")
            assert seconds == f"{record['wall_seconds']:.0f}"
            assert record["calibration"]["gain"]["items"] == 1439


def test_the_tasks_are_those_of_the_records() -> None:
    records = json.loads((RESULTS / "real" / "tasks.json").read_text(encoding="utf-8"))
    shown = {"svamp_number": "SVAMP", "mawps_number": "MAWPS", "gsm8k_number": "GSM8K",
             "marc": "mARC", "belebele": "Belebele", "harmbench": "HarmBench",
             "xstest": "XSTest"}  # fmt: skip
    assert list(records) == [
        "reference", "math", "instruction", "coding", "multilingual", "safety", "regmean"
    ]  # fmt: skip
    for benchmark, title in shown.items():
        [row] = [line for line in PAGE.splitlines() if line.startswith(f"| {title} | ")]
        # The first measure is the one that counts.
        scores = [next(iter(r["benchmarks"][benchmark].values())) for r in records.values()]
        assert row.split(" | ", 2)[2] == " | ".join(f"{100 * s:.0f}" for s in scores) + " |"
        assert {r["items"][benchmark] for r in records.values()} == {100}
    seconds = [record["usage_of_run"]["seconds"] for record in records.values()]
    assert f"{min(seconds):.0f} to {max(seconds):.0f} s a model" in " ".join(PAGE.split())
