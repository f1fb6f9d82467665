"""Every maker of something kept reads what it declares, and all that it declares is in its key.

One table of all makers. A maker without a row fails, and so does a setting that no row changes.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sigmerge import kept
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.gguf import folder_of
from sigmerge.checkpoints.pickled import as_safetensors
from sigmerge.evaluation import splits
from sigmerge.evaluation.how import How
from sigmerge.evaluation.run import Evaluation
from sigmerge.evaluation.suite import load_suite
from sigmerge.jobs.candidates import KeptMeasure, StoredMeasure
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import block_sites, open_merge_pool, open_repair_pool
from sigmerge.jobs.scores import callable_scorer, scorer_of
from sigmerge.jobs.search import _Ask, _Search
from sigmerge.jobs.signatures import signatures
from sigmerge.kept import Derivation
from sigmerge.merge3.extract import Question
from sigmerge.operators.table import register
from sigmerge.probing import generate
from sigmerge.probing.captures import Capture
from sigmerge.probing.exemplars import read_exemplars
from sigmerge.probing.gates import gate_rows
from sigmerge.probing.grams import prompt_grams
from sigmerge.recipe import load_recipe
from tests import gguf_files
from tests.evaluation.tiny import write_tiny

SOURCE = Path(kept.__file__).parent
pytestmark = pytest.mark.usefixtures("own_cache")


@dataclass(frozen=True)
class Place:
    """A pool, and files that makers are shown; what lies beside them is declared by none."""

    root: Path

    @classmethod
    def at(cls, root: Path) -> Place:
        for number, name in enumerate(("reference", "math", "code")):
            folder = write_tiny(root / "pool" / name, number)
            (folder / "modeling_own.py").write_text("SCALE = 1\n")
            (folder / "notes.md").write_text("undeclared")
            (folder / "other").mkdir()
            (folder / "other/model.safetensors").write_text("undeclared")
        rows = [{"prompt": f"ask {i}", "response": "yes", "answer": "e"} for i in range(3)]
        (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        said = {"harness": "jsonl", "files": "rows.jsonl", "max_new_tokens": 2,
                "matcher": "contains"}  # fmt: skip
        own = {"harness": "command", "files": "rows.jsonl", "metrics": {"m": "m"},
               "command": f"sh {root}/items.sh {{items}} {{checkpoint}}"}  # fmt: skip
        marks = {"math": {"said": said, "again": said}, "code": {"own": own, "more": own}}
        suite = {"name": "s", "domains": marks}
        (root / "suite.yaml").write_text(json.dumps(suite))
        (root / "items.sh").write_text(ITEMS)
        (root / "score.sh").write_text(SCORE)
        torch.save({"weight": torch.ones(2)}, root / "weights.bin")
        gguf_files.write(root / "model.gguf")
        return cls(root)

    @property
    def pool(self) -> Path:
        return self.root / "pool"

    @property
    def rows(self) -> Path:
        return self.root / "rows.jsonl"

    def recipe(self, method: str, **more: Any) -> dict[str, Any]:
        models = [
            {"model": str(self.pool / name), "name": name, "exemplars": str(self.rows)}
            for name in ("math", "code")
        ]
        return {"merge_method": method, "base_model": str(self.pool / "reference"),
                "models": models, **more}  # fmt: skip


_SEES = (
    """if [ -e "$CHECKPOINT/notes.md" ] || [ ! -e "$CHECKPOINT/config.json" ]; then exit 9; fi\n"""
)
ITEMS = f"""CHECKPOINT=$2
{_SEES}
: "$SALT_OF_ROWS"
sed 's/.*"id": "\\([^"]*\\)".*/{{"id": "\\1", "m": 0.5}}/' "$1"\n"""
SCORE = f"""CHECKPOINT=$1
{_SEES}
: "$SALT_OF_ROWS"
echo '{{"math": 0.5, "code": 0.5}}'\n"""


class _Wanted(Exception):
    pass


def first_wanted(ask: Callable[[], Any]) -> tuple[Derivation, Callable[..., Any] | None]:
    """What is asked of the memory first, and by what it would be made."""

    def get(wanted: Derivation, make: Any = None, **_: Any) -> Any:
        raise _Wanted(wanted, make)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "get", get)
        try:
            ask()
        except _Wanted as found:
            return found.args[0], found.args[1]
    raise AssertionError("nothing is kept")


def grams(at: Place, device: str = "cpu", trust: bool = False) -> Derivation:
    return prompt_grams(
        open_checkpoint(at.pool / "math"), at.pool / "reference", at.rows, device, trust,
        at.pool / "reference",
    )  # fmt: skip


def capture(at: Place, kind: str, **changes: Any) -> Derivation:
    planned = Capture(
        expert="math", kind=kind, checkpoint=open_checkpoint(at.pool / "math"),
        tokenizer=at.pool / "math", file=at.rows, exemplars=tuple(read_exemplars(at.rows, 2)),
        limit=2, max_length=8, device="cpu", trust=False, labels="sampled",
        scale=0.5 if kind == "features" else 1.0,
        reference=open_checkpoint(at.pool / "reference") if kind == "features" else None,
    )  # fmt: skip
    return replace(planned, **changes).derivation(at.pool / "reference")


def signed(at: Place, fewer: bool = False, **how: Any) -> Derivation:
    options = Options(threads=1, **how)
    pool = open_repair_pool(load_recipe(at.recipe("task_arithmetic")), options)
    blocks = block_sites(pool)
    return signatures(pool, blocks[:1] if fewer else blocks, options)


def unpickled(at: Place) -> Derivation:
    return first_wanted(lambda: as_safetensors([at.root / "weights.bin"]))[0]


def texts_of_gguf(at: Place) -> Derivation:
    return first_wanted(lambda: folder_of(at.root / "model.gguf"))[0]


def gates(
    at: Place, mode: str = "hidden_last", prompt: str = "ask", device: str = "cpu",
    trust: bool = False,
) -> Derivation:  # fmt: skip
    base = open_checkpoint(at.pool / "math")
    return gate_rows(base, [((prompt,), ("yes",)), (("yes",), ())], mode, device, trust)


@contextmanager
def variable(value: str) -> Iterator[None]:
    """One that programs name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SALT_OF_ROWS", value)
        yield


