"""Forward passes through models. The only importer of transformers."""
