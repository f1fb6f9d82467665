"""`sigmerge capture`, and merges with operators that read data, on a tiny Llama pool."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from click.testing import CliRunner  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

import sigmerge  # noqa: E402
from sigmerge import kept  # noqa: E402
from sigmerge.cli.ending import app  # noqa: E402
from sigmerge.errors import OutputError, PoolError, RecipeError  # noqa: E402
from sigmerge.jobs.anchor import is_current  # noqa: E402
from sigmerge.jobs.capture import CaptureJob, derivations, plan_captures  # noqa: E402
from sigmerge.jobs.dense import plan_dense  # noqa: E402
from sigmerge.jobs.options import Options  # noqa: E402
from sigmerge.jobs.pools import open_merge_pool  # noqa: E402
from sigmerge.kept import Undeclared  # noqa: E402
from sigmerge.probing import captures  # noqa: E402
from sigmerge.recipe import Recipe, load_recipe  # noqa: E402
from tests.oracles import oracle_features as oracle  # noqa: E402
from tests.oracles.oracle_mixtures import routed  # noqa: E402
from tests.pools import weight_bytes  # noqa: E402
from tests.probing import models  # noqa: E402


def planned(content: Any) -> list[dict[str, Any]]:
    """The captures of a dry run."""
    loaded = content if isinstance(content, Recipe) else load_recipe(content)
    return [step.as_json() for step in CaptureJob(loaded, Options()).describe().steps]


DATA = ("fisher", "regmean", "lot", "cat")
EXPERTS = ("math", "coding")


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any) -> Path:
    root: Path = tmp_path_factory.mktemp("pool")
    models.write_expert(root / "reference")
    for seed, name in enumerate(EXPERTS, start=1):
        models.write_expert(root / name, seed=seed, near=root / "reference")
        models.write_exemplars(root / f"{name}.jsonl", seed, count=5)
    return root


@pytest.fixture
def pool(made: Path, tmp_path: Path) -> Path:
    """A pool of the test's own, so that no statistics lie beside it."""
    return Path(shutil.copytree(made, tmp_path / "pool"))


def recipe(pool: Path, method: str, **top: Any) -> dict[str, Any]:
    listed = [
        {"model": str(pool / name), "name": name, "exemplars": str(pool / f"{name}.jsonl")}
        for name in EXPERTS
    ]
    return {"merge_method": method, "base_model": str(pool / "reference"), "models": listed, **top}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*.safetensors")}


def test_statistics_of_an_expert_that_changes_meanwhile_are_not_kept(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(*given: Any) -> dict[str, Any]:
        told = captured(*given)
        file = pool / "math/tokenizer_config.json"
        file.write_text(file.read_text() + " ")
        return told

    captured = captures._captured
    monkeypatch.setattr(captures, "_captured", changing)
    with pytest.raises(PoolError, match=r"math/tokenizer_config\.json: changed while it was read"):
        sigmerge.capture(recipe(pool, "regmean"), experts=["math"])
    assert not list((pool / ".sigmerge").rglob("*.json*"))


@pytest.mark.parametrize("method", DATA)
def test_merge_captures_by_itself_and_reuses_what_is_there(
    pool: Path, tmp_path: Path, method: str
) -> None:
    content = recipe(pool, method)
    sigmerge.merge(content, tmp_path / "one", threads=1)
    kept = sorted((pool / ".sigmerge").rglob("*.safetensors"))
    times = [file.stat().st_mtime_ns for file in kept]
    sigmerge.merge(content, tmp_path / "two", threads=3)
    assert len(kept) == 2 * 4
    assert [file.stat().st_mtime_ns for file in kept] == times
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    plan = json.loads((tmp_path / "one/sigmerge/plan.json").read_text())
    assert plan["capture"]["exemplars"] == {"math": 5, "coding": 5}
    noted = plan["tensors"].get("model.layers.0.self_attn.q_proj.weight", {})
    assert set(noted) == {"regmean": {"solver", "condition"}, "lot": {"rank", "of"},
                          "cat": {"rank"}, "fisher": set()}[method]  # fmt: skip
    inputs = json.loads((tmp_path / "one/sigmerge/provenance.json").read_text())["inputs"]
    assert str(pool / "math.jsonl") in {entry["file"] for entry in inputs}


def test_regmean_of_a_checkpoint_equals_the_oracle(pool: Path, tmp_path: Path) -> None:
    """End to end: features of each expert on its own exemplars, by hooks of this test."""
    sigmerge.merge(recipe(pool, "regmean"), tmp_path / "out")
    name, weights, features = "model.layers.1.mlp.up_proj", [], []
    for expert in EXPERTS:
        model, rows = models.load(pool / expert), []
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, rows=rows: rows.append(args[0][0].double().numpy())
        )
        for line in (pool / f"{expert}.jsonl").read_text().splitlines():
            words = " ".join(json.loads(line).values()).split()
            with torch.no_grad():
                model(input_ids=torch.tensor([[models.WORDS.index(w) + 3 for w in words]]))
        weights.append(model.get_submodule(name).weight.detach().double().numpy())
        features.append(np.concatenate(rows))
    merged = load_file(tmp_path / "out/model.safetensors")[f"{name}.weight"]
    wanted = oracle.regmean(weights, features, 0.9)
    np.testing.assert_allclose(merged, wanted, rtol=1e-4, atol=1e-5)


