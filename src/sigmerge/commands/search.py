"""`sigmerge search`: MERGE³, the coefficients of a merge found by evolution on a few items.

    OUT/search.jsonl   every answer, genotype and estimate, line by line as they come
    OUT/winner/        the best candidate, an ordinary merge with the recipe that makes it
    OUT/search.json    what this search was; written last

The candidates of a generation are merged and scored side by side, one thread each, as many at a
time as memory holds; whatever that number is, the journal is the same. Interrupted, the same
command replays search.jsonl and goes on where it stopped.

A recipe with a `search:` section is searched by `sigmerge merge` and `run` as well: the winner is
the merge, and the search's own files lie in its sigmerge/ folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.checkpoints.companions import tokenizer_files
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.source import PoolSource
from sigmerge.commands.merge import MergeJob, merge_blocks, plan_merge, run_merge
from sigmerge.commands.options import Meter, Options, silent
from sigmerge.commands.target import WorkFolder
from sigmerge.engine.machine import free_memory
from sigmerge.engine.stream import Workers
from sigmerge.errors import MissingExtra, OutputError, RecipeError, ScoreError, SigmergeError
from sigmerge.files.digests import sha256
from sigmerge.files.documents import write_json
from sigmerge.files.journal import Journal, continues
from sigmerge.operators.table import operator
from sigmerge.recipe import Recipe, SearchSection, load_recipe
from sigmerge.search.candidate import (
    Memory,
    Template,
    Weights,
    candidate_seed,
    stored_weights,
    template,
)
from sigmerge.search.evolve import (
    CALLS,
    Candidate,
    Genotype,
    Space,
    best,
    evolve,
    generations_of,
    space_of,
)

if TYPE_CHECKING:
    from sigmerge.search.estimate import ItemModel
    from sigmerge.search.extract import Question
    from sigmerge.search.scoring import CandidateScorer

ANCHORS: tuple[tuple[str, dict[str, float]], ...] = (
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

Answers = dict[str, list[int]]
JOURNAL, RESULT, ORIGIN = "search.jsonl", "search.json", "searched.yaml"
FOLDER = WorkFolder("search", (JOURNAL, RESULT), ("winner",), last=RESULT)
ASKED_HOW = {"suite", "data", "hub", "judge", "allow_code_execution"}
"""Keys of a `search:` section that say how candidates are asked."""
KEPT = ("answers", "estimates", "estimate")
RECORDS = ({"respondent", "answers"}, {"candidate", "genotype", *KEPT})
"""The keys of a journal's records."""


@dataclass(frozen=True)
class Settings:
    """What is searched how. `generations` × `population` evaluation calls are made."""

    population: int = 24
    generations: int = 10
    items: int = 20
    estimator: str = "gmp-irt"
    extraction: str = "uniform"
    dimension: int = 1
    labels: int = 1500
    trust: float | str = 0.5
    objective: str = "mean"
    seed: int = 0

    @classmethod
    def of(cls, recipe: Recipe, **given: Any) -> Settings:
        """What the recipe's `search:` section says, where `given` does not say otherwise."""
        section = recipe.search or SearchSection()
        words = section.model_dump(exclude=ASKED_HOW)
        changes = {name: value for name, value in given.items() if value is not None}
        if {"generations", "calls"} & changes.keys():
            words |= {"generations": None, "calls": None}
        words |= changes
        calls, rounds = words.pop("calls"), words.pop("generations")
        if calls is not None and rounds is not None:
            raise RecipeError("Give calls or generations, not both.")
        if rounds is None:
            rounds = generations_of(CALLS if calls is None else calls, words["population"])
        return cls(**words, generations=rounds, seed=recipe.seed)

    @property
    def calls(self) -> int:
        return self.population * self.generations

    @property
    def fits(self) -> bool:
        """Whether an IRT model is needed, and so the answers of respondents to all items."""
        return self.estimator != "mean" or self.extraction == "clusters"

    def problems(self) -> list[str]:
        from sigmerge.search.estimate import ESTIMATORS

        known = {
            "estimator": tuple(ESTIMATORS),
            "extraction": ("uniform", "clusters"),
            "objective": ("mean", "domains"),
        }
        found = [
            f"{name} must be one of {', '.join(words)}, not {getattr(self, name)!r}"
            for name, words in known.items()
            if getattr(self, name) not in words
        ]
        if self.trust != "auto" and not (isinstance(self.trust, float) and 0 <= self.trust <= 1):
            found.append(f"trust must be auto or lie between 0 and 1, not {self.trust!r}")
        least = {"population": 2, "generations": 1, "items": 1, "dimension": 1, "seed": 0}
        return found + [
            f"{name} must be at least {low}, not {getattr(self, name)}"
            for name, low in least.items()
            if getattr(self, name) < low
        ]


