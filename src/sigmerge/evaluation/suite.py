"""Suites as data: domains of benchmarks, what each is measured with, and how scores are built.

A suite is YAML. Every benchmark names a harness and has its own keys for it:

    lm_eval   a task of lm-evaluation-harness
    code      generated programs, run against evalplus's tests
    safety    generated answers, read by a judge
    jsonl     own items, generated answers, a matcher
    command   own items, scored by a program of the user
    nano      the embedded pool's items

The score of a benchmark is one of its metrics, that of a domain the unweighted mean over its
benchmarks, and the macro score the unweighted mean over the domains.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, InstanceOf, ValidationError, model_validator

from sigmerge.errors import RecipeError, ScoreError
from sigmerge.evaluation.benchmark import Benchmark, Metric
from sigmerge.evaluation.harness_table import HARNESSES, benchmark_class
from sigmerge.evaluation.sources import SHIPPED_BENCHMARKS, Data, File, Hub, StrictSection
from sigmerge.files.yaml_documents import read_yaml
from sigmerge.messages import did_you_mean


class _Suite(StrictSection):
    name: str
    seed: int = 0
    calibration_items: int | None = Field(100, ge=1)
    domains: dict[str, dict[str, InstanceOf[Benchmark]]] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> _Suite:
        names = [name for marks in self.domains.values() for name in marks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"the benchmark {twice[0]!r} is in two domains; give it two names")
        if empty := [domain for domain, marks in self.domains.items() if not marks]:
            raise ValueError(f"the domain {empty[0]!r} has no benchmark")
        return self


class BenchmarkSuite(_Suite):
    """A checked suite. Its folder is where the paths of a user's suite are looked for."""

    folder: Path

    @property
    def benchmarks(self) -> dict[str, Benchmark]:
        return {name: mark for marks in self.domains.values() for name, mark in marks.items()}

    def domain_of(self, benchmark: str) -> str:
        return next(domain for domain, marks in self.domains.items() if benchmark in marks)

    @property
    def submetrics(self) -> Iterator[tuple[str, str, str]]:
        """(domain, benchmark, metric) of every reported number, in the suite's order."""
        for domain, marks in self.domains.items():
            for name, mark in marks.items():
                yield from ((domain, name, metric) for metric in mark.metrics)


def load_suite(source: str | Path | Mapping[str, Any]) -> BenchmarkSuite:
    """A shipped suite by its name, a user's by its file, a nano pool's by its folder.

    Or one given in Python.
    """
    if isinstance(source, Mapping):
        return _checked(dict(source), "suite", Path.cwd())
    shipped = {file.stem: file for file in sorted(SHIPPED_BENCHMARKS.glob("*.yaml"))}
    file = shipped.get(str(source), Path(source).expanduser())
    if file in shipped.values():
        return _shipped(file)
    if file.is_dir():
        return nano_suite(file)
    if not file.exists():
        hint = did_you_mean(source, shipped)
        raise RecipeError(f"{source}: no such suite file or shipped suite; {hint}")
    return _read(file, str(source))


def suite_on(source: str | Path | Mapping[str, Any], data: Data) -> BenchmarkSuite:
    """A suite and the data that it is told to score: `nano` on a pool has the pool's items."""
    if source == "nano" and data.told:
        return nano_suite(data.folder)
    return load_suite(source)


@functools.cache
def _shipped(file: Path) -> BenchmarkSuite:
    """Read once: a plan of many runs asks for the same suite again and again."""
    return _read(file, file.stem)


def _read(file: Path, named: str) -> BenchmarkSuite:
    data = read_yaml(file, "a suite", RecipeError)
    if not isinstance(data, dict):
        raise RecipeError(f"{named}: a suite is a mapping with name: and domains:.")
    return _checked(data, named, file.resolve().parent)


def nano_suite(pool: Path | None = None) -> BenchmarkSuite:
    """The embedded pool's suite, or the same suite on the items of another nano pool."""
    suite = load_suite("nano")
    if pool is None:
        return suite
    if not (pool / "splits/calibration").is_dir():
        raise ScoreError(f"{pool}: no splits/calibration in it; a nano pool is expected.")
    moved = {
        domain: {n: mark.model_copy(update={"pool": str(pool)}) for n, mark in marks.items()}
        for domain, marks in suite.domains.items()
    }
    return suite.model_copy(update={"domains": moved})


def _checked(data: dict[str, Any], where: str, folder: Path) -> BenchmarkSuite:
    """The suite, each benchmark read by its own harness; all problems are reported together."""
    problems: list[str] = []
    domains = data.get("domains")
    if isinstance(domains, dict):
        domains = {
            domain: {
                name: _benchmark(given, f"domains.{domain}.{name}", problems)
                for name, given in marks.items()
            }
            if isinstance(marks, dict)
            else marks
            for domain, marks in domains.items()
        }
        data = {**data, "domains": domains}
    try:
        suite = BenchmarkSuite.model_validate({**data, "folder": folder})
    except ValidationError as error:
        problems += [
            _worded(item, "", _Suite) for item in error.errors() if item["type"] != "is_instance_of"
        ]
    if problems:
        raise RecipeError(f"{where}: the suite cannot be used:", problems)
    return suite


def _benchmark(given: Any, place: str, problems: list[str]) -> Benchmark | None:
    """A benchmark by its harness; None where it has problems, which are added to the list."""
    harness = given.get("harness") if isinstance(given, dict) else None
    if not isinstance(harness, str) or harness not in HARNESSES:
        problems.append(f"{place}: harness: must be one of {', '.join(HARNESSES)}")
        return None
    kind = benchmark_class(harness)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problems += [_worded(item, place, kind) for item in error.errors()]
        return None


INNER: dict[str, type[BaseModel]] = {"metrics": Metric, "files": File, "hub": Hub}
"""Sections inside a benchmark."""


def _worded(item: Any, place: str, kind: type[BaseModel]) -> str:
    """A pydantic error with its place, and with a guess at what a wrong key meant."""
    inner = [str(part) for part in item["loc"]]
    where = ".".join([place, *inner] if place else inner)
    if item["type"] == "extra_forbidden":
        section = INNER.get(inner[0], kind) if len(inner) > 1 else kind
        return f"{where}: is no key here; {did_you_mean(inner[-1], section.model_fields)}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{where}: {message[0].lower()}{message[1:]}"
