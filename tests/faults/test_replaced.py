"""A result that replaces another, or is made beside another command: what was there, what is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sigmerge
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.errors import OutputError, PoolError
from sigmerge.files.atomic_swap import exchange
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import PoolInputs
from sigmerge.results import SearchResult
from tests.command_line import refused
from tests.command_line import sigmerge as command
from tests.faults.test_commands import (
    SCORES,
    Publishing,
    Stopped,
    extracted,
    guided,
    repaired,
    search_of,
    searched,
    stopped_at,
)
from tests.pools import PoolOnDisk, make_pool, read_weights, weight_bytes


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("shared"))


def same_weights(one: Path, other: Path) -> bool:
    files = [sorted(folder.glob("*.safetensors")) for folder in (one, other)]
    return [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def older(pool: PoolOnDisk, out: Path, publishing: Publishing) -> None:
    """Another result than the one that is to replace it."""
    if publishing is extracted:
        sigmerge.extract(pool.experts["coding"], out, base=pool.reference, rank=1)
    else:
        sigmerge.merge(pool.recipe("linear"), out)


@pytest.mark.parametrize("publishing", [guided, searched, extracted])
@pytest.mark.parametrize("half", [False, True], ids=["whole", "half removed"])
def test_stopped_after_a_result_was_exchanged_for_an_older_one(
    shared: PoolOnDisk,
    tmp_path: Path,
    publishing: Publishing,
    half: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next run never takes the older result, or what is left of it, for its own."""
    out, wanted = tmp_path / "out", tmp_path / "wanted"
    publishing(shared, wanted, Options(threads=1))
    older(shared, out, publishing)
    assert not same_weights(out, wanted)

    def stopped(one: Path, other: Path) -> bool:
        if not exchange(one, other):
            pytest.skip("two names cannot be exchanged here")
        if half:
            next(one.glob("*config.json")).unlink()
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sigmerge.checkpoints.publishing.exchange", stopped)
        with pytest.raises(Stopped):
            publishing(shared, out, Options(threads=1, overwrite=True))
    publishing(shared, out, Options(threads=1, overwrite=True))
    assert same_weights(out, wanted)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "wanted"]


@pytest.mark.parametrize("damage", ["model.safetensors", "sigmerge/recipe.yaml", "foreign.py"])
def test_a_winner_that_is_damaged_before_it_is_published_is_not_published(
    shared: PoolOnDisk, tmp_path: Path, damage: str
) -> None:
    """It is tested before it is stored; what is stored waits for the record of the search."""
    out, write = tmp_path / "out", SearchResult.write

    def damaged(self: SearchResult, file: Path) -> None:
        with (tmp_path / ".out.search/winner" / damage).open("ab") as stream:
            stream.write(b"\n# evil\n")
        write(self, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SearchResult, "write", damaged)
        with pytest.raises(OutputError, match="is not what was written"):
            searched(shared, out, Options(threads=1))
    assert not out.exists()
    searched(shared, out, Options(threads=1))
    assert command("verify", out).code == 0


@pytest.mark.parametrize("verb", ["merge", "repair"])
def test_one_command_at_a_time_makes_a_repair(
    shared: PoolOnDisk, tmp_path: Path, verb: str
) -> None:
    """Else the second would exchange the anchor that the first is about to repair."""
    out, recipe, given = tmp_path / "out", repaired(shared), list[str | Path]()
    if verb == "repair":
        sigmerge.merge(shared.recipe("ties"), tmp_path / "stored")
        given = ["--anchor", tmp_path / "stored"]
    first = stopped_at("jobs.repair.measure_profile", verb, recipe, out, *given)
    try:
        anchor = tmp_path / ".out.anchor"
        before = weight_bytes(anchor) if anchor.exists() else None
        other = shared.recipe("linear", repair={"scores": "scores.json"})
        second = command("merge", shared.write(other, "other.yaml"), out)
        assert second.code == 4 and "another run is writing it" in second.err
        assert (weight_bytes(anchor) if anchor.exists() else None) == before
    finally:
        first.killed()
    assert command(verb, recipe, out, *given).code == 0


def test_a_configuration_that_changes_while_checkpoints_are_scored_stops_the_repair(
    shared: PoolOnDisk, tmp_path: Path
) -> None:
    """The result would have the old one, and its record the digest of the new one."""
    anchor = tmp_path / "anchor"
    sigmerge.merge(shared.recipe("ties"), anchor)

    def score(folder: Path) -> dict[str, float]:
        config = anchor / "config.json"
        config.write_text(config.read_text().replace("llama", "llama "))
        return dict.fromkeys(SCORES["anchor"], 0.5)

    recipe = shared.recipe("ties", repair={})
    with pytest.raises(PoolError, match=r"config\.json: changed while it was read"):
        sigmerge.repair(recipe, tmp_path / "out", anchor=anchor, score=score)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("section", [{}, {"calibrate": {"calls": 2}}])
def test_a_tokenizer_that_goes_while_checkpoints_are_scored_stops_the_repair(
    tmp_path: Path, section: dict[str, object]
) -> None:
    """The result has the anchor's own: it would have none, and its record would agree.

    A score is shown links; that it removes one of these changes nothing.
    """
    pool, anchor = make_pool(tmp_path / "pool", layers=1, tokenizer=True), tmp_path / "anchor"
    sigmerge.merge(pool.recipe("ties"), anchor)

    def score(folder: Path) -> dict[str, float]:
        (folder / "tokenizer.json").unlink(missing_ok=True)
        (anchor / "tokenizer.json").unlink(missing_ok=True)
        return dict.fromkeys(SCORES["anchor"], 0.5)

    recipe = pool.recipe("ties", repair=section)
    with pytest.raises(PoolError, match="changed while it was read"):
        sigmerge.repair(recipe, tmp_path / "out", anchor=anchor, score=score)
    assert not (tmp_path / "out").exists()


