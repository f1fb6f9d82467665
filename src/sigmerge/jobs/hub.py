"""A job whose models come from the hub, or whose result goes there.

The job is planned with the headers of what is not here, so that models which do not fit are refused
before their weights are downloaded. Then the weights that it reads are, and it runs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from sigmerge.checkpoints.card import licence
from sigmerge.checkpoints.folder import RECORDS_FOLDER, on_hub
from sigmerge.checkpoints.header import ITEM_SIZE
from sigmerge.checkpoints.lazy import stored_pieces
from sigmerge.checkpoints.pool import open_members
from sigmerge.checkpoints.remote import target_url
from sigmerge.checkpoints.verify import verify_result
from sigmerge.errors import OutputError, SigmergeWarning
from sigmerge.files.digests import rehashing
from sigmerge.jobs.adapter import plan_adapter
from sigmerge.jobs.dense import plan_dense
from sigmerge.jobs.merge import MergeJob
from sigmerge.jobs.options import Options
from sigmerge.jobs.steps import Description, DownloadStep, PushStep
from sigmerge.recipe import Recipe
from sigmerge.recipe.members import in_hub, with_weights
from sigmerge.records import PROVENANCE, Provenance, read

FETCHED_WHOLE = 0.5
"""Of a file's bytes: where a merge reads as many, the file is downloaded; else its tensors are."""


class _Described(Protocol):
    def describe(self) -> Description: ...
    def run(self) -> Any: ...


@dataclass(frozen=True)
class Push:
    """Where a result goes on the hub; `made` is the folder of it that has the weights."""

    repository: str
    private: bool
    made: Path


@dataclass(frozen=True)
class Pushed:
    """What a job made, and where it was uploaded."""

    made: Any
    address: str


@dataclass(frozen=True)
class HubJob:
    """The job of a recipe, before and behind which the hub is asked where that is needed."""

    recipe: Recipe
    job_of: Callable[[Recipe], _Described]
    options: Options
    push: Push | None = None

    def describe(self) -> Description:
        steps = self._pushing()
        told = self.job_of(self.recipe).describe()
        return replace(told, steps=(*self._downloading(), *told.steps, *steps))

    def run(self) -> Any:
        """What the job does; with a push, what was made and its address."""
        for step in self._pushing():
            for note in step.notes:
                warnings.warn(note, SigmergeWarning, stacklevel=2)
        recipe = self.recipe
        if in_hub(recipe):
            self.job_of(recipe).describe()  # what is wrong by headers is wrong now
            recipe = with_weights(recipe, self.options.progress, self._whole)
        made = self.job_of(recipe).run()
        if self.push is None:
            return made
        return Pushed(made, self._uploaded(self.push))

    @cached_property
    def _read(self) -> Counter[Path] | None:
        """The bytes that are read of every weight file; None: all of them.

        A forward pass reads whole models, and so does what measures them.
        """
        recipe = self.recipe
        plain = isinstance(self.job_of(recipe), MergeJob) and recipe.operator is not None
        scored = recipe.repair or recipe.guide or recipe.search or recipe.tune
        if not plain or scored or (recipe.operator and recipe.operator.needs):
            return None
        found = Counter[Path]()
        job = (plan_dense(recipe, self.options) if recipe.adapter is None
               else plan_adapter(recipe, self.options).dense)  # fmt: skip
        read = {
            (member.here, name): member.tensors[name]
            for member in job.members.values()
            for name in job.sites
            if name in member.tensors
        }
        layout = job.pool.layout
        read |= {(layout.here, n): t for n, t in layout.tensors.items() if n not in job.sites}
        for tensor in read.values():
            for part, first, last in stored_pieces(tensor, 0, tensor.size):
                found[part.file] += (last - first) * ITEM_SIZE[part.dtype]
        return found

    def _whole(self, folder: Path) -> list[str]:
        """The weight files of a folder that are downloaded."""
        from sigmerge.checkpoints.hub import weights_of

        files = weights_of(folder)
        if self._read is None:
            return list(files)
        return [n for n, one in files.items() if self._read[folder / n] >= FETCHED_WHOLE * one.size]

    def _downloading(self) -> tuple[DownloadStep, ...]:
        """What would be downloaded, by model."""
        folders = in_hub(self.recipe)
        if not folders:
            return ()
        from sigmerge.checkpoints.hub import weights_of

        models, ranges, total = dict[str, int](), list[str](), 0
        for folder in folders:
            name, whole = on_hub(folder) or folder.name, self._whole(folder)
            models[name] = 0
            for file, one in weights_of(folder).items():
                needed = one.size if file in whole else (self._read or Counter())[folder / file]
                if needed and file not in whole and name not in ranges:
                    ranges.append(name)
                models[name] += needed
                total += one.size
        return (
            DownloadStep(
                models=models, ranges=tuple(ranges), unread=max(0, total - sum(models.values()))
            ),
        )

    def _pushing(self) -> tuple[PushStep, ...]:
        """The upload, which is allowed."""
        if self.push is None:
            return ()
        from sigmerge.checkpoints.hub import check_push

        if url := target_url(self.push.made):
            raise OutputError(f"{url}: with --push the result is made in a local folder; give one.")
        address, exists = check_push(self.push.repository, self.push.private)
        told = licence(open_members(self.recipe.members, self.options.allow_pickle)).warning
        return (
            PushStep(
                repository=self.push.repository,
                address=address,
                folder=str(self.push.made),
                private=self.push.private,
                exists=exists,
                notes=(f"licence: {told}",) if told else (),
            ),
        )

    def _uploaded(self, to: Push) -> str:
        """The address of the result, which is read again before it is uploaded."""
        from sigmerge.checkpoints.hub import push

        outputs = read(Provenance, to.made / RECORDS_FOLDER / PROVENANCE).outputs
        with rehashing():
            report = verify_result(
                to.made, outputs, None, threads=self.options.threads, progress=self.options.progress
            )
        if not report.ok:
            found = [str(one) for one in report.findings]
            raise OutputError(f"{to.made}: is not what was written, and is not uploaded:", found)
        try:
            return push(to.made, to.repository, to.private, self.options.progress)
        except OutputError as error:
            error.args = (
                f"{error}\nThe result is finished ({to.made}); nothing of it is on the hub until "
                "its commit is. Upload it by: "
                f"hf upload {to.repository} {to.made} .",
            )
            raise
