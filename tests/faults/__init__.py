"""Faults on purpose: kills, full disks, power cuts, changed inputs, damaged partials and caches."""
