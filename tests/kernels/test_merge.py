"""Weighted sums of stored values, against NumPy's float32."""

import numpy as np
import pytest

from sigmerge.kernels import convert, merge

SIZE = 1000


def stored(kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Values as stored, and as float32."""
    values = np.random.default_rng(seed).normal(0, 0.02, SIZE).astype(np.float32)
    if kind == "F32":
        return values, values
    raw = np.empty(SIZE, np.uint16)
    assert convert.narrow_bf16(values, raw)
    return raw, (raw.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("kind", ["BF16", "F32"])
def test_sums_round_after_every_operation(kind, fresh):
    (raw, values), (raw_reference, reference) = stored(kind, 0), stored(kind, 1)
    before = np.random.default_rng(2).normal(0, 1, SIZE).astype(np.float32)
    weight = np.float32(0.3)

    out = before.copy()
    assert merge.add_stored(raw, 0.3, fresh, out)
    entries = values * weight
    assert np.array_equal(out, entries if fresh else before + entries)

    out = before.copy()
    assert merge.add_difference(raw, raw_reference, 0.3, fresh, out)
    entries = (values - reference) * weight
    assert np.array_equal(out, entries if fresh else before + entries)


def test_a_fresh_sum_keeps_the_sign_of_zero():
    out = np.full(2, np.nan, np.float32)
    merge.add_stored(np.array([-0.0, 0.0], np.float32), 0.5, True, out)
    assert np.signbit(out).tolist() == [True, False]


@pytest.mark.parametrize("kind", ["BF16", "F32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_told(kind, value):
    fine, _ = stored(kind, 0)
    bad = fine.copy()
    bad[7] = (np.float32(value).view(np.uint32) >> 16) if kind == "BF16" else value
    out = np.zeros(SIZE, np.float32)
    assert not merge.add_stored(bad, 1.0, True, out)
    assert not merge.add_difference(bad, fine, 1.0, True, out)
    assert not merge.add_difference(fine, bad, 1.0, True, out)
