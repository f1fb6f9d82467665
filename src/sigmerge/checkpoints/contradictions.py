"""Contradictions between a configuration and the names and shapes of the weights.

Layers, vocabulary, widths, heads, experts, biases and the head of tokens. Some architectures have
other sizes than their configuration names; so what is found here is suspected, and transformers
knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.kinds import Config
from sigmerge.checkpoints.modules import DEPTH_KEYS

_DEPTH = f"({'|'.join(DEPTH_KEYS)}|\\w+_layers|depth)$"
_VOCABULARY = "(\\w+_)?vocab_size$"
_WIDTH = "(n_embd|d_model|dim|emb_dim|d_embed|(\\w+_)?(hidden|embedding|embed|proj)_(size|dim))$"
_INNER = "(n_inner|d_ff|\\w*(intermediate|ffn|inner|mlp|ff)\\w*)$"
_EXPERTS = "(\\w+_)?experts$"
_HEADS, _KEY_HEADS = "num_attention_heads", "num_key_value_heads"
_BIASED = {
    "attention_bias": ("self_attn.q_proj", "attention.q_proj"),
    "mlp_bias": ("mlp.down_proj",),
    "qkv_bias": ("self_attn.q_proj",),
}
_NUMBERED = re.compile(r"\.experts\.(\d+)\.")


def contradictions(checkpoint: Checkpoint, config: Config) -> list[str]:
    """One line for each contradiction of a checkpoint's configuration and weights."""
    configs = list(_within(config))
    found = [*_sizes(checkpoint, configs), *_attention(checkpoint, configs)]
    found += _biases(checkpoint, configs)
    tied = [one["tie_word_embeddings"] for one in configs if "tie_word_embeddings" in one]
    speaks = checkpoint.embedding is not None and not checkpoint.headless
    if speaks and checkpoint.head is None and tied and not any(tied):
        found.append("tie_word_embeddings is false, and no output head is stored")
    return found


def _within(config: Config) -> Iterator[Config]:
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _within(value)


def _values(configs: Iterable[Config], pattern: str) -> list[tuple[str, int]]:
    """Whole numbers of the configurations under keys of a pattern."""
    return [
        (key, value)
        for config in configs
        for key, value in config.items()
        if re.match(pattern, key) and isinstance(value, int) and not isinstance(value, bool)
    ]


def _sizes(checkpoint: Checkpoint, configs: list[Config]) -> Iterator[str]:
    stack, tensors = checkpoint.stack, checkpoint.tensors
    if stack.depth:
        further = sum(count for _, count in _values(configs, "num_nextn_predict_layers$"))
        depths = _values(configs, _DEPTH)
        if stack.depth - further not in [depth for _, depth in depths]:
            yield from _unlike(depths, stack.depth, "the weights have", "layers")
        down = next((n for n in _first_layer(checkpoint) if n.endswith(".down_proj.weight")), None)
        if down is not None and len(tensors[down].shape) == 2:
            inner = _values(configs, _INNER)
            yield from _unlike(inner, tensors[down].shape[1], f"{down} has", "columns")
    if checkpoint.embedding is not None:
        (rows, width), has = tensors[checkpoint.embedding].shape[:2], f"{checkpoint.embedding} has"
        yield from _unlike(_values(configs, _VOCABULARY), rows, has, "rows")
        yield from _unlike(_values(configs, _WIDTH), width, has, "columns")
    numbers = [int(found[1]) + 1 for name in tensors if (found := _NUMBERED.search(name))]
    if numbers:
        yield from _unlike(_values(configs, _EXPERTS), max(numbers), "the weights have", "experts")


def _unlike(said: list[tuple[str, int]], stored: int, has: str, what: str) -> Iterator[str]:
    """That none of the numbers that are said is the one that is stored."""
    if said and stored not in [value for _, value in said]:
        yield f"{', '.join(f'{key} {value}' for key, value in said)}; {has} {stored} {what}"


def _first_layer(checkpoint: Checkpoint) -> list[str]:
    return [name for name in sorted(checkpoint.tensors) if checkpoint.stack.block_of(name) == 0]


def _attention(checkpoint: Checkpoint, configs: list[Config]) -> Iterator[str]:
    """Rows of the projections, and the heads with their size."""
    for part, key in (("q_proj", _HEADS), ("k_proj", _KEY_HEADS)):
        ending = f".self_attn.{part}.weight"
        name = next((n for n in _first_layer(checkpoint) if n.endswith(ending)), None)
        sizes = {}
        for config in configs:
            heads, width = config.get(_HEADS), config.get("hidden_size")
            if isinstance(heads, int) and isinstance(width, int) and heads > 0:
                each = config.get("head_dim") or width // heads
                count = config.get(key) or heads
                if isinstance(each, int) and isinstance(count, int):
                    sizes[f"{key} {count} of {each}"] = count * each
        rows = checkpoint.tensors[name].shape[0] if name else 0
        if name and sizes and rows not in sizes.values():
            yield f"{', '.join(sizes)}; {name} has {rows} rows"


def _biases(checkpoint: Checkpoint, configs: list[Config]) -> Iterator[str]:
    for key, modules in _BIASED.items():
        said = {config[key] for config in configs if isinstance(config.get(key), bool)}
        for module in modules:
            stored = {
                kind: any(n.endswith(f".{module}.{kind}") for n in _first_layer(checkpoint))
                for kind in ("weight", "bias")
            }
            if stored["weight"] and said and stored["bias"] not in said:
                has = "a" if stored["bias"] else "no"
                yield f"{key} is {str(not stored['bias']).lower()}; {module} has {has} bias"
