"""The tables of the paper, made from the results of an experiment.

A builder per table, under the paper's label. A builder raises `NotInStore` where the experiment
did not make the runs it needs; the table is then skipped with that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import polars as pl

from sigmerge.lab.analysis import statistics
from sigmerge.lab.analysis.claims import claims
from sigmerge.lab.analysis.derived import (
    SWEPT,
    Skipped,
    cells,
    known_before,
    metric_changes,
    moved_shares,
    profiles,
    sweeps,
)
from sigmerge.lab.analysis.intervals import paired_intervals, variant_intervals
from sigmerge.lab.analysis.results import NotInStore, Results
from sigmerge.lab.analysis.variants import (
    ablation,
    directional,
    order,
    ours,
    sensitivity,
    single_view,
)
from sigmerge.pages.table import As, Cell, Changed, Column, Form, Table


def make_tables(results: Results) -> tuple[list[Table], list[Skipped]]:
    """All tables the store has the runs for, and why the others are missing."""
    made: list[Table] = []
    skipped = []
    for label, build in TABLE_BUILDERS.items():
        try:
            made += build(results)
        except NotInStore as reason:
            skipped.append(Skipped(label, str(reason)))
    return made, skipped


def _mean(values: Iterable[float | None]) -> float | None:
    """None as soon as one value is missing."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return float(np.mean(known)) if known and len(known) == len(listed) else None


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")


def gap_reduction(results: Results) -> list[Table]:
    rows: list[list[Cell]] = []
    for pool in results.pools:
        pairs = results.main.filter(pl.col("pool") == pool)
        before, after = _mean(pairs["gap_before"]), _mean(pairs["gap_after"])
        if before is not None and after is not None:
            rows.append([pool, before, after, after - before])
    if not rows:
        raise NotInStore("the store holds no scores of experts")
    rows.append(["All", *(float(np.mean([row[k] for row in rows])) for k in (1, 2, 3))])
    columns = (
        Column("pool"),
        Column("anchor", "percent"),
        Column("+ repair", "percent"),
        Column("reduction", "points"),
    )
    return [
        Table(columns, rows, "Residual expert gap, mean over domains and anchors", "residual_gap")
    ]


def main_gain(results: Results) -> list[Table]:
    anchors = results.anchors()
    rows: list[list[Cell]] = []
    for pool in results.pools:
        found = {
            row["anchor"]: row for row in results.main.filter(pl.col("pool") == pool).to_dicts()
        }
        for name, key in (("anchor", "before"), ("+ repair", "after"), ("gain", "gain")):
            values = [found[a][key] if a in found else None for a in anchors]
            known = [v for v in values if v is not None]
            if known:
                cells = [*values, float(np.mean(known))]
                form: Form = "points" if key == "gain" else "percent"
                rows.append([pool, name, *(As(v, form) for v in cells)])
    columns = [Column("pool"), Column("row"), *(Column(a, "number") for a in [*anchors, "mean"])]
    return [
        Table(
            columns,
            rows,
            f"{results.macro_name} of each anchor and of the repair on top of it",
            "main_gain",
        )
    ]


def paired_statistics(results: Results) -> list[Table]:
    """The paired comparison in numbers: over all pools, and in each."""
    by_domain = results.main_by_domain
    rows: list[list[Cell]] = []
    for name in ["All", *results.pools]:
        here = pl.lit(True) if name == "All" else pl.col("pool") == name
        pairs, triples = results.main.filter(here), by_domain.filter(here)
        if pairs.is_empty():
            continue
        before, after, gain = (pairs[c].to_numpy() for c in ("before", "after", "gain"))
        known = triples.drop_nulls("gap_before")
        rows.append(
            [
                name,
                str(statistics.Count(int((gain > 0).sum()), gain.size)),
                float(gain.mean()),
                float(gain.min()),
                float(gain.max()),
                statistics.relative_gain(before, after),
                statistics.wilcoxon(before, after),
                statistics.spearman(known["gap_before"], known["gain"]),
                str(_kept(pairs)),
            ]
        )
    columns = (
        Column("pool"),
        Column("pairs improved"),
        Column("mean gain", "points"),
        Column("smallest", "points"),
        Column("largest", "points"),
        Column("relative", "share"),
        Column("Wilcoxon p", "p"),
        Column("Spearman deficit–gain", "number"),
        Column("anchor pairs that keep their order"),
    )
    return [Table(columns, rows, "Paired statistics of the repair", "paired_statistics")]


