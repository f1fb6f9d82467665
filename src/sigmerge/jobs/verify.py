"""`sigmerge verify`: checks a folder against its records, and whether checkpoints form a pool.

`deep` computes some blocks of the result again from the inputs, by the recipe or, of a repair, by
the plan, and compares bits.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.companions import TOKENIZER_CONFIG
from sigmerge.checkpoints.folder import RECORDS_FOLDER, Checkpoint
from sigmerge.checkpoints.plain import is_pipeline
from sigmerge.checkpoints.reader import Reader
from sigmerge.checkpoints.source import PoolSource
from sigmerge.checkpoints.verify import Finding, Report, open_result, verify_pool, verify_result
from sigmerge.core import Array
from sigmerge.engine.workers import Workers
from sigmerge.errors import PoolError, SigmergeError
from sigmerge.files.checksums import is_intact
from sigmerge.files.documents import read_json_object
from sigmerge.files.yaml_documents import read_yaml
from sigmerge.jobs.adapter import AdapterJob, merge_factors, plan_adapter
from sigmerge.jobs.dense import DenseJob, merge_blocks, plan_dense, with_statistics
from sigmerge.jobs.moe import METHOD as MIXTURE
from sigmerge.jobs.moe import plan_mixture
from sigmerge.jobs.occupancy import OUTSIDE_LAYERS, OccupancyJob, claimed_in, write_blocks
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import open_anchor, open_repair_pool, recipe_of
from sigmerge.jobs.report import RUN, changed_files
from sigmerge.jobs.work_folder import WINNER
from sigmerge.probing.expected import Problems, architecture_problems
from sigmerge.progress import silent
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.recipe.moe import load_mixture
from sigmerge.recipe.sections import ModelSection, TrajectorySection
from sigmerge.recipe.trajectories import entries
from sigmerge.records import (
    PLAN,
    PROVENANCE,
    RECIPE,
    MergePlan,
    Provenance,
    RepairPlan,
    RunRecord,
    read,
    read_plan,
)
from sigmerge.results import Reports

REPAIRED_MEMBER = "anchor"
"""What the record of a repair calls the member that it repairs."""
SAMPLED = 4
"""Blocks that `deep` computes again by default."""


@dataclass(frozen=True)
class VerifyJob:
    """Checks of a published folder: a merge, a repair, the two of a run, the winner of a search.

    `deep` computes so many `blocks` again, drawn by the `seed`; None are all, and another seed at
    every run.
    """

    folder: Path
    options: Options
    deep: bool = False
    blocks: int | None = SAMPLED
    seed: int | None = None

    def run(self) -> Reports:
        made = [self.folder / name for name in ("anchor", "repaired")]
        result = (self.folder / RECORDS_FOLDER).is_dir()
        if not result and (self.folder / WINNER).is_dir():
            winner, ended = self._verified(self.folder / WINNER), _ended(self.folder)
            return Reports([winner] if ended.ok else [ended, winner])
        if result or not any(place.exists() for place in (self.folder / RUN, *made)):
            return Reports([self._verified(self.folder)])
        whole, own = _parts(self.folder)
        anchor = made[0] if own and made[0].is_dir() else None
        parts = [(part, anchor if part == made[1] else None) for part in made if part.exists()]
        reports = [self._verified(*each) for each in parts]
        return Reports(reports if whole.ok else [whole, *reports])

    def _verified(self, folder: Path, anchor: Path | None = None) -> Report:
        """The report of a checkpoint; `anchor` is what its run repaired, wherever that lies now."""
        if not (folder / RECORDS_FOLDER / PROVENANCE).exists():
            raise PoolError(
                f"{folder}: holds no {RECORDS_FOLDER}/{PROVENANCE}, by which it could be checked. "
                "Give a result of merge, repair, run, tune or search, or --pool for checkpoints."
            )
        record = folder / RECORDS_FOLDER / PROVENANCE
        provenance = read(Provenance, record, PoolError)
        if anchor is not None:
            provenance = _of_anchor(provenance, anchor)
        report = verify_result(
            folder,
            dict(provenance.outputs),
            {Path(entry.file): entry.sha256 for entry in provenance.inputs} or None,
            architecture=_architecture(folder),
            threads=self.options.threads,
            progress=self.options.progress,
        )
        report = _with_record(report, read_json_object(record, "a record", PoolError))
        if anchor is not None and not any(e.member == REPAIRED_MEMBER for e in provenance.inputs):
            told = Finding("parts", folder.name, "is no repair of the run's anchor")
            report = replace(report, findings=(*report.findings, told))
        if not self.deep:
            return report
        if any(finding.check in ("inputs", "headers") for finding in report.findings):
            why = "inputs changed, or the result cannot be read"
            return replace(report, skipped={**report.skipped, "recomputed": why})
        seed = secrets.randbelow(1 << 32) if self.seed is None else self.seed
        sample = Sample(self.blocks, seed)
        return _recomputed(report, folder, anchor, provenance, self.options, sample)


def _architecture(folder: Path) -> Problems:
    """What transformers misses in a model; it does not know other tensors."""
    plain = is_pipeline(folder) or not (folder / "config.json").exists()
    return "no model of transformers" if plain else architecture_problems(folder)


def _with_record(report: Report, content: Mapping[str, Any]) -> Report:
    """The report, with findings about the provenance itself."""
    problems = []
    if not content.get("outputs"):
        problems.append(Finding("digests", PROVENANCE, "lists no digests of the result's files"))
    report = replace(report, checked=(*report.checked, "record"))
    if not is_intact(content):
        told = "is not what was written; what it says of inputs and outputs may be wrong"
        problems.append(Finding("record", PROVENANCE, told))
    return replace(report, findings=(*report.findings, *problems))


def _of_anchor(provenance: Provenance, anchor: Path) -> Provenance:
    """The record of a repair whose anchor lies there now; a run may be moved as a whole."""
    own = [Path(e.file) for e in provenance.inputs if e.member == REPAIRED_MEMBER]
    before = next((file.parent for file in own if file.name == "config.json"), anchor)
    inputs = [
        e.model_copy(update={"file": str(anchor / Path(e.file).relative_to(before))})
        if e.member == REPAIRED_MEMBER and Path(e.file).is_relative_to(before)
        else e
        for e in provenance.inputs
    ]
    return provenance.model_copy(update={"inputs": tuple(inputs)})


def _ended(folder: Path) -> Report:
    """Check that a tuning or a search ended, and that its record is unchanged."""
    from sigmerge.jobs.search import SEARCH_RESULT
    from sigmerge.jobs.tune import TUNING_RESULT

    findings = []
    names = [name for name in (TUNING_RESULT, SEARCH_RESULT) if (folder / name).is_file()]
    if not names:
        findings.append(Finding("parts", WINNER, "has no record beside it; the search did not end"))
    for name in names:
        if not is_intact(read_json_object(folder / name, "a record", PoolError)):
            findings.append(Finding("record", name, "is not what was written"))
    return Report(folder, ("parts", "record"), {}, tuple(findings))


def _parts(folder: Path) -> tuple[Report, bool]:
    """Whether a run ended, and what its record names is there; and whether the anchor is its own.

    A given anchor lies elsewhere.
    """
    wanted, findings = ["anchor", "repaired"], []
    if not (folder / RUN).is_file():
        findings.append(Finding("parts", RUN, "is missing; the run did not end"))
    else:
        record = read(RunRecord, folder / RUN, PoolError)
        if not is_intact(read_json_object(folder / RUN, "a record", PoolError)):
            findings.append(Finding("record", RUN, "is not what was written"))
        changed = changed_files(folder, record)
        findings += [Finding("digests", name, "is not what the run wrote") for name in changed]
        if Path(record.anchor).parent != Path(record.repaired).parent:
            wanted = ["repaired"]
    missing = [name for name in wanted if not (folder / name).is_dir()]
    findings += [Finding("parts", name, "is missing") for name in missing]
    return Report(folder, ("parts", "record", "digests"), {}, tuple(findings)), "anchor" in wanted


@dataclass(frozen=True)
class VerifyPoolJob:
    """Checks of checkpoints before they are merged."""

    reference: Path | None
    experts: dict[str, Path]
    options: Options

    def run(self) -> Reports:
        options = self.options
        report = verify_pool(
            self.reference,
            self.experts,
            allow_pickle=options.allow_pickle,
            strict=options.strict,
            threads=options.threads,
            progress=options.progress,
        )
        return Reports([report])


@dataclass(frozen=True)
class Sample:
    """Which blocks are computed again: so many, or all, by the seed."""

    blocks: int | None
    seed: int

    def of(self, keys: Sequence[str]) -> set[str]:
        if self.blocks is None or self.blocks >= len(keys):
            return set(keys)
        drawn = np.random.default_rng(self.seed).permutation(len(keys))[: self.blocks]
        return {keys[place] for place in drawn}

    def extent(self, keys: Sequence[str]) -> str:
        chosen = len(self.of(keys))
        drawn = f", drawn by --seed {self.seed}" if chosen < len(keys) else ""
        return f"{chosen} of {len(keys)} blocks{drawn}"


class _Comparison:
    """A sink that compares what a job computes with what a checkpoint holds."""

    def __init__(
        self, stored: Checkpoint, sample: Sample, keys: Sequence[str], records: Any = None
    ) -> None:
        chosen = sample.of(keys)
        self.done: dict[str, Any] = {key: records for key in keys if key not in chosen}
        self.extent = sample.extent(keys)
        self._stored, self._reader = stored, Reader()
        self._counts: Counter[str] = Counter()
        self._strange: list[Finding] = []

    def write(self, tensor: str, start: int, raw: Array) -> None:
        begin = start * raw.itemsize
        held = self._held(tensor, begin, begin + raw.nbytes)
        if held == raw.view(np.uint8).data:
            return
        unequal = raw.size
        if len(held) == raw.nbytes:
            pairs = (np.frombuffer(each, np.uint8) for each in (held, raw.view(np.uint8).data))
            rows = np.not_equal(*pairs).reshape(raw.size, raw.itemsize)
            unequal = int(rows.any(axis=1).sum())
        self._counts[tensor] += unequal

    def write_bytes(self, tensor: str, data: memoryview) -> None:
        if self._held(tensor) != data:
            self._counts[tensor] += len(data)

    def expect(self, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Tensors that no block writes are reported, and those of another type or shape."""
        for name, tensor in sorted(self._stored.tensors.items()):
            if name not in wanted:
                self._strange.append(Finding("recomputed", name, "comes from no input"))
            elif (tensor.dtype, tensor.shape) != wanted[name]:
                kind, shape = wanted[name]
                told = f"type and shape differ from {kind} {list(shape)}"
                self._strange.append(Finding("recomputed", name, told))

    def expect_claims(self, plan: RepairPlan, layers: Sequence[list[dict[str, Any]]]) -> None:
        """Counts of layers that were computed again are those which the plan tells."""
        for key in ("claimed", "support"):
            told = getattr(plan, key)
            found = [claimed_in([records])[key][0] if records else None for records in layers]
            if told and len(told) != len(found):
                differs = f"has {len(told)} layers of {len(found)}"
                self._strange.append(Finding("recomputed", f"{key} of the plan", differs))
                continue
            self._strange += [
                Finding("recomputed", f"layer {i}", f"the plan's {key} differs from {list(own)}")
                for i, (own, theirs) in enumerate(zip(found, told, strict=False))
                if own is not None and own != theirs
            ]

    @property
    def findings(self) -> list[Finding]:
        return [
            Finding("recomputed", tensor, f"{count} values differ from the inputs and the plan")
            for tensor, count in self._counts.items()
        ] + self._strange

    def _held(self, tensor: str, begin: int = 0, end: int | None = None) -> memoryview:
        stored = self._stored.tensors.get(tensor)
        return memoryview(b"") if stored is None else self._reader.bytes(stored, begin, end)

    def finish(self, block: str, record: Any = None, tensors: Iterable[str] | None = None) -> None:
        self.done[block] = record


