"""Ctrl-C and SIGTERM: one line and an exit code, whenever they come. Imports nothing heavy.

The first signal is an exception, which closes what is open; a second one does not wait for that.
While a library loads, an exception may be lost in it, so the command leaves at once; what that
leaves is what a kill leaves, and the next command removes it.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

_WORDS = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("terminated", 143)}
_GOES_ON = "; the same command goes on where it stopped"


class SignalArrived(BaseException):
    """A signal arrived. Not KeyboardInterrupt, which libraries catch."""


_arrived: list[int] = []
_resumable = _said = False


def leave_at_once() -> None:
    """From now on a signal ends the process where it is."""
    for number in _WORDS:
        signal.signal(number, _leave)


def stop_orderly() -> None:
    """From now on a signal raises SignalArrived."""
    _arrived.clear()
    resumable(False)
    for number in _WORDS:
        signal.signal(number, _stop)


def resumable(is_so: bool) -> None:
    """Whether the same command would go on where this one is."""
    global _resumable, _said
    _resumable, _said = is_so, False


def goes_on() -> bool:
    return _resumable


def arrived() -> bool:
    """Whether a signal came, also if a library has caught the exception."""
    return bool(_arrived)


def exit_code() -> int:
    """Say which signal came, once; its exit code."""
    global _said
    word, code = _WORDS[signal.Signals(_arrived[0])]
    if not _said:
        _said = True
        with suppress(OSError):  # whoever read it may have got the same signal
            os.write(2, f"{word}{_GOES_ON if _resumable else ''}\n".encode())
    return code


def _stop(number: int, frame: FrameType | None) -> None:
    leave_at_once()
    if _importing(frame):
        _leave(number, frame)
    _arrived.append(number)
    raise SignalArrived


def _leave(number: int, frame: FrameType | None) -> None:
    _arrived.append(number)
    code = exit_code()
    if processes := sys.modules.get("sigmerge.engine.processes"):
        processes.end_before_leaving()
    os._exit(code)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
