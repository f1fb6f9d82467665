"""One vocabulary for models that have different ones: embedding rows are moved by their token.

The rules are mergekit's. A model keeps its own row of a token. A row that it lacks is the base
model's, or that of the only model that has the token, or the mean of those that have it, or zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.companions import added_tokens, vocabulary
from sigmerge.checkpoints.folder import Checkpoint, is_embedding, open_checkpoint, read_json
from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.lazy import FormedTensor, TensorRun, Values
from sigmerge.checkpoints.token_pairs import TokenIds, paired, text_of
from sigmerge.checkpoints.token_rows import FITTED, MissingRows, NewRows, NewToken, batch_size
from sigmerge.core import TILE, Array
from sigmerge.errors import PoolError, require
from sigmerge.messages import shown

MORE_HEADS = (
    "lm_head.bias", "predictions.bias", "decoder.weight", "decoder.bias", "vocab_projector.weight",
    "vocab_projector.bias", "final_logits_bias",
)  # fmt: skip
"""Further tensors with one row a token: heads of masked models, and biases of heads."""


@dataclass(frozen=True)
class TokenSource:
    """Where a token's row comes from: nowhere (a zero row), or a model's row of a token or an id.

    `model` None and not `zero` leaves it to the rules. `force` replaces rows that models have.
    """

    model: str | None = None
    zero: bool = False
    token: str | None = None
    token_id: int | None = None
    force: bool = False


@dataclass(frozen=True)
class VocabularyRequest:
    """What a recipe says about the vocabulary of the result. `base` is the member that goes first.

    Without `union` the vocabulary is that of the tokenizer that is taken.
    """

    union: bool
    base: str | None
    tokens: Mapping[str, TokenSource]
    pad: int | None = None
    missing: MissingRows | None = None
    """How rows are formed that no model has. Then tokens are matched by what they stand for."""


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a result, and the one of every member.

    `added` are the entries that the tokenizer which is taken does not have.
    """

    request: VocabularyRequest
    tokens: TokenIds
    of: Mapping[str, TokenIds]
    added: tuple[Mapping[str, Any], ...]
    donor: Checkpoint | None = None
    """The model whose tokenizer is taken, where its rows are read."""
    texts: Mapping[str, str] | None = None
    """The text of every token, where rows are those of its pieces."""

    @property
    def rows(self) -> int:
        """Rows of the embedding: all ids, up to a multiple where one is asked for."""
        count, step = max(self.tokens.values()) + 1, self.request.pad or 1
        return -(-count // step) * step


@dataclass(frozen=True, eq=False)
class MovedRows(FormedTensor):
    """A tensor whose rows are those of another in a new order.

    `own` is the old row of every new one. Where it is −1, `made` lists rows of tensors whose mean
    is taken; none give zeros. Rows behind `own` are the mean of all before them.
    """

    stored: Tensor
    own: Array
    made: Mapping[int, Sequence[tuple[Tensor, int]]]

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def width(self) -> int:
        return prod(self.shape) // _tokens_in(self.shape)

    def made_of(self, start: int, stop: int) -> list[TensorRun]:
        rows = self.own[start // self.width : -(-stop // self.width)]
        known = rows[rows >= 0]
        if not known.size:
            return []
        return [(self.stored, int(known.min()) * self.width, (int(known.max()) + 1) * self.width)]

    def form(self, values: Values, start: int, out: Array) -> None:
        width, stop = self.width, start + out.size
        for first, last, old in self._runs(start // width, -(-stop // width)):
            begin, end = max(first * width, start), min(last * width, stop)
            skip = begin - first * width
            place = out[begin - start : end - start]
            if old is None:
                place[:] = self._row(values, first)[skip : skip + place.size]
            else:
                begin = old * width + skip
                place[:] = values(self.stored, begin, begin + place.size)

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, int, int | None]]:
        """New rows [first, last) that are old rows in a row, with the first of these."""
        end = min(last, self.own.size)
        known = self.own[first:end]
        breaks = np.flatnonzero((np.diff(known) != 1) | (known[1:] < 0) | (known[:-1] < 0)) + 1
        edges = [0, *breaks.tolist(), known.size] if known.size else []
        for begin, stop in pairwise(edges):
            old = int(known[begin])
            yield first + begin, first + stop, None if old < 0 else old
        for row in range(max(first, self.own.size), last):
            yield row, row + 1, None

    def _row(self, values: Values, row: int) -> Array:
        if row >= self.own.size:
            return self._mean(values)
        total = np.zeros(self.width, np.float32)
        rows = self.made[row]
        for tensor, place in rows:
            total += values(tensor, place * self.width, (place + 1) * self.width)
        return total / np.float32(max(len(rows), 1))

    def _mean(self, values: Values) -> Array:
        if self not in values.kept:
            total, step = np.zeros(self.width), max(1, TILE // self.width)
            for first in range(0, self.own.size, step):
                count = min(step, self.own.size - first)
                piece = np.empty(count * self.width, np.float32)
                self.form(values, first * self.width, piece)
                total += piece.reshape(count, self.width).sum(axis=0, dtype=np.float64)
            values.kept[self] = (total / self.own.size).astype(np.float32)
        return values.kept[self]


def rows_memory(tensors: Iterable[Tensor]) -> int:
    """A bound on the memory of rows that are formed: one batch at a time, whose rows stay."""
    batches = {
        source
        for tensor in tensors
        if isinstance(tensor, MovedRows)
        for sources in tensor.made.values()
        for source, _ in sources
        if isinstance(source, NewRows)
    }
    working = max((one.room for one in batches), default=0)
    return working + sum(one.held for one in batches)


def plan_vocabulary(
    request: VocabularyRequest, home: Path, members: Mapping[str, Path]
) -> Vocabulary | None:
    """The vocabulary that a recipe asks for; None if the embeddings can stay as they are.

    `home` has the tokenizer that is taken; a member without one has that of the base.
    """
    base = members.get(request.base or "", home)
    found = {name: vocabulary(folder) for name, folder in members.items()}
    usual = vocabulary(base)
    taken = vocabulary(home)
    same = all(each is None or each == taken for each in (*found.values(), usual))
    sizes = [size_of(read_json(folder / "config.json")) for folder in members.values()]
    same &= all(size == sizes[0] for size in sizes)
    if same and not request.tokens and not request.pad:
        return None
    known = {name: _by_token(each or usual, members[name]) for name, each in found.items()}
    output = dict(_by_token(taken, home))
    added: list[Mapping[str, Any]] = []
    if request.union:
        added += _union(output, home, [members[name] for name, each in found.items() if each])
    added += _appended(output, home, added, ({"content": t} for t in request.tokens))
    found_all = Vocabulary(request, output, known, tuple(added))
    return found_all if request.missing is None else _by_meaning(found_all, home, members)


def _by_meaning(found: Vocabulary, home: Path, members: Mapping[str, Path]) -> Vocabulary:
    """A vocabulary whose tokens the members have by what they stand for, with the donor."""
    how = found.request.missing
    assert how is not None
    of = {name: paired(home, found.tokens, members[name], own) for name, own in found.of.items()}
    donor = open_checkpoint(home) if how.method in FITTED else None
    if donor is not None and donor.embedding is None:
        raise PoolError(f"{home}: no tensor is known to embed its tokens; method: {how.method} "
                        "reads them. Take subword or mean.")  # fmt: skip
    texts = text_of(home, found.tokens) if how.method == "subword" else None
    return replace(found, of=of, donor=donor, texts=texts)


def _by_token(found: TokenIds | bytes | None, folder: Path) -> TokenIds:
    if isinstance(found, dict):
        return found
    raise PoolError(
        f"{folder}: has no tokenizer.json, so its rows cannot be found by token; load its "
        "tokenizer with transformers and save it there."
    )


def _union(output: dict[str, int], home: Path, folders: Sequence[Path]) -> list[Mapping[str, Any]]:
    """Put the other tokens behind those of `output`: words in the order of ids, added ones last."""
    words: dict[str, Any] = {}
    added: dict[str, Any] = {}
    for folder in folders:
        special = {entry["content"]: entry for entry in added_tokens(folder)}
        for token, _ in sorted(_by_token(vocabulary(folder), folder).items(), key=lambda t: t[1]):
            kind = added if token in special else words
            kind.setdefault(token, special.get(token, {"content": token}))
    plain = [entry for token, entry in words.items() if token not in added]
    return _appended(output, home, [], [*plain, *added.values()])


def _appended(
    output: dict[str, int],
    home: Path,
    already: Sequence[Mapping[str, Any]],
    entries: Iterable[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    """The entries of a tokenizer for tokens that it lacks; they go into `output`, too."""
    listed = {entry["content"] for entry in (*added_tokens(home), *already)}
    made: list[Mapping[str, Any]] = []
    number = max(output.values()) + 1
    for entry in entries:
        token = entry["content"]
        special = "special" in entry
        if token in listed or (token in output and not special):
            continue
        if token not in output:
            output[token], number = number, number + 1
        usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True,
                 "special": False}  # fmt: skip
        made.append({**usual, **entry, "id": output[token]})
    return made


def moved(
    members: Mapping[str, Checkpoint],
    vocabulary: Vocabulary,
    before: Sequence[str],
    behind: Sequence[str],
) -> dict[str, Checkpoint]:
    """The members with the rows of a vocabulary.

    Rows that one lacks come from the members that are merged with it: `before` the layers, for the
    embedding, and `behind` them, for the head.
    """
    result = {}
    for name, member in members.items():
        _check_adapter(member)
        tensors = dict(member.tensors)
        for tensor, group in _rows_by_token(member, before, behind):
            sources = {m: members[m].tensors[tensor] for m in group if tensor in members[m].tensors}
            tensors[tensor] = _moved(name, member, tensor, sources, vocabulary)
        config = with_size(member.config, vocabulary.rows)
        result[name] = replace(member, tensors=tensors, config=config)
    return result


def _check_adapter(member: Checkpoint) -> None:
    """Refuse rows that an adapter adds: its model's tokenizer does not know whose they are."""
    if member.adapter is None:
        return
    rows, before = size_of(member.config), size_of(read_json(member.path / "config.json"))
    if rows != before:
        raise PoolError(
            f"{member.adapter}: brings an embedding of {rows} rows, its model's has {before}; "
            "rows are moved by the model's tokenizer, which does not know the others. Merge it "
            "into its model with PEFT (merge_and_unload), and save the adapter's tokenizer there."
        )


def _rows_by_token(
    member: Checkpoint, before: Sequence[str], behind: Sequence[str]
) -> Iterator[tuple[str, Sequence[str]]]:
    """The tensors with one row a token, each with the members that it is merged with."""
    if member.embedding is None:
        raise PoolError(
            f"{member.path}: no tensor is known to embed its tokens, so they cannot be moved."
        )
    size, head = member.tensors[member.embedding].shape[0], member.head or ""
    own = (head, f"{head.removesuffix('.weight')}.bias")
    for name, tensor in member.tensors.items():
        fits = bool(tensor.shape) and _tokens_in(tensor.shape) == size
        if fits and is_embedding(name):  # encoder and decoder may have one each
            yield name, before
        elif name in own or (fits and name.endswith(MORE_HEADS)):
            yield name, behind


def _tokens_in(shape: Sequence[int]) -> int:
    """How many tokens a tensor has rows of. final_logits_bias is one row of all of them."""
    return shape[1] if len(shape) == 2 and shape[0] == 1 else shape[0]


def _with_tokens(shape: Sequence[int], rows: int) -> tuple[int, ...]:
    """The shape of a tensor with rows of another number of tokens."""
    return (rows, *shape[1:]) if _tokens_in(shape) == shape[0] else (1, rows)


def size_of(config: Mapping[str, Any]) -> int | None:
    """The size of the vocabulary that a configuration names, or that of the model in it."""
    inner = config.get("text_config")
    found = config.get("vocab_size")
    return size_of(inner) if found is None and isinstance(inner, dict) else found


def with_size(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """A configuration with another size of the vocabulary."""
    result = dict(config)
    if "vocab_size" in config:
        result["vocab_size"] = rows
    if isinstance(config.get("text_config"), dict):
        result["text_config"] = with_size(config["text_config"], rows)
    return result


def _moved(
    member: str,
    checkpoint: Checkpoint,
    tensor: str,
    sources: Mapping[str, Tensor],
    vocabulary: Vocabulary,
) -> Tensor:
    stored = checkpoint.tensors[tensor]
    count = max(vocabulary.tokens.values()) + 1
    own = np.full(count, -1, np.int64)
    made: dict[int, list[tuple[Tensor, int]]] = {row: [] for row in range(count)}
    for token, row in vocabulary.tokens.items():
        place = vocabulary.of[member].get(token, -1)
        wanted = vocabulary.request.tokens.get(token, TokenSource())
        if 0 <= place < _tokens_in(stored.shape) and not wanted.force:
            own[row] = place
            del made[row]
        else:
            made[row] = _sources(token, wanted, sources, vocabulary)
    if vocabulary.request.missing and len(stored.shape) == 2 and stored.shape[0] > 1:
        lacking = {
            token: row
            for token, row in vocabulary.tokens.items()
            if not made.get(row, True)
            and not vocabulary.request.tokens.get(token, TokenSource()).zero
        }
        for new in _formed(member, checkpoint, tensor, lacking, vocabulary):
            made |= {lacking[one.token]: [(new, i)] for i, one in enumerate(new.tokens)}
    shape = _with_tokens(stored.shape, vocabulary.rows)
    return MovedRows(stored.name, stored.dtype, shape, stored.file, stored.begin, stored.end,
                     stored, own, made)  # fmt: skip


def _formed(
    member: str,
    checkpoint: Checkpoint,
    tensor: str,
    lacking: TokenIds,
    vocabulary: Vocabulary,
) -> Iterator[NewRows]:
    """The rows of tokens that no model has, in batches in the order of their ids."""
    how, stored = vocabulary.request.missing, checkpoint.tensors[tensor]
    if how is None or how.method == "zero" or not lacking:
        return
    before = is_embedding(tensor)
    donor, own = _donor_tensor(vocabulary, before), vocabulary.of[member]
    rows = stored.shape[0] if donor is None else donor.shape[0]
    pairs = [(own[t], row) for t, row in vocabulary.tokens.items()
             if own.get(t, stored.shape[0]) < stored.shape[0] and row < rows]  # fmt: skip
    shared = np.array(sorted(pairs, key=lambda pair: pair[1]), np.int64).reshape(-1, 2)
    if donor is not None and len(shared) < how.k:
        raise PoolError(
            f"{checkpoint.place}: {len(shared)} of its tokens are the tokenizer's, too, which is "
            f"taken, and k: {how.k} are needed; give a smaller k, or method: subword."
        )
    pieces = _pieces(checkpoint.path, vocabulary.texts, lacking)
    new = [
        NewToken(token, row, pieces.get(token, ()))
        for token, row in sorted(lacking.items(), key=lambda item: item[1])
        if donor is None or row < rows  # the donor itself has no row of the others: zero
    ]
    width = prod(stored.shape[1:])
    step = batch_size(how, width if donor is None else prod(donor.shape[1:]))
    for first in range(0, len(new), step):
        batch = tuple(new[first : first + step])
        yield NewRows(
            stored.name, "F32", (len(batch), width), stored.file, stored.begin, stored.end,
            how, stored, donor, shared, batch, before,
        )  # fmt: skip


def _donor_tensor(vocabulary: Vocabulary, before: bool) -> Tensor | None:
    """The donor's rows: of its embedding, or of its head if it has one of its own."""
    donor = vocabulary.donor
    if donor is None:
        return None
    assert donor.embedding is not None
    return donor.tensors[donor.embedding if before or donor.head is None else donor.head]


def _pieces(
    folder: Path, texts: Mapping[str, str] | None, tokens: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    """The ids of the pieces of every token's text by a model's own tokenizer."""
    if texts is None:
        return {}
    require("method: subword", models=("tokenizers",))
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    wanted = list(tokens)
    found = own.encode_batch([texts[token] for token in wanted], add_special_tokens=False)
    return {token: tuple(one.ids) for token, one in zip(wanted, found, strict=True)}


def _sources(
    token: str, wanted: TokenSource, sources: Mapping[str, Tensor], vocabulary: Vocabulary
) -> list[tuple[Tensor, int]]:
    """The rows whose mean a token gets in the models that lack it."""
    if wanted.zero:
        return []
    have = {
        name: place
        for name, tensor in sources.items()
        if 0 <= (place := vocabulary.of[name].get(token, -1)) < _tokens_in(tensor.shape)
    }
    if wanted.model is not None:
        return [_named(token, wanted, sources, vocabulary)]
    base = vocabulary.request.base
    if len(have) > 1 and base in have:
        have = {base: have[base]}
    return [(sources[name], place) for name, place in have.items()]


def _named(
    token: str, wanted: TokenSource, sources: Mapping[str, Tensor], vocabulary: Vocabulary
) -> tuple[Tensor, int]:
    assert wanted.model is not None
    if wanted.model not in sources:
        raise PoolError(
            f"tokenizer.tokens: {shown(token)} is wanted from {wanted.model}, which is not merged "
            "there."
        )
    tensor, place = sources[wanted.model], wanted.token_id
    if place is None:
        place = vocabulary.of[wanted.model].get(wanted.token or token, -1)
    if not 0 <= place < _tokens_in(tensor.shape):
        what = wanted.token_id if wanted.token_id is not None else shown(wanted.token or token)
        raise PoolError(f"tokenizer.tokens: {wanted.model} has no row for {what}.")
    return tensor, place
