"""What pools of 8 B to 405 B parameters take on several machines, computed from measured speeds.

    python -m benchmarks.scale            prints docs/scale.md
    python -m benchmarks.scale --write    writes it

Nothing runs: the speeds are those of `sigmerge.engine.speed`, which names where they were measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sigmerge.checkpoints.prefetch import AHEAD_BYTES
from sigmerge.engine.speed import DISK, SPEEDS, seconds
from sigmerge.messages import duration

DOCUMENT = Path("docs/scale.md")
EXPERTS = 5
BYTES = 2
PASSES = {"linear": 1.0, "task_arithmetic": 1.0, "dare_ties": 1.0, "ties": 4.25 / 2}
"""Over the members, as docs/results/scaling.md counts them."""
REPAIR_READ = 4.5 * EXPERTS + 2 * (EXPERTS + 2)
"""Bytes a coordinate that a repair's passes read, the anchor included."""


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    inner: int
    layers: int
    shared: int = 1024
    vocabulary: int = 128256

    @property
    def block(self) -> int:
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.shared
        return attention + 3 * self.hidden * self.inner + 2 * self.hidden

    @property
    def coordinates(self) -> int:
        return self.layers * self.block + (2 * self.vocabulary + 1) * self.hidden


MODELS = (
    Model("8 B", 4096, 14336, 32),
    Model("70 B", 8192, 28672, 80),
    Model("405 B", 16384, 53248, 126),
)


@dataclass(frozen=True)
class Place:
    """`path`: bytes a second from where the inputs lie to where they are passed over, and back."""

    name: str
    cores: int
    path: float
    memory: float
    nodes: int = 1
    gpus: int = 0
    driver: float = 0.0
    """Bytes a second that pass through one machine: digests of inputs, values of the result."""


NETWORK = 25e9 / 8
PLACES = (
    Place("2 cores, 25 GB", 2, DISK, 25e9),
    Place("16 cores, 125 GB", 16, DISK, 125e9),
    Place("1 GPU", 16, DISK, 125e9, gpus=1),
    Place("8 GPUs", 128, 8 * DISK, 1000e9, gpus=8),
    Place("Ray, 8 nodes of 16 cores", 16, NETWORK, AHEAD_BYTES, nodes=8, driver=NETWORK),
)


def read(model: Model, what: str, *, passes: bool) -> float:
    """Bytes of the members that are read: once, or in all passes."""
    members = EXPERTS + {"linear": 0, "repair": 2}.get(what, 1)
    each = members * BYTES
    if passes:
        each = REPAIR_READ if what == "repair" else each * PASSES[what]
    return each * model.coordinates


def bound(place: Place, model: Model, what: str) -> tuple[float, str]:
    """The longest of what has to happen, and what that is."""
    result = BYTES * model.coordinates
    block = (EXPERTS + 2) * BYTES * model.block
    held = bool(place.driver) and what == "repair"  # the members of a block that is no file
    moved = read(model, what, passes=block > place.memory and not held)
    parts = {"reading and writing": (moved + result) / (place.path * place.nodes)}
    if not place.gpus:
        own = seconds(what, model.coordinates // place.nodes, EXPERTS, place.cores)
        parts["computing"] = own
    if place.driver:
        parts["the driver"] = (read(model, what, passes=False) + result) / place.driver
    name = max(parts, key=lambda part: parts[part])
    return parts[name], name


def memory(model: Model, what: str, threads: int) -> tuple[float, float]:
    """Bytes of the program's own, and of remote members that it holds."""
    tile, chunk = 65536, 32 * 65536
    scratch = threads * ((EXPERTS + 4) * 4 * tile + 3 * EXPERTS * 65536 * 8)
    held = float(threads * (EXPERTS + 1) * chunk * 4)
    own = 0.25e9 + scratch
    if what == "repair":
        own, held = own + model.block, float((EXPERTS + 2) * BYTES * model.block)
    return own, held


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f}" if count < 1e11 else f"{count / 1e9:,.0f}"


