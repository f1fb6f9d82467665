"""The verbs of the command line as functions: `sigmerge.merge(recipe, out)`, ….

A recipe is a YAML file, a mapping, or what `load_recipe` returned. Every verb takes the fields of
`Options` as keywords (threads=4, overwrite=True, …) and shows a progress bar on a terminal and in a
notebook; pass `progress=` to replace it. Results are objects with attributes, which a notebook
displays as tables and figures; `as_json()` gives plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, Unpack

from sigmerge.checkpoints.remote import place_of, target
from sigmerge.errors import RecipeError
from sigmerge.jobs.options import Description, Keywords, Options
from sigmerge.progress import shown
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.words import shown as named
from sigmerge.words import unknown

if TYPE_CHECKING:
    from sigmerge.evaluation.run import Result
    from sigmerge.experiments.analyze import Analyzed
    from sigmerge.experiments.anchors import Ranked
    from sigmerge.experiments.runner import SuiteResult
    from sigmerge.jobs.scores import ScoreFunction
    from sigmerge.merge3.scoring import CandidateScorer
    from sigmerge.results import (
        Aggregated,
        Captures,
        Deficits,
        DemoResult,
        Extracted,
        Inspected,
        Merged,
        ModelDifference,
        Profile,
        Reports,
        RunResult,
        SearchResult,
        TuneResult,
    )

RecipeLike = Recipe | str | PathLike[str] | Mapping[str, Any]
PathName = str | PathLike[str]
_Made = TypeVar("_Made")
_MadeHere = TypeVar("_MadeHere", covariant=True)
_Given = ParamSpec("_Given")
_DESCRIBING: ContextVar[bool] = ContextVar("describing", default=False)


class _Job(Protocol[_MadeHere]):
    def describe(self) -> Description: ...
    def run(self) -> _MadeHere: ...


class _Described(Exception):
    """Carries the description of a job out of its verb."""

    def __init__(self, description: Description) -> None:
        self.description = description


def merge(recipe: RecipeLike, out: PathName, **how: Unpack[Keywords]) -> Merged:
    """Merge as the recipe says into a new folder; repair it if the recipe has a repair: section."""
    from sigmerge.jobs.merge import MergeJob
    from sigmerge.recipe.documents import several

    if isinstance(recipe, str | PathLike) and several(Path(recipe).expanduser()):
        raise RecipeError(
            f"{recipe}: holds several recipes; sigmerge.merge_several(file, out) merges each."
        )
    return _with_progress(how, lambda o: _done(MergeJob(_recipe(recipe), target(out), o)))


def merge_several(file: PathName, out: PathName, **how: Unpack[Keywords]) -> tuple[Merged, ...]:
    """Merge every recipe of a file of several, each into the folder of its name in `out`.

    The results come in the order in which they were made: one may merge what another made.
    """
    from sigmerge.jobs.several import SeveralJob
    from sigmerge.recipe.documents import several

    place = Path(file).expanduser()
    if not several(place):
        raise RecipeError(f"{file}: holds one recipe; sigmerge.merge(file, out) merges it.")
    strict = how.get("strict", False)
    return _with_progress(how, lambda o: _done(SeveralJob(place, Path(out), o, strict=strict)))


def capture(
    recipe: RecipeLike,
    *,
    experts: Sequence[str] = (),
    out: PathName | None = None,
    **how: Unpack[Keywords],
) -> Captures:
    """Measure the statistics that the recipe's operator needs, of these experts or all."""
    from sigmerge.jobs.capture import CaptureJob

    folder = Path(out) if out is not None else None
    return _with_progress(how, lambda o: _done(CaptureJob(_recipe(recipe), o, experts, folder)))


def profile(recipe: RecipeLike, **how: Unpack[Keywords]) -> Profile:
    """Measure views, conflict and capacity per layer of the recipe's pool."""
    from sigmerge.jobs.profile import ProfileJob

    return _with_progress(how, lambda o: _done(ProfileJob(_recipe(recipe), o)))


