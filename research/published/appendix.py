"""The statements of the appendix, section by section."""

from __future__ import annotations

import math

import numpy as np
from research.published.common import (
    CODING,
    DARE,
    DOM,
    GEMMA,
    INSTRUCTION,
    LINEAR,
    MATH,
    MULTILINGUAL,
    P3B,
    P8B,
    SAFETY,
    STUDIED,
    TA,
    TIES,
    gaps,
    retained,
)
from research.published.data import (
    PAPER_DOMAINS,
    POOLS,
    PublishedTables,
    table,
)
from research.published.ledger import Ledger

from sigmerge.lab.analysis import statistics


def setup(paper: PublishedTables, ledger: Ledger) -> None:
    ledger.not_supported(
        "the strongest expert of a domain is its own expert",
        "12 of 15",
        "The scores of the experts are in no table.",
    )
    samples = {row["method"]: row for row in table("efficiency")}["+SigMerge"]["labelled"]
    ledger.fact(
        "five domains × 100 items are the labelled samples", 500, int(samples), "efficiency"
    )
    ledger.fact(
        "a layer of 8 coordinates suffices at C_max = 0.45 and five domains",
        8,
        math.ceil(4 / (1 - 0.45)),
        "hyperparameter_protocol",
    )


def capacity(paper: PublishedTables, ledger: Ledger) -> None:
    ledger.not_supported(
        "correlation of the three views over layers, Llama-3.2-3B",
        "+0.54, +0.78, +0.42",
        "No table holds the views.",
    )
    ledger.not_supported(
        "correlation of the three views over layers, Llama-3.1-8B-Instruct",
        "+0.60, -0.48, -0.38",
        "No table holds the views.",
    )
    rows = {row["capacity_from"]: float(row["macro"]) for row in table("single_view")}
    whole, none = rows["all three views"], rows["uniform capacity"]
    views = [name for name in rows if name.endswith("only")]
    part = [100 * (rows[name] - none) / (whole - none) for name in views]
    slack = 100 * 0.01 / 6.46
    ledger.numbers(
        "recovered by one view: sign, representation, direction",
        ["65.9", "42.4", "33.9"],
        part,
        "single_view",
        slack=slack,
    )
    ledger.number("the three fractions sum to", "142", sum(part), "single_view", slack=slack)
    cost = [whole - rows[name] for name in views]
    ledger.numbers(
        "a single view costs, from and to", ["2.20", "4.27"], [min(cost), max(cost)], "single_view"
    )
    ledger.number(
        "the combined profile is worth, over uniform capacity", "6.46", whole - none, "single_view"
    )


def regressions(paper: PublishedTables, ledger: Ledger) -> None:
    before, after = gaps(paper)
    gain = paper.after - paper.before
    worse = np.argwhere(after > before + 1e-9)
    ledger.fact(
        "triples that end further from their expert",
        "4 of 105",
        str(statistics.Count(len(worse), before.size)),
        DOM,
        inferred=True,
    )
    ledger.fact(
        "of these, multilingual", 3, int((worse[:, 1] == MULTILINGUAL).sum()), DOM, inferred=True
    )
    lower = np.argwhere(gain < 0)
    ledger.fact(
        "further triples below their own anchor", 2, len(lower) - len(worse), DOM, inferred=True
    )
    ledger.numbers(
        "multilingual gaps opened on Llama-3.2-3B by TA and DARE",
        ["0.66", "0.34"],
        100 * after[P3B, MULTILINGUAL, [TA, DARE]],
        DOM,
        inferred=True,
    )
    ledger.numbers(
        "multilingual gap of TIES on Llama-3.1-8B-Instruct, before and after",
        ["3.72", "3.78"],
        [100 * g[P8B, MULTILINGUAL, TIES] for g in (before, after)],
        DOM,
        inferred=True,
    )


