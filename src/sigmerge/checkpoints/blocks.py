"""The numbered decoder stack, found from tensor names (ruling 1)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

_NUMBERED = re.compile(r"^(?P<stack>(?:[^.]*[^.\d][^.]*\.)+?)(?P<index>\d+)\.")


@dataclass(frozen=True)
class Stack:
    """`prefix` as in "model.layers."; blocks are numbered 0 … depth-1."""

    prefix: str
    depth: int

    def block_of(self, name: str) -> int | None:
        """The block a tensor lies in, or None if it lies outside the stack."""
        found = _NUMBERED.match(name)
        if found is None or found["stack"] != self.prefix:
            return None
        return int(found["index"])


def find_stack(sizes: Iterable[tuple[str, int]]) -> Stack:
    """The stack that holds most coordinates among those numbered 0, 1, … without a gap.

    Only the first number in a name counts, so the experts of a mixture stay in their block.
    No stack at all gives depth 0: everything is outside.
    """
    weight: dict[str, int] = defaultdict(int)
    indices: dict[str, set[int]] = defaultdict(set)
    for name, size in sizes:
        if found := _NUMBERED.match(name):
            weight[found["stack"]] += size
            indices[found["stack"]].add(int(found["index"]))
    whole = [prefix for prefix, seen in indices.items() if seen == set(range(len(seen)))]
    if not whole:
        return Stack("", 0)
    prefix = max(sorted(whole), key=lambda candidate: weight[candidate])
    return Stack(prefix, len(indices[prefix]))