def deficits(
    recipe: RecipeLike,
    *,
    anchor: PathName | None = None,
    score: ScoreFunction | None = None,
    **how: Unpack[Keywords],
) -> Deficits:
    """Measure what a stored anchor lost on every domain, and the shares that gives.

    `score` is a callable from a checkpoint folder to {domain: fraction}.
    """
    from sigmerge.jobs.repair import DeficitsJob

    stored = place_of(anchor) if anchor is not None else None
    return _with_progress(how, lambda o: _done(DeficitsJob(_recipe(recipe), o, stored, score)))


def repair(
    recipe: RecipeLike,
    out: PathName,
    *,
    anchor: PathName | None = None,
    score: ScoreFunction | None = None,
    **how: Unpack[Keywords],
) -> Merged:
    """Repair a stored anchor as the recipe's repair: section says, into a new folder.

    `score` is a callable from a checkpoint folder to {domain: fraction}; it replaces the recipe's
    own source of scores.
    """
    from sigmerge.jobs.repair import RepairJob

    stored = place_of(anchor) if anchor is not None else None
    return _with_progress(
        how, lambda o: _done(RepairJob(_recipe(recipe), target(out), o, stored, score))
    )


def replay(
    plan: PathName, out: PathName, *, anchor: PathName | None = None, **how: Unpack[Keywords]
) -> Merged:
    """Make the repair of a plan.json again, byte for byte. It needs no scores and no probe."""
    from sigmerge.jobs.replay import ReplayJob

    stored = place_of(anchor) if anchor is not None else None
    return _with_progress(how, lambda o: _done(ReplayJob(Path(plan), target(out), o, stored)))


def run(
    recipe: RecipeLike,
    out: PathName,
    *,
    score: ScoreFunction | None = None,
    **how: Unpack[Keywords],
) -> RunResult:
    """Merge, score, repair, score again and write a page, in a folder of its own."""
    from sigmerge.jobs.run import RunJob

    return _with_progress(how, lambda o: _done(RunJob(_recipe(recipe), Path(out), o, score)))


def search(
    recipe: RecipeLike,
    out: PathName,
    *,
    suite: str | None = None,
    scorer: CandidateScorer | None = None,
    population: int | None = None,
    generations: int | None = None,
    calls: int | None = None,
    items: int | None = None,
    estimator: str | None = None,
    extraction: str | None = None,
    **how: Unpack[Keywords],
) -> SearchResult:
    """Search the coefficients of a merge by evolution (MERGE³) and store the winner.

    The keywords go before the recipe's search: section; `scorer` replaces the suite.
    """
    from sigmerge.jobs.search import SearchRun
    from sigmerge.recipe.scored import SearchSection

    loaded = _recipe(recipe)
    settings = (loaded.search or SearchSection()).changed(
        population=population, generations=generations, calls=calls, items=items,
        estimator=estimator, extraction=extraction,
    )  # fmt: skip
    return _with_progress(
        how, lambda o: _done(SearchRun(loaded, Path(out), o, settings, suite, scorer))
    )


def tune(
    recipe: RecipeLike,
    out: PathName,
    *,
    calls: int | None = None,
    anchors: Sequence[str] | None = None,
    method: Literal["guided", "random", "merge3", "adamerging"] | None = None,
    objective: Literal["mean", "worst", "weighted"] | None = None,
    weights: Mapping[str, float] | None = None,
    floors: Mapping[str, float] | None = None,
    score: ScoreFunction | None = None,
    scorer: CandidateScorer | None = None,
    **how: Unpack[Keywords],
) -> TuneResult:
    """Find the strongest merge of a pool within a number of evaluation calls, and store it.

    `recipe` may be a folder with reference/ and the experts. The keywords go before the recipe's
    tune: section; `score` (a callable from a checkpoint folder to {domain: fraction}) or `scorer`
    (one that answers items) replaces its source of scores.
    """
    from sigmerge.jobs.tune import TuneJob, pool_recipe
    from sigmerge.recipe.scored import TuneSection

    folder = isinstance(recipe, str | PathLike) and Path(recipe).is_dir()
    loaded = pool_recipe(Path(recipe)) if folder else _recipe(recipe)  # type: ignore[arg-type]
    settings = (loaded.tune or TuneSection()).changed(
        calls=calls, anchors=list(anchors) if anchors is not None else None, method=method,
        objective=objective, weights=dict(weights) if weights is not None else None,
        floors=dict(floors) if floors is not None else None,
    )  # fmt: skip
    return _with_progress(
        how, lambda o: _done(TuneJob(loaded, Path(out), o, settings, score, scorer))
    )


