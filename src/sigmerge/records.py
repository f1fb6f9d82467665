"""The records of a run: typed, versioned, written and read here only.

    plan.json         MergePlan, or RepairPlan: every number between the inputs and the bytes
    provenance.json   Provenance: which files were read and written, and what that took
    run.json          RunRecord: a whole run with its scores
    search.json       SearchRecord: a search and its winner
    tune.json         TuneRecord: a tuning, every call of it, and its winner

Annotations are no texts here, as elsewhere: pydantic would evaluate every one.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sigmerge.errors import RecipeError, SigmergeError
from sigmerge.files.checksums import is_intact, sealed
from sigmerge.files.documents import read_json_object, write_json
from sigmerge.method.deficit import DomainScores
from sigmerge.method.objective import amount

PLAN, PROVENANCE, RECIPE, PAGE = "plan.json", "provenance.json", "recipe.yaml", "report.html"

LONGEST_CELL = 200
"""Characters of a value that a notebook shows."""
PerLayer = tuple[tuple[float, ...], ...]
_Record = TypeVar("_Record", bound="Record")


class Part(BaseModel):
    """A part of a record. Keys that a later version added are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, defer_build=True)

    def as_json(self) -> dict[str, Any]:
        """Plain values under the names that files use; what is None is left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def _repr_html_(self) -> str:
        """A table of names and values for a notebook; long values are cut."""
        row = Markup("<tr><th style='text-align: left'>{}</th><td>{}</td></tr>")
        rows = [
            row.format(name, text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL]} …")
            for name, value in self.as_json().items()
            for text in [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
        ]
        return str(Markup("<table>{}</table>").format(Markup("").join(rows)))


class Record(Part):
    """A record with a file of its own."""

    version: Literal[1] = Field(default=1, alias="schema")

    def as_file(self) -> dict[str, Any]:
        """What is written into the file of the record."""
        return self.as_json()

    def write(self, file: Path) -> None:
        write_json(file, self.as_file())


class Sealed(Record):
    """A record whose file has a checksum of all else, by which an accidental change is seen."""

    def as_file(self) -> dict[str, Any]:
        return sealed(self.as_json())


class Member(Part):
    """A checkpoint: its path, and the digests of its weight files."""

    path: str | None = None
    sha256: tuple[str, ...] = ()


class Round(Part):
    """One round of claiming: how much each domain may claim of every layer, and in which order."""

    order: tuple[str, ...]
    quota: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]
    deficit: DomainScores = {}
    share: DomainScores = {}


class ScoreNoise(Part):
    """The number of items behind a domain's score, and the standard error that follows.

    The others are standard errors of the scores, `gain` that of the repaired merge's less the
    anchor's, which answered the same items.
    """

    items: Mapping[str, int]
    experts: Mapping[str, DomainScores]
    anchor: DomainScores
    repaired: DomainScores = {}
    gain: DomainScores = {}


class ScoreTable(Part):
    """Q_d of every expert and of the anchor on the calibration items.

    `missing` names the benchmarks of a domain that have no data and therefore no part in its score.
    """

    experts: Mapping[str, DomainScores]
    anchor: DomainScores
    missing: Mapping[str, tuple[str, ...]] = {}
    noise: ScoreNoise | None = None


class GuardVerdict(Part):
    """What the calibration scores said after a repair."""

    verdict: str
    before: float | None = None
    after: float | None = None
    scores: DomainScores | None = None
    kept: Literal["repair", "anchor"] = "repair"
    warning: str | None = None


class TunedRepair(Part):
    """A repair that was tried: form, scale, capacity of every layer and shares by domain."""

    update: Literal["add", "replace"]
    scale: float
    capacity: tuple[float, ...]
    shares: DomainScores


class TuneCall(Part):
    """One evaluation call of a tuning: the candidate and what it scored on the calibration items.

    `value` is the objective, `below` what its floors miss in total, `error` the standard error of
    the difference to the best call before it.
    """

    call: int
    anchor: str
    weights: Mapping[str, float]
    repair: TunedRepair | None = None
    scores: DomainScores
    value: float
    below: float = 0.0
    error: float = 0.0
    best: float
    """The best value so far, this call included."""


class PlanSource(Part):
    """The layers `first` … `last` − 1 of a model, under the name that the plan has for it."""

    model: str
    path: str
    first: int = Field(ge=0)
    last: int


class PlanSlice(Part):
    """A run of layers of the result. `base` is the source that task vectors start from.

    `module` is the part of the model that they are layers of, where it has several.
    """

    sources: tuple[PlanSource, ...] = Field(min_length=1)
    base: str | None = None
    module: str | None = None


class TriedUpdate(TunedRepair):
    """A repair that `calibrate:` tried; `anchor` is the factor of the anchor's weights."""

    anchor: float = 1.0
    scores: DomainScores
    mean: float
    error: float = 0.0


