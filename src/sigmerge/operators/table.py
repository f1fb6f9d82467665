"""The table of operators. One line a name; a module is imported when its operator is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from sigmerge.errors import RecipeError
from sigmerge.messages import unknown
from sigmerge.operators.base import Operator, Parameter
from sigmerge.operators.plugin import PLUGINS, TileFunction, TileOperator, class_operator

OPERATORS = {
    "linear": "sigmerge.operators.linear:Linear",
    "task_arithmetic": "sigmerge.operators.task_arithmetic:TaskArithmetic",
    "ties": "sigmerge.operators.ties:Ties",
    "dare_linear": "sigmerge.operators.dare:DareLinear",
    "dare_ties": "sigmerge.operators.dare:DareTies",
    "della_linear": "sigmerge.operators.della:DellaLinear",
    "della": "sigmerge.operators.della:Della",
    "breadcrumbs": "sigmerge.operators.breadcrumbs:Breadcrumbs",
    "breadcrumbs_ties": "sigmerge.operators.breadcrumbs:BreadcrumbsTies",
    "model_stock": "sigmerge.operators.model_stock:ModelStock",
    "sce": "sigmerge.operators.sce:Sce",
    "slerp": "sigmerge.operators.slerp:Slerp",
    "nuslerp": "sigmerge.operators.slerp:NuSlerp",
    "multislerp": "sigmerge.operators.slerp:MultiSlerp",
    "karcher": "sigmerge.operators.karcher:Karcher",
    "arcee_fusion": "sigmerge.operators.arcee_fusion:ArceeFusion",
    "nearswap": "sigmerge.operators.nearswap:NearSwap",
    "ram": "sigmerge.operators.ram:Ram",
    "ramplus_tl": "sigmerge.operators.ram:RamPlus",
    "passthrough": "sigmerge.operators.passthrough:Passthrough",
    "cabs": "sigmerge.operators.cabs:Cabs",
    "fisher": "sigmerge.operators.fisher:Fisher",
    "regmean": "sigmerge.operators.regmean:RegMean",
    "cat": "sigmerge.operators.cat:Cat",
    "lot": "sigmerge.operators.lot:Lot",
    "lines": "sigmerge.operators.lines:Lines",
    "blend": "sigmerge.operators.blend:Blend",
    "iso_c": "sigmerge.operators.spectral:IsoC",
    "iso_cts": "sigmerge.operators.spectral:IsoCts",
    "tsv": "sigmerge.operators.spectral:Tsv",
    "boost": "sigmerge.operators.spectral:Boost",
    "wudi": "sigmerge.operators.wudi:Wudi",
    "knots": "sigmerge.operators.knots:Knots",
    "pcb": "sigmerge.operators.pcb:Pcb",
    "consensus": "sigmerge.operators.masks:Consensus",
    "localize_stitch": "sigmerge.operators.masks:LocalizeStitch",
}
NOT_MERGEKITS = (
    "cabs", "fisher", "regmean", "cat", "lot", "lines", "blend", "iso_c", "iso_cts", "tsv",
    "boost", "wudi", "knots", "pcb", "consensus", "localize_stitch",
)  # fmt: skip

MERGEKIT = tuple(name for name in OPERATORS if name not in NOT_MERGEKITS)
"""Operators that mergekit has too."""

BUILT_IN = (*OPERATORS, "checkpoint")
"""Names that users' operators cannot have."""


def names() -> tuple[str, ...]:
    """All operators: the table's, then those that users registered or installed."""
    plugins = PLUGINS.names()
    if taken := next((name for name in plugins if name in BUILT_IN), None):
        raise RecipeError(
            f"An installed package has an operator {taken}, a name of sigmerge's own."
        )
    return (*OPERATORS, *plugins)


OF_OTHERS = {"lines": ("task_arithmetic",), "blend": ("tsv", "task_arithmetic")}
"""Operators that stand on others, and on which, where a recipe does not say."""


def operator(name: str, on: str | Sequence[str] | None = None) -> Operator:
    """Return the operator of that name; `on` is what LiNeS scales, or the parts of a blend."""
    if name not in OPERATORS:
        found = PLUGINS.find(name)
        if found is None:
            raise RecipeError(f"merge_method: {unknown('operator', name, names())}")
        return found
    module, _, attribute = OPERATORS[name].partition(":")
    made = getattr(import_module(module), attribute)
    if name not in OF_OTHERS:
        return made()
    parts = (on,) if isinstance(on, str) else tuple(on or OF_OTHERS[name])
    if name in parts:
        raise RecipeError(f"parameters.on: {name} cannot stand on {name}.")
    if len(parts) != len(OF_OTHERS[name]):
        count = len(OF_OTHERS[name])
        raise RecipeError(f"parameters.on: {name} stands on {count}, not on {len(parts)}.")
    return made(*map(operator, parts))


def register(
    name: str,
    *,
    parameters: Sequence[Parameter] = (),
    vectors: bool = True,
    whole: bool = False,
    title: str | None = None,
    paper: str = "",
) -> Callable[[TileFunction | type[Operator]], Operator]:
    """Make an operator of a function over tiles, or of a class; recipes use it as
    `merge_method: name`.

    The function is called with a `Tile` and the tensor's `Site`, and fills `tile.out`. The rows of
    `tile.experts` are the task vectors, or with vectors=False the experts' values. With whole=True
    a tile is a whole tensor, else an arbitrary part of one. It is called from several threads, and
    must return the same values for the same tile. A class says the other arguments itself.

    >>> @sigmerge.operator("average")
    ... def average(tile, site):
    ...     tile.out[:] = tile.experts.mean(axis=0)
    >>> sigmerge.Pool.open("pool").plan("average")
    Plan (merge): reads 16.9 MB, writes 2.82 MB, holds ... MB at most
    """
    if not isinstance(name, str):
        raise RecipeError('An operator needs a name: write @sigmerge.operator("name").')
    if not name.isidentifier() or name in BUILT_IN:
        raise RecipeError(
            f"{name!r} cannot name an operator: a name is a Python identifier, and none of "
            f"{', '.join(BUILT_IN)}."
        )

    def registered(function: TileFunction | type[Operator]) -> Operator:
        made: Operator
        if isinstance(function, type):
            made = class_operator(name, function)
        else:
            made = TileOperator(
                name, function, parameters, vectors=vectors, whole=whole,
                title=title or name.replace("_", " "), paper=paper or "of your own",
            )  # fmt: skip
        PLUGINS.add(made)
        return made

    return registered
