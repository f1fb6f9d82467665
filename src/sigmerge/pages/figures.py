"""The figures of the page about a plan and its scores: chart, caption and table.

Captions use the paper's words: conflict, capacity, deficit, share, claim. A figure whose numbers
are missing is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from sigmerge.method.deficit import DomainScores, best_scores
from sigmerge.pages import svg
from sigmerge.pages.paired import PairedRow, between, direction, margin
from sigmerge.pages.table import Table, number_columns, percent, points
from sigmerge.records import PairedScores, Part, PerLayer

DomainClasses = Mapping[str, str]  # domain -> the class that gives it its colour on the whole page

VIEW_LETTERS = {"representation": "r", "direction": "p", "sign": "s"}


@dataclass(frozen=True)
class Drawn:
    """The values that figures show of a plan, a profile or deficits; empty if not measured."""

    domains: Sequence[str] = ()
    views: Mapping[str, Sequence[float]] = field(default_factory=dict)
    conflict: Sequence[float] = ()
    capacity: Sequence[float] = ()
    deficit: DomainScores = field(default_factory=dict)
    share: DomainScores = field(default_factory=dict)
    order: Sequence[str] = ()
    coordinates: Sequence[int] = ()
    quota: Sequence[Sequence[int]] = ()
    claimed: Sequence[Sequence[int]] = ()
    admitted_mass: PerLayer = ()
    variant: str = "default"

    @property
    def names(self) -> list[str]:
        """The domains in the recipe's order."""
        return list(self.domains or self.share or self.deficit)


def drawn(plan: Part | None) -> Drawn:
    """The values of a plan, a profile or deficits for the figures; empty for a dense merge."""
    names = [each.name for each in fields(Drawn)]
    return Drawn(**{name: getattr(plan, name) for name in names if hasattr(plan, name)})


@dataclass(frozen=True)
class Figure:
    title: str
    caption: str
    chart: svg.Markup
    grid: Table
    legend: Sequence[tuple[str, str]] = ()  # (class of the mark, what it stands for)
    opened: bool = False  # the table is shown from the start


@dataclass(frozen=True)
class FigureSection:
    title: str
    figures: Sequence[Figure]


def sections(plan: Drawn, scores: PairedScores | None, kinds: DomainClasses) -> list[FigureSection]:
    """All figures of one run, in the order of the Method section."""
    scores, names = scores or PairedScores(), plan.names
    figures = {
        "What the merge kept": [paired_scores(scores, kinds), radar(scores, kinds)],
        "Conflict to capacity": [conflict(plan), capacity(plan)],
        "Deficit to allocation": [deficits(plan, names, kinds), shares(plan, names, kinds)],
        "Sequential occupancy": [
            budget(plan, names, kinds),
            claimed(plan, names, kinds),
            occupancy(plan, names, kinds),
            turns(plan, names, kinds),
            admitted_mass(plan, names, kinds),
        ],
    }
    kept = {title: [figure for figure in each if figure] for title, each in figures.items()}
    return [FigureSection(title, each) for title, each in kept.items() if each]


def overview(rows: Sequence[PairedRow]) -> Figure:
    """Every anchor of the page beside its repair."""
    marks = [
        svg.BeforeAfter(
            row.name,
            "hurt" if (row.gain or 0) < 0 else "accent",
            row.anchor,
            row.repaired,
            None,
            points(row.gain),
            svg.tip(row.name, *_paired_facts(row)),
            direction(row.gain, row.noise.gain if row.noise else None),
            margin(row.noise.repaired if row.noise else None),
        )
        for row in rows
    ]
    head = ("anchor", "before", "after", "gain")
    cells = [(r.name, *_macro_cells(r)) for r in rows]
    return Figure(
        f"Macro-{rows[0].domains} of each anchor, before and after repair",
        "The ring is the anchor, the disc the repaired merge, in percent; the thin line is the "
        "repaired merge's 95 % interval. On the right the gain in points, in colour where it is "
        "beyond its own interval.",
        svg.pairs("Macro score of each anchor before and after repair", marks),
        Table(number_columns(*head), cells),
    )


def score_grid(scores: PairedScores | None) -> Table | None:
    """Paired scores per domain."""
    if scores is None or not scores.anchor:
        return None
    repaired, best = scores.repaired or {}, best_scores(scores.experts)
    noise, rows = scores.noise, []
    for domain, before in scores.anchor.items():
        after = repaired.get(domain)
        gain = None if after is None else after - before
        values = [percent(best.get(domain)), percent(before), percent(after), points(gain)]
        if noise is not None:
            errors = (
                _strongest_error(scores, domain),
                *(found.get(domain) for found in (noise.anchor, noise.repaired, noise.gain)),
            )
            values = [between(*pair) for pair in zip(values, errors, strict=True)]
            if gain is not None and errors[-1] is None:
                values[-1] += " ± ?"  # no colour: nobody knows whether it is one
            values = [f"{noise.items.get(domain, 0):,}", *values]
        rows.append((domain, *values))
    items = ("items",) if noise is not None else ()
    return Table(number_columns("domain", *items, "strongest", "anchor", "repaired", "gain"), rows)


