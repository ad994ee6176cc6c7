"""Products, copies, allocations and commits of pairs of CTAs, and commits to several."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import Array, kernel
from tensor_kernels import (
    OUT,
    WAIT,
    descriptor,
    executed,
    placed,
    stored,
    tensor_kernel,
)
from test_tcgen05 import (
    A,
    B,
    COPY_SCALES,
    MINUS,
    PLUS,
    SCALE_FIELDS,
    elements,
    factors,
    mma,
    scale_codes,
    tile,
)

from mqa.emulator import EmulationError, Kind, run
from mqa.emulator.scheduler import SCHEDULES
from mqa.testing import accumulators

N = 32
SCALES = B + N // 2 * 32
LEADER = "setp.eq.u32 %p2, %r57, 0;\n"
"""Thread 0 of the even CTA alone multiplies."""
START = "mad.lo.u32 %r57, %r50, 128, %r0;\n" + LEADER
COMMIT = (
    "mov.u16 %rs1, 3;\n@%p2 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
    ".multicast::cluster.b64 [%r2], %rs1;\n"
)
BEFORE = "tcgen05.fence::before_thread_sync;\n"


def bits(rows: int, *, scaled: bool = False, more: int = 0) -> int:
    return (0 if scaled else 1 << 4) | N >> 3 << 17 | rows >> 4 << 24 | more


def pair_text(rows: int, *, commit: str = COMMIT, columns: int = N) -> str:
    opcode = "tcgen05.mma.cta_group::2.kind::f8f6f4"
    body = START + descriptor(A) + descriptor(B, "%rd11") + MINUS + mma(opcode, bits(rows))
    body += PLUS + mma(opcode, bits(rows)) + commit + WAIT + stored(columns)
    return tensor_kernel(body, image=SCALES, group=2)


def scaled_pair_text() -> str:
    body = START + descriptor(A) + descriptor(B, "%rd11")
    body += descriptor(SCALES, "%rd12", fields=SCALE_FIELDS)
    body += descriptor(SCALES + 512, "%rd13", fields=SCALE_FIELDS)
    body += COPY_SCALES.replace("cta_group::1", "cta_group::2") + MINUS
    opcode = "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32"
    ids = bits(256, scaled=True, more=1 << 23 | 2 << 29 | 1 << 4)
    body += mma(opcode, ids, scales="[%r11], [%r12], ") + COMMIT + WAIT + stored(N)
    return tensor_kernel(body, image=SCALES + 1024, group=2)


def images(left: Array, right: Array) -> Array:
    """Each CTA has its rows of A, and half of the columns of B."""
    parts = []
    for a, b in zip(np.split(left, 2), np.split(right, 2), strict=True):
        image = np.zeros(SCALES, np.uint8)
        image[A : A + 32 * len(a)], image[B:] = placed(a), placed(b)
        parts.append(image)
    return np.concatenate(parts)


@pytest.mark.parametrize("rows", [256, 128])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pair_multiplies(schedule: str, rows: int) -> None:
    left, right = elements("e4m3", rows), elements("e4m3", N)
    columns = N if rows == 256 else N // 2
    out = np.zeros((2, 128, columns), np.float32)
    for seed in range(2):
        how = {"schedule": schedule, "seed": seed, "checks": True}
        executed(
            pair_text(rows, columns=columns), images(left.rows, right.rows), out, ctas=2, **how
        )
        model = accumulators.BLACKWELL_FP8
        want = model.dots(left.values, right.values)
        want = model.dots(left.values, right.values, want)
        if rows == 256:
            assert (out.reshape(256, N) == want).all()
        else:  # 64 rows a CTA; the right half of the columns lies in the upper lanes
            assert (out[:, :64] == want.reshape(2, 64, N)[:, :, : N // 2]).all()
            assert (out[:, 64:] == want.reshape(2, 64, N)[:, :, N // 2 :]).all()


@pytest.mark.parametrize("schedule", ["eager", "hunt"])
def test_a_pair_scales_blocks(schedule: str) -> None:
    """Each CTA has the scales of its rows of A, and of all columns of B."""
    left, right = elements("e4m3", 256), elements("e4m3", N)
    codes = scale_codes("ue8m0", 256), scale_codes("ue8m0", N)
    parts = np.split(images(left.rows, right.rows), 2)
    image = np.concatenate(
        [
            np.concatenate([part, tile(a), tile(codes[1])])
            for part, a in zip(parts, np.split(codes[0], 2), strict=True)
        ]
    )
    out = np.zeros((256, N), np.float32)
    executed(scaled_pair_text(), image, out, ctas=2, schedule=schedule, checks=True)
    x = left.values * factors(codes[0], "ue8m0")[:, 2:3]
    y = right.values * factors(codes[1], "ue8m0")[:, 1:2]
    want = accumulators.BLACKWELL_MXFP8.dots(x, y)
    assert (out == want).mean() > 0.99
    assert (np.abs(out - want) <= 2.0**-22 * (np.abs(x) @ np.abs(y).T)).all()


def scaled_128_text(columns: int) -> str:
    scales = B + columns // 2 * 32
    copies = COPY_SCALES.replace("cta_group::1", "cta_group::2").split("32x128b.warpx4")
    body = START + descriptor(A) + descriptor(B, "%rd11")
    body += descriptor(scales, "%rd12", fields=SCALE_FIELDS)
    body += descriptor(scales + 512, "%rd13", fields=SCALE_FIELDS)
    body += f"{copies[0]}32x128b.warpx4{copies[1]}64x128b.warpx2::01_23{copies[2]}" + MINUS
    opcode = "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale"
    ids = columns >> 3 << 17 | 128 >> 4 << 24 | 1 << 23 | 3 << 29
    body += mma(opcode, ids, scales="[%r11], [%r12], ") + COMMIT + WAIT + stored(columns // 2)
    return tensor_kernel(body, image=scales + 512 + 1024, group=2)


def test_a_pair_with_128_rows_has_scales_of_columns_beside_their_sums() -> None:
    """Those of the right half of the columns lie in the upper two quarters of the lanes."""
    columns = 64
    left, right = elements("e4m3", 128), elements("e4m3", columns)
    codes = scale_codes("ue8m0", 128), scale_codes("ue8m0", columns)
    halves = np.full((64, 4, 4), 127, np.uint8)
    for n in range(columns):
        halves[n % 32 + n // 32 * 32, 0] = codes[1][n]
    parts = [
        np.concatenate([np.pad(placed(a), (0, B - 64 * 32)), placed(b), tile(s), halves.ravel()])
        for a, b, s in zip(
            np.split(left.rows, 2), np.split(right.rows, 2), np.split(codes[0], 2), strict=True
        )
    ]
    out = np.zeros((2, 128, columns // 2), np.float32)
    text = scaled_128_text(columns)
    executed(text, np.concatenate(parts), out, ctas=2, schedule="hunt", seed=5)
    x = left.values * factors(codes[0], "ue8m0")[:, 3:]
    y = right.values * factors(codes[1], "ue8m0")[:, :1]
    want = accumulators.BLACKWELL_MXFP8.dots(x, y).reshape(2, 64, 2, columns // 2)
    got = out.reshape(2, 2, 64, columns // 2).transpose(0, 2, 1, 3)
    assert (np.abs(got - want) <= 2.0**-22 * (np.abs(x) @ np.abs(y).T).reshape(want.shape)).all()
    assert (got == want).mean() > 0.99


def test_a_commit_that_forgets_the_other_cta() -> None:
    left, right = elements("e4m3", 256), elements("e4m3", N)
    text = pair_text(256, commit=COMMIT.replace("%rs1, 3", "%rs1, 1"))
    with pytest.raises(EmulationError) as caught:
        executed(text, images(left.rows, right.rows), np.zeros((256, N), np.float32), ctas=2)
    assert caught.value.report.kind is Kind.DEADLOCK


def test_the_other_cta_has_to_know_that_the_pair_multiplied() -> None:
    left, right = elements("e4m3", 256), elements("e4m3", N)
    body = pair_text(256).replace(
        "WAIT: mbarrier", "setp.eq.u32 %p8, %r50, 1;\n@%p8 bra OVER;\nWAIT: mbarrier"
    )
    text = body.replace("@!%p4 bra WAIT;\n", "@!%p4 bra WAIT;\nOVER:\n")
    found = set()
    for seed in range(6):
        with pytest.raises(EmulationError) as caught:
            executed(
                text,
                images(left.rows, right.rows),
                np.zeros((256, N), np.float32),
                ctas=2,
                schedule="hunt",
                seed=seed,
            )
        found.add(caught.value.report.kind)
    assert found <= {Kind.RACE, Kind.UNWRITTEN}
    assert Kind.RACE in found


def test_a_pair_in_a_cluster_of_one_is_found() -> None:
    left, right = elements("e4m3", 256), elements("e4m3", N)
    with pytest.raises(EmulationError) as caught:
        executed(pair_text(256), images(left.rows, right.rows), np.zeros((256, N), np.float32))
    assert caught.value.report.kind is Kind.TENSOR_MEMORY
    assert "cluster of 1 CTAs" in str(caught.value)


def test_both_ctas_of_a_pair_have_to_allocate() -> None:
    left, right = elements("e4m3", 256), elements("e4m3", N)
    text = pair_text(256).replace(
        "@%p1 tcgen05.alloc",
        "setp.eq.u32 %p9, %r50, 0;\nand.pred %p1, %p1, %p9;\n@%p1 tcgen05.alloc",
    )
    with pytest.raises(EmulationError) as caught:
        executed(text, images(left.rows, right.rows), np.zeros((256, N), np.float32), ctas=2)
    assert caught.value.report.kind is Kind.DEADLOCK
    assert "64 columns of tensor memory by both CTAs of the pair" in str(caught.value)


IN_TURN = """mov.u32 %r3, slot;
shr.u32 %r4, %r0, 5;
shl.b32 %r6, %r4, 2;
add.u32 %r3, %r3, %r6;
tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r3], 512;
bar.warp.sync 0xffffffff;
ld.shared.u32 %r5, [%r3];
tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r5, 512;
"""


@pytest.mark.parametrize("seed", range(6))
def test_warps_of_a_pair_take_all_columns_in_turn(seed: int) -> None:
    """One of the CTAs may end before the other one's warp goes on."""
    text = kernel(IN_TURN, 0, shared=".shared .align 4 .b32 slot[2];", target="sm_100f")
    run(text.replace("k(\n\n)", "k()"), "k", 2, 64, [], cluster=2, schedule="hunt", seed=seed)


def test_a_commit_arrives_in_all_ctas_of_its_mask() -> None:
    """Of four CTAs the last commits, after nothing, to the first and third."""
    body = (
        "setp.eq.u32 %p7, %r50, 3;\nand.pred %p7, %p7, %p2;\nmov.u16 %rs1, 5;\n"
        "@%p7 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster"
        ".b64 [%r2], %rs1;\n"
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 %p8, [%r2], 0;\nselp.u32 %r20, 1, 0, %p8;\n"
        + OUT.format(bytes=4)
        + "st.global.u32 [%rd31], %r20;\n"
    )
    text = tensor_kernel(body, image=16).replace(
        "COPIED: bar", "COPIED: barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\nbar"
    )
    out = executed(text, np.zeros(64, np.uint8), np.zeros((4, 128), np.uint32), ctas=4)
    assert out.min(axis=1).tolist() == out.max(axis=1).tolist() == [1, 0, 1, 0]


def test_an_assembler_takes_these_kernels(assembles: object) -> None:
    assert callable(assembles)
    assembles([pair_text(256), pair_text(128), scaled_pair_text(), scaled_128_text(64)])
