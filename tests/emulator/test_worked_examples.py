"""Examples worked by hand from the ISA's rules and from measurements on an H200."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_kernels import kernel
from tensor_kernels import COMMIT, WAIT, descriptor, executed, placed, stored, tensor_kernel
from test_copies import load
from test_tcgen05 import COPY_SCALES, FILLED, mma

from mqa.emulator import run
from mqa.emulator.tensor_layouts import chunks_of, instruction_descriptor
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


def test_a_scale_goes_from_its_byte_to_its_product() -> None:
    """Row 100 of A, elements 64 to 95: byte 78 of the 512 that are copied, lanes 4, 36, 68 and 100,
    the fourth column, the third byte of its words, and the product whose scale id of A is 2."""
    one, tile = 0x38, np.full(512, 127, np.uint8)
    tile[78] = 130
    rows = np.full((128 + 16, 32), one, np.uint8)
    image = np.concatenate([placed(rows[:128]), placed(rows[128:]), tile, np.full_like(tile, 127)])
    kind = "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale"
    start = descriptor(0) + descriptor(4096, "%rd11")
    start += descriptor(4608, "%rd12", fields=0x0000400800000000)
    start += descriptor(5120, "%rd13", fields=0x0000400800000000) + COPY_SCALES
    found = []
    for id in range(4):
        bits = 0x08A00000 & ~(0x3F << 17) | 16 >> 3 << 17 | id << 29 | id << 4
        body = start + "setp.ne.u32 %p5, %r0, %r0;\n" + mma(kind, bits, scales="[%r11], [%r12], ")
        text = tensor_kernel(body + COMMIT + WAIT + stored(16), image=len(image))
        found.append(executed(text, image, np.zeros((128, 16), np.float32)))
    assert all((got == 32).all() for got in (*found[:2], found[3]))
    assert (np.delete(found[2], 100, axis=0) == 32).all()
    assert (found[2][100] == 256).all()
    body = start + COMMIT + WAIT + stored(4, 32)
    words = executed(tensor_kernel(body, image=len(image)), image, np.zeros((128, 4), np.uint32))
    changed = np.argwhere(words != 0x7F7F7F7F).tolist()
    assert changed == [[lane, 3] for lane in (4, 36, 68, 100)]
    assert words[4, 3] == 0x7F827F7F


def test_a_load_of_warp_2_takes_lanes_from_64_on() -> None:
    """Of `ld.32x32b.x32 [tm + (2 << 21) + 64]` thread t has lane 64 + t in all its registers."""
    body = FILLED + "add.u32 %r7, %r7, 64;\n" + stored(32)
    text = tensor_kernel(body, image=0, columns=256)
    got = executed(text, np.zeros(4, np.uint8), np.zeros((128, 32), np.uint32))
    want = [[65539 * (64 + t) + 64 + j for j in range(32)] for t in range(32)]
    assert (got[64:96] == want).all()


@pytest.mark.parametrize(
    ("bits", "kind", "want"),
    [
        (0x08200010, "f8f6f4", ("e4m3", "e4m3", 128, 128, 0)),
        (0x08100010, "f8f6f4", ("e4m3", "e4m3", 128, 64, 0)),
        (0x04400010, "f8f6f4", ("e4m3", "e4m3", 64, 256, 0)),
        (0x08200290, "f8f6f4", ("e2m1", "e4m3", 128, 128, 0)),
        (0x08400490, "f16", ("bf16", "bf16", 128, 256, 0)),
        (0x08A00000, "mxf8f6f4", ("e4m3", "e4m3", 128, 128, 0)),
        (0x28A00010, "mxf8f6f4", ("e4m3", "e4m3", 128, 128, 1)),
        (0x68A00030, "mxf8f6f4", ("e4m3", "e4m3", 128, 128, 3)),
        (0x08A01400, "mxf8f6f4", ("e4m3", "e2m1", 128, 128, 0)),
        (0x08C00480, "mxf4", ("e2m1", "e2m1", 128, 256, 0)),
        (0x48C004A0, "mxf4", ("e2m1", "e2m1", 128, 256, 2)),
        (0x08100480, "mxf4nvf4", ("e2m1", "e2m1", 128, 64, 0)),
    ],
)
def test_instruction_descriptors_tell_types_shapes_and_scale_ids(
    bits: int, kind: str, want: tuple[str, str, int, int, int]
) -> None:
    at = instruction_descriptor(bits, kind)
    assert (at.a, at.b, at.rows, at.columns, at.a_id) == want
    assert at.b_id == at.a_id
    assert at.sums == "f32"


@pytest.mark.parametrize(
    ("bits", "row", "byte", "address"),
    [
        (0x4000404000010840, 1, 0, 0x8490),
        (0x4000404000010840, 3, 20, 0x85A4),
        (0x4000404000010840, 4, 0, 0x8640),
        (0x4000404000010842, 5, 5, 0x86F5),
        (0x4000404000010846, 9, 4, 0x88F4),
        (0x4000404000010840, 127, 31, 0xC3EF),
        (0x8000402000010840, 4, 0, 0x8520),
        (0x8000402000010842, 5, 5, 0x8545),
        (0x8000402000010840, 127, 31, 0xA3EF),
        (0xC000401000010840, 4, 0, 0x8490),
        (0xC000401000010840, 127, 31, 0x93EF),
    ],
)
def test_rows_of_operands_lie_where_their_descriptors_say(
    bits: int, row: int, byte: int, address: int
) -> None:
    assert chunks_of(bits, 128)[row, byte // 16] + byte % 16 == address
