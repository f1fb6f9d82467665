"""What a user is told where the input is not what it seems, or a setting does nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sigmerge
from sigmerge import progress
from sigmerge.checkpoints import companions
from sigmerge.checkpoints.companions import vocabulary
from sigmerge.errors import OutputError, PoolError, RecipeError, SigmergeError
from sigmerge.recipe import load_recipe
from tests.command_line import refused
from tests.command_line import sigmerge as command
from tests.pools import PoolOnDisk, make_pool, read_weights, write_member, write_tokenizer


@pytest.fixture
def pool(tmp_path: Path) -> PoolOnDisk:
    return make_pool(tmp_path / "pool", experts=2)


def notes(recipe: dict[str, Any], out: Path) -> str:
    return " | ".join(sigmerge.merge(recipe, out).plan.warnings)


@pytest.mark.parametrize("threads", [0, -1])
def test_fewer_than_one_thread(pool: PoolOnDisk, tmp_path: Path, threads: int) -> None:
    with pytest.raises(SigmergeError, match=f"threads: {threads} is too few"):
        sigmerge.merge(pool.recipe("linear"), tmp_path / "out", threads=threads)


def test_an_adapter_is_called_one(pool: PoolOnDisk, tmp_path: Path) -> None:
    folder = pool.experts["math"]
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(PoolError, match="math: is an adapter; write its model before it"):
        sigmerge.merge(pool.recipe("ties"), tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        ("<!doctype html><html></html>", "is a web page"),
        ("\n<html></html>", "is a web page"),
        ('{"error": "Repository not found"}', "is a text, not weights"),
    ],
)
def test_what_is_no_weights(pool: PoolOnDisk, tmp_path: Path, content: str, words: str) -> None:
    (pool.experts["math"] / "model.safetensors").write_text(content)
    with pytest.raises(PoolError, match=words):
        sigmerge.merge(pool.recipe("ties"), tmp_path / "out")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_pointer_or_a_page_in_place_of_a_document(
    pool: PoolOnDisk, tmp_path: Path, file: str
) -> None:
    recipe = pool.recipe("ties", tokenizer_source="union")
    for folder in (pool.reference, *pool.experts.values()):
        write_tokenizer(folder)
    for content, words in (("version https://git-lfs.github.com/spec/v1\n", "run `git lfs pull`"),
                           ("<html></html>", "is a web page")):  # fmt: skip
        (pool.experts["math"] / file).write_text(content)
        with pytest.raises(PoolError, match=words):
            sigmerge.merge(recipe, tmp_path / "out")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model"])
def test_a_pointer_in_place_of_the_tokenizer_that_is_taken(
    pool: PoolOnDisk, tmp_path: Path, file: str
) -> None:
    recipe = pool.recipe("linear")
    (pool.experts["math"] / file).write_text("version https://git-lfs.github.com/spec/v1\n")
    sigmerge.merge.plan(recipe, tmp_path / "out")  # nobody reads that of an expert
    del recipe["base_model"]
    with pytest.raises(PoolError, match=rf"{file}: is a Git LFS pointer; run `git lfs pull`"):
        sigmerge.merge.plan(recipe, tmp_path / "out")
    recipe = {
        **pool.recipe("linear"),
        "merge_method": "checkpoint",
        "repair": {"shares": {"math": 1}, "capacity": 0.5},
    }
    recipe["anchor"] = str(pool.experts["math"])
    with pytest.raises(PoolError, match="is a Git LFS pointer"):
        sigmerge.merge.plan(recipe, tmp_path / "out")


def test_another_depth_is_one_line(pool: PoolOnDisk, tmp_path: Path) -> None:
    deeper = make_pool(tmp_path / "deeper", experts=1, layers=5)
    recipe = pool.recipe("ties")
    recipe["models"][1]["model"] = str(deeper.experts["math"])
    recipe["models"][1]["name"] = "deep"
    with pytest.raises(PoolError) as error:
        sigmerge.merge(recipe, tmp_path / "out")
    (problem,) = error.value.problems
    assert problem.startswith("deep: 5 layers, the reference has 2; say with slices:")


def test_one_reason_is_told_once(pool: PoolOnDisk, tmp_path: Path) -> None:
    weights = read_weights(pool.experts["math"])
    short = {n: v[:15] if n.endswith("layernorm.weight") else v for n, v in weights.items()}
    recipe = pool.recipe("ties")
    recipe["models"][0]["model"] = str(write_member(tmp_path / "short", short))
    with pytest.raises(PoolError) as error:
        sigmerge.merge(recipe, tmp_path / "out")
    (problem,) = error.value.problems
    assert "layernorm.weight and 3 more tensors: shape [15], the reference has [16]" in problem


def test_the_result_may_not_lie_in_an_input(pool: PoolOnDisk) -> None:
    with pytest.raises(OutputError, match="lies inside an input"):
        sigmerge.merge(pool.recipe("ties"), pool.experts["math"] / "merged")


def test_the_reference_is_no_anchor(pool: PoolOnDisk, tmp_path: Path) -> None:
    section = {"shares": {"math": 0.6, "coding": 0.4}, "capacity": 0.1}
    recipe = pool.recipe("ties", repair=section)
    with pytest.raises(PoolError, match="is the reference itself"):
        sigmerge.repair(recipe, tmp_path / "out", anchor=pool.reference)


def test_a_negative_scale_is_refused(pool: PoolOnDisk) -> None:
    with pytest.raises(RecipeError, match=r"repair\.scale: must be greater than or equal to 0"):
        load_recipe(pool.recipe("ties", repair={"scores": "s.json", "scale": -3.0}))


@pytest.mark.parametrize("name", ["", " ", "a/b", "a\nb", ".."])
def test_odd_names_of_experts(pool: PoolOnDisk, name: str) -> None:
    recipe = pool.recipe("ties")
    recipe["models"][0]["name"] = name
    with pytest.raises(RecipeError, match="cannot be the name of an expert"):
        load_recipe(recipe)


def test_filters_and_densities_that_do_nothing(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("ties", {"lambda": [{"filter": "mpl", "value": 2}, {"value": 1}]})
    recipe["models"][0]["parameters"]["density"] = 0
    told = notes(recipe, tmp_path / "out")
    assert "filter: mpl matches no tensor" in told and "density: 0 leaves nothing of math" in told
    recipe = pool.recipe("linear", weight=(0, 1.0))
    assert "weight: 0 leaves nothing of math" in notes(recipe, tmp_path / "soup")
    plain = pool.recipe("ties", {"lambda": [{"filter": "mlp", "value": 2}, {"value": 1}]})
    assert notes(plain, tmp_path / "plain") == ""


@pytest.mark.parametrize("name", ["mlp", "block_sparse_moe"])
def test_a_filter_calls_a_mixture_as_mergekit_does(name: str, tmp_path: Path) -> None:
    mixture = make_pool(tmp_path / "mixture", experts=2, style="moe")
    rules = [{"filter": name, "value": 0.0}, {"value": 0.5}]
    recipe = mixture.recipe("task_arithmetic", weight=(rules, rules))
    assert "filter" not in notes(recipe, tmp_path / "out")
    merged, reference = read_weights(tmp_path / "out"), read_weights(mixture.reference)
    for name in merged:
        same = np.array_equal(merged[name], reference[name])
        assert same == ("block_sparse_moe" in name), name


@pytest.mark.parametrize("last", [2, 1], ids=["whole models", "some layers"])
def test_a_filter_that_does_nothing_in_slices(pool: PoolOnDisk, tmp_path: Path, last: int) -> None:
    """Most recipes of slerp have slices."""
    sources = [{"model": str(folder), "layer_range": [0, last]}
               for folder in (pool.reference, pool.experts["math"])]  # fmt: skip
    t = [{"filter": "self_attn", "value": [0, 1]}, {"filter": "mpl", "value": 0.2}, {"value": 0.5}]
    recipe = {
        "merge_method": "slerp", "base_model": str(pool.reference), "parameters": {"t": t},
        "slices": [{"sources": sources}],
    }  # fmt: skip
    assert notes(recipe, tmp_path / "out") == "filter: mpl matches no tensor"


def test_the_base_of_an_arc_is_not_called_left_out(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("slerp", {"t": 0.5})
    recipe["models"] = [{"model": str(f)} for f in (pool.reference, pool.experts["math"])]
    assert load_recipe(recipe).notes == ()


def test_a_wrong_key_is_told_once(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("ties")
    recipe["models"][0]["model"] = ["math"]
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe)
    (problem,) = error.value.problems
    assert problem.startswith("models[0].model: must be a valid string")


def test_a_weight_without_a_fallback_is_missing(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("ties")
    recipe["models"][0]["parameters"]["weight"] = [{"filter": "mlp", "value": 0.5}]
    with pytest.raises(RecipeError, match=r"weight is missing for 15 tensors \(lm_head.weight, …"):
        sigmerge.merge(recipe, tmp_path / "out")


def test_the_card_names_what_was_merged(pool: PoolOnDisk, tmp_path: Path) -> None:
    cached = tmp_path / "models--owner--tuned/snapshots/abc"
    cached.parent.mkdir(parents=True)
    pool.experts["math"].rename(cached)
    recipe = pool.recipe("ties")
    recipe["models"][0] |= {"model": str(cached), "name": "math"}
    sigmerge.merge(recipe, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "base_model:\n- owner/tuned\nbase_model_relation: merge\n" in card  # the hub's alone


def test_an_empty_section_is_noted(pool: PoolOnDisk) -> None:
    notes = load_recipe({**pool.recipe("ties"), "repair": None}).notes
    assert "repair: is empty, and does nothing" in notes


def test_experts_with_the_same_weights_are_noted(pool: PoolOnDisk, tmp_path: Path) -> None:
    shutil.copytree(pool.experts["math"], tmp_path / "twin")
    recipe = pool.recipe("task_arithmetic")
    recipe["models"].append({"model": str(tmp_path / "twin"), "parameters": {"weight": 0.1}})
    made = sigmerge.merge(recipe, tmp_path / "out")
    assert made.warnings == ("math and twin hold the same weights",)


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--scale", "-3", "- --scale: must be greater than or equal to 0"),
        ("--c-min", "3", "- --c-min: must be less than or equal to 1"),
        ("--c-min", "0.9", "- --c-min: c_min 0.9 exceeds c_max 0.45"),
    ],
)
def test_a_wrong_flag_is_not_a_line_of_the_recipe(
    pool: PoolOnDisk, flag: str, value: str, told: str
) -> None:
    recipe = pool.write(pool.recipe("ties", repair={"shares": {"math": 1}, "capacity": 0.1}))
    ran = command("merge", recipe, pool.root / "out", flag, value)
    assert ran.code == 2 and told in ran.err and "line" not in ran.err


@pytest.mark.parametrize("count", [1, 3])
def test_a_probe_needs_prompts_that_differ(pool: PoolOnDisk, count: int) -> None:
    (pool.root / "probe.jsonl").write_text('{"prompt": "w3 w4"}\n' * count)
    recipe = pool.recipe("ties", repair={"probe": "probe.jsonl"})
    with pytest.raises(RecipeError, match="all of these are the same"):
        sigmerge.profile(pool.write(recipe))


@pytest.mark.parametrize(
    ("code", "section", "told"),
    [
        (2, {"probe": "blank.jsonl"}, "blank.jsonl, line 2: its prompt is empty"),
        (3, {"probe": "probe.jsonl"}, "coding: 2 tokens differ from those of reference"),
        (5, {"scores": None, "evaluate": {"suite": "nano"}}, "safety: no expert has this name"),
        (5, {"scores": None, "command": "no-program {checkpoint}"}, "no such program on PATH"),
    ],
)
def test_what_a_repair_lacks_is_told_before_the_merge(
    pool: PoolOnDisk, code: int, section: dict[str, Any], told: str
) -> None:
    for folder in (pool.reference, *pool.experts.values()):
        write_tokenizer(folder)
    words = json.loads((pool.experts["coding"] / "tokenizer.json").read_text())
    words["model"]["vocab"] |= {"w5": 6, "w6": 5}
    (pool.experts["coding"] / "tokenizer.json").write_text(json.dumps(words))
    for name, prompts in (("probe", ["w3", "w4"]), ("blank", ["w3", "", "w4"])):
        lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
        (pool.root / f"{name}.jsonl").write_text("\n".join(lines))
    own = {e: dict.fromkeys(pool.experts, 1.0) for e in pool.experts}
    scores = {"experts": own, "anchor": dict.fromkeys(pool.experts, 0.5)}
    (pool.root / "scores.json").write_text(json.dumps(scores))
    given = {k: v for k, v in ({"scores": "scores.json"} | section).items() if v is not None}
    recipe = pool.write(pool.recipe("linear", repair=given))
    assert told in refused(code, "merge", recipe, pool.root / "out", beside=pool.root)


def test_tokens_that_change_places_are_noted(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (pool.reference, *pool.experts.values()):
        write_tokenizer(folder)
    plain = pool.recipe("linear")
    assert "other tokens" not in notes(plain, tmp_path / "same")
    file = pool.experts["coding"] / "tokenizer.json"
    words = json.loads(file.read_text())
    words["model"]["vocab"] |= {"w5": 6, "w6": 5}
    file.write_text(json.dumps(words))
    read = []
    monkeypatch.setattr(companions, "vocabulary", lambda f: read.append(f) or vocabulary(f))
    told = (
        "coding: its tokenizer has other tokens than reference's under 2 ids (5 is 'w6' here, 'w5'"
    )
    assert told in notes(plain, tmp_path / "by id")
    assert told in notes(plain, tmp_path / "by id again")
    assert len(read) == 2  # of four members, and two merges: it takes a second each
    by_token = pool.recipe("linear", tokenizer_source=str(pool.experts["math"]))
    assert "other tokens" not in notes(by_token, tmp_path / "by token")


def test_a_dry_run_looks_at_the_disk(pool: PoolOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        full = type(shutil.disk_usage("/"))(10**6, 10**6, 0)
        patch.setattr(shutil, "disk_usage", lambda path: full)
        with pytest.raises(OutputError, match=r"needs .* the disk has 0 B free"):
            sigmerge.merge.plan(pool.recipe("ties"), pool.root / "out")


def test_a_full_disk_leaves_nothing(pool: PoolOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    full = type(shutil.disk_usage("/"))(10**6, 10**6, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(OutputError, match="the disk has 0 B free"):
        sigmerge.merge(pool.recipe("ties"), pool.root / "out")
    assert not (pool.root / ".out.partial").exists()


def test_what_an_error_leaves_is_named(pool: PoolOnDisk, tmp_path: Path) -> None:
    weights = read_weights(pool.experts["math"])
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = np.nan
    broken = write_member(tmp_path / "broken", weights)
    recipe = pool.recipe("task_arithmetic")
    recipe["models"][0]["model"] = str(broken)
    with pytest.raises(PoolError, match=r"kept in \.out\.partial beside it"):
        sigmerge.merge(recipe, tmp_path / "out", threads=1)
    assert (tmp_path / ".out.partial").is_dir()
    weights["lm_head.weight"][0, 0] = np.nan
    recipe["models"][0]["model"] = str(write_member(tmp_path / "all-broken", weights))
    with pytest.raises(PoolError, match=r"pass --allow-nonfinite\.$"):
        sigmerge.merge(recipe, tmp_path / "nothing", threads=1)
    assert not (tmp_path / ".nothing.partial").exists()


def test_progress_where_no_bar_can_be_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line a minute, and one where a long stage ends."""
    clock = iter([0.0, 10.0, 61.0, 62.0, 63.0, 64.0])
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    with progress.shown() as update:
        for done in (1, 2, 3):
            update("merging", done, 3)
        for done in (1, 2):
            update("hashing", done, 2)
    assert capsys.readouterr().err == "merging: 2/3\nmerging: 3/3\n"
