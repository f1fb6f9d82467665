"""An adapter extracted from a model: against NumPy's SVD, read back by sigmerge and by PEFT."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.torch import save_file

import sigmerge
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.errors import OutputError, PoolError, RecipeError
from sigmerge.merge3.candidate import stored_weights
from tests.adapters import write_adapter
from tests.command_line import sigmerge as command
from tests.pools import PoolOnDisk, make_pool, read_weights


class Tiny(NamedTuple):
    """A model's class, its base, the tuned model, and names of what PEFT cannot load."""

    made: Any
    base: Path
    tuned: Path
    left: tuple[str, ...]


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


TINY: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}, ()),
    "gpt2": ("GPT2LMHeadModel", {}, ()),
    "t5": ("T5ForConditionalGeneration", {"d_kv": 8, "d_ff": 24}, ()),
    "mamba": ("MambaForCausalLM", {"state_size": 4}, ("mixer.A_log", "mixer.D")),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 3, "num_key_value_heads": 2}, ()),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"num_local_experts": 3, "num_key_value_heads": 2, "head_dim": 8},
        ("mlp.experts", "attn.sinks"),
    ),
    "clip": ("CLIPModel", {}, ("logit_scale",)),
}
"""The class of a model, its settings, and parts of the names of what no adapter holds."""


@pytest.fixture(scope="module", params=list(TINY))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A model of transformers and one whose every weight moved."""
    import torch
    import transformers

    kind, more, left = TINY[request.param]
    small = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"intermediate_size": 24, "num_layers": 2} | more
    if request.param == "clip":
        sides = {**small, "image_size": 8, "patch_size": 4, "projection_dim": 16}
        small = {"text_config": sides, "vision_config": sides, "projection_dim": 16}
    made = getattr(transformers, kind)
    torch.manual_seed(0)
    model = made(transformers.AutoConfig.for_model(request.param, **small))
    root = tmp_path_factory.mktemp(request.param)
    for name in ("base", "tuned"):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.05 * torch.randn_like(weight))
        model.save_pretrained(root / name)
    return Tiny(made, root / "base", root / "tuned", left)


def test_peft_makes_the_model_again(tiny: Tiny, tmp_path: Path) -> None:
    from peft import PeftModel

    made = sigmerge.extract(tiny.tuned, tmp_path / "out", base=tiny.base, energy=1.0)
    model = PeftModel.from_pretrained(tiny.made.from_pretrained(tiny.base), str(tmp_path / "out"))
    theirs = model.merge_and_unload().state_dict()
    for name, values in tiny.made.from_pretrained(tiny.tuned).state_dict().items():
        close = np.allclose(theirs[name].numpy(), values.numpy(), atol=2e-6)
        assert close != any(part in name for part in tiny.left), name
    assert bool(made.warnings) == bool(tiny.left)
    assert all(any(part in text for text in made.warnings) for part in tiny.left)


def test_sigmerge_makes_the_model_again(tiny: Tiny, tmp_path: Path) -> None:
    sigmerge.extract(tiny.tuned, tmp_path / "out", base=tiny.base, energy=1.0)
    both = open_checkpoint(Path(f"{tiny.base}+{tmp_path / 'out'}"))
    tuned = read_weights(tiny.tuned)
    back = stored_weights(both)
    assert set(back) == set(tuned)
    for name, values in tuned.items():
        close = np.allclose(back[name], values, atol=2e-6)
        assert close != any(part in name for part in tiny.left), name


def test_a_rank_cuts_every_linear_layer(tiny: Tiny, tmp_path: Path) -> None:
    """In an encoder too. PEFT takes no update of what leaves a Mamba block."""
    import torch
    from transformers.pytorch_utils import Conv1D

    sigmerge.extract(tiny.tuned, tmp_path / "out", base=tiny.base, rank=2)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    linear = {
        name
        for name, module in tiny.made.from_pretrained(tiny.base).named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
        and not name.endswith("lm_head" if "Mamba" not in tiny.made.__name__ else
                              ("lm_head", "out_proj"))
    }  # fmt: skip
    assert linear and linear <= set(config["target_modules"]) and config["r"] == 2


def test_without_transformers_names_decide(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sigmerge.checkpoints.layers import layers_by_name
    from sigmerge.probing.layers import model_layers

    checkpoint = open_checkpoint(tiny.base)
    asked = {layer.module for layer in model_layers(checkpoint) if layer.linear}
    monkeypatch.setitem(sys.modules, "torch", None)
    named = {layer.module for layer in model_layers(checkpoint) if layer.linear}
    assert named == {layer.module for layer in layers_by_name(checkpoint) if layer.linear}
    assert {name for name in asked if "layer" in name or "block" in name} <= named


def test_what_did_not_change_is_not_left_out(tmp_path: Path) -> None:
    """And PEFT, which loads no adapter without an update, gets one that is zero."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1))
    model.save_pretrained(tmp_path / "base")
    model.backbone.norm_f.weight.data.add_(0.5)
    model.save_pretrained(tmp_path / "tuned")
    made = sigmerge.extract(tmp_path / "tuned", tmp_path / "out", base=tmp_path / "base")
    assert made.whole == ("backbone.norm_f.weight",) and not made.warnings
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(again, str(tmp_path / "out")).merge_and_unload()
    for name, values in model.state_dict().items():
        np.testing.assert_array_equal(theirs.state_dict()[name].numpy(), values.numpy(), name)


