"""One checkpoint folder: its configuration and where every tensor lies. Reads headers only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from sigmerge.checkpoints.blocks import Stack, find_stack
from sigmerge.checkpoints.header import Tensor, read_header
from sigmerge.errors import PoolError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "output.weight")
EMBEDDING_SUFFIXES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "embeddings.weight")


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: tuple[Path, ...]
    stack: Stack = field(init=False)

    def __post_init__(self) -> None:
        sizes = [(name, tensor.size) for name, tensor in self.tensors.items()]
        object.__setattr__(self, "stack", find_stack(sizes))

    @property
    def head(self) -> str | None:
        """The output head's own tensor, if the checkpoint stores one."""
        return next((name for name in HEAD_NAMES if name in self.tensors), None)

    @property
    def embedding(self) -> str | None:
        outside = [name for name in sorted(self.tensors) if self.stack.block_of(name) is None]
        return next((name for name in outside if name.endswith(EMBEDDING_SUFFIXES)), None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_checkpoint(path: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Read a folder's configuration and headers, or say clearly why it cannot be merged."""
    folder = _existing_folder(path)
    config = read_json(folder / "config.json", required_in=folder)
    _refuse_quantised(folder, config)
    files = _weight_files(folder, allow_pickle)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise PoolError(
                    f"{folder}: tensor {name!r} is stored twice, in "
                    f"{tensors[name].file.name} and {file.name}."
                )
            tensors[name] = tensor
    _check_index(folder, tensors)
    if not tensors:
        raise PoolError(f"{folder}: its weight files hold no tensor.")
    _refuse_other_floats(folder, tensors)
    checkpoint = Checkpoint(folder, config, tensors, tuple(files))
    stack = checkpoint.stack
    if stack.gap is not None:
        raise PoolError(
            f"{folder}: no tensor is called {stack.prefix}{stack.gap}.*, though later blocks are "
            "there. The checkpoint is incomplete, or its layers were taken out without numbering "
            "the others anew: export or download it again."
        )
    return checkpoint


def read_json(file: Path, *, required_in: Path | None = None) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required_in is None:
            return {}
        raise PoolError(
            f"{required_in}: no {file.name}; a checkpoint folder in Hugging Face format is needed."
        ) from None
    except OSError as error:
        raise PoolError(f"{file}: cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise PoolError(f"{file}: not valid JSON ({error}).") from None
    if not isinstance(content, dict):
        raise PoolError(f"{file}: a JSON object is expected.")
    return content


def _existing_folder(path: Path) -> Path:
    try:
        folder = path.expanduser().resolve(strict=True)
    except FileNotFoundError:
        raise PoolError(f"{path}: no such folder.") from None
    except (OSError, RuntimeError) as error:
        raise PoolError(f"{path}: cannot be opened ({error}); is it a symlink loop?") from None
    if folder.suffix == ".gguf":
        raise PoolError(f"{path}: {_GGUF}")
    if not folder.is_dir():
        raise PoolError(f"{path}: is a file; give the checkpoint's folder.")
    return folder


_GGUF = (
    "GGUF weights are quantised for inference and cannot be merged; "
    "use the original safetensors checkpoint."
)


def _refuse_quantised(folder: Path, config: dict[str, Any]) -> None:
    quantisation = config.get("quantization_config")
    if quantisation:
        method = (
            quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else ""
        )
        raise PoolError(
            f"{folder}: quantised weights ({method}) cannot be merged; "
            "use the checkpoint they were made from."
        )
    for marker, method in (("quantize_config.json", "GPTQ"), ("quant_config.json", "AWQ")):
        if (folder / marker).exists():
            raise PoolError(
                f"{folder}: quantised weights ({method}, see {marker}) cannot be merged; "
                "use the checkpoint they were made from."
            )


def _refuse_other_floats(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Numbers that are neither merged nor plain buffers would silently stay the reference's."""
    other = [t for t in tensors.values() if t.dtype.startswith("F") and not t.floating]
    if other:
        raise PoolError(
            f"{folder}: tensor {other[0].name!r} is stored as {other[0].dtype}"
            f"{f' (and {len(other) - 1} more)' if other[1:] else ''}; float32, bfloat16 and "
            "float16 can be merged. Convert the checkpoint first."
        )


def _weight_files(folder: Path, allow_pickle: bool) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        names = sorted(set(_weight_map(index).values()))
        if (folder / SINGLE).exists() and SINGLE not in names:
            raise PoolError(
                f"{folder}: holds both {SINGLE} and {INDEX}, which names other files; one of the "
                "two is left over from an older checkpoint. Remove it."
            )
        files = [folder / _inside(index, name) for name in names]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise PoolError(f"{folder}: shards named in {INDEX} are missing:", missing)
        return files
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    for name in (SINGLE, INDEX):
        if (folder / name).is_symlink():
            raise PoolError(
                f"{folder}: {name} is a link that leads nowhere, or a symlink loop; copy or "
                "download the file again."
            )
    return _other_weights(folder, allow_pickle)


def _other_weights(folder: Path, allow_pickle: bool) -> list[Path]:
    if (folder / "adapter_config.json").exists():
        raise PoolError(
            f"{folder}: a LoRA adapter, not a checkpoint; merge it into its base model first "
            "(PEFT: merge_and_unload, then save_pretrained)."
        )
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if pickles and allow_pickle:
        from sigmerge.checkpoints.pickled import as_safetensors

        return as_safetensors(pickles)
    if pickles:
        raise PoolError(
            f"{folder}: pickled weights ({pickles[0].name}) can run code when loaded and are "
            "refused. Convert them to safetensors, or pass --allow-pickle to load them "
            "weights-only."
        )
    if any(folder.glob("*.gguf")):
        raise PoolError(f"{folder}: {_GGUF}")
    loose = sorted(folder.glob("*.safetensors"))
    if len(loose) > 1:
        raise PoolError(f"{folder}: {len(loose)} safetensors files but no {INDEX}.")
    if loose:
        return loose
    raise PoolError(f"{folder}: no weights; expected {SINGLE} or {INDEX}.")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise PoolError(f"{index}: has no weight_map from tensor to file.")
    return weight_map


def _inside(index: Path, name: str) -> PurePosixPath:
    """A shard's name as the index gives it; it may not leave the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise PoolError(f"{index}: the entry {name!r} points outside the folder; refused.")
    return path


def _check_index(folder: Path, tensors: dict[str, Tensor]) -> None:
    if not (folder / INDEX).exists():
        return
    promised = _weight_map(folder / INDEX)
    problems = [
        f"{name}: promised in {file}, not stored there"
        for name, file in sorted(promised.items())
        if name not in tensors or tensors[name].file.name != PurePosixPath(file).name
    ]
    problems += [
        f"{name}: stored in {tensor.file.name}, not in the index"
        for name, tensor in sorted(tensors.items())
        if name not in promised
    ]
    if problems:
        raise PoolError(f"{folder}: {INDEX} and the shards disagree:", problems)
