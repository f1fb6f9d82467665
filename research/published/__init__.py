"""The paper's tables as data (one CSV file each), and its derived statements computed again.

`python -m research.published` prints the page `docs/results/published.md`.
"""
