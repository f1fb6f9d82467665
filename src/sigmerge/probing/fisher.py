"""The capture pass over gradients: the diagonal Fisher information of an expert.

Block by block: one pass forward keeps the hidden states at every boundary between blocks; then,
from the head to the first block, a block is loaded, each exemplar passes through it again, and the
gradient at its output gives those of its weights and at its input. So memory is that of the hidden
states and one block: its weights, the sums, and gradients for every thread. Weights never move.

What lies outside the blocks comes last. A tied embedding is used at both ends, so only there the
gradient of an exemplar is whole, and can be squared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.statistics import Entry, block_file, norm_of, write_block
from sigmerge.engine.workers import Workers
from sigmerge.probing.capture import give_memory_back
from sigmerge.probing.exemplars import Tokens
from sigmerge.probing.skeleton import HEAD, BlockArguments, ModelPart, Read, Skeleton
from sigmerge.probing.threads import one_torch_thread

if TYPE_CHECKING:
    import torch
    from torch import nn

Gradients = Sequence["torch.Tensor | None"]


def capture_fisher(
    expert: Checkpoint,
    read: Read,
    tokens: Sequence[Tokens],
    folder: Path,
    *,
    labels: str = "argmax",
    seed: int = 0,
    threads: int = 1,
    device: str = "cpu",
    trust: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    wrote: Callable[[Path], None] = lambda file: None,
) -> float:
    """F: the mean over exemplars of each one's squared gradient of log p(label), into a folder.

    Labels: `argmax` and `sampled` are what the expert itself says after the prompt, the likeliest
    token or one drawn from its distribution; `data` is the whole response. Returns ‖F‖₂. Blocks
    that are there are only passed through. `progress` gets (passes done, passes in all), `wrote`
    every file that is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    give_memory_back()
    model = Skeleton(expert, read, device=device, trust=trust)
    depth = len(model.blocks)
    with one_torch_thread(), Workers(threads if device == "cpu" else 1) as workers:
        work = _Pass(model, tokens, labels, seed, workers)
        for i in range(depth):
            work.forward(i)
            progress(i + 1, 2 * depth)
        work.turn()
        for i in reversed(range(depth)):
            if work.backward(i, block_file(folder, i)):
                wrote(block_file(folder, i))
            progress(2 * depth - i, 2 * depth)
        work.outside(block_file(folder, None))
        wrote(block_file(folder, None))
    return norm_of(folder)


