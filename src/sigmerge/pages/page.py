"""The page (`report.html`): one self-contained file about one or several runs.

Nothing is loaded from anywhere: charts are SVG in the text, and a Content-Security-Policy admits
only the page's own style and script, by their hashes. Every part of a `PageRun` may be missing; the
page shows what is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sigmerge.errors import SigmergeError
from sigmerge.files.documents import whole
from sigmerge.files.yaml_documents import parse_yaml
from sigmerge.pages import html, svg
from sigmerge.pages.figures import Figure, FigureSection, drawn, overview, score_grid, sections
from sigmerge.pages.paired import (
    PairedRow,
    between,
    cells,
    direction,
    headings,
    mean_row,
    paired_row,
    with_mean,
)
from sigmerge.pages.table import Table, number_columns, percent, points, text_columns
from sigmerge.records import MergePlan, PairedScores, Provenance, RepairPlan


@dataclass(frozen=True)
class PageRun:
    """One anchor, with or without repair.

    plan    of the repair; of a dense merge, or None, when nothing was repaired
    scores  on the evaluation split; `calibration`: on the calibration split
    seconds that the whole run took: merge, scores, profile, repair, scores again
    again   the command that makes the result once more
    """

    name: str
    recipe: str = ""
    plan: MergePlan | None = None
    provenance: Provenance | None = None
    scores: PairedScores | None = None
    calibration: PairedScores | None = None
    warnings: Sequence[str] = ()
    seconds: float | None = None
    again: str = ""

    @property
    def repair(self) -> RepairPlan | None:
        return self.plan if isinstance(self.plan, RepairPlan) else None


@dataclass(frozen=True)
class Notice:
    level: str  # "loud", "warning" or "note"
    text: str


@dataclass(frozen=True)
class RunView:
    """A run as the template reads it: all values are text."""

    name: str
    tags: Sequence[tuple[str, str]]
    headline: Sequence[tuple[str, str, str]]  # (what, number, beside it)
    notices: Sequence[Notice]
    sections: Sequence[FigureSection]
    calibration: Table | None
    ingredients: Table | None
    costs: Sequence[tuple[str, str]]
    files: Table | None
    recipe: str
    again: str
    gain: str
    mood: str  # "up", "down" or "level"


def write_page(path: Path, runs: Sequence[PageRun], *, title: str | None = None) -> None:
    """Write the page about `runs` to `path`."""
    with whole(path) as partial:
        partial.write_text(render(runs, title=title), encoding="utf-8", newline="\n")


def render(runs: Sequence[PageRun], *, title: str | None = None) -> str:
    """The page about `runs`, the first one shown first."""
    kinds = _kinds(runs)
    rows = [row for run in runs if (row := _row(run))]
    return html.page(
        "page.html.j2",
        title=title or _title(runs),
        lead=_lead(rows),
        paired=_paired_grid(rows) if len(rows) > 1 else None,
        overview=_overview(rows),
        runs=[_view(run, kinds) for run in runs],
    )


def _kinds(runs: Sequence[PageRun]) -> dict[str, str]:
    """One colour per domain on the whole page."""
    seen: dict[str, str] = {}
    for run in runs:
        scored = [name for s in (run.scores, run.calibration) if s for name in s.anchor]
        for domain in [*drawn(run.plan).names, *scored]:
            seen.setdefault(domain, f"d{len(seen) % svg.COLOURS}")
    return seen


def _row(run: PageRun) -> PairedRow | None:
    """The run in the paired table, if it was scored."""
    return paired_row(run.name, run.scores) if run.scores and run.scores.anchor else None


def _title(runs: Sequence[PageRun]) -> str:
    repaired = any(run.repair and run.repair.share for run in runs)
    done = "merged and repaired" if repaired else "merged"
    return f"{runs[0].name}, {done}" if len(runs) == 1 else f"{len(runs)} anchors, {done}"


def _lead(rows: Sequence[PairedRow]) -> str:
    """The result of the whole page in a sentence or two."""
    paired = [row for row in rows if row.gain is not None]
    if not paired:
        return ""
    mean = mean_row(paired)
    better = sum(row.gain > 0 for row in paired if row.gain is not None)
    subject = (
        f"The repair improved {better} of {len(paired)} anchors; on average it changed"
        if len(paired) > 1
        else "The repair changed"
    )
    words = (
        f"{subject} Macro-{mean.domains}, the mean of {mean.domains} domain scores, by "
        f"{points(mean.gain)} points"
    )
    if mean.gap_before is not None and mean.gap_after is not None:
        words += (
            f" and the residual gap to the strongest experts from {percent(mean.gap_before)} "
            f"to {percent(mean.gap_after)}"
        )
    sure = [direction(row.gain, row.noise.gain) for row in paired if row.noise]
    if len(sure) == len(paired) > 1:
        beyond = sum(each == "up" for each in sure)
        words += f"; {beyond} gains are beyond their 95 % interval"
    elif sure == ["level"]:
        words += ", which is within its 95 % interval"
    return f"{words}. An anchor is a merge before its repair."


def _paired_grid(rows: Sequence[PairedRow]) -> Table:
    return Table(
        number_columns(*headings(rows)),
        [_with_intervals(row) for row in with_mean(rows)],
    )


def _with_intervals(row: PairedRow) -> tuple[str, ...]:
    name, anchor, repaired, gain, *gaps = cells(row)
    if row.noise is None:
        return name, anchor, repaired, gain, *gaps
    errors = row.noise.anchor, row.noise.repaired, row.noise.gain
    pairs = zip((anchor, repaired, gain), errors, strict=True)
    return name, *(between(*pair) for pair in pairs), *gaps


def _overview(rows: Sequence[PairedRow]) -> Figure | None:
    paired = [row for row in rows if row.repaired is not None]
    return overview(paired) if len(paired) > 1 else None


def _view(run: PageRun, kinds: Mapping[str, str]) -> RunView:
    row = _row(run)
    gain = row.gain if row else None
    return RunView(
        name=run.name,
        tags=_tags(run),
        headline=_headline(row, run),
        notices=_notices(run, row),
        sections=sections(drawn(run.plan), run.scores, kinds),
        calibration=score_grid(run.calibration),
        ingredients=_ingredients(run.recipe),
        costs=_costs(run.provenance),
        files=_files(run.provenance),
        recipe=run.recipe.strip(),
        again=run.again,
        gain=points(gain) if gain is not None else "",
        mood=direction(gain, row.noise.gain if row and row.noise else None),
    )


def _tags(run: PageRun) -> list[tuple[str, str]]:
    repair: list[tuple[str, object]] = []
    if run.repair:
        scale = f"{run.repair.scale} of what an expert learnt at a claimed coordinate"
        repair = [("variant", run.repair.variant), ("scale λ: added is", scale)]
    seed = [("seed", run.plan.seed)] if run.plan else []
    return [(label, str(value)) for label, value in (*repair, *seed)]


def _headline(row: PairedRow | None, run: PageRun) -> list[tuple[str, str, str]]:
    """The main numbers of a run."""
    facts = []
    if row:
        name, noise = f"Macro-{row.domains}", row.noise
        items = f" on {noise.items:,} items" if noise else ""
        mean = f"mean of {row.domains} domains{items}, in percent"
        first = between(percent(row.anchor), noise.anchor if noise else None)
        if row.repaired is None:
            facts.append((name, first, f"the merge: {mean}"))
        else:
            after = between(percent(row.repaired), noise.repaired if noise else None)
            facts.append((name, after, f"{mean}; anchor, before the repair: {first}"))
            gain = between(points(row.gain), noise.gain if noise else None)
            facts.append(("Gain", gain, "points" + ("; ± is a 95 % interval" if noise else "")))
        if row.gap_after is not None:
            beside = f"behind the strongest experts; was {percent(row.gap_before)}"
            facts.append(("Residual gap", percent(row.gap_after), beside))
    plan = run.repair
    if plan and plan.claimed and plan.coordinates:
        part = sum(map(sum, plan.claimed)) / sum(plan.coordinates)
        beside = "of the layers' coordinates, each for one domain alone"
        facts.append(("Claimed", f"{percent(part)} %", beside))
    facts += _time(run)
    return facts


def _time(run: PageRun) -> list[tuple[str, str, str]]:
    """The whole run's time where it is known, else that of the last step; and memory."""
    if run.provenance is None:
        return [] if run.seconds is None else [("Time", _duration(run.seconds), "the whole run")]
    memory = f"{_bytes(run.provenance.peak_memory_bytes)} peak memory"
    step = _duration(run.provenance.wall_seconds)
    if run.seconds is None:
        return [("Time", step, memory)]
    return [("Time", _duration(run.seconds), f"the whole run; {step} for its last step, {memory}")]


