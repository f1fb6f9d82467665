"""A suite as data: pools × anchors × settings of the repair, and baselines beside them.

A suite is YAML. `pools` may be replaced on the command line, so that one suite runs on any pool.
Text values of `evaluate:` and `command:` may say {pool}, the folder of the pool at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from sigmerge.errors import RecipeError
from sigmerge.files.documents import content_key
from sigmerge.files.piped import is_there
from sigmerge.files.yaml_documents import read_yaml
from sigmerge.lab.experiments.store import RunKind
from sigmerge.messages import did_you_mean, shown, unknown
from sigmerge.method.controls import VARIANTS
from sigmerge.nano.files import POOL, RECIPES
from sigmerge.recipe.scored import RepairSection
from sigmerge.recipe.sections import Section, worded

SHIPPED_EXPERIMENTS = Path(__file__).parent / "suites"
SWEPT_CONSTANTS = ("c_min", "c_max", "scale")
PAPERS_ANCHORS = (
    "linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "fisher", "regmean",
)  # fmt: skip


def _repeated(values: Sequence[Any]) -> Any:
    return next((value for number, value in enumerate(values) if value in values[:number]), None)


def _once(values: Sequence[Any], place: str = "") -> None:
    twice = _repeated(values)
    if twice is not None:
        raise ValueError(f"{place}: {twice} is given twice".removeprefix(": "))


class PoolSection(Section):
    """A pool: a folder with `reference` and the experts in it, or each of them by its own path.

    `experts` maps domains to folders or hub ids; without it every other folder with a config.json
    is an expert, named by its folder. `variants_on` replaces the suite's for this pool.
    """

    path: str | None = None
    name: str | None = None
    reference: str | None = None
    experts: dict[str, str] | None = None
    probe: str | None = None
    exemplars: str | None = None
    variants_on: list[str] | None = None

    @model_validator(mode="after")
    def _complete(self) -> PoolSection:
        if self.path is None and (self.reference is None or self.experts is None):
            raise ValueError("give path:, or reference: and experts:")
        if self.path is None and self.name is None:
            raise ValueError("a pool without path: needs a name:")
        return self


class MethodSection(Section):
    """A dense merge or a search: an operator with its parameters. `recipe` names a shipped one, or
    a recipe's YAML file, whose keys hold where this section has none of its own."""

    name: str
    recipe: str | None = None
    merge_method: str | None = None
    preset: Literal["mergekit", "paper"] | None = None
    parameters: dict[str, Any] | None = None
    capture: dict[str, Any] | None = None
    search: dict[str, Any] | None = None
    seeds: list[int] = Field([0], min_length=1)

    @model_validator(mode="after")
    def _known(self) -> MethodSection:
        _once(self.seeds, "seeds")
        if self.recipe is not None and not _recipe_file(self.recipe).is_file():
            raise ValueError(unknown("recipe file or shipped recipe", self.recipe, _recipes()))
        if self.recipe is None and self.merge_method is None:
            raise ValueError("give merge_method:, or recipe: the name of a shipped recipe")
        return self

    def content(self) -> dict[str, Any]:
        """The keys of a recipe that this method has."""
        keys = ("merge_method", "preset", "parameters", "capture", "search", "dtype")
        file = _recipe_file(self.recipe) if self.recipe else None
        shipped = read_yaml(file, "a recipe in YAML", RecipeError) if file else {}
        own = {key: getattr(self, key, None) for key in keys}
        merged = {**shipped, **{key: value for key, value in own.items() if value is not None}}
        return {key: merged[key] for key in keys if key in merged}


class RepairsSection(Section):
    """The settings of the repair besides the default."""

    ablation: list[str] = []
    control: list[str] = []
    view: list[str] = []
    order: list[str] = []
    sweep: dict[Literal["c_min", "c_max", "scale"], list[float]] = {}
    ours: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def _variants(self) -> RepairsSection:
        for kind in ("ablation", "control", "view", "order"):
            for name in getattr(self, kind):
                if name not in VARIANTS:
                    raise ValueError(f"{kind}: {unknown('variant', name, VARIANTS)}")
        _once([n for kind in ("ablation", "control", "view", "order") for n in getattr(self, kind)])
        for constant, values in self.sweep.items():
            _once(values, f"sweep.{constant}")
        return self


