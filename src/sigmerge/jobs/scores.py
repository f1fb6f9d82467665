"""Sources of domain scores, and their cache.

A score is a fraction per domain. Sources: a JSON file, result files of lm-evaluation-harness, a
command that prints JSON, a suite, or a Python callable. Scores of a command and of a callable are
kept by the content of the checkpoint and by all that scores it, so an expert is scored once per
pool: a command by its line and the files that it names, a callable by its `sigmerge_key`, or by
its code and what it closes over. A suite keeps every item itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from sigmerge import kept
from sigmerge.checkpoints.declared import checkpoint_files, named, shown_folder
from sigmerge.checkpoints.folder import Checkpoint, open_checkpoint
from sigmerge.engine.machine import LIBRARIES, Meter
from sigmerge.errors import ScoreError
from sigmerge.evaluation.command_line import check_program, run_command, scored_by_command
from sigmerge.evaluation.scored_by import ScoredBy
from sigmerge.files.documents import parse_json, read_json_object
from sigmerge.files.environment import MODEL_LIBRARIES
from sigmerge.files.sources import callable_files, callable_key
from sigmerge.jobs.options import Options
from sigmerge.jobs.steps import ScoreStep
from sigmerge.kept import Derivation, Given, Inputs, KeptEntry, NotToKeep
from sigmerge.method.deficit import DomainScores, check_scores
from sigmerge.method.objective import Answer
from sigmerge.recipe import Recipe
from sigmerge.recipe.scored import HarnessScores
from sigmerge.records import PairedScores, ScoreNoise, ScoreTable

if TYPE_CHECKING:
    from sigmerge.evaluation.how import How
    from sigmerge.evaluation.run import Result
    from sigmerge.evaluation.suite import BenchmarkSuite

ScoreFunction = Callable[[Path], Mapping[str, float | Sequence[float]]]
"""A Python callable from a checkpoint folder to {domain: fraction}, or to what the answer to every
item of the domain is worth."""


@dataclass(frozen=True)
class MetricScore:
    """One metric of one benchmark; those marked `headline` make up the domain's score.

    `item_scores` are the items' own, of a headline.
    """

    domain: str
    benchmark: str
    metric: str
    value: float
    headline: bool
    items: int
    item_scores: Sequence[float] = ()


@dataclass(frozen=True)
class MeasuredScores:
    """The scores of one checkpoint, from whatever measured them, now or earlier.

    `missing` names, by domain, the benchmarks that had no data; `metrics` are the numbers behind
    the scores. Only a suite gives these two.
    """

    scores: DomainScores
    items: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    """Item scores by domain and benchmark, where they are known; a callable's domain is one."""
    seconds: float = 0.0
    """Duration of the measurement, whenever that was."""
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metrics: tuple[MetricScore, ...] = ()
    waited: float = field(default=0.0, compare=False)
    """How long this run waited for them."""
    found: bool = field(default=False, compare=False)
    """Whether they came from the cache."""

    @property
    def answer(self) -> Answer:
        """The scores as an objective reads them, with item scores if every domain has them."""
        if not self.items or self.items.keys() != self.scores.keys():
            return Answer(self.scores)
        marks = {d: [np.array(b, np.float64) for b in each] for d, each in self.items.items()}
        return Answer(self.scores, marks)

    @property
    def labelled(self) -> int | None:
        """How many items were answered; None if single items are unknown."""
        return sum(len(mark) for each in self.items.values() for mark in each) or None

    def to_keep(self, usable: bool) -> Any:
        """The value of a cache entry; invalid scores are not cached: a scorer may be mended."""
        items = {d: [list(mark) for mark in each] for d, each in self.items.items()}
        value = {"scores": dict(self.scores), "items": items, "seconds": self.seconds}
        return value if usable else NotToKeep(value)

    @classmethod
    def of(cls, entry: KeptEntry) -> MeasuredScores:
        return cls(**entry.value, found=entry.kept)


BY = "by/"
"""Prefix of the roles of files that a command reads, and may write itself."""


