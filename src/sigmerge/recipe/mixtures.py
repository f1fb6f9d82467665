"""Mixtures of experts: what mergekit 0.1.5, with transformers 5, merges in other tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.files.yaml_documents import Place
from sigmerge.operators.table import MERGEKIT
from sigmerge.recipe.settings import matches

ENTRY_BY_ENTRY = ("linear", "task_arithmetic", "nearswap", "ram", "passthrough")
"""Methods whose result is the same however a tensor is cut."""
WITH_DENSE_LAYERS = ("glm4_moe", "qwen3_moe")
"""Mixtures whose experts mergekit finds although some layers have none."""
APART = "afmoe"
"""The mixture whose experts mergekit merges as they are stored."""

_EXPERT = re.compile(r"\.experts\.\d+\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight$")
_STACKED_IN = {"w2": "down_proj", "down_proj": "down_proj"}
"""What an expert's matrix is stacked in; all others are in gate_up_proj."""


def experts_apart(
    method: str, members: Sequence[Checkpoint], data: Mapping[str, Any]
) -> Iterator[tuple[Place, str]]:
    """Experts of a mixture that are stored one by one, which mergekit stacks layer by layer."""
    mixture = next((m for m in members if any(map(_EXPERT.search, m.tensors))), None)
    if mixture is None or method not in MERGEKIT or mixture.config.get("model_type") == APART:
        return
    if _some_layers_are_dense(mixture):
        yield (
            ("merge_method",),
            "the experts are merged as all else; mergekit, where a layer has none, writes none",
        )
    elif method not in ENTRY_BY_ENTRY:
        yield (
            ("merge_method",),
            "every expert's matrix is merged by itself, with its own thresholds, angles and norms; "
            "mergekit stacks those of a layer, and merges them as one tensor",
        )
    for place, part in _filters((), data):
        other = (
            name for name in mixture.tensors if matches(part, name) != (part in _stacked(name))
        )
        if name := next(other, None):
            yield (
                place,
                f"{part} is sought in the names that are stored; {name} is {_stacked(name)} in "
                "mergekit",
            )


def _some_layers_are_dense(mixture: Checkpoint) -> bool:
    """Whether there are layers without experts, so that mergekit does not find those of others."""
    sparse = {mixture.stack.block_of(name) for name in filter(_EXPERT.search, mixture.tensors)}
    known = mixture.config.get("model_type") in WITH_DENSE_LAYERS
    return len(sparse) < mixture.stack.depth and not known


def _stacked(name: str) -> str:
    """The name of the tensor that mergekit merges a stored one in, which is transformers' own."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return _EXPERT.sub(lambda m: f".experts.{_STACKED_IN.get(m[1], 'gate_up_proj')}", name)


def _filters(place: Place, node: Any) -> Iterator[tuple[Place, str]]:
    """The parts of names that parameters are given for."""
    inner = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in inner:
        if key == "filter" and isinstance(value, str) and value != "*":
            yield (*place, key), value
        elif isinstance(value, dict | list):
            yield from _filters((*place, key), value)
