"""The runs of a suite on one pool, in order: each with its recipe and its content keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sigmerge.checkpoints.companions import companion_files
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.errors import PoolError, RecipeError
from sigmerge.files.digests import file_digests
from sigmerge.files.documents import content_key
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import weight_digests
from sigmerge.lab.experiments.scoring import scored_by
from sigmerge.lab.experiments.store import RunKind, StoredPool, StoredRun
from sigmerge.lab.experiments.suite import ExperimentSuite, MethodSection, PoolPlace, RepairSetting
from sigmerge.operators.table import operator
from sigmerge.progress import silent
from sigmerge.recipe import Recipe, load_recipe


@dataclass(frozen=True)
class PlannedRun:
    """One run: its row without scores, its recipe and what its repair changes."""

    record: StoredRun
    recipe: Recipe


@dataclass(frozen=True)
class Group:
    """Runs that share one merge: an anchor with everything built on it, or a baseline alone."""

    label: str
    recipe: Recipe
    runs: tuple[PlannedRun, ...]

    @property
    def searched(self) -> bool:
        return self.recipe.search is not None


@dataclass(frozen=True)
class PoolPlan:
    """A suite on one pool. `first` is the position of its first run."""

    suite: ExperimentSuite
    place: PoolPlace
    options: Options
    name: str
    first: int = 0

    @cached_property
    def row(self) -> StoredPool:
        """The pool as the store names it; its key is the content of all that decides a score."""
        domains = tuple(self.place.experts)
        return StoredPool(self.name, content_key(["pool", *self._content]), domains)

    @cached_property
    def _content(self) -> tuple[dict[str, list[str]], list[Any]]:
        """The members by content, and what scores them."""
        reference = self.plain.reference
        assert reference is not None
        members = {"reference": reference, **self.plain.experts}
        digests = {}
        for name, path in members.items():
            checkpoint = open_checkpoint(path, allow_pickle=self.options.allow_pickle)
            beside = file_digests(companion_files(path))
            digests[name] = [
                *sorted(weight_digests(checkpoint, self.options)),
                *(f"{file.name} {digest}" for file, digest in sorted(beside.items())),
            ]
        return digests, scored_by(self.place, self.suite, self.options, reference)

    def check_same(self) -> None:
        """Stop if the pool is no longer what its key says. A command may write files it names."""
        (members, scoring), (now, scored) = self._content, replace(self)._content
        wrong = [f"{name}: changed" for name in members if members[name] != now[name]]
        if self.suite.section.command is None and scoring != scored:
            wrong.append("evaluate: its records or settings changed")
        if wrong:
            raise PoolError(
                f"{self.name}: is not the pool any more that the suite began with. The run that "
                "was made now is not stored:",
                wrong,
            )

    @cached_property
    def plain(self) -> Recipe:
        """The recipe of the first anchor: what all runs of the pool have in common."""
        return self.recipe(self.suite.anchors[0], 0, self.suite.default, 0)

    def recipe(
        self, method: MethodSection, seed: int, setting: RepairSetting, at: int, **evaluate: str
    ) -> Recipe:
        """The recipe of a run: the method's merge on this pool, repaired with the setting."""
        try:
            return load_recipe(self.content(method, seed, setting, at, **evaluate))
        except RecipeError as error:
            raise RecipeError(
                f"suite {self.suite.section.name}: {method.name} cannot be run on the pool "
                f"{self.name} with the setting {setting.name}:",
                error.problems or (str(error),),
            ) from None

    def content(
        self, method: MethodSection, seed: int, setting: RepairSetting, at: int, **evaluate: str
    ) -> dict[str, Any]:
        place, own = self.place, method.content()
        scoring = place.evaluation(self.suite)
        if evaluate:
            scoring = {"evaluate": {**scoring["evaluate"], **evaluate}}
        if "search" in own:
            own["search"] = {**own["search"], **_search_items(scoring.get("evaluate", {}))}
        shown = place.exemplars is not None and _reads_exemplars(own)
        models = [
            {"model": path, "name": name}
            | ({"exemplars": f"{place.exemplars}/{name}.jsonl"} if shown else {})
            for name, path in place.experts.items()
        ]
        probe = {"probe": str(place.probe)} if place.probe else {}
        if (device := self.suite.section.device) != "cpu":
            probe["device"] = device
            if shown:
                own["capture"] = {"device": device, **own.get("capture", {})}
        dtype = {"dtype": self.suite.section.dtype} if self.suite.section.dtype else {}
        return {
            **own,
            **dtype,
            "base_model": place.reference,
            "models": models,
            "seed": seed,
            "repair": {**probe, **scoring, "guard": "off", **setting.repair, "seed": at},
        }

    def groups(self) -> Iterator[Group]:
        """Everything but the experts, which come first."""
        position = self.first + len(self.place.experts)
        for method in self.suite.anchors:
            for seed in method.seeds:
                group = self._anchor(method, seed, position)
                position += len(group.runs)
                yield group
        for method in self.suite.baselines:
            for seed in method.seeds:
                recipe = self.recipe(method, seed, self.suite.default, 0)
                row = self._row("baseline", method, seed, position, {"seed": seed})
                yield Group(_label(method, seed), recipe, (PlannedRun(row, recipe),))
                position += 1

    def experts(self) -> list[StoredRun]:
        """The rows of the experts."""
        return [
            StoredRun(
                kind="expert",
                pool=self.row,
                method=name,
                suite_key=self.suite.key,
                recipe_key="",
                position=self.first + number,
            )
            for number, name in enumerate(self.place.experts)
        ]

    def _anchor(self, method: MethodSection, seed: int, position: int) -> Group:
        suite, default = self.suite, self.suite.default
        base = {"anchor": method.name, "anchor_seed": seed,
                "anchor_key": self._key(method, seed, {})}  # fmt: skip
        plain = self.recipe(method, seed, default, 0)
        runs = [
            PlannedRun(self._row("anchor", method, seed, position, {**base, "seed": seed}), plain)
        ]

        def built(setting: RepairSetting, at: int, recipe: Recipe) -> None:
            more = {**base, "setting": setting.name, "seed": at}
            row = self._row(setting.kind, method, seed, position + len(runs), more, setting.repair)
            runs.append(PlannedRun(replace(row, method="sigmerge"), recipe))

        built(default, 0, plain)
        for number in suite.section.partitions:
            setting = replace(default, kind="partition", name=f"partition {number}")
            built(setting, number, plain)
        on = self.place.variants_on
        if (on is None or method.name in on) and seed == method.seeds[0]:
            for setting in suite.variants():
                for at in setting.seeds:
                    built(setting, at, self.recipe(method, seed, setting, at))
        return Group(_label(method, seed), plain, tuple(runs))

    def _row(
        self,
        kind: RunKind,
        method: MethodSection,
        seed: int,
        position: int,
        names: Mapping[str, Any],
        repair: Mapping[str, Any] | None = None,
    ) -> StoredRun:
        return StoredRun(
            kind=kind,
            pool=self.row,
            method=method.name,
            suite_key=self.suite.key,
            recipe_key=self._key(method, seed, repair),
            position=position,
            **names,
        )

    def _key(self, method: MethodSection, seed: int, repair: Mapping[str, Any] | None) -> str:
        """The content of a recipe without paths: the same wherever the pool lies."""
        own = method.content()
        files = [self.place.probe] if self.place.probe and repair is not None else []
        if self.place.exemplars and _reads_exemplars(own):
            files += [self.place.exemplars / f"{name}.jsonl" for name in self.place.experts]
        digests = sorted(file_digests(files).values())
        return content_key([self.row.key, own, self.suite.section.dtype, seed, repair, digests])


