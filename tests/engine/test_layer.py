"""A decoder block as tiles."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sigmerge._native import checksum
from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.reader import Reader
from sigmerge.core import claim
from sigmerge.core.dtypes import F32, FilePlace
from sigmerge.engine import layer
from sigmerge.method.occupancy import Update, admission
from sigmerge.operators.base import Site
from tests.operators.driver import MemorySource

SIZES = {"v": 70, "w": 200}


class InFiles(MemorySource):
    """Members of two tensors, which lie one behind the other in a file of each."""

    def __init__(self, folder: Path, reader: Reader, *members: str) -> None:
        self.folder, self.reader = folder, reader
        for seed, name in enumerate(members):
            values = np.random.default_rng(seed).normal(0, 1, sum(SIZES.values()))
            (folder / name).write_bytes(bytes(8) + values.astype(np.float32).tobytes())

    def raw(self, member: str, tensor: str) -> Any:
        begin = 8 if tensor == "v" else 8 + 4 * SIZES["v"]
        end = begin + 4 * SIZES[tensor]
        return self.reader.span(
            Tensor(tensor, "F32", (SIZES[tensor],), self.folder / member, begin, end)
        )


def test_a_tile_lies_where_its_row_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "CLAIM_TILE", 64)
    sites = [Site(name, size, 0, 1, ("a", "b"), {}, 0, (size,)) for name, size in SIZES.items()]
    with Reader() as reader:
        source: Any = InFiles(tmp_path, reader, "a", "b", "reference")
        block = layer.LayerBlock(0, sites, ("a", "b"), source, InFiles(tmp_path, reader, "anchor"))
        assert [last - first for first, last in block.tiles] == [64, 6, 64, 64, 64, 8]
        for name, rows in zip(("a", "b", "reference", "anchor"), block.all_sources, strict=True):
            whole = b"".join(source.raw(name, site.tensor).array().tobytes() for site in sites)
            for (first, last), (kind, *place) in zip(block.tiles, rows.tolist(), strict=True):
                assert kind == F32
                assert (
                    os.pread(place[0], 4 * (last - first), place[1]) == whole[4 * first : 4 * last]
                )


class Target:
    """A file that begins with a number, and what is said to be written there."""

    def __init__(self, file: Path, flags: int = os.O_RDWR) -> None:
        file.touch()
        self.descriptor, self.notes = os.open(file, flags), list[tuple[Any, ...]]()

    def target(self, tensor: str) -> FilePlace:
        return FilePlace(self.descriptor, 24, 2)

    def written(self, *note: Any) -> None:
        self.notes.append(note)


class Noted(MemorySource):
    """Members in memory, and what was read of them for the last time."""

    def __init__(self, members: Any) -> None:
        super().__init__(members)
        self.read = list[tuple[Any, ...]]()

    def done(self, tensor: str, start: int, stop: int, *_: Any, **__: Any) -> None:
        self.read.append((tensor, start, stop))


@pytest.fixture
def claimed() -> tuple[layer.LayerBlock, Any, Any, Noted]:
    """A tensor that is written in several turns, and has an odd end; a third of it is claimed."""
    size, rng = (2 << 18) + 70_001, np.random.default_rng(0)
    some = {n: {"w": rng.normal(0, 1, size)} for n in ("a", "reference", "anchor")}
    source, sites = Noted(some), [Site("w", size, 0, 1, ("a",), {}, 0, (size,))]
    block = layer.LayerBlock(0, sites, ("a",), source, source)  # type: ignore[arg-type]
    owner = np.full(size, claim.FREE, np.uint8)
    owner[::3] = 0
    return block, admission(block, [0], Update(0.5)), owner, source


@pytest.mark.parametrize("tiles", [layer.PIECE, 3], ids=["at once", "in pieces"])
def test_what_a_loop_writes_is_what_it_gives(
    tmp_path: Path, claimed: Any, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, update, owner, source = claimed
    monkeypatch.setattr(layer, "PIECE", tiles)
    again = layer.LayerBlock(0, block._sites, ("a",), source, source)
    target, expected = Target(tmp_path / "file"), b""
    for piece in again.pieces:
        values = again.repaired(piece, update, owner, "BF16").tobytes()
        assert again.wrote(piece, update, owner, "BF16", target)
        note = ("w", piece.start, len(values), checksum(memoryview(values)))
        assert target.notes.pop() == note
        assert source.read[-4:] == [("w", piece.start, piece.start + piece.size)] * 4
        expected += values
    os.close(target.descriptor)
    assert len(again.pieces) == -(-len(block.tiles) // tiles)
    assert (tmp_path / "file").read_bytes()[24:] == expected


def test_what_cannot_be_written_is_not_said_to_be(tmp_path: Path, claimed: Any) -> None:
    block, update, owner, source = claimed
    target = Target(tmp_path / "file", os.O_RDONLY)
    assert not block.wrote(block.pieces[0], update, owner, "BF16", target)
    os.close(target.descriptor)
    assert not target.notes and not source.read
