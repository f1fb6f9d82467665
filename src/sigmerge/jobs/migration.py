"""Differences between mergekit 0.1.5 and sigmerge for a mergekit file: lines, and a sample."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.adapter_folders import home_of, split_adapter
from sigmerge.checkpoints.companions import chat_template_of
from sigmerge.checkpoints.folder import Checkpoint, open_checkpoint
from sigmerge.checkpoints.pool import open_members
from sigmerge.errors import RecipeError, SigmergeWarning
from sigmerge.files.yaml_documents import Place, Yaml, decoded, parse_yaml
from sigmerge.jobs.dense import plan_dense
from sigmerge.jobs.emulated import DRAWN
from sigmerge.jobs.foreign import Foreign, foreign_file
from sigmerge.jobs.merge import anchor_and_repair, check_scores
from sigmerge.jobs.options import Options
from sigmerge.jobs.sampled import Sampled, sample, why_not
from sigmerge.operators.table import MERGEKIT
from sigmerge.recipe.documents import named_documents, several, standing_in, with_folders
from sigmerge.recipe.mixtures import experts_apart
from sigmerge.recipe.parser import load_recipe
from sigmerge.recipe.record import OWN_KEYS, Recipe

CUT = ("ties", "breadcrumbs", "breadcrumbs_ties", "sce")
SPACED = {
    "llama3": "mergekit's adds a line break after every turn, which Llama 3's does not have",
    "exaone": "mergekit's adds indents and line breaks, which EXAONE's does not have",
    "alpaca": "mergekit's has no line break before the last response, and two before the first "
    "instruction if no system message is given",
}
"""Chat templates that give other text than mergekit's, which has spaces of its layout in it."""


@dataclass(frozen=True)
class Change:
    """Something that will differ, and the line and the key that it comes from."""

    line: int | None
    key: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.key}: {self.text}" if self.line else self.text


@dataclass(frozen=True)
class Migration:
    """What differs in order of lines, and how many entries of a sample; or why there is none.

    `other` describes a file of another of mergekit's commands.
    """

    changes: tuple[Change, ...] = ()
    samples: tuple[Sampled, ...] = ()
    notes: tuple[str, ...] = ()
    other: Foreign | None = None


def migration(file: Path, allow_pickle: bool = False, entries: int = 0) -> Migration:
    """What differs from mergekit, or the error that `merge` would raise.

    Of a file of several recipes, that of each, under its name. So many `entries` of some tensors
    are merged by both arithmetics.
    """
    if (other := foreign_file(file)) is not None:
        return Migration(other=other)
    told = _Told(allow_pickle, entries)
    if found := several(file):
        documents, beside = named_documents(file), file.expanduser().resolve().parent
        with standing_in(found) as made:
            for name, given in found.items():  # each after those that it needs
                recipe = load_recipe(with_folders(given, made), folder=beside, weights=False)
                told.recipe(recipe, made.values(), *documents[name], name)
                if text := recipe.chat_template or chat_template_of(recipe.home):
                    (made[name] / "chat_template.jinja").write_text(text, encoding="utf-8")
    else:
        text = decoded(file, "a recipe in YAML", RecipeError)
        told.recipe(load_recipe(file, weights=False), (), parse_yaml(text, str(file), RecipeError))
    ordered = sorted(told.changes, key=lambda change: change.line or 1 << 30)
    return Migration(tuple(ordered), tuple(told.samples), tuple(told.notes))


class _Told:
    """What was found about recipes, one after another."""

    def __init__(self, allow_pickle: bool, entries: int) -> None:
        self._allow_pickle, self._entries = allow_pickle, entries
        self.changes: list[Change] = []
        self.samples: list[Sampled] = []
        self.notes: list[str] = []

    def recipe(
        self,
        recipe: Recipe,
        made: Collection[Path],
        written: Yaml,
        above: int = 0,
        name: str = "",
    ) -> None:
        members = _members(recipe, made, self._allow_pickle)
        self.changes += _changes(recipe, members, written, above, name)
        if not self._entries or recipe.method not in MERGEKIT or recipe.search or recipe.guide:
            return
        why = "other recipes of the file make its models"
        if not any(folder in made for folder in recipe.inputs):
            with warnings.catch_warnings():  # they were said above
                warnings.simplefilter("ignore", SigmergeWarning)
                job = plan_dense(recipe, Options(allow_pickle=self._allow_pickle))
            if (found := why_not(job, written.value)) is None:
                self.samples.append(sample(name, job, written.value, self._entries))
                return
            why = found
        self.notes.append(f"{name}{': ' if name else ''}no tensor was sampled: {why}")


def _members(recipe: Recipe, made: Collection[Path], allow_pickle: bool) -> list[Checkpoint]:
    """The models that are merged, but for those that other recipes make; or why `merge` refuses."""
    if not any(folder in made for folder in recipe.inputs):
        options = Options(allow_pickle=allow_pickle)
        check_scores(recipe, options)
        anchor_and_repair(recipe, options)
    there = {name: path for name, path in recipe.members.items() if home_of(path) not in made}
    return list(open_members(there, allow_pickle).values())


def _changes(
    recipe: Recipe,
    members: Sequence[Checkpoint],
    written: Yaml,
    above: int = 0,
    name: str = "",
) -> list[Change]:
    """Those of one recipe, which has so many lines above it, and a name among several."""
    data: Mapping[str, Any] = written.value
    places = [
        *_ours(data),
        *_numbers(recipe, data),
        *_weights(recipe),
        *_models(recipe, members, data),
        *experts_apart(recipe.method, members, data),
        *_vocabulary(data),
        *_template(data),
    ]
    named = [name] if name else []
    changes = [
        Change(_line(place, written.lines, above), ".".join(map(str, (*named, *place))), text)
        for place, text in places
    ]
    return changes + [Change(None, "", ": ".join([*named, note])) for note in recipe.notes]


