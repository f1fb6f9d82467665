"""Which items a printed score is of: a score of n items is k/n, rounded to four decimals.

A value that no k gives is no score of those n items. A value that some k gives may be one by
chance: about one in 10,000/n values is. So a benchmark of few items tells two item counts apart,
and one of tens of thousands says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from research.published.data import POOLS, PublishedTables, table
from research.published.ledger import Ledger
from scipy.stats import binom

from sigmerge.lab.analysis.statistics import Count

TEN_THOUSAND = 10_000
BEYOND_CHANCE = 0.001
"""A count of fits that chance gives more rarely names the items."""
SAMPLES = 10
"""Completions of a problem: the fewest that pass@10 can be read from, and EvalPlus' usual."""

MEASURED = {
    "GSM8K flex": ("GSM8K", 1),
    "GSM8K strict": ("GSM8K", 1),
    "IFEval prompt strict": ("IFEval", 1),
    "IFEval prompt loose": ("IFEval", 1),
    "HE+ P@1": ("HumanEval+ (EvalPlus)", SAMPLES),
    "HE+ P@10": ("HumanEval+ (EvalPlus)", 1),
    "MBPP+ P@1": ("MBPP+ (EvalPlus)", SAMPLES),
    "MBPP+ P@10": ("MBPP+ (EvalPlus)", 1),
    "mMMLU": ("Okapi mMMLU (fr/es/de/ru)", 1),
    "mARC": ("Okapi mARC (fr/es/de/ru)", 1),
    "mHellaSwag": ("Okapi mHellaSwag (fr/es/de/ru)", 1),
    "WildGuardTest": ("WildGuardTest (after evaluator filtering)", 1),
    "HarmBench": ("HarmBench (text-test)", 1),
    "XSTest": ("XSTest", 1),
    "DoAnythingNow": ("DoAnythingNow (evaluator JSONL)", 1),
}
"""Metric -> its benchmark in the table of splits, and answers to an item. The two metrics that
count IFEval's instructions are left out: how many instructions a split has is not printed."""


@dataclass(frozen=True)
class FractionFit:
    """How many of a row's scores are fractions of n answers, and how often chance gives as many."""

    fits: int
    of: int
    each: float
    """The part of all four-decimal values that are fractions of n."""
    different: int
    """Equal scores counted once."""
    hits: int
    """The different ones that are fractions."""

    @property
    def chance(self) -> float:
        """That as many of the different values, or more, are fractions by chance."""
        return float(binom.sf(self.hits - 1, self.different, self.each))

    @property
    def all(self) -> bool:
        return self.fits == self.of

    @property
    def beyond_chance(self) -> bool:
        return self.chance < BEYOND_CHANCE

    def __str__(self) -> str:
        return str(self.fits)


@dataclass(frozen=True)
class FractionTest:
    """One metric of one pool: seven repaired scores and seven of anchors, whole and split."""

    pool: str
    metric: str
    repaired: tuple[FractionFit, FractionFit]
    anchors: tuple[FractionFit, FractionFit]

    @property
    def says(self) -> bool:
        """Whether the items of the whole benchmark would show: seven fits are beyond chance."""
        whole = self.repaired[0]
        return bool(whole.each**whole.of < BEYOND_CHANCE)


def fractions_of(answers: int) -> frozenset[int]:
    """k/n for every k, in ten-thousandths; a half is rounded either way."""
    exact = np.arange(answers + 1) * TEN_THOUSAND / answers
    near = [np.floor(exact + 0.5), np.ceil(exact - 0.5)]
    return frozenset(np.concatenate(near).astype(int).tolist())


def fit(values: list[int], answers: int) -> FractionFit:
    known, different = fractions_of(answers), set(values)
    each = len(known) / (TEN_THOUSAND + 1)
    fits, hits = (sum(value in known for value in some) for some in (values, different))
    return FractionFit(fits, len(values), each, len(different), hits)


def together(rows: Sequence[FractionFit]) -> FractionFit:
    """The scores of several pools on one benchmark, as if they were one row."""
    fits, of, different, hits = (
        sum(getattr(row, name) for row in rows) for name in ("fits", "of", "different", "hits")
    )
    return FractionFit(fits, of, rows[0].each, different, hits)


