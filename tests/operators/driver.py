"""Runs an operator on arrays in memory, through the engine but without a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sigmerge.engine.stream import Stream, StreamChunk, Workers
from sigmerge.operators.base import Operator, Site
from sigmerge.operators.table import operator

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Array]


class MemorySource:
    def __init__(self, members: Mapping[str, Tensors]) -> None:
        self.members = members

    def fill(self, member: str, tensor: str, start: int, out: Array) -> None:
        out[:] = self.members[member][tensor].ravel()[start : start + out.size]

    def add(
        self,
        member: str,
        tensor: str,
        start: int,
        weight: float,
        out: Array,
        *,
        fresh: bool,
        less: str | None = None,
    ) -> None:
        values, minus = np.empty_like(out), np.zeros_like(out)
        self.fill(member, tensor, start, values)
        if less:
            self.fill(less, tensor, start, minus)
        entries = (values - minus) * np.float32(weight)
        out[:] = entries if fresh else out + entries

    def done(self, tensor: str, start: int, stop: int) -> None:
        pass

    def prefetch(self, tensors: Iterable[str]) -> None:
        pass


def settings_of(chosen: Operator, experts: int, preset: str, given: Mapping[str, Any]) -> Any:
    """Defaults of a preset, overridden; a scalar of a per-model option holds for every expert."""
    settings = {}
    for p in chosen.parameters:
        value = given.get(p.name, getattr(p, preset))
        if p.per_model and not isinstance(value, tuple | list):
            value = [value] * experts
        settings[p.name] = tuple(value) if p.per_model else value
    unknown = set(given) - set(settings)
    assert not unknown, f"no such parameters: {unknown}"
    return settings


def run(
    method: str,
    reference: Tensors,
    experts: Mapping[str, Tensors],
    *,
    on: str | None = None,
    preset: str = "mergekit",
    seed: int = 0,
    threads: int = 1,
    blocks: Mapping[str, int] | None = None,
    statistics: Any = None,
    notes: dict[str, Any] | None = None,
    **given: Any,
) -> dict[str, Array]:
    """The merged tensors, flat float32. `blocks` says which tensors lie in the stack.

    What the operator notes about tensors goes into `notes`.
    """
    chosen = operator(method, on)
    depth = max(blocks.values()) + 1 if blocks else 0
    names = tuple(experts)
    sites = [
        Site(
            name,
            int(values.size),
            (blocks or {}).get(name),
            depth,
            names,
            settings_of(chosen, len(names), preset, given),
            seed,
            values.shape,
            statistics.measured(name) if statistics else "",
            statistics.transposed(name) if statistics else False,
        )
        for name, values in sorted(reference.items())
    ]
    problems = chosen.check(sites)
    assert not problems, problems
    merged = {name: np.zeros(values.size, np.float32) for name, values in reference.items()}
    source = MemorySource({"reference": reference, **experts})

    def visit(chunk: StreamChunk) -> int:
        for tile in chosen.merge(chunk, survey):
            if chosen.gives_vector:
                chunk.add_reference(tile)
            merged[chunk.site.tensor][tile.start : tile.start + tile.out.size] = tile.out
        if notes is not None:
            notes[chunk.site.tensor] = chunk.notes
        return chunk.stop - chunk.start

    with Workers(threads) as workers:
        stream = Stream(
            [[site] for site in sites], source, workers, chosen.granule, statistics=statistics
        )
        survey = stream.survey(chosen.survey(sites))
        for site in sites:
            states = stream.prepare([site], lambda s: chosen.prepare(s, survey))
            stream.visit([site], states, visit)
    return merged


def run_vectors(method: str, vectors: Sequence[Sequence[float]], **given: Any) -> Array:
    """The merged task vector of a worked example: reference zero, one tensor called "t"."""
    rows = [np.array(v, np.float32) for v in vectors]
    experts = {chr(ord("A") + i): {"t": row} for i, row in enumerate(rows)}
    return run(method, {"t": np.zeros(rows[0].size, np.float32)}, experts, **given)["t"]
