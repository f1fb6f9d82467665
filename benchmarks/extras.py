"""What an installation takes: python -m benchmarks.extras, where `sigmerge-llm[all]` is installed.

For the core and each extra, the distributions that it brings with all that they need in turn, and
their bytes on the disk, as pip recorded them. An extra has the core in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sigmerge
from sigmerge.errors import DISTRIBUTION

LEFT_OUT = {"dev", "docs", "vllm"}  # those of developers, and one that needs a GPU


def needed(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """The distributions that one brings, itself too."""
    if (name, extras) in seen:
        return set()
    seen.add((name, extras))
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return set()
    wanted = {canonicalize_name(name)}
    for one in map(Requirement, found.requires or []):
        markers = [{"extra": extra} for extra in extras or {""}]
        if one.marker is None or any(one.marker.evaluate(each) for each in markers):
            wanted |= needed(one.name, frozenset(one.extras), seen)
    return wanted


def on_disk(found: Distribution) -> int:
    if found.name == DISTRIBUTION:  # an editable installation records none of its files
        package = Path(sigmerge.__file__).parent
        return sum(
            f.stat().st_size for f in package.rglob("*") if f.suffix != ".pyc" and f.is_file()
        )
    files = (Path(str(file.locate())) for file in found.files or [] if file.suffix != ".pyc")
    return sum(file.stat().st_size for file in files if file.is_file())


def table() -> Iterator[str]:
    yield "| extra | distributions | MB |"
    yield "| --- | ---: | ---: |"
    extras = distribution(DISTRIBUTION).metadata.get_all("Provides-Extra") or []
    for extra in ["", *(one for one in extras if one not in LEFT_OUT)]:
        names = needed(DISTRIBUTION, frozenset({extra} - {""}), set())
        total = sum(on_disk(distribution(name)) for name in names)
        yield f"| {extra or 'core'} | {len(names)} | {total / 1e6:.0f} |"


if __name__ == "__main__":
    print("\n".join(table()))
