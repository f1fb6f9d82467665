"""YAML within limits; one reader for recipes and suites."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from sigmerge.errors import RecipeError
from sigmerge.files.yaml_documents import LARGEST_YAML, as_yaml, in_yaml, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: [1, {b: 2}]", {"a": [1, {"b": 2}]}),
        ("a: &x {b: 1}\nc: *x", {"a": {"b": 1}, "c": {"b": 1}}),
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
        ("a: [1e9, 5e-1, -1E+2, .5e-1, 1.e3, 1e-05]", {"a": [1e9, 0.5, -100.0, 0.05, 1e3, 1e-5]}),
        (
            "a: ['1e9', 1e, e1, 1e5f, 1e4567, v1e9]",
            {"a": ["1e9", "1e", "e1", "1e5f", "1e4567", "v1e9"]},
        ),
        (r'{"a": "\ud83d\ude00", "\ud83d\ude00": "\u00e9"}', {"a": "😀", "😀": "é"}),
        ("a: 1\n---\n", {"a": 1}),
        ("# none\n---\n---\na: 1\n---\n# nothing\n...\n", {"a": 1}),
        ("---\n---\n", None),
        ('{\t"a":\t[1,\t{"b": "\\t"}]\n\t}', {"a": [1, {"b": "\t"}]}),
        ("a: " + "x" * 5000, {"a": "x" * 5000}),
    ],
)
def test_sound_documents(text: str, value: Any) -> None:
    assert parse_yaml(text, "text").value == value


@pytest.mark.parametrize("value", ["1e9", "5e-1", "1e5f", "😀", "on", "1", "a\tb", 1e-05, 1e22])
def test_what_is_written_is_read_again(value: Any) -> None:
    assert parse_yaml(as_yaml({"a": [value]}), "text").value == {"a": [value]}
    if isinstance(value, str):
        assert parse_yaml(f"{{a: {in_yaml(value)}}}", "text").value == {"a": value}


LAUGHS = "\n".join(
    f"l{i}: &l{i} [{', '.join([f'*l{i - 1}' if i else 'x'] * 10)}]" for i in range(9)
)
MERGES = "l0: &l0 {x: 1}\n" + "\n".join(
    f"l{i}: &l{i} {{<<: [*l{i - 1}, *l{i - 1}]}}" for i in range(1, 40)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested deeper than 64 levels"),
        ("a:\n" + "".join(" " * i + "- \n" for i in range(100)), "not valid YAML"),
        ("{a: " * 100 + "}" * 100, "nested deeper than 64 levels"),
        (LAUGHS, "more than 200000 values"),
        (MERGES, "more than 200000 values"),
        ("&a [*a]", "alias inside what it stands for"),
        ("&a {b: {c: *a}}", "alias inside what it stands for"),
        ("*a", "undefined alias"),
        ("1:" * 3000 + "1", "too long for a number"),
        ("9" * 5000, "too long for a number"),
        ("x" * (LARGEST_YAML + 1), "larger than 1 MiB"),
        ("!!python/object/apply:os.system [x]", "could not determine a constructor"),
        ("!!timestamp x", "not valid YAML"),
        ("!!int x", "not valid YAML"),
        ("!!int ''", "not valid YAML"),
        ("!!bool x", "not valid YAML"),
        ("!!set [a]", "not valid YAML"),
        ("!!omap {a: 1}", "not valid YAML"),
        ("a: 1\n---\nb: 2", "several YAML documents"),
        ("a: 1\n---\n''", "several YAML documents"),
        (r'a: "\ud83d"', "half of a character"),
        (r'a: "\ude00\ud83d"', "half of a character"),
        ("a:\n\tb: 1", "not valid YAML"),
        ("? [a]\n: 1", "unhashable key"),
        ("a: \x00", "not valid YAML"),
        ("2001-99-99", "not valid YAML"),
    ],
)
def test_documents_beyond_the_limits(text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as raised:
        parse_yaml(text, "text", RecipeError)
    assert str(raised.value).startswith("text: ") and len(str(raised.value)) < 500


def test_the_scanner_does_not_read_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a key it looks at the next 1,024 characters, and at all open brackets for each."""
    opened: list[object] = []
    start = yaml.SafeLoader.fetch_flow_collection_start
    monkeypatch.setattr(yaml.SafeLoader, "fetch_flow_collection_start",
                        lambda self, kind: (opened.append(kind), start(self, kind)))  # fmt: skip
    with pytest.raises(RecipeError, match="deeper than 64"):
        parse_yaml("a: " + "[" * 3000, "text", RecipeError)
    assert 64 <= len(opened) <= 70


def test_lines_and_repeated_keys() -> None:
    found = parse_yaml("a: 1\nb:\n  - c: 2\n    c: 3\na: 4\n", "text")
    assert found.twice == (("b", 0, "c"), ("a",))
    assert (found.lines[("b",)], found.lines[("b", 0, "c")], found.lines[("a",)]) == (2, 4, 5)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1\nb: {c: 1, c: 2}\n")
    with pytest.raises(RecipeError, match=r"a\.yaml: line 2, 'b\.c': is given twice"):
        read_yaml(file, "a suite", RecipeError)
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RecipeError, match="is not UTF-8"):
        read_yaml(file, "a suite", RecipeError)
    with pytest.raises(RecipeError, match="no such file; a suite is expected"):
        read_yaml(tmp_path / "none", "a suite", RecipeError)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecipeError, match="is not a regular file"):
        read_yaml(tmp_path / "pipe", "a suite", RecipeError)
    with pytest.raises(RecipeError, match="is not a regular file"):
        read_yaml(Path("/dev/zero"), "a suite", RecipeError)
    with pytest.raises(RecipeError, match="is a folder"):
        read_yaml(tmp_path, "a suite", RecipeError)
