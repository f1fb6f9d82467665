"""Recipes: what mergekit's dialect means, and what each wrong recipe is told."""

from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sigmerge.checkpoints.blocks import Stack
from sigmerge.errors import RecipeError
from sigmerge.recipe import load_recipe
from sigmerge.recipe.folders import find_model
from tests.command_line import refused
from tests.pools import PoolOnDisk, make_pool

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("pool"), experts=2, layers=1)


def ties(pool: PoolOnDisk) -> dict[str, Any]:
    return pool.recipe("ties", {"normalize": True}, each={"density": (0.5, 0.5)})


def put(*path: Any) -> Callable[[Any], Change]:
    """put("models", 0, "model")(value): a change of a recipe."""

    def with_value(value: Any) -> Change:
        def change(recipe: dict[str, Any]) -> None:
            here: Any = recipe
            for part in path[:-1]:
                here = here[part]
            here[path[-1]] = value

        return change

    return with_value


WRONG: dict[str, tuple[Change, list[str]]] = {
    "misspelt parameter": (
        put("models", 0, "parameters", "denisty")(0.5),
        ["models[0].parameters.denisty", "line ", "did you mean 'density'?"],
    ),
    "misspelt weight beside the weight": (
        put("models", 0, "parameters", "wieght")(0.5),
        ["models[0].parameters.wieght", "did you mean 'weight'?"],
    ),
    "misspelt shared parameter": (
        put("parameters", "nomalize")(False),
        ["parameters.nomalize", "did you mean 'normalize'?"],
    ),
    "misspelt parameter that mergekit needs": (
        lambda r: r["models"][0].update(parameters={"weigth": 0.5}),
        ["models[0].parameters.weigth", "line ", "did you mean 'weight'?"],
    ),
    "misspelt parameter of ours": (
        put("parameters", "otuside")("reference"),
        ["parameters.otuside", "did you mean 'outside'?"],
    ),
    "misspelt key of ours": (put("repiar")({}), ["repiar", "did you mean 'repair'?"]),
    "misspelt key of repair": (
        put("repair")({"cmax": 0.3}),
        ["repair.cmax", "did you mean 'c_max'?"],
    ),
    "unknown operator": (
        put("merge_method")("tise"),
        ["'tise' is no operator", "did you mean 'ties'?"],
    ),
    "negative density of a drawn mask": (
        lambda r: (
            r.update(merge_method="dare_ties"),
            r["models"][0]["parameters"].update(density=-1),
        ),
        ["models[0].parameters.density", "between 0 and 1, not -1"],
    ),
    "density in words": (
        put("models", 0, "parameters", "density")("half"),
        ["models[0].parameters.density", "must be a number, not 'half'"],
    ),
    "infinite weight": (
        put("models", 0, "parameters", "weight")(float("inf")),
        ["models[0].parameters.weight", "must be a number"],
    ),
    "weight beyond float32": (
        put("models", 0, "parameters", "weight")([1, -1e39]),
        ["models[0].parameters.weight[1]", "must lie between -3.40282e+38 and 3.40282e+38"],
    ),
    "scale beyond float32": (put("repair")({"scale": 1e308}), ["repair.scale", "not 1e+308"]),
    "number too long": (
        put("models", 0, "parameters", "weight")(10**400),
        ["models[0].parameters.weight", "must be a number"],
    ),
    "empty gradient of ours": (put("parameters", "elect")([]), ["elect", "empty list"]),
    "wrong entry in a gradient": (
        put("models", 0, "parameters", "density")([0.5, "half"]),
        ["models[0].parameters.density[1]", "must be a number, not 'half'"],
    ),
    "condition without a value": (
        put("models", 0, "parameters", "weight")([{"filter": "mlp"}]),
        ["models[0].parameters.weight[0]", "keys filter and value"],
    ),
    "filter that is no text": (
        put("models", 0, "parameters", "weight")([{"filter": 3, "value": 1}]),
        ["models[0].parameters.weight[0].filter", "part of a tensor's name"],
    ),
    "option of ours given to a model": (
        put("models", 0, "parameters", "scope")("model"),
        ["models[0].parameters.scope", "move it to the top-level parameters"],
    ),
    "word out of a choice": (
        put("parameters", "scope")("layer"),
        ["parameters.scope", "one of tensor, model, not 'layer'"],
    ),
    "scope by filter": (
        put("parameters", "scope")([{"filter": "mlp", "value": "model"}]),
        ["parameters.scope", "one value for the whole model"],
    ),
    "truth in words": (
        put("parameters", "normalize")("yes please"),
        ["parameters.normalize", "true or false"],
    ),
    "bad dtype": (put("dtype")("bf16"), ["dtype", "'bfloat16'", "not 'bf16'"]),
    "slices and models": (put("slices")([{"sources": []}]), ["slices", "give one", "no source"]),
    "chat template": (
        put("chat_template")("chatlm"),
        ["chat_template", "'chatlm' is no chat template", "did you mean 'chatml'?"],
    ),
    "chat template that is not there": (
        put("chat_template")("mine.jinja"),
        ["chat_template", "mine.jinja", "no such file"],
    ),
    "embeddings of single tokens": (
        put("tokenizer")({"source": "base", "tokens": {"<s>": {"source": "x"}}}),
        ["tokenizer.tokens.<s>.source", "no such folder"],
    ),
    "tokenizer said twice": (
        lambda r: r.update(tokenizer_source="base", tokenizer={"source": "base"}),
        ["tokenizer", "give one"],
    ),
    "models are no list": (put("models")({"model": "x"}), ["models.glob", "is missing"]),
    "model that is no mapping": (put("models", 0)("./x"), ["models[0]", "not './x'"]),
    "repair that is no mapping": (put("repair")(["probe"]), ["repair", "not ['probe']"]),
    "scale in words": (
        put("repair")({"scale": "large"}),
        ["repair.scale", "a valid number or 'calibrated', not 'large'"],
    ),
    "probe that is not there": (
        put("repair")({"probe": "no.jsonl"}),
        ["repair.probe", "no.jsonl does not exist"],
    ),
    "repair without base model": (
        lambda r: (r.pop("base_model"), r.update(merge_method="linear", repair={})),
        ["base_model is missing: the repair needs"],
    ),
    "sparse and replaced": (
        put("repair")({"variant": "sparse_update", "update": "replace"}),
        ["repair", "drop update: replace"],
    ),
    "no base model": (
        lambda recipe: recipe.pop("base_model"),
        ["base_model is missing", "ties needs the reference"],
    ),
    "no base model but a key like it": (
        lambda recipe: recipe.update(base_modle=recipe.pop("base_model")),
        ["base_model is missing", "'base_modle' is no key here; did you mean 'base_model'?"],
    ),
    "a tokenizer like one of the words": (
        put("tokenizer_source")("unoin"),
        ["'unoin': no such folder; did you mean 'union'?"],
    ),
    "a method in capitals": (put("merge_method")("TIES"), ["did you mean 'ties'?"]),
    "no method": (lambda recipe: recipe.pop("merge_method"), ["merge_method", "is missing"]),
    "no experts": (put("models")([]), ["models", "no expert is listed"]),
    "two experts of one name": (
        lambda recipe: [model.update(name="math") for model in recipe["models"]],
        ["two experts are called 'math'", "give each a name"],
    ),
    "an expert called anchor beside a repair": (
        lambda r: (r["models"][0].update(name="anchor"), r.update(repair={})),
        ["no expert may be called 'anchor'"],
    ),
    "an expert called reference": (
        put("models", 0, "name")("reference"),
        ["no expert may be called 'reference'"],
    ),
    "path that does not exist": (
        put("models", 0, "model")("./pool/maths"),
        ["models[0].model", "'./pool/maths': no such folder", "looked in"],
    ),
    "model with an adapter": (
        put("models", 0, "model")("org/model+org/lora+org/second"),
        ["models[0].model", "one model and one adapter"],
    ),
    "path too long for a file": (
        put("models", 0, "model")("./" + "x" * 300),
        ["models[0].model", "cannot be a folder"],
    ),
    "model that is no text": (put("models", 0, "model")(7), ["models[0].model", "not 7"]),
    "lines on nothing known": (
        lambda r: r.update(merge_method="lines", parameters={"on": "tize"}),
        ["'tize' is no operator", "did you mean 'ties'?"],
    ),
    "lines on a list": (
        lambda r: r.update(merge_method="lines", parameters={"on": ["ties"]}),
        ["parameters.on", "name of an operator"],
    ),
    "blend of one": (
        lambda r: r.update(merge_method="blend", parameters={"on": ["ties"]}),
        ["parameters.on", "blend stands on 2, not on 1"],
    ),
    "blend with a number": (
        lambda r: r.update(merge_method="blend", parameters={"on": ["ties", 3]}),
        ["parameters.on", "name of an operator"],
    ),
    "an option of no part": (
        lambda r: r.update(
            merge_method="blend", parameters={"on": ["tsv", "linear"], "ties.density": 0.5}
        ),
        ["parameters", "ties.density"],
    ),
    "lines on lines": (
        lambda r: r.update(merge_method="lines", parameters={"on": "lines"}),
        ["lines cannot stand on lines"],
    ),
    "on without lines": (
        put("parameters", "on")("ties"),
        ["parameters.on", "an option of lines and blend"],
    ),
    "outside kept without a reference": (
        lambda r: (
            r.pop("base_model"),
            r.update(merge_method="linear", parameters={"outside": "reference"}),
            [m["parameters"].pop("density") for m in r["models"]],
        ),
        ["parameters.outside", "needs a base_model"],
    ),
    "checkpoint without an anchor": (
        put("merge_method")("checkpoint"),
        ["merge_method", "checkpoint needs anchor"],
    ),
    "anchor without checkpoint": (put("anchor")("./x"), ["anchor", "merge_method: checkpoint"]),
    "budget upside down": (
        put("repair")({"c_min": 0.5, "c_max": 0.2}),
        ["repair", "c_min 0.5 exceeds c_max 0.2"],
    ),
    "two sources of scores": (
        put("repair")({"scores": "s.json", "command": "x"}),
        ["repair", "not scores, command"],
    ),
    "command that scores nothing": (
        put("repair")({"command": "python score.py"}),
        ["repair", "must say {checkpoint}"],
    ),
    "command that cannot be read": (
        put("repair")({"command": "score '{checkpoint}"}),
        ["repair", "cannot be taken apart"],
    ),
    "result files that are numbers": (
        put("repair")({"scores": {"experts": {"math": 3}, "domain": {}}}),
        ["repair", "scores: experts, anchor, domains, domain cannot be used", "task/metric"],
    ),
    "unknown variant": (put("repair")({"variant": "defualt"}), ["did you mean 'default'?"]),
}


