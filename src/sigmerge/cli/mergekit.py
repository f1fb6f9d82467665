"""Commands for who comes from mergekit: adapters, mixtures, and what a recipe changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from sigmerge.cli import show
from sigmerge.cli.app import examples
from sigmerge.cli.declared import Argument, Option
from sigmerge.cli.flags import PUSHED, READ, WORKING, WRITTEN, Flags, OutFolder, RecipeFile, command
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
    include: Annotated[
        list[str] | None,
        Option("--include", help="Only modules whose name has this regular expression."),
    ] = None,
    exclude: Annotated[
        list[str] | None, Option("--exclude", help="No module whose name has this expression.")
    ] = None,
    save: Annotated[
        list[str] | None, Option("--save", help="A module that is stored whole if it differs.")
    ] = None,
) -> None:
    """Extract a LoRA adapter in PEFT's format from a tuned model.

    The difference of every matrix of a linear layer is approximated by its largest singular values:
    --rank of them (16 by default), or as few as keep --energy. Embeddings, head, norms, biases and
    routers that differ are stored whole. What PEFT loads neither way, as stacked experts, is left
    out with a warning. BASE+ADAPTER is the model again, up to what was cut and left out.
    """
    from sigmerge.jobs.extract import ExtractJob, Wanted

    wanted = Wanted(tuple(include or ()), tuple(exclude or ()), tuple(save or ()))
    done = flags.run(lambda how: ExtractJob(model, base, out, how, rank, energy, wanted))
    flags.emit(done, extracted_lines)


def extracted_lines(done: Any) -> Iterator[str]:
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


@command(
    *WRITTEN, "seed", "strict", *READ, "allow_nonfinite", "rehash", *PUSHED, *WORKING,
    epilog=examples(
        "sigmerge tokens model/ donor/ out/ --dry-run", "sigmerge tokens model/ donor/ out/ --k 32",
        "sigmerge tokens model/ donor/ out/ --method subword --text sample.txt",
    ),
)  # fmt: skip
def tokens(
    model: Annotated[str, Argument(help="Model whose rows are moved: a folder or a hub id.")],
    donor: Annotated[str, Argument(help="Model whose tokenizer is taken.")],
    out: OutFolder,
    flags: Flags,
    method: Annotated[
        Literal["omp", "knn", "mean", "zero", "random", "subword"],
        Option(help="How rows of tokens are formed that the model lacks."),
    ] = "omp",
    k: Annotated[int, Option("--k", min=1, help="omp, knn: shared tokens per row.")] = 64,
    metric: Annotated[
        Literal["euclidean", "cosine"], Option(help="knn: what near is.")
    ] = "euclidean",
    weights: Annotated[
        Literal["distance", "barycentric", "least_squares"],
        Option(help="knn: coefficients of the nearest rows."),
    ] = "distance",
    subword: Annotated[
        Literal["mean", "sum", "weighted_mean", "first_last"],
        Option(help="subword: what is made of the rows of a token's pieces."),
    ] = "mean",
    row_scale: Annotated[float, Option("--row-scale", help="A factor of all new rows.")] = 1.0,
    text: Annotated[
        Path | None,
        Option("--text", help="Lines that the model reads before and after: bits per byte."),
    ] = None,
) -> None:
    """Give a model the tokenizer of another.

    Rows of tokens that both have are moved, by what a token stands for: its bytes, or its role.
    The others are formed in embedding and head alike. omp writes the donor's row as a sum of k
    rows of shared tokens, and takes the same sum of the model's rows. Interrupted, the same command
    continues where it stopped.
    """
    from sigmerge.engine.machine import load_numpy

    load_numpy()
    from sigmerge.checkpoints.remote import target
    from sigmerge.jobs.tokens import TokensJob
    from sigmerge.recipe import load_recipe
    from sigmerge.recipe.tokenizers import tokens_recipe

    missing = {"method": method, "k": k, "metric": metric, "weights": weights,
               "subword": subword, "scale": row_scale}  # fmt: skip
    recipe = tokens_recipe(model, donor, missing, flags.seed or 0)
    loaded, place = load_recipe(recipe, strict=flags.strict, weights=False), target(out)
    job_of = flags.over_hub(loaded, lambda one, how: TokensJob(one, place, how, text), place)
    flags.emit_made(flags.run(job_of, goes_on=True), show.tokens_lines)


@command(
    "allow_pickle",
    epilog=examples("sigmerge migrate mergekit.yaml", "sigmerge migrate mergekit.yaml --sample 0"),
)
def migrate(
    recipe: RecipeFile,
    flags: Flags,
    sample: Annotated[
        int, Option("--sample", help="Entries of a tensor that are merged to count; 0: none.")
    ] = 1 << 16,
) -> None:
    """Print what differs from mergekit when a recipe runs here.

    Of every kind of tensor some rows are merged by both arithmetics, and a table says how many
    entries differ and why: half precision, ties, draws. A recipe that `merge --dry-run` refuses is
    an error, as it is there. Of a file of mergekit-moe or mergekit-evolve it
    says which command takes it here, and what differs.
    """
    from sigmerge.jobs.migration import migration

    flags.emit(migration(recipe, flags.allow_pickle, max(sample, 0)), _changed_lines)


def _changed_lines(found: Any) -> Iterator[str]:
    from sigmerge.jobs.sampled import sampled_lines

    if found.other is not None:
        yield from found.other.lines()
        return
    yield from map(str, found.changes)
    if not found.changes and not any(one.share("differing") for one in found.samples):
        yield "nothing differs from mergekit 0.1.5"
    for one in found.samples:
        yield ""
        yield from sampled_lines(one)
    yield from found.notes
