"""The steps of a dry run, each with its cost as far as it is known before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from sigmerge.engine.speed import seconds, solving
from sigmerge.messages import size


@dataclass(frozen=True, kw_only=True)
class Step:
    """The cost of one step of a job; each kind of step adds its own facts."""

    name: ClassVar[str]
    bytes_to_read: int = 0
    bytes_to_write: int = 0
    peak_memory_bytes: int = 0
    evaluation_calls: int = 0
    notes: tuple[str, ...] = ()

    def seconds(self, threads: int) -> float | None:
        """Wall seconds as they were measured elsewhere, the inputs in memory; None if not known."""
        return None

    def facts(self) -> dict[str, Any]:
        """Facts of this kind of step besides its cost."""
        cost = {field.name for field in fields(Step)}
        return {name: value for name, value in asdict(self).items() if name not in cost}

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class _Pass(Step):
    """A step that passes over the weights of experts."""

    experts: Mapping[str, str]
    layers: int
    coordinates: int

    def seconds(self, threads: int) -> float | None:
        return seconds(self.name, self.coordinates, len(self.experts), threads)


@dataclass(frozen=True, kw_only=True)
class MergeStep(_Pass):
    name = "merge"
    operator: str
    reference: str | None
    tensors: int
    merged_tensors: int
    settings: Mapping[str, Any]
    exemplars: Mapping[str, int]
    to_capture: tuple[str, ...]
    files: tuple[str, ...]
    operations: float = 0.0
    """Of linear algebra."""
    solved_on: str = "cpu"

    def seconds(self, threads: int) -> float | None:
        if self.solved_on != "cpu":
            return None
        passed = seconds(self.operator, self.coordinates, len(self.experts), threads)
        return passed + solving(self.operations, threads)


@dataclass(frozen=True, kw_only=True)
class ProfileStep(_Pass):
    name = "profile"
    probe_prompts: int


@dataclass(frozen=True, kw_only=True)
class RepairStep(_Pass):
    name = "repair"


@dataclass(frozen=True, kw_only=True)
class ScoreStep(Step):
    name = "score"
    source: str
    split: str
    checkpoints: int


@dataclass(frozen=True, kw_only=True)
class _Aimed(Step):
    """A step whose evaluation calls aim at an objective."""

    experts: tuple[str, ...]
    objective: str
    floors: Mapping[str, float]
    expert_runs: int
    items_per_call: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class TuneStep(_Aimed):
    name = "tune"
    method: str
    anchors: tuple[str, ...]
    to_capture: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GuideStep(_Aimed):
    name = "guide"
    operator: str


@dataclass(frozen=True, kw_only=True)
class SearchStep(Step):
    name = "search"
    operator: str
    experts: tuple[str, ...]
    genes: int
    population: int
    generations: int
    estimator: str
    ability_runs: int
    labelled_items: Mapping[str, int]
    items_per_call: Mapping[str, int]
    candidates_in_flight: int
    memory_per_candidate_bytes: int


@dataclass(frozen=True, kw_only=True)
class CaptureStep(Step):
    name = "capture"
    expert: str
    kind: str
    exemplars: int
    key: str
    folder: str
    state: str


@dataclass(frozen=True, kw_only=True)
class EvaluateStep(Step):
    name = "evaluate"
    checkpoint: str
    suite: str
    split: str
    items: Mapping[str, int]
    items_to_score: int
    tokens_at_most: int | None
    absent: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class TrialStep(Step):
    """Models that are loaded one after another, and what they are asked."""

    name = "try"
    models: Mapping[str, str]
    texts: int
    prompts: int


@dataclass(frozen=True, kw_only=True)
class ProbeStep(Step):
    name = "probe"
    file: str
    prompts: Mapping[str, int]
    seed: int


@dataclass(frozen=True, kw_only=True)
class ExtractStep(Step):
    name = "extract"
    model: str
    base: str
    matrices: int


@dataclass(frozen=True, kw_only=True)
class GatesStep(Step):
    """The rows of a mixture's routers."""

    name = "gates"
    family: str
    experts: int
    mode: str
    prompts: int
    state: str


