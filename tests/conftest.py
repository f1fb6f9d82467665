"""Shared set-up. jaxtyping shapes in the maths are checked at every call while tests run."""

from __future__ import annotations

import pytest
from jaxtyping import install_import_hook

install_import_hook("sigmerge.method", "beartype.beartype")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads what an earlier run remembered, or leaves anything in the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SIGMERGE_CACHE", str(tmp_path_factory.mktemp("cache")))
