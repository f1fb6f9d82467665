"""Divides records into calibration (20 %) and evaluation (80 %), reproducibly and checkably.

Of every benchmark the first fifth, rounded down, in the order of SHA-256(seed, benchmark, id) is
its calibration split and the rest its evaluation split. Languages are concatenated first. From a
domain's calibration splits a fixed number is drawn, divided between its benchmarks in proportion
to their calibration sizes by largest remainder; deficits are read on these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sigmerge.errors import ScoreError
from sigmerge.evaluation.how import How
from sigmerge.evaluation.sources import Data, Item, NoSource
from sigmerge.evaluation.suite import BenchmarkSuite
from sigmerge.files.documents import read_json, write_json

SPLITS = ("calibration", "evaluation", "all")
SHARE = 5
"""One record in five is for calibration."""
IDS = ("calibration", "evaluation", "drawn")
"""The lists of ids that a split file has for every benchmark."""


def shuffled(ids: Iterable[str], benchmark: str, seed: int) -> list[str]:
    """Ids in an order that depends on nothing but the seed, the benchmark and the ids."""
    return sorted(ids, key=lambda i: hashlib.sha256(f"{seed}|{benchmark}|{i}".encode()).digest())


def largest_remainder(sizes: Sequence[int], total: int) -> list[int]:
    """`total` seats divided in proportion to `sizes`; left-over seats go to the largest remainders.

    Equal remainders are served in order. No benchmark gets more than its size.
    """
    population = sum(sizes)
    if total >= population:
        return list(sizes)
    seats = [total * size // population for size in sizes]
    order = sorted(range(len(sizes)), key=lambda i: -(total * sizes[i] % population))
    for i in order[: total - sum(seats)]:
        seats[i] += 1
    return seats


def split_ids(
    items: Sequence[Item], benchmark: str, seed: int, *, redivided: bool = False
) -> tuple[list[str], list[str]]:
    """Calibration and evaluation ids; a source that brings its own splits keeps them, unless all
    records are to be divided anew."""
    if any(item.split for item in items) and not redivided:
        own = {item.id: item.split for item in items}
        calibration = [i for i, split in own.items() if split == "calibration"]
        return calibration, [i for i, split in own.items() if split == "evaluation"]
    order = shuffled((item.id for item in items), benchmark, seed)
    cut = len(order) // SHARE
    return order[:cut], order[cut:]


def build(
    suite: BenchmarkSuite,
    items: Mapping[str, Sequence[Item]],
    seed: int | None = None,
    only: Collection[str] = (),
) -> dict[str, Any]:
    """The split file's content for the benchmarks whose records are given.

    With a `seed` all records are divided by it, those of sources with own splits too. `only` are
    the benchmarks that were asked for, where not all were; the file says so.
    """
    marks: dict[str, dict[str, Any]] = {}
    redivided, seed = seed is not None, suite.seed if seed is None else seed
    for name, rows in items.items():
        calibration, evaluation = split_ids(rows, name, seed, redivided=redivided)
        marks[name] = {
            "domain": suite.domain_of(name),
            "records": len(rows),
            "complete": _complete(suite, name, len(rows)),
            "sources": _sources(rows),
            "calibration": calibration,
            "evaluation": evaluation,
            "sums": {row.id: row.digest for row in rows},
        }
    _draw(suite, marks)
    content: dict[str, Any] = {"suite": suite.name, "seed": seed}
    content |= {"redivided": True} if redivided else {}
    content |= {"only": [name for name in suite.benchmarks if name in only]} if only else {}
    content |= {"totals": _totals(marks), "benchmarks": marks}
    return {**content, "sha256": _digest(content)}


def _complete(suite: BenchmarkSuite, name: str, records: int) -> bool:
    return suite.benchmarks[name].records in (None, records)


def _totals(marks: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    counts = {key: sum(len(mark[key]) for mark in marks.values()) for key in IDS}
    return {"records": sum(mark["records"] for mark in marks.values()), **counts}


def _draw(suite: BenchmarkSuite, marks: dict[str, dict[str, Any]]) -> None:
    """The calibration items of each domain on which deficits are read, in shuffled order."""
    for domain in suite.domains:
        names = [name for name, mark in marks.items() if mark["domain"] == domain]
        sizes = [len(marks[name]["calibration"]) for name in names]
        seats = largest_remainder(sizes, suite.calibration_items or sum(sizes))
        for name, count in zip(names, seats, strict=True):
            marks[name]["drawn"] = marks[name]["calibration"][:count]


def _sources(items: Sequence[Item]) -> dict[str, dict[str, Any]]:
    """Count and digest of the records of every part."""
    parts: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for item in items:
        parts.setdefault(item.part, hashlib.sha256()).update(item.digest.encode())
        counts[item.part] = counts.get(item.part, 0) + 1
    return {part: {"records": counts[part], "sha256": parts[part].hexdigest()} for part in parts}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_available(
    suite: BenchmarkSuite, data: Data
) -> tuple[dict[str, list[Item]], dict[str, str]]:
    """The available records, and the reasons for the benchmarks without."""
    items, absent = {}, {}
    for name, mark in suite.benchmarks.items():
        try:
            items[name] = mark.load(name, data, suite.folder)
        except NoSource as error:
            absent[name] = str(error)
    if not items:
        raise ScoreError(f"No benchmark of {suite.name} has its records here:", [*absent.values()])
    return items, absent


def load_scored(suite: BenchmarkSuite, how: How) -> tuple[dict[str, list[Item]], dict[str, str]]:
    """The records that can be scored, and the reasons for the other benchmarks."""
    items, absent = load_available(suite, how.data)
    for name in list(items):
        if reason := suite.benchmarks[name].unscored(how):
            absent[name] = f"{name}: {reason}"
            del items[name]
    if not items:
        raise ScoreError(f"No benchmark of {suite.name} can be scored here:", [*absent.values()])
    return items, absent


def write(content: Mapping[str, Any], file: Path) -> None:
    write_json(file, content, indent=1)


def read(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise ScoreError(f"{file}: no such split file; `sigmerge splits build` writes it.")
    content = read_json(file, "a split file", ScoreError)
    if not isinstance(content, dict) or not isinstance(content.get("benchmarks"), dict):
        raise ScoreError(f"{file}: is no split file; `sigmerge splits build` writes one.")
    if problems := [*_malformed(content)]:
        raise ScoreError(
            f"{file}: is a damaged split file; remove it and build it again:", problems
        )
    return content


def _malformed(content: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the format of a split file."""
    totals = content.get("totals")
    if not isinstance(totals, dict) or not all(
        isinstance(totals.get(key), int) for key in ("records", *IDS)
    ):
        yield f"totals: the numbers {', '.join(('records', *IDS))} are expected"
    only = content.get("only", [])
    if not isinstance(only, list) or not all(isinstance(name, str) for name in only):
        yield "only: a list of benchmarks is expected"
    for name, mark in content["benchmarks"].items():
        if not isinstance(mark, dict):
            yield f"{name}: a mapping is expected"
            continue
        for key in IDS:
            ids = mark.get(key)
            if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
                yield f"{name}.{key}: a list of ids is expected"
        sums = mark.get("sums")
        if not isinstance(sums, dict) or not all(isinstance(each, str) for each in sums.values()):
            yield f"{name}.sums: the SHA-256 of every record is expected, by its id"
        if not isinstance(mark.get("records"), int):
            yield f"{name}.records: a number is expected"
        parts = mark.get("sources")
        if not isinstance(parts, dict) or not all(
            isinstance(part, dict) and isinstance(part.get("records"), int)
            for part in parts.values()
        ):
            yield f"{name}.sources: the records and sha256 of every part are expected"
        yield from (f"{name}.{k}: is missing" for k in ("domain", "complete") if k not in mark)


