"""Tiny Hugging Face pools on disk, under the tensor names of real model families."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

HIDDEN, INNER, VOCAB, HEADS, POSITIONS = 16, 32, 48, 2, 64
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
CONFIG_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
EXPERTS = ("math", "coding", "safety", "chat", "law")

Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, np.ndarray[Any, Any]]


def _llama(bias: Sequence[str] = (), norms: Sequence[str] = ()) -> Shapes:
    shapes: Shapes = {f"self_attn.{p}_proj.weight": (HIDDEN, HIDDEN) for p in ("q", "k", "v", "o")}
    shapes |= {f"self_attn.{p}_proj.bias": (HIDDEN,) for p in bias}
    shapes |= {f"mlp.{p}_proj.weight": (INNER, HIDDEN) for p in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (HIDDEN, INNER)
    names = ("input_layernorm", "post_attention_layernorm", *norms)
    return shapes | {f"{name}.weight": (HIDDEN,) for name in names}


def _linear(names: Mapping[str, tuple[int, int]]) -> Shapes:
    """Weight and bias of torch linear layers, (out, in)."""
    shapes: Shapes = {}
    for name, shape in names.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def _norm(*names: str) -> Shapes:
    return {f"{name}.{part}": (HIDDEN,) for name in names for part in ("weight", "bias")}


@dataclass(frozen=True)
class Style:
    """`outside` lists tensors beside the stack except the head; `inside` those of one block."""

    architecture: str
    model_type: str
    prefix: str
    outside: Shapes
    inside: Shapes
    head: str = "lm_head.weight"
    tied: bool = False
    config: Mapping[str, Any] | None = None


_LLAMA_CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": POSITIONS,
}
_LLAMA_OUTSIDE: Shapes = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
}
_MOE = {
    f"block_sparse_moe.experts.{e}.w{i}.weight": (HIDDEN, INNER) if i == 2 else (INNER, HIDDEN)
    for e in range(3)
    for i in (1, 2, 3)
}
STYLES = {
    "llama": Style(
        "LlamaForCausalLM", "llama", "model.layers.", _LLAMA_OUTSIDE, _llama(), config=_LLAMA_CONFIG
    ),
    "mistral": Style(
        "MistralForCausalLM",
        "mistral",
        "model.layers.",
        _LLAMA_OUTSIDE,
        _llama(),
        config=_LLAMA_CONFIG,
    ),
    "qwen": Style(
        "Qwen2ForCausalLM",
        "qwen2",
        "model.layers.",
        _LLAMA_OUTSIDE,
        _llama(bias="qkv"),
        config=_LLAMA_CONFIG,
    ),
    "gemma": Style(
        "Gemma2ForCausalLM",
        "gemma2",
        "model.layers.",
        _LLAMA_OUTSIDE,
        _llama(norms=("pre_feedforward_layernorm", "post_feedforward_layernorm")),
        tied=True,
        config={**_LLAMA_CONFIG, "query_pre_attn_scalar": HIDDEN // HEADS, "sliding_window": 32},
    ),
    "gpt2": Style(
        "GPT2LMHeadModel",
        "gpt2",
        "transformer.h.",
        {
            "transformer.wte.weight": (VOCAB, HIDDEN),
            "transformer.wpe.weight": (POSITIONS, HIDDEN),
            **_norm("transformer.ln_f"),
        },
        {
            **_norm("ln_1", "ln_2"),
            "attn.c_attn.weight": (HIDDEN, 3 * HIDDEN),
            "attn.c_attn.bias": (3 * HIDDEN,),
            "attn.c_proj.weight": (HIDDEN, HIDDEN),
            "attn.c_proj.bias": (HIDDEN,),
            "mlp.c_fc.weight": (HIDDEN, 4 * HIDDEN),
            "mlp.c_fc.bias": (4 * HIDDEN,),
            "mlp.c_proj.weight": (4 * HIDDEN, HIDDEN),
            "mlp.c_proj.bias": (HIDDEN,),
        },
        tied=True,
        config={"n_embd": HIDDEN, "n_head": HEADS, "n_positions": POSITIONS},
    ),
    "gpt_neox": Style(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        "gpt_neox.layers.",
        {
            "gpt_neox.embed_in.weight": (VOCAB, HIDDEN),
            **_norm("gpt_neox.final_layer_norm"),
        },
        {
            **_norm("input_layernorm", "post_attention_layernorm"),
            **_linear(
                {
                    "attention.query_key_value": (3 * HIDDEN, HIDDEN),
                    "attention.dense": (HIDDEN, HIDDEN),
                    "mlp.dense_h_to_4h": (INNER, HIDDEN),
                    "mlp.dense_4h_to_h": (HIDDEN, INNER),
                }
            ),
        },
        head="embed_out.weight",
        config={
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_attention_heads": HEADS,
            "max_position_embeddings": POSITIONS,
        },
    ),
    "opt": Style(
        "OPTForCausalLM",
        "opt",
        "model.decoder.layers.",
        {
            "model.decoder.embed_tokens.weight": (VOCAB, HIDDEN),
            "model.decoder.embed_positions.weight": (POSITIONS + 2, HIDDEN),
            **_norm("model.decoder.final_layer_norm"),
        },
        {
            **_norm("self_attn_layer_norm", "final_layer_norm"),
            **_linear({f"self_attn.{p}_proj": (HIDDEN, HIDDEN) for p in ("q", "k", "v", "out")}),
            **_linear({"fc1": (INNER, HIDDEN), "fc2": (HIDDEN, INNER)}),
        },
        tied=True,
        config={
            "hidden_size": HIDDEN,
            "ffn_dim": INNER,
            "num_attention_heads": HEADS,
            "max_position_embeddings": POSITIONS,
            "word_embed_proj_dim": HIDDEN,
        },
    ),
    "phi": Style(
        "PhiForCausalLM",
        "phi",
        "model.layers.",
        {
            "model.embed_tokens.weight": (VOCAB, HIDDEN),
            **_norm("model.final_layernorm"),
            "lm_head.bias": (VOCAB,),
        },
        {
            **_norm("input_layernorm"),
            **_linear({f"self_attn.{p}_proj": (HIDDEN, HIDDEN) for p in ("q", "k", "v")}),
            **_linear({"self_attn.dense": (HIDDEN, HIDDEN)}),
            **_linear({"mlp.fc1": (INNER, HIDDEN), "mlp.fc2": (HIDDEN, INNER)}),
        },
        config={k: v for k, v in _LLAMA_CONFIG.items() if k != "head_dim"},
    ),
    "moe": Style(
        "MixtralForCausalLM",
        "mixtral",
        "model.layers.",
        _LLAMA_OUTSIDE,
        {
            **{n: s for n, s in _llama().items() if "mlp" not in n},
            "block_sparse_moe.gate.weight": (3, HIDDEN),
            **_MOE,
        },
        config={**_LLAMA_CONFIG, "num_local_experts": 3},
    ),
}


def shapes(style: str = "llama", layers: int = 2, tied: bool | None = None) -> Shapes:
    family = STYLES[style]
    named = dict(family.outside)
    for i in range(layers):
        named |= {f"{family.prefix}{i}.{name}": shape for name, shape in family.inside.items()}
    if not (family.tied if tied is None else tied):
        named[family.head] = (VOCAB, HIDDEN)
    return named


def config(style: str, layers: int, dtype: str, tied: bool | None = None) -> dict[str, Any]:
    family = STYLES[style]
    depth = "n_layer" if style == "gpt2" else "num_hidden_layers"
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": VOCAB,
        depth: layers,
        "tie_word_embeddings": family.tied if tied is None else tied,
        "torch_dtype": CONFIG_NAMES[dtype],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **(family.config or {}),
    }


def write_weights(
    folder: Path, weights: Weights, dtype: str = "f32", shards: int = 1, order: int = 0
) -> None:
    """Weights in one file or spread over several, tensors in an order drawn from `order`."""
    names = sorted(weights)
    np.random.default_rng(order).shuffle(names)
    tensors = {n: torch.tensor(weights[n]).to(DTYPES[dtype]).contiguous() for n in names}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: tensors[n] for n in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path) -> None:
    """A real (word-level) fast tokenizer, with a chat template in a file of its own."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    Tokenizer(WordLevel(words, unk_token="<pad>")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def draw(named: Shapes, seed: int, scale: float = 0.05) -> Weights:
    rng = np.random.default_rng(seed)
    return {n: (scale * rng.standard_normal(s)).astype(np.float32) for n, s in named.items()}