def task_arithmetic(paper: PublishedTables, ledger: Ledger) -> None:
    before, after = gaps(paper)
    gain = paper.after - paper.before
    ledger.numbers(
        "math under TA on Llama-3.1-8B-Instruct falls from, to",
        ["78.54", "73.66"],
        [100 * paper.before[P8B, MATH, TA], 100 * paper.after[P8B, MATH, TA]],
        "dom_p1",
    )
    ledger.numbers(
        "its deficit, before and after",
        ["0.46", "5.34"],
        [100 * g[P8B, MATH, TA] for g in (before, after)],
        DOM,
        inferred=True,
    )
    total = before[P8B].sum(0)
    ledger.number(
        "its share of the budget",
        "0.004",
        before[P8B, MATH, TA] / total[TA],
        DOM,
        inferred=True,
        note="From the reported gaps; ρ itself is read on 100 calibration items, where a "
        "math score moves in steps of one point.",
    )
    ledger.numbers(
        "TA's five deficits sum to; the other anchors', from and to",
        ["108.9", "34.2", "76.2"],
        100 * np.array([total[TA], np.delete(total, TA).min(), np.delete(total, TA).max()]),
        DOM,
        inferred=True,
    )
    ledger.fact(
        "anchors under which math improves on Llama-3.1-8B-Instruct",
        "5 of 7",
        str(statistics.Count(int((gain[P8B, MATH] > 0).sum()), 7)),
        "dom_p1",
    )


def margins(paper: PublishedTables, ledger: Ledger) -> None:
    before, _ = gaps(paper)
    gain = paper.after - paper.before
    lead = _leads(paper)
    used = f"baseline_dom {DOM}"
    ledger.numbers(
        "lead over the best baseline on instruction",
        ["5.20", "0.47", "8.09"],
        lead[:, INSTRUCTION],
        used,
    )
    ledger.numbers("lead on safety", ["3.63", "3.24", "15.10"], lead[:, SAFETY], used)
    ledger.fact(
        "domains led on all three pools",
        "instruction, coding, safety",
        ", ".join(d for k, d in enumerate(PAPER_DOMAINS) if (lead[:, k] > 0).all()),
        used,
    )
    behind = [PAPER_DOMAINS[d] for _, d in np.argwhere(lead <= 0)]
    ledger.fact(
        "cells not led", ["math", "math", "multilingual", "multilingual"], sorted(behind), used
    )
    ledger.number("furthest behind in a cell", "1.64", -lead.min(), used)
    linear = paper.before[GEMMA, SAFETY, LINEAR]
    ledger.number(
        "most any baseline improves on the anchor in Gemma's safety",
        "0.23",
        100 * (paper.baseline[GEMMA, SAFETY].max() - linear),
        used,
    )
    order = [PAPER_DOMAINS[k] for k in np.argsort(-before.mean((0, 2)))]
    ledger.fact(
        "domains by aggregate deficit",
        ["instruction", "safety", "coding", "math", "multilingual"],
        order,
        DOM,
        inferred=True,
    )
    ledger.numbers(
        "Gemma's multilingual gains, from and to",
        ["3.5", "5.0"],
        [100 * gain[GEMMA, MULTILINGUAL].min(), 100 * gain[GEMMA, MULTILINGUAL].max()],
        "dom_p2",
    )
    ledger.not_supported(
        "shares move by up to 0.13 under two more partitions; instruction 0.58, 0.45, 0.61",
        "0.13",
        "No table holds deficits under another partition.",
    )
    ledger.not_supported(
        "the order of ρ is the same under three partitions",
        "7 of 7",
        "No table holds deficits under another partition.",
    )


def _leads(paper: PublishedTables) -> np.ndarray:
    """Points by which the best checkpoint of a pool leads the best baseline, per domain."""
    best = paper.macro_after.argmax(1)
    ours = np.array([paper.after[p, :, best[p]] for p in range(3)])
    return 100 * (ours - paper.baseline.max(2))


