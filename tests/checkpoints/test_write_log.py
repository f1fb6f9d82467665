"""What is read back of shards: damaged tensors, and digests, which are those of the files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sigmerge._native import checksum
from sigmerge.checkpoints import write_log
from sigmerge.checkpoints.write_log import Slot, Written
from sigmerge.files import digests, safe_open

HEADER, SIZES = 5, {"a": 9, "b": 0, "c": 40, "d": 16, "e": 1, "f": 9, "g": 17, "h": 14, "i": 3}
"""f ends where a piece does, g a byte behind the next one's beginning, h a byte before its end."""


RUN, LEAVES = write_log.READ_BACK, digests.LEAF


@pytest.fixture(autouse=True)
def short_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "RUN_BYTES", 16)
    monkeypatch.setattr(digests, "LEAF", 4)
    monkeypatch.setattr(write_log, "READ_BACK", 8)
    monkeypatch.setattr(write_log, "GIVEN", 16)
    monkeypatch.setattr(write_log, "SUMMED_AT_ONCE", 3)


@contextmanager
def opened(file: Path, durable: bool = False) -> Iterator[tuple[Written, dict[str, Slot], int]]:
    places, at = {}, HEADER
    for name, size in SIZES.items():
        places[name], at = Slot(0, at, "U8", size), at + size
    handle = os.open(file, os.O_CREAT | os.O_RDWR)
    os.pwrite(handle, b"\1" * HEADER, 0)
    os.ftruncate(handle, at)
    made = Written(places, [handle], [at], durable=durable)
    try:
        yield made, places, handle
    finally:
        made.close()
        os.close(handle)


def put(made: Written, place: Slot, handle: int, name: str, content: bytes) -> None:
    os.pwrite(handle, content, place.begin)
    made.note(name, 0, len(content), checksum(memoryview(content)))
    made.fresh([name])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("at_once", [1, 3, 8, 100])
def test_digests_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, at_once: int
) -> None:
    rng, file = np.random.default_rng(seed), tmp_path / "shard"
    monkeypatch.setattr(write_log, "SUMMED_AT_ONCE", at_once)
    with opened(file) as (made, places, handle), ThreadPoolExecutor(3) as pool:
        # Every tensor once, and some again with other bytes.
        names = [*rng.permutation(list(SIZES)), *rng.choice(list(SIZES), 3)]
        for name in names:
            put(made, places[name], handle, name, rng.bytes(SIZES[name]))
        assert made.missing() == []
        damaged, (found,) = made.read_back(pool)
    assert damaged == []
    assert found == digests.file_digests([file])[file]
    assert found.startswith(digests.TREE)


class AtOnce:
    """In the place of a thread, so that it is known when the disk is given a run."""

    def __init__(self, *_: object, **__: object) -> None:
        self.begun: list[int] = []

    def submit(self, _: Callable[[int, int], None], shard: int, number: int) -> None:
        self.begun.append(16 * number)

    def shutdown(self, **_: object) -> None:
        pass


def runs_of(place: Slot) -> set[int]:
    """Where the runs begin that hold a byte of a tensor, byte by byte."""
    return {byte // 16 * 16 for byte in range(place.begin, place.begin + place.nbytes)}


@pytest.mark.parametrize("seed", range(8))
def test_the_disk_gets_a_run_when_its_last_tensor_is_complete_and_again_when_one_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, file = np.random.default_rng(seed), tmp_path / "shard"
    monkeypatch.setattr(write_log, "ThreadPoolExecutor", AtOnce)
    with opened(file, durable=True) as (made, places, handle):
        pool: Any = made._disk and made._disk._pool
        complete: set[str] = set()
        for name in [*rng.permutation(list(SIZES)), *rng.choice(list(SIZES), 4)]:
            pool.begun.clear()
            put(made, places[name], handle, name, rng.bytes(SIZES[name]))
            complete.add(name)
            lacking = set[int]().union(*(runs_of(places[n]) for n in set(SIZES) - complete))
            assert sorted(pool.begun) == sorted(runs_of(places[name]) - lacking)


def test_a_tensor_that_is_written_in_two_parts_is_complete_with_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_log, "ThreadPoolExecutor", AtOnce)
    with opened(tmp_path / "shard", durable=True) as (made, places, handle):
        pool: Any = made._disk and made._disk._pool
        for position, size in ((0, 25), (25, 15)):
            assert "c" in made.missing() and pool.begun == []
            os.pwrite(handle, bytes(size), places["c"].begin + position)
            made.note("c", position, size, checksum(memoryview(bytes(size))))
            made.fresh(["c"])
        assert "c" not in made.missing()
        assert pool.begun == [16, 32]  # 14 … 53 is c's; d and a have bytes in the outer runs


@pytest.mark.parametrize("durable", [True, False])
def test_the_disk_gets_every_run_early_if_the_result_is_to_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        safe_open,
        "_sync_range",
        lambda: lambda handle, begin, size, how: asked.append((begin, size)),
    )
    with opened(tmp_path / "shard", durable) as (made, places, handle):
        for name, size in SIZES.items():
            put(made, places[name], handle, name, bytes(size))
        if made._disk:
            made._disk._pool.shutdown()
    whole = [(begin, 16) for begin in range(0, HEADER + sum(SIZES.values()), 16)]
    assert sorted(asked) == (whole if durable else [])


