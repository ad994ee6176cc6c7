"""Tiles and bulk copies move what the rules of the copy engine say, when the schedule lets them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_kernels import kernel

from mqa.cuda.tensor_map import TensorMap, tensor_map
from mqa.emulator import BoundMap, EmulationError, Kind, run
from mqa.emulator.tensor_layouts import swizzled
from mqa.emulator.scheduler import SCHEDULES

WORKED = (
    (0x8480, 0x8490, 0x8490, 0x8490),
    (0x8500, 0x8500, 0x8520, 0x8520),
    (0x8600, 0x8600, 0x8600, 0x8640),
    (0x8794, 0x8784, 0x87A4, 0x87E4),
)
"""Linear addresses, and where swizzles of 32, 64 and 128 bytes put them."""

BYTES = 8192


def tile_kernel(rank: int, box_bytes: int, coordinates: str, *, rest: str = "") -> str:
    """One thread loads a tile; all copy what shared memory holds from there on to the result, which
    was full of ones before."""
    body = f"""
    mov.u64 %rd8, tile;
    mul.wide.u32 %rd11, %r0, 4;
    add.s64 %rd12, %rd8, %rd11;
    add.s64 %rd13, %rd12, {BYTES};
    mov.u32 %r10, 0xffffffff;
    ONES: st.shared.u32 [%rd12], %r10;
    add.s64 %rd12, %rd12, 128;
    setp.lt.u64 %p3, %rd12, %rd13;
    @%p3 bra ONES;
    fence.proxy.async.shared::cta;
    bar.warp.sync 0xffffffff;
    cvt.u32.u64 %r8, %rd8;
    mov.u64 %rd9, bar;
    cvt.u32.u64 %r9, %rd9;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r9], 1;
    fence.mbarrier_init.release.cluster;
    mov.b64 %rd10, map;
    cvta.param.u64 %rd10, %rd10;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], {box_bytes};
    cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes
      [%r8], [%rd10, {{{coordinates}}}], [%r9];
    READY: bar.sync 0;
    {rest}
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], 0;
    @!%p2 bra WAIT;
    mul.wide.u32 %rd11, %r0, 4;
    add.s64 %rd12, %rd8, %rd11;
    add.s64 %rd13, %rd0, %rd11;
    mov.u32 %r10, 0;
    COPY: ld.shared.u32 %r11, [%rd12];
    st.global.u32 [%rd13], %r11;
    add.s64 %rd12, %rd12, 128;
    add.s64 %rd13, %rd13, 128;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p3, %r10, {BYTES // 128};
    @%p3 bra COPY;
    """
    shared = f".shared .align 1024 .b8 tile[{BYTES}];\n.shared .align 8 .b8 bar[8];"
    text = kernel(body, 1, shared=shared)
    return text.replace(".param .u64 p0", ".param .u64 p0,\n.param .align 128 .b8 map[128]")


def load(
    tensor: torch.Tensor,
    box: tuple[int, ...],
    corner: tuple[int, ...],
    swizzle: int = 0,
    schedule: str = "eager",
) -> np.ndarray:
    """Shared memory after a tile was loaded, box and corner outermost first."""
    described = tensor_map(tensor, box, name="x", swizzle=swizzle)
    size = int(np.prod(box)) * tensor.element_size()
    out = np.zeros(BYTES, np.uint8)
    text = tile_kernel(len(box), size, ", ".join(map(str, reversed(corner))))
    run(text, "k", 1, 32, [out, BoundMap(described, tensor)], schedule=schedule, seed=4)
    return out


def expected(tensor: torch.Tensor, box: tuple[int, ...], corner: tuple[int, ...]) -> np.ndarray:
    """The box, zero outside the tensor, element by element."""
    result = np.zeros(box, tensor.numpy().dtype)
    for index in np.ndindex(*box):
        place = tuple(c + i for c, i in zip(corner, index, strict=True))
        if all(0 <= p < size for p, size in zip(place, tensor.shape, strict=True)):
            result[index] = tensor.numpy()[place]
    return result.reshape(-1).view(np.uint8)


@pytest.mark.parametrize("row", WORKED)
def test_swizzles_are_those_of_worked_examples(row: tuple[int, ...]) -> None:
    linear, *wanted = row
    assert [int(swizzled(np.array([linear]), span)[0]) for span in (32, 64, 128)] == wanted


@pytest.mark.parametrize("span", [32, 64, 128])
def test_a_swizzle_permutes_16_byte_chunks_of_a_line(span: int) -> None:
    chunks = np.arange(0, 4096, 16)
    moved = swizzled(chunks, span)
    assert sorted(moved.tolist()) == chunks.tolist()
    assert (moved >> 7 == chunks >> 7).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("shape", "box", "corner"),
    [
        ((64,), (32,), (16,)),
        ((9, 64), (4, 32), (2, 16)),
        ((9, 48), (8, 32), (5, 32)),
        ((9, 64), (8, 32), (-3, 48)),
        ((3, 5, 32), (2, 3, 16), (2, 1, 16)),
        ((2, 3, 4, 16), (2, 2, 2, 16), (1, 0, 3, 0)),
        ((2, 2, 3, 3, 16), (1, 2, 2, 2, 16), (1, 1, 0, 2, 0)),
    ],
)
def test_tiles_are_the_box_with_zeros_outside(
    shape: tuple[int, ...], box: tuple[int, ...], corner: tuple[int, ...], schedule: str
) -> None:
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape) % 251
    tensor = tensor.to(torch.uint8)
    got = load(tensor, box, corner, schedule=schedule)
    wanted = expected(tensor, box, corner)
    assert (got[: len(wanted)] == wanted).all()
    assert (got[len(wanted) :] == 0xFF).all()


@pytest.mark.parametrize("span", [32, 64, 128])
def test_swizzled_tiles_have_their_chunks_moved(span: int) -> None:
    tensor = torch.randint(0, 255, (40, span), dtype=torch.uint8)
    got = load(tensor, (32, span), (4, 0), swizzle=span)
    linear = np.arange(32 * span)
    # The tile begins at a multiple of the pattern, so that offsets swizzle as addresses do.
    assert (got[swizzled(linear, span)] == tensor[4:36].numpy().reshape(-1)).all()


def test_float_tiles_with_strided_rows() -> None:
    tensor = torch.randn(6, 48)[:, :40]
    assert (
        load(tensor, (4, 16), (1, 32))
        == expected(tensor, (4, 16), (1, 32))[:256].tolist() + [0xFF] * (BYTES - 256)
    ).all()


def test_a_tile_off_16_bytes_is_found() -> None:
    tensor = torch.zeros((8, 64), dtype=torch.uint8)
    with pytest.raises(EmulationError) as caught:
        load(tensor, (4, 16), (0, 8))
    assert caught.value.report.kind is Kind.MISALIGNED


def test_a_read_before_the_wait_is_a_race() -> None:
    tensor = torch.zeros((8, 64), dtype=torch.uint8)
    described: TensorMap = tensor_map(tensor, (4, 16), name="x")
    early = "ld.shared.u32 %r12, [%rd8];"
    text = tile_kernel(2, 64, "0, 0", rest=early)
    args = [np.zeros(BYTES, np.uint8), BoundMap(described, tensor)]
    run(text, "k", 1, 32, args)
    for how in ({"schedule": "lazy"}, {"schedule": "lazy", "checks": False}, {"checks": True}):
        if how.get("checks") is False:
            run(text, "k", 1, 32, args, **how)
            continue
        with pytest.raises(EmulationError) as caught:
            run(text, "k", 1, 32, args, **how)
        assert caught.value.report.kind is Kind.RACE
        assert "tile (byte 0 of shared memory) is read" in str(caught.value)
        assert "tile of x" in str(caught.value)


def test_wrong_bytes_never_flip_the_barrier() -> None:
    tensor = torch.zeros((8, 64), dtype=torch.uint8)
    described = tensor_map(tensor, (4, 16), name="x")
    args = [np.zeros(BYTES, np.uint8), BoundMap(described, tensor)]
    with pytest.raises(EmulationError) as caught:
        run(tile_kernel(2, 80, "0, 0"), "k", 1, 32, args)
    assert caught.value.report.kind is Kind.DEADLOCK
    assert "16 bytes to come" in str(caught.value)


BULK_STORE = """
mov.u64 %rd8, tile;
mul.wide.u32 %rd9, %r0, 4;
add.s64 %rd9, %rd8, %rd9;
st.shared.u32 [%rd9], %r0;
{fence}
bar.sync 0;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra DONE;
cvt.u32.u64 %r8, %rd8;
cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r8], 128;
cp.async.bulk.commit_group;
{wait}
mov.u32 %r2, 77;
st.shared.u32 [%rd8], %r2;
DONE:
"""
FENCE, WAIT = "fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group.read 0;"


def store(schedule: str, fence: str = FENCE, wait: str = WAIT) -> np.ndarray:
    out = np.zeros(32, np.uint32)
    shared = ".shared .align 1024 .b8 tile[1024];"
    text = kernel(BULK_STORE.format(fence=fence, wait=wait), 1, shared=shared)
    run(text, "k", 1, 32, [out], schedule=schedule)
    return out


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bulk_stores_write_shared_memory_to_global(schedule: str) -> None:
    assert store(schedule).tolist() == list(range(32))


def test_a_missing_proxy_fence_is_found_in_every_schedule() -> None:
    for schedule in SCHEDULES:
        with pytest.raises(EmulationError) as caught:
            store(schedule, fence="")
        assert caught.value.report.kind is Kind.PROXY_FENCE


def test_a_source_overwritten_before_the_wait_is_found() -> None:
    with pytest.raises(EmulationError) as caught:
        store("lazy", wait="")
    assert caught.value.report.kind is Kind.RACE


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cp_async_arrives_when_its_bytes_are_there(schedule: str) -> None:
    body = """
    mov.u64 %rd8, tile;
    mul.wide.u32 %rd9, %r0, 4;
    add.s64 %rd10, %rd8, %rd9;
    cvt.u32.u64 %r8, %rd10;
    add.s64 %rd11, %rd1, %rd9;
    mov.u64 %rd12, bar;
    cvt.u32.u64 %r9, %rd12;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r9], 32;
    READY: bar.sync 0;
    setp.lt.u32 %p3, %r0, 30;
    selp.u32 %r3, 4, 0, %p3;
    cp.async.ca.shared::cta.global [%r8], [%rd11], 4, %r3;
    cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r9];
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], 0;
    @!%p2 bra WAIT;
    ld.shared.u32 %r4, [%rd10];
    add.s64 %rd13, %rd0, %rd9;
    st.global.u32 [%rd13], %r4;
    """
    given, out = np.arange(100, 130, dtype=np.uint32), np.ones(32, np.uint32)
    shared = ".shared .align 16 .b8 tile[128];\n.shared .align 8 .b8 bar[8];"
    run(kernel(body, 2, shared=shared), "k", 1, 32, [out, given], schedule=schedule)
    assert out.tolist() == [*range(100, 130), 0, 0]


def test_tensor_stores_write_what_exists() -> None:
    body = """
    mov.u64 %rd8, tile;
    mul.wide.u32 %rd9, %r0, 4;
    add.s64 %rd9, %rd8, %rd9;
    st.shared.u32 [%rd9], %r0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra DONE;
    cvt.u32.u64 %r8, %rd8;
    mov.b64 %rd10, map;
    cvta.param.u64 %rd10, %rd10;
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd10, {4, 2}], [%r8];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    DONE:
    """
    text = kernel(body, 1, shared=".shared .align 1024 .b8 tile[128];")
    text = text.replace(".param .u64 p0", ".param .u64 p0,\n.param .align 128 .b8 map[128]")
    target = torch.full((5, 8), -1, dtype=torch.int32)
    described = tensor_map(target, (4, 8), name="x")
    run(text, "k", 1, 32, [None, BoundMap(described, target)])
    wanted = torch.full((5, 8), -1, dtype=torch.int32)
    wanted[2:5, 4:8] = torch.arange(32, dtype=torch.int32).reshape(4, 8)[:3, :4]
    assert torch.equal(target, wanted)


CLUSTER_COPY = """
mov.u64 %rd8, tile;
cvt.u32.u64 %r8, %rd8;
mov.u64 %rd9, bar;
cvt.u32.u64 %r9, %rd9;
mov.u32 %r1, %cluster_ctarank;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r9], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 128;
READY: barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
setp.ne.u32 %p3, %r1, 0;
or.pred %p3, %p3, %p1;
mov.u16 %rs1, 3;
@%p3 bra WAIT;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
  [%r8], [%rd1], 128, [%r9], %rs1;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], 0;
