"""The tensors that an architecture has, without weights: what `sigmerge verify` compares with."""

from __future__ import annotations

from pathlib import Path

from sigmerge.probing.bounded import bounded


def expected_shapes(folder: Path) -> dict[str, tuple[int, ...]] | str:
    """Names and shapes as transformers builds the model; a text where it cannot, and why.

    Code that a checkpoint brings along is not run.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        return "transformers is not installed"
    try:
        with bounded(folder), torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a foreign configuration makes a library do
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"transformers cannot build the model ({reason[:300]})"
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}
