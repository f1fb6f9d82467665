"""The pool's tokenizer: one token per word, in the files that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from sigmerge.errors import PoolError
from sigmerge.files.documents import read_json_object
from sigmerge.nano.facts import vocabulary

PAD, BOS, EOS, UNKNOWN = SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CONTEXT = 64


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words at spaces, `<bos>` in front of every text, padding on the left for generation."""
    ids = {word: index for index, word in enumerate([*SPECIAL, *vocabulary()])}
    words = Tokenizer(WordLevel(ids, unk_token=UNKNOWN))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, ids[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The tokenizer's files, under the class name that every version of transformers knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = read_json_object(path, "a tokenizer's configuration", PoolError)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
