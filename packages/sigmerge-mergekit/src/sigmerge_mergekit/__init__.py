"""mergekit's commands: `mergekit-NAME …` is `sigmerge mergekit NAME …`."""

from __future__ import annotations

import sys
from pathlib import Path


def command() -> None:
    """The command under whose name this was called."""
    from sigmerge.cli import main

    called = Path(sys.argv[0]).name.removesuffix(".exe")
    sys.argv[:1] = ["sigmerge", "mergekit", called.removeprefix("mergekit-")]
    main()
