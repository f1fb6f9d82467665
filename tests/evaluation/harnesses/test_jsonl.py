"""Matchers of own items, on answers as models write them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sigmerge.errors import ScoreError
from sigmerge.evaluation.harnesses.jsonl import Jsonl, matches
from sigmerge.evaluation.sources import Data


@pytest.mark.parametrize(
    ("matcher", "output", "answer", "right"),
    [
        ("exact", " Paris\n", "Paris", True),
        ("exact", "paris", "Paris", False),
        ("contains", "It is Paris.", "Paris", True),
        ("number", "So 3 + 4 = 7. The answer is 1,007.00 dollars", "1007", True),
        ("number", "The answer is -3", 3, False),
        ("number", "no idea", "3", False),
        ("number", "it is .5", "0.5", True),
        ("regex", "42 apples", r"^\d+ apples$", True),
        ("regex", "many apples", r"^\d+ apples$", False),
        ("choice", "(B) because", "B", True),
        ("choice", "Answer: c", "C", True),
        ("choice", "Because", "B", False),
        ("choice", "", "B", False),
    ],
)
def test_matchers(matcher: str, output: str, answer: object, right: bool):
    assert matches(matcher, output, answer) is right


def test_case_can_be_ignored():
    assert matches("exact", "paris", "Paris", ignore_case=True)
    assert matches("regex", "YES", "yes", ignore_case=True)


@pytest.mark.parametrize(
    ("last", "mark", "words"),
    [
        ({"prompt": "p"}, {}, "the record all/1 has no 'answer'"),
        ({"answer": "a"}, {}, "the record all/1 has no 'prompt'"),
        ({"prompt": "p", "answer": None}, {}, "the record all/1 has no 'answer'"),
        (
            {"prompt": "p", "answer": "("},
            {"matcher": "regex"},
            r"'\(' of the record all/1 is no reg",
        ),
    ],
)
def test_a_record_that_cannot_be_asked_is_refused(
    tmp_path: Path, last: dict, mark: dict, words: str
):
    rows = [{"prompt": "p", "answer": "a"}, last]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = Jsonl.model_validate({"harness": "jsonl", "files": "q.jsonl", **mark})
    with pytest.raises(ScoreError, match=words):
        own.load("b", Data(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.jsonl", b'{"prompt": "\xff", "answer": "a"}'),
        ("q.jsonl.gz", gzip.compress(b'{"prompt": "p", "answer": "a"}', mtime=0)[:-9]),
        ("q.jsonl.gz", b'{"prompt": "p", "answer": "a"}'),
    ],
)
def test_a_damaged_file_of_records_is_told(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    own = Jsonl.model_validate({"harness": "jsonl", "files": "q.jsonl"})
    with pytest.raises(
        ScoreError, match=rf"{name}(, line 1: not valid JSON|: cannot be (read|unpacked))"
    ):
        own.load("b", Data(tmp_path), tmp_path)
