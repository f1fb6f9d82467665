"""The paired table: each anchor beside its repaired merge.

Scores are fractions in files and percent in print. Macro-5 is the unweighted mean of the domain
scores; the residual gap is the mean over domains of how far a merge stays behind the strongest
expert of the pool, g_d = max(0, Q_d(strongest) − Q_d(merge)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from sigmerge.errors import ScoreError
from sigmerge.method.deficit import DomainScores, residual_gaps
from sigmerge.pages.table import Table, number_columns, percent, points
from sigmerge.records import PairedScores


@dataclass(frozen=True)
class MacroNoise:
    """The number of items behind a row, and its standard errors; None where unknown."""

    items: int
    anchor: float | None
    repaired: float | None
    gain: float | None


@dataclass(frozen=True)
class PairedRow:
    """One anchor and its repair, as fractions; None where nothing was measured."""

    name: str
    domains: int
    anchor: float
    repaired: float | None = None
    gap_before: float | None = None
    gap_after: float | None = None
    noise: MacroNoise | None = None

    @property
    def gain(self) -> float | None:
        return None if self.repaired is None else self.repaired - self.anchor


def macro(scores: DomainScores) -> float:
    """Macro-5: the unweighted mean over domains."""
    return fmean(scores.values())


def mean_gap(experts: Mapping[str, DomainScores], scores: DomainScores) -> float:
    """Mean over domains of the residual expert gap g_d (Eq. 6) to the strongest expert."""
    gaps = residual_gaps(experts, scores)
    if unknown := [domain for domain in scores if domain not in gaps]:
        raise ScoreError(f"No expert has a score for the domain {', '.join(unknown)}.")
    return fmean(gaps.values())


def paired_row(name: str, scores: PairedScores) -> PairedRow:
    """The row of one anchor. The repaired merge and the experts may be missing."""
    anchor, repaired, experts = scores.anchor, scores.repaired, scores.experts
    if not anchor:
        raise ScoreError(f"The anchor {name} has no scores.")
    if repaired and set(repaired) != set(anchor):
        differing = ", ".join(sorted(set(repaired) ^ set(anchor)))
        raise ScoreError(f"{name}: anchor and repaired merge are not scored alike: {differing}.")
    return PairedRow(
        name,
        domains=len(anchor),
        anchor=macro(anchor),
        repaired=macro(repaired) if repaired else None,
        gap_before=mean_gap(experts, anchor) if experts else None,
        gap_after=mean_gap(experts, repaired) if experts and repaired else None,
        noise=_macro_noise(scores),
    )


def _macro_noise(scores: PairedScores) -> MacroNoise | None:
    noise = scores.noise
    if noise is None:
        return None

    def error(domains: DomainScores) -> float | None:
        if set(domains) != set(scores.anchor):
            return None
        return math.sqrt(sum(e * e for e in domains.values())) / len(domains)

    both = error(noise.anchor), error(noise.repaired), error(noise.gain)
    return MacroNoise(sum(noise.items.values()), *both)


def mean_row(rows: Sequence[PairedRow], name: str = "mean") -> PairedRow:
    """The mean over anchors; a column with a hole has no mean."""

    def mean(column: Sequence[float | None]) -> float | None:
        known = [value for value in column if value is not None]
        return fmean(known) if known and len(known) == len(column) else None

    return PairedRow(
        name,
        domains=rows[0].domains,
        anchor=fmean(row.anchor for row in rows),
        repaired=mean([row.repaired for row in rows]),
        gap_before=mean([row.gap_before for row in rows]),
        gap_after=mean([row.gap_after for row in rows]),
    )


def margin(error: float | None) -> float | None:
    """Half of a 95 % interval around a score with this standard error."""
    return None if error is None else 1.96 * error


def between(printed: str, error: float | None) -> str:
    """A printed number with half of its 95 % interval, in points, where that is known."""
    return printed if error is None else f"{printed} ± {100 * 1.96 * error:.1f}"


def direction(gain: float | None, error: float | None = None) -> str:
    """Direction of a gain: "up", "down", or "level" within its 95 % interval."""
    if not gain or abs(gain) <= (margin(error) or 0.0):
        return "level"
    return "up" if gain > 0 else "down"


def headings(rows: Sequence[PairedRow]) -> tuple[str, ...]:
    sizes = {row.domains for row in rows}
    score = f"Macro-{sizes.pop()}" if len(sizes) == 1 else "Macro"
    return ("anchor", score, "+ repair", "gain", "residual gap", "after repair")


def cells(row: PairedRow) -> tuple[str, ...]:
    """A row as printed: percent and percent points with two decimals."""
    return (
        row.name,
        percent(row.anchor),
        percent(row.repaired),
        points(row.gain),
        percent(row.gap_before),
        percent(row.gap_after),
    )


def with_mean(rows: Iterable[PairedRow]) -> list[PairedRow]:
    """The rows and, below several, their mean."""
    listed = list(rows)
    return [*listed, mean_row(listed)] if len(listed) > 1 else listed


def paired_table(rows: Sequence[PairedRow]) -> Table:
    return Table(number_columns(*headings(rows)), [cells(row) for row in with_mean(rows)])


def plain(rows: Sequence[PairedRow]) -> list[str]:
    """The paired table for the terminal, line by line; a rule sets the mean apart."""
    head, rule, *shown = paired_table(rows).lines()
    mean = [rule, *shown[len(rows) :]] if shown[len(rows) :] else []
    return [head, rule, *shown[: len(rows)], *mean]
