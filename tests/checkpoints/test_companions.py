"""Vocabularies, read from whatever fixes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sigmerge
from sigmerge.checkpoints.companions import vocabulary
from sigmerge.errors import OutputError, PoolError
from sigmerge.files.cache import cache_folder
from tests.pools import VOCAB, make_pool, write_tokenizer


def fast(folder: Path, content: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_a_real_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    words = vocabulary(tmp_path)
    assert words == AutoTokenizer.from_pretrained(tmp_path).get_vocab() and len(words) == VOCAB


def test_unigrams_and_added_tokens(tmp_path: Path) -> None:
    model = {"vocab": [["<unk>", 0.0], ["a", -1.5], ["b", -2.0]]}
    added = [{"id": 3, "content": "<chat>"}, {"id": 0, "content": "<unk>"}]
    found = vocabulary(fast(tmp_path, {"model": model, "added_tokens": added}))
    assert found == {"<unk>": 0, "a": 1, "b": 2, "<chat>": 3}


def numbered(number: Any) -> Any:
    return {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "b", "id": number}]}


@pytest.mark.parametrize(
    "content",
    [
        {}, {"model": 3}, {"model": {"vocab": 3}}, {"model": {"vocab": [1]}}, numbered("1"),
        numbered(-1), numbered(True), numbered(1 << 40), {"model": {"vocab": [[5, 0.0]]}},
    ],
)  # fmt: skip
def test_a_tokenizer_without_a_vocabulary(tmp_path: Path, content: Any) -> None:
    with pytest.raises(PoolError, match=r"tokenizer\.json: holds no vocabulary"):
        vocabulary(fast(tmp_path, content))


def test_slow_tokenizers_are_compared_by_their_file(tmp_path: Path) -> None:
    assert vocabulary(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    assert vocabulary(tmp_path) == b"pieces"


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="Set SIGMERGE_CACHE to a folder that can be written"):
        cache_folder("digests")


def test_a_model_of_sentences_stays_one(tmp_path: Path) -> None:
    """Its pooling and its dense layer go into the result; folders outside it are not read."""
    pool = make_pool(tmp_path / "pool", experts=2)
    inner = {"1_Pooling/config.json": "{}", "2_Dense/config.json": '{"in_features": 16}',
             "2_Dense/model.safetensors": "weights", "other/config.json": "{}"}  # fmt: skip
    paths = ["", "1_Pooling", "2_Dense", "../math"]
    listed = [{"idx": i, "path": path} for i, path in enumerate(paths)]
    files = {
        **inner, "modules.json": json.dumps(listed), "sentence_bert_config.json": "{}",
        "config_sentence_transformers.json": "{}", "video_preprocessor_config.json": "{}",
    }  # fmt: skip
    for name, text in files.items():
        (pool.reference / name).parent.mkdir(exist_ok=True)
        (pool.reference / name).write_text(text)
    done = sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "out")
    for name, text in files.items():
        there = (tmp_path / "out" / name).is_file()
        assert there == (not name.startswith("other"))
        assert not there or (tmp_path / "out" / name).read_text() == text
    hashed = {Path(one.file).name for one in done.provenance.inputs}
    assert {"modules.json", "video_preprocessor_config.json"} <= hashed
    assert sigmerge.verify(tmp_path / "out").ok
    (pool.reference / "modules.json").write_text('["path"]')
    with pytest.raises(PoolError, match="is no list of modules"):
        sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "again")
