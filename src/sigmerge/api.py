"""The verbs of the command line as functions: `sigmerge.merge(recipe, out)`, ….

A recipe is a YAML file, a mapping, or a `Recipe`. Every verb takes the fields of
`Options` as keywords (threads=4, overwrite=True, …) and shows a progress bar on a terminal and in a
notebook; pass `progress=` to replace it. Results are objects with attributes, which a notebook
displays as tables and figures; `as_json()` gives plain values.

The examples of this package run one after another beside `pool/`, the embedded pool, with

>>> import sigmerge
>>> experts = [{"model": "pool/math", "name": "math"}, {"model": "pool/coding", "name": "coding"}]
>>> recipe = {
...     "merge_method": "task_arithmetic",
...     "base_model": "pool/reference",
...     "models": experts,
...     "parameters": {"weight": 0.4},
...     "repair": {"shares": {"math": 0.5, "coding": 0.5}, "capacity": 0.2},
... }
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import CO_VARKEYWORDS
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, Unpack

from sigmerge.checkpoints.remote import place_of, target
from sigmerge.errors import RecipeError
from sigmerge.jobs.options import Keywords, Options
from sigmerge.jobs.steps import Description
from sigmerge.messages import shown as named
from sigmerge.messages import unknown
from sigmerge.progress import shown, silent
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.recipe.members import in_hub

if TYPE_CHECKING:
    from sigmerge.evaluation.run import Result
    from sigmerge.jobs.scores import ScoreFunction
    from sigmerge.lab.experiments.analyze import Analyzed
    from sigmerge.lab.experiments.anchors import Ranked
    from sigmerge.lab.experiments.runner import SuiteResult
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
        Retokenized,
        RunResult,
        SearchResult,
        TuneResult,
    )

RecipeLike = Recipe | str | PathLike[str] | Mapping[str, Any]
PathName = str | PathLike[str]
Made = TypeVar("Made")
Arguments = ParamSpec("Arguments")
_MadeHere = TypeVar("_MadeHere", covariant=True)


class Job(Protocol[_MadeHere]):
    def describe(self) -> Description: ...
    def run(self) -> _MadeHere: ...


class Verb(Protocol[Arguments, _MadeHere]):
    """A verb: a call does the job; `plan`, with the same arguments, describes it."""

    def __call__(self, *given: Arguments.args, **how: Arguments.kwargs) -> _MadeHere: ...

    def plan(self, *given: Arguments.args, **how: Arguments.kwargs) -> Description:
        """A dry run of the call: its steps, bytes, memory and evaluation calls.

        Makes every check that needs no tensor; writes nothing.
        """


def verb(job: Callable[Arguments, Job[Made]]) -> Verb[Arguments, Made]:
    """The verb that does the job which a function describes, with a progress bar."""
    reports = bool(job.__code__.co_flags & CO_VARKEYWORDS) or "progress" in (
        job.__kwdefaults__ or ()
    )

    @wraps(job)
    def call(*given: Arguments.args, **how: Arguments.kwargs) -> Made:
        if not reports:
            return job(*given, **how).run()
        with shown(how.get("progress")) as bar:  # type: ignore[arg-type]
            return job(*given, **{**how, "progress": bar}).run()  # type: ignore[arg-type]

    def plan(*given: Arguments.args, **how: Arguments.kwargs) -> Description:
        return job(*given, **how).describe()

    call.plan = plan  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


@verb
def merge(recipe: RecipeLike, out: PathName, **how: Unpack[Keywords]) -> Job[Merged]:
    """Merge as the recipe says into a new folder; repair it if the recipe has a repair: section.

    >>> done = sigmerge.merge({**recipe, "repair": None}, "merged")
    >>> done.plan.operator, done.provenance.bytes_written
    ('task_arithmetic', 2823936)
    """
    from sigmerge.jobs.merge import MergeJob
    from sigmerge.recipe.documents import several

    if isinstance(recipe, str | PathLike) and several(Path(recipe).expanduser()):
        raise RecipeError(
            f"{recipe}: holds several recipes; sigmerge.merge_several(file, out) merges each."
        )
    options = _options(how)
    return _over_hub(recipe, lambda one: MergeJob(one, target(out), options), options)


@verb
def moe(
    recipe: str | PathLike[str] | Mapping[str, Any],
    out: PathName,
    *,
    seed: int | None = None,
    **how: Unpack[Keywords],
) -> Job[Merged]:
    """Dense models as the experts of one mixture, in a new folder.

    A file or a mapping as mergekit-moe takes it. `seed` goes before what it says.

    >>> done = sigmerge.moe(
    ...     {
    ...         "base_model": "pool/reference",
    ...         "gate_mode": "random",
    ...         "experts": [{"source_model": "pool/math"}, {"source_model": "pool/coding"}],
    ...     },
    ...     "mixture",
    ... )
    >>> done.plan.operator, list(done.plan.experts)
    ('moe', ['base', 'math', 'coding'])
    """
    from sigmerge.jobs.moe import MoeJob
    from sigmerge.recipe.moe import load_mixture

    options = _options(how)
    return MoeJob(load_mixture(recipe, seed=seed, strict=options.strict), target(out), options)  # type: ignore[arg-type]


@verb
def tokens(
    model: PathName,
    donor: PathName,
    out: PathName,
    *,
    method: Literal["omp", "knn", "mean", "zero", "random", "subword"] = "omp",
    k: int = 64,
    metric: Literal["euclidean", "cosine"] = "euclidean",
    weights: Literal["distance", "barycentric", "least_squares"] = "distance",
    subword: Literal["mean", "sum", "weighted_mean", "first_last"] = "mean",
    scale: float = 1.0,
    seed: int = 0,
    text: PathName | None = None,
    **how: Unpack[Keywords],
) -> Job[Retokenized]:
    """A model with the tokenizer of another, its donor.

    Rows of tokens that both have are moved; others are formed by `method`, from at most `k` rows.
    Both models read the lines of `text`, a file: `Retokenized.text` has their bits per byte.

    >>> done = sigmerge.tokens("pool/math", "pool/reference", "moved", method="mean")
    >>> done.plan.operator, list(done.plan.experts)
    ('passthrough', ['math'])
    """
    from sigmerge.jobs.tokens import TokensJob
    from sigmerge.recipe.tokenizers import tokens_recipe

    options, read = _options(how), None if text is None else Path(text)
    missing = {"method": method, "k": k, "metric": metric, "weights": weights,
               "subword": subword, "scale": scale}  # fmt: skip
    recipe = tokens_recipe(model, donor, missing, seed)
    return _over_hub(recipe, lambda one: TokensJob(one, target(out), options, read), options)


@verb
def merge_several(
    file: PathName, out: PathName, **how: Unpack[Keywords]
) -> Job[tuple[Merged, ...]]:
    """Merge every recipe of a file of several, each into the folder of its name in `out`.

    The results come in the order in which they were made: one may merge what another made.

    >>> text = "name: half\\nmerge_method: linear\\nmodels: [{model: pool/math}]\\n"
    >>> _ = Path("several.yaml").write_text(text + "---\\n" + text.replace("half", "whole"))
    >>> [Path(done.out).name for done in sigmerge.merge_several("several.yaml", "several")]
    ['half', 'whole']
    """
    from sigmerge.jobs.multi_recipe import SeveralJob
    from sigmerge.recipe.documents import several

    place = Path(file).expanduser()
    if not several(place):
        raise RecipeError(f"{file}: holds one recipe; sigmerge.merge(file, out) merges it.")
    strict = how.get("strict", False)
    return SeveralJob(place, Path(out), _options(how), strict=strict)


@verb
def capture(
    recipe: RecipeLike,
    *,
    experts: Sequence[str] = (),
    out: PathName | None = None,
    **how: Unpack[Keywords],
) -> Job[Captures]:
    """Measure the statistics that the recipe's operator needs, of these experts or all.

    >>> shown = [{**one, "exemplars": f"pool/exemplars/{one['name']}.jsonl"} for one in experts]
    >>> reading = {**recipe, "merge_method": "regmean", "models": shown, "repair": None}
    >>> sigmerge.capture.plan(reading).steps[0].expert
    'math'
    """
    from sigmerge.jobs.capture import CaptureJob

    folder = Path(out) if out is not None else None
    return CaptureJob(_recipe(recipe), _options(how), experts, folder)


@verb
def profile(recipe: RecipeLike, **how: Unpack[Keywords]) -> Job[Profile]:
    """Measure views, conflict and capacity per layer of the recipe's pool.

    >>> found = sigmerge.profile({**recipe, "repair": {"variant": "view_sign"}})
    >>> [round(each, 2) for each in found.capacity]
    [0.24, 0.2, 0.45, 0.13, 0.29, 0.13]
    """
    from sigmerge.jobs.profile import ProfileJob

    return ProfileJob(_recipe(recipe), _options(how))


@verb
def deficits(
    recipe: RecipeLike,
    *,
    anchor: PathName | None = None,
    score: ScoreFunction | None = None,
    **how: Unpack[Keywords],
) -> Job[Deficits]:
    """Measure the deficit of a stored anchor on every domain, and the shares that follow.

    `score` is a callable from a checkpoint folder to {domain: fraction}.

    >>> def score(checkpoint):
    ...     lost = 0.4 if checkpoint.name == "merged" else 0.0
    ...     return {"math": 0.9 - lost, "coding": 0.8 - lost / 4}
    >>> lost = sigmerge.deficits({**recipe, "repair": {}}, anchor="merged", score=score)
    >>> {domain: round(each, 2) for domain, each in lost.share.items()}
    {'math': 0.8, 'coding': 0.2}
    """
    from sigmerge.jobs.repair import DeficitsJob

    stored = place_of(anchor) if anchor is not None else None
    return DeficitsJob(_recipe(recipe), _options(how), stored, score)


@verb
def repair(
    recipe: RecipeLike,
    out: PathName,
    *,
    anchor: PathName | None = None,
    score: ScoreFunction | None = None,
    **how: Unpack[Keywords],
) -> Job[Merged]:
    """Repair a stored anchor as the recipe's repair: section says, into a new folder.

    `score` is a callable from a checkpoint folder to {domain: fraction}; it replaces the recipe's
    own source of scores.

    >>> done = sigmerge.repair(recipe, "repaired", anchor="merged")
    >>> done.repair.order
    ('math', 'coding')
    """
    from sigmerge.jobs.repair import RepairJob

    stored = place_of(anchor) if anchor is not None else None
    options, place = _options(how), target(out)
    return _over_hub(recipe, lambda one: RepairJob(one, place, options, stored, score), options)


@verb
def replay(
    plan: PathName, out: PathName, *, anchor: PathName | None = None, **how: Unpack[Keywords]
) -> Job[Merged]:
    """Make the repair of a plan.json again, byte for byte. It needs no scores and no probe.

    >>> again = sigmerge.replay("repaired/sigmerge/plan.json", "again", anchor="merged")
    >>> again.repair.order
    ('math', 'coding')
    """
    from sigmerge.jobs.replay import ReplayJob

    stored = place_of(anchor) if anchor is not None else None
    return ReplayJob(Path(plan), target(out), _options(how), stored)


@verb
def run(
    recipe: RecipeLike,
    out: PathName,
    *,
    score: ScoreFunction | None = None,
    **how: Unpack[Keywords],
) -> Job[RunResult]:
    """Merge, score, repair, score again and write a page, in a folder of its own.

    >>> probed = {**recipe, "repair": {"probe": "pool/probe.jsonl"}}
    >>> [step.name for step in sigmerge.run.plan(probed, "run", score=score).steps]
    ['merge', 'score', 'profile', 'repair', 'score']
    """
    from sigmerge.jobs.run import RunJob

    options = _options(how)
    return _over_hub(recipe, lambda one: RunJob(one, Path(out), options, score), options)


@verb
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
) -> Job[SearchResult]:
    """Search the coefficients of a merge by evolution (MERGE³) and store the winner.

    The keywords go before the recipe's search: section; `scorer` replaces the suite.

    >>> sigmerge.search.plan({**recipe, "repair": None}, "found", calls=48).evaluation_calls
    48
    """
    from sigmerge.jobs.search import SearchRun
    from sigmerge.recipe.scored import SearchSection

    loaded = _recipe(recipe)
    settings = (loaded.search or SearchSection()).changed(
        population=population, generations=generations, calls=calls, items=items,
        estimator=estimator, extraction=extraction,
    )  # fmt: skip
    return SearchRun(loaded, Path(out), _options(how), settings, suite, scorer)


@verb
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
) -> Job[TuneResult]:
    """Find the strongest merge of a pool within a number of evaluation calls, and store it.

    `recipe` may be a folder with reference/ and the experts. The keywords go before the recipe's
    tune: section; `score` (a callable from a checkpoint folder to {domain: fraction}) or `scorer`
    (one that answers items) replaces its source of scores.

    >>> sigmerge.tune.plan("pool", "tuned", calls=8).evaluation_calls
    8
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
    return TuneJob(loaded, Path(out), _options(how), settings, score, scorer)


