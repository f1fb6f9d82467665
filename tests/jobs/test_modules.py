"""`modules:` of a recipe that are merged each in its own way, beside mergekit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import sigmerge
from sigmerge.checkpoints.modules import module_of
from sigmerge.errors import RecipeError
from tests.jobs.test_mergekit_parity import agree, both
from tests.pools import read_weights

MEMBERS = ("base", "math", "coding")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("t5")
    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=3, num_heads=2,
                      num_decoder_layers=2, tie_word_embeddings=False,
                      feed_forward_proj="gated-gelu")  # fmt: skip
    for seed, name in enumerate(MEMBERS):
        torch.manual_seed(seed)
        T5ForConditionalGeneration(config).save_pretrained(root / name)
    return {name: str(root / name) for name in MEMBERS}


def models(folders: dict[str, str], **weights: Any) -> list[dict[str, Any]]:
    return [{"model": folders[name], "parameters": {"weight": w}} for name, w in weights.items()]


def test_modules_have_weights_and_models_of_their_own(
    folders: dict[str, str], tmp_path: Path
) -> None:
    filtered = [{"filter": "SelfAttention", "value": 0.9}, {"value": 0.2}]
    modules = {
        "decoder": {"models": models(folders, math=filtered, coding=0.5)},
        "encoder": {"models": models(folders, coding=1.0), "parameters": {"normalize": False}},
        "shared": {"models": models(folders, coding=0.25, math=0.75)},
    }
    recipe = {"merge_method": "linear", "modules": modules, "dtype": "float32"}
    ours, theirs = both(None, recipe, tmp_path)  # type: ignore[arg-type]
    agree(ours, theirs, ulps=2)
    coding = read_weights(Path(folders["coding"]))
    encoder = [name for name in ours if name.startswith("encoder.block")]
    assert encoder and all(np.array_equal(ours[name], coding[name]) for name in encoder)
    decoder = [n for n in ours if n.startswith("decoder.block") and "layer_norm" not in n]
    assert decoder and not any(np.array_equal(ours[name], coding[name]) for name in decoder)


def test_modules_of_task_vectors(folders: dict[str, str], tmp_path: Path) -> None:
    modules = {
        "decoder": {"models": models(folders, math=0.3, coding=0.5)},
        "encoder": {"models": models(folders, base=1.0, coding=0.7)},
        "shared": {"models": models(folders, math=1.0), "parameters": {"lambda": 0.5}},
    }
    recipe = {"merge_method": "task_arithmetic", "base_model": folders["base"],
              "modules": modules, "dtype": "float32"}  # fmt: skip
    agree(*both(None, recipe, tmp_path), ulps=4)  # type: ignore[arg-type]


def test_slerp_takes_two_models_in_each_module(folders: dict[str, str], tmp_path: Path) -> None:
    pair = {other: [{"model": folders["base"]}, {"model": folders[other]}] for other in MEMBERS[1:]}
    modules = {
        "decoder": {"models": pair["math"], "parameters": {"t": 0.3}},
        "encoder": {"models": pair["coding"]},
        "shared": {"models": pair["math"]},
    }
    recipe = {"merge_method": "slerp", "base_model": folders["base"], "modules": modules,
              "parameters": {"t": 0.6}, "dtype": "float32"}  # fmt: skip
    agree(*both(None, recipe, tmp_path), ulps=8)  # type: ignore[arg-type]


def test_the_recipes_parameters_hold_where_no_filter_of_equal_modules_matches(
    folders: dict[str, str], tmp_path: Path
) -> None:
    module = {"models": models(folders, math=1.0, coding=1.0),
              "parameters": {"density": {"filter": "wi_", "value": 0.3}}}  # fmt: skip
    recipe = {"merge_method": "ties", "base_model": folders["base"], "dtype": "float32",
              "modules": dict.fromkeys(("decoder", "encoder", "shared"), module),
              "parameters": {"density": 0.6}}  # fmt: skip
    agree(*both(None, recipe, tmp_path), ulps=4)  # type: ignore[arg-type]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a module is missing": (
        {"decoder": {"weight": 1}, "encoder": {"weight": 2}},
        "decoder, encoder are merged one by one, and so must be all modules",
    ),
    "a wrong value": (
        {"decoder": {"weight": "much"}, "encoder": {"weight": 1}, "shared": {"weight": 1}},
        r"modules\.decoder\.models\[0\]\.parameters\.weight: must be a number",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_modules(folders: dict[str, str], tmp_path: Path, wrong: str) -> None:
    given, words = WRONG[wrong]
    modules = {
        name: {"models": [{"model": folders["math"], "parameters": own}]}
        for name, own in given.items()
    }
    with pytest.raises(RecipeError, match=words):
        sigmerge.merge({"merge_method": "linear", "modules": modules}, tmp_path / "out")


SEEING = ("text_decoder", "multi_modal_projector", "vision_tower")


@pytest.mark.parametrize(
    ("tensor", "module"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "text_decoder"),
        ("model.layers.0.mlp.up_proj.weight", "text_decoder"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "text_decoder"),
        ("lm_head.weight", "text_decoder"),
        ("multi_modal_projector.linear_1.weight", "multi_modal_projector"),
        ("visual.merger.mlp.0.weight", "multi_modal_projector"),
        ("model.visual.deepstack_merger_list.0.norm.weight", "multi_modal_projector"),
        ("vision_tower.vision_model.encoder.layers.0.layer_norm1.bias", "vision_tower"),
        ("visual.blocks.0.norm1.weight", "vision_tower"),
    ],
)
def test_the_module_of_a_tensor(tensor: str, module: str) -> None:
    assert module_of(tensor, SEEING) == module


def test_a_model_stands_once_in_a_module(folders: dict[str, str], tmp_path: Path) -> None:
    one = models(folders, math=1.0)
    modules = {"decoder": {"models": [*models(folders, math=0.3), *one]},
               "encoder": {"models": one}, "shared": {"models": one}}  # fmt: skip
    with pytest.raises(RecipeError, match=r"modules\.decoder\.models\[1\]: .*is listed twice"):
        sigmerge.merge({"merge_method": "linear", "modules": modules}, tmp_path / "out")


def test_a_folder_is_one_model_however_it_is_written(
    folders: dict[str, str], tmp_path: Path
) -> None:
    modules = {"decoder": {"models": models(folders, math=1.0)},
               "encoder": {"models": models({"math": f"{folders['math']}/"}, math=1.0)},
               "shared": {"models": models(folders, coding=1.0)}}  # fmt: skip
    recipe = {"merge_method": "linear", "modules": modules, "dtype": "float32"}
    sigmerge.merge(recipe, tmp_path / "out")
    math, out = read_weights(Path(folders["math"])), read_weights(tmp_path / "out")
    inside = [name for name in out if module_of(name, list(modules)) != "shared"]
    assert inside and all(np.array_equal(out[name], math[name]) for name in inside)


def test_what_is_wrong_inside_a_module_is_reported_once(
    folders: dict[str, str], tmp_path: Path
) -> None:
    modules = {"decoder": {"models": models(folders, math=1.0)},
               "encoder": {"models": models({"math": "/nowhere"}, math=1.0)},
               "shared": {"models": [{"model": folders["math"], "exemplars": 3}]}}  # fmt: skip
    with pytest.raises(RecipeError) as raised:
        sigmerge.merge({"merge_method": "linear", "modules": modules}, tmp_path / "out")
    places = [problem.partition(": ")[0] for problem in raised.value.problems]
    assert places == ["modules.encoder.models[0].model", "modules.shared.models[0].exemplars"]


def test_a_filter_that_matches_nothing_in_its_module_is_noted(
    folders: dict[str, str], tmp_path: Path
) -> None:
    def filtered(pattern: str) -> list[dict[str, Any]]:
        return models(folders, math=[{"filter": pattern, "value": 0.9}, {"value": 0.2}])

    modules = {"decoder": {"models": filtered("EncDecAttention")},
               "encoder": {"models": filtered("EncDecAttention")},
               "shared": {"models": filtered("shared"),
                          "parameters": {"normalize": [{"filter": "nn", "value": False}]}},
               }  # fmt: skip
    recipe = {"merge_method": "linear", "modules": modules}
    plan = sigmerge.merge(recipe, tmp_path / "out").plan
    assert [note for note in plan.warnings if note.startswith("filter")] == [
        "filter: EncDecAttention matches no tensor of encoder",
        "filter: nn matches no tensor of shared",
    ]


def test_what_holds_for_the_model_is_no_module_s(folders: dict[str, str], tmp_path: Path) -> None:
    modules: dict[str, Any] = {
        name: {"models": models(folders, **{some: 1.0})}
        for name, some in {"decoder": "math", "encoder": "coding", "shared": "math"}.items()
    }
    recipe = {"merge_method": "ties", "base_model": folders["base"], "modules": modules,
              "parameters": {"density": 0.5, "scope": "model"}}  # fmt: skip
    with pytest.raises(RecipeError, match="scope: model takes one set of experts"):
        sigmerge.merge(recipe, tmp_path / "out")
    modules["shared"]["parameters"] = {"outside": "reference"}
    with pytest.raises(RecipeError, match=r"modules\.shared\.parameters\.outside: is one for the"):
        sigmerge.merge(recipe, tmp_path / "out")
    modules["shared"] = {"models": models(folders, math=1.0, coding=1.0)}
    recipe = recipe | {"merge_method": "lines", "parameters": {"alpha": "auto"}}
    with pytest.raises(RecipeError, match="alpha: auto takes as many experts"):
        sigmerge.merge(recipe, tmp_path / "out")


@pytest.mark.parametrize(
    ("section", "instead"),
    [("repair", "merge_method: checkpoint"), ("search", "by what its tensors are called"),
     ("tune", "by what its tensors are called")],
)  # fmt: skip
def test_what_to_do_where_modules_must_be_merged_alike(
    folders: dict[str, str], tmp_path: Path, section: str, instead: str
) -> None:
    modules = {"decoder": {"models": models(folders, math=1.0)},
               "encoder": {"models": models(folders, math=1.0)},
               "shared": {"models": models(folders, coding=1.0)}}  # fmt: skip
    recipe = {"merge_method": "linear", "base_model": folders["base"], "modules": modules}
    with pytest.raises(RecipeError, match=f"{section}: needs models that.*{instead}"):
        sigmerge.merge({**recipe, section: {}}, tmp_path / "out")


def test_gradients_run_over_every_stack(folders: dict[str, str], tmp_path: Path) -> None:
    """Not over that of the decoder alone, with modules or without."""
    given = models(folders, math=[0.1, 0.9], coding=0.5)
    modules = {"decoder": {"models": given}, "encoder": {"models": given[::-1]},
               "shared": {"models": given}}  # fmt: skip
    for name, merged in {"models": {"models": given}, "modules": {"modules": modules}}.items():
        (tmp_path / name).mkdir()
        recipe = {"merge_method": "linear", "dtype": "float32", **merged}
        agree(*both(None, recipe, tmp_path / name), ulps=2)  # type: ignore[arg-type]
