"""Any store of fsspec will do; this one is a memory."""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from blake3 import blake3

import sigmerge
from sigmerge.checkpoints import prefetch
from sigmerge.checkpoints.remote import COPY_RECORD, stand_in, target, target_url, with_weights
from sigmerge.errors import MissingExtra
from sigmerge.files import digests, objects, streaming_digest
from sigmerge.files.digests import TREE, rehashing
from sigmerge.files.objects import STAND_IN_RECORD, RemoteFile, remote_file
from sigmerge.files.safe_open import remove
from tests.pools import PoolOnDisk, make_pool
from tests.storage.conftest import files, weights


def in_memory(root: Path, method: str, **how: Any) -> tuple[PoolOnDisk, dict[str, Any]]:
    """A pool, and a recipe of its copy in a memory."""
    pool = make_pool(root, **how)
    store = fsspec.filesystem("memory")
    for name, content in files(pool.root).items():
        store.pipe_file(f"/pool/{name}", content)
    recipe = pool.recipe(method)
    recipe["base_model"] = "memory://pool/reference"
    for model in recipe["models"]:
        model["model"] = f"memory://pool/{Path(model['model']).name}"
    return pool, recipe


def test_a_merge_from_and_to_a_memory(tmp_path: Path) -> None:
    pool, recipe = in_memory(tmp_path / "pool", "linear", layers=2)
    sigmerge.merge(pool.recipe("linear"), tmp_path / "out")
    sigmerge.merge(recipe, "memory://out/merged")
    store = fsspec.filesystem("memory")
    names = store.find("/out/merged")
    found = {name.removeprefix("/out/merged/"): store.cat_file(name) for name in names}
    assert weights(found) == weights(files(tmp_path / "out"))


LEAF = 5000


def by_leaves(content: bytes) -> str:
    """The digest of a file longer than a run, as the guide defines it."""
    pieces = [content[i : i + LEAF] for i in range(0, len(content), LEAF)]
    return "4MiB-blake3:" + blake3(b"".join(blake3(p).digest() for p in pieces)).hexdigest()


@pytest.mark.parametrize("held", [1 << 20, 0])
@pytest.mark.parametrize("method", ["ties", "linear"])
def test_what_is_merged_is_hashed_as_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, held: int
) -> None:
    """Layer 10 lies before layer 2, which is read first. Every byte of a file is requested once;
    without room for what comes early, parts are requested again. The reference of linear is hashed
    alone."""
    monkeypatch.setattr(digests, "LEAF", LEAF)
    monkeypatch.setattr(digests, "RUN_BYTES", 2 * LEAF)
    monkeypatch.setattr(prefetch, "UNIT", 900)
    monkeypatch.setattr(streaming_digest, "HELD", held)
    # Models are compared up to the first difference, which in small ones takes the rest along.
    monkeypatch.setattr("sigmerge.checkpoints.pool.same_bytes", lambda *_: False)
    requested: dict[str, list[tuple[int, int]]] = {}
    read = RemoteFile.read

    def noted(self: RemoteFile, begin: int, end: int) -> bytes:
        requested.setdefault(self.url, []).append((begin, end))
        return read(self, begin, end)

    monkeypatch.setattr(RemoteFile, "read", noted)
    pool, recipe = in_memory(tmp_path / f"{method}-{held}", method, layers=12, dtype="bf16")
    made = sigmerge.merge(recipe, tmp_path / "out", threads=2)
    found = {one.file: one.sha256 for one in made.provenance.inputs}
    again = 0
    for folder in (pool.reference, *pool.experts.values())[method == "linear" :]:
        content = (folder / "model.safetensors").read_bytes()
        url = f"memory://pool/{folder.name}/model.safetensors"
        assert len(content) > 3 * LEAF and found[url] == by_leaves(content)
        again += sum(end - begin for begin, end in requested[url]) - len(content)
    assert (again == 0) == (held > 0)


def stored(folder: str, content: bytes) -> tuple[Path, RemoteFile]:
    """A file in the memory: its stand-in here, and itself."""
    fsspec.filesystem("memory").pipe_file(f"/{folder}/model.bin", content)
    [file] = [f for f in stand_in(f"memory://{folder}").iterdir() if f.name == "model.bin"]
    remote = remote_file(file)
    assert remote is not None
    return file, remote


def test_ranges_in_any_order_give_the_digests_of_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "LEAF", 500)
    monkeypatch.setattr(digests, "RUN_BYTES", 1000)
    content = np.random.default_rng(3).bytes(4321)
    file, remote = stored("some", content)
    rng = np.random.default_rng(4)
    cuts = sorted({0, 4321, *rng.integers(0, 4321, 30).tolist()})
    runs = list(pairwise(cuts))
    for _ in range(20):
        rng.shuffle(runs)
        some = streaming_digest.Leaves([file])
        for number, (begin, end) in enumerate(runs):
            some.take(remote, begin, content[begin : end + number % 3])  # some overlap
        some.take(remote, 600, content[600:700])  # once more, of a leaf that is complete
        assert not some._begun and not some._held
        for begin in range(0, 4321, 1000):
            starts = range(begin, min(begin + 1000, 4321), 500)
            wanted = b"".join(blake3(content[at : at + 500]).digest() for at in starts)
            assert some.digest(remote, begin) == wanted
    missing = streaming_digest.Leaves([file])
    missing.take(remote, 1, content[1:])
    assert [missing.digest(remote, begin) is None for begin in (0, 1000)] == [True, False]
    parts = [blake3(content[at : at + 500]).digest() for at in range(0, 4321, 500)]
    found = digests.file_digests([file], passed=some.digest)
    assert found == {file: TREE + blake3(b"".join(parts)).hexdigest()}


