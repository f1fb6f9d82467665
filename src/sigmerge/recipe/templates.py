"""`chat_template:` of a recipe: a name, a file, the template itself, or auto."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from sigmerge.checkpoints.companions import chat_template_of
from sigmerge.errors import RecipeError
from sigmerge.files.documents import read_bytes
from sigmerge.messages import shown, unknown

TEMPLATES: Final = Path(__file__).parent / "chat_templates"
TEMPLATE_NAMES: Final = ("alpaca", "chatml", "exaone", "llama3", "mistral")


def chat_template(wanted: str, folder: Path, models: Iterable[Path]) -> str | None:
    """The template's text. `auto` is the one that most models have, None if none has one."""
    if wanted == "auto":
        found = Counter(text.strip() for model in models if (text := chat_template_of(model)))
        return found.most_common(1)[0][0] if found else None
    if "{" in wanted:
        return wanted
    if wanted in TEMPLATE_NAMES:
        return (TEMPLATES / f"{wanted}.jinja").read_text(encoding="utf-8")
    file = folder / Path(wanted).expanduser()
    if file.suffix != ".jinja":
        told = unknown("chat template", wanted, (*TEMPLATE_NAMES, "auto"))
        raise RecipeError(f"{told}; or give a .jinja file, or the template itself")
    try:
        return read_bytes(file, "a chat template", RecipeError).decode()
    except (OSError, ValueError) as error:
        raise RecipeError(f"{shown(str(file))}: cannot be read ({error})") from None
