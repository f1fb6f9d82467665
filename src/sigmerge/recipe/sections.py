"""What a recipe's sections may say, and what is said about the keys that are wrong."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sigmerge.errors import RecipeError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ModelSection(_Strict):
    model: str
    name: str | None = None
    exemplars: str | None = None
    parameters: dict[str, Any] | None = None


class CaptureSection(_Strict):
    """The `capture:` section: how an operator that reads data gets its statistics.

    `limit` exemplars of each file are taken, from its top; all if it is not given. `scale` moves
    the network that features come from to θ_ref + scale · Δ_k.
    """

    limit: int | None = Field(default=None, ge=1)
    max_length: int = Field(default=256, ge=1)
    skip_bos: bool = False
    scale: float = 1.0
    labels: Literal["argmax", "sampled", "data"] = "argmax"
    folder: str | None = None


class SearchSection(_Strict):
    """The `search:` section: the coefficients of merge_method are searched (MERGE³).

    The budget is `calls`, or population × generations. `suite` is nano, or a folder with the items
    of a pool that `nano train` made.
    """

    population: int = Field(default=24, ge=2)
    generations: int | None = Field(default=None, ge=1)
    calls: int | None = Field(default=None, ge=1)
    items: int = Field(default=20, ge=1)
    estimator: Literal["mean", "p-irt", "gp-irt", "mp-irt", "gmp-irt"] = "gmp-irt"
    extraction: Literal["uniform", "clusters"] = "uniform"
    dimension: int = Field(default=1, ge=1)
    labels: int = Field(default=1500, ge=1)
    suite: str = "nano"

    @model_validator(mode="after")
    def _consistent(self) -> SearchSection:
        if self.calls is not None and self.generations is not None:
            raise ValueError("give calls or generations, not both")
        self.rounds()
        return self

    def rounds(self) -> int:
        """How many generations the budget lasts."""
        from sigmerge.search.evolve import CALLS, generations_of

        if self.generations is not None:
            return self.generations
        try:
            return generations_of(self.calls or CALLS, self.population)
        except RecipeError as error:
            raise ValueError(str(error)) from None


class RepairSection(_Strict):
    """The `repair:` section (design of the method: paper, Sec. 3)."""

    c_min: float = Field(0.10, ge=0, le=1)
    c_max: float = Field(0.45, ge=0, le=1)
    scale: float | Literal["calibrated"] = 0.60
    update: Literal["add", "replace"] = "add"
    probe: str | None = None
    scores: str | dict[str, Any] | None = None
    command: str | None = None
    evaluate: dict[str, Any] | None = None
    variant: str = "default"
    reference: Literal["strongest", "own"] = "strongest"
    rounds: int = Field(1, ge=1)
    admit: int | None = Field(None, ge=1)
    guard: Literal["warn", "keep_anchor", "off"] = "warn"
    seed: int = 0

    @model_validator(mode="after")
    def _consistent(self) -> RepairSection:
        if self.c_min > self.c_max:
            raise ValueError(f"c_min {self.c_min} exceeds c_max {self.c_max}")
        sources = [k for k in ("scores", "command", "evaluate") if getattr(self, k) is not None]
        if len(sources) > 1:
            raise ValueError(f"give one of scores, command and evaluate, not {', '.join(sources)}")
        from sigmerge.method.controls import VARIANTS

        if self.variant not in VARIANTS:
            raise ValueError(unknown("variant", self.variant, VARIANTS))
        return self


class RecipeSection(_Strict):
    merge_method: str
    base_model: str | None = None
    models: list[ModelSection] = Field(default_factory=list)
    parameters: dict[str, Any] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    out_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    tokenizer_source: str | None = None
    preset: Literal["mergekit", "paper"] = "mergekit"
    seed: int = 0
    anchor: str | None = None
    capture: CaptureSection = Field(default_factory=CaptureSection)
    search: SearchSection | None = None
    repair: RepairSection | None = None


def unknown(what: str, name: Any, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(str(name), list(known), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
    return f"{name!r} is no {what}; {hint}"


_KEYS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "models": lambda: ModelSection.model_fields,
    "capture": lambda: CaptureSection.model_fields,
    "search": lambda: SearchSection.model_fields,
    "repair": lambda: RepairSection.model_fields,
}


def worded(item: Any) -> str:
    """A pydantic error in the words of a recipe."""
    loc = item["loc"]
    if item["type"] == "extra_forbidden":
        known = _KEYS[loc[0]]() if len(loc) > 1 and loc[0] in _KEYS else RecipeSection.model_fields
        return unknown("key here", loc[-1], known)
    if item["type"] == "missing":
        return "is missing"
    if item["type"] == "literal_error":
        return f"must be {item['ctx']['expected']}, not {item['input']!r}"
    message = item["msg"].removeprefix("Value error, ")
    return (
        message
        if item["type"] == "value_error"
        else f"{message[0].lower()}{message[1:]}, not {item['input']!r}"
    )
