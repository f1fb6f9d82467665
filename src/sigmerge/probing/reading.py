"""Texts that a model reads and does not write: how likely it finds each of their tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from sigmerge.errors import ScoreError
from sigmerge.probing.generate import HfModel, LoadedModel, Usage
from sigmerge.probing.memory import free_now, in_halves

PASS = {"cpu": 1 << 28, "cuda": 2 << 30}
"""Bytes that one pass takes at most; a GPU works at full speed from fewer on."""
FREE_SHARE = 4
"""One part in so many of the memory that is free: other processes may take of it meanwhile."""
TOKENS_AT_ONCE = 256
"""Tokens whose logits are float32 at a time."""
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
        some = _fitting(model, [rows[i] for i in left[: ROWS * model.batch_size]])
        read = in_halves(lambda most, some=some: _read(model, some[:most]), len(some), model.name)
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


def _fitting(model: HfModel, rows: Sequence[PairTokens]) -> Sequence[PairTokens]:
    """The first rows for which there is room now, at least one.

    A token takes its hidden states in a block, and one that is to be predicted its logits.
    """
    config, device = model.model.config.get_text_config(), model.model.device.type
    room = min(PASS[device], free_now(device) // FREE_SHARE)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    state = (8 * config.hidden_size + 3 * inner) * model.model.dtype.itemsize
    logits = config.vocab_size * model.model.dtype.itemsize
    wanted = 0
    for count, row in enumerate(rows, 1):
        wanted += len(row.ids) - row.begin
        if count * len(row.ids) * state + wanted * logits > room:
            return rows[: max(1, count - 1)]
    return rows


def _read(model: HfModel, rows: Sequence[PairTokens]) -> list[ReadText]:
    """One pass over rows that are padded at their ends, where no token of theirs looks."""
    torch, device, widest = model.torch, model.model.device, max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), widest), model.tokenizer.pad_token_id)
    seen, wanted = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)], seen[place, : len(row.ids)] = torch.tensor(row.ids), 1
        wanted[place, row.begin : len(row.ids)] = True
    ids, seen, wanted = ids.to(device), seen.to(device), wanted.to(device)
    before = wanted.roll(-1, 1)  # a token is predicted at the place before it
    tokens, likely, first = ids[wanted], [], []
    with torch.inference_mode():
        logits = _logits(model.model, ids, seen, before)
        for start in range(0, len(tokens), TOKENS_AT_ONCE):
            scores = logits[start : start + TOKENS_AT_ONCE].float()
            token = tokens[start : start + TOKENS_AT_ONCE]
            likely.append(scores.gather(1, token[:, None])[:, 0] - scores.logsumexp(1))
            first.append(scores.argmax(1) == token)
        lengths = [len(row.ids) - row.begin for row in rows]
        each = zip(torch.cat(likely).split(lengths), torch.cat(first).split(lengths), strict=True)
        values = torch.stack(
            [torch.stack([chance.double().sum(), right.sum().double()]) for chance, right in each]
        ).tolist()
    return [
        ReadText(value, int(right), length)
        for (value, right), length in zip(values, lengths, strict=True)
    ]


def _logits(model: Any, ids: Any, seen: Any, places: Any) -> Any:
    """The logits of some places alone, one row each: its head is given only their states."""
    head = model.get_output_embeddings()
    shape, chosen = ids.shape, False

    def choose(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        nonlocal chosen
        states = given[0]
        if states.shape[:2] != shape:
            return None
        chosen = True
        return states[places][None], *given[1:]

    hook = head.register_forward_pre_hook(choose) if head is not None else None
    try:
        logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits
    finally:
        if hook is not None:
            hook.remove()
    return logits[0] if chosen else logits[places]
