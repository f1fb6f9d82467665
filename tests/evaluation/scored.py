"""`sigmerge.evaluate`, with its result in plain values."""

from __future__ import annotations

from typing import Any

import sigmerge


def evaluate(*arguments: Any, **options: Any) -> dict[str, Any]:
    return sigmerge.evaluate(*arguments, **options).as_json()
