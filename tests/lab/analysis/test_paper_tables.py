"""The numbers in the tables, against plain loops over the records that went into the store."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev

import pytest
from scipy import stats

from sigmerge.errors import ScoreError
from sigmerge.lab.analysis.paper_tables import make_tables
from sigmerge.lab.analysis.results import Results
from sigmerge.lab.analysis.results import results as make_results
from sigmerge.lab.experiments.store import StoredRun, create
from sigmerge.pages.table import (
    As,
    Changed,
    Column,
    Table,
    csv_text,
    latex,
    markdown,
    printed,
)
from tests.lab.analysis import experiment
from tests.lab.analysis.experiment import DOMAINS, POOLS

RECORDS = experiment.records(2)


def domain_scores(record: StoredRun, split: str = "evaluation") -> dict[str, float]:
    return {
        d: fmean(s.value for s in record.scores if (s.domain, s.split) == (d, split) and s.headline)
        for d in DOMAINS
    }


def macro(record: StoredRun) -> float:
    return fmean(domain_scores(record).values())


def strongest(pool: str) -> dict[str, float]:
    experts = [domain_scores(r) for r in RECORDS if r.kind == "expert" and r.pool.name == pool]
    return {d: max(e[d] for e in experts) for d in DOMAINS}


def gap(record: StoredRun) -> float:
    best, scores = strongest(record.pool.name), domain_scores(record)
    return fmean(max(0.0, best[d] - scores[d]) for d in DOMAINS)


def find(
    pool: str, kind: str, setting: str = "", anchor: str = "", anchor_seed: int = 0
) -> list[StoredRun]:
    return [
        r
        for r in RECORDS
        if (r.pool.name, r.kind, r.setting, r.anchor_seed) == (pool, kind, setting, anchor_seed)
        and r.anchor == anchor
    ]


def pair(pool: str, anchor: str, seed: int = 0) -> tuple[StoredRun, StoredRun]:
    (before,) = find(pool, "anchor", "", anchor, seed)
    (after,) = find(pool, "default", "default", anchor, seed)
    return before, after


def pairs(pool: str) -> list[tuple[StoredRun, StoredRun]]:
    return [pair(pool, anchor) for anchor in experiment.ANCHORS]


@pytest.fixture(scope="module")
def tables(results: Results) -> dict[str, Table]:
    made, skipped = make_tables(results)
    assert skipped == []
    return {table.label: table for table in made}


def cells(table: Table, *start: str | int) -> list:
    """The rest of the one row that starts so, as plain numbers."""
    (row,) = [row for row in table.rows if tuple(row[: len(start)]) == start]
    return [cell.value if isinstance(cell, As) else cell for cell in row[len(start) :]]


def test_every_table_is_made(tables: dict[str, Table]) -> None:
    paper = {
        "residual_gap",
        "ablation",
        "main_gain",
        "baselines",
        "split_membership",
        "hyperparameter_protocol",
        "single_view",
        "dom_p0",
        "dom_p1",
        "baseline_dom",
        "order",
        "ablation_full",
        "directional_full",
        "efficiency",
        "perseed",
        "sens_p0",
        "sens_p1",
        "anchor_regret",
        *(f"sub_{domain}" for domain in DOMAINS),
    }
    more = {
        "paired_statistics",
        "paired_intervals",
        "variant_intervals",
        "recovered",
        "ranks",
        "ours",
        "anchor_statistics",
        "view_correlations",
        "partitions",
        "statements",
    }
    assert set(tables) == paper | more


@pytest.mark.parametrize("pool", POOLS[:2])
def test_main_gain(tables: dict[str, Table], pool: str) -> None:
    before, after = zip(*[(macro(b), macro(a)) for b, a in pairs(pool)], strict=True)
    table = tables["main_gain"]
    assert cells(table, pool, "anchor") == pytest.approx([*before, fmean(before)])
    assert cells(table, pool, "+ repair") == pytest.approx([*after, fmean(after)])
    gain = [a - b for a, b in zip(after, before, strict=True)]
    assert cells(table, pool, "gain") == pytest.approx([*gain, fmean(gain)])


def test_residual_gap(tables: dict[str, Table]) -> None:
    table, means = tables["residual_gap"], []
    for pool in POOLS[:2]:
        before, after = (fmean(gap(r[k]) for r in pairs(pool)) for k in (0, 1))
        assert cells(table, pool) == pytest.approx([before, after, after - before])
        means.append((before, after))
    before, after = (fmean(m[k] for m in means) for k in (0, 1))
    assert cells(table, "All") == pytest.approx([before, after, after - before])


def test_without_a_reference_of_every_domain_there_is_no_mean_gap(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        for r in RECORDS:
            known = tuple(s for s in r.scores if s.domain != "safety")
            store.append(replace(r, scores=known) if r.kind == "expert" else r)
    partial = experiment.read(tmp_path / "s")
    assert partial.main["gap_before"].to_list() == [None] * partial.main.height
    made, skipped = make_tables(partial)
    assert "residual_gap" in {item.label for item in skipped}
    [recovered] = [table for table in made if table.label == "recovered"]
    assert [row[0] for row in recovered.rows] == list(DOMAINS[:-1])


def test_recovered_fractions(tables: dict[str, Table]) -> None:
    for domain in DOMAINS:
        deficits, gains = [], []
        for pool in POOLS[:2]:
            for before, after in pairs(pool):
                start = domain_scores(before)[domain]
                deficits.append(max(0.0, strongest(pool)[domain] - start))
                gains.append(domain_scores(after)[domain] - start)
        found = cells(tables["recovered"], domain)
        assert found[:3] == pytest.approx(
            [fmean(deficits), fmean(gains), fmean(gains) / fmean(deficits)]
        )
        interval = stats.ttest_1samp(gains, 0).confidence_interval(0.95)
        assert found[3:] == pytest.approx([end / fmean(deficits) for end in interval])


def test_domain_tables(tables: dict[str, Table]) -> None:
    for k, pool in enumerate(POOLS[:2]):
        for domain in DOMAINS:
            gains = [domain_scores(a)[domain] - domain_scores(b)[domain] for b, a in pairs(pool)]
            assert cells(tables[f"dom_p{k}"], domain, "gain") == pytest.approx(gains)


def test_baselines_and_margin(tables: dict[str, Table]) -> None:
    for k, pool in enumerate(POOLS[:2]):
        mine = max(macro(after) for _, after in pairs(pool))
        others = [
            macro(r)
            for r in RECORDS
            if r.kind == "baseline" and r.pool.name == pool and r.seed == 0
        ]
        assert cells(tables["baselines"], "best + repair")[k] == pytest.approx(mine)
        assert cells(tables["baselines"], "margin")[k] == pytest.approx(mine - max(others))
        assert [cells(tables["baselines"], m)[k] for m in experiment.BASELINES] == pytest.approx(
            others
        )


def test_controls_average_over_seeds_and_compare_with_anchor_and_default(
    tables: dict[str, Table],
) -> None:
    for pool in POOLS[:2]:
        before, default = pair(pool, "DARE")
        for setting in experiment.CONTROLS:
            scores = [macro(r) for r in find(pool, "control", setting, "DARE")]
            mean, sd, delta, kept, *ends, seeds = cells(
                tables["directional_full"], pool, "DARE", setting.replace("_", " ")
            )
            assert (mean, delta) == pytest.approx((fmean(scores), fmean(scores) - macro(default)))
            whole = macro(default) - macro(before)
            assert kept == pytest.approx((fmean(scores) - macro(before)) / whole)
            assert seeds == len(scores)
            if seeds > 1:
                parts = [(score - macro(before)) / whole for score in scores]
                interval = stats.ttest_1samp(parts, 0).confidence_interval(0.95)
                assert ends == pytest.approx(list(interval))
            assert sd == (pytest.approx(stdev(scores)) if len(scores) > 1 else None)


def test_ablations_by_domain(tables: dict[str, Table]) -> None:
    for pool in POOLS[:2]:
        (record,) = find(pool, "ablation", "uniform_capacity", "DARE")
        _, default = pair(pool, "DARE")
        found = cells(tables["ablation_full"], pool, "DARE", "uniform capacity")
        assert found[:2] == pytest.approx([macro(record), macro(record) - macro(default)])
        assert found[3:] == pytest.approx(list(domain_scores(record).values()))
        assert cells(tables["ablation"], pool, "DARE", "uniform capacity") == found[:2]


def test_single_views_recover_a_part_of_the_profile(tables: dict[str, Table]) -> None:
    pool = POOLS[0]
    floor = macro(find(pool, "ablation", "uniform_capacity", "DARE")[0])
    whole = macro(pair(pool, "DARE")[1])
    sign = macro(find(pool, "view", "view_sign", "DARE")[0])
    found = cells(tables["single_view"], pool, "DARE", "view sign")
    assert found == pytest.approx([sign, sign - whole, (sign - floor) / (whole - floor)])


def test_claim_order_costs_a_part_of_the_gain(tables: dict[str, Table]) -> None:
    before, default = map(macro, pair(POOLS[0], "DARE"))
    scores = [macro(r) for r in find(POOLS[0], "order", "order_random", "DARE")]
    found = cells(tables["order"], POOLS[0], "DARE", "order random")
    cost = (default - fmean(scores)) / (default - before)
    assert found == pytest.approx([default, fmean(scores), cost, max(scores) - min(scores)])


def test_sweeps_hold_the_default_and_every_other_value(tables: dict[str, Table]) -> None:
    table = tables["sens_p0"]
    assert [row[0] for row in table.rows][:4] == [
        "C_min = 0",
        "C_min = 0.05",
        "C_min = 0.1 (default)",
        "C_min = 0.15",
    ]
    assert len(table.rows) == 12
    (record,) = find(POOLS[0], "sweep", "scale=0.8", "DARE")
    default = macro(pair(POOLS[0], "DARE")[1])
    found = cells(table, "λ = 0.8")
    assert found[:2] == pytest.approx([macro(record), macro(record) - default])
    assert found[2:] == pytest.approx(list(domain_scores(record).values()))


def test_seeds(tables: dict[str, Table]) -> None:
    gains = [macro(a) - macro(b) for b, a in (pair(POOLS[0], "DARE", seed) for seed in range(3))]
    found = cells(tables["perseed"], "paired gain", POOLS[0], "DARE")
    assert found == pytest.approx([*gains, fmean(gains), stdev(gains), max(gains) - min(gains)])
    scores = [
        macro(r)
        for r in RECORDS
        if r.kind == "baseline" and r.method == "MERGE3" and r.pool.name == POOLS[1]
    ]
    assert cells(tables["perseed"], "Macro-5", POOLS[1], "MERGE3")[:3] == pytest.approx(scores)
    assert not any(row[2] == "Linear" for row in tables["perseed"].rows)


def test_costs_are_means_over_runs(tables: dict[str, Table]) -> None:
    table = tables["efficiency"]
    repair = [3.0, 9.0, 0.6, 5, 5, 500, 100, 0, 30, 3000, 14]
    assert cells(table, "+ repair") == pytest.approx(repair)
    search = [20.0, 20.0, 2.0, 0, 240, 1500, 0, 240, 0, 0, 6]
    assert cells(table, "MERGE3") == pytest.approx(search)
    [anchor] = [row for row in table.printed() if row[0] == "dense anchor"]
    assert anchor[2:4] == ["–", "–"]  # neither measured, nor a GPU at work
    anchors = [r.cost.wall_seconds for r in RECORDS if r.kind == "anchor"]
    assert cells(table, "dense anchor")[0] == pytest.approx(fmean(anchors))


def test_regret(tables: dict[str, Table]) -> None:
    for k, pool in enumerate(POOLS[:2]):
        before, after = zip(*[(macro(b), macro(a)) for b, a in pairs(pool)], strict=True)
        given_up = {
            "strongest anchor": max(after) - after[before.index(max(before))],
            "random anchor": max(after) - fmean(after),
            "weakest anchor": max(after) - after[before.index(min(before))],
        }
        for rule, lost in given_up.items():
            assert cells(tables["anchor_regret"], rule)[k] == pytest.approx(lost)
    for rule in ("strongest anchor", "random anchor", "weakest anchor"):
        *each, mean = cells(tables["anchor_regret"], rule)
        assert mean == pytest.approx(fmean(each))


def nine(pool: str, record: StoredRun) -> list[float]:
    """The statistics of an anchor, by their definitions."""
    scores = list(domain_scores(record).values())
    gaps = [max(0.0, strongest(pool)[d] - q) for d, q in domain_scores(record).items()]
    share = [each / sum(gaps) for each in gaps]
    gini = sum(abs(a - b) for a in share for b in share) / (2 * len(share) * sum(share))
    entropy = -sum(each * math.log(each) for each in share if each > 0)
    return [fmean(scores), fmean(gaps), max(gaps), min(gaps), stdev(gaps), gaps.count(0.0),
            entropy, gini, max(scores) - min(scores)]  # fmt: skip


def test_what_is_known_before_the_repair(tables: dict[str, Table]) -> None:
    table = tables["anchor_statistics"]
    names = list(dict.fromkeys(row[0] for row in table.rows))
    known = {pool: [nine(pool, before) for before, _ in pairs(pool)] for pool in POOLS[:2]}
    targets = {
        "gain": lambda before, after: macro(after) - macro(before),
        "score after": lambda before, after: macro(after),
        "gap after": lambda before, after: gap(after),
    }
    for target, made in targets.items():
        reached = {pool: [made(*each) for each in pairs(pool)] for pool in POOLS[:2]}
        for k, name in enumerate(names):
            for place, chosen in enumerate((POOLS[:2], POOLS[:1], POOLS[1:2])):
                x = [row[k] for pool in chosen for row in known[pool]]
                y = [value for pool in chosen for value in reached[pool]]
                expected = stats.spearmanr(x, y).statistic if len(set(x)) > 1 else math.nan
                found = cells(table, name, target)[place]
                assert found == pytest.approx(expected, nan_ok=True), (name, target, chosen)


def test_the_views_are_compared_over_layers(tables: dict[str, Table]) -> None:
    views = pair(POOLS[0], "Linear")[1].signals.views
    for a, b in (("representation", "direction"), ("direction", "sign")):
        expected = stats.spearmanr(views[a], views[b]).statistic
        found = cells(tables["view_correlations"], POOLS[0], f"{a} – {b}")
        assert found == [pytest.approx(expected)]


def test_paired_statistics(tables: dict[str, Table]) -> None:
    for name, chosen in (("All", POOLS[:2]), (POOLS[1], POOLS[1:2])):
        both = [(macro(b), macro(a)) for pool in chosen for b, a in pairs(pool)]
        gain = [after - before for before, after in both]
        triples = [
            (max(0.0, strongest(pool)[d] - domain_scores(b)[d]),
             domain_scores(a)[d] - domain_scores(b)[d])
            for pool in chosen for b, a in pairs(pool) for d in DOMAINS
        ]  # fmt: skip
        kept = [
            (macro(b1) < macro(b2)) == (macro(a1) < macro(a2))
            for pool in chosen for (b1, a1), (b2, a2) in combinations(pairs(pool), 2)
        ]  # fmt: skip
        improved, *numbers, order = cells(tables["paired_statistics"], name)
        assert improved == f"{sum(each > 0 for each in gain)} of {len(gain)}"
        assert order == f"{sum(kept)} of {len(kept)}"
        assert numbers == pytest.approx([
            fmean(gain), min(gain), max(gain),
            fmean((after - before) / before for before, after in both),
            stats.wilcoxon(gain, method="exact").pvalue,
            stats.spearmanr(*zip(*triples, strict=True)).statistic,
        ])  # fmt: skip


def test_partitions(tables: dict[str, Table]) -> None:
    (other,) = [
        r
        for r in RECORDS
        if r.kind == "partition"
        and r.anchor == "TIES"
        and r.setting == "partition 1"
        and r.pool.name == POOLS[0]
    ]
    share = pair(POOLS[0], "TIES")[1].signals.share
    move = max(abs(other.signals.share[d] - share[d]) for d in DOMAINS)
    same = sorted(DOMAINS, key=lambda d: -share[d]) == sorted(
        DOMAINS, key=lambda d: -other.signals.share[d]
    )
    assert cells(tables["partitions"], POOLS[0], "TIES", 0, "partition 1") == [
        pytest.approx(move),
        same,
    ]


def test_submetrics_give_score_and_change(tables: dict[str, Table]) -> None:
    before, after = pair(POOLS[1], "Fisher")

    def value(record: StoredRun) -> float:
        (score,) = [
            s
            for s in record.scores
            if (s.benchmark, s.metric, s.split) == ("MBPP+", "pass@10", "evaluation")
        ]
        return score.value

    titles = [column.title for column in tables["sub_coding"].columns]
    (row,) = [r for r in tables["sub_coding"].rows if tuple(r[:2]) == (POOLS[1], "Fisher")]
    cell = row[titles.index("MBPP+ pass@10")]
    assert cell == Changed(value(after), pytest.approx(value(after) - value(before)))


def test_split_sizes(tables: dict[str, Table]) -> None:
    assert cells(tables["split_membership"], "GSM8K") == [100, 400]
    assert cells(tables["split_membership"], "Total") == [800, 3200]


def test_ranks_take_the_best_checkpoint_of_each_pool(tables: dict[str, Table]) -> None:
    ranks = []
    for pool in POOLS[:2]:
        best = max((after for _, after in pairs(pool)), key=macro)
        others = [
            r for r in RECORDS if r.kind == "baseline" and r.pool.name == pool and r.seed == 0
        ]
        for d in DOMAINS:
            ranks.append(1 + sum(domain_scores(o)[d] > domain_scores(best)[d] for o in others))
    row = cells(tables["ranks"], "sigmerge")
    assert row[0] == pytest.approx(fmean(ranks))
    assert row[1] == f"{ranks.count(1)} of 10"
    average = [each[1] for each in tables["ranks"].rows]
    assert average == sorted(average)
    for method in experiment.BASELINES:
        won = [
            macro(after) > macro(other)
            for other in RECORDS
            if other.kind == "baseline" and (other.method, other.seed) == (method, 0)
            for _, after in pairs(other.pool.name)
        ]
        assert cells(tables["ranks"], method)[2] == f"{sum(won)} of {len(won)}"


def test_a_pair_that_is_level_did_not_improve(tmp_path: Path) -> None:
    before, after = pair(POOLS[0], "TA")
    with create(tmp_path / "s") as store:
        for r in RECORDS:
            store.append(replace(r, scores=before.scores) if r is after else r)
    made, _ = make_tables(experiment.read(tmp_path / "s"))
    by_label = {table.label: table for table in made}
    assert cells(by_label["paired_statistics"], "All")[0] == "9 of 10"
    assert "9 of 10" in cells(by_label["statements"], "Every anchor improves")


def test_only_cells_with_all_methods_are_ranked(tmp_path: Path) -> None:
    """A baseline that was not run on the second pool: the cells of the first are left."""
    missing = lambda r: not (r.method == "CABS" and r.pool.name == POOLS[1])  # noqa: E731
    made, _ = make_tables(experiment.read(experiment.make_store(tmp_path / "s", missing, 2)))
    [table] = [each for each in made if each.label == "ranks"]
    assert {row[2].split(" of ")[1] for row in table.rows} == {"5"}
    assert {row[0] for row in table.rows} == {"sigmerge", *experiment.BASELINES}


@pytest.mark.parametrize(("anchors", "missing"), [(("TA", "TIES"), 1), (("TA", "TIES", "DARE"), 0)])
def test_a_correlation_over_anchors_needs_three(
    tmp_path: Path, anchors: tuple[str, ...], missing: int
) -> None:
    kept = lambda r: r.kind == "expert" or r.anchor in anchors  # noqa: E731
    _, skipped = make_tables(experiment.read(experiment.make_store(tmp_path / "s", kept, 1)))
    assert [item.label for item in skipped].count("anchor_statistics") == missing


def test_another_split_gives_other_numbers(store: Path, results: Results) -> None:
    other = experiment.read(store, "calibration")
    assert other.main["after"][0] == pytest.approx(
        fmean(domain_scores(pair(POOLS[0], "Linear")[1], "calibration").values())
    )
    assert other.main["after"][0] != results.main["after"][0]
    with pytest.raises(ScoreError, match="'test'; there are: calibration, evaluation"):
        experiment.read(store, "test")


@pytest.mark.parametrize(
    ("kept", "missing"),
    [
        (lambda r: r.kind not in ("sweep",), {"sens", "hyperparameter_protocol"}),
        (lambda r: r.kind != "baseline", {"baselines", "ranks", "baseline_dom"}),
        (lambda r: r.kind != "expert", {"residual_gap", "recovered", "anchor_statistics"}),
        (lambda r: r.kind in ("expert", "anchor"), None),
        (lambda r: r.kind in ("anchor", "default") and r.anchor == "TIES", None),
        (lambda r: r.kind == "expert", None),
        (lambda r: r.kind not in ("default",), None),
    ],
)
def test_what_was_not_run_is_skipped_with_a_reason(
    tmp_path: Path, kept, missing: set[str] | None
) -> None:
    partial = experiment.read(experiment.make_store(tmp_path / "s", kept, pools=1))
    made, skipped = make_tables(partial)
    assert all(item.reason for item in skipped)
    gone = {item.label for item in skipped}
    if missing is not None:
        assert gone == missing
    for table in made:
        assert markdown(table) and latex(table) and csv_text(table)


def test_an_empty_store(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store, pytest.raises(ScoreError, match="no scored run"):
        make_results(*store.frames())


def test_forms() -> None:
    table = Table(
        [Column("name"), Column("Δ", "points"), Column("p", "p"), Column("both", "number")],
        [
            ["a_b|c", -0.01234, 9.5367e-07, Changed(0.5, -0.25)],
            ["none", None, 0.0625, As(0.5, "percent")],
        ],
        "A & B",
        "t",
    )
    assert markdown(table).splitlines()[4:] == [
        "| a\\_b\\|c | −1.23 | 9.5e-07 | 50.00 (−25.00) |".replace("\\_", "_"),
        "| none | – | 0.062 | 50.00 |",
    ]
    rows = list(csv.reader(io.StringIO(csv_text(table))))
    assert rows[1] == ["a_b|c", "-0.01234", "9.5367e-07", "0.5 (-0.25)"]
    assert rows[2] == ["none", "", "0.0625", "0.5"]
    text = latex(table)
    assert r"a\_b\textbar{}c & $-$1.23 & 9.5e-07 & 50.00 ($-$25.00) \\" in text
    assert r"\caption{A \& B}" in text and r"\label{tab:t}" in text
    assert printed(-0.00000001, "points") == "+0.00"
    assert printed(0.21025, "percent") == printed(0.21025 + 3e-17, "percent") == "21.02"
    unusual = Table([Column("a"), Column("b", "number")], [["1 < 2 → 3", float("nan")]], "", "t")
    assert r"1 $<$ 2 $\to$ 3 & -- \\" in latex(unusual)
    assert csv_text(unusual).splitlines()[1] == "1 < 2 → 3,"
    assert printed(True, "text") == "yes"


def test_frames_hold_what_the_tables_need(results: Results) -> None:
    assert results.pools == list(POOLS[:2]) and results.domains == list(DOMAINS)
    assert results.anchors() == list(experiment.ANCHORS)
    (run,) = [
        r for r in results.signals("default") if r["anchor"] == "TA" and r["pool"] == POOLS[0]
    ]
    assert len(run["capacity"]) == experiment.LAYERS
    assert json.dumps(run["constants"]) == '{"c_max": 0.45, "c_min": 0.1, "scale": 0.6}'
