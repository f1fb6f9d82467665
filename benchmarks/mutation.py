"""Mutation testing: change one operator or constant at a time, and see whether a test notices.

    python -m benchmarks.mutation src/sigmerge/method/deficit.py tests/method/test_deficit.py …
    python -m benchmarks.mutation --sample 60 src/sigmerge/merge3/irt.py tests/merge3/test_irt.py

Every mutant runs in a forked child, in which the module's name imports the mutated source; the
libraries are loaded once, in the parent. Survivors are printed with their lines.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.util
import os
import random
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

SECONDS = 240
"""A mutant that takes more processor time is killed: it loops."""
EXAMPLES = 25
"""Of every property, at most."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """The node with one thing changed, once for every thing that can be."""
    if isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops):
            if type(op) in SWAPS:
                other = copy.deepcopy(node)
                other.ops[place] = SWAPS[type(op)]()  # type: ignore[call-overload]
                yield other
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
        other_op: Any = copy.deepcopy(node)
        other_op.op = SWAPS[type(node.op)]()
        yield other_op
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1 if isinstance(node.value, int) else node.value * 1.5 + 1)
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield ast.Name(NAMES[node.id], node.ctx)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        other_test = copy.deepcopy(node)
        other_test.test = ast.UnaryOp(ast.Not(), other_test.test)
        yield other_test


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, what was changed, source) of every mutant; annotations and texts stay."""
    tree = ast.parse(source)
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if name in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            children = value if isinstance(value, list) else [value]
            for place, child in enumerate(children):
                if not isinstance(child, ast.AST) or _harmless(parent):
                    continue
                for other in variants(child):
                    _put(parent, name, place, other)
                    text = f"{ast.unparse(child)} -> {ast.unparse(other)}".replace("\n", " ")
                    line = getattr(child, "lineno", 0)
                    yield line, text[:120], ast.unparse(ast.fix_missing_locations(tree))
                    _put(parent, name, place, child)


def _harmless(node: ast.AST) -> bool:
    """Types, such as Float64[np.ndarray, "n"], and guards against misuse: no result changes."""
    if isinstance(node, ast.keyword):
        return node.arg in ("strict", "frozen")
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return node.value.id[:1].isupper()
    return False


def _put(parent: ast.AST, name: str, place: int, node: ast.AST) -> None:
    value = getattr(parent, name)
    if isinstance(value, list):
        value[place] = node
    else:
        setattr(parent, name, node)


def install(module: str, file: Path) -> None:
    """Load the file under the module's name; whoever imports the name later gets this one."""
    package, _, name = module.rpartition(".")
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    parent = importlib.import_module(package)
    sys.modules[module] = loaded
    setattr(parent, name, loaded)
    spec.loader.exec_module(loaded)


def survives(module: str, source: str, tests: Sequence[str]) -> bool:
    """Whether the tests pass with the module's source replaced."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{module.rpartition('.')[2]}.py")
        file.write_text(source, encoding="utf-8")
        child = os.fork()
        if not child:
            _run(module, file, tests)
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


class _FewExamples:
    """A plugin of pytest: no property runs more examples than these."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            test = getattr(item, "obj", None)
            wanted = getattr(test, "_hypothesis_internal_use_settings", None)
            if wanted is not None and wanted.max_examples > EXAMPLES:
                fewer = hypothesis.settings(wanted, max_examples=EXAMPLES)
                test._hypothesis_internal_use_settings = fewer  # type: ignore[union-attr]


def _run(module: str, file: Path, tests: Sequence[str]) -> None:
    """In the child: run the tests without a word, and leave with their verdict."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    signal.alarm(10 * SECONDS)  # for one that waits
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        install(module, file)
        how = ("-x", "-q", "-p", "no:cacheprovider")
        verdict = int(pytest.main([*how, *tests], [_FewExamples()]))
    except BaseException:
        verdict = 1
    os._exit(verdict)


def main() -> None:
    """Print survivors and the score of one module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--sample", type=int, help="Draw this many mutants instead of all.")
    parser.add_argument("--seed", type=int, default=0, help="Of the draw.")
    given = parser.parse_args()
    module = ".".join(given.file.with_suffix("").parts[1:])
    source = given.file.read_text(encoding="utf-8")
    hypothesis.settings.register_profile("mutants", max_examples=EXAMPLES, deadline=None)
    hypothesis.settings.load_profile("mutants")
    if not survives(module, source, given.tests):
        sys.exit("The tests fail without any mutation.")
    chosen = list(mutants(source))
    of = len(chosen)
    if given.sample is not None and given.sample < of:
        chosen = random.Random(given.seed).sample(chosen, given.sample)
    killed = 0
    for line, change, mutated in chosen:
        if survives(module, mutated, given.tests):
            print(f"{given.file}:{line}: {change}", flush=True)
        else:
            killed += 1
    drawn = f" drawn from {of} by seed {given.seed}" if len(chosen) < of else ""
    print(f"{given.file}: {killed} of {len(chosen)} mutants{drawn} killed", flush=True)


if __name__ == "__main__":
    main()
