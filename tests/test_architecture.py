"""Who may import whom (design §7). Imports inside functions count as much as those at the top."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sigmerge

ROOT = Path(sigmerge.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imports(file: Path, *, top_level: bool = False) -> Iterator[str]:
    """Dotted names of all modules a file imports; `from a import b` gives a and a.b."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
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
        "sigmerge.commands",
        "sigmerge.recipe",
        "sigmerge.cli",
    )
    assert offences(room(name), forbidden) == []


def test_kernels_know_numbers_only() -> None:
    allowed = (*sys.stdlib_module_names, "numpy", "numba", "sigmerge.kernels")
    strangers = [
        f"{file.name} imports {name}"
        for file in room("kernels")
        for name in imports(file)
        if not within(name, allowed)
    ]
    assert strangers == []


def test_the_engine_knows_no_paper() -> None:
    allowed = ("sigmerge.kernels", "sigmerge.operators.base", "sigmerge.engine", "sigmerge.errors")
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
        ("transformers", ("probing", "nano")),
        ("lm_eval", ("evaluation",)),
    ],
)
def test_a_library_has_its_own_rooms(library: str, rooms: tuple[str, ...]) -> None:
    others = [file for file in FILES if file.relative_to(ROOT).parts[0] not in rooms]
    assert offences(others, (library,)) == []


def test_checkpoints_know_no_paper() -> None:
    forbidden = ("sigmerge.method", "sigmerge.operators", "sigmerge.commands", "sigmerge.recipe")
    assert offences(room("checkpoints"), forbidden) == []


def test_the_command_line_knows_no_maths() -> None:
    files = [ROOT / "cli.py", ROOT / "show.py"]
    assert offences(files, ("numpy", "numba", "torch")) == []
    allowed = (*sys.stdlib_module_names, "typer", "sigmerge.errors", "sigmerge.show")
    at_once = {name for file in files for name in imports(file, top_level=True)} - {"sigmerge"}
    assert [name for name in sorted(at_once) if not within(name, allowed)] == []


def test_the_import_rules_can_see() -> None:
    """The reader of imports finds them wherever they stand; else all of the above is void."""
    file = ROOT / "engine/stream.py"
    assert "sigmerge.kernels" in set(imports(file))
    hub = set(imports(ROOT / "checkpoints/hub.py"))
    assert "huggingface_hub.snapshot_download" in hub
    assert within("torch.nn", ("torch",)) and not within("torchvision", ("torch",))


HEAVY = ("numpy", "numba", "torch", "pydantic", "yaml", "transformers", "safetensors", "jinja2")


@pytest.mark.parametrize(
    ("arguments", "itself"),
    [(["--help"], ()), (["merge", "--help"], ("pydantic",))],  # typer reads types with pydantic
)
def test_help_loads_nothing_heavy(arguments: list[str], itself: tuple[str, ...]) -> None:
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
    assert [name for name in HEAVY if name in loaded.split() and name not in itself] == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = "import sigmerge, sys; print(*sorted(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [name for name in (*HEAVY, "typer") if name in ran.stdout.split()] == []
