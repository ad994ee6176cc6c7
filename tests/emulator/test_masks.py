"""Threads of a warp that take part by masks, and that come to barriers one by one."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import apply, kernel

from mqa.emulator import EmulationError, Kind, run
from mqa.emulator.scheduler import SCHEDULES

LANES = np.arange(32, dtype=np.uint32)
HALVES = "setp.lt.u32 %p1, in0, 16;\nselp.b32 %r1, 0xffff, 0xffff0000, %p1;\n"
STORE = "mul.wide.u32 %rd9, %r0, 4;\nadd.s64 %rd9, %rd0, %rd9;\nst.global.u32 [%rd9], %r9;\n"
LOW_HALF = "mov.u32 %r9, 1;\nand.b32 %r1, %r0, 16;\nsetp.eq.u32 %p1, %r1, 0;\n"


@pytest.mark.parametrize(
    ("body", "low", "high"),
    [
        ("redux.sync.add.u32 out, in0, %r1;\n", 120, 376),
        ("setp.eq.u32 %p2, in0, 3;\nvote.sync.ballot.b32 out, %p2, %r1;\n", 8, 0),
        (
            "setp.eq.u32 %p2, in0, 3;\nvote.sync.any.pred %p3, %p2, %r1;\nselp.u32 out, 1, 0, %p3;",
            1,
            0,
        ),
        ("and.b32 %r2, in0, 16;\nmatch.all.sync.b32 out|%p2, %r2, %r1;\n", 0xFFFF, 0xFFFF0000),
        ("elect.sync out|%p2, %r1;\n", 0, 16),
        ("shfl.sync.idx.b32 out, in0, 5, 0x101f, %r1;\n", 5, 21),
        ("mov.u32 out, 4;\n@%p1 bar.warp.sync %r1;\n@!%p1 bar.warp.sync %r1;\n", 4, 4),
    ],
)
def test_groups_with_masks_of_their_own_each_get_their_result(
    body: str, low: int, high: int
) -> None:
    wanted = np.where(LANES < 16, low, high)
    assert (apply(HALVES + body, [LANES], np.uint32) == wanted).all()


def test_who_is_not_in_the_mask_that_it_gives_is_found() -> None:
    with pytest.raises(EmulationError) as caught:
        apply("shfl.sync.idx.b32 out, in0, 3, 31, 0xffff;\n", [LANES], np.uint32)
    assert caught.value.report.kind is Kind.DIVERGENCE
    assert "0xffff0000 are not in the mask 0x0000ffff" in str(caught.value)


SHUFFLED = """
mov.u32 %r9, 1;
setp.ge.u32 %p1, %r0, 16;
@%p1 bra DONE;
shfl.sync.down.b32 %r8, %r0, 8, 31, 0xffff;
{use}
DONE:
"""


def test_what_comes_from_a_thread_that_takes_no_part_may_not_decide() -> None:
    text = kernel(SHUFFLED.format(use="mov.u32 %r9, %r8;") + STORE, 1)
    with pytest.raises(EmulationError) as caught:
        run(text, "k", 1, 32, [np.zeros(32, np.uint32)])
    assert caught.value.report.kind is Kind.UNWRITTEN
    assert "thread 16 by shfl.sync.down.b32" in str(caught.value)


def test_what_comes_from_a_thread_that_takes_no_part_may_stay_unused() -> None:
    use = "setp.lt.u32 %p2, %r0, 8;\n@%p2 mov.u32 %r9, %r8;"
    out = np.zeros(32, np.uint32)
    run(kernel(SHUFFLED.format(use=use) + STORE, 1), "k", 1, 32, [out])
    assert out.tolist() == [*range(8, 16), *[1] * 24]


def test_the_elected_thread_is_one_that_lives() -> None:
    body = "mov.u32 %r9, 0;\nsetp.eq.u32 %p1, %r0, 0;\n@%p1 ret;\n"
    body += "elect.sync %r8|%p2, 0xffffffff;\n@%p2 mov.u32 %r9, 1;\n" + STORE
    out = np.zeros(32, np.uint32)
    run(kernel(body, 1), "k", 1, 32, [out])
    assert out.tolist() == [0, 1] + [0] * 30


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", ["", ", 64"])
def test_threads_of_a_warp_come_to_a_barrier_at_different_instructions(
    schedule: str, count: str
) -> None:
    body = f"""
    @%p1 bra OTHER;
    barrier.sync 1{count};
    bra DONE;
    OTHER: add.u32 %r9, %r9, 4;
    barrier.sync 1{count};
    DONE: add.u32 %r9, %r9, 1;
    """
    out = np.zeros(64, np.uint32)
    run(kernel(LOW_HALF + body + STORE, 1), "k", 1, 64, [out], schedule=schedule)
    assert (out == np.where(np.arange(64) & 16, 2, 6)).all()


def test_threads_that_end_are_not_waited_for_at_a_barrier() -> None:
    body = "@%p1 bra DONE;\nbarrier.sync 1, 64;\n" + STORE + "DONE:"
    out = np.zeros(64, np.uint32)
    run(kernel(LOW_HALF + body, 1), "k", 1, 64, [out], schedule="hunt")
    assert (out == (np.arange(64) & 16 > 0)).all()


def reported(body: str) -> EmulationError:
    with pytest.raises(EmulationError) as caught:
        run(kernel(LOW_HALF + body + STORE, 1), "k", 1, 32, [np.zeros(32, np.uint32)])
    return caught.value


def test_threads_of_a_warp_at_different_barriers_wait_for_ever() -> None:
    error = reported(
        "add.u32 %r1, %r1, 1;\nand.b32 %r1, %r1, 15;\n@%p1 add.u32 %r1, %r1, 1;\n"
        "barrier.sync %r1;\n"
    )
    assert error.report.kind is Kind.DEADLOCK
    assert "barrier 1: 0 of 0 threads came, and 0xffff0000 of warp 0" in str(error)


def test_an_aligned_barrier_has_one_number() -> None:
    error = reported("selp.u32 %r2, 3, 2, %p1;\nbar.sync %r2;\n")
    assert error.report.kind is Kind.BARRIER
    assert "differ: 2, 3" in str(error)


def test_threads_come_to_a_barrier_once_before_their_sisters() -> None:
    error = reported("@%p1 barrier.arrive 1, 64;\n@%p1 barrier.arrive 1, 64;\n")
    assert error.report.kind is Kind.BARRIER
    assert "threads 0x0000ffff come to barrier 1 again" in str(error)


@pytest.mark.parametrize("instruction", ["bar.sync 0", "redux.sync.add.u32 %r9, %r0, -1"])
def test_threads_whose_predicate_is_false_are_missed(instruction: str) -> None:
    text = kernel(f"setp.lt.u32 %p1, %r0, 7;\n@%p1 {instruction};\n", 0)
    with pytest.raises(EmulationError, match="threads 0xffffff80 of warp 0") as caught:
        run(text.replace("k(\n\n)", "k()"), "k", 1, 32, [])
    assert caught.value.report.kind is Kind.DIVERGENCE
