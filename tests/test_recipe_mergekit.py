"""mergekit's dialect, option by option: each means mergekit's numbers or is refused by name.

The same file goes through both programs, in float32.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import sigmerge
from sigmerge.errors import RecipeError
from sigmerge.operators.table import MERGEKIT, operator
from sigmerge.recipe import load_recipe
from sigmerge.recipe.settings import FAMILY, evaluate
from tests.adapters import write_adapter
from tests.jobs.test_mergekit_parity import agree, both, identical, run_mergekit
from tests.pools import PoolOnDisk, make_pool, read_weights, write_tokenizer


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("dialect"), layers=3, tokenizer=True)


def shared(pool: PoolOnDisk, method: str, **parameters: Any) -> dict[str, Any]:
    """A recipe whose models have no parameters of their own."""
    recipe = pool.recipe(method, parameters, dtype="float32")
    return recipe | {"models": [{"model": model["model"]} for model in recipe["models"]]}


# The base model in a soup.


@pytest.mark.parametrize(
    "weight", [0.4, [0.2, 0.9], [{"filter": "mlp", "value": 0.3}, {"value": [1, 0.5]}]]
)
def test_a_shared_weight_counts_the_base_model_into_the_soup(
    pool: PoolOnDisk, tmp_path: Path, weight: Any
) -> None:
    recipe = shared(pool, "linear", weight=weight)
    agree(*both(pool, recipe, tmp_path), ulps=4)  # mergekit fuses multiplication and addition
    assert "one more model of the soup" in load_recipe(recipe).notes[0]


def test_so_does_a_shared_weight_beside_weights_of_their_own(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    recipe = pool.recipe("linear", {"weight": 0.4, "normalize": False}, dtype="float32")
    agree(*both(pool, recipe, tmp_path), ulps=4)


def test_with_weights_of_their_own_mergekit_refuses_and_we_leave_the_base_out(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    recipe = pool.recipe("linear", dtype="float32")
    with pytest.raises(RuntimeError, match="Missing required parameter weight"):
        both(pool, recipe, tmp_path)
    loaded = load_recipe(recipe)
    assert list(loaded.experts) == list(pool.experts) and "not in the soup" in loaded.notes[0]
    assert list(load_recipe(shared(pool, "linear", weight=1) | {"preset": "paper"}).experts) == [
        *pool.experts
    ]


def test_a_base_without_a_weight_somewhere_is_refused_by_both(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    recipe = pool.recipe("linear", {"weight": [{"filter": "mlp", "value": 1}]}, dtype="float32")
    with pytest.raises(RecipeError, match=r"parameters\.weight: base_model .* no weight where"):
        sigmerge.merge(recipe, tmp_path / "out")


def test_a_soup_with_the_base_model_is_not_repaired(pool: PoolOnDisk) -> None:
    section = {"repair": {"scores": "s.json"}}
    with pytest.raises(RecipeError, match=r"parameters\.weight: makes base_model one more model"):
        load_recipe(shared(pool, "linear", weight=1) | section)
    listed = pool.recipe("linear", **section)
    listed["models"].append({"model": str(pool.reference)})
    with pytest.raises(RecipeError, match=r"models\[3\]: the base model in a soup"):
        load_recipe(listed)


# Parameters.


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("ties", {"normalize": [True, False]}),
        ("ties", {"lambda": [0.3, 1.2], "int8_mask": True}),
        ("ties", {"density": [{"filter": "self_attn", "value": [0.9, 0.1]}, {"value": 0.4}]}),
        ("ties", {"density": [0.1, 0.9], "weight": {"filter": "*", "value": 0.7}}),
        ("ties", {"normalize": 0, "int8_mask": "yes"}),
        ("ties", {"rescale": False, "gamma": 0.01, "epsilon": 0.1}),
        ("ties", {"rescale": True, "density": 0.4}),
        ("task_arithmetic", {"density": 0.3, "rescale": True, "normalize": "true"}),
        ("task_arithmetic", {"weight": ["5e-1", 1], "lambda": "11e-1"}),
        (
            "ramplus_tl",
            {"alpha": [0.1, 0.9], "r": [{"filter": "mlp", "value": 0.2}, {"value": 0.4}]},
        ),
        ("ramplus_tl", {"epsilon": -0.1}),
        ("karcher", {"max_iter": [1, 3], "tol": [1e-7, 1e-9]}),
        ("linear", {"normalize": [False, True], "density": 0.5, "lambda": 3, "int8_mask": True}),
    ],
)
def test_parameters_in_all_their_forms(
    pool: PoolOnDisk, tmp_path: Path, method: str, parameters: dict[str, Any]
) -> None:
    recipe = shared(pool, method, **{"weight": 0.6, **parameters})
    agree(*both(pool, recipe, tmp_path), ulps=2)


MLP = {"filter": "mlp", "value": 0.3}


@pytest.mark.parametrize(
    ("method", "nearer", "farther"),
    [
        ("ties", {"density": [MLP]}, {"density": 0.6}),
        ("ties", {"density": MLP}, {"density": [0.2, 0.9], "lambda": 0.5}),
        ("ties", {"lambda": [MLP]}, {"lambda": [{"filter": "mlp", "value": 9}, {"value": 0.7}]}),
        ("ties", {"density": 0.4}, {"density": 0.6}),
        ("slerp", {"t": [MLP]}, {"t": 0.6}),
        ("passthrough", {"scale": [MLP]}, {"scale": 2}),
    ],
)
@pytest.mark.parametrize("sliced", [False, True])
def test_the_recipes_parameters_hold_where_no_filter_of_its_module_matches(
    pool: PoolOnDisk, tmp_path: Path, method: str, nearer: Any, farther: Any, sliced: bool
) -> None:
    recipe = pool.recipe(method, farther, dtype="float32")
    given: Any = {"models": recipe.pop("models")[: None if method == "ties" else 1]}
    if method == "passthrough":
        del recipe["base_model"]
    if sliced:
        base = [{"model": recipe["base_model"]}] if method != "passthrough" else []
        sources = [{**model, "layer_range": [1, 3]} for model in (*given["models"], *base)]
        given = {"slices": [{"sources": sources, "parameters": {}}]}
    recipe["modules"] = {"default": {**given, "parameters": nearer}}
    agree(*both(pool, recipe, tmp_path), ulps=8)


def test_what_is_wrong_in_a_module_is_told_where_it_stands(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    recipe = pool.recipe("ties", {"density": "much", "lambda": [{"value": "more"}]})
    models = [{**recipe.pop("models")[0], "exemplars": []}]
    nearer = {"density": [MLP, {"filter": 3, "value": 1}], "lambda": [MLP], "normalize": "x"}
    file = tmp_path / "recipe.yaml"
    modules = {"default": {"models": models, "parameters": nearer}}
    file.write_text(yaml.safe_dump(recipe | {"modules": modules}, sort_keys=False))
    with pytest.raises(RecipeError) as raised:
        load_recipe(file)
    places = {problem.partition(": ")[0] for problem in raised.value.problems}
    lines = file.read_text().splitlines()
    told = {p.partition(", ")[2]: lines[int(p.split()[1].strip(",")) - 1].strip() for p in places}
    assert told == {
        "parameters.density": "density: much",
        "parameters.lambda[0].value": "- value: more",
        "modules.default.models[0].exemplars": "exemplars: []",
        "modules.default.parameters.density[1].filter": "- filter: 3",
        "modules.default.parameters.normalize": "normalize: x",
    }


@pytest.mark.parametrize(
    "setting", [[True, False], [False, True, True], [0, 1], [0.5], [1, 0, 0.25, 2], ["1e-1", 3]]
)
def test_points_of_a_gradient(setting: list[Any]) -> None:
    from mergekit.config import evaluate_setting

    truth = isinstance(setting[0], bool)
    read: Any = bool if truth else float
    for t in (0, 0.1, 0.5, 0.75, 0.99, 1):
        theirs = evaluate_setting("x", setting, t, validate=read)
        assert evaluate([read(value) for value in setting], "x", t) == theirs


def test_what_mergekit_passes_over_is_noted(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("linear", {"lambda": 3}, each={"density": (0.1, 0.2, 0.3)})
    notes = " ".join(load_recipe(recipe).notes)
    assert "lambda is ignored: linear does not read it" in notes
    assert notes.count("density is ignored") == 1


def test_the_family_of_parameters_is_mergekits() -> None:
    from mergekit.merge_methods.registry import get

    assert set(FAMILY) == {name for m in MERGEKIT for name in _parameters(get(m))}


def _parameters(method: Any) -> set[str]:
    return {parameter.name for parameter in method.spec.parameters}


def test_every_method_of_mergekit_is_here_with_its_parameters() -> None:
    from mergekit.merge_methods.base import ParameterScope
    from mergekit.merge_methods.registry import registered_methods

    theirs = {method.spec.name: method for method in registered_methods()}
    assert set(theirs) == set(MERGEKIT)
    for name, method in theirs.items():
        ours = {p.name: p for p in operator(name).parameters}
        for parameter in method.spec.parameters:
            mine = ours[parameter.name]
            assert mine.per_model == (parameter.scope != ParameterScope.SHARED), mine
            if not parameter.required and not isinstance(mine.kind, tuple):
                assert mine.mergekit == (parameter.default if parameter.default is not None else 1)


def test_every_key_of_mergekit_is_known(pool: PoolOnDisk) -> None:
    from mergekit.config import MergeConfiguration

    for key in MergeConfiguration.model_fields:
        recipe = pool.recipe("ties") | {key: [[]]}  # a value that no key can have
        with pytest.raises(RecipeError) as error:
            load_recipe(recipe)
        assert "is no key here" not in str(error.value), key


# How models are written.


def test_folders_of_one_name_and_one_called_reference(pool: PoolOnDisk, tmp_path: Path) -> None:
    """Runs of a trainer: math/checkpoint-500 and coding/checkpoint-500."""
    for place, expert in (("a/run", "math"), ("b/run", "coding"), ("reference", "safety")):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        shutil.copytree(pool.experts[expert], tmp_path / place)
    models = [{"model": str(tmp_path / place), "parameters": {"weight": 0.3}}
              for place in ("a/run", "b/run", "reference")]  # fmt: skip
    recipe = pool.recipe("task_arithmetic", dtype="float32") | {"models": models}
    identical(*both(pool, recipe, tmp_path))
    assert list(load_recipe(recipe).experts) == ["run", "run-2", "reference-2"]


def test_names_of_domains_are_never_made_up(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("task_arithmetic", repair={"scores": "scores.json"})
    shutil.copytree(pool.experts["coding"], tmp_path / "math")
    recipe["models"][1]["model"] = str(tmp_path / "math")
    with pytest.raises(RecipeError, match="two experts are called 'math'; give each a name"):
        load_recipe(recipe)


def test_one_model_twice_is_refused_by_both(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("linear", dtype="float32") | {"base_model": None}
    recipe["models"].append(recipe["models"][0])
    with pytest.raises(ValueError, match="Duplicate merge inputs"):
        run_mergekit(recipe, tmp_path / "theirs")
    with pytest.raises(RecipeError, match=r"models\[3\]: .*math is listed twice"):
        load_recipe(recipe)


def test_mergekits_long_form_of_a_model(pool: PoolOnDisk, tmp_path: Path) -> None:
    """mergekit writes it into its own records where a path has a space."""
    spaced = shutil.copytree(pool.experts["math"], tmp_path / "my model")
    adapter = write_adapter(tmp_path / "lora", pool.reference, read_weights(pool.reference))
    long = {"path": str(adapter), "revision": None}
    names = [{"model": {"path": str(spaced)}}, {"model": str(pool.reference), "lora": long}]
    models = [{"model": name, "parameters": {"weight": 0.5}} for name in names]
    recipe = {"merge_method": "linear", "models": models, "dtype": "float32"}
    agree(*both(pool, recipe, tmp_path), ulps=2)


def test_the_revision_of_a_local_folder_is_ignored(pool: PoolOnDisk, tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora", pool.reference, read_weights(pool.reference))
    names = [f"{pool.experts['math']}@main", f"{pool.reference}+{tmp_path / 'lora'}@v1.2"]
    models = [{"model": name, "parameters": {"weight": 0.5}} for name in names]
    source = {"path": str(pool.reference), "revision": "main"}
    recipe = {"merge_method": "linear", "models": models, "dtype": "float32",
              "tokenizer_source": {"model": source}}  # fmt: skip
    agree(*both(pool, recipe, tmp_path), ulps=2)
    ignored = [note for note in load_recipe(recipe).notes if "the revision is ignored" in note]
    assert [Path(note.partition(":")[0]).name for note in ignored] == [
        "math@main", "lora@v1.2", "reference@main",
    ]  # fmt: skip


def test_a_folder_with_an_at_in_its_name_has_no_revision(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    named = pool.experts["math"].rename(tmp_path / "math@v1")
    recipe = pool.recipe("linear")
    recipe["models"][0]["model"] = str(named)
    loaded = load_recipe(recipe)
    assert loaded.models[0].path == named
    assert not any("revision" in note for note in loaded.notes)


@pytest.mark.parametrize("method", ["task_arithmetic", "linear"])
def test_an_architecture_that_is_put_in_place_of_a_models_own(
    pool: PoolOnDisk, tmp_path: Path, method: str
) -> None:
    """All models have it, else mergekit stops; here it is that of the configuration's model."""
    recipe = pool.recipe(method)
    named = {"override_architecture": "MistralForCausalLM"}
    recipe["base_model"] = {"model": recipe["base_model"], **named}
    for model in recipe["models"]:
        model["model"] = {"model": {"path": model["model"]}, **named}
    if method == "linear":
        del recipe["base_model"]
    agree(*both(pool, recipe, tmp_path), ulps=2)
    ours, theirs = (
        json.loads((tmp_path / out / "config.json").read_text()) for out in ("ours", "theirs")
    )
    assert ours["architectures"] == theirs["architectures"] == ["MistralForCausalLM"]
    assert any("config.json says Mistral" in note for note in load_recipe(recipe).notes)
    recipe["models"][0]["model"]["override_architecture"] = 7
    with pytest.raises(RecipeError, match="override_architecture is the name of an architecture"):
        load_recipe(recipe)


