"""One checkpoint folder: its configuration and its tensors' positions. Reads headers only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from sigmerge.checkpoints.adapter_folders import ADAPTER_CONFIG, split_adapter
from sigmerge.checkpoints.blocks import Stack, find_blocks, find_stack
from sigmerge.checkpoints.equal import same_tensor
from sigmerge.checkpoints.header import Tensor, Version, read_header, version_of
from sigmerge.checkpoints.links import check_file, is_there
from sigmerge.checkpoints.quantised import (
    plain_tensors,
    quantisation_of,
    without_quantisation,
)
from sigmerge.errors import PoolError
from sigmerge.files.documents import read_json_object
from sigmerge.files.identity import InputIdentity
from sigmerge.files.objects import address, remote_file
from sigmerge.messages import few, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED_INDEX = "pytorch_model.bin.index.json"
RECORDS_FOLDER = "sigmerge"
"""The folder of a checkpoint that holds its records."""
SHOWN = 12
"""Lines of one kind that an error lists."""
SHORT = 300
"""Characters of a name that an error shows."""
HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "output.weight", "head.weight")
EMBEDDING_MODULES = (
    "embed_tokens", "wte", "embed_in", "embeddings", "word_embeddings", "tok_embeddings", "shared",
)  # fmt: skip
"""Names of token embeddings; position and type embeddings have others."""
HEADLESS = re.compile(
    "(Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|Regression|Retrieval|"
    "Encoder|RewardModel|(?<!LMHead)(?<!MT)Model)$"
)
"""Architectures without a head over tokens."""
MASKED_HEADS = (
    "lm_head.decoder.weight", "predictions.decoder.weight", "vocab_projector.weight",
)  # fmt: skip
"""How models that fill gaps call their head's weight, which is the embedding."""
TURNED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Models whose linear weights are stored as (in, out)."""
BEFORE = ("embed", "wte.", "wpe.", "patch_conv.", "ln_pre.", "layernorm_pre.")
"""Parts of the names of what lies before the layers; the last three see."""
BEHIND = "embedding_norm."
"""LFM2's norm behind the layers, that of what becomes the logits."""


def is_head(name: str) -> bool:
    """Whether a tensor is an output head; that of a model inside another has a longer name."""
    return name in HEAD_NAMES or name.endswith(".lm_head.weight")


def is_embedding(name: str) -> bool:
    """Whether a tensor has the embeddings of tokens."""
    module = name.removesuffix(".weight")
    return module != name and module.rpartition(".")[2] in EMBEDDING_MODULES


def is_before(name: str) -> bool:
    """Whether a tensor outside the layers comes before them, as embeddings do."""
    return not is_head(name) and BEHIND not in name and any(word in name for word in BEFORE)


def tied_head(embedding: str) -> str:
    """What the head is called in a model that stores the embedding only."""
    return "embed_out.weight" if "embed_in." in embedding else "lm_head.weight"


def on_hub(folder: Path) -> str | None:
    """owner/name of a snapshot in the hub's cache, whose own name is a commit, or of what stands in
    for one; None elsewhere."""
    if (found := address(folder)).startswith("hf://"):
        return "/".join(found.removeprefix("hf://").partition("@")[0].split("/")[:2])
    names = [part for part, inner in pairwise(folder.parts) if inner == "snapshots"]
    model = next((name for name in names if name.startswith("models--")), None)
    return model and model.removeprefix("models--").replace("--", "/")