def verify(content: Mapping[str, Any], suite: BenchmarkSuite, data: Data) -> list[str]:
    """What is wrong with a split file: its sums, its membership, or the source data; [] if nothing.

    All that `build` derives is derived again. Only the membership of benchmarks whose records are
    not here cannot be.
    """
    problems = []
    plain = {key: value for key, value in content.items() if key != "sha256"}
    if content.get("sha256") != _digest(plain):
        problems.append("the file was changed after it was written (SHA-256)")
    seed = content.get("seed")
    own = content.get("redivided") is True and type(seed) is int
    if content.get("suite") != suite.name or not (own or seed == suite.seed):
        problems.append(f"it is for {content.get('suite')} with seed {content.get('seed')}")
    marks = content["benchmarks"]
    for name, mark in marks.items():
        if name not in suite.benchmarks:
            problems.append(f"{name}: is no benchmark of {suite.name}")
            continue
        problems += [f"{name}: {text}" for text in _mark_problems(mark, suite, name)]
        try:
            items = suite.benchmarks[name].load(name, data, suite.folder)
        except NoSource:
            continue
        divided_by = seed if own and seed is not None else suite.seed
        wanted = split_ids(items, name, divided_by, redivided=own)
        problems += [f"{name}: {text}" for text in _source_problems(mark, items, wanted)]
    known = {name: dict(marks[name]) for name in suite.benchmarks if name in marks}
    _draw(suite, known)
    for name, mark in known.items():
        if mark["drawn"] != marks[name]["drawn"]:
            problems.append(
                f"{name}: the drawn items are not the first {len(mark['drawn'])} of calibration"
            )
    if content["totals"] != _totals(marks):
        problems.append("the totals are not the sums over the benchmarks")
    return problems


