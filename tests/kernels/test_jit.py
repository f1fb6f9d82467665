"""Compiled kernels are kept on disk and called without numba: jit.py, entries.py, compiler.py."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba.core import codegen

import sigmerge
from sigmerge.kernels import Array, compiler, entries, select
from sigmerge.kernels.convert import narrow_bf16, widen
from sigmerge.kernels.jit import External, Kernel, brief, kernel
from sigmerge.kernels.raw import lowest_bit
from tests.pools import make_pool


class Nested(NamedTuple):
    values: Array
    pair: tuple[int, float]


def total() -> Any:
    """A kernel that no one has called."""

    @kernel
    def total(values: Array) -> float:
        found = 0.0
        for i in range(values.size):
            found += values[i]
        return found

    return total


def plus(constant: int) -> Any:
    @kernel
    def plus(value: int) -> int:
        return value + constant

    return plus


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where code is kept, with nothing in it."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return next(entries._folders())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The symbols that are compiled during a test."""
    real, seen = compiler.compiled, []

    def compiled(function: Any, arguments: Any, symbol: str) -> Any:
        seen.append(symbol)
        return real(function, arguments, symbol)

    monkeypatch.setattr(compiler, "compiled", compiled)
    return seen


def test_code_is_compiled_once_and_then_loaded(folder: Path, made: list[str]) -> None:
    for _ in range(2):
        assert total()(np.arange(4.0)) == 6
    assert [file.name for file in folder.iterdir()] == made and len(made) == 1


@pytest.mark.parametrize("harm", [
    lambda data: b"",
    lambda data: data[:-1],
    lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
])  # fmt: skip
def test_damaged_code_is_made_again(harm: Any, folder: Path, made: list[str]) -> None:
    total()(np.arange(4.0))
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(harm(whole))
    assert total()(np.arange(4.0)) == 6
    assert len(made) == 2 and file.read_bytes() == whole


def test_code_under_the_name_of_other_code_is_made_again(folder: Path, made: list[str]) -> None:
    """It would be called at an address where there is none."""
    plus(1)(1), plus(2)(1)
    one, other = sorted(folder.iterdir())
    one.write_bytes(other.read_bytes())
    assert [plus(1)(1), plus(2)(1)] == [2, 3]
    assert len(made) == 3


@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
@pytest.mark.parametrize("at", [-1, 40, 200])
def test_damaged_code_of_numbas_own_is_made_again(
    ending: str, at: int, folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of kernels lie there, and go into code that has a digest of its own."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(folder.parent))
    total()(np.arange(4.0))
    (kept,) = folder.iterdir()
    kept.unlink()
    (file,) = (each for each in folder.parent.rglob(f"*{ending}") if "total" in each.name)
    whole = file.read_bytes()
    damaged = whole[:at] + bytes([whole[at] ^ 1]) + whole[at:][1:]
    file.write_bytes(damaged)
    assert total()(np.arange(4.0)) == 6
    assert len(made) == 2 and file.read_bytes() != damaged


def test_other_constants_have_other_code(folder: Path, made: list[str]) -> None:
    for _ in range(2):
        assert [plus(constant)(1) for constant in (1, 2)] == [2, 3]
    assert len(set(made)) == len(made) == 2


def test_threads_that_call_a_kernel_first_compile_it_once(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "kept", lambda symbol, stamp: None)
    fresh, barrier = total(), threading.Barrier(8)

    def call(number: int) -> float:
        barrier.wait()
        return float(fresh(np.full(3, float(number))))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(8))) == [3.0 * number for number in range(8)]
    assert len(made) == 1


