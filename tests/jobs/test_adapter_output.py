"""`output: adapter`: adapters become one adapter, equal to the method on full matrices or cores."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import sigmerge
from sigmerge.checkpoints.adapter_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from sigmerge.checkpoints.header import encode_header
from sigmerge.checkpoints.writer import Output
from sigmerge.errors import OutputError, PoolError, RecipeError
from sigmerge.jobs.options import Options
from tests.adapters import merged, write_adapter
from tests.pools import Weights, make_pool, read_weights, write_member

KINDS: dict[str, dict[str, Any]] = {
    "math": {},
    "coding": {"use_rslora": True, "rank": 3, "modules": ("q_proj", "o_proj")},
    "law": {"embeddings": ("embed_tokens",), "modules": ("q_proj", "lm_head"), "rank": 2},
    "chat": {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {r"layers\.1\.mlp\.down_proj": 9}},
}
"""The ranks of one matrix add up to less than its sides here, but for q_proj: 14 of 16."""
WEIGHTS = (0.5, 0.3, -0.7, 0.4)
SPACES = ("core", "knots")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Adapters:
    reference: Path
    folders: dict[str, Path]

    @property
    def weights(self) -> Weights:
        return read_weights(self.reference)

    def recipe(self, method: str, **more: Any) -> dict[str, Any]:
        models = [
            {"model": str(folder), "name": name, "parameters": {"weight": weight}}
            for (name, folder), weight in zip(self.folders.items(), cycle(WEIGHTS), strict=False)
        ]
        base = {"base_model": str(self.reference)}
        return {"merge_method": method, **base, "models": models, "output": "adapter", **more}

    def deltas(self, folder: Path) -> dict[str, Array]:
        """What an adapter adds, by NumPy; rounded once to float32 beside the weights."""
        own = self.weights
        return {
            name: values.astype(np.float64) - own[name]
            for name, values in merged(own, folder).items()
        }


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    root = tmp_path_factory.mktemp("adapters")
    reference = make_pool(root, experts=1, tokenizer=True).reference
    weights, folders = read_weights(reference), {}
    for i, (name, kind) in enumerate(KINDS.items()):
        folders[name] = write_adapter(root / "own" / name, reference, weights, seed=i, **kind)
    return Adapters(reference, folders)


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("method", ["task_arithmetic", "linear"])
def test_what_is_linear_is_the_same_on_full_matrices(
    adapters: Adapters, tmp_path: Path, method: str, space: str
) -> None:
    recipe = adapters.recipe(method, space=space)
    weights = np.array(WEIGHTS)
    if method == "linear":
        del recipe["base_model"]
        weights = weights / weights.sum()
    sigmerge.merge(recipe, tmp_path / "out")
    ours = adapters.deltas(tmp_path / "out")
    theirs = [adapters.deltas(folder) for folder in adapters.folders.values()]
    for name, values in ours.items():
        wanted = sum(w * each[name] for w, each in zip(weights, theirs, strict=True))
        np.testing.assert_allclose(values, wanted, atol=4e-7, err_msg=name)
    assert any(np.abs(values).max() > 0.05 for values in ours.values())
    config = json.loads((tmp_path / "out" / ADAPTER_CONFIG).read_text())
    module = "model.layers.0.self_attn.q_proj"
    assert config["rank_pattern"].get(module, config["r"]) == 4 + 3 + 2 + 5


def test_peft_loads_it_and_it_is_what_peft_makes_by_cat(adapters: Adapters, tmp_path: Path) -> None:
    """PEFT's `cat` is Σ w s BA, exactly; its `linear` sums factors, and is another thing."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    names, weights = ["math", "coding", "chat"], [0.5, 0.3, 0.4]
    some = {name: adapters.folders[name] for name in names}
    recipe = Adapters(adapters.reference, some).recipe("task_arithmetic")
    for entry, weight in zip(recipe["models"], weights, strict=True):
        entry["parameters"]["weight"] = weight
    sigmerge.merge(recipe, tmp_path / "out")
    words = torch.randint(0, 40, (2, 7))

    def logits(folder: Path, *more: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(adapters.reference, dtype="float32")
        loaded = PeftModel.from_pretrained(model, str(folder), adapter_name=folder.name)
        for each in more:
            loaded.load_adapter(str(each), adapter_name=each.name)
        if more:
            loaded.add_weighted_adapter(names, weights, "both", combination_type="cat")
            loaded.set_adapter("both")
        with torch.no_grad():
            return loaded(words).logits

    theirs = logits(*some.values())
    torch.testing.assert_close(logits(tmp_path / "out"), theirs, atol=2e-6, rtol=0)
    bare = AutoModelForCausalLM.from_pretrained(adapters.reference, dtype="float32")
    assert (theirs - bare(words).logits).abs().max() > 1e-3


def cores(deltas: list[Array], folders: list[Path], name: str) -> tuple[Array, Array, list[Array]]:
    """The bases and cores of a matrix from the stacked factors themselves, by NumPy's SVD."""
    module = "base_model.model." + name.removesuffix(".weight")
    bs, rows = [], []
    for folder, delta in zip(folders, deltas, strict=True):
        stored = load_file(folder / ADAPTER_WEIGHTS)
        if f"{module}.lora_A.weight" not in stored:
            continue
        a, b = (stored[f"{module}.lora_{x}.weight"].astype(np.float64) for x in "AB")
        size = np.linalg.norm(delta) / np.linalg.norm(b @ a)  # α/r, as it acts
        bs.append(size * b)
        rows.append(a)
    left = np.linalg.svd(np.hstack(bs), full_matrices=False)[0]
    right = np.linalg.svd(np.vstack(rows), full_matrices=False)[2]
    return left, right, [left.T @ delta @ right.T for delta in deltas]


def ties(parts: list[Array], density: float) -> Array:
    """Entries among the largest, of the elected sign, averaged; entry by entry."""
    trimmed = []
    for part in parts:
        flat = part.ravel()
        least = np.sort(np.abs(flat))[flat.size - int(density * flat.size)]
        trimmed.append(np.where(np.abs(flat) >= least, flat, 0.0))
    result = np.zeros(parts[0].size)
    for i in range(result.size):
        entries = [flat[i] for flat in trimmed]
        sign = 1 if sum(entries) >= 0 else -1
        agreeing = [e for e in entries if e * sign > 0]
        result[i] = np.mean(agreeing) if agreeing else 0.0
    return result.reshape(parts[0].shape)


@pytest.mark.parametrize("space", SPACES)
def test_ties_merges_coordinates_and_that_is_not_ties_on_matrices(
    adapters: Adapters, tmp_path: Path, space: str
) -> None:
    names = ("math", "coding", "chat")
    some = Adapters(adapters.reference, {name: adapters.folders[name] for name in names})
    recipe = some.recipe("ties", space=space, parameters={"density": 0.5, "weight": 1.0})
    for entry in recipe["models"]:
        del entry["parameters"]
    sigmerge.merge(recipe, tmp_path / "out")
    name = "model.layers.0.self_attn.q_proj.weight"
    deltas = [some.deltas(folder)[name] for folder in some.folders.values()]
    if space == "knots":
        left, sizes, right = np.linalg.svd(np.hstack(deltas), full_matrices=False)
        rank = 4 + 3 + 5
        parts = np.split(sizes[:rank, None] * right[:rank], 3, axis=1)
        wanted = left[:, :rank] @ ties(parts, 0.5)
    else:
        left, right, each = cores(deltas, list(some.folders.values()), name)
        wanted = left @ ties(each, 0.5) @ right
    ours = some.deltas(tmp_path / "out")[name]
    np.testing.assert_allclose(ours, wanted, atol=2e-6)
    assert np.abs(ours - ties(deltas, 0.5)).max() > 0.01


@pytest.mark.parametrize("space", SPACES)
def test_a_rank_keeps_the_largest_singular_values(
    adapters: Adapters, tmp_path: Path, space: str
) -> None:
    sigmerge.merge(adapters.recipe("task_arithmetic", space=space), tmp_path / "whole")
    sigmerge.merge(adapters.recipe("task_arithmetic", space=space, rank=3), tmp_path / "three")
    whole, three = (adapters.deltas(tmp_path / name) for name in ("whole", "three"))
    for name, values in whole.items():
        if values.any():
            left, sizes, right = np.linalg.svd(values)
            best = left[:, :3] @ (sizes[:3, None] * right[:3])
            np.testing.assert_allclose(three[name], best, atol=2e-6, err_msg=name)
    config = json.loads((tmp_path / "three" / ADAPTER_CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 3)


@pytest.mark.parametrize("method", ["dare_ties", "tsv", "iso_c", "della", "breadcrumbs", "sce"])
def test_any_method_gives_the_same_bytes_on_any_number_of_threads(
    adapters: Adapters, tmp_path: Path, method: str
) -> None:
    own = {"density": 0.5} if method.startswith(("dare", "della", "bread")) else {}
    recipe = adapters.recipe(method, parameters=own, space="knots", seed=3)
    for threads in (1, 3):
        sigmerge.merge(recipe, tmp_path / f"{threads}", threads=threads)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "3")
    assert any(np.abs(v).max() > 1e-3 for v in adapters.deltas(tmp_path / "1").values())


def test_what_is_stored_whole_is_merged_as_in_any_merge(tmp_path: Path) -> None:
    """modules_to_save, a bias, and a head that one adapter stores and another updates."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    reference = make_pool(tmp_path, experts=1, style="qwen", tied=False).reference
    weights, rng = read_weights(reference), np.random.default_rng(0)
    saved = ("lm_head.weight", "model.norm.weight")
    whole = {name: rng.normal(0, 1, weights[name].shape).astype(np.float32) for name in saved}
    bias = "model.layers.0.self_attn.q_proj.bias"
    stored_bias = bias.replace(".bias", ".base_layer.bias")
    one = write_adapter(
        tmp_path / "one", reference, weights, seed=1, modules_to_save=["lm_head", "norm"],
        bias="all", whole={**whole, stored_bias: np.ones(16, np.float32)},
    )  # fmt: skip
    two = write_adapter(tmp_path / "two", reference, weights, seed=2, modules=("lm_head", "k_proj"))
    some = Adapters(reference, {"one": one, "two": two})
    sigmerge.merge(some.recipe("task_arithmetic"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(reference, dtype="float32")
    loaded = PeftModel.from_pretrained(model, str(tmp_path / "out")).merge_and_unload()
    ours = {name: value.numpy() for name, value in loaded.state_dict().items()}
    members = []
    for folder in (one, two):
        made = merged(weights, folder)
        own = {name.replace(".base_layer", ""): values for name, values in made.items()}
        members.append(own)
    for name, values in ours.items():
        wanted = weights[name].astype(np.float64)
        for weight, member in zip(WEIGHTS[:2], members, strict=True):
            wanted = wanted + weight * (member[name].astype(np.float64) - weights[name])
        np.testing.assert_allclose(values, wanted, atol=1e-6, err_msg=name)
    assert np.abs(ours["lm_head.weight"] - weights["lm_head.weight"]).max() > 0.1
    assert np.abs(ours[bias] - weights[bias]).max() > 0.1


def test_an_interrupted_run_continues_and_verify_computes_it_again(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = adapters.recipe("ties", parameters={"density": 0.5})
    sigmerge.merge(recipe, tmp_path / "whole")
    real = Output.finish

    def failing(self: Output, block: str, *given: Any) -> None:
        if block == "layer 1":
            raise OutputError("the disk is full")
        real(self, block, *given)

    with monkeypatch.context() as patched, pytest.raises(OutputError, match="continues from there"):
        patched.setattr(Output, "finish", failing)
        sigmerge.merge(recipe, tmp_path / "out")
    result = sigmerge.merge(recipe, tmp_path / "out")
    assert result.provenance.blocks_resumed
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert sigmerge.verify(tmp_path / "out", deep=True).ok
    weights = tmp_path / "out" / ADAPTER_WEIGHTS
    raw = bytearray(weights.read_bytes())
    raw[-2] ^= 1
    weights.write_bytes(raw)
    report = sigmerge.verify(tmp_path / "out", deep=True, blocks=None)
    assert {"digests", "recomputed"} <= {f.check for each in report for f in each.findings}


def test_the_result_is_an_adapter_of_the_next_merge(adapters: Adapters, tmp_path: Path) -> None:
    """bfloat16 is written where the recipe says so."""
    recipe = adapters.recipe("task_arithmetic", dtype="bfloat16", rank=4)
    sigmerge.merge(recipe, tmp_path / "out")
    again = Adapters(adapters.reference, {"out": tmp_path / "out"})
    sigmerge.merge(again.recipe("passthrough"), tmp_path / "again")
    for name, values in again.deltas(tmp_path / "again").items():
        theirs = again.deltas(tmp_path / "out")[name]
        np.testing.assert_allclose(values, theirs, atol=4e-7, err_msg=name)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"output": None, "space": "core"}, "space: is a setting of output: adapter"),
        ({"rank": 0}, "rank"),
        ({"space": "score"}, "space"),
        ({"tokenizer_source": "union"}, "merges adapters alone"),
        ({"repair": {"scores": "scores.json"}}, "merges adapters alone"),
        ({"merge_method": "regmean"}, "reads what layers of whole models"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    adapters: Adapters, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    recipe = {k: v for k, v in {**adapters.recipe("ties"), **change}.items() if v is not None}
    with pytest.raises(RecipeError, match=told):
        sigmerge.merge(recipe, tmp_path / "out")


def test_members_that_are_no_lora_of_this_model_are_refused(
    adapters: Adapters, tmp_path: Path
) -> None:
    weights = adapters.weights
    dora = write_adapter(tmp_path / "dora", adapters.reference, weights, dora=True)
    with pytest.raises(PoolError, match="save_as_lora") as caught:
        sigmerge.merge(Adapters(adapters.reference, {"dora": dora}).recipe("ties"), tmp_path / "o")
    assert "q_proj.weight: DoRA" in str(caught.value)
    other = write_member(tmp_path / "other", {name: 2 * v for name, v in weights.items()})
    foreign = write_adapter(tmp_path / "foreign", other, weights)
    for folder, told in ((foreign, "is an adapter of"), (other, "is no adapter")):
        some = {"math": adapters.folders["math"], "other": folder}
        with pytest.raises(PoolError, match=told):
            sigmerge.merge(Adapters(adapters.reference, some).recipe("ties"), tmp_path / "o")


LARGE = {"self_attn.q_proj": (8192, 8192), "self_attn.k_proj": (1024, 8192),
         "self_attn.v_proj": (1024, 8192), "self_attn.o_proj": (8192, 8192),
         "mlp.gate_proj": (28672, 8192), "mlp.up_proj": (28672, 8192),
         "mlp.down_proj": (8192, 28672)}  # fmt: skip


def hollow(file: Path, tensors: dict[str, tuple[int, ...]], dtype: str) -> None:
    """A file with the header of such tensors, and no content on the disk."""
    header, begins = encode_header([(name, dtype, shape) for name, shape in tensors.items()])
    size = int(np.prod(tensors[[*tensors][-1]])) * (2 if dtype == "BF16" else 4)
    with file.open("wb") as stream:
        stream.write(header)
        stream.truncate(begins[-1] + size)


def large_pool(root: Path) -> Adapters:
    """Headers of a model of 70 B, and of five adapters of rank 16 of all its linear layers."""
    layers = {f"model.layers.{i}.{n}": s for i in range(80) for n, s in LARGE.items()}
    tensors = {f"{name}.weight": shape for name, shape in layers.items()}
    tensors |= {f"model.layers.{i}.{n}.weight": (8192,) for i in range(80)
                for n in ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
    tensors |= {"model.embed_tokens.weight": (128256, 8192), "lm_head.weight": (128256, 8192),
                "model.norm.weight": (8192,)}  # fmt: skip
    reference = root / "reference"
    reference.mkdir()
    hollow(reference / "model.safetensors", tensors, "BF16")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
              "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
              "num_attention_heads": 64, "num_key_value_heads": 8}  # fmt: skip
    (reference / "config.json").write_text(json.dumps(config))
    folders = {}
    for i in range(5):
        folder = folders[f"expert{i}"] = root / f"expert{i}"
        folder.mkdir()
        factors = {}
        for name, (outputs, inputs) in layers.items():
            factors[f"base_model.model.{name}.lora_A.weight"] = (16, inputs)
            factors[f"base_model.model.{name}.lora_B.weight"] = (outputs, 16)
        hollow(folder / ADAPTER_WEIGHTS, factors, "F32")
        settings = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear",
                    "base_model_name_or_path": str(reference)}  # fmt: skip
        (folder / ADAPTER_CONFIG).write_text(json.dumps(settings))
    return Adapters(reference, folders)


@pytest.mark.parametrize(("space", "most"), [("core", 2), ("knots", 4)])
def test_five_adapters_of_70_b_fit_into_a_laptop(tmp_path: Path, space: str, most: float) -> None:
    """A dry run on headers: the model's 141 GB are not read."""
    from sigmerge.jobs.merge import MergeJob
    from sigmerge.recipe import load_recipe

    recipe = load_recipe(large_pool(tmp_path).recipe("ties", space=space, rank=16))
    [step] = MergeJob(recipe, tmp_path / "out", Options(threads=4)).describe().steps
    factors = 80 * 16 * sum(sum(shape) for shape in LARGE.values())
    assert step.bytes_to_read == 5 * 4 * factors
    assert step.bytes_to_write == pytest.approx(4 * factors, rel=1e-3)
    assert step.peak_memory_bytes < most * 2**30
