"""A small experiment with every kind of run: seeded numbers in the proportions of the paper's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from sigmerge.lab.analysis.results import Results, results
from sigmerge.lab.experiments.store import (
    BuildCost,
    Signals,
    StoredPool,
    StoredRun,
    StoredScore,
    create,
    open_read_only,
)

DOMAINS = ("math", "instruction", "coding", "multilingual", "safety")
POOLS = ("Llama-3.2-3B", "Llama-3.1-8B-Instruct", "Gemma-2-2B-it")
ANCHORS = {"Linear": 1, "TA": 1, "TIES": 1, "DARE": 3, "Fisher": 1}  # name -> seeds
BASELINES = {"CABS": 1, "LiNeS": 1, "MERGE3": 3}
BENCHMARKS = {
    "math": {"GSM8K": ("flex", "strict")},
    "instruction": {"IFEval": ("prompt strict", "inst strict")},
    "coding": {"HumanEval+": ("pass@1", "pass@10"), "MBPP+": ("pass@1", "pass@10")},
    "multilingual": {"mMMLU": ("acc",), "mARC": ("acc_norm",)},
    "safety": {"XSTest": ("accuracy",), "HarmBench": ("refused",)},
}
CONSTANTS = {"c_min": 0.10, "c_max": 0.45, "scale": 0.60}
SWEEPS = {"c_min": (0.0, 0.05, 0.15), "c_max": (0.35, 0.55, 0.65), "scale": (0.4, 0.8, 1.0)}
CONTROLS = {  # setting -> (seeds, part of the gain it keeps)
    "inverted_capacity": (1, 0.26),
    "permuted_capacity": (3, 0.37),
    "inverted_share": (1, 0.14),
    "random_share": (3, 0.45),
    "random_mask": (3, 0.22),
    "all_random": (5, 0.0),
}
ABLATIONS = {"uniform_capacity": (1, -0.1), "equal_share": (1, 0.05), "sparse_update": (3, 0.7)}
VIEWS = {"view_sign": 0.66, "view_representation": 0.42, "view_direction": 0.34}
ORDERS = {"order_random": (3, 0.95), "order_reverse": (1, 0.90)}
LAYERS = 28


@dataclass
class Experiment:
    """Makes records one after the other; `position` counts them."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    noise: np.random.Generator = field(default_factory=lambda: np.random.default_rng(8))
    position: int = 0

    def scores(self, level: dict[str, float]) -> tuple[StoredScore, ...]:
        """Benchmarks around the domain's level, on two splits."""
        rows = []
        for split, items in (("evaluation", 400), ("calibration", 100)):
            for domain, marks in BENCHMARKS.items():
                for mark, metrics in marks.items():
                    for k, metric in enumerate(metrics):
                        value = level[domain] + 0.06 * k + self.rng.normal(0, 0.004)
                        clipped = float(np.clip(value, 0, 1))
                        around = self.noise.normal(0, 0.1, items) if k == 0 else np.empty(0)
                        each = tuple(clipped + around - around.mean()) if k == 0 else ()
                        rows.append(
                            StoredScore(domain, mark, metric, clipped, k == 0, items, split, each)
                        )
        return tuple(rows)

    def record(
        self, kind: str, pool: StoredPool, method: str, level: dict[str, float], **more
    ) -> StoredRun:
        self.position += 1
        made = StoredRun(
            kind=kind,
            pool=pool,
            method=method,
            suite_key="suite",
            recipe_key=f"recipe {kind} {method} {more.get('setting', '')}",
            position=self.position,
            scores=self.scores(level),
            cost=BuildCost(wall_seconds=float(self.rng.uniform(1, 9))),
        )
        return replace(made, **more)

    def pool(self, k: int) -> Iterator[StoredRun]:
        rng, pool = self.rng, StoredPool(POOLS[k], f"pool {k}", DOMAINS)
        low = dict(zip(DOMAINS, rng.uniform(0.25, 0.45, 5), strict=True))
        high = {d: low[d] + rng.uniform(0.1, 0.35) for d in DOMAINS}
        for expert in DOMAINS:
            level = {d: high[d] if d == expert else low[d] for d in DOMAINS}
            yield self.record("expert", pool, expert, level)
        signals = self.profile()
        for name, seeds in ANCHORS.items():
            for seed in range(seeds):
                yield from self.anchor(pool, name, seed, low, high, signals)
        for name, seeds in BASELINES.items():
            for seed in range(seeds):
                level = {
                    d: low[d] + 0.55 * (high[d] - low[d]) + rng.normal(0, 0.02) for d in DOMAINS
                }
                cost = (
                    BuildCost(20.0, 7200.0, 20.0, 0, 240, 1500, 0, 240)
                    if name == "MERGE3"
                    else BuildCost(5.0, 3600.0)
                )
                yield self.record("baseline", pool, name, level, seed=seed, cost=cost)

    def profile(self) -> Signals:
        depth = np.linspace(0, 1, LAYERS)
        views = {
            "representation": 0.02 + 0.3 * depth**2 + self.rng.normal(0, 0.01, LAYERS),
            "direction": 0.46 + 0.03 * np.sin(4 * depth) + self.rng.normal(0, 0.003, LAYERS),
            "sign": 0.55 + 0.12 * np.exp(-(((depth - 0.6) / 0.3) ** 2)),
        }
        scaled = [(v - v.min()) / (v.max() - v.min()) for v in views.values()]
        conflict = np.mean(scaled, axis=0)
        return Signals(
            views={name: view.tolist() for name, view in views.items()},
            conflict=conflict.tolist(),
            capacity=(0.45 - 0.35 * conflict).tolist(),
        )

    def anchor(
        self, pool: StoredPool, name: str, seed: int, low: dict, high: dict, signals: Signals
    ) -> Iterator[StoredRun]:
        rng = self.rng
        level = {d: low[d] + rng.uniform(0.1, 0.6) * (high[d] - low[d]) for d in DOMAINS}
        deficit = {d: max(0.0, high[d] - level[d]) for d in DOMAINS}
        share = {d: g / sum(deficit.values()) for d, g in deficit.items()}
        base = {"anchor": name, "anchor_key": f"{name} {seed}", "anchor_seed": seed}
        measured = replace(
            signals,
            deficit=deficit,
            share=share,
            claim_order=sorted(share, key=lambda d: -share[d]),
        )
        gain = {d: rng.uniform(0.35, 0.75) * g for d, g in deficit.items()}
        common = {**base, "signals": measured, "constants": CONSTANTS}

        def repair(kind: str, setting: str, keep: float, at: int = 0, **more) -> StoredRun:
            scores = {d: level[d] + (keep + rng.normal(0, 0.02)) * gain[d] for d in DOMAINS}
            return self.record(
                kind, pool, "sigmerge", scores, setting=setting, seed=at, **{**common, **more}
            )

        yield self.record("anchor", pool, name, level, seed=seed, **base)
        cost = BuildCost(3.0, 2160.0, 9.0, 5, 5, 500, 100, 0, 30, 3000)
        yield repair("default", "default", 1.0, cost=cost)
        for k in (1, 2):
            moved = {d: s + rng.uniform(0, 0.1) for d, s in share.items()}
            other = Signals(share={d: s / sum(moved.values()) for d, s in moved.items()})
            yield replace(repair("partition", f"partition {k}", 0, k, signals=other), scores=())
        if name != "DARE" or seed != 0:
            return
        for kind, settings in (("ablation", ABLATIONS), ("control", CONTROLS), ("order", ORDERS)):
            for setting, (seeds, keep) in settings.items():
                for at in range(seeds):
                    yield repair(kind, setting, keep, at)
        for setting, keep in VIEWS.items():
            yield repair("view", setting, keep)
        for constant, values in SWEEPS.items():
            for value in values:
                keep = 1 - abs(value - CONSTANTS[constant])
                changed = {**CONSTANTS, constant: value}
                yield repair("sweep", f"{constant}={value:g}", keep, constants=changed)
        yield repair("ours", "scale 1.0", 1.1, constants={**CONSTANTS, "scale": 1.0})


def records(pools: int = 3) -> list[StoredRun]:
    experiment = Experiment()
    return [record for k in range(pools) for record in experiment.pool(k)]


def make_store(path: Path, kept=lambda record: True, pools: int = 3) -> Path:
    with create(path) as store:
        for record in records(pools):
            if kept(record):
                store.append(record)
    return path


def read(path: Path, split: str = "evaluation") -> Results:
    with open_read_only(path) as store:
        return results(*store.frames(), split=split)
