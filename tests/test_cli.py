"""The command line: what it prints, what it returns, and that --dry-run tells the truth."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import sigmerge as package
from sigmerge.errors import RecipeError, SigmergeError
from sigmerge.operators.table import OPERATORS, operator
from tests.command_line import refused, sigmerge, tree
from tests.forks import command, forked
from tests.pools import PoolOnDisk, make_pool, weight_bytes


@pytest.fixture
def pool(tmp_path: Path) -> PoolOnDisk:
    return make_pool(tmp_path / "pool", layers=2, dtype="bf16", shards=(2, 1, 3, 1))


TIES = {"density": (0.5, 0.25, 0.75)}


def test_merge_in_words(pool: PoolOnDisk) -> None:
    ran = sigmerge("merge", pool.write(pool.recipe("linear")), pool.root / "out")
    assert ran.code == 0 and ran.err == ""
    first, second = ran.out.splitlines()
    assert first.startswith(f"{pool.root / 'out'}: ") and "written in" in first
    assert second.startswith("warning: ") and "not in the soup" in second


def test_merge_as_json(pool: PoolOnDisk) -> None:
    ran = sigmerge("merge", pool.write(pool.recipe("linear")), pool.root / "out", "--json")
    assert ran.code == 0 and ran.err == ""
    provenance = json.loads((pool.root / "out/sigmerge/provenance.json").read_text())
    plan = json.loads((pool.root / "out/sigmerge/plan.json").read_text())
    del provenance["checksum"]  # of the file
    assert ran.json == {"out": str(pool.root / "out"), "plan": plan, **provenance}


@pytest.mark.parametrize("size", ["5GB", "3KB"])
@pytest.mark.parametrize(
    ("method", "passes"),
    [("linear", 1), ("task_arithmetic", 1), ("ties", None), ("dare_linear", 2)],
)
def test_dry_run_is_true_and_writes_nothing(
    pool: PoolOnDisk, method: str, passes: int | None, size: str
) -> None:
    each: dict[str, Any] = TIES if method in ("ties", "dare_linear") else {}
    recipe = pool.write(pool.recipe(method, None, each=each))
    how = ("merge", recipe, pool.root / "out", "--max-shard-size", size, "--json")
    before = tree(pool.root)
    told = sigmerge(*how, "--dry-run")
    assert told.code == 0 and tree(pool.root) == before
    assert told.json["bytes_to_write"] == told.json["steps"][0]["bytes_to_write"]
    [plan] = told.json["steps"]
    done = sigmerge(*how).json
    files = sorted((pool.root / "out").glob("*.safetensors"))
    assert plan["files"] == [file.name for file in files]
    assert plan["bytes_to_write"] == sum(file.stat().st_size for file in files)
    assert plan["bytes_to_write"] == done["bytes_written"]
    read = done["bytes_read"] / plan["bytes_to_read"]
    # TIES reads all once for its thresholds, where entries are few, and once to merge; of long
    # tensors it reads a sample before, to guess.
    assert read == passes if passes else 2 <= read <= 4.25
    members = 3 if method == "linear" else 4
    stored = plan["coordinates"] * 2
    assert plan["bytes_to_read"] == members * stored
    assert (plan["layers"], plan["operator"]) == (2, method)
    assert plan["experts"] == {name: str(folder) for name, folder in pool.experts.items()}
    assert plan["settings"]["weight"] == {"math": 0.5, "coding": 0.25, "safety": 0.75}


def test_dry_run_in_words(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("ties", None, each=TIES)
    recipe["models"].insert(0, {"model": str(pool.reference)})
    ran = sigmerge("merge", pool.write(recipe), pool.root / "out", "--dry-run")
    assert ran.code == 0
    for word in ("ties of 3 experts, 2 layers", "reads", "writes", "memory", "density", "note: "):
        assert word in ran.out
    assert "  density: math 0.5, coding 0.25, safety 0.75" in ran.out
    assert "  normalize: true" in ran.out
    assert not set("{}[]'") & set(ran.out)


def test_settings_by_tensor_are_printed_in_words(pool: PoolOnDisk) -> None:
    weight = [{"filter": "mlp", "value": 0.5}, {"value": 1.0}]
    recipe = pool.recipe("linear", weight=[weight] * len(pool.experts))
    ran = sigmerge("merge", pool.write(recipe), pool.root / "out", "--dry-run")
    every = [", ".join(f"{name} {value}" for name in pool.experts) for value in (1.0, 0.5)]
    assert f"  weight: by tensor {every[0]} | {every[1]}" in ran.out


def test_a_wrong_keyword_or_recipe_in_python_is_named(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("linear")
    with pytest.raises(TypeError, match=r"^'thread' is no option; did you mean 'threads'\?$"):
        package.merge(recipe, pool.root / "out", thread=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^5 is no recipe; give a YAML file's path, a mapping"):
        package.merge(5, pool.root / "out")  # type: ignore[arg-type]
    with pytest.raises(RecipeError) as caught:
        package.merge({**recipe, "merge_method": "tise"}, pool.root / "out")
    assert "did you mean 'ties'" in str(caught.value) and "line" not in str(caught.value)
    assert not (pool.root / "out").exists()


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    told = []
    for layers in (1, 12):
        pool = make_pool(tmp_path / str(layers), layers=layers)
        recipe = pool.write(pool.recipe("ties"))
        ran = sigmerge("merge", recipe, tmp_path / "out", "--dry-run", "--json", "--threads", "2")
        told.append(ran.json["peak_memory_bytes"])
    assert told[0] == told[1]


def test_threads_seed_and_api_give_the_same_bytes(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("dare_ties", None, each=TIES)
    file = pool.write(recipe)
    sigmerge("merge", file, pool.root / "one", "--threads", "1", "--seed", "5")
    sigmerge("merge", file, pool.root / "two", "--threads", "3", "--seed", "5")
    package.merge(pool.write(recipe | {"seed": 5}, "seeded.yaml"), pool.root / "three")
    sigmerge("merge", file, pool.root / "other", "--seed", "6")
    shards = {
        name: {k: v for k, v in weight_bytes(pool.root / name).items() if "safetensors" in k}
        for name in ("one", "two", "three", "other")
    }
    assert shards["one"] == shards["two"] == shards["three"]
    assert shards["one"] != shards["other"]


def test_an_api_recipe_may_be_a_mapping(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("linear")
    assert package.merge(recipe, pool.root / "out").out == str(pool.root / "out")
    assert package.Recipe.from_mapping(recipe).method == "linear"
    with pytest.raises(AttributeError, match="has no attribute 'marge'"):
        _ = package.marge


def test_operators_lists_every_one_with_its_parameters() -> None:
    listed = sigmerge("operators", "--json").json["operators"]
    rows = [row for row in listed if row["name"] in OPERATORS]  # without those of other tests
    assert [row["name"] for row in rows] == list(OPERATORS)
    text = sigmerge("operators").out
    for row in rows:
        chosen = operator(row["name"])
        assert [p["name"] for p in row["parameters"]] == [p.name for p in chosen.parameters]
        assert row["paper"] == chosen.paper and re.search(r"\b(19|20)\d\d\b|^ours", chosen.paper)
        assert f"{chosen.name}  {chosen.title}" in text and chosen.paper in text
        for p in chosen.parameters:
            assert p.doc and f"    {p.name} (" in text


def test_operators_of_the_foundation_are_there() -> None:
    wanted = {"linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "lines", "cabs"}
    assert wanted <= set(OPERATORS)


def test_one_operator() -> None:
    ran = sigmerge("operators", "ties")
    assert ran.code == 0
    assert "scope (tensor|model; default tensor, preset: paper model)" in ran.out
    assert "density (float; per model; default 1.0, preset: paper 0.2)" in ran.out
    assert "DARE" not in ran.out


def test_an_unknown_operator(tmp_path: Path) -> None:
    assert "did you mean 'ties'?" in refused(2, "operators", "tise", beside=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["marge"], "No such command"),
        (["merge"], "Missing argument"),
        (["merge", "a", "b", "--treads", "2"], "No such option"),
        (["merge", "a", "b", "--threads", "-1"], "--threads"),
        (["merge", "a", "b", "--seed", "x"], "--seed"),
    ],
)
def test_wrong_usage_is_exit_code_two(arguments: list[str], words: str) -> None:
    ran = sigmerge(*arguments)
    assert ran.code == 2 and words in ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize("size", ["0", "-5", "5 gigs", "GB", "1e3"])
def test_a_size_that_is_none(pool: PoolOnDisk, size: str) -> None:
    recipe = pool.write(pool.recipe("linear"))
    arguments = ("merge", recipe, pool.root / "out", f"--max-shard-size={size}")
    assert "is not a size" in refused(2, *arguments, beside=pool.root)


@pytest.mark.parametrize("out", [".", "/", "~"])
def test_targets_that_are_no_new_folder(pool: PoolOnDisk, out: str) -> None:
    recipe = pool.write(pool.recipe("linear"))
    said = refused(4, "merge", recipe, out, "--overwrite", beside=pool.root)
    assert "choose a new folder" in said


def test_a_target_that_is_a_file(pool: PoolOnDisk) -> None:
    recipe = pool.write(pool.recipe("linear"))
    (pool.root / "out").write_text("mine")
    said = refused(4, "merge", recipe, pool.root / "out", "--overwrite", beside=pool.root)
    assert "is a file" in said
    said = refused(4, "merge", recipe, recipe, "--overwrite", beside=pool.root)
    assert "holds an input" in said


def test_dry_run_refuses_what_the_run_would(pool: PoolOnDisk) -> None:
    recipe = pool.write(pool.recipe("linear"))
    sigmerge("merge", recipe, pool.root / "out")
    arguments = ("merge", recipe, pool.root / "out", "--dry-run")
    assert "exists already" in refused(4, *arguments, beside=pool.root)
    inside = ("merge", recipe, pool.reference, "--dry-run", "--overwrite")
    assert "holds an input" in refused(4, *inside, beside=pool.root)


def test_the_installed_command(pool: PoolOnDisk) -> None:
    """Once as a user runs it: a process of its own, exit codes and streams and all."""
    recipe = pool.write(pool.recipe("linear"))
    command = [sys.executable, "-m", "sigmerge", "merge", str(recipe), str(pool.root / "out")]
    ran = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["out"] == str(pool.root / "out")
    again = subprocess.run(command, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (4, "")
    assert again.stderr.startswith("error: ") and "--overwrite" in again.stderr


# Help, version, and what never happens.

VERBS = [
    "merge",
    "capture",
    "profile",
    "deficits",
    "repair",
    "run",
    "search",
    "demo",
    "report",
    "verify",
    "operators",
    "evaluate",
    "aggregate",
    "tune",
    "suite",
    "analyze",
    "anchors",
    "init",
    "inspect",
    "diff",
    "extract",
    "moe",
    "tokens",
    "migrate",
    "try",
]
NESTED = [
    "splits build",
    "splits verify",
    "probe build",
    *(f"cache {n}" for n in ["list", "verify", "prune", "clear"]),
    *(f"pool {n}" for n in ["nano", "verify"]),
    "pool data",
    "pool train",
    "pool gguf",
]


def test_the_version() -> None:
    from importlib.metadata import version

    ran = sigmerge("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"sigmerge {version('sigmerge-llm')}\n", "")


def test_the_first_page_names_every_command_whole_and_every_exit_code() -> None:
    text = sigmerge("-h").out
    assert text == sigmerge("--help").out
    listed = text.partition("Merge:\n")[2].partition("Exit codes")[0]
    names = [line.split()[0] for line in listed.splitlines() if re.match("  [a-z]", line)]
    assert sorted(names) == sorted([*VERBS, "mergekit", "pool", "splits", "probe", "cache"])
    assert "..." not in listed
    codes = {error.exit_code for error in _kinds(SigmergeError)}
    assert all(f"\n    {code}  " in text for code in {0, 130, *codes})


def _kinds(base: type[SigmergeError]) -> list[type[SigmergeError]]:
    return [base, *(kind for below in base.__subclasses__() for kind in _kinds(below))]


@pytest.mark.parametrize("command", [*VERBS, *NESTED])
def test_every_command_has_a_purpose_and_an_example(command: str) -> None:
    ran = sigmerge(*command.split(), "-h")
    assert ran.code == 0
    assert f"    sigmerge {command}" in ran.out.partition("Example")[2]
    purpose = ran.out.splitlines()[2]
    assert purpose.startswith("  ") and "." in purpose  # a sentence that fits its line


def test_the_recipe_of_the_help_is_one(pool: PoolOnDisk) -> None:
    shown = sigmerge("merge", "-h").out.partition("A recipe:\n")[2]
    (pool.root / "recipe.yaml").write_text(textwrap.dedent(shown))
    assert sigmerge("merge", pool.root / "recipe.yaml", pool.root / "out").code == 0


def test_a_file_that_cannot_be_written_is_named(pool: PoolOnDisk) -> None:
    recipe = pool.write(pool.recipe("ties"))
    said = refused(4, "merge", recipe, pool.root / ("x" * 300), beside=pool.root)
    assert "File name too long" in said


def test_a_library_in_rust_that_gives_up_is_one_line(
    pool: PoolOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exceptions are none that `except Exception` catches."""
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def broken(*arguments: Any, **options: Any) -> None:
        raise panic("chunk size must be non-zero")

    monkeypatch.setattr("sigmerge.jobs.merge.MergeJob.run", broken)
    recipe = pool.write(pool.recipe("ties"))
    said = refused(3, "merge", recipe, pool.root / "out", beside=pool.root)
    assert "chunk size must be non-zero" in said and "tokenizer.json is damaged" in said


