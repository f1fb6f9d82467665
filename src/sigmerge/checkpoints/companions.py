"""The files of an output folder besides weights: configuration, tokenizer, card, records."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import translate
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from posixpath import basename, dirname
from typing import Any

from sigmerge.checkpoints.folder import INDEX, parted, read_json
from sigmerge.checkpoints.links import check_file, is_there
from sigmerge.checkpoints.plain import is_pipeline, pipeline_files
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.checkpoints.writer import Output
from sigmerge.errors import PoolError
from sigmerge.files.digests import file_digests
from sigmerge.files.documents import POINTER, read_bytes
from sigmerge.files.safe_open import open_regular
from sigmerge.messages import counted

TOKENIZER = (
    "tokenizer*",
    "*.tiktoken",
    "*.model",
    "*.spm",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
)
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a configuration that belong to the tokenizer."""
MOST_TOKENS = 1 << 22
"""Upper bound on token ids: tables have an entry for every id."""
GENERATION = "generation_config.json"
"""Names the tokens that end a text, so it goes with the tokenizer."""
CODE_FILES = ("*.py",)
"""Code that a configuration may refer to. It is never run."""
SENTENCES = ("modules.json", "sentence_*_config.json", "config_sentence_transformers.json")
"""What makes a model one of sentence-transformers; modules.json names folders of further parts."""
MODULES = "modules.json"

TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types of weights by their names in shards -> in configurations."""


def copy_companions(
    output: Output,
    pool: PoolMembers,
    tokenizer: Path | None,
    dtype: str | None,
    chat_template: str | None = None,
    architecture: str | None = None,
) -> None:
    """The layout's configuration; tokenizer, ids of its special tokens and generation settings of
    the `tokenizer` folder.

    `chat_template` goes before the tokenizer's own, `architecture` before that of the layout.
    """
    layout = pool.layout
    if layout.parts:
        for file in pipeline_files(layout.path) if is_pipeline(layout.path) else ():
            output.copy(file, file.relative_to(layout.path).as_posix())
        return
    config = merged_config(layout.config, pool.untied, dtype, architecture)
    if tokenizer is not None and tokenizer != layout.path:
        file = tokenizer / "config.json"
        if is_there(file):  # an adapter has none
            config = with_token_ids(config, read_json(file))
    output.text("config.json", json.dumps(config, indent=2) + "\n")
    source = tokenizer or layout.path
    generation = source if is_there(source / GENERATION) else layout.path
    for folder, patterns in ((layout.path, CODE_FILES), (generation, (GENERATION,))):
        for file in _matching(folder, patterns):
            output.copy(file, str(file.relative_to(folder)))
    for file in _sentence_files(layout.path):
        output.copy(file, file.relative_to(layout.path).as_posix())
    more = changed_tokenizer(source, pool.added_tokens) if pool.added_tokens else {}
    for file in _matching(source, TOKENIZER):
        name = str(file.relative_to(source))
        if chat_template is None or not name.startswith(("chat_template", "additional_chat")):
            output.copy(file, name)
    for name, text in more.items():
        output.text(name, text)
    if chat_template is not None:
        output.text("chat_template.jinja", chat_template)
        settings = json.loads(more.get(TOKENIZER_CONFIG, "null"))
        settings = settings or read_json(source / TOKENIZER_CONFIG)
        if "chat_template" in settings:
            text = json.dumps({**settings, "chat_template": chat_template}, indent=2)
            output.text(TOKENIZER_CONFIG, text + "\n")


def chat_template_of(folder: Path) -> str | None:
    """The chat template of a folder's tokenizer: the default one, where it has several."""
    file = folder / "chat_template.jinja"
    if is_there(file):
        check_file(folder, file)
        return read_bytes(file, "a chat template", PoolError).decode("utf-8", "replace")
    file = folder / TOKENIZER_CONFIG
    if not is_there(file):
        return None
    check_file(folder, file)
    found = read_json(file).get("chat_template")
    if isinstance(found, list):
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def merged_config(
    config: dict[str, Any], untied: bool, dtype: str | None, architecture: str | None = None
) -> dict[str, Any]:
    """The reference's configuration, true to what is written: dtype, tied head, architecture."""
    merged = _typed(config, TORCH_NAMES[dtype]) if dtype else dict(config)
    if dtype and not {"dtype", "torch_dtype"} & config.keys():
        merged["torch_dtype"] = TORCH_NAMES[dtype]
    if architecture is not None:
        merged["architectures"] = [architecture]
    return parted(merged) if untied else merged