def budget(paper: PublishedTables, ledger: Ledger) -> None:
    rows = table("order")
    gains = [100 * paper.macro_gain[p, a] for p, a in STUDIED]
    used = f"order {DOM}"
    for kind, printed in (("reverse", ["9.4", "9.7", "11.3"]), ("random", ["5.4", "5.4", "3.6"])):
        cost = [
            100 * (float(r["default"]) - float(r[kind])) / g
            for r, g in zip(rows, gains, strict=True)
        ]
        note = "" if kind == "reverse" else "The paper gives the range 3.6 to 5.4."
        ledger.numbers(
            f"percentage of the gain that {kind} claim order costs",
            printed,
            cost,
            used,
            slack=100 * 0.01 / 5.03,
            note=note,
        )
    ledger.not_supported(
        "spread of random claim order over seeds, in points",
        "0.35",
        "The table prints the mean over seeds only.",
    )
    enough = [math.ceil((domains - 1) / (1 - 0.45)) for domains in (10, 20)]
    ledger.fact(
        "coordinates that suffice for 10 and 20 domains",
        [17, 35],
        enough,
        "hyperparameter_protocol",
    )
    drops = [_sweep_delta(rows, "c_max", "0.65") for rows in paper.sweeps]
    ledger.numbers(
        "C_max = 0.65 costs, on the two Llama pools",
        ["2.72", "0.55"],
        [-d for d in drops],
        "sens_p0 sens_p1",
    )


def _sweep_delta(
    rows: list[dict[str, str]], constant: str, value: str, column: str = "macro"
) -> float:
    """Change in points from the default to another value of one constant."""
    final = {row["constant"]: row["final"] for row in table("hyperparameter_protocol")}[constant]
    chosen = {row["value"]: float(row[column]) for row in rows if row["constant"] == constant}
    return 100 * (chosen[value] - chosen[final])


def ablations(paper: PublishedTables, ledger: Ledger) -> None:
    tables, default = paper.ablation, paper.ablation["default"]
    uniform, equal = tables["uniform capacity"], tables["equal domain share"]
    full = "ablation_full"
    ledger.numbers(
        "uniform capacity costs, per pool",
        ["6.46", "5.32", "10.38"],
        100 * (default - uniform)[:, 0],
        full,
    )
    ledger.numbers(
        "equal shares cost, per pool",
        ["5.09", "5.86", "10.92"],
        100 * (default - equal)[:, 0],
        full,
    )
    ledger.numbers(
        "paired gains of the three settings",
        ["5.96", "5.03", "8.58"],
        [100 * paper.macro_gain[p, a] for p, a in STUDIED],
        "main_gain",
    )
    ledger.fact(
        "domains on which removing C is worse, Llama-3.2-3B",
        "5 of 5",
        str(statistics.Count(int((uniform < equal)[P3B, 1:].sum()), 5)),
        full,
    )
    ledger.fact(
        "domains on which removing ρ is worse, Gemma",
        "4 of 5",
        str(statistics.Count(int((equal < uniform)[GEMMA, 1:].sum()), 5)),
        full,
    )
    for name, d, printed in (
        ("instruction", INSTRUCTION, ["12", "14"]),
        ("safety", SAFETY, ["10", "9"]),
        ("multilingual", MULTILINGUAL, ["3", "3"]),
    ):
        cost = [100 * (default - rows)[:, d + 1].mean() for rows in (uniform, equal)]
        ledger.numbers(
            f"mean cost on {name} of uniform capacity and of equal shares", printed, cost, full
        )
    expected = ["instruction", "safety", "coding", "math", "multilingual"]
    orders = [
        [PAPER_DOMAINS[k] for k in np.argsort(-(default - rows)[:, 1:].mean(0))]
        for rows in (uniform, equal)
    ]
    ledger.fact(
        "domains by mean cost, for both ablations, are in the order of the deficits",
        [", ".join(expected)] * 2,
        [", ".join(order) for order in orders],
        full,
    )
    gap = 100 * np.abs((uniform - equal)[:, 0])
    ledger.fact(
        "the two ablations agree to within 1.4 points", True, bool((gap <= 1.4).all()), full
    )


