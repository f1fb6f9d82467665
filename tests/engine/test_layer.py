"""A decoder block as tiles."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.reader import Reader
from sigmerge.engine import layer
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
        return self.reader.raw(
            Tensor(tensor, "F32", (SIZES[tensor],), self.folder / member, begin, end)
        )


def test_a_tile_in_a_file_is_what_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "CLAIM_TILE", 64)
    sites = [Site(name, size, 0, 1, ("a", "b"), {}, 0, (size,)) for name, size in SIZES.items()]
    with Reader() as reader:
        source: Any = InFiles(tmp_path, reader, "a", "b", "reference")
        block = layer.LayerBlock(0, sites, ("a", "b"), source, InFiles(tmp_path, reader, "anchor"))
        assert [last - first for first, last in block.tiles] == [64, 6, 64, 64, 64, 8]
        for member, places in enumerate(block.all_files):
            for tile, (descriptor, position) in enumerate(places.tolist()):
                first, last = block.tiles[tile]
                mapped = ctypes.string_at(
                    int(block.all_addresses[member, tile]), 4 * (last - first)
                )
                assert os.pread(descriptor, len(mapped), position) == mapped
