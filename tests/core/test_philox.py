import numpy as np
import pytest

from sigmerge.core import philox

PYTHON_WORD = 0xFFFFFFFF


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds in Python's integers, for counters and keys of any value."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & PYTHON_WORD,
            (first >> 32) ^ c[3] ^ k[1],
            first & PYTHON_WORD,
        ]
        k = [(k[0] + 0x9E3779B9) & PYTHON_WORD, (k[1] + 0xBB67AE85) & PYTHON_WORD]
    return c


def draw(key: tuple[int, int], start: int, size: int) -> np.ndarray:
    out = np.empty(size, np.uint32)
    philox.fill(key, start, out)
    return out


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [PYTHON_WORD] * 4,
            [PYTHON_WORD] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
    ],
)
def test_known_answers_of_random123_hold_for_the_reference(counter, key, answer):
    assert philox4x32(counter, key) == answer


def test_known_answer_at_counter_zero():
    expected = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert draw((0, 0), 0, 4).tolist() == expected


@pytest.mark.parametrize("counter", [0, 1, 12345, PYTHON_WORD, PYTHON_WORD + 1, 2**40 + 7])
@pytest.mark.parametrize("key", [(0, 0), (1, 2), (PYTHON_WORD, PYTHON_WORD)])
def test_lanes_are_those_of_the_reference(counter, key):
    words = [counter & PYTHON_WORD, counter >> 32, 0, 0]
    assert draw(key, 4 * counter, 4).tolist() == philox4x32(words, list(key))


@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 11])
def test_a_draw_depends_on_its_index_alone(start, size):
    whole = draw((7, 8), 0, 32)
    assert np.array_equal(draw((7, 8), start, size), whole[start : start + size])


@pytest.mark.parametrize("start", [0, 1, 37, 63, 64, 130, 2**34 - 75, 2**40 + 30])
@pytest.mark.parametrize("size", [1, 27, 63, 64, 65, 128, 347])
def test_fills_of_any_place_and_size_are_those_of_the_reference(start, size):
    """A fill has whole blocks and parts; at index 2**34 the counter's second word changes."""
    key = (0xDEADBEEF, 0x12345678)
    first, last = start // 4, (start + size - 1) // 4
    counters = [[n & PYTHON_WORD, n >> 32, 0, 0] for n in range(first, last + 1)]
    draws = [word for counter in counters for word in philox4x32(counter, list(key))]
    assert draw(key, start, size).tolist() == draws[start % 4 :][:size]


def test_a_fill_writes_nothing_beside_its_array():
    room = np.full(400, 7, np.uint32)
    philox.fill((1, 2), 37, room[50:250])
    assert np.array_equal(room[50:250], draw((1, 2), 37, 200))
    assert (room[:50] == 7).all() and (room[250:] == 7).all()


def test_key_names_are_not_confused():
    keys = {
        philox.key_of(0, "ab", "c"),
        philox.key_of(0, "a", "bc"),
        philox.key_of(1, "ab", "c"),
        philox.key_of(0, "c", "ab"),
    }
    assert len(keys) == 4


def test_share_of_draws_below():
    draws = draw(philox.key_of(0, "share"), 0, 1 << 18)
    share = float(np.mean(draws < philox.keep_below(0.9)))
    assert abs(share - 0.9) < 0.003
    assert philox.keep_below(0.0) == 0
    assert philox.keep_below(1.0) == 2**32
