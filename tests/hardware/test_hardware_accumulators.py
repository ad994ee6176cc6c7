"""wgmma on SM90 sums as `HOPPER_FP8` and `HOPPER_BF16` say, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from mqa.testing import HOPPER_BF16, HOPPER_FP8

pytest.importorskip("cuda.bindings", reason="needs cuda-python, which brings NVRTC")

import tiles
from tiles import Batch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
REGIMES = [(True, name) for name in tiles.PAIRS8] + [(False, name) for name in tiles.PAIRS16]
FORMATS = pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])


def model_bits(batch: Batch) -> np.ndarray:
    model = HOPPER_FP8 if batch.is_fp8 else HOPPER_BF16
    a, b = tiles.values(batch.a), tiles.values(batch.b)
    starts = [None] * len(a)
    if batch.c is not None:
        with np.errstate(invalid="ignore"):  # a signalling NaN
            starts = list(batch.c.astype(np.float64))
    return np.stack([tiles.bits(model.dots(*one)) for one in zip(a, b, starts, strict=True)])


def run_bits(batch: Batch, **how: bool) -> np.ndarray:
    return batch.run(**how).view(np.uint32)


def assert_as_modelled(batch: Batch) -> None:
    np.testing.assert_array_equal(run_bits(batch), model_bits(batch), batch.name)


def bf16_products(*products: tuple[float, float]) -> float:
    """The sum of these products of bfloat16 values."""
    a, b = np.zeros((1, 64, 16), np.uint16), np.zeros((1, 64, 16), np.uint16)
    for i, (x, y) in enumerate(products):
        a[..., i], b[..., i] = tiles.bfloat16(np.array(x)), tiles.bfloat16(np.array(y))
    assert_as_modelled(Batch(str(products), a, b, None))
    return float(Batch("", a, b, None).run()[0, 0, 0])


@pytest.mark.parametrize(("fp8", "regime"), REGIMES)
def test_random_tiles_have_the_bits_of_the_model(fp8: bool, regime: str) -> None:
    for batch in tiles.random_batches(fp8, regime):
        assert_as_modelled(batch)


@FORMATS
def test_zeros_nans_and_extremes_have_the_bits_of_the_model(fp8: bool) -> None:
    for batch in tiles.special_batches(fp8):
        assert_as_modelled(batch)


def test_all_products_of_two_e4m3_codes_are_exact_and_nan_only_of_nan() -> None:
    assert_as_modelled(tiles.single_products())


@FORMATS
def test_every_nan_result_is_7fffffff_and_no_result_is_minus_zero(fp8: bool) -> None:
    for batch in tiles.special_batches(fp8):
        got = run_bits(batch)
        nans = got[np.isnan(got.view(np.float32))]
        assert (nans == 0x7FFFFFFF).all()
        assert (got != 0x80000000).all()


@FORMATS
def test_waiting_between_instructions_and_the_swizzle_change_no_bit(fp8: bool) -> None:
    for batch in tiles.random_batches(fp8, "normal"):
        want = run_bits(batch)
        for separate, swizzled in ((True, False), (False, True), (True, True)):
            got = run_bits(batch, separate=separate, swizzled=swizzled)
            np.testing.assert_array_equal(got, want, batch.name)


def test_fp8_sums_have_13_mantissa_bits() -> None:
    for regime in tiles.PAIRS8:
        for batch in tiles.random_batches(True, regime):
            assert (run_bits(batch) & 0x3FF == 0).all()


def test_bf16_sums_below_2_to_minus_126_are_cut_and_not_flushed() -> None:
    assert bf16_products((2.0**-70, 2.0**-79)) == 2.0**-149
    assert bf16_products((2.0**-70, -1.5 * 2.0**-79)) == -(2.0**-149)
    assert bf16_products((2.0**-75, 2.0**-75)) == 0
    assert bf16_products((2.0**-75, 2.0**-75), (2.0**-75, 2.0**-75)) == 2.0**-149


def test_bf16_subnormal_operands_count_in_full() -> None:
    assert bf16_products((2.0**-133, 2.0**100)) == 2.0**-33


def test_bf16_terms_are_never_aligned_to_less_than_2_to_minus_133() -> None:
    """So they are cut at 2^-158 at the finest, and 1023 + 1 units of half that lack one unit."""
    assert bf16_products((33 * 2.0**-80, 31 * 2.0**-78), (2.0**-79, 2.0**-79)) == 2.0**-148
    assert bf16_products((33 * 2.0**-80, 31 * 2.0**-79), (2.0**-80, 2.0**-79)) == 0


def test_bf16_sums_from_2_to_128_on_are_infinite() -> None:
    assert bf16_products((2.0**64, 2.0**64)) == np.inf
    assert bf16_products((2.0**64, -(2.0**63)), (2.0**63, -(2.0**64))) == -np.inf
    assert bf16_products((2.0**64, 2.0**64), (2.0**63, -(2.0**64))) == 2.0**127
