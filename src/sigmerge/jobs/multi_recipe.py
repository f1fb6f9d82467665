"""A file of several recipes: each is merged into its own folder, dependencies first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.folder import RECORDS_FOLDER
from sigmerge.errors import OutputError
from sigmerge.files.objects import url_of
from sigmerge.jobs.anchor import is_current
from sigmerge.jobs.merge import MergeJob
from sigmerge.jobs.options import Options
from sigmerge.jobs.steps import Description, LaterStep, Step
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.recipe.documents import LAST, needed, several, standing_in, with_folders
from sigmerge.records import PLAN, PROVENANCE, Provenance, read, read_plan
from sigmerge.results import Merged


@dataclass(frozen=True)
class SeveralJob:
    """The merges of a file of several recipes, in a folder that holds one folder for each."""

    file: Path
    out: Path
    options: Options
    seed: int | None = None
    strict: bool = False
    last: Path | None = None
    """Where the recipe without a name goes, if not beside the others."""

    def _folder(self, name: str) -> Path:
        return self.last if self.last and name == LAST else self.out / name

    def describe(self) -> Description:
        """The merges of what is there; those of what others make are named."""
        self._check()
        steps: list[Step] = []
        for name, given in several(self.file).items():
            if needs := sorted(needed(given, several(self.file))):
                steps.append(LaterStep(recipe=name, merges=tuple(needs)))
            else:
                recipe = self._loaded(given, {})
                steps += MergeJob(recipe, self._folder(name), self.options).describe().steps
        return Description(tuple(steps), self.options.threads)

    def _check(self) -> None:
        """Parse all recipes before the first is merged."""
        found = several(self.file)
        with standing_in(found) as places:
            for given in found.values():
                self._loaded(given, places)

    def _loaded(self, given: Mapping[str, Any], places: Mapping[str, Path]) -> Recipe:
        """Load one recipe, with the result folders of the recipes that it depends on."""
        recipe = load_recipe(
            with_folders(given, places),
            seed=self.seed,
            strict=self.strict,
            folder=self.file.expanduser().resolve().parent,
        )
        return replace(recipe, files=(self.file, *recipe.files))

    def run(self) -> tuple[Merged, ...]:
        """Results in the order in which they were made; finished ones are not made again."""
        if url := url_of(self.out):
            raise OutputError(f"{url}: several recipes go into a local folder.")
        self._check()
        folders: dict[str, Path] = {}
        results = []
        for name, given in several(self.file).items():
            recipe = self._loaded(given, folders)
            folders[name] = folder = self._folder(name).absolute()
            if (
                folder.exists()
                and recipe.repair is None
                and is_current(recipe, folder, self.options)
            ):
                plan = read_plan(folder / RECORDS_FOLDER / PLAN)
                provenance = read(Provenance, folder / RECORDS_FOLDER / PROVENANCE)
                results.append(Merged(out=str(folder), plan=plan, provenance=provenance))
                continue
            folder.parent.mkdir(parents=True, exist_ok=True)
            results.append(MergeJob(recipe, folder, self.options).run())
        return tuple(results)
