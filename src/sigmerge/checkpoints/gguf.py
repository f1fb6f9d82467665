"""GGUF files as checkpoints: the tensors are dequantised where they are read.

Configuration and tokenizer come from the file's metadata; they are made once and kept as a folder.
llama.cpp stores the rows of the query and key projections of a Llama in another order, which is
undone. Without a head of its own in the file the head stays tied to the embedding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge import kept
from sigmerge.checkpoints.header import Tensor, version_of
from sigmerge.checkpoints.lazy import FormedTensor, TensorRun, Values
from sigmerge.core import Array
from sigmerge.errors import MissingExtra, PoolError, SigmergeError
from sigmerge.files.documents import read_json_object
from sigmerge.files.safe_open import open_regular
from sigmerge.kept import Derivation, Given, Inputs

GGUF_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Architecture of a file -> the class that its models have in transformers."""
_PAIRED = ("llama",)
"""Architectures whose query and key rows lie pair by pair in a file."""
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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SINGLE_DIGITS = ("smollm",)
"""Tokenizers that take every digit apart before they merge, by `tokenizer.ggml.pre`."""


def folder_of(file: Path) -> Path:
    """The kept folder with the configuration and the tokenizer of a file."""
    wanted = Derivation(
        "gguf", _write_texts, Inputs.of(gguf=file), libraries=("transformers", "gguf"), of=str(file)
    )
    return kept.get(wanted).folder


def _write_texts(given: Given) -> None:
    file, out = given.path("gguf"), given.out
    with reading(file):
        content = read_gguf(file)
        metadata = metadata_of(content, file)
        shapes = {tensor.name: tensor.shape.tolist() for tensor in content.tensors}
        rows = shapes.get("token_embd.weight", [0, len(metadata["tokenizer.ggml.tokens"])])[1]
        architecture = metadata["general.architecture"]
        config = {
            "architectures": [GGUF_CLASSES[architecture]],
            "model_type": architecture,
            "dtype": "bfloat16",
            **settings_of(metadata, rows, "output.weight" not in shapes),
        }
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_tokenizer(file, metadata, out)


