"""Programs of a GPU in place of the compiled loops: the same bytes."""

from __future__ import annotations

import errno
import importlib.util
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sigmerge
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.source import PoolSource
from sigmerge.checkpoints.writer import Output
from sigmerge.core.dtypes import BF16, F32, MEMORY, Span, address_of
from sigmerge.core.merge import KEEP_ALL, SUM
from sigmerge.core.select import count_high
from sigmerge.engine import gpu, stream
from sigmerge.engine.gpu import Gpu
from sigmerge.errors import MissingExtra, OutputError, PoolError, RecipeError
from sigmerge.gpu import chunk_passes
from sigmerge.gpu.staging import Drain
from sigmerge.jobs.options import Options
from sigmerge.method.occupancy import Parts
from tests.adapters import write_adapter
from tests.command_line import sigmerge as command
from tests.devices import DEVICE, interpreted, needs_gpu, needs_programs, some
from tests.engine.test_stream import CASES, WEIGHT
from tests.pools import PoolOnDisk, make_pool, read_weights, weight_bytes, write_weights

MORE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **CASES,
    "ties by the majority": ("ties", {"cancelled": "majority"}, {"density": (0.3, 0.5, 0.75)}),
    "ties summed": ("ties", {"normalize": False, "lambda": 0.3}, {"density": (1.0, 0.0, 0.5)}),
    "multislerp": ("multislerp", {}, {}),
}


LONG, LAYERS = (0, 3) if DEVICE == "cuda" else (600, 1)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    """Three types side by side, and many equal magnitudes."""
    mixed = make_pool(tmp_path_factory.mktemp("pool"), layers=LAYERS, dtype="bf16")
    for folder, dtype in ((mixed.reference, "f32"), (mixed.experts["math"], "f16")):
        write_weights(folder, read_weights(folder), dtype)
    return mixed


@pytest.fixture(autouse=True)
def short_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools here have some hundred coordinates; an interpreter takes only the longest."""
    monkeypatch.setattr(gpu, "LEAST", LONG)
    interpreted(monkeypatch)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Programs pass over weights; which kinds of pass did, and were not declined."""
    done: list[str] = []

    class Noted(Gpu):
        def merge(self, *given: Any) -> bool:
            done.extend(["merge"] * (found := super().merge(*given)))
            return found

        def write(self, *given: Any) -> bool:
            done.extend(["merge"] * (found := super().write(*given)))
            return found

        def read(self, kernel: Any, *given: Any) -> bool:
            done.extend([kernel.__name__] * (found := super().read(kernel, *given)))
            return found

        def select(self, *given: Any) -> Any:
            found = super().select(*given)
            done.extend(["select"] * (found is not None))
            return found

    monkeypatch.setattr(Options, "gpu", lambda self: Noted(DEVICE, 1 << 20))
    yield done


def merged(pool: PoolOnDisk, case: str, out: Path, dtype: str) -> dict[str, bytes]:
    method, parameters, each = MORE[case]
    sigmerge.merge(pool.recipe(method, parameters, WEIGHT, each, dtype=dtype), out, threads=3)
    return weight_bytes(out)


