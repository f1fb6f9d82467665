"""Broken pools: each is refused in words that name the member, the file or tensor, and the way out.

Everything but the values themselves is found from headers, before anything is written.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sigmerge.checkpoints.folder import INDEX, open_checkpoint
from sigmerge.checkpoints.header import read_header
from sigmerge.errors import PoolError
from tests.command_line import refused, sigmerge, tree
from tests.pools import (
    PoolOnDisk,
    draw,
    make_pool,
    read_weights,
    shapes,
    write_member,
    write_weights,
)

Break = Callable[[PoolOnDisk], Any]
NAME = "model.layers.0.mlp.up_proj.weight"


def weights_file(pool: PoolOnDisk) -> Path:
    return pool.experts["math"] / "model.safetensors"


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_header(change: Callable[[dict[str, Any]], Any]) -> Break:
    """Rewrites the header of the expert's file and leaves the data as it is."""

    def apply(pool: PoolOnDisk) -> None:
        raw = weights_file(pool).read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + length])
        change(header)
        put_header(pool, json.dumps(header).encode(), raw[8 + length :])

    return apply


def put_header(pool: PoolOnDisk, header: bytes, data: bytes = b"") -> None:
    weights_file(pool).write_bytes(struct.pack("<Q", len(header)) + header + data)


def edit_index(change: Callable[[dict[str, str]], Any]) -> Break:
    def apply(pool: PoolOnDisk) -> None:
        weights = read_weights(pool.experts["math"])
        weights_file(pool).unlink()
        write_weights(pool.experts["math"], weights, shards=2)
        file = pool.experts["math"] / INDEX
        index = json.loads(file.read_text())
        change(index["weight_map"])
        file.write_text(json.dumps(index))

    return apply


def edit_weights(change: Callable[[dict[str, Any]], Any]) -> Break:
    def apply(pool: PoolOnDisk) -> None:
        tensors = load_file(weights_file(pool))
        change(tensors)
        save_file(tensors, weights_file(pool))

    return apply


def replace_weights(name: str, content: bytes = b"x") -> Break:
    def apply(pool: PoolOnDisk) -> None:
        weights_file(pool).unlink()
        (pool.experts["math"] / name).write_bytes(content)

    return apply


def truncated(pool: PoolOnDisk) -> None:
    raw = weights_file(pool).read_bytes()
    weights_file(pool).write_bytes(raw[:-100])


def loop(pool: PoolOnDisk) -> None:
    weights_file(pool).unlink()
    weights_file(pool).symlink_to(weights_file(pool).parent / "other.safetensors")
    (weights_file(pool).parent / "other.safetensors").symlink_to(weights_file(pool))


def folder_loop(pool: PoolOnDisk) -> None:
    pool.experts["math"].rename(pool.root / "away")
    pool.experts["math"].symlink_to(pool.root / "math2")
    (pool.root / "math2").symlink_to(pool.experts["math"])


def shift(header: dict[str, Any], by: int) -> None:
    """Moves the second tensor's place by so many bytes, its length kept."""
    entry = sorted(
        (e for n, e in header.items() if n != "__metadata__"), key=lambda e: e["data_offsets"]
    )[1]
    entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]


def duplicate_name(pool: PoolOnDisk) -> None:
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    put_header(pool, f'{{"a":{entry},"a":{entry}}}'.encode(), b"\0" * 4)


def duplicate_shards(pool: PoolOnDisk) -> None:
    edit_index(lambda weight_map: None)(pool)
    folder = pool.experts["math"]
    one, two = sorted(folder.glob("*.safetensors"))
    save_file(load_file(two) | {NAME: torch.zeros(2)}, two)
    save_file(load_file(one) | {NAME: torch.zeros(2)}, one)


def adapter(pool: PoolOnDisk) -> None:
    weights_file(pool).rename(pool.experts["math"] / "adapter_model.safetensors")
    (pool.experts["math"] / "adapter_config.json").write_text("{}")


