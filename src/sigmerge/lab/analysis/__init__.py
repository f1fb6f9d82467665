"""Statistics, tables, charts and the page of an experiment."""
