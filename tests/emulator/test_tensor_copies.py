"""Tiles of one to five dimensions stored, combined and sent to clusters, and packed 4-bit ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ptx_kernels import Array, kernel

from mqa.cuda.tensor_map import TensorMap, tensor_map
from mqa.emulator import BoundMap, EmulationError, Kind, reductions, run
from mqa.emulator.scheduler import SCHEDULES

RANDOM = np.random.default_rng(13)
BYTES = 4096
SHARED = f".shared .align 1024 .b8 tile[{BYTES}];\n.shared .align 8 .b8 bar[8];"
FILL = f"""
mov.u64 %rd8, tile;
cvt.u32.u64 %r8, %rd8;
mov.u64 %rd9, bar;
cvt.u32.u64 %r9, %rd9;
mul.wide.u32 %rd10, %r0, 4;
add.s64 %rd11, %rd1, %rd10;
add.s64 %rd12, %rd8, %rd10;
mov.u32 %r1, 0;
FILL: ld.global.u32 %r2, [%rd11];
st.shared.u32 [%rd12], %r2;
add.s64 %rd11, %rd11, 128;
add.s64 %rd12, %rd12, 128;
add.u32 %r1, %r1, 1;
setp.lt.u32 %p1, %r1, {BYTES // 128};
@%p1 bra FILL;
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ne.u32 %p1, %r0, 0;
mov.b64 %rd13, map;
cvta.param.u64 %rd13, %rd13;
"""
MAP = ".param .u64 p0,\n.param .align 128 .b8 map[128]"
STORED = """@%p1 bra DONE;
INSTRUCTION
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""


def store_text(instruction: str) -> str:
    """Fills shared memory from parameter 1; one thread stores from there."""
    text = kernel(FILL + STORED.replace("INSTRUCTION", instruction), 2, shared=SHARED)
    return text.replace(".param .u64 p0", MAP)


def tile_text(opcode: str, corner: tuple[int, ...]) -> str:
    return store_text(f"{opcode} [%rd13, {{{', '.join(map(str, reversed(corner)))}}}], [%r8];")


def shared_image(data: Array) -> Array:
    image = np.zeros(BYTES, np.uint8)
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    image[: raw.size] = raw
    return image


BOXES = [
    ((70,), (32,), (16,)),
    ((9, 64), (4, 32), (7, 32)),
    ((3, 5, 32), (2, 3, 16), (2, 4, 16)),
    ((2, 3, 4, 16), (2, 2, 2, 16), (1, 0, 3, 0)),
    ((2, 2, 3, 3, 16), (1, 2, 2, 2, 16), (1, 1, 0, 2, 0)),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("shape", "box", "corner"), BOXES, ids=lambda x: str(len(x)))
def test_tiles_of_every_rank_are_stored(
    shape: tuple[int, ...], box: tuple[int, ...], corner: tuple[int, ...], schedule: str
) -> None:
    given = RANDOM.integers(1, 2**31, box, np.int32)
    target = torch.zeros(shape, dtype=torch.int32)
    text = tile_text(f"cp.async.bulk.tensor.{len(box)}d.global.shared::cta.bulk_group", corner)
    bound = BoundMap(tensor_map(target, box, name="x"), target)
    run(text, "k", 1, 32, [None, bound, shared_image(given)], schedule=schedule, seed=2)
    wanted = np.zeros(shape, np.int32)
    inside = tuple(slice(c, c + n) for c, n in zip(corner, box, strict=True))
    part = wanted[inside]
    part[...] = given[tuple(slice(n) for n in part.shape)]
    assert np.array_equal(target.numpy(), wanted)


def test_a_store_writes_whole_chunks_at_the_inner_end() -> None:
    memory = torch.zeros((4, 32), dtype=torch.int32)
    target = memory[:, :18]
    given = RANDOM.integers(1, 2**31, (4, 32), np.int32)
    bound = BoundMap(tensor_map(target, (4, 32), name="x"), memory)
    text = tile_text("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", (0, 0))
    run(text, "k", 1, 32, [None, bound, shared_image(given)])
    assert np.array_equal(memory[:, :20].numpy(), given[:, :20])
    assert not memory[:, 20:].any()
    with pytest.raises(EmulationError) as caught:
        run(text, "k", 1, 32, [None, BoundMap(bound.map, target), shared_image(given)])
    assert caught.value.report.kind is Kind.OUT_OF_BOUNDS


COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda old, new: np.where(old >= new, 0, old + 1),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - 1),
}
TORCH = {
    **{"u32": torch.uint32, "s32": torch.int32, "u64": torch.uint64, "s64": torch.int64},
    **{"b32": torch.uint32, "b64": torch.uint64, "f16": torch.float16, "bf16": torch.bfloat16},
    **{"f32": torch.float32, "f64": torch.float64},
}


