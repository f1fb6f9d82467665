"""Cached results of a benchmark's items on a checkpoint: no item is scored twice.

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
"""Extra metric of a judged item: 1 if the judge's output could not be parsed."""


@dataclass(frozen=True)
class Scored:
    """The result of an item: its metrics, the model's output, and the judge, if there was one."""

    scores: dict[str, MetricValue]
    output: Any = None
    judge: str | None = None


def settings_key(settings: Any) -> str:
    """A short digest of plain content."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class KeptAnswers:
    """The results in a cache entry: a part for each item, with the cost of its batch."""

    def __init__(self, entry: GrowingEntry) -> None:
        self._entry = entry

    def read(self, items: Iterable[Item]) -> dict[str, Scored]:
        """The cached results by item id."""
        found = ((item.id, self._record(item)) for item in items)
        return {i: Scored(r["scores"], r["output"], r["judge"]) for i, r in found if r}

    def usage(self, items: Iterable[Item]) -> Usage:
        """The cost of the batches with these results, now or in earlier runs."""
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
