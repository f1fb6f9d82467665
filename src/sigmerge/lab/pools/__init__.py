"""A pool of real language models: the reference from a GGUF file, the data of five domains."""
