"""Wall time, CPU time and peak memory of commands, and the machine they ran on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple


class Cost(NamedTuple):
    """Seconds of wall and CPU time (user and system), peak resident bytes.

    `switches`: how often a thread gave its core up, to wait for a lock, a page or other threads.
    """

    wall: float
    cpu: float
    memory: float
    switches: float


class CommandFailed(Exception):
    """A measured command ended with an error; the message is what it wrote."""


def run(command: Iterable[str | Path], env: Mapping[str, str] | None = None) -> Cost:
    """The cost of one run. Earlier writes are flushed first, so that no one pays for another's."""
    os.sync()
    words = [str(word) for word in command]
    read, write = os.pipe()
    # Python keeps its compiled modules, as it does unless told otherwise.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    launch = [sys.executable, "-S", "-m", "benchmarks.child", f"/dev/fd/{write}", *words]
    with os.fdopen(read) as report:
        done = subprocess.run(
            launch,
            env={**inherited, **(env or {})},
            pass_fds=[write],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        os.close(write)
        numbers = report.read().split()
    if done.returncode:
        raise CommandFailed(f"{' '.join(words)}\n{done.stdout[-2000:]}")
    return Cost(*map(float, numbers))


def best(costs: Iterable[Cost]) -> Cost:
    """The least of each: what other processes add to a run is noise."""
    return Cost(*map(min, zip(*costs, strict=True)))


def drop(files: Iterable[Path]) -> None:
    """Take files out of the page cache, so that the next reader finds them on the disk."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def machine() -> str:
    """Cores, processor and memory, without any name of the host."""
    # What /proc/cpuinfo says of a processor differs between architectures; lscpu knows them.
    known = shutil.which("lscpu")
    lines = subprocess.check_output([known], text=True).splitlines() if known else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name:")]
    memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {models[0] if models else 'unknown CPU'}, {memory / 1e9:.0f} GB RAM"


def versions(*packages: str) -> str:
    """Of Python, these packages, and the sources: what a table is made with."""
    python = ".".join(map(str, sys.version_info[:3]))
    named = [f"Python {python}", *(f"{name} {_version(name)}" for name in packages)]
    return ", ".join([*named, f"commit {commit()}"])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a folder of sources
        return "not installed"


def commit() -> str:
    """The commit of these sources, `-dirty` where they differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        done = subprocess.run(
            words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
