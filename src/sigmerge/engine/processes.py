"""Processes that work side by side and end with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor

LOOK_SECONDS = 0.2
"""At most how long a process outlives its parent."""


def process_pool(processes: int) -> ProcessPoolExecutor:
    """New processes, not forks: those of a process with threads, or with CUDA, may hang."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """A process that was killed cannot end its children: each looks whether it is still there."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
