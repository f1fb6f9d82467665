"""One file per harness: its section of a suite, its records, its key, its cost and its scorer."""