def _strongest_error(scores: PairedScores, domain: str) -> float | None:
    """The standard error of the score that the domain's strongest expert has."""
    scored = {name: row[domain] for name, row in scores.experts.items() if domain in row}
    if not scored or scores.noise is None:
        return None
    strongest = max(scored, key=lambda name: scored[name])
    return scores.noise.experts.get(strongest, {}).get(domain)


def _macro_cells(row: PairedRow) -> tuple[str, str, str]:
    """Macro score before and after, and the gain, each with its interval."""
    noise = row.noise
    return (
        between(percent(row.anchor), noise.anchor if noise else None),
        between(percent(row.repaired), noise.repaired if noise else None),
        between(points(row.gain), noise.gain if noise else None),
    )


def paired_scores(scores: PairedScores, kinds: DomainClasses) -> Figure | None:
    grid = score_grid(scores)
    if not grid:
        return None
    anchor, repaired, best = scores.anchor, scores.repaired or {}, best_scores(scores.experts)
    noise = scores.noise
    marks = []
    for domain, *values in grid.printed():
        gain = repaired[domain] - anchor[domain] if domain in repaired else None
        mark = svg.BeforeAfter(
            domain,
            kinds[domain],
            anchor[domain],
            repaired.get(domain),
            best.get(domain),
            points(gain),
            svg.tip(domain, *zip(grid.head[1:], values, strict=True)),
            direction(gain, noise.gain.get(domain) if noise else None),
            margin((noise.repaired if repaired else noise.anchor).get(domain)) if noise else None,
        )
        marks.append(mark)
    return Figure(
        "Scores per domain",
        _scores_caption(scores, best),
        svg.pairs("Scores per domain", marks),
        grid,
        [
            ("key-ring", "anchor"),
            ("key-disc", "repaired"),
            ("key-goal", "strongest expert"),
            *([("key-whisker", "95 % interval")] if noise else []),
        ],
        opened=True,
    )


def radar(scores: PairedScores, kinds: DomainClasses) -> Figure | None:
    """Experts, anchor and repaired merge over the domains all of them were scored on."""
    experts, anchor, repaired = scores.experts, scores.anchor, scores.repaired or {}
    shapes: list[tuple[str, str, Mapping[str, float]]] = [
        (f"expert {name}", f"expert {kinds.get(name, 'level')}", values)
        for name, values in experts.items()
    ]
    shapes += [("anchor", "anchor", anchor), ("repaired", "repaired", repaired)]
    shapes = [shape for shape in shapes if shape[2]]
    axes = [domain for domain in anchor if all(domain in values for _, _, values in shapes)]
    if len(axes) < 3:
        return None
    outlines = [
        svg.Outline(
            kind,
            [values[d] for d in axes],
            [svg.tip(name, (d, percent(values[d]))) for d in axes],
        )
        for name, kind, values in shapes
    ]
    return Figure(
        "Experts, anchor and repaired merge",
        "Each thin line is an expert in the colour of its domain: far out on its own axis, less "
        "so elsewhere. A good merge encloses what the experts reach one by one.",
        svg.radar("Radar of domain scores", axes, outlines),
        Table(
            number_columns("checkpoint", *axes),
            [(n, *(percent(v[d]) for d in axes)) for n, _, v in shapes],
        ),
        [
            ("key-dashed", "anchor"),
            *([("key-solid", "repaired")] if repaired else []),
            *((f"key-thin {kinds.get(name, 'level')}", f"expert {name}") for name in experts),
        ],
    )


