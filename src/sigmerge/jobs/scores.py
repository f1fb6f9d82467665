"""Where domain scores come from, and which of them are kept.

A score is a fraction per domain. Sources: a JSON file, result files of lm-evaluation-harness, a
command that prints JSON, a suite, or a Python callable. Scores of a command are kept by the content
of the checkpoint and of the files that the command names, so an expert is scored once per pool. A
suite keeps every item itself. Scores of a callable are not kept: nothing identifies it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from sigmerge.checkpoints.declared import checkpoint_files
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.inputs import stays
from sigmerge.engine.machine import LIBRARIES, Meter
from sigmerge.errors import ScoreError
from sigmerge.evaluation.command_line import check_program, named_files, run_command
from sigmerge.files.cache import cache_place, keep_json, kept_json
from sigmerge.files.documents import content_key, parse_json, read_json_object
from sigmerge.jobs.options import Options, Step
from sigmerge.kept import Inputs
from sigmerge.method.deficit import DomainScores, check_scores
from sigmerge.recipe import Recipe
from sigmerge.records import PairedScores, ScoreNoise, ScoreTable

if TYPE_CHECKING:
    from sigmerge.evaluation.how import How
    from sigmerge.evaluation.run import Result
    from sigmerge.evaluation.suite import BenchmarkSuite

ScoreFunction = Callable[[Path], Mapping[str, float]]
"""A Python callable from a checkpoint folder to {domain: fraction}."""


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
    """Domain scores of a checkpoint, and by domain the benchmarks that had no data.

    `metrics` are the numbers behind the scores; a command and a callable give none. `seconds` is
    what measuring took, whenever that was.
    """

    scores: DomainScores
    missing: Mapping[str, tuple[str, ...]]
    metrics: tuple[MetricScore, ...] = ()
    seconds: float = 0.0
    items: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    """By domain and benchmark, the items' own scores, where a suite measured them."""


@dataclass(frozen=True)
class Look:
    """One look at a checkpoint: what measuring it took, and how long this look had to wait.

    `seconds` is None where a run that was interrupted has looked. `items` is how many it answered;
    None: those of the split.
    """

    seconds: float | None
    waited: float
    items: int | None = None


@dataclass(frozen=True)
class CheckpointScorer:
    """Measures a checkpoint folder. `name` identifies the measure, and is part of the kept key.

    `check` raises what would stop a measurement, and returns why benchmarks are left out; None if
    only a measurement shows that. `identity` names, for a model of the pool, all else that decides
    the scores, and `program` the content of the files that a command names now. `looks` grows by
    one at every call.
    """

    name: str
    measure: Callable[[Path], MeasuredScores]
    check: Callable[[Path], Mapping[str, str]] | None = None
    identity: Callable[[Path], str] | None = None
    program: Callable[[], list[str]] = list
    keeps: bool = False
    allow_pickle: bool = False
    usable: Callable[[DomainScores], bool] = lambda scores: True
    """What is kept and no use is measured again: the command may have been mended."""
    looks: list[Look] = field(default_factory=list)

    def __call__(self, folder: Path) -> MeasuredScores:
        """Scores of a folder; kept ones if one with the same content was measured before."""
        meter = Meter()
        measured = self._measured(folder) if self.keeps else self.measure(folder)
        self.looks.append(Look(measured.seconds, meter.wall_seconds))
        return measured

    def _measured(self, folder: Path) -> MeasuredScores:
        unchanged = stays([open_checkpoint(folder, allow_pickle=self.allow_pickle)])
        content, program = self._content(folder), self.program()
        named = "\n".join([self.name, *program, content])
        key = hashlib.sha256(named.encode()).hexdigest()[:40]
        note = cache_place("scores") / f"{key}.json"
        known = kept_json(note, {"scores", "seconds"}) or {}
        kept, took = known.get("scores"), known.get("seconds")
        whole = isinstance(kept, dict) and all(type(value) is float for value in kept.values())
        if isinstance(kept, dict) and whole and isinstance(took, float) and self.usable(kept):
            return MeasuredScores(kept, {}, seconds=took)
        measured = self.measure(folder)
        unchanged()
        told = {"scores": measured.scores, "seconds": measured.seconds}
        if self.program() == program:  # else nobody knows which of them scored
            keep_json(note, {"scorer": self.name, **told})
        return measured

    def _content(self, folder: Path) -> str:
        files = checkpoint_files(open_checkpoint(folder, allow_pickle=self.allow_pickle))
        return content_key([Inputs(files).digests()])


def callable_scorer(score: ScoreFunction) -> CheckpointScorer:
    def measure(folder: Path) -> MeasuredScores:
        meter = Meter()
        scores = {str(d): float(q) for d, q in score(folder).items()}
        return MeasuredScores(scores, {}, seconds=meter.wall_seconds)

    return CheckpointScorer("a Python callable", measure)


