"""Eq. views by their definitions: plain loops, exact sums, CKA in feature space. No sigmerge."""

import math
from itertools import combinations

import numpy as np


def cka(left, right):
    """‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖) with centred columns; no Gram matrix of prompts is formed."""
    x = left - left.mean(axis=0)
    y = right - right.mean(axis=0)
    return np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))


def representation(states):
    """r_i from states[expert][layer] (prompts × width)."""
    layers = range(len(states[0]))
    pairs = list(combinations(states, 2))
    return [sum(1 - cka(a[i], b[i]) for a, b in pairs) / len(pairs) for i in layers]


def direction(deltas):
    """p of one layer from deltas[expert][coordinate]."""
    values = []
    for a, b in combinations(deltas, 2):
        norm_a = math.sqrt(math.fsum(float(x) ** 2 for x in a))
        norm_b = math.sqrt(math.fsum(float(x) ** 2 for x in b))
        if norm_a == 0 and norm_b == 0:
            values.append(0.0)
        elif norm_a == 0 or norm_b == 0:
            values.append(0.5)
        else:
            dot = math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))
            values.append((1 - dot / (norm_a * norm_b)) / 2)
    return sum(values) / len(values) if values else 0.0


def masses(deltas):
    """(Σ m c, Σ m) of one layer; c looks at every pair of experts, as the paper words it."""
    contested, total = [], []
    for column in zip(*deltas, strict=True):
        m = max(abs(float(x)) for x in column)
        c = any(a * b < 0 for a, b in combinations(np.sign(np.array(column, float)), 2))
        total.append(m)
        contested.append(m if c else 0.0)
    return math.fsum(contested), math.fsum(total)


def sign(deltas):
    contested, total = masses(deltas)
    return contested / (total + 1e-12)


def score(views):
    """S̄ from a list of views."""
    scaled = []
    for view in views:
        low, high = min(view), max(view)
        scaled.append([(v - low) / (high - low) if high > low else 0.0 for v in view])
    return [sum(column) / len(column) for column in zip(*scaled, strict=True)]
