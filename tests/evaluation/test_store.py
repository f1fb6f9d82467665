"""The store: what is written is read, by content; one writer; batches are whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from sigmerge.errors import OutputError, ScoreError
from sigmerge.evaluation.command_line import command_words
from sigmerge.evaluation.store import (
    AnswerStore,
    Key,
    Scored,
    checkpoint_key,
    settings_key,
)
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
from sigmerge.evaluation.store import Key, Scored, Store
from sigmerge.probing.generate import Usage
with Store(Path(sys.argv[1])) as store:
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


def test_a_damaged_store_is_told(tmp_path: Path):
    file = tmp_path / "results.sqlite"
    file.write_bytes(b"no database, but long enough to be asked about" * 9)
    for _ in range(2):
        with (
            pytest.raises(OutputError, match=r"results\.sqlite: .* move it away"),
            AnswerStore(file),
        ):
            pass
    file.unlink()
    rows = {(f"all/{i}", "d"): Scored({"right": 1.0}, "x" * 2000) for i in range(40)}
    with AnswerStore(file) as store:
        store.write(KEY, rows, Usage())
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(OutputError, match="move it away"), AnswerStore(file) as store:
        store.read(KEY, rows)
