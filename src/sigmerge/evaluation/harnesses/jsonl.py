"""Our own items: an answer is generated and compared with the right one by a matcher."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from sigmerge.errors import ScoreError
from sigmerge.evaluation.answers import Scored
from sigmerge.evaluation.benchmark import Asked, Benchmark, HarnessScorer, Metric
from sigmerge.evaluation.costs import ItemCost, tokens
from sigmerge.evaluation.prompts import check_template, prompt_columns, prompt_of
from sigmerge.evaluation.sources import Item
from sigmerge.probing.generate import LoadedModel, Sampling, Usage

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_CHOICE = re.compile(r"(?<![A-Za-z])\(?([A-Za-z])\)?(?![A-Za-z])")


class Jsonl(Benchmark):
    """`prompt` is a template over the record's columns; `matches` has the matchers."""

    harness: Literal["jsonl"]
    prompt: str = "{prompt}"
    answer: str = "answer"
    matcher: Literal["exact", "contains", "number", "regex", "choice"] = "exact"
    ignore_case: bool = False
    chat_template: bool = False
    max_new_tokens: int = Field(64, ge=1)
    stop: list[str] = Field(default_factory=list)
    metrics: dict[str, Metric] = Field({"match": Metric(key="match")}, min_length=1)

    @field_validator("prompt")
    @classmethod
    def _template(cls, value: str) -> str:
        return check_template(value)

    def metric_problem(self, key: str) -> str | None:
        return None if key == "match" else "is no metric of a matcher; there is match"

    @property
    def columns(self) -> list[str]:
        """What a record must have."""
        return [*prompt_columns(self.prompt), self.answer]

    def check(self, name: str, items: Sequence[Item]) -> None:
        super().check(name, items)
        if self.matcher != "regex":
            return
        for item in items:
            pattern = str(item.record[self.answer])
            try:
                re.compile(pattern)
            except re.error as error:
                raise ScoreError(
                    f"{name}: the answer {pattern!r} of the record {item.id} is no regular "
                    f"expression ({error})."
                ) from None

    def cost(self, item: Item) -> ItemCost:
        return ItemCost(tokens(item.record), longest=self.max_new_tokens)

    def scorer(self, name: str, asked: Asked, items: Sequence[Item], folder: Path) -> HarnessScorer:
        return JsonlScorer(name, self, asked.model)


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
    model: LoadedModel

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
        text = prompt_of(self.mark.prompt, item, self.name)
        return self.model.chat(text) if self.mark.chat_template else text
