"""The tokenizer: a round trip through its files, for every word."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sigmerge.nano.facts import build_all, vocabulary
from sigmerge.nano.tokenizer import SPECIAL, build_tokenizer, save_tokenizer


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> AutoTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(build_tokenizer(), folder)
    return AutoTokenizer.from_pretrained(folder)


def test_texts_come_back_as_they_were(loaded: AutoTokenizer) -> None:
    for domain in build_all(0).values():
        for fact in domain.evaluation:
            text = f"{fact.prompt} {fact.answer}"
            ids = loaded(text)["input_ids"]
            assert ids[0] == loaded.bos_token_id
            assert len(ids) == 1 + len(text.split())
            assert loaded.unk_token_id not in ids
            assert loaded.decode(ids, skip_special_tokens=True) == text


def test_specials_and_size(loaded: AutoTokenizer) -> None:
    assert len(loaded) == len(SPECIAL) + len(vocabulary())
    assert (loaded.pad_token, loaded.bos_token, loaded.eos_token, loaded.unk_token) == SPECIAL
    assert loaded("bogus", add_special_tokens=False)["input_ids"] == [loaded.unk_token_id]


def test_padding_is_on_the_left(loaded: AutoTokenizer) -> None:
    batch = loaded(["1 + 2 =", "translate baba to english ="], padding=True)
    assert batch["input_ids"][0][:1] == [loaded.pad_token_id]
    assert batch["attention_mask"] == [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
