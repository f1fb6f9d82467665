"""The nouns of the Python interface: a pool of models, a recipe, and the plan of a merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack

from sigmerge import recipe as recipes
from sigmerge.api import PathName
from sigmerge.checkpoints.adapter_folders import split_adapter
from sigmerge.checkpoints.arrays import Arrays, is_torch, store
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.pool import PoolMembers, listed
from sigmerge.checkpoints.remote import target
from sigmerge.errors import PoolError, RecipeError
from sigmerge.files.scratch import scratch
from sigmerge.jobs.dense import merge_into, plan_dense
from sigmerge.jobs.merge import MergeJob, anchor_and_repair, check_scores
from sigmerge.jobs.options import Keywords, Options
from sigmerge.jobs.pools import open_merge_pool
from sigmerge.jobs.steps import Description
from sigmerge.messages import counted, size
from sigmerge.methods import Method
from sigmerge.operators.base import Operator
from sigmerge.progress import shown

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from sigmerge.checkpoints.arrays import RawArray
    from sigmerge.jobs.scores import ScoreFunction
    from sigmerge.results import Merged, TuneResult

Scores: TypeAlias = "ScoreFunction | PathName | Mapping[str, Any]"
"""Scores of experts and anchor: measured by a callable, in a file, or given."""


class Pool:
    """A reference model and experts that were fine-tuned from it; only headers are read.

    Each is a folder, an address, or `model+adapter`. An expert's name is its domain. A mapping
    takes any name; keywords are a shorter way to write it. Without a reference (None) the experts
    can be averaged, and not merged as task vectors.

    >>> sigmerge.Pool("pool/reference", math="pool/math", coding="pool/coding")
    Pool of 2 experts (math, coding), 6 layers, 2.82 MB each
    """

    def __init__(
        self,
        reference: PathName | None,
        experts: Mapping[str, PathName] | None = None,
        *,
        allow_pickle: bool = False,
        **named: PathName,
    ) -> None:
        places = {**(experts or {}), **named}
        if not places:
            raise RecipeError('A pool needs experts: Pool("reference", math="math", code="code").')
        self.reference = None if reference is None else _absolute(reference)
        self.experts = {name: _absolute(place) for name, place in places.items()}
        self.allow_pickle = allow_pickle
        self.members  # noqa: B018  (what cannot be opened is said here)

    @classmethod
    def open(cls, folder: PathName, *, allow_pickle: bool = False) -> Pool:
        """The pool of a folder with reference/ and one folder for each expert."""
        from sigmerge.jobs.pools import pool_folders

        reference, experts = pool_folders(Path(folder))
        return cls(reference, {each.name: each for each in experts}, allow_pickle=allow_pickle)

    @cached_property
    def members(self) -> PoolMembers:
        """The checkpoints with their tensors, as their headers describe them."""
        with_vectors = self.reference is not None
        plain = Method.of("task_arithmetic" if with_vectors else "linear")
        found, _ = open_merge_pool(self._recipe(plain), Options(allow_pickle=self.allow_pickle))
        return found

    def plan(
        self,
        method: Method | Operator | str,
        *,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        seed: int = 0,
        tokenizer_source: str | None = None,
        **how: Unpack[Keywords],
    ) -> Plan:
        """The plan of a merge by this method, after every check that headers allow."""
        how.setdefault("allow_pickle", self.allow_pickle)
        said = {"seed": seed, "dtype": dtype, "tokenizer_source": tokenizer_source}
        return self._recipe(_method(method), **said).plan(**how)

    def repair(self, anchor: PathName, *, deficits: Scores | None = None, **section: Any) -> Plan:
        """The plan of a repair of a stored merge, also of another tool's; see `Plan.repair`."""
        own, score = _deficits(deficits)
        given = {
            "merge_method": "checkpoint",
            "anchor": _absolute(anchor),
            "base_model": self.reference,
            "models": [{"model": each, "name": name} for name, each in self.experts.items()],
            "repair": {**own, **section},
        }
        return Recipe.from_mapping(given).plan(score, allow_pickle=self.allow_pickle)

    def tune(
        self,
        score: ScoreFunction,
        out: PathName,
        *,
        calls: int = 24,
        anchors: Sequence[Operator | str] | None = None,
        **how: Unpack[Keywords],
    ) -> TuneResult:
        """The strongest merge of the pool within a number of evaluation calls, stored in `out`.

        `score` is called with a checkpoint's folder. It returns for every domain a fraction or,
        better, what the answer to every item is worth: the noise of scores is known then.
        `anchors` are operators: the tuning chooses their parameters.
        """
        from sigmerge import api

        for each in anchors or ():
            if isinstance(each, Method):
                raise TypeError(
                    f"{each.operator}: an anchor is an operator's name, and the tuning chooses its "
                    "parameters; a method's own would be dropped."
                )
        names = None if anchors is None else [_method(each).operator for each in anchors]
        how.setdefault("allow_pickle", self.allow_pickle)
        start = self._recipe(Method.of("task_arithmetic", weight=0.4))
        return api.tune(start, out, calls=calls, anchors=names, score=score, **how)

    def _recipe(self, by: Method, **said: Any) -> Recipe:
        given = {**by.section(self.experts), "base_model": self.reference, **said}
        return Recipe.from_mapping({k: v for k, v in given.items() if v is not None})

    def __repr__(self) -> str:
        layout = self.members.layout
        return (
            f"Pool of {counted(len(self.experts), 'expert')} ({', '.join(self.experts)}), "
            f"{counted(layout.stack.depth, 'layer')}, {size(layout.nbytes)} each"
        )