def conflict(plan: Drawn) -> Figure | None:
    scores = plan.conflict
    if not scores:
        return None
    views = {name: v for name in VIEW_LETTERS if (v := plan.views.get(name))}
    tips = [
        svg.tip(
            f"Layer {i}",
            ("conflict S̄", f"{score:.3f}"),
            *(
                (f"{name} {VIEW_LETTERS[name]}", f"{values[i]:.4f}")
                for name, values in views.items()
            ),
        )
        for i, score in enumerate(scores)
    ]
    series = [svg.Line(f"view {name}", _min_max(values)) for name, values in views.items()]
    cells = [
        (str(i), *(f"{values[i]:.4f}" for values in views.values()), f"{score:.3f}")
        for i, score in enumerate(scores)
    ]
    high, low = _extremes(scores)
    return Figure(
        "Conflict over depth",
        f"The experts disagree most in layer {high} (S̄ = {scores[high]:.2f}) and least in layer "
        f"{low} ({scores[low]:.2f}). Views are drawn min-max scaled over layers, as they enter "
        "the mean S̄; a touch and the table give them as measured.",
        svg.lines("Conflict over depth", [*series, svg.Line("score", scores)], tips),
        Table(number_columns("layer", *views, "conflict S̄"), cells),
        [("key-score", "conflict S̄"), *((f"key-view {name}", name) for name in views)],
    )


def capacity(plan: Drawn) -> Figure | None:
    values = plan.capacity
    if not values:
        return None
    tips = [svg.tip(f"Layer {i}", ("capacity C", f"{percent(c)} %")) for i, c in enumerate(values)]
    high, low = _extremes(values)
    rule = " The more contested a layer, the less it opens." if _as_in_paper(plan) else ""
    return Figure(
        "Capacity over depth",
        f"The share of a layer's coordinates that the repair may occupy: {percent(values[high])} % "
        f"in layer {high}, {percent(values[low])} % in layer {low}.{rule}",
        svg.columns(
            "Capacity over depth", [[c] for c in values], ["accent"], tips, "{:.0%}".format
        ),
        Table(
            number_columns("layer", "capacity C (%)"),
            [(str(i), percent(c)) for i, c in enumerate(values)],
        ),
    )


def deficits(plan: Drawn, names: Sequence[str], kinds: DomainClasses) -> Figure | None:
    values = plan.deficit
    if not values:
        return None
    printed = {name: percent(values[name]) for name in names}
    marks = [
        svg.Bar(
            n, kinds[n], values[n], printed[n], svg.tip(n, ("deficit g", f"{printed[n]} points"))
        )
        for n in names
    ]
    worst = max(names, key=lambda name: values[name])
    caption = (
        f"The anchor is furthest behind on {worst}: {printed[worst]} points short of the "
        "experts on the calibration split. A domain that is not behind has no deficit."
        if values[worst] > 0
        else "The anchor matches the experts on every domain of the calibration split: nothing is "
        "to be repaired, and no capacity is opened."
    )
    cells = [(name, printed[name]) for name in names]
    chart = svg.bars("Deficit per domain", marks)
    return Figure(
        "Deficits", caption, chart, Table(number_columns("domain", "deficit g (points)"), cells)
    )


def shares(plan: Drawn, names: Sequence[str], kinds: DomainClasses) -> Figure | None:
    values = plan.share
    if not values or not any(values.values()):
        return None
    order = list(plan.order or sorted(names, key=lambda name: -values[name]))
    order += [name for name in names if name not in order]
    marks, cells = [], []
    for turn, name in enumerate(order, start=1):
        place = str(turn) if values[name] > 0 else "none"
        printed = f"{percent(values[name])} %"
        words = svg.tip(name, ("share ρ", printed), ("claims", place))
        marks.append(svg.Bar(f"{turn}. {name}", kinds[name], values[name], printed, words))
        cells.append((name, place, percent(values[name])))
    origin = f"by the variant {plan.variant}"
    if _as_in_paper(plan):
        origin = "in proportion to the deficits"
    return Figure(
        "Shares and claim order",
        f"Capacity is divided {origin}, alike at every layer. The first to claim, {order[0]}, "
        "picks from the whole layer; each later domain picks from what is left.",
        svg.bars("Share per domain in claim order", marks),
        Table(number_columns("domain", "claims", "share ρ (%)"), cells),
    )


def budget(plan: Drawn, names: Sequence[str], kinds: DomainClasses) -> Figure | None:
    opened, share = plan.capacity, plan.share
    if not opened or not share:
        return None
    values = [[c * share[name] for name in names] for c in opened]
    printed = [[f"{100 * b:.1f}" for b in row] for row in values]
    facts = [[[("budget B", f"{percent(b)} %")] for b in row] for row in values]
    return Figure(
        "Budget",
        "B = C ρᵀ, in percent of a layer's coordinates: conflict shapes the columns, deficit the "
        "rows, and each column adds up to the layer's capacity.",
        _heat("Budget, layer by domain", values, names, kinds, facts, printed),
        _layer_grid(names, [[percent(b) for b in row] for row in values]),
    )


