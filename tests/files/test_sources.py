"""A digest of code changes with whatever decides what the code returns."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sigmerge.files import sources
from sigmerge.files.sources import callable_digest, callable_files, callable_key, code_digest


def defined(text: str, name: str = "score", **given: Any) -> Any:
    """A function as a user's script defines it."""
    scope: dict[str, Any] = {"__name__": "users_script", **given}
    exec(text, scope)
    return scope[name]


BASE = "def score(folder):\n    return {'math': 0.5}\n"


def test_the_same_code_has_the_same_digest() -> None:
    assert callable_digest(defined(BASE)) == callable_digest(defined(BASE)) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BASE, BASE.replace("0.5", "0.6")),
        (BASE, BASE.replace("'math'", "'code'")),
        (BASE, "def score(folder, more=1):\n    return {'math': 0.5}\n"),
        ("def score(f, a=1):\n    return a\n", "def score(f, a=2):\n    return a\n"),
        ("def score(f, *, a=1):\n    return a\n", "def score(f, *, a=2):\n    return a\n"),
        ("T = 1\ndef score(f):\n    return T\n", "T = 2\ndef score(f):\n    return T\n"),
        ("T = [1]\ndef score(f):\n    return T\n", "T = [2]\ndef score(f):\n    return T\n"),
        (
            "def inner():\n    return 1\ndef score(f):\n    return inner()\n",
            "def inner():\n    return 2\ndef score(f):\n    return inner()\n",
        ),
        (
            "def made(x):\n    def score(f):\n        return x\n    return score\nscore = made(1)",
            "def made(x):\n    def score(f):\n        return x\n    return score\nscore = made(2)",
        ),
        (
            "def score(f):\n    def deep():\n        return 1\n    return deep()\n",
            "def score(f):\n    def deep():\n        return 2\n    return deep()\n",
        ),
        (
            "class S:\n    def __init__(s, x):\n        s.x = x\n    def __call__(s, f):\n"
            "        return s.x\nscore = S(1)",
            "class S:\n    def __init__(s, x):\n        s.x = x\n    def __call__(s, f):\n"
            "        return s.x\nscore = S(2)",
        ),
        (
            "class S:\n    def __call__(s, f):\n        return 1\nscore = S()",
            "class S:\n    def __call__(s, f):\n        return 2\nscore = S()",
        ),
        (
            "class S:\n    level = 1\n    def m(s, f):\n        return s.level\nscore = S().m",
            "class S:\n    level = 2\n    def m(s, f):\n        return s.level\nscore = S().m",
        ),
        ("import json\ndef score(f):\n    return json\n", "import re as json\ndef score(f):\n"
         "    return json\n"),
        ("def score(f):\n    return f.a\n", "def score(f):\n    return f.b\n"),
        ("score = lambda f: 1", "score = lambda f: 2"),
    ],
)  # fmt: skip
def test_whatever_decides_the_result_changes_the_digest(one: str, other: str) -> None:
    digests = {callable_digest(defined(text)) for text in (one, other)}
    assert len(digests) == 2 and None not in digests


def test_arrays_partials_and_dataclasses_are_described() -> None:
    @dataclass
    class Items:
        names: tuple[str, ...]
        worth: Any

    def score(folder: Path, items: Items, scale: float = 1.0) -> float:
        return scale

    def digest(names: tuple[str, ...], worth: float, scale: float) -> str | None:
        items = Items(names, np.full(3, worth))
        return callable_digest(functools.partial(score, items=items, scale=scale))

    given = [("a",), ("b",)], [1.0, 2.0], [0.5, 0.25]
    every = [digest(n, w, s) for n in given[0] for w in given[1] for s in given[2]]
    assert len({*every}) == 8 and None not in every


