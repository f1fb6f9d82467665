"""Killed at any moment and run again: the same bytes as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sigmerge
from sigmerge.checkpoints import publishing
from sigmerge.checkpoints.folder import INDEX
from sigmerge.checkpoints.writer import Output, plan_layout
from sigmerge.errors import OutputError
from tests.forks import forked
from tests.pools import PoolOnDisk, draw, make_pool, shapes, weight_bytes, write_weights

Patch = Callable[[], None]
"""What is changed in the process that dies."""


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(method: str, calls: int) -> Patch:
    """The process dies after so many calls of a method of the output."""

    def patch() -> None:
        real, count = getattr(Output, method), itertools.count(1)

        def patched(self: Output, *given: Any) -> None:
            real(self, *given)
            if next(count) == calls:
                die()

        setattr(Output, method, patched)

    return patch


def between_renames() -> None:
    rename = Path.rename

    def patched(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            die()
        return rename(self, target)

    publishing.exchange = lambda one, other: False
    Path.rename = patched


def after_renames() -> None:
    shutil.rmtree = die


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("pool"), layers=3, dtype="bf16", tokenizer=True)


def recipe_file(pool: PoolOnDisk, weight: float = 0.5) -> Path:
    each = {"density": (0.3, 0.5, 0.7)}
    content = pool.recipe("dare_ties", None, (weight, 0.25, 0.75), each, seed=3)
    return pool.write(content, f"recipe-{weight}.yaml")


def run_again(recipe: Path, out: Path, **how: Any) -> dict[str, Any]:
    return sigmerge.merge(recipe, out, **{"threads": 1, "max_shard_size": "8KB", **how})


@pytest.fixture(scope="module")
def uninterrupted(pool: PoolOnDisk, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    run_again(recipe_file(pool), out)
    found = weight_bytes(out)
    assert sum(name.endswith(".safetensors") for name in found) > 2
    return found


def killed(recipe: Path, out: Path, patch: Patch) -> None:
    def work() -> None:
        patch()
        sigmerge.merge(recipe, out, threads=2, max_shard_size="8KB", overwrite=True)

    ran = forked(work)
    assert ran.code == -signal.SIGKILL, ran


def leftovers(out: Path) -> list[str]:
    return [entry.name for entry in out.parent.iterdir() if entry.name.startswith(".")]


@pytest.mark.parametrize(
    ("patch", "finished"),
    [
        (after("written", 1), (0,)),
        (after("finish", 1), (1,)),
        (after("written", 12), (1, 2, 3)),  # two blocks are at work
        (after("finish", 4), (4,)),
        (after("copy", 1), (6,)),
        (between_renames, (0,)),
    ],
    ids=["first tile", "first block", "amid a block", "fourth block", "companions", "renames"],
)
def test_resumed_is_uninterrupted(
    pool: PoolOnDisk,
    tmp_path: Path,
    uninterrupted: dict[str, bytes],
    patch: Patch,
    finished: tuple[int, ...],
) -> None:
    out = tmp_path / "out"
    killed(recipe_file(pool), out, patch)
    assert not out.exists()
    result = run_again(recipe_file(pool), out)
    assert len(result.provenance.blocks_resumed) in finished
    assert weight_bytes(out) == uninterrupted
    assert leftovers(out) == []


def test_killed_just_after_publishing_is_published(
    pool: PoolOnDisk, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    out = old_folder(tmp_path)
    killed(recipe_file(pool), out, after_renames)
    assert weight_bytes(out) == uninterrupted
    assert not list(out.rglob("*journal*"))
    run_again(recipe_file(pool), out, overwrite=True)
    assert weight_bytes(out) == uninterrupted
    assert leftovers(out) == []


def test_a_changed_recipe_starts_afresh(pool: PoolOnDisk, tmp_path: Path) -> None:
    killed(recipe_file(pool), tmp_path / "out", after("finish", 3))
    result = run_again(recipe_file(pool, 0.6), tmp_path / "out")
    assert list(result.provenance.blocks_resumed) == []
    run_again(recipe_file(pool, 0.6), tmp_path / "whole")
    assert weight_bytes(tmp_path / "out") == weight_bytes(tmp_path / "whole")


def test_a_changed_shard_size_starts_afresh(
    pool: PoolOnDisk, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    killed(recipe_file(pool), tmp_path / "out", after("finish", 3))
    result = run_again(recipe_file(pool), tmp_path / "out", max_shard_size="1MB")
    assert result.provenance.blocks_resumed == ()
    assert (tmp_path / "out/model.safetensors").exists()
    assert not (tmp_path / "out" / INDEX).exists()


def test_a_changed_input_starts_afresh(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", layers=3)
    killed(recipe_file(pool), tmp_path / "out", after("finish", 3))
    write_weights(pool.experts["math"], draw(shapes(layers=3), 999))
    result = run_again(recipe_file(pool), tmp_path / "out")
    assert list(result.provenance.blocks_resumed) == []
    run_again(recipe_file(pool), tmp_path / "whole")
    assert weight_bytes(tmp_path / "out") == weight_bytes(tmp_path / "whole")


def test_another_tokenizer_starts_afresh(pool: PoolOnDisk, tmp_path: Path) -> None:
    killed(recipe_file(pool), tmp_path / "out", after("copy", 1))
    (pool.experts["math"] / "added_tokens.json").write_text("{}")
    content = pool.recipe(
        "dare_ties", None, each={"density": (0.3, 0.5, 0.7)}, tokenizer_source="math", seed=3
    )
    result = run_again(pool.write(content, "other.yaml"), tmp_path / "out")
    (pool.experts["math"] / "added_tokens.json").unlink()
    assert list(result.provenance.blocks_resumed) == []
    assert (tmp_path / "out/added_tokens.json").exists()


def test_a_torn_line_of_the_journal_is_not_believed(
    pool: PoolOnDisk, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    killed(recipe_file(pool), tmp_path / "out", after("finish", 3))
    journal = tmp_path / ".out.partial/sigmerge/journal.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:9])
    assert len(run_again(recipe_file(pool), tmp_path / "out").provenance.blocks_resumed) == 2
    assert weight_bytes(tmp_path / "out") == uninterrupted


def old_folder(tmp_path: Path) -> Path:
    """An older and larger result, with shards and an index that must not survive."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / INDEX).write_text('{"weight_map": {"x": "model-00001-of-00099.safetensors"}}')
    (out / "model-00001-of-00099.safetensors").write_bytes(b"old")
    (out / "model.safetensors").write_bytes(b"older")
    return out


