"""`sigmerge analyze`: statistics, tables and figures of a store, or of the paper's own tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.publishing import (
    ANALYSIS_RULES,
    ResultKind,
    check_target,
    only_target,
    partial_of,
    publish,
    real_target,
    writing,
)
from sigmerge.engine.machine import LIBRARIES
from sigmerge.errors import require
from sigmerge.files.documents import write_json
from sigmerge.files.safe_open import remove
from sigmerge.jobs.steps import AnalyzeStep, Description
from sigmerge.lab.experiments.store import ANALYSIS, STORE, open_read_only
from sigmerge.records import Part

_KIND: ResultKind = "an analysis"


class Statement(Part):
    text: str
    paper: str
    here: str
    holds: bool


class Analyzed(Part):
    """Where the analysis was written, its main numbers, and which statements hold."""

    out: str
    headline: Mapping[str, str]
    statements: tuple[Statement, ...]
    tables: tuple[str, ...]
    figures: tuple[str, ...]
    skipped: Mapping[str, str]

    def _repr_html_(self) -> str:
        from sigmerge.pages.notebook import page

        return page(self.out, "index.html")


@dataclass(frozen=True)
class AnalyzeJob:
    """A store (or the folder of a suite) into a folder of tables, figures and one page."""

    store: Path
    out: Path | None = None
    split: str = "evaluation"
    title: str = "The experiment"

    @property
    def file(self) -> Path:
        return self.store / STORE if self.store.is_dir() else self.store

    @property
    def folder(self) -> Path:
        return self.out or self.file.parent / ANALYSIS

    def describe(self) -> Description:
        """The runs that the store holds, and where their analysis goes."""
        _require_analysis()
        self._check()
        with open_read_only(self.file) as store:
            runs = len(store.keys())
        size = self.file.stat().st_size
        step = AnalyzeStep(
            runs=runs,
            split=self.split,
            out=str(self.folder),
            bytes_to_read=size,
            peak_memory_bytes=LIBRARIES,
        )
        return Description((step,), 1)

    def _check(self) -> None:
        """Only an older analysis is replaced."""
        check_target(self.folder, True, [self.file], _KIND)

    def run(self) -> Analyzed:
        """The new analysis is made under a hidden name, and takes the place of an older one."""
        _require_analysis()
        from sigmerge.lab.analysis import claims
        from sigmerge.lab.analysis.experiment import headline, write_analysis
        from sigmerge.lab.analysis.results import results

        with open_read_only(self.file) as store:
            frames = store.frames()
        found = results(*frames, split=self.split)
        statements = claims.claims(found)
        self._check()
        out = real_target(self.folder)
        partial = partial_of(out)
        with only_target(out, True, _KIND):
            try:
                with writing(partial):
                    remove(partial)
                    written = write_analysis(found, partial, self.title)
                    write_json(partial / ANALYSIS_RULES, rules(found))
                publish(partial, out, overwrite=True, durable=True, kind=_KIND)
            finally:
                remove(partial, if_possible=True)
        return Analyzed(
            out=str(out.absolute()),
            headline={what: f"{number} ({beside})" for what, number, beside in headline(found)},
            statements=tuple(
                Statement(text=c.text, paper=c.paper, here=c.here, holds=c.holds)
                for c in statements
            ),
            tables=tuple(table.label for table in written.tables),
            figures=tuple(plot.label for plot in written.plots),
            skipped={item.label: item.reason for item in written.skipped},
        )


def _require_analysis() -> None:
    require("The analysis of an experiment", lab=["polars", "matplotlib", "scipy"])


def rules(found: Any) -> dict[str, Any]:
    """Results of the three selection rules of the paper, by pool; `sigmerge anchors` quotes it."""
    import polars as pl

    from sigmerge.lab.analysis import statistics
    from sigmerge.lab.analysis.results import NotInStore

    rows = {}
    try:
        main = found.main
    except NotInStore:
        return {"pools": {}}
    for pool in found.pools:
        pairs = main.filter(pl.col("pool") == pool)
        if pairs.height > 1:
            lost = statistics.regret(pairs["before"], pairs["after"])
            kept = statistics.rank_preservation(pairs["before"], pairs["after"])
            rank = statistics.spearman(pairs["before"], pairs["after"])
            rows[pool] = {
                "anchors": pairs.height,
                "regret": {n: getattr(lost, n) for n in ("strongest", "random", "weakest")},
                "pairs_in_order": kept.hits,
                "pairs": kept.of,
                "spearman": None if rank != rank else rank,
            }
    return {"made_by": f"sigmerge analyze STORE ({ANALYSIS_RULES})", "pools": rows}
