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
        describe,
        diff,
        evaluate,
        extract,
        inspect,
        merge,
        merge_several,
        profile,
        repair,
        replay,
        report,
        run,
        search,
        suite,
        tune,
        verify,
    )
    from sigmerge.operators.plugin import parameter
    from sigmerge.operators.table import register as operator
    from sigmerge.recipe import load_recipe

    __version__: str

__all__ = [
    "aggregate",
    "analyze",
    "anchors",
    "capture",
    "deficits",
    "demo",
    "describe",
    "diff",
    "evaluate",
    "extract",
    "inspect",
    "load_recipe",
    "merge",
    "merge_several",
    "operator",
    "parameter",
    "profile",
    "repair",
    "replay",
    "report",
    "run",
    "search",
    "suite",
    "tune",
    "verify",
]

_HOMES = {
    **dict.fromkeys(__all__, "sigmerge.api"),
    "load_recipe": "sigmerge.recipe",
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
