"""GGUF files as models of a recipe: against gguf's own dequantisation and transformers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import sigmerge
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.gguf import GgufTensor
from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.reader import Reader
from sigmerge.checkpoints.source import FormedValues
from sigmerge.errors import PoolError
from sigmerge.merge3.candidate import stored_weights
from tests.command_line import sigmerge as command
from tests.gguf_files import WIDTH, write

KINDS = [gguf.GGMLQuantizationType[name] for name in (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "TQ1_0", "TQ2_0", "MXFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S",
    "IQ1_M", "IQ4_NL", "IQ4_XS",
)]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("heads", [0, 2])
def test_any_piece_of_any_type(tmp_path: Path, kind: gguf.GGMLQuantizationType, heads: int) -> None:
    """Random bytes behind some others, in any type that the package reads; rows of heads too."""
    block = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 8, 2 * block[0]
    width = columns // block[0] * block[1]
    raw = np.random.default_rng(int(kind)).integers(0, 120, (rows, width)).astype(np.uint8)
    file = tmp_path / "raw"
    file.write_bytes(b"head" + raw.tobytes())
    stored = Tensor("t", "U8", (raw.size,), file, 4, 4 + raw.size)
    made = GgufTensor(
        "t", "BF16", (rows, columns), file, 4, 4 + raw.size,
        stored=stored, kind=int(kind), block=block, heads=heads,
    )  # fmt: skip
    expected = gguf.dequantize(raw, kind).astype(np.float32)
    if heads:  # coordinates 2i and 2i + 1 of a head become i and i + half
        order = [head * 4 + at for head in range(heads) for at in (0, 2, 1, 3)]
        expected = expected[order]
    values = FormedValues(Reader())
    for start, stop in ((0, made.size), (1, 2), (columns - 1, 3 * columns + 1), (5, made.size)):
        found = values(made, start, stop)
        np.testing.assert_array_equal(found, expected.reshape(-1)[start:stop])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", tied=False)


def test_weights_and_logits_are_those_of_transformers(file: Path, tmp_path: Path) -> None:
    """A merge of one file, which has its tokenizer too."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = {"merge_method": "passthrough", "dtype": "float32", "models": [{"model": str(file)}]}
    sigmerge.merge(recipe, tmp_path / "out")
    peer = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    mine = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, weight in peer.state_dict().items():
        assert torch.equal(mine.state_dict()[name], weight), name
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")("hell he")["input_ids"]
    with torch.no_grad():
        ids = torch.tensor([tokens])
        assert torch.equal(mine.eval()(ids).logits, peer.eval()(ids).logits)
    record = json.loads((tmp_path / "out/sigmerge/provenance.json").read_text())
    assert str(file) in json.dumps(record)


def test_two_files_are_merged_and_named(file: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.gguf", tied=False)
    models = [{"model": str(each), "parameters": {"weight": 0.5}} for each in (file, other)]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"merge_method": "linear", "models": models}))
    told = command("merge", recipe, tmp_path / "out", "--dry-run")
    assert told.code == 0, told.err
    assert "GGUF (F16, F32, Q4_1, Q8_0): 21 tensors are dequantised" in told.out
    assert "GGUF (F16, F32, Q4_1, Q8_0)" in command("inspect", file).out
    assert command("merge", recipe, tmp_path / "out").code == 0
    found = dict(stored_weights(open_checkpoint(tmp_path / "out")))
    parts = [dict(stored_weights(open_checkpoint(each))) for each in (file, other)]
    name = "model.layers.1.self_attn.k_proj.weight"
    expected = torch.from_numpy((parts[0][name] + parts[1][name]) / 2).bfloat16().float()
    np.testing.assert_array_equal(found[name], expected.numpy())


def test_what_cannot_be_read_is_refused(file: Path, tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(WIDTH, np.float32)}
    with pytest.raises(PoolError, match="no counterpart in transformers"):
        open_checkpoint(write(tmp_path / "extra.gguf", extra=extra))
    with pytest.raises(PoolError, match="llama, qwen2, qwen3 is supported"):
        open_checkpoint(write(tmp_path / "gemma.gguf", architecture="gemma3"))
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(PoolError, match="damaged"):
        open_checkpoint(file)
