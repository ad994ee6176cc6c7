"""Instructions on registers give what numpy, or exact arithmetic, says."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from ptx_kernels import Array, apply, kernel

from mqa.emulator import PtxError, run
from mqa.emulator import floats as emulated

RANDOM = np.random.default_rng(5)
EDGES = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF, 0x10000, 7]
U32 = np.array((EDGES * 3)[:32], np.uint32)
V32 = RANDOM.permutation(U32) ^ np.uint32(5)
U64 = RANDOM.integers(0, 2**64, 32, np.uint64)
V64 = RANDOM.integers(1, 2**40, 32, np.uint64)
S32, T32 = U32.view(np.int32), V32.view(np.int32)
S64, T64 = U64.view(np.int64), V64.view(np.int64)
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38]
F32 = np.array([*SPECIAL, *RANDOM.normal(size=22)], np.float32)
G32 = np.roll(F32, 3)

INTEGERS: list[tuple[str, list[Array], Any]] = [
    ("add.s32", [U32, V32], U32 + V32),
    ("add.u64", [U64, V64], U64 + V64),
    ("sub.s32", [U32, V32], U32 - V32),
    ("sub.s64", [U64, V64], U64 - V64),
    ("mul.lo.s32", [U32, V32], U32 * V32),
    ("mul.lo.s64", [U64, V64], U64 * V64),
    ("mul.hi.s32", [S32, T32], (S32.astype(np.int64) * T32 >> 32).astype(np.int32)),
    ("mul.wide.s32", [S32, T32], S32.astype(np.int64) * T32),
    ("mul.wide.u32", [U32, V32], U32.astype(np.uint64) * V32),
    ("mad.lo.s32", [U32, V32, U32], U32 * V32 + U32),
    ("div.u32", [U32, np.maximum(V32, 1)], U32 // np.maximum(V32, 1)),
    ("rem.u32", [U32, np.maximum(V32, 1)], U32 % np.maximum(V32, 1)),
    ("div.s32", [S32, T32 | 1], np.array([int(a / b) for a, b in zip(S32, T32 | 1, strict=True)])),
    (
        "div.s64",
        [S64, T64],
        np.array([int(Fraction(int(a), int(b))) for a, b in zip(S64, T64, strict=True)]),
    ),
    ("max.s32", [S32, T32], np.maximum(S32, T32)),
    ("max.u32", [U32, V32], np.maximum(U32, V32)),
    ("min.s64", [S64, T64], np.minimum(S64, T64)),
    ("min.u64", [U64, V64], np.minimum(U64, V64)),
    ("and.b32", [U32, V32], U32 & V32),
    ("or.b64", [U64, V64], U64 | V64),
    ("xor.b32", [U32, V32], U32 ^ V32),
    ("not.b32", [U32], ~U32),
    ("neg.s32", [S32], -S32),
    ("abs.s32", [S32], np.abs(S32)),
    ("popc.b32", [U32], np.array([int(x).bit_count() for x in U32])),
    ("clz.b32", [U32], np.array([32 - int(x).bit_length() for x in U32])),
    ("brev.b32", [U32], np.array([int(f"{int(x):032b}"[::-1], 2) for x in U32])),
    (
        "bfind.shiftamt.u32",
        [U32],
        np.array([32 - int(x).bit_length() if x else 0xFFFFFFFF for x in U32]),
    ),
    (
        "shl.b32",
        [U32, V32],
        np.array([int(a) << min(int(b), 32) for a, b in zip(U32, V32, strict=True)]),
    ),
    (
        "shr.u32",
        [U32, V32],
        np.array([int(a) >> min(int(b), 32) for a, b in zip(U32, V32, strict=True)]),
    ),
    (
        "shr.s32",
        [S32, V32],
        np.array([int(a) >> min(int(b), 31) for a, b in zip(S32, V32, strict=True)]),
    ),
    ("cvt.s64.s32", [S32], S32.astype(np.int64)),
    ("cvt.u64.u32", [U32], U32.astype(np.uint64)),
    ("cvt.u32.u64", [U64], U64.astype(np.uint32)),
    ("cvt.u16.u32", [U32], U32.astype(np.uint16)),
    ("cvt.rn.f32.s32", [S32], S32.astype(np.float32)),
]


@pytest.mark.parametrize(("opcode", "inputs", "wanted"), INTEGERS, ids=[x[0] for x in INTEGERS])
def test_integer_instruction(opcode: str, inputs: list[Array], wanted: Array) -> None:
    bits = 64 if ".wide" in opcode or ".s64" in opcode or "64" in opcode.split(".")[1] else 32
    if opcode == "cvt.u32.u64":
        bits = 32
    bits = 16 if opcode == "cvt.u16.u32" else bits
    kind = np.float32 if wanted.dtype == np.float32 else f"u{bits // 8}"
    if opcode.startswith(("add.u64", "sub.s64", "mul.lo.s64", "min.u64", "or.b64")):
        kind = "u8"
    operands = ", ".join(f"in{i}" for i in range(len(inputs)))
    got = apply(f"{opcode} out, {operands};\n", inputs, kind)
    if np.dtype(kind).kind == "f":
        assert (got == wanted).all()
        return
    limit = 1 << 8 * np.dtype(kind).itemsize
    assert got.tolist() == [int(x) % limit for x in wanted.tolist()]


FLOATS: list[tuple[str, Callable[..., Any], int]] = [
    ("add.f32", np.add, 2),
    ("sub.f32", np.subtract, 2),
    ("mul.f32", np.multiply, 2),
    ("max.f32", np.fmax, 2),
    ("min.f32", np.fmin, 2),
    ("max.NaN.f32", np.maximum, 2),
    ("min.NaN.f32", np.minimum, 2),
    ("abs.f32", np.abs, 1),
    ("neg.f32", np.negative, 1),
]


@pytest.mark.parametrize(("opcode", "function", "count"), FLOATS, ids=[x[0] for x in FLOATS])
def test_float_instruction(opcode: str, function: Callable[..., Any], count: int) -> None:
    inputs = [F32, G32][:count]
    operands = ", ".join(f"in{i}" for i in range(count))
    with np.errstate(all="ignore"):
        wanted = function(*inputs)
    got = apply(f"{opcode} out, {operands};\n", inputs, np.float32)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("opcode", ["max.f32", "max.NaN.f32"])
def test_the_larger_zero_is_the_positive_one(opcode: str) -> None:
    zeros = np.zeros(32, np.float32)
    for first, second in ((zeros, -zeros), (-zeros, zeros)):
        got = apply(f"{opcode} out, in0, in1;\n", [first, second], np.float32)
        assert not np.signbit(got).any()
    assert np.signbit(apply(f"{opcode} out, in0, in1;\n", [-zeros, -zeros], np.float32)).all()


def test_max_nan_gives_the_canonical_nan() -> None:
    negative = np.full(32, 0xFFC12345, np.uint32).view(np.float32)
    got = apply("max.NaN.f32 out, in0, in1;\n", [F32, negative], np.float32)
    assert (got.view(np.uint32) == 0x7FFFFFFF).all()


def exact_fma(a: float, b: float, c: float) -> float:
    """Rounded once: by the distance to the neighbours of the sum rounded twice."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))
    around = (near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf)))
    even = [int(np.array(x, np.float32).view(np.uint32)) & 1 for x in around]
    return float(
        min(
            zip(around, even, strict=True),
            key=lambda x: (abs(Fraction(float(x[0])) - exact), x[1]),
        )[0]
    )


