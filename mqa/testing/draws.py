"""Random numbers that are the same on every machine, and the elements drawn from them."""

from __future__ import annotations

import math
import zlib

import numpy as np

from mqa.problem import MX_FORMATS
from mqa.testing._codes import F64, I64, U16, Bool, Codes, encode

Shape = tuple[int, ...]


class Draw:
    """A stream of integers that depends on `seed` and `purpose` alone.

    Only raw words of PCG64 and integer arithmetic are used: numpy promises that stream for ever,
    while its distributions, and libm under them, may change.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        entropy = np.random.SeedSequence([seed, zlib.crc32(purpose.encode())])
        self._generator = np.random.PCG64(entropy)

    def words(self, shape: Shape) -> I64:
        """Uniform 32-bit words, as int64."""
        count = math.prod(shape)
        raw = np.asarray(self._generator.random_raw((count + 1) // 2), dtype="<u8")
        return raw.view("<u4")[:count].astype(np.int64).reshape(shape)

    def below(self, limit: int, shape: Shape = ()) -> I64:
        """Uniform integers 0 .. limit - 1."""
        return self.words(shape) * limit >> 32

    def between(self, low: int, high: int, shape: Shape = ()) -> I64:
        """Uniform integers low .. high, both included."""
        return low + self.below(high - low + 1, shape)

    def number(self, low: int, high: int) -> int:
        """One uniform integer low .. high, both included."""
        return int(self.between(low, high))

    def one_in(self, odds: float, shape: Shape) -> Bool:
        """True once in `odds`."""
        return self.words(shape) < 2**32 / odds

    def bell(self, shape: Shape) -> I64:
        """Sums of four bytes less 510: about normal, standard deviation 148, within +-510."""
        octets = self.words(shape)
        total = sum((octets >> shift & 255) for shift in (0, 8, 16, 24))
        return np.asarray(total - 510, dtype=np.int64)

    def shuffled(self, count: int) -> I64:
        """A permutation of 0 .. count - 1."""
        return np.argsort(self.words((count,)), kind="stable").astype(np.int64)


def direction(seed: int, head_dim: int) -> I64:
    """+-1 for each dim: what q and k lean towards, so that more than half of the dots are > 0."""
    return Draw(seed, "direction").below(2, (head_dim,)) * 2 - 1


def leaning_signs(draw: Draw, shape: Shape, towards: I64, lean: float) -> I64:
    """+-1 [..., D] that agree with `towards` [D] often enough for a mean dot of `lean` sigmas."""
    surplus = min(0.9, math.sqrt(lean / (0.7 * math.sqrt(shape[-1]))))
    agree = draw.words(shape) < int((1 + surplus) / 2 * 2**32)
    return np.where(agree, towards, -towards)


def bounded_elements(draw: Draw, fmt: str, shape: Shape, towards: I64, special: Bool) -> Codes:
    """Codes [..., D] of about normal values with a few awkward ones; all finite.

    One element in 64 is +-0 or among the smallest, one in 256 the largest. Vectors marked in
    `special` [...] are uniformly random codes instead, their magnitudes spread over all exponents.
    """
    if fmt == "bf16":
        return _bounded_bf16(draw, shape, towards, special)
    spread = 2.0 if fmt == "mxfp4" else 74.0
    magnitude = np.abs(draw.bell(shape)) * (spread / 148)
    codes = encode(magnitude * leaning_signs(draw, shape, towards, 0.7), fmt)
    small, large, sign = (1, 7, 8) if fmt == "mxfp4" else (7, 0x7E, 0x80)
    signs = draw.below(2, shape) * sign
    rare = draw.one_in(64, shape)
    codes[rare] = (draw.between(0, small, shape) + signs)[rare]
    rare = draw.one_in(256, shape)
    codes[rare] = (large + signs)[rare]
    wild = draw.below(2 * sign, shape)
    if fmt != "mxfp4":
        wild = np.where((wild & 0x7F) == 0x7F, wild - 1, wild)
    return np.where(special[..., None], wild, codes).astype(np.uint8)


def _bounded_bf16(draw: Draw, shape: Shape, towards: I64, special: Bool) -> U16:
    """Of `bounded_elements`; the magnitudes of special vectors are spread over 2^-100 .. 2^45:
    their products leave room for the sums."""
    signs = leaning_signs(draw, shape, towards, 0.7)
    codes = encode(np.abs(draw.bell(shape)) / 148 * signs, "bf16")
    sign = draw.below(2, shape) << 15
    rare = draw.one_in(64, shape)
    codes[rare] = (draw.between(0, 7, shape) | sign)[rare]
    rare = draw.one_in(256, shape)
    codes[rare] = (0x40FF | sign)[rare]  # 7.97
    wild = draw.between(127 - 100, 127 + 44, shape) << 7 | draw.below(2**7, shape) | sign
    return np.where(special[..., None], wild, codes).astype(np.uint16)


def small_values(draw: Draw, fmt: str, shape: Shape, towards: I64, top: int, lean: float) -> F64:
    """Values of the exact regime: for MX {0, .5, 1, 1.5, 2, 3}, else integers up to +-top."""
    if fmt not in MX_FORMATS:
        magnitude = draw.between(0, top, shape).astype(np.float64)
    else:
        magnitude = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0])[draw.below(6, shape)]
    return magnitude * leaning_signs(draw, shape, towards, lean)
