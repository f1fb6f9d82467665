"""The command line: verbs, printing, exit codes. No maths; nothing imported before its use."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sigmerge import show
from sigmerge.errors import SigmergeError

EXIT_CODES = """\b
Exit codes:
  0  done
  1  anything that has no number of its own
  2  the recipe, the options or the settings
  3  a checkpoint, or checkpoints that form no pool
  4  the output folder
  5  scores, suites and their data
  6  a library that is not installed
  130  interrupted; the same command goes on where it stopped
"""
RECIPE = """
\b
A recipe:
  merge_method: ties
  base_model: ./reference
  models:
    - {model: ./math,   name: math,   parameters: {weight: 1.0, density: 0.2}}
    - {model: ./coding, name: coding, parameters: {weight: 1.0, density: 0.2}}
  dtype: bfloat16
"""

app = typer.Typer(
    name="sigmerge",
    help="Merge fine-tuned checkpoints of one reference model, then repair the merge.",
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _examples(*commands: str) -> str:
    """An epilog that keeps its lines."""
    return "\n".join(["\b", "Examples:" if commands[1:] else "Example:", *commands]).replace(
        "\nsigmerge", "\n  sigmerge"
    )


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"sigmerge {version('sigmerge')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Say which version."),
    ] = False,
) -> None:
    pass


RecipeFile = Annotated[Path, typer.Argument(help="YAML recipe, in mergekit's dialect.")]
OutFolder = Annotated[Path, typer.Argument(help="New folder for the result.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")]
Shard = Annotated[str, typer.Option("--max-shard-size", help="Largest weight file, e.g. 5GB.")]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Worker threads; 0: all cores.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, say what would be done, write nothing.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Pickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Load pickled weights (weights-only).")
]
Nonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Let NaN and infinity in inputs pass.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Override the recipe's seed.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that checkpoints bring along.")
]


Variant = Annotated[
    str | None, typer.Option("--variant", help="An ablation or control, before the recipe's.")
]
CMin = Annotated[float | None, typer.Option("--c-min", help="Least capacity of a layer.")]
CMax = Annotated[float | None, typer.Option("--c-max", help="Largest capacity of a layer.")]
Scale = Annotated[
    str | None, typer.Option("--scale", help="Of the update: a number, or calibrated.")
]


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


CaptureDevice = Annotated[
    Device | None,
    typer.Option("--device", help="Where exemplars pass through experts; else as the recipe says."),
]


SuiteName = Annotated[
    str, typer.Option("--suite", help="mergebench, nano, or a suite's YAML file.")
]
DataFolder = Annotated[
    Path | None,
    typer.Option("--data", help="Folder with the benchmarks' files; default SIGMERGE_DATA."),
]
UseHub = Annotated[bool, typer.Option("--hub", help="Read what is not in --data from the hub.")]
Anchor = Annotated[
    Path | None, typer.Option("--anchor", help="Stored merge to look at, ours or another tool's.")
]


@app.command(
    epilog=_examples(
        "sigmerge merge recipe.yaml merged/ --dry-run", "sigmerge merge recipe.yaml merged/"
    )
    + RECIPE
)
def merge(
    recipe: RecipeFile,
    out: OutFolder,
    overwrite: Overwrite = False,
    max_shard_size: Shard = "5GB",
    threads: Threads = 0,
    dry_run: DryRun = False,
    seed: Seed = None,
    variant: Variant = None,
    c_min: CMin = None,
    c_max: CMax = None,
    scale: Scale = None,
    allow_pickle: Pickle = False,
    allow_nonfinite: Nonfinite = False,
    device: CaptureDevice = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Merge the checkpoints a recipe names into one new folder.

    A recipe with a repair: section is repaired too. Interrupted, the same command continues where
    it stopped and ends in the same bytes.
    """
    from sigmerge.checkpoints.writer import check_target
    from sigmerge.commands import merge as verb
    from sigmerge.commands.options import Options

    loaded = _recipe(recipe, seed, device, _repair(variant, c_min, c_max, scale))
    how = _how(threads, overwrite, allow_pickle, allow_nonfinite, trust_remote_code)
    how["max_shard_size"] = max_shard_size
    if dry_run and loaded.search:
        from sigmerge.commands.search import Settings, plan_search

        check_target(out, overwrite, loaded.inputs)
        job = plan_search(loaded, Settings.of(loaded), Options(**how))
        show.emit(job.describe(how["threads"]), as_json, show.search_plan_lines)
        return
    if dry_run and loaded.operator is None and loaded.repair:
        from sigmerge.commands.repair import describe

        show.emit(describe(loaded, out, Options(**how)), as_json, show.repair_plan_lines)
        return
    if dry_run:
        check_target(out, overwrite, loaded.inputs)
        plan = verb.plan_merge(loaded, Options(**how)).describe(how["threads"])
        show.emit(plan, as_json, show.plan_lines)
        return
    with show.progress(as_json) as progress:
        result = verb.merge(loaded, out, progress=progress, **how)
    show.emit(result, as_json, show.result_lines)


