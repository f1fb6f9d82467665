"""Checks for authors of operators: `check_operator(mine)` in a test of yours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sigmerge.errors import SigmergeError
from sigmerge.methods import Method
from sigmerge.objects import merge_state_dicts
from sigmerge.operators.base import Operator, Site, Tile
from sigmerge.operators.plugin import TileOperator

SHAPES = {
    "model.embed_tokens.weight": (40, 12),
    **{f"model.layers.{i}.mlp.up_proj.weight": (24, 12) for i in range(3)},
    **{f"model.layers.{i}.input_layernorm.weight": (12,) for i in range(3)},
    "model.layers.3.mlp.up_proj.weight": (300, 500),
    "model.layers.3.input_layernorm.weight": (12,),
    "lm_head.weight": (40, 12),
}
"""A model with what operators meet: vectors, a tensor of several tiles, tensors outside layers."""
PIECES = (1, 3, 8, 5)
"""Granules of four coordinates that a tensor is cut into, over and over."""


def check_operator(
    operator: Operator | str, /, *, experts: int = 3, **arguments: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """Raise AssertionError where an operator breaks a rule that merges rely on.

    It merges a small model of random values on one thread and on four, twice, with the default
    `arguments` or yours. The results must be finite and the same to the last bit; a function over
    tiles must give each coordinate the same value however its tensor is cut. Returns the merge.

    >>> from sigmerge.testing import check_operator
    >>> merged = check_operator("ties", density=0.5)
    >>> merged["lm_head.weight"].shape
    (40, 12)
    """
    method = Method.of(operator, **arguments)
    reference, tuned = _values(0, 1.0), {}
    for number in range(experts):
        moved = _values(number + 1, 0.05)
        tuned[f"expert_{number}"] = {name: reference[name] + moved[name] for name in reference}
    base = reference if method.made.needs_reference else None

    def merged(threads: int) -> dict[str, np.ndarray[Any, Any]]:
        return merge_state_dicts(base, tuned, method, threads=threads)

    try:
        first = merged(1)
    except SigmergeError as error:
        raise AssertionError(f"{method.operator}: the merge fails: {error}") from error
    for name, values in first.items():
        assert np.isfinite(values).all(), f"{method.operator}: {name} is not finite"
    for threads in (1, 4):
        _same(first, merged(threads), f"{method.operator}: a merge on {threads} threads")
    if isinstance(method.made, TileOperator) and not method.made.whole:
        _check_tiles(method.made, method, reference, tuned)
    return first


def _values(seed: int, scale: float) -> dict[str, np.ndarray[Any, Any]]:
    drawn = np.random.default_rng(seed)
    return {
        name: (scale * drawn.standard_normal(shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def _same(
    one: Mapping[str, np.ndarray[Any, Any]], other: Mapping[str, np.ndarray[Any, Any]], what: str
) -> None:
    for name, values in one.items():
        differing = np.flatnonzero(values.view(np.uint32) != other[name].view(np.uint32))
        assert not differing.size, (
            f"{what} gives other values for the same inputs: {name}, flat index {differing[0]}. "
            "A function must not depend on anything but its tile and site."
        )


def _check_tiles(
    made: TileOperator,
    method: Method,
    reference: Mapping[str, np.ndarray[Any, Any]],
    tuned: Mapping[str, Mapping[str, np.ndarray[Any, Any]]],
) -> None:
    """Call the function on a tensor in one piece and in many."""
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"):
        base = reference[name].reshape(-1) if made.gives_vector else np.float32(0)
        rows = np.stack([each[name].reshape(-1) - base for each in tuned.values()])
        site = Site(
            name, rows.shape[1], 0, 4, tuple(tuned), method.settings(len(tuned)), 0, SHAPES[name]
        )
        whole = _filled(made, site, rows, [rows.shape[1]])
        parts = _filled(made, site, rows, [4 * each for each in PIECES])
        _same({name: whole}, {name: parts}, f"{made.name}: a tensor that is cut into smaller tiles")


def _filled(
    made: TileOperator, site: Site, rows: np.ndarray[Any, Any], sizes: list[int]
) -> np.ndarray[Any, Any]:
    out, start, number = np.empty(rows.shape[1], np.float32), 0, 0
    while start < out.size:
        stop = min(start + sizes[number % len(sizes)], out.size)
        tile = Tile(start, rows[:, start:stop].copy(), out[start:stop])
        made.function(tile, site)
        start, number = stop, number + 1
    return out