def _kept(pairs: pl.DataFrame) -> statistics.Count:
    """Rank preservation, summed over pools."""
    counts = [
        statistics.rank_preservation(group["before"], group["after"])
        for _, group in pairs.group_by("pool", maintain_order=True)
    ]
    return statistics.Count(sum(c.hits for c in counts), sum(c.of for c in counts))


def recovered(results: Results) -> list[Table]:
    known = results.main_by_domain.drop_nulls("gap_before")
    if known.is_empty():
        raise NotInStore("the store holds no scores of experts")
    rows: list[list[Cell]] = []
    for domain in results.domains:
        here = known.filter(pl.col("domain") == domain)
        if here.is_empty():
            continue
        deficit, gain = here["gap_before"].to_numpy(), here["gain"].to_numpy()
        whole = float(deficit.mean())
        low, high = statistics.t_interval(gain)
        interval = (low / whole, high / whole) if whole > 0 else (None, None)
        part = statistics.recovered_fraction(deficit, gain)
        rows.append([domain, whole, float(gain.mean()), part, *interval])
    columns = (
        Column("domain"),
        Column("deficit", "percent"),
        Column("gain", "points"),
        Column("recovered %", "share"),
        Column("95 % from", "share"),
        Column("to", "share"),
    )
    return [
        Table(
            columns,
            rows,
            "Deficit at the anchor and the part of it that the repair recovers",
            "recovered",
        )
    ]


def domain_tables(results: Results) -> list[Table]:
    tables = []
    for k, pool in enumerate(results.pools):
        anchors = results.anchors(pool)
        triples = results.main_by_domain.filter(pl.col("pool") == pool)
        pairs = results.main.filter(pl.col("pool") == pool)
        if triples.is_empty():
            continue
        rows: list[list[Cell]] = []
        for domain in [results.macro_name, *results.domains]:
            frame = (
                pairs
                if domain == results.macro_name
                else triples.filter(pl.col("domain") == domain)
            )
            found = {row["anchor"]: row for row in frame.to_dicts()}
            for name, key in (("anchor", "before"), ("+ repair", "after"), ("gain", "gain")):
                form: Form = "points" if key == "gain" else "percent"
                rows.append(
                    [
                        domain,
                        name,
                        *(As(found[a][key], form) if a in found else None for a in anchors),
                    ]
                )
        columns = [Column("domain"), Column("row"), *(Column(a, "number") for a in anchors)]
        tables.append(Table(columns, rows, f"Paired results by domain: {pool}", f"dom_p{k}"))
    return tables


def baselines(results: Results) -> list[Table]:
    methods = results.baselines["method"].unique(maintain_order=True).to_list()
    score = {(r["pool"], r["method"]): r["macro"] for r in results.baselines.to_dicts()}
    best = {
        pool: max(results.main.filter(pl.col("pool") == pool)["after"], default=None)
        for pool in results.pools
    }
    rows: list[list[Cell]] = [
        [method, *(score.get((pool, method)) for pool in results.pools)] for method in methods
    ]
    rows.append(["best + repair", *(best[pool] for pool in results.pools)])
    margins: list[Cell] = []
    for pool in results.pools:
        others = [score[pool, m] for m in methods if (pool, m) in score]
        known = others and best[pool] is not None
        margins.append(As(best[pool] - max(others) if known else None, "points"))
    rows.append(["margin", *margins])
    columns = [Column("method"), *(Column(pool, "percent") for pool in results.pools)]
    return [
        Table(
            columns,
            rows,
            f"{results.macro_name} of the baselines and of the best repaired checkpoint",
            "baselines",
        )
    ]


