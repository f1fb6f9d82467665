"""The profile of a pool on disk against brute force, and its memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sigmerge
from sigmerge.checkpoints.source import PoolSource
from sigmerge.engine.machine import LIBRARIES
from sigmerge.errors import PoolError, SigmergeError
from sigmerge.jobs import signatures
from sigmerge.jobs.options import Options
from sigmerge.jobs.profile import ProfileJob
from sigmerge.probing import grams, hidden
from sigmerge.recipe import load_recipe
from tests.oracles import oracle_conflict
from tests.pools import PoolOnDisk, make_pool, read_weights

LAYERS = 3


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    root = tmp_path_factory.mktemp("profile")
    return make_pool(root, layers=LAYERS, dtype="bf16", shards=(1, 2, 1, 3), tokenizer=True)


def layer_deltas(pool: PoolOnDisk, layer: int) -> np.ndarray:
    """Δ of every expert over a block: sorted names, row-major, float64."""
    base = read_weights(pool.reference)
    names = sorted(name for name in base if name.startswith(f"model.layers.{layer}."))
    rows = []
    for folder in pool.experts.values():
        tuned = read_weights(folder)
        rows.append(np.concatenate([(tuned[n] - base[n]).ravel() for n in names]))
    return np.array(rows, np.float64)


def recipe(pool: PoolOnDisk, **repair: Any) -> dict[str, Any]:
    return pool.recipe("task_arithmetic", repair=repair)


def test_direction_and_sign_views_are_those_of_brute_force(pool: PoolOnDisk) -> None:
    found = sigmerge.profile(recipe(pool))
    for layer in range(LAYERS):
        deltas = layer_deltas(pool, layer)
        assert found.as_json()["coordinates"][layer] == deltas.shape[1]
        assert found.as_json()["views"]["direction"][layer] == pytest.approx(
            oracle_conflict.direction(deltas), rel=1e-12
        )
        assert found.as_json()["views"]["sign"][layer] == pytest.approx(
            oracle_conflict.sign(deltas), rel=1e-12
        )
    views = [found.as_json()["views"][name] for name in ("direction", "sign")]
    score = oracle_conflict.score(views)
    assert found.as_json()["conflict"] == pytest.approx(score, abs=1e-12)
    assert found.as_json()["capacity"] == pytest.approx([0.45 - 0.35 * s for s in score], abs=1e-12)
    assert any("representation" in warning for warning in found.as_json()["warnings"])


def test_layers_of_a_stack_have_the_views_of_those_they_are_made_of(tmp_path: Path) -> None:
    """Also if another stack of the same files and as many layers was measured before."""
    pool = make_pool(tmp_path / "pool", layers=LAYERS, tokenizer=True)
    probe = tmp_path / "probe.jsonl"
    probe.write_text("".join(json.dumps({"prompt": f"w{i}"}) + "\n" for i in range(3, 9)))
    whole = sigmerge.profile(recipe(pool, probe=str(probe))).views
    assert len(set(whole["representation"])) == LAYERS
    for ranges in ([(2, 3), (0, 2)], [(0, 2), (0, 1)], [(1, 3), (1, 2), (0, 2)]):
        given = recipe(pool, probe=str(probe))
        models = [*given.pop("models"), {"model": str(pool.reference)}]
        given["slices"] = [
            {"sources": [{**model, "layer_range": list(layers)} for model in models]}
            for layers in ranges
        ]
        stacked = [layer for layers in ranges for layer in range(*layers)]
        views = sigmerge.profile(given).views
        assert views == {name: tuple(view[i] for i in stacked) for name, view in whole.items()}


def test_threads_do_not_change_a_bit_and_the_second_profile_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(tmp_path / "pool", layers=2)
    one = sigmerge.profile(recipe(pool), threads=1)
    shutil.rmtree(tmp_path / "pool/.sigmerge")
    assert sigmerge.profile(recipe(pool), threads=4) == one

    def refuse(*_: Any) -> None:
        raise AssertionError("a tensor was read again")

    monkeypatch.setattr(PoolSource, "raw", refuse)
    assert sigmerge.profile(recipe(pool)) == one


def test_views_of_weights_that_change_while_they_are_measured_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expert may come back to what it was, and would be known by what another showed."""
    pool = make_pool(tmp_path / "pool", layers=2)
    file, measure = pool.experts["math"] / "model.safetensors", signatures._measured

    def changing(*given: Any) -> Any:
        found = measure(*given)
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        return found

    monkeypatch.setattr(signatures, "_measured", changing)
    with pytest.raises(PoolError, match=r"math/model\.safetensors: changed while it was read"):
        sigmerge.profile(recipe(pool))
    assert not list((tmp_path / "pool/.sigmerge").rglob("*.json"))


