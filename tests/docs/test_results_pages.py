"""docs/results: the commands are those that the code has, the tables those of the stores."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from benchmarks import tune

from sigmerge.cli.ending import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
STORES = ROOT / "docs/results/embedded"
COMMAND = re.compile(
    r"(?:taskset \S+ \S+ )?(?:python -m (?:benchmarks|sigmerge)|sigmerge)\b.*", re.S
)
EARLIER = "# at version"
"""Marks a command of an earlier version, beside which the page has today's."""


def commands(text: str) -> list[list[str]]:
    """The words of every command of ours in the text's code, without the shell's own."""
    fenced = re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    indented = re.findall(r"^    (?:.*\n(?:    .*\n)*)", prose, re.M)
    blocks = "\n".join([*fenced, *(re.sub(r"^ +", "", each, flags=re.M) for each in indented)])
    lines = blocks.replace("\\\n", " ").splitlines()
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    found = []
    for line in [*lines, *spans]:
        if EARLIER not in line and COMMAND.fullmatch(line.strip()):
            words = shlex.split(line.partition("…")[0], comments=True)
            chained = [i for i, word in enumerate(words) if word in ("&&", ";", "|", ">", "2>")]
            words = words[: min(chained, default=None)]
            found.append(words[3:] if words[0] == "taskset" else words)
    return found


PAIRS = sorted(
    {(page.name, tuple(words)) for page in PAGES for words in commands(page.read_text())}
)
MODULES = [pair for pair in PAIRS if pair[1][:2] == ("python", "-m")]
OURS = [  # names of commands alone, and those with a choice, are prose
    (page, words)
    for page, words in PAIRS
    if words[0] == "sigmerge" and len(words) > 3 and "|" not in " ".join(words)
]


class Parsed(Exception):
    """The words were understood."""


@pytest.mark.parametrize(("page", "words"), MODULES, ids=lambda given: str(given)[:60])
def test_a_module_takes_the_words_of_its_command(
    page: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    del page
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, given: Any = None, namespace: Any = None) -> Any:
        raise Parsed(parse(self, given, namespace))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    name, given = words[2], list(words[3:])
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):  # a package whose words are its modules
        given, missing = [], [w for w in given if not importlib.util.find_spec(f"{name}.{w}")]
        assert missing == []
    if name == "benchmarks.scale":  # which has one word and no parser
        assert given == ["--write"]
        return
    if not given:
        return
    monkeypatch.setattr("sys.argv", [name, *given])
    with pytest.raises(Parsed) as found:
        module.main()
    if name == "benchmarks.tune" or name == "benchmarks.stores":
        rows = found.value.args[0].rows
        assert all(row in (*tune.ROWS, "fair") for row in rows.split(",") if row)


@pytest.mark.parametrize(("page", "words"), OURS, ids=lambda given: str(given)[:60])
def test_the_command_line_takes_the_words(
    page: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    del page
    monkeypatch.setattr(click.Command, "invoke", lambda self, context: None)  # after the words
    app.main(list(words[1:]), standalone_mode=False)


def test_the_pages_have_commands() -> None:
    assert len(MODULES) > 15 and len(OURS) > 30


def test_the_tuning_tables_are_those_of_the_store() -> None:
    """Every row of docs/results/tune.md that the benchmark makes, with its commit."""
    made = tune.table(json.loads((STORES / "tuning.json").read_text())).splitlines()
    page = (ROOT / "docs/results/tune.md").read_text().splitlines()
    wide = [line for line in page if line.count("|") == made[0].count("|")]
    rows = [line for line in wide if line.split("|")[1].strip() in tune.ROWS]
    assert {line.split("|")[1].strip() for line in rows} == set(tune.ROWS)
    assert [row for row in rows if row not in made] == []


INDEX = ROOT / "docs/results/README.md"


def test_every_page_of_results_is_in_the_list_with_what_repeats_it() -> None:
    """Its claim, command, store, machine with a commit, and who could repeat it."""
    lines = [line for line in INDEX.read_text().splitlines() if line.startswith("| [")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    listed = [link for row in rows for link in re.findall(r"\]\(([^)]+\.md)\)", row[0])]
    pages = [str(page.relative_to(INDEX.parent)) for page in INDEX.parent.rglob("*.md")]
    assert sorted([*listed, "README.md"]) == sorted(pages)
    stored = {link for row in rows for link in re.findall(r"\]\(([^)]+)\)", row[3])}
    kept = [p for p in INDEX.parent.rglob("*") if p.is_file() and p.suffix not in (".md", ".svg")]
    assert stored == {str(file.relative_to(INDEX.parent)) for file in kept}
    for row in rows:
        assert len(row) == 6 and all(row), row
        assert row[2].startswith(("`sigmerge ", "`python -m ")), row
        assert re.search(r"\b[0-9a-f]{7}\b", row[4]) or row[4] == "any", row


def test_every_page_of_results_names_the_commit_of_its_tables() -> None:
    """But the one that computes from printed tables, and analyses of stores."""
    for line in INDEX.read_text().splitlines():
        if line.startswith("| ["):
            page, *_, machine, _ = line.strip("| ").split(" | ")
            text = (INDEX.parent / re.findall(r"\]\(([^)]+)\)", page)[0]).read_text()
            missing = [each for each in re.findall(r"\b[0-9a-f]{7}\b", machine) if each not in text]
            assert missing == [], page
