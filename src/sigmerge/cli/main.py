"""The entry point: runs a command and turns what happened into an exit code."""

from __future__ import annotations

import os
import signal
import sys
from contextvars import copy_context
from types import FrameType
from typing import NoReturn

import typer

from sigmerge.cli import merging, nano, operators, scoring, tuning  # noqa: F401  (add commands)

# isort: split
from sigmerge.cli import experimenting  # noqa: F401  (its commands come after those above)

# isort: split
from sigmerge.cli.app import app
from sigmerge.errors import SigmergeError

INTERRUPTED, TERMINATED = 130, 143
RESUME = "the same command continues from the finished blocks"


class Terminated(BaseException):
    """SIGTERM arrived."""


def main() -> NoReturn:
    signal.signal(signal.SIGTERM, _terminate)
    try:
        # Without standalone mode typer returns the exit code of what it caught itself.
        # What a flag sets for the whole command, such as --rehash, ends with it.
        code = copy_context().run(app, standalone_mode=False)
        if code == INTERRUPTED:  # typer has turned Ctrl-C into its exit code
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except SigmergeError as error:
        _fail(str(error), error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        typer.echo(f"interrupted; {RESUME}", err=True)
        sys.exit(INTERRUPTED)
    except Terminated:
        typer.echo(f"terminated; {RESUME}", err=True)
        sys.exit(TERMINATED)
    except BrokenPipeError:  # as in `sigmerge operators | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}.", 1)
    except MemoryError:
        _fail("Out of memory. Fewer --threads need less; --dry-run says how much.", 1)
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")) and hasattr(error, "show"):
            error.show()
            sys.exit(2)
        if "SIGMERGE_DEBUG" in os.environ:
            raise
        _fail(
            f"{type(error).__name__}: {error}\nThis is a fault of sigmerge, not of your input. "
            "SIGMERGE_DEBUG=1 shows where it happened; please report it with that.",
            1,
        )


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second signal does not wait
    raise Terminated


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    sys.exit(code)
