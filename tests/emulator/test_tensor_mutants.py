"""A small kernel of Blackwell is right under every schedule, and mistakes put into it are found."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx_kernels import Array
from tensor_kernels import placed
from test_tcgen05 import tile

from mqa.cuda import compiler
from mqa.emulator import EmulationError, Kind, run
from mqa.emulator.scheduler import SCHEDULES
from mqa.testing._codes import E4M3

pytestmark = pytest.mark.skipif(
    compiler.unavailable() is not None, reason="NVRTC is missing, which compiles the kernel"
)

SOURCE = (Path(__file__).resolve().parent / "tensor_pipeline.cu").read_text()
ROWS, COLUMNS, DEPTH, TILES = 128, 64, 128, 4
SEEDS, DEEP_SEEDS = 20, 200


@functools.cache
def compiled(source: str, arch: str = "sm_100f") -> str:
    from cuda.bindings import nvrtc

    def value(answer: tuple[Any, ...]) -> Any:
        assert int(answer[0]) == 0, (answer, source)
        return answer[1] if len(answer) > 1 else None

    program = value(nvrtc.nvrtcCreateProgram(source.encode(), b"pipeline.cu", 0, [], []))
    options = [f"-arch={arch}".encode(), b"-lineinfo"]
    value(nvrtc.nvrtcCompileProgram(program, len(options), options))
    text = bytearray(value(nvrtc.nvrtcGetPTXSize(program)))
    value(nvrtc.nvrtcGetPTX(program, text))
    value(nvrtc.nvrtcDestroyProgram(program))
    return text.rstrip(b"\0").decode()


def operand(codes: Array, scales: Array) -> Array:
    """Rows as they lie in shared memory: steps of 32 bytes, then scales."""
    steps = [placed(codes[:, k : k + 32]) for k in range(0, DEPTH, 32)]
    return np.concatenate([*steps, tile(scales)])


@functools.cache
def problem() -> tuple[Array, Array, Array]:
    """Bytes of A and of B, and the result; no sum is rounded."""
    random = np.random.default_rng(3)
    few = np.array([x for x in range(256) if abs(E4M3[x]) <= 4 and E4M3[x] % 0.5 == 0], np.uint8)
    a, b = random.choice(few, (TILES, ROWS, DEPTH)), random.choice(few, (COLUMNS, DEPTH))
    scales_a = random.integers(125, 130, (TILES, ROWS, 4)).astype(np.uint8)
    scales_b = random.integers(125, 130, (COLUMNS, 4)).astype(np.uint8)
    tiles = [operand(x, s) for x, s in zip(a, scales_a, strict=True)]

    def values(codes: Array, scales: Array) -> Array:
        return E4M3[codes] * np.repeat(2.0 ** (scales.astype(float) - 127), 32, axis=-1)

    sums = values(a, scales_a) @ values(b, scales_b).T
    return np.concatenate(tiles), operand(b, scales_b), np.maximum(sums, 0).sum(axis=-1)


def score(source: str, schedule: str, seed: int, **how: Any) -> Array:
    a, b, _ = problem()
    out = np.zeros((TILES, ROWS), np.float32)
    args = [out, a, b, TILES]
    run(compiled(source), "score", 1, 192, args, schedule=schedule, seed=seed, **how)
    return out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipe", ["isa", "in-order"])
def test_the_kernel_is_right_under_every_schedule(schedule: str, pipe: Any) -> None:
    for seed in range(2):
        got = score(SOURCE, schedule, seed, checks=True, tensor_pipe=pipe)
        assert (got == problem()[2]).all()


@pytest.mark.parametrize(
    "seeds",
    [range(SEEDS), pytest.param(range(SEEDS, DEEP_SEEDS), marks=pytest.mark.slow)],
    ids=["quick", "deep"],
)
def test_nothing_is_found_in_the_kernel(seeds: range) -> None:
    for seed in seeds:
        assert (score(SOURCE, "hunt", seed) == problem()[2]).all()


@dataclass(frozen=True)
class Mutant:
    name: str
    before: str
    after: str
    kind: Kind | None
    """Of the report; None: a wrong result alone tells."""
    said: str = ""


MUTANTS = [
    Mutant(
        "no wait for loads",
        'asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");',
        "",
        Kind.PENDING_REGISTER,
        "belongs to tcgen05.ld",
    ),
    Mutant(
        "no fence before sums are given back",
        "before_sync();  // of sums_empty",
        "",
        Kind.TENSOR_FENCE,
        "no tcgen05.fence::before_thread_sync came there",
    ),
    Mutant(
        "no fence after sums were given back",
        "after_sync();  // of sums_empty",
        "",
        Kind.TENSOR_FENCE,
        "no tcgen05.fence::after_thread_sync came",
    ),
    Mutant(
        "no fence after sums came",
        "after_sync();  // of sums_full",
        "",
        Kind.TENSOR_FENCE,
        "no tcgen05.fence::after_thread_sync came",
    ),
    Mutant(
        "no wait for sums",
        "wait(&s.sums_full[stage], t / 2 & 1);",
        "",
        Kind.RACE,
        "of tensor memory of CTA 0",
    ),
    Mutant(
        "no wait until sums were loaded",
        "wait(&s.sums_empty[stage], (t / 2 + 1) & 1);",
        "",
        Kind.RACE,
        "of tensor memory of CTA 0",
    ),
    Mutant(
        "commit to a barrier of the other stage",
        "commit(&s.sums_full[stage]);",
        "commit(&s.sums_full[0]);",
        Kind.DEADLOCK,
        "mbarrier",
    ),
    Mutant(
        "stage released before the commit",
        "commit(&s.empty[stage]);",
        "arrive(&s.empty[stage]);",
        Kind.RACE,
        "of shared memory",
    ),
    Mutant(
        "half the columns in the instruction",
        "kColumns >> 3 << 17",
        "kColumns >> 4 << 17",
        Kind.UNWRITTEN,
        "of tensor memory of CTA 0",
    ),
    Mutant("always the first scales", "| id << 29 | id << 4", "", None),
    Mutant(
        "scales of one buffer",
        "kScalesOfA + 4 * stage",
        "kScalesOfA",
        Kind.RACE,
        "columns 384-387 of tensor memory",
    ),
    Mutant("a stride too long", "256ull >> 4 << 32", "272ull >> 4 << 32", None),
    Mutant(
        "the next quarter of the lanes",
        "threadIdx.x / 32 % 4;",
        "(threadIdx.x / 32 + 1) % 4;",
        Kind.TENSOR_MEMORY,
        "and reaches",
    ),
    Mutant(
        "the first product adds to what is there",
        "memory + kScalesOfB, k, k > 0);",
        "memory + kScalesOfB, k, 1);",
        Kind.UNWRITTEN,
        "of tensor memory of CTA 0",
    ),
    Mutant(
        "freed before all warps are done",
        "  __syncthreads();\n  if (warp == 1) free",
        "  if (warp == 1) free",
        Kind.RACE,
        "freed",
    ),
    Mutant(
        "freed by a warp that does not wait for the others",
        "  __syncthreads();\n  if (warp == 1) free",
        "  if (warp == 2) free",
        Kind.RACE,
        "freed",
    ),
    Mutant(
        "never freed", "if (warp == 1) free_memory(memory);", "", Kind.TENSOR_MEMORY, "did not free"
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mistake_is_found(mutant: Mutant) -> None:
    """As named in one of the first seeds, and by a report or a wrong result in each."""
    assert SOURCE.count(mutant.before) == 1
    source = SOURCE.replace(mutant.before, mutant.after)
    found: list[tuple[Kind | None, str]] = []
    for seed in range(4):
        try:
            got = score(source, "hunt", seed)
        except EmulationError as error:
            found.append((error.report.kind, str(error)))
        else:
            assert not (got == problem()[2]).all()
            found.append((None, ""))
    assert any(kind is mutant.kind and mutant.said in message for kind, message in found), found
