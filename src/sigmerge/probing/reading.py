"""Texts that a model reads and does not write: how likely it finds each of their tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from sigmerge.errors import ScoreError
from sigmerge.probing.generate import HfModel, LoadedModel, Usage

LOGITS = {"cpu": 1 << 28, "cuda": 4 << 30}
"""Bytes of logits that one pass may make."""
ROWS = 16
"""Rows of a pass for every row of a batch that is generated: what is only read has no cache."""


class ReadText(NamedTuple):
    """A text that a model has read after its prompt."""

    log_likelihood: float
    first_choices: int
    """Tokens that the model found likelier than any other."""
    tokens: int


class PairTokens(NamedTuple):
    """The tokens of a prompt and of a text, and how many are the prompt's."""

    ids: list[int]
    begin: int


def read_texts(
    model: LoadedModel,
    pairs: Sequence[tuple[str, str]],
    longest: int,
    *,
    templated: bool = False,
    ends: bool = False,
) -> tuple[list[ReadText], Usage]:
    """What a model finds of each text after its prompt; with `ends`, of an end token after it too.

    With `templated`, prompts went through chat(). A pair of more than `longest` tokens loses the
    beginning of its prompt, then the end of its text.
    """
    if not isinstance(model, HfModel):
        raise ScoreError("A likelihood benchmark reads logits, which the hf backend has; use it.")
    if model.model.config.is_encoder_decoder:
        raise ScoreError(
            f"{model.name} is an encoder-decoder; a likelihood benchmark reads prompt and text as "
            "one. Give a benchmark that generates."
        )
    start = time.perf_counter()
    special = not (templated and model.tokenizer.chat_template)
    rows = _rows(model.tokenizer, pairs, longest, special, ends)
    # Rows of like length side by side need little padding.
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i].ids), i))
    found: dict[int, ReadText] = {}
    calls = 0
    while len(found) < len(rows):
        left = order[len(found) :]
        read = model.halving(lambda left=left: _read(model, _fitting(model, rows, left)))
        found |= dict(zip(left, read, strict=False))
        calls += 1
    usage = Usage(calls, sum(len(row.ids) for row in rows), 0, time.perf_counter() - start)
    return [found[i] for i in range(len(rows))], usage


def _rows(
    tokenizer: Any, pairs: Sequence[tuple[str, str]], longest: int, special: bool, ends: bool
) -> list[PairTokens]:
    end = [tokenizer.eos_token_id] if ends else []
    prompts = tokenizer([prompt for prompt, _ in pairs], add_special_tokens=special)["input_ids"]
    texts = tokenizer([text for _, text in pairs], add_special_tokens=False)["input_ids"]
    rows = []
    for pair, first, last in zip(pairs, prompts, texts, strict=True):
        last = [*last, *end][: longest - 1]
        first = first[max(0, len(first) + len(last) - longest) :]
        if not first or not last:
            raise ScoreError(
                f"A likelihood needs a prompt and a text; of {pair[0]!r}, {pair[1]!r} one is empty."
            )
        rows.append(PairTokens([*first, *last], len(first)))
    return rows


def _fitting(model: HfModel, rows: Sequence[PairTokens], left: Sequence[int]) -> list[PairTokens]:
    """The first rows, of which there is a batch, and room for the logits."""
    room = LOGITS[model.model.device.type] // (4 * model.model.config.get_text_config().vocab_size)
    some = [rows[i] for i in left[: ROWS * model.batch_size]]
    while len(some) > 1 and len(some) * len(some[-1].ids) > room:
        some.pop()
    return some


def _read(model: HfModel, rows: Sequence[PairTokens]) -> list[ReadText]:
    """One pass over rows that are padded at their ends, where no token of theirs looks."""
    torch, widest = model.torch, max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), widest), model.tokenizer.pad_token_id)
    seen = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)], seen[place, : len(row.ids)] = torch.tensor(row.ids), 1
    ids, seen = ids.to(model.model.device), seen.to(model.model.device)
    found = []
    with torch.inference_mode():
        logits = model.model(input_ids=ids, attention_mask=seen).logits
        for place, row in enumerate(rows):
            scores = logits[place, row.begin - 1 : len(row.ids) - 1].float()
            wanted = ids[place, row.begin : len(row.ids), None]
            likely = scores.gather(1, wanted)[:, 0] - scores.logsumexp(1)
            first = scores.argmax(1) == wanted[:, 0]
            found.append(torch.stack([likely.double().sum(), first.sum().double()]))
        values = torch.stack(found).tolist()
    return [
        ReadText(value, int(first), len(row.ids) - row.begin)
        for (value, first), row in zip(values, rows, strict=True)
    ]