@!%p2 bra WAIT;
mul.wide.u32 %rd11, %r0, 4;
add.s64 %rd12, %rd8, %rd11;
ld.shared.u32 %r11, [%rd12];
mul.wide.u32 %rd13, %r1, 128;
add.s64 %rd13, %rd13, %rd0;
add.s64 %rd13, %rd13, %rd11;
st.global.u32 [%rd13], %r11;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_multicast_reaches_every_cta_named(schedule: str) -> None:
    given, out = np.arange(32, dtype=np.uint32), np.zeros((2, 32), np.uint32)
    shared = ".shared .align 128 .b8 tile[128];\n.shared .align 8 .b8 bar[8];"
    text = kernel(CLUSTER_COPY, 2, shared=shared)
    run(text, "k", 2, 32, [out, given], cluster=2, schedule=schedule)
    assert (out == given).all()


SEND = """
mov.u64 %rd8, tile;
mul.wide.u32 %rd11, %r0, 4;
add.s64 %rd12, %rd8, %rd11;
cvt.u32.u64 %r8, %rd8;
mov.u64 %rd9, bar;
cvt.u32.u64 %r9, %rd9;
mov.u32 %r1, %cluster_ctarank;
setp.eq.u32 %p1, %r0, 0;
setp.eq.u32 %p3, %r1, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r9], 1;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 128;
@%p3 st.shared.u32 [%rd12], %r0;
fence.proxy.async.shared::cta;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
@!%p3 bra WAIT;
mov.u32 %r4, 1;
mapa.shared::cluster.u32 %r5, %r8, %r4;
mapa.shared::cluster.u32 %r6, %r9, %r4;
@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
  [%r5], [%r8], 128, [%r6];
bra DONE;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], 0;
@!%p2 bra WAIT;
ld.shared.u32 %r11, [%rd12];
add.s64 %rd13, %rd0, %rd11;
st.global.u32 [%rd13], %r11;
DONE: barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bulk_copies_go_to_another_cta(schedule: str) -> None:
    out = np.zeros(32, np.uint32)
    shared = ".shared .align 128 .b8 tile[128];\n.shared .align 8 .b8 bar[8];"
    run(kernel(SEND, 1, shared=shared), "k", 2, 32, [out], cluster=2, schedule=schedule)
    assert (out == np.arange(32)).all()
