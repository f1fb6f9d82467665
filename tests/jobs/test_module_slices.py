"""`slices:` of modules: the layers of an encoder, a decoder, eyes stacked each on its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import sigmerge
from sigmerge.errors import PoolError, RecipeError
from tests.jobs.test_mergekit_parity import agree, both
from tests.jobs.test_slices import piece, source
from tests.pools import read_weights

MEMBERS = ("base", "math", "coding")
TEXT = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 64, "tie_word_embeddings": False}  # fmt: skip
EYES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "num_hidden_layers": 3}  # fmt: skip


def t5() -> Any:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=3, num_heads=2,
                    num_decoder_layers=4, feed_forward_proj="gated-gelu")
    )  # fmt: skip


def qwen() -> Any:
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    eyes = {"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
            "out_hidden_size": 16, "fullatt_block_indexes": [1]}  # fmt: skip
    config = hf.Qwen2_5_VLConfig(text_config={**TEXT, "rope_scaling": rope}, vision_config=eyes)
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def mistral() -> Any:
    config = hf.Mistral3Config(
        text_config=hf.MistralConfig(**TEXT), vision_config=hf.PixtralVisionConfig(**EYES)
    )
    return hf.Mistral3ForConditionalGeneration(config)


def gemma() -> Any:
    config = hf.Gemma3Config(
        text_config=TEXT, vision_config={**EYES, "vision_use_head": False}, mm_tokens_per_image=4
    )
    return hf.Gemma3ForConditionalGeneration(config)


KINDS: dict[str, Callable[[], Any]] = {
    "t5": t5, "qwen2.5-vl": qwen, "mistral3": mistral, "gemma3": gemma,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    for kind, made in KINDS.items():
        for seed, name in enumerate(MEMBERS):
            torch.manual_seed(seed)
            made().save_pretrained(folder / kind / name)
    return folder


def placed(recipe: Any, folder: Path) -> Any:
    """The recipe with the folders of the models."""
    text = json.dumps({"dtype": "float32", **recipe})
    for name in MEMBERS:
        text = text.replace(f"{{{name}}}", str(folder / name))
    return json.loads(text)


def whole(*names: str, **parameters: Any) -> dict[str, Any]:
    own = {"parameters": parameters} if parameters else {}
    return {"models": [{"model": f"{{{name}}}", **own} for name in names]}


def sliced(*pieces: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"slices": list(pieces), **more}


BASE, MATH, CODING = "{base}", "{math}", "{coding}"
HALVED = [{"filter": ".o.weight", "value": 0}, {"filter": "wo", "value": 0.5}, {"value": 1}]
STACKED = [piece(source(MATH, 0, 3)), piece(source(CODING, 1, 4))]
SEEN = [piece(source(CODING, 0, 2)), piece(source(MATH, 1, 3))]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "both stacks": ("t5", {"merge_method": "passthrough", "modules": {
        "decoder": sliced(*STACKED), "encoder": sliced(*SEEN), "shared": whole("math"),
    }}),
    "one sliced and one whole": ("t5", {"merge_method": "passthrough", "modules": {
        "encoder": sliced(piece(source(MATH, 0, 2))), "decoder": whole("coding"),
        "shared": whole("math"),
    }}),
    "repeated and scaled": ("t5", {"merge_method": "passthrough", "modules": {
        "decoder": sliced(piece(source(MATH, 0, 3)), piece(source(MATH, 1, 4, scale=HALVED))),
        "encoder": whole("math"), "shared": whole("math"),
    }}),
    "the same slices everywhere": ("t5", {"merge_method": "passthrough", "modules": {
        name: sliced(piece(source(MATH, 0, 2))) for name in ("decoder", "encoder", "shared")
    }}),
    "task vectors": ("t5", {
        "merge_method": "task_arithmetic", "base_model": BASE, "parameters": {"weight": 0.7},
        "modules": {
            "decoder": sliced(
                piece(source(BASE, 0, 2), source(MATH, 0, 2, weight=0.3)),
                piece(source(CODING, 1, 3), source(MATH, 2, 4), base_model=CODING,
                      parameters={"weight": [0, 1]}),
                parameters={"lambda": 0.5},
            ),
            "encoder": whole("math", "coding"), "shared": whole("base", "coding"),
        },
    }),
    "a soup with gradients, filters and the base": ("t5", {
        "merge_method": "linear", "base_model": BASE,
        "modules": {
            "decoder": sliced(
                piece(source(MATH, 0, 2, weight=[0.1, 0.9]), source(CODING, 0, 2, weight=0.5)),
                piece(source(BASE, 1, 4, weight=[0.4, 0]), source(CODING, 1, 4, weight=0.5)),
                parameters={"normalize": [{"filter": "SelfAttention", "value": False}]},
            ),
            "encoder": {**whole("math", "coding"), "parameters": {"weight": [0.2, 0.7]}},
            "shared": {**whole("math", weight=1.0), "parameters": {"weight": 0.5}},
        },
    }),
    "slerp": ("t5", {
        "merge_method": "slerp", "base_model": BASE, "parameters": {"t": [0.1, 0.8]},
        "modules": {
            "decoder": sliced(piece(source(BASE, 0, 2), source(MATH, 0, 2)),
                              piece(source(BASE, 1, 3), source(MATH, 2, 4))),
            "encoder": whole("base", "coding"), "shared": whole("base", "math"),
        },
    }),
    "text and eyes": ("qwen2.5-vl", {"merge_method": "passthrough", "modules": {
        "text_decoder": sliced(*STACKED), "vision_tower": sliced(*SEEN),
        "multi_modal_projector": whole("math"),
    }}),
    "what lies before and behind the layers": ("mistral3", {
        "merge_method": "passthrough", "modules": {
            "text_decoder": sliced(*STACKED), "vision_tower": sliced(*SEEN),
            "multi_modal_projector": sliced(piece(source(CODING, 0, 1))),
        },
    }),
}  # fmt: skip


def depths(config: dict[str, Any]) -> dict[str, Any]:
    """Every number of layers in a configuration."""
    keys = ("num_hidden_layers", "num_layers", "num_decoder_layers", "depth")
    found = {key: config[key] for key in keys if key in config}
    for part in ("text_config", "vision_config"):
        found |= {f"{part}.{key}": v for key, v in config.get(part, {}).items() if key in keys}
    return found


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("case", CASES)
def test_mergekit_stacks_the_same(root: Path, tmp_path: Path, case: str) -> None:
    kind, recipe = CASES[case]
    agree(*both(None, placed(recipe, root / kind), tmp_path), ulps=8)  # type: ignore[arg-type]
    ours, theirs = (depths(read_config(tmp_path / who)) for who in ("ours", "theirs"))
    assert ours == theirs
    (report,) = sigmerge.verify(tmp_path / "ours", deep=True, blocks=None)
    assert report.ok and "recomputed" in report.checked, report


def stacked(prefix: str, *layers: tuple[dict[str, Any], int]) -> dict[str, Any]:
    """The tensors of layers under their new numbers."""
    return {
        name.replace(f"{prefix}{old}.", f"{prefix}{new}."): values
        for new, (weights, old) in enumerate(layers)
        for name, values in weights.items()
        if name.startswith(f"{prefix}{old}.")
    }


def test_layers_of_text_and_eyes_are_numbered_anew(root: Path, tmp_path: Path) -> None:
    modules = {
        "text_decoder": sliced(*STACKED),
        "vision_tower": sliced(*SEEN),
        "multi_modal_projector": whole("coding"),
    }
    out = tmp_path / "out"
    recipe = placed({"merge_method": "passthrough", "modules": modules}, root / "gemma3")
    made = sigmerge.merge(recipe, out)
    math, coding = (dict(read_weights(root / "gemma3" / name)) for name in ("math", "coding"))
    text, eyes = "language_model.model.layers.", "vision_tower.encoder.layers."
    first, last = "language_model.model.embed_tokens.weight", "language_model.model.norm.weight"
    expected = {
        **stacked(text, *((math, i) for i in range(3)), *((coding, i) for i in range(1, 4))),
        **stacked(eyes, (coding, 0), (coding, 1), (math, 1), (math, 2)),
        first: math[first],
        last: coding[last],
        **{n: v for n, v in coding.items() if n.startswith("multi_modal_projector.")},
        **{n: v for n, v in coding.items() if n.startswith("vision_tower.embeddings.")},
        **{n: v for n, v in math.items() if n.startswith("vision_tower.post_layernorm.")},
    }
    found = read_weights(out)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    config = read_config(out)
    assert depths(config) == {
        "text_config.num_hidden_layers": 6, "vision_config.num_hidden_layers": 4,
    }  # fmt: skip
    assert len(config["text_config"]["layer_types"]) == 6
    assert [p.module for p in made.plan.slices][::2] == list(modules)
    hf.Gemma3ForConditionalGeneration.from_pretrained(out)


def test_slices_of_the_whole_stack_are_the_module(root: Path, tmp_path: Path) -> None:
    weights = {"math": [0.2, 0.7], "coding": [{"filter": "wo", "value": 0.4}, {"value": 0.6}]}

    def models(**more: Any) -> list[dict[str, Any]]:
        return [{"model": f"{{{n}}}", "parameters": {"weight": w}, **more}
                for n, w in weights.items()]  # fmt: skip

    plain = {name: {"models": models()} for name in ("decoder", "encoder", "shared")}
    plain["shared"] = whole("math", weight=1.0)
    written = {
        "plain": plain,
        "sliced": {
            **plain,
            "decoder": sliced(piece(*models(layer_range=[0, 4]))),
            "encoder": sliced(piece(*models(layer_range=[0, 3]))),
        },
    }
    for name, modules in written.items():
        recipe = placed({"merge_method": "linear", "modules": modules}, root / "t5")
        sigmerge.merge(recipe, tmp_path / name)
    one, two = (read_weights(tmp_path / name) for name in written)
    assert one.keys() == two.keys() and all(np.array_equal(one[n], two[n]) for n in one)
    assert read_config(tmp_path / "plain") == read_config(tmp_path / "sliced")


def test_a_depth_that_the_configuration_leaves_out(root: Path, tmp_path: Path) -> None:
    for name in MEMBERS:
        torch.manual_seed(3)
        t5().save_pretrained(tmp_path / name)
        config = read_config(tmp_path / name)
        del config["num_decoder_layers"]  # as many as the encoder has, then
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    modules = {"decoder": sliced(piece(source(MATH, 0, 2))), "encoder": whole("math"),
               "shared": whole("math")}  # fmt: skip
    sigmerge.merge(
        placed({"merge_method": "passthrough", "modules": modules}, tmp_path), tmp_path / "out"
    )
    assert depths(read_config(tmp_path / "out")) == {"num_layers": 3, "num_decoder_layers": 2}


def test_slices_of_a_model_that_encodes_are_its_decoder_s(root: Path, tmp_path: Path) -> None:
    recipe = {"merge_method": "passthrough", "slices": [piece(source(MATH, 0, 2))]}
    sigmerge.merge(placed(recipe, root / "t5"), tmp_path / "out")
    assert depths(read_config(tmp_path / "out")) == {"num_layers": 3, "num_decoder_layers": 2}


REST = {"encoder": whole("math"), "shared": whole("math")}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a module is missing": (
        {"decoder": sliced(piece(source(MATH, 0, 2))), "encoder": whole("math")},
        "modules: decoder, encoder are merged one by one, and so must be all modules",
    ),
    "more layers than there are": (
        {"decoder": sliced(piece(source(MATH, 0, 7))), **REST},
        "decoder: math: has 4 layers, not 7",
    ),
    "no layer": (
        {"decoder": sliced(piece(source(MATH, 2, 2))), **REST},
        r"modules\.decoder\.slices: hold no layer together",
    ),
    "backwards": (
        {"decoder": sliced(piece(source(MATH, 3, 1))), **REST},
        r"modules\.decoder\.slices\[0\]\.sources\[0\]\.layer_range: \[3, 1\] holds no layer",
    ),
    "both": (
        {"decoder": {**sliced(piece(source(MATH, 0, 2))), **whole("math")}, **REST},
        r"modules\.decoder: slices: and models: both say what is merged",
    ),
    "a stack of what has no layers": (
        {**REST, "decoder": whole("math"),
         "shared": sliced(piece(source(MATH, 0, 1)), piece(source(CODING, 0, 1)))},
        r"modules\.shared: has no layers that could be stacked; give its models under models:",
    ),
    "two models passed through": (
        {"decoder": sliced(piece(source(MATH, 0, 2))), **REST, "encoder": whole("math", "coding")},
        r"modules\.encoder\.models: passthrough takes at most 1, and 2 are listed",
    ),
    "no such folder": (
        {"decoder": sliced(piece(source(MATH, 0, 2))), **REST, "encoder": {"models": [
            {"model": "/nowhere"}]}},
        r"modules\.encoder\.models\[0\]\.model: .*nowhere",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_slices_of_modules(root: Path, tmp_path: Path, wrong: str) -> None:
    modules, words = WRONG[wrong]
    recipe = placed({"merge_method": "passthrough", "modules": modules}, root / "t5")
    with pytest.raises((RecipeError, PoolError), match=words):
        sigmerge.merge(recipe, tmp_path / "out")


def test_models_of_a_module_have_as_many_layers(root: Path, tmp_path: Path) -> None:
    modules = {"decoder": sliced(piece(source(MATH, 0, 2))), **REST}
    sigmerge.merge(
        placed({"merge_method": "passthrough", "modules": modules}, root / "t5"), tmp_path / "short"
    )
    short = str(tmp_path / "short")
    modules = {"encoder": sliced(piece(source(MATH, 0, 2, weight=1))),
               "decoder": {"models": [{"model": MATH}, {"model": short}]},
               "shared": whole("math")}  # fmt: skip
    recipe = {"merge_method": "linear", "parameters": {"weight": 1}, "modules": modules}
    told = "decoder: must have as many layers in all its models; math has 4, short has 2"
    with pytest.raises(PoolError, match=told):
        sigmerge.merge(placed(recipe, root / "t5"), tmp_path / "out")


def test_what_has_no_layers_is_taken_whole_and_that_is_noted(root: Path, tmp_path: Path) -> None:
    modules = {"text_decoder": sliced(piece(source(MATH, 0, 2))), "vision_tower": whole("math"),
               "multi_modal_projector": sliced(piece(source(CODING, 0, 0)))}  # fmt: skip
    recipe = placed({"merge_method": "passthrough", "modules": modules}, root / "qwen2.5-vl")
    made = sigmerge.merge(recipe, tmp_path / "out")
    assert any("multi_modal_projector has no layers" in note for note in made.plan.warnings)
    coding = read_weights(root / "qwen2.5-vl/coding")
    found = read_weights(tmp_path / "out")
    merger = [name for name in coding if "merger" in name]
    assert merger and all(np.array_equal(found[name], coding[name]) for name in merger)


def test_a_repair_needs_modules_that_are_merged_alike(root: Path, tmp_path: Path) -> None:
    modules = {"decoder": sliced(piece(source(MATH, 0, 2))), **REST}
    recipe = {"merge_method": "passthrough", "base_model": BASE, "modules": modules, "repair": {}}
    with pytest.raises(RecipeError, match="repair: needs models that are merged alike"):
        sigmerge.merge(placed(recipe, root / "t5"), tmp_path / "out")
