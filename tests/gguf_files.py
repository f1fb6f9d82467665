"""A tiny GGUF file, by gguf's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, WIDTH, HIDDEN, HEADS, GROUPS = 2, 64, 96, 4, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokens() -> list[str]:
    """The 256 letters that stand for bytes, in the order of GPT-2's table."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [*map(chr, printable), *(chr(256 + place) for place in range(len(others)))]


TOKENS = [*SPECIAL, *byte_tokens(), "he", "ll", "hell", "Ġh", "ĠĠ"]
MERGES = ["h e", "l l", "he ll", "Ġ h", "Ġ Ġ"]


def write(
    file: Path,
    *,
    tied: bool = True,
    architecture: str = "llama",
    extra: dict[str, Any] | None = None,
    leave_out: str = "",
    scaling: str = "",
    fields: dict[str, float] | None = None,
) -> Path:
    """A tiny Llama with tensors of several types, by gguf's own writer."""
    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    for name, value in (fields or {}).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, (shape, kind) in shapes(kinds, tied).items():
        if name != leave_out:
            draw = np.random.default_rng(len(name) + shape[0]).normal(0, 0.3, shape)
            weight = draw.astype(np.float32) + (len(shape) == 1)
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def shapes(kinds: Any, tied: bool) -> dict[str, tuple[tuple[int, ...], Any]]:
    half = WIDTH // HEADS * GROUPS
    found = {"token_embd.weight": ((len(TOKENS), WIDTH), kinds.Q8_0)}
    found["output_norm.weight"] = ((WIDTH,), kinds.F32)
    if not tied:
        found["output.weight"] = ((len(TOKENS), WIDTH), kinds.F16)
    for layer in range(LAYERS):
        block = {
            "attn_norm": ((WIDTH,), kinds.F32),
            "attn_q": ((WIDTH, WIDTH), kinds.Q4_1),
            "attn_k": ((half, WIDTH), kinds.Q8_0),
            "attn_v": ((half, WIDTH), kinds.F16),
            "attn_output": ((WIDTH, WIDTH), kinds.Q4_1),
            "ffn_norm": ((WIDTH,), kinds.F32),
            "ffn_gate": ((HIDDEN, WIDTH), kinds.Q4_1),
            "ffn_up": ((HIDDEN, WIDTH), kinds.F16),
            "ffn_down": ((WIDTH, HIDDEN), kinds.Q4_1),
        }
        found |= {f"blk.{layer}.{name}.weight": value for name, value in block.items()}
    return found
