"""MERGE³: the coefficients of a merge found by evolution on a few items.

    OUT/search.jsonl   every answer, genotype and estimate, a line each
    OUT/winner/        the best candidate, an ordinary merge with the recipe that makes it
    OUT/search.json    the record of the search; written last

The candidates of a generation are merged and scored side by side, one thread each, as many at a
time as memory holds; whatever that number is, the history is the same. All answers are kept
(`sigmerge.kept`): an interrupted search goes on where it stopped when the same command is run
again, and a finished one is extended by more calls.

A recipe with a `search:` section is searched by `sigmerge merge` and `run` as well: the winner is
the merge, and the search's own files lie in its sigmerge/ folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sigmerge import kept
from sigmerge.checkpoints.declared import checkpoint_files
from sigmerge.checkpoints.folder import RECORDS_FOLDER
from sigmerge.checkpoints.publishing import only_target, publish, real_target
from sigmerge.checkpoints.source import PoolSource
from sigmerge.engine.machine import LIBRARIES, Meter, free_memory
from sigmerge.engine.workers import Workers
from sigmerge.errors import OutputError, RecipeError, ScoreError
from sigmerge.evaluation.scored_by import ScoredBy
from sigmerge.files.digests import file_digests
from sigmerge.files.documents import content_key, write_lines
from sigmerge.files.safe_open import remove
from sigmerge.jobs.candidates import (
    CandidateOf,
    SameInputs,
    candidate_of,
    pool_files,
    scored_by,
)
from sigmerge.jobs.dense import DenseJob, merge_blocks, plan_dense, run_dense
from sigmerge.jobs.options import Options
from sigmerge.jobs.scores import BY, is_still
from sigmerge.jobs.steps import Description, SearchStep
from sigmerge.jobs.work_folder import WINNER, WorkFolder, hidden, list_records
from sigmerge.kept import Derivation, Given, Inputs, NotToKeep
from sigmerge.merge3.candidate import Memory, Weights, stored_weights
from sigmerge.merge3.evolve import ScoredGenotype, best, evolve, require_search
from sigmerge.operators.table import operator
from sigmerge.progress import silent
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.recipe.scored import SearchSection
from sigmerge.recipe.space import Genotype, Space, space_of
from sigmerge.recipe.template import Template, candidate_seed, template
from sigmerge.records import (
    PLAN,
    Winner,
    read_plan,
)
from sigmerge.results import Merged, SearchResult

if TYPE_CHECKING:
    from sigmerge.merge3.estimate import ItemModel
    from sigmerge.merge3.extract import Question
    from sigmerge.merge3.models import Answers
    from sigmerge.merge3.scoring import CandidateScorer

RESPONDENTS: tuple[tuple[str, dict[str, float]], ...] = (
    ("linear", {"weight": 1.0}),
    ("task_arithmetic", {"weight": 0.4}),
    ("task_arithmetic", {"weight": 0.7}),
    ("task_arithmetic", {"weight": 1.0}),
    ("ties", {"weight": 1.0, "density": 0.2}),
    ("ties", {"weight": 1.0, "density": 0.5}),
    ("dare_linear", {"weight": 0.4, "density": 0.5}),
    ("dare_ties", {"weight": 1.0, "density": 0.2}),
    ("dare_ties", {"weight": 1.0, "density": 0.5}),
)
"""Plain merges that also answer all items: the endpoints are too few to fit item parameters."""

SEARCH_LOG, SEARCH_RESULT, ORIGIN = "search.jsonl", "search.json", "searched.yaml"
SEARCH_FOLDER = WorkFolder("search", (SEARCH_LOG, SEARCH_RESULT), (WINNER,), last=SEARCH_RESULT)
ASKED_HOW = {"suite", "data", "hub", "judge", "allow_code_execution"}
"""Keys of a `search:` section that a given scorer replaces."""
LENGTH = {"calls", "generations"}
"""Keys that decide the length of a search."""


@dataclass(frozen=True)
class SearchJob:
    """A search that passed every check that needs no model."""

    settings: SearchSection
    seed: int
    template: Template
    space: Space
    base: DenseJob
    scorer: CandidateScorer
    questions: Mapping[str, tuple[Question, ...]]
    """The labelled items by benchmark."""
    kept: Sequence[Path] = ()
    """Files and folders that the recipe names, and its own file."""

    @property
    def domains(self) -> dict[str, list[str]]:
        """The benchmarks of every domain."""
        from sigmerge.merge3.extract import by_domain

        return by_domain(self.questions)

    def recipe(self, index: int, genotype: Genotype) -> dict[str, Any]:
        seed = candidate_seed(self.seed, index)
        return self.template.candidate(self.space, genotype, seed)

    def in_flight(self, threads: int) -> int:
        """Candidates at a time: one per thread, as far as half of the free memory holds them."""
        fit = free_memory() // (2 * self.candidate_bytes)
        return max(1, min(threads, self.settings.population, fit))

    @property
    def candidate_bytes(self) -> int:
        """A candidate in float32, and the model that it is copied into."""
        return 8 * sum(tensor.size for tensor in self.base.pool.layout.tensors.values())

    def respondents(self) -> dict[str, dict[str, Any] | None]:
        """Models that answer all items: the endpoints, which are stored, and plain merges."""
        if not self.settings.fits:
            return {}
        merges = {
            " ".join([method, *(f"{k} {v:g}" for k, v in setting.items())]): self.template.anchor(
                method, self.seed, **setting
            )
            for method, setting in RESPONDENTS
            if self.base.pool.reference or not operator(method).needs_reference
        }
        return {**dict.fromkeys(self.base.pool.members), **merges}

    def of(self) -> dict[str, str]:
        """What is searched, each part by a name for its content. The length is left out."""
        by = scored_by(self.scorer)
        scored = self.scorer.name if by is None else [dict(by.settings), Inputs(by.files).digests()]
        parts = {
            "settings": self.settings.model_dump(exclude=ASKED_HOW | LENGTH),
            "seed": self.seed,
            "recipe": asdict(self.template),
            "pool": SameInputs(pool_files(self.base.pool)).key,
            "scores": scored,
            "items": {name: [item.id for item in each] for name, each in self.questions.items()},
        }
        return {name: content_key([part]) for name, part in parts.items()}

    def about(self) -> dict[str, Any]:
        """The first line of the log."""
        return {
            "settings": self.settings.model_dump(exclude=ASKED_HOW) | {"seed": self.seed},
            "scores": self.scorer.name,
            "items": {name: [item.id for item in each] for name, each in self.questions.items()},
        }

    def describe(self, options: Options) -> SearchStep:
        """The search as a step of a dry run."""
        settings, side_by_side = self.settings, self.in_flight(options.threads)
        return SearchStep(
            operator=self.template.method,
            experts=tuple(self.template.models),
            genes=self.space.size(len(self.template.models)),
            population=settings.population,
            generations=settings.rounds,
            estimator=settings.estimator,
            ability_runs=len(self.respondents()),
            labelled_items=self.labelled_items,
            items_per_call=self.items_per_call,
            candidates_in_flight=side_by_side,
            memory_per_candidate_bytes=self.candidate_bytes,
            bytes_to_read=self.base.bytes_in(),
            bytes_to_write=self.base.layout.nbytes,
            peak_memory_bytes=LIBRARIES + side_by_side * self.candidate_bytes,
            evaluation_calls=settings.evaluation_calls,
        )

    @property
    def labelled_items(self) -> dict[str, int]:
        """Labelled items of every domain."""
        counts = self.questions
        return {d: sum(len(counts[b]) for b in marks) for d, marks in self.domains.items()}

    @property
    def items_per_call(self) -> dict[str, int]:
        """Items of every domain that a candidate answers."""
        from sigmerge.merge3.models import per_call

        counts = per_call(self.questions, self.settings.items)
        return {d: sum(counts[b] for b in marks) for d, marks in self.domains.items()}


@dataclass(frozen=True)
class SearchRun:
    """The search of a recipe's coefficients into a folder of its own.

    `settings` and `suite` go before the recipe's search: section; `scorer` replaces the suite.
    """

    recipe: Recipe
    out: Path
    options: Options
    settings: SearchSection | None = None
    suite: str | None = None
    scorer: CandidateScorer | None = None

    def _plan(self) -> SearchJob:
        return plan_search(self.recipe, self.options, self.settings, self.suite, self.scorer)

    def describe(self) -> Description:
        job = self._plan()
        check_out(job, self.out, self.options)
        return Description((job.describe(self.options),), self.options.threads)

    def run(self) -> SearchResult:
        return run_search(self._plan(), self.out, self.options)


def search_merge(recipe: Recipe, out: Path, options: Options) -> Merged:
    """The merge of a recipe with a `search:` section: its search's winner, as an ordinary folder.

    The search lies beside it while it lasts.
    """
    target = real_target(out)
    with only_target(target, options.overwrite):
        return _search_merge(recipe, target, options)


def _search_merge(recipe: Recipe, out: Path, options: Options) -> Merged:
    job, work = plan_search(recipe, options), hidden(out, "search")
    remove(work)  # what a killed run was making
    found = run_search(job, work, replace(options, overwrite=False))
    made, added = work / WINNER, (SEARCH_LOG, SEARCH_RESULT, ORIGIN)
    home = str(out)
    shutil.copyfile(work / SEARCH_LOG, made / RECORDS_FOLDER / SEARCH_LOG)
    moved = found.model_copy(update={"out": home, "winner": home})
    moved.write(made / RECORDS_FOLDER / SEARCH_RESULT)
    (made / RECORDS_FOLDER / ORIGIN).write_text(recipe.text, encoding="utf-8")
    provenance = list_records(made, added, options.threads)
    publish(made, out, overwrite=options.overwrite, durable=options.durable)
    remove(work, if_possible=True)
    spent = {key: getattr(found, key) for key in ("wall_seconds", "peak_memory_bytes")}
    return Merged(
        out=home,
        plan=read_plan(out / RECORDS_FOLDER / PLAN),
        provenance=provenance.model_copy(update=spent),
    )


def plan_search(
    recipe: Recipe,
    options: Options,
    settings: SearchSection | None = None,
    suite: str | None = None,
    scorer: CandidateScorer | None = None,
) -> SearchJob:
    """Check the recipe, the settings and the suite. Loads no model."""
    require_search(models=[] if scorer else ["torch", "transformers"])
    from sigmerge.merge3.estimate import MIXED
    from sigmerge.merge3.extract import labelled

    settings = settings or recipe.search or SearchSection()
    space, plain = space_of(recipe.method), template(recipe)
    middle = (0.5,) * space.size(len(plain.models))
    base = plan_dense(load_recipe(plain.candidate(space, middle, recipe.seed)), options)
    if settings.estimator in MIXED and len(base.pool.members) < 2:
        raise RecipeError(
            f"{settings.estimator} mixes the abilities of endpoints, and there is one only; use "
            "--estimator gp-irt or mean, or give a base_model."
        )
    asked = scorer or _suite(suite, recipe, base)
    questions = labelled(asked.questions(), settings.labels, recipe.seed)
    return SearchJob(settings, recipe.seed, plain, space, base, asked, questions, recipe.kept)


def _suite(suite: str | None, recipe: Recipe, base: DenseJob) -> CandidateScorer:
    """The embedded suite, the items of a pool that `nano train` made, or any suite.

    What the recipe names is looked for beside it.
    """
    from sigmerge.evaluation.how import How
    from sigmerge.evaluation.sources import Data
    from sigmerge.evaluation.suite import load_suite, nano_suite
    from sigmerge.merge3.scoring import SuiteScorer
    from sigmerge.nano.files import POOL, REFERENCE

    section, model = recipe.search or SearchSection(), base.pool.layout.path
    place = Path(suite) if suite else recipe.folder / Path(section.suite).expanduser()
    if (suite or section.suite) == "nano":
        _check_nano(model, POOL / REFERENCE)
        return SuiteScorer(model, nano_suite(), How())
    if place.is_dir():
        return SuiteScorer(model, nano_suite(place), How())
    named = place if place.is_file() else suite or section.suite
    data = Data.default(recipe.folder / section.data if section.data else None, section.hub)
    how = How(data=data, judge=section.judge, allow_code=section.allow_code_execution)
    return SuiteScorer(model, load_suite(named), how)


def _check_nano(model: Path, nano: Path) -> None:
    """The embedded items are words of the embedded pool; others' answers would all be wrong."""
    words, file = nano / "tokenizer.json", model / "tokenizer.json"
    if not file.exists() or len(set(file_digests([words, file]).values())) > 1:
        raise ScoreError(
            f"{model}: its tokenizer is not that of the embedded pool, for which suite: nano is. "
            "Give a suite for this pool: --suite, or suite: in the recipe's search: section."
        )


