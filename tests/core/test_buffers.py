"""A thread's own memory is used again, and never two threads' or two purposes' at once."""

from __future__ import annotations

import threading

import numpy as np

from sigmerge.core import buffers


def test_memory_is_used_again_for_the_same_purpose_alone() -> None:
    first = buffers.room((3, 5), np.uint32, "one")
    first[:] = 7
    assert np.shares_memory(first, buffers.room(8, np.float32, "one"))
    assert not np.shares_memory(first, buffers.room(8, np.float32, "two"))


def test_what_is_large_is_not_kept() -> None:
    large = buffers.room(buffers.KEPT + 1, np.uint8, "large")
    assert not np.shares_memory(large, buffers.room(buffers.KEPT + 1, np.uint8, "large"))


def test_every_thread_has_its_own() -> None:
    mine, other = buffers.room(8, np.uint8, "own"), []
    thread = threading.Thread(target=lambda: other.append(buffers.room(8, np.uint8, "own")))
    thread.start()
    thread.join()
    assert not np.shares_memory(mine, other[0])


def test_only_what_was_lent_last_is_given_again() -> None:
    first = buffers.blank((4,), np.uint32, "test")
    second = buffers.blank((4,), np.uint32, "test")
    first[:] = 1
    buffers.keep_blank(first, "test")
    assert buffers.blank((4,), np.uint32, "test").tolist() == [0] * 4
    second[:] = 1
    buffers.keep_blank(second, "test")
    assert buffers.blank((4,), np.uint32, "test").tolist() == [0] * 4
