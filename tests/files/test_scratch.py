"""Temporary folders: gone at the end, and after a kill with the next run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sigmerge.files import scratch as module
from sigmerge.files.scratch import CONTENT, LOCK, MARKER, NEW, YOUNG, remove_stale, scratch

HELD = """
import sys
from sigmerge.files.scratch import scratch
with scratch() as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    remove_stale.cache_clear()


def test_a_folder_is_empty_and_goes_at_the_end(tmp_path: Path) -> None:
    with scratch() as folder:
        assert folder.is_dir() and not any(folder.iterdir())
        assert folder.is_relative_to(tmp_path)
        (folder / "file").write_text("x")
    assert not any(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HELD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    killed, alive = (subprocess.Popen(command, **pipes) for _ in range(2))
    folders = {}
    for child in (killed, alive):
        assert child.stdout
        folders[child] = Path(child.stdout.readline().strip()).parent
    (tmp_path / "sigmerge-notes").mkdir()
    (tmp_path / "other").mkdir()
    killed.kill()
    killed.wait()
    remove_stale(tmp_path)
    left = {folder.name for folder in tmp_path.iterdir()}
    assert left == {folders[alive].name, "sigmerge-notes", "other"}
    alive.communicate("")
    assert not folders[alive].exists()


@pytest.mark.parametrize("lock", [False, True])
def test_a_folder_whose_owner_has_no_lock_yet_is_left_alone_for_a_while(
    tmp_path: Path, lock: bool
) -> None:
    new = tmp_path / f"{NEW}abcdefgh"
    new.mkdir()
    if lock:
        (new / "lock").touch()
    remove_stale(tmp_path)
    assert new.exists()
    long_ago = new.stat().st_mtime - 2 * YOUNG
    os.utime(new, (long_ago, long_ago))
    remove_stale.cache_clear()
    remove_stale(tmp_path)
    assert not new.exists()


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (f"{NEW}llama", {"model.safetensors": b"weights"}),
        (f"{NEW}tinymath", {"model.safetensors": b"weights"}),
        (f"{NEW}tinymath", {LOCK: b"1234\n"}),
        ("sigmerge-project", {LOCK: MARKER}),
        ("sigmerge-tinymath", {LOCK: b"", f"{CONTENT}/thesis.txt": b"words"}),
        ("sigmerge-tinymath", {LOCK: b"1234\n", f"{CONTENT}/thesis.txt": b"words"}),
        ("sigmerge-tinymath", {LOCK: MARKER + b"1234\n", f"{CONTENT}/thesis.txt": b"words"}),
        ("sigmerge-tinymath", {LOCK: MARKER, "thesis.txt": b"words"}),
        ("sigmerge-tinymath", {f"{CONTENT}/thesis.txt": b"words"}),
    ],
)
def test_a_folder_of_somebody_else_stays(
    tmp_path: Path, name: str, files: dict[str, bytes]
) -> None:
    for file, content in files.items():
        (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).write_bytes(content)
    os.utime(tmp_path / name, (0, 0))
    remove_stale(tmp_path)
    found = {file: (tmp_path / name / file).read_bytes() for file in files}
    assert found == files
    assert {path.name for path in (tmp_path / name).iterdir()} == {f.split("/")[0] for f in files}


def test_a_link_to_such_a_folder_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / CONTENT).mkdir(parents=True)
    (elsewhere / LOCK).write_bytes(MARKER)
    link = tmp_path / "sigmerge-abcdefgh"
    link.symlink_to(elsewhere)
    remove_stale(tmp_path)
    assert link.is_symlink() and (elsewhere / LOCK).exists()
