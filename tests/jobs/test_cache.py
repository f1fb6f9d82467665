"""`sigmerge cache`: every entry is shown, damage is found, and only what is named goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sigmerge import kept
from sigmerge.checkpoints.remote import stand_in, target, with_weights
from sigmerge.errors import OutputError, RecipeError
from sigmerge.files import digests
from sigmerge.files.digests import file_digests
from sigmerge.files.objects import STAND_IN_RECORD
from sigmerge.jobs.cache import clear, listing, prune
from sigmerge.kept import BESIDE, Derivation, Given, Inputs
from tests.command_line import sigmerge

pytestmark = pytest.mark.usefixtures("own_cache")


def _make(given: Given) -> str:
    (given.out / "data").write_bytes(b"x" * 1000)
    return "value"


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A pool with one entry beside its members, and two entries in the user's cache."""
    member = tmp_path / "pool/math"
    member.mkdir(parents=True)
    (member / "text").write_text("content")
    inputs = Inputs.of(text=member / "text")
    kept.get(Derivation("grams", _make, inputs, of="math", near=member))
    kept.get(Derivation("score", _make, inputs, {"split": "a"}, ("numpy",), of="math"))
    kept.get(Derivation("score", _make, inputs, {"split": "b"}, of="code"))
    return member.parent


def test_every_entry_is_listed(pool: Path):
    assert sorted(entry.of for entry in listing().entries) == ["code", "math"]
    found = sigmerge("cache", "list", "--pool", pool)
    assert found.code == 0 and found.out.count("\n") == 4
    assert "grams of math: 1." in found.out and "under numpy " in found.out
    told = sigmerge("cache", "list", "--pool", pool, "--json").json
    assert {entry["name"] for entry in told["entries"]} == {"grams", "score"}
    assert told["bytes"] == sum(entry["bytes"] for entry in told["entries"]) > 3000
    assert told["limit"] == kept.SIZE_LIMIT


def test_damage_is_found_and_goes_with_the_next_pruning(pool: Path):
    assert sigmerge("cache", "verify").code == 0
    entry = listing().entries[0]
    data = entry.files[1]
    data.write_bytes(b"y" * data.stat().st_size)
    ran = sigmerge("cache", "verify")
    assert ran.code == 4 and f"damaged: score of {entry.of}" in ran.out and "1 of 2" in ran.out
    data.write_bytes(b"y")
    assert [e.key for e in listing().damaged] == []
    entry.files[0].write_text("{}")
    assert [e.key for e in prune().entries] == [entry.key]
    assert len(listing().entries) == 1


def test_only_what_is_old_or_large_goes(pool: Path):
    old = listing().entries[0]
    os.utime(old.files[0], (time.time() - 7200,) * 2)
    assert prune(older_than="3h").entries == ()
    assert prune(older_than="1h", larger_than="2kB").entries == ()
    assert [e.key for e in prune(older_than="90min", larger_than="1kB").entries] == [old.key]
    assert len(prune(larger_than="1kB").entries) == 1
    assert len(listing([pool]).entries) == 1


def test_all_goes_where_that_is_asked(pool: Path):
    (pool / BESIDE / "notes.txt").write_text("not ours")
    ran = sigmerge("cache", "clear", "--pool", pool)
    assert (
        ran.code == 0 and ran.out.startswith("removed") is False and "removed 3 entries" in ran.out
    )
    assert listing([pool]).entries == ()
    assert (pool / BESIDE / "notes.txt").is_file()


@pytest.mark.parametrize("text", ["soon", "3", "3 moons", "-3d", ""])
def test_an_age_that_is_none_is_refused(pool: Path, text: str):
    with pytest.raises(OutputError, match="30d, 12h or 90min"):
        prune(older_than=text)
    assert len(listing([pool]).entries) == 3


def test_a_wrong_size_or_pool_is_refused(pool: Path):
    with pytest.raises(RecipeError, match="is not a size"):
        prune(larger_than="much")
    with pytest.raises(OutputError, match="no such folder"):
        clear([pool / "nowhere"])
    assert len(listing([pool]).entries) == 3


@pytest.fixture
def remote(pool: Path) -> Path:
    """The place of a copy of a remote folder."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.pipe("/cached/model/config.json", b"{}")
    store.pipe("/cached/model/model.safetensors", b"\2\0\0\0\0\0\0\0{}")
    return stand_in("memory://cached/model").parent


def test_copies_of_remote_folders_are_listed_and_go(remote: Path):
    [entry] = [entry for entry in listing().entries if entry.name == "remote"]
    assert entry.of == "memory://cached/model" and entry.bytes > 10 and entry.sound
    assert prune(older_than="1h").entries == ()
    os.utime(remote / STAND_IN_RECORD, (1, 1))
    stand_in("memory://cached/model")  # which is a use
    assert prune(older_than="1h").entries == () and prune(larger_than="1MB").entries == ()
    os.utime(remote / STAND_IN_RECORD, (1, 1))
    assert [entry.name for entry in prune(older_than="1h").entries] == ["remote"]
    assert not remote.exists()
    clear()
    assert listing().entries == ()


@pytest.mark.parametrize("file", ["objects.json", "model/config.json", "model/model.safetensors",
                                  "whole/model/config.json"])  # fmt: skip
def test_a_copy_of_a_remote_folder_is_verified(remote: Path, file: str):
    with_weights(remote / "model")
    assert all(entry.sound for entry in listing(verify=True).entries)
    content = (remote / file).read_bytes()
    (remote / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert [entry.name for entry in listing(verify=True).damaged] == ["remote"]


def test_copies_of_remote_folders_are_bounded(remote: Path, monkeypatch: pytest.MonkeyPatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("SIGMERGE_CACHE_SIZE", "1")
    for name in ("one", "two"):
        assert remote.exists()  # it was used today
        fsspec.filesystem("memory").pipe(f"/cached/{name}/config.json", b"{}")
        stand_in(f"memory://cached/{name}")
        if name == "one":
            os.utime(remote / STAND_IN_RECORD, (1, 1))
    assert not remote.exists() and stand_in("memory://cached/one").exists()


def test_a_result_on_its_way_to_a_store_is_no_entry(remote: Path):
    on_its_way = target("memory://cached/result")
    (on_its_way / "half").mkdir(parents=True)
    clear()
    assert (on_its_way / "half").exists() and not remote.exists()


def test_digests_are_listed_and_those_of_changed_files_go(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(digests, "GRAIN", -(10**9))  # files need not be old
    files = [tmp_path / name for name in ("same", "changed", "gone", "damaged")]
    for file in files:
        file.write_text("content")
        file_digests([file])
    [entry] = [entry for entry in listing().entries if entry.name == "digests"]
    assert entry.of == f"{len(digests.notes())} files" and entry.bytes > 100
    assert digests.idle_notes() == []
    files[1].write_text("other content")
    files[2].unlink()
    [damaged] = [note for note in digests.notes() if str(files[3]) in note.read_text()]
    damaged.write_text("{")
    assert [entry.name for entry in listing(verify=True).damaged] == ["digests"]
    before = {*digests.notes()}
    [entry] = [entry for entry in prune().entries if entry.name == "digests"]
    assert entry.of == "3 files" and damaged in before - {*digests.notes()}
    assert len(before - {*digests.notes()}) == 3 and digests.idle_notes() == []
    clear()
    assert digests.notes() == []
