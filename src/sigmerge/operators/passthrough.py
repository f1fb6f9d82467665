"""Passthrough: one model's tensors as they are, for stacking slices of models."""

from __future__ import annotations

from typing import Any

import numpy as np

from sigmerge.core import merge as loops
from sigmerge.core.merge import Formula
from sigmerge.operators.base import OUTSIDE, Chunk, Operator, Parameter


class Passthrough(Operator):
    """θ = scale · θ_1."""

    name = "passthrough"
    title = "Passthrough"
    paper = "stacked slices: Kim et al., SOLAR 10.7B, depth up-scaling, 2023 (arXiv:2312.15166)"
    needs_reference = False
    gives_vector = False
    most = 1
    parameters: tuple[Parameter, ...] = (
        Parameter("scale", float, "factor of the tensor", 1.0, 1.0, per_model=True),
        OUTSIDE,
    )

    def formula(self, chunk: Chunk, survey: Any) -> Formula:
        scale = np.array(chunk.site.settings["scale"], np.float32)
        return loops.formula(scale, vectors=False)


class SideBySide(Passthrough):
    """Every tensor is one model's; what experts write may have a factor of its own."""

    name = "moe"
    paper = "dense models as experts: Komatsuzaki et al., Sparse Upcycling, 2023 (arXiv:2212.05055)"
    parameters = Passthrough.parameters[:1]

    def __init__(self, family: str, experts: int, chosen: int) -> None:
        self.title = f"{family} of {experts} experts, {chosen} chosen for each token"

    def heading(self, experts: int) -> str:
        return self.title

    def role(self, name: str) -> str:
        return "base of all but the experts" if name == "base" else super().role(name)