def check_out(job: SearchJob, out: Path, options: Options) -> None:
    """Whether the search may write there; a winner is one only beside the log of its search.

    Touches nothing, so a dry run calls it too.
    """
    SEARCH_FOLDER.check(out, True, job.kept)
    if (out / WINNER).exists() and not (out / SEARCH_LOG).exists():
        raise OutputError(f"{out}: holds winner, which no search wrote; choose a new folder.")
    if (out / SEARCH_RESULT).exists() and not options.overwrite:
        SEARCH_FOLDER.check_extends(out, job.of(), job.settings.evaluation_calls)


def run_search(job: SearchJob, out: Path, options: Options) -> SearchResult:
    """Extract, estimate, evolve; then the winner as a folder, and search.json."""
    check_out(job, out, options)
    with SEARCH_FOLDER.writing(out):
        return _search_into(job, out, options)


def _search_into(job: SearchJob, out: Path, options: Options) -> SearchResult:
    meter = Meter()
    side_by_side = job.in_flight(options.threads)
    same = SameInputs(pool_files(job.base.pool))
    with Workers(side_by_side) as team:
        running = _Search(job, team, options)
        examined = running.examine()
        models, errors = _item_models(job, examined)
        settings = job.settings
        history = evolve(
            job.space,
            len(job.template.models),
            lambda first, genotypes: running.generation(first, genotypes, models),
            settings.population,
            settings.rounds,
            job.seed,
            1 if settings.objective == "mean" else len(job.domains),
        )
        same.check_same()
        winner = best(history)
        recipe = job.recipe(winner.index, winner.genotype)
        test = running.test(recipe, models)
    SEARCH_FOLDER.clear(out)  # what an earlier search wrote, which this one replaces
    respondents = [{"respondent": name, "answers": found} for name, found in examined.items()]
    write_lines(out / SEARCH_LOG, [job.about(), *respondents, *map(_line, history)])
    stored = plan_dense(load_recipe(recipe), options)
    run_dense(stored, out / WINNER, replace(options, overwrite=True, progress=silent))
    record = SearchResult(
        out=str(out.absolute()),
        winner=str((out / WINNER).absolute()),
        of=job.of(),
        operator=job.template.method,
        experts=tuple(job.template.models),
        settings=settings.model_dump() | {"seed": job.seed},
        evaluation_calls=settings.evaluation_calls,
        ability_runs=len(job.respondents()),
        labelled_items=job.labelled_items,
        items_per_call=job.items_per_call,
        candidates_in_flight=side_by_side,
        best=Winner(
            candidate=winner.index,
            settings=job.space.settings(winner.genotype, list(job.template.models)),
            estimates=winner.estimates,
            estimate=winner.estimate,
        ),
        best_by_generation=tuple(_best_by_generation(history, settings.population)),
        test=test,
        held_out_error=errors,
        replayed=running.replayed,
        wall_seconds=meter.wall_seconds,
        asked_seconds=None if running.begun else round(sum(running.seconds), 3),
        peak_memory_bytes=meter.peak_memory_bytes,
    )
    record.write(out / SEARCH_RESULT)
    return record


