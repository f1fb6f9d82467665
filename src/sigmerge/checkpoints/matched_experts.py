"""Experts of mixtures brought to one order: `match_experts: true` in a recipe.

A router's rows and the experts behind them can stand in any order, and the model computes the same.
So for every router the experts of each member are assigned to those of the layout's checkpoint, and
merged with these: the assignment has the largest sum of cosines, over every matrix of an expert and
its row of the router. Of equal ones an expert stays where it is. Where a router chooses
groups before experts (`n_group`), groups are assigned to groups.

Values are rounded to 12 bits of the largest of their matrix. Products of such integers and their
sums are exact in float64, so the assignment is the same with any threads and instruction set.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt

import numpy as np

from sigmerge.checkpoints.blocks import natural
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.pool import PoolMembers, listed
from sigmerge.checkpoints.reader import Reader
from sigmerge.checkpoints.source import FormedValues
from sigmerge.checkpoints.vocabularies import MovedRows
from sigmerge.core import TILE, Array
from sigmerge.errors import PoolError
from sigmerge.files.identity import InputIdentity, identify

_ONE = re.compile(r"(.+)\.experts\.(\d+)\.(.+)")
_STACKED = re.compile(r"(.+)\.(experts\.(?!\d).+|(?:input|output)_linear\.weight)")
_ROUTER = re.compile(
    r"\.(gate|router|moe_statics)\.[\w.]+|\.(e_score_correction_bias|expert_bias)(\.\w+)?"
)
"""What follows the name of the part that has the experts, in names of its router's tensors."""
_LEVELS = 2047.0
_HELD = 1 << 22
"""Values of two members that are compared at a time."""
_STAYS = 1e-9
"""What an expert's own place counts for, in cosines."""

_Order = tuple[int, ...]
"""By place, the expert that comes to stand there."""
_known: dict[tuple[tuple[InputIdentity, ...], ...], tuple[dict[str, _Order], dict[str, float]]] = {}
"""Assignments and movements by the files of two members, for as long as the process lives."""


@dataclass(frozen=True)
class RoutedExperts:
    """The experts behind one router. `single` are names by what they hold and by expert, `stacked`
    of tensors with a row for each expert, as the router's are."""

    count: int
    single: Mapping[str, Sequence[str]]
    stacked: Sequence[str]


def with_matched_experts(pool: PoolMembers) -> PoolMembers:
    """The pool with every member's experts in the order of the layout's, and notes about it."""
    home = pool.reference or next(iter(pool.experts.values()))
    mixtures = find_mixtures(home)
    groups = _groups(home)
    orders: dict[str, Mapping[str, _Order]] = {}
    members, notes = dict(pool.members), []
    for name, member in pool.members.items():
        if member is home:
            continue
        key = identify(home.files), identify(member.files)
        if key not in _known:
            _known[key] = _matched(home, member, mixtures, groups)
        orders[name], moved = _known[key]
        members[name] = _ordered(member, mixtures, orders[name])
        notes += _told(name, orders[name], moved)
    experts = {name: members[name] for name in pool.experts}
    return replace(pool, experts=experts, matched=orders, notes=(*pool.notes, *notes))


def find_mixtures(checkpoint: Checkpoint) -> dict[str, RoutedExperts]:
    """The mixtures of a checkpoint by the name of the part that has their experts and router."""
    single: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    stacked: dict[str, list[str]] = defaultdict(list)
    tensors = {n: t for n, t in checkpoint.tensors.items() if t.floating}
    for name in tensors:
        if found := _ONE.fullmatch(name):
            single[found[1]][found[3]][int(found[2])] = name
        elif found := _STACKED.fullmatch(name):
            stacked[found[1]].append(name)
    mixtures, problems = {}, []
    for part in sorted({*single, *stacked}, key=natural):
        router = [n for n in tensors if n.startswith(part) and _ROUTER.fullmatch(n[len(part) :])]
        rows = {tensors[name].shape[0] for name in router if len(tensors[name].shape) > 1}
        count = max(rows, default=0)
        by_row = sorted([*stacked[part], *router])
        whole = all(sorted(by) == list(range(count)) for by in single[part].values())
        if not count or not whole or not all(_rows(tensors[n]) == count for n in by_row):
            problems.append(f"{part}: its router and its experts do not show which row is whose")
            continue
        each = {kind: [by[i] for i in range(count)] for kind, by in single[part].items()}
        mixtures[part] = RoutedExperts(count, each, by_row)
    if not mixtures and not problems:
        problems.append(f"{checkpoint.place}: has no experts behind routers; leave it out")
    if problems:
        raise PoolError("match_experts: cannot be done:", listed("", problems))
    return mixtures


