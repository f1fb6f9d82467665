"""Other programs' names for what sigmerge does."""
