"""Captures: statistics of each expert on its own exemplars, for the operators that need them.

One folder an expert, named by content (weights, exemplars, tokenizer, settings), so that statistics
made on another machine are the same folder. Experts and exemplars belong together by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.companions import tokenizer_files
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.pool import Pool
from sigmerge.checkpoints.statistics import DONE, damage, discard_damaged, finish, is_finished
from sigmerge.engine.machine import LIBRARIES, Meter
from sigmerge.errors import OutputError, PoolError, RecipeError
from sigmerge.files.cache import beside
from sigmerge.files.digests import file_digests
from sigmerge.files.documents import content_key
from sigmerge.files.identity import changed
from sigmerge.files.regular import remove
from sigmerge.jobs.options import Description, Options, Step
from sigmerge.jobs.pools import open_merge_pool, weight_digests
from sigmerge.probing.capture import TOKENS_HELD
from sigmerge.probing.exemplars import (
    Exemplar,
    Tokens,
    check_same_vocabulary,
    read_exemplars,
    tokenize,
)
from sigmerge.probing.memory import free_cached, in_memory
from sigmerge.recipe import Recipe
from sigmerge.results import Captured, Captures
from sigmerge.words import did_you_mean

STATISTICS_FORMAT = 3


@dataclass(frozen=True)
class Capture:
    """What one expert is shown; `kind` is what the operator needs, features or fisher."""

    expert: str
    kind: str
    checkpoint: Checkpoint
    tokenizer: Path
    exemplars: tuple[Exemplar, ...]


@dataclass(frozen=True)
class CaptureJob:
    """The captures of some experts, or all: what is there already is not measured again."""

    recipe: Recipe
    options: Options
    experts: Sequence[str] = ()
    out: Path | None = None

    def describe(self) -> Description:
        _, planned, places, states = self._plan()
        for one in planned:
            if not is_finished(places[one.expert]):
                _tokens(one, self.recipe, self.options.trust_remote_code)
        steps = [
            Step(
                f"capture {row.expert}",
                row.as_json(),
                peak_memory_bytes=row.peak_memory_bytes if "to do" in row.state else 0,
            )
            for row in self._rows(planned, places, states)
        ]
        return Description(tuple(steps), self.options.threads)

    def run(self) -> Captures:
        pool, planned, places, states = self._plan()
        run_captures(planned, self.recipe, pool, self.options, places)
        done = {name: state.replace("to do", "captured") for name, state in states.items()}
        return self._rows(planned, places, done)

    def _plan(self) -> tuple[Pool, list[Capture], dict[str, Path], dict[str, str]]:
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
        places = folders(planned, recipe, pool, self.options, self.out)
        states = {
            name: "there already" if is_finished(place) else "to do"
            for name, place in places.items()
        }
        states |= {name: f"to do again: {why}" for name, why in damaged(places).items()}
        return pool, planned, places, states

    def _rows(
        self, planned: Sequence[Capture], places: Mapping[str, Path], states: Mapping[str, str]
    ) -> Captures:
        return Captures(
            Captured(
                expert=one.expert,
                kind=one.kind,
                exemplars=len(one.exemplars),
                peak_memory_bytes=peak_memory(one, self.recipe, self.options.threads),
                folder=str(places[one.expert]),
                state=states[one.expert],
            )
            for one in planned
        )


def plan_captures(recipe: Recipe, pool: Pool, options: Options) -> list[Capture]:
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
        planned.append(Capture(model.name, recipe.operator.needs, checkpoint, home, shown))
    if problems:
        raise RecipeError("The experts cannot be shown their exemplars:", problems)
    check_same_vocabulary({c.expert: c.tokenizer for c in planned}, options.trust_remote_code)
    return planned


def folders(
    planned: Sequence[Capture],
    recipe: Recipe,
    pool: Pool,
    options: Options,
    out: Path | None = None,
) -> dict[str, Path]:
    """Where each expert's statistics lie or go: `out`, the recipe's folder, or beside the pool."""
    wanted = out or (recipe.folder / recipe.capture.folder if recipe.capture.folder else None)
    names = {c.expert: _name(c, recipe, pool, options) for c in planned}
    return {
        expert: wanted / name if wanted else beside(pool.layout.path, name)
        for expert, name in names.items()
    }


def _name(planned: Capture, recipe: Recipe, pool: Pool, options: Options) -> str:
    """By kind, and by content of all that statistics depend on; no path, so the same everywhere."""
    settings = recipe.capture
    files = [planned.checkpoint.path / "config.json", *tokenizer_files(planned.tokenizer)]
    digests = file_digests(files)
    content: list[Any] = [
        STATISTICS_FORMAT,
        planned.kind,
        sorted(weight_digests(planned.checkpoint, options)),
        [f"{file.name} {digests[file]}" for file in files],
        [[exemplar.prompt, exemplar.response] for exemplar in planned.exemplars],
        settings.max_length,
        settings.device,
    ]
    if planned.kind == "features":
        content += [settings.skip_bos, settings.scale]
        if settings.scale != 1:
            assert pool.reference is not None
            content.append(sorted(weight_digests(pool.reference, options)))
    else:
        content += [settings.labels, recipe.seed if settings.labels == "sampled" else None]
    return f"{planned.kind}-{content_key(content)}"


def peak_memory(planned: Capture, recipe: Recipe, threads: int) -> int:
    """A bound on resident memory, exemplars counted at their greatest length.

    Hidden states of all exemplars (of features at one boundary between blocks, of gradients at all
    of them), and the larger of one block and what lies outside: weights in float32, and Grams in
    float64 with what they are made of, or sums and a set of gradients for every thread.
    """
    blocks: dict[int | None, list[tuple[int, ...]]] = {None: []}
    for name, tensor in planned.checkpoint.tensors.items():
        blocks.setdefault(planned.checkpoint.stack.block_of(name), []).append(tensor.shape)
    around = blocks.pop(None)
    outside, length = 4 * sum(map(prod, around)), longest(planned, recipe)
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


def _versions() -> dict[str, str]:
    return {library: version(library) for library in ("torch", "transformers")}


def missing(
    planned: Sequence[Capture], recipe: Recipe, pool: Pool, options: Options
) -> list[Capture]:
    """Captures that a merge would have to make first."""
    places = folders(planned, recipe, pool, options)
    return [one for one in planned if not is_finished(places[one.expert])]


def ignored_keys(recipe: Recipe) -> list[str]:
    """What the `capture:` section says and the operator's kind of capture does not read."""
    assert recipe.operator is not None
    others = {"features": ("labels",), "fisher": ("skip_bos", "scale")}[recipe.operator.needs]
    return [
        f"capture.{key}: {recipe.method} does not read it"
        for key in others
        if key in recipe.capture.model_fields_set
    ]