def kept_score(
    folder: Path,
    by: ScoredBy,
    ask: Callable[[Path], MeasuredScores],
    usable: Callable[[MeasuredScores], bool],
    allow_pickle: bool,
) -> MeasuredScores:
    """Scores of a checkpoint: from the cache, or measured on a folder of links to its files."""
    checkpoint = open_checkpoint(folder, allow_pickle=allow_pickle)
    wanted = Derivation(
        "score",
        _scored,
        Inputs.of(checkpoint=checkpoint_files(checkpoint), by=by.files),
        by.settings,
        by.libraries,
        of=checkpoint.place,
        volatile=(BY,),
    )
    make = partial(_scored, checkpoint=checkpoint, ask=ask, usable=usable)
    return MeasuredScores.of(kept.get(wanted, make))


def _scored(
    given: Given,
    checkpoint: Checkpoint,
    ask: Callable[[Path], MeasuredScores],
    usable: Callable[[MeasuredScores], bool],
) -> Any:
    shown = shown_folder(given, "checkpoint", checkpoint)
    with named(shown, checkpoint):
        found = ask(shown)
    return found.to_keep(usable(found))


@dataclass(frozen=True)
class CheckpointScorer:
    """Measures a checkpoint folder. `name` is for people.

    `by` says, for a model of the pool, what decides the scores besides the checkpoint; None if
    nothing can name it, and then nothing is kept. `check` raises what would stop a measurement,
    and returns why benchmarks are left out; None if only a measurement shows that. `keeps`: the
    scores of a checkpoint are kept as they are. `looks` grows by one at every call.
    """

    name: str
    measure: Callable[[Path], MeasuredScores]
    by: Callable[[Path], ScoredBy | None]
    check: Callable[[Path], Mapping[str, str]] | None = None
    keeps: bool = False
    allow_pickle: bool = False
    usable: Callable[[DomainScores], bool] = lambda scores: True
    looks: list[MeasuredScores] = field(default_factory=list)

    def __call__(self, folder: Path) -> MeasuredScores:
        """Scores of a folder; kept ones if one with the same content was measured before."""
        meter = Meter()
        by = self.by(folder) if self.keeps else None
        measured = self.measure(folder) if by is None else self._kept(folder, by)
        self.looks.append(replace(measured, waited=meter.wall_seconds))
        return measured

    def _kept(self, folder: Path, by: ScoredBy) -> MeasuredScores:
        def usable(found: MeasuredScores) -> bool:
            return is_still(by, self.by(folder)) and self.usable(found.scores)

        return kept_score(folder, by, self.measure, usable, self.allow_pickle)


def callable_scorer(score: ScoreFunction) -> CheckpointScorer:
    def measure(folder: Path) -> MeasuredScores:
        meter = Meter()
        found = score(folder)
        return _measured(found, meter)

    return CheckpointScorer(
        "a Python callable", measure, lambda model: scored_by_callable(score), keeps=True
    )


def _measured(found: Mapping[Any, Any], meter: Meter) -> MeasuredScores:
    """Scores by domain: fractions, or means of item scores."""
    worth = {
        str(domain): [float(each) for each in value]
        for domain, value in found.items()
        if isinstance(value, Iterable) and not isinstance(value, str)
    }
    if empty := [domain for domain, items in worth.items() if not items]:
        raise ScoreError(f"{empty[0]}: the score has no item.")
    scores = {
        str(d): fmean(worth[str(d)]) if str(d) in worth else float(q) for d, q in found.items()
    }
    items = {domain: [each] for domain, each in worth.items()}
    return MeasuredScores(scores, items, meter.wall_seconds)


def is_still(by: ScoredBy, now: ScoredBy | None) -> bool:
    """Whether the same decides scores as when they were asked for; says once that it does not."""
    if now != by:
        kept.say("what scores a checkpoint changed while it did: its scores are not kept")
    return now == by


