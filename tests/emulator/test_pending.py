"""Registers that a product owns: what may be done with them before the wait, and what not."""

from __future__ import annotations

import numpy as np
import pytest
from test_wgmma import multiply, product_kernel

from mqa.emulator import EmulationError, Kind
from mqa.emulator.scheduler import SCHEDULES

WAIT = "wgmma.wait_group.sync.aligned 0;\n"
FIRST = "[%rd20+0], %f0"


def found_by(between: str, schedule: str = "hunt") -> EmulationError:
    with pytest.raises(EmulationError) as caught:
        multiply(schedule, product_kernel(between))
    assert caught.value.report.kind is Kind.PENDING_REGISTER
    return caught.value


ALIASES = {
    "unpacked as packed": "mov.b64 %rd30, {%f1, %f0};\nmov.b64 {%f21, %f20}, %rd30;",
    "moved when packed": "mov.b64 %rd30, {%f0, %f1};\nmov.b64 %rd31, %rd30;\n"
    "mov.b64 {%f20, %f21}, %rd31;",
    "packed from an alias": "mov.b32 %r20, %f0;\nmov.b64 %rd30, {%r20, %r20};\n"
    "mov.b64 {%r22, %r21}, %rd30;\nmov.b32 %f20, %r21;",
    "with an ordinary register": "mov.b64 %rd30, {%r0, %f0};\nmov.b64 {%r21, %f20}, %rd30;",
    "cut in halves": "mov.b32 {%rs1, %rs2}, %f0;\nmov.b32 %f20, {%rs1, %rs2};",
    "cut in other parts": "mov.b64 %rd30, {%f0, %f1};\nmov.b64 {%rs1, %rs2, %rs3, %rs4}, %rd30;\n"
    "mov.b32 %f20, {%rs1, %rs2};",
    "by all threads alike": "setp.ge.u32 %p3, %r0, 0;\n@%p3 mov.f32 %f20, %f0;",
}


@pytest.mark.parametrize("between", ALIASES.values(), ids=ALIASES.keys())
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_packing_before_the_wait_makes_aliases(schedule: str, between: str) -> None:
    text = product_kernel(between).replace(FIRST, "[%rd20+0], %f20")
    got, want = multiply(schedule, text)
    assert (got == want).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_packed_register_has_its_bits_after_the_wait(schedule: str) -> None:
    after = WAIT + "shr.u64 %rd31, %rd30, 32;\ncvt.u32.u64 %r20, %rd31;\nmov.b32 %f20, %r20;\n"
    text = product_kernel("mov.b64 %rd30, {%f1, %f0};").replace(WAIT, after)
    got, want = multiply(schedule, text.replace(FIRST, "[%rd20+0], %f20"))
    assert (got == want).all()


USES = [
    "mov.b64 %rd30, {%f0, %f1};\nadd.s64 %rd31, %rd30, %rd30;",
    "mov.b64 %rd30, {%f0, %f1};\nst.global.u64 [%rd1], %rd30;",
    "mov.b64 %rd30, {%f0, %f1};\nmov.b64 {%f20, %f21}, %rd30;\nmul.f32 %f22, %f20, %f20;",
    "mov.b32 {%rs1, %rs2}, %f0;\nadd.u16 %rs3, %rs1, %rs2;",
    "setp.lt.u32 %p3, %r0, 40;\nselp.f32 %f20, %f0, %f1, %p3;",
    "setp.gt.f32 %p3, %f0, %f1;",
    "cvt.rn.bf16x2.f32 %r20, %f0, %f1;",
    "shfl.sync.bfly.b32 %r20|%p3, %f0, 1, 31, 0xffffffff;",
    "st.shared.f32 [%rd8], %f0;",
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("schedule", ["eager", "hunt"])
def test_any_other_use_before_the_wait_is_found(schedule: str, use: str) -> None:
    assert "belongs to wgmma at PTX line" in str(found_by(use, schedule))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_checks_a_use_before_the_wait_waits(schedule: str, use: str) -> None:
    got, want = multiply(schedule, product_kernel(use), checks=False)
    assert (got == want).all()


def test_a_part_of_the_threads_cannot_move_it() -> None:
    error = found_by("setp.lt.u32 %p3, %r0, 5;\n@%p3 mov.f32 %f20, %f0;")
    assert "%f0 belongs to wgmma" in str(error)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_sum_that_is_written_before_the_wait_is_found(schedule: str) -> None:
    error = found_by("mov.f32 %f3, 0f00000000;", schedule)
    assert "%f3 belongs to wgmma" in str(error)
    assert "was written before the wait" in str(error)
    assert error.report.instruction.startswith("wgmma.wait_group")


def test_a_sum_that_was_moved_may_be_written() -> None:
    between = "mov.f32 %f20, %f0;\nmov.f32 %f0, 0f00000000;"
    got, want = multiply("lazy", product_kernel(between).replace(FIRST, "[%rd20+0], %f20"))
    assert (got == want).all()


def from_registers(between: str, after: str = "") -> str:
    """Both products take A from registers."""
    text = product_kernel(between).replace("%rd17, %rd18, p", "{%r20, %r21, %r22, %r23}, %rd18, p")
    ones = "".join(f"mov.u32 %r{20 + i}, 0x38383838;\n" for i in range(4))
    fence = "wgmma.fence.sync.aligned;"
    return text.replace(fence, ones + fence).replace(WAIT, WAIT + after)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_operand_in_registers_is_not_written_before_the_wait(schedule: str) -> None:
    after = "mov.u32 %r21, 7;\n"
    got, _ = multiply(schedule, from_registers("", after))
    assert np.isfinite(got).all()
    assert np.count_nonzero(got)
    multiply(schedule, from_registers("mov.u32 %r24, %r21;\nadd.u32 %r25, %r21, 1;"))
    with pytest.raises(EmulationError) as caught:
        multiply(schedule, from_registers(after))
    assert caught.value.report.kind is Kind.PENDING_REGISTER
    assert "%r21 holds A of wgmma" in str(caught.value)
