"""Commands for who comes from mergekit: an adapter out of a model, and what a recipe changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import click

from sigmerge.cli import show
from sigmerge.cli.app import examples, group
from sigmerge.cli.declared import Argument, Option
from sigmerge.cli.flags import READ, WORKING, WRITTEN, Flags, OutFolder, RecipeFile, command
from sigmerge.messages import size


@command(
    "overwrite", "no_fsync", "allow_pickle", "allow_nonfinite", "threads", "dry_run",
    epilog=examples(
        "sigmerge extract tuned/ adapter/ --base reference/ --rank 16",
        "sigmerge extract tuned/ adapter/ --base reference/ --energy 0.95",
    ),
)  # fmt: skip
def extract(
    model: Annotated[Path, Argument(help="Folder of the tuned model.")],
    out: OutFolder,
    base: Annotated[Path, Option("--base", help="Folder of the model it was tuned from.")],
    flags: Flags,
    rank: Annotated[int | None, Option("--rank", help="Largest rank of an update.")] = None,
    energy: Annotated[
        float | None,
        Option("--energy", help="Part of each update's squared norm to keep, up to 1."),
    ] = None,
) -> None:
    """Extract a LoRA adapter in PEFT's format from a tuned model.

    The difference of every matrix of a linear layer is approximated by its largest singular values:
    --rank of them (16 by default), or as few as keep --energy. Embeddings, head, norms, biases and
    routers that differ are stored whole. What PEFT loads neither way, as stacked experts, is left
    out with a warning. BASE+ADAPTER is the model again, up to what was cut and left out.
    """
    from sigmerge.jobs.extract import ExtractJob

    done = flags.run(lambda how: ExtractJob(model, base, out, how, rank, energy))
    flags.emit(done, _extracted_lines)


def _extracted_lines(done: Any) -> Iterator[str]:
    yield (
        f"{done.out}: {done.modules} matrices of rank {done.rank} at most keep "
        f"{100 * done.kept:.2f} % of what changed, {size(done.bytes_written)}"
    )
    if done.whole:
        some = ", ".join(done.whole[:3]) + (", …" if done.whole[3:] else "")
        yield f"stored whole: {len(done.whole)} tensors ({some})"
    yield from (f"warning: {text}" for text in done.warnings)


MIXTURE_EXAMPLE = """
\b
A file:
  base_model: ./reference
  gate_mode: hidden           # hidden_avg, cheap_embed, random, uniform_random
  experts_per_token: 2
  dtype: bfloat16
  experts:
    - {source_model: ./math,   positive_prompts: ["Solve", "How many"]}
    - {source_model: ./coding, positive_prompts: ["def ", "Write a program"]}
"""


@command(
    *WRITTEN, "seed", "strict", *READ, "allow_nonfinite", "rehash", "device", *WORKING,
    epilog=examples("sigmerge moe moe.yaml mixture/ --dry-run", "sigmerge moe moe.yaml mixture/")
    + MIXTURE_EXAMPLE,
)  # fmt: skip
def moe(recipe: RecipeFile, out: OutFolder, flags: Flags) -> None:
    """Make dense models the experts of one mixture.

    Takes mergekit-moe's files as they are: Mixtral, DeepSeek-MoE, Qwen2-MoE, Qwen3-MoE. The rows of
    the routers are the hidden states of each expert's prompts in the base, computed block by block,
    their embeddings, or random. Interrupted, the same command continues where it stopped.
    """
    from sigmerge.engine.machine import load_numpy

    load_numpy()
    from sigmerge.checkpoints.remote import target
    from sigmerge.jobs.moe import MoeJob
    from sigmerge.recipe.moe import load_mixture

    loaded = load_mixture(recipe, seed=flags.seed, strict=flags.strict)
    done = flags.run(lambda how: MoeJob(loaded, target(out), how), goes_on=True)
    flags.emit(done, show.merged_lines)


@command("allow_pickle", epilog=examples("sigmerge migrate mergekit.yaml"))
def migrate(recipe: RecipeFile, flags: Flags) -> None:
    """Print what differs from mergekit when a recipe runs here.

    A recipe that `merge --dry-run` refuses is an error, as it is there.
    """
    from sigmerge.jobs.migration import migration

    flags.emit(migration(recipe, flags.allow_pickle), _changed_lines)


def _changed_lines(changes: Any) -> Iterator[str]:
    yield from map(str, changes)
    if not changes:
        yield "nothing differs from mergekit 0.1.5"


mergekit = group("mergekit", "mergekit's command lines, with all of their options.")


class _Yaml(click.Command):
    """`mergekit-yaml` under its options, which are the fields of its class."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self.params:
            self.params = list(_parameters())
        return super().get_params(ctx)


def _parameters() -> Iterator[click.Parameter]:
    from dataclasses import fields

    from sigmerge.compat.mergekit import IDLE, MergeOptions, parse_kmb

    def bytes_of(context: click.Context, parameter: click.Parameter, given: str | None) -> Any:
        return None if given is None else parse_kmb(given)

    yield click.Argument(["config_file"], type=click.Path(path_type=Path))
    yield click.Argument(["out_path"], type=click.Path(path_type=Path))
    for field in fields(MergeOptions):
        flag, note = f"--{field.name.replace('_', '-')}", IDLE.get(field.name)
        help = f"Not needed: {note}." if note else ""
        if field.name == "verbosity":
            yield click.Option(["-v", "verbosity"], count=True, help="More messages.")
        elif field.name == "out_shard_size":
            yield click.Option([flag], callback=bytes_of, help="Of a weight file, as in 5B.")
        elif isinstance(field.default, bool):
            yield click.Option([f"{flag}/--no-{flag[2:]}"], default=None, help=help)
        else:
            kind = int if "int" in str(field.type) else str
            short = ["-j"] if field.name == "num_threads" else []
            yield click.Option([*short, flag], type=kind, help=help)


@click.pass_context
def _merge_by_mergekit(
    context: click.Context, config_file: Path, out_path: Path, **given: Any
) -> None:
    """Merge a recipe as mergekit-yaml does: OUT_PATH is replaced if it is there."""
    from sigmerge.compat.mergekit import MergeConfiguration, MergeOptions, run_merge
    from sigmerge.files.yaml_documents import decoded, parse_yaml

    options = MergeOptions(**{name: value for name, value in given.items() if value is not None})
    show.set_verbosity(options.verbosity > 0)
    text = decoded(config_file, "a recipe")
    content = MergeConfiguration.model_validate(parse_yaml(text, str(config_file)).value)
    for line in options.unneeded():
        click.echo(f"note: {line}", err=True)
    done = run_merge(content, out_path, options, text)
    if not options.quiet:
        show.emit(done, False, show.merged_lines)


mergekit.add_command(
    _Yaml(
        "yaml",
        callback=_merge_by_mergekit,
        help=_merge_by_mergekit.__doc__,
        epilog=examples("sigmerge mergekit yaml config.yml out/ --cuda --lazy-unpickle"),
    )
)
