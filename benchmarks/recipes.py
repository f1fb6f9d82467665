"""The corpus of recipes through sigmerge and mergekit: which run, and how far apart they end.

    python -m benchmarks.recipes [--only slerp,ties] [--page docs/results/recipes.md]

`benchmarks/corpus` has one file a method, and one each for adapters, modules and tokenizers,
several documents in a file, in the style of what is found in model cards. Both tools get every
document unchanged, on the same tiny models. Where it asks for bfloat16 or float16, mergekit
computes in that type and sigmerge in float32; so the numbers are compared a second time with
`dtype: float32` in both. Methods that draw at random cannot agree value by value: there the size of
the merged task vector is compared. Rows of embeddings are compared by token.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tests.adapters import write_adapter
from tests.pools import HIDDEN, draw, read_weights, shapes, write_member

import sigmerge
from benchmarks.measure import versions
from sigmerge.checkpoints.companions import vocabulary
from sigmerge.errors import SigmergeError

CORPUS = Path(__file__).parent / "corpus"
MODELS = ("math", "code", "chat", "story")
ADAPTERS: dict[str, dict[str, Any]] = {
    "math-lora": {},
    "code-lora": {"modules": ("gate_proj", "up_proj", "down_proj"), "use_rslora": True, "rank": 8},
    "chat-lora": {"dora": True, "modules": ("q_proj", "o_proj")},
}
SHARED = [f"w{i}" for i in range(3, 40)]
WORDS = {
    "poet": (["<pad>", "<s>", "</s>", *SHARED, "moon", "sea"], ["<|im_start|>", "<|im_end|>"]),
    "clerk": (["<s>", "</s>", "<pad>", "ledger", *SHARED[::-2], "sea"], ["<|invoice|>"]),
}
"""Models with tokens of their own: words, and tokens that were added."""
ENCODING = ("translator", "summarizer")
"""Models with an encoder and a decoder."""
TOKEN_ROWS = ("model.embed_tokens.weight", "lm_head.weight")
LAYERS = 8
ULPS = 16
"""Units in the last place of a tensor's largest value by which two float32 results may differ."""
SIZE = 0.02
"""Share by which the sizes of two task vectors may differ where entries are drawn at random."""
TURNED = 1e-3
"""Share of values that may fall on the other side of arcee_fusion's threshold."""


@dataclass(frozen=True)
class Case:
    method: str
    name: str
    recipe: dict[str, Any]

    @property
    def moves_rows(self) -> bool:
        return "tokenizer" in self.recipe or "tokenizer_source" in self.recipe

    @property
    def random(self) -> bool:
        """Whether entries are drawn: mergekit's draws are not ours."""
        if not self.method.startswith(("dare", "della")):
            return False
        given = [self.recipe.get("parameters") or {}]
        given += [model.get("parameters") or {} for model in self.recipe["models"]]
        return any(some.get("density", 1) != 1 for some in given)


@dataclass(frozen=True)
class Outcome:
    """What became of a recipe; errors are empty where it ran."""

    case: Case
    theirs: str
    ours: str
    ulps: float = 0.0
    turned: float = 0.0
    size: float = 0.0

    @property
    def agrees(self) -> bool:
        if self.theirs or self.ours:
            return bool(self.theirs) and bool(self.ours)
        if self.case.random:
            return self.size <= SIZE
        if self.case.method == "arcee_fusion":
            return self.turned <= TURNED
        return self.ulps <= ULPS


def cases() -> Iterator[Case]:
    for file in sorted(CORPUS.glob("*.yaml")):
        for recipe in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            yield Case(recipe["merge_method"], recipe["name"], recipe)


