"""docs/equations.md names functions and tests that exist."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = [
    name.strip()
    for span in re.findall(r"`([^`]+)`", (ROOT / "docs" / "equations.md").read_text("utf-8"))
    for name in span.split(",")
]
FUNCTIONS = sorted({name for name in CODE if re.match(r"(method|core|gpu|probing)\.\w+\.", name)})
TESTS = sorted({name for name in CODE if "::" in name})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_exists(name):
    module, function = name.rsplit(".", 1)
    assert hasattr(importlib.import_module(f"sigmerge.{module}"), function)


@pytest.mark.parametrize("name", TESTS)
def test_test_exists(name):
    path, wanted = name.split("::")
    tree = ast.parse((ROOT / "tests" / path).read_text("utf-8"))
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert any(re.fullmatch(wanted.replace("*", r"\w*"), name) for name in defined)
