"""`sigmerge repair`: give an anchor back what the merge took, within a budget (Algorithm 1).

The anchor is a stored checkpoint, ours or another tool's. Everything decided before the first byte
is written stands in plan.json, from which the same repair can be made again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from sigmerge.checkpoints.folder import Checkpoint, open_checkpoint
from sigmerge.checkpoints.pool import Pool, differences
from sigmerge.checkpoints.writer import check_target, mirror_layout
from sigmerge.commands.merge import INTERPRETER, make_merge, plan_merge
from sigmerge.commands.occupy import Guard, RepairJob, Round, write_repair
from sigmerge.commands.options import Meter, Options
from sigmerge.commands.profile import Profile, block_sites, measure_profile, open_recipe_pool
from sigmerge.commands.scores import Score, Scorer, ScoreTable, score_table, scorer_of
from sigmerge.errors import PoolError, RecipeError, ScoreError, SigmergeError
from sigmerge.files.digests import sha256
from sigmerge.method.controls import VARIANTS, Allocation, allocate
from sigmerge.method.deficit import check_scores, shares
from sigmerge.method.deficit import deficits as measure_deficits
from sigmerge.method.occupancy import Update
from sigmerge.recipe import Recipe, RepairSection, load_recipe

CANDIDATES: Final[tuple[tuple[Literal["add", "replace"], float], ...]] = (
    ("add", 0.6), ("add", 0.8), ("add", 1.0), ("replace", 0.8), ("replace", 1.0),
)  # fmt: skip
"""Update forms and scales that `scale: calibrated` chooses from."""


def repair(
    recipe: Recipe | Path | str | Mapping[str, Any],
    out: Path | str,
    *,
    anchor: Path | str | None = None,
    score: Score | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Repair a stored anchor as the recipe's `repair:` section says, into a new folder.

    `score` is a Python callable from a checkpoint folder to {domain: fraction}; it takes the place
    of the recipe's own source of scores.
    """
    options = Options(**how)
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if loaded.repair is None:
        raise RecipeError("The recipe has no repair: section.")
    stored = _which_anchor(loaded, anchor)
    check_target(Path(out), options.overwrite, [*loaded.inputs, stored])
    return repair_anchor(loaded, stored, Path(out), options, score)


def _which_anchor(recipe: Recipe, given: Path | str | None) -> Path:
    stored = Path(given) if given is not None else recipe.anchor
    if stored is None:
        raise RecipeError(
            "Which anchor? Pass --anchor FOLDER, or merge_method: checkpoint with anchor: in the "
            "recipe; `sigmerge merge` makes and repairs one in a single command."
        )
    return stored


def merge_and_repair(
    recipe: Recipe, out: Path, options: Options, score: Score | None = None
) -> dict[str, Any]:
    """Merge and repair in one command: the anchor is stored beside the result while it lasts."""
    check_target(out, options.overwrite, recipe.inputs)
    check_repair(recipe, options, score)
    if recipe.operator is None:
        assert recipe.anchor is not None
        return repair_anchor(recipe, recipe.anchor, out, options, score)
    anchor = out.absolute().with_name(f".{out.name}.anchor")
    if anchor.exists() and stale_anchor(recipe, anchor, options):
        shutil.rmtree(anchor)
    if not anchor.exists():
        make_merge(recipe, anchor, options)
    try:
        result = repair_anchor(recipe, anchor, out, options, score, kept=False)
    except SigmergeError as error:
        error.args = (f"{error}\nThe merge itself is done and waits for the same command in "
                      f"{anchor}.",)  # fmt: skip
        raise
    shutil.rmtree(anchor)
    return result


def stale_anchor(recipe: Recipe, anchor: Path, options: Options) -> bool:
    """Whether an anchor left by an interrupted run is not what this recipe would make now."""
    # A search's winner keeps its own recipe, by which it can be made again, and that of the search.
    text, note = ("searched.yaml", "search.json") if recipe.search else ("recipe.yaml", "plan.json")
    records = [anchor / "sigmerge" / name for name in (text, note, "provenance.json")]
    if not all(record.exists() for record in records):
        return True
    same_text = records[0].read_text() == recipe.text
    same_seed = json.loads(records[1].read_text())["seed"] == recipe.seed
    job = plan_merge(replace(recipe, search=None), options)
    made = {anchor / name: size for name, size in
            zip(job.layout.files, job.layout.sizes, strict=True)}  # fmt: skip
    same_files = all(f.exists() and f.stat().st_size == size for f, size in made.items())
    if not (same_text and same_seed and same_files):
        return True
    if recipe.search and not _same_search(recipe, anchor, options):
        return True
    if job.operator.needs:
        from sigmerge.commands.capture import folders, plan_captures

        places = folders(plan_captures(recipe, job.pool, options), recipe, job.pool, options)
        names = {expert: place.name for expert, place in places.items()}
        if json.loads(records[1].read_text()).get("capture", {}).get("statistics") != names:
            return True
    entries = json.loads(records[2].read_text())["inputs"]
    before = {Path(entry["file"]): entry["sha256"] for entry in entries}
    weights = {file for member in job.pool.members.values() for file in member.files}
    exemplars = {model.exemplars for model in recipe.models if model.exemplars}
    if not weights <= before.keys() <= weights | exemplars:
        return True
    return sha256(before) != before


