"""The numbered decoder stack, found from tensor names (ruling 1)."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ENCODERS = ("encoder", "vision", "visual", "image", "audio")
"""Parts of the names of encoder stacks: of pictures, sound, or the text to answer."""
LONGEST_INDEX = 9
"""Digits of the largest block number."""


@functools.lru_cache(1 << 16)
def _numbered(name: str) -> tuple[str, int] | None:
    """The stack and the block that a tensor's name shows: its first part that is a number."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if not part:
            return None
        if part.isascii() and part.isdigit():
            fits = i > 0 and len(part) <= LONGEST_INDEX
            return (".".join(parts[:i]) + ".", int(part)) if fits else None
    return None


NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def starred(name: str) -> str:
    """A tensor's name with a star for its layer and its number among experts."""
    return NUMBER.sub("*", name)


def natural(name: str) -> list[Any]:
    """Sort key that puts layer 2 before layer 10; text and numbers alternate, text first."""
    parts: list[Any] = re.split(r"([0-9]+)", name)
    parts[1::2] = [(len(part.lstrip("0")), part.lstrip("0"), part) for part in parts[1::2]]
    return parts


@dataclass(frozen=True)
class Stack:
    """`prefix` as in "model.layers."; blocks are numbered 0 … depth-1.

    `gap` is the first number that no tensor has though a higher one has it.
    """

    prefix: str
    depth: int
    gap: int | None = None

    def block_of(self, name: str) -> int | None:
        """The block a tensor lies in, or None if it lies outside the stack."""
        found = _numbered(name)
        return found[1] if found and found[0] == self.prefix else None


def find_stack(sizes: Iterable[tuple[str, int]]) -> Stack:
    """The stack that holds most coordinates; an encoder only where no other holds a tenth of it.

    Only the first number in a name counts, so the experts of a mixture stay in their block.
    No stack at all gives depth 0: everything is outside.
    """
    weight: dict[str, int] = defaultdict(int)
    indices: dict[str, set[int]] = defaultdict(set)
    for name, size in sizes:
        if found := _numbered(name):
            weight[found[0]] += size
            indices[found[0]].add(found[1])
    if not indices:
        return Stack("", 0)
    least = max(weight.values()) / 10  # a projector between two stacks is none
    deciding = [
        prefix
        for prefix in indices
        if weight[prefix] >= least and not any(word in prefix for word in ENCODERS)
    ]
    prefix = max(sorted(deciding or indices), key=lambda candidate: weight[candidate])
    seen = indices[prefix]
    return Stack(prefix, len(seen), next((i for i in range(len(seen)) if i not in seen), None))


@dataclass(frozen=True)
class Blocks(Stack):
    """The blocks of tensors of which no configuration says what they are."""

    numbers: Mapping[str, int] = field(default_factory=dict, hash=False)
    """By what the names of a block begin with."""

    def block_of(self, name: str) -> int | None:
        found = _numbered(name)
        return self.numbers.get(f"{found[0]}{found[1]}." if found else _module(name))


def find_blocks(names: Iterable[str]) -> Blocks:
    """Every layer of every numbered stack; where nothing is numbered, every module.

    A pipeline of diffusion has several stacks side by side, and none is the model's only one.
    """
    listed = list(names)
    layers = {f"{found[0]}{found[1]}." for found in map(_numbered, listed) if found}
    blocks = layers or {_module(name) for name in listed}
    numbers = {block: i for i, block in enumerate(sorted(blocks, key=natural))}
    return Blocks("", len(numbers), None, numbers)


def _module(name: str) -> str:
    """What a tensor's name begins with before the part that says which of a module's it is."""
    return name.rpartition(".")[0] or name


def other_stacks(names: Iterable[str], stack: Stack) -> list[str]:
    """The prefixes of further stacks: of an encoder, or of what sees. A sequence with gaps is none,
    as of a projector some of whose members have no weights."""
    if isinstance(stack, Blocks):
        return []
    indices: dict[str, set[int]] = defaultdict(set)
    for prefix, block in filter(None, map(_numbered, names)):
        indices[prefix].add(block)
    indices.pop(stack.prefix, None)
    return sorted(prefix for prefix, seen in indices.items() if len(seen) == max(seen) + 1 > 1)


def positions(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """The block of every tensor that has one, in whatever stack, and how many that stack has."""
    numbered = {name: found for name in names if (found := _numbered(name))}
    depths: dict[str, int] = defaultdict(int)
    for prefix, block in numbered.values():
        depths[prefix] = max(depths[prefix], block + 1)
    return {name: (block, depths[prefix]) for name, (prefix, block) in numbered.items()}