def _rows(tensor: Tensor) -> int:
    one = len(tensor.shape) == 2 and tensor.shape[0] == 1
    return tensor.shape[int(one)] if tensor.shape else 0


def _groups(checkpoint: Checkpoint) -> int:
    """How many groups a router chooses from before it chooses experts."""
    config = {**checkpoint.config, **(checkpoint.config.get("text_config") or {})}
    found = config.get("n_group")
    return found if isinstance(found, int) and found > 1 else 1


def _matched(
    home: Checkpoint, member: Checkpoint, mixtures: Mapping[str, RoutedExperts], groups: int
) -> tuple[dict[str, _Order], dict[str, float]]:
    """By mixture the order of a member's experts, and how far what lies before its router moved."""
    orders, moved = {}, {}
    with Reader() as reader:
        values = FormedValues(reader)
        for part, mixture in mixtures.items():
            near = np.zeros((mixture.count, mixture.count))
            for ours, theirs, width in _compared(home, member, mixture):
                near += _cosines(ours, theirs, width, values)
            orders[part] = _assigned(near, groups if mixture.count % groups == 0 else 1)
            moved[part] = _distance(home, member, part, values)
    return orders, moved


_Starts = list[tuple[Tensor, int]]
"""Where the values of each expert begin."""


def _compared(
    home: Checkpoint, member: Checkpoint, mixture: RoutedExperts
) -> Iterator[tuple[_Starts, _Starts, int]]:
    """Every matrix of the experts in both models, and the routers' rows, with their length."""
    for names in mixture.single.values():
        ours, theirs = ([(c.tensors[n], 0) for n in names] for c in (home, member))
        yield ours, theirs, prod(ours[0][0].shape)
    for name in mixture.stacked:
        width = home.tensors[name].size // mixture.count
        if width > 1:  # one number says nothing by its angle
            starts = [[(c.tensors[name], i * width) for i in range(mixture.count)]
                      for c in (home, member)]  # fmt: skip
            yield starts[0], starts[1], width


def _cosines(ours: _Starts, theirs: _Starts, width: int, values: FormedValues) -> Array:
    """Cosines of every expert's matrix with every other model's; 0 where one is zero."""
    count = len(ours)
    step = max(TILE, _HELD // (2 * count))
    scales = [[_scale(*one, width, step, values) for one in side] for side in (ours, theirs)]
    dots, squares = np.zeros((count, count)), np.zeros((2, count))
    for start in range(0, width, step):
        stop = min(start + step, width)
        both = [
            np.stack([
                np.rint(values(tensor, at + start, at + stop) * scale)
                for (tensor, at), scale in zip(side, own, strict=True)
            ])
            for side, own in zip((ours, theirs), scales, strict=True)
        ]  # fmt: skip
        dots += both[0] @ both[1].T
        squares += [(each * each).sum(axis=1) for each in both]
    lengths = np.sqrt(np.outer(squares[0], squares[1]))
    return np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0)


def _scale(tensor: Tensor, at: int, width: int, step: int, values: FormedValues) -> np.float64:
    """What brings the largest value to the last level."""
    largest = 0.0
    for start in range(at, at + width, step):
        piece = values(tensor, start, min(start + step, at + width))
        largest = max(largest, float(np.abs(piece).max()))
        if not np.isfinite(piece).all():
            raise PoolError(f"{tensor.name} in {tensor.file}: holds values that are not finite, so "
                            "its experts cannot be matched.")  # fmt: skip
    return np.float64(_LEVELS / largest if largest else 0.0)