def claimed(plan: Drawn, names: Sequence[str], kinds: DomainClasses) -> Figure | None:
    counts = plan.claimed
    if not counts:
        return None
    sizes, quota = plan.coordinates, plan.quota
    facts = [
        [_claim_facts(counts, quota, sizes, i, d) for d in range(len(names))]
        for i in range(len(counts))
    ]
    printed = [[_brief(count) for count in row] for row in counts]
    total = sum(map(sum, counts))
    rule = ": the entries where its expert moved furthest and no other had claimed before"
    rule = rule if _as_in_paper(plan) else ""
    part = f" of {sum(sizes):,} ({100 * total / sum(sizes):.2f} %)" if sizes else ""
    return Figure(
        "Claimed coordinates",
        f"{total:,} coordinates{part} of the layer blocks were claimed, each by one domain "
        f"only{rule}.",
        _heat("Claimed coordinates, layer by domain", counts, names, kinds, facts, printed),
        _layer_grid(names, [[f"{count:,}" for count in row] for row in counts]),
    )


def occupancy(plan: Drawn, names: Sequence[str], kinds: DomainClasses) -> Figure | None:
    """Of every layer the part that each domain has claimed, in claim order from the bottom."""
    if not plan.coordinates or not any(map(any, plan.claimed)):
        return None
    order = _in_claim_order(plan, names)
    places = [names.index(name) for name in order]
    parts = [
        [row[d] / size for d in places]
        for row, size in zip(plan.claimed, plan.coordinates, strict=True)
    ]
    whole = [sum(row) for row in parts]
    opened = [percent(c) for c in plan.capacity] or [""] * len(whole)
    tips = [
        svg.tip(
            f"Layer {i}",
            *((name, f"{percent(part)} %") for name, part in zip(order, row, strict=True)),
            ("together", f"{percent(whole[i])} %"),
            *([("capacity C", f"{opened[i]} %")] if plan.capacity else []),
        )
        for i, row in enumerate(parts)
    ]
    high, low = _extremes(whole)
    rows = [
        (str(i), *map(percent, row), percent(whole[i]), opened[i]) for i, row in enumerate(parts)
    ]
    return Figure(
        "Occupancy over depth",
        "The part of a layer's coordinates that the domains have claimed, the first to claim at "
        f"the bottom: {percent(whole[high])} % of layer {high}, {percent(whole[low])} % of layer "
        f"{low}. The rest stays the anchor's.",
        svg.columns(
            "Occupancy over depth", parts, [kinds[n] for n in order], tips, "{:.0%}".format
        ),
        Table(number_columns("layer", *order, "together (%)", "capacity C (%)"), rows),
        [(f"key-disc {kinds[name]}", name) for name in order],
    )


def turns(plan: Drawn, names: Sequence[str], kinds: DomainClasses) -> Figure | None:
    """The claims of one layer, the fullest, domain after domain."""
    if not plan.coordinates or not any(map(any, plan.claimed)):
        return None
    layer = max(range(len(plan.claimed)), key=lambda i: sum(plan.claimed[i]) / plan.coordinates[i])
    heads = ("quota k", "free before", "claimed", "free after", "admitted mass")
    size, taken, marks, rows = plan.coordinates[layer], 0, [], []
    for turn, name in enumerate(_in_claim_order(plan, names), start=1):
        d = names.index(name)
        count = plan.claimed[layer][d]
        cells = [
            f"{plan.quota[layer][d]:,}" if plan.quota else "",
            f"{size - taken:,}",
            f"{count:,}",
            f"{size - taken - count:,}",
            f"{plan.admitted_mass[layer][d]:,.3f}" if plan.admitted_mass else "",
        ]
        facts = [(head, cell) for head, cell in zip(heads, cells, strict=True) if cell]
        printed = f"{100 * count / size:.1f} %"
        marks.append(
            svg.Turn(
                f"{turn}. {name}", kinds[name], taken / size, count / size, printed,
                svg.tip(f"Layer {layer}, turn {turn}: {name}", *facts),
            )
        )  # fmt: skip
        rows.append((f"{turn}. {name}", *cells))
        taken += count
    rule = ", of them those where its expert moved furthest" if _as_in_paper(plan) else ""
    return Figure(
        f"Layer {layer}, turn by turn",
        f"Sequential occupancy in the layer that opens most. Grey is what was claimed before: each "
        f"domain claims its quota among the coordinates that are still free{rule}. Of {size:,}, "
        f"{size - taken:,} stay free.",
        svg.turns(f"Occupancy of layer {layer}, turn by turn", marks),
        Table(number_columns("turn", *heads), rows),
    )


def _in_claim_order(plan: Drawn, names: Sequence[str]) -> list[str]:
    """The domains as they claim; those without a claim last."""
    first = [name for name in plan.order if name in names]
    return [*first, *(name for name in names if name not in first)]