def make_models(folder: Path) -> None:
    """A base and its experts, with tokenizers.

    In float32, where magnitudes do not tie: mergekit sorts equal ones in no fixed order.
    """
    base = draw(shapes("llama", LAYERS), 0)
    write_member(folder / "base", base, layers=LAYERS, tokenizer=True)
    for i, name in enumerate(MODELS):
        moved = draw(shapes("llama", LAYERS), 100 + i, 0.02)
        weights = {tensor: values + moved[tensor] for tensor, values in base.items()}
        write_member(folder / name, weights, layers=LAYERS, tokenizer=True)
    for i, (name, kind) in enumerate(ADAPTERS.items()):
        write_adapter(folder / name, folder / "base", base, seed=i, **kind)
    for i, (name, (words, added)) in enumerate(WORDS.items()):
        named = shapes("llama", LAYERS)
        named |= dict.fromkeys(TOKEN_ROWS, (len(words) + len(added), HIDDEN))
        place = write_member(folder / name, draw(named, 200 + i), layers=LAYERS)
        config = json.loads((place / "config.json").read_text())
        config["vocab_size"] = len(words) + len(added)
        (place / "config.json").write_text(json.dumps(config))
        _write_tokenizer(place, words, added)
    for i, name in enumerate(ENCODING):
        _write_encoding(folder / name, seed=300 + i)


def _write_encoding(folder: Path, seed: int) -> None:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=3, num_heads=2,
                      num_decoder_layers=4, feed_forward_proj="gated-gelu")  # fmt: skip
    torch.manual_seed(seed)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    words, _ = WORDS["poet"]
    _write_tokenizer(folder, words[: config.vocab_size], [])


def _write_tokenizer(folder: Path, words: list[str], added: list[str]) -> None:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel

    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.add_special_tokens([AddedToken(token, special=True) for token in added])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def run_ours(recipe: dict[str, Any], out: Path) -> str:
    try:
        sigmerge.merge(recipe, out, threads=1, durable=False)
    except SigmergeError as error:
        return str(error)
    return ""