def tensors_of(file: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file under transformers' names, and what its form is called."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    with reading(file):
        content = read_gguf(file)
        metadata = metadata_of(content, file)
        version = version_of(file.stat())
        architecture = metadata["general.architecture"]
        heads = metadata[f"{architecture}.attention.head_count"]
        few = metadata.get(f"{architecture}.attention.head_count_kv", heads)
        paired = {"q_proj": heads, "k_proj": few} if architecture in _PAIRED else {}
        found: dict[str, Tensor] = {}
        kinds = set()
        unknown = [t.name for t in content.tensors if name_of(t.name) is None]
        if unknown:
            raise PoolError(f"{file}: these tensors have no counterpart in transformers:", unknown)
        for one in content.tensors:
            kind = GGMLQuantizationType(one.tensor_type)
            begin, end = int(one.data_offset), int(one.data_offset + one.n_bytes)
            stored = Tensor(one.name, "U8", (end - begin,), file, begin, end, version=version)
            name, shape = str(name_of(one.name)), tuple(map(int, reversed(one.shape)))
            _check_readable(file, one.name, kind, GGML_QUANT_SIZES[kind])
            turned = paired.get(name.split(".")[-2], 0)
            found[name] = GgufTensor(
                name, "BF16", shape, file, begin, end, version=version, stored=stored,
                kind=int(kind), block=GGML_QUANT_SIZES[kind], heads=turned,
            )  # fmt: skip
            kinds.add(kind.name)
    return found, f"GGUF ({', '.join(sorted(kinds))})"


def _check_readable(file: Path, name: str, kind: Any, block: tuple[int, int]) -> None:
    """Raise for a type that the gguf package cannot dequantise; a block of zeros is tried."""
    from gguf import dequantize

    try:
        dequantize(np.zeros((1, block[1]), np.uint8), kind)
    except NotImplementedError as error:
        raise PoolError(f"{file}, {name}: cannot be dequantised ({error}).") from None


@dataclass(frozen=True)
class GgufTensor(FormedTensor):
    """Blocks of a GGUF file in float32; `heads` is set where their rows lie pair by pair."""

    stored: Tensor
    kind: int
    block: tuple[int, int]
    """Elements of a block, and its bytes."""
    heads: int

    def made_of(self, start: int, stop: int) -> list[TensorRun]:
        return [(self.stored, *self._place(start, stop))]

    def form(self, values: Values, start: int, out: Array) -> None:
        if not self.heads:
            first = start - start % self.block[0]
            found = self._blocks(values, start, start + out.size)
            out[:] = found[start - first :][: out.size]
            return
        columns = self.shape[1]
        size = self.shape[0] // self.heads
        rows = np.arange(start // columns, -(-(start + out.size) // columns))
        top, bottom = rows[0] // size * size, -(-(rows[-1] + 1) // size) * size
        whole = self._blocks(values, top * columns, bottom * columns).reshape(-1, columns)
        # The first coordinates of all pairs of a head, then the second.
        half, place = size // 2, rows % size
        lying = rows - place + 2 * (place % half) + place // half - top
        out[:] = whole[lying].reshape(-1)[start - rows[0] * columns :][: out.size]

    def _blocks(self, values: Values, start: int, stop: int) -> Array:
        """The values of the blocks that hold these elements, as they lie in the file."""
        from gguf import GGMLQuantizationType, dequantize

        stored = values.raw(self.stored, *self._place(start, stop))
        plain = {0: np.float32, 1: np.float16}.get(self.kind)  # F32 and F16
        if plain is not None:
            return stored.view(plain).astype(np.float32)
        found = dequantize(stored.reshape(1, -1), GGMLQuantizationType(self.kind))
        return np.asarray(found, np.float32).reshape(-1)

    def _place(self, start: int, stop: int) -> tuple[int, int]:
        count, width = self.block
        return int(start // count * width), int(-(-stop // count) * width)


@contextmanager
def reading(file: Path) -> Iterator[None]:
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


def read_gguf(file: Path) -> Any:
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


def metadata_of(
    content: Any, file: Path, architectures: tuple[str, ...] = tuple(GGUF_CLASSES)
) -> dict[str, Any]:
    """The values of the file's fields; an architecture that is not supported is refused."""
    found = {name: field.contents() for name, field in content.fields.items()}
    architecture = found.get("general.architecture")
    if architecture not in architectures:
        raise PoolError(
            f"{file}: its architecture is {architecture!r}; {', '.join(architectures)} is "
            "supported."
        )
    if told := _rotated_otherwise(found):
        raise PoolError(f"{file}: {told}, which is not supported.")
    keys = ("block_count", "context_length", "embedding_length", "feed_forward_length",
            "attention.head_count", "attention.layer_norm_rms_epsilon")  # fmt: skip
    wanted = [*(f"{architecture}.{key}" for key in keys), "tokenizer.ggml.tokens"]
    missing = [f"{key}: missing" for key in wanted if key not in found]
    if missing:
        raise PoolError(f"{file}: its metadata is incomplete; download it again:", missing)
    return found


def _rotated_otherwise(found: Mapping[str, Any]) -> str:
    """What a file says of its rotary positions that a plain configuration does not.

    A factor without a type scales too; programs of before called it otherwise.
    """
    own = found["general.architecture"]
    scaling = found.get(f"{own}.rope.scaling.type", "none")
    factors = (found.get(f"{own}.rope.{key}", 1.0) for key in ("scaling.factor", "scale_linear"))
    if scaling != "none" or any(factor not in (0, 1) for factor in factors):
        return f"scales its rotary positions ({scaling if scaling != 'none' else 'by a factor'})"
    width, heads = found.get(f"{own}.embedding_length"), found.get(f"{own}.attention.head_count")
    size = found.get(f"{own}.attention.key_length") or (width or 0) // (heads or 1)
    turned = found.get(f"{own}.rope.dimension_count", size)
    return f"rotates {turned} of {size} coordinates of a head" if turned != size else ""


def name_of(stored: str) -> str | None:
    """The name of a tensor in transformers, by its name in the file."""
    place = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored)
    if place and place[2] in _BLOCK:
        return f"model.layers.{place[1]}.{_BLOCK[place[2]]}.{place[3]}"
    return _OUTSIDE.get(stored)


def settings_of(metadata: Mapping[str, Any], rows: int, tied: bool) -> dict[str, Any]:
    """What config.json says of the model; `rows` are those of the embedding."""
    architecture = metadata["general.architecture"]

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        # A decimal number of the original configuration went through float32.
        return float(str(np.float32(found))) if isinstance(found, float) else found

    heads, width = value("attention.head_count"), value("embedding_length")
    ids = {
        f"{token}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for token, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "vocab_size": rows,
        "hidden_size": width,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", width // heads),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_type": "default", "rope_theta": value("rope.freq_base", 10000.0)
        },
        "tie_word_embeddings": tied,
        **ids,
    }  # fmt: skip


def save_tokenizer(file: Path, metadata: Mapping[str, Any], folder: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    if metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    tokenizer.model_max_length = metadata[f"{metadata['general.architecture']}.context_length"]
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = read_json_object(path, "a tokenizer's configuration", PoolError)
    # Where it was read from is no part of it; the class is one that all versions know.
    config = {key: value for key, value in config.items() if not key.startswith(("is_l", "local"))}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