def baseline_domains(results: Results) -> list[Table]:
    runs = set(results.baselines["run"])
    methods = results.baselines["method"].unique(maintain_order=True).to_list()
    by_domain = results.by_domain.filter(pl.col("run").is_in(runs))
    whole = results.baselines.select(
        "pool", "method", domain=pl.lit(results.macro_name), score="macro"
    )
    parts = by_domain.select("pool", "method", "domain", "score")
    score = {
        (r["pool"], r["method"], r["domain"]): r["score"]
        for r in pl.concat([whole, parts]).to_dicts()
    }
    rows = [
        [pool, domain, *(score.get((pool, method, domain)) for method in methods)]
        for pool in results.pools
        for domain in [results.macro_name, *results.domains]
    ]
    columns = [Column("pool"), Column("domain"), *(Column(m, "percent") for m in methods)]
    return [Table(columns, rows, "Baselines by domain", "baseline_dom")]


def ranks(results: Results) -> list[Table]:
    within = cells(results)
    average, first = statistics.average_ranks(within), statistics.first_places(within)
    ours = results.main.filter(pl.col("pool").is_in(results.baselines["pool"].to_list()))
    method = ours["method"][0]
    rows: list[list[Cell]] = []
    for name in sorted(average, key=lambda m: average[m]):
        won: Cell = None
        if name != method:
            counts = [
                statistics.wins(
                    ours.filter(pl.col("pool") == row["pool"])["after"].to_numpy(), [row["macro"]]
                )
                for row in results.baselines.filter(pl.col("method") == name).to_dicts()
            ]
            won = str(statistics.Count(sum(c.hits for c in counts), sum(c.of for c in counts)))
        rows.append([name, average[name], str(statistics.Count(first[name], len(within))), won])
    columns = (
        Column("method"),
        Column("average rank", "number"),
        Column("first places"),
        Column("beaten by repaired checkpoints"),
    )
    return [
        Table(
            columns, rows, "Ranks within pool-domain cells, and wins over all checkpoints", "ranks"
        )
    ]


def hyperparameters(results: Results) -> list[Table]:
    rows: list[list[Cell]] = []
    found = sweeps(results)
    for constant, name in SWEPT.items():
        here = [sweep for sweep in found if sweep.constant == constant]
        if here:
            values = sorted({value for sweep in here for value in sweep.values})
            rows.append([name, f"{here[0].default:g}", ", ".join(f"{v:g}" for v in values)])
    columns = (Column("constant"), Column("final value"), Column("values tried"))
    return [Table(columns, rows, "Constants and the values tried", "hyperparameter_protocol")]


def split_membership(results: Results) -> list[Table]:
    splits = ("full", "calibration", "evaluation")
    sizes: dict[str, dict[str, int]] = {}
    rows = results.scores.group_by("benchmark", "split", maintain_order=True).agg(
        pl.col("items").max()
    )
    for row in rows.to_dicts():
        sizes.setdefault(row["benchmark"], {})[row["split"]] = row["items"]
    here = [split for split in splits if any(split in size for size in sizes.values())]
    body: list[list[Cell]] = [[name, *(size.get(s) for s in here)] for name, size in sizes.items()]
    totals = [sum(size.get(s, 0) for size in sizes.values()) for s in here]
    body.append(["Total", *totals])
    columns = [Column("benchmark"), *(Column(f"{split} items", "count") for split in here)]
    return [Table(columns, body, "Benchmarks and the items that were scored", "split_membership")]


TIMES = {"wall_seconds": "wall s", "spent_seconds": "wall s in all", "gpu_seconds": "GPU h"}
COUNTED = {
    "forward_calls": "forward calls",
    "evaluation_calls": "evaluation calls",
    "labelled": "labelled",
    "unlabelled": "unlabelled",
    "iterations": "search iterations",
    "spent_calls": "calls in all",
    "spent_labelled": "labelled in all",
}
"""Costs of a run and their titles: as the paper counts them, and all that was spent (ruling 25)."""


