"""Evaluations have a cache of their own in each test."""

import pytest


@pytest.fixture(autouse=True)
def _empty_cache(own_cache: object) -> None:
    """What another test scored is not found."""
