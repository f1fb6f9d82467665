"""docs/architecture.md and docs/rulings.md agree with the code."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.test_architecture import folder_graph, room_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/sigmerge"
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
RULINGS = (ROOT / "docs/rulings.md").read_text(encoding="utf-8")


def drawn_rows() -> list[list[str]]:
    """The rooms of each row of the drawing, from the top."""
    [drawing] = re.findall(r"^```text\n(.*?)^```", ARCHITECTURE, re.S | re.M)
    rows: list[list[str]] = [[]]
    for line in drawing.splitlines():
        if line.startswith("│"):
            rows[-1] += line[2:38].split()
        elif line.startswith("├"):
            rows.append([])
    return rows


def test_every_room_is_drawn_once() -> None:
    drawn = [name for row in drawn_rows() for name in row]
    assert sorted(drawn) == sorted(folder_graph(room_of))


def test_imports_go_down_in_the_drawing() -> None:
    row_of = {name: i for i, row in enumerate(drawn_rows()) for name in row}
    upward = [
        f"{name} imports {other}"
        for name, others in folder_graph(room_of).items()
        for other in others
        if row_of[other] <= row_of[name]
    ]
    assert upward == []


def test_every_file_of_the_walks_exists() -> None:
    named = set(re.findall(r"`([\w/]+(?:\.\w+|/))`", ARCHITECTURE)) - {".sigmerge/", "probe.jsonl"}
    assert len(named) > 30
    lost = [name for name in named if not any((at / name).exists() for at in (SOURCE, ROOT))]
    assert lost == []


RULING = re.compile(r"^\| (\d+) \| .* \| (`[^|]+`) \| (`[^|]+`) \|$", re.M)
LINES = {int(number): (functions, tests) for number, functions, tests in RULING.findall(RULINGS)}
NUMBERS = [int(number) for number in re.findall(r"^\| (\d+) \|", RULINGS, re.M)]


def test_rulings_are_numbered_without_gaps() -> None:
    assert NUMBERS == list(LINES) == list(range(1, len(LINES) + 1))


@pytest.mark.parametrize("number", LINES)
def test_a_ruling_has_its_function_and_its_test(number: int) -> None:
    functions, tests = LINES[number]
    for name in re.findall(r"`([\w.]+)`", functions):
        module, function = name.rsplit(".", 1)
        assert hasattr(importlib.import_module(f"sigmerge.{module}"), function), name
    for name in re.findall(r"`([^`]+)`", tests):
        file, _, wanted = name.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert wanted in [n.name for n in tree.body if isinstance(n, ast.FunctionDef)], name


def test_the_code_refers_to_rulings_that_exist() -> None:
    found = {
        int(number)
        for file in SOURCE.rglob("*.py")
        for phrase in re.findall(r"rulings? ([\d, and]+)", file.read_text(encoding="utf-8"))
        for number in re.findall(r"\d+", phrase)
    }
    assert found and found <= set(LINES)


def test_the_code_refers_to_no_document_outside_the_repository() -> None:
    outside = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for folder in (SOURCE, ROOT / "tests", ROOT / "docs")
        for file in folder.rglob("*")
        if file.suffix in (".py", ".md") and file != Path(__file__)
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"design §|design\.md|\(design[ :)]", line)
    ]
    assert outside == []
