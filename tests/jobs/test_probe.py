"""`probe build`: which prompts are drawn, how they read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sigmerge.nano.files import POOL, load_items
from sigmerge.probing.exemplars import read_prompts
from tests.command_line import refused, sigmerge


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    columns = {"math": "query", "coding": "instruction", "multilingual": "inputs"}
    made = []
    for domain, column in columns.items():
        lines = [json.dumps({column: f"{domain} {i}", "response": "no"}) for i in range(40)]
        made.append(tmp_path / f"{domain}.jsonl")
        made[-1].write_text("\n".join(lines))
    return made


def build(files: list[Path], out: Path, *more: str) -> list[str]:
    named = [word for file in files for word in ("--data", str(file))]
    ran = sigmerge("probe", "build", out, *named, *more)
    assert ran.code == 0, ran
    return read_prompts(out)


def test_twenty_of_each_domain_up_to_the_response(files: list[Path], tmp_path: Path) -> None:
    prompts = build(files, tmp_path / "probe.jsonl")
    assert len(prompts) == len(set(prompts)) == 60
    assert all(text.endswith("### Response:\n") and "no" not in text for text in prompts)
    assert sum("math " in text for text in prompts) == 20
    again = build(files, tmp_path / "again.jsonl")
    other = build(files, tmp_path / "other.jsonl", "--seed", "1")
    assert again == prompts and sorted(other) != sorted(prompts)


def test_the_draw_does_not_depend_on_the_order_of_lines(files: list[Path], tmp_path: Path) -> None:
    first = build(files, tmp_path / "one.jsonl")
    files[0].write_text("\n".join(reversed(files[0].read_text().splitlines())))
    assert build(files, tmp_path / "two.jsonl") == first


def test_from_a_suite_only_calibration_items(tmp_path: Path) -> None:
    ran = sigmerge("probe", "build", tmp_path / "p.jsonl", "--suite", "nano", "--per-domain", "3")
    assert ran.code == 0, ran
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(rows) == 15
    for row in rows:
        known = {fact.prompt for fact in load_items("calibration", row["domain"], POOL)}
        assert row["prompt"] in known


def test_what_is_refused(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "probe.jsonl"
    said = refused(
        5, "probe", "build", out, "--data", files[0], "--per-domain", "41", beside=tmp_path
    )
    assert "math: 40 prompts" in said
    assert "Give --suite" in refused(2, "probe", "build", out, beside=tmp_path)
    files[0].write_text('{"text": "x"}')
    said = refused(5, "probe", "build", out, "--data", files[0], beside=tmp_path)
    assert "math.jsonl, line 1: has no prompt" in said
    said = refused(2, "probe", "build", files[1], "--data", files[2], beside=tmp_path)
    assert "exists already" in said


def test_a_file_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_bytes('{"prompt": "café"}\n'.encode("latin-1"))
    said = refused(
        5, "probe", "build", tmp_path / "p.jsonl", "--data", tmp_path / "old.jsonl", beside=tmp_path
    )
    assert "old.jsonl, line 1: not valid JSON" in said
