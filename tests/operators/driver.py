"""Runs an operator on arrays in memory, through the engine but without a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sigmerge.core.dtypes import Span
from sigmerge.engine.stream import Stream
from sigmerge.engine.workers import Workers
from sigmerge.operators.base import Operator, Site
from sigmerge.operators.table import operator

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Array]


class MemorySource:
    allow_nonfinite = False
    in_files = True

    def __init__(self, members: Mapping[str, Tensors]) -> None:
        self.members = {
            name: {
                tensor: np.ascontiguousarray(v, np.float32).ravel() for tensor, v in tensors.items()
            }
            for name, tensors in members.items()
        }

    def piece(self, member: str, tensor: str, start: int, stop: int) -> Span:
        return self.raw(member, tensor).part(start, stop)

    def raw(self, member: str, tensor: str) -> Span:
        return Span.of(self.members[member][tensor])

    def not_finite(self, members: Sequence[str], tensor: str, start: int, stop: int) -> None:
        raise ArithmeticError(f"{tensor} is not finite")

    def done(self, tensor: str, start: int, stop: int, read: float = 1.0) -> None:
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
    on: str | Sequence[str] | None = None,
    preset: str = "mergekit",
    seed: int = 0,
    threads: int = 1,
    blocks: Mapping[str, int] | None = None,
    statistics: Any = None,
    device: Any = None,
    notes: dict[str, Any] | None = None,
    **given: Any,
) -> dict[str, Array]:
    """The merged tensors, flat float32. `blocks` says which tensors lie in the stack.

    What the operator notes about tensors goes into `notes`.
    """
    chosen = operator(method, on).with_parameters(given)
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

    def write(tensor: str, start: int, raw: Array) -> None:
        merged[tensor][start : start + raw.size] = raw

    with Workers(threads) as workers:
        blocks = [[site] for site in sites]
        how = (chosen.granule, statistics, device, chosen.ends_anywhere)
        stream = Stream(blocks, source, workers, *how)
        survey = stream.survey(chosen.survey(sites))
        dtypes = dict.fromkeys(reference, "F32")
        for noted in stream.merge(chosen, blocks, survey, dtypes, write):
            if notes is not None:
                notes |= noted
    return merged


def run_vectors(method: str, vectors: Sequence[Sequence[float]], **given: Any) -> Array:
    """The merged task vector of a worked example: reference zero, one tensor called "t"."""
    rows = [np.array(v, np.float32) for v in vectors]
    experts = {chr(ord("A") + i): {"t": row} for i, row in enumerate(rows)}
    return run(method, {"t": np.zeros(rows[0].size, np.float32)}, experts, **given)["t"]
