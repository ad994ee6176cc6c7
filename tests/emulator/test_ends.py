"""Shared memory that is used when its CTA does not run, and what copies may not hit."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import Array, kernel

from mqa.emulator import EmulationError, Kind, run
from mqa.emulator.scheduler import SCHEDULES

SHARED = ".shared .align 128 .b8 cells[1024];\n.shared .align 16 .b8 bar[16];\n"
START = """
mov.u64 %rd8, cells;
cvt.u32.u64 %r8, %rd8;
mov.u64 %rd9, bar;
cvt.u32.u64 %r7, %rd9;
shl.b32 %r6, %r0, 2;
add.u32 %r6, %r6, %r8;
st.shared.u32 [%r6], %r0;
st.shared.u32 [%r6+128], %r0;
fence.proxy.async.shared::cta;
bar.warp.sync 0xffffffff;
mov.u32 %r9, 0;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra DONE;
mbarrier.init.shared::cta.b64 [%r7], 1;
fence.mbarrier_init.release.cluster;
"""
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], {};\n"
WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r7], 0;\n@!%p2 bra WAIT;\n"
LOAD = """
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r8+256], [%rd1], 16, [%r7];
"""
STORE = """
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r8], 16;
cp.async.bulk.commit_group;
"""
REDUCE = """
cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{}.u32
  [%r8{}], [%r8+128], 16, [%r7];
"""


def launch(body: str, schedule: str = "hunt", seed: int = 0) -> Array:
    """Thread 0 executes the body; %r9 of each is the result. The second tensor has 64 bytes."""
    text = f"{START}{body}DONE: shl.b32 %r5, %r0, 2;\ncvt.u64.u32 %rd10, %r5;\n"
    text += "add.s64 %rd10, %rd0, %rd10;\nst.global.u32 [%rd10], %r9;\n"
    out, other = np.zeros(32, np.uint32), np.zeros(16, np.uint32)
    args = [out, other]
    run(kernel(text, 2, shared=SHARED), "k", 1, 32, args, schedule=schedule, seed=seed, checks=True)
    return out


def found(body: str, schedule: str = "hunt") -> EmulationError:
    with pytest.raises(EmulationError) as caught:
        launch(body, schedule)
    return caught.value


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("body", "wait"),
    [
        (EXPECT.format(16) + LOAD, WAIT),
        (STORE, "cp.async.bulk.wait_group.read 0;\n"),
        (EXPECT.format(16) + REDUCE.format("add", "+64"), WAIT),
    ],
)
def test_a_cta_ends_after_what_uses_its_memory(schedule: str, body: str, wait: str) -> None:
    launch(body + wait, schedule)
    error = found(body, schedule)
    assert error.report.kind is Kind.UNFINISHED
    assert "CTA 0 ends, and" in str(error)


@pytest.mark.parametrize("seed", range(10))
def test_reductions_of_the_same_shared_memory_may_meet(seed: int) -> None:
    twice = REDUCE.format("add", "") * 2
    value = launch(EXPECT.format(32) + twice + WAIT + "ld.shared.u32 %r9, [%r8+8];\n", seed=seed)
    assert value[0] == 6


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        # A copy is none that combines, nor is a load.
        (EXPECT.format(32) + REDUCE.format("add", "+256") + LOAD + WAIT, Kind.UNWRITTEN),
        (EXPECT.format(32) + REDUCE.format("add", "") + LOAD.replace("+256", "") + WAIT, Kind.RACE),
        (
            EXPECT.format(16) + REDUCE.format("add", "") + "ld.shared.u32 %r9, [%r8];\n" + WAIT,
            Kind.RACE,
        ),
        (
            EXPECT.format(32) + REDUCE.format("add", "") * 2 + "ld.shared.u32 %r9, [%r8];\n" + WAIT,
            Kind.RACE,
        ),
    ],
)
def test_a_reduction_is_ordered_with_all_else(body: str, kind: Kind) -> None:
    assert found(body).report.kind is kind


@pytest.mark.parametrize(
    "body",
    [
        EXPECT.format(16) + LOAD.replace("%r8+256", "%r7") + WAIT,
        "cp.async.ca.shared.global [%r7], [%rd1], 8;\ncp.async.wait_all;\n",
    ],
)
def test_copies_that_hit_a_live_barrier_are_found(body: str) -> None:
    error = found(body)
    assert error.report.kind is Kind.BARRIER
    assert "hits mbarrier bar" in str(error)


@pytest.mark.parametrize("mask", [0, 3])
def test_a_multicast_goes_to_ctas_of_the_cluster(mask: int) -> None:
    cast = LOAD.replace("bytes ", "bytes.multicast::cluster ").replace("[%r7];", "[%r7], %rs1;")
    launch("mov.u16 %rs1, 1;\n" + EXPECT.format(16) + cast + WAIT)
    error = found(f"mov.u16 %rs1, {mask};\n" + EXPECT.format(16) + cast + WAIT)
    assert error.report.kind is Kind.OUT_OF_BOUNDS
    assert f"multicast mask {mask:#x} in a cluster of 1 CTAs" in str(error)


def test_a_group_of_copies_counts_those_that_a_barrier_heard_of() -> None:
    body = """
    cp.async.ca.shared.global [%r8+512], [%rd1], 4;
    cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r7];
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.u32 %r9, [%r8+512];
    """
    assert launch(body, "eager")[0] == 0


CLUSTER = """
mov.u64 %rd8, bar;
cvt.u32.u64 %r8, %rd8;
mov.u32 %r1, %cluster_ctarank;
xor.b32 %r1, %r1, 1;
mapa.shared::cluster.u32 %r2, %r8, %r1;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r8], 1;
{fence}
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.acquire.aligned;
@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r8], 0;
@!%p2 bra WAIT;
"""


def test_a_fence_makes_initialised_barriers_known_to_the_cluster() -> None:
    fenced = CLUSTER.format(fence="@%p1 fence.mbarrier_init.release.cluster;")
    for seed in range(10):
        run(kernel(fenced, 0, shared=SHARED), "k", 2, 32, [], cluster=2, schedule="hunt", seed=seed)
    text = kernel(CLUSTER.format(fence=""), 0, shared=SHARED)
    with pytest.raises(EmulationError, match="nothing orders that after its initialisation"):
        run(text, "k", 2, 32, [], cluster=2, schedule="hunt")
