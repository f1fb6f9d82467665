"""YAML files, read within limits: size, depth, what aliases expand to, one value for a key.

Every JSON document is accepted, also where YAML 1.1 differs: `5e-1` is a number, an escaped
surrogate pair is one character, and a tab is white space.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from sigmerge.errors import SigmergeError
from sigmerge.files.documents import DEEPEST_DOCUMENT, read_bytes
from sigmerge.files.piped import kept
from sigmerge.messages import shown

LARGEST_YAML = 1 << 20
"""Bytes of the largest YAML document that is read."""
MOST_NODES = 200_000
"""Maximum number of nodes of a document after expansion of aliases."""
LONGEST_NUMBER = 1000
"""Characters of a number or a date; YAML's base-60 numbers take quadratic time to read."""

Place = tuple[str | int, ...]
"""The keys and positions that lead to a value."""


@dataclass(frozen=True)
class Yaml:
    """A document: its value, the line of every key and item, and keys that are given twice."""

    value: Any
    lines: dict[Place, int] = field(default_factory=dict)
    twice: tuple[Place, ...] = ()


def read_yaml(file: Path, what: str, error: type[SigmergeError] = SigmergeError) -> Any:
    """The YAML value in a file; a key that is given twice is an error."""
    found = parse_yaml(decoded(file, what, error), str(file), error)
    if found.twice:
        dotted, line = ".".join(map(str, found.twice[0])), found.lines[found.twice[0]]
        raise error(f"{file}: line {line}, {shown(dotted)}: is given twice.")
    return found.value


def decoded(file: Path, what: str, error: type[SigmergeError] = SigmergeError) -> str:
    """The text of a YAML file or of a document from a pipe, up to the size limit."""
    content = kept(file)
    if content is None:
        content = read_bytes(file, what, error, LARGEST_YAML)
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        raise error(f"{file}: is not UTF-8 text ({problem.reason}).") from None


def parse_yaml(text: str, where: str, error: type[SigmergeError] = SigmergeError) -> Yaml:
    """A YAML document; `where` names the text in errors."""
    if len(text) > LARGEST_YAML:
        raise error(f"{where}: is larger than 1 MiB, too large for a YAML document.")
    try:
        loader = _Limited(text)
        node = loader.only_node()
        lines, twice = _lines(node)
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as problem:
        raise error(f"{where}: {_trouble(problem)}") from None
    except (yaml.YAMLError, ValueError, ArithmeticError) as problem:
        raise error(f"{where}: not valid YAML: {problem}") from None
    except (AttributeError, LookupError, TypeError):  # PyYAML's, for a wrong tag: `!!bool x`
        raise error(f"{where}: not valid YAML: a value is not what its tag says.") from None
    except RecursionError:  # an alias inside what it stands for, through a key
        raise error(f"{where}: YAML nested too deeply.") from None
    return Yaml(value, lines, tuple(twice))


def as_yaml(value: Any) -> str:
    """A document with this value, from which `parse_yaml` reads the same."""
    return _dumped(value)


def in_yaml(text: str) -> str:
    """A text as a YAML scalar, also inside braces: quoted where it would change its meaning."""
    return _dumped([text], default_flow_style=True, width=math.inf).strip()[1:-1]


def _dumped(value: Any, **how: Any) -> str:
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **how))


def documents(text: str) -> list[str]:
    """The YAML documents of a text, each with its directives and the line that begins it."""
    loader, starts, directed = _Limited(text), [], False
    try:
        while loader.check_token():
            token = loader.get_token()
            directive = isinstance(token, yaml.DirectiveToken)
            if not directed and (directive or isinstance(token, yaml.DocumentStartToken)):
                starts.append(token.start_mark.index)
            directed = directive
    except yaml.YAMLError:  # which is reported where the text is parsed
        return [text]
    edges = [0, *starts, len(text)]
    return [text[begin:end] for begin, end in pairwise(edges) if text[begin:end].strip()]


