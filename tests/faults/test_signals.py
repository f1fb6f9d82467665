"""Ctrl-C and SIGTERM while a command works: one line, its exit status, and it can be continued.

Also the exit status of every command, in success and on wrong input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sigmerge.nano.files import POOL, RECIPES
from tests.command_line import sigmerge
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
    "evaluate": ("", "evaluate anchor --suite nano --limit 4 --store {out} --out {out}.json"),
}
"""Command -> the stage at which the signal arrives, and its arguments."""


def run(folder: Path, *program: str, words: str, out: Path) -> subprocess.CompletedProcess[str]:
    arguments = words.format(out=out).split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", *program, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "signal", "status", "line"),
    [(command, *how) for command in COMMANDS for how in (
        ("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated"))],
)  # fmt: skip
def test_a_signal_ends_a_command_in_one_line(
    folder: Path, tmp_path: Path, name: str, signal: str, status: int, line: str
) -> None:
    stage, words = COMMANDS[name]
    out = tmp_path / "out"
    stopped = run(folder, "tests.faults.stopped", stage, signal, words=words, out=out)
    assert stopped.returncode == status, stopped
    said = [text for text in stopped.stderr.splitlines() if text.startswith(line)]
    assert said == [f"{line}; the same command continues from the finished blocks"]
    assert "Traceback" not in stopped.stderr and stopped.stdout == ""
    if name in ("merge", "repair"):
        assert not out.exists()


@pytest.mark.parametrize("name", ["merge", "repair"])
def test_the_same_command_continues(folder: Path, tmp_path: Path, name: str) -> None:
    stage, words = COMMANDS[name]
    for status, program in ((143, ("tests.faults.stopped", stage, "SIGTERM")), (0, ("sigmerge",))):
        ran = run(folder, *program, words=words, out=tmp_path / "out")
        assert ran.returncode == status, ran
    whole = tmp_path / "whole"
    assert run(folder, "sigmerge", words=words, out=whole).returncode == 0
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
    "report": (4, "report anchor"),
    "operators": (2, "operators tise"),
    "evaluate": (2, "evaluate anchor --suite missing.yaml"),
    "aggregate": (5, "aggregate broken.yaml"),
    "suite": (2, "suite broken.yaml out"),
    "analyze": (5, "analyze missing.sqlite"),
    "anchors": (2, "anchors broken.yaml"),
    "verify": (3, "verify occupied"),
    "splits build": (2, "splits build splits.json --suite missing.yaml"),
    "splits verify": (5, "splits verify missing.json --suite nano"),
    "probe build": (2, "probe build"),
    "nano train": (2, "nano train"),
    "nano verify": (1, "nano verify occupied"),
}
"""Command -> its exit status on wrong input."""
RIGHT = (
    "merge merge.yaml one", "capture capture.yaml", "profile repair.yaml",
    "deficits repair.yaml --anchor anchor", "repair repair.yaml two --anchor anchor",
    "operators", "evaluate anchor --suite nano --limit 1 --out result.json",
    "aggregate result.json", "splits build splits.json --suite nano",
    "splits verify splits.json --suite nano", "nano verify",
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
