"""Every public name has an example in its docstring, and the examples run in order."""

from __future__ import annotations

import doctest
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sigmerge
from sigmerge import api, testing
from sigmerge.nano.files import POOL
from sigmerge.operators.plugin import PLUGINS

FIRST = ("merge", "deficits", "repair")
"""What the examples of others stand on."""
NAMES = [*FIRST, *(name for name in sigmerge.__all__ if name not in FIRST)]


@pytest.fixture(scope="module")
def scope(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("docstrings")
    (folder / "pool").symlink_to(POOL)
    before = dict(PLUGINS.registered)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield {"Path": Path, "np": np, "replace": replace}
    PLUGINS.registered.clear()
    PLUGINS.registered.update(before)


def run(documented: Any, scope: dict[str, Any], name: str) -> int:
    """How many examples its docstring has; each is run."""
    found = doctest.DocTestParser().get_doctest(documented.__doc__, scope, name, None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    runner.run(found, out=scope.setdefault("told", []).append, clear_globs=False)
    scope.update(found.globs)
    return len(found.examples)


def test_the_examples_run(scope: dict[str, Any]) -> None:
    assert run(api, scope, "api")
    without = [name for name in NAMES if not run(getattr(sigmerge, name), scope, name)]
    assert without == []
    assert run(sigmerge.Method.of, scope, "Method.of")
    assert run(testing.check_operator, scope, "check_operator")
    assert not scope.get("told"), "".join(scope["told"])
