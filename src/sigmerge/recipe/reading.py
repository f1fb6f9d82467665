"""A recipe while it is read: its text, the problems and notes found so far, and their lines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from sigmerge.errors import RecipeError
from sigmerge.messages import nearest
from sigmerge.recipe.folders import find_model, idle_revisions
from sigmerge.recipe.record import OWN_KEYS
from sigmerge.recipe.sections import (
    DenseExpertSection,
    MixtureSection,
    ModelSection,
    ModuleSection,
    RecipeSection,
    SliceSection,
    SourceSection,
    TokenizerSection,
    TokenModelSection,
    TokenRowSection,
    worded,
)
from sigmerge.recipe.settings import Place

ALIKE = 0.8
"""Likeness of a key to one of these above which it is taken for that: `repiar`, not `author`."""

MERGEKITS = (
    RecipeSection,
    ModelSection,
    SliceSection,
    SourceSection,
    ModuleSection,
    TokenizerSection,
    TokenRowSection,
    TokenModelSection,
    MixtureSection,
    DenseExpertSection,
)
"""Sections that mergekit has too; it passes over keys there that it does not know."""

_Section = TypeVar("_Section", bound=BaseModel)


class Reading:
    """Collects what is wrong with a recipe, so that all of it is reported together."""

    def __init__(self, text: str, where: str, folder: Path, strict: bool, numbered: bool) -> None:
        self.text, self.where, self.folder, self.strict = text, where, folder, strict
        self.numbered = numbered
        self.problems: dict[str, int] = {}
        self.notes: list[str] = []
        self.slips: list[tuple[Place, str]] = []
        """Keys that were passed over and are near one that is known: causes of what is missing."""
        self.lines: dict[Place, int] = {}
        self.moved: dict[Place, Place] = {}
        """Where entries of `models:` and `slices:` stand that the recipe has elsewhere."""
        self.remote: dict[Path, tuple[Place, str]] = {}
        self.flags: dict[str, str] = {}

    def problem(self, path: Place, message: str) -> None:
        line, place = self._place(path)
        told = f"{place}: {message}" if path else message
        self.problems.setdefault(told, line if path and line else 0)

    def passed_over(self, path: Place, message: str) -> None:
        """What mergekit does not look at: a note in a mergekit file, else a problem."""
        self.taken_as(path, message, f"passed over, as mergekit does: {message}")
        if "did you mean" in message:
            self.slips.append((path, message))

    def taken_as(self, path: Place, message: str, meaning: str) -> None:
        """What is wrong, and means something to mergekit: a note about that in a mergekit file."""
        if self.strict:
            self.problem(path, message)
        else:
            self.note(f"{self._place(path)[1]}: {meaning}")

    def _place(self, path: Place) -> tuple[int | None, str]:
        for n in range(len(path), 0, -1):
            if path[:n] in self.moved:
                path = (*self.moved[path[:n]], *path[n:])
                break
        if path[:1] == ("repair",) and self.flags:
            asked = [flag for key, flag in self.flags.items() if key in path[1:]]
            if asked or path == ("repair",):
                return None, ", ".join(asked or self.flags.values())
        line = next(
            (self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), None
        )
        return line, f"line {line}, {_dotted(path)}" if line and self.numbered else _dotted(path)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def stop_on_problems(self) -> None:
        if self.problems:
            for path, message in self.slips:
                self.problem(path, message)
            by_line = sorted(self.problems, key=self.problems.__getitem__)
            raise RecipeError(f"{self.where}: the recipe cannot be run:", by_line)

    def optional(self, kind: type[_Section], data: Any, name: str) -> _Section | None:
        return None if data is None else self.checked(kind, data, (name,))

    def checked(
        self, kind: type[_Section], data: Any, place: Place, told: Collection[Place] = ()
    ) -> _Section | None:
        """The section without its wrong keys, each a problem; None if nothing is left.

        `told` are keys that were wrong before, and so are missing now.
        """
        try:
            return kind.model_validate(data)
        except ValidationError as error:
            wrong: dict[Place, list[Any]] = {}
            for item in error.errors():
                key: Place = tuple(map(str, item["loc"][:1]))
                if key not in told:
                    wrong.setdefault(key, []).append(item)
        for key, items in wrong.items():
            message = worded(items, kind.model_fields)
            if kind in MERGEKITS and _is_strange(key, items, kind.model_fields):
                self.passed_over((*place, *key), message)
            else:
                self.problem((*place, *key), message)
        if not isinstance(data, dict):
            return None
        if list(wrong) == [()]:  # every key is right, but they do not agree
            return kind.model_construct(**data)
        rest = {k: v for k, v in data.items() if isinstance(k, str) and (k,) not in wrong}
        return self.checked(kind, rest, place, {*told, *wrong}) if len(rest) < len(data) else None

    def path(self, place: Place, text: str | None) -> Path | None:
        """A folder. A hub id stands for itself until everything else is known to be right."""
        assert text is not None
        try:
            found = find_model(text, self.folder)
        except RecipeError as error:
            self.problem(place, str(error))
            return None
        for model in idle_revisions(text, self.folder):
            self.note(f"{model}: the revision is ignored, since this is a local folder")
        if found is None:
            found = Path(text)
            self.remote.setdefault(found, (place, text))
        return found


def _is_strange(key: Place, items: Sequence[Any], known: Iterable[str]) -> bool:
    """Whether a key is none of mergekit's, and not meant to be one of ours."""
    strange = items[0]["type"] in ("extra_forbidden", "invalid_key") or key == ("name",)
    return strange and nearest(str(key[-1]), known, ALIKE) not in OWN_KEYS


def _dotted(path: Place) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
