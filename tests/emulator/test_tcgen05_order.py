"""What kernels must not do with tensor memory, one by one, and what they may."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_kernels import Array
from tensor_kernels import COMMIT, WAIT, descriptor, executed, placed, stored, tensor_kernel
from test_tcgen05 import (
    A,
    B,
    COPY_SCALES,
    MINUS,
    N,
    PLUS,
    SCALE_FIELDS,
    SCALES,
    elements,
    idesc,
    mma,
    tile,
)

from mqa.emulator import EmulationError, Kind, scheduled
from mqa.emulator.scheduler import SCHEDULES
from mqa.testing import accumulators

LEFT, RIGHT = elements("e4m3", 128), elements("e4m3", N)
CODES = [
    np.random.default_rng(5).integers(120, 134, (rows, 4)).astype(np.uint8) for rows in (128, N)
]
IMAGE = np.concatenate([placed(LEFT.rows), placed(RIGHT.rows), *map(tile, CODES)])
ONCE = accumulators.BLACKWELL_FP8.dots(LEFT.values, RIGHT.values)
TWICE = accumulators.BLACKWELL_FP8.dots(LEFT.values, RIGHT.values, ONCE)
OPERANDS = descriptor(A) + descriptor(B, "%rd11")
OPCODE = "tcgen05.mma.cta_group::1.kind::f8f6f4"
PRODUCT = mma(OPCODE, idesc("f8f6f4", "e4m3", "e4m3"))
FIRST = OPERANDS + MINUS + PRODUCT
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;\n", "tcgen05.fence::after_thread_sync;\n"
WAIT_LD = "tcgen05.wait::ld.sync.aligned;"
SYNC = "bar.sync 0;\n"
AGAIN = WAIT.replace("WAIT", "AGAIN").replace("[%r2], 0", "[%r2], 1")


def overwriting(
    *,
    commit: str = COMMIT,
    wait: str = WAIT,
    loads: str = stored(N),
    handover: str = BEFORE + SYNC + AFTER,
) -> str:
    """A second product is added to the sums after all warps loaded those of the first."""
    again = PLUS + PRODUCT + COMMIT + AGAIN + stored(N)
    return FIRST + commit + wait + loads + handover + again


FREE = "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64;\n"
ALLOC = "@%p{} tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], {};\n"
RELINQUISH = "@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"


def run_text(text: str, schedule: str = "hunt", seed: int = 0, **how: Any) -> Array:
    return executed(
        text, IMAGE, np.zeros((128, N), np.float32), schedule=schedule, seed=seed, **how
    )


def kernel_of(body: str, **how: Any) -> str:
    return tensor_kernel(body, image=len(IMAGE), **how)


def found(text: str, kind: Kind, *said: str, schedule: str = "hunt", **how: Any) -> None:
    """Every seed gives that report."""
    for seed in range(3):
        with pytest.raises(EmulationError) as caught:
            run_text(text, schedule, seed, **how)
        assert caught.value.report.kind is kind, str(caught.value)
        for words in said:
            assert words in str(caught.value)


def passes(text: str, want: Array, schedules: tuple[str, ...] = SCHEDULES, **how: Any) -> None:
    for schedule in schedules:
        for seed in range(4):
            assert (run_text(text, schedule, seed, checks=True, **how) == want).all()


def test_a_product_that_is_waited_for_passes() -> None:
    passes(kernel_of(FIRST + COMMIT + WAIT + stored(N)), ONCE)


def test_sums_are_overwritten_after_all_fences() -> None:
    passes(kernel_of(overwriting()), TWICE)


NO_AFTER = WAIT.replace(AFTER, "")
BY_ANOTHER = "setp.eq.u32 %p6, %r0, 1;\n" + COMMIT.replace("%p2", "%p6")
MISTAKES = {
    "no wait for loads": (
        overwriting(loads=stored(N, wait="")), Kind.PENDING_REGISTER, "belongs to tcgen05.ld"
    ),
    "no wait for the product": (
        overwriting(wait=SYNC + AFTER), Kind.RACE, "columns 448-463 of tensor memory of CTA 0"
    ),
    "no fence after the wait": (
        overwriting(wait=NO_AFTER), Kind.TENSOR_FENCE, "no tcgen05.fence::after_thread_sync came to"
    ),
    "no fence before the barrier": (
        overwriting(handover=SYNC + AFTER), Kind.TENSOR_FENCE, "::before_thread_sync came there"
    ),
    "no fence after the barrier": (
        overwriting(handover=BEFORE + SYNC), Kind.TENSOR_FENCE, "::after_thread_sync came to order"
    ),
    "no barrier": (overwriting(handover=BEFORE + AFTER), Kind.RACE, "(tcgen05.ld"),
    "no commit": (overwriting(commit=""), Kind.DEADLOCK, "mbarrier bar"),
    "a commit of another thread of the warp": (
        overwriting(commit=BY_ANOTHER), Kind.RACE, "written by warp 0 of CTA 0 (tcgen05.mma"
    ),
    "operand overwritten before the wait": (
        overwriting(commit=COMMIT + "@%p2 st.shared.u32 [%r1], %r0;\n"), Kind.RACE, "image"
    ),
    "freed before it is read": (
        FIRST + COMMIT + WAIT + SYNC + FREE + SYNC + stored(N), Kind.TENSOR_MEMORY, "not allocated"
    ),
    "freed while it is written": (FIRST + COMMIT + FREE, Kind.RACE, "freed"),
    "freed while others read it": (
        FIRST + COMMIT + WAIT + FREE + stored(N), Kind.RACE, "freed"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    body, kind, said = MISTAKES[name]
    if name == "freed while others read it":
        with pytest.raises(EmulationError) as caught:
            run_text(kernel_of(body), "lazy", checks=True)
        assert caught.value.report.kind in (kind, Kind.TENSOR_MEMORY)
        return
    found(kernel_of(body), kind, said)


@pytest.mark.parametrize("name", ["no fence after the wait", "no fence before the barrier"])
def test_fences_may_be_left_out_of_what_is_looked_for(name: str) -> None:
    passes(kernel_of(MISTAKES[name][0]), TWICE, ignore=[Kind.TENSOR_FENCE])


def test_a_product_needs_a_proxy_fence() -> None:
    text = kernel_of(overwriting()).replace("fence.proxy.async.shared::cta;", "")
    found(text, Kind.PROXY_FENCE, "image")


def test_an_operand_may_be_overwritten_after_the_wait() -> None:
    store = "@%p2 st.shared.u32 [%r1], %r0;\n"
    passes(kernel_of(FIRST + COMMIT + WAIT + store + stored(N)), ONCE)


SCALED_OPCODE = "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale"
SCALED_PRODUCT = mma(
    SCALED_OPCODE, idesc("mxf8f6f4", "e4m3", "e4m3", more=1 << 23), scales="[%r11], [%r12], "
)
SCALED = (
    OPERANDS
    + descriptor(SCALES, "%rd12", fields=SCALE_FIELDS)
    + descriptor(SCALES + 512, "%rd13", fields=SCALE_FIELDS)
    + COPY_SCALES
    + MINUS
    + SCALED_PRODUCT
)
COPY_AGAIN = COPY_SCALES.split("\n", 2)[2]


def test_scales_copied_over_while_a_product_may_read_them() -> None:
    """The ISA does not keep a copy behind a product; hardware is said to."""
    text = kernel_of(SCALED + COPY_AGAIN + COMMIT + WAIT + stored(N))
    found(
        text,
        Kind.RACE,
        "columns 480-483",
        "read by warp 0 of CTA 0 (tcgen05.mma",
        "written by warp 0 of CTA 0 (tcgen05.cp",
    )
    want = run_text(kernel_of(SCALED + COMMIT + WAIT + stored(N)))
    passes(text, want, tensor_pipe="in-order")


def test_scales_are_copied_over_after_a_commit() -> None:
    again = COPY_AGAIN + PLUS + SCALED_PRODUCT + COMMIT + AGAIN
    want = run_text(kernel_of(SCALED + PLUS + SCALED_PRODUCT + COMMIT + WAIT + stored(N)))
    passes(kernel_of(SCALED + COMMIT + WAIT + SYNC + again + stored(N)), want)


def test_without_checks_the_pipe_of_the_isa_gives_other_scales() -> None:
    """Products and copies that nothing orders happen in any order."""
    other = [tile(code + 1) for code in CODES]
    image = np.concatenate([IMAGE, *other])
    swap = descriptor(len(IMAGE), "%rd12", fields=SCALE_FIELDS)
    swap += descriptor(len(IMAGE) + 512, "%rd13", fields=SCALE_FIELDS) + COPY_AGAIN
    text = tensor_kernel(SCALED + swap + COMMIT + WAIT + stored(N), image=len(image))

    def sums(pipe: Any, seed: int) -> bytes:
        out = np.zeros((128, N), np.float32)
        how: dict[str, Any] = {"schedule": "hunt", "seed": seed, "checks": False}
        return executed(text, image, out, tensor_pipe=pipe, **how).tobytes()

    assert len({sums("in-order", seed) for seed in range(6)}) == 1
    assert len({sums("isa", seed) for seed in range(12)}) > 1


def test_a_pipe_that_is_none_is_an_error() -> None:
    wrong: Any = "out-of-order"
    with pytest.raises(ValueError, match="tensor_pipe='out-of-order', expected one of isa, in-ord"):
        run_text(kernel_of(FIRST), tensor_pipe=wrong)
    with pytest.raises(ValueError, match="tensor_pipe"), scheduled(tensor_pipe=wrong):
        pass


def test_products_of_another_shape_to_the_same_sums() -> None:
    other = mma(OPCODE, idesc("f8f6f4", "e4m3", "e4m3", rows=64))
    text = kernel_of(FIRST + other + COMMIT + WAIT + stored(N))
    found(text, Kind.RACE, "written by warp 0 of CTA 0 (tcgen05.mma")
    run_text(text, tensor_pipe="in-order")


def test_products_of_other_sums_may_be_done_in_any_order() -> None:
    other = PRODUCT.replace("[%r5]", "[%r11]")
    text = kernel_of(FIRST + "add.u32 %r11, %r5, 32;\n" + other + COMMIT + WAIT + stored(N, 32))
    passes(text, ONCE)


PASSED_ON = (
    "setp.eq.u32 %p6, %r0, 32;\n" + FIRST + BEFORE + SYNC + AFTER + PLUS
    + (PRODUCT + COMMIT).replace("%p2", "%p6") + WAIT + stored(N)
)  # fmt: skip


def test_another_thread_goes_on_with_the_same_sums() -> None:
    """Which needs fences and a barrier, but no commit."""
    passes(kernel_of(PASSED_ON), TWICE)
    found(kernel_of(PASSED_ON.replace(SYNC + AFTER, SYNC)), Kind.TENSOR_FENCE)
    found(kernel_of(PASSED_ON.replace(BEFORE + SYNC, SYNC)), Kind.RACE)


RELAXED = """@%p2 mbarrier.init.shared::cta.b64 [%r3], 128;
bar.sync 0;
"""
ARRIVE = "mbarrier.arrive.relaxed.cluster.shared::cta.b64 _, [%r3];\n"


def test_relaxed_barriers_with_fences_order_tensor_memory() -> None:
    """As the ISA's examples have them."""
    relaxed = WAIT.replace("parity.shared", "parity.relaxed.cluster.shared")
    handover = BEFORE + ARRIVE + relaxed.replace("WAIT", "HANDED").replace("%r2", "%r3")
    text = kernel_of(
        overwriting(wait=relaxed + "add.u32 %r3, %r2, 16;\n" + RELAXED, handover=handover)
    )
    text = text.replace(".shared .align 8 .b64 bar;", ".shared .align 8 .b64 bar[4];")
    passes(text, TWICE)
    found(text.replace(BEFORE + "mbarrier", "mbarrier"), Kind.RACE, "(tcgen05.ld")


