"""The sections of a recipe that need scores: search, guide, tune and repair.

They are apart from the others, since most merges have none of them.
"""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from sigmerge.errors import RecipeError
from sigmerge.messages import unknown
from sigmerge.method.controls import VARIANTS
from sigmerge.method.objective import Objective
from sigmerge.operators.base import LARGEST_NUMBER
from sigmerge.recipe.sections import Section, worded
from sigmerge.recipe.space import CALLS, generations_of


class SearchSection(Section):
    """The `search:` section: the coefficients of merge_method are searched (MERGE³).

    The budget is `calls`, or population × generations. `trust` is the share c of the answers in
    gp-IRT and gmp-IRT; auto weighs them by the IRT model's bias, as tinyBenchmarks does. The
    `objective` is the domains' mean, or one for each domain; the winner is the best mean. `suite`
    is nano, the folder of a pool that `nano train` made, a shipped suite or a suite's YAML file;
    `data`, `hub`, `judge` and `allow_code_execution` are for the last two.
    """

    population: int = Field(default=24, ge=2)
    """Candidates of a generation."""
    generations: int | None = Field(default=None, ge=1)
    """How many, the first included; or `calls`."""
    calls: int | None = Field(default=None, ge=1)
    """Evaluation calls in all, a multiple of the population."""
    items: int = Field(default=20, ge=1)
    """Labelled items of each domain that a candidate answers."""
    estimator: Literal["mean", "p-irt", "gp-irt", "mp-irt", "gmp-irt"] = "gmp-irt"
    """How a score is estimated from them."""
    extraction: Literal["uniform", "clusters"] = "uniform"
    """How the items are chosen."""
    dimension: int = Field(default=1, ge=1)
    """Of the item model."""
    labels: int = Field(default=1500, ge=1)
    """Answers of respondents that the item model is fitted on."""
    trust: float | Literal["auto"] = 0.5
    """Share of the answers in gp-irt and gmp-irt."""
    objective: Literal["mean", "domains"] = "mean"
    """The mean of the domains, or one for each."""
    suite: str = "nano"
    """nano, a pool's folder, a shipped suite or a suite's file."""
    data: str | None = None
    """Folder with the benchmarks' files."""
    hub: bool = False
    """Read from the hub what is not in `data`."""
    judge: str | None = None
    """A judge's folder, or `keyword`."""
    allow_code_execution: bool = False
    """Run generated programs, in a sandbox."""

    @model_validator(mode="after")
    def _consistent(self) -> SearchSection:
        if self.calls is not None and self.generations is not None:
            raise ValueError("give calls or generations, not both")
        if self.trust != "auto" and not 0 <= self.trust <= 1:
            raise ValueError(f"trust must be auto or lie between 0 and 1, not {self.trust}")
        try:
            if self.generations is None:
                generations_of(CALLS if self.calls is None else self.calls, self.population)
        except RecipeError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def rounds(self) -> int:
        """Generations, the first included."""
        if self.generations is not None:
            return self.generations
        return generations_of(CALLS if self.calls is None else self.calls, self.population)

    @property
    def evaluation_calls(self) -> int:
        return self.population * self.rounds

    @property
    def fits(self) -> bool:
        """Whether an IRT model is needed, and so the answers of respondents to all items."""
        return self.estimator != "mean" or self.extraction == "clusters"

    def changed(self, **given: Any) -> SearchSection:
        """This section with the values that are not None; RecipeError if they do not fit."""
        changes = {name: value for name, value in given.items() if value is not None}
        words = self.model_dump()
        if {"generations", "calls"} & changes.keys():
            words |= {"generations": None, "calls": None}
        try:
            return SearchSection.model_validate({**words, **changes})
        except ValidationError as error:
            items = error.errors()
            problems = [
                ": ".join([*map(str, item["loc"]), worded([item], SearchSection.model_fields)])
                for item in items
            ]
            raise RecipeError("The search cannot be run:", problems) from None


Fraction = Annotated[float, Field(ge=0, le=1)]


class HarnessScores(Section):
    """`repair: scores:` as result files of lm-evaluation-harness."""

    experts: dict[str, str]
    anchor: str
    domains: dict[str, str | list[str]]


class _Aim(Section):
    """What evaluation calls aim at.

    `objective` is mean, worst (the largest deficit) or weighted, with `weights` by domain; `floors`
    name the fraction of its expert's score that a domain must keep.
    """

    objective: Literal["mean", "worst", "weighted"] = "mean"
    """The mean of the domains, the largest deficit, or a mean by `weights`."""
    weights: dict[str, float] = {}
    """Of the domains, for `objective: weighted`."""
    floors: dict[str, float] = {}
    """By domain, the part of its expert's score that it must keep."""

    @property
    def aim(self) -> Objective:
        return Objective(self.objective, self.weights, self.floors)


