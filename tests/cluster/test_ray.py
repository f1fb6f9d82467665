"""Jobs on a Ray cluster of two nodes, which run on this machine: the bytes of a local run.

Workers are real processes. They are killed, and a node leaves, while tasks run.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import sigmerge
from sigmerge.engine import cluster
from sigmerge.engine.cluster import Cluster, connect
from sigmerge.engine.gpu import Gpu
from sigmerge.errors import OutputError, SigmergeError
from sigmerge.jobs.options import Options
from sigmerge.jobs.search import SearchRun
from sigmerge.jobs.tune import TuneJob
from sigmerge.recipe import load_recipe
from tests.cluster import tasks
from tests.command_line import refused
from tests.jobs import tuned
from tests.jobs.tuned import Contested
from tests.lab.experiments.test_suite import definition, export
from tests.merge3 import stub
from tests.pools import PoolOnDisk, make_pool, weight_bytes
from tests.probing import models
from tests.storage.conftest import DOMAINS, SCORES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes with two cores each, which this process uses."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster as Nodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        room = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 << 20}
        made = Nodes(initialize_head=True, head_node_args={**room, "include_dashboard": False})
        made.add_node(**room)
        ray.init(made.address, log_to_driver=False, logging_level="error")
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    root = tmp_path_factory.mktemp("cluster")
    made = make_pool(root, layers=4, dtype="bf16", shards=(1, 2, 1, 3), spread=0.002)
    (root / "scores.json").write_text(json.dumps(SCORES))
    sigmerge.merge(made.recipe("linear"), root / "anchor", threads=1)
    return made


def weights(folder: Path) -> dict[str, bytes]:
    return {k: v for k, v in weight_bytes(folder).items() if k.endswith(".safetensors")}


def repaired(pool: PoolOnDisk) -> dict[str, Any]:
    return pool.recipe("linear", repair={"scores": str(pool.root / "scores.json")})


@pytest.mark.parametrize(("method", "threads"), [("ties", 1), ("dare_linear", 2), ("slerp", 1)])
def test_a_merge_is_the_local_one(
    nodes: Any, pool: PoolOnDisk, tmp_path: Path, method: str, threads: int
) -> None:
    """By four workers with a core each, or two with two."""
    each = {"density": (0.3, 0.5, 0.7)} if method != "slerp" else {}
    recipe = pool.recipe(method, {"t": 0.3} if method == "slerp" else None, each=each)
    if method == "slerp":
        recipe["models"] = [{"model": m["model"]} for m in recipe["models"][:1]]
    done = {}
    for engine in ("local", "ray"):
        out = tmp_path / engine
        how: dict[str, Any] = {"threads": threads, "engine": engine, "max_shard_size": "9KB"}
        done[engine] = sigmerge.merge(recipe, out, **how)
    assert weights(tmp_path / "ray") == weights(tmp_path / "local")
    ran = done["ray"].provenance
    assert ran.engine == "ray, 2 nodes, 4 cores"
    assert ran.bytes_read == done["local"].provenance.bytes_read > 0


def test_a_repair_and_its_profile_are_the_local_ones(
    nodes: Any, pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles = {}
    for engine in ("local", "ray"):
        kept = pool.root / ".sigmerge"
        kept.rename(tmp_path / f"before-{engine}") if kept.exists() else None
        how: dict[str, Any] = {"threads": 2, "engine": engine}
        sigmerge.repair(repaired(pool), tmp_path / engine, anchor=pool.root / "anchor", **how)
        profiles[engine] = {
            f.name: json.loads(f.read_bytes())["value"] for f in kept.rglob("signatures/*/*.json")
        }
    assert weights(tmp_path / "ray") == weights(tmp_path / "local")
    assert weights(tmp_path / "ray") != weights(pool.root / "anchor")
    assert profiles["ray"] == profiles["local"] and profiles["ray"]


def test_a_killed_worker_is_replaced_and_the_order_stays(nodes: Any, tmp_path: Path) -> None:
    square = partial(tasks.square, tmp_path, {3})
    found = connect(None, 1).map(square, range(9), str)
    assert list(found) == [n * n for n in range(9)]
    assert len(list(tmp_path.iterdir())) == 1
    assert connect(None, 1).submit("one", tasks.square, tmp_path, {5}, 5).result() == 25
    assert len(list(tmp_path.iterdir())) == 2


def test_few_tasks_are_under_way_and_a_person_understands_their_names(nodes: Any) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(20):
            taken.append(number)
            yield number

    found = connect(None, 2).map(tasks.task_name, items(), lambda number: f"part {number}")
    assert next(iter(found)) == "part 0"
    assert len(taken) == 4  # two nodes have the cores for one each


def test_a_task_that_kills_every_worker_is_given_up(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "RETRIES", 0)
    with pytest.raises(SigmergeError, match=r"lost a task 1 times .* run the same command again"):
        list(connect(None, 1).map(tasks.dies, [1], str))


def test_a_merge_whose_worker_is_killed(
    nodes: Any, pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first task of a block ends its own process; the second does the work."""
    recipe = pool.recipe("task_arithmetic")
    sigmerge.merge(recipe, tmp_path / "local", threads=1)
    real, marks = Cluster.map, tmp_path / "marks"
    marks.mkdir()

    def deadly(self: Cluster, function: Any, items: Any, label: Any, **how: Any) -> Any:
        return real(self, partial(tasks.first_dies, marks, function, label), items, label, **how)

    monkeypatch.setattr(Cluster, "map", deadly)
    sigmerge.merge(recipe, tmp_path / "ray", threads=1, engine="ray")
    assert weights(tmp_path / "ray") == weights(tmp_path / "local")
    assert len(list(marks.iterdir())) == 1


