"""Mistakes in the Blackwell kernels are found, by name, and what is none is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from mutants import (
    Launch,
    Mutant,
    assert_found,
    assert_holds_what_mistakes_need,
    assert_most_are_named,
    assert_seen_or_not,
    compile_from,
    hunt_nothing,
)

from mqa.cuda import compiler, sm90, sm100
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Plan
from mqa.emulator import Kind
from mqa.emulator import backend as emulated
from mqa.problem import DenseProblem

pytestmark = pytest.mark.skipif(
    compiler.unavailable() is not None, reason="NVRTC is missing, which compiles the kernels"
)

CASES = {
    "dense": "dense fp8 S=24 N=330 H=64 D=64 regime=exact",
    "mxfp8": "dense mxfp8 S=24 N=330 H=64 D=64 regime=exact",
    "paged": "paged mxfp4 B=8 next_n=1 H=64 D=128 P=64 blocks=200 columns=20 L=700 regime=exact "
    "lens=random seed=1",
}
STAGES = {"dense": 3, "mxfp8": 3, "paged": 5}
"""One more than accumulators: fewer than the plans', so that few tiles go around twice."""
EMPTY_ROW = 11
"""Of the dense ones; the paged one has such a request."""
SEEDS = 20
REPEATED = "stage_released_before_the_products_read_it"
MATH, MULTIPLY = "sm100/score/math.cuh", "sm100/score/multiply.cuh"
SCALES, KERNEL = "sm100/score/scales.cuh", "sm100/score/kernel.cuh"
FEED, DENSE, PAGES = "score/feed.cuh", "score/dense.cuh", "score/paged.cuh"
TENSOR = "ptx/tcgen05.cuh"
SUMS_WAIT = (
    "      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.sums_full[slot]),\n"
    "                                number / Tiling::kSlots & 1);\n"
)
Q_WAIT = (
    "      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_full[{}]), blocks.parity());\n"
)
K_WAIT = (
    "        ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_full[stages.stage]), "
    "stages.parity);\n"
)
SCALES_WAIT = (
    "        if constexpr (Tiling::kScaled)\n"
    "          ptx::mbarrier_wait_parity(ptx::shared_address(&shared.scales_full[stages.stage]),\n"
    "                                    stages.parity);\n"
)
BEHIND_WAIT = (
    "          ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_empty[behind.stage]),\n"
    "                                    behind.parity);\n"
)
EMPTY_WAIT = (
    "      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_empty[ring.stage]), "
    "ring.parity ^ 1);\n"
)
BLOCK_WAIT = (
    "    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_empty[ring.stage()]),\n"
    "                              ring.parity() ^ 1);\n"
)
RANGE_WAIT = "    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.range_known), 0);\n"
LAST_WAIT = (
    "      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_empty[blocks.stage()]),\n"
    "                                blocks.parity() ^ 1);\n"
)
COMMIT_SUMS = (
    "ptx::tcgen05_commit(ptx::shared_address(&shared.sums_full[tiles % Tiling::kSlots]));"
)
COMMIT_STAGE = "ptx::tcgen05_commit(ptx::shared_address(&shared.k_empty[stages.stage]));"
COMMIT_BLOCK = "ptx::tcgen05_commit(ptx::shared_address(&shared.q_empty[block]));"
FENCE_AFTER = "ptx::tcgen05_fence_after_thread_sync();\n"
FENCE_BEFORE = "ptx::tcgen05_fence_before_thread_sync();\n"
FREE = "    ptx::tcgen05_dealloc<kTensorColumns>(shared.tensor_memory);\n"
PROXY_FENCE = "ptx::fence_proxy_async_shared();\n"
INIT_FENCE = "    ptx::fence_mbarrier_init();\n"


def arrives(commit: str) -> str:
    return commit.replace("tcgen05_commit", "mbarrier_arrive")


