"""The architecture's own tensors are what a checkpoint of it stores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sigmerge.checkpoints.verify import verify_result
from sigmerge.errors import PoolError
from sigmerge.nano.files import POOL
from sigmerge.probing.exemplars import tokenizer_of
from sigmerge.probing.expected import architecture_problems
from sigmerge.probing.generate import load_model
from sigmerge.probing.hidden import probe
from sigmerge.probing.skeleton import _empty_model
from tests.checkpoints.test_verify import listed
from tests.probing import models


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """The folder of a mixture whose experts transformers joins when it loads them."""
    models.write_expert(tmp_path / "mixture", "mixtral")
    return tmp_path / "mixture"


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str | None]] = {
    "nothing": (lambda w: None, None),
    "a tensor less": (lambda w: w.pop("model.norm.weight"), "model.norm.weight: is missing"),
    "an expert less": (lambda w: w.pop(EXPERT), "weights: transformers cannot join them; some are "
                       "missing or of another shape"),
    "a tensor more": (lambda w: w.update(more=w["model.norm.weight"].clone()),
                      "more: is no tensor of the architecture"),
    "a shape": (lambda w: w.update({"lm_head.weight": w["lm_head.weight"][1:].clone()}),
                "lm_head.weight: shape [23, 16], not [24, 16]"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_transformers_would_miss_is_found(result: Path, damage: str) -> None:
    change, words = DAMAGE[damage]
    weights = load_file(result / "model.safetensors")
    change(weights)
    save_file(weights, result / "model.safetensors", {"format": "pt"})
    report = verify_result(result, listed(result), None, architecture=architecture_problems(result))
    assert "architecture" in report.checked, report.skipped
    found = [str(finding) for finding in report.findings]
    assert found == ([f"architecture: {words}"] if words else [])


def test_the_embedded_pool_is_what_its_architecture_expects() -> None:
    assert architecture_problems(POOL / "reference") == []


@pytest.mark.parametrize("content", ["{}", '{"model_type": "no-such-model"}', "[]", "{"])
def test_a_model_that_cannot_be_built_is_explained(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert "transformers cannot build the model" in architecture_problems(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": "wide"}, {"vocab_size": -1}, {"intermediate_size": -5}]
)
def test_a_configuration_by_which_no_model_is_built_is_a_finding(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    """Where transformers knows the kind of model; of a foreign one it can say nothing."""
    folder = Path(shutil.copytree(POOL / "reference", tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | wrong
    (folder / "config.json").write_text(json.dumps(config))
    ((about, problem),) = architecture_problems(folder)
    assert about == "config.json" and problem.startswith("transformers cannot ")
    for foreign in ({"auto_map": {"AutoConfig": "own.Config"}}, {"model_type": "no-such-model"}):
        (folder / "config.json").write_text(json.dumps({**config, **foreign}))
        assert isinstance(architecture_problems(folder), str)


def test_what_a_library_lacks_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reports a missing accelerate as an error of values."""

    def lacking(_: Any) -> Any:
        raise ValueError("requires `accelerate`")

    monkeypatch.setattr("sigmerge.probing.expected._class_of", lacking)
    assert "requires `accelerate`" in str(architecture_problems(POOL / "reference"))
    assert isinstance(architecture_problems(POOL / "reference"), str)


def with_depth(folder: Path, depth: int) -> Path:
    shutil.copytree(POOL / "reference", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": depth}))
    return folder


@pytest.mark.parametrize("depth", [2000, 2**63])
def test_a_model_is_built_no_larger_than_its_weights(tmp_path: Path, depth: int) -> None:
    """2,000 layers take transformers a minute; of 2⁶³ it makes a list first."""
    folder = with_depth(tmp_path / "deep", depth)
    ((_, problem),) = architecture_problems(folder)
    assert problem.startswith("transformers cannot build the model (")
    with pytest.raises(PoolError, match="cannot be loaded"):
        load_model(folder, "hf", "float32", None)
    with pytest.raises(PoolError, match="cannot be loaded"):
        probe(folder, ["w1"])
    with pytest.raises(PoolError, match="cannot be loaded"):
        _empty_model(folder, False)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"rope_parameters": {"rope_type": 5}}),
        ("tokenizer.json", {"added_tokens": None}),
        ("tokenizer_config.json", {"tokenizer_class": True}),
        (
            "tokenizer.json",
            {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}},
        ),
    ],
)
def test_whatever_a_library_raises_the_checkpoint_is_named(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    """A KeyError, a plain Exception and an AttributeError, found by the fuzzer; a panic of Rust."""
    folder = tmp_path / "expert"
    shutil.copytree(POOL / "reference", folder)
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    loaders = [lambda: probe(folder, ["w1"]), lambda: load_model(folder, "hf", "float32", None)]
    loaders.append(
        (lambda: _empty_model(folder, False))
        if name == "config.json"
        else (lambda: tokenizer_of(folder))
    )
    for load in loaders:
        with pytest.raises(PoolError, match=rf"{folder} cannot be loaded for .*: \w+: "):
            load()


def test_another_depth_is_found_not_refused(tmp_path: Path) -> None:
    folder = with_depth(tmp_path / "deep", 9)
    report = verify_result(folder, listed(folder), None, architecture=architecture_problems(folder))
    assert {finding.check for finding in report.findings} == {"config", "architecture"}
