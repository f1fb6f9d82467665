"""Results of the verbs: objects with attributes, displayed in notebooks as tables and figures."""

from collections.abc import Mapping
from typing import Any, Literal

from sigmerge.checkpoints.verify import Report
from sigmerge.method.deficit import DomainScores
from sigmerge.records import (
    MergePlan,
    Part,
    Provenance,
    RepairPlan,
    RunRecord,
    SearchRecord,
    TuneRecord,
)


class Merged(Part):
    """A merge or a repair: the new folder, its plan and its provenance."""

    out: str
    plan: MergePlan
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
        from sigmerge.pages.notebook import merged

        return merged(self.out, self.plan, self.provenance)


class TextRead(Part):
    """How well a model predicts a text; bits per byte can be compared between tokenizers."""

    perplexity: float
    bits_per_byte: float
    tokens: int


class Retokenized(Merged):
    """A model with another tokenizer. `text` has what it and the model before it made of a text:
    `before` and `after`."""

    text: Mapping[str, TextRead] = {}

    def as_json(self) -> dict[str, Any]:
        read = {name: one.as_json() for name, one in self.text.items()}
        return {**super().as_json(), **({"text": read} if read else {})}


class Profile(Part):
    """The conflict and the capacity of every layer, in depth order."""

    views: Mapping[str, tuple[float, ...]]
    conflict: tuple[float, ...]
    capacity: tuple[float, ...]
    coordinates: tuple[int, ...]
    c_min: float
    c_max: float
    warnings: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        from sigmerge.pages.figures import drawn
        from sigmerge.pages.notebook import profile

        return profile(drawn(self), self.warnings)


class Deficits(Part):
    """The deficit of every domain, and its share of the capacity."""

    domains: tuple[str, ...]
    experts: Mapping[str, DomainScores]
    anchor: DomainScores
    deficit: DomainScores
    share: DomainScores
    missing: Mapping[str, tuple[str, ...]] = {}

    def _repr_html_(self) -> str:
        from sigmerge.pages.figures import drawn
        from sigmerge.pages.notebook import deficits

        return deficits(drawn(self), self.anchor, self.missing)


class RunResult(RunRecord):
    """A whole run; its page is `out`/report.html."""

    def _repr_html_(self) -> str:
        from sigmerge.pages.notebook import page

        return page(self.out)


class TuneResult(TuneRecord):
    """A tuning; its page is `out`/report.html."""

    def _repr_html_(self) -> str:
        from sigmerge.pages.notebook import page

        return page(self.out)


class SearchResult(SearchRecord):
    """A search; the winner is stored in the folder `winner`."""

    def _repr_html_(self) -> str:
        from sigmerge.pages.notebook import tables
        from sigmerge.pages.table import Table, number_columns, percent, text_columns

        best = self.best
        facts = [
            ("winner", self.winner),
            ("operator", self.operator),
            ("evaluation calls", f"{self.evaluation_calls:,} ({self.replayed:,} replayed)"),
            ("time", f"{self.wall_seconds:.1f} s"),
        ]
        scores = [
            (domain, percent(estimate), percent(self.test.get(domain)))
            for domain, estimate in best.estimates.items()
        ]
        names = list(dict.fromkeys(name for own in best.settings.values() for name in own))
        settings = [
            (expert, *(f"{own[name]:.4f}" if name in own else "–" for name in names))
            for expert, own in best.settings.items()
        ]
        return tables(
            Table(text_columns("search", ""), facts),
            Table(number_columns("domain", "estimate", "unseen items"), scores),
            Table(number_columns("expert", *names), settings),
        )


class Captured(Part):
    """The statistics of one expert: where they are, and whether they were measured now.

    Those that are to do are in no folder yet. `seconds` are those of the capture, if it was not
    interrupted.
    """

    expert: str
    kind: str
    exemplars: int
    peak_memory_bytes: int
    key: str
    folder: str
    state: str
    seconds: float | None = None


