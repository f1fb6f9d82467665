"""Running code that a model wrote: in a child process, without network, in an empty folder.

Limits on time, processor, memory, file size and output hold for every run, and the child's
environment is empty. The kernel enforces all of it, and every result names the mode:
`namespaces+seccomp`, where the user's files are not there; or, where there are no namespaces,
`landlock+seccomp`, where they cannot be opened, though a program can test whether one exists, and
where no file can be written. In both a program is one process, so its memory is all it has, and
nothing of it is left when it is killed. Without either, nothing runs.

Bubblewrap is not used: it sets up the same namespaces, so that the filter of system calls and the
limits would still be ours, and one more program would have to be installed and trusted. Cgroups
are not used: they need a subtree that an administrator delegated, and a program of one process is
held by the limits of that process.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sigmerge.errors import SigmergeError
from sigmerge.files.scratch import scratch

JAIL = Path(__file__).with_name("jail.py")
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")
WATCH = 0.05
"""Seconds after which a child's threads are counted again."""
MODES = ("namespaces+seccomp", "landlock+seccomp")


@dataclass(frozen=True)
class Limits:
    """Seconds, bytes and counts; `seconds` is wall time of the whole run."""

    seconds: float = 60.0
    cpu: int = 60
    memory: int = 4 << 30
    processes: int = 16
    disk: int = 16 << 20
    output: int = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `status`: ok, failed, timeout, slow (a line), output, threads (too many)."""

    status: str
    code: int | None
    stdout: str
    stderr: str
    seconds: float
    mode: str


def require_permission(allowed: bool) -> None:
    """Generated code never runs unless the user said so."""
    if not allowed:
        raise SigmergeError(
            "This suite runs code that the model wrote. It runs in a sandbox, but only if you "
            "say so: pass --allow-code-execution."
        )


@functools.cache
def best_mode() -> str:
    """The stronger mode that works here."""
    found = {}
    for mode in MODES:
        lack = lacks(mode)
        if lack is None:
            return mode
        found[mode] = lack
    raise SigmergeError(
        "Programs that a model wrote do not run here, as nothing would hold them: "
        + "; ".join(f"{mode}: {lack}" for mode, lack in found.items())
        + ". They need Linux on x86-64 or ARM64 with seccomp, and either namespaces or Landlock."
    )


def lacks(mode: str) -> str | None:
    """What a mode needs and this system does not have; None if it works."""
    if not sys.platform.startswith("linux"):
        return f"needs Linux, not {sys.platform}"
    outcome = execute("print('in')", Limits(seconds=20), mode=mode)
    if outcome.stdout == "in\n":
        return None
    said = outcome.stderr.strip().splitlines()
    return said[-1].removeprefix("jail: ") if said else outcome.status


def execute(
    program: str,
    limits: Limits | None = None,
    *,
    path: Sequence[str] = (),
    preload: Sequence[str] = (),
    given: bytes = b"",
    pace: Sequence[float] = (),
    mode: str | None = None,
) -> Outcome:
    """Run a Python program.

    `path` lists folders it may import from besides the standard library, `preload` the modules of
    them that are imported before the filter is set, as they may need what it forbids. `given` is
    what the program finds on its standard input. `pace` holds the seconds that it may take for each
    line of its output; a program that takes longer is slow and stopped.
    """
    limits = limits or Limits()
    mode = mode or best_mode()
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, *path}
    settings = {
        "mode": mode,
        "parent": os.getpid(),
        "python": str(Path(sys.executable).resolve()),
        "path": list(path),
        "preload": list(preload),
        "visible": [*SYSTEM, *sorted(prefixes)],
        "cpu": limits.cpu,
        "memory": limits.memory,
        "processes": limits.processes,
        "disk": limits.disk,
    }
    source = program.encode()
    with scratch() as folder:
        start = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(JAIL), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            sent = b"%d\n%s%s" % (len(source), source, given)
            return _attend(child, memoryview(sent), limits, pace, mode, start)
        finally:
            _end(child)


def _attend(
    child: subprocess.Popen[bytes],
    source: memoryview,
    limits: Limits,
    pace: Sequence[float],
    mode: str,
    start: float,
) -> Outcome:
    """Feed the program, gather its output, and stop at a limit."""
    assert child.stdin and child.stdout and child.stderr
    gathered: dict[Any, bytearray] = {child.stdout: bytearray(), child.stderr: bytearray()}
    status, lines, since = None, 0, start
    with selectors.DefaultSelector() as selector:
        for stream in gathered:
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        os.set_blocking(child.stdin.fileno(), False)
        selector.register(child.stdin, selectors.EVENT_WRITE)
        while len(selector.get_map()) and status is None:
            now = time.perf_counter()
            left = limits.seconds - (now - start)
            line_left = pace[lines] - (now - since) if lines < len(pace) else left
            if min(left, line_left) <= 0:
                status = "timeout" if left <= 0 else "slow"
                break
            if _crowded(child, limits):
                status = "threads"
                break
            for ready, _ in selector.select(min(left, line_left, WATCH)):
                if ready.fileobj is child.stdin:
                    source = _feed(child.stdin, source)
                    if not source:
                        selector.unregister(child.stdin)
                        child.stdin.close()
                    continue
                part = os.read(ready.fd, 65536)
                gathered[ready.fileobj].extend(part)
                if not part:
                    selector.unregister(ready.fileobj)
                elif ready.fileobj is child.stdout and b"\n" in part:
                    lines, since = lines + part.count(b"\n"), time.perf_counter()
            if sum(map(len, gathered.values())) > limits.output:
                status = "output"
    if status is None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, limits.seconds - (time.perf_counter() - start)))
        status = "timeout" if child.returncode is None else "failed" if child.returncode else "ok"
    texts = [part[: limits.output].decode(errors="replace") for part in gathered.values()]
    seconds = time.perf_counter() - start
    return Outcome(status, child.returncode, texts[0], texts[1], seconds, mode)


def _crowded(child: subprocess.Popen[bytes], limits: Limits) -> bool:
    """Whether the child has too many threads. No limit of the kernel binds root, which a program
    stays under Landlock if no other user can read the interpreter's files."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{child.pid}/task")) > 1 + limits.processes  # noqa: PTH208
    return False


def _feed(stream: IO[bytes], source: memoryview) -> memoryview:
    """What is left of the source after the pipe took some; nothing if the child stopped reading.

    It is a view: to copy the rest of a hundred megabytes for every piece took most of a minute.
    """
    try:
        return source[os.write(stream.fileno(), source[:65536]) :]
    except BlockingIOError:
        return source
    except BrokenPipeError:
        return source[:0]


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child's process group, which the filter lets no process leave; close the pipes.

    A child that has ended already is not signalled: its number may belong to another process.
    """
    if child.returncode is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream and not stream.closed:
            stream.close()
