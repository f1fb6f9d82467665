"""Digests of shards are those of the files, in whatever order and however often written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sigmerge.checkpoints import written
from sigmerge.checkpoints.written import ShardBytes, Written
from sigmerge.files import apart, digests, regular
from sigmerge.kernels.checksum import checksum

HEADER, SIZES = 5, {"a": 9, "b": 0, "c": 40, "d": 16, "e": 1, "f": 9, "g": 17, "h": 14, "i": 3}
"""f ends where a piece does, g a byte behind the next one's beginning, h a byte before its end."""


@pytest.fixture(autouse=True)
def short_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "RUN_BYTES", 16)
    monkeypatch.setattr(digests, "LEAF", 4)
    monkeypatch.setattr(apart, "_BUFFER", 3)
    monkeypatch.setattr(written, "RUN_BYTES", 16)
    monkeypatch.setattr(written, "READ_BACK", 8)


@contextmanager
def opened(
    file: Path, threads: int, durable: bool = False
) -> Iterator[tuple[Written, dict[str, ShardBytes], int]]:
    places, at = {}, HEADER
    for name, size in SIZES.items():
        places[name], at = ShardBytes(0, at, size), at + size
    handle = os.open(file, os.O_CREAT | os.O_RDWR)
    os.pwrite(handle, b"\1" * HEADER, 0)
    os.ftruncate(handle, at)
    made = Written(places, [handle], [at], threads, durable=durable)
    try:
        yield made, places, handle
    finally:
        made.close()
        os.close(handle)


def put(made: Written, place: ShardBytes, handle: int, name: str, content: bytes) -> None:
    os.pwrite(handle, content, place.begin)
    made.note(name, 0, len(content), checksum(memoryview(content)))
    made.fresh([name])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("threads", [1, 3])
def test_digests_are_those_of_the_file(tmp_path: Path, seed: int, threads: int) -> None:
    rng, file = np.random.default_rng(seed), tmp_path / "shard"
    with opened(file, threads) as (made, places, handle):
        # Every tensor once, and some again with other bytes.
        names = [*rng.permutation(list(SIZES)), *rng.choice(list(SIZES), 3)]
        for name in names:
            put(made, places[name], handle, name, rng.bytes(SIZES[name]))
        assert made.missing() == []
        (found,) = made.digests()
    assert found == digests.file_digests([file])[file]
    assert found.startswith(digests.TREE)


class AtOnce:
    """In the place of threads, so that what is hashed too early is hashed wrongly every time."""

    def __init__(self, *_: object, **__: object) -> None:
        self.begun: list[int] = []

    def submit(self, hash_: Callable[[Any], bytes], piece: Any) -> Future[bytes]:
        self.begun.append(piece.begin)
        done: Future[bytes] = Future()
        done.set_result(hash_(piece))
        return done

    def shutdown(self, **_: object) -> None:
        pass


def pieces_of(place: ShardBytes) -> set[int]:
    """Where the pieces begin that hold a byte of a tensor, byte by byte."""
    return {byte // 16 * 16 for byte in range(place.begin, place.begin + place.nbytes)}


@pytest.mark.parametrize("seed", range(8))
def test_a_piece_is_hashed_when_its_last_tensor_is_complete_and_again_when_one_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, file = np.random.default_rng(seed), tmp_path / "shard"
    monkeypatch.setattr(written, "ThreadPoolExecutor", AtOnce)
    with opened(file, 1) as (made, places, handle):
        pool: Any = made._hasher._pool
        complete: set[str] = set()
        for name in [*rng.permutation(list(SIZES)), *rng.choice(list(SIZES), 4)]:
            pool.begun.clear()
            put(made, places[name], handle, name, rng.bytes(SIZES[name]))
            complete.add(name)
            lacking = set[int]().union(*(pieces_of(places[n]) for n in set(SIZES) - complete))
            assert sorted(pool.begun) == sorted(pieces_of(places[name]) - lacking)
        pool.begun.clear()
        (found,) = made.digests()
        assert pool.begun == []  # every piece has a tensor, and all of them were hashed
    assert found == digests.file_digests([file])[file]


def test_a_tensor_that_is_written_in_two_parts_is_complete_with_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written, "ThreadPoolExecutor", AtOnce)
    with opened(tmp_path / "shard", 1) as (made, places, handle):
        pool: Any = made._hasher._pool
        for position, size in ((0, 25), (25, 15)):
            assert "c" in made.missing() and pool.begun == []
            os.pwrite(handle, bytes(size), places["c"].begin + position)
            made.note("c", position, size, checksum(memoryview(bytes(size))))
            made.fresh(["c"])
        assert "c" not in made.missing()
        assert pool.begun == [16, 32]  # 14 … 53 is c's; d and a have bytes in the outer pieces


