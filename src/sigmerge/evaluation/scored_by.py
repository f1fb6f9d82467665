"""The inputs of a score besides the checkpoint and the item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ScoredBy:
    """Resolved settings, the files that are read, by role, and the libraries that compute it."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
