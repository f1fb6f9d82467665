"""Where domain scores come from, and what is remembered of them.

A score is a fraction per domain. Sources: a JSON file, result files of lm-evaluation-harness, a
command that prints JSON, the embedded suite, or a Python callable. What was measured on a
checkpoint is kept by content, so an expert is scored once per pool, not once per anchor. Of a
callable nothing is kept, since nothing tells two of them apart; of a command, as long as the files
it names stay as they are; of a suite, nothing here, as an evaluation keeps every item itself.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from sigmerge.commands.options import Options
from sigmerge.errors import ScoreError
from sigmerge.evaluation.store import checkpoint_key, command_words, named_files
from sigmerge.files.cache import cache_folder
from sigmerge.files.documents import write_json
from sigmerge.method.deficit import check_scores
from sigmerge.recipe import Recipe, RepairSection

Scores = dict[str, float]
Score = Callable[[Path], Mapping[str, float]]


@dataclass(frozen=True)
class ScoreTable:
    """Q_d of every expert and of the anchor on the calibration items."""

    experts: dict[str, Scores]
    anchor: Scores


@dataclass(frozen=True)
class Scorer:
    """Measures a checkpoint folder. `name` says with what, and is part of the memory's key."""

    name: str
    measure: Score
    remembers: bool = True
    allow_pickle: bool = False

    def __call__(self, folder: Path) -> Scores:
        """Scores of a folder; one with the same weights and files was perhaps measured before."""
        if not self.remembers:
            return dict(self.measure(folder))
        note = cache_folder("scores") / f"{self._key(folder)}.json"
        if note.exists():
            return dict(json.loads(note.read_text())["scores"])
        scores = {str(domain): float(q) for domain, q in self.measure(folder).items()}
        write_json(note, {"scorer": self.name, "scores": scores}, indent=None)
        return scores

    def _key(self, folder: Path) -> str:
        content = f"{self.name}\n{checkpoint_key(folder, self.allow_pickle)}"
        return hashlib.sha256(content.encode()).hexdigest()[:40]


def scorer_of(
    section: RepairSection, folder: Path, options: Options, split: str = "calibration"
) -> Scorer | None:
    """The scorer a recipe names; None if its scores are in a file, or do not know this split."""
    if section.command is not None:
        if split != "calibration" and "{split}" not in section.command:
            return None
        command = section.command.replace("{split}", split)
        files = [digest[:16] for digest in named_files(command, folder, "repair.command")]
        name = " ".join([f"command {command} in {folder}", *files])
        scorer = Scorer(name, lambda path: run_command(command, path, folder))
    elif section.evaluate is not None:
        trust = options.trust_remote_code
        scorer = suite_scorer(section.evaluate, split, folder, trust, options.allow_pickle)
    else:
        return None
    return replace(scorer, allow_pickle=options.allow_pickle)


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
    trust: bool = False,
    allow_pickle: bool = False,
) -> Scorer:
    """The embedded suite, a shipped one, or the user's own, measured on a split."""
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
    if evaluate["suite"] == "nano":
        return _nano_scorer(evaluate, split, allow_pickle)
    return _general_scorer(evaluate, split, folder, trust)


def _nano_scorer(evaluate: Mapping[str, Any], split: str, allow_pickle: bool) -> Scorer:
    from sigmerge.nano.files import POOL, SUMS

    limit, pool = evaluate.get("limit"), Path(evaluate.get("pool", POOL))
    if not (pool / SUMS).exists():
        raise ScoreError(f"repair.evaluate.pool: {pool} is no nano pool.")
    items = hashlib.sha256((pool / SUMS).read_bytes()).hexdigest()[:16]

    def measure(folder: Path) -> Scores:
        from sigmerge.evaluation.run import How, nano_scores

        return nano_scores(folder, split, pool, How(limit=limit, allow_pickle=allow_pickle))

    return Scorer(f"nano {split} limit={limit} {items}", measure, remembers=False)


def _general_scorer(evaluate: Mapping[str, Any], split: str, folder: Path, trust: bool) -> Scorer:
    """A suite through its harnesses; files that the recipe names are looked for beside it."""
    from sigmerge.commands.evaluate import evaluate as verb
    from sigmerge.evaluation.suite import load_suite

    beside = {key: folder / evaluate[key] for key in ("data", "splits") if key in evaluate}
    own = folder / evaluate["suite"]
    suite = str(own) if own.is_file() else evaluate["suite"]
    passed = ("backend", "dtype", "batch_size", "judge", "limit", "hub")
    how: dict[str, Any] = {key: evaluate[key] for key in passed if key in evaluate}
    how["allow_code"] = evaluate.get("allow_code_execution", False)
    how |= {"splits": beside.get("splits"), "trust_remote_code": trust}

    def measure(checkpoint: Path) -> Scores:
        result = verb(checkpoint, suite, split, data=beside.get("data"), **how)
        return dict(result["domains"])

    load_suite(suite)  # a wrong suite is told before anything is merged
    return Scorer(f"suite {evaluate['suite']} {split}", measure, remembers=False)


