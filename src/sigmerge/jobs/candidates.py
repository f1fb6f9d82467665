"""How candidates of a tuning are made and scored: in memory by a suite, or stored one by one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sigmerge import kept
from sigmerge.checkpoints.declared import checkpoint_files, files_around
from sigmerge.checkpoints.folder import Checkpoint, open_checkpoint
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.engine.machine import Meter, free_memory
from sigmerge.evaluation.scored_by import ScoredBy
from sigmerge.files.documents import content_key
from sigmerge.files.identity import changed
from sigmerge.files.objects import address
from sigmerge.files.safe_open import is_regular, remove
from sigmerge.jobs.dense import merge_into, plan_dense, run_dense
from sigmerge.jobs.fixed_repair import decided_job
from sigmerge.jobs.occupancy import claim_into, write_candidate
from sigmerge.jobs.options import Options
from sigmerge.jobs.scores import (
    BY,
    CheckpointScorer,
    MeasuredScores,
    ScoreFunction,
    is_still,
    kept_score,
    scored_by_callable,
    scorer_of,
    suite_and_how,
)
from sigmerge.kept import Derivation, Given, Inputs
from sigmerge.merge3.candidate import Memory, Weights, stored_weights
from sigmerge.method.deficit import check_scores
from sigmerge.progress import silent
from sigmerge.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from sigmerge.merge3.extract import Question
    from sigmerge.merge3.scoring import CandidateScorer

SCRATCH_ANCHOR, SCRATCH_CANDIDATE = ".winner.anchor", ".winner.candidate"
"""Folders of what is stored only to be scored, or repaired."""


class Measure(Protocol):
    """Scores recipes and stored checkpoints of a pool; `name` is for people."""

    pool: PoolMembers
    options: Options

    @property
    def name(self) -> str: ...

    @property
    def items(self) -> dict[str, int]:
        """Number of items of each domain, where it is known."""

    @property
    def side_by_side(self) -> bool:
        """Whether several candidates may be scored at a time."""

    def by(self) -> ScoredBy | None:
        """What decides the scores besides the recipe; None if it cannot be identified."""

    def recipe(self, recipe: Mapping[str, Any]) -> MeasuredScores:
        """Make a candidate and score it."""

    def folder(self, folder: Path) -> MeasuredScores:
        """The score of a stored checkpoint, which is kept."""


class KeptMeasure:
    """A measure whose scores are cached under everything that makes and scores a candidate.

    `looks` gets an item whenever a candidate or a checkpoint is scored, or found in the cache.
    """

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.looks: list[MeasuredScores] = []
        self.name, self.items = measure.name, measure.items

    @property
    def side_by_side(self) -> bool:
        return self.measure.side_by_side

    def folder(self, folder: Path) -> MeasuredScores:
        """The scores of a stored checkpoint."""
        meter = Meter()
        return self._looked(self.measure.folder(folder), meter)

    def candidate(self, recipe: Mapping[str, Any]) -> MeasuredScores:
        """The scores of a candidate: kept, or made now."""
        return self._got(recipe, lambda: self.measure.recipe(recipe))

    def known(self, recipe: Mapping[str, Any]) -> MeasuredScores | None:
        """The scores of a candidate, if they are kept."""
        by = self.measure.by()
        entry = None if by is None else kept.look(self._wanted(recipe, by))
        return None if entry is None else self._looked(MeasuredScores.of(entry), Meter())

    def put(self, recipe: Mapping[str, Any], found: MeasuredScores) -> MeasuredScores:
        """Cache the scores of a candidate that were computed elsewhere."""
        return self._got(recipe, lambda: found)

    def _got(
        self, recipe: Mapping[str, Any], score: Callable[[], MeasuredScores]
    ) -> MeasuredScores:
        meter, by = Meter(), self.measure.by()
        if by is None:
            return self._looked(score(), meter)

        def make(given: Given) -> Any:
            found = score()
            return found.to_keep(is_still(by, self.measure.by()) and self._usable(found.scores))

        return self._looked(MeasuredScores.of(kept.get(self._wanted(recipe, by), make)), meter)

    def _usable(self, scores: Mapping[str, float]) -> bool:
        domains = list(self.measure.pool.experts)
        known = {domain: {domain: 0.0} for domain in domains}
        return not check_scores(known, scores, domains, "own")

    def _wanted(self, recipe: Mapping[str, Any], by: ScoredBy) -> Derivation:
        made = candidate_of(recipe, self.measure.pool, self.measure.options)
        return Derivation(
            "candidate",
            StoredMeasure,
            made.inputs | Inputs.of(by=by.files),
            {"candidate": made.settings, "by": by.settings},
            (*made.libraries, *by.libraries),
            of=str(recipe["merge_method"]),
            volatile=(BY,),
        )

    def _looked(self, found: MeasuredScores, meter: Meter) -> MeasuredScores:
        waited = meter.wall_seconds if found.found else found.seconds
        self.looks.append(replace(found, waited=waited))
        return found


class CandidateOf(NamedTuple):
    """What decides a candidate's tensors: files, resolved settings, and libraries."""

    inputs: Inputs
    settings: dict[str, Any]
    libraries: tuple[str, ...]


