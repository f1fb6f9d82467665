"""The architecture's own tensors are what a checkpoint of it stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.verify import verify_result
from sigmerge.nano.files import POOL
from sigmerge.probing.expected import expected_shapes


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
