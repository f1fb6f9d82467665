"""The options of an evaluation: data, split file, model settings, permissions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sigmerge.errors import ScoreError
from sigmerge.evaluation.sources import Data
from sigmerge.probing.generate import BACKENDS

LOADING_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class How:
    """`progress` is called with (benchmark, items done, items in all), `announce` with the cost.

    `strict` makes a benchmark without records an error. `answers` is a file for what the model
    answered, a line for each item. Without a `judge` what a judge must read is not scored.
    """

    data: Data = field(default_factory=Data.default)
    splits: Path | None = None
    limit: int | None = None
    only: tuple[str, ...] = ()
    strict: bool = False
    backend: str = "hf"
    dtype: str = "auto"
    batch_size: int | None = None
    judge: str | None = None
    allow_code: bool = False
    allow_pickle: bool = False
    trust_remote_code: bool = False
    answers: Path | None = None
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    announce: Callable[[Mapping[str, Any]], None] = lambda estimate: None

    def __post_init__(self) -> None:
        for name, value in (("limit", self.limit), ("batch_size", self.batch_size)):
            if value is not None and (type(value) is not int or value < 1):
                raise ScoreError(f"{name}: {value!r} is no count; give 1 or more, or leave it out.")
        for name, word, known in (
            ("dtype", self.dtype, LOADING_DTYPES),
            ("backend", self.backend, BACKENDS),
        ):
            if word not in known:
                raise ScoreError(f"{name}: {word!r} is not known; there are {', '.join(known)}.")
