"""The data-free operators, straight from their definitions, in float64 and without haste.

Written from shared/methods.md (sections 1, 3, 6) alone. Task vectors are float32 differences
(ruling 4), held in float64 from there on. Imports nothing of sigmerge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Vectors = list[Array]
"""One flat float64 task vector per expert."""


def task_vectors(reference: Array, experts: Sequence[Array]) -> Vectors:
    base = reference.astype(np.float32).ravel()
    return [(e.astype(np.float32).ravel() - base).astype(np.float64) for e in experts]


def linear(experts: Sequence[Array], weights: Sequence[float], normalize: bool = True) -> Array:
    total = sum(w * e.astype(np.float64) for w, e in zip(weights, experts, strict=True))
    return np.asarray(total / sum(weights) if normalize else total)


def task_arithmetic(
    vectors: Vectors, weights: Sequence[float], scale: float = 1.0, normalize: bool = False
) -> Array:
    total = sum(w * v for w, v in zip(weights, vectors, strict=True))
    return np.asarray(total / (sum(weights) if normalize else 1.0) * scale)


def kept(density: float, size: int) -> int:
    if density >= 1:
        return size
    return max(1, int(density * size)) if density > 0 else 0


def trim_tensor(vector: Array, density: float) -> Array:
    """Exactly k entries stay, the lowest index first among equal magnitudes."""
    order = sorted(range(vector.size), key=lambda i: (-abs(vector[i]), i))
    result = np.zeros_like(vector)
    for i in order[: kept(density, vector.size)]:
        result[i] = vector[i]
    return result


def trim_model(vector: Mapping[str, Array], density: float) -> dict[str, Array]:
    """One threshold over the whole vector: the k-th largest magnitude; what equals it stays."""
    magnitudes = np.sort(np.abs(np.concatenate(list(vector.values()))))[::-1]
    k = kept(density, magnitudes.size)
    if k == 0:
        return {name: np.zeros_like(v) for name, v in vector.items()}
    return {name: np.where(np.abs(v) >= magnitudes[k - 1], v, 0) for name, v in vector.items()}


def majority(whole: Sequence[Vectors], weights: Sequence[float], weighted: bool) -> int:
    """The sign that more coordinates of the whole model have; + where as many have the other.

    `whole` has the task vectors of every tensor.
    """
    signs = [
        int(
            np.sign(sum(w * v[i] if weighted else v[i] for w, v in zip(weights, each, strict=True)))
        )
        for each in whole
        for i in range(each[0].size)
    ]
    return 1 if signs.count(1) >= signs.count(-1) else -1


def elect_and_merge(
    vectors: Vectors,
    weights: Sequence[float],
    weighted: bool = True,
    normalize: bool = True,
    scale: float = 1.0,
    cancelled: int = 1,
) -> Array:
    """Per coordinate: elect a sign (zero sum: `cancelled`), sum or average what agrees."""
    merged = np.zeros(vectors[0].size)
    for i in range(merged.size):
        entries = [(w, w * v[i]) for w, v in zip(weights, vectors, strict=True)]
        votes = [e if weighted else v[i] for (_, e), v in zip(entries, vectors, strict=True)]
        positive = (sum(votes) or cancelled) > 0
        agreeing = [(w, e) for w, e in entries if (e > 0 if positive else e < 0)]
        total = sum(e for _, e in agreeing)
        below = sum(w for w, _ in agreeing) or 1.0
        merged[i] = total / (below if normalize else 1.0) * scale
    return merged


def dare(vector: Array, mask: Array, density: float, rescale: str) -> Array:
    dropped = np.where(mask, vector, 0.0)
    if rescale == "inverse" and density > 0:
        return np.asarray(dropped / density)
    before, after = np.abs(vector).sum(), np.abs(dropped).sum()
    if rescale == "l1" and before >= 1e-7 and after >= 1e-7:
        return np.asarray(dropped * (before / after))
    return dropped


def cabs_masks(vectors: Vectors, n: int, m: int, fill: bool = False) -> list[Array]:
    """n:m masks, expert after expert. A tail shorter than m belongs to nobody."""
    size = vectors[0].size
    occupied = np.zeros(size, bool)
    masks = []
    for vector in vectors:
        mask = np.zeros(size, bool)
        for base in range(0, size - size % m, m):
            group = range(base, base + m)
            free = sorted((i for i in group if not occupied[i]), key=lambda i: (-abs(vector[i]), i))
            chosen = free[:n]
            if fill:
                rest = sorted((i for i in group if occupied[i]), key=lambda i: (-abs(vector[i]), i))
                chosen = chosen + rest[: n - len(chosen)]
            mask[chosen] = True
        occupied |= mask
        masks.append(mask)
    return masks


def cabs(vectors: Vectors, weights: Sequence[float], n: int, m: int, fill: bool = False) -> Array:
    masks = cabs_masks(vectors, n, m, fill)
    entries = [w * np.where(k, v, 0) for w, v, k in zip(weights, vectors, masks, strict=True)]
    if not fill:
        return np.asarray(sum(entries))
    merged = np.zeros(vectors[0].size)
    for i in range(merged.size):
        here = [e[i] for e in entries]
        positive = sum(here) >= 0
        agreeing = [e for e in here if (e > 0 if positive else e < 0)]
        merged[i] = sum(agreeing) / len(agreeing) if agreeing else 0.0
    return merged


def lines_factor(block: int | None, depth: int, alpha: float, beta: float) -> float:
    """`block` counts from 0; None is a tensor outside the stack."""
    if block is None or depth == 1:
        return alpha
    return alpha + beta * block / (depth - 1)


def lines_alpha(vectors: Mapping[str, Vectors], merged: Mapping[str, Array]) -> float:
    """(1/K) ‖Σ_k τ_k‖₁ / ‖τ_MTL‖₁ over the whole flattened model."""
    experts = len(next(iter(vectors.values())))
    plain = sum(float(np.abs(np.sum(v, axis=0)).sum()) for v in vectors.values())
    return plain / sum(float(np.abs(t).sum()) for t in merged.values()) / experts


# Philox4x32-10 (Salmon et al., SC'11), one block of four words at a time, in plain integers.

_WORD = 0xFFFFFFFF


def philox_block(counter: int, key: tuple[int, int]) -> list[int]:
    c = [(counter >> shift) & _WORD for shift in (0, 32, 64, 96)]
    k = list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & _WORD, (p0 >> 32) ^ c[3] ^ k[1], p0 & _WORD]
        k = [(k[0] + 0x9E3779B9) & _WORD, (k[1] + 0xBB67AE85) & _WORD]
    return c


def dare_mask(seed: int, expert: str, tensor: str, size: int, density: float) -> Array:
    """Which entries DARE keeps: draw i is lane i mod 4 of block i div 4, kept if below density."""
    digest = hashlib.sha256("\0".join([str(seed), "dare", expert, tensor]).encode()).digest()
    key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
    words = [word for block in range((size + 3) // 4) for word in philox_block(block, key)]
    return np.array(words[:size]) < int(density * 2**32)