def candidate_of(recipe: Mapping[str, Any], pool: PoolMembers, options: Options) -> CandidateOf:
    """Identifies the result of a recipe without computing it; files count by their content."""
    plain, loaded = without_repair(recipe), load_recipe(recipe)
    files: dict[str, Mapping[str, Path]] = {}
    places = {_written(each): f"member {name}" for name, each in pool.members.items()}
    named = filter(is_regular, loaded.files)
    files["named"] = {str(number): file for number, file in enumerate(named)}
    places |= {str(file.absolute()): f"named/{number}" for number, file in files["named"].items()}
    if loaded.tokenizer is not None:
        files["tokenizer"] = files_around(loaded.tokenizer)
        places[str(loaded.tokenizer.absolute())] = "tokenizer"
    settings: dict[str, Any] = {"lenient": options.allow_nonfinite}
    libraries = ["numpy"]
    if plain["merge_method"] == "checkpoint":
        anchor = open_checkpoint(Path(plain["anchor"]), allow_pickle=options.allow_pickle)
        files["anchor"] = checkpoint_files(anchor)
        places[plain["anchor"]] = "anchor"
    else:
        job = plan_dense(loaded if plain == recipe else load_recipe(plain), options)
        libraries += ["torch"] if job.operator.needs or job.solved_on != "cpu" else []
        settings |= {
            "operator": str(job.operator.revision),
            "layout": [hashlib.sha256(header).hexdigest() for header in job.layout.headers],
            "statistics": dict(job.statistics_keys),
            "solved_on": job.solved_on,
        }
    settings["recipe"] = json.dumps(_placed(recipe, places), sort_keys=True)
    return CandidateOf(pool_files(pool) | Inputs.of(**files), settings, tuple(libraries))


def pool_files(pool: PoolMembers) -> Inputs:
    """Every file of a pool's members."""
    members = {f"member/{name}": checkpoint_files(each) for name, each in pool.members.items()}
    return Inputs.of(**members)


def same_files(recipe: Recipe, pool: PoolMembers) -> SameInputs:
    """What all candidates of a recipe are made of: the pool's files, and what experts are shown."""
    shown = {model.name: model.exemplars for model in recipe.models if model.exemplars is not None}
    return SameInputs(pool_files(pool) | Inputs.of(exemplars=shown))


class SameInputs:
    """The input files of all calls, which must not change from the first call to the last."""

    def __init__(self, files: Inputs) -> None:
        self._files, self._before = files, files.digests()

    @property
    def key(self) -> str:
        """A name for their content."""
        return content_key([self._before])

    def check_same(self) -> None:
        """Raise if one of them changed: earlier calls were made of its old content."""
        now = self._files.digests()
        for role, digest in self._before.items():
            if now[role] != digest:
                raise changed(address(self._files.files[role]))


def _written(checkpoint: Checkpoint) -> str:
    """A checkpoint as the recipe of a candidate names it."""
    return checkpoint.place if checkpoint.adapter else str(checkpoint.path.absolute())


