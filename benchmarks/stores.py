"""The stores behind the embedded pools' pages, made by one command.

    python -m benchmarks.stores OUT [--device cuda] [--jobs 16] [--minutes 9]

trains the pools of docs/results/tune.md that are not in OUT/pools yet, makes the rows of its tables
(`benchmarks.tune`) on all of them, and the paper's grid (`sigmerge suite nano-paper`) on the first
five. OUT/stores holds the results, packed: tuning.json (every row: scores, calls, commit),
grid.sqlite.xz (every run of the grid) and pools.json (the sums of the pools' files). Interrupted,
or out of `--minutes`, the same command goes on where it stopped, but for a pool whose training was
under way.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import tune
from benchmarks.measure import commit
from sigmerge.files.documents import write_json
from sigmerge.lab.experiments.store import STORE
from sigmerge.nano.files import POOL

POOLS: dict[str, Sequence[str]] = {
    "nano-0": (),
    "nano-1": ("--seed", "1"),
    "nano-2": ("--seed", "2"),
    "harsh-3": ("--seed", "3", "--rate", "6e-4", "--replay", "0"),
    "harsh-4": ("--seed", "4", "--rate", "1e-3", "--replay", "0"),
    "nano-5": ("--seed", "5"),
    "harsh-6": ("--seed", "6", "--rate", "8e-4", "--replay", "0"),
    "nano-7": ("--seed", "7"),
    "nano-8": ("--seed", "8"),
    "harsh-9": ("--seed", "9", "--rate", "6e-4", "--replay", "0"),
    "harsh-10": ("--seed", "10", "--rate", "1e-3", "--replay", "0"),
}
"""How a pool is trained; the first is the shipped one. Nothing was chosen on the last four."""
GRID_POOLS = tuple(POOLS)[:5]


class Clock:
    """The seconds that are left of a command's own time."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())


def pools(given: argparse.Namespace, clock: Clock) -> list[Path]:
    """The pools' folders. Missing ones are trained side by side."""
    folder = given.out / "pools"
    folder.mkdir(parents=True, exist_ok=True)
    names = given.pools.split(",")
    if "nano-0" in names and not (folder / "nano-0").exists():
        shutil.copytree(POOL, folder / "nano-0", ignore=shutil.ignore_patterns(".sigmerge"))
    commands = [
        [*_sigmerge("pool", "nano", str(folder / name)), "--device", given.device,
         "--size", given.size, *POOLS[name]]
        for name in names
        if not (folder / name).exists()
    ]  # fmt: skip
    running = [subprocess.Popen(command) for command in commands]
    for process in running:
        _wait(process, clock)
    return [folder / name for name in names if (folder / name).exists()]


def _sigmerge(*words: str) -> list[str]:
    return [sys.executable, "-m", "sigmerge", *words]


def _wait(process: subprocess.Popen[bytes], clock: Clock) -> None:
    """Let it end, or ask it to stop when the time is over; it can be continued."""
    try:
        process.wait(clock.left)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
    if process.returncode and clock.left:
        raise SystemExit(f"{' '.join(map(str, process.args))} ended with {process.returncode}")  # type: ignore[arg-type]


def grid(given: argparse.Namespace, folders: list[Path], clock: Clock) -> None:
    """The runs of the grid that are missing."""
    chosen = [f"--pool={folder}" for folder in folders if folder.name in GRID_POOLS]
    words = _sigmerge("suite", given.grid, str(given.out / "grid"), *chosen)
    if chosen and clock.left:
        _wait(subprocess.Popen([*words, "--jobs", str(given.jobs)]), clock)


def pack(out: Path) -> None:
    """What is there so far, in files small enough to keep beside the pages."""
    stores = out / "stores"
    stores.mkdir(exist_ok=True)
    tuned, made = out / "tuning/results.json", out / "grid" / STORE
    if tuned.exists():
        shutil.copyfile(tuned, stores / "tuning.json")
    if made.exists():
        (stores / "grid.sqlite.xz").write_bytes(lzma.compress(made.read_bytes(), preset=9))
    sums = {
        folder.name: (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
        for folder in sorted((out / "pools").iterdir())
        if (folder / "SHA256SUMS").exists()
    }
    write_json(stores / "pools.json", {"commit": commit(), "sums": sums})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.stores")
    parser.add_argument("out", type=Path)
    parser.add_argument("--pools", default=",".join(POOLS))
    parser.add_argument("--rows", default=",".join(tune.ROWS), help="Of the tuning; '' for none.")
    parser.add_argument("--grid", default="nano-paper", help="A suite; '' for none.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", default="nano", help="Of the models that are trained.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=600.0)
    given = parser.parse_args(arguments)
    given.out = given.out.absolute()
    clock = Clock(given.minutes)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a job: the machine is full of jobs
    folders = pools(given, clock)
    if given.rows and clock.left:
        words = [str(given.out / "tuning"), *map(str, folders), "--rows", given.rows]
        tune.main([*words, "--jobs", str(given.jobs), "--minutes", str(clock.left / 60)])
    if given.grid:
        grid(given, folders, clock)
    pack(given.out)
    print(json.dumps({file.name: file.stat().st_size for file in (given.out / "stores").iterdir()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
