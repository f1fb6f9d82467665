"""Pages, charts and tables of what the verbs return."""
