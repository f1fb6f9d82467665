"""The checked recipe that every command works from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sigmerge.checkpoints.adapter_folders import home_of, split_adapter
from sigmerge.checkpoints.modules import module_of
from sigmerge.files.yaml_documents import parse_yaml
from sigmerge.operators.base import Operator, Parameter, Site
from sigmerge.operators.table import MERGEKIT
from sigmerge.recipe.sections import CaptureSection
from sigmerge.recipe.settings import NEEDED, Conditions, bounded, evaluate

if TYPE_CHECKING:  # few recipes have these
    from sigmerge.checkpoints.blocks import Stack
    from sigmerge.checkpoints.pool import TensorChoice
    from sigmerge.checkpoints.vocabularies import VocabularyRequest
    from sigmerge.recipe.scored import GuideSection, RepairSection, SearchSection, TuneSection


OWN_KEYS = (
    "preset", "seed", "tensors", "match_experts", "anchor", "capture", "search", "guide", "repair",
    "tune", "output", "space", "rank",
)  # fmt: skip
"""Keys that mergekit does not have. A file with one of them is no mergekit file."""
MERGEKIT_CONFIG = "mergekit_config.yml"
"""Where a result has a recipe that mergekit reads."""


@dataclass(frozen=True)
class RecipeModel:
    name: str
    path: Path
    parameters: Mapping[str, Any]
    exemplars: Path | None = None
    parts: Mapping[str, Mapping[str, Any]] | None = None
    """The modules that it is merged into, with its parameters there; None: it is everywhere."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Its parameters as the recipe writes them."""


@dataclass(frozen=True)
class AdapterRequest:
    """`output: adapter`: in which coordinates adapters are merged, and the result's largest rank,
    where it is bounded."""

    space: Literal["core", "knots"] = "core"
    rank: int | None = None


@dataclass(frozen=True)
class RecipeSource:
    """The layers `first` … `last` − 1 of a model, as one source of a slice."""

    model: str
    path: Path
    first: int
    last: int
    parameters: Mapping[str, Any]
    written: Mapping[str, Any] = field(default_factory=dict)
    """Its parameters as the recipe writes them."""


@dataclass(frozen=True)
class RecipeSlice:
    """A run of layers of the result. `base` is the source that task vectors start from.

    `module` is the part of the model that they are layers of; "" is all of it. A `whole` slice has
    all layers of its models, however many they are.
    """

    sources: tuple[RecipeSource, ...]
    base: str | None
    parameters: Mapping[str, Any]
    module: str = ""
    whole: bool = False

    @property
    def depth(self) -> int:
        return self.sources[0].last - self.sources[0].first


