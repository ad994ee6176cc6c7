"""MXFP8 and MXFP4: what both promise, and where they differ."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mqa.formats import dequantize_mxfp4, dequantize_mxfp8, quantize_mxfp4, quantize_mxfp8
from mqa.formats.elements import unpack_scale

QUANTIZE = {"mxfp8": quantize_mxfp8, "mxfp4": quantize_mxfp4}
DEQUANTIZE = {"mxfp8": dequantize_mxfp8, "mxfp4": dequantize_mxfp4}
MAX_EXPONENT = {"mxfp8": 8, "mxfp4": 2}
FLOAT_MAX = torch.finfo(torch.float32).max

each_format = pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
finite_blocks = st.lists(
    st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(-8, 8, width=32)
    ),
    min_size=1,
    max_size=32,
)


def element_codes(values: torch.Tensor) -> list[int]:
    """Codes in order, of E4M3 or of packed E2M1 elements."""
    flat = values.reshape(-1)
    if flat.dtype == torch.float8_e4m3fn:
        return flat.view(torch.uint8).tolist()
    return torch.stack((flat & 15, flat >> 4), dim=-1).flatten().tolist()


def packed_scale(code: int, rows: int) -> torch.Tensor:
    """The same code for four blocks of each row."""
    return torch.full((rows,), code * 0x01010101, dtype=torch.int64).to(torch.int32)


def one_block(*elements: float) -> torch.Tensor:
    return torch.tensor([*elements, *[0.0] * (32 - len(elements))], dtype=torch.float32)


@each_format
@given(block=finite_blocks)
def test_finite_blocks_get_the_specified_scale_and_the_nearest_elements(e4m3, e2m1, fmt, block):
    element = e4m3 if fmt == "mxfp8" else e2m1
    values, scale = QUANTIZE[fmt](one_block(*block))
    amax = max(map(abs, block))
    code = max(math.frexp(amax)[1] - 1 - MAX_EXPONENT[fmt] + 127, 0) if amax else 127
    assert scale.item() == code
    nearest = [
        element.nearest(Fraction(v) / Fraction(2) ** (code - 127), negative=math.copysign(1, v) < 0)
        for v in block
    ]
    assert element_codes(values)[: len(block)] == nearest


@each_format
@given(block=finite_blocks)
def test_quantising_what_was_dequantised_changes_no_value(fmt, block):
    values, scale = QUANTIZE[fmt](one_block(*block))
    once = DEQUANTIZE[fmt](values, scale)
    twice = DEQUANTIZE[fmt](*QUANTIZE[fmt](once))
    assert torch.isfinite(once).all()
    assert torch.equal(once, twice)


@pytest.mark.parametrize(
    ("fmt", "theirs"),
    [("mxfp8", ml_dtypes.float8_e4m3fn), ("mxfp4", ml_dtypes.float4_e2m1fn)],
)
def test_elements_agree_with_an_ml_dtypes_cast(fmt, theirs):
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    values, scale = QUANTIZE[fmt](x)
    factor = torch.exp2(127.0 - unpack_scale(scale, 128).double()).repeat_interleave(32, dim=-1)
    largest = float(ml_dtypes.finfo(theirs).max)
    quotient = (x.double() * factor).clamp(-largest, largest).float()
    cast = quotient.numpy().astype(theirs).view(np.uint8).reshape(-1)
    assert element_codes(values) == cast.tolist()


@each_format
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_scale_of_block_b_is_byte_b_and_bytes_past_the_row_are_zero(fmt, head_dim):
    blocks = head_dim // 32
    x = torch.exp2(torch.arange(blocks).float()).repeat_interleave(32).expand(3, 2, head_dim)
    values, scale = QUANTIZE[fmt](x)
    assert values.shape == (3, 2, head_dim if fmt == "mxfp8" else head_dim // 2)
    assert scale.shape == (3, 2)
    expected = sum(127 + b - MAX_EXPONENT[fmt] << 8 * b for b in range(blocks))
    assert (scale.long() & 0xFFFFFFFF == expected).all()
    assert torch.equal(DEQUANTIZE[fmt](values, scale), x)


def test_even_elements_are_the_low_nibbles():
    values, scale = quantize_mxfp4(one_block(4.0, -6.0, 0.5, 1.0))
    assert values[:3].tolist() == [0xF6, 0x21, 0x00]
    assert scale.item() == 127


@each_format
def test_zero_blocks_have_scale_one_and_keep_signs(fmt):
    values, scale = QUANTIZE[fmt](one_block(0.0, -0.0))
    assert scale.item() == 127
    assert element_codes(values)[:3] == [0, 0x80 if fmt == "mxfp8" else 8, 0]


@each_format
def test_negative_values_that_round_to_zero_keep_their_sign(fmt):
    values, scale = QUANTIZE[fmt](one_block(1.0, -1e-6, 1e-6))
    assert torch.signbit(DEQUANTIZE[fmt](values, scale))[:3].tolist() == [False, True, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_mxfp8_turns_what_is_not_finite_into_nan_and_leaves_the_block_alone(bad):
    clean_values, clean_scale = quantize_mxfp8(one_block(1.0, 0.0, -3.0))
    values, scale = quantize_mxfp8(one_block(1.0, bad, -3.0))
    assert torch.equal(scale, clean_scale)
    expected = element_codes(clean_values)
    expected[1] = 0x7F
    assert element_codes(values) == expected
    assert dequantize_mxfp8(values, scale).isnan().nonzero().tolist() == [[1]]


def test_an_mxfp8_block_without_a_finite_element_has_scale_one():
    values, scale = quantize_mxfp8(torch.full((32,), math.inf))
    assert (element_codes(values), scale.item()) == ([0x7F] * 32, 127)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_mxfp4_turns_the_block_of_what_is_not_finite_into_nan(bad):
    x = torch.ones(2, 64)
    x[0, 40] = bad
    values, scale = quantize_mxfp4(x)
    assert [number & 0xFFFFFFFF for number in scale.tolist()] == [0xFF7D, 0x7D7D]
    assert element_codes(values)[:64] == [6] * 32 + [0] * 32
    expected = torch.ones(2, 64)
    expected[0, 32:] = math.nan
    assert torch.equal(dequantize_mxfp4(values, scale).isnan(), expected.isnan())


@pytest.mark.parametrize(("fmt", "code", "largest"), [("mxfp8", 246, 1.75), ("mxfp4", 252, 1.5)])
def test_the_largest_values_saturate_inside_the_guaranteed_range(fmt, code, largest):
    values, scale = QUANTIZE[fmt](one_block(FLOAT_MAX, -FLOAT_MAX, 2.0**127))
    assert scale.item() == code
    expected = [largest * 2.0**127, -largest * 2.0**127, 2.0**127]
    assert DEQUANTIZE[fmt](values, scale)[:3].tolist() == expected


@each_format
def test_subnormal_blocks_have_code_zero(fmt):
    values, scale = QUANTIZE[fmt](one_block(2.0**-127, -(2.0**-149), 2.0**-126))
    assert scale.item() == 0
    assert DEQUANTIZE[fmt](values, scale)[:3].tolist() == [2.0**-127, 0.0, 2.0**-126]


@each_format
def test_quantising_does_not_depend_on_flush_denormal(fmt, request):
    bits = torch.randint(0, 1 << 24, (64, 32), dtype=torch.int32)  # half of them subnormal
    x = bits.view(torch.float32)
    values, scale = QUANTIZE[fmt](x)
    request.getfixturevalue("flush_denormal")
    again_values, again_scale = QUANTIZE[fmt](x)
    assert element_codes(again_values) == element_codes(values)
    assert torch.equal(again_scale, scale)


@pytest.mark.usefixtures("flush_denormal")
@pytest.mark.parametrize("code", [10, 11, 127, 246])
def test_every_mxfp8_element_dequantises_exactly_in_the_guaranteed_range(code, e4m3):
    elements = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    decoded = dequantize_mxfp8(elements.view(2, 128), packed_scale(code, rows=2)).flatten()
    for element, got in enumerate(decoded.tolist()):
        if element & 0x7F == 0x7F:
            assert math.isnan(got)
        else:
            assert Fraction(got) == e4m3.value(element) * Fraction(2) ** (code - 127)


@pytest.mark.usefixtures("flush_denormal")
@pytest.mark.parametrize("code", [2, 3, 127, 252])
def test_every_mxfp4_pair_dequantises_exactly_in_the_guaranteed_range(code, e2m1):
    pairs = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(4, 64)
    decoded = dequantize_mxfp4(pairs, packed_scale(code, rows=4)).flatten()
    for element, got in zip(element_codes(pairs), decoded.tolist(), strict=True):
        assert Fraction(got) == e2m1.value(element) * Fraction(2) ** (code - 127)


@each_format
def test_dequantising_outside_float32_gives_infinity_and_a_nan_scale_nan(fmt):
    values, _ = QUANTIZE[fmt](torch.cat((one_block(-1.75), one_block(1.0))))
    decoded = DEQUANTIZE[fmt](values, torch.tensor(254 | 255 << 8, dtype=torch.int32))
    assert decoded[0] == -math.inf
    assert decoded[32:].isnan().all()


@pytest.mark.parametrize("container", [torch.uint8, torch.int8, torch.float4_e2m1fn_x2])
def test_every_fp4_container_means_the_same(container):
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
    values, scale = quantize_mxfp4(x)
    expected = dequantize_mxfp4(values, scale)
    assert torch.equal(dequantize_mxfp4(values.view(container), scale), expected)


@each_format
def test_strides_dtypes_and_gradients_change_nothing(fmt):
    x = torch.randn(64, 5, 3, generator=torch.Generator().manual_seed(2)).bfloat16()
    view = x.permute(2, 1, 0)
    values, scale = QUANTIZE[fmt](view.requires_grad_())
    flat_values, flat_scale = QUANTIZE[fmt](view.detach().float().contiguous())
    assert values.is_contiguous()
    assert scale.is_contiguous()
    assert element_codes(values) == element_codes(flat_values)
    assert torch.equal(scale, flat_scale)


@each_format
def test_no_rows_give_no_rows(fmt):
    values, scale = QUANTIZE[fmt](torch.empty(0, 2, 64))
    assert scale.shape == (0, 2)
    assert DEQUANTIZE[fmt](values, scale).shape == (0, 2, 64)


@each_format
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (None, TypeError, "x is a NoneType"),
        (torch.ones(32, dtype=torch.float64), TypeError, r"x\.dtype=torch\.float64"),
        (torch.tensor(1.0), ValueError, r"x\.ndim=0"),
        (torch.ones(2, 0), ValueError, r"x\.shape\[-1\]=0, expected 32, 64, 96 or 128"),
        (torch.ones(2, 48), ValueError, r"x\.shape\[-1\]=48"),
        (torch.ones(2, 160), ValueError, r"x\.shape\[-1\]=160"),
    ],
)
def test_quantising_rejects(fmt, x, error, message):
    with pytest.raises(error, match=f"quantize_{fmt}: {message}"):
        QUANTIZE[fmt](x)


def elements(fmt: str, rows: int, head_dim: int) -> torch.Tensor:
    if fmt == "mxfp8":
        return torch.zeros(rows, head_dim).to(torch.float8_e4m3fn)
    return torch.zeros(rows, head_dim // 2, dtype=torch.uint8)


@each_format
@pytest.mark.parametrize(
    ("head_dim", "scale", "error", "message"),
    [
        (64, torch.ones(3), TypeError, r"scale\.dtype=torch\.float32, expected torch\.int32"),
        (64, torch.ones(3, 1, dtype=torch.int32), ValueError, r"scale\.shape=\(3, 1\)"),
        (48, torch.ones(3, dtype=torch.int32), ValueError, r"values\.shape\[-1\]=48"),
        (160, torch.ones(3, dtype=torch.int32), ValueError, r"values\.shape\[-1\]=160"),
    ],
)
def test_dequantising_rejects(fmt, head_dim, scale, error, message):
    with pytest.raises(error, match=message):
        DEQUANTIZE[fmt](elements(fmt, 3, head_dim), scale)


@each_format
def test_dequantising_rejects_other_elements(fmt):
    with pytest.raises(TypeError, match=r"values\.dtype=torch\.float32"):
        DEQUANTIZE[fmt](torch.zeros(3, 32), torch.ones(3, dtype=torch.int32))
