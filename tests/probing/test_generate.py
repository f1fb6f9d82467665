"""Samples of a model: drawn with its probabilities, and the same in a batch of any size."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sigmerge.errors import PoolError
from sigmerge.probing.generate import HfModel, Sampling
from tests.evaluation.tiny import write_tiny

PROMPTS = ["def f(x):", "a", "a somewhat longer prompt than the others", "b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny")


def test_samples_do_not_depend_on_their_neighbours(folder: Path) -> None:
    sampling = Sampling(max_length=48, temperature=0.8, top_p=0.95, samples=3, stop=("e",))
    together, used = HfModel(folder, "float32", 64).generate(PROMPTS, sampling)
    alone, more = HfModel(folder, "float32", 1).generate(PROMPTS, sampling)
    assert together == alone and (used.calls, more.calls) == (1, 4)
    assert (used.prompt_tokens, used.generated_tokens) == (
        more.prompt_tokens,
        more.generated_tokens,
    )
    assert any(len(set(answers)) > 1 for answers in together)
    assert not any("e" in text for answers in together for text in answers)


def test_samples_do_not_depend_on_how_the_model_generates_by_itself(
    folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    config = GenerationConfig.from_pretrained(folder).to_dict()
    config |= {"num_beams": 3, "num_return_sequences": 2, "do_sample": True, "top_k": 5}
    (own / "generation_config.json").write_text(json.dumps(config))
    sampling = Sampling(8, temperature=0.8, samples=2)
    found = [HfModel(some, "float32", 64).generate(PROMPTS, sampling)[0] for some in (folder, own)]
    assert found[0] == found[1]
    greedy, _ = HfModel(own, "float32", 64).generate(PROMPTS, Sampling(8))
    assert [len(answers) for answers in greedy] == [1] * len(PROMPTS)


def test_a_length_counts_the_prompt_and_no_padding(folder: Path) -> None:
    model = HfModel(folder, "float32", 64)
    _, used = model.generate(PROMPTS, Sampling(max_length=44, temperature=1e-3))
    lengths = [len(prompt) for prompt in PROMPTS]
    assert used.prompt_tokens == sum(lengths)
    # The tiny model does not end an answer here.
    assert used.generated_tokens == sum(44 - length for length in lengths)


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_samples_have_the_model_s_probabilities(folder: Path, top_p: float) -> None:
    count, warmth = 4000, 0.7
    sampling = Sampling(1, temperature=warmth, top_p=top_p, samples=count)
    [texts], _ = HfModel(folder, "float32", count).generate(["def f("], sampling)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(**tokenizer("def f(", return_tensors="pt")).logits[0, -1].double().numpy()
    odds = np.exp((logits - logits.max()) / warmth)
    odds /= odds.sum()
    order = np.argsort(-odds)
    kept = order[: 1 + int((np.cumsum(odds[order]) < top_p).sum())] if top_p < 1 else order
    wanted = np.zeros_like(odds)
    wanted[kept] = odds[kept] / odds[kept].sum()
    said: Counter[str] = Counter()
    for token, part in enumerate(wanted):
        said[tokenizer.decode([token], skip_special_tokens=True)] += float(part)
    found = Counter(texts)
    assert set(found) <= {text for text, part in said.items() if part > 0}
    for text, part in said.items():  # five standard errors
        assert abs(found[text] / count - part) <= 5 * np.sqrt(part * (1 - part) / count) + 1e-9


def test_a_template_that_raises_and_a_tokenizer_without_an_end_name_their_folder(
    folder: Path, tmp_path: Path
) -> None:
    """Both are a stranger's, and no fault of ours."""
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    (own / "chat_template.jinja").write_text("{{ messages[0]['content'] + 1 }}")
    with pytest.raises(PoolError, match=rf"{own}: its chat template cannot be applied"):
        HfModel(own, "float32", 1).chat("hello")
    file = own / "tokenizer_config.json"
    said = json.loads(file.read_text())
    kept = {key: value for key, value in said.items() if key not in ("eos_token", "pad_token")}
    file.write_text(json.dumps(kept))
    (own / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(PoolError, match=rf"{own}: its tokenizer has no token to pad with"):
        HfModel(own, "float32", 1).generate(PROMPTS[:1], Sampling(8))
