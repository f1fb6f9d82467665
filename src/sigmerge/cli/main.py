"""The entry point: answers signals and looks to the streams first, then loads the commands."""

from __future__ import annotations

import atexit
import gc
import os
from contextlib import suppress

from sigmerge.cli import signals, streams


def main() -> None:
    """Run the command of sys.argv; ends in SystemExit."""
    signals.leave_at_once()
    streams.stop_nothing()
    # No command needs plugins of pydantic's; it would look for them in every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if os.path.expanduser("~") == "~":  # noqa: PTH111  (nothing names a home; pathlib would raise)
        _keep_among_temporary()

    # What imports make stays. Looking for garbage among it, again and again and once more at the
    # end, takes a fifth of a short command.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)

    _allow_many_files()
    from sigmerge.cli.ending import run

    run()


def _keep_among_temporary() -> None:
    """For a user whose home nothing names, as in many containers."""
    if "SIGMERGE_CACHE" not in os.environ:
        from sigmerge.files.cache import cache_place

        with suppress(Exception):  # what it says is said by who needs the folder
            os.environ["SIGMERGE_CACHE"] = str(cache_place(""))


def _allow_many_files() -> None:
    """As many as the system lets a process open: a merge has all shards of all members open."""
    with suppress(ImportError, ValueError, OSError):  # there is no such limit, or it is fixed
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
