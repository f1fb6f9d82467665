"""The folder made of a GGUF file, against transformers' own reading of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from sigmerge.errors import OutputError, PoolError, RecipeError
from sigmerge.lab.pools.gguf import convert
from tests.command_line import refused, sigmerge
from tests.gguf_files import TEMPLATE, TOKENS, WIDTH, write

TEXTS = ["hello  hell 12 he", "<|im_start|>hi\n  x = 345<|im_end|>", "Привет, Ünï", ""]


def logits(folder: Path, **how: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, **how)
    with torch.no_grad():
        return model.eval()(torch.arange(40)[None] * 5 % len(TOKENS)).logits


@pytest.mark.parametrize("tied", [True, False])
def test_the_logits_are_those_of_transformers_own_reading(tmp_path: Path, tied: bool) -> None:
    file = write(tmp_path / "tiny.gguf", tied=tied)
    folder = convert(file, tmp_path / "folder", "float32")
    expected = logits(tmp_path, gguf_file=file.name)
    assert expected.std() > 0.1
    assert torch.equal(logits(folder), expected)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.tie_word_embeddings is tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf")
    folder = convert(file, tmp_path / "folder")
    stored = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    whole = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    ).state_dict()
    assert stored.keys() == whole.keys()
    assert all(torch.equal(stored[name], whole[name].bfloat16()) for name in whole)


def test_the_tokenizer_is_that_of_the_file(tmp_path: Path) -> None:
    folder = convert(write(tmp_path / "tiny.gguf"), tmp_path / "folder")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (1, 2, 2) and tokenizer.eos_token == "<|im_end|>"
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == ids
    # Spaces before a digit are one token, since every digit is taken apart first.
    pieces = ["hell", "o", "ĠĠ", "1", "2", "Ġ", "he"]
    assert tokenizer.tokenize("hello  12 he") == pieces
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.model_max_length == 128


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf")
    folders = [convert(file, tmp_path / name) for name in ("one", "two")]
    contents = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders]
    assert contents[0] == contents[1]
    assert set(contents[0]) == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "gemma3"}, ["'gemma3'", "llama is supported"]),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, ["rope_freqs.weight"]),
        ({"leave_out": "blk.1.attn_q.weight"}, ["layers.1.self_attn.q_proj.weight: missing"]),
        ({"extra": {"blk.2.attn_norm.weight": np.ones(WIDTH, np.float32)}}, ["beyond the layers"]),
        ({"scaling": "yarn"}, ["yarn"]),
        ({"fields": {"llama.rope.scaling.factor": 8.0}}, ["scales its rotary positions"]),
        ({"fields": {"llama.rope.scale_linear": 4.0}}, ["scales its rotary positions"]),
        ({"fields": {"llama.rope.dimension_count": 8}}, ["rotates 8 of 16 coordinates"]),
    ],
)
def test_what_is_no_plain_llama_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: list[str]
) -> None:
    file = write(tmp_path / "tiny.gguf", **changes)
    said = refused(3, "pool", "gguf", file, tmp_path / "out", beside=tmp_path)
    assert str(file) in said and all(words in said for words in named), said


def test_a_file_of_another_kind_or_cut_short_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    for content, words in ((b"PK\3\4" + whole, "not a GGUF"), (whole[:200], "damaged"),
                           (whole[: len(whole) - 500], "damaged")):  # fmt: skip
        file.write_bytes(content)
        assert words in refused(3, "pool", "gguf", file, tmp_path / "out", beside=tmp_path)
    assert "no such file" in refused(
        3, "pool", "gguf", tmp_path / "none", tmp_path / "o", beside=tmp_path
    )


def test_an_older_folder_is_replaced_only_if_asked(tmp_path: Path) -> None:
    file, out = write(tmp_path / "tiny.gguf"), tmp_path / "out"
    assert sigmerge("pool", "gguf", file, out, "--dtype", "float32").out == f"checkpoint: {out}\n"
    size = (out / "model.safetensors").stat().st_size
    assert "exists already" in refused(4, "pool", "gguf", file, out, beside=tmp_path)
    assert (out / "model.safetensors").stat().st_size == size
    assert sigmerge("pool", "gguf", file, out, "--overwrite", "--json").json == {
        "checkpoint": str(out)
    }
    assert (out / "model.safetensors").stat().st_size < 0.6 * size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]


def test_a_folder_that_appeared_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = write(tmp_path / "tiny.gguf"), tmp_path / "out"

    def appear(*_: Any) -> None:
        out.mkdir()
        (out / "thesis.tex").write_text("years of work")

    monkeypatch.setattr("sigmerge.lab.pools.gguf._save_tokenizer", appear)
    with pytest.raises(OutputError, match="exists already"):
        convert(file, out)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]


def test_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="int8"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out", "int8")


def told(file: Path, key: str, skipped: int, value: int, width: int = 4) -> None:
    """Another number behind a key of the metadata."""
    content = bytearray(file.read_bytes())
    at = content.index(key.encode()) + len(key) + skipped
    content[at : at + width] = value.to_bytes(width, "little")
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("key", "skipped", "value", "words"),
    [
        ("tokenizer.ggml.token_type", 8, 10**9, "damaged (it ends before its values)"),
        ("llama.attention.head_count", 4, 0, "cannot be converted (ZeroDivisionError"),
        ("llama.block_count", 4, 10**9, "there are fewer than layers"),
        ("general.architecture", 12, 0xFF, "cannot be converted (UnicodeDecodeError"),
    ],
)
def test_metadata_that_no_file_has_is_one_error(
    tmp_path: Path, key: str, skipped: int, value: int, words: str
) -> None:
    """At once: without its check the first loops 10⁹ times, and the third makes 10⁹ layers."""
    file = write(tmp_path / "tiny.gguf")
    told(file, key, skipped, value)
    assert words in refused(3, "pool", "gguf", file, tmp_path / "out", beside=tmp_path)


def test_a_file_that_changes_while_it_is_converted_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = write(tmp_path / "tiny.gguf"), tmp_path / "out"
    monkeypatch.setattr(
        "sigmerge.lab.pools.gguf._save_tokenizer", lambda *_: told(file, "blk.0", 0, 1)
    )
    with pytest.raises(PoolError, match="changed while it was read"):
        convert(file, out)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("I/O error")])
def test_a_full_disk_is_an_error_of_the_output(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr("sigmerge.lab.pools.gguf._save_model", full)
    file = write(tmp_path / "tiny.gguf")
    assert "cannot be written" in refused(
        4, "pool", "gguf", file, tmp_path / "out", beside=tmp_path
    )
