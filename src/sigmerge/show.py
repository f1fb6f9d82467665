"""What the command line prints: results as lines of text, and a progress bar."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer


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
            default = f"default {word(p['default'])}"
            if p["default_paper"] != p["default"]:
                default += f", preset: paper {word(p['default_paper'])}"
            where = "per model; " if p["per_model"] else ""
            yield f"    {p['name']} ({values}; {where}{default}): {p['doc']}"
        yield ""


def word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def plan_lines(plan: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{plan['operator']}: {len(plan['experts'])} experts, {plan['layers']} layers, "
        f"{plan['coordinates']:,} coordinates in {plan['merged_tensors']} tensors"
    )
    yield f"reads   {size(plan['bytes_to_read'])} per pass"
    yield f"writes  {size(plan['bytes_to_write'])} in {len(plan['files'])} file(s)"
    yield f"memory  at most {size(plan['peak_memory_bytes'])} with {plan['threads']} threads"
    for name, count in plan.get("exemplars", {}).items():
        state = "to do" if name in plan["to_capture"] else "there already"
        yield f"capture {name}: {count} exemplars, {state}"
    for name, value in plan["settings"].items():
        yield f"  {name}: {value}"
    yield from (f"note: {note}" for note in plan["notes"])


def repair_plan_lines(plan: dict[str, Any]) -> Iterator[str]:
    yield (
        f"repair: {len(plan['experts'])} experts, {plan['layers']} layers, "
        f"{plan['coordinates']:,} coordinates may be claimed"
    )
    yield f"reads   {size(plan['bytes_to_read'])}"
    yield f"writes  {size(plan['bytes_to_write'])}"
    yield f"memory  at most {size(plan['peak_memory_bytes'])} with {plan['threads']} threads"


def result_lines(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{result['out']}: {size(result['bytes_written'])} written in "
        f"{result['wall_seconds']:.1f} s, peak memory {size(result['peak_memory_bytes'])}"
    )
    if result["blocks_resumed"]:
        yield f"continued an interrupted run: {len(result['blocks_resumed'])} blocks were there"
    plan = result.get("plan", {})
    for domain in plan.get("order", []):
        claimed = sum(row[plan["domains"].index(domain)] for row in plan["claimed"])
        yield (
            f"  {domain}: deficit {100 * plan['deficit'][domain]:.2f} points, "
            f"share {plan['share'][domain]:.3f}, {claimed:,} coordinates"
        )
    yield from guard_lines(plan.get("guard", {}))
    yield from (f"warning: {text}" for text in plan.get("warnings", result.get("warnings", [])))


def guard_lines(guard: dict[str, Any]) -> Iterator[str]:
    if "after" in guard:
        yield (
            f"calibration mean: {100 * guard['before']:.2f} before, {100 * guard['after']:.2f} "
            f"after the repair ({guard['verdict']})"
        )


def capture_lines(result: dict[str, Any]) -> Iterator[str]:
    for row in result["captures"]:
        yield f"{row['expert']}: {row['exemplars']} exemplars, {row['state']}: {row['folder']}"
        if row["state"] == "to do":
            yield f"    memory at most {size(row['peak_memory_bytes'])}"


def profile_lines(result: dict[str, Any]) -> Iterator[str]:
    names = list(result["views"])
    yield "  ".join(["layer", *(f"{name:>14}" for name in names), "conflict", "capacity"])
    for i, (score, capacity) in enumerate(zip(result["conflict"], result["capacity"], strict=True)):
        views = [f"{result['views'][name][i]:14.6f}" for name in names]
        yield "  ".join([f"{i:5d}", *views, f"{score:8.4f}", f"{capacity:8.4f}"])
    yield from (f"warning: {text}" for text in result["warnings"])


def deficit_lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"{'domain':16}  strongest  anchor  deficit  share"
    for domain in result["domains"]:
        best = max(scores.get(domain, 0.0) for scores in result["experts"].values())
        yield (
            f"{domain:16}  {100 * best:9.2f}  {100 * result['anchor'][domain]:6.2f}  "
            f"{100 * result['deficit'][domain]:7.2f}  {result['share'][domain]:.3f}"
        )


def run_lines(result: dict[str, Any]) -> Iterator[str]:
    scores, split = result["evaluation"], "evaluation"
    if scores is None:
        scores, split = result["calibration"], "calibration"
    yield f"{'domain':16}  anchor  repaired   gain   ({split} split)"
    repaired = scores.get("repaired", {})
    for domain, before in scores["anchor"].items():
        line = f"{domain:16}  {100 * before:6.2f}"
        if domain in repaired:
            gain = repaired[domain] - before
            line += f"  {100 * repaired[domain]:8.2f}  {100 * gain:+6.2f}"
        yield line
    yield from guard_lines(result["guard"])
    yield from (f"warning: {text}" for text in result["warnings"])
    yield f"page: {result['out']}/report.html"


def print_table(rows: Any) -> None:
    from rich.console import Console

    from sigmerge.analysis.table import rich_table

    Console().print(rich_table(rows, "Macro-5 on the evaluation items of the embedded pool"))


def search_plan_lines(plan: dict[str, Any]) -> Iterator[str]:
    yield f"{plan['operator']}: {plan['genes']} genes of {len(plan['experts'])} experts"
    yield (
        f"calls   {plan['evaluation_calls']} = {plan['population']} × {plan['generations']}, "
        f"{sum(plan['items_per_call'].values())} items each, estimator {plan['estimator']}"
    )
    yield (
        f"before  {plan['ability_runs']} respondents answer all "
        f"{sum(plan['labelled_items'].values())} labelled items"
    )
    yield f"reads   {size(plan['bytes_per_candidate'])} per candidate"
    yield (
        f"memory  {size(plan['memory_of_weights_bytes'])} of weights: "
        f"{plan['candidates_in_flight']} candidates at a time, "
        f"{size(plan['memory_per_candidate_bytes'])} each, in half of what is free"
    )


def search_lines(result: dict[str, Any]) -> Iterator[str]:
    found, unseen = result["best"], result["test"]
    yield f"{'domain':16}  estimate  unseen items"
    for domain, estimate in found["estimates"].items():
        shown = f"{100 * unseen[domain]:12.2f}" if domain in unseen else ""
        yield f"{domain:16}  {100 * estimate:8.2f}  {shown}".rstrip()
    for name, settings in found["settings"].items():
        yield f"  {name}: " + ", ".join(f"{k} {v:.4f}" for k, v in settings.items())
    yield (
        f"candidate {found['candidate']} of {result['evaluation_calls']} calls "
        f"({result['replayed']} replayed), {result['ability_runs']} ability runs, "
        f"{result['wall_seconds']:.1f} s"
    )
    yield f"winner: {result['winner']}"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def emit(content: Any, as_json: bool, lines: Callable[[Any], Iterator[str]]) -> None:
    typer.echo(json.dumps(content, indent=2) if as_json else "\n".join(lines(content)).rstrip())


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar with what is done and the time left, on a terminal's standard error; else nothing."""
    if quiet or not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            amount = f"{done}/{total}" if total < 10**5 else f"{size(done)} of {size(total)}"
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, amount=amount)
            bar.update(tasks[stage], completed=done, total=total, amount=amount)

        yield update
