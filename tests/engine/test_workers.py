"""A team of threads ends, whatever was under way."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from sigmerge.engine.workers import Workers
from sigmerge.kept import _reusing, reusing


def _given_up() -> None:
    def block(number: int) -> int:
        for _ in workers.map(lambda _: time.sleep(0.01), range(100 if number else 0)):
            pass
        return number

    try:
        with Workers(2) as workers:
            done = workers.overlap(block, range(4), most=3)
            assert next(done) == 0
            time.sleep(0.2)  # two blocks have begun, and what the second one wants waits
            raise ValueError
    except ValueError:
        done.close()


def test_work_that_is_given_up_leaves_no_thread_waiting() -> None:
    """The pool ends before the drivers of `overlap` do: what they wait for is cancelled."""
    thread = threading.Thread(target=_given_up, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_no_driver_outlives_the_team() -> None:
    """A loop over `overlap` fails, and its traceback keeps the generator: nobody closes it."""
    over, late = threading.Event(), []

    def block(number: int) -> int:
        time.sleep(0.3 if number else 0)
        late.append(over.is_set())
        return number

    with pytest.raises(ZeroDivisionError), Workers(2) as workers:
        done = workers.overlap(block, range(2))
        for number in done:
            1 / number
    over.set()
    assert late == [False, False]


def test_no_more_items_are_at_work_than_are_asked_for() -> None:
    lock, at_work, most = threading.Lock(), 0, 0

    def work(item: int) -> int:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.02)
        with lock:
            at_work -= 1
        return item

    with Workers(4) as workers:
        assert list(workers.map(work, range(8), most=2)) == list(range(8))
        assert most == 2
        assert list(workers.map(work, range(8))) == list(range(8))
        assert most > 2


def test_python_changes_threads_more_often_while_a_team_works() -> None:
    before = sys.getswitchinterval()
    with Workers(2):
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before


def test_threads_work_in_the_context_of_who_started_them() -> None:
    """What a flag says for a command, such as --reuse, holds in its threads."""
    with reusing(), Workers(2) as workers:
        assert list(workers.map(lambda _: _reusing.get(), range(4))) == [True] * 4
        assert list(workers.overlap(lambda _: _reusing.get(), range(4))) == [True] * 4
