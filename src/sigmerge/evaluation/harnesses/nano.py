"""The items of a nano pool: greedy answers, exact match, in float32."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from sigmerge.errors import PoolError, ScoreError
from sigmerge.evaluation.answers import Scored
from sigmerge.evaluation.benchmark import Asked, Benchmark, HarnessScorer, Metric
from sigmerge.evaluation.costs import ItemCost
from sigmerge.evaluation.sources import Data, Item
from sigmerge.files.documents import parse_json_lines, read_bytes
from sigmerge.nano.facts import LONGEST_ANSWER, Fact
from sigmerge.nano.files import NANO_SPLITS, POOL, split_file
from sigmerge.probing.generate import HfModel, LoadedModel, Usage
from sigmerge.probing.threads import one_torch_thread


def items_of(file: Path, split: str) -> tuple[Item, ...]:
    """The items in a file of facts."""
    return _parsed(file, split, read_bytes(file, "a file of JSON lines", PoolError))


@lru_cache(maxsize=32)
def _parsed(file: Path, split: str, content: bytes) -> tuple[Item, ...]:
    """The same bytes give the same items: a search reads them before each candidate."""
    records = (record for _, record in parse_json_lines(content, str(file), PoolError))
    return tuple(Item(split, i, vars(Fact(**each)), split) for i, each in enumerate(records))


class Nano(Benchmark):
    """A domain of the embedded pool, or of the pool in the folder `pool`."""

    group: ClassVar[int | None] = None
    own_splits: ClassVar[bool] = True
    timed: ClassVar[bool] = False
    weights: ClassVar[str] = "float32"
    sources: ClassVar[frozenset[str]] = Benchmark.sources | {"pool"}

    harness: Literal["nano"]
    domain: str
    pool: str | None = None
    metrics: dict[str, Metric] = Field({"correct": Metric(key="correct")}, min_length=1)

    def metric_problem(self, key: str) -> str | None:
        return None if key == "correct" else "is no metric of the pool; there is correct"

    def load_records(self, name: str, data: Data, suite_folder: Path) -> list[Item]:
        pool = suite_folder / Path(self.pool).expanduser() if self.pool else POOL
        try:
            files = {split: split_file(split, self.domain, pool) for split in NANO_SPLITS}
            return [item for split, file in files.items() for item in items_of(file, split)]
        except (OSError, ValueError, TypeError) as error:
            raise ScoreError(f"{name}: {pool} is no nano pool ({error}).") from None

    def cost(self, item: Item) -> ItemCost:
        """A token is a word; one more begins the prompt, and one ends the answer."""
        return ItemCost(len(item.record["prompt"].split()) + 1, longest=LONGEST_ANSWER + 1)

    def scorer(self, name: str, asked: Asked, items: Sequence[Item], folder: Path) -> HarnessScorer:
        return NanoScorer(self, asked.model)


@dataclass(frozen=True)
class NanoScorer:
    """Prompts of equal length in one batch, without padding; right is the exact answer."""

    mark: Nano
    model: LoadedModel

    def score(self, items: Sequence[Item]) -> tuple[dict[str, Scored], Usage]:
        from sigmerge.nano.suite import answer

        if not isinstance(self.model, HfModel):
            raise ScoreError("The nano suite is scored by transformers; use --backend hf.")
        start = time.perf_counter()
        prompts = [item.record["prompt"] for item in items]
        tokenizer = self.model.tokenizer
        with one_torch_thread():
            outputs = answer(self.model.model, tokenizer, prompts)
        key = self.mark.metrics[self.mark.score].key
        results = {
            item.id: Scored({key: float(output == item.record["answer"])}, output)
            for item, output in zip(items, outputs, strict=True)
        }
        read, written = (
            sum(map(len, tokenizer(texts)["input_ids"])) for texts in (prompts, outputs)
        )
        return results, Usage(1, read, written, time.perf_counter() - start)