@dataclass
class _Pass:
    """All exemplars on their way through the model and back."""

    model: Skeleton
    tokens: Sequence[Tokens]
    labels: str
    seed: int
    workers: Workers
    states: list[list[torch.Tensor]] = field(default_factory=list)
    """Per boundary and exemplar: what enters block 0, 1, …, and last what leaves the stack."""
    calls: list[list[BlockArguments]] = field(default_factory=list)
    slopes: list[torch.Tensor] = field(default_factory=list)
    """Per exemplar the gradient at the boundary that was reached on the way back."""

    def __post_init__(self) -> None:
        states, self.calls = self.model.enter(self.tokens)
        self.states = [states]

    def forward(self, i: int) -> None:
        """All exemplars through block i; what leaves it is kept."""
        import torch

        with self.model.loaded(i) as block:

            def run(number: int) -> torch.Tensor:
                torch.set_num_threads(1)
                with torch.no_grad():
                    return _call(block, self.states[i][number], self.calls[number][i])

            self.states.append(list(self.workers.map(run, range(len(self.tokens)))))

    def turn(self) -> None:
        """The gradients at what leaves the last block."""
        import torch

        with self.model.loaded(HEAD) as head, torch.enable_grad():
            for number, state in enumerate(self.states[-1]):
                final = state.detach().requires_grad_()
                out, _ = self.model.leave(head, self.tokens[number], final)
                self.slopes += torch.autograd.grad(self._score(out.logits[0], number), final)

    def backward(self, i: int, file: Path) -> bool:
        """The gradients at what enters block i; and its file, if that is not there: whether so."""
        import torch

        wanted = not file.exists()
        with self.model.loaded(i, gradients=wanted) as block:
            weights = list(block.parameters()) if wanted else []

            def run(number: int) -> Gradients:
                torch.set_num_threads(1)
                state = self.states[i][number].detach().requires_grad_()
                with torch.enable_grad():
                    out = _call(block, state, self.calls[number][i])
                    asked, slope = [state, *weights], self.slopes[number]
                    return torch.autograd.grad(out, asked, slope, allow_unused=True)

            sums = _Squares(self.model, i, block, weights)
            for start in range(0, len(self.tokens), self.workers.threads):
                stop = min(start + self.workers.threads, len(self.tokens))
                for number, (slope, *found) in enumerate(
                    list(self.workers.map(run, range(start, stop))), start
                ):
                    assert slope is not None
                    self.slopes[number] = slope
                    sums.add(found)
        self.states.pop(i)
        if wanted:
            sums.write(file, len(self.tokens))
        return wanted

    def outside(self, file: Path) -> None:
        """What lies outside the blocks: as embeddings by the slope at the first block, as head and
        last norm by the score."""
        import torch

        with self.model.loaded(HEAD, gradients=True) as head, torch.enable_grad():
            weights = list(head.parameters())
            sums = _Squares(self.model, HEAD, head, weights)
            for number, state in enumerate(self.states[-1]):
                out, entering = self.model.leave(head, self.tokens[number], state)
                total = self._score(out.logits[0], number)
                total = total + (entering * self.slopes[number]).sum()
                sums.add(torch.autograd.grad(total, weights, allow_unused=True))
            sums.write(file, len(self.tokens))

    def _score(self, logits: torch.Tensor, number: int) -> torch.Tensor:
        return log_likelihood(logits, self.tokens[number], self.labels, (self.seed, number))


class _Squares:
    """Sums of squared gradients of a part's weights, in the exemplars' order."""

    def __init__(
        self, model: Skeleton, part: ModelPart, module: nn.Module, weights: Sequence[torch.Tensor]
    ) -> None:
        import torch

        self.model, self.part = model, part
        names = [local for local, _ in module.named_parameters()]
        self.sums = {
            local: torch.zeros_like(weight, requires_grad=False)
            for local, weight in zip(names, weights, strict=False)
        }

    def add(self, gradients: Gradients) -> None:
        import torch

        with torch.no_grad():
            for total, gradient in zip(self.sums.values(), gradients, strict=True):
                if gradient is not None:
                    total += gradient * gradient

    def write(self, file: Path, exemplars: int) -> None:
        arrays = {
            name: values.cpu().contiguous().numpy()
            for local, total in self.sums.items()
            for name, values in self.model.stored(self.part, local, total / exemplars).items()
        }
        write_block(file, {name: Entry("fisher", name, exemplars) for name in arrays}, arrays)


def _call(block: nn.Module, state: torch.Tensor, call: BlockArguments) -> torch.Tensor:
    args, kwargs = call
    out: Any = block(state, *args, **kwargs)
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found


def log_likelihood(
    logits: torch.Tensor, tokens: Tokens, labels: str, key: tuple[int, int]
) -> torch.Tensor:
    """log p of the labels of one exemplar, differentiable."""
    import torch

    logs = logits.log_softmax(dim=-1)
    if labels == "data":
        answer = torch.arange(tokens.answer, len(tokens.ids), device=logs.device)
        said = torch.tensor(tokens.ids[tokens.answer :], device=logs.device)
        value: torch.Tensor = logs[answer - 1, said].sum()
        return value
    last = logs[tokens.answer - 1]
    if labels == "argmax":
        return last.max()
    odds = last.detach().cpu().double().exp().cumsum(dim=0).numpy()
    drawn = np.random.default_rng(key).random() * odds[-1]
    return last[min(int(np.searchsorted(odds, drawn, side="right")), len(odds) - 1)]
