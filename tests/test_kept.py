"""Nothing that was made earlier is used for something else, whatever changes or breaks."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sigmerge import kept
from sigmerge.errors import PoolError
from sigmerge.files import digests
from sigmerge.files.sources import PACKAGE
from sigmerge.kept import Derivation, Given, Inputs
from tests.faults.job import arm_change


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "_unkept", {})
    monkeypatch.setattr(kept, "_unkept_parts", {})
    monkeypatch.setattr(kept, "_said", set())
    return tmp_path / "cache/kept"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source.txt"
    file.write_text("content")
    return file


made: list[str] = []


@pytest.fixture(autouse=True)
def _none_made() -> None:
    made.clear()


def upper(given: Given) -> Any:
    made.append("upper")
    with given.open("text") as stream:
        text = stream.read().decode().upper()
    (given.out / "whole.txt").write_text(text)
    (given.out / "inner").mkdir()
    (given.out / "inner/first.txt").write_text(text[:1])
    return {"text": text}


def of(source: Path, **changes: Any) -> Derivation:
    given: dict[str, Any] = {"settings": {"level": 1}, "libraries": ("numpy",), "of": "source"}
    return Derivation("upper", upper, Inputs.of(text=source), **{**given, **changes})


def test_what_was_made_is_found_again(source: Path) -> None:
    first, second = kept.get(of(source)), kept.get(of(source))
    assert made == ["upper"]
    assert (first.kept, second.kept) == (False, True)
    assert first.value == second.value == {"text": "CONTENT"}
    assert first.folder == second.folder
    assert (second.folder / "inner/first.txt").read_text() == "C"
    assert kept.get(of(source), again=True).kept is False


def test_every_declared_thing_is_in_the_key(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("content!")
    same = tmp_path / "moved.txt"
    same.write_text("content")
    key = of(source).full
    assert of(same).full == key  # the content counts, and not the place
    assert of(other).full != key
    assert of(source, settings={"level": 2}).full != key
    assert of(source, libraries=("numpy", "pydantic")).full != key
    assert Derivation("lower", upper, Inputs.of(text=source), {"level": 1}, ("numpy",)).full != key


def test_settings_must_be_resolved(source: Path) -> None:
    with pytest.raises(AssertionError, match="auto"):
        of(source, settings={"dtype": ["auto"]})
    with pytest.raises(AssertionError, match="no resolved setting"):
        of(source, settings={"file": source})


def test_a_maker_reads_declared_files_only(source: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden")

    def reads(given: Given) -> Any:
        shown = given.folder("model")
        found = sorted(p.relative_to(shown).as_posix() for p in shown.rglob("*") if p.is_file())
        with pytest.raises(kept.Undeclared):
            given.path("secret.txt")
        with pytest.raises(kept.Undeclared):
            given.allow([source, secret])
        given.allow([source])
        return found, shown.name

    inputs = Inputs.of(model={"a.txt": source, "sub/b.txt": source})
    assert kept.get(Derivation("reads", reads, inputs)).value == [["a.txt", "sub/b.txt"], "model"]
    again = kept.get(Derivation("reads", reads, inputs))
    assert again.value == [["a.txt", "sub/b.txt"], "model"]


def test_an_input_that_changes_meanwhile_stops_it(source: Path, root: Path) -> None:
    def slow(given: Given) -> Any:
        (given.out / "half").write_text("x")
        source.write_text("changed while it was read")
        return 1

    with pytest.raises(PoolError, match=r"source\.txt: changed while it was read"):
        kept.get(Derivation("slow", slow, Inputs.of(text=source)))
    assert not list(root.rglob("*.json")) and not list(root.rglob("half"))


def test_an_input_that_changed_since_the_key_was_made_stops_it(source: Path) -> None:
    wanted = of(source)
    assert wanted.full
    source.write_text("other content")
    with pytest.raises(PoolError):
        kept.get(wanted)
    assert not made  # which may take hours


def test_an_input_that_was_another_for_a_while_stops_it(source: Path, root: Path) -> None:
    """Its content is that of the key again, and what was made of it may not be."""

    def slow(given: Given) -> Any:
        text = source.read_text()
        source.write_text("another")
        source.write_text(text)
        return 1

    with pytest.raises(PoolError, match="changed while it was read"):
        kept.get(Derivation("slow", slow, Inputs.of(text=source)))
    assert not list(root.rglob("*.json"))


def _bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def _header(root: Path) -> Path:
    (found,) = root.rglob("*.json")
    return found


def _under_another_name(root: Path) -> None:
    header = _header(root)
    content = json.loads(header.read_text())
    content["value"] = {"text": "FOREIGN"}
    header.write_text(json.dumps(content))


def _another_key(root: Path) -> None:
    """An entry of other settings, whole, copied under this one's name."""
    header = _header(root)
    kept.get(of(root.parent.parent / "source.txt", settings={"level": 2}))
    (other,) = (file for file in root.rglob("*.json") if file != header)
    header.write_bytes(other.read_bytes())


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no header": lambda root: _header(root).unlink(),
    "empty header": lambda root: _header(root).write_text(""),
    "half a header": lambda root: _header(root).write_bytes(_header(root).read_bytes()[:99]),
    "a bit of the header": lambda root: _bit(_header(root)),
    "another value": _under_another_name,
    "another entry's header": _another_key,
    "no file": lambda root: next(root.rglob("whole.txt")).unlink(),
    "a short file": lambda root: next(root.rglob("whole.txt")).write_text("CONT"),
    "a bit of a file": lambda root: _bit(next(root.rglob("whole.txt"))),
    "a bit of an inner file": lambda root: _bit(next(root.rglob("first.txt"))),
    "a folder for a file": lambda root: (
        next(root.rglob("whole.txt")).unlink(),
        (root / "x").mkdir(),
    )[1],
    "list for a header": lambda root: _header(root).write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_made_again(damage: str, source: Path, root: Path) -> None:
    kept.get(of(source))
    made.clear()
    DAMAGE[damage](root)
    made.clear()
    found = kept.get(of(source))
    assert found.value == {"text": "CONTENT"} and made == ["upper"]
    assert (found.folder / "whole.txt").read_text() == "CONTENT"
    assert kept.get(of(source)).kept