class ProbesSection(Section):
    """What a probe file must hold: prompts of each domain, all through one template."""

    per_domain: int = Field(ge=1)
    template: str

    @model_validator(mode="after")
    def _has_a_prompt(self) -> ProbesSection:
        if self.template.count("{prompt}") != 1:
            raise ValueError("template: must say {prompt} once, where the prompt goes")
        return self


class SuiteSection(Section):
    """A whole suite, as its YAML file says it."""

    name: str
    pools: list[str | PoolSection] = []
    experts: list[str] | None = None
    probe: str | None = None
    probes: ProbesSection | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    exemplars: str | None = None
    evaluate: dict[str, Any] | None = None
    command: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    constants: dict[Literal["c_min", "c_max", "scale"], float] = {}
    anchors: list[str | MethodSection] = Field(list(PAPERS_ANCHORS), min_length=1)
    baselines: list[str | MethodSection] = []
    repairs: RepairsSection = RepairsSection()
    variants_on: list[str] | None = None
    most_seeds: int | None = Field(None, ge=1)
    partitions: list[int] = []

    @model_validator(mode="after")
    def _consistent(self) -> SuiteSection:
        for place, given in (("partitions", self.partitions), ("experts", self.experts or [])):
            _once(given, place)
        if (self.evaluate is None) == (self.command is None):
            raise ValueError("give one of evaluate: and command:, where scores come from")
        if self.command is not None and self.partitions:
            raise ValueError("partitions: need evaluate:; a command divides its own items")
        for method in (*self.anchors, *self.baselines):
            if isinstance(method, str) and method not in _recipes():
                raise ValueError(unknown("shipped recipe", method, _recipes()))
        for constant, values in self.repairs.sweep.items():
            usual = self.constants.get(constant, RepairSection.model_fields[constant].default)
            if usual in values:
                raise ValueError(f"repairs.sweep.{constant}: {usual:g} is the default itself")
        names = [m if isinstance(m, str) else m.name for m in (*self.anchors, *self.baselines)]
        if twice := _repeated(names):
            raise ValueError(f"anchors, baselines: {twice} is given twice; give it another name:")
        anchors = names[: len(self.anchors)]
        pools = [p for p in self.pools if not isinstance(p, str)]
        for chosen in (self.variants_on, *(pool.variants_on for pool in pools)):
            if wrong := [name for name in chosen or [] if name not in anchors]:
                raise ValueError(f"variants_on: {unknown('anchor', wrong[0], anchors)}")
        return self


def _is_file(recipe: str) -> bool:
    """Whether a method names a recipe of the user, and no shipped one."""
    return recipe.endswith((".yaml", ".yml"))


def _recipe_file(name: str) -> Path:
    return Path(name) if _is_file(name) else RECIPES / f"{name}.yaml"


def _beside(methods: Any, folder: Path) -> Any:
    """Anchors or baselines with their recipe files looked for in the suite's folder."""
    return [
        {**each, "recipe": str(folder / Path(each["recipe"]).expanduser())}
        if isinstance(each, dict) and _is_file(str(each.get("recipe")))
        else each
        for each in (methods if isinstance(methods, list) else [])
    ] or methods


def _recipes() -> list[str]:
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


@dataclass(frozen=True)
class PoolPlace:
    """Where the members of a pool lie."""

    name: str
    folder: Path | None
    reference: str
    experts: Mapping[str, str]
    probe: Path | None
    exemplars: Path | None
    variants_on: Sequence[str] | None

    def evaluation(self, suite: ExperimentSuite) -> dict[str, Any]:
        """`evaluate:` or `command:` of the repair: section for this pool."""
        section = suite.section
        if section.command is not None:
            return {"command": self._placed(section.command)}
        assert section.evaluate is not None
        files = ("data", "splits", "pool")
        found = {}
        for key, value in section.evaluate.items():
            value = self._placed(value) if isinstance(value, str) else value
            own = suite.folder / Path(value).expanduser() if isinstance(value, str) else None
            placed = {"suite": own is not None and own.is_file(), "judge": value != "keyword"}
            beside = own is not None and placed.get(key, key in files)
            found[key] = str(own) if beside else value
        return {"evaluate": found}

    def _placed(self, text: str) -> str:
        if "{pool}" in text and self.folder is None:
            raise RecipeError(f"{self.name}: {text!r} says {{pool}}, but the pool has no path:.")
        return text.replace("{pool}", str(self.folder))