def test_capture_split_over_two_machines_equals_one(pool: Path, tmp_path: Path) -> None:
    sigmerge.capture(recipe(pool, "lot"), out=tmp_path / "whole")
    both = tmp_path / "both"
    for expert in EXPERTS:  # the second machine has the pool somewhere else, in another order
        away = Path(shutil.copytree(pool, tmp_path / f"machine-{expert}"))
        content = recipe(away, "cat")
        content["models"].reverse()
        sigmerge.capture(content, experts=[expert], out=tmp_path / f"from-{expert}")
        shutil.copytree(tmp_path / f"from-{expert}", both, dirs_exist_ok=True)
    assert contents(tmp_path / "whole") == contents(both)
    sigmerge.merge(recipe(pool, "lot", capture={"folder": str(both)}), tmp_path / "a")
    sigmerge.merge(recipe(pool, "lot"), tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_statistics_belong_to_names_not_positions(pool: Path, tmp_path: Path) -> None:
    content = recipe(pool, "regmean")
    sigmerge.merge(content, tmp_path / "a")
    content["models"].reverse()
    sigmerge.merge(content, tmp_path / "b")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6)
    swapped = recipe(pool, "regmean")
    one, two = swapped["models"]
    one["exemplars"], two["exemplars"] = two["exemplars"], one["exemplars"]
    sigmerge.merge(swapped, tmp_path / "c")
    name = "model.layers.0.self_attn.q_proj.weight"
    c = load_file(tmp_path / "c/model.safetensors")
    assert not np.allclose(a[name], c[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("regmean", {"capture": {"labels": "data"}}),
        ("regmean", {"parameters": {"off_diagonal": 0.5}}),
        ("fisher", {"seed": 5}),
        ("fisher", {"capture": {"scale": 0.5}}),
    ],
)
def test_statistics_are_not_keyed_by_what_does_not_decide_them(
    pool: Path, method: str, change: dict[str, Any]
) -> None:
    assert keys(pool, method) == keys(pool, method, **change)


def keys(pool: Path, method: str, **top: Any) -> list[str]:
    loaded, options = load_recipe(recipe(pool, method, **top)), Options()
    opened, _ = open_merge_pool(loaded, options)
    wanted = derivations(plan_captures(loaded, opened, options), loaded, opened, options)
    return [one.full for one in wanted.values()]


