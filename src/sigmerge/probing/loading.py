"""What to say when transformers does not load a checkpoint."""

from __future__ import annotations

from pathlib import Path

from sigmerge.errors import PoolError


def unloadable(folder: Path | str, purpose: str, error: Exception) -> PoolError:
    """The error of a checkpoint that cannot be loaded, in our words where its own code is asked."""
    if "trust_remote_code" in str(error):
        return PoolError(
            f"{folder} brings Python code of its own, which is not run unasked. Read it; if you "
            "trust it, pass --trust-remote-code."
        )
    return PoolError(f"{folder} cannot be loaded for {purpose}: {error}")