MUTANTS = (
    # Waits.
    Mutant("sums_not_waited_for", MATH, SUMS_WAIT, ""),
    Mutant("sums_waited_for_with_the_wrong_parity", MATH, SUMS_WAIT,
           SUMS_WAIT.replace("& 1)", "& 1 ^ 1)")),
    Mutant("keys_not_waited_for", MULTIPLY, K_WAIT, ""),
    Mutant("queries_not_waited_for_by_products", MULTIPLY, Q_WAIT.format("block"), ""),
    Mutant("queries_not_waited_for_by_math", MATH, Q_WAIT.format("stage"), ""),
    Mutant("scales_not_waited_for", MULTIPLY, SCALES_WAIT, "", case="mxfp8"),
    Mutant("scales_reordered_before_they_came", SCALES, K_WAIT, "", case="paged"),
    Mutant("accumulator_not_waited_for", MULTIPLY, BEHIND_WAIT, ""),
    Mutant("accumulator_of_scales_not_waited_for", MULTIPLY, BEHIND_WAIT, "", case="paged"),
    Mutant("empty_stage_not_waited_for", DENSE, EMPTY_WAIT, ""),
    Mutant("empty_block_not_waited_for", FEED, BLOCK_WAIT, ""),
    Mutant("range_not_waited_for", FEED, RANGE_WAIT, ""),
    Mutant("barriers_not_waited_for", KERNEL,
           RANGE_WAIT + "    if (ptx::elect_one()) Mul", "    if (ptx::elect_one()) Mul"),
    # What tells others.
    Mutant("stage_released_before_the_products_read_it", MULTIPLY, COMMIT_STAGE,
           arrives(COMMIT_STAGE)),
    Mutant("block_released_before_the_products_read_it", MULTIPLY, COMMIT_BLOCK,
           arrives(COMMIT_BLOCK)),
    Mutant("sums_told_before_they_are_there", MULTIPLY, COMMIT_SUMS, arrives(COMMIT_SUMS)),
    Mutant("stage_released_before_scales_are_read", MATH,
           "    const float k_scale = Tiling::kScaled ? 1.0f : *k_scale_at;\n    release();\n",
           "    release();\n    const float k_scale = Tiling::kScaled ? 1.0f : *k_scale_at;\n"),
    Mutant("accumulator_released_before_it_is_loaded", MATH,
           "    weigh(set, from, totals);\n    const float k_scale = Tiling::kScaled ? 1.0f : "
           "*k_scale_at;\n    release();\n",
           "    const float k_scale = Tiling::kScaled ? 1.0f : *k_scale_at;\n    release();\n"
           "    weigh(set, from, totals);\n"),
    Mutant("too_few_bytes_expected", DENSE, "Tiling::kKBytes + count / 4 * 16);",
           "Tiling::kKBytes - 16 + count / 4 * 16);"),
    Mutant("too_few_bytes_of_queries_expected", FEED, "boxes * kBytes);", "boxes * kBytes - 16);"),
    Mutant("arrivals_too_few", KERNEL, "1 + Tiling::kReaderWarps * ptx::kWarpArrivals);",
           "Tiling::kReaderWarps * ptx::kWarpArrivals);"),
    Mutant("arrivals_of_scales_forgotten", KERNEL,
           "(Tiling::kActiveWarps + Tiling::kScaled)", "Tiling::kActiveWarps", case="mxfp8"),
    Mutant("arrivals_too_many", KERNEL, "shared.sums_full[i]), 1);", "shared.sums_full[i]), 2);"),
    Mutant("weights_arrive_once", KERNEL, "1 + ptx::kWarpArrivals + kWarpSize);",
           "2 + ptx::kWarpArrivals);"),
    Mutant("init_fence_dropped", KERNEL, INIT_FENCE, ""),
    # Fences.
    Mutant("proxy_fence_of_scales_dropped", SCALES, "        " + PROXY_FENCE, "", case="mxfp8"),
    Mutant("proxy_fence_of_query_scales_dropped", FEED, "    " + PROXY_FENCE, "", case="mxfp8"),
    Mutant("fence_after_waits_for_products_dropped", MULTIPLY, "        " + FENCE_AFTER, ""),
    Mutant("fence_before_query_scales_dropped", MULTIPLY,
           "    " + FENCE_AFTER + "    const uint64_t", "    const uint64_t", case="paged"),
    Mutant("fence_after_the_wait_for_sums_dropped", MATH, "      " + FENCE_AFTER, ""),
    Mutant("fence_before_the_accumulator_is_released_dropped", MATH,
           "             " + FENCE_BEFORE, ""),
    Mutant("wait_for_loads_dropped", TENSOR, '"tcgen05.wait::ld.sync.aligned;"', '""'),
    # Places.
    Mutant("wrong_accumulator", MULTIPLY, "memory + slot * Tiling::kBlockColumns",
           "memory + (slot ^ 1) * Tiling::kBlockColumns"),
    Mutant("wrong_accumulator_loaded", MATH, "slot = number % Tiling::kSlots;",
           "slot = (number + 1) % Tiling::kSlots;"),
    Mutant("one_accumulator", MULTIPLY, "memory, tiles % Tiling::kSlots, q_scales",
           "memory, 0, q_scales"),
    Mutant("scales_not_double_buffered", MULTIPLY,
           "kKScaleColumns + slot * kScaleColumns", "kKScaleColumns", case="mxfp8"),
    Mutant("query_scales_not_double_buffered", MULTIPLY,
           "block * Tiling::kQScaleTiles * kScaleColumns", "0", case="mxfp8"),
    Mutant("wrong_quarter", MATH, "warp % 4 * kWarpSize", "(warp + 1) % 4 * kWarpSize"),
    Mutant("stages_off_by_one", MATH, "typename Tiling::StageRing;",
           "Ring<Tiling::kStages - 1>;"),
    Mutant("stages_of_others_not_skipped", MATH, "(turn - tiles) % kTurns", "turn", case="paged"),
    Mutant("stages_swapped", DENSE, "(ptx::shared_address(shared.k[stage]) +",
           "(ptx::shared_address(shared.k[(stage + 1) % Tiling::kStages]) +"),
    Mutant("last_split_missed", DENSE, "done < Tiling::padded(task.length);",
           "done + kStageRows < Tiling::padded(task.length);"),
    Mutant("last_stage_not_multiplied", MULTIPLY, "done < piece.length;",
           "done + kTileRows < piece.length;"),
    Mutant("store_past_the_row", MATH, "(token - row.start) < row.length)",
           "(token - row.start) <= row.length)"),
    # Tensor memory.
    Mutant("memory_never_freed", KERNEL, FREE, ""),
    Mutant("memory_freed_early", MULTIPLY, LAST_WAIT, "      ;\n"),
    Mutant("memory_freed_by_a_warp_of_math", KERNEL,
           "    Math<Tiling>::math(shared);\n",
           "    Math<Tiling>::math(shared);\n    if (warp == 0) "
           "ptx::tcgen05_dealloc<kTensorColumns>(shared.tensor_memory);\n"),
    Mutant("too_few_columns_allocated", KERNEL, "tcgen05_alloc<kTensorColumns>",
           "tcgen05_alloc<kTensorColumns / 2>"),
    # Descriptors and operands.
    Mutant("first_step_adds", MULTIPLY,
           "kE4m3Instruction<Tiling::kBlockColumns>, step > 0);",
           "kE4m3Instruction<Tiling::kBlockColumns>, true);"),
    Mutant("half_of_the_columns", TENSOR, "1u << 4 | kColumns / 8 << 17",
           "1u << 4 | kColumns / 16 << 17"),
    Mutant("stride_of_groups_halved", TENSOR, "8 * kRowBytes >> 4", "4 * kRowBytes >> 4"),
    Mutant("wrong_swizzle", TENSOR, "kRowBytes == 64 ? 4 :", "kRowBytes == 64 ? 2 :"),
    Mutant("wrong_scale_id", MULTIPLY, "<Tiling::kBlockColumns>(step), k_scales",
           "<Tiling::kBlockColumns>(0), k_scales", case="mxfp8"),
    Mutant("wrong_stride_of_scales", TENSOR, "1u << 14 | 128 >> 4", "1u << 14 | 256 >> 4",
           case="mxfp8"),
    Mutant("scales_of_rows_from_64_on_missed", MULTIPLY, "i < Tiling::kQScaleTiles;",
           "i < Tiling::kQScaleTiles - 1;", case="mxfp8"),
    Mutant("elected_by_half_a_warp", PAGES, "if (ptx::elect_one())",
           "if (threadIdx.x % kWarpSize < 16 && ptx::elect_one())", case="paged"),
    Mutant("elected_by_none", KERNEL, "if (ptx::elect_one()) Multiply<",
           "Multiply<"),
)  # fmt: skip