def test_what_cannot_be_written_is_made_and_lives_on(
    source: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.parent.mkdir()
    root.write_text("a file where the cache should be")
    first, second = kept.get(of(source)), kept.get(of(source))
    assert made == ["upper"] and first.value == second.value
    assert (second.folder / "whole.txt").read_text() == "CONTENT"


def test_a_full_disk_stops_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "keep_json", lambda note, content: False)
    assert kept.get(of(source)).value == {"text": "CONTENT"}
    assert kept.get(of(source)).value == {"text": "CONTENT"}
    assert made == ["upper"]


def _other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "code_digest", lambda make: "another")


def _other_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_version", lambda name: "0.0.1")


@pytest.mark.parametrize("change", [_other_code, _other_numpy])
def test_other_code_or_libraries_are_told_and_not_used(
    change: Callable[[pytest.MonkeyPatch], None],
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept.get(of(source))
    change(monkeypatch)
    with kept.reusing():
        assert kept.get(of(source)).kept
    assert made == ["upper"] and not caplog.messages
    assert kept.look(of(source)) is None
    (told,) = caplog.messages
    assert told.startswith("1 upper of source was made ") and "--reuse" in told
    assert ("numpy" in told) == (change is _other_numpy)
    assert not kept.get(of(source)).kept and made == ["upper"] * 2


def _slow_upper(given: Given) -> Any:
    time.sleep(0.5)
    with (given.path("text").parent / "made").open("a") as stream:
        stream.write("x")
    return 1


def _get_slow(source: Path) -> None:
    kept.get(Derivation("slow", _slow_upper, Inputs.of(text=source)))


def test_one_process_makes_and_the_other_waits(source: Path) -> None:
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=_get_slow, args=(source,)) for _ in range(3)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert [one.exitcode for one in both] == [0, 0, 0]
    assert (source.parent / "made").read_text() == "x"


