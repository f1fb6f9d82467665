"""YAML files, read within limits: size, depth, what aliases expand to, one value for a key."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from sigmerge.errors import SigmergeError
from sigmerge.files.documents import DEEPEST_DOCUMENT, read_bytes
from sigmerge.words import shown

LARGEST_YAML = 1 << 20
"""Bytes of the largest YAML document that is read."""
MOST_NODES = 200_000
"""Nodes of a document when every alias is replaced by what it stands for."""
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
    """The text of a YAML file within the limit of size."""
    try:
        return read_bytes(file, what, error, LARGEST_YAML).decode()
    except UnicodeDecodeError as problem:
        raise error(f"{file}: is not UTF-8 text ({problem.reason}).") from None


def parse_yaml(text: str, where: str, error: type[SigmergeError] = SigmergeError) -> Yaml:
    """A YAML document; `where` names the text in errors."""
    if len(text) > LARGEST_YAML:
        raise error(f"{where}: is larger than 1 MiB, too large for a YAML document.")
    try:
        loader = _Limited(text)
        node = loader.get_single_node()
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


def in_yaml(text: str) -> str:
    """A text as a document has it, also in braces: in quotes where it would be something else."""
    listed = yaml.safe_dump([text], default_flow_style=True, allow_unicode=True, width=math.inf)
    return listed.strip()[1:-1]


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
    """Counts while nodes are composed, so that nothing is built that is too deep or too large."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._nodes = 0
        self._expanded: dict[int, int] = {}

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
        """The scanner reads ahead of what is composed, in quadratic time of the brackets."""
        if self.flow_level > DEEPEST_DOCUMENT:  # type: ignore[has-type]
            self._refuse(self.get_mark(), f"is nested deeper than {DEEPEST_DOCUMENT} levels")
        super().fetch_flow_collection_start(kind)  # type: ignore[no-untyped-call]

    def _refuse(self, mark: Any, why: str) -> None:
        raise yaml.composer.ComposerError(None, None, why, mark)


def _lines(root: yaml.Node | None) -> tuple[dict[Place, int], list[Place]]:
    """The line of every key and item, and the keys that are given twice.

    What an alias stands for was looked at where it is written.
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


def _trouble(error: yaml.MarkedYAMLError) -> str:
    if "single document" in str(error.context):
        return "holds several YAML documents (---); only one is expected, so write a file for each"
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"not valid YAML: {place}{error.problem or error.context}"
