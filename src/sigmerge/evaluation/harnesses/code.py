"""Programs: ten samples a problem, run in the sandbox against evalplus's base and plus tests.

A program never runs in the process that judges it. It is called with the inputs in a process of its
own and prints what the calls return, as data. When it has ended, a second process compares these
values with those of the reference solution, by evalplus's rules. So a program passes by the values
that it returns, and not by what it patches, prints, or how it ends; it has neither the expected
values nor a way to report success.
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from math import comb
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from sigmerge.errors import MissingExtra, ScoreError, SigmergeError
from sigmerge.evaluation.answers import Scored
from sigmerge.evaluation.benchmark import Asked, Benchmark, HarnessScorer
from sigmerge.evaluation.costs import ItemCost
from sigmerge.evaluation.how import How
from sigmerge.evaluation.scored_by import ScoredBy
from sigmerge.evaluation.sources import Data, Item
from sigmerge.files.documents import parse_json
from sigmerge.probing.generate import LoadedModel, Sampling, Usage
from sigmerge.sandbox import plain
from sigmerge.sandbox.run import Limits, best_mode, execute, require_permission

STOPS = {
    "humaneval": ("\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif", "\n```"),
    "mbpp": ("\nclass", "\nassert", '\n"""', "\nprint", "\nif", "\n```"),
}
"""Stop strings: behind them a completion has left its function."""

PROGRAM_SECONDS = 0.5
"""A generated program's start and tests, with two at a time."""
LARGEST_OUTPUT = 256 << 20
"""Bytes of all values that the calls of a program return."""
SITE = sysconfig.get_paths()["purelib"]
LEAST_SECONDS = 4.0
"""A call may take four times as long as the reference's, but at least this, on a busy machine."""


class Code(Benchmark):
    """`max_length` counts prompt and generation together, `timeout` is for one
    program on all tests of its problem, in seconds, the reference solution's time included."""

    group: ClassVar[int | None] = 16

    harness: Literal["code"]
    dataset: Literal["humaneval", "mbpp"]
    samples: int = Field(10, ge=1)
    temperature: float = Field(0.2, ge=0)
    top_p: float = Field(0.95, gt=0, le=1)
    max_length: int = Field(512, ge=1)
    timeout: float = Field(300.0, gt=0)
    seed: int = 0

    @property
    def columns(self) -> list[str]:
        """What a record must have: evalplus's names."""
        tests = ["base_input", "plus_input", "atol"]
        return ["task_id", "prompt", "entry_point", "canonical_solution", *tests]

    def metric_problem(self, key: str) -> str | None:
        found = re.fullmatch(r"pass@([1-9]\d*)", key)
        if not found:
            return "is no metric of programs; there is pass@k for any number k"
        if int(found[1]) > self.samples:
            return f"needs at least {found[1]} samples, not {self.samples}"
        return None

    def load(self, name: str, data: Data, suite_folder: Path) -> list[Item]:
        """The records are not checked yet: permission to run programs is checked first."""
        return self.load_records(name, data, suite_folder)

    def permit(self, name: str, items: Sequence[Item], how: How) -> None:
        require_permission(how.allow_code)
        self.check(name, items)

    def scored_by(self, name: str, suite_folder: Path, how: How) -> ScoredBy:
        return ScoredBy({"sandbox": best_mode()}, libraries=("evalplus",))

    def cost(self, item: Item) -> ItemCost:
        length = self.max_length * 3 // 4
        seconds = self.samples * PROGRAM_SECONDS
        return ItemCost(self.max_length - length, self.samples, length, seconds)

    def scorer(self, name: str, asked: Asked, items: Sequence[Item], folder: Path) -> HarnessScorer:
        return CodeScorer(name, self, asked.model)


_PLAIN = (
    Path(plain.__file__).read_text(encoding="utf-8")
    + """
import base64, json, zlib

def packed(value):
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 1))

def unpacked(line):
    return json.loads(zlib.decompress(base64.b64decode(line)))

"""
)
"""Values as data, and as lines of a few bytes: HumanEval/130 returns lists of a million numbers."""

