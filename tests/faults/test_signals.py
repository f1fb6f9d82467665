"""Ctrl-C and SIGTERM while a command works: one line, its exit status, and it can be continued.

Also the exit status of every command, in success and on wrong input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sigmerge.nano.files import POOL, RECIPES
from tests.command_line import Ran, sigmerge
from tests.faults.stopped import stop_at
from tests.forks import command, forked
from tests.pools import weight_bytes
from tests.test_cli import NESTED, VERBS

ROOT = Path(__file__).parents[2]
MODELS = [{"model": str(POOL / name), "name": name} for name in ("math", "coding")]
EXEMPLARS = [{**m, "exemplars": str(POOL / f"exemplars/{m['name']}.jsonl")} for m in MODELS]
SCORES = {
    "experts": {e: {d: 0.9 if d == e else 0.4 for d in ("math", "coding")} for e in
                ("math", "coding")},
    "anchor": {"math": 0.5, "coding": 0.6},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recipes on two experts of the embedded pool, a stored anchor and its scores."""
    root = tmp_path_factory.mktemp("signals")
    top = {"base_model": str(POOL / "reference"), "dtype": "bfloat16"}
    recipes: dict[str, dict[str, Any]] = {
        "merge": {"merge_method": "linear", "models": MODELS},
        "repair": {"merge_method": "linear", "models": MODELS, "repair": {"scores": "scores.json"}},
        "search": {
            "merge_method": "linear", "models": MODELS,
            "search": {"population": 4, "calls": 8, "items": 3, "estimator": "mean",
                       "suite": "nano"},
        },
        "capture": {"merge_method": "regmean", "models": EXEMPLARS, "capture": {"limit": 2}},
    }  # fmt: skip
    for name, content in recipes.items():
        (root / f"{name}.yaml").write_text(yaml.safe_dump({**top, **content}, sort_keys=False))
    (root / "scores.json").write_text(json.dumps(SCORES))
    assert sigmerge("merge", root / "merge.yaml", root / "anchor").code == 0
    return root


COMMANDS = {
    "merge": ("merging", "merge merge.yaml {out}"),
    "repair": ("repairing", "repair repair.yaml {out} --anchor anchor"),
    "run": ("merging", f"run {RECIPES}/linear.yaml {{out}}"),
    "search": ("", "search search.yaml {out}"),
    "capture": ("capturing", "capture capture.yaml --out {out}"),
    "evaluate": ("", "evaluate anchor --suite nano --limit 4 --out {out}.json"),
}
"""Command -> the stage at which the signal arrives, and its arguments."""


def run(folder: Path, words: str, out: Path, *stop: str) -> Ran:
    """A command in a process of its own; `stop` is a stage and the signal that comes there."""

    def work() -> None:
        os.chdir(folder)
        if stop:
            stop_at(*stop)
        command(*words.format(out=out).split())

    return forked(work)


def test_a_fork_destroys_nothing_of_its_parent() -> None:
    """As a client of Ray's, which does not survive it: SIGSEGV in place of the command's end."""

    parent = os.getpid()

    class Client:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if os.getpid() != parent:
                os._exit(11)

    Client()
    assert forked(gc.collect).code == 0


LOADS_MODELS = {"search": "SIGINT", "capture": "SIGTERM"}
"""Commands that take longest. Both signals end in one exception: one is enough."""


@pytest.mark.parametrize(
    ("name", "number", "status", "line"),
    [(name, *how) for name in COMMANDS for how in (
        ("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated"))
     if LOADS_MODELS.get(name, how[0]) == how[0]],
)  # fmt: skip
def test_a_signal_ends_a_command_in_one_line(
    folder: Path, tmp_path: Path, name: str, number: str, status: int, line: str
) -> None:
    stage, words = COMMANDS[name]
    out = tmp_path / "out"
    stopped = run(folder, words, out, stage, number)
    assert stopped.code == status, stopped
    said = [text for text in stopped.err.splitlines() if text.startswith(line)]
    assert said == [f"{line}; the same command goes on where it stopped"]
    assert "Traceback" not in stopped.err and stopped.out == ""
    if name in ("merge", "repair"):
        assert not out.exists()


