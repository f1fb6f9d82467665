"""mergekit's own command lines: its options, mapped onto our verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sigmerge.cli import show
from sigmerge.cli.app import examples, group
from sigmerge.cli.flags import recipe_file

if TYPE_CHECKING:
    from sigmerge.compat.mergekit import MergeConfiguration, MergeOptions

mergekit = group("mergekit", "mergekit's command lines, with all of their options.")

FOREIGN = {
    "cuda": "--device cuda",
    "gpu-rich": "--device cuda",
    "lazy-unpickle": "--allow-pickle",
    "out-shard-size": "--max-shard-size 5GB",
    "random-seed": "--seed",
    "num-threads": "--threads",
    "verbosity": "-v",
    "max-rank": "--rank",
    "base-model": "--base",
    "include-regex": "--include",
    "exclude-regex": "--exclude",
    "save-module": "--save",
    "transformers-cache": "the variable HF_HUB_CACHE",
}
"""Options of mergekit's, and what our verbs have for them."""


def foreign(option: str) -> str | None:
    """What is answered to an option of mergekit's at one of our own verbs."""
    from sigmerge.compat.mergekit import IDLE

    name = option.lstrip("-").removeprefix("no-")
    if name in FOREIGN:
        return f"{option} is mergekit's; here it is {FOREIGN[name]}"
    if why := IDLE.get(name.replace("-", "_")):
        return f"{option} is mergekit's, and not needed: {why}"
    return None


JSON = "--json"
FILE, FOLDER = click.Path(path_type=Path, dir_okay=False), click.Path(path_type=Path)


