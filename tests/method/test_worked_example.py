"""docs/worked-example.md, number by number: the page is read, not repeated here."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from sigmerge.core import TILE
from sigmerge.core.claim import FREE
from sigmerge.core.dtypes import table
from sigmerge.core.products import signature
from sigmerge.method import budget, conflict, deficit, occupancy
from sigmerge.method.controls import allocate
from tests.method.test_occupancy import Pool, updated

PAGE = Path(__file__).parents[2] / "docs" / "worked-example.md"
DOMAINS = ("math", "coding", "safety")
LAYERS = (0, 1)
C_MIN, C_MAX, SCALE = 0.10, 0.45, 0.60


def rows_of(page):
    """First cell of every table row -> its other cells that hold something."""
    rows = {}
    for line in page.splitlines():
        if line.startswith("|") and not line.startswith("|--"):
            label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows[label] = [cell for cell in cells if cell]
    return rows


ROWS = rows_of(PAGE.read_text(encoding="utf-8"))


def numbers(label):
    return np.array([float(cell) for cell in ROWS[label]])


def shown(label):
    """What a row must equal: its numbers, up to the rounding to four decimals."""
    return pytest.approx(numbers(label), abs=5.1e-5)


DELTAS = [np.array([numbers(f"{i} {d}") for d in DOMAINS]).astype(np.float32) for i in LAYERS]
COORDINATES = np.array([layer.shape[1] for layer in DELTAS])
SIGNATURES = [(np.zeros((3, 3)), np.zeros(2)) for _ in LAYERS]
for _deltas, _signature in zip(DELTAS, SIGNATURES, strict=True):
    _rows = [*_deltas, np.zeros_like(_deltas[0])]
    signature(table(_rows), 0, _deltas.shape[1], TILE, *_signature)
VIEWS = {
    "representation": numbers("r"),
    "direction": conflict.direction_view(np.array([dots for dots, _ in SIGNATURES])),
    "sign": conflict.sign_view(*np.array([mass for _, mass in SIGNATURES]).T),
}
EXPERTS = {d: dict(zip(DOMAINS, numbers(f"{d} expert").tolist(), strict=True)) for d in DOMAINS}
ANCHOR = dict(zip(DOMAINS, numbers("anchor").tolist(), strict=True))
ALLOCATION = allocate(
    VIEWS,
    deficit.deficits(EXPERTS, ANCHOR, DOMAINS),
    COORDINATES,
    DOMAINS,
    c_min=C_MIN,
    c_max=C_MAX,
)


def test_the_layers_have_the_sizes_the_page_says():
    assert COORDINATES.tolist() == [8, 10]


def test_direction_view():
    for a, b in combinations(range(3), 2):
        products = [dots[a, b] for dots, _ in SIGNATURES]
        row = ROWS[f"{DOMAINS[a]}, {DOMAINS[b]}"]
        assert [float(row[0]), float(row[2])] == products
        assert [float(row[1]), float(row[3])] == [product / 25 for product in products]
    assert all(np.array_equal(np.diag(dots), [25, 25, 25]) for dots, _ in SIGNATURES)
    assert VIEWS["direction"] == shown("p")


def test_sign_view():
    assert [mass[0] for _, mass in SIGNATURES] == shown("Σ m c")
    assert [mass[1] for _, mass in SIGNATURES] == shown("Σ m")
    assert VIEWS["sign"] == shown("s")


def test_conflict_and_capacity():
    for name, label in zip(conflict.VIEWS, ("r̃", "p̃", "s̃"), strict=True):
        assert conflict.min_max(VIEWS[name]) == shown(label)
    assert ALLOCATION.conflict == shown("S̄")
    assert ALLOCATION.capacity == shown("C")


def test_deficits_and_shares():
    assert deficit.check_scores(EXPERTS, ANCHOR, DOMAINS) == []
    assert deficit.strongest(EXPERTS, DOMAINS) == shown("strongest")
    assert ALLOCATION.deficit == shown("g")
    assert ALLOCATION.share == shown("ρ")
    assert deficit.deficits(EXPERTS, ANCHOR, DOMAINS, "own") == shown("g, own expert")
    assert ALLOCATION.order == ("coding", "safety", "math")


def test_quotas():
    targets = budget.budget(ALLOCATION.capacity, ALLOCATION.share) * COORDINATES[:, None]
    for i in LAYERS:
        assert targets[i] == shown(f"{i} target")
        assert ALLOCATION.quota[i].tolist() == numbers(f"{i} quota").tolist()
        assert ALLOCATION.quota[i].sum() == 4


def layer(i):
    """A layer of the page as one tile."""
    return Pool(DELTAS[i].astype(np.float32), [(0, int(COORDINATES[i]))], index=i)


@pytest.mark.parametrize("i", LAYERS)
def test_claims_and_repaired_layer(i):
    order = [DOMAINS.index(domain) for domain in ALLOCATION.order]
    claims = occupancy.claim(layer(i), order, ALLOCATION.quota[i].tolist())
    owners = ["·" if owner == FREE else DOMAINS[owner] for owner in claims.owner]
    assert owners == ROWS[f"{i} owner"]
    assert list(claims.mass) == numbers(f"{i} mass").tolist()

    values = (1 + 0.5 * DELTAS[i].sum(axis=0)).astype(np.float32)
    assert values.tolist() == numbers(f"{i} anchor").tolist()
    values = updated(layer(i), claims.owner, values, occupancy.Update(scale=SCALE))
    assert values == pytest.approx(numbers(f"{i} repaired"), abs=1e-6)