def _same_search(recipe: Recipe, anchor: Path, options: Options) -> bool:
    """Whether the anchor's own journal was begun as this recipe's would be."""
    from sigmerge.commands.search import JOURNAL, Settings, plan_search
    from sigmerge.files.journal import continues

    header = plan_search(recipe, Settings.of(recipe), options).header()
    return continues(anchor / "sigmerge" / JOURNAL, header)


def repair_anchor(
    recipe: Recipe,
    anchor: Path,
    out: Path,
    options: Options,
    score: Score | None = None,
    *,
    kept: bool = True,
) -> dict[str, Any]:
    meter = Meter()
    section = recipe.repair
    assert section is not None
    scorer = _scorer(recipe, score, options)
    _check_section(section, scorer)
    pool = open_recipe_pool(recipe, options)
    stored = open_anchor(anchor, pool, options)
    table = score_table(recipe, anchor, scorer, options)
    measured = measure_profile(recipe, pool, options)
    allocation = _allocate(section, recipe, measured, table)
    update = _update(section, allocation)
    layout = mirror_layout(stored)
    rounds = (Round(allocation.order, _rows(allocation)),)
    mask_seed = section.seed if allocation.selection == "random" else None
    job = RepairJob(pool, stored, rounds, update, mask_seed, layout)
    extra: dict[str, Any] = {}
    if scorer is not None and not job.idle:
        job, extra = _further_rounds(job, recipe, section, measured, table, scorer, out, options)
        if section.scale == "calibrated":
            job, chosen = _calibrate(job, scorer, table, out, options)
            extra |= chosen
    plan = {
        "operator": recipe.method,
        "anchor": {"path": str(stored.path) if kept else None, "sha256": weights_of(stored)},
        "reference": {"path": str(pool.layout.path), "sha256": weights_of(pool.layout)},
        "experts": {
            name: {"path": str(e.path), "sha256": weights_of(e)} for name, e in pool.experts.items()
        },
        "scores": {"experts": table.experts, "anchor": table.anchor},
        **allocation.as_plan(),
        "update": job.update.form,
        "scale": job.update.scale,
        "drop": job.update.drop if job.update.form == "sparse" else None,
        **extra,
    }
    plan["warnings"] = [*_notes(recipe, stored.path), *plan["warnings"]]
    guard = _guard(section, scorer, table)
    return write_repair(job, plan, recipe.text, out, options, meter, guard)


def check_repair(recipe: Recipe, options: Options, score: Score | None = None) -> None:
    """Find out before a merge is made that it could not be repaired: by its scores or its probe."""
    section = recipe.repair
    assert section is not None
    scorer = _scorer(recipe, score, options)
    _check_section(section, scorer)
    if section.probe is None and VARIANTS[section.variant].views == ("representation",):
        raise RecipeError(f"variant: {section.variant} needs the representation view; give probe:.")
    if section.probe is not None:
        from sigmerge.probing.exemplars import read_prompts

        read_prompts(recipe.folder / section.probe)
    if scorer is None:
        score_table(recipe, None, None, options)


def _scorer(recipe: Recipe, score: Score | None, options: Options) -> Scorer | None:
    """A callable if there is one; else what the recipe's `repair:` section says."""
    if score:
        return Scorer("a Python callable", score, remembers=False)
    assert recipe.repair is not None
    return scorer_of(recipe.repair, recipe.folder, options)


def _notes(recipe: Recipe, anchor: Path) -> list[str]:
    """What the recipe, and the merge that made the anchor if it was ours, had to say."""
    note = anchor / "sigmerge/plan.json"
    said = json.loads(note.read_text(encoding="utf-8")) if note.exists() else {}
    return list(dict.fromkeys([*recipe.notes, *said.get("warnings", [])]))


