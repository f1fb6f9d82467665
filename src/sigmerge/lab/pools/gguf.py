"""A checkpoint folder from a GGUF file of the Llama architecture.

    sigmerge pool gguf model.gguf reference/

The weights are dequantised in float32 and rounded once. llama.cpp stores the rows of the query and
key projections in another order, which is undone. Without a head of its own in the file the head
stays tied to the embedding. Tokenizer and chat template come from the file's metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.gguf import metadata_of, name_of, read_gguf, reading, settings_of
from sigmerge.checkpoints.gguf import save_tokenizer as _save_tokenizer
from sigmerge.checkpoints.publishing import (
    check_target,
    only_target,
    publish,
    real_target,
    writing,
)
from sigmerge.checkpoints.writer import saved
from sigmerge.errors import PoolError, RecipeError
from sigmerge.files.digests import prove
from sigmerge.files.identity import identify, unchanged
from sigmerge.files.safe_open import remove
from sigmerge.probing.loading import quiet

ARCHITECTURES = ("llama",)
STORED_TYPES = ("bfloat16", "float32")


def convert(file: Path, out: Path, dtype: str = "bfloat16", *, overwrite: bool = False) -> Path:
    """Write the model of a GGUF file as a new checkpoint folder `out`."""
    if dtype not in STORED_TYPES:
        raise RecipeError(f"dtype: {dtype!r} is not one of {', '.join(STORED_TYPES)}.")
    check_target(out, overwrite, [file])
    with reading(file):
        content = read_gguf(file)
        before = identify([file])
        metadata = metadata_of(content, file, ARCHITECTURES)
        tensors = _renamed(content.tensors, metadata, file)
    target = real_target(out)
    partial = target.with_name(f".{target.name}.partial")
    with only_target(target, overwrite):
        try:
            remove(partial)
            with reading(file), writing(partial), saved(partial), quiet():
                _save_model(tensors, metadata, dtype, partial, file)
                _save_tokenizer(file, metadata, partial)
            unchanged(before)
            prove([file])
            publish(partial, target, overwrite=overwrite, durable=True)
        finally:
            remove(partial, if_possible=True)
    return out


def _renamed(tensors: Any, metadata: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Every tensor in float32, under the name that transformers has for it."""
    from gguf import dequantize

    unknown = [tensor.name for tensor in tensors if name_of(tensor.name) is None]
    if unknown:
        raise PoolError(f"{file}: these tensors have no counterpart in transformers:", unknown)
    heads = metadata["llama.attention.head_count"]
    groups = {"q_proj": heads, "k_proj": metadata.get("llama.attention.head_count_kv", heads)}
    found = {}
    for tensor in tensors:
        name = str(name_of(tensor.name))
        try:
            weight = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise PoolError(f"{file}, {tensor.name}: cannot be dequantised ({error}).") from None
        count = groups.get(name.split(".")[-2])
        found[name] = _half_by_half(weight, count) if count else weight
    return found


def _half_by_half(weight: Any, heads: int) -> Any:
    """Rows as transformers rotates them: the first coordinates of all pairs, then the second.

    llama.cpp stores the two coordinates of a pair side by side.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    from transformers import LlamaConfig

    embedding = tensors.get("model.embed_tokens.weight")
    vocabulary = metadata["tokenizer.ggml.tokens"] if embedding is None else embedding
    return LlamaConfig(**settings_of(metadata, len(vocabulary), "lm_head.weight" not in tensors))


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
