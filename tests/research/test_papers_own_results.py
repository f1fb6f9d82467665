"""The paper's own tables, put through the store: the analysis must give the paper's statements.

The experts are one made-up expert per pool with the reference scores that the paper's statements
imply (`published/references.csv`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from research.published.data import (
    BASELINES,
    PAPER_DOMAINS,
    POOLS,
    PRINTED_ANCHORS,
    PublishedTables,
)

from sigmerge.lab.analysis.experiment import headline
from sigmerge.lab.analysis.paper_tables import make_tables
from sigmerge.lab.analysis.results import Results
from sigmerge.lab.experiments.store import StoredPool, StoredRun, StoredScore, create
from sigmerge.pages.table import Table
from tests.lab.analysis import experiment


def records() -> Iterator[StoredRun]:
    paper = PublishedTables()
    for p, name in enumerate(POOLS):
        pool = StoredPool(name, name, PAPER_DOMAINS)

        def run(kind: str, method: str, scores, pool: StoredPool = pool, **more) -> StoredRun:
            rows = tuple(
                StoredScore(d, f"{d} benchmark", "score", float(q), True, 100)
                for d, q in zip(PAPER_DOMAINS, scores, strict=True)
            )
            more["anchor_key"] = more.get("anchor", "")
            return StoredRun(
                kind, pool, method, "paper", f"{kind} {method}", next(place), scores=rows, **more
            )

        yield run("expert", "strongest", paper.reference[p])
        for a, anchor in enumerate(PRINTED_ANCHORS):
            yield run("anchor", anchor, paper.before[p, :, a], anchor=anchor)
            yield run("default", "sigmerge", paper.after[p, :, a], anchor=anchor, setting="default")
        for b, baseline in enumerate(BASELINES):
            yield run("baseline", baseline, paper.baseline[p, :, b])


place = iter(range(10_000))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    path: Path = tmp_path_factory.mktemp("paper") / "store"
    with create(path) as store:
        for record in records():
            store.append(record)
    return experiment.read(path)


@pytest.fixture(scope="module")
def tables(results: Results) -> dict[str, Table]:
    return {table.label: table for table in make_tables(results)[0]}


def row(table: Table, *start: str) -> list[str]:
    (found,) = [cells for cells in table.printed() if tuple(cells[: len(start)]) == start]
    return found[len(start) :]


def test_headline(results: Results) -> None:
    numbers = {what: number for what, number, _ in headline(results)}
    assert numbers == {
        "Pairs improved": "21 of 21",
        "Mean gain": "+6.74",
        "Relative gain": "15.0 %",
        "Wilcoxon": "p = 9.5e-07",
        "Residual gap": "12.13 → 5.77",
        "Deficit and gain": "+0.76",
    }


def test_main_tables(tables: dict[str, Table]) -> None:
    printed = {name: row(tables["main_gain"], name, "gain") for name in POOLS}
    # The macro scores are means of domain scores that the paper rounds to 0.01 points.
    means = [float(cells[-1]) for cells in printed.values()]
    assert means == pytest.approx([5.62, 5.70, 8.90], abs=0.011)
    statistics = {name: row(tables["paired_statistics"], name) for name in ("All", *POOLS)}
    assert [cells[4] for cells in statistics.values()] == ["15.0", "14.9", "10.1", "19.9"]
    assert [cells[6] for cells in statistics.values()] == ["0.759", "0.774", "0.852", "0.614"]
    assert statistics["All"][2:4] == ["+4.00", "+9.88"]
    assert row(tables["residual_gap"], "All") == ["12.13", "5.77", "−6.36"]


def test_against_the_baselines(tables: dict[str, Table]) -> None:
    assert row(tables["baselines"], "margin") == ["+2.46", "+1.18", "+5.74"]
    assert row(tables["ranks"], "sigmerge")[:2] == ["1.667", "11 of 15"]
    won = [int(row(tables["ranks"], name)[2].split(" of ")[0]) for name in BASELINES]
    assert sum(won) == 74


def test_anchors(tables: dict[str, Table]) -> None:
    assert row(tables["anchor_regret"], "strongest anchor") == ["0.00", "0.00", "0.95", "0.32"]
    assert row(tables["anchor_regret"], "random anchor")[:3] == ["2.92", "3.17", "2.67"]
    weakest = [float(cell) for cell in row(tables["anchor_regret"], "weakest anchor")[:3]]
    assert weakest == pytest.approx([5.37, 9.60, 11.16], abs=0.011)
    entropy = row(tables["anchor_statistics"], "share entropy", "gain")
    assert (entropy[0], entropy[2]) == ("0.782", "0.071")


def test_recovered(tables: dict[str, Table]) -> None:
    found = {name: row(tables["recovered"], name)[2] for name in PAPER_DOMAINS}
    assert (found["instruction"], found["safety"]) == ("50.7", "56.3")
    assert (found["coding"], found["math"]) == ("73.5", "43.9")
