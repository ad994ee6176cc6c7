"""mbarrier in full: states, drops, arrivals that must not complete, other CTAs' barriers."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import Array, kernel

from mqa.emulator import EmulationError, Kind, PtxError, run
from mqa.emulator.scheduler import SCHEDULES

SHARED = ".shared .align 16 .b8 shared[1024];"
STORE_R9 = "mul.wide.u32 %rd9, %r0, 4;\nadd.s64 %rd9, %rd0, %rd9;\nst.global.u32 [%rd9], %r9;\n"
START = """
mov.u64 %rd8, shared;
cvt.u32.u64 %r8, %rd8;
setp.eq.u32 %p1, %r0, 0;
mov.u32 %r9, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r8], {count};
bar.sync 0;
"""


def run_body(body: str, count: int, threads: int = 32, schedule: str = "eager") -> Array:
    out = np.zeros(threads, np.uint32)
    text = kernel(START.format(count=count) + body + STORE_R9, 1, shared=SHARED)
    run(text, "k", 1, threads, [out], schedule=schedule)
    return out


def found_by(body: str, count: int) -> EmulationError:
    with pytest.raises(EmulationError) as caught:
        run_body(body, count)
    return caught.value


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("form", ["try_wait", "test_wait"])
def test_a_state_names_the_phase_that_a_thread_arrived_in(form: str, schedule: str) -> None:
    body = f"""
    mbarrier.arrive.shared::cta.b64 %rd10, [%r8];
    WAIT: mbarrier.{form}.shared::cta.b64 %p2, [%r8], %rd10;
    @!%p2 bra WAIT;
    mbarrier.arrive.shared::cta.b64 %rd11, [%r8];
    mbarrier.test_wait.shared::cta.b64 %p3, [%r8], %rd10;
    @%p3 add.u32 %r9, %r9, 1;
    AGAIN: mbarrier.{form}.shared::cta.b64 %p2, [%r8], %rd11;
    @!%p2 bra AGAIN;
    """
    assert (run_body(body, 64, 64, schedule) == 1).all()


def test_a_state_knows_the_arrivals_that_were_to_come() -> None:
    body = """
    mbarrier.arrive.shared::cta.b64 %rd10, [%r8];
    mbarrier.pending_count.b64 %r9, %rd10;
    """
    assert run_body(body, 40).tolist() == [40 - i for i in range(32)]


def test_a_drop_lowers_what_later_phases_expect() -> None:
    body = """
    @%p1 mbarrier.arrive_drop.shared::cta.b64 %rd10, [%r8], 2;
    @%p1 mbarrier.arrive.shared::cta.b64 %rd11, [%r8];
    @%p1 mbarrier.arrive.shared::cta.b64 %rd12, [%r8];
    @%p1 mbarrier.pending_count.b64 %r9, %rd12;
    @%p1 mbarrier.test_wait.shared::cta.b64 %p2, [%r8], %rd12;
    @%p2 add.u32 %r9, %r9, 100;
    """
    # 3 expected: phase 0 ends by 2 + 1, and one arrival alone ends phase 1.
    assert run_body(body, 3)[0] == 101


def test_a_drop_may_expect_bytes() -> None:
    body = """
    @%p1 mbarrier.arrive_drop.expect_tx.shared::cta.b64 %rd10, [%r8], 32;
    @%p1 mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r8], 0;
    @%p2 add.u32 %r9, %r9, 1;
    @%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r8], 32;
    @%p1 mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r8], 0;
    @%p3 add.u32 %r9, %r9, 2;
    """
    assert run_body(body, 1)[0] == 2


def test_expected_bytes_alone_end_no_phase() -> None:
    body = """
    @%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r8], 16;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r8];
    @%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r8], 16;
    @%p1 mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r8], 0;
    @%p2 add.u32 %r9, %r9, 1;
    @%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r8], 16;
    @%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r8], 16;
    @%p1 mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r8], 0;
    @%p3 add.u32 %r9, %r9, 2;
    """
    assert run_body(body, 1)[0] == 2


def test_an_arrival_that_must_not_end_a_phase_is_found_where_it_does() -> None:
    arrive = "@%p1 mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %rd10, [%r8], {count};\n"
    assert run_body(arrive.format(count=2), 3)[0] == 0
    error = found_by(arrive.format(count=3), 3)
    assert error.report.kind is Kind.BARRIER
    assert ".noComplete ends a phase" in str(error)


def test_a_wait_may_name_how_long_it_may_suspend() -> None:
    body = """
    mbarrier.arrive.shared::cta.b64 _, [%r8];
    mov.u32 %r3, 0x989680;
    WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r8], 0, %r3;
    @!%p2 bra WAIT;
    mov.u32 %r9, 1;
    """
    assert run_body(body, 64, 64, "lazy").all()


def test_generic_addresses_name_barriers_too() -> None:
    body = """
    cvta.shared.u64 %rd20, %rd8;
    mbarrier.arrive.b64 %rd10, [%rd20];
    WAIT: mbarrier.try_wait.b64 %p2, [%rd20], %rd10;
    @!%p2 bra WAIT;
    bar.sync 0;
    @%p1 mbarrier.inval.b64 [%rd20];
    @%p1 mbarrier.init.b64 [%rd20], 7;
    mov.u32 %r9, 1;
    """
    assert run_body(body, 32).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_threads_of_a_warp_may_wait_for_different_barriers(schedule: str) -> None:
    body = """
    @%p1 mbarrier.init.shared::cta.b64 [%r8+8], 1;
    bar.sync 0;
    setp.ge.u32 %p4, %r0, 32;
    @%p4 bra OTHER;
    and.b32 %r1, %r0, 1;
    shl.b32 %r1, %r1, 3;
    add.s32 %r1, %r8, %r1;
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;
    @!%p2 bra WAIT;
    setp.eq.u32 %p3, %r0, 1;
    @%p3 mbarrier.arrive.shared::cta.b64 _, [%r8];
    mov.u32 %r9, 1;
    bra DONE;
    OTHER: setp.eq.u32 %p3, %r0, 32;
    @%p3 mbarrier.arrive.shared::cta.b64 _, [%r8+8];
    mov.u32 %r9, 1;
    DONE:
    """
    # The first barrier is opened by a thread that the second one lets through.
    assert run_body(body, 1, 64, schedule).all()


EXPECT = "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r8], {};\n"
CLUSTER = """
mov.u32 %r1, %cluster_ctarank;
setp.eq.u32 %p2, %r1, 0;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
mapa.shared::cluster.u32 %r3, %r8, 0;
@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];
@!%p2 bra DONE;
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r8], 0;
@!%p3 bra WAIT;
mov.u32 %r9, 1;
DONE:
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
mul.wide.u32 %rd9, %r1, 4;
add.s64 %rd9, %rd0, %rd9;
st.global.u32 [%rd9], %r9;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sixteen_ctas_arrive_at_the_barrier_of_the_first(schedule: str) -> None:
    out = np.zeros(16, np.uint32)
    text = kernel(START.format(count=16) + CLUSTER, 1, shared=SHARED)
    run(text, "k", 16, 32, [out], cluster=16, schedule=schedule)
    assert out.tolist() == [1] + [0] * 15


