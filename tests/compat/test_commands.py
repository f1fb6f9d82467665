"""mergekit's other command lines and its names in memory, beside mergekit itself."""

from __future__ import annotations

import ast
import json
import shlex
import sys
import tomllib
from importlib import import_module
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from sigmerge.cli.mergekits import mergekit
from sigmerge.compat.mergekit import (
    MergeConfiguration,
    MergeOptions,
    merge_state_dicts,
    merge_tensors,
    run_merge,
)
from sigmerge.compat.recipes import of_genome
from sigmerge.errors import RecipeError
from sigmerge.recipe import load_recipe
from tests.command_line import Ran
from tests.command_line import sigmerge as command
from tests.pools import PoolOnDisk, make_pool, read_weights, weight_bytes

SCRIPTS = {
    "yaml": "run_yaml",
    "multi": "multimerge",
    "moe": "moe",
    "pytorch": "merge_raw_pytorch",
    "evolve": "evolve",
    "extract-lora": "extract_lora",
    "layershuffle": "layershuffle",
    "bakllama": "bakllama",
    "legacy": "legacy",
    "tokensurgeon": "tokensurgeon",
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("pool"), layers=4, tokenizer=True)


def called(*words: str | Path) -> Ran:
    ran = command("mergekit", *words)
    assert ran.code == 0, ran.err
    return ran