def _notices(run: PageRun, row: PairedRow | None) -> list[Notice]:
    notices = []
    if row and row.gain is not None and row.gain < 0:
        notices.append(
            Notice(
                "loud",
                f"The repair hurt this anchor. Macro-{row.domains} on the evaluation split went "
                f"from {percent(row.anchor)} to {percent(row.repaired)} ({points(row.gain)} "
                "points). Use the anchor as it is, or try another scale or variant.",
            )
        )
    said = [*run.warnings, *(run.plan.warnings if run.plan else ())]
    notices += [Notice("warning", str(text)) for text in dict.fromkeys(said)]
    share = run.repair.share if run.repair else None
    if share and not any(share.values()):
        notices.append(Notice("note", "No domain has a deficit: the anchor is returned unchanged."))
    return notices


def _ingredients(recipe: str) -> Table | None:
    """The models and the parameters of the recipe."""
    try:
        content = parse_yaml(recipe, "the recipe").value
    except SigmergeError:
        return None
    if not isinstance(content, dict):
        return None
    rows: list[tuple[str, str, str]] = []
    if content.get("merge_method"):
        settings = _settings(content.get("parameters"))
        rows.append(("method", str(content["merge_method"]), settings))
    for key, label in (("base_model", "reference"), ("anchor", "anchor")):
        if content.get(key):
            rows.append((label, str(content[key]), ""))
    for model in content.get("models") or ():
        if isinstance(model, dict):
            name = str(model.get("name") or "expert")
            rows.append((name, str(model.get("model")), _settings(model.get("parameters"))))
    if content.get("repair"):
        rows.append(("repair", "yes", _settings(content["repair"])))
    return Table(text_columns("what", "from", "settings"), rows) if rows else None