def test_a_fault_of_ours_is_one_line_unless_asked_for(
    pool: PoolOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise KeyError("of ours")

    monkeypatch.setattr("sigmerge.jobs.merge.MergeJob.run", broken)
    recipe = pool.write(pool.recipe("ties"))
    said = refused(1, "merge", recipe, pool.root / "out", beside=pool.root)
    assert "KeyError: 'of ours'" in said and "fault of sigmerge" in said
    with pytest.raises(KeyError):
        sigmerge("merge", recipe, pool.root / "out", "-v")


@pytest.mark.parametrize(("stream", "method", "code"), [("stdout", "ties", 0), ("stderr", "no", 2)])
def test_a_reader_that_left_changes_no_exit_code(
    pool: PoolOnDisk, stream: str, method: str, code: int
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writing}
    recipe = pool.write(pool.recipe(method))
    command = [sys.executable, "-m", "sigmerge", "merge", recipe, pool.root / "out"]
    ran = subprocess.run(command, **both)
    os.close(writing)
    assert (ran.returncode, ran.stdout or b"", ran.stderr or b"") == (code, b"", b"")
    assert (pool.root / "out/config.json").exists() == (code == 0)


def test_a_reader_that_left_does_not_hide_what_was_found(pool: PoolOnDisk) -> None:
    sigmerge("merge", pool.write(pool.recipe("linear")), pool.root / "out")
    (pool.root / "out/extra.py").write_text("")
    reading, writing = os.pipe()
    os.close(reading)

    def work() -> None:
        os.dup2(writing, 1)
        command("verify", pool.root / "out")

    ran = forked(work)
    os.close(writing)
    assert (ran.code, ran.err) == (sigmerge("verify", pool.root / "out").code, "")


def test_a_broken_pipe_that_is_no_stream_is_told(
    pool: PoolOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("sigmerge.jobs.merge.MergeJob.run", broken)
    recipe = pool.write(pool.recipe("ties"))
    said = refused(1, "merge", recipe, pool.root / "out", beside=pool.root)
    assert "a pipe to another process broke" in said


def test_closed_streams_stop_nothing_and_no_file_gets_their_numbers(pool: PoolOnDisk) -> None:
    recipe, out = pool.write(pool.recipe("linear")), pool.root / "out"
    code = f"""
import atexit, os, sys
from sigmerge.cli import main
numbers = [f"/proc/self/fd/{{number}}" for number in range(3)]
told = lambda: open({str(pool.root / "told")!r}, "w").write(" ".join(map(os.readlink, numbers)))
atexit.register(told)
sys.argv = ["sigmerge", "merge", {str(recipe)!r}, {str(out)!r}]
main()
"""
    closed = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", sys.executable, "-c", code]
    assert subprocess.run(closed).returncode == 0
    assert (pool.root / "told").read_text() == "/dev/null /dev/null /dev/null"
    assert sigmerge("verify", out).code == 0


def test_a_repair_by_given_shares_prints_them(pool: PoolOnDisk) -> None:
    repair = {"shares": {"math": 0.6, "coding": 0.4}, "capacity": 0.2}
    recipe = pool.recipe("task_arithmetic", repair=repair)
    recipe["models"] = recipe["models"][:2]
    ran = sigmerge("merge", pool.write(recipe), pool.root / "shared")
    assert ran.code == 0 and "math: share 0.600," in ran.out


def test_json_has_errors_too(pool: PoolOnDisk) -> None:
    file = pool.write(pool.recipe("linear") | {"merge_method": "liner"})
    ran = sigmerge("merge", file, pool.root / "out", "--json")
    assert ran.code == 2 and ran.json["error"]["exit_code"] == 2
    assert "did you mean 'linear'" in ran.json["error"]["message"]
    assert ran.err == f"error: {ran.json['error']['message']}\n"
    ran = sigmerge("merge", file, pool.root / "out", "--variant", "none", "--json")
    assert ran.code == 2 and "'--variant'" in ran.json["error"]["message"]


def test_quiet_prints_problems_alone(pool: PoolOnDisk) -> None:
    file = pool.write(pool.recipe("linear"))
    ran = sigmerge("merge", file, pool.root / "out", "--quiet")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    again = sigmerge("merge", file, pool.root / "out", "-q")
    assert again.code == 4 and again.err.startswith("error: ") and again.out == ""


def test_every_result_has_a_page(pool: PoolOnDisk) -> None:
    recipe, out = pool.recipe("ties"), pool.root / "out"
    sigmerge("merge", pool.write(recipe), out)
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    assert sigmerge("report", out).out == f"page: {out}/sigmerge/report.html\n"
    assert "ties" in (out / "sigmerge/report.html").read_text()
    assert all(file.read_bytes() == content for file, content in before.items())
    assert sigmerge("verify", out).code == 0
    assert "no records of a run" in refused(4, "report", pool.reference, beside=pool.root)


def test_verbose_says_what_the_cache_has(pool: PoolOnDisk, own_cache: Path) -> None:
    recipe = pool.recipe("linear") | {"repair": {"variant": "view_sign"}}
    file = pool.write(recipe)
    assert "cache: signature" in (first := sigmerge("profile", file, "-v").err)
    assert "is made" in first and "is found" not in first
    assert "is found" in (again := sigmerge("profile", file, "-v").err) and "is made" not in again
    assert "cache:" not in sigmerge("profile", file).err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell: str) -> None:
    ran = sigmerge("--completion", shell)
    assert ran.code == 0 and "_SIGMERGE_COMPLETE" in ran.out


def test_completion_knows_commands_and_options() -> None:
    def completed(*words: str) -> list[str]:
        line = ["sigmerge", *words]
        asked = {"COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1)}
        ran = subprocess.run(
            [sys.executable, "-c", "from sigmerge.cli import main; main()"],
            env={**os.environ, **asked, "_SIGMERGE_COMPLETE": "bash_complete"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return [each.partition(",")[2] for each in ran.stdout.split()]

    assert completed("me") == ["merge", "mergekit"]
    assert completed("merge", "--thr") == ["--threads"]
    assert completed("merge", "--device", "c") == ["cpu", "cuda"]


def test_the_demo_names_the_one_extra_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("torch", "jinja2"):
        monkeypatch.setitem(sys.modules, library, None)
    said = refused(6, "demo", tmp_path / "out", beside=tmp_path)
    assert "torch and jinja2" in said and "'sigmerge-llm[demo]'" in said
