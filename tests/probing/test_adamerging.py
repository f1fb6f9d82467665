"""AdaMerging on the embedded pool: certain answers, without any label."""

from __future__ import annotations

import torch

from sigmerge.nano.facts import NANO_DOMAINS
from sigmerge.nano.files import POOL, PROBE, REFERENCE
from sigmerge.probing import adamerging
from sigmerge.probing.exemplars import read_prompts, tokenizer_of

EXPERTS = {domain: POOL / domain for domain in NANO_DOMAINS}
START = dict.fromkeys(NANO_DOMAINS, 0.4)


def entropy(weights: tuple[float, ...]) -> float:
    """Of the answers to all prompts, by loading and adding once more."""
    model = adamerging._loaded(POOL / REFERENCE)
    merged = {name: value.detach().clone() for name, value in model.named_parameters()}
    base = {name: value.clone() for name, value in merged.items()}
    for weight, folder in zip(weights, EXPERTS.values(), strict=True):
        for name, value in adamerging._loaded(folder).named_parameters():
            merged[name] += weight * (value.detach() - base[name])
    tokenizer = tokenizer_of(POOL / REFERENCE)
    rows = [tokenizer(prompt)["input_ids"] for prompt in read_prompts(POOL / PROBE)]
    with torch.no_grad():
        return float(adamerging._entropy(model, merged, rows))


def test_a_few_steps_lower_the_entropy() -> None:
    learnt = adamerging.learnt_weights(
        POOL / REFERENCE, EXPERTS, START, POOL / PROBE, steps=3, rate=0.05
    )
    assert entropy(learnt) < entropy((0.4,) * 5)
    again = adamerging.learnt_weights(
        POOL / REFERENCE, EXPERTS, START, POOL / PROBE, steps=3, rate=0.05
    )
    assert again == learnt and all(weight >= 0 for weight in learnt)
