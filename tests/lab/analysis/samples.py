"""Synthetic runs with the proportions of real ones."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from sigmerge.method.deficit import best_scores
from sigmerge.pages.page import PageRun
from sigmerge.recipe.scored import TuneSection
from sigmerge.records import (
    PairedScores,
    Provenance,
    RepairPlan,
    TuneCall,
    TunedScores,
    TuneRecord,
)

DOMAINS = ("math", "instruction", "coding", "multilingual", "safety")
ANCHORS = ("Linear", "Task Arithmetic", "TIES", "DARE", "DARE-TIES", "Fisher", "RegMean")
RECIPE = """\
merge_method: ties
base_model: ./pool/reference
models:
  - {model: ./pool/math, name: math, parameters: {weight: 0.4, density: 0.2}}
  - {model: ./pool/instruction, name: instruction, parameters: {weight: 0.4, density: 0.2}}
  - {model: ./pool/coding, name: coding, parameters: {weight: 0.4, density: 0.2}}
  - {model: ./pool/multilingual, name: multilingual, parameters: {weight: 0.4, density: 0.2}}
  - {model: ./pool/safety, name: safety, parameters: {weight: 0.4, density: 0.2}}
dtype: bfloat16
repair:
  c_min: 0.10
  c_max: 0.45
  scale: 0.60
"""


def scores(seed: int, gain: float = 0.06) -> PairedScores:
    """Experts strong on their own domain, an anchor in between, a repair that moves by `gain`."""
    rng = np.random.default_rng(seed)
    level = dict(zip(DOMAINS, (0.52, 0.90, 0.57, 0.51, 0.84), strict=True))
    experts = {
        name: {d: 0.985 if d == name else level[d] + rng.normal(0, 0.012) for d in DOMAINS}
        for name in DOMAINS
    }
    anchor = {d: level[d] + (0.97 - level[d]) * rng.uniform(0.3, 0.8) for d in DOMAINS}
    repaired = {d: min(0.99, q + gain * rng.uniform(0.2, 1.8)) for d, q in anchor.items()}
    return PairedScores(experts=experts, anchor=anchor, repaired=repaired)


def plan(layers: int, measured: PairedScores, coordinates: int, seed: int = 0) -> RepairPlan:
    """A plan as the method would make it from these scores and smooth conflict views."""
    rng = np.random.default_rng(seed)
    depth = np.linspace(0, 1, layers)
    views = {
        "representation": 0.02 + 0.3 * depth**2 + rng.normal(0, 0.01, layers),
        "direction": 0.46 + 0.03 * np.sin(4 * depth) + rng.normal(0, 0.003, layers),
        "sign": 0.55 + 0.12 * np.exp(-(((depth - 0.6) / 0.3) ** 2)) + rng.normal(0, 0.01, layers),
    }
    scaled = [(v - v.min()) / (v.max() - v.min()) for v in views.values()]
    conflict = np.mean(scaled, axis=0)
    capacity = 0.45 - 0.35 * conflict
    best = best_scores(measured.experts)
    deficit = {d: max(0.0, best[d] - measured.anchor[d]) for d in DOMAINS}
    share = {d: g / sum(deficit.values()) for d, g in deficit.items()}
    quota = [[math.ceil(c * share[d] * coordinates) for d in DOMAINS] for c in capacity]
    mass = [[0.004 * k * rng.uniform(0.8, 1.2) for k in row] for row in quota]
    content = {
        "operator": "ties",
        "anchor": {},
        "selection": "magnitude",
        "update": "add",
        "domains": list(DOMAINS),
        "views": {name: view.tolist() for name, view in views.items()},
        "conflict": conflict.tolist(),
        "capacity": capacity.tolist(),
        "deficit": deficit,
        "share": share,
        "order": sorted(DOMAINS, key=lambda d: -share[d]),
        "coordinates": [coordinates] * layers,
        "quota": quota,
        "claimed": quota,
        "admitted_mass": mass,
        "scale": 0.6,
        "variant": "default",
        "seed": 0,
        "warnings": [],
    }
    return RepairPlan.model_validate(content)


def run(name: str, seed: int = 0, layers: int = 6, gain: float = 0.06) -> PageRun:
    measured = scores(seed, gain)
    provenance = {
        "inputs": [
            {
                "member": folder,
                "file": f"pool/{folder}/model.safetensors",
                "size": 2_871_296,
                "sha256": hashlib.sha256(folder.encode()).hexdigest(),
            }
            for folder in ("reference", *DOMAINS)
        ],
        "versions": {"sigmerge": "0.1.0", "python": "3.11.2", "torch": "2.13.0"},
        "device": "cpu, 2 threads",
        "engine": "local",
        "wall_seconds": 4.183,
        "peak_memory_bytes": 412_876_800,
        "bytes_read": 34_455_552,
        "bytes_written": 2_871_296,
    }
    return PageRun(
        name=name,
        recipe=RECIPE,
        plan=plan(layers, measured, 196_864 if layers < 10 else 218_112_000, seed),
        provenance=Provenance.model_validate(provenance),
        scores=measured,
        calibration=scores(seed + 100, gain),
        again=f"sigmerge run {'a-folder-of-some-length/' * 4}repaired/sigmerge/recipe.yaml again/",
    )


def tuned(calls: int = 12) -> TuneRecord:
    """A tuning that improves at every second call."""
    tried, best = [], 0.0
    for call in range(calls):
        value = 0.6 + 0.02 * (call // 2) - 0.03 * (call % 2)
        best = max(best, value)
        tried.append(
            TuneCall(
                call=call,
                anchor=ANCHORS[call % 2],
                value=value,
                best=best,
                error=0.01,
                weights=dict.fromkeys(DOMAINS, 0.3 + 0.02 * call),
                scores=dict.fromkeys(DOMAINS, value),
            )
        )
    after = dict.fromkeys(DOMAINS, best)
    shown = TunedScores(plain=dict.fromkeys(DOMAINS, 0.6), tuned=after)
    return TuneRecord(
        out="tuned", winner="tuned/winner", settings=TuneSection(calls=calls).model_dump(),
        anchors=ANCHORS[:2], experts={domain: {domain: 0.8} for domain in DOMAINS}, calls=tried,
        expert_runs=5, items_per_call=dict.fromkeys(DOMAINS, 100), stopped="calls",
        plain=0, chosen=calls - 2, calibration=shown, evaluation=shown, replayed=0,
        wall_seconds=60.0, peak_memory_bytes=400_000_000,
    )  # fmt: skip


def demo() -> list[PageRun]:
    """Seven anchors of a six-layer pool; the repair hurts one of them."""
    gains = (0.07, 0.05, 0.06, 0.04, -0.03, 0.06, 0.05)
    return [run(ANCHORS[seed], seed, gain=gain) for seed, gain in enumerate(gains)]
