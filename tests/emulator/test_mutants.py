"""Mistakes in a kernel are found, and what is none is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mutants import Mutant, compile_mutant

from mqa.cuda import compiler
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Plan
from mqa.emulator import EmulationError, Kind, Report, backend, executor
from mqa.problem import parse
from mqa.testing import Case, assert_logits, make_case

pytestmark = pytest.mark.skipif(
    compiler.unavailable() is not None, reason="NVRTC is missing, which compiles the kernels"
)

DENSE = "dense fp8 S=17 N=1250 H=64 D=128 sms=2 regime=exact"
"""10 tiles a block for 4 stages, the last one partial; the second CTA begins within a block."""
PAGED = "paged fp8 B=7 next_n=1 H=64 D=128 P=64 blocks=250 columns=36 L=2250 sms=2 regime=exact"
SEEDS = 20
FEED, MATH = "sm90/score/dense.cuh", "sm90/score/math.cuh"
KERNEL, TILE = "sm90/score/kernel.cuh", "sm90/score/tile.cuh"
WAIT = "    ptx::wgmma_wait_group_0(dots);\n    release();\n    float sums"
IF_FIRST = "if (i % kTiles == 0) "
FULL_WAIT = "ptx::mbarrier_wait_parity(k_full + stage * 8, parity);"
EMPTY_WAIT = (
    "      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_empty[ring.stage]), "
    "ring.parity ^ 1);\n"
)
Q_WAIT = (
    "      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_full[blocks.stage]), "
    "blocks.parity);\n      const Piece"
)
INIT_FENCE = "  ptx::fence_mbarrier_init();\n"
INIT_AGAIN = "  ptx::mbarrier_init(ptx::shared_address(&shared.k_full[0]), k_arrivals);\n"

MUTANTS = (
    Mutant("wait_dropped", MATH, IF_FIRST + FULL_WAIT, "", (Kind.RACE,), "tile of kv"),
    Mutant(
        "wait_on_the_wrong_parity",
        MATH,
        FULL_WAIT,
        FULL_WAIT.replace("parity);", "parity ^ 1);"),
        (Kind.RACE, Kind.DEADLOCK)),
    Mutant(
        "stage_released_before_the_product_read_it",
        TILE,
        WAIT,
        "    release();\n    ptx::wgmma_wait_group_0(dots);\n    float sums",
        (Kind.RACE,),
        "tile of kv",
    ),
    Mutant(
        "too_few_bytes_expected",
        FEED,
        "Tiling::kKBytes + count / 4 * 16);",
        "Tiling::kKBytes - 16 + count / 4 * 16);",
        (Kind.DEADLOCK,),
        "-16 bytes to come"),
    Mutant(
        "proxy_fence_dropped",
        "common/logits.cuh",
        "  ptx::fence_proxy_async_shared();\n  __syncwarp();",
        "  __syncwarp();",
        (Kind.PROXY_FENCE,),
        "cp.async.bulk.global",
    ),
    Mutant(
        "wgmma_wait_dropped",
        TILE,
        WAIT,
        "    release();\n    float sums",
        (Kind.PENDING_REGISTER,),
        "belongs to wgmma"),
    Mutant("stages_off_by_one", MATH, "typename Tiling::StageRing;", "Ring<Tiling::kStages - 1>;",
           (Kind.DEADLOCK, Kind.RACE)),
    Mutant("barrier_initialised_again", KERNEL, INIT_FENCE, INIT_FENCE + INIT_AGAIN,
           (Kind.BARRIER,), "is initialised again"),
    Mutant("arrivals_too_few", KERNEL, "Tiling::kReaderWarps * ptx::kWarpArrivals);",
           "Tiling::kReaderWarps * ptx::kWarpArrivals - 1);", (Kind.RACE,), "tile of kv"),
    Mutant("stages_swapped", FEED, "(ptx::shared_address(shared.k[stage]) +",
           "(ptx::shared_address(shared.k[stage ^ 1]) +", (Kind.RACE,), "tile of kv"),
    Mutant("last_split_missed", FEED, "done < Tiling::padded(task.length);",
           "done + kStageRows < Tiling::padded(task.length);", (Kind.DEADLOCK,),
           "1 of 1 arrivals"),
    Mutant("store_past_the_row", "sm90/score/epilogue.cuh", "(token - row.start) < row.length)",
           "(token - row.start) <= row.length)", (Kind.OUT_OF_BOUNDS,), "of out"),
    Mutant("init_fence_dropped", KERNEL, INIT_FENCE, "", (Kind.BARRIER,), "fence.mbarrier_init"),
    Mutant("queries_not_waited_for", MATH, Q_WAIT, "      const Piece",
           (Kind.RACE, Kind.OUT_OF_BOUNDS, Kind.DEADLOCK)),
    Mutant("empty_stage_not_waited_for", FEED, EMPTY_WAIT, "",
           (Kind.RACE, Kind.DEADLOCK, Kind.BARRIER)),
    Mutant("elected_by_half_a_warp", "sm90/score/paged.cuh", "if (ptx::elect_one())",
           "if (threadIdx.x % kWarpSize < 16 && ptx::elect_one())", (Kind.DEADLOCK,),
           "threads 0xffff0000 of its warp"),
)  # fmt: skip
QUICK = ("stage_released_before_the_product_read_it", "proxy_fence_dropped", "store_past_the_row")
SAME = (
    Mutant("a_fence_more", TILE, "    float dots[kColumns / 2];\n    ptx::wgmma_fence();\n#pragma "
           "unroll\n    for (int step = 0; step < kDim / 32",
           "    float dots[kColumns / 2];\n    ptx::fence_proxy_async_shared();\n    "
           "ptx::wgmma_fence();\n#pragma unroll\n    for (int step = 0; step < kDim / 32"),
    Mutant("another_form", MATH, "stages = (block.length + kStageRows - 1) / kStageRows;",
           "stages = (kStageRows - 1 + block.length) / kStageRows;"),
)  # fmt: skip


class Launch:
    """What the backend would launch for a case."""

    def __init__(self, line: str, patch: pytest.MonkeyPatch) -> None:
        self.case: Case = make_case(parse(line))
        found: list[tuple[Plan, dict[str, Any]]] = []
        patch.setattr(backend, "execute", lambda plan, tensors: found.append((plan, tensors)))
        self.case.run(backend="sm90-emulated")
        ((self.plan, self.tensors),) = found

    def report(self, binary: Binary, schedule: str, seed: int) -> Report | None:
        self.tensors["out"].fill_(torch.nan)
        try:
            executor.run_plan(
                binary.ptx, binary.symbol, self.plan, self.tensors, schedule=schedule, seed=seed
            )
        except EmulationError as error:
            return error.report
        return None

    def right(self) -> bool:
        try:
            assert_logits(self.case, self.tensors["out"])
        except AssertionError:
            return False
        return True


def launched(mutant: Mutant, patch: pytest.MonkeyPatch, folder: Path) -> tuple[Launch, Binary]:
    launch = Launch(PAGED if "paged" in mutant.file else DENSE, patch)
    return launch, compile_mutant(mutant, launch.plan.kernel, folder)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, id=m.name, marks=() if m.name in QUICK else pytest.mark.slow)
        for m in MUTANTS
    ],
)
def test_a_hunt_finds_the_mistake(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch, binary = launched(mutant, monkeypatch, tmp_path)
    reports = (launch.report(binary, "hunt", seed) for seed in range(SEEDS))
    report = next(report for report in reports if report is not None)
    assert report.kind in mutant.kinds
    assert mutant.says in str(report)
    again = launch.report(binary, "hunt", report.seed)
    assert again == report


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SAME, ids=lambda mutant: mutant.name)
def test_a_change_that_is_no_mistake_is_not_found(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch, binary = launched(mutant, monkeypatch, tmp_path)
    for seed in range(SEEDS):
        assert launch.report(binary, "hunt", seed) is None
        assert launch.right()


@pytest.mark.slow
def test_a_wrong_swizzle_gives_wrong_logits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    edit = ("kRowBytes == 128 ? 1 :", "kRowBytes == 128 ? 2 :")
    mutant = Mutant("wrong_swizzle", "ptx/wgmma.cuh", *edit)
    launch, binary = launched(mutant, monkeypatch, tmp_path)
    assert launch.report(binary, "hunt", 0) is None
    assert not launch.right()
