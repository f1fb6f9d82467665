"""Operators that thin every task vector out, tensor by tensor, and combine what is left."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sigmerge.core import Array
from sigmerge.core import merge as loops
from sigmerge.core.merge import Formula
from sigmerge.operators.base import (
    ELECT,
    INT8_MASK,
    LAMBDA,
    OUTSIDE,
    WEIGHT,
    Chunk,
    Operator,
    Parameter,
    Pass,
    Passes,
    Site,
)
from sigmerge.operators.task_arithmetic import scaling


class Prepared(NamedTuple):
    """What is known about a tensor: what `thinning` needs, and a factor for every expert."""

    found: Any
    factors: Array
    marks: dict[int, Array | None]
    """What stays, by the start of a chunk, where that is remembered."""


class Thinned(Operator):
    """θ = θ_ref + λ Σ_d w_d thin(Δ_d), or with `elects` the disjoint merge of TIES.

    With `rescale: l1` a thinned tensor keeps the ℓ1 norm that it had.
    """

    elects: bool = False
    remembers: bool = False
    """Whether thinning costs so much that what stays is remembered for the merge, a bit for each
    entry, where loops take norms before and there is room. A device thins out again."""

    def find(self, site: Site, survey: Any) -> Passes:
        """What must be known about a tensor before it is thinned out."""
        return None
        yield

    def thinning(self, chunk: Chunk, found: Any) -> dict[str, Any]:
        """How the rows of a chunk are thinned out, as a formula says it."""
        raise NotImplementedError

    def divisors(self, site: Site) -> Any:
        """What the survivors of each expert are divided by."""
        return 1.0

    def cancelled(self, survey: Any) -> float:
        """The sign that is elected where the entries cancel."""
        return 1.0

    def ends_anywhere(self, site: Site) -> bool:
        return bool(site.settings["rescale"] != "l1")

    def prepare(self, site: Site, survey: Any) -> Passes:
        found = yield from self.find(site, survey)
        factors, marks = np.ones(len(site.experts), np.float32), {}
        if site.settings["rescale"] == "l1":
            parts = yield Pass(lambda chunk: self._norms(chunk, found))
            before, after = sum(norms for _, by_part, _ in parts for norms in by_part)
            matched = (before >= 1e-7) & (after >= 1e-7)
            factors[:] = np.where(matched, before / np.where(matched, after, 1.0), 1.0)
            marks = {start: marked for start, _, marked in parts}
        return Prepared(found, factors, marks)

    def formula(self, chunk: Chunk, survey: Any) -> Formula:
        site, (found, factors, remembered) = chunk.site, chunk.state
        rescale = np.ones((len(factors), 2), np.float32)
        rescale[:, 0], rescale[:, 1] = factors, self.divisors(site)
        how = disjoint(site, self.cancelled(survey)) if self.elects else scaling(site)
        marks = remembered.get(chunk.start)
        thinning = {"thin": loops.MARKED, "marks": marks}
        if marks is None:
            thinning = self.thinning(chunk, found)
        return loops.formula(site.weights(), rescale=rescale, **thinning, **how)

    def _norms(self, chunk: Chunk, found: Any) -> tuple[int, Array, Array | None]:
        """Where a chunk starts, by part ℓ1 norms of each expert before and after thinning, and
        what stays."""
        formula = loops.formula(chunk.site.weights(), **self.thinning(chunk, found))
        experts = len(chunk.site.experts)
        norms, marks = chunk.sums(2, experts), chunk.marks(experts if self.remembers else 0)
        given = (formula, chunk.step, chunk.strip, norms, marks)
        looped = chunk.read(loops.norms_of_thinning, *given)
        return chunk.start, norms.sums, marks.marks if looped and marks.marks.size else None


def disjoint(site: Site, cancelled: float) -> dict[str, Any]:
    """τ = λ times the disjoint merge of sparse task vectors."""
    settings = site.settings
    return {
        "combine": loops.DISJOINT,
        "weighted": settings["elect"] == "weighted",
        "normalize": bool(settings["normalize"]),
        "cancelled": cancelled,
        "factor": float(settings["lambda"]),
    }


def family(normalize: bool, elects: bool, *own: Parameter) -> tuple[Parameter, ...]:
    """The parameters that all have, around an operator's own."""
    what = "average the agreeing entries (else sum)" if elects else "divide by the sum of weights"
    return (
        WEIGHT,
        *own,
        *([ELECT] if elects else []),
        Parameter("normalize", bool, what, normalize, normalize),
        LAMBDA,
        OUTSIDE,
        INT8_MASK,
    )
