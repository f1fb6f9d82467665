"""The command line: flags, printing, exit codes. No maths, no decisions."""

from sigmerge.cli.main import main

__all__ = ["main"]
