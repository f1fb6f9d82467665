"""sigmerge: merge fine-tuned checkpoints of one reference model, then repair the merge.

The verbs of the command line are functions here: `sigmerge.merge(recipe, out)`, …. The search is
`sigmerge.commands.search.search`: `sigmerge.search` is the package of its parts.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_VERBS = {
    "merge": "sigmerge.commands.merge:merge",
    "capture": "sigmerge.commands.capture:capture",
    "profile": "sigmerge.commands.profile:profile",
    "deficits": "sigmerge.commands.repair:deficits",
    "repair": "sigmerge.commands.repair:repair",
    "replay": "sigmerge.commands.repair:replay",
    "run": "sigmerge.commands.run:run",
    "demo": "sigmerge.commands.demo:demo",
    "evaluate": "sigmerge.commands.evaluate:evaluate",
    "aggregate": "sigmerge.commands.aggregate:aggregate",
    "load_recipe": "sigmerge.recipe:load_recipe",
}

__all__ = list(_VERBS)


def __getattr__(name: str) -> Any:
    """Verbs are imported when they are used: `import sigmerge` alone loads nothing."""
    if name not in _VERBS:
        raise AttributeError(f"module 'sigmerge' has no attribute {name!r}")
    module, _, function = _VERBS[name].partition(":")
    return getattr(import_module(module), function)
