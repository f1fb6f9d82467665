"""Killed at a system call, and the disk full at a system call: old, new or nothing, never wrong.

Children are forked from a process that has everything loaded, so a kill takes milliseconds.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from sigmerge.errors import OutputError
from tests.faults import job


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    job.write(out)
    return everything(out)


def old_result(out: Path) -> dict[str, bytes]:
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "old.safetensors").write_bytes(b"old")
    return everything(out)


def in_child(out: Path, call: str, at: int, fault: str) -> int:
    """Run the job in a child with a fault; returns how it ended: 0, 4 for an OutputError, -9."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            job.arm(call, at, fault)
            job.write(out)
            code = 0
        except OutputError:
            code = OutputError.exit_code
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("fault", ["kill before", "kill after"])
@pytest.mark.parametrize("call", job.CALLS)
def test_killed_at_a_system_call(
    tmp_path: Path, whole: dict[str, bytes], call: str, fault: str
) -> None:
    kills = 0
    for at in (1, 2, 3, 5, 8, 13, 21):
        out = tmp_path / f"{call}-{at}"
        old = old_result(out) if call != "rename" else {}  # a result is exchanged, not renamed
        ended = in_child(out, call, at, fault)
        assert ended in (0, -signal.SIGKILL)
        assert everything(out) in (old, whole)
        if ended == 0:
            assert everything(out) == whole
            break
        kills += 1
        job.write(out)
        assert everything(out) == whole
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(f".{out.name}.")] == []
    assert kills > 0


@pytest.mark.parametrize("call", ["pwrite", "write", "fsync", "ftruncate", "mkdir", "exchange"])
def test_a_full_disk_at_a_system_call(tmp_path: Path, whole: dict[str, bytes], call: str) -> None:
    failures = 0
    for at in (1, 2, 3, 5, 8, 13):
        out = tmp_path / f"{call}-{at}"
        old = old_result(out)
        ended = in_child(out, call, at, "full")
        assert ended in (0, OutputError.exit_code), ended
        assert everything(out) == (whole if ended == 0 else old)
        failures += ended != 0
        job.write(out)
        assert everything(out) == whole
    assert failures > 0


def test_a_file_size_limit_is_an_error(tmp_path: Path) -> None:
    """The real system call fails here, not a replacement of it."""
    child = os.fork()
    if child == 0:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        code = 1
        try:
            job.write(tmp_path / "out")
        except OutputError as error:
            # nothing was begun, so the line promises no finished blocks
            code = 4 if str(error).endswith("cannot be written (File too large).") else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert not (tmp_path / "out").exists()
    job.write(tmp_path / "out")
    assert len(everything(tmp_path / "out")) == 6
