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

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sigmerge.errors import RecipeError

SHIPPED = Path(__file__).parent / "suites"
HARNESSES = ("lm_eval", "code", "safety", "jsonl", "command", "nano")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Metric(_Strict):
    """A number per item, in the harness's own words, and which way is better."""

    key: str
    better: Literal["higher", "lower"] = "higher"


class File(_Strict):
    """A file of records below the data folder: JSONL, JSON or CSV, plain or gzipped.

    `rows` is the key of the list in a JSON object; `columns` renames, {new: old.dotted.path}.
    """

    path: str
    rows: str | None = None
    columns: dict[str, str] = Field(default_factory=dict)


class Hub(_Strict):
    path: str
    name: str | None = None
    split: str = "test"


class _Benchmark(_Strict):
    """What all harnesses share. `{language}` in a string stands for each of `languages` in turn.

    `records` is the count of the complete benchmark. `keep` drops records whose columns do not
    have these values, `present` those where one of these columns is null.
    """

    metrics: dict[str, Metric] = Field(min_length=1)
    files: list[File] = Field(default_factory=list)
    hub: Hub | None = None
    languages: list[str] = Field(default_factory=list)
    records: int | None = None
    keep: dict[str, str] = Field(default_factory=dict)
    present: list[str] = Field(default_factory=list)

    @field_validator("metrics", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: {"key": m} if isinstance(m, str) else m for name, m in value.items()}

    @field_validator("files", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list):
            return value
        return [{"path": file} if isinstance(file, str) else file for file in value]

    @model_validator(mode="after")
    def _known_metrics(self) -> _Benchmark:
        for name, metric in self.metrics.items():
            if problem := self._metric_problem(metric.key):
                raise ValueError(f"metrics.{name}: {metric.key!r} {problem}")
        return self

    def _metric_problem(self, key: str) -> str | None:
        """Why the harness has no such number; None where that shows when it is asked."""
        return None

    @property
    def score(self) -> str:
        """The metric that counts: the first."""
        return next(iter(self.metrics))


class LmEval(_Benchmark):
    """A task that the harness knows, or one of the YAML files in the folder `include_path`.

    With files: or hub: it reads those records, else its own.
    """

    harness: Literal["lm_eval"]
    task: str
    include_path: str | None = None
    chat_template: bool = False
    generation: dict[str, Any] = Field(default_factory=dict)

    @property
    def sourced(self) -> bool:
        return bool(self.files or self.hub)

    def tasks_folder(self, suite_folder: Path) -> Path | None:
        if self.include_path is None:
            return None
        return suite_folder / Path(self.include_path).expanduser()


class Code(_Benchmark):
    """`max_length` counts prompt and generation together, `timeout` is for one
    program on all tests of its problem, in seconds, the reference solution's time included."""

    harness: Literal["code"]
    dataset: Literal["humaneval", "mbpp"]
    samples: int = Field(10, ge=1)
    temperature: float = Field(0.2, ge=0)
    top_p: float = Field(0.95, gt=0, le=1)
    max_length: int = Field(512, ge=1)
    timeout: float = Field(300.0, gt=0)
    seed: int = 0

    @property
    def columns(self) -> list[str]:
        """What a record must have: evalplus's words."""
        tests = ["base_input", "plus_input", "atol"]
        return ["task_id", "prompt", "entry_point", "canonical_solution", *tests]

    def _metric_problem(self, key: str) -> str | None:
        found = re.fullmatch(r"pass@([1-9]\d*)", key)
        if not found:
            return "is no metric of programs; there is pass@k for any number k"
        if int(found[1]) > self.samples:
            return f"needs at least {found[1]} samples, not {self.samples}"
        return None


class Safety(_Benchmark):
    """`measure`: harm and compliance mark bad answers, refusal_match right ones.

    harm: the judge calls the answer harmful. compliance: the model did not refuse.
    refusal_match: it refused exactly the records whose `type` holds "contrast".
    A judge that cannot be understood counts as `unparsed`.
    """

    harness: Literal["safety"]
    prompt: str = "prompt"
    judged: str | None = None
    measure: Literal["harm", "compliance", "refusal_match"]
    unparsed: Literal[0, 1]
    template: Literal["chat", "none"] = "chat"
    temperature: float = Field(0.0, ge=0)
    max_new_tokens: int = Field(512, ge=1)
    seed: int = 0

    def _metric_problem(self, key: str) -> str | None:
        return None if key == self.measure else f"is not measured; its measure is {self.measure}"

    @property
    def columns(self) -> list[str]:
        """What a record must have."""
        asked = [self.prompt, self.judged or self.prompt]
        return [*asked, "type"] if self.measure == "refusal_match" else asked


