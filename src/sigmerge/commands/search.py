"""`sigmerge search`: MERGE³, the coefficients of a merge found by evolution on a few items.

    OUT/search.jsonl   every answer, genotype and estimate, line by line as they come
    OUT/winner/        the best candidate, an ordinary merge with the recipe that makes it
    OUT/search.json    what this search was; written last

Interrupted, the same command replays search.jsonl and goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.source import PoolSource
from sigmerge.commands.merge import MergeJob, merge_blocks, plan_merge, run_merge
from sigmerge.commands.options import Meter, Options, silent
from sigmerge.engine.stream import Workers
from sigmerge.errors import MissingExtra, OutputError, RecipeError, SigmergeError
from sigmerge.operators.table import operator
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.search.candidate import (
    Memory,
    Template,
    Weights,
    candidate_seed,
    stored_weights,
    template,
)
from sigmerge.search.evolve import Candidate, Genotype, Space, best, evolve, space_of
from sigmerge.search.journal import Journal

if TYPE_CHECKING:
    from sigmerge.search.estimate import Benchmark
    from sigmerge.search.extract import Item
    from sigmerge.search.scoring import Scorer

METHOD = "dare_ties"
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
    seed: int = 0

    @property
    def calls(self) -> int:
        return self.population * self.generations

    @property
    def fits(self) -> bool:
        """Whether an IRT model is needed, and so the answers of respondents to all items."""
        return self.estimator != "mean" or self.extraction == "clusters"

    def problems(self) -> list[str]:
        from sigmerge.search.estimate import ESTIMATORS

        known = {"estimator": tuple(ESTIMATORS), "extraction": ("uniform", "clusters")}
        found = [
            f"{name} must be one of {', '.join(words)}, not {getattr(self, name)!r}"
            for name, words in known.items()
            if getattr(self, name) not in words
        ]
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
    scorer: Scorer
    items: Mapping[str, tuple[Item, ...]]

    def recipe(self, index: int, genotype: Genotype) -> dict[str, Any]:
        seed = candidate_seed(self.settings.seed, index)
        return self.template.candidate(self.space, genotype, seed)

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
        return {
            "settings": asdict(self.settings),
            "recipe": asdict(self.template),
            "inputs": self.base.fingerprint(),
            "scorer": self.scorer.name,
            "items": {domain: [item.id for item in each] for domain, each in self.items.items()},
        }

    def describe(self) -> dict[str, Any]:
        """What `--dry-run` tells."""
        settings = self.settings
        weights = 4 * sum(tensor.size for tensor in self.base.pool.layout.tensors.values())
        return {
            "operator": self.template.method,
            "experts": list(self.template.models),
            "genes": self.space.size(len(self.template.models)),
            **asdict(settings),
            "evaluation_calls": settings.calls,
            "ability_runs": len(self.respondents()),
            "labelled_items": {domain: len(each) for domain, each in self.items.items()},
            "items_per_call": {d: min(settings.items, len(i)) for d, i in self.items.items()},
            "bytes_per_candidate": self.base.bytes_in(),
            "memory_of_weights_bytes": 2 * weights,
        }


def search(
    recipe: Recipe | Path | str | Mapping[str, Any],
    out: Path | str,
    settings: Settings | None = None,
    *,
    suite: str = "nano",
    scorer: Scorer | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Search the coefficients of a recipe and store the winner; returns the content of search.json.

    `scorer` replaces the suite. Further keyword arguments are those of `Options`.
    """
    options = Options(**how)
    job = plan_search(recipe, settings or Settings(), options, suite, scorer)
    return run_search(job, Path(out), options)


def plan_search(
    recipe: Recipe | Path | str | Mapping[str, Any],
    settings: Settings,
    options: Options,
    suite: str = "nano",
    scorer: Scorer | None = None,
) -> SearchJob:
    """Check the recipe, the settings and the suite. Loads no model."""
    _require("search", "The search", "scipy", "pymoo")
    from sigmerge.search.estimate import MIXED
    from sigmerge.search.extract import labelled

    if problems := settings.problems():
        raise RecipeError("The search cannot be run:", problems)
    loaded = recipe if isinstance(recipe, Recipe) else _load(recipe)
    space, plain = space_of(loaded.method), template(loaded)
    middle = (0.5,) * space.size(len(plain.models))
    base = plan_merge(load_recipe(plain.candidate(space, middle, settings.seed)), options)
    if settings.estimator in MIXED and len(base.pool.members) < 2:
        raise RecipeError(
            f"{settings.estimator} mixes the abilities of endpoints, and there is one only; use "
            "--estimator gp-irt or mean, or give a base_model."
        )
    asked = scorer or _suite(suite, base)
    items = labelled(asked.items(), settings.labels, settings.seed)
    return SearchJob(settings, plain, space, base, asked, items)


