"""`sigmerge tune`: the strongest merge of a pool within a stated number of evaluation calls.

    OUT/tune.jsonl    every call with its candidate, answers and scores, line by line as they come
    OUT/winner/       the best candidate, an ordinary folder with the recipe that makes it
    OUT/report.html   the page: the path to the winner
    OUT/tune.json     the record of the tuning; written last

The calibration items choose; the evaluation items, where there are any, only report. Every
candidate is a plain recipe with explicit weights, shares and capacity, so the winner is made again
by `sigmerge merge OUT/winner/sigmerge/recipe.yaml` without any evaluation. Interrupted, the same
command replays tune.jsonl and goes on where it stopped.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sigmerge.analysis.tuning import write_tuning_page
from sigmerge.checkpoints.pool import Pool
from sigmerge.engine.machine import LIBRARIES, Meter
from sigmerge.engine.stream import Workers
from sigmerge.errors import OutputError, RecipeError, ScoreError
from sigmerge.files.journal import Journal
from sigmerge.jobs.candidates import Measure, Right, measure_of
from sigmerge.jobs.dense import plan_dense
from sigmerge.jobs.merge import MergeJob
from sigmerge.jobs.options import Description, Options, Step, silent
from sigmerge.jobs.pools import open_repair_pool
from sigmerge.jobs.profile import describe_profile, measure_profile
from sigmerge.jobs.scores import ScoreFunction
from sigmerge.jobs.strategies import STRATEGIES, Setup
from sigmerge.jobs.work_folder import WorkFolder
from sigmerge.method import conflict, deficit
from sigmerge.method.objective import (
    Answer,
    Merit,
    Objective,
    check_calls,
    difference_error,
    paired_bootstrap,
)
from sigmerge.method.tuning import Proposal
from sigmerge.recipe import Recipe, RepairSection, TuneSection, load_recipe
from sigmerge.recipe.anchors import AnchorRecipe, anchors_of
from sigmerge.records import (
    PAGE,
    Interval,
    TuneCall,
    TunedRepair,
    TunedScores,
    TuneRecord,
)

if TYPE_CHECKING:
    from sigmerge.merge3.scoring import CandidateScorer

TUNING_JOURNAL, TUNING_RESULT, WINNER = "tune.jsonl", "tune.json", "winner"
TUNING_FOLDER = WorkFolder(
    "tuning", (TUNING_JOURNAL, TUNING_RESULT, PAGE), (WINNER,), last=TUNING_RESULT
)
TUNING_LINES = (
    {"expert", "scores", "answers"},
    {"call", "candidate", "scores", "answers", "error"},
)
"""The keys of a journal's records."""
RESAMPLES = 10_000


def pool_recipe(folder: Path) -> Recipe:
    """A recipe for a folder with reference/ and one checkpoint folder per expert.

    A pool that `nano train` made brings its probe prompts and the items that score it.
    """
    reference = folder / "reference"
    experts = sorted(
        path.parent for path in folder.glob("*/config.json") if path.parent != reference
    )
    if not (reference / "config.json").is_file() or not experts:
        raise RecipeError(f"{folder}: is no pool; reference/ and a folder per expert are expected.")
    repair: dict[str, Any] = {}
    if (folder / "probe.jsonl").is_file():
        repair["probe"] = str((folder / "probe.jsonl").absolute())
    if (folder / "splits/calibration").is_dir():
        repair["evaluate"] = {"suite": "nano", "pool": str(folder.absolute())}
    return load_recipe({
        "merge_method": "task_arithmetic",
        "preset": "paper",
        "base_model": str(reference.absolute()),
        "models": [{"model": str(path.absolute()), "name": path.name} for path in experts],
        "parameters": {"weight": 0.4},
        "repair": repair,
    })  # fmt: skip


