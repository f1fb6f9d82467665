"""The errors of sigmerge. A message says what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DISTRIBUTION = "sigmerge-llm"
"""What the package is called on the package index."""


class SigmergeError(Exception):
    """An error a user can act on. The command line prints it without a traceback."""

    exit_code = 1

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([message, *(f"  - {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[Any, ...]:
        """As it is through a pipe between processes, whatever it was made of."""
        return Exception.__new__, (type(self), *self.args), self.__dict__ | {"args": self.args}


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust, such as the one that reads tokenizers, gave up.

    Its exceptions are none that `except Exception` catches.
    """
    return type(error).__module__ == "pyo3_runtime"


class SigmergeWarning(UserWarning):
    """Something that a user should know and that stops nothing."""


class RecipeError(SigmergeError):
    """The recipe is wrong or incomplete."""

    exit_code = 2


class PoolError(SigmergeError):
    """A checkpoint, or the checkpoints together, cannot be merged."""

    exit_code = 3


class ChangedInput(PoolError):
    """An input is not what it was when a job began, or when something was made of it earlier."""


class OutputError(SigmergeError):
    """The output folder cannot be written or replaced."""

    exit_code = 4


class ScoreError(SigmergeError):
    """Scores are missing, malformed or do not fit the pool."""

    exit_code = 5


class MemoryFull(SigmergeError):
    """The memory of a GPU or of this machine does not hold what is to be done."""

    exit_code = 7


class MissingExtra(SigmergeError):
    """Optional libraries are not installed; `extras` of this distribution bring them."""

    exit_code = 6

    def __init__(self, purpose: str, libraries: Sequence[str], extras: Sequence[str]) -> None:
        one = len(libraries) == 1
        super().__init__(
            f"{purpose} needs {' and '.join(libraries)}, which {'is' if one else 'are'} not "
            f"installed. Install {'it' if one else 'them'} with: {install(*extras)}"
        )


def install(*extras: str) -> str:
    """The command that installs extras."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


def require(purpose: str, **extras: Sequence[str]) -> None:
    """Raise MissingExtra where libraries of these extras are not installed. Loads none."""
    from importlib.util import find_spec

    lacking = {e: [name for name in each if find_spec(name) is None] for e, each in extras.items()}
    if libraries := [name for each in lacking.values() for name in each]:
        raise MissingExtra(purpose, libraries, [e for e, each in lacking.items() if each])
