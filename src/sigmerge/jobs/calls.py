"""Evaluation calls: merges and scores the candidates that a strategy proposes.

Tuning, guide: and calibrate: spend their calls here. A strategy is deterministic given the answers,
and every score is cached: running an interrupted job again continues it, and a longer budget costs
only the added calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sigmerge.engine.workers import Workers
from sigmerge.errors import ScoreError
from sigmerge.files.documents import write_lines
from sigmerge.jobs.candidates import KeptMeasure, Measure
from sigmerge.jobs.options import Options
from sigmerge.jobs.scores import MeasuredScores
from sigmerge.method import deficit
from sigmerge.method.deficit import Reference
from sigmerge.method.objective import Answer, Merit, Objective, Vector, amount
from sigmerge.method.tuning import Proposal
from sigmerge.records import TuneCall, TunedRepair


def experts_of(
    folders: Mapping[str, Path], measure: KeptMeasure, reference: Reference, options: Options
) -> dict[str, MeasuredScores]:
    """The scores of the experts, checked."""
    domains = list(folders)
    zeros = dict.fromkeys(domains, 0.0)
    found: dict[str, MeasuredScores] = {}
    wrong: list[str] = []
    for done, (name, folder) in enumerate(folders.items()):
        options.progress("scoring experts", done, len(folders))
        found[name] = measure.folder(folder)
        table = {**dict.fromkeys(domains, zeros), name: found[name].scores}
        wrong += deficit.check_scores(table, zeros, domains, reference)
    options.progress("scoring experts", len(folders), len(folders))
    if wrong:
        raise ScoreError(f"The scores ({measure.name}) cannot be used:", wrong)
    return found


def target_of(
    table: Mapping[str, Mapping[str, float]], domains: Sequence[str], reference: Reference
) -> dict[str, float]:
    """The score that a domain's deficit is measured against."""
    chosen = deficit.strongest if reference == "strongest" else deficit.own
    return dict(zip(domains, chosen(table, domains).tolist(), strict=True))


@dataclass
class Calls:
    """The calls of one budget: made now, or found among what is kept."""

    measure: KeptMeasure
    target: Mapping[str, float]
    objective: Objective
    budget: int
    recipe_of: Callable[[Proposal], dict[str, Any]]
    options: Options
    stage: str
    made: list[TuneCall] = field(default_factory=list)
    found: list[MeasuredScores] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    best: int = 0

    @property
    def replayed(self) -> int:
        """Number of calls whose scores came from the cache."""
        return sum(answered.found for answered in self.found)

    def ask(self, proposals: Sequence[Proposal]) -> list[Answer]:
        """Evaluate candidates; their errors are those of differences to the best one before."""
        first = len(self.made)
        if first + len(proposals) > self.budget:
            raise AssertionError("a strategy made more calls than there are")
        recipes = [self.recipe_of(proposal) for proposal in proposals]
        dense = all(proposal.repair is None for proposal in proposals)
        together = len(recipes) if dense and self.measure.side_by_side else 1
        answered: list[MeasuredScores] = []
        with Workers(max(1, min(together, self.options.threads))) as team:
            measured = self._measured(team, recipes, first, apart=together > 1)
            for index, found in enumerate(measured, first):
                self._check(index, found.scores)
                answered.append(found)
                self.options.progress(self.stage, index + 1, self.budget)
        before = self.answers[self.best] if self.answers else None
        for proposal, found in zip(proposals, answered, strict=True):
            self._taken(proposal, found, before)
        return self.answers[first:]

    def recipe(self, call: int) -> dict[str, Any]:
        return self.recipe_of(self.proposals[call])

    def best_of(self, calls: Iterable[int]) -> int:
        """The call with the best merit; of equals the first."""
        first, *others = calls
        best = first
        for call in others:
            best = call if self._merit(call).beats(self._merit(best)) else best
        return best

    def write(
        self,
        file: Path,
        about: Mapping[str, Any],
        experts: Mapping[str, MeasuredScores] | None = None,
    ) -> None:
        """Write one line for each call and its scores, for people: nothing reads it again."""
        lines = [dict(about)]
        lines += [
            {"expert": name, "scores": each.scores, "answers": each.items}
            for name, each in (experts or {}).items()
        ]
        lines += [
            {
                "call": call.call,
                "candidate": _identity(self.recipe(call.call)),
                "scores": found.scores,
                "answers": found.items,
                "error": call.error,
            }
            for call, found in zip(self.made, self.found, strict=True)
        ]
        write_lines(file, lines)

    def _measured(
        self, team: Workers, recipes: Sequence[Mapping[str, Any]], first: int, *, apart: bool
    ) -> Iterator[MeasuredScores]:
        """Scores of candidates in order, computed by threads or by tasks of a cluster."""
        cluster = self.options.cluster
        if cluster is None or not apart:
            yield from team.map(self.measure.candidate, recipes)
            return
        known = [self.measure.known(recipe) for recipe in recipes]
        numbered = enumerate(zip(recipes, known, strict=True), first)
        missing = [(index, recipe) for index, (recipe, found) in numbered if found is None]
        measured = iter(
            cluster.map(
                partial(_measured, self.measure.measure),
                missing,
                lambda pair: f"{self.stage}: call {pair[0]}",
            )
        )
        for recipe, found in zip(recipes, known, strict=True):
            yield found or self.measure.put(recipe, next(measured))

    def _check(self, index: int, scores: Mapping[str, float]) -> None:
        known = {domain: {domain: score} for domain, score in self.target.items()}
        if problems := deficit.check_scores(known, scores, list(self.target), "own"):
            raise ScoreError(
                f"The scores ({self.measure.name}) cannot be used:",
                [p.replace("anchor.", f"call {index}: ", 1) for p in problems],
            )

    def _taken(self, proposal: Proposal, found: MeasuredScores, before: Answer | None) -> None:
        """Count a call: its merit, and whether it is the best so far."""
        index, answer = len(self.made), found.answer
        self.found.append(found)
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
                scores=found.scores,
                value=merit.value,
                below=merit.below,
                error=0.0 if before is None else self.objective.error(answer, before),
                best=best,
            )
        )
        name, size = amount(self.objective.kind, best)
        self.options.progress(f"best {name}, percent", round(100 * size), 100)

    def _merit(self, index: int) -> Merit:
        domains = tuple(self.target)
        scores: Vector = tuple(self.answers[index].scores[d] for d in domains)
        return self.objective.merit(domains, scores, tuple(self.target.values()))


def _measured(measure: Measure, numbered: tuple[int, Mapping[str, Any]]) -> MeasuredScores:
    return measure.recipe(numbered[1])


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
    """The part of a candidate's recipe that identifies it; paths are covered by the inputs."""
    models = recipe["models"]
    return {
        "anchor": recipe["merge_method"],
        "weights": [model.get("parameters", {}).get("weight") for model in models],
        "repair": recipe.get("repair"),
    }
