"""Layers of several models stacked into a new one, still without reading a tensor.

A stacked pool is a pool whose members hold, under the names of the result, the tensors that go into
it. A member has only those layers of the result that are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sigmerge.checkpoints.folder import Checkpoint, is_before
from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.pool import Pool, clash, listed, with_heads
from sigmerge.errors import PoolError

DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""How configurations call the number of layers."""


@dataclass(frozen=True)
class LayerRange:
    """The layers `first` … `last` − 1 of a member."""

    member: str
    first: int
    last: int


@dataclass(frozen=True)
class StackedSlice:
    """What a run of layers is made of; `base` is the member that task vectors start from."""

    sources: tuple[LayerRange, ...]
    base: str | None

    @property
    def depth(self) -> int:
        return self.sources[0].last - self.sources[0].first


class _Part(NamedTuple):
    """A tensor of the result, and what it is made of, by member."""

    name: str
    base: str | None
    stored: dict[str, Tensor]
    lacking: list[str]


def stacked_pool(
    members: Mapping[str, Checkpoint],
    slices: Sequence[StackedSlice],
    home: Checkpoint,
    moved: Callable[[Mapping[str, Checkpoint]], dict[str, Checkpoint]] | None = None,
) -> Pool:
    """The pool of a stacked model. `home` gives its configuration and its other files.

    `moved` brings the members to one vocabulary.
    """
    if problems := list(_out_of_range(members, slices)):
        raise PoolError("The slices do not fit their models:", problems)
    raw = with_heads(Pool(None, dict(members)))
    if moved is not None:
        raw = replace(raw, experts=moved(raw.experts))
    experts: dict[str, dict[str, Tensor]] = {}
    bases: dict[str, Tensor] = {}
    output: dict[str, Tensor] = {}
    for part in _parts(raw.experts, slices):
        problems += [f"{member}: has nothing for {part.name}" for member in part.lacking]
        output[part.name] = first = next(iter(part.stored.values()))
        for member, tensor in part.stored.items():
            if why := clash(first, tensor):
                problems.append(f"{member}: {tensor.name}, for {part.name}: {why}")
            if member == part.base:
                bases[part.name] = tensor
            else:
                experts.setdefault(member, {})[part.name] = tensor
    result = replace(home, tensors=output, config=stacked_config(home, members, slices))
    if moved is None:
        problems += _different_rows(result)
    if problems:
        raise PoolError("The slices do not fit together:", listed("", problems))
    starts = {piece.base for piece in slices if piece.base}
    files = dict.fromkeys(
        file for name in members if name in starts for file in members[name].files
    )
    return Pool(
        replace(home, tensors=bases, files=tuple(files)) if bases else None,
        {name: replace(members[name], tensors=found) for name, found in experts.items()},
        raw.untied,
        result,
    )


def _different_rows(result: Checkpoint) -> list[str]:
    """Whether embedding, head and configuration are of one vocabulary, where they are known."""
    rows = {name: result.tensors[name].shape[0] for name in (result.embedding, result.head) if name}
    if isinstance(size := result.config.get("vocab_size"), int):
        rows["vocab_size"] = size
    if len(set(rows.values())) < 2:
        return []
    told = ", ".join(f"{name} {count}" for name, count in rows.items())
    return [
        f"the vocabularies differ ({told}); say tokenizer_source: union, base or a model to bring "
        "them together"
    ]


def _out_of_range(
    members: Mapping[str, Checkpoint], slices: Sequence[StackedSlice]
) -> Iterator[str]:
    for piece in slices:
        for source in piece.sources:
            depth = members[source.member].stack.depth
            if source.first < source.last > depth:
                yield f"{source.member}: has {depth} layers, not {source.last}"


def _parts(members: Mapping[str, Checkpoint], slices: Sequence[StackedSlice]) -> Iterator[_Part]:
    prefix = next(iter(members.values())).stack.prefix
    layers = {name: _by_layer(member) for name, member in members.items()}
    yield from _outside(members, slices[0], before=True)
    block = 0
    for piece in slices:
        for offset in range(piece.depth):
            found = {s.member: layers[s.member][s.first + offset] for s in piece.sources}
            yield from _joined(f"{prefix}{block}.", piece, found)
            block += 1
    yield from _outside(members, slices[-1], before=False)


def _outside(
    members: Mapping[str, Checkpoint], piece: StackedSlice, before: bool
) -> Iterator[_Part]:
    """The tensors before the stack, or those after it."""
    found = {
        source.member: {
            name: tensor
            for name, tensor in members[source.member].tensors.items()
            if members[source.member].stack.block_of(name) is None and is_before(name) == before
        }
        for source in piece.sources
    }
    yield from _joined("", piece, found)


def _joined(
    prefix: str, piece: StackedSlice, found: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[_Part]:
    names = sorted({name for tensors in found.values() for name in tensors})
    for name in names:
        stored = {member: tensors[name] for member, tensors in found.items() if name in tensors}
        lacking = [member for member in found if member not in stored]
        yield _Part(prefix + name, piece.base, stored, lacking)


def _by_layer(member: Checkpoint) -> list[dict[str, Tensor]]:
    layers: list[dict[str, Tensor]] = [{} for _ in range(member.stack.depth)]
    for name, tensor in member.tensors.items():
        block = member.stack.block_of(name)
        if block is not None:
            layers[block][name.removeprefix(f"{member.stack.prefix}{block}.")] = tensor
    return layers


def stacked_config(
    home: Checkpoint, members: Mapping[str, Checkpoint], slices: Sequence[StackedSlice]
) -> dict[str, Any]:
    """The configuration of `home` with the new depth, and its lists of one entry a layer."""
    places = [
        (piece.sources[0].member, piece.sources[0].first + offset)
        for piece in slices
        for offset in range(piece.depth)
    ]

    def changed(config: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> Any:
        result = dict(config)
        for key, value in config.items():
            if key in DEPTH_KEYS:
                result[key] = len(places)
            elif key == "text_config" and isinstance(value, dict):
                result[key] = changed(value, {m: c.get(key) or {} for m, c in others.items()})
            elif isinstance(value, list) and len(value) == home.stack.depth:
                lists = {m: c.get(key) for m, c in others.items()}
                if all(isinstance(lists[m], list) and i < len(lists[m] or []) for m, i in places):
                    result[key] = [(lists[m] or [])[i] for m, i in places]
        return result

    merged: dict[str, Any] = changed(home.config, {m: c.config for m, c in members.items()})
    return merged
