"""Checks by transformers that a folder has what its model needs, for `sigmerge verify`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.errors import SigmergeError
from sigmerge.probing.bounded import TooLarge, bounded
from sigmerge.probing.loading import model_class, quiet

Problems = list[tuple[str, str]] | str
"""Tensors with what is wrong about them; a text where transformers cannot say, and why."""


def architecture_problems(folder: Path) -> Problems:
    """What is wrong about a folder's tensors and configuration, by transformers.

    transformers loads the model from tensors that have a shape and no values, so that what it
    renames, joins or ties counts as it does when the folder is used. Code that a checkpoint brings
    along is not run.
    """
    try:
        found = open_checkpoint(folder)
    except SigmergeError as error:
        return f"transformers cannot build the model ({_reason(error)})"
    return stored_problems(found.config, {n: t.shape for n, t in found.tensors.items()})


def stored_problems(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Problems:
    """As `architecture_problems`, for tensors that would be stored with a configuration."""
    try:
        import torch
        from transformers import AutoConfig
        from transformers.utils import logging
    except ImportError:
        return "transformers is not installed"
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it reports in a table what is returned here
    try:
        with TemporaryDirectory() as place, quiet(), bounded(config, len(shapes)):
            (Path(place) / "config.json").write_text(json.dumps(config), "utf-8")
            try:
                built = AutoConfig.from_pretrained(place, local_files_only=True)
            except Exception as error:
                if _is_known(config) and not isinstance(error, ImportError):
                    return [("config.json", f"transformers cannot load it ({_reason(error)})")]
                raise
            weights = {n: torch.empty(shape, device="meta") for n, shape in shapes.items()}
            _, found = _class_of(built).from_pretrained(
                None, config=built, state_dict=weights, device_map="meta",
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
    except Exception as error:  # whatever a foreign configuration makes a library do
        if "conversion of the weights" in str(error):
            return [("weights", "transformers cannot join them; some are missing or of another "
                     "shape")]  # fmt: skip
        told = f"transformers cannot build the model ({_reason(error)})"
        return [("config.json", told)] if _of_sizes(error) and _is_known(config) else told
    finally:
        logging.set_verbosity(level)
    return sorted(_problems(found))


def _is_known(config: Mapping[str, Any]) -> bool:
    """Whether transformers itself has the kind of model, which it must be able to build.

    Quantized weights may need a GPU for that.
    """
    from transformers import CONFIG_MAPPING

    foreign = config.keys() & {"auto_map", "quantization_config"}
    return not foreign and config.get("model_type") in set(CONFIG_MAPPING.keys())


def _of_sizes(error: Exception) -> bool:
    """Whether no model has such sizes; other errors may be of a library, or of this machine."""
    return isinstance(error, TooLarge | ZeroDivisionError) or "negative dimension" in str(error)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _class_of(config: Any) -> Any:
    """The class that `architectures` names; without one, the first that knows the configuration.

    It is the class itself: an auto class takes no weights from memory.
    """
    import transformers

    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
    found = model_class(config)._model_mapping[type(config)]
    return found[0] if isinstance(found, tuple | list) else found


def _problems(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in found["missing_keys"]:
        yield name, "is missing"
    for name in found["unexpected_keys"]:
        yield name, "is no tensor of the architecture"
    for name, shape, wanted in found["mismatched_keys"]:
        yield name, f"shape {list(shape)}, not {list(wanted)}"