def by_command(
    at: Place, more: str = "", folder: str = "", salt: str = ""
) -> tuple[Derivation, Any]:
    repair = {"command": f"sh {at.root}/score.sh {{checkpoint}}{more}"}
    recipe = load_recipe(at.recipe("linear", repair=repair))
    scorer = scorer_of(replace(recipe, folder=at.root / folder), Options())
    assert scorer is not None
    with variable(salt):
        return first_wanted(lambda: scorer(at.pool / "math"))


def score(folder: Path, worth: float = 0.5) -> dict[str, float]:
    assert not (folder / "notes.md").exists()
    return {"math": worth, "code": 0.5}


def other_score(folder: Path) -> dict[str, float]:
    return score(folder, 0.25)


def by_callable(at: Place, of: Callable[[Path], Any] = score) -> tuple[Derivation, Any]:
    return first_wanted(lambda: callable_scorer(of)(at.pool / "math"))


def candidate(
    at: Place, method: str = "regmean", nonfinite: bool = False, of: Any = score,
    device: str = "cpu", **more: Any,
) -> tuple[Derivation, Any]:  # fmt: skip
    recipe = at.recipe(method, **more)
    options = replace(Options(threads=1, allow_nonfinite=nonfinite).in_a_task, device=device)
    pool, _ = open_merge_pool(load_recipe(recipe), options)
    measure = StoredMeasure(callable_scorer(of), pool, at.root / "work", options)
    return first_wanted(lambda: KeptMeasure(measure).candidate(recipe))


@dataclass
class Worth:
    """A scorer of items that are not asked of a model."""

    worth: float = 0.5

    def __call__(self, weights: Any, questions: Any) -> list[float]:
        assert weights
        return [self.worth for _ in questions]


def searched(
    at: Place, method: str = "regmean", nonfinite: bool = False, worth: float = 0.5,
    device: str = "cpu", asked: int = 1, **more: Any,
) -> tuple[Derivation, Any]:  # fmt: skip
    recipe = at.recipe(method, **more)
    options = replace(Options(threads=1, allow_nonfinite=nonfinite).in_a_task, device=device)
    pool, _ = open_merge_pool(load_recipe(recipe), options)
    job = SimpleNamespace(base=SimpleNamespace(pool=pool), scorer=Worth(worth))
    search = _Search(job, SimpleNamespace(threads=1), options)  # type: ignore[arg-type]
    questions = {"said": [Question(str(i), "said", "math", "calibration") for i in range(asked)]}
    return first_wanted(lambda: search._got(_Ask("0", recipe, questions)))


def evaluation(
    at: Place, change: Mapping[str, Any], name: str, folder: str = "", **how: Any
) -> Evaluation:
    suite = json.loads((at.root / "suite.yaml").read_text())
    for domain in suite["domains"].values():
        if name in domain:
            domain[name] |= change
    file = at.root / folder / "changed.yaml"
    file.write_text(json.dumps(suite))
    return Evaluation(at.pool / "math", load_suite(file), How(**how))


