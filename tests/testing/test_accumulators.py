from fractions import Fraction

import numpy as np
import pytest

from mqa.testing import (
    AMPERE_BF16,
    FLOAT32,
    HOPPER_BF16,
    HOPPER_FP8,
    HOPPER_MMA_BF16,
    FusedTruncating,
    Tiled,
)
from mqa.testing._codes import E4M3
from mqa.testing.accumulators import HOPPER_BF16_IN_CHUNKS, Reordered

FINITE = E4M3[np.isfinite(E4M3)]


def one_dot(
    model: FusedTruncating | Reordered, products: dict[int, float], dims: int = 64
) -> float:
    """The dot whose products (at these dims) have these values, each split as value * 1."""
    q, k = np.zeros((1, dims)), np.ones((1, dims))
    for dim, value in products.items():
        q[0, dim] = value
    return float(model.dots(q, k)[0, 0])


def fused_loop(model: FusedTruncating, q: np.ndarray, k: np.ndarray, start: float = 0.0) -> float:
    """The model as its docstring says it, one dot at a time, in Fractions."""

    def exponent(value: float, low: int | None) -> int:
        return max(int(np.frexp(value)[1]) - 1, low if low is not None else -(10**6))

    def cut(value: Fraction, unit: Fraction) -> Fraction:
        return Fraction(int(value / unit)) * unit  # int() cuts toward zero

    low, total = model.min_exponent, Fraction(start)
    for first in range(0, len(q), model.k):
        pairs = [(a, b) for a, b in zip(q, k, strict=True)][first : first + model.k]
        terms = [
            (Fraction(a) * Fraction(b), exponent(a, low) + exponent(b, low))
            for a, b in pairs
            if a and b
        ]
        if total:
            terms.append((total, exponent(float(total), -126)))
        unit = Fraction(2) ** (max([-133, *(e for _, e in terms)]) - model.bits)
        total = sum((cut(value, unit) for value, _ in terms), Fraction(0))
        if total:
            last = int(np.frexp(float(total))[1]) - 1 - min(model.bits, 23)
            total = cut(total, Fraction(2) ** max(last, -149))
    return float(total)


def test_hopper_fp8_loses_a_product_14_bits_below_the_accumulator() -> None:
    assert one_dot(HOPPER_FP8, {0: 1.0, 32: 2.0**-14}) == 1.0
    assert one_dot(HOPPER_FP8, {0: 1.0, 32: 2.0**-13}) == 1.0001220703125


def test_a_warp_product_on_ampere_sums_eight_at_a_time_with_24_bits() -> None:
    big, small = 2.0**24, 2.0**-24
    assert one_dot(AMPERE_BF16, {0: big, 7: 1.0, 6: 1.0}) == big + 2
    assert one_dot(AMPERE_BF16, {0: big, 7: 1.0, 8: 1.0}) == big
    assert one_dot(HOPPER_MMA_BF16, {0: big, 7: 1.0, 8: 1.0}) == big + 2
    # A bit below float32's last counts, one more does not, and Hopper keeps that too.
    assert one_dot(AMPERE_BF16, {0: 1.0, 1: small, 2: small}) == 1 + 2 * small
    quarters = {0: 1.0, **dict.fromkeys(range(1, 5), small / 2)}
    assert one_dot(AMPERE_BF16, quarters) == 1.0
    assert one_dot(HOPPER_MMA_BF16, quarters) == 1 + 2 * small


def test_models_that_no_hardware_confirmed_leave_room_for_their_last_bits() -> None:
    draw = np.random.default_rng(5)
    q, k = draw.standard_normal((2, 6, 64))
    assert not HOPPER_BF16.error(q, k).any()
    for model in (AMPERE_BF16, HOPPER_MMA_BF16):
        assert (model.error(q, k) > 0).all()


def test_lost_terms_are_cut_toward_zero_for_both_signs_in_one_mma_and_across() -> None:
    for dim in (1, 33):
        assert one_dot(HOPPER_FP8, {0: 1.0, dim: -(2.0**-14)}) == 1.0
        assert one_dot(HOPPER_FP8, {0: -1.0, dim: 2.0**-14}) == -1.0
        assert one_dot(HOPPER_FP8, {0: 1.0, dim: -(2.0**-13)}) == 1 - 2.0**-13


def test_product_exponent_is_not_normalised() -> None:
    # 1.75 * 1.75 > 2, yet its exponent counts as 0: 2^-13 beside it is kept.
    q, k = np.array([[1.75, -1.75, 2.0**-6]]), np.array([[1.75, 1.0, 2.0**-7]])
    assert HOPPER_FP8.dots(q, k)[0, 0] == 1.3125 + 2.0**-13


@pytest.mark.parametrize("model", [HOPPER_FP8, HOPPER_BF16, AMPERE_BF16, FusedTruncating(13, 16)])
def test_fused_model_equals_its_loop_on_random_finite_e4m3(model: FusedTruncating) -> None:
    draw = np.random.default_rng(3)
    q, k = draw.choice(FINITE, (6, 96)), draw.choice(FINITE, (7, 96))
    q[0], k[1, 32:64] = 0, 0
    start = (draw.standard_normal((6, 7)) * 1000).astype(np.float32).astype(np.float64)
    got, on_top = model.dots(q, k), model.dots(q, k, start)
    for row in range(6):
        for key in range(7):
            assert got[row, key] == fused_loop(model, q[row], k[key])
            assert on_top[row, key] == fused_loop(model, q[row], k[key], start[row, key])


