"""From YAML to a checked recipe. All problems are found before any is told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from sigmerge.errors import RecipeError
from sigmerge.operators.base import Operator
from sigmerge.operators.table import operator
from sigmerge.recipe.record import Model, Recipe
from sigmerge.recipe.sections import ModelSection, RecipeSection, worded
from sigmerge.recipe.settings import Judge

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
NOT_SUPPORTED = {
    "slices": "layer slices are not supported; give whole models under models:",
    "modules": "modules are not supported; give whole models under models:",
    "tokenizer": "token-level merging is not supported; use tokenizer_source: base or a model",
    "chat_template": "is not supported; the tokenizer's own chat template is kept",
}
"""Keys of mergekit's dialect that sigmerge does not have, and what to do instead."""


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
            judge = Judge(chosen, section.preset, self.problem)
            parameters = judge.settings(("parameters",), parameters)
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
            section.search,
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
                self.problem(item["loc"], worded(item))
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
                judge = Judge(chosen, section.preset, self.problem)
                own = judge.settings(where, own, per_model=True)
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
        if section.search is not None:
            from sigmerge.search.evolve import SPACES

            if section.merge_method not in SPACES:
                self.problem(("search",), f"merge_method: {section.merge_method} cannot be "
                             f"searched; the search knows {', '.join(SPACES)}")  # fmt: skip
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


def _dotted(path: tuple[Any, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
