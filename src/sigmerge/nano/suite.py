"""Greedy answers of a checkpoint to the prompts of a nano pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

from sigmerge.nano.facts import LONGEST_ANSWER

ANSWER_STEPS = LONGEST_ANSWER + 1  # the last one is for <eos>, without which no answer is exact


def answer(model: Any, tokenizer: Any, prompts: Sequence[str], batch_size: int = 256) -> list[str]:
    """The model's greedy answers, in the prompts' order."""
    encoded: list[list[int]] = tokenizer(list(prompts))["input_ids"]
    outputs: dict[int, str] = {}
    for rows in _batches([len(ids) for ids in encoded], batch_size):
        ids = torch.tensor([encoded[row] for row in rows], device=model.device)
        for row, tokens in zip(rows, _greedy(model, ids, tokenizer.eos_token_id), strict=True):
            outputs[row] = tokenizer.decode(tokens, skip_special_tokens=True)
    return [outputs[row] for row in range(len(encoded))]


def _batches(lengths: Sequence[int], batch_size: int) -> Iterable[list[int]]:
    """Rows of equal length, so that no batch needs padding."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for _, group in groupby(order, key=lengths.__getitem__):
        rows = list(group)
        for start in range(0, len(rows), batch_size):
            yield rows[start : start + batch_size]


@torch.inference_mode()
def _greedy(model: Any, ids: torch.Tensor, eos: int) -> list[list[int]]:
    """The most likely next tokens of each row, up to its <eos>."""
    chosen: list[torch.Tensor] = []
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    cache = None
    while len(chosen) < ANSWER_STEPS and not ended.all():
        output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, ids = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
        chosen.append(ids[:, 0])
        ended |= ids[:, 0] == eos
    rows = torch.stack(chosen, 1).tolist()
    return [row[: row.index(eos)] if eos in row else row for row in rows]
