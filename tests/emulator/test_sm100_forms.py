"""Forms that compilers emit for sm_100f, each against what is computed here by other means; what a
target has; and what ptxas says of both."""

from __future__ import annotations

import math
import operator
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import test_sm100_alu
from ptx_kernels import HEADER, Array, applied, kernel
from test_isa import ORDER, Case, F, G, S, T, U, V, apart, halves_of, values_of

from mqa.emulator import EmulationError, Kind, run
from mqa.emulator.scheduler import SCHEDULES
from mqa.emulator.special import TESTS

TARGET = "sm_100f"
RANDOM = np.random.default_rng(31)
H = np.roll(F, 7)
LANES = np.arange(32, dtype=np.uint32)
CANONICAL = np.uint32(0x7FFFFFFF).view(np.float32)


def extremes() -> list[Case]:
    found = []
    for name, pick in (("max", max), ("min", min)):
        for nan in ("", ".NaN"):

            def chosen(*values: float, nan: str = nan, pick: Callable[..., float] = pick) -> float:
                """+0 is above -0."""
                numbers = [x for x in values if not math.isnan(x)]
                if not numbers or (nan and len(numbers) < len(values)):
                    return math.nan
                return pick(numbers, key=lambda x: (x, math.copysign(1, x)))

            rows = list(zip(F.tolist(), G.tolist(), H.tolist(), strict=True))
            three = np.array([chosen(*row) for row in rows], np.float32)
            sizes = np.array([chosen(*map(abs, row)) for row in rows], np.float32)
            opposite = np.signbit(F) != np.signbit(G)
            both = np.array([chosen(*map(abs, row[:2])) for row in rows], np.float32)
            signed = np.where(opposite & ~np.isnan(both), -both, both)
            both, sizes, three = (
                np.where(np.isnan(x), CANONICAL, x) for x in (signed, sizes, three)
            )
            found += [
                Case(f"{name}{nan}.f32 out, in0, in1, in2;\n", [F, G, H], three),
                Case(f"{name}{nan}.abs.f32 out, in0, in1, in2;\n", [F, G, H], sizes),
                Case(f"{name}{nan}.xorsign.abs.f32 out, in0, in1;\n", [F, G], both),
            ]
    return found


def mixed() -> list[Case]:
    found = []
    for kind in ("f16", "bf16"):
        bits = [halves_of(np.where(np.isfinite(x), x, 1), kind) for x in (F, G)]
        a, b = (values_of(x, kind) for x in bits)
        c = np.where(np.isfinite(H), H, 2).astype(np.float32)
        sums = (a + c).astype(np.float32)
        found += [
            Case(f"add.f32.{kind} out, in0, in1;\n", [bits[0], c], sums),
            Case(f"sub.f32.{kind} out, in0, in1;\n", [bits[0], c], (a - c).astype(np.float32)),
            Case(
                f"add.sat.f32.{kind} out, in0, in1;\n",
                [bits[0], c],
                np.where(sums > 0, np.minimum(sums, 1), 0).astype(np.float32),
            ),
            Case(
                f"fma.rn.f32.{kind} out, in0, in1, in2;\n",
                [*bits, c],
                (a * b + c).astype(np.float32),
            ),
        ]
    return found


def of_halves() -> list[Case]:
    """All from float64, where these sums and products are exact enough."""
    found = []
    for kind in ("f16", "bf16"):
        bits = [np.resize(halves_of(x[3:20] / 64, kind), 64) for x in (F, G, H)]
        a, b, c = (values_of(x, kind) for x in bits)
        pairs = [x.view(np.uint32) for x in bits]
        with np.errstate(invalid="ignore"):
            total = a * b + c
            relu = np.where(total <= 0, 0.0, total)
            sizes = np.fmax(np.abs(a), np.abs(b))
            signed = np.where(np.signbit(a) != np.signbit(b), -sizes, sizes)

        def both(opcode: str, values: Array, count: int, bits=bits, pairs=pairs, kind=kind) -> None:
            operands = ", ".join(f"in{i}" for i in range(count))
            code = halves_of(values, kind)
            single = [x[:32] for x in bits[:count]]
            found.append(Case(f"{opcode}.{kind} out, {operands};\n", single, code[:32]))
            packed = code.view(np.uint32)
            found.append(Case(f"{opcode}.{kind}x2 out, {operands};\n", pairs[:count], packed))

        both("fma.rn.relu", relu, 3)
        both("max.xorsign.abs", signed, 2)
        both("tanh.approx", np.tanh(a), 1)
        with np.errstate(over="ignore"):
            both("ex2.approx" if kind == "f16" else "ex2.approx.ftz", np.exp2(a), 1)
        if kind == "f16":
            held = np.where(total > 0, np.minimum(total, 1), 0)
            both("fma.rn.sat", held, 3)
            both("mul.sat", np.where(a * b > 0, np.minimum(a * b, 1), 0), 2)
            small = np.float64([6e-8, -6e-5, 2.0**-14, 1.0] * 16)
            codes = halves_of(small, kind)
            zeros = np.where(np.abs(small) < 2.0**-14, np.copysign(0, small), small)
            found.append(
                Case("neg.ftz.f16 out, in0;\n", [codes[:32]], halves_of(-zeros[:32], kind))
            )
            found.append(
                Case(
                    "add.ftz.f16x2 out, in0, in1;\n",
                    [codes.view(np.uint32), np.zeros(32, np.uint32)],
                    halves_of(zeros + 0.0, kind).view(np.uint32),
                )
            )
    return found