def set_nan(index: int, value: float, member: str = "math", name: str = NAME) -> Break:
    def apply(pool: PoolOnDisk) -> None:
        file = pool.root / member / "model.safetensors"
        tensors = load_file(file)
        tensors[name].view(-1)[index] = value
        save_file(tensors, file)

    return apply


def wider(tensors: dict[str, Any]) -> None:
    tensors[NAME] = torch.zeros(33, 16)


def several(pool: PoolOnDisk) -> None:
    edit_weights(lambda t: (t.pop(NAME), wider(t), t.pop("model.norm.weight")))(pool)
    edit_config(pool.experts["coding"], architectures=["MistralForCausalLM"])


BROKEN: dict[str, tuple[Break, list[str]]] = {
    "truncated": (truncated, ["math", "model.safetensors", "truncated", "download it again"]),
    "longer than announced": (
        lambda p: weights_file(p).open("ab").write(b"junk"),
        ["math", "4 bytes follow the last tensor"],
    ),
    "overlapping": (edit_header(lambda h: shift(h, -4)), ["math", "overlaps the one before it"]),
    "gap": (edit_header(lambda h: shift(h, 4)), ["math", "4 unclaimed bytes before"]),
    "duplicate name": (duplicate_name, ["math", "a name occurs twice"]),
    "duplicate tensor in two shards": (duplicate_shards, ["math", NAME, "stored twice"]),
    "header too long": (
        lambda p: weights_file(p).write_bytes(struct.pack("<Q", 2**62) + b"{}"),
        ["math", "the header asks for 4611686018427387904 bytes"],
    ),
    "no header": (lambda p: weights_file(p).write_bytes(b"abc"), ["math", "the header asks for"]),
    "empty file": (lambda p: weights_file(p).write_bytes(b""), ["math", "the file has 0"]),
    "header not JSON": (lambda p: put_header(p, b"{nope"), ["math", "not valid JSON"]),
    "header too deep": (lambda p: put_header(p, b"[" * 200_000), ["math", "not valid JSON"]),
    "header a list": (lambda p: put_header(p, b"[]"), ["math", "not a JSON object"]),
    "no tensor": (lambda p: put_header(p, b"{}"), ["math", "hold no tensor"]),
    "malformed entry": (
        edit_header(lambda h: h[NAME].pop("shape")),
        ["math", NAME, "malformed header entry"],
    ),
    "fractional shape": (
        edit_header(lambda h: h[NAME].update(shape=[32.5, 16])),
        ["math", NAME, "malformed header entry"],
    ),
    "infinite offset": (
        edit_header(lambda h: h[NAME].update(data_offsets=[0, float("inf")])),
        ["math", NAME, "malformed header entry"],
    ),
    "negative shape": (
        edit_header(lambda h: h[NAME].update(shape=[-32, -16])),
        ["math", NAME, "negative shape"],
    ),
    "shape against bytes": (
        edit_header(lambda h: h[NAME].update(shape=[31, 16])),
        ["math", NAME, "does not fill"],
    ),
    "unknown dtype": (
        edit_header(lambda h: h[NAME].update(dtype="F3")),
        ["math", NAME, "unknown dtype 'F3'"],
    ),
    "weights that are a folder": (
        lambda p: (weights_file(p).unlink(), weights_file(p).mkdir()),
        ["math", "model.safetensors", "cannot be read"],
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
    "LoRA adapter": (adapter, ["math", "LoRA adapter", "merge_and_unload"]),
    "double precision": (
        edit_weights(lambda t: t.update({NAME: t[NAME].double()})),
        ["math", NAME, "F64", "Convert"],
    ),
    "eight bits": (
        edit_weights(lambda t: t.update({NAME: t[NAME].to(torch.float8_e4m3fn)})),
        ["math", NAME, "F8_E4M3", "Convert"],
    ),
    "tensor missing": (edit_weights(lambda t: t.pop(NAME)), [f"math: tensor missing: {NAME}"]),
    "extra bias": (
        edit_weights(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)})),
        ["math: tensor that the reference does not have", "q_proj.bias"],
    ),
    "other shape": (
        edit_weights(wider),
        [f"math: {NAME}: shape [33, 16], the reference has [32, 16]"],
    ),
    "other dtype": (
        edit_weights(lambda t: t.update({NAME: t[NAME].half()})),
        [f"math: {NAME}: dtype F16, the reference has F32", "dtype: in the recipe"],
    ),
    "other architecture": (
        lambda p: edit_config(p.experts["math"], architectures=["GPT2LMHeadModel"]),
        ["math: architecture GPT2LMHeadModel, the reference has LlamaForCausalLM"],
    ),
    "other vocabulary": (
        lambda p: (
            edit_config(p.experts["math"], vocab_size=50),
            edit_weights(lambda t: t.update({"model.embed_tokens.weight": torch.zeros(50, 16)}))(p),
        ),
        ["math: vocabulary of 50 tokens, the reference has 48", "outside: reference"],
    ),
    "copy of the reference": (
        lambda p: weights_file(p).write_bytes((p.reference / "model.safetensors").read_bytes()),
        ["math: every tensor equals the reference's", "not an expert"],
    ),
    "copy of the reference in other shards": (
        lambda p: (
            weights_file(p).unlink(),
            write_weights(p.experts["math"], read_weights(p.reference), shards=3, order=5),
        ),
        ["math: every tensor equals the reference's"],
    ),
    "several at once": (
        several,
        [
            f"math: {NAME}: shape",
            "math: tensor missing: model.norm.weight",
            "coding: architecture MistralForCausalLM",
        ],
    ),
}


