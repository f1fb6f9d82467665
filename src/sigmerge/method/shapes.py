"""Array types with the names of their dimensions, as jaxtyping spells them.

Tests load jaxtyping first and check shapes at every call. A run checks none, and does not load it:
to it, as to mypy, a type with a shape is an annotated array.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Float, Float32, Float64, Int64, UInt8, UInt32, UInt64
else:
    Float = Float32 = Float64 = Int64 = UInt8 = UInt32 = UInt64 = Annotated

__all__ = ["Float", "Float32", "Float64", "Int64", "UInt8", "UInt32", "UInt64"]