def test_another_processor_has_other_code(
    folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    total()(np.arange(4.0))
    monkeypatch.setattr(entries, "_processor", lambda: ("another",))
    total()(np.arange(4.0))
    assert len(set(made)) == 2


@pytest.mark.parametrize("name", ["numba", "llvmlite"])
def test_another_compiler_compiles_again(
    name: str, folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    total()(np.arange(4.0))
    real = entries.version
    monkeypatch.setattr(entries, "version", lambda one: "0" if one == name else real(one))
    forget()
    total()(np.arange(4.0))
    monkeypatch.undo()
    forget()
    assert len(made) == 2 and len(set(made)) == 1


def forget() -> None:
    entries.stamp.cache_clear()
    entries._common.cache_clear()


def test_what_numba_is_told_is_part_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = entries._processor.__wrapped__()
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")
    assert entries._processor.__wrapped__() == before
    monkeypatch.setenv("NUMBA_OPT", "1")
    assert entries._processor.__wrapped__() != before


@pytest.mark.parametrize(("told", "has", "wanted"), [
    (None, True, "host,-prefer-256-bit"),
    (None, False, None),
    ("+avx", True, "+avx"),
])  # fmt: skip
def test_wide_registers_are_used_where_they_cost_no_speed(
    told: str | None, has: bool, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = {"avx512f": True, "avx512vbmi2": has}
    monkeypatch.setattr(compiler.config, "CPU_FEATURES", told)
    monkeypatch.setattr(compiler.binding, "get_host_cpu_features", lambda: host)
    monkeypatch.setattr(codegen, "get_host_cpu_features", lambda: "host")
    importlib.reload(compiler)
    assert wanted == compiler.config.CPU_FEATURES


def test_a_folder_that_cannot_be_written_costs_time_alone(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        assert total()(np.arange(4.0)) == 6
    assert len(made) == 2


def test_beside_a_package_that_cannot_be_written_the_users_folder_serves(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "user"))
    monkeypatch.setattr(entries, "_HERE", tmp_path / "file")
    for _ in range(2):
        assert total()(np.arange(4.0)) == 6
    assert [file.name for file in (tmp_path / "user/kernels").iterdir()] == made and len(made) == 1


def test_code_that_needs_numba_is_not_kept(folder: Path) -> None:
    @kernel
    def draw() -> float:
        return np.random.random()

    assert 0 <= draw() < 1
    assert not folder.exists()


@kernel
def _everything(given: Nested, flag: bool, word: np.uint64, half: np.float32) -> Any:
    values = given.values
    return values[1, 0] + given.pair[0], given.pair[1] * half, not flag, word + np.uint64(1)


@pytest.mark.parametrize("values", [
    np.arange(6).reshape(2, 3),
    np.arange(6).reshape(3, 2).T,
    np.arange(24).reshape(4, 6)[::2, ::2],
    np.frombuffer(np.arange(6).tobytes(), np.int64).reshape(2, 3),
    np.arange(6, dtype=np.int16).reshape(2, 3),
])  # fmt: skip
def test_arguments_and_results_of_all_kinds(values: Array) -> None:
    word, half = np.uint64(2**64 - 2), np.float32(0.1)
    found = _everything(Nested(values, (-7, 2.5)), np.bool_(True), word, half)
    assert found == (values[1, 0] - 7, 2.5 * float(half), False, 2**64 - 1)
    assert [type(one) for one in found] == [int, float, bool, int]


def test_flags_that_do_not_matter_have_one_code() -> None:
    fresh = total()
    for values in (np.ones(4), np.ones(8)[4:], np.ones((1, 4))[0]):
        fresh(values)
    assert len(fresh._entries) == 1
    fresh(np.ones(8)[::2])
    assert len(fresh._entries) == 2


def test_an_array_that_finds_no_room_is_a_full_memory() -> None:
    @kernel
    def last(size: int) -> float:
        values = np.zeros(size)
        values[size - 1] = 2.0
        return values[size - 1]

    assert last(10) == 2
    with pytest.raises(MemoryError):
        last(1 << 56)


def test_a_kernel_takes_no_text_and_returns_no_array() -> None:
    @kernel
    def same(value: Any) -> Any:
        return value

    assert same(3) == 3
    for value in ("text", np.ones(3)):
        with pytest.raises(TypeError, match="numbers"):
            same(value)


def test_only_kernels_are_called_from_python() -> None:
    for one in (widen, lowest_bit, External("getpid", "int32")):
        with pytest.raises(NotImplementedError, match="compiled code"):
            one(1)


def test_a_kernel_calls_the_c_library() -> None:
    getpid = External("getpid", "int32")

    @kernel
    def own() -> int:
        return getpid()

    assert own() == os.getpid()


def test_python_keeps_its_lock_around_a_brief_kernel_alone() -> None:
    locked = External("PyGILState_Check", "int32")

    @kernel
    def long() -> int:
        return locked()

    @brief
    def short() -> int:
        return locked()

    assert (long(), short()) == (0, 1)
    assert isinstance(select.bin_of_rank, Kernel) and select.bin_of_rank._brief


def test_a_kernel_is_pickled_by_name() -> None:
    assert isinstance(narrow_bf16, Kernel)
    assert pickle.loads(pickle.dumps(narrow_bf16)) is narrow_bf16


SUMMED = """
import numpy as np
from sigmerge.kernels.merge import weighted_sum
values, out = np.array([[1, 2], [3, 4]], np.float32), np.empty(2, np.float32)
weighted_sum(values, np.ones(2, np.float32), out)
print(out.tolist())
"""


@pytest.mark.slow
def test_a_kernel_is_compiled_again_when_one_that_it_calls_has_changed(tmp_path: Path) -> None:
    """add_scaled lies in another file; numba by itself would go on with what it compiled of it."""
    package = shutil.copytree(Path(sigmerge.__file__).parent, tmp_path / "src/sigmerge",
                              ignore=shutil.ignore_patterns("__pycache__", "pool"))  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "NUMBA_CACHE_DIR": str(tmp_path)}
    env["NUMBA_OPT"] = "0"  # so that the compiler is done soon

    def printed() -> str:
        command = [sys.executable, "-c", SUMMED]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    assert printed() == "[4.0, 6.0]\n"
    source = (package / "kernels/sums.py").read_text()
    before = "total[i] += values[i] * factor"
    assert source.count(before) == 1
    (package / "kernels/sums.py").write_text(
        source.replace(before, "total[i] -= values[i] * factor")
    )
    assert printed() == "[-2.0, -2.0]\n"


MERGE = """
import sys
from sigmerge.cli import main
try:
    main()
finally:
    print("LOADED", *sorted(sys.modules), file=sys.stderr)
"""

OTHERS = (
    "torch", "transformers", "safetensors", "jinja2", "jaxtyping", "asyncio", "sqlite3",
    "sigmerge.evaluation", "sigmerge.probing", "sigmerge.merge3", "sigmerge.analysis",
    "sigmerge.checkpoints.adapters", "sigmerge.checkpoints.slices",
    "sigmerge.checkpoints.statistics", "sigmerge.checkpoints.vocabularies",
    "sigmerge.kernels.claim", "sigmerge.kernels.low_rank", "sigmerge.kernels.signature",
    "sigmerge.jobs.capture", "sigmerge.jobs.guide", "sigmerge.jobs.repair", "sigmerge.jobs.scores",
    "sigmerge.jobs.search", "sigmerge.jobs.several", "sigmerge.recipe.scored",
    "sigmerge.recipe.space", "sigmerge.method.controls",
)  # fmt: skip
"""What a merge needs not that has one recipe, whole models, and no search, guide and repair."""


def told_and_loaded(*given: str | Path, **env: str) -> tuple[str, set[str]]:
    """What a command reports, and the modules that it has loaded in the end."""
    command = [sys.executable, "-c", MERGE, *map(str, given)]
    ran = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    told, _, names = ran.stderr.partition("LOADED ")
    return told, set(names.split())


def loaded(*given: str | Path) -> set[str]:
    return told_and_loaded(*given)[1]


@pytest.mark.slow
def test_the_second_merge_loads_no_compiler_and_nothing_that_it_does_not_use(
    tmp_path: Path,
) -> None:
    pool = make_pool(tmp_path / "pool")
    recipe = pool.write(pool.recipe("task_arithmetic"), "recipe.yaml")
    given = ("merge", recipe, tmp_path / "out", "--overwrite")
    env = {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "NUMBA_OPT": "0"}
    (told, first), (told_then, second) = (told_and_loaded(*given, **env) for _ in range(2))
    assert "numba" in first
    assert told.count("compiling for this processor") == 1 and told_then == ""
    assert "sigmerge.jobs.dense" in second  # it did merge
    assert [name for name in ("numba", "scipy.linalg", *OTHERS) if name in second] == []


METHODS: dict[str, tuple[int, dict[str, Any]]] = {
    "linear": (3, {}),
    "ties": (3, {"density": 0.2}),
    "dare_ties": (3, {"density": 0.5}),
    "slerp": (1, {"t": 0.5}),
    "model_stock": (3, {}),
    "passthrough": (1, {}),
}
"""With how many experts, and the parameters."""


def second_loads_no_numba(*given: str | Path) -> bool:
    """A first command that loads no compiler found its kernels compiled: it is a second one."""
    return any("numba" not in loaded(*given) for _ in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_no_method_loads_numba_when_its_kernels_are_compiled(method: str, tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    count, parameters = METHODS[method]
    recipe = pool.recipe(method)
    recipe |= {"models": recipe["models"][:count], "parameters": parameters}
    given = ("merge", pool.write(recipe, "recipe.yaml"), tmp_path / "out", "--overwrite")
    assert second_loads_no_numba(*given)


@pytest.mark.slow
def test_a_repair_loads_no_numba_when_its_kernels_are_compiled(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    anchor, scores = tmp_path / "anchor", tmp_path / "scores.json"
    names = [Path(one["model"]).name for one in pool.recipe("ties")["models"]]
    own = {name: {one: 0.9 if one == name else 0.3 for one in names} for name in names}
    scores.write_text(json.dumps({"experts": own, "anchor": dict.fromkeys(names, 0.7)}))
    recipe = pool.recipe("ties") | {"repair": {"scores": str(scores)}}
    file = pool.write(recipe, "recipe.yaml")
    sigmerge.merge(file, anchor)
    given = ("repair", file, tmp_path / "out", "--anchor", anchor, "--overwrite")
    assert second_loads_no_numba(*given)


def test_code_for_aligned_writable_arrays_is_not_run_on_others() -> None:
    fresh, data = total(), np.ones(5)
    locked = data[:4].view()
    locked.flags.writeable = False
    shifted = data.view(np.uint8)[4:36].view(np.float64)
    shifted[:] = 1.0
    for values in (np.ones(4), locked, shifted):
        fresh(values)
    assert len(fresh._entries) == 3
