"""Grids of runs: pools × anchors × settings of the repair, and the store of their results."""
