"""The capture pass over gradients: the diagonal Fisher information of an expert.

The model is loaded at once, in float32, beside one set of sums and one set of gradients per thread.
Its weights never move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.statistics import Entry, block_file, write_block
from sigmerge.engine.stream import Workers
from sigmerge.errors import MissingExtra, PoolError
from sigmerge.probing.exemplars import Tokens
from sigmerge.probing.hidden import decoder_blocks
from sigmerge.probing.skeleton import StoredNames
from sigmerge.probing.threads import one_torch_thread

if TYPE_CHECKING:
    import torch


def capture_fisher(
    expert: Checkpoint,
    tokens: Sequence[Tokens],
    folder: Path,
    *,
    labels: str = "argmax",
    seed: int = 0,
    threads: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """F: the mean over exemplars of each one's squared gradient of log p(label), into a folder.

    Labels: `argmax` and `sampled` are what the expert itself says after the prompt, the likeliest
    token or one drawn from its distribution; `data` is the whole response. Returns ‖F‖₂.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = _load(expert.path)
    names = [name for name, _ in model.named_parameters()]
    weights = [weight for _, weight in model.named_parameters()]
    sums = [np.zeros(tuple(weight.shape), np.float32) for weight in weights]

    def gradients(number: int) -> list[np.ndarray[Any, Any] | None]:
        import torch

        torch.set_num_threads(1)
        with torch.enable_grad():
            score = log_likelihood(model, tokens[number], labels, (seed, number))
            found = torch.autograd.grad(score, weights, allow_unused=True)
        return [None if gradient is None else gradient.numpy() for gradient in found]

    with one_torch_thread(), Workers(threads) as workers:
        for start in range(0, len(tokens), workers.threads):
            group = range(start, min(start + workers.threads, len(tokens)))
            for found in list(workers.map(gradients, group)):
                for total, gradient in zip(sums, found, strict=True):
                    if gradient is not None:
                        total += gradient * gradient
            progress(group.stop, len(tokens))
    for total in sums:
        total /= len(tokens)
    _write(expert, _stored(model, names, expert), sums, folder, len(tokens))
    return float(np.sqrt(sum(np.square(total, dtype=np.float64).sum() for total in sums)))


def log_likelihood(model: Any, tokens: Tokens, labels: str, key: tuple[int, int]) -> torch.Tensor:
    """log p of the labels of one exemplar, differentiable in the weights."""
    import torch

    ids = torch.tensor([tokens.ids])
    logs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(dim=-1)
    if labels == "data":
        answer = torch.arange(tokens.answer, len(tokens.ids))
        value: torch.Tensor = logs[answer - 1, ids[0, answer]].sum()
        return value
    last = logs[tokens.answer - 1]
    if labels == "argmax":
        return last.max()
    odds = last.detach().double().exp().cumsum(dim=0).numpy()
    drawn = np.random.default_rng(key).random() * odds[-1]
    return last[min(int(np.searchsorted(odds, drawn, side="right")), len(odds) - 1)]


def _load(folder: Path) -> Any:
    try:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise MissingExtra("transformers", "models", "A capture pass") from error
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise PoolError(f"{folder} cannot be loaded for a capture pass: {error}") from error
    return model.eval()


def _stored(model: Any, names: list[str], expert: Checkpoint) -> list[str]:
    """The checkpoint's names of the model's parameters."""
    stack = decoder_blocks(model)
    path = next(name for name, module in model.named_modules() if module is stack)
    stored = StoredNames(path, expert)
    return [stored(name) for name in names]


def _write(
    expert: Checkpoint,
    names: list[str],
    sums: list[np.ndarray[Any, Any]],
    folder: Path,
    exemplars: int,
) -> None:
    blocks: dict[int | None, dict[str, Any]] = {}
    for name, total in zip(names, sums, strict=True):
        blocks.setdefault(expert.stack.block_of(name), {})[name] = total
    for block, arrays in blocks.items():
        entries = {name: Entry("fisher", name, exemplars) for name in arrays}
        write_block(block_file(folder, block), entries, arrays)
