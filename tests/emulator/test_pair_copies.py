"""Tensor copies of Blackwell that tell one CTA of a pair, and the ranks in shared addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ptx_kernels import kernel

from mqa.cuda.tensor_map import tensor_map
from mqa.emulator import BoundMap, EmulationError, Kind, run
from mqa.emulator.scheduler import SCHEDULES

CTAS = 4
BYTES = 512
SHARED = f".shared .align 1024 .b8 tile[{BYTES}];\n.shared .align 8 .b8 bar[8];"
# CTA 3 sends a tile to every CTA. Its own barrier's address with bit 24 cleared is that of CTA 2,
# so even CTAs count the bytes of both of their pair.
COPY = "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes"
PAIRED = f"""
mov.u32 %r1, %cluster_ctarank;
mov.u32 %r8, tile;
mov.u32 %r9, bar;
mov.b64 %rd13, map;
cvta.param.u64 %rd13, %rd13;
and.b32 %r2, %r1, 1;
setp.ne.u32 %p3, %r2, 0;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r9], 1;
fence.mbarrier_init.release.cluster;
@%p3 bra READY;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], {2 * BYTES};
READY: barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
setp.ne.u32 %p2, %r1, 3;
or.pred %p2, %p1, %p2;
@%p2 bra SENT;
and.b32 %r10, %r9, MASK;
mov.u16 %rs1, {(1 << CTAS) - 1};
{COPY}.multicast::cluster [%r8], [%rd13, {{0, 0}}], [%r10], %rs1;
SENT: @%p3 bra MET;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r9], 0;
@!%p4 bra WAIT;
MET: barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
shl.b32 %r3, %r0, 4;
add.u32 %r4, %r3, %r8;
ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [%r4];
mad.lo.u32 %r3, %r1, {BYTES}, %r3;
cvt.u64.u32 %rd2, %r3;
add.u64 %rd2, %rd2, %rd0;
st.global.v4.u32 [%rd2], {{%r20, %r21, %r22, %r23}};
"""
MAP = ".param .u64 p0,\n.param .align 128 .b8 map[128]"


def paired(mask: str = "0xFEFFFFFF") -> str:
    text = kernel(PAIRED.replace("MASK", mask), 1, shared=SHARED, target="sm_100a")
    return text.replace(".param .u64 p0", MAP)


def arguments() -> tuple[np.ndarray[Any, Any], torch.Tensor, list[Any]]:
    tensor = torch.arange(BYTES // 4, dtype=torch.int32).reshape(4, 32)
    out = np.zeros((CTAS, BYTES // 4), np.int32)
    return out, tensor, [out, BoundMap(tensor_map(tensor, (4, 32), name="x"), tensor)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_even_cta_of_each_pair_counts_what_both_get(schedule: str) -> None:
    out, tensor, args = arguments()
    run(paired(), "k", CTAS, 32, args, cluster=CTAS, schedule=schedule, seed=3)
    assert np.array_equal(out, np.broadcast_to(tensor.reshape(-1).numpy(), out.shape))


def test_the_odd_cta_is_told_where_its_own_barrier_is_given() -> None:
    """Nobody expects bytes there, and even CTAs wait for ever."""
    _, _, args = arguments()
    with pytest.raises(EmulationError) as caught:
        run(paired("0xFFFFFFFF"), "k", CTAS, 32, args, cluster=CTAS)
    assert caught.value.report.kind is Kind.DEADLOCK


OWN = f"""
mov.u32 %r8, tile;
mov.u64 %rd8, tile;
getctarank.shared::cluster.u32 %r1, %r8;
shr.u32 %r2, %r8, 24;
st.shared.u32 [%r8], %r1;
ld.shared.u32 %r3, [tile];
mapa.shared::cluster.u32 %r4, %r8, 0;
shr.u32 %r4, %r4, 24;
sub.u32 %r4, %r2, %r4;
mov.u32 %r5, %cluster_ctarank;
shl.b32 %r6, %r5, 4;
cvt.u64.u32 %rd2, %r6;
add.u64 %rd2, %rd2, %rd0;
st.global.v4.u32 [%rd2], {{%r1, %r2, %r3, %r4}};
bra DONE;
{COPY} [%r8], [%rd8, {{0, 0}}], [%r8];
DONE:
"""


def test_addresses_of_variables_carry_the_rank_and_its_parity_is_bit_24() -> None:
    text = kernel(OWN, 1, shared=SHARED, target="sm_100a")
    out = np.zeros((CTAS, 4), np.uint32)
    run(text, "k", CTAS, 32, [out], cluster=CTAS)
    rank = np.arange(CTAS)
    assert np.array_equal(out[:, 0], rank)
    assert np.array_equal(out[:, 1] % 2, rank % 2)
    assert np.array_equal(out[:, 2], rank)
    assert np.array_equal(out[:, 3], rank)


def test_an_assembler_takes_these_kernels(assembles: Any) -> None:
    assembles([paired(), kernel(OWN, 1, shared=SHARED, target="sm_100a")])
