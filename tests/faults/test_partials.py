"""Shards damaged between kill and resume, or during the run: made again, or the run stops."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sigmerge._native import checksum
from sigmerge.checkpoints import write_log
from sigmerge.checkpoints.publishing import check_target
from sigmerge.checkpoints.writer import Output, plan_layout
from sigmerge.errors import OutputError
from sigmerge.files.digests import digest_now
from sigmerge.files.journal import Journal, as_line
from tests.faults import job
from tests.faults.test_kills import everything

SHARD = "model-00001-of-00003.safetensors"
CHECKED = """
import sys
from pathlib import Path
from sigmerge.checkpoints.publishing import check_target
check_target(Path(sys.argv[1]), True)
"""


def zero(file: Path) -> None:
    """Other bytes, the same size; times as they were."""
    status = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-2000, os.SEEK_END)
        stream.write(bytes(2000))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    with file.open("r+b") as stream:
        stream.write(content)


def swap(file: Path) -> None:
    """Another file under the name."""
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(bytes(len(content)))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": lambda file: file.unlink(),
    "truncated": lambda file: os.truncate(file, 500),
    "emptied": lambda file: os.truncate(file, 0),
    "zeroed": zero,
    "one bit": flip,
    "replaced": swap,
    "header": lambda file: file.open("r+b").write(b"\xff" * 8),
}


class Stop(Exception):
    pass


def interrupted(out: Path, after: int) -> Path:
    def stop(block: int, _: Output) -> None:
        if block == after:
            raise Stop

    with pytest.raises(Stop):
        job.write(out, between=stop)
    return out.with_name(f".{out.name}.partial")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    job.write(out)
    return everything(out)


def test_digests_are_those_of_the_published_files(tmp_path: Path) -> None:
    _, digests = job.write(tmp_path / "out")
    found = everything(tmp_path / "out")
    assert digests == {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}
    assert len(digests) == 6


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_between_kill_and_resume(
    tmp_path: Path, whole: dict[str, bytes], damage: str
) -> None:
    partial = interrupted(tmp_path / "out", 1)
    DAMAGE[damage](partial / SHARD)
    resumed, _ = job.write(tmp_path / "out")
    assert everything(tmp_path / "out") == whole
    assert resumed == (["layer 0", "layer 1"] if damage == "header" else ["layer 1"])


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("when", [0, 2])
def test_damaged_during_the_run(
    tmp_path: Path, whole: dict[str, bytes], damage: str, when: int
) -> None:
    def hurt(block: int, output: Output) -> None:
        if block == when:
            DAMAGE[damage](output.partial / SHARD)

    out = tmp_path / "out"
    with pytest.raises(OutputError, match="is not what was written"):
        job.write(out, between=hurt)
    assert not out.exists()
    resumed, _ = job.write(out)
    assert everything(out) == whole
    assert "layer 1" in resumed


@pytest.mark.parametrize("damage", ["deleted", "zeroed", "truncated"])
def test_damaged_between_the_check_and_publishing(tmp_path: Path, damage: str) -> None:
    with Output(tmp_path / "out", job.layout(), "job", overwrite=False) as output:
        for block in range(job.BLOCKS):
            for name in job.names(block):
                output.write(name, 0, job.values(name))
        assert SHARD in output.digests
        DAMAGE[damage](output.partial / SHARD)
        with pytest.raises(OutputError, match=f"{SHARD} is not what was written"):
            output.publish()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("written", [0, 10, 63])
def test_nothing_without_weights_is_published(tmp_path: Path, written: int) -> None:
    layout = plan_layout([("x", "F32", (64,)), ("empty", "F32", (0, 4))], 10**6)
    with Output(tmp_path / "out", layout, "job", overwrite=False) as output:
        output.write("x", 0, np.ones(written, np.float32))
        with pytest.raises(OutputError, match="1 tensors were not written, the first is x"):
            output.publish()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\n", b"{}\n", b"\xff\xfe\n", b"[" * 50_000, b'{"job": "job"', b'{"a": 1}\n{"b": 2}\n'],
)
def test_a_garbled_journal_is_not_believed(
    tmp_path: Path, whole: dict[str, bytes], garbage: bytes
) -> None:
    partial = interrupted(tmp_path / "out", 1)
    (partial / "sigmerge/journal.jsonl").write_bytes(garbage)
    assert job.write(tmp_path / "out")[0] == []
    assert everything(tmp_path / "out") == whole


@pytest.mark.parametrize(
    "pieces", ['{"x": [[0, 4, 5]]}', "5", "[]", '{"model.layers.0.w0": 5}', "{}",
               '{"model.layers.0.w0": [[0, 12000, 1]]}', '{"model.layers.0.w0": [[0, -5, "a"]]}',
               '{"model.layers.0.w0": [[0, FAR, 0], [FAR, LESS, 0]]}',
               '{"model.layers.0.w0": [[0.0, SIZE.0, 0]]}', '{"model.layers.0.w0": [[0, true, 0]]}',
               '{"model.layers.0.w0": [[0, 1e300, 0]]}'],
)  # fmt: skip
def test_a_line_that_no_run_wrote_is_not_believed(
    tmp_path: Path, whole: dict[str, bytes], pieces: str
) -> None:
    partial = interrupted(tmp_path / "out", 0)
    journal = partial / "sigmerge/journal.jsonl"
    first, _ = journal.read_bytes().splitlines(keepends=True)
    size = job.layout().slots["model.layers.0.w0"].nbytes
    for word, number in (("FAR", 2**62), ("LESS", size - 2**62), ("SIZE", size)):
        pieces = pieces.replace(word, str(number))
    line = {"done": "layer 0", "record": None, "pieces": json.loads(pieces)}
    journal.write_bytes(first + as_line(line))
    if pieces == "{}":  # a block of nothing; its tensors are missing when it is published
        with pytest.raises(OutputError, match="were not written") as raised:
            job.write(tmp_path / "out")
        assert not (tmp_path / "out").exists() and "is kept" not in str(raised.value)
    assert job.write(tmp_path / "out")[0] == []
    assert everything(tmp_path / "out") == whole


def test_a_tensor_that_is_written_twice_has_the_digest_of_the_second(tmp_path: Path) -> None:
    with Output(tmp_path / "out", job.layout(), "job", overwrite=False) as output:
        for turn in range(2):
            for block in range(job.BLOCKS):
                for name in job.names(block):
                    data = job.values(name) + turn
                    output.write_bytes(name, memoryview(data).cast("B"))
                output.finish(f"layer {block}")
        assert len(output.digests) == 4
        digests = output.digests
        output.publish()
    found = everything(tmp_path / "out")
    assert digests == {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}


def test_a_tensor_that_is_written_whole_after_pieces_has_no_pieces_left(tmp_path: Path) -> None:
    with Output(tmp_path / "out", job.layout(), "job", overwrite=False) as output:
        for name in output.layout.slots:
            for start in range(0, job.SIZE, 1000):
                output.write(name, start, job.values(name)[start : start + 1000])
            output.write_bytes(name, memoryview(job.values(name) + 1).cast("B"))
        output.publish()
    assert (tmp_path / "out" / SHARD).exists()


def test_a_block_that_was_taken_over_is_not_journaled_with_the_next(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", 0)
    partial = interrupted(tmp_path / "out", 1)
    lines = (partial / "sigmerge/journal.jsonl").read_text().splitlines()
    assert [list(json.loads(line)["pieces"]) for line in lines[1:]] == [job.names(0), job.names(1)]


def test_an_older_result_is_never_absent(tmp_path: Path) -> None:
    """While a result is replaced, its name leads to the old one or to the new one at any moment."""
    from concurrent.futures import ThreadPoolExecutor

    out = tmp_path / "out"
    job.write(out)
    busy = True

    def watch() -> int:
        absent = 0
        while busy:
            absent += not (out / "config.json").exists()
        return absent

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        for _ in range(5):
            job.write(out, durable=False)
        busy = False
        assert watching.result() == 0


def test_a_folder_that_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def appear(block: int, output: Output) -> None:
        if block == 2:
            output.final.mkdir()
            (output.final / "thesis.tex").write_text("years of work")

    with pytest.raises(OutputError, match="exists already"):
        job.write(tmp_path / "out", overwrite=False, between=appear)
    assert (tmp_path / "out/thesis.tex").read_text() == "years of work"


def test_a_system_that_writes_a_part_of_a_piece_is_asked_for_the_rest(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, data[:1500], at))
    job.write(tmp_path / "out")
    assert everything(tmp_path / "out") == whole


def test_a_rename_that_fails_keeps_what_is_finished(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(self: Path, target: Path) -> Path:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", busy)
        with pytest.raises(OutputError, match="resource busy"):
            job.write(tmp_path / "out")
    assert job.write(tmp_path / "out")[0] == ["layer 0", "layer 1", "layer 2"]
    assert everything(tmp_path / "out") == whole


def test_a_mount_point_is_refused_at_once() -> None:
    with pytest.raises(OutputError, match="is a mount point"):
        check_target(Path("/dev/shm" if Path("/dev/shm").is_mount() else "/proc"), True)


def test_a_mounted_folder_of_the_same_disk_is_refused_at_once(tmp_path: Path) -> None:
    """Its device is that of the folder above; only its last rename would fail."""
    place, other = tmp_path / "a\\ b\n\tö", tmp_path / "other"
    place.mkdir()
    other.mkdir()
    mounted = 'mount --bind "$1" "$2" && exec "$3" -c "$4" "$2"'
    ran = subprocess.run(
        ["unshare", "-rm", "bash", "-c", mounted, "", other, place, sys.executable, CHECKED],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ran.stderr.startswith(("unshare", "mount")):
        pytest.skip("nothing can be mounted here")
    assert "is a mount point" in ran.stderr, ran


def test_without_fsync_nothing_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    job.write(tmp_path / "out", durable=False)
    assert synced == []
    job.write(tmp_path / "other")
    # three shards twice (while they are read back, and with all files), index, config, plan,
    # journal, four folders: the tree, its records twice, the parent
    assert len(synced) >= 3 + 6 + 3


def test_shards_are_read_back_while_the_disk_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few threads there are, none that reads waits for the disk first."""
    read, real, summed = threading.Event(), os.fsync, write_log.read_summed

    def fsync(handle: int) -> None:
        assert read.wait(10)
        real(handle)

    def reading(*given: Any) -> Any:
        read.set()
        return summed(*given)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(write_log, "read_summed", reading)
    job.write(tmp_path / "out")


