"""From YAML to a checked recipe. All problems are reported together."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from sigmerge.checkpoints.adapters import adapter_config, home_of, is_adapter
from sigmerge.checkpoints.vocabularies import TokenSource, VocabularyRequest
from sigmerge.errors import PoolError, RecipeError
from sigmerge.files.yaml_documents import decoded, parse_yaml
from sigmerge.operators.base import Operator
from sigmerge.operators.table import names, operator
from sigmerge.recipe.folders import find_model
from sigmerge.recipe.record import Recipe, RecipeModel, RecipeSlice, RecipeSource
from sigmerge.recipe.sections import (
    CalibrateSection,
    CaptureSection,
    GuideSection,
    ModelSection,
    ModuleSection,
    RecipeSection,
    RepairSection,
    SearchSection,
    SliceSection,
    SourceSection,
    TokenizerSection,
    TokenModelSection,
    TokenRowSection,
    TuneSection,
    worded,
)
from sigmerge.recipe.settings import Conditions, ParameterCheck, Place
from sigmerge.recipe.space import SPACES
from sigmerge.words import nearest, shown, unknown

OUTPUT_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
OWN = ("preset", "seed", "anchor", "capture", "search", "guide", "repair", "tune")
"""Keys that mergekit does not have. A file with one of them is no mergekit file."""

_Section = TypeVar("_Section", bound=BaseModel)


def load_recipe(
    source: Path | str | Mapping[str, Any],
    *,
    seed: int | None = None,
    repair: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> Recipe:
    """Read a recipe from a file, or from a mapping given in Python.

    `seed` and the keys of `repair` go before what the recipe says. In a mergekit file a key that
    mergekit passes over is noted; `strict` makes it an error, as it is in files with keys of ours.
    """
    folder = Path.cwd()
    if isinstance(source, Mapping):
        try:
            plain = json.loads(json.dumps(dict(source), default=os.fspath))
        except (TypeError, ValueError) as error:
            raise RecipeError(f"recipe: holds what YAML cannot say ({error}).") from None
        text, where = yaml.safe_dump(plain, sort_keys=False), "recipe"
    else:
        file = Path(source).expanduser()
        text, where = decoded(file, "a recipe in YAML", RecipeError), str(file)
        folder = file.resolve().parent
    numbered = not isinstance(source, Mapping)
    return _Parser(text, where, folder, strict, numbered).parse(seed, repair or {})


@dataclass(frozen=True)
class _Sections:
    """What is left of a recipe's sections without their wrong keys, which are reported already."""

    top: RecipeSection
    models: tuple[tuple[int, ModelSection], ...]
    slices: tuple[tuple[SliceSection, tuple[SourceSection, ...]], ...]
    capture: CaptureSection
    search: SearchSection | None
    repair: RepairSection | None
    tune: TuneSection | None
    guide: GuideSection | None


MERGEKITS = (
    RecipeSection,
    ModelSection,
    SliceSection,
    SourceSection,
    ModuleSection,
    TokenizerSection,
)
"""Sections that mergekit has too; it passes over keys there that it does not know."""


