"""Merges by masks over single entries: Consensus TA, localize-and-stitch without data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sigmerge.core import Array
from sigmerge.core import merge as loops
from sigmerge.core.select import Cut
from sigmerge.operators.base import (
    LAMBDA,
    OUTSIDE,
    WEIGHT,
    Chunk,
    Operator,
    Parameter,
    Passes,
    Site,
    Tile,
)
from sigmerge.operators.task_arithmetic import task_vectors
from sigmerge.operators.ties import KEEP_NONE, UNCUT, find_cuts, one_scope, ranks


class Consensus(Operator):
    """λ Σ_d Δ_d at coordinates that at least `agree` experts need, and θ_ref elsewhere.

    Expert d needs a coordinate (its TALL mask) where |Δ_d| ≥ `share` · |Σ Δ − Δ_d|. The authors
    choose the share for every task on validation data, between 0.2 and 0.6.
    """

    name = "consensus"
    title = "Consensus TA"
    paper = (
        "Wang et al., Localizing task information for improved model merging and compression, "
        "ICML 2024 (arXiv:2405.07813)"
    )
    parameters = (
        WEIGHT,
        Parameter("lambda", float, LAMBDA.doc, 0.4, 0.4),
        Parameter("share", float, "λ_t of the TALL mask", 0.4, 0.4, True, 0),
        Parameter("agree", int, "experts that must need a coordinate", 2, 2, low=0),
        OUTSIDE,
    )

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        site = chunk.site
        shares = np.array(site.settings["share"], np.float32)
        for tile in task_vectors(chunk):
            tile.experts *= site.weights()[:, None]
            loops.weighted_sum(tile.experts, np.ones(len(shares), np.float32), tile.out)
            needed = np.zeros(tile.out.size, np.int32)
            for row, share in zip(tile.experts, shares, strict=True):
                needed += np.abs(row) >= share * np.abs(tile.out - row)
            tile.out *= np.float32(site.settings["lambda"])
            tile.out[needed < site.settings["agree"]] = 0.0
            yield tile


class LocalizeStitch(Operator):
    """λ times the mean of the task vectors' largest entries over the experts that have one there.

    Every expert keeps the `density` largest entries of its task vector, over the whole model or
    tensor by tensor; entries equal to the least stay. This is the authors' variant without data;
    with data they learn the masks.
    """

    name = "localize_stitch"
    title = "Localize-and-stitch"
    paper = (
        "He et al., Localize-and-stitch: efficient model merging via sparse task arithmetic, "
        "TMLR 2025 (arXiv:2408.13656)"
    )
    parameters = (
        WEIGHT,
        LAMBDA,
        Parameter("density", float, "fraction of entries kept", 0.05, 0.05, True, 0.0, 1.0),
        Parameter("scope", ("tensor", "model"), "what a threshold is taken over", "model", "model"),
        OUTSIDE,
    )

    def check(self, sites: Sequence[Site]) -> list[str]:
        return one_scope(sites)

    def survey(self, sites: Sequence[Site]) -> Passes:
        if not sites or sites[0].settings["scope"] == "tensor":
            return None
        total = sum(site.size for site in sites)
        cuts, _ = yield from find_cuts(ranks(sites[0], total), total)
        return cuts

    def prepare(self, site: Site, survey: Any) -> Passes:
        if survey is not None:
            return survey
        cuts, _ = yield from find_cuts(ranks(site, site.size), site.size)
        return cuts

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        site = chunk.site
        for tile in task_vectors(chunk):
            count = np.zeros(tile.out.size, np.float32)
            tile.out[:] = 0.0
            for row, weight, cut in zip(tile.experts, site.weights(), chunk.state, strict=True):
                kept = largest(row, cut)
                tile.out += np.where(kept, weight * row, np.float32(0))
                count += kept
            tile.out /= np.maximum(count, np.float32(1))
            tile.out *= np.float32(site.settings["lambda"])
            yield tile


def largest(values: Array, cut: Cut) -> Array:
    """Which entries are at least as large in magnitude as the least that is kept."""
    if cut == UNCUT:
        return np.ones(values.size, bool)
    if cut == KEEP_NONE:
        return np.zeros(values.size, bool)
    bits = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    return bits >= np.uint32(cut.threshold)
