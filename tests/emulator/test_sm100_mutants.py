"""Mistakes in the Blackwell kernels are found, by name, and what is none is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from mutants import (
    DEEP_SEEDS,
    DEEP_STEP,
    DENSE,
    EMPTY_ROW,
    EMPTY_WAIT,
    FEED,
    LOAD_K,
    MARKS,
    PAGES,
    RANGE_WAIT,
    SEEDS,
    Launch,
    Mutant,
    assert_found,
    assert_found_again,
    assert_holds_what_mistakes_need,
    assert_most_are_named,
    assert_seen_or_not,
    hunt_nothing,
    relabelled,
    with_slow_ones,
)

from mqa.cuda import sm100_tiles
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Plan
from mqa.emulator import Kind
from mqa.problem import DenseProblem

pytestmark = MARKS

CASES = {
    "dense": "dense fp8 S=24 N=400 H=64 D=64 regime=exact",
    "mxfp8": "dense mxfp8 S=48 N=200 H=64 D=64 regime=exact",
    "paged": "paged mxfp4 B=8 next_n=1 H=64 D=128 P=64 blocks=200 columns=20 L=800 regime=exact "
    "lens=random seed=1",
    "late": "dense fp8 S=4 N=1100 H=64 D=64 windows=packed regime=exact seed=3",
}
"""In the last, rows of a block have windows that start far from each other."""
STAGES = {"dense": 4, "mxfp8": 2, "paged": 7, "late": 4}
"""More than accumulators or one trip, fewer than the plans', so that few tiles go around twice."""
REPEATED = "sums_told_before_they_are_there"
MATH, MULTIPLY = "sm100/score/math.cuh", "sm100/score/multiply.cuh"
SCALES, KERNEL = "sm100/score/scales.cuh", "sm100/score/kernel.cuh"
TENSOR = "ptx/tcgen05.cuh"
SUMS_WAIT = (
    "    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.sums_full[sums]),\n"
    "                              (kInPasses ? number : number / kMine) & 1);\n"
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
    "            ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_empty[behind.stage]),\n"
    "                                      behind.parity);\n"
)
PASS_WAIT = (
    "      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.sums_empty[before]),\n"
    "                                (before < pass ? tile : tile + 1) & 1);\n"
)
LOOK_UP = "        const auto place = Source::look_up(args, task);\n"
BLOCK_WAIT = "        wait_block(ring, shared);\n"
LAST_WAIT = (
    "      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_empty[blocks.stage()]),\n"
    "                                blocks.parity() ^ 1);\n"
)
COMMIT_SUMS = "ptx::tcgen05_commit(ptx::shared_address(&shared.sums_full[slot]));"
COMMIT_STAGE = "ptx::tcgen05_commit(ptx::shared_address(&shared.k_empty[stages.stage]));"
COMMIT_BLOCK = "ptx::tcgen05_commit(ptx::shared_address(&shared.q_empty[block]));"
FENCE_AFTER = "ptx::tcgen05_fence_after_thread_sync();\n"
FENCE_BEFORE = "ptx::tcgen05_fence_before_thread_sync();\n"
FREE = "    ptx::tcgen05_dealloc<kTensorColumns>(shared.tensor_memory);\n"
PROXY_FENCE = "ptx::fence_proxy_async_shared();\n"
INIT_FENCE = "    ptx::fence_mbarrier_init();\n"
MULTIPLY_TILE = "            multiply_columns("
FENCED = "            " + FENCE_AFTER + MULTIPLY_TILE
SCALE = "Tiling::kScaled ? 1.0f : shared.k_scale[stage + i][lane]"
SCALED, SCALED_LATE = "first, sums, k_scale);\n        }", f"first, sums, {SCALE});\n        }}"
RELEASED = "if ((first + kLoaded) % kStripColumns == 0) release("
MULTIPLIED = "if (ptx::elect_one()) Multiply<Tiling>::multiply(shared);"
SUMS, MEMORY = "of tensor memory", "of tensor memory of CTA"
LOADED, STORED = "ptx::tcgen05_ld_32x32b(dots", "ptx::st_global(lines.at["
PRODUCT, MX_PRODUCT = "ptx::tcgen05_mma_f8f6f4(sums", "ptx::tcgen05_mma_mxf8f6f4(sums"
K_COPIED, Q_COPIED = "copy_k_scales(shared", "ptx::tcgen05_cp_32x128b(target"
LOAD_Q = "ptx::cp_async_bulk_tensor_3d_load(ptx::shared_address(shared.q[ring.stage()])"
SUMS_WAITED = "shared.sums_full[sums]),"
K_WAITED = K_WAIT.strip()


