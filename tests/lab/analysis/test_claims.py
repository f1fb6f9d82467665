"""The paper's statements about another experiment, against plain loops over its records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from sigmerge.lab.analysis.claims import CheckedStatement, claims
from sigmerge.lab.analysis.results import Results
from sigmerge.lab.experiments.store import StoredRun, create
from tests.lab.analysis import experiment
from tests.lab.analysis.experiment import DOMAINS, POOLS
from tests.lab.analysis.test_paper_tables import (
    RECORDS,
    domain_scores,
    find,
    gap,
    macro,
    nine,
    pair,
    pairs,
    strongest,
)

USED = POOLS[:2]


@pytest.fixture(scope="module")
def found(results: Results) -> dict[str, CheckedStatement]:
    return {claim.text: claim for claim in claims(results)}


def points(*values: float) -> str:
    return ", ".join(f"{100 * value:+.2f}".replace("-", "−") for value in values)


def signed(*values: float) -> str:
    return ", ".join(f"{value:+.2f}".replace("-", "−") for value in values)


def baselines(pool: str) -> list[StoredRun]:
    return [r for r in RECORDS if r.kind == "baseline" and r.pool.name == pool and r.seed == 0]


def test_the_gains(found: dict[str, CheckedStatement]) -> None:
    before, after = zip(
        *[(macro(b), macro(a)) for pool in USED for b, a in pairs(pool)], strict=True
    )
    gain = np.subtract(after, before)
    assert found["Every anchor improves"].here == f"{(gain > 0).sum()} of {len(gain)}"
    assert found["The mean gain is positive"].here == points(gain.mean())
    p = stats.wilcoxon(gain, method="exact").pvalue
    chance = found["The gain is no chance (Wilcoxon, two-sided)"]
    assert (chance.here, chance.holds) == (f"{p:.2g}", p < 0.05)
    assert found["Every anchor improves"].holds == (min(gain) > 0)
    assert found["The mean gain is positive"].holds
    spans = []
    for pool in USED:
        each = [macro(a) - macro(b) for b, a in (pair(pool, "DARE", seed) for seed in range(3))]
        spans.append(max(each) - min(each))
    moved = found["Over seeds of an anchor the gain moves less than the smallest gain"]
    assert moved.here == f"{100 * max(spans):.2f} against {100 * min(gain):.2f}"
    assert moved.holds == (max(spans) < min(gain))


def test_the_gaps(found: dict[str, CheckedStatement]) -> None:
    before, after = (fmean(gap(r[k]) for pool in USED for r in pairs(pool)) for k in (0, 1))
    shown = f"{100 * before:.2f} → {100 * after:.2f}"
    assert (found["The residual gap falls"].here, after < before) == (shown, True)
    assert found["The residual gap falls"].holds

    def correlation(*chosen: str) -> float:
        rows = [
            (max(0.0, strongest(pool)[d] - domain_scores(b)[d]),
             domain_scores(a)[d] - domain_scores(b)[d])
            for pool in chosen for b, a in pairs(pool) for d in DOMAINS
        ]  # fmt: skip
        return stats.spearmanr(*zip(*rows, strict=True)).statistic

    assert found["Domains gain where they lack (Spearman)"].here == signed(correlation(*USED))
    each = [correlation(pool) for pool in USED]
    within = found["So they do within every pool"]
    assert (within.here, within.holds) == (signed(*each), min(each) > 0)


def test_the_other_methods(found: dict[str, CheckedStatement]) -> None:
    best = {pool: max((after for _, after in pairs(pool)), key=macro) for pool in USED}
    margin = [macro(best[pool]) - max(map(macro, baselines(pool))) for pool in USED]
    text = "The best repaired anchor beats every baseline, on every pool"
    assert (found[text].here, found[text].holds) == (points(*margin), min(margin) > 0)
    ranks: dict[str, list[int]] = {}
    for pool in USED:
        for d in DOMAINS:
            cell = {r.method: domain_scores(r)[d] for r in (best[pool], *baselines(pool))}
            for method, score in cell.items():
                ranks.setdefault(method, []).append(1 + sum(o > score for o in cell.values()))
    ours = ranks.pop("sigmerge")
    nearest = min(map(fmean, ranks.values()))
    text = "The best repaired anchor has the best average rank of all methods"
    assert found[text].here == f"{fmean(ours):.2f} against {nearest:.2f} of the next"
    assert found[text].holds == (fmean(ours) < nearest)
    assert found["It leads most pool-domain cells"].here == f"{ours.count(1)} of 10"
    won = [macro(a) > macro(o) for pool in USED for _, a in pairs(pool) for o in baselines(pool)]
    text = "Repaired anchors beat baselines in most pairs"
    assert found[text].here == f"{sum(won)} of {len(won)}"
    assert found[text].holds == (2 * sum(won) > len(won))


def test_the_variants(found: dict[str, CheckedStatement]) -> None:
    def lost(kind: str, setting: str, against: int = 1) -> list[float]:
        return [
            fmean(map(macro, find(pool, kind, setting, "DARE")))
            - macro(pair(pool, "DARE")[against])
            for pool in USED
        ]

    for kind, settings in (("ablation", experiment.ABLATIONS), ("control", experiment.CONTROLS)):
        for setting in settings:
            text = f"{setting.replace('_', ' ')} is worse than the default on every pool"
            if text in found:
                assert found[text].here == points(*lost(kind, setting))
                assert found[text].holds == (max(lost(kind, setting)) < 0)
    assert sum("is worse than the default" in text for text in found) == 7
    moved = lost("control", "all_random", 0)
    text = "all random gives back the anchor (within 0.1 points)"
    assert (found[text].here, found[text].holds) == (points(*moved), max(map(abs, moved)) <= 0.001)
    views = [each for setting in experiment.VIEWS for each in lost("view", setting)]
    reached = sum(each >= 0 for each in views)
    assert found["No single view reaches all three"].here == f"{reached} of 6 do"
    orders = list(zip(*(lost("order", setting) for setting in experiment.ORDERS), strict=True))
    text = "Another claim order costs something, and little (under 1 point)"
    assert found[text].here == points(*(each for place in orders for each in place))
    assert found[text].holds == all(-0.01 < each <= 0 for place in orders for each in place)


def test_the_constants(found: dict[str, CheckedStatement]) -> None:
    for constant, name in (("c_min", "C_min"), ("c_max", "C_max"), ("scale", "λ")):
        usual, best = experiment.CONSTANTS[constant], []
        for pool in USED:
            score = {usual: macro(pair(pool, "DARE")[1])}
            for value in experiment.SWEEPS[constant]:
                [run] = find(pool, "sweep", f"{constant}={value:g}", "DARE")
                score[value] = macro(run)
            best.append(max(score, key=lambda value: score[value]))
        claim = found[f"{name} = {usual:g} is the best value tried"]
        assert claim.here == ", ".join(f"{value:g}" for value in best)
        assert claim.holds == (set(best) == {usual})


def test_the_partitions(found: dict[str, CheckedStatement]) -> None:
    """An anchor counts where no partition changes its order; of its seeds the first."""
    same = []
    for pool in USED:
        for anchor in experiment.ANCHORS:
            runs = [pair(pool, anchor)[1]]
            runs += [r for k in (1, 2) for r in find(pool, "partition", f"partition {k}", anchor)]
            orders = {tuple(sorted(DOMAINS, key=lambda d: -r.signals.share[d])) for r in runs}
            same.append(len(orders) == 1)
    claim = found["Other partitions give an anchor the same claim order"]
    assert (claim.here, claim.holds) == (f"{sum(same)} of 10", all(same))


def test_the_choice_of_an_anchor(found: dict[str, CheckedStatement]) -> None:
    kept, all_pairs, lost, drawn = 0, 0, [], []
    for pool in USED:
        scores = [(macro(b), macro(a)) for b, a in pairs(pool)]
        for (b1, a1), (b2, a2) in combinations(scores, 2):
            kept, all_pairs = kept + ((b1 < b2) == (a1 < a2)), all_pairs + 1
        best = max(after for _, after in scores)
        lost.append(best - max(scores)[1])
        drawn.append(best - fmean(after for _, after in scores))
    text = "Most pairs of anchors keep their order across the repair"
    assert (found[text].here, found[text].holds) == (f"{kept} of 20", 2 * kept > 20)
    claim = found["Repairing the strongest anchor gives up less than repairing one at random"]
    assert claim.here == f"{100 * fmean(lost):.2f} against {100 * fmean(drawn):.2f}"
    assert claim.holds == (fmean(lost) < fmean(drawn))


def test_the_prediction(found: dict[str, CheckedStatement]) -> None:
    each = []
    for pool in USED:
        gain = [macro(after) - macro(before) for before, after in pairs(pool)]
        columns = zip(*(nine(pool, before) for before, _ in pairs(pool)), strict=True)
        each.append([
            stats.spearmanr(column, gain).statistic if len(set(column)) > 1 else 0.0
            for column in columns
        ])  # fmt: skip
    one, other = each
    stable = sum(a * b > 0 and min(abs(a), abs(b)) > 0.11 for a, b in zip(one, other, strict=True))
    claim = found["No statistic of the anchor predicts the gain with one sign on every pool"]
    assert (claim.here, claim.holds) == (f"{stable} of 9 do", stable == 0)


def stored(
    folder: Path, change: Callable[[StoredRun], StoredRun], pools: tuple[str, ...] = POOLS[:1]
) -> dict[str, CheckedStatement]:
    """The statements about pools whose runs are changed."""
    with create(folder / "s") as store:
        for record in RECORDS:
            if record.pool.name in pools:
                store.append(change(record))
    return {claim.text: claim for claim in claims(experiment.read(folder / "s"))}


def moved(record: StoredRun, points: float, domains: tuple[str, ...] = DOMAINS) -> StoredRun:
    scores = tuple(
        replace(s, value=min(1.0, max(0.0, s.value + points)), item_scores=())
        if s.domain in domains
        else s
        for s in record.scores
    )
    return replace(record, scores=scores)


def test_a_repair_that_hurts_upholds_nothing(tmp_path: Path) -> None:
    found = stored(tmp_path, lambda r: moved(r, -0.3) if r.kind == "default" else r)
    for text in (
        "Every anchor improves",
        "The mean gain is positive",
        "Over seeds of an anchor the gain moves less than the smallest gain",
        "The residual gap falls",
        "The best repaired anchor beats every baseline, on every pool",
        "The best repaired anchor has the best average rank of all methods",
        "It leads most pool-domain cells",
        "Repaired anchors beat baselines in most pairs",
        "equal share is worse than the default on every pool",
        "No single view reaches all three",
        "Another claim order costs something, and little (under 1 point)",
        "C_max = 0.45 is the best value tried",
    ):
        assert not found[text].holds, text


def test_one_pool_that_differs_is_enough(tmp_path: Path) -> None:
    """On the second pool the repair loses what it gained."""

    def change(record: StoredRun) -> StoredRun:
        if record.kind != "default" or record.pool.name == USED[0]:
            return record
        before = pair(USED[1], record.anchor, record.anchor_seed)[0]
        turned = tuple(
            replace(a, value=2 * b.value - a.value, item_scores=())
            for a, b in zip(record.scores, before.scores, strict=True)
        )
        return replace(record, scores=turned)

    (tmp_path / "first").mkdir()
    first, both = stored(tmp_path / "first", change), stored(tmp_path, change, USED)
    for text in (
        "Every anchor improves",
        "So they do within every pool",
        "equal share is worse than the default on every pool",
        "inverted share is worse than the default on every pool",
        "The best repaired anchor beats every baseline, on every pool",
    ):
        assert first[text].holds and not both[text].holds, text


def test_seeds_that_agree_on_one_pool_do_not_speak_for_another(tmp_path: Path) -> None:
    def change(record: StoredRun) -> StoredRun:
        if record.kind not in ("anchor", "default") or record.anchor != "DARE":
            return record
        if record.pool.name == USED[0]:
            return replace(record, scores=pair(USED[0], "DARE")[record.kind == "default"].scores)
        last = (record.kind, record.anchor_seed) == ("default", 2)
        return moved(record, 0.3) if last else record

    text = "Over seeds of an anchor the gain moves less than the smallest gain"
    (tmp_path / "first").mkdir()
    first = stored(tmp_path / "first", change)[text]
    assert first.here.startswith("0.00 against") and first.holds
    assert not stored(tmp_path, change, USED)[text].holds


def test_runs_that_are_the_default_cost_nothing(tmp_path: Path) -> None:
    """Orders and sweep points with the default's scores: no loss, and the default is a best."""
    default = pair(POOLS[0], "DARE")[1].scores
    found = stored(
        tmp_path,
        lambda r: replace(r, scores=default) if r.kind in ("order", "sweep", "view") else r,
    )
    assert found["Another claim order costs something, and little (under 1 point)"].holds
    for name in ("C_min = 0.1", "C_max = 0.45", "λ = 0.6"):
        assert found[f"{name} is the best value tried"].holds
    assert found["No single view reaches all three"].here == "3 of 3 do"


def test_an_order_that_costs_two_points_costs_too_much(tmp_path: Path) -> None:
    default = pair(POOLS[0], "DARE")[1]
    less = moved(default, -0.02).scores
    found = stored(tmp_path, lambda r: replace(r, scores=less) if r.kind == "order" else r)
    claim = found["Another claim order costs something, and little (under 1 point)"]
    assert (claim.here, claim.holds) == ("−2.00, −2.00", False)


def test_a_statistic_that_orders_the_gains_predicts_them(tmp_path: Path) -> None:
    """Anchors that differ in their scores alone, and gain the more the weaker they are."""
    level = {name: 0.02 * k for k, name in enumerate(experiment.ANCHORS)}
    first = find(POOLS[0], "anchor", "", "Linear")[0]

    def change(record: StoredRun) -> StoredRun:
        if record.kind not in ("anchor", "default"):
            return record
        extra = level[record.anchor] if record.kind == "anchor" else 0.1
        return moved(replace(record, scores=first.scores), extra)

    claim = stored(tmp_path, change)[
        "No statistic of the anchor predicts the gain with one sign on every pool"
    ]
    assert claim.here != "0 of 9 do" and not claim.holds