@dataclass(frozen=True)
class Recipe(recipes.Recipe):
    """A checked recipe. YAML is one spelling of it; a pool and a method are another.

    >>> given = sigmerge.Recipe.from_mapping(recipe)
    >>> given.plan()
    Plan (merge, repair): reads 19.7 MB, writes 5.64 MB, holds ... MB at most
    """

    @classmethod
    def from_yaml(cls, file: PathName, *, strict: bool = False) -> Recipe:
        """The recipe of a YAML file."""
        return cls._of(recipes.load_recipe(Path(file), strict=strict))

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], folder: PathName | None = None) -> Recipe:
        """The recipe of a mapping; what it names lies in `folder`, or where the program runs."""
        return cls._of(recipes.load_recipe(given, folder=None if folder is None else Path(folder)))

    @classmethod
    def _of(cls, checked: recipes.Recipe) -> Recipe:
        return cls(**{each.name: getattr(checked, each.name) for each in fields(checked)})

    def plan(self, score: ScoreFunction | None = None, **how: Unpack[Keywords]) -> Plan:
        """The plan of the merge; `score` measures the deficits of a recipe that repairs."""
        return Plan(self, Options(**how), score)

    def to_yaml(self) -> str:
        """The recipe as a file has it."""
        return self.text


@dataclass(frozen=True)
class Plan:
    """A merge that was checked and not run yet; only headers were read.

    `save` writes a folder, `tensors` and `state_dict` return the merge, `load` copies it into a
    torch module: all with the same values.

    >>> plan = sigmerge.Pool.open("pool").plan(sigmerge.Ties(density=0.2))
    >>> plan.state_dict()["model.norm.weight"].shape
    torch.Size([128])
    >>> done = plan.save("ties")
    """

    recipe: Recipe
    options: Options
    score: ScoreFunction | None = None

    def __post_init__(self) -> None:
        self.description  # noqa: B018  (what is wrong is said here)

    @cached_property
    def description(self) -> Description:
        """The steps with what each reads, writes, holds in memory and scores."""
        check_scores(self.recipe, self.options, self.score)
        steps = anchor_and_repair(self.recipe, self.options, self.score)
        return Description(steps, self.options.threads)

    def repair(self, *, deficits: Scores | None = None, **section: Any) -> Plan:
        """The plan of the merge and its repair.

        `deficits` says how well every expert and the merge do: a callable from a checkpoint's
        folder to scores, a file of scores, or a mapping {"experts": {expert: {domain: q}},
        "anchor": {domain: q}}. The other keywords are those of a recipe's repair: section: probe,
        scale, c_min, c_max, variant, ….
        """
        own, score = _deficits(deficits)
        given = {**self.recipe.given, "repair": {**own, **section}}
        repairing = Recipe.from_mapping(given, self.recipe.folder)
        return Plan(repairing, self.options, score or self.score)

    def save(self, out: PathName, **how: Unpack[Keywords]) -> Merged:
        """Merge into a new folder, which transformers and vLLM load."""
        with shown(how.get("progress")) as bar:
            how["progress"] = bar
            return MergeJob(
                self.recipe, target(out), replace(self.options, **how), self.score
            ).run()

    def tensors(self) -> dict[str, RawArray]:
        """The merge as NumPy arrays; bfloat16, which NumPy lacks, as float32."""
        return self._made().numpy()

    def state_dict(self) -> dict[str, Tensor]:
        """The merge as torch tensors of the stored types."""
        return self._made().torch()

    def load(self, model: Module) -> Module:
        """Copy the merge into a torch module of the same architecture, and return it."""
        merged, own = self.state_dict(), model.state_dict(keep_vars=True)
        other = [
            f"{name}: {list(merged[name].shape)} in the merge, {list(own[name].shape)} in the model"
            for name in merged
            if name in own and merged[name].shape != own[name].shape
        ]
        strange = [name for name in merged if name not in own]
        filled = {own[name].data_ptr() for name in own if name in merged}
        left = [name for name in own if own[name].data_ptr() not in filled]  # no tied copies
        lacking = listed("the merge lacks", left), listed("the model lacks", strange)
        if problems := [*other, *chain(*lacking)]:
            raise PoolError("The model is not of the merge's architecture:", problems)
        model.load_state_dict(merged, strict=False)
        return model

    def to_yaml(self) -> str:
        """The recipe as a file has it."""
        return self.recipe.to_yaml()

    def _made(self) -> Arrays:
        if self.recipe.repair is None and self.recipe.guide is None:
            job = plan_dense(self.recipe, self.options)
            shapes = {name: t.shape for name, t in job.pool.layout.tensors.items()}
            arrays = Arrays(job.layout, shapes)
            merge_into(job, arrays, self.options)
            return arrays
        with scratch() as folder:  # a repair reads its anchor from a folder
            self.save(folder / "merged", durable=False)
            return Arrays.read(open_checkpoint(folder / "merged"))

    def __repr__(self) -> str:
        steps = ", ".join(step.name for step in self.description.steps)
        told = self.description
        return (
            f"Plan ({steps}): reads {size(told.bytes_to_read)}, writes "
            f"{size(told.bytes_to_write)}, holds {size(told.peak_memory_bytes)} at most"
        )

    def _repr_html_(self) -> str:
        return self.description._repr_html_()


