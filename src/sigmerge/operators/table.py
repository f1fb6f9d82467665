"""The table of operators. One line a name; a module is imported when its operator is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from sigmerge.errors import RecipeError
from sigmerge.operators.base import Operator, Parameter
from sigmerge.operators.plugin import PLUGINS, TileFunction, TileOperator
from sigmerge.words import unknown

OPERATORS = {
    "linear": "linear:Linear",
    "task_arithmetic": "task_arithmetic:TaskArithmetic",
    "ties": "ties:Ties",
    "dare_linear": "dare:DareLinear",
    "dare_ties": "dare:DareTies",
    "della_linear": "della:DellaLinear",
    "della": "della:Della",
    "breadcrumbs": "breadcrumbs:Breadcrumbs",
    "breadcrumbs_ties": "breadcrumbs:BreadcrumbsTies",
    "model_stock": "model_stock:ModelStock",
    "sce": "sce:Sce",
    "slerp": "slerp:Slerp",
    "nuslerp": "slerp:NuSlerp",
    "multislerp": "slerp:MultiSlerp",
    "karcher": "karcher:Karcher",
    "arcee_fusion": "arcee_fusion:ArceeFusion",
    "nearswap": "nearswap:NearSwap",
    "ram": "ram:Ram",
    "ramplus_tl": "ram:RamPlus",
    "passthrough": "passthrough:Passthrough",
    "cabs": "cabs:Cabs",
    "fisher": "fisher:Fisher",
    "regmean": "regmean:RegMean",
    "cat": "cat:Cat",
    "lot": "lot:Lot",
    "lines": "lines:Lines",
    "iso_c": "spectral:IsoC",
    "iso_cts": "spectral:IsoCts",
    "tsv": "spectral:Tsv",
    "boost": "spectral:Boost",
    "wudi": "wudi:Wudi",
    "knots": "knots:Knots",
    "pcb": "pcb:Pcb",
    "consensus": "masks:Consensus",
    "localize_stitch": "masks:LocalizeStitch",
}
NOT_MERGEKITS = (
    "cabs", "fisher", "regmean", "cat", "lot", "lines", "iso_c", "iso_cts", "tsv", "boost", "wudi",
    "knots", "pcb", "consensus", "localize_stitch",
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


def operator(name: str, on: str | None = None) -> Operator:
    """Return the operator of that name; `on` is the operator that LiNeS scales."""
    if name not in OPERATORS:
        found = PLUGINS.find(name)
        if found is None:
            raise RecipeError(f"merge_method: {unknown('operator', name, names())}")
        return found
    module, _, attribute = OPERATORS[name].partition(":")
    made = getattr(import_module(f"sigmerge.operators.{module}"), attribute)
    if name != "lines":
        return made()
    if on == "lines":
        raise RecipeError("parameters.on: lines cannot stand on lines.")
    return made(operator(on or "task_arithmetic"))


def register(
    name: str,
    *,
    parameters: Sequence[Parameter] = (),
    vectors: bool = True,
    whole: bool = False,
    title: str | None = None,
    paper: str = "",
) -> Callable[[TileFunction], TileOperator]:
    """Make an operator of a function over tiles; recipes use it as `merge_method: name`.

    The function is called with a `Tile` and the tensor's `Site`, and fills `tile.out`. The rows of
    `tile.experts` are the task vectors, or with vectors=False the experts' values. With whole=True
    a tile is a whole tensor, else an arbitrary part of one. It is called from several threads, and
    must return the same values for the same tile.
    """
    if not isinstance(name, str):
        raise RecipeError('An operator needs a name: write @sigmerge.operator("name").')
    if not name.isidentifier() or name in BUILT_IN:
        raise RecipeError(
            f"{name!r} cannot name an operator: a name is a Python identifier, and none of "
            f"{', '.join(BUILT_IN)}."
        )

    def registered(function: TileFunction) -> TileOperator:
        made = TileOperator(
            name, function, parameters, vectors=vectors, whole=whole,
            title=title or name.replace("_", " "), paper=paper or "of your own",
        )  # fmt: skip
        PLUGINS.add(made)
        return made

    return registered
