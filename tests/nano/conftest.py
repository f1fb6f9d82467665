"""Every test of this folder runs torch on one thread."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Models this small are faster on one thread, and the bytes do not depend on the machine."""
    torch.set_num_threads(1)
