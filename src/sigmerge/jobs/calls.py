"""Evaluation calls: candidates proposed by a strategy are made, scored and journalled.

A tuning, a guide: section and a calibrate: section spend their calls here. What the journal of an
interrupted run holds is not scored again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from sigmerge.engine.workers import Workers
from sigmerge.errors import OutputError, ScoreError
from sigmerge.files.journal import Journal
from sigmerge.jobs.candidates import Measure, Worths
from sigmerge.jobs.options import Options
from sigmerge.method import deficit
from sigmerge.method.deficit import Reference
from sigmerge.method.objective import Answer, Merit, Objective, Vector, amount
from sigmerge.method.tuning import Proposal
from sigmerge.records import TuneCall, TunedRepair

CALL_LINES: Final = (
    {"expert", "scores", "answers"},
    {"call", "candidate", "scores", "answers", "error"},
)
"""The keys of a journal's records."""


def experts_of(
    folders: Mapping[str, Path],
    measure: Measure,
    journal: Journal,
    reference: Reference,
    options: Options,
) -> dict[str, dict[str, float]]:
    """The scores of the experts, checked. Those that cannot be used are not written down."""
    domains = list(folders)
    zeros = dict.fromkeys(domains, 0.0)

    def problems(name: str, scores: Mapping[str, float]) -> list[str]:
        table = {**dict.fromkeys(domains, zeros), name: scores}
        return deficit.check_scores(table, zeros, domains, reference)

    known = {r["expert"]: r for r in journal.records if "expert" in r}
    wrong: list[str] = []
    for done, (name, folder) in enumerate(folders.items()):
        options.progress("scoring experts", done, len(folders))
        if name not in known:
            scores, worth = measure.folder(folder)
            known[name] = {"expert": name, "scores": scores, "answers": worth}
            if found := problems(name, scores):
                wrong += found
            else:
                journal.append(known[name])
    options.progress("scoring experts", len(folders), len(folders))
    if wrong:
        raise ScoreError(f"The scores ({measure.name}) cannot be used:", wrong)
    return {name: known[name]["scores"] for name in folders}


def target_of(
    table: Mapping[str, Mapping[str, float]], domains: Sequence[str], reference: Reference
) -> dict[str, float]:
    """The score that a domain's deficit is measured against."""
    chosen = deficit.strongest if reference == "strongest" else deficit.own
    return dict(zip(domains, chosen(table, domains).tolist(), strict=True))