def test_what_has_no_content_has_no_digest(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as stream:
        assert callable_digest(lambda f: stream) is None
    handle = object()
    assert callable_digest(lambda f: handle) is None


def test_a_declared_key_stands_for_the_callable() -> None:
    class Score:
        sigmerge_key = "exact match, 3"

        def __call__(self, folder: Path) -> object:
            return self.__dict__.setdefault("open", object())

    one, other = Score(), Score()
    one(Path())
    assert callable_digest(one) is None
    assert callable_key(one) == callable_key(other) != callable_key(lambda f: 0)
    Score.sigmerge_key = "exact match, 4"
    assert callable_key(one) != callable_key(defined(BASE)) == callable_digest(defined(BASE))


def test_files_that_a_callable_names_are_found(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("constant", "closed over", "in a set", "global")}
    for file in files.values():
        file.write_text("")
    text = (
        "from pathlib import Path\n"
        f"DATA = Path({str(files['global'])!r})\n"
        "def made(x, y):\n    def score(f):\n"
        f"        return x, y, DATA, {str(files['constant'])!r}\n"
        "    return score\n"
        f"score = made({str(files['closed over'])!r}, {{{str(files['in a set'])!r}, 'no file'}})\n"
    )
    score = defined(text)
    assert callable_files(score) == sorted(files.values())
    score.sigmerge_key = "of its own"
    assert callable_files(score) == []
    handle = object()
    assert callable_files(lambda f: (handle, str(tmp_path))) == []


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Writes modules of a user and imports them anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "users_package").mkdir()

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith("users_")]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def write(**texts: str) -> None:
        for name, text in {"users_package.__init__": "", **texts}.items():
            (tmp_path / f"{name.replace('.', '/')}.py").write_text(text)
        forget()

    yield write
    forget()


ELSEWHERE = {
    "a module": "import users_one\ndef score(f):\n    return users_one.f()",
    "a name of it": "from users_one import f\ndef score(x):\n    return f()",
    "its value": "import users_one\ndef score(f):\n    return users_one.g",
    "in a call": "def score(f):\n    import users_one\n    return users_one.f()",
    "a name in a call": "def score(x):\n    from users_one import f\n    return f()",
    "of a package": "from users_package import users_three\ndef score(f):\n    return users_three",
    "of a package in a call": "def score(f):\n    from users_package import users_three\n",
    "a submodule": "import users_package.users_three as t\ndef score(f):\n    return t.f()",
    "in an inner function": "def score(f):\n    def g():\n        import users_one\n    return g()",
}
"""How a callable uses what stands in files of the user's own."""


