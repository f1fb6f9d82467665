from __future__ import annotations

from pathlib import Path

import pytest

from tests.pools import PoolOnDisk, make_pool


@pytest.fixture
def pool(tmp_path: Path) -> PoolOnDisk:
    return make_pool(tmp_path / "pool", experts=2, layers=1)