@verb
def demo(out: PathName = "demo-out", *, calls: int = 8, **how: Unpack[Keywords]) -> Job[DemoResult]:
    """Merge and repair the embedded pool with every anchor, then tune it; 0 calls: no tuning.

    >>> sigmerge.demo.plan("demo-out", calls=0).evaluation_calls > 50
    True
    """
    from sigmerge.jobs.demo import DemoJob

    return DemoJob(Path(out), _options(how), calls)


@verb
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
) -> Job[Result]:
    """Score a checkpoint on a suite. Cached items are not scored again.

    `out` is a file for the result, `answers` one for the model's answer to every item.

    >>> sigmerge.evaluate.plan("merged", "nano").evaluation_calls
    1
    """
    from sigmerge.evaluation.how import How
    from sigmerge.evaluation.sources import Data
    from sigmerge.jobs.evaluate import EvaluateJob

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
        progress=progress or silent,
        strict=strict,
        answers=_path(answers),
        announce=announce or (lambda estimate: None),
    )
    return EvaluateJob(Path(checkpoint), suite, split, how, _path(out))


def aggregate(
    files: Sequence[PathName], experts: Mapping[str, PathName] | None = None
) -> Aggregated:
    """Put result files of `evaluate` side by side, with the gaps to the experts.

    >>> _ = sigmerge.evaluate("merged", "nano", limit=2, out="merged.json")
    >>> [Path(row.file).name for row in sigmerge.aggregate(["merged.json"]).rows]
    ['merged.json']
    """
    from sigmerge.jobs.aggregate import aggregate as put_together

    named = {name: Path(file) for name, file in (experts or {}).items()}
    return put_together([Path(file) for file in files], named)


