"""README.md of a result: its models, papers, licence and recipe, as the hub reads them.

A model is named by its id where its folder is of the hub; a local folder has no id there, and gets
none. The licence is the strictest of the members', where one of them includes the others' terms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.folder import Checkpoint, on_hub
from sigmerge.checkpoints.links import check_file, is_there
from sigmerge.checkpoints.plain import is_pipeline
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.errors import SigmergeError
from sigmerge.files.documents import read_bytes
from sigmerge.files.yaml_documents import as_yaml, parse_yaml

HUB = "https://huggingface.co"
CARD = "README.md"
PERMISSIVE = (
    "cc0-1.0", "unlicense", "0bsd", "wtfpl", "mit", "isc", "zlib", "bsl-1.0", "bsd-2-clause",
    "bsd-3-clause", "bsd-3-clause-clear", "bsd", "ncsa", "cc-by-4.0", "cc-by-3.0", "apache-2.0",
)  # fmt: skip
"""Licences that ask for little more than a notice, the strictest last. Work under one of them may
be passed on under a stricter one."""
LATER = {
    "gpl-3.0": ("lgpl-3.0", "lgpl", "lgpl-2.1"),
    "agpl-3.0": ("gpl-3.0", "gpl", "lgpl-3.0", "lgpl", "lgpl-2.1"),
    "cc-by-nc-4.0": ("cc-by-nc-3.0", "cc-by-nc-2.0"),
    "cc-by-nc-sa-4.0": ("cc-by-nc-4.0", "cc-by-nc-3.0", "cc-by-nc-2.0"),
}
"""Licences whose terms include those of others."""


@dataclass(frozen=True)
class Licence:
    """What the members' cards say: the entries of the result's, or why there are none."""

    entries: Mapping[str, str]
    warning: str = ""


def model_card(
    title: str,
    pool: PoolMembers,
    recipe: str,
    notes: Sequence[str],
    more: Sequence[str] = (),
    role: Callable[[str], str] = "expert `{}`".format,
    library: str = "",
) -> str:
    """What this is and how to make it again. The same for every run of the recipe.

    `role` is what a model is called by its name.
    """
    found, named = licence(pool.members), hub_names(pool.members.values())
    library = library or ("diffusers" if is_pipeline(pool.layout.path) else "transformers")
    known = library != "transformers" or not pool.layout.parts
    front: dict[str, Any] = {**({"library_name": library} if known else {}), **found.entries}
    if named:
        front |= {"base_model": named, "base_model_relation": "merge"}
    front["tags"] = ["merge", "sigmerge"]
    lines = ["---", as_yaml(front).rstrip(), "---", ""]
    lines += [f"# {title}", "", "Made with [sigmerge](sigmerge/recipe.yaml), without training.", ""]
    if pool.reference:
        lines += [f"- reference: {_linked(pool.reference)}"]
    lines += [f"- {role(name)}: {_linked(member)}" for name, member in pool.experts.items()]
    lines += ["", *map(_with_papers, more), *([""] if more else [])]
    warnings = [f"licence: {found.warning}"] if found.warning else []
    lines += [f"- note: {note}" for note in (*warnings, *notes)]
    lines += [*([""] if notes or warnings else []), "## Recipe", ""]
    lines += ["```yaml", recipe.rstrip(), "```", ""]
    return "\n".join(lines)


def hub_names(members: Iterable[Checkpoint]) -> list[str]:
    """The ids of the members that are of the hub, each once."""
    parts = [part for member in members for part in (member.path, member.adapter)]
    return list(dict.fromkeys(name for part in parts if part and (name := on_hub(part))))


def licence(members: Mapping[str, Checkpoint]) -> Licence:
    """The licence of a merge: the strictest of the members', if the others allow it."""
    found = {name: _licence_of(member) for name, member in members.items()}
    if unknown := [name for name, entries in found.items() if not entries]:
        return Licence(
            {},
            f"that of {', '.join(unknown)} is not known (no {CARD} there says one); "
            "look it up before you pass this on",
        )
    distinct = list({tuple(sorted(e.items())): e for e in found.values()}.values())
    for one in distinct:
        if all(one == other or _includes(one, other) for other in distinct):
            return Licence(one)
    told = ", ".join(f"{name} {_called(entries)}" for name, entries in found.items())
    return Licence({}, f"the members' do not include one another ({told}); look up what holds for "
                       "a work of all of them")  # fmt: skip


def _includes(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether work under another licence may be passed on under this one."""
    own, theirs = one["license"], other["license"]
    if theirs in PERMISSIVE:
        return own not in PERMISSIVE or PERMISSIVE.index(theirs) < PERMISSIVE.index(own)
    return theirs in LATER.get(own, ())


def _called(entries: Mapping[str, str]) -> str:
    return entries.get("license_name", entries["license"])


def _licence_of(member: Checkpoint) -> dict[str, str]:
    """What the card of a member says of its licence; that of a model and an adapter if they agree.

    `other` is one with a name or a link; alone it says nothing.
    """
    found = [_stated(part) for part in (member.path, member.adapter) if part]
    return found[0] if all(one == found[0] for one in found) else {}


def _stated(folder: Path) -> dict[str, str]:
    file = folder / CARD
    if not is_there(file):
        return {}
    try:
        check_file(folder, file)
        text = read_bytes(file, "a model card", SigmergeError).decode("utf-8", "replace")
        front = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
        content = parse_yaml(front[1], str(file), SigmergeError).value if front else None
    except SigmergeError:  # a card of somebody else, which decides no weight
        return {}
    if not isinstance(content, dict):
        return {}
    keys = ("license", "license_name", "license_link")
    entries = {key: content[key].strip() for key in keys if isinstance(content.get(key), str)}
    stated = entries.get("license", "").lower()
    if not stated or stated == "unknown" or (stated == "other" and len(entries) == 1):
        return {}
    return {**entries, "license": stated}


def _linked(member: Checkpoint) -> str:
    """A member by its address on the hub, or by the name of its folder."""
    parts = [part for part in (member.path, member.adapter) if part]
    return " + ".join(
        f"[{name}]({HUB}/{name})" if (name := on_hub(part)) else f"`{' '.join(part.name.split())}`"
        for part in parts
    )


def _with_papers(text: str) -> str:
    """A text whose numbers of papers are links."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
