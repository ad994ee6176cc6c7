"""Divergence, barriers of CTAs and clusters, budgets of registers, and what is resident."""

from __future__ import annotations

import re

import numpy as np
import pytest
from ptx_kernels import Array, kernel

from mqa.emulator import EmulationError, Kind, PtxError, run
from mqa.emulator.device import H200, launch_registers, resident_ctas
from mqa.emulator.executor import _load
from mqa.emulator.scheduler import SCHEDULES

SHARED = ".shared .align 16 .b8 shared[1024];"
STORE_R9 = "mul.wide.u32 %rd9, %r0, 4;\nadd.s64 %rd9, %rd0, %rd9;\nst.global.u32 [%rd9], %r9;\n"


def run_body(body: str, threads: int = 32, schedule: str = "eager", seed: int = 0) -> Array:
    out = np.zeros(threads, np.uint32)
    text = kernel(body + STORE_R9, 1, shared=SHARED)
    run(text, "k", 1, threads, [out], schedule=schedule, seed=seed)
    return out


def found_by(body: str, threads: int = 32) -> EmulationError:
    with pytest.raises(EmulationError) as caught:
        run_body(body, threads)
    return caught.value


SPIN = """
mov.u64 %rd8, shared;
mov.u32 %r9, 0;
st.shared.u32 [%rd8], %r9;
bar.sync 0;
setp.eq.u32 %p1, %r0, 3;
{before}
SPIN: ld.shared.u32 %r9, [%rd8];
setp.eq.u32 %p2, %r9, 0;
@%p2 bra SPIN;
bra DONE;
SET: mov.u32 %r9, 5;
st.shared.u32 [%rd8], %r9;
DONE:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_threads_that_spin_let_a_sister_go_that_is_ahead_of_them(schedule: str) -> None:
    for seed in range(3):
        got = run_body(SPIN.format(before="@%p1 bra SET;"), schedule=schedule, seed=seed)
        assert (got == 5).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loop_without_memory_lets_a_sister_go(schedule: str) -> None:
    body = """
    mov.u64 %rd8, shared;
    mov.u32 %r9, 0;
    st.shared.u32 [%rd8], %r9;
    setp.eq.u32 %p1, %r0, 3;
    @%p1 bra SET;
    mov.u32 %r3, 0;
    SPIN: add.u32 %r3, %r3, 1;
    and.b32 %r4, %r3, 1023;
    setp.ne.u32 %p3, %r4, 0;
    @%p3 bra SPIN;
    ld.shared.u32 %r9, [%rd8];
    setp.eq.u32 %p2, %r9, 0;
    @%p2 bra SPIN;
    bra DONE;
    SET: mov.u32 %r9, 5;
    st.shared.u32 [%rd8], %r9;
    DONE:
    """
    assert (run_body(body, schedule=schedule) == 5).all()


def test_threads_that_left_a_loop_at_different_times_meet_behind_it() -> None:
    body = """
    mov.u32 %r3, 0;
    mul.lo.u32 %r4, %r0, 40;
    LOOP: setp.ge.u32 %p1, %r3, %r4;
    @%p1 bra OUT;
    add.u32 %r3, %r3, 1;
    bra LOOP;
    OUT: bar.warp.sync 0xffffffff;
    activemask.b32 %r9;
    """
    got = run_body(body)
    assert (got == 0xFFFFFFFF).all()


def test_a_part_of_a_warp_synchronises_and_votes_by_itself() -> None:
    body = """
    mov.u32 %r9, 0;
    setp.ge.u32 %p1, %r0, 8;
    @%p1 bra DONE;
    bar.warp.sync 0xff;
    vote.sync.ballot.b32 %r9, 1, 0xff;
    shfl.sync.idx.b32 %r3, %r0, 7, 31, 0xff;
    add.u32 %r9, %r9, %r3;
    DONE:
    """.replace("ballot.b32 %r9, 1,", "ballot.b32 %r9, %p2,").replace(
        "mov.u32 %r9, 0;", "mov.u32 %r9, 0;\nsetp.lt.u32 %p2, %r0, 4;"
    )
    assert run_body(body).tolist() == [0xF + 7] * 8 + [0] * 24


def test_threads_that_ended_are_not_waited_for() -> None:
    body = """
    mov.u32 %r9, 7;
    setp.ge.u32 %p1, %r0, 40;
    @%p1 ret;
    bar.sync 0;
    bar.warp.sync 0xffffffff;
    """
    # Of the second warp 8 threads are left; the third and fourth ended.
    assert run_body(body, 128).tolist() == [7] * 40 + [0] * 88


def test_matches_are_masks_of_threads_with_the_same_value() -> None:
    body = "and.b32 %r3, %r0, 3;\nmatch.any.sync.b32 %r9, %r3, 0xffffffff;\n"
    assert run_body(body).tolist() == [0x11111111 << (i % 4) for i in range(32)]
    every = "match.all.sync.b32 %r9|%p1, {value}, 0xffffffff;\n@%p1 add.u32 %r9, %r9, 1;\n"
    assert (run_body(every.format(value="%r0")) == 0).all()
    assert (run_body("mov.u32 %r3, 4;\n" + every.format(value="%r3")) == 0).all()  # all ones + 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("form", "result", "wanted"),
    [("popc.u32", "%r9", 69), ("and.pred", "%p3", 0), ("or.pred", "%p3", 1)],
)
def test_barriers_reduce_predicates(form: str, result: str, wanted: int, schedule: str) -> None:
    body = f"setp.lt.u32 %p2, %r0, 69;\nmov.u32 %r9, 0;\nbar.red.{form} {result}, 0, %p2;\n"
    if result == "%p3":
        body += "selp.u32 %r9, 1, 0, %p3;\n"
    assert (run_body(body, 96, schedule) == wanted).all()


def test_a_barrier_of_some_warps_reduces_among_them() -> None:
    body = """
    mov.u32 %r9, 0;
    setp.ge.u32 %p1, %r0, 64;
    @%p1 bra DONE;
    barrier.cta.red.popc.aligned.u32 %r9, 2, 64, !%p1;
    DONE:
    """
    assert run_body(body, 96).tolist() == [64] * 64 + [0] * 32


def test_named_barriers_have_producers_that_do_not_wait() -> None:
    body = """
    mov.u64 %rd8, shared;
    mov.u32 %r9, 0;
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra CONSUME;
    mov.u32 %r3, 9;
    st.shared.u32 [%rd8], %r3;
    bar.arrive 1, 64;
    bra DONE;
    CONSUME: bar.sync 1, 64;
    ld.shared.u32 %r9, [%rd8];
    DONE:
    """
    for schedule in SCHEDULES:
        assert run_body(body, 64, schedule).tolist() == [0] * 32 + [9] * 32


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("mov.u32 %r1, 16;\nbar.sync %r1;\n", "barrier 16, expected 0 to 15"),
        ("mov.u32 %r1, 40;\nbar.sync 0, %r1;\n", "40 threads, expected a multiple of 32"),
        ("setp.lt.u32 %p1, %r0, 32;\n@%p1 bar.sync 1, 64;\n@!%p1 bar.sync 1, 96;\n", "96 threads"),
    ],
)
def test_wrong_counts_at_named_barriers_are_found(body: str, said: str) -> None:
    error = found_by(body, 64)
    assert error.report.kind is Kind.BARRIER
    assert said in str(error)


WHO = """
mov.u32 %r1, %{register};
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %ctaid.y;
mad.lo.u32 %r2, %r3, 4, %r2;
mul.wide.u32 %rd9, %r2, 4;
add.s64 %rd9, %rd0, %rd9;
st.global.u32 [%rd9], %r1;
"""


@pytest.mark.parametrize(
    ("register", "wanted"),
    [
        ("cluster_ctarank", [[0, 1, 0, 1], [2, 3, 2, 3]]),
        ("cluster_nctarank", [[4] * 4] * 2),
        ("cluster_ctaid.x", [[0, 1, 0, 1]] * 2),
        ("cluster_ctaid.y", [[0] * 4, [1] * 4]),
        ("cluster_nctaid.y", [[2] * 4] * 2),
        ("clusterid.x", [[0, 0, 1, 1]] * 2),
        ("nclusterid.x", [[2] * 4] * 2),
        ("is_explicit_cluster", [[1] * 4] * 2),
    ],
)
def test_clusters_have_up_to_three_dimensions(register: str, wanted: list[list[int]]) -> None:
    out = np.full((2, 4), 77, np.uint32)
    run(kernel(WHO.replace("{register}", register), 1), "k", (4, 2), 1, [out], cluster=(2, 2))
    assert out.tolist() == wanted


def test_ranks_of_cluster_addresses_are_made_and_read() -> None:
    body = """
    mov.u32 %r1, %cluster_ctarank;
    mov.u64 %rd8, shared;
    cvt.u32.u64 %r8, %rd8;
    add.u32 %r2, %r1, 1;
    rem.u32 %r2, %r2, 16;
    mapa.shared::cluster.u32 %r3, %r8, %r2;
    getctarank.shared::cluster.u32 %r4, %r3;
    cvta.shared.u64 %rd20, %rd8;
    mapa.u64 %rd21, %rd20, %r2;
    getctarank.u64 %r5, %rd21;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    add.u32 %r6, %r1, 100;
    st.u32 [%rd21], %r6;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ld.shared.u32 %r7, [%rd8];
    mul.wide.u32 %rd9, %r1, 12;
    add.s64 %rd9, %rd0, %rd9;
    st.global.u32 [%rd9], %r4;
    st.global.u32 [%rd9+4], %r5;
    st.global.u32 [%rd9+8], %r7;
    """
    out = np.zeros((16, 3), np.uint32)
    run(kernel(body, 1, shared=SHARED), "k", 16, 1, [out], cluster=16, schedule="hunt", seed=2)
    assert out.tolist() == [[(i + 1) % 16, (i + 1) % 16, (i - 1) % 16 + 100] for i in range(16)]


def test_a_warp_that_ended_after_it_arrived_opens_no_cluster_barrier_early() -> None:
    body = """
    mov.u64 %rd8, shared;
    mov.u32 %r9, 0;
    barrier.cluster.arrive.aligned;
    setp.lt.u32 %p1, %r0, 32;
    @%p1 ret;
    barrier.cluster.wait.aligned;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    mov.u32 %r9, 3;
    """
    for schedule in SCHEDULES:
        assert run_body(body, 96, schedule).tolist() == [0] * 32 + [3] * 64


LATE = """
mov.u64 %rd8, shared;
setp.ge.u32 %p1, %r0, 64;
@%p1 bra THIRD;
barrier.cluster.arrive.aligned;
setp.lt.u32 %p2, %r0, 32;
@%p2 ret;
barrier.cluster.wait.aligned;
ld.shared.u32 %r9, [%rd8];
bra DONE;
THIRD: mov.u32 %r3, 0;
MORE: add.u32 %r3, %r3, 1;
ld.global.u32 %r4, [%rd0];
setp.lt.u32 %p3, %r3, 400;
@%p3 bra MORE;
mov.u32 %r9, 8;
st.shared.u32 [%rd8], %r9;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
DONE:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_arrival_of_a_warp_that_ended_does_not_count_for_another(schedule: str) -> None:
    for seed in range(4):
        got = run_body(LATE, 96, schedule, seed)
        assert got.tolist() == [0] * 32 + [8] * 64