@dataclass
class Calls:
    """The calls of one budget: made now, or answered by the journal of an interrupted run."""

    journal: Journal
    measure: Measure
    target: Mapping[str, float]
    objective: Objective
    budget: int
    recipe_of: Callable[[Proposal], dict[str, Any]]
    options: Options
    stage: str
    made: list[TuneCall] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    best: int = 0

    def __post_init__(self) -> None:
        self._called = {r["call"]: r for r in self.journal.records if "call" in r}
        self.replayed = len(self._called)

    def ask(self, proposals: Sequence[Proposal]) -> list[Answer]:
        """Evaluate candidates; those evaluated before are answered by the journal."""
        first = len(self.made)
        if first + len(proposals) > self.budget:
            raise AssertionError("a strategy made more calls than there are")
        numbered = list(enumerate(proposals, first))
        missing = [(i, p) for i, p in numbered if not self._replays(i, p)]
        dense = all(proposal.repair is None for _, proposal in missing)
        together = len(missing) if dense and self.measure.side_by_side else 1
        with Workers(max(1, min(together, self.options.threads))) as team:
            for record in self._records(team, missing, apart=together > 1):
                self.journal.append(record)
                self._called[record["call"]] = record
                self.options.progress(self.stage, record["call"] + 1, self.budget)
        return [self._taken(index, proposal) for index, proposal in numbered]

    def recipe(self, call: int) -> dict[str, Any]:
        return self.recipe_of(self.proposals[call])

    def best_of(self, calls: Iterable[int]) -> int:
        """The call with the best merit; of equals the first."""
        first, *others = calls
        best = first
        for call in others:
            best = call if self._merit(call).beats(self._merit(best)) else best
        return best

    def _replays(self, index: int, proposal: Proposal) -> bool:
        if index not in self._called:
            return False
        if self._called[index]["candidate"] != _identity(self.recipe_of(proposal)):
            raise OutputError(
                f"{self.journal.file}: call {index} has another candidate than this run gives it; "
                "another version wrote it. Pass --overwrite to start over."
            )
        return True

    def _records(
        self, team: Workers, missing: Sequence[tuple[int, Proposal]], *, apart: bool
    ) -> Iterator[dict[str, Any]]:
        """The records of calls in order: by threads, or by tasks of a cluster if they may be."""
        cluster = self.options.cluster
        if cluster is None or not apart:
            yield from team.map(lambda pair: self._evaluated(*pair), missing)
            return
        recipes = [(index, self.recipe_of(proposal)) for index, proposal in missing]
        measured = cluster.map(
            partial(_measured, self.measure), recipes, lambda pair: f"{self.stage}: call {pair[0]}"
        )
        for (index, recipe), (scores, worth) in zip(recipes, measured, strict=True):
            yield self._record(index, recipe, scores, worth)

    def _evaluated(self, index: int, proposal: Proposal) -> dict[str, Any]:
        recipe = self.recipe_of(proposal)
        return self._record(index, recipe, *self.measure.recipe(recipe))

    def _record(
        self,
        index: int,
        recipe: Mapping[str, Any],
        scores: dict[str, float],
        worth: Worths | None,
    ) -> dict[str, Any]:
        self._check(index, scores)
        answer = self.measure.answer(scores, worth)
        error = self.objective.error(answer, self.answers[self.best]) if self.answers else 0.0
        return {
            "call": index,
            "candidate": _identity(recipe),
            "scores": scores,
            "answers": worth,
            "error": error,
        }

    def _check(self, index: int, scores: Mapping[str, float]) -> None:
        known = {domain: {domain: score} for domain, score in self.target.items()}
        if problems := deficit.check_scores(known, scores, list(self.target), "own"):
            raise ScoreError(
                f"The scores ({self.measure.name}) cannot be used:",
                [p.replace("anchor.", f"call {index}: ", 1) for p in problems],
            )

    def _taken(self, index: int, proposal: Proposal) -> Answer:
        """Count a call: its merit, and whether it is the best so far."""
        record = self._called[index]
        answer = self.measure.answer(record["scores"], record["answers"])
        self.answers.append(answer)
        self.proposals.append(proposal)
        self.best = self.best_of([self.best, index]) if index else 0
        merit, domains = self._merit(index), list(self.target)
        best = self._merit(self.best).value
        self.made.append(
            TuneCall(
                call=index,
                anchor=proposal.anchor,
                weights=dict(zip(domains, proposal.weights, strict=True)),
                repair=tuned_repair(proposal, domains),
                scores=record["scores"],
                value=merit.value,
                below=merit.below,
                error=record["error"],
                best=best,
            )
        )
        name, size = amount(self.objective.kind, best)
        self.options.progress(f"best {name}, percent", round(100 * size), 100)
        return answer

    def _merit(self, index: int) -> Merit:
        domains = tuple(self.target)
        scores: Vector = tuple(self.answers[index].scores[d] for d in domains)
        return self.objective.merit(domains, scores, tuple(self.target.values()))


def _measured(
    measure: Measure, pair: tuple[int, Mapping[str, Any]]
) -> tuple[dict[str, float], Worths | None]:
    return measure.recipe(pair[1])


def tuned_repair(proposal: Proposal, domains: Sequence[str]) -> TunedRepair | None:
    """The repair of a proposal as records and recipes name it."""
    found = proposal.repair
    if found is None:
        return None
    return TunedRepair(
        update=found.form,
        scale=found.scale,
        capacity=found.capacity,
        shares=dict(zip(domains, found.share, strict=True)),
    )


def decided_section(proposal: Proposal, domains: Sequence[str], seed: int) -> dict[str, Any] | None:
    """The repair: section that makes a proposal without any score; None for a plain anchor."""
    found = tuned_repair(proposal, domains)
    return None if found is None else {**found.as_json(), "guard": "off", "seed": seed}


def _identity(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What of a candidate's recipe identifies it; paths are the inputs' business."""
    models = recipe["models"]
    return {
        "anchor": recipe["merge_method"],
        "weights": [model.get("parameters", {}).get("weight") for model in models],
        "repair": recipe.get("repair"),
    }