@app.command(
    epilog=_examples(
        "sigmerge capture recipe.yaml",
        "sigmerge capture recipe.yaml --expert math --out statistics/",
    )
)
def capture(
    recipe: RecipeFile,
    expert: Annotated[
        list[str] | None, typer.Option("--expert", help="Only this expert; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the statistics; else beside the pool.")
    ] = None,
    threads: Threads = 0,
    dry_run: DryRun = False,
    allow_pickle: Pickle = False,
    device: CaptureDevice = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure the statistics that the recipe's operator needs.

    Each expert is shown its own exemplars.
    `merge` does this by itself; alone it can be split over machines. What is there already is not
    measured again. Statistics made elsewhere are used when they lie beside the pool, or in the
    folder that the recipe's capture: section names.
    """
    from sigmerge.commands.capture import capture as verb

    with show.progress(as_json) as progress:
        how = _how(threads, False, allow_pickle, trust=trust_remote_code)
        how |= {"experts": expert or (), "out": out, "dry_run": dry_run, "progress": progress}
        result = verb(_recipe(recipe, None, device), **how)
    show.emit(result, as_json, show.capture_lines)


@app.command(epilog=_examples("sigmerge profile recipe.yaml"))
def profile(
    recipe: RecipeFile,
    threads: Threads = 0,
    allow_pickle: Pickle = False,
    allow_nonfinite: Nonfinite = False,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure how contested each layer is, and its capacity.

    Needs no anchor; computed once per pool and kept beside it.
    """
    from sigmerge.commands.profile import profile as verb

    with show.progress(as_json) as progress:
        how = _how(threads, False, allow_pickle, allow_nonfinite, trust_remote_code)
        result = verb(recipe, progress=progress, **how)
    show.emit(result, as_json, show.profile_lines)


@app.command(epilog=_examples("sigmerge deficits recipe.yaml --anchor merged/"))
def deficits(
    recipe: RecipeFile,
    anchor: Anchor = None,
    threads: Threads = 0,
    allow_pickle: Pickle = False,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure what an anchor lost per domain, and the shares."""
    from sigmerge.commands.repair import deficits as verb

    with show.progress(as_json) as progress:
        how = _how(threads, False, allow_pickle, trust=trust_remote_code)
        result = verb(recipe, anchor=anchor, progress=progress, **how)
    show.emit(result, as_json, show.deficit_lines)


@app.command(
    epilog=_examples(
        "sigmerge repair recipe.yaml repaired/ --anchor merged/",
        "sigmerge repair --plan repaired/sigmerge/plan.json again/",
    )
)
def repair(
    paths: Annotated[list[Path], typer.Argument(help="RECIPE OUT, or OUT alone with --plan.")],
    anchor: Anchor = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Make the repair of this plan.json again.")
    ] = None,
    overwrite: Overwrite = False,
    threads: Threads = 0,
    dry_run: DryRun = False,
    seed: Seed = None,
    variant: Variant = None,
    c_min: CMin = None,
    c_max: CMax = None,
    scale: Scale = None,
    allow_pickle: Pickle = False,
    allow_nonfinite: Nonfinite = False,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Give a stored merge back what it took from each domain.

    The anchor is a checkpoint that any tool made from the recipe's pool.
    """
    from sigmerge.commands import repair as verb
    from sigmerge.commands.options import Options

    if len(paths) != (1 if plan else 2):
        raise typer.BadParameter("give OUT alone with --plan, otherwise RECIPE and OUT")
    changes = _repair(variant, c_min, c_max, scale)
    if plan and (changes or seed is not None):
        raise typer.BadParameter("a plan is made again as it is; leave the other options out")
    how = _how(threads, overwrite, allow_pickle, allow_nonfinite, trust_remote_code)
    loaded: Any = None if plan else _recipe(paths[0], seed, None, changes)
    if dry_run:
        options = Options(**how)
        described = (
            verb.describe_replay(plan, paths[0], options, anchor)
            if plan
            else verb.describe(loaded, paths[1], options, anchor)
        )
        show.emit(described, as_json, show.repair_plan_lines)
        return
    with show.progress(as_json) as progress:
        how["progress"] = progress
        if plan:
            result = verb.replay(plan, paths[0], anchor=anchor, **how)
        else:
            result = verb.repair(loaded, paths[1], anchor=anchor, **how)
    show.emit(result, as_json, show.result_lines)


@app.command(epilog=_examples("sigmerge run recipe.yaml run/"))
def run(
    recipe: RecipeFile,
    out: OutFolder,
    overwrite: Overwrite = False,
    threads: Threads = 0,
    dry_run: DryRun = False,
    seed: Seed = None,
    variant: Variant = None,
    c_min: CMin = None,
    c_max: CMax = None,
    scale: Scale = None,
    allow_pickle: Pickle = False,
    allow_nonfinite: Nonfinite = False,
    device: CaptureDevice = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Merge, score, repair, score again, and write a report.

    The last scores are of items that no step before has seen, where the recipe can have them.
    """
    from sigmerge.commands import run as verb
    from sigmerge.commands.options import Options

    loaded = _recipe(recipe, seed, device, _repair(variant, c_min, c_max, scale))
    how = _how(threads, overwrite, allow_pickle, allow_nonfinite, trust_remote_code)
    if dry_run:
        described = verb.describe(loaded, out, Options(**how))
        show.emit(described, as_json, show.repair_plan_lines)
        return
    with show.progress(as_json) as progress:
        result = verb.run(loaded, out, progress=progress, **how)
    show.emit(result, as_json, show.run_lines)


@app.command(
    epilog=_examples(
        "sigmerge search recipe.yaml found/",
        "sigmerge search recipe.yaml found/ --population 25 --generations 7",
    )
)
def search(
    recipe: RecipeFile,
    out: OutFolder,
    population: Annotated[
        int | None, typer.Option(help="Candidates per generation; default 24.")
    ] = None,
    generations: Annotated[
        int | None, typer.Option(help="Generations, the first included; default: calls/population.")
    ] = None,
    calls: Annotated[int | None, typer.Option(help="Evaluation calls in all; default 240.")] = None,
    items: Annotated[
        int | None, typer.Option(help="Items a candidate answers per domain; default 20.")
    ] = None,
    estimator: Annotated[
        str | None, typer.Option(help="mean, p-irt, gp-irt, mp-irt or gmp-irt; default gmp-irt.")
    ] = None,
    extraction: Annotated[
        str | None, typer.Option(help="How the items are drawn: uniform (default) or clusters.")
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="nano, a suite's YAML file, or a pool of nano train.")
    ] = None,
    seed: Seed = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over.")] = False,
    threads: Threads = 0,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Search a merge's coefficients by evolution (MERGE³).

    Searches linear, task_arithmetic, ties or dare_ties, as the recipe says; options go before its
    search: section. Interrupted, the same command replays what was evaluated and goes on.
    """
    from sigmerge.commands import search as verb
    from sigmerge.commands.options import Options
    from sigmerge.recipe import load_recipe

    loaded = load_recipe(recipe, seed=seed)
    settings = verb.Settings.of(
        loaded,
        population=population,
        generations=generations,
        calls=calls,
        items=items,
        estimator=estimator,
        extraction=extraction,
    )
    how = _how(threads, overwrite)
    if dry_run:
        job = verb.plan_search(loaded, settings, Options(**how), suite)
        verb.check_out(job, out, Options(**how))
        show.emit(job.describe(how["threads"]), as_json, show.search_plan_lines)
        return
    with show.progress(as_json) as progress:
        result = verb.search(loaded, out, settings, suite=suite, progress=progress, **how)
    show.emit(result, as_json, show.search_lines)


@app.command(epilog=_examples("sigmerge demo"))
def demo(
    out: Annotated[Path, typer.Argument(help="Folder for the results.")] = Path("demo-out"),
    overwrite: Overwrite = False,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Merge and repair the embedded pool with every anchor.

    The pool is a bench with synthetic domains, small enough for a laptop; it claims nothing about
    large models.
    """
    from dataclasses import asdict

    from sigmerge.commands.demo import demo as verb

    with show.progress(as_json) as progress:
        result = verb(out, progress=progress, **_how(threads, overwrite))
    if as_json:
        rows = [{**asdict(row), "gain": row.gain} for row in result["rows"]]
        typer.echo(json.dumps({**result, "rows": rows}, indent=2))
        return
    show.print_table(result["rows"])
    typer.echo(f"page: {result['page']}")


@app.command(
    epilog=_examples("sigmerge evaluate merged/ --suite mergebench --split evaluation --data data/")
)
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder to score.")],
    suite: SuiteName = "mergebench",
    split: Annotated[
        Literal["calibration", "evaluation", "all"],
        typer.Option("--split", help="calibration: the drawn items."),
    ] = "calibration",
    data: DataFolder = None,
    hub: UseHub = False,
    splits_file: Annotated[
        Path | None, typer.Option("--splits", help="Split file; default: what build would write.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="First items of each benchmark only.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--benchmark", help="Only this benchmark; repeatable.")
    ] = None,
    backend: Annotated[
        Literal["hf", "vllm"], typer.Option("--backend", help="What generates.")
    ] = "hf",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Of weights; auto: as saved."),
    ] = "auto",
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=0, help="0: found automatically.")
    ] = 0,
    judge: Annotated[
        str, typer.Option("--judge", help="keyword, or a WildGuard checkpoint's folder.")
    ] = "keyword",
    allow_code: Annotated[
        bool,
        typer.Option("--allow-code-execution", help="Run generated programs, in a sandbox."),
    ] = False,
    store: Annotated[
        Path | None, typer.Option("--store", help="SQLite file of results; default: user cache.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the result here.")] = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Score a checkpoint on a suite. Items that were scored before are not scored again.

    Interrupted, the same command goes on with the items that are missing.
    """
    from sigmerge.commands.evaluate import evaluate as verb
    from sigmerge.evaluation import lines

    def announce(cost: Any) -> None:
        if not as_json:
            typer.echo(lines.estimate_line(cost), err=True)

    with show.progress(as_json) as progress:
        result = verb(
            checkpoint, suite, split, data=data, hub=hub, splits=splits_file, limit=limit,
            only=tuple(only or ()), backend=backend, dtype=dtype, batch_size=batch_size or None,
            judge=judge, allow_code=allow_code, store=store, out=out, progress=progress,
            announce=announce, trust_remote_code=trust_remote_code,
        )  # fmt: skip
    show.emit(result, as_json, lines.evaluation_lines)


@app.command(
    epilog=_examples("sigmerge aggregate merged.json repaired.json --expert math=math.json")
)
def aggregate(
    files: Annotated[list[Path], typer.Argument(help="Result files of sigmerge evaluate.")],
    expert: Annotated[
        list[str] | None, typer.Option("--expert", help="NAME=FILE of an expert; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Put results side by side, with gaps to the experts."""
    from sigmerge.commands.aggregate import aggregate as verb
    from sigmerge.evaluation import lines

    if wrong := [text for text in expert or [] if "=" not in text]:
        raise typer.BadParameter(f"--expert {wrong[0]}: expected NAME=FILE")
    experts = {name: Path(file) for name, file in (text.split("=", 1) for text in expert or [])}
    show.emit(verb(files, experts), as_json, lines.aggregate_lines)


splits = typer.Typer(no_args_is_help=True, help="Fix and check which records calibrate.")
app.add_typer(splits, name="splits")


@splits.command("build", epilog=_examples("sigmerge splits build splits.json --data benchmarks/"))
def splits_build(
    file: Annotated[Path, typer.Argument(help="Split file to write.")],
    suite: SuiteName = "mergebench",
    data: DataFolder = None,
    hub: UseHub = False,
    as_json: Json = False,
) -> None:
    """Divide every benchmark 20/80, and draw calibration items."""
    from sigmerge.commands.splits import build
    from sigmerge.evaluation import lines

    show.emit(build(suite, file, data=data, hub=hub), as_json, lines.split_lines)


@splits.command("verify", epilog=_examples("sigmerge splits verify splits.json --data benchmarks/"))
def splits_verify(
    file: Annotated[Path, typer.Argument(help="Split file to check.")],
    suite: SuiteName = "mergebench",
    data: DataFolder = None,
    hub: UseHub = False,
    as_json: Json = False,
) -> None:
    """Check a split file against itself and the source data."""
    from sigmerge.commands.splits import verify
    from sigmerge.evaluation import lines

    show.emit(verify(suite, file, data=data, hub=hub), as_json, lines.split_lines)


nano = typer.Typer(
    help="The embedded five-domain pool: train, check, compare, study.",
    no_args_is_help=True,
)
app.add_typer(nano, name="nano")


@nano.command(epilog=_examples("sigmerge nano train my-pool/ --seed 3"))
def train(
    out: OutFolder,
    seed: Annotated[int, typer.Option("--seed", help="Decides the facts and the training.")] = 0,
    size: Annotated[
        Literal["mini", "nano", "6.7M", "26M"], typer.Option("--size", help="Of each model.")
    ] = "nano",
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option("--device", help="Where it is trained.")
    ] = "cpu",
) -> None:
    """Train a reference and five experts from a seed."""
    from sigmerge.evaluation.run import nano_scores
    from sigmerge.nano.train import train as verb

    with show.progress(False) as progress:
        pool = verb(
            out, seed=seed, size=size, device=device, progress=progress, measure=nano_scores
        )
    typer.echo(f"pool: {pool}")


@nano.command(epilog=_examples("sigmerge nano verify"))
def verify(
    pool: Annotated[Path | None, typer.Argument(help="A pool; the shipped one by default.")] = None,
) -> None:
    """Check the SHA-256 sums of a pool's files."""
    from sigmerge.nano.files import POOL
    from sigmerge.nano.files import verify as verb

    typer.echo(f"{verb(pool or POOL)} files as they should be")


@nano.command(epilog=_examples("sigmerge nano compare pool-0 pool-1 --out methods/"))
def compare(
    pools: Annotated[
        list[Path] | None, typer.Argument(help="Pools; the shipped one by default.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the results.")] = Path("methods"),
    threads: Threads = 0,
) -> None:
    """Make all twelve methods on pools: scores and costs.

    Interrupted, the same command goes on with the methods that are missing.
    """
    from sigmerge.commands.nano import compare as verb
    from sigmerge.commands.options import Options
    from sigmerge.nano.files import POOL

    with show.progress(False) as progress:
        options = Options(threads=_how(threads)["threads"], progress=progress)
        result = verb(pools or [POOL], out, options)
    typer.echo(result["table"])


@nano.command(epilog=_examples("sigmerge nano study pool-0 pool-1 pool-2 --out study/"))
def study(
    pools: Annotated[list[Path], typer.Argument(help="Folders made by `sigmerge nano train`.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for cells and tables.")] = Path(
        "study"
    ),
    anchors: Annotated[
        str | None, typer.Option("--anchors", help="Comma-separated; all shipped by default.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds per random control.")] = 1,
    threads: Threads = 0,
) -> None:
    """Repair every anchor with every variant on every pool.

    Interrupted, the same command goes on with the cells that are missing.
    """
    from sigmerge.commands.demo import ANCHORS
    from sigmerge.commands.nano import study as verb
    from sigmerge.commands.options import Options

    chosen = anchors.split(",") if anchors else ANCHORS
    if unknown := [name for name in chosen if name not in ANCHORS]:
        raise typer.BadParameter(f"--anchors {unknown[0]}: there are {', '.join(ANCHORS)}")
    with show.progress(False) as progress:
        options = Options(threads=_how(threads)["threads"], progress=progress)
        result = verb(pools, chosen, out, seeds, options)
    typer.echo(result["table"])


def _how(
    threads: int,
    overwrite: bool = False,
    allow_pickle: bool = False,
    allow_nonfinite: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    from sigmerge.engine.machine import default_threads

    return {
        "threads": threads or default_threads(),
        "overwrite": overwrite,
        "allow_pickle": allow_pickle,
        "allow_nonfinite": allow_nonfinite,
        "trust_remote_code": trust,
    }


def _repair(
    variant: str | None, c_min: float | None, c_max: float | None, scale: str | None
) -> dict[str, Any]:
    """What the command line says about the repair, in a recipe's words."""
    given = {"variant": variant, "c_min": c_min, "c_max": c_max, "scale": scale}
    if scale is not None and scale != "calibrated":
        try:
            given["scale"] = float(scale)
        except ValueError:
            raise typer.BadParameter(f"--scale is a number or calibrated, not {scale!r}") from None
    return {key: value for key, value in given.items() if value is not None}


def _recipe(
    file: Path,
    seed: int | None,
    device: Device | None,
    repair: Mapping[str, Any] | None = None,
) -> Any:
    """A recipe, with what the command line says otherwise."""
    from dataclasses import replace

    from sigmerge.recipe import load_recipe

    loaded = load_recipe(file, seed=seed, repair=repair)
    if device is None:
        return loaded
    return replace(loaded, capture=loaded.capture.model_copy(update={"device": device.value}))


@app.command(epilog=_examples("sigmerge operators", "sigmerge operators ties"))
def operators(
    name: Annotated[str | None, typer.Argument(help="Show only this operator.")] = None,
    as_json: Json = False,
) -> None:
    """List the merge operators, their parameters and papers."""
    from sigmerge.operators.table import OPERATORS, operator

    rows = [show.operator_row(operator(key)) for key in ([name] if name else OPERATORS)]
    show.emit({"operators": rows}, as_json, show.operator_lines)


def main() -> None:
    try:
        app(standalone_mode=False)
    except SigmergeError as error:
        _fail(str(error), error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("interrupted; the same command continues from the finished blocks", err=True)
        sys.exit(130)
    except BrokenPipeError:  # as in `sigmerge operators | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}.", 1)
    except MemoryError:
        _fail("Out of memory. Fewer --threads need less; --dry-run says how much.", 1)
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")) and hasattr(error, "show"):
            error.show()
            sys.exit(2)
        if "SIGMERGE_DEBUG" in os.environ:
            raise
        _fail(
            f"{type(error).__name__}: {error}\nThis is a fault of sigmerge, not of your input. "
            "SIGMERGE_DEBUG=1 shows where it happened; please report it with that.",
            1,
        )


def _fail(message: str, code: int) -> None:
    typer.echo(f"error: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
