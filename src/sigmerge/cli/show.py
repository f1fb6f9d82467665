"""What the command line prints: results as lines of text, and a progress bar."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

import click

from sigmerge.cli.signals import resumable
from sigmerge.messages import counted, duration, printable, size

if TYPE_CHECKING:
    from sigmerge.jobs.steps import (
        AnchorsStep,
        CaptureStep,
        Description,
        DownloadStep,
        EvaluateStep,
        GuideStep,
        MergeStep,
        ProfileStep,
        PushStep,
        RepairStep,
        ScoreStep,
        SearchStep,
        Step,
        SuiteStep,
        TuneStep,
    )

_LOG = logging.getLogger("sigmerge")


def set_verbosity(verbose: bool) -> None:
    """Whether the package's debug messages are printed too, and where an error happened."""
    _LOG.setLevel(logging.DEBUG if verbose else logging.INFO)


def is_verbose() -> bool:
    return _LOG.level == logging.DEBUG


def operator_row(chosen: Any) -> dict[str, Any]:
    parameters = [
        {
            "name": p.name,
            "values": list(p.kind) if isinstance(p.kind, tuple) else p.kind.__name__,
            "per_model": p.per_model,
            "default": p.mergekit,
            "default_paper": p.paper,
            "doc": p.doc,
        }
        for p in chosen.parameters
    ]
    return {
        "name": chosen.name,
        "title": chosen.title,
        "paper": chosen.paper,
        "needs": chosen.needs,
        "parameters": parameters,
    }


def operator_lines(listing: dict[str, Any]) -> Iterator[str]:
    for row in listing["operators"]:
        yield f"{row['name']}  {row['title']}"
        yield f"    {row['paper']}"
        if row["needs"]:
            yield f"    needs exemplars of every expert, to capture {row['needs']}"
        for p in row["parameters"]:
            values = "|".join(p["values"]) if isinstance(p["values"], list) else p["values"]
            default = f"default {spelled(p['default'])}"
            if p["default_paper"] != p["default"]:
                default += f", preset: paper {spelled(p['default_paper'])}"
            where = "per model; " if p["per_model"] else ""
            yield f"    {p['name']} ({values}; {where}{default}): {p['doc']}"
        yield ""


