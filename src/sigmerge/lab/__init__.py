"""Studies of methods: grids of experiments, their analysis, and pools that are trained for them."""