def damaged(places: Mapping[str, Path]) -> dict[str, str]:
    """Experts whose capture was finished and is no longer what it was: why it is made again."""
    found = {expert: damage(place) for expert, place in places.items() if (place / DONE).exists()}
    return {expert: why for expert, why in found.items() if why}


def run_captures(
    planned: Sequence[Capture],
    recipe: Recipe,
    pool: Pool,
    options: Options,
    places: Mapping[str, Path] | None = None,
) -> dict[str, Path]:
    """The folders of all experts' statistics; what is not there yet is captured now."""
    places = places or folders(planned, recipe, pool, options)
    missing = [(one, places[one.expert]) for one in planned if not is_finished(places[one.expert])]
    if (cluster := options.cluster) is not None:
        task = partial(_capture_one, recipe, pool, options.in_a_task)
        done = cluster.map(task, missing, lambda pair: f"capture {pair[0].expert}")
        for number, _ in enumerate(done, start=1):
            options.progress("capturing experts", number, len(missing))
        return dict(places)
    for pair in missing:
        _capture_one(recipe, pool, options, pair)
    return dict(places)


def _capture_one(recipe: Recipe, pool: Pool, options: Options, pair: tuple[Capture, Path]) -> None:
    planned, place = pair
    _claim(place)
    about = _run(planned, recipe, pool, options, place)
    if place.name != _name(planned, recipe, pool, options):  # else they would be kept of another
        remove(place)
        raise changed(planned.checkpoint.place)
    finish(place, about)


def longest(planned: Capture, recipe: Recipe) -> int:
    """Tokens an exemplar is cut to: max_length, or fewer where the model has no more positions."""
    config = planned.checkpoint.config
    config = config.get("text_config") or config
    known = [config.get(key) for key in ("n_positions", "max_position_embeddings")]
    limits = [limit for limit in known if isinstance(limit, int) and limit > 0]
    return min([recipe.capture.max_length, *limits])


def _tokens(planned: Capture, recipe: Recipe, trust: bool) -> list[Tokens]:
    settings = recipe.capture
    fisher = planned.kind == "fisher"
    try:
        return tokenize(
            planned.tokenizer,
            planned.exemplars,
            longest(planned, recipe),
            answers=fisher and settings.labels == "data",
            skip_bos=not fisher and settings.skip_bos,
            trust=trust,
        )
    except RecipeError as error:
        raise RecipeError(f"{planned.expert}: {error}") from None


def _claim(folder: Path) -> None:
    """A folder that can be written, with nothing in it that a capture must not build on."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        discard_damaged(folder)
    except OSError as error:
        raise OutputError(
            f"{folder}: statistics cannot be kept there ({error.strerror}). Name another folder "
            "(capture: {folder: …} in the recipe)."
        ) from None


def _run(
    planned: Capture, recipe: Recipe, pool: Pool, options: Options, folder: Path
) -> dict[str, Any]:
    """Write the statistics; returns what is told about them."""
    settings, trust = recipe.capture, options.trust_remote_code
    meter, begun = Meter(), any(folder.iterdir())
    tokens = _tokens(planned, recipe, trust)
    about: dict[str, Any] = {"expert": planned.expert, "kind": planned.kind,
                             "exemplars": len(tokens),
                             "tokens": sum(len(row.ids) for row in tokens),
                             "device": settings.device, **_versions()}  # fmt: skip

    def progress(done: int, total: int) -> None:
        options.progress(f"capturing {planned.expert}", done, total)

    from sigmerge.probing.skeleton import reader

    how: dict[str, Any] = {
        "threads": options.threads,
        "device": settings.device,
        "trust": trust,
        "progress": progress,
    }
    where = f"{planned.checkpoint.place}: its capture"
    if planned.kind == "features":
        from sigmerge.probing.capture import capture_features

        reference = pool.reference if settings.scale != 1 else None
        read = reader(planned.checkpoint, reference, settings.scale)
        with in_memory(where):
            capture_features(
                planned.checkpoint, read, tokens, folder, skip_bos=settings.skip_bos, **how
            )
    elif planned.kind == "fisher":
        from sigmerge.probing.fisher import capture_fisher

        read = reader(planned.checkpoint)
        how |= {"labels": settings.labels, "seed": recipe.seed}
        with in_memory(where):
            about["norm"] = capture_fisher(planned.checkpoint, read, tokens, folder, **how)
    else:
        raise PoolError(f"{recipe.method} needs {planned.kind!r}, which nothing measures.")
    free_cached()
    # Of a capture that another run began, the whole time is not known.
    return about | {"seconds": None if begun else meter.wall_seconds}