@pytest.mark.parametrize("exponent", [-60, -64, -68, -72, -74])
def test_fused_model_equals_its_loop_below_the_normal_numbers(exponent: int) -> None:
    draw = np.random.default_rng(-exponent)
    q, k = draw.integers(-255, 256, (2, 8, 48)) * 2.0 ** draw.integers(-7, 1, (2, 8, 48))
    q, k = q * 2.0 ** (exponent - 7), k * 2.0 ** (exponent - 7)
    got = HOPPER_BF16.dots(q, k)
    assert 0 < np.abs(got).max() < 2.0**-109
    for row in range(8):
        for key in range(8):
            assert got[row, key] == fused_loop(HOPPER_BF16, q[row], k[key])


def test_terms_are_never_aligned_to_less_than_2_to_minus_133() -> None:
    q, k = np.array([[33 * 2.0**-80, 2.0**-80]]), np.array([[31 * 2.0**-78, 2.0**-78]])
    assert HOPPER_BF16.dots(q, k)[0, 0] == 2.0**-148
    assert HOPPER_BF16.dots(q, k / 2)[0, 0] == 0  # exactly 2^-149, but its terms are cut at 2^-158


def test_a_subnormal_accumulator_counts_with_exponent_minus_126() -> None:
    nothing, start = np.zeros((1, 32)), np.array([[2.0**-126 - 2.0**-149]])
    assert HOPPER_FP8.dots(nothing, nothing, start)[0, 0] == 2.0**-126 - 2.0**-139


def test_sums_from_2_to_128_on_are_infinite_and_a_sum_of_zero_is_plus_zero() -> None:
    q, k = np.array([[2.0**64, 0.0]]), np.array([[2.0**64, 0.0], [-(2.0**64), -1.0], [0.0, -1.0]])
    assert HOPPER_BF16.dots(q, k)[0].tolist() == [np.inf, -np.inf, 0]
    assert not np.signbit(HOPPER_BF16.dots(-q, k)[0, 2])


def test_infinities_that_meet_are_nan_without_a_warning() -> None:
    zeros = [0.0] * 15
    q, k = np.array([[2.0**64, *zeros, np.inf]]), np.array([[2.0**64, *zeros, -1.0]])
    assert np.isnan(HOPPER_BF16.dots(q, k)[0, 0])


def test_error_bounds_the_distance_to_the_true_dot_and_vanishes_once_confirmed() -> None:
    model = FusedTruncating(13, 32, -6)
    draw = np.random.default_rng(4)
    q, k = draw.choice(FINITE, (20, 128)), draw.choice(FINITE, (30, 128))
    off = np.abs(model.dots(q, k) - q @ k.T)
    assert off.max() > 0
    final_cuts = 4 * 2.0**-13 * (np.abs(q) @ np.abs(k).T)
    assert (off <= model.error(q, k) + final_cuts).all()
    for confirmed in (HOPPER_FP8, HOPPER_BF16):
        assert not confirmed.error(q, k).any()
    one = np.array([[1.0] + [0.0] * 63])
    assert model.error(one, one)[0, 0] == 2 * 33 * 2.0**-13
    assert model.error(one * 0, one)[0, 0] == 0


def test_float32_error_covers_sequential_and_reversed_float32_sums() -> None:
    draw = np.random.default_rng(5)
    q, k = draw.choice(FINITE, (20, 128)), draw.choice(FINITE, (30, 128))
    want, bound = FLOAT32.dots(q, k), FLOAT32.error(q, k)
    for order in (1, -1):
        total = np.zeros(want.shape, np.float32)
        for dim in range(128)[::order]:
            total += np.multiply.outer(q[:, dim], k[:, dim]).astype(np.float32)
        assert (np.abs(total - want) <= bound).all()


def test_nan_stays_in_its_own_dots() -> None:
    q, k = np.ones((2, 64)), np.ones((2, 64))
    q[1, 5] = np.nan
    for model in (FLOAT32, HOPPER_FP8):
        np.testing.assert_array_equal(np.isnan(model.dots(q, k)), [[False] * 2, [True] * 2])


@pytest.mark.parametrize("dims", [32, 64, 128])
def test_bfloat16_is_summed_in_steps_of_four_threads(dims: int) -> None:
    """Large terms that cancel in a step take a small one with them, unless its step is later."""
    part = min(dims // 2, 32)
    each = part // 4  # dims of a thread
    step_of = {dim: dim // part * (each // 4) + dim % each // 4 for dim in range(dims)}
    for step in range(dims // 16):
        first, second, *_ = (dim for dim, of in step_of.items() if of == step)
        for dim in set(range(dims)) - {first, second}:
            products = {first: 2.0**40, second: -(2.0**40), dim: 1.0}
            want = 1.0 if step_of[dim] > step else 0.0
            assert one_dot(HOPPER_BF16_IN_CHUNKS, products, dims) == want, (step, dim)


@pytest.mark.parametrize("model", [HOPPER_BF16_IN_CHUNKS, HOPPER_MMA_BF16])
def test_tiles_have_the_values_of_the_whole(model: FusedTruncating) -> None:
    draw = np.random.default_rng(3)
    q, k = draw.standard_normal((300, 64)), draw.standard_normal((513, 64))
    q[7, 3] = k[400, 5] = np.inf
    q[299], k[0] = np.nan, 0.0
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(Tiled(model).dots(q, k), model.dots(q, k))
        np.testing.assert_array_equal(Tiled(model).error(q, k), model.error(q, k))
    assert Tiled(model).dots(q[:0], k).shape == (0, 513)
