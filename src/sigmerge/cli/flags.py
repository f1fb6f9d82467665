"""The options that several commands share, each declared once, and what commands do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import click

from sigmerge.cli import show
from sigmerge.cli.app import app
from sigmerge.cli.declared import Argument, DeclaredCommand, Option

if TYPE_CHECKING:
    from sigmerge.jobs.options import Options
    from sigmerge.recipe import Recipe


class EngineKind(StrEnum):
    local = "local"
    ray = "ray"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


VariantName = Literal[
    "default", "uniform_capacity", "equal_share", "sparse_update", "inverted_capacity",
    "slope_inverted_capacity", "permuted_capacity", "inverted_share", "random_share", "random_mask",
    "all_random", "view_representation", "view_direction", "view_sign", "order_random",
    "order_reverse",
]  # fmt: skip
"""The ablations and controls of `sigmerge.method.controls`."""


def recipe_file(file: Path) -> Path:
    """The file of a recipe; what comes through a pipe is read here, since it comes once."""
    from sigmerge.files.piped import taken
    from sigmerge.files.yaml_documents import LARGEST_YAML

    return taken(file, LARGEST_YAML)


RecipeFile = Annotated[
    Path,
    Argument(
        callback=recipe_file, help="YAML recipe, in mergekit's dialect; -: from the standard input."
    ),
]
OutFolder = Annotated[Path, Argument(help="New folder for the result.")]
AnchorFolder = Annotated[
    Path | None, Option("--anchor", help="Stored merge to look at, ours or another tool's.")
]
SuiteName = Annotated[
    str, Option("--suite", help="mergebench, nano, a suite's YAML, or a nano pool's folder.")
]
DataFolder = Annotated[
    Path | None,
    Option("--data", help="Folder with the benchmarks' files; default SIGMERGE_DATA."),
]
UseHub = Annotated[bool, Option("--hub", help="Read what is not in --data from the hub.")]


def _reuse(asked: bool) -> bool:
    if asked:
        from sigmerge.kept import reuse_from_now_on

        reuse_from_now_on()
    return asked


def _number(text: str | None) -> float | str | None:
    if text is None or text == "calibrated":
        return text
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"--scale is a number or calibrated, not {text!r}") from None


def _declared(kind: Any, default: Any, *names: str, **how: Any) -> Any:
    """A field that is an option of the command line."""
    return field(default=default, metadata={"kind": Annotated[kind, Option(*names, **how)]})


@dataclass(frozen=True)
class Flags:
    """The shared options. A command names those that it takes; the others keep their defaults."""

    overwrite: bool = _declared(bool, False, "--overwrite", help="Replace an existing result.")
    max_shard_size: str | None = _declared(
        str | None, None, "--max-shard-size", help="Largest weight file, as 5GB.",
        show_default="an eighth of the model, 500MB at least, 5GB at most",
    )  # fmt: skip
    no_fsync: bool = _declared(
        bool, False, "--no-fsync", help="Do not wait until the result is on the disk."
    )
    seed: int | None = _declared(int | None, None, "--seed", help="Override the recipe's seed.")
    variant: str | None = _declared(
        VariantName | None, None, "--variant", help="An ablation or control, before the recipe's."
    )
    c_min: float | None = _declared(
        float | None, None, "--c-min", help="Least capacity of a layer, 0 to 1."
    )
    c_max: float | None = _declared(
        float | None, None, "--c-max", help="Largest capacity of a layer, 0 to 1."
    )
    scale: float | str | None = _declared(
        str | None, None, "--scale", callback=_number,
        help="Of the update: a number (0.6 is the paper's), or calibrated.",
    )  # fmt: skip
    allow_pickle: bool = _declared(
        bool, False, "--allow-pickle", help="Load pickled weights (weights-only)."
    )
    allow_nonfinite: bool = _declared(
        bool, False, "--allow-nonfinite", help="Let NaN and infinity in inputs pass."
    )
    trust_remote_code: bool = _declared(
        bool, False, "--trust-remote-code", help="Run Python code that checkpoints bring along."
    )
    strict: bool = _declared(
        bool, False, "--strict",
        help="A key that is passed over, a benchmark without data, or models whose configurations "
        "compute something else are an error, not a warning.",
    )  # fmt: skip
    rehash: bool = _declared(
        bool, False, "--rehash", help="Trust no digest of an earlier run; read every file."
    )
    reuse: bool = _declared(
        bool, False, "--reuse", callback=_reuse,
        help="Take cached results that another version of sigmerge or of a library made.",
    )  # fmt: skip
    device: Device | None = _declared(  # noqa: RUF009  (it is a field)
        Device | None, None, "--device", help="Where weights are merged and exemplars read."
    )
    engine: EngineKind = _declared(  # noqa: RUF009
        EngineKind, EngineKind.local, "--engine",
        help="What runs the blocks: threads here, or tasks of a Ray cluster.",
    )  # fmt: skip
    address: str | None = _declared(
        str | None, None, "--address",
        help="Of the Ray cluster, HOST:PORT or auto; else one is started.",
    )  # fmt: skip
    push: str | None = _declared(
        str | None, None, "--push", metavar="USER/NAME",
        help="Upload the finished, verified result to the hub under this name.",
    )  # fmt: skip
    private: bool = _declared(bool, False, "--private", help="With --push: a new model is private.")
    threads: int = _declared(int, 0, "--threads", min=0, help="Worker threads; 0: all cores.")
    dry_run: bool = _declared(
        bool, False, "--dry-run", help="Check everything, say what would be done, write nothing."
    )
    quiet: bool = _declared(bool, False, "-q", "--quiet", help="Print nothing but problems.")
    verbose: bool = _declared(
        bool, False, "-v", "--verbose",
        help="Also say what is cached and what is made, and where an error happened.",
    )  # fmt: skip
    as_json: bool = _declared(
        bool, False, "--json", help="Print one JSON object instead of text, errors too."
    )

    @property
    def changes(self) -> dict[str, Any]:
        """What the repair: section is changed to."""
        names = ("variant", "c_min", "c_max", "scale")
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}

    def load(self, file: Path, weights: bool = True) -> Recipe:
        """A recipe with the changes that flags make; without `weights` see jobs/hub.py."""
        from dataclasses import replace

        from sigmerge.recipe import load_recipe

        loaded = load_recipe(
            file, seed=self.seed, repair=self.changes, strict=self.strict, weights=weights
        )
        if self.device is None:
            return loaded
        shown_on = loaded.capture.model_copy(update={"device": self.device.value})
        return replace(loaded, capture=shown_on)

    def options(self, progress: Callable[[str, int, int], None]) -> Options:
        """The options of a job; 0 threads are all cores."""
        from sigmerge.engine.machine import default_threads
        from sigmerge.files.digests import rehash_from_now_on
        from sigmerge.jobs.options import Options

        if self.rehash:
            rehash_from_now_on()
        return Options(
            threads=self.threads or default_threads(),
            max_shard_size=self.max_shard_size,
            overwrite=self.overwrite,
            allow_pickle=self.allow_pickle,
            allow_nonfinite=self.allow_nonfinite,
            trust_remote_code=self.trust_remote_code,
            strict=self.strict,
            durable=not self.no_fsync,
            device="cuda" if self.device is Device.cuda else "cpu",
            progress=progress,
            engine=self.engine.value,
            address=self.address,
        )

    def run(self, job_of: Callable[[Options], Any], goes_on: bool = False) -> Any:
        """What a job did, or with --dry-run its plan; `goes_on`: interrupted, it can continue."""
        with show.progress(self.as_json or self.quiet) as bar:
            return show.do(job_of(self.options(bar)), self.dry_run, goes_on=goes_on)

    def over_hub(
        self, recipe: Recipe, job_of: Callable[[Recipe, Options], Any], made: Path
    ) -> Callable[[Options], Any]:
        """The job of a recipe without weights, which come from the hub where they are not here; the
        folder `made` by it goes there with --push."""
        from sigmerge.recipe.members import in_hub

        self.check_private()
        if self.push is None and not in_hub(recipe):
            return lambda how: job_of(recipe, how)
        from sigmerge.jobs.hub import HubJob, Push

        push = None if self.push is None else Push(self.push, self.private, made)
        return lambda how: HubJob(recipe, lambda one: job_of(one, how), how, push)

    def check_private(self) -> None:
        if self.private and self.push is None:
            raise click.BadParameter("--private belongs to --push; give both, or leave it out")

    def emit_made(self, done: Any, lines: Callable[[Any], Iterator[str]]) -> None:
        """Print what a job over the hub did."""
        if self.push is None or self.dry_run:
            self.emit(done, lines)
            return
        told = [*lines(done.made), f"uploaded: {done.address}"]
        made = {**show.plain(done.made), "uploaded": done.address}
        self.emit(made, lambda _: iter(told))

    def emit(self, content: Any, lines: Callable[[Any], Iterator[str]]) -> None:
        """Print a result, or the plan of a dry run."""
        if self.as_json or not self.quiet or self.dry_run:
            show.emit(content, self.as_json, lines)


PRINTING = ("quiet", "verbose", "as_json")
"""Every command takes these."""
WORKING = ("threads", "dry_run", "reuse")
READ = ("allow_pickle", "trust_remote_code")
WRITTEN = ("overwrite", "max_shard_size", "no_fsync")
PUSHED = ("push", "private")
CHANGED = ("seed", "variant", "c_min", "c_max", "scale", "strict")
PLACED = ("device", "engine", "address")
MERGED = (*WRITTEN, *CHANGED, *READ, "allow_nonfinite", "rehash", *PLACED, *WORKING)
"""Those of the commands that write weights of a recipe."""


def command(
    *taken: str, epilog: str, name: str | None = None, of: click.Group = app
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function whose `flags` are the shared options that it names."""
    known = {each.name: each for each in fields(Flags)}
    shared = [known[each] for each in (*dict.fromkeys(taken), *PRINTING)]

    def declared(function: Callable[..., None]) -> Callable[..., None]:
        called = _Command(function, shared)
        of.add_command(DeclaredCommand(called, name, epilog))
        return called

    return declared


class _Command:
    """A function with shared options in the place of its `flags`.

    What it takes is looked up when click asks: a process runs one command, and has dozens.
    """

    def __init__(self, function: Callable[..., None], shared: Sequence[Field[Any]]) -> None:
        self._function, self._shared = function, shared
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.__module__ = function.__module__

    @cached_property
    def __signature__(self) -> Signature:
        hints = get_type_hints(self._function, include_extras=True)
        taking = signature(self._function)
        own = [each for each in taking.parameters.values() if each.name != "flags"]
        kept = [e.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[e.name]) for e in own]
        more = [
            Parameter(
                each.name,
                Parameter.KEYWORD_ONLY,
                default=each.default,
                annotation=each.metadata["kind"],
            )
            for each in self._shared
        ]
        return taking.replace(parameters=[*kept, *more])

    def __call__(self, **given: Any) -> None:
        flags = Flags(**{each.name: given.pop(each.name) for each in self._shared})
        show.set_verbosity(flags.verbose)
        self._function(**given, flags=flags)
