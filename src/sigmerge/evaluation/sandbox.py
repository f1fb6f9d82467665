"""Running code that a model wrote: in a child process, without network, in an empty folder.

Limits on time, processor, memory, processes, file size and output hold for every run, and the
child's environment is empty. Every result names the mode it ran in: `namespaces`, all of it
enforced by the kernel; `landlock`, where there are no namespaces: files, TCP and signals by the
kernel, the rest by Python's audit events; `walled`, where there is neither: audit events alone,
behind which a program can read the user's files.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sigmerge.errors import SigmergeError

JAIL = Path(__file__).with_name("jail.py")
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")
MODES = ("namespaces", "landlock", "walled")


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
    """How a run ended. `status`: ok, failed, timeout, or output (too much of it)."""

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
    """The strongest mode that works here."""
    return next((mode for mode in MODES if works(mode)), "walled")


def works(mode: str) -> bool:
    """Whether the kernel allows a mode; `walled` needs nothing of it."""
    if mode == "walled" or not sys.platform.startswith("linux"):
        return mode == "walled"
    return execute("print('in')", Limits(seconds=20), mode=mode).stdout == "in\n"


def execute(
    program: str,
    limits: Limits | None = None,
    *,
    path: Sequence[str] = (),
    preload: Sequence[str] = (),
    mode: str | None = None,
) -> Outcome:
    """Run a Python program.

    `path` lists folders it may import from besides the standard library, `preload` the modules of
    them that are imported before the walls go up, as they may need what the walls forbid.
    """
    limits = limits or Limits()
    mode = mode or best_mode()
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, *path}
    settings = {
        "mode": mode,
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
    with tempfile.TemporaryDirectory(prefix="sigmerge-") as folder:
        start = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(JAIL), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={},
        )
        try:
            return _attend(child, b"%d\n%s" % (len(source), source), limits, mode, start)
        finally:
            _end(child)


def _attend(
    child: subprocess.Popen[bytes], source: bytes, limits: Limits, mode: str, start: float
) -> Outcome:
    """Feed the program, gather its output, and stop at a limit."""
    assert child.stdin and child.stdout and child.stderr
    gathered: dict[Any, bytearray] = {child.stdout: bytearray(), child.stderr: bytearray()}
    status = None
    with selectors.DefaultSelector() as selector:
        for stream in gathered:
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        os.set_blocking(child.stdin.fileno(), False)
        selector.register(child.stdin, selectors.EVENT_WRITE)
        while len(selector.get_map()) and status is None:
            left = limits.seconds - (time.perf_counter() - start)
            if left <= 0:
                status = "timeout"
                break
            for ready, _ in selector.select(min(left, 0.5)):
                if ready.fileobj is child.stdin:
                    source = _feed(child.stdin, source)
                    if not source:
                        selector.unregister(child.stdin)
                        child.stdin.close()
                elif not _gather(ready.fileobj, gathered):
                    selector.unregister(ready.fileobj)
            if sum(map(len, gathered.values())) > limits.output:
                status = "output"
    if status is None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, limits.seconds - (time.perf_counter() - start)))
        status = "timeout" if child.returncode is None else "failed" if child.returncode else "ok"
    texts = [bytes(part[: limits.output]).decode(errors="replace") for part in gathered.values()]
    seconds = time.perf_counter() - start
    return Outcome(status, child.returncode, texts[0], texts[1], seconds, mode)


def _feed(stream: IO[bytes], source: bytes) -> bytes:
    """What is left of the source after the pipe took some; nothing if the child stopped reading."""
    try:
        return source[os.write(stream.fileno(), source[:65536]) :]
    except BlockingIOError:
        return source
    except BrokenPipeError:
        return b""


def _gather(stream: Any, gathered: dict[Any, bytearray]) -> bool:
    """Read what is there; False at the end of the stream."""
    part = os.read(stream.fileno(), 65536)
    gathered[stream].extend(part)
    return bool(part)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child, which takes everything it started with it, and close the pipes."""
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    child.wait()
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream and not stream.closed:
            stream.close()
