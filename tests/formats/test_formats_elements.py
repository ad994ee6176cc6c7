"""Every code of E4M3, E2M1 and UE8M0, and rounding to them."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mqa.formats.elements import (
    block_codes,
    decode_bf16,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    scale_blocks_,
    encode_e2m1,
    encode_e4m3,
    pack_scale,
    take_apart,
    unpack_scale,
)

WIDE = (torch.float32, torch.float64)


def float_bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int64)


def all_e4m3() -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", WIDE)
def test_every_e4m3_code_decodes_to_its_definition(dtype, e4m3):
    decoded = decode_e4m3(all_e4m3(), dtype)
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert math.isnan(decoded[code])
        else:
            assert Fraction(decoded[code].item()) == e4m3.value(code)
    assert torch.signbit(decoded[0x80])
    assert decoded.dtype == dtype


def test_every_e4m3_code_decodes_as_in_ml_dtypes():
    theirs = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(decode_e4m3(all_e4m3()).numpy(), theirs)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("container", [torch.uint8, torch.int8, torch.float4_e2m1fn_x2])
def test_every_pair_of_e2m1_codes_decodes_low_nibble_first(dtype, container, e2m1):
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(container)
    decoded = decode_e2m1(packed, dtype)
    assert decoded.shape == (512,)
    for byte in range(256):
        low, high = decoded[2 * byte].item(), decoded[2 * byte + 1].item()
        assert (Fraction(low), Fraction(high)) == (e2m1.value(byte & 15), e2m1.value(byte >> 4))
    assert torch.signbit(decoded[2 * 8]), "nibble 8 is -0.0"


def test_every_e2m1_code_decodes_as_in_ml_dtypes():
    theirs = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    ours = decode_e2m1(torch.arange(16, dtype=torch.int32).to(torch.uint8))[::2]
    np.testing.assert_array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize("dtype", WIDE)
def test_every_ue8m0_code_decodes_to_its_power_of_two(dtype):
    decoded = decode_ue8m0(torch.arange(256), dtype)
    assert [decoded[code].item() for code in range(255)] == [
        math.ldexp(1.0, code - 127) for code in range(255)
    ]
    assert math.isnan(decoded[255])


def test_every_ue8m0_code_decodes_as_in_ml_dtypes():
    theirs = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(decode_ue8m0(torch.arange(256), torch.float64).numpy(), theirs)


def test_ue8m0_decodes_to_float32_and_float64_alone():
    with pytest.raises(TypeError, match=r"decode_ue8m0: dtype=torch\.float16"):
        decode_ue8m0(torch.arange(4), torch.float16)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_scale_of_block_b_is_byte_b_and_the_rest_is_zero(blocks):
    codes = torch.tensor([[255, 1, 128, 254], [0, 127, 10, 200]], dtype=torch.uint8)[:, :blocks]
    packed = pack_scale(codes)
    assert packed.dtype == torch.int32
    for row, number in zip(codes.tolist(), packed.tolist(), strict=True):
        expected = sum(code << 8 * b for b, code in enumerate(row))
        assert number & 0xFFFFFFFF == expected
    assert torch.equal(unpack_scale(packed, 32 * blocks), codes)


def test_each_block_scale_is_repeated_for_its_32_elements():
    packed = pack_scale(torch.tensor([[127, 130]]))
    assert scale_blocks_(torch.ones(1, 64), packed).tolist() == [[1.0] * 32 + [8.0] * 32]


def test_bytes_past_the_head_dim_are_ignored():
    assert scale_blocks_(torch.ones(1, 32), torch.tensor([0x7F - (1 << 24)])).tolist() == [
        [1.0] * 32
    ]


def hard_values(largest: float, magnitudes: list[Fraction]) -> NDArray[np.float32]:
    """Values of a format, the ties between them, their float32 neighbours, and random ones."""
    exact = np.array([float(m) for m in magnitudes], dtype=np.float32)
    points = np.concatenate((exact, (exact[1:] + exact[:-1]) / 2))
    near = [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))]
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-30, np.log2(largest), 20_000)).astype(np.float32)
    values = np.concatenate((*near, spread, np.float32([1e-45, 1e-38])))
    values = values[values <= largest]
    return np.concatenate((values, -values))


def test_rounding_to_e4m3_agrees_with_ml_dtypes(e4m3):
    x = hard_values(448.0, e4m3.magnitudes())
    parts = take_apart(torch.from_numpy(x))
    ours = encode_e4m3(parts.magnitude, parts.sign, parts.finite).view(torch.uint8)
    np.testing.assert_array_equal(ours.numpy(), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_rounding_to_e2m1_agrees_with_ml_dtypes(e2m1):
    x = hard_values(6.0, e2m1.magnitudes())
    parts = take_apart(torch.from_numpy(x))
    ours = encode_e2m1(parts.magnitude, parts.sign)
    theirs = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(ours.numpy() & 15, theirs[::2])
    np.testing.assert_array_equal(ours.numpy() >> 4, theirs[1::2])


def test_what_is_too_large_saturates():
    magnitude = torch.tensor([448.0, 449.0, 464.0, 480.0, 2.0**49, 7.0], dtype=torch.float64)
    finite, sign = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.uint8)
    e4m3_codes = encode_e4m3(magnitude, sign, finite).view(torch.uint8).tolist()
    assert e4m3_codes == [0x7E] * 5 + [0x4E]
    assert encode_e2m1(magnitude, sign).tolist() == [0x77] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_taking_apart_is_exact_for_every_16_bit_pattern(dtype):
    codes = torch.arange(1 << 16, dtype=torch.int32)
    if dtype == torch.float32:  # its upper half, and a lower half that makes subnormals odd
        x = (codes << 16 | 0x0101).view(torch.float32)
    else:
        x = codes.to(torch.int16).view(dtype)
    parts = take_apart(x)
    assert torch.equal(parts.finite, torch.isfinite(x))
    assert torch.equal(parts.sign, (codes >> 15).to(torch.uint8))
    expected = torch.where(parts.finite, x.to(torch.float64).abs(), 0.0)
    assert torch.equal(parts.magnitude, expected)


@pytest.mark.usefixtures("flush_denormal")
def test_taking_apart_keeps_subnormals_where_they_are_flushed():
    bits = torch.tensor([1, 0x7FFFFF, 0x800000], dtype=torch.int32)
    magnitude = take_apart(bits.view(torch.float32)).magnitude
    assert magnitude.tolist() == [2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126]


@pytest.mark.parametrize("flush", [False, True])
def test_every_bf16_code_decodes_to_its_value(flush):
    codes = torch.arange(65536, dtype=torch.int32)
    values = codes.to(torch.uint16).view(torch.bfloat16)
    wide = (codes.numpy().astype(np.uint32) << 16).view(np.float32)
    torch.set_flush_denormal(flush)
    try:
        single, double = decode_bf16(values), decode_bf16(values, torch.float64)
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(single.numpy().view(np.uint32), wide.view(np.uint32))
    with np.errstate(invalid="ignore"):  # signalling NaNs
        np.testing.assert_array_equal(double.numpy(), wide.astype(np.float64))
    assert double.dtype == torch.float64


def test_block_codes_take_the_power_of_two_below_and_clamp():
    amax = torch.tensor([0.0, 2.0**-149, 2.0**-119, 2.0**-118, 1.0, 1.99, 448.0, 2.0**127])
    assert block_codes(amax.to(torch.float64), 8).tolist() == [127, 0, 0, 1, 119, 119, 127, 246]
