"""Folders as if another file system were mounted there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sigmerge.errors import PoolError
from sigmerge.files import digests, mounts
from sigmerge.files.cache import write_note
from sigmerge.files.digests import file_digests


def mount(patch: pytest.MonkeyPatch, kinds: Mapping[Path, str]) -> None:
    """Let the kernel's table name these places after the root, which is of this machine."""
    places = {Path("/"): "ext4", **{place.resolve(): kind for place, kind in kinds.items()}}
    lines = [
        f"{20 + n} 1 0:{n} / {str(place).replace(' ', chr(92) + '040')} rw shared:1 - {kind} x rw"
        for n, (place, kind) in enumerate(places.items())
    ]
    table = next(iter(kinds)).parent / ".mounts"
    table.write_text("\n".join(lines) + "\n")
    patch.setattr(mounts, "TABLE", table)


def write_unseen(file: Path, content: bytes) -> str:
    """Write a file so that its size and times show nothing; the digest that is still believed."""
    assert len(content) == file.stat().st_size
    before = file_digests([file])[file]
    file.write_bytes(content)
    one = digests._begun(file, PoolError)
    write_note(one.note, {"file": str(file), "identity": one.key, "sha256": before})
    assert file_digests([file]) == {file: before}
    return before
