"""MXFP4: E2M1 elements, two a byte, with one UE8M0 scale per 32, four scales in an int32."""

from __future__ import annotations

import torch
from torch import Tensor

from mqa.formats.checks import (
    FP4_BYTES,
    check_floats,
    check_mx_head_dim,
    check_scale,
    check_tensor,
)
from mqa.formats.elements import (
    MX_BLOCK,
    UE8M0_NAN,
    block_codes,
    decode_e2m1,
    decode_ue8m0,
    encode_e2m1,
    pack_scale,
    scale_blocks_,
    split_rows,
    take_apart,
)

_MAX_EXPONENT = 2
"""6 is 1.5 * 2**2."""


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `x` [..., D] to packed E2M1 values and packed UE8M0 scales, D in {32, 64, 96, 128}.

    Args:
        x: float32, bfloat16 or float16, any strides, any device.

    Returns:
        values: uint8 [..., D/2], the even element in the low nibble; each is the element nearest
            to x / scale, ties to even, saturated at ±6.
        scale: int32 [...], the code of block b in byte b (little endian), bytes past D/32 are 0.
            A code is floor(log2(max|x|)) - 2 + 127 of the block, at least 0 (OCP MX v1.0, section
            6.3); float32 never needs more than 252. A block of zeros has code 127, the scale 1.

    Both are fresh and contiguous, and carry no gradient. E2M1 has neither NaN nor infinity: a
    block with a NaN or ±inf gets the NaN scale 0xFF and zero bytes. Zeros and negative values
    keep their sign, also where they round to zero. Bits do not depend on the other blocks, the
    strides, the device or `torch.set_flush_denormal`. Reads nothing on the host.

    Raises:
        TypeError: `x` is no tensor or of another dtype.
        ValueError: `x` has no dimension or D is another number.
    """
    check_floats("quantize_mxfp4", x, block_scaled=True)
    parts = take_apart(x)
    blocks = split_rows(parts.magnitude, MX_BLOCK)
    codes = block_codes(blocks.amax(dim=-1), _MAX_EXPONENT)
    scaled = (blocks / decode_ue8m0(codes, torch.float64).unsqueeze(-1)).flatten(-2)
    packed = split_rows(encode_e2m1(scaled, parts.sign), MX_BLOCK // 2)
    spoiled = ~split_rows(parts.finite, MX_BLOCK).all(dim=-1)
    values = packed.masked_fill(spoiled.unsqueeze(-1), 0).flatten(-2)
    return values, pack_scale(codes.masked_fill_(spoiled, UE8M0_NAN))


def dequantize_mxfp4(values: Tensor, scale: Tensor) -> Tensor:
    """The float32 values [..., D] of packed E2M1 `values` [..., D/2] and int32 `scale` [...].

    `values` is uint8, int8 or `float4_e2m1fn_x2`. Exact for codes in [2, 252]. Elsewhere rounded
    once to float32: ±inf above its range, and on a CPU under `torch.set_flush_denormal(True)` 0
    below it. NaN where the block's scale is NaN.

    Raises:
        TypeError: `values` has another dtype or `scale` is not int32.
        ValueError: D is not 32, 64, 96 or 128, `scale` does not have one entry per row, or is on
            another device.
    """
    check_tensor("dequantize_mxfp4", "values", values, FP4_BYTES)
    check_scale("dequantize_mxfp4", values, scale, (torch.int32,))
    head_dim = 2 * values.shape[-1]
    check_mx_head_dim("dequantize_mxfp4", f"2 * values.shape[-1]={head_dim}", head_dim)
    return scale_blocks_(decode_e2m1(values, torch.float64), scale).to(torch.float32)
