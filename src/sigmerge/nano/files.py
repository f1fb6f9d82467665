"""The files of a pool: checkpoints, splits, probe prompts, exemplars, log and sums.

reference/ math/ …              HF checkpoint folders
splits/<split>/<domain>.jsonl   {"id", "domain", "prompt", "answer"}
exemplars/<domain>.jsonl        {"prompt", "response"}
probe.jsonl                     {"prompt"}
log.jsonl                       how it was trained and what its members score
SHA256SUMS                      of all of the above, as `sha256sum --check` reads it
.sigmerge/                      what merges of the pool left to be remembered; no part of it
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sigmerge.errors import PoolError
from sigmerge.files.documents import read_bytes, read_json_lines
from sigmerge.kept import BESIDE
from sigmerge.nano.facts import NANO_DOMAINS, Domain, Fact

POOL = Path(__file__).parent / "pool"
RECIPES = Path(__file__).parent / "recipes"
REFERENCE = "reference"
MEMBERS = (REFERENCE, *NANO_DOMAINS)
NANO_SPLITS = ("calibration", "evaluation")
PROBE = "probe.jsonl"
LOG = "log.jsonl"
SUMS = "SHA256SUMS"


def split_file(split: str, domain: str, pool: Path = POOL) -> Path:
    """Where the items of a domain's split lie."""
    return pool / "splits" / split / f"{domain}.jsonl"


def exemplar_file(domain: str, pool: Path = POOL) -> Path:
    """Where a domain's exemplars lie."""
    return pool / "exemplars" / f"{domain}.jsonl"


def load_items(split: str, domain: str, pool: Path = POOL) -> list[Fact]:
    """The items of a domain's split, in their order."""
    return [Fact(**record) for record in read_lines(split_file(split, domain, pool))]


def write_data(domains: Iterable[Domain], pool: Path) -> None:
    """The splits, the exemplars and the probe prompts."""
    probes = []
    for domain in domains:
        for split, items in zip(NANO_SPLITS, (domain.calibration, domain.evaluation), strict=True):
            write_lines(split_file(split, domain.name, pool), map(asdict, items))
        shown = ({"prompt": fact.prompt, "response": fact.answer} for fact in domain.exemplars)
        write_lines(exemplar_file(domain.name, pool), shown)
        probes += [{"prompt": fact.prompt} for fact in domain.probes]
    write_lines(pool / PROBE, probes)


def write_lines(path: Path, records: Iterable[Any]) -> None:
    """One JSON record per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def read_lines(path: Path) -> list[Any]:
    """The records of a file of JSON lines."""
    return [record for _, record in read_json_lines(path, "a file of JSON lines", PoolError)]


def contents(pool: Path = POOL) -> list[Path]:
    """The pool's files."""
    notes = pool / BESIDE
    return sorted(p for p in pool.rglob("*") if p.is_file() and notes not in p.parents)


def _sums(pool: Path) -> dict[str, str]:
    """SHA-256 of every file of the pool, by its path there."""
    files = [path for path in contents(pool) if path.name != SUMS]
    return {
        path.relative_to(pool).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def write_sums(pool: Path) -> None:
    """The list that `verify` checks against."""
    lines = (f"{digest}  {name}\n" for name, digest in _sums(pool).items())
    (pool / SUMS).write_text("".join(lines), encoding="utf-8")


def verify(pool: Path = POOL) -> int:
    """Check every file against the list; the number of files. PoolError names what differs."""
    if not (pool / SUMS).is_file():
        raise PoolError(
            f"{pool}: no {SUMS} in it, so it is no pool of the embedded kind; `sigmerge pool "
            "nano` makes one, and `sigmerge verify` checks other results."
        )
    listed = {}
    text = read_bytes(pool / SUMS, "a list of sums", PoolError).decode(errors="replace")
    for line in text.splitlines():
        digest, _, name = line.partition("  ")
        listed[name] = digest
    found = _sums(pool)
    problems = [f"{name}: missing" for name in sorted(listed.keys() - found.keys())]
    problems += [f"{name}: not in {SUMS}" for name in sorted(found.keys() - listed.keys())]
    both = sorted(listed.keys() & found.keys())
    problems += [f"{name}: changed" for name in both if listed[name] != found[name]]
    if problems:
        raise PoolError(
            f"the pool in {pool} is not as it was made; restore or retrain it", problems
        )
    return len(found)
