"""The compiler's report: every loop over coordinates runs in vectors, but for those named here."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
CMAKE = (NATIVE / "CMakeLists.txt").read_text(encoding="utf-8")
FLAGS = re.search(r"set\(exact ([^)]*)\)", CMAKE)
FILES = ("claim", "convert", "coordinates", "low_rank", "merge", "products", "select", "sums",
         "thinning", "variance")  # fmt: skip
LOOP = re.compile(r"for \(int64_t i = ")
SET = re.compile(r"\] = 0;|to\[i\] = values\[i\];|out\[i\] = values\[i\];|source\[i\] = ")
"""What the compiler turns into calls that set or copy memory."""
SCALAR = {
    "claim": ("histogram[places[i]] +=", "inside[found] =", "histogram[inside[i]]++"),
    "coordinates": (
        "counts[bits_of(spread[i]) >> LOW_BITS]++", ">> LOW_BITS == upper", "total[d] +=",
        "high = static_cast<double>", "above += exp", "double p = exp",
        "counts[key_of(values[i]) >> 16]++", ">> 16 == upper",
    ),
    "low_rank": ("total = exact_fma",),
    "merge": (),
    "products": ("to[i * rows * rows]", "total = exact_fma", "total += lanes[i]"),
    "select": (
        "inside[found] = offset", "uint32_t place =", "if (!counts[i]) continue", "int64_t place =",
    ),
    "thinning": (
        "bool is_tie", "bool tied = magnitude", "counts_[seen_[i]] = 0", "uint32_t key = keys_[i]",
        "uint32_t word = seen_[i]", "places[(keys_[i] >> shift) & mask]++",
        "uint32_t k = source[i]",
    ),
    "variance": ("if (out[i] < 0)",),
}  # fmt: skip
"""Loops that count by value, write what they find behind one another, or add in one order."""


@cache
def report(name: str, isa: str) -> frozenset[int]:
    """Lines of the loops that run in vectors."""
    assert FLAGS is not None
    told = subprocess.run(
        ["g++", "-std=c++20", "-O3", "-DNDEBUG", *FLAGS[1].split(), f"-DSM_ISA={isa}",
         f"-march=x86-64-{isa}", "-fopt-info-vec-optimized", "-S", "-o", "/dev/null",
         str(NATIVE / f"{name}.cpp")],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    found = re.findall(rf"{name}\.cpp:(\d+):\d+: optimized: loop vectorized", told)
    return frozenset(map(int, found))


def loops(name: str) -> list[tuple[int, str]]:
    """The number of each loop's line, and its text up to the first statement."""
    lines = (NATIVE / f"{name}.cpp").read_text(encoding="utf-8").splitlines()
    return [
        (number, line if line.rstrip().endswith(";") else " ".join(lines[number - 1 : number + 3]))
        for number, line in enumerate(lines, 1)
        if LOOP.search(line)
    ]


@pytest.mark.parametrize("name", FILES)
def test_loops_over_coordinates_run_in_vectors(name: str, isa: str) -> None:
    if platform.machine() != "x86_64" or not shutil.which("g++"):
        pytest.skip("the report is that of g++ for x86-64")
    scalar = [(n, text) for n, text in loops(name) if n not in report(name, isa)]
    known = SCALAR.get(name, ())
    left = [
        f"{name}.cpp:{n}: {text.strip()}"
        for n, text in scalar
        if not SET.search(text) and not any(part in text for part in known)
    ]
    assert left == []


@pytest.mark.parametrize("name", FILES)
def test_no_loop_is_named_that_is_not_there(name: str) -> None:
    texts = [text for _, text in loops(name)]
    assert [part for part in SCALAR.get(name, ()) if not any(part in t for t in texts)] == []
