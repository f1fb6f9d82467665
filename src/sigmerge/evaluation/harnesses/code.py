"""Programs: ten samples a problem, run in the sandbox against evalplus's base and plus tests.

As in evalplus, a program shares a process with its judge. The verdict carries a word drawn for the
run and goes out on a descriptor of its own, so that a program does not pass by what it prints or by
how it ends; one that sets out to forge its verdict, by searching the interpreter's frames or by
answers that equal everything, still can.
"""

from __future__ import annotations

import base64
import pickle
import re
import secrets
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import comb
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from sigmerge.errors import MissingExtra, ScoreError
from sigmerge.evaluation.benchmark import Asked, Benchmark, HarnessScorer
from sigmerge.evaluation.costs import Cost
from sigmerge.evaluation.how import How
from sigmerge.evaluation.sources import Data, Item
from sigmerge.evaluation.store import Scored
from sigmerge.probing.generate import Model, Sampling, Usage
from sigmerge.sandbox.run import Limits, best_mode, execute, require_permission

STOPS = {
    "humaneval": ("\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif", "\n```"),
    "mbpp": ("\nclass", "\nassert", '\n"""', "\nprint", "\nif", "\n```"),
}
"""Where a completion leaves the function it was to write."""

PROGRAM_SECONDS = 0.5
"""A generated program's start and tests, with two at a time."""
LEAST_SECONDS = 4.0
"""A call may take four times as long as the reference's, but at least this, on a busy machine."""


class Code(Benchmark):
    """`max_length` counts prompt and generation together, `timeout` is for one
    program on all tests of its problem, in seconds, the reference solution's time included."""

    group: ClassVar[int | None] = 1

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
        """What a record must have: evalplus's words."""
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

    def key(self, name: str, asked: Asked) -> dict[str, Any]:
        return {"sandbox": best_mode(), "evalplus": _version("evalplus")}

    def cost(self, item: Item) -> Cost:
        length = self.max_length * 3 // 4
        seconds = self.samples * PROGRAM_SECONDS
        return Cost(self.max_length - length, self.samples, length, True, seconds)

    def scorer(self, name: str, asked: Asked, items: Sequence[Item], folder: Path) -> HarnessScorer:
        return CodeScorer(name, self, asked.model)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# evalplus stops at the first failure, so its status alone says whether all inputs passed. Its list
# of details is not asked: evalplus 0.3.1 never fills it for HumanEval/32, which could not pass. Its
# temporary folder is not made: the sandbox's is empty already, and may be closed to writing.
_RUNNER = """
def judge():
    import base64, builtins, contextlib, io, os, pickle, sys
    from types import SimpleNamespace
    import evalplus.eval as checks
    from evalplus.gen.util import trusted_exec
    word = sys.stdin.buffer.read()
    private, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    job = pickle.loads(base64.b64decode({job!r}))
    checks.query_maximum_memory_bytes = lambda: None
    checks.create_tempdir = contextlib.nullcontext
    say, leave, run = os.write, os._exit, checks.unsafe_execute
    verdict = b"pass"
    for inputs in (job["base"], job["plus"]):
        expected, times = trusted_exec(
            job["reference"], inputs, job["entry"], record_time=True,
            output_not_none=job["entry"] in checks.MBPP_OUTPUT_NOT_NONE_TASKS)
        limits = [max(job["least"], 4.0 * t) for t in times]
        stat, progress = SimpleNamespace(value=None), SimpleNamespace(value=0)
        details = [False] * len(inputs)
        guarded = {{name: getattr(os, name) for name in dir(os)}}
        try:
            run(job["dataset"], job["entry"], job["code"], inputs, expected, limits,
                job["atol"], True, stat, details, progress)
        except BaseException:
            pass
        for name, value in guarded.items():
            setattr(os, name, value)
        if stat.value != 0:
            verdict = b"fail"
            break
        builtins.open = io.open
    say(private, word + b" " + verdict)
    leave(0)
judge()
"""


@cache
def _deserialize() -> Any:
    """evalplus's own reading of MBPP+ inputs, which JSON cannot hold as they are."""
    try:
        from evalplus.data.mbpp import mbpp_deserialize_inputs
    except ImportError:
        raise MissingExtra("evalplus", "eval", "Testing generated programs") from None
    return mbpp_deserialize_inputs


def check(problem: dict[str, Any], dataset: str, code: str, timeout: float = 300.0) -> str:
    """pass, fail or timeout of a whole program on a problem's base and plus tests."""
    inputs = [problem["base_input"], problem["plus_input"]]
    if dataset == "mbpp":
        inputs = [_deserialize()(problem["task_id"], part) for part in inputs]
    elif isinstance(inputs[1], dict):
        raise ScoreError(f"{problem['task_id']}: its plus inputs are not a list.")
    job = {
        "dataset": dataset,
        "entry": problem["entry_point"],
        "code": code,
        "reference": problem["prompt"] + problem["canonical_solution"],
        "base": inputs[0],
        "plus": inputs[1],
        "atol": problem["atol"],
        "least": LEAST_SECONDS,
    }
    packed = base64.b64encode(pickle.dumps(job)).decode()
    site = sysconfig.get_paths()["purelib"]
    word = secrets.token_hex(16)
    outcome = execute(
        _RUNNER.format(job=packed),
        Limits(seconds=timeout, cpu=int(timeout) + 1),
        path=[site],
        preload=["numpy", "evalplus.eval", "evalplus.gen.util"],
        given=word.encode(),
    )
    if outcome.status == "timeout":
        return "timeout"
    return "pass" if outcome.status == "ok" and outcome.stdout == f"{word} pass" else "fail"


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
    model: Model
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
