"""Quotas in exact rational arithmetic. No sigmerge."""

import math
from fractions import Fraction


def quota(capacity, share, coordinates):
    """⌈C ρ n⌉ of exact rationals."""
    return math.ceil(Fraction(capacity) * Fraction(share) * coordinates)
