"""Recipes: YAML in mergekit's dialect, checked strictly, all problems reported together."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sigmerge.errors import RecipeError
from sigmerge.operators.base import Operator, Parameter, Site
from sigmerge.operators.table import operator

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
NOT_SUPPORTED = {
    "slices": "layer slices are not supported; give whole models under models:",
    "modules": "modules are not supported; give whole models under models:",
    "tokenizer": "token-level merging is not supported; use tokenizer_source: base or a model",
    "chat_template": "is not supported; the tokenizer's own chat template is kept",
}
"""Keys of mergekit's dialect that sigmerge does not have, and what to do instead."""


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
            raise ValueError(_unknown("variant", self.variant, VARIANTS))
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
    repair: RepairSection | None = None


@dataclass(frozen=True)
class Model:
    name: str
    path: Path
    parameters: Mapping[str, Any]
    exemplars: Path | None = None


@dataclass(frozen=True)
class Recipe:
    """A checked recipe. `operator` is None when the anchor is a checkpoint made elsewhere."""

    operator: Operator | None
    method: str
    reference: Path | None
    models: tuple[Model, ...]
    parameters: Mapping[str, Any]
    preset: str
    seed: int
    out_dtype: str | None
    tokenizer: Path | None
    anchor: Path | None
    repair: RepairSection | None
    folder: Path
    text: str
    notes: tuple[str, ...] = ()
    capture: CaptureSection = field(default_factory=CaptureSection)

    @property
    def experts(self) -> dict[str, Path]:
        return {model.name: model.path for model in self.models}

    @property
    def inputs(self) -> list[Path]:
        """Every folder that is read, and so must not be written."""
        others = [path for path in (self.reference, self.tokenizer, self.anchor) if path]
        return [*others, *self.experts.values()]

    def site(self, tensor: str, size: int, block: int | None, depth: int) -> Site:
        """A tensor with the options that hold for it: filters and depth gradients resolved."""
        t = 0.0 if block is None else block / (depth - 1) if depth > 1 else 1.0
        settings = {}
        for parameter in self.operator.parameters if self.operator else ():
            name = parameter.name
            default = getattr(parameter, self.preset)
            shared = evaluate(self.parameters.get(name), tensor, t)
            if parameter.per_model:
                own = [evaluate(model.parameters.get(name), tensor, t) for model in self.models]
                settings[name] = tuple(_first(value, shared, default) for value in own)
            else:
                settings[name] = _first(shared, default)
        names = tuple(model.name for model in self.models)
        return Site(tensor, size, block, depth, names, settings, self.seed)


def load_recipe(source: Path | str | Mapping[str, Any], *, seed: int | None = None) -> Recipe:
    """Read a recipe from a file, or from a mapping given in Python."""
    folder = Path.cwd()
    if isinstance(source, Mapping):
        text, where = yaml.safe_dump(dict(source), sort_keys=False), "recipe"
    else:
        file = Path(source).expanduser()
        try:
            text, where, folder = file.read_text(encoding="utf-8"), str(file), file.resolve().parent
        except FileNotFoundError:
            raise RecipeError(f"{source}: no such recipe file.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{source}: cannot be read as a recipe ({error}).") from None
    return _Parser(text, where, folder).parse(seed)


def evaluate(setting: Any, tensor: str, t: float) -> Any:
    """A setting's value for one tensor: the first filter that matches, a gradient at depth t."""
    if isinstance(setting, _Conditions):
        for pattern, value in setting.rules:
            if pattern in (None, "*") or pattern in tensor:
                return evaluate(value, tensor, t)
        return None
    if isinstance(setting, list):
        if not all(isinstance(v, float | int) and not isinstance(v, bool) for v in setting):
            return setting[int(t * (len(setting) - 1))]
        position = t * (len(setting) - 1)
        low = int(position)
        high = min(len(setting) - 1, low + 1)
        return (1 - (position - low)) * setting[low] + (position - low) * setting[high]
    return setting


@dataclass(frozen=True)
class _Conditions:
    rules: tuple[tuple[str | None, Any], ...]


