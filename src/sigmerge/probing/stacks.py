"""What enters the matrices that lie stacked in one parameter, as a mixture's experts do.

No layer of torch holds such a matrix; the model multiplies its inputs by a slice of the parameter.
While its module runs, products are looked at: where the other factor lies in memory tells which
slice it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Note = Callable[[str, int, bool, torch.Tensor], None]
"""Gets a parameter's name, a matrix's number in it, whether it is (in, out), and its inputs."""
MATMUL = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm)


class Products(TorchFunctionMode):
    """While open, inputs of matrices stacked in the given parameters are noted in this thread."""

    def __init__(self, stacks: Mapping[str, torch.Tensor], note: Note) -> None:
        super().__init__()
        self.stacks, self.note = stacks, note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear or func in MATMUL:
            inputs, weight = [*args, *kwargs.values()][:2]
            factor = weight.mT if func is functional.linear else weight
            for name, stack in self.stacks.items():
                if (found := _find(stack, factor)) and inputs.numel():
                    self.note(name, *found, inputs)
        return func(*args, **kwargs)


def _find(stack: torch.Tensor, factor: torch.Tensor) -> tuple[int, bool] | None:
    """Which matrix of a stack a factor of shape (in, out) is, and whether it is stored so."""
    if factor.untyped_storage().data_ptr() != stack.untyped_storage().data_ptr():
        return None
    number, rest = divmod(factor.storage_offset() - stack.storage_offset(), stack.stride(0))
    for matrix, transposed in ((factor, True), (factor.mT, False)):
        same = matrix.shape == stack.shape[1:] and matrix.stride() == stack.stride()[1:]
        if same and rest == 0:
            return number, transposed
    return None


def stacks(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters that are stacks of matrices."""
    own = module.named_parameters(recurse=False)
    return {name: weight for name, weight in own if weight.ndim == 3 and len(weight)}


def without_first(
    length: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]] | None:
    """A module's arguments without their first token; None if some have not a row a token."""
    for value in (*args, *kwargs.values()):
        if not isinstance(value, torch.Tensor) or len(value) != length:
            return None
    return [value[1:] for value in args], {name: value[1:] for name, value in kwargs.items()}
