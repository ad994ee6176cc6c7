"""Mistakes in a Blackwell kernel are found, by name, and what is none is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mutants import DEEP_SEEDS, DEEP_STEP, MARKS, SEEDS, Edit, edited, source_lines
from products import FORMATS, SOURCE, compile_product, make_product

from mqa.emulator import Kind

pytestmark = MARKS


@dataclass(frozen=True)
class Mutant(Edit):
    names: str = ""
    """What the report says of the barrier or the memory."""
    at: str = ""
    """A part of a source line that the report names."""
    format: Any = "fp8"


COMMIT_STAGE = "tcgen05_commit(ptx::shared_address(&shared.empty[ring.stage]));"
FULL_SUMS = "tcgen05_commit(ptx::shared_address(&shared.sums_full[which]));"
SUMS_FULL_WAIT = (
    "    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.sums_full[which]), done / 2 & 1);\n"
)
SUMS_EMPTY_WAIT = (
    "    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.sums_empty[which]), "
    "(done / 2 & 1) ^ 1);\n"
)
FENCE_AFTER, FENCE_BEFORE = (
    "    ptx::tcgen05_fence_after_thread_sync();\n",
    "    ptx::tcgen05_fence_before_thread_sync();\n",
)
ARRIVE = "    ptx::mbarrier_arrive(ptx::shared_address(&shared.sums_empty[which]));\n"
FREE = "  if (warp == 1) ptx::tcgen05_dealloc<kTensorColumns>(memory);\n"
LAST = f"{FENCE_BEFORE[2:]}  __syncthreads();\n{FENCE_AFTER[2:]}{FREE}"
LOAD, MMA = "ptx::tcgen05_ld_32x32b(v", "ptx::tcgen05_mma_f8f6f4(sums"
COPY, STORED = "ptx::tcgen05_cp_32x128b(scales", "to[(first + i) / 4]"

MUTANTS = (
    Mutant("wait_for_loads_dropped", "      ptx::tcgen05_wait_ld(v);\n", "",
           Kind.PENDING_REGISTER, "tcgen05.ld", STORED),
    Mutant("fence_after_the_wait_for_sums_dropped", SUMS_FULL_WAIT + FENCE_AFTER, SUMS_FULL_WAIT,
           Kind.TENSOR_FENCE, "", LOAD),
    Mutant("fence_before_sums_are_given_back_dropped", FENCE_BEFORE + ARRIVE, ARRIVE,
           Kind.TENSOR_FENCE, "", MMA),
    Mutant("fence_after_the_wait_for_empty_sums_dropped", SUMS_EMPTY_WAIT + FENCE_AFTER,
           SUMS_EMPTY_WAIT, Kind.TENSOR_FENCE, "", MMA),
    Mutant("fence_before_scales_are_copied_dropped",
           "if constexpr (Policy<kFormat>::kScaled) ptx::tcgen05_fence_after_thread_sync();", "",
           Kind.TENSOR_FENCE, "", COPY, format="mxfp8"),
    Mutant("commit_to_the_wrong_barrier", FULL_SUMS, FULL_SUMS.replace("which]", "which ^ 1]"),
           Kind.DEADLOCK, "mbarrier", "sums_full[which]), done"),
    Mutant("stage_committed_to_the_barrier_of_sums", COMMIT_STAGE,
           COMMIT_STAGE.replace("empty[ring.stage]", "sums_full[which]"),
           Kind.RACE, "tensor memory", LOAD),
    Mutant("half_of_the_columns", "kE4m3Instruction<kColumns>", "kE4m3Instruction<kColumns / 2>",
           Kind.UNWRITTEN, "tensor memory", STORED),
    Mutant("wrong_scale_id", "const uint32_t id = piece;", "const uint32_t id = 0;",
           format="mxfp8"),
    Mutant("scales_overwritten_too_early", "memory + kScales + ring.stage * 16", "memory + kScales",
           Kind.RACE, "tensor memory", COPY, format="mxfp8"),
    Mutant("scales_of_fp4_overwritten_too_early", "memory + kScales + ring.stage * 16",
           "memory + kScales + ring.stage * 8",
           Kind.RACE, "tensor memory", COPY, format="mxfp4"),
    Mutant("stride_off_by_one", "a + piece * 2,", "a + piece * 2 + (uint64_t{1} << 32),",
           Kind.RACE, "shared memory", MMA),
    Mutant("wrong_quarter", "threadIdx.x / 32 % 4", "threadIdx.x / 32 - 2",
           Kind.TENSOR_MEMORY, "lanes", LOAD),
    Mutant("first_step_adds", "const bool adds = !first || piece > 0;", "const bool adds = true;",
           Kind.UNWRITTEN, "tensor memory", STORED),
    Mutant("sums_not_waited_for", SUMS_FULL_WAIT, "",
           Kind.UNWRITTEN, "tensor memory", STORED),
    Mutant("empty_sums_not_waited_for", SUMS_EMPTY_WAIT, "",
           Kind.RACE, "tensor memory", MMA),
    Mutant("memory_freed_early", LAST, FREE,
           Kind.RACE, "tensor memory", "tcgen05_dealloc"),
    Mutant("memory_never_freed", FREE, "",
           Kind.TENSOR_MEMORY, "did not free"),
    Mutant("memory_freed_by_a_warp_that_waits_for_none", LAST, FREE.replace("== 1", "== 2"),
           Kind.RACE, "tensor memory", "tcgen05_dealloc"),
    Mutant("stage_released_before_the_products_read_it", COMMIT_STAGE,
           COMMIT_STAGE.replace("tcgen05_commit", "mbarrier_arrive"),
           Kind.RACE, "shared memory", "ptx::cp_async_bulk_tensor_2d_load("),
    Mutant("scales_of_b_not_copied", "word < 2 * P::kWords; ++word) {\n    ptx::tc",
           "word < P::kWords; ++word) {\n    ptx::tc",
           Kind.UNWRITTEN, "tensor memory", format="mxfp8"),
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mistake_is_found_and_named(mutant: Mutant, tmp_path: Path) -> None:
    source = edited(SOURCE, tmp_path, mutant.before, mutant.after)
    binary, product = compile_product(mutant.format, source), make_product(mutant.format)
    if mutant.kind is None:
        assert product.launch(binary, "eager") is not None or not product.is_right()
        return
    found = (product.launch(binary, "hunt", seed) for seed in range(SEEDS))
    assert any(
        report is not None
        and report.kind is mutant.kind
        and mutant.names in report.message
        and (not mutant.at or any(mutant.at in x for x in source_lines(report, tmp_path)))
        for report in found
    )


def test_most_mistakes_are_named() -> None:
    named = [mutant for mutant in MUTANTS if mutant.kind is not None]
    assert len(MUTANTS) >= 12
    assert 12 * len(named) >= 10 * len(MUTANTS)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize("format", FORMATS)
def test_the_kernel_itself_is_right(format: Any, schedule: str) -> None:
    product = make_product(format)
    assert product.launch(compile_product(format), schedule, checks=True) is None
    assert product.is_right()


@pytest.mark.parametrize("format", FORMATS)
def test_the_kernel_itself_is_hunted(format: Any) -> None:
    hunt(format, range(SEEDS // 2))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, DEEP_SEEDS, DEEP_STEP))
@pytest.mark.parametrize("format", FORMATS)
def test_the_kernel_itself_is_hunted_with_many_seeds(format: Any, first: int) -> None:
    hunt(format, range(first, first + DEEP_STEP))


def hunt(format: Any, seeds: range) -> None:
    binary, product = compile_product(format), make_product(format)
    for seed in seeds:
        assert product.launch(binary, "hunt", seed) is None
        assert product.is_right()


@pytest.mark.parametrize("mutant", ["scales_overwritten_too_early"])
def test_hardware_that_works_in_order_hides_early_scales(mutant: str, tmp_path: Path) -> None:
    """What Blackwell is said to do beyond what the ISA promises."""
    edit = next(m for m in MUTANTS if m.name == mutant)
    source = edited(SOURCE, tmp_path, edit.before, edit.after)
    binary, product = compile_product(edit.format, source), make_product(edit.format)
    for seed in range(3):
        assert product.launch(binary, "hunt", seed, tensor_pipe="in-order") is None
        assert product.is_right()