def _recomputed(
    report: Report,
    folder: Path,
    anchor: Path | None,
    provenance: Provenance,
    options: Options,
    sample: Sample,
) -> Report:
    """The report with one more check: sampled blocks, computed again.

    Records by which nothing can be computed are a finding, as wrong numbers are: else who changed
    a number could hide it by changing the records too.
    """
    quiet = replace(options, progress=silent)
    stored = open_result(folder)
    try:
        plan = read_plan(folder / RECORDS_FOLDER / PLAN)
        if isinstance(plan, RepairPlan) and plan.anchor.path is None:
            why = "the anchor was not kept, so the repair cannot be computed again"
            return replace(report, skipped={**report.skipped, "recomputed": why})
        if isinstance(plan, RepairPlan):
            place = anchor or Path(str(plan.anchor.path))
            compared = _repaired_again(plan, place, stored, quiet, sample)
        else:
            compared = _made_again(plan, folder, provenance, stored, quiet, sample)
    except SigmergeError as error:
        findings = [Finding("recomputed", folder.name, f"cannot be computed again: {error}")]
        extent = report.extent
    else:
        findings, extent = compared.findings, {**report.extent, "recomputed": compared.extent}
    return replace(
        report,
        checked=(*report.checked, "recomputed"),
        findings=(*report.findings, *findings),
        extent=extent,
    )


