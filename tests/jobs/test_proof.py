"""Where times prove nothing, every pass over inputs hashes them before anything is published.

A weight changes as another machine may change it: size and times stay, and the digest that is noted
is believed. Each pass finds it, stops, and drops what was made under that digest; the next run of
the same command makes what a run without a cache makes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

import sigmerge
from sigmerge import kept
from sigmerge.errors import ChangedInput
from sigmerge.files import digests
from sigmerge.files.digests import file_digests, identity, rehash_from_now_on, rehashing
from sigmerge.kept import Derivation, Given, Inputs
from tests.evaluation.tiny import write_tiny
from tests.kept_entries import another_cache
from tests.mounted import mount, write_unseen

pytestmark = pytest.mark.usefixtures("own_cache")


class Place:
    """A pool, and what commands are told of it."""

    def __init__(self, root: Path) -> None:
        self.pool, self.out, self.changed = root / "pool", root / "out", root / "pool/math"
        for number, name in enumerate(("reference", "math", "code")):
            write_tiny(self.pool / name, number)
        rows = [
            json.dumps({"prompt": f"ask {i}", "response": "yes", "answer": "e"}) for i in (1, 2, 3)
        ]
        (root / "rows.jsonl").write_text("\n".join(rows))
        said = {
            "harness": "jsonl",
            "files": "rows.jsonl",
            "max_new_tokens": 2,
            "matcher": "contains",
        }
        suite = {"name": "s", "calibration_items": 1, "domains": {"math": {"said": said}}}
        (root / "suite.yaml").write_text(json.dumps(suite))
        self.suite, self.rows = root / "suite.yaml", root / "rows.jsonl"

    @property
    def weights(self) -> Path:
        return self.changed / "model.safetensors"

    def recipe(self, method: str = "task_arithmetic", **more: Any) -> dict[str, Any]:
        models = [
            {"model": str(self.pool / name), "name": name, "exemplars": str(self.rows)}
            for name in ("math", "code")
        ]
        return {"merge_method": method, "base_model": str(self.pool / "reference"),
                "models": models, **more}  # fmt: skip

    def bytes(self) -> dict[str, bytes]:
        """Weights and settings that a command wrote."""
        names = ("*.safetensors", "*config.json")
        return {file.name: file.read_bytes() for name in names for file in self.out.glob(name)}


def _score(folder: Path) -> dict[str, float]:
    total = sum((folder / "model.safetensors").read_bytes())
    return {"math": total % 7 / 7, "code": total % 5 / 5}


DECIDED = {"shares": {"math": 0.5, "code": 0.5}, "capacity": 0.1, "scale": 0.5}
GRAM = {"parameters": {"gram": "exemplars"}}
PASSES: dict[str, Callable[[Place], Any]] = {
    "merge": lambda at: sigmerge.merge(at.recipe(), at.out, threads=2),
    "merge, one thread": lambda at: sigmerge.merge(at.recipe(), at.out, threads=1),
    "repair": lambda at: sigmerge.merge(at.recipe(repair=DECIDED), at.out),
    "profile": lambda at: sigmerge.profile(at.recipe(repair={})).views,
    "capture": lambda at: [c.key for c in sigmerge.capture(at.recipe("regmean", **GRAM))],
    "deficits": lambda at: sigmerge.deficits(
        at.recipe(repair={}), anchor=at.pool / "code", score=_score
    ),
    "evaluate": lambda at: sigmerge.evaluate(at.changed, str(at.suite), "all").domains,
    "extract": lambda at: sigmerge.extract(at.changed, base=at.pool / "reference", out=at.out),
}
"""Each reads all weights of the expert that changes."""


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(digests, "GRAIN", -(10**9))  # files need not be old
    mount(monkeypatch, {tmp_path / "pool": "nfs4"})
    return Place(tmp_path)


def _changed(at: Place) -> bytes:
    """The weights with another bit in the last number."""
    content = bytearray(at.weights.read_bytes())
    content[-4] ^= 1
    return bytes(content)


def _made_of(given: Given) -> None:
    return None


@pytest.mark.parametrize("verb", PASSES)
def test_a_pass_finds_what_times_do_not_show(at: Place, verb: str, tmp_path: Path) -> None:
    before = file_digests([at.weights])[at.weights]
    wanted = Derivation("other", _made_of, Inputs.of(weights=at.weights))
    kept.get(wanted)
    write_unseen(at.weights, _changed(at))
    with pytest.raises(ChangedInput, match=f"{at.weights}: its content changed, and its size"):
        PASSES[verb](at)
    assert not at.out.exists() and not list(tmp_path.glob(".out*"))
    assert kept.look(wanted) is None and file_digests([at.weights])[at.weights] != before
    for root in kept.roots([at.pool]):
        assert all(before not in entry.inputs.values() for entry in kept.listing(root))
    found, made = PASSES[verb](at), at.bytes()
    if made:
        at.out.rename(tmp_path / "first")
    with another_cache(tmp_path / "empty"):
        again = PASSES[verb](at)
    assert at.bytes() == made and (made or found == again)


@pytest.mark.parametrize("verb", ["merge", "profile"])
def test_where_times_are_kept_inputs_are_not_read_again(
    at: Place, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount(monkeypatch, {at.pool: "ext4"})
    files = [file for file in at.pool.rglob("*") if file.is_file()]
    file_digests(files)
    read: list[Path] = []
    hashed = digests._hashed
    monkeypatch.setattr(
        digests, "_hashed", lambda one, *how: (read.append(one.file), hashed(one, *how))[1]
    )
    PASSES[verb](at)
    assert not [file for file in read if file in files]
    mount(monkeypatch, {at.pool: "nfs4"})
    at.out.rename(at.out.with_name("first")) if at.out.exists() else kept.clear(
        at.pool / kept.BESIDE
    )
    kept.clear(kept.roots()[0])
    PASSES[verb](at)
    weights = {at.pool / name / "model.safetensors" for name in ("reference", "math", "code")}
    assert {file for file in read if file.suffix == ".safetensors"} & {*files} == weights


@pytest.mark.parametrize("verb", PASSES)
def test_rehash_asks_for_it_anywhere(at: Place, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rehashed() -> None:
        rehash_from_now_on()
        PASSES[verb](at)

    mount(monkeypatch, {at.pool: "ext4"})
    write_unseen(at.weights, _changed(at))
    with pytest.raises(ChangedInput, match="its content changed"):
        copy_context().run(rehashed)
    assert not at.out.exists()
    # Its times proved nothing once, and prove nothing from now on.
    assert identity(at.weights).endswith(file_digests([at.weights])[at.weights])
    assert digests.unproven([at.weights]) == [at.weights]


def test_what_is_left_of_a_merge_is_not_continued_with_other_bytes(at: Place) -> None:
    """Its header names inputs by their content where times prove nothing."""
    before = identity(at.weights)
    assert before.endswith(file_digests([at.weights])[at.weights])
    write_unseen(at.weights, _changed(at))
    with pytest.raises(ChangedInput):
        sigmerge.merge(at.recipe(), at.out)
    assert identity(at.weights).rpartition("|")[2] != before.rpartition("|")[2]


def test_a_dry_run_says_it(at: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        *sigmerge.merge.plan(at.recipe(repair=DECIDED), at.out).steps,
        *sigmerge.profile.plan(at.recipe(repair={})).steps,
        *sigmerge.capture.plan(at.recipe("regmean", **GRAM)).steps,
        *sigmerge.evaluate.plan(at.changed, str(at.suite), "all").steps,
        *sigmerge.extract.plan(at.changed, base=at.pool / "reference", out=at.out).steps,
    ]
    assert [step.name for step in steps] == [
        "merge", "repair", "profile", "capture", "capture", "evaluate", "extract",
    ]  # fmt: skip
    for step in steps:
        assert [note for note in step.notes if "hashed" in note] == [
            "inputs on nfs4 are hashed while they are read: another machine may change files "
            "there, and their times (docs/rulings.md, 37)"
        ]
    mount(monkeypatch, {at.pool: "xfs"})
    (step,) = sigmerge.merge.plan(at.recipe(), at.out).steps
    assert not any("hashed" in note for note in step.notes)
    with rehashing():
        (step,) = sigmerge.merge.plan(at.recipe(), at.out).steps
    assert "--rehash: every input is hashed" in step.notes


def test_a_stopped_makers_parts_go_too(at: Place) -> None:
    """Nothing says which bytes they are of."""

    def stopped(given: Given) -> Any:
        (given.out / "half").write_text("x")
        given.put("half", True, "half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.get(Derivation("other", stopped, Inputs.of(weights=at.weights), near=at.changed))
    assert list((at.pool / kept.BESIDE).rglob("half"))
    write_unseen(at.weights, _changed(at))
    with pytest.raises(ChangedInput):
        digests.prove([at.weights])
    assert not list((at.pool / kept.BESIDE).rglob("half"))
