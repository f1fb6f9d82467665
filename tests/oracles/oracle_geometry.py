"""mergekit's other methods from their definitions, on one tensor, in float64 and without haste.

Every function is given the reference (or None) and the experts with their shape. Imports nothing
of sigmerge; `keep` is a function from (size, probabilities) to a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from tests.oracles.oracle_operators import elect_and_merge

Array = np.ndarray[Any, Any]


def slerp(base: Array, other: Array, t: float) -> Array:
    """Rotate the base's direction towards the other's by the share t of their angle."""
    a, b = base.ravel(), other.ravel()
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    if abs(cosine) > 0.9995:
        return (1 - t) * base + t * other
    angle = np.arccos(cosine)
    return (np.sin((1 - t) * angle) * base + np.sin(t * angle) * other) / np.sin(angle)


def nuslerp(one: Array, two: Array, t: float, axis: int | None) -> Array:
    """`axis` None: the whole tensor is a vector."""
    if axis is None:
        return nuslerp(one.ravel(), two.ravel(), t, 0).reshape(one.shape)
    lengths = [np.linalg.norm(v, axis=axis, keepdims=True).clip(1e-7) for v in (one, two)]
    cosine = (one / lengths[0] * two / lengths[1]).sum(axis=axis, keepdims=True).clip(-1, 1)
    flat = 1 - cosine**2 <= 1e-16
    angle = np.arccos(np.where(flat, 0, cosine))
    arc = (np.sin((1 - t) * angle) * one + np.sin(t * angle) * two) / np.sin(angle)
    return np.where(flat, (1 - t) * one + t * two, arc)


def multislerp(vectors: Sequence[Array], weights: Sequence[float]) -> Array:
    """Through the tangent space at the weighted mean, as it is told in the blog post."""
    share = np.array(weights) / sum(weights)
    units = [v / (np.linalg.norm(v) + 1e-8) for v in vectors]
    mean = sum(w * u for w, u in zip(share, units, strict=True))
    mean = mean / np.linalg.norm(mean)
    tangents = [u - (u * mean).sum() * mean for u in units]
    tangent = sum(w * v for w, v in zip(share, tangents, strict=True))
    length = np.linalg.norm(tangent) + 1e-8
    point = mean * np.cos(length) + tangent * np.sin(length) / length
    return point * sum(w * np.linalg.norm(v) for w, v in zip(share, vectors, strict=True))


def karcher(models: Sequence[Array], steps: int = 10, tol: float = 1e-5) -> Array:
    lengths = [np.linalg.norm(m) for m in models]
    units = [m / n for m, n in zip(models, lengths, strict=True) if n > tol]
    mean = sum(units) / len(units)
    mean = mean / np.linalg.norm(mean)
    for _ in range(steps):
        tangent = np.zeros_like(mean)
        for unit in units:
            cosine = np.clip((unit * mean).sum(), -1, 1)
            if (angle := np.arccos(cosine)) >= tol:
                tangent += angle / np.sin(angle) * (unit - cosine * mean) / len(units)
        if (length := np.linalg.norm(tangent)) < tol:
            break
        mean = np.cos(length) * mean + np.sin(length) * tangent / length
        mean = mean / np.linalg.norm(mean)
    return mean * np.mean(lengths)


def model_stock(vectors: Sequence[Array], rows: bool) -> Array:
    """The merged task vector; `rows`: one ratio per row along the last axis."""
    flat = [v if rows and v.ndim > 1 else v.reshape(1, -1) for v in vectors]
    dot = [(a * b).sum(axis=-1, keepdims=True) for a, b in combinations(flat, 2)]
    size = [np.linalg.norm(v, axis=-1, keepdims=True) for v in flat]
    product = [(a * b).clip(1e-6) for a, b in combinations(size, 2)]
    cosine = np.mean([(d / p).clip(-1, 1) for d, p in zip(dot, product, strict=True)], axis=0)
    count = len(vectors)
    ratio = count * cosine / (1 + (count - 1) * cosine)
    return np.asarray(ratio * np.mean(flat, axis=0)).reshape(vectors[0].shape)


def breadcrumbs(vector: Array, density: float, gamma: float) -> Array:
    """By magnitude, the later index first among equal ones, a part in the middle stays."""
    if density >= 1:
        return vector
    flat = vector.ravel()
    order = sorted(range(flat.size), key=lambda i: (abs(flat[i]), -i))
    kept = int(density * flat.size)
    first = max(0, flat.size - kept - int(gamma * flat.size))
    result = np.zeros_like(flat)
    for i in order[first : first + kept]:
        result[i] = flat[i]
    return result.reshape(vector.shape)


def match_l1(before: Array, after: Array) -> Array:
    sums = np.abs(before).sum(), np.abs(after).sum()
    return after * sums[0] / sums[1] if min(sums) >= 1e-7 else after


def della_odds(vector: Array, density: float, epsilon: float) -> Array:
    """Every entry's probability to stay: by its rank along the second axis, or the only one."""
    seen = vector if vector.ndim > 1 else vector[None]
    order = np.argsort(np.abs(seen), axis=1, kind="stable")
    ranks = np.argsort(order, axis=1, kind="stable")
    last = max(seen.shape[1] - 1, 1)
    return (density - epsilon + ranks / last * 2 * epsilon).reshape(vector.shape)


