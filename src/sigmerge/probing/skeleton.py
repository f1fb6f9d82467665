"""A causal language model whose weights come one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.checkpoints.blocks import natural
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.source import PoolSource
from sigmerge.errors import MissingExtra, PoolError
from sigmerge.messages import matrix_name
from sigmerge.probing.bounded import bounded
from sigmerge.probing.exemplars import Tokens
from sigmerge.probing.hidden import decoder_blocks
from sigmerge.probing.loading import (
    JoinedTensors,
    checked_device,
    joins,
    loading,
    model_class,
    renaming,
    set_head,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

Read = Callable[[str], np.ndarray[Any, Any]]
"""From a tensor's name in the checkpoint to its float32 values."""
BlockArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a block besides the hidden states: masks, positions."""
ModelPart = int | str
Matrices = list[list[tuple[str, bool]]]
"""Of each matrix stacked in a parameter: its stored tensors, and whether each is (in, out)."""
BODY, HEAD = "body", "head"


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
    """The model of a checkpoint, its parts empty until their turn comes.

    A part is called by the name of its block, or HEAD (all outside the blocks) or BODY (that
    without the head, whose logits no capture of features reads).
    """

    def __init__(
        self,
        expert: Checkpoint,
        read: Read,
        *,
        device: str = "cpu",
        trust: bool = False,
        eager: bool = False,
    ) -> None:
        """With `eager`, a mixture's experts are multiplied one by one, and not in one call."""
        self.device = checked_device(device)
        model = _empty_model(expert.path, trust)
        if expert.head is not None:
            set_head(model, own=True)
        if eager:
            model.config._experts_implementation = "eager"
        if model.config.is_encoder_decoder:
            raise PoolError(f"{expert.path} is an encoder-decoder, of which no statistics are "
                            "captured; take an operator that reads no data.")  # fmt: skip
        _move_constants(model, self.device)
        stack = decoder_blocks(model)
        names = {id(module): name for name, module in model.named_modules()}
        self._read = read
        self._stored = StoredNames(model, expert)
        every = list(model.named_parameters(remove_duplicate=False))
        first = {id(weight): name for name, weight in reversed(every)}
        self._ties = {name: first[id(weight)] for name, weight in every}
        body = model.base_model
        self._parts: dict[ModelPart, tuple[nn.Module, str]] = {
            BODY: (body, names[id(body)]),
            HEAD: (model, ""),
        }
        self.blocks: list[nn.Module] = list(stack)
        for i, block in enumerate(self.blocks):
            self._parts[i] = block, f"{names[id(stack)]}.{i}"
        self._gates = [_gate(block) for block in self.blocks]
        for i, gate in enumerate(self._gates):
            stack[i] = gate

    def tensor(self, part: ModelPart, local: str) -> str:
        """The checkpoint's name of a parameter of a part."""
        return self._stored(self._ties[self._full(part, local)])

    def stored(self, part: ModelPart, local: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Values of a parameter under the names of the tensors that it was made of."""
        return self._stored.apart(self._ties[self._full(part, local)], values)

    def matrices(self, part: ModelPart, local: str, transposed: bool) -> Matrices:
        """The tensors of the matrices stacked in a parameter, all (in, out) or all (out, in).

        Found by following the number of a matrix and its input channels to where they are stored. A
        tensor that does not have all channels in order is left out.
        """
        import torch

        shape = self._parts[part][0].get_parameter(local).shape
        inputs = shape[1 if transposed else 2]
        channels = torch.arange(shape[0] * inputs, dtype=torch.int32).reshape(-1, inputs)
        values = channels.unsqueeze(2 if transposed else 1).expand(shape)
        found: Matrices = [[] for _ in range(shape[0])]
        for tensor, kept in self.stored(part, local, values).items():
            for i, matrix in enumerate(kept if kept.ndim == 3 else [kept]):
                name = matrix_name(tensor, i) if kept.ndim == 3 else tensor
                number = int(matrix[0, 0]) // inputs
                for line, turned in ((matrix[0], False), (matrix[:, 0], True)):
                    if torch.equal(line, channels[number]):
                        found[number].append((name, turned))
        return found

    @contextmanager
    def loaded(self, part: ModelPart, gradients: bool = False) -> Iterator[nn.Module]:
        """A part with its weights; with `gradients`, their gradients can be computed."""

        module = self._parts[part][0]

        def load(name: str, _: torch.Tensor) -> torch.Tensor:
            return self._stored.load(name, self._read).to(self.device)

        self._fill(part, load, gradients)
        yield module
        self._fill(part, lambda _, value: value.detach().to("meta"))

    def _fill(
        self,
        part: ModelPart,
        make: Callable[[str, torch.Tensor], torch.Tensor],
        gradients: bool = False,
    ) -> None:
        """Other values for a part's parameters; one that stands in two places stays one."""
        from torch import nn

        module, made = self._parts[part][0], {}
        for local, old in list(module.named_parameters(remove_duplicate=False)):
            name = self._ties[self._full(part, local)]
            if name not in made:
                made[name] = nn.Parameter(make(name, old), requires_grad=gradients)
            owner, _, attribute = local.rpartition(".")
            setattr(module.get_submodule(owner), attribute, made[name])

    def _full(self, part: ModelPart, local: str) -> str:
        return ".".join(filter(None, [self._parts[part][1], local]))

    def enter(
        self, tokens: Sequence[Tokens]
    ) -> tuple[list[torch.Tensor], list[list[BlockArguments]]]:
        """Per exemplar the hidden states that enter the first block, and every block's call."""
        import torch

        states, calls = [], []
        with self.loaded(BODY) as body, torch.no_grad():
            for row in tokens:
                body(input_ids=self.ids(row), use_cache=False)
                states.append(self._gates[0].hidden)
                calls.append([gate.call for gate in self._gates])
        return states, calls

    def leave(self, part: nn.Module, row: Tokens, state: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Run what stands around the blocks: its output on what the last block gave, and what
        enters the first."""
        for gate in self._gates:
            gate.answer = state
        out = part(input_ids=self.ids(row), use_cache=False)
        entering = self._gates[0].hidden
        for gate in self._gates:
            if any(tensor.requires_grad for tensor in _tensors(gate.call)):
                raise PoolError(
                    "Weights outside the blocks reach into them beside the hidden states; their "
                    "gradients cannot be taken block by block."
                )
            gate.answer = gate.hidden = None
        return out, entering

    def ids(self, row: Tokens) -> torch.Tensor:
        import torch

        return torch.tensor([row.ids], device=self.device)


class StoredNames:
    """Tensors in a checkpoint for parameters of a model.

    They may lack the model's own prefix, or have older names, which transformers renames; and
    several may be joined to one parameter, as the experts of a mixture are.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        renamed, known = renaming(model), {name for name, _ in model.named_parameters()}
        self._path = checkpoint.path
        self._names: dict[str, str] = {}
        self._joined: dict[str, JoinedTensors] = {}
        for stored in sorted(checkpoint.tensors, key=natural):
            name = renamed(stored)
            self._names[name] = self._names[f"{model.base_model_prefix}.{name}"] = stored
        for name, converter, pattern, target in joins(model, self._names):
            if target in known:
                group = self._joined.setdefault(target, JoinedTensors(target, converter, model))
                group.members[name] = self._names[name], pattern

    def __call__(self, name: str) -> str:
        if name not in self._names:
            raise PoolError(f"{self._path}: the model needs {name}, which is not stored under "
                            "that name; it cannot be captured.")  # fmt: skip
        return self._names[name]

    def load(self, name: str, read: Read) -> torch.Tensor:
        """The values of a parameter."""
        import torch

        if name in self._joined and name not in self._names:
            return self._joined[name].load(read)
        return torch.from_numpy(read(self(name)))

    def apart(self, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        if name in self._joined and name not in self._names:
            return self._joined[name].apart(values)
        return {self(name): values}


def _empty_model(folder: Path, trust: bool) -> Any:
    """The model with its large parameters on no device, and its constants computed."""
    try:
        import torch
        from torch.overrides import TorchFunctionMode
        from transformers import AutoConfig
    except ImportError as error:
        raise MissingExtra("A capture pass", ["transformers"], ["models"]) from error

    class EmptyIsNowhere(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            where = {"device": "meta"} if func is torch.empty else {}
            return func(*args, **{**(kwargs or {}), **where})

    with loading(folder, "a capture pass"), bounded(folder), EmptyIsNowhere():
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust
        )
        model = model_class(config).from_config(
            config, dtype=torch.float32, trust_remote_code=trust
        )
    return model.eval().requires_grad_(False)


def _gate(block: nn.Module) -> Any:
    """Replaces a block: records its arguments, and returns the hidden states unchanged."""
    from torch import nn

    class Gate(nn.Module):
        hidden: Any = None
        call: BlockArguments = ((), {})
        answer: Any = None

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.hidden = args[0] if args else kwargs.pop("hidden_states")
            self.call = (args[1:], kwargs)
            return self.hidden if self.answer is None else self.answer

        def __getattr__(self, name: str) -> Any:
            """What the model reads from a block, such as its kind of attention."""
            return getattr(block, name)

    return Gate()


def _tensors(call: Any) -> Iterator[torch.Tensor]:
    """The tensors among what a block is called with."""
    import torch

    if isinstance(call, torch.Tensor):
        yield call
    elif isinstance(call, tuple | list):
        for value in call:
            yield from _tensors(value)
    elif isinstance(call, dict):
        yield from _tensors(list(call.values()))


def _move_constants(model: nn.Module, device: str) -> None:
    """Move buffers that are computed rather than stored, such as rotary frequencies."""
    for part in model.modules():
        for name, value in part.named_buffers(recurse=False):
            if value.device.type != "meta":
                part._buffers[name] = value.to(device)
