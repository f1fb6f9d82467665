"""Models with different vocabularies: rows are moved by token, as mergekit moves them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import sigmerge
from sigmerge.checkpoints.vocabularies import (
    VocabularyRequest,
    plan_vocabulary,
    size_of,
    with_size,
)
from sigmerge.errors import SigmergeError
from sigmerge.recipe import load_recipe
from sigmerge.recipe.template import tokenizer_keys
from tests.adapters import write_adapter
from tests.pools import draw, read_weights, shapes, write_member

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHARED = [f"w{i}" for i in range(20)]
WORDS = {
    "base": ["<pad>", "<s>", "</s>", *SHARED, "only-base"],
    "math": ["<pad>", "<s>", "</s>", "sum", "both", *SHARED[::-1], "integral"],
    "coding": ["<s>", "</s>", "<pad>", *SHARED[:15], "both", "lambda"],
}
ADDED = {"base": ["<s>", "</s>"], "math": ["<s>", "</s>", "<|step|>"], "coding": ["<|code|>"]}
PADDING = {"base": 3, "math": 0, "coding": 5}
"""Rows of the embedding behind the last token."""


def write_tokenizer(folder: Path, words: list[str], added: list[str]) -> dict[str, int]:
    """A fast tokenizer; added tokens that are no word get the next ids."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel

    made = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    made.add_special_tokens([AddedToken(token, special=True) for token in added])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return made.get_vocab(with_added_tokens=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vocabularies")
    named, found = shapes(), {}
    for seed, name in enumerate(WORDS):
        tokens = {*WORDS[name], *ADDED[name]}
        rows = len(tokens) + PADDING[name]
        own = {n: (rows, 16) if n in (EMBEDDING, HEAD) else s for n, s in named.items()}
        found[name] = folder = write_member(root / name, draw(own, seed))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
        write_tokenizer(folder, WORDS[name], ADDED[name])
    return found


def vocabulary(folder: Path) -> dict[str, int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).get_vocab()


def added_entries(folder: Path) -> set[str]:
    """A tokenizer's added tokens with all that is said of them but their ids."""
    from transformers import AutoTokenizer

    return {
        repr(entry) for entry in AutoTokenizer.from_pretrained(folder).added_tokens_decoder.values()
    }


def both(models: dict[str, Path], recipe: dict[str, Any], out: Path) -> tuple[Path, Path]:
    """The folders that sigmerge and mergekit make of one file."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    text = yaml.safe_dump(recipe)
    for name, folder in models.items():
        text = text.replace("{" + name + "}", str(folder))
    (out / "recipe.yaml").write_text(text)
    sigmerge.merge(out / "recipe.yaml", out / "ours", threads=1)
    content = MergeConfiguration.model_validate(yaml.safe_load(text))
    options = MergeOptions(write_model_card=False, quiet=True)
    run_merge(content, str(out / "theirs"), options)
    return out / "ours", out / "theirs"


def experts(**parameters: Any) -> list[dict[str, Any]]:
    return [{"model": f"{{{name}}}", "parameters": parameters} for name in ("math", "coding")]


CODE_ROW = {"kind": "model_token", "model": "{coding}", "token": "lambda"}
BY_ID = {"kind": "model_token", "model": "{math}", "token_id": 3}
BASE_ROW = {"kind": "model_token", "model": "{base}", "token": "only-base"}
CASES: dict[str, dict[str, Any]] = {
    "union of two": {
        "merge_method": "linear", "models": experts(weight=0.5), "tokenizer_source": "union",
    },
    "union on a base": {
        "merge_method": "task_arithmetic", "base_model": "{base}", "models": experts(weight=0.4),
        "tokenizer_source": "union",
    },
    "base": {
        "merge_method": "ties", "base_model": "{base}",
        "models": experts(weight=0.4, density=0.5), "tokenizer_source": "base",
    },
    "a model's": {
        "merge_method": "slerp", "base_model": "{base}", "models": [{"model": "{math}"}],
        "parameters": {"t": 0.4}, "tokenizer_source": "{math}",
    },
    "tokens of their own": {
        "merge_method": "linear", "models": experts(weight=1.0),
        "tokenizer": {
            "source": "union", "pad_to_multiple_of": 16,
            "tokens": {
                "<|code|>": {"source": "{coding}", "force": True},
                "both": {"source": CODE_ROW, "force": True},
                "<|new|>": {"source": BY_ID}, "<|none|>": {"source": {"kind": "zero"}},
            },
        },
    },
    "padded": {
        "merge_method": "linear", "models": experts(weight=1.0),
        "tokenizer": {"source": "base", "pad_to_multiple_of": 7}, "base_model": "{math}",
    },
    "some layers, on a base": {
        "merge_method": "ties", "base_model": "{base}", "parameters": {"weight": 0.5},
        "slices": [{"sources": [{"model": f"{{{name}}}", "layer_range": [first, first + 1]}
                                for name, first in (("base", 0), ("math", 1), ("coding", 0))]}],
        "tokenizer": {"tokens": {"sum": {"source": BASE_ROW, "force": True}}},
    },
    "stacked": {
        "merge_method": "passthrough", "tokenizer_source": "union", "base_model": "{math}",
        "slices": [
            {"sources": [{"model": "{math}", "layer_range": [0, 1]}]},
            {"sources": [{"model": "{coding}", "layer_range": [0, 2]}]},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_mergekit(models: dict[str, Path], tmp_path: Path, case: str) -> None:
    ours, theirs = both(models, {**CASES[case], "dtype": "float32"}, tmp_path)
    words, known = vocabulary(ours), vocabulary(theirs)
    assert set(words) == set(known)
    if "base_model" in CASES[case]:  # without, mergekit extends any tokenizer of the models
        assert added_entries(ours) == added_entries(theirs)
    mine, other = read_weights(ours), read_weights(theirs)
    assert set(mine) == set(other)
    for name, values in other.items():
        rows = mine[name]
        assert rows.shape == values.shape, name
        if name in (EMBEDDING, HEAD):
            padding = np.arange(len(words), len(rows))
            order = [known[token] for token in words]
            values = np.concatenate([values[order], values[padding]])
            rows = np.concatenate([rows[list(words.values())], rows[padding]])
        np.testing.assert_allclose(rows, values, rtol=0, atol=3e-7, err_msg=name)
    sizes = [json.loads((f / "config.json").read_text())["vocab_size"] for f in (ours, theirs)]
    assert sizes[0] == sizes[1]


def test_the_rules_row_by_row(models: dict[str, Path], tmp_path: Path) -> None:
    """A plain soup of two; what one lacks is the other's, what both lack on their own is zero."""
    recipe = {
        "merge_method": "linear", "tokenizer_source": "union", "dtype": "float32",
        "models": [{"model": str(models[n]), "parameters": {"weight": 0.5}}
                   for n in ("math", "coding")],
    }  # fmt: skip
    sigmerge.merge(recipe, tmp_path / "out")
    weights = {name: read_weights(models[name])[EMBEDDING] for name in ("math", "coding")}
    known = {name: vocabulary(models[name]) for name in weights}
    words = vocabulary(tmp_path / "out")
    merged = read_weights(tmp_path / "out")[EMBEDDING]
    assert set(words) == set(known["math"]) | set(known["coding"])
    assert {words[t] for t in known["math"]} == set(known["math"].values())
    for token, row in words.items():
        own = [weights[n][known[n][token]] for n in weights if token in known[n]]
        pair = own if len(own) == 2 else [own[0], own[0]]
        np.testing.assert_array_equal(
            merged[row], (pair[0] * np.float32(0.5) + pair[1] * np.float32(0.5)), err_msg=token
        )


def test_equal_vocabularies_keep_their_padding(models: dict[str, Path], tmp_path: Path) -> None:
    recipe = {
        "merge_method": "slerp", "base_model": str(models["base"]), "tokenizer_source": "union",
        "models": [{"model": str(models["base"])}, {"model": str(tmp_path / "twin")}],
        "parameters": {"t": 0.5},
    }  # fmt: skip
    twin = {n: v + np.float32(0.1) for n, v in read_weights(models["base"]).items()}
    write_member(tmp_path / "twin", twin)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "twin" / file).write_bytes((models["base"] / file).read_bytes())
    sigmerge.merge(recipe, tmp_path / "out")
    assert read_weights(tmp_path / "out")[EMBEDDING].shape == twin[EMBEDDING].shape