def sparse_update(paper: PublishedTables, ledger: Ledger) -> None:
    default, sparse = paper.ablation["default"], paper.ablation["sparse-rescaled update"]
    full = "ablation_full"
    ledger.numbers(
        "Gemma's instruction falls, under the sparse update, from, to, and below the anchor by",
        ["50.09", "21.16", "13.03"],
        100
        * np.array(
            [
                default[GEMMA, 2],
                sparse[GEMMA, 2],
                paper.before[GEMMA, INSTRUCTION, LINEAR] - sparse[GEMMA, 2],
            ]
        ),
        f"{full} dom_p2",
    )
    ledger.number(
        "this accounts for so many of the 12.18 points",
        "5.79",
        100 * (default - sparse)[GEMMA, 2] / 5,
        full,
    )
    ledger.fact(
        "the sparse update raises instruction on both other pools",
        True,
        bool((sparse[:2, 2] > default[:2, 2]).all()),
        full,
    )


def all_random(paper: PublishedTables, ledger: Ledger) -> None:
    rows = paper.controls["all three randomized"]
    means = [float(r["macro"]) - float(r["anchor_macro"]) for r in rows]
    used = "directional_full"
    ledger.numbers(
        "all-random means from their anchors, in points", ["+0.02", "-0.03", "-0.01"], means, used
    )
    bounds = []
    for row, mean in zip(rows, means, strict=True):
        gain = float(row["default_macro"]) - float(row["anchor_macro"])
        # Any five values with this mean and deviation have the same interval.
        spread = np.array([-1, -1, 0, 1, 1]) * float(row["sd"])
        low, high = statistics.t_interval(100 * (mean + spread) / gain)
        bounds += [abs(low), abs(high)]
    ledger.fact(
        "all-random t intervals of the retained fraction lie inside ±4.6",
        True,
        max(bounds) <= 4.6,
        used,
        note=f"The furthest bound is {max(bounds):.1f}.",
    )
    weakest = retained(paper, "inverted share") / 4.6
    ledger.numbers(
        "the weakest control retains so many times that bound",
        ["2", "4"],
        [weakest.min(), weakest.max()],
        used,
    )
    ledger.not_supported(
        "all-random seeds below their anchor",
        "9 of 15",
        "The table prints mean and deviation over seeds only.",
    )


def cost(paper: PublishedTables, ledger: Ledger) -> None:
    hours = {row["method"]: float(row["gpu_hours"]) for row in table("efficiency")}
    repaired = hours["Dense anchor"] + hours["+SigMerge"]
    ledger.number("GPU hours of a repaired checkpoint", "1.0", repaired, "efficiency")
    ledger.number(
        "MERGE3 costs so many times that", "26.8", hours["MERGE3"] / repaired, "efficiency"
    )
    labelled = {row["method"]: int(row["labelled"]) for row in table("efficiency")}
    fewer = sum(
        labelled[m] < labelled["+SigMerge"]
        for m in labelled
        if m not in ("Dense anchor", "+SigMerge")
    )
    ledger.fact(
        "baselines that read fewer labelled samples",
        "4 of 5",
        str(statistics.Count(fewer, 5)),
        "efficiency",
    )
    for row in table("perseed"):
        sample = statistics.seed_summary([float(row[f"seed{s}"]) for s in range(3)])
        printed = [row["mean"], row["std"], row["range"]]
        ledger.numbers(
            f"mean, std and range over seeds: {row['method']}, {row['pool']}",
            printed,
            [sample.mean, sample.std, sample.range],
            "perseed",
            slack=0.0001,
        )
    spans = [100 * float(r["range"]) for r in table("perseed") if r["quantity"] == "macro"]
    ledger.numbers("MERGE3 spans over seeds, in points", ["2.88", "0.83", "3.93"], spans, "perseed")
    seed_note = "The table prints gains per seed, not the scores of anchor and repair."
    ledger.not_supported("spans of repaired checkpoints over seeds", "0.26 to 0.54", seed_note)
    ledger.not_supported("spans of stochastic anchors over seeds", "0.27 to 0.46", seed_note)
    ledger.not_supported("the repair adds to the anchor's seed spread at most", "0.08", seed_note)
    ledger.not_supported(
        "MERGE3 moves further than a reseeded repair by a factor of", "2, and 6 to 11", seed_note
    )
    ledger.not_supported(
        "Gemma's sparse-rescaled update over seeds",
        "0.4480, 0.4549, 0.4449",
        "Only seed 0 is in a table.",
    )


