"""The store: what is written is read, by content; one writer; batches are whole."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file
from sigmerge.evaluation.store import (
    AnswerStore,
    Key,
    Scored,
    checkpoint_key,
    settings_key,
)

from sigmerge.errors import OutputError, ScoreError, SigmergeWarning
from sigmerge.evaluation.command_line import command_words
from sigmerge.probing.generate import Usage
from tests.evaluation.tiny import write_tiny

KEY = Key("model", "settings")


def test_results_come_back(tmp_path: Path):
    file = tmp_path / "results.sqlite"
    batch = {("all/1", "d1"): Scored({"right": 1.0, "each": [1.0, 0.0]}, ["out"], "keyword")}
    with AnswerStore(file) as store:
        store.write(KEY, batch, Usage(1, 10, 5, 0.5))
        store.write(KEY, {("all/2", "d2"): Scored({"right": 0.0})}, Usage(2, 20, 7, 0.25))
    with AnswerStore(file) as store:
        found = store.read(KEY, [("all/1", "d1"), ("all/2", "changed"), ("all/3", "d3")])
        assert found == {"all/1": batch["all/1", "d1"]}
        assert store.read(Key("other", "settings"), [("all/1", "d1")]) == {}
        both = [("all/1", "d1"), ("all/2", "d2")]
        assert store.usage(KEY, both) == Usage(3, 30, 12, 0.75)
        assert store.usage(KEY, both[1:]) == Usage(2, 20, 7, 0.25)


def test_a_failed_batch_leaves_nothing(tmp_path: Path):
    with AnswerStore(tmp_path / "results.sqlite") as store:
        bad = {("all/1", "d"): Scored({"right": 1.0}), ("all/2", "d"): Scored({"x": object()})}
        with pytest.raises(TypeError):
            store.write(KEY, bad, Usage())  # type: ignore[arg-type]
        assert store.read(KEY, [("all/1", "d")]) == {}
        assert store.usage(KEY, [("all/1", "d")]) == Usage()


WRITER = """
import sys
from pathlib import Path
from sigmerge.evaluation.store import AnswerStore, Key, Scored
from sigmerge.probing.generate import Usage
with AnswerStore(Path(sys.argv[1])) as store:
    print("open", flush=True)
    sys.stdin.readline()
    for i in range(40):
        store.write(Key("c", "s"), {(f"{sys.argv[2]}/{i}", "d"): Scored({"x": 1.0})}, Usage(1))
