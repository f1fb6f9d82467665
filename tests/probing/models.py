"""Tiny random experts of several families on disk, with a word tokenizer and exemplars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [f"w{i}" for i in range(20)]
SHAPE: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "gemma2": lambda: transformers.Gemma2Config(**SHAPE, head_dim=8, sliding_window=4),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=8),
    "olmo2": lambda: transformers.Olmo2Config(**SHAPE),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **{n: v for n, v in SHAPE.items() if n != "num_key_value_heads"}
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=24,
        n_embd=16,
        n_layer=3,
        n_head=2,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=1,
    ),
}
MIXTURES: dict[str, Any] = {
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SHAPE, head_dim=8, num_local_experts=3, num_experts_per_tok=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=3),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12
    ),
}
"""Experts in one tensor of three dimensions; others' are stored apart and joined on loading."""


def write_tokenizer(folder: Path, words: list[str] = WORDS) -> None:
    vocabulary = {"<unk>": 0, "<eos>": 1, "<pad>": 2, **{w: i + 3 for i, w in enumerate(words)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_expert(
    folder: Path, family: str = "llama", seed: int = 0, near: Path | None = None
) -> None:
    """A random model, or one near another's weights."""
    if near is None:
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config({**CONFIGS, **MIXTURES}[family]())
        spread = 0.3  # defaults are so small that blocks hardly act
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(near, dtype=torch.float32)
        torch.manual_seed(seed)
        spread = 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_exemplars(file: Path, seed: int, count: int = 6, responses: bool = True) -> Path:
    generator = torch.Generator().manual_seed(seed)

    def words(least: int, most: int) -> str:
        length = int(torch.randint(least, most, (1,), generator=generator))
        return " ".join(WORDS[int(i)] for i in torch.randint(0, 20, (length,), generator=generator))

    rows = []
    for _ in range(count):
        row = {"prompt": words(1, 9)}
        if responses:
            row["response"] = words(1, 4)
        rows.append(json.dumps(row))
    file.write_text("\n".join(rows) + "\n")
    return file


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
