"""SHA-256 side by side is hashlib's: in lanes on any processor, by turns where it can be."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from sigmerge.kernels import sha256 as lanes
from sigmerge.kernels.sha256 import HASH_LANES, LANE_WINDOW, hashes, lane_digests

needs_instructions = pytest.mark.skipif(
    not lanes._has_instructions(), reason="no ARM processor with instructions for SHA-256"
)


@pytest.fixture(
    params=[False, pytest.param(True, marks=needs_instructions)], ids=["in lanes", "by turns"]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_has_instructions", lambda: request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("windows", [1, 3, 4, 9])
@pytest.mark.parametrize("before", [0, 1, 64])
def test_every_lane_is_the_digest_of_its_run(tmp_path: Path, windows: int, before: int) -> None:
    length = windows * LANE_WINDOW
    content = np.random.default_rng(windows).bytes(before + HASH_LANES * length)
    file = tmp_path / "runs"
    file.write_bytes(content)
    handle = os.open(file, os.O_RDONLY)
    runs = [content[before + lane * length :][:length] for lane in range(HASH_LANES)]
    wanted = b"".join(hashlib.sha256(run).digest() for run in runs)
    assert lane_digests(handle, before, length) == wanted
    assert lane_digests(handle, before + 1, length) is None
    os.close(handle)


@pytest.mark.parametrize("reason", ["_is_wide", "_has_instructions"])
def test_other_lengths_are_left_to_hashlib(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(lanes, "_is_wide", lambda: False)
    monkeypatch.setattr(lanes, "_has_instructions", lambda: False)
    assert not hashes(LANE_WINDOW, HASH_LANES * LANE_WINDOW)
    monkeypatch.setattr(lanes, reason, lambda: True)
    assert hashes(LANE_WINDOW, HASH_LANES * LANE_WINDOW)
    assert not hashes(LANE_WINDOW, HASH_LANES * LANE_WINDOW - 1)
    assert not hashes(LANE_WINDOW // 2, HASH_LANES * LANE_WINDOW // 2)


@pytest.mark.parametrize("name", ["NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"])
def test_code_for_another_processor_has_no_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "generic")
    assert not lanes._has_instructions.__wrapped__()
