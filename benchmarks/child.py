"""Run a command and report what it took: `python -S -m benchmarks.child FILE COMMAND …`.

A process of its own, because a child's peak memory starts from that of the process it was forked
from: this one is small.
"""

from __future__ import annotations

import os
import sys
import time


def main() -> int:
    report, command = sys.argv[1], sys.argv[2:]
    start = time.perf_counter()
    child = os.posix_spawnp(command[0], command, os.environ)
    _, status, usage = os.wait4(child, 0)
    wall = time.perf_counter() - start
    cpu = usage.ru_utime + usage.ru_stime
    with open(report, "w") as stream:  # noqa: PTH123 (pathlib would be another megabyte)
        stream.write(f"{wall} {cpu} {usage.ru_maxrss * 1024} {usage.ru_nvcsw}")
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
