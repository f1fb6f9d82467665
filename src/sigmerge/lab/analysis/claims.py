"""The paper's main statements, tested on another experiment: which hold there, which do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from sigmerge.lab.analysis import statistics
from sigmerge.lab.analysis.derived import SWEPT, cells, known_before, moved_shares, sweeps, words
from sigmerge.lab.analysis.results import NotInStore, Results
from sigmerge.pages.table import printed


@dataclass(frozen=True)
class CheckedStatement:
    """A statement with the paper's number, the number here, and whether it holds here."""

    text: str
    paper: str
    here: str
    holds: bool


_Statements = Iterator[CheckedStatement]


def _points(value: float) -> str:
    return printed(value, "points")


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def pairs(results: Results) -> _Statements:
    main = results.main
    gain, before, after = (main[name].to_numpy() for name in ("gain", "before", "after"))
    improved = statistics.Count(int((gain > 0).sum()), gain.size)
    yield CheckedStatement(
        "Every anchor improves", "21 of 21", str(improved), improved.hits == improved.of
    )
    yield CheckedStatement(
        "The mean gain is positive", "+6.74", _points(gain.mean()), gain.mean() > 0
    )
    p = statistics.wilcoxon(before, after)
    yield CheckedStatement(
        "The gain is no chance (Wilcoxon, two-sided)", "9.5e-7", f"{p:.2g}", p < 0.05
    )
    spans = [
        float(np.ptp(group["gain"].to_numpy()))
        for _, group in results.pairs.group_by("pool", "anchor")
        if group.height > 1
    ]
    if spans:
        smallest = float(gain.min())
        yield CheckedStatement(
            "Over seeds of an anchor the gain moves less than the smallest gain",
            "0.12 < 4.00",
            f"{printed(max(spans), 'percent')} against {printed(smallest, 'percent')}",
            max(spans) < smallest,
        )


def gaps(results: Results) -> _Statements:
    rows = results.main_by_domain.drop_nulls("gap_before")
    if rows.is_empty():
        raise NotInStore("no scores of experts")
    before, after = (float(rows[n].to_numpy().mean()) for n in ("gap_before", "gap_after"))
    shown = f"{printed(before, 'percent')} → {printed(after, 'percent')}"
    yield CheckedStatement("The residual gap falls", "12.13 → 5.77", shown, after < before)
    rank = statistics.spearman(rows["gap_before"], rows["gain"])
    yield CheckedStatement(
        "Domains gain where they lack (Spearman)", "+0.76", _signed(rank), rank > 0
    )
    each = [
        statistics.spearman(r["gap_before"], r["gain"])
        for pool in results.pools
        if (r := rows.filter(pl.col("pool") == pool)).height > 2
    ]
    yield CheckedStatement(
        "So they do within every pool",
        "+0.77, +0.85, +0.61",
        ", ".join(map(_signed, each)),
        all(value > 0 for value in each),
    )


PRINTED_LOSSES = {
    "uniform_capacity": "−6.46, −5.32, −10.38",
    "equal_share": "−5.09, −5.86, −10.92",
    "inverted_capacity": "−4.48, −3.71, −6.19",
    "permuted_capacity": "−3.85, −3.11, −5.31",
    "inverted_share": "−5.33, −4.29, −7.16",
    "random_share": "−3.48, −2.59, −4.70",
    "random_mask": "−4.68, −3.96, −6.70",
}
"""Settings that the paper finds worse than the default, and the points they lose on its pools."""


def parts(results: Results) -> _Statements:
    rows = results.summary("ablation", "control")
    for setting, paper in PRINTED_LOSSES.items():
        here = rows.filter(pl.col("setting") == setting)
        if not here.is_empty():
            lost = (here["after"] - here["default"]).to_numpy()
            yield CheckedStatement(
                f"{words(setting)} is worse than the default on every pool",
                paper,
                ", ".join(map(_points, lost)),
                bool((lost < 0).all()),
            )
    here = rows.filter(pl.col("setting") == "all_random")
    if not here.is_empty():
        moved = (here["after"] - here["before"]).to_numpy()
        yield CheckedStatement(
            "all random gives back the anchor (within 0.1 points)",
            "+0.02, −0.03, −0.01",
            ", ".join(map(_points, moved)),
            bool((np.abs(moved) <= 0.001).all()),
        )


def views(results: Results) -> _Statements:
    rows = results.summary("view")
    lost = (rows["after"] - rows["default"]).to_numpy()
    yield CheckedStatement(
        "No single view reaches all three",
        "0 of 3 do",
        f"{int((lost >= 0).sum())} of {lost.size} do",
        bool((lost < 0).all()),
    )


def orders(results: Results) -> _Statements:
    rows = results.summary("order")
    moved = (rows["after"] - rows["default"]).to_numpy()
    yield CheckedStatement(
        "Another claim order costs something, and little (under 1 point)",
        "−0.32, −0.56, −0.27, −0.49, −0.31, −0.97",
        ", ".join(map(_points, moved)),
        bool((moved <= 0).all() and (moved > -0.01).all()),
    )