@dataclass(frozen=True)
class SearchJob:
    """A search that passed every check that needs no model."""

    settings: Settings
    template: Template
    space: Space
    base: MergeJob
    scorer: CandidateScorer
    questions: Mapping[str, tuple[Question, ...]]
    """The labelled items by benchmark."""

    @property
    def domains(self) -> dict[str, list[str]]:
        """The benchmarks of every domain."""
        from sigmerge.search.extract import by_domain

        return by_domain(self.questions)

    def recipe(self, index: int, genotype: Genotype) -> dict[str, Any]:
        seed = candidate_seed(self.settings.seed, index)
        return self.template.candidate(self.space, genotype, seed)

    def in_flight(self, threads: int) -> int:
        """Candidates at a time: one a thread, if half of the free memory holds them; else fewer."""
        fit = free_memory() // (2 * self.candidate_bytes)
        return max(1, min(threads, self.settings.population, fit))

    @property
    def candidate_bytes(self) -> int:
        """A candidate in float32, and the model it is copied into to be asked."""
        return 8 * sum(tensor.size for tensor in self.base.pool.layout.tensors.values())

    def respondents(self) -> dict[str, dict[str, Any] | None]:
        """Who answers all items: the endpoints, stored already, and plain merges by recipe."""
        if not self.settings.fits:
            return {}
        merges = {
            " ".join([method, *(f"{k} {v:g}" for k, v in setting.items())]): self.template.anchor(
                method, self.settings.seed, **setting
            )
            for method, setting in ANCHORS
            if self.base.pool.reference or not operator(method).needs_reference
        }
        return {**dict.fromkeys(self.base.pool.members), **merges}

    def header(self) -> dict[str, Any]:
        """Whose answers a journal holds; a search is only continued under the same header."""
        model = self.base.pool.layout.path
        asked = sha256([model / "config.json", *tokenizer_files(model)])
        return {
            "settings": asdict(self.settings),
            "recipe": asdict(self.template),
            "inputs": self.base.fingerprint(),
            "model": {file.name: digest for file, digest in asked.items()},
            "scorer": self.scorer.name,
            "items": {name: [item.id for item in each] for name, each in self.questions.items()},
        }

    def describe(self, threads: int) -> dict[str, Any]:
        """What `--dry-run` tells."""
        from sigmerge.search.models import per_call

        settings, side_by_side = self.settings, self.in_flight(threads)
        counts, asked = self.questions, per_call(self.questions, self.settings.items)
        return {
            "operator": self.template.method,
            "experts": list(self.template.models),
            "genes": self.space.size(len(self.template.models)),
            **asdict(settings),
            "evaluation_calls": settings.calls,
            "ability_runs": len(self.respondents()),
            "labelled_items": {d: sum(len(counts[b]) for b in m) for d, m in self.domains.items()},
            "items_per_call": {d: sum(asked[b] for b in m) for d, m in self.domains.items()},
            "bytes_per_candidate": self.base.bytes_in(),
            "candidates_in_flight": side_by_side,
            "memory_per_candidate_bytes": self.candidate_bytes,
            "memory_of_weights_bytes": side_by_side * self.candidate_bytes,
            "threads": threads,
        }


