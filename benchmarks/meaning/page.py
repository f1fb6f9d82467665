"""The page of results: one section for each part, written by that part's command."""

from __future__ import annotations

import re
from pathlib import Path

from sigmerge.errors import SigmergeError

PAGE = Path("docs/results/weights.md")


def put_section(title: str, lines: list[str]) -> None:
    """Write a section in place of the one of that title, or behind the others."""
    text = PAGE.read_text(encoding="utf-8")
    section = "\n".join([f"## {title}", "", *lines]).rstrip() + "\n"
    old = re.search(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", text, re.M | re.S)
    if old is None:
        text = f"{text.rstrip()}\n\n{section}"
    else:
        rest = text[old.end() :]
        text = text[: old.start()] + section + ("\n" + rest if rest else "")
    PAGE.write_text(text, encoding="utf-8")


def reason(error: SigmergeError) -> str:
    """What an error says, without the folders of this run: the last of its lines."""
    told = str(error).splitlines()[-1].strip(" -").removeprefix("adapter: ")
    return re.sub(r"(?:/[^\s:]+)+: ", "", told).partition("; ")[0].rstrip(".")