def comparisons() -> list[Case]:
    """As values, and of both halves."""
    less = np.array([x < y for x, y in zip(S.tolist(), T.tolist(), strict=True)])
    above = np.array([x > y for x, y in zip(F.tolist(), G.tolist(), strict=True)])
    found = [
        Case("set.lt.u32.s32 out, in0, in1;\n", [S, T], np.where(less, ~np.uint32(0), 0)),
        Case("set.lt.f32.s32 out, in0, in1;\n", [S, T], less.astype(np.float32)),
        Case("set.gt.ftz.s32.f32 out, in0, in1;\n", [F, G], np.where(above, -1, 0).astype("i4")),
        Case(
            "setp.lt.u32 %p1, %r0, 7;\nset.gt.and.u32.f32 out, in0, in1, %p1;\n",
            [F, G],
            np.where(above & (LANES < 7), ~np.uint32(0), 0).astype(np.uint32),
        ),
        Case(
            "setp.lt.s32 %p1|%p2, in0, in1;\nselp.u32 %r1, 1, 0, %p1;\n"
            "selp.u32 out, 2, 0, %p2;\nadd.u32 out, out, %r1;\n",
            [S, T],
            np.where(less, 1, 2).astype(np.uint32),
        ),
    ]
    for kind, one in (("f16", 0x3C00), ("bf16", 0x3F80)):
        bits = [np.resize(halves_of(x, kind), 64) for x in (F, G)]
        a, b = (values_of(x, kind) for x in bits)
        pairs = [x.view(np.uint32) for x in bits]
        for name in ("lt", "ltu", "nan", "eq"):
            rows = zip(a.tolist(), b.tolist(), strict=True)
            if name == "nan":
                held = np.array([apart(*row) for row in rows])
            else:
                same = ORDER[name[:2]]
                held = np.array([same(*row) or (name == "ltu" and apart(*row)) for row in rows])
            ones = np.where(held, one, 0).astype(np.uint16)
            masks = np.where(held, 0xFFFF, 0).astype(np.uint16)
            single = [x[:32] for x in bits]
            found += [
                Case(f"set.{name}.{kind}.{kind} out, in0, in1;\n", single, ones[:32]),
                Case(f"set.{name}.u16.{kind} out, in0, in1;\n", single, masks[:32]),
                Case(f"set.{name}.{kind}x2.{kind}x2 out, in0, in1;\n", pairs, ones.view("u4")),
                Case(f"set.{name}.u32.{kind}x2 out, in0, in1;\n", pairs, masks.view("u4")),
                Case(
                    f"setp.{name}.{kind}x2 %p1|%p2, in0, in1;\nselp.u32 %r1, 1, 0, %p1;\n"
                    "selp.u32 out, 2, 0, %p2;\nadd.u32 out, out, %r1;\n",
                    pairs,
                    (held[0::2] + 2 * held[1::2]).astype(np.uint32),
                ),
            ]
    return found