def constants(results: Results) -> _Statements:
    for constant, name in SWEPT.items():
        best = []
        for sweep in sweeps(results):
            if sweep.constant == constant:
                default = sweep.default
                best.append(sweep.best(results.macro_name))
        if best:
            yield CheckedStatement(
                f"{name} = {default:g} is the best value tried",
                "on the pool it was chosen on",
                ", ".join(f"{value:g}" for value in best),
                all(value == default for value in best),
            )


def anchors(results: Results) -> _Statements:
    found = [results.main.filter(pl.col("pool") == pool) for pool in results.pools]
    found = [rows for rows in found if rows.height > 1]
    if not found:
        raise NotInStore("no pool with several anchors")
    kept = [statistics.rank_preservation(r["before"], r["after"]) for r in found]
    part, whole = sum(k.hits for k in kept), sum(k.of for k in kept)
    yield CheckedStatement(
        "Most pairs of anchors keep their order across the repair",
        "56 of 63",
        f"{part} of {whole}",
        part > whole / 2,
    )
    lost = [statistics.regret(r["before"], r["after"]) for r in found]
    strongest, drawn = (float(np.mean([getattr(r, n) for r in lost])) for n in
                        ("strongest", "random"))  # fmt: skip
    yield CheckedStatement(
        "Repairing the strongest anchor gives up less than repairing one at random",
        "0.32 against 2.67 to 3.17",
        f"{100 * strongest:.2f} against {100 * drawn:.2f}",
        strongest < drawn,
    )


def methods(results: Results) -> _Statements:
    best = results.main.group_by("pool", maintain_order=True).agg(pl.col("after").max())
    others = results.baselines.group_by("pool", maintain_order=True).agg(pl.col("macro").max())
    rows = best.join(others, on="pool", how="inner", maintain_order="left")
    margin = (rows["after"] - rows["macro"]).to_numpy()
    yield CheckedStatement(
        "The best repaired anchor beats every baseline, on every pool",
        "+2.46, +1.18, +5.74",
        ", ".join(map(_points, margin)),
        bool((margin > 0).all()),
    )
    yield from _in_cells(results)
    won = [
        statistics.wins(main["after"], baselines["macro"])
        for pool in results.pools
        for main in [results.main.filter(pl.col("pool") == pool)]
        for baselines in [results.baselines.filter(pl.col("pool") == pool)]
    ]
    part = statistics.Count(sum(count.hits for count in won), sum(count.of for count in won))
    yield CheckedStatement(
        "Repaired anchors beat baselines in most pairs",
        "74 of 105",
        str(part),
        part.hits > part.of / 2,
    )


def _in_cells(results: Results) -> _Statements:
    """The methods within pool-domain cells; ours is the best repaired anchor of each pool."""
    within, ours = cells(results), results.main["method"][0]
    rank, first = statistics.average_ranks(within), statistics.first_places(within)
    nearest = min(value for method, value in rank.items() if method != ours)
    yield CheckedStatement(
        "The best repaired anchor has the best average rank of all methods",
        "1.67",
        f"{rank[ours]:.2f} against {nearest:.2f} of the next",
        rank[ours] < nearest,
    )
    yield CheckedStatement(
        "It leads most pool-domain cells",
        "11 of 15",
        f"{first[ours]} of {len(within)}",
        first[ours] > len(within) / 2,
    )


def allocation(results: Results) -> _Statements:
    """Of the first seed of each anchor, as in the paper's tables."""
    seeds = {(row["pool"], row["anchor"]): row["anchor_seed"] for row in results.main.to_dicts()}
    same: dict[tuple[str, str], bool] = {}
    for moved in moved_shares(results):
        place = (moved.pool, moved.anchor)
        if seeds.get(place) == moved.anchor_seed:
            same[place] = same.get(place, True) and moved.same_order
    yield CheckedStatement(
        "Other partitions give an anchor the same claim order",
        "7 of 7",
        f"{sum(same.values())} of {len(same)}",
        all(same.values()),
    )


NO_CORRELATION = 0.11
"""At most this much is none: the paper calls its own +0.11 a reversal."""


def prediction(results: Results) -> _Statements:
    frame, stable = known_before(results), []
    pools = [frame.filter(pl.col("pool") == pool) for pool in results.pools]
    pools = [pool for pool in pools if pool.height > 2]
    if not pools:
        raise NotInStore("no pool with three anchors")
    names = list(statistics.anchor_statistics([0.5], [0.5]))
    for name in names:
        each = [statistics.spearman(pool[name], pool["gain"]) for pool in pools]
        if np.min(each) > NO_CORRELATION or np.max(each) < -NO_CORRELATION:
            stable.append(name)
    yield CheckedStatement(
        "No statistic of the anchor predicts the gain with one sign on every pool",
        f"0 of {len(names)} do",
        f"{len(stable)} of {len(names)} do",
        not stable,
    )


PARTS_OF_THE_PAPER: tuple[Callable[[Results], _Statements], ...] = (
    pairs, gaps, methods, parts, views, orders, constants, allocation, anchors, prediction,
)  # fmt: skip


def claims(results: Results) -> list[CheckedStatement]:
    """Every statement that the experiment has runs for."""
    found = []
    for part in PARTS_OF_THE_PAPER:
        try:
            found += list(part(results))
        except NotInStore:
            continue
    return found
