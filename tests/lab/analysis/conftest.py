from __future__ import annotations

from pathlib import Path

import pytest

from sigmerge.lab.analysis.experiment import Analysis, analyse
from sigmerge.lab.analysis.results import Results
from tests.lab.analysis import experiment


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic experiment of two pools with every kind of run."""
    return experiment.make_store(tmp_path_factory.mktemp("store") / "results.sqlite", pools=2)


@pytest.fixture(scope="session")
def results(store: Path) -> Results:
    return experiment.read(store)


@pytest.fixture(scope="session")
def analysis(results: Results) -> Analysis:
    return analyse(results)
