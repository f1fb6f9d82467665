"""A device takes many parts of a tensor at once; sums of float64 keep the order of the parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sigmerge.core import TILE
from sigmerge.core import partial_sums as kernel_parts
from sigmerge.core.merge import MARKED
from sigmerge.engine import gpu, stream
from sigmerge.engine.gpu import Gpu
from sigmerge.engine.stream import StreamChunk
from sigmerge.gpu import chunk_passes
from sigmerge.jobs import signatures
from sigmerge.operators.base import Site
from sigmerge.operators.dare import DareLinear
from sigmerge.operators.slerp import inner_products
from sigmerge.operators.thinned import Prepared
from tests.devices import DEVICE, interpreted, needs_programs, some
from tests.operators.driver import MemorySource, run, settings_of

PART, LONG = 240, 480
SIZES = (1, 397, 611)
"""Coordinates of tensors: within a chunk, and more than one of two parts."""
EXPERTS = ("math", "coding", "safety")
DENSITY = (0.3, 1.0, 0.75)


@pytest.fixture(autouse=True)
def _short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, size in (
        (stream, "TILE", 80),
        (gpu, "TILE", 80),
        (gpu, "LEAST", 0),
        (stream, "CHUNK", PART),
        (stream, "LONG_CHUNK", LONG),
    ):
        monkeypatch.setattr(module, name, size)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Noted:
    interpreted(monkeypatch)
    return Noted(DEVICE, 1 << 20)


class Noted(Gpu):
    """Notes how long the chunks are that it passes over, and does not decline."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.lengths: set[int] = set()

    def merge(self, rows: stream.StoredRows, *given: Any) -> bool:
        done = super().merge(rows, *given)
        self.lengths.update([rows.values[0].size] * done)
        return done

    def read(self, kernel: Any, rows: stream.StoredRows, *given: Any) -> bool:
        done = super().read(kernel, rows, *given)
        self.lengths.update([rows.values[0].size] * done)
        return done


def weights(seed: int = 0) -> dict[str, dict[str, Any]]:
    """Values of such different sizes that a sum shows the order in which it was added up."""
    rng = np.random.default_rng(seed)
    return {
        name: {
            f"w{size}": (rng.normal(0, 1, size) ** 9).astype(np.float32) * np.float32(0.01)
            for size in SIZES
        }
        for name in ("reference", *EXPERTS)
    }


def chunks(device: Gpu | None, size: int) -> list[StreamChunk]:
    settings = settings_of(DareLinear(), 3, "mergekit", {"density": DENSITY})
    site = Site(f"w{size}", size, 0, 1, EXPERTS, settings, 7, (size,))
    long = LONG if device else PART
    source: Any = MemorySource(weights())
    return stream.chunks(site, 4, source, device=device, most=long)


def parts(device: Gpu | None, size: int, what: str) -> Any:
    """The sums of every part of a tensor."""
    found = []
    for chunk in chunks(device, size):
        if what == "norms":
            found.extend(DareLinear()._norms(chunk, None)[1])
        else:
            of_vectors = what == "products of task vectors"
            found.extend(inner_products(chunk, vectors=of_vectors, reference=True))
    return np.stack(found)


SUMS = ("norms", "products of task vectors", "products of values")


