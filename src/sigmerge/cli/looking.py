"""Commands that look at checkpoints before anything is merged, and write a first recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from sigmerge.cli.app import examples
from sigmerge.cli.declared import Argument, Option
from sigmerge.cli.flags import Flags, command
from sigmerge.messages import counted, size

PRINTED = 12
"""Tensors that are listed; --json has all."""

Model = Annotated[Path, Argument(help="Checkpoint folder, or model+adapter.")]


@command(
    "overwrite",
    epilog=examples(
        "sigmerge init pool/ recipe.yaml", "sigmerge init pool/ ties.yaml --method ties"
    ),
)
def init(
    pool: Annotated[Path, Argument(help="Folder with reference/ and one folder per expert.")],
    flags: Flags,
    recipe: Annotated[Path, Argument(help="Recipe to write.")] = Path("recipe.yaml"),
    method: Annotated[str, Option(help="Merge method.")] = "task_arithmetic",
) -> None:
    """Write a recipe for a pool, to start from."""
    from sigmerge.jobs.inspect import write_recipe

    text = write_recipe(pool, recipe, method, flags.overwrite)
    following = f"next: sigmerge merge {recipe} merged/ --dry-run"
    lines = [f"{recipe}:", text.rstrip(), following]
    flags.emit({"recipe": str(recipe), "text": text}, lambda _: iter(lines))


@command("allow_pickle", epilog=examples("sigmerge inspect pool/math", "sigmerge inspect pool/"))
def inspect(
    checkpoints: Annotated[
        list[Path], Argument(help="Checkpoint folders, model+adapter, or a pool's folder.")
    ],
    flags: Flags,
) -> None:
    """Print what checkpoints are: architecture, layers, sizes, types. Reads headers only.

    Of several, what their configurations compute otherwise than the first's.
    """
    from sigmerge.jobs.inspect import inspect_checkpoints
    from sigmerge.jobs.options import Options

    found = inspect_checkpoints(checkpoints, Options(allow_pickle=flags.allow_pickle))
    flags.emit(found, _inspected_lines)


def _inspected_lines(found: Any) -> Iterator[str]:
    for each in (found, *found.others):
        yield from _checkpoint_lines(each)
    yield from (f"warning: {text}" for text in found.warnings)


def _checkpoint_lines(found: Any) -> Iterator[str]:
    yield f"{found.folder}: {found.architecture or 'no architecture is named'}"
    stack = f"{counted(found.layers, 'layer')} ({found.prefix}0 …)" if found.layers else "no layers"
    yield f"  {stack}, {counted(found.tensors, 'tensor')}"
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in found.dtypes.items())
    stored = f"{size(found.bytes)} in {counted(found.files, 'file')}"
    yield f"  {found.parameters:,} parameters ({kinds}), {stored}"
    if found.form:
        yield f"  stored as {found.form}; dequantised while it is read"
    if found.embedding:
        head = "the head is the embedding" if found.tied else "a head of its own"
        yield f"  embedding of {' × '.join(map(str, found.embedding))}, {head}"
    tokens = "no tokenizer.json" if found.tokens is None else f"{found.tokens:,} tokens"
    yield f"  tokenizer: {tokens}"
    if found.settings:
        yield "  config: " + ", ".join(f"{key} {value}" for key, value in found.settings.items())


@command("threads", "allow_pickle", epilog=examples("sigmerge diff pool/reference pool/math"))
def diff(one: Model, other: Model, flags: Flags) -> None:
    """Print how far two checkpoints are apart, layer by layer. Reads all weights."""
    from sigmerge.jobs.inspect import DiffJob

    flags.emit(flags.run(lambda how: DiffJob(one, other, how)), _diff_lines)


def _diff_lines(found: Any) -> Iterator[str]:
    width = max([len(part.name) for part in found.parts], default=5)
    yield f"{'':{width}}   coordinates   changed   distance   of the norm"
    for part in found.parts:
        changed = 100 * part.changed / part.coordinates if part.coordinates else 0
        relative = f"{100 * part.distance / part.norm:11.3f} %" if part.norm else f"{'–':>13}"
        yield (
            f"{part.name:{width}}  {part.coordinates:12,}  {changed:6.2f} %  {part.distance:9.4g} "
            f"{relative}"
        )
    others = {**found.only_in_one, **found.only_in_other}
    for name in list(others)[:PRINTED]:
        shapes = [list(each[name]) if name in each else "none"
                  for each in (found.only_in_one, found.only_in_other)]  # fmt: skip
        yield f"{name}: {shapes[0]} and {shapes[1]}"
    if len(others) > PRINTED:
        yield f"and {len(others) - PRINTED} more tensors that only one has, or of other shapes"
    for name in found.unlike:
        yield f"{name}: other values"
    for key, (before, after) in found.config.items():
        yield f"config.json: {key}: {before} and {after}"