def _check_section(section: RepairSection, scorer: Scorer | None) -> None:
    if scorer is not None:
        return
    needs = [f"rounds: {section.rounds}"] if section.rounds > 1 else []
    needs += ["scale: calibrated"] if section.scale == "calibrated" else []
    needs += ["guard: keep_anchor"] if section.guard == "keep_anchor" else []
    if needs:
        raise ScoreError(
            f"{', '.join(needs)} must score checkpoints that do not exist yet; a file of scores "
            "cannot. Give command: or evaluate: instead of scores:."
        )


def open_anchor(path: Path, pool: Pool, options: Options) -> Checkpoint:
    """The anchor, checked against the pool: same architecture, same blocks."""
    stored = open_checkpoint(path, allow_pickle=options.allow_pickle)
    problems = differences("anchor", stored, pool.layout, mixed_dtypes=True, outside=False)
    if problems:
        raise PoolError("The anchor is no merge of this pool:", problems)
    return stored


def weights_of(checkpoint: Checkpoint) -> list[str]:
    """Digests of a checkpoint's weight files, in the files' order."""
    digests = sha256(checkpoint.files)
    return [digests[file] for file in checkpoint.files]


def _allocate(
    section: RepairSection, recipe: Recipe, measured: Profile, table: ScoreTable
) -> Allocation:
    domains = list(recipe.experts)
    gaps = measure_deficits(table.experts, table.anchor, domains, section.reference)
    return allocate(
        measured.views,
        gaps,
        measured.coordinates,
        domains,
        c_min=section.c_min,
        c_max=section.c_max,
        variant=section.variant,
        seed=section.seed,
        admit=section.admit,
    )


def _rows(allocation: Allocation) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(k) for k in row) for row in allocation.quota)


def _update(section: RepairSection, allocation: Allocation) -> Update:
    form = "sparse" if allocation.update == "sparse" else section.update
    if section.scale == "calibrated":
        return Update(CANDIDATES[0][1], "add", seed=section.seed)
    default = RepairSection.model_fields["scale"].default
    untouched = section.scale == default and "scale" not in section.model_fields_set
    scale = 1.0 if form == "replace" and untouched else float(section.scale)
    return Update(scale, form, section.drop, section.seed)


def _further_rounds(
    job: RepairJob,
    recipe: Recipe,
    section: RepairSection,
    measured: Profile,
    table: ScoreTable,
    scorer: Scorer,
    out: Path,
    options: Options,
) -> tuple[RepairJob, dict[str, Any]]:
    """Ours: repair, measure again, and claim from what is left. Rounds are disjoint, so the last
    result is the anchor with all rounds' claims."""
    later = []
    for _ in range(section.rounds - 1):
        scores = _score_candidate(job, scorer, table, out, options)
        allocation = _allocate(section, recipe, measured, replace(table, anchor=scores))
        following = Round(allocation.order, _rows(allocation))
        grown = replace(job, rounds=(*job.rounds, following))
        plan = allocation.as_plan()
        later.append({key: plan[key] for key in ("deficit", "share", "order", "quota")})
        if not any(k for row in following.quota for k in row):
            break
        _check_rounds(grown, measured)
        job = grown
    return job, {"later_rounds": later} if later else {}


def _check_rounds(job: RepairJob, measured: Profile) -> None:
    total = np.sum([np.array(r.quota) for r in job.rounds], axis=(0, 2))
    for layer, (wanted, size) in enumerate(zip(total, measured.coordinates, strict=True)):
        if wanted > size:
            raise RecipeError(f"layer {layer}: {len(job.rounds)} rounds claim {wanted} of {size} "
                              "coordinates; lower c_max or rounds.")  # fmt: skip


def _calibrate(
    job: RepairJob, scorer: Scorer, table: ScoreTable, out: Path, options: Options
) -> tuple[RepairJob, dict[str, Any]]:
    """Ours: the update form and scale with the best mean calibration score."""
    tried: list[dict[str, Any]] = []
    for form, scale in CANDIDATES:
        candidate = replace(job, update=replace(job.update, form=form, scale=scale))
        scores = _score_candidate(candidate, scorer, table, out, options)
        mean = float(np.mean(list(scores.values())))
        tried.append({"update": form, "scale": scale, "scores": scores, "mean": mean})
    best = int(np.argmax([entry["mean"] for entry in tried]))  # the first among equals
    form, scale = CANDIDATES[best]
    return replace(job, update=replace(job.update, form=form, scale=scale)), {"candidates": tried}


def _score_candidate(
    job: RepairJob, scorer: Scorer, table: ScoreTable, out: Path, options: Options
) -> dict[str, float]:
    """Scores of a checkpoint that is written only to be measured."""
    folder = out.absolute().with_name(f".{out.name}.candidate")
    write_repair(job, {}, "", folder, replace(options, overwrite=True), Meter())
    try:
        return _measured(scorer, folder, table)
    finally:
        shutil.rmtree(folder)


