"""Tensors without a model's configuration: files, folders, pipelines of diffusion."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from sigmerge.checkpoints.plain import open_tensors
from sigmerge.errors import PoolError
from sigmerge.jobs.dense import plan_dense
from sigmerge.jobs.merge import MergeJob
from sigmerge.jobs.options import Options
from sigmerge.jobs.verify import VerifyJob
from sigmerge.recipe import load_recipe
from tests.command_line import sigmerge

State = dict[str, torch.Tensor]


def network(seed: int, *more: str) -> State:
    """A network with four numbered layers, a head, a counter, and further tensors by name."""
    draw = torch.Generator().manual_seed(seed)
    state = {f"net.{i}.weight": torch.randn(24, 16, generator=draw) for i in range(4)}
    state |= {f"net.{i}.bias": torch.randn(24, generator=draw) for i in range(4)}
    state["head.weight"] = torch.randn(8, 24, generator=draw)
    return state | {name: torch.randn(5, generator=draw) for name in more}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for seed, name in enumerate(("base", "one", "two")):
        save_file(network(seed), tmp_path / f"{name}.safetensors")
    save_file(network(3, "only"), tmp_path / "more.safetensors")
    return tmp_path


def written(folder: Path, method: str, experts: list[str], **keys: Any) -> Path:
    models = [{"model": f"{name}.safetensors"} for name in experts]
    given = {"merge_method": method, "models": models, "dtype": "float32", **keys}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(given), "utf-8")
    return file


def merged(recipe: Path, out: Path, **options: Any) -> State:
    MergeJob(load_recipe(recipe), out, Options(threads=1, **options)).run()
    assert [report.ok for report in VerifyJob(out, Options(**options), deep=True).run()] == [True]
    return load_file(out / "model.safetensors")


def mergekits(recipe: Path, out: Path, *options: str) -> State:
    """What mergekit-pytorch makes of the recipe."""
    code = "from mergekit.scripts.merge_raw_pytorch import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe), str(out), *options],
        cwd=recipe.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize(
    ("method", "base", "parameters"),
    [
        ("linear", None, {"weight": 0.5}),
        ("task_arithmetic", "base.safetensors", {"weight": 0.4}),
        ("ties", "base.safetensors", {"weight": 0.5, "density": 0.5}),
    ],
)
def test_files_are_merged_as_mergekit_pytorch_merges_them(
    files: Path, method: str, base: str | None, parameters: dict[str, float]
) -> None:
    pytest.importorskip("mergekit")
    keys = {"parameters": parameters} | ({"base_model": base} if base else {})
    recipe = written(files, method, ["one", "two"], **keys)
    ours, theirs = merged(recipe, files / "ours"), mergekits(recipe, files / "theirs")
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("choice", "flag"), [("union", "-u"), ("intersection", "-i")])
def test_tensors_that_not_all_have(files: Path, choice: str, flag: str) -> None:
    pytest.importorskip("mergekit")
    keys = {"parameters": {"weight": 0.5}}
    plain = written(files, "linear", ["one", "more"], **keys)
    with pytest.raises(PoolError, match="tensors: intersection"):
        plan_dense(load_recipe(plain), Options())
    theirs = mergekits(plain, files / "theirs", flag)
    ours = merged(written(files, "linear", ["one", "more"], tensors=choice, **keys), files / "ours")
    assert ours.keys() == theirs.keys()
    assert ("only" in ours) == (choice == "union")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-6)


def test_a_union_needs_the_reference_of_every_task_vector(files: Path) -> None:
    recipe = written(
        files, "task_arithmetic", ["one", "more"], base_model="base.safetensors", tensors="union",
        parameters={"weight": 1.0},
    )  # fmt: skip
    with pytest.raises(PoolError) as refused:
        plan_dense(load_recipe(recipe), Options())
    assert "only" in str(refused.value)
    assert "tensors: intersection" in str(refused.value)


def test_pickles_are_merged_on_request_alone(files: Path) -> None:
    recipe = written(files, "linear", ["one", "two"], parameters={"weight": 0.5})
    wanted = merged(recipe, files / "safe")
    torch.save(network(1), files / "one.bin")
    torch.save({"state_dict": network(2), "epoch": 3}, files / "two.ckpt")
    text = recipe.read_text().replace("one.safetensors", "one.bin")
    recipe.write_text(text.replace("two.safetensors", "two.ckpt"))
    with pytest.raises(PoolError, match="can run code"):
        plan_dense(load_recipe(recipe), Options())
    found = merged(recipe, files / "pickled", allow_pickle=True)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_folder_without_a_configuration(files: Path) -> None:
    (files / "folder").mkdir()
    save_file(network(1), files / "folder" / "weights.safetensors")
    recipe = written(files, "linear", ["one", "two"], parameters={"weight": 0.5})
    wanted = merged(recipe, files / "wanted")
    recipe.write_text(recipe.read_text().replace("one.safetensors", "folder"))
    found = merged(recipe, files / "found")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    save_file(network(1), files / "folder" / "other.safetensors")
    with pytest.raises(PoolError, match="several files"):
        plan_dense(load_recipe(recipe), Options())


def test_models_and_bare_tensors_do_not_mix(files: Path) -> None:
    (files / "model").mkdir()
    save_file(network(1), files / "model" / "model.safetensors")
    (files / "model" / "config.json").write_text("{}")
    recipe = written(files, "linear", ["one", "two"], parameters={"weight": 0.5})
    recipe.write_text(recipe.read_text().replace("one.safetensors", "model"))
    with pytest.raises(PoolError, match=r"two: .*is a file; give the checkpoint's folder"):
        plan_dense(load_recipe(recipe), Options())


def test_an_interrupted_merge_goes_on(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sigmerge.checkpoints.writer import Output

    recipe = written(files, "linear", ["one", "two"], parameters={"weight": 0.5})
    wanted = merged(recipe, files / "wanted")
    done, finish = [], Output.finish

    def stops(self: Output, *given: Any, **more: Any) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(given)
        finish(self, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Output, "finish", stops)
        with pytest.raises(KeyboardInterrupt):
            MergeJob(load_recipe(recipe), files / "found", Options(threads=1)).run()
    result = MergeJob(load_recipe(recipe), files / "found", Options(threads=1)).run()
    assert len(result.provenance.blocks_resumed) == 2
    found = load_file(files / "found" / "model.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# Blocks and the repair


def test_blocks_are_all_layers_or_else_modules(tmp_path: Path) -> None:
    names = ["down_blocks.0.a.weight", "down_blocks.1.a.weight", "up_blocks.0.b.weight", "out.bias"]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "layers.safetensors")
    stack = open_tensors(tmp_path / "layers.safetensors").stack
    assert [stack.block_of(name) for name in names] == [0, 1, 2, None]
    names = ["conv.weight", "conv.bias", "norm.weight", "scale"]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "modules.safetensors")
    stack = open_tensors(tmp_path / "modules.safetensors").stack
    assert [stack.block_of(name) for name in names] == [0, 0, 1, 2]


def test_the_repair_of_bare_tensors(files: Path) -> None:
    scores = {
        "experts": {"one": {"one": 0.9, "two": 0.1}, "two": {"one": 0.1, "two": 0.8}},
        "anchor": {"one": 0.5, "two": 0.6},
    }
    recipe = written(
        files, "task_arithmetic", ["one", "two"], base_model="base.safetensors",
        parameters={"weight": 0.4}, repair={"scores": scores, "guard": "off"},
    )  # fmt: skip
    repaired = merged(recipe, files / "repaired")
    plan = json.loads((files / "repaired" / "sigmerge" / "plan.json").read_text())
    assert len(plan["coordinates"]) == 4
    base, one, two = (network(seed) for seed in range(3))
    for layer in range(4):
        name = f"net.{layer}.weight"
        plain = base[name] + 0.4 * (one[name] - base[name]) + 0.4 * (two[name] - base[name])
        moved = (repaired[name] - plain).abs() > 1e-6
        assert 0 < moved.sum() < moved.numel()
    head = base["head.weight"] + 0.4 * (one["head.weight"] + two["head.weight"])
    head -= 0.8 * base["head.weight"]
    torch.testing.assert_close(repaired["head.weight"], head, rtol=1e-5, atol=1e-5)


# Pipelines of diffusion

SDXL = {
    "unet": ("UNet2DConditionModel", ["down_blocks.0.c.weight", "mid_block.c.weight",
                                      "up_blocks.0.c.weight", "up_blocks.1.c.weight"]),
    "vae": ("AutoencoderKL", ["encoder.conv_in.weight", "decoder.conv_in.weight"]),
    "text_encoder": ("CLIPTextModel", ["text_model.encoder.layers.0.mlp.fc1.weight"]),
    "text_encoder_2": ("CLIPTextModelWithProjection", ["text_projection.weight"]),
}  # fmt: skip
FLUX = {
    "transformer": ("FluxTransformer2DModel", ["transformer_blocks.0.ff.weight",
                                               "single_transformer_blocks.0.ff.weight"]),
    "vae": ("AutoencoderKL", ["decoder.conv_in.weight"]),
    "text_encoder_2": ("T5EncoderModel", ["shared.weight", "encoder.block.0.layer.0.weight"]),
}  # fmt: skip


def pipeline(folder: Path, parts: dict[str, tuple[str, list[str]]], seed: int) -> Path:
    """A folder as diffusers writes it; the first part has two shards."""
    draw = torch.Generator().manual_seed(seed)
    index: dict[str, Any] = {"_class_name": "Pipeline", "force_zeros": True, "safety": [None, None]}
    for number, (part, (kind, names)) in enumerate(parts.items()):
        place = folder / part
        place.mkdir(parents=True)
        ours = not kind.startswith(("CLIP", "T5"))
        index[part] = ["diffusers" if ours else "transformers", kind]
        config = {"_class_name": kind} if ours else {"architectures": [kind], "model_type": "clip"}
        (place / "config.json").write_text(json.dumps(config))
        state = {name: torch.randn(12, 8, generator=draw).half() for name in names}
        stem = "diffusion_pytorch_model" if ours else "model"
        if number:
            save_file(state, place / f"{stem}.safetensors")
            continue
        where = {n: f"{stem}-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(state)}
        for file in set(where.values()):
            save_file({n: t for n, t in state.items() if where[n] == file}, place / file)
        content = json.dumps({"metadata": {}, "weight_map": where})
        (place / f"{stem}.safetensors.index.json").write_text(content)
    for part, name in (("scheduler", "scheduler_config.json"), ("tokenizer", "vocab.json")):
        (folder / part).mkdir()
        (folder / part / name).write_text("{}")
        index[part] = ["diffusers", part]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def states(folder: Path) -> dict[str, State]:
    """By part what its files hold."""
    parts = [place for place in folder.iterdir() if any(place.glob("*.safetensors"))]
    return {
        part.name: {n: t for f in part.glob("*.safetensors") for n, t in load_file(f).items()}
        for part in parts
    }


@pytest.mark.parametrize("parts", [SDXL, FLUX], ids=["sdxl", "flux"])
def test_a_pipeline_is_merged_part_by_part(tmp_path: Path, parts: Any) -> None:
    folders = [pipeline(tmp_path / name, parts, seed) for seed, name in enumerate("abc")]
    recipe = tmp_path / "recipe.yaml"
    given = {
        "merge_method": "task_arithmetic", "base_model": "a",
        "models": [{"model": "b", "parameters": {"weight": 0.5}},
                   {"model": "c", "parameters": {"weight": [{"filter": "vae/", "value": 0.0},
                                                            {"value": 0.25}]}}],
    }  # fmt: skip
    recipe.write_text(yaml.safe_dump(given))
    out = tmp_path / "out"
    done = sigmerge("merge", recipe, out, "--max-shard-size", "200")
    assert done.code == 0, done.err
    base, one, two = map(states, folders)
    found = states(out)
    assert found.keys() == base.keys()
    for part, state in base.items():
        assert found[part].keys() == state.keys()
        other = 0.0 if part == "vae" else 0.25
        for name, values in state.items():
            theta = values.float()
            wanted = theta + 0.5 * (one[part][name].float() - theta)
            wanted += other * (two[part][name].float() - theta)
            torch.testing.assert_close(found[part][name], wanted.half(), rtol=1e-3, atol=1e-3)
        copied = (folders[0] / part / "config.json").read_bytes()
        assert (out / part / "config.json").read_bytes() == copied
    first = next(iter(parts))
    index = out / first / "diffusion_pytorch_model.safetensors.index.json"
    assert set(json.loads(index.read_text())["weight_map"]) == set(base[first])
    for name in ("model_index.json", "scheduler/scheduler_config.json", "tokenizer/vocab.json"):
        assert (out / name).read_bytes() == (folders[0] / name).read_bytes()
    done = sigmerge("verify", out, "--deep", "--blocks", "all")
    assert done.code == 0, done.out


def test_a_pipelines_part_that_lost_its_weights(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "a", SDXL, 0)
    (folder / "text_encoder" / "model.safetensors").unlink()
    with pytest.raises(PoolError, match="text_encoder: no weights"):
        open_tensors(folder)


def test_one_part_of_a_pipeline(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        pipeline(tmp_path / name, SDXL, seed)
    recipe = tmp_path / "recipe.yaml"
    models = [{"model": f"{name}/vae", "parameters": {"weight": 1.0}} for name in "ab"]
    for model, name in zip(models, "ab", strict=True):
        model["name"] = name
    recipe.write_text(yaml.safe_dump({"merge_method": "linear", "models": models}))
    MergeJob(load_recipe(recipe), tmp_path / "out", Options(threads=1)).run()
    found = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    one, two = (states(tmp_path / name)["vae"] for name in "ab")
    for name, values in found.items():
        wanted = (one[name].float() + two[name].float()) / 2
        torch.testing.assert_close(values, wanted.half(), rtol=1e-3, atol=1e-3)
