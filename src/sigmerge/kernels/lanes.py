"""Instructions on words side by side, for loops that the compiler itself leaves scalar.

Where a processor's registers hold fewer words, each becomes several that do not wait for one
another.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

WORD_LANES: Final = 16
"""Lanes of the widest registers."""


class Words:
    """Instructions on a word of each lane."""

    bits = 32

    def __init__(self, builder: Any) -> None:
        from llvmlite import ir

        self.type = ir.VectorType(ir.IntType(self.bits), WORD_LANES)
        self._builder, self.xor, self.both = builder, builder.xor, builder.and_

    def every(self, number: int) -> Any:
        return self.type([number] * WORD_LANES)

    def spread(self, word: Any) -> Any:
        """A word that is known when the code runs, in every lane."""
        first = self._builder.insert_element(self.every(0), word, word.type(0))
        return self._picked(first, first, [0] * WORD_LANES)

    def sum(self, *values: Any) -> Any:
        return functools.reduce(self._builder.add, values)

    def product(self, value: Any, factor: int) -> tuple[Any, Any]:
        """The high and the low words of products."""
        from llvmlite import ir

        wide = ir.VectorType(ir.IntType(64), WORD_LANES)
        whole = self._builder.mul(self._builder.zext(value, wide), wide([factor] * WORD_LANES))
        words = self._builder.bitcast(whole, ir.VectorType(ir.IntType(32), 2 * WORD_LANES))
        high, low = (self._picked(words, words, range(i, 2 * WORD_LANES, 2)) for i in (1, 0))
        return high, low

    def shifted(self, value: Any, right: int) -> Any:
        return self._builder.lshr(value, self.every(right))

    def transposed(self, rows: list[Any]) -> list[Any]:
        """The first words of all rows, then their second words, and so on, in as many rows.

        Each turn makes neighbours of what was half of all apart.
        """
        half = len(rows) // 2
        for _ in range(half.bit_length()):
            rows = [
                self._zipped(rows[i], rows[i + half], side) for i in range(half) for side in (0, 1)
            ]
        return rows

    def _zipped(self, one: Any, other: Any, half: int) -> Any:
        """The words of a half of each, by turns."""
        begin, end = half * WORD_LANES // 2, (half + 1) * WORD_LANES // 2
        both = [j for i in range(begin, end) for j in (i, WORD_LANES + i)]
        return self._picked(one, other, both)

    def _picked(self, one: Any, other: Any, numbers: Sequence[int]) -> Any:
        """The lanes of such numbers, where those of the other come after those of the one."""
        from llvmlite import ir

        order = ir.VectorType(ir.IntType(32), len(numbers))
        return self._builder.shuffle_vector(one, other, order(list(numbers)))


class WideWords(Words):
    """A word is the low half of a lane of 64 bits. What the high half has does not matter."""

    bits = 64

    def product(self, value: Any, factor: int) -> tuple[Any, Any]:
        whole = self._builder.mul(self.both(value, self.every(2**32 - 1)), self.every(factor))
        return self.shifted(whole, 32), whole


def words_to_multiply(builder: Any) -> Words:
    """x86 multiplies the low halves of wide lanes where they are. ARM multiplies packed words."""
    return WideWords(builder) if builder.module.triple.startswith("x86_64") else Words(builder)