_REFERENCE = """
import os, pickle, sys, time
from evalplus.eval import MBPP_OUTPUT_NOT_NONE_TASKS
from evalplus.gen.util import trusted_exec
job = json.load(sys.stdin)
private, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1)
os.dup2(nowhere, 2)
results = [
    trusted_exec(job["reference"], [decode(given) for given in part], job["entry"],
                 record_time=True, output_not_none=job["entry"] in MBPP_OUTPUT_NOT_NONE_TASKS)
    for part in job["inputs"]
]
for values, times in results:
    for i, value in enumerate(values):  # what a program prints takes time, too
        start = time.perf_counter()
        packed(encode(value))
        times[i] += time.perf_counter() - start
expected = base64.b64encode(zlib.compress(pickle.dumps([values for values, _ in results]), 1))
os.write(private, json.dumps({"times": [times for _, times in results]}).encode() + b"\\n")
for start in range(0, len(expected), 65536):
    os.write(private, expected[start : start + 65536])
"""
"""Runs the reference solution: its times, and what it returns, pickled for the judge alone."""

_PROGRAM = """
def serve():
    import os, sys
    job = json.load(sys.stdin)
    private, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)

    def say(value):
        line = packed(value) + b"\\n"
        while line:
            line = line[os.write(private, line):]

    for part in job["inputs"]:
        space = {}
        exec(job["code"], space)
        call = space[job["entry"]]
        say(["ready"])
        for given in part:
            say(encode(call(*decode(given))))
    os._exit(0)
serve()
"""
"""Runs the program that a model wrote. It prints what every call returned and judges nothing."""

# evalplus compares: its own `unsafe_execute` calls a function that returns the recorded values. It
# stops at the first failure, so its status alone says whether all inputs passed. Its list of
# details is not used: evalplus 0.3.1 never fills it for HumanEval/32, which could not pass. Its
# temporary folder is not made: the sandbox's is empty already, and may be closed to writing.
_JUDGE = """
import contextlib, os, pickle, sys
from types import SimpleNamespace
import evalplus.eval as checks
job = json.load(sys.stdin)
say, leave, private = os.write, os._exit, os.dup(1)
checks.query_maximum_memory_bytes = lambda: None
checks.create_tempdir = contextlib.nullcontext
expected = pickle.loads(zlib.decompress(base64.b64decode(job["expected"])))
passed = True
for inputs, wanted, given in zip(job["inputs"], expected, job["answers"], strict=True):
    answers = iter([decode(unpacked(line)) for line in given])
    sys.modules["recorded"] = SimpleNamespace(answers=answers)
    stub = f"import recorded\\ndef {job['entry']}(*given): return next(recorded.answers)"
    stat, progress = SimpleNamespace(value=None), SimpleNamespace(value=0)
    kept = {name: getattr(os, name) for name in dir(os)}
    checks.unsafe_execute(
        job["dataset"], job["entry"], stub, [decode(each) for each in inputs], wanted,
        [60.0] * len(inputs), job["atol"], True, stat, [False] * len(inputs), progress)
    for name, value in kept.items():
        setattr(os, name, value)
    passed = passed and stat.value == 0
say(private, b"pass" if passed else b"fail")
leave(0)
"""
"""Compares what the program returned with what the reference returned; the program is gone."""


@cache
def _deserialize() -> Any:
    """evalplus's own reading of MBPP+ inputs, which JSON cannot hold as they are."""
    try:
        from evalplus.data.mbpp import mbpp_deserialize_inputs
    except ImportError:
        raise MissingExtra("Testing generated programs", ["evalplus"], ["eval"]) from None
    return mbpp_deserialize_inputs


def check(problem: dict[str, Any], dataset: str, code: str, timeout: float = 300.0) -> str:
    """pass, fail or timeout of a whole program on a problem's base and plus tests.

    Three processes, one after the other and each in the sandbox: the reference solution, the
    program, and the judge, which reads data that both printed.
    """
    inputs = _inputs(problem, dataset)
    entry = problem["entry_point"]
    solution = problem["prompt"] + problem["canonical_solution"]
    found = _reference(json.dumps({"reference": solution, "entry": entry, "inputs": inputs}))
    if found is None:
        return "fail"
    times, expected = found
    outcome = execute(
        _PLAIN + _PROGRAM,
        Limits(seconds=timeout, cpu=int(timeout) + 1, output=LARGEST_OUTPUT),
        path=[SITE],
        preload=["numpy"],
        given=json.dumps({"code": code, "entry": entry, "inputs": inputs}).encode(),
        pace=[s for part in times for s in (timeout, *(max(LEAST_SECONDS, 4 * t) for t in part))],
    )
    if outcome.status == "timeout":
        return "timeout"
    # What else a program wrote is not split or encoded: 256 MiB of it took 4 GB here.
    count = sum(1 + len(part) for part in inputs)
    told = outcome.stdout
    if outcome.status != "ok" or not told.isascii() or told.count("\n") != count:
        return "fail"
    lines = told.split("\n")[:-1]
    cut = 1 + len(inputs[0])
    job = {"dataset": dataset, "entry": entry, "inputs": inputs, "expected": expected}
    job |= {"atol": problem["atol"], "answers": [lines[1:cut], lines[cut + 1 :]]}
    return _judged(job)