def test_fma_rounds_once_where_float64_would_round_twice() -> None:
    a = np.float32(1 + 2**-12)
    c = np.float32(2.0**-60)
    b = np.float32(1 + 2**-12)
    # a * b = 1 + 2^-11 + 2^-24, halfway between two float32 values: the tiny c decides.
    twice = np.float32(float(a) * float(b) + float(c))
    once = exact_fma(a, b, c)
    assert twice != once
    values = [np.full(32, x, np.float32) for x in (a, b, c)]
    got = apply("fma.rn.f32 out, in0, in1, in2;\n", values, np.float32)
    assert (got == np.float32(once)).all()


def test_fma_is_exact_arithmetic_rounded_once() -> None:
    for scale in (0, -70):
        a, b, c = RANDOM.normal(size=(3, 32)).astype(np.float32) * np.float32(2.0**scale)
        c = (c * np.float32(2.0 ** (scale - 20))).astype(np.float32)
        got = apply("fma.rn.f32 out, in0, in1, in2;\n", [a, b, c], np.float32)
        assert got.tolist() == [exact_fma(*x) for x in zip(a, b, c, strict=True)]


def test_e4m3_codes_become_float16_exactly() -> None:
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    pairs = codes.view(np.uint16)
    got = np.concatenate(
        [
            apply("cvt.rn.f16x2.e4m3x2 out, in0;\n", [pairs[i : i + 32]], np.uint32)
            for i in range(0, 128, 32)
        ]
    ).view(np.float16)
    wanted = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(got.astype(np.float32), wanted)


