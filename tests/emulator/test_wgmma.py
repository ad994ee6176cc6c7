"""Products of a warpgroup: where operands lie, what sums are, when registers are there."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import Array, kernel

from mqa.emulator import EmulationError, Kind, run, wgmma
from mqa.emulator.floats import E4M3
from mqa.emulator.reports import Finding
from mqa.emulator.scheduler import SCHEDULES
from mqa.testing.accumulators import HOPPER_BF16, HOPPER_FP8

RANDOM = np.random.default_rng(3)
COLUMNS = 16
REGISTERS = COLUMNS // 2
ROW = 32
"""Bytes of a row: operands lie with a swizzle of 32 bytes, one product wide."""


def test_descriptors_of_the_worked_examples_place_rows() -> None:
    for descriptor, span in (
        (0x4000004000010840, 128),
        (0x8000002000010840, 64),
        (0xC000001000010840, 32),
    ):
        chunks = wgmma.chunks_of(descriptor, 16)
        assert chunks[0].tolist() == [0x8400 ^ (0x8400 >> 7 & span // 16 - 1) << 4, *chunks[0][1:]]
        assert (chunks[8] - chunks[0] == 8 * span).all()
        moved = wgmma.chunks_of(descriptor + 2, 16)
        lines = wgmma.chunks_of(descriptor, 16) >> 7
        if span > 32:
            assert (moved >> 7 == lines).all()
            assert not set(moved.ravel()) & set(wgmma.chunks_of(descriptor, 16).ravel())


@pytest.mark.parametrize("bits", [1 << 14, 1 << 46, 1 << 60, 3 << 49])
def test_descriptors_with_unknown_bits_are_found(bits: int) -> None:
    with pytest.raises(Finding) as caught:
        wgmma.chunks_of(0x4000004000010840 | bits, 8)
    assert caught.value.kind is Kind.DESCRIPTOR


def test_fragments_are_those_of_the_worked_examples() -> None:
    row, column = wgmma.fragment(64)
    places = {(0, 0): (0, 0), (0, 1): (0, 1), (0, 2): (8, 0), (0, 3): (8, 1), (0, 4): (0, 8)}
    places[37, 6], places[127, 31] = (25, 10), (63, 63)
    for (thread, register), place in places.items():
        found = row[register, thread % 32] + 16 * (thread // 32), column[register, thread % 32]
        assert found == place


def codes(rows: int, *, exact: bool) -> Array:
    if exact:
        small = np.array([c for c in range(256) if abs(E4M3[c]) <= 7 and E4M3[c] % 1 == 0])
        return RANDOM.choice(small, (rows, 32)).astype(np.uint8)
    return RANDOM.choice(np.array([c for c in range(256) if c & 127 != 127]), (rows, 32)).astype(
        np.uint8
    )


@pytest.mark.parametrize("exact", [True, False])
def test_products_are_those_of_the_accumulator_model(exact: bool) -> None:
    steps = [(codes(64, exact=exact), codes(48, exact=exact)) for _ in range(3)]
    total: Array | None = None
    whole: wgmma.Whole | None = wgmma.Whole()
    for a, b in steps:
        first, second = (wgmma._decoded(x.tobytes(), len(x), "e4m3") for x in (a, b))
        want = HOPPER_FP8.dots(E4M3[a], E4M3[b], total)
        whole = whole and whole.with_products(first, second, HOPPER_FP8)
        got = wgmma.multiply(first, second, total, "e4m3")
        assert (got == want).all()
        assert (whole is not None) == exact
        if exact:
            assert (wgmma.plain(first, second, total) == want).all()
        total = want


def test_bfloat16_products_are_those_of_the_accumulator_model() -> None:
    a, b = (RANDOM.integers(0x3C00, 0x4300, (rows, 16), np.uint16) for rows in (64, 24))
    first, second = (wgmma._decoded(x.tobytes(), len(x), "bf16") for x in (a, b))
    start = RANDOM.normal(size=(64, 24)).astype(np.float32).astype(np.float64)
    want = HOPPER_BF16.dots(first.values, second.values, start)
    assert (wgmma.multiply(first, second, start, "bf16") == want).all()


def test_a_nan_spoils_its_row_and_column_alone() -> None:
    a, b = codes(64, exact=True), codes(16, exact=True)
    a[5, 7], b[3, 1] = 0x7F, 0xFF
    first, second = (wgmma._decoded(x.tobytes(), len(x), "e4m3") for x in (a, b))
    nan = np.isnan(wgmma.multiply(first, second, None, "e4m3"))
    assert nan.sum() == 16 + 64 - 1
    assert nan[5].all()
    assert nan[:, 3].all()


LOAD = """
mov.u64 %rd8, a;
mov.u64 %rd9, b;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY;
mov.u32 %r10, 0;
mov.u64 %rd14, %rd1;
COPY: ld.global.u32 %r11, [%rd14];
cvt.u64.u32 %rd15, %r10;
shr.u64 %rd16, %rd15, 3;
and.b64 %rd16, %rd16, 16;
xor.b64 %rd16, %rd16, %rd15;
add.s64 %rd16, %rd16, %rd8;
st.shared.u32 [%rd16], %r11;
add.s64 %rd14, %rd14, 4;
add.u32 %r10, %r10, 4;
setp.lt.u32 %p2, %r10, {total};
@%p2 bra COPY;
{fence}
READY: bar.sync 0;
shr.u64 %rd17, %rd8, 4;
or.b64 %rd17, %rd17, 0xC000001000000000;
shr.u64 %rd18, %rd9, 4;
or.b64 %rd18, %rd18, 0xC000001000000000;
wgmma.fence.sync.aligned;
"""
MMA = """{{ .reg .pred p; setp.ne.b32 p, {adds}, 0;
wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {{{registers}}}, %rd17, %rd18, p, 1, 1; }}
"""
STORE = """
mul.wide.u32 %rd20, %r0, 4;
add.s64 %rd20, %rd0, %rd20;
"""


def product_kernel(between: str = "", *, fence: str = "fence.proxy.async.shared::cta;") -> str:
    """Two products of the same operands; `between` stands before the wait."""
    names = [f"%f{i}" for i in range(REGISTERS)]
    total = (64 + COLUMNS) * ROW
    body = LOAD.format(total=total, fence=fence)
    for adds in (0, 1):
        body += MMA.format(registers=", ".join(names), adds=adds)
    body += (
        f"wgmma.commit_group.sync.aligned;\n{between}\nwgmma.wait_group.sync.aligned 0;\n{STORE}"
    )
    for i, name in enumerate(names):
        body += f"st.global.f32 [%rd20+{i * 512}], {name};\n"
    shared = f".shared .align 1024 .b8 a[{64 * ROW}];\n.shared .align 1024 .b8 b[{COLUMNS * ROW}];"
    return kernel(body, 2, shared=shared)


def multiply(schedule: str, text: str, *, checks: bool | None = None) -> tuple[Array, Array]:
    """What the kernel gives, and twice the product."""
    a, b = codes(64, exact=True), codes(COLUMNS, exact=True)
    out = np.zeros((REGISTERS, 128), np.float32)
    args = [out, np.concatenate([a, b])]
    done = run(text, "k", 1, 128, args, schedule=schedule, seed=2, checks=checks)
    assert sum(done.opcodes.values()) == sum(done.instructions.values())
    result = np.zeros((64, COLUMNS), np.float32)
    row, column = wgmma.fragment(COLUMNS)
    for warp in range(4):
        result[row + 16 * warp, column] = out[:, 32 * warp : 32 * warp + 32]
    return result, 2 * E4M3[a] @ E4M3[b].T


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_warpgroup_multiplies_tiles_of_shared_memory(schedule: str) -> None:
    got, want = multiply(schedule, product_kernel())
    assert (got == want).all()


@pytest.mark.parametrize("move", ["mov.f32 %f20, %f0;", "mov.b32 %r20, %f0;mov.b32 %f20, %r20;"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_moves_before_the_wait_make_aliases(schedule: str, move: str) -> None:
    text = product_kernel(move).replace("[%rd20+0], %f0", "[%rd20+0], %f20")
    got, want = multiply(schedule, text)
    assert (got == want).all()


@pytest.mark.parametrize(
    ("between", "used"), [("add.f32 %f20, %f3, %f3;", "%f3"), ("st.global.f32 [%rd0], %f1;", "")]
)
def test_use_of_a_register_before_the_wait_is_found(between: str, used: str) -> None:
    for schedule in SCHEDULES:
        with pytest.raises(EmulationError) as caught:
            multiply(schedule, product_kernel(between))
        assert caught.value.report.kind is Kind.PENDING_REGISTER
        assert used in str(caught.value)
        assert "wgmma at PTX line" in str(caught.value)


def test_operands_written_by_stores_need_a_proxy_fence() -> None:
    with pytest.raises(EmulationError) as caught:
        multiply("eager", product_kernel(fence=""))
    assert caught.value.report.kind is Kind.PROXY_FENCE


def test_products_need_a_fence_of_registers() -> None:
    with pytest.raises(EmulationError) as caught:
        multiply("eager", product_kernel().replace("wgmma.fence.sync.aligned;", ""))
    assert caught.value.report.kind is Kind.PRODUCT_FENCE


def test_operands_overwritten_before_the_wait_are_found() -> None:
    with pytest.raises(EmulationError) as caught:
        multiply("lazy", product_kernel("st.shared.u32 [%rd8], %r0;"))
    assert caught.value.report.kind is Kind.RACE
