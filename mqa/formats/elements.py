"""Element codes: what the bits of E4M3, E2M1 and UE8M0 mean, as floating-point values.

Sources: OCP 8-bit Floating Point Specification (OFP8) for E4M3; OCP Microscaling Formats (MX)
Specification v1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0). E4M3 is the "fn" variant: no
infinities, NaN at 0x7F and 0xFF. UE8M0 e means 2**(e - 127), 0xFF is NaN.

Tables are built on the device that asks for them by device arithmetic alone, so nothing here
copies from the host or waits for the device, and all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
MX_BLOCK = 32
"""Elements that share one UE8M0 scale."""
UE8M0_BIAS = 127
UE8M0_NAN = 255
E4M3_NAN = 0x7F
_E4M3_MAX_CODE = 0x7E
_E2M1_MAX_CODE = 7
_INF_BITS = 0x7F800000


@dataclass(frozen=True, slots=True)
class Parts:
    """A float tensor taken apart: contiguous tensors of the input's shape."""

    magnitude: Tensor
    """float64, exact, subnormals included; 0 where the element isn't finite."""
    sign: Tensor
    """uint8, 1 for a set sign bit (-0.0 has it)."""
    finite: Tensor
    """bool."""


def take_apart(x: Tensor) -> Parts:
    """Sign, magnitude and finiteness of float32, bfloat16 or float16 elements.

    Works on bits, because comparing or converting float32 subnormals depends on
    `torch.set_flush_denormal`.
    """
    signed = x.detach().contiguous().to(torch.float32).view(torch.int32)
    bits = (signed & 0x7FFFFFFF).to(torch.int64)
    finite = bits < _INF_BITS
    normal = ((bits << 29) + (1023 - 127 << 52)).view(torch.float64)
    magnitude = torch.where(bits < 1 << 23, bits.to(torch.float64).mul_(2.0**-149), normal)
    return Parts(magnitude.masked_fill_(~finite, 0.0), (signed < 0).to(torch.uint8), finite)


def encode_e4m3(magnitude: Tensor, sign: Tensor, finite: Tensor) -> Tensor:
    """E4M3 elements nearest to float64 magnitudes below 2**50, ties to even, saturated at 448.

    Where `finite` is False the element is the NaN 0x7F. Returns `float8_e4m3fn`.
    """
    code = _encode(magnitude, 3, -6, _E4M3_MAX_CODE) | sign << 7
    return code.masked_fill_(~finite, E4M3_NAN).view(torch.float8_e4m3fn)


def encode_e2m1(magnitude: Tensor, sign: Tensor) -> Tensor:
    """E2M1 elements nearest to float64 magnitudes below 2**50, ties to even, saturated at 6.

    Returns packed uint8: [..., D] to [..., D/2], the even element in the low nibble.
    """
    code = _encode(magnitude, 1, 0, _E2M1_MAX_CODE) | sign << 3
    return code[..., ::2] | code[..., 1::2] << 4


def block_codes(amax: Tensor, max_exponent: int) -> Tensor:
    """UE8M0 codes (int64) for the largest magnitude of each block, float64.

    OCP MX v1.0, section 6.3: the largest power of two that is at most amax, divided by the largest
    power of two of the element format, 2**max_exponent. Clamped to the code range; a block of
    zeros gets the scale 1.
    """
    exponent = (amax.view(torch.int64) >> 52) - 1023
    code = (exponent - max_exponent + UE8M0_BIAS).clamp_(0, UE8M0_NAN - 1)
    return code.masked_fill_(amax == 0, UE8M0_BIAS)


