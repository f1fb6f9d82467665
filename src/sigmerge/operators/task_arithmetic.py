"""Task arithmetic: add the weighted task vectors (Ilharco et al., 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from sigmerge.core import merge as loops
from sigmerge.core.merge import Formula
from sigmerge.operators.base import (
    INT8_MASK,
    LAMBDA,
    OUTSIDE,
    WEIGHT,
    Chunk,
    Operator,
    Parameter,
    Site,
    Tile,
)


def task_vectors(chunk: Chunk) -> Iterator[Tile]:
    """The tiles of a chunk with Δ_d = θ_d − θ_ref in the experts' rows."""
    return chunk.tiles(less="reference")


def scaling(site: Site) -> dict[str, Any]:
    """How a weighted sum becomes τ: times λ, divided by Σ_d w_d with normalize."""
    total = float(site.weights().sum(dtype=np.float32)) if site.settings["normalize"] else 1.0
    return {
        "divisor": total if abs(total) >= 1e-8 else 1.0,
        "factor": float(site.settings["lambda"]),
    }


class TaskArithmetic(Operator):
    """θ = θ_ref + λ Σ_d w_d Δ_d."""

    name = "task_arithmetic"
    title = "Task arithmetic"
    paper = "Ilharco et al., Editing models with task arithmetic, ICLR 2023 (arXiv:2212.04089)"
    parameters = (
        WEIGHT,
        LAMBDA,
        Parameter("normalize", bool, "divide by the sum of the weights", False, False),
        OUTSIDE,
        INT8_MASK,
        Parameter("density", float, "accepted; nothing is dropped here", 1.0, 1.0, True, 0, 1),
        Parameter("rescale", bool, "accepted; nothing is dropped here", False, False),
    )

    def ends_anywhere(self, site: Site) -> bool:
        return True

    def formula(self, chunk: Chunk, survey: Any) -> Formula:
        return loops.formula(chunk.site.weights(), **scaling(chunk.site))