def sensitivity(paper: PublishedTables, ledger: Ledger) -> None:
    first, second = paper.sweeps
    other = [
        [float(r["delta"]) for r in rows if float(r["delta"]) != 0] for rows in (first, second)
    ]
    ledger.fact(
        "alternatives below the default on Llama-3.2-3B",
        "9 of 9",
        str(statistics.Count(sum(d < 0 for d in other[0]), len(other[0]))),
        "sens_p0",
    )
    ledger.fact(
        "alternatives above the default on Llama-3.1-8B-Instruct",
        "5 of 9",
        str(statistics.Count(sum(d > 0 for d in other[1]), len(other[1]))),
        "sens_p1",
    )
    ledger.numbers(
        "C_min = 0 and λ = 1.00 cost, on Llama-3.2-3B",
        ["2.39", "3.72"],
        [-_sweep_delta(first, "c_min", "0.00"), -_sweep_delta(first, "lambda", "1.00")],
        "sens_p0",
    )
    ledger.number(
        "the best alternative on Llama-3.1-8B-Instruct gains",
        "0.61",
        100 * max(other[1]),
        "sens_p1",
    )
    moves = [_sweep_delta(second, "lambda", "1.00", d) for d in PAPER_DOMAINS]
    ledger.numbers(
        "λ from 0.60 to 1.00 moves math, instruction, coding, multilingual, safety",
        ["-0.61", "4.26", "-0.80", "-0.49", "0.71"],
        moves,
        "sens_p1",
    )
    before, _ = gaps(paper)
    start = 100 * before[P8B, :, LINEAR]
    ledger.numbers(
        "deficits there: instruction, safety, and at most for the rest",
        ["27.66", "12.55", "4.38"],
        [start[INSTRUCTION], start[SAFETY], start[[MATH, CODING, MULTILINGUAL]].max()],
        DOM,
        inferred=True,
    )


def best_constants(paper: PublishedTables, ledger: Ledger) -> None:
    first, used = paper.sweeps[0], "sens_p0 sens_p1"
    best = {
        (constant, domain): max(
            (r for r in first if r["constant"] == constant), key=lambda r: float(r[domain])
        )["value"]
        for constant in ("c_min", "c_max", "lambda")
        for domain in PAPER_DOMAINS
    }
    ledger.fact(
        "best C_max per domain on Llama-3.2-3B",
        ["0.35", "0.55", "0.45", "0.45", "0.45"],
        [best["c_max", d] for d in PAPER_DOMAINS],
        "sens_p0",
    )
    ledger.fact(
        "all domains peak at C_min = 0.10 and λ = 0.60 there",
        True,
        all(best["c_min", d] == "0.10" and best["lambda", d] == "0.60" for d in PAPER_DOMAINS),
        "sens_p0",
    )
    ledger.numbers(
        "the compromise costs math and instruction",
        ["0.89", "0.48"],
        [
            _sweep_delta(first, "c_max", "0.35", "math"),
            _sweep_delta(first, "c_max", "0.55", "instruction"),
        ],
        used,
    )


AnchorTable = list[list[dict[str, float]]]


def _anchor_table(paper: PublishedTables) -> AnchorTable:
    """The nine statistics of every anchor, by pool."""
    gap, _ = gaps(paper)
    return [
        [statistics.anchor_statistics(paper.before[p, :, a], gap[p, :, a]) for a in range(7)]
        for p in range(3)
    ]


