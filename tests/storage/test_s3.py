"""A merge from and to a real S3 server: the bytes of the local one, also killed and run again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import sigmerge
from sigmerge.checkpoints import prefetch
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.remote import UNFINISHED, place_of, stand_in, upload
from sigmerge.checkpoints.writer import Output
from sigmerge.errors import OutputError, PoolError, RecipeError
from sigmerge.files.identity import identify
from sigmerge.files.objects import RemoteFile
from sigmerge.jobs import pools
from sigmerge.jobs.occupancy import OUTSIDE_LAYERS
from sigmerge.jobs.work_folder import WorkFolder
from tests.command_line import refused
from tests.command_line import sigmerge as command_line
from tests.storage.conftest import CREDENTIALS, Remote, files, weights

DENSITY = {"density": (0.3, 0.5, 0.7)}
SHARD = "8KB"
DYING = """
import os, signal, sys
import sigmerge.checkpoints.remote as remote
from sigmerge.checkpoints.writer import Output
import sigmerge

def dying(place, name, at):
    real, count = getattr(place, name), []
    def patched(*args, **how):
        done = real(*args, **how)
        count.append(1)
        if len(count) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    setattr(place, name, patched)

if sys.argv[3] == "merging":
    dying(Output, "finish", 2)
else:
    import s3fs
    dying(s3fs.S3FileSystem, "put_file", int(sys.argv[3]))
sigmerge.merge(sys.argv[1], sys.argv[2], threads=2, max_shard_size="8KB")
"""


@pytest.fixture(scope="module")
def merged(remote: Remote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The merge of the local pool into a local folder."""
    out = tmp_path_factory.mktemp("local") / "out"
    sigmerge.merge(remote.local.recipe("ties", each=DENSITY), out, max_shard_size=SHARD)
    return weights(files(out))


def sectioned(remote: Remote, **top: Any) -> dict[str, Any]:
    return remote.recipe("ties", each=DENSITY, **top)