class _Command(click.Command):
    """A command of mergekit's: its own parameters, then the fields of MergeOptions."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        known = {parameter.name for parameter in self.params}
        self.params += [each for each in _shared() if each.name not in known]
        return super().get_params(ctx)


def _shared() -> Iterator[click.Parameter]:
    from dataclasses import fields

    from sigmerge.compat.mergekit import IDLE, MergeOptions, parse_kmb

    def bytes_of(context: click.Context, parameter: click.Parameter, given: str | None) -> Any:
        return None if given is None else parse_kmb(given)

    for field in fields(MergeOptions):
        flag, note = f"--{field.name.replace('_', '-')}", IDLE.get(field.name)
        help = f"Not needed: {note}." if note else ""
        if field.name == "verbosity":
            yield click.Option(["-v", "verbosity"], count=True, help="More messages.")
        elif field.name == "quiet":
            yield click.Option(["-q", f"{flag}/--no-quiet"], default=None, help="No messages.")
        elif field.name == "out_shard_size":
            yield click.Option([flag], callback=bytes_of, help="Of a weight file, as in 5B.")
        elif isinstance(field.default, bool):
            yield click.Option([f"{flag}/--no-{flag[2:]}"], default=None, help=help)
        else:
            kind = int if "int" in str(field.type) else str
            short = ["-j"] if field.name == "num_threads" else []
            yield click.Option([*short, flag], type=kind, help=help)
    yield click.Option([JSON, "as_json"], is_flag=True, help="Print JSON instead of text.")


def _flag(name: str, help: str, default: bool = False, *short: str) -> click.Option:
    return click.Option([*short, f"--{name}/--no-{name}"], default=default, help=help)


def _idle(name: str, why: str, *kind: str, **how: Any) -> click.Option:
    """An option that changes nothing here; a line says so where it is given."""

    def say(context: click.Context, parameter: click.Parameter, given: Any) -> None:
        source = context.get_parameter_source(str(parameter.name))
        if source is not click.core.ParameterSource.DEFAULT:
            click.echo(f"note: {name} is not needed: {why}", err=True)

    how.update(callback=say, expose_value=False, help=f"Not needed: {why}.")
    return click.Option([*kind, f"--{name}"], **how)


def _called(
    name: str, *parameters: click.Parameter, example: str
) -> Callable[[Callable[..., None]], None]:
    """Make a command of a function of MergeOptions and of the parameters that it declares."""

    def declared(function: Callable[..., None]) -> None:
        @click.pass_context
        def call(context: click.Context, **given: Any) -> None:
            from dataclasses import fields

            from sigmerge.compat.mergekit import MergeOptions

            shared = {field.name for field in fields(MergeOptions)}
            own = {k: v for k, v in given.items() if k not in shared and k != "as_json"}
            said = {k: v for k, v in given.items() if k in shared and v is not None}
            options = MergeOptions(**said)
            show.set_verbosity(options.verbosity > 0)
            for line in options.unneeded():
                click.echo(f"note: {line}", err=True)
            function(options, **own)

        epilog = examples(f"sigmerge mergekit {name} {example}")
        made = _Command(name, callback=call, help=function.__doc__, epilog=epilog)
        made.params = list(parameters)
        mergekit.add_command(made)

    return declared


def _config(name: str) -> click.Argument:
    """The file of a recipe; -: from the standard input."""

    def read(context: click.Context, parameter: click.Parameter, given: Path) -> Path:
        return recipe_file(given)

    return click.Argument([name], type=FILE, callback=read)


_CONFIG = _config("config_file")
_OUT = click.Argument(["out_path"], type=FOLDER)


@_called("yaml", _CONFIG, _OUT, example="config.yml out/ --cuda --lazy-unpickle")
def _yaml(options: MergeOptions, config_file: Path, out_path: Path) -> None:
    """Merge a recipe as mergekit-yaml does: OUT_PATH is replaced if it is there."""
    from sigmerge.compat.mergekit import MergeConfiguration
    from sigmerge.files.yaml_documents import decoded, parse_yaml

    text = decoded(config_file, "a recipe")
    content = MergeConfiguration.model_validate(parse_yaml(text, str(config_file)).value)
    _run(options, content, out_path, text)


def _run(
    options: MergeOptions, content: MergeConfiguration, out: Path, text: str | None = None
) -> None:
    from sigmerge.compat.mergekit import run_merge

    done = run_merge(content, out, options, text)
    _emit(options, done)


def _emit(options: MergeOptions, done: Any, lines: Any = show.merged_lines) -> None:
    as_json = click.get_current_context().params["as_json"]
    if as_json or not options.quiet:
        show.emit(done, as_json, lines)


@_called(
    "multi", _CONFIG,
    click.Option(["--out-path"], type=FOLDER, help="Folder of the recipe without a name."),
    click.Option(["-I", "--intermediate-dir"], type=FOLDER, required=True,
                 help="Folder of the named recipes' results."),
    _idle("lazy/--no-lazy", "a result is made again where its recipe or models changed",
          default=True),
    example="several.yml --out-path out/ -I between/",
)  # fmt: skip
def _multi(
    options: MergeOptions, config_file: Path, out_path: Path | None, intermediate_dir: Path
) -> None:
    """Merge a file of several recipes, of which one may merge what another makes."""
    from sigmerge.errors import RecipeError
    from sigmerge.jobs.multi_recipe import SeveralJob
    from sigmerge.jobs.options import Options
    from sigmerge.recipe.documents import LAST, several

    if out_path is None and LAST in several(config_file):
        raise RecipeError("--out-path: is missing; a recipe of the file has no name.")
    with show.progress(options.quiet) as bar:
        how = replace(Options(**options.keywords()), progress=bar)
        job = SeveralJob(config_file, intermediate_dir, how, options.random_seed, last=out_path)
        made = job.run()
    _emit(options, made, lambda each: chain.from_iterable(map(show.merged_lines, each)))


_WITHOUT = "i-understand-this-is-not-useful-without-training"


@_called(
    "moe", _config("config_path"), _OUT,
    _idle("load-in-4bit", "one block of the base is in memory at a time", is_flag=True),
    _idle("load-in-8bit", "one block of the base is in memory at a time", is_flag=True),
    _idle(_WITHOUT, "experts that are all the same are a warning", is_flag=True),
    example="moe.yml out/ --trust-remote-code",
)  # fmt: skip
def _moe(options: MergeOptions, config_path: Path, out_path: Path) -> None:
    """Dense models as the experts of one mixture, as mergekit-moe makes it."""
    from sigmerge.api import moe
    from sigmerge.files.yaml_documents import decoded

    done = moe(config_path, out_path, seed=options.random_seed, **options.keywords())
    kept = Path(done.out, "mergekit_moe_config.yml")
    kept.write_text(decoded(config_path, "a file of a mixture"), encoding="utf-8")
    _emit(options, done)


@_called(
    "pytorch", click.Argument(["config_path"], type=FILE), _OUT,
    click.Option(["-i", "--tensor-intersection"], is_flag=True, help="Merge what all models have."),
    click.Option(["-u", "--tensor-union"], is_flag=True, help="Merge what any model has."),
    example="files.yml out/ --tensor-intersection",
)  # fmt: skip
def _pytorch(
    options: MergeOptions,
    config_path: Path,
    out_path: Path,
    tensor_intersection: bool,
    tensor_union: bool,
) -> None:
    """Files of tensors that no configuration describes, as mergekit-pytorch merges them.

    Pickles are read, weights-only, without another option.
    """
    from sigmerge.compat.mergekit import MergeConfiguration
    from sigmerge.files.yaml_documents import decoded, parse_yaml

    text = decoded(config_path, "a recipe")
    content = MergeConfiguration.model_validate(parse_yaml(text, str(config_path)).value)
    if tensor_intersection or tensor_union:  # theirs asks for both in this order
        content["tensors"] = "intersection" if tensor_intersection else "union"
    _run(replace(options, lazy_unpickle=True), content, out_path, text)


_HERE = "candidates are merged in memory, one after another, wherever they are scored"


@_called(
    "evolve", click.Argument(["genome_config_path"], type=FILE),
    click.Option(["--storage-path"], type=FOLDER, required=True,
                 help="Folder into which the recipe goes."),
    click.Option(["--max-fevals"], type=int, default=100, help="Evaluation calls in all."),
    _idle("vllm/--no-vllm", "the recipe's evaluate: says the backend", default=False),
    _idle("strategy", _HERE, "-s"),
    _idle("in-memory/--no-in-memory", _HERE, default=False),
    _idle("num-gpus", _HERE, type=int),
    _idle("merge-cuda/--no-merge-cuda", "`sigmerge tune --device` says it", default=True),
    _idle("batch-size", "the recipe's evaluate: says it", type=int),
    _idle("sigma0", "no step of CMA-ES is taken", type=float),
    _idle("wandb/--no-wandb", "tune.jsonl has every call, report.html shows them", default=False),
    _idle("wandb-project", "tune.jsonl has every call, report.html shows them"),
    _idle("wandb-entity", "tune.jsonl has every call, report.html shows them"),
    _idle("task-search-path", "a suite names its own files", multiple=True),
    _idle("i-understand-the-depths-of-the-evils-i-am-unleashing",
          "calibration items choose and other items report", is_flag=True),
    _idle("save-final-model/--no-save-final-model", "the winner is stored", default=True),
    _idle("reshard/--no-reshard", "shards are read where they lie", default=True),
    _idle("timeout", "--max-fevals bounds it, and an interrupted tuning goes on", type=float),
    _idle("load-in-8bit", "the recipe's evaluate: says how models are loaded", is_flag=True),
    _idle("load-in-4bit", "the recipe's evaluate: says how models are loaded", is_flag=True),
    _idle("force-population-size", "candidates are guided, not bred", type=int),
    example="genome.yml --storage-path tuned/ --max-fevals 24",
)  # fmt: skip
def _evolve(
    options: MergeOptions, genome_config_path: Path, storage_path: Path, max_fevals: int
) -> None:
    """Write the recipe of a genome for `sigmerge tune`, and say what it lacks: scores by domain."""
    from sigmerge.compat.recipes import of_genome
    from sigmerge.errors import RecipeError
    from sigmerge.files.yaml_documents import read_yaml

    content, tasks, lost = of_genome(
        read_yaml(genome_config_path, "a genome"), max_fevals, options.random_seed or 0
    )
    storage_path.mkdir(parents=True, exist_ok=True)
    file = storage_path / "recipe.yaml"
    file.write_text(content.to_yaml(), encoding="utf-8")
    for line in lost:
        click.echo(f"note: {line}", err=True)
    raise RecipeError(
        f"{file}: is written, and nothing is evolved. A tuning needs a score for every model's own "
        f"domain, and tasks ({', '.join(tasks)}) name none: add repair: {{evaluate: …}} or command:"
        f", then `sigmerge tune {file} {storage_path / 'tuned'}`."
    )


@_called(
    "extract-lora",
    click.Option(["--model"], required=True, help="Fine-tuned model."),
    click.Option(["--base-model"], required=True, help="The model that it was tuned from."),
    click.Option(["--out-path"], required=True, type=FOLDER, help="Folder of the adapter."),
    click.Option(["--max-rank"], type=int, default=128, help="Largest rank of an update."),
    click.Option(["--save-module", "save"], multiple=True, help="Store this module whole."),
    click.Option(["-e", "--exclude-regex", "exclude"], multiple=True, help="Leave these out."),
    click.Option(["-i", "--include-regex", "include"], multiple=True, help="Only these modules."),
    click.Option(["--sv-epsilon"], type=float, default=0.0,
                 help="Singular values up to this are left out."),
    click.Option(["--skip-undecomposable"], is_flag=True, help="Store no norm whole."),
    _idle("distribute-scale/--no-distribute-scale",
          "however the factors share the scale, their product is the same", default=True),
    _idle("embed-lora/--no-embed-lora", "an embedding that differs is stored whole, exactly",
          default=False),
    example="--model tuned/ --base-model base/ --out-path adapter/ --max-rank 32",
)  # fmt: skip
def _extract_lora(
    options: MergeOptions,
    model: str,
    base_model: str,
    out_path: Path,
    max_rank: int,
    sv_epsilon: float,
    skip_undecomposable: bool,
    **names: Sequence[str],
) -> None:
    """An adapter from a tuned model, as mergekit-extract-lora makes it."""
    from sigmerge.cli.mergekit import extracted_lines
    from sigmerge.jobs.extract import ExtractJob, Wanted
    from sigmerge.jobs.options import Options

    lists = {key: tuple(value) for key, value in names.items()}
    wanted = Wanted(**lists, least=sv_epsilon, skip_others=skip_undecomposable)
    folders = _found(model), _found(base_model), out_path
    with show.progress(options.quiet) as bar:
        how = replace(Options(**options.keywords()), progress=bar)
        done = ExtractJob(*folders, how, max_rank, None, wanted).run()
    _emit(options, done, extracted_lines)


def _found(model: str) -> Path:
    """The folder of a model, downloaded where it is one of the hub."""
    from sigmerge.recipe.folders import find_model

    if found := find_model(model, Path.cwd()):
        return found
    from sigmerge.checkpoints.hub import download

    return download(model)


_METHODS = {"common_interpolation": "knn", "subword": "subword", "mean": "mean", "zero": "zero",
            "randn": "random", "omp": "omp"}  # fmt: skip
_NO_METHODS = ("john_hewitt", "landmark_pca", "stb", "mp_rope")
_WEIGHTS = {"distance_proportional": "distance", "barycentric": "barycentric",
            "least_squares": "least_squares"}  # fmt: skip
_WHERE = click.Choice(["lm_head", "embed", "yes", "no"])


@_called(
    "tokensurgeon", click.Argument(["model"]), click.Argument(["donor"]), _OUT,
    click.Option(["-k", "--k"], type=click.IntRange(1), default=64, help="Rows of a new one."),
    click.Option(["-c/-nc", "--cosine-similarity/--no-cosine-similarity"], default=False,
                 help="Near is what has a like direction."),
    click.Option(["-a", "--approximation-method", "method"], default="omp",
                 type=click.Choice([*_METHODS, *_NO_METHODS]), help="How new rows are formed."),
    click.Option(["-w", "--weight-scheme", "weights"], default="distance_proportional",
                 type=click.Choice([*_WEIGHTS]), help="Coefficients of the nearest rows."),
    click.Option(["-s", "--subword-method", "subword"], default="mean",
                 type=click.Choice(["mean", "sum", "weighted_mean", "first_last"]),
                 help="What is made of the rows of pieces."),
    _idle("batch-size", "batches follow from the memory that they take", type=int),
    click.Option(["-pm", "--prefix-match", "prefix"], default="no", type=_WHERE,
                 help="Only `no` is there."),
    _idle("byte-match", "tokens are always matched by their bytes", "-bm", type=_WHERE),
    _flag("magikarp", "Not there."),
    click.Option(["-nvn", "--new-vocab-noise", "noise"], type=float, help="Not there."),
    click.Option(["-nvs", "--new-vocab-scale", "scale"], type=float, help="Factor of new rows."),
    example="model/ donor/ out/ -k 64",
)  # fmt: skip
def _tokensurgeon(
    options: MergeOptions,
    model: str,
    donor: str,
    out_path: Path,
    k: int,
    cosine_similarity: bool,
    method: str,
    weights: str,
    subword: Any,
    prefix: str,
    magikarp: bool,
    noise: float | None,
    scale: float | None,
) -> None:
    """A model with another's tokenizer, as mergekit-tokensurgeon makes it."""
    from sigmerge.api import tokens
    from sigmerge.errors import RecipeError

    asked = {"--prefix-match": prefix != "no", "--magikarp": magikarp, "--new-vocab-noise": noise,
             f"--approximation-method {method}": method in _NO_METHODS}  # fmt: skip
    if lacking := [name for name, given in asked.items() if given]:
        raise RecipeError(f"{', '.join(lacking)}: is not there; `sigmerge tokens` has omp, knn, "
                          "subword, mean, zero and random.")  # fmt: skip
    done = tokens(
        model, donor, out_path, k=k, metric="cosine" if cosine_similarity else "euclidean",
        method=_METHODS[method], weights=_WEIGHTS[weights], subword=subword,  # type: ignore[arg-type]
        scale=scale or 1.0, seed=options.random_seed or 0, **options.keywords(),
    )  # fmt: skip
    _emit(options, done, show.tokens_lines)


