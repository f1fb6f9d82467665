"""The shape of the source at one commit or several: python -m benchmarks.shape 6b0e9e8 HEAD

Lines by package, files, functions, the longest ones, and those with more than eight parameters.
Reads the commits from git; nothing is checked out or imported.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

SOURCE = "src/sigmerge"
MOST_PARAMETERS, SHORT = 8, 60


class Function(NamedTuple):
    """A function of a file; `device`: a Triton program, which takes a pointer for each array."""

    lines: int
    parameters: int
    name: str
    device: bool


class Shape(NamedTuple):
    """What is counted of one commit."""

    packages: Counter[str]
    files: dict[str, int]
    functions: list[Function]
    native: int
    tests: int

    def rows(self) -> Iterator[tuple[str, str]]:
        sizes = sorted(each.lines for each in self.functions)
        longest = max(self.functions)
        many = [each for each in self.functions if each.parameters > MOST_PARAMETERS]
        yield "lines of Python in src/", f"{sum(self.packages.values()):,}"
        yield "lines of C++ in native/", f"{self.native:,}"
        yield "lines of Python in tests/", f"{self.tests:,}"
        yield "files in src/", f"{len(self.files):,}"
        yield f"files under {SHORT} lines", f"{sum(n < SHORT for n in self.files.values()):,}"
        yield "functions", f"{len(sizes):,}"
        yield "mean lines of a function", f"{sum(sizes) / len(sizes):.1f}"
        yield "longest function", f"{longest.lines} ({longest.name})"
        yield f"functions with more than {MOST_PARAMETERS} parameters", f"{len(many)}"
        yield "of them programs of a GPU", f"{sum(each.device for each in many)}"


def shape(commit: str) -> Shape:
    command = ["git", "archive", "--format=tar", commit, "--", *_there(commit)]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    packages: Counter[str] = Counter()
    files: dict[str, int] = {}
    functions: list[Function] = []
    native = tests = 0
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            stream, name = tar.extractfile(member), PurePosixPath(member.name)
            if stream is None or name.suffix not in (".py", ".cpp", ".hpp"):
                continue
            text = stream.read().decode()
            lines = text.count("\n")
            if name.parts[0] == "native":
                native += lines * (name.suffix != ".py")
            elif name.parts[0] == "tests":
                tests += lines
            else:
                inner = name.relative_to(SOURCE)
                packages[inner.parts[0] if len(inner.parts) > 1 else "(top)"] += lines
                files[str(inner)] = lines
                functions += _functions(text, str(inner))
    return Shape(packages, files, functions, native, tests)


def _there(commit: str) -> list[str]:
    """The folders of these that the commit has."""
    told = subprocess.run(
        ["git", "ls-tree", "-d", "--name-only", commit, SOURCE, "native", "tests"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return told.stdout.split()


def _functions(text: str, file: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
            device = "triton" in file and any("jit" in ast.unparse(d) for d in node.decorator_list)
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield Function(lines, count, f"{file}: {node.name}", device)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shape", description=__doc__)
    parser.add_argument("commits", nargs="*", default=["HEAD"])
    commits = parser.parse_args().commits
    shapes = [shape(commit) for commit in commits]
    print(f"| | {' | '.join(commits)} |\n|---|{'--:|' * len(commits)}")
    for row in zip(*(one.rows() for one in shapes), strict=True):
        print(f"| {row[0][0]} | {' | '.join(value for _, value in row)} |")
    print(f"\n| lines of | {' | '.join(commits)} |\n|---|{'--:|' * len(commits)}")
    for name in sorted({name for one in shapes for name in one.packages}):
        print(f"| {name} | {' | '.join(f'{one.packages[name]:,}' for one in shapes)} |")


if __name__ == "__main__":
    main()
