"""The emulation of mergekit's arithmetic beside mergekit's own methods, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sigmerge.jobs.emulated import Emulated
from sigmerge.operators.table import MERGEKIT

THREE = {"weight": (0.7, 0.4, 1.1)}
DENSE = {"density": (0.2, 0.5, 0.85)}
CASES: dict[str, list[dict[str, Any]]] = {
    "linear": [THREE, {**THREE, "normalize": False}],
    "task_arithmetic": [THREE, {**THREE, "normalize": True, "lambda": 0.6}],
    "ties": [{**THREE, **DENSE}, {**THREE, **DENSE, "normalize": False, "rescale": True}],
    "dare_linear": [{**THREE, **DENSE}, {**THREE, **DENSE, "rescale": False}],
    "dare_ties": [{**THREE, **DENSE}],
    "della": [{**THREE, "density": 0.6, "epsilon": 0.2}],
    "della_linear": [{**THREE, "density": 0.5, "lambda": 1.2}],
    "breadcrumbs": [{**THREE, **DENSE, "gamma": (0.01, 0.1, 0.02)}],
    "breadcrumbs_ties": [{**THREE, **DENSE, "gamma": 0.02, "rescale": True}],
    "model_stock": [{}, {"filter_wise": True}],
    "sce": [{}, {"select_topk": 0.5}],
    "slerp": [{"t": 0.3}],
    "nuslerp": [{"weight": (0.7, 0.3)}, {"weight": (0.7, 0.3), "nuslerp_flatten": False},
                {"weight": (1, 3), "nuslerp_flatten": False, "nuslerp_row_wise": True}],
    "multislerp": [THREE, {**THREE, "normalize_weights": False}],
    "karcher": [{}, {"max_iter": 3}],
    "arcee_fusion": [{}],
    "nearswap": [{"t": 0.01}],
    "ram": [{"epsilon": 0.01}],
    "ramplus_tl": [{"epsilon": 0.01, "r": 0.3, "alpha": 0.4}],
    "passthrough": [{}, {"scale": (0.7,)}],
}  # fmt: skip
COUNTS = {"slerp": 1, "nuslerp": 2, "arcee_fusion": 1, "nearswap": 1, "passthrough": 1}
BASELESS = ("linear", "karcher", "passthrough")
ON = {
    "ties": {"normalize": True}, "della": {"normalize": True, "rescale": "l1"},
    "dare_linear": {"rescale": "l1"}, "dare_ties": {"rescale": "l1"},
    "della_linear": {"rescale": "l1"},
}  # fmt: skip
"""Defaults of methods, which a site's settings always have."""


def test_every_method_of_mergekits_is_here() -> None:
    assert set(CASES) == set(MERGEKIT)


def inputs(method: str, kind: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(5)
    base = torch.randn(shape)
    experts = [base + 0.05 * torch.randn(shape) for _ in range(COUNTS.get(method, 3))]
    return [tensor.to(kind) for tensor in (base, *experts)]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("method", "number"), [(m, n) for m, cases in CASES.items() for n in range(len(cases))]
)
def test_a_method(method: str, number: int, kind: torch.dtype) -> None:
    theirs = pytest.importorskip("mergekit.merge_methods.api")
    given = CASES[method][number]
    for shape in ((24, 40), (40,)):
        tensors = inputs(method, kind, shape)
        if method in BASELESS:
            tensors = tensors[1:]
        based = method not in BASELESS
        ids = ["base", "a", "b", "c"][not based :][: len(tensors)]
        listed = ids[1:] if based else ids
        named = {
            k: dict(zip(listed, v, strict=True)) if isinstance(v, tuple) else v
            for k, v in given.items()
        }
        torch.manual_seed(11)
        expected = theirs.merge_tensors(
            tensors, method, parameters=named, ids=ids, base_index=0 if based else None
        )
        torch.manual_seed(11)
        found = Emulated(
            method, tensors[0] if based else None, tensors[based:], ON.get(method, {}) | given
        ).merged()
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", ["nuslerp", "multislerp"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_method_without_its_base(method: str, kind: torch.dtype) -> None:
    theirs = pytest.importorskip("mergekit.merge_methods.api")
    _, *tensors = inputs(method, kind, (24, 40))
    weights = (0.7, 0.3, 0.2)[: len(tensors)]
    expected = theirs.merge_tensors(tensors, method, parameters={"weight": weights})
    found = Emulated(method, None, tensors, {"weight": weights}).merged()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
