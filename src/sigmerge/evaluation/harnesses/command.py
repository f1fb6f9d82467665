"""Own items, scored by a program of the user."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import field_validator

from sigmerge.errors import ScoreError
from sigmerge.evaluation.answers import Scored
from sigmerge.evaluation.benchmark import Asked, Benchmark, HarnessScorer
from sigmerge.evaluation.command_line import run_command, scored_by_command
from sigmerge.evaluation.how import How
from sigmerge.evaluation.scored_by import ScoredBy
from sigmerge.evaluation.sources import Item
from sigmerge.files.documents import parse_json
from sigmerge.files.scratch import scratch
from sigmerge.probing.generate import Usage


class Command(Benchmark):
    """A program gets `{checkpoint}` and `{items}`, a JSONL file, and prints {"id", metric…} lines.

    It is run in the suite file's folder.
    """

    in_memory: ClassVar[bool] = False
    answers: ClassVar[bool] = False

    harness: Literal["command"]
    command: str

    @field_validator("command")
    @classmethod
    def _line(cls, value: str) -> str:
        if not shlex.split(value):  # whose ValueError says what is unbalanced
            raise ValueError("is empty; give the program and its arguments")
        return value

    def scored_by(self, name: str, suite_folder: Path, how: How) -> ScoredBy:
        return scored_by_command(self.command, suite_folder, f"{name}.command")

    def scorer(self, name: str, asked: Asked, items: Sequence[Item], folder: Path) -> HarnessScorer:
        return CommandScorer(name, self, asked.shown, asked.suite_folder)


@dataclass(frozen=True)
class CommandScorer:
    """A user's program, called once per group of items."""

    name: str
    mark: Command
    checkpoint: Path
    folder: Path

    def score(self, items: Sequence[Item]) -> tuple[dict[str, Scored], Usage]:
        with scratch() as place:
            file = place / "items.jsonl"
            rows = [{**item.record, "id": item.id} for item in items]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            places = {"checkpoint": self.checkpoint, "items": file}
            lines = run_command(self.mark.command, places, self.folder, f"{self.name}.command")
        keys = [metric.key for metric in self.mark.metrics.values()]
        try:
            read = [parse_json(line, self.name, ScoreError, unique=True) for line in lines]
            results = {
                row["id"]: Scored({key: _fraction(row[key]) for key in keys}) for row in read
            }
        except (ValueError, KeyError, TypeError, ScoreError) as error:
            raise ScoreError(
                f'{self.name}: its command must print a line {{"id", {", ".join(keys)}}} for every '
                f"item ({error!r})."
            ) from None
        known = {item.id for item in items}
        return {i: result for i, result in results.items() if i in known}, Usage(1)


def _fraction(value: Any) -> float:
    """A score that a program printed; NaN is in no range."""
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{value!r} is no number from 0 to 1")
    return float(value)
