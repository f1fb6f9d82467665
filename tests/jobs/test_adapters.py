"""Adapters as experts: the same bytes as the pool with the adapters merged first in float32."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sigmerge
from sigmerge.checkpoints.adapters import AdaptedTensor
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.errors import RecipeError, ScoreError, SigmergeError
from sigmerge.evaluation.command_line import run_command
from sigmerge.merge3.candidate import stored_weights
from sigmerge.recipe import load_recipe
from tests.adapters import merged, write_adapter
from tests.pools import (
    EXPERTS,
    draw,
    make_pool,
    read_weights,
    shapes,
    weight_bytes,
    write_member,
    write_tokenizer,
)

KINDS: dict[str, dict[str, Any]] = {
    "math": {},
    "coding": {"use_rslora": True, "rank": 3},
    "safety": {"dora": True, "dtype": "bf16"},
    "chat": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\.mlp\.down_proj": 9}},
    "law": {"embeddings": ("embed_tokens",), "modules": ("o_proj", "lm_head")},
}


@dataclass(frozen=True)
class Pools:
    """The same experts twice: as adapters of a bfloat16 model, and stored in float32."""

    reference: Path
    adapters: dict[str, Path]
    stored: dict[str, Path]

    def recipe(self, experts: dict[str, Path], method: str, **more: Any) -> dict[str, Any]:
        models = [
            {"model": str(path), "name": name, "parameters": {"weight": 0.2 + 0.1 * i}}
            for i, (name, path) in enumerate(experts.items())
        ]
        base = {} if method == "linear" else {"base_model": str(self.reference)}
        return {"merge_method": method, **base, "models": models, "dtype": "bfloat16", **more}


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Pools:
    root = tmp_path_factory.mktemp("adapters")
    reference = make_pool(root, experts=1, dtype="bf16", tokenizer=True).reference
    weights = read_weights(reference)
    adapters, stored = {}, {}
    for i, (name, kind) in enumerate(KINDS.items()):
        norm = {"model.norm.weight": np.full(16, 0.5 + i, np.float32)} if name == "chat" else {}
        adapters[name] = write_adapter(
            root / "adapters" / name, reference, weights, seed=i, whole=norm, **kind
        )
        stored[name] = write_member(root / "stored" / name, merged(weights, adapters[name]))
    return Pools(reference, adapters, stored)


def same_weights(ours: Path, theirs: Path) -> None:
    for name, content in weight_bytes(theirs).items():
        if name.endswith(".safetensors"):
            assert weight_bytes(ours)[name] == content


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("method", "parameters"),
    [("linear", {}), ("ties", {"density": 0.4}), ("slerp", {"t": 0.3}), ("model_stock", {})],
)
def test_a_merge_of_adapters_is_that_of_the_models_they_make(
    pools: Pools, tmp_path: Path, method: str, parameters: dict[str, Any], threads: int
) -> None:
    chosen = EXPERTS[:1] if method == "slerp" else EXPERTS
    for side, experts in (("adapters", pools.adapters), ("stored", pools.stored)):
        some = {name: experts[name] for name in chosen}
        recipe = pools.recipe(some, method, parameters=parameters)
        sigmerge.merge(recipe, tmp_path / side, threads=threads)
    same_weights(tmp_path / "adapters", tmp_path / "stored")


def repair_section(folder: Path) -> dict[str, Any]:
    """A repair whose scores lie in a file."""
    experts = {e: {d: 0.9 if e == d else 0.4 for d in EXPERTS} for e in EXPERTS}
    anchor = {domain: 0.5 + 0.05 * i for i, domain in enumerate(EXPERTS)}
    file = folder / "scores.json"
    file.write_text(json.dumps({"experts": experts, "anchor": anchor}))
    return {"scores": str(file)}


@pytest.mark.parametrize("threads", [1, 3])
def test_a_repair_with_adapters_is_that_with_the_models_they_make(
    pools: Pools, tmp_path: Path, threads: int
) -> None:
    for side, experts in (("adapters", pools.adapters), ("stored", pools.stored)):
        recipe = pools.recipe(experts, "task_arithmetic", repair=repair_section(tmp_path))
        sigmerge.merge(recipe, tmp_path / side, threads=threads)
    same_weights(tmp_path / "adapters", tmp_path / "stored")
    ours, theirs = (
        json.loads((tmp_path / side / "sigmerge" / "plan.json").read_text())
        for side in ("adapters", "stored")
    )
    for key in ("views", "capacity", "claimed", "support", "admitted_mass"):
        assert ours[key] == theirs[key]


def test_the_values_are_those_of_peft(pools: Pools) -> None:
    """PEFT multiplies in float32, in an order of its own: close, and never further than that."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for name, folder in pools.adapters.items():
        model = AutoModelForCausalLM.from_pretrained(pools.reference, dtype="float32")
        theirs = PeftModel.from_pretrained(model, str(folder), torch_dtype="float32")
        theirs = theirs.merge_and_unload().state_dict()
        ours = stored_weights(open_checkpoint(Path(f"{pools.reference}+{folder}")))
        assert set(ours) == set(theirs)
        for tensor, values in ours.items():
            apart = np.abs(values - theirs[tensor].numpy()).max()
            assert apart <= 4e-7, f"{name}: {tensor}"


