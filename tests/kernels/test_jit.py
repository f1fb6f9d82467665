"""Compiled kernels come from numba's cache without the compiler: what jit.py relies on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.caching import Cache

import sigmerge
from sigmerge.kernels import jit
from sigmerge.kernels.convert import narrow_bf16
from tests.pools import make_pool

SCRIPT = """
import sys
import numpy as np
from sigmerge.kernels.convert import narrow_bf16
assert narrow_bf16(np.ones(5, np.float32), np.empty(5, np.uint16))
hits = sum(narrow_bf16.stats.cache_hits.values())
print(hits, "numba.cpython.heapq" in sys.modules)
"""


def test_numba_still_has_what_the_shortcut_replaces() -> None:
    """If this fails, numba has changed: check `KernelCache` in jit.py against its caching.py."""
    assert jit._SHORTCUT
    assert isinstance(narrow_bf16._cache, jit.KernelCache)
    assert isinstance(narrow_bf16._cache.opened, Cache)
    assert Path(narrow_bf16.stats.cache_path).is_dir()


@pytest.mark.slow
def test_the_second_process_loads_what_the_first_compiled(tmp_path: Path) -> None:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT]
    first, second = (
        subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()
        for _ in range(2)
    )
    assert first[0] == "0" and second[0] == "1"
    assert first[1] == "True" and second[1] == "False"  # the compiler was loaded, then was not


TRIMMED = """
import numpy as np
from sigmerge.kernels.coordinates import keep_varying
values = np.array([[1, 2, 4], [-1, -2, -4]], np.float32)
keep_varying(values, 0x40800000, 1, np.empty(3, np.float32))
print(values[0].tolist())
"""


@pytest.mark.slow
def test_a_kernel_is_compiled_again_when_one_that_it_calls_has_changed(tmp_path: Path) -> None:
    """trim lies in another file; numba by itself would go on with what it compiled of it."""
    package = shutil.copytree(Path(sigmerge.__file__).parent, tmp_path / "src/sigmerge",
                              ignore=shutil.ignore_patterns("__pycache__", "pool"))  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "NUMBA_CACHE_DIR": str(tmp_path)}

    def printed() -> str:
        command = [sys.executable, "-c", TRIMMED]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    assert printed() == "[0.0, 2.0, 4.0]\n"
    source = (package / "kernels/thinning.py").read_text()
    before = "bits[i] = bits[i] if magnitude >= cut else np.int32(0)"
    assert source.count(before) == 1
    changed = source.replace(before, before.replace("= bits[i]", "= np.int32(0)"))
    (package / "kernels/thinning.py").write_text(changed)
    assert printed() == "[0.0, 0.0, 0.0]\n"


MERGE = """
import sys
from sigmerge.cli import main
try:
    main()
finally:
    print("LOADED", *sorted(sys.modules), file=sys.stderr)
"""

COMPILER = ("numba.cpython.heapq", "numba.np.arrayobj", "scipy.linalg")
"""Of numba, and what only its compiler loads: it takes longer than many a merge."""
OTHERS = (
    "torch", "transformers", "safetensors", "jinja2", "jaxtyping", "asyncio", "sqlite3",
    "sigmerge.evaluation", "sigmerge.probing", "sigmerge.merge3", "sigmerge.analysis",
    "sigmerge.checkpoints.adapters", "sigmerge.checkpoints.slices",
    "sigmerge.checkpoints.statistics", "sigmerge.checkpoints.vocabularies",
    "sigmerge.kernels.claim", "sigmerge.kernels.low_rank", "sigmerge.kernels.signature",
    "sigmerge.jobs.capture", "sigmerge.jobs.guide", "sigmerge.jobs.repair", "sigmerge.jobs.scores",
    "sigmerge.jobs.search", "sigmerge.jobs.several", "sigmerge.recipe.scored",
    "sigmerge.recipe.space", "sigmerge.method.controls",
)  # fmt: skip
"""What a merge needs not that has one recipe, whole models, and no search, guide and repair."""


@pytest.mark.slow
def test_the_second_merge_loads_no_compiler_and_nothing_that_it_does_not_use(
    tmp_path: Path,
) -> None:
    pool = make_pool(tmp_path / "pool")
    recipe = pool.write(pool.recipe("task_arithmetic"), "recipe.yaml")
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    given = ["merge", str(recipe), str(tmp_path / "out"), "--overwrite"]
    command = [sys.executable, "-c", MERGE, *given]
    first, second = (
        subprocess.run(command, env=env, capture_output=True, text=True).stderr.split()
        for _ in range(2)
    )
    assert set(COMPILER) <= set(first)
    assert "sigmerge.jobs.dense" in second  # it did merge
    assert [name for name in (*COMPILER, *OTHERS) if name in second] == []