@dataclass(frozen=True)
class RepairSetting:
    """One setting of the repair: its kind, its name, what it changes, and its seeds."""

    kind: RunKind
    name: str
    repair: Mapping[str, Any]
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class ExperimentSuite:
    """A checked suite, with the folder that its relative paths are looked for in."""

    section: SuiteSection
    folder: Path
    given_pools: tuple[Path, ...] = ()

    @property
    def key(self) -> str:
        """Names what is run on each pool; pools can be added to a store."""
        usual = {"device"} if self.section.device == "cpu" else set()
        usual |= {"probes"} if self.section.probes is None else set()
        methods = (*self.anchors, *self.baselines)
        files = [m.content() for m in methods if m.recipe and _is_file(m.recipe)]
        return content_key([self.section.model_dump(exclude={"pools", *usual}), *files])

    @property
    def anchors(self) -> list[MethodSection]:
        return [self._method(each) for each in self.section.anchors]

    @property
    def baselines(self) -> list[MethodSection]:
        return [self._method(each) for each in self.section.baselines]

    def _method(self, given: str | MethodSection) -> MethodSection:
        found = given
        if isinstance(found, str):
            found = MethodSection(name=found, recipe=found, seeds=[0])
        return found.model_copy(update={"seeds": found.seeds[: self.section.most_seeds]})

    @property
    def _constants(self) -> dict[str, Any]:
        return {str(name): value for name, value in self.section.constants.items()}

    @property
    def default(self) -> RepairSetting:
        return RepairSetting("default", "default", self._constants)

    def variants(self) -> Iterator[RepairSetting]:
        """Every setting besides the default, in the order of the paper's sections."""
        repairs, usual = self.section.repairs, self._constants
        kinds: tuple[RunKind, ...] = ("ablation", "control", "view", "order")
        for kind in kinds:
            for name in getattr(repairs, kind):
                seeds = VARIANTS[name].seeds[: self.section.most_seeds]
                yield RepairSetting(kind, name, {**usual, "variant": name}, seeds)
        for constant, values in repairs.sweep.items():
            for value in values:
                yield RepairSetting("sweep", f"{constant}={value:g}", {**usual, constant: value})
        for name, changes in repairs.ours.items():
            yield RepairSetting("ours", name, {**usual, **changes})

    def pools(self) -> list[PoolPlace]:
        """The pools: those given beside the suite, else the suite's own."""
        listed: Sequence[str | PoolSection] = [str(path.absolute()) for path in self.given_pools]
        listed = listed or self.section.pools
        if not listed:
            raise RecipeError(
                f"{self.section.name}: names no pools; pass --pool FOLDER, once for each."
            )
        return [
            self._place(PoolSection(path=each) if isinstance(each, str) else each)
            for each in listed
        ]

    def _place(self, pool: PoolSection) -> PoolPlace:
        shipped = pool.path == "nano" and not (self.folder / "nano").exists()
        folder = (
            POOL if shipped else self.folder / Path(pool.path).expanduser() if pool.path else None
        )
        if folder is not None and not folder.is_dir():
            raise RecipeError(f"{pool.path}: no such pool folder (looked for {folder}).")
        reference, experts = pool.reference, pool.experts
        if folder is not None:
            folder = folder.resolve()
            reference = str(folder / (reference or "reference"))
            experts = {name: str(folder / place) for name, place in
                       (experts or self._found(folder)).items()}  # fmt: skip
        assert reference is not None and experts is not None
        beside = folder or self.folder
        probe, exemplars = (
            pool.probe or self.section.probe,
            pool.exemplars or self.section.exemplars,
        )
        name = pool.name or ("nano" if shipped else Path(str(pool.path)).name)
        return PoolPlace(
            name=name,
            folder=folder,
            reference=reference,
            experts=experts,
            probe=beside / probe if probe else None,
            exemplars=beside / exemplars if exemplars else None,
            variants_on=pool.variants_on or self.section.variants_on,
        )

    def _found(self, folder: Path) -> dict[str, str]:
        """The experts of a pool's folder: those the suite lists, else all but the reference."""
        here = sorted(f.parent.name for f in folder.glob("*/config.json"))
        names = self.section.experts or [name for name in here if name != "reference"]
        if missing := [name for name in ("reference", *names) if name not in here]:
            raise RecipeError(
                f"{folder}: no checkpoint called {', '.join(missing)} in it; a pool is a folder "
                "with reference/ and one folder for each expert."
            )
        return {name: name for name in names}


