"""`sigmerge probe build`: probe prompts drawn under a seed, as many from each domain.

The text of a prompt ends where the response would begin. Records come from JSONL files, one for
each domain and named after it, or from the calibration items of a suite.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigmerge.errors import RecipeError, ScoreError
from sigmerge.evaluation import splits
from sigmerge.evaluation.prompts import prompt_of
from sigmerge.evaluation.sources import Data
from sigmerge.evaluation.suite import load_suite, nano_suite
from sigmerge.files.documents import read_json_lines, whole
from sigmerge.jobs.steps import Description, ProbeStep
from sigmerge.records import Part

COLUMNS = ("prompt", "query", "instruction", "inputs", "question")
"""Columns that may hold the prompt, in order of preference."""
TEMPLATE = "### Instruction:\n{prompt}\n\n### Response:\n"


class ProbeFile(Part):
    """The probe file that was written: how many prompts, of which domains."""

    file: str
    prompts: int
    domains: Mapping[str, int]
    seed: int


@dataclass(frozen=True)
class ProbeJob:
    """The probe file: {"prompt", "domain"} on every line, domains in their order.

    Prompts come from `data`, one JSONL file for each domain, or from a `suite` with its `folder`.
    """

    out: Path
    suite: str | None = None
    data: Sequence[Path] = ()
    folder: Path | None = None
    per_domain: int = 20
    seed: int = 0
    template: str = TEMPLATE

    def describe(self) -> Description:
        """Draws the prompts, and writes nothing."""
        drawn = self._drawn()
        content = _text(drawn).encode()
        step = ProbeStep(
            file=str(self.out),
            prompts={domain: len(texts) for domain, texts in drawn.items()},
            seed=self.seed,
            bytes_to_write=len(content),
        )
        return Description((step,), 1)

    def run(self) -> ProbeFile:
        drawn = self._drawn()
        with whole(self.out) as partial:
            partial.write_text(_text(drawn), encoding="utf-8")
        counts = {domain: len(texts) for domain, texts in drawn.items()}
        return ProbeFile(
            file=str(self.out), prompts=sum(counts.values()), domains=counts, seed=self.seed
        )

    def _drawn(self) -> dict[str, list[str]]:
        if (self.suite is None) == (not self.data):
            raise RecipeError("Give --suite, or --data with one JSONL file for each domain.")
        if "{prompt}" not in self.template:
            raise RecipeError("The template must say {prompt} where the prompt goes.")
        if self.out.exists():
            raise RecipeError(f"{self.out}: exists already; choose a new file.")
        data, count = self.data, self.per_domain
        found = _of_files(data, self.template) if data else _of_suite(str(self.suite), self.folder)
        short = [f"{d}: {len(t)} prompts" for d, t in found.items() if len(t) < count]
        if short:
            raise ScoreError(f"{count} prompts of each domain are wanted:", short)
        # Equal texts are one prompt; the order depends on the seed and the texts alone.
        return {d: splits.shuffled(texts, d, self.seed)[:count] for d, texts in found.items()}


def _text(drawn: Mapping[str, Sequence[str]]) -> str:
    rows = [{"prompt": text, "domain": d} for d, texts in drawn.items() for text in texts]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _of_files(files: Sequence[Path], template: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for file in files:
        if file.stem in found:
            raise RecipeError(f"{file}: another file is called {file.stem}, too.")
        found[file.stem] = {
            template.replace("{prompt}", _prompt(row, f"{file}, line {number}"))
            for number, row in read_json_lines(file, "a JSONL file of records", ScoreError)
        }
    return found


def _prompt(record: Any, where: str) -> str:
    """The prompt of a record, with its input where it has one apart."""
    row: Mapping[str, Any] = record if isinstance(record, dict) else {}
    for column in COLUMNS:
        if isinstance(row.get(column), str) and row[column].strip():
            more = row.get("input")
            return f"{row[column]}\n{more}" if isinstance(more, str) and more else row[column]
    raise ScoreError(f"{where}: has no prompt; one of {', '.join(COLUMNS)} is expected.")


def _of_suite(name: str, folder: Path | None) -> dict[str, set[str]]:
    """Prompts of the calibration items; an evaluation item never is a probe."""
    nano = Path(name)
    suite = nano_suite(nano) if nano.is_dir() else load_suite(name)
    items, _ = splits.load_available(suite, Data.default(folder))
    content = splits.build(suite, items)
    found: dict[str, set[str]] = {}
    for mark, rows in items.items():
        form = getattr(suite.benchmarks[mark], "prompt", None)
        for item in rows:
            if item.id in set(content["benchmarks"][mark]["calibration"]):
                text = prompt_of(form, item, mark) if form else _prompt(item.record, mark)
                found.setdefault(suite.domain_of(mark), set()).add(text)
    return found
