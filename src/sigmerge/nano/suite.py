"""Scores of a checkpoint on a pool's items: greedy generation, exact match, one number a domain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from sigmerge.nano.facts import DOMAINS, LONGEST_ANSWER, Fact
from sigmerge.nano.files import POOL, load_items
from sigmerge.probing.threads import one_torch_thread

STEPS = LONGEST_ANSWER + 1  # the last one is for <eos>, without which no answer is exact


@dataclass(frozen=True)
class Result:
    """What a checkpoint answered to one item."""

    id: str
    domain: str
    correct: bool
    output: str


@dataclass(frozen=True)
class Scores:
    """The results of all items, in the items' order."""

    results: tuple[Result, ...]

    @property
    def domains(self) -> dict[str, float]:
        """The fraction of right answers per domain."""
        marks: dict[str, list[bool]] = defaultdict(list)
        for result in self.results:
            marks[result.domain].append(result.correct)
        return {domain: sum(each) / len(each) for domain, each in marks.items()}

    @property
    def macro(self) -> float:
        """The unweighted mean over the domains."""
        domains = self.domains
        return sum(domains.values()) / len(domains)


def score(
    folder: str | Path,
    split: str = "calibration",
    *,
    pool: Path = POOL,
    limit: int | None = None,
    batch_size: int = 256,
    domains: Sequence[str] | None = None,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Score an HF folder on a split of a pool, in float32.

    `limit` takes the first items of each domain; `progress` hears (items done, items in all).
    """
    chosen = DOMAINS if domains is None else domains
    items = [fact for domain in chosen for fact in load_items(split, domain, pool)[:limit]]
    model, tokenizer = load(folder)
    model.to(device)
    with one_torch_thread():
        outputs = answer(model, tokenizer, [item.prompt for item in items], batch_size, progress)
    return Scores(tuple(_mark(item, output) for item, output in zip(items, outputs, strict=True)))


def load(folder: str | Path) -> tuple[Any, Any]:
    """The model of an HF folder in float32, and its tokenizer."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers: a model of this size is read in a blink."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _mark(item: Fact, output: str) -> Result:
    return Result(item.id, item.domain, output == item.answer, output)


def answer(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    batch_size: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """The model's greedy answers, in the prompts' order."""
    encoded: list[list[int]] = tokenizer(list(prompts))["input_ids"]
    outputs: dict[int, str] = {}
    for rows in _batches([len(ids) for ids in encoded], batch_size):
        ids = torch.tensor([encoded[row] for row in rows], device=model.device)
        for row, tokens in zip(rows, _greedy(model, ids, tokenizer.eos_token_id), strict=True):
            outputs[row] = tokenizer.decode(tokens, skip_special_tokens=True)
        if progress:
            progress(len(outputs), len(encoded))
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
    while len(chosen) < STEPS and not ended.all():
        output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, ids = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
        chosen.append(ids[:, 0])
        ended |= ids[:, 0] == eos
    rows = torch.stack(chosen, 1).tolist()
    return [row[: row.index(eos)] if eos in row else row for row in rows]
