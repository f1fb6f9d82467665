"""Temporary folders: gone at the end, and after a kill with the next run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sigmerge.files import scratch as module
from sigmerge.files.scratch import NEW, YOUNG, remove_stale, scratch

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
    new = tmp_path / f"{NEW}abc"
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
