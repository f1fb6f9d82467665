"""One function per verb: they join recipe, pool, maths, engine and output."""