def test_a_barrier_of_another_cta_cannot_be_waited_for() -> None:
    wait = CLUSTER.replace("[%r8], 0;", "[%r3], 0;").replace(
        "mapa.shared::cluster.u32 %r3, %r8, 0", "mapa.shared::cluster.u32 %r3, %r8, 1"
    )
    text = kernel(START.format(count=2) + wait, 1, shared=SHARED)
    with pytest.raises(EmulationError, match="expected one of its own CTA") as caught:
        run(text, "k", 2, 32, [np.zeros(2, np.uint32)], cluster=2)
    assert caught.value.report.kind is Kind.BARRIER


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mbarrier.try_wait.parity.shared::cluster.b64 %p2, [%r8], 0;", ".shared::cluster"),
        ("mbarrier.arrive.shared::cluster.b64 %rd10, [%r8];", "expected _"),
        ("mbarrier.arrive.noComplete.shared::cta.b64 %rd10, [%r8];", "expected a number"),
        ("mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r8], 0, 9;", "4 operands"),
        ("mbarrier.init.frob.b64 [%r8], 1;", ".frob"),
    ],
)
def test_forms_that_do_not_exist_are_errors(text: str, said: str) -> None:
    with pytest.raises(PtxError, match=said):
        run_body(text, 1)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("@%p1 mbarrier.arrive.shared::cta.b64 _, [%r8], 0;\n", "0 arrivals at"),
        ("@%p1 mbarrier.init.shared::cta.b64 [%r8+16], 1048576;\n", "expected 1 to 1048575"),
        (EXPECT.format(0xFFFFF) + EXPECT.format(1), "counts 1048576 bytes"),
        ("@%p1 mbarrier.init.shared::cta.b64 [%r8+4], 1;\n", "mbarrier.init of 8 bytes"),
    ],
)
def test_numbers_out_of_range_are_found(body: str, said: str) -> None:
    assert said in str(found_by(body, 2))


def test_a_generic_address_of_an_mbarrier_is_one_of_shared_memory() -> None:
    offset = "mov.u64 %rd8, shared;\nadd.s64 %rd8, %rd8, 64;\n"
    offset += "@%p1 mbarrier.init.b64 [%rd8], 1;\nmov.u32 %r9, 1;\n"
    begin = "setp.eq.u32 %p1, %r0, 0;\n"
    error = found_by(begin + offset, 32)
    assert error.report.kind is Kind.OUT_OF_BOUNDS
    assert "not in shared memory" in str(error)
    assert (run_body(begin + offset.replace("@", "cvta.shared.u64 %rd8, %rd8;\n@"), 32) == 1).all()