def scorer_of(
    recipe: Recipe, options: Options, split: str = "calibration", score: ScoreFunction | None = None
) -> CheckpointScorer | None:
    """A callable if there is one, else what the recipe's repair: section names.

    None if the scores are in a file, or cannot be had on this split.
    """
    if score is not None:
        return callable_scorer(score)
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

    def program() -> list[str]:
        named = enumerate(named_files(command, folder, where))
        return list(Inputs({f"{place:04}": file for place, file in named}).digests().values())

    check_program(command, folder, where)
    name = " ".join([f"command {command} in {folder}", *program()])

    def measure(checkpoint: Path) -> MeasuredScores:
        meter = Meter()
        lines = run_command(command, {"checkpoint": checkpoint}, folder, where)
        return MeasuredScores(printed_scores(lines, where), {}, seconds=meter.wall_seconds)

    return CheckpointScorer(
        name,
        measure,
        program=program,
        keeps=True,
        allow_pickle=options.allow_pickle,
        usable=partial(_usable, recipe),
    )


def _usable(recipe: Recipe, scores: DomainScores) -> bool:
    """Whether one checkpoint's scores are of the recipe's domains, and all that are read of it."""
    assert recipe.repair is not None
    zeros = dict.fromkeys(recipe.experts, 0.0)
    own = recipe.repair.reference == "own"  # of an expert only its own score is read
    row = {**zeros, **scores} if own else scores
    return not check_scores(dict.fromkeys(recipe.experts, zeros), row, list(recipe.experts))


def printed_scores(lines: list[str], where: str) -> DomainScores:
    """Domain scores from a command's output; its last line is a JSON object."""
    last = lines[-1] if lines else ""
    try:
        content = parse_json(last, where, ScoreError, unique=True)
        return {str(d): float(q) for d, q in content.items()}
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
    from sigmerge.evaluation.answers import settings_key
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

    def identity(model: Path) -> str:
        asked, chosen, _ = prepared(model, suite, split, how)
        marks = {
            name: [
                suite.domain_of(name),
                asked.scored_as(name),
                *((i.id, i.digest) for i in each),
            ]
            for name, each in chosen.items()
        }
        return settings_key(marks)

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
            dict(result.domains), missing, metrics, result.usage_of_results.seconds,
            result.item_scores,
        )  # fmt: skip

    return CheckpointScorer(f"suite {evaluate['suite']} {split}", measure, check, identity)


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
    """What the number of items leaves open; None where the items are not known."""
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
) -> Step:
    """Scoring as a step of a dry run. A suite is checked, and its model counted."""
    section = recipe.repair
    assert section is not None
    if scorer is None:
        return Step("score", {"source": "file", "split": split})
    facts: dict[str, object] = {"source": scorer.name, "split": split, "checkpoints": checkpoints}
    if scorer.check is None:
        return Step("score", facts, evaluation_calls=checkpoints)
    expert = next(iter(recipe.experts.values()))
    weights = open_checkpoint(expert, allow_pickle=options.allow_pickle).nbytes
    return Step(
        "score",
        facts,
        bytes_to_read=checkpoints * weights,
        peak_memory_bytes=LIBRARIES + 2 * weights,
        evaluation_calls=checkpoints,
        notes=tuple(scorer.check(expert).values()),
    )


def read_scores(given: str | Mapping[str, Any], folder: Path) -> ScoreTable:
    """A score file, or result files of lm-evaluation-harness as the recipe lists them."""
    if not isinstance(given, str):
        return _harness_table(given, folder)
    file = folder / Path(given).expanduser()
    content = read_json_object(file, "a score file", ScoreError, unique=True)
    missing = [key for key in ("experts", "anchor") if not isinstance(content.get(key), dict)]
    if missing:
        shape = '{"experts": {expert: {domain: score}}, "anchor": {domain: score}}'
        raise ScoreError(f"{given}: expected {shape}; {', '.join(missing)} missing.")
    rows = content["experts"]
    if bad := [name for name, row in rows.items() if not isinstance(row, dict)]:
        raise ScoreError(f"{given}: experts.{bad[0]} is not a mapping of domain to score.")
    # Values are checked with the pool's domains at hand: all problems are reported together.
    return ScoreTable.model_construct(experts=rows, anchor=content["anchor"], missing={})


class _HarnessFiles(BaseModel):
    """Result files of lm-evaluation-harness, and what each domain takes of them."""

    experts: dict[str, str]
    anchor: str
    domains: dict[str, str | list[str]]


def _harness_table(given: Mapping[str, Any], folder: Path) -> ScoreTable:
    try:
        files = _HarnessFiles.model_validate(given)
    except ValidationError as error:
        wrong = dict.fromkeys(str(item["loc"][0]) for item in error.errors())
        missing = [key for key in wrong if key not in given]
        what = f"{', '.join(missing)} missing" if missing else f"{', '.join(wrong)} cannot be used"
        raise ScoreError(f"repair.scores: {what}; result files of "
                         "lm-evaluation-harness are given as experts: {name: file}, anchor: file, "
                         "domains: {domain: [task/metric]}.") from None  # fmt: skip

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
