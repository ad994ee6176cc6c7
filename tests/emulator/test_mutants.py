"""Mistakes in a kernel are found, by name, and what is none is not."""

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

from mqa.cuda import sm90, sm90_tiles
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Plan
from mqa.emulator import Kind
from mqa.problem import DenseProblem

pytestmark = MARKS

CASES = {
    "dense": "dense fp8 S=41 N=620 H=64 D=128 regime=exact",
    "narrow": "dense fp8 S=13 N=150 H=64 D=64 regime=exact",
    "mx": "dense mxfp4 S=41 N=300 H=64 D=64 regime=exact",
    "paged": "paged fp8 B=8 next_n=1 H=64 D=128 P=64 blocks=200 columns=20 L=1250 regime=exact "
    "lens=random seed=1",
}
REPEATED = "stage_released_before_the_product_read_it"
KERNEL, MATH = "sm90/score/kernel.cuh", "sm90/score/math.cuh"
TILE, QUERIES = "sm90/score/tile.cuh", "sm90/score/queries.cuh"
PRODUCTS = "    ptx::wgmma_wait_group_0(dots);\n    release();\n"
FULL_WAIT = "ptx::mbarrier_wait_parity(k_full + stage * 8, parity);"
Q_WAIT = (
    "      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_full[blocks.stage()]),\n"
    "                                blocks.parity());\n"
)
INIT_FENCE = "  ptx::fence_mbarrier_init();\n"
INIT_AGAIN = "  ptx::mbarrier_init(ptx::shared_address(&shared.k_full[0]), k_arrivals);\n"
FENCE, MEET = (
    "    ptx::fence_proxy_async_shared();\n",
    "    ptx::bar_sync(kMathBarrier, kMathThreads);\n",
)
STORED = "store(i, round_to<Logit>(fmaf(totals[i], k_scale, 0.0f)));"

MUTANTS = (
    Mutant("wait_dropped", MATH, FULL_WAIT, ";",
           Kind.RACE, "k_scale[0]", "const float k_scale = *k_scale_at;"),
    Mutant("wait_on_the_wrong_parity", MATH, FULL_WAIT, FULL_WAIT.replace("ty);", "ty ^ 1);"),
           Kind.UNWRITTEN, "k_scale[0]", STORED),
    Mutant("stage_released_before_the_product_read_it", TILE, PRODUCTS,
           "    release();\n    ptx::wgmma_wait_group_0(dots);\n",
           Kind.RACE, "k[0]", LOAD_K, seen=False),
    Mutant("too_few_bytes_expected", DENSE, "Tiling::kKBytes + count / 4 * 16);",
           "Tiling::kKBytes - 16 + count / 4 * 16);",
           Kind.DEADLOCK, "mbarrier k_full[0]", FULL_WAIT),
    Mutant("proxy_fence_dropped", "common/logits.cuh",
           "  ptx::fence_proxy_async_shared();\n  __syncwarp();", "  __syncwarp();",
           Kind.PROXY_FENCE, "fill (", "ptx::cp_async_bulk_store(", seen=False),
    Mutant("proxy_fence_of_queries_dropped", QUERIES, FENCE + MEET, MEET,
           Kind.PROXY_FENCE, "q (", "ptx::wgmma_k16_bf16(dots", seen=False, case="mx"),
    Mutant("wgmma_wait_dropped", TILE, PRODUCTS, "    release();\n",
           Kind.PENDING_REGISTER, "belongs to wgmma", "ptx::max_nan(x, 0.0f)", seen=False),
    Mutant("wrong_swizzle", "ptx/wgmma.cuh", "kRowBytes == 64 ? 2 :", "kRowBytes == 64 ? 3 :",
           case="narrow"),
    Mutant("stages_off_by_one", MATH, "typename Tiling::StageRing;", "Ring<Tiling::kStages - 1>;",
           Kind.DEADLOCK, "mbarrier k_full[0]", "shared.k_full[ring.stage]), ring.parity);"),
    Mutant("barrier_initialised_again", KERNEL, INIT_FENCE, INIT_FENCE + INIT_AGAIN,
           Kind.BARRIER, "mbarrier k_full[0]", INIT_AGAIN.strip(), seen=False),
    Mutant("arrivals_too_few", KERNEL, "Tiling::kReaderWarps * ptx::kWarpArrivals);",
           "Tiling::kReaderWarps * ptx::kWarpArrivals - 1);",
           Kind.RACE, "k_scale[0]", "shared.k_scale[stage]), args.k_scale + token", seen=False),
    Mutant("stages_swapped", DENSE, "(ptx::shared_address(shared.k[stage]) +",
           "(ptx::shared_address(shared.k[stage ^ 1]) +",
           Kind.RACE, "k[0]", "ptx::wgmma_k32_e4m3(dots"),
    Mutant("last_split_missed", DENSE, "done < Tiling::padded(task.length);",
           "done + kStageRows < Tiling::padded(task.length);",
           Kind.DEADLOCK, "mbarrier k_full[1]", FULL_WAIT),
    Mutant("last_stage_of_a_request_missed", PAGES,
           "if (Tiling::kAligned > 1 && done + row >= task.length) {",
           "if (done + row + kStageRows >= task.length) {",
           Kind.UNWRITTEN, "comes from k[", STORED, case="paged"),
    Mutant("store_past_the_row", "sm90/score/epilogue.cuh",
           "(token - row.start) < row.length)", "(token - row.start) <= row.length)",
           Kind.OUT_OF_BOUNDS, "of out", "ptx::st_global(row.origin"),
    Mutant("init_fence_dropped", KERNEL, INIT_FENCE, "",
           Kind.BARRIER, "mbarrier q_full[0]", "shared.q[ring.stage()]) + i * kBytes", seen=False),
    Mutant("queries_not_waited_for", MATH, Q_WAIT, "",
           Kind.UNWRITTEN, "piece[0]", "if (block.groups == 0) break;"),
    Mutant("empty_stage_not_waited_for", DENSE, EMPTY_WAIT, "",
           Kind.RACE, "k[0]", LOAD_K),
    Mutant("range_not_waited_for", FEED, RANGE_WAIT, "",
           Kind.RACE, "cuts", "range[threadIdx.x % kWarpSize] = shared.cuts", seen=False),
    Mutant("threads_do_not_meet", QUERIES, FENCE + MEET, FENCE,
           Kind.PROXY_FENCE, "q + ", "ptx::wgmma_k16_bf16(dots", case="mx"),
    Mutant("elected_by_half_a_warp", PAGES, "if (ptx::elect_one())",
           "if (threadIdx.x % kWarpSize < 16 && ptx::elect_one())",
           Kind.DEADLOCK, "threads 0xffff0000 of its warp", "16 && ptx::elect_one()", case="paged"),
)  # fmt: skip
SELDOM = {
    "wait_on_the_wrong_parity",
    "proxy_fence_of_queries_dropped",
    "stages_off_by_one",
    "arrivals_too_few",
    "stages_swapped",
    "last_stage_of_a_request_missed",
    "queries_not_waited_for",
    "empty_stage_not_waited_for",
    "range_not_waited_for",
}
"""Those that `make test` leaves out."""
QUICK = ("too_few_bytes_expected",)
SAME = ("the_kernel_itself", "labels_renamed", "a_fence_more", "a_stage_more")
QUICK_SAME = ("a_fence_more",)
"""The kernel itself is hunted in `test_hunts.py` too."""
FENCED = "    float dots[kColumns / 2];\n    ptx::wgmma_fence();\n"


