"""The result does not depend on how the work is cut up or who does it."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sigmerge
from sigmerge._native import checksum
from sigmerge.checkpoints.blocks import find_stack
from sigmerge.core import merge as loops
from sigmerge.core.dtypes import FilePlace, Span
from sigmerge.engine import stream
from sigmerge.engine.overlap import beside
from sigmerge.engine.stream import Stream
from sigmerge.engine.workers import Workers
from sigmerge.errors import PoolError
from sigmerge.files.opened import OpenFile
from sigmerge.operators.base import Site
from tests.operators.driver import MemorySource, run
from tests.pools import (
    DTYPES,
    PoolOnDisk,
    Weights,
    make_pool,
    read_weights,
    weight_bytes,
    write_weights,
)

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("linear", {}, {}),
    "task_arithmetic": ("task_arithmetic", {"lambda": 0.7}, {}),
    "ties": ("ties", {}, {"density": (0.3, 0.5, 0.75)}),
    "ties over the model": ("ties", {"scope": "model"}, {"density": (0.3, 0.5, 0.75)}),
    "dare_linear": ("dare_linear", {"rescale": "inverse"}, {"density": (0.3, 0.5, 0.75)}),
    "dare_linear l1": ("dare_linear", {"rescale": "l1"}, {"density": (0.3, 0.5, 0.75)}),
    "dare_ties": ("dare_ties", {"rescale": "none"}, {"density": (0.3, 0.5, 0.75)}),
    "cabs": ("cabs", {"n": 3, "m": 24}, {}),
    "cabs fill": ("cabs", {"n": 5, "m": 8, "overlap": "fill"}, {}),
    "lines": ("lines", {"beta": 0.5}, {}),
    "lines on linear": ("lines", {"on": "linear", "alpha": 0.4}, {}),
    "lines on ties": ("lines", {"on": "ties", "alpha": 0.4}, {"density": (0.3, 0.5, 0.75)}),
}
SUMS = ("dare_linear l1", "lines")
"""Cases that add float64 numbers up tile by tile: only the order of addition may show."""
WEIGHT = (0.5, 0.25, 0.75)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("pool"), layers=3, dtype="bf16")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of some hundred entries span many tiles and chunks."""
    monkeypatch.setattr(stream, "TILE", 48)
    monkeypatch.setattr(stream, "CHUNK", 144)
    monkeypatch.setattr("sigmerge.jobs.dense.TILE", 48)
    yield


def merged(pool: PoolOnDisk, case: str, out: Path, **how: Any) -> Weights:
    method, parameters, each = CASES[case]
    recipe = pool.recipe(method, parameters, WEIGHT, each, dtype="float32")
    sigmerge.merge(recipe, out, **how)
    return read_weights(out)


def same(one: Weights, other: Weights) -> None:
    assert set(one) == set(other)
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_streamed_from_disk_is_merged_in_memory(
    pool: PoolOnDisk, tmp_path: Path, case: str
) -> None:
    streamed = merged(pool, case, tmp_path / "out", threads=2)
    reference = read_weights(pool.reference)
    experts = {name: read_weights(folder) for name, folder in pool.experts.items()}
    stack = find_stack((name, values.size) for name, values in reference.items())
    blocks = {n: b for n in reference if (b := stack.block_of(n)) is not None}
    method, parameters, each = CASES[case]
    options = {k: v for k, v in parameters.items() if k != "on"} | each
    in_memory = run(
        method,
        reference,
        experts,
        on=parameters.get("on"),
        blocks=blocks,
        weight=WEIGHT,
        **options,
    )
    same({n: v.ravel() for n, v in streamed.items()}, in_memory)