@_called(
    "layershuffle", _OUT,
    click.Option(["-m", "--model", "models"], multiple=True, required=True, help="A model."),
    click.Option(["-w", "--weight", "weights"], multiple=True, type=float,
                 help="How often its layers are drawn; of --full-random, their part."),
    _flag("print-yaml", "Print the recipe."),
    click.Option(["--write-yaml"], type=FOLDER, help="Write the recipe into this file."),
    click.Option(["--dry-run"], is_flag=True, help="Merge nothing."),
    _flag("fp16", "Write float16."),
    _flag("full-random", "Draw which layers, too."),
    example="out/ -m one/ -w 0.5 -m other/ -w 0.5 --random-seed 7",
)  # fmt: skip
def _layershuffle(
    options: MergeOptions,
    out_path: Path,
    models: Sequence[str],
    weights: Sequence[float],
    print_yaml: bool,
    write_yaml: Path | None,
    dry_run: bool,
    fp16: bool,
    full_random: bool,
) -> None:
    """A stack of layers that are drawn from several models."""
    from sigmerge.checkpoints.folder import open_checkpoint
    from sigmerge.compat.recipes import shuffled

    depths = {m: open_checkpoint(_found(m), allow_pickle=True).stack.depth for m in models}
    seed = options.random_seed or 0
    content = shuffled(depths, weights, seed, full=full_random, half=fp16)
    if print_yaml:
        click.echo(content.to_yaml())
    if write_yaml:
        write_yaml.write_text(content.to_yaml(), encoding="utf-8")
    if not dry_run:
        _run(options, content, out_path)


