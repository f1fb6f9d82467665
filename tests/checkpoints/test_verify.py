"""Every damage to a published folder, to its inputs and to a pool is found and named."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sigmerge.checkpoints.verify import verify_pool, verify_result
from sigmerge.errors import PoolError
from sigmerge.files import digests
from tests.checkpoints.damage import NAME, edit_config
from tests.pools import PoolOnDisk


def listed(folder: Path) -> dict[str, str]:
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def zeroed(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64] + bytes(64))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda folder: None, ""),
    "zeros": (zeroed, "digests: model.safetensors: is not what was written"),
    "deleted weights": (lambda f: (f / "model.safetensors").unlink(), "headers: .*no weights"),
    "truncated": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "headers: "),
    "deleted file": (lambda f: (f / "config.json").unlink(), "digests: config.json: is missing"),
    "another file": (lambda f: (f / "extra.py").write_text(""), "digests: extra.py: is not in"),
    "a link to the same": (lambda f: (f / "LICENSE").rename(f.parent / "LICENSE")
                           and (f / "LICENSE").symlink_to("../LICENSE"),
                           "digests: LICENSE: .*is a link that leaves the folder"),
    "a FIFO": (lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json")),
               "config.json is not a regular file"),
    "NaN": (lambda f: edit(f, lambda w: w[NAME].view(-1).__setitem__(5, float("nan"))),
            f"numbers: {NAME}: .*nan at flat index 5"),
    "dtype": (lambda f: edit_config(f, torch_dtype="float16"), "config: dtype: float16, the weig"),
    "depth": (lambda f: edit_config(f, num_hidden_layers=9), "config: num_hidden_layers: 9, the"),
    "vocabulary": (lambda f: edit_config(f, vocab_size=10**6), "config: vocab_size: 1000000"),
    "untied": (
        lambda f: (edit(f, lambda w: w.pop("lm_head.weight", None)),
                   edit_config(f, tie_word_embeddings=False)),
        "tie_word_embeddings: false, but no output head"),
    "tied": (
        lambda f: (edit(f, lambda w: w.update({"lm_head.weight": w[EMBEDDING] + 1})),
                   edit_config(f, tie_word_embeddings=True)),
        "tie_word_embeddings: true, but lm_head.weight differs"),
}  # fmt: skip
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_a_result_is_found(pool: PoolOnDisk, damage: str) -> None:
    folder = pool.reference
    destroy, words = DAMAGE[damage]
    (folder / "LICENSE").write_text("free")
    files = listed(folder)
    destroy(folder)
    report = verify_result(folder, files, {}, architecture=(), threads=2)
    assert report.ok == (damage == "nothing"), report.findings
    if words:
        assert any(re.search(words, str(finding)) for finding in report.findings), report.findings
    assert "digests" in report.checked and report.skipped == {}


def test_no_remembered_digest_is_believed(
    pool: PoolOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note of a changed file has the digest from before, and all that a true note has."""
    monkeypatch.setattr(digests, "GRAIN", -(10**9))
    folder, file = pool.reference, pool.reference / "config.json"
    files = listed(folder)
    file.write_text(file.read_text() + " ")
    digests._is_another(digests._begun(file, PoolError), files["config.json"], None)
    assert digests.file_digests([file]) == {file: files["config.json"]}
    report = verify_result(folder, files, {file: files["config.json"]}, architecture=())
    assert [finding.check for finding in report.findings] == ["digests", "inputs"]


def test_inputs_are_compared(pool: PoolOnDisk, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"1")
    other.write_bytes(b"2")
    inputs = {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in (one, other)}
    assert verify_result(pool.reference, listed(pool.reference), inputs).ok
    one.write_bytes(b"3")
    other.unlink()
    report = verify_result(pool.reference, listed(pool.reference), inputs)
    assert [f.problem for f in report.findings] == ["has changed since the run",
                                                    "is not there any more"]  # fmt: skip
    assert set(report.skipped) == {"architecture"}


def test_a_sound_pool(pool: PoolOnDisk) -> None:
    report = verify_pool(pool.reference, pool.experts)
    assert report.ok and report.warnings == ()
    assert report.checked == ("pool", "vocabulary", "config", "computation", "numbers")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: edit(f, lambda w: w.pop(NAME)), "math: tensor missing"),
        (lambda f: (f / "config.json").unlink(), "math: .*no config.json"),
        (lambda f: edit(f, lambda w: w[NAME].view(-1).__setitem__(0, float("inf"))), "inf at flat"),
        (lambda f: (f / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": {"other": 0}}})), "math: differs from that of"),
    ],
)  # fmt: skip
def test_damage_to_a_pool_is_found(
    pool: PoolOnDisk, damage: Callable[[Path], object], words: str
) -> None:
    for folder in (pool.reference, *pool.experts.values()):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    damage(pool.experts["math"])
    report = verify_pool(pool.reference, pool.experts)
    assert not report.ok
    assert any(re.search(words, str(finding)) for finding in report.findings), report.findings


def test_an_embedding_without_rows_is_none(pool: PoolOnDisk) -> None:
    for folder in (pool.reference, *pool.experts.values()):
        edit(folder, lambda w: w.update({"model.embed_tokens.weight": torch.tensor(1.0)}))
    assert verify_pool(pool.reference, pool.experts).ok