FILL = (
    "".join(f"mov.u32 %r{70 + i}, 0x3f800000;\n" for i in range(N))
    + f"tcgen05.st.sync.aligned.32x32b.x{N}.b32 [%r7], "
    + f"{{{', '.join(f'%r{70 + i}' for i in range(N))}}};\n"
)
WAIT_ST = "tcgen05.wait::st.sync.aligned;\n"
ADDED = OPERANDS + PLUS + PRODUCT + COMMIT + WAIT + stored(N)


def test_a_product_adds_to_what_warps_stored() -> None:
    model = accumulators.BLACKWELL_FP8
    want = model.dots(LEFT.values, RIGHT.values, np.ones((128, N)))
    passes(kernel_of(FILL + WAIT_ST + BEFORE + SYNC + AFTER + ADDED), want)


@pytest.mark.parametrize(
    ("between", "kind"),
    [
        (BEFORE + SYNC + AFTER, Kind.RACE),
        (WAIT_ST + SYNC + AFTER, Kind.TENSOR_FENCE),
        (WAIT_ST + BEFORE + SYNC, Kind.TENSOR_FENCE),
        (WAIT_ST + BEFORE + AFTER, Kind.RACE),
    ],
)
def test_stores_are_handed_over_by_a_wait_fences_and_a_barrier(between: str, kind: Kind) -> None:
    found(kernel_of(FILL + between + ADDED), kind, "tcgen05.st")