def test_nothing_is_taken_from_a_process_that_makes_it(source: Path, root: Path) -> None:
    """Clearing and pruning leave its lock and its files; who waits makes it no second time."""
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=_get_slow, args=(source,)) for _ in range(2)]
    for one in both:
        one.start()
    until = time.monotonic() + 10
    while not list(root.rglob(".*.lock")):
        assert time.monotonic() < until
    time.sleep(0.2)  # the other waits
    kept.clear(root)
    kept.prune(root, older_than=0)
    for one in both:
        one.join()
    assert [one.exitcode for one in both] == [0, 0]
    assert (source.parent / "made").read_text() == "x"


def test_an_entry_that_is_removed_while_it_is_made_anew(source: Path, root: Path) -> None:
    before = kept.get(of(source))

    def cleared(given: Given) -> Any:
        value = upper(given)
        kept.clear(root)
        assert (before.folder / "whole.txt").exists()  # until the new one is whole
        return value

    made_anew = kept.get(of(source), cleared, again=True)
    assert (made_anew.folder / "whole.txt").read_text() == "CONTENT"
    assert kept.get(of(source)).kept


def test_a_lock_whose_file_is_gone_is_no_lock(source: Path, root: Path) -> None:
    """Who waited for it would else make an entry beside the next process."""
    ours = of(source)
    folder = root / ours.name / ours.core

    def other() -> None:
        time.sleep(0.3)
        with kept._making(of(source)):
            (source.parent / "got").write_text("it")
            time.sleep(0.6)
            assert not (source.parent / "at once").exists()

    waits = multiprocessing.get_context("fork").Process(target=other)
    waits.start()
    with kept._making(ours):
        time.sleep(0.6)
        (folder / f".{ours.full}.lock").unlink()
    until = time.monotonic() + 10
    while not (source.parent / "got").exists():
        assert time.monotonic() < until
    with kept._making(ours):
        (source.parent / "at once").write_text("made")
    waits.join()
    assert waits.exitcode == 0


def _in_steps(given: Given) -> Any:
    steps = []
    for name in "abcd":
        if given.done(name) is None:
            (given.out / name).write_text(name * 3)
            made.append(name)
            given.put(name, {"step": name}, name)
            if os.environ.get("KILL_AT") == name:
                (given.out / "unfinished").write_text("y")
                os.kill(os.getpid(), signal.SIGKILL)
        steps.append(given.done(name)["step"])
    return steps