def launch_of(case: str, patch: pytest.MonkeyPatch) -> Launch:
    return Launch(CASES[case], patch, empty_row=-1 if case == "paged" else EMPTY_ROW)


def test_cases_hold_what_mistakes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in ("dense", "paged"):
        launch = launch_of(case, monkeypatch)
        arguments = launch.plan.kernel.arguments
        stages, rows = int(arguments[3]), int(arguments[4])
        dense = isinstance(launch.case.problem, DenseProblem)
        # Tiles of q begin at the row that stands last; two make a block of more than half its rows.
        block = 512 // 64 if dense else 1
        assert_holds_what_mistakes_need(
            launch,
            monkeypatch,
            stages=stages,
            tile_rows=sm90_tiles.TILE_ROWS,
            boxes=1 if dense else rows // launch.case.tensors["cache"].shape[1],
            block_of=lambda row, block=block: row // block,
        )


@pytest.mark.parametrize(
    "mutant", with_slow_ones(MUTANTS, {mutant.name for mutant in MUTANTS} - SELDOM)
)
def test_a_mistake_is_found_and_named(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch = launch_of(mutant.case, monkeypatch)
    report = assert_found(mutant, launch, tmp_path, range(SEEDS))
    if mutant.name == REPEATED:
        assert_found_again(launch, report, tmp_path)


@pytest.mark.parametrize("mutant", with_slow_ones(MUTANTS, QUICK))
def test_a_mistake_is_seen_without_checks_or_not(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_seen_or_not(mutant, launch_of(mutant.case, monkeypatch), tmp_path)


def test_most_mistakes_are_named_and_some_would_not_be_seen() -> None:
    assert_most_are_named(MUTANTS)
    assert {mutant.name for mutant in MUTANTS} > SELDOM
    assert len(MUTANTS) - len(SELDOM) >= 12


def same(which: str, patch: pytest.MonkeyPatch, folder: Path) -> tuple[Launch, Binary]:
    """A kernel with a change that is no mistake."""
    launch = launch_of("dense", patch)
    if which == "a_fence_more":
        after = FENCED.replace(
            "    ptx::wgmma_fence();\n", "    ptx::fence_proxy_async_shared();\n"
        )
        fenced = Mutant(which, TILE, FENCED, after + "    ptx::wgmma_fence();\n")
        return launch, launch.compiled(fenced, folder)
    if which == "a_stage_more":
        launch = Launch(CASES["dense"].replace("D=128", "D=32"), patch, empty_row=EMPTY_ROW)
        launch.plan = with_a_stage_more(launch.plan)
    binary = launch.compiled()
    if which == "labels_renamed":
        binary = relabelled(binary)
    return launch, binary


def with_a_stage_more(plan: Plan) -> Plan:
    tiles = sm90.tiles(64, 32)
    more = dataclasses.replace(tiles, stages=tiles.stages + 1)
    return dataclasses.replace(
        plan,
        kernel=sm90.dense_kernel(more, "float32"),
        shared_bytes=more.shared_bytes,
        parts=sm90_tiles.shared_parts(more),
    )


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
