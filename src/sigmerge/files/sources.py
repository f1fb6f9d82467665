"""Digests of code: of a module of this package with its imports, or of a user's callable."""

from __future__ import annotations

import ast
import dataclasses
import dis
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from sigmerge import _native
from sigmerge.files.environment import source_text, variables
from sigmerge.files.imports import imported_files, is_installed, module_files, users_homes
from sigmerge.files.safe_open import is_regular

PACKAGE = Path(__file__).resolve().parents[1]
"""The installed package: nothing is written into it, since it may be read-only or shared."""
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(sigmerge[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)"
    r"|import[ \t]+(sigmerge[\w.]*))",
    re.MULTILINE,
)
_NAMED = re.compile(r'"(sigmerge(?:\.\w+)+):\w+"')
"""A lazy import in a table: "module:class"."""
_TYPES_ONLY = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+.*\n|\n)*", re.MULTILINE)


def code_digest(function: Callable[..., Any]) -> str:
    """A digest of the sources that a function of this package may run."""
    while isinstance(function, partial):
        function = function.func
    return _closure_digest(inspect.unwrap(function).__module__)


@cache
def _closure_digest(module: str) -> str:
    """A digest of a module's source and of all modules of the package that it imports."""
    made = hashlib.sha256(sys.version.encode())
    if _file_of(module) is None:  # a user's own
        made.update(_content(Path(str(sys.modules[module].__file__))).encode())
    for name in sorted(_closure(module)):
        file = _file_of(name)
        assert file is not None
        made.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    made.update(Path(_native.__file__).read_bytes())
    return made.hexdigest()[:24]


def _closure(module: str) -> set[str]:
    """A module and the modules of this package that it imports, directly or indirectly."""
    found: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name not in found and _file_of(name) is not None:
            found.add(name)
            todo += _imported(name)
    return found


@cache
def _imported(module: str) -> frozenset[str]:
    """The modules of this package that a source names, also inside functions and tables."""
    file = _file_of(module)
    assert file is not None
    found = {module.rpartition(".")[0] or module}
    if not module.count("."):  # the package itself names all, for its users
        return frozenset()
    text = _TYPES_ONLY.sub("", file.read_text(encoding="utf-8"))
    found |= {*_NAMED.findall(text)}
    for origin, names, plain in _IMPORT.findall(text):
        found.add(origin or plain)
        for name in re.findall(r"\w+", re.sub(r"\bas\s+\w+", "", names)):
            found.add(f"{origin}.{name}")
    return frozenset(name for name in found if _file_of(name) is not None)


def _file_of(module: str) -> Path | None:
    return _files().get(module)


@cache
def _files() -> dict[str, Path]:
    """The modules of this package with their files."""
    found = {}
    for folder, _, names in os.walk(PACKAGE):
        parts = [PACKAGE.name, *Path(folder).relative_to(PACKAGE).parts]
        for name in names:
            if name.endswith(".py"):
                own = [] if name == "__init__.py" else [name.removesuffix(".py")]
                found[".".join([*parts, *own])] = Path(folder, name)
    return found


def callable_key(function: Callable[..., Any]) -> str | None:
    """The key of a user's callable: its `sigmerge_key`, else its digest."""
    declared = getattr(function, "sigmerge_key", None)
    return callable_digest(function) if declared is None else f"declared {declared}"


def callable_files(function: Callable[..., Any]) -> list[Path]:
    """Files whose names are among a callable's constants, or in what it closes over.

    Empty for a callable with a `sigmerge_key`, which covers everything that it reads.
    """
    if hasattr(function, "sigmerge_key"):
        return []
    try:
        names = sorted(set(_texts(_described(function, {}))))
    except Unnameable:
        return []
    return [Path(name) for name in names if is_regular(Path(name))]


def _texts(described: Any) -> Iterator[str]:
    """The texts and paths in a description."""
    match described:
        case ["str", str(text)]:
            yield ast.literal_eval(text)
        case ["PosixPath", str(text)]:
            yield ast.literal_eval(text.removeprefix("PosixPath(").removesuffix(")"))
        case list() | tuple():
            for part in described:
                yield from _texts(part)