SQUARE = {
    "gpt2": ("attn.c_proj", True),
    "llama": ("o_proj", False),
}


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("style", SQUARE)
def test_square_weights_are_turned_by_the_model_whatever_the_settings_say(
    tmp_path: Path, style: str, said: bool
) -> None:
    """PEFT saves one setting for all modules, that of the last one."""
    module, turned = SQUARE[style]
    reference = make_pool(tmp_path, experts=1, style=style).reference
    weights = read_weights(reference)
    folder = write_adapter(tmp_path / "adapter", reference, weights, modules=(module,))
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "fan_in_fan_out": turned}))
    wanted = merged(weights, folder)
    file.write_text(json.dumps({**settings, "fan_in_fan_out": said}))
    ours = stored_weights(open_checkpoint(Path(f"{reference}+{folder}")))
    for name, values in wanted.items():
        np.testing.assert_array_equal(ours[name], values, err_msg=name)


def test_weights_that_are_stored_as_in_out_beside_a_head_that_is_not(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    reference = make_pool(tmp_path, experts=1, style="gpt2", tied=False).reference
    wanted = LoraConfig(target_modules=["c_attn", "attn.c_proj", "lm_head"], r=2,
                        init_lora_weights=False)  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(reference, dtype="float32")
    get_peft_model(model, wanted).save_pretrained(tmp_path / "adapter")
    fresh = AutoModelForCausalLM.from_pretrained(reference, dtype="float32")
    theirs = PeftModel.from_pretrained(fresh, str(tmp_path / "adapter")).merge_and_unload()
    ours = stored_weights(open_checkpoint(Path(f"{reference}+{tmp_path / 'adapter'}")))
    for name, values in theirs.state_dict().items():
        if name in ours:
            np.testing.assert_allclose(ours[name], values.numpy(), atol=4e-7, err_msg=name)


def test_weights_that_are_stored_as_in_out(tmp_path: Path) -> None:
    reference = make_pool(tmp_path, experts=1, style="gpt2").reference
    weights = read_weights(reference)
    for dora in (False, True):
        folder = write_adapter(
            tmp_path / f"adapter-{dora}", reference, weights, modules=("c_attn", "mlp.c_proj"),
            dora=dora, fan_in_fan_out=True,
        )  # fmt: skip
        ours = stored_weights(open_checkpoint(Path(f"{reference}+{folder}")))
        for name, values in merged(weights, folder).items():
            np.testing.assert_array_equal(ours[name], values, err_msg=name)
        config = json.loads((folder / "adapter_config.json").read_text())
        del config["fan_in_fan_out"]  # the shapes show it
        (folder / "adapter_config.json").write_text(json.dumps(config))
        again = stored_weights(open_checkpoint(Path(f"{reference}+{folder}")))
        for name, values in ours.items():
            np.testing.assert_array_equal(again[name], values, err_msg=name)


def test_where_head_and_embedding_are_one_tensor_a_weight_of_either_is_loaded_into_it(
    tmp_path: Path,
) -> None:
    """One that modules_to_save names is a copy beside it; PEFT loads any other into the model."""
    reference = make_pool(tmp_path, experts=1, style="gemma").reference
    weights = read_weights(reference)
    assert "lm_head.weight" not in weights
    whole = {"lm_head.weight": np.ones((48, 16), np.float32)}
    loaded = write_adapter(tmp_path / "loaded", reference, weights, whole=whole)
    ours = stored_weights(open_checkpoint(Path(f"{reference}+{loaded}")))
    np.testing.assert_array_equal(ours["model.embed_tokens.weight"], whole["lm_head.weight"])
    assert "lm_head.weight" not in ours
    saved = write_adapter(
        tmp_path / "saved", reference, weights, whole=whole, modules_to_save=["lm_head"]
    )
    opened = open_checkpoint(Path(f"{reference}+{saved}"))
    assert opened.config["tie_word_embeddings"] is False
    ours = stored_weights(opened)
    np.testing.assert_array_equal(ours["lm_head.weight"], whole["lm_head.weight"])
    embedding = "model.embed_tokens.weight"
    np.testing.assert_array_equal(ours[embedding], weights[embedding])


def cut(folder: Path, *left_out: str) -> Path:
    """The adapter without the tensors whose names have one of these parts."""
    from safetensors.numpy import load_file, save_file

    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    kept = {n: v for n, v in tensors.items() if not any(part in n for part in left_out)}
    assert len(kept) < len(tensors)
    save_file(kept, file)
    return folder


@pytest.mark.parametrize(
    ("left_out", "settings", "told"),
    [
        (["0.self_attn.v_proj"], {}, "model.layers.0.self_attn.v_proj"),
        (["v_proj"], {}, "model.layers.0.self_attn.v_proj, model.layers.1.self_attn.v_proj"),
        (["v_proj"], {"layers_to_transform": [1]}, "model.layers.1.self_attn.v_proj"),
        (["v_proj"], {"exclude_modules": ["0.self_attn.v_proj"]},
         "model.layers.1.self_attn.v_proj"),
        (["1.mlp"], {"target_modules": ["q_proj", "v_proj", "down_proj", "query"]},
         "model.layers.1.mlp.down_proj, query"),
        (["v_proj"], {"layers_to_transform": 1, "exclude_modules": ["v_proj"]}, None),
        (["v_proj"], {"exclude_modules": ".*v_proj"}, None),
        (["v_proj"], {"modules_to_save": ["v_proj"]}, None),
        (["v_proj"], {"target_modules": ".*(q|v|down)_proj"}, None),
        (["v_proj"], {"target_modules": "all-linear"}, None),
        (["lora_"], {"modules_to_save": ["norm"]}, "model.layers.0.mlp.down_proj"),
    ],
)  # fmt: skip
def test_modules_that_an_adapter_names_and_lacks_are_said_before_the_merge(
    pools: Pools, tmp_path: Path, left_out: list[str], settings: dict[str, Any], told: str | None
) -> None:
    weights = read_weights(pools.reference)
    norm = {"model.norm.weight": np.ones(16, np.float32)}
    folder = write_adapter(tmp_path / "lora", pools.reference, weights, whole=norm, **settings)
    cut(folder, *left_out)
    recipe = pools.recipe({"math": folder}, "task_arithmetic")
    (step,) = sigmerge.merge.plan(recipe, tmp_path / "out").steps
    notes = [note for note in step.notes if "names modules" in note]
    if told is None:
        assert notes == []
    else:
        assert notes[0].startswith("math: adapter_config.json names modules that the adapter has")
        assert notes[0].partition("as they are: ")[2].startswith(told)


def test_every_module_of_a_whole_adapter_is_there(pools: Pools, tmp_path: Path) -> None:
    recipe = pools.recipe(pools.adapters, "linear")
    (step,) = sigmerge.merge.plan(recipe, tmp_path / "out").steps
    assert not any("names modules" in note for note in step.notes)


@pytest.mark.parametrize("method", ["linear", "ties", "slerp"])
@pytest.mark.parametrize("part", ["lora_A", "lora_B", "magnitude"])
def test_a_number_that_is_not_finite_names_the_file_of_the_adapter(
    pools: Pools, tmp_path: Path, method: str, part: str
) -> None:
    from safetensors.numpy import load_file, save_file

    weights = read_weights(pools.reference)
    folder = write_adapter(tmp_path / "lora", pools.reference, weights, dora=part == "magnitude")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(n for n in sorted(tensors) if part in n)
    tensors[name].reshape(-1)[3] = np.nan
    save_file(tensors, file)
    more = {"parameters": {"t": 0.5}} if method == "slerp" else {}
    recipe = pools.recipe({"math": folder}, method, **more)
    with pytest.raises(SigmergeError) as caught:
        sigmerge.merge(recipe, tmp_path / "out")
    told = str(caught.value)
    assert told.startswith("math: tensor model.layers.") and " holds nan at flat index " in told
    assert f"({name} in {file})" in told
    assert str(pools.reference / "model.safetensors") not in told


def test_an_update_that_grows_too_large_names_what_it_is_formed_of(
    pools: Pools, tmp_path: Path
) -> None:
    weights = read_weights(pools.reference)
    folder = write_adapter(tmp_path / "lora", pools.reference, weights, lora_alpha=1e45)
    with pytest.raises(SigmergeError, match=r"holds -?inf at flat index .* \(formed of .* and "):
        sigmerge.merge(pools.recipe({"math": folder}, "linear"), tmp_path / "out")


@pytest.mark.parametrize("tying", [False, True])
def test_a_trained_embedding_leaves_the_head_it_was_tied_to(tmp_path: Path, tying: bool) -> None:
    """PEFT trains a copy of the embedding; unless told otherwise, the head stays as it was."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    reference = make_pool(tmp_path, experts=1, tied=True).reference
    model = AutoModelForCausalLM.from_pretrained(reference, dtype="float32")
    settings = LoraConfig(
        target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=tying
    )
    made = get_peft_model(model, settings)
    with torch.no_grad():
        made.get_input_embeddings().weight.add_(0.1)
    made.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(reference, dtype="float32")
    theirs = PeftModel.from_pretrained(again, str(tmp_path / "adapter")).merge_and_unload()
    both = f"{reference}+{tmp_path / 'adapter'}"
    sigmerge.merge({"merge_method": "passthrough", "models": [{"model": both}]}, tmp_path / "out")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    prompt = torch.tensor([[1, 5, 9]])
    torch.testing.assert_close(ours(prompt).logits, theirs(prompt).logits)


def test_a_model_without_a_head_gets_none_from_an_adapter(tmp_path: Path) -> None:
    """Classifiers have none, and that of a masked model has another name."""
    weights = draw(shapes(tied=True), 0)
    model = write_member(tmp_path / "model", weights, tied=True)
    embedding = {"model.embed_tokens.weight": weights["model.embed_tokens.weight"] + 1}
    adapter = write_adapter(
        tmp_path / "lora", model, weights, whole=embedding, modules_to_save=["embed_tokens"]
    )
    config = json.loads((model / "config.json").read_text())
    heads = {}
    for kind in ("CausalLM", "SequenceClassification", "MaskedLM"):
        changed = {**config, "architectures": [f"LlamaFor{kind}"]}
        (model / "config.json").write_text(json.dumps(changed))
        try:
            heads[kind] = open_checkpoint(Path(f"{model}+{adapter}")).head
        except SigmergeError as error:
            heads[kind] = str(error).rpartition("; ")[2]
    assert heads == {
        "CausalLM": "lm_head.weight",
        "SequenceClassification": None,
        "MaskedLM": "merge the adapter into its model first.",
    }


def test_names_that_transformers_changes_on_loading(tmp_path: Path) -> None:
    """PEFT has those of the loaded model, a checkpoint those that it was stored with."""
    own = draw(shapes(), 0)
    stored = {f"language_model.{name}": values for name, values in own.items()}
    loaded = {name.replace("model.", "model.language_model.", 1): v for name, v in own.items()}
    model = write_member(tmp_path / "model", stored)
    adapter = write_adapter(tmp_path / "lora", model, loaded, modules=["q_proj"])
    tensors = open_checkpoint(Path(f"{model}+{adapter}")).tensors
    assert set(tensors) == set(stored)
    adapted = [name for name, tensor in tensors.items() if isinstance(tensor, AdaptedTensor)]
    assert sorted(adapted) == sorted(name for name in stored if "q_proj" in name)


def test_an_adapter_may_bring_a_longer_embedding(tmp_path: Path) -> None:
    reference = make_pool(tmp_path, experts=1).reference
    weights = read_weights(reference)
    rng = np.random.default_rng(0)
    whole = {name: rng.normal(size=(52, 16)).astype(np.float32)
             for name in ("model.embed_tokens.weight", "lm_head.weight")}  # fmt: skip
    folder = write_adapter(tmp_path / "longer", reference, weights, whole=whole)
    both = f"{reference}+{folder}"
    sigmerge.merge({"merge_method": "passthrough", "models": [{"model": both}]}, tmp_path / "out")
    ours = read_weights(tmp_path / "out")
    for name, values in whole.items():
        np.testing.assert_array_equal(ours[name], values)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 52


def test_a_pattern_matches_whole_parts_of_a_name(tmp_path: Path) -> None:
    """As in PEFT: `proj` is no module, and `1.self_attn.q_proj` not one of layer 11."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    reference = make_pool(tmp_path, experts=1, layers=12).reference
    model = AutoModelForCausalLM.from_pretrained(reference, dtype="float32")
    settings = LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False,
        alpha_pattern={"proj": 9, "1.self_attn.q_proj": 7}, rank_pattern={"11.self_attn.q_proj": 3},
    )  # fmt: skip
    get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(reference, dtype="float32")
    theirs = PeftModel.from_pretrained(again, str(tmp_path / "adapter")).merge_and_unload()
    ours = stored_weights(open_checkpoint(Path(f"{reference}+{tmp_path / 'adapter'}")))
    for name, values in theirs.state_dict().items():
        np.testing.assert_allclose(ours[name], values.numpy(), atol=4e-7, err_msg=name)