def run_theirs(recipe: dict[str, Any], out: Path) -> str:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    cache = str(out.with_name(f"{out.name}-adapters"))
    options = MergeOptions(
        write_model_card=False, quiet=True, random_seed=0, lora_merge_cache=cache
    )
    try:
        run_merge(MergeConfiguration.model_validate(recipe), str(out), options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def outcome(case: Case, work: Path) -> Outcome:
    """Both tools on one recipe, as it stands and in float32; models lie in the working folder."""
    theirs, ours = run_theirs(case.recipe, work / "theirs"), run_ours(case.recipe, work / "ours")
    if theirs or ours:
        return Outcome(case, theirs, ours)
    wide = {**case.recipe, "dtype": "float32", "out_dtype": "float32"}
    run_theirs(wide, work / "theirs32")
    run_ours(wide, work / "ours32")
    weights = [read_weights(work / name) for name in ("ours32", "theirs32")]
    if case.moves_rows:
        weights = [
            _by_token(one, work / name)
            for one, name in zip(weights, ("ours32", "theirs32"), strict=True)
        ]
    return _compared(case, *weights)


def _by_token(weights: Any, folder: Path) -> Any:
    """The weights with embedding rows in the order of their tokens, and padding last."""
    words = vocabulary(folder)
    assert isinstance(words, dict)
    order = [words[token] for token in sorted(words)]
    moved = {
        name: np.concatenate([weights[name][order], weights[name][len(order) :]])
        for name in TOKEN_ROWS
    }
    return {**weights, **moved}


def _compared(case: Case, ours: Any, theirs: Any) -> Outcome:
    if {n: v.shape for n, v in ours.items()} != {n: v.shape for n, v in theirs.items()}:
        return Outcome(case, "", "", ulps=float("inf"), turned=1.0, size=float("inf"))
    apart = {n: np.abs(ours[n].astype(np.float64) - v) / np.spacing(np.abs(v).max())
             for n, v in theirs.items()}  # fmt: skip
    worst = max(float(some.max()) for some in apart.values())
    turned = sum(int((some > ULPS).sum()) for some in apart.values())
    total = sum(some.size for some in apart.values())
    base = read_weights(Path("base"))
    sizes = [
        sum(
            float(np.abs(merged[n] - v).sum())
            for n, v in base.items()
            if n in merged and merged[n].shape == v.shape
        )
        for merged in (ours, theirs)
    ]
    size = abs(sizes[0] / sizes[1] - 1) if sizes[1] else 0.0
    return Outcome(case, "", "", worst, turned / total, size)


def run_all(wanted: list[Case]) -> list[Outcome]:
    found = []
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        make_models(Path(folder))
        for i, case in enumerate(wanted):
            found.append(outcome(case, Path(folder) / f"out-{i}"))
            told = found[-1].ours or found[-1].theirs or f"{found[-1].ulps:.1f} ulp"
            verdict = "same " if found[-1].agrees else "OTHER"
            print(verdict, case.method, "|", case.name, "|", told, flush=True)
    return found


def page(found: list[Outcome], command: str) -> str:
    """The table of docs/results/recipes.md."""
    ran = [one for one in found if not one.theirs]
    both = [one for one in ran if not one.ours]
    same = [one for one in both if one.agrees]
    lines = [
        "# Recipes beside mergekit",
        "",
        f"{len(found)} recipes of `benchmarks/corpus`, written for this "
        "project in the style of model cards, went unchanged through mergekit 0.1.5 and sigmerge "
        f"on tiny local models. mergekit runs {len(ran)} of them, sigmerge {len(both)} of those, "
        f"and {len(same)} agree:",
        "",
        f"- value by value within {ULPS} units in the last place of a tensor's largest value, both "
        "computing in float32;",
        f"- where entries are drawn at random, in the ℓ1 size of the merged task vector, to "
        f"{SIZE:.0%};",
        f"- for arcee_fusion in all but {TURNED:.1%} of the values: mergekit rounds divergences of "
        "rows to float32, and a score at the threshold can turn over.",
        "",
        "Among them are adapters (LoRA, rsLoRA, DoRA), encoder-decoders whose modules are merged "
        "one by one, and models with other vocabularies, whose embedding rows are compared by "
        "token.",
        "",
        "The models are stored in float32, where magnitudes do not tie. Differences of bfloat16 "
        "weights tie often; sigmerge keeps the lowest index, mergekit what its sort leaves first.",
        "",
        "| method | recipes | mergekit runs | sigmerge runs | agree | largest difference |",
        "|---|---|---|---|---|---|",
    ]
    for method in sorted({one.case.method for one in found}):
        mine = [one for one in found if one.case.method == method]
        fine = [one for one in mine if not one.ours and not one.theirs]
        exact = [one.ulps for one in fine if not one.case.random]
        told = f"{max(exact):.1f} ulp" if exact else "–"
        drawn = [one.size for one in fine if one.case.random]
        if drawn:
            told += f"; drawn: {max(drawn):.1%}"
        if method == "arcee_fusion":
            told = f"{max(one.turned for one in fine):.2%} of the values"
        lines.append(
            f"| `{method}` | {len(mine)} | {sum(not o.theirs for o in mine)} | "
            f"{sum(not o.ours for o in mine)} | {sum(o.agrees for o in mine)} | {told} |"
        )
    lines += ["", f"Command: `{command}`. {versions('mergekit')}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="methods, separated by commas")
    parser.add_argument("--page", type=Path, help="where the table is written")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    only = [name for name in given.only.split(",") if name]
    place = given.page.absolute() if given.page else None
    found = run_all([case for case in cases() if not only or case.method in only])
    if place is not None:
        place.write_text(page(found, "python -m benchmarks.recipes --page docs/results/recipes.md"))
    apart = [one for one in found if not one.agrees]
    print(f"{len(found)} recipes, {len(found) - len(apart)} agree")
    sys.exit(bool(apart))


if __name__ == "__main__":
    main()
