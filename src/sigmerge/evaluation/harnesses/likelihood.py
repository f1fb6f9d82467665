"""Items that are scored without generating: how likely a model finds a given text.

A `response` is read token by token after its prompt, its end token included. Of `choices`, the
model's is the one that it finds most likely. Both take one pass over an item, so hundreds of items
take seconds, and a small model that solves no task whole still shows what it learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from sigmerge.errors import ScoreError
from sigmerge.evaluation.answers import Scored
from sigmerge.evaluation.benchmark import Asked, Benchmark, HarnessScorer
from sigmerge.evaluation.costs import ItemCost, tokens
from sigmerge.evaluation.prompts import check_template, prompt_columns, prompt_of
from sigmerge.evaluation.sources import Item
from sigmerge.probing.generate import LoadedModel, Usage
from sigmerge.probing.reading import ReadText, read_texts

RESPONSE_METRICS = ("token_accuracy", "probability")
CHOICE_METRICS = ("choice", "choice_by_length")


class Likelihood(Benchmark):
    """`prompt` is a template over the record's columns; `response` or `choices` names a column.

    token_accuracy: the part of the response's tokens that are the model's first choice.
    probability: of a token of the response, the geometric mean. choice: whether the likeliest of
    the choices is the one with the number in the column `answer`. choice_by_length: the same with
    log-likelihoods divided by the choices' characters.
    """

    group: ClassVar[int | None] = 256
    timed: ClassVar[bool] = False

    harness: Literal["likelihood"]
    prompt: str = "{prompt}"
    response: str | None = None
    choices: str | None = None
    answer: str = "answer"
    chat_template: bool = False
    longest: int = Field(1024, ge=2)
    """Tokens of an item at most; a prompt that is too long loses its beginning."""

    @field_validator("prompt")
    @classmethod
    def _template(cls, value: str) -> str:
        return check_template(value)

    @model_validator(mode="after")
    def _one_of(self) -> Likelihood:
        if (self.response is None) == (self.choices is None):
            raise ValueError("give response: or choices:, the column with the text to be read")
        return self

    def metric_problem(self, key: str) -> str | None:
        known = RESPONSE_METRICS if self.choices is None else CHOICE_METRICS
        return None if key in known else f"is no metric here; there is {' and '.join(known)}"

    @property
    def columns(self) -> list[str]:
        read = [self.response] if self.response is not None else [self.choices, self.answer]
        return [*prompt_columns(self.prompt), *(column for column in read if column)]

    def check(self, name: str, items: Sequence[Item]) -> None:
        super().check(name, items)
        if self.choices is None:
            return
        for item in items:
            choices, answer = item.record[self.choices], item.record[self.answer]
            if not isinstance(choices, list) or not isinstance(answer, int):
                raise ScoreError(
                    f"{name}: the record {item.id} needs a list in {self.choices!r} and a number "
                    f"from 0 on in {self.answer!r}."
                )
            if not 0 <= answer < len(choices):
                raise ScoreError(
                    f"{name}: the answer {answer} of the record {item.id} is none of its "
                    f"{len(choices)} choices, which are counted from 0."
                )

    def cost(self, item: Item) -> ItemCost:
        times = len(item.record[self.choices]) if self.choices is not None else 1
        return ItemCost(times * tokens(item.record))

    def scorer(self, name: str, asked: Asked, items: Sequence[Item], folder: Path) -> HarnessScorer:
        return LikelihoodScorer(name, self, asked.model)


@dataclass(frozen=True)
class LikelihoodScorer:
    """One pass over every response, or over every choice of an item."""

    name: str
    mark: Likelihood
    model: LoadedModel

    def score(self, items: Sequence[Item]) -> tuple[dict[str, Scored], Usage]:
        mark = self.mark
        texts = [self._texts(item) for item in items]
        pairs = [
            (self._prompt(item), text)
            for item, some in zip(items, texts, strict=True)
            for text in some
        ]
        read, usage = read_texts(
            self.model,
            pairs,
            mark.longest,
            templated=mark.chat_template,
            ends=mark.choices is None,
        )
        found, results = iter(read), {}
        for item, some in zip(items, texts, strict=True):
            mine = [next(found) for _ in some]
            scores = self._response(mine[0]) if mark.choices is None else self._choice(item, mine)
            kept = {metric.key: scores[metric.key] for metric in mark.metrics.values()}
            results[item.id] = Scored(dict(kept))
        return results, usage

    def _texts(self, item: Item) -> list[str]:
        if self.mark.choices is None:
            return [str(item.record[str(self.mark.response)])]
        return [str(choice) for choice in item.record[self.mark.choices]]

    def _response(self, text: ReadText) -> dict[str, float]:
        return {
            "token_accuracy": text.first_choices / text.tokens,
            "probability": exp(text.log_likelihood / text.tokens),
        }

    def _choice(self, item: Item, found: Sequence[ReadText]) -> dict[str, float]:
        right, texts = item.record[self.mark.answer], self._texts(item)
        plain = [text.log_likelihood for text in found]
        by_length = [value / len(text) for value, text in zip(plain, texts, strict=True)]
        return {
            "choice": float(plain.index(max(plain)) == right),
            "choice_by_length": float(by_length.index(max(by_length)) == right),
        }

    def _prompt(self, item: Item) -> str:
        text = prompt_of(self.mark.prompt, item, self.name)
        return self.model.chat(text) if self.mark.chat_template else text
