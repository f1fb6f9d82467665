"""Captures: statistics of each expert on its own exemplars, for operators that need them.

They are kept beside the pool, or in a folder that the recipe or the command names. Their keys name
contents only, so that statistics made on another machine are found under the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

from sigmerge import kept
from sigmerge.checkpoints.companions import tokenizer_files
from sigmerge.checkpoints.inputs import hashed_again
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.engine.machine import LIBRARIES
from sigmerge.errors import OutputError, RecipeError
from sigmerge.files.digests import file_digests
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import open_merge_pool
from sigmerge.jobs.steps import CaptureStep, Description
from sigmerge.kept import Derivation, KeptEntry
from sigmerge.messages import did_you_mean
from sigmerge.probing.capture import TOKENS_HELD
from sigmerge.probing.captures import Capture
from sigmerge.probing.exemplars import check_same_vocabulary, read_exemplars
from sigmerge.recipe import Recipe
from sigmerge.results import Captured, Captures


@dataclass(frozen=True)
class CaptureJob:
    """The captures of some experts, or all: what is there already is not measured again."""

    recipe: Recipe
    options: Options
    experts: Sequence[str] = ()
    out: Path | None = None

    def describe(self) -> Description:
        planned, wanted = self._plan()
        entries = {name: kept.look(one) for name, one in wanted.items()}
        for one in planned:
            if entries[one.expert] is None:
                one.tokens()
        rows = self._rows(planned, wanted, entries)
        steps = [
            CaptureStep(
                expert=row.expert,
                kind=row.kind,
                exemplars=row.exemplars,
                key=row.key,
                folder=row.folder,
                state=row.state,
                peak_memory_bytes=row.peak_memory_bytes if row.state == "to do" else 0,
                notes=hashed_again([one.checkpoint]),
            )
            for one, row in zip(planned, rows, strict=True)
        ]
        return Description(tuple(steps), self.options.threads)

    def run(self) -> Captures:
        planned, wanted = self._plan()
        if place := self.out or _named_folder(self.recipe):
            _check_folder(place)
        return self._rows(planned, wanted, run_captures(planned, wanted, self.options))

    def _plan(self) -> tuple[list[Capture], dict[str, Derivation]]:
        recipe = self.recipe
        if recipe.operator is None or not recipe.operator.needs:
            raise RecipeError(
                f"merge_method: {recipe.method} reads no exemplars; nothing to capture."
            )
        if unknown := [name for name in self.experts if name not in recipe.experts]:
            hint = did_you_mean(unknown[0], recipe.experts)
            raise RecipeError(f"No expert is called {unknown[0]!r}; {hint}")
        pool, _ = open_merge_pool(recipe, self.options)
        planned = [
            one
            for one in plan_captures(recipe, pool, self.options)
            if not self.experts or one.expert in self.experts
        ]
        return planned, derivations(planned, recipe, pool, self.options, self.out)

    def _rows(
        self,
        planned: Sequence[Capture],
        wanted: Mapping[str, Derivation],
        entries: Mapping[str, KeptEntry | None],
    ) -> Captures:
        def row(one: Capture) -> Captured:
            entry = entries[one.expert]
            state = "to do" if entry is None else "there already" if entry.kept else "captured"
            whole = entry is not None and not entry.value["resumed"]
            return Captured(
                expert=one.expert,
                kind=one.kind,
                exemplars=len(one.exemplars),
                peak_memory_bytes=peak_memory(one, self.options.threads),
                key=key_of(wanted[one.expert], entry),
                folder=str(entry.folder) if entry else "",
                state=state,
                seconds=entry.seconds if entry and whole else None,
            )

        return Captures(map(row, planned))


def plan_captures(recipe: Recipe, pool: PoolMembers, options: Options) -> list[Capture]:
    """Every check that needs no model: exemplars can be read, tokenizers agree."""
    assert recipe.operator is not None
    planned, problems = [], []
    for model in recipe.models:
        checkpoint = pool.experts[model.name]
        home = checkpoint.path if tokenizer_files(checkpoint.path) else recipe.tokenizer
        if home is None or not tokenizer_files(home):
            problems.append(f"{model.name}: no tokenizer in {checkpoint.path} or base_model")
            continue
        assert model.exemplars is not None
        try:
            shown = tuple(read_exemplars(model.exemplars, recipe.capture.limit))
        except RecipeError as error:
            problems.append(f"{model.name}: {error}")
            continue
        how = recipe.capture
        planned.append(
            Capture(
                expert=model.name,
                kind=recipe.operator.needs,
                checkpoint=checkpoint,
                tokenizer=home,
                file=model.exemplars,
                exemplars=shown,
                limit=how.limit,
                max_length=how.max_length,
                device=how.device,
                trust=options.trust_remote_code,
                skip_bos=how.skip_bos,
                scale=how.scale,
                reference=pool.reference if how.scale != 1 else None,
                labels=how.labels,
                seed=recipe.seed,
            )
        )
    if problems:
        raise RecipeError("The experts cannot be shown their exemplars:", problems)
    check_same_vocabulary({c.expert: c.tokenizer for c in planned}, options.trust_remote_code)
    return planned


def derivations(
    planned: Sequence[Capture],
    recipe: Recipe,
    pool: PoolMembers,
    options: Options,
    out: Path | None = None,
) -> dict[str, Derivation]:
    """Each expert's statistics: kept in `out`, in the recipe's folder, or beside the pool."""
    folder = out or _named_folder(recipe)
    near = folder / "member" if folder else pool.layout.path
    file_digests([file for one in planned for file in one.checkpoint.files], options.threads)
    return {one.expert: _derivation(one, near, options) for one in planned}


def _derivation(planned: Capture, near: Path | None, options: Options) -> Derivation:
    def progress(done: int, total: int) -> None:
        options.progress(f"capturing {planned.expert}", done, total)

    return planned.derivation(near, options.threads, progress)


def _named_folder(recipe: Recipe) -> Path | None:
    return recipe.folder / recipe.capture.folder if recipe.capture.folder else None


def _check_folder(folder: Path) -> None:
    """Statistics that are to go into a folder do not go elsewhere unasked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{folder}: statistics cannot be kept there ({error.strerror}). Name another folder "
            "(capture: {folder: …} in the recipe)."
        ) from None


