"""The checksum is that of its definition, in any pieces, and differs where bytes differ."""

from __future__ import annotations

import numpy as np
import pytest

from sigmerge.kernels.checksum import checksum


def brute(data: bytes) -> int:
    padded = data + bytes(-len(data) % 8)
    total = 0
    for i in range(len(padded) // 8):
        low = int.from_bytes(padded[8 * i : 8 * i + 4], "little")
        high = int.from_bytes(padded[8 * i + 4 : 8 * i + 8], "little")
        low = (low + (i + 1) * 0x9E3779B1) % 2**32
        high = (high + (i + 1) * 0x85EBCA77 + 0x9E3779B1) % 2**32
        total += low * high
    return total % 2**64


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 4099])
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_against_brute_force(size: int, shift: int) -> None:
    data = np.random.default_rng(size).bytes(size + shift)
    view = memoryview(data)[shift:]
    assert checksum(view) == brute(data[shift:])
    for cut in (0, 8, 64, size // 16 * 8):
        if cut <= size:
            assert checksum(view[cut:], cut, checksum(view[:cut])) == brute(data[shift:])


def test_every_bit_and_every_swap_counts() -> None:
    data = bytearray(np.random.default_rng(0).bytes(256))
    sums = {checksum(memoryview(data))}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        sums.add(checksum(memoryview(data)))
        data[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + 8 * len(data)
    words = np.frombuffer(bytes(data), np.uint64)
    for i in range(0, 31):
        swapped = words.copy()
        swapped[[i, i + 1]] = swapped[[i + 1, i]]
        assert checksum(memoryview(swapped).cast("B")) not in sums


def test_zeros_of_another_length_differ() -> None:
    assert len({checksum(memoryview(bytes(8 * n))) for n in range(200)}) == 200