def _within(nine: AnchorTable, name: str, target: np.ndarray) -> list[float]:
    return [statistics.spearman([s[name] for s in nine[p]], target[p]) for p in range(3)]


def _pooled(nine: AnchorTable, name: str, target: np.ndarray) -> float:
    return statistics.spearman([s[name] for row in nine for s in row], target.ravel())


def anchor_statistics(paper: PublishedTables, ledger: Ledger) -> None:
    before, gain = paper.macro_before, paper.macro_gain
    spread = 100 * np.ptp(before, axis=1).max()
    ledger.number("anchors of a pool differ by up to, in points", "15", spread, "main_gain")
    gap, _ = gaps(paper)
    nine = _anchor_table(paper)
    found = [statistics.spearman(before[k], gain[k]) for k in range(3)]
    ledger.fact(
        "anchor Macro-5 and gain correlate on two pools and on the third",
        ["-0.96", "-0.86", "+0.11"],
        sorted((f"{x:+.2f}" for x in found), key=float),
        "main_gain",
        note="Spearman of the printed macro scores. The paper does not say which pool is which; "
        f"in its order of pools they are {', '.join(f'{x:+.2f}' for x in found)}.",
    )
    entropies = np.array([[s["share entropy"] for s in row] for row in nine])
    ledger.numbers(
        "entropy of ρ and gain correlate over 21 settings, and within Llama-3.1-8B-Instruct",
        ["+0.78", "+0.07"],
        [_pooled(nine, "share entropy", gain), _within(nine, "share entropy", gain)[P8B]],
        DOM,
        inferred=True,
    )
    ledger.number(
        "the entropy spans there, in nats", "0.12", np.ptp(entropies[P8B]), DOM, inferred=True
    )
    ledger.fact(
        "instruction has the largest share under all seven anchors there",
        True,
        bool((gap[P8B].argmax(0) == INSTRUCTION).all()),
        DOM,
        inferred=True,
    )
    signs = {name: _within(nine, name, gain) for name in nine[0][0]}
    stable = [
        n for n, r in signs.items() if not np.isnan(r).any() and (min(r) > 0.11 or max(r) < -0.11)
    ]
    ledger.fact(
        "statistics that keep their sign on all three pools",
        0,
        len(stable),
        DOM,
        inferred=True,
        note="A correlation of at most 0.11 counts as none: the paper's own +0.11 is its "
        "clearest reversal.",
    )


def repaired_scores(paper: PublishedTables, ledger: Ledger) -> None:
    after, means, nine = paper.macro_after, paper.before.mean(1), _anchor_table(paper)
    ledger.number(
        "range of domain scores and repaired Macro-5 correlate over 21 settings",
        "+0.73",
        _pooled(nine, "score range", after),
        DOM,
    )
    ledger.numbers(
        "and within the pools",
        ["-0.86", "-0.64", "-0.54"],
        _within(nine, "score range", after),
        DOM,
    )
    ledger.numbers(
        "anchor and repaired Macro-5 correlate within the pools",
        ["+0.96", "+0.89", "+0.86"],
        [statistics.spearman(means[k], paper.after[k].mean(0)) for k in range(3)],
        DOM,
        note="Of unrounded means of the domain scores; with the printed macro scores, where "
        "Linear and Fisher tie, the first is 0.955.",
    )


