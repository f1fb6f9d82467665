"""Checkpoints in a remote store: local copies of inputs, and uploads of results.

Reading: `stand_in(url)` is a folder in the cache with the small files of the remote one, and stubs
of its weight files (see files/objects.py). It belongs to one version of every object. Every part of
the program that knows folders reads it; tensors come by range from the store.

Writing: `target(url)` is a folder in the cache too. A result is made there as any other, with a
journal, and `upload` puts it into the store. A marker is there from the first object to the last,
and the configuration comes last: without it, no tool takes the folder for a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any

from sigmerge.errors import OutputError, PoolError
from sigmerge.files.cache import cache_folder, kept_json, write_note
from sigmerge.files.digests import digest_now, file_digests
from sigmerge.files.journal import Journal
from sigmerge.files.objects import (
    STAND_IN_RECORD,
    RemoteFile,
    described,
    reaching,
    remote_file,
    remote_folder,
    remote_root,
    url_of,
)
from sigmerge.files.safe_open import is_regular, remove
from sigmerge.kept import size_limit

COPIED_WHOLE = (
    ".json", ".jsonl", ".txt", ".md", ".yaml", ".jinja", ".py", ".model", ".tiktoken", ".spm",
)  # fmt: skip
"""Files that a stand-in has whole; all others are stubs."""
COPY_RECORD = "copy.json"
"""File beside a copy with weights: the digests of its files."""
LARGEST_COPY = 256 << 20
"""Bytes of a file that is copied whole."""
HEADER = 8 + 25_000_000
"""Bytes of a weight file that a stub has at most."""
UNFINISHED = "sigmerge/unfinished"
"""The marker object that exists while a result is uploaded."""
UPLOADED_LAST = ("model.safetensors.index.json", "config.json")
"""Objects that make a folder a checkpoint; they come last."""
RESULT_RECORD = "sigmerge/plan.json"
"""The file by which a result is recognised."""
_WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json")
PART = 64 << 20
"""Bytes of a part of an object that is uploaded in several."""


def stand_in(url: str) -> Path:
    """The folder that stands in for a remote one as it is now."""
    found = _listed(url)
    if UNFINISHED in found:
        raise PoolError(f"{url}: its upload is not finished; run the command that makes it again.")
    if not found:
        raise PoolError(f"{url}: no such folder; no object lies there.")
    content = sorted([name, one.size, one.version] for name, one in found.items())
    key = hashlib.sha256(json.dumps([url, content]).encode()).hexdigest()[:32]
    cache_folder("remote")
    place, name = remote_root() / key, url.rpartition("/")[2]
    about = {"url": url, "name": name, "objects": _stubs(found)}
    there = place.exists()  # it has its name when all is in it
    if there and not _is_whole(place, name, about):
        remove(place)
        there = False
    if not there:
        _make_stand_in(place, about, found)
        _bound()
    with suppress(OSError):
        os.utime(place / STAND_IN_RECORD)  # it is used now
    return place / name


def linked_stand_in(
    url: str, links: Mapping[str, Path], blobs: Path, stubs: Mapping[str, RemoteFile]
) -> Path:
    """The folder that stands in for a snapshot of the hub of which some files are here.

    `links` are those in the folder `blobs` of the hub's cache; the others are stubs of weights. The
    version of a snapshot is in its address, and which files are here is in the folder's name: a
    job keeps the folder that it was started with.
    """
    about: dict[str, Any] = {
        "url": url, "name": url.rpartition("/")[2].partition("@")[0], "links": str(blobs),
        "objects": {name: [one.size, one.version] for name, one in stubs.items()},
    }  # fmt: skip
    key = hashlib.sha256(json.dumps([about, sorted(links)]).encode()).hexdigest()[:32]
    cache_folder("remote")
    place = remote_root() / key
    own = place / about["name"]
    if not _is_whole(place, about["name"], about) or any(not (own / n).exists() for n in links):
        remove(place)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".") as room:
            folder = Path(room) / place.name / about["name"]
            folder.mkdir(parents=True)
            for name, blob in links.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                _link(folder / name, blob)
            for name, one in stubs.items():
                (folder / name).write_bytes(_header(one))
            write_note(folder.parent / STAND_IN_RECORD, {**about, "files": _digests(folder, stubs)})
            _move(folder.parent, place, place / STAND_IN_RECORD)
        _bound()
    with suppress(OSError):
        os.utime(place / STAND_IN_RECORD)  # it is used now
    return own


def _link(name: Path, blob: Path) -> None:
    try:
        name.symlink_to(blob)
    except OSError:  # a system that lets only some users make symbolic links
        name.hardlink_to(blob)


def stand_ins() -> dict[Path, str]:
    """The folders of all local copies and their addresses, without results being uploaded."""
    found = {}
    for place in sorted(remote_root().glob("[!.]*")):
        record = kept_json(place / STAND_IN_RECORD, {"url"})
        if not place.name.startswith(_OUT):
            found[place] = str(record["url"]) if record else ""
    return found


def is_sound(place: Path) -> bool:
    """Verify a local copy, and its copy with weights, by reading their bytes."""
    record = kept_json(place / STAND_IN_RECORD, {"url", "name", "files"})
    if record is None or not _has_files(place, record):
        return False
    copy = _copy_of(place / record["name"])
    return not copy.parent.exists() or _is_copy(copy)


def _bound() -> None:
    """Evict local copies unused for a day, the oldest first, until the others fit."""
    with suppress(OSError):
        used = [(place, (place / STAND_IN_RECORD).stat().st_mtime) for place in stand_ins()]
        sizes = {
            place: sum(file.lstat().st_size for file in place.rglob("*") if file.is_file())
            for place, _ in used
        }
        for place, last in sorted(used, key=itemgetter(1)):
            if time.time() - last < 86400 or sum(sizes.values()) <= size_limit():
                break
            remove(place, if_possible=True)
            del sizes[place]


def _stubs(found: Mapping[str, RemoteFile]) -> dict[str, list[Any]]:
    """What a stand-in has no content of: sizes and versions by name."""
    return {
        name: [one.size, one.version]
        for name, one in found.items()
        if not name.endswith(COPIED_WHOLE) or one.size > LARGEST_COPY
    }


def _is_whole(place: Path, name: str, about: Mapping[str, Any]) -> bool:
    """Whether a stand-in holds what was put there; of weights it is their headers."""
    record = kept_json(place / STAND_IN_RECORD, {"files"})
    if record is None or any(record.get(key) != value for key, value in about.items()):
        return False
    return _has_files(place, record)


def _has_files(place: Path, record: Mapping[str, Any]) -> bool:
    try:
        return _digests(place / record["name"], record["files"]) == record["files"]
    except (OSError, TypeError):
        return False


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def _listed(url: str) -> dict[str, RemoteFile]:
    """The objects of a remote folder, two folders deep, by their names there."""
    with reaching(url) as (store, path):
        store.invalidate_cache()
        entries = store.find(path, maxdepth=2, detail=True)
        found = {}
        for where, info in entries.items():
            name = PurePosixPath(where).relative_to(PurePosixPath(path)).as_posix()
            if name != "." and ".." not in PurePosixPath(name).parts:
                found[name] = described(f"{url}/{name}", info)
    return found


def _make_stand_in(place: Path, about: Mapping[str, Any], found: Mapping[str, RemoteFile]) -> None:
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".") as room:
        folder = Path(room) / place.name / about["name"]
        for relative, one in found.items():
            file = folder / relative
            file.parent.mkdir(parents=True, exist_ok=True)
            if relative not in about["objects"]:
                file.write_bytes(one.read(0, one.size))
            else:
                file.write_bytes(_header(one) if relative.endswith(".safetensors") else b"")
        write_note(folder.parent / STAND_IN_RECORD, {**about, "files": _digests(folder, found)})
        _move(folder.parent, place, place / STAND_IN_RECORD)


def _move(made: Path, place: Path, sign: Path) -> None:
    """Put a folder where it belongs, unless another process was first: `sign` is there then."""
    try:
        made.rename(place)
    except OSError:
        if not sign.exists():
            raise


def _header(one: RemoteFile) -> bytes:
    """The beginning of a weight file, to the end of its header if that can be right."""
    prefix = one.read(0, 8)
    length = 8 + int.from_bytes(prefix, "little")
    return prefix + (one.read(8, length) if length <= min(one.size, HEADER) else b"")


def with_weights(folder: Path) -> Path:
    """A folder that other programs can load: of a stand-in, a copy with its weights, kept."""
    found = remote_folder(folder)
    if found is None:
        return folder
    _, own = found
    copy = _copy_of(own)
    if not _is_copy(copy):
        remove(copy.parent)
        with tempfile.TemporaryDirectory(dir=own.parent, prefix=".") as room:
            made = Path(room) / copy.parent.name / own.name
            shutil.copytree(own, made)
            for file in own.rglob("*.safetensors"):
                if one := remote_file(file):
                    _download(one, made / file.relative_to(own))
            files = {
                str(f.relative_to(made)): digest_now(f) for f in made.rglob("*") if f.is_file()
            }
            write_note(made.parent / COPY_RECORD, {"stand_in": own.parent.name, "files": files})
            _move(made.parent, copy.parent, copy.parent / COPY_RECORD)
        _bound()
    return copy


def _copy_of(own: Path) -> Path:
    return own.parent / ("copy" if own.name == "whole" else "whole") / own.name


def _is_copy(copy: Path) -> bool:
    """True if a copy with weights exists and is unchanged."""
    record = kept_json(copy.parent / COPY_RECORD, {"stand_in", "files"})
    if record is None or record["stand_in"] != copy.parents[1].name:
        return False
    listed = {copy / name: digest for name, digest in record["files"].items()}
    if not all(is_regular(file) for file in listed):
        return False
    return file_digests(listed) == listed


def _download(one: RemoteFile, file: Path) -> None:
    with reaching(one.url) as (store, path):
        store.get_file(path, str(file))
    if file.stat().st_size != one.size or one.now() != one:
        raise PoolError(f"{one.url}: changed while it was read.")


def place_of(name: str | os.PathLike[str]) -> Path:
    """The folder of an input: a path as it is, an address by its stand-in."""
    url = url_of(name)
    return Path(name) if url is None else stand_in(url)


def target(name: str | os.PathLike[str]) -> Path:
    """The folder of a result: a path as it is, an address by the folder that is uploaded."""
    url = url_of(name)
    if url is None:
        return Path(name)
    parts = url.partition("://")[2].split("/")
    if url.startswith("file:"):
        raise OutputError(f"{url}: write a local folder as its path, without file:.")
    if len(parts) < 2:
        raise OutputError(f"{url}: choose a folder in it for the result.")
    if {".", ".."} & set(parts):
        raise OutputError(f"{url}: write the address without . and .. in it.")
    cache_folder("remote")
    key, own = hashlib.sha256(url.encode()).hexdigest()[:32], url.rpartition("/")[2]
    place = remote_root() / f"{_OUT}{key}"
    about: dict[str, Any] = {"url": url, "name": own, "objects": {}}
    if kept_json(place / STAND_IN_RECORD, set()) != about:
        place.mkdir(exist_ok=True)
        write_note(place / STAND_IN_RECORD, about)
    return place / own


def target_url(final: Path) -> str | None:
    """The address that a result goes to; None if it stays here."""
    found = remote_folder(final)
    if found is None or found[1] != final or not final.parent.name.startswith(_OUT):
        return None
    return found[0]


def check_remote_target(url: str, overwrite: bool, inputs: Iterable[str]) -> None:
    """Refuse an address where something finished or foreign lies, or that has to do with inputs."""
    for one in inputs:
        if f"{one}/".startswith(f"{url}/"):
            raise OutputError(f"{url}: holds an input, {one}; choose a new folder.")
        if f"{url}/".startswith(f"{one}/"):
            raise OutputError(f"{url}: lies inside an input, {one}; choose another folder.")
    try:
        found = _listed(url)
    except PoolError as error:
        if "no such" not in str(error):
            raise OutputError(str(error)) from None
        _check_bucket(url)
        return
    if not found:
        _check_bucket(url)
    if not found or UNFINISHED in found:
        return
    if not overwrite:
        raise OutputError(f"{url}: exists already; pass --overwrite to replace it.")
    if not names_a_checkpoint(found):
        raise OutputError(
            f"{url}: is not a checkpoint folder, and --overwrite only replaces those."
        )


def names_a_checkpoint(names: Collection[str]) -> bool:
    """Whether a folder with these files may be replaced.

    A configuration alone is no checkpoint: weights or the record of a result belong to it. A result
    of tensors that no configuration describes has such a record.
    """
    weights = any("/" not in name and name.endswith(_WEIGHTS) for name in names)
    if RESULT_RECORD in names:
        return weights or not {"config.json", "model_index.json"}.isdisjoint(names)
    return "config.json" in names and weights


def _check_bucket(url: str) -> None:
    """Raise if the bucket of an S3 address is not there; other stores say so when they are used."""
    with reaching(url, OutputError) as (store, path):
        bucket = path.partition("/")[0]
        if hasattr(store, "call_s3") and not store.exists(bucket):
            raise FileNotFoundError(bucket)


def upload(
    folder: Path,
    digests: Mapping[str, str],
    url: str,
    progress: Callable[[str, int, int], None],
) -> None:
    """Put a finished folder into the store; an interrupted upload is continued.

    `digests` names its files. Those that an earlier run put there, and that are still there, are
    not sent again. What lay at the address before goes. No lock reaches another machine: if one
    wrote there meanwhile, the last of the two to end says so, and the folder stays unfinished.
    """
    names = sorted(digests, key=_order)
    sizes = {name: (folder / name).stat().st_size for name in names}
    with reaching(url, OutputError) as (store, path), Journal(
        folder.parent / "uploads.jsonl", {"to": url}, [{"name"}], "upload"
    ) as journal:  # fmt: skip
        sent = {line["name"]: line for line in journal.records}
        _drop_parts(store, path)
        mark = f"The result that goes here is not whole yet.\n{os.urandom(16).hex()}\n"
        store.pipe_file(f"{path}/{UNFINISHED}", mark.encode())  # each upload has its own
        before = _listed(url)
        done = [name for name in names if _is_there(before.get(name), sent.get(name), digests)]
        stale = [name for name in before if name not in done and name != UNFINISHED]
        for name in sorted(stale, key=lambda name: name not in UPLOADED_LAST):
            store.rm_file(f"{path}/{name}")
        ours = {name: before[name].version for name in (*done, UNFINISHED) if name in before}
        for name in names:
            if name not in done:
                store.put_file(str(folder / name), f"{path}/{name}", chunksize=PART)
                now = RemoteFile(f"{url}/{name}", 0, "").now()
                if now.size != sizes[name]:
                    raise OutputError(f"{url}/{name}: has {now.size} bytes, and {sizes[name]} were "
                                      "sent. Run the same command again.")  # fmt: skip
                done.append(name)
                ours[name] = now.version
                journal.append({"name": name, "digest": digests[name], "version": now.version})
            progress("uploading", sum(sizes[name] for name in done), sum(sizes.values()))
        if {name: one.version for name, one in _listed(url).items()} != ours:
            store.pipe_file(f"{path}/{UNFINISHED}", mark.encode())
            raise OutputError(f"{url}: another run wrote there meanwhile, so the result is not "
                              "whole. Run the same command again, alone.")  # fmt: skip
        store.rm_file(f"{path}/{UNFINISHED}")
        store.invalidate_cache()
    remove(folder.parent / "uploads.jsonl")


def _order(name: str) -> tuple[int, str]:
    return UPLOADED_LAST.index(name) + 1 if name in UPLOADED_LAST else 0, name


def _drop_parts(store: Any, path: str) -> None:
    """Parts of objects, which a kill ended in the middle, take room in S3 and are no object."""
    if not hasattr(store, "call_s3"):
        return
    bucket, _, folder = path.partition("/")
    with suppress(PermissionError):
        listed = store.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{folder}/")
        for one in listed.get("Uploads", ()):
            named = {"Bucket": bucket, "Key": one["Key"], "UploadId": one["UploadId"]}
            store.call_s3("abort_multipart_upload", **named)


def _is_there(
    there: RemoteFile | None, sent: Mapping[str, Any] | None, digests: Mapping[str, str]
) -> bool:
    """Whether an object is what an earlier run sent, and what this one would send."""
    if there is None or sent is None:
        return False
    return sent["version"] == there.version and sent["digest"] == digests[sent["name"]]


_OUT = "to-"
