"""`sigmerge run`: merge, score, profile, repair, score again, report. Each step leaves a file.

    OUT/anchor/           the dense merge
    OUT/repaired/         the repaired merge, with its plan
    OUT/calibration.json  scores the repair was allowed to see
    OUT/evaluation.json   scores on the disjoint items
    OUT/report.html       the page
    OUT/run.json          what this run was; written last

Interrupted, the same command goes on from the last finished step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from sigmerge.analysis.page import Run, write_page
from sigmerge.analysis.table import Scores
from sigmerge.commands.merge import make_merge, plan_merge
from sigmerge.commands.options import Options
from sigmerge.commands.profile import open_recipe_pool
from sigmerge.commands.repair import check_repair, repair_anchor, sizes, stale_anchor
from sigmerge.commands.scores import Scorer, scorer_of
from sigmerge.commands.target import WorkFolder
from sigmerge.errors import OutputError, RecipeError
from sigmerge.files.documents import write_json
from sigmerge.recipe import Recipe, load_recipe

FOLDER = WorkFolder(
    "run",
    ("calibration.json", "evaluation.json", "report.html", "run.json"),
    ("anchor", "repaired"),
    last="run.json",
)


def run(
    recipe: Recipe | Path | str | Mapping[str, Any], out: Path | str, **how: Any
) -> dict[str, Any]:
    """The whole pipeline for one recipe; returns the content of run.json."""
    options = Options(**how)
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    result = run_pipeline(loaded, Path(out), options)
    page = result.pop("page")
    write_page(Path(out) / "report.html", [page])
    shutil.copyfile(Path(out) / "report.html", Path(out) / "repaired/sigmerge/report.html")
    return result


def describe(recipe: Recipe, out: Path, options: Options) -> dict[str, Any]:
    """What a dry run tells: everything is checked, and the sizes of the repair, the larger part."""
    _check(recipe, out, options)
    if recipe.operator is not None:
        plan_merge(replace(recipe, search=None), options)
    return sizes(open_recipe_pool(recipe, options), options)


def _check(recipe: Recipe, out: Path, options: Options) -> None:
    if recipe.repair is None:
        raise RecipeError("The recipe has no repair: section; `sigmerge merge` makes plain merges.")
    check_repair(recipe, options)
    FOLDER.check(out, options.overwrite, recipe.inputs)


def run_pipeline(recipe: Recipe, out: Path, options: Options) -> dict[str, Any]:
    """Everything but the page; its `Run` comes back under "page"."""
    _check(recipe, out, options)
    if (out / FOLDER.last).exists():
        FOLDER.clear(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({error.strerror}).") from None
    anchor = _anchor(recipe, out, options)
    repaired = out / "repaired"
    result = repair_anchor(recipe, anchor, repaired, replace(options, overwrite=True))
    plan = result["plan"]
    calibration = {**plan["scores"]}
    if "scores" in plan["guard"]:
        calibration["repaired"] = plan["guard"]["scores"]
    write_json(out / "calibration.json", calibration)
    evaluation = _evaluate(recipe, anchor, repaired, options)
    if evaluation is not None:
        write_json(out / "evaluation.json", evaluation)
    provenance = json.loads((repaired / "sigmerge/provenance.json").read_text())
    title = recipe.operator.title if recipe.operator else "Checkpoint"
    if recipe.search is not None:
        title = f"MERGE³ over {title}"
    summary = {
        "out": str(out.absolute()),
        "operator": recipe.method,
        "title": title,
        "anchor": str(anchor),
        "repaired": str(repaired.absolute()),
        "calibration": calibration,
        "evaluation": evaluation,
        "deficit": plan["deficit"],
        "share": plan["share"],
        "guard": plan["guard"],
        "warnings": plan["warnings"],
        "wall_seconds": result["wall_seconds"],
    }
    write_json(out / "run.json", summary)
    page = Run(
        title,
        recipe.text,
        plan,
        provenance,
        cast("Scores | None", evaluation),
        cast(Scores, calibration),
        plan["warnings"],
    )
    return {**summary, "page": page}


def _anchor(recipe: Recipe, out: Path, options: Options) -> Path:
    """The stored anchor: made now, or finished by an earlier, interrupted run of this recipe."""
    if recipe.operator is None:
        assert recipe.anchor is not None
        return recipe.anchor
    anchor = (out / "anchor").absolute()
    if not anchor.exists() or stale_anchor(recipe, anchor, options):
        make_merge(recipe, anchor, replace(options, overwrite=True))
    return anchor


def _evaluate(
    recipe: Recipe, anchor: Path, repaired: Path, options: Options
) -> dict[str, Any] | None:
    """Scores on the evaluation split, which no earlier step has seen."""
    assert recipe.repair is not None
    scorer = scorer_of(recipe.repair, recipe.folder, options, "evaluation")
    if scorer is None:
        return None
    folders = {**{f"expert {n}": p for n, p in recipe.experts.items()},
               "anchor": anchor, "repaired": repaired}  # fmt: skip
    scores = dict(_each(scorer, folders, options.progress))
    experts = {name: scores[f"expert {name}"] for name in recipe.experts}
    return {"experts": experts, "anchor": scores["anchor"], "repaired": scores["repaired"]}


def _each(
    scorer: Scorer, folders: Mapping[str, Path], progress: Callable[[str, int, int], None]
) -> Iterable[tuple[str, dict[str, float]]]:
    for done, (name, folder) in enumerate(folders.items()):
        progress("evaluating", done, len(folders))
        yield name, scorer(folder)
    progress("evaluating", len(folders), len(folders))