def _line(place: Place, lines: Mapping[Place, int], above: int) -> int | None:
    known = (lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in lines)
    line = next(known, None)
    return line and line + above


def _ours(data: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    for key in data:
        if key in OWN_KEYS:
            yield (key,), "is a key of sigmerge; mergekit passes over it"
    method = str(data.get("merge_method"))
    if method not in MERGEKIT:
        yield ("merge_method",), f"mergekit does not have {method}"


def _numbers(recipe: Recipe, data: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    method = recipe.method
    if method in DRAWN:
        yield (
            ("merge_method",),
            "entries are dropped by other draws: mergekit's come from torch's generator, and are "
            "the same again only with --random-seed; here seed: decides them, 0 by default",
        )
    if method in CUT:
        yield (
            ("merge_method",),
            "where the cut falls among entries of equal size, the first ones are kept; mergekit's "
            "sort leaves that open",
        )
    if method == "arcee_fusion":
        yield (
            ("merge_method",),
            "quantiles are exact; mergekit samples tensors of more than a million entries",
        )
    dtype = str(data.get("dtype") or "").removeprefix("torch.")
    if dtype in ("bfloat16", "float16"):
        yield (
            ("dtype",),
            f"arithmetic is float32, rounded once to {data.get('out_dtype') or dtype}; mergekit "
            f"computes in {dtype}; where an entry is kept by its size, other entries may stay",
        )
    elif not dtype:
        yield (
            ("merge_method",),
            "without dtype: mergekit computes in the type of the models; here it is float32, "
            "rounded once to that type",
        )


def _weights(recipe: Recipe) -> Iterator[tuple[Place, str]]:
    """Models without a weight, where mergekit needs one."""
    options = recipe.operator.parameters if recipe.operator else ()
    if recipe.method not in MERGEKIT or "weight" not in {option.name for option in options}:
        return
    if without := list(dict.fromkeys(_without_weight(recipe))):
        yield (
            ("merge_method",),
            f"{', '.join(without)} without a weight: 1.0 is taken; mergekit stops there",
        )


def _without_weight(recipe: Recipe) -> Iterator[str]:
    for piece in recipe.slices:
        shared = [piece.parameters, recipe.modules.get(piece.module, {}), recipe.parameters]
        for source in piece.sources:
            if source.model != piece.base and not _weighted(source.parameters, *shared):
                yield source.model
    for model in recipe.models if not recipe.slices else ():
        for module, own in (model.parts or {"": model.parameters}).items():
            if not _weighted(own, recipe.modules.get(module, {}), recipe.parameters):
                yield model.name


def _weighted(*given: Mapping[str, Any]) -> bool:
    return any("weight" in parameters for parameters in given)


def _models(
    recipe: Recipe, members: Sequence[Checkpoint], data: Mapping[str, Any]
) -> Iterator[tuple[Place, str]]:
    keys = ("models", "slices", "output_slices", "modules", "base_model")
    listed = (next(key for key in keys if key in data),)
    if any(split_adapter(path)[1] for path in recipe.members.values()):
        yield (
            listed,
            "adapters are added in float32 where they are read; mergekit stores the model with its "
            "adapter first, rounded to the model's type",
        )
    for member in filter(_parted, members):
        yield (
            listed,
            f"{member.title} parts the head from the embedding, which are one tensor in "
            f"{member.path.name}; in mergekit's result they stay tied",
        )
    plain = [member for member in members if member.adapter is None]
    ties = plain and (plain[0].tied or plain[0].config.get("tie_word_embeddings"))
    if ties and not all(member.tied for member in plain):
        yield (
            listed,
            "some models have a head that differs from the embedding, so config.json says "
            "tie_word_embeddings: false; mergekit keeps true",
        )
    counts: dict[str, set[int]] = {}
    for piece in recipe.slices:
        counts.setdefault(piece.module, set()).add(len(piece.sources))
    for module in (module for module, some in counts.items() if len(some) > 1):
        yield (
            ("modules", module, "slices") if module else ("slices",),
            "what lies behind the layers comes from the last slice with all of its sources; "
            "mergekit drops some where it has more than the first",
        )
    if "output_slices" in data:
        yield ("output_slices",), "is read as slices; mergekit 0.1.5 does not know it"
    if recipe.reference is None and (recipe.slices or len(recipe.models) > 1):
        yield (
            ("merge_method",),
            "without base_model: configuration and tokenizer are the first model's; mergekit takes "
            "any of them, another one from run to run",
        )


def _parted(member: Checkpoint) -> bool:
    """Whether a model has a head of its own only since its adapter brings one."""
    if member.adapter is None or member.head is None:
        return False
    model = open_checkpoint(member.path, allow_pickle=True)  # it was opened before
    return model.tied


def _template(data: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    if told := SPACED.get(str(data.get("chat_template"))):
        yield ("chat_template",), told


def _vocabulary(data: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    section = data.get("tokenizer")
    wanted = data.get("tokenizer_source")
    if isinstance(section, dict):
        wanted = section.get("source", "union")
    if wanted is None:
        return
    place = ("tokenizer",) if isinstance(section, dict) else ("tokenizer_source",)
    yield (
        place,
        "rows behind the last token stay if all models have the same tokens; mergekit cuts them "
        "off",
    )
    if wanted in ("union", "base"):
        yield (
            place,
            "a token of base_model's tokenizer that has no row gets one; mergekit takes it out of "
            "the tokenizer",
        )
    else:
        yield place, "config.json has the special tokens of this model; mergekit keeps the base's"
    if wanted == "union":
        yield place, "new tokens come in the order of models and ids; mergekit's order changes"