def scored_by_callable(score: Callable[..., Any]) -> ScoredBy | None:
    """What decides the scores of a user's callable; None if it has no digest."""
    key = callable_key(score)
    files = {str(number): file for number, file in enumerate(callable_files(score))}
    return None if key is None else ScoredBy({"callable": key}, files, MODEL_LIBRARIES)


def scorer_of(
    recipe: Recipe, options: Options, split: str = "calibration", score: ScoreFunction | None = None
) -> CheckpointScorer | None:
    """A callable if there is one, else what the recipe's repair: section names.

    None if the scores are in a file, or cannot be had on this split.
    """
    if score is not None:
        found = callable_scorer(score)
        return replace(found, allow_pickle=options.allow_pickle, usable=partial(_usable, recipe))
    section = recipe.repair
    assert section is not None
    if section.command is not None:
        if split != "calibration" and "{split}" not in section.command:
            return None
        return _command_scorer(section.command.replace("{split}", split), recipe, options)
    if section.evaluate is not None:
        return suite_scorer(section.evaluate, split, recipe.folder, options, list(recipe.experts))
    return None


def check_domains(scored: Collection[str], experts: Collection[str], what: str) -> None:
    """ScoreError if what is scored are not the domains of the experts, all of them."""
    problems = [f"{domain}: nothing scores it" for domain in experts if domain not in scored]
    problems += [f"{domain}: no expert has this name" for domain in scored if domain not in experts]
    if problems:
        raise ScoreError(f"{what} and the experts differ in their domains:", problems)


def _command_scorer(command: str, recipe: Recipe, options: Options) -> CheckpointScorer:
    where, folder = "repair.command", recipe.folder

    check_program(command, folder, where)

    def by(_: Path) -> ScoredBy:
        return scored_by_command(command, folder, where)

    def measure(checkpoint: Path) -> MeasuredScores:
        meter = Meter()
        lines = run_command(command, {"checkpoint": checkpoint}, folder, where)
        return printed_scores(lines, where, meter)

    return CheckpointScorer(
        f"command {command} in {folder}",
        measure,
        by,
        keeps=True,
        allow_pickle=options.allow_pickle,
        usable=partial(_usable, recipe),
    )


def _usable(recipe: Recipe, scores: DomainScores) -> bool:
    """Whether one checkpoint's scores are of the recipe's domains, and all that are read of it."""
    zeros = dict.fromkeys(recipe.experts, 0.0)
    # Of an expert only its own score may be read.
    own = recipe.repair is not None and recipe.repair.reference == "own"
    row = {**zeros, **scores} if own else scores
    return not check_scores(dict.fromkeys(recipe.experts, zeros), row, list(recipe.experts))


def printed_scores(lines: list[str], where: str, meter: Meter) -> MeasuredScores:
    """Domain scores from a command's output; its last line is a JSON object."""
    last = lines[-1] if lines else ""
    try:
        content = parse_json(last, where, ScoreError, unique=True)
        return _measured(content, meter)
    except (ScoreError, ValueError, AttributeError, TypeError, OverflowError) as error:
        why = f" ({error})" if isinstance(error, ScoreError) else ""
        raise ScoreError(
            f"{where}: its last line must be a JSON object of domain scores, "
            f"{f'not {last!r}{why}' if lines else 'and it printed nothing'}."
        ) from None


EVALUATE_KEYS = {
    "suite": str,
    "pool": str,
    "backend": str,
    "dtype": str,
    "batch_size": int,
    "limit": int,
    "data": str,
    "hub": bool,
    "splits": str,
    "judge": str,
    "allow_code_execution": bool,
}
"""What `repair: evaluate:` may say; `pool` is for suite: nano, what follows it for the others."""


