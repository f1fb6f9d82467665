"""Self-contained pages: one style sheet, one script, and a policy that admits nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from typing import Any

from markupsafe import Markup

from sigmerge.errors import require


def require_page() -> None:
    """Raise MissingExtra if jinja2 is not installed."""
    require("The report page", report=["jinja2"])


def page(template: str, **values: Any) -> str:
    """A template of this folder with the project's style and script in it."""
    require_page()
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["direction"] = cell_direction
    style, script = _asset("page.css"), _asset("page.js")
    return environment.get_template(template).render(
        policy=_policy(style, script), style=Markup(style), script=Markup(script), **values
    )


def cell_direction(cell: str) -> str:
    """The class of a printed cell: a gain or a loss, unless it lies within its interval."""
    found = re.fullmatch(r"([+−])([\d.]+)(?: ± ([\d.]+))?", cell)
    if found is None or float(found[2]) <= float(found[3] or 0.0):
        return ""
    return "up" if found[1] == "+" else "down"


def _asset(name: str) -> str:
    return resources.files("sigmerge.pages").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Only this style and this script, and nothing from outside."""

    def source(content: str) -> str:
        digest = hashlib.sha256(content.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    return (
        f"default-src 'none'; style-src {source(style)}; script-src {source(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