def test_overwriting_never_mixes_old_and_new(
    pool: PoolOnDisk, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    out = old_folder(tmp_path)
    run_again(recipe_file(pool), out, overwrite=True)
    assert weight_bytes(out) == uninterrupted
    assert leftovers(out) == []


@pytest.mark.parametrize("patch", [after("finish", 3), after("copy", 1)])
def test_a_killed_overwriting_leaves_the_old_folder_as_it_was(
    pool: PoolOnDisk, tmp_path: Path, uninterrupted: dict[str, bytes], patch: Patch
) -> None:
    out = old_folder(tmp_path)
    before = weight_bytes(out)
    killed(recipe_file(pool), out, patch)
    assert weight_bytes(out) == before
    run_again(recipe_file(pool), out, overwrite=True)
    assert weight_bytes(out) == uninterrupted


def test_killed_between_the_two_renames_of_an_overwriting(
    pool: PoolOnDisk, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    out = old_folder(tmp_path)
    before = weight_bytes(out)
    killed(recipe_file(pool), out, between_renames)
    assert not out.exists()
    assert weight_bytes(tmp_path / ".out.old") == before
    layout = plan_layout([("x", "F32", (4,))], 10**6)
    with Output(out, layout, "another job", overwrite=True):
        assert weight_bytes(out) == before  # put back by whoever comes next
    run_again(recipe_file(pool), out, overwrite=True)
    assert weight_bytes(out) == uninterrupted
    assert leftovers(out) == []


def test_an_existing_folder_needs_overwrite(pool: PoolOnDisk, tmp_path: Path) -> None:
    out = old_folder(tmp_path)
    before = weight_bytes(out)
    with pytest.raises(OutputError, match="exists already; pass --overwrite"):
        run_again(recipe_file(pool), out)
    assert weight_bytes(out) == before
    assert leftovers(out) == []


def test_only_a_checkpoint_folder_is_overwritten(pool: PoolOnDisk, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match="is not a checkpoint folder"):
        run_again(recipe_file(pool), tmp_path / "out", overwrite=True)
    assert (tmp_path / "out/thesis.tex").exists()


@pytest.mark.parametrize("beside", [{}, {"src/main.ts": ""}, {"sigmerge/notes.txt": ""}])
def test_a_configuration_alone_is_no_checkpoint(
    pool: PoolOnDisk, tmp_path: Path, beside: dict[str, str]
) -> None:
    out = tmp_path / "out"
    for name, text in {"config.json": "{}", **beside}.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    with pytest.raises(OutputError, match="is not a checkpoint folder"):
        run_again(recipe_file(pool), out, overwrite=True)
    assert all((out / name).exists() for name in beside)


@pytest.mark.parametrize("name", ["recipe.yaml", "deep/recipe.yaml", "scores.json", "shown.jsonl"])
def test_a_file_in_use_is_never_deleted(pool: PoolOnDisk, tmp_path: Path, name: str) -> None:
    out = old_folder(tmp_path)
    content = pool.recipe("linear", repair={"scores": str(out / "scores.json")})
    content["models"][0]["exemplars"] = str(out / "shown.jsonl")
    file = out / name
    file.parent.mkdir(exist_ok=True)
    file.write_text('{"prompt": "x"}\n')
    recipe = file if file.suffix == ".yaml" else tmp_path / "recipe.yaml"
    if name != "shown.jsonl":
        del content["models"][0]["exemplars"]
    recipe.write_text(json.dumps(content))
    with pytest.raises(OutputError, match=f"holds an input, .*{name}"):
        run_again(recipe, out, overwrite=True)
    assert file.exists()


def test_a_result_is_made_again_by_its_own_recipe(pool: PoolOnDisk, tmp_path: Path) -> None:
    """The new one has the same recipe, so nothing is lost; a guided one has another."""
    out, given = tmp_path / "out", recipe_file(pool)
    own = out / "sigmerge/recipe.yaml"
    run_again(given, out)
    before = weight_bytes(out)
    shard = next(out.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-2])
    run_again(own, out, overwrite=True)
    assert weight_bytes(out) == before
    assert own.read_text() == given.read_text()
    guided = pool.recipe("linear", guide={"command": "true {checkpoint}"})
    own.write_text(json.dumps(guided))
    with pytest.raises(OutputError, match=r"holds an input, .*recipe\.yaml"):
        run_again(own, out, overwrite=True)
    assert own.exists()


@pytest.mark.parametrize("place", ["suite.yaml", "items/a.jsonl", "score.py"])
@pytest.mark.parametrize("below", ["the recipe", "where the command runs"])
def test_a_suite_its_data_and_a_script_are_never_deleted(
    pool: PoolOnDisk, tmp_path: Path, place: str, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, home = old_folder(tmp_path), tmp_path / "home"
    home.mkdir()
    file = out / place
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    monkeypatch.chdir(home if below == "the recipe" else tmp_path)
    recipe = (tmp_path if below == "the recipe" else home) / "recipe.yaml"
    evaluate = {"suite": "out/suite.yaml"} if place == "suite.yaml" else {"data": "out/items"}
    scored: dict[str, Any] = {"evaluate": {"suite": "nano", **evaluate}}
    if place == "score.py":
        scored = {"command": "python --script=out/score.py {checkpoint}"}
    recipe.write_text(json.dumps(pool.recipe("linear", repair=scored)))
    with pytest.raises(OutputError, match=r"holds an input, .*out/(suite|items|score)"):
        run_again(recipe, out, overwrite=True)
    assert file.exists()


def test_a_result_may_lie_beside_the_data(pool: PoolOnDisk, tmp_path: Path) -> None:
    """And a word that is also the name of a folder is none."""
    (tmp_path / "linear").mkdir()
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(pool.recipe("linear", capture={"folder": "."})))
    sigmerge.merge.plan(file, tmp_path / "linear", overwrite=True)


@pytest.mark.parametrize("which", ["reference", "math"])
def test_an_input_is_never_overwritten(pool: PoolOnDisk, which: str) -> None:
    before = weight_bytes(pool.root / which)
    with pytest.raises(OutputError, match="holds an input"):
        run_again(recipe_file(pool), pool.root / which, overwrite=True)
    assert weight_bytes(pool.root / which) == before


def test_a_second_run_is_locked_out(pool: PoolOnDisk, tmp_path: Path) -> None:
    layout = plan_layout([("x", "F32", (4,))], 10**6)
    with (
        Output(tmp_path / "out", layout, "job", overwrite=False),
        pytest.raises(OutputError, match="another run is writing it"),
    ):
        run_again(recipe_file(pool), tmp_path / "out")
    run_again(recipe_file(pool), tmp_path / "out")
    assert leftovers(tmp_path / "out") == []


def test_a_folder_behind_a_symlink_is_replaced_where_it_lies(
    pool: PoolOnDisk, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    real = old_folder(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(real)
    for _ in range(2):
        run_again(recipe_file(pool), link, overwrite=True)
        assert link.is_symlink()
        assert weight_bytes(real) == uninterrupted
    assert leftovers(real) == []


def test_a_path_below_a_file_says_so(pool: PoolOnDisk) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        run_again(recipe_file(pool), recipe_file(pool) / "out")
