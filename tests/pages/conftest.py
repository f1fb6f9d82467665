"""The results that pages of experiments are made of."""

from tests.lab.analysis.conftest import results, store

__all__ = ["results", "store"]
