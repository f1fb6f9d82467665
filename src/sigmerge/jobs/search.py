"""MERGE³: the coefficients of a merge found by evolution on a few items.

    OUT/search.jsonl   every answer, genotype and estimate, line by line as they come
    OUT/winner/        the best candidate, an ordinary merge with the recipe that makes it
    OUT/search.json    the record of the search; written last

The candidates of a generation are merged and scored side by side, one thread each, as many at a
time as memory holds; whatever that number is, the journal is the same. Interrupted, the same
command replays search.jsonl and goes on where it stopped.

A recipe with a `search:` section is searched by `sigmerge merge` and `run` as well: the winner is
the merge, and the search's own files lie in its sigmerge/ folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.checkpoints.companions import tokenizer_files
from sigmerge.checkpoints.folder import RECORDS_FOLDER, open_checkpoint
from sigmerge.checkpoints.publishing import only_target, publish, real_target
from sigmerge.checkpoints.source import PoolSource
from sigmerge.engine.machine import LIBRARIES, Meter, free_memory
from sigmerge.engine.workers import Workers
from sigmerge.errors import OutputError, RecipeError, ScoreError, SigmergeError, require
from sigmerge.files.checksums import is_intact
from sigmerge.files.digests import file_digests
from sigmerge.files.documents import read_json_object
from sigmerge.files.journal import Journal, continues
from sigmerge.files.regular import remove
from sigmerge.jobs.dense import DenseJob, merge_blocks, plan_dense, run_dense
from sigmerge.jobs.options import Description, Options, Step
from sigmerge.jobs.work_folder import WINNER, WorkFolder, hidden, is_whole, list_records
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
    SearchRecord,
    Winner,
    read,
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
"""Plain merges that answer all items too: endpoints alone are too few to fit item parameters."""

SEARCH_JOURNAL, SEARCH_RESULT, ORIGIN = "search.jsonl", "search.json", "searched.yaml"
SEARCH_FOLDER = WorkFolder("search", (SEARCH_JOURNAL, SEARCH_RESULT), (WINNER,), last=SEARCH_RESULT)
CALL_KEYS = ("answers", "estimates", "estimate")
ASKED_HOW = {"suite", "data", "hub", "judge", "allow_code_execution"}
"""Keys of a `search:` section that the scorer's name stands for."""
SEARCH_LINES = ({"respondent", "answers"}, {"candidate", "genotype", *CALL_KEYS})
"""The keys of a journal's records."""


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
        """Candidates at a time: one a thread, if half of the free memory holds them; else fewer."""
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

    def header(self) -> dict[str, Any]:
        """Whose answers a journal holds; a search is only continued under the same header."""
        model = self.base.pool.layout.path
        asked = file_digests([model / "config.json", *tokenizer_files(model)])
        return {
            "settings": self.settings.model_dump(exclude=ASKED_HOW) | {"seed": self.seed},
            "recipe": asdict(self.template),
            "inputs": self.base.fingerprint(),
            "model": {file.name: digest for file, digest in asked.items()},
            "scorer": self.scorer.name,
            "items": {name: [item.id for item in each] for name, each in self.questions.items()},
        }

    def describe(self, options: Options) -> Step:
        """The search as a step of a dry run."""
        settings, side_by_side = self.settings, self.in_flight(options.threads)
        facts: dict[str, object] = {
            "operator": self.template.method,
            "experts": list(self.template.models),
            "genes": self.space.size(len(self.template.models)),
            "population": settings.population,
            "generations": settings.rounds,
            "estimator": settings.estimator,
            "ability_runs": len(self.respondents()),
            "labelled_items": self.labelled_items,
            "items_per_call": self.items_per_call,
            "candidates_in_flight": side_by_side,
            "memory_per_candidate_bytes": self.candidate_bytes,
        }
        return Step(
            "search",
            facts,
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

    The search lies beside it while it lasts. A search of another recipe left there is removed.
    """
    target = real_target(out)
    with only_target(target, options.overwrite):
        return _search_merge(recipe, target, options)


def _search_merge(recipe: Recipe, out: Path, options: Options) -> Merged:
    job = plan_search(recipe, options)
    work = hidden(out, "search")
    if not continues(work / SEARCH_JOURNAL, job.header()):
        remove(work)
    made, added = work / WINNER, (SEARCH_JOURNAL, SEARCH_RESULT, ORIGIN)
    # A run ended while it moved the winner, or it or its record was damaged.
    if not (is_whole(made, options.threads, added) and _is_kept(work / SEARCH_RESULT)):
        (work / SEARCH_RESULT).unlink(missing_ok=True)
        remove(made)
    if not (work / SEARCH_RESULT).exists():
        run_search(job, work, replace(options, overwrite=False))
    found = read(SearchRecord, work / SEARCH_RESULT)
    home = str(out)
    shutil.copyfile(work / SEARCH_JOURNAL, made / RECORDS_FOLDER / SEARCH_JOURNAL)
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


def _is_kept(record: Path) -> bool:
    """Whether a search wrote its record, and it is as it was written."""
    try:
        return is_intact(read_json_object(record, "a search"))
    except SigmergeError:
        return False


def plan_search(
    recipe: Recipe,
    options: Options,
    settings: SearchSection | None = None,
    suite: str | None = None,
    scorer: CandidateScorer | None = None,
) -> SearchJob:
    """Check the recipe, the settings and the suite. Loads no model."""
    require_search()
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
    require("Scoring candidates", "models", "torch", "transformers")
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
    """Whether the search may write there; a winner is one only beside the journal that led to it.

    Touches nothing, so a dry run calls it too.
    """
    SEARCH_FOLDER.check(out, options.overwrite, job.kept)
    if (out / WINNER).exists() and not (out / SEARCH_JOURNAL).exists():
        raise OutputError(f"{out}: holds winner, which no search wrote; choose a new folder.")


def run_search(job: SearchJob, out: Path, options: Options) -> SearchResult:
    """Extract, estimate, evolve; then the winner as a folder, and search.json."""
    check_out(job, out, options)
    with SEARCH_FOLDER.writing(out):
        if options.overwrite:
            SEARCH_FOLDER.clear(out)
        return _search_into(job, out, options)


def _search_into(job: SearchJob, out: Path, options: Options) -> SearchResult:
    meter = Meter()
    side_by_side = job.in_flight(options.threads)
    with (
        Journal(out / SEARCH_JOURNAL, job.header(), SEARCH_LINES, "search") as journal,
        Workers(side_by_side) as team,
    ):
        running = _Search(job, journal, team, options)
        models, errors = _item_models(job, running.examine())
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
        journal.check_same(job.header())
        winner = best(history)
        stored = plan_dense(load_recipe(job.recipe(winner.index, winner.genotype)), options)
        run_dense(stored, out / WINNER, replace(options, overwrite=True, progress=silent))
        test = running.test(stored_weights(open_checkpoint(out / WINNER)), models)
    record = SearchResult(
        out=str(out.absolute()),
        winner=str((out / WINNER).absolute()),
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
        asked_seconds=None if running.begun else round(sum(running.asked), 3),
        peak_memory_bytes=meter.peak_memory_bytes,
    )
    record.write(out / SEARCH_RESULT)
    return record


class _Search:
    """One search under way: what is in the journal is not scored again.

    The threads of `team` score models; records are returned and journalled in order.
    """

    def __init__(self, job: SearchJob, journal: Journal, team: Workers, options: Options) -> None:
        self.job, self.journal, self.team = job, journal, team
        self.options = replace(options, threads=max(1, options.threads // team.threads))
        records = journal.records
        self.examined = {r["respondent"]: r for r in records if "respondent" in r}
        self.called = {r["candidate"]: r for r in records if "candidate" in r}
        self.replayed = len(self.called)
        self.begun, self.asked = bool(records), list[float]()

    def __getstate__(self) -> dict[str, Any]:
        """A task of a cluster scores a model; the journal stays where it is."""
        return self.__dict__ | {"journal": None, "team": None, "options": self.options.in_a_task}

    def _map(
        self, function: Callable[[Any], dict[str, Any]], items: Sequence[Any], what: str
    ) -> Iterator[dict[str, Any]]:
        """The records of models, by threads here or tasks of a cluster."""
        if (cluster := self.options.cluster) is None:
            return self.team.map(function, items)
        return cluster.map(function, items, lambda item: f"{what} {item}"[:100])

    def examine(self) -> dict[str, Answers]:
        """The answers of all respondents to all items."""
        respondents, members = self.job.respondents(), self.job.base.pool.members

        def ask(name: str) -> dict[str, Any]:
            recipe = respondents[name]
            weights = self.merged(recipe) if recipe else stored_weights(members[name])
            return {"respondent": name, "answers": self._ask(weights, self.job.questions)}

        missing = [name for name in respondents if name not in self.examined]
        for record in self._map(ask, missing, "ability of"):
            self.journal.append(record)
            self.examined[record["respondent"]] = record
            self.options.progress("abilities", len(self.examined), len(respondents))
        return {name: self.examined[name]["answers"] for name in respondents}

    def generation(
        self, first: int, genotypes: Sequence[Genotype], models: Mapping[str, ItemModel]
    ) -> list[ScoredGenotype]:
        """The evaluation calls of a generation; those made before are answered by the journal."""
        numbered = list(enumerate(genotypes, first))
        for index, genotype in numbered:
            record = self.called.get(index)
            if record is not None and tuple(record["genotype"]) != genotype:
                raise SigmergeError(
                    f"{self.journal.file}: candidate {index} has another genotype than this search "
                    "gives it; another version of pymoo wrote it. Pass --overwrite to start over."
                )
        missing = [pair for pair in numbered if pair[0] not in self.called]
        scored = self._map(
            lambda pair: self._evaluate(pair[0], pair[1], models), missing, "candidate"
        )
        for record in scored:
            self.journal.append(record)
            self.called[record["candidate"]] = record
            self.options.progress(
                "searching", record["candidate"] + 1, self.job.settings.evaluation_calls
            )
        return [
            ScoredGenotype(index, genotype, *(self.called[index][key] for key in CALL_KEYS))
            for index, genotype in numbered
        ]

    def _evaluate(
        self, index: int, genotype: Genotype, models: Mapping[str, ItemModel]
    ) -> dict[str, Any]:
        from sigmerge.merge3.estimate import ESTIMATORS, domain_estimates

        estimator = ESTIMATORS[self.job.settings.estimator]
        subset = {b: [self.job.questions[b][i] for i in m.seen] for b, m in models.items()}
        answers = self._ask(self.merged(self.job.recipe(index, genotype)), subset)
        estimates = domain_estimates(self.job.domains, models, answers, estimator)
        return {
            "candidate": index,
            "genotype": genotype,
            "answers": answers,
            "estimates": estimates,
            "estimate": fmean(estimates.values()),
        }

    def test(self, weights: Weights, models: Mapping[str, ItemModel]) -> dict[str, float]:
        """The mean over benchmarks on the items outside the subset, where there are any."""
        unseen = {
            name: [self.job.questions[name][i] for i in np.setdiff1d(range(len(m.items)), m.seen)]
            for name, m in models.items()
        }
        wanted = {name: each for name, each in unseen.items() if each}
        [answers] = self.team.map(lambda given: self._ask(given, wanted), [weights])
        return {
            domain: fmean(fmean(answers[name]) for name in benchmarks if name in answers)
            for domain, benchmarks in self.job.domains.items()
            if any(name in answers for name in benchmarks)
        }

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

    def _ask(self, weights: Weights, questions: Mapping[str, Sequence[Question]]) -> Answers:
        """Answers by benchmark; the scorer gets all questions at once."""
        flat, meter = [question for each in questions.values() for question in each], Meter()
        worth = self.job.scorer(weights, flat) if flat else []
        answers = iter(int(value >= 0.5) for value in worth)  # MERGE³ knows right and wrong only
        self.asked.append(meter.wall_seconds)
        return {name: [next(answers) for _ in each] for name, each in questions.items()}


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
