"""Barriers, exchanges and divergence of threads."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import Array, apply, kernel

from mqa.emulator import EmulationError, Kind, run
from mqa.emulator.scheduler import SCHEDULES

LANES = np.arange(32, dtype=np.uint32)
SHARED = ".shared .align 16 .b8 shared[1024];"
STORE_R9 = "mul.wide.u32 %rd9, %r0, 4;\nadd.s64 %rd9, %rd0, %rd9;\nst.global.u32 [%rd9], %r9;\n"
BARRIER = "mov.u64 %rd8, shared;\ncvt.u32.u64 %r8, %rd8;\n"
INIT = """
setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r8], {count};
READY: bar.sync 0;
"""
WAIT = """
WAIT{n}: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r8], {parity};
@!%p2 bra WAIT{n};
"""


def run_body(body: str, threads: int = 64, schedule: str = "eager", seed: int = 0) -> Array:
    out = np.zeros(threads, np.uint32)
    text = kernel(body + STORE_R9, 1, shared=SHARED)
    run(text, "k", 1, threads, [out], schedule=schedule, seed=seed)
    return out


def found_by(body: str, threads: int = 64, schedule: str = "eager") -> EmulationError:
    with pytest.raises(EmulationError) as caught:
        run_body(body, threads, schedule)
    return caught.value


@pytest.mark.parametrize(
    ("mode", "by", "wanted"),
    [
        ("up", 1, np.maximum(LANES.astype(int) - 1, 0)),
        ("down", 2, np.where(LANES < 30, LANES + 2, LANES)),
        ("bfly", 5, LANES ^ 5),
        ("idx", 7, np.full(32, 7)),
    ],
)
def test_shuffles_take_another_threads_value(mode: str, by: int, wanted: Array) -> None:
    clamp = 0 if mode == "up" else 31
    body = f"shfl.sync.{mode}.b32 out|%p1, %r0, {by}, {clamp}, 0xffffffff;\n"
    assert (apply(body, [LANES], np.uint32) == wanted).all()


def test_votes_and_reductions_see_the_mask() -> None:
    body = "setp.gt.u32 %p1, in0, 20;\nvote.sync.ballot.b32 out, %p1, 0xffffffff;\n"
    assert (apply(body, [LANES], np.uint32) == 0xFFE00000).all()
    body = "redux.sync.add.u32 out, in0, 0xffffffff;\n"
    assert (apply(body, [LANES], np.uint32) == 496).all()
    negative = LANES.view(np.int32) - 9
    body = "redux.sync.min.s32 out, in0, 0xffffffff;\n"
    assert (apply(body, [negative], np.uint32).view(np.int32) == -9).all()


def test_one_thread_is_elected() -> None:
    body = "mov.u32 out, 0;\nelect.sync _|%p1, 0xffffffff;\n@%p1 mov.u32 out, 1;\n"
    assert apply(body, [LANES], np.uint32).tolist() == [1] + [0] * 31


def test_divided_threads_meet_again() -> None:
    body = """
    mov.u32 %r9, 0;
    and.b32 %r1, %r0, 3;
    LOOP: setp.eq.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    sub.s32 %r1, %r1, 1;
    add.s32 %r9, %r9, 10;
    bra LOOP;
    DONE: activemask.b32 %r2;
    popc.b32 %r2, %r2;
    add.s32 %r9, %r9, %r2;
    """
    assert run_body(body, 32).tolist() == [10 * (i % 4) + 32 for i in range(32)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_spinning_thread_lets_its_sister_go(schedule: str) -> None:
    body = """
    mov.u64 %rd8, shared;
    mov.u32 %r9, 0;
    st.volatile.shared.u32 [%rd8], %r9;
    bar.sync 0;
    setp.ne.u32 %p1, %r0, 3;
    @%p1 bra SPIN;
    mov.u32 %r3, 5;
    st.volatile.shared.u32 [%rd8], %r3;
    SPIN: ld.volatile.shared.u32 %r9, [%rd8];
    setp.eq.u32 %p2, %r9, 0;
    @%p2 bra SPIN;
    """
    assert (run_body(body, schedule=schedule) == 5).all()


def test_a_warp_barrier_joins_threads_at_different_instructions() -> None:
    body = """
    mov.u32 %r9, 1;
    setp.lt.u32 %p1, %r0, 8;
    @%p1 bra OTHER;
    bar.warp.sync 0xffffffff;
    bra DONE;
    OTHER: bar.warp.sync 0xffffffff;
    DONE: add.s32 %r9, %r9, 1;
    """
    assert (run_body(body, 32) == 2).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_named_barriers_order_warps(schedule: str) -> None:
    body = """
    mov.u64 %rd8, shared;
    mul.wide.u32 %rd9, %r0, 4;
    add.s64 %rd9, %rd8, %rd9;
    st.shared.u32 [%rd9], %r0;
    bar.sync 3, 64;
    xor.b32 %r1, %r0, 32;
    mul.wide.u32 %rd9, %r1, 4;
    add.s64 %rd9, %rd8, %rd9;
    ld.shared.u32 %r9, [%rd9];
    """
    assert (run_body(body, schedule=schedule) == np.arange(64) ^ 32).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_mbarrier_phases_flip_when_all_arrived(schedule: str) -> None:
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%r8];\n"
    body = BARRIER + INIT.format(count=64) + arrive + WAIT.format(n=0, parity=0)
    body += arrive + WAIT.format(n=1, parity=1) + "mov.u32 %r9, 1;\n"
    assert run_body(body, schedule=schedule).all()


def test_parity_one_passes_a_fresh_barrier() -> None:
    body = BARRIER + INIT.format(count=1) + WAIT.format(n=0, parity=1) + "mov.u32 %r9, 1;\n"
    assert run_body(body).all()


def test_a_phase_waits_for_bytes_too() -> None:
    body = BARRIER + INIT.format(count=1) + "setp.eq.u32 %p3, %r0, 0;\n"
    expect = "@%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r8], 48;\n"
    bring = "@%p3 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r8], {size};\n"
    after = WAIT.format(n=0, parity=0) + "mov.u32 %r9, 1;\n"
    early = bring.format(size=16) + expect + bring.format(size=32)
    assert run_body(body + early + after).all()
    error = found_by(body + expect + bring.format(size=32) + after)
    assert error.report.kind is Kind.DEADLOCK
    assert "phase 0, 0 of 1 arrivals and 16 bytes to come" in str(error)


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("@!%p1 mbarrier.init.shared::cta.b64 [%r8], 1;\n", "is initialised again"),
        ("mbarrier.arrive.shared::cta.b64 _, [%r8+8];\n", "no mbarrier was initialised"),
        ("@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r8], 3;\n", "3 arrivals at mbarrier"),
        ("@!%p1 st.shared.u32 [%r8+4], %r0;\n", "a store hits mbarrier"),
        ("bar.sync 1, 96;\n", None),
    ],
)
def test_misuse_of_barriers_is_found(rest: str, said: str | None) -> None:
    error = found_by(BARRIER + INIT.format(count=2) + rest)
    kind = Kind.BARRIER if said else Kind.DEADLOCK
    assert error.report.kind is kind
    assert (said or "barrier 1: 64 of 96 threads came") in str(error)


def test_reports_name_line_warp_and_seed() -> None:
    error = found_by("ld.shared.u32 %r9, [%r0+1];\n", 64, "random")
    report = error.report
    assert (report.kind, report.cta, report.schedule) == (Kind.OUT_OF_BOUNDS, 0, "random") or (
        report.kind is Kind.MISALIGNED
    )
    assert report.instruction == "ld.shared.u32"
    assert report.ptx_line > 0


def test_accesses_outside_a_tensor_are_found() -> None:
    wide = np.zeros((4, 16), np.uint32)
    part = wide[:, :8]
    for offset, outside in ((0, False), (28, False), (32, True), (3 * 64 + 28, False), (256, True)):
        text = kernel(f"st.global.u32 [%rd0+{offset}], 1;", 1)
        if not outside:
            run(text, "k", 1, 1, [part])
            continue
        with pytest.raises(EmulationError) as caught:
            run(text, "k", 1, 1, [part])
        assert caught.value.report.kind is Kind.OUT_OF_BOUNDS


def test_atomics_of_shared_memory_add_up() -> None:
    body = """
    mov.u64 %rd8, shared;
    setp.eq.u32 %p1, %r0, 0;
    mov.u32 %r1, 0;
    @%p1 st.shared.u32 [%rd8], %r1;
    bar.sync 0;
    atom.shared.add.u32 %r2, [%rd8], 2;
    bar.sync 0;
    ld.shared.u32 %r9, [%rd8];
    """
    assert (run_body(body) == 128).all()


def test_setmaxnreg_out_of_range_is_an_error() -> None:
    error = found_by("setmaxnreg.inc.sync.aligned.u32 24;\nmov.u32 %r9, 1;\n")
    assert error.report.kind is Kind.REGISTERS


CLUSTER = """
mov.u32 %r1, %cluster_ctarank;
mov.u64 %rd8, shared;
cvt.u32.u64 %r8, %rd8;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
xor.b32 %r2, %r1, 1;
mapa.shared::cluster.u32 %r3, %r8, %r2;
add.s32 %r4, %r1, 40;
st.shared::cluster.u32 [%r3], %r4;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
ld.shared.u32 %r5, [%r8];
mul.wide.u32 %rd9, %r1, 4;
add.s64 %rd9, %rd0, %rd9;
st.global.u32 [%rd9], %r5;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ctas_of_a_cluster_store_to_each_other(schedule: str) -> None:
    out = np.zeros(2, np.uint32)
    text = kernel(CLUSTER, 1, shared=SHARED)
    run(text, "k", 2, 32, [out], cluster=2, schedule=schedule)
    assert out.tolist() == [41, 40]


