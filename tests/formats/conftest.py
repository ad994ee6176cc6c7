"""An element format by its bit definition, in exact rational arithmetic."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch


@dataclass(frozen=True)
class Minifloat:
    """Sign, exponent and mantissa fields of `bits` bits; no code is special here."""

    bits: int
    mantissa_bits: int
    bias: int
    max_code: int

    def value(self, code: int) -> Fraction:
        sign = code >> self.bits - 1
        exponent = code >> self.mantissa_bits & (1 << self.bits - 1 - self.mantissa_bits) - 1
        mantissa = Fraction(code & (1 << self.mantissa_bits) - 1, 1 << self.mantissa_bits)
        if exponent:
            magnitude = (1 + mantissa) * Fraction(2) ** (exponent - self.bias)
        else:
            magnitude = mantissa * Fraction(2) ** (1 - self.bias)
        return -magnitude if sign else magnitude

    def magnitudes(self) -> list[Fraction]:
        return [self.value(code) for code in range(self.max_code + 1)]

    def nearest(self, value: Fraction, *, negative: bool) -> int:
        """The code nearest to a value, ties to the even code, saturated."""
        table = self.magnitudes()
        above = min(bisect.bisect_left(table, abs(value)), self.max_code)
        below = max(above - 1, 0)
        to_below, to_above = abs(value) - table[below], table[above] - abs(value)
        if to_below == to_above:
            code = below if below % 2 == 0 else above
        else:
            code = below if to_below < to_above else above
        return code | negative << self.bits - 1


@pytest.fixture(scope="session")
def e4m3() -> Minifloat:
    return Minifloat(bits=8, mantissa_bits=3, bias=7, max_code=0x7E)


@pytest.fixture(scope="session")
def e2m1() -> Minifloat:
    return Minifloat(bits=4, mantissa_bits=1, bias=1, max_code=7)


@pytest.fixture
def flush_denormal() -> Iterator[None]:
    """Subnormal float32 operands and results count as zero on this thread, as far as it can."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)