class _Ask(NamedTuple):
    """A model of a search and what it is asked. Without a recipe it is the member of that name."""

    name: str
    recipe: Mapping[str, Any] | None
    questions: Mapping[str, Sequence[Question]]


class _Search:
    """One search under way; every model's answers are kept.

    The threads of `team` score models, and answers are returned in order.
    """

    def __init__(self, job: SearchJob, team: Workers, options: Options) -> None:
        self.job, self.team = job, team
        self.options = replace(options, threads=max(1, options.threads // team.threads))
        self.replayed, self.begun = 0, False
        self.seconds: list[float] = []

    def __getstate__(self) -> dict[str, Any]:
        """A task of a cluster scores a model."""
        return self.__dict__ | {"team": None, "options": self.options.in_a_task}

    def examine(self) -> dict[str, Answers]:
        """The answers of all respondents to all items."""
        respondents = self.job.respondents()
        asks = [_Ask(name, recipe, self.job.questions) for name, recipe in respondents.items()]
        found: dict[str, Answers] = {}
        for ask, entry in zip(asks, self._answered(asks, "ability of"), strict=True):
            found[ask.name] = entry["answers"]
            self.options.progress("abilities", len(found), len(respondents))
        return found

    def generation(
        self, first: int, genotypes: Sequence[Genotype], models: Mapping[str, ItemModel]
    ) -> list[ScoredGenotype]:
        """The evaluation calls of a generation."""
        from sigmerge.merge3.estimate import ESTIMATORS, domain_estimates

        estimator = ESTIMATORS[self.job.settings.estimator]
        subset = {b: [self.job.questions[b][i] for i in m.seen] for b, m in models.items()}
        numbered = list(enumerate(genotypes, first))
        asks = [_Ask(str(i), self.job.recipe(i, genotype), subset) for i, genotype in numbered]
        scored = []
        for (index, genotype), entry in zip(
            numbered, self._answered(asks, "candidate"), strict=True
        ):
            self.replayed += entry["found"]
            answers = entry["answers"]
            estimates = domain_estimates(self.job.domains, models, answers, estimator)
            scored.append(
                ScoredGenotype(index, genotype, answers, estimates, fmean(estimates.values()))
            )
            self.options.progress("searching", index + 1, self.job.settings.evaluation_calls)
        return scored

    def test(self, recipe: Mapping[str, Any], models: Mapping[str, ItemModel]) -> dict[str, float]:
        """The mean over benchmarks on the items outside the subset, where there are any."""
        unseen = {
            name: [self.job.questions[name][i] for i in np.setdiff1d(range(len(m.items)), m.seen)]
            for name, m in models.items()
        }
        wanted = {name: each for name, each in unseen.items() if each}
        [entry] = self._answered([_Ask("the winner", recipe, wanted)], "test of")
        return {
            domain: fmean(fmean(entry["answers"][name]) for name in benchmarks if name in wanted)
            for domain, benchmarks in self.job.domains.items()
            if any(name in wanted for name in benchmarks)
        }

    def _answered(self, asks: Sequence[_Ask], what: str) -> Iterator[dict[str, Any]]:
        """The answers of models in order, by threads here or tasks of a cluster.

        With the seconds that they took, and whether they were `found` among what is kept.
        """
        if (cluster := self.options.cluster) is None:
            each = self.team.map(self._got, asks)
        else:
            known = [self._known(ask) for ask in asks]
            missing = [ask for ask, found in zip(asks, known, strict=True) if found is None]
            fresh = iter(cluster.map(self._fresh, missing, lambda ask: f"{what} {ask.name}"[:100]))
            each = (
                found or self._got(ask, next(fresh)) for ask, found in zip(asks, known, strict=True)
            )
        for found in each:
            self.begun |= found["found"]
            self.seconds.append(found["seconds"])
            yield found

    def _known(self, ask: _Ask) -> dict[str, Any] | None:
        by = scored_by(self.job.scorer)
        entry = None if by is None else kept.look(self._wanted(ask, by))
        return None if entry is None else {**entry.value, "found": True}

    def _got(self, ask: _Ask, fresh: dict[str, Any] | None = None) -> dict[str, Any]:
        by = scored_by(self.job.scorer)
        if by is None:
            return {**(fresh or self._fresh(ask)), "found": False}

        def make(given: Given) -> Any:
            value = fresh or self._fresh(ask)
            return value if is_still(by, scored_by(self.job.scorer)) else NotToKeep(value)

        entry = kept.get(self._wanted(ask, by), make)
        return {**entry.value, "found": entry.kept}

    def _wanted(self, ask: _Ask, by: ScoredBy) -> Derivation:
        pool, asked = self.job.base.pool, [list(ask.questions), *(
            [question.id for question in each] for each in ask.questions.values()
        )]  # fmt: skip
        if ask.recipe is None:
            files = Inputs.of(checkpoint=checkpoint_files(pool.members[ask.name]))
            made = CandidateOf(files, {}, ())
        else:
            made = candidate_of(ask.recipe, pool, self.options)
        return Derivation(
            "search",
            _Search,
            made.inputs | Inputs.of(by=by.files),
            {"model": made.settings, "by": by.settings, "questions": content_key(asked)},
            (*made.libraries, *by.libraries),
            of=ask.name if ask.recipe is None else str(ask.recipe["merge_method"]),
            volatile=(BY,),
        )

    def _fresh(self, ask: _Ask) -> dict[str, Any]:
        """Answers by benchmark; the scorer gets all questions at once."""
        members = self.job.base.pool.members
        weights = self.merged(ask.recipe) if ask.recipe else stored_weights(members[ask.name])
        flat, meter = [question for each in ask.questions.values() for question in each], Meter()
        worth = self.job.scorer(weights, flat) if flat else []
        answers = iter(int(value >= 0.5) for value in worth)  # MERGE³ knows right and wrong only
        seconds = meter.wall_seconds
        found = {name: [next(answers) for _ in each] for name, each in ask.questions.items()}
        return {"answers": found, "seconds": seconds}

    def merged(self, recipe: Mapping[str, Any]) -> Weights:
        """The weights of a merge, without a file."""
        job = plan_dense(load_recipe(recipe), self.options)
        shapes = {name: tensor.shape for name, tensor in job.pool.layout.tensors.items()}
        memory = Memory(job.layout, shapes)
        lenient = self.options.allow_nonfinite
        with (
            PoolSource(job.members, allow_nonfinite=lenient) as source,
            Workers(self.options.threads) as team,
        ):
            merge_blocks(job, source, team, memory, replace(self.options, progress=silent))
        return memory.weights


def _line(candidate: ScoredGenotype) -> dict[str, Any]:
    """A candidate as the log has it."""
    found = asdict(candidate)
    return {"candidate": found.pop("index"), **found}


def _item_models(
    job: SearchJob, answers: Mapping[str, Answers]
) -> tuple[dict[str, ItemModel], dict[str, dict[str, float]]]:
    """The item model of every benchmark, and its errors on held-out answers."""
    from sigmerge.merge3.models import Extraction, item_models

    given = job.settings
    how = Extraction(given.items, given.extraction, given.dimension, given.trust, job.seed)
    models, errors = item_models(job.questions, answers, list(job.base.pool.members), how)
    return models, {name: asdict(error) for name, error in errors.items()}


def _best_by_generation(history: list[ScoredGenotype], population: int) -> list[float]:
    return [
        best(history[:stop]).estimate for stop in range(population, len(history) + 1, population)
    ]
