"""Documents that strangers wrote, and notes that something garbled: one clear error, or made again.

Every reader of a small document meets deep nesting, fields of the wrong kind, huge lines and text
that is no text.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sigmerge.errors import PoolError, RecipeError, ScoreError, SigmergeError
from sigmerge.evaluation import sources, splits
from sigmerge.evaluation.scored_by import ScoredBy
from sigmerge.evaluation.sources import File, read_rows
from sigmerge.evaluation.suite import load_suite
from sigmerge.files import documents
from sigmerge.jobs.scores import CheckpointScorer, MeasuredScores, read_scores
from sigmerge.lab.pools import folder
from sigmerge.nano.files import read_lines
from sigmerge.probing.exemplars import read_exemplars
from sigmerge.probing.generate import saved_dtype
from sigmerge.records import Provenance, read, read_plan, read_repair_plan
from tests.command_line import sigmerge as command
from tests.kept_entries import kept_root
from tests.pools import make_pool

Reader = Callable[[Path], object]
HARNESS = {"experts": {"m": "file"}, "anchor": "file", "domains": {"m": "task/metric"}}
READERS: dict[str, tuple[Reader, type[SigmergeError]]] = {
    "plan": (read_plan, RecipeError),
    "plan of a repair": (read_repair_plan, RecipeError),
    "provenance": (lambda file: read(Provenance, file, PoolError), PoolError),
    "scores": (lambda file: read_scores(file.name, file.parent), ScoreError),
    "results of the harness": (lambda file: read_scores(HARNESS, file.parent), ScoreError),
    "probe": (read_exemplars, RecipeError),
    "suite": (load_suite, RecipeError),
    "splits": (splits.read, ScoreError),
    "records": (lambda file: read_rows(file, File(path="x")), ScoreError),
    "lines": (read_lines, PoolError),
    "configuration": (lambda file: saved_dtype(file.parent), PoolError),
}
CONTENT: dict[str, bytes] = {
    "deep lists": b"[" * 5000 + b"]" * 5000,
    "deep objects": b'{"a":' * 200 + b"1" + b"}" * 200,
    "deep inside": json.dumps({"prompt": "x", "experts": json.loads("[" * 90 + "]" * 90)}).encode(),
    "no text": b"\xff\xfe\x00\x01{",
    "cut off": b'{"a": ',
    "a huge number": b'{"seed": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("content", CONTENT)
@pytest.mark.parametrize("reader", READERS)
def test_content_that_no_reader_takes(tmp_path: Path, reader: str, content: str) -> None:
    read_it, error = READERS[reader]
    for name in ("file", "config.json"):
        (tmp_path / name).write_bytes(CONTENT[content])
    with pytest.raises(error) as caught:
        read_it(tmp_path / "file")
    assert len(str(caught.value)) < 1000


WRONG: list[tuple[str, Any]] = [
    ("plan", []), ("plan", {"operator": 5, "seed": "x"}), ("plan", {"experts": 5}),
    ("plan", {"operator": "ties", "seed": 0, "experts": ["math"]}),
    ("plan of a repair", {"operator": "ties", "seed": 0, "anchor": 5, "quota": 5, "order": 5}),
    ("provenance", {"inputs": 5}), ("provenance", {"outputs": ["a"]}),
    ("scores", {"experts": 5, "anchor": {}}), ("scores", {"experts": {"m": 5}, "anchor": {}}),
    ("scores", {"experts": {}, "anchor": []}),
    ("results of the harness", {"results": 5}),
    ("results of the harness", {"results": {"task": 5}}),
    ("results of the harness", {"results": {"task": {"metric": 10**400}}}),
    ("probe", {"prompt": 5}), ("probe", [1]), ("probe", {"prompt": "x", "response": {}}),
    ("suite", 5), ("suite", {"name": {}, "domains": 5}),
    ("suite", {"name": "s", "domains": {"d": {"b": 5}}}),
    ("suite", {"name": "s", "domains": {"d": 5}}),
    ("suite", {"name": "s", "domains": {"d": {"b": {"harness": ["jsonl"]}}}}),
    ("suite", {"name": "s", "domains": {"d": {"b": {"harness": {}}}}}),
    ("splits", {"benchmarks": {"b": 5}}), ("splits", {"benchmarks": []}),
    ("records", 5), ("records", [5]), ("configuration", 5),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "content"), WRONG, ids=[f"{r}-{i}" for i, (r, _) in
                                                            enumerate(WRONG)])  # fmt: skip
def test_fields_of_the_wrong_kind(tmp_path: Path, reader: str, content: Any) -> None:
    read_it, error = READERS[reader]
    for name in ("file", "config.json"):
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(error):
        read_it(tmp_path / "file")


@pytest.mark.parametrize("part", ["experts", "anchor", "domains"])
def test_a_list_of_result_files_of_the_wrong_kind(tmp_path: Path, part: str) -> None:
    with pytest.raises(ScoreError, match=f"repair.scores: {part} cannot be used"):
        read_scores({**HARNESS, part: 5}, tmp_path)


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_not_read(tmp_path: Path, reader: str) -> None:
    for name in ("file", "config.json"):
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(SigmergeError):
        READERS[reader][0](tmp_path / "file")


def test_files_and_what_they_expand_to_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LARGEST_RECORDS", 10_000)
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b" " * 10**7))
    with pytest.raises(ScoreError, match="expands to more than"):
        read_rows(tmp_path / "bomb.jsonl.gz", File(path="bomb.jsonl"))
    monkeypatch.setattr(folder, "LARGEST_UNPACKED", 10_000)
    with pytest.raises(ScoreError, match="expands to more than"):
        folder.PublicData(tmp_path).content("bomb.jsonl")
    (tmp_path / "large.jsonl").write_bytes(b" " * 20_000)
    with pytest.raises(ScoreError, match="too large for a file of records"):
        read_rows(tmp_path / "large.jsonl", File(path="large.jsonl"))
    assert documents.LARGEST_DOCUMENT == 64 << 20


def _flip(note: Path) -> None:
    """One bit of a number, such that the note can still be read."""
    content = bytearray(note.read_bytes())
    at = content.rindex(b".") + 1 if note.suffix == ".json" else len(content) // 2
    content[at] ^= 1
    note.write_bytes(content)


GARBLED: dict[str, Callable[[Path], object]] = {
    "emptied": lambda note: note.write_bytes(b""),
    "text": lambda note: note.write_text("garbled"),
    "another kind": lambda note: note.write_text('{"scores": 5}'),
    "deep": lambda note: note.write_text("[" * 5000),
    "a bit": _flip,
    "a folder": lambda note: (note.unlink(), note.mkdir()),
    "a FIFO": lambda note: (note.unlink(), os.mkfifo(note)),
}


@pytest.mark.parametrize("damage", GARBLED)
def test_a_garbled_note_of_scores_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    pool = make_pool(tmp_path / "pool", experts=1)
    calls: list[Path] = []

    def measure(folder: Path) -> MeasuredScores:
        calls.append(folder)
        return MeasuredScores({"math": 0.5})

    scorer = CheckpointScorer("counted", measure, lambda _: ScoredBy({"by": damage}), keeps=True)
    assert scorer(pool.reference) == scorer(pool.reference) == MeasuredScores({"math": 0.5})
    assert len(calls) == 1
    [note] = kept_root().glob("score/*/*.json")
    GARBLED[damage](note)
    assert scorer(pool.reference).scores == {"math": 0.5}
    assert len(calls) == 2


def test_scores_whose_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "file/cache"))
    pool = make_pool(tmp_path / "pool", experts=1)
    measured = MeasuredScores({"math": 0.5})
    scorer = CheckpointScorer("kept", lambda _: measured, lambda _: ScoredBy(), keeps=True)
    assert scorer(pool.reference).scores == {"math": 0.5}


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r"


def test_names_in_a_file_do_not_command_the_terminal(tmp_path: Path) -> None:
    """Where the output is a terminal, nothing strips escape sequences."""
    pool = make_pool(tmp_path / "pool", layers=1, tokenizer=True)
    recipe, expert = pool.write(pool.recipe("linear")), pool.experts["math"] / "model.safetensors"
    assert command("merge", recipe, tmp_path / "out").code == 0
    (tmp_path / f"out/{HOSTILE}.bin").write_bytes(b"x")
    shown = command("verify", tmp_path / "out").out
    weights = load_file(expert)
    save_file({**weights, HOSTILE: weights["model.norm.weight"].clone()}, expert)
    refused = command("merge", recipe, tmp_path / "more").err
    for text in (shown, refused):
        assert "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\r" in text, text
        assert not [char for char in text if not char.isprintable() and char != "\n"]
