"""quantize_fp8 and dequantize_fp8 against exact rational arithmetic."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mqa.formats import dequantize_fp8, quantize_fp8

FLOAT_MAX = torch.finfo(torch.float32).max
finite_rows = st.lists(
    st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(-8, 8, width=32)
    ),
    min_size=1,
    max_size=12,
)


def codes(values: torch.Tensor) -> list[int]:
    return values.view(torch.uint8).flatten().tolist()


def expected_scale(row: list[float], *, power_of_two: bool) -> float:
    amax = max(abs(Fraction(x)) for x in row)
    if amax == 0:
        return 1.0
    scale = float(np.float32(max(float(amax) / 448, 2.0**-126)))
    if power_of_two:
        mantissa, exponent = math.frexp(scale)
        scale = min(math.ldexp(1.0, exponent - (mantissa == 0.5)), 2.0**119)
    return scale


@given(row=finite_rows, power_of_two=st.booleans())
def test_finite_rows_get_the_stated_scale_and_the_nearest_values(e4m3, row, power_of_two):
    x = torch.tensor(row, dtype=torch.float32)
    values, scale = quantize_fp8(x, power_of_two_scale=power_of_two)
    assert scale.item() == expected_scale(row, power_of_two=power_of_two)
    nearest = [
        e4m3.nearest(Fraction(v) / Fraction(scale.item()), negative=math.copysign(1, v) < 0)
        for v in row
    ]
    assert codes(values) == nearest


@given(row=finite_rows, power_of_two=st.booleans())
def test_round_trip_is_within_half_a_step(row, power_of_two):
    x = torch.tensor(row, dtype=torch.float32)
    values, scale = quantize_fp8(x, power_of_two_scale=power_of_two)
    back = dequantize_fp8(values, scale)
    assert torch.isfinite(back).all()
    error = (back.double() - x.double()).abs()
    # Half a step is |x|/16 for normal elements, 2**-10 scales below; 1/8 where the scale is capped.
    relative = 1 / 8 if power_of_two and x.abs().max() > 448 * 2.0**119 else 1 / 16
    bound = torch.maximum(x.double().abs() * relative, scale.double() * 2.0**-10)
    assert (error <= bound * (1 + 2.0**-20)).all()


def test_values_agree_with_an_ml_dtypes_cast_of_the_quotient():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    values, scale = quantize_fp8(x, power_of_two_scale=True)
    quotient = (x / scale.unsqueeze(-1)).numpy()  # exact: the scale is a power of two
    theirs = quotient.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(values.view(torch.uint8).numpy(), theirs)


def test_the_quotient_is_rounded_once():
    # The quotient is a little above 17, the tie between 16 and 18, and is 17 in float32.
    x = torch.tensor([1.2697867155075073, 0.04818387329578400])
    values, scale = quantize_fp8(x)
    assert (x[1] / scale).item() == 17.0
    assert Fraction(x[1].item()) > 17 * Fraction(scale.item())
    assert values.float().tolist() == [448.0, 18.0]


@pytest.mark.parametrize("power_of_two", [False, True])
def test_zero_rows_have_scale_one_and_keep_signs(power_of_two):
    values, scale = quantize_fp8(torch.tensor([[0.0, -0.0]]), power_of_two_scale=power_of_two)
    assert scale.tolist() == [1.0]
    assert codes(values) == [0x00, 0x80]


def test_negative_values_that_round_to_zero_keep_their_sign():
    values, _ = quantize_fp8(torch.tensor([448.0, -1e-6, 1e-6]))
    assert codes(values) == [0x7E, 0x80, 0x00]


def test_nan_and_infinity_become_nan_and_leave_their_row_alone():
    row = [1.0, -2.0, 0.25]
    clean_values, clean_scale = quantize_fp8(torch.tensor(row))
    spoiled = torch.tensor([*row, float("nan"), float("inf"), -float("inf")])
    values, scale = quantize_fp8(spoiled)
    assert codes(values) == [*codes(clean_values), 0x7F, 0x7F, 0x7F]
    assert torch.equal(scale, clean_scale)
    assert dequantize_fp8(values, scale).isnan().tolist() == [False] * 3 + [True] * 3


def test_rows_without_a_finite_element_have_scale_one():
    values, scale = quantize_fp8(torch.tensor([float("nan"), float("inf")]))
    assert (codes(values), scale.item()) == ([0x7F, 0x7F], 1.0)


def test_tiny_rows_have_the_smallest_normal_scale():
    x = torch.tensor([[2.0**-149, 2.0**-126], [448 * 2.0**-127, 2.0**-130]])
    values, scale = quantize_fp8(x)
    assert scale.tolist() == [2.0**-126] * 2
    assert codes(values) == [0x00, 0x38, 0x76, 0x18]


def test_the_largest_row_stays_finite():
    x = torch.tensor([FLOAT_MAX, -FLOAT_MAX, 1.0])
    values, scale = quantize_fp8(x)
    assert codes(values) == [0x7E, 0xFE, 0x00]
    largest = 448 * scale.item()
    assert dequantize_fp8(values, scale).tolist() == [largest, -largest, 0.0]
    assert FLOAT_MAX * (1 - 2.0**-24) <= largest <= FLOAT_MAX
    values, scale = quantize_fp8(x, power_of_two_scale=True)
    assert (codes(values), scale.item()) == ([0x7E, 0xFE, 0x00], 2.0**119)
    assert dequantize_fp8(values, scale)[0] == 1.75 * 2.0**127


def test_power_of_two_scales_round_up_and_leave_powers_of_two():
    amax = torch.tensor([448.0, math.nextafter(448.0, 500) + 2**-14, 447.0, 900.0]).unsqueeze(-1)
    _, scale = quantize_fp8(amax, power_of_two_scale=True)
    assert scale.tolist() == [1.0, 2.0, 1.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_give_the_bits_of_their_float32_values(dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 64)
    for got, expected in zip(quantize_fp8(x), quantize_fp8(x.float()), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_strides_leading_shapes_and_gradients_change_nothing():
    x = torch.randn(6, 5, 4)
    view = x.permute(2, 1, 0).requires_grad_()
    values, scale = quantize_fp8(view)
    flat_values, flat_scale = quantize_fp8(view.detach().reshape(20, 6))
    assert values.shape == (4, 5, 6)
    assert scale.shape == (4, 5)
    assert values.is_contiguous()
    assert scale.is_contiguous()
    assert not scale.requires_grad
    assert codes(values) == codes(flat_values)
    assert torch.equal(scale.flatten(), flat_scale)


def test_no_rows_give_no_rows():
    values, scale = quantize_fp8(torch.empty(0, 128))
    assert (values.shape, scale.shape) == ((0, 128), (0,))
    assert dequantize_fp8(values, scale).shape == (0, 128)


def test_quantising_does_not_depend_on_flush_denormal(request):
    bits = torch.randint(0, 1 << 24, (64, 32), dtype=torch.int32)  # half of them subnormal
    x = bits.view(torch.float32)
    values, scale = quantize_fp8(x)
    request.getfixturevalue("flush_denormal")
    again_values, again_scale = quantize_fp8(x)
    assert codes(again_values) == codes(values)
    assert torch.equal(again_scale.view(torch.int32), scale.view(torch.int32))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([1.0], TypeError, r"quantize_fp8: x is a list, expected a torch\.Tensor"),
        (torch.ones(2, dtype=torch.float64), TypeError, r"x\.dtype=torch\.float64, expected"),
        (torch.ones(2, dtype=torch.int32), TypeError, r"x\.dtype=torch\.int32"),
        (torch.tensor(1.0), ValueError, r"x\.ndim=0"),
        (torch.ones(3, 0), ValueError, r"x\.shape\[-1\]=0"),
    ],
)
def test_quantising_rejects(x, error, message):
    with pytest.raises(error, match=message):
        quantize_fp8(x)


def test_quantising_rejects_a_power_of_two_scale_that_is_no_bool():
    with pytest.raises(TypeError, match="power_of_two_scale is a int"):
        quantize_fp8(torch.ones(4), power_of_two_scale=1)


FP8 = torch.zeros(3, 4).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("values", "scale", "error", "message"),
    [
        (torch.zeros(3, 4), torch.ones(3), TypeError, r"values\.dtype=torch\.float32"),
        (FP8, torch.ones(3, dtype=torch.int32), TypeError, r"scale\.dtype=torch\.int32"),
        (FP8, None, TypeError, "scale is a NoneType"),
        (FP8, torch.ones(4), ValueError, r"scale\.shape=\(4,\), expected \(3,\)"),
        (FP8, torch.ones(3, device="meta"), ValueError, r"scale\.device=meta, expected cpu"),
    ],
)
def test_dequantising_rejects(values, scale, error, message):
    with pytest.raises(error, match=message):
        dequantize_fp8(values, scale)
