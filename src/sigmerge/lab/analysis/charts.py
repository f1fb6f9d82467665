"""The figures of the paper, drawn from the results of an experiment.

A builder per figure, under the paper's label; a builder raises `NotInStore` where the experiment
did not make the runs it needs. The same results give the same SVG bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from sigmerge.errors import MissingExtra
from sigmerge.lab.analysis import statistics
from sigmerge.lab.analysis.derived import (
    SWEPT,
    Skipped,
    Sweep,
    metric_changes,
    profiles,
    sweeps,
    words,
)
from sigmerge.lab.analysis.results import NotInStore, Results, matrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, RULE = "#1d1f27", "#5b5f6b", "#e4e1da"
ANCHOR, REPAIR = "#6d93bd", "#dd7f2a"  # blue and orange, as in the paper's first figure
DOMAIN_COLOURS = (
    "#0072b2",
    "#d98e00",
    "#00916a",
    "#c2679a",
    "#cc5500",
    "#3f9fd6",
    "#8a7a1c",
    "#6d6f78",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LOW_COLOUR, MIDDLE_COLOUR, HIGH_COLOUR = "#b3461e", "#fdfcfa", "#5b43c4"
STYLE: Any = {
    "svg.hashsalt": "sigmerge",
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": RULE,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


@dataclass(frozen=True)
class Plot:
    label: str
    title: str
    caption: str
    figure: Figure

    @cached_property
    def svg(self) -> str:
        """As text without a date: the same figure, the same text."""
        out = io.StringIO()
        self._save(out, format="svg", metadata={"Date": None, "Creator": "sigmerge"})
        return out.getvalue()

    def png(self) -> bytes:
        out = io.BytesIO()
        self._save(out, format="png", dpi=160, metadata={"Software": "sigmerge"})
        return out.getvalue()

    def write(self, folder: Path) -> None:
        """Both forms into a folder, named by the label."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.label}.svg").write_text(self.svg, encoding="utf-8", newline="\n")
        (folder / f"{self.label}.png").write_bytes(self.png())

    def _save(self, out: Any, **options: Any) -> None:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            self.figure.savefig(out, **options)


def make_plots(results: Results) -> tuple[list[Plot], list[Skipped]]:
    """All figures the store has the runs for, and why the others are missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra("Drawing figures", ["matplotlib"], ["lab"]) from error
    made: list[Plot] = []
    skipped = []
    with matplotlib.rc_context(STYLE):
        for label, build in PLOT_BUILDERS.items():
            try:
                drawn = build(results)
            except NotInStore as reason:
                skipped.append(Skipped(label, str(reason)))
                continue
            for plot in drawn:
                # Laid out once: a layout that runs at every save would move things again.
                plot.figure.draw_without_rendering()
                plot.figure.set_layout_engine("none")
            made += drawn
    return made, skipped


def _panels(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, np.ndarray]:
    """A figure of panels, each of `size` inches; the axes always as a rows × columns array."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout=layout)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


ACROSS = 3
"""Panels beside each other: more would be too small on a page."""


def _wrapped(
    count: int, size: tuple[float, float], *, high: int = 1, **options: Any
) -> tuple[Figure, np.ndarray]:
    """One panel for each of `count` things, or `high` panels one below the other.

    The axes come as a high × count array; places that are left over stay empty.
    """
    across = min(count, ACROSS)
    figure, axes = _panels(high * math.ceil(count / across), across, size, **options)
    by_thing = axes.reshape(-1, high, across).transpose(1, 0, 2).reshape(high, -1)
    for axis in by_thing[:, count:].flat:
        axis.set_axis_off()
    for axis in by_thing[-1, max(0, count - across) : count]:
        axis.tick_params(labelbottom=True)  # also above a place that is left over
    return figure, by_thing[:, :count]


def _label_left(axes: np.ndarray, text: str) -> None:
    """The name of the vertical axis at the panels that begin a row."""
    for axis in axes[::ACROSS]:
        axis.set_ylabel(text)


def _signed(value: float, decimals: int) -> str:
    return f"{value:+.{decimals}f}".replace("-", "−")


def _colours(domains: Sequence[str]) -> dict[str, str]:
    return {d: DOMAIN_COLOURS[k % len(DOMAIN_COLOURS)] for k, d in enumerate(domains)}


