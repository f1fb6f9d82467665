"""The numbers of the paper's tables, as printed: one CSV file per table, named by its label.

`references.csv` is no table of the paper. It never prints the scores of the experts. Six of the
fifteen reference scores follow from one stated gap each (gap + printed score); nine are fitted:
four-decimal scores with which all statements about gaps hold at the same time.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cached_property
from importlib import resources

import numpy as np

from sigmerge.method.shapes import Float64

POOLS = ("Llama-3.2-3B", "Llama-3.1-8B-Instruct", "Gemma-2-2B-it")
PRINTED_ANCHORS = ("Linear", "TA", "TIES", "DARE", "DARE-TIES", "Fisher", "RegMean")
PAPER_DOMAINS = ("math", "instruction", "coding", "multilingual", "safety")
BASELINES = ("CABS", "CAT", "LiNeS", "LOT", "MERGE3")

Row = dict[str, str]
ByAnchor = Float64[np.ndarray, "pools domains anchors"]


def table(label: str) -> list[Row]:
    """The rows of a table; every cell is text as printed."""
    file = resources.files("research.published").joinpath(f"{label}.csv")
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))


def labels() -> list[str]:
    """Labels of all tables that are here."""
    folder = resources.files("research.published")
    names = (entry.name for entry in folder.iterdir())
    return sorted(name[:-4] for name in names if name.endswith(".csv") and name != "references.csv")


@dataclass(frozen=True)
class PrintedMetric:
    """One column of a submetric table: 21 scores after the repair and 21 changes, pool by pool."""

    repaired: Float64[np.ndarray, "pools anchors"]
    delta: Float64[np.ndarray, "pools anchors"]


class PublishedTables:
    """The tables as arrays, fractions throughout."""

    @cached_property
    def _domain_rows(self) -> list[Row]:
        return [row for k in range(3) for row in table(f"dom_p{k}")]

    def _by_anchor(self, kind: str, domains: tuple[str, ...]) -> ByAnchor:
        found = {
            (row["pool"], row["domain"]): [float(row[anchor]) for anchor in PRINTED_ANCHORS]
            for row in self._domain_rows
            if row["row"] == kind
        }
        return np.array([[found[pool, domain] for domain in domains] for pool in POOLS])

    @cached_property
    def before(self) -> ByAnchor:
        return self._by_anchor("anchor", PAPER_DOMAINS)

    @cached_property
    def after(self) -> ByAnchor:
        return self._by_anchor("repaired", PAPER_DOMAINS)

    @cached_property
    def printed_gain(self) -> ByAnchor:
        return self._by_anchor("gain", PAPER_DOMAINS)

    @cached_property
    def macro_before(self) -> Float64[np.ndarray, "pools anchors"]:
        return self._by_anchor("anchor", ("macro",))[:, 0]

    @cached_property
    def macro_after(self) -> Float64[np.ndarray, "pools anchors"]:
        return self._by_anchor("repaired", ("macro",))[:, 0]

    @property
    def macro_gain(self) -> Float64[np.ndarray, "pools anchors"]:
        return self.macro_after - self.macro_before

    @cached_property
    def baseline(self) -> Float64[np.ndarray, "pools domains baselines"]:
        return self._baseline(PAPER_DOMAINS)

    @cached_property
    def baseline_macro(self) -> Float64[np.ndarray, "pools baselines"]:
        return self._baseline(("macro",))[:, 0]

    def _baseline(self, domains: tuple[str, ...]) -> np.ndarray:
        found = {(row["pool"], row["domain"]): row for row in table("baseline_dom")}
        return np.array(
            [[[float(found[p, d][b]) for b in BASELINES] for d in domains] for p in POOLS]
        )

    @cached_property
    def reference(self) -> Float64[np.ndarray, "pools domains"]:
        """Inferred scores of the strongest experts (see the module's docstring)."""
        found = {(row["pool"], row["domain"]): float(row["score"]) for row in table("references")}
        return np.array([[found[pool, domain] for domain in PAPER_DOMAINS] for pool in POOLS])

    @cached_property
    def metrics(self) -> dict[str, PrintedMetric]:
        """Submetric -> scores after the repair and changes."""
        found: dict[str, dict[tuple[str, str], Row]] = {}
        for label in ("math", "instr", "coding", "multi", "safety"):
            for row in table(f"sub_{label}"):
                found.setdefault(row["metric"], {})[row["pool"], row["anchor"]] = row
        return {
            name: PrintedMetric(
                *(
                    np.array([[float(rows[p, a][column]) for a in PRINTED_ANCHORS] for p in POOLS])
                    for column in ("repaired", "delta")
                )
            )
            for name, rows in found.items()
        }

    @cached_property
    def ablation(self) -> dict[str, Float64[np.ndarray, "pools columns"]]:
        """Variant -> macro score and the five domain scores, per pool."""
        variants: dict[str, list[list[float]]] = {}
        for row in table("ablation_full"):
            variants.setdefault(row["variant"], []).append(
                [float(row[column]) for column in ("macro", *PAPER_DOMAINS)]
            )
        return {name: np.array(rows) for name, rows in variants.items()}

    @cached_property
    def controls(self) -> dict[str, list[Row]]:
        """Directional control -> its row in each pool."""
        found: dict[str, list[Row]] = {}
        for row in table("directional_full"):
            found.setdefault(row["control"], []).append(row)
        return found

    @cached_property
    def sweeps(self) -> tuple[list[Row], list[Row]]:
        return table("sens_p0"), table("sens_p1")
