"""A causal language model whose weights come one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.source import PoolSource
from sigmerge.errors import MissingExtra, PoolError
from sigmerge.probing.exemplars import Tokens
from sigmerge.probing.hidden import decoder_blocks

if TYPE_CHECKING:
    import torch
    from torch import nn

Read = Callable[[str], np.ndarray[Any, Any]]
"""From a tensor's name in the checkpoint to its float32 values."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a block is called with beside the hidden states: masks, positions."""


def reader(expert: Checkpoint, reference: Checkpoint | None = None, scale: float = 1.0) -> Read:
    """Values of θ_ref + scale · (θ_k − θ_ref); of the expert itself at scale 1."""
    members = {"expert": expert, **({"reference": reference} if reference else {})}
    source = PoolSource(members)

    def values(member: str, tensor: str) -> np.ndarray[Any, Any]:
        out = np.empty(expert.tensors[tensor].shape, np.float32)
        source.fill(member, tensor, 0, out.reshape(-1))
        return out

    def read(tensor: str) -> np.ndarray[Any, Any]:
        own = values("expert", tensor)
        if scale != 1.0:
            base = values("reference", tensor)
            own = base + np.float32(scale) * (own - base)
        source.done(tensor, 0, own.size)
        return own

    return read


class Skeleton:
    """The model of a checkpoint, its parts empty until their turn comes."""

    def __init__(self, expert: Checkpoint, read: Read) -> None:
        model = _empty_model(expert.path)
        stack = decoder_blocks(model)
        names = {id(module): name for name, module in model.named_modules()}
        self._read, self._stored = read, StoredNames(names[id(stack)], expert)
        self._body = model.base_model
        self._lead = f"{names[id(self._body)]}." if names[id(self._body)] else ""
        self._stack = names[id(stack)]
        self.blocks: list[nn.Module] = list(stack)
        self._gates = [_gate(block) for block in self.blocks]
        for i, gate in enumerate(self._gates):
            stack[i] = gate

    def tensor(self, block: int | None, local: str) -> str:
        """The checkpoint's name of a parameter of a block, or of one outside the blocks."""
        return self._stored(f"{self._lead if block is None else f'{self._stack}.{block}.'}{local}")

    @contextmanager
    def loaded(self, block: int | None) -> Iterator[nn.Module]:
        """A block, or everything outside the blocks but the head, with its weights."""
        module = self._body if block is None else self.blocks[block]
        _load(module, lambda local: self._read(self.tensor(block, local)))
        yield module
        _unload(module)

    def enter(self, tokens: Sequence[Tokens]) -> tuple[list[torch.Tensor], list[list[Call]]]:
        """Per exemplar the hidden states that enter the first block, and every block's call."""
        states, calls = [], []
        with self.loaded(None) as body:
            for row in tokens:
                _run(body, row)
                states.append(self._gates[0].hidden)
                calls.append([gate.call for gate in self._gates])
        return states, calls

    def leave(self, body: nn.Module, row: Tokens, state: torch.Tensor) -> None:
        """Run what follows the blocks on what the last one gave."""
        for gate in self._gates:
            gate.answer = state
        _run(body, row)


class StoredNames:
    """Names in a checkpoint for names in a model: the former may lack the model's own prefix."""

    def __init__(self, stack: str, checkpoint: Checkpoint) -> None:
        prefix = checkpoint.stack.prefix
        if not f"{stack}.".endswith(prefix) or not prefix:
            raise PoolError(
                f"{checkpoint.path}: its blocks are stored under {prefix or 'no number'}, the "
                f"model has them under {stack}.; it cannot be captured."
            )
        self._extra = f"{stack}.".removesuffix(prefix)
        self._checkpoint = checkpoint

    def __call__(self, name: str) -> str:
        stored = name.removeprefix(self._extra)
        if stored not in self._checkpoint.tensors:
            raise PoolError(f"{self._checkpoint.path}: the model needs {stored}, which is not "
                            "stored under that name; it cannot be captured.")  # fmt: skip
        return stored


def _empty_model(folder: Path) -> Any:
    """The model with its large parameters on no device, and its constants computed."""
    try:
        import torch
        from torch.overrides import TorchFunctionMode
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtra("transformers", "models", "A capture pass") from error

    class EmptyIsNowhere(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            where = {"device": "meta"} if func is torch.empty else {}
            return func(*args, **{**(kwargs or {}), **where})

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        with EmptyIsNowhere():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise PoolError(f"{folder} cannot be loaded for a capture pass: {error}") from error
    return model.eval().requires_grad_(False)


def _gate(block: nn.Module) -> Any:
    """Stands where a block was: notes what it is called with, and passes hidden states on."""
    from torch import nn

    class Gate(nn.Module):
        hidden: Any = None
        call: Call = ((), {})
        answer: Any = None

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.hidden = args[0] if args else kwargs.pop("hidden_states")
            self.call = (args[1:], kwargs)
            return self.hidden if self.answer is None else self.answer

        def __getattr__(self, name: str) -> Any:
            """What the model asks a block about itself, such as its kind of attention."""
            return getattr(block, name)

    return Gate()


def _run(body: nn.Module, row: Tokens) -> None:
    import torch

    with torch.inference_mode():
        body(input_ids=torch.tensor([row.ids]), use_cache=False)


def _load(module: nn.Module, read: Read) -> None:
    import torch

    state = {name: torch.from_numpy(read(name)) for name, _ in module.named_parameters()}
    module.load_state_dict(state, strict=False, assign=True)
    module.requires_grad_(False)


def _unload(module: nn.Module) -> None:
    """Parameters go; constants such as rotary frequencies stay, for they are stored nowhere."""
    from torch import nn

    for part in module.modules():
        for name, value in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(value.to("meta"), requires_grad=False))
