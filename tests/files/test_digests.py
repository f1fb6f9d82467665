"""Remembered digests: trusted only for the very file, never a reason to stop."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest
from blake3 import blake3

from sigmerge.errors import PoolError
from sigmerge.files import cache, digests
from sigmerge.files.digests import (
    file_digests,
    rehashing,
)

OLD = (10**18, 10**18)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose times lie behind the clock's grain."""
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "GRAIN", -(10**9))
    made = tmp_path / "weights"
    made.write_bytes(b"weights")
    return made


def true_digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def notes(file: Path) -> list[Path]:
    folder = file.parent / "cache/digests"
    return sorted(folder.iterdir()) if folder.exists() else []


def bytes_read(file: Path) -> int:
    """Bytes that another process would read to know the digest."""
    digests._read.clear()
    return bytes_read_here(file)


def bytes_read_here(file: Path) -> int:
    counts: list[int] = []
    assert file_digests([file], progress=counts.append) == {file: true_digest(file)}
    return sum(counts)


def test_a_file_is_read_once(file: Path) -> None:
    assert bytes_read(file) == 7
    assert bytes_read(file) == 0
    with rehashing():
        assert bytes_read(file) == 7
        assert bytes_read(file) == 0
    assert bytes_read(file) == 0


@pytest.mark.parametrize(
    "garbage",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"sha256": 5}', b"[" * 100_000,
     b'{"identity": "other", "sha256": "' + b"0" * 64 + b'"}'],
)  # fmt: skip
def test_a_garbled_note_is_made_again(file: Path, garbage: bytes) -> None:
    bytes_read(file)
    (note,) = notes(file)
    note.write_bytes(garbage)
    assert bytes_read(file) == 7
    assert bytes_read(file) == 0


def test_a_note_with_a_wrong_digit_is_made_again(file: Path) -> None:
    bytes_read(file)
    (note,) = notes(file)
    wrong = ("1" if true_digest(file)[0] == "0" else "0") + true_digest(file)[1:]
    note.write_text(note.read_text().replace(true_digest(file), wrong))
    assert bytes_read(file) == 7


def test_another_file_with_the_same_name_size_and_times_is_another() -> None:
    """A file put back from a copy on a disk with coarse times differs in its inode alone."""

    def status(inode: int) -> os.stat_result:
        return os.stat_result((0o100644, inode, 5, 1, 0, 0, 7, 0, 0, 0))

    one, two = (digests._identity(Path("/pool/weights"), status(inode)) for inode in (11, 12))
    assert one != two


def test_a_change_that_keeps_size_and_mtime_is_seen(file: Path) -> None:
    os.utime(file, ns=OLD)
    bytes_read(file)
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=OLD)
    assert bytes_read(file) == 7


def test_a_file_that_changes_while_it_is_read_is_not_remembered(file: Path) -> None:
    file_digests([file], progress=lambda _: os.utime(file, ns=OLD))
    assert notes(file) == []
    assert bytes_read(file) == 7


@pytest.mark.usefixtures("small")
def test_a_file_that_changes_while_a_later_run_is_read_is_not_remembered(file: Path) -> None:
    file.write_bytes(bytes(range(30)))
    counts: list[int] = []

    def change(count: int) -> None:
        counts.append(count)
        if sum(counts) == 16:  # in the second of three runs
            os.utime(file, ns=OLD)

    file_digests([file], progress=change)
    assert notes(file) == []


def test_a_file_younger_than_the_clocks_grain_is_not_remembered(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "GRAIN", 3600 * 10**9)
    assert bytes_read(file) == bytes_read(file) == 7
    assert notes(file) == []
    later = time.time_ns() + 10**15
    monkeypatch.setattr(digests, "GRAIN", 0)
    os.utime(file, ns=(later, later))
    assert bytes_read(file) == bytes_read(file) == 7


@pytest.mark.parametrize("where", ["a file in the way", "a place that nobody writes"])
def test_a_cache_that_keeps_nothing_stops_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    blocked = file.parent / "blocked"
    blocked.write_text("")
    place = blocked / "cache" if where == "a file in the way" else Path("/proc/nowhere")
    monkeypatch.setenv("SIGMERGE_CACHE", str(place))
    assert [bytes_read_here(file), bytes_read_here(file)] == [7, 0]  # a job asks several times
    file.write_bytes(b"another")
    assert bytes_read(file) == 7