def test_a_warp_loads_what_it_stored_after_its_wait() -> None:
    passes(kernel_of(FILL + WAIT_ST + stored(N)), np.ones((128, N)))
    found(kernel_of(FILL + stored(N)), Kind.RACE, "tcgen05.st", "tcgen05.ld")


def test_cells_that_were_never_written_must_not_decide() -> None:
    text = kernel_of(FIRST + COMMIT + WAIT + stored(N, 8))
    found(text, Kind.UNWRITTEN, "column 464 of tensor memory of CTA 0")
    found(kernel_of(ADDED), Kind.UNWRITTEN, "tensor memory of CTA 0")
    loads = stored(N, 8).split("\n")[0] + "\n" + WAIT_LD
    passes(kernel_of(FIRST + COMMIT + WAIT + loads + stored(N)), ONCE)


def test_rows_of_operands_that_were_never_written_spoil_their_sums() -> None:
    far = descriptor(A, "%rd10").replace("%r1, 0", f"%r1, {len(IMAGE)}")
    shared = f"image[{len(IMAGE)}]"
    text = kernel_of(far + descriptor(B, "%rd11") + MINUS + PRODUCT + COMMIT + WAIT + stored(N))
    found(
        text.replace(shared, f"image[{2 * len(IMAGE)}]"), Kind.UNWRITTEN, "image + ", "tcgen05.mma"
    )


