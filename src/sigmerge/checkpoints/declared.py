"""The files of a checkpoint as inputs of derivations (`sigmerge.kept`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sigmerge.checkpoints.adapter_folders import home_of
from sigmerge.checkpoints.companions import companion_files, files_named
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.hub import snapshot
from sigmerge.checkpoints.inputs import same_configuration
from sigmerge.checkpoints.remote import with_weights
from sigmerge.errors import MissingExtra, SigmergeError
from sigmerge.files.environment import source_text
from sigmerge.files.imports import imported_files, users_homes
from sigmerge.files.objects import address, remote_folder
from sigmerge.kept import Given

AROUND = ("*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja", "*.py")
"""Files besides weights and tokenizer that libraries may read to build the model."""
ELSEWHERE = "elsewhere"
"""Where a checkpoint is shown with code of its own that lies in no folder of it."""
_CODE_OF = re.compile(r'"([\w.-]+/[\w.-]+)--[\w.]+"')
"""A class under `auto_map` whose code another repository of the hub has."""


def checkpoint_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """Every file that decides what a checkpoint computes and how it reads text, by its role.

    Weights, configurations, tokenizer, templates and code: `model/…`, of an adapter `adapter/…`,
    and `twin/…` for the safetensors that a pickle was converted to.
    """
    same_configuration(checkpoint)
    found = {f"model/{name}": file for name, file in files_around(checkpoint.path).items()}
    if checkpoint.adapter is not None:
        around = files_around(checkpoint.adapter)
        found |= {f"adapter/{name}": file for name, file in around.items()}
    for file in checkpoint.files:
        given = checkpoint.given(file)
        if given != file:
            found[f"twin/{given.name}.safetensors"] = file
        found[_role(checkpoint, given)] = given
    return found


def weight_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """The files that decide a checkpoint's tensors: its weights, and how they are put together."""
    same_configuration(checkpoint)
    weights = {f"weights/{number}": file for number, file in enumerate(checkpoint.files)}
    if checkpoint.parts:
        return weights
    return {"config.json": checkpoint.path / "config.json", **weights}


def shown_folder(given: Given, prefix: str, checkpoint: Checkpoint) -> Path:
    """A folder of links to a checkpoint's declared files only, for a library or a command.

    Declared as `Inputs.of(PREFIX=checkpoint_files(checkpoint))`.
    """
    if remote_folder(checkpoint.path) is not None:  # its copy has the declared versions only
        return with_weights(checkpoint.path)
    model = given.folder(f"{prefix}/model", checkpoint.path.name)
    if checkpoint.adapter is None:
        return model
    return Path(f"{model}+{given.folder(f'{prefix}/adapter', checkpoint.adapter.name)}")


@contextmanager
def named(shown: Path, checkpoint: Checkpoint) -> Iterator[None]:
    """Errors in this context name the checkpoint instead of the folder of links."""
    try:
        yield
    except SigmergeError as error:
        text = str(error).replace(str(shown), checkpoint.place)
        error.args = (text.replace(str(home_of(shown)), address(checkpoint.path)),)
        raise


def files_around(folder: Path) -> dict[str, Path]:
    """The files of a folder besides weights that define the model and its tokenizer."""
    files = {file for file in files_named(folder, AROUND) if file.is_file()}
    own = {file.relative_to(folder).as_posix(): file for file in {*files, *companion_files(folder)}}
    elsewhere = sorted({*_code_elsewhere(files)} - files)
    return own | {f"{ELSEWHERE}/{n}/{file.name}": file for n, file in enumerate(elsewhere)}


def _code_elsewhere(files: Iterable[Path]) -> Iterator[Path]:
    """Modules of the user that a folder's code imports, and code of the hub that it names."""
    for file in files:
        if file.suffix == ".py":
            yield from imported_files(file, users_homes())
        elif file.name in ("config.json", "tokenizer_config.json"):
            for repository in {*_CODE_OF.findall(source_text(file))}:
                with suppress(MissingExtra):  # then nothing runs that code either
                    place = snapshot(repository)
                    yield from place.rglob("*.py") if place else ()


def _role(checkpoint: Checkpoint, file: Path) -> str:
    for prefix, folder in (("adapter", checkpoint.adapter), ("model", checkpoint.path)):
        if folder is not None and file.is_relative_to(folder):
            return f"{prefix}/{file.relative_to(folder).as_posix()}"
    return f"model/{file.name}"