def plans(suite: ExperimentSuite, options: Options) -> list[PoolPlan]:
    """The suite on each of its pools. Pools whose folders have one name get another each."""
    places, quiet = suite.pools(), replace(options, progress=silent)
    names = [place.name for place in places]
    made: list[PoolPlan] = []
    for place in places:
        name = place.name
        if names.count(name) > 1:
            name = f"{place.folder.parent.name if place.folder else ''}/{name}"
        if name in [plan.name for plan in made]:
            name = f"{name} {len(made) + 1}"
        made.append(PoolPlan(suite, place, quiet, name, first=len(made) * 100_000))
    return made


def _reads_exemplars(own: Mapping[str, Any]) -> bool:
    parameters = own.get("parameters") or {}
    on = parameters.get("on", parameters.get(True))  # YAML 1.1 reads an unquoted `on` as true
    return bool(operator(str(own["merge_method"]), on).with_parameters(parameters).needs)


def _label(method: MethodSection, seed: int) -> str:
    return method.name if len(method.seeds) == 1 else f"{method.name} seed {seed}"


def _search_items(evaluate: Mapping[str, Any]) -> dict[str, Any]:
    """What a search: section needs to use the items of the scoring."""
    if evaluate.get("suite") == "nano":
        return {"suite": evaluate["pool"]} if "pool" in evaluate else {"suite": "nano"}
    kept = ("suite", "data", "hub", "judge", "allow_code_execution")
    return {key: evaluate[key] for key in kept if key in evaluate}
