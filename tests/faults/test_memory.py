"""A memory that is full, wherever it is noticed: one line, an exit status, and the work is kept."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedModel

from sigmerge.errors import MemoryFull
from sigmerge.merge3 import scoring
from sigmerge.merge3.scoring import PerThread
from sigmerge.nano.facts import NANO_DOMAINS
from sigmerge.nano.files import POOL
from sigmerge.probing import memory
from sigmerge.probing.generate import HfModel
from tests.command_line import sigmerge
from tests.kept_entries import kept_values
from tests.pools import make_pool

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 98.00 MiB.")
HANDLE = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def failing(real: Any, at: int, error: Exception) -> Any:
    """A function that raises when it is called for the `at`-th time."""
    calls = 0

    def called(*given: Any, **how: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error
        return real(*given, **how)

    return called


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    models = [{"model": str(POOL / name), "name": name} for name in NANO_DOMAINS]
    content = {
        "merge_method": "linear", "base_model": str(POOL / "reference"), "models": models,
        "dtype": "bfloat16",
        "search": {"population": 2, "calls": 4, "items": 2, "estimator": "mean", "suite": "nano"},
        "repair": {"evaluate": {"suite": "nano", "limit": 2}},
    }  # fmt: skip
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("verb", "flags", "error"),
    [("search", [], HANDLE), ("tune", ["--calls", "5", "--anchor", "linear"], FULL)],
)
def test_a_candidate_that_finds_no_room_costs_nothing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, flags: list[str],
    error: Exception,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(scoring, "_load", failing(scoring._load, 4, error))
        ran = sigmerge(verb, recipe, out, "--threads", "1", *flags)
    assert ran.code == 7, ran
    said = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "fault of sigmerge" not in ran.err and "Traceback" not in ran.err
    assert "a candidate: the memory of the GPU is full" in said[0]
    assert said[0].endswith("What is done is kept: the same command goes on.")
    kinds = ("search", "score", "candidate")
    before = [value for kind in kinds for value in kept_values(kind)]
    assert sigmerge(verb, recipe, out, "--threads", "1", *flags).code == 0
    after = [value for kind in kinds for value in kept_values(kind)]
    assert 0 < len(before) < len(after) and all(value in after for value in before)


@pytest.mark.usefixtures("own_cache")
def test_a_model_that_finds_no_room_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedModel, "to", failing(PreTrainedModel.to, 1, FULL))
    words = ["--suite", "nano", "--limit", "1"]
    ran = sigmerge("evaluate", POOL / "math", *words)
    assert ran.code == 7
    [line] = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {POOL / 'math'} cannot be loaded for evaluation: the memory of")


def test_a_full_machine_is_no_full_gpu() -> None:
    """torch has no class of error for it."""
    said = r"the memory is full; .* are free\. End what holds it"
    with pytest.raises(MemoryFull, match=said), memory.in_memory("here"):
        torch.empty(1 << 60, dtype=torch.int8)


def test_a_full_memory_of_python_has_the_same_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sigmerge.jobs.evaluate.evaluate", failing(None, 1, MemoryError()))
    ran = sigmerge("evaluate", POOL / "math", "--suite", "nano")
    assert (ran.code, ran.err.count("\n")) == (7, 1)
    assert ran.err.startswith("error: Out of memory. Fewer --threads need less")


def test_a_system_that_starts_no_thread_is_no_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `ulimit -v` and `ulimit -u`."""
    pool = make_pool(tmp_path / "pool", layers=1)
    recipe = pool.write(pool.recipe("linear"))

    def refusing(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refusing)
    ran = sigmerge("merge", recipe, tmp_path / "out", "--threads", "2")
    assert ran.code == 7, ran.err
    assert ran.err.startswith("error: the system lets this process start no further thread")


def test_what_no_place_expects_is_no_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmerge.jobs.evaluate.evaluate", failing(None, 1, HANDLE))
    ran = sigmerge("evaluate", POOL / "math", "--suite", "nano")
    assert (ran.code, ran.err.count("\n")) == (7, 1)
    assert ran.err.startswith("error: sigmerge evaluate: the memory of the GPU is full. Wait")


def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch as on a GPU of 100 GB, of which others hold 95 and this process 4."""
    emptied: list[str] = []
    for name, value in {
        "is_initialized": True, "mem_get_info": (10**9, 10**11), "memory_reserved": 4 * 10**9,
        "memory_allocated": 10**9,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("emptied"))
    return emptied


def test_on_a_gpu_the_error_says_who_holds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied = gpu(monkeypatch)
    model, tries = SimpleNamespace(batch_size=1, name="merged"), []

    def work() -> None:
        tries.append(len(emptied))
        raise FULL

    with pytest.raises(MemoryFull) as raised:
        HfModel.halving(model, work)  # type: ignore[arg-type]
    assert tries == [0, 1]  # what torch keeps is given back before the second try
    said = str(raised.value)
    assert said.startswith("merged: not even one item fits: the memory of the GPU is full")
    assert "of 100.00 GB, 1.00 GB are free, this process holds 4.00 GB" in said
    assert "other processes and CUDA 95.00 GB" in said
    assert memory.free_now("cuda") == 4 * 10**9


@pytest.mark.usefixtures("own_cache")
def test_a_benchmark_gives_back_what_torch_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied = gpu(monkeypatch)
    words = ["--suite", "nano", "--limit", "1"]
    assert sigmerge("evaluate", POOL / "math", *words).code == 0
    assert len(emptied) == 5


@pytest.mark.parametrize("shared", [True, False])
def test_threads_share_one_model_on_a_gpu(shared: bool) -> None:
    made: list[object] = []
    at_once, most = threading.Semaphore(3 if not shared else 1), threading.Barrier(3)

    def make() -> object:
        made.append(object())
        return made[-1]

    lender, problems = PerThread(make, lambda: shared), []

    def work() -> None:
        most.wait()
        for _ in range(3):
            with lender.lent():
                if not at_once.acquire(blocking=False):
                    problems.append("two at once")
                at_once.release()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == (1 if shared else 3) and not problems