@dataclass(frozen=True)
class Checkpoint:
    """`path` is the folder of the configuration; with an `adapter`, tensors are formed with it."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: tuple[Path, ...]
    adapter: Path | None = None
    pickles: Mapping[Path, InputIdentity] = field(default_factory=dict, kw_only=True)
    """The original pickle of each converted file."""
    config_version: Version = field(default=(), kw_only=True, compare=False, repr=False)
    """Version of config.json when it was read; empty for remote files."""
    form: str = field(default="", kw_only=True, compare=False)
    """The quantised form in which its weights are stored; "" where they are plain."""
    notes: tuple[str, ...] = field(default=(), kw_only=True, compare=False, repr=False)
    """Notes for the user about how its tensors were put together."""
    parts: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """Of tensors that no configuration describes: what names of a part begin with, and the index
    that lists its shards in a result. Empty for a model."""
    single: Path | None = field(default=None, kw_only=True)
    """The GGUF file that all of it was read from; `path` is then a kept folder of its texts."""
    stack: Stack = field(init=False)

    def given(self, file: Path) -> Path:
        """The file that a user gave: of one that was converted from a pickle, the pickle."""
        return self.pickles[file].file if file in self.pickles else file

    def __post_init__(self) -> None:
        sizes = [(name, tensor.size) for name, tensor in self.tensors.items()]
        found = find_blocks(self.tensors) if self.parts else find_stack(sizes)
        object.__setattr__(self, "stack", found)

    def with_tensors(self, tensors: dict[str, Tensor], files: tuple[Path, ...]) -> Checkpoint:
        """Other tensors under some of its names; its blocks are counted as they were."""
        other = replace(self, tensors=tensors, files=files)
        object.__setattr__(other, "stack", self.stack)
        return other

    @property
    def place(self) -> str:
        """What a recipe calls it: its folder or address, or `model+adapter`."""
        return "+".join(address(part) for part in (self.single or self.path, self.adapter) if part)

    @property
    def here(self) -> str:
        """The same on this machine, where a stand-in is read in place of a remote folder."""
        return "+".join(str(part) for part in (self.single or self.path, self.adapter) if part)

    @property
    def title(self) -> str:
        """Its name for people: the folder's, or the hub id of a snapshot."""
        folder = self.adapter or self.single or self.path
        return on_hub(folder) or folder.name

    @property
    def head(self) -> str | None:
        """The output head's own tensor, if the checkpoint stores one."""
        return min(filter(is_head, self.tensors), key=len, default=None)

    @cached_property
    def embedding(self) -> str | None:
        tables = [name for name, tensor in self.tensors.items() if len(tensor.shape) > 1]
        outside = [name for name in sorted(tables) if self.stack.block_of(name) is None]
        return next(filter(is_embedding, outside), None)

    @cached_property
    def tied(self) -> bool:
        """Whether the head is the embedding: none is stored, or a copy that is called tied."""
        if self.head is None:
            return True
        if self.embedding is None or not self.config.get("tie_word_embeddings"):
            return False
        return same_tensor(self.tensors[self.head], self.tensors[self.embedding])

    @property
    def headless(self) -> bool:
        """Whether its architecture ends in hidden states, or in scores of classes."""
        return HEADLESS.search(_architecture(self)) is not None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_checkpoint(path: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Read configuration and headers of a folder or of `model+adapter`."""
    model, adapter = split_adapter(path)
    opened = _open_model(model, allow_pickle)
    if adapter is None:
        return opened
    return _with_adapter(opened, _existing_folder(adapter), allow_pickle)


def _open_model(path: Path, allow_pickle: bool) -> Checkpoint:
    if path.suffix != ".gguf":
        return _open_folder(_existing_folder(path), allow_pickle)
    from sigmerge.checkpoints import gguf

    file = existing(path)
    tensors, form = gguf.tensors_of(file)
    folder = gguf.folder_of(file)
    config, version = _read_config(folder)
    told = f"{form}: {len(tensors)} tensors are dequantised while they are read (stands for BF16)"
    return _without_gaps(Checkpoint(
        folder, config, tensors, (file,), config_version=version, form=form, notes=(told,),
        single=file,
    ))  # fmt: skip


def _with_adapter(model: Checkpoint, folder: Path, allow_pickle: bool) -> Checkpoint:
    """A model with an adapter's update. A head that is the embedding is parted from it where the
    adapter makes the two differ."""
    # Most members are no adapters: their module need not be loaded then.
    from sigmerge.checkpoints import adapters

    adapter = adapters.open_adapter(folder, allow_pickle)
    embedding, tie, stored = model.embedding, None, dict(model.tensors)
    if embedding is not None and (head := _tied_head(model)):
        for copy in (model.head, *_masked_copies(model)):
            stored.pop(copy or "", None)  # a stored copy does not follow an update
        tie = adapters.TiedHead(embedding, head, (*HEAD_NAMES, *MASKED_HEADS))
    said = "auto_map" in model.config and bool(adapter.config.get("fan_in_fan_out"))
    turned = said or model.config.get("model_type") in TURNED
    tensors, lacking = adapters.adapted_tensors(adapter, stored, embedding, tie, turned)
    config = dict(model.config)
    if tie is not None and adapters.are_equal(tensors[tie.embedding], tensors[tie.head]):
        del tensors[tie.head]
    elif tie is not None:
        untouched = adapters.are_equal(tensors[tie.embedding], model.tensors[tie.embedding])
        _check_parted(model, tensors[tie.embedding], tensors[tie.head], untouched)
        config = parted(config)
    if embedding is not None and "vocab_size" in config:
        rows = tensors[embedding].shape[0]
        if rows != model.tensors[embedding].shape[0]:
            config["vocab_size"] = rows
    named = f"{ADAPTER_CONFIG} names modules that the adapter has no update of; they stay as they "
    return replace(
        model, config=config, tensors=tensors, files=(*model.files, *adapter.files),
        pickles={**model.pickles, **adapter.pickles},
        adapter=adapter.folder,
        notes=(*model.notes, *([f"{named}are: {few(lacking)}"] if lacking else [])),
    )  # fmt: skip


def parted(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, nested ones included, with untied head and embedding."""
    inner = {
        key: parted(value)
        for key, value in config.items()
        if isinstance(value, dict) and (key == "text_config" or "tie_word_embeddings" in value)
    }
    return {**config, **inner, "tie_word_embeddings": False}


def _tied_head(model: Checkpoint) -> str | None:
    """The name of a model's tied head, whether it is stored or not; None if it has none."""
    if not model.tied or model.embedding is None:
        return None
    copies = [model.head] if model.head else _masked_copies(model)
    own = any(name.endswith(MASKED_HEADS) for name in model.tensors)
    if not copies and (own or model.headless):
        return None
    return copies[0] if copies else tied_head(model.embedding)


def _masked_copies(model: Checkpoint) -> list[str]:
    """Stored copies of the embedding that are the head of a model which fills gaps."""
    if model.embedding is None or model.config.get("tie_word_embeddings") is False:
        return []
    embedding = model.tensors[model.embedding]
    heads = [name for name in model.tensors if name.endswith(MASKED_HEADS)]
    return [name for name in heads if same_tensor(model.tensors[name], embedding)]


def _architecture(model: Checkpoint) -> str:
    named = model.config.get("architectures") or [""]
    return named if isinstance(named, str) else named[0]


def _check_parted(model: Checkpoint, embedding: Tensor, head: Tensor, untouched: bool) -> None:
    """Raise if untying head and embedding would change what the model computes."""
    what = ""
    if _architecture(model).endswith("MaskedLM"):
        what = "a masked model"
    elif model.config.get("is_encoder_decoder"):
        # Its stacks' embeddings are tied to it too, and by the tie some scale what the head reads.
        apart = untouched and "scale_decoder_outputs" in model.config
        what = "" if apart else "an encoder-decoder"
    if what:
        raise PoolError(
            f"{model.path}: an adapter of the embedding or the head parts the two, which is not "
            f"done for {what}; merge the adapter into its model first."
        )
    if embedding.shape != head.shape:
        raise PoolError(
            f"{model.path}: the adapter brings an embedding of {embedding.shape[0]} rows, and the "
            f"head has {head.shape[0]}; save it with PEFT's save_embedding_layers=True."
        )


def _open_folder(folder: Path, allow_pickle: bool) -> Checkpoint:
    config, version = _read_config(folder)
    quantisation = quantisation_of(folder, config)
    files, index = _weight_files(folder, allow_pickle)
    pickles: dict[Path, InputIdentity] = {}
    if any(file.suffix == ".bin" for file in files):
        from sigmerge.checkpoints.pickled import as_safetensors

        files = list(pickles := as_safetensors(files))
    tensors = stored_tensors(folder, files, index)
    form, told = "", ""
    if quantisation:
        form, tensors, told = plain_tensors(folder, config, quantisation, tensors)
        config = without_quantisation(config)
    refuse_other_floats(folder, tensors)
    checkpoint = Checkpoint(
        folder, config, tensors, tuple(files), config_version=version, pickles=pickles,
        form=form, notes=(told,) if told else (),
    )  # fmt: skip
    return _without_gaps(checkpoint)


def _without_gaps(checkpoint: Checkpoint) -> Checkpoint:
    stack = checkpoint.stack
    if stack.gap is not None:
        raise PoolError(
            f"{checkpoint.place}: no tensor is called {stack.prefix}{stack.gap}.*, though later "
            "blocks are there. The checkpoint is incomplete, or its layers were taken out without "
            "numbering the others anew: export or download it again."
        )
    return checkpoint


def stored_tensors(folder: Path, files: Iterable[Path], index: str) -> dict[str, Tensor]:
    """The tensors of a folder's files, which are those that its index names, if it has one."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise PoolError(
                    f"{folder}: tensor {name!r} is stored twice, in "
                    f"{tensors[name].file.name} and {file.name}."
                )
            tensors[name] = tensor
    if index:
        _check_index(folder / index, tensors)
    if not tensors:
        raise PoolError(f"{folder}: its weight files hold no tensor.")
    return tensors


def read_json(file: Path, *, required_in: Path | None = None) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint; {} if there is none and none is required."""
    if not is_there(file) and not file.is_symlink():
        if required_in is None:
            return {}
        raise PoolError(
            f"{required_in}: no {file.name}; a checkpoint folder in Hugging Face format is needed."
        )
    return read_json_object(file, "a file of a checkpoint", PoolError)


def _read_config(folder: Path) -> tuple[dict[str, Any], Version]:
    """The configuration, whose entries that are read here have the types that they should have."""
    file = folder / "config.json"
    if is_there(file) or file.is_symlink():
        check_file(folder, file)
    elif is_there(folder / ADAPTER_CONFIG):
        raise PoolError(f"{folder}: {_ALONE}")
    known = is_there(file) and remote_file(file) is None
    version = version_of(file.stat()) if known else ()
    config = read_json(file, required_in=folder)
    named = config.get("architectures")
    wrong = {
        "architectures": not isinstance(named, str | list | None)
        or any(not isinstance(name, str) for name in named or ()),
        "vocab_size": not isinstance(config.get("vocab_size"), int | None),
        "tie_word_embeddings": not isinstance(config.get("tie_word_embeddings"), bool | None),
        "model_type": not isinstance(config.get("model_type"), str | None),
    }
    for key in (key for key, is_wrong in wrong.items() if is_wrong):
        raise PoolError(f"{file}: {key}: {shown(config[key])} cannot be right.")
    return config, version


def existing(path: Path) -> Path:
    """The folder or file that a path leads to."""
    try:
        return path.expanduser().resolve(strict=True)
    except FileNotFoundError:
        raise PoolError(f"{path}: no such folder.") from None
    except (OSError, RuntimeError) as error:
        raise PoolError(f"{path}: cannot be opened ({error}); is it a symlink loop?") from None


def _existing_folder(path: Path) -> Path:
    folder = existing(path)
    if not folder.is_dir():
        raise PoolError(f"{path}: is a file; give the checkpoint's folder.")
    return folder


SHARD = re.compile(r"-\d+-of-(?!0*1$)\d+$")
_ALONE = "is an adapter; write its model before it, as in model+adapter."
_GGUF = (
    "holds GGUF weights; name the file itself, or better the original safetensors checkpoint, "
    "which has lost nothing."
)


def refuse_other_floats(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Raise for float types that cannot be merged: they would silently stay the reference's."""
    other = [t for t in tensors.values() if t.dtype.startswith("F") and not t.floating]
    if other:
        raise PoolError(
            f"{folder}: tensor {other[0].name!r} is stored as {other[0].dtype}"
            f"{f' (and {len(other) - 1} more)' if other[1:] else ''}; float32, bfloat16 and "
            "float16 can be merged. Convert the checkpoint first."
        )


def _weight_files(folder: Path, allow_pickle: bool) -> tuple[list[Path], str]:
    """The files with the weights, and the name of the index that lists them, if one does."""
    if (folder / INDEX).exists():
        files = indexed_files(folder, INDEX)
        if (folder / SINGLE).exists() and folder / SINGLE not in files:
            raise PoolError(
                f"{folder}: holds both {SINGLE} and {INDEX}, which names other files; one of the "
                "two is left over from an older checkpoint. Remove it."
            )
        return _checked(folder, files), INDEX
    if (folder / SINGLE).exists():
        return _checked(folder, [folder / SINGLE]), ""
    for name in (SINGLE, INDEX):
        if (folder / name).is_symlink():
            raise PoolError(
                f"{folder}: {name} is a link that leads nowhere, or a symlink loop; copy or "
                "download the file again."
            )
    return _other_weights(folder, allow_pickle)


def indexed_files(folder: Path, name: str) -> list[Path]:
    """The shards that an index names, all of which exist."""
    index = folder / name
    check_file(folder, index)
    files = [folder / _inside(index, shard) for shard in sorted(set(weight_map(index).values()))]
    if missing := [shown(file.name) for file in files if not is_there(file)]:
        raise PoolError(f"{folder}: shards named in {name} are missing:", missing[:SHOWN])
    return files


def _other_weights(folder: Path, allow_pickle: bool) -> tuple[list[Path], str]:
    if (folder / ADAPTER_CONFIG).exists():
        raise PoolError(f"{folder}: {_ALONE}")
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if pickles and allow_pickle:
        index = PICKLED_INDEX if (folder / PICKLED_INDEX).exists() else ""
        if index:
            pickles = indexed_files(folder, index)
        else:
            _no_shards(folder, pickles, PICKLED_INDEX)
        return _checked(folder, pickles), index
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
        _no_shards(folder, loose, INDEX)
        return _checked(folder, loose), ""
    raise PoolError(f"{folder}: no weights; expected {SINGLE} or {INDEX}.")


def _no_shards(folder: Path, files: list[Path], index: str) -> None:
    """Raise for shards without an index: a missing one could not be noticed."""
    if parts := [file.name for file in files if SHARD.search(file.stem)]:
        raise PoolError(
            f"{folder}: {parts[0]} is one of several shards, but there is no {index}; copy or "
            "download it."
        )


def _checked(folder: Path, files: list[Path]) -> list[Path]:
    for file in files:
        check_file(folder, file)
    return files


def weight_map(index: Path) -> dict[str, str]:
    """The file of every tensor, as an index has it."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise PoolError(f"{index}: has no weight_map from tensor to file.")
    return found


def _inside(index: Path, name: str) -> PurePosixPath:
    """A shard's name as the index gives it; it may not leave the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise PoolError(f"{index}: the entry {shown(name)} points outside the folder; refused.")
    return path


def _check_index(index: Path, tensors: dict[str, Tensor]) -> None:
    """Raise if shards and index disagree; converted pickles have other file names."""
    promised, renamed = weight_map(index), index.name == PICKLED_INDEX
    problems = [
        f"{name[:SHORT]}: promised in {file[:SHORT]}, not stored there"
        for name, file in sorted(promised.items())
        if name not in tensors
        or not (renamed or tensors[name].file.name == PurePosixPath(file).name)
    ]
    problems += [
        f"{name[:SHORT]}: stored in {tensor.file.name}, not in the index"
        for name, tensor in sorted(tensors.items())
        if name not in promised
    ]
    if problems:
        rest = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise PoolError(
            f"{index.parent}: {index.name} and the shards disagree:", problems[:SHOWN] + rest
        )
