"""The site: its pages run, its reference is that of the code, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from benchmarks.planning import write
from benchmarks.scale import MODELS

import sigmerge as package
from sigmerge.cli.app import GROUPS
from sigmerge.cli.ending import app
from sigmerge.operators.table import OPERATORS, operator
from sigmerge.recipe import load_recipe
from sigmerge.recipe.schema import RECIPE_SCHEMA
from tests.command_line import sigmerge
from tests.docs import site_pages
from tests.docs.site_pages import DOCS, PAGES, blocks, commands, follow, write_files
from tests.pages.test_browser import Browser, browser
from tests.storage.conftest import server

__all__ = ["browser", "server"]  # fixtures
MADE = DOCS / "_site"


def module(name: str) -> ModuleType:
    """A file of docs/_site."""
    spec = importlib.util.spec_from_file_location(name, MADE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return dict(module("reference").pages())


# Pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Its files, commands and Python as they stand, but for fewer items to score."""
    if page.stem == "cluster":
        request.getfixturevalue("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        follow(page, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(c.endswith(site_pages.LONG) for c in commands(p))],
    ids=lambda page: page.stem,
)  # fmt: skip
def test_a_page_runs_whole(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if page.stem == "cluster":
        request.getfixturevalue("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        follow(page, tmp_path, long=True)


def test_every_page_has_something_to_run() -> None:
    assert len(PAGES) >= 14
    assert [page.stem for page in PAGES if not [*commands(page)] and page.stem != "vision"] == []


@pytest.mark.parametrize("page", [*PAGES, DOCS / "tune.md"], ids=lambda page: page.stem)
def test_sections_of_recipes_load(page: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Blocks that are a section alone, put under a merge."""
    site_pages.pool(tmp_path)
    for name in ("math.jsonl", "coding.jsonl", "probe.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x"}\n')
    monkeypatch.chdir(tmp_path)
    names = ("math", "coding", "safety")
    merge = {"merge_method": "ties", "base_model": "pool/reference",
             "models": [{"model": f"pool/{name}"} for name in names]}  # fmt: skip
    for block in blocks(page):
        if block.language == "yaml" and block.name is None:
            given = yaml.safe_load(block.text)
            shares = given.get("repair", {}).get("shares")
            whole = {**merge, **given}
            if shares:
                whole["models"] = [{"model": f"pool/{name}"} for name in shares]
            assert load_recipe(whole).experts


def test_a_dry_run_of_70_b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of checkpoints that are headers and holes."""
    [page] = [page for page in PAGES if page.stem == "large-models"]
    model = next(each for each in MODELS if 60e9 < each.coordinates < 80e9)
    for number, name in enumerate(("reference", "math", "code", "chat")):
        write(tmp_path / name, model, 0x3F80 + number)
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    empty = SimpleNamespace(total=2**40, used=0, free=2**40)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: empty)
    ran = sigmerge("merge", "large.yaml", "merged/", "--dry-run", "--json")
    assert ran.code == 0, ran
    assert ran.json["peak_memory_bytes"] < 400e6 and ran.json["bytes_to_write"] > 140e9


# Reference


def test_the_reference_has_every_command_with_its_options(reference: dict[str, str]) -> None:
    for heading, names in GROUPS.items():
        page = reference[f"commands-{heading.lower()}"]
        for name in names:
            assert f"\n## sigmerge {name}\n" in page
            assert f"`sigmerge {name}`](commands-{heading.lower()}.md" in reference["commands"]
            below = getattr(app.commands[name], "commands", {None: app.commands[name]})
            for part in below:
                words = [name, part] if part else [name]
                if words == ["mergekit", "yaml"]:
                    continue  # which has the options of another program
                help = sigmerge(*words, "-h").out
                shown = page.partition(f"# sigmerge {' '.join(words)}\n")[2].partition("\n##")[0]
                named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", help.partition("Examples:")[0]))
                assert {each for each in named - {"--help"} if each not in shown} == set(), words


def test_the_reference_has_every_method_and_parameter(reference: dict[str, str]) -> None:
    for name in OPERATORS:
        section = reference["operators"].partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert operator(name).paper in section
        rows = re.findall(r"^\| `([\w.]+)` \|", section, re.M)
        assert rows == [parameter.name for parameter in operator(name).parameters]


def test_the_reference_has_every_export(reference: dict[str, str]) -> None:
    for name in package.__all__:
        assert f"\n### {name}\n" in reference["python"] or f"| `{name}(…)` |" in reference["python"]


def test_the_reference_has_every_key_and_says_what_it_means(reference: dict[str, str]) -> None:
    schema = json.loads(RECIPE_SCHEMA.read_text(encoding="utf-8"))
    parts = [schema, *(part for name, part in schema["$defs"].items() if name != "Parameters")]
    for part in parts:
        for key, given in part["properties"].items():
            assert f"| `{key}` |" in reference["recipe"], key
            assert given.get("description"), f"{part['title']}.{key} is not described"


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going",
               "-d", str(folder / "trees"), str(DOCS), str(folder / "html")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_the_site_builds_without_a_warning_and_fetches_nothing(site: Path) -> None:
    assert module("check").problems(site) == []
    assert (site / "searchindex.js").stat().st_size > 100_000
    shown = (site / "method.html").read_text(encoding="utf-8")
    assert shown.count("<math") > 20 and not re.search(r"<script[^>]*(?i:mathjax|katex)", shown)


SHOWN = ("index", "method", "tutorial", "how-to/mergekit-recipe", "reference/recipe",
         "reference/commands-merge", "reference/python")  # fmt: skip


@pytest.mark.parametrize("width", [360, 1400])
def test_in_a_browser_no_page_is_too_wide_and_nothing_is_asked_for(
    site: Path, browser: Browser, width: int
) -> None:
    for name in SHOWN:
        browser.open(site / f"{name}.html", width=width, scheme="dark" if width > 600 else "light")
        wide = browser.js("return document.documentElement.scrollWidth")
        assert wide <= width, f"{name}: {wide}"
        events = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
        asked = [event["params"]["request"]["url"] for event in events
                 if event["method"] == "Network.requestWillBeSent"]  # fmt: skip
        assert asked and [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_the_search_finds_pages_without_a_server(site: Path, browser: Browser) -> None:
    browser.open(site / "search.html")
    browser.driver.get(f"{(site / 'search.html').as_uri()}?q=capacity")
    browser.wait("return document.querySelectorAll('#search-results li a').length > 3")


@pytest.mark.parametrize(
    ("body", "told"),
    [('<a href="other.html">x</a>', "other.html: leads nowhere"),
     ('<a href="#gone">x</a>', "#gone: no such anchor"),
     ('<a href="index.html#here">x</a><p id="here">', None),
     ('<script src="https://cdn.example/x.js"></script>', "fetches https://cdn.example/x.js"),
     ('<img src="//cdn.example/x.png">', "fetches //cdn.example/x.png"),
     ('<a href="https://arxiv.org/abs/1">x</a>', None)],
)  # fmt: skip
def test_what_a_check_of_links_finds(body: str, told: str | None, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(body)
    found = module("check").problems(tmp_path)
    assert found == ([] if told is None else [f"index.html: {told}"])


def test_a_style_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text('@import "https://fonts.example/inter.css";')
    assert module("check").problems(tmp_path) == ["a.css: fetches https://fonts.example/inter.css"]
