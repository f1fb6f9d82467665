"""Shared set-up. jaxtyping shapes in the maths are checked at every call while tests run."""

from jaxtyping import install_import_hook

install_import_hook("sigmerge.method", "beartype.beartype")
