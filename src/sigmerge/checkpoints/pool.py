"""A pool: the reference and its experts, checked against each other from headers alone."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from sigmerge import messages
from sigmerge.checkpoints.adapter_folders import home_of
from sigmerge.checkpoints.blocks import Stack
from sigmerge.checkpoints.computed import disagreements
from sigmerge.checkpoints.equal import same_bytes
from sigmerge.checkpoints.folder import SHOWN, Checkpoint, is_head
from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.links import is_there
from sigmerge.checkpoints.plain import is_pipeline, open_tensors, require_kinds, require_model
from sigmerge.errors import PoolError
from sigmerge.files.objects import remote_file

TensorChoice = Literal["union", "intersection"]
"""Which tensors a result has, where the members do not have the same."""


@dataclass(frozen=True)
class PoolMembers:
    """`reference` is the model the experts were tuned from; a plain soup may have none.

    `layout` is the checkpoint whose tensors, configuration and tokenizer the output takes over:
    the reference, or else the first expert. `untied` is set when some members store an output head
    of their own and others share it with the embedding: every member is then read as untied.
    `output` is what the result looks like where it is stacked of layers, or has tensors that the
    layout's checkpoint lacks. `added_tokens` are entries
    that the tokenizer of the result has beyond the one it is taken from.
    """

    reference: Checkpoint | None
    experts: Mapping[str, Checkpoint]
    untied: bool = False
    output: Checkpoint | None = None
    added_tokens: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    """Notes for the user about how the members were aligned."""
    disagreements: tuple[str, ...] = ()
    """Where the members' configurations compute something else (ruling 36)."""
    matched: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """By member and mixture, the expert that stands at each place, where experts are matched."""

    @property
    def layout(self) -> Checkpoint:
        return self.output or self.reference or next(iter(self.experts.values()))

    @property
    def names(self) -> list[str]:
        """Tensor names in processing order: sorted."""
        return sorted(self.layout.tensors)

    @property
    def stack(self) -> Stack:
        return self.layout.stack

    @property
    def members(self) -> dict[str, Checkpoint]:
        """Every checkpoint under the name that errors use for it."""
        first = {"reference": self.reference} if self.reference else {}
        return {**first, **self.experts}

    def blocks(self) -> list[tuple[str, list[str]]]:
        """Units of work: ("layer 0", its tensors) … then each tensor outside on its own."""
        inside: list[list[str]] = [[] for _ in range(self.stack.depth)]
        outside: list[tuple[str, list[str]]] = []
        for name in self.names:
            block = self.stack.block_of(name)
            if block is None:
                outside.append((name, [name]))
            else:
                inside[block].append(name)
        return [(f"layer {i}", names) for i, names in enumerate(inside)] + outside


def open_members(members: Mapping[str, Path], allow_pickle: bool) -> dict[str, Checkpoint]:
    """Open checkpoints by name. Problems of all are reported together."""
    opened: dict[str, Checkpoint] = {}
    problems: list[str] = []
    models = any(is_there(home_of(path) / "config.json") for path in members.values())
    for name, path in members.items():
        try:
            opened[name] = open_tensors(path, allow_pickle=allow_pickle)
            if models and opened[name].parts and not is_pipeline(path):
                require_model(opened[name])
        except PoolError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise PoolError("The pool cannot be opened:", problems)
    return opened


def open_pool(
    reference: Path | None,
    experts: Mapping[str, Path],
    *,
    allow_pickle: bool = False,
    outside: bool = True,
    soup: bool = False,
    any_architecture: bool = False,
    moved: Callable[[Mapping[str, Checkpoint]], dict[str, Checkpoint]] | None = None,
    tensors: TensorChoice | None = None,
    match: Callable[[PoolMembers], PoolMembers] | None = None,
) -> PoolMembers:
    """Open and check a pool. All problems of all members are reported together.

    Members may differ in precision. Without `outside`, experts need no tensors outside the numbered
    blocks. In a `soup` the reference may be a member like others, since no task vector is needed.
    With `any_architecture`, what configurations call it need not agree. `moved` brings the members
    to one vocabulary. `tensors` says what becomes of those that not all have. `match` brings
    experts of mixtures to one order.
    """
    members = {**({"reference": reference} if reference else {}), **experts}
    opened = open_members(members, allow_pickle)
    problems: list[str] = []
    base = opened.pop("reference", None) if reference else None
    pool = together(base, opened)
    if moved is not None:
        pool = _rebuilt(pool, moved(pool.members), pool.untied)
    if tensors is not None:
        pool = _chosen(pool, tensors, soup)
    problems += _same_folders(pool.experts if soup else pool.members)
    for name, expert in pool.experts.items():
        if expert is not pool.layout and tensors != "union":
            problems += differences(name, expert, pool.layout, outside, any_architecture)
    if match is not None and not problems:
        pool = match(pool)
    if not problems and not soup:
        problems += _equal_to_reference(pool)
    if problems:
        raise PoolError("The checkpoints do not form a pool:", problems)
    taken = "reference" if pool.reference else next(iter(pool.experts))
    said = disagreements({name: m.config for name, m in pool.members.items()}, taken)
    return replace(pool, disagreements=tuple(said))


