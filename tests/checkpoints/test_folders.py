"""One checkpoint folder: what cannot be merged is refused in words, what is unusual is read."""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sigmerge.api import merge
from sigmerge.checkpoints import pickled
from sigmerge.checkpoints.adapter_folders import is_adapter
from sigmerge.checkpoints.companions import tokenizer_files
from sigmerge.checkpoints.folder import INDEX, open_checkpoint
from sigmerge.checkpoints.pickled import as_safetensors
from sigmerge.errors import PoolError
from sigmerge.files.scratch import scratch
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import PoolInputs
from sigmerge.kept import Given, Inputs, Undeclared
from tests.checkpoints.damage import (
    NAME,
    Break,
    check_refused,
    edit_config,
    edit_index,
    edit_weights,
    weights_file,
)
from tests.command_line import refused, sigmerge
from tests.pools import (
    PoolOnDisk,
    draw,
    make_pool,
    read_weights,
    shapes,
    weight_bytes,
    write_member,
)


def replace_weights(name: str, content: bytes = b"x") -> Break:
    def apply(pool: PoolOnDisk) -> None:
        weights_file(pool).unlink()
        (pool.experts["math"] / name).write_bytes(content)

    return apply


def loop(pool: PoolOnDisk) -> None:
    weights_file(pool).unlink()
    weights_file(pool).symlink_to(weights_file(pool).parent / "other.safetensors")
    (weights_file(pool).parent / "other.safetensors").symlink_to(weights_file(pool))


def folder_loop(pool: PoolOnDisk) -> None:
    pool.experts["math"].rename(pool.root / "away")
    pool.experts["math"].symlink_to(pool.root / "math2")
    (pool.root / "math2").symlink_to(pool.experts["math"])


def duplicate_shards(pool: PoolOnDisk) -> None:
    edit_index(lambda weight_map: None)(pool)
    folder = pool.experts["math"]
    one, two = sorted(folder.glob("*.safetensors"))
    save_file(load_file(two) | {NAME: torch.zeros(2)}, two)
    save_file(load_file(one) | {NAME: torch.zeros(2)}, one)


def adapter(pool: PoolOnDisk) -> None:
    weights_file(pool).rename(pool.experts["math"] / "adapter_model.safetensors")
    (pool.experts["math"] / "adapter_config.json").write_text("{}")


