"""Types that Hopper's tensor unit multiplies and sums: their values, and how sums are rounded.

Sums of E4M3 and of bfloat16 to float32 are those that an H200 confirmed bit for bit. For the other
types the same unit is assumed: as many bits as for the confirmed type of that width, and float16
sums rounded once to nearest even. They are exact where nothing is rounded.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from mqa.emulator.floats import CANONICAL_NAN_F32, E4M3, E5M2, Array, f16_of, f32_of_bf16
from mqa.testing._codes import F64, I32
from mqa.testing.accumulators import HOPPER_BF16, HOPPER_FP8, FusedTruncating

HOPPER_F16 = FusedTruncating(bits=25, k=16, min_exponent=-14)
HOPPER_TF32 = FusedTruncating(bits=25, k=8, min_exponent=-126)
HOPPER_E5M2 = FusedTruncating(bits=13, k=32, min_exponent=-14)


class HalfSums(FusedTruncating):
    """Terms as in `FusedTruncating`; sums are rounded to nearest even to float16 after each MMA."""

    def _add(self, total: F64, q: F64, k: F64, largest: I32) -> F64:
        unit = np.ldexp(1.0, largest - self.bits)
        with np.errstate(invalid="ignore"):  # infinities that meet are NaN
            units = np.trunc(total / unit)
            for a, b in zip(q, k, strict=True):
                units += np.trunc(np.multiply.outer(a, b) / unit)
        return round_half(units * unit)


def round_half(values: Array) -> Array:
    """To the nearest float16, ties to even, infinite from 65520 on; a zero is +0."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float16).astype(np.float64) + 0.0


def wrap(sums: Array, *, saturates: bool) -> Array:
    """Whole numbers as int32: cut to its range, or its low 32 bits."""
    if saturates:
        return np.clip(sums, -(2.0**31), 2.0**31 - 1)
    return sums.astype(np.int64).astype(np.int32).astype(np.float64)


@dataclass(frozen=True)
class Form:
    """The types of one product."""

    name: str
    """Of the operands' types, and of the sums' if that is not float32."""
    a: str
    b: str
    sums: str
    """f32, f16 or s32."""
    depth: int
    """Elements along K."""
    model: FusedTruncating | None
    """How sums are formed; None for integers, which are exact modulo 2^32."""
    saturates: bool = False

    @property
    def transposes(self) -> bool:
        """Whether operands may have the rows' dimension contiguous."""
        return self.a in ("f16", "bf16")

    def column_step(self, columns: int) -> int:
        """What the number of columns has to be a multiple of."""
        return 16 if self.model is None and columns > 24 else 8

    @property
    def sums_of_register(self) -> int:
        """How many an accumulator register holds."""
        return 2 if self.sums == "f16" else 1

    def sums_of(self, registers: Array) -> Array:
        """Values of accumulator registers, [registers, 32], as [N / 2, 32]."""
        if self.sums == "f16":
            pairs = np.ascontiguousarray(registers).view(np.uint32)
            halves = np.stack([pairs & np.uint32(0xFFFF), pairs >> np.uint32(16)], axis=1)
            return halves.reshape(-1, 32).astype(np.uint16).view(np.float16).astype(np.float64)
        return registers.view(np.float32 if self.sums == "f32" else np.int32).astype(np.float64)

    def registers_of(self, sums: Array) -> Array:
        """The reverse of `sums_of`, as bits: a float16 register holds two of a row's columns."""
        if self.sums == "s32":
            return sums.astype(np.int64).astype(np.uint32)
        if self.sums == "f16":
            halves = f16_of(sums).astype(np.uint32)
            return halves[::2] | halves[1::2] << np.uint32(16)
        bits = sums.astype(np.float32).view(np.uint32)
        nan = np.isnan(sums)
        return np.where(nan, CANONICAL_NAN_F32, bits) if np.count_nonzero(nan) else bits


_MODELS = {
    ("e4m3", "e4m3"): HOPPER_FP8,
    ("e5m2", "e5m2"): HOPPER_E5M2,
    ("e4m3", "e5m2"): replace(HOPPER_FP8, confirmed=False, k_min_exponent=-14),
    ("e5m2", "e4m3"): replace(HOPPER_E5M2, k_min_exponent=-6),
    ("bf16", "bf16"): HOPPER_BF16,
    ("f16", "f16"): HOPPER_F16,
    ("tf32", "tf32"): HOPPER_TF32,
}


def _forms() -> dict[str, Form]:
    """By the three types that an opcode ends with: sums, A, B."""
    found = {}
    for (a, b), model in _MODELS.items():
        name = a if a == b else f"{a} and {b}"
        found[f"f32.{a}.{b}"] = Form(name, a, b, "f32", model.k, model)
        if a not in ("bf16", "tf32"):
            half = HalfSums(model.bits, model.k, model.min_exponent, False, model.k_min_exponent)
            found[f"f16.{a}.{b}"] = Form(f"f16 of {name}", a, b, "f16", model.k, half)
    for a, b in itertools.product(_INTEGERS, _INTEGERS):
        name = f"s32.{a}.{b}"
        found[name] = Form(name, a, b, "s32", 32, None)
        found[f"{name}.satfinite"] = Form(f"{name}.satfinite", a, b, "s32", 32, None, True)
    return found


_INTEGERS = {"s8": np.int8, "u8": np.uint8}
OPCODES = _forms()
"""By the end of an opcode: types of the sums, of A and of B."""
FORMS = {form.name: form for form in OPCODES.values()}


def decode(raw: bytes, rows: int, kind: str) -> tuple[Array, int]:
    """Values of an operand, float64 [rows, K], and the exponent of its type's subnormals."""
    data = np.frombuffer(raw, np.uint8).reshape(rows, -1)
    if kind == "e4m3":
        return E4M3[data], -6
    if kind == "e5m2":
        return E5M2[data], -14
    if kind == "f16":
        return data.view(np.float16).astype(np.float64), -14
    if kind == "bf16":
        return f32_of_bf16(data.view(np.uint16)).astype(np.float64), -126
    if kind == "tf32":  # the low 13 bits are not looked at
        return (data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(
            np.float64
        ), -126
    return data.view(_INTEGERS[kind]).astype(np.float64), 0