def two(kind: str) -> tuple[torch.Tensor, torch.Tensor, Callable[[Any], Array]]:
    """Two lots of 64 numbers, and what makes numpy arrays of them."""
    old, new = (torch.from_numpy(RANDOM.integers(0, 9, 64)) for _ in range(2))
    if kind in ("s32", "s64"):
        old, new = old - 4, new - 4
    numbers = (lambda x: x.double().numpy()) if "f" in kind else (lambda x: x.numpy())
    return old.to(TORCH[kind]), new.to(TORCH[kind]), numbers


def bytes_of(values: torch.Tensor) -> Array:
    return values.view(torch.uint8).numpy()


def opcode_of(name: str, kind: str) -> str:
    noftz = ".noftz" if kind in ("f16", "bf16") and name == "add" else ""
    return f"{name}{noftz}.{kind}"


GLOBAL = [(name, kind) for kind, names in reductions.GLOBAL.items() for name in sorted(names)]
SHARED_CASES = [(name, kind) for kind, names in reductions.SHARED.items() for name in sorted(names)]


def reduce_text(name: str, kind: str) -> str:
    opcode = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{opcode_of(name, kind)}"
    size = 64 * TORCH[kind].itemsize
    return store_text(f"{opcode} [%rd0], [%r8], {size};")


@pytest.mark.parametrize(("name", "kind"), GLOBAL)
def test_bulk_reductions_combine_with_global_memory(name: str, kind: str) -> None:
    old, new, numbers = two(kind)
    wanted = COMBINED[name](numbers(old), numbers(new))
    unused = torch.zeros((8, 16), dtype=torch.int32)
    bound = BoundMap(tensor_map(unused, (8, 16), name="x"), unused)
    args = [old, bound, shared_image(bytes_of(new))]
    run(reduce_text(name, kind), "k", 1, 32, args, schedule="lazy")
    assert np.array_equal(numbers(old), wanted)


@pytest.mark.parametrize(("name", "kind"), GLOBAL)
def test_tiles_combine_by_the_type_of_their_map(name: str, kind: str) -> None:
    old, new, numbers = two(kind)
    target, given = old.reshape(4, 16), new.reshape(4, 16)
    wanted = numbers(target).copy()
    wanted[2:, :16] = COMBINED[name](numbers(target), numbers(given)[[0, 1, 0, 1]])[2:]
    opcode = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{name}.tile.bulk_group"
    described = typed(target, kind, (4, 16))
    image = shared_image(bytes_of(new))
    run(tile_text(opcode, (2, 0)), "k", 1, 32, [None, BoundMap(described, target), image])
    assert np.array_equal(numbers(target), wanted)


def typed(tensor: torch.Tensor, kind: str, box: tuple[int, ...]) -> TensorMap:
    names = {"u": "UINT", "s": "INT", "b": "UINT", "f": "FLOAT"}
    bits = 8 * tensor.element_size()
    name = "BFLOAT16" if kind == "bf16" else f"{names[kind[0]]}{bits}"
    strides = tuple(step * tensor.element_size() for step in tensor.stride()[:-1])
    shape = tuple(reversed(tensor.shape))
    return TensorMap("x", name, tensor.element_size(), shape, strides[::-1], box[::-1])


def test_a_tile_is_not_combined_as_its_type_cannot_be() -> None:
    target = torch.zeros((8, 16), dtype=torch.float32)
    opcode = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.min.bulk_group"
    args = [None, BoundMap(typed(target, "f32", (8, 16)), target), shared_image(target.numpy())]
    with pytest.raises(EmulationError, match="FLOAT32 is combined by min") as caught:
        run(tile_text(opcode, (0, 0)), "k", 1, 32, args)
    assert caught.value.report.kind is Kind.DESCRIPTOR


CLUSTER_REDUCE = """
mov.u64 %rd8, tile;
cvt.u32.u64 %r8, %rd8;
mov.u64 %rd9, bar;
cvt.u32.u64 %r9, %rd9;
mov.u32 %r1, %cluster_ctarank;
mul.wide.u32 %rd10, %r0, 8;
add.s64 %rd12, %rd8, %rd10;
mul.wide.u32 %rd14, %r1, 256;
add.s64 %rd11, %rd1, %rd14;
add.s64 %rd11, %rd11, %rd10;
ld.global.u64 %rd15, [%rd11];
st.shared.u64 [%rd12], %rd15;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r9], 1;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 256;
READY: fence.proxy.async.shared::cta;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
setp.ne.u32 %p3, %r1, 0;
@!%p3 bra WAIT;
mov.u32 %r4, 0;
mapa.shared::cluster.u32 %r5, %r8, %r4;
mapa.shared::cluster.u32 %r6, %r9, %r4;
@!%p1 cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.OPERATION
  [%r5], [%r8], 256, [%r6];
bra DONE;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], 0;
@!%p2 bra WAIT;
ld.shared.u64 %rd16, [%rd12];
add.s64 %rd17, %rd0, %rd10;
st.global.u64 [%rd17], %rd16;
DONE: barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
"""


