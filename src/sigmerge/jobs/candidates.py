"""How candidates of a tuning are made and scored: in memory by a suite, or stored one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint, open_checkpoint
from sigmerge.checkpoints.pool import Pool
from sigmerge.checkpoints.source import PoolSource
from sigmerge.engine.machine import Meter, free_memory
from sigmerge.engine.stream import Workers
from sigmerge.files.regular import remove
from sigmerge.jobs.decided import decided_job
from sigmerge.jobs.dense import merge_blocks, plan_dense, run_dense, with_statistics
from sigmerge.jobs.occupancy import claim_into, write_candidate
from sigmerge.jobs.options import Options
from sigmerge.jobs.scores import (
    CheckpointScorer,
    Look,
    ScoreFunction,
    scorer_of,
    suite_and_how,
)
from sigmerge.merge3.candidate import Memory, Weights, stored_weights
from sigmerge.method.objective import Answer
from sigmerge.progress import silent
from sigmerge.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from sigmerge.merge3.extract import Question
    from sigmerge.merge3.scoring import CandidateScorer

SCRATCH_ANCHOR, SCRATCH_CANDIDATE = ".winner.anchor", ".winner.candidate"
"""Folders of what is stored only to be scored, or repaired."""
Worths = dict[str, list[float]]
"""Benchmark -> what the answer to every item is worth, 0 to 1."""


class Measure(Protocol):
    """Scores recipes and stored checkpoints. A tuning is resumed only with the same `name`.

    `looks` grows by one whenever one of them is scored.
    """

    @property
    def looks(self) -> list[Look]: ...

    @property
    def name(self) -> str: ...

    @property
    def items(self) -> dict[str, int]:
        """Items of every domain, as far as they are known."""

    @property
    def side_by_side(self) -> bool:
        """Whether several candidates may be scored at a time."""

    def recipe(self, recipe: Mapping[str, Any]) -> tuple[dict[str, float], Worths | None]: ...

    def folder(self, folder: Path) -> tuple[dict[str, float], Worths | None]: ...

    def answer(self, scores: Mapping[str, float], worth: Worths | None) -> Answer: ...


class _Anchors:
    """Anchors that repairs claim from: folders, or merged into `place`, one at a time."""

    def __init__(self, place: Path, options: Options) -> None:
        self.place, self.options = place, options
        self._latest: tuple[dict[str, Any], Checkpoint] | None = None

    def __call__(self, recipe: Mapping[str, Any]) -> Checkpoint:
        """The anchor of a recipe with a repair; the one before is given up for it."""
        wanted = {key: value for key, value in recipe.items() if key != "repair"}
        if wanted["merge_method"] == "checkpoint":
            return open_checkpoint(Path(wanted["anchor"]), allow_pickle=self.options.allow_pickle)
        if self._latest is None or self._latest[0] != wanted:
            remove(self.place)
            run_dense(plan_dense(load_recipe(wanted), self.options), self.place, self.options)
            self._latest = wanted, open_checkpoint(self.place)
        return self._latest[1]


class StoredMeasure:
    """Candidates are stored beside the result, scored by a command or a callable, and removed."""

    side_by_side = False

    def __init__(self, scorer: CheckpointScorer, pool: Pool, work: Path, options: Options) -> None:
        self.scorer, self.pool, self.place = scorer, pool, work / SCRATCH_CANDIDATE
        self.options = replace(options, overwrite=True, progress=silent, durable=False)
        self.items: dict[str, int] = {}
        self._anchors = _Anchors(work / SCRATCH_ANCHOR, self.options)

    @property
    def name(self) -> str:
        found = self.scorer.identity
        more = [found(self.pool.layout.path)] if found else []
        return " ".join([self.scorer.name, *more])

    @property
    def looks(self) -> list[Look]:
        return self.scorer.looks

    def recipe(self, recipe: Mapping[str, Any]) -> tuple[dict[str, float], Worths | None]:
        loaded = load_recipe(recipe)
        remove(self.place)
        if loaded.repair is None:
            run_dense(plan_dense(loaded, self.options), self.place, self.options)
        else:
            job = decided_job(loaded.repair, self.pool, self._anchors(recipe))
            write_candidate(job, self.place, self.options)
        try:
            return self.folder(self.place)
        finally:
            remove(self.place)

    def folder(self, folder: Path) -> tuple[dict[str, float], Worths | None]:
        return dict(self.scorer(folder).scores), None

    def answer(self, scores: Mapping[str, float], worth: Worths | None) -> Answer:
        return Answer(scores)


class MemoryMeasure:
    """Candidates are merged in memory and answer the items of a suite one by one.

    A repair claims from a stored anchor, so the anchor of the repairs under way lies in `work`.
    """

    def __init__(
        self,
        scorer: CandidateScorer,
        pool: Pool,
        work: Path,
        options: Options,
        limit: int | None = None,
    ) -> None:
        self.scorer, self.pool = scorer, pool
        self.looks: list[Look] = []
        # Where a cluster has the GPUs, a candidate is made here too, where there may be none.
        device = options.device if options.engine == "local" else "cpu"
        self.options = replace(options.in_a_task, overwrite=True, durable=False, device=device)
        self.questions: dict[str, list[Question]] = {}
        for question in scorer.questions():
            each = self.questions.setdefault(question.benchmark, [])
            if limit is None or len(each) < limit:
                each.append(question)
        self.domains: dict[str, list[str]] = {}
        for benchmark, each in self.questions.items():
            self.domains.setdefault(each[0].domain, []).append(benchmark)
        self._anchors = _Anchors(work / SCRATCH_ANCHOR, self.options)

    @property
    def name(self) -> str:
        counts = {benchmark: len(each) for benchmark, each in self.questions.items()}
        return f"{self.scorer.name} {counts}"

    @property
    def items(self) -> dict[str, int]:
        return {d: sum(len(self.questions[b]) for b in marks) for d, marks in self.domains.items()}

    @property
    def side_by_side(self) -> bool:
        """Two candidates in float32, each with the model that it is copied into, fit in memory."""
        one = 8 * sum(tensor.size for tensor in self.pool.layout.tensors.values())
        return free_memory() > 4 * one

    def recipe(self, recipe: Mapping[str, Any]) -> tuple[dict[str, float], Worths | None]:
        return self._asked(self.weights(recipe))

    def folder(self, folder: Path) -> tuple[dict[str, float], Worths | None]:
        return self._asked(stored_weights(open_checkpoint(folder)))

    def answer(self, scores: Mapping[str, float], worth: Worths | None) -> Answer:
        assert worth is not None
        marks = {
            domain: [np.array(worth[b], np.float64) for b in marks]
            for domain, marks in self.domains.items()
        }
        return Answer(scores, marks)

    def weights(self, recipe: Mapping[str, Any]) -> Weights:
        """The weights that the recipe's folder would hold."""
        if "repair" in recipe:
            return self._repaired(recipe)
        job = plan_dense(load_recipe(recipe), self.options)
        if job.operator.needs:
            job = with_statistics(job, self.options)
        memory = Memory(job.layout, {n: t.shape for n, t in job.pool.layout.tensors.items()})
        lenient = self.options.allow_nonfinite
        with (
            PoolSource(job.members, allow_nonfinite=lenient) as source,
            Workers(self.options.threads) as team,
        ):
            merge_blocks(job, source, team, memory, self.options)
        return memory.weights

    def _repaired(self, recipe: Mapping[str, Any]) -> Weights:
        section = load_recipe(recipe).repair
        assert section is not None
        anchor = self._anchors(recipe)
        job = decided_job(section, self.pool, anchor)
        memory = Memory(job.layout, {n: t.shape for n, t in anchor.tensors.items()})
        claim_into(job, memory, self.options)
        return memory.weights

    def _asked(self, weights: Weights) -> tuple[dict[str, float], Worths]:
        flat = [question for each in self.questions.values() for question in each]
        meter = Meter()
        answers = iter(self.scorer(weights, flat))
        self.looks.append(Look(meter.wall_seconds, meter.wall_seconds, len(flat)))
        worth = {name: [next(answers) for _ in each] for name, each in self.questions.items()}
        scores = {
            domain: fmean(fmean(worth[b]) for b in marks) for domain, marks in self.domains.items()
        }
        return scores, worth