def test_asking_the_disk_for_what_is_no_file_does_no_harm(tmp_path: Path) -> None:
    one, other = os.pipe()
    safe_open.begin_sync(other, 0, 100)
    os.write(other, b"still open")
    assert os.read(one, 100) == b"still open"
    os.close(one)
    os.close(other)


@pytest.mark.parametrize("at_once", [3, 8, 32])
def test_a_byte_that_changed_damages_its_tensor_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Words of tensors lie across the ends of what is read at a time, and of runs."""
    rng, file = np.random.default_rng(at_once), tmp_path / "shard"
    monkeypatch.setattr(write_log, "SUMMED_AT_ONCE", at_once)
    with opened(file) as (made, places, handle), ThreadPoolExecutor(3) as pool:

        def damaged() -> list[str]:
            return made.read_back(pool)[0]

        for name, size in SIZES.items():
            content, first = rng.bytes(size), 24 if name == "c" else size
            os.pwrite(handle, content, places[name].begin)
            for at, piece in ((0, content[:first]), (first, content[first:])):
                if piece or not at:
                    made.note(name, at, len(piece), checksum(memoryview(piece)))
        assert made.missing() == damaged() == []
        for name, place in places.items():
            for position in range(place.begin, place.begin + place.nbytes):
                [before] = os.pread(handle, 1, position)
                os.pwrite(handle, bytes([before ^ 1 << int(rng.integers(8))]), position)
                assert damaged() == [name]
                os.pwrite(handle, bytes([before]), position)
        os.ftruncate(handle, places["d"].begin)
        assert damaged() == list(SIZES)  # the digest would be that of fewer bytes


def test_what_cannot_be_read_is_damaged(tmp_path: Path) -> None:
    """Also where the bytes that stand for it have the checksum of what was written."""
    file = tmp_path / "shard"
    with opened(file) as (made, places, handle), ThreadPoolExecutor(1) as pool:
        for name, size in SIZES.items():
            put(made, places[name], handle, name, b"\xff" * size)
        assert made.read_back(pool)[0] == []
        known = {"i": [(0, SIZES["i"], checksum(memoryview(b"\xff" * SIZES["i"])))]}
        assert made.restore(known)
        os.ftruncate(handle, places["i"].begin)
        assert "i" in made.read_back(pool)[0]
        assert not made.restore(known)


def test_a_header_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    """Here no tensor has a byte in the file."""
    handle = os.open(tmp_path / "shard", os.O_CREAT | os.O_RDWR)
    os.ftruncate(handle, 20)
    made = Written({"a": Slot(0, 20, "U8", 0)}, [handle], [20])
    made.note("a", 0, 0, 0)
    with ThreadPoolExecutor(1) as pool:
        assert made.read_back(pool)[0] == []
        os.ftruncate(handle, 10)
        assert made.read_back(pool)[0] == ["a"]
    os.close(handle)


def test_reading_back_tells_how_far_it_is(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    with opened(tmp_path / "shard") as (made, _, _), ThreadPoolExecutor(2) as pool:
        made.read_back(pool, lambda *amount: told.append(amount))
    end = HEADER + sum(SIZES.values())
    assert told == [("reading back", min(at + 8, end), end) for at in range(0, end, 8)]


def test_runs_hold_whole_leaves() -> None:
    assert RUN % LEAVES == 0


@pytest.mark.parametrize("sizes", [(40, 16), (9, 40)])
def test_every_shard_has_the_digest_that_its_own_length_asks_for(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    shards = [tmp_path / "one", tmp_path / "other"]
    for file, size in zip(shards, sizes, strict=True):
        file.write_bytes(bytes(range(size)))
    handles = [os.open(file, os.O_RDWR) for file in shards]
    places = {file.name: Slot(i, 0, "U8", sizes[i]) for i, file in enumerate(shards)}
    made = Written(places, handles, sizes)
    for file, place, handle in zip(shards, places.values(), handles, strict=True):
        put(made, place, handle, file.name, file.read_bytes())
    with ThreadPoolExecutor(2) as pool:
        damaged, found = made.read_back(pool)
    made.close()
    for handle in handles:
        os.close(handle)
    assert damaged == []
    assert found == list(digests.file_digests(shards).values())
    assert [digest.startswith(digests.TREE) for digest in found] == [size > 16 for size in sizes]


@pytest.mark.parametrize(
    "piece", [[[0, -4, 0], [-4, 8, 0]], [[0, 4.0, 0]], [[0, True, 0], [1, 3, 0]], [[0, 4, "0"]]]
)
def test_pieces_that_no_run_noted_cover_nothing(piece: list[list[Any]]) -> None:
    """Though their lengths add up; a journal's line may say anything."""
    assert write_log._covers([[0, 1, 7], [1, 3, 9]], 4)
    assert not write_log._covers(piece, 4)
