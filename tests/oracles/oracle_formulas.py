"""What a formula of core/merge.py means, on whole rows in NumPy's float32, and without haste.

Every product, quotient and sum is rounded to float32, expert by expert in order. Imports nothing
of sigmerge: a formula is given as a mapping of its fields, and draws are made here (Philox4x32-10
as its authors write it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
KEEP_ALL, TRIM, DROP, PRUNE, BAND, RANK, SELECT = range(7)
SUM, DISJOINT, OVERLAPS, AGREEING = range(4)
ZERO, ONE = np.float32(0), np.float32(1)


def merged(formula: Mapping[str, Any], experts: Sequence[Array], base: Array, start: int) -> Array:
    """float32 values of the merge of whole rows, of which the first has the flat index `start`."""
    rows = [each - base if formula["vectors"] else each.copy() for each in experts]
    taken = np.zeros(base.size, bool)
    for d, row in enumerate(rows):
        _thin(formula, d, row, start, taken)
        factor, divisor = formula["rescale"][d]
        rows[d] = row * factor / divisor
    if formula["thin"] == SELECT:
        _select(rows, *formula["cuts"][0])
    total = _combined(formula, rows, formula["weights"])
    for divisor, factor, share in formula["after"]:
        total = total / divisor * factor
        if share != 0:
            total = total + base * share
    return total


def _thin(formula: Mapping[str, Any], d: int, row: Array, start: int, taken: Array) -> None:
    thin = formula["thin"]
    if thin in (TRIM, BAND):
        row[~_reaches(row, *formula["cuts"][d])] = 0
    if thin == BAND:
        row[_reaches(row, *formula["outliers"][d])] = 0
    if thin in (DROP, RANK):
        first, second, bound = (int(word) for word in formula["draws"][d])
        drawn = draws((first, second), start, row.size)
        if thin == RANK and bound > 0:
            _drop_by_rank(row, drawn, *formula["odds"][d], *formula["axis"])
        elif bound != -1:
            row[drawn >= bound] = 0
    if thin == PRUNE:
        _prune(row, taken, *formula["groups"])


def magnitudes(row: Array) -> Array:
    return (row.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)


def _reaches(row: Array, threshold: int, ties: int) -> Array:
    """Above a threshold, or among the first entries equal to it; −1 is below everything."""
    size = magnitudes(row)
    tied = size == threshold
    return (size > threshold) | (tied & (np.cumsum(tied) <= ties))


def _drop_by_rank(
    row: Array, drawn: Array, least: float, most: float, length: int, inner: int, inverse: int
) -> None:
    odds = least + (most - least) / max(length - 1, 1) * np.arange(length)
    lasts = np.clip(np.ceil(odds * 2.0**32) - 1, 0, 2.0**32 - 1)
    shape = (-1, length, inner)
    order = np.argsort(magnitudes(row).reshape(shape), axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(length)[None, :, None], axis=1)
    values = row.reshape(shape)
    if inverse:
        values /= odds.astype(np.float32)[ranks]
    values[drawn.reshape(shape) > lasts[ranks]] = 0


def _prune(row: Array, taken: Array, n: int, m: int, overlap: int) -> None:
    kept = np.zeros(row.size, bool)
    size = magnitudes(row)
    for first in range(0, row.size // m * m, m):
        places = np.arange(first, first + m)
        wanted = places[np.argsort(-size[first : first + m], kind="stable")]
        free = [i for i in wanted if not taken[i]]
        used = [i for i in wanted if taken[i]] if overlap else []
        kept[(free + used)[:n]] = True
    row[~kept] = 0
    taken |= kept


def _select(rows: list[Array], threshold: int, ties: int) -> None:
    """Zero the coordinates whose variance lies below a cut."""
    if threshold == -1:
        return
    wide = np.array(rows).astype(np.float64)
    mean = np.add.accumulate(wide, axis=0)[-1] / len(rows)
    variance = np.add.accumulate((wide - mean) ** 2, axis=0)[-1] / len(rows)
    spread = variance.astype(np.float32)
    kept = _reaches(spread, threshold, ties) & (spread != 0)
    for row in rows:
        row[~kept] = 0


def _combined(formula: Mapping[str, Any], rows: Sequence[Array], weights: Array) -> Array:
    entries = [row * weight for row, weight in zip(rows, weights, strict=True)]
    if formula["combine"] == SUM:
        return _added(entries)
    if formula["combine"] == DISJOINT:
        sums = _added(entries if formula["weighted"] else rows)
        sign = np.where(sums == 0, np.float32(formula["cancelled"]), np.sign(sums))
        agree = [entry * sign > 0 for entry in entries]
        if not formula["normalize"]:
            return _sum_where(agree, entries)
        share = _sum_where(agree, [np.full_like(sums, weight) for weight in weights])
        return _sum_where(agree, entries) / np.where(share == 0, ONE, share)
    if formula["combine"] == OVERLAPS:
        above = _added(entries) >= 0
        agree = [((entry > 0) & above) | ((entry < 0) & ~above) for entry in entries]
        number = _sum_where(agree, [np.ones_like(entry) for entry in entries])
        return _sum_where(agree, entries) / np.where(number == 0, ONE, number)
    sign = np.where(_added(rows) >= 0, ONE, -ONE)
    agree = [row * sign > 0 for row in rows]
    share = _sum_where(agree, [np.full_like(sign, weight) for weight in weights])
    return _sum_where(agree, entries) / np.where(share > np.float32(1e-6), share, np.float32(1e-6))


def _added(rows: Sequence[Array]) -> Array:
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def _sum_where(chosen: Sequence[Array], rows: Sequence[Array]) -> Array:
    total = np.zeros_like(rows[0])
    for which, row in zip(chosen, rows, strict=True):
        total = total + np.where(which, row, ZERO)
    return total


def draws(key: tuple[int, int], start: int, count: int) -> Array:
    """uint32 draws for the indices from `start` on, as int64."""
    index = np.arange(start, start + count, dtype=np.uint64)
    word = np.uint64(0xFFFFFFFF)
    counter = [index // np.uint64(4) & word, index // np.uint64(4) >> np.uint64(32)]
    counter += [np.zeros_like(index), np.zeros_like(index)]
    first, second = (np.uint64(each) for each in key)
    for _ in range(10):
        one, other = (counter[i] * np.uint64(by) for i, by in ((0, 0xD2511F53), (2, 0xCD9E8D57)))
        counter = [
            (other >> np.uint64(32)) ^ counter[1] ^ first, other & word,
            (one >> np.uint64(32)) ^ counter[3] ^ second, one & word,
        ]  # fmt: skip
        first, second = first + np.uint64(0x9E3779B9) & word, second + np.uint64(0xBB67AE85) & word
    return np.choose((index % np.uint64(4)).astype(int), counter).astype(np.int64)