@verb
def suite(
    source: PathName | Mapping[str, Any],
    out: PathName,
    *,
    pools: Sequence[PathName] = (),
    jobs: int = 1,
    **how: Unpack[Keywords],
) -> Job[SuiteResult]:
    """Run pools × anchors × settings of a suite into one store; continues an interrupted one.

    `pools` are folders that take the place of the suite's own. `jobs` processes make the runs; more
    than one need a script that is guarded by `if __name__ == "__main__":`.

    >>> sigmerge.suite.plan("nano-study", "study").steps[0].runs
    145
    """
    from sigmerge.lab.experiments.runner import SuiteJob
    from sigmerge.lab.experiments.suite import load_suite

    loaded = load_suite(_source(source), [Path(pool) for pool in pools])
    return SuiteJob(loaded, Path(out), _options(how), jobs)


@verb
def analyze(
    store: PathName,
    out: PathName | None = None,
    *,
    split: str = "evaluation",
    title: str = "The experiment",
) -> Job[Analyzed]:
    """Write statistics, tables and figures of a store; say which of the paper's statements hold.

    >>> sigmerge.analyze("study")
    Traceback (most recent call last):
    sigmerge.lab.experiments.store.StoreError: study: no such store of results; ...
    """
    from sigmerge.lab.experiments.analyze import AnalyzeJob

    return AnalyzeJob(Path(store), _path(out), split, title)


