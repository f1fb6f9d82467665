"""Prompts as templates over the columns of a record, such as "Question: {question}"."""

from __future__ import annotations

from string import Formatter

from sigmerge.errors import ScoreError
from sigmerge.evaluation.sources import Item


def prompt_columns(template: str) -> list[str]:
    """The columns that a template names; ValueError if it is none."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def check_template(template: str) -> str:
    """The template itself; ValueError if it names anything but columns."""
    if wrong := [name for name in prompt_columns(template) if not name or set(name) & set(".[")]:
        raise ValueError(
            f"{{{wrong[0]}}} names no column; write {{column}}, and columns: of a file "
            "renames what lies deeper"
        )
    return template


def prompt_of(template: str, item: Item, benchmark: str) -> str:
    """The template with the record's values."""
    try:
        return template.format(**item.record)
    except (KeyError, ValueError, TypeError) as error:
        raise ScoreError(
            f"{benchmark}: the prompt template {template!r} does not fit the record "
            f"{item.id} ({error!r}); it has {', '.join(item.record)}."
        ) from None