class MergePlan(Record):
    """What a merge was made of. A dense merge has this; a repair has more."""

    operator: str
    revision: str | None = None
    """Digest of the function behind an operator of the user's own."""
    preset: str | None = None
    seed: int
    reference: Member | None = None
    experts: Mapping[str, Member] = {}
    settings: Mapping[str, Any] = {}
    capture: Mapping[str, Any] | None = None
    tensors: Mapping[str, Any] = {}
    guided: tuple[TuneCall, ...] = ()
    """The evaluation calls that found the weights."""
    slices: tuple[PlanSlice, ...] = ()
    """What the layers are stacked of; empty if the members are whole models."""
    matched: Mapping[str, Mapping[str, tuple[int, ...]]] = {}
    """By member and mixture, the expert that stands at each place (match_experts)."""
    warnings: tuple[str, ...] = ()


class RepairPlan(MergePlan, Round):
    """Everything that decides the bytes of a repair."""

    anchor: Member
    domains: tuple[str, ...] = ()
    variant: str = "default"
    c_min: float | None = None
    c_max: float | None = None
    views: Mapping[str, tuple[float, ...]] = {}
    conflict: tuple[float, ...] = ()
    capacity: tuple[float, ...] = ()
    coordinates: tuple[int, ...] = ()
    selection: Literal["magnitude", "random"]
    update: Literal["add", "sparse", "replace"]
    scale: float = Field(allow_inf_nan=False)
    drop: float | None = Field(None, ge=0, lt=1)
    scores: ScoreTable | None = None
    later_rounds: tuple[Round, ...] = ()
    candidates: tuple[TriedUpdate, ...] = ()
    claimed: tuple[tuple[int, ...], ...] = ()
    support: tuple[tuple[int, ...], ...] = ()
    admitted_mass: PerLayer = ()
    guard: GuardVerdict | None = None

    @property
    def rounds(self) -> tuple[Round, ...]:
        return (Round(order=self.order, quota=self.quota), *self.later_rounds)


class InputFile(Part):
    member: str
    file: str
    size: int
    sha256: str


class Provenance(Sealed):
    """Which files were read and written, with what, and what that took."""

    inputs: tuple[InputFile, ...] = ()
    outputs: Mapping[str, str] = {}
    """Digests of the files of the result, by their names in the folder."""
    versions: Mapping[str, str] = {}
    job: str = ""
    """Of a dense merge, a digest of all that decided its files."""
    device: str = "cpu"
    engine: str = ""
    bytes_read: int = 0
    bytes_written: int = 0
    blocks_resumed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    wall_seconds: float = 0.0
    peak_memory_bytes: int = 0


class PairedScores(Part):
    """Domain scores on one split: of every expert, of the anchor and of the repaired merge."""

    experts: Mapping[str, DomainScores] = {}
    anchor: DomainScores = {}
    repaired: DomainScores | None = None
    missing: Mapping[str, tuple[str, ...]] = {}
    noise: ScoreNoise | None = None


class RunRecord(Sealed):
    """A whole run: the anchor, its repair, and the scores of both."""

    out: str
    operator: str
    title: str
    anchor: str
    repaired: str
    calibration: PairedScores
    evaluation: PairedScores | None = None
    deficit: DomainScores
    share: DomainScores
    guard: GuardVerdict
    warnings: tuple[str, ...] = ()
    wall_seconds: float
    outputs: Mapping[str, str] = {}
    """Digests of the files of the run, by their names in its folder; the records of a checkpoint
    have those of its own."""


class Winner(Part):
    candidate: int
    settings: Mapping[str, Mapping[str, float]]
    estimates: DomainScores
    estimate: float