def search(
    recipe: Recipe | Path | str | Mapping[str, Any],
    out: Path | str,
    settings: Settings | None = None,
    *,
    suite: str | None = None,
    scorer: CandidateScorer | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Search the coefficients of a recipe and store the winner; returns the content of search.json.

    `settings` and `suite` go before the recipe's `search:` section; `scorer` replaces the suite.
    Further keyword arguments are those of `Options`.
    """
    options = Options(**how)
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    job = plan_search(loaded, settings or Settings.of(loaded), options, suite, scorer)
    return run_search(job, Path(out), options)


def search_merge(recipe: Recipe, out: Path, options: Options) -> dict[str, Any]:
    """The merge of a recipe with a `search:` section: its search's winner, as an ordinary folder.

    The search lies beside it while it lasts. A search of another recipe left there is thrown away.
    """
    job = plan_search(recipe, Settings.of(recipe), options)
    work = out.absolute().with_name(f".{out.name}.search")
    if not continues(work / JOURNAL, job.header()):
        shutil.rmtree(work, ignore_errors=True)
    made = work / "winner"
    if not made.exists():
        (work / RESULT).unlink(missing_ok=True)  # a run that ended while it moved the winner
    if not (work / RESULT).exists():
        run_search(job, work, replace(options, overwrite=False))
    found = json.loads((work / RESULT).read_text(encoding="utf-8"))
    home = str(out.absolute())
    shutil.copyfile(work / JOURNAL, made / "sigmerge" / JOURNAL)
    write_json(made / "sigmerge" / RESULT, {**found, "out": home, "winner": home})
    (made / "sigmerge" / ORIGIN).write_text(recipe.text, encoding="utf-8")
    if out.exists():
        shutil.rmtree(out)
    made.rename(out)
    shutil.rmtree(work)
    provenance = json.loads((out / "sigmerge/provenance.json").read_text(encoding="utf-8"))
    spent = {key: found[key] for key in ("wall_seconds", "peak_memory_bytes")}
    return {"out": home, **provenance, **spent}


def plan_search(
    recipe: Recipe,
    settings: Settings,
    options: Options,
    suite: str | None = None,
    scorer: CandidateScorer | None = None,
) -> SearchJob:
    """Check the recipe, the settings and the suite. Loads no model."""
    _require("search", "The search", "scipy", "pymoo")
    from sigmerge.search.estimate import MIXED
    from sigmerge.search.extract import labelled

    if problems := settings.problems():
        raise RecipeError("The search cannot be run:", problems)
    space, plain = space_of(recipe.method), template(recipe)
    middle = (0.5,) * space.size(len(plain.models))
    base = plan_merge(load_recipe(plain.candidate(space, middle, settings.seed)), options)
    if settings.estimator in MIXED and len(base.pool.members) < 2:
        raise RecipeError(
            f"{settings.estimator} mixes the abilities of endpoints, and there is one only; use "
            "--estimator gp-irt or mean, or give a base_model."
        )
    asked = scorer or _suite(suite, recipe, base)
    questions = labelled(asked.questions(), settings.labels, settings.seed)
    return SearchJob(settings, plain, space, base, asked, questions)


def _require(extra: str, purpose: str, *libraries: str) -> None:
    for library in libraries:
        if find_spec(library) is None:
            raise MissingExtra(library, extra, purpose)


def _suite(suite: str | None, recipe: Recipe, base: MergeJob) -> CandidateScorer:
    """The embedded suite, the items of a pool that `nano train` made, or any suite.

    What the recipe names is looked for beside it.
    """
    _require("models", "Scoring candidates", "torch", "transformers")
    from sigmerge.evaluation.how import How
    from sigmerge.evaluation.sources import Data
    from sigmerge.evaluation.suite import load_suite, nano_suite
    from sigmerge.nano.files import POOL, REFERENCE
    from sigmerge.search.scoring import SuiteScorer

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
    if not file.exists() or len(set(sha256([words, file]).values())) > 1:
        raise ScoreError(
            f"{model}: its tokenizer is not the embedded pool's, whose items the suite nano asks. "
            "Give a suite for this pool: --suite, or suite: in the recipe's search: section."
        )


def check_out(job: SearchJob, out: Path, options: Options) -> None:
    """Whether the search may write there; a winner is one only beside the journal that led to it.

    Touches nothing, so a dry run asks it too.
    """
    FOLDER.check(out, options.overwrite, job.base.recipe.inputs)
    if (out / "winner").exists() and not (out / JOURNAL).exists():
        raise OutputError(f"{out}: holds winner, which no search wrote; choose a new folder.")


def run_search(job: SearchJob, out: Path, options: Options) -> dict[str, Any]:
    """Extract, estimate, evolve; then the winner as a folder, and search.json."""
    meter = Meter()
    check_out(job, out, options)
    if options.overwrite:
        FOLDER.clear(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({error.strerror}).") from None
    side_by_side = job.in_flight(options.threads)
    with (
        Journal(out / JOURNAL, job.header(), RECORDS, "search") as journal,
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
            settings.generations,
            settings.seed,
            1 if settings.objective == "mean" else len(job.domains),
        )
        winner = best(history)
        stored = plan_merge(load_recipe(job.recipe(winner.index, winner.genotype)), options)
        run_merge(stored, out / "winner", replace(options, overwrite=True, progress=silent))
        test = running.test(stored_weights(open_checkpoint(out / "winner")), models)
    result = {
        "out": str(out.absolute()),
        "winner": str((out / "winner").absolute()),
        **job.describe(options.threads),
        "best": {
            "candidate": winner.index,
            "settings": job.space.settings(winner.genotype, list(job.template.models)),
            "estimates": dict(winner.estimates),
            "estimate": winner.estimate,
        },
        "best_by_generation": _best_by_generation(history, settings.population),
        "test": test,
        "held_out_error": errors,
        "replayed": running.replayed,
        **meter.read(),
    }
    write_json(out / RESULT, result)
    return result


class _Search:
    """One search under way: what the journal knows is not asked again.

    Models are asked by the threads of `team`; records come back, and go into the journal, in order.
    """

    def __init__(self, job: SearchJob, journal: Journal, team: Workers, options: Options) -> None:
        self.job, self.journal, self.team = job, journal, team
        self.options = replace(options, threads=max(1, options.threads // team.threads))
        records = journal.records
        self.examined = {r["respondent"]: r for r in records if "respondent" in r}
        self.called = {r["candidate"]: r for r in records if "candidate" in r}
        self.replayed = len(self.called)

    def examine(self) -> dict[str, Answers]:
        """The answers of all respondents to all items."""
        respondents, members = self.job.respondents(), self.job.base.pool.members

        def ask(name: str) -> dict[str, Any]:
            recipe = respondents[name]
            weights = self.merged(recipe) if recipe else stored_weights(members[name])
            return {"respondent": name, "answers": self._ask(weights, self.job.questions)}

        missing = [name for name in respondents if name not in self.examined]
        for record in self.team.map(ask, missing):
            self.journal.append(record)
            self.examined[record["respondent"]] = record
            self.options.progress("abilities", len(self.examined), len(respondents))
        return {name: self.examined[name]["answers"] for name in respondents}

    def generation(
        self, first: int, genotypes: Sequence[Genotype], models: Mapping[str, ItemModel]
    ) -> list[Candidate]:
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
        for record in self.team.map(lambda pair: self._evaluate(*pair, models), missing):
            self.journal.append(record)
            self.called[record["candidate"]] = record
            self.options.progress("searching", record["candidate"] + 1, self.job.settings.calls)
        return [
            Candidate(index, genotype, *(self.called[index][key] for key in KEPT))
            for index, genotype in numbered
        ]

    def _evaluate(
        self, index: int, genotype: Genotype, models: Mapping[str, ItemModel]
    ) -> dict[str, Any]:
        from sigmerge.search.estimate import ESTIMATORS, domain_estimates

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
        job = plan_merge(load_recipe(recipe), self.options)
        shapes = {name: tensor.shape for name, tensor in job.pool.layout.tensors.items()}
        memory = Memory(job.layout, shapes)
        source = PoolSource(job.members, allow_nonfinite=self.options.allow_nonfinite)
        with Workers(self.options.threads) as team:
            merge_blocks(job, source, team, memory, replace(self.options, progress=silent))
        return memory.weights

    def _ask(self, weights: Weights, questions: Mapping[str, Sequence[Question]]) -> Answers:
        """Answers by benchmark; the scorer gets all questions at once."""
        flat = [question for each in questions.values() for question in each]
        answers = iter(self.job.scorer(weights, flat) if flat else [])
        return {name: [next(answers) for _ in each] for name, each in questions.items()}


def _item_models(
    job: SearchJob, answers: Mapping[str, Answers]
) -> tuple[dict[str, ItemModel], dict[str, dict[str, float]]]:
    """The item model of every benchmark, and its errors on held-out answers."""
    from sigmerge.search.models import Extraction, item_models

    given = job.settings
    how = Extraction(given.items, given.extraction, given.dimension, given.trust, given.seed)
    models, errors = item_models(job.questions, answers, list(job.base.pool.members), how)
    return models, {name: asdict(error) for name, error in errors.items()}


def _best_by_generation(history: list[Candidate], population: int) -> list[float]:
    return [
        best(history[:stop]).estimate for stop in range(population, len(history) + 1, population)
    ]
