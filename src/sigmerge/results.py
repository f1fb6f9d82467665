"""What the verbs return: objects with attributes, that a notebook shows as tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sigmerge.method.deficit import DomainScores
from sigmerge.records import Part, Plan, Provenance, RepairPlan, RunRecord


class Merged(Part):
    """A merge or a repair: the new folder, its plan and its provenance."""

    out: str
    plan: Plan
    provenance: Provenance

    @property
    def repair(self) -> RepairPlan:
        """The plan of the repair; TypeError if nothing was repaired."""
        if not isinstance(self.plan, RepairPlan):
            raise TypeError("This is a dense merge; only a repair has a repair plan.")
        return self.plan

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.plan.warnings

    def as_json(self) -> dict[str, Any]:
        return {"out": self.out, "plan": self.plan.as_json(), **self.provenance.as_json()}

    def _repr_html_(self) -> str:
        from sigmerge.analysis.notebook import merged

        return merged(self.out, self.plan, self.provenance)


class Profile(Part):
    """How contested every layer is, and the capacity that leaves it. Layers in depth order."""

    views: Mapping[str, tuple[float, ...]]
    conflict: tuple[float, ...]
    capacity: tuple[float, ...]
    coordinates: tuple[int, ...]
    c_min: float
    c_max: float
    warnings: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        from sigmerge.analysis.figures import Drawn
        from sigmerge.analysis.notebook import profile

        measured = Drawn(
            views=self.views,
            conflict=self.conflict,
            capacity=self.capacity,
            coordinates=self.coordinates,
        )
        return profile(measured, self.warnings)


class Deficits(Part):
    """What the anchor lost on every domain, and the share of capacity that gives it."""

    domains: tuple[str, ...]
    experts: Mapping[str, DomainScores]
    anchor: DomainScores
    deficit: DomainScores
    share: DomainScores
    missing: Mapping[str, tuple[str, ...]] = {}

    def _repr_html_(self) -> str:
        from sigmerge.analysis.figures import Drawn
        from sigmerge.analysis.notebook import deficits

        measured = Drawn(domains=self.domains, deficit=self.deficit, share=self.share)
        return deficits(measured, self.anchor, self.missing)


class RunResult(RunRecord):
    """A whole run; its page is `out`/report.html."""

    def _repr_html_(self) -> str:
        from sigmerge.analysis.notebook import page

        return page(self.out)


class Captured(Part):
    """The statistics of one expert: where they are, and whether they were measured now."""

    expert: str
    kind: str
    exemplars: int
    peak_memory_bytes: int
    folder: str
    state: str


class AggregatedRow(Part):
    """A result file of `evaluate`; `submetrics` are named benchmark.metric."""

    file: str
    checkpoint: str
    suite: str
    split: str
    limit: int | None
    judges: tuple[str, ...]
    domains: DomainScores
    macro: float
    submetrics: Mapping[str, float]
    residual_gaps: DomainScores
    """By domain, what the checkpoint lacks to the strongest expert; empty without experts."""


class Aggregated(Part):
    """Result files side by side, and the domain scores of the experts they are compared with."""

    rows: tuple[AggregatedRow, ...]
    experts: Mapping[str, DomainScores]

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")  # a limit of None is a value: all items


class PairedLine(Part):
    """One anchor and its repair as fractions of Macro-5 and residual gap."""

    name: str
    domains: int
    anchor: float
    repaired: float | None
    gain: float | None
    gap_before: float | None
    gap_after: float | None


class DemoResult(Part):
    """The paired table of the demo, and its page."""

    rows: tuple[PairedLine, ...]
    page: str
    out: str

    def _repr_html_(self) -> str:
        from sigmerge.analysis.notebook import page

        return page(self.out)