@needs_programs
@pytest.mark.parametrize("size", some(SIZES, 611))
@pytest.mark.parametrize("what", some(SUMS, *SUMS[:2]))
def test_sums_of_parts_are_those_of_the_loops(device: Noted, size: int, what: str) -> None:
    by_loops, found = parts(None, size, what), parts(device, size, what)
    assert len(found) == -(-size // PART) and found.any()
    assert found.tobytes() == by_loops.tobytes()
    assert max(device.lengths) == min(size, LONG)


@pytest.mark.parametrize("what", SUMS)
def test_what_a_device_declines_the_loops_add_up_by_part(
    device: Noted, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_loops = parts(None, 611, what)
    monkeypatch.setattr(chunk_passes, "COUNTERPARTS", {})
    assert parts(device, 611, what).tobytes() == by_loops.tobytes()
    assert not device.lengths


@needs_programs
@pytest.mark.parametrize("what", some(SUMS, SUMS[1]))
def test_short_of_memory_parts_keep_their_sums(
    device: Noted, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of one tile, of which a part has three."""
    by_loops, lengths = parts(None, 611, what), set()

    def full(program: Any) -> Any:
        def run(rows: Any, *given: Any) -> bool:
            if len(rows[0]) > 200:
                raise torch.OutOfMemoryError
            lengths.add(len(rows[0]))
            return bool(program(rows, *given))

        return run

    programs = {kernel: full(program) for kernel, program in chunk_passes.COUNTERPARTS.items()}
    monkeypatch.setattr(chunk_passes, "COUNTERPARTS", programs)
    assert parts(device, 611, what).tobytes() == by_loops.tobytes()
    assert 80 in lengths and max(lengths) < PART


@needs_programs
@pytest.mark.parametrize("what", some(SUMS, SUMS[1]))
def test_what_is_not_finite_is_declined(device: Noted, what: str) -> None:
    for chunk in chunks(device, 611)[1:]:
        raw = chunk.source.raw("coding", "w611").owner
        raw[600] = np.nan
        with pytest.raises(ArithmeticError, match="w611"):
            if what == "norms":
                DareLinear()._norms(chunk, None)
            else:
                inner_products(chunk, vectors=what == "products of task vectors", reference=True)
    assert not device.lengths


MERGES: list[tuple[str, dict[str, Any], int]] = [
    ("dare_linear", {"rescale": "l1", "density": DENSITY}, LONG),
    ("dare_ties", {"rescale": "l1", "density": DENSITY}, LONG),
    ("multislerp", {}, LONG),
    ("karcher", {}, LONG),
    ("model_stock", {}, LONG),
    ("ties", {"rescale": "l1", "density": DENSITY}, PART),
    ("della", {"rescale": "l1", "density": 0.5}, 0),
]


@needs_programs
@pytest.mark.parametrize(("method", "given", "longest"), some(MERGES, MERGES[-1]))
def test_merges_are_those_of_the_loops(
    device: Noted, method: str, given: dict[str, Any], longest: int
) -> None:
    """Where sums are kept by part chunks are longer. DELLA's marks have no program."""
    some = weights(1)
    experts = {name: some[name] for name in EXPERTS}
    by_loops = run(method, some["reference"], experts, **given)
    found = run(method, some["reference"], experts, device=device, **given)
    for name, values in by_loops.items():
        assert found[name].tobytes() == values.tobytes()
    assert max(device.lengths, default=0) == longest


@pytest.mark.parametrize("strip", [4096, 24])
@pytest.mark.parametrize("size", SIZES)
def test_what_the_loops_drew_is_remembered_for_all_parts(
    size: int, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile is one strip, or three and a shorter one. Loops merge what is marked as if drawn."""
    monkeypatch.setattr(stream, "STRIP", strip)
    source: Any = MemorySource(weights())
    site = chunks(None, size)[0].site
    found = stream.chunks(site, 4, source, most=LONG)
    assert max(chunk.size for chunk in found) == min(size, LONG)
    for chunk in found:
        start, _, marks = DareLinear()._norms(chunk, None)
        assert marks is not None
        merged = []
        for remembered in ({start: marks}, {}):
            chunk.state = Prepared(None, np.ones(3, np.float32), remembered)
            formula = DareLinear().formula(chunk, None)
            assert (formula.thin == MARKED) == bool(remembered)
            merged.append(chunk.merged(formula, "F32")[0].tobytes())
        assert merged[0] == merged[1]


@pytest.mark.parametrize("remembered", [True, False])
def test_so_many_marks_are_remembered(remembered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is room for; what one chunk gives back another takes."""
    first = chunks(None, 611)[0]
    room = first.marks(3).marks.nbytes
    monkeypatch.setattr(kernel_parts, "_ROOM", kernel_parts._Room())
    monkeypatch.setattr(kernel_parts, "REMEMBERED", room - (not remembered))
    held = DareLinear()._norms(first, None)[2]
    assert (held is not None) == remembered
    assert DareLinear()._norms(first, None)[2] is None
    del held
    assert (DareLinear()._norms(first, None)[2] is not None) == remembered


def test_only_an_operator_that_says_so_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DareLinear, "remembers", False)
    assert all(DareLinear()._norms(chunk, None)[2] is None for chunk in chunks(None, 611))


@needs_programs
def test_a_device_marks_nothing_and_draws_again(device: Noted) -> None:
    for chunk in chunks(device, 1):
        assert DareLinear()._norms(chunk, None)[2] is None
    assert device.lengths


def measured(device: Gpu | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The sums behind the views of two blocks."""
    values, sizes = weights(2), some(SIZES, 611)
    sites = [[Site(f"w{n}", n, b, 2, EXPERTS, {}, 0, (n,)) for n in sizes] for b in range(2)]

    class Opened(MemorySource):
        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(signatures, "PoolSource", lambda members, **_: Opened(values))
    members: Any = {name: SimpleNamespace(files=()) for name in values}
    given: Any = SimpleNamespace(allow=lambda files: None)
    options: Any = SimpleNamespace(
        threads=1, cluster=None, gpu=lambda: device, allow_nonfinite=False,
        progress=lambda *_: None,
    )  # fmt: skip
    return signatures._measured(members, sites, options, given)


@needs_programs
def test_views_are_those_of_the_loops(device: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    by_loops, found = measured(None, monkeypatch), measured(device, monkeypatch)
    assert by_loops == found and np.all(found["dots"]) and np.all(found["mass"])
    assert max(device.lengths) == LONG


def test_chunks_are_whole_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 3000 coordinates: a part has 33 tiles of 21 rows, a long chunk eight such parts."""
    for name, size in (("TILE", TILE), ("CHUNK", 32 * TILE), ("LONG_CHUNK", 256 * TILE)):
        monkeypatch.setattr(stream, name, size)
    site = Site("w", 40_000_000, 0, 1, EXPERTS, {}, 0)
    source: Any = None
    short = [chunk.start for chunk in stream.chunks(site, 3000, source)]
    long = stream.chunks(site, 3000, source, most=256 * TILE)
    assert short[1] == 33 * 21 * 3000
    assert [chunk.start for chunk in long] == short[::8]
    assert sum(len(chunk.sums(2).sums) for chunk in long) == len(short)
