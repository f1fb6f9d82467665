"""Every derived statement of the paper, computed again from the paper's own tables.

Statements that compare two tables (a macro score with the mean of its domains, a gain with a
difference) come first: they say how far the tables agree among themselves.
"""

from __future__ import annotations

from research.published import appendix, fractions, main_text
from research.published.data import PublishedTables
from research.published.ledger import Ledger, PrintedStatement

PAPER_SECTIONS = {
    "The tables among themselves": (main_text.tables, main_text.splits, fractions.statements),
    "Effectiveness of Deficit-Driven Allocation": (main_text.deficits, main_text.control_group),
    "Effectiveness of the Capacity Decomposition": (main_text.decomposition,),
    "Directional controls": (main_text.controls, main_text.control_ranges),
    "Paired Comparison with the Anchors": (main_text.pairs, main_text.gains_by_anchor),
    "Comparison with Baselines": (main_text.baselines, main_text.baseline_ranks),
    "App. Setup": (appendix.setup,),
    "App. Where the Capacity Comes From": (appendix.capacity,),
    "App. Which Domains Receive It": (
        appendix.regressions,
        appendix.task_arithmetic,
        appendix.margins,
    ),
    "App. Filling the Budget": (appendix.budget,),
    "App. Whether All Three Are Needed": (
        appendix.ablations,
        appendix.sparse_update,
        appendix.all_random,
    ),
    "App. Cost and Reproducibility": (appendix.cost,),
    "App. Hyperparameter Sensitivity": (appendix.sensitivity, appendix.best_constants),
    "App. Anchor Selection": (
        appendix.anchor_statistics,
        appendix.repaired_scores,
        appendix.selection,
    ),
    "App. Submetric-Level Results": (appendix.submetrics, appendix.regressed_submetrics),
}
"""Section of the paper -> what adds its statements."""


def recompute() -> list[PrintedStatement]:
    """All statements with their verdicts, in the paper's order."""
    paper, ledger = PublishedTables(), Ledger()
    for place, parts in PAPER_SECTIONS.items():
        ledger.place = place
        for add in parts:
            add(paper, ledger)
    return ledger.statements