def test_a_vocab_size_that_counts_padding_is_no_other_vocabulary(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    tuned = Path(shutil.copytree(pool.experts["math"], tmp_path / "tuned"))
    file = tuned / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 47}))
    assert sigmerge.extract(tuned, tmp_path / "out", base=pool.reference).modules


MASKED = {
    "bert": ("BertForMaskedLM", "BertConfig", {}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {}),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig",
                   {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16}),
}  # fmt: skip


@pytest.mark.parametrize("kind", MASKED)
def test_the_adapter_of_a_model_that_fills_gaps_makes_it_again(tmp_path: Path, kind: str) -> None:
    import torch
    import transformers

    name, settings, more = MASKED[kind]
    sizes = more or {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                     "intermediate_size": 16}  # fmt: skip
    model = getattr(transformers, name)(getattr(transformers, settings)(vocab_size=40, **sizes))
    model.save_pretrained(tmp_path / "base")
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(tmp_path / "tuned")
    sigmerge.extract(tmp_path / "tuned", tmp_path / "adapter", base=tmp_path / "base", energy=1.0)
    again = open_checkpoint(Path(f"{tmp_path / 'base'}+{tmp_path / 'adapter'}"))
    tuned = read_weights(tmp_path / "tuned")
    found = stored_weights(again)
    assert found.keys() == tuned.keys()
    for tensor, values in tuned.items():
        np.testing.assert_allclose(found[tensor], values, atol=1e-6, err_msg=tensor)


@pytest.mark.parametrize(("own", "equal"), [(True, False), (True, True), (False, True)])
def test_an_adapter_leaves_a_head_of_its_own_as_it_is(
    tmp_path: Path, own: bool, equal: bool
) -> None:
    """A head that is the embedding would be parted from it, which is not done for such a model."""
    import torch
    from transformers import RobertaConfig, RobertaForMaskedLM

    settings = RobertaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1,
                             num_attention_heads=2, intermediate_size=16,
                             tie_word_embeddings=not own)  # fmt: skip
    model = RobertaForMaskedLM(settings)
    model.save_pretrained(tmp_path / "base")
    file = tmp_path / "base/model.safetensors"
    weights = read_weights(tmp_path / "base")
    embedding, head = "roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"
    if equal:
        weights[head] = weights[embedding]
    save_file({n: torch.tensor(v) for n, v in weights.items()}, file, {"format": "pt"})
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "base", weights,
                            modules=("query",), embeddings=("word_embeddings",))  # fmt: skip
    both = Path(f"{tmp_path / 'base'}+{adapter}")
    if not own:
        with pytest.raises(PoolError, match="parts the two, which is not done for a masked model"):
            open_checkpoint(both)
        return
    np.testing.assert_array_equal(stored_weights(open_checkpoint(both))[head], weights[head])


def test_a_full_disk_is_told_before_writing(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match="the disk has"):
        sigmerge.extract(pool.experts["math"], tmp_path / "new/out", base=pool.reference)
    assert not (tmp_path / "new").exists()


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
    with pytest.raises(OutputError, match="is not an adapter folder"):
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


def test_another_vocabulary_and_what_to_do(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=1, tokenizer=True)

    def padded(model: Path, out: Path) -> Path:
        tokenizer = {"source": str(pool.experts["math"]), "pad_to_multiple_of": 64}
        recipe = {"merge_method": "passthrough", "models": [{"model": str(model)}]}
        sigmerge.merge({**recipe, "tokenizer": tokenizer}, out)
        return out

    tuned, out = padded(pool.experts["math"], tmp_path / "tuned"), tmp_path / "out"
    with pytest.raises(PoolError, match=r"vocabulary of 64 tokens.*pad_to_multiple_of") as raised:
        sigmerge.extract(tuned, out, base=pool.reference)
    assert "outside" not in str(raised.value)
    sigmerge.extract(tuned, out, base=padded(pool.reference, tmp_path / "base"), energy=1.0)
    back = dict(stored_weights(open_checkpoint(Path(f"{tmp_path / 'base'}+{out}"))))
    for name, values in read_weights(tuned).items():
        np.testing.assert_allclose(back[name], values, atol=3e-8, err_msg=name)


def test_another_depth(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=1)
    deeper = make_pool(tmp_path / "deeper", experts=1, layers=3)
    with pytest.raises(PoolError, match="has 3 layers, and the base 2; an adapter") as raised:
        sigmerge.extract(deeper.experts["math"], tmp_path / "out", base=pool.reference)
    assert "slices" not in str(raised.value)