def _merged_again(
    job: DenseJob, stored: Checkpoint, options: Options, sample: Sample
) -> _Comparison:
    if job.operator.needs:
        job = with_statistics(job, options)
    keys = [key for key, _ in job.pool.blocks()]
    sink = _Comparison(stored, sample, keys)
    sink.expect(job.layout.specs())
    with (
        PoolSource(job.members, allow_nonfinite=True) as source,
        Workers(options.threads) as workers,
    ):
        merge_blocks(job, source, workers, sink, options)
    return sink


def _repaired_again(
    plan: RepairPlan, place: Path, stored: Checkpoint, options: Options, sample: Sample
) -> _Comparison:
    pool = open_repair_pool(recipe_of(plan), options)
    anchor = open_anchor(place, pool, options, any_architecture=True)
    keys = [*(f"layer {index}" for index in range(pool.stack.depth)), OUTSIDE_LAYERS]
    kept = plan.guard is not None and plan.guard.kept == "anchor"
    sink = _Comparison(stored, replace(sample, blocks=None) if kept else sample, keys, [])
    sink.expect({name: (t.dtype, t.shape) for name, t in anchor.tensors.items()})
    with (
        PoolSource(pool.members, allow_nonfinite=True) as source,
        PoolSource({"anchor": anchor}, allow_nonfinite=True) as reader,
        Workers(options.threads) as workers,
    ):
        if kept:
            for name, tensor in anchor.tensors.items():
                sink.write_bytes(name, reader.reader.bytes(tensor))
        else:
            job = OccupancyJob.of(plan, pool, anchor)
            layers = write_blocks(job, source, reader, workers, sink, options)
            sink.expect_claims(plan, layers)
    return sink


