"""The numbered stack, found from the names of eight families and a mixture of experts."""

from __future__ import annotations

import math

import pytest

from sigmerge.checkpoints.blocks import Stack, find_stack, other_stacks
from tests.pools import STYLES, shapes


def sized(names: dict[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    return [(name, math.prod(shape)) for name, shape in names.items()]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layers", [1, 3, 12])
def test_every_style(style: str, layers: int) -> None:
    named = shapes(style, layers, tied=False)
    stack = find_stack(sized(named))
    assert stack == Stack(STYLES[style].prefix, layers)
    outside = {name for name in named if stack.block_of(name) is None}
    assert outside == {*STYLES[style].outside, STYLES[style].head}
    for i in range(layers):
        inside = {name for name in named if stack.block_of(name) == i}
        assert inside == {f"{STYLES[style].prefix}{i}.{name}" for name in STYLES[style].inside}


def test_experts_of_a_mixture_stay_in_their_block() -> None:
    stack = find_stack(sized(shapes("moe", 2)))
    assert stack.block_of("model.layers.1.block_sparse_moe.experts.2.w1.weight") == 1


def test_names_without_a_prefix() -> None:
    """The first GPT-2 checkpoint has no `transformer.` before its names."""
    stack = find_stack([("wte.weight", 9), ("h.0.ln_1.weight", 1), ("h.1.ln_1.weight", 1)])
    assert stack == Stack("h.", 2)
    assert stack.block_of("h.1.ln_1.weight") == 1


def test_the_larger_of_two_stacks_is_the_decoder() -> None:
    names = [(f"vision_tower.layers.{i}.w", 10) for i in range(8)]
    names += [(f"language_model.model.layers.{i}.w", 100) for i in range(2)]
    assert find_stack(names) == Stack("language_model.model.layers.", 2)


@pytest.mark.parametrize(
    ("encoder", "decoder"),
    [("model.visual.blocks.", "model.layers."), ("encoder.block.", "decoder.block."),
     ("vision_model.encoder.layers.", "language_model.model.layers.")],
)  # fmt: skip
def test_a_larger_encoder_is_not_the_decoder(encoder: str, decoder: str) -> None:
    names = [(f"{encoder}{i}.w", 100) for i in range(8)]
    names += [("projector.0.w", 30), ("projector.2.w", 30)]
    assert find_stack(names) == Stack(encoder, 8)
    names += [(f"{decoder}{i}.w", 100) for i in range(2)]
    assert find_stack(names) == Stack(decoder, 2)


@pytest.mark.parametrize(("present", "gap"), [((0, 2), 1), ((1, 2), 0), ((0, 1, 999999999), 2)])
def test_a_stack_with_a_gap_says_where(present: tuple[int, ...], gap: int) -> None:
    stack = find_stack([(f"layers.{i}.w", 5) for i in present])
    assert stack == Stack("layers.", len(present), gap)


def test_gaps_outside_the_decoder_do_not_matter() -> None:
    """As in a projector: a Sequential whose activation has a number but no tensor."""
    names = [("projector.0.weight", 5), ("projector.2.weight", 5)]
    names += [(f"model.layers.{i}.w", 100) for i in range(2)]
    assert find_stack(names) == Stack("model.layers.", 2)


def test_further_stacks_are_named() -> None:
    names = [f"{stack}.{i}.w" for stack in ("model.layers", "vision.blocks") for i in range(2)]
    names += ["projector.0.weight", "projector.2.weight", "heads.0.weight", "embed.weight"]
    assert other_stacks(names, Stack("model.layers.", 2)) == ["vision.blocks."]


def test_no_stack_at_all() -> None:
    stack = find_stack([("embed.weight", 5), ("2.weight", 5)])
    assert stack.depth == 0
    assert stack.block_of("2.weight") is None


def test_a_longer_number_is_not_taken_for_a_shorter_one() -> None:
    stack = find_stack([(f"model.layers.{i}.w", 1) for i in range(12)])
    assert stack.block_of("model.layers.11.w") == 11
    assert stack.block_of("model.layers.1.w") == 1
    assert stack.block_of("model.layersx.1.w") is None