def _legend(figure: Figure, handles: Sequence[Any], names: Sequence[str] | None = None) -> None:
    """One legend above all panels."""
    names = names or [handle.get_label() for handle in handles]
    room = max(1, int(figure.get_figwidth() / (0.075 * max(map(len, names)) + 0.55)))
    rows = math.ceil(len(handles) / room)
    columns = math.ceil(len(handles) / rows)
    figure.legend(handles, names, loc="outside upper center", ncols=columns)


def _scored_by_experts(results: Results) -> pl.DataFrame:
    known = results.main_by_domain.drop_nulls("gap_before")
    if known.is_empty():
        raise NotInStore("the store holds no scores of experts")
    return known


def motivation(results: Results) -> list[Plot]:
    known = _scored_by_experts(results)
    pools = [pool for pool in results.pools if pool in set(known["pool"])]
    figure, axes = _wrapped(len(pools), (3.7, 2.9), sharey=True)
    place = np.arange(len(results.domains))
    for axis, pool in zip(axes[0], pools, strict=True):
        for shift, column, colour, name in (
            (-0.2, "gap_before", ANCHOR, "anchor"),
            (0.2, "gap_after", REPAIR, "+ repair"),
        ):
            means = [
                known.filter(pl.col("pool") == pool, pl.col("domain") == d)[column].mean()
                for d in results.domains
            ]
            heights = 100 * np.array([math.nan if m is None else m for m in means], dtype=float)
            bars = axis.bar(place + shift, heights, 0.38, color=colour, label=name)
            axis.bar_label(bars, fmt="%.1f", fontsize=7, padding=1, color=SOFT)
        axis.set_title(pool)
        axis.set_xticks(place, results.domains, rotation=25, ha="right", rotation_mode="anchor")
        axis.margins(y=0.12)
    _label_left(axes[0], "residual expert gap (points)")
    _legend(figure, *axes[0, 0].get_legend_handles_labels())
    caption = "Mean over anchors, one panel per pool. Lower is better."
    return [Plot("motivation", "Residual expert gap before and after repair", caption, figure)]


def deficit_gain(results: Results) -> list[Plot]:
    known = _scored_by_experts(results)
    figure, axes = _panels(1, 2, (4.6, 3.9))
    _deficit_scatter(axes[0, 0], results, known)
    _recovered_bars(axes[0, 1], results, known)
    rank = statistics.spearman(known["gap_before"], known["gain"])
    caption = (
        f"(a) One point per pool, anchor and domain ({known.height}; Spearman {rank:+.3f}) in the "
        "colours of (b); the dashed line is full recovery. (b) Means over all settings; labels "
        "give the recovered part."
    )
    return [Plot("deficit_gain", "Deficit at the anchor and gain from the repair", caption, figure)]


def _deficit_scatter(axis: Axes, results: Results, known: pl.DataFrame) -> None:
    from matplotlib.lines import Line2D

    colours = _colours(results.domains)
    marker = {pool: MARKERS[k % len(MARKERS)] for k, pool in enumerate(results.pools)}
    for row in known.to_dicts():
        axis.plot(
            100 * row["gap_before"],
            100 * row["gain"],
            marker[row["pool"]],
            ms=5,
            alpha=0.85,
            color=colours[row["domain"]],
            markeredgecolor="white",
            markeredgewidth=0.5,
        )
    far = 100 * max(known["gap_before"].to_list())
    axis.plot([0, far], [0, far], "--", color=SOFT, lw=1)
    axis.axhline(0, color=SOFT, lw=0.8)
    axis.grid(True, axis="both")
    axis.set(xlabel="deficit at the anchor (points)", ylabel="gain (points)", title="(a)")
    shapes = [Line2D([], [], ls="", marker=m, color=SOFT, label=pool) for pool, m in marker.items()]
    shapes.append(Line2D([], [], ls="--", color=SOFT, label="full recovery"))
    axis.legend(handles=shapes, loc="upper left", fontsize=7.5, handletextpad=0.3)


