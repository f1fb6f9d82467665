"""What an item costs at most, and how that becomes time at a model's speed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Speed:
    """Seconds for a token read, and for a step of generation with one row and with `rows`."""

    read: float
    one: float
    many: float
    rows: int

    def step(self, rows: int) -> float:
        slope = max(0.0, self.many - self.one) / max(1, self.rows - 1)
        return self.one + slope * (rows - 1)


@dataclass(frozen=True)
class ItemCost:
    """Of one item at most: tokens read, answers, which are in one batch, tokens of an answer."""

    read: float
    answers: int = 1
    longest: int = 0
    seconds: float = 0.0

    def time(self, speed: Speed, batch: int, part: float) -> float:
        rows = max(self.answers, batch)
        steps = part * self.longest * self.answers / rows
        return self.read * speed.read + steps * speed.step(rows) + self.seconds


def tokens(record: Mapping[str, Any]) -> float:
    """The tokens of a record's text, at four characters a token."""
    return len(json.dumps(record, ensure_ascii=False, default=str)) / 4
