"""The page of a tuning: the gain, and the path to it call by call."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from sigmerge.method.objective import Merit
from sigmerge.pages import html, svg
from sigmerge.pages.figures import Figure
from sigmerge.pages.table import Table, number_columns
from sigmerge.records import TuneCall, TunedRepair, TunedScores, TuneRecord


def write_tuning_page(path: Path, record: TuneRecord) -> None:
    """Write the page of a tuning."""
    path.write_text(render(record), encoding="utf-8", newline="\n")


def render(record: TuneRecord) -> str:
    best, shown = record.best, record.evaluation or record.calibration
    split = "evaluation" if record.evaluation else "calibration"
    return html.page(
        "tune.html.j2",
        title=f"Tuned merge of {len(record.experts)} experts",
        lead=(
            f"{len(record.calls)} evaluation calls over {', '.join(record.anchors)}: the best is "
            f"{best.anchor} of call {best.call + 1}"
            f"{', repaired' if best.repair else ', not repaired'}. The tuning ended because "
            f"{record.stopped}.{_left_out(record)}"
        ),
        headline=_headline(record, shown, split),
        paired=paired_grid(shown),
        facts=_facts(record),
        figures=[_scores(record), _weights(record), _steps(record)],
    )


def _left_out(record: TuneRecord) -> str:
    """A sentence about experts of which the winner takes nothing."""
    names = [name for name, weight in record.best.weights.items() if not weight]
    return f" Nothing of {' and '.join(names)} is in it: weight 0." if names else ""


def _facts(record: TuneRecord) -> list[tuple[str, str]]:
    """The winner: its recipe, where it lies, and the command that makes it again."""
    best = record.best
    weights = ", ".join(f"{name} {weight:.3f}" for name, weight in best.weights.items())
    again = f"sigmerge merge {shlex.quote(f'{record.winner}/sigmerge/recipe.yaml')} again/"
    return [
        ("winner", record.winner),
        ("recipe", f"{best.anchor} with weights {weights}; repair: {_shown(best.repair)}"),
        ("once more", again),
    ]


def _headline(record: TuneRecord, shown: TunedScores, split: str) -> list[tuple[str, str, str]]:
    before, after = fmean(shown.plain.values()), fmean(shown.tuned.values())
    gain = shown.gain
    interval = f"95 % interval {_signed(gain.low)} to {_signed(gain.high)}" if gain else ""
    return [
        ("mean score", f"{100 * after:.2f}", f"{split} items"),
        ("gain", _signed(after - before), interval),
        (
            "on calibration items",
            f"{100 * fmean(record.best.scores.values()):.2f}",
            "the items that chose it",
        ),
        ("evaluation calls", str(len(record.calls)), f"and {record.expert_runs} of the experts"),
    ]


def paired_grid(scores: TunedScores) -> Table:
    """Domain by domain, then the mean."""
    rows = [
        (d, f"{100 * q:.2f}", f"{100 * scores.tuned[d]:.2f}", _signed(scores.tuned[d] - q))
        for d, q in scores.plain.items()
    ]
    before, after = fmean(scores.plain.values()), fmean(scores.tuned.values())
    rows.append(("mean", f"{100 * before:.2f}", f"{100 * after:.2f}", _signed(after - before)))
    return Table(number_columns("domain", "plain anchor", "tuned", "gain"), rows)


def _signed(value: float) -> str:
    return f"{100 * value:+.2f}".replace("-", "−")


def _scores(record: TuneRecord) -> Figure:
    calls = record.calls
    means = [max(0.0, fmean(call.scores.values())) for call in calls]
    best = [means[i] for i in _leaders(calls)]
    tips = [
        svg.tip(
            f"Call {call.call + 1}: {call.anchor}",
            ("mean score", f"{100 * mean:.2f}"),
            *((d, f"{100 * q:.2f}") for d, q in call.scores.items()),
        )
        for call, mean in zip(calls, means, strict=True)
    ]
    cells = [
        (str(c.call + 1), c.anchor, f"{100 * mean:.2f}", f"{100 * top:.2f}", f"{100 * c.error:.2f}")
        for c, mean, top in zip(calls, means, best, strict=True)
    ]
    return Figure(
        "Score against calls",
        "The mean score of every candidate on the calibration items, and that of the best so far "
        "by objective and floors. The error is the standard error of a candidate's difference to "
        "the best call before it.",
        svg.lines(
            "Score against calls",
            [svg.Line("anchor", means), svg.Line("score", best)],
            tips,
            "evaluation call",
            first=1,
            unit=lambda value: f"{100 * value:.0f}",
        ),
        Table(number_columns("call", "anchor", "mean score", "best so far", "error"), cells),
        [("key-score", "best so far"), ("key-anchor", "candidate")],
    )


def _weights(record: TuneRecord) -> Figure:
    name = record.best.anchor
    calls = [call for call in record.calls if call.anchor == name]
    domains = list(record.experts)
    top = max((w for call in calls for w in call.weights.values()), default=1.0) or 1.0
    tips = [
        svg.tip(f"Call {c.call + 1}", *((d, f"{w:.3f}") for d, w in c.weights.items()))
        for c in calls
    ]
    series = [
        svg.Line(f"expert d{i % svg.COLOURS}", [call.weights[d] / top for call in calls])
        for i, d in enumerate(domains)
    ]
    cells = [
        (str(c.call + 1), *(f"{c.weights[d]:.3f}" for d in domains), _shown(c.repair))
        for c in calls
    ]
    return Figure(
        f"Weights of {name} over its calls",
        "Calls with a repair multiply the weights of the guided anchor by one common factor.",
        svg.lines(
            "Weights over calls",
            series,
            tips,
            f"calls of {name}, in their order",
            first=1,
            unit=lambda value: f"{top * value:.2f}",
        ),
        Table(number_columns("call", *domains, "repair"), cells),
        [(f"d{i % svg.COLOURS}", d) for i, d in enumerate(domains)],
    )


def _steps(record: TuneRecord) -> Figure:
    """The best so far after every kind of step."""
    stages = {"plain anchors": _is_plain, "guided weights": _is_guided, "repair": _is_repair}
    aim, _ = record.amount(0.0)
    floors = bool(record.settings["floors"])
    bars, rows, best = [], [], list[TuneCall]()
    for name, belongs in stages.items():
        calls = [call for call in record.calls if belongs(record, call)]
        if not calls:
            continue
        tried = [*best, *calls]
        reached = tried[_leaders(tried)[-1]]
        size = record.amount(reached.value)[1]
        brought = _signed(size - record.amount(best[0].value)[1]) if best else ""
        shown = [f"{100 * size:.2f}", *([f"{100 * reached.below:.2f}"] if floors else [])]
        tip = svg.tip(name, ("calls", str(len(calls))), (aim, shown[0]))
        bars.append(svg.Bar(name, "accent", size, shown[0], tip))
        rows.append((name, str(len(calls)), *shown, brought))
        best = [reached]
    return Figure(
        "What each step brought",
        f"The {aim} of the best candidate on the calibration items after the calls of each kind."
        f"{' A candidate within the floors is better than any below them.' if floors else ''}",
        svg.bars("What each step brought", bars),
        Table(
            number_columns("step", "calls", aim, *(["below floors"] if floors else []), "brought"),
            rows,
        ),
        opened=True,
    )


def _leaders(calls: Sequence[TuneCall]) -> list[int]:
    """The best call after each one: floors before the objective, of equals the first."""
    leaders = [0]
    for i, call in enumerate(calls[1:], start=1):
        best = calls[leaders[-1]]
        better = Merit(call.below, call.value).beats(Merit(best.below, best.value))
        leaders.append(i if better else leaders[-1])
    return leaders


def _is_plain(record: TuneRecord, call: TuneCall) -> bool:
    first = next(c.call for c in record.calls if c.anchor == call.anchor)
    return call.repair is None and call.call == first


def _is_guided(record: TuneRecord, call: TuneCall) -> bool:
    return call.repair is None and not _is_plain(record, call)


def _is_repair(record: TuneRecord, call: TuneCall) -> bool:
    return call.repair is not None


def _shown(repair: TunedRepair | None) -> str:
    if repair is None:
        return "none"
    return f"{repair.update} {repair.scale:g}, mean capacity {fmean(repair.capacity):.2f}"