def test_scales_have_to_be_the_same_in_all_quarters_of_the_lanes() -> None:
    other = "setp.eq.u32 %p7, %r4, 2;\nmov.u32 %r70, 5;\nadd.u32 %r71, %r7, 33;\n@%p7 "
    other += "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r71], {%r70};\n" + WAIT_ST
    copied, multiplied = SCALED.split(MINUS)
    body = copied + COMMIT + WAIT + other + BEFORE + SYNC + AFTER + MINUS + multiplied
    said = "scales from column 480 of tensor memory are not the same"
    found(kernel_of(body + COMMIT + AGAIN), Kind.TENSOR_MEMORY, said)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_checks_a_use_before_the_wait_waits(schedule: str) -> None:
    text = kernel_of(FIRST + COMMIT + WAIT + stored(N, wait=""))
    assert (run_text(text, schedule, checks=False) == ONCE).all()


def test_moves_before_the_wait_make_aliases() -> None:
    loads, *stores = stored(N, wait="").split("\n")
    moves = "mov.b64 %rd40, {%r60, %r61};\nmov.u32 %r62, %r62;\nmov.b64 {%r60, %r61}, %rd40;\n"
    body = "\n".join([loads, moves, WAIT_LD, *stores])
    passes(kernel_of(FIRST + COMMIT + WAIT + body), ONCE)
    written = "\n".join([loads, "mov.u32 %r61, 0;", WAIT_LD, *stores])
    found(kernel_of(FIRST + COMMIT + WAIT + written), Kind.PENDING_REGISTER, "%r61 belongs to")


