"""Made-up sentences that share no row of words."""

from __future__ import annotations

import random


def sentence(name: str) -> str:
    """Twelve made-up words that depend on the name alone."""
    draw = random.Random(name)
    words = ["".join(draw.choices("abdegiklmnoprstuv", k=draw.randint(4, 8))) for _ in range(12)]
    return f"{' '.join(words).capitalize()}."