PASSED_OVER: dict[str, tuple[Change, list[str]]] = {
    "dtype among the parameters": (
        put("parameters", "dtype")("float16"),
        ["parameters.dtype", "'dtype' is no parameter of ties"],
    ),
    "misspelt key": (put("parametres")({}), ["parametres", "did you mean 'parameters'?"]),
    "key of another tool": (put("license")("mit"), ["license", "'license' is no key here"]),
    "key that is only a little like one of ours": (put("author")("me"), ["'author' is no key"]),
    "misspelt key of a model": (
        put("models", 1, "modle")("x"),
        ["models[1].modle", "did you mean 'model'?"],
    ),
    "option of the merge given to a model": (
        put("models", 0, "parameters", "normalize")(True),
        ["models[0].parameters.normalize", "move it to the top-level parameters"],
    ),
    "further key of a condition": (
        put("models", 0, "parameters", "density")({"value": 0.5, "fliter": "mlp"}),
        ["models[0].parameters.density[0].fliter", "did you mean 'filter'?"],
    ),
    "empty gradient": (put("parameters", "lambda")([]), ["parameters.lambda", "empty list"]),
    "name that is a number": (
        put("models", 0, "name")(2024),
        ["models[0].name", "a valid string, not 2024"],
    ),
    "name of the recipe that is a number": (put("name")(1.5), ["name", "a valid string, not 1.5"]),
    "no slices beside models": (put("slices")([]), ["slices", "is empty, and models: says"]),
    "key that is a number": (put(2024)("x"), ["2024", "line "]),
    "key that is a truth": (put(True)("x"), ["line "]),
    "key that is nothing": (put(None)("x"), ["line "]),
}
"""What mergekit does not look at."""