@pytest.mark.parametrize(("kind", "name"), [("bf16", "bfloat16"), ("f16", "float16")])
def test_rounding_to_half_formats_is_to_nearest_even(kind: str, name: str) -> None:
    import torch

    bits = RANDOM.integers(0, 2**32, 4096, np.uint32)
    ties = (RANDOM.integers(0, 2**16, 4096, np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    values = np.concatenate([bits, ties, F32.view(np.uint32)]).view(np.float32)
    wanted = torch.from_numpy(values).to(getattr(torch, name)).view(torch.int16).numpy()
    function = emulated.bf16_of if kind == "bf16" else emulated.f16_of
    with np.errstate(over="ignore", invalid="ignore"):
        got = function(values)
    nan = np.isnan(values)
    assert (got.view(np.int16) == wanted)[~nan].all()
    assert (got[nan] == 0x7FFF).all()
    few = values[-32:]
    assert (apply(f"cvt.rn.{kind}.f32 out, in0;\n", [few], np.uint16) == got[-32:]).all()


def test_pairs_have_the_first_operand_in_the_upper_half() -> None:
    one, two = np.full(32, 1.0, np.float32), np.full(32, 2.0, np.float32)
    got = apply("cvt.rn.bf16x2.f32 out, in0, in1;\n", [one, two], np.uint32)
    assert (got == 0x3F804000).all()


def test_a_predicated_instruction_changes_only_its_threads() -> None:
    body = "setp.lt.u32 %p1, %r0, 5;\nmov.u32 out, 7;\n@%p1 mov.u32 out, 9;\n"
    got = apply(body, [U32], np.uint32)
    assert got.tolist() == [9] * 5 + [7] * 27


def test_moves_pack_and_unpack() -> None:
    body = "mov.b64 %rd9, {in0, in1};\nmov.b64 {%r8, %r9}, %rd9;\nmov.b64 out, {%r9, %r8};\n"
    got = apply(body, [U32, V32], np.uint64)
    assert (got == V32.astype(np.uint64) | U32.astype(np.uint64) << np.uint64(32)).all()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("frobnicate.b32 %r1, %r2;", "frobnicate.b32: this instruction is not modelled"),
        ("add.sat.s32 %r1, %r2, %r3;", "modifier .sat is not modelled"),
        ("ld.global.frob.u32 %r1, [%rd1];", "modifier .frob is not modelled"),
        ("add.cc.u32 %r1, %r2, %r3;", "modifier .cc is not modelled"),
    ],
)
def test_what_is_not_modelled_is_an_error_with_its_line(text: str, said: str) -> None:
    with pytest.raises(PtxError, match=said) as caught:
        run(kernel(text, 0), "k", 1, 32, [])
    assert "PTX line 19" in str(caught.value)


def bits_of(value: int, count: int) -> int:
    return value & ((1 << count) - 1)


def test_bit_fields_are_inserted_and_extracted() -> None:
    starts, lengths = np.arange(32, dtype=np.uint32), (np.arange(32, dtype=np.uint32) * 3) % 34
    got = apply("bfe.u32 out, in0, in1, in2;\n", [V32, starts, lengths], np.uint32)
    wanted = [
        bits_of(int(x) >> int(s), min(int(n), 32))
        for x, s, n in zip(V32, starts, lengths, strict=True)
    ]
    assert got.tolist() == wanted
    got = apply("bfi.b32 out, in0, in1, 4, 8;\n", [U32, V32], np.uint32)
    assert (got == V32 & ~np.uint32(0xFF0) | (U32 & np.uint32(0xFF)) << np.uint32(4)).all()


