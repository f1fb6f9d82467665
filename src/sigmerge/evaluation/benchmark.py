"""What every harness brings for a benchmark: its section of a suite and how it is measured.

`Benchmark` is the section that all harnesses share. A harness extends it with its own keys and
overrides what it does otherwise: `load` (records), `check` (what a record must have), `scored_by`
(what decides a result), `cost` (an estimate of an item) and `scorer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import Field, field_validator, model_validator

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.errors import ScoreError
from sigmerge.evaluation.answers import Scored
from sigmerge.evaluation.costs import ItemCost
from sigmerge.evaluation.how import How
from sigmerge.evaluation.scored_by import ScoredBy
from sigmerge.evaluation.sources import WHOLE, Data, File, Hub, Item, StrictSection, find_rows
from sigmerge.probing.generate import LoadedModel, Usage

_T = TypeVar("_T")
ITEMS_AT_ONCE = 64
"""Items that are scored together unless a harness says otherwise."""


class HarnessScorer(Protocol):
    """The one interface of all harnesses: items in, a result for each and the cost out."""

    def score(self, items: Sequence[Item]) -> tuple[dict[str, Scored], Usage]:
        """Results by item id."""


class Asked(Protocol):
    """The checkpoint that is evaluated, as harnesses see it."""

    how: How

    @property
    def shown(self) -> Path:
        """A folder of links to the declared files of the checkpoint, and nothing else."""

    def show(self, checkpoint: Checkpoint) -> Path:
        """The same for another checkpoint, such as a judge, whose files `scored_by` declares."""

    @property
    def suite_folder(self) -> Path:
        """The folder of the suite file."""

    @property
    def model(self) -> LoadedModel:
        """The checkpoint, loaded when it is first needed."""

    @property
    def gpu_share(self) -> float:
        """The part of a GPU's memory that one model may take."""

    def once(self, name: str, make: Callable[[], _T]) -> _T:
        """A value that the benchmarks of an evaluation share, for example a judge; made once."""


class Metric(StrictSection):
    """A number per item, by the harness's own name, and which way is better."""

    key: str
    better: Literal["higher", "lower"] = "higher"


class Benchmark(StrictSection):
    """What all harnesses share. `{language}` in a string stands for each of `languages` in turn.

    `records` is the count of the complete benchmark. `keep` drops records whose columns do not
    have these values, `present` those where one of these columns is null.
    """

    group: ClassVar[int | None] = ITEMS_AT_ONCE
    """Items that are scored and stored together; None: all of them."""
    in_memory: ClassVar[bool] = True
    """Whether a model in memory can be scored."""
    shares_state: ClassVar[bool] = False
    """Whether only one thread at a time may score."""
    own_splits: ClassVar[bool] = False
    """Whether the records bring their splits."""
    timed: ClassVar[bool] = True
    """Whether a few items are timed first; False if that takes longer than the rest."""
    answers: ClassVar[bool] = True
    """Whether a model that a backend loads gives the answers."""
    weights: ClassVar[str] = "auto"
    """The type of the weights that the harness is defined for."""
    sources: ClassVar[frozenset[str]] = frozenset(
        {"files", "hub", "records", "languages", "keep", "present"}
    )
    """Keys that say where records come from. Results are stored by the records' content instead."""

    harness: str
    metrics: dict[str, Metric] = Field(min_length=1)
    files: list[File] = Field(default_factory=list)
    hub: Hub | None = None
    languages: list[str] = Field(default_factory=list)
    records: int | None = None
    keep: dict[str, str] = Field(default_factory=dict)
    present: list[str] = Field(default_factory=list)

    @field_validator("metrics", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: {"key": m} if isinstance(m, str) else m for name, m in value.items()}

    @field_validator("files", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list):
            return value
        return [{"path": file} if isinstance(file, str) else file for file in value]

    @model_validator(mode="after")
    def _known_metrics(self) -> Benchmark:
        for name, metric in self.metrics.items():
            if problem := self.metric_problem(metric.key):
                raise ValueError(f"metrics.{name}: {metric.key!r} {problem}")
        return self

    def metric_problem(self, key: str) -> str | None:
        """Why the harness has no such metric; None if it has, or only scoring can tell."""
        return None

    @property
    def score(self) -> str:
        """The metric that counts: the first."""
        return next(iter(self.metrics))

    @property
    def columns(self) -> list[str]:
        """The columns that a record must have."""
        return []

    def load(self, name: str, data: Data, suite_folder: Path) -> list[Item]:
        """All records, parts in the suite's order; NoSource if one part is missing."""
        items = self.load_records(name, data, suite_folder)
        self.check(name, items)
        return items

    def load_records(self, name: str, data: Data, suite_folder: Path) -> list[Item]:
        """The records as their source has them, not checked yet."""
        items: list[Item] = []
        for part in self.languages or [WHOLE]:
            kept = [row for row in self.rows(name, part, data, suite_folder) if self._kept(row)]
            columns = {column: None for row in kept for column in row}
            items += [Item(part, i, {**columns, **row}) for i, row in enumerate(kept)]
        if not items:
            raise ScoreError(f"{name}: its source holds no record that is kept.")
        return items

    def rows(self, name: str, part: str, data: Data, suite_folder: Path) -> list[dict[str, Any]]:
        """The raw records of a part."""
        return find_rows(name, self.files, self.hub, part, data, suite_folder)

    def _kept(self, row: dict[str, Any]) -> bool:
        if any(row.get(column) is None for column in self.present):
            return False
        return all(row.get(column) == value for column, value in self.keep.items())

    def check(self, name: str, items: Sequence[Item]) -> None:
        """Raise ScoreError if a record lacks what the benchmark needs."""
        columns = self.columns
        for item in items:
            if lacking := [column for column in columns if item.record.get(column) is None]:
                known = ", ".join(column for column, v in item.record.items() if v is not None)
                raise ScoreError(
                    f"{name}: the record {item.id} has no {lacking[0]!r}; it has {known}."
                )

    def check_settings(self, how: How) -> None:
        """Raise an error if `how` cannot be used; called before any record is read."""

    def unscored(self, how: How) -> str | None:
        """The reason why it cannot be scored with `how`; it then counts as one without data."""
        return None

    def permit(self, name: str, items: Sequence[Item], how: How) -> None:
        """Raise an error if these items may not be scored; called before any is."""

    def scored_by(self, name: str, suite_folder: Path, how: How) -> ScoredBy:
        """What decides a result besides checkpoint, section, item and the backend."""
        return ScoredBy()

    def cost(self, item: Item) -> ItemCost | None:
        """The maximum cost of an item; None if no model is called here."""
        return None

    def scorer(self, name: str, asked: Asked, items: Sequence[Item], folder: Path) -> HarnessScorer:
        """A scorer of these items; `folder` is a temporary place."""
        raise NotImplementedError
