"""Small files: bounded reading, whole writing, locks, journals, digests and the cache."""
