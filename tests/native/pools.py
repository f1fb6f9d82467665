"""Members of a merge in memory and in a file, in every stored type."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from sigmerge.core.dtypes import BF16, F16, F32

NUMPY = {BF16: np.uint16, F16: np.float16, F32: np.float32}


def stored(kind: int, values: np.ndarray) -> np.ndarray:
    """float32 values cut to a type."""
    if kind == BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(NUMPY[kind])


def widened(kind: int, raw: np.ndarray) -> np.ndarray:
    if kind == BF16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)


class Pool:
    """Random members of `kinds`; those in `filed` are read from one file that begins anywhere."""

    def __init__(
        self, kinds: list[int], size: int, folder: Path, filed: tuple[int, ...] = (), seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        values = [rng.standard_normal(size).astype(np.float32) for _ in kinds]
        self.raw = [stored(kind, one) for kind, one in zip(kinds, values, strict=True)]
        self.values = [widened(kind, one) for kind, one in zip(kinds, self.raw, strict=True)]
        path, rows, content = folder / "members", [], b"x" * 13
        for d, (kind, raw) in enumerate(zip(kinds, self.raw, strict=True)):
            if d in filed:
                rows.append((kind, -2, len(content)))
                content += raw.tobytes()
            else:
                rows.append((kind, -1, raw.ctypes.data))
        path.write_bytes(content)
        self.file = path.open("rb", buffering=0)
        self.table = np.array(rows, np.int64)
        self.table[self.table[:, 1] == -2, 1] = self.file.fileno()


def target(out: np.ndarray, kind: int) -> np.ndarray:
    return np.array([kind, -1, out.ctypes.data], np.int64)


def file_target(folder: Path, kind: int, position: int) -> tuple[np.ndarray, Path]:
    path = folder / "result"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    return np.array([kind, descriptor, position], np.int64), path
