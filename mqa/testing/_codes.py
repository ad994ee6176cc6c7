"""What element and scale codes mean, in numpy, decoded from their bits.

Shares nothing with `mqa.formats`, so that one slip can't hide in both.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

F64: TypeAlias = npt.NDArray[np.float64]
F32: TypeAlias = npt.NDArray[np.float32]
U8: TypeAlias = npt.NDArray[np.uint8]
U16: TypeAlias = npt.NDArray[np.uint16]
Codes: TypeAlias = U8 | U16
"""Element codes: 16 bits for `bf16`, else 8, a nibble in the low ones for `mxfp4`."""
I32: TypeAlias = npt.NDArray[np.int32]
I64: TypeAlias = npt.NDArray[np.int64]
Bool: TypeAlias = npt.NDArray[np.bool_]

BLOCK = 32
"""Elements that share one UE8M0 scale."""


def _e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

E4M3: F64 = np.array([_e4m3(code) for code in range(256)])
E2M1: F64 = np.array([*_E2M1_MAGNITUDES, *(-m for m in _E2M1_MAGNITUDES)])


def element_table(fmt: str) -> F64:
    """Value of every element code: 256 of E4M3, or 16 of E2M1 for `mxfp4`."""
    return E2M1 if fmt == "mxfp4" else E4M3


def decode(codes: Codes, scales: U8 | None, fmt: str) -> F64:
    """Values of element codes [..., D] times their block scales [..., D / 32], if any: float64.

    Exact: an element has at most 8 significant bits and a scale is a power of two.
    """
    if fmt == "bf16":
        # Not by a conversion of float32, which a process may be told to flush subnormals in.
        magnitude = (codes & 0x7FFF).astype(np.int64)
        wide = np.where(magnitude < 0x80, 0, (magnitude << 45) + ((1023 - 127) << 52))
        values = wide.view(np.float64) + np.where(magnitude < 0x80, magnitude * 2.0**-133, 0.0)
        values[magnitude == 0x7F80], values[magnitude > 0x7F80] = np.inf, np.nan
        return np.where(codes >> 15 == 1, -values, values)
    values = element_table(fmt)[codes]
    if scales is None:
        return values
    powers = np.ldexp(1.0, scales.astype(np.int32) - 127)
    powers[scales == 255] = np.nan
    return np.asarray(values * np.repeat(powers, BLOCK, axis=-1), np.float64)


def encode(values: F64, fmt: str) -> Codes:
    """The nearest element code of each finite value; magnitudes past the largest saturate."""
    if fmt == "bf16":
        return _encode_bf16(values)
    sign_bit = 8 if fmt == "mxfp4" else 0x80
    magnitudes = E2M1[:8] if fmt == "mxfp4" else E4M3[:127]
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes: U8 = np.searchsorted(middles, np.abs(values)).astype(np.uint8)
    codes[np.signbit(values)] |= np.uint8(sign_bit)
    return codes


def _encode_bf16(values: F64) -> U16:
    """Ties to even."""
    magnitude = np.abs(values)
    exponent = np.clip(np.frexp(magnitude)[1].astype(np.int64) - 1, -126, 127)
    exponent[magnitude == 0] = -126
    steps = np.rint(np.ldexp(magnitude, 7 - exponent)).astype(np.int64)  # with the implicit bit
    codes = np.minimum(steps + ((exponent + 126) << 7), 0x7F7F)
    return np.asarray(codes | np.signbit(values).astype(np.int64) << 15, np.uint16)


def pack_nibbles(codes: Codes) -> U8:
    """E2M1 codes [..., D] as bytes [..., D / 2], the even element in the low nibble."""
    return np.asarray(codes[..., 0::2] | codes[..., 1::2] << 4, np.uint8)


def pack_scales(codes: U8, filler: U8) -> I32:
    """UE8M0 codes [..., D / 32] as int32 [...]: block b in byte b, `filler` [..., 4] behind."""
    octets = filler.copy()
    octets[..., : codes.shape[-1]] = codes
    return np.ascontiguousarray(octets).view("<i4")[..., 0].astype(np.int32)