@pytest.mark.parametrize("step", "abcd")
def test_a_killed_maker_goes_on_where_it_stopped(
    step: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Derivation("steps", _in_steps, Inputs.of(text=source))
    monkeypatch.setenv("KILL_AT", step)
    process = multiprocessing.get_context("fork").Process(target=kept.get, args=(wanted,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    monkeypatch.delenv("KILL_AT")
    found = kept.get(wanted)
    assert found.value == list("abcd") and made == [c for c in "abcd" if c > step]
    assert {f.name: f.read_text() for f in found.folder.iterdir()} == {c: c * 3 for c in "abcd"}


@pytest.mark.parametrize("damage", ["bit", "gone", "record"])
def test_a_damaged_part_is_made_again(
    damage: str, source: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Derivation("steps", _in_steps, Inputs.of(text=source))
    monkeypatch.setenv("KILL_AT", "c")
    process = multiprocessing.get_context("fork").Process(target=kept.get, args=(wanted,))
    process.start()
    process.join()
    monkeypatch.delenv("KILL_AT")
    (partial,) = root.rglob("*.partial")
    if damage == "bit":
        _bit(partial / "b")
    elif damage == "gone":
        (partial / "b").unlink()
    else:
        journal = partial / "parts.jsonl"
        journal.write_text(journal.read_text().replace('"step": "b"', '"step": "x"'))
    assert kept.get(wanted).value == list("abcd")
    assert made == ["b", "d"]


def grown(source: Path, **changes: Any) -> Derivation:
    return of(source, **changes)


def test_parts_are_added_and_found(source: Path) -> None:
    with kept.parts(grown(source)) as parts:
        parts.put({"a": 1, "b": [2]})
        parts.put({"c": None})
    with kept.parts(grown(source)) as parts:
        assert parts.records == {"a": 1, "b": [2], "c": None}
    assert kept.look_at_parts(grown(source, settings={"level": 3})).records == {}


def _write_all(source: Path) -> None:
    """Make an entry with files, and add to one that grows."""
    assert kept.get(of(source)).value == {"text": "CONTENT"}
    with kept.parts(grown(source, settings={"level": 3})) as parts:
        parts.put({"a": 1})
        parts.put({"b": 2})
        assert parts.records == {"a": 1, "b": 2}


def _fill_disk(at: int, root: Path) -> None:
    """From the N-th change on the cache's disk takes nothing new; what is there can be removed."""
    counter = itertools.count(1)

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else os.O_RDONLY
        new = event == "os.mkdir" or flags & os.O_CREAT
        if new and str(arguments[0]).startswith(str(root)) and next(counter) >= at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))

    sys.addaudithook(heard)


@pytest.mark.parametrize("fault", ["a kill", "a full disk"])
def test_whatever_happens_at_any_change_leaves_nothing_wrong(
    fault: str, source: Path, root: Path
) -> None:
    def work(at: int) -> None:
        arm_change(at) if fault == "a kill" else _fill_disk(at, root)
        _write_all(source)

    ends = []
    for at in range(1, 100 if fault == "a kill" else 20):
        process = multiprocessing.get_context("fork").Process(target=work, args=(at,))
        process.start()
        process.join()
        ends.append(process.exitcode)
        found = kept.look(of(source))
        assert found is None or (found.folder / "whole.txt").read_text() == "CONTENT"
        parts = kept.look_at_parts(grown(source, settings={"level": 3})).records
        assert parts in ({}, {"a": 1}, {"a": 1, "b": 2})
        _write_all(source)
        assert all(entry.sound for entry in kept.listing(root, verify=True))
        kept.clear(root)
        if fault == "a kill" and ends[-1] == 0:
            break
    assert {*ends[:-1]} == {-signal.SIGKILL if fault == "a kill" else 0} and len(ends) > 10


@pytest.mark.parametrize("cut", [1, 7, 30])
def test_an_unfinished_line_is_cut_off(cut: int, source: Path, root: Path) -> None:
    with kept.parts(grown(source)) as parts:
        parts.put({"a": 1})
        parts.put({"b": 2})
    (file,) = root.rglob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-cut])
    with kept.parts(grown(source)) as parts:
        assert parts.records == {"a": 1}
        parts.put({"c": 3})
    assert kept.look_at_parts(grown(source)).records == {"a": 1, "c": 3}


def test_any_bit_of_a_line_is_noticed(source: Path, root: Path) -> None:
    with kept.parts(grown(source)) as parts:
        parts.put({"a": 1})
    (file,) = root.rglob("*.jsonl")
    whole = file.read_bytes()
    start = whole.index(b"\n") + 1
    for at in range(start, len(whole) - 1):
        wrong = bytearray(whole)
        wrong[at] ^= 1
        file.write_bytes(bytes(wrong))
        assert kept.look_at_parts(grown(source)).records in ({}, {"a": 1})
        # A changed space or escape reads as the same record; every other is left out.
        if kept.look_at_parts(grown(source)).records:
            assert json.loads(bytes(wrong)[start:]) == json.loads(whole[start:])