def _recovered_bars(axis: Axes, results: Results, known: pl.DataFrame) -> None:
    colours = _colours(results.domains)
    for k, domain in enumerate(results.domains):
        here = known.filter(pl.col("domain") == domain)
        if here.is_empty():
            continue
        deficit, gain = 100 * here["gap_before"].to_numpy(), 100 * here["gain"].to_numpy()
        axis.bar(
            k - 0.2,
            deficit.mean(),
            0.38,
            color="white",
            edgecolor=colours[domain],
            hatch="////",
            lw=1,
        )
        axis.bar(k + 0.2, gain.mean(), 0.38, color=colours[domain])
        part = statistics.recovered_fraction(deficit, gain)
        text = "–" if math.isnan(part) else f"{100 * part:.0f}%".replace("-", "−")
        top = max(deficit.mean(), gain.mean(), 0)
        axis.annotate(text, (k, top), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axis.set_xticks(
        range(len(results.domains)),
        results.domains,
        rotation=25,
        ha="right",
        rotation_mode="anchor",
    )
    axis.axhline(0, color=SOFT, lw=0.8)
    axis.set(ylabel="points", title="(b)  hatched: deficit, filled: gain")
    axis.margins(y=0.12)


def directional(results: Results) -> list[Plot]:
    rows = results.summary("control")
    places = rows.select("pool", "anchors").unique(maintain_order=True).rows()
    settings = rows["setting"].unique(maintain_order=True).to_list()
    figure, axes = _wrapped(len(places), (3.7, 3.2), sharey=True)
    for k, (pool, anchors) in enumerate(places):
        here = {
            r["setting"]: r
            for r in rows.filter(pl.col("pool") == pool, pl.col("anchors") == anchors).to_dicts()
        }
        axis = axes[0, k]
        for place, setting in enumerate(settings):
            if setting in here:
                _retained_bar(axis, place, here[setting])
        if not axis.patches:
            axis.annotate(
                "the default repair gains nothing here", (0.5, 0.5), xycoords="axes fraction",
                ha="center", color=SOFT,
            )  # fmt: skip
        axis.axhline(0, color=SOFT, lw=0.8)
        axis.axhline(100, color=SOFT, lw=0.8, ls="--")
        axis.set_xticks(
            range(len(settings)),
            [words(s) for s in settings],
            rotation=30,
            ha="right",
            rotation_mode="anchor",
        )
        axis.set_title(f"({chr(97 + k % 26)}) {pool}, {anchors}")
        axis.set_xlim(-0.65, len(settings) - 0.35)
        axis.margins(y=0.1)
    _label_left(axes[0], "retained part of the gain (%)")
    caption = (
        "100 % is the default repair (dashed), 0 % the anchor. Error bars are the standard "
        "deviation over seeds; a control without one is deterministic."
    )
    return [Plot("directional", "What each directional control retains", caption, figure)]


def _retained_bar(axis: Axes, place: int, row: Mapping[str, Any]) -> None:
    kept = [
        100 * statistics.retained_fraction(v, row["before"], row["default"]) for v in row["values"]
    ]
    if any(map(math.isnan, kept)):
        return
    summary = statistics.seed_summary(kept)
    error = None if len(kept) == 1 else summary.std
    colour = REPAIR if row["setting"].startswith("inverted") else ANCHOR
    axis.bar(
        place,
        summary.mean,
        0.7,
        color=colour,
        yerr=error,
        capsize=3,
        ecolor=INK,
        error_kw={"lw": 1},
    )
    top = max(summary.mean, 0) + (error or 0)
    axis.annotate(
        f"{summary.mean + 0.0:.0f}".replace("-", "−"),
        (place, top),
        (0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )


def layerwise(results: Results) -> list[Plot]:
    found = profiles(results)
    figure, axes = _wrapped(len(found), (4.0, 2.2), high=2)
    dashes = {"representation": "-", "direction": "--", "sign": ":"}
    for k, (pool, run) in enumerate(found.items()):
        upper, lower = axes[0, k], axes[1, k]
        capacity, conflict = np.array(run["capacity"]), np.array(run["conflict"])
        depth = np.arange(capacity.size)
        for name, view in run["views"].items():
            upper.plot(
                depth,
                _scaled(view),
                dashes.get(name, "-."),
                color=SOFT,
                lw=0.9,
                alpha=0.8,
                label=name,
            )
        if conflict.size == capacity.size:
            upper.plot(depth, conflict, color=LOW_COLOUR, lw=2.2, label="conflict")
            upper.plot(depth, 1 - conflict, color=HIGH_COLOUR, lw=1.6, label="openness")
        upper.set_title(pool)
        upper.set_ylim(-0.03, 1.03)
        lower.bar(depth, capacity, 0.8, color=HIGH_COLOUR, alpha=0.85)
        for bound in ("c_min", "c_max"):
            if bound in run["constants"]:
                lower.axhline(run["constants"][bound], color=SOFT, ls="--", lw=0.9)
        lower.set_xlabel("layer")
        lower.set_ylim(bottom=0)
    _label_left(axes[0], "conflict, openness")
    _label_left(axes[1], "capacity")
    _legend(figure, *axes[0, 0].get_legend_handles_labels())
    caption = (
        "Above: the views, scaled to 0–1 over layers, their mean (conflict), and one minus it "
        "(openness). Below: the capacity, between the dashed bounds C_min and C_max."
    )
    return [Plot("layerwise", "Conflict, openness and capacity over depth", caption, figure)]


def _scaled(view: Sequence[float]) -> np.ndarray:
    values = np.asarray(view, dtype=float)
    span = np.ptp(values)
    return (values - values.min()) / span if span > 0 else np.zeros_like(values)


def _heat(
    axis: Axes,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    text: float = 7.5,
) -> None:
    """Points as colours around zero, normalized within the panel, with their numbers."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list(
        "sigmerge", [LOW_COLOUR, MIDDLE_COLOUR, HIGH_COLOUR]
    )
    known = np.abs(values[~np.isnan(values)])
    most = float(known.max()) if known.size and known.max() > 0 else 1.0
    axis.imshow(values, cmap=colours, vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
    axis.grid(False)
    axis.set_xticks(range(len(columns)), columns, rotation=45, ha="right", rotation_mode="anchor")
    axis.set_yticks(range(len(rows)), rows)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    for (i, j), value in np.ndenumerate(values):
        if not math.isnan(value):
            ink = "white" if abs(value) > 0.6 * most else INK
            shown = f"{value + 0.0:+.1f}".replace("-", "−")
            axis.text(j, i, shown, ha="center", va="center", fontsize=text, color=ink)


def domain_gain_matrix(results: Results) -> list[Plot]:
    triples = results.main_by_domain
    pools = [pool for pool in results.pools if pool in set(triples["pool"])]
    widest = max(len(results.anchors(pool)) for pool in pools)
    figure, axes = _wrapped(len(pools), (max(2.6, 0.55 * widest + 0.4), 2.8), sharey=True)
    for axis, pool in zip(axes[0], pools, strict=True):
        order = {"domain": results.domains, "anchor": results.anchors(pool)}
        here = triples.filter(pl.col("pool") == pool)
        _heat(
            axis,
            100 * matrix(here, "domain", "anchor", "gain", order),
            results.domains,
            order["anchor"],
        )
        axis.set_title(pool)
    caption = "Gain in points over each anchor, by domain. Colours are scaled within each pool."
    return [Plot("domain_gain_matrix", "Gain by domain and anchor", caption, figure)]


def ablation_bar(results: Results) -> list[Plot]:
    rows = results.summary("ablation")
    places = rows.select("pool", "anchors").unique(maintain_order=True).rows()
    figure, axes = _wrapped(len(places), (3.5, 1.9), sharey=True, sharex=True)
    settings = rows["setting"].unique(maintain_order=True).to_list()
    for axis, (pool, anchors) in zip(axes[0], places, strict=True):
        here = rows.filter(pl.col("pool") == pool, pl.col("anchors") == anchors)
        change = {r["setting"]: 100 * (r["after"] - r["default"]) for r in here.to_dicts()}
        values = [change.get(setting, math.nan) for setting in settings]
        colours = [HIGH_COLOUR if value > 0 else LOW_COLOUR for value in values]
        bars = axis.barh(range(len(settings)), values, 0.6, color=colours)
        axis.bar_label(bars, fmt=lambda value: _signed(value, 2), fontsize=8, padding=3)
        axis.axvline(0, color=SOFT, lw=0.8)
        axis.grid(True, axis="x")
        axis.grid(False, axis="y")
        axis.set_yticks(range(len(settings)), [words(s) for s in settings])
        axis.set_title(f"{pool}, {anchors}", fontsize=9.5)
        axis.margins(x=0.22)
    axes[0, 0].invert_yaxis()
    figure.supxlabel(f"change of {results.macro_name} against the default (points)", fontsize=9)
    caption = "Each variant replaces one part of the default repair."
    return [Plot("ablation_bar", "Cost of removing each component", caption, figure)]


def ablation_domain(results: Results) -> list[Plot]:
    rows = results.summary("ablation", by_domain=True)
    rows = rows.with_columns(change=100 * (pl.col("after") - pl.col("default")))
    places = rows.select("pool", "anchors").unique(maintain_order=True).rows()
    settings = rows["setting"].unique(maintain_order=True).to_list()
    figure, axes = _wrapped(len(places), (3.5, 2.3), sharey=True)
    order = {"setting": settings, "domain": results.domains}
    for axis, (pool, anchors) in zip(axes[0], places, strict=True):
        here = rows.filter(pl.col("pool") == pool, pl.col("anchors") == anchors)
        values = matrix(here, "setting", "domain", "change", order)
        _heat(axis, values, [words(s) for s in settings], results.domains)
        axis.set_title(f"{pool}, {anchors}", fontsize=9.5)
    caption = (
        "Change against the default in points, by domain. Colours are scaled within each panel."
    )
    return [Plot("ablation_domain", "Where the cost of each ablation falls", caption, figure)]


def sensitivity(results: Results) -> list[Plot]:
    found = sweeps(results)
    pools = [pool for pool in results.pools if any(sweep.pool == pool for sweep in found)]
    constants = [c for c in SWEPT if any(sweep.constant == c for sweep in found)]
    figure, axes = _panels(len(pools), len(constants), (3.5, 2.4), sharey="row")
    for i, pool in enumerate(pools):
        for j, constant in enumerate(constants):
            here = [s for s in found if (s.pool, s.constant) == (pool, constant)]
            if here:
                _sweep_panel(axes[i, j], here[0], results)
            else:
                axes[i, j].set_axis_off()
        axes[i, 0].set_ylabel(f"{pool}\nchange (points)")
    for j, constant in enumerate(constants):
        axes[0, j].set_title(
            {"c_min": "$C_{\\min}$", "c_max": "$C_{\\max}$"}.get(constant, "$\\lambda$")
        )
    _legend(figure, *axes[0, 0].get_legend_handles_labels())
    caption = "Change from the default (dashed). A star marks the best value for each domain."
    return [Plot("sensitivity", "Sensitivity to the three constants", caption, figure)]


def _sweep_panel(axis: Axes, sweep: Sweep, results: Results) -> None:
    colours = {results.macro_name: INK, **_colours(results.domains)}
    usual = list(sweep.values).index(sweep.default)
    for name, scores in sweep.scores.items():
        change = 100 * (np.array(scores) - scores[usual])
        wide = 2.4 if name == results.macro_name else 1.2
        axis.plot(
            sweep.values, change, "-o", ms=3, lw=wide, color=colours[name], label=name, zorder=3
        )
        best = list(sweep.values).index(sweep.best(name))
        axis.plot(
            sweep.values[best],
            change[best],
            "*",
            ms=12,
            color=colours[name],
            markeredgecolor="white",
            markeredgewidth=0.7,
            zorder=4,
        )
    axis.axvline(sweep.default, color=SOFT, ls="--", lw=0.9)
    axis.axhline(0, color=SOFT, lw=0.6)
    axis.set_xticks(sweep.values, [f"{value:g}" for value in sweep.values])


def radars(results: Results) -> list[Plot]:
    anchors = results.anchors()
    if len(results.domains) < 3:
        raise NotInStore("a radar needs three domains")
    half = math.ceil(len(anchors) / 2)
    parts = [anchors[:half], anchors[half:]] if len(anchors) > 4 else [anchors]
    return [_radar_page(results, part, k + 1) for k, part in enumerate(parts)]


def _radar_page(results: Results, anchors: Sequence[str], number: int) -> Plot:
    triples = results.main_by_domain
    experts = results.by_domain.filter(pl.col("kind") == "expert")
    pools = [pool for pool in results.pools if pool in set(triples["pool"])]
    figure, axes = _panels(len(pools), len(anchors), (3.8, 2.4), subplot_kw={"projection": "polar"})
    for i, pool in enumerate(pools):
        own = experts.filter(pl.col("pool") == pool)
        for j, anchor in enumerate(anchors):
            here = triples.filter(pl.col("pool") == pool, pl.col("anchor") == anchor)
            _radar(axes[i, j], results.domains, here, own)
            if i == 0:
                axes[i, j].set_title(anchor, pad=16)
        axes[i, 0].annotate(
            pool,
            (-0.42, 0.5),
            xycoords="axes fraction",
            rotation=90,
            va="center",
            ha="center",
            fontsize=10,
            fontweight="bold",
        )
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    _legend(figure, list(lines.values()), list(lines))
    caption = f"Experts, anchor and repaired checkpoint on the domains: {', '.join(anchors)}."
    return Plot(f"radar{number}", f"Domain profiles ({number})", caption, figure)


def _radar(axis: Any, domains: Sequence[str], pair: pl.DataFrame, experts: pl.DataFrame) -> None:
    from matplotlib.ticker import MaxNLocator

    turn = np.linspace(0, 2 * np.pi, len(domains), endpoint=False)
    closed = np.append(turn, turn[0])

    def ring(frame: pl.DataFrame, column: str, **style: Any) -> None:
        by = dict(zip(frame["domain"], frame[column], strict=True))
        values = [100 * by[d] if d in by else math.nan for d in domains]
        axis.plot(closed, [*values, values[0]], **style)

    colours = _colours(domains)
    for k, name in enumerate(experts["method"].unique(maintain_order=True)):
        colour = colours.get(name, DOMAIN_COLOURS[k % len(DOMAIN_COLOURS)])
        ring(
            experts.filter(pl.col("method") == name),
            "score",
            lw=0.9,
            color=colour,
            alpha=0.7,
            label=f"{name} expert",
        )
    if not pair.is_empty():
        ring(pair, "before", lw=1.4, ls="--", color=INK, label="anchor")
        ring(pair, "after", lw=1.8, color=REPAIR, label="+ repair")
        by = dict(zip(pair["domain"], pair["after"], strict=True))
        axis.fill(turn, [100 * by.get(d, math.nan) for d in domains], color=REPAIR, alpha=0.12)
    axis.set_theta_offset(np.pi / 2)
    axis.set_theta_direction(-1)
    axis.set_ylim(0)
    axis.set_rlabel_position(180 / len(domains))
    axis.yaxis.set_major_locator(MaxNLocator(4))
    axis.set_xticks(turn, [])
    edge = 1.08 * axis.get_ylim()[1]
    for angle, domain in zip(turn, domains, strict=True):
        side = "left" if math.sin(angle) > 0.3 else "right" if math.sin(angle) < -0.3 else "center"
        axis.text(angle, edge, domain, ha=side, va="center", fontsize=7.5)
    axis.tick_params(axis="y", labelsize=6.5, labelcolor=SOFT)
    axis.grid(True, color=RULE)
    axis.spines["polar"].set_color(RULE)


def submetric_heatmap(results: Results) -> list[Plot]:
    changes = metric_changes(results)
    macro = results.main.select("pool", "anchor", "gain", name=pl.lit(results.macro_name))
    rows = pl.concat([changes.select("pool", "anchor", "gain", "name"), macro])
    names = rows["name"].unique(maintain_order=True).to_list()
    pools = [pool for pool in results.pools if pool in set(rows["pool"])]
    widest = max(len(results.anchors(pool)) for pool in pools)
    figure, axes = _wrapped(
        len(pools), (max(2.6, 0.52 * widest + 0.5), 0.27 * len(names) + 0.9), sharey=True
    )
    for axis, pool in zip(axes[0], pools, strict=True):
        order = {"name": names, "anchor": results.anchors(pool)}
        here = rows.filter(pl.col("pool") == pool)
        _heat(
            axis,
            100 * matrix(here, "name", "anchor", "gain", order),
            names,
            order["anchor"],
            text=7,
        )
        axis.axhline(len(names) - 1.5, color=INK, lw=1)
        axis.set_title(pool)
    caption = "Gain in points on every reported metric. Colours are scaled within each pool."
    return [Plot("submetric_heatmap", "Gain on every metric", caption, figure)]


PLOT_BUILDERS: dict[str, Callable[[Results], list[Plot]]] = {
    "motivation": motivation,
    "deficit_gain": deficit_gain,
    "domain_gain_matrix": domain_gain_matrix,
    "directional": directional,
    "layerwise": layerwise,
    "ablation_bar": ablation_bar,
    "ablation_domain": ablation_domain,
    "sensitivity": sensitivity,
    "radar": radars,
    "submetric_heatmap": submetric_heatmap,
}
"""Label -> what draws the figure (or figures) of that label."""
