"""Conflict to capacity: three views of disagreement, their mean, and the capacity of each layer.

The paper's "Conflict to Capacity", one function per equation. Everything is float64 and in depth
order. What a view needs is small and measured elsewhere: prompt Gram matrices from the probe pass,
Gram matrices and masses of the task vectors from one streaming pass.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Final

import numpy as np

from sigmerge.errors import SigmergeError
from sigmerge.method.shapes import Float, Float64

VIEWS: Final = ("representation", "direction", "sign")
"""r, p and s of Eq. views, in the paper's order."""

EPSILON: Final = 1e-12
"""ε of Eq. views."""

NOISE: Final = 1e-12
"""Below this, a difference between two views, or a spread relative to its size, is rounding."""


def prompt_gram(
    hidden: Float[np.ndarray, "prompts width"],
) -> Float64[np.ndarray, "prompts prompts"]:
    """Linear-kernel Gram matrix HHᵀ of one layer's pooled hidden states H."""
    states = hidden.astype(np.float64)
    return states @ states.T


def centred(
    gram: Float64[np.ndarray, "prompts prompts"],
) -> Float64[np.ndarray, "prompts prompts"]:
    """The Gram matrix of the states less their mean over prompts. Centring is idempotent."""
    return gram - gram.mean(axis=0) - gram.mean(axis=1)[:, None] + gram.mean()


def cka(
    left: Float64[np.ndarray, "prompts prompts"], right: Float64[np.ndarray, "prompts prompts"]
) -> float:
    """CKA(H_d, H_d') from two prompt Gram matrices: biased, centred, linear, clipped to [0, 1].

    States that are the same for every prompt span no direction: 1 if both are, 0 if one is.
    """
    left_constant, right_constant = _spread_is_noise(left), _spread_is_noise(right)
    if left_constant or right_constant:
        return float(left_constant and right_constant)
    a, b = centred(left), centred(right)
    alignment = np.vdot(a, b) / np.sqrt(np.vdot(a, a) * np.vdot(b, b))
    return float(np.clip(alignment, 0.0, 1.0))


def _spread_is_noise(gram: Float64[np.ndarray, "prompts prompts"]) -> bool:
    return bool(np.trace(centred(gram)) <= NOISE * np.trace(gram))


def representation_view(
    grams: Float64[np.ndarray, "experts layers prompts prompts"],
) -> Float64[np.ndarray, "layers"]:
    """Eq. views, r_i = avg over pairs of 1 − CKA(H_d,i, H_d',i); 0 for a single expert."""
    pairs = list(combinations(range(grams.shape[0]), 2))
    view = np.zeros(grams.shape[1])
    for layer in range(grams.shape[1]):
        for a, b in pairs:
            view[layer] += (1.0 - cka(grams[a, layer], grams[b, layer])) / len(pairs)
    return view


def direction_view(
    dots: Float64[np.ndarray, "layers experts experts"],
) -> Float64[np.ndarray, "layers"]:
    """Eq. views, p_i = avg over pairs of (1 − cos(Δ_d,i, Δ_d',i)) / 2.

    `dots[i, d, d']` is ⟨Δ_d,i, Δ_d',i⟩. Two experts that both left the layer alone agree (0); if
    only one of them moved it, cos = 0.
    """
    pairs = list(combinations(range(dots.shape[1]), 2))
    view = np.zeros(dots.shape[0])
    for a, b in pairs:
        square_a, square_b = dots[:, a, a], dots[:, b, b]
        # √(x·x) = x exactly, so that experts with equal deltas have cos = 1 exactly.
        norms = np.sqrt(square_a * square_b)
        cosine = np.divide(dots[:, a, b], norms, out=np.zeros_like(norms), where=norms > 0)
        cosine[(square_a == 0) & (square_b == 0)] = 1.0
        view += (1.0 - np.clip(cosine, -1.0, 1.0)) / 2.0 / len(pairs)
    return view


def sign_view(
    contested: Float64[np.ndarray, "layers"], total: Float64[np.ndarray, "layers"]
) -> Float64[np.ndarray, "layers"]:
    """Eq. views, s_i = Σ_j m_ij c_ij / (Σ_j m_ij + ε), from its two sums.

    m_ij = max_d |Δ_d,i[j]|; c_ij = 1 where some Δ is positive and some is negative.
    """
    return contested / (total + EPSILON)


def is_constant(view: Float64[np.ndarray, "layers"]) -> bool:
    """Whether all layers have the same value, up to rounding."""
    return bool(view.max() - view.min() <= NOISE)


def min_max(view: Float64[np.ndarray, "layers"]) -> Float64[np.ndarray, "layers"]:
    """r̃, p̃ or s̃: the view moved and stretched over layers onto [0, 1]; a constant one to 0."""
    if is_constant(view):
        return np.zeros_like(view)
    low, high = view.min(), view.max()
    return (view - low) / (high - low)


def conflict_score(
    views: Mapping[str, Float64[np.ndarray, "layers"]], names: Sequence[str] = VIEWS
) -> tuple[Float64[np.ndarray, "layers"], tuple[str, ...]]:
    """S̄_i, the unweighted mean of the min-maxed views `names`, and warnings about them."""
    for name in names:
        bad = np.flatnonzero(~np.isfinite(views[name]))
        if bad.size:
            raise SigmergeError(f"The {name} view of layer {bad[0]} is not a finite number.")
    warnings = tuple(
        f"The {name} view is the same at every layer and counts as 0 everywhere."
        for name in names
        if is_constant(views[name])
    )
    return np.mean([min_max(views[name]) for name in names], axis=0), warnings


def capacity(
    score: Float64[np.ndarray, "layers"], c_min: float, c_max: float
) -> Float64[np.ndarray, "layers"]:
    """Eq. capacity, C_i = C_max − (C_max − C_min) S̄_i; rounding never leaves [C_min, C_max]."""
    return np.clip(c_max - (c_max - c_min) * score, c_min, c_max)
