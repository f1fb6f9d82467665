"""How many entries of a merge differ from mergekit's, and why: measured on a sample of tensors.

Of every kind of tensor a few, and of each some rows, are merged as tensors of their own: by the
merge itself, and by an emulation of mergekit's arithmetic. A threshold, a norm or an angle is that
of the sample, so the counts are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.checkpoints.arrays import TORCH, Arrays, store
from sigmerge.checkpoints.blocks import starred
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.checkpoints.source import PoolSource
from sigmerge.checkpoints.writer import plan_layout
from sigmerge.files.objects import remote_file
from sigmerge.files.scratch import scratch
from sigmerge.jobs.dense import DenseJob, merge_into
from sigmerge.jobs.emulated import DRAWN, Emulated
from sigmerge.jobs.options import Options
from sigmerge.operators.base import Site

if TYPE_CHECKING:
    from torch import Tensor as Torch

KINDS = 32
"""Kinds of tensors that are sampled at most: those with the most coordinates."""
COMPUTED = ("float32", "bfloat16", "float16")
_SEED = 0
"""Of the draws of the emulation; mergekit's own are others in every run."""


@dataclass(frozen=True)
class SampledKind:
    """Tensors that differ in the number of their layer: what was sampled, and what differs there.

    An entry may have several causes. `largest` is a difference over the tensor's largest value.
    """

    name: str
    tensors: int
    coordinates: int
    entries: int
    differing: int
    half_precision: int
    ties: int
    draws: int
    sums: int
    largest: float


@dataclass(frozen=True)
class Sampled:
    """The sample of a recipe. `computed` is the type of mergekit's arithmetic."""

    recipe: str
    computed: str
    kinds: tuple[SampledKind, ...]
    left_out: int = 0
    """Kinds of tensors that were not sampled."""

    @property
    def coordinates(self) -> int:
        return sum(kind.coordinates for kind in self.kinds)

    def share(self, cause: str) -> float:
        """The part of all coordinates that would differ for this cause, by the sample."""
        weighted = (getattr(k, cause) / k.entries * k.coordinates for k in self.kinds)
        return sum(weighted) / self.coordinates if self.coordinates else 0.0


def why_not(job: DenseJob, given: Mapping[str, Any]) -> str | None:
    """Why a merge cannot be sampled; None if it can."""
    away = [m.title for m in job.members.values() if any(map(remote_file, m.files))]
    if away:
        return f"the weights of {', '.join(away)} are not here; download them, and ask again"
    if (dtype := _named(given, "dtype")) and dtype not in COMPUTED:
        return f"mergekit computes in {dtype}"
    try:
        import torch  # noqa: F401
    except ImportError:
        return "mergekit's arithmetic is emulated with torch; install sigmerge-llm[models]"
    return None


def sample(name: str, job: DenseJob, given: Mapping[str, Any], entries: int) -> Sampled:
    """Merge `entries` of some tensors of every kind by both arithmetics, and count differences."""
    chosen, sizes = _chosen(job), dict[str, list[int]]()
    for tensor, site in job.sites.items():
        sizes.setdefault(starred(tensor), []).append(site.size)
    with PoolSource(job.members, allow_nonfinite=True) as source:
        values = {t: _rows_of(source, job, t, entries) for t in chosen}
    ours = _ours(job, values)
    found: dict[str, list[SampledKind]] = {}
    for number, tensor in enumerate(chosen):
        inputs = _inputs(job, tensor, values[tensor])
        counted = _compared(job, job.sites[tensor], inputs, ours[f"{number}"], given)
        found.setdefault(starred(tensor), []).append(counted)
    kinds = tuple(_together(k, sizes[k], counts) for k, counts in found.items())
    computed = _named(given, "dtype") or _widest(job, chosen)
    return Sampled(name, computed, kinds, len(sizes) - len(kinds))


def _named(given: Mapping[str, Any], key: str) -> str:
    return str(given.get(key) or "").removeprefix("torch.")


