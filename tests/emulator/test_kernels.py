"""The kernels of this library, emulated, give what the reference and the oracle say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mqa
from mqa.backends import BACKENDS, choose
from mqa.cuda import cache, compiler
from mqa.cuda.metadata import dense_metadata_plan
from mqa.cuda.plan import Plan
from mqa.cuda.sm90 import OWN_COLUMNS, kernels
from mqa.emulator import executor, scheduled
from mqa.emulator.backend import ARCH, SM90_EMULATED
from mqa.emulator.parser import parse as parse_ptx
from mqa.emulator.program import Program
from mqa.emulator.scheduler import SCHEDULES
from mqa.problem import parse
from mqa.reference import schedule
from mqa.testing import accumulators, assert_logits, make_case

pytestmark = [
    pytest.mark.skipif(
        compiler.unavailable() is not None, reason="NVRTC is missing, which compiles the kernels"
    ),
    pytest.mark.no_cover,
]

EXACT = (
    "dense fp8 S=9 N=300 H=64 D=128 regime=exact windows=random sms=2",
    "dense fp8 S=5 N=70 H=8 D=64 M=75 out=float16 weights=bfloat16 regime=exact windows=random",
    "dense fp8 S=3 N=131 H=128 D=32 out=bfloat16 regime=exact kv_scale_off=4",
    "paged fp8 B=3 next_n=2 H=8 D=128 P=64 blocks=9 columns=2 L=128 clean=1 regime=exact",
    "paged fp8 B=4 next_n=1 H=64 D=64 P=16 blocks=30 columns=9 L=140 out=bfloat16 regime=exact",
    "dense mxfp8 S=5 N=140 H=16 D=64 regime=exact windows=random",
    "dense mxfp4 S=5 N=140 H=32 D=128 out=bfloat16 clean=0 regime=exact",
    "paged mxfp8 B=2 next_n=4 H=16 D=64 P=16 blocks=11 columns=4 L=60 lens_rank=1 regime=exact",
    "paged mxfp4 B=5 next_n=1 H=32 D=128 P=32 blocks=40 columns=3 L=96 varlen=1 regime=exact",
    "dense bf16 S=5 N=140 H=64 D=128 regime=exact windows=random",
)
BOUNDED = (
    "dense fp8 S=5 N=150 H=64 D=128 windows=random",
    "paged fp8 B=2 next_n=2 H=32 D=64 P=64 blocks=6 columns=3 L=180",
    "dense mxfp4 S=3 N=70 H=16 D=64",
    "dense bf16 S=3 N=70 H=64 D=128",
    "paged bf16 B=2 next_n=2 H=32 D=32 P=64 blocks=6 columns=3 L=180 seed=3",
)


def text_of(plan: Plan) -> tuple[str, str]:
    binary = cache.get(plan.kernel, ARCH)
    return binary.ptx, binary.symbol


def execute(plan: Plan, tensors: dict[str, Tensor | None], **how: Any) -> None:
    executor.run_plan(*text_of(plan), plan, tensors, **how)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.slow if number % 3 else ())
        for number, line in enumerate(EXACT)
    ],
)
def test_exact_cases_are_bitwise_the_oracle(line: str) -> None:
    case = make_case(parse(line))
    assert_logits(case, case.run(backend="sm90-emulated"))


@pytest.mark.parametrize("line", BOUNDED)
def test_bounded_cases_are_within_the_head_sum_of_the_accumulator_model(line: str) -> None:
    case = make_case(parse(line))
    got = case.run(backend="sm90-emulated")
    model = accumulators.named(SM90_EMULATED.accumulator(case.problem.format))
    assert_logits(case, got, model)


@pytest.mark.parametrize("how", SCHEDULES[1:])
def test_every_schedule_gives_the_same_bits(how: str) -> None:
    case = make_case(parse("dense fp8 S=20 N=400 H=64 D=128 seed=2 windows=random sms=2"))
    want = case.run(backend="sm90-emulated")
    with scheduled(how, seed=3) as launches:
        got = case.run(backend="sm90-emulated")
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    assert len(launches) == 1
    assert launches[0].instructions[0] > 0


@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.parametrize("rows", [1, 37])
def test_dense_metadata_is_the_reference(rows: int, how: str) -> None:
    heads, tokens, parts = 64, 5000, 5
    draw = torch.Generator().manual_seed(1)
    start = torch.randint(0, 3000, (rows,), generator=draw, dtype=torch.int32)
    end = start + torch.randint(-10, 2500, (rows,), generator=draw, dtype=torch.int32)
    out = torch.full((parts + 1, 2), -7, dtype=torch.int32)
    plan = dense_metadata_plan(rows, tokens, OWN_COLUMNS // heads, parts, 1, 1, 2)
    execute(plan, {"start": start, "end": end, "out": out}, schedule=how, seed=rows)
    assert torch.equal(out, schedule.dense_metadata(start, end, tokens, heads, parts))


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("varlen", [False, True])
def test_paged_metadata_is_the_reference(next_n: int, varlen: bool) -> None:
    requests, parts = 40, 7
    if varlen and next_n > 1:
        requests, next_n = 90, 1
    draw = torch.Generator().manual_seed(2)
    lens = torch.randint(0, 3000, (requests, next_n), generator=draw, dtype=torch.int32)
    indices = torch.randint(0, 20, (requests,), generator=draw, dtype=torch.int32).sort()[0]
    out = torch.full((parts + 1, 2), -7, dtype=torch.int32)
    given = lens if next_n > 1 or not varlen else lens[:, 0]
    SM90_EMULATED.paged_metadata(given, indices if varlen else None, out)
    want = schedule.paged_metadata(lens, parts, indices if varlen else None)
    assert torch.equal(out, want)


def test_the_backend_makes_dense_schedules() -> None:
    start, end = torch.zeros(20, dtype=torch.int32), torch.arange(0, 4000, 200, dtype=torch.int32)
    out = torch.empty((4, 2), dtype=torch.int32)
    SM90_EMULATED.dense_metadata(start, end, 4000, 64, out)
    assert torch.equal(out, schedule.dense_metadata(start, end, 4000, 64, 3))


def test_warmup_names_the_kernels_of_a_problem() -> None:
    problem = parse("paged fp8 B=1 next_n=1 H=8 D=64 P=64 blocks=1 columns=1 L=9")
    names = SM90_EMULATED.warmup(problem, torch.device("cpu"))
    assert any("paged_fp8<8, 64" in name for name in names)
    assert any("PagedMetadata" in name for name in names)


def test_the_backend_is_there_by_name_only() -> None:
    assert SM90_EMULATED in BACKENDS
    problem = parse("dense fp8 S=5 N=70 H=8 D=64")
    assert choose(problem, torch.device("cpu")).name == "reference"
    with pytest.raises(mqa.BackendUnavailableError, match="D=96 is not one of"):
        choose(parse("dense fp8 S=5 N=70 H=8 D=96"), torch.device("cpu"), "sm90-emulated")


def test_without_tokens_rows_are_cleaned() -> None:
    case = make_case(parse("dense fp8 S=3 N=0 H=8 D=64 M=9"))
    assert (case.run(backend="sm90-emulated") == -torch.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", kernels(), ids=str)
def test_every_instruction_of_every_kernel_is_bound(kernel: Any) -> None:
    binary = cache.get(kernel, ARCH)
    module = parse_ptx(binary.ptx)
    assert Program(module, module.entries[binary.symbol]).runs
