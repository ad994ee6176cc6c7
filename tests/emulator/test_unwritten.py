"""What was never written may be loaded, but must decide nothing."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import Array, kernel

from mqa.emulator import EmulationError, Kind, run
from mqa.emulator.scheduler import SCHEDULES

CELLS = ".shared .align 16 .b8 cells[1024];\n"
HALF = """
mov.u64 %rd8, cells;
mul.wide.u32 %rd9, %r0, 4;
add.s64 %rd9, %rd8, %rd9;
setp.lt.u32 %p1, %r0, 16;
@%p1 st.shared.u32 [%rd9], %r0;
mov.u32 %r10, 5;
ld.shared.u32 %r1, [%rd9];
"""
"""Threads 16 to 31 load into %r1 what was never written."""
OUT = "mul.wide.u32 %rd11, %r0, 4;\nadd.s64 %rd11, %rd0, %rd11;\n{guard}st.global.u32 [%rd11], %r9;"
USES = {
    "stored": "mov.u32 %r9, %r1;\n",
    "added": "add.u32 %r9, %r1, %r10;\n",
    "converted": "cvt.rn.f32.u32 %f1, %r1;\nmul.f32 %f1, %f1, %f1;\ncvt.rzi.u32.f32 %r9, %f1;\n",
    "packed": "mov.b64 %rd1, {%r10, %r1};\nmov.b64 {%r2, %r9}, %rd1;\n",
    "shuffled": "shfl.sync.bfly.b32 %r9|%p2, %r1, 16, 31, 0xffffffff;\n",
    "reduced": "redux.sync.add.u32 %r9, %r1, 0xffffffff;\n",
    "balloted": "setp.gt.u32 %p2, %r1, 3;\nvote.sync.ballot.b32 %r9, %p2, 0xffffffff;\n",
    "through_shared_memory": "st.shared.u32 [%rd9+256], %r1;\nld.shared.u32 %r9, [%rd9+256];\n",
    "chosen_by": "setp.gt.u32 %p2, %r1, 3;\nselp.u32 %r9, 1, 2, %p2;\n",
    "guarded_by": "setp.gt.u32 %p2, %r1, 3;\nmov.u32 %r9, 1;\n@%p2 mov.u32 %r9, 2;\n",
    "branched_on": "mov.u32 %r9, 1;\nsetp.gt.u32 %p2, %r1, 3;\n@%p2 bra L;\nmov.u32 %r9, 2;\nL:\n",
    "left_by": "mov.u32 %r9, 1;\nsetp.gt.u32 %p2, %r1, 3;\n@%p2 ret;\n",
    "an_address": "add.u32 %r2, %r1, 0;\nand.b32 %r2, %r2, 124;\nmov.u32 %r9, 1;\n"
    "cvt.u32.u64 %r3, %rd8;\nadd.u32 %r3, %r3, %r2;\nld.shared.u32 %r9, [%r3];\n",
    "an_operand": "mov.u32 %r9, 1;\nand.b32 %r2, %r1, 1;\nbar.sync %r2, 32;\n",
    "changed_by_an_atomic": "mov.u32 %r9, 1;\nred.shared.add.u32 [%rd9], 1;\n",
}
HARMLESS = {
    "not_used": "mov.u32 %r9, 1;\n",
    "selected_away": "selp.u32 %r9, %r1, %r10, %p1;\n",
    "overwritten": "mov.u32 %r9, %r1;\n@!%p1 mov.u32 %r9, 7;\n",
    "tested_where_it_does_not_matter": "setp.gt.u32 %p2, %r1, 3;\nand.pred %p2, %p2, %p1;\n"
    "selp.u32 %r9, 1, 2, %p2;\n",
    "joined_with_a_test": "setp.gt.and.u32 %p2, %r1, 3, %p1;\nselp.u32 %r9, 1, 2, %p2;\n",
    "or_of_tests": "setp.gt.or.u32 %p2, %r1, 3, !%p1;\nselp.u32 %r9, 1, 2, %p2;\n".replace(
        "!%p1", "%p3"
    ),
    "masked_out": "selp.u32 %r2, 0xffffffff, 0, %p1;\nand.b32 %r9, %r1, %r2;\n",
    "asked_by_a_vote": "setp.gt.u32 %p2, %r1, 3;\nvote.sync.any.pred %p2, %p2, 0xffffffff;\n"
    "selp.u32 %r9, 1, 2, %p2;\n",
    "shuffled_from_others": "and.b32 %r2, %r0, 15;\n"
    "shfl.sync.idx.b32 %r9|%p2, %r1, %r2, 31, 0xffffffff;\n",
    "in_a_result_of_a_barrier": "setp.gt.u32 %p2, %r1, 3;\nsetp.eq.u32 %p4, %r0, %r0;\n"
    "bar.red.and.pred %p2, 0, %p4;\nselp.u32 %r9, 1, 2, %p2;\n",
    "written_meanwhile": "@!%p1 st.shared.u32 [%rd9], %r10;\nld.shared.u32 %r9, [%rd9];\n",
}


def run_body(body: str, guard: str = "", **how: object) -> Array:
    out = np.full(32, 99, np.uint32)
    text = kernel(HALF + "not.pred %p3, %p1;\n" + body + OUT.format(guard=guard), 1, shared=CELLS)
    run(text, "k", 1, 32, [out], **how)  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("use", USES)
def test_what_was_never_written_decides_nothing(use: str) -> None:
    with pytest.raises(EmulationError) as caught:
        run_body(USES[use])
    report = caught.value.report
    assert report.kind is Kind.UNWRITTEN
    if use == "through_shared_memory":
        assert "cells + 320 (byte 320 of shared memory), loaded by ld.shared.u32" in report.message
    elif use != "changed_by_an_atomic":
        assert "cells + 64 (byte 64 of shared memory), loaded by ld.shared.u32" in report.message
    run_body(USES[use], checks=False)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("use", HARMLESS)
def test_what_is_not_used_may_be_anything(use: str, schedule: str) -> None:
    assert (run_body(HARMLESS[use], schedule=schedule) != 99).all()


def test_threads_that_store_nothing_may_hold_it() -> None:
    for use in ("stored", "added", "converted", "packed", "chosen_by"):
        out = run_body(USES[use], guard="@%p1 ")
        assert (out[16:] == 99).all()
        assert (out[:16] != 99).all()


def test_local_memory_keeps_it() -> None:
    body = """
    mov.u64 %rd10, spill;
    st.local.u32 [%rd10], %r1;
    st.local.u32 [%rd10+4], %r10;
    ld.local.u32 %r9, [%rd10+{}];
    """
    local = ".local .align 8 .b8 spill[16];\n"

    def spilled(place: int) -> None:
        text = kernel(HALF + body.format(place) + OUT.format(guard=""), 1, shared=CELLS + local)
        run(text, "k", 1, 32, [np.zeros(32, np.uint32)])

    spilled(4)
    with pytest.raises(EmulationError, match="never written"):
        spilled(0)