def test_a_changed_expert_is_measured_anew(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", layers=2)
    before = sigmerge.profile(recipe(pool))
    other = make_pool(tmp_path / "other", layers=2, seed=5)
    name, folder = next(iter(pool.experts.items()))
    (folder / "model.safetensors").write_bytes(
        (other.experts[name] / "model.safetensors").read_bytes()
    )
    after = sigmerge.profile(recipe(pool))
    assert after.as_json()["views"]["direction"] != before.as_json()["views"]["direction"]


@pytest.mark.parametrize("what", ["model.safetensors", "tokenizer.json"])
def test_an_expert_that_changes_before_it_is_probed_is_not_remembered(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the tokenizer, which is the reference's."""
    pool = make_pool(tmp_path / "pool", layers=2, tokenizer=True)
    (pool.root / "probe.jsonl").write_text('{"prompt": "w3"}\n{"prompt": "w5"}\n')
    given = pool.write(recipe(pool, probe="probe.jsonl"))
    wanted = sigmerge.profile(given)
    shutil.rmtree(pool.root / ".sigmerge")
    other = make_pool(tmp_path / "other", layers=2, seed=5)
    tokenizer = what == "tokenizer.json"
    file = (pool.reference if tokenizer else pool.experts["math"]) / what
    older, plain = file.read_bytes(), grams._probed

    def exchanged(*arguments: Any) -> Any:
        newer = older + b" " if tokenizer else (other.experts["math"] / what).read_bytes()
        file.write_bytes(newer)
        return plain(*arguments)

    monkeypatch.setattr(grams, "_probed", exchanged)
    with pytest.raises(PoolError, match="changed while it was read"):
        sigmerge.profile(given)
    monkeypatch.undo()
    file.write_bytes(older)
    assert sigmerge.profile(given) == wanted


def test_with_probe_prompts_all_three_views_count(pool: PoolOnDisk) -> None:
    probe = pool.root / "probe.jsonl"
    lines = [json.dumps({"prompt": f"w{i}"}) for i in range(3, 15)]
    probe.write_text("\n".join(lines))
    found = sigmerge.profile(pool.write(recipe(pool, probe="probe.jsonl")))
    assert list(found.as_json()["views"]) == ["representation", "direction", "sign"]
    assert all(0 <= value <= 1 for value in found.as_json()["views"]["representation"])
    assert max(found.as_json()["views"]["representation"]) > 0
    assert found.as_json()["warnings"] == []
    assert len(list((pool.root / ".sigmerge/grams").rglob("*.npy"))) == len(pool.experts)
    score = oracle_conflict.score(list(found.as_json()["views"].values()))
    assert found.as_json()["conflict"] == pytest.approx(score, abs=1e-12)


def test_an_expert_that_memory_does_not_hold_is_probed_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(tmp_path / "pool", layers=2, tokenizer=True)
    lines = [json.dumps({"prompt": f"w{i}"}) for i in range(3, 9)]
    (pool.root / "probe.jsonl").write_text("\n".join(lines))
    in_memory = sigmerge.profile(pool.write(recipe(pool, probe="probe.jsonl")))
    shutil.rmtree(tmp_path / "pool/.sigmerge/grams")
    folders = []

    plain = hidden.probe

    def probe(*arguments: Any, **options: Any) -> Any:
        folders.append(Path(options["offload_folder"]))
        return plain(*arguments, **options)

    monkeypatch.setattr("sigmerge.probing.grams.free_memory", lambda: 1)
    monkeypatch.setattr(hidden, "probe", probe)
    assert sigmerge.profile(pool.write(recipe(pool, probe="probe.jsonl"))) == in_memory
    assert len(folders) == len(pool.experts)
    assert not any(folder.exists() for folder in folders)


def test_wrong_probe_files_and_pools_are_named(pool: PoolOnDisk, tmp_path: Path) -> None:
    (pool.root / "empty.jsonl").write_text("\n\n")
    with pytest.raises(SigmergeError, match=r"empty\.jsonl: holds no prompts"):
        sigmerge.profile(pool.write(recipe(pool, probe="empty.jsonl")))
    with pytest.raises(SigmergeError, match=r"nowhere\.jsonl does not exist"):
        sigmerge.profile(pool.write(recipe(pool, probe="nowhere.jsonl")))
    soup = pool.recipe("linear")
    del soup["base_model"]
    with pytest.raises(PoolError, match="base_model is missing"):
        sigmerge.profile(soup)


def _permuted(folder: Path) -> tuple[str, str]:
    """Exchange the ids of two tokens in a folder's tokenizer."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    first, second = sorted(words, key=words.__getitem__)[6:8]
    words[first], words[second] = words[second], words[first]
    file.write_text(json.dumps(content))
    return first, second


def test_an_expert_with_another_vocabulary_is_refused_by_its_first_difference(
    tmp_path: Path,
) -> None:
    pool = make_pool(tmp_path / "pool", layers=2, tokenizer=True)
    (pool.root / "probe.jsonl").write_text('{"prompt": "w5 w6 w7"}\n{"prompt": "w8 w9"}\n')
    name, folder = next(iter(pool.experts.items()))
    first, _ = _permuted(folder)
    file = pool.write(recipe(pool, probe="probe.jsonl"))
    with pytest.raises(PoolError, match=f"{name}: 2 tokens differ .* the first is '{first}'"):
        sigmerge.profile(file)
    with pytest.raises(PoolError, match="the first is"):
        ProfileJob(load_recipe(file), Options()).describe()


def test_all_experts_read_the_probe_through_the_references_tokenizer(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", layers=2, tokenizer=True)
    lines = [json.dumps({"prompt": f"w{i} w{i + 1}"}) for i in range(3, 9)]
    (pool.root / "probe.jsonl").write_text("\n".join(lines))
    file = pool.write(recipe(pool, probe="probe.jsonl"))
    whole = sigmerge.profile(file)
    shutil.rmtree(tmp_path / "pool/.sigmerge/grams")
    for folder in pool.experts.values():
        for part in folder.glob("tokenizer*"):
            part.unlink()
    assert sigmerge.profile(file) == whole


def test_a_dry_run_counts_the_memory_of_the_probe(pool: PoolOnDisk) -> None:
    (pool.root / "probe.jsonl").write_text('{"prompt": "w5 w6 w7"}\n{"prompt": "w8 w9"}\n')
    file = pool.write(recipe(pool, probe="probe.jsonl"))
    plain = ProfileJob(load_recipe(pool.write(recipe(pool), "p.yaml")), Options())
    probed = ProfileJob(load_recipe(file), Options())
    assert probed.describe().peak_memory_bytes >= LIBRARIES
    assert plain.describe().peak_memory_bytes < LIBRARIES
