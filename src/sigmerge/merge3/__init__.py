"""MERGE³: extract a few items, estimate a candidate's ability from them, evolve the recipe."""
