"""What an operator is.

An operator says how the merge follows from the reference and the experts: by a `formula`, which one
compiled call carries out on a whole chunk, or, where it needs linear algebra, tile by tile in
`merge`. What must be known beforehand about a tensor (a trimming threshold, a norm) is gathered by
passes over its chunks: `prepare` is a generator that yields a `Pass` and is sent back its folded
result; it returns the tensor's state. `survey` is the same over the whole model.
An operator that reads data says what it `needs`; a capture pass has measured it on the experts' own
exemplars, and chunks carry it as `statistics`.
Operators know no files and no threads; the engine decides where a pass runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from sigmerge.core import TILE, Array
from sigmerge.core.merge import Formula
from sigmerge.core.partial_sums import PartMarks, PartSums
from sigmerge.messages import counted

if TYPE_CHECKING:
    from sigmerge.core.algebra import Algebra

_Made = TypeVar("_Made")


LARGEST_NUMBER = float(np.finfo(np.float32).max)
"""No number of a recipe is larger: it would be infinite in the merge."""


@dataclass(frozen=True)
class Parameter:
    """One option of an operator. `mergekit` and `paper` are its defaults under the two presets.

    A default of None: a recipe must give the value.
    """

    name: str
    kind: type[float] | type[int] | type[bool] | tuple[str, ...]
    doc: str
    mergekit: Any
    paper: Any
    per_model: bool = False
    low: float = -float("inf")
    high: float = float("inf")
    auto: bool = False
    """Whether "auto" is a value too."""


@dataclass(frozen=True)
class Site:
    """A tensor as an operator sees it. `settings` holds its options, per-model ones as a tuple."""

    tensor: str
    size: int
    block: int | None
    depth: int
    experts: tuple[str, ...]
    settings: Mapping[str, Any]
    seed: int
    shape: tuple[int, ...] = ()
    measured: str = ""
    """What `statistics` hold of every expert for this tensor: gram, energy, fisher or nothing."""
    transposed: bool = False
    """Whether a weight with a Gram is stored (in, out), as GPT-2's are, and not (out, in)."""

    @property
    def shift(self) -> bool:
        """Whether this is a bias, which adds to features without reading them."""
        return self.tensor.endswith(".bias")

    @property
    def outputs(self) -> int:
        return self.shape[1 if self.transposed else 0]

    @property
    def inputs(self) -> int:
        """How many channels a weight with a Gram reads."""
        return self.shape[0 if self.transposed else 1]

    def weights(self) -> Array:
        return np.array(self.settings["weight"], np.float32)


@dataclass
class Tile:
    """Scratch for one tile; an operator may overwrite `experts`, and fills `out`.

    `start` is the tile's first flat index in its tensor; `experts` has one row per expert.
    """

    start: int
    experts: Array
    out: Array


