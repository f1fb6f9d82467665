"""The statements of the main text, section by section."""

from __future__ import annotations

import numpy as np
from research.published.common import (
    CODING,
    DOM,
    FOUR,
    GEMMA,
    MULTILINGUAL,
    P3B,
    P8B,
    SAFETY,
    STUDIED,
    all_of,
    equal,
    gap,
    gaps,
    retained,
)
from research.published.data import (
    BASELINES,
    PAPER_DOMAINS,
    POOLS,
    PRINTED_ANCHORS,
    PublishedTables,
    table,
)
from research.published.ledger import Ledger

from sigmerge.lab.analysis import statistics


def tables(paper: PublishedTables, ledger: Ledger) -> None:
    gain = paper.after - paper.before
    ledger.fact(
        "a domain's gain is the difference of its two rows",
        all_of(105),
        equal(gain, paper.printed_gain, 0),
        DOM,
    )
    macro = np.stack([paper.macro_before, paper.macro_after])
    means = np.stack([paper.before.mean(1), paper.after.mean(1)])
    ledger.fact(
        "Macro-5 is the mean of the five domains", all_of(42), equal(macro, means, FOUR * 2), DOM
    )
    ledger.fact(
        "a baseline's Macro-5 is the mean of its five domains",
        all_of(15),
        equal(paper.baseline_macro, paper.baseline.mean(1), FOUR * 2),
        "baseline_dom",
    )
    printed = np.array([[float(row[a]) for a in PRINTED_ANCHORS] for row in table("main_gain")])
    whole = np.concatenate(
        [[paper.macro_before[p], paper.macro_after[p], paper.macro_gain[p]] for p in range(3)]
    )
    ledger.fact(
        "the main table repeats the domain tables' Macro-5",
        all_of(63),
        equal(printed, 100 * whole, 0),
        f"main_gain {DOM}",
    )
    for name, domain, parts in (
        ("coding", CODING, ("HE+ P@1", "MBPP+ P@1")),
        ("multilingual", MULTILINGUAL, ("mMMLU", "mARC", "mHellaSwag")),
        ("safety", SAFETY, ("WildGuardTest", "HarmBench", "XSTest", "DoAnythingNow")),
    ):
        mean = np.mean([paper.metrics[part].repaired for part in parts], axis=0)
        label = {"multilingual": "multi"}.get(name, name)
        ledger.fact(
            f"the {name} score is the mean of its {len(parts)} benchmarks",
            all_of(21),
            equal(paper.after[:, domain], mean, FOUR * 2),
            f"sub_{label} {DOM}",
        )