def della(
    vectors: Sequence[Array],
    weights: Sequence[float],
    density: float,
    epsilon: float,
    keep: Callable[[int, Array], Array],
    rescale: str,
    elects: bool,
) -> Array:
    thinned = []
    for d, vector in enumerate(vectors):
        odds = della_odds(vector, density, epsilon)
        left = vector * keep(d, odds)
        if rescale == "l1":
            left = match_l1(vector, left)
        thinned.append(left / odds if rescale == "inverse" else left)
    if elects:
        flat = [v.ravel() for v in thinned]
        return elect_and_merge(flat, weights, True, True).reshape(vectors[0].shape)
    return np.asarray(sum(w * v for w, v in zip(weights, thinned, strict=True)))


def sce(vectors: Sequence[Array], share: float) -> Array:
    stacked = np.stack([v.ravel() for v in vectors])
    if share < 1:
        spread = stacked.var(axis=0).astype(np.float32)
        count = int(np.float32(np.count_nonzero(spread)) * np.float32(share))
        order = sorted(range(spread.size), key=lambda i: (-spread[i], i))[:count]
        mask = np.zeros(spread.size)
        mask[order] = 1
        stacked = stacked * mask
    energy = (stacked**2).mean(axis=1)
    weights = (
        energy / energy.sum() if energy.sum() >= 1e-6 else np.full(len(energy), 1 / len(energy))
    )
    sign = np.where(stacked.sum(axis=0) >= 0, 1, -1)
    agreeing = (np.sign(stacked) == sign) * weights[:, None]
    merged = (stacked * agreeing).sum(axis=0) / agreeing.sum(axis=0).clip(1e-6)
    return np.asarray(merged).reshape(vectors[0].shape)


def arcee_fusion(base: Array, other: Array) -> Array:
    """Scores are rounded to float32, as their comparison with the threshold is."""

    def softmax(values: Array) -> Array:
        powers = np.exp(values - values.max(axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True) + 1e-8

    p, q = softmax(other), softmax(base)
    apart = (p * np.log(p / q)).sum(axis=-1, keepdims=True).astype(np.float32)
    change = np.abs(other.astype(np.float32) - base.astype(np.float32))
    scores = change * apart
    ordered = np.sort(scores.ravel())
    first, median, third = (ordered[(ordered.size - 1) * k // 4] for k in (1, 2, 3))
    least = np.float32(median + np.float32(1.5) * (third - first))
    return np.where(scores >= least, other, base)


def nearswap(base: Array, other: Array, t: float) -> Array:
    share = np.clip(t / np.abs(base - other).clip(1e-6), 0, 1)
    return share * other + (1 - share) * base


def ram(vectors: Sequence[Array], epsilon: float, r: float = 0.0, alpha: float = 0.2) -> Array:
    """The merged task vector; r = 0 is RAM, else RAM+."""
    stacked = np.stack(vectors)
    changed = np.abs(stacked) > np.float32(epsilon)
    count = changed.sum(axis=0)
    result = np.zeros_like(vectors[0])
    for vector, mine in zip(vectors, changed, strict=True):
        alone, shared = mine & (count == 1), mine & (count > 1)
        grown = 1 + r * np.clip(shared.sum() / max(alone.sum(), epsilon), 0, alpha)
        result += np.where(alone, vector * grown, 0) + np.where(shared, vector / count.clip(1), 0)
    return result
