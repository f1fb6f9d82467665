"""Models of the hub, against a server that speaks its protocol: what is asked for, and when."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests.command_line import Ran, sigmerge
from tests.hub_server import READ_TOKEN, TOKEN, Hub, serving
from tests.pools import PoolOnDisk, draw, make_pool, read_weights, shapes, write_member

LAYERS = 4


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub without models, and an empty cache of it."""
    constants = "huggingface_hub.constants."
    monkeypatch.setattr(f"{constants}ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(f"{constants}HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(f"{constants}HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(f"{constants}HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    for held in (server.models, server.objects, server.requests):
        held.clear()
    server.ends_after = None
    return server


@pytest.fixture
def pool(hub: Hub, tmp_path: Path) -> PoolOnDisk:
    """A pool on the disk, which is on the hub as well; a weight file for every layer."""
    made = make_pool(tmp_path / "made", experts=2, layers=LAYERS, tokenizer=True)
    for folder in (made.reference, *made.experts.values()):
        _by_layer(folder)
        hub.add(f"owner/{folder.name}", folder)
    return made


def _by_layer(folder: Path) -> None:
    """Spread weights over files: one for each layer, one for what lies outside them."""
    weights = read_weights(folder)
    (folder / "model.safetensors").unlink()
    total, where = LAYERS + 1, dict[str, str]()
    for at in range(total):
        own = {n: torch.tensor(v) for n, v in weights.items() if _file(n) == at}
        name = f"model-{at + 1:05d}-of-{total:05d}.safetensors"
        save_file(own, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(own, name)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _file(tensor: str) -> int:
    return int(tensor.split(".")[2]) if ".layers." in tensor else LAYERS


def recipe(tmp_path: Path, **more: Any) -> Path:
    content = {
        "merge_method": "task_arithmetic",
        "base_model": "owner/reference",
        "models": [
            {"model": f"owner/{name}", "parameters": {"weight": 0.4}} for name in ("math", "coding")
        ],
        **more,
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
    return file


def merged(*arguments: str | Path) -> Ran:
    done = sigmerge("merge", *arguments)
    assert done.code == 0, done.err
    return done


def test_models_are_downloaded_once_and_merged(hub: Hub, pool: PoolOnDisk, tmp_path: Path) -> None:
    file = recipe(tmp_path)
    merged(file, tmp_path / "out")
    sizes = {f: f.stat().st_size for f in tmp_path.glob("made/*/*.safetensors")}
    assert sum(sizes.values()) < hub.sent(".safetensors") < 1.5 * sum(sizes.values())
    local = yaml.safe_load(file.read_text().replace("owner/", "made/"))
    (tmp_path / "local.yaml").write_text(yaml.safe_dump(local))
    merged(tmp_path / "local.yaml", tmp_path / "again")
    for one, other in zip(_weights(tmp_path / "out"), _weights(tmp_path / "again"), strict=True):
        assert one.read_bytes() == other.read_bytes()

    asked = len(hub.requests)  # whole snapshots are in the hub's cache: nothing is asked again
    merged(file, tmp_path / "out", "--overwrite")
    assert len(hub.requests) == asked
    cached = list((tmp_path / "hub").glob("models--owner--math/snapshots/*/*.safetensors"))
    assert len(cached) == LAYERS + 1


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_what_headers_show_is_said_before_a_weight_is_downloaded(
    hub: Hub, pool: PoolOnDisk, tmp_path: Path
) -> None:
    weights = draw(shapes("llama", LAYERS), seed=7)
    weights["model.layers.1.mlp.up_proj.weight"] = np.zeros((8, 16), np.float32)
    hub.add("owner/odd", write_member(tmp_path / "odd", weights, layers=LAYERS))
    done = sigmerge("merge", recipe(tmp_path, models=[{"model": "owner/odd"}]), tmp_path / "out")
    assert done.code != 0
    assert "model.layers.1.mlp.up_proj.weight" in done.err
    largest = max(f.stat().st_size for f in tmp_path.glob("made/*/*.safetensors"))
    heads = [n for m, path, n in hub.requests if path.endswith(".safetensors") and m == "GET"]
    assert heads and max(heads) < largest / 2
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


def test_a_dry_run_downloads_no_weights_and_says_what_it_would(
    hub: Hub, pool: PoolOnDisk, tmp_path: Path
) -> None:
    done = merged(recipe(tmp_path), tmp_path / "out", "--dry-run")
    assert "download: " in done.out and "owner/coding: " in done.out
    told = merged(recipe(tmp_path), tmp_path / "out", "--dry-run", "--json").json
    step = next(step for step in told["steps"] if step["name"] == "download")
    sizes = sum(f.stat().st_size for f in pool.reference.glob("*.safetensors"))
    assert step["models"]["owner/reference"] == sizes
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


def test_slices_take_the_files_of_their_layers(hub: Hub, pool: PoolOnDisk, tmp_path: Path) -> None:
    file = recipe(
        tmp_path, merge_method="passthrough", base_model=None, models=None,
        slices=[
            {"sources": [{"model": "owner/math", "layer_range": [0, 2]}]},
            {"sources": [{"model": "owner/coding", "layer_range": [3, 4]}]},
        ],
    )  # fmt: skip
    merged(file, tmp_path / "out")
    sent = {path for m, path, n in hub.requests if m == "GET" and n > 3000 and "safet" in path}
    # The ends of the stack come from its first slice and its last, whichever has them.
    assert "/owner/math/model-00001-of-00005.safetensors" in sent
    assert "/owner/coding/model-00004-of-00005.safetensors" in sent
    for layer in (3, 4):
        assert f"/owner/math/model-{layer:05d}-of-00005.safetensors" not in sent
    for layer in (1, 2, 3):
        assert f"/owner/coding/model-{layer:05d}-of-00005.safetensors" not in sent
    local = yaml.safe_load(file.read_text().replace("owner/", "made/"))
    (tmp_path / "local.yaml").write_text(yaml.safe_dump(local))
    merged(tmp_path / "local.yaml", tmp_path / "again")
    assert _same(tmp_path / "out", tmp_path / "again")
    assert sigmerge("verify", tmp_path / "out", "--deep").code == 0


def _same(one: Path, other: Path) -> bool:
    pairs = zip(_weights(one), _weights(other), strict=True)
    return all(left.read_bytes() == right.read_bytes() for left, right in pairs)


def test_few_tensors_of_a_file_come_by_range(hub: Hub, tmp_path: Path) -> None:
    made = make_pool(tmp_path / "made", experts=1, layers=LAYERS, tokenizer=True)
    for folder in (made.reference, *made.experts.values()):
        hub.add(f"owner/{folder.name}", folder)
    file = recipe(
        tmp_path, merge_method="passthrough", base_model=None, models=None,
        slices=[
            {"sources": [{"model": "owner/reference", "layer_range": [0, 3]}]},
            {"sources": [{"model": "owner/math", "layer_range": [3, 4]}]},
        ],
    )  # fmt: skip
    told = merged(file, tmp_path / "out", "--dry-run").out
    assert "single tensors by range" in told and "are not needed" in told
    merged(file, tmp_path / "out")
    size = (made.experts["math"] / "model.safetensors").stat().st_size
    assert hub.sent("/math/model.safetensors") < 0.6 * size
    assert not list((tmp_path / "hub").glob("models--owner--math/snapshots/*/*.safetensors"))
    found = read_weights(tmp_path / "out")
    name = "model.layers.3.mlp.up_proj.weight"
    assert np.array_equal(found[name], read_weights(made.experts["math"])[name])
    provenance = json.loads((tmp_path / "out/sigmerge/provenance.json").read_text())
    own = {Path(one["file"]).name: one for one in provenance["inputs"] if one["member"] == "math"}
    digest = hashlib.sha256((made.experts["math"] / "model.safetensors").read_bytes()).hexdigest()
    assert own["model.safetensors"]["sha256"] == digest
    assert own["model.safetensors"]["file"].startswith("hf://owner/math@")


def test_an_interrupted_download_is_continued(
    hub: Hub, pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(tmp_path.glob("made/math/*.safetensors"), key=lambda f: f.stat().st_size)
    size = largest.stat().st_size
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    hub.ends_after = size - 1000
    merged(recipe(tmp_path), tmp_path / "out")
    assert hub.ends_after is None
    total = sum(f.stat().st_size for f in tmp_path.glob("made/*/*.safetensors"))
    assert hub.sent(".safetensors") < 1.5 * total


def test_a_revision_is_taken(hub: Hub, pool: PoolOnDisk, tmp_path: Path) -> None:
    first = hub.models["owner/math"].head
    other = {f.name: f.read_bytes() for f in pool.experts["coding"].iterdir() if f.is_file()}
    hub.commit("owner/math", other)
    models = [{"model": f"owner/math@{first}"}]
    merged(recipe(tmp_path, models=models), tmp_path / "out")
    provenance = json.loads((tmp_path / "out/sigmerge/provenance.json").read_text())
    files = [one["file"] for one in provenance["inputs"] if one["member"] == "math"]
    assert files and all(first in file for file in files)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("owner/none", ["the hub has no such model", "or it is private", "HF_TOKEN"]),
        ("owner/math@none", ["no branch, tag or commit 'none'"]),
        ("owner/gated", ["is gated", "Accept its terms on", "/owner/gated"]),
        ("owner/pickled", ["only pickles (pytorch_model.bin)", "--allow-pickle"]),
        ("owner/short", ["its index names model-00002-of-00005.safetensors"]),
    ],
)
def test_what_the_hub_refuses(
    hub: Hub, pool: PoolOnDisk, tmp_path: Path, model: str, words: list[str]
) -> None:
    hub.add("owner/gated", pool.experts["math"], gated=True)
    config = (pool.reference / "config.json").read_bytes()
    hub.commit("owner/pickled", {"config.json": config, "pytorch_model.bin": b"x" * 100})
    files = dict(hub.models["owner/math"].commits[hub.models["owner/math"].head])
    del files["model-00002-of-00005.safetensors"]
    hub.commit("owner/short", files)
    done = sigmerge("merge", recipe(tmp_path, models=[{"model": model}]), tmp_path / "out")
    assert done.code != 0 and "models[0].model" in done.err
    for word in words:
        assert word in done.err


def test_a_token_opens_what_is_gated_or_private(
    hub: Hub, pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models["owner/math"].gated = hub.models["owner/coding"].private = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    merged(recipe(tmp_path), tmp_path / "out")


def test_offline_and_unreachable(
    hub: Hub, pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        done = sigmerge("merge", recipe(tmp_path), tmp_path / "out")
        assert done.code != 0 and "HF_HUB_OFFLINE is set" in done.err
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        done = sigmerge("merge", recipe(tmp_path), tmp_path / "out")
        assert done.code != 0 and "cannot be reached at http://127.0.0.1:9" in done.err
    merged(recipe(tmp_path), tmp_path / "out")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    merged(recipe(tmp_path), tmp_path / "again")


def test_a_part_that_another_program_took_is_not_the_model(
    hub: Hub, pool: PoolOnDisk, tmp_path: Path
) -> None:
    from huggingface_hub import hf_hub_download

    for name in ("config.json", "model.safetensors.index.json"):
        hf_hub_download("owner/math", name, endpoint=hub.url)
    merged(recipe(tmp_path), tmp_path / "out")


def test_inspect_reads_headers(hub: Hub, pool: PoolOnDisk, tmp_path: Path) -> None:
    done = sigmerge("inspect", "owner/math", "--json")
    assert done.code == 0, done.err
    assert done.json["layers"] == LAYERS
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


def test_a_result_is_pushed(
    hub: Hub, pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    file, to = recipe(tmp_path), ("--push", "owner/merged", "--private")
    told = merged(file, tmp_path / "out", *to, "--dry-run").out
    assert f"to {hub.url}/owner/merged (a new private model)" in told
    assert "owner/merged" not in hub.models
    done = merged(file, tmp_path / "out", *to)
    assert f"uploaded: {hub.url}/owner/merged" in done.out
    model = hub.models["owner/merged"]
    files = {f.relative_to(tmp_path / "out").as_posix(): f.read_bytes()
             for f in (tmp_path / "out").rglob("*") if f.is_file()}  # fmt: skip
    assert model.private and model.commits[model.head] == files

    merged(file, tmp_path / "out", "--overwrite", "--max-shard-size", "20KB", *to)
    names = set(model.commits[model.head])
    assert "model.safetensors" not in names and "model.safetensors.index.json" in names
    again = sigmerge("inspect", "owner/merged", "--json")
    assert again.json["layers"] == LAYERS


@pytest.mark.parametrize(
    ("token", "name", "words"),
    [
        ("", "owner/merged", "no token of the hub is known"),
        (READ_TOKEN, "owner/merged", "the token may only read"),
        (TOKEN, "stranger/merged", "who writes under owner and group"),
        (TOKEN, "merged", "as user/name"),
        (TOKEN, "owner/math", "is public"),
    ],
)
def test_what_cannot_be_pushed_is_said_before_the_work(
    hub: Hub, pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str,
    name: str, words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", token)
    done = sigmerge("merge", recipe(tmp_path), tmp_path / "out", "--push", name, "--private")
    assert done.code != 0 and words in done.err
    assert not (tmp_path / "out").exists() and not list((tmp_path / "hub").rglob("*.safetensors"))


def card(folder: Path) -> tuple[dict[str, Any], str]:
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def licensed(hub: Hub, **licences: str) -> None:
    """Cards of models on the hub that say a licence."""
    for name, entries in licences.items():
        model = hub.models[f"owner/{name}"]
        files = {**model.commits[model.head], "README.md": f"---\n{entries}\n---\n".encode()}
        hub.commit(f"owner/{name}", files)


def test_the_card_names_models_papers_and_the_strictest_licence(
    hub: Hub, pool: PoolOnDisk, tmp_path: Path
) -> None:
    licensed(
        hub, reference="license: apache-2.0", math="license: MIT", coding="license: cc-by-nc-4.0"
    )
    file = recipe(tmp_path)
    merged(file, tmp_path / "out")
    front, text = card(tmp_path / "out")
    assert front["base_model"] == ["owner/reference", "owner/math", "owner/coding"]
    assert front["base_model_relation"] == "merge" and front["license"] == "cc-by-nc-4.0"
    assert "[owner/math](https://huggingface.co/owner/math)" in text
    assert "[arXiv:2212.04089](https://arxiv.org/abs/2212.04089)" in text
    assert (tmp_path / "out/mergekit_config.yml").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("licences", "words"),
    [
        ({"reference": "license: mit", "math": "license: mit", "coding": "tags: []"},
         "that of coding is not known"),
        ({"reference": "license: other", "math": "license: mit", "coding": "license: mit"},
         "that of reference is not known"),
        ({"reference": "license: llama3.1", "math": "license: gemma", "coding": "license: mit"},
         "do not include one another (reference llama3.1, math gemma, coding mit)"),
    ],
)  # fmt: skip
def test_a_licence_that_is_not_clear_is_said(
    hub: Hub, pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    licences: dict[str, str], words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    licensed(hub, **licences)
    told = merged(recipe(tmp_path), tmp_path / "out", "--dry-run", "--push", "group/merged")
    assert words in told.out
    merged(recipe(tmp_path), tmp_path / "out")
    front, text = card(tmp_path / "out")
    assert "license" not in front and words in text


def test_a_local_folder_gets_no_id(hub: Hub, pool: PoolOnDisk, tmp_path: Path) -> None:
    models = [{"model": str(pool.experts["math"]), "name": "math"}]
    merged(recipe(tmp_path, models=models, seed=1), tmp_path / "out")
    front, text = card(tmp_path / "out")
    assert front["base_model"] == ["owner/reference"]
    assert "- expert `math`: `math`" in text
    assert not (tmp_path / "out/mergekit_config.yml").exists()  # seed and name are not mergekit's