def _modules(described: Any) -> Iterator[Path]:
    """The files of the user's modules in a description."""
    match described:
        case ["module of the user", str(name), _]:
            yield from _users_files(name)
        case list() | tuple():
            for part in described:
                yield from _modules(part)


class Unnameable(Exception):
    """Raised for a value whose content cannot be described."""


def callable_digest(function: Callable[..., Any]) -> str | None:
    """A digest of a user's callable: its code, constants, and all that it closes over or names.

    Also covers the variables of the environment that it, or a module of the user's, names.
    None if a part cannot be described by its content, for example a loaded model. Covers the names
    of files that it reads, not their content (see `callable_files`).
    """
    try:
        described = _described(function, {})
        named = variables([*_texts(described), *map(source_text, _modules(described))])
        text = json.dumps([described, named], sort_keys=True)
    except Unnameable:
        return None
    return hashlib.sha256(f"{sys.version}\n{text}".encode()).hexdigest()[:32]


def _described(value: Any, seen: dict[int, int]) -> Any:
    """A value as plain content; a value that was met before is a back-reference by number."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return [type(value).__name__, repr(value)]
    if value is Ellipsis or isinstance(value, Path | range | slice | np.generic | np.dtype):
        return [type(value).__name__, repr(value)]
    if id(value) in seen:
        return ["again", seen[id(value)]]
    seen[id(value)] = len(seen)
    return [type(value).__name__, *_parts(value, seen)]


def _parts(value: Any, seen: dict[int, int]) -> Iterator[Any]:
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest()
    elif isinstance(value, list | tuple):
        yield from (_described(each, seen) for each in value)
    elif isinstance(value, set | frozenset):
        yield sorted((_described(each, dict(seen)) for each in value), key=json.dumps)
    elif isinstance(value, Mapping):
        yield from ([_described(k, seen), _described(v, seen)] for k, v in value.items())
    elif isinstance(value, partial):
        yield from (_described(each, seen) for each in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        yield from (_described(each, seen) for each in (value.__func__, value.__self__))
    elif isinstance(value, ModuleType):
        yield _module(value.__name__)
    elif isinstance(value, FunctionType):
        yield from _function(value, seen)
    elif isinstance(value, type):
        yield from _class(value, seen)
    elif dataclasses.is_dataclass(value):
        yield _described(type(value), seen)
        for field in dataclasses.fields(value):
            yield [field.name, _described(getattr(value, field.name), seen)]
    elif type(value).__module__ == "builtins" and callable(value):
        yield value.__qualname__
    elif type(value).__module__ not in ("builtins", "typing") and _is_plain_object(value):
        yield _described(type(value), seen)
        yield from ([name, _described(each, seen)] for name, each in vars(value).items())
    else:
        raise Unnameable(repr(type(value)))


def _is_plain_object(value: Any) -> bool:
    """Whether an object's class is written in Python and its state is its `__dict__`."""
    kind = type(value)
    return _is_users(kind) and hasattr(value, "__dict__") and not hasattr(kind, "__slots__")


def _is_users(value: Any) -> bool:
    """Whether a class or function is the user's, not Python's or a library's."""
    return _is_users_module(str(getattr(value, "__module__", "")))


def _is_users_module(name: str) -> bool:
    top = name.partition(".")[0]
    if top == PACKAGE.name:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return top not in {*sys.stdlib_module_names, *sys.builtin_module_names}
    return not is_installed(Path(file))


def _module(name: str) -> Any:
    """A library by its version; a user's module by its files and their imports.

    Whether it is loaded yet makes no difference.
    """
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return name
    if top == PACKAGE.name:
        return name, _package_digest()
    if files := _users_files(name):
        return "module of the user", name, [[file.name, _content(file)] for file in files]
    return name, _version(top)


def _users_files(name: str) -> list[Path]:
    """The files of a user's module and its imports."""
    homes = users_homes()
    found = {*module_files(name, homes)}
    if file := getattr(sys.modules.get(name), "__file__", None):
        own = Path(file)
        if is_installed(own):
            return []
        above = name.count(".") + (own.name == "__init__.py")
        home = own.parents[min(above, len(own.parents) - 1)]
        found |= {*imported_files(own, [*homes, home])}
    return sorted(found)


