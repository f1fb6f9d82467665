"""Inputs are the same files from the first byte that is read to the last digest."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

import sigmerge
from sigmerge.checkpoints.folder import Checkpoint, open_checkpoint
from sigmerge.checkpoints.inputs import digested, fingerprint
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.checkpoints.source import PoolSource
from sigmerge.errors import PoolError
from sigmerge.files.identity import identify, unchanged
from sigmerge.jobs.extract import ExtractJob
from tests.pools import PoolOnDisk

REPAIR = {"shares": {"math": 0.5, "coding": 0.5}, "capacity": [0.1]}


def rewrite(file: Path) -> None:
    """Other bytes; size and mtime stay."""
    status, content = file.stat(), file.read_bytes()
    with file.open("r+b") as stream:
        stream.write(bytes(255 - byte for byte in content))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def swap(file: Path) -> None:
    """Another file of the same content under the name."""
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    other.replace(file)


CHANGES: dict[str, Callable[[Path], object]] = {
    "rewritten in place": rewrite,
    "replaced": swap,
    "truncated": lambda file: os.truncate(file, 3),
    "deleted": lambda file: file.unlink(),
    "appended": lambda file: file.open("ab").write(b"x"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_input_stops_the_run(tmp_path: Path, change: str) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(b"weights")
    before = identify(files)
    unchanged(before)
    assert {one.sha256 for one in digested(before)} == {hashlib.sha256(b"weights").hexdigest()}
    CHANGES[change](files[1])
    with pytest.raises(PoolError, match="/b: changed while it was read"):
        unchanged(before)
    with pytest.raises(PoolError, match="/b: changed while it was read"):
        digested(before)


def train(file: Path) -> None:
    """Other weights in place; the header stays."""
    content = file.read_bytes()
    with file.open("r+b") as stream:
        stream.seek(-64, os.SEEK_END)
        stream.write(content[-64:][::-1])


@pytest.mark.parametrize("change", [train, swap])
@pytest.mark.parametrize("verb", ["merge", "repair", "extract"])
def test_an_input_saved_again_after_its_header_was_read(
    pool: PoolOnDisk,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    change: Callable[[Path], None],
) -> None:
    """Hours may lie between the two where something is scored or captured first."""
    out, math = pool.root / "out", pool.experts["math"]
    recipe = pool.recipe("task_arithmetic")
    calls: dict[str, Callable[[], object]] = {
        "merge": lambda: sigmerge.merge(recipe, out),
        "repair": lambda: sigmerge.merge({**recipe, "repair": REPAIR}, out),
        "extract": lambda: sigmerge.extract(math, out, base=pool.reference),
    }
    opened: list[Path] = []

    def opened_then_changed(path: Path, **how: bool) -> Checkpoint:
        found = open_checkpoint(path, **how)
        if path == math:
            change(math / "model.safetensors")
            opened.append(path)
        return found

    for module in ("checkpoints.plain", "jobs.extract"):
        monkeypatch.setattr(f"sigmerge.{module}.open_checkpoint", opened_then_changed)
    with pytest.raises(PoolError, match="changed while it was read"):
        calls[verb]()
    assert opened and not out.exists()


def test_a_folder_put_in_place_of_another(pool: PoolOnDisk) -> None:
    """Both files have the same size and time; the one that is read is another."""
    math, away = pool.experts["math"], pool.root / "away"
    for folder in (math, pool.experts["coding"]):
        os.utime(folder / "model.safetensors", ns=(1, 1))
    source = PoolSource({"math": open_checkpoint(math)})
    math.rename(away)
    pool.experts["coding"].rename(math)
    with pytest.raises(PoolError, match="changed while it was read"):
        source.raw("math", "model.norm.weight")


def test_an_input_written_while_it_is_extracted(
    pool: PoolOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    math = pool.experts["math"]
    found = ExtractJob._found

    def meanwhile(job: ExtractJob, members: PoolMembers) -> object:
        made = found(job, members)
        rewrite(math / "model.safetensors")
        return made

    monkeypatch.setattr(ExtractJob, "_found", meanwhile)
    with pytest.raises(PoolError, match="changed while it was read"):
        sigmerge.extract(math, pool.root / "out", base=pool.reference)
    assert not (pool.root / "out").exists()


def test_another_machine_may_see_other_inodes(pool: PoolOnDisk) -> None:
    tensor = open_checkpoint(pool.reference).tensors["model.norm.weight"]
    sent = pickle.loads(pickle.dumps(tensor))
    assert tensor.version and sent == tensor and not sent.version


def test_a_file_that_changes_while_it_is_hashed(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"x" * 10)
    before = identify([file])
    with pytest.raises(PoolError, match="changed while it was read"):
        digested(before, progress=lambda _: rewrite(file))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_every_file_of_a_result_identifies_the_job(pool: PoolOnDisk, name: str) -> None:
    folder = pool.experts["math"]
    before = fingerprint({"math": open_checkpoint(folder)})
    content = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
    (folder / name).write_bytes(content + b" ")
    assert fingerprint({"math": open_checkpoint(folder)}) != before


def test_the_same_content_is_the_same_job(pool: PoolOnDisk) -> None:
    folder = pool.experts["math"]
    before = fingerprint({"math": open_checkpoint(folder)})
    swap(folder / "config.json")
    (folder / "notes.txt").write_text("not read")
    assert fingerprint({"math": open_checkpoint(folder)}) == before