def together(reference: Checkpoint | None, experts: Mapping[str, Checkpoint]) -> PoolMembers:
    """The pool of members that are called alike, with or without heads of their own."""
    pool = PoolMembers(reference, experts)
    require_kinds(pool.members)
    if pool.layout.parts:  # which have the names that they have
        return pool
    own = tuple(f"{name}: {note}" for name, m in pool.members.items() for note in m.notes)
    pool = replace(pool, notes=own)
    if len({frozenset(member.tensors) for member in pool.members.values()}) > 1:
        from sigmerge.checkpoints.align_names import alike  # most models are called alike

        members, notes = alike(pool.members)
        pool = replace(_rebuilt(pool, members, untied=False), notes=(*own, *notes))
    return with_heads(pool)


def _chosen(pool: PoolMembers, tensors: TensorChoice, soup: bool) -> PoolMembers:
    """The pool with the tensors that every member has, or with those that any has."""
    members = pool.members
    counts = Counter(name for member in members.values() for name in member.tensors)
    partial = {name for name, count in counts.items() if count < len(members)}
    if not partial:
        return pool
    if tensors == "intersection":
        kept = {
            name: replace(m, tensors={n: t for n, t in m.tensors.items() if n not in partial})
            for name, m in members.items()
        }
        told = f"{messages.few(sorted(partial))}: not in every model, and left out of the result"
        return replace(_rebuilt(pool, kept, pool.untied), notes=(*pool.notes, told))
    if pool.reference is not None and not soup:
        new = sorted(partial - pool.reference.tensors.keys())
        if problems := listed("tensor that the reference does not have", new):
            raise PoolError(
                "tensors: union needs what task vectors start from; say tensors: intersection, or "
                "merge without a base_model:",
                problems,
            )
    every = dict(ChainMap(*({**m.tensors} for m in members.values())))
    problems = [
        f"{name}: {n}: {why}"
        for name, m in members.items()
        for n, t in m.tensors.items()
        if (why := clash(every[n], t))
    ]
    if problems:
        raise PoolError("The checkpoints do not form a pool:", problems[:SHOWN])
    told = f"{messages.few(sorted(partial))}: merged of the models that have them"
    output = replace(pool.layout, tensors=every, files=())
    return replace(pool, output=output, notes=(*pool.notes, told))


def with_heads(pool: PoolMembers) -> PoolMembers:
    """Tied heads: a member without a head of its own reads its embedding in that place.

    A head stored beside `tie_word_embeddings: true` that is a copy of the embedding is left out,
    unless other members are untied. One that differs is what transformers loads.
    """
    tied = [member.tied for member in pool.members.values()]
    if all(tied):
        members = {name: _without_head(member) for name, member in pool.members.items()}
        return _rebuilt(pool, members, untied=False)
    if not any(tied):
        said = [m.config.get("tie_word_embeddings") for m in (pool.layout, *pool.members.values())]
        return replace(pool, untied=bool(said[0]) or False in said)
    head = next(member.head for member in pool.members.values() if member.head)
    members = {name: _with_head(member, head) for name, member in pool.members.items()}
    return _rebuilt(pool, members, untied=True)


def _rebuilt(pool: PoolMembers, members: dict[str, Checkpoint], untied: bool) -> PoolMembers:
    experts = {name: members[name] for name in pool.experts}
    reference = members["reference"] if pool.reference else None
    return replace(pool, reference=reference, experts=experts, untied=untied)


def _without_head(member: Checkpoint) -> Checkpoint:
    kept = {name: tensor for name, tensor in member.tensors.items() if not is_head(name)}
    return replace(member, tensors=kept)


def _with_head(member: Checkpoint, head: str) -> Checkpoint:
    if member.head is not None or member.embedding is None:
        return member
    alias = replace(member.tensors[member.embedding], name=head)
    return replace(member, tensors={**member.tensors, head: alias})


def _same_folders(members: Mapping[str, Checkpoint]) -> list[str]:
    folders = Counter(member.place for member in members.values())
    problems = []
    for folder, count in folders.items():
        if count > 1:
            names = [name for name, member in members.items() if member.place == folder]
            what = "is the reference itself" if "reference" in names else "is given twice"
            problems.append(f"{', '.join(names)}: the folder {folder} {what}")
    return problems


def _architectures(checkpoint: Checkpoint) -> list[str]:
    named = checkpoint.config.get("architectures") or []
    return [named] if isinstance(named, str) else list(named)