@pytest.mark.parametrize("longer", ["base", "expert"])
def test_the_same_tokens_in_embeddings_of_different_sizes(
    models: dict[str, Path], tmp_path: Path, longer: str
) -> None:
    """Fine-tuning tools pad an embedding to a multiple: the tokens are the same, the rows not."""
    rows = len(WORDS["base"]) + PADDING["base"]
    named = {n: (rows + 4, 16) if n in (EMBEDDING, HEAD) else s for n, s in shapes().items()}
    padded = write_member(tmp_path / "padded", draw(named, 9))
    config = json.loads((models["base"] / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps({**config, "vocab_size": rows + 4}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (padded / file).write_bytes((models["base"] / file).read_bytes())
    expert, base = ("base", "padded") if longer == "base" else ("padded", "base")
    recipe = {
        "merge_method": "task_arithmetic", "base_model": f"{{{base}}}", "dtype": "float32",
        "models": [{"model": f"{{{expert}}}", "parameters": {"weight": 0.4}}],
        "tokenizer_source": "base",
    }  # fmt: skip
    ours, theirs = both({**models, "padded": padded}, recipe, tmp_path)
    mine, other = read_weights(ours), read_weights(theirs)
    for name, values in other.items():
        np.testing.assert_array_equal(mine[name], values, err_msg=name)
    assert json.loads((ours / "config.json").read_text())["vocab_size"] == len(mine[EMBEDDING])


def test_new_tokens_go_into_every_file_that_lists_them(
    models: dict[str, Path], tmp_path: Path
) -> None:
    base = shutil.copytree(models["base"], tmp_path / "base")
    start = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False,
             "single_word": False, "special": True}  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"1": start}}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "added_tokens.json").write_text(json.dumps({"<s>": 1}))
    recipe = {
        "merge_method": "task_arithmetic", "base_model": str(base), "tokenizer_source": "union",
        "models": [{"model": str(models["math"]), "parameters": {"weight": 0.4}}],
    }  # fmt: skip
    sigmerge.merge(recipe, tmp_path / "out")
    words = vocabulary(tmp_path / "out")
    new = set(words) - set(WORDS["base"])
    listed = json.loads((tmp_path / "out/added_tokens.json").read_text())
    assert listed == {token: words[token] for token in {"<s>", *new}} and "<|step|>" in new
    text = (tmp_path / "out/tokenizer_config.json").read_text()
    decoder = json.loads(text)["added_tokens_decoder"]
    assert {entry["content"]: int(key) for key, entry in decoder.items()} == listed
    assert decoder[str(words["<|step|>"])]["special"] and not decoder[str(words["sum"])]["special"]