@dataclass(frozen=True)
class TuneJob:
    """The tuning of a recipe's pool into a folder of its own.

    `settings` go before the recipe's tune: section. `score` is a callable from a checkpoint folder
    to {domain: fraction}, `scorer` one that answers items; each replaces the recipe's own scores.
    """

    recipe: Recipe
    out: Path
    options: Options
    settings: TuneSection | None = None
    score: ScoreFunction | None = None
    scorer: CandidateScorer | None = None

    @cached_property
    def section(self) -> TuneSection:
        return self.settings or self.recipe.tune or TuneSection()

    @cached_property
    def anchors(self) -> dict[str, AnchorRecipe]:
        return anchors_of(self.recipe, self.section.anchors)

    @cached_property
    def objective(self) -> Objective:
        given = self.section
        return Objective(given.objective, given.weights, given.floors)

    @cached_property
    def pool(self) -> Pool:
        return open_repair_pool(self.recipe, self.options)

    @cached_property
    def measure(self) -> Measure:
        found = measure_of(
            self.recipe, self.pool, self.out, self.options, "calibration", self.score, self.scorer
        )
        if found is None:
            raise ScoreError(
                "Tuning scores merges that do not exist yet: give command: or evaluate: in the "
                "recipe's repair: section; a file of scores cannot."
            )
        return found

    def check(self) -> None:
        """Find every problem of the recipe, the settings, the folder and the scores."""
        domains = list(self.recipe.experts)
        least = len(self.anchors) + 1
        check_calls(self.section.calls, least, f"tuning {len(self.anchors)} anchors")
        if problems := self.objective.problems(domains):
            raise RecipeError("The tuning cannot be run:", problems)
        TUNING_FOLDER.check(self.out, self.options.overwrite, self.recipe.inputs)
        if (self.out / WINNER).exists() and not (self.out / TUNING_JOURNAL).exists():
            raise OutputError(f"{self.out}: holds winner, which no tuning wrote; choose another.")
        self._fingerprints()
        unknown = [d for d in self.measure.items if d not in domains]
        missing = [d for d in domains if self.measure.items and d not in self.measure.items]
        if unknown or missing:
            raise ScoreError(
                "The scores cannot steer the weights: every domain needs the expert of its name.",
                [*(f"{d}: no expert of this name" for d in unknown),
                 *(f"{d}: no items of this domain" for d in missing)],
            )  # fmt: skip

    def describe(self) -> Description:
        self.check()
        parameters = sum(tensor.size for tensor in self.pool.layout.tensors.values())
        facts: dict[str, object] = {
            "method": self.section.method,
            "anchors": list(self.anchors),
            "experts": list(self.recipe.experts),
            "objective": self.section.objective,
            "floors": dict(self.section.floors),
            "expert_runs": len(self.recipe.experts),
            "items_per_call": self.measure.items,
        }
        step = Step(
            "tune",
            facts,
            bytes_to_read=self.section.calls * sum(m.nbytes for m in self.pool.members.values()),
            bytes_to_write=self.pool.layout.nbytes,
            peak_memory_bytes=LIBRARIES + 16 * parameters,
            evaluation_calls=self.section.calls,
        )
        profile = describe_profile(self.recipe, self.pool, self.options)
        return Description((profile, step), self.options.threads)

    def run(self) -> TuneRecord:
        meter = Meter()
        self.check()
        with TUNING_FOLDER.writing(self.out):
            if self.options.overwrite:
                TUNING_FOLDER.clear(self.out)
            with Journal(
                self.out / TUNING_JOURNAL, self._header(), TUNING_LINES, "tuning"
            ) as journal:
                calls = _Calls(self, journal)
                experts = calls.experts()
                ended = STRATEGIES[self.section.method](self._setup(experts), calls.ask)
            plain, chosen = calls.plain, calls.best if ended.chosen is None else ended.chosen
            merged = self._winner(calls.recipe(chosen))
            record = TuneRecord(
                out=str(self.out.absolute()),
                winner=str((self.out / WINNER).absolute()),
                settings=self.section.model_dump(),
                anchors=tuple(self.anchors),
                experts=experts,
                calls=tuple(calls.made),
                expert_runs=len(experts),
                items_per_call=self.measure.items,
                stopped=ended.stopped,
                plain=plain,
                chosen=chosen,
                calibration=self._scores(calls.answers[plain], calls.answers[chosen]),
                evaluation=self._evaluation(calls.recipe(plain)),
                replayed=calls.replayed,
                warnings=merged,
                wall_seconds=meter.wall_seconds,
                peak_memory_bytes=meter.peak_memory_bytes,
            )
            write_tuning_page(self.out / PAGE, record)
            record.write(self.out / TUNING_RESULT)
        return record

    def _fingerprints(self) -> dict[str, str]:
        """Identifies the plain anchors; their recipes are checked on the way."""
        return {
            name: plan_dense(
                load_recipe(anchor.recipe(tuple(anchor.weights.values()))), self.options
            ).fingerprint()
            for name, anchor in self.anchors.items()
        }

    def _header(self) -> dict[str, Any]:
        """Whose calls a journal holds; a tuning is only continued under the same header."""
        return {
            "settings": self.section.model_dump(),
            "seed": self.recipe.seed,
            "anchors": self._fingerprints(),
            "repair": self._repair.model_dump(include={"c_min", "c_max", "probe", "reference"}),
            "scorer": self.measure.name,
        }

    @property
    def _repair(self) -> RepairSection:
        return self.recipe.repair or RepairSection.model_validate({})

    def _setup(self, experts: Mapping[str, Mapping[str, float]]) -> Setup:
        measured = measure_profile(self.recipe, self.pool, self.options)
        score, _ = conflict.conflict_score(measured.views, list(measured.views))
        section, domains = self._repair, list(self.recipe.experts)
        chosen = deficit.strongest if section.reference == "strongest" else deficit.own
        return Setup(
            anchors=self.anchors,
            target=dict(zip(domains, chosen(experts, domains).tolist(), strict=True)),
            profile=tuple(conflict.capacity(score, section.c_min, section.c_max).tolist()),
            calls=self.section.calls,
            objective=self.objective,
            seed=self.recipe.seed,
            prompts=self.recipe.folder / section.probe if section.probe else None,
        )

    def _winner(self, recipe: Mapping[str, Any]) -> tuple[str, ...]:
        """Store the chosen candidate; the warnings of its merge."""
        quiet = replace(self.options, overwrite=True, progress=silent)
        merged = MergeJob(load_recipe(recipe), self.out / WINNER, quiet).run()
        shutil.rmtree(self.out / ".winner.anchor", ignore_errors=True)
        return merged.warnings

    def _evaluation(self, plain: Mapping[str, Any]) -> TunedScores | None:
        """The plain anchor and the winner on items that no call has seen."""
        measure = measure_of(
            self.recipe, self.pool, self.out, self.options, "evaluation", self.score, self.scorer
        )
        if measure is None:
            return None
        self.options.progress("evaluating", 0, 2)
        before = measure.answer(*measure.recipe(plain))
        self.options.progress("evaluating", 1, 2)
        after = measure.answer(*measure.folder(self.out / WINNER))
        self.options.progress("evaluating", 2, 2)
        return self._scores(before, after)

    def _scores(self, plain: Answer, tuned: Answer) -> TunedScores:
        """Scores with the interval of their mean difference, where items are known."""
        gain = None
        if plain.right is not None and tuned.right is not None:
            found, low, high = paired_bootstrap(
                tuned.right, plain.right, RESAMPLES, self.recipe.seed
            )
            items = sum(mark.size for marks in tuned.right.values() for mark in marks)
            gain = Interval(difference=found, low=low, high=high, resamples=RESAMPLES, items=items)
        return TunedScores(plain=plain.scores, tuned=tuned.scores, gain=gain)


