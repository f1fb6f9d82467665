"""Commands that show, check and remove what is kept between runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import click

from sigmerge.cli.app import examples, group
from sigmerge.cli.declared import Option
from sigmerge.cli.flags import Flags, command
from sigmerge.messages import duration, size

cache = group(
    "cache",
    help="Show, check or remove what is kept between runs.",
    epilog=(
        "Entries lie in the user's cache (SIGMERGE_CACHE names another place) and in the folder "
        ".sigmerge beside a pool's members. SIGMERGE_CACHE_SIZE bounds each place, as 20G; what "
        "was used longest ago goes first."
    ),
)

Pools = Annotated[
    list[Path] | None,
    Option("--pool", help="Also what lies beside the members of this folder; repeatable."),
]


@command(name="list", of=cache, epilog=examples("sigmerge cache list --pool pool/"))
def cache_list(flags: Flags, pool: Pools = None) -> None:
    """Print every entry: what, of which checkpoint, size, age, and what made it."""
    from sigmerge.jobs.cache import listing

    flags.emit(listing(pool or ()), _lines)


@command(name="verify", of=cache, epilog=examples("sigmerge cache verify"))
def cache_verify(flags: Flags, pool: Pools = None) -> None:
    """Read every entry and name those that are damaged; no run uses these. Exit code 4 if any."""
    from sigmerge.jobs.cache import listing

    found = listing(pool or (), verify=True)
    flags.emit(found, _verified_lines)
    if found.damaged:
        raise click.exceptions.Exit(4)


@command(
    name="prune",
    of=cache,
    epilog=examples(
        "sigmerge cache prune --older-than 30d", "sigmerge cache prune --larger-than 2GB"
    ),
)
def cache_prune(
    flags: Flags,
    older_than: Annotated[
        str | None, Option("--older-than", help="Not used for so long, as 30d or 12h.")
    ] = None,
    larger_than: Annotated[
        str | None, Option("--larger-than", help="Larger than this, as 500MB or 2GB.")
    ] = None,
    pool: Pools = None,
) -> None:
    """Remove entries that are old, or large, or damaged.

    With both options those that are old and large; damaged ones always.
    """
    from sigmerge.jobs.cache import prune

    done = prune(pool or (), older_than=older_than, larger_than=larger_than)
    flags.emit(done, _lines)


@command(
    name="clear",
    of=cache,
    epilog=examples("sigmerge cache clear", "sigmerge cache clear --pool pool/"),
)
def cache_clear(flags: Flags, pool: Pools = None) -> None:
    """Remove all entries. Nothing is lost but the time to make them again."""
    from sigmerge.jobs.cache import clear

    flags.emit(clear(pool or ()), _lines)


def _lines(found: Any) -> Iterator[str]:
    now = time.time()
    for entry in sorted(found.entries, key=lambda entry: (entry.name, entry.of, entry.made)):
        libraries = ", ".join(f"{name} {number}" for name, number in entry.runtime.items())
        facts = [
            size(entry.bytes),
            f"made {duration(max(now - entry.made, 0))} ago",
            f"used {duration(max(now - entry.used, 0))} ago",
            *([f"under {libraries}"] if libraries else []),
            *([] if entry.sound else ["damaged"]),
        ]
        yield f"{entry.name} of {entry.of or 'no model'}: {', '.join(facts)}"
    number = len(found.entries)
    count = f"{number:,} {'entry' if number == 1 else 'entries'}, {size(found.bytes)}"
    if found.removed:
        yield f"removed {count}"
    else:
        yield f"{count} in {', '.join(map(str, found.roots))}; each may hold {size(found.limit)}"


def _verified_lines(found: Any) -> Iterator[str]:
    for entry in found.damaged:
        yield f"damaged: {entry.name} of {entry.of or 'no model'} ({entry.files[0]})"
    yield f"{len(found.entries) - len(found.damaged):,} of {len(found.entries):,} entries are whole"
    if found.damaged:
        yield "sigmerge cache prune removes the damaged ones; what needs them makes them again"
