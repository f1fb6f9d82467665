"""The real command line: killed, run twice at once, its inputs changed between two runs.

`python -m fuzz.kills` kills by chance and often; here a few kills of every command stand for it.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz import kills as by_chance

import sigmerge
from sigmerge.errors import OutputError
from sigmerge.files.locks import only_writer
from sigmerge.jobs.anchor import is_current
from sigmerge.jobs.dense import plan_dense
from sigmerge.jobs.extract import ExtractJob
from sigmerge.jobs.merge import MergeJob
from sigmerge.jobs.options import Options
from sigmerge.nano.files import POOL, REFERENCE
from sigmerge.recipe import load_recipe
from tests.command_line import sigmerge as command
from tests.faults import job
from tests.forks import Fork, forked
from tests.forks import command as command_line
from tests.kept_entries import another_cache
from tests.pools import PoolOnDisk, few_facts, make_pool, weight_bytes

DOMAINS = ("math", "coding", "safety")
SCORES: dict[str, Any] = {
    "experts": {e: {d: 0.9 if d == e else 0.4 for d in DOMAINS} for e in DOMAINS},
    "anchor": {"math": 0.5, "coding": 0.8, "safety": 0.9},
}


def search_of(folder: Path) -> dict[str, Any]:
    """A recipe with a search, which asks few items: its winner is asked all others of a suite."""
    search = {"population": 2, "calls": 4, "items": 2, "estimator": "mean"}
    return {
        "merge_method": "task_arithmetic",
        "base_model": str(POOL / REFERENCE),
        "models": [{"model": str(POOL / name)} for name in ("math", "coding")],
        "search": {**search, "suite": str(few_facts(folder))},
    }


def repaired(pool: PoolOnDisk) -> Path:
    (pool.root / "scores.json").write_text(json.dumps(SCORES))
    recipe = pool.recipe("ties", each={"density": (0.5,) * 3}, repair={"scores": "scores.json"})
    return pool.write(recipe)


def stopped_at(place: str, *arguments: str | Path) -> Fork:
    """The command in a process of its own, which waits for ever where it calls `place`."""
    name, _, attribute = place.rpartition(".")
    module = importlib.import_module(f"sigmerge.{name}")
    waits, said = os.pipe()

    def wait(*_: Any, **__: Any) -> None:
        os.write(said, b"waiting")
        signal.pause()

    def work() -> None:
        setattr(module, attribute, wait)
        command_line(*arguments)

    fork = Fork(work)
    os.close(said)
    with os.fdopen(waits) as stream:
        assert stream.read(7) == "waiting", fork.ended()
    return fork


@pytest.mark.campaign
def test_kills_by_chance() -> None:
    """docs/results/reliability.md has many, also of searches, which load models for each kill."""
    names = ("merge", "merge, repaired", "repair", "run")

    def work() -> None:
        chosen = [word for name in names for word in ("--command", name)]
        sys.argv = ["fuzz.kills", "--count", "8", *chosen]
        sys.exit(by_chance.main())

    ran = forked(work)
    assert ran.code == 0, ran
    assert "8 kills, 0 wrong" in ran.out


def test_what_a_kill_leaves_is_gone_after_the_next_run(tmp_path: Path) -> None:
    pool, out = make_pool(tmp_path / "pool", layers=2), tmp_path / "results/out"
    recipe = pool.write(pool.recipe("linear"))
    out.parent.mkdir()
    stopped_at("jobs.dense.model_card", "merge", recipe, out).killed()
    left = {entry.name for entry in out.parent.iterdir()}
    assert left == {".out.partial", ".out.partial.lock"}
    assert (out.parent / ".out.partial/sigmerge/journal.jsonl").stat().st_size > 0
    ran = command("merge", recipe, out)
    assert ran.code == 0, ran.err
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]
    assert not [file for file in out.rglob("*") if "journal" in file.name or file.name[0] == "."]
    assert json.loads((out / "sigmerge/provenance.json").read_text())["blocks_resumed"]


def test_what_a_killed_repair_left_is_gone_after_a_plain_merge(tmp_path: Path) -> None:
    """Its anchor is as large as the result."""
    pool, out = make_pool(tmp_path / "pool", layers=2), tmp_path / "results/out"
    out.parent.mkdir()
    stopped_at("jobs.repair.run_occupancy", "merge", repaired(pool), out).killed()
    kept = [".out.notes", ".out.search"]  # what was scored for a search is no anchor
    for name in kept:
        (out.parent / name).mkdir()
    assert (out.parent / ".out.anchor").exists()
    (out.parent / "..out.anchor.partial").mkdir()  # of one that was killed in its merge
    (out.parent / "..out.anchor.partial.lock").touch()
    ran = command("merge", pool.write(pool.recipe("linear")), out)
    assert ran.code == 0, ran.err
    assert sorted(entry.name for entry in out.parent.iterdir()) == [*kept, "out"]


CHANGED = {
    "config.json": lambda text: json.dumps({**json.loads(text), "bos_token_id": 5}),
    "generation_config.json": lambda _: '{"eos_token_id": 7}',
    "tokenizer.json": lambda text: text + "\n",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("shared"), layers=2, tokenizer=True)


@pytest.mark.parametrize(
    ("member", "file"),
    [
        ("reference", "config.json"),
        ("reference", "tokenizer.json"),
        ("coding", "generation_config.json"),
        ("coding", "tokenizer.json"),
    ],
)
def test_a_run_whose_inputs_changed_makes_its_anchor_again(
    shared: PoolOnDisk, tmp_path: Path, member: str, file: str
) -> None:
    """Also when the file that changed goes into no weight."""

    def stopped(*_: Any, **__: Any) -> None:
        raise Stopped

    out, recipe = tmp_path / "run", repaired(shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sigmerge.jobs.run.RepairJob", stopped)
        with pytest.raises(Stopped):
            sigmerge.run(recipe, out)
    place = shared.root / member / file
    before = place.read_text() if place.exists() else None
    anchor = out / "anchor/sigmerge/provenance.json"
    made = anchor.stat().st_mtime_ns
    try:
        place.write_text(CHANGED[file](before or "{}"))
        assert command("run", recipe, out).code == 0
        assert anchor.stat().st_mtime_ns != made
        whole = tmp_path / "whole"
        assert command("run", recipe, whole).code == 0
        assert weight_bytes(out / "anchor") == weight_bytes(whole / "anchor")
        assert command("verify", out).code == 0
    finally:
        place.unlink()
        if before is not None:
            place.write_text(before)


def test_an_anchor_with_another_chat_template_is_made_again(
    shared: PoolOnDisk, tmp_path: Path
) -> None:
    """A file that the recipe names may change between a kill and the next run."""
    template, options = shared.root / "own.jinja", Options(threads=1)
    content = shared.recipe("linear", chat_template="own.jinja")
    template.write_text("{{ messages }}")
    recipe = load_recipe(shared.write(content, "template.yaml"))
    MergeJob(recipe, tmp_path / "anchor", options).run()
    assert is_current(recipe, tmp_path / "anchor", options)
    template.write_text("{{ messages }} ")
    changed = load_recipe(shared.root / "template.yaml")
    assert not is_current(changed, tmp_path / "anchor", options)
    jobs = [plan_dense(one, options).fingerprint() for one in (recipe, changed)]
    assert jobs[0] != jobs[1]  # by which a guide knows its calls


class Stopped(BaseException):
    """In the place of a kill, where a process of its own shows no more."""


def test_a_run_killed_after_its_anchor_keeps_it(shared: PoolOnDisk, tmp_path: Path) -> None:
    out, recipe = tmp_path / "run", repaired(shared)
    stopped_at("jobs.run.RepairJob", "run", recipe, out).killed()
    anchor = out / "anchor/sigmerge/provenance.json"
    made = anchor.stat().st_mtime_ns
    (out / "evaluation.json").write_text("{}")  # of a killed run of another recipe
    assert command("run", recipe, out).code == 0
    assert anchor.stat().st_mtime_ns == made
    expected = {"anchor", "repaired", "calibration.json", "report.html", "run.json"}
    assert {entry.name for entry in out.iterdir()} == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_the_record_of_a_run_is_written_last(
    shared: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    replace, rename = Path.replace, Path.rename

    def noted(real: Any) -> Any:
        def put(self: Path, target: Path) -> Any:
            written.append(Path(target).name)
            return real(self, target)

        return put

    monkeypatch.setattr(Path, "replace", noted(replace))
    monkeypatch.setattr(Path, "rename", noted(rename))
    sigmerge.run(repaired(shared), tmp_path / "run")
    assert written[-1] == "run.json"
    assert {"anchor", "repaired", "calibration.json", "report.html"} <= set(written[:-1])
    newest = max((tmp_path / "run").rglob("*"), key=lambda file: file.stat().st_mtime_ns)
    assert newest.name in ("run.json", "run")


def test_two_runs_at_once(shared: PoolOnDisk, tmp_path: Path) -> None:
    out, recipe = tmp_path / "run", repaired(shared)
    first = stopped_at("jobs.run.RepairJob", "run", recipe, out)
    try:
        anchor = weight_bytes(out / "anchor")
        second = command("run", recipe, out, "--overwrite")
        assert second.code == 4
        assert "another process is writing this run" in second.err
        assert weight_bytes(out / "anchor") == anchor
    finally:
        first.killed()
    assert command("run", recipe, out).code == 0


def test_two_searches_at_once(tmp_path: Path) -> None:
    """The second neither writes nor clears what the first has."""
    pytest.importorskip("pymoo")
    recipe, out = tmp_path / "search.yaml", tmp_path / "found"
    recipe.write_text(json.dumps(search_of(tmp_path)))
    out.mkdir()
    (out / "search.jsonl").write_text('{"the first": "one"}\n')
    with only_writer(tmp_path / ".found.lock", "held by the first"):
        ran = command("search", recipe, out, "--overwrite")
    assert ran.code == 4 and "another process is writing this search" in ran.err
    assert (out / "search.jsonl").read_text() == '{"the first": "one"}\n'


def test_two_tunings_at_once(shared: PoolOnDisk, tmp_path: Path) -> None:
    recipe, out = shared.recipe("linear"), tmp_path / "tuned"
    with (
        only_writer(tmp_path / ".tuned.lock", "held by the first"),
        pytest.raises(OutputError, match="another process is writing this tuning"),
    ):
        sigmerge.tune(recipe, out, calls=8, score=by_weights)
    assert list(out.iterdir()) == []


def test_threads_end_with_their_merge(shared: PoolOnDisk, tmp_path: Path) -> None:
    recipe = repaired(shared)
    sigmerge.run(recipe, tmp_path / "first", threads=3)
    before = threading.active_count()
    for name in ("second", "third"):
        sigmerge.run(recipe, tmp_path / name, threads=3)
    assert threading.active_count() == before


@pytest.mark.parametrize("state", ["garbled", "unwritable"])
def test_what_is_kept_of_evaluations_stops_none(tmp_path: Path, state: str) -> None:
    """What is damaged is scored again, and what cannot be kept is said once."""
    words = ("evaluate", POOL / "math", "--suite", "nano", "--limit", "1", "--json")
    place = tmp_path / "cache"
    if state == "unwritable":
        place.write_text("a file where the folder should be")
    with another_cache(place) as root:
        wanted = None if state == "unwritable" else command(*words)
        for file in root.rglob("*.jsonl"):
            file.write_bytes(
                file.read_bytes().replace(b"1.0", b"0.0").replace(b"output", b"xutput")
            )
        ran = command(*words)
        assert ran.code == 0, ran
        assert ran.json["reused_items"] == 0
        assert wanted is None or ran.json["domains"] == wanted.json["domains"]


def test_a_repair_whose_recipe_gives_shares_ends_well(shared: PoolOnDisk, tmp_path: Path) -> None:
    """There are no deficits to be printed; the command once failed after it had published."""
    section = {"shares": dict.fromkeys(DOMAINS, 0.3), "capacity": 0.2}
    recipe = shared.write(shared.recipe("linear", repair=section))
    ran = command("merge", recipe, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "math: share 0.3" in ran.out and "deficit" not in ran.out


@pytest.mark.parametrize("purpose", ["anchor", "candidate", "level", "calibrate", "guide"])
@pytest.mark.parametrize("kind", ["fifo", "link", "file"])
def test_strange_things_under_the_names_of_work_folders(
    shared: PoolOnDisk, tmp_path: Path, purpose: str, kind: str
) -> None:
    """They are neither waited for nor followed; what is in the way of the command is removed."""
    out, kept = tmp_path / "out", tmp_path / "kept"
    kept.mkdir()
    (kept / "thesis.tex").write_text("years of work")
    strange = tmp_path / f".out.{purpose}"
    if kind == "fifo":
        os.mkfifo(strange)
    elif kind == "link":
        strange.symlink_to(kept)
    else:
        strange.write_text("x")
    sections: dict[str, dict[str, Any]] = {
        "calibrate": {"repair": {"calibrate": {"calls": 2}}},
        "level": {"repair": {"calibrate": {"calls": 2}}},
        "guide": {"guide": {"calls": 2}},
        "candidate": {"repair": {"rounds": 2}},
        "anchor": {"repair": {}},
    }
    recipe = {**shared.recipe("task_arithmetic", each={"weight": (0.4,) * 3}), **sections[purpose]}
    signal.alarm(60)
    try:
        MergeJob(load_recipe(shared.write(recipe)), out, Options(threads=1), by_weights).run()
    finally:
        signal.alarm(0)
    assert [entry.name for entry in kept.iterdir()] == ["thesis.tex"]
    assert (out / "model.safetensors").exists() and not os.path.lexists(strange)


def by_weights(folder: Path) -> dict[str, float]:
    """Scores that only the weights decide."""
    found = zlib.crc32(b"".join(weight_bytes(folder).values()))
    return {domain: 0.1 + (found >> 8 * place) % 8 / 10 for place, domain in enumerate(DOMAINS)}


def guided(pool: PoolOnDisk, out: Path, options: Options) -> None:
    recipe = pool.recipe("task_arithmetic", each={"weight": (0.4,) * 3}, guide={"calls": 2})
    MergeJob(load_recipe(recipe), out, options, by_weights).run()


def searched(pool: PoolOnDisk, out: Path, options: Options) -> None:
    pytest.importorskip("pymoo")
    MergeJob(load_recipe(search_of(pool.root)), out, options).run()


def extracted(pool: PoolOnDisk, out: Path, options: Options) -> None:
    ExtractJob(pool.experts["math"], pool.reference, out, options).run()


PUBLISHING = [guided, searched, extracted]
"""Jobs that make a result under a hidden name of their own."""
Publishing = Callable[[PoolOnDisk, Path, Options], None]


@pytest.mark.parametrize("publishing", PUBLISHING)
def test_a_folder_that_appeared_meanwhile_is_not_replaced(
    shared: PoolOnDisk, tmp_path: Path, publishing: Publishing
) -> None:
    out = tmp_path / "out"

    def appear(*_: Any) -> None:
        out.mkdir(exist_ok=True)
        (out / "thesis.tex").write_text("years of work")

    with pytest.raises(OutputError, match="exists already"):
        publishing(shared, out, Options(threads=1, progress=appear))
    assert [file.name for file in out.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("publishing", [guided, searched])
def test_two_merges_of_one_result_at_once(
    shared: PoolOnDisk, tmp_path: Path, publishing: Publishing
) -> None:
    def second(*_: Any) -> None:
        with pytest.raises(OutputError, match="another run is writing it"):
            publishing(shared, tmp_path / "out", Options(threads=1))

    publishing(shared, tmp_path / "out", Options(threads=1, progress=second))
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("publishing", PUBLISHING)
def test_killed_between_the_two_renames_of_a_replacement(
    shared: PoolOnDisk, tmp_path: Path, publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two names cannot be exchanged, the next run puts the older result back and goes on."""
    out, rename = tmp_path / "out", Path.rename
    publishing(shared, out, Options(threads=1))
    (out / "old").touch()

    def killed(self: Path, target: Path) -> Path:
        if target == out:
            raise Stopped
        return rename(self, target)

    monkeypatch.setattr("sigmerge.checkpoints.publishing.exchange", lambda one, other: False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Stopped):
            publishing(shared, out, Options(threads=1, overwrite=True))
    assert not out.exists()
    with pytest.raises(OutputError, match="exists already"):
        publishing(shared, out, Options(threads=1))
    assert (out / "old").exists()
    publishing(shared, out, Options(threads=1, overwrite=True))
    assert not (out / "old").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("publishing", PUBLISHING)
