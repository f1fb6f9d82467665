"""What the items of a benchmark got on a checkpoint, kept so that nothing is scored twice.

Results of one benchmark on one checkpoint are an entry of the cache that grows (`sigmerge.kept`).
They come in batches; a batch is written whole or not at all, also when the process is killed.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from sigmerge.evaluation.sources import Item
from sigmerge.kept import GrowingEntry
from sigmerge.probing.generate import Usage

MetricValue = float | list[float]
"""A metric of an item; a list is pooled with the lists of other items."""
UNPARSED = "unparsed"
"""Beside the metrics of a judged item: 1 where the judge could not be understood."""


@dataclass(frozen=True)
class Scored:
    """What an item got: its metrics, the output of the model, and the judge, if there was one."""

    scores: dict[str, MetricValue]
    output: Any = None
    judge: str | None = None


def settings_key(settings: Any) -> str:
    """A short name for plain content."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class KeptAnswers:
    """The results in an entry: a part for each item, with the cost of the batch it came in."""

    def __init__(self, entry: GrowingEntry) -> None:
        self._entry = entry

    def read(self, items: Iterable[Item]) -> dict[str, Scored]:
        """The results that are there, by the item's id."""
        found = ((item.id, self._record(item)) for item in items)
        return {i: Scored(r["scores"], r["output"], r["judge"]) for i, r in found if r}

    def usage(self, items: Iterable[Item]) -> Usage:
        """What the batches that hold these results cost, whenever they were scored."""
        found = (self._record(item) for item in items)
        batches = {record["batch"]: record["usage"] for record in found if record}
        return sum((Usage(**usage) for usage in batches.values()), Usage())

    def write(self, results: Iterable[tuple[Item, Scored]], usage: Usage) -> None:
        """Add a batch of results."""
        batch = {"batch": uuid.uuid4().hex, "usage": asdict(usage)}
        rows = {_part(item): {**asdict(scored), **batch} for item, scored in results}
        self._entry.put(json.loads(json.dumps(rows, default=str)))

    def _record(self, item: Item) -> Any:
        return self._entry.records.get(_part(item))


def _part(item: Item) -> str:
    return f"{item.digest} {item.id}"
