"""`sigmerge anchors`: which anchor to repair, from what is known before the repair.

Every anchor is merged and scored on the calibration items. The paper computes nine statistics from
such scores; the one that held within all its pools is the anchor's own mean score, so that is what
anchors are ranked by. How well this did on pools measured here is read from a file that
`sigmerge analyze` made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.errors import RecipeError
from sigmerge.files.documents import read_json_object
from sigmerge.files.piped import is_there
from sigmerge.files.scratch import scratch
from sigmerge.files.yaml_documents import read_yaml
from sigmerge.jobs.anchor import make_anchor
from sigmerge.jobs.options import Options
from sigmerge.jobs.repair import check_data
from sigmerge.jobs.scores import scorer_of
from sigmerge.jobs.steps import Description
from sigmerge.lab.experiments.plan import PoolPlan, plans
from sigmerge.lab.experiments.suite import PAPERS_ANCHORS, ExperimentSuite, load_suite
from sigmerge.method.deficit import residual_gap
from sigmerge.operators.table import operator
from sigmerge.progress import silent
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.records import Part

EVIDENCE = Path(__file__).parent / "anchor_rules.json"


class RankedAnchor(Part):
    anchor: str
    scores: Mapping[str, float]
    statistics: Mapping[str, float]


class RankedPool(Part):
    """The anchors of a pool, the one to repair first.

    `left_out` are those of the paper that read exemplars, where the pool has none.
    """

    pool: str
    anchors: tuple[RankedAnchor, ...]
    left_out: tuple[str, ...] = ()


class Ranked(Part):
    """The ranking on every pool, and how the rule did on the pools of the shipped results."""

    pools: tuple[RankedPool, ...]
    evidence: Mapping[str, Any]

    def _repr_html_(self) -> str:
        from sigmerge.pages.notebook import tables
        from sigmerge.pages.table import Table, number_columns, percent

        return tables(
            *(
                Table(
                    number_columns(f"anchors of {found.pool}", *found.anchors[0].scores, "macro"),
                    [
                        (row.anchor, *map(percent, (*row.scores.values(), row.statistics["macro"])))
                        for row in found.anchors
                    ],
                )
                for found in self.pools
            )
        )


@dataclass(frozen=True)
class AnchorsJob:
    """Ranks the anchors of a suite, or the paper's seven on the pool of a recipe."""

    suite: ExperimentSuite
    options: Options

    def check(self) -> list[PoolPlan]:
        found = plans(self.suite, self.options)
        for plan in found:
            recipe = plan.recipe(self.suite.anchors[0], 0, self.suite.default, 0)
            if scorer_of(recipe, self.options) is None:
                raise RecipeError("Anchors that do not exist yet cannot be in a file of scores; "
                                  "give command: or evaluate: in place of scores:.")  # fmt: skip
            check_data(recipe, self.options)
        return found

    def describe(self) -> Description:
        from sigmerge.lab.experiments.description import describe_ranking

        steps = tuple(describe_ranking(plan, self.options) for plan in self.check())
        return Description(steps, self.options.threads)

    def run(self) -> Ranked:
        found = self.check()
        ranked = tuple(
            RankedPool(
                pool=plan.name, anchors=tuple(self._ranked(plan)), left_out=self._left_out(plan)
            )
            for plan in found
        )
        evidence = read_json_object(EVIDENCE, "results of selection rules")
        return Ranked(pools=ranked, evidence=evidence)

    def _left_out(self, plan: PoolPlan) -> tuple[str, ...]:
        ranked = {method.content()["merge_method"] for method in self.suite.anchors}
        if plan.place.exemplars is not None:
            return ()
        return tuple(n for n in PAPERS_ANCHORS if operator(n).needs and n not in ranked)

    def _ranked(self, plan: PoolPlan) -> list[RankedAnchor]:
        from sigmerge.lab.analysis.statistics import anchor_statistics

        quiet = replace(self.options, progress=silent, overwrite=True)
        recipe = plan.recipe(self.suite.anchors[0], 0, self.suite.default, 0)
        scorer = scorer_of(recipe, quiet)
        assert scorer is not None  # see check()
        experts = [scorer(path).scores for path in recipe.experts.values()]
        rows = []
        # Beside the working folder: a merge may be too large for the system's temporary one.
        with scratch(Path.cwd()) as work:
            for done, method in enumerate(self.suite.anchors):
                self.options.progress(f"anchors of {plan.name}", done, len(self.suite.anchors))
                folder = work / "anchor"
                merge = plan.recipe(method, method.seeds[0], self.suite.default, 0)
                make_anchor(merge, folder, quiet)
                scores = scorer(folder).scores
                domains = list(plan.place.experts)
                best = np.array([max(row[d] for row in experts) for d in domains])
                own = np.array([scores[d] for d in domains])
                nine = anchor_statistics(own, residual_gap(best, own))
                rows.append(RankedAnchor(anchor=method.name, scores=scores, statistics=nine))
        self.options.progress(f"anchors of {plan.name}", len(rows), len(rows))
        return sorted(rows, key=lambda row: -row.statistics["macro"])


def suite_of(source: Path | str, pools: tuple[Path, ...] = ()) -> ExperimentSuite:
    """A suite by its name or file, or the paper's seven anchors on the pool of a recipe."""
    file = Path(source).expanduser()
    if is_there(file) and not file.is_dir():
        content = read_yaml(file, "a recipe or a suite", RecipeError)
        if isinstance(content, dict) and "merge_method" in content:
            return _of_recipe(load_recipe(file))
    return load_suite(source, pools)


def _of_recipe(recipe: Recipe) -> ExperimentSuite:
    section = recipe.repair
    if section is None or (section.evaluate is None and section.command is None):
        raise RecipeError(
            "The recipe's repair: section must say where scores come from: evaluate: or command:."
        )
    shown = {model.name: model.exemplars for model in recipe.models if model.exemplars}
    homes = {str(file.parent) for file in shown.values() if file is not None}
    usable = len(homes) == 1 and all(file and file.stem == n for n, file in shown.items())
    usable = usable and len(shown) == len(recipe.models)
    pool: dict[str, Any] = {
        "name": recipe.folder.name,
        "reference": str(recipe.reference),
        "experts": {name: str(path) for name, path in recipe.experts.items()},
    }
    if section.probe:
        pool["probe"] = str(recipe.folder / section.probe)
    if usable:
        pool["exemplars"] = homes.pop()
    own = recipe.given["repair"]
    scoring = {key: own[key] for key in ("evaluate", "command") if key in own}
    anchors = [name for name in PAPERS_ANCHORS if usable or not operator(name).needs]
    suite = load_suite({"name": "anchors", "pools": [pool], **scoring, "anchors": anchors})
    return replace(suite, folder=recipe.folder)
