"""Which piece of work runs when and where. Knows no paper and no file format."""