@pytest.mark.parametrize("extra", PASSED_OVER)
def test_a_mergekit_file_is_noted_what_mergekit_passes_over(
    pool: PoolOnDisk, tmp_path: Path, extra: str
) -> None:
    change, words = PASSED_OVER[extra]
    recipe = ties(pool)
    plain = load_recipe(recipe)
    change(recipe)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    loaded = load_recipe(file)
    sites = [one.site("mlp", 4, Stack("", 1)).settings for one in (loaded, plain)]
    assert sites[0] == sites[1] and loaded.experts == plain.experts
    (note,) = loaded.notes
    said = refused(2, "merge", file, tmp_path / "out", "--strict", beside=tmp_path)
    ours = {**recipe, "preset": "mergekit"}
    with pytest.raises(RecipeError) as error:
        load_recipe(ours)
    for word in words:
        assert word in note and word in said
        assert word in str(error.value) or word == "line "


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_recipes(pool: PoolOnDisk, tmp_path: Path, wrong: str) -> None:
    change, words = WRONG[wrong]
    recipe = ties(pool)
    change(recipe)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    said = refused(2, "merge", file, tmp_path / "out", beside=tmp_path)
    for word in [str(file), *words]:
        assert word in said, said


def test_all_problems_are_reported_together_each_with_its_line(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"merge_method: ties\n"
        f"base_model: {pool.reference}\n"
        f"models:\n"
        f"  - model: ./nowhere\n"
        f"  - model: {pool.experts['math']}\n"
        f"    parameters:\n"
        f"      wieght: 1\n"
        f"      density: half\n"
        f"parameters:\n"
        f"  lambda: large\n"
    )
    said = refused(2, "merge", file, tmp_path / "out", beside=tmp_path)
    for place in (
        "line 4, models[0].model",
        "line 7, models[1].parameters.wieght",
        "line 8, models[1].parameters.density",
        "line 10, parameters.lambda",
    ):
        assert place in said
    assert said.count("\n  - ") == 4


