"""Whether a result computes what its parts compute: logits in transformers, kind by kind."""