BROKEN: dict[str, tuple[Break, list[str]]] = {
    "weights that are a folder": (
        lambda p: (weights_file(p).unlink(), weights_file(p).mkdir()),
        ["math", "model.safetensors", "is not a regular file"],
    ),
    "duplicate tensor in two shards": (duplicate_shards, ["math", NAME, "stored twice"]),
    "index with a path of Windows": (
        edit_index(lambda m: m.update({NAME: "..\\coding\\model.safetensors"})),
        ["math", INDEX, "points outside the folder"],
    ),
    "index outside the folder": (
        edit_index(lambda m: m.update({NAME: "../coding/model.safetensors"})),
        ["math", INDEX, "'../coding/model.safetensors' points outside the folder"],
    ),
    "index to an absolute path": (
        edit_index(lambda m: m.update({NAME: "/etc/passwd"})),
        ["math", INDEX, "'/etc/passwd' points outside the folder"],
    ),
    "missing shard": (
        edit_index(lambda m: m.update({NAME: "model-00003-of-00002.safetensors"})),
        ["math", "are missing", "model-00003-of-00002.safetensors"],
    ),
    "tensor missing from its shard": (
        edit_index(lambda m: m.update({"ghost": "model-00001-of-00002.safetensors"})),
        ["math", INDEX, "ghost: promised in model-00001-of-00002.safetensors"],
    ),
    "tensor missing from the index": (
        edit_index(lambda m: m.pop(NAME)),
        ["math", INDEX, f"{NAME}: stored in", "not in the index"],
    ),
    "shard with a name that no system has": (
        edit_index(lambda m: m.update({NAME: "x" * 300_000})),
        ["math", INDEX, "are missing", "'xxx"],
    ),
    "shard with a NUL in its name": (
        edit_index(lambda m: m.update({NAME: "x\0.safetensors"})),
        ["math", INDEX, "are missing"],
    ),
    "architectures that is a number": (
        lambda p: edit_config(p.experts["math"], architectures=5),
        ["math", "config.json: architectures: 5 cannot be right"],
    ),
    "architectures of numbers": (
        lambda p: edit_config(p.experts["math"], architectures=[5, None]),
        ["math", "config.json: architectures: [5, None] cannot be right"],
    ),
    "vocab_size that is a list": (
        lambda p: edit_config(p.experts["math"], vocab_size=[7]),
        ["math", "config.json: vocab_size: [7] cannot be right"],
    ),
    "config too deep": (
        lambda p: (p.experts["math"] / "config.json").write_text("[" * 100_000),
        ["math", "config.json: JSON nested"],
    ),
    "config without an end": (
        lambda p: (
            (p.experts["math"] / "config.json").unlink(),
            (p.experts["math"] / "config.json").symlink_to("/dev/zero"),
        ),
        ["math", "config.json is a link that leaves the folder, to /dev/zero"],
    ),
    "index without a map": (
        lambda p: (p.experts["math"] / INDEX).write_text("{}"),
        ["math", INDEX, "no weight_map"],
    ),
    "index not JSON": (
        lambda p: (p.experts["math"] / INDEX).write_text("{"),
        ["math", INDEX, "not valid JSON"],
    ),
    "stale single file beside an index": (
        lambda p: (
            edit_index(lambda m: None)(p),
            save_file({"old": torch.zeros(3)}, weights_file(p)),
        ),
        ["math", "both model.safetensors and", "Remove it"],
    ),
    "shards without an index": (
        lambda p: (edit_index(lambda m: None)(p), (p.experts["math"] / INDEX).unlink()),
        ["math", "2 safetensors files but no", INDEX],
    ),
    "symlink loop of a file": (loop, ["math", "model.safetensors", "symlink loop"]),
    "dangling link": (
        lambda p: (weights_file(p).unlink(), weights_file(p).symlink_to(p.root / "gone")),
        ["math", "model.safetensors is a link that leads nowhere", "download"],
    ),
    "symlink loop of an index": (
        lambda p: (
            weights_file(p).unlink(),
            (p.experts["math"] / INDEX).symlink_to(p.experts["math"] / INDEX),
        ),
        ["math", INDEX, "symlink loop"],
    ),
    "symlink loop of a folder": (folder_loop, ["math", "symlink loop"]),
    "no weights": (lambda p: weights_file(p).unlink(), ["math", "no weights; expected"]),
    "no config": (
        lambda p: (p.experts["math"] / "config.json").unlink(),
        ["math", "no config.json", "Hugging Face format"],
    ),
    "config not JSON": (
        lambda p: (p.experts["math"] / "config.json").write_text("}"),
        ["math", "config.json", "not valid JSON"],
    ),
    "config a list": (
        lambda p: (p.experts["math"] / "config.json").write_text("[]"),
        ["math", "config.json", "object is expected"],
    ),
    "pickled": (
        replace_weights("pytorch_model.bin"),
        ["math", "pytorch_model.bin", "refused", "--allow-pickle"],
    ),
    "GGUF": (replace_weights("model.Q4_K_M.gguf"), ["math", "GGUF", "safetensors checkpoint"]),
    "GPTQ by marker": (
        lambda p: (p.experts["math"] / "quantize_config.json").write_text("{}"),
        ["math", "GPTQ", "checkpoint they were made from"],
    ),
    "AWQ by marker": (
        lambda p: (p.experts["math"] / "quant_config.json").write_text("{}"),
        ["math", "AWQ", "checkpoint they were made from"],
    ),
    "bitsandbytes": (
        lambda p: edit_config(
            p.experts["math"], quantization_config={"quant_method": "bitsandbytes"}
        ),
        ["math", "quantised weights (bitsandbytes)"],
    ),
    "GPTQ by config": (
        lambda p: edit_config(p.experts["math"], quantization_config={"quant_method": "gptq"}),
        ["math", "quantised weights (gptq)"],
    ),
    "LoRA adapter": (adapter, ["math", "this adapter cannot be used", "peft_type"]),
    "double precision": (
        edit_weights(lambda t: t.update({NAME: t[NAME].double()})),
        ["math", NAME, "F64", "Convert"],
    ),
    "eight bits": (
        edit_weights(lambda t: t.update({NAME: t[NAME].to(torch.float8_e4m3fn)})),
        ["math", NAME, "F8_E4M3", "Convert"],
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_folders(pool: PoolOnDisk, broken: str) -> None:
    check_refused(pool, *BROKEN[broken])


def test_a_stack_with_a_gap_is_refused_in_every_member(tmp_path: Path) -> None:
    """All have lost layer 1 alike, so that they fit each other."""
    pool = make_pool(tmp_path / "pool", experts=2, layers=3)
    for folder in (pool.reference, *pool.experts.values()):
        tensors = load_file(folder / "model.safetensors")
        kept = {name: t for name, t in tensors.items() if ".layers.1." not in name}
        save_file(kept, folder / "model.safetensors")
    recipe = pool.write(pool.recipe("task_arithmetic"))
    said = refused(3, "merge", recipe, pool.root / "out", beside=pool.root)
    for name in ("reference", "math", "coding"):
        assert f"{name}: {pool.root / name}: no tensor is called model.layers.1.*" in said
    assert "download it again" in said


def test_a_file_instead_of_a_folder(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("task_arithmetic")
    recipe["models"][0] |= {"model": str(weights_file(pool)), "name": "math"}
    said = refused(3, "merge", pool.write(recipe), pool.root / "out", beside=pool.root)
    assert "is a file; give the checkpoint's folder" in said
    (pool.root / "x.gguf").write_bytes(b"GGUF")
    recipe["models"][0]["model"] = str(pool.root / "x.gguf")
    said = refused(3, "merge", pool.write(recipe), pool.root / "out", beside=pool.root)
    assert "x.gguf: is damaged" in said


def test_one_loose_file_under_another_name(pool: PoolOnDisk) -> None:
    weights_file(pool).rename(pool.experts["math"] / "weights.safetensors")
    assert NAME in open_checkpoint(pool.experts["math"]).tensors


def hub_snapshot(pool: PoolOnDisk) -> Path:
    """The expert as the hub's cache keeps it: every file is a link into blobs/."""
    model = pool.root / "models--owner--math"
    snapshot = model / "snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for number, file in enumerate(sorted(pool.experts["math"].iterdir())):
        file.rename(model / f"blobs/{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_shards_behind_symlinks_as_in_the_hub_cache(pool: PoolOnDisk) -> None:
    assert NAME in open_checkpoint(hub_snapshot(pool)).tensors


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer_secret.txt"])
@pytest.mark.parametrize("hub", [False, True])
def test_a_link_must_stay_in_its_folder(pool: PoolOnDisk, name: str, hub: bool) -> None:
    folder = hub_snapshot(pool) if hub else pool.experts["math"]
    secret = pool.root / "secret"
    secret.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(PoolError, match=f"{name} is a link that leaves the folder, to .*/secret"):
        open_checkpoint(folder)
        tokenizer_files(folder)


def test_only_the_hubs_own_folders_have_links_into_blobs(pool: PoolOnDisk) -> None:
    folder = hub_snapshot(pool)
    hub = folder.parents[1].rename(pool.root / "notes")
    with pytest.raises(PoolError, match="is a link that leaves the folder"):
        open_checkpoint(hub / folder.relative_to(folder.parents[1]))


def test_a_link_inside_the_folder_is_followed(pool: PoolOnDisk) -> None:
    folder = pool.experts["math"]
    (folder / "shards").mkdir()
    weights_file(pool).rename(folder / "shards/w.safetensors")
    weights_file(pool).symlink_to("shards/w.safetensors")
    assert NAME in open_checkpoint(folder).tensors


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", INDEX, "tokenizer.json"])
@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
def test_what_is_no_file_is_not_opened(
    pool: PoolOnDisk, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    folder = pool.experts["math"]
    (folder / name).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(folder / name)
    elif kind == "socket":
        monkeypatch.chdir(folder)  # the name of a socket is short
        socket.socket(socket.AF_UNIX).bind(name)
    else:
        (folder / name).symlink_to("/dev/zero")
    with pytest.raises(PoolError, match=r"is not a regular file; refused|leaves the folder"):
        open_checkpoint(folder)
        tokenizer_files(folder)


def test_shards_in_a_subfolder(tmp_path: Path) -> None:
    folder = write_member(tmp_path / "m", draw(shapes(), 0), shards=2)
    (folder / "parts").mkdir()
    index = json.loads((folder / INDEX).read_text())
    for name in set(index["weight_map"].values()):
        (folder / name).rename(folder / "parts" / name)
    moved = {k: f"parts/{v}" for k, v in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": moved}))
    assert set(open_checkpoint(folder).tensors) == set(shapes())


# Pickles.


def pickle_expert(pool: PoolOnDisk, content: Any) -> Path:
    file = pool.experts["math"] / "pytorch_model.bin"
    weights_file(pool).unlink()
    torch.save(content, file)
    return file


def test_pickled_weights_are_loaded_on_request(pool: PoolOnDisk) -> None:
    recipe = pool.write(pool.recipe("ties"))
    sigmerge("merge", recipe, pool.root / "plain")
    tensors = load_file(weights_file(pool))
    pickle_expert(pool, tensors)
    ran = sigmerge("merge", recipe, pool.root / "out", "--allow-pickle")
    assert ran.code == 0, ran
    plain, out = read_weights(pool.root / "plain"), read_weights(pool.root / "out")
    assert all((out[name] == values).all() for name, values in plain.items())


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("kind", ["pytorch_model.bin", "model.safetensors"])
def test_a_checkpoint_without_one_of_its_shards_is_refused(
    pool: PoolOnDisk, kind: str, index: bool
) -> None:
    folder, (stem, suffix) = pool.experts["math"], kind.split(".")
    tensors = sorted(load_file(weights_file(pool)).items())
    weights_file(pool).unlink()
    first = f"{stem}-00001-of-00002.{suffix}"
    write = torch.save if suffix == "bin" else save_file
    write(dict(tensors[:9]), folder / first)
    other = first.replace("00001", "00002")
    named = {name: first if i < 9 else other for i, (name, _) in enumerate(tensors)}
    if index:
        (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": named}))
    with pytest.raises(PoolError, match="are missing" if index else "one of several shards"):
        open_checkpoint(folder, allow_pickle=True)
    if index:
        write(dict(tensors[9:]), folder / other)
        assert sorted(open_checkpoint(folder, allow_pickle=True).tensors) == sorted(named)
        write(dict(tensors[10:]), folder / other)
        with pytest.raises(PoolError, match=f"{kind}.index.json and the shards disagree"):
            open_checkpoint(folder, allow_pickle=True)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("index", ["", ".index.json"])
def test_a_model_with_an_adapter_beside_it_is_a_model(
    tmp_path: Path, weights: str, index: str
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert is_adapter(tmp_path)
    (tmp_path / f"{weights}{index}").touch()
    assert not is_adapter(tmp_path)


@pytest.mark.parametrize("damage", ["a bit", "cut off", "gone"])
@pytest.mark.usefixtures("own_cache")
def test_a_damaged_twin_of_a_pickle_is_made_again(pool: PoolOnDisk, damage: str) -> None:
    """The pickle is the input, in the record too: what lies in the cache may go at any time."""
    file = pickle_expert(pool, load_file(weights_file(pool)))
    recipe = pool.recipe("linear")
    merge(recipe, pool.root / "one", allow_pickle=True)
    [twin] = as_safetensors([file])
    content = bytearray(twin.read_bytes())
    content[-3] ^= 64
    if damage == "gone":
        twin.unlink()
    else:
        twin.write_bytes(content if damage == "a bit" else content[:-9])
    made = merge(recipe, pool.root / "two", allow_pickle=True)
    assert weight_bytes(pool.root / "one") == weight_bytes(pool.root / "two")
    recorded = [entry.file for entry in made.provenance.inputs]
    assert str(file) in recorded and str(twin) not in recorded
    members = ["--pool", pool.reference, file.parent]
    assert [sigmerge("verify", *members, *a).code for a in ([], ["--allow-pickle"])] == [3, 0]
    assert sigmerge("verify", pool.root / "two", "--deep", "--allow-pickle").code == 0
    file.write_bytes(file.read_bytes() + b"x")
    ran = sigmerge("verify", pool.root / "two")
    assert ran.code == 3 and f"inputs: {file}: has changed since the run" in ran.out


def test_a_pickle_that_changes_while_it_is_used(pool: PoolOnDisk) -> None:
    """What was read is the older one, which the record must not name by its digest of now."""
    file = pickle_expert(pool, load_file(weights_file(pool)))
    opened = open_checkpoint(file.parent, allow_pickle=True)
    file.write_bytes(file.read_bytes() + b"x")
    inputs = PoolInputs.of({"math": opened})
    with pytest.raises(PoolError, match="changed while it was read"):
        inputs.digested(Options(threads=1))


@pytest.mark.usefixtures("own_cache")
def test_a_twin_is_made_of_its_pickle_and_nothing_else(pool: PoolOnDisk) -> None:
    state = load_file(weights_file(pool))
    file = pickle_expert(pool, state)
    [twin] = as_safetensors([file])
    moved = pool.root / "moved.bin"
    moved.write_bytes(file.read_bytes())
    assert [*as_safetensors([moved])] == [twin]
    torch.save({**state, "more": torch.zeros(1)}, file)
    assert [*as_safetensors([file])] != [twin]
    with pytest.raises(Undeclared):
        pickled._convert(Given(Inputs.of(), pool.root / "out", ExitStack()))


class Malicious:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("allow", [[], ["--allow-pickle"]])
def test_code_in_a_pickle_is_never_run(pool: PoolOnDisk, tmp_path: Path, allow: list[str]) -> None:
    recipe = pool.write(pool.recipe("ties"))
    pickle_expert(pool, {"a": Malicious(tmp_path / "trace")})
    said = refused(3, "merge", recipe, pool.root / "out", *allow, beside=tmp_path)
    assert "math" in said and "pytorch_model.bin" in said
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("content", [{"step": 3}, [1, 2], b"no pickle"])
def test_pickles_that_hold_no_weights(pool: PoolOnDisk, content: Any) -> None:
    recipe = pool.write(pool.recipe("ties"))
    pickle_expert(pool, content)
    said = refused(3, "merge", recipe, pool.root / "out", "--allow-pickle", beside=pool.root)
    assert "cannot be loaded weights-only" in said


def test_what_is_shown_to_a_scorer_may_consist_of_links(pool: PoolOnDisk) -> None:
    """While it is shown. What else has such a name is refused."""
    with scratch() as place:
        shown = place / "math"
        shown.mkdir()
        for file in pool.experts["math"].iterdir():
            (shown / file.name).symlink_to(file)
        assert NAME in open_checkpoint(shown).tensors
        copied = pool.root / "sigmerge-abcdefgh/work/math"
        shutil.copytree(place.parent, pool.root / "sigmerge-abcdefgh", symlinks=True)
        with pytest.raises(PoolError, match="is a link that leaves the folder"):
            open_checkpoint(copied)
