"""What is remembered between runs: file digests and derived files, keyed by file identity."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sigmerge.errors import OutputError


def cache_folder(name: str) -> Path:
    """SIGMERGE_CACHE, or the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("SIGMERGE_CACHE") or Path(home) / "sigmerge")
    folder = root / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{folder}: what is remembered between runs cannot be kept there ({error.strerror}). "
            "Set SIGMERGE_CACHE to a folder that can be written."
        ) from None
    return folder


def beside(member: Path, name: str) -> Path:
    """A place of that name beside a pool's members, or in the cache if that cannot be written."""
    folder = member.parent / ".sigmerge"
    writable = os.access(folder if folder.exists() else folder.parent, os.W_OK)
    if writable or (folder / name).exists():
        return folder / name
    return cache_folder("profiles") / name


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """A name to write under. The file appears when all is written, whoever else writes it too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_json(file: Path, content: Any, indent: int | None = 2) -> None:
    with whole(file) as partial:
        partial.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")


def content_key(parts: list[Any]) -> str:
    """A short name for plain content: the same on every machine."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


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