"""


def test_two_evaluations_share_a_store(tmp_path: Path):
    """Both are open before either writes; no batch is lost and nobody is refused."""
    file = tmp_path / "results.sqlite"
    command = [sys.executable, "-c", WRITER, str(file)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, name], **pipes) for name in "ab"]
    for writer in writers:
        assert writer.stdout and writer.stdout.readline() == "open\n"
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [writer.wait(60) for writer in writers] == [0, 0]
    wanted = [(f"{name}/{i}", "d") for name in "ab" for i in range(40)]
    with AnswerStore(file) as store:
        assert len(store.read(Key("c", "s"), wanted)) == 80
        assert store.usage(Key("c", "s"), wanted).calls == 80


def test_settings_key_ignores_order():
    assert settings_key({"a": 1, "b": 2}) == settings_key({"b": 2, "a": 1})
    assert settings_key({"a": 1}) != settings_key({"a": 2})


def test_a_checkpoint_is_known_by_content(tmp_path: Path):
    first, same = write_tiny(tmp_path / "a"), write_tiny(tmp_path / "b")
    other = write_tiny(tmp_path / "c", seed=1)
    assert checkpoint_key(first) == checkpoint_key(same) != checkpoint_key(other)


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "merges.txt",
        "vocab.txt",
        "q.tiktoken",
        "t.model",
        "c.jinja",
        "m.py",
        "source.spm",
        "vocab.bpe",
    ],
)
def test_what_decides_an_answer_is_part_of_a_checkpoints_key(tmp_path: Path, name: str):
    folder = tmp_path / "a"
    folder.mkdir()
    save_file({"x": numpy.zeros(2, numpy.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    before = checkpoint_key(folder)
    (folder / name).write_text("{}")
    assert checkpoint_key(folder) != before


@pytest.mark.parametrize("command", ["", "  ", "score 'half"])
def test_a_wrong_command_line_is_told(command: str):
    with pytest.raises(ScoreError, match=r"own\.command: "):
        command_words(command, "own.command")


def test_a_store_is_a_file(tmp_path):
    with (
        pytest.raises(OutputError, match="is a folder; give --store a file"),
        AnswerStore(tmp_path),
    ):
        pass


ROWS = {(f"all/{i}", "d"): Scored({"right": 1.0}, "x" * 2000) for i in range(40)}
ITEMS = {item for item, _ in ROWS}


def written(file: Path) -> Path:
    with AnswerStore(file) as store:
        store.write(KEY, ROWS, Usage(1))
    return file


def halved(content: bytes) -> bytes:
    return content[: len(content) // 2]


def with_other_columns(content: bytes) -> bytes:
    return content.replace(b"checkpoint TEXT", b"checkpaint TEXT")


GARBLED: dict[str, Callable[[bytes], bytes]] = {
    "another file": lambda content: b"no database, but long enough to be asked about" * 9,
    "the first byte": lambda content: b"X" + content[1:],
    "half of it": halved,
    "its schema": with_other_columns,
    "zeros": lambda content: content[:4096] + bytes(len(content) - 4096),
}


@pytest.mark.parametrize("how", GARBLED)
def test_a_damaged_store_is_set_aside(tmp_path: Path, how: str):
    file = written(tmp_path / "results.sqlite")
    file.write_bytes(GARBLED[how](file.read_bytes()))
    garbled = file.read_bytes()
    said = pytest.warns(SigmergeWarning, match=r"is called results\.sqlite\.damaged now")
    with said, AnswerStore(file) as store:
        assert store.read(KEY, ROWS) == {}
        store.write(KEY, ROWS, Usage(1))
    assert (tmp_path / "results.sqlite.damaged").read_bytes() == garbled
    with AnswerStore(file) as store:
        assert store.read(KEY, ROWS).keys() == ITEMS
        assert store.usage(KEY, ROWS) == Usage(1)


def test_a_damaged_page_is_found_while_it_is_written(tmp_path: Path):
    file = written(tmp_path / "results.sqlite")
    with AnswerStore(file) as store:
        file.write_bytes(GARBLED["zeros"](file.read_bytes()))
        with pytest.warns(SigmergeWarning, match="is damaged"):
            store.write(KEY, ROWS, Usage(1))
        assert store.read(KEY, ROWS).keys() == ITEMS


@pytest.mark.parametrize("change", [
    """scores = '{"right": 0.0}'""", "output = '\"y\"'", "judge = 'keyword'", "item = 'all/40'",
])  # fmt: skip
def test_a_row_with_a_wrong_bit_is_scored_again(tmp_path: Path, change: str):
    """SQLite itself has no checksums: it would be reported as the model's score."""
    file = written(tmp_path / "results.sqlite")
    with sqlite3.connect(file) as db:
        db.execute(f"UPDATE results SET {change} WHERE item = 'all/7'")
    db.close()
    with AnswerStore(file) as store:
        assert store.read(KEY, [*ROWS, ("all/40", "d")]).keys() == ITEMS - {"all/7"}


@pytest.mark.parametrize("looked_at", [True, False])
def test_a_store_of_an_earlier_version_is_read(tmp_path: Path, looked_at: bool):
    file = written(tmp_path / "results.sqlite")
    with sqlite3.connect(file) as db:
        db.execute("ALTER TABLE results DROP COLUMN checksum")
    db.close()
    with AnswerStore(file, looked_at=looked_at) as store:
        assert store.read(KEY, ROWS).keys() == ITEMS
        store.write(KEY, {("new", "d"): Scored({"right": 1.0})}, Usage(1))
        assert store.read(KEY, [*ROWS, ("new", "d")]).keys() == {*ITEMS, "new"}