def test_a_result_behind_a_link_lies_where_the_link_leads(
    shared: PoolOnDisk, tmp_path: Path, publishing: Publishing
) -> None:
    link, real = tmp_path / "link", tmp_path / "real"
    link.symlink_to(real)
    for overwrite in (False, True):
        publishing(shared, link, Options(threads=1, overwrite=overwrite))
        assert link.is_symlink() and any(real.glob("*.safetensors"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "real"]


RECORD = "../search.json"


@pytest.mark.parametrize(
    "damage", ["model.safetensors", "sigmerge/plan.json", "foreign.py", RECORD]
)
def test_a_winner_that_was_damaged_before_it_is_published_is_made_again(
    shared: PoolOnDisk, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "out"

    def killed(*_: Any, **__: Any) -> None:
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sigmerge.jobs.search.publish", killed)
        with pytest.raises(Stopped):
            searched(shared, out, Options(threads=1))
    made = tmp_path / ".out.search/winner"
    wanted, file = weight_bytes(made), made / damage
    content = bytearray(file.read_bytes() if file.exists() else b"evil")
    content[-3] ^= damage != RECORD
    file.write_bytes(content.replace(b'"wall_seconds": ', b'"wall_seconds": 99887766'))
    searched(shared, out, Options(threads=1))
    assert "99887766" not in (out / "sigmerge/search.json").read_text()
    found = weight_bytes(out)
    assert [name for name in found | wanted if found.get(name) != wanted.get(name)] == [
        "sigmerge/search.json"  # which has times
    ]
    assert command("verify", out).code == 0


@pytest.mark.parametrize("publishing", [guided, extracted])
def test_a_home_in_the_name_of_a_result(
    shared: PoolOnDisk, tmp_path: Path, publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    publishing(shared, Path("~/out"), Options(threads=1))
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    with pytest.raises(OutputError, match="home directory"):
        publishing(shared, Path("~nobody-here/out"), Options(threads=1))


@pytest.mark.parametrize("publishing", [guided, extracted])
@pytest.mark.parametrize("out", ["x" * 300, "x" * 250, "file/out"])
def test_a_name_that_no_folder_can_have_is_an_error_of_the_output(
    shared: PoolOnDisk, tmp_path: Path, publishing: Publishing, out: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        publishing(shared, tmp_path / out, Options(threads=1))
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_without_a_home_commands_work_and_a_path_behind_one_says_what_to_set(
    shared: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that runs as a user whom nobody knows."""
    from sigmerge.files import cache

    def nobody(*_: Any) -> None:
        raise KeyError

    recipe, behind = repaired(shared), tmp_path / "behind.yaml"
    behind.write_text(recipe.read_text().replace("scores.json", "~/scores.json"))
    for name in ("HOME", "XDG_CACHE_HOME", "SIGMERGE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache._users.cache_clear()
    try:
        assert command("run", recipe, tmp_path / "out").code == 0
        ran = command("run", behind, tmp_path / "other")
    finally:
        cache._users.cache_clear()
    assert ran.code == 2 and "no home folder is known" in ran.err, ran
    assert "set HOME, or SIGMERGE_CACHE" in ran.err


def test_a_full_disk_while_a_run_writes_its_records(
    shared: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the file, and the exit code is that of the output; what is made stays."""
    recipe, out, sync = repaired(shared), tmp_path / "run", os.fsync

    def full(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().name.startswith(".calibration"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr("sigmerge.files.documents.os.fsync", full)
        ran = command("run", recipe, out)
    assert ran.code == 4 and f"{out}/calibration.json: No space left" in ran.err, ran
    assert command("run", recipe, out).code == 0


def test_a_full_disk_leaves_nothing_of_an_adapter(
    shared: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sigmerge.jobs.extract.peft_settings", full)
    with pytest.raises(OutputError, match="No space left"):
        extracted(shared, tmp_path / "out", Options(threads=1))
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_a_run_is_cleared_leaves_no_half_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = repaired(make_pool(tmp_path / "pool", layers=2, tokenizer=True)), tmp_path / "out"
    sigmerge.run(recipe, out)
    wanted = weight_bytes(out / "repaired")
    remove = shutil.rmtree

    def killed(folder: Path, *how: Any, **more: Any) -> None:
        if Path(folder).exists():
            (Path(folder) / "config.json").unlink()
            raise KeyboardInterrupt
        remove(folder, *how, **more)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        sigmerge.run(recipe, out, overwrite=True)
    monkeypatch.undo()
    for name in ("anchor", "repaired"):
        assert not (out / name).exists() or (out / name / "config.json").exists()
    sigmerge.run(recipe, out)
    assert weight_bytes(out / "repaired") == wanted
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]


def test_a_kill_while_the_page_is_written_leaves_the_checkpoint_as_it_was(tmp_path: Path) -> None:
    """Before every change: a checkpoint has been published by then, and no half may be in it."""
    recipe, out = repaired(make_pool(tmp_path / "pool", layers=2, tokenizer=True)), tmp_path / "out"
    sigmerge.run(recipe, out)
    wanted = sorted(file.relative_to(out / "repaired") for file in (out / "repaired").rglob("*"))
    for kills in itertools.count():
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                job.arm_change(kills + 1)
                sigmerge.report(out)
                os._exit(0)
            os._exit(1)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = (out / "repaired").rglob("*")
        assert sorted(file.relative_to(out / "repaired") for file in found) == wanted
        if ended != -signal.SIGKILL:
            break
    assert ended == 0 and kills > 5
    assert command("verify", out).code == 0
    sigmerge.run(recipe, out, overwrite=True)
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_an_anchor_that_was_damaged_before_a_run_goes_on_is_made_again(
    tmp_path: Path, file: str
) -> None:
    recipe, out = repaired(make_pool(tmp_path / "pool", layers=2, tokenizer=True)), tmp_path / "out"
    sigmerge.run(recipe, out)
    wanted = {name: weight_bytes(out / name) for name in ("anchor", "repaired")}
    (out / "run.json").unlink()
    shutil.rmtree(out / "repaired")
    content = bytearray((out / "anchor" / file).read_bytes())
    content[-3] ^= 1
    (out / "anchor" / file).write_bytes(content)
    sigmerge.run(recipe, out)
    assert {name: weight_bytes(out / name) for name in wanted} == wanted
    assert command("verify", out).code == 0
