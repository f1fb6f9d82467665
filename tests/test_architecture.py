"""Which room may import which (docs/architecture.md). Imports inside functions count too."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import sigmerge
from sigmerge.errors import DISTRIBUTION, MissingExtra, require

ROOT = Path(sigmerge.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(file: Path, *, top_level: bool = False) -> Iterator[str]:
    """Dotted names of all modules a file imports; `from a import b` gives a and a.b."""
    tree = parsed(file)
    package = ["sigmerge", *file.relative_to(ROOT).parts[:-1]]
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def room(name: str) -> list[Path]:
    files = [file for file in FILES if file.relative_to(ROOT).parts[0] == name]
    assert files, f"no room called {name}"
    return files


def offences(files: list[Path], forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imports(file)
        if within(name, forbidden)
    ]


@pytest.mark.parametrize("name", ["method", "operators"])
def test_the_maths_knows_no_paths_devices_or_yaml(name: str) -> None:
    forbidden = (
        "pathlib",
        "os",
        "yaml",
        "torch",
        "safetensors",
        "transformers",
        "pydantic",
        "sigmerge.checkpoints",
        "sigmerge.engine",
        "sigmerge.jobs",
        "sigmerge.recipe",
        "sigmerge.cli",
    )
    assert offences(room(name), forbidden) == []


def strangers(name: str, *known: str) -> list[str]:
    """Imports of a room from outside itself, the standard library and what it is known to use."""
    allowed = (*sys.stdlib_module_names, "numpy", f"sigmerge.{name}", *known)
    return [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in room(name)
        for module in imports(file)
        if module != "sigmerge" and not within(module, allowed)
    ]


def test_the_core_knows_numbers_only() -> None:
    assert strangers("core", "sigmerge._native") == []


def test_the_gpu_knows_numbers_and_its_two_libraries() -> None:
    assert strangers("gpu", "sigmerge._native", "sigmerge.core", "torch", "triton") == []
    assert offences([file for file in FILES if "gpu" not in file.parts], ("triton",)) == []


def test_the_engine_knows_no_paper() -> None:
    ours = ("_native", "core", "gpu", "operators.base", "engine", "errors", "files.opened")
    allowed = tuple(f"sigmerge.{name}" for name in ours)
    strangers = [
        f"{file.name} imports {name}"
        for file in room("engine")
        for name in imports(file)
        if within(name, ("yaml",)) or (within(name, ("sigmerge",)) and not within(name, allowed))
    ]
    assert strangers == []


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("safetensors", ("checkpoints",)),
        ("huggingface_hub", ("checkpoints",)),
        ("transformers", ("probing", "nano", "lab", "checkpoints/gguf.py")),
        ("gguf", ("lab", "checkpoints/gguf.py")),
        ("lm_eval", ("evaluation",)),
    ],
)
def test_a_library_has_its_own_rooms(library: str, rooms: tuple[str, ...]) -> None:
    owned = tuple(room if room.endswith(".py") else f"{room}/" for room in rooms)
    others = [file for file in FILES if not file.relative_to(ROOT).as_posix().startswith(owned)]
    assert offences(others, (library,)) == []


def test_checkpoints_know_no_paper() -> None:
    forbidden = ("sigmerge.method", "sigmerge.operators", "sigmerge.jobs", "sigmerge.recipe")
    assert offences(room("checkpoints"), forbidden) == []


def test_the_command_line_knows_no_maths() -> None:
    files = room("cli")
    assert offences(files, ("numpy", "torch")) == []
    allowed = (
        *sys.stdlib_module_names,
        "click",
        "sigmerge.errors",
        "sigmerge.messages",
        "sigmerge.cli",
    )
    at_once = {name for file in files for name in imports(file, top_level=True)} - {"sigmerge"}
    assert [name for name in sorted(at_once) if not within(name, allowed)] == []


MAY_OPEN_THE_CACHE = {
    "kept.py": "derivations: everything that is made",
    "files/cache.py": "where it lies",
    "files/digests.py": "the digests that keys are made of",
    "files/objects.py": "stubs of remote files, by the version that the store names",
    "checkpoints/remote.py": "the same, and results on their way to a store",
    "cli/main.py": "names its place before anything is imported",
}


def test_modules_are_imported_by_name_from_two_tables() -> None:
    """The digest of code follows import statements and tables of "module:class", and no more."""
    dynamic = ("importlib.import_module",)
    found = {f for f in FILES for name in imports(f) if within(name, dynamic)}
    tables = {"operators/table.py", "evaluation/harness_table.py", "__init__.py"}
    assert {file.relative_to(ROOT).as_posix() for file in found} == tables


def test_only_one_memory_opens_the_cache() -> None:
    """What is kept between runs goes through `kept`; all else here has another reason."""
    functions = "cache_place|cache_folder|keep_json|kept_json|write_note"
    opens = {
        file.relative_to(ROOT).as_posix()
        for file in FILES
        if re.search(rf"\b({functions})\(|\"\.sigmerge\"|SIGMERGE_CACHE\"", file.read_text())
    }
    assert opens == set(MAY_OPEN_THE_CACHE)


def module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(["sigmerge", *(part for part in parts if part != "__init__")])


MODULES = {module(file): file for file in FILES}


@cache
def file_graph() -> dict[str, set[str]]:
    """Which file imports which. `from room import file` is an import of the file."""
    graph = {}
    for name, file in MODULES.items():
        found = {other for other in imports(file) if other in MODULES} - {name, "sigmerge"}
        rooms = {other.rpartition(".")[0] for other in found}
        graph[name] = found - rooms
    return graph


def room_of(name: str) -> str:
    """The room of a file; a file of the top folder is a room of its own."""
    return name.split(".")[1] if "." in name else name


def folder_of(name: str) -> str:
    """The folder of a file, however deep; a file of the top folder stands for itself."""
    folder = MODULES[name].parent
    return name if folder == ROOT else folder.relative_to(ROOT).as_posix()


def folder_graph(home: Callable[[str], str]) -> dict[str, set[str]]:
    """Which folder imports which."""
    graph: dict[str, set[str]] = {}
    for name, others in file_graph().items():
        graph.setdefault(home(name), set()).update(map(home, others))
    return {name: others - {name, "sigmerge"} for name, others in graph.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += graph.get(node, ())
        return seen

    far = {node: reach(node) for node in graph}
    return sorted(
        {tuple(sorted(m for m in far[n] if n in far.get(m, ()))) for n in graph if n in far[n]}
    )  # type: ignore[return-value]


def test_no_circles_among_files() -> None:
    assert circles(file_graph()) == []


@pytest.mark.parametrize("home", [room_of, folder_of])
def test_no_circles_among_folders(home: Callable[[str], str]) -> None:
    """Neither among rooms nor between a folder and one inside it."""
    assert circles(folder_graph(home)) == []


def test_folders_inside_rooms_are_seen() -> None:
    graph = folder_graph(folder_of)
    assert "evaluation" in graph["evaluation/harnesses"]
    assert "lab/experiments" in graph


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert circles(graph) == [("a", "b", "c")]
    assert "sigmerge.jobs.options" in file_graph()["sigmerge.jobs.pools"]


JOBS = (
    "options", "steps", "work_folder", "pools", "scores", "capture", "signatures", "profile",
    "dense", "emulated", "sampled", "foreign", "occupancy", "fixed_repair", "candidates", "search",
    "strategies", "calls", "guide", "anchor", "calibrate", "repair", "replay", "adapter", "merge",
    "multi_recipe", "migration", "moe", "tokens", "tune", "report", "run", "demo", "verify", "hub",
    "extract", "inspect", "trial",
)  # fmt: skip
"""A job imports only jobs above it; the files that are not listed import none of the roads."""


def test_every_job_is_listed_or_stands_alone() -> None:
    alone = {"aggregate", "cache", "evaluate", "probe", "splits"}
    assert {file.stem for file in room("jobs")} - {"__init__"} == {*JOBS, *alone}
    for name in alone:
        others = file_graph()[f"sigmerge.jobs.{name}"] & {f"sigmerge.jobs.{job}" for job in JOBS}
        assert others <= {"sigmerge.jobs.options", "sigmerge.jobs.steps"}, name


def test_jobs_import_only_what_is_above_them() -> None:
    upward = [
        f"{name} imports {other}"
        for position, name in enumerate(JOBS)
        for other in file_graph()[f"sigmerge.jobs.{name}"]
        if other.startswith("sigmerge.jobs.") and other.rpartition(".")[2] not in JOBS[:position]
    ]
    assert upward == []


def names(file: Path) -> set[str]:
    """Public classes and constants that a file defines at its top level."""
    found: set[str] = set()
    for node in parsed(file).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            found |= {part.id for part in parts if isinstance(part, ast.Name)}
    return {name for name in found if name[0].isupper()}


def test_a_noun_means_one_thing() -> None:
    """No two files define a public class or constant of one name."""
    homes: dict[str, list[str]] = {}
    for name, file in MODULES.items():
        for noun in names(file):
            homes.setdefault(noun, []).append(name)
    assert homes.pop("Recipe") == ["sigmerge.objects", "sigmerge.recipe.record"]  # extends it
    assert {noun: found for noun, found in homes.items() if found[1:]} == {}
    assert homes["TILE"] == ["sigmerge.core"] and homes["Plan"] == ["sigmerge.objects"]
    assert homes["PROVENANCE"] == ["sigmerge.records"]  # assigned in a tuple


LONGEST = 60


def test_a_function_is_a_screen_long_at_most() -> None:
    """Counted from `def` to its last line; tables of values stand outside functions."""
    lengths = {
        f"{name}.{node.name}, line {node.lineno}": (node.end_lineno or 0) - node.lineno + 1
        for name, file in MODULES.items()
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(lengths) > 1000
    assert {place: length for place, length in lengths.items() if length > LONGEST} == {}


def test_the_import_rules_can_see() -> None:
    """The reader of imports finds them wherever they stand; else all of the above is void."""
    file = ROOT / "engine/stream.py"
    assert "sigmerge.core" in set(imports(file))
    hub = set(imports(ROOT / "checkpoints/hub.py"))
    assert "huggingface_hub.snapshot_download" in hub
    assert within("torch.nn", ("torch",)) and not within("torchvision", ("torch",))


def test_every_import_of_ours_finds_its_module() -> None:
    """Imports inside functions too, of the package, its tests and benchmarks."""
    beside = [ROOT.parents[1] / name for name in ("tests", "benchmarks", "research")]
    lost = [
        f"{file}, line {node.lineno}: {node.module}"
        for file in (*FILES, *(file for folder in beside for file in folder.rglob("*.py")))
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ImportFrom) and within(node.module or "", ("sigmerge",))
        if node.module not in MODULES and node.module != "sigmerge._native"
    ]
    assert lost == []


HEAVY = (
    "numpy", "sigmerge._native", "torch", "pydantic", "yaml", "transformers", "safetensors",
    "jinja2",
)  # fmt: skip


@pytest.mark.parametrize("arguments", [["--help"], ["merge", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys; sys.argv = ['sigmerge', *sys.argv[1:]]\n"
        "from sigmerge import cli\n"
        "try:\n    cli.main()\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "print('LOADED', *sorted(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    text, _, loaded = ran.stdout.partition("LOADED ")
    assert "sigmerge" in text and "sigmerge.cli" in loaded.split()
    assert [name for name in HEAVY if name in loaded.split()] == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = "import sigmerge, sys; print(*sorted(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [name for name in (*HEAVY, "click") if name in ran.stdout.split()] == []


def test_every_extra_that_a_hint_names_exists() -> None:
    """The name on the package index, and extras by purpose, each known to pyproject.toml."""
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    text = "".join(file.read_text() for file in FILES)
    named = re.findall(r"MissingExtra\(.*\[\"(\w+)\"\]\)", text)
    named += re.findall(r"\brequire\(\"[^\"]*\", (\w+)=\[", text)
    assert len(named) > 20 and set(named) <= set(project["optional-dependencies"])


def test_what_is_lacking_is_said_at_once() -> None:
    with pytest.raises(MissingExtra) as error:
        require("A search", tune=["pymoo_", "os"], models=["torch_"], report=["json"])
    assert str(error.value) == (
        "A search needs pymoo_ and torch_, which are not installed. "
        "Install them with: pip install 'sigmerge-llm[tune,models]'"
    )
