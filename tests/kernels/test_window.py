"""Reading back with checksums."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from sigmerge.kernels import STRIP, window
from sigmerge.kernels.checksum import checksum
from sigmerge.kernels.window import (
    FilePlace,
    read_summed,
)


def test_a_loop_of_long_strips_reads_memory():
    place = FilePlace(7, 0, 2)
    assert window.window([place], window.LONGEST_WINDOW + 1) is window.IN_MEMORY
    assert window.window([None], STRIP) is window.IN_MEMORY
    assert window.window([None, place], 3000).files[:, :4].tolist() == [[1, 7, 0, 2]]
    assert window.window([place], 3000).length % 3000 == 0


@pytest.mark.parametrize("seed", range(8))
def test_checksums_of_a_file_are_those_of_its_pieces(tmp_path: Path, seed: int) -> None:
    """Pieces begin anywhere, and what is read at a time ends anywhere."""
    rng, file = np.random.default_rng(seed), tmp_path / "bytes"
    content = rng.bytes(3 * window._IN_CACHE + 5)
    file.write_bytes(content)
    ends = np.sort(rng.integers(0, len(content) + 1, 8)).reshape(-1, 2)
    ends[1, 0] -= ends[1, 0] % 8  # one has its words where words lie, the others mostly not
    cuts = [0, *np.sort(rng.integers(0, len(content), 6)).tolist(), len(content)]
    totals, handle = np.zeros(len(ends), np.uint64), os.open(file, os.O_RDONLY)
    for begin, end in itertools.pairwise(cuts):
        assert read_summed(handle, begin, end - begin, ends, totals).tobytes() == content[begin:end]
    wanted = [checksum(memoryview(content)[first:last]) for first, last in ends]
    assert totals.tolist() == wanted
    with pytest.raises(window.ReadFailed):
        read_summed(handle, 0, len(content) + 1, ends, totals)
    os.close(handle)
    with file.open("ab") as stream, pytest.raises(window.ReadFailed):  # which cannot be read
        read_summed(stream.fileno(), 0, 1, ends, totals)