class GuideSection(_Aim):
    """The `guide:` section: the deficits of `calls` evaluation calls steer the weights.

    The first call is the recipe's own weights. Scores come from `command` or `evaluate`, as in a
    repair: section; without them from that section.
    """

    calls: int = Field(default=8, ge=2)
    """Evaluation calls; the first is the recipe's own weights."""
    command: str | None = None
    """As in `repair:`."""
    evaluate: dict[str, Any] | None = None
    """As in `repair:`."""

    @model_validator(mode="after")
    def _one_source(self) -> GuideSection:
        if self.command is not None and self.evaluate is not None:
            raise ValueError("give one of command and evaluate, not both")
        if self.command is not None and (wrong := _command_trouble(self.command)):
            raise ValueError("; ".join(wrong))
        return self


class CalibrateSection(_Aim):
    """`repair: calibrate:`: form, scale, capacity, shares and anchor level are chosen by score.

    `calls` repairs are tried at most, outward from the paper's; the plain anchor is one more.
    """

    calls: int = Field(default=12, ge=1)
    """Repairs that are tried at most."""


class TuneSection(_Aim):
    """The `tune:` section: what `sigmerge tune` may spend, tries, and aims at.

    `anchors` are operators; without them the recipe's own, the usual ones, and those that read
    exemplars where there are calls and exemplars enough. `box` is the largest weight that random
    and merge3 try, in units of the anchor's mean weight; `population` is that of merge3.
    """

    calls: int = Field(default=24, ge=1)
    """Evaluation calls in all."""
    anchors: list[str] | None = None
    """Methods to begin with; else the recipe's own and the usual ones."""
    method: Literal["guided", "random", "merge3", "adamerging"] = "guided"
    """How candidates are found."""
    box: float | None = Field(default=None, gt=0.01, le=100)
    """The largest weight that random and merge3 try, in units of the anchor's mean weight."""
    population: int | None = Field(default=None, ge=2)
    """Of merge3; else what spends the calls best, up to their square root."""

    @model_validator(mode="after")
    def _of_a_search(self) -> TuneSection:
        if self.box is not None and self.method not in ("random", "merge3"):
            raise ValueError(f"method: {self.method} has no box; only random and merge3 search one")
        if self.population is not None and self.method != "merge3":
            raise ValueError(f"method: {self.method} has no population; only merge3 has one")
        return self

    def changed(self, **given: Any) -> TuneSection:
        """This section with the values that are not None; RecipeError if they do not fit."""
        changes = {name: value for name, value in given.items() if value is not None}
        try:
            return TuneSection.model_validate({**self.model_dump(), **changes})
        except ValidationError as error:
            problems = [
                ": ".join([*map(str, item["loc"]), worded([item], TuneSection.model_fields)])
                for item in error.errors()
            ]
            raise RecipeError("The tuning cannot be run:", problems) from None