def test_a_note_under_the_name_of_another_is_made_again(tmp_path: Path) -> None:
    cache.write_note(tmp_path / "a", {"sha256": "0"})
    (tmp_path / "a").rename(tmp_path / "b")
    assert cache.kept_json(tmp_path / "b", {"sha256"}) is None
    (tmp_path / "b").rename(tmp_path / "a")
    assert cache.kept_json(tmp_path / "a", {"sha256"}) == {"sha256": "0"}


def test_a_full_cache_stops_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGMERGE_CACHE", "/dev/full")
    assert bytes_read(file) == 7


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PoolError, match="pipe: is not a regular file"):
        file_digests([tmp_path / "pipe"])


def test_damaged_notes_are_made_again_and_stop_nothing(tmp_path: Path) -> None:
    note = tmp_path / "note.json"
    assert cache.kept_json(note, {"a"}) is None
    cache.keep_json(note, {"a": 1})
    assert cache.kept_json(note, {"a"}) == {"a": 1}
    assert cache.kept_json(note, {"b"}) is None
    note.write_bytes(b'{"a": ')
    assert cache.kept_json(note, {"a"}) is None
    cache.keep_json(note / "below", {"a": 1})


def tree_of(content: bytes, leaf: int, prefix: str = "4MiB-blake3:") -> str:
    """By the rule in the docstring of files/digests.py, written down again."""
    leaves = [content[at : at + leaf] for at in range(0, len(content), leaf)]
    hasher = blake3 if "blake3" in prefix else hashlib.sha256
    joined = b"".join(hasher(leaf).digest() for leaf in leaves)
    return prefix + hasher(joined).hexdigest()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "RUN_BYTES", 12)
    monkeypatch.setattr(digests, "LEAF", 4)
    monkeypatch.setattr(digests, "_BUFFER", 3)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("size", [13, 23, 24, 25, 39])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_long_file_has_the_digest_of_its_leaves(file: Path, size: int, threads: int) -> None:
    content = bytes(range(size))
    file.write_bytes(content)
    counts: list[int] = []
    assert file_digests([file], threads, counts.append) == {file: tree_of(content, 4)}
    assert sum(counts) == size
    assert file_digests([file], threads, counts.append) == {file: tree_of(content, 4)}
    assert sum(counts) == size  # remembered


@pytest.mark.usefixtures("small")
def test_a_file_of_one_run_has_its_plain_digest(file: Path) -> None:
    file.write_bytes(bytes(range(12)))
    assert file_digests([file]) == {file: true_digest(file)}


@pytest.mark.usefixtures("small")
def test_of_a_file_that_became_shorter_what_is_left_is_hashed(file: Path) -> None:
    """Checksums show that it did."""
    file.write_bytes(bytes(range(10)))
    rule = digests.leaf_rule(24)
    with file.open("rb") as stream:
        found = digests.leaf_digests(stream.fileno(), 0, 12, rule)
    leaves = (bytes(range(4)), bytes(range(4, 8)), bytes(range(8, 10)))
    assert found == b"".join(blake3(leaf).digest() for leaf in leaves)


def test_leaves_of_a_whole_run_are_those_of_the_rule(file: Path) -> None:
    """Sizes as they are: leaves are read in several pieces, and the last leaf is short."""
    content = bytes(range(256)) * (digests.RUN_BYTES // 256) + b"beyond"
    file.write_bytes(content)
    counts: list[int] = []
    found = file_digests([file], 2, counts.append)
    assert found == {file: tree_of(content, 4 << 20)}
    assert sum(counts) == len(content)


def test_an_empty_file_has_a_digest(file: Path) -> None:
    file.write_bytes(b"")
    assert file_digests([file]) == {file: hashlib.sha256(b"").hexdigest()}


def test_a_folder_whose_name_is_not_utf8(file: Path) -> None:
    moved = file.parent / os.fsdecode(b"d\xff") / "weights"
    moved.parent.mkdir()
    file.rename(moved)
    counts: list[int] = []
    for _ in range(2):  # the second is remembered
        assert file_digests([moved], progress=counts.append) == {moved: true_digest(moved)}
    assert sum(counts) == 7