class _Parser:
    def __init__(self, text: str, where: str, folder: Path, strict: bool, numbered: bool) -> None:
        self.text, self.where, self.folder, self.strict = text, where, folder, strict
        self.numbered = numbered
        self.problems: dict[str, int] = {}
        self.notes: list[str] = []
        self.lines: dict[Place, int] = {}
        self.remote: dict[Path, tuple[Place, str]] = {}
        self.flags: dict[str, str] = {}

    def problem(self, path: Place, message: str) -> None:
        line, place = self._place(path)
        told = f"{place}: {message}" if path else message
        self.problems.setdefault(told, line if path and line else 0)

    def passed_over(self, path: Place, message: str) -> None:
        """What mergekit does not look at: a note in a mergekit file, else a problem."""
        if self.strict:
            self.problem(path, message)
        else:
            self.note(f"{self._place(path)[1]}: passed over, as mergekit does: {message}")

    def _place(self, path: Place) -> tuple[int | None, str]:
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
            by_line = sorted(self.problems, key=self.problems.__getitem__)
            raise RecipeError(f"{self.where}: the recipe cannot be run:", by_line)

    def parse(self, seed: int | None, repair: Mapping[str, Any]) -> Recipe:
        data = self._changed(self._yaml(), repair)
        self.strict |= any(key in OWN and key != "seed" for key in data)
        sections = self._sections(data)
        top = sections.top
        seed = top.seed if seed is None else seed
        chosen = self._operator(top)
        judge = None
        if chosen:
            judge = ParameterCheck(chosen, top.preset, self.problem, self.passed_over, self.note)
        parameters = {k: v for k, v in (top.parameters or {}).items() if k != "on"}
        # Without an operator nothing can be said about parameters.
        parameters = judge.settings(("parameters",), parameters) if judge else {}
        reference = self._path(("base_model",), top.base_model) if top.base_model else None
        models = self._models(sections, judge, reference)
        slices: tuple[RecipeSlice, ...] = ()
        if sections.slices:
            models, slices = self._slices(sections, judge, reference)
        else:
            models += self._base_in_soup(sections, chosen, reference, models, parameters)
            self._check_count(chosen, ("models",), len(models))
        self._check_names(models)
        self._check(sections, chosen, [model.name for model in models])
        tokenizer, vocabulary = self._tokenizer(sections, reference, models)
        anchor = self._path(("anchor",), top.anchor) if top.anchor else None
        self.stop_on_problems()
        dtype = top.out_dtype or top.dtype
        recipe = Recipe(
            operator=chosen,
            method=str(top.merge_method),
            reference=reference,
            models=tuple(models),
            parameters=parameters,
            preset=top.preset,
            seed=seed,
            out_dtype=OUTPUT_DTYPES[dtype] if dtype else None,
            tokenizer=tokenizer,
            anchor=anchor,
            repair=_seeded(sections.repair, seed),
            folder=self.folder,
            text=self.text,
            slices=slices,
            vocabulary=vocabulary,
            capture=sections.capture,
            search=sections.search,
            tune=sections.tune,
            guide=sections.guide,
        )
        recipe = self._with_models(self._fetched(recipe))
        template = self._chat_template(recipe, top.chat_template)
        self.stop_on_problems()
        return replace(recipe, chat_template=template, notes=tuple(self.notes))

    # YAML

    def _yaml(self) -> dict[str, Any]:
        found = parse_yaml(self.text, self.where, RecipeError)
        data, self.lines = found.value, found.lines
        for place in found.twice:
            self.problem(place, "is given twice")
        if isinstance(data, dict) and isinstance(parameters := data.get("parameters"), dict):
            # YAML 1.1 reads an unquoted `on` as true, and JSON writes that key as a word.
            data["parameters"] = {
                "on" if k is True or k == "true" else k: v for k, v in parameters.items()
            }
        if not isinstance(data, dict):
            kind = (
                "an empty file" if data is None
                else "a list" if isinstance(data, list)
                else shown(data)
            )  # fmt: skip
            raise RecipeError(
                f"{self.where}: a recipe is a mapping with merge_method:, base_model: and models:, "
                f"not {kind}; `sigmerge merge --help` shows one."
            )
        return data

    def _changed(self, data: dict[str, Any], repair: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe with another repair; its text, too, so that the record says what was run."""
        if not repair:
            return data
        if not isinstance(data.get("repair"), dict):
            raise RecipeError(
                f"{self.where}: has no repair: section, so {', '.join(repair)} cannot be changed."
            )
        self.flags = {key: f"--{key.replace('_', '-')}" for key in repair}
        changed = {**data, "repair": {**data["repair"], **repair}}
        self.text = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)
        return changed

    # Sections

    def _sections(self, data: dict[str, Any]) -> _Sections:
        data = self._without_modules(data)
        top = self._checked(RecipeSection, data, ())
        if top is None:
            self.stop_on_problems()
        assert top is not None
        if data.get("merge_method") is None:
            self.problem((), f"merge_method is missing; there are: {', '.join(names())}")
        entries = [
            (i, self._checked(ModelSection, entry, ("models", i)))
            for i, entry in enumerate(top.models)
        ]
        slices = self._slice_sections(top)
        if "models" in data and "slices" in data:
            self.problem(("slices",), "and models: both say what is merged; give one")
        elif "models" not in data and "slices" not in data:
            self.problem((), "models is missing: no expert is listed")
        elif data.get("models") == []:
            self.problem(("models",), "no expert is listed")
        for key in ("repair", "guide", "search", "tune"):
            if key in data and data[key] is None:
                self.note(f"{key}: is empty, and does nothing")
        capture = {} if top.capture is None else top.capture
        return _Sections(
            top,
            tuple((i, entry) for i, entry in entries if entry is not None),
            slices,
            self._checked(CaptureSection, capture, ("capture",)) or CaptureSection(),
            self._optional(SearchSection, top.search, "search"),
            self._optional(RepairSection, top.repair, "repair"),
            self._optional(TuneSection, top.tune, "tune"),
            self._optional(GuideSection, top.guide, "guide"),
        )

    def _without_modules(self, data: dict[str, Any]) -> dict[str, Any]:
        """A single module stands for the model: its keys go to the top level."""
        data = {k: v for k, v in data.items() if v is not None or k not in ("slices", "modules")}
        if "output_slices" in data and "slices" not in data:  # its name in mergekit's old files
            data["slices"] = data.pop("output_slices")
        modules = data.pop("modules", None)
        if modules is None:
            return data
        if not isinstance(modules, dict) or len(modules) != 1:
            self.problem(("modules",), "must be a mapping with one module; merge others apart")
            return data
        (name,) = modules
        module = self._checked(ModuleSection, modules[name], ("modules", name))
        if module is None:
            return data
        given = module.model_dump(exclude_none=True)
        given["parameters"] = {**(data.get("parameters") or {}), **given.get("parameters", {})}
        return {**data, **given}

    def _slice_sections(
        self, top: RecipeSection
    ) -> tuple[tuple[SliceSection, tuple[SourceSection, ...]], ...]:
        found = []
        for i, entry in enumerate(top.slices):
            piece = self._checked(SliceSection, entry, ("slices", i))
            if piece is None:
                continue
            sources = [
                self._checked(SourceSection, source, ("slices", i, "sources", j))
                for j, source in enumerate(piece.sources)
            ]
            if not sources:
                self.problem(("slices", i, "sources"), "no source is listed")
            found.append((piece, tuple(source for source in sources if source is not None)))
        return tuple(found)

    def _optional(self, kind: type[_Section], data: Any, name: str) -> _Section | None:
        return None if data is None else self._checked(kind, data, (name,))

    def _checked(self, kind: type[_Section], data: Any, place: Place) -> _Section | None:
        """The section without its wrong keys, each a problem; None if nothing is left."""
        try:
            return kind.model_validate(data)
        except ValidationError as error:
            wrong: dict[Place, list[Any]] = {}
            for item in error.errors():
                wrong.setdefault(tuple(map(str, item["loc"][:1])), []).append(item)
        for key, items in wrong.items():
            told = worded(items, kind.model_fields)
            extra = kind in MERGEKITS and items[0]["type"] == "extra_forbidden"
            if extra and nearest(key[-1], kind.model_fields) not in OWN:
                self.passed_over((*place, *key), told)
            else:
                self.problem((*place, *key), told)
        if not isinstance(data, dict):
            return None
        if list(wrong) == [()]:  # every key is right, but they do not agree
            return kind.model_construct(**data)
        rest = {key: value for key, value in data.items() if (str(key),) not in wrong}
        return self._checked(kind, rest, place) if len(rest) < len(data) else None

    # Operator and models

    def _operator(self, top: RecipeSection) -> Operator | None:
        if top.merge_method is None:
            return None
        if top.merge_method == "checkpoint":
            if top.anchor is None:
                self.problem(("merge_method",), "checkpoint needs anchor: the folder to repair")
            return None
        if top.anchor is not None:
            self.problem(("anchor",), "is only read with merge_method: checkpoint")
        on = (top.parameters or {}).get("on")
        if on is not None and top.merge_method in names() and top.merge_method != "lines":
            self.problem(("parameters", "on"), "is an option of merge_method: lines")
        elif not isinstance(on, str | None):
            self.problem(("parameters", "on"), f"must be the name of an operator, not {on!r}")
            return None
        try:
            return operator(top.merge_method, on).with_reference(bool(top.base_model))
        except RecipeError as error:
            place = ("parameters", "on") if top.merge_method == "lines" else ("merge_method",)
            said = str(error).removeprefix("merge_method: ").removeprefix("parameters.on: ")
            self.problem(place, said)
            return None

    def _models(
        self, sections: _Sections, judge: ParameterCheck | None, reference: Path | None
    ) -> list[RecipeModel]:
        top, chosen = sections.top, judge.operator if judge else None
        needs = chosen.needs_reference if chosen else top.merge_method == "checkpoint"
        if not top.base_model and (needs or sections.repair is not None):
            who = top.merge_method if needs else "the repair"
            self.problem(
                (),
                f"base_model is missing: {who} needs the reference checkpoint that the experts "
                "were tuned from",
            )
        models: list[RecipeModel] = []
        for i, entry in sections.models:
            path = self._path(("models", i, "model"), entry.model)
            itself = path is not None and path == reference
            if itself and needs:
                self.note(
                    f"{entry.model} is the base model; its entry under models: has "
                    f"no task vector and is left out"
                )
                continue
            if itself and sections.repair is not None:
                self.problem(
                    ("models", i),
                    "the base model in a soup cannot be repaired with it, every model being an "
                    "expert to the repair: merge first, then repair the result with "
                    "merge_method: checkpoint",
                )
            own = entry.parameters or {}
            own = judge.settings(("models", i, "parameters"), own, per_model=True) if judge else {}
            exemplars = self._exemplars(i, entry, chosen)
            if path is not None:
                default = "base" if itself else path.name.partition("@")[0]
                models.append(RecipeModel(entry.name or default, path, own, exemplars))
        if sections.models and not models and not self.problems:
            self.problem(("models",), "no expert is listed, only the base model")
        return models

    def _slices(
        self, sections: _Sections, judge: ParameterCheck | None, reference: Path | None
    ) -> tuple[list[RecipeModel], tuple[RecipeSlice, ...]]:
        """The slices, and the experts in them: all models but the bases of task vectors."""
        names: dict[Path, str] = {}
        slices = [
            self._slice(i, piece, sources, judge, reference, names)
            for i, (piece, sources) in enumerate(sections.slices)
        ]
        experts: dict[str, RecipeModel] = {}
        single = len(slices) == 1 and not slices[0].parameters
        for piece in slices:
            for source in piece.sources:
                if source.model != piece.base:
                    own = source.parameters if single else {}
                    experts.setdefault(source.model, RecipeModel(source.model, source.path, own))
        for key in ("search", "guide", "tune"):
            if getattr(sections, key) is not None and not single:
                self.problem((key,), "needs whole models; give them under models:")
        return list(experts.values()), tuple(slices)

    def _slice(
        self,
        i: int,
        piece: SliceSection,
        sources: Sequence[SourceSection],
        judge: ParameterCheck | None,
        reference: Path | None,
        names: dict[Path, str],
    ) -> RecipeSlice:
        place: Place = ("slices", i)
        chosen = judge.operator if judge else None
        given = piece.parameters or {}
        shared = judge.settings((*place, "parameters"), given) if judge else {}
        start = reference
        if piece.base_model is not None:
            start = self._path((*place, "base_model"), piece.base_model)
        found = []
        for j, source in enumerate(sources):
            here = (*place, "sources", j)
            path = self._path((*here, "model"), source.model)
            own = source.parameters or {}
            own = judge.settings((*here, "parameters"), own, per_model=True) if judge else {}
            first, last = source.layer_range
            if not 0 <= first < last:
                self.problem((*here, "layer_range"), f"[{first}, {last}] holds no layer")
            if path is not None:
                name = names.setdefault(path, source.name or _free_name(path, reference, names))
                found.append(RecipeSource(name, path, first, last, own))
        self._check_sources(place, found)
        needs = chosen is not None and chosen.needs_reference
        base = next((s.model for s in found if needs and s.path == start), None)
        if needs and base is None and start is not None and not self.problems:
            self.problem(
                (*place, "sources"),
                f"{chosen.name if chosen else ''} needs the base model among them",
            )
        self._check_count(chosen, (*place, "sources"), len(found) - (base is not None))
        return RecipeSlice(tuple(found), base, shared)

    def _check_sources(self, place: Place, sources: Sequence[RecipeSource]) -> None:
        lengths = [source.last - source.first for source in sources]
        if len(set(lengths)) > 1:
            told = ", ".join(f"{s.model} has {n}" for s, n in zip(sources, lengths, strict=True))
            self.problem((*place, "sources"), f"must all have as many layers; {told}")
        models = [source.model for source in sources]
        for model in sorted({m for m in models if models.count(m) > 1}):
            self.problem((*place, "sources"), f"{model} stands there twice")

    def _check_count(self, chosen: Operator | None, place: Place, count: int) -> None:
        """Whether there are as many models as the operator takes."""
        if chosen is None or self.problems:
            return
        most = chosen.most if chosen.most is not None else count
        if not chosen.least <= count <= most:
            bound = f"at least {chosen.least}" if count < chosen.least else f"at most {most}"
            beside = " beside the base model" if chosen.needs_reference else ""
            self.problem(place, f"{chosen.name} takes {bound}{beside}, and {count} are listed")

    def _base_in_soup(
        self,
        sections: _Sections,
        chosen: Operator | None,
        reference: Path | None,
        models: list[RecipeModel],
        parameters: Mapping[str, Any],
    ) -> list[RecipeModel]:
        """mergekit counts a base_model that is not listed into a soup, with the shared weight."""
        top = sections.top
        if reference is None or chosen is None or chosen.needs_reference:
            return []
        if any(model.path == reference for model in models):
            return []
        weight = parameters.get("weight")
        counts = chosen.name == "karcher" or (chosen.name == "linear" and weight is not None)
        if not counts or top.preset != "mergekit":
            if sections.repair is None:  # which does read the reference
                self.note(
                    f"{top.base_model} gives configuration and tokenizer only; it is not in the "
                    f"soup unless it is listed under models:"
                )
            return []
        if isinstance(weight, Conditions) and weight.rules[-1][0] not in (None, "*"):
            self.problem(
                ("parameters", "weight"),
                "base_model is one more model of this soup, and has no weight where no filter "
                "matches; end the list with a value without filter",
            )
        if sections.repair is not None:
            place: Place = ("parameters", "weight") if weight is not None else ("base_model",)
            self.problem(
                place,
                "makes base_model one more model of this soup, as in mergekit, and such a soup "
                "cannot be repaired; give every model its own weight, or say preset: paper",
            )
        how = "with the weight that all share, " if weight is not None else ""
        instead = "give every model its own weight" if weight is not None else "say preset: paper"
        self.note(
            f"{top.base_model} is one more model of the soup, {how}as in mergekit; {instead} to "
            "leave it out"
        )
        return [RecipeModel("base", reference, {})]

    def _check_names(self, models: list[RecipeModel]) -> None:
        names = [model.name for model in models]
        for name in sorted({n for n in names if names.count(n) > 1}):
            self.problem(("models",), f"two experts are called {name!r}; give each a name:")
        if "reference" in names:
            self.problem(("models",), "no expert may be called 'reference'; give it a name:")
        for name in names:
            if not name.strip() or "/" in name or not name.isprintable():
                self.problem(("models",), f"{shown(name)} cannot be the name of an expert")

    def _exemplars(self, i: int, entry: ModelSection, chosen: Operator | None) -> Path | None:
        if entry.exemplars is None:
            if chosen and chosen.needs:
                self.problem(
                    ("models", i),
                    f"exemplars is missing: {chosen.name} reads each expert's own exemplars, a "
                    'JSONL file of {"prompt": …} or {"prompt": …, "response": …}',
                )
            return None
        file = self.folder / Path(entry.exemplars).expanduser()
        if not file.is_file():
            self.problem(("models", i, "exemplars"), f"{str(file)!r}: no such file")
        return file

    def _check(self, sections: _Sections, chosen: Operator | None, names: Sequence[str]) -> None:
        """Checks that need several sections."""
        top, given = sections.top, sections.top.parameters or {}
        for name in ("outside", "alpha", "scope") if chosen else ():
            if isinstance(given.get(name), list | dict):
                self.problem(("parameters", name), "has one value for the whole model")
        if chosen and given.get("outside") == "reference" and not top.base_model:
            self.problem(("parameters", "outside"), "reference needs a base_model")
        if sections.capture.scale != 1 and not top.base_model:
            self.problem(("capture", "scale"), "needs a base_model unless it is 1")
        if sections.search is not None and chosen and top.merge_method not in SPACES:
            self.problem(
                ("search",),
                f"merge_method: {top.merge_method} cannot be searched; the search knows "
                f"{', '.join(SPACES)}",
            )
        if sections.guide is not None:
            self._check_guide(sections, sections.guide, chosen, names)
        calibrated = sections.repair.calibration if sections.repair else None
        if isinstance(calibrated, CalibrateSection):  # what else was said is reported already
            for told in calibrated.aim.problems(names):
                self.problem(("repair", "calibrate"), told)
        shares = sections.repair.shares if sections.repair else None
        for name in shares or ():
            if name not in names:
                self.problem(("repair", "shares"), unknown("expert", name, names))
        if sections.repair is not None and sections.repair.probe is not None:
            probe = self.folder / sections.repair.probe
            if not probe.is_file():
                self.problem(("repair", "probe"), f"{probe} does not exist")

    def _check_guide(
        self,
        sections: _Sections,
        guide: GuideSection,
        chosen: Operator | None,
        experts: Sequence[str],
    ) -> None:
        """What can be guided: one weight per expert, of experts that domains are named after."""
        place: Place = ("guide",)
        if sections.top.merge_method == "checkpoint":
            self.problem(place, "an anchor that is a folder has no weights to guide")
        elif chosen is not None and "weight" not in {p.name for p in chosen.parameters}:
            others = [
                name for name in names()
                if "weight" in {p.name for p in operator(name).parameters}
            ]  # fmt: skip
            self.problem(
                place,
                f"merge_method: {chosen.name} has no weight per expert, so nothing can be guided; "
                f"those that have one are {', '.join(others)}",
            )
        if sections.search is not None:
            self.problem(place, "and search: both choose the weights; give one")
        if not sections.top.base_model:
            self.problem(place, "needs a base_model, the reference of the experts")
        if len(experts) == 1:
            self.problem(place, "moves weight between experts of several domains; one is listed")
        for told in guide.aim.problems(experts):
            self.problem(place, told)

    # Tokenizers

    def _tokenizer(
        self, sections: _Sections, reference: Path | None, models: list[RecipeModel]
    ) -> tuple[Path | None, VocabularyRequest | None]:
        """The folder of the tokenizer that is taken, and the vocabulary that is asked for."""
        top = sections.top
        section = self._optional(TokenizerSection, top.tokenizer, "tokenizer")
        wanted = top.tokenizer_source
        place: Place = ("tokenizer_source",)
        if section is not None:
            if wanted is not None:
                self.problem(("tokenizer",), "and tokenizer_source say the same; give one")
            wanted, place = section.source, ("tokenizer", "source")
        if wanted is None:
            return reference, None
        vocabulary = VocabularyRequest(
            union=wanted == "union",
            base=self._member(reference, reference, models),
            tokens=self._tokens(section, reference, models),
            pad=section.pad_to_multiple_of if section else None,
        )
        if wanted in ("base", "union"):
            return reference, vocabulary
        named = [model.path for model in models if wanted == model.name]
        return (named[0] if named else self._path(place, wanted)), vocabulary

    def _member(
        self, path: Path | None, reference: Path | None, models: Sequence[RecipeModel]
    ) -> str | None:
        """What a pool calls a model; None if it is none of its models."""
        if path is not None and path == reference:
            return next((model.name for model in models if model.path == path), "reference")
        return next((model.name for model in models if model.path == path), None)

    def _tokens(
        self,
        section: TokenizerSection | None,
        reference: Path | None,
        models: Sequence[RecipeModel],
    ) -> dict[str, TokenSource]:
        """Where rows of single tokens come from."""
        found: dict[str, TokenSource] = {}
        for token, entry in ((section.tokens or {}) if section else {}).items():
            place: Place = ("tokenizer", "tokens", token)
            row = self._checked(TokenRowSection, {} if entry is None else entry, place)
            if row is None:
                continue
            given = row.source
            if isinstance(given, str):
                given = {"kind": "model_token", "model": given, "token": token}
            if given is None:
                found[token] = TokenSource(force=row.force)
                continue
            source = self._checked(TokenModelSection, given, (*place, "source"))
            if source is None or source.model is None:
                found[token] = TokenSource(zero=True, force=row.force)
                continue
            named = [model.name for model in models if source.model == model.name]
            path = None if named else self._path((*place, "source"), source.model)
            name = named[0] if named else self._member(path, reference, models)
            if name is None and path is not None:
                self.problem((*place, "source"), f"{source.model} is none of the models")
            found[token] = TokenSource(
                name, token=source.token, token_id=source.token_id, force=row.force
            )
        return found

    def _chat_template(self, recipe: Recipe, wanted: str | None) -> str | None:
        """The template that goes before the tokenizer's own."""
        from sigmerge.checkpoints.companions import chat_template_of
        from sigmerge.recipe.templates import chat_template

        home = home_of(recipe.tokenizer or recipe.reference or recipe.models[0].path)
        models = dict.fromkeys(model for model in recipe.inputs if model != recipe.anchor)
        try:
            if wanted is not None:
                return chat_template(wanted, self.folder, models)
            others = [model.name for model in models if chat_template_of(model)]
            if others and chat_template_of(home) is None:
                self.note(
                    f"{home.name} has no chat template, and neither has the result; to take the "
                    f"one of {others[0]}, say chat_template: auto"
                )
        except (PoolError, RecipeError) as error:
            self.problem(("chat_template",), str(error))
        return None

    # Paths

    def _path(self, place: Place, text: str | None) -> Path | None:
        """A folder. A hub id stands for itself until everything else is known to be right."""
        assert text is not None
        try:
            found = find_model(text, self.folder)
        except RecipeError as error:
            self.problem(place, str(error))
            return None
        if found is None:
            found = Path(text)
            self.remote.setdefault(found, (place, text))
        return found

    def _fetched(self, recipe: Recipe) -> Recipe:
        """The recipe with every hub id downloaded; a part of model+adapter may be one."""
        if not self.remote:
            return recipe
        from sigmerge.checkpoints.hub import download

        local: dict[Path, Path] = {}
        for stand_in, (place, text) in self.remote.items():
            try:
                parts = [find_model(part, self.folder) or download(part)
                         for part in text.split("+")]  # fmt: skip
                local[stand_in] = Path("+".join(map(str, parts)))
            except RecipeError as error:
                self.problem(place, str(error))
        self.stop_on_problems()
        return _moved(recipe, lambda path: local.get(path, path))

    def _with_models(self, recipe: Recipe) -> Recipe:
        """The recipe with `model+adapter` where it names an adapter alone."""

        def whole(path: Path) -> Path:
            if not is_adapter(path):
                return path
            try:
                return self._with_model(path, recipe.reference)
            except (PoolError, RecipeError) as error:
                self.problem((), str(error))
                return path

        moved = _moved(recipe, whole)
        self.stop_on_problems()
        return moved

    def _with_model(self, adapter: Path, reference: Path | None) -> Path:
        """An adapter behind its model: the one that it names, if that is here, or base_model."""
        named = adapter_config(adapter).get("base_model_name_or_path")
        named = named if isinstance(named, str) and named else None
        found = None
        if named is not None:
            with contextlib.suppress(RecipeError):
                found = find_model(named, self.folder)
        if found is None and reference is not None and reference != adapter:
            if named is not None and Path(named).name not in (
                reference.name,
                *_hub_name(reference),
            ):
                self.note(f"{adapter.name} was trained on {named}, and is read on base_model")
            found = reference
        if found is None and named is None:
            raise RecipeError(f"{adapter}: names no model; write it before it, as model+adapter")
        if found is None:
            from sigmerge.checkpoints.hub import download

            assert named is not None
            found = find_model(named, self.folder) or download(named)
        return Path(f"{found}+{adapter}")


def _moved(recipe: Recipe, move: Callable[[Path], Path]) -> Recipe:
    """The recipe with other paths."""

    def sources(piece: RecipeSlice) -> tuple[RecipeSource, ...]:
        return tuple(replace(source, path=move(source.path)) for source in piece.sources)

    return replace(
        recipe,
        reference=recipe.reference and move(recipe.reference),
        models=tuple(replace(model, path=move(model.path)) for model in recipe.models),
        slices=tuple(replace(piece, sources=sources(piece)) for piece in recipe.slices),
        tokenizer=recipe.tokenizer and home_of(move(recipe.tokenizer)),
        anchor=recipe.anchor and move(recipe.anchor),
    )


def _hub_name(folder: Path) -> list[str]:
    """The name of a folder that is a download of the hub."""
    parts = [part for part in folder.parts if part.startswith("models--")]
    return [part.rpartition("--")[2] for part in parts]


def _free_name(path: Path, reference: Path | None, names: Mapping[Path, str]) -> str:
    """A model's name, where the recipe gives none."""
    name = "base" if path == reference else path.name.partition("@")[0]
    taken = {"reference", *names.values()}
    return next(n for n in (name, *(f"{name}-{k}" for k in range(2, 99))) if n not in taken)


def _seeded(repair: RepairSection | None, seed: int) -> RepairSection | None:
    """A repair that names no seed of its own draws from the recipe's."""
    if repair is None or "seed" in repair.model_fields_set:
        return repair
    return repair.model_copy(update={"seed": seed})


def _dotted(path: Place) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