@_called(
    "bakllama", click.Argument(["config_path"], type=FILE), _OUT, _flag("fp16", "Write float16."),
    example="layers.yml out/",
)  # fmt: skip
def _bakllama(options: MergeOptions, config_path: Path, out_path: Path, fp16: bool) -> None:
    """A stack of layers by bakllama's old files."""
    from sigmerge.compat.recipes import of_layers
    from sigmerge.files.yaml_documents import read_yaml

    _run(options, of_layers(read_yaml(config_path, "a file of bakllama"), half=fp16), out_path)


@_called(
    "legacy", _OUT,
    click.Option(["--merge", "models"], multiple=True, help="A model."),
    click.Option(["--density", "densities"], multiple=True, type=float, help="Of each model."),
    click.Option(["--weight", "weights"], multiple=True, type=float, help="Of each model."),
    click.Option(["--method"], default="ties", help="Merge method."),
    click.Option(["--base-model"], help="Base model."),
    _flag("normalize", "Divide by the sum of the weights.", True),
    _idle("int8-mask/--no-int8-mask", "masks are no tensors here", default=False),
    _flag("bf16", "Write bfloat16."),
    _flag("naive-count", "Signs by count and not by weight."),
    _flag("print-yaml", "Print the recipe."),
    example="out/ --merge one/ --merge other/ --base-model base/ --density 0.5 --bf16",
)  # fmt: skip
def _legacy(options: MergeOptions, out_path: Path, print_yaml: bool, **given: Any) -> None:
    """A merge by the options that mergekit had before recipes."""
    from sigmerge.compat.recipes import of_options

    content = of_options(**given)
    if print_yaml:
        click.echo(content.to_yaml())
    _run(options, content, out_path)
