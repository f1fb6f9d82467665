"""A checkpoint folder from a GGUF file of the Llama architecture.

    sigmerge pool gguf model.gguf reference/

The weights are dequantised in float32 and rounded once. llama.cpp stores the rows of the query and
key projections in another order, which is undone. Without a head of its own in the file the head
stays tied to the embedding. Tokenizer and chat template come from the file's metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.publishing import (
    check_target,
    only_target,
    publish,
    real_target,
    writing,
)
from sigmerge.checkpoints.writer import saved
from sigmerge.errors import MissingExtra, PoolError, RecipeError, SigmergeError
from sigmerge.files.digests import prove
from sigmerge.files.documents import read_json_object
from sigmerge.files.identity import identify, unchanged
from sigmerge.files.safe_open import open_regular, remove
from sigmerge.probing.loading import quiet

ARCHITECTURES = ("llama",)
STORED_TYPES = ("bfloat16", "float32")
_MAGIC = b"GGUF"
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SINGLE_DIGITS = ("smollm",)
"""Tokenizers that take every digit apart before they merge, by `tokenizer.ggml.pre`."""


def convert(file: Path, out: Path, dtype: str = "bfloat16", *, overwrite: bool = False) -> Path:
    """Write the model of a GGUF file as a new checkpoint folder `out`."""
    if dtype not in STORED_TYPES:
        raise RecipeError(f"dtype: {dtype!r} is not one of {', '.join(STORED_TYPES)}.")
    check_target(out, overwrite, [file])
    with _reading(file):
        content = _read(file)
        before = identify([file])
        metadata = _metadata(content, file)
        tensors = _renamed(content.tensors, metadata, file)
    target = real_target(out)
    partial = target.with_name(f".{target.name}.partial")
    with only_target(target, overwrite):
        try:
            remove(partial)
            with _reading(file), writing(partial), saved(partial), quiet():
                _save_model(tensors, metadata, dtype, partial, file)
                _save_tokenizer(file, metadata, partial)
            unchanged(before)
            prove([file])
            publish(partial, target, overwrite=overwrite, durable=True)
        finally:
            remove(partial, if_possible=True)
    return out


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Whatever a library raises for what a file says is one error that names the file."""
    try:
        yield
    except (SigmergeError, OSError, MemoryError):
        raise
    except Exception as error:
        raise PoolError(
            f"{file}: cannot be converted ({type(error).__name__}: {error}); it is damaged, or of "
            "a kind that is not supported. Copy or download it again."
        ) from error


def _read(file: Path) -> Any:
    """The reader of a GGUF file. One that says how many values follow may say too many."""
    try:
        import transformers  # noqa: F401
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingExtra("Reading a GGUF file", [error.name or "gguf"], ["models"]) from None
    with open_regular(file, "a GGUF file", PoolError) as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise PoolError(f"{file}: is not a GGUF file; its first bytes are not GGUF.")

    class Reader(GGUFReader):
        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("it ends before its values")
            return super()._get(offset, dtype, count, override_order)

    try:
        return Reader(file)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise PoolError(f"{file}: is damaged ({error}); copy or download it again.") from None


def _metadata(content: Any, file: Path) -> dict[str, Any]:
    """The values of the file's fields; an architecture that is not supported is refused."""
    found = {name: field.contents() for name, field in content.fields.items()}
    architecture = found.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise PoolError(
            f"{file}: its architecture is {architecture!r}; {', '.join(ARCHITECTURES)} is "
            "supported."
        )
    if told := _rotated_otherwise(found):
        raise PoolError(f"{file}: {told}, which is not supported.")
    keys = ("block_count", "context_length", "embedding_length", "feed_forward_length",
            "attention.head_count", "attention.layer_norm_rms_epsilon")  # fmt: skip
    wanted = [*(f"llama.{key}" for key in keys), "tokenizer.ggml.tokens"]
    missing = [f"{key}: missing" for key in wanted if key not in found]
    if missing:
        raise PoolError(f"{file}: its metadata is incomplete; download it again:", missing)
    return found