@pytest.mark.parametrize("columns", [16, 48, 1024])
def test_a_count_of_columns_that_is_none(columns: int) -> None:
    text = kernel_of("").replace("[%r3], 64;", "[%r3], %r59;")
    text = text.replace("mov.u32 %r2, bar;", f"mov.u32 %r2, bar;\nmov.u32 %r59, {columns};")
    found(text, Kind.TENSOR_MEMORY, f"{columns} columns, expected a power")


def test_the_address_of_columns_goes_to_shared_memory() -> None:
    text = kernel_of("").replace("shared::cta.b32 [%r3], 64;", "b32 [%rd0], 64;")
    found(text, Kind.OUT_OF_BOUNDS, "which is not in shared memory")


INSIDE = "add.u32 %r11, %r5, 8;\nadd.u32 %r12, %r5, 32;\n"
SCALED_PRODUCT = mma(
    "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale",
    idesc("mxf8f6f4", "e4m3", "e4m3", more=1 << 23),
    scales="[%r11], [%r12], ",
)
A_PRODUCT = mma(OPCODE, idesc("f8f6f4", "e4m3", "e4m3"), a="[%r11]")


@pytest.mark.parametrize(("what", "product"), [("scales", SCALED_PRODUCT), ("A", A_PRODUCT)])
def test_a_product_does_not_write_what_it_reads(what: str, product: str) -> None:
    text = kernel_of(OPERANDS + MINUS + INSIDE + product + COMMIT + WAIT + stored(N))
    said = (f"columns 456-4{59 if what == 'scales' else 63} of", f": {what} of", "which writes D")
    found(text, Kind.RACE, *said, schedule="eager", checks=True)


@pytest.mark.parametrize("columns", [8, 24])
def test_8_bit_operands_with_contiguous_rows_have_whole_chunks(columns: int) -> None:
    bits = idesc("f8f6f4", "e4m3", "e4m3", more=1 << 16) & ~(63 << 17) | columns >> 3 << 17
    text = kernel_of(OPERANDS + MINUS + mma(OPCODE, bits) + COMMIT + WAIT)
    found(text, Kind.DESCRIPTOR, f"{columns} rows of e4m3", "expected a multiple of 16")


STORE_APART = """mov.u32 %r58, 7;
tcgen05.st.sync.aligned.16x32bx2.x1.b32 [%r7], 40, {%r58};
tcgen05.wait::st.sync.aligned;
"""
LOAD_APART = """tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r59}, [%r7], 40;
tcgen05.wait::ld.sync.aligned;
"""


def test_what_lies_between_two_halves_is_not_used() -> None:
    """A product goes on there meanwhile."""
    body = f"add.u32 %r13, %r5, 16;\n{STORE_APART}{FIRST.replace('[%r5]', '[%r13]')}{LOAD_APART}"
    text = kernel_of(body + COMMIT + WAIT + stored(N, 16))
    passes(text, ONCE, schedules=("hunt", "lazy"))


def test_half_of_a_store_outside_its_allocation_is_found() -> None:
    text = kernel_of(STORE_APART.replace(", 40", ", -2"))
    found(text, Kind.TENSOR_MEMORY, "column 446 of tensor memory", "not allocated")


def test_memory_that_is_not_freed() -> None:
    text = kernel_of(FIRST + COMMIT + WAIT + stored(N), end="")
    found(text, Kind.TENSOR_MEMORY, "did not free lanes 0-127, columns 448-511", schedule="eager")