def test_an_interrupted_merge_goes_on_with_its_notes(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = recipe(pool, "lot")
    sigmerge.merge(content, tmp_path / "whole")

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "merging":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sigmerge.merge(content, tmp_path / "parts", progress=stop)
    result = sigmerge.merge(content, tmp_path / "parts")
    assert len(result.provenance.blocks_resumed) == 1
    for name in ("model.safetensors", "sigmerge/plan.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("method", DATA)
def test_each_is_an_anchor_for_the_repair(pool: Path, tmp_path: Path, method: str) -> None:
    scores = {"experts": {"math": {"math": 0.9, "coding": 0.2}, "coding": {"math": 0.1,
              "coding": 0.8}}, "anchor": {"math": 0.5, "coding": 0.6}}  # fmt: skip
    (pool / "scores.json").write_text(json.dumps(scores))
    repair = {"scores": str(pool / "scores.json")}
    sigmerge.merge(recipe(pool, method, repair=repair), tmp_path / "out")
    plan = json.loads((tmp_path / "out/sigmerge/plan.json").read_text())
    assert plan["operator"] == method and sum(map(sum, plan["claimed"])) > 0


def test_lines_stands_on_them(pool: Path, tmp_path: Path) -> None:
    content = recipe(pool, "lines", parameters={"on": "lot", "alpha": 1.0, "beta": 0.0})
    sigmerge.merge(content, tmp_path / "lines")
    sigmerge.merge(recipe(pool, "lot"), tmp_path / "lot")
    assert contents(tmp_path / "lines") == contents(tmp_path / "lot")


def test_a_blend_stands_on_one_and_another(pool: Path, tmp_path: Path) -> None:
    """Half TSV, half RegMean in one recipe is the linear merge of the two that are stored."""
    options = {"on": ["tsv", "regmean"], "share": 0.5, "tsv.lambda": 1.3}
    made = recipe(pool, "blend", parameters=options)
    sigmerge.merge(made, tmp_path / "blend")
    sigmerge.merge(recipe(pool, "tsv", parameters={"lambda": 1.3}), tmp_path / "tsv")
    sigmerge.merge(recipe(pool, "regmean"), tmp_path / "regmean")
    found, tsv, regmean = (
        load_file(tmp_path / name / "model.safetensors") for name in ("blend", "tsv", "regmean")
    )
    for name, values in found.items():
        wanted = (tsv[name].astype(np.float64) + regmean[name]) / 2
        np.testing.assert_allclose(values, wanted, rtol=0, atol=2e-6)
    again = tmp_path / "blend/sigmerge/recipe.yaml"
    sigmerge.merge(again, tmp_path / "again", threads=3)
    assert contents(tmp_path / "again") == contents(tmp_path / "blend")


def family_pool(root: Path, family: str) -> Path:
    models.write_expert(root / "reference", family)
    for seed, name in enumerate(EXPERTS, start=1):
        models.write_expert(root / name, seed=seed, near=root / "reference")
        models.write_exemplars(root / f"{name}.jsonl", seed, count=9)
    return root


def test_regmean_of_gpt2_acts_on_the_first_dimension(tmp_path: Path) -> None:
    """Its weights are (in, out); end to end against the oracle, by hooks of this test."""
    pool = family_pool(tmp_path / "pool", "gpt2")
    sigmerge.merge(recipe(pool, "regmean"), tmp_path / "out")
    name, weights, features = "transformer.h.1.mlp.c_fc", [], []
    for expert in EXPERTS:
        model, rows = models.load(pool / expert), []
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, rows=rows: rows.append(args[0][0].double().numpy())
        )
        for line in (pool / f"{expert}.jsonl").read_text().splitlines():
            words = " ".join(json.loads(line).values()).split()
            with torch.no_grad():
                model(input_ids=torch.tensor([[models.WORDS.index(w) + 3 for w in words]]))
        weights.append(model.get_submodule(name).weight.detach().double().numpy().T)
        features.append(np.concatenate(rows))
    merged = load_file(tmp_path / "out/model.safetensors")[f"{name}.weight"]
    wanted = oracle.regmean(weights, features, 0.9).T
    assert merged.shape == (16, 64)
    np.testing.assert_allclose(merged, wanted, rtol=1e-4, atol=1e-4)
    plan = json.loads((tmp_path / "out/sigmerge/plan.json").read_text())
    assert plan["tensors"][f"{name}.weight"]["solver"] == "cholesky"
    assert not any("nothing was captured" in warning for warning in plan["warnings"])


def texts_of(file: Path) -> list[list[int]]:
    lines = [" ".join(json.loads(line).values()) for line in file.read_text().splitlines()]
    return [[models.WORDS.index(word) + 3 for word in line.split()] for line in lines]


def show_one_word(file: Path, word: str) -> None:
    """A text of one token: some experts of a mixture get none."""
    file.write_text(json.dumps({"prompt": word}) + "\n")


@pytest.mark.parametrize("family", list(models.MIXTURES))
def test_regmean_of_a_mixture_s_experts(family: str, tmp_path: Path) -> None:
    """Each matrix by the tokens that either expert's router sends to it: against the oracle."""
    pool = family_pool(tmp_path / "pool", family)
    sigmerge.merge(recipe(pool, "regmean"), tmp_path / "out")
    rows = [routed(pool / name, family, texts_of(pool / f"{name}.jsonl")) for name in EXPERTS]
    before = [load_file(pool / name / "model.safetensors") for name in EXPERTS]
    merged = load_file(tmp_path / "out/model.safetensors")
    assert len(rows[0]) == {"gpt_oss": 18, "mixtral": 27, "qwen3_moe": 36}[family]
    for name in rows[0]:
        stored, _, number = name.removesuffix("]").partition("[")
        weights = [every[stored].astype(np.float64) for every in (*before, merged)]
        if number:
            weights = [weight[int(number)].T for weight in weights]
        wanted = oracle.regmean(weights[:2], [seen[name] for seen in rows], 0.9)
        np.testing.assert_allclose(weights[2], wanted, rtol=1e-3, atol=1e-3)
        assert np.abs(wanted - (weights[0] + weights[1]) / 2).max() > 0.01


@pytest.mark.parametrize("method", ["regmean", "lot", "cat"])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_a_mixture_s_experts_that_no_token_reaches(
    family: str, method: str, tmp_path: Path
) -> None:
    """Reached by neither expert's text, a matrix is merged plainly, and one warning a kind of
    tensor says so."""
    pool = family_pool(tmp_path / "pool", family)
    for name in EXPERTS:
        show_one_word(pool / f"{name}.jsonl", "w7")
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(pool, method, parameters={"lambda": 1.0})))
    shown = CliRunner().invoke(app, ["merge", str(file), str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    plan = json.loads((tmp_path / "out/sigmerge/plan.json").read_text())
    router = {"mixtral": "block_sparse_moe.gate", "gpt_oss": "mlp.router"}[family]
    said = f"model.layers.*.{router}.weight (3 tensors): nothing was captured for it"
    assert f"warning: {said}" in shown.stdout
    missed = set(every_matrix(pool, family)).difference(
        *(routed(pool / name, family, [[10]]) for name in EXPERTS)
    )
    told = [warning.partition(" (")[0] for warning in plan["warnings"] if "experts" in warning]
    kinds = {
        "mixtral": ["*.w1.weight", "*.w2.weight", "*.w3.weight"],
        "gpt_oss": ["down_proj", "down_proj_bias", "gate_up_proj", "gate_up_proj_bias"],
    }
    block = router.partition(".")[0]
    assert sorted(told) == [f"model.layers.*.{block}.experts.{kind}" for kind in kinds[family]]
    assert missed
    folders = (pool / "reference", *(pool / name for name in EXPERTS), tmp_path / "out")
    base, *experts, merged = (load_file(f / "model.safetensors") for f in folders)
    for name in missed:
        stored, _, number = name.removesuffix("]").partition("[")
        at = int(number) if number else ...
        total = sum(expert[stored][at] for expert in experts)
        plain = total - base[stored][at] if method == "cat" else total / 2
        np.testing.assert_allclose(merged[stored][at], plain, rtol=1e-4, atol=1e-5)


def every_matrix(pool: Path, family: str) -> list[str]:
    """All that any of many texts reaches."""
    return list(routed(pool / "reference", family, [[i, i + 1, i + 2] for i in range(3, 20)]))


def test_an_expert_of_a_mixture_that_one_text_does_not_reach(tmp_path: Path) -> None:
    """Its Gram of zeros leaves the matrix to the other expert."""
    pool = family_pool(tmp_path / "pool", "mixtral")
    show_one_word(pool / "math.jsonl", "w7")
    sigmerge.merge(recipe(pool, "regmean"), tmp_path / "out")
    reached = routed(pool / "math", "mixtral", texts_of(pool / "math.jsonl"))
    theirs = load_file(pool / "coding/model.safetensors")
    merged = load_file(tmp_path / "out/model.safetensors")
    missed = [name for name in every_matrix(pool, "mixtral") if name not in reached]
    assert len(missed) == 9
    for name in missed:
        np.testing.assert_allclose(merged[name], theirs[name], rtol=1e-3, atol=1e-3)


def test_statistics_say_where_they_were_made(pool: Path, tmp_path: Path) -> None:
    [row, _] = sigmerge.capture(recipe(pool, "regmean"))
    made = json.loads(Path(f"{row.folder}.json").read_text())
    assert made["settings"]["device"] == "cpu" and made["value"]["tokens"] > 0
    assert {*made["runtime"]} == {"tokenizers", "torch", "transformers"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_there(pool: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(pool, "fisher")))
    shown = CliRunner().invoke(app, ["capture", str(file), "--device", "cuda"])
    assert isinstance(shown.exception, RecipeError)
    assert "cuda is set, and torch finds no GPU" in str(shown.exception)


def write_own_code(folder: Path) -> None:
    """A checkpoint whose architecture is its own Python file."""
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config |= {"model_type": "own", "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))


def test_code_of_a_checkpoint_runs_only_if_trusted(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in EXPERTS:
        write_own_code(pool / name)
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(pool, "regmean")))
    refused = CliRunner().invoke(app, ["capture", str(file)])
    assert isinstance(refused.exception, PoolError)
    assert "--trust-remote-code" in str(refused.exception)
    shown = CliRunner().invoke(app, ["capture", str(file), "--trust-remote-code"])
    assert "math: 5 exemplars, captured" in shown.stdout, shown.exception


def test_a_dry_run_says_what_would_be_captured(pool: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(pool, "regmean", capture={"limit": 4})))
    runner = CliRunner()
    shown = runner.invoke(app, ["merge", str(file), str(tmp_path / "out"), "--dry-run"])
    assert "capture math: 4 exemplars" in shown.stdout
    shown = runner.invoke(app, ["capture", str(file), "--dry-run"])
    assert "coding: 4 exemplars, to do" in shown.stdout
    assert "memory at most 60" in shown.stdout
    assert not (pool / ".sigmerge").exists()
    shown = runner.invoke(app, ["capture", str(file), "--expert", "math"])
    assert "math: 4 exemplars, captured" in shown.stdout and "coding" not in shown.stdout
    shown = runner.invoke(app, ["capture", str(file)])
    assert "math: 4 exemplars, there already" in shown.stdout


def folder_of(pool: Path, method: str = "regmean") -> Path:
    return Path(sigmerge.capture(recipe(pool, method))[0].folder)


def truncate(folder: Path) -> None:
    file = folder / "layer-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def flip(folder: Path) -> None:
    file = folder / "layer-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-8] + np.float64(7).tobytes())


@pytest.mark.parametrize("method", ["regmean", "fisher"])
@pytest.mark.parametrize(
    "harm",
    [truncate, flip, lambda folder: (folder / "layer-00001.safetensors").unlink()],
)
def test_damaged_statistics_are_captured_again(
    pool: Path, tmp_path: Path, harm: Any, method: str
) -> None:
    folder = folder_of(pool, method)
    whole = contents(folder)
    harm(folder)
    assert contents(folder) != whole
    first, second = planned(recipe(pool, method))
    assert first["state"] == "to do"
    assert second["state"] == "there already"
    sigmerge.merge(recipe(pool, method), tmp_path / "out")
    assert contents(folder) == whole


def test_an_unfinished_capture_builds_on_whole_files_only(pool: Path, tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if stage == "capturing math" and done == 2:
            raise KeyboardInterrupt

    content = recipe(pool, "regmean")
    with pytest.raises(KeyboardInterrupt):
        sigmerge.capture(content, progress=stop)
    (partial,) = (pool / ".sigmerge/features").rglob("*.partial")
    first, second = (partial / f"layer-0000{block}.safetensors" for block in (0, 1))
    (partial / "layer-00002.safetensors").write_bytes(first.read_bytes())  # of no finished part
    second.write_bytes(second.read_bytes()[:-9])

    def written(file: Path) -> tuple[int, int]:
        return file.stat().st_ino, file.stat().st_mtime_ns  # a number may be used again

    before = written(first), written(second)
    row = sigmerge.capture(content, experts=["math"])[0]
    assert (row.state, row.seconds) == ("captured", None)  # the whole time is not known
    made = [written(Path(row.folder) / file.name) for file in (first, second)]
    assert made[0] == before[0] and made[1] != before[1]
    shutil.move(pool / ".sigmerge", tmp_path / "interrupted")
    again = sigmerge.capture(content, experts=["math"])[0]
    assert again.seconds is not None
    assert contents(Path(again.folder)) == contents(tmp_path / "interrupted" / Path(row.folder)
                                                    .relative_to(pool / ".sigmerge"))  # fmt: skip


def test_a_file_that_is_not_declared_is_not_captured(pool: Path) -> None:
    loaded = load_recipe(recipe(pool, "regmean"))
    opened, _ = open_merge_pool(loaded, Options())
    planned = plan_captures(loaded, opened, Options())
    wanted = derivations(planned, loaded, opened, Options())["math"]
    for role, told in (("expert/model/config.json", PoolError), ("exemplars", Undeclared),
                       ("expert/model/model.safetensors", Undeclared)):  # fmt: skip
        inputs = {r: file for r, file in wanted.inputs.files.items() if r != role}
        with pytest.raises(told):
            kept.get(replace(wanted, inputs=kept.Inputs(inputs)))


def test_stray_files_beside_statistics_are_not_read(pool: Path, tmp_path: Path) -> None:
    folder = folder_of(pool)
    sigmerge.merge(recipe(pool, "regmean"), tmp_path / "before")
    (folder / "mine.safetensors").write_text("not one")
    sigmerge.merge(recipe(pool, "regmean"), tmp_path / "after")
    assert weight_bytes(tmp_path / "after") == weight_bytes(tmp_path / "before")
    assert (folder / "mine.safetensors").read_text() == "not one"


def test_an_anchor_made_with_other_statistics_is_stale(pool: Path, tmp_path: Path) -> None:
    content = load_recipe(recipe(pool, "regmean"))
    sigmerge.merge(content, tmp_path / "out")
    assert is_current(content, tmp_path / "out", Options())
    config = json.loads((pool / "math/config.json").read_text())
    (pool / "math/config.json").write_text(json.dumps(config | {"rope_theta": 77.0}))
    assert not is_current(content, tmp_path / "out", Options())


def test_a_plan_counts_the_captures_it_needs(pool: Path) -> None:
    loaded = load_recipe(recipe(pool, "regmean", capture={"labels": "data"}))

    def plan() -> dict[str, Any]:
        step = plan_dense(loaded, Options()).describe(1)
        return step.as_json()

    sigmerge.capture(loaded, experts=["coding"])
    before = plan()
    rows = planned(loaded)
    assert before["to_capture"] == ("math",)
    assert before["peak_memory_bytes"] >= rows[0]["peak_memory_bytes"]
    assert before["notes"][-1] == "capture.labels: regmean does not read it"
    sigmerge.capture(loaded)
    assert plan()["to_capture"] == ()
    assert plan()["peak_memory_bytes"] < before["peak_memory_bytes"]


def test_exemplars_are_cut_to_the_positions_there_are(tmp_path: Path) -> None:
    pool = family_pool(tmp_path / "pool", "gpt2")
    (pool / "math.jsonl").write_text(json.dumps({"prompt": "w1 " * 90}))
    header = Path(f"{folder_of(pool)}.json")
    assert json.loads(header.read_text())["value"]["tokens"] == 64


# Wrong input


@pytest.mark.parametrize(
    ("line", "capture", "said"),
    [
        ({"prompt": ""}, {}, "its prompt is empty"),
        ({"prompt": "w1"}, {"labels": "data"}, "has no response within 64"),
    ],
)
def test_a_dry_run_finds_exemplars_that_cannot_be_shown(
    pool: Path, line: Any, capture: Any, said: str
) -> None:
    with (pool / "coding.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(RecipeError, match=rf"coding: .*coding\.jsonl, line 6: {said}"):
        planned(recipe(pool, "fisher", capture=capture))


def test_skip_bos_of_a_single_token(pool: Path) -> None:
    (pool / "math.jsonl").write_text('{"prompt": "w1"}\n')
    with pytest.raises(RecipeError, match=r"math: .*line 1: is one token .*skip_bos"):
        sigmerge.capture(recipe(pool, "lot", capture={"skip_bos": True}))


def test_statistics_cannot_go_into_a_file(pool: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot be kept there .*Name another folder \(capture:"):
        sigmerge.capture(recipe(pool, "lot"), out=pool / "math.jsonl")


def test_missing_exemplars_are_reported_with_their_place(pool: Path) -> None:
    content = recipe(pool, "lot")
    del content["models"][0]["exemplars"]
    content["models"][1]["exemplars"] = "nowhere.jsonl"
    with pytest.raises(RecipeError) as error:
        load_recipe(content)
    text = str(error.value)
    assert "models[0]: exemplars is missing: lot reads each expert's own" in text
    assert "models[1].exemplars" in text and "no such file" in text


def test_an_empty_file_stops_before_anything_is_captured(pool: Path, tmp_path: Path) -> None:
    (pool / "coding.jsonl").write_text("\n")
    with pytest.raises(RecipeError, match=r"coding: .*coding\.jsonl: holds no exemplars"):
        sigmerge.merge(recipe(pool, "regmean"), tmp_path / "out")
    assert not (pool / ".sigmerge").exists()


def test_tokenizers_that_differ_stop_it(pool: Path) -> None:
    models.write_tokenizer(pool / "coding", models.WORDS[::-1])
    with pytest.raises(PoolError, match="coding: 20 tokens differ from those of math"):
        plan_dense(load_recipe(recipe(pool, "cat")), Options())


def test_an_expert_without_tokenizer_takes_the_references(pool: Path) -> None:
    (pool / "math/tokenizer.json").unlink()
    (pool / "math/tokenizer_config.json").unlink()
    loaded = load_recipe(recipe(pool, "cat"))
    opened, _ = open_merge_pool(loaded, Options())
    assert plan_captures(loaded, opened, Options())[0].tokenizer == pool / "reference"
    soup = recipe(pool, "regmean")
    del soup["base_model"]
    loaded = load_recipe(soup)
    opened, _ = open_merge_pool(loaded, Options())
    with pytest.raises(RecipeError, match="math: no tokenizer in"):
        plan_captures(loaded, opened, Options())


def test_singular_grams_are_an_error_if_asked(pool: Path, tmp_path: Path) -> None:
    parameters = {"off_diagonal": 1.0, "singular": "error"}
    content = recipe(pool, "regmean", parameters=parameters, capture={"limit": 1})
    with pytest.raises(PoolError, match=r"its Grams are singular, .* tokens for .* channels"):
        sigmerge.merge(content, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_words_of_the_command(pool: Path) -> None:
    with pytest.raises(RecipeError, match="linear reads no exemplars"):
        sigmerge.capture(recipe(pool, "linear"))
    with pytest.raises(RecipeError, match="No expert is called 'maths'; did you mean 'math'"):
        sigmerge.capture(recipe(pool, "lot"), experts=["maths"])
    with pytest.raises(RecipeError, match="did you mean 'limit'"):
        load_recipe(recipe(pool, "lot", capture={"limits": 3}))
    soup = recipe(pool, "regmean", capture={"scale": 0.5})
    del soup["base_model"]
    with pytest.raises(RecipeError, match=r"capture\.scale: needs a base_model"):
        load_recipe(soup)


@pytest.mark.parametrize("method", DATA)
def test_a_merge_that_a_gpu_solves_says_so_and_continues_no_other(
    pool: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmerge.probing.loading.checked_device", lambda name: name)
    loaded = load_recipe(recipe(pool, method))
    here, there = (plan_dense(loaded, Options(device=name)) for name in ("cpu", "cuda"))
    solves = method != "fisher"
    assert any("solved on the GPU in float64" in note for note in there.recipe.notes) == solves
    assert not any("solved on the GPU" in note for note in here.recipe.notes)
    assert (there.fingerprint() != here.fingerprint()) == solves
    assert Options(threads=3, device="cuda").engine_name == "local, 3 threads, cuda"