def efficiency(results: Results) -> list[Table]:
    """Mean cost of each method over pools, anchors and seeds; the repair's is beyond the anchor."""
    kinds = {"anchor": "dense anchor", "default": "+ repair", "baseline": ""}
    runs = results.runs.filter(pl.col("kind").is_in(list(kinds)))
    name = (
        pl.when(pl.col("kind") == "baseline")
        .then(pl.col("method"))
        .otherwise(pl.col("kind").replace(kinds))
    )
    grouped = (
        runs.with_columns(name=name)
        .group_by("name", maintain_order=True)
        .agg(pl.col(*TIMES, *COUNTED).mean(), runs=pl.len())
    )
    if grouped.is_empty():
        raise NotInStore("the store holds no anchor, repair or baseline")
    rows = [
        [
            r["name"],
            r["wall_seconds"],
            r["spent_seconds"],
            None if r["gpu_seconds"] is None else r["gpu_seconds"] / 3600,
            *(r[count] for count in COUNTED),
            r["runs"],
        ]
        for r in grouped.to_dicts()
    ]
    columns = [
        Column("method"),
        *(Column(title, "number") for title in TIMES.values()),
        *(Column(title, "count") for title in (*COUNTED.values(), "runs")),
    ]
    return [
        Table(
            columns,
            rows,
            "Cost of building a checkpoint from nothing, measured; the repair's is on top of its "
            "anchor. As the paper counts, and in all: scores of the experts and of candidates too",
            "efficiency",
        )
    ]


def per_seed(results: Results) -> list[Table]:
    gains = results.pairs.select(
        "pool", "anchor", "anchor_seed", "gain", quantity=pl.lit("paired gain")
    )
    gains = gains.rename({"anchor": "method", "anchor_seed": "seed", "gain": "value"})
    found = [gains]
    others = results.checkpoints.filter(pl.col("kind") == "baseline")
    if not others.is_empty():
        found.append(
            others.select(
                "pool", "method", "seed", value="macro", quantity=pl.lit(results.macro_name)
            )
        )
    rows: list[list[Cell]] = []
    frame = pl.concat([f.select("quantity", "pool", "method", "seed", "value") for f in found])
    seeds = frame["seed"].unique().sort().to_list()
    for (quantity, pool, method), group in frame.group_by(
        "quantity", "pool", "method", maintain_order=True
    ):
        if group.height > 1:
            s = statistics.seed_summary(group["value"])
            by = dict(zip(group["seed"], group["value"], strict=True))
            rows.append(
                [quantity, pool, method, *(by.get(k) for k in seeds), s.mean, s.std, s.range]
            )
    if not rows:
        raise NotInStore("no anchor and no baseline has more than one seed")
    titles = [*(f"seed {k}" for k in seeds), "mean", "std", "range"]
    columns = [
        Column("quantity"),
        Column("pool"),
        Column("method"),
        *(Column(title, "percent") for title in titles),
    ]
    return [
        Table(
            columns,
            rows,
            "Over seeds: paired gains of stochastic anchors, scores of stochastic baselines",
            "perseed",
        )
    ]


def anchor_regret(results: Results) -> list[Table]:
    rules = {}
    for pool in results.pools:
        pairs = results.main.filter(pl.col("pool") == pool)
        if pairs.height > 1:
            rules[pool] = statistics.regret(pairs["before"], pairs["after"])
    if not rules:
        raise NotInStore("no pool has more than one repaired anchor")
    rows: list[list[Cell]] = []
    for rule in ("strongest", "random", "weakest"):
        values = [getattr(r, rule) for r in rules.values()]
        rows.append([f"{rule} anchor", *values, float(np.mean(values))])
    columns = [Column("selection rule"), *(Column(p, "percent") for p in [*rules, "mean"])]
    return [
        Table(
            columns,
            rows,
            f"{results.macro_name} points given up against the best anchor after repair",
            "anchor_regret",
        )
    ]