def test_an_adapter_alone_is_read_on_the_model_that_it_names(pools: Pools, tmp_path: Path) -> None:
    other = write_member(tmp_path / "other", read_weights(pools.stored["math"]))
    folder = write_adapter(tmp_path / "lora", other, read_weights(other))
    recipe = load_recipe(pools.recipe({"lora": folder}, "task_arithmetic"))
    assert recipe.models[0].path == Path(f"{other}+{folder}") and recipe.reference != other


def test_an_adapter_is_read_on_its_model_or_on_the_base_model(pools: Pools) -> None:
    folder = pools.adapters["math"]
    both = Path(f"{pools.reference}+{folder}")
    for given in (str(folder), f"{pools.reference}+{folder}"):
        recipe = load_recipe(pools.recipe({"math": Path(given)}, "task_arithmetic"))
        assert recipe.models[0].path == both
        assert pools.reference in recipe.inputs and folder in recipe.inputs
    text = (folder / "adapter_config.json").read_text()
    config = json.loads(text)
    try:
        (folder / "adapter_config.json").write_text(
            json.dumps({**config, "base_model_name_or_path": "someone/far-away"})
        )
        recipe = load_recipe(pools.recipe({"math": folder}, "task_arithmetic"))
        assert recipe.models[0].path == both
        assert any("someone/far-away" in note for note in recipe.notes)
        with pytest.raises(RecipeError, match=f"{folder}: its model is not here; give it as model"):
            load_recipe(pools.recipe({"math": folder}, "linear"))
        (folder / "adapter_config.json").write_text(
            json.dumps({**config, "base_model_name_or_path": None})
        )
        with pytest.raises(RecipeError, match="names no model"):
            load_recipe(pools.recipe({"math": folder}, "linear"))
    finally:
        (folder / "adapter_config.json").write_text(text)