def field_with_sign(value: int, start: int, length: int, bits: int) -> int:
    """As the ISA has it, bit by bit."""
    sign = value >> min(start + length - 1, bits - 1) & 1 if length else 0
    found = 0
    for i in range(bits):
        inside = i < length and start + i < bits
        found |= (value >> start + i & 1 if inside else sign) << i
    return found


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_bit_fields_with_a_sign_repeat_it(dtype: type[np.unsignedinteger[Any]]) -> None:
    bits = np.dtype(dtype).itemsize * 8
    random = np.random.default_rng(5)
    values = random.integers(0, 2**bits - 1, 32, dtype)
    starts = random.integers(0, bits + 8, 32).astype(np.uint32) | np.uint32(0x500)
    lengths = random.integers(0, bits, 32).astype(np.uint32)
    starts[:3], lengths[2:6] = (0, bits - 1, 255), (0, 1, bits, 255)
    got = apply(f"bfe.s{bits} out, in0, in1, in2;\n", [values, starts, lengths], dtype)
    rows = zip(values.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    assert got.tolist() == [field_with_sign(x, s & 255, n & 255, bits) for x, s, n in rows]


def test_bytes_are_permuted_and_their_signs_spread() -> None:
    words = [np.full(32, x, np.uint32) for x in (0x83020100, 0x07060584)]
    for selector, wanted in (
        (0x3210, 0x83020100),
        (0x7654, 0x07060584),
        (0x7531, 0x07058301),
        (0x0004, 0x00000084),
        (0x000B, 0x000000FF),
        (0x000C, 0x000000FF),
        (0x0009, 0x00000000),
    ):
        got = apply(f"prmt.b32 out, in0, in1, {selector};\n", words, np.uint32)
        assert (got == wanted).all()


def test_lop3_follows_its_table() -> None:
    inputs = [U32, V32, np.roll(U32, 5)]
    got = apply("lop3.b32 out, in0, in1, in2, 0x96;\n", inputs, np.uint32)
    assert (got == inputs[0] ^ inputs[1] ^ inputs[2]).all()
    got = apply("lop3.b32 out, in0, in1, in2, 0xE8;\n", inputs, np.uint32)
    a, b, c = inputs
    assert (got == (a & b | a & c | b & c)).all()


def test_funnel_shifts_take_64_bits() -> None:
    got = apply("shf.l.wrap.b32 out, in0, in1, 8;\n", [U32, V32], np.uint32)
    assert (got == V32 << np.uint32(8) | U32 >> np.uint32(24)).all()
    got = apply("shf.r.clamp.b32 out, in0, in1, 40;\n", [U32, V32], np.uint32)
    assert (got == V32).all()


def test_floats_become_integers_within_limits() -> None:
    values = np.array([0.5, 1.5, -1.5, 2.5, np.nan, np.inf, -np.inf, 3e9, -3e9, 7.9], np.float32)
    padded = np.resize(values, 32)
    limits = (2**31 - 1, -(2**31))
    for mode, near in (
        ("rni", [0, 2, -2, 2, 0, *limits, *limits, 8]),
        ("rzi", [0, 1, -1, 2, 0, *limits, *limits, 7]),
        ("rmi", [0, 1, -2, 2, 0, *limits, *limits, 7]),
        ("rpi", [1, 2, -1, 3, 0, *limits, *limits, 8]),
    ):
        got = apply(f"cvt.{mode}.s32.f32 out, in0;\n", [padded], np.uint32).view(np.int32)
        assert got[:10].tolist() == near


def test_pairs_of_e4m3_are_rounded_and_limited() -> None:
    import torch

    low = RANDOM.normal(scale=100, size=32).astype(np.float32)
    high = np.resize(np.array([0.0, -0.0, 500.0, -np.inf, 2**-10, 3 * 2**-10], np.float32), 32)
    got = apply("cvt.rn.satfinite.e4m3x2.f32 out, in0, in1;\n", [high, low], np.uint16)
    for codes, values in ((got & 0xFF, low), (got >> 8, high)):
        limited = torch.from_numpy(np.clip(values, -448, 448)).to(torch.float8_e4m3fn)
        assert codes.tolist() == limited.view(torch.uint8).tolist()


def test_fma_of_doubles_is_rounded_once() -> None:
    values = [np.full(32, x) for x in (1 + 2.0**-30, 1 + 2.0**-30, -1.0)]
    got = apply("fma.rn.f64 out, in0, in1, in2;\n", values, np.float64)
    assert (got == 2.0**-29 + 2.0**-60).all()


def test_products_of_bfloat16_pairs_are_rounded_once() -> None:
    import torch

    raw = RANDOM.integers(0, 2**16, (2, 64), np.uint16)
    raw = np.where(raw & 0x7F80 == 0x7F80, raw & 0xBFFF, raw).astype(np.uint16)
    with np.errstate(over="ignore"):
        got = apply("mul.rn.bf16x2 out, in0, in1;\n", [x.view(np.uint32) for x in raw], np.uint32)
    a, b = (torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).double() for x in raw)
    with np.errstate(over="ignore"):
        wanted = emulated.bf16_of((a * b).numpy())
    assert (got.view(np.uint16) == wanted).all()
