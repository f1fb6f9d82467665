import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sigmerge.errors import SigmergeError
from sigmerge.method import conflict
from tests.oracles import oracle_conflict

seeds = st.integers(0, 2**32 - 1)


def states_of(seed, prompts=7, width=4):
    """Hidden states on a coarse grid: any spread is far above rounding."""
    return np.random.default_rng(seed).integers(-9, 10, (prompts, width)).astype(np.float64)


def gram(hidden):
    return conflict.prompt_gram(hidden)


def spread(hidden):
    return np.ptp(hidden, axis=0).any()


@given(seeds, seeds, st.integers(2, 12), st.integers(1, 20))
def test_cka_equals_its_feature_space_form(left, right, prompts, width):
    a, b = states_of(left, prompts, width), states_of(right, prompts, width)
    assume(spread(a) and spread(b))
    assert conflict.cka(gram(a), gram(b)) == pytest.approx(oracle_conflict.cka(a, b), abs=1e-10)


@given(seeds, seeds, st.floats(1e-3, 1e3), st.floats(-5, 5))
def test_cka_ignores_rotation_scale_and_translation(left, right, scale, shift):
    a, b = states_of(left), states_of(right)
    assume(spread(a) and spread(b))
    rotation, _ = np.linalg.qr(np.random.default_rng(left).standard_normal((4, 4)))
    moved = scale * (b @ rotation + shift)
    assert conflict.cka(gram(a), gram(moved)) == pytest.approx(
        conflict.cka(gram(a), gram(b)), abs=1e-9
    )


def test_cka_does_not_ignore_an_invertible_map():
    a, b = states_of(1), states_of(2)
    stretched = b @ np.diag([10.0, 1.0, 1.0, 1.0])
    assert abs(conflict.cka(gram(a), gram(stretched)) - conflict.cka(gram(a), gram(b))) > 0.01


@given(seeds, seeds)
def test_cka_is_a_symmetric_fraction_and_1_with_itself(left, right):
    a, b = gram(states_of(left)), gram(states_of(right))
    value = conflict.cka(a, b)
    assert 0.0 <= value <= 1.0
    assert conflict.cka(b, a) == pytest.approx(value, abs=1e-12)
    assert conflict.cka(a, a) == pytest.approx(1.0, abs=1e-12)


def test_cka_of_centred_grams_is_the_same():
    a, b = gram(states_of(3)), gram(states_of(4))
    both = conflict.cka(conflict.centred(a), conflict.centred(b))
    assert both == pytest.approx(conflict.cka(a, b), abs=1e-12)


def test_cka_of_constant_states():
    varied = gram(states_of(5))
    constant = gram(np.tile([0.1, 0.7, -3.3, 1e3], (7, 1)))
    assert conflict.cka(constant, constant) == 1.0
    assert conflict.cka(constant, gram(np.zeros((7, 4)))) == 1.0
    assert conflict.cka(constant, varied) == 0.0
    assert conflict.cka(varied, constant) == 0.0


@given(seeds, st.integers(1, 5), st.integers(1, 3))
def test_representation_view_against_oracle(seed, experts, layers):
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((experts, layers, 6, 5))
    grams = np.array([[gram(layer) for layer in expert] for expert in states])
    expected = oracle_conflict.representation(states) if experts > 1 else [0.0] * layers
    assert conflict.representation_view(grams) == pytest.approx(expected, abs=1e-10)


def dots_of(deltas):
    return np.einsum("eli,fli->lef", deltas, deltas)


def integer_deltas(seed, experts, layers=3, size=6):
    rng = np.random.default_rng(seed)
    return rng.integers(-2, 3, (experts, layers, size)).astype(np.float64)


@given(seeds, st.integers(1, 5), st.integers(1, 6))
def test_direction_view_against_oracle(seed, experts, size):
    deltas = integer_deltas(seed, experts, size=size)
    expected = [oracle_conflict.direction(deltas[:, layer]) for layer in range(3)]
    assert conflict.direction_view(dots_of(deltas)) == pytest.approx(expected, abs=1e-12)


@given(seeds, st.integers(2, 6))
def test_direction_view_bounds(seed, experts):
    """Mean pairwise cosine is at least −1/(E−1), whatever the vectors."""
    deltas = np.random.default_rng(seed).standard_normal((experts, 4, 5))
    view = conflict.direction_view(dots_of(deltas))
    assert (view >= 0).all()
    assert (view <= experts / (2 * (experts - 1)) + 1e-12).all()


def test_direction_view_of_vectors_that_are_zero():
    moved, still = np.array([1.0, 2.0]), np.zeros(2)
    pairs = [(moved, moved), (moved, -moved), (moved, still), (still, moved), (still, still)]
    deltas = np.array(pairs).transpose(1, 0, 2)
    assert conflict.direction_view(dots_of(deltas)).tolist() == [0.0, 1.0, 0.5, 0.5, 0.0]


@given(seeds, st.floats(1e-4, 1e4))
def test_direction_view_ignores_the_length_of_a_task_vector(seed, factor):
    deltas = integer_deltas(seed, experts=3)
    longer = deltas * np.array([factor, 1.0, 1.0])[:, None, None]
    assert conflict.direction_view(dots_of(longer)) == pytest.approx(
        conflict.direction_view(dots_of(deltas)), abs=1e-12
    )