def score_table(
    recipe: Recipe, anchor: Path | None, scorer: Scorer | None, options: Options
) -> ScoreTable:
    """Scores of all experts and the anchor, checked; every problem is reported at once."""
    section = recipe.repair
    assert section is not None
    domains = list(recipe.experts)
    if scorer is not None:
        if anchor is None:
            raise ScoreError("The anchor must be stored before it can be scored; give --anchor.")
        folders = {**recipe.experts, "anchor of this merge": anchor}
        measured = {}
        for done, (name, folder) in enumerate(folders.items()):
            options.progress("scoring", done, len(folders))
            measured[name] = scorer(folder)
        options.progress("scoring", len(folders), len(folders))
        table = ScoreTable({name: measured[name] for name in domains}, measured[list(folders)[-1]])
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


def read_scores(given: str | Mapping[str, Any], folder: Path) -> ScoreTable:
    """A score file, or result files of lm-evaluation-harness as the recipe lists them."""
    if isinstance(given, str):
        content = _json_file(folder / Path(given).expanduser())
        missing = [key for key in ("experts", "anchor") if not isinstance(content.get(key), dict)]
        if missing:
            shape = '{"experts": {expert: {domain: score}}, "anchor": {domain: score}}'
            raise ScoreError(f"{given}: expected {shape}; {', '.join(missing)} missing.")
        rows = content["experts"]
        if bad := [name for name, row in rows.items() if not isinstance(row, dict)]:
            raise ScoreError(f"{given}: experts.{bad[0]} is not a mapping of domain to score.")
        return ScoreTable({name: dict(row) for name, row in rows.items()}, content["anchor"])
    return _harness_table(given, folder)


def _harness_table(given: Mapping[str, Any], folder: Path) -> ScoreTable:
    missing = [key for key in ("experts", "anchor", "domains") if key not in given]
    if missing:
        raise ScoreError(f"repair.scores: {', '.join(missing)} missing; result files of "
                         "lm-evaluation-harness are given as experts: {name: file}, anchor: file, "
                         "domains: {domain: [task/metric]}.")  # fmt: skip

    def read(file: str) -> Scores:
        return harness_scores(_json_file(folder / file), given["domains"], file)

    experts = {name: read(file) for name, file in given["experts"].items()}
    return ScoreTable(experts, read(given["anchor"]))


def harness_scores(results: Mapping[str, Any], domains: Mapping[str, Any], where: str) -> Scores:
    """Domain scores of one lm-evaluation-harness result: the mean of each domain's task/metric."""
    table, problems, scores = results.get("results"), [], {}
    if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
        raise ScoreError(f"{where}: holds no results of lm-evaluation-harness by task.")
    for domain, wanted in domains.items():
        values = []
        for path in [wanted] if isinstance(wanted, str) else wanted:
            task, _, metric = path.partition("/")
            value = table.get(task, {}).get(metric)
            if isinstance(value, int | float):
                values.append(float(value))
            else:
                known = ", ".join(table.get(task, table))
                problems.append(f"{domain}: {path} is not in it; there are {known}")
        if values:
            scores[domain] = fmean(values)
    if problems:
        raise ScoreError(f"{where}: the results do not hold what domains: asks for:", problems)
    return scores


def run_command(command: str, checkpoint: Path, folder: Path) -> Scores:
    """Run the user's own scorer on a checkpoint; its last line of output is a JSON object."""
    words = [
        word.replace("{checkpoint}", str(checkpoint))
        for word in command_words(command, "repair.command")
    ]
    try:
        done = subprocess.run(
            words, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
    except OSError as error:
        raise ScoreError(f"repair.command: {words[0]!r} cannot be run ({error}).") from None
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ScoreError(f"repair.command: exit code {done.returncode} on {checkpoint}:\n{tail}")
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    try:
        scores = json.loads(lines[-1])
        return {str(domain): float(score) for domain, score in scores.items()}
    except (IndexError, ValueError, AttributeError, TypeError):
        raise ScoreError(
            f"repair.command: its last line must be a JSON object of domain scores, not "
            f"{lines[-1] if lines else 'nothing'!r}."
        ) from None


def _json_file(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ScoreError(f"{file}: no such score file.") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ScoreError(f"{file}: not valid JSON ({error}).") from None
    if not isinstance(content, dict):
        raise ScoreError(f"{file}: a JSON object is expected.")
    return content
