"""sigmerge: merge fine-tuned checkpoints of one reference model, then repair the merge.

The verbs of the command line are functions here: `sigmerge.merge(recipe, out)`, …. `import
sigmerge` alone loads nothing; a verb is imported when it is used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would have to be imported
if TYPE_CHECKING:
    from typing import Any

    from sigmerge.api import (
        aggregate,
        analyze,
        anchors,
        capture,
        deficits,
        demo,
        diff,
        evaluate,
        extract,
        inspect,
        merge,
        merge_several,
        moe,
        profile,
        repair,
        replay,
        report,
        run,
        search,
        suite,
        tokens,
        tune,
        verify,
    )
    from sigmerge.methods import (
        ArceeFusion,
        Blend,
        Boost,
        Breadcrumbs,
        BreadcrumbsTies,
        Cabs,
        Cat,
        Consensus,
        DareLinear,
        DareTies,
        Della,
        DellaLinear,
        Fisher,
        IsoC,
        IsoCts,
        Karcher,
        Knots,
        Linear,
        Lines,
        LocalizeStitch,
        Lot,
        Method,
        ModelStock,
        Multislerp,
        Nearswap,
        Nuslerp,
        Passthrough,
        Pcb,
        Ram,
        RamplusTl,
        Regmean,
        Sce,
        Slerp,
        TaskArithmetic,
        Ties,
        Tsv,
        Wudi,
    )
    from sigmerge.objects import Plan, Pool, Recipe, merge_state_dicts
    from sigmerge.operators.plugin import parameter
    from sigmerge.operators.table import register as operator

    __version__: str

__all__ = [
    "ArceeFusion",
    "Blend",
    "Boost",
    "Breadcrumbs",
    "BreadcrumbsTies",
    "Cabs",
    "Cat",
    "Consensus",
    "DareLinear",
    "DareTies",
    "Della",
    "DellaLinear",
    "Fisher",
    "IsoC",
    "IsoCts",
    "Karcher",
    "Knots",
    "Linear",
    "Lines",
    "LocalizeStitch",
    "Lot",
    "Method",
    "ModelStock",
    "Multislerp",
    "Nearswap",
    "Nuslerp",
    "Passthrough",
    "Pcb",
    "Plan",
    "Pool",
    "Ram",
    "RamplusTl",
    "Recipe",
    "Regmean",
    "Sce",
    "Slerp",
    "TaskArithmetic",
    "Ties",
    "Tsv",
    "Wudi",
    "aggregate",
    "analyze",
    "anchors",
    "capture",
    "deficits",
    "demo",
    "diff",
    "evaluate",
    "extract",
    "inspect",
    "merge",
    "merge_several",
    "merge_state_dicts",
    "moe",
    "operator",
    "parameter",
    "profile",
    "repair",
    "replay",
    "report",
    "run",
    "search",
    "suite",
    "tokens",
    "tune",
    "verify",
]

_HOMES = {
    **{name: f"sigmerge.{'methods' if name[0].isupper() else 'api'}" for name in __all__},
    **dict.fromkeys(("Plan", "Pool", "Recipe", "merge_state_dicts"), "sigmerge.objects"),
    "parameter": "sigmerge.operators.plugin",
    "operator": "sigmerge.operators.table:register",
}
"""Name -> module, or module:attribute where the attribute has another name there."""


if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            return version("sigmerge-llm")
        if name not in _HOMES:
            raise AttributeError(f"module 'sigmerge' has no attribute {name!r}")
        from importlib import import_module

        module, _, attribute = _HOMES[name].partition(":")
        return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