def bounded(body: str, bounds: str) -> str:
    """A kernel with launch bounds."""
    return kernel(body, 0).replace("\n)\n{", f"\n)\n{bounds}\n{{", 1)


def launch(body: str, threads: int = 256, bounds: str = ".maxntid 256, 1, 1") -> None:
    run(bounded(body, bounds), "k", 1, threads, [])


SPLIT = "setp.lt.u32 %p1, %r0, 128;\n@%p1 bra FEW;\n{more}\nbra DONE;\nFEW: {few}\nDONE:\n"
DEC, INC = "setmaxnreg.dec.sync.aligned.u32 {};", "setmaxnreg.inc.sync.aligned.u32 {};"


def test_budgets_are_shared_out_of_what_the_launch_took() -> None:
    bounds = ".maxntid 256, 1, 1\n.minnctapersm 2"
    assert launch_registers(_load(bounded("", bounds), "k"), 256) == 128
    launch(SPLIT.format(more=INC.format(216), few=DEC.format(40)), bounds=bounds)
    with pytest.raises(EmulationError) as caught:
        launch(SPLIT.format(more=INC.format(224), few=DEC.format(40)), bounds=bounds)
    assert caught.value.report.kind is Kind.REGISTERS
    assert "registers, of which" in str(caught.value)


