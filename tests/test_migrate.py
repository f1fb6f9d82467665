"""`sigmerge migrate`: what differs from mergekit, by line."""

from __future__ import annotations

import json
import re
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sigmerge.errors import PoolError, RecipeError
from sigmerge.jobs.migration import SPACED, migration
from sigmerge.operators.table import MERGEKIT
from sigmerge.recipe.mixtures import ENTRY_BY_ENTRY
from sigmerge.recipe.templates import TEMPLATE_NAMES, TEMPLATES
from tests.adapters import write_adapter
from tests.command_line import sigmerge
from tests.jobs.test_architectures import MIXTURES
from tests.jobs.test_mergekit_parity import both, run_mergekit
from tests.pools import PoolOnDisk, make_pool, read_weights

PLAIN = """\
merge_method: task_arithmetic
base_model: {reference}
models:
  - model: {math}
    parameters: {{weight: 0.5, colour: true}}
dtype: {dtype}
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("migrate"), experts=2)


def written(pool: PoolOnDisk, folder: Path, text: str, **places: str) -> Path:
    file = folder / "recipe.yaml"
    folders = {"reference": pool.reference, **pool.experts}
    file.write_text(text.format(**{**folders, "dtype": "float32", **places}))
    return file


def test_nothing_differs_but_what_is_passed_over(pool: PoolOnDisk, tmp_path: Path) -> None:
    (change,) = migration(written(pool, tmp_path, PLAIN)).changes
    assert "colour" in change.text and "line 5" in change.text


def test_lines_are_those_of_the_file(pool: PoolOnDisk, tmp_path: Path) -> None:
    text = PLAIN.replace("task_arithmetic", "dare_ties").replace(", colour: true", "")
    file = written(pool, tmp_path, text + "tokenizer_source: union\n", dtype="bfloat16")
    told = [str(change) for change in migration(file).changes]
    assert told[0].startswith("line 1, merge_method: entries are dropped by other draws")
    assert told[1].startswith("line 6, dtype: arithmetic is float32, rounded once to bfloat16")
    assert [line[:6] for line in told] == ["line 1", "line 6", *["line 7"] * 3]
    assert sigmerge("migrate", file, "--sample", "0").out.splitlines() == told
    shown = json.loads(sigmerge("migrate", file, "--json").out)
    assert shown["changes"][1]["line"] == 6
    assert [kind["entries"] > 0 for kind in shown["samples"][0]["kinds"]] == [True] * 12


def test_whose_special_tokens_the_configuration_has(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("task_arithmetic", dtype="float32", tokenizer_source="math")
    assert "config.json has the special tokens of this model" in told(pool, recipe)


def test_adapters_slices_and_our_keys(pool: PoolOnDisk, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "lora", pool.reference, read_weights(pool.reference))
    with_adapter = PLAIN.replace("{math}", "{reference}+{lora}").replace(", colour: true", "")
    (change,) = migration(written(pool, tmp_path, with_adapter, lora=str(adapter))).changes
    assert (change.line, change.key) == (3, "models") and "adapters are added" in change.text
    ours = with_adapter.replace("{reference}+{lora}", "{math}") + "seed: 3\n"
    (change,) = migration(written(pool, tmp_path, ours)).changes
    assert (change.line, change.key) == (7, "seed")
    sources = [
        {"sources": [{"model": str(pool.experts["math"]), "layer_range": [0, 1]}]},
        {"sources": [{"model": str(pool.experts[n]), "layer_range": [0, 1]} for n in
                     ("math", "coding")]},
    ]  # fmt: skip
    recipe = {"slices": sources, "merge_method": "linear", "parameters": {"weight": 1},
              "dtype": "float32"}  # fmt: skip
    file = tmp_path / "slices.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    told = " ".join(change.text for change in migration(file).changes)
    assert "what lies behind the layers" in told and "without base_model" in told


def test_a_recipe_that_cannot_run_is_an_error(pool: PoolOnDisk, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="tise"):
        migration(written(pool, tmp_path, PLAIN.replace("task_arithmetic", "tise")))
    assert "task_arithmetic" in MERGEKIT


def test_of_several_recipes_each_is_told_under_its_name(pool: PoolOnDisk, tmp_path: Path) -> None:
    """Lines are those of the file; a model that another recipe makes need not be there."""
    first = PLAIN.replace("task_arithmetic", "dare_ties").replace(", colour: true", "")
    last = PLAIN.replace("{math}", "half") + "seed: 3\n"
    text = f"# two\n---\nname: half\n{first}---\n{last}"
    told = [
        str(change) for change in migration(written(pool, tmp_path, text, dtype="bfloat16")).changes
    ]
    starts = ["line 4, half.merge_method", "line 9, half.dtype", "line 16, merged.dtype",
              "line 17, merged.seed", "merged: "]  # fmt: skip
    assert [line[: len(start)] for line, start in zip(told, starts, strict=True)] == starts
    assert "colour" in told[-1]


def told(pool: PoolOnDisk, recipe: dict[str, Any]) -> str:
    return "\n".join(str(change) for change in migration(pool.write(recipe)).changes)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("mixture"), experts=2, style="moe")


def mixed(mixture: PoolOnDisk, method: str) -> dict[str, Any]:
    """A recipe of the method with what it must be given, and no more models than it takes."""
    shared = {"slerp": {"t": 0.3}, "nearswap": {"t": 0.01}, "ties": {"density": 0.5}}
    recipe = mixture.recipe(method, shared.get(method), dtype="float32")
    if method in ("slerp", "nearswap"):
        del recipe["models"][1:]
    if method == "passthrough":
        recipe |= {"models": [{"model": recipe["base_model"]}]}
    if method in ("linear", "passthrough"):
        del recipe["base_model"]
    return recipe


def stacked(weights: dict[str, Any]) -> dict[str, Any]:
    """A mixture's weights as transformers 5 holds them."""
    found = {n.replace("block_sparse_moe", "mlp"): v for n, v in weights.items()}
    for name in [n for n in found if ".experts.0.w1." in n]:
        start, _, end = name.partition("0.w1")
        w1, w2, w3 = (
            np.stack([found.pop(f"{start}{i}.{w}{end}") for i in range(3)])
            for w in ("w1", "w2", "w3")
        )
        found |= {f"{start}gate_up_proj": np.concatenate([w1, w3], axis=1)}
        found |= {f"{start}down_proj": w2}
    return found


