"""Tensors that no configuration describes: single files, folders of them, pipelines of diffusion.

A pipeline is a folder with a model_index.json, which names its parts; each lies in a folder of its
own. Here it is one checkpoint, and the name of a tensor begins with the folder of its part, as in
`unet/conv_in.weight`. Results have the same folders, and files of the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.adapter_folders import ADAPTER_CONFIG, split_adapter
from sigmerge.checkpoints.folder import (
    INDEX,
    SHOWN,
    Checkpoint,
    existing,
    indexed_files,
    open_checkpoint,
    read_json,
    refuse_other_floats,
    stored_tensors,
)
from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.links import check_file, is_there
from sigmerge.errors import PoolError
from sigmerge.files.identity import InputIdentity

PIPELINE = "model_index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHTS = (".safetensors", *PICKLES)
STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
"""How the weights of a pipeline's part are called."""
_OTHER_WEIGHTS = (*WEIGHTS, ".onnx", ".onnx_data", ".msgpack", ".h5", ".gguf", ".index.json")
_SHARD = re.compile(r"-\d+-of-\d+$")


def open_tensors(path: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """A model, or tensors that no configuration of transformers describes."""
    if split_adapter(path)[1] is not None or path.suffix == ".gguf":
        return open_checkpoint(path, allow_pickle=allow_pickle)
    place = existing(path)
    if place.is_file():
        return _opened(place, {"": _one_file(place, allow_pickle)}, allow_pickle)
    if is_there(place / PIPELINE):
        return _pipeline(place, allow_pickle)
    if is_there(place / "config.json"):
        if _is_part(place):
            return _opened(place, {"": _part_files(place, allow_pickle)}, allow_pickle)
        return open_checkpoint(path, allow_pickle=allow_pickle)
    if is_there(place / ADAPTER_CONFIG) or not _has_weights(place):
        return open_checkpoint(path, allow_pickle=allow_pickle)  # which says what is missing
    return _opened(place, {"": _part_files(place, allow_pickle)}, allow_pickle)


def is_pipeline(folder: Path) -> bool:
    """Whether a folder is a pipeline of diffusion, or one part of it."""
    return is_there(folder / PIPELINE) or (is_there(folder / "config.json") and _is_part(folder))


def pipeline_files(folder: Path) -> list[Path]:
    """What a pipeline, or a part of one, has beside weights."""
    parts = list(_parts(folder)) if is_there(folder / PIPELINE) else []
    found = [file for file in sorted(folder.iterdir()) if file.suffix == ".json"]
    for part in parts:
        found += sorted(file for file in (folder / part).rglob("*") if not file.is_dir())
    kept = [file for file in found if not file.name.endswith(_OTHER_WEIGHTS)]
    for file in kept:
        check_file(folder, file)
    return kept


def require_kinds(members: Mapping[str, Checkpoint]) -> None:
    """Refuse models beside tensors of which nothing is known."""
    if not all(member.parts for member in members.values()):
        for member in members.values():
            require_model(member)


def require_model(found: Checkpoint) -> None:
    """Refuse tensors beside models."""
    if not found.parts:
        return
    if found.path.is_file():
        told = "is a file; give the checkpoint's folder, since the other models have one."
    else:
        told = (
            "no config.json; a checkpoint folder in Hugging Face format is needed, as the other "
            "models are. Tensors without a configuration are merged where no model has one."
        )
    raise PoolError(f"{found.path}: {told}")


def _is_part(folder: Path) -> bool:
    check_file(folder, folder / "config.json")
    config = read_json(folder / "config.json")
    return "_class_name" in config and "model_type" not in config


def _has_weights(folder: Path) -> bool:
    return any(file.suffix in WEIGHTS and not file.is_dir() for file in folder.iterdir())


def _opened(
    place: Path, files: Mapping[str, tuple[list[Path], str]], allow_pickle: bool
) -> Checkpoint:
    """The checkpoint of such files by the folder of their part, each with its index or ""."""
    tensors, listed, parts = dict[str, Tensor](), list[Path](), dict[str, str]()
    pickles: dict[Path, InputIdentity] = {}
    for part, (weights, index) in files.items():
        if any(file.suffix in PICKLES for file in weights):
            from sigmerge.checkpoints.pickled import as_safetensors

            pickles |= (twins := as_safetensors(weights))
            weights = list(twins)
        folder = place / part if part else place
        stored = stored_tensors(folder, weights, index)
        refuse_other_floats(folder, stored)
        prefix = f"{part}/" if part else ""
        tensors |= {prefix + n: replace(t, name=prefix + n) for n, t in stored.items()}
        listed += weights
        parts[prefix] = prefix + _result_index(place / part)
    return Checkpoint(place, {}, tensors, tuple(listed), pickles=pickles, parts=parts)


def _result_index(folder: Path) -> str:
    """What lists the shards of a result in place of this folder, where it has several."""
    stem = "model"
    if folder.is_dir() and is_there(folder / "config.json") and _is_part(folder):
        stem = STEMS[0]
    return INDEX.replace("model.", f"{stem}.", 1)


def _one_file(file: Path, allow_pickle: bool) -> tuple[list[Path], str]:
    if file.suffix in PICKLES and not allow_pickle:
        raise PoolError(
            f"{file}: a pickle can run code when it is loaded, and is refused. Convert it to "
            "safetensors, or pass --allow-pickle to load it weights-only."
        )
    if file.suffix not in WEIGHTS:
        raise PoolError(
            f"{file}: is a file; give a checkpoint's folder, or a file of tensors: "
            f"{', '.join(WEIGHTS)}."
        )
    return [file], ""


def _part_files(folder: Path, allow_pickle: bool) -> tuple[list[Path], str]:
    """The files with the weights of a folder without a model's configuration."""
    for stem in STEMS:
        index = f"{stem}.safetensors.index.json"
        if is_there(folder / index):
            return indexed_files(folder, index), index
        if is_there(file := folder / f"{stem}.safetensors"):
            check_file(folder, file)
            return [file], ""
    found = sorted(file for file in folder.iterdir() if file.suffix in WEIGHTS)
    safe = [file for file in found if file.suffix == ".safetensors"]
    files = safe or found
    if not files:
        raise PoolError(f"{folder}: no weights; a file of {', '.join(WEIGHTS)} is expected.")
    if any(_SHARD.search(file.stem) for file in files):
        raise PoolError(f"{folder}: {files[0].name} is one of several, but there is no index.")
    if len(files) > 1:
        named = ", ".join(file.name for file in files[:SHOWN])
        raise PoolError(
            f"{folder}: holds several files of weights ({named}) and no index; name one of them."
        )
    check_file(folder, files[0])
    return _one_file(files[0], allow_pickle)


def _pipeline(folder: Path, allow_pickle: bool) -> Checkpoint:
    found = {}
    for part in _parts(folder):
        if _has_weights(folder / part):
            found[part] = _part_files(folder / part, allow_pickle)
        elif is_there(folder / part / "config.json"):  # which a model has, and no scheduler
            raise PoolError(f"{folder / part}: no weights; download the pipeline again.")
    if not found:
        raise PoolError(f"{folder}: none of the parts that {PIPELINE} names has weights.")
    return _opened(folder, found, allow_pickle)


def _parts(folder: Path) -> Iterator[str]:
    """The folders that a pipeline's index names."""
    file = folder / PIPELINE
    check_file(folder, file)
    for name, value in sorted(read_json(file).items()):
        if not isinstance(value, list) or len(value) != 2 or not all(map(_is_text, value)):
            continue
        if "/" in name or "\\" in name or name.startswith("."):
            raise PoolError(f"{file}: the entry {name!r} points outside the folder; refused.")
        if not (folder / name).is_dir():
            raise PoolError(f"{folder}: {PIPELINE} names {name}, and there is no such folder.")
        yield name


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