class _Parser:
    def __init__(self, text: str, where: str, folder: Path) -> None:
        self.text, self.where, self.folder = text, where, folder
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.lines: dict[tuple[Any, ...], int] = {}
        self.walked: set[int] = set()

    def problem(self, path: tuple[Any, ...], message: str) -> None:
        line = next(
            (self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), None
        )
        place = f"line {line}, {_dotted(path)}" if line else _dotted(path)
        self.problems.append(f"{place}: {message}" if path else message)

    def stop_on_problems(self) -> None:
        if self.problems:
            raise RecipeError(f"{self.where}: the recipe cannot be run:", self.problems)

    def parse(self, seed: int | None) -> Recipe:
        data = self._yaml()
        for key in [key for key in data if key in NOT_SUPPORTED]:
            self.problem((key,), NOT_SUPPORTED[key])
            data.pop(key)
        section = self._section(data)
        self.stop_on_problems()
        assert section is not None
        chosen, method = self._operator(section)
        self.stop_on_problems()
        reference, models = self._models(section, chosen)
        parameters = dict(section.parameters or {})
        parameters.pop("on", None)
        if chosen:
            parameters = self._settings(("parameters",), parameters, chosen, section.preset)
        self._check(section, chosen, reference, models)
        tokenizer = self._tokenizer(section, reference, models)
        anchor = self._path(("anchor",), section.anchor) if section.anchor else None
        self.stop_on_problems()
        dtype = section.out_dtype or section.dtype
        return Recipe(
            chosen,
            method,
            reference,
            models,
            parameters,
            section.preset,
            section.seed if seed is None else seed,
            DTYPES[dtype] if dtype else None,
            tokenizer,
            anchor,
            section.repair,
            self.folder,
            self.text,
            tuple(self.notes),
            section.capture,
        )

    def _yaml(self) -> dict[str, Any]:
        try:
            node = yaml.compose(self.text, Loader=yaml.SafeLoader)
            data = yaml.safe_load(self.text)
            self._walk(node, ())
        except yaml.YAMLError as error:
            raise RecipeError(f"{self.where}: not valid YAML: {error}") from None
        except RecursionError:
            raise RecipeError(f"{self.where}: nested too deeply for a recipe.") from None
        if isinstance(data, dict) and isinstance(parameters := data.get("parameters"), dict):
            # YAML 1.1 reads an unquoted `on` as true.
            data["parameters"] = {"on" if k is True else k: v for k, v in parameters.items()}
        if not isinstance(data, dict):
            raise RecipeError(f"{self.where}: a recipe is a mapping; see `sigmerge merge --help`.")
        return data

    def _walk(self, node: yaml.Node | None, path: tuple[Any, ...]) -> None:
        """Remember the line of every key; a key given twice is a problem."""
        if node is None:
            return
        self.lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in self.walked:  # an alias: its keys were looked at where they stand
            return
        self.walked.add(id(node))
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                here = (*path, key.value)
                self.lines[here] = key.start_mark.line + 1
                if key.value in seen:
                    self.problem(here, "is given twice")
                seen.add(key.value)
                self._walk(value, here)
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                self._walk(value, (*path, i))

    def _section(self, data: dict[str, Any]) -> RecipeSection | None:
        try:
            return RecipeSection.model_validate(data)
        except ValidationError as error:
            for item in error.errors():
                self.problem(item["loc"], _worded(item))
            return None

    def _operator(self, section: RecipeSection) -> tuple[Operator | None, str]:
        if section.merge_method == "checkpoint":
            if section.anchor is None:
                self.problem(("merge_method",), "checkpoint needs anchor: the folder to repair")
            return None, "checkpoint"
        if section.anchor is not None:
            self.problem(("anchor",), "is only read with merge_method: checkpoint")
        on = (section.parameters or {}).get("on")
        if not isinstance(on, str | None):
            self.problem(("parameters", "on"), f"must be the name of an operator, not {on!r}")
            return None, section.merge_method
        try:
            return operator(section.merge_method, on), section.merge_method
        except RecipeError as error:
            self.problem((), str(error))
            return None, section.merge_method

    def _models(
        self, section: RecipeSection, chosen: Operator | None
    ) -> tuple[Path | None, tuple[Model, ...]]:
        reference = self._path(("base_model",), section.base_model) if section.base_model else None
        needs = chosen is None or chosen.needs_reference
        if needs and reference is None and not section.base_model:
            self.problem(
                (),
                f"base_model is missing: {section.merge_method} needs the reference "
                "checkpoint that the experts were tuned from",
            )
        models: list[Model] = []
        for i, entry in enumerate(section.models):
            path = self._path(("models", i, "model"), entry.model)
            if path is None:
                continue
            if needs and reference is not None and path == reference:
                self.notes.append(
                    f"{entry.model} is the base model; its entry under models: has "
                    f"no task vector and is left out"
                )
                continue
            own = entry.parameters or {}
            if chosen:
                where = ("models", i, "parameters")
                own = self._settings(where, own, chosen, section.preset, per_model=True)
            default = "base" if path == reference else path.name
            exemplars = self._exemplars(i, entry, section.merge_method, chosen)
            models.append(Model(entry.name or default, path, own, exemplars))
        names = [model.name for model in models]
        for name in sorted({n for n in names if names.count(n) > 1}):
            self.problem(("models",), f"two experts are called {name!r}; give each a name:")
        if "reference" in names:
            self.problem(("models",), "no expert may be called 'reference'; give it a name:")
        soup = not needs and section.repair is None  # the repair does read the reference
        if soup and reference and all(model.path != reference for model in models):
            self.notes.append(
                f"{section.base_model} gives configuration and tokenizer only; it is not in the "
                f"soup unless it is listed under models:"
            )
        if not models and not self.problems:
            self.problem(("models",), "no expert is listed")
        return reference, tuple(models)

    def _exemplars(
        self, i: int, entry: ModelSection, method: str, chosen: Operator | None
    ) -> Path | None:
        if entry.exemplars is None:
            if chosen and chosen.needs:
                self.problem(
                    ("models", i),
                    f"exemplars is missing: {method} reads each expert's own exemplars, a JSONL "
                    'file of {"prompt": …} or {"prompt": …, "response": …}',
                )
            return None
        file = self.folder / Path(entry.exemplars).expanduser()
        if not file.is_file():
            self.problem(("models", i, "exemplars"), f"{str(file)!r}: no such file")
        return file

    def _settings(
        self,
        path: tuple[Any, ...],
        given: dict[str, Any],
        chosen: Operator,
        preset: str,
        per_model: bool = False,
    ) -> dict[str, Any]:
        known = {p.name: p for p in chosen.parameters}
        checked = {}
        for name, value in given.items():
            parameter = known.get(name)
            if parameter is None:
                self.problem((*path, name), _unknown(f"parameter of {chosen.name}", name, known))
            elif per_model and not parameter.per_model:
                self.problem(
                    (*path, name),
                    "belongs to the merge as a whole; move it to the top-level parameters:",
                )
            else:
                checked[name] = self._setting((*path, name), value, parameter, preset)
        return checked

    def _setting(self, path: tuple[Any, ...], value: Any, parameter: Parameter, preset: str) -> Any:
        """A scalar, a gradient over depth, or conditions by tensor name."""
        if isinstance(value, dict):
            value = [value]
        if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            rules = []
            for i, rule in enumerate(value):
                if set(rule) - {"filter", "value"} or "value" not in rule:
                    self.problem((*path, i), "a condition has the keys filter and value")
                    continue
                if not isinstance(rule.get("filter"), str | None):
                    self.problem((*path, i, "filter"), "must be part of a tensor's name")
                    continue
                inner = self._setting((*path, i, "value"), rule["value"], parameter, preset)
                rules.append((rule.get("filter"), inner))
            return _Conditions(tuple(rules))
        if isinstance(value, list):
            if not value:
                self.problem(path, "an empty list has no value")
                return None
            return [self._scalar((*path, i), v, parameter, preset) for i, v in enumerate(value)]
        return self._scalar(path, value, parameter, preset)

    def _scalar(self, path: tuple[Any, ...], value: Any, parameter: Parameter, preset: str) -> Any:
        if parameter.auto and value == "auto":
            return value
        kind = parameter.kind
        if isinstance(kind, tuple):
            if isinstance(value, bool) and "none" in kind:
                value = _rescale_word(parameter, preset) if value else "none"
            if value in kind:
                return value
            self.problem(path, f"must be one of {', '.join(kind)}, not {value!r}")
            return None
        if kind is bool:
            if isinstance(value, bool):
                return value
            self.problem(path, f"must be true or false, not {value!r}")
            return None
        number = _number(value)
        if number is None or (kind is int and number != int(number)):
            self.problem(path, f"must be a {'whole ' if kind is int else ''}number, not {value!r}")
            return None
        if not parameter.low <= number <= parameter.high:
            bounds = f"between {parameter.low:g} and {parameter.high:g}"
            self.problem(path, f"must lie {bounds}, not {value!r}")
            return None
        return int(number) if kind is int else number

    def _check(
        self,
        section: RecipeSection,
        chosen: Operator | None,
        reference: Path | None,
        models: tuple[Model, ...],
    ) -> None:
        given = section.parameters or {}
        for name in ("outside", "alpha", "scope"):
            if isinstance(given.get(name), list | dict):
                self.problem(("parameters", name), "has one value for the whole model")
        if given.get("outside") == "reference" and reference is None:
            self.problem(("parameters", "outside"), "reference needs a base_model")
        if section.capture.scale != 1 and reference is None:
            self.problem(("capture", "scale"), "needs a base_model unless it is 1")
        if chosen is not None and "on" in given and chosen.name != "lines":
            self.problem(("parameters", "on"), "is an option of merge_method: lines")

    def _tokenizer(
        self, section: RecipeSection, reference: Path | None, models: tuple[Model, ...]
    ) -> Path | None:
        wanted = section.tokenizer_source
        if wanted in (None, "base"):
            return reference
        if wanted == "union":
            self.problem(
                ("tokenizer_source",),
                "union is not supported: vocabularies are not "
                "merged; use base or one of the models",
            )
            return None
        for model in models:
            if wanted == model.name:
                return model.path
        return self._path(("tokenizer_source",), wanted)

    def _path(self, path: tuple[Any, ...], text: str | None) -> Path | None:
        assert text is not None
        try:
            return find_model(text, self.folder)
        except RecipeError as error:
            self.problem(path, str(error))
            return None