def _require(extra: str, purpose: str, *libraries: str) -> None:
    for library in libraries:
        if find_spec(library) is None:
            raise MissingExtra(library, extra, purpose)


def _load(source: Path | str | Mapping[str, Any]) -> Recipe:
    """A recipe; one that names no merge_method means DARE-TIES."""
    if isinstance(source, Mapping):
        return load_recipe({"merge_method": METHOD, **source})
    file = Path(source).expanduser()
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        given = None
    if not isinstance(given, dict) or "merge_method" in given:
        return load_recipe(file)  # what is wrong with it is said there, with the line

    def seen_from_here(path: Any) -> Any:
        beside = file.resolve().parent / Path(str(path)).expanduser()
        return str(beside) if beside.exists() else path

    models = [
        {**entry, "model": seen_from_here(entry.get("model"))} if isinstance(entry, dict) else entry
        for entry in given.get("models") or []
    ]
    base = {k: seen_from_here(v) for k, v in given.items() if k == "base_model"}
    return load_recipe({"merge_method": METHOD, **given, **base, "models": models})


def _suite(suite: str, base: MergeJob) -> Scorer:
    """The embedded suite, or the items of a pool that `nano train` made."""
    _require("models", "Scoring candidates", "torch", "transformers")
    from sigmerge.nano.files import POOL
    from sigmerge.search.scoring import NanoScorer

    return NanoScorer(base.pool.layout.path, POOL if suite == "nano" else Path(suite))