def load_suite(
    source: Path | str | Mapping[str, Any], pools: Sequence[Path] = ()
) -> ExperimentSuite:
    """A shipped suite by its name, a user's by its file, or one given in Python."""
    folder = Path.cwd()
    if isinstance(source, Mapping):
        data, where = dict(source), "suite"
    else:
        shipped = {file.stem: file for file in sorted(SHIPPED_EXPERIMENTS.glob("*.yaml"))}
        known = str(source) in shipped and not Path(source).is_file()
        file = shipped[str(source)] if known else Path(source).expanduser()
        if not is_there(file):
            hint = did_you_mean(str(source), shipped)
            raise RecipeError(f"{source}: no such suite file or shipped suite; {hint}")
        data, where = read_yaml(file, "a suite in YAML", RecipeError), str(source)
        # What a shipped suite names lies where the command is run.
        folder = folder if known else file.resolve().parent
    if not isinstance(data, dict):
        raise RecipeError(f"{where}: a suite is a mapping with name:, pools:, anchors:, …")
    data |= {key: _beside(data[key], folder) for key in ("anchors", "baselines") if key in data}
    try:
        section = SuiteSection.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"{where}: the suite cannot be run:", _problems(error)) from None
    return ExperimentSuite(section, folder, tuple(pools))


SUITE_SECTIONS: dict[str, type[BaseModel]] = {
    "pools": PoolSection, "anchors": MethodSection, "baselines": MethodSection,
    "repairs": RepairsSection,
}  # fmt: skip


def _problems(error: ValidationError) -> list[str]:
    """One sentence for each place that is wrong."""
    found: dict[str, list[Any]] = {}
    for item in error.errors():
        # pydantic's names of alternatives stand among the keys and numbers.
        place = [p for p in item["loc"] if p not in ("str", "[key]") and "[" not in str(p)]
        # A mapping is no name either, but what is wrong with it is said at its own keys.
        if not (item["loc"][-1:] == ("str",) and isinstance(item["input"], dict)):
            found.setdefault(".".join(map(str, place)), []).append(item)
    return [_sentence(place, items) for place, items in found.items()]


def _sentence(place: str, items: Sequence[Any]) -> str:
    first, kinds = items[0], {item["type"] for item in items}
    section, *inner = place.split(".")
    known = (SUITE_SECTIONS.get(section, SuiteSection) if inner else SuiteSection).model_fields
    if "model_type" in kinds:
        own = SUITE_SECTIONS[section].model_fields
        name = "a name or " if len(items) > 1 else ""
        text = f"must be {name}a mapping with {', '.join(own)}, not {shown(first['input'])}"
    elif "too_short" in kinds:
        text = "must not be empty"
    elif first["loc"][-1:] == ("[key]",):
        text = unknown("constant", first["input"], SWEPT_CONSTANTS)
    else:
        text = worded(items, known).replace("a valid dictionary", "a mapping")
        text = text.replace("a valid integer", "an integer").replace("a valid ", "a ")
    return f"{place}: {text}" if place else text