@dataclass(frozen=True)
class Recipe:
    """A checked recipe. `operator` is None when the anchor is a checkpoint made elsewhere."""

    operator: Operator | None
    method: str
    reference: Path | None
    models: tuple[RecipeModel, ...]
    parameters: Mapping[str, Any]
    preset: str
    seed: int
    out_dtype: str | None
    tokenizer: Path | None
    anchor: Path | None
    repair: RepairSection | None
    folder: Path
    text: str
    notes: tuple[str, ...] = ()
    capture: CaptureSection = field(default_factory=CaptureSection)
    search: SearchSection | None = None
    tune: TuneSection | None = None
    guide: GuideSection | None = None
    chat_template: str | None = None
    slices: tuple[RecipeSlice, ...] = ()
    vocabulary: VocabularyRequest | None = None
    adapter: AdapterRequest | None = None
    """Set if the result is an adapter."""
    tensors: TensorChoice | None = None
    """What becomes of tensors that not all models have."""
    match_experts: bool = False
    """Whether experts of mixtures are brought to one order."""
    architecture: str | None = None
    """The architecture for config.json, replacing the model's own."""
    any_architecture: bool = False
    """Whether the recipe names architectures itself, so that those of the models need not agree."""
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The parameters of modules that are merged one by one."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """The parameters as the recipe writes them, those of its only module among them."""
    files: tuple[Path, ...] = ()
    """The recipe's own file, and what it names: scores, exemplars, a suite, folders of data."""

    @property
    def given(self) -> dict[str, Any]:
        """The parsed text, as the file has it."""
        return dict(parse_yaml(self.text, "recipe").value)

    @property
    def is_mergekits(self) -> bool:
        """Whether it is a file that mergekit reads too."""
        if self.method not in MERGEKIT or self.files[:1] == () or not _is_yaml(self.files[0]):
            return False
        given = self.given
        if isinstance(given.get("models"), dict):  # the checkpoints of a run
            return False
        models = [one for one in given.get("models") or () if isinstance(one, dict)]
        return not (
            {*OWN_KEYS} & given.keys() or any({"name", "exemplars"} & m.keys() for m in models)
        )

    @property
    def experts(self) -> dict[str, Path]:
        return {model.name: model.path for model in self.models}

    @property
    def members(self) -> dict[str, Path]:
        """Every model that is merged, once, under the name that errors use for it."""
        reference = [("reference", self.reference)] if self.reference else []
        sources = [(one.model, one.path) for piece in self.slices for one in piece.sources]
        named: dict[Path, str] = {}
        for name, path in (*reference, *self.experts.items(), *sources):
            named.setdefault(path, name)
        return {name: path for path, name in named.items()}

    @property
    def home(self) -> Path:
        """The folder whose tokenizer and chat template the result has."""
        return home_of(self.tokenizer or self.reference or self.models[0].path)

    @property
    def inputs(self) -> list[Path]:
        """Every folder that is read."""
        others = [path for path in (self.reference, self.tokenizer, self.anchor) if path]
        given = [*others, *self.members.values()]
        return [f for f in dict.fromkeys(p for g in given for p in split_adapter(g)) if f]

    @property
    def kept(self) -> list[Path]:
        """Every folder and file that is read: no output may replace them."""
        return [*self.inputs, *self.files]

    def site(
        self,
        tensor: str,
        size: int,
        stack: Stack,
        position: tuple[int, int] | None = None,
        having: Collection[str] | None = None,
    ) -> Site:
        """A tensor with the options that hold for it: filters and depth gradients resolved.

        Gradients run over the tensor's own stack, where `position` is its block and the depth.
        `having` are the models that have it, where not all do.
        """
        block, depth = stack.block_of(tensor), stack.depth
        t = _along(*position) if position else 0.0
        module = module_of(tensor, self.modules) if self.modules else ""
        nearer = [self.modules[module]] if module else []
        models = {
            model.name: (tensor, [(model.parts or {}).get(module, model.parameters), *nearer])
            for model in self.models
            if (model.parts is None or module in model.parts)
            and (having is None or model.name in having)
        }
        settings = self._settings(tensor, t, models, nearer)
        return Site(tensor, size, block, depth, tuple(models), settings, self.seed)

    def sliced_site(
        self,
        tensor: str,
        size: int,
        names: Mapping[str, str],
        before: bool,
        stacks: tuple[Stack, Stack],
    ) -> Site:
        """A tensor of a stacked model. `names` are those of the tensors it is made of, by expert.

        Gradients run over the slice. What lies `before` the layers belongs to the first slice, what
        lies behind them to the last. `stacks` are those of the model and of the tensor's module.
        """
        stack, own = stacks
        module = module_of(tensor, self.modules) if self.modules else ""
        pieces = [piece for piece in self.slices if piece.module == module]
        piece, t = _slice_of(pieces, own, own.block_of(tensor), before)
        nearer = [piece.parameters, *([self.modules[module]] if module else [])]
        given = {source.model: source.parameters for source in piece.sources}
        models = {model: (name, [given[model], *nearer]) for model, name in names.items()}
        settings = self._settings(tensor, t, models, nearer)
        block = stack.block_of(tensor)
        return Site(tensor, size, block, stack.depth, tuple(models), settings, self.seed)

    def _settings(
        self,
        tensor: str,
        t: float,
        models: Mapping[str, tuple[str, Sequence[Mapping[str, Any]]]],
        nearer: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Every option's value. `models` give their tensor's name and what is said nearer to them.

        `nearer` stands before the recipe's own parameters.
        """

        def found(parameter: Parameter, sources: Sequence[Mapping[str, Any]], where: str) -> Any:
            given = [s.get(parameter.name) for s in (*sources, self.parameters)]
            for setting in given:
                if (value := evaluate(setting, where, t)) is not None:
                    return bounded(parameter, value)
            if parameter.name in NEEDED and any(isinstance(s, Conditions) for s in given):
                return None  # no filter matches, and the default was not meant
            return getattr(parameter, self.preset)

        settings: dict[str, Any] = {}
        for parameter in self.operator.parameters if self.operator else ():
            if parameter.per_model:
                own = [found(parameter, sources, where) for where, sources in models.values()]
                settings[parameter.name] = tuple(own)
            else:
                settings[parameter.name] = found(parameter, nearer, tensor)
        return settings


def _is_yaml(file: Path) -> bool:
    return file.suffix in (".yaml", ".yml")


def _slice_of(
    pieces: Sequence[RecipeSlice], stack: Stack, block: int | None, before: bool
) -> tuple[RecipeSlice, float]:
    """The slice of a layer of a stack, and how far inside it lies."""
    if block is None:
        return pieces[0 if before else -1], 0.0
    left = block
    for piece in pieces:
        depth = stack.depth if piece.whole else piece.depth
        if left < depth:
            return piece, _along(left, depth)
        left -= depth
    raise IndexError(block)


def _along(block: int, depth: int) -> float:
    """Relative depth of a layer, 0 to 1; of a single layer 1."""
    return block / (depth - 1) if depth > 1 else 1.0
