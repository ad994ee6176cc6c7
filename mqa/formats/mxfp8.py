"""MXFP8: E4M3 elements with one UE8M0 scale per 32 of them, four scales packed in an int32."""

from __future__ import annotations

import torch
from torch import Tensor

from mqa.formats.checks import check_floats, check_mx_head_dim, check_scale, check_tensor
from mqa.formats.elements import (
    MX_BLOCK,
    block_codes,
    decode_e4m3,
    decode_ue8m0,
    encode_e4m3,
    pack_scale,
    scale_blocks_,
    split_rows,
    take_apart,
)

_MAX_EXPONENT = 8
"""448 is 1.75 * 2**8."""


def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `x` [..., D] to E4M3 values and packed UE8M0 scales, D in {32, 64, 96, 128}.

    Args:
        x: float32, bfloat16 or float16, any strides, any device.

    Returns:
        values: `float8_e4m3fn` [..., D], the element nearest to x / scale, ties to even, saturated
            at ±448.
        scale: int32 [...], the code of block b in byte b (little endian), bytes past D/32 are 0.
            A code is floor(log2(max|x|)) - 8 + 127 over the finite elements of the block, at least
            0 (OCP MX v1.0, section 6.3); float32 never needs more than 246. A block without a
            finite nonzero element has code 127, the scale 1.

    Both are fresh and contiguous, and carry no gradient. NaN and ±inf become the NaN 0x7F, the
    rest of their block is quantised as if they were 0. Zeros and negative values keep their sign,
    also where they round to zero. Bits do not depend on the other blocks, the strides, the device
    or `torch.set_flush_denormal`. Reads nothing on the host.

    Raises:
        TypeError: `x` is no tensor or of another dtype.
        ValueError: `x` has no dimension or D is another number.
    """
    check_floats("quantize_mxfp8", x, block_scaled=True)
    parts = take_apart(x)
    blocks = split_rows(parts.magnitude, MX_BLOCK)
    codes = block_codes(blocks.amax(dim=-1), _MAX_EXPONENT)
    scaled = (blocks / decode_ue8m0(codes, torch.float64).unsqueeze(-1)).flatten(-2)
    return encode_e4m3(scaled, parts.sign, parts.finite), pack_scale(codes)


def dequantize_mxfp8(values: Tensor, scale: Tensor) -> Tensor:
    """The float32 values [..., D] of E4M3 `values` [..., D] and packed int32 `scale` [...].

    Exact for codes in [10, 246]. Elsewhere rounded once to float32: ±inf above its range, and on a
    CPU under `torch.set_flush_denormal(True)` 0 below it. NaN where an element or its block's
    scale is NaN.

    Raises:
        TypeError: `values` is not `float8_e4m3fn` or `scale` is not int32.
        ValueError: D is not 32, 64, 96 or 128, `scale` does not have one entry per row, or is on
            another device.
    """
    check_tensor("dequantize_mxfp8", "values", values, (torch.float8_e4m3fn,))
    check_scale("dequantize_mxfp8", values, scale, (torch.int32,))
    head_dim = values.shape[-1]
    check_mx_head_dim("dequantize_mxfp8", f"values.shape[-1]={head_dim}", head_dim)
    return scale_blocks_(decode_e4m3(values, torch.float64), scale).to(torch.float32)
