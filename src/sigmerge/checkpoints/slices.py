"""Layers of several models stacked into a new one, still without reading a tensor.

A stacked pool is a pool whose members hold, under the names of the result, the tensors that go into
it. A member has only those layers of the result that are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sigmerge.checkpoints.computed import disagreements
from sigmerge.checkpoints.folder import Checkpoint, is_before
from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.kinds import LayerSource, is_by_layer, kinds_of, with_kinds
from sigmerge.checkpoints.modules import LAYERLESS, ModulePart, config_key, depth_keys, module_part
from sigmerge.checkpoints.pool import PoolMembers, clash, listed, together
from sigmerge.errors import PoolError
from sigmerge.messages import shown


@dataclass(frozen=True)
class LayerRange:
    """The layers `first` … `last` − 1 of a member."""

    member: str
    first: int
    last: int


@dataclass(frozen=True)
class StackedSlice:
    """What a run of layers is made of; `base` is the member that task vectors start from.

    `module` is the part of the model that they are layers of; "" is all of it.
    """

    sources: tuple[LayerRange, ...]
    base: str | None
    module: str = ""

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
) -> PoolMembers:
    """The pool of a stacked model. `home` gives its configuration and its other files.

    `moved` brings the members to one vocabulary.
    """
    if problems := list(_out_of_range(members, slices)):
        raise PoolError("The slices do not fit their models:", problems)
    raw = together(None, members)
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
    config, unsaid = stacked_config(home, members, slices)
    problems += unsaid
    result = replace(home, tensors=output, config=config)
    if moved is None:
        problems += _different_rows(result)
    if problems:
        raise PoolError("The slices do not fit together:", listed("", problems))
    starts = {piece.base for piece in slices if piece.base}
    files = dict.fromkeys(
        file for name in members if name in starts for file in members[name].files
    )
    return PoolMembers(
        replace(home, tensors=bases, files=tuple(files)) if bases else None,
        {name: replace(members[name], tensors=found) for name, found in experts.items()},
        raw.untied,
        result,
        notes=raw.notes,
        disagreements=tuple(_disagreements(members, slices, home)),
    )


def _disagreements(
    members: Mapping[str, Checkpoint], slices: Sequence[StackedSlice], home: Checkpoint
) -> Iterator[str]:
    """What the members compute otherwise than `home`, or than each other in one layer."""
    configs = {name: member.config for name, member in members.items()}
    taken = next((name for name, member in members.items() if member is home), "reference")
    yield from disagreements({taken: home.config, **configs}, taken, kinds=False)
    for module, pieces, parts in _modules(members, slices):
        kinds = {name: _kinds(configs[name], module, parts[name]) for name in parts}
        start = 0
        for piece in pieces:
            yield from _mixed(piece, kinds, start)
            start += piece.depth


def _kinds(config: Mapping[str, Any], module: str, part: ModulePart) -> Mapping[str, list[Any]]:
    key = config_key(module or "text_decoder", config)
    return {} if module in LAYERLESS else kinds_of(config[key] if key else config, part.stack.depth)


def _mixed(
    piece: StackedSlice, kinds: Mapping[str, Mapping[str, list[Any]]], start: int
) -> Iterator[str]:
    """Of every rule, the first layer of a slice that is made of layers of several kinds."""
    for rule in kinds[piece.sources[0].member]:
        for offset in range(piece.depth):
            found = {
                f"layer {source.first + offset} of {source.member}": of[rule][source.first + offset]
                for source in piece.sources
                if rule in (of := kinds[source.member])
            }
            if len({repr(kind) for kind in found.values()}) > 1:
                told = ", ".join(f"{shown(kind)} in {layer}" for layer, kind in found.items())
                yield f"{rule} of layer {start + offset}: {told}; the result takes the first"
                break


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


def by_module(slices: Sequence[StackedSlice]) -> dict[str, list[StackedSlice]]:
    """The slices of every module."""
    found: dict[str, list[StackedSlice]] = {}
    for piece in slices:
        found.setdefault(piece.module, []).append(piece)
    return found


def _modules(
    members: Mapping[str, Checkpoint], slices: Sequence[StackedSlice]
) -> Iterator[tuple[str, list[StackedSlice], dict[str, ModulePart]]]:
    """Every module with its slices, and what the members have of it."""
    found = by_module(slices)
    for module, pieces in found.items():
        named = dict.fromkeys(source.member for piece in pieces for source in piece.sources)
        yield module, pieces, {n: module_part(members[n], module, found) for n in named}


def _out_of_range(
    members: Mapping[str, Checkpoint], slices: Sequence[StackedSlice]
) -> Iterator[str]:
    for module, pieces, parts in _modules(members, slices):
        what = f"{module}: " if module else ""
        for name, part in parts.items():
            if part.stack.gap is not None:
                gap = f"{part.stack.prefix}{part.stack.gap}.*"
                yield f"{name}: no tensor is called {gap}; export or download the model again"
        for piece in pieces:
            if len({source.last - source.first for source in piece.sources}) > 1:
                told = ", ".join(f"{s.member} has {s.last - s.first}" for s in piece.sources)
                yield (
                    f"{what}must have as many layers in all its models; {told}; say with slices: "
                    "which layers belong together"
                )
            for source in piece.sources:
                depth = parts[source.member].stack.depth
                if source.first < source.last > depth:
                    yield f"{what}{source.member}: has {depth} layers, not {source.last}"


def _parts(members: Mapping[str, Checkpoint], slices: Sequence[StackedSlice]) -> Iterator[_Part]:
    for _, pieces, parts in _modules(members, slices):
        prefix = next(iter(parts.values())).stack.prefix
        layers = {name: _by_layer(part) for name, part in parts.items()}
        yield from _outside(parts, pieces[0], before=True)
        block = 0
        for piece in pieces:
            for offset in range(piece.depth):
                found = {s.member: layers[s.member][s.first + offset] for s in piece.sources}
                yield from _joined(f"{prefix}{block}.", piece, found)
                block += 1
        yield from _outside(parts, pieces[-1], before=False)


def _outside(parts: Mapping[str, ModulePart], piece: StackedSlice, before: bool) -> Iterator[_Part]:
    """The tensors before the stack, or those after it."""
    found = {
        source.member: {
            name: tensor
            for name, tensor in parts[source.member].tensors.items()
            if parts[source.member].stack.block_of(name) is None and is_before(name) == before
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


def _by_layer(part: ModulePart) -> list[dict[str, Tensor]]:
    layers: list[dict[str, Tensor]] = [{} for _ in range(part.stack.depth)]
    for name, tensor in part.tensors.items():
        block = part.stack.block_of(name)
        if block is not None:
            layers[block][name.removeprefix(f"{part.stack.prefix}{block}.")] = tensor
    return layers


def stacked_config(
    home: Checkpoint, members: Mapping[str, Checkpoint], slices: Sequence[StackedSlice]
) -> tuple[dict[str, Any], list[str]]:
    """The configuration of `home` with the new depths, and what it says of every layer.

    And problems: what a layer computes may follow from its index, and no configuration can say it.
    """
    result, problems = dict(home.config), []
    found = by_module(slices)
    for module, pieces, parts in _modules(members, slices):
        depth = module_part(home, module, found).stack.depth
        if module in LAYERLESS:
            continue
        places = [
            (piece.sources[0].member, piece.sources[0].first + offset)
            for piece in pieces
            for offset in range(piece.depth)
        ]
        depths = {name: part.stack.depth for name, part in parts.items()}
        if not module and home.config.get("is_encoder_decoder"):
            module = "decoder"  # the stack of such a model
        key = config_key(module, result)
        others = {name: members[name].config for name in parts}
        if key is not None:
            others = {name: config.get(key) or {} for name, config in others.items()}
        entries, unsaid = _stacked_entries(
            result[key] if key else result,
            [LayerSource(others[member], depths[member], place) for member, place in places],
            module,
            depth,
        )
        result = {**result, key: entries} if key else entries
        problems += unsaid
    return result, problems


def _stacked_entries(
    config: Mapping[str, Any], sources: Sequence[LayerSource], module: str, depth: int
) -> tuple[dict[str, Any], list[str]]:
    """The configuration of a module that had `depth` layers."""
    result, keys, problems = dict(config), depth_keys(module), list[str]()
    if module and len(sources) != depth and not any(key in config for key in keys):
        result[keys[0]] = len(sources)  # a configuration may leave out what is the default
    for key, value in config.items():
        if key in keys:
            result[key] = len(sources)
        elif not module and key == "text_config" and isinstance(value, dict):
            inner = [source._replace(config=source.config.get(key) or {}) for source in sources]
            result[key], problems = _stacked_entries(value, inner, module, depth)
        elif is_by_layer(key, value, depth) and all(
            is_by_layer(key, source.config.get(key), source.depth) for source in sources
        ):
            result[key] = [source.config[key][source.place] for source in sources]
    said, unsaid = with_kinds(result, sources)
    return dict(said), problems + unsaid
