"""Leaves of files hashed by processes of their own.

Threads that hash release Python's lock for each piece that they read and each that they hash, and
take it again: beside a merge on many cores, both wait for it. A process of its own has its own.

It runs this very file, with nothing but the standard library and the package that hashes, and ends
when its socket is closed, however the process that started it ended.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # a process of its own has no use for it, and is to start at once
    from subprocess import Popen

DIGEST_BYTES = 32
_BUFFER = 1 << 20
"""Bytes that are read at a time: caches hold them until they are hashed."""
_PATIENCE = 10.0
"""Seconds in which a process says that it is there."""
_READY = b"\0"
_ASKED = struct.Struct("=qqq")
"""Where leaves begin and end, and the bytes of one; the open file comes with it."""


def leaf_digests(
    descriptor: int,
    begin: int,
    end: int,
    size: int,
    hasher: Callable[[], Any],
    progress: Callable[[int], None] | None = None,
) -> bytes:
    """The digest of each leaf between two positions of a file, as far as the file goes."""
    buffer = memoryview(bytearray(min(_BUFFER, end - begin)))
    found = []
    for start in range(begin, max(end, begin + 1), size):
        value, at, stop = hasher(), start, min(start + size, end)
        while count := os.preadv(descriptor, [buffer[: stop - at]], at):
            value.update(buffer[:count])
            at += count
            if progress:
                progress(count)
        found.append(value.digest())
    return b"".join(found)


class Apart:
    """Processes that hash with BLAKE3, as many as threads ask at the same time."""

    def __init__(self) -> None:
        self._processes: list[Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._idle: list[socket.socket] = []
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for ours in self._sockets:
            ours.close()
        for process in self._processes:
            process.kill()  # it has nothing to lose, and may be stopped
            process.wait()

    def leaf_digests(
        self,
        descriptor: int,
        begin: int,
        end: int,
        size: int,
        hasher: Callable[[], Any],
        progress: Callable[[int], None] | None = None,
    ) -> bytes:
        """As the function, of BLAKE3. Where a process cannot be had, this one hashes."""
        found = self._asked(descriptor, begin, end, size)
        if found is None:
            self._failed = True
            return leaf_digests(descriptor, begin, end, size, hasher, progress)
        if progress:
            progress(end - begin)
        return found

    def _asked(self, descriptor: int, begin: int, end: int, size: int) -> bytes | None:
        found, wanted = b"", max(1, -(-(end - begin) // size)) * DIGEST_BYTES
        if self._failed:
            return None
        try:
            one = self._taken()
            socket.send_fds(one, [_ASKED.pack(begin, end, size)], [descriptor])
            while more := one.recv(wanted - len(found)):
                found += more
        except (OSError, ValueError):  # the latter from a package without a place
            return None
        if len(found) < wanted:
            return None
        self._idle.append(one)
        return found

    def _taken(self) -> socket.socket:
        try:
            return self._idle.pop()
        except IndexError:  # not asked before: another thread may take the last one
            return self._started()

    def _started(self) -> socket.socket:
        from importlib.util import find_spec
        from pathlib import Path
        from subprocess import DEVNULL, Popen

        package = find_spec("blake3")
        if package is None or package.origin is None or not sys.executable:
            raise OSError("no process can be started")
        folder = str(Path(package.origin).parent.parent)
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        with theirs:
            # Isolated and without site, it starts in 30 ms. A session of its own: Ctrl-C is for
            # the process that started it, whose end closes the socket.
            command = [sys.executable, "-I", "-S", __file__, folder, str(theirs.fileno())]
            process = Popen(
                command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        ours.settimeout(_PATIENCE)
        if ours.recv(1) != _READY:
            raise OSError("another program was started")
        ours.settimeout(None)  # a disk may be slow
        return ours


def _serve(folder: str, descriptor: int) -> None:
    sys.path.append(folder)
    from blake3 import blake3

    with socket.socket(fileno=descriptor) as theirs:
        theirs.sendall(_READY)
        while True:
            asked, files, _, _ = socket.recv_fds(theirs, _ASKED.size, 1)
            if not asked:
                return
            begin, end, size = _ASKED.unpack(asked)
            found = leaf_digests(files[0], begin, end, size, blake3)
            os.close(files[0])
            theirs.sendall(found)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