@pytest.mark.parametrize("text", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_a_callable_imports_is_part_of_it(text: str, modules: Callable[..., None]) -> None:
    """Found by an attack: of these, only the file of a module that it named itself was."""
    texts = {
        "users_one": "from users_two import g\ndef f():\n    return g()\n",
        "users_package.users_three": "from users_two import g\ndef f():\n    return g()\n",
    }
    digests = []
    for number in (1, 2):
        modules(**texts, users_two=f"def g():\n    return {number}\n")
        score = defined(text)
        digests.append(callable_digest(score))
        importlib.import_module("users_one")  # what is loaded makes no difference
        importlib.import_module("users_package.users_three")
        assert callable_digest(score) == digests[-1]
    assert None not in digests and digests[0] != digests[1]


def test_what_is_set_in_a_module_is_part_of_what_uses_it(modules: Callable[..., None]) -> None:
    modules(users_one="K = 1\nL = 1\n", **{"users_package.users_deep": "M = 1\n"})
    text = (
        "import users_one\nimport users_package.users_deep\n"
        "def score(f):\n    return users_one.K + users_package.users_deep.M\n"
    )
    digests = [callable_digest(score := defined(text))]
    sys.modules["users_one"].K = 2  # type: ignore[attr-defined]
    digests.append(callable_digest(score))
    sys.modules["users_package.users_deep"].M = 2  # type: ignore[attr-defined]
    digests.append(callable_digest(score))
    assert len({*digests}) == 3
    sys.modules["users_one"].L = 2  # type: ignore[attr-defined]
    assert callable_digest(score) == digests[-1]
    sys.modules["users_one"].K = object()  # type: ignore[attr-defined]
    assert callable_digest(score) is None


@pytest.mark.parametrize(
    "text",
    [
        "import os\ndef score(f):\n    return os.environ['USERS_JUDGE']",
        "import os\nNAME = 'USERS_JUDGE'\ndef score(f):\n    return os.getenv(NAME)",
        "import users_one\ndef score(f):\n    return users_one.f()",
        "def score(f):\n    from users_one import f\n    return f()",
    ],
)
def test_a_variable_that_a_callable_names_is_part_of_it(
    text: str, modules: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules(users_one="import os\ndef f():\n    return os.environ['USERS_JUDGE']\n")
    score, digests = defined(text), []
    for value in ("one", "another"):
        monkeypatch.setenv("USERS_JUDGE", value)
        digests.append(callable_digest(score))
        monkeypatch.setenv("USERS_OTHER", value)
        assert callable_digest(score) == digests[-1]
    monkeypatch.delenv("USERS_JUDGE")
    assert len({*digests, callable_digest(score)}) == 3


@pytest.mark.parametrize("text", ["import yaml", "import numpy.linalg", "import not_there"])
def test_a_library_that_is_not_loaded_yet_has_its_version(text: str) -> None:
    """Else the digest would change with the first call."""
    program = (
        "from sigmerge.files.sources import callable_digest\n"
        f"def score(f):\n    {text}\nprint(callable_digest(score))\n"
        f"try:\n    exec({text!r}, {{}})\nexcept ImportError:\n    pass\n"
        "print(callable_digest(score))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    one, other = run.stdout.split()
    assert one == other != "None"


def test_a_callable_has_the_same_digest_in_another_process() -> None:
    program = (
        "from sigmerge.files.sources import callable_digest\n"
        "import numpy as np\nK = {'b', 'a', 'c'}\n"
        "def score(f):\n    return np.mean(sorted(K))\nprint(callable_digest(score))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout != "None\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the layout of a package: maker -> helper -> deep, and a stranger."""
    root = tmp_path / "sigmerge"
    (root / "inner").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "inner/__init__.py": "",
        "inner/maker.py": "from sigmerge.inner import (\n    helper as h,\n)\n",
        "inner/helper.py": "def f():\n    from sigmerge.deep import x\n"
        'TABLE = {"name": "sigmerge.tabled:C"}\n',
        "tabled.py": "class C: ...\n",
        "deep.py": "x = 1\n",
        "stranger.py": "y = 1\n",
    }.items():
        (root / name).write_text(text)
    monkeypatch.setattr(sources, "PACKAGE", root)
    return root


def _digest_now() -> str:
    for each in (sources._closure_digest, sources._imported, sources._files):
        each.cache_clear()
    try:
        return sources._closure_digest("sigmerge.inner.maker")
    finally:
        for each in (sources._closure_digest, sources._imported, sources._files):
            each.cache_clear()


@pytest.mark.parametrize(
    "file", ["inner/maker.py", "inner/helper.py", "deep.py", "tabled.py", "inner/__init__.py"]
)
def test_code_is_all_that_a_maker_leads_to(file: str, package: Path) -> None:
    before = _digest_now()
    (package / "stranger.py").write_text("y = 2\n")
    assert _digest_now() == before
    (package / file).write_text((package / file).read_text() + "# changed\n")
    assert _digest_now() != before


EVERY = {
    "sigmerge.method.conflict": "sys",
    "sigmerge.jobs.dense": "from sigmerge.operators.table import *; [*map(operator, OPERATORS)]",
    "sigmerge.evaluation.run": "from sigmerge.evaluation.harness_table import *\n"
    "[*map(benchmark_class, HARNESSES)]",
}
"""A module, and what imports all that it may import only when it runs."""


@pytest.mark.parametrize(("module", "more"), EVERY.items())
def test_the_closure_is_what_python_imports(module: str, more: str) -> None:
    """Against the modules that are loaded when one is imported in a process of its own."""
    loaded = "print(*[m for m in sys.modules if m.startswith('sigmerge')])"
    program = f"import sys, {module}\n{more}\n{loaded}"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert {*run.stdout.split()} - {"sigmerge._native"} <= sources._closure(module)


def test_a_partial_is_its_function() -> None:
    assert code_digest(functools.partial(code_digest, 1)) == code_digest(code_digest)
