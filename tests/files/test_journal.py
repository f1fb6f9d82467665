"""A journal keeps whole lines, knows its owner and has one writer."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from sigmerge.errors import OutputError
from sigmerge.files.journal import Journal, as_line, continues


def written(*records: dict[str, Any]) -> bytes:
    return b"".join(map(as_line, records))


def test_records_come_back_exactly(tmp_path: Path) -> None:
    records = [{"genotype": [0.1, 1 / 3, 2.5e-17], "n": i} for i in range(3)]
    with Journal(tmp_path / "j", {"a": (1, 2)}) as journal:
        assert journal.records == []
        for record in records:
            journal.append(record)
    with Journal(tmp_path / "j", {"a": (1, 2)}) as journal:
        assert journal.records == records


@pytest.mark.parametrize("torn", ['{"n": 1', '{"n": 1}', "{", "\x00\x00"])
def test_a_line_without_its_end_is_cut_off(tmp_path: Path, torn: str) -> None:
    with Journal(tmp_path / "j", {}) as journal:
        journal.append({"n": 0})
    with (tmp_path / "j").open("a") as file:
        file.write(torn)
    with Journal(tmp_path / "j", {}) as journal:
        assert journal.records == [{"n": 0}]
        journal.append({"n": 2})
    assert (tmp_path / "j").read_bytes() == written({}, {"n": 0}, {"n": 2})


def test_a_torn_header_is_a_new_journal(tmp_path: Path) -> None:
    (tmp_path / "j").write_text('{"seed')
    with Journal(tmp_path / "j", {"seed": 1}) as journal:
        assert journal.records == []
    assert (tmp_path / "j").read_bytes() == written({"seed": 1})


def test_another_header_is_refused_by_what_differs(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", {"seed": 1, "scorer": "x"}):
        pass
    with pytest.raises(OutputError, match="another run, which differs in seed; choose"):
        Journal(tmp_path / "j", {"seed": 2, "scorer": "x"})


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        Journal(tmp_path / "j", {}),
        pytest.raises(OutputError, match="another run is writing it"),
    ):
        Journal(tmp_path / "j", {})


def test_a_lock_whose_file_was_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder removed it after this process had opened it; a third one makes it anew."""

    def removed(handle: int, operation: int, plain: Any = fcntl.flock) -> None:
        (tmp_path / ".j.lock").unlink()
        plain(handle, operation)

    monkeypatch.setattr(fcntl, "flock", removed)
    with pytest.raises(OutputError, match="another run is writing it"):
        Journal(tmp_path / "j", {})


@pytest.mark.parametrize(
    "broken",
    [b"{\n", b"[1]\n", b"5\n", b"\n", b'{"n": 0}\n', b"[" * 50_000 + b"\n", as_line({"m": 1}),
     as_line({"n": 467}).replace(b"467", b"567"), as_line({"n": 0}).replace(b'"n"', b'"m"')],
)  # fmt: skip
def test_a_damaged_line_and_those_after_it_are_not_believed(tmp_path: Path, broken: bytes) -> None:
    (tmp_path / "j").write_bytes(written({}, {"n": 0}) + broken + written({"n": 1}))
    with Journal(tmp_path / "j", {}, [{"n"}]) as journal:
        assert journal.records == [{"n": 0}]
        journal.append({"n": 2})
    assert (tmp_path / "j").read_bytes() == written({}, {"n": 0}, {"n": 2})


def test_no_line_with_a_wrong_bit_is_believed(tmp_path: Path) -> None:
    sound = written({"seed": 1}, {"scores": [0.7], "n": 467})
    first = sound.index(b"\n") + 1
    for at in range(8 * first, 8 * len(sound)):
        content = bytearray(sound)
        content[at // 8] ^= 1 << at % 8
        (tmp_path / "j").write_bytes(content)
        with Journal(tmp_path / "j", {"seed": 1}) as journal:
            assert journal.records == []


def test_a_journal_of_the_version_before_is_left_as_it_is(tmp_path: Path) -> None:
    """Its lines have no checksum."""
    (tmp_path / "j").write_text('{"seed": 1}\n{"n": 0}\n')
    assert not continues(tmp_path / "j", {"seed": 1})
    with pytest.raises(OutputError, match=r"j: its first line is damaged.* pass --overwrite"):
        Journal(tmp_path / "j", {"seed": 1})
    assert (tmp_path / "j").read_text() == '{"seed": 1}\n{"n": 0}\n'


def test_a_journal_that_was_enlarged_is_read_within_a_limit(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(written({}, {"n": 0}))
    os.truncate(tmp_path / "j", 3 << 30)
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + (512 << 20), before[1]))
    try:
        with Journal(tmp_path / "j", {}) as journal:
            assert journal.records == [{"n": 0}]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert (tmp_path / "j").read_bytes() == written({}, {"n": 0})


@pytest.mark.parametrize("durable", [True, False])
def test_a_record_is_synced_if_it_is_to_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append((tmp_path / "j").read_bytes()))
    with Journal(tmp_path / "j", {}, durable=durable) as journal:
        journal.append({"n": 0})
    assert synced == ([written({}), written({}, {"n": 0})] if durable else [])


def test_what_a_full_disk_took_of_a_line_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.write
    with Journal(tmp_path / "j", {}) as journal:
        monkeypatch.setattr(os, "write", lambda handle, line: plain(handle, line[:5]))
        with pytest.raises(OutputError, match=os.strerror(errno.ENOSPC)):
            journal.append({"n": 0})
        monkeypatch.undo()
        journal.append({"n": 1})
    assert (tmp_path / "j").read_bytes() == written({}, {"n": 1})
