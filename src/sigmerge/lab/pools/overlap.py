"""Which training texts repeat a benchmark's items, exactly or nearly.

Texts are compared as rows of words: case folded, without punctuation. A training text repeats an
item if
- their prompts are the same words (exact), or
- eight words of the item's prompt stand in the text in a row, in its prompt or response (near), or
- the two share at least half of all rows of five words that either has, in their prompts or in
  prompts and answers together (near).

Eight words that stand in more than ten training texts are a common phrase, such as "Write a Python
function that takes a list of", and prove nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

LONG_ROW, SHORT_ROW = 8, 5
JACCARD = 0.5
COMMON_PHRASE = 10
_WORD = re.compile(r"\w+")
WordRow = tuple[int, ...]
"""Words in a row, by their numbers."""


@dataclass(frozen=True)
class Compared:
    """What is compared of a pair or an item: its prompt, and what answers it."""

    prompt: str
    answers: tuple[str, ...] = ()


def words(text: str) -> list[str]:
    """A text's words, as they are compared."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class _Halves:
    """Sets of rows of five words, found by one they share."""

    def __init__(self) -> None:
        self._having: dict[WordRow, list[int]] = {}
        self._sizes: list[int] = []
        self._homes: list[str] = []

    def add(self, name: str, rows: set[WordRow]) -> None:
        for row in rows:
            self._having.setdefault(row, []).append(len(self._sizes))
        self._sizes.append(len(rows))
        self._homes.append(name)

    def sharing(self, rows: set[WordRow]) -> Iterator[str]:
        """The names under which a set was added that has at least half of both in common."""
        shared = Counter(each for row in rows for each in self._having.get(row, ()))
        for each, count in shared.items():
            if count >= JACCARD * (len(rows) + self._sizes[each] - count):
                yield self._homes[each]


class Overlaps:
    """The items of all benchmarks, found by their rows of words."""

    def __init__(self, benchmarks: Mapping[str, Iterable[Compared]]) -> None:
        self._numbers: dict[str, int] = {}
        self._exact: dict[WordRow, set[str]] = {}
        self._long: dict[WordRow, set[str]] = {}
        self._prompts, self._wholes = _Halves(), _Halves()
        self._common: frozenset[WordRow] = frozenset()
        for name, items in benchmarks.items():
            for item in items:
                prompt, *answers = self._rows_of(item)
                if prompt:
                    self._exact.setdefault(prompt, set()).add(name)
                for row in _parts([prompt], LONG_ROW):
                    self._long.setdefault(row, set()).add(name)
                self._prompts.add(name, _parts([prompt], SHORT_ROW))
                self._wholes.add(name, _parts([prompt, *answers], SHORT_ROW))

    def pass_over_common_phrases(self, training: Iterable[Compared]) -> None:
        """Rows of eight words in more than ten of these texts prove nothing from now on."""
        counts: Counter[WordRow] = Counter()
        for text in training:
            counts.update(_parts(self._rows_of(text), LONG_ROW) & self._long.keys())
        self._common = frozenset(row for row, count in counts.items() if count > COMMON_PHRASE)

    def of(self, text: Compared) -> dict[str, str]:
        """The benchmarks that have an item which a text repeats -> exact or near."""
        rows = self._rows_of(text)
        found = dict.fromkeys(self._prompts.sharing(_parts(rows[:1], SHORT_ROW)), "near")
        found |= dict.fromkeys(self._wholes.sharing(_parts(rows, SHORT_ROW)), "near")
        for row in (_parts(rows, LONG_ROW) & self._long.keys()) - self._common:
            found |= dict.fromkeys(self._long[row], "near")
        return found | dict.fromkeys(self._exact.get(rows[0], ()), "exact")

    def _rows_of(self, text: Compared) -> list[WordRow]:
        """The prompt, then the answers, as numbers of words."""
        known = self._numbers
        return [
            tuple(known.setdefault(word, len(known)) for word in words(one))
            for one in (text.prompt, *text.answers)
        ]


def _parts(rows: Iterable[WordRow], length: int) -> set[WordRow]:
    """All rows of so many words inside these."""
    return {row[i : i + length] for row in rows for i in range(len(row) - length + 1)}
