"""Charts as SVG text: no library, no script, no style of their own.

Colour and type come from the page's style sheet through classes, so that one drawing serves dark,
light and print. Every mark that stands for a number carries it in `data-tip`, which the page's
script shows on hover: a title line, then `label TAB value` lines.
All charts share one width. It is that of a phone, so that text stays readable there; wider pages
set two side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

CHART_WIDTH = 400
GUTTER = 112  # room for domain names
COLOURS = 8  # distinct domain colours in the style sheet
AXIS = 44  # room for numbers
MANY = 12  # from here on cells and dots are too small to be labelled one by one

Tip = str
AxisPosition = Callable[[float], float]  # from a value to where it is drawn


@dataclass(frozen=True)
class Line:
    kind: str  # the class that says how it is drawn
    values: Sequence[float]


@dataclass(frozen=True)
class Bar:
    label: str
    kind: str
    value: float
    printed: str
    tip: Tip


@dataclass(frozen=True)
class BeforeAfter:
    """Before and after on one scale, with the mark to reach."""

    label: str
    kind: str
    before: float
    after: float | None
    goal: float | None
    printed: str
    tip: Tip
    direction: str  # "up", "down" or "level"
    margin: float | None = None  # half of the interval around the last of before and after


@dataclass(frozen=True)
class Turn:
    """One of several domains that take parts of a whole in turn: taken before, and now."""

    label: str
    kind: str
    before: float
    now: float
    printed: str
    tip: Tip


@dataclass(frozen=True)
class Outline:
    """One closed line of a radar, a value and a tip per axis."""

    kind: str
    values: Sequence[float]
    tips: Sequence[Tip]


def tip(title: str, *facts: tuple[str, str]) -> Tip:
    return "\n".join([_one_line(title), *(f"{_one_line(k)}\t{_one_line(v)}" for k, v in facts)])


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element. `kind` becomes `class`, underscores become dashes, None is left out."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            key = "class" if key == "kind" else key.replace("_", "-")
            shown = f"{value:.2f}" if isinstance(value, float) else str(value)
            words.append(f'{key}="{escape(shown)}"')
    return Markup(f"<{' '.join(words)}>{''.join(children)}</{name}>")


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> Markup:
    return tag("text", escape(content), x=float(x), y=float(y), kind=kind, text_anchor=anchor)


def drawing(height: float, title: str, parts: Iterable[str]) -> Markup:
    box = f"0 0 {CHART_WIDTH} {height:.0f}"
    return tag("svg", *parts, kind="plot", viewBox=box, role="img", aria_label=title)


def lines(
    title: str,
    series: Sequence[Line],
    tips: Sequence[Tip],
    over: str = "layer",
    *,
    first: int = 0,
    unit: Callable[[float], str] = "{:.2f}".format,
) -> Markup:
    """Lines over depth, or what `over` says, on the scale 0 to 1, drawn in the given order.

    The axis below counts from `first`; `unit` writes the values of the other.
    """
    height, bottom = 230.0, 196.0
    top, count = 12.0, len(tips)
    step = (CHART_WIDTH - AXIS - 8) / count
    column = [AXIS + step * (i + 0.5) for i in range(count)]

    def row(value: float) -> float:
        return bottom - (bottom - top) * value

    parts = [
        *_scale([0.0, 0.25, 0.5, 0.75, 1.0], row, unit),
        *_depth(count, column, bottom, over, first),
    ]
    for line in series:
        at = [f"{x:.1f},{row(value):.1f}" for x, value in zip(column, line.values, strict=True)]
        parts.append(tag("polyline", points=" ".join(at), kind=f"line {line.kind}"))
    for i, words in enumerate(tips):
        dots = [
            tag("circle", cx=column[i], cy=row(line.values[i]), r=3.5, kind=f"dot {line.kind}")
            for line in series
        ]
        hit = _hit(column[i] - step / 2, top, step, bottom - top)
        parts.append(tag("g", hit, *dots, kind="band", data_tip=words))
    return drawing(height, title, parts)


def columns(
    title: str,
    stacks: Sequence[Sequence[float]],
    kinds: Sequence[str],
    tips: Sequence[Tip],
    printed: Callable[[float], str],
) -> Markup:
    """One column per layer, stacked by kind, from zero. `printed` writes the scale."""
    height, bottom, top, count = 230.0, 196.0, 12.0, len(stacks)
    ticks = nice_ticks(0.0, max(map(sum, stacks)) or 1.0)
    step = (CHART_WIDTH - AXIS - 8) / count
    column = [AXIS + step * (i + 0.5) for i in range(count)]
    wide = min(0.76 * step, 44.0)

    def row(value: float) -> float:
        return bottom - (bottom - top) * value / ticks[-1]

    parts = [*_scale(ticks, row, printed), *_depth(count, column, bottom)]
    for x, stack, words in zip(column, stacks, tips, strict=True):
        marks, base = [], 0.0
        for value, kind in zip(stack, kinds, strict=True):
            tall = row(base) - row(base + value)
            base += value
            at = {"x": x - wide / 2, "y": row(base), "width": wide, "height": tall}
            marks.append(tag("rect", **at, kind=f"fill {kind}"))
        hit = _hit(x - step / 2, top, step, bottom - top)
        parts.append(tag("g", hit, *marks, kind="band", data_tip=words))
    return drawing(height, title, parts)


def heat(
    title: str,
    values: Sequence[Sequence[float]],
    labels: Sequence[tuple[str, str]],
    tips: Sequence[Sequence[Tip]],
    printed: Sequence[Sequence[str]],
) -> Markup:
    """Layers × domains, depth from left to right; `labels` are (name, kind) of each domain.

    The darkest cell is the largest value. Numbers stand in the cells while there are few layers.
    """
    count, tall, top = len(values), 32.0, 4.0
    step = (CHART_WIDTH - GUTTER - 8) / count
    column = [GUTTER + step * (i + 0.5) for i in range(count)]
    bottom = top + tall * len(labels)
    most = max((value for row in values for value in row), default=0.0) or 1.0
    parts = []
    for d, (name, kind) in enumerate(labels):
        parts += _name(name, kind, top + tall * (d + 0.5))
        for i in range(count):
            strength = values[i][d] / most
            at = {"x": column[i] - step / 2 + 0.5, "y": top + tall * d + 0.5}
            size = {"width": step - 1, "height": tall - 1, "rx": min(2.0, step / 10)}
            cell = [
                tag("rect", **at, **size, kind="paper"),
                tag("rect", **at, **size, kind="heat", fill_opacity=0.04 + 0.96 * strength),
            ]
            if count <= MANY // 2 + 2:
                ink = "cell strong" if strength > 0.68 else "cell"
                cell.append(
                    text(column[i], top + tall * (d + 0.5) + 4, printed[i][d], ink, "middle")
                )
            parts.append(tag("g", *cell, kind="tile", data_tip=tips[i][d]))
    return drawing(bottom + 38, title, [*parts, *_depth(count, column, bottom)])


def bars(title: str, rows: Sequence[Bar]) -> Markup:
    """Horizontal bars from zero with the value at their end."""
    tall, top, room = 34.0, 4.0, 64.0
    most = max((bar.value for bar in rows), default=0.0) or 1.0
    parts = []
    for i, bar in enumerate(rows):
        middle = top + tall * (i + 0.5)
        long = (CHART_WIDTH - GUTTER - room) * bar.value / most
        at = {"x": float(GUTTER), "y": middle - 9, "width": max(long, 1.0), "height": 18.0}
        band = [
            _hit(0, top + tall * i, CHART_WIDTH, tall),
            *_name(bar.label, bar.kind, middle),
            tag("rect", **at, rx=2.0, kind=f"fill {bar.kind}"),
            text(GUTTER + long + 8, middle + 4, bar.printed, "value"),
        ]
        parts.append(tag("g", *band, kind="band", data_tip=bar.tip))
    return drawing(top + tall * len(rows) + 4, title, parts)


def turns(title: str, rows: Sequence[Turn]) -> Markup:
    """A bar per turn over the whole: grey was taken before, the colour is taken now."""
    tall, top, room = 34.0, 4.0, 56.0
    scale = CHART_WIDTH - GUTTER - room - 8
    bottom = top + tall * len(rows)
    parts = []
    for i, turn in enumerate(rows):
        middle = top + tall * (i + 0.5)
        at = {"y": middle - 9, "height": 18.0}
        parts += [
            tag(
                "g",
                _hit(0, top + tall * i, CHART_WIDTH, tall),
                *_name(turn.label, turn.kind, middle),
                tag("rect", x=float(GUTTER), width=scale, **at, kind="grid"),
                tag(
                    "rect", x=float(GUTTER), width=scale * turn.before, **at,
                    kind="fill level", fill_opacity=0.3,
                ),
                tag(
                    "rect", x=GUTTER + scale * turn.before, width=scale * turn.now, **at,
                    kind=f"fill {turn.kind}",
                ),
                text(GUTTER + scale + 8, middle + 4, turn.printed, "value"),
                kind="band",
                data_tip=turn.tip,
            )
        ]  # fmt: skip
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        at_part = GUTTER + scale * part
        parts.append(text(at_part, bottom + 18, f"{100 * part:.0f}", "tick", "middle"))
    return drawing(bottom + 26, title, parts)


def pairs(title: str, rows: Sequence[BeforeAfter]) -> Markup:
    """Before (ring) and after (disc) on one scale, joined; a tick marks the goal."""
    tall, top, room = 34.0, 4.0, 56.0
    marks = [m for p in rows for m in (p.before, p.after, p.goal) if m is not None]
    marks += [
        min(max((p.before if p.after is None else p.after) + side * p.margin, 0.0), 1.0)
        for p in rows
        if p.margin is not None
        for side in (-1, 1)
    ]
    ticks = nice_ticks(min(marks), max(*marks, min(marks) + 0.05))  # whole percents stay apart
    bottom = top + tall * len(rows)
    scale = (CHART_WIDTH - GUTTER - room - 8) / (ticks[-1] - ticks[0])

    def column(value: float) -> float:
        return GUTTER + 8 + scale * (value - ticks[0])

    parts: list[str] = []
    for tick in ticks:
        at = {"x1": column(tick), "x2": column(tick), "y1": top, "y2": bottom}
        parts.append(tag("line", **at, kind="grid"))
        parts.append(text(column(tick), bottom + 18, f"{100 * tick:.0f}", "tick", "middle"))
    for i, pair in enumerate(rows):
        middle = top + tall * (i + 0.5)
        band = [
            _hit(0, top + tall * i, CHART_WIDTH, tall),
            *_name(pair.label, pair.kind, middle),
            *_dumbbell(pair, middle, column),
            text(CHART_WIDTH - 4, middle + 4, pair.printed, f"value {pair.direction}", "end"),
        ]
        parts.append(tag("g", *band, kind="band", data_tip=pair.tip))
    return drawing(bottom + 26, title, parts)


def radar(title: str, axes: Sequence[str], outlines: Sequence[Outline]) -> Markup:
    """One axis per domain from zero at the centre, one closed line per checkpoint."""
    radius, cx, cy = 112.0, CHART_WIDTH / 2, 144.0
    ticks = nice_ticks(0.0, max(value for o in outlines for value in o.values) or 1.0, most=5)
    turn = [2 * math.pi * i / len(axes) - math.pi / 2 for i in range(len(axes))]
    height = cy + radius * max(map(math.sin, turn)) + 32

    def at(axis: int, value: float) -> tuple[float, float]:
        r = radius * value / ticks[-1]
        return cx + r * math.cos(turn[axis]), cy + r * math.sin(turn[axis])

    def ring(values: Sequence[float]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*at(i, value)) for i, value in enumerate(values))

    parts: list[str] = []
    for tick in ticks[1:]:
        parts.append(tag("polygon", points=ring([tick] * len(axes)), kind="grid web"))
    for i, name in enumerate(axes):
        x, y = at(i, ticks[-1])
        parts.append(tag("line", x1=cx, y1=cy, x2=x, y2=y, kind="grid"))
        parts.append(_around(name, cx, cy, turn[i], radius + 14))
    for outline in outlines:
        parts.append(tag("polygon", points=ring(outline.values), kind=f"line {outline.kind}"))
    for tick in ticks[1:]:
        parts.append(text(cx + 4, cy - radius * tick / ticks[-1] - 3, f"{100 * tick:.0f}", "tick"))
    for outline in outlines:
        for i, (value, words) in enumerate(zip(outline.values, outline.tips, strict=True)):
            x, y = at(i, value)
            dot = tag("circle", cx=x, cy=y, r=3.5, kind=f"dot {outline.kind}")
            reach = tag("circle", cx=x, cy=y, r=9.0, kind="hit")
            parts.append(tag("g", reach, dot, kind="band", data_tip=words))
    return drawing(height, title, parts)


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers that span low to high (which is above low), at most `most` of them."""
    power = 10.0 ** math.floor(math.log10(high - low))
    for step in (power * m for m in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < most:
            break
    return [step * k for k in range(first, last + 1)]


def _one_line(words: str) -> str:
    return " ".join(words.split())


def _short(name: str, most: int = 16) -> str:
    name = _one_line(name)
    return name if len(name) <= most else name[: most - 1] + "…"


def _hit(x: float, y: float, width: float, height: float) -> Markup:
    at = {"x": float(x), "y": float(y), "width": float(width), "height": float(height)}
    return tag("rect", **at, kind="hit")


def _name(name: str, kind: str, middle: float) -> list[Markup]:
    """A domain's name in the gutter, with its colour."""
    swatch = tag("circle", cx=6.0, cy=middle, r=4.5, kind=f"fill {kind}")
    return [swatch, text(17, middle + 4, _short(name), "name")]


def _scale(
    ticks: Sequence[float], row: AxisPosition, printed: Callable[[float], str]
) -> list[Markup]:
    parts = []
    for tick in ticks:
        at = {"x1": float(AXIS), "x2": CHART_WIDTH - 8.0, "y1": row(tick), "y2": row(tick)}
        parts.append(tag("line", **at, kind="grid"))
        parts.append(text(AXIS - 8, row(tick) + 4, printed(tick), "tick", "end"))
    return parts


def _depth(
    count: int, column: Sequence[float], bottom: float, over: str = "layer", first: int = 0
) -> list[Markup]:
    """The axis all charts over depth share: layer numbers, thinned out in deep models."""
    every = next(n for n in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if count / n <= MANY)
    shown = [
        text(column[i], bottom + 16, str(first + i), "tick", "middle")
        for i in range(0, count, every)
    ]
    return [*shown, text((column[0] + column[-1]) / 2, bottom + 32, over, "tick", "middle")]


def _dumbbell(pair: BeforeAfter, middle: float, column: AxisPosition) -> list[Markup]:
    marks = []
    if pair.goal is not None:
        x = column(pair.goal)
        at = {"x1": x, "x2": x, "y1": middle - 9, "y2": middle + 9}
        marks.append(tag("line", **at, kind=f"goal {pair.kind}"))
    if pair.after is not None:
        at = {"x1": column(pair.before), "x2": column(pair.after), "y1": middle, "y2": middle}
        marks.append(tag("line", **at, kind=f"rod {pair.kind}"))
    if pair.margin is not None:
        last = pair.before if pair.after is None else pair.after
        ends = [column(min(max(last + side, 0.0), 1.0)) for side in (-pair.margin, pair.margin)]
        at = {"x1": ends[0], "x2": ends[1], "y1": middle + 9, "y2": middle + 9}
        marks.append(tag("line", **at, kind=f"whisker {pair.kind}"))
    marks.append(tag("circle", cx=column(pair.before), cy=middle, r=5.0, kind=f"ring {pair.kind}"))
    if pair.after is not None:
        disc = tag("circle", cx=column(pair.after), cy=middle, r=5.5, kind=f"fill {pair.kind}")
        marks.append(disc)
    return marks


def _around(name: str, cx: float, cy: float, angle: float, radius: float) -> Markup:
    """A label outside a circle, turned towards it."""
    x, y = cx + radius * math.cos(angle), cy + radius * math.sin(angle)
    side = math.cos(angle)
    anchor = "middle" if abs(side) < 0.3 else "start" if side > 0 else "end"
    return text(x, y + 4 + 6 * math.sin(angle), _short(name), "name", anchor)