def launch_of(case: str, patch: pytest.MonkeyPatch) -> Launch:
    with patch.context() as inside:
        inside.setattr(sm90, "dense_plan", sm100.dense_plan)
        inside.setattr(sm90, "paged_plan", sm100.paged_plan)
        inside.setattr(emulated.SM90_EMULATED, "_arch", "sm_100f")
        launch = Launch(CASES[case], inside, empty_row=-1 if case == "paged" else EMPTY_ROW)
    launch.plan = with_stages(launch.plan, STAGES[case])
    return launch


def with_stages(plan: Plan, stages: int) -> Plan:
    elements, heads, dim, logit, _, columns, _ = plan.kernel.arguments
    t = sm100.Tiles(int(heads), int(dim), stages, int(columns), elements.rpartition(":")[2])
    arguments = (elements, heads, dim, logit, str(stages), columns, str(t.shared_bytes))
    return dataclasses.replace(
        plan,
        kernel=dataclasses.replace(plan.kernel, arguments=arguments),
        shared_bytes=t.shared_bytes,
        parts=sm100.shared_parts(t),
    )


@pytest.mark.parametrize("case", CASES)
def test_cases_hold_what_mistakes_need(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launch_of(case, monkeypatch)
    dense = isinstance(launch.case.problem, DenseProblem)
    columns = int(launch.plan.kernel.arguments[5])
    rows, group = columns // 64, 512 // 64
    assert_holds_what_mistakes_need(
        launch,
        monkeypatch,
        stages=STAGES[case],
        tile_rows=sm100.TILE_ROWS,
        boxes=1 if dense else sm100.TILE_ROWS // launch.case.tensors["cache"].shape[1],
        block_of=lambda row: row // group * group + row % group // rows if dense else row,
    )