def suite_scorer(
    evaluate: Mapping[str, Any],
    split: str,
    folder: Path,
    options: Options,
    experts: Sequence[str] = (),
) -> CheckpointScorer:
    """The embedded suite, a shipped one, or the user's own, measured on a split.

    Its check finds out whether its domains are those of the `experts`, if they are given.
    """
    problems = [
        f"{key}: is not known; there are {', '.join(EVALUATE_KEYS)}"
        if key not in EVALUATE_KEYS
        else f"{key}: {value!r} is no {EVALUATE_KEYS[key].__name__}"
        for key, value in evaluate.items()
        if key not in EVALUATE_KEYS or type(value) is not EVALUATE_KEYS[key]
    ]
    problems += [
        f"{key}: {evaluate[key]} is too small; give 1 or more, or leave it out"
        for key in ("limit", "batch_size")
        if type(evaluate.get(key)) is int and evaluate[key] < 1
    ]
    if "suite" not in evaluate:
        problems.append("suite: is missing; give nano, mergebench or a suite's YAML file")
    if problems:
        raise ScoreError("repair.evaluate: cannot be used:", problems)
    return _suite_scorer(evaluate, split, folder, options, experts)


def _suite_scorer(
    evaluate: Mapping[str, Any],
    split: str,
    folder: Path,
    options: Options,
    experts: Sequence[str],
) -> CheckpointScorer:
    from sigmerge.evaluation.run import evaluate as evaluate_folder
    from sigmerge.evaluation.run import prepared

    suite, how = suite_and_how(evaluate, folder, options)
    items: set[str] = set()

    def check(checkpoint: Path) -> Mapping[str, str]:
        run, chosen, absent = prepared(checkpoint, suite, split, how)
        run.require_model(chosen)
        scored = dict.fromkeys(map(suite.domain_of, chosen))
        if experts:
            check_domains(scored, experts, f"The suite {suite.name}")
        return absent

    @cache
    def by(model: Path) -> ScoredBy:
        run, chosen, _ = prepared(model, suite, split, how)
        return run.scored_by_all(chosen)

    def measure(checkpoint: Path) -> MeasuredScores:
        result = evaluate_folder(checkpoint, suite, split, how)
        items.add(result.items_sha256)
        if len(items) > 1:
            raise ScoreError(
                f"suite {evaluate['suite']}: its records changed between two checkpoints, whose "
                "scores cannot be compared. Run the same command again."
            )
        missing = {d: tuple(n) for d, n in result.missing.items()}
        metrics = tuple(_metrics(suite, result))
        return MeasuredScores(
            dict(result.domains), result.item_scores, result.usage_of_results.seconds, missing,
            metrics,
        )  # fmt: skip

    return CheckpointScorer(f"suite {evaluate['suite']} {split}", measure, by, check)


def suite_and_how(
    evaluate: Mapping[str, Any], folder: Path, options: Options
) -> tuple[BenchmarkSuite, How]:
    """The suite and the settings of a recipe's evaluate:, whose files are looked for beside it."""
    from sigmerge.evaluation.how import How
    from sigmerge.evaluation.sources import Data
    from sigmerge.evaluation.suite import load_suite, nano_suite

    def beside(key: str) -> Path | None:
        return folder / evaluate[key] if key in evaluate else None

    own = folder / evaluate["suite"]
    if evaluate["suite"] == "nano":
        suite = nano_suite(beside("pool"))
    else:
        suite = load_suite(str(own) if own.is_file() else evaluate["suite"])
    passed = ("backend", "dtype", "batch_size", "judge", "limit")
    how = How(
        data=Data.default(beside("data"), evaluate.get("hub", False)),
        splits=beside("splits"),
        allow_code=evaluate.get("allow_code_execution", False),
        allow_pickle=options.allow_pickle,
        trust_remote_code=options.trust_remote_code,
        strict=options.strict,
        **{key: evaluate[key] for key in passed if key in evaluate},
    )
    return suite, how


def _metrics(suite: BenchmarkSuite, result: Result) -> Iterator[MetricScore]:
    by_benchmark = {domain: iter(each) for domain, each in result.item_scores.items()}
    for domain, name, metric in suite.submetrics:
        if name in result.benchmarks:
            headline = metric == suite.benchmarks[name].score
            value = result.benchmarks[name][metric]
            items = tuple(next(by_benchmark[domain])) if headline else ()
            yield MetricScore(domain, name, metric, value, headline, result.items[name], items)


