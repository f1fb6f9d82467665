"""Tasks of test_ray.py. Every worker imports this file, so it imports nothing heavy."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def square(folder: Path, fatal: set[int], number: int) -> int:
    """Kills the process that it runs in, the first time that it has one of these numbers."""
    if number in fatal:
        mark = folder / str(number)
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def task_name(number: int) -> str:
    import ray

    return str(ray.get_runtime_context().get_task_name())


def dies(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def first_dies(marks: Path, function: Any, label: Any, item: Any) -> Any:
    mark = marks / label(item).replace("/", "-")
    if "layer 2" in mark.name and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return function(item)


def slow(seconds: float, number: int) -> tuple[int, str]:
    import ray

    time.sleep(seconds)
    return number, ray.get_runtime_context().get_node_id()


def share(number: int) -> float:
    """The part of a GPU that the task has."""
    import ray

    return float(ray.get_runtime_context().get_assigned_resources()["GPU"])
