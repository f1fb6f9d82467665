"""Digests of shards are those of the files, in whatever order and however often written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from sigmerge.checkpoints import written
from sigmerge.checkpoints.written import ShardBytes, Written
from sigmerge.files import digests
from sigmerge.kernels.checksum import checksum

HEADER, SIZES = 5, {"a": 9, "b": 0, "c": 40, "d": 16, "e": 1}


@pytest.fixture(autouse=True)
def short_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "LEAF", 16)
    monkeypatch.setattr(written, "LEAF", 16)
    monkeypatch.setattr(written, "READ_BACK", 3)


@contextmanager
def opened(file: Path, threads: int) -> Iterator[tuple[Written, dict[str, ShardBytes], int]]:
    places, at = {}, HEADER
    for name, size in SIZES.items():
        places[name], at = ShardBytes(0, at, size), at + size
    handle = os.open(file, os.O_CREAT | os.O_RDWR)
    os.pwrite(handle, b"\1" * HEADER, 0)
    os.ftruncate(handle, at)
    made = Written(places, [handle], [at], threads)
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
        (found,) = made.sha256()
    assert found == digests.sha256([file])[file]
    assert found.startswith(digests.TREE)