@needs_programs
@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("case", some(MORE, "ties by the majority", "cabs"))
def test_the_bytes_are_those_of_the_loops(
    pool: PoolOnDisk, tmp_path: Path, case: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    """CABS prunes by groups, which has no program."""
    by_loops = merged(pool, case, tmp_path / "loops", dtype)
    done = request.getfixturevalue("passes")
    assert merged(pool, case, tmp_path / "gpu", dtype) == by_loops
    assert ("merge" in done) != case.startswith("cabs")
    assert ("gram" in done) == (case == "multislerp")
    assert ("select" in done) == ("ties" in case and not case.startswith(("dare", "ties over")))
    assert ("count_high" in done) == (case == "ties over the model")


@needs_programs
@pytest.mark.parametrize(
    "case", some(["ties", "ties over the model", "ties by the majority", "dare_linear l1"], "ties")
)
def test_short_of_memory_a_chunk_is_taken_in_parts(
    pool: PoolOnDisk, tmp_path: Path, case: str, request: pytest.FixtureRequest
) -> None:
    """Passes over more than 400 coordinates find the memory full; ties are handed out in turn."""
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    for module in (stream, gpu):
        patch.setattr(module, "TILE", 48)
    by_loops = merged(pool, case, tmp_path / "loops", "bfloat16")
    done, lengths = request.getfixturevalue("passes"), set()

    def full(program: Any) -> Any:
        def run(*given: Any) -> Any:
            rows = next(each for each in given if isinstance(each, torch.Tensor))
            lengths.add(len(rows[0]))
            if len(rows[0]) > 400:
                raise torch.OutOfMemoryError
            return program(*given)

        return run

    patch.setattr(chunk_passes, "merge", full(chunk_passes.merge))
    patch.setattr(chunk_passes, "selected", full(chunk_passes.selected))
    programs = {kernel: full(program) for kernel, program in chunk_passes.COUNTERPARTS.items()}
    patch.setattr(chunk_passes, "COUNTERPARTS", programs)
    assert merged(pool, case, tmp_path / "gpu", "bfloat16") == by_loops
    assert max(lengths) > 400 and min(lengths) <= 400 and "merge" in done


ANYWHERE = ("linear", "ties", "ties over the model", "dare_linear l1", "multislerp", "lines")


@needs_programs
@pytest.mark.parametrize("case", some(ANYWHERE, "linear", "lines"))
def test_chunks_that_may_end_anywhere_are_longer(
    pool: PoolOnDisk, tmp_path: Path, case: str, request: pytest.FixtureRequest
) -> None:
    """Sums of float64 and their order stay as they are."""
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    for name, size in (("TILE", 48), ("CHUNK", 96), ("LONG_CHUNK", 480)):
        patch.setattr(stream, name, size)
    patch.setattr(gpu, "LEAST", LONG // 2)
    by_loops = merged(pool, case, tmp_path / "loops", "bfloat16")
    lengths: set[int] = set()

    class Noted(Gpu):
        def write(self, rows: stream.StoredRows, *given: Any) -> bool:
            lengths.add(rows.values[0].size)
            return super().write(rows, *given)

    patch.setattr(Options, "gpu", lambda self: Noted(DEVICE, 1 << 20))
    assert merged(pool, case, tmp_path / "gpu", "bfloat16") == by_loops
    assert max(lengths) == (96 if case == "lines" else 480)


def test_memory_for_not_even_a_tile_is_an_error(
    pool: PoolOnDisk, tmp_path: Path, passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(chunk_passes, "merge", full)
    with pytest.raises(PoolError, match=r"does not hold .* coordinates of 4 checkpoints"):
        merged(pool, "task_arithmetic", tmp_path / "out", "bfloat16")
    assert not (tmp_path / "out").exists()


@needs_gpu
def test_views_are_those_of_the_loops(pool: PoolOnDisk, request: pytest.FixtureRequest) -> None:
    recipe = {**pool.recipe("task_arithmetic"), "repair": {}}
    by_loops = sigmerge.profile(recipe)
    shutil.rmtree(pool.root / ".sigmerge")
    done = request.getfixturevalue("passes")
    there = sigmerge.profile(recipe)
    assert there == by_loops
    assert set(done) == {"signature"}


SECTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "random mask": {"variant": "random_mask", "seed": 3},
    "sparse": {"variant": "sparse_update", "seed": 3},
    "replace": {"update": "replace", "scale": 0.7},
    "replace whole": {"update": "replace", "scale": 1.0},
    "twice": {"rounds": 2},
    "nearly all": {"c_min": 0.9, "c_max": 0.99},
}


@needs_programs
@pytest.mark.parametrize("case", some(SECTIONS, "sparse"))
def test_repairs_are_those_of_the_loops(
    pool: PoolOnDisk, tmp_path: Path, case: str, request: pytest.FixtureRequest
) -> None:
    """Short tiles, so that ties are handed out over many."""
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    tile, most = (40, 2) if DEVICE == "cuda" else (1000, 6)
    patch.setattr("sigmerge.engine.layer.CLAIM_TILE", tile)
    patch.setattr("sigmerge.method.occupancy.MARKING", Parts(6, 1))
    patch.setattr("sigmerge.engine.layer.PIECE", 4)
    domains = list(pool.experts)

    def score(folder: Path) -> dict[str, float]:
        """Of experts each its own domain; of others what their bytes say."""
        if folder.name in domains:
            return {d: 0.9 if d == folder.name else 0.4 for d in domains}
        digest = sha256(b"".join(weight_bytes(folder).values())).digest()
        return {d: 0.5 + digest[i] / 1024 for i, d in enumerate(domains)}

    anchor = tmp_path / "anchor"
    recipe = pool.recipe("task_arithmetic", {}, WEIGHT)
    sigmerge.merge(recipe, anchor)
    recipe["repair"] = {"guard": "off", **SECTIONS[case]}
    how: dict[str, Any] = {"anchor": anchor, "threads": 2, "score": score}
    made = sigmerge.repair(recipe, tmp_path / "loops", **how)
    runs: list[int] = []

    class Short(Gpu):
        """Memory for few tiles at most."""

        def halved(self, first: int, last: int, program: Any) -> None:
            def one(first: int, last: int) -> None:
                runs.append(last - first)
                if last - first > most:
                    raise torch.OutOfMemoryError
                program(first, last)

            super().halved(first, last, one)

    patch.setattr(Options, "gpu", lambda self: Short(DEVICE, 1 << 20))
    again = sigmerge.repair(recipe, tmp_path / "gpu", **how)
    assert weight_bytes(tmp_path / "gpu") == weight_bytes(tmp_path / "loops")
    assert again.plan.admitted_mass == made.plan.admitted_mass
    assert again.plan.support == made.plan.support
    assert max(runs) > most and min(runs) <= most


@needs_programs
@pytest.mark.parametrize("value", some([np.nan, np.inf], np.inf))
def test_what_is_not_finite_is_left_to_the_loops(
    tmp_path: Path, value: float, request: pytest.FixtureRequest
) -> None:
    pool = make_pool(tmp_path / "pool", layers=LAYERS)
    weights = read_weights(pool.experts["math"])
    name = next(name for name, values in weights.items() if values.ndim == 2)
    weights[name].ravel()[5] = value
    write_weights(pool.experts["math"], weights, "f32")
    recipe = pool.recipe("ties", {}, WEIGHT, {"density": (0.3, 0.5, 0.75)})
    sigmerge.merge(recipe, tmp_path / "loops", allow_nonfinite=True)
    done = request.getfixturevalue("passes")
    sigmerge.merge(recipe, tmp_path / "gpu", allow_nonfinite=True)
    assert weight_bytes(tmp_path / "gpu") == weight_bytes(tmp_path / "loops")
    assert "merge" in done
    with pytest.raises(PoolError, match=name):
        sigmerge.merge(recipe, tmp_path / "strict")


@needs_programs
def test_short_chunks_are_left_to_the_loops(
    pool: PoolOnDisk, tmp_path: Path, passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = pool.recipe("ties", {}, WEIGHT, {"density": (0.3, 0.5, 0.75)})
    sizes = {values.size for values in read_weights(pool.reference).values()}
    monkeypatch.setattr(gpu, "LEAST", max(sizes))
    sigmerge.merge(recipe, tmp_path / "long")
    assert set(passes) == {"merge", "select"}
    passes.clear()
    monkeypatch.setattr(gpu, "LEAST", max(sizes) + 1)
    sigmerge.merge(recipe, tmp_path / "short")
    assert not passes
    assert weight_bytes(tmp_path / "short") == weight_bytes(tmp_path / "long")


def test_a_driver_that_lacks_something_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking() -> None:
        raise RuntimeError("the driver has no copies")

    monkeypatch.setattr(gpu.staging, "driver", lacking)
    with pytest.raises(RecipeError, match="cuda: the driver has no copies"):
        Gpu("cpu")._own_ring()


def test_no_pass_takes_a_short_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.zeros(5, np.float32)
    rows = stream.StoredRows("w", 0, ("math", "reference"), (Span.of(values), Span.of(values)))
    formula = SimpleNamespace(thin=KEEP_ALL, combine=SUM)
    asked: list[str] = []
    monkeypatch.setattr(Gpu, "_fitting", lambda self, *given, **how: asked.append("asked"))
    for least in (5, 6):
        device = Gpu("cpu", least=least)
        device.merge(rows, formula, 4, 4, BF16, values)  # type: ignore[arg-type]
        device.write(rows, formula, 4, BF16, Drain(-1, 0, 2, values))  # type: ignore[arg-type]
        device.read(count_high, rows)
        device.select(rows, values, values)
        assert asked == ["asked"] * 4


def test_few_threads_launch_at_a_time_and_let_others_while_they_wait() -> None:
    """A program that waits for others lets them launch: here for as many as there are threads."""
    values, device, together = np.zeros(5, np.float32), Gpu("cpu"), 2 * gpu.AT_ONCE
    rows = stream.StoredRows("w", 0, ("math", "reference"), (Span.of(values), Span.of(values)))
    all_there, now, most = threading.Barrier(together, timeout=10), list[int](), list[int]()

    def program(*_: Any) -> bool:
        now.append(1)
        time.sleep(0.02)
        most.append(len(now))
        now.pop()
        return True

    def waiting(*_: Any) -> None:
        program()
        with device.launches_of_others():
            all_there.wait()
        program()

    with ThreadPoolExecutor(together) as threads:
        for _ in threads.map(lambda _: device.halved(0, 1, waiting), range(together)):
            pass
        for _ in threads.map(
            lambda _: device._fitting(rows, 1, program, again=False), range(2 * together)
        ):
            pass
    assert len(most) == 4 * together and max(most) == gpu.AT_ONCE
    assert device._launching._value == gpu.AT_ONCE


def test_members_are_kept_as_long_as_there_is_room() -> None:
    """Whole ones take multiples of 256 bytes; of two with one beginning each keeps its own."""
    first, second = (np.arange(n, n + 120, dtype=np.float32) for n in (0, 500))
    edges = np.array([0, 60, 120])
    rows = np.array(
        [[(F32, MEMORY, address_of(row)) for row in (first, of[60:])] for of in (first, second)]
    )
    copies = gpu._BlockCopies(Gpu("cpu"), 1100, map)
    copies.bring(rows, edges)
    assert len(copies._whole) == 2 and copies._left == 1100 - 4 * 256
    for row, of in zip(rows, (first, second), strict=True):
        there, begin = copies(row, edges, 1, 2, alone=True)
        assert there is copies._whole[row.tobytes()][0]
        found = there[int(begin[0]) :][:240].view(torch.float32)
        assert found.tolist() == of[60:].tolist()
    copies.bring(rows[:, ::-1], edges)
    assert len(copies._whole) == 2


MODULES = ("q_proj", "down_proj"), ("layernorm", "q_proj")


@needs_programs
@pytest.mark.parametrize("modules", some(MODULES, MODULES[1]))
def test_repairs_of_adapters_are_those_of_the_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...]
) -> None:
    """They have tensors of their reference, from the first of a block on."""
    reference = make_pool(tmp_path, experts=1, layers=LAYERS, dtype="bf16").reference
    weights, names = read_weights(reference), ("math", "coding", "safety")
    models = [
        {"name": name, "parameters": {"weight": 0.3},
         "model": str(write_adapter(tmp_path / f"adapter-{name}", reference, weights, seed=seed,
                                    modules=modules))}
        for seed, name in enumerate(names)
    ]  # fmt: skip
    recipe = {"merge_method": "task_arithmetic", "base_model": str(reference), "models": models,
              "dtype": "bfloat16"}  # fmt: skip
    sigmerge.merge(recipe, tmp_path / "anchor")
    experts = {e: {d: 0.9 if d == e else 0.4 for d in names} for e in names}
    scores = {"experts": experts, "anchor": {"math": 0.5, "coding": 0.8, "safety": 0.6}}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    recipe["repair"] = {"guard": "off", "scores": str(tmp_path / "scores.json")}
    how: Any = {"anchor": tmp_path / "anchor", "threads": 2}
    sigmerge.repair(recipe, tmp_path / "loops", **how)
    monkeypatch.setattr(Options, "gpu", lambda self: Gpu(DEVICE, 1 << 24))
    sigmerge.repair(recipe, tmp_path / "gpu", **how)
    assert weight_bytes(tmp_path / "gpu") == weight_bytes(tmp_path / "loops")


def test_more_blocks_are_at_work_where_all_have_room() -> None:
    device = Gpu("cpu", keep=1000)
    assert [device.blocks(size) for size in (0, 100, 200, 250, 400, 2000)] == [6, 6, 5, 4, 3, 3]


def test_a_second_pass_takes_the_copies_of_the_first() -> None:
    values = np.arange(10, dtype=np.float32)
    rows = stream.StoredRows("w", 0, ("math", "reference"), (Span.of(values), Span.of(values + 1)))
    device = Gpu("cpu", keep=1000)
    first = device._copies(rows, again=True)
    again = device._copies(rows, again=True)
    assert first is again
    last = device._copies(rows, again=False)
    assert first is last
    assert device._copies(rows, again=False) is not first


def test_copies_make_room_for_later_ones() -> None:
    kept = gpu._Kept(100)
    some = {n: torch.zeros(10) for n in range(4)}
    for number, copy in some.items():
        kept.put(("w", number, "math"), copy)
    found = [kept.get(("w", number, "math"), last=True) is not None for number in some]
    assert found == [False, False, True, True]
    kept.put(("w", 9, "math"), torch.zeros(26))
    assert kept.get(("w", 9, "math"), last=True) is None


@needs_programs
@pytest.mark.parametrize("case", some(["linear", "dare_linear l1"], "linear"))
def test_what_a_launch_flags_is_left_to_the_loops(
    pool: PoolOnDisk, tmp_path: Path, passes: list[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A norm and a result."""
    merge = chunk_passes.merge

    def flagged(*given: Any) -> Any:
        given[-1].fill_(1)
        return merge(*given)

    monkeypatch.setattr(chunk_passes, "merge", flagged)
    merged(pool, case, tmp_path / "out", "bfloat16")
    assert "merge" not in passes


@pytest.mark.parametrize(
    ("method", "here"),
    [("ties", False), ("lines", False), ("cabs", True), ("della", True), ("ram", True)],
)
def test_a_plan_says_what_the_processor_merges(
    pool: PoolOnDisk, tmp_path: Path, method: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmerge.jobs.options._check", lambda device: None)
    for device in ("cpu", "cuda"):
        plan = sigmerge.merge.plan(pool.recipe(method), tmp_path / "out", device=device)
        said = f"{method}: the GPU has no program" in str(plan)
        assert said == (here and device == "cuda")


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_device_that_is_none(engine: Any) -> None:
    with pytest.raises(RecipeError, match="'cud' is none"):
        Options(device="cud", engine=engine)  # type: ignore[arg-type]


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "triton" else found(name)
    )
    with pytest.raises(MissingExtra, match=r"cuda needs triton, .*pip install '.*\[gpu\]'"):
        Options(device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(pool: PoolOnDisk, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="torch finds no GPU"):
        sigmerge.merge(pool.recipe("linear"), tmp_path / "out", device="cuda")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "words", [("merge", "out"), ("merge", "out", "--dry-run"), ("profile",), ("repair", "out"),
              ("run", "out")],
)  # fmt: skip
def test_the_flag_of_every_verb_asks_for_a_gpu(
    pool: PoolOnDisk, tmp_path: Path, words: tuple[str, ...]
) -> None:
    verb, *rest = words
    recipe = pool.write({**pool.recipe("linear"), "repair": {}}, "gpu.yaml")
    places = [tmp_path / word if word == "out" else word for word in rest]
    ran = command(verb, recipe, *places, "--device", "cuda")
    assert ran.code == 2 and "torch finds no GPU" in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_suite_merges_where_its_flag_says(tmp_path: Path) -> None:
    ran = command("suite", "nano-study", tmp_path / "out", "--device", "cuda")
    assert ran.code == 2 and "torch finds no GPU" in ran.err
    assert list(tmp_path.iterdir()) == []


@needs_gpu
@pytest.mark.parametrize("case", MORE)
def test_a_gpu_gives_the_same_bytes(pool: PoolOnDisk, tmp_path: Path, case: str) -> None:
    by_loops = merged(pool, case, tmp_path / "loops", "bfloat16")
    method, parameters, each = MORE[case]
    recipe = pool.recipe(method, parameters, WEIGHT, each, dtype="bfloat16")
    sigmerge.merge(recipe, tmp_path / "gpu", device="cuda")
    assert weight_bytes(tmp_path / "gpu") == by_loops


def test_a_block_goes_to_the_device_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte once, whatever lies between spans; no part has more than a worker copies."""
    monkeypatch.setattr(gpu, "SENT", 1000)
    parts = gpu._parts([(3, 5000, 0, 300), (4, 9000, 512, 2700), (3, 7000, 3328, 4)])
    assert [sum(count for *_, count in part) for part in parts] == [1000, 1000, 1000, 4]
    spans = [span for part in parts for span in part]
    assert spans == [(3, 5000, 0, 300), (4, 9000, 512, 700), (4, 9700, 1212, 1000),
                     (4, 10700, 2212, 1000), (3, 7000, 3328, 4)]  # fmt: skip


def test_what_lies_together_in_one_file_is_one_span() -> None:
    lying = np.array([(3, 0), (3, 256), (4, 512), (4, 768), (-1, 1024)])
    sizes = np.array([256, 256, 256, 100, 50])
    spans = gpu._spans(lying, gpu._places(sizes), sizes)
    assert list(spans) == [(3, 0, 0, 512), (4, 512, 512, 356), (-1, 1024, 1024, 50)]


def test_files_go_to_the_device_as_they_are(pool: PoolOnDisk) -> None:
    checkpoint = open_checkpoint(next(f for n, f in pool.experts.items() if n != "math"))
    with PoolSource({"some": checkpoint}) as source:
        name = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].size)
        values = source.raw("some", name)
        rows = stream.StoredRows(name, 0, ("some", "again"), (values, values))
        copies, stored = Gpu(DEVICE, keep=0)._copies(rows, again=False), values.array().tobytes()
        assert all(copy.cpu().numpy().tobytes() == stored for copy in copies)


@needs_programs
@pytest.mark.parametrize("verb", some(["merge", "repair"], "merge"))
def test_a_write_that_fails_is_the_job_s_error(
    pool: PoolOnDisk, tmp_path: Path, passes: list[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    recipe = pool.recipe("task_arithmetic", {}, WEIGHT, {}, dtype="bfloat16")
    sigmerge.merge(recipe, tmp_path / "anchor")
    real, calls = os.pwrite, itertools.count(1)

    def full(*given: Any) -> int:
        if next(calls) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*given)

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(Gpu, "drain", lambda *given: False)  # which has no words for the error
    with pytest.raises(OutputError, match="No space left"):
        if verb == "merge":
            sigmerge.merge(recipe, tmp_path / "out")
        else:
            recipe["repair"] = {"guard": "off", "scores": scored(pool, tmp_path)}
            sigmerge.repair(recipe, tmp_path / "out", anchor=tmp_path / "anchor")
    assert not (tmp_path / "out").exists()


@needs_programs
@pytest.mark.parametrize("verb", some(["merge", "repair"], "merge"))
def test_a_block_is_finished_after_its_last_write(
    pool: PoolOnDisk, tmp_path: Path, passes: list[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(gpu, "LEAST", 0)
    recipe = pool.recipe("task_arithmetic", {}, WEIGHT, {}, dtype="bfloat16")
    sigmerge.merge(recipe, tmp_path / "anchor")
    drain, finish, begun, written = Gpu.drain, Output.finish, list[str](), list[str]()
    target, noted = Output.target, Output.written

    def begin(self: Output, tensor: str) -> Any:
        begun.append(tensor)
        return target(self, tensor)

    def slow(self: Gpu, *given: Any) -> bool:
        time.sleep(0.01)
        return drain(self, *given)

    def end(self: Output, tensor: str, *given: Any) -> None:
        noted(self, tensor, *given)
        written.append(tensor)

    def finished(self: Output, block: str, record: Any = None, tensors: Any = None) -> None:
        mine = [name for name in tensors or () if name in begun]
        assert set(mine) <= set(written)
        finish(self, block, record, tensors)

    monkeypatch.setattr(Output, "target", begin)
    monkeypatch.setattr(Output, "written", end)
    monkeypatch.setattr(Gpu, "drain", slow)
    monkeypatch.setattr(Output, "finish", finished)
    if verb == "repair":
        recipe["repair"] = {"guard": "off", "scores": scored(pool, tmp_path)}
        sigmerge.repair(recipe, tmp_path / "out", anchor=tmp_path / "anchor")
    else:
        sigmerge.merge(recipe, tmp_path / "out")
    assert written


def scored(pool: PoolOnDisk, folder: Path) -> str:
    """A file of scores: every expert is best at its own domain."""
    experts = {d: {e: 0.9 if e == d else 0.4 for e in pool.experts} for d in pool.experts}
    file = folder / "scores.json"
    anchor = dict.fromkeys(pool.experts, 0.6)
    file.write_text(json.dumps({"experts": experts, "anchor": anchor}))
    return str(file)