def _measured(scorer: Scorer, folder: Path, table: ScoreTable) -> dict[str, float]:
    """Scores of a repaired folder, of the domains and on the scale of the anchor's."""
    scores = scorer(folder)
    if problems := check_scores(table.experts, scores, list(table.experts), "own"):
        told = [problem.replace("anchor.", "after the repair: ", 1) for problem in problems]
        raise ScoreError(f"The scores ({scorer.name}) cannot be used:", told)
    return scores


def _guard(section: RepairSection, scorer: Scorer | None, table: ScoreTable) -> Guard:
    """Reads the calibration scores once more after the repair, and speaks up if they fell."""

    def look(folder: Path) -> dict[str, Any]:
        if section.guard == "off":
            return {"verdict": "off"}
        if scorer is None:
            return {"verdict": "no scores to be had after the repair"}
        scores = _measured(scorer, folder, table)
        before = float(np.mean(list(table.anchor.values())))
        after = float(np.mean([scores[domain] for domain in table.anchor]))
        verdict = "better" if after > before else "level" if after == before else "worse"
        found: dict[str, Any] = {"verdict": verdict, "before": before, "after": after,
                                 "scores": scores, "kept": "repair"}  # fmt: skip
        if verdict == "worse":
            fell = f"from {100 * before:.2f} to {100 * after:.2f}"
            found["warning"] = f"THE REPAIR HURT: the mean calibration score fell {fell}."
            if section.guard == "keep_anchor":
                found["kept"] = "anchor"
                found["warning"] += " The anchor is kept."
        return found

    return look


def replay(
    plan_file: Path | str, out: Path | str, *, anchor: Path | str | None = None, **how: Any
) -> dict[str, Any]:
    """Make the repair of a plan.json again, byte for byte. No scores and no probe are needed."""
    options, meter = Options(**how), Meter()
    job, plan, text = _planned(Path(plan_file), Path(out), anchor, options)
    kept = plan.get("guard", {}).get("kept")
    guard: Guard | None = (lambda folder: plan["guard"]) if kept == "anchor" else None
    return write_repair(job, plan, text, Path(out), options, meter, guard)


def _planned(
    plan_file: Path, out: Path, anchor: Path | str | None, options: Options
) -> tuple[RepairJob, dict[str, Any], str]:
    """The job of a plan, the plan, and a recipe that says where it came from."""
    plan = _read_plan(plan_file)
    recipe = load_recipe({
        "merge_method": "task_arithmetic",
        "base_model": plan["reference"]["path"],
        "models": [{"model": e["path"], "name": name} for name, e in plan["experts"].items()],
    })  # fmt: skip
    pool = open_recipe_pool(recipe, options)
    path = anchor or plan["anchor"]["path"]
    if path is None:
        raise RecipeError(
            f"{plan_file}: the anchor it repaired was not kept; make it again with `sigmerge "
            "merge` (the recipe without repair:) and pass --anchor FOLDER."
        )
    check_target(out, options.overwrite, [*recipe.inputs, Path(path)])
    stored = open_anchor(Path(path), pool, options)
    _check_plan(plan_file, plan, pool)
    _check_digests(plan, {**pool.members, "anchor": stored})
    rounds = [Round(tuple(r["order"]), tuple(map(tuple, r["quota"])))
              for r in (plan, *plan.get("later_rounds", []))]  # fmt: skip
    drop = {} if plan["drop"] is None else {"drop": plan["drop"]}
    update = Update(plan["scale"], plan["update"], seed=plan["seed"], **drop)
    mask_seed = plan["seed"] if plan["selection"] == "random" else None
    layout = mirror_layout(stored)
    job = RepairJob(pool, stored, tuple(rounds), update, mask_seed, layout)
    return job, plan, f"# replayed from a plan\n{recipe.text}"


class _PlanMember(BaseModel):
    path: str | None
    sha256: list[str]


class _PlanRound(BaseModel):
    order: list[str]
    quota: list[list[Annotated[int, Field(ge=0)]]]


class PlanFile(_PlanRound):
    """What a replay reads of a plan.json."""

    reference: _PlanMember
    experts: dict[str, _PlanMember]
    anchor: _PlanMember
    scale: float = Field(allow_inf_nan=False)
    update: Literal["add", "sparse", "replace"]
    drop: float | None = Field(ge=0, lt=1)
    selection: Literal["magnitude", "random"]
    seed: int
    later_rounds: list[_PlanRound] = []


