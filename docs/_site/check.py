"""`python docs/_site/check.py FOLDER`: the links of the built site lead somewhere.

A link is a page or a file of the folder, with its anchor. Scripts, styles, fonts and pictures come
from the folder alone: a page may link to other places, and no request goes there by itself.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "use": "href",
}


class Page(HTMLParser):
    """What a page links to, what a browser fetches for it, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in FETCHED and given.get(FETCHED[tag]):
            self.fetched.append(given[FETCHED[tag]])


def problems(site: Path) -> list[str]:
    """What is wrong with the pages and styles of a folder, one line each."""
    pages = {file.resolve(): Page() for file in sorted(site.rglob("*.html"))}
    for file, page in pages.items():
        page.feed(file.read_text(encoding="utf-8"))
    found = []
    for file, page in pages.items():
        here = file.relative_to(site.resolve())
        found += [f"{here}: fetches {each}" for each in page.fetched if _elsewhere(each)]
        for link in [*page.links, *(each for each in page.fetched if not _elsewhere(each))]:
            if told := _broken(link, file, pages):
                found.append(f"{here}: {link}: {told}")
    for style in sorted(site.rglob("*.css")):
        for each in re.findall(
            r"(?:url\(|@import\s+)[\"']?([^\"')\s;]+)", style.read_text(encoding="utf-8")
        ):
            if _elsewhere(each):
                found.append(f"{style.relative_to(site)}: fetches {each}")
    return found


def _elsewhere(link: str) -> bool:
    return bool(urlsplit(link).netloc) or urlsplit(link).scheme in ("http", "https")


def _broken(link: str, file: Path, pages: dict[Path, Page]) -> str | None:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    if not target.exists():
        return "leads nowhere"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return "no such anchor"
    return None


if __name__ == "__main__":
    told = problems(Path(sys.argv[1]))
    sys.exit("\n".join(told) or None)
