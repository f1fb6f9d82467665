"""The native core (native/): what its functions take. Arrays are contiguous; bytes of any type.

Tables of members are int64 (members, 3): the code of a type, a descriptor or −1, and the position
in the file or the address of the first value.
"""

from sigmerge.kernels import Array

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

# philox.cpp
def draw(k0: int, k1: int, start: int, out: Array, /) -> None: ...

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
