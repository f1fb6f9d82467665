"""The numbered decoder stack, found from tensor names (ruling 1)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

_NUMBERED = re.compile(r"^(?P<stack>(?:[^.]*[^.\d][^.]*\.)+?)(?P<index>\d+)\.")


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
        found = _NUMBERED.match(name)
        if found is None or found["stack"] != self.prefix:
            return None
        return int(found["index"])


def find_stack(sizes: Iterable[tuple[str, int]]) -> Stack:
    """The stack that holds most coordinates.

    Only the first number in a name counts, so the experts of a mixture stay in their block.
    No stack at all gives depth 0: everything is outside.
    """
    weight: dict[str, int] = defaultdict(int)
    indices: dict[str, set[int]] = defaultdict(set)
    for name, size in sizes:
        if found := _NUMBERED.match(name):
            weight[found["stack"]] += size
            indices[found["stack"]].add(int(found["index"]))
    if not indices:
        return Stack("", 0)
    prefix = max(sorted(indices), key=lambda candidate: weight[candidate])
    seen = indices[prefix]
    return Stack(prefix, len(seen), next((i for i in range(len(seen)) if i not in seen), None))