def fraction_tests() -> list[FractionTest]:
    """Every metric in every pool, in the paper's order."""
    paper = PublishedTables()
    sizes = {r["benchmark"]: (int(r["rows"]), int(r["evaluation"])) for r in _members()}
    found = []
    for pool, name in enumerate(POOLS):
        for metric, (benchmark, answers) in MEASURED.items():
            printed = paper.metrics[metric]
            after = np.rint(TEN_THOUSAND * printed.repaired[pool]).astype(int)
            change = np.rint(TEN_THOUSAND * printed.delta[pool]).astype(int)
            both = [
                tuple(fit(row.tolist(), answers * items) for items in sizes[benchmark])
                for row in (after, after - change)
            ]
            found.append(FractionTest(name, metric, *both))  # type: ignore[arg-type]
    return found


def _members() -> list[dict[str, str]]:
    return table("split_membership")


def statements(_: PublishedTables, ledger: Ledger) -> None:
    """For each metric: are its repaired scores fractions of the evaluation split?"""
    tests = fraction_tests()
    for metric in MEASURED:
        rows = [test for test in tests if test.metric == metric]
        text = f"reported scores come from the evaluation split: {metric}"
        tables = f"split_membership {_label(metric)}"
        if not rows[0].says:
            ledger.not_supported(
                text, "yes", "So many items that nearly every value is a fraction of them."
            )
            continue
        whole, split = (together([row.repaired[side] for row in rows]) for side in (0, 1))
        ledger.fact(
            text, str(Count(21, 21)), str(Count(split.fits, 21)), tables,
            note=f"{whole} of 21 are fractions of the whole benchmark; chance alone gives as many "
            f"with {_chance(whole)}, as many of the split with {_chance(split)}.",
        )  # fmt: skip


def _label(metric: str) -> str:
    kinds = {"GSM8K": "math", "IFEval": "instr", "HE+": "coding", "MBPP+": "coding",
             "mARC": "multi", "mMMLU": "multi", "mHellaSwag": "multi"}  # fmt: skip
    return f"sub_{kinds.get(metric.split()[0], 'safety')}"


