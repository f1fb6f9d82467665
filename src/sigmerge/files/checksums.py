"""A checksum inside a JSON object, which detects accidental damage.

It may also cover the name under which the object is stored, so that a renamed one is detected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"


def checksum_of(content: Any, name: str = "") -> str:
    """The checksum of plain content, independent of the order of its keys."""
    text = json.dumps([name, content] if name else content, default=repr)
    as_read = json.loads(text)  # keys are texts there
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def sealed(content: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """An object with its checksum."""
    return {**content, CHECKSUM: checksum_of(content, name)}


def is_intact(content: Mapping[str, Any], name: str = "") -> bool:
    """Whether an object has the checksum that it was sealed with."""
    plain = {key: value for key, value in content.items() if key != CHECKSUM}
    return bool(content.get(CHECKSUM) == checksum_of(plain, name))
