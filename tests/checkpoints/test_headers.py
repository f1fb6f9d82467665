"""The safetensors container: every damage to it is refused in words, and no header lies."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sigmerge.checkpoints.blocks import find_stack, natural
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.header import read_header
from sigmerge.errors import PoolError
from tests.checkpoints.damage import (
    NAME,
    Break,
    check_refused,
    edit_header,
    put_header,
    truncated,
    weights_file,
)
from tests.pools import (
    PoolOnDisk,
    draw,
    shapes,
    write_member,
)


def shift(header: dict[str, Any], by: int) -> None:
    """Moves the second tensor's place by so many bytes, its length kept."""
    entry = sorted(
        (e for n, e in header.items() if n != "__metadata__"), key=lambda e: e["data_offsets"]
    )[1]
    entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]


def duplicate_name(pool: PoolOnDisk) -> None:
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    put_header(pool, f'{{"a":{entry},"a":{entry}}}'.encode(), b"\0" * 4)


BROKEN: dict[str, tuple[Break, list[str]]] = {
    "truncated": (truncated, ["math", "model.safetensors", "truncated", "download it again"]),
    "longer than announced": (
        lambda p: weights_file(p).open("ab").write(b"junk"),
        ["math", "4 bytes follow the last tensor"],
    ),
    "overlapping": (edit_header(lambda h: shift(h, -4)), ["math", "overlaps the one before it"]),
    "gap": (edit_header(lambda h: shift(h, 4)), ["math", "4 unclaimed bytes before"]),
    "duplicate name": (duplicate_name, ["math", "a name occurs twice"]),
    "header too long": (
        lambda p: weights_file(p).write_bytes(struct.pack("<Q", 2**62) + b"{}"),
        ["math", "the header is 4611686018427387904 bytes long"],
    ),
    "no header": (lambda p: weights_file(p).write_bytes(b"\1\2\3"), ["math", "the header is"]),
    "empty file": (lambda p: weights_file(p).write_bytes(b""), ["math", "the file has 0"]),
    "header not JSON": (lambda p: put_header(p, b"{nope"), ["math", "not valid JSON"]),
    "header too deep": (lambda p: put_header(p, b"[" * 200_000), ["math", "not valid JSON"]),
    "header a list": (lambda p: put_header(p, b"[]"), ["math", "not a JSON object"]),
    "no tensor": (lambda p: put_header(p, b"{}"), ["math", "hold no tensor"]),
    "malformed entry": (
        edit_header(lambda h: h[NAME].pop("shape")),
        ["math", NAME, "malformed header entry"],
    ),
    "fractional shape": (
        edit_header(lambda h: h[NAME].update(shape=[32.5, 16])),
        ["math", NAME, "malformed header entry"],
    ),
    "infinite offset": (
        edit_header(lambda h: h[NAME].update(data_offsets=[0, float("inf")])),
        ["math", NAME, "malformed header entry"],
    ),
    "negative shape": (
        edit_header(lambda h: h[NAME].update(shape=[-32, -16])),
        ["math", NAME, "negative shape"],
    ),
    "shape against bytes": (
        edit_header(lambda h: h[NAME].update(shape=[31, 16])),
        ["math", NAME, "does not fill"],
    ),
    "name of 300 kB": (
        edit_header(lambda h: h.update({"x" * 300_000: h.pop(NAME)})),
        ["math", "has more than 1000 characters"],
    ),
    "shape of long numbers": (
        edit_header(lambda h: h[NAME].update(shape=[10**4000] * 30)),
        ["math", NAME, "has a shape or offset above"],
    ),
    "shape of numbers too long for Python": (
        lambda p: put_header(p, b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}"),
        ["math", "not valid JSON"],
    ),
    "too many dimensions": (
        edit_header(lambda h: h[NAME].update(shape=[1] * 100_000)),
        ["math", NAME, "more than 32 dimensions"],
    ),
    "shape that is text": (
        edit_header(lambda h: h[NAME].update(shape="ab")),
        ["math", NAME, "malformed header entry"],
    ),
    "header of 95 MB": (
        lambda p: put_header(p, b" " * 95_000_000),
        ["math", "the header has 95000000 bytes, more than 25000000"],
    ),
    "unknown dtype": (
        edit_header(lambda h: h[NAME].update(dtype="F3")),
        ["math", NAME, "unknown dtype 'F3'"],
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_files(pool: PoolOnDisk, broken: str) -> None:
    check_refused(pool, *BROKEN[broken])


def test_unaligned_data_is_read_right(tmp_path: Path) -> None:
    """A header of odd length puts every tensor on an odd address."""
    from sigmerge.checkpoints.reader import Reader

    values = np.arange(5, dtype=np.float32)
    header = json.dumps({"x": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}).encode()
    header += b" " * ((len(header) + 1) % 2)
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    tensor = read_header(file)["x"]
    assert tensor.begin % 2 == 1
    np.testing.assert_array_equal(Reader().raw(tensor), values)
    np.testing.assert_array_equal(Reader().raw(tensor, 2, 4), values[2:4])


def test_no_header_makes_the_reader_crash(tmp_path: Path) -> None:
    """Random damage to a sound header is found, or harmless; it never escapes as another error."""
    good = write_member(tmp_path / "m", draw(shapes(layers=1), 0), layers=1)
    raw = bytearray((good / "model.safetensors").read_bytes())
    length = struct.unpack("<Q", raw[:8])[0]
    rng = np.random.default_rng(0)
    refusals = 0
    for _ in range(400):
        bad = bytearray(raw)
        for place in rng.integers(0, 8 + length, rng.integers(1, 4)):
            bad[place] = rng.integers(0, 256)
        file = tmp_path / "bad.safetensors"
        file.write_bytes(bad)
        try:
            read_header(file)
        except PoolError:
            refusals += 1
    assert refusals > 200


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.²",
        "model.layers.².w",
        "model.layers.٣.w",
        "model.layers." + "9" * 900 + ".w",
        "a" * 999,
        "." * 999,
        "1." * 499,
        "²" * 300,
    ],
)
def test_odd_names_are_read_and_sorted(tmp_path: Path, name: str) -> None:
    write_member(tmp_path / "m", {name: draw({"x": (2,)}, 0)["x"]}, layers=0)
    opened = open_checkpoint(tmp_path / "m")
    assert opened.stack.depth == 0 and opened.stack.block_of(name) is None
    assert sorted([name, "model.layers.2.w"], key=natural)


def test_blocks_are_sorted_by_number() -> None:
    names = ["h.10.w", "h.2.w", "h.02.w", "h.w", "lm", "h.1.w", "h.1.10", "h.1.9"]
    assert sorted(names, key=natural) == [
        "h.1.9", "h.1.10", "h.1.w", "h.02.w", "h.2.w", "h.10.w", "h.w", "lm"
    ]  # fmt: skip


@pytest.mark.parametrize("length", [10**4, 10**6])
def test_a_long_name_is_parsed_in_linear_time(length: int) -> None:
    """Quadratic work would take hours for the longer one."""
    assert find_stack([("a" * length, 1), ("1." * length, 1), ("a.1" * length, 1)]).depth <= 1