def demo(out: PathName = "demo-out", *, calls: int = 8, **how: Unpack[Keywords]) -> DemoResult:
    """Merge and repair the embedded pool with every anchor, then tune it; 0 calls: no tuning."""
    from sigmerge.jobs.demo import DemoJob

    return _with_progress(how, lambda o: _done(DemoJob(Path(out), o, calls)))


def evaluate(
    checkpoint: PathName,
    suite: str = "mergebench",
    split: Literal["calibration", "evaluation", "all"] = "calibration",
    *,
    data: PathName | None = None,
    hub: bool = False,
    splits: PathName | None = None,
    limit: int | None = None,
    only: Sequence[str] = (),
    backend: str = "hf",
    dtype: str = "auto",
    batch_size: int | None = None,
    judge: str | None = None,
    allow_code: bool = False,
    trust_remote_code: bool = False,
    strict: bool = False,
    out: PathName | None = None,
    answers: PathName | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    announce: Callable[[Mapping[str, Any]], None] | None = None,
) -> Result:
    """Score a checkpoint on a suite. Items that were scored before are not scored again.

    `out` is a file for the result, `answers` one for what the model said to every item.
    """
    from sigmerge.evaluation.how import How
    from sigmerge.evaluation.sources import Data
    from sigmerge.jobs.evaluate import EvaluateJob

    with shown(progress) as bar:
        how = How(
            data=Data.default(_path(data), hub),
            splits=_path(splits),
            limit=limit,
            only=tuple(only),
            backend=backend,
            dtype=dtype,
            batch_size=batch_size,
            judge=judge,
            allow_code=allow_code,
            trust_remote_code=trust_remote_code,
            progress=bar,
            strict=strict,
            answers=_path(answers),
            announce=announce or (lambda estimate: None),
        )
        return _done(EvaluateJob(Path(checkpoint), suite, split, how, _path(out)))


def aggregate(
    files: Sequence[PathName], experts: Mapping[str, PathName] | None = None
) -> Aggregated:
    """Put result files of `evaluate` side by side, with the gaps to the experts."""
    from sigmerge.jobs.aggregate import aggregate as put_together

    named = {name: Path(file) for name, file in (experts or {}).items()}
    return put_together([Path(file) for file in files], named)


def suite(
    source: PathName | Mapping[str, Any],
    out: PathName,
    *,
    pools: Sequence[PathName] = (),
    jobs: int = 1,
    **how: Unpack[Keywords],
) -> SuiteResult:
    """Run pools × anchors × settings of a suite into one store, and go on where it stopped.

    `pools` are folders that take the place of the suite's own. `jobs` processes make the runs; more
    than one need a script that is guarded by `if __name__ == "__main__":`.
    """
    from sigmerge.experiments.runner import SuiteJob
    from sigmerge.experiments.suite import load_suite

    loaded = load_suite(_source(source), [Path(pool) for pool in pools])
    return _with_progress(how, lambda o: _done(SuiteJob(loaded, Path(out), o, jobs)))


def analyze(
    store: PathName,
    out: PathName | None = None,
    *,
    split: str = "evaluation",
    title: str = "The experiment",
) -> Analyzed:
    """Write statistics, tables and figures of a store; say which of the paper's statements hold."""
    from sigmerge.experiments.analyze import AnalyzeJob

    return _done(AnalyzeJob(Path(store), _path(out), split, title))


def anchors(source: PathName, *, pools: Sequence[PathName] = (), **how: Unpack[Keywords]) -> Ranked:
    """Rank the anchors of a suite, or the paper's seven on a recipe's pool, before any repair."""
    from sigmerge.experiments.anchors import AnchorsJob, suite_of

    chosen = suite_of(str(source), tuple(Path(pool) for pool in pools))
    return _with_progress(how, lambda o: _done(AnchorsJob(chosen, o)))


def report(folder: PathName) -> Path:
    """Write the page of a finished run again, from its records."""
    from sigmerge.jobs.report import write_report

    return write_report(Path(folder))