def _assigned(near: Array, groups: int) -> _Order:
    """The order with the largest sum; groups as a whole where there are several."""
    size = len(near) // groups
    near = near + _STAYS * np.eye(len(near))
    pieces = near.reshape(groups, size, groups, size).swapaxes(1, 2)
    inner = [[assignment(piece) for piece in row] for row in pieces]
    sums = [
        [float(piece[np.arange(size), order].sum()) for piece, order in zip(row, own, strict=True)]
        for row, own in zip(pieces, inner, strict=True)
    ]
    outer = assignment(np.array(sums))
    return tuple(int(other * size + i) for group, other in enumerate(outer)
                 for i in inner[group][other])  # fmt: skip


def assignment(gain: Array) -> list[int]:
    """The column of each row that makes the sum largest (the Hungarian method, by shortest
    augmenting paths)."""
    count = len(gain)
    cost = np.zeros((count + 1, count + 1))
    cost[1:, 1:] = gain.max() - gain
    of_row, of_column = np.zeros(count + 1), np.zeros(count + 1)
    taken = np.zeros(count + 1, np.int64)
    for row in range(1, count + 1):
        least, back = np.full(count + 1, np.inf), np.zeros(count + 1, np.int64)
        seen = np.zeros(count + 1, bool)
        taken[0], column = row, 0
        while taken[column]:
            seen[column] = True
            at = taken[column]
            left = cost[at] - of_row[at] - of_column
            better = ~seen & (left < least)
            least[better], back[better] = left[better], column
            column = int(np.where(seen, np.inf, least)[1:].argmin()) + 1
            step = least[column]
            of_row[taken[seen]] += step
            of_column[seen] -= step
            least[~seen] -= step
        while column:
            taken[column] = taken[back[column]]
            column = back[column]
    found = np.empty(count, np.int64)
    found[taken[1:] - 1] = np.arange(count)
    return [int(column) for column in found]


def _distance(home: Checkpoint, member: Checkpoint, part: str, values: FormedValues) -> float:
    """‖θ − θ_home‖ / ‖θ_home‖ over what the layer has before its router: attention and norms."""
    block = part.rpartition(".")[0] + "."
    apart = whole = 0.0
    for name, tensor in sorted(home.tensors.items()):
        if not name.startswith(block) or name.startswith(f"{part}.") or not tensor.floating:
            continue
        for start in range(0, tensor.size, TILE):
            stop = min(start + TILE, tensor.size)
            ours, theirs = (
                values(t, start, stop).astype(np.float64) for t in (tensor, member.tensors[name])
            )
            apart += float(np.square(theirs - ours).sum())
            whole += float(np.square(ours).sum())
    return sqrt(apart / whole) if whole else 0.0


def _ordered(
    member: Checkpoint, mixtures: Mapping[str, RoutedExperts], orders: Mapping[str, _Order]
) -> Checkpoint:
    """The member with its experts, and its routers' rows, in these orders."""
    tensors = dict(member.tensors)
    for part, mixture in mixtures.items():
        order = orders[part]
        if order == tuple(range(mixture.count)):
            continue
        for names in mixture.single.values():
            for place, name in enumerate(names):
                tensors[name] = replace(member.tensors[names[order[place]]], name=name)
        for name in mixture.stacked:
            old = member.tensors[name]
            own = np.array(order, np.int64)
            tensors[name] = MovedRows(
                old.name, old.dtype, old.shape, old.file, old.begin, old.end, old, own, {}
            )
    return replace(member, tensors=tensors)


def _told(name: str, orders: Mapping[str, _Order], moved: Mapping[str, float]) -> list[str]:
    """What a user is told of a member: how many experts change places, and if routers moved."""
    places = [place != one for order in orders.values() for place, one in enumerate(order)]
    told = [
        f"{name}: {sum(places)} of {len(places)} experts, in {len(orders)} mixtures, are merged "
        "under another number (plan.json: matched)"
    ]
    part, most = max(moved.items(), key=lambda item: item[1])
    if most:
        told.append(
            f"{name}: what comes before a router moved by up to {100 * most:.2g} % of its norm "
            f"({part}), so its routers read other inputs than those of the other models; "
            "check what the result routes"
        )
    return told