def score_table(
    recipe: Recipe, anchor: Path | None, scorer: CheckpointScorer | None, options: Options
) -> ScoreTable:
    """Scores of all experts and the anchor, checked; every problem is reported at once."""
    section = recipe.repair
    assert section is not None
    domains = list(recipe.experts)
    if scorer is not None:
        if anchor is None:
            raise ScoreError("The anchor must be stored before it can be scored; give --anchor.")
        measured = each({**recipe.experts, "anchor of this merge": anchor}, scorer, "scoring",
                        options)  # fmt: skip
        *experts, of_anchor = measured.values()
        table = ScoreTable(
            experts={name: found.scores for name, found in zip(domains, experts, strict=True)},
            anchor=of_anchor.scores,
            missing=of_anchor.missing,
            noise=_noise(dict(zip(domains, experts, strict=True)), of_anchor),
        )
        where = scorer.name
    elif section.scores is not None:
        table, where = read_scores(section.scores, recipe.folder), "repair.scores"
    else:
        raise ScoreError(
            "The repair needs scores of the experts and the anchor: give one of scores:, command: "
            "and evaluate: in the repair: section."
        )
    problems = check_scores(table.experts, table.anchor, domains, section.reference)
    if problems:
        raise ScoreError(f"The scores ({where}) cannot be used:", problems)
    return table


def each(
    folders: Mapping[str, Path], scorer: CheckpointScorer, stage: str, options: Options
) -> dict[str, MeasuredScores]:
    """Measure folders one after the other."""
    measured = {}
    for done, (name, folder) in enumerate(folders.items()):
        options.progress(stage, done, len(folders))
        measured[name] = scorer(folder)
    options.progress(stage, len(folders), len(folders))
    return measured


def paired_scores(
    recipe: Recipe, anchor: Path, repaired: Path, scorer: CheckpointScorer, options: Options
) -> PairedScores:
    """Scores of the experts, the anchor and the repaired merge."""
    folders = {**{f"expert {name}": path for name, path in recipe.experts.items()},
               "anchor": anchor, "repaired": repaired}  # fmt: skip
    measured = each(folders, scorer, "evaluating", options)
    experts = {name: measured[f"expert {name}"] for name in recipe.experts}
    return PairedScores(
        experts={name: found.scores for name, found in experts.items()},
        anchor=measured["anchor"].scores,
        repaired=measured["repaired"].scores,
        missing=measured["anchor"].missing,
        noise=_noise(experts, measured["anchor"], measured["repaired"]),
    )


def _noise(
    experts: Mapping[str, MeasuredScores],
    anchor: MeasuredScores,
    repaired: MeasuredScores | None = None,
) -> ScoreNoise | None:
    """The sampling error from the number of items; None if items are unknown."""
    if not anchor.items:
        return None
    gains = {
        domain: [
            [after - before for before, after in zip(*pair, strict=True)]
            for pair in zip(marks, repaired.items[domain], strict=True)
        ]
        for domain, marks in (anchor.items.items() if repaired else ())
        if repaired
    }
    return ScoreNoise(
        items={domain: sum(map(len, marks)) for domain, marks in anchor.items.items()},
        experts={name: _errors(found.items) for name, found in experts.items()},
        anchor=_errors(anchor.items),
        repaired=_errors(repaired.items if repaired else {}),
        gain=_errors(gains),
    )


def _errors(items: Mapping[str, Sequence[Sequence[float]]]) -> DomainScores:
    from sigmerge.evaluation.aggregate import standard_error

    found = {domain: standard_error(marks) for domain, marks in items.items()}
    return {domain: error for domain, error in found.items() if error is not None}


def missing_notes(missing: Mapping[str, tuple[str, ...]]) -> list[str]:
    """A warning for every domain whose score lacks benchmarks (ruling 24)."""
    return [
        f"{domain}: scored without {', '.join(names)}, which has no data here"
        if len(names) == 1
        else f"{domain}: scored without {', '.join(names)}, which have no data here"
        for domain, names in missing.items()
    ]