def _typed(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A configuration, and those of the models in it, with another type of weights."""
    merged = {
        key: _typed(value, dtype) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in config.items()
    }
    return merged | {key: dtype for key in ("dtype", "torch_dtype") if key in config}


def with_token_ids(config: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the ids of special tokens of another, whose tokenizer is taken.

    What the other leaves out is the default of its kind of model, and so it is left out here.
    """
    kept = {
        key: with_token_ids(value, other[key])
        if isinstance(value, dict) and isinstance(other.get(key), dict)
        else value
        for key, value in config.items()
        if key not in TOKEN_IDS or config.get("model_type") != other.get("model_type")
    }
    return kept | {key: other[key] for key in TOKEN_IDS if key in other}


def companion_files(folder: Path) -> list[Path]:
    """Every file of a checkpoint that can go into a result, or decides how it is read, but weights.

    Raises for non-regular files and for symlinks that point outside the folder.
    """
    if is_pipeline(folder):
        return pipeline_files(folder)
    own = _matching(folder, ("config.json", INDEX, GENERATION, *CODE_FILES, *TOKENIZER))
    return [*own, *_sentence_files(folder)]


def _sentence_files(folder: Path) -> list[Path]:
    """The files of a model of sentences: pooling, normalisation, dense layers behind the model.

    Their weights, where they have some, are the layout's, since no recipe names them.
    """
    found = list(_matching(folder, SENTENCES))
    if not is_there(folder / MODULES):
        return found
    try:
        listed = json.loads(read_bytes(folder / MODULES, "a list of modules", PoolError))
        inner = sorted({str(one["path"]) for one in listed if one.get("path")})
    except (ValueError, TypeError, KeyError, AttributeError):
        raise PoolError(f"{folder / MODULES}: is no list of modules; download it again.") from None
    for name in inner:
        if Path(name).name == name and name != "..":
            found += _matching(folder, (f"{name}/*.json", f"{name}/*.safetensors"))
    return found


def tokenizer_files(folder: Path) -> list[Path]:
    return list(_matching(folder, TOKENIZER))


def check_tokenizer(folder: Path) -> None:
    """Raise for a tokenizer that is a Git LFS pointer: it would go into the result."""
    for file in tokenizer_files(folder):
        with open_regular(file, "a tokenizer", PoolError) as stream:
            if stream.read(len(POINTER)) == POINTER:
                raise PoolError(f"{file}: is a Git LFS pointer; run `git lfs pull`.")


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for file in files_named(folder, patterns):
        if not file.is_dir() or file.is_symlink():
            check_file(folder, file)
            yield file


def files_named(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """What a folder holds under names that match a pattern, at most one folder deeper, sorted.

    Lists the folder once for all patterns, as planning calls this often.
    """
    found: set[Path] = set()
    for home, own in groupby(sorted(patterns, key=dirname), dirname):
        matching = _matcher(tuple(basename(pattern) for pattern in own))
        with suppress(OSError):
            found |= {file for file in (folder / home).iterdir() if matching(file.name)}
    return sorted(found)


@cache
def _matcher(patterns: tuple[str, ...]) -> Callable[[str], object]:
    return re.compile("|".join(translate(pattern) for pattern in patterns)).match


def vocabulary(folder: Path) -> dict[str, int] | bytes | None:
    """Token → id of a folder's tokenizer, or the file that fixes them; None if it has none."""
    fast = folder / "tokenizer.json"
    if is_there(fast):
        check_file(folder, fast)
        content = read_json(fast)
        try:
            words = content["model"]["vocab"]
            if isinstance(words, list):  # unigram: [token, score] in the order of ids
                words = {token: i for i, (token, _) in enumerate(words)}
            added = content.get("added_tokens") or []
            found = {**words, **{token["content"]: token["id"] for token in added}}
            if not found or not all(isinstance(token, str) for token in found):
                raise ValueError
            if any(type(n) is not int or not 0 <= n < MOST_TOKENS for n in found.values()):
                raise ValueError
            return found
        except (KeyError, TypeError, ValueError, AttributeError):
            raise PoolError(f"{fast}: holds no vocabulary; copy or download it again.") from None
    files = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
    fixed = [folder / name for name in files if is_there(folder / name)]
    if not fixed:
        return None
    check_file(folder, fixed[0])
    return read_bytes(fixed[0], "a vocabulary", PoolError)


def token_clashes(folders: Mapping[str, Path]) -> list[str]:
    """Notes about members in whose tokenizers an id stands for another token than in the first's.

    Equal files are equal tokenizers; only others are read. One that is damaged shows nothing.
    """
    files = {n: f for n, folder in folders.items() if is_there(f := folder / "tokenizer.json")}
    digests = file_digests(files.values())
    if len(set(digests.values())) < 2:
        return []
    return list(_clashes(tuple((name, file, digests[file]) for name, file in files.items())))


@lru_cache(maxsize=4)
def _clashes(files: tuple[tuple[str, Path, str], ...]) -> tuple[str, ...]:
    """The same of tokenizers by name and digest. To read one takes a second: every candidate of a
    search asks for the same, and experts may share one that is not the reference's."""
    read: dict[str, dict[int, str]] = {}
    for _, file, digest in files:
        with suppress(PoolError):
            found = {} if digest in read else vocabulary(file.parent)
            if found and isinstance(found, dict):
                read[digest] = {number: token for token, number in found.items()}
    words = {name: read[digest] for name, _, digest in files if digest in read}
    first, notes = next(iter(words), ""), []
    for name, own in words.items():
        if own is words[first]:
            continue
        shared = own.keys() & words[first].keys()
        if clashing := sorted(i for i in shared if own[i] != words[first][i]):
            i = clashing[0]
            notes.append(
                f"{name}: its tokenizer has other tokens than {first}'s under "
                f"{counted(len(clashing), 'id')} ({i} is {own[i]!r} here, {words[first][i]!r} "
                "there), and rows of the embedding are taken by id; tokenizer_source: base or "
                "union takes them by token"
            )
    return tuple(notes)


def added_tokens(folder: Path) -> list[dict[str, Any]]:
    """The entries of a tokenizer's own tokens, special ones among them."""
    file = folder / "tokenizer.json"
    return list(read_json(file).get("added_tokens") or []) if is_there(file) else []


def changed_tokenizer(folder: Path, added: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The files of a tokenizer that have to be written anew, by name, with more tokens."""
    content = read_json(folder / "tokenizer.json")
    entries = [*(content.get("added_tokens") or []), *added]
    content["added_tokens"] = sorted(entries, key=lambda entry: int(entry["id"]))
    files = {"tokenizer.json": json.dumps(content, ensure_ascii=False)}
    settings = read_json(folder / TOKENIZER_CONFIG)
    if isinstance(decoder := settings.get("added_tokens_decoder"), dict):
        own = {str(e["id"]): {k: v for k, v in e.items() if k != "id"} for e in added}
        settings = {**settings, "added_tokens_decoder": {**decoder, **own}}
        files[TOKENIZER_CONFIG] = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    if is_there(folder / "added_tokens.json"):
        known = read_json(folder / "added_tokens.json")
        known |= {str(entry["content"]): entry["id"] for entry in added}
        files["added_tokens.json"] = json.dumps(known, ensure_ascii=False) + "\n"
    return files