def bytes_of(x: int, kind: str, size: int = 1) -> list[int]:
    parts = [x >> 8 * size * i & (1 << 8 * size) - 1 for i in range(4 // size)]
    top = 1 << 8 * size - 1
    return [part - 2 * top if kind == "s32" and part & top else part for part in parts]


def dots() -> list[Case]:
    found = []
    for one in ("u32", "s32"):
        for other in ("u32", "s32"):
            rows = list(zip(U.tolist(), V.tolist(), strict=True))
            four = [
                sum(map(operator.mul, bytes_of(x, one), bytes_of(y, other))) + 5 for x, y in rows
            ]
            found.append(
                Case(f"dp4a.{one}.{other} out, in0, in1, 5;\n", [U, V], np.array(four) % 2**32)
            )
            for half, start in (("lo", 0), ("hi", 2)):
                two = [
                    sum(map(operator.mul, bytes_of(x, one, 2), bytes_of(y, other)[start:][:2])) - 9
                    for x, y in rows
                ]
                text = f"dp2a.{half}.{one}.{other} out, in0, in1, -9;\n"
                found.append(Case(text, [U, V], np.array(two) % 2**32))
    return [Case(case.body, case.inputs, case.wanted.astype(np.uint32)) for case in found]


def nth_bit(mask: int, base: int, offset: int) -> int:
    """As its definition counts."""
    if offset == 0:
        return base if mask >> base & 1 else 0xFFFFFFFF
    place, step = base, 1 if offset > 0 else -1
    while 0 <= place < 32:
        if mask >> place & 1:
            offset -= step
            if offset == 0:
                return place
        place += step
    return 0xFFFFFFFF


def integers() -> list[Case]:
    shorts, others = U.view(np.int16), V.view(np.int16)
    large = RANDOM.integers(0, 2**64, (2, 32), np.uint64)
    long = large.view(np.int64)
    base, offset = V % 32, (LANES % 9).astype(np.int32) - 4
    rows = zip(U.tolist(), base.tolist(), offset.tolist(), strict=True)
    differences = [
        sum(
            abs(a - b) << 8 * i
            for i, (a, b) in enumerate(zip(bytes_of(x, "u32"), bytes_of(y, "u32"), strict=True))
        )
        for x, y in zip(U.tolist(), V.tolist(), strict=True)
    ]
    pairs = zip(long[0].tolist(), long[1].tolist(), strict=True)
    unsigned = zip(large[0].tolist(), large[1].tolist(), strict=True)
    apart_by = [abs(a - b) + 3 for a, b in zip(S.tolist(), T.tolist(), strict=True)]
    high = [(a * b >> 32) + 7 for a, b in zip(S.tolist(), T.tolist(), strict=True)]
    return [
        Case("add.s16x2 out, in0, in1;\n", [U, V], (shorts + others).view(np.uint32)),
        Case("max.s16x2 out, in0, in1;\n", [U, V], np.maximum(shorts, others).view(np.uint32)),
        Case(
            "min.u16x2 out, in0, in1;\n",
            [U, V],
            np.minimum(U.view(np.uint16), V.view(np.uint16)).view(np.uint32),
        ),
        Case(
            "max.s16x2.relu out, in0, in1;\n",
            [U, V],
            np.maximum(np.maximum(shorts, others), np.int16(0)).view(np.uint32),
        ),
        Case("min.relu.s32 out, in0, in1;\n", [S, T], np.maximum(np.minimum(S, T), 0)),
        Case("mul.hi.s64 out, in0, in1;\n", [*long], np.array([a * b >> 64 for a, b in pairs])),
        Case(
            "mul.hi.u64 out, in0, in1;\n",
            [*large],
            np.array([a * b >> 64 for a, b in unsigned], np.uint64),
        ),
        Case("mad.hi.s32 out, in0, in1, 7;\n", [S, T], np.array(high, np.int64).astype(np.int32)),
        Case("sad.s32 out, in0, in1, 3;\n", [S, T], (np.array(apart_by) % 2**32).astype(np.uint32)),
        Case(
            "vabsdiff4.u32.u32.u32 out, in0, in1, in2;\n",
            [U, V, U],
            np.array(differences, np.uint32),
        ),
        Case(
            "fns.b32 out, in0, in1, in2;\n",
            [U, base, offset],
            np.array([nth_bit(*row) for row in rows], np.uint32),
        ),
        Case("copysign.f32 out, in0, in1;\n", [F, G], np.copysign(G, F)),
    ]


def classes() -> list[Case]:
    x = np.resize(np.float32([0.0, 1e-45, -1e-40, 2.0**-126, 3.0, np.inf, -np.inf, np.nan]), 32)
    wanted = {
        "finite": [1, 1, 1, 1, 1, 0, 0, 0],
        "infinite": [0, 0, 0, 0, 0, 1, 1, 0],
        "number": [1, 1, 1, 1, 1, 1, 1, 0],
        "notanumber": [0, 0, 0, 0, 0, 0, 0, 1],
        "normal": [0, 0, 0, 1, 1, 0, 0, 0],
        "subnormal": [0, 1, 1, 0, 0, 0, 0, 0],
    }
    assert wanted.keys() == TESTS.keys()
    answer = "selp.u32 out, 1, 0, %p1;\n"
    found = [
        Case(f"testp.{name}.f32 %p1, in0;\n{answer}", [x], np.resize(np.uint32(held), 32))
        for name, held in wanted.items()
    ]
    addresses = "mov.u64 %rd8, shared;\ncvta.shared.u64 %rd9, %rd8;\n"
    for space, held in (("shared", 1), ("shared::cluster", 1), ("global", 0), ("local", 0)):
        text = f"{addresses}isspacep.{space} %p1, %rd9;\n{answer}"
        found.append(Case(text, [], np.full(32, held, np.uint32)))
    return found


def numbers() -> list[Case]:
    """Conversions between integers and floats of all sizes."""
    small = np.where(np.isfinite(F), F * np.float32(3.7), 3).astype(np.float32)
    found = [
        Case("cvt.sat.u8.s32 out, in0;\n", [S], np.clip(S, 0, 255).astype(np.uint32)),
        Case("cvt.sat.s16.s32 out, in0;\n", [S], np.clip(S, -(2**15), 2**15 - 1)),
        Case("cvt.rni.f32.f32 out, in0;\n", [small], np.rint(small)),
        Case("cvt.rzi.ftz.s32.f32 out, in0;\n", [small], np.trunc(small).astype(np.int32)),
        Case("cvt.ftz.f64.f32 out, in0;\n", [small], small.astype(np.float64)),
    ]
    for kind in ("f16", "bf16"):
        bits = halves_of(small, kind)
        values = values_of(bits, kind)
        whole = np.array([7, -3, 4097, 70001, -257, 2**24 + 1] * 6, np.int32)[:32]
        found += [
            Case(f"cvt.rzi.s32.{kind} out, in0;\n", [bits], np.trunc(values).astype(np.int32)),
            Case(f"cvt.rmi.s64.{kind} out, in0;\n", [bits], np.floor(values).astype(np.int64)),
            Case(f"cvt.rni.{kind}.{kind} out, in0;\n", [bits], halves_of(np.rint(values), kind)),
            Case(f"cvt.f64.{kind} out, in0;\n", [bits], values),
            Case(
                f"cvt.rn.{kind}.f64 out, in0;\n",
                [small.astype("f8") / 7],
                halves_of(small.astype("f8") / 7, kind),
            ),
        ]
        with np.errstate(over="ignore"):
            found.append(Case(f"cvt.rn.{kind}.s32 out, in0;\n", [whole], halves_of(whole, kind)))
    bits = halves_of(small, "f16")
    found.append(
        Case("cvt.rn.bf16.f16 out, in0;\n", [bits], halves_of(values_of(bits, "f16"), "bf16"))
    )
    for rounding in ("rz", "rm", "rp"):
        want = [test_sm100_alu.rounded(test_sm100_alu.Fraction(x), rounding) for x in S.tolist()]
        found.append(Case(f"cvt.{rounding}.f32.s32 out, in0;\n", [S], np.float32(want)))
    nan = np.full(32, np.nan, np.float32)
    found.append(Case("cvt.rzi.s64.f32 out, in0;\n", [nan], np.full(32, -(2**63))))
    found.append(Case("cvt.rzi.u64.f32 out, in0;\n", [nan], np.full(32, 2**63, np.uint64)))
    found.append(Case("cvt.rzi.u32.f32 out, in0;\n", [nan], np.zeros(32, np.uint32)))
    return found


def reductions() -> list[Case]:
    found = []
    given = {"some": F, "all": np.full(32, np.nan, np.float32)}
    for x in given.values():
        numbers = x[~np.isnan(x)]
        for name in ("max", "min"):
            for size in ("", ".abs"):
                for nan in ("", ".NaN"):
                    values = np.abs(numbers) if size else numbers
                    value = CANONICAL
                    if len(numbers) and not (nan and len(numbers) < len(x)):
                        value = values.max() if name == "max" else values.min()
                    text = f"redux.sync.{name}{size}{nan}.f32 out, in0, -1;\n"
                    found.append(Case(text, [x], np.full(32, value, np.float32)))
    return found


CASES = [
    *extremes(),
    *mixed(),
    *of_halves(),
    *comparisons(),
    *dots(),
    *integers(),
    *classes(),
    *numbers(),
    *reductions(),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_form(case: Case) -> None:
    wanted = case.bits
    if wanted.dtype.itemsize == 8 and case.wanted.dtype.kind == "i":
        wanted = case.wanted.view(np.uint64)
    text = applied(case.body, case.given, case.dtype, TARGET)
    if "shared;" in case.body:
        text = text.replace(".reg .pred", ".shared .align 16 .b8 shared[16];\n.reg .pred")
    out = np.zeros(32, case.dtype)
    run(text, "k", 1, 32, [*case.given, out])
    assert out.view(wanted.dtype).tolist() == wanted.tolist()


EIGHT = "{%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}"
FOUR = "{%rd20, %rd21, %rd22, %rd23}"
WIDE = [
    (f"ld.global.v8.b32 {EIGHT}", f"st.global.v8.b32 [%rd9], {EIGHT}"),
    (f"ld.global.nc.v8.b32 {EIGHT}", f"st.global.L2::evict_first.v8.b32 [%rd9], {EIGHT}"),
    (f"ld.global.v4.b64 {FOUR}", f"st.global.L2::evict_last.v4.b64 [%rd9], {FOUR}"),
    (
        f"ld.global.L1::no_allocate.L2::evict_first.L2::256B.v4.b64 {FOUR}",
        f"st.global.v4.b64 [%rd9], {FOUR}",
    ),
]


def wide_text(load: str, store: str) -> str:
    body = f"""
mul.wide.u32 %rd8, %r0, 32;
add.s64 %rd9, %rd0, %rd8;
{load}, [%rd9];
add.s64 %rd9, %rd1, %rd8;
{store};
"""
    return kernel(body, 2, target=TARGET)


@pytest.mark.parametrize(("load", "store"), WIDE)
def test_accesses_of_32_bytes(load: str, store: str) -> None:
    given = np.zeros(32 * 8 + 8, np.uint32)
    given = given[-(given.ctypes.data // 4) % 8 :][: 32 * 8]
    given[:] = RANDOM.integers(0, 2**32, 256, np.uint32)
    out = np.zeros_like(np.zeros(32 * 8 + 8, np.uint32))
    out = out[-(out.ctypes.data // 4) % 8 :][: 32 * 8]
    run(wide_text(load, store), "k", 1, 32, [given, out])
    assert (out == given).all()
    shifted = np.zeros(300, np.uint32)
    shifted = shifted[(-(shifted.ctypes.data // 4) % 8 + 4) % 8 :][:256]
    with pytest.raises(EmulationError) as caught:
        run(wide_text(load, store), "k", 1, 32, [shifted, out])
    assert caught.value.report.kind is Kind.MISALIGNED


def halves_added(kind: str, old: Array, new: list[Array]) -> Array:
    for one in new:
        old = halves_of(values_of(old, kind) + values_of(one, kind), kind)
    return old


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_atomic_sums_of_halves_and_vectors(kind: str, count: int) -> None:
    """32 threads add in the order of their numbers; each element is rounded after each."""
    registers = [f"%rs{1 + i}" for i in range(count)]
    vector = registers[0] if count == 1 else f"{{{', '.join(registers)}}}"
    length = "" if count == 1 else f".v{count}"
    moves = "".join(f"ld.global.b16 {x}, [%rd9+{2 * i}];\n" for i, x in enumerate(registers))
    text = f"mul.wide.u32 %rd8, %r0, {2 * count};\nadd.s64 %rd9, %rd1, %rd8;\n{moves}"
    text += f"red.global.add.noftz{length}.{kind} [%rd0], {vector};\n"
    new = halves_of(RANDOM.normal(size=(32, count)), kind)
    cell = halves_of(np.arange(16.0), kind)
    want = halves_added(kind, cell[:count], list(new))
    run(kernel(text, 2), "k", 1, 32, [cell, new])
    assert cell[:count].tolist() == want.tolist()
    assert cell[count:].tolist() == halves_of(np.arange(16.0), kind)[count:].tolist()


def test_atomics_of_pairs_and_float_vectors_give_what_was_there() -> None:
    text = """
atom.global.add.noftz.bf16x2 %r1, [%rd0], 0x3F804000;
atom.global.max.noftz.v2.f16x2 {%r2, %r3}, [%rd0+8], {0x3C004000, 0xC000BC00};
mov.f32 %f1, 0f3F800000;
atom.global.add.v4.f32 {%f2, %f3, %f4, %f5}, [%rd0+16], {%f1, %f1, %f1, 0f40000000};
mov.u16 %rs1, 7;
atom.global.cas.b16 %rs2, [%rd0+32], 5, %rs1;
st.global.u32 [%rd1], %r1;
st.global.v2.u32 [%rd1+8], {%r2, %r3};
st.global.v4.f32 [%rd1+16], {%f2, %f3, %f4, %f5};
st.global.u16 [%rd1+32], %rs2;
"""
    cell = np.zeros(16, np.uint32)
    cell[0], cell[2:4], cell[8] = 0x40003F80, [0x40003C00, 0xBC00C000], 5
    cell[4:8] = np.float32([1, 2, 3, 4]).view(np.uint32)
    before, was = np.zeros(16, np.uint32), cell.copy()
    run(kernel(text, 2), "k", 1, 1, [cell, before])
    assert before[[0, 2, 3, 4, 5, 6, 7, 8]].tolist() == was[[0, 2, 3, 4, 5, 6, 7, 8]].tolist()
    assert cell[0] == 0x40404040  # 2 + 1 and 1 + 2 in bfloat16
    assert cell[2:4].tolist() == [0x40004000, 0xBC00BC00]
    assert cell[4:8].view(np.float32).tolist() == [2, 3, 4, 6]
    assert cell[8] == 7


SHARED = ".shared .align 16 .b8 shared[256];"
BEGIN = """
mov.u64 %rd8, shared;
cvt.u32.u64 %r8, %rd8;
mov.u32 %r9, %cluster_ctarank;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r8], 1;
mbarrier.arrive.expect_tx.shared::cta.b64 %rd9, [%r8], $BYTES;
st.shared.v4.u32 [%r8+16], {%r9, %r9, %r9, %r9};
READY:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
xor.b32 %r10, %r9, 1;
mapa.shared::cluster.u32 %r11, %r8, %r10;
shl.b32 %r12, %r0, $SHIFT;
add.u32 %r13, %r11, %r12;
mad.lo.u32 %r14, %r9, 1000, %r0;
"""
END = """
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r8], 0;
@!%p2 bra WAIT;
mad.lo.u32 %r15, %r9, 32, %r0;
mul.wide.u32 %rd10, %r15, 4;
add.s64 %rd10, %rd0, %rd10;
shl.b32 %r16, %r0, $READ;
add.u32 %r16, %r16, %r8;
ld.shared.u32 %r17, [%r16+$AT];
st.global.u32 [%rd10], %r17;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""
COUNTED = "mbarrier::complete_tx::bytes"


def remote_text(issue: str, size: int, shift: int, at: int, read: int = 2) -> str:
    body = BEGIN + issue + END
    for name, value in (("$BYTES", size), ("$SHIFT", shift), ("$READ", read), ("$AT", at)):
        body = body.replace(name, str(value))
    return kernel(body, 1, shared=SHARED)


STORED = remote_text(
    f"st.async.weak.shared::cluster.{COUNTED}.b32 [%r13+64], %r14, [%r11];\n", 128, 2, 64
)
VECTORS = remote_text(
    "setp.gt.u32 %p3, %r0, 7;\n@%p3 bra WAIT;\n"
    f"st.async.shared::cluster.{COUNTED}.v4.u32 [%r13+64], {{%r14, %r14, %r14, %r14}}, [%r11];\n",
    128,
    4,
    64,
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("text", [STORED, VECTORS], ids=["one", "vector"])
def test_stores_that_go_on_by_themselves_reach_the_other_cta(text: str, schedule: str) -> None:
    out = np.zeros(64, np.uint32)
    for seed in range(3):
        run(text, "k", 2, 32, [out], cluster=2, schedule=schedule, seed=seed)
        each = LANES if text is STORED else LANES // 4
        assert out.tolist() == [*(1000 + each).tolist(), *each.tolist()]


def found_in(text: str, schedule: str = "eager") -> Kind:
    with pytest.raises(EmulationError) as caught:
        run(text, "k", 2, 32, [np.zeros(64, np.uint32)], cluster=2, schedule=schedule, seed=1)
    return caught.value.report.kind


def test_reading_before_the_barrier_is_a_race() -> None:
    unwaited = STORED.replace("mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r8], 0;\n", "")
    assert found_in(unwaited.replace("@!%p2 bra WAIT;\n", ""), "hunt") in (
        Kind.RACE,
        Kind.UNWRITTEN,
    )


def test_a_barrier_of_another_cta_is_found() -> None:
    assert found_in(STORED.replace("%r14, [%r11]", "%r14, [%r8]")) is Kind.BARRIER


REDUCED: list[tuple[str, str, Callable[[int, int], int]]] = [
    ("add", "u32", operator.add),
    ("max", "s32", max),
    ("min", "u32", min),
    ("xor", "b32", operator.xor),
    ("or", "b32", operator.or_),
    ("and", "b32", operator.and_),
    ("inc", "u32", lambda old, limit: 0 if old >= limit else old + 1),
    ("dec", "u32", lambda old, limit: limit if not 0 < old <= limit else old - 1),
]


REDUCES = f"red.async.relaxed.cluster.shared::cluster.{COUNTED}"


def reduce_text(name: str, kind: str) -> str:
    """Threads of each CTA combine their values with one place of the other."""
    issue, size = f"{REDUCES}.{name}.{kind} [%r11+16], %r14, [%r11];\n", 128
    if name in ("inc", "dec"):
        issue = "mov.u32 %r14, 40;\n" + issue
    if kind in ("u64", "s64"):
        issue, size = "cvt.u64.u32 %rd20, %r14;\n" + issue.replace("%r14", "%rd20"), 256
    text = remote_text(issue, size, 2, 16, read=8)
    return text.replace("shl.b32 %r16, %r0, 8", "mov.u32 %r16, 0")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "kind", "change"), REDUCED, ids=[x[0] for x in REDUCED])
def test_reductions_that_go_on_by_themselves_meet_in_one_place(
    name: str, kind: str, change: Callable[[int, int], int], schedule: str
) -> None:
    out = np.zeros(64, np.uint32)
    run(reduce_text(name, kind), "k", 2, 32, [out], cluster=2, schedule=schedule, seed=2)
    for rank in range(2):
        total = rank
        for thread in range(32):
            total = change(total, 40 if name in ("inc", "dec") else 1000 * (1 - rank) + thread)
        assert (out[32 * rank :][:32] == total).all()


@pytest.mark.parametrize("kind", ["u64", "s64"])
def test_sums_of_64_bits_meet_too(kind: str) -> None:
    out = np.zeros(64, np.uint32)
    run(reduce_text("add", kind), "k", 2, 32, [out], cluster=2, schedule="random", seed=1)
    assert out[[0, 32]].tolist() == [32 * 1000 + 496, 1 + 496]


BULK = """
mov.u64 %rd8, shared;
cvta.shared.u64 %rd9, %rd8;
setp.eq.u32 %p1, %r0, 0;
@%p1 st.bulk.weak.shared::cta [%rd8], 128, 0;
@%p1 st.bulk.weak [%rd9+128], $SIZE, 0;
bar.sync 0;
shl.b32 %r1, %r0, 3;
cvt.u64.u32 %rd10, %r1;
add.s64 %rd11, %rd8, %rd10;
ld.shared.u64 %rd12, [%rd11];
add.s64 %rd13, %rd0, %rd10;
st.global.u64 [%rd13], %rd12;
"""


def test_shared_memory_is_cleared_in_bulk() -> None:
    out = np.full(32, 7, np.uint64)
    text = kernel(BULK, 1, shared=SHARED, target=TARGET)
    run(text.replace("$SIZE", "128"), "k", 1, 32, [out], schedule="hunt", seed=1)
    assert not out.any()
    for size, kind in (
        ("120", Kind.UNWRITTEN),
        ("124", Kind.MISALIGNED),
        ("136", Kind.OUT_OF_BOUNDS),
    ):
        with pytest.raises(EmulationError) as caught:
            run(text.replace("$SIZE", size), "k", 1, 32, [out])
        assert caught.value.report.kind is kind


MASKED = """
mov.u64 %rd8, shared;
cvt.u32.u64 %r8, %rd8;
shl.b32 %r1, %r0, 2;
add.u32 %r2, %r8, %r1;
st.shared.u32 [%r2], %r0;
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra DONE;
mov.u16 %rs1, $MASK;
cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd0], [%r8], 128, %rs1;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""


@pytest.mark.parametrize("mask", [0xFFFF, 0x0FF0, 0x8001, 0])
def test_a_bulk_store_leaves_out_bytes_without_a_bit(mask: int) -> None:
    raw = np.zeros(160, np.uint8)
    out = raw[-raw.ctypes.data % 16 :][:128]
    out[:] = 0xEE
    text = kernel(MASKED.replace("$MASK", str(mask)), 1, shared=SHARED, target=TARGET)
    run(text, "k", 1, 32, [out], schedule="lazy")
    keeps = np.array([mask >> i % 16 & 1 for i in range(128)], bool)
    assert (out == np.where(keeps, LANES.view(np.uint8), 0xEE)).all()


INDEXED = """
rem.u32 %r1, %r0, $COUNT;
mov.u32 %r2, 100;
setp.lt.u32 %p1, %r0, 30;
TARGETS: .branchtargets
ZERO,
ONE, TWO;
@%p1 brx.idx %r1, TARGETS;
bra DONE;
ZERO: add.u32 %r2, %r2, 1;
bra DONE;
ONE: add.u32 %r2, %r2, 2;
TWO: add.u32 %r2, %r2, 4;
DONE:
mul.wide.u32 %rd8, %r0, 4;
add.s64 %rd9, %rd0, %rd8;
st.global.u32 [%rd9], %r2;
"""


def test_branches_go_where_an_index_says() -> None:
    out = np.zeros(32, np.uint32)
    run(kernel(INDEXED.replace("$COUNT", "3"), 1), "k", 1, 32, [out])
    assert out.tolist() == [*[101, 106, 104] * 10, 100, 100]
    with pytest.raises(EmulationError) as caught:
        run(kernel(INDEXED.replace("$COUNT", "4"), 1), "k", 1, 32, [out])
    assert caught.value.report.kind is Kind.OUT_OF_BOUNDS
    assert "index 3 of 3 targets" in str(caught.value)


def test_ptxas_takes_the_forms(tmp_path: Path) -> None:
    if shutil.which("ptxas") is None:
        pytest.skip("ptxas is not installed")
    texts = [applied(case.body, case.given, case.dtype, TARGET) for case in CASES]
    texts = [x.replace(".reg .pred", f"{SHARED}\n.reg .pred") for x in texts]
    texts += [wide_text(*forms) for forms in WIDE]
    others = [STORED, VECTORS, *(reduce_text(name, kind) for name, kind, _ in REDUCED)]
    others.append(reduce_text("add", "s64"))
    texts += [text.replace("sm_90a", TARGET) for text in others]
    for body, params in ((BULK.replace("$SIZE", "64"), 1), (MASKED.replace("$MASK", "3"), 1)):
        texts.append(kernel(body, params, shared=SHARED, target=TARGET))
    texts.append(kernel(INDEXED.replace("$COUNT", "3"), 1, target=TARGET))
    header = HEADER.replace("sm_90a", TARGET)
    parts = [header]
    for i, text in enumerate(texts):
        parts.append(text.removeprefix(header).replace(".entry k(", f".entry k{i}("))
    file = tmp_path / "all.ptx"
    file.write_text("".join(parts))
    command = ["ptxas", "-O0", f"-arch={TARGET}", "-o", str(tmp_path / "all.cubin"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CLUSTER = """
mov.u32 %r1, %cluster_ctarank;
mov.u64 %rd8, shared;
cvt.u32.u64 %r8, %rd8;
setmaxnreg.dec.sync.aligned.u32 40;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
shl.b32 %r2, %r1, 2;
add.u32 %r3, %r8, %r2;
setp.ge.u32 %p1, %r0, 16;
@%p1 bra SENT;
mapa.shared::cluster.u32 %r4, %r3, %r0;
add.u32 %r5, %r1, 100;
st.shared::cluster.u32 [%r4], %r5;
SENT:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
@%p1 bra DONE;
shl.b32 %r6, %r0, 2;
add.u32 %r6, %r6, %r8;
ld.shared.u32 %r7, [%r6];
mov.u32 %r9, %clusterid.x;
mad.lo.u32 %r10, %r9, 16, %r1;
mad.lo.u32 %r10, %r10, 16, %r0;
mul.wide.u32 %rd9, %r10, 4;
add.s64 %rd9, %rd0, %rd9;
st.global.u32 [%rd9], %r7;
DONE:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cluster_of_16_ctas_exchanges_values(schedule: str) -> None:
    text = kernel(CLUSTER, 1, shared=SHARED, target=TARGET)
    text = text.replace("\n)\n{", "\n)\n.maxntid 128, 1, 1\n.minnctapersm 1\n{")
    out = np.zeros((2, 16, 16), np.uint32)
    run(text, "k", 32, 128, [out], cluster=16, schedule=schedule, seed=4)
    assert (out == 100 + np.arange(16)).all()
    with pytest.raises(ValueError, match="expected 1 to 16 CTAs"):
        run(text, "k", 32, 128, [out], cluster=32)
