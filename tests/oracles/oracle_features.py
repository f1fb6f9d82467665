"""The operators that read data, dense and in float64, as methods.md has them. X is tokens × in."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def regmean(weights: list[Array], features: list[Array], factor: float) -> Array:
    """W = (Σ W S̃)(Σ S̃)⁻¹ with token-mean Grams, off-diagonals × factor; W is (out, in)."""
    grams = []
    for x in features:
        gram = x.T @ x / len(x)
        grams.append(np.where(np.eye(len(gram), dtype=bool), gram, factor * gram))
    right = np.sum([w @ s for w, s in zip(weights, grams, strict=True)], axis=0)
    merged: Array = right @ np.linalg.inv(np.sum(grams, axis=0))
    return merged


def lot(deltas: list[Array], features: list[Array], rtol: float = 1e-10) -> Array:
    """The least-squares T of smallest norm: stack X_k T = X_k T_k and solve it directly."""
    stacked = np.concatenate(features)
    wanted = np.concatenate([x @ d.T for x, d in zip(features, deltas, strict=True)])
    solved: Array = np.linalg.lstsq(stacked, wanted, rcond=np.sqrt(rtol))[0].T
    return solved


def cat(
    deltas: list[Array],
    features: list[Array],
    rank: int,
    trade_off: float,
    *,
    mean: bool = True,
    renorm: bool = False,
) -> list[Array]:
    """All D_i after trimming, from the whole spectra of all G_k."""
    grams = [x.T @ x / (len(x) if mean else 1) for x in features]
    projections = []
    for k in range(len(deltas)):
        g = sum(
            deltas[i] @ (grams[k] - trade_off * grams[i]) @ deltas[i].T
            for i in range(len(deltas))
            if i != k
        )
        values, vectors = np.linalg.eigh(g)
        chosen = [j for j in np.argsort(-values)[:rank] if values[j] > 1e-10 * abs(values).max()]
        projections.append(vectors[:, chosen] @ vectors[:, chosen].T)
    trimmed = []
    for i, delta in enumerate(deltas):
        for k, projection in enumerate(projections):
            if k != i:
                after = delta - projection @ delta
                size = np.linalg.norm(after)
                delta = after * (np.linalg.norm(delta) / size) if renorm and size else after
        trimmed.append(delta)
    return trimmed


def fisher(
    values: list[Array],
    information: list[Array],
    weights: list[float],
    norms: list[float],
    floor: float,
) -> Array:
    scaled = [
        w * np.maximum(f.astype(np.float64) / n, floor)
        for f, w, n in zip(information, weights, norms, strict=True)
    ]
    top = np.sum([f * v for f, v in zip(scaled, values, strict=True)], axis=0)
    merged: Array = top / np.sum(scaled, axis=0)
    return merged