def test_a_merge_from_and_to_a_bucket_is_the_local_one(
    remote: Remote, merged: dict[str, bytes]
) -> None:
    done = sigmerge.merge(sectioned(remote), "s3://models/out/merged", max_shard_size=SHARD)
    found = remote.objects("out/merged")
    assert weights(found) == merged
    assert len([name for name in found if name.endswith(".safetensors")]) > 1
    assert UNFINISHED not in found
    assert done.out == "s3://models/out/merged"
    record = json.loads(found["sigmerge/provenance.json"])
    sizes = {f"s3://models/pool/math/{n}": len(d) for n, d in remote.objects("pool/math").items()}
    named = {one["file"]: one["size"] for one in record["inputs"] if one["member"] == "math"}
    assert named and named.items() <= sizes.items()
    plan = json.loads(found["sigmerge/plan.json"])
    assert plan["experts"]["math"]["path"] == "s3://models/pool/math"


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where the blocks of results begin, in the order in which they are made.

    What a repair copies comes after its layers.
    """
    noted: list[tuple[int, int]] = []
    finish = Output.finish

    def noting(self: Output, block: str, record: Any = None, tensors: Any = None) -> None:
        if block != OUTSIDE_LAYERS:
            noted.append(self.layout.place(tensors))
        finish(self, block, record, tensors)

    monkeypatch.setattr(Output, "finish", noting)
    return noted


@pytest.mark.parametrize("unit", [3000])
def test_read_ahead_of_any_size_reads_the_same(
    remote: Remote,
    tmp_path: Path,
    merged: dict[str, bytes],
    monkeypatch: Any,
    unit: int,
    places: list[tuple[int, int]],
) -> None:
    monkeypatch.setattr(prefetch, "UNIT", unit)
    monkeypatch.setattr(prefetch, "AHEAD_BYTES", 5 * unit)
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    sigmerge.merge(sectioned(remote), tmp_path / "out", max_shard_size=SHARD, threads=2)
    assert weights(files(tmp_path / "out")) == merged
    assert places[-1][0] > 0 and places == sorted(places)  # what is remote is read in order


@pytest.mark.parametrize("when", ["merging", "3"])
def test_killed_and_run_again(
    remote: Remote, tmp_path: Path, merged: dict[str, bytes], when: str
) -> None:
    recipe, folder = tmp_path / "recipe.yaml", f"out/killed-{when}"
    recipe.write_text(yaml.safe_dump(sectioned(remote)))
    command = [sys.executable, "-c", DYING, str(recipe), f"s3://models/{folder}", when]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    left = remote.objects(folder)
    assert "config.json" not in left
    if left:
        with pytest.raises(PoolError, match="its upload is not finished"):
            place_of(f"s3://models/{folder}")
    again = sigmerge.merge(recipe, f"s3://models/{folder}", max_shard_size=SHARD)
    assert weights(remote.objects(folder)) == merged
    assert UNFINISHED not in remote.objects(folder)
    assert again.provenance.blocks_resumed


class Stopped(BaseException):
    pass


def test_an_upload_goes_on_with_what_is_still_its_own(
    remote: Remote, tmp_path: Path, monkeypatch: Any
) -> None:
    """Objects of another hand are sent again, and parts of objects go; what is older goes first."""
    content = {"a.safetensors": b"aaaa", "b.safetensors": b"bbbb", "config.json": b"{}"}
    digests = {name: f"digest of {name}" for name in content}
    folder, place, url = tmp_path / "x/up", "models/up", "s3://models/up"
    folder.mkdir(parents=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    for name in ("a-note.txt", "config.json"):
        remote.bucket.pipe_file(f"{place}/{name}", b"old")
    removed: list[str] = []
    sent: list[str] = []
    remove, put = remote.bucket.rm_file, remote.bucket.put_file

    def removing(place: str) -> None:
        removed.append(place)
        remove(place)

    def sending(file: str, place: str, **how: Any) -> None:
        sent.append(place)
        put(file, place, **how)

    monkeypatch.setattr(remote.bucket, "rm_file", removing)
    monkeypatch.setattr(remote.bucket, "put_file", sending)

    def stop(stage: str, done: int, total: int) -> None:
        if done == 8:
            raise Stopped

    with pytest.raises(Stopped):
        upload(folder, digests, url, stop)
    assert removed == [f"{place}/config.json", f"{place}/a-note.txt"]
    remote.bucket.pipe_file(f"{place}/a.safetensors", b"????")
    begun = {"Bucket": "models", "Key": "up/b.safetensors"}
    remote.bucket.call_s3("create_multipart_upload", **begun)
    sent.clear()
    upload(folder, digests, url, lambda *_: None)
    assert remote.objects("up") == content
    assert sent == [f"{place}/a.safetensors", f"{place}/config.json"]
    left = remote.bucket.call_s3("list_multipart_uploads", Bucket="models", Prefix="up/")
    assert not left.get("Uploads")
    monkeypatch.setattr(RemoteFile, "now", lambda one: RemoteFile(one.url, 1, "1"))
    with pytest.raises(OutputError, match="has 1 bytes, and 4 were sent"):
        upload(folder, digests, url, lambda *_: None)


def test_what_two_uploads_at_once_mixed_stays_unfinished(remote: Remote, tmp_path: Path) -> None:
    """As from two machines, which share no lock."""
    url, names = "s3://models/two", ("a.safetensors", "config.json")
    folders = [tmp_path / one / "two" for one in ("one", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(folder.parent.name)

    def both(_: str, done: int, __: int) -> None:
        """The other run begins and ends when the first one has sent its first file."""
        if done == 3:
            upload(folders[1], dict.fromkeys(names, "other"), url, lambda *_: None)

    with pytest.raises(OutputError, match="another run wrote there meanwhile"):
        upload(folders[0], dict.fromkeys(names, "one"), url, both)
    assert UNFINISHED in remote.objects("two")
    upload(folders[0], dict.fromkeys(names, "one"), url, lambda *_: None)
    assert remote.objects("two") == dict.fromkeys(names, b"one")


def test_a_repair_from_and_to_a_bucket_is_the_local_one(
    remote: Remote, tmp_path: Path, places: list[tuple[int, int]]
) -> None:
    scores = {"scores": str(remote.local.root / "scores.json")}
    local = remote.local.recipe("linear", repair=scores)
    sigmerge.repair(local, tmp_path / "local", anchor=remote.local.root / "anchor")
    recipe = remote.local.write(remote.recipe("linear", repair=scores), "remote.yaml")
    out = ("s3://models/out/repaired", "--anchor", "s3://models/pool/anchor")
    ran = command_line("repair", recipe, *out, "--json")
    assert ran.code == 0, ran.err
    found = remote.objects("out/repaired")
    assert weights(found) == weights(files(tmp_path / "local"))
    plan = tmp_path / "plan.json"
    plan.write_bytes(found["sigmerge/plan.json"])
    places.clear()
    sigmerge.replay(plan, tmp_path / "again")
    assert weights(files(tmp_path / "again")) == weights(found)
    assert places[-1][0] > 0 and places == sorted(places)  # what is remote is read in order


def test_an_older_result_is_replaced_only_when_asked(
    remote: Remote, merged: dict[str, bytes]
) -> None:
    remote.bucket.pipe_file("models/old/config.json", b"{}")
    remote.bucket.pipe_file("models/old/model.safetensors", b"old")
    with pytest.raises(OutputError, match="exists already; pass --overwrite"):
        sigmerge.merge(sectioned(remote), "s3://models/old")
    assert remote.objects("old") == {"config.json": b"{}", "model.safetensors": b"old"}
    sigmerge.merge(sectioned(remote), "s3://models/old", max_shard_size=SHARD, overwrite=True)
    assert weights(remote.objects("old")) == merged
    for name in ("a.txt", "config.json", "deep/model.safetensors"):
        remote.bucket.pipe_file(f"models/notes/{name}", b"mine")
        with pytest.raises(OutputError, match="is not a checkpoint folder"):
            sigmerge.merge(sectioned(remote), "s3://models/notes", overwrite=True)
    assert len(remote.objects("notes")) == 3


@pytest.mark.parametrize("damaged", ["config.json", "a stub"])
def test_a_damaged_stand_in_is_made_again(remote: Remote, damaged: str) -> None:
    """Else its configuration, or bytes from other places, would go into the result."""
    folder = stand_in("s3://models/pool/math")
    name = next(folder.glob("*.safetensors")).name if damaged == "a stub" else damaged
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole.replace(b"l", b"m", 1))
    assert (stand_in("s3://models/pool/math") / name).read_bytes() == whole
    made = (folder / name).stat().st_ino
    (folder.parent / "whole").mkdir()
    assert stand_in("s3://models/pool/math") == folder
    assert (folder / name).stat().st_ino == made and (folder.parent / "whole").exists()


def test_an_input_that_changes_meanwhile_stops_the_merge(
    remote: Remote, tmp_path: Path, monkeypatch: Any
) -> None:
    recipe = sectioned(remote)
    for name, content in remote.objects("pool/math").items():
        remote.bucket.pipe_file(f"models/changing/{name}", content)
    recipe["models"][0]["model"] = "s3://models/changing"
    shard = next(n for n in remote.objects("changing") if n.endswith(".safetensors"))

    def change(stage: str, done: int, total: int) -> None:
        if stage == "merging" and done == total:
            content = bytearray(remote.objects("changing")[shard])
            content[-1] ^= 1
            remote.bucket.pipe_file(f"models/changing/{shard}", bytes(content))

    with pytest.raises(PoolError, match=f"s3://models/changing/{shard}: changed while"):
        sigmerge.merge(recipe, "s3://models/out/changed", progress=change)
    assert remote.objects("out/changed") == {}


def test_an_input_that_changed_since_its_header_was_read_stops_the_merge(
    remote: Remote, monkeypatch: Any
) -> None:
    """The record would have the digest of the version before, if that is known."""
    content = remote.objects("pool/math")
    for name, data in content.items():
        remote.bucket.pipe_file(f"models/late/{name}", data)
    recipe = sectioned(remote)
    recipe["models"][0]["model"] = "s3://models/late"
    shard = next(name for name in content if name.endswith(".safetensors"))

    def late(files: Any) -> Any:
        other = content[shard][:-2] + bytes([content[shard][-2] ^ 1]) + content[shard][-1:]
        remote.bucket.pipe_file(f"models/late/{shard}", other)
        return identify(files)

    monkeypatch.setattr(pools, "identify", late)
    with pytest.raises(PoolError, match=f"s3://models/late/{shard}: changed while"):
        sigmerge.merge(recipe, "s3://models/out/late")
    assert remote.objects("out/late") == {}


def test_what_cannot_be_read_or_written_is_an_error(remote: Remote, tmp_path: Path) -> None:
    recipe = sectioned(remote)
    recipe["models"][0]["model"] = "s3://nowhere/math"
    with pytest.raises(RecipeError, match="s3://nowhere/math: no such"):
        sigmerge.merge(recipe, tmp_path / "out")
    with pytest.raises(OutputError, match="s3://nowhere/out: no such object, folder or bucket"):
        sigmerge.merge(sectioned(remote), "s3://nowhere/out")
    with pytest.raises(OutputError, match="holds an input, s3://models/pool/math"):
        sigmerge.merge(sectioned(remote), "s3://models/pool/math", overwrite=True)
    with pytest.raises(OutputError, match="choose a folder in it"):
        sigmerge.merge(sectioned(remote), "s3://models")
    for odd in ("s3://models/out/..", "s3://models/../out"):
        with pytest.raises(OutputError, match=r"without \. and \.\."):
            sigmerge.merge(sectioned(remote), odd, overwrite=True)
    with pytest.raises(OutputError, match="write a local folder as its path"):
        sigmerge.merge(sectioned(remote), Path(f"file://{tmp_path}/out"))
    with pytest.raises(OutputError, match="a tuning goes into a local folder"):
        WorkFolder("tuning", (), (), "last").check(Path("s3://models/tuned"), False, [])
    recipe["models"][0]["model"] = "xyz://bucket/math"
    with pytest.raises(RecipeError, match="no store is called xyz"):
        sigmerge.merge(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_credentials_the_error_says_so(
    remote: Remote, tmp_path: Path, monkeypatch: Any
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(sectioned(remote)))
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    type(remote.bucket).clear_instance_cache()
    try:
        said = refused(RecipeError.exit_code, "merge", recipe, tmp_path / "out", beside=tmp_path)
    finally:
        type(remote.bucket).clear_instance_cache()
    assert "s3://models/pool/reference: there are no credentials" in said


def test_a_model_of_a_bucket_is_loaded_from_a_copy(remote: Remote) -> None:
    """What is no merge reads whole files: the stubs of a stand-in are no weights."""
    from sigmerge.checkpoints.remote import with_weights
    from tests.pools import read_weights

    folder = place_of("s3://models/pool/math")
    with pytest.raises(Exception, match=r"(?i)incomplete|header|invalid"):
        read_weights(folder)
    here, there = read_weights(with_weights(folder)), read_weights(remote.local.experts["math"])
    assert {n: v.tobytes() for n, v in here.items()} == {n: v.tobytes() for n, v in there.items()}
    assert open_checkpoint(folder).place == "s3://models/pool/math"


def test_a_copy_of_another_version_is_not_kept(remote: Remote) -> None:
    """It would be loaded whenever the version that it is named for comes back."""
    from sigmerge.checkpoints.remote import with_weights

    before = remote.objects("pool/math")
    for name, content in before.items():
        remote.bucket.pipe_file(f"models/retrained/{name}", content)
    folder = place_of("s3://models/retrained")
    shard = next(name for name in before if name.endswith(".safetensors"))
    same_size = before[shard][:-1] + b"?"
    remote.bucket.pipe_file(f"models/retrained/{shard}", same_size)
    with pytest.raises(PoolError, match=f"s3://models/retrained/{shard}: changed while"):
        with_weights(folder)
    assert not (folder.parent / "whole").exists()


def test_two_processes_copy_a_model_of_a_bucket(remote: Remote, monkeypatch: Any) -> None:
    """The one that comes second takes what the first has made."""
    from sigmerge.checkpoints import remote as module

    for name, content in remote.objects("pool/coding").items():
        remote.bucket.pipe_file(f"models/twice/{name}", content)
    folder, download = place_of("s3://models/twice"), module._download

    def overtaken(one: Any, file: Path) -> None:
        monkeypatch.setattr(module, "_download", download)
        module.with_weights(folder)
        download(one, file)

    monkeypatch.setattr(module, "_download", overtaken)
    copy = module.with_weights(folder)
    assert weights(files(copy)) == weights(remote.objects("twice"))
