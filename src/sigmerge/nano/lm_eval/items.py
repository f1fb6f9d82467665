"""A pool's items as the harness reads them. Another pool: `--metadata '{"pool": "PATH"}'`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasets import Dataset

from sigmerge.nano.files import NANO_SPLITS, POOL, load_items


def items(domain: str, pool: str | Path = POOL, **_: Any) -> dict[str, Dataset]:
    """Both splits of a domain."""
    return {
        split: Dataset.from_list([asdict(item) for item in load_items(split, domain, Path(pool))])
        for split in NANO_SPLITS
    }