def test_a_budget_that_no_other_could_make_room_for_is_found_at_once() -> None:
    with pytest.raises(EmulationError, match="more than the 8192 that") as caught:
        launch(INC.format(256), 64, ".maxntid 64, 1, 1\n.maxnreg 128")
    assert caught.value.report.kind is Kind.REGISTERS


@pytest.mark.parametrize("count", [16, 30, 264])
def test_budgets_that_no_thread_can_have_are_errors(count: int) -> None:
    with pytest.raises(PtxError, match="a multiple of 8 from 24 to 256"):
        launch(DEC.format(count))


def test_warps_of_a_warpgroup_ask_for_the_same_budget() -> None:
    body = "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra FEW;\n{}\nbra DONE;\nFEW: {}\nDONE:\n"
    with pytest.raises(EmulationError) as caught:
        launch(body.format(DEC.format(64), DEC.format(56)))
    assert caught.value.report.kind is Kind.DIVERGENCE


@pytest.mark.parametrize(
    ("threads", "shared", "bounds", "body", "each"),
    [
        (1024, 0, "", "", 2),
        (32, 0, "", "", 32),
        (128, 200 * 1024, "", "", 1),
        (128, 75 * 1024, "", "", 3),
        (256, 0, ".maxnreg 128", "", 2),
        (256, 0, ".maxntid 256, 1, 1", DEC.format(40), 1),
        (96, 0, "", "", 21),
    ],
)
def test_as_many_ctas_are_resident_as_an_sm_holds(
    threads: int, shared: int, bounds: str, body: str, each: int
) -> None:
    program = _load(bounded(body, bounds), "k")
    assert resident_ctas(program, threads, shared) == each * H200.sms