def options_of(module: str) -> set[str]:
    """The options of a script; by its text where it cannot be imported without vLLM."""
    if not module.endswith(".evolve"):
        listed = (p for p in import_module(module).main.params if isinstance(p, click.Option))
        return {flag for p in listed for flag in (*p.opts, *p.secondary_opts)}
    found = find_spec(module)
    assert found is not None and found.origin is not None
    nodes = ast.walk(ast.parse(Path(found.origin).read_text()))
    calls = (n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "click.option")
    words = (a.value for c in calls for a in c.args if isinstance(a, ast.Constant))
    return {flag for word in words for flag in str(word).split("/") if flag.startswith("-")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_option_of_mergekits_is_taken(name: str) -> None:
    theirs = options_of(f"mergekit.scripts.{SCRIPTS[name]}")
    made = mergekit.commands[name]
    ours = {o for p in made.get_params(click.Context(made)) for o in (*p.opts, *p.secondary_opts)}
    assert theirs and theirs - ours == set()


PACKAGE = Path(__file__).parents[2] / "packages/sigmerge-mergekit"
MISSING: set[str] = set()
"""What is not mapped."""


def test_the_package_has_mergekits_commands(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["scripts"]
    theirs = {e.name for e in distribution("mergekit").entry_points if e.group == "console_scripts"}
    assert declared.keys() == theirs - MISSING
    assert {name.removeprefix("mergekit-") for name in declared} == set(mergekit.commands)
    file = tmp_path / "config.yml"
    models = [{"model": str(folder)} for folder in pool.experts.values()]
    parameters = {"weight": 1.0}
    content = {"merge_method": "linear", "models": models, "parameters": parameters}
    file.write_text(yaml.safe_dump(content))
    monkeypatch.setattr(sys, "path", [str(PACKAGE / "src"), *sys.path])
    words = ["/usr/bin/mergekit-yaml", str(file), str(tmp_path / "out"), "--quiet"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        import_module("sigmerge_mergekit").command()
    assert ended.value.code == 0 and (tmp_path / "out/mergekit_config.yml").exists()


def test_our_verbs_answer_mergekits_options() -> None:
    def answered(*words: str) -> str:
        ran = command("merge", "recipe.yaml", "out", *words)
        assert ran.code == 2
        return ran.err

    assert "--cuda is mergekit's; here it is --device cuda." in answered("--cuda")
    assert "here it is --max-shard-size 5GB" in answered("--out-shard-size", "5B")
    assert "--copy-tokenizer is mergekit's, and not needed: the tok" in answered("--copy-tokenizer")
    assert "Did you mean" in answered("--treads") or "No such option" in answered("--treads")


def test_multi(pool: PoolOnDisk, tmp_path: Path) -> None:
    one, other = list(pool.experts.values())[:2]
    half = {"merge_method": "linear", "name": "half"}
    half["models"] = [{"model": str(one), "parameters": {"weight": w}} for w in (1,)]
    last = {"merge_method": "linear", "models": [
        {"model": "half", "parameters": {"weight": 0.5}},
        {"model": str(other), "parameters": {"weight": 0.5}}]}  # fmt: skip
    file = tmp_path / "several.yml"
    file.write_text(yaml.safe_dump_all([half, last]))
    words = ("multi", file, "--out-path", tmp_path / "out", "-I", tmp_path / "between")
    called(*words, "--no-lazy", "--quiet", "--cuda" if torch.cuda.is_available() else "--no-cuda")
    ours = read_weights(tmp_path / "out")
    a, b = read_weights(one), read_weights(other)
    for name, values in ours.items():
        np.testing.assert_allclose(values, (a[name] + b[name]) / 2, rtol=1e-5, atol=1e-7)
    assert (tmp_path / "between/half/config.json").is_file()
    ran = command("mergekit", "multi", file, "-I", tmp_path / "between")
    assert ran.code == 2 and "--out-path: is missing" in ran.err


def test_moe(pool: PoolOnDisk, tmp_path: Path) -> None:
    experts = [{"source_model": str(f), "positive_prompts": [f"w{3 + i}"]}
               for i, f in enumerate(list(pool.experts.values())[:2])]  # fmt: skip
    content = {"base_model": str(pool.reference), "gate_mode": "random", "experts": experts}
    file = tmp_path / "moe.yml"
    file.write_text(yaml.safe_dump(content))
    ran = called("moe", file, tmp_path / "out", "--load-in-4bit", "--random-seed", "5", "-v")
    assert "load-in-4bit is not needed: one block of the base" in ran.err
    assert (tmp_path / "out/mergekit_moe_config.yml").read_text() == file.read_text()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == "mixtral" and config["num_local_experts"] == 2


@pytest.mark.parametrize("flag", ["--tensor-intersection", "-u"])
def test_pytorch(flag: str, tmp_path: Path) -> None:
    """A pickle and a safetensors file, of which each has a tensor of its own, beside mergekit."""
    torch.manual_seed(0)
    made = {n: {"conv.weight": torch.randn(4, 3, 2, 2), "conv.bias": torch.randn(4),
                n: torch.randn(3)} for n in ("one", "other")}  # fmt: skip
    torch.save(made["one"], tmp_path / "one.bin")
    save_file(made["other"], tmp_path / "other.safetensors")
    models = [{"model": str(tmp_path / n), "parameters": {"weight": w}}
              for n, w in (("one.bin", 0.25), ("other.safetensors", 0.5))]  # fmt: skip
    file = tmp_path / "files.yml"
    file.write_text(yaml.safe_dump({"merge_method": "linear", "models": models}))
    called("pytorch", file, tmp_path / "ours", flag, "--quiet")
    script = import_module("mergekit.scripts.merge_raw_pytorch").main
    script.main([str(file), str(tmp_path / "theirs"), flag], standalone_mode=False)
    ours, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and len(ours) == (4 if flag == "-u" else 2)
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values)
    assert "say tensors: intersection" in command("mergekit", "pytorch", file, tmp_path / "x").err


def test_evolve(pool: PoolOnDisk, tmp_path: Path) -> None:
    genome = {"models": list(map(str, pool.experts.values())), "merge_method": "ties",
              "base_model": str(pool.reference), "layer_granularity": 2}  # fmt: skip
    file = tmp_path / "genome.yml"
    file.write_text(yaml.safe_dump({"genome": genome, "tasks": [{"name": "spartqa_train"}]}))
    where = tmp_path / "storage"
    ran = command("mergekit", "evolve", file, "--storage-path", where, "--max-fevals", "12",
                  "--random-seed", "3", "--wandb", "-s", "pool")  # fmt: skip
    assert ran.code == 2 and "tasks (spartqa_train) name none" in ran.err
    assert "layer_granularity: not tuned here" in ran.err and "strategy is not needed" in ran.err
    found = load_recipe(where / "recipe.yaml")
    assert found.tune is not None and found.tune.calls == 12 and found.tune.anchors == ["ties"]
    assert found.seed == 3 and list(found.experts) == list(pool.experts)
    with pytest.raises(RecipeError, match="slerp has no weights"):
        of_genome({"genome": {**genome, "merge_method": "slerp"}}, 8, 0)


def test_extract_lora(pool: PoolOnDisk, tmp_path: Path) -> None:
    """The same products as mergekit's factors have; patterns choose the same modules."""
    names = ("--model", pool.experts["math"], "--base-model", pool.reference)
    flags = ("--max-rank", "4", "-e", "k_proj", "-e", "norm", "-e", "embed", "-e", "lm_head",
             "--save-module", "o_proj", "--no-distribute-scale")  # fmt: skip
    ran = called("extract-lora", *names, "--out-path", tmp_path / "ours", *flags)
    assert "distribute-scale/--no-distribute-scale is not needed" in ran.err
    script = import_module("mergekit.scripts.extract_lora").main
    words = [*map(str, names), "--out-path", str(tmp_path / "theirs"), *flags]
    script.main(words, standalone_mode=False)
    ours, theirs = (
        load_file(tmp_path / n / "adapter_model.safetensors") for n in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    low = [n.removesuffix("A.weight") for n in theirs if n.endswith("lora_A.weight")]
    assert low and not any("k_proj" in n for n in low)
    for name in low:
        products = [one[f"{name}B.weight"] @ one[f"{name}A.weight"] for one in (ours, theirs)]
        torch.testing.assert_close(*products, rtol=1e-4, atol=1e-5)
    whole = [n for n in theirs if "o_proj" in n]
    assert whole and all(torch.equal(ours[n], theirs[n]) for n in whole)
    few = called("extract-lora", *names, "--out-path", tmp_path / "few", "-i", "q_proj",
                 "--sv-epsilon", "0.1", "--skip-undecomposable", "-e", "embed|lm_head")  # fmt: skip
    stored = load_file(tmp_path / "few/adapter_model.safetensors")
    assert stored and all("q_proj" in name for name in stored), few.out
    place = "model.layers.0.self_attn.q_proj"
    tuned, base = (read_weights(f) for f in (pool.experts["math"], pool.reference))
    difference = tuned[f"{place}.weight"] - base[f"{place}.weight"]
    large = int((np.linalg.svd(difference, compute_uv=False) > 0.1).sum())
    assert 0 < large < 16 and stored[f"base_model.model.{place}.lora_A.weight"].shape[0] == large
    assert (
        "is no regular expression"
        in command("mergekit", "extract-lora", *names, "--out-path", tmp_path / "x", "-i", "(").err
    )


def test_layershuffle(pool: PoolOnDisk, tmp_path: Path) -> None:
    members = [str(folder) for folder in list(pool.experts.values())[:2]]
    models = [word for folder in members for word in ("-m", folder, "-w", "0.5")]
    file = tmp_path / "shuffle.yml"
    ran = called("layershuffle", tmp_path / "out", *models, "--write-yaml", file, "--print-yaml",
                 "--random-seed", "3", "--fp16")  # fmt: skip
    recipe = yaml.safe_load(file.read_text())
    assert recipe == yaml.safe_load(ran.out[: ran.out.index("\n\n")])
    sources = [piece["sources"][0] for piece in recipe["slices"]]
    layers = [i for s in sources for i in range(*s["layer_range"])]
    assert layers == [0, 1, 2, 3] and recipe["dtype"] == "float16"
    weights = {folder: read_weights(Path(folder)) for folder in members}
    made = read_weights(tmp_path / "out")
    for source in sources:
        for i in range(*source["layer_range"]):
            name = f"model.layers.{i}.mlp.up_proj.weight"
            own = weights[source["model"]][name].astype(np.float16)
            assert np.array_equal(made[name], own.astype(np.float32))
    called("layershuffle", tmp_path / "none", *models, "--full-random", "--dry-run")
    assert not (tmp_path / "none").exists()


def test_bakllama_and_legacy(pool: PoolOnDisk, tmp_path: Path) -> None:
    one, other = (str(folder) for folder in list(pool.experts.values())[:2])
    slices = [{"model": one, "start": 0, "end": 2},
              {"model": other, "start": 1, "end": 4, "scale": 0.5}]  # fmt: skip
    file = tmp_path / "layers.yml"
    file.write_text(yaml.safe_dump({"layer_slices": slices, "embedding_source": one}))
    called("bakllama", file, tmp_path / "stack", "--clone-tensors")
    made, own = read_weights(tmp_path / "stack"), read_weights(Path(other))
    down = own["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_allclose(made["model.layers.2.mlp.down_proj.weight"], down * 0.5)
    up = "model.layers.{}.mlp.up_proj.weight"
    assert np.array_equal(made[up.format(2)], own[up.format(1)])
    called("legacy", tmp_path / "ours", "--merge", one, "--merge", other, "--base-model",
           str(pool.reference), "--density", "0.5", "--weight", "0.6", "--int8-mask")  # fmt: skip
    models = [{"model": m, "parameters": {"density": 0.5, "weight": 0.6}} for m in (one, other)]
    recipe = {"merge_method": "ties", "base_model": str(pool.reference), "models": models,
              "parameters": {"normalize": True}}  # fmt: skip
    run_merge(recipe, tmp_path / "same")
    assert read_weights(tmp_path / "ours").keys() == read_weights(tmp_path / "same").keys()
    for name, values in read_weights(tmp_path / "same").items():
        assert np.array_equal(read_weights(tmp_path / "ours")[name], values)


METHODS: dict[str, dict[str, Any]] = {
    "linear": {"weight": [0.2, 0.3, 0.5]},
    "ties": {"density": 0.5, "weight": {"math": 1.0, "coding": 0.5}},
    "task_arithmetic": {"weight": {"math": 1.0, "coding": 0.5}},
    "nuslerp": {"weight": {"math": 0.7, "coding": 0.3}},
}


@pytest.mark.parametrize("method", METHODS)
def test_state_dicts_in_memory(method: str) -> None:
    """Every method by mergekit's arguments, beside mergekit's own function."""
    theirs = pytest.importorskip("mergekit.merge_methods.api")
    torch.manual_seed(0)
    names = ("base", "math", "coding")
    models = {n: {"one": torch.randn(6, 8), "two": torch.randn(8)} for n in names}
    if method == "nuslerp":
        del models["base"]
    base = None if method in ("linear", "nuslerp") else "base"
    given = {"parameters": METHODS[method], "base": base}
    ours = merge_state_dicts(models, method, **given)
    for name, values in theirs.merge_state_dicts(models, method, **given).items():
        torch.testing.assert_close(ours[name], values, rtol=1e-4, atol=1e-6)
    alone = merge_tensors(
        [m["two"] for m in models.values()], method, parameters=METHODS[method],
        ids=list(models), base_index=0 if base else None, out_dtype=torch.bfloat16,
    )  # fmt: skip
    assert torch.equal(alone, ours["two"].to(torch.bfloat16))


def test_modules_and_models_that_differ() -> None:
    modules = [torch.nn.Linear(3, 2) for _ in range(2)]
    made = merge_state_dicts(modules, "linear", parameters={"weight": [1.0, 3.0]})
    expected = (modules[0].weight + 3 * modules[1].weight) / 4
    torch.testing.assert_close(made["weight"], expected.detach(), rtol=1e-5, atol=1e-6)
    more = {**modules[1].state_dict(), "extra": torch.ones(1)}
    with pytest.raises(RecipeError, match="not all models have extra"):
        merge_state_dicts([modules[0], more], "linear")
    fewer = merge_state_dicts([modules[0], more], "linear", strict=False)
    assert list(fewer) == ["weight", "bias"]
    with pytest.raises(RecipeError, match="is none of the models"):
        merge_state_dicts(modules, "linear", base="x")


# Scripts in the style of public callers, which import these names alone.


def test_a_trainers_callback(pool: PoolOnDisk, tmp_path: Path) -> None:
    """A callback merges what was trained into its start, at the end of each epoch."""

    class MergeCallback:
        def __init__(self, method: str, weights: tuple[float, float]) -> None:
            self.method, self.weights = method, weights

        def on_epoch_end(self, policy: Path, target: Path, out: Path) -> None:
            content = {
                "merge_method": self.method,
                "dtype": "float16",
                "models": [
                    {"model": str(path), "parameters": {"weight": weight}}
                    for path, weight in zip((policy, target), self.weights, strict=True)
                ],
            }
            configuration = MergeConfiguration.model_validate(content)
            options = MergeOptions(cuda=False, copy_tokenizer=True, lazy_unpickle=False)
            run_merge(configuration, out_path=str(out), options=options)

    callback = MergeCallback("linear", (0.5, 0.5))
    for epoch in range(2):
        callback.on_epoch_end(pool.experts["math"], pool.reference, tmp_path / str(epoch))
    assert weight_bytes(tmp_path / "0") == weight_bytes(tmp_path / "1")


def test_a_starter_kits_driver(pool: PoolOnDisk, tmp_path: Path) -> None:
    """A driver reads YAML, sets a dtype, and merges into memory what it evaluates next."""
    text = yaml.safe_dump({
        "merge_method": "ties", "base_model": str(pool.reference),
        "models": [{"model": str(f), "parameters": {"density": 0.5, "weight": 0.5}}
                   for f in pool.experts.values()],
    })  # fmt: skip
    configuration = MergeConfiguration.model_validate(yaml.safe_load(text))
    configuration["dtype"] = "bfloat16"
    done = run_merge(configuration, str(tmp_path / "out"), options=MergeOptions(quiet=True))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
    assert done.out == str(tmp_path / "out")


def test_a_loop_of_evolution(pool: PoolOnDisk) -> None:
    """A loop draws weights, merges state dicts in memory, and keeps the fittest."""
    base = {n: torch.from_numpy(v) for n, v in read_weights(pool.reference).items()}
    experts = [{n: torch.from_numpy(v) for n, v in read_weights(f).items()}
               for f in list(pool.experts.values())[:2]]  # fmt: skip
    goal, draw = "model.layers.0.mlp.up_proj.weight", np.random.default_rng(0)

    def fitness(weights: np.ndarray[Any, Any]) -> float:
        models = {"base": base, "one": experts[0], "other": experts[1]}
        given = {"weight": {"one": float(weights[0]), "other": float(weights[1])}}
        made = merge_state_dicts(models, "task_arithmetic", base="base", parameters=given)
        return -float((made[goal] - experts[0][goal]).norm())

    best, value = np.array([0.5, 0.5]), fitness(np.array([0.5, 0.5]))
    for _ in range(3):
        tried = best + 0.3 * draw.standard_normal(2)
        if (found := fitness(tried)) > value:
            best, value = tried, found
    assert fitness(np.array([1.0, 0.0])) > value > -10


def test_cells_of_a_notebook(pool: PoolOnDisk, tmp_path: Path) -> None:
    """LazyMergekit's cells: a YAML text, a file, one shell line, and the result's files."""
    content = {
        "slices": [{"sources": [
            {"model": str(pool.experts["math"]), "layer_range": [0, 4]},
            {"model": str(pool.experts["coding"]), "layer_range": [0, 4]}]}],
        "merge_method": "slerp", "base_model": str(pool.experts["math"]),
        "parameters": {"t": [{"filter": "self_attn", "value": [0, 0.5, 1]}, {"value": 0.5}]},
        "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    line = "mergekit-yaml config.yaml merge --copy-tokenizer --allow-crimes --out-shard-size 1B "
    line += "--lazy-unpickle --trust-remote-code"
    words = shlex.split(line.replace("mergekit-yaml", "yaml"))
    words[1:3] = [str(tmp_path / word) for word in words[1:3]]
    called(*words)
    there = {file.name for file in (tmp_path / "merge").iterdir()}
    assert {"config.json", "tokenizer.json", "mergekit_config.yml", "README.md"} <= there
