"""WUDI: the task vector that disturbs no expert's, found by gradient descent (Cheng et al., 2025).

Notation: H_d = Δ_dᵀΔ_d / ‖Δ_d‖²; the experts' own updates stand for the inputs of a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.core import Array
from sigmerge.operators.base import LAMBDA, OUTSIDE, WEIGHT, Parameter, Site
from sigmerge.operators.matrices import REST, MatrixOperator, weighted

if TYPE_CHECKING:
    from sigmerge.core.algebra import Algebra, Matrix

BETAS = (0.9, 0.999)
DIVISION = 1e-8
"""What Adam adds to a divisor; both as the authors left them."""
RATES = {"rms": 1 / 30, "absolute": 1e-5}


class Wudi(MatrixOperator):
    """τ minimising Σ_d ‖(τ − Δ_d) Δ_dᵀ‖² / ‖Δ_d‖² from Σ_d Δ_d on, by a fixed number of steps.

    The steps are Adam's, and where they end matters: few leave the sum, many the minimum. With
    `step: absolute` a step is about `rate` (the authors'), so how far it comes depends on the size
    of the task vectors; with `rms` it is about `rate` times the root of the mean of their squared
    entries, and the result scales with them.
    """

    name = "wudi"
    title = "WUDI"
    paper = (
        "Cheng et al., Whoever started the interference should end it: guiding data-free model "
        "merging via task vectors, ICML 2025 (arXiv:2503.08099)"
    )
    copies = 10.0
    parameters = (
        WEIGHT,
        LAMBDA,
        Parameter("steps", int, "steps of Adam", 300, 300, low=0),
        Parameter(
            "step", ("rms", "absolute"), "unit of the rate: the task vectors' root mean square, "
            "or 1", "rms", "absolute",
        ),
        Parameter(
            "rate", float, "learning rate; auto: 1/30 of the root mean square, or 1e-5",
            "auto", "auto", low=0, auto=True,
        ),
        REST,
        OUTSIDE,
    )  # fmt: skip

    def operations_of_one(self, outputs: int, inputs: int, site: Site) -> float:
        products = 2 * len(site.experts) + int(site.settings["steps"])
        return 2.0 * products * outputs * inputs**2

    def side(self, site: Site) -> int:
        return site.shape[-1]

    def combined(self, rows: Array, site: Site, algebra: Algebra) -> tuple[Matrix, dict[str, Any]]:
        options, outputs, inputs = site.settings, site.outputs, site.inputs
        squares = [algebra.norm(delta) ** 2 for delta in weighted(rows, site, algebra)]
        rms = float(np.sqrt(np.mean(squares) / (outputs * inputs)))
        total = algebra.zeros(outputs, inputs)
        grams, moved = algebra.zeros(inputs, inputs), algebra.zeros(outputs, inputs)
        unit = rms if options["step"] == "rms" and rms > 0 else 1.0
        for delta, square in zip(weighted(rows, site, algebra), squares, strict=True):
            if square == 0:  # an expert without an update, or of weight 0, disturbs nothing
                continue
            gram = (delta.T @ delta) / square
            total += delta / unit
            moved += (delta / unit) @ gram
            grams += gram
        rate = RATES[options["step"]] if options["rate"] == "auto" else options["rate"]
        return descended(total, grams, moved, rate, options["steps"]) * unit, {}


def descended(start: Matrix, grams: Matrix, moved: Matrix, rate: float, steps: int) -> Matrix:
    """Adam on Σ_d tr((τ − Δ_d) H_d (τ − Δ_d)ᵀ); its gradient is 2 (τ Σ H_d − Σ Δ_d H_d)."""
    point, first, second = start * 1.0, start * 0.0, start * 0.0
    for step in range(1, steps + 1):
        gradient = point @ grams
        gradient -= moved
        gradient *= 2.0
        first *= BETAS[0]
        first += gradient * (1 - BETAS[0])
        second *= BETAS[1]
        gradient *= gradient
        gradient *= 1 - BETAS[1]
        second += gradient
        move = (second / (1 - BETAS[1] ** step)) ** 0.5
        move += DIVISION
        move = first / move
        move *= rate / (1 - BETAS[0] ** step)
        point -= move
    return point
