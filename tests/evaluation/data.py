"""Where tests find the real benchmark files, which are not part of the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("SIGMERGE_DATA") or Path(__file__).parents[3] / "shared/data")
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no benchmark files at {DATA}; set SIGMERGE_DATA to their folder"
)