def _read_plan(file: Path) -> dict[str, Any]:
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{file}: no such plan.") from None
    except ValueError as error:
        raise RecipeError(f"{file}: not valid JSON ({error}).") from None
    try:
        PlanFile.model_validate(plan)
    except ValidationError as error:
        wrong = dict.fromkeys(".".join(map(str, item["loc"][:2])) for item in error.errors())
        raise RecipeError(
            f"{file}: not the plan of a repair; these cannot be used: {', '.join(wrong)}."
        ) from None
    return dict(plan)


def _check_plan(file: Path, plan: Mapping[str, Any], pool: Pool) -> None:
    """Whether a plan's claims fit the pool."""
    experts, depth = sorted(pool.experts), pool.stack.depth
    sizes = [sum(site.size for site in block) for block in block_sites(pool)]
    claims = np.zeros(depth)
    for turn in (plan, *plan.get("later_rounds", [])):
        if sorted(turn["order"]) != experts:
            raise RecipeError(f"{file}: order must name each of {', '.join(experts)} once.")
        if len(turn["quota"]) != depth or any(len(row) != len(experts) for row in turn["quota"]):
            raise RecipeError(f"{file}: quota must have {depth} rows of {len(experts)} numbers.")
        claims += np.sum(turn["quota"], axis=1)
    for layer, (wanted, size) in enumerate(zip(claims, sizes, strict=True)):
        if wanted > size:
            raise RecipeError(f"{file}: layer {layer}: {wanted:g} of {size} coordinates claimed.")


def _check_digests(plan: Mapping[str, Any], members: Mapping[str, Checkpoint]) -> None:
    promised = {"reference": plan["reference"], "anchor": plan["anchor"], **plan["experts"]}
    changed = [name for name, member in members.items()
               if sorted(weights_of(member)) != sorted(promised[name]["sha256"])]  # fmt: skip
    if changed:
        raise PoolError(f"The plan was made with other weights of: {', '.join(changed)}.")


def deficits(
    recipe: Recipe | Path | str | Mapping[str, Any],
    *,
    anchor: Path | str | None = None,
    score: Score | None = None,
    **how: Any,
) -> dict[str, Any]:
    """What the anchor lost on every domain, and the share of capacity that gives it."""
    options = Options(**how)
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    section = loaded.repair
    if section is None:
        raise RecipeError("The recipe has no repair: section that says where scores come from.")
    scorer = _scorer(loaded, score, options)
    stored = Path(anchor) if anchor is not None else loaded.anchor
    if stored is not None:
        open_checkpoint(stored, allow_pickle=options.allow_pickle)
    table = score_table(loaded, stored, scorer, options)
    domains = list(loaded.experts)
    gaps = measure_deficits(table.experts, table.anchor, domains, section.reference)
    share = shares(gaps)
    return {
        "domains": domains,
        "experts": table.experts,
        "anchor": table.anchor,
        "deficit": dict(zip(domains, gaps.tolist(), strict=True)),
        "share": dict(zip(domains, share.tolist(), strict=True)),
    }


def describe(
    recipe: Recipe, out: Path, options: Options, anchor: Path | None = None
) -> dict[str, Any]:
    """What a dry run of the repair tells: sizes only, nothing is read or scored."""
    path = _which_anchor(recipe, anchor)
    check_target(out, options.overwrite, [*recipe.inputs, path])
    check_repair(recipe, options)
    pool = open_recipe_pool(recipe, options)
    open_anchor(path, pool, options)
    return sizes(pool, options)


def describe_replay(
    plan_file: Path, out: Path, options: Options, anchor: Path | None = None
) -> dict[str, Any]:
    """The same for a repair that is made again from its plan."""
    job, _, _ = _planned(plan_file, out, anchor, options)
    return sizes(job.pool, options)


def sizes(pool: Pool, options: Options) -> dict[str, Any]:
    blocks = block_sites(pool)
    largest = max(sum(pool.layout.tensors[s.tensor].nbytes for s in block) for block in blocks)
    members = len(pool.experts) + 2
    coordinates = max(sum(site.size for site in block) for block in blocks)
    return {
        "layers": pool.stack.depth,
        "experts": {name: str(member.path) for name, member in pool.experts.items()},
        "coordinates": sum(site.size for block in blocks for site in block),
        "bytes_to_read": sum(m.nbytes for m in pool.members.values()) + pool.layout.nbytes,
        "bytes_to_write": pool.layout.nbytes,
        "peak_memory_bytes": INTERPRETER + largest * members + coordinates,
        "threads": options.threads,
    }