def _settings(values: object) -> str:
    if not isinstance(values, dict):
        return ""
    return ", ".join(f"{key} {_setting(value)}" for key, value in values.items())


def _setting(value: object) -> str:
    """A value as a reader writes it: no braces, brackets or quotes of Python."""
    if isinstance(value, dict):
        return f"({_settings(value)})"
    if isinstance(value, list):
        return " ".join(_setting(each) for each in value)
    return (
        {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )


def _costs(provenance: Provenance | None) -> list[tuple[str, str]]:
    """Time, memory, traffic and versions; anything else that is short is shown as it is."""
    facts: list[tuple[str, str]] = []
    for key, value in (provenance.as_json() if provenance else {}).items():
        label = key.replace("_", " ")
        if key in ("schema", "outputs"):  # the files have a table of their own
            continue
        if isinstance(value, Mapping):
            facts += [(str(name), str(version)) for name, version in value.items()]
        elif key.endswith("_seconds"):
            facts.append((label.replace("seconds", "time"), _duration(value)))
        elif "bytes" in label.split():
            facts.append((label.removesuffix(" bytes"), _bytes(value)))
        elif isinstance(value, str | int | float):
            facts.append((label, str(value)))
    return facts


def _files(provenance: Provenance | None) -> Table | None:
    if provenance is None or not provenance.inputs:
        return None
    rows = [(f.member, f.file, _bytes(f.size), _begins(f.sha256)) for f in provenance.inputs]
    rows += [("result", name, "", _begins(digest)) for name, digest in provenance.outputs.items()]
    return Table(text_columns("what", "file", "size", "digest (begins)"), rows)


def _begins(digest: str) -> str:
    kind, _, digits = digest.rpartition(":")
    return f"{kind or 'sha256'} {digits[:12]}"


def _bytes(count: float) -> str:
    return f"{count / 1e6:,.3g} MB" if count < 1e8 else f"{count / 1e6:,.0f} MB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
