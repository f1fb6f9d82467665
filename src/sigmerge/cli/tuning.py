"""The command that tunes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import click

from sigmerge.cli import show
from sigmerge.cli.app import examples
from sigmerge.cli.declared import Argument, Option
from sigmerge.cli.flags import (
    PLACED,
    PUSHED,
    READ,
    WORKING,
    WRITTEN,
    Flags,
    OutFolder,
    command,
    recipe_file,
)

RecipeOrPool = Annotated[
    Path,
    Argument(
        callback=recipe_file, help="YAML recipe, or a folder with reference/ and the experts."
    ),
]


@command(
    *WRITTEN, *PUSHED, "seed", "strict", *READ, *PLACED, *WORKING,
    epilog=examples(
        "sigmerge tune recipe.yaml tuned/ --calls 24",
        "sigmerge tune pool/ tuned/ --floor safety=0.95",
        "sigmerge tune recipe.yaml tuned/ --push user/strongest --private",
        "sigmerge merge tuned/winner/sigmerge/recipe.yaml again/",
    ),
)  # fmt: skip
def tune(
    recipe: RecipeOrPool,
    out: OutFolder,
    flags: Flags,
    calls: Annotated[
        int | None, Option("--calls", help="Evaluation calls in all; default 24.")
    ] = None,
    anchor: Annotated[
        list[str] | None, Option("--anchor", help="Operator to tune; repeatable.")
    ] = None,
    method: Annotated[
        Literal["guided", "random", "merge3", "adamerging"] | None,
        Option("--method", help="guided, or one to compare with."),
    ] = None,
    objective: Annotated[
        Literal["mean", "worst", "weighted"] | None,
        Option("--objective", help="Of the domains' scores; worst: the largest deficit."),
    ] = None,
    weight: Annotated[
        list[str] | None, Option("--weight", help="DOMAIN=NUMBER, for weighted; repeatable.")
    ] = None,
    floor: Annotated[
        list[str] | None,
        Option("--floor", help="DOMAIN=FRACTION of its expert to keep; repeatable."),
    ] = None,
) -> None:
    """Find the strongest merge of a pool in a few evaluation calls.

    Anchors are guided by the domains' deficits, the best is repaired. Options go before the
    recipe's tune: section. Interrupted, the same command replays what was evaluated and goes on.
    """
    from sigmerge.jobs.tune import TuneJob, pool_recipe
    from sigmerge.jobs.work_folder import WINNER
    from sigmerge.recipe.scored import TuneSection

    loaded = (
        pool_recipe(recipe, flags.seed) if recipe.is_dir() else flags.load(recipe, weights=False)
    )
    settings = (loaded.tune or TuneSection()).changed(
        calls=calls, anchors=anchor, method=method, objective=objective,
        weights=_numbers("--weight", weight), floors=_numbers("--floor", floor),
    )  # fmt: skip
    job_of = flags.over_hub(loaded, lambda one, how: TuneJob(one, out, how, settings), out / WINNER)
    flags.emit_made(flags.run(job_of, goes_on=True), show.tune_lines)


def _numbers(flag: str, given: Sequence[str] | None) -> dict[str, float] | None:
    if given is None:
        return None
    found = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            raise click.BadParameter(f"{flag} {text}: expected DOMAIN=NUMBER") from None
    return found
