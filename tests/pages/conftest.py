"""The results that pages of experiments are made of."""

from tests.lab.analysis.conftest import analysis, results, store

__all__ = ["analysis", "results", "store"]
