"""sigmerge: merge fine-tuned checkpoints of one reference model, then repair the merge.

The verbs of the command line are functions here: `sigmerge.merge(recipe, out)`, …. `import
sigmerge` alone loads nothing; a verb is imported when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sigmerge.api import (
        aggregate,
        capture,
        deficits,
        demo,
        evaluate,
        merge,
        profile,
        repair,
        replay,
        report,
        run,
        search,
        tune,
        verify,
    )
    from sigmerge.recipe import load_recipe

_HOMES = {
    **dict.fromkeys(
        ("aggregate", "capture", "deficits", "demo", "evaluate", "merge", "profile", "repair",
         "replay", "report", "run", "search", "tune", "verify"),
        "sigmerge.api",
    ),
    "load_recipe": "sigmerge.recipe",
}  # fmt: skip

__all__ = [
    "aggregate",
    "capture",
    "deficits",
    "demo",
    "evaluate",
    "load_recipe",
    "merge",
    "profile",
    "repair",
    "replay",
    "report",
    "run",
    "search",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("sigmerge")
    if name not in _HOMES:
        raise AttributeError(f"module 'sigmerge' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