def key_of(wanted: Derivation, entry: KeptEntry | None) -> str:
    """What names statistics: an outdated entry that is used has a key of its own."""
    return entry.folder.name.removesuffix(".partial") if entry else wanted.full


def peak_memory(planned: Capture, threads: int) -> int:
    """A bound on resident memory, exemplars counted at their greatest length.

    Hidden states of all exemplars (of features at one boundary between blocks, of gradients at all
    of them), and the larger of one block and what lies outside: weights in float32, and Grams in
    float64 with what they are made of, or sums and a set of gradients for every thread.
    """
    blocks: dict[int | None, list[tuple[int, ...]]] = {None: []}
    for name, tensor in planned.checkpoint.tensors.items():
        blocks.setdefault(planned.checkpoint.stack.block_of(name), []).append(tensor.shape)
    around = blocks.pop(None)
    outside, length = 4 * sum(map(prod, around)), planned.longest
    width = min((shape[-1] for shape in around if len(shape) == 2), default=0)
    states = 4 * len(planned.exemplars) * length * width
    if planned.kind == "fisher":
        largest = max([4 * sum(map(prod, shapes)) for shapes in blocks.values()] + [outside])
        return LIBRARIES + (len(blocks) + 3) * states + (2 + threads) * largest
    most = 0
    for shapes in blocks.values():
        inputs = [shape[-1] for shape in shapes if len(shape) == 2]
        for count, *sides in (shape for shape in shapes if len(shape) == 3):
            inputs += count * [max(sides)] if min(sides) > 1 else []  # a stack, (in, out) or not
        held = (TOKENS_HELD + length) * (4 * sum(inputs) + 8 * max(inputs, default=0))
        weights = 4 * sum(map(prod, shapes))
        most = max(most, weights + 12 * sum(width**2 for width in inputs) + held)
    return LIBRARIES + 3 * states + max(most, outside)


def ignored_keys(recipe: Recipe) -> list[str]:
    """What the `capture:` section says and the operator's kind of capture does not read."""
    assert recipe.operator is not None
    others = {"features": ("labels",), "fisher": ("skip_bos", "scale")}[recipe.operator.needs]
    return [
        f"capture.{key}: {recipe.method} does not read it"
        for key in others
        if key in recipe.capture.model_fields_set
    ]


def run_captures(
    planned: Sequence[Capture], wanted: Mapping[str, Derivation], options: Options
) -> dict[str, KeptEntry]:
    """All experts' statistics; what is not kept yet is captured now."""
    if (cluster := options.cluster) is not None:
        missing = [
            (one, wanted[one.expert].near)
            for one in planned
            if kept.look(wanted[one.expert]) is None
        ]
        task = partial(_captured, options.in_a_task)
        done = cluster.map(task, missing, lambda pair: f"capture {pair[0].expert}")
        for number, _ in enumerate(done, start=1):
            options.progress("capturing experts", number, len(missing))
        own = {one.expert for one, _ in missing}
        found = {name: kept.get(one) for name, one in wanted.items()}
        return {n: replace(e, kept=e.kept and n not in own) for n, e in found.items()}
    return {name: kept.get(one) for name, one in wanted.items()}


def _captured(options: Options, pair: tuple[Capture, Path | None]) -> None:
    """One capture in a task of a cluster, which keeps it where this machine finds it."""
    kept.get(_derivation(*pair, options))
