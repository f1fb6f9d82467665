"""Where tensors go: how many shards an output has, and in which order its blocks are made."""

from __future__ import annotations

import pytest

from sigmerge.checkpoints.writer import Layout, parse_size, plan_layout
from sigmerge.errors import RecipeError

GB = 10**9


def of_layers(count: int, nbytes: int) -> Layout:
    """Layers of one tensor each."""
    return plan_layout([(f"layers.{i}", "BF16", (nbytes // 2,)) for i in range(count)])


@pytest.mark.parametrize(
    ("layers", "nbytes", "shards"),
    [
        (10, 40 * 10**6, 1),  # 0.4 GB
        (12, 100 * 10**6, 3),  # 1.2 GB: none larger than 500 MB, and none is needed
        (32, 100 * 10**6, 7),  # 3.2 GB: an eighth is less than 500 MB
        (32, GB // 2, 8),  # 16 GB: eight of 2 GB
        (80, 2 * GB, 40),  # 160 GB: two layers fit into 5 GB
    ],
)
def test_a_large_model_has_eight_shards_or_more(layers: int, nbytes: int, shards: int) -> None:
    layout = of_layers(layers, nbytes)
    assert len(layout.files) == shards
    assert len({slot.shard for slot in layout.slots.values()}) == shards


def made(layout: Layout, layers: list[int], *, in_order: bool = False) -> list[int]:
    return layout.in_turn(layers, lambda index: [f"layers.{index}"], in_order=in_order)


def test_shards_take_turns() -> None:
    layout = of_layers(16, GB)  # eight shards of two layers
    evens, odds = list(range(0, 16, 2)), list(range(1, 16, 2))
    assert made(layout, list(range(16))) == [*evens, *odds]
    assert made(layout, [9, 3, 2, 8, 15]) == [2, 8, 15, 3, 9]
    assert made(layout, list(range(15, -1, -1)), in_order=True) == list(range(16))


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        (18, [range(9)]),  # the ninth is not left over to be made alone
        (32, [range(8), range(8, 16)]),
        (46, [range(12), range(12, 23)]),
    ],
)
def test_of_many_shards_eight_or_a_few_more_are_made_at_a_time(
    layers: int, groups: list[range]
) -> None:
    layout = of_layers(layers, 2 * GB)  # two layers a shard
    order = [layout.slots[f"layers.{i}"].shard for i in made(layout, list(range(layers)))]
    assert order == [shard for group in groups for shard in [*group, *group]]


@pytest.mark.parametrize("text", ["9" * 400, "1." + "9" * 400, "9" * 400 + "GB", "0", "5 TB", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="is not a size"):
        parse_size(text)