WAITS = """
setp.ne.u32 %p1, %r0, 0;
@%p1 ret;
atom.global.add.u32 %r1, [%rd0], 1;
WAIT: ld.global.u32 %r2, [%rd0];
setp.lt.u32 %p2, %r2, {ctas};
@%p2 bra WAIT;
"""


def test_ctas_that_are_resident_together_may_wait_for_each_other() -> None:
    out = np.zeros(1, np.uint32)
    run(kernel(WAITS.replace("{ctas}", "140"), 1), "k", 140, 32, [out], schedule="random", seed=1)
    assert out[0] == 140


def test_griddepcontrol_is_wait_or_launch_dependents() -> None:
    launch("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;\n")
    with pytest.raises(PtxError, match=re.escape("expected .wait or .launch_dependents")):
        launch("griddepcontrol.frob;\n")


def test_special_registers_of_masks_and_sizes() -> None:
    for name, wanted in (
        ("lanemask_eq", [1 << i for i in range(32)]),
        ("lanemask_le", [(2 << i) - 1 for i in range(32)]),
        ("lanemask_ge", [0xFFFFFFFF ^ (1 << i) - 1 for i in range(32)]),
        ("lanemask_gt", [0xFFFFFFFF ^ (2 << i) - 1 for i in range(32)]),
        ("nwarpid", [1] * 32),
        ("total_smem_size", [1024] * 32),
    ):
        assert run_body(f"mov.u32 %r9, %{name};\n").tolist() == wanted
    with pytest.raises(PtxError, match="special register %globaltimer_lo is not modelled"):
        run_body("mov.u32 %r9, %globaltimer_lo;\n")


PACED = """
mov.u32 %r1, %clock;
add.u32 %r1, %r1, 1000000;
AGAIN: mov.u32 %r2, %clock;
sub.u32 %r3, %r2, %r1;
setp.lt.s32 %p1, %r3, 0;
@%p1 bra AGAIN;
mov.u32 %r9, %r3;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loop_ends_that_waits_for_a_time(schedule: str) -> None:
    late = run_body(PACED, 64, schedule=schedule)
    assert (late < 10_000_000).all()


def test_no_two_reads_of_a_clock_are_the_same() -> None:
    body = "mov.u32 %r1, %clock;\nmov.u32 %r2, %clock;\nsub.u32 %r9, %r2, %r1;\n"
    assert (run_body(body, 64) >= 1000).all()
    reads = ("mov.u64 %rd8, %clock64;\ncvt.u32.u64 %r1, %rd8;\n", "mov.u32 %r1, %clock;\n")
    found = [run_body(read + "mov.u32 %r9, %r1;\n", 32) for read in reads]
    assert np.array_equal(*found)
    assert not run_body("mov.u32 %r9, %clock_hi;\n").any()


def test_the_last_warp_may_have_fewer_threads() -> None:
    body = "setp.ge.u32 %p2, %r0, 3;\nbar.red.popc.u32 %r9, 0, %p2;\nbar.sync 0;\n"
    assert (run_body(body, 40) == 37).all()


def test_more_registers_than_an_sm_has_are_no_launch() -> None:
    with pytest.raises(ValueError, match="98304 registers of a CTA, expected at most 65536"):
        launch("", 1024, ".maxntid 1024, 1, 1\n.maxnreg 96")


def test_a_required_block_is_required() -> None:
    with pytest.raises(ValueError, match=r"expected \(64, 1, 1\)"):
        launch("", 32, ".reqntid 64, 1, 1")