def _rotated_otherwise(found: Mapping[str, Any]) -> str:
    """What a file says of its rotary positions that a plain configuration does not.

    A factor without a type scales too; programs of before called it otherwise.
    """
    scaling = found.get("llama.rope.scaling.type", "none")
    factors = (found.get(f"llama.rope.{key}", 1.0) for key in ("scaling.factor", "scale_linear"))
    if scaling != "none" or any(factor not in (0, 1) for factor in factors):
        return f"scales its rotary positions ({scaling if scaling != 'none' else 'by a factor'})"
    width, heads = found.get("llama.embedding_length"), found.get("llama.attention.head_count")
    size = found.get("llama.attention.key_length") or (width or 0) // (heads or 1)
    turned = found.get("llama.rope.dimension_count", size)
    return f"rotates {turned} of {size} coordinates of a head" if turned != size else ""


def _renamed(tensors: Any, metadata: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Every tensor in float32, under the name that transformers has for it."""
    from gguf import dequantize

    unknown = [tensor.name for tensor in tensors if _name(tensor.name) is None]
    if unknown:
        raise PoolError(f"{file}: these tensors have no counterpart in transformers:", unknown)
    heads = metadata["llama.attention.head_count"]
    groups = {"q_proj": heads, "k_proj": metadata.get("llama.attention.head_count_kv", heads)}
    found = {}
    for tensor in tensors:
        name = str(_name(tensor.name))
        try:
            weight = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise PoolError(f"{file}, {tensor.name}: cannot be dequantised ({error}).") from None
        count = groups.get(name.split(".")[-2])
        found[name] = _half_by_half(weight, count) if count else weight
    return found


def _name(stored: str) -> str | None:
    """The name of a tensor in transformers, by its name in the file."""
    place = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", stored)
    if place and place[2] in _BLOCK:
        return f"model.layers.{place[1]}.{_BLOCK[place[2]]}.weight"
    return _OUTSIDE.get(stored)


def _half_by_half(weight: Any, heads: int) -> Any:
    """Rows as transformers rotates them: the first coordinates of all pairs, then the second.

    llama.cpp stores the two coordinates of a pair side by side.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    from transformers import LlamaConfig

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"llama.{key}", default)
        # A decimal number of the original configuration went through float32.
        return float(str(np.float32(found))) if isinstance(found, float) else found

    heads, width = value("attention.head_count"), value("embedding_length")
    embedding = tensors.get("model.embed_tokens.weight")
    vocabulary = metadata["tokenizer.ggml.tokens"] if embedding is None else embedding
    return LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=value("attention.head_count_kv", heads),
        head_dim=value("attention.key_length", width // heads),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base", 10000.0)},
        tie_word_embeddings="lm_head.weight" not in tensors,
        **{f"{token}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
           for token, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))},
    )  # fmt: skip


def _save_model(
    tensors: dict[str, Any], metadata: Mapping[str, Any], dtype: str, folder: Path, file: Path
) -> None:
    import torch
    from transformers import GenerationConfig, LlamaForCausalLM

    if metadata["llama.block_count"] > len(tensors):  # each is made before it is missed
        raise PoolError(
            f"{file}: its tensors do not fit its metadata: there are fewer than layers."
        )
    config = _config(metadata, tensors)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    problems = [
        f"{name}: {tensors[name].shape if name in tensors else 'missing'}, {shape} is expected"
        for name, shape in shapes.items()
        if name not in tensors or tensors[name].shape != shape
    ]
    problems += [f"{name}: beyond the layers" for name in sorted(tensors.keys() - shapes.keys())]
    if problems:
        raise PoolError(f"{file}: its tensors do not fit its metadata:", problems)
    stored = {name: torch.tensor(weight).to(getattr(torch, dtype))
              for name, weight in tensors.items()}  # fmt: skip
    model.load_state_dict(stored, strict=False, assign=True)
    model.tie_weights()
    ends = {f"{token}_token_id": getattr(config, f"{token}_token_id")
            for token in ("bos", "eos", "pad")}  # fmt: skip
    model.generation_config = GenerationConfig(**ends)
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(folder)
    for shard in folder.glob("*.safetensors"):
        shard.chmod(0o644)  # else for the owner alone


def _save_tokenizer(file: Path, metadata: Mapping[str, Any], folder: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    if metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    tokenizer.model_max_length = metadata["llama.context_length"]
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = read_json_object(path, "a tokenizer's configuration", PoolError)
    # Where it was read from is no part of it; the class is one that all versions know.
    config = {key: value for key, value in config.items() if not key.startswith(("is_l", "local"))}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
