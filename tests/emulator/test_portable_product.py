"""A kernel of mma.sync, ldmatrix and cp.async, compiled for each GPU, multiplies; mistakes in it
are found, by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutants import MARKS, SEEDS, Edit, edited, with_slow_ones
from test_mma import halves

from mqa.cuda import compiler
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Kernel
from mqa.emulator import EmulationError, Kind, Report, run
from mqa.emulator.scheduler import SCHEDULES
from mqa.testing.accumulators import AMPERE_BF16, HOPPER_MMA_BF16

pytestmark = MARKS
Array = np.ndarray[Any, Any]
SOURCE = Path(__file__).resolve().parent / "portable" / "product.cuh"
TILE, THREADS, WAIT_FOR = 64, 128, 1
ROWS, COLUMNS, DEPTH = 70, 66, 136
"""More than a tile of each, and five steps of K, the last one of 8 elements."""


def compiled(source: Path = SOURCE, arch: str = "sm_80", wait_for: int = WAIT_FOR) -> Binary:
    return compiler.compile_kernel(
        Kernel(str(source), "mqa::test::product", (str(wait_for),)), arch
    )


@dataclass
class Case:
    """Matrices of values that bfloat16 has."""

    a: Array
    b: Array

    def launch(self, binary: Binary, **how: Any) -> Array:
        """The product as the kernel has it; NaN where it stored nothing."""
        out = np.full((len(self.a), len(self.b)), np.nan, np.float32)
        grid = (-(-len(self.b) // TILE), -(-len(self.a) // TILE))
        sizes = (len(self.a), len(self.b), self.a.shape[1])
        args = [halves(self.a, "bf16"), halves(self.b, "bf16"), out, *sizes]
        run(binary.ptx, binary.symbol, grid, THREADS, args, **how)
        return out

    def report(self, binary: Binary, **how: Any) -> tuple[Report | None, Array | None]:
        try:
            return None, self.launch(binary, **how)
        except EmulationError as error:
            return error.report, None


def make_case(seed: int = 0, depth: int = DEPTH) -> Case:
    random = np.random.default_rng(seed)
    return Case(*(random.integers(-4, 5, (rows, depth)).astype(float) for rows in (ROWS, COLUMNS)))


@pytest.fixture(scope="module")
def ampere() -> Binary:
    return compiled()


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_it_multiplies_on_every_gpu(arch: str) -> None:
    case, binary = make_case(), compiled(arch=arch)
    assert f".target {arch}\n" in binary.ptx
    assert np.array_equal(case.launch(binary, schedule="hunt", seed=1), case.a @ case.b.T)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_multiplies_under_every_schedule(ampere: Binary, schedule: str) -> None:
    for seed in range(4):
        case = make_case(seed, 8 + 56 * seed)
        got = case.launch(ampere, schedule=schedule, seed=seed, checks=True)
        assert np.array_equal(got, case.a @ case.b.T)


@pytest.mark.parametrize(("arch", "model"), [("sm_80", AMPERE_BF16), ("sm_90", HOPPER_MMA_BF16)])
def test_its_sums_are_those_of_the_model(arch: str, model: Any) -> None:
    """Whatever products were formed together."""
    random = np.random.default_rng(3)
    parts = [random.normal(size=(rows, 72)).astype(np.float32) for rows in (20, 30)]
    a, b = ((x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for x in parts)
    case = Case(a.astype(np.float64), b.astype(np.float64))
    padded = [np.pad(x, ((0, 0), (0, 24))) for x in (case.a, case.b)]
    want = model.dots(*padded)
    assert not np.array_equal(want, case.a @ case.b.T)
    assert np.array_equal(case.launch(compiled(arch=arch)), want.astype(np.float32))


@dataclass(frozen=True)
class Mutant(Edit):
    says: str = ""
    wait_for: int = WAIT_FOR
    depth: int = DEPTH
    seen: bool = True
    """Whether the product is wrong where nothing is checked and nothing late."""


WAIT = '    asm volatile("cp.async.wait_group %0;" ::"n"(kWaitFor) : "memory");\n'
SYNC, COPY = "    __syncthreads();\n", "    copy_step(step + kStages - 1);\n"
COMMIT = '    asm volatile("cp.async.commit_group;" ::: "memory");\n'
COPY_B = "      copy_part(tile.b, b, column, columns, step * kDepth, depth);\n    }\n"
OF_A = "shared_address(tile.a + place_of(row, half * 2 + lane / 16))"
MUTANTS = (
    Mutant("wait_dropped", WAIT, "", Kind.RACE, "cp.async of 16 bytes", seen=False),
    Mutant("wait_one_group_short", "", "", Kind.RACE, "cp.async of 16 bytes", 2, seen=False),
    Mutant("barrier_dropped", SYNC, "", Kind.RACE, "cp.async of 16 bytes"),
    Mutant("copied_before_the_barrier", SYNC + COPY, COPY + SYNC, Kind.RACE, "ldmatrix"),
    Mutant("stage_reused_while_it_is_read", "copy_step(step + kStages - 1)",
           "copy_step(step + kStages)", Kind.RACE, "cp.async of 16 bytes"),
    Mutant("nothing_committed_past_the_last_step", COPY_B + COMMIT,
           COPY_B.replace("    }\n", f"  {COMMIT}    }}\n"), Kind.RACE, "cp.async", seen=False),
    Mutant("a_step_copied_that_nobody_waits_for", "if (step < steps)", "if (step <= steps)",
           Kind.UNFINISHED, "cp.async of 16 bytes", seen=False),
    Mutant("rows_past_the_end_copied", "first + row < rows && ", "", Kind.OUT_OF_BOUNDS,
           "cp.async", seen=True),
    Mutant("what_does_not_exist_left_as_it_was", "  const int bytes = exists ? 16 : 0;\n",
           "  if (!exists) return;\n  const int bytes = 16;\n", Kind.UNWRITTEN,
           "loaded by ldmatrix", depth=72),
    Mutant("row_address_off_its_chunk", OF_A, f"{OF_A} + 8", Kind.MISALIGNED, "of 16 bytes"),
    Mutant("row_address_past_the_stages", OF_A, f"{OF_A} + 64 * 1024", Kind.OUT_OF_BOUNDS,
           "of 16 bytes"),
    Mutant("rows_of_the_wrong_lanes", "lane / 16 * 8 + lane % 8", "lane / 16 * 4 + lane % 8"),
    Mutant("row_address_without_the_permutation", OF_A,
           "shared_address(tile.a + (row * kChunks + half * 2 + lane / 16) * 8)"),
    Mutant("halves_of_b_exchanged", "b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]",
           "b[j / 2][j % 2 * 2 + 1], b[j / 2][j % 2 * 2]"),
    Mutant("a_thread_that_does_not_multiply", "const Tile& tile) {",
           "const Tile& tile) {\n  if (threadIdx.x % 32 == 31) return;", Kind.DEADLOCK, "ldmatrix"),
)  # fmt: skip


@pytest.mark.parametrize("mutant", with_slow_ones(MUTANTS, {str(one) for one in MUTANTS[::2]}))
def test_a_mistake_is_found_by_name(mutant: Mutant, tmp_path: Path) -> None:
    path = edited(SOURCE, tmp_path, mutant.before, mutant.after) if mutant.before else SOURCE
    case, binary = make_case(0, mutant.depth), compiled(path, wait_for=mutant.wait_for)
    right = case.a @ case.b.T
    if mutant.kind is None:
        report, got = case.report(binary, schedule="hunt", seed=1)
        assert report is None
        assert not np.array_equal(got, right)
        return
    found = [case.report(binary, schedule="hunt", seed=seed)[0] for seed in range(SEEDS // 5)]
    assert {report.kind for report in found if report is not None} == {mutant.kind}
    assert mutant.says in str(found[0])
    if not mutant.seen:
        assert np.array_equal(case.launch(binary, checks=False), right)


def test_the_kernel_without_a_mistake_gives_no_report(ampere: Binary) -> None:
    for seed in range(SEEDS // 2):
        case = make_case(seed)
        got = case.launch(ampere, schedule="hunt" if seed % 2 else "random", seed=seed)
        assert np.array_equal(got, case.a @ case.b.T)
