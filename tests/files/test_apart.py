"""Processes that hash: the same digests, no process left, and none needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from blake3 import blake3

from sigmerge.files import apart, digests
from sigmerge.files.apart import Apart, leaf_digests

CONTENT = bytes(range(250)) * 40


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "weights"
    made.write_bytes(CONTENT)
    return made


def leaves(content: bytes, size: int) -> bytes:
    parts = [content[at : at + size] for at in range(0, len(content), size)]
    return b"".join(blake3(part).digest() for part in parts)


def test_processes_give_the_digests_of_this_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # what is meant for another Python
    opened: list[int] = []
    with Apart() as hashing, file.open("rb") as stream:
        for begin, end in ((0, 10_000), (3_000, 7_001), (9_999, 10_000)):
            got = hashing.leaf_digests(stream.fileno(), begin, end, 1_000, no_hasher)
            assert got == leaves(CONTENT[begin:end], 1_000)
            (process,) = hashing._processes  # one after another, by the same
            opened.append(len([*Path(f"/proc/{process.pid}/fd").iterdir()]))
        empty = hashing.leaf_digests(stream.fileno(), 5, 5, 1_000, no_hasher)
        assert empty == blake3(b"").digest()
        assert os.getsid(process.pid) == process.pid  # Ctrl-C does not reach it
    assert opened[0] == opened[-1]
    assert not running(process.pid)


def test_a_run_counts_as_progress_when_it_is_hashed(file: Path) -> None:
    counts: list[int] = []
    with Apart() as hashing, file.open("rb") as stream:
        hashing.leaf_digests(stream.fileno(), 0, 10_000, 4_096, no_hasher, counts.append)
    assert counts == [10_000]


def test_of_a_file_that_became_shorter_the_digests_are_those_of_this_process(file: Path) -> None:
    with Apart() as hashing, file.open("rb") as stream:
        asked = stream.fileno(), 0, 20_000, 4_096
        assert hashing.leaf_digests(*asked, no_hasher) == leaf_digests(*asked, blake3)


def test_a_process_that_was_killed_leaves_the_work_to_this_one(file: Path) -> None:
    with Apart() as hashing, file.open("rb") as stream:
        asked = stream.fileno(), 0, 10_000, 4_096
        wanted = hashing.leaf_digests(*asked, no_hasher)
        hashing._processes[0].kill()
        hashing._processes[0].wait()
        for _ in range(2):  # the second time none is asked
            assert hashing.leaf_digests(*asked, blake3) == wanted
        assert len(hashing._processes) == 1


def test_a_process_that_does_not_answer_is_ended_and_this_one_hashes(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (silent := tmp_path / "silent").write_text("#!/bin/sh\nexec sleep 1000\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    monkeypatch.setattr(apart, "_PATIENCE", 0.1)
    with Apart() as hashing, file.open("rb") as stream:
        got = hashing.leaf_digests(stream.fileno(), 0, 10_000, 4_096, blake3)
    assert got == leaves(CONTENT, 4_096)
    assert not running(hashing._processes[0].pid)


@pytest.mark.parametrize(("pause", "cut"), [(0.05, 96), (0.0, 40)])
def test_an_answer_in_parts_is_put_together_and_one_cut_short_is_not_taken(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: float, cut: int
) -> None:
    """The second process ends amid its answer."""
    wanted = leaves(CONTENT, 4_096)
    (other := tmp_path / "other").write_text(
        f"#!{sys.executable}\n"
        "import socket, sys, time\n"
        "theirs = socket.socket(fileno=int(sys.argv[-1]))\n"
        "theirs.sendall(b'\\0'); socket.recv_fds(theirs, 24, 1)\n"
        f"theirs.sendall({wanted[:10]!r}); time.sleep({pause})\n"
        f"theirs.sendall({wanted[10:cut]!r})\n"
    )
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(other))
    with Apart() as hashing, file.open("rb") as stream:
        got = hashing.leaf_digests(
            stream.fileno(), 0, 10_000, 4_096, no_hasher if cut == len(wanted) else blake3
        )
    assert got == wanted


@pytest.mark.parametrize("missing", ["", "/no/such/python"])
def test_without_a_python_to_start_this_process_hashes(
    file: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", missing)
    with Apart() as hashing, file.open("rb") as stream:
        got = hashing.leaf_digests(stream.fileno(), 0, 10_000, 4_096, blake3)
    assert got == leaves(CONTENT, 4_096)


def test_long_files_are_hashed_apart_and_short_ones_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "RUN_BYTES", 1_000)
    monkeypatch.setattr(digests, "LEAF", 100)
    asked: list[int] = []
    real = Apart._asked

    def noted(self: Apart, descriptor: int, begin: int, end: int, size: int) -> bytes | None:
        asked.append(end - begin)
        return real(self, descriptor, begin, end, size)

    monkeypatch.setattr(Apart, "_asked", noted)
    (long := tmp_path / "long").write_bytes(CONTENT)
    (short := tmp_path / "short").write_bytes(CONTENT[:999])
    few = digests.file_digests([long, short], 3)
    assert not asked  # ten runs, and one, are not worth it
    (other := tmp_path / "other").write_bytes(CONTENT[:9_500])
    monkeypatch.setattr(digests, "GRAIN", 10**18)  # nothing is remembered
    with digests.rehashing():
        many = digests.file_digests([long, short, other], 3)
    assert {file: many[file] for file in few} == few
    assert sorted(asked) == [500] + [1_000] * 19


def test_processes_end_with_one_that_is_killed(file: Path) -> None:
    code = (
        "import sys; from sigmerge.files.apart import Apart\n"
        "hashing = Apart(); stream = open(sys.argv[1], 'rb')\n"
        "hashing.leaf_digests(stream.fileno(), 0, 10_000, 4_096, None)\n"
        "print(hashing._processes[0].pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert running(pid)
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + 20
    while running(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not running(pid)


def no_hasher() -> None:
    pytest.fail("this process was to hash nothing")


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
