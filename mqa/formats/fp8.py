"""FP8: E4M3 elements with one float32 scale per row."""

from __future__ import annotations

import torch
from torch import Tensor

from mqa.formats.checks import check_floats, check_scale, check_tensor
from mqa.formats.elements import E4M3_MAX, decode_e4m3, encode_e4m3, take_apart

_MIN_SCALE = 2.0**-126
"""The smallest normal float32: a smaller scale would be lost where subnormals are flushed."""
_MAX_POWER_OF_TWO = 2.0**119
"""448 * 2**119 is finite in float32, 256 * 2**120 is not."""


def quantize_fp8(x: Tensor, *, power_of_two_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise rows of `x` [..., D] to E4M3 values and one scale each.

    Args:
        x: float32, bfloat16 or float16, any strides, any device.
        power_of_two_scale: round the scale up to a power of two, which is at most 2**119.

    Returns:
        values: `float8_e4m3fn` [..., D], the element nearest to the exact quotient x / scale, ties
            to even, saturated at ±448 (OCP OFP8, saturating conversion of finite values).
        scale: float32 [...], max|x| / 448 over the finite elements of the row, rounded once to
            float32 and at least 2**-126. A row without a finite nonzero element has scale 1.

    Both are fresh and contiguous, and carry no gradient. NaN and ±inf become the NaN 0x7F (E4M3
    has no infinity, and as 448 it would pass for the row's largest finite element); the rest of
    their row is quantised as if they were 0. Zeros and negative values keep their sign, also
    where they round to zero. Bits do not depend on the other rows, the strides, the device or
    `torch.set_flush_denormal`. Reads nothing on the host.

    Raises:
        TypeError: `x` is no tensor or of another dtype, or `power_of_two_scale` is no bool.
        ValueError: `x` has no dimension or D is 0.
    """
    check_floats("quantize_fp8", x)
    if not isinstance(power_of_two_scale, bool):
        got = type(power_of_two_scale).__name__
        raise TypeError(f"quantize_fp8: power_of_two_scale is a {got}, expected a bool")
    parts = take_apart(x)
    amax = parts.magnitude.amax(dim=-1, keepdim=True)
    wide = (amax / E4M3_MAX).clamp_(min=_MIN_SCALE).masked_fill_(amax == 0, 1.0)
    scale = wide.to(torch.float32)
    if power_of_two_scale:
        bits = scale.view(torch.int32) + 0x7FFFFF & 0x7F800000
        scale = bits.view(torch.float32).clamp_(max=_MAX_POWER_OF_TWO)
    quotient = parts.magnitude / scale.to(torch.float64)
    return encode_e4m3(quotient, parts.sign, parts.finite), scale.squeeze(-1)


def dequantize_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """The float32 values [..., D] that E4M3 `values` [..., D] and their float32 `scale` [...] mean.

    Each is the product, rounded once to float32; NaN where an element or its scale is NaN. Under
    `torch.set_flush_denormal(True)` subnormal scales and results are 0 on a CPU.

    Raises:
        TypeError: `values` is not `float8_e4m3fn` or `scale` is not float32.
        ValueError: `scale` does not have one entry per row, or is on another device.
    """
    check_tensor("dequantize_fp8", "values", values, (torch.float8_e4m3fn,))
    check_scale("dequantize_fp8", values, scale, (torch.float32,))
    return decode_e4m3(values) * scale.unsqueeze(-1)
