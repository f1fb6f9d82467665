"""The capture pass over features: Grams and energies of an expert on its own exemplars.

Block by block: the hidden states that enter a block are kept for all exemplars; the block's weights
are loaded, the exemplars pass through it, its statistics are written, and everything but the new
hidden states is forgotten. So memory is that of one block, whatever the depth.

Exemplars are not padded and no sum is split over threads: any number of threads gives the same
bytes.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.statistics import Entry, block_file, packed, write_block
from sigmerge.core import Array
from sigmerge.engine.workers import Workers
from sigmerge.errors import PoolError
from sigmerge.probing.exemplars import Tokens
from sigmerge.probing.skeleton import BODY, BlockArguments, Matrices, ModelPart, Read, Skeleton
from sigmerge.probing.threads import one_torch_thread

if TYPE_CHECKING:
    import torch
    from torch import nn

M_MMAP_THRESHOLD, LARGE = -3, 1 << 18
"""glibc's number for the option, and from how many bytes memory is the system's own."""

TokenProgress = Callable[[int, int], None]

TOKENS_HELD = 2048
"""Tokens whose inputs are held before they are added to the Grams."""
PANEL = 512
"""Rows of a Gram that one worker adds to."""


def capture_features(
    expert: Checkpoint,
    read: Read,
    tokens: Sequence[Tokens],
    folder: Path,
    *,
    skip_bos: bool = False,
    threads: int = 1,
    device: str = "cpu",
    trust: bool = False,
    progress: TokenProgress = lambda done, total: None,
    wrote: Callable[[Path], None] = lambda file: None,
) -> None:
    """One file of statistics per block into a folder; blocks that are there are not done again.

    With `skip_bos` an exemplar's first token, on which models park huge activations, is left out of
    the sums. `progress` gets (blocks done, blocks in all), `wrote` every file that is written.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    give_memory_back()
    model = Skeleton(expert, read, device=device, trust=trust, eager=True)
    with one_torch_thread(), Workers(threads if device == "cpu" else 1) as workers:
        states, calls = model.enter(tokens)
        for i in range(len(model.blocks)):
            file = block_file(folder, i)
            sums = None if file.exists() else Sums(workers)
            with model.loaded(i) as block, _watching(model, i, block) if sums else nullcontext():
                entered = [(state, call[i]) for state, call in zip(states, calls, strict=True)]
                _advance(block, entered, sums, workers, skip_bos)
            if sums:
                sums.write(file)
                wrote(file)
            progress(i + 1, len(model.blocks))
        outside = Sums(workers)
        with model.loaded(BODY) as body, _watching(model, BODY, body):
            for row, state in zip(tokens, states, strict=True):
                with torch.inference_mode(), _noted(len(row.ids), skip_bos) as seen:
                    model.leave(body, row, state)
                outside.add([seen])
        outside.write(block_file(folder, None))
        wrote(block_file(folder, None))


def _advance(
    block: nn.Module,
    entered: list[tuple[torch.Tensor, BlockArguments]],
    sums: Sums | None,
    workers: Workers,
    skip_bos: bool,
) -> None:
    """All exemplars through one block; `sums` (if any) gathers what its layers read.

    The block's output takes the place of its input. New tensors that outlive a block would lie
    between its scratch in each thread's heap, which could then never be given back.
    """
    import torch

    def forward(item: tuple[torch.Tensor, BlockArguments]) -> tuple[torch.Tensor, Seen]:
        state, (args, kwargs) = item
        torch.set_num_threads(1)
        with torch.inference_mode(), _noted(state.shape[1], skip_bos) as seen:
            out = block(state, *args, **kwargs)
        return (out[0] if isinstance(out, tuple) else out), seen

    for group in _groups(entered):
        outs, seen = zip(*workers.map(forward, group), strict=True)
        if sums:
            sums.add(seen)
        with torch.inference_mode():  # only now: a layer may have read the input itself
            for (state, _), out in zip(group, outs, strict=True):
                state.copy_(out)


def _groups(
    entered: list[tuple[torch.Tensor, BlockArguments]],
) -> Iterator[list[tuple[torch.Tensor, BlockArguments]]]:
    group, held = [], 0
    for item in entered:
        group.append(item)
        held += item[0].shape[1]
        if held >= TOKENS_HELD:
            yield group
            group, held = [], 0
    if group:
        yield group


