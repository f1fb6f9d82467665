"""The merge of `benchmarks.trust` without fsync, checksums, reading back and digests.

    python -m benchmarks.bare RECIPE OUT

The result has no digests and is good for nothing else. Nothing but the command is imported: what
another import starts, such as threads of NumPy's libraries, would count as the merge's own.
"""

import sys

from sigmerge.cli import main


def take_away() -> None:
    """Replace the parts that no option turns off, in a process that began as a merge does."""
    from sigmerge.engine.machine import load_numpy

    load_numpy()
    from sigmerge.checkpoints import write_log, writer

    writer.checksum = lambda *_: 0  # type: ignore[assignment]
    write_log.Written.read_back = (  # type: ignore[method-assign]
        lambda self, *_: ([], [""] * len(self._handles))
    )


if __name__ == "__main__":
    take_away()
    sys.argv = ["sigmerge", "merge", *sys.argv[1:3], "--no-fsync"]
    main()
