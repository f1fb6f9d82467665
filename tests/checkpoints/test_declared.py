"""What a checkpoint declares is all that decides what it computes, and all that is shown of it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from sigmerge import kept
from sigmerge.checkpoints.declared import checkpoint_files, shown_folder
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.kept import Derivation, Given, Inputs
from sigmerge.nano.files import POOL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "expert"
    made.mkdir()
    for file in (POOL / "math").iterdir():
        if file.is_file():
            (made / file.name).write_bytes(file.read_bytes())
    return made


def names(folder: Path) -> Any:
    def listed(given: Given) -> Any:
        shown = shown_folder(given, "expert", checkpoint)
        return {f.relative_to(shown).as_posix(): f.read_bytes().hex()[:64] for f in shown.rglob("*")
                if f.is_file()}  # fmt: skip

    checkpoint = open_checkpoint(folder)
    inputs = Inputs.of(expert=checkpoint_files(checkpoint))
    return kept.get(Derivation("listed", listed, inputs), again=True).value


def key(folder: Path) -> str:
    inputs = Inputs.of(expert=checkpoint_files(open_checkpoint(folder)))
    return Derivation("key", names, inputs).full


DECIDING = (
    "modeling_own.py", "configuration_own.py", "generation_config.json", "chat_template.jinja",
    "additional_chat_templates/tool.jinja", "special_tokens_map.json", "merges.txt",
    "tokenizer.model", "preprocessor_config.json", "quant.tiktoken",
)  # fmt: skip


@pytest.mark.parametrize("name", DECIDING)
def test_a_file_that_decides_is_declared_and_shown(name: str, folder: Path) -> None:
    before = key(folder)
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    added = key(folder)
    file.write_text("{} ")
    assert len({before, added, key(folder)}) == 3
    assert name in names(folder)


@pytest.mark.parametrize(
    "name", ["README.md", "notes/own.json", "sigmerge/plan.json", ".git/x.json"]
)
def test_other_files_are_neither(name: str, folder: Path) -> None:
    before = key(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    assert key(folder) == before
    assert name not in names(folder)


def test_every_file_of_the_model_counts(folder: Path) -> None:
    for file in [f for f in folder.iterdir() if f.name in names(folder)]:
        before = key(folder)
        content = file.read_bytes()
        flipped = content.replace(b"}", b"} ", 1) if file.suffix == ".json" else (
            content[:-1] + bytes([content[-1] ^ 1])
        )  # fmt: skip
        file.write_bytes(flipped)
        assert key(folder) != before, file.name
        file.write_bytes(content)


def test_transformers_loads_what_is_shown(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = open_checkpoint(folder)

    def logits(given: Given) -> Any:
        shown = str(shown_folder(given, "expert", checkpoint))
        ids = AutoTokenizer.from_pretrained(shown)("one two", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return AutoModelForCausalLM.from_pretrained(shown)(ids).logits[0, -1, :4].tolist()

    inputs = Inputs.of(expert=checkpoint_files(checkpoint))
    found = kept.get(Derivation("logits", logits, inputs)).value
    ids = AutoTokenizer.from_pretrained(folder)("one two", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        own = AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0, -1, :4].tolist()
    assert found == own


def test_code_that_own_code_imports_is_declared(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the user's on Python's path, also through another one."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (folder / "modeling_own.py").write_text("import torch, users_layers\n")
    (tmp_path / "users_layers.py").write_text("import users_norm\n")
    _deciding(tmp_path / "users_norm.py", folder)


def test_code_of_the_hub_is_declared(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That `auto_map` names: it comes from the hub's cache."""
    snapshot = tmp_path / "hub/models--someone--layers/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc")
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "someone/layers--modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    _deciding(snapshot / "modeling_own.py", folder)


def _deciding(file: Path, folder: Path) -> None:
    keys = []
    for text in ("SCALE = 1\n", "SCALE = 2\n", "SCALE = 1\n"):
        file.write_text(text)
        keys.append(key(folder))
    assert keys[0] == keys[2] != keys[1]
    assert file in checkpoint_files(open_checkpoint(folder)).values()