def splits(paper: PublishedTables, ledger: Ledger) -> None:
    full = {name: rows[:, 0] for name, rows in paper.ablation.items()}
    short = [
        (100 * full[r["variant"]][POOLS.index(r["pool"])], float(r["macro"]))
        for r in table("ablation")
    ]
    a, b = np.array(short).T
    ledger.fact(
        "the short ablation table repeats the full one",
        all_of(12),
        equal(a, b, 0),
        "ablation ablation_full",
    )
    rows = table("split_membership")
    ledger.fact(
        "calibration takes a fifth of each benchmark, rounded down",
        all_of(11),
        str(
            statistics.Count(
                sum(int(r["calibration"]) == int(r["rows"]) // 5 for r in rows[:-1]), 11
            )
        ),
        "split_membership",
    )
    totals = [sum(int(r[c]) for r in rows[:-1]) for c in ("rows", "calibration", "evaluation")]
    ledger.fact("the split's totals", [98940, 19784, 79156], totals, "split_membership")


def deficits(paper: PublishedTables, ledger: Ledger) -> None:
    before, after = gaps(paper)
    gain = paper.after - paper.before
    pools = list(zip(before.mean((1, 2)), after.mean((1, 2)), strict=True))
    rows = {row["pool"]: row for row in table("residual_gap")}
    for k, pool in enumerate(POOLS):
        ledger.numbers(
            f"residual gap before and after, {pool}",
            [rows[pool]["anchor"], rows[pool]["repaired"]],
            [100 * x for x in pools[k]],
            f"residual_gap {DOM}",
            inferred=True,
        )
    means = [
        np.mean([float(rows[p][c]) for p in POOLS]) for c in ("anchor", "repaired", "reduction")
    ]
    ledger.numbers(
        "the gap over all pools is the mean of the three: 12.13 → 5.77",
        ["12.13", "5.77", "-6.36"],
        means,
        "residual_gap",
    )
    ledger.number(
        "Spearman of deficit and gain over the 105 triples",
        "+0.759",
        statistics.spearman(before.ravel(), gain.ravel()),
        DOM,
        inferred=True,
    )
    ledger.numbers(
        "Spearman within the three pools",
        ["+0.77", "+0.85", "+0.61"],
        [statistics.spearman(before[k].ravel(), gain[k].ravel()) for k in range(3)],
        DOM,
        inferred=True,
    )
    for name, deficit, recovered in (
        ("instruction", "22.97", "50.7"),
        ("safety", "16.77", "56.3"),
        ("coding", "9.52", "73.5"),
        ("math", "9.13", "43.9"),
    ):
        d = PAPER_DOMAINS.index(name)
        part = statistics.recovered_fraction(before[:, d].ravel(), gain[:, d].ravel())
        ledger.numbers(
            f"mean {name} deficit, and the percentage recovered",
            [deficit, recovered],
            [100 * before[:, d].mean(), 100 * part],
            DOM,
            inferred=True,
        )


def control_group(paper: PublishedTables, ledger: Ledger) -> None:
    before, _ = gaps(paper)
    gain = paper.after - paper.before
    multilingual = before[:, MULTILINGUAL].mean(1)
    ledger.numbers(
        "mean multilingual deficit: all pools, and the last two",
        ["2.27", "3.64", "3.17"],
        100 * np.array([multilingual.mean(), *multilingual[1:]]),
        DOM,
        inferred=True,
    )
    ledger.numbers(
        "multilingual moves by, per pool",
        ["-0.07", "0.68", "4.20"],
        100 * gain[:, MULTILINGUAL].mean(1),
        DOM,
    )
    ledger.fact(
        "all seven anchors of Llama-3.2-3B match the multilingual expert",
        True,
        bool((before[P3B, MULTILINGUAL] == 0).all()),
        DOM,
        inferred=True,
    )
    for name, deficit, recovered in (("instruction", "13.89", "90.7"), ("math", "12.74", "33.4")):
        d = PAPER_DOMAINS.index(name)
        part = statistics.recovered_fraction(before[GEMMA, d], gain[GEMMA, d])
        ledger.numbers(
            f"Gemma's {name} deficit, and the percentage recovered",
            [deficit, recovered],
            [100 * before[GEMMA, d].mean(), 100 * part],
            DOM,
            inferred=True,
        )


def decomposition(paper: PublishedTables, ledger: Ledger) -> None:
    default = paper.ablation["default"][:, 0]
    costs = {name: 100 * (default - rows[:, 0]) for name, rows in paper.ablation.items()}
    uniform, equal = costs["uniform capacity"], costs["equal domain share"]
    ledger.numbers(
        "uniform capacity costs, from and to",
        ["5.32", "10.38"],
        [uniform.min(), uniform.max()],
        "ablation",
    )
    ledger.numbers(
        "equal shares cost, from and to", ["5.09", "10.92"], [equal.min(), equal.max()], "ablation"
    )
    anchor = np.array([paper.macro_before[p, a] for p, a in STUDIED])
    ablated = np.stack(
        [paper.ablation[n][:, 0] for n in ("uniform capacity", "equal domain share")]
    )
    distance = 100 * (ablated - anchor)
    ledger.fact(
        "all six ablated checkpoints land within 2.4 points of the anchor",
        True,
        bool((np.abs(distance) <= 2.4).all()),
        f"ablation {DOM}",
    )
    ledger.fact(
        "ablated checkpoints below the anchor",
        "5 of 6",
        str(statistics.Count(int((distance < 0).sum()), 6)),
        f"ablation {DOM}",
    )
    ledger.fact(
        "collapsing either factor gives up the whole gain: ablations that do",
        "6 of 6",
        str(statistics.Count(int((distance <= 0).sum()), 6)),
        f"ablation {DOM}",
        note="Equal shares keep 0.87 of 5.96 points on Llama-3.2-3B; the paper's own next "
        "sentence counts five.",
    )
    gains = np.array([paper.macro_gain[p, a] for p, a in STUDIED])
    ledger.fact(
        "on Gemma both cost more than the gain",
        True,
        bool(min(uniform[GEMMA], equal[GEMMA]) > 100 * gains[GEMMA]),
        f"ablation {DOM}",
    )
    ledger.numbers(
        "change by the sparse-rescaled update, per pool",
        ["-1.92", "+0.52", "-12.18"],
        -costs["sparse-rescaled update"],
        "ablation",
    )


SINGLE_CONTROLS = (
    "inverted capacity", "permuted capacity", "inverted share", "random share",
    "equal-budget random mask",
)  # fmt: skip
CONTROL_SLACK = 100 * 0.01 / 5.03
"""Macro scores are rounded to 0.01 points; a retained fraction moves by that over the gain."""


def controls(paper: PublishedTables, ledger: Ledger) -> None:
    kept = {name: retained(paper, name) for name in paper.controls}
    for name, rows in paper.controls.items():
        ledger.numbers(
            f"retained fractions of {name}",
            [row["retained"] for row in rows],
            kept[name].tolist(),
            "directional_full",
            slack=CONTROL_SLACK,
        )
    best = np.max([kept[name] for name in SINGLE_CONTROLS], axis=0)
    ledger.numbers(
        "the best control retains, per pool",
        ["42", "49", "45"],
        best.tolist(),
        "directional_full",
        slack=CONTROL_SLACK,
    )
    orders = {tuple(sorted(SINGLE_CONTROLS, key=lambda name: kept[name][k])) for k in range(3)}
    ledger.fact(
        "the five controls rank identically in all three pools",
        True,
        len(orders) == 1,
        "directional_full",
    )


def control_ranges(paper: PublishedTables, ledger: Ledger) -> None:
    kept = {name: retained(paper, name) for name in SINGLE_CONTROLS}
    for name, low, high in (
        ("inverted capacity", "25", "28"),
        ("permuted capacity", "35", "38"),
        ("inverted share", "11", "17"),
        ("random share", "42", "49"),
    ):
        ledger.numbers(
            f"{name} retains, from and to",
            [low, high],
            [kept[name].min(), kept[name].max()],
            "directional_full",
            slack=CONTROL_SLACK,
        )
    for factor, inverted, random, low, high in (
        ("ρ", "inverted share", "random share", "28", "34"),
        ("C", "inverted capacity", "permuted capacity", "10", "12"),
    ):
        gap = kept[random] - kept[inverted]
        ledger.numbers(
            f"points between inverting and randomizing {factor}",
            [low, high],
            [gap.min(), gap.max()],
            "directional_full",
            slack=CONTROL_SLACK,
        )
    ledger.numbers(
        "equal-budget random masks retain",
        ["22", "21", "22"],
        kept["equal-budget random mask"].tolist(),
        "directional_full",
        slack=CONTROL_SLACK,
    )
    tightest = min(SINGLE_CONTROLS, key=lambda name: float(np.ptp(kept[name])))
    ledger.fact(
        "the control with the tightest spread over pools",
        "equal-budget random mask",
        tightest,
        "directional_full",
    )


def pairs(paper: PublishedTables, ledger: Ledger) -> None:
    before, after, gain = paper.macro_before, paper.macro_after, 100 * paper.macro_gain
    main = "main_gain"
    ledger.fact(
        "pairs that improve",
        "21 of 21",
        str(statistics.Count(int((gain > 0).sum()), gain.size)),
        main,
    )
    ledger.number("mean paired gain in points", "+6.74", gain.mean(), main)
    ledger.number(
        "mean relative gain",
        "15.0%",
        100 * statistics.relative_gain(before.ravel(), after.ravel()),
        main,
        note="The mean of the 21 ratios; the ratio of the means is "
        f"{100 * (after.mean() / before.mean() - 1):.1f} %.",
    )
    ledger.numbers(
        "relative gain per pool",
        ["14.9%", "10.1%", "19.9%"],
        [100 * statistics.relative_gain(before[k], after[k]) for k in range(3)],
        main,
    )
    ledger.numbers("smallest and largest gain", ["+4.00", "+9.88"], [gain.min(), gain.max()], main)
    ledger.number(
        "two-sided exact Wilcoxon p over the 21 pairs",
        "9.5e-7",
        statistics.wilcoxon(before.ravel(), after.ravel()),
        main,
    )
    ledger.numbers("mean gain per pool", ["+5.62", "+5.70", "+8.90"], gain.mean(1), main)
    seeds = [r for r in table("perseed") if r["quantity"] == "gain"]
    values = np.array([[float(r[f"seed{s}"]) for s in range(3)] for r in seeds])
    ledger.fact(
        "stochastic anchor-pool-seed pairs that improve",
        "18 of 18",
        str(statistics.Count(int((values > 0).sum()), values.size)),
        "perseed",
    )
    ledger.number(
        "largest span of the gain over seeds, in points",
        "0.12",
        100 * np.ptp(values, axis=1).max(),
        "perseed",
    )


def gains_by_anchor(paper: PublishedTables, ledger: Ledger) -> None:
    before, gain, main = paper.macro_before, 100 * paper.macro_gain, "main_gain"
    weakest = [PRINTED_ANCHORS[int(before[k].argmin())] for k in (P8B, GEMMA)]
    largest = [PRINTED_ANCHORS[int(gain[k].argmax())] for k in (P8B, GEMMA)]
    ledger.fact(
        "largest gain on the weakest anchor, TA, on the last two pools",
        [["TA", "TA"]] * 2,
        [weakest, largest],
        main,
    )
    order = np.argsort(-before[P3B], kind="stable")
    halves = [gain[P3B][order[:3]].mean(), gain[P3B][order[3:]].mean()]
    others = [gain[P3B][order[:4]].mean(), gain[P3B][order[4:]].mean()]
    fits = min((halves, others), key=lambda h: abs(h[0] - 5.64) + abs(h[1] - 5.59))
    ledger.numbers(
        "gain of the stronger and the weaker half on Llama-3.2-3B",
        ["+5.64", "+5.59"],
        fits,
        main,
        note=f"Seven anchors: the stronger half has {3 if fits is halves else 4} of them.",
    )
    smallest = [PRINTED_ANCHORS[int(gain[k].argmin())] for k in range(3)]
    ledger.fact(
        "the smallest gain of each pool falls on TIES or Fisher, never its weakest anchor",
        True,
        all(
            s in ("TIES", "Fisher") and s != PRINTED_ANCHORS[int(before[k].argmin())]
            for k, s in enumerate(smallest)
        ),
        main,
    )


def _cells(paper: PublishedTables) -> list[dict[str, float]]:
    """The six methods in each of the 15 pool-domain cells; ours is the pool's best checkpoint."""
    best = paper.macro_after.argmax(1)
    return [
        {
            "SigMerge": paper.after[p, d, best[p]],
            **dict(zip(BASELINES, paper.baseline[p, d], strict=True)),
        }
        for p in range(3)
        for d in range(5)
    ]


def baselines(paper: PublishedTables, ledger: Ledger) -> None:
    best, others = 100 * paper.macro_after.max(1), 100 * paper.baseline_macro
    used = "baselines baseline_dom main_gain"
    ledger.numbers(
        "margin over the strongest baseline",
        ["+2.46", "+1.18", "+5.74"],
        best - others.max(1),
        used,
    )
    _, after = gaps(paper)
    theirs = gap(paper, paper.baseline)
    ledger.numbers(
        "lowest mean gap of a repaired checkpoint",
        ["3.94", "3.26", "1.79"],
        100 * after.mean(1).min(1),
        DOM,
        inferred=True,
    )
    ledger.numbers(
        "lowest mean gap of a baseline",
        ["6.64", "4.08", "6.17"],
        100 * theirs.mean(1).min(1),
        "baseline_dom",
        inferred=True,
    )


def baseline_ranks(paper: PublishedTables, ledger: Ledger) -> None:
    others, used = 100 * paper.baseline_macro, "baselines baseline_dom main_gain"
    cells = _cells(paper)
    ranks = statistics.average_ranks(cells)
    ledger.number(
        "average rank over the 15 pool-domain cells",
        "1.67",
        ranks["SigMerge"],
        f"baseline_dom {DOM}",
        note="Ours is the checkpoint with the best Macro-5 of each pool.",
    )
    ledger.fact(
        "this rank is the best of the six",
        "SigMerge",
        min(ranks, key=lambda m: ranks[m]),
        f"baseline_dom {DOM}",
    )
    ledger.fact(
        "first places in the 15 cells",
        "11 of 15",
        str(statistics.Count(statistics.first_places(cells)["SigMerge"], 15)),
        f"baseline_dom {DOM}",
    )
    won = [statistics.wins(paper.macro_after[k], paper.baseline_macro[k]) for k in range(3)]
    ledger.fact(
        "checkpoint-baseline pairs won",
        "74 of 105",
        str(statistics.Count(sum(w.hits for w in won), sum(w.of for w in won))),
        used,
    )
    clear = [int((100 * paper.macro_after[k] > others[k].max()).sum()) for k in range(3)]
    ledger.fact("checkpoints that clear the strongest baseline, of 7", [3, 1, 6], clear, used)
    names = [BASELINES[int(others[P3B].argmax())], BASELINES[int(others[GEMMA].argmin())]]
    ledger.fact(
        "MERGE3 is strongest on Llama-3.2-3B and weakest on Gemma",
        ["MERGE3", "MERGE3"],
        names,
        "baselines",
    )
    spread = 100 * (
        paper.ablation["default"][:, 0]
        - np.stack([paper.ablation[n][:, 0] for n in ("uniform capacity", "equal domain share")])
    )
    ledger.numbers(
        "capacity and shares account for so many points on their own",
        ["5", "11"],
        [spread.min(), spread.max()],
        "ablation",
    )
