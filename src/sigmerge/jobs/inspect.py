"""`sigmerge inspect`, `diff`, `init`: describe checkpoints, compare them, write a first recipe."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.blocks import natural
from sigmerge.checkpoints.companions import TORCH_NAMES, vocabulary
from sigmerge.checkpoints.computed import decides, disagreements, settings
from sigmerge.checkpoints.contradictions import contradictions
from sigmerge.checkpoints.equal import same_tensor
from sigmerge.checkpoints.folder import Checkpoint, open_checkpoint
from sigmerge.checkpoints.plain import open_tensors
from sigmerge.checkpoints.pool import together
from sigmerge.checkpoints.publishing import writing
from sigmerge.checkpoints.source import PoolSource
from sigmerge.engine.workers import Workers
from sigmerge.errors import OutputError
from sigmerge.files.documents import whole
from sigmerge.files.yaml_documents import in_yaml
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import pool_folders
from sigmerge.operators.table import operator
from sigmerge.recipe.folders import is_hub_id
from sigmerge.recipe.schema import modeline
from sigmerge.results import DifferingPart, Inspected, ModelDifference

KEEP_A_PART = ("ties", "dare", "della", "breadcrumbs")
"""Parts of the names of methods that keep a part of every task vector."""
COMPARED_AT_ONCE = 1 << 20
"""Coordinates that are compared at a time."""


def inspect_checkpoints(folders: Sequence[Path], options: Options) -> Inspected:
    """Describe checkpoints, or model+adapter, from their headers and configurations.

    Reads no tensor. Also reports where the configurations of further checkpoints compute something
    else than the first one's. A folder with reference/ and experts stands for all its members.
    """
    listed = [each for folder in folders for each in _members(folder)]
    opened = [open_tensors(each, allow_pickle=options.allow_pickle) for each in listed]
    first, *others = [_inspected(each) for each in opened]
    titles = [each.title for each in opened]
    unlike = len(set(titles)) == len(titles)
    configs = {(each.title if unlike else each.place): each.config for each in opened}
    doubts = [
        f"{name}: config.json says {told}"
        for name, each in zip(configs, opened, strict=True)
        for told in contradictions(each, each.config)
    ]
    warnings = (*disagreements(configs, None), *doubts)
    return first.model_copy(update={"others": tuple(others), "warnings": warnings})


def _members(folder: Path) -> list[Path]:
    if not folder.exists() and is_hub_id(str(folder)):
        from sigmerge.checkpoints.hub import stand_in

        return [stand_in(str(folder))]
    if (folder / "config.json").exists() or not (folder / "reference/config.json").is_file():
        return [folder]
    reference, experts = pool_folders(folder)
    return [reference, *experts]


def _inspected(found: Checkpoint) -> Inspected:
    words, sizes = vocabulary(found.path), Counter[str]()
    for tensor in found.tensors.values():
        sizes[TORCH_NAMES.get(tensor.dtype, tensor.dtype)] += tensor.size
    named = found.config.get("architectures") or ()
    return Inspected(
        folder=found.place,
        architecture=", ".join([named] if isinstance(named, str) else named),
        layers=found.stack.depth,
        prefix=found.stack.prefix,
        tensors=len(found.tensors),
        parameters=sum(sizes.values()),
        dtypes=dict(sizes),
        bytes=found.nbytes,
        files=len(found.files),
        form=found.form,
        embedding=found.tensors[found.embedding].shape if found.embedding else (),
        tied=found.tied,
        tokens=len(words) if isinstance(words, dict) else None,
        settings={key: v for key, v in settings(found.config).items() if decides(key, v)},
    )


@dataclass(frozen=True)
class DiffJob:
    """How the weights and the configuration of one checkpoint differ from those of another."""

    one: Path
    other: Path
    options: Options

    def run(self) -> ModelDifference:
        pickle = self.options.allow_pickle
        opened = [open_tensors(path, allow_pickle=pickle) for path in (self.one, self.other)]
        pool = together(opened[0], {"other": opened[1]})
        one, other = pool.layout, pool.experts["other"]

        def alone(these: Checkpoint, those: Checkpoint) -> dict[str, tuple[int, ...]]:
            shapes = {name: tensor.shape for name, tensor in those.tensors.items()}
            return {n: t.shape for n, t in these.tensors.items() if shapes.get(n) != t.shape}

        only_in_one, only_in_other = alone(one, other), alone(other, one)
        shared = [n for n, t in one.tensors.items() if t.floating and n not in only_in_one]
        keys = sorted(one.config.keys() | other.config.keys())
        return ModelDifference(
            one=one.place,
            other=other.place,
            parts=tuple(self._parts(one, other, sorted(shared, key=natural))),
            only_in_one=only_in_one,
            only_in_other=only_in_other,
            unlike=tuple(
                name
                for name, tensor in sorted(one.tensors.items(), key=lambda item: natural(item[0]))
                if not tensor.floating
                and name not in only_in_one
                and not same_tensor(tensor, other.tensors[name])
            ),
            config={
                key: (one.config.get(key), other.config.get(key))
                for key in keys
                if one.config.get(key) != other.config.get(key)
            },
        )

    def _parts(
        self, one: Checkpoint, other: Checkpoint, names: list[str]
    ) -> Iterator[DifferingPart]:
        """Layers in their order, then each tensor outside them."""
        groups: dict[str, list[str]] = {f"layer {i}": [] for i in range(one.stack.depth)}
        for name in names:
            block = one.stack.block_of(name)
            groups.setdefault(name if block is None else f"layer {block}", []).append(name)
        pieces = [
            (group, name, start, min(start + COMPARED_AT_ONCE, one.tensors[name].size))
            for group, inside in groups.items()
            for name in inside
            for start in range(0, one.tensors[name].size, COMPARED_AT_ONCE)
        ]
        sums = {group: np.zeros(4) for group, inside in groups.items() if inside}
        total = sum(stop - start for *_, start, stop in pieces)
        members = {"one": one, "other": other}
        with PoolSource(members) as source, Workers(self.options.threads) as workers:

            def compared(piece: tuple[str, str, int, int]) -> Any:
                _, name, start, stop = piece
                values = np.empty((2, stop - start), np.float32)
                for row, member in zip(values, members, strict=True):
                    source.fill(member, name, start, row)
                gap, of = (values[1] - values[0]).astype(np.float64), values[0].astype(np.float64)
                return np.array([gap.size, np.count_nonzero(gap), gap @ gap, of @ of])

            done = 0
            for piece, found in zip(pieces, workers.map(compared, pieces), strict=True):
                sums[piece[0]] += found
                done += piece[3] - piece[2]
                self.options.progress("comparing", done, total)
        for group, (count, changed, gap, own) in sums.items():
            yield DifferingPart(
                name=group,
                coordinates=int(count),
                changed=int(changed),
                distance=float(np.sqrt(gap)),
                norm=float(np.sqrt(own)),
            )


def write_recipe(pool: Path, file: Path, method: str, overwrite: bool) -> str:
    """A recipe to start from, for a folder with reference/ and one folder per expert."""
    chosen = operator(method)
    reference, experts = pool_folders(pool)
    if file.exists() and not overwrite:
        raise OutputError(
            f"{file}: exists already. Merge it as it is (sigmerge merge {file} merged/), name "
            "another file for the new recipe, or pass --overwrite to replace it."
        )
    if file.exists() and (file.suffix not in (".yaml", ".yml") or not file.is_file()):
        raise OutputError(f"{file}: is no .yaml file, and --overwrite only replaces those.")
    kinds = {tensor.dtype for tensor in open_checkpoint(reference).tensors.values()}
    names = sorted(TORCH_NAMES[kind] for kind in kinds if kind in TORCH_NAMES)
    named = {parameter.name for parameter in chosen.parameters if parameter.per_model}
    given = {
        "weight: 0.4": "weight" in named,
        "density: 0.5": any(w in method for w in KEEP_A_PART),
    }
    each = ", ".join(setting for setting, read in given.items() if read)

    def place(path: Path) -> str:
        return in_yaml(os.path.relpath(path, file.absolute().parent))

    lines = [modeline(), f"merge_method: {method}   # `sigmerge operators` lists all"]
    lines += [f"base_model: {place(reference)}", "models:"]
    for path in experts:
        more = f", parameters: {{{each}}}" if each else ""
        lines.append(f"  - {{model: {place(path)}, name: {in_yaml(path.name)}{more}}}")
    lines.append(f"dtype: {names[0] if len(names) == 1 else 'float32'}")
    lines += _repair(pool, place)
    text = "\n".join([*lines, ""])
    with writing(file), whole(file) as partial:
        partial.write_text(text, encoding="utf-8")
    return text


def _repair(pool: Path, place: Callable[[Path], str]) -> list[str]:
    """The repair: section; as comments if no source of scores is known."""
    lines = ["repair:"]
    if (pool / "probe.jsonl").is_file():
        lines.append(f"  probe: {place(pool / 'probe.jsonl')}")
    if (pool / "splits/calibration").is_dir():
        return [*lines, f"  evaluate: {{suite: nano, pool: {place(pool)}}}"]
    lines.append('  command: python score.py {checkpoint}   # your own; prints {"domain": score}')
    return [f"# {line}" for line in lines]
