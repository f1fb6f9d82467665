"""`models: {glob: run/step-*}`: the checkpoints of one run, with weights by a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.blocks import natural
from sigmerge.checkpoints.plain import PIPELINE, WEIGHTS
from sigmerge.method.trajectories import weights
from sigmerge.recipe.sections import TrajectorySection


def checkpoints(section: TrajectorySection, folder: Path) -> list[Path]:
    """The checkpoints that a pattern matches, from the oldest to the newest by their numbers.

    As with other paths, what lies where the command runs goes before what lies beside the recipe.
    """
    pattern = Path(section.glob).expanduser()
    roots = [Path(pattern.anchor)] if pattern.is_absolute() else [Path.cwd(), folder]
    inside = str(pattern.relative_to(pattern.anchor)) if pattern.is_absolute() else str(pattern)
    for root in roots:
        found = sorted(filter(_is_model, root.glob(inside)), key=lambda path: natural(str(path)))
        if found:
            return found[-section.last :] if section.last else found
    return []


def entries(section: TrajectorySection, models: Sequence[str]) -> list[dict[str, Any]]:
    """What `models:` would list: every checkpoint with its weight, where a schedule gives one."""
    if section.schedule is None:
        return [{"model": model} for model in models]
    given = weights(section.schedule, len(models), section.decay)
    return [
        {"model": model, "parameters": {"weight": weight}}
        for model, weight in zip(models, given, strict=True)
    ]


def _is_model(path: Path) -> bool:
    if path.is_dir():
        return (path / "config.json").exists() or (path / PIPELINE).exists()
    return path.suffix in WEIGHTS