@dataclass(frozen=True, kw_only=True)
class LaterStep(Step):
    """A recipe that merges what other recipes of its file make."""

    name = "later"
    recipe: str
    merges: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DownloadStep(Step):
    """What of the hub's models is not here yet; no header of it is wrong."""

    name = "download"
    models: Mapping[str, int]
    """Bytes of each: of files that are taken whole, and of single tensors."""
    ranges: tuple[str, ...]
    """Models of which some files are needed in part."""
    unread: int
    """Bytes of their weights that are not needed."""


@dataclass(frozen=True, kw_only=True)
class PushStep(Step):
    """The upload of a finished result."""

    name = "push"
    repository: str
    address: str
    folder: str
    private: bool
    exists: bool


@dataclass(frozen=True, kw_only=True)
class SuiteStep(Step):
    name = "suite"
    pool: str
    runs: int
    experts: int
    anchors: int
    repairs: int
    partitions: int
    baselines: int
    merges: int
    evaluations: Mapping[str, int]
    search_calls: int
    items_at_most: int | None
    tokens_at_most: int | None
    disk_at_once: int


@dataclass(frozen=True, kw_only=True)
class AnchorsStep(Step):
    name = "anchors"
    pool: str
    experts: int
    anchors: tuple[str, ...]
    items_at_most: int | None
    disk_at_once: int


@dataclass(frozen=True, kw_only=True)
class AnalyzeStep(Step):
    name = "analyze"
    runs: int
    split: str
    out: str


@dataclass(frozen=True, kw_only=True)
class TrainStep(Step):
    """Models of a pool that are trained; their weights are counted, activations are not."""

    name = "train"
    models: tuple[str, ...]
    steps: Mapping[str, int]
    parameters: int
    device: str
    notes: tuple[str, ...] = ("memory: the activations of a batch come on top",)


@dataclass(frozen=True)
class Description:
    """What a job would do: its steps in order. Nothing has been read but headers."""

    steps: tuple[Step, ...]
    threads: int

    def as_json(self) -> dict[str, object]:
        """Plain values: the sums, and every step with its facts."""
        sums = ("bytes_to_read", "bytes_to_write", "peak_memory_bytes", "evaluation_calls")
        return {
            **{name: getattr(self, name) for name in sums},
            "threads": self.threads,
            "seconds": self.seconds,
            "steps": [step.as_json() for step in self.steps],
        }

    @property
    def seconds(self) -> float | None:
        """Of the steps whose time can be estimated; None if there are none."""
        known = [s for step in self.steps if (s := step.seconds(self.threads)) is not None]
        return sum(known) if known else None

    def _repr_html_(self) -> str:
        from sigmerge.pages.notebook import tables
        from sigmerge.pages.table import Table, number_columns

        def row(name: str, of: Step | Description) -> tuple[str, ...]:
            numbers = (of.bytes_to_read, of.bytes_to_write, of.peak_memory_bytes)
            return name, *map(size, numbers), f"{of.evaluation_calls:,}"

        head = ("step", "reads", "writes", "memory at most", "evaluation calls")
        each = [row(step.name, step) for step in self.steps]
        notes = [note for step in self.steps for note in step.notes]
        return tables(Table(number_columns(*head), [*each, row("in all", self)]), notes=notes)

    @property
    def bytes_to_read(self) -> int:
        return sum(step.bytes_to_read for step in self.steps)

    @property
    def bytes_to_write(self) -> int:
        return sum(step.bytes_to_write for step in self.steps)

    @property
    def peak_memory_bytes(self) -> int:
        return max((step.peak_memory_bytes for step in self.steps), default=0)

    @property
    def evaluation_calls(self) -> int:
        return sum(step.evaluation_calls for step in self.steps)