@pytest.mark.parametrize("value", ["", "{", "[]", '{"right": "1"}', "[" * 10_000, b"\xff", None, 5])
def test_a_row_that_is_no_result_is_scored_again(tmp_path: Path, value: object):
    file = written(tmp_path / "results.sqlite")
    with sqlite3.connect(file) as db:
        db.execute("UPDATE results SET scores = ? WHERE item = 'all/7'", (value,))
        db.execute("UPDATE batches SET calls = 'x'")
    db.close()
    with AnswerStore(file) as store:
        assert store.read(KEY, ROWS).keys() == ITEMS - {"all/7"}
        assert store.usage(KEY, ROWS) == Usage()


@pytest.fixture
def nobody() -> Iterator[None]:
    """Files that only root may write are read-only, also where root runs the tests."""
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    yield
    os.seteuid(me)


@pytest.mark.parametrize("mode", [0o777, 0o555])
def test_a_store_that_is_read_only_is_read(request: pytest.FixtureRequest, mode: int):
    place = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(place))
    file = written(place / "results.sqlite")
    file.chmod(0o444)
    place.chmod(mode)
    request.getfixturevalue("nobody")
    with pytest.warns(SigmergeWarning, match="cannot be written"), AnswerStore(file) as store:
        assert store.read(KEY, ROWS).keys() == ITEMS
        store.write(KEY, {("all/99", "d"): Scored({"right": 1.0})}, Usage(2))
        assert store.read(KEY, [("all/99", "d")]).keys() == {"all/99"}
        assert store.usage(KEY, [("all/99", "d")]) == Usage(2)


@pytest.mark.parametrize("place", ["/proc/sigmerge/results.sqlite", "/dev/null/results.sqlite"])
def test_a_place_that_cannot_be_written_stops_nothing(place: str):
    with (
        pytest.warns(SigmergeWarning, match="cannot be written"),
        AnswerStore(Path(place)) as store,
    ):
        store.write(KEY, ROWS, Usage(1))
        assert store.read(KEY, ROWS).keys() == ITEMS


def test_a_full_disk_stops_nothing(tmp_path: Path):
    file = written(tmp_path / "results.sqlite")
    more = {("all/99", "d"): Scored({"right": 1.0}, "x" * 300_000)}
    with AnswerStore(file) as store:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.warns(SigmergeWarning, match="not remembered"):
                store.write(KEY, more, Usage(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.read(KEY, [*ROWS, *more]).keys() == {*ITEMS, "all/99"}
        assert store.usage(KEY, [*ROWS, *more]) == Usage(3)


def test_a_store_that_is_a_fifo_is_not_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "results.sqlite")
    said = pytest.warns(SigmergeWarning, match="not a regular file")
    with said, AnswerStore(tmp_path / "results.sqlite") as store:
        store.write(KEY, ROWS, Usage(1))
        assert store.read(KEY, ROWS).keys() == ITEMS


def test_files_of_others_are_refused_and_kept(tmp_path: Path):
    """`--store config.json` is a slip, and so is the store of a suite."""
    text, database = tmp_path / "config.json", tmp_path / "places.sqlite"
    text.write_text("{}" * 400)
    with sqlite3.connect(database) as db:
        db.execute("CREATE TABLE moz_places (url TEXT)")
    db.close()
    before = {file: file.read_bytes() for file in (text, database)}
    for file in before:
        with pytest.raises(OutputError, match="give --store"), AnswerStore(file):
            pass
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_store_that_is_looked_at_stays_as_it_is(tmp_path: Path):
    file = tmp_path / "results.sqlite"
    with AnswerStore(file, looked_at=True) as store:
        assert store.read(KEY, ROWS) == {}
    assert not file.exists()
    written(file)
    with AnswerStore(file, looked_at=True) as store:
        assert store.read(KEY, ROWS).keys() == ITEMS
    file.write_bytes(halved(file.read_bytes()))
    with AnswerStore(file, looked_at=True) as store:
        store.read(KEY, ROWS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.sqlite"]