def table(head: list[str], rows: list[list[str]], left: int = 1) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * left + "--:|" * (len(head) - left)
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def page() -> Iterator[str]:
    names = [model.name for model in MODELS]
    yield from INTRODUCTION.strip().splitlines()
    sizes = {
        "coordinates, 10⁹": [f"{m.coordinates / 1e9:.1f}" for m in MODELS],
        "of them in a block, 10⁹": [f"{m.block / 1e9:.2f}" for m in MODELS],
        "five experts and the reference": [gigabytes(6 * BYTES * m.coordinates) for m in MODELS],
        "the result": [gigabytes(BYTES * m.coordinates) for m in MODELS],
        **{
            f"read in all passes: {what}": [gigabytes(read(m, what, passes=True)) for m in MODELS]
            for what in (*PASSES, "repair")
        },
    }
    yield from table(["GB", *names], [[name, *values] for name, values in sizes.items()])
    yield from MEMORY.strip().splitlines()
    rows = []
    for what, threads in (("merge", 2), ("merge", 16), ("repair", 16)):
        cells = [memory(model, what, threads) for model in MODELS]
        title = f"{what}, {threads} threads"
        rows.append([f"{title}: own", *(gigabytes(own) for own, _ in cells)])
        rows.append([f"{title}: held", *(gigabytes(held) for _, held in cells)])
    yield from table(["GB", *names], rows)
    yield from TIMES.strip().splitlines()
    speeds = [[name, f"{speed.core:g}", f"{speed.waiting:g}"] for name, speed in SPEEDS.items()]
    yield from table(["ns a coordinate", "of a core", "waiting"], speeds)
    assumed = {"disk": f"{DISK / 1e9:g}", "network": f"{NETWORK / 1e9:.1f}",
               "ahead": f"{AHEAD_BYTES >> 30}"}  # fmt: skip
    yield from ASSUMED.format(**assumed).strip().splitlines()
    rows = []
    for place in PLACES:
        for what in ("linear", "ties", "repair"):
            found = [bound(place, model, what) for model in MODELS]
            rows.append([place.name, what, *(f"{duration(t)}, {why}" for t, why in found)])
    yield from table(["machine", "method", *names], rows, left=2)
    yield from END.strip().splitlines()


INTRODUCTION = """
# Scale

`python -m benchmarks.scale --write` wrote this page. It computes: no pool of this size was merged.
Models have the shapes of Llama 3.1, weights of 16 bits, five experts. `--dry-run` prints bytes,
memory and an estimate of the time for a recipe, with the cores of the machine that it runs on.

## Bytes

GB are 10⁹ bytes. Passes are counted in [results/scaling.md](results/scaling.md). Where a block of
all members fits in memory, the passes over it after the first come from there, and the disk is read
once; `scope: model` of TIES reads everything once before.
"""
MEMORY = """
## Memory

*Own* is what the program allocates. Loops read local files strip by strip, and hold nothing of
them; *held* is what comes to it where members lie in a remote store, or a process may not open all
files of the pool at once: what is asked for is then read whole. A merge holds tiles and chunks,
whatever the size of the model. A repair holds one byte for every coordinate of a block, its owner;
claims and updates pass over the block in tiles. So at 405 B, with a block of 3.19 · 10⁹
coordinates, it needs 3.6 GB of its own; of members in a remote store it holds a block, another
45 GB, for every task of a cluster. If all passes over a local block after the first are to come
from the page cache, that needs as much room.
`--dry-run` counts all of it as the peak.
"""
TIMES = """
## Time

Measured, with five experts: what a core computes, and where threads wait for one another. The
merges and the repair on 16 cores ([results/scaling.md](results/scaling.md): CPU seconds; wall
seconds less a sixteenth of those and 0.4 seconds of start-up), the profile on 2 cores
([results/repair.md](results/repair.md)). Both pages name their commands, and are of 1.59 and 0.43 ·
10⁹ coordinates: everything here is their multiple.
"""
ASSUMED = """
Measured too: {disk} GB/s from and to a disk (the floor of [results/repair.md](results/repair.md)).
Assumed: the same disk on all machines, and eight of them beside eight GPUs; {network} GB/s of
network a node (25 Gbit/s). Each time is the longest of what has to happen, as if all else went on
meanwhile: reading and writing (once where a block fits the memory; from object storage every pass
of a merge, since {ahead} GiB are read ahead and such blocks do not stay), computing, and on a
cluster what passes through the driver, which hashes the inputs and writes the result. The cluster
reads object storage. What a GPU computes is not on this page: its rows are bounds by the disk, and
nothing here drives eight at a time.
"""
END = """
On one machine the disk decides from 16 cores on, and memory whether it is read once. On a cluster
the driver does: it reads every input once for its digest, unless an earlier run has noted it, and
writes all blocks.
"""


def main() -> None:
    text = "\n".join(page()) + "\n"
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
