"""Uses of shared memory that nothing orders are found, whatever their order was; others are not."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import Array, kernel

from mqa.emulator import EmulationError, Kind, run
from mqa.emulator.scheduler import SCHEDULES

OWN = "mov.u64 %rd8, cells;\nmul.wide.u32 %rd9, %r0, {size};\nadd.s64 %rd9, %rd8, %rd9;\n"
OTHERS = """
xor.b32 %r1, %r0, 32;
mul.wide.u32 %rd10, %r1, {size};
add.s64 %rd10, %rd8, %rd10;
"""
OUT = "mul.wide.u32 %rd11, %r0, 4;\nadd.s64 %rd11, %rd0, %rd11;\nst.global.u32 [%rd11], %r9;\n"
CELLS = ".shared .align 16 .b8 cells[4096];\n.shared .align 8 .b8 bar[16];\n"
PLACES = OWN.format(size=4) + OTHERS.format(size=4) + "mov.u64 %rd12, bar;\ncvt.u32.u64 %r8, %rd12;"
PLACES += "\nmov.u32 %r9, 0;\nst.shared.u32 [%rd9], %r9;\nbar.sync 0;\n"
STORE, LOAD = "st.shared.u32 [%rd9], %r0;\n", "ld.shared.u32 %r9, [%rd10];\n"
INIT = """
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r8], 64;
bar.sync 0;
"""
ARRIVE = "mbarrier.arrive{}.shared::cta.b64 _, [%r8];\n"
WAIT = "WAIT: mbarrier.try_wait.parity{}.shared::cta.b64 %p2, [%r8], 0;\n@!%p2 bra WAIT;\n"
SPINNING = ("random", "hunt")
FIRST_WARP = "setp.lt.u32 %p3, %r0, 32;\n"
ORDERED = {
    "syncthreads": STORE + "bar.sync 0;\n" + LOAD,
    "named": STORE + "barrier.sync 5, 64;\n" + LOAD,
    "mbarrier": INIT + STORE + ARRIVE.format("") + WAIT.format("") + LOAD,
    # A flag, by operations that are meant for that.
    "flag": """
    mov.u32 %r9, 0;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 st.shared.u32 [%rd8+1024], %r9;
    bar.sync 0;
    """
    + STORE
    + "membar.cta;\natom.shared.add.u32 %r2, [%rd8+1024], 1;\n"
    + "SPIN: ld.volatile.shared.u32 %r3, [%rd8+1024];\n"
    + "setp.ne.u32 %p2, %r3, 64;\n@%p2 bra SPIN;\n"
    + LOAD,
    "read_then_written": STORE + "bar.sync 0;\n" + LOAD + "bar.sync 0;\n" + STORE,
    "one_warp": STORE + "xor.b32 %r1, %r0, 1;\nmul.wide.u32 %rd10, %r1, 4;\n"
    "add.s64 %rd10, %rd8, %rd10;\nbar.warp.sync 0xffffffff;\n" + LOAD,
    "atomics": "mov.u32 %r9, 1;\nsetp.eq.u32 %p1, %r0, 0;\n@%p1 st.shared.u32 [%rd8], 0;\n"
    "bar.sync 0;\nred.shared.add.u32 [%rd8], 1;\n",
}
UNORDERED = {
    "nothing": STORE + LOAD,
    "a_barrier_before": "bar.sync 0;\n" + STORE + LOAD,
    "a_barrier_of_the_warp": STORE + "bar.warp.sync 0xffffffff;\n" + LOAD,
    "a_relaxed_arrival": INIT + STORE + ARRIVE.format(".relaxed.cta") + WAIT.format("") + LOAD,
    "a_relaxed_wait": INIT + STORE + ARRIVE.format("") + WAIT.format(".relaxed.cta") + LOAD,
    "a_store_after_the_arrival": INIT + ARRIVE.format("") + STORE + WAIT.format("") + LOAD,
    "written_after_a_read": STORE + "bar.sync 0;\n" + LOAD + STORE,
    "both_write": "mov.u32 %r9, 1;\nst.shared.u32 [%rd8], %r0;\n",
    "a_fence_alone": STORE + "membar.cta;\n" + LOAD,
    "an_atomic_and_a_load": "mov.u32 %r2, 0;\nsetp.eq.u32 %p1, %r0, 0;\n"
    "@%p1 st.shared.u32 [%rd8], %r2;\nbar.sync 0;\nred.shared.add.u32 [%rd8], 1;\n"
    "ld.shared.u32 %r9, [%rd8];\n",
}


def run_body(body: str, schedule: str, **how: int) -> Array:
    out = np.zeros(64, np.uint32)
    run(kernel(body + OUT, 1, shared=CELLS), "k", 1, 64, [out], schedule=schedule, **how)
    return out


@pytest.mark.parametrize(
    ("how", "schedule"),
    # Where warps take turns, one that spins does so for long.
    [(how, one) for how in ORDERED for one in SCHEDULES if how != "flag" or one in SPINNING],
)
def test_what_is_ordered_is_no_race(how: str, schedule: str) -> None:
    assert run_body(PLACES + ORDERED[how], schedule, checks=True).any()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("how", UNORDERED)
def test_what_is_not_ordered_is_a_race_in_every_schedule(how: str, schedule: str) -> None:
    with pytest.raises(EmulationError) as caught:
        run_body(PLACES + UNORDERED[how], schedule, checks=True)
    report = caught.value.report
    assert report.kind is Kind.RACE
    assert "cells (byte" in report.message or "cells + " in report.message
    assert "nothing orders that after it was" in report.message
    assert f"warp {1 - report.warp} of CTA 0 (" in report.message


def test_eager_runs_look_at_order_only_if_asked() -> None:
    run_body(PLACES + UNORDERED["both_write"], "eager")
    run_body(PLACES + UNORDERED["both_write"], "hunt", checks=False)
    with pytest.raises(EmulationError):
        run_body(PLACES + UNORDERED["both_write"], "hunt")


@pytest.mark.parametrize("size", [1, 2])
def test_warps_may_write_parts_of_a_word(size: int) -> None:
    # Thread i of each warp has one half of words, the other warp the other half.
    body = f"""
    and.b32 %r1, %r0, 31;
    shr.u32 %r2, %r0, 5;
    shl.b32 %r1, %r1, 1;
    add.u32 %r1, %r1, %r2;
    mov.u64 %rd8, cells;
    mul.wide.u32 %rd9, %r1, {size};
    add.s64 %rd9, %rd8, %rd9;
    mov.u16 %rs1, 7;
    st.shared.u{8 * size} [%rd9], %rs1;
    mov.u32 %r9, 1;
    """
    assert run_body(body, "hunt").all()
    with pytest.raises(EmulationError, match="nothing orders"):
        run_body(body.replace("st.shared.u8", "st.shared.u16").replace(
            "st.shared.u16 [%rd9]", "st.shared.u32 [%rd8]").replace("%rs1;\n    mov.u32", "%r1;\n"
            "    mov.u32"), "hunt")  # fmt: skip


def test_a_barrier_is_used_after_its_initialisation_only() -> None:
    body = PLACES + INIT.replace("bar.sync 0;", "bar.warp.sync 0xffffffff;")
    wait = ARRIVE.format("") + "mov.u32 %r9, 1;\n"
    found = {}
    for seed in range(8):
        with pytest.raises(EmulationError) as caught:
            run_body(body + wait, "random", seed=seed)
        found[caught.value.report.kind] = str(caught.value)
    # The other warp may also come there first.
    assert found.keys() == {Kind.RACE, Kind.BARRIER}
    assert "mbarrier bar at shared address" in found[Kind.RACE]
    assert "after its initialisation by warp 0 of CTA 0 (mbarrier.init" in found[Kind.RACE]


COPY = """
mov.u64 %rd8, cells;
cvt.u32.u64 %r7, %rd8;
mov.u64 %rd12, bar;
cvt.u32.u64 %r8, %rd12;
mul.wide.u32 %rd9, %r0, 4;
add.s64 %rd10, %rd8, %rd9;
st.shared.u32 [%rd10], %r0;
fence.proxy.async.shared::cta;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r8], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r8], 256;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%rd1], 256, [%r8];
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_copy_that_landed_is_there_for_those_who_waited(schedule: str) -> None:
    out, given = np.zeros(64, np.uint32), np.arange(64, dtype=np.uint32)

    def copied(rest: str) -> Array:
        text = kernel(COPY + rest + OUT, 2, shared=CELLS)
        run(text, "k", 1, 64, [out, given], schedule=schedule, checks=True)
        return out

    assert (copied(WAIT.format("") + LOAD) == given).all()
    # The second warp meets the first one, which waited.
    first = FIRST_WARP + "@!%p3 bra MEET;\n" + WAIT.format("") + "MEET: bar.sync 0;\n" + LOAD
    assert (copied(first) == given).all()
    with pytest.raises(EmulationError) as caught:
        copied(WAIT.format("").replace("], 0;", "], 1;") + LOAD)
    assert caught.value.report.kind is Kind.RACE
    assert "bulk copy of 256 bytes" in str(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("waits", [True, False])
def test_a_bulk_store_reads_until_it_was_waited_for(schedule: str, waits: bool) -> None:
    body = (
        PLACES
        + STORE
        + f"""
    fence.proxy.async.shared::cta;
    bar.sync 0;
    cvt.u32.u64 %r7, %rd8;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r7], 256;
    @%p1 cp.async.bulk.commit_group;
    {"@%p1 cp.async.bulk.wait_group.read 0;" if waits else ""}
    bar.sync 0;
    """
        + STORE
        + "ret;\n"
    )
    if waits:
        run_body(body, schedule, checks=True)
        return
    with pytest.raises(EmulationError) as caught:
        run_body(body, schedule, checks=True)
    assert caught.value.report.kind is Kind.RACE


def test_peers_of_a_cluster_need_its_barrier() -> None:
    body = """
    mov.u32 %r1, %cluster_ctarank;
    mov.u64 %rd8, cells;
    cvt.u32.u64 %r8, %rd8;
    xor.b32 %r2, %r1, 1;
    mapa.shared::cluster.u32 %r3, %r8, %r2;
    {begin}st.shared::cluster.u32 [%r3], %r1;
    {meet}
    ld.shared.u32 %r9, [%r8];
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """
    meet = "barrier.cluster.arrive{}.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"

    def met(how: str, begin: str = meet.format(".relaxed")) -> None:
        text = kernel(body.replace("{meet}", how).replace("{begin}", begin) + OUT, 1, shared=CELLS)
        run(text, "k", 2, 32, [np.zeros(32, np.uint32)], cluster=2, schedule="random")

    met(meet.format(".release"))
    for how in ("", meet.format(".relaxed")):
        with pytest.raises(EmulationError) as caught:
            met(how)
        assert caught.value.report.kind is Kind.RACE
    with pytest.raises(EmulationError, match="nothing orders that after the CTA began"):
        met(meet.format(".release"), "")
    # A fence makes a relaxed arrival a release.
    met("fence.acq_rel.cluster;\n" + meet.format(".relaxed"))