def selection(paper: PublishedTables, ledger: Ledger) -> None:
    before, after = paper.macro_before, paper.macro_after
    kept = [statistics.rank_preservation(before[k], after[k]) for k in range(3)]
    ledger.fact(
        "within-pool anchor pairs that keep their order",
        "56 of 63",
        str(statistics.Count(sum(c.hits for c in kept), sum(c.of for c in kept))),
        "main_gain",
        note="With the printed macro scores, where Linear and Fisher tie on Llama-3.2-3B and "
        "a tie is no order; unrounded means give 57.",
    )
    rules = [
        statistics.regret(100 * paper.macro_before[k], 100 * paper.macro_after[k]) for k in range(3)
    ]
    for rule, row in zip(("strongest", "random", "weakest"), table("anchor_regret"), strict=True):
        ledger.numbers(
            f"{rule} anchor gives up, per pool",
            [row[p] for p in POOLS],
            [getattr(r, rule) for r in rules],
            "anchor_regret main_gain",
        )
    ledger.number(
        "strongest anchor gives up on average",
        "0.32",
        np.mean([r.strongest for r in rules]),
        "main_gain",
    )
    ledger.fact(
        "the largest of these is wider than any gain",
        True,
        bool(max(r.weakest for r in rules) > 100 * paper.macro_gain.max()),
        "main_gain",
    )


def _changes(paper: PublishedTables) -> tuple[dict[str, float], dict[str, int], dict[str, int]]:
    """Of each metric the mean gain in points, and how many settings fall and rise."""
    deltas = {name: metric.delta for name, metric in paper.metrics.items()}
    return (
        {name: 100 * delta.mean() for name, delta in deltas.items()},
        {name: int((delta < 0).sum()) for name, delta in deltas.items()},
        {name: int((delta > 0).sum()) for name, delta in deltas.items()},
    )


def submetrics(paper: PublishedTables, ledger: Ledger) -> None:
    mean, _, positive = _changes(paper)
    ifeval = [name for name in mean if name.startswith("IFEval")]
    ledger.fact(
        "IFEval variants that improve on all 21 settings",
        "4 of 4",
        str(statistics.Count(sum(positive[n] == 21 for n in ifeval), 4)),
        "sub_instr",
    )
    ledger.numbers(
        "their mean gains, from and to",
        ["11.65", "15.03"],
        [min(mean[n] for n in ifeval), max(mean[n] for n in ifeval)],
        "sub_instr",
    )
    coding = ("HE+ P@1", "MBPP+ P@1", "HE+ P@10", "MBPP+ P@10")
    ledger.fact(
        "coding metrics that improve on all 21 settings",
        "4 of 4",
        str(statistics.Count(sum(positive[n] == 21 for n in coding), 4)),
        "sub_coding",
    )
    ledger.numbers(
        "pass@1 gains on HumanEval+ and MBPP+, then pass@10",
        ["8.28", "5.72", "7.82", "4.95"],
        [mean[n] for n in coding],
        "sub_coding",
    )


def regressed_submetrics(paper: PublishedTables, ledger: Ledger) -> None:
    mean, negative, positive = _changes(paper)
    math_metrics = ("GSM8K strict", "GSM8K flex")
    ledger.fact(
        "negative settings of GSM8K strict and flexible extraction",
        [7, 2],
        [negative[n] for n in math_metrics],
        "sub_math",
    )
    ledger.numbers(
        "their mean gains", ["2.04", "4.01"], [mean[n] for n in math_metrics], "sub_math"
    )
    ledger.fact("negative settings of DoAnythingNow", 6, negative["DoAnythingNow"], "sub_safety")
    ledger.fact(
        "WildGuardTest and HarmBench improve on all settings, XSTest on all but one, unchanged",
        [21, 21, 20, 0],
        [positive["WildGuardTest"], positive["HarmBench"], positive["XSTest"], negative["XSTest"]],
        "sub_safety",
    )
    multi = ("mMMLU", "mARC", "mHellaSwag")
    ledger.numbers(
        "multilingual mean gains, from and to",
        ["1.53", "1.75"],
        [min(mean[n] for n in multi), max(mean[n] for n in multi)],
        "sub_multi",
    )
    counts = sorted(negative[n] for n in multi)
    ledger.fact(
        "multilingual negative settings, from and to", [2, 7], [counts[0], counts[-1]], "sub_multi"
    )
    groups = [name for name in mean if name not in PAPER_DOMAINS]
    ledger.fact(
        "reported metrics", 17, len(groups), "sub_math sub_instr sub_coding sub_multi sub_safety"
    )