class Statistics(Protocol):
    """What capture passes measured on each expert's own exemplars. Experts go by name."""

    def triangle(self, expert: str, tensor: str) -> Array:
        """The upper triangle, row after row, of S = XᵀX in float64.

        X are the inputs of a linear weight, one row a token.
        """

    def energy(self, expert: str, tensor: str) -> Array:
        """Σ x̂² over tokens in float64, x̂ the normalised inputs of a norm scale."""

    def rows(self, expert: str, tensor: str) -> int:
        """How many tokens a Gram or energy sums over."""

    def fisher(self, expert: str, tensor: str, start: int, stop: int) -> Array:
        """F: the mean over exemplars of squared per-exemplar gradients."""

    def fisher_norm(self, expert: str) -> float:
        """‖F‖₂ over all tensors of the expert."""

    def once(self, tensor: str, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """What `make` derives from a tensor's inputs: made once for all that share them and key."""


class Chunk(Protocol):
    """A run of tiles of one tensor that one worker goes through in order.

    What an operator writes into `notes` about a tensor stands in the plan.
    """

    site: Site
    start: int
    state: Any
    statistics: Statistics
    notes: dict[str, Any]
    step: int
    """Coordinates of a tile."""

    @property
    def strip(self) -> int:
        """Coordinates that a kernel takes at a time, in whole granules."""

    @property
    def size(self) -> int:
        """Coordinates of the chunk."""

    def sums(self, *shape: int) -> PartSums:
        """Zeros, to which a kernel adds float64 sums: for each part of the chunk its own."""

    def marks(self, rows: int) -> PartMarks:
        """A bit for every entry of so many rows, if there is room: for each part its own."""

    def tiles(self, less: str | None = None, *, reference: bool = False) -> Iterator[Tile]:
        """Tiles with θ_d in the experts' rows, or θ_d − θ_ref with less = "reference".

        With `reference`, its values are one more row.
        """

    def read(
        self,
        kernel: Callable[..., bool],
        *arguments: Any,
        share: float = 1.0,
        reference: bool = True,
    ) -> bool:
        """One compiled pass over the members: kernel(members, start, size, *arguments).

        Members are the experts, and the reference last unless it is left out. The kernel returns
        whether all it read is finite; `share` is how much of the chunk it reads. With PartSums
        there is a pass for each part, to which its own sums are given, and its own of PartMarks;
        its tiles have `step`. False if a device passed over the chunk in the kernel's place.
        """

    def selected(self, experts: Array, ranks: Array) -> Array | None:
        """By expert the magnitude of Δ_d at a rank of this chunk, the entries of it within the
        rank, and all of it; None where passes must count.
        """

    def made(self, formula: Formula) -> Array:
        """What a formula gives on this chunk, in float32; valid until the thread merges again."""

    def norm(self, formula: Formula, tile: int) -> float:
        """‖τ‖₁ of what a formula gives on this chunk, added up tile by tile."""

    def lead_of_plus(self, formula: Formula) -> int:
        """How many more coordinates of this chunk elect + than −, by a disjoint formula."""

    def solve(self, program: Callable[[Algebra], _Made]) -> _Made:
        """program(algebra), where the job solves. It may run twice, so it changes no tile."""

    def add_reference(self, tile: Tile, factor: float = 1.0) -> None:
        """Add θ_ref, or a multiple of it, to `out`."""


def collect(total: list[Any] | None, part: Any) -> list[Any]:
    return [*total, part] if total else [part]


def add(total: Array | None, part: Array) -> Array:
    return part if total is None else total + part


@dataclass(frozen=True)
class Pass:
    """`visit` runs on every chunk, anywhere; `fold` joins its results in chunk order.

    In a survey, `prepare` (if any) makes the state that visited chunks of a tensor carry.
    """

    visit: Callable[[Chunk], Any]
    fold: Callable[[Any, Any], Any] = collect
    prepare: Callable[[Site], Passes] | None = None


Passes = Generator[Pass, Any, Any]


class Operator:
    """Base of all operators; the defaults need no pass."""

    name: str
    title: str
    paper: str
    needs_reference: bool = True
    gives_vector: bool = True
    """Whether `out` is the merged task vector, to be added to the reference, or the values."""
    needs: str = ""
    """What it must know about the experts' own exemplars: features, fisher or nothing."""
    solves: bool = False
    """Whether it solves for whole matrices, by an algebra of the device that the job solves on."""
    thins_on_gpu: bool = True
    """Whether a GPU has a program for its formula; the processor merges otherwise."""
    parameters: tuple[Parameter, ...]
    revision: str | None = None
    """Identifies the code of a user's operator."""
    least: int = 1
    """How many experts it takes at least."""
    most: int | None = None
    """How many experts it takes at most."""

    def heading(self, experts: int) -> str:
        """What a card is headed with."""
        return f"{self.title} of {counted(experts, 'expert')}"

    def role(self, name: str) -> str:
        """What a card calls one of its models."""
        return f"expert `{name}`"

    @property
    def merges_on_gpu(self) -> bool:
        """Whether a GPU merges its chunks, or has a part in it as it solves."""
        return self.solves or (self.thins_on_gpu and type(self).formula is not Operator.formula)

    def with_reference(self, given: bool) -> Operator:
        """The operator for a recipe with or without a base_model, where it can do both."""
        return self

    def with_parameters(self, given: Mapping[str, Any]) -> Operator:
        """The operator for a recipe's shared parameters, where they say what it needs."""
        return self

    def check(self, sites: Sequence[Site]) -> list[str]:
        """Problems of the settings that no single parameter's bounds show."""
        return []

    def check_statistics(self, sites: Sequence[Site], statistics: Statistics) -> list[str]:
        """Problems of what was measured, before the first tensor is merged."""
        return []

    def granule(self, site: Site) -> int:
        """Tiles start at multiples of this; a granule of the tensor's size makes it one tile."""
        return 4

    def scratch(self, site: Site) -> int:
        """Bytes that one thread takes at most for a tile of this tensor, where it is a long one:
        its rows and result, and as much again for what is computed on them."""
        size = self.granule(site)
        return 2 * (len(site.experts) + 1) * 4 * size if size > TILE else 0

    def operations(self, site: Site) -> float:
        """In float64, of solving for this tensor: additions and multiplications of products, and of
        a decomposition as many as take its time; 0 where they were not counted."""
        return 0.0

    def ends_anywhere(self, site: Site) -> bool:
        """Whether chunks may be longer: no pass adds float64 up but in PartSums."""
        return False

    def survey(self, sites: Sequence[Site]) -> Passes:
        """Passes over the whole model."""
        return None
        yield

    def prepare(self, site: Site, survey: Any) -> Passes:
        """Passes over one tensor; the result is the `state` of its chunks."""
        return None
        yield

    def formula(self, chunk: Chunk, survey: Any) -> Formula | None:
        """How a chunk is merged in one compiled call; None if it goes tile by tile."""
        return None

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        """Without a formula: go through the tiles of a chunk and yield each with `out` filled."""
        raise TypeError(f"{type(self).__name__} must define formula or merge")


WEIGHT = Parameter("weight", float, "coefficient of the expert", 1.0, 1.0, per_model=True)
LAMBDA = Parameter("lambda", float, "scale of the merged task vector", 1.0, 1.0)
ELECT = Parameter(
    "elect",
    ("weighted", "unweighted"),
    "whether weights count in the election of signs",
    "weighted",
    "unweighted",
)
MATCH_L1 = Parameter("rescale", ("l1", "none"), "match each tensor's ℓ1 norm", "none", "none")
OUTSIDE = Parameter(
    "outside",
    ("merge", "reference"),
    "embeddings, head and final norm: merged like the rest, or kept from the reference",
    "merge",
    "merge",
)
INT8_MASK = Parameter(
    "int8_mask", bool, "accepted; mergekit's memory option, changes nothing here", False, False
)
