"""The file systems on which unchanged times prove unchanged content (ruling 37)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

KEPT_HERE = frozenset(
    {
        "bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "iso9660", "jfs", "nilfs2",
        "overlay", "ramfs", "reiserfs", "rootfs", "squashfs", "tmpfs", "ubifs", "xfs", "zfs",
    }
)  # fmt: skip
"""File systems whose times only the kernel of this machine sets: a write changes the ctime, which
no program can put back. On others another machine, or a program, may change bytes and times."""
TABLE = Path("/proc/self/mountinfo")


def kept_elsewhere(files: Iterable[Path]) -> dict[Path, str]:
    """The files whose times prove nothing, with the type of their file systems."""
    try:
        table = TABLE.read_bytes()
    except OSError:
        table = b""
    kinds = {file: _kind(file, _device(file), table) for file in files}
    return {file: kind for file, kind in kinds.items() if kind not in KEPT_HERE}


def _device(file: Path) -> int:
    """The device of a file; 0, which no mount has, if the file is gone."""
    try:
        return file.stat().st_dev
    except OSError:
        return 0


@lru_cache(maxsize=4)
def _mounts(table: bytes) -> dict[Path, str]:
    """File system type by mount point; a later mount hides an earlier one."""
    found: dict[Path, str] = {}
    for line in table.splitlines():
        where, _, what = line.partition(b" - ")
        place = re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), where.split()[4])
        found[Path(place.decode(errors="surrogateescape"))] = what.split()[0].decode()
    return found


@lru_cache(maxsize=4096)
def _kind(file: Path, device: int, table: bytes) -> str:
    mounts, real = _mounts(table), file.resolve()
    return next((mounts[place] for place in (real, *real.parents) if place in mounts), "unknown")