SEVERAL = """\
merge_method: tise
base_model: ./no-reference
models:
  - model: ./no-expert
    parameters: {{denisty: 7}}
  - {{model: {math}, nmae: math}}
  - 17
dtype: bf16
parametres: {{}}
parameters: {{lambda: large}}
slices: []
repair:
  c_min: 0.5
  c_max: 0.2
  cmax: 0.3
  guard: maybe
  probe: no.jsonl
"""


def test_an_unknown_method_hides_no_other_problem(pool: PoolOnDisk, tmp_path: Path) -> None:
    """All but the parameters, of which nothing can be said without an operator."""
    file = _written(tmp_path, SEVERAL.format(math=pool.experts["math"]))
    said = refused(2, "merge", file, tmp_path / "out", beside=tmp_path)
    for place in (
        "line 1, merge_method: 'tise' is no operator; did you mean 'ties'?",
        "line 2, base_model: './no-reference': no such folder",
        "line 4, models[0].model: './no-expert': no such folder",
        "line 6, models[1].nmae: 'nmae' is no key here; did you mean 'name'?",
        "line 7, models[2]: must be a mapping with model, name, exemplars, parameters, not 17",
        "line 8, dtype: must be 'float32', 'bfloat16' or 'float16', not 'bf16'",
        "line 9, parametres: 'parametres' is no key here; did you mean 'parameters'?",
        "line 11, slices: is empty, and models: says what is merged",
        "line 12, repair: c_min 0.5 exceeds c_max 0.2",
        "line 15, repair.cmax: 'cmax' is no key here; did you mean 'c_max'?",
        "line 16, repair.guard: must be 'warn', 'keep_anchor' or 'off', not 'maybe'",
        f"line 17, repair.probe: {tmp_path / 'no.jsonl'} does not exist",
    ):
        assert f"  - {place}" in said, f"{place}\n{said}"
    lines = [int(text.split()[2].rstrip(",")) for text in said.splitlines()[1:]]
    assert lines == sorted(lines) and len(lines) == 12
    assert "denisty" not in said and "lambda" not in said