def test_files_then_folders_then_the_name_then_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        events.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        real[0](handle)

    def rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return real[1](self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    job.write(tmp_path / "out")
    at = events.index("rename")
    partial = str(tmp_path / ".out.partial")
    synced = events[:at]
    for name in everything(tmp_path / "out"):
        assert f"{partial}/{name}" in synced
        assert synced.index(f"{partial}/{name}") < synced.index(partial)
    assert synced[-1] == f"{partial}/sigmerge"  # once more, since the journal is gone
    assert events[at + 1 :] == [str(tmp_path)]


def test_a_file_that_this_run_did_not_write_is_not_published(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    partial = interrupted(tmp_path / "out", 1)
    (partial / "modeling_evil.py").write_text("import os")
    (partial / "deep").mkdir()
    (partial / "deep/model.bin").write_text("")
    assert job.write(tmp_path / "out")[0] == ["layer 0", "layer 1"]
    assert everything(tmp_path / "out") == whole


BESIDE: dict[str, Callable[[Path], object]] = {
    "foreign": lambda partial: (partial / "modeling_evil.py").write_text("import os"),
    "foreign record": lambda partial: (partial / "sigmerge/evil.json").write_text("{}"),
    "foreign fifo": lambda partial: os.mkfifo(partial / "evil.json"),
    "changed": lambda partial: (partial / "config.json").write_text('{"a": 1}\n'),
    "changed record": lambda partial: (partial / "sigmerge/plan.json").write_text("[]\n"),
    "deleted": lambda partial: (partial / "config.json").unlink(),
    "link": lambda partial: swap_link(partial / "config.json"),
}


def swap_link(file: Path) -> None:
    """A link to a file of the same bytes."""
    other = file.rename(file.parent.parent / "other")
    file.symlink_to(other)


@pytest.mark.parametrize("damage", BESIDE)
def test_files_beside_the_shards_that_another_program_wrote(
    tmp_path: Path, whole: dict[str, bytes], damage: str
) -> None:
    with Output(tmp_path / "out", job.layout(), "job", overwrite=False) as output:
        for block in range(job.BLOCKS):
            for name in job.names(block):
                output.write(name, 0, job.values(name))
            output.finish(f"layer {block}")
        output.text("config.json", "{}\n")
        output.text("sigmerge/plan.json", "{}\n")
        BESIDE[damage](output.partial)
        with pytest.raises(OutputError, match=r"(evil|config|plan).* is not what was written"):
            output.publish()
    assert not (tmp_path / "out").exists()
    job.write(tmp_path / "out")
    assert everything(tmp_path / "out") == whole


@pytest.mark.parametrize("name", [SHARD, "sigmerge/journal.jsonl", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["fifo", "link", "second name", "device", "folder"])
def test_strange_things_in_a_partial_folder(
    tmp_path: Path, whole: dict[str, bytes], name: str, kind: str
) -> None:
    partial = interrupted(tmp_path / "out", 1)
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    strange = partial / name
    strange.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(strange)
    elif kind == "folder":
        strange.mkdir()
    elif kind == "second name":
        strange.hardlink_to(secret)
    else:
        strange.symlink_to(secret if kind == "link" else "/dev/zero")
    if kind == "folder" and name.endswith(("config.json", "tokenizer.json")):
        strange.rmdir()  # an empty folder of that name is in nobody's way
    job.write(tmp_path / "out")
    assert everything(tmp_path / "out") == whole
    assert secret.read_bytes() == b"secret"


@pytest.mark.parametrize("name", [".out.partial", ".out.old"])
@pytest.mark.parametrize("kind", ["fifo", "link", "file"])
def test_strange_things_under_hidden_names(
    tmp_path: Path, whole: dict[str, bytes], name: str, kind: str
) -> None:
    """To remove a FIFO as a folder is to wait for a writer for ever."""
    strange, kept = tmp_path / name, tmp_path / "kept"
    kept.mkdir()
    (kept / "config.json").write_text("{}")
    if kind == "fifo":
        os.mkfifo(strange)
    elif kind == "link":
        strange.symlink_to(kept)
    else:
        strange.write_text("x")
    signal.alarm(60)
    try:
        job.write(tmp_path / "out")
    finally:
        signal.alarm(0)
    assert everything(tmp_path / "out") == whole
    assert [entry.name for entry in kept.iterdir()] == ["config.json"]
    assert not os.path.lexists(strange)


def test_blocks_that_are_finished_at_once_are_journaled_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, append = threading.Lock(), Journal.append

    def alone(self: Journal, record: Any) -> None:
        assert inside.acquire(blocking=False), "two at once"
        time.sleep(0.01)
        append(self, record)
        inside.release()

    monkeypatch.setattr(Journal, "append", alone)
    with Output(tmp_path / "out", job.layout(), "job", overwrite=False) as output:

        def make(block: int) -> None:
            for name in job.names(block):
                output.write_bytes(name, job.values(name).data.cast("B"))
            output.finish(f"layer {block}", None, job.names(block))

        with ThreadPoolExecutor(job.BLOCKS) as pool:
            assert list(pool.map(make, range(job.BLOCKS))) == [None] * job.BLOCKS
        assert len(output.done) == job.BLOCKS


def test_what_a_loop_writes_after_the_shards_were_read_back_is_read_back(tmp_path: Path) -> None:
    with Output(tmp_path / "out", job.layout(), "job", overwrite=False) as output:
        for name in output.layout.slots:
            output.write_bytes(name, job.values(name).data.cast("B"))
        before = output.seal()
        data = (job.values(name) + 1).data.cast("B")
        place = output.target(name)
        os.pwrite(place.descriptor, data, place.position)
        output.written(name, 0, data.nbytes, checksum(data))
        after = output.digests
        output.publish()
    assert before.keys() <= after.keys() and len(before.items() - after.items()) == 1
    assert {n: digest_now(tmp_path / "out" / n) for n in before}.items() <= after.items()
