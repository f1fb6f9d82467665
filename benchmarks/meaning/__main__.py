"""`python -m benchmarks.meaning PART`: make a section of docs/results/weights.md anew."""

from __future__ import annotations

import sys
from importlib import import_module

PARTS = ("adapters", "stacks")


def main(words: list[str]) -> int:
    if len(words) != 1 or words[0] not in PARTS:
        print(f"usage: python -m benchmarks.meaning {'|'.join(PARTS)}", file=sys.stderr)
        return 2
    return int(import_module(f"benchmarks.meaning.{words[0]}").main())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