def cluster_reduce_text(name: str, kind: str) -> str:
    return kernel(CLUSTER_REDUCE.replace("OPERATION", f"{name}.{kind}"), 2, shared=SHARED)


@pytest.mark.parametrize(("name", "kind"), SHARED_CASES)
def test_bulk_reductions_combine_with_shared_memory_of_the_cluster(name: str, kind: str) -> None:
    old, new, numbers = two(kind)
    count = 256 // old.element_size()
    old, new = old[:count].clone(), new[:count].clone()
    wanted = COMBINED[name](numbers(old), numbers(new))
    given = np.concatenate([bytes_of(old), bytes_of(new)])
    out = torch.zeros_like(old)
    run(cluster_reduce_text(name, kind), "k", 2, 32, [out, given], cluster=2, schedule="lazy")
    assert np.array_equal(numbers(out), wanted)


LOADED = """
mov.u32 %r1, %cluster_ctarank;
mov.u64 %rd8, tile;
cvt.u32.u64 %r8, %rd8;
mov.u64 %rd9, bar;
cvt.u32.u64 %r9, %rd9;
mov.b64 %rd13, map;
cvta.param.u64 %rd13, %rd13;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r9], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], EXPECTED;
READY: barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
or.b32 %r3, %r1, %r0;
setp.ne.u32 %p3, %r3, 0;
mov.u16 %rs1, MASK;
@%p3 bra WAIT;
cp.async.bulk.prefetch.tensor.2d.L2.global [%rd13, {CORNER}];
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
  [%r8], [%rd13, {CORNER}], [%r9], %rs1;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], 0;
@!%p2 bra WAIT;
mul.wide.u32 %rd10, %r0, 4;
mul.wide.u32 %rd11, %r1, BYTES;
add.s64 %rd11, %rd11, %rd0;
add.s64 %rd11, %rd11, %rd10;
add.s64 %rd12, %rd8, %rd10;
mov.u32 %r1, 0;
COPY: ld.shared.u32 %r2, [%rd12];
st.global.u32 [%rd11], %r2;
add.s64 %rd11, %rd11, 128;
add.s64 %rd12, %rd12, 128;
add.u32 %r1, %r1, 1;
setp.lt.u32 %p1, %r1, BLOCKS;
@%p1 bra COPY;
"""


