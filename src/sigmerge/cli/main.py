"""The entry point: answers signals first, then loads the commands."""

from __future__ import annotations

from sigmerge.cli import signals


def main() -> None:
    """Run the command of sys.argv; ends in SystemExit."""
    signals.leave_at_once()

    from sigmerge.cli.ending import run

    run()