def without_repair(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a candidate's anchor."""
    return {key: value for key, value in recipe.items() if key != "repair"}


def _placed(value: Any, places: Mapping[str, str]) -> Any:
    """A recipe with the paths of its inputs replaced by their roles."""
    if isinstance(value, Mapping):
        return {key: _placed(each, places) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_placed(each, places) for each in value]
    return places.get(value, value) if isinstance(value, str) else value


class _Anchors:
    """Anchors that repairs claim from: folders, or merged into `place`, one at a time."""

    def __init__(self, place: Path, options: Options) -> None:
        self.place, self.options = place, options
        self._latest: tuple[dict[str, Any], Checkpoint] | None = None

    def __call__(self, recipe: Mapping[str, Any]) -> Checkpoint:
        """The anchor of a recipe with a repair; the one before is given up for it."""
        wanted = without_repair(recipe)
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

    def __init__(
        self, scorer: CheckpointScorer, pool: PoolMembers, work: Path, options: Options
    ) -> None:
        self.scorer, self.pool, self.place = scorer, pool, work / SCRATCH_CANDIDATE
        self.options = replace(options, overwrite=True, progress=silent, durable=False)
        self.items: dict[str, int] = {}
        self._anchors = _Anchors(work / SCRATCH_ANCHOR, self.options)

    @property
    def name(self) -> str:
        return self.scorer.name

    def by(self) -> ScoredBy | None:
        return self.scorer.by(self.pool.layout.path)

    def recipe(self, recipe: Mapping[str, Any]) -> MeasuredScores:
        loaded = load_recipe(recipe)
        remove(self.place)
        if loaded.repair is None:
            run_dense(plan_dense(loaded, self.options), self.place, self.options)
        else:
            job = decided_job(loaded.repair, self.pool, self._anchors(recipe))
            write_candidate(job, self.place, self.options)
        try:
            return self._counted(self.scorer.measure(self.place))
        finally:
            remove(self.place)

    def folder(self, folder: Path) -> MeasuredScores:
        return self._counted(self.scorer(folder))

    def _counted(self, measured: MeasuredScores) -> MeasuredScores:
        self.items.update({d: sum(map(len, each)) for d, each in measured.items.items()})
        return measured


class MemoryMeasure:
    """Candidates are merged in memory and answer the items of a suite one by one.

    A repair claims from a stored anchor, so the anchor of the repairs under way lies in `work`.
    """

    def __init__(
        self,
        scorer: CandidateScorer,
        pool: PoolMembers,
        work: Path,
        options: Options,
        limit: int | None = None,
    ) -> None:
        self.scorer, self.pool = scorer, pool
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
        return self.scorer.name

    @property
    def items(self) -> dict[str, int]:
        return {d: sum(len(self.questions[b]) for b in marks) for d, marks in self.domains.items()}

    @property
    def side_by_side(self) -> bool:
        """Two candidates in float32, each with the model that it is copied into, fit in memory."""
        one = 8 * sum(tensor.size for tensor in self.pool.layout.tensors.values())
        return free_memory() > 4 * one

    def by(self) -> ScoredBy | None:
        found = scored_by(self.scorer)
        if found is None:
            return None
        asked = {name: [question.id for question in each] for name, each in self.questions.items()}
        return replace(found, settings={**found.settings, "questions": content_key([asked])})

    def recipe(self, recipe: Mapping[str, Any]) -> MeasuredScores:
        return self._asked(self.weights(recipe))

    def folder(self, folder: Path) -> MeasuredScores:
        def ask(shown: Path) -> MeasuredScores:
            return self._asked(stored_weights(open_checkpoint(shown)))

        by = self.by()
        if by is None:
            return ask(folder)
        return kept_score(folder, by, ask, lambda _: is_still(by, self.by()), allow_pickle=False)

    def weights(self, recipe: Mapping[str, Any]) -> Weights:
        """The weights that the recipe's folder would hold."""
        if "repair" in recipe:
            return self._repaired(recipe)
        job = plan_dense(load_recipe(recipe), self.options)
        memory = Memory(job.layout, {n: t.shape for n, t in job.pool.layout.tensors.items()})
        merge_into(job, memory, self.options)
        return memory.weights

    def _repaired(self, recipe: Mapping[str, Any]) -> Weights:
        section = load_recipe(recipe).repair
        assert section is not None
        anchor = self._anchors(recipe)
        job = decided_job(section, self.pool, anchor)
        memory = Memory(job.layout, {n: t.shape for n, t in anchor.tensors.items()})
        claim_into(job, memory, self.options)
        return memory.weights

    def _asked(self, weights: Weights) -> MeasuredScores:
        flat = [question for each in self.questions.values() for question in each]
        meter = Meter()
        answers = iter(self.scorer(weights, flat))
        seconds = meter.wall_seconds
        worth = {name: [next(answers) for _ in each] for name, each in self.questions.items()}
        items = {domain: [worth[b] for b in marks] for domain, marks in self.domains.items()}
        scores = {domain: fmean(map(fmean, marks)) for domain, marks in items.items()}
        return MeasuredScores(scores, items, seconds)


def scored_by(scorer: CandidateScorer) -> ScoredBy | None:
    """What decides the scores besides the candidate; None if it cannot be identified."""
    declared = getattr(scorer, "by", None)
    return declared if isinstance(declared, ScoredBy) else scored_by_callable(scorer)


def measure_of(
    recipe: Recipe,
    pool: PoolMembers,
    work: Path,
    options: Options,
    split: str = "calibration",
    score: ScoreFunction | None = None,
    scorer: CandidateScorer | None = None,
) -> KeptMeasure | None:
    """How a split is scored: by what is given, else by what the recipe's repair: section names.

    None if it names nothing that can score this split. Candidates are stored in `work`.
    """
    found = _measure_of(recipe, pool, work, options, split, score, scorer)
    return None if found is None else KeptMeasure(found)


def _measure_of(
    recipe: Recipe,
    pool: PoolMembers,
    work: Path,
    options: Options,
    split: str,
    score: ScoreFunction | None,
    scorer: CandidateScorer | None,
) -> Measure | None:
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
    """True if candidates can be scored in memory: by torch rather than by a command."""
    suite, _ = suite_and_how(evaluate, recipe.folder, options)
    plain = evaluate.get("backend", "hf") == "hf" and "splits" not in evaluate
    return plain and all(mark.in_memory for mark in suite.benchmarks.values())