class _Limited(yaml.SafeLoader):
    """A loader that counts nodes and depth, and stops before it builds too much."""

    def __init__(self, text: str) -> None:
        super().__init__(text.replace("\t", " ") if "\t" in text and _is_json(text) else text)
        self._depth = 0
        self._nodes = 0
        self._expanded: dict[int, int] = {}

    def only_node(self) -> Any:
        """The single document, or None; empty further documents are skipped."""
        found = [node for node in self._composed() if not _is_empty(node)]
        if len(found) > 1:
            self._refuse(found[1].start_mark, _SEVERAL)
        return found[0] if found else None

    def _composed(self) -> Iterator[Any]:
        while self.check_node():  # type: ignore[no-untyped-call]
            yield self.get_node()  # type: ignore[no-untyped-call]

    def scan_flow_scalar(self, style: str) -> Any:
        """Join the surrogate pairs by which JSON escapes characters beyond 16 bits."""
        token: Any = super().scan_flow_scalar(style)  # type: ignore[no-untyped-call]
        try:
            token.value = token.value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._refuse(token.start_mark, "has half of a character (a surrogate without another)")
        return token

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark
        alias = self.check_event(yaml.AliasEvent)
        before = self._nodes
        self._depth += 1
        if self._depth > DEEPEST_DOCUMENT:
            self._refuse(mark, f"is nested deeper than {DEEPEST_DOCUMENT} levels")
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if alias:
            if id(node) not in self._expanded:
                self._refuse(mark, "is an alias inside what it stands for")
            self._nodes += self._expanded[id(node)]
        else:
            self._nodes += 1
            self._expanded[id(node)] = self._nodes - before
        if self._nodes > MOST_NODES:
            self._refuse(mark, f"the document has more than {MOST_NODES} values")
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        if len(text) > LONGEST_NUMBER and not str(node.tag).endswith((":str", ":binary")):
            self._refuse(mark, f"{shown(text)} is too long for a number")
        return node

    def fetch_flow_collection_start(self, kind: Any) -> None:
        """Limit the depth here, too: the scanner is quadratic in the number of open brackets."""
        if self.flow_level > DEEPEST_DOCUMENT:  # type: ignore[has-type]
            self._refuse(self.get_mark(), f"is nested deeper than {DEEPEST_DOCUMENT} levels")
        super().fetch_flow_collection_start(kind)  # type: ignore[no-untyped-call]

    def _refuse(self, mark: Any, why: str) -> None:
        raise yaml.composer.ComposerError(None, None, why, mark)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes texts which `_Limited` would read as numbers."""


for _kind in (_Limited, _Dumper):
    _kind.add_implicit_resolver(  # type: ignore[no-untyped-call]
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]{1,3}$"),
        list("-+.0123456789"),
    )


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def _is_empty(node: yaml.Node) -> bool:
    """Whether a document holds only white space and comments, as one after a final `---`."""
    return isinstance(node, yaml.ScalarNode) and node.value == "" and node.style is None


def _lines(root: yaml.Node | None) -> tuple[dict[Place, int], list[Place]]:
    """The line of every key and item, and the keys that are given twice.

    The target of an alias is visited where it is defined.
    """
    lines: dict[Place, int] = {}
    twice: list[Place] = []
    walked: set[int] = set()
    todo: list[tuple[yaml.Node, Place]] = [(root, ())] if root else []
    while todo:
        node, place = todo.pop()
        lines.setdefault(place, node.start_mark.line + 1)
        if id(node) in walked:
            continue
        walked.add(id(node))
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                here = (*place, key.value)
                lines[here] = key.start_mark.line + 1
                if key.value in seen and key.value != "<<":
                    twice.append(here)
                seen.add(key.value)
                todo.append((value, here))
        elif isinstance(node, yaml.SequenceNode):
            todo += [(value, (*place, i)) for i, value in enumerate(node.value)]
    return lines, sorted(twice, key=lambda place: lines[place])


_SEVERAL = "holds several YAML documents (---); only one is expected, so write a file for each"


def _trouble(error: yaml.MarkedYAMLError) -> str:
    if error.problem == _SEVERAL:
        return _SEVERAL
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"not valid YAML: {place}{error.problem or error.context}"
