"""What several sections share: places in the arrays, gaps, retained fractions."""

from __future__ import annotations

import numpy as np
from research.published.data import PRINTED_ANCHORS, PublishedTables

from sigmerge.lab.analysis import statistics
from sigmerge.method.deficit import residual_gap

MATH, INSTRUCTION, CODING, MULTILINGUAL, SAFETY = range(5)
P3B, P8B, GEMMA = range(3)
DARE, TIES, TA, LINEAR = (PRINTED_ANCHORS.index(name) for name in ("DARE", "TIES", "TA", "Linear"))
DOM = "dom_p0 dom_p1 dom_p2"
STUDIED = ((P3B, DARE), (P8B, LINEAR), (GEMMA, LINEAR))  # pool and anchor of ablations, controls
FOUR = 0.00005  # half of the last decimal of a fraction printed with four


def gaps(paper: PublishedTables) -> tuple[np.ndarray, np.ndarray]:
    """Residual gaps before and after, with the inferred references."""
    return gap(paper, paper.before), gap(paper, paper.after)


def gap(paper: PublishedTables, scores: np.ndarray) -> np.ndarray:
    """Residual gap of scores by pool, domain and checkpoint."""
    reference = np.broadcast_to(paper.reference[:, :, None], scores.shape)
    return residual_gap(reference.ravel(), scores.ravel()).reshape(scores.shape)


def retained(paper: PublishedTables, control: str) -> np.ndarray:
    """Percentage of the paired gain each pool retains, from the printed macro scores."""
    return np.array(
        [
            100
            * statistics.retained_fraction(
                *(float(row[c]) for c in ("macro", "anchor_macro", "default_macro"))
            )
            for row in paper.controls[control]
        ]
    )


def equal(a: np.ndarray, b: np.ndarray, slack: float) -> str:
    """How many entries of two tables are equal, up to the rounding of print."""
    return str(statistics.Count(int((np.abs(a - b) <= slack + 1e-9).sum()), a.size))


def all_of(count: int) -> str:
    return str(statistics.Count(count, count))