def answer(
    at: Place, name: str, change: Mapping[str, Any] | None = None, device: str = "cpu",
    salt: str = "", **how: Any,
) -> Derivation:  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, variable(salt):
        patch.setattr(generate, "model_device", lambda: device)
        return evaluation(at, change or {}, name, **how).derivation(name)


def answered(at: Place, name: str) -> Callable[[], Any]:
    run = evaluation(at, {}, name)
    items = splits.load_scored(run.suite, run.how)[0][name]
    return lambda: run.score(name, items)


@dataclass(frozen=True)
class Row:
    """A maker: where the source declares it, and what declares it here.

    `changes` has for every setting arguments with which it is another; `made` runs the maker where
    the memory does not.
    """

    where: str
    of: Callable[..., Any]
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    made: Callable[[Place], Callable[[], Any]] | None = None

    def wanted(self, at: Place, **changes: Any) -> tuple[Derivation, Callable[..., Any] | None]:
        found = self.of(at, **changes)
        return found if isinstance(found, tuple) else (found, None)


PROBED = {"device": {"device": "cuda"}, "trust_remote_code": {"trust": True}}
CAPTURED = {**PROBED, "limit": {"limit": 1}, "max_length": {"max_length": 9}}
MERGED = {
    "lenient": {"nonfinite": True},
    "operator": {"method": "of_makers"},
    "layout": {"out_dtype": "bfloat16"},
    "statistics": {"capture": {"max_length": 9}},
    "solved_on": {"device": "cuda"},
    "recipe": {"parameters": {"off_diagonal": 0.5}},
}
JSONL = {
    "answer": "prompt", "chat_template": True, "ignore_case": True, "matcher": "exact",
    "max_new_tokens": 3, "prompt": "Say {prompt}", "stop": ["."],
    "metrics": {"match": {"key": "match", "better": "lower"}},
}  # fmt: skip
ANSWERED = {
    **{key: {"change": {key: value}} for key, value in JSONL.items()},
    "backend": {"backend": "vllm"}, "device": {"device": "cuda"}, "dtype": {"dtype": "bfloat16"},
    "harness": {"name": "own"}, "name": {"name": "again"},
    "trust_remote_code": {"trust_remote_code": True},
}  # fmt: skip
RAN = {
    "backend": {"name": "said"}, "dtype": {"name": "said"}, "harness": {"name": "said"},
    "command": {"change": {"command": "sh {checkpoint} {items}"}}, "folder": {"folder": "pool"},
    "environment": {"salt": "another"},
    "metrics": {"change": {"metrics": {"m": {"key": "m", "better": "lower"}}}},
    "name": {"name": "more"},
}  # fmt: skip
ROWS = {
    "grams": Row("probing/grams.py", grams, PROBED),
    "features": Row(
        "probing/captures.py", partial(capture, kind="features"),
        {**CAPTURED, "skip_bos": {"skip_bos": True}, "scale": {"scale": 0.25}},
    ),
    "fisher": Row(
        "probing/captures.py", partial(capture, kind="fisher"),
        {**CAPTURED, "labels": {"labels": "data"}, "seed": {"seed": 1}},
    ),
    "signatures": Row(
        "jobs/signatures.py", signed,
        {"unchecked": {"allow_nonfinite": True}, "layers": {"fewer": True}},
    ),
    "unpickled": Row("checkpoints/pickled.py", unpickled),
    "gguf": Row("checkpoints/gguf.py", texts_of_gguf),
    "gates": Row(
        "probing/gates.py", gates,
        {**PROBED, "mode": {"mode": "hidden_avg"}, "prompts": {"prompt": "other"}},
    ),
    "score of a command": Row(
        "jobs/scores.py", by_command,
        {"command": {"more": " x"}, "folder": {"folder": "pool"}, "environment": {"salt": "x"}},
    ),
    "score of a callable": Row("jobs/scores.py", by_callable, {"callable": {"of": other_score}}),
    "candidate": Row(
        "jobs/candidates.py", candidate,
        {**{f"candidate.{name}": how for name, how in MERGED.items()},
         "by.callable": {"of": other_score}},
    ),
    "search": Row(
        "jobs/search.py", searched,
        {**{f"model.{name}": how for name, how in MERGED.items()},
         "by.callable": {"worth": 0.25}, "questions": {"asked": 2}},
    ),
    "answer of a model": Row(
        "evaluation/run.py", partial(answer, name="said"), ANSWERED, partial(answered, name="said")
    ),
    "answer of a command": Row(
        "evaluation/run.py", partial(answer, name="own"), RAN, partial(answered, name="own")
    ),
}  # fmt: skip


