"""SHA-256 of files, remembered by file identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sigmerge.files.cache import cache_folder
from sigmerge.files.documents import write_json


def identity(file: Path) -> str:
    """Changes whenever the file is replaced or written: path, inode, size and times."""
    real = file.resolve()
    status = real.stat()
    return f"{real}|{status.st_ino}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}"


def sha256(
    files: Iterable[Path], threads: int = 1, progress: Callable[[int], None] | None = None
) -> dict[Path, str]:
    """SHA-256 of files; one that was hashed before and has not changed is not read again."""
    folder = cache_folder("digests")

    def digest(file: Path) -> str:
        note = folder / hashlib.sha256(identity(file).encode()).hexdigest()[:32]
        if note.exists():
            return str(json.loads(note.read_text())["sha256"])
        value = hashlib.sha256()
        buffer = memoryview(bytearray(1 << 22))
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                value.update(buffer[:count])
                if progress:
                    progress(count)
        write_json(note, {"file": str(file), "sha256": value.hexdigest()}, indent=None)
        return value.hexdigest()

    unique = sorted(set(files))
    with ThreadPoolExecutor(max(1, threads)) as pool:
        return dict(zip(unique, pool.map(digest, unique), strict=True))
