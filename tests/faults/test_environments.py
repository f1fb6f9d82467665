"""Environments that are no fault of ours: what is said, or that nothing need be."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sigmerge.cli import ending
from sigmerge.engine import cluster
from sigmerge.errors import OutputError, SigmergeError
from sigmerge.files import cache
from sigmerge.files.scratch import scratch
from tests.command_line import sigmerge


@pytest.mark.parametrize(
    "problem",
    [
        Exception("The current node timed out during startup.\nMore of it"),
        RuntimeError(""),
        FileNotFoundError(2, "No such file or directory", "/none/ray"),
        AssertionError(),
    ],
)
def test_ray_that_cannot_start(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    def init(*_: Any, **__: Any) -> None:
        raise problem

    ray = types.SimpleNamespace(
        is_initialized=lambda: False,
        init=init,
        exceptions=types.SimpleNamespace(RayError=type("RayError", (Exception,), {})),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(SigmergeError, match="Ray on this machine: cannot be used") as raised:
        cluster.connect(None, 1)
    assert raised.value.exit_code == 1
    said = str(raised.value)
    assert "\n" not in said and "RAY_TMPDIR" in said and "threads give the same bytes" in said


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing names a home: no variable, and no entry of the user."""
    for name in ("HOME", "XDG_CACHE_HOME", "SIGMERGE_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_: int) -> Any:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache._users.cache_clear()
    yield tmp_path
    cache._users.cache_clear()


def test_a_user_without_a_home(homeless: Path) -> None:
    place = cache.cache_folder("some")
    assert place == homeless / f"sigmerge-cache-{os.getuid()}" / "some"
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert sigmerge("operators").code == 0
    assert os.environ.pop("SIGMERGE_CACHE") == str(place.parent)


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_folder_that_others_may_have_filled_is_not_believed(homeless: Path, kind: str) -> None:
    place = homeless / f"sigmerge-cache-{os.getuid()}"
    if kind == "a link":
        (homeless / "theirs").mkdir(mode=0o700)
        place.symlink_to(homeless / "theirs")
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises(OutputError, match="Set HOME, or SIGMERGE_CACHE"):
        cache.cache_place("some")


def test_no_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/none']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(OutputError, match=r"\['/none'\].*Set TMPDIR"), scratch():
        pass


def test_what_libraries_are_told_is_named_where_something_unknown_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(**_: Any) -> None:
        raise ValueError("loud is no level")

    monkeypatch.setattr(ending.app, "main", fails)
    for name in (name for name in os.environ if name.startswith(ending._LIBRARIES)):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "loud")
    ran = sigmerge("operators")
    assert ran.code == 1
    assert "loud is no level" in ran.err
    assert "Try first without what libraries are told by TRANSFORMERS_VERBOSITY." in ran.err
