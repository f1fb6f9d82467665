"""`sigmerge tune`: the strongest merge of a pool within a stated number of evaluation calls.

    OUT/tune.jsonl    every call with its candidate, answers and scores, a line each
    OUT/winner/       the best candidate, an ordinary folder with the recipe that makes it
    OUT/report.html   the page: the path to the winner
    OUT/tune.json     the record of the tuning; written last

The calibration items choose; the evaluation items, where there are any, only report. Every
candidate is a plain recipe with explicit weights, shares and capacity, so the winner is made again
by `sigmerge merge OUT/winner/sigmerge/recipe.yaml` without any evaluation.

The score of every candidate is kept (`sigmerge.kept`). So an interrupted tuning goes on where it
stopped when the same command is run again, and a finished one is extended by more calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.engine.machine import LIBRARIES, Meter
from sigmerge.errors import OutputError, RecipeError, ScoreError
from sigmerge.files.documents import content_key
from sigmerge.files.safe_open import remove
from sigmerge.jobs.calls import Calls, decided_section, experts_of, target_of
from sigmerge.jobs.candidates import SCRATCH_ANCHOR, KeptMeasure, measure_of, same_files
from sigmerge.jobs.dense import DenseJob, plan_dense, with_statistics
from sigmerge.jobs.merge import MergeJob
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import open_repair_pool, pool_folders, require_whole
from sigmerge.jobs.profile import describe_profile, measure_profile, probe_prompts
from sigmerge.jobs.scores import ScoreFunction, check_domains
from sigmerge.jobs.steps import Description, TuneStep
from sigmerge.jobs.strategies import BOX, STRATEGIES, Setup, check_method
from sigmerge.jobs.work_folder import WINNER, WorkFolder
from sigmerge.kept import Inputs
from sigmerge.method import conflict
from sigmerge.method.objective import Answer, Objective, paired_bootstrap
from sigmerge.method.tuning import Proposal
from sigmerge.pages.html import require_page
from sigmerge.pages.tuning import write_tuning_page
from sigmerge.progress import silent
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.recipe.anchors import AnchorRecipe, anchors_of
from sigmerge.recipe.scored import RepairSection, TuneSection
from sigmerge.records import (
    PAGE,
    Interval,
    TunedScores,
)
from sigmerge.results import TuneResult

if TYPE_CHECKING:
    from sigmerge.merge3.scoring import CandidateScorer

TUNING_LOG, TUNING_RESULT = "tune.jsonl", "tune.json"
TUNING_FOLDER = WorkFolder(
    "tuning", (TUNING_LOG, TUNING_RESULT, PAGE), (WINNER,), last=TUNING_RESULT
)
RESAMPLES = 10_000
SHOWN_CALLS = 16
"""From so many calls on the anchors that read exemplars are tried by default: with fewer, one more
anchor to score costs more than it brings (docs/results/tune.md)."""


def pool_recipe(folder: Path, seed: int | None = None) -> Recipe:
    """A recipe for a folder with reference/ and one checkpoint folder per expert.

    A pool that `nano train` made brings its probe prompts, its experts' exemplars and the items
    that score it.
    """
    reference, experts = pool_folders(folder)
    repair: dict[str, Any] = {}
    if (folder / "probe.jsonl").is_file():
        repair["probe"] = str((folder / "probe.jsonl").absolute())
    if (folder / "splits/calibration").is_dir():
        repair["evaluate"] = {"suite": "nano", "pool": str(folder.absolute())}
    return load_recipe({
        "merge_method": "task_arithmetic",
        "preset": "paper",
        "base_model": str(reference.absolute()),
        "models": [_listed(folder.absolute(), path.name) for path in experts],
        "parameters": {"weight": 0.4},
        "repair": repair,
    }, seed=seed)  # fmt: skip


def _listed(pool: Path, name: str) -> dict[str, str]:
    """An expert of a pool's folder, with its exemplars where there are any."""
    shown = pool / "exemplars" / f"{name}.jsonl"
    return {"model": str(pool / name), "name": name} | (
        {"exemplars": str(shown)} if shown.is_file() else {}
    )


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
        tried = self.section.method in ("guided", "random") and self.section.calls >= SHOWN_CALLS
        capture = self.recipe.capture
        if self.options.device != "cpu" and "device" not in capture.model_fields_set:
            capture = capture.model_copy(update={"device": self.options.device})
        return anchors_of(replace(self.recipe, capture=capture), self.section.anchors, tried)

    @cached_property
    def objective(self) -> Objective:
        given = self.section
        return Objective(given.objective, given.weights, given.floors)

    @cached_property
    def pool(self) -> PoolMembers:
        return open_repair_pool(self.recipe, self.options)

    @cached_property
    def measure(self) -> KeptMeasure:
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
        probed = self._prompts is not None
        given = self.section
        check_method(given.method, self.anchors, given.calls, probed, given.population)
        problems = self.objective.problems(domains)
        problems += [
            f"repair.{key}: a tuned repair has none; leave it out" for key in self._repair.untried
        ]
        if problems:
            raise RecipeError("The tuning cannot be run:", problems)
        require_page()
        TUNING_FOLDER.check(self.out, True, self.recipe.kept)
        require_whole(self.recipe, self.pool)
        if (self.out / WINNER).exists() and not (self.out / TUNING_LOG).exists():
            raise OutputError(f"{self.out}: holds winner, which no tuning wrote; choose another.")
        if (self.out / TUNING_RESULT).exists() and not self.options.overwrite:
            TUNING_FOLDER.check_extends(self.out, self._of, self.section.calls)
        if self.measure.items:
            check_domains(self.measure.items, domains, "The scores")

    def describe(self) -> Description:
        self.check()
        parameters = sum(tensor.size for tensor in self.pool.layout.tensors.values())
        captures = {
            f"{expert} for {name}": peak
            for name, job in self._plans.items()
            for expert, peak in job.to_capture.items()
        }
        step = TuneStep(
            method=self.section.method,
            anchors=tuple(self.anchors),
            to_capture=tuple(captures),
            experts=tuple(self.recipe.experts),
            objective=self.section.objective,
            floors=dict(self.section.floors),
            expert_runs=len(self.recipe.experts),
            items_per_call=self.measure.items,
            bytes_to_read=self.section.calls * sum(m.nbytes for m in self.pool.members.values()),
            bytes_to_write=self.pool.layout.nbytes,
            peak_memory_bytes=max(LIBRARIES + 16 * parameters, *captures.values(), 0),
            evaluation_calls=self.section.calls,
            notes=self._unused(),
        )
        profile = describe_profile(self.recipe, self.pool, self.options)
        return Description((profile, step), self.options.threads)

    def run(self) -> TuneResult:
        meter = Meter()
        self.check()
        with TUNING_FOLDER.writing(self.out):
            folders, reference = self.recipe.experts, self._repair.reference
            same = same_files(self.recipe, self.pool)
            answered = experts_of(folders, self.measure, reference, self.options)
            experts = {name: each.scores for name, each in answered.items()}
            setup = self._setup(experts)
            self._capture()
            calls = Calls(
                self.measure, setup.target, self.objective, self.section.calls,
                self._candidate, self.options, "tuning",
            )  # fmt: skip
            ended = STRATEGIES[self.section.method](setup, calls.ask)
            same.check_same()
            TUNING_FOLDER.clear(self.out)  # what an earlier tuning wrote, which this one replaces
            calls.write(self.out / TUNING_LOG, self._about, answered)
            chosen = calls.best if ended.chosen is None else ended.chosen
            plain = calls.best_of(i for i, p in enumerate(calls.proposals) if self._plain(p))
            merged = self._winner(calls.recipe(chosen))
            record = TuneResult(
                out=str(self.out.absolute()),
                of=self._of,
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
                repaired=self._repaired(calls),
                replayed=calls.replayed,
                warnings=(*self._unused(), *merged),
                wall_seconds=meter.wall_seconds,
                peak_memory_bytes=meter.peak_memory_bytes,
            )
            write_tuning_page(self.out / PAGE, record)
            record.write(self.out / TUNING_RESULT)
        return record

    def _unused(self) -> tuple[str, ...]:
        """Notes about what the recipe says and the tuning decides instead."""
        given = [key for key in ("guide", "search") if getattr(self.recipe, key) is not None]
        chosen = ("scale", "update", "calibrate", "shares", "capacity")
        given += [f"repair.{key}" for key in chosen if key in self._repair.model_fields_set]
        notes = [f"The tuning decides, not the recipe: {', '.join(given)}."] if given else []
        if self._repair.guard == "off":
            notes.append("guard: off is not used: a tuning never ends below the plain anchor.")
        return tuple(notes)

    def _capture(self) -> None:
        """What anchors read of exemplars, made once: candidates find it in its folder."""
        for job in self._plans.values():
            if job.operator.needs:
                with_statistics(job, self.options)

    @cached_property
    def _plans(self) -> dict[str, DenseJob]:
        """The merges of the plain anchors; their recipes are checked on the way."""
        return {
            name: plan_dense(
                load_recipe(anchor.recipe(tuple(anchor.weights.values()))), self.options
            )
            for name, anchor in self.anchors.items()
        }

    @cached_property
    def _of(self) -> dict[str, str]:
        """What is tuned, each part by a name for its content. The number of calls is left out."""
        given = self.recipe.given
        told = {key: given[key] for key in ("parameters", "modules", "slices") if key in given}
        by = self.measure.measure.by()
        scored = (
            self.measure.name if by is None else [dict(by.settings), Inputs(by.files).digests()]
        )
        parts = {
            "settings": self.section.model_dump(exclude={"calls"}),
            "seed": self.recipe.seed,
            "recipe": [self.recipe.method, self.recipe.preset, told],
            "pool": same_files(self.recipe, self.pool).key,
            "repair": self._repair.model_dump(
                include={"c_min", "c_max", "device", "reference", "seed"}
            ),
            "probe": self._prompts and content_key(probe_prompts(self._prompts)),
            "scores": scored,
        }
        return {name: content_key([part]) for name, part in parts.items()}

    @property
    def _about(self) -> dict[str, Any]:
        """The first line of the log."""
        settings = self.section.model_dump()
        return {"settings": settings, "seed": self.recipe.seed, "scores": self.measure.name}

    @property
    def _repair(self) -> RepairSection:
        return self.recipe.repair or RepairSection.model_validate({})

    @property
    def _prompts(self) -> Path | None:
        return self.recipe.folder / self._repair.probe if self._repair.probe else None

    def _setup(self, experts: Mapping[str, Mapping[str, float]]) -> Setup:
        measured = measure_profile(self.recipe, self.pool, self.options)
        score, _ = conflict.conflict_score(measured.views, list(measured.views))
        section, domains = self._repair, list(self.recipe.experts)
        return Setup(
            anchors=self.anchors,
            target=target_of(experts, domains, section.reference),
            profile=tuple(conflict.capacity(score, section.c_min, section.c_max).tolist()),
            calls=self.section.calls,
            objective=self.objective,
            seed=self.recipe.seed,
            box=self.section.box or BOX,
            population=self.section.population,
            prompts=self._prompts,
        )

    def _candidate(self, proposal: Proposal) -> dict[str, Any]:
        """The plain recipe of a candidate."""
        repair = decided_section(proposal, list(self.recipe.experts), self._repair.seed)
        return self.anchors[proposal.anchor].recipe(proposal.weights, repair)

    def _plain(self, proposal: Proposal) -> bool:
        """Whether a candidate is an anchor as it is."""
        weights = tuple(self.anchors[proposal.anchor].weights.values())
        return proposal.repair is None and proposal.weights == weights

    def _repaired(self, calls: Calls) -> TunedScores | None:
        """The best repair that was tried, whether it is taken or not."""
        tried = [i for i, each in enumerate(calls.proposals) if each.repair is not None]
        if not tried:
            return None
        plain = calls.best_of(i for i in range(len(calls.proposals)) if i not in tried)
        return self._scores(calls.answers[plain], calls.answers[calls.best_of(tried)])

    def _winner(self, recipe: Mapping[str, Any]) -> tuple[str, ...]:
        """Store the chosen candidate; the warnings of its merge."""
        quiet = replace(self.options, overwrite=True, progress=silent)
        merged = MergeJob(load_recipe(recipe), self.out / WINNER, quiet).run()
        remove(self.out / SCRATCH_ANCHOR, if_possible=True)
        return merged.warnings

    def _evaluation(self, plain: Mapping[str, Any]) -> TunedScores | None:
        """The plain anchor and the winner on items that no call has seen."""
        measure = measure_of(
            self.recipe, self.pool, self.out, self.options, "evaluation", self.score, self.scorer
        )
        if measure is None:
            return None
        self.options.progress("evaluating", 0, 2)
        before = measure.candidate(plain).answer
        self.options.progress("evaluating", 1, 2)
        after = measure.folder(self.out / WINNER).answer
        self.options.progress("evaluating", 2, 2)
        return self._scores(before, after)

    def _scores(self, plain: Answer, tuned: Answer) -> TunedScores:
        """Scores with the interval of their mean difference, where items are known."""
        gain = None
        if plain.marks is not None and tuned.marks is not None:
            found, low, high = paired_bootstrap(
                tuned.marks, plain.marks, RESAMPLES, self.recipe.seed
            )
            items = sum(mark.size for marks in tuned.marks.values() for mark in marks)
            gain = Interval(difference=found, low=low, high=high, resamples=RESAMPLES, items=items)
        return TunedScores(plain=plain.scores, tuned=tuned.scores, gain=gain)
