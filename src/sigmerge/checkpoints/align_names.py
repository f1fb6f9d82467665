"""Brings the members of a pool to one set of tensor names.

Checkpoints of one model may store a tensor under the names of another version of transformers, the
experts of a mixture joined or one by one, and besides weights what a model makes when it is loaded.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from sigmerge.checkpoints.blocks import NUMBER, starred
from sigmerge.checkpoints.equal import same_tensor
from sigmerge.checkpoints.folder import MASKED_HEADS, Checkpoint, is_embedding, is_head
from sigmerge.checkpoints.header import Tensor

_COMPUTED = re.compile(r"(^|\.)(rotary\w*\.inv_freq|masked_bias|embeddings\.position_ids)$")
_MASK = re.compile(r"(^|\.)(attn|attention)\.bias$")
"""Of four dimensions; one of fewer is a weight."""
_VALUE_HEAD = "v_head."
"""What a trainer with rewards adds to a model of text."""
_OTHER_PARTS = tuple(
    (re.compile(old), new)
    for old, new in (
        (r"\.gamma$", ".weight"),
        (r"\.beta$", ".bias"),
        (r"(?<=LayerNorm)\.weight$", ".gamma"),
        (r"(?<=LayerNorm)\.bias$", ".beta"),
        (r"\.mlp\.gate\.", ".block_sparse_moe.gate."),
        (r"\.block_sparse_moe\.gate\.", ".mlp.gate."),
        (r"^language_model\.model\.", "model.language_model."),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^model\.language_model\.", "model."),
        (r"^model\.", "model.language_model."),
    )
)
"""Parts that versions of transformers name differently: norms, routers, nested text models."""
_EMBEDDINGS = 8
"""More than a model has that others are tied to."""
_JOINED = re.compile(r"(.+)\.mlp\.experts\.(gate_up_proj|down_proj)$")
_SINGLE = {
    "gate_up_proj": (("block_sparse_moe", "w1", "w3"), ("mlp", "gate_proj", "up_proj")),
    "down_proj": (("block_sparse_moe", "w2"), ("mlp", "down_proj")),
}
"""How the matrices of one expert are called where they are stored one by one."""


def alike(members: Mapping[str, Checkpoint]) -> tuple[dict[str, Checkpoint], tuple[str, ...]]:
    """The members with the first one's tensor names, without unneeded tensors; and a note."""
    stored = set().union(*(member.tensors for member in members.values()))
    found = {name: _one_by_one(member, stored) for name, member in members.items()}
    wanted = _kinds(next(iter(found.values())).tensors)
    found = {name: _renamed(member, wanted) for name, member in found.items()}
    spare = _spare(list(found.values()))
    if not spare:
        return found, ()
    kept = {name: _without(member, spare) for name, member in found.items()}
    counts = Counter(map(starred, {n for member in found.values() for n in member.tensors}))
    told = [f"{kind} ({counts[kind]} tensors)" if counts[kind] > 1 else kind for kind in spare]
    return kept, (f"left out, since not all models store it and none needs it: {', '.join(told)}",)


def _kinds(names: Iterable[str]) -> set[str]:
    return set(map(starred, names))


# Experts of a mixture


def _one_by_one(member: Checkpoint, stored: Collection[str]) -> Checkpoint:
    """The member with its mixtures' experts split, if another member stores them one by one."""
    tensors = dict(member.tensors)
    for name, tensor in member.tensors.items():
        apart = _apart(name, tensor, stored)
        if apart and not apart.keys() & member.tensors.keys():
            del tensors[name]
            tensors |= apart
    return replace(member, tensors=tensors) if tensors.keys() != member.tensors.keys() else member