@pytest.mark.parametrize("case", ["linear", "task_arithmetic", "ties", "lines on linear"])
def test_members_of_different_types_are_merged_as_their_float32_values(
    tmp_path: Path, case: str
) -> None:
    """float32, float16 and bfloat16 side by side: what can be added as stored, and what cannot."""
    mixed = make_pool(tmp_path / "mixed", layers=3, dtype="bf16")
    for folder, dtype in ((mixed.reference, "f32"), (mixed.experts["math"], "f16")):
        write_weights(folder, read_weights(folder), dtype)
    wide = make_pool(tmp_path / "wide", layers=3)
    for name, folder in {"": mixed.reference, **mixed.experts}.items():
        write_weights(wide.experts.get(name, wide.reference), read_weights(folder), "f32")
    same(merged(mixed, case, tmp_path / "one"), merged(wide, case, tmp_path / "two"))


@pytest.mark.parametrize("case", CASES)
def test_one_thread_and_many_give_the_same_bytes(
    pool: PoolOnDisk, tmp_path: Path, small_tiles: None, case: str
) -> None:
    merged(pool, case, tmp_path / "one", threads=1)
    merged(pool, case, tmp_path / "many", threads=5)
    assert weight_bytes(tmp_path / "one") == weight_bytes(tmp_path / "many")


@pytest.mark.parametrize("case", CASES)
def test_tile_and_chunk_boundaries_leave_no_trace(
    pool: PoolOnDisk, tmp_path: Path, case: str, request: pytest.FixtureRequest
) -> None:
    whole = merged(pool, case, tmp_path / "whole", threads=1)
    request.getfixturevalue("small_tiles")
    cut = merged(pool, case, tmp_path / "cut", threads=1)
    if case in SUMS:
        for name, values in whole.items():
            np.testing.assert_allclose(cut[name], values, rtol=1e-6, atol=1e-8)
    else:
        same(cut, whole)


@pytest.mark.parametrize("case", ["ties over the model", "dare_ties"])
def test_the_sharding_of_inputs_and_output_does_not_matter(tmp_path: Path, case: str) -> None:
    plain = make_pool(tmp_path / "plain", layers=3, dtype="bf16")
    mixed = make_pool(tmp_path / "mixed", layers=3, dtype="bf16", shards=(3, 1, 5, 2))
    one = merged(plain, case, tmp_path / "one", threads=2)
    other = merged(mixed, case, tmp_path / "other", threads=2, max_shard_size="5KB")
    same(one, other)
    assert len(list((tmp_path / "other").glob("*.safetensors"))) > 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32", None])
def test_values_are_rounded_once_to_the_output_type(
    tmp_path: Path, dtype: str, out_dtype: str | None
) -> None:
    pool = make_pool(tmp_path / "pool", dtype=dtype, experts=2)
    top = {"dtype": out_dtype} if out_dtype else {}
    sigmerge.merge(pool.recipe("task_arithmetic", weight=(0.7, 0.4), **top), tmp_path / "out")
    reference = read_weights(pool.reference)
    experts = {name: read_weights(folder) for name, folder in pool.experts.items()}
    exact = run("task_arithmetic", reference, experts, weight=(0.7, 0.4))
    kind = getattr(torch, out_dtype) if out_dtype else DTYPES[dtype]
    for name, values in read_weights(tmp_path / "out").items():
        wanted = torch.tensor(exact[name]).to(kind).to(torch.float32).numpy()
        np.testing.assert_array_equal(values.ravel(), wanted)


def test_workers_keep_order_and_few_items_in_flight() -> None:
    started = itertools.count()
    latest = 0

    def work(item: int) -> int:
        nonlocal latest
        latest = max(latest, next(started) + 1)
        time.sleep(0.001 * (item % 3))
        return item

    with Workers(3) as workers:
        for taken, item in enumerate(workers.map(work, range(60))):
            assert item == taken
            assert latest - taken <= 2 * 3 + 2


def test_an_error_in_a_worker_reaches_the_caller() -> None:
    def work(item: int) -> int:
        if item == 7:
            raise RuntimeError("item 7")
        return item

    with Workers(2) as workers, pytest.raises(RuntimeError, match="item 7"):
        list(workers.map(work, range(20)))