def _inputs(problem: dict[str, Any], dataset: str) -> list[list[Any]]:
    """The arguments of every call in the base and plus tests, encoded."""
    parts = [problem["base_input"], problem["plus_input"]]
    if dataset == "mbpp":
        parts = [_deserialize()(problem["task_id"], part) for part in parts]
    elif isinstance(parts[1], dict):
        raise ScoreError(f"{problem['task_id']}: its plus inputs are not a list.")
    return [[plain.encode(each) for each in part] for part in parts]


@lru_cache(maxsize=8)
def _reference(job: str) -> tuple[list[list[float]], str] | None:
    """The seconds of every call of the reference, and what it returned; None if it fails."""
    outcome = execute(
        _PLAIN + _REFERENCE,
        Limits(seconds=300, cpu=300, output=LARGEST_OUTPUT),
        path=[SITE],
        preload=["numpy", "evalplus.eval", "evalplus.gen.util"],
        given=job.encode(),
    )
    if outcome.status != "ok":
        return None
    times, _, expected = outcome.stdout.partition("\n")
    try:
        found = parse_json(times, "the times of a reference")["times"]
        wanted = [len(part) for part in json.loads(job)["inputs"]]
        if [len(part) for part in found] != wanted or not expected.isascii():
            return None
        return [[float(seconds) for seconds in part] for part in found], expected
    except (SigmergeError, KeyError, TypeError, ValueError):
        return None


def _judged(job: dict[str, Any]) -> str:
    """The judge's verdict; a judge that cannot decode or compare the answers fails them."""
    outcome = execute(
        _PLAIN + _JUDGE,
        Limits(seconds=300, cpu=120),
        path=[SITE],
        preload=["numpy", "evalplus.eval"],
        given=json.dumps(job).encode(),
    )
    return "pass" if outcome.status == "ok" and outcome.stdout == "pass" else "fail"


def pass_at(k: int, samples: int, right: int) -> float:
    """The unbiased estimate of pass@k: one minus the chance that k of the samples all fail."""
    if samples < k:
        raise ScoreError(f"pass@{k} needs at least {k} samples, not {samples}.")
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def prompt_of(problem: dict[str, Any], dataset: str) -> str:
    """The text a completion continues: the signature, or the docstring with one example."""
    text = str(problem["prompt"])
    return text.strip() if dataset == "humaneval" else text


@dataclass(frozen=True)
class CodeScorer:
    """Samples of every problem; equal programs are run once."""

    name: str
    mark: Code
    model: LoadedModel
    workers: int = 2

    def score(self, items: Sequence[Item]) -> tuple[dict[str, Scored], Usage]:
        mark = self.mark
        sampling = Sampling(
            max_length=mark.max_length,
            temperature=mark.temperature,
            top_p=mark.top_p,
            samples=mark.samples,
            stop=STOPS[mark.dataset],
            seed=mark.seed,
        )
        prompts = [prompt_of(item.record, mark.dataset) for item in items]
        texts, usage = self.model.generate(prompts, sampling)
        results = {}
        for item, prompt, answers in zip(items, prompts, texts, strict=True):
            verdicts = self._verdicts(item.record, [prompt + text for text in answers])
            right = verdicts.count("pass")
            scores = {
                metric.key: pass_at(_k(metric.key), mark.samples, right)
                for metric in mark.metrics.values()
            }
            output = [{"text": t, "verdict": v} for t, v in zip(answers, verdicts, strict=True)]
            results[item.id] = Scored(dict(scores), output)
        return results, usage

    def _verdicts(self, problem: dict[str, Any], programs: Sequence[str]) -> list[str]:
        def run(program: str) -> str:
            return check(problem, self.mark.dataset, program, self.mark.timeout)

        distinct = list(dict.fromkeys(programs))
        with ThreadPoolExecutor(self.workers) as pool:
            known = dict(zip(distinct, pool.map(run, distinct), strict=True))
        return [known[program] for program in programs]


def _k(key: str) -> int:
    found = re.fullmatch(r"pass@(\d+)", key)
    if not found:
        raise ScoreError(f"{key!r} is no metric of programs; there is pass@k for any number k.")
    return int(found[1])
