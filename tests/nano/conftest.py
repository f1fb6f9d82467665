"""A miniature pool, trained once for the whole session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sigmerge.evaluation.run import nano_scores
from sigmerge.nano.train import train


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Models this small are faster on one thread, and the bytes do not depend on the machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory, _one_thread: None) -> Path:
    return train(tmp_path_factory.mktemp("nano") / "mini", seed=0, size="mini", measure=nano_scores)
