"""RegMean: the linear map closest to every expert's on its own inputs (Jin et al., 2023).

Notation: W_k is (out, in) as torch stores it; S_k = X_kᵀX_k, X_k the expert's inputs, one row a
token. The off-diagonal factor is 0.1 or 0.9 with the authors and 0.5 in MergeBench, and what to do
near singularity is not settled between implementations: both are options. Without exemplars, an
update's own rows stand for them: H_k = D_kᵀD_k / ‖D_k‖², D_k = W_k − W_ref, which is where WUDI's
descent ends (operators/wudi.py), and ACE-Merging (arXiv:2603.02945) with a ridge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sigmerge.core import Array
from sigmerge.core.algebra import Algebra, Matrix
from sigmerge.core.merge import scale
from sigmerge.errors import PoolError
from sigmerge.operators.base import (
    LAMBDA,
    OUTSIDE,
    Chunk,
    Operator,
    Parameter,
    Site,
    Statistics,
    Tile,
)
from sigmerge.operators.features import (
    RTOL,
    FeatureOperator,
    grams,
    is_stack,
    matrices,
    matrix_of,
    matrix_size,
    note_fallback,
    note_solved,
    stored,
    sum_of,
    weights_of,
)
from sigmerge.operators.linear import weighted_mean
from sigmerge.operators.matrices import REST, MatrixOperator, weighted


class Solver(NamedTuple):
    """Applies (Σ S̃_k)⁻¹ from the right, and what the plan says about it."""

    apply: Callable[[Matrix], Matrix]
    notes: dict[str, Any]


GRAMS = ("exemplars", "task_vector")
PARAMETERS = (
    Parameter(
        "weight", float, "factor of the expert's Gram, or with gram: task_vector of its task "
        "vector", 1.0, 1.0, True, 0,
    ),
    LAMBDA,
    Parameter("gram", GRAMS, "of the inputs of exemplars, or of the rows of the task vector itself",
              "exemplars", "exemplars"),
    Parameter("off_diagonal", float, "factor on off-diagonal Gram entries", 0.9, 0.9, False, 0, 1),
    Parameter("ridge", float, "gram: task_vector: added to the diagonal of the sum of Grams, "
              "relative to its mean; draws the result to the reference", 0.0, 0.0, low=0),
    Parameter("condition", float, "largest condition number solved as it is", 1e8, 1e8, low=1),
    Parameter(
        "singular",
        ("pinv", "jitter", "error"),
        "beyond that: pseudo-inverse, a ridge on the diagonal, or refuse",
        "pinv",
        "pinv",
    ),
    Parameter("jitter", float, "ridge relative to the mean of the diagonal", 1e-6, 1e-6, low=0),
    RTOL,
    Parameter("rest", float, "gram: task_vector: " + REST.doc, 0.4, 0.4),
    OUTSIDE,
)  # fmt: skip


class RegMean(FeatureOperator):
    """W = (Σ_k W_k S̃_k)(Σ_k S̃_k)⁻¹; tensors without Grams are averaged.

    S̃_k is the mean over tokens of the Gram, its off-diagonal entries multiplied by a factor. A
    pseudo-inverse erases what the experts know in directions that no exemplar shows. Ours: Grams,
    and experts in an average, may have weights, and `lambda` other than 1 moves the result along
    its task vector.
    """

    name = "regmean"
    title = "RegMean"
    paper = "Jin et al., Dataless knowledge fusion by merging weights, ICLR 2023 (arXiv:2212.09849)"
    gives_vector = False
    parameters = PARAMETERS

    def __init__(self, reference: bool = True) -> None:
        self.needs_reference = reference

    def with_reference(self, given: bool) -> Operator:
        return RegMean(given)

    def with_parameters(self, given: Mapping[str, Any]) -> Operator:
        return RegMeanOfVectors() if given.get("gram") == "task_vector" else self

    def check(self, sites: Sequence[Site]) -> list[str]:
        if problems := one_gram(sites, "exemplars"):
            return problems
        for site in sites:
            if site.settings["ridge"]:
                return ["ridge: is read with gram: task_vector; leave it out"]
            if not any(site.settings["weight"]):
                return [f"the weights of {site.tensor} are all zero; give others"]
            if not self.needs_reference and site.settings["lambda"] != 1:
                return ["lambda: without base_model there is no task vector to scale; leave it out"]
        return []

    def check_statistics(self, sites: Sequence[Site], statistics: Statistics) -> list[str]:
        """With the factor at 1, fewer tokens than input channels cannot be inverted."""
        problems = []
        for site in sites:
            options = site.settings
            if site.measured != "gram" or options["singular"] != "error":
                continue
            stack = [matrix_of(site, i) for i in range(site.shape[0])] if is_stack(site) else [site]
            for one in stack:
                rows = sum(statistics.rows(expert, one.tensor) for expert in one.experts)
                if options["off_diagonal"] == 1 and 0 < rows < one.inputs:
                    problems.append(
                        f"{one.tensor}: its Grams are singular, {rows} tokens for {one.inputs} "
                        "channels; give more exemplars, off_diagonal < 1, or singular: pinv"
                    )
        return problems

    def granule(self, site: Site) -> int:
        return matrix_size(site) if site.measured == "gram" else 4

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        site = chunk.site
        for tile in chunk.tiles():
            if site.measured != "gram" or is_stack(site):
                note_fallback(chunk, "mean of the experts")
                weighted_mean(tile, site.weights())
            if site.measured == "gram":
                for part, one in weights_of(tile, site, chunk.statistics):
                    regress = partial(_regress, part, one, chunk.statistics)
                    part.out[:], notes = chunk.solve(regress)
                    note_solved(chunk, notes)
            if (factor := site.settings["lambda"]) != 1:
                scale(tile.out, 1.0, factor)
                chunk.add_reference(tile, 1 - factor)
            yield tile


class RegMeanOfVectors(MatrixOperator):
    """D = (Σ_k D_k H̃_k)(Σ_k H̃_k + ridge)⁻¹ for every matrix of a layer, without exemplars.

    H̃_k is H_k, its off-diagonal entries multiplied by a factor; weights multiply D_k outside it.
    """

    name, title, paper = RegMean.name, RegMean.title, RegMean.paper
    copies = 5.0
    parameters = PARAMETERS

    def check(self, sites: Sequence[Site]) -> list[str]:
        return one_gram(sites, "task_vector")

    def operations_of_one(self, outputs: int, inputs: int, site: Site) -> float:
        products = 4 * len(site.experts) + 2
        return products * outputs * inputs**2 + inputs**3 / 3

    def side(self, site: Site) -> int:
        return site.shape[-1]

    def combined(self, rows: Array, site: Site, algebra: Algebra) -> tuple[Matrix, dict[str, Any]]:
        options, inputs = site.settings, site.inputs
        total, moved = algebra.zeros(inputs, inputs), algebra.zeros(site.outputs, inputs)
        for delta in weighted(rows, site, algebra):
            if (square := algebra.norm(delta) ** 2) > 0:  # else there is no update to keep
                gram = shrunk((delta.T @ delta) / square, options["off_diagonal"])
                moved += delta @ gram
                total += gram
        if not total.any():
            return moved, {}
        _diagonal(total)[:] += options["ridge"] * float(total.diagonal().mean())
        solve = solver(total, site, algebra)
        return solve.apply(moved), solve.notes


def one_gram(sites: Sequence[Site], gram: str) -> list[str]:
    """Problems of a choice that decides about captures, and so is made once for all tensors."""
    if all(site.settings["gram"] == gram for site in sites):
        return []
    return ["gram: is one for all tensors and models; give it among the recipe's parameters"]


def _regress(
    tile: Tile, site: Site, statistics: Statistics, algebra: Algebra
) -> tuple[Array, dict[str, Any]]:
    """Grams are read twice, so that no more than two are in memory."""
    options = site.settings

    def shrunken() -> Iterator[Matrix]:
        every = zip(grams(site, statistics, True, algebra), options["weight"], strict=True)
        return (shrunk(gram, options["off_diagonal"], weight) for gram, weight in every)

    solve = statistics.once(
        site.tensor, tuple(options.items()), lambda: solver(sum_of(shrunken()), site, algebra)
    )
    pairs = zip(matrices(tile.experts, site, algebra), shrunken(), strict=True)
    merged = solve.apply(sum_of(weight @ gram for weight, gram in pairs))
    return stored(merged, site, algebra), solve.notes


def shrunk(gram: Matrix, factor: float, weight: float = 1.0) -> Matrix:
    """S̃: off-diagonal entries times the factor; then all of them times the weight."""
    shrunken = gram * factor
    _diagonal(shrunken)[:] = gram.diagonal()
    return shrunken if weight == 1 else shrunken * weight


def _diagonal(matrix: Matrix) -> Matrix:
    """The diagonal, to be written to."""
    return matrix.reshape(-1)[:: len(matrix) + 1]


def solver(total: Matrix, site: Site, algebra: Algebra) -> Solver:
    """Cholesky where Σ S̃_k is well conditioned; near singularity what `singular` says."""
    options = site.settings
    if not total.any():
        raise PoolError(f"{site.tensor}: no exemplar of any expert reaches it; its Grams are zero.")
    factor, number = algebra.cholesky(total)
    if number <= options["condition"]:
        return Solver(partial(algebra.solved, factor), {"solver": "cholesky", "condition": number})
    if options["singular"] == "error":
        raise PoolError(
            f"{site.tensor}: its Grams are near singular (condition {number:.1e}); give more "
            "exemplars, a smaller off_diagonal, or singular: pinv or jitter."
        )
    if options["singular"] == "jitter":
        ridge = options["jitter"] * float(total.diagonal().mean())
        ridged = total * 1.0
        _diagonal(ridged)[:] += ridge
        factor, after = algebra.cholesky(ridged)
        if np.isfinite(after):
            notes = {"solver": "jitter", "condition": number, "ridge": ridge}
            return Solver(partial(algebra.solved, factor), _finite(notes))
    values, vectors = algebra.eigh(total)
    kept = values > options["rtol"] * values[-1]
    basis, inverse = vectors[:, kept], 1.0 / values[kept]
    notes = {"solver": "pinv", "condition": number, "rank": int(kept.sum()), "of": len(values)}
    return Solver(lambda rhs: ((rhs @ basis) * inverse) @ basis.T, _finite(notes))


def _finite(notes: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {name: None if value == np.inf else value for name, value in notes.items()}
