"""Examples worked by hand from the ISA's rules and from measurements on an H200."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_kernels import kernel
from test_copies import load

from mqa.emulator import run
from mqa.emulator.wgmma import _decoded, multiply

BARRIER = """
mov.u64 %rd8, bar;
cvt.u32.u64 %r8, %rd8;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra DONE;
mbarrier.init.shared::cta.b64 [%r8], 1;
"""
COMPLETE = "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r8], {};\n"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r8], {};\n"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r8];\n"


def parities(*steps: str) -> list[list[bool]]:
    """Whether a wait for parity 0, and for parity 1, passes at first and after each step."""
    body, count = BARRIER, 0
    for step in ("", *steps):
        body += step
        for parity in (0, 1):
            body += f"mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r8], {parity};\n"
            body += f"selp.u32 %r1, 1, 0, %p2;\nst.global.u32 [%rd0+{4 * count}], %r1;\n"
            count += 1
    out = np.zeros(count, np.uint32)
    text = kernel(f"{body}DONE:\n", 1, shared=".shared .align 8 .b8 bar[8];")
    run(text, "k", 1, 32, [out])
    return [[bool(x) for x in pair] for pair in out.reshape(-1, 2)]


def test_waits_pass_for_the_phase_before_and_not_for_the_current_one() -> None:
    before, after = [False, True], [True, False]
    assert parities(ARRIVE, ARRIVE) == [before, after, before]


def test_bytes_that_come_before_they_are_expected_complete_nothing() -> None:
    """Two boxes of 16 KiB, of which one lands before the arrival that expects both."""
    box, before = COMPLETE.format(16384), [False, True]
    assert parities(box, EXPECT.format(32768), box) == [before, before, before, [True, False]]


def test_a_box_over_two_edges_is_zero_outside_and_counts_whole() -> None:
    """A box of 64 rows of 128 bytes at (64, 128) of 70 rows of 200: 6 x 72 are real."""
    tensor = torch.randint(1, 255, (70, 208), dtype=torch.uint8)[:, :200]
    got = load(tensor, (64, 128), (64, 128)).reshape(64, 128)
    assert np.array_equal(got[:6, :72], tensor[64:, 128:].numpy())
    assert np.count_nonzero(got) == 6 * 72


@pytest.mark.parametrize(("term", "wanted"), [(-14, 1.0), (-13, 1.0001220703125)])
def test_e4m3_sums_keep_13_bits_behind_the_largest_term(term: int, wanted: float) -> None:
    """An accumulator of 1 and one product 2^term."""
    values = np.zeros((64, 32), np.float32), np.zeros((8, 32), np.float32)
    values[0][:, 0], values[1][:, 0] = 2.0 ** (term // 2), 2.0 ** (term - term // 2)
    a, b = (torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy() for x in values)
    first, second = _decoded(a.tobytes(), 64, "e4m3"), _decoded(b.tobytes(), 8, "e4m3")
    assert (multiply(first, second, np.ones((64, 8)), "e4m3") == wanted).all()


RANKS = """
mov.u64 %rd8, bar;
cvt.u32.u64 %r8, %rd8;
mov.u32 %r1, %cluster_ctarank;
xor.b32 %r2, %r1, 1;
mapa.shared::cluster.u32 %r3, %r8, %r2;
st.shared.u32 [%rd8], %r1;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
ld.shared::cluster.u32 %r4, [%r3];
mov.u32 %r5, %clusterid.x;
mad.lo.u32 %r6, %r5, 2, %r1;
mul.wide.u32 %rd9, %r6, 4;
add.s64 %rd9, %rd0, %rd9;
st.global.u32 [%rd9], %r4;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""


def test_a_mapped_address_names_the_same_offset_of_another_cta() -> None:
    out = np.full(4, 9, np.uint32)
    text = kernel(RANKS, 1, shared=".shared .align 8 .b8 bar[8];")
    run(text, "k", 4, 32, [out], cluster=2)
    assert out.tolist() == [1, 0, 1, 0]
