"""docs/results/real.md and its tables are what the store beside them gives."""

from __future__ import annotations

import json
import lzma
import re
import tarfile
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from sigmerge.lab.analysis import paper_tables
from sigmerge.lab.analysis.intervals import (
    Comparison,
    Gain,
    gains,
    paired_intervals,
    variant_intervals,
)
from sigmerge.lab.analysis.results import Results, results
from sigmerge.lab.experiments.store import STORE, open_read_only
from sigmerge.nano.files import RECIPES
from sigmerge.operators.cat import Cat
from sigmerge.pages.table import Table, markdown

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE = (RESULTS / "real.md").read_text(encoding="utf-8")
ANALYSIS = (RESULTS / "real" / "analysis.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _stored(tmp_path_factory.mktemp("real"), f"{STORE}.xz")


@pytest.fixture(scope="module")
def repairs(found: Results) -> Table:
    [table] = paired_intervals(found)
    return table


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _stored(tmp_path_factory.mktemp("later"), "later.sqlite.xz")


@pytest.fixture(scope="module")
def settings(later: Results) -> Table:
    [table] = variant_intervals(later)
    return table


def test_the_analysis_is_that_of_the_store(found: Results, repairs: Table) -> None:
    builders = (paper_tables.main_gain, paper_tables.statements, paper_tables.baselines)
    for table in (*(table for build in builders for table in build(found)), repairs):
        assert markdown(table) in ANALYSIS, table.label


def test_the_page_shows_tables_of_the_analysis() -> None:
    shown = [line for line in PAGE.splitlines() if line.startswith("| long-") and "anchor" in line]
    shown += [line for line in PAGE.splitlines() if re.match(r"\| (lot|lines|cabs|margin)", line)]
    shown += [line for line in PAGE.splitlines() if "| gain |" in line and "+" in line]
    assert len(shown) == 2 + 4 + 4
    assert set(shown) <= set(ANALYSIS.splitlines())


def test_the_page_counts_the_intervals(repairs: Table) -> None:
    ends = [re.findall(r"[+−][0-9.]+", str(row[2])) for row in repairs.rows]
    above = sum(low[0] == "+" and float(low[1:]) > 0 for _, low, _ in ends)
    below = [
        f"{r[1]} {r[0]}" for r, (*_, high) in zip(repairs.rows, ends, strict=True) if "−" in high
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
    [table] = paper_tables.main_gain(found)
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


def test_the_winners_of_evolution_stand_at_the_wall_of_its_box() -> None:
    largest = []
    with tarfile.open(RESULTS / "real" / "logs.tar.xz") as records:
        for pool in ("long-0", "mild-0"):
            calls = (record := _read(records, f"tuned-{pool}-merge3-240/tune.json"))["calls"]
            start = max(calls[0]["weights"].values())
            every = max(max(call["weights"].values()) for call in calls)
            assert 2.4 * start < every <= 2.5 * start == 0.75
            largest.append(max(calls[record["chosen"]]["weights"].values()))
    text = " ".join(PAGE.split())
    assert f"(largest weights {largest[0]:.3f} and {largest[1]:.3f})" in text


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


def test_our_settings_are_those_of_their_store(
    found: Results, later: Results, settings: Table
) -> None:
    cells: dict[str, dict[str, str]] = {pool: {} for pool in later.pools}
    for row in later.main.to_dicts():
        cells[row["pool"]] |= {"task_arithmetic": _percent(row["before"])}
        cells[row["pool"]] |= {"+ repair": _percent(row["after"])}
    for row in later.variants("ours").to_dicts():
        cells[row["pool"]][row["setting"]] = _percent(row["after"])
    for pool, _, setting, gain, *_ in settings.rows:
        cells[str(pool)][f"{setting} − repair"] = str(gain)
    heads = ("task_arithmetic", "+ repair", "replace", "calibrated",
             "replace − repair", "calibrated − repair")  # fmt: skip
    lines = PAGE.splitlines()
    start = lines.index(f"| pool | {' | '.join(heads)} |") + 2
    assert lines[start : start + 4] == [
        f"| {pool} | {' | '.join(row[head] for head in heads)} |" for pool, row in cells.items()
    ]
    replaced, calibrated = (
        [_numbers(row[f"{setting} − repair"]) for row in cells.values()]
        for setting in ("replace", "calibrated")
    )
    assert all(low > 0 for _, low, _ in (*replaced, *calibrated))
    text = " ".join(PAGE.split())
    assert (
        f"on all four pools, `replace` by {min(replaced)[0]:.2f} to {max(replaced)[0]:.2f} points, "
        f"`calibrated` by {min(calibrated)[0]:.2f} to {max(calibrated)[0]:.2f}."
    ) in text
    before, after = _repaired(found), _repaired(later)
    moved = max(abs(score - before[key]) for key, score in after.items())
    assert f"its repair score within {moved:.2f} points of the first table" in text
    behind = [before[pool, "+ repair", "regmean"] - float(cells[pool][setting])
              for pool in cells for setting in ("replace", "calibrated")]  # fmt: skip
    assert f"stays {int(10 * min(behind)) / 10} points or more below RegMean" in text


def test_what_is_said_of_one_setting_against_the_other_is_in_the_store(later: Results) -> None:
    rows = {(r["pool"], r["setting"]): r["run"] for r in later.variants("ours").to_dicts()}
    ahead = {
        pool: _printed(_gain(later, rows[pool, "calibrated"], rows[pool, "replace"])[0])
        for pool in later.pools
    }
    assert ahead["long-0"][0] == ahead["long-1"][0] and ahead["long-0"][1] > 0 < ahead["long-1"][1]
    assert ahead["mild-0"][2] < 0 and ahead["mild-1"][1] < 0 < ahead["mild-1"][2]
    assert (
        f"`calibrated` is {ahead['long-0'][0]:.2f} ahead of `replace` on both long pools and "
        f"{-ahead['mild-0'][0]:.2f} behind it on mild-0, outside of the intervals; on mild-1 the "
        "interval holds 0."
    ) in " ".join(PAGE.split())


def test_what_is_said_of_domains_under_our_settings_is_in_the_store(
    later: Results, settings: Table
) -> None:
    by_domain = {
        (str(pool), str(setting)): {
            domain: _numbers(str(gain)) for domain, gain in zip(later.domains, gains, strict=True)
        }
        for pool, _, setting, _, *gains in settings.rows
    }
    text = " ".join(PAGE.split())
    replaced = [by_domain[pool, "replace"] for pool in later.pools]
    for domain in ("math", "instruction", "coding", "safety"):
        assert all(row[domain][1] > 0 for row in replaced), domain
    first, *others = [row["multilingual"] for row in replaced]
    assert first[2] < 0 and all(low < 0 < high for _, low, high in others)
    assert f"multilingual loses {-first[0]:.2f} on {later.pools[0]}" in text

    gained, lost = (
        {domain: {pool: f"{abs(by_domain[pool, 'calibrated'][domain][0]):.2f}"
                  for pool in later.pools if outside(by_domain[pool, "calibrated"][domain])}
         for domain in later.domains}
        for outside in (lambda g: g[1] > 0, lambda g: g[2] < 0)
    )  # fmt: skip
    every, long, mild = set(later.pools), {"long-0", "long-1"}, {"mild-0", "mild-1"}
    assert {d: set(pools) for d, pools in gained.items() if pools} == {
        "math": every, "safety": every, "coding": long
    }  # fmt: skip
    assert {d: set(pools) for d, pools in lost.items() if pools} == {
        "multilingual": every, "coding": mild, "instruction": {"mild-0"}
    }  # fmt: skip
    tongues, coding = lost["multilingual"], lost["coding"]
    assert (
        f"{tongues['long-0']} points on long-0 (3.7 in the first grid) and {tongues['long-1']} on "
        f"long-1, {tongues['mild-0']} on mild-0 and {tongues['mild-1']} on mild-1."
    ) in text
    assert (
        f"from coding on both mild pools ({coding['mild-0']} and {coding['mild-1']}) and from "
        f"instruction on mild-0 ({lost['instruction']['mild-0']})."
    ) in text
    coding = gained["coding"]
    assert f"coding on the long ones ({coding['long-0']} and {coding['long-1']})" in text


@pytest.fixture(scope="module")
def cat(later: Results) -> dict[str, dict[str, tuple[Gain, dict[str, Gain]]]]:
    """By pool, CAT against task arithmetic and against its repair, on the same trainings."""
    named = {
        (row["pool"], row["kind"]): row["run"]
        for row in later.checkpoints.filter(pl.col("kind") != "expert").to_dicts()
        if row["kind"] != "ours"
    }
    return {
        pool: {
            kind: _gain(later, named[pool, "baseline"], named[pool, kind])
            for kind in ("anchor", "default")
        }
        for pool in later.pools
    }


def test_the_table_of_cat_is_that_of_its_store(
    found: Results, later: Results, cat: dict[str, dict[str, tuple[Gain, dict[str, Gain]]]]
) -> None:
    [table] = paper_tables.baselines(later)
    assert table.rows[0][0] == "cat" and later.pools == found.pools
    first, fourth = (
        [_repaired(of)[pool, "anchor", "task_arithmetic"] for pool in later.pools]
        for of in (found, later)
    )
    shown = {
        "task_arithmetic, first trainings": [f"{score:.2f}" for score in first],
        "task_arithmetic, fourth trainings": [f"{score:.2f}" for score in fourth],
        "cat, fourth trainings": [_percent(score) for score in _baselines(later, "cat")],
        "cat − task_arithmetic, fourth trainings": [
            str(cat[pool]["anchor"][0]) for pool in later.pools
        ],
    }
    for title, cells in shown.items():
        assert _row(title) == cells
    moved = max(abs(a - b) for a, b in zip(first, fourth, strict=True))
    assert f"differs by up to {moved:.2f} points between them" in " ".join(PAGE.split())


def test_what_is_said_of_cat_is_in_its_store(
    found: Results, later: Results, cat: dict[str, dict[str, tuple[Gain, dict[str, Gain]]]]
) -> None:
    text = " ".join(PAGE.split())
    *three, last = (_printed(cat[pool]["anchor"][0]) for pool in later.pools)
    assert all(low > 0 for _, low, _ in three) and last[1] < 0 < last[2]
    assert later.pools[-1] == "mild-1"
    assert (
        f"CAT is {min(three)[0]:.2f} to {max(three)[0]:.2f} points ahead of task arithmetic on "
        "three pools, about what another training may change, and not ahead on mild-1."
    ) in text
    behind = [_printed(cat[pool]["default"][0]) for pool in later.pools]
    assert all(high < 0 for *_, high in behind)
    assert (
        f"It stays {-max(behind)[0]:.2f} to {-min(behind)[0]:.2f} points below the repair of task "
        "arithmetic, outside of every interval"
    ) in text
    math, tongues = (
        [_printed(cat[pool]["anchor"][1][domain]) for pool in ("long-0", "long-1")]
        for domain in ("math", "multilingual")
    )
    assert all(low > 0 for _, low, _ in math) and all(high < 0 for *_, high in tongues)
    assert (
        f"it gains {math[0][0]:.2f} and {math[1][0]:.2f} points in math and loses "
        f"{-tongues[0][0]:.2f} and {-tongues[1][0]:.2f} in multilingual"
    ) in text
    scores = _baselines(later, "cat")
    regmean = [_repaired(found)[pool, "anchor", "regmean"] / 100 for pool in found.pools]
    below = [
        [100 * (other - own) for other, own in zip(others, scores, strict=True)]
        for others in (_baselines(found, "lot"), regmean)
    ]
    assert (
        f"{min(below[0]):.1f} to {max(below[0]):.1f} below LOT and {min(below[1]):.1f} to "
        f"{max(below[1]):.1f} below RegMean of the first trainings"
    ) in text
    levels = [yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
              for name in ("task_arithmetic", "cat")]  # fmt: skip
    assert levels[0]["parameters"] == {"weight": 0.4} and "parameters" not in levels[1]
    usual = {parameter.name: parameter.paper for parameter in Cat.parameters}
    assert usual["weight"] * usual["lambda"] == 0.4 and "Both add task vectors at 0.4" in text


def test_the_seconds_of_the_later_store_are_those_on_the_pages(later: Results) -> None:
    text = " ".join(PAGE.split())
    runs = later.runs
    took = runs.filter(pl.col("method") == "cat")
    seconds, captured = took["wall_seconds"].to_list(), took["gpu_seconds"].to_list()
    assert (
        f"A merge takes {min(seconds):.0f} to {max(seconds):.0f} s, {min(captured):.0f} to "
        f"{max(captured):.0f} of them to read exemplars"
    ) in text
    guide = " ".join((RESULTS.parent / "real.md").read_text(encoding="utf-8").split())
    assert max(seconds) < 120 and "on a GPU it takes [less than two]" in guide
    hours = float(np.mean(captured)) / 3600
    assert f"CAT takes {np.mean(seconds):.0f} s, {hours:.3f} GPU hours without" in text
    [repair] = runs.filter(pl.col("kind") == "default").select(pl.col("wall_seconds").mean()).row(0)
    tried = runs.filter(pl.col("setting") == "calibrated")["wall_seconds"].to_list()
    assert f"a repair {repair:.0f} s, `calibrated` {min(tried):.0f} to {max(tried):.0f} s" in text
    with tarfile.open(RESULTS / "real" / "logs.tar.xz") as records:
        clock = (file := records.extractfile("fourth/times")) and file.read().decode()
    assert clock
    begun = re.findall(r"([\d:]{8})\ngrid ", clock)
    ended = re.findall(r"rc 0 ([\d:]{8})", clock)
    assert len(begun) == len(ended) == 4
    whole = datetime.strptime(max(ended), "%H:%M:%S") - datetime.strptime(min(begun), "%H:%M:%S")
    assert f"all four side by side in {whole.seconds} s" in text


def test_what_is_said_of_our_settings_in_the_first_grid_is_in_its_tables() -> None:
    rows = {
        (pool, setting): [abs(float(gain.split(" ")[0].replace("−", "-"))) for gain in gains]
        for pool, anchor, setting, *gains in (
            line.strip("| ").split(" | ") for line in ANALYSIS.splitlines() if line.count("[") == 6
        )
        if anchor == "task_arithmetic" and setting in ("replace", "calibrated")
    }
    replace, calibrated = (
        [f"{rows[pool, setting][0]:.2f}" for pool in ("long-0", "mild-0")]
        for setting in ("replace", "calibrated")
    )
    text = " ".join(PAGE.split())
    assert (
        f"`replace` adds {' and '.join(replace)} points and `calibrated` {' and '.join(calibrated)}"
    ) in text
    assert f"({rows['long-0', 'calibrated'][4]:.1f} in the first grid)" in text


@pytest.mark.parametrize("folder", ["later", "fourth"])
def test_further_trainings_had_the_settings_and_data_of_the_first(folder: str) -> None:
    with tarfile.open(RESULTS / "real" / "logs.tar.xz") as records:
        names = [n for n in records.getnames() if re.match(rf"{folder}/[a-z]+-\d/training/", n)]
        pairs = [(_read(records, n), _read(records, n.removeprefix(f"{folder}/"))) for n in names]
    assert len(pairs) == 20
    assert all(a["settings"] == b["settings"] and a["sums"] == b["sums"] for a, b in pairs)
    if folder == "fourth":  # those of the settings, which the page compares with the first
        same = sum(a["weights"] == b["weights"] for a, b in pairs)
        text = " ".join(PAGE.split())
        assert f"weights of {same} of the 20 experts are the same bits as at first" in text


def test_the_suite_in_the_logs_has_the_runs_of_the_later_store(later: Results) -> None:
    with tarfile.open(RESULTS / "real" / "logs.tar.xz") as records:
        file = records.extractfile("fourth/some-1.yaml")
        assert file is not None
        suite = yaml.safe_load(file)
    for pool in later.pools:
        runs = later.runs.filter(pl.col("pool") == pool)
        assert runs.filter(pl.col("kind") == "expert")["method"].to_list() == suite["experts"]
        assert later.anchors(pool) == suite["anchors"]
        assert runs.filter(pl.col("kind") == "baseline")["method"].to_list() == suite["baselines"]
        ours = runs.filter(pl.col("kind") == "ours")["setting"].to_list()
        assert ours == list(suite["repairs"]["ours"])
        assert runs.height == 10


HARNESSES = {"IFEval": ("ifeval", "prompt_strict"),
             "HumanEval+, pass@10": ("humaneval_plus", "pass@10"),
             "HumanEval+, pass@1": ("humaneval_plus", "pass@1"),
             "MBPP+, pass@10": ("mbpp_plus", "pass@10"),
             "MBPP+, pass@1": ("mbpp_plus", "pass@1")}  # fmt: skip


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    packed = (RESULTS / "real" / "answers.jsonl.xz").read_bytes()
    return [json.loads(line) for line in lzma.decompress(packed).splitlines()]


def test_instructions_and_programs_are_those_of_the_records(answers: list[dict[str, Any]]) -> None:
    records = json.loads((RESULTS / "real" / "harnesses.json").read_text(encoding="utf-8"))
    for title, (benchmark, measure) in HARNESSES.items():
        shown = []
        for model, of_model in records.items():
            if benchmark not in of_model:
                shown.append("–")
                continue
            score = of_model[benchmark]["benchmarks"][benchmark][measure]
            scored = [_scored(row, measure) for row in answers
                      if (row["model"], row["benchmark"]) == (model, benchmark)]  # fmt: skip
            assert len(scored) == of_model[benchmark]["items"][benchmark]
            assert len(scored) == (100 if benchmark == "ifeval" else 48)
            assert score == pytest.approx(sum(scored) / len(scored))
            shown.append(f"{100 * score:.0f}")
        assert _row(title)[1:] == shown, title
        assert benchmark == "ifeval" or _row(title)[0] == "0"
    scored = records["reference"]
    limits = [scored[b]["limit"] for b in ("ifeval", "humaneval_plus", "mbpp_plus")]
    text = " ".join(PAGE.split())
    assert f"--limit {limits[0]} --benchmark ifeval`, and `--limit {limits[1]} --benchmark" in text
    assert limits[1] == limits[2] and f"Of {limits[2]} problems of HumanEval+" in text


def test_the_standard_errors_are_those_of_the_scores() -> None:
    records = json.loads((RESULTS / "real" / "harnesses.json").read_text(encoding="utf-8"))
    text = " ".join(PAGE.split())
    for measure in ("prompt_strict", "pass@10"):
        scores = [
            (part["benchmarks"][benchmark].get(measure, 0.0), part["items"][benchmark])
            for of_model in records.values()
            for benchmark, part in of_model.items()
        ]
        errors = [100 * (score * (1 - score) / items) ** 0.5 for score, items in scores if score]
        assert (round(min(errors)), round(max(errors))) == (3, 4), measure
    assert "of IFEval is 3 to 4 points, of a pass@10 other than 0 as many" in text


def test_the_intervals_of_ifeval_are_those_of_the_answers(answers: list[dict[str, Any]]) -> None:
    scores: dict[str, dict[str, float]] = {}
    for row in answers:
        if row["benchmark"] == "ifeval":
            scores.setdefault(row["model"], {})[row["item"]] = _scored(row, "prompt_strict")
    reference = scores.pop("reference")
    differences = np.array([[of[item] - reference[item] for item in reference]
                            for of in scores.values()]).T  # fmt: skip
    drawn = np.random.default_rng(0).multinomial(100, np.full(100, 0.01), 2_000) @ differences
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    middle = differences.sum(axis=0)
    assert _row("IFEval − reference")[1:] == ["", *(
        f"{_whole(m)} [{_whole(a)}, {_whole(b)}]"
        for m, a, b in zip(middle, low, high, strict=True)
    )]  # fmt: skip
    assert np.all(low <= 0) and np.all(high >= 0)
    text = " ".join(PAGE.split())
    solved, half = [sum(of.values()) for of in scores.values()], (high - low) / 2
    assert f"RegMean span {min(solved):.0f} to {max(solved):.0f}" in text
    assert (
        f"the expert of instructions is at {sum(scores['instruction'].values()):.0f}, and RegMean "
        f"at {sum(scores['regmean'].values()):.0f} is below the floor"
    ) in text
    assert f"half an interval is {min(half):.0f} to {max(half):.0f} points" in text


def test_what_is_said_of_programs_is_in_the_answers(answers: list[dict[str, Any]]) -> None:
    solved: dict[str, list[set[str]]] = {}
    for benchmark in ("humaneval_plus", "mbpp_plus"):
        solved[benchmark] = [
            {r["item"] for r in answers if r["model"] == model and r["benchmark"] == benchmark
             and any(sample["verdict"] == "pass" for sample in r["output"])}
            for model in ("reference", "coding", "regmean")
        ]  # fmt: skip
    human, basic = ([len(items) for items in solved[b]] for b in solved)
    text = " ".join(PAGE.split())
    assert (
        f"the reference solves {human[0]}, the expert of coding {human[1]}, RegMean the same "
        f"{human[2]}; of MBPP+ {basic[0]}, {basic[1]} and {basic[2]}." in text
    )
    assert solved["humaneval_plus"][1] == solved["humaneval_plus"][2]
    samples = [(r["record"]["prompt"].strip('"\n').split("\n")[0].strip(), s["text"].strip())
               for r in answers if (r["model"], r["benchmark"]) == ("coding", "mbpp_plus")
               for s in r["output"]]  # fmt: skip
    assert not any("def " in answer for _, answer in samples)
    repeated = sum(line == answer for line, answer in samples)
    assert f"none of its {len(samples)} answers has a function; {repeated} repeat" in text


def test_the_floor_of_ifeval_is_that_of_its_items(answers: list[dict[str, Any]]) -> None:
    pytest.importorskip(
        "lm_eval", reason="lm-eval is not installed; pip install 'sigmerge-llm[eval]'"
    )
    from sigmerge.evaluation.harnesses.lm_eval import provide_punkt

    provide_punkt()
    from lm_eval.tasks.ifeval.utils import process_results

    items = [
        r["record"] for r in answers if (r["model"], r["benchmark"]) == ("reference", "ifeval")
    ]
    right = sum(process_results(item, ["yes"])["prompt_level_strict_acc"] for item in items)
    assert len(items) == 100 and _row("IFEval")[0] == str(right)


def _gain(found: Results, after: str, before: str) -> tuple[Gain, dict[str, Gain]]:
    """Of one run over another: that of the macro score, and those of its domains."""
    [gain] = gains(found, [Comparison((), (after,), before)])
    return gain


def _printed(gain: Gain) -> list[float]:
    """Difference, low and high in points, as the page rounds them."""
    return _numbers(str(gain))


def _numbers(gain: str) -> list[float]:
    return [float(number.replace("−", "-")) for number in re.findall(r"[+−][0-9.]+", gain)]


def _baselines(found: Results, method: str) -> list[float]:
    rows = {r["pool"]: r["macro"] for r in found.baselines.to_dicts() if r["method"] == method}
    return [rows[pool] for pool in found.pools]


def _percent(score: float) -> str:
    return f"{100 * score:.2f}"


def _whole(points: float) -> str:
    return f"{points:+.0f}".replace("-", "−").replace("+0", "0").replace("−0", "0")


def _row(title: str) -> list[str]:
    """The cells of a row of the table of instructions and programs: floor, then the models."""
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {title} | ")]
    return [cell.strip() for cell in line.strip().strip("|").split("|")][1:]


def _scored(row: dict[str, Any], measure: str) -> float:
    name = {"prompt_strict": "prompt_level_strict_acc,none"}.get(measure, measure)
    return float(row["scores"][name])
