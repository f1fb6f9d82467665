"""Runs a command and turns what happened into an exit code."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import warnings
from contextvars import copy_context
from typing import NoReturn, TextIO

import click

from sigmerge.cli import (  # noqa: F401  (they add their commands)
    cache,
    experimenting,
    looking,
    mergekit,
    mergekits,
    merging,
    operators,
    pools,
    scoring,
    signals,
    trying,
    tuning,
)
from sigmerge.cli.app import app
from sigmerge.cli.show import is_verbose
from sigmerge.errors import (
    MemoryFull,
    OutputError,
    PoolError,
    SigmergeError,
    SigmergeWarning,
    is_panic,
)
from sigmerge.messages import printable, reason

_python_shows = warnings.showwarning
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_NO_THREAD = (
    "the system lets this process start no further thread: its memory, or the number of processes, "
    "is limited (ulimit -v, ulimit -u). Fewer --threads need less."
)
_LIBRARIES = (
    "ACCELERATE_", "CUBLAS_", "CUDA_", "HF_", "KMP_", "LD_PRELOAD", "MKL_", "NVIDIA_",
    "OMP_", "OPENBLAS_", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTORCH_", "RAY_", "TOKENIZERS_",
    "TORCH", "TRANSFORMERS_", "TRITON_", "VLLM_",
)  # fmt: skip
"""How variables begin by which libraries are told what to do."""
_HOMELESS = (
    "no home folder is known, of this user or of one behind ~. Write such paths in full; set HOME, "
    "or SIGMERGE_CACHE to a folder that can be written."
)


def run() -> NoReturn:
    """Run the command of sys.argv. A signal decides the exit code, whatever became of it."""
    try:
        signals.stop_orderly()
        warnings.showwarning = _show
        _LOG.setLevel(logging.INFO)
        _LOG.addHandler(_REPORTED)
        code = _ended()
        signals.leave_at_once()
    except signals.SignalArrived:
        code = signals.exit_code()
    sys.exit(signals.exit_code() if signals.arrived() else code)


def _ended() -> int:
    try:
        # Without standalone mode click returns the exit code of what ended early.
        # What a flag sets for the whole command, such as --rehash, ends with it.
        code = copy_context().run(app.main, prog_name="sigmerge", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except MemoryFull as error:
        return _full(error)
    except SigmergeError as error:
        return _failed(str(error), error.exit_code)
    except click.ClickException as error:
        error = _answered(error)
        if "--json" in sys.argv:
            return _failed(error.format_message(), 2)
        error.show()
        return 2
    except OSError as error:
        code = OutputError.exit_code if error.errno in _UNWRITABLE else 1
        return _failed(f"{error.filename or 'a file'}: {reason(error)}.", code)
    except MemoryError:
        said = "Out of memory. Fewer --threads need less; --dry-run says how much."
        return _failed(said, MemoryFull.exit_code)
    except Exception as error:
        if isinstance(error, RuntimeError) and "home directory" in str(error):
            return _failed(_HOMELESS, 2)
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return _failed(_NO_THREAD, MemoryFull.exit_code)
        from sigmerge.probing.memory import full, is_full

        if is_full(error):
            return _full(full(f"sigmerge {' '.join(sys.argv[1:2])}", error))
        if is_verbose() and not signals.arrived():
            raise
        told = sorted(name for name in os.environ if name.startswith(_LIBRARIES))
        others = (
            f"\nTry first without what libraries are told by {', '.join(told)}." if told else ""
        )
        return _failed(
            f"{type(error).__name__}: {error}\nThis is a fault of sigmerge, not of your input. "
            f"-v shows where it happened; please report it with that.{others}",
            1,
        )
    except BaseException as error:
        return _panicked(error)


def _answered(error: click.ClickException) -> click.ClickException:
    """The error; of an option of mergekit's, with what our verbs have for it."""
    if isinstance(error, click.NoSuchOption) and (ours := mergekits.foreign(error.option_name)):
        return click.UsageError(f"{error.message}: {ours}.", error.ctx)
    return error


def _panicked(error: BaseException) -> int:
    """A library in Rust gave up, on a damaged tokenizer as a rule; what else it is goes on."""
    if not is_panic(error):
        raise error
    return _failed(
        f"a library cannot go on ({error}). A tokenizer.json is damaged, as a rule; copy or "
        "download it again.",
        PoolError.exit_code,
    )


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings as a line; those of libraries as Python prints them."""
    if issubclass(category, SigmergeWarning):
        click.echo(f"warning: {printable(str(message))}", err=True)
    else:
        _python_shows(message, category, filename, lineno, file, line)


class _Reported(logging.Handler):
    """What the package reports while it works, as a line."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(printable(record.getMessage()), err=True)


_LOG, _REPORTED = logging.getLogger("sigmerge"), _Reported()


def _full(error: MemoryFull) -> int:
    """Report a full memory; what was done stays where the command says that it goes on."""
    goes_on = " What is done is kept: the same command goes on." if signals.goes_on() else ""
    return _failed(f"{error}{goes_on}", error.exit_code)


def _failed(message: str, code: int) -> int:
    """Report an error, unless a signal caused it; with --json as an object too."""
    from sigmerge.files.objects import with_addresses

    if signals.arrived():
        return code
    told = with_addresses(message)
    if "--json" in sys.argv:
        click.echo(json.dumps({"error": {"message": told, "exit_code": code}}, indent=2))
    click.echo(f"error: {printable(told)}", err=True)
    return code
