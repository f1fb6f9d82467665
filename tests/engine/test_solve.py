"""Operators that solve for matrices, in torch, as a GPU does, beside the processor's solve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sigmerge.core.algebra import PROCESSOR, ProcessorAlgebra
from sigmerge.engine.gpu import Gpu
from sigmerge.errors import PoolError
from sigmerge.gpu.algebra import TensorAlgebra
from tests.operators.driver import run
from tests.operators.test_features import Measured

TOLERANCE = 1e-6
"""Of the largest weight of a tensor: what docs/results/gpu.md states."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "regmean": ("regmean", {}),
    "regmean, weights": ("regmean", {"weight": [1.5, 0.5, 1.0], "lambda": 1.2}),
    "regmean, jitter": ("regmean", {"condition": 1.0, "singular": "jitter"}),
    "regmean, pinv": ("regmean", {"off_diagonal": 1.0, "rtol": 1e-8}),
    "lot": ("lot", {"rtol": 1e-8}),
    "cat": ("cat", {"rank": 3, "trade_off": 0.4}),
    "cat, renorm": ("cat", {"rank": 2, "trade_off": 0.4, "renorm": True, "lambda": 1.0}),
    "cat, one direction": ("cat", {"rank": 1, "trade_off": 0.4}),
    "cat, Lanczos": ("cat", {"rank": 2, "trade_off": 0.4}),
    "regmean, task vectors": ("regmean", {"gram": "task_vector", "ridge": 0.1}),
    "iso_c": ("iso_c", {"weight": [1.5, 0.5, 1.0]}),
    "iso_cts": ("iso_cts", {"common": 0.7}),
    "tsv": ("tsv", {"weight": [1.5, 0.5, 1.0]}),
    "boost": ("boost", {"beta": 0.3}),
    "wudi": ("wudi", {"steps": 50}),
    "wudi, absolute": ("wudi", {"steps": 50, "step": "absolute", "rate": 1e-3}),
    "knots": ("knots", {"density": 0.4}),
    "knots, dare": ("knots", {"density": 0.4, "inner": "dare"}),
    "pcb": ("pcb", {"density": 0.3}),
}


def solved(case: str, device: Gpu | None, threads: int = 1) -> tuple[Any, Any]:
    """Four weights, one stored the other way round, one with too few tokens, and a norm scale."""
    rng = np.random.default_rng(7)
    shapes = {"q": (40, 24), "v": (20, 24), "down": (24, 64), "turned": (24, 40), "scale": (24,)}
    reference = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    experts, data = {}, {}
    for name in ("math", "coding", "safety"):
        experts[name] = {
            n: v + (0.1 * rng.standard_normal(v.shape)).astype(np.float32)
            for n, v in reference.items()
        }
        x, wide = rng.standard_normal((50, 24)), rng.standard_normal((15, 64))
        data[name] = {n: wide if n == "down" else x for n in shapes}
    kinds = {**dict.fromkeys(shapes, "gram"), "scale": "energy"}
    statistics, notes = Measured(kinds, data, turned={"turned"}), {}
    method, given = CASES[case]
    merged = run(method, reference, experts, statistics=statistics, notes=notes, device=device,
                 threads=threads, blocks=dict.fromkeys(shapes, 0), **given)  # fmt: skip
    return merged, notes


def same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=TOLERANCE * abs(values).max())


def same_notes(found: Any, wanted: Any) -> None:
    for name, notes in wanted.items():
        for key, value in notes.items():
            close = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            assert found[name][key] == close


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU"))],
)  # fmt: skip
def test_the_solve_is_the_processor_s(
    case: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "cat, Lanczos":
        for algebra in (ProcessorAlgebra, TensorAlgebra):
            monkeypatch.setattr(algebra, "dense", 4)
    wanted, noted = solved(case, None)
    gpu, tensors = Gpu(device), []
    solve = gpu.solve
    monkeypatch.setattr(gpu, "solve", lambda t, program: [tensors.append(t), solve(t, program)][1])
    found, there = solved(case, gpu, threads=3)
    same(found, wanted)
    same_notes(there, noted)
    assert sorted(tensors) == ["down", "q", "turned", "v"]


@pytest.mark.parametrize("method", ["regmean", "lot", "cat"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_full_memory_is_emptied_once_then_it_is_an_error(
    method: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first results do not come back, and the same matrices are made once more."""
    fetch, full = TensorAlgebra.array, []

    def short(self: TensorAlgebra, matrix: Any) -> Any:
        if matrix.numel() == 24 * 40 and len(full) < times:
            full.append(matrix)
            raise torch.OutOfMemoryError
        return fetch(self, matrix)

    monkeypatch.setattr(TensorAlgebra, "array", short)
    if times == 2:
        with pytest.raises(PoolError, match="does not hold its matrices in float64"):
            solved(method, Gpu("cpu"))
        return
    found, _ = solved(method, Gpu("cpu"))
    same(found, solved(method, None)[0])
    assert len(full) == 1


def test_a_spectrum_that_the_device_cannot_take_apart_is_lapack_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[int, ...]] = []

    def fails(matrix: Any) -> Any:
        tried.append(tuple(matrix.shape))
        raise torch.linalg.LinAlgError("too many repeated eigenvalues")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    found, _ = solved("lot", Gpu("cpu"))
    assert tried, "no spectrum was asked of the device"
    same(found, solved("lot", None)[0])


@pytest.mark.parametrize("size", [1, 2, 37])
def test_a_triangle_is_the_whole_matrix(size: int) -> None:
    x = np.random.default_rng(size).standard_normal((size + 3, size))
    gram = x.T @ x
    triangle = gram[np.triu_indices(size)]
    algebra = TensorAlgebra(torch.device("cpu"))
    assert np.array_equal(PROCESSOR.symmetric(triangle), np.triu(gram) + np.triu(gram, 1).T)
    assert np.array_equal(algebra.array(algebra.symmetric(triangle)), PROCESSOR.symmetric(triangle))