@verb
def anchors(
    source: PathName, *, pools: Sequence[PathName] = (), **how: Unpack[Keywords]
) -> Job[Ranked]:
    """Rank the anchors of a suite, or the paper's seven on a recipe's pool, before any repair.

    >>> sigmerge.anchors.plan("nano-compare").evaluation_calls
    12
    """
    from sigmerge.lab.experiments.anchors import AnchorsJob, suite_of

    chosen = suite_of(str(source), tuple(Path(pool) for pool in pools))
    return AnchorsJob(chosen, _options(how))


def report(folder: PathName) -> Path:
    """Write the page of a result again, from its records: of a run, a tuning, a merge, a repair.

    >>> print(sigmerge.report("merged").as_posix())
    merged/sigmerge/report.html
    """
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

    `blocks` is how many are drawn by the `seed`, None all; without a seed they differ each time.

    >>> sigmerge.verify("merged").ok
    True
    """
    from sigmerge.jobs.verify import VerifyJob

    with shown(how.get("progress")) as bar:
        options = _options({**how, "progress": bar})
        return VerifyJob(Path(folder), options, deep, blocks, seed).run()


@verb
def extract(
    model: PathName,
    out: PathName,
    *,
    base: PathName,
    rank: int | None = None,
    energy: float | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    save: Sequence[str] = (),
    **how: Unpack[Keywords],
) -> Job[Extracted]:
    """Write the difference of a model and its base as a LoRA adapter in PEFT's format.

    The largest singular values of each matrix of the layers: `rank` of them, 16 if nothing is said,
    or as few as keep `energy`, a part of the squared norm. `include` and `exclude` are regular
    expressions for names of modules; those in `save` are stored whole.

    >>> done = sigmerge.extract("pool/math", "adapter", base="pool/reference", rank=4)
    >>> done.modules, done.rank
    (42, 4)
    """
    from sigmerge.jobs.extract import ExtractJob, Wanted

    folders = Path(model), Path(base), Path(out)
    wanted = Wanted(tuple(include), tuple(exclude), tuple(save))
    return ExtractJob(*folders, _options(how), rank, energy, wanted)


def inspect(checkpoint: PathName, *others: PathName, allow_pickle: bool = False) -> Inspected:
    """Describe a checkpoint, or model+adapter, from its headers and configuration. Reads no tensor.

    With others: `warnings` has what their configurations compute otherwise. A folder with
    reference/ and the experts stands for all of them.

    >>> found = sigmerge.inspect("pool/math")
    >>> found.layers, found.parameters
    (6, 1408896)
    """
    from sigmerge.jobs.inspect import inspect_checkpoints

    folders = [Path(each) for each in (checkpoint, *others)]
    return inspect_checkpoints(folders, Options(allow_pickle=allow_pickle))


def diff(one: PathName, other: PathName, **how: Unpack[Keywords]) -> ModelDifference:
    """The distance of two checkpoints, layer by layer. Writes nothing.

    >>> parts = sigmerge.diff("pool/reference", "pool/math").parts
    >>> parts[0].name, parts[0].changed > 0
    ('layer 0', True)
    """
    from sigmerge.jobs.inspect import DiffJob

    with shown(how.get("progress")) as bar:
        return DiffJob(Path(one), Path(other), _options({**how, "progress": bar})).run()


def _recipe(recipe: RecipeLike, weights: bool = True) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return load_recipe(recipe, weights=weights)
    if isinstance(recipe, str | PathLike):
        return load_recipe(Path(recipe), weights=weights)
    raise TypeError(
        f"{named(recipe)} is no recipe; give a YAML file's path, a mapping, or a Recipe"
    )


def _over_hub(
    recipe: RecipeLike, job_of: Callable[[Recipe], Job[Made]], options: Options
) -> Job[Made]:
    """The job of a recipe, whose models of the hub are downloaded when their headers are right."""
    loaded = _recipe(recipe, weights=False)
    if not in_hub(loaded):
        return job_of(loaded)
    from sigmerge.jobs.hub import HubJob

    return HubJob(loaded, job_of, options)


def _source(source: PathName | Mapping[str, Any]) -> str | Mapping[str, Any]:
    return source if isinstance(source, Mapping) else str(source)


def _path(name: PathName | None) -> Path | None:
    return Path(name) if name is not None else None


def _options(how: Keywords) -> Options:
    for name in how:
        if name not in Keywords.__annotations__:
            raise TypeError(unknown("option", name, Keywords.__annotations__))
    return Options(**how)
