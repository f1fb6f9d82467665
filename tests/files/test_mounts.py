"""Times prove a file's content where this machine keeps them, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from sigmerge.files import mounts
from sigmerge.files.mounts import kept_elsewhere
from tests.mounted import mount


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "a pool/weights"
    made.parent.mkdir()
    made.write_bytes(b"weights")
    return made


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs", "overlay", "zfs"])
def test_file_systems_of_this_machine(file: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    mount(monkeypatch, {file.parent: kind})
    assert kept_elsewhere([file]) == {}


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "lustre", "9p", "vfat", "new"])
def test_all_others(file: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    mount(monkeypatch, {file.parent: kind})
    link = file.parent.with_name("link")
    link.symlink_to(file)
    beside = file.parent.with_name("beside")
    beside.write_bytes(b"")
    assert kept_elsewhere([file, link, beside]) == {file: kind, link: kind}


def test_the_innermost_and_the_last_mount_counts(file: Path, monkeypatch: pytest.MonkeyPatch):
    mount(monkeypatch, {file.parent.parent: "nfs4", file.parent: "ext4"})
    assert kept_elsewhere([file]) == {}
    over = mounts.TABLE.read_text().splitlines()[2].replace("ext4", "nfs4")
    mounts.TABLE.write_text(f"{mounts.TABLE.read_text()}{over}\n")
    assert kept_elsewhere([file]) == {file: "nfs4"}


def test_without_a_table_nothing_is_proven(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mounts, "TABLE", file.parent / "none")
    assert kept_elsewhere([file]) == {file: "unknown"}
