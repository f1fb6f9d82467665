"""Exemplars of a capture pass, as text and as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sigmerge.errors import MissingExtra, PoolError, RecipeError
from sigmerge.files.digests import file_digests
from sigmerge.files.documents import read_json_lines
from sigmerge.probing.loading import loading

SHAPE = '{"prompt": "…"} or {"prompt": "…", "response": "…"}'


@dataclass(frozen=True)
class Exemplar:
    prompt: str
    response: str | None = None
    place: str = field(default="", compare=False)
    """Where it was read: file and line."""


@dataclass(frozen=True)
class Tokens:
    """Prompt and response in one row of ids; the response starts at `answer`."""

    ids: tuple[int, ...]
    answer: int


def read_exemplars(
    file: Path, limit: int | None = None, *, what: str = "exemplars"
) -> list[Exemplar]:
    """The first `limit` exemplars of a JSONL file, or all; blank lines are skipped."""
    if not file.is_file():
        raise RecipeError(f"{file}: no such file of {what}.")
    found: list[Exemplar] = []
    for number, record in read_json_lines(file, f"a file of {what}", RecipeError):
        if limit is not None and len(found) == limit:
            break
        found.append(_exemplar(record, f"{file}, line {number}"))
    if not found:
        raise RecipeError(f"{file}: holds no {what}. Give one {SHAPE} per line.")
    return found


def read_prompts(file: Path) -> list[str]:
    """The prompts of a JSONL file with {"prompt": …} on every line; blank lines are skipped."""
    return [exemplar.prompt for exemplar in read_exemplars(file, what="prompts")]


def _exemplar(given: Any, where: str) -> Exemplar:
    record = given if isinstance(given, dict) else {}
    prompt, response = record.get("prompt"), record.get("response")
    if not isinstance(prompt, str) or not isinstance(response, str | None):
        raise RecipeError(f"{where}: expected {SHAPE}.")
    return Exemplar(prompt, response, where)


def tokenizer_of(folder: Path, trust: bool = False) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra("A capture pass", ["transformers"], ["models"]) from error
    with loading(folder, "its tokenizer"):
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust
        )


def check_same_vocabulary(folders: Mapping[str, Path], trust: bool = False) -> None:
    """PoolError, with the first difference, if the tokenizers of the folders differ.

    Equal files are equal tokenizers; only where files differ the vocabularies are compared.
    """
    files = [file for folder in folders.values() if (file := folder / "tokenizer.json").exists()]
    if len(files) == len(folders) and len(set(file_digests(files).values())) == 1:
        return
    first, *rest = folders
    words = tokenizer_of(folders[first], trust).get_vocab()
    problems = []
    for name in rest:
        other = tokenizer_of(folders[name], trust).get_vocab()
        if other != words:
            differing = sorted(dict(words.items() ^ other.items()))
            token = min(differing, key=lambda t: words.get(t, other.get(t, 0)))
            problems.append(
                f"{name}: {len(differing)} tokens differ from those of {first}; the first is "
                f"{token!r}, id {words.get(token)} there and {other.get(token)} here"
            )
    if problems:
        raise PoolError("The experts' tokenizers differ:", problems)


def tokenize(
    folder: Path,
    exemplars: Sequence[Exemplar],
    max_length: int,
    *,
    answers: bool = False,
    skip_bos: bool = False,
    trust: bool = False,
) -> list[Tokens]:
    """Each exemplar cut to `max_length` tokens.

    With `answers`, some of a response must be left; with `skip_bos`, more than the first token.
    """
    tokenizer, rows = tokenizer_of(folder, trust), []
    for number, exemplar in enumerate(exemplars, start=1):
        place = exemplar.place or f"Exemplar {number}"
        prompt = tokenizer(exemplar.prompt)["input_ids"]
        response = []
        if exemplar.response:
            response = tokenizer(exemplar.response, add_special_tokens=False)["input_ids"]
        ids = tuple([*prompt, *response][:max_length])
        if not prompt:
            raise RecipeError(f"{place}: its prompt is empty to the tokenizer of {folder}.")
        if answers and len(ids) <= len(prompt):
            raise RecipeError(
                f"{place}: has no response within {max_length} tokens, and labels: data "
                "needs one. Raise max_length, or take labels: argmax or sampled."
            )
        if skip_bos and len(ids) == 1:
            raise RecipeError(
                f"{place}: is one token within {max_length}, which skip_bos leaves out. Take the "
                "line away, or do without skip_bos."
            )
        rows.append(Tokens(ids, min(len(prompt), len(ids))))
    return rows