def run_search(job: SearchJob, out: Path, options: Options) -> dict[str, Any]:
    """Extract, estimate, evolve; then the winner as a folder, and search.json."""
    meter = Meter()
    _prepare(out, options.overwrite)
    with Journal(out / "search.jsonl", job.header()) as journal, Workers(options.threads) as team:
        running = _Search(job, journal, team, options)
        benchmarks, errors = _benchmarks(job, running.examine())
        settings = job.settings
        history = evolve(
            job.space,
            len(job.template.models),
            lambda index, genotype: running.call(index, genotype, benchmarks),
            settings.population,
            settings.generations,
            settings.seed,
        )
        winner = best(history)
        stored = plan_merge(load_recipe(job.recipe(winner.index, winner.genotype)), options)
        run_merge(stored, out / "winner", replace(options, overwrite=True, progress=silent))
        test = running.test(stored_weights(open_checkpoint(out / "winner")), benchmarks)
    result = {
        "out": str(out.absolute()),
        "winner": str((out / "winner").absolute()),
        **job.describe(),
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
    _write_json(out / "search.json", result)
    return result


class _Search:
    """One search under way: what the journal knows is not asked again."""

    def __init__(self, job: SearchJob, journal: Journal, team: Workers, options: Options) -> None:
        self.job, self.journal, self.team, self.options = job, journal, team, options
        records = journal.records
        self.examined = {r["respondent"]: r for r in records if "respondent" in r}
        self.called = {r["candidate"]: r for r in records if "candidate" in r}
        self.replayed = len(self.called)

    def examine(self) -> dict[str, Answers]:
        """The answers of all respondents to all items."""
        respondents, members = self.job.respondents(), self.job.base.pool.members
        for done, (name, recipe) in enumerate(respondents.items()):
            if name not in self.examined:
                weights = self.merged(recipe) if recipe else stored_weights(members[name])
                record = {"respondent": name, "answers": self._ask(weights, self.job.items)}
                self.journal.append(record)
                self.examined[name] = record
            self.options.progress("abilities", done + 1, len(respondents))
        return {name: self.examined[name]["answers"] for name in respondents}

    def call(
        self, index: int, genotype: Genotype, benchmarks: Mapping[str, Benchmark]
    ) -> Candidate:
        """One evaluation call: answered from the journal if it was made before."""
        if (record := self.called.get(index)) is None:
            record = self._evaluate(index, genotype, benchmarks)
            self.journal.append(record)
        elif tuple(record["genotype"]) != genotype:
            raise SigmergeError(
                f"{self.journal.file}: candidate {index} has another genotype than this search "
                "gives it; another version of pymoo wrote it. Pass --overwrite to start over."
            )
        self.options.progress("searching", index + 1, self.job.settings.calls)
        return Candidate(
            index, genotype, record["answers"], record["estimates"], record["estimate"]
        )

    def _evaluate(
        self, index: int, genotype: Genotype, benchmarks: Mapping[str, Benchmark]
    ) -> dict[str, Any]:
        from sigmerge.search.estimate import ESTIMATORS

        estimator = ESTIMATORS[self.job.settings.estimator]
        subset = {d: [self.job.items[d][i] for i in b.seen] for d, b in benchmarks.items()}
        answers = self._ask(self.merged(self.job.recipe(index, genotype)), subset)
        estimates = {d: estimator(b, np.array(answers[d])) for d, b in benchmarks.items()}
        return {
            "candidate": index,
            "genotype": genotype,
            "answers": answers,
            "estimates": estimates,
            "estimate": fmean(estimates.values()),
        }

    def test(self, weights: Weights, benchmarks: Mapping[str, Benchmark]) -> dict[str, float]:
        """The plain mean on the items outside the subset, where there are any."""
        unseen = {
            domain: [self.job.items[domain][i] for i in np.setdiff1d(range(len(b.items)), b.seen)]
            for domain, b in benchmarks.items()
        }
        answers = self._ask(weights, {domain: each for domain, each in unseen.items() if each})
        return {domain: fmean(each) for domain, each in answers.items()}

    def merged(self, recipe: Mapping[str, Any]) -> Weights:
        """The weights of a merge, without a file."""
        job = plan_merge(load_recipe(recipe), self.options)
        shapes = {name: tensor.shape for name, tensor in job.pool.layout.tensors.items()}
        memory = Memory(job.layout, shapes)
        source = PoolSource(job.members, allow_nonfinite=self.options.allow_nonfinite)
        merge_blocks(job, source, self.team, memory, replace(self.options, progress=silent))
        return memory.weights

    def _ask(self, weights: Weights, items: Mapping[str, Any]) -> Answers:
        """Answers by domain; the scorer hears all items at once."""
        flat = [item for each in items.values() for item in each]
        answers = iter(self.job.scorer(weights, flat) if flat else [])
        return {domain: [next(answers) for _ in each] for domain, each in items.items()}


def _benchmarks(
    job: SearchJob, answers: Mapping[str, Answers]
) -> tuple[dict[str, Benchmark], dict[str, dict[str, float]]]:
    """Per domain: item parameters, the endpoints' abilities and the subset; the held-out errors."""
    from sigmerge.search import extract, irt
    from sigmerge.search.estimate import Benchmark

    settings, benchmarks, errors = job.settings, {}, {}
    for domain, items in job.items.items():
        fitted = irt.Fit(irt.Items(np.zeros((len(items), 1)), np.zeros(len(items))), np.zeros(0))
        if answers:
            right = np.array([answers[name][domain] for name in answers])
            fitted = irt.fit(right, settings.dimension)
            errors[domain] = asdict(irt.held_out(right, settings.dimension))
        rng = extract.generator(settings.seed, "subset", domain)
        subset = (
            extract.clustered(fitted.items, settings.items, rng)
            if settings.extraction == "clusters"
            else extract.uniform(len(items), settings.items, rng)
        )
        endpoints = fitted.abilities[: len(job.base.pool.members)]
        benchmarks[domain] = Benchmark(fitted.items, endpoints, subset.rows, subset.weights)
    return benchmarks, errors


def _best_by_generation(history: list[Candidate], population: int) -> list[float]:
    return [
        best(history[:stop]).estimate for stop in range(population, len(history) + 1, population)
    ]


def _prepare(out: Path, overwrite: bool) -> None:
    """A folder that holds a finished search, or anything but a search, is not written into."""
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out}: is a file; choose a new folder for the search.")
    names = {file.name for file in out.iterdir()} if out.exists() else set()
    foreign = names - {"search.jsonl", "winner", "search.json"}
    if shown := sorted(name for name in foreign if not name.startswith(".")):
        raise OutputError(f"{out}: holds {shown[0]}, which no search wrote; choose a new folder.")
    if "search.json" in names and not overwrite:
        raise OutputError(f"{out}: holds a finished search; pass --overwrite to replace it.")
    if overwrite and names:
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)


def _write_json(file: Path, content: Any) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)
