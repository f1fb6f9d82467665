"""A rough cost before an evaluation starts: tokens counted from the texts, time from a few items.

How much a model will write is not known beforehand, so the time is a range: from a tenth of the
longest answers to all of them at their longest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sigmerge.evaluation.costs import Speed
from sigmerge.evaluation.sources import Item
from sigmerge.evaluation.suite import BenchmarkSuite
from sigmerge.probing.generate import LoadedModel, Sampling

TIMED_ITEMS, TIMED_TOKENS = 4, 12
"""Items that are timed, and the tokens written for each."""
SHORTEST = 0.1
"""The part of the longest answer that the lower end of the range assumes."""


def timed(model: LoadedModel, items: Sequence[Item]) -> Speed:
    """The model's speed on the texts of a few items."""
    texts = [json.dumps(item.record, ensure_ascii=False, default=str)[:1000] for item in items]
    model.generate(texts[:1], Sampling(1))  # the first call also warms up

    def run(some: Sequence[str], length: int) -> tuple[float, int, int]:
        start = time.perf_counter()
        _, usage = model.generate(some, Sampling(length))
        seconds = time.perf_counter() - start
        return seconds, usage.prompt_tokens, usage.generated_tokens // len(some)

    def step(some: Sequence[str], reading: float) -> float:
        seconds, _, written = run(some, TIMED_TOKENS)
        return max(0.0, seconds - reading) / (written - 1) if written > 1 else reading

    alone, _, _ = run(texts[:1], 1)
    reading, tokens, _ = run(texts, 1)
    return Speed(reading / tokens, step(texts[:1], alone), step(texts, reading), len(texts))


def estimate(
    suite: BenchmarkSuite,
    chosen: Mapping[str, Sequence[Item]],
    missing: Mapping[str, Sequence[Item]],
    load: Callable[[], LoadedModel] | None,
) -> dict[str, Any]:
    """Items, tokens at most and, where a model has to answer, the range of seconds.

    Without `load` nothing is timed.
    """
    counted = {
        name: [(found, item) for item in items
               if (found := suite.benchmarks[name].cost(item)) is not None]
        for name, items in missing.items()
    }  # fmt: skip
    pairs = [pair for name in missing if suite.benchmarks[name].timed for pair in counted[name]]
    result: dict[str, Any] = {
        "items": sum(map(len, chosen.values())),
        "items_to_score": sum(map(len, missing.values())),
        "tokens_at_most": round(
            sum(c.read + c.answers * c.longest for each in counted.values() for c, _ in each)
        ),
        "seconds": None,
    }
    if pairs and load is not None:
        model, some = (
            load(),
            [item for _, item in pairs[:: max(1, len(pairs) // TIMED_ITEMS)]][:TIMED_ITEMS],
        )
        speed, batch = timed(model, some), min(len(pairs), getattr(model, "batch_size", 64))
        result["seconds"] = [
            round(sum(c.time(speed, batch, part) for c, _ in pairs), 1) for part in (SHORTEST, 1.0)
        ]
    return result