def describe_scoring(
    recipe: Recipe,
    scorer: CheckpointScorer | None,
    checkpoints: int,
    split: str,
    options: Options,
) -> ScoreStep:
    """Scoring as a step of a dry run. A suite is checked, and its model counted."""
    section = recipe.repair
    assert section is not None
    if scorer is None:
        return ScoreStep(source="file", split=split, checkpoints=0)
    step = ScoreStep(
        source=scorer.name, split=split, checkpoints=checkpoints, evaluation_calls=checkpoints
    )
    if scorer.check is None:
        return step
    expert = next(iter(recipe.experts.values()))
    weights = open_checkpoint(expert, allow_pickle=options.allow_pickle).nbytes
    return replace(
        step,
        bytes_to_read=checkpoints * weights,
        peak_memory_bytes=LIBRARIES + 2 * weights,
        notes=tuple(scorer.check(expert).values()),
    )


def read_scores(given: str | Mapping[str, Any], folder: Path) -> ScoreTable:
    """The scores of a file or of the recipe itself, or those of result files that it lists."""
    if isinstance(given, str):
        file = folder / Path(given).expanduser()
        content = read_json_object(file, "a score file", ScoreError, unique=True)
    elif not isinstance(given.get("anchor"), Mapping):
        return _harness_table(given, folder)
    else:
        content, given = dict(given), "repair.scores"
    missing = [key for key in ("experts", "anchor") if not isinstance(content.get(key), dict)]
    if missing:
        shape = '{"experts": {expert: {domain: score}}, "anchor": {domain: score}}'
        raise ScoreError(f"{given}: expected {shape}; {', '.join(missing)} missing.")
    rows = content["experts"]
    if bad := [name for name, row in rows.items() if not isinstance(row, dict)]:
        raise ScoreError(f"{given}: experts.{bad[0]} is not a mapping of domain to score.")
    # Values are checked with the pool's domains at hand: all problems are reported together.
    return ScoreTable.model_construct(experts=rows, anchor=content["anchor"], missing={})


def _harness_table(given: Mapping[str, Any], folder: Path) -> ScoreTable:
    try:
        files = HarnessScores.model_validate(given)
    except ValidationError as error:
        wrong = ", ".join(dict.fromkeys(str(item["loc"][0]) for item in error.errors()))
        raise ScoreError(
            f"repair.scores: {wrong} cannot be used; give the scores themselves, as experts: "
            "{expert: {domain: score}} and anchor: {domain: score}, or result files of "
            "lm-evaluation-harness, as experts: {name: file}, anchor: file, domains: {domain: "
            "[task/metric]}."
        ) from None

    def read(file: str) -> DomainScores:
        content = read_json_object(folder / file, "a score file", ScoreError, unique=True)
        return harness_scores(content, files.domains, file)

    experts = {name: read(file) for name, file in files.experts.items()}
    return ScoreTable(experts=experts, anchor=read(files.anchor))


def harness_scores(
    results: Mapping[str, Any], domains: Mapping[str, Any], where: str
) -> DomainScores:
    """Domain scores of one lm-evaluation-harness result: the mean of each domain's task/metric."""
    table, problems, scores = results.get("results"), [], {}
    if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
        raise ScoreError(f"{where}: holds no results of lm-evaluation-harness by task.")
    for domain, wanted in domains.items():
        values = []
        for path in [wanted] if isinstance(wanted, str) else wanted:
            task, _, metric = path.partition("/")
            value = table.get(task, {}).get(metric)
            if isinstance(value, int | float) and abs(value) < 1e9:
                values.append(float(value))
            else:
                known = ", ".join(table.get(task, table))
                problems.append(f"{domain}: {path} is not in it; there are {known}")
        if values:
            scores[domain] = fmean(values)
    if problems:
        raise ScoreError(f"{where}: the results lack what domains: names:", problems)
    return scores
