"""Words that rooms share: a guess at what a wrong name meant, a value cut to one line."""

from __future__ import annotations

import difflib
import errno
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def shown(value: Any) -> str:
    """A value from a file as an error shows it: never longer than a line."""
    return _SHORT.repr(value)


def nearest(name: Any, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that a wrong one may mean; `likeness` 1 takes no other spelling."""
    by_case = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(str(name)[:100].casefold(), list(by_case), 1, likeness)
    return by_case[near[0]] if near else None


def did_you_mean(name: Any, known: Iterable[str], otherwise: str | None = None) -> str:
    """The known name nearest to a wrong one as a question, or the list of all known names.

    `otherwise` stands in place of a list that would be too long.
    """
    names = list(known)
    if near := nearest(name, names):
        return f"did you mean {near!r}?"
    return otherwise or f"there are: {', '.join(names)}"


def unknown(what: str, name: Any, known: Iterable[str]) -> str:
    return f"{shown(name)} is no {what}; {did_you_mean(name, known)}"


def counted(number: int, noun: str) -> str:
    """So many of something."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def few(names: Sequence[str], most: int = 12) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def matrix_name(tensor: str, number: int) -> str:
    """What one of the matrices stacked in a tensor is called."""
    return f"{tensor}[{number}]"


def size(count: float) -> str:
    """Bytes in the largest unit that leaves a number of one or more."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def printable(text: str) -> str:
    """Text for a terminal: control characters, which names in a file may hold, are spelt out."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


def duration(seconds: float) -> str:
    """A time for people, to two digits; 0.1 s is the least."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.2g} {unit}" if seconds < 100 * length else (
                f"{seconds / length:.0f} {unit}")  # fmt: skip
    if seconds < 0.1:
        return "0.1 s"
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"


def reason(error: OSError) -> str:
    """Why the system refused; where it allows too few open files, how many, and what to do."""
    said = error.strerror or str(error)
    if error.errno != errno.EMFILE:
        return said
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return said
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = f"`ulimit -n {most}`" if now < most else "the hard limit, which root raises,"
    return f"{said}: {now} at once are allowed to a process, and {more} allows more"