def arrives(commit: str) -> str:
    return commit.replace("tcgen05_commit", "mbarrier_arrive")


MUTANTS = (
    # Waits.
    Mutant("sums_not_waited_for", MATH, SUMS_WAIT, "",
           Kind.RACE, "k_scale[0]", SCALE),
    Mutant("sums_waited_for_with_the_wrong_parity", MATH, SUMS_WAIT,
           SUMS_WAIT.replace("& 1)", "& 1 ^ 1)"),
           Kind.RACE, "k_scale[0]", SCALE),
    Mutant("sums_of_empty_stages_not_waited_for", MATH,
           "          wait_sums(shared, place, strip, i);\n", "",
           Kind.RACE, "k_scale[", "args.k_scale + token,"),
    Mutant("keys_not_waited_for", MULTIPLY, K_WAIT, "",
           Kind.RACE, "k[0]", PRODUCT, seen=False),
    Mutant("queries_not_waited_for_by_products", MULTIPLY, Q_WAIT.format("block"), "",
           Kind.RACE, "piece[0]", "const Piece piece = shared.piece[block];", seen=False),
    Mutant("queries_not_waited_for_by_math", MATH, Q_WAIT.format("stage"), "",
           Kind.UNWRITTEN, "piece[0]", "if (uniform(shared.piece[stage].groups) == 0) break;"),
    Mutant("scales_not_waited_for", MULTIPLY, SCALES_WAIT, "",
           Kind.RACE, "k_scales[0]", K_COPIED, case="mxfp8"),
    Mutant("scales_reordered_before_they_came", SCALES, K_WAIT, "",
           Kind.RACE, "k_scale[0]", "make_float4(words[lane]", case="paged"),
    Mutant("accumulator_not_waited_for", MULTIPLY, BEHIND_WAIT, "",
           Kind.RACE, SUMS, PRODUCT),
    Mutant("passes_not_waited_for", MULTIPLY, PASS_WAIT, "",
           Kind.RACE, SUMS, MX_PRODUCT, case="mxfp8"),
    Mutant("passes_of_the_tile_before_waited_for", MULTIPLY, PASS_WAIT,
           PASS_WAIT.replace("before < pass ? tile : tile + 1", "tile + 1"),
           Kind.RACE, SUMS, MX_PRODUCT, case="mxfp8"),
    Mutant("scales_overwritten_too_early", MULTIPLY, BEHIND_WAIT, "",
           Kind.RACE, "columns 384-387 of tensor memory", K_COPIED, case="paged"),
    Mutant("empty_stage_not_waited_for", DENSE, EMPTY_WAIT, "",
           Kind.RACE, "k[0]", LOAD_K),
    Mutant("wrong_stage_waited_for", DENSE, EMPTY_WAIT,
           EMPTY_WAIT.replace("[ring.stage]", "[0]"),
           Kind.RACE, "k[", LOAD_K),
    Mutant("empty_stage_waited_for_with_the_wrong_parity", DENSE, EMPTY_WAIT,
           EMPTY_WAIT.replace(" ^ 1", ""),
           Kind.DEADLOCK, "mbarrier k_empty[0]", "shared.k_empty[ring.stage]), ring.parity);"),
    Mutant("empty_block_not_waited_for", FEED, LOOK_UP + BLOCK_WAIT, LOOK_UP,
           Kind.RACE, "q[", LOAD_Q, case="paged"),
    Mutant("range_not_waited_for", FEED, RANGE_WAIT, "",
           Kind.UNWRITTEN, "feeders[", "base > Source::last_block(args, range)", seen=False),
    Mutant("barriers_not_waited_for", KERNEL, RANGE_WAIT + "    " + MULTIPLIED, "    " + MULTIPLIED,
           Kind.RACE, "mbarrier q_full[0]", Q_WAIT.format("block").strip(), seen=False),
    # What tells others.
    Mutant("sums_told_before_they_are_there", MULTIPLY, COMMIT_SUMS, arrives(COMMIT_SUMS),
           Kind.RACE, SUMS, LOADED, seen=False),
    Mutant("accumulator_released_before_it_is_loaded", MATH,
           RELEASED, "if (first % kStripColumns == 0) release(",
           Kind.RACE, SUMS, PRODUCT, seen=False),
    Mutant("pass_released_before_it_is_loaded", MATH,
           RELEASED, "if (first % kStripColumns == 0) release(",
           Kind.RACE, SUMS, MX_PRODUCT, seen=False, case="mxfp8"),
    Mutant("stage_of_passes_released_before_it_is_multiplied", MULTIPLY,
           COMMIT_STAGE, arrives(COMMIT_STAGE),
           Kind.RACE, "k[", LOAD_K, seen=False, case="mxfp8"),
    Mutant("stage_released_before_its_scale_is_read", MATH, SCALED, SCALED_LATE,
           Kind.RACE, "k_scale[", "shared.k_scale[stage]), args.k_scale + token", seen=False),
    Mutant("too_few_bytes_expected", DENSE, "Tiling::kKBytes + count / 4 * 16);",
           "Tiling::kKBytes - 16 + count / 4 * 16);",
           Kind.DEADLOCK, "mbarrier k_full[0]", K_WAITED),
    Mutant("too_few_bytes_of_queries_expected", FEED, "boxes * kBytes);", "boxes * kBytes - 16);",
           Kind.DEADLOCK, "mbarrier q_full[0]", Q_WAIT.format("block").strip()),
    Mutant("arrivals_too_few", KERNEL, "1 + Tiling::kReaderWarps * ptx::kWarpArrivals);",
           "Tiling::kReaderWarps * ptx::kWarpArrivals);",
           Kind.RACE, SUMS, PRODUCT, seen=False),
    Mutant("readers_of_passes_too_few", KERNEL, "Tiling::readers_of(i) *",
           "(Tiling::readers_of(i) - 4) *",
           Kind.RACE, SUMS, MX_PRODUCT, case="mxfp8"),
    Mutant("arrivals_of_who_reorders_forgotten", KERNEL,
           "(Tiling::kActiveWarps + Tiling::kScaled)", "Tiling::kActiveWarps",
           Kind.RACE, "weights[0]", "set.read_again(pair, again);", seen=False, case="mxfp8"),
    Mutant("arrivals_too_many", KERNEL, "shared.sums_full[i]), 1);", "shared.sums_full[i]), 2);",
           Kind.DEADLOCK, "mbarrier sums_full[0]", SUMS_WAITED),
    Mutant("weights_arrive_once", KERNEL, "1 + ptx::kWarpArrivals + kWarpSize);",
           "2 + ptx::kWarpArrivals);",
           Kind.BARRIER, "mbarrier q_full[0]", "shared.q_full[ring.stage()]));"),
    Mutant("init_fence_dropped", KERNEL, INIT_FENCE, "",
           Kind.BARRIER, "mbarrier q_full[0]", LOAD_Q, seen=False),
    # Fences.
    Mutant("proxy_fence_of_scales_dropped", SCALES, "        " + PROXY_FENCE, "",
           Kind.PROXY_FENCE, "k_scales[0]", K_COPIED, seen=False, case="mxfp8"),
    Mutant("proxy_fence_of_query_scales_dropped", FEED, "    " + PROXY_FENCE, "",
           Kind.PROXY_FENCE, "q_scales[", Q_COPIED, seen=False, case="mxfp8"),
    Mutant("proxy_fence_of_fill_dropped", "common/logits.cuh", PROXY_FENCE + "  __sync", "__sync",
           Kind.PROXY_FENCE, "fill (", "ptx::cp_async_bulk_store(", seen=False),
    Mutant("fence_after_waits_for_products_dropped", MULTIPLY, "        " + FENCE_AFTER, "",
           Kind.TENSOR_FENCE, SUMS, PRODUCT, seen=False),
    Mutant("fence_before_query_scales_dropped", MULTIPLY,
           "    " + FENCE_AFTER + "    const uint64_t", "    const uint64_t",
           Kind.TENSOR_FENCE, "columns 408-409 of tensor memory", Q_COPIED, seen=False,
           case="paged"),
    Mutant("fence_after_the_wait_for_sums_dropped", MATH, "    " + FENCE_AFTER, "",
           Kind.TENSOR_FENCE, SUMS, LOADED, seen=False),
    Mutant("fence_before_the_accumulator_is_released_dropped", MATH,
           "    " + FENCE_BEFORE, "",
           Kind.TENSOR_FENCE, SUMS, PRODUCT, seen=False),
    Mutant("wait_for_loads_dropped", TENSOR,
           '"tcgen05.wait::ld.sync.aligned;" : MQA_VALUES_32', '"" : MQA_VALUES_32',
           Kind.PENDING_REGISTER, "belongs to tcgen05.ld", "ptx::max_nan(", seen=False),
    # Places.
    Mutant("wrong_accumulator", MULTIPLY, "memory + slot * kPassColumns",
           "memory + (slot ^ 1) * kPassColumns",
           Kind.UNWRITTEN, MEMORY, STORED),
    Mutant("wrong_accumulator_loaded", MATH,
           "slot_of(place, strip, number + i) *", "slot_of(place, strip, number + i + 1) *",
           Kind.RACE, SUMS, LOADED),
    Mutant("one_accumulator", MULTIPLY, "sums_of(memory, slot),", "sums_of(memory, 0),",
           Kind.RACE, SUMS, PRODUCT),
    Mutant("one_accumulator_of_passes", MULTIPLY, "(tile * kPasses + pass) % kSlots", "0",
           Kind.RACE, SUMS, LOADED, case="mxfp8"),
    Mutant("last_pass_missed", MULTIPLY, "return rows * Tiling::kHeads;",
           "return (rows - 2) * Tiling::kHeads;", case="mxfp8"),
    Mutant("queries_of_the_first_pass_in_all", MULTIPLY, "(first * kRowBytes >> 4)", "0",
           case="mxfp8"),
    Mutant("query_scales_of_the_first_pass_in_all", MULTIPLY, "q_scales + first / 32", "q_scales",
           case="mxfp8"),
    Mutant("scales_not_double_buffered", MULTIPLY,
           "kKScaleColumns + number * kScaleColumns", "kKScaleColumns",
           Kind.RACE, "columns 384-387 of tensor memory", K_COPIED, seen=False, case="mxfp8"),
    Mutant("query_scales_not_double_buffered", MULTIPLY,
           "block * Tiling::kQScaleTiles * kScaleColumns", "0",
           Kind.RACE, "columns 398-399 of tensor memory", Q_COPIED, seen=False, case="mxfp8"),
    Mutant("wrong_quarter", MATH, "warp % 4 * kWarpSize", "(warp + 1) % 4 * kWarpSize",
           Kind.TENSOR_MEMORY, "accesses lanes", LOADED),
    Mutant("stages_off_by_one", MATH, "typename Tiling::StageRing;",
           "Ring<Tiling::kStages - 1>;",
           Kind.DEADLOCK, "mbarrier k_empty[6]", "shared.k_empty[ring.stage]),", case="paged"),
    Mutant("stages_of_others_not_skipped", MATH,
           "(place.turn + kTurns - done % kTurns) % kTurns", "place.turn",
           Kind.RACE, SUMS, "ptx::tcgen05_mma_mxf4(sums", case="paged"),
    Mutant("stages_swapped", DENSE, "(ptx::shared_address(shared.k[stage]) +",
           "(ptx::shared_address(shared.k[(stage + 1) % Tiling::kStages]) +",
           Kind.UNWRITTEN, "comes from k[0]", STORED),
    Mutant("last_split_missed", DENSE, "done < Tiling::padded(task.length);",
           "done + kStageRows < Tiling::padded(task.length);",
           Kind.DEADLOCK, "mbarrier k_full[0]", K_WAITED),
    Mutant("last_stage_not_multiplied", MULTIPLY, "done < Tiling::padded(piece.length);",
           "done + kTileRows < Tiling::padded(piece.length);",
           Kind.UNWRITTEN, "comes from k[3]", STORED),
    Mutant("last_tile_of_a_trip_missed", MATH, "for (int i = 0; i < kTiles; i++) {\n      uint64_t",
           "for (int i = 0; i < kTiles - (kTiles > 1); i++) {\n      uint64_t",
           Kind.DEADLOCK, "mbarrier k_empty[3]", EMPTY_WAIT.strip()),
    Mutant("store_past_the_row", MATH, "token < set.end[row + i]", "token <= set.end[row + i]",
           Kind.OUT_OF_BOUNDS, "of out", STORED),
    Mutant("store_before_the_window", MATH, "tiles >= kAligned && first >= set.latest;",
           "tiles >= kAligned;", case="late"),
    # Tensor memory.
    Mutant("memory_never_freed", KERNEL, FREE, "",
           Kind.TENSOR_MEMORY, "did not free lanes 0-127, columns 0-511", "}", seen=False),
    Mutant("memory_freed_early", MULTIPLY, LAST_WAIT, "      ;\n",
           Kind.RACE, SUMS, FREE.strip(), seen=False),
    Mutant("memory_freed_by_a_warp_of_math", KERNEL, "    Math<Tiling>::math(shared);\n",
           "    Math<Tiling>::math(shared);\n    if (warp == 0) " + FREE.lstrip(),
           Kind.RACE, SUMS, "if (warp == 0) " + FREE.strip()),
    Mutant("too_few_columns_allocated", KERNEL, "tcgen05_alloc<kTensorColumns>",
           "tcgen05_alloc<kTensorColumns / 2>",
           Kind.TENSOR_MEMORY, "columns 512-767 of tensor memory", PRODUCT),
    # Descriptors and operands.
    Mutant("first_step_adds", MULTIPLY,
           "kE4m3Instruction<kPassColumns>, step > 0);", "kE4m3Instruction<kPassColumns>, true);",
           Kind.UNWRITTEN, MEMORY, STORED),
    Mutant("half_of_the_columns", TENSOR, "1u << 4 | kColumns / 8 << 17",
           "1u << 4 | kColumns / 16 << 17",
           Kind.UNWRITTEN, MEMORY, STORED),
    Mutant("stride_of_groups_halved", TENSOR, "8 * kRowBytes >> 4", "4 * kRowBytes >> 4"),
    Mutant("wrong_scale_id", MULTIPLY, "(columns, step), k_scales", "(columns, 0), k_scales",
           case="mxfp8"),
    Mutant("wrong_stride_of_scales", TENSOR, "1u << 14 | 128 >> 4", "1u << 14 | 256 >> 4",
           Kind.RACE, "q_scales[1]", Q_COPIED, case="mxfp8"),
    Mutant("scales_of_the_last_queries_missed", MULTIPLY, "i < Tiling::kQScaleTiles;",
           "i < Tiling::kQScaleTiles - 1;",
           Kind.UNWRITTEN, "column 404 of tensor memory", STORED, case="mxfp8"),
    Mutant("elected_by_half_a_warp", PAGES, "if (ptx::elect_one())",
           "if (threadIdx.x % kWarpSize < 16 && ptx::elect_one())",
           Kind.DEADLOCK, "threads 0xffff0000 of its warp", "16 && ptx::elect_one()", case="paged"),
    Mutant("elected_by_none", KERNEL, MULTIPLIED, MULTIPLIED.partition(") ")[2],
           Kind.RACE, SUMS, LOADED),
)  # fmt: skip