def _mark_problems(mark: Mapping[str, Any], suite: BenchmarkSuite, name: str) -> list[str]:
    calibration, evaluation = set(mark["calibration"]), set(mark["evaluation"])
    sizes = len(mark["calibration"]), len(mark["evaluation"])
    checks = {
        "an id stands twice": (len(calibration), len(evaluation)) == sizes,
        "calibration and evaluation overlap": not calibration & evaluation,
        "calibration and evaluation do not sum to the records": sum(sizes) == mark["records"],
        "the sums are of other ids than the members": {*mark["sums"]} == calibration | evaluation,
        "calibration is not a fifth of the records": suite.benchmarks[name].own_splits
        or sizes[0] == mark["records"] // SHARE,
        "the sources do not sum to the records": mark["records"]
        == sum(part["records"] for part in mark["sources"].values()),
        f"its domain is {suite.domain_of(name)}": mark["domain"] == suite.domain_of(name),
        f"complete: {mark['complete']} is wrong of {mark['records']} records": mark["complete"]
        is _complete(suite, name, mark["records"]),
    }
    return [text for text, holds in checks.items() if not holds]


def _source_problems(
    mark: Mapping[str, Any], items: Sequence[Item], wanted: tuple[list[str], list[str]]
) -> list[str]:
    found, problems = _sources(items), []
    for part in dict.fromkeys([*mark["sources"], *found]):
        then, now = mark["sources"].get(part), found.get(part)
        other = [i.id for i in items if i.part == part and mark["sums"].get(i.id) != i.digest]
        if then != now:
            counts = [side["records"] if side else 0 for side in (then, now)]
            what = f"{counts[0]} records, now {counts[1]}"
            if counts[0] == counts[1] and other:
                what = f"{len(other)} of {counts[0]} records, first {other[0]}"
            problems.append(f"the source data of {part} changed ({what})")
        elif other:
            problems.append(f"the sum of {other[0]} is another")
    if not problems and wanted != (mark["calibration"], mark["evaluation"]):
        problems.append("the membership is not the one that the seed gives")
    return problems


def members(content: Mapping[str, Any], name: str, split: str, items: Sequence[Item]) -> list[Item]:
    """A benchmark's items of a split, in the split's order; calibration means the drawn items."""
    mark = content["benchmarks"][name]
    keys = {"calibration": ["drawn"], "evaluation": ["evaluation"]}
    ids = [i for key in keys.get(split, ["calibration", "evaluation"]) for i in mark[key]]
    known = {item.id: item for item in items}
    return [known[i] for i in ids]
