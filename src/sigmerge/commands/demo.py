"""`sigmerge demo`: the embedded pool, every anchor with and without repair, one page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sigmerge.analysis.page import write_page
from sigmerge.analysis.table import paired_row
from sigmerge.commands.options import Options
from sigmerge.commands.run import FOLDER, run_pipeline
from sigmerge.errors import OutputError
from sigmerge.nano.files import RECIPES
from sigmerge.recipe import Recipe, load_recipe

ANCHORS = (
    "linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "fisher", "regmean",
)  # fmt: skip
"""The paper's seven."""


def demo(out: Path | str, **how: Any) -> dict[str, Any]:
    """Run the shipped recipes; returns the rows of the paired table and where the page is."""
    options, folder = Options(**how), Path(out)
    _prepare(folder, options.overwrite)
    pages, rows = [], []
    for name in ANCHORS:
        recipe = load_recipe(RECIPES / f"{name}.yaml")
        again = options.overwrite or _ours(folder / name, recipe)
        result = run_pipeline(recipe, folder / name, replace(options, overwrite=again))
        pages.append(result["page"])
        rows.append(paired_row(result["title"], result["evaluation"]))
    page = folder / "report.html"
    write_page(page, pages, title="The embedded pool, anchor by anchor")
    return {"rows": rows, "page": str(page.absolute()), "out": str(folder.absolute())}


def _prepare(folder: Path, overwrite: bool) -> None:
    """Start over on a finished demo; go on with an interrupted one; touch nothing else."""
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    foreign = names - {"report.html", *ANCHORS}
    if shown := sorted(name for name in foreign if not name.startswith(".")):
        raise OutputError(f"{folder}: holds {shown[0]}, which no demo wrote; choose a new folder.")
    if not (folder / "report.html").exists():
        return
    if not overwrite:
        raise OutputError(f"{folder}: holds a finished demo; pass --overwrite to run it again.")
    for name in ANCHORS:  # each run takes its own away; what is not its own is told before any does
        FOLDER.check(folder / name, overwrite, ())
    (folder / "report.html").unlink()


def _ours(folder: Path, recipe: Recipe) -> bool:
    """Whether an interrupted demo made this run: to be made again, for the page, if it is finished.

    Its scores are remembered, so that takes a moment. A run of the user's own has a page.
    """
    text = folder / "repaired/sigmerge/recipe.yaml"
    if not text.exists() or (folder / "report.html").exists():
        return False
    return text.read_text(encoding="utf-8") == recipe.text
