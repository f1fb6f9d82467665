"""The command line beside the pages on it: what they name exists. test_site.py runs the pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import sigmerge as package
from sigmerge.cli.app import GROUPS
from sigmerge.cli.ending import app
from sigmerge.cli.flags import VariantName
from sigmerge.method.controls import VARIANTS
from tests.command_line import sigmerge

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / name for name in ("tutorial.md", "command-line.md", "tune.md", "determinism.md")]
PAGES += sorted((DOCS / "how-to").glob("*.md"))
GUIDE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def listed(*group: str) -> set[str]:
    """The commands of a page of help."""
    help = sigmerge(*group, "-h").out
    if not group:
        return {name for each in GROUPS.values() for name in each if f"\n  {name} " in help}
    page = help.partition("Commands:\n")[2].partition("\n\n")[0]
    return {line.split()[0] for line in page.splitlines()}


def test_every_command_stands_under_one_heading() -> None:
    named = [name for each in GROUPS.values() for name in each]
    assert sorted(named) == sorted(app.commands) == sorted(listed())
    help = sigmerge("-h").out
    places = [help.index(f"\n{heading}:\n") for heading in GROUPS]
    assert places == sorted(places)


def test_variants_are_listed() -> None:
    assert get_args(VariantName) == tuple(VARIANTS)
    assert "[default|uniform_capacity|" in sigmerge("run", "-h").out


def test_every_option_that_it_names_exists() -> None:
    pages = "".join(
        sigmerge(*name.split(), "-h").out
        for name in [
            "",
            *listed(),
            "splits build",
            "splits verify",
            *(f"mergekit {n}" for n in listed("mergekit")),
            "probe build",
            *(f"pool {n}" for n in listed("pool")),
        ]
    )
    named = set(re.findall(r"--[a-z][a-z-]+", GUIDE))
    of_a_converter = {"--outfile", "--outtype"}  # llama.cpp's
    assert named and {option for option in named if option not in pages} == of_a_converter


def test_every_command_prints_as_it_is_told() -> None:
    groups = {"pool", "splits", "probe", "cache"}
    below = [f"{group} {name}" for group in sorted(groups) for name in listed(group)]
    own = listed() - groups - {"mergekit"}  # which has the options of another program
    pages = {name: sigmerge(*name.split(), "-h").out for name in [*own, *below]}
    for option in ("--json", "-q, --quiet", "-v, --verbose"):
        assert [name for name, page in pages.items() if option not in page] == []


def test_every_function_that_it_names_exists() -> None:
    named = re.findall(r"`sigmerge\.(\w+)\(", GUIDE)
    assert set(named) >= {"merge", "repair", "run"}
    assert all(callable(getattr(package, name)) for name in named)
