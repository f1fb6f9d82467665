"""Random formulas against the oracle: any thinning, combination and steps, any types, any strips.

`python -m tests.native.test_formulas 10000` tries so many, of other seeds than the suite's.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from sigmerge import _native
from sigmerge.core import merge
from sigmerge.core.dtypes import BF16, F16, F32
from sigmerge.core.merge import Formula, formula
from tests.native.pools import NUMPY, Pool, file_target, target
from tests.oracles import oracle_formulas as oracle

ALL, ANY_TIES = -1, 2**62
WEIGHTS = np.array([1, -1, 0.5, 0.3, 0, 2, -0.7, 1e-3], np.float32)
STEPS = [(1, 1, 0), (1, 1, 1), (2.5, 1, 0), (1, 0.4, 0), (3, 0.7, -0.5)]


def coarse(pool: Pool, rng: np.random.Generator) -> None:
    """Few values, as differences of stored halves take: entries tie, and are zero."""
    for kind, raw, values in zip(pool.table[:, 0].tolist(), pool.raw, pool.values, strict=True):
        values[:] = np.round(values * 4) / 4 * rng.choice([1, 2.0**-120], values.size)
        if kind == F16:
            values[np.abs(values) < 2.0**-20] = 0
        assert _native.narrow(kind, values, raw)
        assert _native.widen(kind, raw, values)


def cut(magnitudes: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    """One that keeps nothing, all, or a part; with no ties, some, or any."""
    threshold = rng.choice([0, ALL, 0x7FFFFFFF, int(rng.choice(magnitudes)), int(magnitudes.max())])
    return int(threshold), int(rng.choice([0, 1, 7, magnitudes.size, ANY_TIES]))


class Case:
    """A random formula, its members, and how its rows are cut into strips and tiles."""

    def __init__(self, seed: int, folder: Path) -> None:
        rng = np.random.default_rng(seed)
        experts, self.thin = int(rng.integers(1, 6)), int(rng.integers(0, 7))
        length, inner = int(rng.integers(1, 40)), int(rng.choice([1, 1, 3]))
        group = int(rng.integers(1, 20))
        granule = {merge.RANK: length * inner, merge.PRUNE: group}.get(self.thin, 1)
        granule *= 1 if granule % 8 == 0 else 8  # of a file whole words are written
        self.strip = granule * int(rng.integers(1, 1 + max(1, 600 // granule)))
        self.tile = self.strip * int(rng.integers(1, 4))
        self.size = granule * int(rng.integers(1, 1 + max(1, 3000 // granule)))
        if self.thin not in (merge.RANK, merge.PRUNE):
            self.size -= int(rng.integers(0, 8))
        self.start = int(rng.choice([0, self.size, 2**34 + 4 * int(rng.integers(0, 99))]))
        kinds = rng.choice([BF16, F16, F32], experts + 1).tolist()
        if rng.random() < 0.5:
            kinds = [BF16] * (experts + 1)
        self.in_file = bool(rng.random() < 0.3)
        self.pool = Pool(kinds, self.size, folder, seed=seed)
        if rng.random() < 0.7:
            coarse(self.pool, rng)
        if self.in_file:
            self._to_file(folder)
        self.kind = int(rng.choice([BF16, F16, F32]))
        self.formula = self._formula(rng, experts, length, inner, group)

    def _to_file(self, folder: Path) -> None:
        content, rows = b"12345", self.pool.table
        for row, raw in zip(rows, self.pool.raw, strict=True):
            row[1:] = self.pool.file.fileno(), len(content)
            content += raw.tobytes()
        (folder / "members").write_bytes(content)

    def _formula(
        self, rng: np.random.Generator, experts: int, length: int, inner: int, group: int
    ) -> Formula:
        vectors = bool(rng.random() < 0.8) or self.thin == merge.SELECT
        base = self.pool.values[-1]
        rows = [one - base if vectors else one for one in self.pool.values[:-1]]
        sizes = [oracle.magnitudes(row) for row in rows]
        cuts = np.array([cut(each, rng) for each in sizes], np.int64)
        if self.thin == merge.SELECT:
            spread = np.array(rows).astype(np.float64).var(axis=0).astype(np.float32)
            cuts = np.array([cut(oracle.magnitudes(spread), rng)], np.int64)
        outliers = np.array([cut(each, rng) for each in sizes], np.int64)
        outliers[outliers[:, 0] == ALL, 0] = 1
        bounds = rng.choice([0, ALL, 1 << 31, 1 << 32, 12345], experts)
        words = rng.integers(0, 1 << 32, (experts, 2))
        rescale = np.ones((experts, 2), np.float32)
        if rng.random() < 0.3:
            rescale = rng.uniform(0.5, 2, (experts, 2)).astype(np.float32)
        odds = np.sort(rng.uniform(0.01, 1, (experts, 2)), axis=1)
        made = formula(
            rng.choice(WEIGHTS, experts), vectors=vectors, thin=self.thin, cuts=cuts,
            outliers=outliers, draws=np.column_stack([words, bounds]).astype(np.int64),
            odds=odds, axis=(length, inner, bool(rng.random() < 0.5)), rescale=rescale,
            groups=(int(rng.integers(0, group + 1)), group, bool(rng.random() < 0.5)),
            combine=int(rng.integers(0, 4)), weighted=bool(rng.random() < 0.5),
            normalize=bool(rng.random() < 0.5), cancelled=float(rng.choice([-1.0, 1.0])),
        )  # fmt: skip
        steps = rng.permutation(np.array(STEPS, np.float32))[: rng.integers(0, 4)]
        return made._replace(after=np.ascontiguousarray(steps).reshape(-1, 3))

    def expected(self) -> bytes:
        """The oracle's values, rounded to the stored type."""
        *experts, base = self.pool.values
        values = oracle.merged(self.formula._asdict(), experts, base, self.start)
        out = np.empty(self.size, NUMPY[self.kind])
        self.finite = _native.narrow(self.kind, values, out)
        return out.tobytes()

    def found(self) -> bytes:
        out = np.zeros(self.size, NUMPY[self.kind])
        self._run(target(out, self.kind))
        return out.tobytes()

    def written(self, folder: Path) -> bytes:
        """The same as it stands in a file."""
        row, path = file_target(folder, self.kind, 16)
        self._run(row)
        os.close(int(row[1]))
        content = path.read_bytes()[16:]
        path.unlink()
        return content

    def _run(self, row: np.ndarray) -> None:
        members = self.pool.table if self.formula.reads_reference else self.pool.table[:-1]
        where = (self.start, self.size, self.tile, self.strip, row, np.zeros(1))
        fine, stored, _ = merge.merge(self.formula, members, *where)
        assert (fine, stored) == (True, self.finite)


def check(seed: int, folder: Path) -> None:
    case = Case(seed, folder)
    with np.errstate(all="ignore"):
        expected = case.expected()
    assert case.found() == expected, (seed, case.formula)
    if case.in_file and case.finite:
        assert case.written(folder) == expected, (seed, case.formula)
    case.pool.file.close()


@pytest.mark.parametrize("part", range(4))
def test_random_formulas_are_those_of_the_oracle(part: int, tmp_path: Path) -> None:
    for seed in range(part * 75, (part + 1) * 75):
        check(seed, tmp_path)


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        with tempfile.TemporaryDirectory() as place:
            check(1_000_000 + number, Path(place))
    print(f"{sys.argv[1]} formulas: the same bytes on {_native.isa()}")
