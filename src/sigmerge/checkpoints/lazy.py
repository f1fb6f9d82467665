"""Lazy tensors: their values are computed from stored ones when they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sigmerge.checkpoints.header import Tensor
from sigmerge.core import Array

TensorRun = tuple[Tensor, int, int]
"""Elements from a first to a last of a tensor."""


class Values(Protocol):
    """Reads float32 values of tensors, stored or formed."""

    kept: dict[Tensor, Array]
    """Cached results of a pass over a whole tensor that every piece of it needs."""

    def __call__(self, tensor: Tensor, start: int, stop: int) -> Array: ...

    def raw(self, tensor: Tensor, start: int, stop: int) -> Array:
        """Bytes of a stored tensor, whose elements have one each."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class FormedTensor(Tensor):
    """A tensor whose float32 values are computed. `dtype` is that of the tensor it stands for.

    `file`, `begin` and `end` are those of a stored tensor that it comes from.
    """

    def made_of(self, start: int, stop: int) -> list[TensorRun]:
        """The stored elements that are read for the elements [start, stop)."""
        raise NotImplementedError

    def form(self, values: Values, start: int, out: Array) -> None:
        """Fill `out` with the values from `start` on; independent of how a tensor is cut."""
        raise NotImplementedError


@dataclass(frozen=True)
class RetypedTensor(FormedTensor):
    """A stored tensor that stands for one of another type."""

    stored: Tensor

    def made_of(self, start: int, stop: int) -> list[TensorRun]:
        return [(self.stored, start, stop)]

    def form(self, values: Values, start: int, out: Array) -> None:
        out[:] = values(self.stored, start, start + out.size)


def stored_pieces(tensor: Tensor, start: int, stop: int) -> list[TensorRun]:
    """The stored elements behind some elements of a tensor, which may be formed."""
    if not isinstance(tensor, FormedTensor):
        return [(tensor, start, stop)]
    return [found for part in tensor.made_of(start, stop) for found in stored_pieces(*part)]