@pytest.mark.parametrize("durable", [True, False])
def test_the_disk_gets_every_piece_early_if_the_result_is_to_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        regular, "_sync_range", lambda: lambda handle, begin, size, how: asked.append((begin, size))
    )
    with opened(tmp_path / "shard", 2, durable) as (made, places, handle):
        for name, size in SIZES.items():
            put(made, places[name], handle, name, bytes(size))
        made.digests()
    end = HEADER + sum(SIZES.values())
    whole = [(begin, min(16, end - begin)) for begin in range(0, end, 16)]
    assert sorted(asked) == (whole if durable else [])


def test_asking_the_disk_for_what_is_no_file_does_no_harm(tmp_path: Path) -> None:
    one, other = os.pipe()
    regular.begin_sync(other, 0, 100)
    os.write(other, b"still open")
    assert os.read(one, 100) == b"still open"
    os.close(one)
    os.close(other)


@pytest.mark.parametrize("seed", range(3))
def test_a_byte_that_changed_damages_its_tensor_alone(tmp_path: Path, seed: int) -> None:
    """Tensors and their pieces are longer than what is read back in one call."""
    rng, file = np.random.default_rng(seed), tmp_path / "shard"
    with opened(file, 2) as (made, places, handle), ThreadPoolExecutor(3) as pool:
        for name, size in SIZES.items():
            content, first = rng.bytes(size), 24 if name == "c" else size
            os.pwrite(handle, content, places[name].begin)
            for at, piece in ((0, content[:first]), (first, content[first:])):
                if piece or not at:
                    made.note(name, at, len(piece), checksum(memoryview(piece)))
        assert made.missing() == made.damaged(pool) == []
        for name, place in places.items():
            for position in range(place.begin, place.begin + place.nbytes):
                [before] = os.pread(handle, 1, position)
                os.pwrite(handle, bytes([before ^ 1 << int(rng.integers(8))]), position)
                assert made.damaged(pool) == [name]
                os.pwrite(handle, bytes([before]), position)
        end = os.fstat(handle).st_size
        os.ftruncate(handle, end - 1)
        assert made.damaged(pool) == ["i"]
        os.ftruncate(handle, places["d"].begin)
        assert made.damaged(pool) == list("defghi")


def test_what_cannot_be_read_is_damaged(tmp_path: Path) -> None:
    """Also where the bytes that stand for it have the checksum of what was written."""
    file = tmp_path / "shard"
    with opened(file, 1) as (made, places, handle), ThreadPoolExecutor(1) as pool:
        for name, size in SIZES.items():
            put(made, places[name], handle, name, b"\xff" * size)
        assert made.damaged(pool) == []
        os.ftruncate(handle, places["i"].begin)
        assert made.damaged(pool) == ["i"]


@pytest.mark.parametrize("sizes", [(40, 16), (9, 40)])
def test_every_shard_has_the_digest_that_its_own_length_asks_for(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    shards = [tmp_path / "one", tmp_path / "other"]
    for file, size in zip(shards, sizes, strict=True):
        file.write_bytes(bytes(range(size)))
    handles = [os.open(file, os.O_RDWR) for file in shards]
    places = {file.name: ShardBytes(i, 0, sizes[i]) for i, file in enumerate(shards)}
    made = Written(places, handles, sizes, 1)
    for file, place, handle in zip(shards, places.values(), handles, strict=True):
        put(made, place, handle, file.name, file.read_bytes())
    found = made.digests()
    made.close()
    for handle in handles:
        os.close(handle)
    assert found == list(digests.file_digests(shards).values())
    assert [digest.startswith(digests.TREE) for digest in found] == [size > 16 for size in sizes]
