"""A grid in a few tables: gains per pool and anchor, and what each control keeps of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from sigmerge.experiments.grid import Cell


def gains(cells: Sequence[Cell], setting: str = "default") -> dict[tuple[str, str], float]:
    """Mean gain over seeds per (pool, anchor), in percent points."""
    found: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        if cell.setting == setting:
            found.setdefault((cell.pool, cell.anchor), []).append(100 * cell.gain)
    return {pair: fmean(values) for pair, values in found.items()}


def markdown(cells: Sequence[Cell]) -> str:
    return "\n".join([*_paired(cells), "", *_settings(cells), ""])


def _paired(cells: Sequence[Cell]) -> Iterator[str]:
    default = [cell for cell in cells if cell.setting == "default"]
    found = gains(cells)
    better = sum(gain > 0 for gain in found.values())
    yield (f"The repair improves {better} of {len(found)} pairs (pool × anchor), by "
           f"{fmean(found.values()):+.2f} points of Macro-5 on average "
           f"({min(found.values()):+.2f} to {max(found.values()):+.2f}).")  # fmt: skip
    yield ""
    yield "| pool | anchor | Macro-5 | + repair | gain | residual gap | after repair |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for cell in default:
        numbers = [100 * cell.anchor_macro, 100 * cell.macro]
        gaps = [100 * cell.gap_before, 100 * cell.gap_after]
        yield (f"| {cell.pool} | {cell.anchor} | {numbers[0]:.2f} | {numbers[1]:.2f} | "
               f"{100 * cell.gain:+.2f} | {gaps[0]:.2f} | {gaps[1]:.2f} |")  # fmt: skip


def _settings(cells: Sequence[Cell]) -> Iterator[str]:
    default = gains(cells)
    whole = fmean(default.values())
    yield "| setting | mean gain | kept of the default's mean gain | pairs improved | better than default |"  # noqa: E501
    yield "|---|--:|--:|--:|--:|"
    for setting in dict.fromkeys(cell.setting for cell in cells):
        found = gains(cells, setting)
        mean = fmean(found.values())
        kept = f"{100 * mean / whole:.0f} %" if whole > 0 else "–"
        better = sum(gain > 0 for gain in found.values())
        beats = sum(gain > default[pair] for pair, gain in found.items() if pair in default)
        yield (f"| {setting} | {mean:+.2f} | {kept} | {better} of {len(found)} | "
               f"{beats} of {len(found)} |")  # fmt: skip