def test_a_configuration_that_is_replaced_by_an_equal_one_is_another_version(
    tmp_path: Path,
) -> None:
    pool = make_pool(tmp_path)
    opened = {"math": open_checkpoint(pool.experts["math"])}
    PoolInputs.of(opened)
    config = pool.experts["math"] / "config.json"
    content = config.read_bytes()
    config.unlink()
    with pytest.raises(PoolError, match="changed"):
        PoolInputs.of(opened)
    config.write_bytes(content)
    with pytest.raises(PoolError, match="changed"):
        PoolInputs.of(opened)


def test_a_link_to_a_folder_that_appears_meanwhile_is_not_published(
    shared: PoolOnDisk, tmp_path: Path
) -> None:
    def appear(*_: Any) -> None:
        link = tmp_path / ".out.partial/extra"
        if link.parent.exists() and not link.is_symlink():
            link.symlink_to("/etc")

    with pytest.raises(OutputError, match="extra is not what was written"):
        sigmerge.merge(shared.recipe("linear"), tmp_path / "out", progress=appear)
    assert not (tmp_path / "out").exists()


def test_an_interruption_right_before_the_result_has_its_name_loses_nothing(
    shared: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sigmerge.checkpoints.writer.put_in_place", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sigmerge.merge(shared.recipe("linear"), tmp_path / "out")
    made = sigmerge.merge(shared.recipe("linear"), tmp_path / "out")
    assert "layer 0" in made.provenance.blocks_resumed


def test_no_command_replaces_the_folder_that_it_runs_in(
    shared: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    sigmerge.merge(shared.recipe("linear"), out)
    (out / "notes").mkdir()
    monkeypatch.chdir(out / "notes")
    with pytest.raises(OutputError, match="choose a new folder"):
        sigmerge.merge(shared.recipe("linear"), Path(".."), overwrite=True)
    assert (out / "notes").exists()


@pytest.mark.parametrize("purpose", ["anchor", "partial", "old"])
def test_no_input_has_a_name_that_the_command_removes(
    shared: PoolOnDisk, tmp_path: Path, purpose: str
) -> None:
    """A failed merge names its anchor, `.out.anchor`, which may then be used."""
    hidden = tmp_path / f".out.{purpose}"
    shutil.copytree(shared.experts["math"], hidden)
    content = shared.recipe("linear")
    content["models"][0]["model"] = str(hidden)
    recipe = shared.write(content, "hidden.yaml")
    assert "the command itself uses" in refused(
        4, "merge", recipe, tmp_path / "out", beside=tmp_path
    )


def test_no_command_replaces_its_own_plan_or_recipe(shared: PoolOnDisk, tmp_path: Path) -> None:
    anchor, out = tmp_path / "anchor", tmp_path / "out"
    sigmerge.merge(shared.recipe("ties"), anchor)
    sigmerge.repair(repaired(shared), out, anchor=anchor)
    mine = out / "mine.json"
    mine.write_bytes((out / "sigmerge/plan.json").read_bytes())
    with pytest.raises(OutputError, match=r"holds an input, .*mine\.json"):
        sigmerge.replay(mine, out, overwrite=True)
    pytest.importorskip("pymoo")
    found = tmp_path / "found"
    recipe = found / "winner/sigmerge/mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(json.dumps(search_of(tmp_path)))
    ran = command("search", recipe, found, "--overwrite")
    assert ran.code == 4 and "holds an input" in ran.err and "mine.yaml" in ran.err
    assert mine.exists() and recipe.exists()


def test_a_run_goes_into_no_input(shared: PoolOnDisk) -> None:
    inside = shared.experts["math"] / "run"
    with pytest.raises(OutputError, match="lies inside an input"):
        sigmerge.run(repaired(shared), inside)
    assert not inside.exists()


def test_a_link_that_leads_back_to_itself_is_no_place_for_a_result(
    shared: PoolOnDisk, tmp_path: Path
) -> None:
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    with pytest.raises(OutputError, match="leads back to itself"):
        sigmerge.merge(shared.recipe("linear"), tmp_path / "one")


@pytest.mark.parametrize("begun", [False, True])
def test_files_that_may_not_be_so_large(shared: PoolOnDisk, tmp_path: Path, begun: bool) -> None:
    """Nothing is left of a merge that could not begin; what an earlier run finished stays."""
    recipe, out = shared.write(shared.recipe("linear")), tmp_path / "out"
    if begun:
        stopped_at("checkpoints.writer.sync_tree", "merge", recipe, out).killed()
    limited = f'ulimit -f 1; exec "{sys.executable}" -m sigmerge merge "{recipe}" "{out}"'
    ran = subprocess.run(["bash", "-c", limited], capture_output=True, text=True)
    assert ran.returncode == 4 and "cannot be written" in ran.stderr, ran
    assert os.path.lexists(tmp_path / ".out.partial") == begun
    if begun:
        assert read_weights(tmp_path / ".out.partial")