def test_memory_is_freed_as_it_was_allocated() -> None:
    for old, new in (("%r5, 64", "%r5, 32"), ("b32 %r5, 64", "b32 %r0, 64")):
        text = kernel_of("")
        place = text.rindex(old)
        wrong = text[:place] + new + text[place + len(old) :]
        found(wrong, Kind.TENSOR_MEMORY, "did not allocate so", schedule="eager")
    found(kernel_of(SYNC + FREE), Kind.TENSOR_MEMORY, "(it has none)", schedule="eager")


def test_any_warp_may_free() -> None:
    body = FIRST + COMMIT + WAIT + stored(N) + "setp.eq.u32 %p1, %r4, 3;\n"
    passes(kernel_of(body), ONCE)


def test_allocations_do_not_grow_nor_follow_the_permit() -> None:
    text = kernel_of(ALLOC.format(1, 32))
    found(text, Kind.TENSOR_MEMORY, "after tcgen05.relinquish_alloc_permit", schedule="eager")
    text = kernel_of(ALLOC.format(1, 128)).replace(RELINQUISH, "")
    found(text, Kind.TENSOR_MEMORY, "128 columns, more than the 64", schedule="eager")


SECOND = "setp.eq.u32 %p6, %r4, 1;\n" + ALLOC.format(6, 256)
FREE_SECOND = "@%p6 ld.shared.u32 %r9, [%r3];\n"
FREE_SECOND += "@%p6 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 256;\n"


def test_an_allocation_waits_for_room() -> None:
    text = kernel_of(SYNC + SECOND + FREE_SECOND, columns=512).replace(RELINQUISH, "")
    head, _, tail = text.rpartition("@%p1 tcgen05.dealloc")
    free, _, rest = tail.partition("\n")
    before = head.replace(SYNC + SECOND, SYNC + "@%p1 tcgen05.dealloc" + free + "\n" + SECOND)
    for seed in range(4):
        run_text(before + rest, "hunt", seed)
    found(text, Kind.DEADLOCK, "waits for 256 columns of tensor memory: CTA 0 has 512 allocated")


def test_warps_reach_their_lanes_alone() -> None:
    text = kernel_of(FIRST + COMMIT + WAIT + stored(N).replace("[%r7", "[%r5"))
    found(text, Kind.TENSOR_MEMORY, "accesses lanes 0-31, and reaches")


def test_instructions_are_for_one_number_of_ctas() -> None:
    text = kernel_of(FIRST + COMMIT.replace("cta_group::1", "cta_group::2") + WAIT + stored(N))
    found(text, Kind.TENSOR_MEMORY, ".cta_group::2, and an instruction before had .cta_group::1")


def test_threads_of_a_warp_give_one_address() -> None:
    text = kernel_of(FIRST + COMMIT + WAIT + "add.u32 %r7, %r7, %r0;\n" + stored(N))
    found(text, Kind.TENSOR_MEMORY, "give other addresses")


@pytest.mark.parametrize(
    ("bits", "said"), [(1 << 23, "bits 0x800000"), (3 << 10, "type 4"), (1 << 17, "M = 128 and N")]
)
def test_instruction_descriptors_that_are_none(bits: int, said: str) -> None:
    good = idesc("f8f6f4", "e4m3", "e2m3" if bits == 3 << 10 else "e4m3")
    if bits == 1 << 17:
        bits = 0x3F << 17
    wrong = FIRST.replace(f"{idesc('f8f6f4', 'e4m3', 'e4m3'):#x}", f"{good | bits:#x}")
    if bits == 3 << 10:
        wrong = FIRST.replace(
            f"{idesc('f8f6f4', 'e4m3', 'e4m3'):#x}", f"{good & ~bits | 2 << 10:#x}"
        )
        said = "type 2"
    found(kernel_of(wrong + COMMIT + WAIT + stored(N)), Kind.DESCRIPTOR, said)


def test_a_shared_descriptor_of_hopper() -> None:
    fields = 1 << 62 | 16 << 32 | 8 << 16
    body = descriptor(A, fields=fields) + descriptor(B, "%rd11") + MINUS + PRODUCT
    found(kernel_of(body + COMMIT + WAIT + stored(N)), Kind.DESCRIPTOR, "in bits 48:46")
