"""Objects of a remote store (s3://, gs://, hf://, …), through fsspec.

A remote checkpoint has a folder in the cache that stands in for it. Small files lie there whole. A
weight file is a stub there: its header and no data, so that a program which reads it as a file
stops. `remote_file` says which object a stub stands for.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from sigmerge.errors import MissingExtra, PoolError, SigmergeError
from sigmerge.files.cache import cache_root, kept_json

_URL = re.compile(r"([A-Za-z][A-Za-z0-9]+):/{1,2}([^/].*)")
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "blob_id", "mtime", "LastModified", "created")
"""The fields in which stores report an object's version, in order of preference."""
STAND_IN_RECORD = "objects.json"
"""File beside the local copy of a remote folder: the address, and the objects of its stubs.
With `links`, the folder that its links may lead to."""
SHA256 = "sha256:"
"""Prefix of the version of an object whose store states its SHA-256, as the hub does of weights."""


def url_of(name: str | os.PathLike[str]) -> str | None:
    """The address in a path or text, or None. Restores the slash that a Path drops."""
    found = _URL.fullmatch(os.fspath(name))
    return f"{found[1].lower()}://{found[2].rstrip('/')}" if found else None


@dataclass(frozen=True)
class RemoteFile:
    """A remote object, with the version that it had when its folder was opened."""

    url: str
    size: int
    version: str

    def read(self, begin: int, end: int) -> bytes:
        """The bytes [begin, end), fewer at the end of the object."""
        if begin >= end:
            return b""
        # The hub's file system reads five megabytes ahead, of a connection that ends then.
        how = {"cache_type": "none"} if self.url.startswith("hf://") else {}
        with reaching(self.url) as (store, path):
            return bytes(store.cat_file(path, start=begin, end=end, **how))

    def now(self) -> RemoteFile:
        """The object with its current version."""
        with reaching(self.url) as (store, path):
            store.invalidate_cache()
            return described(self.url, store.info(path))

    @property
    def identity(self) -> str:
        return f"{self.url}|{self.size}|{self.version}"

    @property
    def sha256(self) -> str | None:
        """The SHA-256 of its content, where its store says it."""
        found = self.version.removeprefix(SHA256)
        return found if found != self.version else None


def described(url: str, info: dict[str, Any]) -> RemoteFile:
    """An object from its store's metadata; times are normalised, as some come in two forms."""
    version = next((info[key] for key in _VERSIONS if info.get(key)), "")
    if url.startswith("hf://") and (large := info.get("lfs")):
        version = SHA256 + large["sha256"]
    if isinstance(version, datetime):
        version = version.timestamp()
    return RemoteFile(url, int(info["size"]), str(version))


@contextmanager
def reaching(url: str, error: type[SigmergeError] = PoolError) -> Iterator[tuple[Any, str]]:
    """Yields the store of an address and the path in it; converts its exceptions to `error`.

    Stores raise exceptions of their own libraries, so every Exception is caught.
    """
    try:
        yield _store(url)
    except SigmergeError:
        raise
    except FileNotFoundError:
        raise error(f"{url}: no such object, folder or bucket.") from None
    except PermissionError as problem:
        raise error(
            f"{url}: access is refused ({_line(problem)}). Check the credentials and their rights."
        ) from None
    except Exception as problem:
        if "credentials" in str(problem).lower():
            raise error(
                f"{url}: there are no credentials for it ({_line(problem)}). Set them as the "
                "store's own tools read them, for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            ) from None
        raise error(f"{url}: the store cannot be used ({_line(problem)}).") from None


def _store(url: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingExtra(f"The address {url}", ["fsspec"], ["storage"]) from None
    scheme = url.partition(":")[0]
    try:
        store, path = url_to_fs(url)
    except ImportError as problem:
        if scheme == "s3":
            raise MissingExtra(f"The address {url}", ["s3fs"], ["storage"]) from None
        raise PoolError(f"{url}: {_line(problem)}.") from None
    except ValueError:
        raise PoolError(f"{url}: no store is called {scheme}; use s3://, gs:// or hf://, or a "
                        "local folder.") from None  # fmt: skip
    return store, path


def _line(problem: Exception) -> str:
    text = str(problem).strip() or type(problem).__name__
    return text.splitlines()[0][:300].rstrip(".")


def remote_root() -> Path:
    """The resolved folder of all local copies of remote folders."""
    return _remote_in(cache_root())


@cache  # asked of every file again and again
def _remote_in(root: str) -> Path:
    return Path(os.path.realpath(Path(root) / "remote"))


def remote_folder(file: Path) -> tuple[str, Path] | None:
    """Address and local copy of the remote folder that a path belongs to, or None."""
    root = remote_root()
    if not str(file).startswith(str(root)):
        return None
    if not file.is_relative_to(root) or len(parts := file.relative_to(root).parts) < 2:
        return None
    known = _objects(root / parts[0])
    folder = root / parts[0] / parts[1]
    return (known["url"], folder) if known and parts[1] == known["name"] else None


def remote_file(file: Path) -> RemoteFile | None:
    """The remote object of a stub; None for an ordinary file."""
    found = remote_folder(file)
    if found is None:
        return None
    url, folder = found
    name = file.relative_to(folder).as_posix()
    stub = _objects(folder.parent)["objects"].get(name)
    return RemoteFile(f"{url}/{name}", *stub) if stub else None


def linked_folder(folder: Path) -> Path | None:
    """The folder that links in a stand-in may lead to: where the hub's cache has the contents."""
    found = remote_folder(folder)
    place = _objects(found[1].parent).get("links") if found else None
    return Path(place) if place else None


def address(file: Path) -> str:
    """The name of a file or folder for records: of a local copy, the remote address."""
    found = remote_folder(file)
    if found is None:
        return str(file)
    url, folder = found
    return "/".join([url, *file.relative_to(folder).parts])


def with_addresses(text: str) -> str:
    """A message with the paths of local copies replaced by remote addresses."""
    try:
        root = re.escape(str(remote_root()))
    except RuntimeError:  # nobody knows a home, and so no stand-in either
        return text
    place = re.compile(rf"{root}/[^/\s]+/[^/\s:;,)+'\"]+")
    return place.sub(lambda found: address(Path(found[0])), text)


@cache
def _objects(place: Path) -> dict[str, Any]:
    """The object record of a local copy, cached: it is written first and never changed."""
    return kept_json(place / STAND_IN_RECORD, {"url", "name", "objects"}) or {}


def stored_size(file: Path) -> int:
    """The size of a file, or of a stub's remote object."""
    remote = remote_file(file)
    return file.stat().st_size if remote is None else remote.size


def open_stored(file: Path) -> BinaryIO:
    """A stream of a file, or of a stub's remote object."""
    remote = remote_file(file)
    if remote is None:
        return file.open("rb")
    return io.BufferedReader(_RemoteStream(remote), 1 << 20)


class _RemoteStream(io.RawIOBase):
    """A stream of a remote object, read by range requests."""

    def __init__(self, remote: RemoteFile) -> None:
        self._remote, self._at = remote, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._remote.size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._remote.size)
        data = self._remote.read(self._at, end)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