QUICK = {
    "passes_not_waited_for",
    "scales_overwritten_too_early",
    "sums_told_before_they_are_there",
    "stage_released_before_its_scale_is_read",
    "init_fence_dropped",
    "proxy_fence_of_scales_dropped",
    "fence_before_the_accumulator_is_released_dropped",
    "wait_for_loads_dropped",
    "wrong_accumulator",
    "scales_not_double_buffered",
    "store_past_the_row",
    "store_before_the_window",
    "memory_freed_early",
    "wrong_scale_id",
}
QUICK_SEEN = {"wrong_accumulator"}
Edit = tuple[str, str]
SAME: dict[str, tuple[str, Edit | None, int | None]] = {
    "the_kernel_itself": ("dense", None, None),
    "the_kernel_of_scales_itself": ("mxfp8", None, None),
    "labels_renamed": ("paged", None, None),
    "a_fence_more": ("dense", (MULTIPLY_TILE, FENCED), None),
    "more_stages": ("dense", None, 2 * STAGES["dense"]),
    "no_more_stages_than_accumulators": ("paged", None, STAGES["paged"] - 1),
    # Math arrives there too, once it waited for the sums, and so for the products.
    "a_stage_released_by_math_alone": ("dense", (COMMIT_STAGE, arrives(COMMIT_STAGE)), None),
    "a_block_released_by_math_alone": ("mxfp8", (COMMIT_BLOCK, arrives(COMMIT_BLOCK)), None),
}
"""Case, edit of the file that multiplies, and stages."""
QUICK_SAME = ("no_more_stages_than_accumulators",)
"""The kernels themselves are hunted in `test_hunts.py` too."""


