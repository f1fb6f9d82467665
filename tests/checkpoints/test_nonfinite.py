"""NaN and infinity: they stop a run that reads or would write them, unless allowed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints.damage import (
    NAME,
    set_value,
)
from tests.command_line import sigmerge
from tests.pools import (
    PoolOnDisk,
    make_pool,
    read_weights,
)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("value", "word"), [(float("nan"), "nan"), (float("-inf"), "-inf")])
@pytest.mark.parametrize("method", ["linear", "ties"])
def test_nonfinite_inputs_stop_the_run(
    tmp_path: Path, dtype: str, value: float, word: str, method: str
) -> None:
    pool = make_pool(tmp_path / "pool", experts=2, layers=1, dtype=dtype)
    set_value(37, value)(pool)
    recipe = pool.write(pool.recipe(method))
    ran = sigmerge("merge", recipe, tmp_path / "out")
    assert ran.code == 3 and "Traceback" not in ran.err
    assert f"math: tensor {NAME} holds {word} at flat index 37" in ran.err
    assert "--allow-nonfinite" in ran.err
    assert not (tmp_path / "out").exists()


def test_nonfinite_values_of_the_reference_are_named_as_such(pool: PoolOnDisk) -> None:
    set_value(3, float("inf"), "reference")(pool)
    ran = sigmerge("merge", pool.write(pool.recipe("ties")), pool.root / "out")
    assert ran.code == 3 and f"reference: tensor {NAME} holds inf at flat index 3" in ran.err


def test_nonfinite_values_that_would_only_be_copied_stop_the_run(pool: PoolOnDisk) -> None:
    set_value(3, float("nan"), "reference", "model.norm.weight")(pool)
    recipe = pool.write(pool.recipe("ties", {"outside": "reference"}))
    ran = sigmerge("merge", recipe, pool.root / "out")
    assert ran.code == 3 and "reference: tensor model.norm.weight holds nan" in ran.err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nonfinite_values_pass_when_allowed(pool: PoolOnDisk, dtype: str) -> None:
    set_value(3, float("nan"))(pool)
    set_value(4, float("inf"))(pool)
    recipe = pool.write(pool.recipe("linear", dtype=dtype))
    assert sigmerge("merge", recipe, pool.root / "out", "--allow-nonfinite").code == 0
    written = read_weights(pool.root / "out")
    assert np.isnan(written[NAME].ravel()[3]) and np.isinf(written[NAME].ravel()[4])
    assert sum(int((~np.isfinite(values)).sum()) for values in written.values()) == 2


@pytest.mark.parametrize("allow", [[], ["--allow-nonfinite"]])
def test_overflow_of_the_output_type_is_an_error(pool: PoolOnDisk, allow: list[str]) -> None:
    set_value(5, 60000.0)(pool)
    recipe = pool.write(pool.recipe("task_arithmetic", weight=(2.0, 1.0), dtype="float16"))
    ran = sigmerge("merge", recipe, pool.root / "out", *allow)
    assert ran.code == 4 and "Traceback" not in ran.err
    assert f"{NAME}: the result at flat index 5 is not finite in F16" in ran.err
    assert "write a wider dtype" in ran.err
    assert not (pool.root / "out").exists()


def test_an_unchecked_run_is_not_continued_by_one_that_checks(pool: PoolOnDisk) -> None:
    """Block 0 is finished with its NaN; the run then dies of an overflow further on."""
    set_value(3, float("nan"))(pool)
    set_value(5, 60000.0, name="model.norm.weight")(pool)
    recipe = pool.write(pool.recipe("task_arithmetic", weight=(2.0, 1.0), dtype="float16"))
    assert sigmerge("merge", recipe, pool.root / "out", "--allow-nonfinite").code == 4
    ran = sigmerge("merge", recipe, pool.root / "out")
    assert ran.code == 3 and f"tensor {NAME} holds nan" in ran.err
