"""The paper's tables as data, and its derived statements computed again from them.

`python -m sigmerge.analysis.published` prints the page `docs/results/published.md`.
"""

from sigmerge.analysis.published.page import markdown
from sigmerge.analysis.published.statements import Statement, recompute

__all__ = ["Statement", "markdown", "recompute"]