def _widest(job: DenseJob, tensors: Sequence[str]) -> str:
    """The types that mergekit computes in where the recipe names none."""
    kinds = {TORCH.get(_stored(job, m, t).dtype, "float32") for t in tensors for m in job.members}
    return " and ".join(sorted(kinds))


def _stored(job: DenseJob, member: str, tensor: str) -> Tensor:
    return job.members[member].tensors[tensor]


def _chosen(job: DenseJob) -> list[str]:
    """Of every kind of tensor that all members have, one after a third of the layers and one after
    two thirds."""
    kinds: dict[str, list[str]] = {}
    for name in job.sites:
        if all(name in member.tensors for member in job.members.values()):
            kinds.setdefault(starred(name), []).append(name)
    largest = sorted(kinds, key=lambda kind: -sum(job.sites[n].size for n in kinds[kind]))
    listed = [kinds[kind] for kind in kinds if kind in largest[:KINDS]]
    return [
        name
        for names in listed
        for name in dict.fromkeys(names[len(names) * third // 3] for third in (1, 2))
    ]


_Values = Mapping[str, "np.ndarray[Any, Any]"]
"""Of each member, rows of one tensor."""


def _rows_of(source: PoolSource, job: DenseJob, tensor: str, entries: int) -> _Values:
    """Whole rows at equal distances; of a longer one the beginning."""
    shape = job.sites[tensor].shape
    width = shape[-1] if len(shape) > 1 else prod(shape)
    rows = job.sites[tensor].size // width
    taken = max(1, min(rows, entries // width))
    columns = min(width, entries)
    found = {m: np.empty((taken, columns), np.float32) for m in job.members}
    for member, values in found.items():
        for number, row in enumerate(values):
            source.fill(member, tensor, rows * number // taken * width, row)
    flat = len(shape) < 2
    return {m: values.reshape(-1) if flat else values for m, values in found.items()}


def _ours(job: DenseJob, values: Mapping[str, _Values]) -> dict[str, Torch]:
    """The samples merged by the merge itself, by their number."""
    names = {tensor: f"{number}" for number, tensor in enumerate(values)}
    shapes = {names[t]: next(iter(of.values())).shape for t, of in values.items()}
    with scratch() as folder:
        members = {
            member: open_checkpoint(
                store({names[t]: of[member] for t, of in values.items()}, folder / f"{number}")
            )
            for number, member in enumerate(job.members)
        }
        pool = PoolMembers(members.pop("reference", None), members)
        sites = {
            name: replace(job.sites[t], tensor=name, size=prod(shapes[name]), shape=shapes[name],
                          block=None)
            for t, name in names.items()
        }  # fmt: skip
        layout = plan_layout([(n, job.layout.slots[t].dtype, shapes[n]) for t, n in names.items()])
        arrays = Arrays(layout, shapes)
        sampled = DenseJob(job.recipe, job.operator, pool, sites, layout, allow_nonfinite=True)
        merge_into(sampled, arrays, Options(allow_nonfinite=True))
        return arrays.torch()


def _inputs(job: DenseJob, tensor: str, values: _Values) -> dict[str, Torch]:
    """Values as mergekit reads them, in the widest of their types: the sum of a model and its
    adapter is rounded to the model's type."""
    import torch

    found = {}
    for member, rows in values.items():
        stored = getattr(torch, TORCH.get(_stored(job, member, tensor).dtype, "float32"))
        stored = stored if stored.itemsize > 1 else torch.float32
        found[member] = torch.from_numpy(rows).to(stored)
    widest = next(iter(found.values())).dtype
    for rows in found.values():
        widest = torch.promote_types(widest, rows.dtype)
    return {member: rows.to(widest) for member, rows in found.items()}


def _compared(
    job: DenseJob,
    site: Site,
    inputs: Mapping[str, Torch],
    ours: Torch,
    given: Mapping[str, Any],
) -> SampledKind:
    """What differs in one tensor, and in what the emulation must be changed for it to vanish."""
    import torch

    method, base = job.recipe.method, inputs.get("reference")
    experts = [inputs[name] for name in site.experts]
    computed = getattr(torch, _named(given, "dtype") or f"{experts[0].dtype}"[6:])

    def theirs(kind: torch.dtype, *, stable: bool = False) -> Torch:
        start = None if base is None else base.to(kind)
        tuned = [one.to(kind) for one in experts]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_SEED)
            return Emulated(method, start, tuned, site.settings, stable).merged()

    written, narrow = _named(given, "out_dtype"), ours.dtype
    result = theirs(computed)
    result = result.to(getattr(torch, written)) if written else result
    plain = theirs(torch.float32).to(narrow)
    steady = theirs(torch.float32, stable=True).to(narrow)

    def count(one: Torch, other: Torch) -> int:
        left, right = one.double(), other.double()
        return int(((left != right) & ~(left.isnan() & right.isnan())).sum())

    drawn, mine = method in DRAWN, ours.double()
    gap, most = (result.double() - mine).abs().nan_to_num(nan=float("inf")), mine.abs().max()
    return SampledKind(
        name=site.tensor,
        tensors=1,
        coordinates=site.size,
        entries=ours.numel(),
        differing=count(result, ours),
        half_precision=count(result, plain),
        ties=count(plain, steady),
        draws=count(plain, ours) if drawn else 0,
        sums=0 if drawn else count(steady, ours),
        largest=float(gap.max() / most) if most else 0.0,
    )


def _together(kind: str, sizes: Sequence[int], counted: Sequence[SampledKind]) -> SampledKind:
    sums = ("entries", "differing", "half_precision", "ties", "draws", "sums")
    return SampledKind(
        name=kind,
        tensors=len(sizes),
        coordinates=sum(sizes),
        largest=max(one.largest for one in counted),
        **{name: sum(getattr(one, name) for one in counted) for name in sums},
    )


_COLUMNS = {
    "differ": "differing", "half precision": "half_precision", "ties": "ties", "draws": "draws",
    "sums": "sums",
}  # fmt: skip


def sampled_lines(found: Sampled) -> Iterator[str]:
    """The sample as a table."""
    whose = f"{found.recipe}: " if found.recipe else ""
    wide = max([len(kind.name) for kind in found.kinds], default=0)
    wide = max(wide, len("estimate for the model"))
    entries = sum(kind.entries for kind in found.kinds)
    yield (
        f"{whose}entries that differ from mergekit's, which computes in {found.computed}; of a "
        f"sample of {entries:,} entries:"
    )
    yield f"{'':{wide}}  {'entries':>11}" + "".join(f"{c:>15}" for c in _COLUMNS) + "    largest"
    for kind in found.kinds:
        shares = [getattr(kind, key) / kind.entries for key in _COLUMNS.values()]
        yield f"{kind.name:{wide}}  {kind.entries:11,}{_cells(shares)}  {_part(kind.largest):>9}"
    shares = [found.share(key) for key in _COLUMNS.values()]
    largest = max((kind.largest for kind in found.kinds), default=0.0)
    yield (
        f"{'estimate for the model':{wide}}  {found.coordinates:11,}{_cells(shares)}  "
        f"{_part(largest):>9}"
    )
    yield from _explained(found)


def _explained(found: Sampled) -> Iterator[str]:
    if found.share("half_precision"):
        yield f"half precision: mergekit rounds every operation to {found.computed}, we round once"
    if found.share("ties"):
        yield "ties: entries of equal size, of which another one is kept"
    if found.share("draws"):
        yield "draws: other entries are dropped, with the same odds"
    if found.share("sums"):
        yield "sums: the same operations in another order, or fused; the last digit"
    yield "largest: the largest difference, as a part of its tensor's largest value"
    if found.left_out:
        yield f"{found.left_out} smaller kinds of tensors were not sampled"


def _cells(shares: Sequence[float]) -> str:
    return "".join(f"{_part(share):>15}" for share in shares)


def _part(share: float) -> str:
    if share == 0:
        return "0"
    return f"{100 * share:.2f} %" if share >= 5e-5 else "< 0.01 %"