def admitted_mass(plan: Drawn, names: Sequence[str], kinds: DomainClasses) -> Figure | None:
    mass = plan.admitted_mass
    if not mass:
        return None
    tips = [
        svg.tip(
            f"Layer {i}",
            *((name, f"{value:,.3f}") for name, value in zip(names, row, strict=True)),
            ("together", f"{sum(row):,.3f}"),
        )
        for i, row in enumerate(mass)
    ]
    classes = [kinds[name] for name in names]
    sums = dict(zip(names, map(sum, zip(*mass, strict=True)), strict=True))
    whole = sum(sums.values()) or 1.0
    return Figure(
        "Admitted mass",
        "The ℓ1 mass of the task vectors at the claimed coordinates, stacked by domain: how much "
        f"of what the experts learned each layer takes in. Of {sum(sums.values()):,.2f} in all, "
        f"{_and([f'{100 * part / whole:.1f} % is {name}' for name, part in sums.items()])}.",
        svg.columns("Admitted mass over depth", mass, classes, tips, _brief),
        _layer_grid(names, [[f"{value:,.3f}" for value in row] for row in mass]),
        [(f"key-disc {kinds[name]}", name) for name in names],
    )


def _scores_caption(scores: PairedScores, best: Mapping[str, float]) -> str:
    """What the repair raised and lowered, beyond the interval of a change where one is known."""
    anchor, repaired = scores.anchor, scores.repaired or {}
    if not repaired:
        return "Scores of the merge on the evaluation split, in percent."
    errors = scores.noise.gain if scores.noise else {}
    ways = {d: direction(repaired[d] - anchor[d], errors.get(d)) for d in anchor if d in repaired}
    rose, fell = ([d for d, way in ways.items() if way == wanted] for wanted in ("up", "down"))
    within = [d for d, way in ways.items() if way == "level" and repaired[d] != anchor[d]]
    words = f"In percent, on the evaluation split. The repair raised {_and(rose)}"
    words += f" and lowered {_and(fell)}" if fell else ""
    words += f"; {_and(within)} changed within the interval" if within else ""
    reached = [d for d in anchor if d in best and repaired.get(d, -1.0) >= best[d]]
    return f"{words}." + (
        f" The strongest expert is reached on {_and(reached)}." if reached else ""
    )


def _as_in_paper(plan: Drawn) -> bool:
    """False for controls and ablations, whose captions must not claim the paper's rule."""
    return plan.variant == "default"


def _claim_facts(
    counts: Sequence[Sequence[int]],
    quota: Sequence[Sequence[int]],
    sizes: Sequence[int],
    layer: int,
    domain: int,
) -> list[tuple[str, str]]:
    count = counts[layer][domain]
    facts = [("claimed", f"{count:,}")]
    if quota:
        facts.append(("quota", f"{quota[layer][domain]:,}"))
    if sizes:
        facts.append(("of the layer", f"{100 * count / sizes[layer]:.2f} %"))
    return facts


def _heat(
    title: str,
    values: Sequence[Sequence[float]],
    names: Sequence[str],
    kinds: DomainClasses,
    facts: Sequence[Sequence[Sequence[tuple[str, str]]]],
    printed: Sequence[Sequence[str]],
) -> svg.Markup:
    tips = [
        [svg.tip(f"Layer {i} · {name}", *cell) for name, cell in zip(names, row, strict=True)]
        for i, row in enumerate(facts)
    ]
    return svg.heat(title, values, [(name, kinds[name]) for name in names], tips, printed)


def _layer_grid(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    return Table(number_columns("layer", *names), [(str(i), *row) for i, row in enumerate(rows)])


def _paired_facts(row: PairedRow) -> list[tuple[str, str]]:
    return [
        *zip(("anchor", "repaired", "gain"), _macro_cells(row), strict=True),
        ("residual gap", f"{percent(row.gap_before)} → {percent(row.gap_after)}"),
    ]


def _min_max(values: Sequence[float]) -> list[float]:
    """Min-max over layers; a constant view is 0 everywhere (ruling 10)."""
    low, span = min(values), max(values) - min(values)
    return [(value - low) / span if span else 0.0 for value in values]


def _extremes(values: Sequence[float]) -> tuple[int, int]:
    """Where the largest and the smallest value are."""
    layers = range(len(values))
    return max(layers, key=lambda i: values[i]), min(layers, key=lambda i: values[i])


def _brief(value: float) -> str:
    """A short form of a number: 12.3k, 4.5M."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _and(names: Sequence[str]) -> str:
    if not names:
        return "no domain"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