def test_votes_of_all_and_any() -> None:
    body = "setp.lt.u32 %p1, in0, 31;\nvote.sync.{mode}.pred %p2, %p1, 0xffffffff;\n"
    body += "selp.u32 out, 1, 0, %p2;\n"
    for mode, wanted in (("all", 0), ("any", 1), ("uni", 0)):
        assert (apply(body.replace("{mode}", mode), [LANES], np.uint32) == wanted).all()


def test_a_barrier_may_be_made_anew_where_it_was_ended() -> None:
    anew = "@!%p1 mbarrier.inval.shared::cta.b64 [%r8];\n@!%p1 mbarrier.init.shared::cta.b64 "
    body = BARRIER + INIT.format(count=2) + anew + "[%r8], 1;\nmov.u32 %r9, 1;\n"
    assert run_body(body).all()
    error = found_by(body.replace("mbarrier.init.shared::cta.b64 [%r8], 1", "mbarrier.arrive.shared"
                                  "::cta.b64 _, [%r8]"))  # fmt: skip
    assert error.report.kind is Kind.BARRIER


def test_test_wait_answers_at_once() -> None:
    body = BARRIER + INIT.format(count=64)
    body += """
    mov.u32 %r9, 0;
    mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r8], 0;
    @%p2 add.u32 %r9, %r9, 1;
    bar.sync 0;
    mbarrier.arrive.shared::cta.b64 _, [%r8];
    bar.sync 0;
    mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r8], 0;
    @%p2 add.u32 %r9, %r9, 2;
    """
    assert (run_body(body) == 2).all()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"entry": "other"}, "entry='other', expected one of k"),
        ({"args": []}, "expected 1"),
        ({"block": 2000}, "expected 1 to 1024 threads"),
        ({"grid": 3, "cluster": 2}, r"multiples of \(2, 1, 1\)"),
        ({"grid": 32, "cluster": 32}, "expected 1 to 16"),
        ({"smem_bytes": 1 << 20}, "expected at most 232448"),
        ({"schedule": "late"}, "expected one of eager, lazy, random, hunt"),
        ({"args": [b"1234"]}, "has 4 bytes, expected 8"),
    ],
)
def test_a_wrong_launch_is_an_error(how: dict[str, object], said: str) -> None:
    launch: dict[str, object] = {"entry": "k", "grid": 1, "block": 32, "args": [None], **how}
    with pytest.raises(ValueError, match=said):
        run(kernel("", 1), **launch)  # type: ignore[arg-type]
