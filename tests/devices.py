"""Where tests of the GPU run: there, or by Triton's interpreter on the processor."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest
import torch

_Case = TypeVar("_Case")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_programs = pytest.mark.skipif(
    DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"),
    reason="needs a GPU that torch finds, or TRITON_INTERPRET=1",
)

needs_gpu = pytest.mark.skipif(
    DEVICE == "cpu", reason="needs a GPU that torch finds: an interpreter takes too long"
)


def some(cases: Iterable[_Case], *few: _Case) -> list[_Case]:
    """All cases on a GPU, and a few of those where an interpreter takes a second for each."""
    return list(cases) if DEVICE == "cuda" else list(few)


def interpreted(patch: pytest.MonkeyPatch) -> None:
    """An interpreter runs one program at a time, and every step behind the last coordinate."""
    if DEVICE == "cuda":
        return
    patch.setattr("sigmerge.engine.gpu.AT_ONCE", 1)
    patch.setattr("sigmerge.gpu.triton_passes.UNROLL", 1)
    patch.setattr("sigmerge.gpu.triton_select.SELECT_BLOCK", 1024)
    for name, value in (("DEPTH", 4), ("COPIES", 2), ("MARK_STEPS", 1), ("COUNT_BLOCK", 4096)):
        patch.setattr(f"sigmerge.gpu.triton_claims.{name}", value)
