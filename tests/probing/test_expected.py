"""The architecture's own tensors are what a checkpoint of it stores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.verify import verify_result
from sigmerge.errors import PoolError
from sigmerge.nano.files import POOL
from sigmerge.probing.exemplars import tokenizer_of
from sigmerge.probing.expected import expected_shapes
from sigmerge.probing.generate import load_model
from sigmerge.probing.hidden import probe
from sigmerge.probing.skeleton import _empty_model


def test_the_embedded_pool_is_what_its_architecture_expects() -> None:
    folder = POOL / "reference"
    shapes = expected_shapes(folder)
    assert isinstance(shapes, dict) and shapes.keys() >= open_checkpoint(folder).tensors.keys()
    report = verify_result(folder, None, None, expected=shapes)
    assert report.ok and "architecture" in report.checked, report.findings


@pytest.mark.parametrize("content", ["{}", '{"model_type": "no-such-model"}', "[]", "{"])
def test_a_model_that_cannot_be_built_is_explained(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert "transformers cannot build the model" in expected_shapes(tmp_path)


def with_depth(folder: Path, depth: int) -> Path:
    shutil.copytree(POOL / "reference", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": depth}))
    return folder


@pytest.mark.parametrize("depth", [2000, 2**63])
def test_a_model_is_built_no_larger_than_its_weights(tmp_path: Path, depth: int) -> None:
    """2,000 layers take transformers a minute; of 2⁶³ it makes a list first."""
    folder = with_depth(tmp_path / "deep", depth)
    assert "transformers cannot build the model" in expected_shapes(folder)
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
    ],
)
def test_whatever_a_library_raises_the_checkpoint_is_named(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    """A KeyError, a plain Exception and an AttributeError, found by the fuzzer."""
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
    report = verify_result(folder, None, None, expected=expected_shapes(folder))
    assert {finding.check for finding in report.findings} == {"config", "architecture"}