def write_member(
    folder: Path,
    weights: Weights,
    style: str = "llama",
    layers: int = 2,
    dtype: str = "f32",
    shards: int = 1,
    order: int = 0,
    tied: bool | None = None,
    tokenizer: bool = False,
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(style, layers, dtype, tied)))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    write_weights(folder, weights, dtype, shards, order)
    if tokenizer:
        write_tokenizer(folder)
    return folder


@dataclass(frozen=True)
class PoolOnDisk:
    root: Path
    reference: Path
    experts: dict[str, Path]

    def recipe(
        self,
        method: str,
        parameters: Mapping[str, Any] | None = None,
        weight: Sequence[Any] = (0.5, 0.25, 0.75, 0.375, 0.625),
        each: Mapping[str, Sequence[Any]] | None = None,
        **top: Any,
    ) -> dict[str, Any]:
        """A recipe for this pool; `each` gives further per-model parameters."""
        models: list[dict[str, Any]] = []
        for i, folder in enumerate(self.experts.values()):
            own: dict[str, Any] = {"weight": weight[i]}
            own |= {name: values[i] for name, values in (each or {}).items()}
            models.append({"model": str(folder), "parameters": own})
        recipe = {"merge_method": method, "base_model": str(self.reference), "models": models}
        return recipe | ({"parameters": dict(parameters)} if parameters else {}) | top

    def write(self, content: Mapping[str, Any], name: str = "recipe.yaml") -> Path:
        file = self.root / name
        file.write_text(yaml.safe_dump(dict(content), sort_keys=False))
        return file


