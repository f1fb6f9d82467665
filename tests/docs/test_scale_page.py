"""The page about scale is what its command prints, and the speeds give back what was measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sigmerge.engine.speed import SPEEDS, START, seconds
from sigmerge.messages import duration
from tests.command_line import sigmerge
from tests.pools import make_pool

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_its_command_prints() -> None:
    command = [sys.executable, "-m", "benchmarks.scale"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (ROOT / "docs/scale.md").read_text(encoding="utf-8") == ran.stdout


@pytest.mark.parametrize("what", sorted({*SPEEDS} - {"profile"}))
def test_what_was_measured_on_16_cores_is_estimated(what: str) -> None:
    page = (ROOT / "docs/results/scaling.md").read_text(encoding="utf-8").split("## 16 cores")[1]
    assert "\n| | 1 | 16 | " in page
    one, last = r"[\d. ()—]+", r"([\d.]+) \|$"
    row = re.search(rf"^\| {what} \| {one} \| ([\d.]+) \(.*\| {last}", page, re.MULTILINE)
    assert row is not None
    wall, core = map(float, row.groups())
    assert SPEEDS[what].core == core
    assert seconds(what, 1_590_822_912, 5, 16) == pytest.approx(wall, rel=0.02)


def test_a_measured_profile_is_estimated() -> None:
    """docs/results/repair.md, on 2 cores."""
    page = (ROOT / "docs/results/repair.md").read_text(encoding="utf-8")
    row = re.search(r"^\| profile \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    assert row is not None
    wall, cpu = map(float, row.groups())
    assert SPEEDS["profile"].core == pytest.approx((cpu - START) / 0.43, rel=0.02)
    assert seconds("profile", 430_000_000, 5, 2) == pytest.approx(wall, rel=0.05)


@pytest.mark.parametrize(
    ("given", "shown"),
    [(8e-05, "0.1 s"), (0.5, "0.5 s"), (66, "66 s"), (119.6, "120 s"), (120, "2 min"),
     (7199, "120 min"), (7200, "2 h"), (400_000, "4.6 d")],
)  # fmt: skip
def test_a_duration_for_people(given: float, shown: str) -> None:
    assert duration(given) == shown


def test_a_dry_run_estimates_the_time(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", layers=2)
    recipe = pool.write(pool.recipe("ties", each={"density": (0.3, 0.5, 0.7)}))
    ran = sigmerge("merge", recipe, tmp_path / "out", "--dry-run", "--threads", "2")
    assert "time    about 0.4 s with the inputs in memory, 0.1 s at least" in ran.out
    counted = sigmerge("merge", recipe, tmp_path / "out", "--dry-run", "--threads", "2", "--json")
    facts = counted.json["steps"][0]
    assert counted.json["seconds"] == seconds("ties", facts["coordinates"], 3, 2)
