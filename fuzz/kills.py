"""Kills, many of them: a child runs a verb, is killed, and the same verb is run again.

    python -m fuzz.kills --count 1000

Half of the kills are at a system call (before or after the n-th of its kind), half at a moment by
chance. After each, the folder must be the older result or the new one, whole; after the second run
it must have the bytes of a run that nobody interrupted, and nothing may be left beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.faults import job

from fuzz.targets import pool
from sigmerge import api

Verb = Callable[[Path], object]


def verbs(root: Path) -> dict[str, Verb]:
    """What is killed; each writes the folder that it gets."""
    pool(root)
    recipe = root / "recipe.yaml"
    api.merge(recipe, root / "anchor", threads=2)
    domains = ("math", "code")
    scores = {"experts": {e: {d: 0.9 if d == e else 0.4 for d in domains} for e in domains},
              "anchor": {"math": 0.5, "code": 0.6}}  # fmt: skip
    (root / "scores.json").write_text(json.dumps(scores))
    repaired = root / "repair.yaml"
    repaired.write_text(recipe.read_text() + "repair: {scores: scores.json}\n")

    def repair(out: Path) -> object:
        return api.repair(repaired, out, anchor=root / "anchor", threads=2, overwrite=True)

    return {
        "write": job.write,
        "merge": lambda out: api.merge(recipe, out, threads=2, max_shard_size="200",
                                       overwrite=True),
        "repair": repair,
    }  # fmt: skip


def bytes_of(folder: Path) -> dict[str, str]:
    """Digests of all files but those that hold times and what was resumed."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != "provenance.json"
    }


def in_child(verb: Verb, out: Path, before: Callable[[], None]) -> tuple[int, int]:
    """Start a verb in a child; returns its id and when it began."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with open(os.devnull, "w") as null:  # noqa: PTH123
                os.dup2(null.fileno(), 2)
            before()
            verb(out)
            code = 0
        finally:
            os._exit(code)
    return child, time.monotonic_ns()


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_once(verb: Verb, out: Path, duration: float, rng: np.random.Generator) -> bool:
    """Whether the child was killed before it ended."""
    if rng.random() < 0.5:
        call, at = str(rng.choice([*job.CALLS, "replace"])), int(rng.geometric(0.1))
        fault = str(rng.choice(["kill before", "kill after"]))
        child, _ = in_child(verb, out, lambda: job.arm(call, at, fault))
    else:
        child, _ = in_child(verb, out, lambda: None)
        time.sleep(float(rng.random()) * duration)
        os.kill(child, signal.SIGKILL)
    code = ended(child)
    assert code in (0, -signal.SIGKILL), f"ended with {code}"
    return code != 0


def check(root: Path, name: str, verb: Verb, kills: int, rng: np.random.Generator) -> list[str]:
    whole = root / f"{name}-whole"
    verb(whole)
    wanted = bytes_of(whole)
    out, wrong, done, began = root / f"{name}-out", [], 0, time.monotonic()
    verb(out)
    duration = 1.2 * (time.monotonic() - began)
    while done < kills:
        shutil.rmtree(out, ignore_errors=True)
        replaced = rng.random() < 0.5
        if replaced:
            out.mkdir()
            (out / "config.json").write_text("{}")
        old = bytes_of(out)
        if not kill_once(verb, out, duration, rng):
            continue
        done += 1
        if bytes_of(out) not in (old, wanted):
            wrong.append("neither the older result nor the new one")
        if ended(in_child(verb, out, lambda: None)[0]) != 0:
            wrong.append("the second run failed")
        elif bytes_of(out) != wanted:
            wrong.append("other bytes after the second run")
        left = [entry.name for entry in root.iterdir() if entry.name.startswith(f".{out.name}")]
        if left:
            wrong.append(f"left beside the result: {left}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="kills of all verbs together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="kills-") as home:
        root = Path(home)
        os.environ["SIGMERGE_CACHE"] = str(root / "cache")
        known = verbs(root / "input")
        print(f"{'verb':<10}{'kills':>7}{'wrong':>7}")
        for number, (name, verb) in enumerate(known.items()):
            kills = -(-options.count // len(known))
            wrong = check(root, name, verb, kills, np.random.default_rng([options.seed, number]))
            print(f"{name:<10}{kills:>7}{len(wrong):>7}", flush=True)
            for why, count in Counter(wrong).items():
                print(f"    {count} × {why}")
            failed += len(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