def _made_again(
    plan: MergePlan,
    folder: Path,
    provenance: Provenance,
    stored: Checkpoint,
    options: Options,
    sample: Sample,
) -> _Comparison:
    """A dense merge, a mixture or an adapter, as run."""
    if plan.operator == MIXTURE:
        given = read_yaml(folder / RECORDS_FOLDER / RECIPE, "the file of a mixture", PoolError)
        placed = _placed(given, _places(plan, provenance))
        mixture = plan_mixture(load_mixture(placed, seed=plan.seed), options)
        return _merged_again(mixture, stored, options, sample)
    recipe = _recipe(plan, folder, provenance)
    if recipe.adapter is not None:
        return _factored_again(plan_adapter(recipe, options), stored, options, sample)
    return _merged_again(plan_dense(recipe, options), stored, options, sample)


def _factored_again(
    job: AdapterJob, stored: Checkpoint, options: Options, sample: Sample
) -> _Comparison:
    sink = _Comparison(stored, sample, [key for key, _ in job.dense.pool.blocks()])
    sink.expect(job.layout.specs())
    merge_factors(job, sink, options)
    return sink


NOT_DENSE = ("repair", "chat_template")
"""Keys of a recipe that decide no weight of its dense merge."""


def _recipe(plan: MergePlan, folder: Path, provenance: Provenance) -> Recipe:
    """The recipe as run, with the paths that the records name: it means the same from any folder.

    A repair is not part of the dense merge.
    """
    file = folder / RECORDS_FOLDER / RECIPE
    given = read_yaml(file, "the recipe of a merge", PoolError)
    if isinstance(given, dict) and ("slices" in given or "modules" in given):
        return _sliced_recipe(plan, given, provenance)
    models = given.get("models") if isinstance(given, dict) else None
    if isinstance(models, dict):
        section = TrajectorySection.model_validate(models)
        models = entries(section, [str(expert.path) for expert in plan.experts.values()])
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise PoolError(f"{file}: is no recipe of a merge.")
    given = {key: value for key, value in given.items() if key not in NOT_DENSE}
    known = _places(plan, provenance)
    for key in ("tokenizer", "tokenizer_source"):
        if key in given:
            given[key] = _placed({key: given[key]}, known)[key]
    reference = plan.reference.path if plan.reference else None
    bases = _bases(models, given.get("base_model"), plan, file)
    if "base_model" in given:
        given["base_model"] = reference or given["base_model"]
    experts = iter(plan.experts.items())
    placed = []
    for place, model in enumerate(models):
        if place in bases:
            placed.append({**model, "model": reference})
        elif expert := next(experts, None):
            placed.append({**model, "model": expert[1].path, "name": expert[0]})
            placed[-1] |= _exemplars(model, expert[0], provenance)
    return load_recipe({**given, "models": placed, "seed": plan.seed})