@register("of_makers")
def _operator(tile: Any, site: Any) -> None:
    tile.out[:] = 0


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = isinstance(value, Mapping) and value and name in ("candidate", "by", "model")
        found |= flat(value, f"{name}.") if inner else {f"{before}{name}": value}
    return found


@pytest.fixture
def at(tmp_path: Path) -> Place:
    return Place.at(tmp_path)


def makers() -> set[str]:
    """The sources that declare something to be kept."""
    texts = {file: file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py")}
    calls = {
        file.relative_to(SOURCE).as_posix(): [
            node for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Derivation"
        ]
        for file, text in texts.items() if "Derivation(" in text
    }  # fmt: skip
    assert all(len(found) <= 1 for found in calls.values()), "one maker a file: else name its line"
    return {file for file, found in calls.items() if found}


def test_every_maker_has_a_row() -> None:
    assert makers() == {row.where for row in ROWS.values()}


_opened: list[str] | None = None


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(args[0], str | bytes | os.PathLike):
        _opened.append(os.fsdecode(args[0]))


@contextmanager
def opened_in(root: Path, *others: Path) -> Iterator[set[Path]]:
    """The files under a folder that this process opens, but those under others."""
    global _opened
    if not hasattr(_hear, "heard"):
        sys.addaudithook(_hear)  # which stays, and hears nothing of other tests
        _hear.heard = True  # type: ignore[attr-defined]
    found: set[Path] = set()
    _opened = []
    try:
        yield found
    finally:
        names, _opened = _opened, None
        files = {Path(os.path.realpath(name)) for name in names}
        found |= {
            file for file in files
            if file.is_relative_to(root) and file.is_file()
            and not any(file.is_relative_to(other) for other in others)
        }  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_file_that_is_not_declared_is_not_seen(name: str, at: Place) -> None:
    """Nor by programs, which end with an error where they are shown one."""
    row = ROWS[name]
    wanted, make = row.wanted(at)
    declared = {file.resolve() for file in wanted.inputs.files.values()}
    run = row.made(at) if row.made else partial(kept.get, wanted, make, again=True)
    with opened_in(at.root, at.root / "work", at.pool / kept.BESIDE) as opened:
        run()
    assert opened <= declared
    assert opened & {f for f in declared if f.suffix in (".safetensors", ".bin", ".gguf", ".sh")}
    undeclared = {at.pool / "math/notes.md", at.pool / "math/other/model.safetensors"}
    assert not undeclared & declared and all(file.is_file() for file in undeclared)


def _other(file: Path) -> bytes:
    """Content that is read as before, and is another."""
    content = file.read_bytes()
    if file.suffix == ".safetensors":
        return content[:-1] + bytes([content[-1] ^ 1])
    return content + b"\n"


@pytest.mark.parametrize("name", ROWS)
def test_every_declared_input_is_in_the_key(name: str, at: Place) -> None:
    row = ROWS[name]
    wanted = row.wanted(at)[0]
    core, key = wanted.core, wanted.full
    own = {file for file in wanted.inputs.files.values() if file.is_relative_to(at.root)}
    assert own
    for file in own:
        before = file.read_bytes()
        file.write_bytes(_other(file))
        assert row.wanted(at)[0].core != core, file
        file.write_bytes(before)
    assert row.wanted(at)[0].full == key


@pytest.mark.parametrize("name", ROWS)
def test_every_setting_is_in_the_key(name: str, at: Place) -> None:
    row = ROWS[name]
    wanted = row.wanted(at)[0]
    settings = flat(wanted.settings)
    assert {*settings} == {*row.changes}
    for setting, change in row.changes.items():
        other = row.wanted(at, **change)[0]
        assert flat(other.settings)[setting] != settings[setting], setting
        assert other.core != wanted.core, setting


@pytest.mark.parametrize("name", ROWS)
def test_its_code_and_its_libraries_are_in_the_key(
    name: str, at: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ROWS[name]
    before = row.wanted(at)[0]
    key = before.full
    known = kept._version
    for library in before.libraries:
        others = {library: "another"}
        with monkeypatch.context() as patch:
            patch.setattr(kept, "_version", lambda one, others=others: others.get(one, known(one)))
            assert row.wanted(at)[0].full != key
    monkeypatch.setattr(kept, "code_digest", lambda make: "another")
    assert row.wanted(at)[0].full != key
