"""Philox4x32-10 against the authors' known answers and a plain implementation."""

from __future__ import annotations

import numpy as np
import pytest

from sigmerge import _native

WORD = 0xFFFFFFFF


def draws(key: tuple[int, int], index: int) -> int:
    """One draw, as the paper writes it."""
    counter, (k0, k1) = [(index // 4) & WORD, index // 4 >> 32, 0, 0], key
    for _ in range(10):
        one, other = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (other >> 32) ^ counter[1] ^ k0, other & WORD, (one >> 32) ^ counter[3] ^ k1, one & WORD
        ]  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return counter[index % 4]


def test_the_authors_known_answer() -> None:
    out = np.empty(4, np.uint32)
    _native.draw(0, 0, 0, out)
    assert [hex(word) for word in out] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@pytest.mark.parametrize("start", [0, 1, 3, 61, 64, 2**34 - 70, 2**34 + 5, 2**40 + 63])
@pytest.mark.parametrize("count", [0, 1, 5, 64, 200])
def test_any_run_of_draws(start: int, count: int) -> None:
    key, out = (0xDEADBEEF, 0x12345678), np.empty(count, np.uint32)
    _native.draw(*key, start, out)
    assert out.tolist() == [draws(key, start + i) for i in range(count)]
