"""What the command line prints of splits and evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from sigmerge.results import Aggregated


def split_lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'benchmark':16} {'records':>8} {'calibration':>11} {'evaluation':>10} {'drawn':>5}"
    for name, row in [*result["benchmarks"].items(), ("total", result["totals"])]:
        counts = f"{row['records']:8,} {row['calibration']:11,} {row['evaluation']:10,}"
        part = "" if row.get("complete", True) else "  not the complete benchmark"
        yield f"{name:16} {counts} {row['drawn']:5}{part}"
    yield from (f"left out: {reason}" for reason in result["absent"].values())
    yield f"{result['file']}: {result['sha256']}"


def estimate_line(estimate: Mapping[str, Any]) -> str:
    text = f"{estimate['items_to_score']:,} of {estimate['items']:,} items to score"
    if estimate["tokens_at_most"]:
        text += f", at most {estimate['tokens_at_most']:,} tokens"
    if estimate["seconds"]:
        low, high = map(_duration, estimate["seconds"])
        text += f"; by a few of them roughly {low}"
        text += f" to {high}, as long as the answers are" if high != low else ""
    return text


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"


def evaluation_lines(result: Mapping[str, Any], answers: Path | None = None) -> Iterator[str]:
    for name, metrics in result["benchmarks"].items():
        numbers = "  ".join(f"{metric} {100 * value:.2f}" for metric, value in metrics.items())
        items, unparsed = result["items"][name], result["unparsed"].get(name)
        note = "" if unparsed is None else f"  unparsed: {unparsed:,} of {items:,}"
        yield f"{name:16} {items:6,} items  {numbers}{note}"
    yield ""
    for domain, score in [*result["domains"].items(), ("macro", result["macro"])]:
        yield f"{domain:16} {100 * score:6.2f}"
    if missing := [name for names in result["missing"].values() for name in names]:
        yield f"without: {', '.join(missing)}"
    if result["judges"]:
        yield f"judged by: {', '.join(result['judges'])}"
    if result["sandbox"]:
        yield f"programs ran in: {result['sandbox']}"
    yield from (f"left out: {reason}" for reason in result["absent"].values())
    used = result["usage_of_run"]
    yield (
        f"{used['calls']:,} calls, {used['prompt_tokens']:,} tokens read, "
        f"{used['generated_tokens']:,} generated in {used['seconds']:.1f} s; "
        f"{result['reused_items']:,} items were scored before"
    )
    yield f"answers: {answers or 'pass --answers FILE to read what the model said'}"


def aggregate_lines(result: Aggregated) -> Iterator[str]:
    for row in result.rows:
        yield f"{row.file}  ({row.suite}, {row.split})"
        for domain, score in row.domains.items():
            gap = row.residual_gaps.get(domain)
            lacking = "" if gap is None else f"  gap {100 * gap:6.2f}"
            yield f"  {domain:16} {100 * score:6.2f}{lacking}"
        yield f"  {'macro':16} {100 * row.macro:6.2f}"
        yield from (f"    {n:32} {100 * v:6.2f}" for n, v in row.submetrics.items())