def test_an_architecture_that_one_model_alone_is_given(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    file = pool.experts["math"] / "config.json"
    file.write_text(file.read_text().replace("LlamaForCausalLM", "MistralForCausalLM"))
    recipe = pool.recipe("task_arithmetic")
    first = recipe["models"][0]
    first["model"] = {"model": first["model"], "override_architecture": "LlamaForCausalLM"}
    agree(*both(pool, recipe, tmp_path), ulps=2)
    (told,) = [note for note in load_recipe(recipe).notes if "override" in note]
    assert "not compared" in told and "config.json" not in told


TAKEN: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "density above 1": (
        "ties", {}, {"density": (1.5, 0.5, 1)},
        "models[0].parameters.density: 1.5 keeps all, as 1 does",
    ),
    "a gradient that runs above 1": (
        "ties", {}, {"density": ([0.4, 1.6], 0.5, 1)},
        "models[0].parameters.density[1]: 1.6 keeps all, as 1 does",
    ),
    "a density for all": (
        "breadcrumbs", {"density": 3}, {}, "parameters.density: 3 keeps all, as 1 does",
    ),
    "density below 0": (
        "ties", {}, {"density": (-0.5, 0.5, 1)},
        "models[0].parameters.density: -0.5 keeps none, as 0 does",
    ),
    "a gradient that runs below 0": (
        "breadcrumbs", {"density": [-0.6, 0.8]}, {},
        "parameters.density[0]: -0.6 keeps none, as 0 does",
    ),
    "density below 0 of a drawn rank": (
        "della", {"density": -0.5}, {}, "parameters.density: -0.5 keeps none, as 0 does",
    ),
    "true as a weight": (
        "task_arithmetic", {}, {"weight": (True, False, 0.5)},
        "models[0].parameters.weight: true is read as 1",
    ),
    "a gradient of truths": (
        "task_arithmetic", {"lambda": [True, False]}, {},
        "parameters.lambda[1]: false is read as 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_what_mergekit_takes_as_something_else_is_taken_so_with_a_note(
    pool: PoolOnDisk, tmp_path: Path, case: str
) -> None:
    method, parameters, each, note = TAKEN[case]
    recipe = pool.recipe(method, parameters, each=each)
    agree(*both(pool, recipe, tmp_path), ulps=4)
    assert note in load_recipe(recipe).notes
    with pytest.raises(RecipeError, match=r"must lie between 0 and 1|must be a number"):
        load_recipe(recipe, strict=True)
    with pytest.raises(RecipeError, match=r"must lie between 0 and 1|must be a number"):
        load_recipe({**recipe, "preset": "mergekit"})


@pytest.mark.parametrize("ranges", [[(0, 1), (1, 1), (1, 2)], [(1, 1), (0, 2)], [(0, 2), (9, 9)]])
def test_an_empty_slice_adds_no_layer(
    pool: PoolOnDisk, tmp_path: Path, ranges: list[tuple[int, int]]
) -> None:
    """The first slice gives what lies before the layers and the last what lies behind, empty or
    not."""
    models = [str(model) for model in pool.experts.values()]
    slices = [
        {"sources": [{"model": model, "layer_range": list(layers)}]}
        for model, layers in zip(models, ranges, strict=False)
    ]
    recipe = {"merge_method": "passthrough", "slices": slices, "dtype": "float32"}
    identical(*both(pool, recipe, tmp_path))
    assert any("holds no layer, and adds none" in note for note in load_recipe(recipe).notes)
    with pytest.raises(RecipeError, match="holds no layer"):
        load_recipe(recipe, strict=True)


def test_weights_that_sum_to_zero_are_refused_where_mergekit_divides_by_it(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    recipe = pool.recipe("linear", weight=(1, -1, 0))
    del recipe["base_model"]
    with pytest.raises(RecipeError, match=r"sum to zero .* give others, or normalize: false"):
        sigmerge.merge(recipe, tmp_path / "ours")
    run_mergekit(recipe, tmp_path / "theirs")
    theirs = read_weights(tmp_path / "theirs")
    assert not any(np.isfinite(values).any() for values in theirs.values())


@pytest.mark.parametrize(
    ("given", "note"),
    [
        ({"tokens": {"w3": {"source": {"kind": "zero", "note": 1}, "note": 2, "force": True}}},
         "tokenizer.tokens.w3.note: passed over"),
        ({"pad_to_multiple_of": 0}, "tokenizer.pad_to_multiple_of: 0 adds no rows"),
    ],
)  # fmt: skip
def test_what_mergekit_passes_over_in_a_tokenizer(
    pool: PoolOnDisk, tmp_path: Path, given: dict[str, Any], note: str
) -> None:
    recipe = pool.recipe("linear", dtype="float32") | {"tokenizer": {"source": "base", **given}}
    recipe["models"].append({"model": recipe["base_model"], "parameters": {"weight": 1}})
    agree(*both(pool, recipe, tmp_path), ulps=4)
    assert any(one.startswith(note) for one in load_recipe(recipe).notes)
    with pytest.raises(RecipeError, match=r"note|must be 1 or more"):
        load_recipe(recipe, strict=True)


@pytest.mark.parametrize("module", [False, True])
def test_an_empty_list_is_no_value_and_lists_no_model(
    pool: PoolOnDisk, tmp_path: Path, module: bool
) -> None:
    math, reference = str(pool.experts["math"]), str(pool.reference)
    sources = [{"model": model, "layer_range": [0, 3], "name": 1, "parameters": {"density": []}}
               for model in (math, reference)]  # fmt: skip
    merged = {"models": [], "slices": [{"sources": sources}], "parameters": {"density": []}}
    recipe = {"merge_method": "ties", "base_model": reference, "dtype": "float32"}
    recipe |= {"modules": {"default": merged}} if module else merged
    recipe["parameters"] = {"weight": 1, "density": 0.3}
    agree(*both(pool, recipe, tmp_path), ulps=4)
    assert any("is empty, and slices: says" in note for note in load_recipe(recipe).notes)


def test_numbers_and_truth_values_may_be_texts(pool: PoolOnDisk, tmp_path: Path) -> None:
    math = str(pool.experts["math"])
    recipe = {
        "merge_method": "passthrough", "models": None, "dtype": "float32", "base_model": math,
        "slices": [{"sources": [{"model": math, "layer_range": ["0", "2"]}]}],
        "tokenizer": {"source": "base", "pad_to_multiple_of": "8",
                      "tokens": {"w3": {"source": {"kind": "zero"}, "force": "yes"}}},
    }  # fmt: skip
    identical(*both(pool, recipe, tmp_path))


# Precision.


@pytest.mark.parametrize(
    "dtypes",
    [
        {"dtype": "float32", "out_dtype": "float16"},
        {"dtype": "torch.float32"},
        {"dtype": None, "out_dtype": "bfloat16"},
        {"dtype": None},
    ],
)
def test_dtypes(pool: PoolOnDisk, tmp_path: Path, dtypes: dict[str, Any]) -> None:
    recipe = pool.recipe("ties", None, each={"density": (0.2, 0.5, 0.8)}) | dtypes
    identical(*both(pool, recipe, tmp_path))


def test_a_dtype_that_we_do_not_write(pool: PoolOnDisk) -> None:
    with pytest.raises(RecipeError, match=r"dtype: must be .* not 'float64'"):
        load_recipe(pool.recipe("ties", dtype="float64"))


# Tokenizers.


@pytest.mark.parametrize(
    "chosen",
    [
        {"tokenizer_source": "base"},
        {"tokenizer_source": "union"},
        {"tokenizer_source": "{math}"},
        {"tokenizer": {"source": "base"}},
        {"tokenizer": {"source": "{math}"}},
        {"tokenizer": None, "chat_template": None, "slices": None, "modules": None},
    ],
)
def test_equal_tokenizers_leave_the_embeddings_alone(
    pool: PoolOnDisk, tmp_path: Path, chosen: dict[str, Any]
) -> None:
    text = yaml.safe_dump(pool.recipe("task_arithmetic", dtype="float32") | chosen)
    identical(*both(pool, text.replace("{math}", str(pool.experts["math"])), tmp_path))


def test_a_model_without_a_tokenizer_is_taken_to_have_the_same(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    write_tokenizer(pool.reference)
    assert load_recipe(pool.recipe("ties", tokenizer_source="base")).tokenizer == pool.reference
