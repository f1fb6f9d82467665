"""An adapter extracted from a model: against NumPy's SVD, read back by sigmerge and by PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import sigmerge
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.errors import OutputError, PoolError, RecipeError
from sigmerge.merge3.candidate import stored_weights
from tests.command_line import sigmerge as command
from tests.pools import PoolOnDisk, make_pool, read_weights


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("extract"), experts=1, style=request.param)


def read_back(pool: PoolOnDisk, adapter: Path) -> dict[str, np.ndarray]:
    return dict(stored_weights(open_checkpoint(Path(f"{pool.reference}+{adapter}"))))


def test_all_of_the_energy_is_the_model_again(pool: PoolOnDisk, tmp_path: Path) -> None:
    made = sigmerge.extract(pool.experts["math"], tmp_path / "out", base=pool.reference, energy=1.0)
    assert made.kept == pytest.approx(1)
    back = read_back(pool, tmp_path / "out")
    for name, values in read_weights(pool.experts["math"]).items():
        np.testing.assert_allclose(back[name], values, atol=3e-8, err_msg=name)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rank_keeps_the_largest_singular_values(
    pool: PoolOnDisk, tmp_path: Path, threads: int
) -> None:
    made = sigmerge.extract(
        pool.experts["math"], tmp_path / "out", base=pool.reference, rank=3, threads=threads
    )
    base, tuned = read_weights(pool.reference), read_weights(pool.experts["math"])
    back, kept, total = read_back(pool, tmp_path / "out"), 0.0, 0.0
    for name, values in back.items():
        change = (tuned[name] - base[name]).astype(np.float64)
        if (".0." in name or ".1." in name) and change.ndim == 2:
            u, s, v = np.linalg.svd(change, full_matrices=False)
            kept, total = kept + float(np.sum(s[:3] ** 2)), total + float(np.sum(s**2))
            change = (u[:, :3] * s[:3]) @ v[:3]
        np.testing.assert_allclose(values, base[name] + change, atol=1e-7, err_msg=name)
    assert made.kept == pytest.approx(kept / total) and made.rank == 3


def test_energy_takes_as_few_as_hold_it(pool: PoolOnDisk, tmp_path: Path) -> None:
    sigmerge.extract(pool.experts["math"], tmp_path / "out", base=pool.reference, energy=0.8)
    base, tuned = read_weights(pool.reference), read_weights(pool.experts["math"])
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert len(set(config["rank_pattern"].values())) > 1
    for module in config["target_modules"]:
        rank = config["rank_pattern"].get(module, config["r"])
        change = (tuned[f"{module}.weight"] - base[f"{module}.weight"]).astype(np.float64)
        held = np.cumsum(np.linalg.svd(change, compute_uv=False) ** 2)
        assert held[rank - 1] >= 0.8 * held[-1] > (held[rank - 2] if rank > 1 else 0)


def test_peft_reads_it(pool: PoolOnDisk, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    sigmerge.extract(pool.experts["math"], tmp_path / "out", base=pool.reference, rank=4)
    model = AutoModelForCausalLM.from_pretrained(pool.reference)
    theirs = PeftModel.from_pretrained(model, str(tmp_path / "out")).merge_and_unload()
    weights = theirs.state_dict()
    for name, values in read_back(pool, tmp_path / "out").items():
        np.testing.assert_allclose(weights[name].numpy(), values, atol=1e-6, err_msg=name)


def test_peft_answers_as_the_model_that_was_extracted(pool: PoolOnDisk, tmp_path: Path) -> None:
    """Also where head and embedding are one tensor, as in gpt2."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    sigmerge.extract(pool.experts["math"], tmp_path / "out", base=pool.reference, energy=1.0)
    model = AutoModelForCausalLM.from_pretrained(pool.reference)
    made = PeftModel.from_pretrained(model, str(tmp_path / "out"))
    tuned = AutoModelForCausalLM.from_pretrained(pool.experts["math"])
    prompt = torch.tensor([[1, 5, 9]])
    torch.testing.assert_close(made(prompt).logits, tuned(prompt).logits, atol=2e-6, rtol=1e-4)


def test_wrong_input(pool: PoolOnDisk, tmp_path: Path) -> None:
    math = pool.experts["math"]
    with pytest.raises(PoolError, match="nothing to extract"):
        sigmerge.extract(pool.reference, tmp_path / "out", base=pool.reference)
    with pytest.raises(OutputError, match="lies inside an input"):
        sigmerge.extract(math, math / "adapter", base=pool.reference)
    with pytest.raises(OutputError, match="holds an input"):
        sigmerge.extract(math, math.parent, base=pool.reference)
    with pytest.raises(RecipeError, match="--rank: must be 1 or more"):
        sigmerge.extract(math, tmp_path / "out", base=pool.reference, rank=0)
    with pytest.raises(RecipeError, match="--energy: must lie between 0 and 1"):
        sigmerge.extract(math, tmp_path / "out", base=pool.reference, energy=1.5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("mine")
    with pytest.raises(OutputError, match="is no adapter"):
        sigmerge.extract(math, tmp_path / "mine", base=pool.reference, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_the_command(pool: PoolOnDisk, tmp_path: Path) -> None:
    math = pool.experts["math"]
    words = ("extract", math, tmp_path / "out", "--base", pool.reference, "--rank", "2")
    assert "matrices" in command(*words, "--dry-run").out and not (tmp_path / "out").exists()
    ran = command(*words)
    assert ran.code == 0 and "matrices of rank 2 at most keep" in ran.out
    assert command(*words).code == 4
    assert json.loads(command(*words, "--overwrite", "--json").out)["rank"] == 2
