"""The vLLM backend, where vLLM and a GPU are there: the same answers and counts as transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sigmerge.nano.files import POOL, load_items
from sigmerge.probing.generate import HfModel, Sampling, VllmModel

pytest.importorskip("vllm", reason="vLLM is not installed; pip install 'sigmerge-llm[vllm]'")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM needs a GPU")


def test_greedy_answers_and_counts_are_those_of_transformers(tmp_path: Path):
    prompts = [fact.prompt for fact in load_items("evaluation", "math")[:16]]
    found, cost = VllmModel(POOL / "math", "float32", 0.3).generate(prompts, Sampling(4))
    expected, paid = HfModel(POOL / "math", "float32", 4).generate(prompts, Sampling(4))
    assert found == expected
    assert cost.prompt_tokens == paid.prompt_tokens
    assert cost.generated_tokens == paid.generated_tokens