def test_records_name_adapters_and_verify_computes_them_again(pools: Pools, tmp_path: Path) -> None:
    recipe = pools.recipe(pools.adapters, "ties", parameters={"density": 0.5})
    described = sigmerge.merge(recipe, tmp_path / "out")
    place = f"{pools.reference}+{pools.adapters['math']}"
    assert described.plan.experts["math"].path == place
    files = {one.file: one.member for one in described.provenance.inputs}
    assert files[str(pools.reference / "model.safetensors")] == "reference"
    assert files[str(pools.adapters["law"] / "adapter_model.safetensors")] == "law"
    assert files[str(pools.adapters["law"] / "adapter_config.json")] == "law"
    (report,) = sigmerge.verify(tmp_path / "out", deep=True, blocks=None)
    assert not report.findings and "recomputed" in report.checked


def test_an_adapter_answers_as_the_model_that_it_makes(pools: Pools) -> None:
    from sigmerge.probing.generate import HfModel
    from sigmerge.probing.hidden import probe

    both = f"{pools.reference}+{pools.adapters['law']}"
    ours = probe(both, ["w3 w4 w5", "w7 w8"])
    theirs = probe(pools.stored["law"], ["w3 w4 w5", "w7 w8"], tokenizer=pools.reference)
    np.testing.assert_array_equal(ours, theirs)
    weights = dict(HfModel(Path(both), "float32", 1).model.named_parameters())
    head = merged(read_weights(pools.reference), pools.adapters["law"])["lm_head.weight"]
    np.testing.assert_array_equal(weights["lm_head.weight"].detach().numpy(), head)
    with pytest.raises(ScoreError, match="passthrough"):
        run_command("echo {checkpoint}", {"checkpoint": Path(both)}, Path.cwd(), "command")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 5}, "rank 4, adapter_config.json has 5"),
        ({"lora_alpha": "much"}, "lora_alpha: 'much' is no number"),
        ({"init_lora_weights": "pissa"}, "changes the model's own weights"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({"use_dora": True}, "lora_magnitude_vector is missing"),
    ],
)
def test_settings_that_cannot_be_used(
    pools: Pools, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    weights = read_weights(pools.reference)
    folder = write_adapter(tmp_path / "a", pools.reference, weights, modules=("q_proj",))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(SigmergeError, match=told):
        sigmerge.merge(pools.recipe({"a": folder}, "task_arithmetic"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("written", ["{a}", "{reference}+{a}"])
def test_the_tokenizer_of_an_adapter(tmp_path: Path, written: str) -> None:
    """As in mergekit: a folder is asked for its own, and model+adapter for the model's."""
    pool = make_pool(tmp_path / "pool", experts=1, tokenizer=True)
    folder = write_adapter(tmp_path / "a", pool.reference, read_weights(pool.reference))
    write_tokenizer(folder)
    for place, text in ((pool.reference, "model's"), (folder, "adapter's")):
        (place / "chat_template.jinja").write_text(text)
    recipe = pool.recipe("task_arithmetic")
    recipe["models"][0]["model"] = f"{pool.reference}+{folder}"
    recipe["tokenizer_source"] = written.format(a=folder, reference=pool.reference)
    sigmerge.merge(recipe, tmp_path / "out")
    told = (tmp_path / "out" / "chat_template.jinja").read_text()
    assert told == ("model's" if "+" in written else "adapter's")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_link_must_stay_in_its_folder(pools: Pools, tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path / "a", pools.reference, read_weights(pools.reference))
    (folder / name).rename(tmp_path / "secret")
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(SigmergeError, match=f"{name} is a link that leaves the folder"):
        sigmerge.merge(pools.recipe({"a": folder}, "task_arithmetic"), tmp_path / "out")


def test_tensors_that_do_not_fit(pools: Pools, tmp_path: Path) -> None:
    weights = read_weights(pools.reference)
    narrow = {name: values[:, :-1] for name, values in weights.items() if "q_proj" in name}
    strange = {"model.layers.0.other.weight": np.ones((3, 3), np.float32)}
    for given, whole, told in (
        (narrow, {}, r"shape \[16, 15\] for a weight of shape \[16, 16\]"),
        ({}, strange, "the model has no such tensor"),
        ({"model.layers.9.self_attn.q_proj.weight": np.ones((4, 4))}, {}, "no such module"),
    ):
        name = f"adapter-{len(list(tmp_path.iterdir()))}"
        folder = write_adapter(tmp_path / name, pools.reference, given, whole=whole)
        with pytest.raises(SigmergeError, match=told):
            sigmerge.merge(pools.recipe({"a": folder}, "task_arithmetic"), tmp_path / "out")
    with pytest.raises(SigmergeError, match="must be an adapter"):
        both = Path(f"{pools.reference}+{pools.stored['math']}")
        sigmerge.merge(pools.recipe({"a": both}, "task_arithmetic"), tmp_path / "out")
