"""`slices:` of a recipe: layers of several models stacked, merged and repeated, as in mergekit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sigmerge
from sigmerge.errors import PoolError, RecipeError
from sigmerge.recipe import load_recipe
from tests.jobs.test_mergekit_parity import agree, both
from tests.pools import PoolOnDisk, make_pool, read_weights

Sliced = dict[str, Any]
LAYERS = 6


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("slices"), experts=2, layers=LAYERS)


def source(model: str, first: int, last: int, **parameters: Any) -> dict[str, Any]:
    own = {"parameters": parameters} if parameters else {}
    return {"model": model, "layer_range": [first, last], **own}


def piece(*sources: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"sources": list(sources), **more}


BASE, MATH, CODING = "{reference}", "{math}", "{coding}"
HALVED = [{"filter": "o_proj", "value": 0}, {"filter": "down_proj", "value": 0.5}, {"value": 1}]
BY_PART = [{"filter": "self_attn", "value": [0, 0.5, 1]}, {"value": 0.3}]
CASES: dict[str, Sliced] = {
    "whole models": {
        "slices": [piece(source(BASE, 0, 6), source(MATH, 0, 6))],
        "merge_method": "slerp", "base_model": BASE, "parameters": {"t": BY_PART},
    },
    "whole models, parameters of the slice": {
        "slices": [piece(source(BASE, 0, 6), source(MATH, 0, 6), parameters={"t": 0.9})],
        "merge_method": "slerp", "base_model": BASE, "parameters": {"t": 0.1},
    },
    "a shorter model": {
        "slices": [piece(source(BASE, 0, 4), source(MATH, 0, 4))],
        "merge_method": "slerp", "base_model": BASE, "parameters": {"t": [0, 1]},
    },
    "one layer, at the end of a gradient": {
        "slices": [
            piece(source(BASE, 0, 1), source(MATH, 0, 1)),
            piece(source(BASE, 1, 4), source(MATH, 1, 4)),
        ],
        "merge_method": "slerp", "base_model": BASE, "parameters": {"t": [0.1, 0.8]},
    },
    "stacked": {
        "slices": [piece(source(MATH, 0, 4)), piece(source(CODING, 2, 6))],
        "merge_method": "passthrough",
    },
    "repeated and scaled": {
        "slices": [
            piece(source(MATH, 0, 3)), piece(source(MATH, 1, 5, scale=HALVED)),
            piece(source(MATH, 4, 6)),
        ],
        "merge_method": "passthrough",
    },
    "layers of one beside others of another": {
        "slices": [
            piece(source(MATH, 0, 3, weight=0.3), source(CODING, 1, 4, weight=0.7),
                  parameters={"normalize": False}),
            piece(source(CODING, 3, 6, weight=[0.1, 0.9]), source(BASE, 0, 3, weight=1)),
        ],
        "merge_method": "linear",
    },
    "another base in a slice": {
        "slices": [
            piece(source(BASE, 0, 3), source(MATH, 0, 3, weight=0.3, density=0.5)),
            piece(source(CODING, 3, 6), source(MATH, 2, 5, weight=1), base_model=CODING,
                  parameters={"density": 0.4}),
        ],
        "merge_method": "ties", "base_model": BASE,
    },
    "filters see the names of the inputs": {
        "slices": [
            piece(source(MATH, 3, 6, scale=[{"filter": "layers.4.", "value": 2}, {"value": 1}])),
        ],
        "merge_method": "passthrough",
    },
    "a module": {
        "modules": {"default": {"slices": [piece(source(MATH, 0, 2)), piece(source(MATH, 0, 2))]}},
        "merge_method": "passthrough",
    },
    "a module of models": {
        "modules": {"default": {
            "models": [{"model": MATH, "parameters": {"weight": 0.3}}, {"model": CODING}],
            "parameters": {"weight": 0.6},
        }},
        "merge_method": "linear", "parameters": {"weight": 3, "normalize": False},
    },
}  # fmt: skip


def placed(recipe: Any, pool: PoolOnDisk) -> Any:
    """The recipe with the folders of the pool."""
    text = json.dumps(recipe)
    for name, folder in {"reference": pool.reference, **pool.experts}.items():
        text = text.replace(f"{{{name}}}", str(folder))
    return {**json.loads(text), "dtype": "float32"}


@pytest.mark.parametrize("case", CASES)
def test_mergekit_stacks_the_same(pool: PoolOnDisk, tmp_path: Path, case: str) -> None:
    agree(*both(pool, placed(CASES[case], pool), tmp_path), ulps=2)
    depths = [
        json.loads((tmp_path / who / "config.json").read_text())["num_hidden_layers"]
        for who in ("ours", "theirs")
    ]
    assert depths[0] == depths[1]


def test_lists_of_one_entry_a_layer_are_stacked_too(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2, layers=3)
    for name, kinds in {"math": "abc", "coding": "xyz"}.items():
        file = pool.experts[name] / "config.json"
        given = json.loads(file.read_text())
        file.write_text(json.dumps({**given, "layer_types": list(kinds), "other": [1, 2]}))
    slices = [piece(source(MATH, 0, 2)), piece(source(CODING, 1, 3)), piece(source(MATH, 0, 1))]
    recipe = placed({"slices": slices, "merge_method": "passthrough"}, pool)
    sigmerge.merge(recipe, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["layer_types"] == list("abyza") and config["other"] == [1, 2]
    assert config["num_hidden_layers"] == 5


def test_the_depth_of_a_model_inside_another(tmp_path: Path) -> None:
    """Models with pictures say it in text_config."""
    pool = make_pool(tmp_path / "pool", experts=1, layers=3)
    file = pool.experts["math"] / "config.json"
    inner = {"num_hidden_layers": 3, "layer_types": list("abc"), "vocab_size": 48}
    file.write_text(json.dumps({**json.loads(file.read_text()), "text_config": inner}))
    slices = [piece(source(MATH, 0, 3)), piece(source(MATH, 1, 2))]
    sigmerge.merge(
        placed({"slices": slices, "merge_method": "passthrough"}, pool), tmp_path / "out"
    )
    config = json.loads((tmp_path / "out/config.json").read_text())["text_config"]
    assert config["num_hidden_layers"] == 4 and config["layer_types"] == list("abcb")


def test_positions_come_from_the_first_slice(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2, style="gpt2")
    slices = [piece(source(MATH, 0, 2)), piece(source(CODING, 0, 1))]
    recipe = placed({"slices": slices, "merge_method": "passthrough"}, pool)
    agree(*both(pool, recipe, tmp_path), ulps=0)


def test_an_embedding_of_positions_is_none_of_tokens(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=12, hidden_size=8, num_hidden_layers=3, num_attention_heads=2,
                        intermediate_size=8, max_position_embeddings=10)  # fmt: skip
    for name in ("math", "coding"):
        BertForSequenceClassification(config).save_pretrained(tmp_path / name)
    pool = PoolOnDisk(tmp_path, tmp_path, {n: tmp_path / n for n in ("math", "coding")})
    slices = [piece(source(MATH, 0, 2)), piece(source(CODING, 1, 3))]
    recipe = placed({"slices": slices, "merge_method": "passthrough"}, pool)
    agree(*both(pool, recipe, tmp_path), ulps=0)


def test_the_bases_of_all_slices_are_on_record(pool: PoolOnDisk, tmp_path: Path) -> None:
    made = sigmerge.merge(placed(CASES["another base in a slice"], pool), tmp_path / "out")
    files = {Path(one.file) for one in made.provenance.inputs}
    folders = (pool.reference, *pool.experts.values())
    assert {folder / "model.safetensors" for folder in folders} <= files


def test_a_stacked_model_loads(pool: PoolOnDisk, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    sigmerge.merge(placed(CASES["stacked"], pool), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(model.model.layers) == 8
    assert torch.isfinite(model(torch.tensor([[1, 5, 7]])).logits).all()


WRONG: dict[str, tuple[Sliced, str]] = {
    "an operator that reads exemplars": (
        {"slices": [piece(source(BASE, 0, 6), source(MATH, 0, 6), source(CODING, 0, 6))],
         "merge_method": "fisher", "base_model": BASE},
        "fisher reads each expert's own exemplars, and sources of slices have none",
    ),
    "no layers": (
        {"slices": [piece(source(MATH, 3, 3))], "merge_method": "passthrough"},
        "slices: hold no layer together; a model has one at least",
    ),
    "layers backwards": (
        {"slices": [piece(source(MATH, 3, 1))], "merge_method": "passthrough"},
        r"slices\[0\]\.sources\[0\]\.layer_range: \[3, 1\] holds no layer",
    ),
    "three ends": (
        {"slices": [piece({"model": MATH, "layer_range": [0, 3, 6]})],
         "merge_method": "passthrough"},
        r"layer_range: must be a list of 2 numbers, not \[0, 3, 6\]",
    ),
    "more layers than there are": (
        {"slices": [piece(source(MATH, 0, 7))], "merge_method": "passthrough"},
        "math: has 6 layers, not 7",
    ),
    "different lengths": (
        {"slices": [piece(source(MATH, 0, 3, weight=1), source(CODING, 0, 4, weight=1))],
         "merge_method": "linear"},
        "must all have as many layers; math has 3, coding has 4",
    ),
    "two models passed through": (
        {"slices": [piece(source(MATH, 0, 3), source(CODING, 0, 3))],
         "merge_method": "passthrough"},
        r"slices\[0\]\.sources: passthrough takes at most 1, and 2 are listed",
    ),
    "base not among the sources": (
        {"slices": [piece(source(MATH, 0, 6), source(CODING, 0, 6))], "merge_method": "slerp",
         "base_model": BASE, "parameters": {"t": 0.5}},
        "slerp needs the base model among them",
    ),
    "one model twice": (
        {"slices": [piece(source(MATH, 0, 3, weight=1), source(MATH, 3, 6, weight=1))],
         "merge_method": "linear"},
        "math stands there twice",
    ),
    "models too": (
        {"slices": [piece(source(MATH, 0, 3))], "models": [{"model": MATH}],
         "merge_method": "passthrough"},
        "slices: and models: both say what is merged",
    ),
    "no module": ({"modules": {}, "merge_method": "passthrough"}, "modules: must be a mapping"),
    "two modules": (
        {"modules": {"eyes": {"models": [{"model": MATH}]},
                     "text": {"models": [{"model": CODING}]}},
         "merge_method": "passthrough"},
        "modules: eyes, text are merged one by one.*by what its tensors are called",
    ),
    "slices of modules that no model has": (
        {"modules": {name: {"slices": [piece(source(MATH, 0, 3))]} for name in ("eyes", "text")},
         "merge_method": "passthrough"},
        "modules: eyes, text are merged one by one, and so must be all modules of a model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_slices(pool: PoolOnDisk, tmp_path: Path, wrong: str) -> None:
    recipe, words = WRONG[wrong]
    with pytest.raises((RecipeError, PoolError), match=words):
        sigmerge.merge(placed(recipe, pool), tmp_path / "out")


def test_modules_that_are_merged_alike_are_the_model(pool: PoolOnDisk, tmp_path: Path) -> None:
    models = {
        "models": [{"model": m, "parameters": {"weight": w}} for m, w in ((MATH, 1), (CODING, 2))]
    }
    for name, given in (("plain", models), ("parts", {"modules": {"a": models, "b": models}})):
        sigmerge.merge(placed({**given, "merge_method": "linear"}, pool), tmp_path / name)
    one, two = read_weights(tmp_path / "plain"), read_weights(tmp_path / "parts")
    assert one.keys() == two.keys() and all(np.array_equal(one[n], two[n]) for n in one)


REPAIR = {"shares": {"math": 0.6, "coding": 0.4}, "capacity": 0.1}


def test_slices_of_whole_models_are_repaired_like_models(pool: PoolOnDisk, tmp_path: Path) -> None:
    sources = [source(BASE, 0, 6), source(MATH, 0, 6, weight=1), source(CODING, 0, 6, weight=1)]
    sliced = placed({"slices": [piece(*sources)], "merge_method": "ties", "base_model": BASE}, pool)
    models = [{"model": s["model"], "parameters": {"weight": 1}} for s in sources[1:]]
    plain = placed({"models": models, "merge_method": "ties", "base_model": BASE}, pool)
    for name, recipe in {"sliced": sliced, "plain": plain}.items():
        sigmerge.merge(recipe | {"repair": REPAIR}, tmp_path / name)
    one, two = read_weights(tmp_path / "sliced"), read_weights(tmp_path / "plain")
    for name, values in one.items():
        np.testing.assert_array_equal(values, two[name])


def test_a_shorter_model_is_repaired(pool: PoolOnDisk, tmp_path: Path) -> None:
    sources = [source(BASE, 2, 6), source(MATH, 2, 6, weight=1), source(CODING, 1, 5, weight=1)]
    sliced = placed({"slices": [piece(*sources)], "merge_method": "ties", "base_model": BASE}, pool)
    merged = sigmerge.merge(sliced, tmp_path / "merged")
    repaired = sigmerge.merge(sliced | {"repair": REPAIR}, tmp_path / "repaired")
    before, after = read_weights(Path(merged.out)), read_weights(Path(repaired.out))
    assert set(before) == set(after) and any((before[n] != after[n]).any() for n in before)


def test_a_layer_without_a_counterpart_is_not_repaired(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = placed({**CASES["stacked"], "base_model": BASE, "repair": REPAIR}, pool)
    with pytest.raises(PoolError, match="layer 0 of the result has no counterpart in coding"):
        sigmerge.merge(recipe, tmp_path / "out")


def test_a_stacked_model_can_be_verified(pool: PoolOnDisk, tmp_path: Path) -> None:
    sigmerge.merge(placed(CASES["another base in a slice"], pool), tmp_path / "out")
    assert all(report.ok for report in sigmerge.verify(tmp_path / "out", deep=True))


def test_names_of_models_in_slices(pool: PoolOnDisk, tmp_path: Path) -> None:
    other = tmp_path / "math"
    other.symlink_to(pool.experts["coding"])
    slices = [piece(source(MATH, 0, 3)), piece(source(str(other), 3, 6)), piece(source(BASE, 0, 1))]
    recipe = load_recipe(placed({"slices": slices, "merge_method": "passthrough"}, pool))
    assert list(recipe.experts) == ["math", "math-2", "reference-2"]


def halves(*models: str, **more: Any) -> list[dict[str, Any]]:
    """The first three layers of models, twice over."""
    return [piece(*(source(model, 0, 3, weight=1) for model in models), **more)] * 2


REPAIRED: dict[str, Sliced] = {
    "repeated": {"slices": halves(BASE, MATH, CODING), "merge_method": "ties", "base_model": BASE},
    "shifted": {
        "slices": [
            piece(source(BASE, 2, 6), source(MATH, 2, 6, weight=1), source(CODING, 1, 5, weight=1)),
        ],
        "merge_method": "task_arithmetic", "base_model": BASE,
    },
    "another base in a slice": {
        "slices": [
            piece(source(BASE, 0, 3), source(MATH, 0, 3, weight=1)),
            piece(source(CODING, 3, 6), source(MATH, 3, 6, weight=1), base_model=CODING),
        ],
        "merge_method": "ties", "base_model": BASE,
        "repair": {"shares": {"math": 1.0}, "capacity": 0.2},
    },
    "whole, with parameters of the slice": {
        "slices": [
            piece(source(BASE, 0, 6), source(MATH, 0, 6), source(CODING, 0, 6),
                  parameters={"weight": 0.4}),
        ],
        "merge_method": "task_arithmetic", "base_model": BASE,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REPAIRED)
def test_a_repair_of_slices_replays_and_is_verified(
    pool: PoolOnDisk, tmp_path: Path, case: str
) -> None:
    recipe = placed({"repair": REPAIR, **REPAIRED[case]}, pool)
    anchor, out, again = (tmp_path / name for name in ("anchor", "out", "again"))
    sigmerge.merge({k: v for k, v in recipe.items() if k != "repair"}, anchor)
    sigmerge.repair(recipe, out, anchor=anchor)
    sigmerge.replay(out / "sigmerge/plan.json", again)
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() != (anchor / "model.safetensors").read_bytes()
    for folder in (anchor, out, again):
        (report,) = sigmerge.verify(folder, deep=True, blocks=None)
        assert report.ok and "recomputed" in report.checked, report


def test_deep_finds_a_changed_value_of_a_repair_of_slices(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = placed({"repair": REPAIR, **REPAIRED["repeated"]}, pool)
    sigmerge.merge({k: v for k, v in recipe.items() if k != "repair"}, tmp_path / "anchor")
    sigmerge.repair(recipe, tmp_path / "out", anchor=tmp_path / "anchor")
    shard = tmp_path / "out/model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)
    (report,) = sigmerge.verify(tmp_path / "out", deep=True, blocks=None)
    assert "recomputed" in {finding.check for finding in report.findings}


def test_a_second_base_with_a_relative_path_is_verified_from_another_folder(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"reference": pool.reference.name, **{n: f.name for n, f in pool.experts.items()}}
    text = json.dumps({**REPAIRED["another base in a slice"], "repair": None, "dtype": "float32"})
    for name, folder in names.items():
        text = text.replace(f"{{{name}}}", f"./{folder}")
    recipe = pool.root / "relative.yaml"
    recipe.write_text(text)
    sigmerge.merge(recipe, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    (report,) = sigmerge.verify("out", deep=True, blocks=None)
    assert report.ok and "recomputed" in report.checked, report


def test_the_configuration_of_a_stack_is_an_input(pool: PoolOnDisk, tmp_path: Path) -> None:
    """It comes from base_model, which need not be a source of any slice, nor give the tokenizer."""
    recipe = placed({**CASES["stacked"], "base_model": BASE, "tokenizer_source": MATH}, pool)
    made = sigmerge.merge(recipe, tmp_path / "out")
    assert str(pool.reference / "config.json") in {entry.file for entry in made.provenance.inputs}


def test_models_are_told_apart_by_more_than_the_last_name(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2, layers=LAYERS)
    for name in ("reference", "math", "coding"):
        (tmp_path / name).mkdir()
        (pool.root / name).rename(tmp_path / name / "model")
    models = {name: f"{name}/model" for name in ("reference", "math", "coding")}
    stacked = [piece(source(models["math"], 0, 4)), piece(source(models["coding"], 2, 6))]
    recipes = {
        "stacked": {"merge_method": "passthrough", "slices": stacked},
        "slerp": {
            "merge_method": "slerp", "base_model": models["reference"], "parameters": {"t": 0.3},
            "models": [{"model": models["reference"]}, {"model": models["math"]}],
        },
    }  # fmt: skip
    for name, recipe in recipes.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps(recipe))
        sigmerge.merge(file, tmp_path / "out" / name)
        (report,) = sigmerge.verify(tmp_path / "out" / name, deep=True)
        assert not report.findings


def test_slices_under_their_old_name(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = placed(CASES["stacked"], pool)
    sigmerge.merge(recipe, tmp_path / "new")
    recipe["output_slices"] = recipe.pop("slices")
    sigmerge.merge(recipe, tmp_path / "old")
    new, old = (read_weights(tmp_path / name) for name in ("new", "old"))
    for name, values in new.items():
        np.testing.assert_array_equal(old[name], values)