def differences(
    name: str,
    expert: Checkpoint,
    layout: Checkpoint,
    outside: bool,
    any_architecture: bool = False,
) -> list[str]:
    problems = []
    ours, theirs = _architectures(layout), _architectures(expert)
    if ours and theirs and ours != theirs and not any_architecture:
        return [f"{name}: architecture {_join(theirs)}, the reference has {_join(ours)}"]
    if expert.stack.depth != layout.stack.depth and not layout.parts:
        return [
            f"{name}: {expert.stack.depth} layers, the reference has {layout.stack.depth}; say "
            "with slices: which layers belong together"
        ]
    sizes = layout.config.get("vocab_size"), expert.config.get("vocab_size")
    wanted = {
        n: t for n, t in layout.tensors.items() if outside or layout.stack.block_of(n) is not None
    }
    rows = [m.tensors[m.embedding].shape[:1] for m in (layout, expert) if m.embedding]
    if (
        None not in sizes
        and sizes[0] != sizes[1]
        and len(set(rows)) > 1
        and layout.embedding in wanted
    ):
        problems.append(
            f"{name}: vocabulary of {sizes[1]} tokens, the reference has {sizes[0]}; say "
            "tokenizer_source: union or base to bring them together, or set parameters: {outside: "
            "reference} to keep the reference's embeddings"
        )
    missing = sorted(set(wanted) - set(expert.tensors))
    extra = sorted(
        n
        for n in set(expert.tensors) - set(layout.tensors)
        if outside or layout.stack.block_of(n) is not None
    )
    if (missing or extra) and layout.parts:
        problems.append(
            f"{name}: has other tensors than {layout.title}; say tensors: intersection to merge "
            "what all have, or tensors: union to merge all"
        )
    problems += listed(f"{name}: tensor missing", missing)
    problems += listed(f"{name}: tensor that the reference does not have", extra)
    shared = [n for n in sorted(wanted) if n in expert.tensors]
    problems += _listed_pairs(name, [(n, clash(wanted[n], expert.tensors[n])) for n in shared])
    return problems


def clash(ours: Tensor, theirs: Tensor) -> str | None:
    if ours.shape != theirs.shape:
        return f"shape {list(theirs.shape)}, the reference has {list(ours.shape)}"
    if ours.dtype != theirs.dtype and not (ours.floating and theirs.floating):
        return f"dtype {theirs.dtype}, the reference has {ours.dtype}"
    return None


def _equal_to_reference(pool: PoolMembers) -> list[str]:
    """Experts whose weights equal the reference's: they have nothing to merge.

    Almost every expert differs in the first bytes compared; only a true copy is read to its end.
    """
    if pool.reference is None:
        return []
    return [
        f"{name}: every tensor equals the reference's; it is a copy, not an expert"
        for name, expert in pool.experts.items()
        if _same_weights(pool.reference, expert)
    ]


def twins(pool: PoolMembers) -> list[str]:
    """Notes about experts that hold the same weights: each counts, and no two differ."""
    return [
        f"{one} and {other} hold the same weights"
        for (one, first), (other, second) in combinations(pool.experts.items(), 2)
        if first.tensors.keys() == second.tensors.keys() and _same_weights(first, second)
    ]


def kept_numbers(pool: PoolMembers) -> list[str]:
    """A note about whole numbers that differ between the members: the layout's are kept."""
    names = [
        name
        for name, tensor in pool.layout.tensors.items()
        if not tensor.floating
        and any(
            not same_bytes(tensor, member.tensors[name])
            for member in pool.members.values()
            if name in member.tensors
        )
    ]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if names[1:] else ""
    whose = "the reference's" if pool.reference else "the first model's"
    return [f"{names[0]}{more}: whole numbers that differ between the models; {whose} are kept"]


def _same_weights(one: Checkpoint, other: Checkpoint) -> bool:
    if any(
        one.tensors[n].dtype != other.tensors[n].dtype for n in one.tensors if n in other.tensors
    ):
        return False
    if _other_content(one, other):
        return False
    return all(
        same_bytes(one.tensors[n], other.tensors[n]) for n in one.tensors if n in other.tensors
    )


def _other_content(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether digests that a store says show that remote files with one header hold other weights;
    else it takes as many bytes of them as are equal."""
    for ours, theirs in zip(one.files, other.files, strict=False):
        left, right = remote_file(ours), remote_file(theirs)
        stated = left and right and left.sha256 and right.sha256 and left.sha256 != right.sha256
        if stated and ours.name == theirs.name and ours.read_bytes() == theirs.read_bytes():
            return True
    return False


def listed(what: str, names: list[str]) -> list[str]:
    lead = f"{what}: " if what else ""
    lines = [f"{lead}{name}" for name in names[:SHOWN]]
    if len(names) > SHOWN:
        lines.append(f"{lead}and {len(names) - SHOWN} more")
    return lines


def _listed_pairs(expert: str, pairs: list[tuple[str, str | None]]) -> list[str]:
    """One line a reason; where it holds for several tensors, the first and how many."""
    reasons: dict[str, list[str]] = {}
    for name, why in pairs:
        if why:
            reasons.setdefault(why, []).append(name)
    told = [
        f"{names[0]}{f' and {len(names) - 1} more tensors' if names[1:] else ''}: {why}"
        for why, names in reasons.items()
    ]
    return listed(expert, told)


def _join(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