def split_rows(x: Tensor, size: int) -> Tensor:
    """[..., n * size] to [..., n, size]; a view where strides allow it."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def pack_scale(codes: Tensor) -> Tensor:
    """Packed scales: codes [..., at most 4] of any integer dtype to int32 [...], the rest 0."""
    packed = codes.new_zeros((*codes.shape[:-1], 4), dtype=torch.uint8)
    packed[..., : codes.shape[-1]] = codes
    return packed.view(torch.int32).squeeze(-1)


def decode_e4m3(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of `float8_e4m3fn` elements (or their bytes), exact in float32 or float64 `dtype`."""
    if values.device.type != "cpu":
        return values.view(torch.float8_e4m3fn).to(dtype)
    # On a CPU looking up is several times faster than float8's own conversion.
    codes = torch.arange(256, device=values.device, dtype=torch.int32).to(torch.uint8)
    table = codes.view(torch.float8_e4m3fn).to(dtype)
    indices = values.view(torch.uint8).reshape(-1).to(torch.int32)
    return table.index_select(0, indices).view(values.shape)


def decoder(stored: torch.dtype) -> Callable[[Tensor, torch.dtype], Tensor]:
    """What gives the values of elements that calls hold as `bfloat16`, `float8_e4m3fn` or bytes of
    packed E2M1."""
    known = {torch.bfloat16: decode_bf16, torch.float8_e4m3fn: decode_e4m3}
    return known.get(stored, decode_e2m1)


def decode_bf16(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of `bfloat16` elements, exact in float32 or float64 `dtype`, subnormals too."""
    if dtype == torch.float32:
        return values.to(torch.float32)  # moves bits, whatever torch.set_flush_denormal says
    parts = take_apart(values)
    signed = torch.where(parts.sign > 0, -parts.magnitude, parts.magnitude)
    return torch.where(parts.finite, signed, values.to(dtype))


def decode_e2m1(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of packed E2M1 elements: [..., D/2] bytes to [..., D], low nibble first.

    E2M1's fields in the high places of E4M3's mean the same value divided by 2**6: the exponent
    biases are 1 and 7, and subnormals follow suit.
    """
    byte = packed.view(torch.uint8)
    nibbles = torch.stack((byte & 15, byte >> 4), dim=-1).flatten(-2)
    return decode_e4m3((nibbles & 8) << 4 | (nibbles & 7) << 2, dtype).mul_(64.0)


def decode_ue8m0(scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of UE8M0 codes (any integer dtype, 0 to 255), exact: 2**(code - 127), NaN at 255.

    Built from bits: a power function may be off by an ulp, and float32 holds 2**-127 only as a
    subnormal.
    """
    code = scale.to(torch.int64)
    if dtype == torch.float64:
        power = (code - UE8M0_BIAS + 1023 << 52).view(torch.float64)
    elif dtype == torch.float32:
        power = torch.where(code > 0, code << 23, 1 << 22).to(torch.int32).view(torch.float32)
    else:
        raise TypeError(f"decode_ue8m0: dtype={dtype}, expected torch.float32 or torch.float64")
    return torch.where(code == UE8M0_NAN, float("nan"), power)


def unpack_scale(scale: Tensor, head_dim: int) -> Tensor:
    """UE8M0 codes of packed scales: int32 [...] to uint8 [..., D / 32], block b in byte b."""
    shifts = torch.arange(0, head_dim // MX_BLOCK * 8, 8, device=scale.device, dtype=torch.int32)
    return (scale.unsqueeze(-1) >> shifts & 255).to(torch.uint8)


def scale_blocks_(values: Tensor, scale: Tensor) -> Tensor:
    """Multiply float32 or float64 values [..., D] in place by their packed scales int32 [...]."""
    scales = decode_ue8m0(unpack_scale(scale, values.shape[-1]), values.dtype)
    values.unflatten(-1, (-1, MX_BLOCK)).mul_(scales.unsqueeze(-1))
    return values


def _encode(magnitude: Tensor, mantissa_bits: int, min_exponent: int, max_code: int) -> Tensor:
    """Codes (uint8, no sign) of a format whose smallest normal is 2**min_exponent."""
    exponent = ((magnitude.view(torch.int64) >> 52) - 1023).clamp_(min=min_exponent)
    per_step = (1023 + mantissa_bits - exponent << 52).view(torch.float64)
    steps = per_step.mul_(magnitude).round_()  # to even; the implicit bit is among the steps
    code = steps.to(torch.int64) + (exponent - min_exponent << mantissa_bits)
    return code.clamp_(max=max_code).to(torch.uint8)