@dataclass
class Seen:
    """Records of one exemplar: inputs by the first tensor that read them, energies of norms."""

    length: int
    skip_bos: bool
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, tuple[str, bool]] = field(default_factory=dict)
    energies: dict[str, tuple[Array, int]] = field(default_factory=dict)
    stacks: dict[str, tuple[Matrices, int]] = field(default_factory=dict)
    """Parameters of which a stacked matrix was read: all of their matrices, and the channels."""

    def linear(self, tensor: str, x: torch.Tensor, transposed: bool) -> None:
        self._read(tensor, self._counted(x), transposed)

    def stacked(self, stack: str, number: int, matrices: Matrices, x: torch.Tensor) -> None:
        """Every row counts: the module was not shown a token that does not."""
        self.stacks[stack] = matrices, x.shape[-1]
        for tensor, transposed in matrices[number]:
            self._read(tensor, x.reshape(-1, x.shape[-1]), transposed)

    def _read(self, tensor: str, rows: torch.Tensor, transposed: bool) -> None:
        """Tensors that read the same memory share an input: queries, keys and values; gate, up."""
        for first, other in self.inputs.items():
            if rows.data_ptr() == other.data_ptr() and rows.shape == other.shape:
                self.shared[tensor] = first, transposed
                return
        self.inputs[tensor], self.shared[tensor] = rows, (tensor, transposed)

    def norm(self, tensor: str, scaled: torch.Tensor) -> None:
        rows = self._counted(scaled)
        self.energies[tensor] = rows.square().sum(dim=0).cpu().numpy(), len(rows)

    def _counted(self, x: torch.Tensor) -> torch.Tensor:
        """Rows that enter the sums. Norms of heads have several rows a token and keep them all."""
        rows = x.reshape(-1, x.shape[-1])
        return rows[1:] if self.skip_bos and len(rows) == self.length else rows


class Sums:
    """Grams and energies of one block while exemplars pass: float64, in the exemplars' order."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.shared: dict[str, tuple[str, bool]] = {}
        self.grams: dict[str, torch.Tensor] = {}
        self.energies: dict[str, Array] = {}
        self.rows: dict[str, int] = defaultdict(int)
        self.stacks: dict[str, tuple[Matrices, int]] = {}

    def add(self, group: Sequence[Seen]) -> None:
        import torch

        for seen in group:
            self.stacks |= seen.stacks
            for tensor, first in seen.shared.items():
                if self.shared.setdefault(tensor, first) != first:
                    raise PoolError(f"{tensor}: shares its input with {first[0]} in one text and "
                                    "not in another; it cannot be captured.")  # fmt: skip
            for name, (energy, count) in seen.energies.items():
                self.energies[name] = self.energies.get(name, 0.0) + energy
                self.rows[name] += count
        for name in dict.fromkeys(name for seen in group for name in seen.inputs):
            parts = [seen.inputs.pop(name) for seen in group if name in seen.inputs]
            self._add_gram(name, torch.cat(parts).double())

    def _add_gram(self, name: str, x: torch.Tensor) -> None:
        """The upper triangle of XᵀX, panel by panel."""
        import torch

        width = x.shape[1]
        if name not in self.grams:
            self.grams[name] = torch.zeros(width, width, dtype=torch.float64, device=x.device)
        gram = self.grams[name]
        self.rows[name] += len(x)

        def add(start: int) -> None:
            torch.set_num_threads(1)
            panel = slice(start, min(start + PANEL, width))
            gram[panel, start:] += x[:, panel].T @ x[:, start:]

        list(self.workers.map(add, range(0, width, PANEL)))

    def write(self, file: Path) -> None:
        entries = {name: Entry("gram", first, self.rows[first], transposed)
                   for name, (first, transposed) in self.shared.items()}  # fmt: skip
        entries |= {name: Entry("energy", name, self.rows[name]) for name in self.energies}
        arrays = {name: packed(gram.cpu().numpy()) for name, gram in self.grams.items()}
        for matrices, width in self.stacks.values():
            unreached = [one for one in chain(*matrices) if one[0] not in self.shared]
            for name, transposed in unreached:  # they share one Gram of zeros
                entries[name] = Entry("gram", unreached[0][0], 0, transposed)
                arrays[unreached[0][0]] = np.zeros(width * (width + 1) // 2)
        write_block(file, entries, {**arrays, **self.energies})


_local = threading.local()


@contextmanager
def _noted(length: int, skip_bos: bool) -> Iterator[Seen]:
    """While open, what watched layers read in this thread is noted here."""
    _local.seen = seen = Seen(length, skip_bos)
    yield seen
    del _local.seen


@contextmanager
def _watching(model: Skeleton, of: ModelPart, module: nn.Module) -> Iterator[None]:
    """While open, the inputs of norms are noted, and in blocks those of linear weights."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from sigmerge.probing.stacks import stacks

    def first(args: Any, kwargs: Any) -> torch.Tensor:
        value: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
        return value

    def linear(tensor: str, transposed: bool) -> Callable[..., None]:
        return lambda _, args, kwargs: _local.seen.linear(tensor, first(args, kwargs), transposed)

    def norm(tensor: str, centred: bool) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
            _local.seen.norm(tensor, normalised(first(args, kwargs), part, centred))

        return hook

    linears, name = of != BODY, partial(model.tensor, of)
    with ExitStack() as watched:
        for local, part in module.named_modules():
            weight = getattr(part, "weight", None)
            if linears and isinstance(part, nn.Linear | Conv1D):
                hook = linear(name(f"{local}.weight"), isinstance(part, Conv1D))
            elif "norm" in type(part).__name__.lower() and getattr(weight, "ndim", 0) == 1:
                hook = norm(name(f"{local}.weight"), takes_mean_out(part))
            else:
                if linears and (found := stacks(part)):
                    watched.enter_context(_watching_stacks(model, of, local, part, found))
                continue
            handle = part.register_forward_pre_hook(hook, with_kwargs=True)
            watched.callback(handle.remove)
        yield


