"""Where scores come from, what is remembered, and how wrong ones are refused."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import sigmerge
from sigmerge.engine.machine import Meter
from sigmerge.errors import PoolError, RecipeError, ScoreError
from sigmerge.evaluation.command_line import named_files, run_command, scored_by_command
from sigmerge.evaluation.scored_by import ScoredBy
from sigmerge.jobs.merge import MergeJob
from sigmerge.jobs.options import Options
from sigmerge.jobs.scores import (
    CheckpointScorer,
    MeasuredScores,
    callable_scorer,
    harness_scores,
    printed_scores,
    read_scores,
    scorer_of,
)
from sigmerge.kept import Derivation, Inputs
from sigmerge.nano.files import POOL
from sigmerge.recipe import load_recipe
from sigmerge.recipe.scored import RepairSection
from tests.kept_entries import kept_values
from tests.pools import PoolOnDisk, make_pool

DOMAINS = ("math", "coding", "safety")
GOOD: dict[str, Any] = {
    "experts": {e: {d: 0.9 if d == e else 0.4 for d in DOMAINS} for e in DOMAINS},
    "anchor": {"math": 0.5, "coding": 0.8, "safety": 0.9},
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("scores"), layers=2)


def deficits(pool: PoolOnDisk, scores: Any, **repair: Any) -> dict[str, Any]:
    (pool.root / "scores.json").write_text(json.dumps(scores))
    recipe = pool.recipe("task_arithmetic", repair={"scores": "scores.json", **repair})
    return sigmerge.deficits(pool.write(recipe))


def test_deficits_and_shares_of_a_score_file(pool: PoolOnDisk) -> None:
    found = deficits(pool, GOOD)
    assert found.as_json()["deficit"] == pytest.approx({"math": 0.4, "coding": 0.1, "safety": 0.0})
    assert found.as_json()["share"] == pytest.approx({"math": 0.8, "coding": 0.2, "safety": 0.0})


def test_own_reference_asks_only_for_own_scores(pool: PoolOnDisk) -> None:
    own = {"experts": {d: {d: 0.9} for d in DOMAINS}, "anchor": GOOD["anchor"]}
    assert deficits(pool, own, reference="own").as_json()["deficit"]["math"] == pytest.approx(0.4)
    with pytest.raises(ScoreError, match=r"experts\.math\.coding: missing"):
        deficits(pool, own)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"anchor": {"math": 0.5, "coding": 0.8}}, r"anchor\.safety: missing"),
        ({"anchor": {**GOOD["anchor"], "law": 0.1}}, r"anchor\.law: unknown domain"),
        ({"anchor": {**GOOD["anchor"], "math": float("nan")}}, r"anchor\.math: nan is not"),
        ({"anchor": {**GOOD["anchor"], "math": 50.0}}, r"50 looks like percent.*fractions"),
        ({"anchor": {**GOOD["anchor"], "math": "high"}}, r"'high' is not a number"),
        ({"anchor": {**GOOD["anchor"], "math": 10**400}}, r"math: 1000\d{,96} is not a number"),
        ({"experts": {"math": GOOD["experts"]["math"]}}, r"experts\.coding: missing"),
        ({"experts": {"math": 0.5}}, r"experts\.math is not a mapping"),
        ({"anchor": None}, r"anchor missing"),
    ],
)
def test_wrong_score_files(pool: PoolOnDisk, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScoreError, match=message):
        deficits(pool, {**GOOD, **change})


def test_all_problems_of_a_table_are_told_at_once(pool: PoolOnDisk) -> None:
    wrong = {"experts": GOOD["experts"], "anchor": {"math": 50, "law": 0.1}}
    with pytest.raises(ScoreError) as caught:
        deficits(pool, wrong)
    assert len(caught.value.problems) == 4  # percent, unknown law, coding and safety missing


def test_result_files_of_the_harness(tmp_path: Path) -> None:
    def results(gsm: float, he: float, mbpp: float) -> dict[str, Any]:
        return {
            "results": {
                "gsm8k_cot": {"exact_match,flexible-extract": gsm, "alias": "x"},
                "humaneval": {"pass@1,none": he},
                "mbpp": {"pass@1,none": mbpp},
            }
        }

    for name, values in {"m": (0.8, 0.2, 0.4), "c": (0.1, 0.6, 0.8), "a": (0.5, 0.3, 0.3)}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(results(*values)))
    domains = {
        "math": "gsm8k_cot/exact_match,flexible-extract",
        "coding": ["humaneval/pass@1,none", "mbpp/pass@1,none"],
    }
    given = {"experts": {"math": "m.json", "coding": "c.json"}, "anchor": "a.json"}
    table = read_scores({**given, "domains": domains}, tmp_path)
    assert table.experts["math"] == pytest.approx({"math": 0.8, "coding": 0.3})
    assert table.experts["coding"] == pytest.approx({"math": 0.1, "coding": 0.7})
    assert table.anchor == pytest.approx({"math": 0.5, "coding": 0.3})
    with pytest.raises(ScoreError, match="gsm8k/acc is not in it"):
        harness_scores(results(1, 1, 1), {"math": "gsm8k/acc"}, "m.json")
    with pytest.raises(ValueError, match="domains cannot be used"):
        RepairSection(scores=given)


def test_a_command_prints_its_scores_on_the_last_line(tmp_path: Path) -> None:
    script = tmp_path / "score.py"
    script.write_text("import sys\nprint('loading', sys.argv[1])\nprint('{\"math\": 0.25}')\n")
    command = f"{sys.executable} score.py {{checkpoint}}"

    def scores(line: str) -> dict[str, float]:
        lines = run_command(line, {"checkpoint": tmp_path}, tmp_path, "repair.command")
        return printed_scores(lines, "repair.command", Meter()).scores

    assert scores(command) == {"math": 0.25}
    script.write_text("import sys\nsys.exit('no GPU here')\n")
    with pytest.raises(ScoreError, match=r"exit code 1.*\n.*no GPU here"):
        scores(command)
    script.write_text("print('half')\n")
    with pytest.raises(ScoreError, match="JSON object of domain scores, not 'half'"):
        scores(command)
    with pytest.raises(ScoreError, match="cannot be run"):
        scores("no-such-program {checkpoint}")


def counted(
    measure: Callable[[Path], dict[str, float]], by: Callable[[], ScoredBy | None], **more: Any
) -> CheckpointScorer:
    """A scorer whose scores are kept by what it is given."""

    def measured(folder: Path) -> MeasuredScores:
        return MeasuredScores(measure(folder), seconds=1.0)

    return CheckpointScorer("counted", measured, lambda _: by(), keeps=True, **more)


@pytest.mark.usefixtures("own_cache")
def test_a_checkpoint_is_scored_once_until_it_changes(tmp_path: Path) -> None:
    pool = make_pool(tmp_path, layers=1)
    seen: list[str] = []

    def measure(folder: Path) -> dict[str, float]:
        seen.append(folder.name)
        return {"math": 0.5}

    scorer = counted(measure, lambda: ScoredBy({"program": 1}))
    first, second = list(pool.experts.values())[:2]
    assert scorer(first).scores == scorer(first).scores == {"math": 0.5}
    assert seen == [first.name]
    scorer(second)
    counted(measure, lambda: ScoredBy({"program": 2}))(first)
    assert seen == [first.name, second.name, first.name]
    (first / "model.safetensors").write_bytes((second / "model.safetensors").read_bytes())
    scorer(first)  # now the same content as `second`, which is known
    assert len(seen) == 3
    (first / "modeling_own.py").write_text("# code of its own")
    scorer(first)
    assert len(seen) == 4


@pytest.mark.usefixtures("own_cache")
def test_what_scores_sees_the_declared_files_and_may_write_beside_them(tmp_path: Path) -> None:
    folder = make_pool(tmp_path, layers=1).reference
    (folder / "notes").mkdir()
    (folder / "answers.csv").write_text("the right ones")

    def measure(shown: Path) -> dict[str, float]:
        found = {file.name for file in shown.iterdir()}
        assert found == {"config.json", "generation_config.json", "model.safetensors"}
        (shown / "results.json").write_text("{}")
        return {"math": 0.5}

    before = sorted(folder.iterdir())
    assert counted(measure, ScoredBy)(folder).scores == {"math": 0.5}
    assert sorted(folder.iterdir()) == before


@pytest.mark.usefixtures("own_cache")
def test_scores_of_what_changed_meanwhile_are_not_kept(tmp_path: Path) -> None:
    """A command that writes a file that it names, and a callable that changes itself."""
    folder, script = make_pool(tmp_path, layers=1).reference, tmp_path / "script.py"
    script.write_text("older")
    found = [0.5, 0.25]

    def rewrites(_: Path) -> dict[str, float]:
        script.write_text("newer")
        return {"math": found.pop(0)}

    scorer = counted(rewrites, lambda: ScoredBy(files={"0": script}))
    assert scorer(folder).scores == {"math": 0.5}
    script.write_text("older")
    assert scorer(folder).scores == {"math": 0.25}

    class Counts:
        asked = 0

        def __call__(self, _: Path) -> dict[str, float]:
            self.asked += 1
            return {"math": 1 / self.asked}

    counts = callable_scorer(Counts())
    assert [counts(folder).scores["math"] for _ in range(3)] == [1, 1 / 2, 1 / 3]
    assert callable_scorer(Counts())(folder).scores == {"math": 1}


@pytest.mark.usefixtures("own_cache")
def test_a_callable_is_known_by_what_it_is(tmp_path: Path) -> None:
    folder, data = make_pool(tmp_path, layers=1).reference, tmp_path / "items.txt"
    data.write_text("1")

    def made(value: float) -> CheckpointScorer:
        return callable_scorer(lambda f: {"math": value} if str(data) else {})

    assert made(0.5)(folder).scores == made(0.5)(folder).scores == {"math": 0.5}
    assert len(kept_values("score")) == 1
    assert made(0.25)(folder).scores == {"math": 0.25}
    assert len(kept_values("score")) == 2
    data.write_text("2")
    made(0.5)(folder)
    assert len(kept_values("score")) == 3


@pytest.mark.usefixtures("own_cache")
def test_nothing_is_kept_of_a_callable_that_nothing_describes(tmp_path: Path) -> None:
    folder, handle = make_pool(tmp_path, layers=1).reference, object()
    scorer = callable_scorer(lambda f: {"math": 0.5} if handle else {})
    assert scorer(folder).scores == {"math": 0.5}
    assert not kept_values("score")


@pytest.mark.parametrize("reference", ["own", "strongest"])
def test_an_expert_needs_its_own_score_only_where_no_other_is_read(
    pool: PoolOnDisk, reference: str
) -> None:
    given = {"command": "true {checkpoint}", "reference": reference}
    scorer = scorer_of(load_recipe(pool.recipe("linear", repair=given)), Options())
    assert scorer is not None and scorer.usable({"math": 0.5}) == (reference == "own")
    assert scorer.usable(dict.fromkeys(pool.experts, 0.5))


@pytest.mark.usefixtures("own_cache")
def test_scores_of_a_checkpoint_that_changed_meanwhile_are_not_kept(tmp_path: Path) -> None:
    pool = make_pool(tmp_path, layers=1)
    first, second = (folder / "model.safetensors" for folder in list(pool.experts.values())[:2])
    older = first.read_bytes()

    def measure(folder: Path) -> dict[str, float]:
        first.write_bytes(second.read_bytes())
        return {"math": 0.5}

    with pytest.raises(PoolError, match="changed while it was read"):
        counted(measure, ScoredBy)(first.parent)
    first.write_bytes(older)
    assert counted(lambda _: {"math": 0.25}, ScoredBy)(first.parent).scores == {"math": 0.25}


@pytest.mark.parametrize(
    "verb", ["deficits", "repair", "run", "tune", "anchors", "merge", "guide", "describe"]
)
def test_a_suite_of_other_domains_is_told_before_anything_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    models = [{"model": str(POOL / name), "name": name} for name in ("math", "coding")]
    scored = {"evaluate": {"suite": "nano"}}
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(POOL / "reference"),
        "models": models,
        "parameters": {"weight": 0.4},
        "guide" if verb == "guide" else "repair": scored,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    file, out, anchor = tmp_path / "recipe.yaml", tmp_path / "out", POOL / "reference"
    call = {
        "deficits": lambda: sigmerge.deficits(file, anchor=anchor),
        "repair": lambda: sigmerge.repair(file, out, anchor=anchor),
        "anchors": lambda: sigmerge.anchors(file),
        "guide": lambda: sigmerge.merge(file, out),
        "describe": lambda: sigmerge.deficits.plan(file, anchor=anchor),
    }.get(verb, lambda: getattr(sigmerge, verb)(file, out))
    with pytest.raises(ScoreError, match="differ in their domains") as error:
        call()
    assert "safety: no expert has this name" in error.value.problems
    assert not out.exists() and not (tmp_path / "cache/evaluation").exists()


@pytest.mark.usefixtures("own_cache")
def test_scores_of_no_use_are_measured_again(
    pool: PoolOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that printed them once may have been mended in what it does not name."""
    printed = [{"math": -1.0}, {"math": float("nan")}, {"law": 0.5}, {}]
    good = {"math": 0.5, "coding": 0.5, "safety": 0.5}
    lines = iter([json.dumps({**good, **one}) for one in printed[:3]] + ["{}"])
    monkeypatch.setattr("sigmerge.jobs.scores.run_command", lambda *_: [next(lines)])
    recipe = load_recipe(pool.recipe("linear", repair={"command": "true {checkpoint}"}))
    scorer = scorer_of(recipe, Options(threads=1))
    assert scorer is not None
    for _ in printed:
        assert scorer(pool.reference).scores != good
    lines = iter([json.dumps(good)])
    assert scorer(pool.reference).scores == scorer(pool.reference).scores == good