@pytest.mark.parametrize("method", [*ENTRY_BY_ENTRY, "ties", "slerp"])
def test_a_mixture_is_told_where_its_numbers_differ(
    mixture: PoolOnDisk, tmp_path: Path, method: str
) -> None:
    recipe = mixed(mixture, method)
    ours, theirs = both(mixture, recipe, tmp_path)
    ours = stacked(ours)
    assert set(ours) == set(theirs)
    equal = all(np.allclose(ours[n], v, rtol=0, atol=1e-6) for n, v in theirs.items())
    assert equal == (method in ENTRY_BY_ENTRY)
    assert ("mergekit stacks those of a layer" in told(mixture, recipe)) != equal


def test_of_dense_models_nothing_is_told_about_experts(pool: PoolOnDisk) -> None:
    assert "stacks" not in told(pool, pool.recipe("ties", dtype="float32"))


def test_a_mixture_with_dense_layers_has_no_experts_in_mergekit(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    make = MIXTURES["deepseek_v3"][1]
    for name in ("math", "coding"):
        AutoModelForCausalLM.from_config(make()).save_pretrained(tmp_path / name)
    models = [{"model": str(tmp_path / n), "parameters": {"weight": 1}} for n in ("math", "coding")]
    recipe = {"merge_method": "linear", "models": models, "dtype": "float32"}
    ours, theirs = both(pool, recipe, tmp_path)
    assert {n for n in ours if ".mlp.experts." in n} == set(ours) - set(theirs) != set()
    assert "mergekit, where a layer has none, writes none" in told(pool, recipe)


@pytest.mark.parametrize(
    ("part", "differs"), [("mlp", False), ("gate", True), ("self_attn", False), ("experts", False)]
)
def test_a_filter_by_names_that_mergekit_changes(
    mixture: PoolOnDisk, part: str, differs: bool
) -> None:
    weight = [{"filter": part, "value": 0.5}, {"value": 1.0}]
    recipe = mixture.recipe("task_arithmetic", weight=(weight, 1.0), dtype="float32")
    assert (f"filter: {part} is sought in the names" in told(mixture, recipe)) == differs


def test_a_missing_weight(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("multislerp", dtype="float32")
    assert told(pool, recipe) == ""
    del recipe["models"][1]["parameters"]
    assert told(pool, recipe) == (
        "line 1, merge_method: coding without a weight: 1.0 is taken; mergekit stops there"
    )
    with pytest.raises(RuntimeError, match="Missing required parameter weight"):
        run_mergekit(recipe, tmp_path / "theirs")
    assert told(pool, {**recipe, "parameters": {"weight": 1}}) == ""


def test_a_missing_weight_of_a_slice(pool: PoolOnDisk) -> None:
    names = {"math": {"parameters": {"weight": 1}}, "coding": {}, "reference": {}}
    sources = [
        {"model": str(pool.root / n), "layer_range": [0, 2], **own} for n, own in names.items()
    ]
    recipe = {"merge_method": "ties", "base_model": str(pool.reference), "dtype": "float32"}
    assert "merge_method: coding without a weight" in told(
        pool, {**recipe, "slices": [{"sources": sources}]}
    )
    shared = {"sources": sources, "parameters": {"weight": 1}}
    assert "without a weight" not in told(pool, {**recipe, "slices": [shared]})


def test_templates_are_told_whose_text_is_not_mergekits(pool: PoolOnDisk) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = [("user", "Two?"), ("assistant", "Four."), ("user", "Three?")]
    talk = [{"role": role, "content": content} for role, content in turns]

    def said(text: str) -> Any:
        special = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
        return render_jinja_template([talk], chat_template=text, **special)[0]

    theirs = resources.files("mergekit._data.chat_templates")
    for name in TEMPLATE_NAMES:
        file = f"{name}.jinja"
        same = said((TEMPLATES / file).read_text()) == said((theirs / file).read_text())
        recipe = pool.recipe("task_arithmetic", dtype="float32", chat_template=name)
        assert same == (name not in SPACED) == (told(pool, recipe) == "")


def test_an_adapter_that_parts_head_and_embedding(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=1, tied=True)
    weights = read_weights(pool.reference)
    embedding = weights["model.embed_tokens.weight"]
    head = {"lm_head.base_layer.weight": embedding}
    for name, extra in {"plain": {}, "head": {"whole": head, "modules": ("lm_head",)}}.items():
        adapter = write_adapter(
            tmp_path / name, pool.reference, {**weights, "lm_head.weight": embedding}, **extra
        )
        recipe = pool.recipe("task_arithmetic", dtype="float32")
        recipe["models"][0]["model"] = f"{pool.reference}+{adapter}"
        assert (f"{name} parts the head from the embedding" in told(pool, recipe)) == bool(extra)


@pytest.mark.parametrize("ties", [(True, False), (False, True)])
def test_models_with_and_without_a_head_of_their_own(
    tmp_path: Path, ties: tuple[bool, bool]
) -> None:
    """mergekit writes the head beside what the base's configuration says."""
    pool = make_pool(tmp_path / "pool", experts=1, tied=ties)
    recipe = pool.recipe("task_arithmetic", dtype="float32")
    said = "config.json says tie_word_embeddings: false; mergekit keeps true"
    assert (said in told(pool, recipe)) == (ties == (True, False))
    both(pool, recipe, tmp_path)
    ours, theirs = (
        json.loads((tmp_path / out / "config.json").read_text())["tie_word_embeddings"]
        for out in ("ours", "theirs")
    )
    assert (ours != theirs) == (ties == (True, False))


@pytest.mark.parametrize(
    "setting",
    [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"lora_bias": True},
     {"target_parameters": ["mlp.experts.gate_up_proj"]}],
)  # fmt: skip
def test_what_merge_refuses_is_refused(
    pool: PoolOnDisk, tmp_path: Path, setting: dict[str, Any]
) -> None:
    weights = read_weights(pool.reference)
    adapter = write_adapter(tmp_path / "lora", pool.reference, weights, **setting)
    recipe = pool.recipe("task_arithmetic", dtype="float32")
    recipe["models"][0]["model"] = f"{pool.reference}+{adapter}"
    file = pool.write(recipe)
    with pytest.raises(PoolError, match=r"with PEFT \(merge_and_unload\)") as error:
        migration(file)
    assert next(iter(setting)) in str(error.value)
    merge = sigmerge("merge", file, tmp_path / "out")
    migrate = sigmerge("migrate", file)
    assert (migrate.code, migrate.err) == (merge.code, merge.err) == (3, merge.err)


REFUSED: dict[str, Any] = {
    "a value for some tensors only": (
        "slerp", {"parameters": {"t": [{"filter": "mlp", "value": 0.3}]}}, 2, "t is missing for",
    ),
    "no pool": ("task_arithmetic", {"models": [{"model": "other"}]}, 3, "other: "),
    "a copy of the base": ("ties", {"models": [{"model": "copy"}]}, 3, "it is a copy"),
    "epsilon": ("della_linear", {"parameters": {"density": 0.1}}, 2, "density ± epsilon"),
    "no scores": ("ties", {"repair": {"scores": "none.json"}}, 5, "none.json"),
}  # fmt: skip


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_a_recipe_that_a_dry_run_refuses(tmp_path: Path, case: str, several: bool) -> None:
    """Neither an output folder nor the disk is looked at."""
    pool = make_pool(tmp_path / "pool", experts=1)
    shutil.copytree(pool.reference, tmp_path / "copy")
    make_pool(tmp_path / "wide", experts=1, layers=3).reference.rename(tmp_path / "other")
    method, given, code, words = REFUSED[case]
    file = tmp_path / "recipe.yaml"
    text = yaml.safe_dump(pool.recipe(method, dtype="float32") | given)
    later = yaml.safe_dump(pool.recipe("ties") | {"models": [{"model": "first"}]})
    file.write_text(f"{later}---\nname: first\n{text}" if several else text)
    dry = sigmerge("merge", file, tmp_path / "out", "--dry-run")
    migrate = sigmerge("migrate", file)
    assert (migrate.code, migrate.err) == (dry.code, dry.err) == (code, dry.err)
    assert words in migrate.err


def test_a_recipe_has_the_chat_template_of_the_one_before_it(tmp_path: Path) -> None:
    """Only where that one's result has none is it told, wherever it stands in the file."""
    pool = make_pool(tmp_path / "pool", experts=2, tokenizer=True)
    first = PLAIN.replace(", colour: true", "")
    last = first.replace("{reference}", "half").replace("{math}", "{coding}")
    text = f"{last}---\nname: half\n{first}"
    assert migration(written(pool, tmp_path, text)).changes == ()
    (pool.reference / "chat_template.jinja").unlink()
    notes = [str(change) for change in migration(written(pool, tmp_path, text)).changes]
    assert [re.sub(r"; .*", "", note) for note in notes] == [
        "half: reference has no chat template, and neither has the result",
        "merged: half has no chat template, and neither has the result",
    ]
