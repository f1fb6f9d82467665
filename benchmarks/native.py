"""The loops of the native core: ns per coordinate on each instruction set, in one run.

    python -m benchmarks.native [--quick]

One thread; five bfloat16 experts and a reference, which lie in memory. A row counts each coordinate
once, however many members are read there; per entry, what is drawn, widened or summed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import machine, versions
from sigmerge import _native
from sigmerge.core import TILE, claim, merge
from sigmerge.core.claim import CLAIM_TILE
from sigmerge.core.dtypes import BF16, F32

EXPERTS = 5
CUT = int(np.float32(4e-4).view(np.uint32))
"""The magnitude of Δ above which a fifth to a half of the entries lie."""
Work = dict[str, Callable[[], Any]]


class Members:
    """Reference N(0, 0.02), experts N(0, 5e-4) away from it, all rounded to bfloat16."""

    def __init__(self, size: int) -> None:
        rng = np.random.default_rng(0)
        self.size, base = size, 0.02 * rng.standard_normal(size, np.float32)
        others = [base + 5e-4 * rng.standard_normal(size, np.float32) for _ in range(EXPERTS)]
        self.values, self.raw = base, [np.empty(size, np.uint16) for _ in range(EXPERTS + 1)]
        for row, raw in zip([*others, base], self.raw, strict=True):
            _native.narrow(BF16, row, raw)
        self.table = np.array([(BF16, -1, raw.ctypes.data) for raw in self.raw], np.int64)
        self.out = np.empty(size, np.uint16)
        self.target = np.array([BF16, -1, self.out.ctypes.data], np.int64)
        self.wide = np.empty(size, np.float32)

    def merged(self, formula: merge.Formula) -> Any:
        where = (0, self.size, TILE, 512, self.target, np.zeros(1))
        return merge.merge(formula, self.table, *where)


def formulas() -> dict[str, merge.Formula]:
    weights = np.full(EXPERTS, 0.4, np.float32)
    cuts = np.full((EXPERTS, 2), (CUT, 5), np.int64)
    draws = np.array([(d, 7, 1 << 29) for d in range(EXPERTS)], np.int64)
    rank = {"draws": draws, "odds": np.full((EXPERTS, 2), (0.3, 0.7)), "axis": (4096, 1, True)}
    made = {
        "task arithmetic": {},
        "TIES": {"thin": merge.TRIM, "cuts": cuts, "combine": merge.DISJOINT, "normalize": True},
        "DARE": {"thin": merge.DROP, "draws": draws},
        "CABS 51:256": {"thin": merge.PRUNE, "groups": (51, 256, False)},
        "breadcrumbs": {"thin": merge.BAND, "cuts": cuts, "outliers": cuts * 2},
        "DELLA": {"thin": merge.RANK, **rank},
        "SCE": {"thin": merge.SELECT, "cuts": cuts[:1]},
    }  # fmt: skip
    return {
        name: merge.formula(weights, **how).plus_reference(1.0)  # type: ignore[arg-type]
        for name, how in made.items()
    }


def merges(members: Members) -> Work:
    def strips(formula: merge.Formula) -> Callable[[], Any]:
        strip = 4096 if formula.thin == merge.RANK else 512
        where = (0, members.size, TILE, strip, members.target, np.zeros(1))
        return lambda: merge.merge(formula, members.table, *where)

    return {f"merge: {name}": strips(formula) for name, formula in formulas().items()}


def passes(members: Members) -> Work:
    table, size, each = members.table, members.size, np.arange(EXPERTS)
    high = np.zeros((EXPERTS, 2 << 16), np.uint32)
    ranges, inside = np.full((EXPERTS, 3), (CUT, 1, 0)), np.zeros((EXPERTS, 1), np.uint32)
    found = (ranges, inside, inside.astype(np.uint16), np.zeros(EXPERTS, np.int64))
    dots, mass = np.zeros((EXPERTS, EXPERTS)), np.zeros(2)
    spreads, squares = np.zeros((1 << 16) + 1, np.int64), np.zeros(EXPERTS)
    return {
        "select: histogram": lambda: _native.count_high(table, size, each, 1, high),
        "select: above a cut": lambda: _native.count_inside(table, size, each, 1, *found),
        "signature": lambda: _native.signature(table, size, TILE, dots, mass),
        "gram of five": lambda: _native.gram(table, size, True, TILE, dots),
        "gram of two": lambda: _native.gram(table[3:], size, True, TILE, np.zeros((2, 2))),
        "variances": lambda: _native.count_variances(table, size, -1, spreads),
        "squares of varying": lambda: _native.squares_of_varying(table, size, 1, 9, TILE, squares),
    }


def claims(members: Members) -> Work:
    edges = np.append(np.arange(0, members.size, CLAIM_TILE), members.size)
    tiles, owner = len(edges) - 1, claim.free_map(members.size)
    rows = np.repeat(members.table[:, None], tiles, axis=1)
    rows[..., 2] += 2 * edges[:-1]
    tables = claim.TileTable(edges, rows[0], rows[-1], np.zeros(3, np.int64))
    drawn = tables._replace(key=np.array([1, 7, 8]))
    counts, mass = np.zeros((tiles, 2), np.int64), np.zeros(tiles)
    owned = np.random.default_rng(1).integers(0, 2 * EXPERTS, members.size).astype(np.uint8)
    keys, every = np.full((EXPERTS, 2), 7), np.arange(EXPERTS)
    anchored = np.concatenate([rows, rows[-1:]])
    mark = (owner, 0, tiles, claim.SETTLED, CUT, counts, mass)
    high = (owner, 0, tiles, 1, claim.SETTLED, np.zeros(2 << 16, np.uint32))

    def admit(form: int) -> Callable[[], Any]:
        update = claim.Admission(form, 0.6, every, 1 << 30, keys)
        return lambda: claim.admit(update, edges, owned, 0, tiles, anchored, members.target)

    return {
        "claim: histogram, a domain": lambda: claim.count_high(tables, *high),
        "claim: mark, a domain": lambda: claim.mark(tables, *mark),
        "claim: mark by draws": lambda: claim.mark(drawn, *mark),
        "claim: add": admit(claim.ADD),
        "claim: sparse": admit(claim.SPARSE),
        "claim: replace": admit(claim.REPLACE),
    }


def entries(members: Members) -> Work:
    size, raw, wide = members.size, members.raw[0], members.wide
    half = members.values.astype(np.float16)
    drawn = np.empty(size, np.uint32)
    rank, columns = 16, 4096
    left = np.ones((-(-size // columns), rank))
    right = np.random.default_rng(2).standard_normal((rank, columns))
    return {
        "widen bfloat16": lambda: _native.widen(BF16, raw, wide),
        "widen float16": lambda: _native.widen(1, half, wide),
        "narrow to bfloat16": lambda: _native.narrow(BF16, members.values, members.out),
        "narrow to float16": lambda: _native.narrow(1, members.values, half),
        "copy of float32": lambda: _native.widen(F32, members.values, wide),
        "Philox, a draw": lambda: _native.draw(1, 2, 0, drawn),
        "checksum, 2 bytes": lambda: _native.checksum(raw),
        "rank 16": lambda: _native.add_low_rank(left, right, 1.0, 0, wide),
    }


def run(size: int, repeats: int) -> dict[str, dict[str, float]]:
    """ns per coordinate by row and instruction set; the best of several runs."""
    members, before = Members(size), _native.isa()
    work = {**merges(members), **passes(members), **claims(members), **entries(members)}
    found: dict[str, dict[str, float]] = {name: {} for name in work}
    for isa in _native.isas():
        _native.use_isa(isa)
        for name, task in work.items():
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                task()
                times.append(time.perf_counter() - start)
            found[name][isa] = 1e9 * min(times) / size
    _native.use_isa(before)
    return found


def document(found: dict[str, dict[str, float]], size: int) -> str:
    isas = _native.isas()
    lines = [
        "# The loops of the native core",
        "",
        "`python -m benchmarks.native`. Nanoseconds per coordinate, one thread, "
        f"{size / 1e6:.0f} M coordinates of {EXPERTS} bfloat16 experts and a reference in memory; "
        "the best of five runs. A row counts each coordinate once, however many members are read "
        "there.",
        "",
        f"Machine: {machine()}. {versions('sigmerge', 'numpy')}.",
        "",
        f"| loop | {' | '.join(isas)} |",
        "|---|" + "--:|" * len(isas),
        *(
            f"| {name} | " + " | ".join(f"{row[isa]:.2f}" for isa in isas) + " |"
            for name, row in found.items()
        ),
        "",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs; writes no document")
    quick = parser.parse_args(arguments).quick
    size = 1 << 22
    text = document(run(size, 2 if quick else 5), size)
    print(text)
    if not quick:
        Path("docs/results/native.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
