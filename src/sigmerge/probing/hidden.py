"""The probe pass: what every decoder block computes on a shared set of prompts.

One expert at a time is loaded, run once without cache, and freed. Of its hidden states only one
prompt Gram matrix per block is kept, which is all that CKA reads.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.checkpoints.adapter_folders import home_of
from sigmerge.checkpoints.blocks import find_stack
from sigmerge.checkpoints.remote import with_weights
from sigmerge.errors import PoolError, SigmergeError, require
from sigmerge.method.conflict import prompt_gram
from sigmerge.method.shapes import Float32, Float64
from sigmerge.probing.loading import checked_device, load_pretrained, loading, put_adapter
from sigmerge.probing.memory import free_cached, in_memory

if TYPE_CHECKING:
    import torch
    from torch import nn


def probe(
    folder: str | Path,
    prompts: Sequence[str],
    *,
    tokenizer: str | Path | None = None,
    batch_size: int = 8,
    max_length: int = 256,
    device: str = "cpu",
    offload_folder: str | Path | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Float64[np.ndarray, "layers prompts prompts"]:
    """Prompt Gram matrices H_i H_iᵀ (not centred) of one expert, a folder or `model+adapter`.

    H_i holds, per prompt, the output of block i averaged over the prompt's tokens. Prompts are read
    by the tokenizer in the folder `tokenizer`, by default the expert's own. The pass computes in
    float32 on the `device`. With `offload_folder`, what does not fit the memory is kept there.
    `progress` is called with (prompts done, prompts in all).
    """
    require("The representation view", models=["torch", "transformers"])
    import torch
    from transformers import AutoTokenizer

    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    placement: dict[str, Any] = {}
    if offload_folder is not None:
        placement = {"device_map": "auto", "offload_folder": str(offload_folder)}
    home = with_weights(home_of(Path(folder)))
    with loading(folder, "the probe pass"):
        reader = AutoTokenizer.from_pretrained(str(tokenizer or home), **options)
        model = load_pretrained(home, trust_remote_code, dtype=torch.float32, **placement)
        put_adapter(model, Path(folder))
        if offload_folder is None:
            model.to(checked_device(device))
    tokens = reader(list(prompts), truncation=True, max_length=max_length)["input_ids"]
    if empty := [number for number, ids in enumerate(tokens, start=1) if not ids]:
        where = tokenizer or folder
        raise SigmergeError(f"Prompt {empty[0]} is empty to the tokenizer of {where}.")
    try:
        with in_memory(f"{folder}: the probe pass"):
            states = _pooled_states(model.eval(), tokens, batch_size, progress)
    finally:
        del model
        gc.collect()  # the next expert must not be loaded beside this one
        free_cached()
    return np.stack([prompt_gram(layer) for layer in states])


def _pooled_states(
    model: Any,
    tokens: Sequence[Sequence[int]],
    batch_size: int,
    progress: Callable[[int, int], None] | None,
) -> Float32[np.ndarray, "layers prompts width"]:
    """H: the mean of every block's output over each prompt's tokens, pooled in float32."""
    import torch

    blocks = decoder_blocks(model)
    # Offloaded weights are on no device until their turn comes.
    devices = [weight.device for weight in model.parameters() if weight.device.type != "meta"]
    device = devices[0] if devices else torch.device("cpu")
    by_length = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
    pooled = []
    with torch.inference_mode():
        for start in range(0, len(tokens), batch_size):
            batch = by_length[start : start + batch_size]
            ids, mask = _padded([tokens[index] for index in batch], device)
            with _recorded(blocks, mask) as means:
                # The head is left out: its logits are never read and can be larger than a block.
                model.base_model(**_inputs(model, ids, mask), use_cache=False)
            pooled.append(np.stack(means))
            if progress is not None:
                progress(start + len(batch), len(tokens))
    return np.concatenate(pooled, axis=1)[:, np.argsort(by_length)]


def _padded(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, padded on the right whatever the tokenizer prefers.

    On the right, a causal model gives every real token the position and the context it has without
    padding; what stands in the padding is then never seen.
    """
    import torch

    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask.to(device)


@contextmanager
def _recorded(blocks: nn.ModuleList, mask: torch.Tensor) -> Iterator[list[np.ndarray]]:
    """While open, a forward pass fills the list with each block's mask-weighted mean output."""
    means: list[np.ndarray] = [np.empty(0)] * len(blocks)

    def record(layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            weight = mask.to(hidden.device).unsqueeze(-1)
            # Not hidden · weight: what a masked position holds may be NaN.
            total = hidden.float().masked_fill(weight == 0, 0.0).sum(dim=1)
            means[layer] = (total / weight.sum(dim=1)).cpu().numpy()

        return hook

    handles = [block.register_forward_hook(record(i)) for i, block in enumerate(blocks)]
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()


def _inputs(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The model inputs of a text; an encoder-decoder gets it as input and output."""
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return inputs


def decoder_blocks(model: Any) -> nn.ModuleList:
    """The numbered decoder blocks, found as in a checkpoint: from the parameters' names.

    The last entry of the model's own `hidden_states` would be after the final norm, so hooks
    read the blocks themselves.
    """
    stack = find_stack((name, weight.numel()) for name, weight in model.named_parameters())
    if not stack.depth:
        raise PoolError(f"{type(model).__name__} has no numbered blocks; it cannot be probed.")
    blocks: nn.ModuleList = model.get_submodule(stack.prefix.removesuffix("."))
    return blocks
