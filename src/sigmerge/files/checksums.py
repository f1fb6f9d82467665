"""A checksum inside a JSON object, by which one with a wrong bit is known.

It detects accidents. It may also cover the name under which the object is kept: then one under the
name of another is known, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"


def checksum_of(content: Any, name: str = "") -> str:
    """The checksum of plain content, in whatever order its keys stand."""
    text = json.dumps([name, content] if name else content, default=repr)
    as_read = json.loads(text)  # keys are texts there
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def sealed(content: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """An object with its checksum."""
    return {**content, CHECKSUM: checksum_of(content, name)}


def is_intact(content: Mapping[str, Any], name: str = "") -> bool:
    """Whether an object has a checksum and is as it was sealed."""
    plain = {key: value for key, value in content.items() if key != CHECKSUM}
    return bool(content.get(CHECKSUM) == checksum_of(plain, name))
