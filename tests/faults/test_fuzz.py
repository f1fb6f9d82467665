"""The fuzzer runs: every target reads its sound input, and some damaged ones within the limits."""

from __future__ import annotations

import sys

import pytest
from fuzz import memory
from fuzz.__main__ import main
from fuzz.corpus import MEASURED, PARAMETERS
from fuzz.targets import TARGETS

from sigmerge import kept
from sigmerge.operators.table import OPERATORS, operator
from tests.forks import forked

EACH = 8
"""Inputs of a target; `python -m fuzz` reads hundreds."""


def test_every_target_reads_damaged_inputs() -> None:
    def work() -> None:
        sys.argv = ["fuzz", "--inputs", str(EACH)]
        sys.exit(main())

    ran = forked(work)
    assert ran.code == 0, ran
    assert f"{EACH * len(TARGETS)} inputs, 0 failures" in ran.out.splitlines()[-1]


def test_every_method_is_fuzzed() -> None:
    """Those that read exemplars apart: their pool has models that run."""
    read = {name for name in OPERATORS if operator(name).needs}
    assert set(PARAMETERS) == set(OPERATORS) - read and set(MEASURED) == read


def test_what_is_kept_changes_no_result() -> None:
    """`python -m fuzz.memory` makes thousands of changes; here are a few."""
    found = memory.campaign(changes=12, kills=2, seed=0, commands=["deficits", "profile"])
    assert found.wrong == [] and found.found > 0


def test_a_key_that_forgets_its_inputs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.Derivation, "input_digests", {})
    assert memory.campaign(changes=16, kills=0, seed=0, commands=["profile"]).wrong != []
