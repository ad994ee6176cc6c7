"""Opcodes and their modes, each in a small kernel whose result is computed here by other means."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from ptx_kernels import HEADER, Array, applied, apply, kernel

from mqa.emulator import EmulationError, Kind, run
from mqa.emulator.scheduler import SCHEDULES

RANDOM = np.random.default_rng(11)
LANES = np.arange(32, dtype=np.uint32)
U = RANDOM.integers(0, 2**32, 32, np.uint32)
V = np.where(LANES % 4 == 0, U, RANDOM.permutation(U)).astype(np.uint32)
S, T = U.view(np.int32), V.view(np.int32)
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.5]
F = np.array([*SPECIAL, *RANDOM.normal(scale=100, size=24)], np.float32)
G = np.array([*SPECIAL[1:], 0.0, *F[8:20], *RANDOM.normal(size=12)], np.float32)
NAN = math.nan


def halves_of(values: Array, kind: str) -> Array:
    """Bits of the nearest float16 or bfloat16, by torch."""
    import torch

    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    bits = torch.from_numpy(np.asarray(values, np.float64)).to(dtype).view(torch.int16).numpy()
    return np.where(np.isnan(values), 0x7FFF, bits.view(np.uint16)).astype(np.uint16)


def values_of(bits: Array, kind: str) -> Array:
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@dataclass
class Case:
    """A body for `apply`, and what it gives."""

    body: str
    inputs: list[Array]
    wanted: Array = field(repr=False)

    def __str__(self) -> str:
        return self.body.split(";")[0].split(" ")[0]

    @property
    def given(self) -> list[Array]:
        """Inputs, integers as unsigned ones."""
        return [x.view(f"u{x.itemsize}") if x.dtype.kind == "i" else x for x in self.inputs]

    @property
    def bits(self) -> Array:
        """What it gives as unsigned integers."""
        return self.wanted.view(f"u{self.wanted.itemsize}")

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.wanted.dtype if self.wanted.dtype.kind == "f" else self.bits.dtype


def compared(opcode: str, a: Array, b: Array, function: Callable[[Any, Any], bool]) -> Case:
    held = [function(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    return Case(
        f"{opcode} %p1, in0, in1;\nselp.u32 out, 1, 0, %p1;\n", [a, b], np.array(held, np.uint32)
    )


def apart(x: float, y: float) -> bool:
    return math.isnan(x) or math.isnan(y)


ORDER = {"eq": operator.eq, "lt": operator.lt, "le": operator.le, "gt": operator.gt}
ORDER |= {"ge": operator.ge}


def comparisons() -> list[Case]:
    found = [compared("setp.ne.s32", S, T, operator.ne)]
    for name, function in ORDER.items():
        unordered = lambda x, y, f=function: apart(x, y) or f(x, y)  # noqa: E731
        found.append(compared(f"setp.{name}.s32", S, T, function))
        found.append(compared(f"setp.{name}.f32", F, G, function))
        found.append(compared(f"setp.{name}u.f32", F, G, unordered))
    found.append(compared("setp.ne.f32", F, G, lambda x, y: not apart(x, y) and x != y))
    found.append(compared("setp.neu.f32", F, G, lambda x, y: apart(x, y) or x != y))
    found.append(compared("setp.num.f32", F, G, lambda x, y: not apart(x, y)))
    found.append(compared("setp.nan.f32", F, G, apart))
    for name, same in {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.items():
        found.append(compared(f"setp.{name}.u32", U, V, ORDER[same]))
    for kind in ("f16", "bf16"):
        a, b = halves_of(F, kind), halves_of(G, kind)
        bits = {
            (x, y): ORDER["lt"](*values_of(np.array([x, y], np.uint16), kind))
            for x, y in zip(a.tolist(), b.tolist(), strict=True)
        }
        found.append(compared(f"setp.lt.{kind}", a, b, lambda x, y, held=bits: held[x, y]))
    return found


COMPARISONS = comparisons()


def conversions() -> list[Case]:
    small = RANDOM.normal(scale=3, size=32).astype(np.float32)
    tenths = small / np.float64(10)
    both = {kind: [halves_of(x, kind).astype(np.uint32) for x in (F, small)] for kind in KINDS}
    found = [
        Case("cvt.rn.f16.f32 out, in0;\n", [F], halves_of(F, "f16")),
        Case("cvt.rn.bf16.f32 out, in0;\n", [F], halves_of(F, "bf16")),
        Case("cvt.rni.s32.f32 out, in0;\n", [small], np.rint(small).astype(np.int32)),
        Case("cvt.rzi.s32.f32 out, in0;\n", [small], np.trunc(small).astype(np.int32)),
        Case("cvt.rmi.s32.f32 out, in0;\n", [small], np.floor(small).astype(np.int32)),
        Case("cvt.rpi.s32.f32 out, in0;\n", [small], np.ceil(small).astype(np.int32)),
        Case("cvt.rn.f32.f64 out, in0;\n", [tenths], tenths.astype(np.float32)),
        Case("cvt.f64.f32 out, in0;\n", [small], small.astype(np.float64)),
        Case("cvt.s64.s32 out, in0;\n", [S], S.astype(np.int64)),
        Case("cvt.s32.s16 out, in0;\n", [U.astype(np.uint16)], U.astype(np.int16).astype(np.int32)),
    ]
    for kind in KINDS:
        low, high = both[kind][1], both[kind][0]
        pair = high << 16 | low
        found.append(Case(f"cvt.rn.{kind}x2.f32 out, in0, in1;\n", [F, small], pair))
        wide = values_of(halves_of(small, kind), kind).astype(np.float32)
        found.append(Case(f"cvt.f32.{kind} out, in0;\n", [halves_of(small, kind)], wide))
    return found


KINDS = ("f16", "bf16")
CONVERSIONS = conversions()


def exact(name: str, a: Array, b: Array, c: Array) -> Array:
    """In float64, where all but fma are exact for these operands, and it is near enough."""
    with np.errstate(invalid="ignore"):
        return {
            "add": a + b,
            "sub": a - b,
            "mul": a * b,
            "fma": a * b + c,
            "max": np.fmax(a, b),
            "min": np.fmin(a, b),
            "max.NaN": np.maximum(a, b),
            "min.NaN": np.minimum(a, b),
        }[name]


def halves() -> list[Case]:
    found = []
    names = ("add", "sub", "mul", "fma", "max", "min", "max.NaN", "min.NaN")
    for kind, name in itertools.product(KINDS, names):
        bits = [halves_of(x, kind) for x in (F[6:], G[6:], np.roll(F, 9)[6:])]
        bits = [np.resize(x, 64) for x in bits][: 3 if name == "fma" else 2]
        values = [values_of(x, kind) for x in bits]
        wanted = halves_of(exact(name, values[0], values[1], values[-1]), kind)
        opcode = f"{name}.rn.{kind}" if name == "fma" else f"{name}.{kind}"
        operands = ", ".join(f"in{i}" for i in range(len(bits)))
        found.append(Case(f"{opcode} out, {operands};\n", [x[:32] for x in bits], wanted[:32]))
        pairs = [x.view(np.uint32) for x in bits]
        found.append(Case(f"{opcode}x2 out, {operands};\n", pairs, wanted.view(np.uint32)))
    return found


def signs() -> list[Case]:
    bits = halves_of(np.where(np.isnan(F), 1.0, F), "f16")
    return [
        Case("neg.f16 out, in0;\n", [bits], bits ^ np.uint16(0x8000)),
        Case("abs.bf16 out, in0;\n", [bits], bits & np.uint16(0x7FFF)),
        Case("neg.bf16x2 out, in0;\n", [U], U ^ np.uint32(0x80008000)),
        Case("abs.f16x2 out, in0;\n", [U], U & np.uint32(0x7FFF7FFF)),
    ]


def quotients() -> list[Case]:
    a = np.where(np.isfinite(F), F, 3).astype(np.float32)
    b = np.where((G == 0) | ~np.isfinite(G), 7, G).astype(np.float32)
    large = np.full(32, 2.0**127, np.float32)
    return [
        Case("mul.f32 out, in0, 1.5e-1;\n", [b], b * np.float32(0.15)),
        Case("div.rn.f32 out, in0, in1;\n", [a, b], a / b),
        Case("div.full.f32 out, in0, in1;\n", [a, b], a / b),
        Case("div.approx.f32 out, in0, in1;\n", [a, b], a / b),
        Case("div.approx.f32 out, in0, in1;\n", [b, large], np.zeros(32, np.float32)),
    ]


def masks() -> list[Case]:
    one = np.uint32(1) << LANES
    wanted = {
        "lanemask_eq": one,
        "lanemask_lt": one - 1,
        "lanemask_le": one * 2 - 1,
        "lanemask_gt": ~(one * 2 - 1),
        "lanemask_ge": ~(one - 1),
        "laneid": LANES,
        "nwarpid": np.ones(32),
        "cluster_nctarank": np.ones(32),
        "nclusterid.x": np.ones(32),
        "cluster_nctaid.y": np.ones(32),
        "total_smem_size": np.zeros(32),
    }
    return [
        Case(f"mov.u32 out, %{name};\n", [], np.asarray(value, np.uint32))
        for name, value in wanted.items()
    ]


def exchanges() -> list[Case]:
    full = "0xffffffff"
    place = LANES.astype(np.int64)
    above, below = (np.where(place < 3, place, place - 3), np.where(place > 28, place, place + 3))
    flags = "setp.lt.u32 %p2, %r0, 5;\n"
    answer = ";\nselp.u32 out, 1, 0, %p1;\n"
    return [
        Case(f"shfl.sync.idx.b32 out, in0, 7, 31, {full};\n", [U], np.full(32, U[7])),
        Case(f"shfl.sync.up.b32 out, in0, 3, 0, {full};\n", [U], U[above]),
        Case(f"shfl.sync.down.b32 out, in0, 3, 31, {full};\n", [U], U[below]),
        Case(f"shfl.sync.bfly.b32 out, in0, 5, 31, {full};\n", [U], U[place ^ 5]),
        Case(f"{flags}vote.sync.any.pred %p1, %p2, {full}{answer}", [], np.ones(32, np.uint32)),
        Case(f"{flags}vote.sync.all.pred %p1, %p2, {full}{answer}", [], np.zeros(32, np.uint32)),
        Case(f"{flags}vote.sync.uni.pred %p1, %p2, {full}{answer}", [], np.zeros(32, np.uint32)),
        *(
            Case(f"{flags}{name}.red.popc.u32 out, 0, %p2;\n", [], np.full(32, 5, np.uint32))
            for name in ("bar", "bar.cta", "barrier", "barrier.cta")
        ),
        Case(f"{flags}vote.sync.ballot.b32 out, %p2, {full};\n", [], np.full(32, 31, np.uint32)),
        Case("activemask.b32 out;\n", [], np.full(32, 2**32 - 1, np.uint32)),
        Case(f"redux.sync.add.u32 out, in0, {full};\n", [U], np.full(32, U.sum(dtype=np.uint32))),
        Case(f"redux.sync.min.s32 out, in0, {full};\n", [S], np.full(32, S.min())),
        Case(f"redux.sync.max.u32 out, in0, {full};\n", [U], np.full(32, U.max())),
        Case(
            f"redux.sync.and.b32 out, in0, {full};\n",
            [U | 9],
            np.full(32, np.bitwise_and.reduce(U | 9)),
        ),
        Case(
            f"redux.sync.or.b32 out, in0, {full};\n",
            [U & 9],
            np.full(32, np.bitwise_or.reduce(U & 9)),
        ),
        Case(f"redux.sync.xor.b32 out, in0, {full};\n", [U], np.full(32, np.bitwise_xor.reduce(U))),
    ]


def other() -> list[Case]:
    """What has no result, around a move."""
    move = "mov.u32 out, %r0;\n"
    nothing = [
        "membar.gl;\n",
        "fence.acq_rel.gpu;\n",
        "nanosleep.u32 20;\n",
        "griddepcontrol.wait;\ngriddepcontrol.launch_dependents;\n",
        "prefetch.global.L1 [%rd0];\n",
        "prefetchu.L1 [%rd0];\n",
        "applypriority.global.L2::evict_normal [%rd0], 128;\n",
        "discard.global.L2 [%rd0], 128;\n",
    ]
    found = [Case(text + move, [], LANES) for text in nothing]
    policy = "createpolicy.fractional.L2::evict_first.b64 %rd40, 1.0;\n"
    hinted = "ld.global.L2::cache_hint.u32 out, [%rd51], %rd40;\nmov.b32 %r13, in0;\n"
    found.append(Case(policy + hinted, [U], U))
    body = "mov.u32 out, 1;\nsetp.lt.u32 %p1, %r0, 9;\n@%p1 exit;\n"
    found.append(Case(body, [], np.where(LANES < 9, 0, 1).astype(np.uint32)))
    wide = S.astype(np.int64) * T + U.astype(np.int64)
    found.append(Case("mad.wide.s32 out, in0, in1, in2;\n", [S, T, U.astype(np.uint64)], wide))
    return found


CASES = [
    *COMPARISONS,
    *CONVERSIONS,
    *halves(),
    *signs(),
    *quotients(),
    *masks(),
    *exchanges(),
    *other(),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcode(case: Case) -> None:
    got = apply(case.body, case.given, case.dtype)
    assert got.view(case.bits.dtype).tolist() == case.bits.tolist()


ATOMICS: list[tuple[str, str, Callable[[int, int], int]]] = [
    ("atom.global.add.u32", "u32", lambda old, new: old + new),
    ("atom.global.min.s32", "s32", min),
    ("atom.global.max.u32", "u32", max),
    ("atom.global.and.b32", "b32", operator.and_),
    ("atom.global.or.b32", "b32", operator.or_),
    ("atom.global.xor.b32", "b32", operator.xor),
    ("atom.global.exch.b32", "b32", lambda old, new: new),
    ("atom.global.inc.u32", "u32", lambda old, new: 0 if old >= new else old + 1),
    ("atom.global.dec.u32", "u32", lambda old, new: new if not 0 < old <= new else old - 1),
]
STORE = "mul.wide.u32 %rd8, %r0, 4;\nadd.s64 %rd9, %rd1, %rd8;\nst.global.u32 [%rd9], %r2;\n"
LOAD = "mul.wide.u32 %rd8, %r0, 4;\nadd.s64 %rd9, %rd2, %rd8;\nld.global.u32 %r1, [%rd9];\n"


def atomic_text(opcode: str) -> str:
    return kernel(f"{LOAD}{opcode} %r2, [%rd0], %r1;\n{STORE}", 3)


@pytest.mark.parametrize(("opcode", "kind", "change"), ATOMICS, ids=[x[0] for x in ATOMICS])
def test_atomics_give_what_was_there(
    opcode: str, kind: str, change: Callable[[int, int], int]
) -> None:
    dtype = np.int32 if kind == "s32" else np.uint32
    new = RANDOM.integers(0, 40, 32).astype(dtype) - (7 if kind == "s32" else 0)
    cell, before = np.array([12], dtype), np.zeros(32, dtype)
    run(atomic_text(opcode), "k", 1, 32, [cell, before, new])
    states = list(itertools.accumulate(new.tolist(), change, initial=12))
    assert before.tolist() == states[:-1]
    assert cell[0] == states[-1]


CAS = kernel(f"{LOAD}add.u32 %r3, %r0, 1;\natom.global.cas.b32 %r2, [%rd0], %r1, %r3;\n{STORE}", 3)
RED = kernel(f"{LOAD}red.global.add.u32 [%rd0], %r1;\nmov.u32 %r2, 0;\n{STORE}", 3)


def test_compare_and_swap_changes_what_is_as_expected() -> None:
    cell, before = np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    wrong = LANES.copy()
    wrong[3] = 77
    run(CAS, "k", 1, 32, [cell, before, wrong])
    assert before.tolist() == [0, 1, 2, *[3] * 29]
    assert cell[0] == 3


def test_red_adds_without_a_result() -> None:
    cell, before = np.full(1, 5, np.uint32), np.ones(32, np.uint32)
    run(RED, "k", 1, 32, [cell, before, LANES])
    assert cell[0] == 5 + LANES.sum()
    assert not before.any()


HANDED = """
mov.u64 %rd8, shared;
and.b32 %r1, %r0, 31;
mul.wide.u32 %rd9, %r1, 4;
add.s64 %rd9, %rd8, %rd9;
setp.lt.u32 %p1, %r0, 32;
@%p1 bra READ;
st.shared.u32 [%rd9], %r0;
ARRIVE 3, 64;
bra DONE;
READ: SYNC 3, 64;
ld.shared.u32 %r2, [%rd9];
mul.wide.u32 %rd10, %r1, 4;
add.s64 %rd10, %rd0, %rd10;
st.global.u32 [%rd10], %r2;
DONE:
"""
BARRIERS = [
    ("bar.arrive ", "bar.sync "),
    ("bar.cta.arrive ", "bar.cta.sync "),
    ("barrier.arrive ", "barrier.sync "),
    ("barrier.cta.arrive ", "barrier.cta.sync "),
]


def handed(arrive: str, sync: str) -> str:
    body = HANDED.replace("ARRIVE ", arrive).replace("SYNC ", sync)
    return kernel(body, 1, shared=".shared .align 16 .b8 shared[128];")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("names", BARRIERS, ids=lambda names: names[0].strip())
def test_a_warp_that_arrives_lets_another_go_on(names: tuple[str, str], schedule: str) -> None:
    out = np.zeros(32, np.uint32)
    run(handed(*names), "k", 1, 64, [out], schedule=schedule, seed=1)
    assert out.tolist() == list(range(32, 64))


MBARRIER = """
mov.u64 %rd8, shared;
cvt.u32.u64 %r8, %rd8;
mov.u32 %r2, 0;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra DONE;
mbarrier.init.shared::cta.b64 [%r8], 5;
mbarrier.arrive_drop.shared::cta.b64 %rd9, [%r8], 2;
mbarrier.pending_count.b64 %r3, %rd9;
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r8], 48;
mbarrier.arrive.noComplete.shared::cta.b64 %rd9, [%r8], 2;
mbarrier.arrive.shared::cta.b64 %rd9, [%r8];
mbarrier.pending_count.b64 %r4, %rd9;
mbarrier.test_wait.shared::cta.b64 %p2, [%r8], %rd9;
selp.u32 %r5, 1, 0, %p2;
mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r8], 48;
mbarrier.test_wait.shared::cta.b64 %p2, [%r8], %rd9;
selp.u32 %r6, 1, 0, %p2;
mbarrier.arrive.shared::cta.b64 %rd9, [%r8], 2;
mbarrier.pending_count.b64 %r7, %rd9;
mbarrier.arrive.shared::cta.b64 %rd9, [%r8];
mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r8], 1;
selp.u32 %r2, 1, 0, %p2;
st.global.u32 [%rd1], %r3;
st.global.u32 [%rd1+4], %r4;
st.global.u32 [%rd1+8], %r5;
st.global.u32 [%rd1+12], %r6;
st.global.u32 [%rd1+16], %r7;
st.global.u32 [%rd1+20], %r2;
DONE:
"""
ONE_BARRIER = ".shared .align 16 .b8 shared[16];"


def test_arrivals_that_drop_out_are_not_expected_again() -> None:
    out = np.zeros(6, np.uint32)
    run(kernel(MBARRIER, 2, shared=ONE_BARRIER), "k", 1, 32, [None, out])
    # Of 5 arrivals 2 drop out, so later phases have 3. Tokens tell what was to come before.
    assert out.tolist() == [5, 1, 0, 1, 3, 1]


def test_an_arrival_that_must_not_complete_a_phase_is_found() -> None:
    body = MBARRIER.replace(
        "noComplete.shared::cta.b64 %rd9, [%r8], 2", "noComplete.shared::cta.b64 %rd9, [%r8], 3"
    )
    body = body.replace("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r8], 48;\n", "")
    with pytest.raises(EmulationError) as caught:
        run(kernel(body, 2, shared=ONE_BARRIER), "k", 1, 32, [None, np.zeros(6, np.uint32)])
    assert caught.value.report.kind is Kind.BARRIER


CALL = """
.extern .func __assertfail
(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
.global .align 1 .b8 message[8] = {120, 32, 60, 32, 51, 0, 0, 0};
.global .align 1 .b8 file[4] = {97, 46, 99, 0};
"""
FAILS = """
setp.lt.u32 %p1, %r0, 30;
@%p1 bra DONE;
mov.u64 %rd1, message;
cvta.global.u64 %rd2, %rd1;
mov.u64 %rd3, file;
cvta.global.u64 %rd4, %rd3;
{
.param .b64 param0;
.param .b64 param1;
.param .b32 param2;
.param .b64 param3;
.param .b64 param4;
st.param.b64 [param0], %rd2;
st.param.b64 [param1], %rd4;
st.param.b32 [param2], 41;
st.param.b64 [param3], %rd4;
st.param.b64 [param4], 1;
call.uni __assertfail, (param0, param1, param2, param3, param4);
}
DONE:
"""


def asserting() -> str:
    return kernel(FAILS, 0).replace(HEADER, HEADER + CALL)


def test_a_failed_assertion_is_reported_with_its_text() -> None:
    with pytest.raises(EmulationError, match=r"'x < 3' of a\.c:41 by threads 0xc0000000") as caught:
        run(asserting(), "k", 1, 32, [])
    assert caught.value.report.kind is Kind.TRAP


TRAP = kernel("setp.eq.u32 %p1, %r0, 3;\n@!%p1 bra DONE;\ntrap;\nDONE:\n", 0)


@pytest.mark.parametrize("stop", ["trap;\n", "brkpt;\n"])
def test_a_trap_is_reported(stop: str) -> None:
    with pytest.raises(EmulationError, match="by threads 0x00000008") as caught:
        run(TRAP.replace("trap;\n", stop), "k", 1, 32, [])
    assert caught.value.report.kind is Kind.TRAP


def test_an_assembler_takes_the_kernels_of_these_tests(assembles: Any) -> None:
    given = [applied(case.body, case.given, case.dtype) for case in CASES]
    given += [atomic_text(opcode) for opcode, _, _ in ATOMICS] + [CAS, RED, TRAP, asserting()]
    given += [handed(*names) for names in BARRIERS] + [kernel(MBARRIER, 2, shared=ONE_BARRIER)]
    assembles(given, CALL)
