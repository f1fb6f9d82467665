"""`chat_template:` of a recipe: what the tokenizer of the result says."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import sigmerge
from sigmerge.recipe import load_recipe
from sigmerge.recipe.templates import TEMPLATE_NAMES
from tests.pools import PoolOnDisk, make_pool

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Two and two? "},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
]
SAYS = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\n Two and two? <|im_end|>\n"
    "<|im_start|>assistant\nFour.<|im_end|>\n<|im_start|>user\nAnd three?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nTwo and two?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nFour.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd three?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s> [INST] Be brief.\n\n Two and two?  [/INST] Four.</s> [INST] And three? [/INST]",
    "alpaca": "Be brief.\n\n### Instruction:\nTwo and two?\n\n### Response:\nFour.\n\n"
    "### Instruction:\nAnd three?\n\n### Response:\n",
    "exaone": "[|system|]Be brief.[|endofturn|]\n[|user|] Two and two? \n"
    "[|assistant|]Four.[|endofturn|]\n[|user|]And three?\n[|assistant|]",
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    pool = make_pool(tmp_path_factory.mktemp("templates"), layers=1, tokenizer=True)
    for folder in (pool.reference, *pool.experts.values()):
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": "</s>"}))
    return pool


def said(folder: Path, talk: list[dict[str, str]] = TALK) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", SAYS)
def test_a_name(pool: PoolOnDisk, tmp_path: Path, name: str) -> None:
    sigmerge.merge(pool.recipe("ties", chat_template=name), tmp_path / "out")
    assert said(tmp_path / "out") == SAYS[name]


def test_the_names_are_mergekits() -> None:
    files = resources.files("mergekit._data.chat_templates").iterdir()
    theirs = {Path(f.name).stem for f in files if f.name.endswith(".jinja")}
    assert theirs == set(TEMPLATE_NAMES) == set(SAYS)


def test_mistral_refuses_two_users_in_a_row(pool: PoolOnDisk, tmp_path: Path) -> None:
    sigmerge.merge(pool.recipe("ties", chat_template="mistral"), tmp_path / "out")
    with pytest.raises(Exception, match="take turns"):
        said(tmp_path / "out", [TALK[1], TALK[1]])


def test_a_file_and_the_text_itself(pool: PoolOnDisk, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    given = pool.recipe("ties", chat_template=str(tmp_path / "mine.jinja"))
    assert load_recipe(given).chat_template == "{{ messages[0].content }}!"
    given["chat_template"] = "{{ messages[1].content }}?"
    assert load_recipe(given).chat_template == given["chat_template"]


def test_auto_is_the_template_of_most_models(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", layers=1, tokenizer=True)
    for name in ("math", "safety"):
        (pool.experts[name] / "chat_template.jinja").write_text("most\n")
    (pool.reference / "chat_template.jinja").unlink()
    assert load_recipe(pool.recipe("ties", chat_template="auto")).chat_template == "most"


def test_a_template_in_the_tokenizers_settings_gives_way(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", layers=1, tokenizer=True)
    file = pool.reference / "tokenizer_config.json"
    old = [{"name": "default", "template": "old"}, {"name": "tools", "template": "tools"}]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": old}))
    sigmerge.merge(pool.recipe("ties", chat_template="chatml"), tmp_path / "out")
    (tmp_path / "out/chat_template.jinja").unlink()  # as a transformers that does not know it
    assert said(tmp_path / "out") == SAYS["chatml"]


def test_a_template_that_only_experts_have_is_named(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", layers=1, tokenizer=True)
    (pool.reference / "chat_template.jinja").unlink()
    (note,) = load_recipe(pool.recipe("ties")).notes
    assert "reference has no chat template" in note and "chat_template: auto" in note
    sigmerge.merge(pool.recipe("ties", chat_template="auto"), tmp_path / "out")
    assert said(tmp_path / "out") == "Be brief."


def test_ids_of_special_tokens_follow_the_tokenizer(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", layers=1, tokenizer=True)
    ends = {"eos_token_id": [2, 7]}
    (pool.experts["coding"] / "generation_config.json").write_text(json.dumps(ends))
    file = pool.experts["coding"] / "config.json"
    config = {**json.loads(file.read_text()), **ends}
    file.write_text(json.dumps({k: v for k, v in config.items() if k != "pad_token_id"}))
    for source, wanted in (("coding", ends), ("base", {"eos_token_id": 2})):
        sigmerge.merge(pool.recipe("ties", tokenizer_source=source), tmp_path / source)
        assert json.loads((tmp_path / source / "generation_config.json").read_text()) == wanted
    made, base = (
        json.loads((tmp_path / source / "config.json").read_text()) for source in ("coding", "base")
    )
    assert made["eos_token_id"] == [2, 7] and "pad_token_id" not in made
    assert base["eos_token_id"] == 2 and base["pad_token_id"] == 0
