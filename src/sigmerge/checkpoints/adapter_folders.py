"""Recognises adapter folders, and splits `model+adapter`. Reads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sigmerge.checkpoints.links import check_file, is_there
from sigmerge.errors import PoolError
from sigmerge.files.documents import read_json_object

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MODEL_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)  # fmt: skip


def split_adapter(path: Path) -> tuple[Path, Path | None]:
    """The model and the adapter of `model+adapter`; a folder whose name has a + is a folder."""
    text = str(path)
    if "+" not in text or is_there(path.expanduser()):
        return path, None
    for place in (i for i, sign in enumerate(text) if sign == "+"):
        model, adapter = Path(text[:place]), Path(text[place + 1 :])
        if is_there(model.expanduser()) and is_there(adapter.expanduser()):
            return model, adapter
    return path, None


def home_of(path: Path) -> Path:
    """The folder with the configuration and the tokenizer: the model's, also of model+adapter.

    Of a GGUF file it is made.
    """
    model = split_adapter(path)[0]
    if model.suffix != ".gguf" or not model.is_file():
        return model
    from sigmerge.checkpoints.gguf import folder_of

    return folder_of(model.resolve())


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    if not is_there(folder / ADAPTER_CONFIG):
        return False
    return not any(is_there(folder / name) for name in MODEL_WEIGHTS)


def adapter_config(folder: Path) -> dict[str, Any]:
    file = folder / ADAPTER_CONFIG
    if not is_there(file):
        raise PoolError(f"{folder}: no {ADAPTER_CONFIG}; what stands behind + must be an adapter.")
    check_file(folder, file)
    return read_json_object(file, "the configuration of an adapter", PoolError)
