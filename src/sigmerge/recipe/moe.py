"""A file for `sigmerge moe`: dense models, and the prompts that lead to each of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.adapter_folders import split_adapter
from sigmerge.errors import RecipeError
from sigmerge.files.yaml_documents import as_yaml, decoded, parse_yaml
from sigmerge.recipe.folders import find_model
from sigmerge.recipe.reading import Reading
from sigmerge.recipe.sections import DenseExpertSection, MixtureSection
from sigmerge.recipe.settings import Place

RANDOM = ("random", "uniform_random")
"""Modes of gates that read no prompts."""
BASE = "base"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class MixtureExpert:
    """A model by the name that records have for it, and what a router is to send there."""

    member: str
    path: Path
    positive: tuple[str, ...]
    negative: tuple[str, ...]
    noise: float
    scale: float

    @property
    def prompts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.positive, self.negative


@dataclass(frozen=True)
class MixtureRecipe:
    """A checked file. `text` is what it says, `files` are the file itself."""

    base: Path
    experts: tuple[MixtureExpert, ...]
    shared: tuple[MixtureExpert, ...]
    gate_mode: str
    out_dtype: str | None
    per_token: int
    architecture: str
    seed: int
    folder: Path
    text: str
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def gated(self) -> tuple[MixtureExpert, ...]:
        """The experts that have a row in the gates: shared ones that have prompts behind others."""
        asked = self.gate_mode in RANDOM or any(one.positive for one in self.shared)
        return (*self.experts, *(self.shared if asked else ()))

    @property
    def members(self) -> dict[str, Path]:
        """Every model once, the base first."""
        own = {one.member: one.path for one in (*self.experts, *self.shared)}
        return {BASE: self.base, **own}

    @property
    def kept(self) -> list[Path]:
        """Every folder and file that is read, and so must not be replaced."""
        folders = [part for path in self.members.values() for part in split_adapter(path) if part]
        return [*dict.fromkeys(folders), *self.files]


def load_mixture(
    source: Path | str | Mapping[str, Any],
    *,
    seed: int | None = None,
    strict: bool = False,
    folder: Path | None = None,
) -> MixtureRecipe:
    """Read a file, or a mapping given in Python. All problems are reported together."""
    folder, files = folder or Path.cwd(), tuple[Path, ...]()
    if isinstance(source, Mapping):
        text, where = as_yaml(json.loads(json.dumps(dict(source), default=os.fspath))), "recipe"
    else:
        file = Path(source).expanduser()
        text, where = decoded(file, "a file of a mixture", RecipeError), str(file)
        folder, files = file.resolve().parent, (file.resolve(),)
    reading = Reading(text, where, folder, strict, numbered=not isinstance(source, Mapping))
    found = parse_yaml(text, where, RecipeError)
    reading.lines = found.lines
    for place in found.twice:
        reading.problem(place, "is given twice")
    top = reading.checked(MixtureSection, found.value, ())
    if top is None or reading.problems:
        reading.stop_on_problems()
        raise RecipeError(f"{where}: a file of a mixture is a mapping.")
    parts = {
        key: list(_experts(reading, key, getattr(top, key) or []))
        for key in ("experts", "shared_experts")
    }
    base = reading.path(("base_model",), top.base_model)
    _check(reading, top, parts["experts"], parts["shared_experts"])
    reading.stop_on_problems()
    local = _fetched(reading)
    places = _Places(reading, local, _there(base, local))
    recipe = MixtureRecipe(
        base=places.base,
        experts=tuple(map(places.expert, parts["experts"])),
        shared=tuple(map(places.expert, parts["shared_experts"])),
        gate_mode="hidden_last" if top.gate_mode == "hidden" else top.gate_mode,
        out_dtype=_DTYPES[top.dtype] if top.dtype else None,
        per_token=top.experts_per_token,
        architecture=top.architecture or "",
        seed=top.seed if seed is None else seed,
        folder=folder,
        text=text,
        notes=tuple(reading.notes),
        files=files,
    )
    reading.stop_on_problems()
    return recipe


_Read = tuple[DenseExpertSection, Path]


def _experts(reading: Reading, key: str, given: Sequence[Any]) -> Iterator[_Read]:
    for number, entry in enumerate(given):
        place: Place = (key, number)
        section = reading.checked(DenseExpertSection, entry, place)
        if section is None or getattr(section, "source_model", None) is None:
            continue
        path = reading.path((*place, "source_model"), section.source_model)
        if path is not None:
            yield section, path


def _check(
    reading: Reading, top: MixtureSection, experts: Sequence[_Read], shared: Sequence[_Read]
) -> None:
    """What mergekit refuses, too: experts that no router can tell apart, or too few."""
    if len(top.experts) < top.experts_per_token:
        told = f"is {top.experts_per_token}, and there are {len(top.experts)} experts"
        reading.problem(("experts_per_token",), told)
    asked = [bool(one.positive_prompts) for one, _ in shared]
    if len(set(asked)) > 1:
        reading.problem(("shared_experts",), "give all of them positive_prompts, or none")
    if top.gate_mode in RANDOM:
        return
    for number, (one, _) in enumerate(experts):
        if not one.positive_prompts:
            told = f"is missing; gate_mode: {top.gate_mode} makes the router of prompts"
            reading.problem(("experts", number, "positive_prompts"), told)
    said = {(tuple(one.positive_prompts or ()), tuple(one.negative_prompts or ()))
            for one, _ in experts}  # fmt: skip
    if len(experts) > 1 and len(said) == 1 and not reading.problems:
        told = "all have the same prompts, so the router could not tell them apart; write under "
        reading.problem(("experts",), f"{told}each what is to be sent there")
    if len({path for _, path in experts}) == 1 and len(experts) > 1:
        reading.note(
            "all experts are the same model: the mixture computes what the model does, until it is "
            "trained"
        )


def _fetched(reading: Reading) -> dict[Path, Path]:
    """The folders of hub ids, downloaded now that everything else is known to be right."""
    if not reading.remote:
        return {}
    from sigmerge.checkpoints.hub import download

    local: dict[Path, Path] = {}
    for stand_in, (place, text) in reading.remote.items():
        try:
            parts = [find_model(part, reading.folder) or download(part) for part in text.split("+")]
            local[stand_in] = Path("+".join(map(str, parts)))
        except RecipeError as error:
            reading.problem(place, str(error))
    reading.stop_on_problems()
    return local


def _there(path: Path | None, local: Mapping[Path, Path]) -> Path:
    assert path is not None
    return local.get(path, path)


class _Places:
    """Names for models, each once."""

    def __init__(self, reading: Reading, local: Mapping[Path, Path], base: Path) -> None:
        self._reading, self._local, self.base = reading, local, base
        self._names = {base: BASE}

    def expert(self, given: _Read) -> MixtureExpert:
        section, path = given
        path = self._local.get(path, path)
        if path not in self._names:
            plain = path.name.partition("@")[0] or "expert"
            taken, number, name = set(self._names.values()), 2, plain
            while name in taken:
                name, number = f"{plain}-{number}", number + 1
            self._names[path] = name
        return MixtureExpert(
            member=self._names[path],
            path=path,
            positive=tuple(section.positive_prompts or ()),
            negative=tuple(section.negative_prompts or ()),
            noise=section.noise_scale or 0.0,
            scale=1.0 if section.residual_scale is None else section.residual_scale,
        )
