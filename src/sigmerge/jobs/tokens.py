"""`sigmerge tokens`: a merge of one model with the tokenizer of another, and what it does to it.

The tokenizers cut a text into other tokens, so a text is compared by its bytes, not by its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from pathlib import Path

from sigmerge.errors import ScoreError
from sigmerge.files.documents import read_bytes
from sigmerge.jobs.merge import MergeJob
from sigmerge.jobs.options import Options
from sigmerge.jobs.steps import Description
from sigmerge.recipe import Recipe
from sigmerge.results import Retokenized, TextRead

LONGEST_LINE = 1024
"""Tokens of a line that are read."""


@dataclass(frozen=True)
class TokensJob:
    """A model with another tokenizer in a new folder; with `text`, a file, both models read it."""

    recipe: Recipe
    out: Path
    options: Options
    text: Path | None = None

    @property
    def _merge(self) -> MergeJob:
        return MergeJob(self.recipe, self.out, self.options)

    def describe(self) -> Description:
        self._lines()
        return self._merge.describe()

    def run(self) -> Retokenized:
        lines = self._lines()
        done = self._merge.run()
        read: dict[str, TextRead] = {}
        if lines:
            [model] = self.recipe.models
            for name, folder in {"before": model.path, "after": Path(done.out)}.items():
                read[name] = _read(folder, lines, self.options.trust_remote_code)
        return Retokenized(out=done.out, plan=done.plan, provenance=done.provenance, text=read)

    def _lines(self) -> list[tuple[str, str]]:
        """The lines of the text, each as its first word and the rest."""
        if self.text is None:
            return []
        from sigmerge.probing.generate import require_backend

        require_backend("hf")
        content = read_bytes(self.text, "a text", ScoreError).decode("utf-8", "replace")
        cut = [line.strip().partition(" ") for line in content.splitlines()]
        lines = [(first, f" {rest}") for first, _, rest in cut if rest]
        if not lines:
            raise ScoreError(f"{self.text}: has no line of two words; give a text to read.")
        return lines


def _read(folder: Path, lines: list[tuple[str, str]], trust: bool) -> TextRead:
    """How well a model predicts what follows the first word of every line."""
    from sigmerge.probing.generate import load_model
    from sigmerge.probing.reading import read_texts

    found, _ = read_texts(load_model(folder, "hf", "auto", None, trust=trust), lines, LONGEST_LINE)
    total, tokens = -sum(one.log_likelihood for one in found), sum(one.tokens for one in found)
    count = sum(len(rest.encode()) for _, rest in lines)
    return TextRead(perplexity=exp(min(total / tokens, 700)), bits_per_byte=total / log(2) / count,
                    tokens=tokens)  # fmt: skip