@pytest.fixture
def pool(tmp_path: Path) -> PoolOnDisk:
    return make_pool(tmp_path / "pool", experts=2, layers=1)


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_pools(pool: PoolOnDisk, broken: str) -> None:
    destroy, words = BROKEN[broken]
    recipe = pool.write(pool.recipe("task_arithmetic"))
    destroy(pool)
    said = refused(3, "merge", recipe, pool.root / "out", beside=pool.root)
    for word in words:
        assert word in said, said
    assert refused(3, "merge", recipe, pool.root / "out", "--dry-run", beside=pool.root) == said


def test_problems_of_all_members_are_reported_together(pool: PoolOnDisk) -> None:
    recipe = pool.write(pool.recipe("task_arithmetic"))
    (pool.reference / "config.json").unlink()
    truncated(pool)
    (pool.experts["coding"] / "model.safetensors").unlink()
    said = refused(3, "merge", recipe, pool.root / "out", beside=pool.root)
    assert [line.split(":")[0] for line in said.splitlines()[1:]] == [
        "  - reference",
        "  - math",
        "  - coding",
    ]


def test_a_long_list_of_problems_is_cut_short(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=1, layers=4)
    names = list(shapes(layers=4))
    edit_weights(lambda t: [t.pop(name) for name in names if "layers" in name])(pool)
    recipe = pool.write(pool.recipe("linear"))
    said = refused(3, "merge", recipe, pool.root / "out", beside=pool.root)
    assert said.count("tensor missing: model.") == 12
    assert "tensor missing: and 24 more" in said