def verify(
    folder: PathName,
    *,
    deep: bool = False,
    blocks: int | None = 4,
    seed: int | None = None,
    **how: Unpack[Keywords],
) -> Reports:
    """Check a result against its records; with `deep` compute blocks again from the inputs.

    So many `blocks` are drawn by the `seed`; None are all of them, and another seed each time.
    """
    from sigmerge.jobs.verify import VerifyJob

    return _with_progress(how, lambda o: VerifyJob(Path(folder), o, deep, blocks, seed).run())


def extract(
    model: PathName,
    out: PathName,
    *,
    base: PathName,
    rank: int | None = None,
    energy: float | None = None,
    **how: Unpack[Keywords],
) -> Extracted:
    """What a model learnt beyond its base, as a LoRA adapter in PEFT's format.

    The largest singular values of each matrix of the layers: `rank` of them, 16 if nothing is said,
    or as few as keep `energy`, a part of the squared norm.
    """
    from sigmerge.jobs.extract import ExtractJob

    folders = Path(model), Path(base), Path(out)
    return _with_progress(how, lambda o: _done(ExtractJob(*folders, o, rank, energy)))


def inspect(checkpoint: PathName, *others: PathName, allow_pickle: bool = False) -> Inspected:
    """What the headers and texts of a checkpoint, or of model+adapter, say. Reads no tensor.

    With others: `warnings` has what their configurations compute otherwise. A folder with
    reference/ and the experts stands for all of them.
    """
    from sigmerge.jobs.look import inspect_checkpoints

    folders = [Path(each) for each in (checkpoint, *others)]
    return inspect_checkpoints(folders, Options(allow_pickle=allow_pickle))


def diff(one: PathName, other: PathName, **how: Unpack[Keywords]) -> ModelDifference:
    """How far two checkpoints are apart, layer by layer. Nothing is written."""
    from sigmerge.jobs.look import DiffJob

    return _with_progress(how, lambda o: DiffJob(Path(one), Path(other), o).run())


def describe(
    verb: Callable[_Given, object], /, *given: _Given.args, **how: _Given.kwargs
) -> Description:
    """What a call of a verb would do, `describe(merge, recipe, out)`: a dry run.

    Everything is checked that can be checked before a tensor is read; nothing is written.
    """
    if verb not in DESCRIBED:
        names = ", ".join(each.__name__ for each in DESCRIBED)
        given_name = getattr(verb, "__name__", verb)
        raise TypeError(f"{given_name} is no verb with a description; {names} are")
    before = _DESCRIBING.set(True)
    try:
        verb(*given, **how)
    except _Described as carried:
        return carried.description
    finally:
        _DESCRIBING.reset(before)
    raise AssertionError(f"{verb} ran no job")


DESCRIBED: tuple[Callable[..., object], ...] = (
    merge, merge_several, capture, profile, deficits, repair, replay, run, search, tune, demo,
    evaluate, suite, analyze, anchors, extract,
)  # fmt: skip
"""The verbs whose jobs can be described: all that write, but for one file from another."""


def _recipe(recipe: RecipeLike) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return load_recipe(recipe)
    if isinstance(recipe, str | PathLike):
        return load_recipe(Path(recipe))
    raise TypeError(
        f"{named(recipe)} is no recipe; give a YAML file's path, a mapping, or what load_recipe "
        "returned"
    )


def _source(source: PathName | Mapping[str, Any]) -> str | Mapping[str, Any]:
    return source if isinstance(source, Mapping) else str(source)


def _path(name: PathName | None) -> Path | None:
    return Path(name) if name is not None else None


def _with_progress(how: Keywords, job: Callable[[Options], _Made]) -> _Made:
    """Run a job with the options that `how` names, and with a progress bar unless it names one."""
    for name in how:
        if name not in Keywords.__annotations__:
            raise TypeError(unknown("option", name, Keywords.__annotations__))
    with shown(how.get("progress")) as bar:
        return job(replace(Options(**how), progress=bar))


def _done(job: _Job[_Made]) -> _Made:
    """Run a job; inside `describe`, hand its description over instead."""
    if _DESCRIBING.get():
        raise _Described(job.describe())
    return job.run()