class Captures(tuple[Captured, ...]):
    """The captures of a recipe's experts, in its order."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from sigmerge.pages.notebook import tables
        from sigmerge.pages.table import Table, text_columns

        rows = [(one.expert, one.kind, f"{one.exemplars:,}", one.state, one.folder) for one in self]
        head = ("expert", "statistics", "exemplars", "state", "folder")
        return tables(Table(text_columns(*head), rows))


class Reports(tuple[Report, ...]):
    """The reports of `verify`: one for a checkpoint, two for the folder of a run."""

    __slots__ = ()

    @property
    def ok(self) -> bool:
        return all(report.ok for report in self)

    def _repr_html_(self) -> str:
        from sigmerge.pages.notebook import tables
        from sigmerge.pages.table import Table, text_columns

        rows = []
        for report in self:
            wrong = {finding.check for finding in report.findings}
            rows += [
                (str(report.folder), check, "PROBLEM" if check in wrong else "ok",
                 report.extent.get(check, ""))
                for check in report.checked
            ]  # fmt: skip
            rows += [
                (str(report.folder), check, "not checked", why)
                for check, why in report.skipped.items()
            ]
        problems = [f"{report.folder}: {found}" for report in self for found in report.findings]
        return tables(Table(text_columns("folder", "check", "", ""), rows), notes=problems)


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
    """By domain the gap to the strongest expert; empty without experts."""


class Aggregated(Part):
    """Result files side by side, and the domain scores of the experts they are compared with."""

    rows: tuple[AggregatedRow, ...]
    experts: Mapping[str, DomainScores]

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")  # a limit of None is a value: all items

    def _repr_html_(self) -> str:
        from sigmerge.pages.notebook import tables
        from sigmerge.pages.table import Table, number_columns, percent

        domains = list(dict.fromkeys(domain for row in self.rows for domain in row.domains))
        scores = [
            (
                row.file,
                *(percent(row.domains.get(domain)) for domain in domains),
                percent(row.macro),
            )
            for row in self.rows
        ]
        shown = [Table(number_columns("result", *domains, "macro"), scores)]
        if self.experts:
            gaps = [
                (row.file, *(percent(row.residual_gaps.get(domain)) for domain in domains))
                for row in self.rows
            ]
            shown.append(Table(number_columns("residual gap", *domains), gaps))
        return tables(*shown)


class PairedLine(Part):
    """One anchor and its repair as fractions of Macro-5 and residual gap."""

    name: str
    domains: int
    anchor: float
    repaired: float | None
    gain: float | None
    gap_before: float | None
    gap_after: float | None


class TunedLine(Part):
    """Macro-5 of the tuned merge and of the best plain anchor that it was found from."""

    calls: int
    tuned: float
    plain: float
    page: str


class DemoResult(Part):
    """The paired table of the demo, and its page."""

    rows: tuple[PairedLine, ...]
    tuned: TunedLine | None = None
    page: str
    out: str

    def _repr_html_(self) -> str:
        from sigmerge.pages.notebook import page

        return page(self.out)


class Extracted(Part):
    """An adapter that was extracted. `kept` is the part of the matrices' squared norm it holds."""

    out: str
    modules: int
    rank: int
    kept: float
    whole: tuple[str, ...]
    bytes_written: int
    warnings: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        from sigmerge.pages.notebook import tables
        from sigmerge.pages.table import Table, text_columns

        row = (self.out, f"{self.modules:,}", str(self.rank), f"{100 * self.kept:.2f} %")
        return tables(Table(text_columns("adapter", "matrices", "largest rank", "kept"), [row]))


class TriedModel(Part):
    """What a trial found of one model: by domain the perplexity of a token of its texts, and its
    nats for a character, which models of several tokenizers can be compared by.

    None is a number that is not finite. `repeated` is the share of token triples that an answer
    had before. `faults` are those of the chat template and of the special tokens, `zeros` the
    matrices that hold nothing but zeros.
    """

    name: str
    folder: str
    perplexity: Mapping[str, float | None]
    per_character: Mapping[str, float | None]
    surprise: float | None
    """Nats for a token of all texts, as a part of those of guessing."""
    repeated: float | None
    template: bool
    faults: tuple[str, ...]
    zeros: tuple[str, ...]
    seconds: float


class Trial(Part):
    """A short trial of a checkpoint beside the parents that its provenance names.

    `verdict` is fine, doubtful or broken, `reasons` say why; `notes` what was not looked at.
    """

    checkpoint: TriedModel
    parents: tuple[TriedModel, ...] = ()
    verdict: Literal["fine", "doubtful", "broken"]
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")  # a number that is not finite is null

    def _repr_html_(self) -> str:
        from sigmerge.pages.notebook import tables
        from sigmerge.pages.table import Table, number_columns

        domains = list(self.checkpoint.perplexity)
        rows = [
            (
                each.name,
                *(f"{v:.3g}" if (v := each.perplexity.get(d)) else "–" for d in domains),
                "–" if each.repeated is None else f"{100 * each.repeated:.0f} %",
            )
            for each in (self.checkpoint, *self.parents)
        ]
        told = [f"{self.verdict}: {reason}" for reason in self.reasons]
        return tables(Table(number_columns("perplexity", *domains, "repeated"), rows), notes=told)


class Reply(Part):
    """What a checkpoint answered to a prompt, with its likeliest tokens."""

    checkpoint: str
    prompt: str
    templated: bool
    answer: str
    prompt_tokens: int
    tokens: int
    seconds: float


class Inspected(Part):
    """What the headers and texts of a checkpoint say. `dtypes` counts parameters by their type.

    `form` says how quantised weights are stored; they count as the type that they stand for.
    `settings` is what its configuration says of the computation. `others` are checkpoints that were
    looked at with it, `warnings` what configurations say otherwise than the first, or than weights.
    """

    folder: str
    architecture: str
    layers: int
    prefix: str
    tensors: int
    parameters: int
    dtypes: Mapping[str, int]
    bytes: int
    files: int
    embedding: tuple[int, ...]
    tied: bool
    tokens: int | None
    form: str = ""
    settings: Mapping[str, Any] = {}
    others: tuple["Inspected", ...] = ()
    warnings: tuple[str, ...] = ()


class DifferingPart(Part):
    """A layer, or a tensor outside the layers: how many coordinates differ, and how far.

    `distance` is the Euclidean norm of the difference, `norm` that of the first checkpoint.
    """

    name: str
    coordinates: int
    changed: int
    distance: float
    norm: float


class ModelDifference(Part):
    """How one checkpoint differs from another, the other tensors by their shapes.

    A tensor of two shapes is in both mappings; `config` has the two values of a key. `unlike` are
    tensors of whole numbers, or of another kind that has no distance, whose bytes differ.
    """

    one: str
    other: str
    parts: tuple[DifferingPart, ...]
    only_in_one: Mapping[str, tuple[int, ...]]
    only_in_other: Mapping[str, tuple[int, ...]]
    unlike: tuple[str, ...]
    config: Mapping[str, tuple[Any, Any]]
