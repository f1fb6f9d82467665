"""Kills, many of them: a child runs a command, is killed, and the same command is run again.

    python -m fuzz.kills --count 1000
    python -m fuzz.kills --count 40 --command run --command suite
    python -m fuzz.kills --every --command run --command methods

A third of the kills are at a system call (before or after the n-th of its kind), a third before the
n-th change to files of any kind, a third at a moment by chance. With --every a command is killed
before each of its changes in turn. After each, the folder must be the older result or the new one,
whole; after the second run it must have the bytes of a run that nobody interrupted, and nothing may
be left beside it. A run and a search are folders that grow: what is in them after a kill may be
unfinished, but a checkpoint in them is whole or absent, and their record is written last. Of a
suite's store the rows count: after a kill they are some of the rows of a whole one.

A child is a fork of this process, which has everything loaded, and calls the command line's own
entry point.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.faults import job
from tests.pools import few_facts

from fuzz.corpus import RECIPES, text
from fuzz.targets import pool
from sigmerge.cli.main import main as sigmerge
from sigmerge.files.scratch import NEW, PREFIX, remove_stale
from sigmerge.lab.experiments.runner import STORE
from sigmerge.lab.experiments.store import create
from sigmerge.nano.files import POOL, REFERENCE

TIMES = (
    "provenance.json",
    "report.html",
    "run.json",
    "search.json",
    "tune.json",
    "overview.json",
    STORE,
)
"""Files that hold times, or what was resumed."""


@dataclass(frozen=True)
class Command:
    """What is killed. Without arguments it is the job of tests/faults, which only writes."""

    arguments: tuple[str, ...] = ()
    last: str | None = None
    """The file that a folder which grows gets last."""
    parts: tuple[str, ...] = ()
    """The checkpoints in such a folder."""
    stores: bool = False
    """Whether the folder has a store, and grows."""

    def run(self, out: Path) -> None:
        if not self.arguments:
            job.write(out)
            return
        sys.argv = ["sigmerge", *(str(out) if a == "OUT" else a for a in self.arguments)]
        sigmerge()


def commands(root: Path) -> dict[str, Command]:
    """The commands, each with its inputs below `root`."""
    pool(root)
    recipe, repaired, searched = (root / f"{n}.yaml" for n in ("recipe", "repair", "search"))
    scores = {"experts": {e: {d: 0.9 if d == e else 0.4 for d in ("math", "code")}
                          for e in ("math", "code")},
              "anchor": {"math": 0.5, "code": 0.6}}  # fmt: skip
    (root / "scores.json").write_text(json.dumps(scores))
    repaired.write_text(recipe.read_text() + "repair: {scores: scores.json}\n")
    experts = [f"  - {{model: {POOL / name}}}" for name in ("math", "coding")]
    search = ["merge_method: task_arithmetic", f"base_model: {POOL / REFERENCE}", "models:",
              *experts, "search: {population: 2, calls: 4, items: 2, estimator: mean,",
              f"         suite: {few_facts(root)}}}"]  # fmt: skip
    searched.write_text("\n".join(search) + "\n")
    suite, script = root / "suite.yaml", root / "score.sh"
    script.write_text(SCORER)
    suite.write_text(
        f"name: tiny\npools: [{root / 'pool'}]\nexperts: [math, code]\n"
        f"command: sh {script} {{checkpoint}} {{split}}\n"
        "anchors: [{name: mean, merge_method: linear},\n"
        "  {name: dare, merge_method: dare_linear, seeds: [0, 1],\n"
        "   parameters: {weight: 0.4, density: 0.5}}]\n"
        "repairs: {ablation: [equal_share]}\nvariants_on: [mean]\n"
    )
    guided = root / "guided.yaml"
    scored = f"guide: {{calls: 3, command: 'sh {script} {{checkpoint}} x'}}\n"
    guided.write_text(text("task_arithmetic") + scored)
    tuned = root / "tune.yaml"
    tuned.write_text(guided.read_text().replace("guide: {calls: 3, ", "repair: {"))
    how = ("OUT", "--threads", "2", "--overwrite")
    methods = {}
    for name in RECIPES:
        (root / f"{name}.yaml").write_text(text(name))
        methods[name] = Command(("merge", str(root / f"{name}.yaml"), *how))
    here(Command(("merge", str(recipe), *how)), root / "anchor")
    return {
        "write": Command(),
        "merge": Command(("merge", str(recipe), *how, "--max-shard-size", "200")),
        "merge, repaired": Command(("merge", str(repaired), *how)),
        "merge, guided": Command(("merge", str(guided), *how)),
        "repair": Command(("repair", str(repaired), *how, "--anchor", str(root / "anchor"))),
        "run": Command(("run", str(repaired), *how), "run.json", ("anchor", "repaired")),
        "search": Command(("search", str(searched), *how[:-1]), "search.json", ("winner",)),
        "tune": Command(("tune", str(tuned), *how[:-1], "--calls", "6"), "tune.json", ("winner",)),
        "suite": Command(("suite", str(suite), *how[:-1]), stores=True),
        **methods,
    }


SCORER = """
set -- "$1" "$2" $(cat "$1"/*.safetensors | cksum)
printf '{"math": 0.%d, "code": 0.%d}' $(($3 % 8 + 1)) $((($3 / 8 + ${#2}) % 8 + 1))
"""
"""Scores that only the weights decide."""


def rows_of(folder: Path) -> set[str]:
    """What a suite's store holds, without costs."""
    if not (folder / STORE).exists():
        return set()
    with create(folder / STORE) as store:  # rolls back what was being written
        return set(store.export())


def bytes_of(folder: Path) -> dict[str, str]:
    """Digests of all files but those that hold times; a path in a plan counts as any other."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(
            file.read_bytes().replace(os.fsencode(folder), b"OUT")
        ).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in TIMES
    }


def child(command: Command, out: Path, before: Callable[[], object] = lambda: None) -> int:
    """Start a command in a process of its own."""
    made = os.fork()
    if made == 0:
        code = 70
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            remove_stale.cache_clear()  # a new process looks anew
            before()
            command.run(out)
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        finally:
            os._exit(code)
    return made


def here(command: Command, out: Path) -> None:
    """Run a command in this process, which then has loaded all that its children need."""
    with Path(os.devnull).open("w") as null, redirect_stdout(null), redirect_stderr(null):
        try:
            command.run(out)
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"{command.arguments} fails without a kill") from None


def wait(made: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(made, 0)[1])


def kill_once(command: Command, out: Path, duration: float, rng: np.random.Generator) -> str | None:
    """The kind of the kill; None if the child ended before."""
    chance = rng.random()
    if chance < 1 / 3:
        return kill_at_change(command, out, int(rng.geometric(0.01)))
    if chance < 2 / 3:
        call, at = str(rng.choice([*job.CALLS, "replace"])), int(rng.geometric(0.1))
        kind = f"{rng.choice(['kill before', 'kill after'])}"
        code = wait(child(command, out, lambda: job.arm(call, at, kind)))
        kind = f"{kind.removeprefix('kill ')} {call}"
    else:
        made, kind = child(command, out), "at a moment by chance"
        time.sleep(float(rng.random()) * duration)
        os.kill(made, signal.SIGKILL)
        code = wait(made)
    return kind if killed(command, code) else None


def kill_at_change(command: Command, out: Path, at: int) -> str | None:
    """The same before the n-th change to files."""
    code = wait(child(command, out, lambda: job.arm_change(at)))
    return "before a change" if killed(command, code) else None


def killed(command: Command, code: int) -> bool:
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{command.arguments} ended with {code}")
    return code != 0


class Campaign:
    """The kills of one command."""

    def __init__(self, root: Path, name: str, command: Command, rng: np.random.Generator) -> None:
        self.root, self.command, self.rng = root, command, rng
        self.out = root / name.replace(", ", "-")
        self.wrong: list[str] = []
        self.kinds: Counter[str] = Counter()
        here(command, self.out)
        self.wanted, self.rows = bytes_of(self.out), rows_of(self.out)
        shutil.rmtree(self.out)
        began = time.monotonic()
        wait(child(command, self.out))
        self.duration = 1.1 * (time.monotonic() - began)

    def kill(self, at: int | None = None) -> bool:
        """Kill, look, run again, look; whether there was a kill.

        Without a number of a change the kind of the kill is drawn.
        """
        shutil.rmtree(self.out, ignore_errors=True)
        atomic = self.command.last is None and not self.command.stores
        if atomic and self.rng.random() < 0.5:
            self.out.mkdir()
            (self.out / "config.json").write_text("{}")
            (self.out / "model.safetensors").write_bytes(b"an older result")
        old = bytes_of(self.out)
        if at is None:
            kind = kill_once(self.command, self.out, self.duration, self.rng)
        else:
            kind = kill_at_change(self.command, self.out, at)
        if kind is None:
            return False
        self.kinds[kind] += 1
        finished = self._look(old)
        if not finished and wait(child(self.command, self.out)) != 0:
            self.wrong.append("the second run failed")
        elif bytes_of(self.out) != self.wanted:
            self.wrong.append("other bytes after the second run")
        elif rows_of(self.out) != self.rows:
            self.wrong.append("other rows after the second run")
        stem = f".{self.out.name}"
        left = [entry for entry in self.root.iterdir() if entry.name.startswith(stem)]
        left += [entry for entry in self.out.rglob(".*") if not finished]
        temporary = (self.root / "tmp").glob(f"{PREFIX}*")  # new ones are left alone for a minute
        left += [entry for entry in temporary if not entry.name.startswith(NEW)]
        if left:
            self.wrong.append(f"left: {', '.join(sorted(entry.name for entry in left)[:3])}")
        return True

    def kill_at_every_change(self) -> None:
        changes = itertools.count(1)
        while self.kill(next(changes)):
            pass

    def _look(self, old: dict[str, str]) -> bool:
        """What a kill left; whether it is a finished search, which is not searched again."""
        last, found = self.command.last, bytes_of(self.out)
        if self.command.stores:
            if not rows_of(self.out) <= self.rows:
                self.wrong.append("rows that no whole suite has")
            return False
        if last is None:
            if found not in (old, self.wanted):
                self.wrong.append("neither the older result nor the new one")
            return False
        for part in self.command.parts:
            own = {n: d for n, d in found.items() if n.startswith(f"{part}/")}
            whole = {n: d for n, d in self.wanted.items() if n.startswith(f"{part}/")}
            if own and own != whole:
                differing = sorted(n for n in {**own, **whole} if own.get(n) != whole.get(n))
                self.wrong.append(f"{part} is not whole: {differing[:3]}")
        finished = (self.out / last).exists()
        visible = {n: d for n, d in found.items() if not n.startswith(".")}
        if finished and visible != self.wanted:
            self.wrong.append(f"{last} was not written last")
        return finished and "--overwrite" not in self.command.arguments


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="kills of all commands together")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", action="store_true", help="before every change, in turn")
    parser.add_argument(
        "--command",
        action="append",
        help="only this one; may be repeated; methods are all recipes of fuzz/corpus.py",
    )
    options = parser.parse_args()
    failed, kinds, began = 0, Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as home:
        root = Path(home)
        (root / "tmp").mkdir()
        os.environ["SIGMERGE_CACHE"] = str(root / "cache")
        os.environ["TMPDIR"] = tempfile.tempdir = str(root / "tmp")
        named = options.command
        known = {n: c for n, c in commands(root / "input").items()
                 if not named or n in named or (n in RECIPES and "methods" in named)}  # fmt: skip
        if "search" in known:
            import torch

            torch.set_num_threads(1)  # threads of a library do not survive a fork
        print(f"{'command':<18}{'kills':>7}{'wrong':>7}", flush=True)
        for number, (name, command) in enumerate(known.items()):
            one = Campaign(root, name, command, np.random.default_rng([options.seed, number]))
            share = -(-options.count // len(known))
            until = began + 60 * options.minutes * (number + 1) / len(known)
            if options.every:
                one.kill_at_every_change()
            while not options.every and one.kinds.total() < share and time.monotonic() < until:
                one.kill()
            print(f"{name:<18}{one.kinds.total():>7}{len(one.wrong):>7}", flush=True)
            for why, count in Counter(one.wrong).items():
                print(f"    {count} × {why}")
            failed, kinds = failed + len(one.wrong), kinds + one.kinds
    print("; ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
    print(f"{kinds.total()} kills, {failed} wrong, seed {options.seed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