@contextmanager
def _watching_stacks(
    model: Skeleton, of: ModelPart, local: str, part: nn.Module, found: dict[str, torch.Tensor]
) -> Iterator[None]:
    """While open, the inputs of matrices stacked in parameters of a part are noted.

    Which rows are an exemplar's first token is known only before the tokens are routed. Where it
    does not count, the part is first called without it, and that call is noted.
    """
    from sigmerge.probing.stacks import Products, without_first

    matrices = cache(partial(model.matrices, of))
    forward = part.forward

    def note(name: str, number: int, transposed: bool, x: torch.Tensor) -> None:
        stack = f"{local}.{name}"
        _local.seen.stacked(stack, number, matrices(stack, transposed), x)

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen: Seen = _local.seen
        if not seen.skip_bos:
            with Products(found, note):
                return forward(*args, **kwargs)
        if shown := without_first(seen.length, args, kwargs):
            with Products(found, note):
                forward(*shown[0], **shown[1])
        return forward(*args, **kwargs)

    part.forward = watched
    yield
    del part.forward


def normalised(inputs: torch.Tensor, norm: nn.Module, centred: bool) -> torch.Tensor:
    """x̂: what the norm multiplies with its scale, from its input and never from its output.

    A Gemma norm multiplies by 1 + w, and any scale may be near zero.
    """
    x = inputs.double()
    if centred:
        x = x - x.mean(dim=-1, keepdim=True)
    epsilon = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0
    return x / (x.square().mean(dim=-1, keepdim=True) + epsilon).sqrt()


def takes_mean_out(norm: nn.Module) -> bool:
    """Whether a norm standardises (LayerNorm) or only divides (RMSNorm), found by running it."""
    import torch

    with torch.inference_mode():
        weight: Any = norm.weight
        row = torch.linspace(-1.0, 2.0, weight.numel(), device=weight.device).unsqueeze(0)
        return bool(torch.allclose(norm(row), norm(row + 1.0), atol=1e-4))


def give_memory_back() -> None:
    """Make the allocator return large blocks to the system as soon as they are freed.

    glibc raises the size from which it does so as a program runs. Scratch of every block would then
    stay in the heaps of the threads, and memory grow with depth: 7 to 30 MB a block were seen.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, LARGE)