def spelled(value: Any) -> str:
    """A value as text, without Python's brackets and quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping) and list(value) == ["by tensor"]:
        return "by tensor " + " | ".join(map(spelled, value["by tensor"]))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {spelled(each)}" for name, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(spelled, value)) or "none"
    if isinstance(value, float) and len(f"{value}") > 8:  # a point of a gradient
        return f"{value:.4g}"
    return "none" if value is None else f"{value}"


def description_lines(description: Description) -> Iterator[str]:
    """A dry run: every step with its facts, then the sums."""
    for step in description.steps:
        yield from STEP_PRINTERS.get(step.name, _plain_step)(step)
        yield from (f"  note: {note}" for note in step.notes)
    yield f"reads   {size(description.bytes_to_read)}"
    yield f"writes  {size(description.bytes_to_write)}"
    peak = size(description.peak_memory_bytes)
    yield f"memory  at most {peak} with {counted(description.threads, 'thread')}"
    if description.seconds is not None:
        from sigmerge.engine.speed import DISK

        moved = (description.bytes_to_read + description.bytes_to_write) / DISK
        scored = ", without the scoring" if description.evaluation_calls else ""
        yield (
            f"time    about {duration(description.seconds)} with the inputs in memory, "
            f"{duration(moved)} at least from a disk of {DISK / 1e9:g} GB/s (docs/scale.md){scored}"
        )
    if description.evaluation_calls:
        yield f"scoring {counted(description.evaluation_calls, 'evaluation call')}"


def _merge_step(step: MergeStep) -> Iterator[str]:
    yield (
        f"merge: {step.operator} of {counted(len(step.experts), 'expert')}, "
        f"{counted(step.layers, 'layer')}, "
        f"{step.coordinates:,} coordinates in {step.merged_tensors} tensors"
    )
    yield f"  reads {size(step.bytes_to_read)} per pass"
    yield f"  writes {size(step.bytes_to_write)} in {counted(len(step.files), 'file')}"
    for name, count in step.exemplars.items():
        state = "to do" if name in step.to_capture else "there already"
        yield f"  capture {name}: {count} exemplars, {state}"
    for name, value in step.settings.items():
        yield f"  {name}: {spelled(value)}"


def _repair_step(step: RepairStep) -> Iterator[str]:
    yield (
        f"repair: {counted(len(step.experts), 'expert')}, {counted(step.layers, 'layer')}, "
        f"{step.coordinates:,} coordinates may be claimed; reads {size(step.bytes_to_read)}, "
        f"writes {size(step.bytes_to_write)}"
    )


def _profile_step(step: ProfileStep) -> Iterator[str]:
    prompts = step.probe_prompts
    probe = f"{prompts} probe prompts" if prompts else "no probe prompts"
    yield (
        f"profile: {counted(step.layers, 'layer')}, {probe}; "
        f"reads {size(step.bytes_to_read)} unless it was measured before"
    )


def _score_step(step: ScoreStep) -> Iterator[str]:
    if step.source == "file":
        yield "score: scores are in a file"
    else:
        yield (
            f"score: {counted(step.checkpoints, 'checkpoint')} on the {step.split} split "
            f"by {step.source}; those scored before are not scored again"
        )


def _search_step(step: SearchStep) -> Iterator[str]:
    yield f"search: {step.operator}, {step.genes} genes of {len(step.experts)} experts"
    yield (
        f"  {step.evaluation_calls} calls = {step.population} × {step.generations}, "
        f"{sum(step.items_per_call.values())} items each, estimator {step.estimator}"
    )
    yield (
        f"  before them {step.ability_runs} respondents answer all "
        f"{sum(step.labelled_items.values())} labelled items"
    )
    yield f"  reads {size(step.bytes_to_read)} per candidate"
    yield (
        f"  {step.candidates_in_flight} candidates at a time, "
        f"{size(step.memory_per_candidate_bytes)} of weights each"
    )


def _tune_step(step: TuneStep) -> Iterator[str]:
    yield f"tune: {', '.join(step.anchors)} of {len(step.experts)} experts"
    if step.to_capture:
        yield f"  captured first: {', '.join(step.to_capture)}"
    yield from _called(step, f", method {step.method}")


def _guide_step(step: GuideStep) -> Iterator[str]:
    yield f"guide: the weights of {step.operator}, {len(step.experts)} experts"
    yield from _called(step, "")


def _called(step: TuneStep | GuideStep, how: str) -> Iterator[str]:
    """The evaluation calls of a step that aims at an objective."""
    items = sum(step.items_per_call.values())
    each = f", {items} items each" if items else ""
    yield f"  at most {step.evaluation_calls} calls{each}{how}"
    kept = [f"{d} not below {f:g} of its expert" for d, f in step.floors.items()]
    yield "  " + "; ".join([f"objective: {step.objective}", *kept])
    yield f"  before them the {step.expert_runs} experts are scored"


def _capture_step(step: CaptureStep) -> Iterator[str]:
    where = f": {step.folder}" if step.folder else ""
    yield f"{step.expert}: {step.exemplars} exemplars, {step.state}{where}"
    if step.peak_memory_bytes:
        yield f"    memory at most {size(step.peak_memory_bytes)}"


def _suite_step(step: SuiteStep) -> Iterator[str]:
    scored = step.evaluations
    yield (
        f"{step.pool}: {step.runs} runs: {step.experts} experts, {step.anchors} "
        f"anchors, {step.repairs} repairs, {step.partitions} partitions, "
        f"{step.baselines} baselines"
    )
    yield (
        f"  {step.merges} merges, {scored['calibration']} + {scored['evaluation']} "
        f"evaluations on calibration and evaluation items, {step.search_calls} search calls"
    )
    for name, count in (("items", step.items_at_most), ("tokens", step.tokens_at_most)):
        yield f"  {name} to score: " + (f"at most {count:,}" if count else "not known")
    yield f"  {size(step.disk_at_once)} of disk at once; checkpoints are deleted when scored"


def _anchors_step(step: AnchorsStep) -> Iterator[str]:
    yield f"{step.pool}: anchors {', '.join(step.anchors)}"
    count = step.items_at_most
    items = f", at most {count:,} items in all" if count else ""
    yield f"  {step.experts} experts and every anchor are scored{items}"
    yield f"  {size(step.disk_at_once)} of disk at once; anchors are deleted when scored"


def _evaluate_step(step: EvaluateStep) -> Iterator[str]:
    yield f"evaluate: {step.checkpoint} on the {step.split} split of {step.suite}"
    yield f"  items: {spelled(step.items)}"
    tokens = step.tokens_at_most
    yield f"  to score: {step.items_to_score:,} items" + (
        f", at most {tokens:,} tokens" if tokens else ""
    )
    yield from (f"  left out: {reason}" for reason in step.absent.values())


def _plain_step(step: Step) -> Iterator[str]:
    yield f"{step.name}: {spelled(step.facts())}"


def _download_step(step: DownloadStep) -> Iterator[str]:
    yield f"download: {size(sum(step.models.values()))} of weights, into the hub's cache"
    for name, needed in step.models.items():
        parts = ", single tensors by range among them" if name in step.ranges else ""
        yield f"  {name}: {size(needed)}{parts}"
    if step.unread:
        yield f"  {size(step.unread)} of their weights are not needed"


def _push_step(step: PushStep) -> Iterator[str]:
    kind = "private" if step.private else "public"
    how = "a new commit" if step.exists else f"a new {kind} model"
    yield f"push: {step.folder}, verified, to {step.address} ({how})"


STEP_PRINTERS: dict[str, Callable[[Any], Iterator[str]]] = {
    "merge": _merge_step,
    "repair": _repair_step,
    "profile": _profile_step,
    "score": _score_step,
    "search": _search_step,
    "tune": _tune_step,
    "guide": _guide_step,
    "capture": _capture_step,
    "suite": _suite_step,
    "evaluate": _evaluate_step,
    "anchors": _anchors_step,
    "download": _download_step,
    "push": _push_step,
}


def merged_lines(result: Any) -> Iterator[str]:
    """A merge or a repair."""
    provenance, plan = result.provenance, result.plan
    yield (
        f"{result.out}: {size(provenance.bytes_written)} written in "
        f"{provenance.wall_seconds:.1f} s, peak memory {size(provenance.peak_memory_bytes)}"
    )
    if provenance.blocks_resumed:
        yield f"continued an interrupted run: {len(provenance.blocks_resumed)} blocks were there"
    for domain in getattr(plan, "order", ()):
        claimed = sum(row[plan.domains.index(domain)] for row in plan.claimed)
        measured = plan.deficit.get(domain)  # a recipe that gives shares has no scores
        lost = "" if measured is None else f"deficit {100 * measured:.2f} points, "
        yield f"  {domain}: {lost}share {plan.share[domain]:.3f}, {claimed:,} coordinates"
    yield from guard_lines(getattr(plan, "guard", None))
    yield from (f"warning: {text}" for text in plan.warnings)


def tokens_lines(result: Any) -> Iterator[str]:
    """A model with another tokenizer, and how it reads a text."""
    yield from merged_lines(result)
    for name, read in result.text.items():
        yield (
            f"{name}: {read.bits_per_byte:.3f} bits per byte, perplexity {read.perplexity:.2f} "
            f"({read.tokens} tokens)"
        )


def guard_lines(guard: Any) -> Iterator[str]:
    if guard is not None and guard.after is not None:
        yield (
            f"calibration mean: {100 * guard.before:.2f} before, {100 * guard.after:.2f} "
            f"after the repair ({guard.verdict})"
        )


def capture_lines(captures: Any) -> Iterator[str]:
    for row in captures:
        yield f"{row.expert}: {row.exemplars} exemplars, {row.state}: {row.folder}"


def profile_lines(result: Any) -> Iterator[str]:
    names = list(result.views)
    yield "  ".join(["layer", *(f"{name:>14}" for name in names), "conflict", "capacity"])
    for i, (score, capacity) in enumerate(zip(result.conflict, result.capacity, strict=True)):
        views = [f"{result.views[name][i]:14.6f}" for name in names]
        yield "  ".join([f"{i:5d}", *views, f"{score:8.4f}", f"{capacity:8.4f}"])
    yield from (f"warning: {text}" for text in result.warnings)


def deficit_lines(result: Any) -> Iterator[str]:
    yield f"{'domain':16}  strongest  anchor  deficit  share"
    for domain in result.domains:
        best = max(scores.get(domain, 0.0) for scores in result.experts.values())
        yield (
            f"{domain:16}  {100 * best:9.2f}  {100 * result.anchor[domain]:6.2f}  "
            f"{100 * result.deficit[domain]:7.2f}  {result.share[domain]:.3f}"
        )
    for domain, names in result.missing.items():
        yield f"warning: {domain}: scored without {', '.join(names)}"


def run_lines(result: Any) -> Iterator[str]:
    scores, split = result.evaluation, "evaluation"
    if scores is None:
        scores, split = result.calibration, "calibration"
    yield f"{'domain':16}  anchor  repaired   gain   ({split} split)"
    repaired = scores.repaired or {}
    for domain, before in scores.anchor.items():
        line = f"{domain:16}  {100 * before:6.2f}"
        if domain in repaired:
            gain = repaired[domain] - before
            line += f"  {100 * repaired[domain]:8.2f}  {100 * gain:+6.2f}"
        yield line
    yield from guard_lines(result.guard)
    yield from (f"warning: {text}" for text in result.warnings)
    yield f"page: {result.out}/report.html"


def table_lines(rows: Any) -> Iterator[str]:
    from sigmerge.pages.paired import PairedRow, plain

    yield "Macro-5 on evaluation items of the embedded pool, on which its experts were trained"
    yield from plain(
        [
            PairedRow(r.name, r.domains, r.anchor, r.repaired, r.gap_before, r.gap_after)
            for r in rows
        ]
    )


def search_lines(result: Any) -> Iterator[str]:
    found, unseen = result.best, result.test
    yield f"{'domain':16}  estimate  unseen items"
    for domain, estimate in found.estimates.items():
        shown = f"{100 * unseen[domain]:12.2f}" if domain in unseen else ""
        yield f"{domain:16}  {100 * estimate:8.2f}  {shown}".rstrip()
    for name, settings in found.settings.items():
        yield f"  {name}: " + ", ".join(f"{k} {v:.4f}" for k, v in settings.items())
    yield (
        f"candidate {found.candidate} of {result.evaluation_calls} calls "
        f"({result.replayed} replayed), {result.ability_runs} ability runs, "
        f"{result.wall_seconds:.1f} s"
    )
    yield f"winner: {result.winner}"


LEFT_OUT = "the winner gives it the weight 0, so nothing of its model is in the result"


def tune_lines(result: Any) -> Iterator[str]:
    scores, split = result.evaluation, "evaluation"
    if scores is None:
        scores, split = result.calibration, "calibration"
    weights = result.best.weights
    yield from (f"{one} is left out: {LEFT_OUT}" for one, w in weights.items() if not w)
    yield f"{'domain':16}   plain   tuned    gain   weight   ({split} items)"
    rows = [(d, before, scores.tuned[d]) for d, before in scores.plain.items()]
    mean = ("mean", *(sum(r[i] for r in rows) / len(rows) for i in (1, 2)))
    for name, before, after in [*rows, mean]:
        line = f"{name:16}  {100 * before:6.2f}  {100 * after:6.2f}  {100 * (after - before):+6.2f}"
        yield f"{line}   {weights[name]:6.3f}" if name in weights else line
    if scores.gain is not None:
        low, high = 100 * scores.gain.low, 100 * scores.gain.high
        yield (
            f"gain {100 * scores.gain.difference:+.2f}, 95 % interval {low:+.2f} to {high:+.2f} "
            f"({scores.gain.items} items, {scores.gain.resamples:,} paired resamples)"
        )
    best = result.best
    aim, reached = result.amount(best.value)
    yield f"{best.anchor}: " + ", ".join(f"{d} {w:.3f}" for d, w in best.weights.items())
    yield f"repair: {_tuned_repair(result)}"
    yield (
        f"call {best.call + 1} of {len(result.calls)} ({result.replayed} replayed), calibration "
        f"{aim} {100 * reached:.2f}; {result.stopped}"
    )
    yield from (f"warning: {text}" for text in result.warnings)
    yield f"winner: {result.winner}"
    yield f"page: {result.out}/report.html"


def _tuned_repair(result: Any) -> str:
    """The winner's repair, and what the best one brought, taken or not."""
    repair, found = result.best.repair, result.repaired
    if found is None:
        return "none was tried"
    told = "none is taken; the best of them"
    if repair is not None:
        capacity = sum(repair.capacity) / len(repair.capacity)
        shares = ", ".join(f"{d} {share:.3f}" for d, share in repair.shares.items())
        told = f"{repair.update} {repair.scale:g}, mean capacity {capacity:.3f}, shares {shares};"
    gain = sum(found.tuned[d] - q for d, q in found.plain.items()) / len(found.plain)
    told += f" {100 * gain:+.2f} beside the best without one"
    if found.gain is None:
        return told
    low, high = 100 * found.gain.low, 100 * found.gain.high
    return f"{told}, 95 % interval {low:+.2f} to {high:+.2f} (calibration items)"


