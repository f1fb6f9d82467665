"""Shared set-up. jaxtyping shapes in the maths are checked at every call while tests run."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis  # noqa: F401  (it asks who refers to what, which it cannot see once frozen)
import pytest
from filelock import FileLock
from jaxtyping import install_import_hook

install_import_hook("sigmerge.method", "beartype.beartype")

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton reads a program

LONG = (
    "jobs/test_tune.py",
    "merge3/test_search.py",
    "jobs/test_run.py",
    "lab/experiments/test_suite.py",
    "faults/test_commands.py",
    "jobs/test_capture.py",
    "jobs/test_architectures.py",
    "jobs/test_guide.py",
    "engine/test_gpu.py",
    "pages/test_browser.py",
    "native/test_vectors.py",
    "test_same_bytes.py",
    "native/test_select.py",
    "cluster/test_ray.py",
    "jobs/test_repair.py",
    "lab/pools/test_train.py",
    "native/test_same_bytes.py",
    "storage/test_s3.py",
    "evaluation/harnesses/test_code.py",
    "lab/experiments/test_analyze.py",
    "probing/test_capture.py",
    "sandbox/test_run.py",
    "jobs/test_demo.py",
    "method/test_occupancy.py",
    "faults/test_signals.py",
    "docs/test_notebook.py",
    "docs/test_python_api.py",
)
"""Files that take longest. They come first, so that none is left to one worker at the end."""

MANY_OBJECTS = 50_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    assert all((here / name).is_file() for name in LONG)
    places = {here / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests stay until the end: no garbage collection looks at them, now or later.

    There are some 700,000 objects, and the probe pass collects garbage after every expert.
    """
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """What libraries brought when a test imported them stays, too: probes collect garbage often."""
    result = yield
    if gc.get_count()[2] and len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()
    return result


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads what an earlier run remembered, or leaves anything in the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SIGMERGE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own, outside its folder; the place of its entries."""
    from tests.kept_entries import isolate, kept_root

    isolate(monkeypatch, tmp_path_factory.mktemp("own_cache"))
    return kept_root()


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A miniature pool, trained once for all workers of the run. No test changes it."""
    from sigmerge.lab.pools.nano import train
    from tests.pools import few_scores

    base = tmp_path_factory.getbasetemp()
    pool = (base if worker_id == "master" else base.parent) / "mini"
    with FileLock(pool.with_suffix(".lock")):
        return pool if pool.exists() else train(pool, 0, "mini", measure=few_scores)
