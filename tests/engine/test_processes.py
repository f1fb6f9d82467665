"""Processes end with the one that started them, however that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sigmerge.engine.processes import process_pool

SLEEP = """
import os, time
from sigmerge.engine.processes import process_pool
if __name__ == "__main__":
    with process_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 60)
        time.sleep(60)
"""


def test_results_come_from_other_processes() -> None:
    with process_pool(2) as pool:
        assert os.getpid() not in {pool.submit(os.getpid).result() for _ in range(4)}


def test_a_killed_process_leaves_none_behind() -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None
        child = int(made.stdout.readline())
        made.send_signal(signal.SIGKILL)
    for _ in range(100):
        if not _runs(child):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the child outlived its parent")


STOPPED = """
import os, sys, time
from sigmerge.cli import signals
from sigmerge.engine.processes import process_pool
if __name__ == "__main__":
    signals.stop_orderly()
    try:
        with process_pool(2) as pool:
            print(pool.submit(os.getpid).result(), flush=True)
            pool.submit(time.sleep, 60)
            pool.submit(time.sleep, 60)
            time.sleep(60)
    except signals.SignalArrived:
        sys.exit(signals.exit_code())
"""


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("all_of_them", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_pool_in_one_line(
    number: signal.Signals, all_of_them: bool, times: int
) -> None:
    """To the process alone, or to its group, once or, as `timeout` sends it, twice."""
    made = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert made.stdout is not None
    child = int(made.stdout.readline())
    for _ in range(times):
        (os.killpg if all_of_them else os.kill)(made.pid, number)
    _, said = made.communicate(timeout=30)
    line = {signal.SIGTERM: "terminated\n", signal.SIGINT: "interrupted\n"}[number]
    # The second may come when Python has put its own handlers away.
    assert said == line and made.returncode in {128 + number, *([-number] if times == 2 else [])}
    assert not _runs(child)


def _runs(process: int) -> bool:
    """Whether it is there and is not a zombie that nobody waits for."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
