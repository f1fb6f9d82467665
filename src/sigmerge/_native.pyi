"""The native core (native/): what its functions take. Arrays are contiguous; bytes of any type.

Tables of members are int64 (members, 3): the code of a type, a descriptor or −1, and the position
in the file or the address of the first value.
"""

from sigmerge.core import Array

class ReadFailed(OSError):
    descriptor: int
    position: int
    shrank: bool
    """The file gave fewer bytes than it should have, and the system reported no error."""

class WriteFailed(OSError):
    descriptor: int
    position: int
    shrank: bool

def isas() -> list[str]: ...
def isa() -> str: ...
def use_isa(name: str, /) -> None: ...

# convert.cpp
def widen(kind: int, raw: Array, out: Array, /) -> bool: ...
def narrow(kind: int, values: Array, out: Array, /) -> bool: ...
def finite(kind: int, raw: Array, /) -> bool: ...

# io.cpp, checksum.cpp
def checksum(bytes: Array | memoryview, position: int = 0, before: int = 0) -> int: ...
def read(descriptor: int, position: int, out: Array, /) -> None: ...
def write(descriptor: int, position: int, bytes: Array | memoryview, /) -> None: ...
def read_summed(
    descriptor: int, begin: int, out: Array, pieces: Array, totals: Array, /
) -> None: ...
def advise_file(descriptor: int, begin: int, end: int, step: int, advice: int, /) -> None: ...

# device.cpp
def send(
    functions: Array, spans: Array, there: int, slots: Array, slot: int, stream: int, /
) -> int: ...
def drain(
    functions: Array, there: int, count: int, slots: Array, slot: int, stream: int, begun: int,
    descriptor: int, position: int, before: int, /
) -> tuple[int, int]: ...  # fmt: skip

# philox.cpp
def draw(k0: int, k1: int, start: int, out: Array, /) -> None: ...

# claim.cpp; tables of tiles are int64 (tiles, 3) or (members, tiles, 3)
def claim_high(
    edges: Array, expert: Array, reference: Array, key: Array, owner: Array, first: int, last: int,
    every: int, code: int, ties: Array, counts: Array, histogram: Array, /
) -> None: ...  # fmt: skip
def claim_low(
    edges: Array, expert: Array, reference: Array, key: Array, owner: Array, first: int, last: int,
    every: int, code: int, ties: Array, counts: Array, high: int, histogram: Array, /
) -> None: ...  # fmt: skip
def claim_mark(
    edges: Array, expert: Array, reference: Array, key: Array, owner: Array, first: int, last: int,
    code: int, ties: Array, before: Array, threshold: int, counts: Array, mass: Array, /
) -> int: ...  # fmt: skip
def claim_settle(
    edges: Array, owner: Array, first: int, last: int, code: int, ties: Array, counts: Array, /
) -> None: ...
def claim_tally(
    edges: Array, expert: Array, reference: Array, key: Array, owner: Array, first: int, last: int,
    code: int, support: Array, mass: Array, /
) -> int: ...  # fmt: skip
def claim_admit(
    form: int, scale: float, domains: Array, below: int, keys: Array, edges: Array, owner: Array,
    first: int, last: int, members: Array, target: Array, /
) -> tuple[bool, bool, int]: ...  # fmt: skip

# products.cpp
def gram(members: Array, size: int, vectors: bool, tile: int, dots: Array, /) -> bool: ...
def signature(members: Array, size: int, tile: int, dots: Array, mass: Array, /) -> bool: ...
def grams_along(values: Array, length: int, inner: int, dots: Array, /) -> None: ...
def combine_along(
    values: Array, length: int, inner: int, coefficients: Array, out: Array, /
) -> None: ...

# coordinates.cpp
def count_variances(members: Array, size: int, upper: int, counts: Array, /) -> bool: ...
def squares_of_varying(
    members: Array, size: int, threshold: int, ties: int, tile: int, total: Array, /
) -> bool: ...
def swap_near(other: Array, base: Array, t: float, out: Array, /) -> None: ...
def count_changes(values: Array, least: float, alone: Array, shared: Array, /) -> None: ...
def reinforce(values: Array, least: float, factors: Array, out: Array, /) -> None: ...
def divergences(values: Array, base: Array, length: int, out: Array, /) -> None: ...
def scale_rows(values: Array, length: int, factors: Array, out: Array, /) -> None: ...
def keep_from(values: Array, scores: Array, least: float, out: Array, /) -> None: ...
def count_keys(values: Array, upper: int, counts: Array, /) -> None: ...

# low_rank.cpp
def add_low_rank(left: Array, right: Array, scale: float, skip: int, out: Array, /) -> None: ...
def add_squares(values: Array, columns: int, skip: int, by_row: bool, sums: Array, /) -> None: ...
def multiply_along(
    values: Array, columns: int, skip: int, by_row: bool, factors: Array, /
) -> None: ...

# sums.cpp
def weighted_rows(
    weights: Array, vectors: bool, after: Array, members: Array, size: int, target: Array, /
) -> tuple[bool, bool, int]: ...
def add_scaled(total: Array, values: Array, factor: float, /) -> None: ...
def scale(out: Array, divisor: float, factor: float, /) -> None: ...
def load_rows(members: Array, reference: Array, rows: Array, /) -> bool: ...

# select.cpp
def count_high(members: Array, size: int, experts: Array, every: int, counts: Array, /) -> bool: ...
def count_inside(
    members: Array, size: int, experts: Array, every: int, ranges: Array, counts: Array,
    left_out: Array, above: Array, /
) -> bool: ...  # fmt: skip
def take_occupied(counts: Array, left_out: Array, kept: Array, stops: Array, /) -> None: ...
def add_run(
    places: Array, counts: Array, left_out: Array, first: int, total_counts: Array,
    total_left_out: Array, /
) -> None: ...  # fmt: skip
def bin_of_rank(histogram: Array, k: int, /) -> tuple[int, int]: ...
def entries(histogram: Array, /) -> int: ...

# merge.cpp: what a Formula of core/merge.py says
def merge(
    weights: Array, vectors: bool, thin: int, cuts: Array, outliers: Array, draws: Array,
    odds: Array, axis: Array, marks: Array, rescale: Array, groups: Array, combine: int,
    weighted: bool, normalize: bool, cancelled: float, after: Array, members: Array, start: int,
    size: int, tile: int, strip: int, target: Array, number: Array, /
) -> tuple[bool, bool, int]: ...  # fmt: skip
def norms_of_thinning(
    thin: int, cuts: Array, outliers: Array, draws: Array, odds: Array, axis: Array, groups: Array,
    members: Array, start: int, size: int, tile: int, strip: int, norms: Array, marks: Array, /
) -> bool: ...  # fmt: skip
def norm(values: Array, /) -> float: ...
def weighted_sum(values: Array, weights: Array, out: Array, /) -> None: ...