@pytest.mark.parametrize("how", ["read", "passed"])
@pytest.mark.parametrize("changed", [False, True])
def test_the_digest_of_an_object_is_remembered_if_its_version_stays(
    monkeypatch: pytest.MonkeyPatch, how: str, changed: bool
) -> None:
    monkeypatch.setattr(digests, "LEAF", 500)
    monkeypatch.setattr(digests, "RUN_BYTES", 1000)
    content, store = np.random.default_rng(5).bytes(2321), fsspec.filesystem("memory")
    address = f"/{how}-{changed}/model.bin"
    store.pipe_file(address, content)
    [file] = [f for f in stand_in(f"memory:/{address[:-10]}").iterdir() if f.name == "model.bin"]
    remote = remote_file(file)
    assert remote is not None
    some = streaming_digest.Leaves([file])
    some.take(remote, 0, content)
    if changed:
        store.pipe_file(address, content)
    digests.file_digests([file], passed=some.digest if how == "passed" else None)
    assert digests.unknown([file]) == ([file] if changed else [])


def test_a_range_that_came_before_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "LEAF", 500)
    monkeypatch.setattr(digests, "RUN_BYTES", 500)
    content = np.random.default_rng(6).bytes(600)
    file, remote = stored("again", content)
    some = streaming_digest.Leaves([file])
    for begin, end in (
        (0, 300),
        (100, 200),
        (0, 300),
        (300, 300),
        (350, 400),
        (200, 450),
        (450, 500),
    ):
        some.take(remote, begin, content[begin:end])
    assert some.digest(remote, 0) == blake3(content[:500]).digest()


def test_an_empty_file_has_its_plain_digest() -> None:
    fsspec.filesystem("memory").pipe_file("/empty/model.bin", b"")
    [file] = [f for f in stand_in("memory://empty").iterdir() if f.name == "model.bin"]
    for files_read in ([file], []):
        with rehashing():
            found = digests.file_digests([file], passed=streaming_digest.Leaves(files_read).digest)
        assert found == {file: sha256(b"").hexdigest()}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("s3://bucket/model/", "s3://bucket/model"),
        (Path("s3://bucket/model"), "s3://bucket/model"),
        ("S3://bucket/Model", "s3://bucket/Model"),
        ("hf://owner/name@main", "hf://owner/name@main"),
        ("/folder/s3:/x", None),
        ("owner/name", None),
        ("C:/folder", None),
        ("", None),
    ],
)
def test_what_is_an_address(name: str | Path, found: str | None) -> None:
    assert objects.url_of(name) == found


def test_without_fsspec_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(MissingExtra, match=r"pip install 'sigmerge-llm\[storage\]'"):
        objects.RemoteFile("s3://bucket/x", 1, "").read(0, 1)


def test_a_folder_that_is_no_stand_in_is_not_taken_for_one() -> None:
    """What is in the place of one, without its record, is made again."""
    place = stored("taken", b"some")[0].parent.parent
    (place / STAND_IN_RECORD).unlink()
    stand_in("memory://taken")
    assert (place / STAND_IN_RECORD).exists()


def test_a_stand_in_in_the_place_of_another_is_made_again() -> None:
    """Else another model would be merged."""
    one, other = stored("here/same", b"one")[0].parent, stored("there/same", b"two")[0].parent
    remove(one.parent)
    other.parent.rename(one.parent)
    assert stand_in("memory://here/same") == one
    record = json.loads((one.parent / STAND_IN_RECORD).read_text())
    assert record["url"] == "memory://here/same"


@pytest.mark.parametrize("name", ["model", "whole"])
@pytest.mark.parametrize("damaged", ["model.safetensors", "config.json", "record", "folder"])
def test_a_damaged_copy_with_weights_is_made_again(tmp_path: Path, name: str, damaged: str) -> None:
    """Programs that load it would answer by other weights."""
    store = fsspec.filesystem("memory")
    pool = make_pool(tmp_path / "pool", experts=1)
    for file, content in files(pool.reference).items():
        store.pipe_file(f"/copied/{name}/{file}", content)
    copy = with_weights(stand_in(f"memory://copied/{name}"))
    whole, made = files(copy), copy.stat().st_ino
    assert with_weights(stand_in(f"memory://copied/{name}")).stat().st_ino == made
    if damaged == "folder":
        remove(copy)
        copy.mkdir()
    else:
        file = copy.parent / COPY_RECORD if damaged == "record" else copy / damaged
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    assert (
        files(with_weights(stand_in(f"memory://copied/{name}"))) == whole == files(pool.reference)
    )


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"url": "memory://else", "name": "x", "objects": {}}']
)
def test_a_damaged_record_of_where_a_result_goes_is_made_again(content: bytes) -> None:
    """The result would stay in the cache, and the command would say that it is done."""
    place = target("memory://results/out")
    (place.parent / STAND_IN_RECORD).write_bytes(content)
    objects._objects.cache_clear()
    assert target_url(target("memory://results/out")) == "memory://results/out"