def _journal(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.campaign
def test_candidates_are_scored_by_tasks_as_they_are_by_threads(
    nodes: Any, pool: PoolOnDisk, tmp_path: Path
) -> None:
    """A tuning and a search: the same calls with the same answers, and the same winner."""
    recipe = load_recipe(pool.recipe("task_arithmetic"))
    genotypes = load_recipe(pool.recipe("linear"))
    for engine in ("local", "ray"):
        options = Options(threads=1, engine=engine)  # type: ignore[arg-type]
        scorer = Contested(pool.root, DOMAINS)
        settings = tuned.SETTINGS.model_copy(update={"calls": 6})
        TuneJob(recipe, tmp_path / f"tune-{engine}", options, settings, scorer=scorer).run()
        found = tmp_path / f"search-{engine}"
        SearchRun(genotypes, found, options, stub.SETTINGS, scorer=scorer).run()
        # Experts and repairs are scored here; what tasks were asked did not come back.
        assert len(scorer.asked) < 12 or engine == "local"
    for what in ("tune", "search"):
        one, two = (tmp_path / f"{what}-{engine}" for engine in ("local", "ray"))
        assert _journal(two / f"{what}.jsonl") == _journal(one / f"{what}.jsonl")
        assert weights(two / "winner") == weights(one / "winner")


@pytest.mark.campaign
def test_captures_by_tasks_and_a_merge_that_reads_them(nodes: Any, tmp_path: Path) -> None:
    for engine in ("local", "ray"):
        root = tmp_path / engine
        models.write_expert(root / "reference")
        for seed, name in enumerate(("math", "coding"), start=1):
            models.write_expert(root / name, seed=seed, near=root / "reference")
            models.write_exemplars(root / f"{name}.jsonl", seed, count=4)
        listed = [{"model": str(root / n), "exemplars": str(root / f"{n}.jsonl")}
                  for n in ("math", "coding")]  # fmt: skip
        recipe = {"merge_method": "regmean", "base_model": str(root / "reference"),
                  "models": listed}  # fmt: skip
        sigmerge.merge(recipe, root / "out", threads=1, engine=engine)
    assert weights(tmp_path / "ray/out") == weights(tmp_path / "local/out")


@pytest.mark.campaign
def test_a_suite_by_tasks_ends_in_the_same_store(nodes: Any, tmp_path: Path) -> None:
    made = make_pool(tmp_path / "pool", layers=2, dtype="bf16")
    content = definition(made, anchors=[{"name": "mean", "merge_method": "linear"}], repairs={})
    for engine in ("local", "ray"):
        sigmerge.suite(content, tmp_path / engine, threads=1, engine=engine)
    assert export(tmp_path / "ray") == export(tmp_path / "local")


def test_an_error_of_a_task_is_the_error_of_the_job(
    nodes: Any, pool: PoolOnDisk, tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError):
        list(connect(None, 1).map(lambda n: 1 // n, [1, 0], str))
    recipe = pool.recipe("task_arithmetic", weight=(1e9, 1e9, 1e9), dtype="float16")
    with pytest.raises(OutputError, match="is not finite in F16"):
        sigmerge.merge(recipe, tmp_path / "out", threads=1, engine="ray")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        SigmergeError, match=r"No node of the cluster has 1 cores and 1000000\.0 GB"
    ):
        list(connect(None, 1).map(tasks.dies, [1], str, memory=10**15))


def test_an_address_nobody_listens_at(pool: PoolOnDisk, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    recipe = pool.write(pool.recipe("linear"), "address.yaml")
    where = ("--engine", "ray", "--address", f"127.0.0.1:{port}")
    said = refused(1, "merge", recipe, tmp_path / "out", *where, beside=tmp_path)
    assert "nobody listens there" in said
    said = refused(1, "merge", recipe, tmp_path / "out", "--address", "auto", beside=tmp_path)
    assert "pass --engine ray" in said


def test_an_address_that_is_none_or_not_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once; Ray would try for minutes."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_NUM_REDIS_GET_RETRIES", "1")
    monkeypatch.setattr(cluster, "PATIENCE", 0.1)
    for wrong in ("host", ":6379", "127.0.0.1:²", "a..b:6379"):
        with pytest.raises(SigmergeError, match=f"{wrong}: is no address"):
            connect(wrong, 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SigmergeError, match="what listens there is not Ray's head"):
            connect(address, 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise ray.exceptions.AuthenticationError("there is no token.\nmore")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(SigmergeError, match=r"auto: cannot be used \(there is no token.*\). A cl"):
        connect("auto", 1)


@pytest.mark.campaign
def test_a_node_that_leaves(nodes: Any, pool: PoolOnDisk, tmp_path: Path) -> None:
    """Its tasks, and results that lay there, are made again by the other node."""
    results = connect(None, 1).map(partial(tasks.slow, 0.3), range(8), str)
    first = next(results)
    nodes.remove_node(nodes.worker_nodes.copy().pop())
    rest = list(results)
    assert [number for number, _ in (first, *rest)] == list(range(8))
    sigmerge.merge(pool.recipe("linear"), tmp_path / "ray", threads=2, engine="ray")
    assert weights(tmp_path / "ray") == weights(pool.root / "anchor")


def test_gpus_that_no_node_has(nodes: Any, pool: PoolOnDisk, tmp_path: Path) -> None:
    """Said before the output is opened or a byte hashed, whatever the driver's machine has."""
    verbs = {
        "merge": partial(sigmerge.merge, pool.recipe("linear"), tmp_path / "out"),
        "repair": partial(
            sigmerge.repair, repaired(pool), tmp_path / "out", anchor=pool.root / "anchor"
        ),
        "profile": partial(sigmerge.profile, repaired(pool)),
    }
    shutil.rmtree(pool.root / ".sigmerge", ignore_errors=True)
    before = sorted(pool.root.rglob("*"))
    for run in verbs.values():
        with pytest.raises(SigmergeError, match=r"none of the cluster's \d nodes has a GPU"):
            run(threads=1, engine="ray", device="cuda")
    assert list(tmp_path.iterdir()) == [] and sorted(pool.root.rglob("*")) == before


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU"))],
)  # fmt: skip
@pytest.mark.campaign
def test_tasks_with_a_gpu(
    nodes: Any, pool: PoolOnDisk, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that declares one, whose part torch's processor device may play: the same bytes."""
    if device == "cpu":
        opened = partial(Gpu, "cpu", 1 << 20, 0)
        monkeypatch.setattr(Options, "open_gpu", property(lambda self: opened))
    node = nodes.add_node(num_cpus=3, num_gpus=1, object_store_memory=80 << 20)
    how: dict[str, Any] = {"threads": 1, "engine": "ray", "device": "cuda"}
    try:
        recipe = pool.recipe("ties", each={"density": (0.3, 0.5, 0.7)})
        sigmerge.merge(recipe, tmp_path / "local", threads=1)
        made = sigmerge.merge(recipe, tmp_path / "ray", **how)
        assert weights(tmp_path / "ray") == weights(tmp_path / "local")
        assert made.provenance.engine.endswith(" cores, cuda")
        anchor = pool.root / "anchor"
        sigmerge.repair(repaired(pool), tmp_path / "here", anchor=anchor, threads=1)
        shutil.rmtree(pool.root / ".sigmerge")
        sigmerge.repair(repaired(pool), tmp_path / "there", anchor=anchor, **how)
        assert weights(tmp_path / "there") == weights(tmp_path / "here")
        assert list(connect(None, 1, gpu=True).map(tasks.share, [1], str)) == [
            1 / cluster.TASKS_A_GPU
        ]
    finally:
        nodes.remove_node(node)
