"""Models of one shape whose configurations compute something else: said before a tensor is read."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import sigmerge
from sigmerge.checkpoints.source import PoolSource
from sigmerge.errors import PoolError, SigmergeWarning
from tests.checkpoints.damage import edit_config
from tests.command_line import refused
from tests.command_line import sigmerge as command
from tests.pools import PoolOnDisk, make_pool

TOLD = "rope_theta: 500000.0 in reference, 10000.0 in math"
TAKEN = f"{TOLD}; the result takes the reference's"


@pytest.fixture
def pool(tmp_path: Path) -> PoolOnDisk:
    made = make_pool(tmp_path / "pool", experts=1)
    edit_config(made.reference, rope_theta=500000.0)
    edit_config(made.experts["math"], rope_theta=10000.0)
    return made


def test_a_merge_says_it_before_a_tensor_is_read(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*given: object) -> None:
        raise AssertionError("a tensor was read")

    with monkeypatch.context() as patch, pytest.warns(SigmergeWarning, match=TAKEN):
        patch.setattr(PoolSource, "__enter__", read)
        with pytest.raises(AssertionError):
            sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "out")


def test_plan_and_card_say_it(pool: PoolOnDisk, tmp_path: Path) -> None:
    with pytest.warns(SigmergeWarning):
        made = sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "out")
    assert TAKEN in made.plan.warnings and TAKEN in made.provenance.warnings
    assert f"- note: {TAKEN}" in (tmp_path / "out/README.md").read_text()


def test_the_commands_say_it(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.write(pool.recipe("task_arithmetic"))
    told = command("merge", recipe, tmp_path / "out", "--dry-run")
    assert f"note: {TAKEN}" in told.out and f"warning: {TAKEN}" in told.err
    with warnings.catch_warnings():  # a process says it once
        warnings.simplefilter("always")
        told = command("merge", recipe, tmp_path / "out")
    assert f"warning: {TAKEN}" in told.out and told.err.startswith(f"warning: {TAKEN}")
    assert TOLD in command("inspect", pool.reference, pool.experts["math"]).out
    assert TOLD in command("inspect", tmp_path / "pool").out
    assert (
        f"warning: {TOLD}"
        in command("verify", "--pool", pool.reference, *pool.experts.values()).out
    )


def test_strict_makes_it_an_error(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.write(pool.recipe("task_arithmetic"))
    for words in ((), ("--dry-run",)):
        given = "merge", recipe, tmp_path / "out", "--strict", *words
        assert TAKEN in refused(3, *given, beside=tmp_path)
    told = command("verify", "--pool", "--strict", pool.reference, *pool.experts.values())
    assert told.code == 3 and f"problem: computation: members: {TAKEN}" in told.out
    with pytest.raises(PoolError, match=TAKEN):
        sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "out", strict=True)


def test_the_settings_of_one_checkpoint(pool: PoolOnDisk) -> None:
    found = sigmerge.inspect(pool.reference)
    assert found.settings["rope_theta"] == 500000.0 and found.warnings == found.others == ()
    assert "rope_theta 500000.0" in command("inspect", pool.reference).out


def stack(pool: PoolOnDisk, *ranges: list[tuple[str, int, int]]) -> dict[str, Any]:
    places = {"reference": pool.reference, **pool.experts}
    slices = [
        {"sources": [{"model": str(places[m]), "layer_range": [a, b]} for m, a, b in sources]}
        for sources in ranges
    ]
    more = {"base_model": str(pool.reference), "parameters": {"t": 0.5}} if ranges[0][1:] else {}
    return {"merge_method": "slerp" if more else "passthrough", "slices": slices, **more}


def test_a_stack_says_it_too(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = stack(pool, [("reference", 0, 2)], [("math", 1, 2)])
    with pytest.warns(SigmergeWarning):
        made = sigmerge.merge(recipe, tmp_path / "out")
    told = "rope_theta: 500000.0 in reference-2, 10000.0 in math; the result takes that of "
    assert made.plan.warnings == (f"{told}reference-2",)
    with pytest.raises(PoolError, match=told):
        sigmerge.merge(recipe, tmp_path / "strict", strict=True)


def test_kinds_that_a_stack_writes_out_are_not_said(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", style="gemma", experts=1, layers=3)
    edit_config(pool.experts["math"], layer_types=["full_attention"] * 3)
    recipe = stack(pool, [("reference", 0, 2)], [("math", 1, 3)])
    assert sigmerge.merge(recipe, tmp_path / "out", strict=True).plan.warnings == ()


def test_a_layer_made_of_layers_of_other_kinds(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", style="gemma", experts=1, layers=3)
    ranges = [("reference", 0, 1), ("math", 0, 1)], [("reference", 0, 2), ("math", 1, 3)]
    recipe = stack(pool, *ranges)
    told = "layer_types of layer 1: 'sliding_attention' in layer 0 of base, 'full_attention'"
    with pytest.raises(PoolError, match=told):
        sigmerge.merge(recipe, tmp_path / "out", strict=True)


def test_a_repair_says_it_where_it_merges_nothing(pool: PoolOnDisk, tmp_path: Path) -> None:
    with pytest.warns(SigmergeWarning):
        sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "anchor")
    (tmp_path / "anchor/sigmerge/plan.json").unlink()
    edit_config(tmp_path / "anchor", rope_theta=7.0)
    decided = {"repair": {"shares": {"math": 1.0}, "capacity": 0.1, "scale": 0.5}}
    recipe = pool.recipe("task_arithmetic", **decided)
    made = sigmerge.repair(recipe, tmp_path / "out", anchor=tmp_path / "anchor")
    own = "rope_theta: 500000.0 in reference, 7.0 in anchor; the result takes that of anchor"
    assert made.warnings == (TAKEN, own)


def test_an_adapter_from_a_model_that_computes_something_else(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    with pytest.warns(SigmergeWarning):
        made = sigmerge.extract(pool.experts["math"], tmp_path / "out", base=pool.reference)
    assert "rope_theta: 500000.0 in base, 10000.0 in model" in made.warnings[0]