LOADING = {
    "contextvars": "operators",
    "click": "operators",
    "sigmerge.cli.app": "operators",
    "numpy": "merge merge.yaml {out}",
    "sigmerge.checkpoints.folder": "verify anchor",
    "torch": "evaluate anchor --suite nano --limit 1",
}
"""Module -> a command that loads it."""


@pytest.mark.parametrize(
    ("module", "number", "line"),
    [
        (module, *((2, "interrupted"), (15, "terminated"))[i % 2])
        for i, module in enumerate(LOADING)
    ],
)
def test_a_signal_while_a_command_loads(
    folder: Path, tmp_path: Path, module: str, number: int, line: str
) -> None:
    """The interpreter reports every module that it has loaded; the signal comes after this one.

    Both signals have one handler there.
    """
    arguments = LOADING[module].format(out=tmp_path / "out").split()
    child = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "sigmerge", *arguments],
        cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stderr is not None
    for text in child.stderr:
        if text.startswith("import time:") and text.rpartition("|")[2].strip() == module:
            child.send_signal(number)
            break
    out, err = child.communicate(timeout=60)
    said = [text for text in err.splitlines() if not text.startswith("import time:")]
    going_on = "; the same command goes on where it stopped" if module == "torch" else ""
    assert (child.returncode, said, out) == (128 + number, [line + going_on], "")


LATE = """
import atexit, os, sys
from sigmerge.cli.ending import run
atexit.register(os.kill, os.getpid(), {number})
sys.argv = ["sigmerge", "operators"]
run()
"""


@pytest.mark.parametrize(("number", "line"), [(2, "interrupted"), (15, "terminated")])
def test_a_signal_after_the_command_while_the_interpreter_ends(number: int, line: str) -> None:
    program = [sys.executable, "-c", LATE.format(number=number)]
    ran = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (128 + number, f"{line}\n")


def test_only_what_goes_on_says_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "math.jsonl").write_text('{"prompt": "one"}\n')
    ran = stopped_at(folder, "jobs.probe.whole",
                     f"probe build {tmp_path}/probe.jsonl --data {tmp_path}/math.jsonl "
                     "--per-domain 1")  # fmt: skip
    assert (ran.code, ran.err) == (130, "interrupted\n")
    ran = stopped_at(
        folder, "jobs.merge.check_target", f"merge merge.yaml {tmp_path}/out --dry-run"
    )
    assert (ran.code, ran.err) == (130, "interrupted\n")


def stopped_at(folder: Path, place: str, words: str, swallowed: bool = False) -> Ran:
    """A command that gets SIGINT where it calls `place`, which may catch what comes of it."""
    name, _, attribute = place.rpartition(".")
    module = importlib.import_module(f"sigmerge.{name}")
    real = getattr(module, attribute)

    def stop(*given: Any, **how: Any) -> Any:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            if not swallowed:
                raise
            return real(*given, **how)

    def work() -> None:
        os.chdir(folder)
        setattr(module, attribute, stop)
        command(*words.split())

    return forked(work)


def test_a_signal_that_the_reader_got_too(folder: Path, tmp_path: Path) -> None:
    """As in `sigmerge … 2>&1 | tee log`: Ctrl-C ends the reader first."""
    words = f"-m tests.faults.stopped merging SIGINT merge merge.yaml {tmp_path}/out"
    command = f"{sys.executable} {words} 2>&1 | true; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    assert subprocess.run(["bash", "-c", command], cwd=folder, env=environment).returncode == 130


def test_a_signal_that_a_library_swallows_decides_the_exit_status(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "math.jsonl").write_text('{"prompt": "one"}\n')
    words = f"probe build {tmp_path}/p.jsonl --data {tmp_path}/math.jsonl --per-domain 1"
    ran = stopped_at(folder, "jobs.probe.whole", words, swallowed=True)
    assert (ran.code, ran.err) == (130, "interrupted\n")