def report_lines(reports: Any) -> Iterator[str]:
    for report in reports:
        verdict = "as it should be" if report.ok else counted(len(report.findings), "problem")
        checked = (f"{c} ({e})" if (e := report.extent.get(c)) else c for c in report.checked)
        yield f"{report.folder}: {verdict}; checked {', '.join(checked)}"
        yield from (f"  not checked: {check}: {why}" for check, why in report.skipped.items())
        yield from (f"  problem: {finding}" for finding in report.findings)
        yield from (f"  warning: {text}" for text in report.warnings)


def demo_lines(done: Any) -> Iterator[str]:
    yield from table_lines(done.rows)
    if done.tuned is not None:
        tuned = f"{100 * done.tuned.tuned:.2f} ({done.tuned.page})"
        yield f"tuned with {done.tuned.calls} evaluation calls: {tuned}"
    yield f"page: {done.page}"


def do(job: Any, dry_run: bool = False, goes_on: bool = False) -> Any:
    """What a job did, or with `dry_run` what it would do.

    `goes_on` says that the same command continues a job that was interrupted.
    """
    if dry_run:
        return job.describe()
    resumable(goes_on)
    done = job.run()
    resumable(False)
    return done


def emit(content: Any, as_json: bool, lines: Callable[[Any], Iterator[str]]) -> None:
    """Print a result, or the description of a dry run."""
    if as_json:
        click.echo(json.dumps(plain(content), indent=2))
        return
    chosen = description_lines if hasattr(content, "steps") else lines
    click.echo(printable("\n".join(chosen(content)).rstrip()))


def plain(content: Any) -> Any:
    """A result in values that JSON has."""
    if hasattr(content, "as_json"):
        return content.as_json()
    if isinstance(content, tuple | list):
        return [plain(each) for each in content]
    if is_dataclass(content) and not isinstance(content, type):
        return json.loads(json.dumps(asdict(content), default=str))
    return content


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar unless the output is JSON."""
    from sigmerge.progress import shown

    with shown((lambda stage, done, total: None) if quiet else None) as update:
        yield update