def _bases(
    models: Sequence[Mapping[str, Any]], base: Any, plan: MergePlan, file: Path
) -> Sequence[int]:
    """Where the base model stands among the models, if it is none of the plan's experts.

    It is written as `base_model` is, or by another path to the same folder. In a soup it is one of
    the experts, and there are as many as models.
    """
    if not plan.reference or not plan.reference.path or base is None:
        return []
    named = _text({"model": base}, file)
    others = [i for i, m in enumerate(models) if str(m.get("name")) not in plan.experts]
    texts = {i: _text(models[i], file) for i in others}
    alike = [i for i, t in texts.items() if t == named or _may_be(t, plan.reference.path)]
    count = max(0, len(models) - len(plan.experts))
    return sorted(alike, key=lambda i: texts[i] != named)[:count]


def _text(model: Mapping[str, Any], file: Path) -> str:
    """An entry's model as one text."""
    try:
        return ModelSection.model_validate({"model": model.get("model")}).model
    except ValueError:
        raise PoolError(f"{file}: is no recipe of a merge.") from None


def _sliced_recipe(plan: MergePlan, given: Mapping[str, Any], provenance: Provenance) -> Recipe:
    """A recipe with slices; its models are found by the ends of their paths."""
    return load_recipe({**_placed(given, _places(plan, provenance)), "seed": plan.seed})


def _places(plan: MergePlan, provenance: Provenance) -> set[str]:
    """The checkpoints that the records name, and the folder of the tokenizer."""
    members = [*plan.experts.values(), *([plan.reference] if plan.reference else [])]
    known = {member.path for member in members if member.path}
    known |= {source.path for piece in plan.slices for source in piece.sources}
    files = [Path(e.file) for e in provenance.inputs if e.member == "tokenizer"]
    return known | {str(file.parent) for file in files if file.name == TOKENIZER_CONFIG}


def _placed(node: Any, known: Iterable[str]) -> Any:
    """A part of a recipe with the paths that are known; what decides no weight is left out."""
    if isinstance(node, list):
        return [_placed(entry, known) for entry in node]
    if not isinstance(node, dict):
        return node
    found = {key: _placed(value, known) for key, value in node.items() if key not in NOT_DENSE}
    for key in ("model", "base_model", "source_model", "tokenizer_source", "source"):
        if isinstance(text := found.get(key), str):
            meant = [path for path in known if _may_be(text, path)]
            # Where a path ends as another does, the shorter one starts from the same folder.
            found[key] = min(meant, key=lambda path: (len(Path(path).parts), path), default=text)
    return found


def _may_be(text: str, path: str) -> bool:
    """Whether a path in a recipe, which may start from the recipe's folder, can lead there."""
    if "+" in text and text.count("+") == path.count("+"):  # a model with an adapter
        return all(map(_may_be, text.split("+"), path.split("+")))
    if path.startswith("hf://"):
        return path.removeprefix("hf://").partition("@")[0] == text.partition("@")[0]
    ends = (tuple(p for p in Path(t).parts if p not in ("..", ".")) for t in _named(text))
    return any(Path(path).parts[-len(parts) :] == parts for parts in ends)


def _named(text: str) -> tuple[str, str]:
    """A path, and the same without a revision, which says nothing about a local folder."""
    return text, text.partition("@")[0]


def _exemplars(model: Mapping[str, Any], name: str, provenance: Provenance) -> dict[str, str]:
    """Where a model's exemplars lie; a recipe names them from its own folder."""
    if "exemplars" not in model:
        return {}
    wanted = Path(str(model["exemplars"])).name
    read = [e.file for e in provenance.inputs if e.member == name and Path(e.file).name == wanted]
    return {"exemplars": read[0]} if read else {}
