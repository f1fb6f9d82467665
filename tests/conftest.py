"""Shared set-up. jaxtyping shapes in the maths are checked at every call while tests run."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock
from jaxtyping import install_import_hook

install_import_hook("sigmerge.method", "beartype.beartype")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads what an earlier run remembered, or leaves anything in the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SIGMERGE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A miniature pool, trained once for all workers of the run. No test changes it."""
    from sigmerge.evaluation.run import nano_scores
    from sigmerge.nano.train import train

    base = tmp_path_factory.getbasetemp()
    pool = (base if worker_id == "master" else base.parent) / "mini"
    with FileLock(pool.with_suffix(".lock")):
        return pool if pool.exists() else train(pool, 0, "mini", measure=nano_scores)
