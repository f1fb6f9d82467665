"""`python -m sigmerge` is the command `sigmerge`."""

from sigmerge.cli import main

main()