def merge_state_dicts(
    reference: Mapping[str, Any] | None,
    experts: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]],
    method: Method | Operator | str,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    seed: int = 0,
    **how: Unpack[Keywords],
) -> dict[str, Any]:
    """Merge state dicts of torch tensors or NumPy arrays, into one of their kind.

    The values are those that the merge of stored checkpoints has. Experts in a list are called
    expert_0, expert_1, ….

    >>> base = {"weight": np.zeros((2, 2), np.float32)}
    >>> tuned = [{"weight": np.full((2, 2), value, np.float32)} for value in (1, 3)]
    >>> merged = sigmerge.merge_state_dicts(base, tuned, sigmerge.TaskArithmetic(weight=0.5))
    >>> merged["weight"].tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    """
    if not isinstance(experts, Mapping):
        experts = {f"expert_{number}": each for number, each in enumerate(experts)}
    with scratch() as folder:
        base = None if reference is None else store(reference, folder / "reference")
        stored = {
            name: store(each, folder / f"expert {number}")
            for number, (name, each) in enumerate(experts.items())
        }
        plan = Pool(base, stored).plan(method, dtype=dtype, seed=seed, **how)
        first = next(iter(next(iter(experts.values())).values()), None)
        return plan.state_dict() if is_torch(first) else plan.tensors()


def _deficits(given: Scores | None) -> tuple[dict[str, Any], ScoreFunction | None]:
    """The scores for a repair: section, and the callable that measures them instead."""
    if given is None:
        return {}, None
    if isinstance(given, Mapping):
        return {"scores": given}, None
    if isinstance(given, str | PathLike):
        return {"scores": str(Path(given).absolute())}, None
    return {}, given


def _method(given: Method | Operator | str) -> Method:
    if isinstance(given, Method):
        return given
    if isinstance(given, Operator | str):
        return Method.of(given)
    raise TypeError(f"{given!r} is no method; give sigmerge.Ties(…), a name, or your own operator")


def _absolute(place: PathName) -> str:
    """An absolute path for a recipe; addresses and hub ids are unchanged."""
    parts = [part for part in split_adapter(Path(place)) if part is not None]
    here = [part.expanduser() for part in parts]
    if all(part.exists() for part in here):
        return "+".join(str(part.absolute()) for part in here)
    return fspath(place)