def test_each_next_block_is_read_ahead() -> None:
    asked: list[list[str]] = []

    class Source(MemorySource):
        def prefetch(self, tensors: Any) -> None:
            asked.append(list(tensors))

    class Named:
        def __init__(self, tensor: str) -> None:
            self.tensor = tensor

    blocks: Any = [[Named("a")], [Named("b"), Named("c")], [Named("d")]]
    with Workers(1) as workers:
        passes = Stream(blocks, Source({}), workers, lambda site: 4).ahead(blocks)
        assert next(passes) is blocks[0]
        assert asked == [["a"], ["b", "c"]]
        assert next(passes) is blocks[1]
        assert asked[2:] == [["d"]]
        assert list(passes) == blocks[2:]
        assert len(asked) == 3


@pytest.mark.slow
def test_thirty_merges_leave_no_thread(pool: PoolOnDisk, tmp_path: Path) -> None:
    merged(pool, "linear", tmp_path / "first", threads=2)
    before = threading.active_count()
    for i in range(30):
        merged(pool, "linear", tmp_path / str(i), threads=2)
    assert threading.active_count() == before


def test_small_tensors_are_one_item_of_work() -> None:
    class Sized:
        def __init__(self, size: int) -> None:
            self.size = size

    sizes = [stream.CHUNK, 5, 7, stream.CHUNK - 12, 1, stream.CHUNK, 2]
    chunks: Any = [Sized(size) for size in sizes]
    found = [[chunk.size for chunk in batch] for batch in stream.batches(chunks)]
    assert found == [sizes[:1], sizes[1:4], sizes[4:5], sizes[5:6], sizes[6:]]


def test_overlapping_work_keeps_order_and_is_given_up_on_error() -> None:
    with Workers(3) as workers:
        done = workers.overlap(lambda item: sum(workers.map(abs, range(-item, 0))), range(6))
        assert list(done) == [0, 1, 3, 6, 10, 15]

    seen: list[int] = []

    def fail(item: int) -> None:
        def step(number: int) -> None:
            if item == 0 and number == 3:
                raise RuntimeError("item 0")
            time.sleep(0.001)
            seen.append(item)

        list(workers.map(step, range(10_000)))

    with Workers(2) as workers, pytest.raises(RuntimeError, match="item 0"):
        list(workers.overlap(fail, range(4)))
    assert seen.count(1) < 10_000


def test_work_beside_ends_with_the_body() -> None:
    def count(step: Any) -> int:
        for _ in range(3):
            step(1)
        return 3

    with beside(count) as wait:
        assert wait() == 3
    steps = itertools.count()

    def forever(step: Any) -> None:
        while True:
            next(steps)
            step(1)

    with pytest.raises(RuntimeError, match="body"), beside(forever):
        raise RuntimeError("body")
    assert next(steps) > 0


@pytest.mark.parametrize("by_part", [False, True])
def test_what_a_loop_reads_is_there_until_it_ends(small_tiles: None, by_part: bool) -> None:
    """Values of an adapter, or of a remote member, lie nowhere but in the piece that is asked for.

    They are made once, also for a loop that takes one part after another.
    """
    made: list[weakref.ref[Any]] = []

    class Formed(MemorySource):
        def piece(self, member: str, tensor: str, start: int, stop: int) -> Any:
            values = super().piece(member, tensor, start, stop).array().copy()
            made.append(weakref.ref(values))
            return Span.of(values)

    weights = {name: {"w": np.arange(400.0) + i} for i, name in enumerate(("a", "b", "reference"))}
    site = Site("w", 400, 0, 1, ("a", "b"), {}, 0, (400,))
    (chunk,) = stream.chunks(site, 1, Formed(weights), most=432)
    seen: list[int] = []

    def loop(members: Any, start: int, size: int, sums: Any) -> bool:
        alive = [values.ctypes.data for one in made if (values := one()) is not None]
        assert members[:, 2].tolist() == [place + 4 * start for place in alive]
        seen.append(size)
        return True

    chunk.read(loop, chunk.sums(2) if by_part else np.zeros(2))
    assert seen == ([144, 144, 112] if by_part else [400])
    assert len(made) == 3