def _version(top: str) -> str:
    """Version of the distribution that contains a module."""
    try:
        return version(top)
    except PackageNotFoundError:
        return " ".join(f"{n} {version(n)}" for n in sorted({*_distributions().get(top, ())}))


@cache
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


@cache
def _package_digest() -> str:
    """A digest of this whole package, whose public names are imported lazily."""
    return hashlib.sha256("".join(map(_content, _files().values())).encode()).hexdigest()


def _content(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        raise Unnameable(str(file)) from None


def _function(function: FunctionType, seen: dict[int, int]) -> Iterator[Any]:
    if not _is_users(function):
        yield _module(function.__module__), function.__qualname__
        return
    yield _code(function.__code__, seen)
    yield _described(function.__defaults__, seen)
    yield _described(function.__kwdefaults__, seen)
    for cell in function.__closure__ or ():
        try:
            yield _described(cell.cell_contents, seen)
        except ValueError:  # not bound yet
            yield "empty"
    names, scope = _names(function.__code__), function.__globals__
    for name in sorted(names & scope.keys()):
        yield [name, _described(scope[name], seen)]
        if isinstance(scope[name], ModuleType):
            yield from _used(scope[name], names, seen)
    package = str(scope.get("__package__") or "")
    for name in sorted(_imported_names(function.__code__, package)):
        yield [name, _module(name)]


def _used(module: ModuleType, names: set[str], seen: dict[int, int]) -> Iterator[Any]:
    """The globals of a user's module that a function uses, by their current values."""
    if not _is_users_module(module.__name__) or module.__name__.startswith(PACKAGE.name):
        return
    for name in sorted(names & vars(module).keys()):
        value = vars(module)[name]
        if not isinstance(value, ModuleType):
            yield [name, _described(value, seen)]
        elif value.__name__.startswith(f"{module.__name__}."):
            yield from _used(value, names, seen)


def _imported_names(code: CodeType, package: str) -> set[str]:
    """The modules that code imports at run time; of a user's package all submodules it may mean."""
    found: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            name, homes = str(step.argval), users_homes()
            within = [name, *([f"{package}.{name}".rstrip(".")] if package else [])]
            parts = [f"{each}.{part}" for each in within for part in code.co_names]
            found |= {name, *(each for each in [*within, *parts] if module_files(each, homes))}
    inner = (_imported_names(c, package) for c in code.co_consts if isinstance(c, CodeType))
    return found.union(*inner)


_OF_ANY_CLASS = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__",
    "__static_attributes__", "__qualname__", "__orig_bases__", "__parameters__",
}  # fmt: skip
_OF_A_DATACLASS = {
    "__dataclass_params__", "__dataclass_fields__", "__match_args__", "__init__", "__repr__",
    "__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__", "__replace__", "__setattr__",
    "__delattr__", "__getstate__", "__setstate__", "__slots__",
}  # fmt: skip
"""Attributes that `dataclass` generates; the fields themselves are described by their values."""


def _class(kind: type, seen: dict[int, int]) -> Iterator[Any]:
    if not _is_users(kind):
        yield _module(kind.__module__), kind.__qualname__
        return
    yield from (_described(base, seen) for base in kind.__bases__)
    for name, member in sorted(vars(kind).items()):
        if name in _OF_ANY_CLASS or (dataclasses.is_dataclass(kind) and name in _OF_A_DATACLASS):
            continue
        plain = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(plain, FunctionType | type) or not hasattr(type(plain), "__get__"):
            yield [name, _described(plain, seen)]


def _code(code: CodeType, seen: dict[int, int]) -> Any:
    constants = [
        _code(each, seen) if isinstance(each, CodeType) else _described(each, seen)
        for each in code.co_consts
    ]
    return [code.co_code.hex(), constants, [*code.co_names], [*code.co_varnames]]


def _names(code: CodeType) -> set[str]:
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)
