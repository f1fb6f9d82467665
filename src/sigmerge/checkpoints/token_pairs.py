"""Tokens of two tokenizers that stand for the same text: pairs by role and by bytes.

`Ġthe` of a byte-level vocabulary and `▁the` of SentencePiece are both the bytes of " the"; the
token that ends a text is that whatever it is called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.companions import TOKENIZER_CONFIG, added_tokens
from sigmerge.checkpoints.folder import read_json
from sigmerge.checkpoints.links import is_there

TokenIds = Mapping[str, int]
"""Token -> id."""
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_SPACE = "▁"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_Meaning = tuple[str, bytes]
"""What a token stands for: ("text", its bytes), or ("special", its name) where it is no text."""


def paired(donor: Path, tokens: TokenIds, model: Path, own: TokenIds) -> dict[str, int]:
    """Of every token of the donor's tokenizer that a model's has, too, the id there."""
    ids: dict[_Meaning, int] = {}
    for token, meaning in sorted(_meanings(model, own), key=_is_byte):
        ids.setdefault(meaning, own[token])
    theirs, roles = _roles(model), _roles(donor)
    found = {t: ids[meaning] for t, meaning in _meanings(donor, tokens) if meaning in ids}
    for role in reversed(ROLES):  # where a token has several, the first decides
        if roles.get(role) in tokens and theirs.get(role) in own:
            found[roles[role]] = own[theirs[role]]
    return found


def text_of(folder: Path, tokens: TokenIds) -> dict[str, str]:
    """The text of every token; bytes that are no whole characters become U+FFFD."""
    return {t: content.decode("utf-8", "replace") for t, (_, content) in _meanings(folder, tokens)}


def _is_byte(found: tuple[str, _Meaning]) -> bool:
    return _BYTE.fullmatch(found[0]) is not None


def _meanings(folder: Path, tokens: TokenIds) -> Iterator[tuple[str, _Meaning]]:
    """Every token with what it stands for."""
    special = {entry["content"]: bool(entry.get("special")) for entry in added_tokens(folder)}
    content = read_json(folder / "tokenizer.json")
    parts = json.dumps([content.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")],
                       ensure_ascii=False)  # fmt: skip
    in_bytes, spaced = '"ByteLevel"' in parts, _SPACE in parts
    for token in tokens:
        if token in special:
            yield token, ("special" if special[token] else "text", token.encode())
        elif in_bytes and all(letter in _letters() for letter in token):
            yield token, ("text", bytes(_letters()[letter] for letter in token))
        elif spaced and (byte := _BYTE.fullmatch(token)):
            yield token, ("text", bytes.fromhex(byte[1]))
        else:
            text = token.replace(_SPACE, " ") if spaced else token
            yield token, ("text", text.encode("utf-8", "surrogatepass"))


@cache
def _letters() -> dict[str, int]:
    """Letter -> byte in byte-level vocabularies: printable bytes as in Latin-1, others from 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _roles(folder: Path) -> dict[str, str]:
    """Role -> the token that a tokenizer has for it."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", TOKENIZER_CONFIG):
        settings: Mapping[str, Any] = read_json(folder / name) if is_there(folder / name) else {}
        for role in ROLES:
            token = settings.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[role] = token
    return found