@dataclass
class _Calls:
    """The calls of a tuning: made now, or answered by the journal of an interrupted run."""

    job: TuneJob
    journal: Journal
    made: list[TuneCall] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    best: int = 0

    def __post_init__(self) -> None:
        records = self.journal.records
        self._experts = {r["expert"]: r for r in records if "expert" in r}
        self._called = {r["call"]: r for r in records if "call" in r}
        self.replayed = len(self._called)
        self._target: tuple[float, ...] = ()

    def experts(self) -> dict[str, dict[str, float]]:
        """The scores of the experts, checked."""
        job, folders = self.job, self.job.recipe.experts
        for done, (name, folder) in enumerate(folders.items()):
            job.options.progress("scoring experts", done, len(folders))
            if name not in self._experts:
                scores, right = job.measure.folder(folder)
                record = {"expert": name, "scores": scores, "answers": right}
                self.journal.append(record)
                self._experts[name] = record
        job.options.progress("scoring experts", len(folders), len(folders))
        table = {name: self._experts[name]["scores"] for name in folders}
        domains, reference = list(folders), job._repair.reference
        problems = deficit.check_scores(table, table[domains[0]], domains, reference)
        if problems := [p for p in problems if not p.startswith("anchor.")]:
            raise ScoreError(f"The scores ({job.measure.name}) cannot be used:", problems)
        chosen = deficit.strongest if reference == "strongest" else deficit.own
        self._target = tuple(chosen(table, domains).tolist())
        return table

    def ask(self, proposals: Sequence[Proposal]) -> list[Answer]:
        """Evaluate candidates; those evaluated before are answered by the journal."""
        first, job = len(self.made), self.job
        if first + len(proposals) > job.section.calls:
            raise AssertionError("a strategy asked for more calls than there are")
        numbered = list(enumerate(proposals, first))
        missing = [(i, p) for i, p in numbered if not self._replays(i, p)]
        dense = all(proposal.repair is None for _, proposal in missing)
        together = len(missing) if dense and job.measure.side_by_side else 1
        with Workers(max(1, min(together, job.options.threads))) as team:
            for record in team.map(lambda pair: self._evaluated(*pair), missing):
                self.journal.append(record)
                self._called[record["call"]] = record
                job.options.progress("tuning", record["call"] + 1, job.section.calls)
        return [self._taken(index, proposal) for index, proposal in numbered]

    def recipe(self, call: int) -> dict[str, Any]:
        return self._recipe(self.proposals[call])

    @property
    def plain(self) -> int:
        """The call of the best plain anchor."""
        best: int | None = None
        for index, proposal in enumerate(self.proposals):
            anchor = self.job.anchors[proposal.anchor]
            if proposal.repair is None and proposal.weights == tuple(anchor.weights.values()):
                merit = self._merit(index)
                if best is None or merit.beats(self._merit(best)):
                    best = index
        assert best is not None
        return best

    def _replays(self, index: int, proposal: Proposal) -> bool:
        if index not in self._called:
            return False
        if self._called[index]["candidate"] != _plain(self._recipe(proposal)):
            raise OutputError(
                f"{self.journal.file}: call {index} has another candidate than this tuning gives "
                "it; another version wrote it. Pass --overwrite to start over."
            )
        return True

    def _evaluated(self, index: int, proposal: Proposal) -> dict[str, Any]:
        recipe = self._recipe(proposal)
        scores, right = self.job.measure.recipe(recipe)
        error = self._error(self.job.measure.answer(scores, right))
        return {
            "call": index,
            "candidate": _plain(recipe),
            "scores": scores,
            "answers": right,
            "error": error,
        }

    def _error(self, answer: Answer) -> float:
        return difference_error(answer, self.answers[self.best]) if self.answers else 0.0

    def _taken(self, index: int, proposal: Proposal) -> Answer:
        """Count a call: its merit, and whether it is the best so far."""
        record = self._called[index]
        right: Right | None = record["answers"]
        answer = self.job.measure.answer(record["scores"], right)
        self.answers.append(answer)
        self.proposals.append(proposal)
        merit = self._merit(index)
        if index and merit.beats(self._merit(self.best)):
            self.best = index
        domains = list(self.job.recipe.experts)
        self.made.append(
            TuneCall(
                call=index,
                anchor=proposal.anchor,
                weights=dict(zip(domains, proposal.weights, strict=True)),
                repair=_repair(proposal, domains),
                scores=record["scores"],
                value=merit.value,
                below=merit.below,
                error=record["error"],
                best=self._merit(self.best).value,
            )
        )
        self.job.options.progress(
            "best objective, per mille", round(1000 * self._merit(self.best).value), 1000
        )
        return answer

    def _merit(self, index: int) -> Merit:
        domains = tuple(self.job.recipe.experts)
        scores = tuple(self.answers[index].scores[d] for d in domains)
        return self.job.objective.merit(domains, scores, self._target)

    def _recipe(self, proposal: Proposal) -> dict[str, Any]:
        """The plain recipe of a candidate."""
        found = _repair(proposal, list(self.job.recipe.experts))
        repair = None
        if found is not None:
            repair = {**found.as_json(), "guard": "off", "seed": self.job._repair.seed}
        return self.job.anchors[proposal.anchor].recipe(proposal.weights, repair)


def _repair(proposal: Proposal, domains: Sequence[str]) -> TunedRepair | None:
    found = proposal.repair
    if found is None:
        return None
    return TunedRepair(
        update=found.form,
        scale=found.scale,
        capacity=found.capacity,
        shares=dict(zip(domains, found.share, strict=True)),
    )


def _plain(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What of a candidate's recipe identifies it; paths are the inputs' business."""
    return {
        "anchor": recipe["merge_method"],
        "weights": [model["parameters"].get("weight") for model in recipe["models"]],
        "repair": recipe.get("repair"),
    }
