"""Equations as MathML, which a browser draws without any script or font of another place."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert


def inline(writer: Any, node: Any) -> None:
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block(writer: Any, node: Any) -> None:
    drawn = convert(node.astext(), display="block")
    writer.body.append(f'<div class="math">{drawn}</div>')
    raise nodes.SkipNode