@pytest.mark.parametrize("name", ["merge", "repair"])
def test_the_same_command_continues(folder: Path, tmp_path: Path, name: str) -> None:
    stage, words = COMMANDS[name]
    for status, stop in ((143, (stage, "SIGTERM")), (0, ())):
        ran = run(folder, words, tmp_path / "out", *stop)
        assert ran.code == status, ran
    whole = tmp_path / "whole"
    assert run(folder, words, whole).code == 0
    assert weight_bytes(tmp_path / "out") == weight_bytes(whole)
    resumed = json.loads((tmp_path / "out/sigmerge/provenance.json").read_text())
    assert resumed["blocks_resumed"]


WRONG: dict[str, tuple[int, str]] = {
    "merge": (2, "merge broken.yaml out"),
    "capture": (2, "capture broken.yaml"),
    "profile": (2, "profile broken.yaml"),
    "deficits": (2, "deficits broken.yaml"),
    "repair": (2, "repair broken.yaml out --anchor anchor"),
    "run": (2, "run broken.yaml out"),
    "tune": (2, "tune broken.yaml out"),
    "search": (2, "search broken.yaml out"),
    "demo": (4, "demo occupied"),
    "report": (4, "report occupied"),
    "operators": (2, "operators tise"),
    "evaluate": (2, "evaluate anchor --suite missing.yaml"),
    "aggregate": (5, "aggregate broken.yaml"),
    "suite": (2, "suite broken.yaml out"),
    "analyze": (5, "analyze missing.sqlite"),
    "anchors": (2, "anchors broken.yaml"),
    "verify": (3, "verify occupied"),
    "extract": (3, "extract occupied out --base anchor"),
    "moe": (2, "moe broken.yaml out"),
    "tokens": (3, "tokens occupied anchor out"),
    "try": (3, "try occupied"),
    "migrate": (2, "migrate broken.yaml"),
    "pool gguf": (3, "pool gguf broken.yaml out"),
    "splits build": (2, "splits build splits.json --suite missing.yaml"),
    "splits verify": (5, "splits verify missing.json --suite nano"),
    "probe build": (2, "probe build"),
    "init": (2, "init occupied out"),
    "inspect": (3, "inspect occupied"),
    "diff": (3, "diff anchor occupied"),
    "pool nano": (2, "pool nano"),
    "pool verify": (3, "pool verify occupied"),
    "cache list": (4, "cache list --pool missing"),
    "cache verify": (4, "cache verify --pool missing"),
    "cache prune": (4, "cache prune --older-than soon"),
    "cache clear": (4, "cache clear --pool missing"),
    "pool data": (5, "pool data occupied out"),
    "pool train": (3, "pool train missing occupied out"),
}
"""Command -> its exit status on wrong input."""
RIGHT = (
    "merge merge.yaml one", "capture capture.yaml", "profile repair.yaml",
    "deficits repair.yaml --anchor anchor", "repair repair.yaml two --anchor anchor",
    "operators", "evaluate anchor --suite nano --limit 1 --out result.json",
    "aggregate result.json", "splits build splits.json --suite nano",
    "splits verify splits.json --suite nano", "pool verify",
)  # fmt: skip
"""Commands that take a moment. The others have tests of their own."""


def test_every_command_has_its_wrong_input() -> None:
    assert set(WRONG) == {*VERBS, *NESTED}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_has_its_exit_status(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "broken.yaml").write_text("merge_method: tise\n")
    (folder / "occupied").mkdir(exist_ok=True)
    (folder / "occupied/thesis.tex").write_text("mine")
    status, words = WRONG[name]
    ran = sigmerge(*words.split())
    assert ran.code == status, ran
    assert ran.out == "" and ran.err and "Traceback" not in ran.err
    assert not (folder / "out").exists()


@pytest.mark.parametrize("words", RIGHT)
def test_success_is_0(folder: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.chdir(folder)
    if words.startswith(("aggregate", "splits verify")):
        earlier = {"aggregate": RIGHT[6], "splits": RIGHT[8]}[words.split()[0]]
        assert sigmerge(*earlier.split()).code == 0
    ran = sigmerge(*words.split())
    assert ran.code == 0 and "error" not in ran.err, ran