def test_the_same_folder_twice(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("task_arithmetic")
    recipe["models"].append({"model": str(pool.experts["math"]), "name": "again"})
    said = refused(3, "merge", pool.write(recipe), pool.root / "out", beside=pool.root)
    assert "math, again: the folder" in said and "is given twice" in said


def test_the_same_folder_twice_through_a_symlink(pool: PoolOnDisk) -> None:
    (pool.root / "alias").symlink_to(pool.experts["math"])
    recipe = pool.recipe("task_arithmetic")
    recipe["models"].append({"model": str(pool.root / "alias")})
    said = refused(3, "merge", pool.write(recipe), pool.root / "out", beside=pool.root)
    assert "math, alias: the folder" in said and "is given twice" in said


def test_the_reference_as_an_expert_through_a_symlink(pool: PoolOnDisk) -> None:
    (pool.root / "alias").symlink_to(pool.reference)
    recipe = pool.recipe("task_arithmetic")
    recipe["models"].append({"model": str(pool.root / "alias")})
    said = refused(3, "merge", pool.write(recipe), pool.root / "out", beside=pool.root)
    assert "is the reference itself" in said


def test_a_file_instead_of_a_folder(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("task_arithmetic")
    recipe["models"][0] |= {"model": str(weights_file(pool)), "name": "math"}
    said = refused(3, "merge", pool.write(recipe), pool.root / "out", beside=pool.root)
    assert "is a file; give the checkpoint's folder" in said
    (pool.root / "x.gguf").write_bytes(b"GGUF")
    recipe["models"][0]["model"] = str(pool.root / "x.gguf")
    said = refused(3, "merge", pool.write(recipe), pool.root / "out", beside=pool.root)
    assert "GGUF weights are quantised" in said


def test_mixed_precision_is_fine_when_the_recipe_says_what_to_write(pool: PoolOnDisk) -> None:
    edit_weights(lambda t: t.update({NAME: t[NAME].half()}))(pool)
    recipe = pool.write(pool.recipe("task_arithmetic", dtype="float32"))
    assert sigmerge("merge", recipe, pool.root / "out").code == 0


def test_another_vocabulary_is_fine_when_embeddings_are_kept(pool: PoolOnDisk) -> None:
    edit_config(pool.experts["math"], vocab_size=50)
    grown = {"model.embed_tokens.weight": torch.zeros(50, 16), "lm_head.weight": torch.ones(50, 16)}
    edit_weights(lambda t: t.update(grown))(pool)
    recipe = pool.write(pool.recipe("task_arithmetic", {"outside": "reference"}))
    assert sigmerge("merge", recipe, pool.root / "out").code == 0
    written, reference = read_weights(pool.root / "out"), read_weights(pool.reference)
    for name in grown:
        np.testing.assert_array_equal(written[name], reference[name])


# Values that are no numbers.


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("value", "word"), [(float("nan"), "nan"), (float("-inf"), "-inf")])
@pytest.mark.parametrize("method", ["linear", "ties"])
def test_nonfinite_inputs_stop_the_run(
    tmp_path: Path, dtype: str, value: float, word: str, method: str
) -> None:
    pool = make_pool(tmp_path / "pool", experts=2, layers=1, dtype=dtype)
    set_nan(37, value)(pool)
    recipe = pool.write(pool.recipe(method))
    ran = sigmerge("merge", recipe, tmp_path / "out")
    assert ran.code == 3 and "Traceback" not in ran.err
    assert f"math: tensor {NAME} holds {word} at flat index 37" in ran.err
    assert "--allow-nonfinite" in ran.err
    assert not (tmp_path / "out").exists()


def test_nonfinite_values_of_the_reference_are_named_as_such(pool: PoolOnDisk) -> None:
    set_nan(3, float("inf"), "reference")(pool)
    ran = sigmerge("merge", pool.write(pool.recipe("ties")), pool.root / "out")
    assert ran.code == 3 and f"reference: tensor {NAME} holds inf at flat index 3" in ran.err


def test_nonfinite_values_that_would_only_be_copied_stop_the_run(pool: PoolOnDisk) -> None:
    set_nan(3, float("nan"), "reference", "model.norm.weight")(pool)
    recipe = pool.write(pool.recipe("ties", {"outside": "reference"}))
    ran = sigmerge("merge", recipe, pool.root / "out")
    assert ran.code == 3 and "reference: tensor model.norm.weight holds nan" in ran.err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nonfinite_values_pass_when_allowed(pool: PoolOnDisk, dtype: str) -> None:
    set_nan(3, float("nan"))(pool)
    set_nan(4, float("inf"))(pool)
    recipe = pool.write(pool.recipe("linear", dtype=dtype))
    assert sigmerge("merge", recipe, pool.root / "out", "--allow-nonfinite").code == 0
    written = read_weights(pool.root / "out")
    assert np.isnan(written[NAME].ravel()[3]) and np.isinf(written[NAME].ravel()[4])
    assert sum(int((~np.isfinite(values)).sum()) for values in written.values()) == 2


@pytest.mark.parametrize("allow", [[], ["--allow-nonfinite"]])
def test_overflow_of_the_output_type_is_an_error(pool: PoolOnDisk, allow: list[str]) -> None:
    set_nan(5, 60000.0)(pool)
    recipe = pool.write(pool.recipe("task_arithmetic", weight=(2.0, 1.0), dtype="float16"))
    ran = sigmerge("merge", recipe, pool.root / "out", *allow)
    assert ran.code == 4 and "Traceback" not in ran.err
    assert f"{NAME}: the result at flat index 5 is not finite in F16" in ran.err
    assert "write a wider dtype" in ran.err
    assert not (pool.root / "out").exists()


def test_an_unchecked_run_is_not_continued_by_one_that_checks(pool: PoolOnDisk) -> None:
    """Block 0 is finished with its NaN; the run then dies of an overflow further on."""
    set_nan(3, float("nan"))(pool)
    set_nan(5, 60000.0, name="model.norm.weight")(pool)
    recipe = pool.write(pool.recipe("task_arithmetic", weight=(2.0, 1.0), dtype="float16"))
    assert sigmerge("merge", recipe, pool.root / "out", "--allow-nonfinite").code == 4
    ran = sigmerge("merge", recipe, pool.root / "out")
    assert ran.code == 3 and f"tensor {NAME} holds nan" in ran.err


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


# Sound but unusual folders.


def test_one_loose_file_under_another_name(pool: PoolOnDisk) -> None:
    weights_file(pool).rename(pool.experts["math"] / "weights.safetensors")
    assert NAME in open_checkpoint(pool.experts["math"]).tensors


def test_shards_behind_symlinks_as_in_the_hub_cache(pool: PoolOnDisk) -> None:
    blob = pool.root / "blob"
    weights_file(pool).rename(blob)
    weights_file(pool).symlink_to(blob)
    assert NAME in open_checkpoint(pool.experts["math"]).tensors


def test_shards_in_a_subfolder(tmp_path: Path) -> None:
    folder = write_member(tmp_path / "m", draw(shapes(), 0), shards=2)
    (folder / "parts").mkdir()
    index = json.loads((folder / INDEX).read_text())
    for name in set(index["weight_map"].values()):
        (folder / name).rename(folder / "parts" / name)
    moved = {k: f"parts/{v}" for k, v in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": moved}))
    assert set(open_checkpoint(folder).tensors) == set(shapes())


def test_unaligned_data_is_read_right(tmp_path: Path) -> None:
    """A header of odd length puts every tensor on an odd address."""
    from sigmerge.checkpoints.reader import Reader

    values = np.arange(5, dtype=np.float32)
    header = json.dumps({"x": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}).encode()
    header += b" " * ((len(header) + 1) % 2)
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    tensor = read_header(file)["x"]
    assert tensor.begin % 2 == 1
    np.testing.assert_array_equal(Reader().raw(tensor), values)
    np.testing.assert_array_equal(Reader().raw(tensor, 2, 4), values[2:4])


def test_no_header_makes_the_reader_crash(tmp_path: Path) -> None:
    """Random damage to a sound header is found, or harmless; it never escapes as another error."""
    good = write_member(tmp_path / "m", draw(shapes(layers=1), 0), layers=1)
    raw = bytearray((good / "model.safetensors").read_bytes())
    length = struct.unpack("<Q", raw[:8])[0]
    rng = np.random.default_rng(0)
    refusals = 0
    for _ in range(400):
        bad = bytearray(raw)
        for place in rng.integers(0, 8 + length, rng.integers(1, 4)):
            bad[place] = rng.integers(0, 256)
        file = tmp_path / "bad.safetensors"
        file.write_bytes(bad)
        try:
            read_header(file)
        except PoolError:
            refusals += 1
    assert refusals > 200


def test_a_refused_pool_leaves_no_trace(pool: PoolOnDisk) -> None:
    before = tree(pool.root)
    truncated(pool)
    recipe = pool.recipe("ties")
    assert sigmerge("merge", pool.write(recipe), pool.root / "deep/er/out").code == 3
    assert tree(pool.root) == before | {"recipe.yaml"}