class SearchRecord(Sealed):
    """A search: its settings and costs, the winner, and how the best estimate grew.

    `of` names the content of all that was searched: a search of the same may extend this one.
    """

    out: str
    winner: str
    of: Mapping[str, str] = {}
    operator: str
    experts: tuple[str, ...]
    settings: Mapping[str, Any]
    evaluation_calls: int
    ability_runs: int
    labelled_items: Mapping[str, int]
    items_per_call: Mapping[str, int]
    candidates_in_flight: int
    best: Winner
    best_by_generation: tuple[float, ...]
    test: DomainScores
    held_out_error: Mapping[str, Mapping[str, float]]
    replayed: int
    wall_seconds: float
    asked_seconds: float | None = None
    """In which models answered, summed over those side by side; None if another run began it."""
    peak_memory_bytes: int


class Interval(Part):
    """A difference of two means over the same items with its paired bootstrap interval."""

    difference: float
    low: float
    high: float
    level: float = 0.95
    resamples: int
    items: int


class TunedScores(Part):
    """Domain scores of the plain anchor, the tuned merge and every expert on its own domain."""

    plain: DomainScores
    tuned: DomainScores
    gain: Interval | None = None


class TuneRecord(Sealed):
    """A tuning: what it was given, every call, and the winner.

    `of` names the content of all that was tuned: a tuning of the same may extend this one.
    """

    out: str
    winner: str
    of: Mapping[str, str] = {}
    settings: Mapping[str, Any]
    anchors: tuple[str, ...]
    experts: Mapping[str, DomainScores]
    calls: tuple[TuneCall, ...]
    expert_runs: int
    items_per_call: Mapping[str, int]
    stopped: str
    plain: int
    """The call of the best plain anchor."""
    chosen: int
    """The call of the winner."""
    calibration: TunedScores
    evaluation: TunedScores | None = None
    repaired: TunedScores | None = None
    """The best candidate with a repair beside the best without one, on the calibration items; None
    where no repair was tried."""
    replayed: int
    warnings: tuple[str, ...] = ()
    wall_seconds: float
    peak_memory_bytes: int

    @property
    def best(self) -> TuneCall:
        return self.calls[self.chosen]

    def amount(self, value: float) -> tuple[str, float]:
        """What a value of the objective is called where it is shown, and its size."""
        return amount(self.settings["objective"], value)


def read(kind: type[_Record], file: Path, error: type[SigmergeError] = SigmergeError) -> _Record:
    """A record from its file; an error names the keys that cannot be used."""
    return _validated(kind, read_json_object(file, _name(kind), error), file, error)


def read_sealed(kind: type[_Record], file: Path, error: type[SigmergeError]) -> _Record:
    """The same of a record that must be as it was written."""
    if not is_intact(read_json_object(file, _name(kind), error)):
        raise error(f"{file}: is damaged; it is not what was written. Remove it, and run the "
                    "command again that wrote it.")  # fmt: skip
    return read(kind, file, error)


def read_plan(file: Path) -> MergePlan:
    """The plan in a file: a RepairPlan if it claims, else that of a dense merge."""
    content = read_json_object(file, "a plan", RecipeError)
    kind = RepairPlan if "quota" in content else MergePlan
    return _validated(kind, content, file, RecipeError)


def read_repair_plan(file: Path) -> RepairPlan:
    content = read_json_object(file, "the plan of a repair", RecipeError)
    return _validated(RepairPlan, content, file, RecipeError)


def _validated(
    kind: type[_Record], content: dict[str, Any], file: Path, error: type[SigmergeError]
) -> _Record:
    try:
        return kind.model_validate({"schema": None, **content})
    except ValidationError as problem:
        wrong = dict.fromkeys(".".join(map(str, item["loc"][:2])) for item in problem.errors())
        raise error(
            f"{file}: is not {_name(kind)}; these keys cannot be used: {', '.join(wrong)}."
        ) from None


def _name(kind: type[Record]) -> str:
    names = {
        MergePlan: "a plan",
        RepairPlan: "the plan of a repair",
        Provenance: "a provenance record",
        RunRecord: "the record of a run",
        SearchRecord: "the record of a search",
        TuneRecord: "the record of a tuning",
    }
    return names[kind]