@given(seeds, st.integers(1, 5))
def test_sign_view_against_oracle(seed, experts):
    deltas = integer_deltas(seed, experts)
    masses = np.array([oracle_conflict.masses(deltas[:, layer]) for layer in range(3)])
    view = conflict.sign_view(masses[:, 0], masses[:, 1])
    assert view == pytest.approx([oracle_conflict.sign(deltas[:, layer]) for layer in range(3)])
    assert ((view >= 0) & (view <= 1)).all()


def test_sign_view_of_a_layer_nobody_moved_is_0():
    assert conflict.sign_view(np.zeros(1), np.zeros(1)).tolist() == [0.0]


@given(seeds, st.permutations(range(4)))
def test_views_do_not_depend_on_the_order_of_experts(seed, order):
    rng = np.random.default_rng(seed)
    grams = np.array([[gram(rng.standard_normal((5, 3))) for _ in range(2)] for _ in range(4)])
    dots = dots_of(integer_deltas(seed, experts=4))
    assert conflict.representation_view(grams[order]) == pytest.approx(
        conflict.representation_view(grams), abs=1e-12
    )
    assert conflict.direction_view(dots[:, order][:, :, order]) == pytest.approx(
        conflict.direction_view(dots), abs=1e-12
    )


views = st.lists(st.integers(0, 1000).map(lambda n: n / 1000), min_size=1, max_size=9).map(np.array)


@given(views, st.floats(0.01, 1), st.floats(-1, 1))
def test_min_max_reaches_0_and_1_and_ignores_place_and_size(view, scale, shift):
    scaled = conflict.min_max(view)
    assert scaled == pytest.approx(conflict.min_max(scale * view + shift), abs=1e-9)
    if np.ptp(view) > 0:
        assert (scaled.min(), scaled.max()) == (0.0, 1.0)
        assert np.array_equal(np.argsort(scaled, kind="stable"), np.argsort(view, kind="stable"))
    else:
        assert not scaled.any()


def test_min_max_does_not_blow_up_rounding():
    assert not conflict.min_max(np.array([0.3, 0.1 + 0.2])).any()


@given(seeds, st.integers(2, 10))
def test_conflict_score_against_oracle(seed, layers):
    measured = np.random.default_rng(seed).random((3, layers))
    named = dict(zip(conflict.VIEWS, measured, strict=True))
    score, warnings = conflict.conflict_score(named)
    assert score == pytest.approx(oracle_conflict.score(measured.tolist()))
    assert warnings == ()
    for name in conflict.VIEWS:
        alone, _ = conflict.conflict_score(named, (name,))
        assert np.array_equal(alone, conflict.min_max(named[name]))


def test_constant_views_are_named():
    named = {
        "representation": np.array([0.5, 0.5]),
        "direction": np.array([0.0, 1.0]),
        "sign": np.array([0.2, 0.2]),
    }
    score, warnings = conflict.conflict_score(named)
    assert score == pytest.approx([0, 1 / 3])
    assert ["representation" in w or "sign" in w for w in warnings] == [True, True]


def test_a_view_that_is_not_finite_is_refused_by_name_and_layer():
    named = dict.fromkeys(conflict.VIEWS, np.array([0.0, 1.0]))
    named["direction"] = np.array([0.0, np.nan])
    with pytest.raises(SigmergeError, match="direction view of layer 1"):
        conflict.conflict_score(named)


@given(seeds, st.floats(0, 0.5), st.floats(0.5, 1))
def test_capacity_falls_from_c_max_to_c_min(seed, c_min, c_max):
    score = np.sort(np.append(np.random.default_rng(seed).random(5), [0.0, 1.0]))
    capacity = conflict.capacity(score, c_min, c_max)
    assert (capacity[0], capacity[-1]) == (c_max, pytest.approx(c_min, abs=1e-15))
    assert ((c_min <= capacity) & (capacity <= c_max)).all()
    assert (np.diff(capacity) <= 0).all()
    assert capacity == pytest.approx([c_max * (1 - s) + c_min * s for s in score])


@settings(deadline=None)
@given(seeds, st.integers(1, 4), st.integers(1, 4))
def test_identical_experts_or_one_layer_open_c_max(seed, experts, layers):
    rng = np.random.default_rng(seed)
    for copies, depth in ((experts, 1), (1, layers)):
        one = rng.standard_normal((copies, depth, 6, 3))
        pool = one if depth == 1 else np.repeat(one, experts, axis=0)
        grams = np.array([[gram(layer) for layer in expert] for expert in pool])
        deltas = pool.reshape(len(pool), depth, -1)
        masses = np.array([oracle_conflict.masses(deltas[:, i]) for i in range(depth)])
        score, warnings = conflict.conflict_score(
            {
                "representation": conflict.representation_view(grams),
                "direction": conflict.direction_view(dots_of(deltas)),
                "sign": conflict.sign_view(masses[:, 0], masses[:, 1]),
            }
        )
        assert (conflict.capacity(score, 0.1, 0.45) == 0.45).all()
        assert len(warnings) == 3