@pytest.mark.parametrize("case", ["linear", "ties", "dare_linear l1"])
def test_a_member_that_cannot_be_read_stops_a_merge(
    pool: PoolOnDisk, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that lets NaN through, and where the file is whole when it is looked at again."""
    failing = os.open(tmp_path, os.O_RDONLY)
    opened = OpenFile.__init__

    def broken(self: OpenFile, path: Path) -> None:
        opened(self, path)
        os.dup2(failing, self.descriptor)

    monkeypatch.setattr(OpenFile, "__init__", broken)
    with pytest.raises(PoolError, match="became shorter while it was read, or its disk fails"):
        merged(pool, case, tmp_path / "out", allow_nonfinite=True)
    assert not (tmp_path / "out").exists()
    os.close(failing)


@pytest.mark.parametrize(("in_files", "longest"), [(True, 720), (False, 144)])
def test_chunks_that_do_not_lie_in_files_are_not_longer(
    small_tiles: None, monkeypatch: pytest.MonkeyPatch, in_files: bool, longest: int
) -> None:
    """All of a chunk that is formed or fetched is in memory at once."""
    monkeypatch.setattr(stream, "LONG_CHUNK", 720)
    source, site = MemorySource({}), Site("w", 40_000, 0, 1, ("a",), {}, 0, (40_000,))
    source.in_files = in_files
    with Workers(1) as workers:
        made = Stream([[site]], source, workers, lambda _: 1, anywhere=lambda _: True)
        assert max(chunk.size for chunk in made._chunks([site], {})) == longest


DRAINED = 1 << 18
"""Coordinates of a result that the core writes at a time."""


@pytest.mark.parametrize(
    ("granule", "dtype", "written"),
    [(1, "BF16", True), (3, "F32", False), (5, "BF16", False), (DRAINED + 8, "BF16", True)],
)
def test_a_loop_writes_strips_of_whole_words_that_fit(
    tmp_path: Path, granule: int, dtype: str, written: bool
) -> None:
    """A checksum is one of words of eight bytes, wherever a loop stops to write."""
    size = 2 * (DRAINED + 8) + 3
    values = np.random.default_rng(0).normal(0, 1, (2, size)).astype(np.float32)
    source = MemorySource({"a": {"w": values[0]}, "b": {"w": values[1]}})
    site = Site("w", size, 0, 1, ("a", "b"), {}, 0, (size,))
    chunk = stream.chunks(site, granule, source)[0]
    formula = loops.formula(np.ones(2, np.float32), vectors=False, combine=loops.DISJOINT)
    found: list[tuple[str, int, int, int]] = []

    class ToFile:
        def target(self, tensor: str) -> FilePlace:
            return FilePlace(descriptor, 8, {"BF16": 2, "F32": 4}[dtype])

        def written(self, *given: Any) -> None:
            found.append(given)

    descriptor = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    assert chunk.wrote(formula, dtype, ToFile()) == written
    os.close(descriptor)
    if written:
        wanted = memoryview(chunk.merged(formula, dtype)[0].view(np.uint8))
        assert (tmp_path / "out").read_bytes()[8:] == wanted
        assert found == [("w", 0, wanted.nbytes, checksum(wanted))]


@pytest.mark.parametrize(
    ("threads", "in_files", "chunks"),
    [(1, True, 8), (2, True, 8), (4, True, 4), (16, True, 1), (64, True, 1), (2, False, 1)],
)
def test_chunks_are_longer_where_every_thread_still_gets_eight(
    threads: int, in_files: bool, chunks: int
) -> None:
    site = Site("w", 128 * stream.CHUNK, 0, 1, ("a",), {}, 0)
    source: Any = SimpleNamespace(in_files=in_files)
    workers: Any = SimpleNamespace(threads=threads)
    made = Stream([[site]], source, workers, lambda _: 1, anywhere=lambda _: True)
    assert [chunk.size for chunk in made._chunks([site], {})] == (
        [chunks * stream.CHUNK] * (128 // chunks)
    )
