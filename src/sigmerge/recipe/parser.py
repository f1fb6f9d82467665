"""From YAML to a checked recipe. All problems are reported together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sigmerge.errors import RecipeError
from sigmerge.files.documents import too_deep
from sigmerge.files.safe_open import is_regular
from sigmerge.files.yaml_documents import Yaml, as_yaml, decoded, parse_yaml
from sigmerge.messages import shown, unknown
from sigmerge.operators.base import Operator
from sigmerge.operators.table import OF_OTHERS, names, operator
from sigmerge.recipe.members import fetched, with_models, with_weights
from sigmerge.recipe.modules import (
    BY_FILTER,
    all_models,
    all_slices,
    by_module,
    differing_modules,
    joined_settings,
    shared_settings,
)
from sigmerge.recipe.reading import Reading
from sigmerge.recipe.record import OWN_KEYS, AdapterRequest, Recipe, RecipeModel, RecipeSlice
from sigmerge.recipe.sections import (
    CaptureSection,
    ModelSection,
    ModuleSection,
    RecipeSection,
    SliceSection,
    SourceSection,
    TrajectorySection,
)
from sigmerge.recipe.settings import Conditions, ParameterCheck, Place
from sigmerge.recipe.slices import WrittenSlice, check_count, free_name, in_soup, read_slices
from sigmerge.recipe.tokenizers import read_chat_template, read_tokenizer

if TYPE_CHECKING:  # imported where a recipe has them
    from sigmerge.recipe.scored import GuideSection, RepairSection, SearchSection, TuneSection

SCORED_KEYS = ("repair", "guide", "search", "tune")
"""The sections that need scores."""
LISTING = ("models", "slices", "output_slices", "modules")
"""Keys that say what is merged."""
OUTPUT_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def load_recipe(
    source: Path | str | Mapping[str, Any],
    *,
    seed: int | None = None,
    repair: Mapping[str, Any] | None = None,
    strict: bool = False,
    folder: Path | None = None,
    weights: bool = True,
) -> Recipe:
    """Read a recipe from a file, or from a mapping given in Python.

    What a mapping names lies in `folder`, or else where the program runs. Models of the hub are
    downloaded; without `weights` headers alone, see jobs/hub.py.

    `seed` and the keys of `repair` go before what the recipe says. In a mergekit file a key that
    mergekit passes over is noted; `strict` makes it an error, as it is in files with keys of ours.
    """
    folder, own = folder or Path.cwd(), list[Path]()
    if isinstance(source, Mapping):
        try:
            plain = json.loads(json.dumps(dict(source), default=os.fspath))
        except (TypeError, ValueError) as error:
            raise RecipeError(f"recipe: holds what YAML cannot say ({error}).") from None
        text, where = as_yaml(plain), "recipe"
    else:
        file = Path(source).expanduser()
        text, where = decoded(file, "a recipe in YAML", RecipeError), str(file)
        folder, own = file.resolve().parent, [file.resolve()]
    parser = _Parser(text, where, folder, strict, numbered=not isinstance(source, Mapping))
    if (
        isinstance(source, Mapping)
        and len(text) < _PLAIN_TEXT
        and not too_deep(plain, _PLAIN_DEPTH)
    ):
        parser.known = plain
    recipe = parser.parse(seed, repair or {})
    if weights:
        recipe = with_weights(recipe)
    return replace(recipe, files=(*own, *recipe.files))


_PLAIN_TEXT, _PLAIN_DEPTH = 100_000, 16
"""A mapping within these limits need not be read again from its text, which takes milliseconds:
a search has hundreds of them."""
_FOLDERS = ("data", "folder", "judge", "pool", "splits", "suite")
"""Keys whose values may name a folder that is read, or holds what took long to measure."""


def _named_files(data: Mapping[str, Any], folder: Path) -> Iterator[Path]:
    """The files that a recipe names, whatever for, and the folders of data.

    A suite may lie below the folder that the command runs in, and a command names several files.
    """
    for key, text in dict.fromkeys(_texts("", data)):
        for word, start in product((text, *text.replace("=", " ").split()), (folder, Path.cwd())):
            with suppress(RuntimeError, OSError, ValueError):  # the home of nobody; no name
                place = start / Path(word).expanduser()
                if is_regular(place) or (key in _FOLDERS and place.is_dir()):
                    yield place


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every text, with the key that it stands under."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(key, part)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _texts(name, part)


@dataclass(frozen=True)
class _Sections:
    """The valid sections of a recipe; wrong keys were removed and reported."""

    top: RecipeSection
    models: tuple[tuple[int, ModelSection], ...]
    slices: tuple[WrittenSlice, ...]
    capture: CaptureSection
    search: SearchSection | None
    repair: RepairSection | None
    tune: TuneSection | None
    guide: GuideSection | None


class _Parser(Reading):
    modules: Mapping[str, ModuleSection] = MappingProxyType({})
    """Modules that are merged one by one."""
    kinds: Sequence[tuple[str, bool]] = ()
    """Of every slice of theirs, its module and whether it is whole."""
    known: Any = None
    """The parsed content, if the text was made from it."""

    def parse(self, seed: int | None, repair: Mapping[str, Any]) -> Recipe:
        data = self._listed(self._changed(self._yaml(), repair))
        self.strict |= any(key in OWN_KEYS and key != "seed" for key in data)
        sections = self._sections(data)
        top = sections.top
        seed = top.seed if seed is None else seed
        chosen = self._operator(top)
        judge = None
        if chosen:
            told = self.problem, self.passed_over, self.taken_as, self.note
            judge = ParameterCheck(chosen, top.preset, *told)
        parameters = {k: v for k, v in (top.parameters or {}).items() if k != "on"}
        # Without an operator nothing can be said about parameters.
        parameters = judge.settings(("parameters",), parameters) if judge else {}
        reference = self.path(("base_model",), top.base_model) if top.base_model else None
        models, slices, modules = self._merged(sections, judge, reference, parameters)
        scored = any(getattr(sections, key) is not None for key in SCORED_KEYS)
        self._check_names(models, ("reference", "anchor") if scored else ("reference",))
        self._check(sections, chosen, [model.name for model in models])
        tokenizer, vocabulary = read_tokenizer(self, top, reference, models, seed)
        anchor = self.path(("anchor",), top.anchor) if top.anchor else None
        if top.match_experts and chosen and chosen.needs:
            problem = f"{top.merge_method} captures what enters each expert under its own number"
            self.problem(("match_experts",), f"{problem}; use a method that reads weights alone")
        self.stop_on_problems()
        dtype, architectures = top.out_dtype or top.dtype, self._architectures(data)
        recipe = Recipe(
            operator=chosen,
            method=str(top.merge_method),
            reference=reference,
            models=tuple(models),
            parameters=parameters,
            written=top.parameters or {},
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
            tensors=top.tensors,
            match_experts=top.match_experts,
            adapter=AdapterRequest(top.space or "core", top.rank) if top.output else None,
            architecture=architectures[0],
            any_architecture=any(architectures),
            modules=modules,
            capture=sections.capture,
            search=sections.search,
            tune=sections.tune,
            guide=sections.guide,
            files=tuple(dict.fromkeys(_named_files(data, self.folder))),
        )
        recipe = with_models(self, fetched(self, recipe))
        template = read_chat_template(self, recipe, top.chat_template)
        self.stop_on_problems()
        return replace(recipe, chat_template=template, notes=tuple(self.notes))

    # YAML

    def _yaml(self) -> dict[str, Any]:
        known = Yaml(self.known) if self.known is not None else None
        found = known or parse_yaml(self.text, self.where, RecipeError)
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
        self.text = as_yaml(changed)
        return changed

    # Sections

    def _listed(self, data: dict[str, Any]) -> dict[str, Any]:
        """The recipe with every checkpoint of a run in place of the pattern that names them."""
        given = data.get("models")
        if not isinstance(given, dict):
            return data
        from sigmerge.recipe.trajectories import checkpoints, entries

        self.strict = True  # mergekit has no such form
        section = self.checked(TrajectorySection, given, ("models",))
        found = []
        if section is not None and isinstance(getattr(section, "glob", None), str):
            found = checkpoints(section, self.folder)
            if not found:
                self.problem(("models", "glob"), f"{section.glob!r} matches no checkpoint")
            if section.schedule and data.get("merge_method") != "linear":
                told = "gives weights that sum to 1; they belong to merge_method: linear"
                self.problem(("models", "schedule"), told)
        self.stop_on_problems()
        assert section is not None
        self.note(f"models: {len(found)} checkpoints, from {found[0].name} to {found[-1].name}")
        return {**data, "models": entries(section, [str(path) for path in found])}

    def _sections(self, data: dict[str, Any]) -> _Sections:
        data = self._without_modules(data)
        top = self.checked(RecipeSection, data, ())
        if top is None:
            self.stop_on_problems()
        assert top is not None
        if data.get("merge_method") is None:
            self.problem((), f"merge_method is missing; there are: {', '.join(names())}")
        entries = [
            (i, self.checked(ModelSection, entry, ("models", i)))
            for i, entry in enumerate(top.models)
        ]
        slices = self._slice_sections(top)
        if "models" in data and "slices" in data:
            self.problem(("slices",), "and models: both say what is merged; give one")
        elif "models" not in data and "slices" not in data:
            self.problem((), "models is missing: no expert is listed")
        elif data.get("models") == []:
            self.problem(("models",), "no expert is listed")
        for key in SCORED_KEYS:
            if key in data and data[key] is None:
                self.note(f"{key}: is empty, and does nothing")
        capture = {} if top.capture is None else top.capture
        return _Sections(
            top,
            tuple((i, entry) for i, entry in entries if entry is not None),
            slices,
            self.checked(CaptureSection, capture, ("capture",)) or CaptureSection(),
            **{key: self._scored(key, getattr(top, key)) for key in SCORED_KEYS},
        )

    def _scored(self, key: str, given: Any) -> Any:
        """A section that needs scores, or None."""
        if given is None:
            return None
        from sigmerge.recipe.scored import SCORED

        return self.checked(SCORED[key], given, (key,))

    def _without_modules(self, data: dict[str, Any]) -> dict[str, Any]:
        """If all modules are merged alike, move their keys to the top level."""
        data = self._without_empty(data)
        if "output_slices" in data and "slices" not in data:  # its name in mergekit's old files
            data["slices"] = data.pop("output_slices")
        modules = data.pop("modules", None)
        if modules is None:
            return data
        if not isinstance(modules, dict) or not modules:
            self.problem(("modules",), "must be a mapping from names of modules to their models")
            return data
        name, *others = modules
        stacked = any(isinstance(one, dict) and one.get("slices") for one in modules.values())
        if others and (stacked or any(modules[other] != modules[name] for other in others)):
            self.modules = differing_modules(self, modules)
            if not self.modules:
                return data
            if not stacked:
                return {**data, "models": all_models(self, self.modules)}
            slices, self.kinds = all_slices(self, self.modules)
            return {**data, "slices": slices}
        module = self.checked(ModuleSection, modules[name], ("modules", name))
        if module is None:
            return data
        given = module.model_dump(exclude_none=True)
        self.moved |= {(key,): ("modules", name, key) for key in given if key != "parameters"}
        nearer = given.pop("parameters", {})
        if isinstance(farther := data.get("parameters") or {}, dict):
            given["parameters"] = joined_settings(self, name, nearer, farther)
        return {**data, **self._without_empty(given)}

    def _without_empty(self, data: dict[str, Any]) -> dict[str, Any]:
        """A recipe or a module without models: or slices: that list nothing beside the other."""
        filled = [key for key in LISTING if data.get(key)]
        empty = [key for key in LISTING if key in data and data[key] in (None, [], {})]
        for key in empty if filled else ():
            if data[key] is not None:
                self.passed_over((key,), f"is empty, and {filled[0]}: says what is merged")
        return {k: v for k, v in data.items() if k not in empty or (v is not None and not filled)}

    def _architectures(self, data: Mapping[str, Any]) -> list[str | None]:
        """What mergekit's long form of a model puts in place of its architecture, model by model.

        mergekit finds tensors by it, and writes that of the model whose configuration it takes.
        """
        data = self._without_modules(dict(data))
        slices = [piece["sources"] for piece in data.get("slices") or []]
        listed = [one["model"] for one in chain(data.get("models") or [], *slices)]
        given = [*([data["base_model"]] if data.get("base_model") else []), *listed]
        named = [m.get("override_architecture") if isinstance(m, dict) else None for m in given]
        if any(named):
            what = f", and config.json says {named[0]}" if named[0] else ""
            told = "the models' own architectures are not compared"
            self.note(f"override_architecture: tensors are found by their names here; {told}{what}")
        return named

    def _slice_sections(self, top: RecipeSection) -> tuple[WrittenSlice, ...]:
        found = []
        for i, entry in enumerate(top.slices):
            piece = self.checked(SliceSection, entry, ("slices", i))
            if piece is None:
                continue
            sources = [
                self.checked(SourceSection, source, ("slices", i, "sources", j))
                for j, source in enumerate(piece.sources)
            ]
            if not sources:
                self.problem(("slices", i, "sources"), "no source is listed")
            kind = self.kinds[i] if self.kinds else ("", False)
            found.append(
                WrittenSlice(piece, [source for source in sources if source is not None], *kind)
            )
        return tuple(found)

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
        several = (
            isinstance(on, list)
            and len(OF_OTHERS.get(top.merge_method, ())) > 1
            and all(isinstance(each, str) for each in on)
        )
        if on is not None and top.merge_method in names() and top.merge_method not in OF_OTHERS:
            self.problem(("parameters", "on"), f"is an option of {' and '.join(OF_OTHERS)}")
        elif not isinstance(on, str | None) and not several:
            self.problem(("parameters", "on"), f"must be the name of an operator, not {on!r}")
            return None
        try:
            found = operator(top.merge_method, on).with_reference(bool(top.base_model))
            return found.with_parameters(top.parameters or {})
        except RecipeError as error:
            place = ("parameters", "on") if top.merge_method in OF_OTHERS else ("merge_method",)
            said = str(error).removeprefix("merge_method: ").removeprefix("parameters.on: ")
            self.problem(place, said)
            return None

    def _merged(
        self,
        sections: _Sections,
        judge: ParameterCheck | None,
        reference: Path | None,
        parameters: Mapping[str, Any],
    ) -> tuple[list[RecipeModel], tuple[RecipeSlice, ...], Mapping[str, Mapping[str, Any]]]:
        """The experts, and the slices or modules that they are merged in."""
        chosen = judge.operator if judge else None
        models = self._models(sections, judge, reference)
        shared = shared_settings(self, self.modules, judge)
        if sections.slices:
            if chosen and chosen.needs:
                told = "reads each expert's own exemplars, and sources of slices have none"
                self.problem(("slices",), f"{chosen.name} {told}; give whole models under models:")
            whole = [k for k in ("search", "guide", "tune") if getattr(sections, k) is not None]
            if self.modules:
                self._refuse_scored(sections)
                whole = []
            weight = parameters.get("weight")
            weights = {name: some.get("weight", weight) for name, some in shared.items()}
            return *read_slices(self, sections.slices, judge, reference, whole, weights), shared
        models += self._base_in_soup(sections, judge, reference, models, parameters)
        if not self.modules:
            check_count(self, chosen, ("models",), len(models))
            return models, (), {}
        self._refuse_scored(sections)
        return by_module(self, self.modules, judge, models), (), shared

    def _refuse_scored(self, sections: _Sections) -> None:
        """Scores are of a model, so what needs them takes models that are merged as one."""
        for key in SCORED_KEYS:
            if getattr(sections, key) is not None:
                instead = (
                    "merge first, then repair the result with merge_method: checkpoint"
                    if key == "repair"
                    else BY_FILTER
                )
                told = f"needs models that are merged alike in all their modules; {instead}"
                self.problem((key,), told)

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
        given = {entry.name for _, entry in sections.models if entry.name}
        for i, entry in sections.models:
            path = self.path(("models", i, "model"), entry.model)
            itself = path is not None and path == reference
            if itself and needs:
                if chosen is None or chosen.most != 1:  # else its place is plain: slerp's start
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
            written = entry.parameters or {}
            place = ("models", i, "parameters")
            own = judge.settings(place, written, per_model=True) if judge else {}
            exemplars = self._exemplars(i, entry, chosen)
            if path is not None and any(model.path == path for model in models):
                self.problem(("models", i), f"{entry.model} is listed twice")
            elif path is not None:
                name = entry.name
                if name is None:
                    name = self._name(path, reference, given, models, sections)
                models.append(RecipeModel(name, path, own, exemplars, written=written))
        if sections.models and not models and not self.problems:
            self.problem(("models",), "no expert is listed, only the base model")
        return models

    def _name(
        self,
        path: Path,
        reference: Path | None,
        given: set[str],
        models: Sequence[RecipeModel],
        sections: _Sections,
    ) -> str:
        """A model's name, where the recipe gives none. A domain is called by it, so it is fixed."""
        domains = (sections.repair, sections.guide, sections.search, sections.tune)
        if any(section is not None for section in domains):
            return free_name(path, reference, ())
        return free_name(path, reference, ["reference", *given, *(model.name for model in models)])

    def _base_in_soup(
        self,
        sections: _Sections,
        judge: ParameterCheck | None,
        reference: Path | None,
        models: list[RecipeModel],
        parameters: Mapping[str, Any],
    ) -> list[RecipeModel]:
        """mergekit counts a base_model that is not listed into a soup, with the shared weight."""
        top = sections.top
        if reference is None or judge is None or judge.operator.needs_reference:
            return []
        if any(model.path == reference for model in models):
            return []
        weight = parameters.get("weight")
        if not in_soup(judge, weight):
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
        taken = [model.name for model in models]
        return [RecipeModel(free_name(reference, reference, taken), reference, {})]

    def _check_names(self, models: list[RecipeModel], reserved: Sequence[str]) -> None:
        """`reserved` are the names of other checkpoints in the records, whose files they list."""
        names = [model.name for model in models]
        for name in sorted({n for n in names if names.count(n) > 1}):
            self.problem(
                ("models",), f"two experts are called {name!r}; give each a name: of its own"
            )
        for name in (name for name in reserved if name in names):
            self.problem(("models",), f"no expert may be called {name!r}; give it a name:")
        for name in names:
            if not name.strip(". ") or "/" in name or not name.isprintable():
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
        whole = ["outside", "scope", *(["alpha"] if top.merge_method == "lines" else [])]
        for name in whole if chosen else ():
            if isinstance(given.get(name), list | dict):
                self.problem(("parameters", name), "has one value for the whole model")
        if chosen and given.get("outside") == "reference" and not top.base_model:
            self.problem(("parameters", "outside"), "reference needs a base_model")
        if sections.capture.scale != 1 and not top.base_model:
            self.problem(("capture", "scale"), "needs a base_model unless it is 1")
        self._check_adapter(sections, chosen)
        if sections.search is not None and chosen:
            self._check_search(top)
        if sections.guide is not None:
            self._check_guide(sections, sections.guide, chosen, names)
        if sections.repair is not None:
            self._check_repair(sections.repair, names)

    def _check_adapter(self, sections: _Sections, chosen: Operator | None) -> None:
        """What `output: adapter` goes with."""
        top = sections.top
        if top.output is None:
            for key in ("space", "rank"):
                if getattr(top, key) is not None:
                    self.problem((key,), "is a setting of output: adapter, which is not given")
            return
        others = (*SCORED_KEYS, "slices", "anchor", "match_experts", "tokenizer",
                  "tokenizer_source", "tensors",
                  "chat_template")  # fmt: skip
        for key in (key for key in others if getattr(top, key)):
            self.problem((key,), "does not go with output: adapter, which merges adapters alone")
        if self.modules:
            self.problem(("modules",), "does not go with output: adapter; give filters")
        if chosen is not None and chosen.needs:
            told = f"is adapter, and {chosen.name} reads what layers of whole models are given"
            self.problem(("output",), told)

    def _check_search(self, top: RecipeSection) -> None:
        from sigmerge.recipe.space import SPACES

        if top.merge_method not in SPACES:
            self.problem(
                ("search",),
                f"merge_method: {top.merge_method} cannot be searched; the search knows "
                f"{', '.join(SPACES)}",
            )

    def _check_repair(self, repair: RepairSection, names: Sequence[str]) -> None:
        from sigmerge.recipe.scored import CalibrateSection

        calibrated = repair.calibration
        if isinstance(calibrated, CalibrateSection):  # what else was said is reported already
            for told in calibrated.aim.problems(names):
                self.problem(("repair", "calibrate"), told)
        for name in repair.shares or ():
            if name not in names:
                self.problem(("repair", "shares"), unknown("expert", name, names))
        if repair.probe is not None:
            probe = self.folder / repair.probe
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


def _seeded(repair: RepairSection | None, seed: int) -> RepairSection | None:
    """A repair that names no seed of its own draws from the recipe's."""
    if repair is None or "seed" in repair.model_fields_set:
        return repair
    return repair.model_copy(update={"seed": seed})