def load_text(size: int, ctas: int, corner: tuple[int, int], shown: int = 0) -> str:
    """Loads a tile of so many bytes, and stores the first `shown` bytes, or these, to global."""
    body = LOADED.replace("EXPECTED", str(size)).replace("MASK", str((1 << ctas) - 1))
    body = body.replace("CORNER", f"{corner[1]}, {corner[0]}").replace("BYTES", str(BYTES))
    body = body.replace("BLOCKS", str((shown or size) // 128))
    return kernel(body, 1, shared=SHARED).replace(".param .u64 p0", MAP)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ctas", [1, 2, 4])
def test_tiles_go_to_every_cta_of_the_mask(ctas: int, schedule: str) -> None:
    tensor = torch.from_numpy(RANDOM.integers(0, 2**31, (9, 64), np.int32))
    out = np.zeros((ctas, BYTES), np.uint8)
    bound = BoundMap(tensor_map(tensor, (4, 32), name="x"), tensor)
    text = load_text(512, ctas, (6, 32))
    run(text, "k", ctas, 32, [out, bound], cluster=ctas, schedule=schedule, seed=3)
    wanted = np.zeros((4, 32), np.int32)
    wanted[:3] = tensor[6:, 32:].numpy()
    for got in out:
        assert np.array_equal(got[:512].view(np.int32).reshape(4, 32), wanted)
    with pytest.raises(EmulationError, match=r"comes from tile \+ 512 ") as caught:
        run(load_text(512, ctas, (6, 32), 640), "k", ctas, 32, [out, bound], cluster=ctas)
    assert caught.value.report.kind is Kind.UNWRITTEN


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("arrival", ["release", "relaxed"])
def test_copies_need_barriers_that_a_fence_or_a_release_made_known(
    arrival: str, fenced: bool
) -> None:
    tensor = torch.zeros((9, 64), dtype=torch.int32)
    bound = BoundMap(tensor_map(tensor, (4, 32), name="x"), tensor)
    text = load_text(512, 2, (0, 0)).replace("arrive.release", f"arrive.{arrival}")
    if not fenced:
        text = text.replace("fence.mbarrier_init.release.cluster;\n", "")
    args = [np.zeros((2, BYTES), np.uint8), bound]
    if fenced or arrival == "release":
        run(text, "k", 2, 32, args, cluster=2)
        return
    with pytest.raises(EmulationError, match=r"without fence\.mbarrier_init") as caught:
        run(text, "k", 2, 32, args, cluster=2)
    assert caught.value.report.kind is Kind.BARRIER


def test_a_struct_of_maps_addresses_and_bytes_is_a_list_of_parts() -> None:
    tensor = torch.from_numpy(RANDOM.integers(0, 2**31, (8, 32), np.int32))
    out = np.zeros((1, BYTES), np.uint8)
    bound = BoundMap(tensor_map(tensor, (4, 32), name="x"), tensor)
    text = load_text(512, 1, (2, 0)).replace("map[128]", "map[256]")
    text = text.replace("ld.param.u64 %rd0, [p0];", "ld.param.u64 %rd0, [map+128];")
    run(text, "k", 1, 32, [None, [bound, out, bytes(120)]])
    assert np.array_equal(out[0, :512].view(np.int32).reshape(4, 32), tensor[2:6].numpy())
    with pytest.raises(ValueError, match="has 136 bytes, expected 256"):
        run(text, "k", 1, 32, [None, [bound, out]])
    with pytest.raises(TypeError, match="map='x' is no argument"):
        run(text, "k", 1, 32, [None, [bound, "x"]])  # type: ignore[list-item]


def packed(kind: str, columns: int, box: tuple[int, int], swizzle: int = 0) -> TensorMap:
    """Map of 16 rows of 4-bit elements, box outermost first."""
    return TensorMap("x", kind, 8, (columns, 16), (columns // 2,), box[::-1], swizzle)


def load_packed(
    described: TensorMap, data: Array, corner: tuple[int, int], size: int, shown: int = 0
) -> Array:
    out = np.zeros(BYTES, np.uint8)
    run(load_text(size, 1, corner, shown), "k", 1, 32, [out, BoundMap(described, data)])
    return out


def rows_of_nibbles(columns: int) -> Array:
    """16 rows, at an address that is a multiple of 32."""
    room = np.zeros(16 * columns // 2 + 32, np.uint8)
    start = -room.ctypes.data % 32
    data = room[start : start + 16 * columns // 2].reshape(16, -1)
    data[...] = RANDOM.integers(0, 256, data.shape)
    return data


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_packed_tiles_are_as_in_global_memory(swizzle: int) -> None:
    data = rows_of_nibbles(320)
    width = 2 * (swizzle or 128)
    got = load_packed(
        packed("16U4_ALIGN8B", 320, (8, width), swizzle), data, (3, 32), 8 * width // 2
    )
    place = np.arange(8 * width // 2)
    lines = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    # The tile begins at a multiple of the pattern.
    image = got[place ^ (place >> 7 & lines) << 4].reshape(8, -1)
    wanted = np.zeros((8, width // 2), np.uint8)
    there = data[3:11, 16 : 16 + width // 2]
    wanted[:, : there.shape[1]] = there
    assert np.array_equal(image, wanted)


@pytest.mark.parametrize("swizzle", [0, 128])
def test_padded_tiles_have_8_bytes_of_16(swizzle: int) -> None:
    data = rows_of_nibbles(256)
    described = packed("16U4_ALIGN16B", 256, (8, 128), swizzle)
    got = load_packed(described, data, (12, 128), 8 * 64, 8 * 128)
    place = np.arange(8 * 128)
    image = got[place ^ (place >> 7 & (7 if swizzle else 0)) << 4].reshape(8, 8, 2, 8)
    wanted = np.zeros((8, 64), np.uint8)
    wanted[:4] = data[12:, 64:]
    assert np.array_equal(image[:, :, 0].reshape(8, 64), wanted)
    assert (image[:, :, 1] == 0xFF).all()


def test_padded_tiles_begin_at_multiples_of_128_elements() -> None:
    data = rows_of_nibbles(256)
    with pytest.raises(EmulationError) as caught:
        load_packed(packed("16U4_ALIGN16B", 256, (8, 128)), data, (0, 64), 512)
    assert caught.value.report.kind is Kind.MISALIGNED


def test_packed_tiles_are_stored_and_padded_ones_are_not() -> None:
    given = RANDOM.integers(0, 256, (8, 64), np.uint8)
    text = tile_text("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", (4, 128))
    data = rows_of_nibbles(256)
    wanted = data.copy()
    wanted[4:12, 64:] = given
    bound = BoundMap(packed("16U4_ALIGN8B", 256, (8, 128)), data)
    run(text, "k", 1, 32, [None, bound, shared_image(given)])
    assert np.array_equal(data, wanted)
    bound = BoundMap(packed("16U4_ALIGN16B", 256, (8, 128)), data)
    with pytest.raises(EmulationError) as caught:
        run(text, "k", 1, 32, [None, bound, shared_image(given)])
    assert caught.value.report.kind is Kind.DESCRIPTOR


@pytest.mark.parametrize(
    ("kind", "columns", "box", "swizzle", "said"),
    [
        ("16U4_ALIGN8B", 321, (8, 32), 0, "multiple of 2"),
        ("16U4_ALIGN8B", 320, (8, 24), 0, "multiple of 16 bytes"),
        ("16U4_ALIGN8B", 320, (8, 128), 32, "at most swizzle=32 bytes"),
        ("16U4_ALIGN16B", 320, (8, 128), 0, "multiple of 128"),
        ("16U4_ALIGN16B", 256, (8, 64), 0, "a last size of 128"),
        ("16U4_ALIGN16B", 256, (8, 128), 64, "expected one of 0, 128"),
    ],
)
def test_what_the_driver_refuses_is_refused(
    kind: str, columns: int, box: tuple[int, int], swizzle: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        TensorMap("x", kind, 8, (columns, 16), (192,), box[::-1], swizzle)


def test_an_address_that_the_driver_refuses_is_refused() -> None:
    data = np.zeros(16 * 128 + 64, np.uint8)
    start = -data.ctypes.data % 32 + 16
    with pytest.raises(ValueError, match="expected a multiple of 32"):
        load_packed(packed("16U4_ALIGN16B", 256, (8, 128)), data[start:], (0, 0), 512)


GROUPS = """
mov.u64 %rd8, tile;
mul.wide.u32 %rd10, %r0, 16;
add.s64 %rd11, %rd8, %rd10;
cvt.u32.u64 %r8, %rd11;
add.s64 %rd12, %rd1, %rd10;
cp.async.cg.shared.global [%r8], [%rd12], 16;
cp.async.commit_group;
cp.async.cg.shared.global [%r8+512], [%rd12+512], 16;
cp.async.commit_group;
cp.async.wait_group 1;
ld.shared.u32 %r2, [%rd11];
WAIT
ld.shared.u32 %r3, [%rd11+512];
add.u32 %r2, %r2, %r3;
mul.wide.u32 %rd13, %r0, 4;
add.s64 %rd13, %rd0, %rd13;
st.global.u32 [%rd13], %r2;
"""


def groups_text(wait: str) -> str:
    return kernel(GROUPS.replace("WAIT", wait), 2, shared=SHARED)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wait", ["cp.async.wait_all;", "cp.async.wait_group 0;"])
def test_groups_of_copies_are_waited_for(wait: str, schedule: str) -> None:
    given, out = RANDOM.integers(0, 2**30, (2, 32, 4), np.uint32), np.zeros(32, np.uint32)
    run(groups_text(wait), "k", 1, 32, [out, given], schedule=schedule, seed=4)
    assert np.array_equal(out, given[0, :, 0] + given[1, :, 0])


def test_a_group_that_is_not_waited_for_is_a_race() -> None:
    args = [np.zeros(32, np.uint32), np.zeros((2, 32, 4), np.uint32)]
    with pytest.raises(EmulationError) as caught:
        run(groups_text(""), "k", 1, 32, args, schedule="lazy")
    assert caught.value.report.kind is Kind.RACE


def test_an_assembler_takes_these_kernels(assembles: Any) -> None:
    texts = [reduce_text(*x) for x in GLOBAL] + [cluster_reduce_text(*x) for x in SHARED_CASES]
    for _, box, corner in BOXES:
        opcode = f"cp.async.bulk.tensor.{len(box)}d.global.shared::cta.bulk_group"
        texts.append(tile_text(opcode, corner))
    for name in reductions._COMBINE:
        opcode = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{name}.tile.bulk_group"
        texts.append(tile_text(opcode, (0, 0)))
    texts += [load_text(512, 2, (0, 0)), groups_text("cp.async.wait_all;")]
    assembles(texts)