def measure_of(
    recipe: Recipe,
    pool: Pool,
    work: Path,
    options: Options,
    split: str = "calibration",
    score: ScoreFunction | None = None,
    scorer: CandidateScorer | None = None,
) -> Measure | None:
    """How a split is scored: by what is given, else by what the recipe's repair: section names.

    None if it names nothing that can score this split. Candidates are stored in `work`.
    """
    if scorer is not None:
        return MemoryMeasure(scorer, pool, work, options) if split == "calibration" else None
    if score is not None:
        found = scorer_of(recipe, options, score=score) if split == "calibration" else None
        return None if found is None else StoredMeasure(found, pool, work, options)
    if recipe.repair is None:
        return None
    evaluate, found = recipe.repair.evaluate, scorer_of(recipe, options, split)
    if found is not None and found.check is not None:
        found.check(next(iter(recipe.experts.values())))
    if evaluate is not None and _fits_memory(evaluate, recipe, options):
        from sigmerge.merge3.scoring import SuiteScorer

        suite, how = suite_and_how(evaluate, recipe.folder, options)
        asked = SuiteScorer(pool.layout.path, suite, how, split)
        return MemoryMeasure(asked, pool, work, options, evaluate.get("limit"))
    return None if found is None else StoredMeasure(found, pool, work, options)


def _fits_memory(evaluate: Mapping[str, Any], recipe: Recipe, options: Options) -> bool:
    """Whether candidates need not be stored to be scored: torch scores them, and no command."""
    suite, _ = suite_and_how(evaluate, recipe.folder, options)
    plain = evaluate.get("backend", "hf") == "hf" and "splits" not in evaluate
    return plain and all(mark.in_memory for mark in suite.benchmarks.values())