def test_a_missing_method_hides_no_other_problem(pool: PoolOnDisk, tmp_path: Path) -> None:
    model = f"{{model: {pool.experts['math']}, exemplars: 3}}"
    file = _written(tmp_path, f"models: [{model}]\nseed: one\n")
    said = refused(2, "merge", file, tmp_path / "out", beside=tmp_path)
    assert "merge_method is missing; there are: linear" in said
    assert "line 1, models[0].exemplars: must be a valid string, not 3" in said
    assert "line 2, seed: must be a valid integer, not 'one'" in said
    assert said.count("\n  - ") == 3


def test_sections_tell_all_their_problems_with_a_known_method(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("lot", {"rtol": 7}, repair={"rounds": 0, "probe": "no.jsonl"})
    recipe |= {"capture": {"limits": 3, "labels": "mine"}, "tokenizer_source": "./nowhere"}
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe)
    for word in (
        "models[0].parameters.weight: 'weight' is no parameter of lot",
        "models[0]: exemplars is missing",
        "models[1]: exemplars is missing",
        "parameters.rtol: must lie between 0 and 1, not 7",
        "capture.limits: 'limits' is no key here; did you mean 'limit'?",
        "capture.labels: must be 'argmax', 'sampled' or 'data', not 'mine'",
        "repair.rounds: must be greater than or equal to 1, not 0",
        "repair.probe",
        "tokenizer_source: './nowhere': no such folder",
    ):
        assert word in str(error.value), f"{word}\n{error.value}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("merge_method: [ties", "not valid YAML"),
        ("merge_method: ties\nmodels: }", "not valid YAML: line 2, column 9: "),
        ("", "a recipe is a mapping with merge_method:, base_model: and models:, not an empty"),
        ("- ties", "not a list"),
        ("ties", "not 'ties'"),
        ("merge_method: ties\n---\nmerge_method: linear\n", "document 2: name: merged is taken"),
        ("dtype: &a [*a]\n", "line 1, column 12: is an alias inside what it stands for"),
        ("merge_method: 2001-99-99\n", "not valid YAML"),
        ("merge_method: ties\nmerge_method: linear\n", "line 2, merge_method: is given twice"),
        ("? [a, b]\n: 1\n", "not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("1: 2\nmerge_method: linear\n", "1"),
        ("[" * 5000, "is nested deeper than 64 levels"),
        ("a: " + "1:" * 4000 + "1", "is too long for a number"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    assert words in refused(2, "merge", file, tmp_path / "out", beside=tmp_path)


def test_nested_aliases_do_not_blow_up(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    with pytest.raises(RecipeError, match="the document has more than 200000 values"):
        load_recipe(_written(tmp_path, bomb))


def _written(folder: Path, text: str) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return file


def test_missing_and_binary_recipe_files(tmp_path: Path) -> None:
    said = refused(2, "merge", tmp_path / "no.yaml", tmp_path / "out", beside=tmp_path)
    assert "no.yaml: no such file; a recipe in YAML is expected" in said
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    said = refused(2, "merge", tmp_path / "recipe.yaml", tmp_path / "out", beside=tmp_path)
    assert "is not UTF-8 text" in said
    assert "is a folder" in refused(2, "merge", tmp_path, tmp_path / "out", beside=tmp_path)


PARAMETERS_THAT_DO_NOT_FIT: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "cabs quotas": ("cabs", {"n": 200}, {}, "2 experts × n = 200 exceed m = 256"),
    "cabs n over m": ("cabs", {"n": 9, "m": 8}, {}, "n = 9 exceeds the group length m = 8"),
    "cabs no room": ("cabs", {"m": 1}, {}, "2 experts do not fit into groups of m = 1"),
    "cabs quotas of some tensors": (
        "cabs",
        {"n": [{"filter": "mlp", "value": 200}, {"value": 4}]},
        {},
        "2 experts × n = 200 exceed m = 256",
    ),
    "model scope with gradients": (
        "ties",
        {"scope": "model"},
        {"density": ([0.1, 0.5], 0.5)},
        "scope: model takes one density per expert",
    ),
    "weights that cancel": ("linear", {}, {"weight": (0.5, -0.5)}, "sum to zero"),
    "weights that cancel in float32": (
        "linear",
        {},
        {"weight": (1.0, -1.0 - 1e-9)},
        "sum to zero",
    ),
}


@pytest.mark.parametrize("wrong", PARAMETERS_THAT_DO_NOT_FIT)
def test_parameters_that_do_not_fit_together(pool: PoolOnDisk, tmp_path: Path, wrong: str) -> None:
    method, parameters, each, words = PARAMETERS_THAT_DO_NOT_FIT[wrong]
    file = _written(tmp_path, yaml.safe_dump(pool.recipe(method, parameters, each=each)))
    said = refused(2, "merge", file, tmp_path / "out", beside=tmp_path)
    assert f"{method}: the parameters do not fit" in said
    assert words in said


def test_lines_alpha_is_one_number(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("lines", {"alpha": [0.1, 0.5]})
    with pytest.raises(RecipeError, match=r"alpha: has one value for the whole model"):
        load_recipe(recipe)


# What the dialect means.


def site(recipe: dict[str, Any], tensor: str, block: int | None = None, depth: int = 5) -> Any:
    position = None if block is None else (block, depth)
    return load_recipe(recipe).site(tensor, 100, Stack("", 0), position).settings


def test_presets(pool: PoolOnDisk) -> None:
    ours = site(pool.recipe("dare_ties"), "x")
    assert (ours["rescale"], ours["density"], ours["normalize"]) == ("l1", (1.0, 1.0), False)
    paper = site(pool.recipe("dare_ties", preset="paper"), "x")
    assert (paper["rescale"], paper["density"], paper["normalize"]) == ("inverse", (0.1, 0.1), True)
    tied = site(pool.recipe("ties", preset="paper"), "x")
    assert (tied["scope"], tied["elect"], tied["density"]) == ("model", "unweighted", (0.2, 0.2))
    assert site(pool.recipe("ties"), "x")["scope"] == "tensor"


@pytest.mark.parametrize(("given", "word"), [(True, "l1"), (False, "none"), ("inverse", "inverse")])
def test_rescale_may_be_said_in_mergekits_way(pool: PoolOnDisk, given: Any, word: str) -> None:
    assert site(pool.recipe("dare_linear", {"rescale": given}), "x")["rescale"] == word


def test_a_models_own_parameter_comes_before_the_shared_one(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("ties", {"weight": 0.9, "density": 0.3}, each={"density": (0.5, 0.6)})
    del recipe["models"][1]["parameters"]
    settings = site(recipe, "x")
    assert settings["weight"] == (0.5, 0.9)
    assert settings["density"] == (0.5, 0.3)


@pytest.mark.parametrize(
    ("block", "depth", "value"),
    [(0, 5, 0.0), (1, 5, 0.25), (2, 5, 0.5), (4, 5, 1.0), (None, 5, 0.0), (0, 1, 1.0)],
)
def test_gradients_over_depth(
    pool: PoolOnDisk, block: int | None, depth: int, value: float
) -> None:
    recipe = pool.recipe("ties", weight=([0, 0.5, 1], 1.0))
    assert site(recipe, "x", block, depth)["weight"] == (value, 1.0)


def test_the_first_filter_that_matches_decides(pool: PoolOnDisk) -> None:
    rules = [
        {"filter": "self_attn", "value": 0.1},
        {"filter": "q_proj", "value": 0.2},
        {"value": 0.3},
    ]
    recipe = pool.recipe("ties", weight=(rules, [{"filter": "mlp", "value": 0.4}]))
    recipe["parameters"] = {"weight": 0.5}
    assert site(recipe, "layers.0.self_attn.q_proj")["weight"] == (0.1, 0.5)
    assert site(recipe, "layers.0.mlp.up_proj")["weight"] == (0.3, 0.4)


def test_empty_parameters_are_none(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("linear")
    recipe["parameters"] = None
    recipe["models"][0]["parameters"] = None
    assert site(recipe, "x")["weight"] == (1.0, 0.25)


def test_the_base_model_under_models_is_left_out_with_a_note(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("ties")
    recipe["models"].insert(0, {"model": str(pool.reference)})
    loaded = load_recipe(recipe)
    assert list(loaded.experts) == ["math", "coding"]
    assert "is the base model" in loaded.notes[0]


def test_a_soup_says_that_its_base_model_is_not_in_it(pool: PoolOnDisk) -> None:
    assert "not in the soup" in load_recipe(pool.recipe("linear")).notes[0]
    recipe = pool.recipe("linear")
    recipe["models"].append({"model": str(pool.reference)})
    loaded = load_recipe(recipe)
    assert loaded.notes == () and list(loaded.experts) == ["math", "coding", "base"]


def test_names_and_seed(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("linear", seed=5)
    recipe["models"][0]["name"] = "arithmetic"
    assert list(load_recipe(recipe).experts) == ["arithmetic", "coding"]
    assert load_recipe(recipe).seed == 5
    assert load_recipe(recipe, seed=6).seed == 6


# Where models are found.


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A hub that notes every question and has nothing."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options))
        raise LocalEntryNotFoundError("no network here\nand more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


@pytest.mark.parametrize(
    "text", ["./x", "/x", "../x", "~/x", "pool/x", "./pool/x", "x", "a/b/c", ".", "", "pool/"]
)
def test_a_path_never_becomes_a_hub_lookup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: list[Any], text: str
) -> None:
    (tmp_path / "pool").mkdir()
    monkeypatch.chdir(tmp_path)
    if text in (".", "", "pool/"):
        assert find_model(text, tmp_path).is_relative_to(tmp_path)
    else:
        with pytest.raises(RecipeError, match="no such folder"):
            find_model(text, tmp_path)
    assert hub == []


def test_folders_are_looked_for_beside_the_recipe_too(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("linear")
    recipe |= {"base_model": "./reference", "models": [{"model": "math"}, {"model": "./coding"}]}
    loaded = load_recipe(pool.write(recipe, "beside.yaml"))
    assert loaded.experts == pool.experts and loaded.reference == pool.reference


def test_a_folder_with_a_plus_in_its_name_is_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "a+b").mkdir()
    assert find_model("a+b", tmp_path) == tmp_path / "a+b"


def test_a_folder_with_an_at_sign_in_its_name_has_no_revision(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    shutil.copytree(pool.experts["math"], tmp_path / "math@home")
    (tmp_path / "math").mkdir()
    recipe = pool.recipe("task_arithmetic")
    recipe["models"] = [{"model": str(tmp_path / "math@home")}]
    loaded = load_recipe(recipe)
    assert list(loaded.experts.values()) == [tmp_path / "math@home"]
    assert not any("revision" in note for note in loaded.notes)
    for text in ("math@", "math@x/y", "math@x@y", "maths@main"):
        with pytest.raises(RecipeError, match="no such folder"):
            find_model(text, tmp_path)


def test_an_unknown_home_is_no_crash(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be a folder"):
        find_model("~no-such-user-here/x", tmp_path)


def hub_recipe(pool: PoolOnDisk, *ids: str) -> dict[str, Any]:
    """A recipe whose experts are on the hub."""
    models = [{"model": text, "parameters": {"weight": 1}} for text in ids]
    return pool.recipe("task_arithmetic") | {"models": models}


def test_nothing_is_downloaded_for_a_recipe_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: list[Any], pool: PoolOnDisk
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="did you mean 'ties'"):
        load_recipe(hub_recipe(pool, "org/model") | {"merge_method": "tise"})
    assert hub == []


def test_a_hub_id_that_the_hub_calls_malformed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: PoolOnDisk
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="hub could not provide it"):
        load_recipe(hub_recipe(pool, "org/my--model"))


def test_without_huggingface_hub_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: PoolOnDisk
) -> None:
    from sigmerge.errors import MissingExtra

    empty = types.ModuleType("huggingface_hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", empty)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingExtra, match=r"pip install 'sigmerge-llm\[hub\]'"):
        load_recipe(hub_recipe(pool, "org/model"))


def test_an_unquoted_on_is_no_truth_value(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    text = "\n".join(
        [
            "merge_method: lines",
            f"base_model: {pool.reference}",
            "models:",
            *(f"  - model: {folder}" for folder in pool.experts.values()),
            "parameters: {on: ties, beta: 0.5}",
        ]
    )
    (tmp_path / "recipe.yaml").write_text(text)
    operator = load_recipe(tmp_path / "recipe.yaml").operator
    assert {parameter.name for parameter in operator.parameters} >= {"beta", "density", "elect"}
