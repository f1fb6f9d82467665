"""Damage, by kind of file. All chance comes from the generator that is passed in."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Rng = np.random.Generator

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 5, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**4000, 0.5, -0.0,
    1e308, float("inf"), float("nan"), "", "x", "²", "٣", "\0", "../x", "/etc/passwd", "a" * 300,
    "a" * 5000, "\ud800", [], [[]], {}, {"a": {}}, ["a", 1, None], [0] * 1000, {"": ""}, "F32",
    "BF16", "1e9",
]  # fmt: skip
"""Values that a field does not expect."""


def pick(rng: Rng, choices: list[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def mutate_bytes(data: bytes, rng: Rng) -> bytes:
    """Flip, cut, insert, repeat, zero."""
    content = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(len(content) + 1))
        length = int(rng.integers(1, 65))
        kind = int(rng.integers(6))
        if kind == 0 and content:
            content[min(at, len(content) - 1)] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            del content[at:]
        elif kind == 2:
            content[at:at] = rng.bytes(length)
        elif kind == 3:
            content[at:at] = content[at : at + length]
        elif kind == 4:
            content[at : at + length] = bytes(len(content[at : at + length]))
        else:
            del content[at : at + length]
    return bytes(content)


def mutate_value(value: Any, rng: Rng, depth: int = 0) -> Any:
    """A JSON value with one place changed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = pick(rng, list(value))
        kind = int(rng.integers(8))
        changed = dict(value)
        if kind == 0:
            del changed[key]
        elif kind == 1:
            changed[pick(rng, ["", "²", "a" * 300, "a" * 3000, "x.0.y", "\0", "../x"])] = changed[
                key
            ]
        elif kind == 2:
            changed = {**changed, key: nested(int(rng.integers(1, 300)))}
        else:
            changed[key] = mutate_value(changed[key], rng, depth + 1)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = int(rng.integers(len(value)))
        kind = int(rng.integers(5))
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return [*value, *value]
        return [*value[:at], mutate_value(value[at], rng, depth + 1), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + pick(rng, [-8, -4, -1, 1, 4, 8, 2**32, -(2**32)])
    return pick(rng, ODD)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def dumped(value: Any) -> bytes:
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):  # numbers too long for text
        return b"{" * 1000


def mutate_json(data: bytes, rng: Rng) -> bytes:
    if rng.random() < 0.25:
        return mutate_bytes(data, rng)
    value = json.loads(data)
    for _ in range(int(rng.integers(1, 4))):
        value = mutate_value(value, rng)
    return dumped(value)


def mutate_lines(data: bytes, rng: Rng) -> bytes:
    """JSON lines: one of them changed, dropped, repeated or moved."""
    lines = data.splitlines()
    at = int(rng.integers(len(lines)))
    kind = int(rng.integers(5))
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, lines[at])
    elif kind == 2:
        lines.insert(at, lines.pop(int(rng.integers(len(lines)))))
    else:
        lines[at] = mutate_json(lines[at], rng)
    return b"\n".join(lines) + b"\n"


def mutate_safetensors(data: bytes, rng: Rng) -> bytes:
    """The header as JSON, its length, or bytes anywhere."""
    length = struct.unpack("<Q", data[:8])[0]
    header, rest = data[8 : 8 + length], data[8 + length :]
    kind = int(rng.integers(4))
    if kind == 0:
        return mutate_bytes(data, rng)
    if kind == 1:
        wrong = pick(rng, [0, 1, length - 1, length + 1, 2**20, 2**32, 2**63, len(data)])
        return struct.pack("<Q", int(wrong) % 2**64) + data[8:]
    header = mutate_json(header, rng)
    return struct.pack("<Q", len(header)) + header + rest


def mutate_yaml(data: bytes, rng: Rng) -> bytes:
    """Text with aliases, nesting, odd values and repeated lines."""
    lines = data.decode().splitlines()
    at = int(rng.integers(len(lines)))
    kind = int(rng.integers(9))
    if kind == 0:
        lines[at] = lines[at].partition(":")[0] + ": " + json.dumps(pick(rng, ODD[:12] + ODD[13:]))
    elif kind == 1:
        lines.insert(at, lines[at])
    elif kind == 2:
        bomb = [f"b{i}: &b{i} [{', '.join([f'*b{i - 1}' if i else 'x'] * 9)}]" for i in range(9)]
        lines += bomb
    elif kind == 3:
        lines[at] = "a: " + "[" * int(rng.integers(1, 3000))
    elif kind == 4:
        lines[at] = lines[at].partition(":")[0] + ": " + "1:" * int(rng.integers(1, 3000)) + "1"
    elif kind == 5:
        lines[at] = lines[at].partition(":")[0] + ": &a [*a]"
    elif kind == 6:
        lines[at] = "!!python/object/apply:os.system ['touch fuzzed']"
    elif kind == 7:
        del lines[at]
    else:
        return mutate_bytes(data, rng)
    return "\n".join(lines).encode("utf-8", "replace")


def mutate_kind(file: Path, rng: Rng, secret: Path) -> None:
    """Something else in the place of a file."""
    if file.is_dir() and not file.is_symlink():
        return
    kind = int(rng.integers(7))
    file.unlink(missing_ok=True)
    if kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.symlink_to(secret)
    elif kind == 2:
        file.symlink_to("/dev/zero")
    elif kind == 3:
        file.mkdir()
    elif kind == 4:
        file.symlink_to(file.name)
    elif kind == 5:
        file.symlink_to("nowhere")


BY_SUFFIX: dict[str, Callable[[bytes, Rng], bytes]] = {
    ".json": mutate_json,
    ".jsonl": mutate_lines,
    ".gguf": mutate_bytes,
    ".safetensors": mutate_safetensors,
    ".yaml": mutate_yaml,
}


def _regular_files(folder: str) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _regular_files(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield Path(entry.path)


def mutate_folder(folder: Path, rng: Rng, secret: Path, kinds: bool = True) -> None:
    """Damage one to three files below a folder."""
    for _ in range(int(rng.integers(1, 4))):
        files = sorted(_regular_files(str(folder)))
        if not files:
            return
        file = pick(rng, files)
        if kinds and rng.random() < 0.15:
            mutate_kind(file, rng, secret)
        else:
            content = file.read_bytes()
            try:
                changed = BY_SUFFIX.get(file.suffix, mutate_bytes)(content, rng)
            except (ValueError, IndexError, struct.error, RecursionError):  # damaged already
                changed = mutate_bytes(content, rng)
            file.write_bytes(changed)
