"""A short trial of a model: how well it reads a few texts, whether it repeats itself when it
writes, and whether its chat template and its special tokens fit together."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sigmerge.errors import PoolError
from sigmerge.probing.generate import HfModel, Sampling
from sigmerge.probing.reading import read_texts

TEXTS = Path(__file__).with_name("trial.json")
UNKNOWN_PART = 0.1
"""A text of which the tokenizer does not know a larger part of the tokens is not read."""
MOST_READ, MOST_WRITTEN = 1024, 64
"""Tokens of a text, and of an answer."""
GRAM = 3
"""Tokens in a row that are counted as repeated where they stand a second time in an answer."""
_MARK = re.compile(r"<\|[^|<>\s]+\|>|<(?:start|end)_of_turn>")
"""What templates write between turns."""


@dataclass(frozen=True)
class DomainReading:
    """The texts of a domain that a model has read: their tokens, and its nats for them."""

    nats: float
    tokens: int
    characters: int


@dataclass(frozen=True)
class Behaviour:
    """What a trial of one model found. A domain whose texts its tokenizer does not know is left
    out; `repeated` is the share of token triples that stand more than once in one answer, `zeros`
    are the matrices that hold nothing but zeros."""

    readings: Mapping[str, DomainReading]
    repeated: float | None
    vocabulary: int
    template: bool
    faults: tuple[str, ...]
    zeros: tuple[str, ...]
    seconds: float


@cache
def trial_texts() -> tuple[Mapping[str, Sequence[tuple[str, str]]], Sequence[str]]:
    """By domain the beginnings of texts and what follows, which a model reads; and the prompts."""
    content = json.loads(TEXTS.read_text(encoding="utf-8"))
    texts = {d: [(first, rest) for first, rest in each] for d, each in content["texts"].items()}
    return texts, content["prompts"]


def behaviour(model: HfModel) -> Behaviour:
    """Try a loaded model."""
    start = time.perf_counter()
    texts, prompts = trial_texts()
    reads = not model.model.config.is_encoder_decoder  # which would read prompts alone
    readings = {
        domain: read
        for domain, each in texts.items()
        if reads
        and (
            read := _read(model, [pair for pair in each if _knows(model.tokenizer, "".join(pair))])
        )
    }
    repeated = _repeated(model, [text for text in prompts if _knows(model.tokenizer, text)])
    faults = tuple(dict.fromkeys(template_faults(model.tokenizer, model.model)))
    vocabulary = model.model.get_input_embeddings().weight.shape[0]
    matrices = [(name, each) for name, each in model.model.named_parameters() if each.ndim > 1]
    zeros = tuple(name for name, each in matrices if not each.any())
    template, took = bool(model.tokenizer.chat_template), time.perf_counter() - start
    return Behaviour(readings, repeated, vocabulary, template, faults, zeros, took)


def _knows(tokenizer: Any, text: str) -> bool:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids.count(tokenizer.unk_token_id) <= UNKNOWN_PART * len(ids)


def _positions(model: HfModel) -> int:
    found = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else MOST_READ


def _read(model: HfModel, pairs: Sequence[tuple[str, str]]) -> DomainReading | None:
    if not pairs:
        return None
    found, _ = read_texts(model, pairs, min(MOST_READ, _positions(model)))
    nats = -sum(each.log_likelihood for each in found)
    return DomainReading(
        nats, sum(each.tokens for each in found), sum(len(rest) for _, rest in pairs)
    )


def _repeated(model: HfModel, prompts: Sequence[str]) -> float | None:
    """The share of repeated triples of tokens in the likeliest answers, taken together."""
    if not prompts:
        return None
    length = min(MOST_WRITTEN, max(1, _positions(model) - MOST_WRITTEN // 4))
    told = Sampling(max_new_tokens=length, templated=True)
    try:
        asked = [model.chat(prompt) for prompt in prompts]
    except PoolError:  # the template is at fault, which template_faults says
        asked = list(prompts)
    answers, _ = model.generate(asked, told)
    every = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for [text] in answers]
    return repeated_share(every)


def repeated_share(answers: Sequence[Sequence[int]]) -> float:
    """Of all triples of neighbouring tokens the share that its answer has had before."""
    triples = [[tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)] for ids in answers]
    count = sum(map(len, triples))
    return (count - sum(len(set(each)) for each in triples)) / count if count else 0.0


def template_faults(tokenizer: Any, model: Any) -> Iterator[str]:
    """What does not fit between a chat template, the special tokens and the embedding."""
    rows = model.get_input_embeddings().weight.shape[0]
    for role, token in sorted(tokenizer.special_tokens_map.items()):
        for each in token if isinstance(token, list) else [token]:
            number = tokenizer.convert_tokens_to_ids(str(each))
            if number is None or number >= rows:
                yield f"{role} {each} is no row of the embedding, which has {rows:,}"
    ends = ending_tokens(tokenizer, model)
    yield from (
        f"a text ends with token {number}, which is no row of the embedding, which has {rows:,}"
        for number in ends
        if number >= rows
    )
    if not ends:
        yield "no token ends a text: neither tokenizer nor generation_config.json names one"
    if tokenizer.chat_template:
        yield from _rendering_faults(tokenizer, ends, rows)


def ending_tokens(tokenizer: Any, model: Any) -> list[int]:
    """The tokens at which generation stops."""
    told = getattr(model.generation_config, "eos_token_id", None)
    found = [tokenizer.eos_token_id, *(told if isinstance(told, list) else [told])]
    return list(dict.fromkeys(number for number in found if number is not None))


def _rendering_faults(tokenizer: Any, ends: Sequence[int], rows: int) -> Iterator[str]:
    asked, said = "How are you?", "sigmerge answers"
    turns = [{"role": "user", "content": asked}]
    answered = [*turns, {"role": "assistant", "content": said}]
    try:
        open_, full = (
            str(tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=more))
            for each, more in ((turns, True), (answered, False))
        )
    except Exception as error:  # it is a program, and may raise what it likes
        yield f"the chat template cannot be applied ({type(error).__name__}: {error})"
        return
    if asked not in open_ or said not in full:
        yield "the chat template leaves out what the user or the assistant says"
        return
    for mark in dict.fromkeys(_MARK.findall(full)):
        ids = tokenizer(mark, add_special_tokens=False)["input_ids"]
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
            yield f"the chat template writes {mark}, which is no token of the tokenizer"
        elif ids[0] >= rows:
            yield f"the chat template writes {mark}, which is no row of the embedding"
    after = full[full.rindex(said) + len(said) :]
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    if not set(ids) & set(ends):
        names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(list(ends)))) or "nothing"
        yield (
            "the chat template ends an answer without a token at which generation stops "
            f"({after.strip() or 'nothing'} instead of {names}): answers will not end"
        )


def perplexity(reading: DomainReading) -> float | None:
    """Of a token; None where the model's numbers are not finite."""
    mean = reading.nats / reading.tokens
    return math.exp(min(mean, 700.0)) if math.isfinite(mean) else None