def anchor_statistics(results: Results) -> list[Table]:
    """Correlation of each of the nine with the gain, the repaired score and the repaired gap."""
    frame = known_before(results)
    rows: list[list[Cell]] = []
    targets = ("gain", "score after", "gap after")
    for name in frame.columns:
        for target in targets if name not in ("pool", "anchor", *targets) else ():
            within = [frame.filter(pl.col("pool") == pool) for pool in results.pools]
            rows.append(
                [
                    name,
                    target,
                    statistics.spearman(frame[name], frame[target]),
                    *(statistics.spearman(f[name], f[target]) for f in within),
                ]
            )
    columns = [
        Column("statistic of the anchor"),
        Column("against"),
        Column("all", "number"),
        *(Column(pool, "number") for pool in results.pools),
    ]
    return [
        Table(
            columns,
            rows,
            "Spearman correlation of what is known before the repair",
            "anchor_statistics",
        )
    ]


def view_correlations(results: Results) -> list[Table]:
    rows: list[list[Cell]] = []
    for pool, run in profiles(results).items():
        found = statistics.view_correlations(run["views"])
        rows += [[pool, f"{a} – {b}", value] for (a, b), value in found.items()]
    columns = (Column("pool"), Column("views"), Column("Spearman over layers", "number"))
    return [Table(columns, rows, "Do the views measure one quantity?", "view_correlations")]


def partitions(results: Results) -> list[Table]:
    rows: list[list[Cell]] = [
        [moved.pool, moved.anchor, moved.anchor_seed, moved.partition, moved.move, moved.same_order]
        for moved in moved_shares(results)
    ]
    columns = (
        Column("pool"),
        Column("anchor"),
        Column("seed", "count"),
        Column("partition"),
        Column("largest move of a share", "number"),
        Column("claim order unchanged"),
    )
    return [Table(columns, rows, "Shares under other partitions", "partitions")]


def submetrics(results: Results) -> list[Table]:
    changes = metric_changes(results)
    tables = []
    for domain in results.domains:
        here = changes.filter(pl.col("domain") == domain)
        names = here["name"].unique(maintain_order=True).to_list()
        rows: list[list[Cell]] = []
        for (pool, anchor), group in here.group_by("pool", "anchor", maintain_order=True):
            by = {r["name"]: Changed(r["after"], r["gain"]) for r in group.to_dicts()}
            rows.append([pool, anchor, *(by.get(name) for name in names)])
        if rows:
            columns = [
                Column("pool"),
                Column("anchor"),
                *(Column(name, "number") for name in names),
            ]
            caption = f"Submetrics of {domain} after the repair, with the change against the anchor"
            tables.append(Table(columns, rows, caption, f"sub_{_slug(domain)}"))
    return tables


def statements(results: Results) -> list[Table]:
    found = claims(results)
    if not found:
        raise NotInStore("the store holds nothing that the paper makes a statement about")
    rows: list[list[Cell]] = [[c.text, c.paper, c.here, "yes" if c.holds else "NO"] for c in found]
    columns = [Column(title) for title in ("statement", "the paper", "here", "holds here")]
    caption = "The paper's main statements on these runs; several numbers are one for each pool"
    return [Table(columns, rows, caption, "statements")]


TABLE_BUILDERS: dict[str, Callable[[Results], list[Table]]] = {
    "statements": statements,
    "main_gain": main_gain,
    "paired_statistics": paired_statistics,
    "paired_intervals": paired_intervals,
    "residual_gap": gap_reduction,
    "recovered": recovered,
    "baselines": baselines,
    "ranks": ranks,
    "ablation": ablation,
    "directional_full": directional,
    "variant_intervals": variant_intervals,
    "single_view": single_view,
    "view_correlations": view_correlations,
    "order": order,
    "sens": sensitivity,
    "hyperparameter_protocol": hyperparameters,
    "ours": ours,
    "anchor_regret": anchor_regret,
    "anchor_statistics": anchor_statistics,
    "partitions": partitions,
    "perseed": per_seed,
    "efficiency": efficiency,
    "dom": domain_tables,
    "baseline_dom": baseline_domains,
    "sub": submetrics,
    "split_membership": split_membership,
}
"""Label -> what makes the table (or tables) of that label."""
