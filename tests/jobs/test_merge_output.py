"""The folder a merge writes: loaded by transformers and mergekit, and true in what it says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import sigmerge
from sigmerge.checkpoints.folder import INDEX
from sigmerge.errors import PoolError
from tests.operators.driver import run
from tests.pools import (
    DTYPES,
    STYLES,
    VOCAB,
    PoolOnDisk,
    make_pool,
    read_weights,
    write_member,
    write_weights,
)

WEIGHT = (0.5, 0.25)


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    return AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, attn_implementation="eager"
    )


@pytest.mark.parametrize("style", STYLES)
def test_transformers_loads_every_style(tmp_path: Path, style: str) -> None:
    pool = make_pool(tmp_path / "pool", experts=2, style=style, shards=(1, 2, 1))
    sigmerge.merge(pool.recipe("ties", None, WEIGHT, {"density": (0.5, 0.5)}), tmp_path / "out")
    model, report = load(tmp_path / "out")
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert not report["mismatched_keys"]
    assert type(model).__name__ == STYLES[style].architecture
    with torch.no_grad():
        logits = model(torch.tensor([[1, 5, 9]])).logits
    assert logits.shape == (1, 3, VOCAB) and torch.isfinite(logits).all()


def test_the_loaded_model_has_the_merged_weights(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    sigmerge.merge(
        pool.recipe("task_arithmetic", weight=WEIGHT), tmp_path / "out", max_shard_size="9KB"
    )
    model, _ = load(tmp_path / "out")
    experts = {name: read_weights(folder) for name, folder in pool.experts.items()}
    exact = run("task_arithmetic", read_weights(pool.reference), experts, weight=WEIGHT)
    for name, values in model.state_dict().items():
        np.testing.assert_array_equal(values.numpy().ravel(), exact[name])


@pytest.mark.parametrize("reference_tied", [True, False])
@pytest.mark.parametrize("expert_tied", [True, False])
def test_tied_and_untied_heads(tmp_path: Path, reference_tied: bool, expert_tied: bool) -> None:
    tied = (reference_tied, expert_tied, expert_tied)
    pool = make_pool(tmp_path / "pool", experts=2, tied=tied)
    sigmerge.merge(pool.recipe("task_arithmetic", weight=WEIGHT), tmp_path / "out")
    written = read_weights(tmp_path / "out")
    settings = json.loads((tmp_path / "out/config.json").read_text())
    both = reference_tied and expert_tied
    assert settings["tie_word_embeddings"] is both
    assert ("lm_head.weight" in written) is not both
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    members = {"reference": pool.reference, **pool.experts}
    heads = {}
    for name, folder in members.items():
        weights = read_weights(folder)
        heads[name] = {head: weights.get(head, weights[embedding])}
    wanted = run("task_arithmetic", heads.pop("reference"), heads, weight=WEIGHT)
    model, report = load(tmp_path / "out")
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    found = model.lm_head.weight.detach().numpy().ravel()
    np.testing.assert_array_equal(found, wanted[head])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is both


def test_a_redundant_copy_of_a_tied_head_is_not_merged_twice(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=1, tied=True)
    weights = read_weights(pool.experts["math"])
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    pool.experts["copy"] = write_member(tmp_path / "pool/copy", weights, tied=True)
    sigmerge.merge(
        pool.recipe("dare_linear", None, WEIGHT, {"density": (0.5, 0.5)}), tmp_path / "out"
    )
    assert "lm_head.weight" not in read_weights(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("method", ["passthrough", "linear"])
def test_a_head_of_its_own_beside_a_configuration_that_calls_it_tied(
    tmp_path: Path, method: str
) -> None:
    """transformers loads the stored head, and so the result has it too."""
    pool = make_pool(tmp_path / "pool", experts=2, tied=True)
    for i, folder in enumerate(pool.experts.values()):
        own = read_weights(folder)
        own["lm_head.weight"] = own["model.embed_tokens.weight"] + np.float32(1 + i)
        (folder / "model.safetensors").unlink()
        write_weights(folder, own)
    recipe = pool.recipe(method)
    del recipe["base_model"]
    if method == "passthrough":
        recipe["models"] = [{"model": str(pool.experts["math"])}]
    sigmerge.merge(recipe, tmp_path / "out")
    shares = {"passthrough": (1.0,), "linear": (2 / 3, 1 / 3)}[method]
    heads = [read_weights(folder)["lm_head.weight"] for folder in pool.experts.values()]
    wanted = sum(share * head for share, head in zip(shares, heads, strict=False))
    loaded, _ = load(tmp_path / "out")
    np.testing.assert_allclose(loaded.lm_head.weight.detach().numpy(), wanted, rtol=1e-6)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(("key", "dtype"), [("torch_dtype", "float16"), ("dtype", "bfloat16")])
def test_the_configuration_tells_the_dtype_written(tmp_path: Path, key: str, dtype: str) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    file = pool.reference / "config.json"
    settings = json.loads(file.read_text())
    del settings["torch_dtype"]
    file.write_text(json.dumps(settings | {key: "float32"}))
    sigmerge.merge(pool.recipe("linear", weight=WEIGHT, dtype=dtype), tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written == settings | {key: dtype}
    model, _ = load(tmp_path / "out")
    assert model.dtype == getattr(torch, dtype)


@pytest.fixture
def dressed(tmp_path: Path) -> PoolOnDisk:
    """A reference with every kind of companion file, and an expert with a tokenizer of its own."""
    pool = make_pool(tmp_path / "pool", experts=2, tokenizer=True)
    for name in (
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "added_tokens.json",
        "tekken.json",
        "qwen.tiktoken",
        "spiece.model",
        "chat_template.json",
        "preprocessor_config.json",
        "modeling_custom.py",
    ):
        (pool.reference / name).write_text(f"content of {name}")
    extra = pool.reference / "additional_chat_templates"
    extra.mkdir()
    (extra / "tools.jinja").write_text("tools")
    (pool.reference / "training_args.bin").write_bytes(b"not needed")
    (pool.experts["math"] / "chat_template.jinja").write_text("the expert's own")
    return pool


def test_every_companion_file_is_kept(dressed: PoolOnDisk, tmp_path: Path) -> None:
    sigmerge.merge(dressed.recipe("linear", weight=WEIGHT), tmp_path / "out")
    ours = ("config.json", "model.safetensors", "training_args.bin")
    kept = [f for f in dressed.reference.rglob("*") if f.is_file() and f.name not in ours]
    assert len(kept) == 17
    for file in kept:
        copy = tmp_path / "out" / file.relative_to(dressed.reference)
        assert copy.read_bytes() == file.read_bytes()
    assert not (tmp_path / "out/training_args.bin").exists()


def test_the_tokenizer_loads_with_its_chat_template(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2, tokenizer=True)
    sigmerge.merge(pool.recipe("linear", weight=WEIGHT), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "w7"}], tokenize=False) == "w7"
    )


@pytest.mark.parametrize("source", ["math", "base", None])
def test_tokenizer_source(dressed: PoolOnDisk, tmp_path: Path, source: str | None) -> None:
    top = {"tokenizer_source": source} if source else {}
    sigmerge.merge(dressed.recipe("linear", weight=WEIGHT, **top), tmp_path / "out")
    text = (tmp_path / "out/chat_template.jinja").read_text()
    assert (text == "the expert's own") is (source == "math")
    # Files of the model itself come from the reference whatever the tokenizer.
    assert (tmp_path / "out/modeling_custom.py").exists()


def test_generation_settings_are_kept(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    (pool.reference / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    sigmerge.merge(pool.recipe("linear", weight=WEIGHT), tmp_path / "out")
    found = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert found == {"temperature": 0.6, "top_p": 0.9}


def test_records_are_true(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2, shards=(2, 1, 3))
    recipe = pool.write(pool.recipe("task_arithmetic", {"lambda": 0.5}, WEIGHT, seed=4))
    result = sigmerge.merge(recipe, tmp_path / "out", threads=2)
    out = tmp_path / "out"
    assert (out / "sigmerge/recipe.yaml").read_text() == recipe.read_text()
    provenance = json.loads((out / "sigmerge/provenance.json").read_text())
    plan = json.loads((out / "sigmerge/plan.json").read_text())
    del provenance["checksum"]  # of the file
    assert {**provenance, "out": str(out), "plan": plan} == result.as_json()
    files = {Path(entry["file"]): entry for entry in provenance["inputs"]}
    weights = {f for m in pool.root.iterdir() if m.is_dir() for f in m.glob("*.safetensors")}
    beside = {f for m in pool.root.iterdir() if m.is_dir() for f in m.glob("*.json")}
    assert set(files) == weights | beside and len(weights) == 6
    for file, entry in files.items():
        assert entry["size"] == file.stat().st_size
        assert entry["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert entry["member"] == file.parent.name
    assert provenance["bytes_written"] == (out / "model.safetensors").stat().st_size
    stored = sum(v.nbytes for v in read_weights(pool.reference).values())
    assert provenance["bytes_read"] == 3 * stored
    assert provenance["peak_memory_bytes"] > 0 and provenance["versions"]["numpy"] == np.__version__
    plan = json.loads((out / "sigmerge/plan.json").read_text())
    assert plan["operator"] == "task_arithmetic" and plan["seed"] == 4
    assert plan["settings"]["weight"] == {"math": 0.5, "coding": 0.25}
    assert not (out / "sigmerge/journal.jsonl").exists()


def test_the_names_of_folders_stay_in_their_place_of_the_card(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    recipe = pool.recipe("linear")
    for model, name in zip(recipe["models"], ("a: [\n---\n# T", "1.0"), strict=True):
        model["name"] = Path(model["model"]).name
        model["model"] = str(Path(model["model"]).rename(pool.root / name))
    sigmerge.merge(recipe, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    front, _, rest = card.removeprefix("---\n").partition("\n---\n")
    assert "base_model" not in yaml.safe_load(front)  # local folders have no id on the hub
    assert "# T" not in rest.partition("## Recipe")[0].split("\n")


def test_the_model_card_tells_how_to_make_it_again(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    recipe = pool.write(pool.recipe("ties", None, WEIGHT, {"density": (0.5, 0.5)}))
    sigmerge.merge(recipe, tmp_path / "out")
    _, front, text = (tmp_path / "out/README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    assert "sigmerge" in yaml.safe_load(front)["tags"]
    assert "# TIES of 2 experts" in text
    for name in ("reference", "math", "coding"):
        assert f"`{name}`" in text
    inside = text.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(inside) == yaml.safe_load(recipe.read_text())


def test_shards_and_index(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2, layers=3)
    sigmerge.merge(pool.recipe("linear", weight=WEIGHT), tmp_path / "out", max_shard_size="6KB")
    out = tmp_path / "out"
    index = json.loads((out / INDEX).read_text())
    files = sorted(file.name for file in out.glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    found: dict[str, str] = {}
    total = 0
    for name in files:
        with safe_open(out / name, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            held = 0
            for tensor in shard.keys():  # noqa: SIM118 (not a mapping)
                values = shard.get_tensor(tensor)
                held += values.numel() * values.element_size()
                found[tensor] = name
        assert held <= 6000 or list(found.values()).count(name) == 1
        total += held
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == total
    assert set(found) == set(read_weights(pool.reference))


def test_layers_lie_in_their_order(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=1, layers=12)
    sigmerge.merge(pool.recipe("linear", weight=WEIGHT), tmp_path / "out", max_shard_size="6KB")
    shard_of = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    places = [shard_of[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(12)]
    assert places == sorted(places)


def test_outside_reference_keeps_the_references_own(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    sigmerge.merge(
        pool.recipe("task_arithmetic", {"outside": "reference"}, WEIGHT), tmp_path / "out"
    )
    written, reference = read_weights(tmp_path / "out"), read_weights(pool.reference)
    for name, values in reference.items():
        kept = not name.startswith("model.layers.")
        assert (written[name] == values).all() == kept, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_only_handed_over_keeps_its_bytes(tmp_path: Path, dtype: str) -> None:
    pool = make_pool(tmp_path / "pool", experts=1, dtype=dtype)
    stacked = {"merge_method": "passthrough", "models": [{"model": str(pool.reference)}]}
    outside = pool.recipe("task_arithmetic", {"outside": "reference"}, WEIGHT[:1])
    place, first = "model.embed_tokens.weight", pool.reference / "model.safetensors"
    for name, recipe in (("passthrough", stacked), ("outside", outside)):
        sigmerge.merge(recipe, tmp_path / name)
        ours, theirs = load_file(tmp_path / name / "model.safetensors"), load_file(first)
        kept = [n for n in theirs if name == "passthrough" or not n.startswith("model.layers.")]
        assert all(
            torch.equal(ours[n].view(torch.uint8), theirs[n].view(torch.uint8)) for n in kept
        )
    spoiled = load_file(first)
    spoiled[place].view(-1)[5] = float("nan")
    save_file(spoiled, first)
    for name, recipe in (("passthrough", stacked), ("outside", outside)):
        with pytest.raises(PoolError, match=rf"{place} holds nan at flat index 5"):
            sigmerge.merge(recipe, tmp_path / f"{name}-refused")
        sigmerge.merge(recipe, tmp_path / f"{name}-allowed", allow_nonfinite=True)
        found = load_file(tmp_path / f"{name}-allowed" / "model.safetensors")[place]
        assert (
            torch.isnan(found).nonzero().tolist() == torch.isnan(spoiled[place]).nonzero().tolist()
        )


def test_buffers_that_are_not_numbers_to_merge_are_copied(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    mask = torch.tril(torch.ones(4, 4)).to(torch.bool)
    for folder in (pool.reference, *pool.experts.values()):
        file = folder / "model.safetensors"
        extra = {"model.layers.0.bias": mask, "ids": torch.arange(5), "none": torch.zeros(0, 3)}
        save_file(load_file(file) | extra, file)
    sigmerge.merge(pool.recipe("linear", weight=WEIGHT, dtype="bfloat16"), tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(found["model.layers.0.bias"], mask)
    assert torch.equal(found["ids"], torch.arange(5))
    assert found["none"].shape == (0, 3)


def test_mergekit_takes_the_output_as_an_input(tmp_path: Path) -> None:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    pool = make_pool(tmp_path / "pool", experts=2)
    sigmerge.merge(
        pool.recipe("task_arithmetic", weight=WEIGHT), tmp_path / "out", max_shard_size="6KB"
    )
    again = {
        "merge_method": "linear",
        "models": [
            {"model": str(tmp_path / "out"), "parameters": {"weight": 1.0}},
            {"model": str(pool.reference), "parameters": {"weight": 0.0}},
        ],
        "dtype": "float32",
    }
    options = MergeOptions(copy_tokenizer=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(again), str(tmp_path / "again"), options)
    ours, theirs = read_weights(tmp_path / "out"), read_weights(tmp_path / "again")
    assert set(ours) == set(theirs)
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name])


def test_our_own_output_is_an_input_too(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    sigmerge.merge(pool.recipe("linear", weight=WEIGHT), tmp_path / "one")
    recipe = {"merge_method": "linear", "models": [{"model": str(tmp_path / "one")}]}
    sigmerge.merge(recipe, tmp_path / "two")
    one, two = read_weights(tmp_path / "one"), read_weights(tmp_path / "two")
    assert one and all((two[name] == values).all() for name, values in one.items())