def _apart(name: str, tensor: Tensor, stored: Collection[str]) -> dict[str, Tensor]:
    """The matrices that are joined in a tensor of experts, by names under which some are stored.

    They lie one behind another: expert by expert, the gate's before the one that goes up.
    """
    joined = _JOINED.match(name)
    if joined is None or len(tensor.shape) != 3 or type(tensor) is not Tensor or not tensor.nbytes:
        return {}
    experts, rows, columns = tensor.shape
    for module, *roles in _SINGLE[joined[2]]:
        first = f"{joined[1]}.{module}.experts.0.{roles[0]}.weight"
        count = experts * len(roles)
        if first not in stored or count > len(stored) or rows % len(roles):
            continue
        step = tensor.nbytes // count
        return {
            own: replace(tensor, name=own, shape=(rows // len(roles), columns),
                         begin=tensor.begin + at * step, end=tensor.begin + (at + 1) * step)
            for at in range(count)
            for own in [f"{joined[1]}.{module}.experts.{at // len(roles)}."
                        f"{roles[at % len(roles)]}.weight"]
        }  # fmt: skip
    return {}


# Other names


def _renamed(member: Checkpoint, wanted: set[str]) -> Checkpoint:
    """The member with the layout's name of every tensor that it stores under another one."""
    own, ends = _kinds(member.tensors), defaultdict(list)
    for kind in wanted:
        ends[kind.partition(".")[2]].append(kind)
    new = {kind: _called(kind, wanted, ends) for kind in own - wanted}
    often = Counter(new.values())
    new = {old: kind for old, kind in new.items() if kind not in own and often[kind] == 1}
    if not new:
        return member
    tensors = {}
    for name, tensor in member.tensors.items():
        called = _numbered(new.get(starred(name), ""), name) or name
        tensors[called] = replace(tensor, name=called)
    return replace(member, tensors=tensors)


def _called(kind: str, wanted: set[str], ends: Mapping[str, list[str]]) -> str:
    """The layout's name of this kind of tensor, if exactly one rule applies; else its own.

    `ends` are the wanted kinds by what follows their first part, which either may lack.
    """
    forms = {kind, *(old.sub(new, kind) for old, new in _OTHER_PARTS)}
    found = (forms | {form.partition(".")[2] for form in forms}) & wanted
    found.update(*(ends.get(form, [])[:2] for form in forms))
    return found.pop() if len(found) == 1 else kind


def _numbered(kind: str, name: str) -> str:
    """A kind with the numbers of a name in place of its stars."""
    numbers = iter(NUMBER.findall(name))
    return re.sub(r"\*", lambda _: next(numbers, "*"), kind)


# What a model does without


def _spare(members: Sequence[Checkpoint]) -> list[str]:
    """The kinds of tensors that some members lack and that no model needs."""
    every = [_kinds(member.tensors) for member in members]
    lonely = {kind for kinds in every for kind in kinds if not all(kind in o for o in every)}
    shared = set.intersection(*(set(member.tensors) for member in members))
    embeddings = sorted(name for name in shared if is_embedding(name))[:_EMBEDDINGS]
    parted = any(member.config.get("tie_word_embeddings") is False for member in members)
    needed = {
        kind
        for member in members
        for name in member.tensors
        if (kind := starred(name)) in lonely
        and ((parted and name.endswith(MASKED_HEADS)) or not _is_spare(member, name, embeddings))
    }
    return sorted(lonely - needed)


def _is_spare(member: Checkpoint, name: str, embeddings: Collection[str]) -> bool:
    """True if a model does not need a tensor: it is computed, tied, or not part of the model.

    It may be tied to `embeddings`, or to the bias of the module that it lies in.
    """
    tensor = member.tensors[name]
    if _COMPUTED.search(name) or name.startswith(_VALUE_HEAD):
        return True
    if _MASK.search(name):
        return len(tensor.shape) == 4
    bias = name.removesuffix(".decoder.bias") + ".bias"
    others = embeddings if bias == f"{name}.bias" else [bias]
    return not is_head(name) and any(
        other in member.tensors and same_tensor(tensor, member.tensors[other]) for other in others
    )


def _without(member: Checkpoint, spare: Collection[str]) -> Checkpoint:
    kept = {name: tensor for name, tensor in member.tensors.items() if starred(name) not in spare}
    return replace(member, tensors=kept)