_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?$")


def find_model(text: str, folder: Path) -> Path:
    """A local folder, looked for in the working folder and beside the recipe; or a hub id.

    A hub id is `owner/name` whose owner is no local folder; anything else never reaches the hub.
    """
    try:
        given = Path(text).expanduser()
        tried = list(dict.fromkeys([Path.cwd() / given, folder / given]))
        for place in tried:
            if place.exists() or place.is_symlink():
                return place.absolute() if place.is_symlink() else place.resolve()
    except (OSError, RuntimeError) as error:
        raise RecipeError(f"{text!r}: cannot be a folder ({error})") from None
    if "+" in text:
        raise RecipeError(
            f"{text!r}: a model with a LoRA adapter (+) is not supported; merge the "
            "adapter into its model first"
        )
    owner = text.partition("/")[0]
    local = (
        given.is_absolute()
        or owner in (".", "..", "~")
        or any((root / owner).exists() for root in (Path.cwd(), folder))
    )
    if not local and _HUB_ID.match(text):
        from sigmerge.checkpoints.hub import download

        return download(text)
    raise RecipeError(f"{text!r}: no such folder (looked in {', '.join(map(str, tried))})")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _rescale_word(parameter: Parameter, preset: str) -> str:
    return str(getattr(parameter, preset))


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _unknown(what: str, name: Any, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(str(name), list(known), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
    return f"{name!r} is no {what}; {hint}"


_KEYS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "models": lambda: ModelSection.model_fields,
    "capture": lambda: CaptureSection.model_fields,
    "repair": lambda: RepairSection.model_fields,
}


def _worded(item: Any) -> str:
    """A pydantic error in the words of a recipe."""
    loc = item["loc"]
    if item["type"] == "extra_forbidden":
        known = _KEYS[loc[0]]() if len(loc) > 1 and loc[0] in _KEYS else RecipeSection.model_fields
        return _unknown("key here", loc[-1], known)
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


def _dotted(path: tuple[Any, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
