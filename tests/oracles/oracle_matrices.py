"""Operators on whole matrices in float64, as their papers have them: full decompositions, loops.

`deltas` are task vectors (out, in) that have their weights; nothing here uses a Gram.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def iso_c(deltas: list[Array]) -> Array:
    u, s, vt = np.linalg.svd(np.sum(deltas, axis=0), full_matrices=False)
    merged: Array = u @ np.diag(np.full(len(s), s.mean())) @ vt
    return merged


def boost(deltas: list[Array], beta: float) -> Array:
    u, s, vt = np.linalg.svd(np.sum(deltas, axis=0), full_matrices=False)
    reached = [s[: i + 1].sum() >= beta * s.sum() for i in range(len(s))]
    floor = s[reached.index(True)]
    merged: Array = u @ np.diag([max(value, floor) for value in s]) @ vt
    return merged


def polar(matrix: Array) -> Array:
    """The nearest matrix with orthonormal columns."""
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    nearest: Array = u @ vt
    return nearest


def tsv(vectors: list[Array], weights: tuple[float, ...]) -> Array:
    """`vectors` without their weights, which scale singular values."""
    share = min(vectors[0].shape) // len(vectors)
    lefts, values, rights = [], [], []
    for delta, weight in zip(vectors, weights, strict=True):
        u, s, vt = np.linalg.svd(delta, full_matrices=False)
        lefts.append(u[:, :share])
        values.append(weight * s[:share])
        rights.append(vt[:share].T)
    left, right = polar(np.hstack(lefts)), polar(np.hstack(rights))
    merged: Array = left @ np.diag(np.concatenate(values)) @ right.T
    return merged


def iso_cts(deltas: list[Array], common: float) -> Array:
    u, s, vt = np.linalg.svd(np.sum(deltas, axis=0), full_matrices=False)
    rank, tasks = len(s), len(deltas)
    own = round((rank - int(rank * common)) / tasks)
    kept = rank - own * tasks
    lefts, values, rights = [u[:, :kept]], [s[:kept]], [vt[:kept].T]
    for delta in deltas:
        residual = delta - u[:, :kept] @ u[:, :kept].T @ delta
        a, b, ct = np.linalg.svd(residual, full_matrices=False)
        lefts.append(a[:, :own])
        values.append(b[:own])
        rights.append(ct[:own].T)
    level = np.concatenate(values).mean()
    merged: Array = level * polar(np.hstack(lefts)) @ polar(np.hstack(rights)).T
    return merged


def wudi(deltas: list[Array], steps: int, rate: float) -> Array:
    """Adam as its paper has it, on the gradient of every expert's own term."""
    tau = np.sum(deltas, axis=0)
    m, v = np.zeros_like(tau), np.zeros_like(tau)
    for t in range(1, steps + 1):
        gradient = np.zeros_like(tau)
        for delta in deltas:
            gradient += 2 * (tau - delta) @ delta.T @ delta / (delta**2).sum()
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        tau = tau - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    merged: Array = tau
    return merged


def knots_ties(deltas: list[Array], density: float) -> Array:
    """TIES on Σ V_dᵀ entry by entry."""
    u, s, vt = np.linalg.svd(np.hstack(deltas), full_matrices=False)
    parts = np.split(np.diag(s) @ vt, len(deltas), axis=1)
    trimmed = []
    for part in parts:
        order = np.argsort(-np.abs(part).ravel(), kind="stable")[: int(density * part.size)]
        flat = np.zeros(part.size)
        flat[order] = part.ravel()[order]
        trimmed.append(flat)
    merged = np.zeros(parts[0].size)
    for i in range(merged.size):
        entries = [flat[i] for flat in trimmed]
        sign = 1 if sum(entries) >= 0 else -1
        agreeing = [e for e in entries if e * sign > 0]
        merged[i] = np.mean(agreeing) if agreeing else 0.0
    back: Array = u @ merged.reshape(parts[0].shape)
    return back


def pcb(deltas: list[Array], density: float) -> Array:
    size, total = deltas[0].size, np.sum(deltas, axis=0).ravel()
    top, bottom = np.zeros(size), np.zeros(size)
    for delta in deltas:
        flat = delta.ravel()
        ranked = np.sort(np.abs(flat))
        low, high = ranked[int(size * 1e-4)], ranked[int(size * (1 - 1e-4) - 1)]
        sizes = np.minimum(np.maximum(np.abs(flat), low), high)
        within = ((sizes - low) / (high - low)) ** 2
        score = np.exp(len(deltas) * within) * np.tanh(flat * total)
        ranked = np.sort(score)
        least, most = ranked[int(size * (1 - density))], ranked[size - 1]
        share = (np.clip(score, least, most) - least) / (most - least)
        top += np.sign(flat) * sizes * share
        bottom += share
    merged: Array = top / np.maximum(bottom, 1e-12)
    return merged.reshape(deltas[0].shape)


def consensus(deltas: list[Array], share: float, agree: int) -> Array:
    """Entry by entry, in float32: a comparison may be a tie."""
    rows = [delta.astype(np.float32).ravel() for delta in deltas]
    merged = np.zeros(rows[0].size, np.float32)
    for i in range(merged.size):
        total = np.float32(0)
        for row in rows:
            total = np.float32(total + row[i])
        needs = [abs(row[i]) >= np.float32(share) * abs(total - row[i]) for row in rows]
        merged[i] = total if sum(needs) >= agree else 0
    return merged.reshape(deltas[0].shape)


def localize_stitch(vectors: dict[str, list[Array]], density: float) -> dict[str, Array]:
    """The mean over the experts that keep a coordinate; thresholds of the whole model."""
    tasks = len(next(iter(vectors.values())))
    least = []
    for d in range(tasks):
        every = np.sort(np.abs(np.concatenate([v[d].ravel() for v in vectors.values()])))[::-1]
        least.append(every[int(density * every.size) - 1])
    merged = {}
    for name, each in vectors.items():
        kept = np.array([np.abs(v) >= cut for v, cut in zip(each, least, strict=True)])
        sums = (kept * np.array(each)).sum(axis=0)
        merged[name] = sums / np.maximum(kept.sum(axis=0), 1)
    return merged


def regmean_of_vectors(deltas: list[Array], off_diagonal: float, ridge: float) -> Array:
    """Ridge regression of every Δ_d's outputs on its own rows as inputs, stacked."""
    inputs = deltas[0].shape[1]
    right, total = np.zeros_like(deltas[0]), np.zeros((inputs, inputs))
    for delta in deltas:
        gram = delta.T @ delta / np.trace(delta.T @ delta)
        gram = np.where(np.eye(inputs, dtype=bool), gram, off_diagonal * gram)
        right += delta @ gram
        total += gram
    total += ridge * np.trace(total) / inputs * np.eye(inputs)
    merged: Array = right @ np.linalg.inv(total)
    return merged