def test_a_guide_writes_down_no_scores_of_no_use(pool: PoolOnDisk, tmp_path: Path) -> None:
    """Else every further run of the same command would fail by them."""
    scores = iter([1.5, *[0.5] * 20])

    def score(_: Path) -> dict[str, float]:
        return dict.fromkeys(pool.experts, next(scores))

    content = pool.recipe("linear", guide={"calls": 2})
    for _ in range(2):
        with contextlib.suppress(ScoreError):
            job = MergeJob(load_recipe(content), tmp_path / "out", Options(threads=1), score)
            made = job.run()
    assert made.plan.guided


def test_files_of_a_command_that_are_exchanged_are_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    named = named_files("score --seen=a b {checkpoint}", tmp_path, "command")
    assert named == [tmp_path / "a", tmp_path / "b"]


@pytest.mark.parametrize("line", ["python score.py {checkpoint}", "python -m score {checkpoint}"])
def test_what_a_command_imports_beside_itself_is_among_its_files(line: str, tmp_path: Path) -> None:
    """Through others, from packages, and also what is no Python any more."""
    for name, text in {
        "score.py": "import json\ndef f():\n    from inner import deep\nimport helper, numpy\n",
        "helper.py": "from inner.more import x\nthis is no Python",
        "inner/__init__.py": "",
        "inner/deep.py": "from . import near\nfrom ..helper import y\n",
        "inner/near.py": "import score\n",
        "inner/more.py": "",
        "json.py/a folder": "",
        "other.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    named = named_files(line, tmp_path, "command")
    found = {f.relative_to(tmp_path).as_posix() for f in named if f.is_relative_to(tmp_path)}
    assert found == {"score.py", "helper.py", "inner/__init__.py", "inner/deep.py", "inner/near.py"}


def test_what_lies_on_pythonpath_is_among_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("score.py", "elsewhere/helper.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import helper\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    for line in ("python score.py {checkpoint}", "python -m helper {checkpoint}"):
        assert tmp_path / "elsewhere/helper.py" in named_files(line, tmp_path, "command")


def test_a_folder_that_a_command_names_is_what_lies_in_it(tmp_path: Path) -> None:
    inside = [tmp_path / "data" / name for name in ("a.jsonl", "deep/b.jsonl")]
    for file in [*inside, tmp_path / "data/.git/index", tmp_path / "data/__pycache__/c.pyc"]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    run_in = tmp_path / "recipes"
    run_in.mkdir()
    for line in ("score --data=../data {checkpoint}", f"score {tmp_path}/data {{checkpoint}}"):
        assert [file.resolve() for file in named_files(line, run_in, "command")] == inside
    for around in (".", "..", str(tmp_path)):  # where the command's own results lie
        assert named_files(f"score {around} {{checkpoint}}", run_in, "command") == []


def test_variables_that_a_command_names_decide_its_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "score.py").write_text("import os\nprint(os.environ['JUDGE'])\nPWD = 1\n")
    (tmp_path / "data.bin").write_bytes(b"OF_DATA \0")

    def named(line: str) -> dict[str, str]:
        found: dict[str, str] = scored_by_command(line, tmp_path, "command").settings["environment"]
        return found

    for name in ("JUDGE", "TOKEN", "OF_DATA", "UNNAMED"):
        monkeypatch.setenv(name, "secret")
    before = named("sh -c '$TOKEN score.py' score.py data.bin {checkpoint}")
    assert {*before} == {"JUDGE", "TOKEN"} and "secret" not in str(before)
    monkeypatch.setenv("JUDGE", "another")
    after = named("sh -c '$TOKEN score.py' score.py data.bin {checkpoint}")
    assert before["JUDGE"] != after["JUDGE"] and before["TOKEN"] == after["TOKEN"]
    monkeypatch.delenv("JUDGE")
    assert "JUDGE" not in named("python score.py {checkpoint}")


def test_libraries_of_a_commands_python_are_in_its_key(tmp_path: Path) -> None:
    """Of the Python of a script's first line, of the program, or of this process."""
    place = tmp_path / "venv/lib/python3.11/site-packages"
    python = tmp_path / "venv/bin/python"
    for name in ("transformers-1.0", "my_judge-2.0", "other-3.0"):
        (place / f"{name}.dist-info").mkdir(parents=True)
        about = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n".format(*name.split("-"))
        (place / f"{name}.dist-info/METADATA").write_text(about)
    (python.parent).mkdir()
    (tmp_path / "score.py").write_text("import json\nfrom my_judge.more import judged\n")
    for program, first in ((python, ""), (tmp_path / "tool", f"#!{python}\nimport my_judge\n")):
        program.write_text(first)
        program.chmod(0o755)
        line = f"{program} score.py {{checkpoint}}"
        by = scored_by_command(line, tmp_path, "command")
        assert by.libraries == (f"my_judge @ {place}", f"transformers @ {place}")
        runtime = Derivation("score", scored_by_command, Inputs({}), {}, by.libraries).runtime
        assert [*runtime.values()] == ["2.0", "1.0"]
    own = scored_by_command("sh score.sh {checkpoint}", tmp_path, "command")
    assert "transformers" in own.libraries


def test_a_program_of_the_path_is_among_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A score of the user's own that lies in a folder of programs."""
    program = tmp_path / "bin/my-score"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert named_files("my-score {checkpoint}", tmp_path, "command") == [program]
    assert named_files("bin/my-score {checkpoint}", tmp_path, "command") == [program]


def test_a_command_whose_helper_changed_is_run_again(pool: PoolOnDisk, tmp_path: Path) -> None:
    """Found by an attack: the deficits were those of before, with exit code 0."""
    (tmp_path / "grade.py").write_text(
        "from numbers_of import Q\nimport json\nprint(json.dumps(Q))"
    )
    found = []
    for score in (0.25, 0.5):
        scores = dict.fromkeys(pool.experts, score)
        (tmp_path / "numbers_of.py").write_text(f"Q = {scores}\n")
        command = f"{sys.executable} -B {tmp_path / 'grade.py'} {{checkpoint}}"
        recipe = pool.recipe("task_arithmetic", repair={"command": command})
        made = sigmerge.deficits(recipe, anchor=pool.reference)
        found.append(made.anchor)
    assert found == [dict.fromkeys(pool.experts, score) for score in (0.25, 0.5)]


def test_two_sources_of_scores_are_one_too_many(pool: PoolOnDisk) -> None:
    repair = {"scores": "scores.json", "command": "true"}
    with pytest.raises(RecipeError, match="one of scores, command and evaluate"):
        sigmerge.deficits(pool.recipe("task_arithmetic", repair=repair))
    with pytest.raises(ScoreError, match="needs scores"):
        sigmerge.deficits(pool.recipe("task_arithmetic", repair={}))
