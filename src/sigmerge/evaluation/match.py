"""Our own items: an answer is generated and compared with the right one by a matcher."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sigmerge.errors import ScoreError
from sigmerge.evaluation.sources import Item
from sigmerge.evaluation.store import Scored
from sigmerge.evaluation.suite import Jsonl
from sigmerge.probing.generate import Model, Sampling, Usage

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_CHOICE = re.compile(r"(?<![A-Za-z])\(?([A-Za-z])\)?(?![A-Za-z])")


def matches(matcher: str, output: str, answer: Any, ignore_case: bool = False) -> bool:
    """Whether an output is the right answer.

    exact: the same text, spaces at the ends aside. contains: the answer stands in it. number: its
    last number has the answer's value. regex: the answer is a pattern that is found in it.
    choice: its first letter that stands alone is the answer's.
    """
    text, right = output.strip(), str(answer).strip()
    if ignore_case and matcher in ("exact", "contains"):
        text, right = text.casefold(), right.casefold()
    if matcher == "exact":
        return text == right
    if matcher == "contains":
        return right in text
    if matcher == "regex":
        return re.search(right, text, re.IGNORECASE if ignore_case else 0) is not None
    if matcher == "choice":
        found = _CHOICE.search(text)
        return found is not None and found[1].upper() == right.strip("()").upper()
    numbers = _NUMBER.findall(text)
    wanted = _NUMBER.findall(right)
    return bool(numbers and wanted) and _value(numbers[-1]) == _value(wanted[-1])


def _value(number: str) -> float:
    return float(number.replace(",", ""))


@dataclass(frozen=True)
class JsonlScorer:
    """Greedy answers to prompts made from the records."""

    name: str
    mark: Jsonl
    model: Model

    def score(self, items: Sequence[Item]) -> tuple[dict[str, Scored], Usage]:
        mark = self.mark
        prompts = [self._prompt(item) for item in items]
        sampling = Sampling(
            mark.max_new_tokens, stop=tuple(mark.stop), templated=mark.chat_template
        )
        texts, usage = self.model.generate(prompts, sampling)
        key = next(iter(mark.metrics.values())).key
        results = {}
        for item, (text,) in zip(items, texts, strict=True):
            right = matches(mark.matcher, text, item.record[mark.answer], mark.ignore_case)
            results[item.id] = Scored({key: float(right)}, text)
        return results, usage

    def _prompt(self, item: Item) -> str:
        try:
            text = self.mark.prompt.format(**item.record)
        except (KeyError, ValueError, TypeError) as error:
            raise ScoreError(
                f"{self.name}: the prompt template {self.mark.prompt!r} does not fit the record "
                f"{item.id} ({error!r}); it has {', '.join(item.record)}."
            ) from None
        return self.model.chat(text) if self.mark.chat_template else text
