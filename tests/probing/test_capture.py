"""The capture passes against hooks on a full forward pass, and against autograd, in one go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from sigmerge.checkpoints.folder import open_checkpoint  # noqa: E402
from sigmerge.checkpoints.statistics import StatisticsFolders, finish  # noqa: E402
from sigmerge.errors import PoolError, RecipeError  # noqa: E402
from sigmerge.probing.capture import capture_features  # noqa: E402
from sigmerge.probing.exemplars import (  # noqa: E402
    Tokens,
    check_same_vocabulary,
    read_exemplars,
    tokenize,
)
from sigmerge.probing.fisher import capture_fisher  # noqa: E402
from sigmerge.probing.skeleton import reader  # noqa: E402
from tests.probing import models  # noqa: E402

FAMILIES = list(models.CONFIGS)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def tokens_of(seed: int = 0, count: int = 6, most: int = 12) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 24, rng.integers(3, most)).tolist() for _ in range(count)]
    return [Tokens(tuple(row), len(row) // 2 + 1) for row in rows]


def features(folder: Path, tokens: list[Tokens], out: Path, **how: Any) -> StatisticsFolders:
    expert = open_checkpoint(folder)
    read = how.pop("read", reader(expert))
    capture_features(expert, read, tokens, out, **how)
    finish(out, {})
    return StatisticsFolders({"e": out})


def in_one_go(folder: Path, tokens: list[Tokens]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gram of every linear input and x̂ energies by this test's own hooks, exemplar by exemplar."""
    model = models.load(folder)
    grams: dict[str, Any] = {}
    energies: dict[str, Any] = {}

    def linear(name: str) -> Any:
        def hook(_m: Any, args: Any, _k: Any, _out: Any) -> None:
            x = args[0].double().reshape(-1, args[0].shape[-1])
            grams[name] = grams.get(name, 0) + (x.T @ x).numpy()

        return hook

    def norm(name: str) -> Any:
        def hook(m: Any, args: Any, _k: Any, out: Any) -> None:
            multiplier = m.weight.double() + (1 if "Gemma" in type(m).__name__ else 0)
            shift = m.bias.double() if getattr(m, "bias", None) is not None else 0.0
            x = ((out.double() - shift) / multiplier).reshape(-1, out.shape[-1])
            energies[name] = energies.get(name, 0) + x.square().sum(0).numpy()

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name and "embed" not in name:
            module.register_forward_hook(linear(f"{name}.weight"), with_kwargs=True)
        if "Norm" in type(module).__name__:
            module.register_forward_hook(norm(f"{name}.weight"), with_kwargs=True)
    with torch.no_grad():
        for row in tokens:
            model(input_ids=torch.tensor([row.ids]))
    return grams, energies


@pytest.fixture(scope="module", params=FAMILIES)
def expert(request: Any, tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param) / "expert"
    models.write_expert(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama") / "expert"
    models.write_expert(folder)
    return folder


def test_features_equal_hooks_on_a_full_forward(expert: Path, tmp_path: Path) -> None:
    tokens = tokens_of()
    found = features(expert, tokens, tmp_path / "out")
    grams, energies = in_one_go(expert, tokens)
    assert len(grams) >= 12 and len(energies) >= 7
    rows = sum(len(row.ids) for row in tokens)
    for name, gram in grams.items():
        assert found.measured(name) == "gram", name
        np.testing.assert_allclose(found.gram("e", name), gram, **CLOSE)
        assert found.rows("e", name) == rows
    for name, energy in energies.items():
        assert found.measured(name) == "energy", name
        np.testing.assert_allclose(found.energy("e", name), energy, rtol=2e-3, atol=1e-3)


def test_four_distinct_inputs_a_block_are_stored_once(llama: Path, tmp_path: Path) -> None:
    from sigmerge.checkpoints.header import read_header

    features(llama, tokens_of(), tmp_path / "out")
    stored = read_header(tmp_path / "out/layer-00000.safetensors")
    assert sorted(t.shape for t in stored.values()) == [
        (16,),
        (16,),
        (136,),
        (136,),
        (136,),
        (300,),
    ]
