"""Suites, splits, adapters, judges and the store of results; the only importer of lm_eval."""
