"""The types and the table of methods, made of the operators' tables.

`python -m tests.method_stubs` writes src/sigmerge/methods.pyi and prints the table.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from json import dumps
from pathlib import Path
from typing import Any

from sigmerge import methods
from sigmerge.operators.base import Parameter
from sigmerge.operators.table import OF_OTHERS

STUB = Path(methods.__file__).with_suffix(".pyi")
HEAD = '''"""Made by `python -m tests.method_stubs` from the operators' tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from sigmerge.operators.base import Operator, Parameter

Number: TypeAlias = float | Sequence[Any]
Numbers: TypeAlias = Number | Mapping[str, Number]

ARGUMENT: dict[str, str]
PRESET: str
CLASSES: dict[str, str]

def class_name(name: str) -> str: ...
def own_parameters(made: Operator) -> list[Parameter]: ...

@dataclass(frozen=True)
class Method:
    operator: ClassVar[str]
    @staticmethod
    def of(operator: str | Operator, /, **arguments: Any) -> Method: ...
    def arguments(self) -> dict[str, Any]: ...
    def section(self, experts: Mapping[str, str]) -> dict[str, Any]: ...
    def settings(self, experts: int) -> dict[str, Any]: ...
    @property
    def made(self) -> Operator: ...
'''


def stub() -> str:
    """The text of the stub."""
    text = HEAD
    for name, operator in methods.CLASSES.items():
        made = getattr(methods, name)
        known = {methods.ARGUMENT.get(p.name, p.name): p for p in _parameters(operator)}
        text += f"\n@dataclass(frozen=True, kw_only=True)\nclass {name}(Method):\n"
        for each in fields(made):
            kind = _kind(known[each.name]) if each.name in known else _on(operator)
            free = each.default is MISSING and each.default_factory is MISSING
            text += f"    {each.name}: {kind}{'' if free else ' = ...'}\n"
        if not fields(made):
            text += "    pass\n"
    return text


def table() -> str:
    """The table of methods in docs/python-api.md."""
    lines = ["| method | arguments |", "|---|---|"]
    for name in methods.CLASSES:
        made = getattr(methods, name)
        said = ", ".join(f"`{each.name}={_default(each)}`" for each in fields(made))
        lines.append(f"| `{name}(…)` | {said} |")
    return "\n".join(lines)


def _default(each: Field[Any]) -> str:
    if each.default is not MISSING:
        return repr(each.default)
    if each.default_factory is MISSING:
        return "…"
    made = each.default_factory()
    several = made if isinstance(made, tuple) else (made,)
    said = ", ".join(f"{type(method).__name__}()" for method in several)
    return f"({said})" if isinstance(made, tuple) else said


def _on(operator: str) -> str:
    """The type of the methods that a method stands on."""
    count = len(OF_OTHERS[operator])
    return "Method" if count == 1 else f"tuple[{', '.join(['Method'] * count)}]"


def _parameters(operator: str) -> list[Parameter]:
    return methods.own_parameters(methods.operator(operator))


def _kind(parameter: Parameter) -> str:
    if isinstance(parameter.kind, tuple):
        return f"Literal[{', '.join(map(dumps, parameter.kind))}] | Sequence[Any]"
    if parameter.kind is bool:
        return "bool | Sequence[Any]"
    plain = "Numbers" if parameter.per_model else "Number"
    return f'{plain} | Literal["auto"]' if parameter.auto else plain


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    print(table())
