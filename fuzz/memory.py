"""What is kept between runs never changes a result: commands, changes and kills, many of them.

    python -m fuzz.memory --changes 5000 --kills 1000

A scenario is a pool, its recipes, a suite, the programs that score it, and a cache that only grows.
Before each run of a command something changes by chance: weights, a configuration, a tokenizer, a
program, a file or folder that it reads, a variable that it names, an operator or a score in Python
or a module that these import, exemplars, records, settings of a recipe or a suite, the file system
that the pool seems to lie on, the version of a library or the package's own code, or bytes of the
cache. States come back, so that old entries would be found under a wrong key. Some runs are killed
first, and what they leave beside the output stays; often something changes once more before the
same command runs again. Each result is compared with that of the same command with an empty cache
and nothing beside its output: there must be no difference.

A run is a fork of this process, which has everything loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from tests.evaluation.tiny import write_tiny

import sigmerge
from fuzz.kills import TIMES, bytes_of
from sigmerge import kept
from sigmerge.cli.main import main as command_line
from sigmerge.errors import SigmergeError
from sigmerge.files import mounts, sources
from sigmerge.files.safe_open import remove
from sigmerge.files.scratch import remove_stale

VARIANTS = 3
"""States that each thing can be in."""
MEMBERS = ("reference", "math", "code")
VOLATILE = {
    "wall_seconds", "cpu_seconds", "seconds", "usage_of_run", "usage_of_results", "reused_items",
    "made", "resumed", "state", "replayed", "peak_memory_bytes", "bytes_read", "times", "phases",
    "looks", "cost", "steps", "started", "waited", "checksum",
}  # fmt: skip
"""Keys of records that say what a run took, and not what it found."""

SCORE = """
set -- "$1" $(cat "$1"/*.safetensors {file} data/* | cksum)
salt=$(({salt} + ${{FUZZ_SALT:-0}}))
printf '{{"math": 0.%d, "code": 0.%d}}' $(($2 % 8 + 1)) $((($2 / 8 + salt) % 8 + 1))
"""
"""Scores that weights, a file, a folder, a variable of the environment and the program decide."""
ITEMS = """
import json, sys
salt = {salt} + len(open("{file}").read())
for line in open(sys.argv[1]):
    item = json.loads(line)
    print(json.dumps({{"id": item["id"], "m": (len(item["prompt"]) + salt) % 5 / 5}}))
"""
OWN_OPERATOR = """
import sigmerge
import own_helper

@sigmerge.operator("own")
def own(tile, site):
    from own_later import FACTOR
    tile.out[:] = own_helper.turned(tile.experts.mean(axis=0), {salt}) * FACTOR
"""
OWN_SCORE = """
import os
from pathlib import Path
from zlib import crc32
import own_helper

def score(folder):
    import own_later
    found = sum(crc32(file.read_bytes()) for file in Path(folder).glob("*.safetensors"))
    found += {salt} + own_helper.SALT + int(own_later.FACTOR * 10) + int(os.environ["FUZZ_SALT"])
    return {{"math": (found % 8 + 1) / 10, "code": (found // 8 % 8 + 1) / 10}}
"""
OWN_HELPER = """
SALT = {salt}

def turned(values, by):
    return values * (1 + SALT + by) / 4
"""
OWN_LATER = """
FACTOR = 1 + {salt} / 10
"""
"""Code of a user: an operator and a score, a module that both import, and one that they import as
they run."""


@dataclass
class Scenario:
    """The state of everything that decides a result, each a number below `VARIANTS`."""

    root: Path
    state: dict[str, int] = field(default_factory=dict)

    @property
    def pool(self) -> Path:
        return self.root / "pool"

    def begin(self) -> None:
        for number in range(VARIANTS):
            for member, name in enumerate(MEMBERS):
                write_tiny(self.root / f"variants/{number}/{name}", 10 * number + member)
        for name in MEMBERS:
            shutil.copytree(self.root / f"variants/0/{name}", self.pool / name)
        for name in CHANGES:
            self.set(name, 0)

    def set(self, name: str, number: int) -> None:
        self.state[name] = number
        CHANGES[name](self, number)

    def write(self, name: str, text: str) -> None:
        """A file whose content alone changes, or which is replaced: by the length of its text."""
        file = self.root / name
        if len(text) % 2:
            file.write_text(text)
        else:
            other = file.with_name(f".{file.name}.new")
            other.write_text(text)
            other.replace(file)


def _weights(member: str) -> Callable[[Scenario, int], None]:
    def change(now: Scenario, number: int) -> None:
        wanted = now.root / f"variants/{number}/{member}/model.safetensors"
        file = now.pool / member / "model.safetensors"
        times = file.stat()
        file.write_bytes(wanted.read_bytes())
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as some tools do

    return change


def _configuration(now: Scenario, number: int) -> None:
    file = now.pool / "math/config.json"
    content = json.loads(file.read_text())
    content["rms_norm_eps"] = [1e-6, 1e-5, 1e-2][number]
    file.write_text(json.dumps(content))


def _tokenizer(now: Scenario, number: int) -> None:
    file = now.pool / "math/tokenizer_config.json"
    content = json.loads(file.read_text())
    content["model_max_length"] = 4096 + number
    file.write_text(json.dumps(content))


def _code_beside(now: Scenario, number: int) -> None:
    now.write("pool/math/modeling_own.py", f"# {number}" * (number + 1))


def _named_file(now: Scenario, number: int) -> None:
    now.write("constant.txt", "x" * (number + 1))


def _file_in_a_folder(now: Scenario, number: int) -> None:
    (now.root / "data/deep").mkdir(parents=True, exist_ok=True)
    now.write("data/rows.txt", "y" * (number + 1))


def _variable(now: Scenario, number: int) -> None:
    os.environ["FUZZ_SALT"] = str(number)


def _score(now: Scenario, number: int) -> None:
    now.write("score.sh", SCORE.format(salt=number, file=now.root / "constant.txt"))


def _items(now: Scenario, number: int) -> None:
    now.write("items.py", ITEMS.format(salt=number, file=now.root / "constant.txt"))


def _exemplars(now: Scenario, number: int) -> None:
    for name in MEMBERS[1:]:
        shown = [{"prompt": f"{name} {i} {number}", "response": "yes"} for i in range(3)]
        now.write(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in shown))


def _records(now: Scenario, number: int) -> None:
    rows = [{"prompt": f"ask {i} {'?' * number}", "answer": "e"} for i in range(10)]
    now.write("records.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def _recipes(now: Scenario, number: int) -> None:
    head = "base_model: pool/reference\ndtype: float32\nseed: {seed}\nmodels:\n"
    models = "".join(f"  - {{model: pool/{n}, name: {n}}}\n" for n in MEMBERS[1:])
    shown = models.replace("}\n", ", exemplars: NAME.jsonl}\n")
    for name in MEMBERS[1:]:
        shown = shown.replace(f"name: {name}, exemplars: NAME", f"name: {name}, exemplars: {name}")
    weight = [0.3, 0.5, 0.7][number]
    task = f"merge_method: task_arithmetic\nparameters: {{weight: {weight}}}\n"
    top = head.format(seed=number)
    command = f"sh score.sh {{checkpoint}} {now.root / 'constant.txt'} data"
    told = f"repair: {{command: '{command}', c_max: {weight}}}\n"
    now.write("repair.yaml", f"{task}{top}{models}{told}")
    now.write("tune.yaml", f"{task}{top}{models}repair: {{command: '{command}'}}\n")
    gram = f"merge_method: regmean\nparameters: {{gram: exemplars, off_diagonal: {weight}}}\n"
    limit = f"capture: {{limit: 3, max_length: {8 + number}}}\n"
    now.write("regmean.yaml", f"{gram}{top}{shown}{limit}")
    own = f"merge_method: own\n{top}{models}repair: {{c_max: {weight}}}\n"
    now.write("own.yaml", own)


def _suite(now: Scenario, number: int) -> None:
    command = f"{sys.executable} items.py {{items}} --file={now.root / 'constant.txt'}"
    said = {"harness": "jsonl", "files": "records.jsonl", "max_new_tokens": 2 + number,
            "matcher": "contains"}  # fmt: skip
    own = {"harness": "command", "files": "records.jsonl", "command": command,
           "metrics": {"m": "m"}}  # fmt: skip
    marks = {"math": {"said": said}, "code": {"own": own}}
    now.write("suite.yaml", json.dumps({"name": "s", "calibration_items": 4, "domains": marks}))


def _own(name: str, text: str) -> Callable[[Scenario, int], None]:
    return lambda now, number: now.write(f"{name}.py", text.format(salt=number))


def _mounts(now: Scenario, number: int) -> None:
    kind = ["ext4", "nfs4", "fuse"][number]
    lines = ["1 1 0:1 / / rw - ext4 x rw\n", f"2 1 0:2 / {now.pool.resolve()} rw - {kind} x rw\n"]
    now.write("mounts", "".join(lines))


def _nothing(_: Scenario, __: int) -> None:
    """What a run patches: versions and code."""


CHANGES: dict[str, Callable[[Scenario, int], None]] = {
    **{f"weights of {name}": _weights(name) for name in MEMBERS},
    "configuration": _configuration,
    "tokenizer": _tokenizer,
    "code beside the weights": _code_beside,
    "a file that a program reads": _named_file,
    "a file in a folder that a program reads": _file_in_a_folder,
    "a variable of the environment": _variable,
    "the program that scores": _score,
    "the program of a benchmark": _items,
    "an operator in Python": _own("own_operator", OWN_OPERATOR),
    "a score in Python": _own("own_score", OWN_SCORE),
    "a module that these import": _own("own_helper", OWN_HELPER),
    "a module that these import as they run": _own("own_later", OWN_LATER),
    "exemplars": _exemplars,
    "records": _records,
    "recipes": _recipes,
    "suite": _suite,
    "file system": _mounts,
    "a library": _nothing,
    "own code": _nothing,
}
DECIDES_NOTHING = ("a library", "own code", "file system")
"""A run says at most that they are others; what it computes stays."""
LAST = {
    "run": "run.json",
    "tune": "tune.json",
    "run, in Python": "run.json",
    "tune, in Python": "tune.json",
}
"""The last file of commands that write into their output as they go."""
NAMES_THEM = ("captures",)
"""Commands whose plan names the keys of what they read, in which both are."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "repair.yaml", "OUT"),
    "repair": ("merge", "repair.yaml", "OUT"),
    "captures": ("merge", "regmean.yaml", "OUT"),
    "profile": ("profile", "repair.yaml", "--json"),
    "deficits": ("deficits", "repair.yaml", "--anchor", "pool/code", "--json"),
    "evaluate": ("evaluate", "pool/math", "--suite", "suite.yaml", "--split", "all", "--json"),
    "tune": ("tune", "tune.yaml", "OUT", "--calls", "5"),
    "run, in Python": ("own.yaml", "OUT"),
    "tune, in Python": ("own.yaml", "OUT"),
}


def _in_python(name: str, recipe: str, out: str) -> None:
    """A command with an operator and a score of the user's."""
    sys.path.insert(0, str(Path.cwd()))
    sys.dont_write_bytecode = True  # it is valid for a second, in which a file may change
    import_module("own_operator")
    score = import_module("own_score").score
    try:
        if name.startswith("run"):
            sigmerge.run(recipe, out, score=score)
        else:
            sigmerge.tune(recipe, out, score=score, calls=7)
    except SigmergeError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def load() -> None:
    """Load what a run needs, and read the package's code, so that each fork has both."""
    for module in pkgutil.walk_packages(sigmerge.__path__, "sigmerge."):
        if "__main__" not in module.name:
            with suppress(ImportError):  # of what an extra brings
                import_module(module.name)
    for name in sys.modules:
        if name.startswith(("sigmerge.jobs", "sigmerge.probing", "sigmerge.evaluation")):
            sources._closure_digest(name)


def damage(cache: Path, rng: np.random.Generator) -> str | None:
    """Change one file of a cache; what was done, None where the cache is empty."""
    files = sorted(file for file in cache.rglob("*") if file.is_file())
    if not files:
        return None
    file, other = (files[int(i)] for i in rng.integers(len(files), size=2))
    data = file.read_bytes()
    kind = str(rng.choice(["cut", "a bit", "gone", "another's", "garbage", "a folder", "empty"]))
    if kind == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif kind == "a bit" and data:
        place = int(rng.integers(len(data)))
        flipped = bytes([data[place] ^ (1 << int(rng.integers(8)))])
        file.write_bytes(data[:place] + flipped + data[place + 1 :])
    elif kind == "another's":
        file.write_bytes(other.read_bytes())
    elif kind == "garbage":
        file.write_bytes(rng.bytes(len(data)))
    elif kind == "a folder":
        file.unlink()
        (file / "inside").mkdir(parents=True)
    elif kind == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
    return kind


class Campaign:
    """Runs of one scenario, each beside one with an empty cache."""

    def __init__(self, root: Path, seed: int, commands: Sequence[str]) -> None:
        self.rng, self.commands = np.random.default_rng(seed), list(commands)
        self.now = Scenario(root / "scenario")
        self.root = root
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
        self.found = 0
        (root / "scenario").mkdir()
        self.now.begin()

    def step(self, kill: bool = False) -> None:
        """Change something, run a command, and compare."""
        change = self._change()
        name = str(self.rng.choice(self.commands))
        self.counts[change] += 1
        if kill and self._killed(name):
            self.counts["kills"] += 1
            if self.rng.random() < 0.5:
                change = self._change()
                self.counts[change] += 1
        with_cache = self._result(name, self.root / "cache", "out")
        without = self._wanted(name)
        if with_cache != without:
            differing = sorted(
                key for key in {**with_cache, **without} if with_cache.get(key) != without.get(key)
            )
            self.wrong.append(f"{name} after {change}: {differing[:3]} {self.now.state}")

    def _wanted(self, name: str) -> dict[str, Any]:
        """What a command finds with an empty cache, run once for each state that decides it."""
        out = () if name in NAMES_THEM else DECIDES_NOTHING
        decides = tuple(v for key, v in self.now.state.items() if key not in out)
        if (name, decides) not in self.known:
            empty = self.root / "empty"
            shutil.rmtree(empty, ignore_errors=True)
            hidden = self._hide_beside()
            self.known[name, decides] = self._result(name, empty, "out")
            self._show_beside(hidden)
        return self.known[name, decides]

    def _change(self) -> str:
        chance = self.rng.random()
        if chance < 0.2:
            beside = self.now.pool / kept.BESIDE
            place = self.root / "cache" if self.rng.random() < 0.5 else beside
            return f"cache: {damage(place, self.rng) or 'nothing'}"
        if chance < 0.25:
            return "nothing"
        name = str(self.rng.choice(list(CHANGES)))
        self.now.set(name, int(self.rng.integers(VARIANTS)))
        return name

    def _beside(self) -> list[Path]:
        """What lies beside the pool's members, and what an unfinished command left."""
        folders = [self.now.pool / kept.BESIDE, self.now.root / kept.BESIDE, self.now.root / "out"]
        return [*filter(Path.exists, folders), *self.now.root.glob(".out.*")]

    def _hide_beside(self) -> dict[Path, Path]:
        """Move it away; from where to where."""
        hidden = {place: self.root / f"hidden-{i}" for i, place in enumerate(self._beside())}
        for place, to in hidden.items():
            place.rename(to)
        return hidden

    def _show_beside(self, hidden: dict[Path, Path]) -> None:
        for place in self._beside():
            remove(place)
        for place, to in hidden.items():
            to.rename(place)

    def _killed(self, name: str) -> bool:
        """Run a command and kill it at a moment by chance; whether it was still at work."""
        made = self._fork(name, self.root / "cache", "out")
        time.sleep(float(self.rng.random()) * 0.6)
        os.kill(made, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(made, 0)[1])
        out, last = self.now.root / "out", LAST.get(name)
        if last is None or (out / last).exists():  # finished: the next run would refuse it
            shutil.rmtree(out, ignore_errors=True)
        return code == -signal.SIGKILL

    def _result(self, name: str, cache: Path, out: str) -> dict[str, Any]:
        """What a command found, by file or by key of what it printed."""
        made = self._fork(name, cache, out)
        code = os.waitstatus_to_exitcode(os.waitpid(made, 0)[1])
        said = (self.root / "said.txt").read_text()
        self.found += int((self.root / "found.txt").read_text() or 0)
        folder = self.now.root / out
        result: dict[str, Any] = {"code": code}
        if code:
            result["said"] = (self.root / "errors.txt").read_text()
        if folder.exists():
            result |= bytes_of(folder)
            for record in {*LAST.values()}:
                if (file := folder / record).exists():
                    result[record] = _lasting(json.loads(file.read_text()))
            shutil.rmtree(folder)
        elif not code:
            result |= {key: _lasting(value) for key, value in json.loads(said).items()}
        return {key: value for key, value in result.items() if key not in VOLATILE}

    def _fork(self, name: str, cache: Path, out: str) -> int:
        made = os.fork()
        if made:
            return made
        code = 70
        try:
            (self.root / "found.txt").write_text("0")
            os.chdir(self.now.root)
            os.environ["SIGMERGE_CACHE"] = str(cache)
            remove_stale.cache_clear()
            found = self._patch()
            words = [out if word == "OUT" else word for word in COMMANDS[name]]
            sys.argv = ["sigmerge", *words]
            run = partial(_in_python, name, *words) if "Python" in name else command_line
            with (
                (self.root / "said.txt").open("w") as said,
                (self.root / "errors.txt").open("w") as errors,
                redirect_stdout(said),
                redirect_stderr(errors),
            ):
                try:
                    run()
                    code = 0
                except SystemExit as stop:
                    code = stop.code if isinstance(stop.code, int) else 0
            (self.root / "found.txt").write_text(str(len(found)))
        finally:
            os._exit(code)

    def _patch(self) -> list[str]:
        """Versions and code as the state says; what is found in the cache is listed."""
        version, code, read, grown = kept._version, kept.code_digest, kept._read, kept._grown
        library, own = self.now.state["a library"], self.now.state["own code"]
        found: list[str] = []
        mounts.TABLE = self.now.root / "mounts"

        def reading(folder: Path, key: str) -> Any:
            entry = read(folder, key)
            found.extend([key] if entry else [])
            return entry

        def growing(folder: Path, key: str) -> Any:
            entry = grown(folder, key)
            found.extend(entry[0])
            return entry

        kept._version = lambda name: f"{version(name)}.{library}"  # type: ignore[assignment]
        kept.code_digest = lambda made: f"{code(made)}{own}"
        kept._read, kept._grown = reading, growing
        return found


def _lasting(value: Any) -> Any:
    """A record without what a run took."""
    if isinstance(value, dict):
        return {key: _lasting(each) for key, each in value.items()
                if key not in VOLATILE and not key.endswith(TIMES)}  # fmt: skip
    if isinstance(value, list):
        return [_lasting(each) for each in value]
    return value


def campaign(
    changes: int, kills: int, seed: int, commands: Sequence[str], minutes: float = 1e9
) -> Campaign:
    """So many steps with a change each, of which so many with a kill."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memory-") as home:
        one = Campaign(Path(home), seed, commands)
        for number in range(changes):
            kill = number * kills // changes != (number + 1) * kills // changes
            one.step(kill)
            if time.monotonic() - began > 60 * minutes:
                break
    return one


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.memory", description=__doc__)
    parser.add_argument("--changes", type=int, default=300)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=1e9, help="end after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", action="append", choices=COMMANDS, help="only this one")
    given = parser.parse_args()
    load()
    commands = given.command or list(COMMANDS)
    one = campaign(given.changes, given.kills, given.seed, commands, given.minutes)
    for text in one.wrong:
        print(f"  {text}")
    kinds = "; ".join(f"{kind} {count}" for kind, count in sorted(one.counts.items()))
    steps = one.counts.total() - one.counts["kills"]
    print(kinds)
    print(f"{steps} changes, {one.counts['kills']} kills, {one.found} entries of the cache used, "
          f"{len(one.wrong)} differences, seed {given.seed}")  # fmt: skip
    return 1 if one.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