def test_parts_of_another_entry_are_no_parts(source: Path, root: Path) -> None:
    with kept.parts(grown(source)) as parts:
        parts.put({"a": 1})
    with kept.parts(grown(source, settings={"level": 2})) as parts:
        parts.put({"a": 2})
    one, two = sorted(root.rglob("*.jsonl"))
    one.write_bytes(two.read_bytes())
    found = [
        kept.look_at_parts(grown(source, settings={"level": n})).records.get("a") for n in (1, 2)
    ]
    assert sorted(found, key=str) in ([1, None], [2, None])


def test_outdated_parts_are_counted(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with kept.parts(grown(source)) as parts:
        parts.put({str(i): i for i in range(1240)})
    _other_numpy(monkeypatch)
    assert kept.look_at_parts(grown(source)).records == {}
    assert caplog.messages[0].startswith("1,240 uppers of source were made under numpy ")
    with kept.reusing():
        assert len(kept.look_at_parts(grown(source)).records) == 1240


def test_own_parts_go_before_outdated_ones(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept.parts(grown(source)) as parts:
        parts.put({"a": "old", "b": "old"})
    _other_numpy(monkeypatch)
    with kept.parts(grown(source)) as parts:
        parts.put({"a": "new"})
    with kept.reusing():
        assert kept.look_at_parts(grown(source)).records == {"a": "new", "b": "old"}


def test_a_folder_shows_one_group_of_inputs(source: Path) -> None:
    def reads(given: Given) -> Any:
        shown = {prefix: given.folder(prefix) for prefix in ("model", "tokenizer")}
        return {p: sorted(f.relative_to(s).as_posix() for f in s.rglob("*") if f.is_file())
                for p, s in shown.items()}  # fmt: skip

    inputs = Inputs.of(model={"a.txt": source}, tokenizer={"in/b.txt": source}, text=source)
    found = kept.get(Derivation("reads", reads, inputs)).value
    assert found == {"model": ["a.txt"], "tokenizer": ["in/b.txt"]}


def test_a_remote_file_is_known_by_its_version(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Remote:
        url, identity = "s3://pool/file", "version 1"

    keys = [of(source).core]
    for version in ("version 1", "version 2"):
        Remote.identity = version
        monkeypatch.setattr(kept, "remote_file", lambda file: Remote())
        keys.append(of(source).core)
    assert len({*keys}) == 3


def test_parts_that_cannot_be_written_live_on(source: Path, root: Path) -> None:
    root.parent.mkdir()
    root.write_text("a file")
    with kept.parts(grown(source)) as parts:
        parts.put({"a": 1})
    assert kept.look_at_parts(grown(source)).records == {"a": 1}


def test_entries_beside_a_pool(source: Path, root: Path, tmp_path: Path) -> None:
    member = tmp_path / "pool/math"
    member.mkdir(parents=True)
    found = kept.get(of(source, near=member))
    assert found.folder.is_relative_to(tmp_path / "pool/.sigmerge")
    assert not root.exists()
    assert kept.get(of(source, near=member)).kept


def test_the_cache_is_listed_checked_and_pruned(source: Path, root: Path) -> None:
    kept.get(of(source))
    kept.get(of(source, settings={"level": 2}))
    with kept.parts(grown(source, settings={"level": 3})) as parts:
        parts.put({"a": 1})
    entries = list(kept.listing(root))
    assert [(e.name, e.of, e.sound) for e in entries] == [("upper", "source", True)] * 3
    assert all(e.bytes > 0 and time.time() - e.made < 60 for e in entries)
    _bit(next(root.rglob("whole.txt")))
    assert [e.sound for e in kept.listing(root, verify=True)].count(False) == 1
    assert kept.prune(root, older_than=60) == []
    old = next(iter(kept.listing(root)))
    os.utime(old.files[0], (1, 1))
    assert [e.key for e in kept.prune(root, older_than=60)] == [old.key]
    assert kept.prune(root, larger_than=10**9) == []
    stranger = root / "mine.txt"
    stranger.write_text("not ours")
    kept.clear(root)
    assert list(root.rglob("*")) == [stranger]


def test_what_is_read_is_used(source: Path, root: Path) -> None:
    """Removal is by last use; an entry that only grows is used when it is read."""
    kept.get(of(source))
    with kept.parts(grown(source, settings={"level": 3})) as parts:
        parts.put({"a": 1})
    for header in (*root.rglob("*.json"), *root.rglob("*.jsonl")):
        os.utime(header, (1, 1))
    assert (
        kept.look(of(source)) and kept.look_at_parts(grown(source, settings={"level": 3})).records
    )
    assert kept.prune(root, older_than=3600) == []


@pytest.mark.parametrize("age", [0, 2 * 86400])
def test_what_a_stopped_maker_left_goes_after_a_day(age: int, source: Path, root: Path) -> None:
    def stopped(given: Given) -> Any:
        (given.out / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.get(of(source), stopped)
    (partial,) = root.rglob("*.partial")
    os.utime(partial, (time.time() - age,) * 2)
    kept.prune(root, older_than=3600)
    assert partial.exists() == (age == 0)
    kept.clear(root)
    assert not partial.exists() and not [*root.rglob("*.lock")]


def test_the_wanted_entry_goes_before_an_outdated_one_beside_the_pool(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    member = tmp_path / "pool/math"
    member.mkdir(parents=True)
    kept.get(of(source, near=member), lambda given: "outdated")
    _other_numpy(monkeypatch)
    kept.get(of(source), lambda given: "wanted")
    with kept.reusing():
        assert kept.get(of(source, near=member)).value == "wanted"
    assert kept.get(of(source, near=member)).value == "wanted" and not caplog.messages


def test_entries_made_of_a_content_are_dropped(source: Path, root: Path) -> None:
    kept.get(of(source))
    kept.drop_made_of("no digest")
    assert len(list(kept.listing(root))) == 1
    kept.drop_made_of(of(source).input_digests["text"])
    assert not list(kept.listing(root))


def test_what_lives_until_the_end_is_dropped_too(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGMERGE_CACHE", str(source))  # which cannot be written
    kept.get(of(source))
    with kept.parts(of(source)) as entry:
        entry.put({"one": 1})
    assert kept.look(of(source)) and kept.look_at_parts(of(source)).records
    kept.drop_made_of(of(source).input_digests["text"])
    assert not kept.look(of(source)) and not kept.look_at_parts(of(source)).records


def test_the_size_is_bounded(source: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGMERGE_CACHE_SIZE", "1")
    monkeypatch.setattr(kept, "_bounded", {})
    kept.get(of(source))
    assert len(list(kept.listing(root))) == 1  # in use
    os.utime(_header(root), (1, 1))
    monkeypatch.setattr(kept, "_bounded", {})
    kept.get(of(source, settings={"level": 2}))
    assert len(list(kept.listing(root))) == 1
    assert kept.look(of(source)) is None


def test_parts_that_are_added_bound_the_size(
    source: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.get(of(source))
    os.utime(_header(root), (1, 1))
    monkeypatch.setenv("SIGMERGE_CACHE_SIZE", "1")
    monkeypatch.setattr(kept, "_bounded", {})
    with kept.parts(grown(source, settings={"level": 3})) as parts:
        parts.put({"a": 1})
    assert [entry.files[0].suffix for entry in kept.listing(root)] == [".jsonl"]


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("2k", 2048), ("1.5G", 3 << 29), ("x", None)]
)
def test_the_size_is_said(text: str, count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGMERGE_CACHE_SIZE", text)
    assert kept.size_limit() == (kept.SIZE_LIMIT if count is None else count)


def test_a_maker_may_be_given_apart_from_the_declared_one(source: Path) -> None:
    """What of this process it needs is no part of the key."""
    level = object()
    found = kept.get(of(source), lambda given: {"level": level is not None})
    assert found.value == {"level": True} and not found.kept
    assert kept.get(of(source)).value == {"level": True} and not made


@pytest.mark.parametrize("writable", [True, False])
def test_a_value_is_the_same_made_and_found(
    writable: bool, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain content as a file has it, and nobody else's to change."""
    if not writable:
        monkeypatch.setenv("SIGMERGE_CACHE", str(source))

    def pair(given: Given) -> Any:
        return {"pair": (1, 2), 3: None}

    wanted = Derivation("pair", pair, Inputs.of(text=source))
    for is_kept in (False, True, True):
        found = kept.get(wanted)
        assert (found.value, found.kept) == ({"pair": [1, 2], "3": None}, is_kept)
        found.value["pair"].append(3)


def test_what_is_not_to_be_kept_is_made_again(source: Path, root: Path) -> None:
    def once(given: Given) -> Any:
        (given.out / "file").write_text("x")
        made.append("once")
        return kept.NotToKeep(7)

    wanted = Derivation("once", once, Inputs.of(text=source))
    assert [kept.get(wanted).value for _ in range(2)] == [7, 7]
    assert made == ["once"] * 2 and not list(root.rglob("*.json")) and not list(root.rglob("file"))


@pytest.mark.parametrize("change", ["written", "gone", "before"])
def test_a_file_of_the_maker_that_changed_meanwhile_keeps_nothing(
    change: str, source: Path, tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "own.txt"
    own.write_text("before")

    def writes(given: Given) -> Any:
        made.append("writes")
        if change == "written":
            own.write_text("after")
        elif change == "gone":
            own.unlink()
        return 1

    inputs = Inputs.of(text=source, by={"own": own})
    wanted = Derivation("writes", writes, inputs, volatile=("by/",))
    assert wanted.full
    if change == "before":
        own.write_text("since the key was made")
    assert kept.get(wanted).value == 1
    assert made == ["writes"] and not list(root.rglob("*.json"))
    assert [f"{own}: changed while it was read" in text for text in caplog.messages] == [True]


def test_a_changed_input_is_named_even_where_others_may_change(source: Path) -> None:
    wanted = of(source, volatile=("by/",))
    assert wanted.full
    source.write_text("other content")
    with pytest.raises(PoolError, match=r"source\.txt: changed while it was read"):
        kept.get(wanted)


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_whatever_lies_under_the_name_of_an_entry_gives_way(
    kind: str, source: Path, root: Path, tmp_path: Path
) -> None:
    kept.get(of(source))
    header = _header(root)
    header.unlink()
    if kind == "folder":
        (header / "inside").mkdir(parents=True)
    else:
        header.symlink_to(tmp_path / "nowhere")
    assert kept.get(of(source)).value == {"text": "CONTENT"}
    assert kept.get(of(source)).kept and not header.is_symlink()


def test_nothing_is_kept_inside_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    users = tmp_path / "cache/kept"
    assert kept._roots(PACKAGE / "nano/pool/reference") == [users]
    installed = tmp_path / "lib/site-packages/other/pool/reference"
    installed.mkdir(parents=True)
    assert kept._roots(installed) == [users]
    own = tmp_path / "pool/reference"
    assert kept._roots(own) == [tmp_path / "pool/.sigmerge", users]


def test_a_file_that_changed_without_its_times_drops_what_was_made_of_it(
    source: Path, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a file system that keeps no times: --rehash and verify read the file, and find it."""
    monkeypatch.setattr(digests, "GRAIN", -(10**9))
    monkeypatch.setattr(digests, "_identity", lambda real, status: str(real))
    old = of(source)
    kept.get(old)
    beside = source.parent.parent / ".sigmerge"  # a member's file: the pool is above its folder
    kept.get(of(source, near=source.parent, settings={"level": 2}))
    assert [*kept.listing(beside)]
    source.write_text("CONTENT")
    assert of(source).full == old.full  # the note is believed
    with digests.rehashing():
        assert of(source).full != old.full
    assert f"{source}: its content changed" in caplog.text
    assert list(kept.listing(root)) == [] == list(kept.listing(beside))
    assert of(source).full != old.full