@pytest.mark.parametrize("source", ["union", "base", "{coding}"])
def test_a_candidate_of_a_search_has_the_same_vocabulary(
    models: dict[str, Path], source: str
) -> None:
    rows = {
        "<|code|>": {"source": "{coding}", "force": True}, "both": {"source": CODE_ROW},
        "<|new|>": {"source": BY_ID}, "<|none|>": {"source": {"kind": "zero"}}, "sum": {},
    }  # fmt: skip
    text = json.dumps({
        "merge_method": "ties", "base_model": "{base}", "models": experts(weight=1),
        "tokenizer": {"source": source, "tokens": rows, "pad_to_multiple_of": 16},
    })  # fmt: skip
    for name, folder in models.items():
        text = text.replace("{" + name + "}", str(folder))
    recipe = load_recipe(json.loads(text))
    again = load_recipe({**json.loads(text), **tokenizer_keys(recipe)})
    assert again.vocabulary == recipe.vocabulary and again.tokenizer == recipe.tokenizer


def test_a_token_of_the_base_without_a_row_gets_one(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Old chat models: a <pad> behind the last row, in the tokenizer only."""
    words = {name: vocabulary(models[name]) for name in ("base", "math")}
    weights = read_weights(models["base"])
    rows = words["base"]["only-base"]  # the last token
    short = {n: v[:rows] if n in (EMBEDDING, HEAD) else v for n, v in weights.items()}
    folder = write_member(tmp_path / "short", short)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((models["base"] / file).read_bytes())
    recipe = {
        "merge_method": "linear", "base_model": str(folder), "dtype": "float32",
        "models": [{"model": str(m), "parameters": {"weight": 0.5}} for m in
                   (folder, models["math"])],
        "tokenizer_source": "base",
    }  # fmt: skip
    sigmerge.merge(recipe, tmp_path / "out")
    ours = read_weights(tmp_path / "out")[EMBEDDING]
    assert vocabulary(tmp_path / "out") == words["base"] and ours.shape == (rows + 1, 16)
    np.testing.assert_array_equal(ours[rows], np.zeros(16))  # no model has a row of it
    theirs = read_weights(models["math"])[EMBEDDING]
    both_have = np.float32(0.5) * (short[EMBEDDING][3] + theirs[words["math"]["w0"]])
    np.testing.assert_allclose(ours[words["base"]["w0"]], both_have, atol=1e-7)


def test_the_bias_of_a_head_is_moved_too(tmp_path: Path) -> None:
    found, bias, other_decoder = {}, "lm_head.bias", "speech.decoder.weight"
    for seed, name in enumerate(("math", "coding")):
        rows = len({*WORDS[name], *ADDED[name]})
        sizes = {EMBEDDING: (rows, 16), HEAD: (rows, 16), bias: (rows,), other_decoder: (5, 16)}
        found[name] = folder = write_member(
            tmp_path / name, draw({**shapes("phi"), **sizes}, seed), style="phi"
        )
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
        write_tokenizer(folder, WORDS[name], ADDED[name])
    recipe = {
        "merge_method": "slerp", "base_model": "{math}", "models": [{"model": "{coding}"}],
        "parameters": {"t": 0.3}, "tokenizer_source": "union", "dtype": "float32",
    }  # fmt: skip
    ours, theirs = both(found, recipe, tmp_path)
    words, known = vocabulary(ours), vocabulary(theirs)
    mine, other = read_weights(ours)[bias], read_weights(theirs)[bias]
    assert mine.shape == other.shape
    assert read_weights(ours)[other_decoder].shape == (5, 16)  # no rows of tokens
    for token, row in words.items():
        assert mine[row] == pytest.approx(other[known[token]], abs=3e-7), token


def test_the_size_of_a_vocabulary_inside_another_configuration() -> None:
    outer = {"text_config": {"vocab_size": 5}, "other": 1}
    assert with_size(outer, 9) == {"text_config": {"vocab_size": 9}, "other": 1}
    assert size_of(outer) == 5 and size_of({"vocab_size": 3, **outer}) == 3


def test_a_word_of_one_model_that_is_a_special_token_of_another(
    models: dict[str, Path], tmp_path: Path
) -> None:
    for name, words, added in (("a", ["x", "<|go|>"], []), ("b", ["x"], ["<|go|>"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"vocab_size": 2}')
        write_tokenizer(tmp_path / name, words, added)
    members = {"base": models["base"], "a": tmp_path / "a", "b": tmp_path / "b"}
    made = plan_vocabulary(VocabularyRequest(True, "base", {}), models["base"], members)
    assert made is not None
    entries = [entry for entry in made.added if entry["content"] == "<|go|>"]
    assert [entry["special"] for entry in entries] == [True]


def test_an_adapter_is_moved_too_and_verify_computes_all_of_it_again(
    models: dict[str, Path], tmp_path: Path
) -> None:
    weights = read_weights(models["math"])
    adapter = write_adapter(
        tmp_path / "adapter", models["math"], weights, embeddings=("embed_tokens",)
    )
    recipe = {
        "merge_method": "ties", "base_model": str(models["base"]), "parameters": {"density": 0.6},
        "models": [{"model": f"{models['math']}+{adapter}", "parameters": {"weight": 1}},
                   {"model": str(models["coding"]), "parameters": {"weight": 1}}],
        "tokenizer": {"source": "union", "tokens": {"sum": {"source": "adapter", "force": True}}},
    }  # fmt: skip
    for threads in (1, 3):
        sigmerge.merge(recipe, tmp_path / f"out-{threads}", threads=threads)
    one, three = (read_weights(tmp_path / f"out-{threads}") for threads in (1, 3))
    for name, values in one.items():
        np.testing.assert_array_equal(values, three[name])
    (report,) = sigmerge.verify(tmp_path / "out-1", deep=True, blocks=None)
    assert not report.findings and "recomputed" in report.checked


def test_rows_that_an_adapter_adds_are_not_lost(models: dict[str, Path], tmp_path: Path) -> None:
    """Its model's tokenizer does not know them: new rows would be made in their place."""
    weights = read_weights(models["math"])
    longer = {n: np.concatenate([weights[n], weights[n][:2] + 1]) for n in (EMBEDDING, HEAD)}
    adapter = write_adapter(
        tmp_path / "adapter", models["math"], weights, whole=longer,
        modules_to_save=["embed_tokens", "lm_head"],
    )  # fmt: skip
    recipe = {"merge_method": "linear", "tokenizer_source": "union", "models": [
        {"model": f"{models['math']}+{adapter}", "parameters": {"weight": 1}},
        {"model": str(models["coding"]), "parameters": {"weight": 1}}]}  # fmt: skip
    with pytest.raises(SigmergeError, match="brings an embedding of 29 rows, its model's has 27"):
        sigmerge.merge(recipe, tmp_path / "out")


@pytest.mark.parametrize(
    ("tokenizer", "told"),
    [
        ({"tokens": {"x": {"source": "{base}"}}}, "is none of the models"),
        ({"tokens": {"x": {"source": {"kind": "model_token"}}}}, "takes model, and one of"),
        ({"pad_to_multiple_of": -1}, "pad_to_multiple_of"),
        ({"tokens": {"x": {"source": {"kind": "one"}}}}, "'zero' or 'model_token'"),
        (
            {"tokens": {"x": {"source": {"kind": "model_token", "model": "math", "token": "?"}}}},
            "has no row for '?'",
        ),
    ],
)
def test_wrong_wishes(
    models: dict[str, Path], tmp_path: Path, tokenizer: dict[str, Any], told: str
) -> None:
    text = json.dumps({"merge_method": "linear", "models": experts(weight=1),
                       "tokenizer": tokenizer})  # fmt: skip
    for name, folder in models.items():
        text = text.replace("{" + name + "}", str(folder))
    with pytest.raises(SigmergeError, match=told.replace("?", r"\?")):
        sigmerge.merge(json.loads(text), tmp_path / "out")


def test_a_stack_of_different_vocabularies_needs_a_wish(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Its embedding would come from the first model, and its head from the last."""
    slices = [{"sources": [{"model": str(models[n]), "layer_range": [0, 2]}]}
              for n in ("math", "coding")]  # fmt: skip
    recipe = {"merge_method": "passthrough", "slices": slices}
    told = r"embed_tokens\.weight 27, lm_head\.weight 26, vocab_size 27\); say tokenizer_source"
    with pytest.raises(SigmergeError, match=told):
        sigmerge.merge(recipe, tmp_path / "out")
    sigmerge.merge({**recipe, "tokenizer_source": "base", "base_model": str(models["math"])},
                   tmp_path / "out")  # fmt: skip


def test_without_a_wish_the_error_says_what_to_do(models: dict[str, Path], tmp_path: Path) -> None:
    recipe = {"merge_method": "linear",
              "models": [{"model": str(models[n]), "parameters": {"weight": 1}}
                         for n in ("math", "coding")]}  # fmt: skip
    with pytest.raises(SigmergeError, match="tokenizer_source: union"):
        sigmerge.merge(recipe, tmp_path / "out")


SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
ENCODING = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}  # fmt: skip
SPEAKING = {
    "BertForMaskedLM": SMALL,
    "BertForSequenceClassification": SMALL,
    "RobertaForMaskedLM": SMALL,
    "ModernBertForMaskedLM": {**SMALL, "decoder_bias": True},
    "DistilBertForMaskedLM": {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 8},
    "BartForConditionalGeneration": ENCODING,
}


@pytest.mark.parametrize("kind", SPEAKING)
def test_a_model_says_the_same_with_another_tokenizer(tmp_path: Path, kind: str) -> None:
    """Heads and biases of masked and encoding models have a row a token, and positions none."""
    import torch
    import transformers

    made = getattr(transformers, kind)
    config = made.config_class(
        vocab_size=24, max_position_embeddings=16, pad_token_id=0, **SPEAKING[kind]
    )
    model, words = made(config).eval(), WORDS["base"]
    for values in model.state_dict().values():
        if values.is_floating_point():
            torch.nn.init.normal_(values, std=0.5)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model", words, [])
    other = [*words[:3], "new", *words[:2:-1]]
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "model/config.json", tmp_path / "other")
    write_tokenizer(tmp_path / "other", other, [])
    recipe = {
        "merge_method": "passthrough", "models": [{"model": str(tmp_path / "model")}],
        "tokenizer_source": str(tmp_path / "other"),
    }  # fmt: skip
    sigmerge.merge(recipe, tmp_path / "out")
    moved = made.from_pretrained(tmp_path / "out").eval()
    text = words[4:12]
    with torch.no_grad():
        said, again = (
            one(torch.tensor([[known.index(word) for word in text]])).logits
            for one, known in ((model, words), (moved, other))
        )
    if said.shape[-1] == len(words):
        again = again[..., [other.index(word) for word in words]]
    torch.testing.assert_close(again, said, rtol=0, atol=1e-5)
