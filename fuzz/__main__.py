"""`python -m fuzz`: runs the targets within limits and prints a table."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fuzz.mutations import BY_SUFFIX, mutate_folder
from fuzz.targets import SECRET, TARGETS, Target
from sigmerge.errors import SigmergeError

SECONDS = 10
"""Of processor time; one input must not take longer, nor twelve times as long by the clock."""
MEMORY = 6 << 30
"""Bytes of address space; libraries take most of it."""


@dataclass
class Count:
    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    failed: list[tuple[int, str]] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        return self.accepted + self.refused + len(self.failed)


class TooSlow(BaseException):
    """Not an Exception, so that no handler of the project catches it."""


def _alarm(*_: object) -> None:
    raise TooSlow(f"took longer than {SECONDS} s")


class Copies:
    """Copies of a folder, whose files are kept in memory."""

    def __init__(self, folder: Path) -> None:
        found = [(entry.relative_to(folder), entry) for entry in sorted(folder.rglob("*"))]
        self.folders = [name for name, entry in found if entry.is_dir()]
        self.files = {str(name): entry.read_bytes() for name, entry in found if entry.is_file()}

    def make(self, place: Path) -> None:
        place.mkdir()
        for name in self.folders:
            (place / name).mkdir()
        for name, content in self.files.items():
            with open(f"{place}/{name}", "wb", 0) as file:  # noqa: PTH123 (twice as fast)
                file.write(content)


def run_input(name: str, target: Target, sound: Copies, place: Path, seed: int, number: int) -> str:
    """Damage a copy of the sound folder and read it; returns what happened to it."""
    rng = np.random.default_rng([seed, list(TARGETS).index(name), number])
    sound.make(place)
    part = place / target.damaged
    if part.is_dir():
        mutate_folder(part, rng, place.parent / "secret", target.kinds)
    else:
        part.write_bytes(BY_SUFFIX[part.suffix](part.read_bytes(), rng))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(12 * SECONDS)
    try:
        target.run(place)
        return "accepted"
    except SigmergeError as error:
        assert 0 < len(str(error)) < 20_000, "an error is too long to be read"
        return "refused"
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)


@dataclass(frozen=True)
class Extent:
    """Which inputs of a target: so many, or those of so many seconds, or a single one."""

    seconds: float
    inputs: int | None
    only: int | None

    def ended(self, count: int, until: float) -> bool:
        if self.only is not None:
            return count == 1
        return count == self.inputs if self.inputs is not None else time.monotonic() >= until


def fuzz(name: str, extent: Extent, seed: int, keep: Path | None) -> Count:
    target, count = TARGETS[name], Count()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as home:
        root = Path(home)
        (root / "secret").write_bytes(SECRET)
        os.environ["SIGMERGE_CACHE"] = str(root / "cache")
        os.chdir(root)
        target.make(root / "sound")
        sound = Copies(root / "sound")
        sound.make(root / "input")
        target.run(root / "input")  # compiles and loads, which counts for no input
        shutil.rmtree(root / "input")
        before = {entry.name for entry in root.iterdir()} | {"cache"}
        until = time.monotonic() + extent.seconds
        number = extent.only or 0
        while not extent.ended(count.inputs, until):
            place, began = root / "input", time.monotonic()
            try:
                outcome = run_input(name, target, sound, place, seed, number)
                strangers = {e.name for e in root.iterdir()} - before - {"input"}
                assert not strangers, f"wrote outside its folder: {strangers}"
                assert (root / "secret").read_bytes() == SECRET, "changed a file of the user"
                setattr(count, outcome, getattr(count, outcome) + 1)
            except (Exception, TooSlow) as error:
                line = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                count.failed.append((number, line))
                if extent.only is not None:
                    traceback.print_exc()
                if keep:
                    shutil.copytree(place, keep / f"{name}-{number}", symlinks=True)
            count.slowest = max(count.slowest, time.monotonic() - began)
            shutil.rmtree(place, ignore_errors=True)
            number += 1
        os.chdir("/")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="for all targets together")
    parser.add_argument("--inputs", type=int, help="of each target, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--only", type=int, help="the number of one input")
    parser.add_argument("--keep", type=Path, help="a folder for inputs that fail")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _alarm)
    signal.signal(signal.SIGPROF, _alarm)
    chosen = options.target or list(TARGETS)
    extent = Extent(60 * options.minutes / len(chosen), options.inputs, options.only)
    print(f"{'target':<12}{'inputs':>9}{'accepted':>10}{'refused':>9}{'failed':>8}{'slowest':>11}")
    failed = total = 0
    for name in chosen:
        count = fuzz(name, extent, options.seed, options.keep)
        print(f"{name:<12}{count.inputs:>9}{count.accepted:>10}{count.refused:>9}"
              f"{len(count.failed):>8}{1000 * count.slowest:>8.0f} ms", flush=True)  # fmt: skip
        for number, line in count.failed[:10]:
            print(f"    --target {name} --only {number}: {line}")
        failed, total = failed + len(count.failed), total + count.inputs
    print(f"{total} inputs, {failed} failures, seed {options.seed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