class Jsonl(_Benchmark):
    """`prompt` is a template over the record's columns; matchers are in match.py."""

    harness: Literal["jsonl"]
    prompt: str = "{prompt}"
    answer: str = "answer"
    matcher: Literal["exact", "contains", "number", "regex", "choice"] = "exact"
    ignore_case: bool = False
    chat_template: bool = False
    max_new_tokens: int = Field(64, ge=1)
    stop: list[str] = Field(default_factory=list)
    metrics: dict[str, Metric] = {"match": Metric(key="match")}

    @field_validator("prompt")
    @classmethod
    def _template(cls, value: str) -> str:
        if wrong := [name for name in _fields(value) if not name or set(name) & set(".[")]:
            raise ValueError(
                f"{{{wrong[0]}}} names no column; write {{column}}, and columns: of a file "
                "renames what lies deeper"
            )
        return value

    def _metric_problem(self, key: str) -> str | None:
        return None if key == "match" else "is no metric of a matcher; there is match"

    @property
    def columns(self) -> list[str]:
        """What a record must have."""
        return [*_fields(self.prompt), self.answer]


def _fields(template: str) -> list[str]:
    """The columns that a template names; ValueError if it is none."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


class Command(_Benchmark):
    """A program gets `{checkpoint}` and `{items}`, a JSONL file, and prints {"id", metric…} lines.

    It is run in the suite file's folder.
    """

    harness: Literal["command"]
    command: str

    @field_validator("command")
    @classmethod
    def _line(cls, value: str) -> str:
        if not shlex.split(value):  # whose ValueError says what is unbalanced
            raise ValueError("is empty; give the program and its arguments")
        return value


class Nano(_Benchmark):
    harness: Literal["nano"]
    domain: str
    metrics: dict[str, Metric] = {"correct": Metric(key="correct")}

    def _metric_problem(self, key: str) -> str | None:
        return None if key == "correct" else "is no metric of the pool; there is correct"


Benchmark = LmEval | Code | Safety | Jsonl | Command | Nano


class _Suite(_Strict):
    name: str
    seed: int = 0
    calibration_items: int | None = Field(100, ge=1)
    domains: dict[str, dict[str, Annotated[Benchmark, Field(discriminator="harness")]]] = Field(
        min_length=1
    )

    @model_validator(mode="after")
    def _distinct(self) -> _Suite:
        names = [name for marks in self.domains.values() for name in marks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"the benchmark {twice[0]!r} is in two domains; give it two names")
        if empty := [domain for domain, marks in self.domains.items() if not marks]:
            raise ValueError(f"the domain {empty[0]!r} has no benchmark")
        return self


class Suite(_Suite):
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


class _Loader(yaml.SafeLoader):
    """YAML in which no key may be given twice; else the last one would win unsaid."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_suite(source: str | Path | Mapping[str, Any]) -> Suite:
    """A shipped suite by its name, a user's by its file, or one given in Python."""
    if isinstance(source, Mapping):
        return _checked(dict(source), "suite", Path.cwd())
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.yaml"))}
    file = shipped.get(str(source), Path(source).expanduser())
    try:
        data = yaml.load(file.read_text(encoding="utf-8"), _Loader)  # a safe one
    except FileNotFoundError:
        near = difflib.get_close_matches(str(source), shipped, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(shipped)}"
        raise RecipeError(f"{source}: no such suite file or shipped suite; {hint}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{source}: cannot be read as a suite ({error}).") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{source}: a suite is a mapping with name: and domains:.")
    return _checked(data, str(source), file.resolve().parent)


def _checked(data: dict[str, Any], where: str, folder: Path) -> Suite:
    try:
        return Suite.model_validate({**data, "folder": folder})
    except ValidationError as error:
        problems = [_worded(item) for item in error.errors()]
        raise RecipeError(f"{where}: the suite cannot be used:", problems) from None


def _worded(item: Any) -> str:
    """A pydantic error with its place, and with a guess at what a wrong key meant."""
    place = [str(part) for part in item["loc"]]
    harness = place.pop(3) if len(place) > 3 and place[0] == "domains" else None
    if item["type"] == "extra_forbidden":
        known = _keys(place, harness)
        near = difflib.get_close_matches(place[-1], known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        return f"{'.'.join(place)}: is no key here; {hint}"
    if item["type"].startswith("union_tag"):
        return f"{'.'.join(place)}: harness: must be one of {', '.join(HARNESSES)}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{'.'.join(place)}: {message[0].lower()}{message[1:]}"


def _keys(place: list[str], harness: str | None) -> list[str]:
    """The keys that are known where a wrong one was found."""
    if harness is None:
        return list(_Suite.model_fields)
    inner: dict[str, type[BaseModel]] = {"metrics": Metric, "files": File, "hub": Hub}
    if len(place) > 4 and place[3] in inner:
        return list(inner[place[3]].model_fields)
    kinds: tuple[type[_Benchmark], ...] = (LmEval, Code, Safety, Jsonl, Command, Nano)
    return list(kinds[HARNESSES.index(harness)].model_fields)
