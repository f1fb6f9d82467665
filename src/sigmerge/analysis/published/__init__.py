"""The paper's tables as data (one CSV file each), and its derived statements computed again.

`python -m sigmerge.analysis.published` prints the page `docs/results/published.md`.
"""