def launch_of(case: str, patch: pytest.MonkeyPatch, stages: int | None = None) -> Launch:
    """A case, with other stages than the backend would choose: those of `STAGES` by default."""
    empty_row = EMPTY_ROW if case in ("dense", "mxfp8") else -1
    launch = Launch(CASES[case], patch, backend="sm100-emulated", empty_row=empty_row)
    launch.plan = with_stages(launch.plan, stages or STAGES[case])
    return launch


def with_stages(plan: Plan, stages: int) -> Plan:
    elements, heads, dim, logit, _, columns, _ = plan.kernel.arguments
    element = elements.rpartition(":")[2]
    t = sm100_tiles.Tiles(int(heads), int(dim), stages, int(columns), element)
    arguments = (elements, heads, dim, logit, str(stages), columns, str(t.shared_bytes))
    return dataclasses.replace(
        plan,
        kernel=dataclasses.replace(plan.kernel, arguments=arguments),
        shared_bytes=t.shared_bytes,
        parts=sm100_tiles.shared_parts(t),
    )


@pytest.mark.parametrize("case", ["dense", "mxfp8", "paged"])
def test_cases_hold_what_mistakes_need(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launch_of(case, monkeypatch)
    dense = isinstance(launch.case.problem, DenseProblem)
    columns = int(launch.plan.kernel.arguments[5])
    rows, group = columns // 64, 512 // 64
    assert_holds_what_mistakes_need(
        launch,
        monkeypatch,
        stages=STAGES[case],
        tile_rows=sm100_tiles.TILE_ROWS,
        boxes=1 if dense else sm100_tiles.TILE_ROWS // launch.case.tensors["cache"].shape[1],
        block_of=lambda row: row // group * group + row % group // rows if dense else row,
    )


@pytest.mark.parametrize("mutant", with_slow_ones(MUTANTS, QUICK))
def test_a_mistake_is_found_and_named(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch = launch_of(mutant.case, monkeypatch)
    report = assert_found(mutant, launch, tmp_path, range(SEEDS))
    if mutant.name == REPEATED:
        assert_found_again(launch, report, tmp_path)


@pytest.mark.parametrize("mutant", with_slow_ones(MUTANTS, QUICK_SEEN))
def test_a_mistake_is_seen_without_checks_or_not(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_seen_or_not(mutant, launch_of(mutant.case, monkeypatch), tmp_path)


def test_most_mistakes_are_named_and_some_would_not_be_seen() -> None:
    assert_most_are_named(MUTANTS)
    assert len(QUICK) >= 12
    assert QUICK.issubset(mutant.name for mutant in MUTANTS)


def test_a_tensor_unit_that_works_in_order_hides_early_scales(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What Blackwell is said to do, beyond what the ISA promises."""
    mutant = next(m for m in MUTANTS if m.name == "scales_not_double_buffered")
    launch = launch_of(mutant.case, monkeypatch)
    binary = launch.compiled(mutant, tmp_path)
    assert launch.report(binary, "hunt", tensor_pipe="in-order") is None
    assert launch.right()


def same(which: str, patch: pytest.MonkeyPatch, folder: Path) -> tuple[Launch, Binary]:
    """A kernel with a change that is no mistake."""
    case, edit, stages = SAME[which]
    launch = launch_of(case, patch, stages)
    mutant = None if edit is None else Mutant(which, MULTIPLY, *edit)
    binary = launch.compiled(mutant, folder)
    if which == "labels_renamed":
        binary = relabelled(binary)
    return launch, binary


@pytest.mark.parametrize("which", with_slow_ones(SAME, QUICK_SAME))
def test_a_change_that_is_no_mistake_is_not_found(
    which: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hunt_nothing(*same(which, monkeypatch, tmp_path), range(1))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, DEEP_SEEDS, DEEP_STEP))
@pytest.mark.parametrize("which", SAME)
def test_a_change_that_is_no_mistake_is_not_found_in_200_hunts(
    which: str, first: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hunt_nothing(*same(which, monkeypatch, tmp_path), range(first, first + DEEP_STEP))