def make_pool(
    root: Path,
    experts: int = 3,
    style: str = "llama",
    layers: int = 2,
    dtype: str = "f32",
    shards: Sequence[int] | int = 1,
    tied: Sequence[bool | None] | bool | None = None,
    seed: int = 0,
    spread: float = 0.02,
    tokenizer: bool = False,
) -> PoolOnDisk:
    """A reference and its experts. `shards` and `tied` may be given per member, reference first."""
    split = [shards] * (experts + 1) if isinstance(shards, int) else list(shards)
    ties = [tied] * (experts + 1) if tied is None or isinstance(tied, bool) else list(tied)
    root.mkdir(parents=True, exist_ok=True)

    def member(name: str, i: int, weights: Weights) -> Path:
        wanted = shapes(style, layers, ties[i])
        chosen = {n: weights[n] for n in wanted}
        return write_member(
            root / name, chosen, style, layers, dtype, split[i], i, ties[i], tokenizer
        )

    everything = shapes(style, layers, tied=False)
    base = draw(everything, seed)
    tuned = {}
    for i, name in enumerate(EXPERTS[:experts]):
        moved = draw(everything, seed + 100 + i, spread)
        weights = {n: base[n] + moved[n] for n in base}
        tuned[name] = member(name, i + 1, weights)
    return PoolOnDisk(root, member("reference", 0, base), tuned)


def read_weights(folder: Path) -> Weights:
    """All tensors of a folder as float32, through the safetensors library."""
    found: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                found[name] = opened.get_tensor(name).to(torch.float32).numpy()
    return found


def weight_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of an output that must not depend on how the run was done."""
    records = ("provenance.json", "report.html")
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in records
    }


def few_facts(folder: Path, each: int = 4, domains: Sequence[str] = ("math", "coding")) -> Path:
    """A suite of so many facts of the embedded pool for each of its domains."""
    from sigmerge.nano.files import load_items

    marks = {}
    for domain in domains:
        facts = load_items("calibration", domain)[: 5 * each]  # a fifth calibrates
        lines = [json.dumps({"prompt": fact.prompt, "answer": fact.answer}) for fact in facts]
        (folder / f"{domain}.jsonl").write_text("\n".join(lines))
        marks[domain] = {
            f"{domain}-facts": {
                "harness": "jsonl",
                "files": [f"{domain}.jsonl"],
                "max_new_tokens": 6,
            }
        }
    suite = {"name": "few", "calibration_items": None, "domains": marks}
    (folder / "few.yaml").write_text(yaml.safe_dump(suite))
    return folder / "few.yaml"


def few_scores(checkpoint: Path, split: str, pool: Path) -> dict[str, float]:
    """Domain scores of a nano checkpoint on twenty items each: what the miniature pool logs."""
    from sigmerge.evaluation.how import How
    from sigmerge.evaluation.run import nano_scores

    return nano_scores(checkpoint, split, pool, How(limit=20))