class RepairSection(Section):
    """The `repair:` section (the paper's Sec. 3).

    `shares` by domain and `capacity` of every layer, or one for all, take the place of scores and
    profile: the repair then decides nothing and needs neither. `scale: calibrated` is short for
    `calibrate: {}`. On another `device` the probe's last bits differ.
    """

    c_min: float = Field(0.10, ge=0, le=1)
    """Capacity of the most contested layer."""
    c_max: float = Field(0.45, ge=0, le=1)
    """Capacity of the least contested layer."""
    scale: (
        Annotated[float, Field(ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)]
        | Literal["calibrated"]
    ) = 0.60
    """λ, the factor of what is added."""
    update: Literal["add", "replace"] = "add"
    """`add` λΔ, or `replace` the anchor's value by the owner's."""
    calibrate: CalibrateSection | None = None
    """Choose form, scale, capacity and shares by calibration scores."""
    probe: str | None = None
    """JSONL of `prompt`, for the representation view."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the probe passes through the experts."""
    scores: str | dict[str, Any] | None = None
    """A file of scores, the scores themselves, or result files of lm-evaluation-harness."""
    command: str | None = None
    """A program that scores `{checkpoint}` and prints `{"domain": q}`."""
    evaluate: dict[str, Any] | None = None
    """A suite with its settings, as in `sigmerge evaluate`."""
    variant: str = "default"
    """An ablation or a control of the paper."""
    drop: float = Field(0.9, ge=0, lt=1)
    """The probability of `sparse_update`."""
    reference: Literal["strongest", "own"] = "strongest"
    """What a deficit is measured against: the strongest expert on a domain, or its own."""
    rounds: int = Field(1, ge=1)
    """Repairs one after another, each with new deficits."""
    admit: int | None = Field(None, ge=1)
    """How many domains get capacity, the most deficient first; else all."""
    guard: Literal["warn", "keep_anchor", "off"] = "warn"
    """What happens if calibration scores fall."""
    seed: int = 0
    """Of the random variants."""
    shares: dict[str, Fraction] | None = None
    """Of the capacity by domain, given instead of measured."""
    capacity: Fraction | list[Fraction] | None = None
    """Of every layer, or a list of all, given instead of measured."""

    @property
    def decided(self) -> bool:
        """Whether shares and capacity are given, so that nothing must be measured."""
        return self.shares is not None

    @property
    def calibration(self) -> CalibrateSection | None:
        """How the repair is calibrated; None if it is not."""
        return CalibrateSection() if self.scale == "calibrated" else self.calibrate

    @property
    def untried(self) -> list[str]:
        """The keys of this section that no repair chosen by score can have."""
        usual = {"variant": "default", "rounds": 1, "admit": None, "drop": 0.9}
        return [key for key, value in usual.items() if getattr(self, key) != value]

    @model_validator(mode="after")
    def _consistent(self) -> RepairSection:
        wrong = []
        if self.c_min > self.c_max:
            wrong.append(f"c_min {self.c_min} exceeds c_max {self.c_max}")
        sources = [k for k in ("scores", "command", "evaluate") if getattr(self, k) is not None]
        if len(sources) > 1:
            wrong.append(f"give one of scores, command and evaluate, not {', '.join(sources)}")
        elif self.command is not None:
            wrong += _command_trouble(self.command)
        elif isinstance(self.scores, dict) and not _in_place(self.scores):
            wrong += _files_trouble(self.scores)
        if self.variant not in VARIANTS:
            wrong.append(unknown("variant", self.variant, VARIANTS))
        if self.variant == "sparse_update" and self.update == "replace":
            wrong.append("variant: sparse_update changes how Δ is added; drop update: replace")
        wrong += self._calibrated_trouble()
        wrong += self._decided_trouble(sources)
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _calibrated_trouble(self) -> list[str]:
        if self.calibration is None:
            return []
        chosen = {"scale", "update"} if self.calibrate is not None else {"update"}
        given = [key for key in ("scale", "update") if key in chosen & self.model_fields_set]
        wrong = [f"calibrating chooses {key}; leave it out" for key in given]
        return wrong + [f"a calibrated repair has no {key}; leave it out" for key in self.untried]

    def _decided_trouble(self, sources: list[str]) -> list[str]:
        if (self.shares is None) != (self.capacity is None):
            return ["shares and capacity go together: they take the place of scores and profile"]
        if self.shares is None:
            return []
        wrong = [f"shares and capacity leave nothing for {key}" for key in sources]
        if self.guard == "keep_anchor":
            wrong.append("guard: keep_anchor needs scores, which shares and capacity replace")
        if self.variant != "default" or self.rounds > 1 or self.calibration is not None:
            wrong.append("shares and capacity leave nothing for variant, rounds or calibrate")
        if not 0 < sum(self.shares.values()) <= 1 + 1e-9:
            wrong.append(f"shares sum to {sum(self.shares.values()):g}, not to 1 at most")
        return wrong


def _in_place(scores: dict[str, Any]) -> bool:
    """Whether the scores themselves are given, and not files that have them."""
    return isinstance(scores.get("anchor"), dict)


def _files_trouble(scores: dict[str, Any]) -> list[str]:
    try:
        HarnessScores.model_validate(scores)
    except ValidationError as error:
        keys = ", ".join(dict.fromkeys(str(item["loc"][0]) for item in error.errors()))
        return [
            f"scores: {keys} cannot be used; result files of lm-evaluation-harness are given as "
            "experts: {name: file}, anchor: file, domains: {domain: [task/metric]}"
        ]
    return []


def _command_trouble(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        return [f"command: cannot be taken apart ({error})"]
    if not any("{checkpoint}" in word for word in words):
        return ["command: must say {checkpoint} where the folder to score goes"]
    return []


SCORED: dict[str, type[Section]] = {
    "search": SearchSection,
    "repair": RepairSection,
    "tune": TuneSection,
    "guide": GuideSection,
}
"""By the key of a recipe."""
