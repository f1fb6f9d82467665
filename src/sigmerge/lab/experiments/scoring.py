"""What scores the checkpoints of a suite: its domains, and all that decides a score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sigmerge.errors import ScoreError
from sigmerge.evaluation.command_line import scored_by_command
from sigmerge.files.digests import file_digests
from sigmerge.files.documents import read_json_lines
from sigmerge.files.environment import library_version
from sigmerge.jobs.options import Options
from sigmerge.jobs.scores import check_domains, suite_and_how

if TYPE_CHECKING:
    from sigmerge.evaluation.how import How
    from sigmerge.evaluation.suite import BenchmarkSuite
    from sigmerge.lab.experiments.suite import ExperimentSuite, PoolPlace


def benchmarks_of(
    place: PoolPlace, suite: ExperimentSuite, options: Options
) -> tuple[BenchmarkSuite, How]:
    """The benchmarks that score a pool, and where their records and splits lie."""
    return suite_and_how(place.evaluation(suite)["evaluate"], Path.cwd(), options)


def check_benchmarks(place: PoolPlace, suite: ExperimentSuite, options: Options) -> None:
    """Whether the benchmarks score the domains of the experts, all of them and no others."""
    if suite.section.evaluate is None:
        return
    scored, how = benchmarks_of(place, suite, options)
    for mark in scored.benchmarks.values():
        mark.check_settings(how)
    check_domains(scored.domains, place.experts, f"{place.name}: evaluate.suite {scored.name}")


def check_probes(place: PoolPlace, suite: ExperimentSuite) -> None:
    """Whether the pool's probe file holds what the suite's `probes:` says, and nothing else."""
    wanted, file = suite.section.probes, place.probe
    if wanted is None:
        return
    if file is None:
        raise ScoreError(f"{place.name}: probes: says what the probe file holds; name it by probe:")
    before, after = wanted.template.split("{prompt}")
    counts = dict.fromkeys(place.experts, 0)
    problems = []
    for number, row in read_json_lines(file, "probe prompts", ScoreError):
        record = row if isinstance(row, dict) else {}
        text, domain = str(record.get("prompt", "")), record.get("domain")
        if domain in counts:
            counts[domain] += 1
        else:
            problems.append(f"line {number}: {domain!r} is no domain of the pool")
        if not (text.startswith(before) and text.endswith(after)):
            problems.append(f"line {number}: does not follow the template")
    problems += [
        f"{domain}: {count} prompts, not {wanted.per_domain}"
        for domain, count in counts.items()
        if count != wanted.per_domain
    ]
    if problems:
        raise ScoreError(
            f"{file}: is not what probes: of the suite {suite.section.name} says; `sigmerge probe "
            "build` makes it:", problems[:10],
        )  # fmt: skip


def digests_of(files: Sequence[Path]) -> list[str]:
    """Digests of files in their order: two whose contents are exchanged are others too."""
    known = file_digests(files)
    return [known[file] for file in files]


def scored_by(place: PoolPlace, suite: ExperimentSuite, options: Options, model: Path) -> list[Any]:
    """Everything besides a checkpoint that decides its scores, by content wherever it lies.

    `model` is any member of the pool. Records that are not here are known by the name the suite
    gives them, and what a command reads by the files that it names or that lie in the pool.
    """
    given = place.evaluation(suite)
    if "command" in given:
        inside = sorted((model.parent / "splits").rglob("*.jsonl"))
        items = [f"{file.parent.name}/{file.name} {d}" for file, d in file_digests(inside).items()]
        by = scored_by_command(given["command"], Path.cwd(), "command")
        versions = [library_version(library) for library in by.libraries]
        decided = [by.settings["environment"], versions, *digests_of([*by.files.values()])]
        return [*items, *decided]
    from sigmerge.evaluation import splits
    from sigmerge.evaluation.run import Evaluation

    loaded, how = benchmarks_of(place, suite, options)
    try:
        here, _ = splits.load_scored(loaded, replace(how, data=replace(how.data, hub=False)))
    except ScoreError:  # no benchmark is
        here = {}
    measure = Evaluation(model, loaded, how)
    marks = {
        name: [measure.scored_as(name), [[i.id, i.split, i.digest] for i in here[name]]]
        if name in here
        else mark.model_dump(mode="json")
        for name, mark in loaded.benchmarks.items()
    }
    domains = {domain: list(each) for domain, each in loaded.domains.items()}
    divided = sorted(file_digests([how.splits]).values()) if how.splits else []
    return [domains, marks, loaded.seed, loaded.calibration_items, divided]