def lines() -> Iterator[str]:
    """The section of the page."""
    tests = fraction_tests()
    telling = [test for test in tests if test.says]
    yield "## Which items the printed scores are of"
    yield ""
    yield from _headline(telling)
    yield ""
    yield from _by_benchmark(telling)
    yield ""
    yield "By pool:"
    yield ""
    yield from _by_pool(telling)
    yield ""
    yield (
        "A score of n items is k/n. For each benchmark: how many of a pool's seven repaired "
        "scores, and of its seven anchors' (the score less its printed change), are k/n rounded "
        "to four decimals, with the items of the whole benchmark and with those of the evaluation "
        "split; *a value* is the part of all four-decimal values that are, so what one score "
        "fits by chance; *chance* is how often chance alone gives as many fits of the repaired "
        "scores or more, equal scores of a pool counted once, and pools taken as independent. It "
        "does not know that a score which fits the one may fit the other (a fifth of all k/450 are "
        "fractions of 360: XSTest). One score that is no fraction of n shows "
        "that this score is not the part of those n items that is right; what else it is (of other "
        "items, a mean of means) is not said. An anchor's score is known to a unit of the last "
        "decimal only, so fewer of them fit than are fractions. Pass@1 is read as "
        f"{SAMPLES} completions a problem. IFEval's two measures that count instructions are left "
        "out (a split's number of instructions is not printed); where a benchmark has so many "
        "items that seven fits are no surprise, the row says nothing."
    )
    yield ""
    yield (
        "| pool | metric | repaired: whole | split | anchors: whole | split | a value: whole | "
        "split | chance: whole | split | says |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|"
    for _, rows in groupby(tests, key=lambda test: test.pool):
        yield from map(_row, rows)
    yield ""


def _headline(telling: list[FractionTest]) -> Iterator[str]:
    of_split = sum(test.repaired[1].all for test in telling)
    yield (
        f"**The paper says that every reported score comes from the evaluation split. On "
        f"{len(telling) - of_split} of {len(telling)} pairs of pool and metric that can tell, "
        "at least one of the seven printed scores is no fraction of the split's items.**"
    )


def _by_benchmark(telling: list[FractionTest]) -> Iterator[str]:
    """What all 21 repaired scores of a metric fit, with its chance, and on which pools."""
    metrics = list(dict.fromkeys(test.metric for test in telling))
    rows = {metric: [test for test in telling if test.metric == metric] for metric in metrics}
    sides = {
        metric: [together([test.repaired[side] for test in each]) for side in (0, 1)]
        for metric, each in rows.items()
    }
    beyond = [[m for m in metrics if sides[m][side].beyond_chance] for side in (0, 1)]
    neither = [m for m in metrics if not any(fit.beyond_chance for fit in sides[m])]
    yield (
        f"By benchmark, over the three pools: the whole is fitted beyond chance (rarer than "
        f"{BEYOND_CHANCE:g}) on {len(beyond[0])} of {len(metrics)} metrics{_named(beyond[0])}, the "
        f"split on {len(beyond[1])}{_named(beyond[1])}, neither on {len(neither)}"
        f"{_named(neither)}. Of {len(MEASURED)} metrics {len(MEASURED) - len(metrics)} have so "
        "many items that nearly every value fits."
    )
    yield ""
    for metric in metrics:
        whole, split = sides[metric]
        yield (
            f"- **{metric}**: {whole} of {whole.of} repaired scores fit the whole benchmark "
            f"(chance {_chance(whole)}), {split} the split ({_chance(split)}). "
            f"{_where(rows[metric])}"
        )


def _where(tests: list[FractionTest]) -> str:
    """On which pools the whole is fitted beyond chance, on which the split, on which neither."""
    places: dict[str, list[str]] = {"The whole": [], "The split": [], "Neither, beyond chance": []}
    for test in tests:
        found = [side.beyond_chance for side in test.repaired]
        counts = [f"{test.pool} ({side} of {side.of})" for side in test.repaired]
        if found[0]:
            places["The whole"].append(counts[0])
        if found[1]:
            places["The split"].append(counts[1])
        if not any(found):
            places["Neither, beyond chance"].append(test.pool)
    return " ".join(f"{what}: {', '.join(where)}." for what, where in places.items() if where)


def _by_pool(telling: list[FractionTest]) -> Iterator[str]:
    for pool, rows in groupby(telling, key=lambda test: test.pool):
        own = list(rows)
        whole = [test.metric for test in own if test.repaired[0].all]
        part = [t.metric for t in own if t.repaired[0].beyond_chance and t.metric not in whole]
        split = [test.metric for test in own if test.repaired[1].beyond_chance]
        plain = [sum(test.anchors[side].beyond_chance for test in own) for side in (0, 1)]
        yield (
            f"- {pool}: all seven repaired scores fit the whole benchmark on {len(whole)} of "
            f"{len(own)} metrics{_named(whole)}, some of them beyond chance on {len(part)} more"
            f"{_named(part)}; they fit the split beyond chance on {len(split)}{_named(split)}. "
            f"The anchors fit the whole beyond chance on {plain[0]}, the split on {plain[1]}."
        )


def _chance(found: FractionFit) -> str:
    return f"{found.chance:.2g}"


def _named(metrics: list[str]) -> str:
    return f" ({', '.join(metrics)})" if metrics else ""


def _row(test: FractionTest) -> str:
    (whole, split), (plain, plain_split) = test.repaired, test.anchors
    cells = [
        test.pool, test.metric, whole, split, plain, plain_split,
        f"{whole.each:.3f}", f"{split.each:.3f}",
        _chance(whole), _chance(split), _verdict(test),
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def _verdict(test: FractionTest) -> str:
    if not test.says:
        return "nothing"
    beyond = [side.beyond_chance for side in test.repaired]
    if beyond[0] != beyond[1]:
        side = test.repaired[beyond.index(True)]
        name = ("whole", "split")[beyond.index(True)]
        return name if side.all else f"{name}, {side.of - side.fits} neither way"
    return "both" if beyond[0] else "neither beyond chance"
