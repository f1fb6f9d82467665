"""Task-wise AdaMerging: weights of task vectors that make answers to prompts certain.

Yang et al., AdaMerging, ICLR 2024 (arXiv:2310.02575): the entropy of the model's predictions on
unlabelled inputs is minimised with respect to one coefficient per task vector. Here the prediction
is the first token of the answer. All members are held in memory: meant for small models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from sigmerge.checkpoints.remote import with_weights
from sigmerge.probing.exemplars import read_prompts, tokenizer_of
from sigmerge.probing.loading import loading
from sigmerge.probing.threads import one_torch_thread

DESCENT_STEPS = 100
RATE = 0.01
DRAWN_PROMPTS = 32


def learnt_weights(
    reference: Path,
    experts: Mapping[str, Path],
    start: Mapping[str, float],
    prompts: Path,
    steps: int = DESCENT_STEPS,
    rate: float = RATE,
) -> tuple[float, ...]:
    """One weight per expert, in their order, from the weights to start with."""
    model = _loaded(reference)
    base = {name: value.detach().clone() for name, value in model.named_parameters()}
    vectors = []
    for folder in experts.values():
        tuned = dict(_loaded(folder).named_parameters())
        vectors.append({name: tuned[name].detach() - base[name] for name in base})
    tokenizer = tokenizer_of(reference)
    encoded = [tokenizer(prompt)["input_ids"] for prompt in read_prompts(prompts)]
    weights = torch.tensor([start[name] for name in experts], requires_grad=True)
    optimiser = torch.optim.Adam([weights], lr=rate)
    generator = torch.Generator().manual_seed(0)
    with one_torch_thread():
        for _ in range(steps):
            chosen = torch.randperm(len(encoded), generator=generator)[:DRAWN_PROMPTS].tolist()
            merged = {
                name: value + sum(w * v[name] for w, v in zip(weights, vectors, strict=True))
                for name, value in base.items()
            }
            entropy = _entropy(model, merged, [encoded[row] for row in chosen])
            optimiser.zero_grad()
            entropy.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            with torch.no_grad():
                weights.clamp_(min=0.0)
    return tuple(float(w) for w in weights.detach())


def _loaded(folder: Path) -> torch.nn.Module:
    with loading(folder, "adamerging"):
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            with_weights(folder), dtype=torch.float32
        )
    return model.eval()


def _entropy(
    model: torch.nn.Module, merged: Mapping[str, torch.Tensor], rows: list[list[int]]
) -> torch.Tensor:
    """The mean entropy of the next token after every prompt; prompts of one length together."""
    total = torch.zeros(())
    for length in sorted({len(row) for row in rows}):
        ids = torch.tensor([row for row in rows if len(row) == length])
        logits = functional_call(model, dict(merged), (ids,)).logits[:, -1]
        chances = logits.log_softmax(-1)
        total = total - (chances.exp() * chances).sum()
    return total / len(rows)
