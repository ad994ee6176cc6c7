"""A backend's kernels compiled for sm_100f go through the emulator as those of Hopper do."""

from __future__ import annotations

import pytest
import torch

from mqa.cuda import cache, compiler
from mqa.cuda.metadata import METADATA
from mqa.cuda.sm90 import SM90
from mqa.emulator import Kind, scheduled
from mqa.emulator.backend import Emulated
from mqa.emulator.device import B200
from mqa.emulator.parser import parse
from mqa.emulator.program import Program
from mqa.emulator.scheduler import SCHEDULES
from mqa.problem import parse as parse_problem
from mqa.reference import schedule

pytestmark = pytest.mark.skipif(compiler.unavailable() is not None, reason="NVRTC is missing")
ARCH = "sm_100f"
BLACKWELL = Emulated(SM90, ARCH)
"""Hopper's schedule kernels use nothing of Hopper alone, and are what there is to compile."""


def lens_and_cuts() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    lens = torch.randint(0, 3000, (40, 2), generator=draw, dtype=torch.int32)
    return lens, torch.full((149, 2), -7, dtype=torch.int32)


@pytest.mark.parametrize("how", SCHEDULES)
def test_metadata_compiled_for_blackwell_is_the_reference(how: str) -> None:
    lens, out = lens_and_cuts()
    with scheduled(how, seed=5, ignore=[Kind.PROXY_FENCE]) as launches:
        BLACKWELL.paged_metadata(lens, None, out)
    assert torch.equal(out, schedule.paged_metadata(lens, 148, None))
    assert len(launches) == 1


def test_dense_metadata_compiled_for_blackwell_is_the_reference() -> None:
    start = torch.arange(37, dtype=torch.int32)
    end = start * 50 + 3
    out = torch.full((6, 2), -7, dtype=torch.int32)
    with scheduled("hunt", seed=1, checks=True):
        BLACKWELL.dense_metadata(start, end, 2000, 64, out)
    assert torch.equal(out, schedule.dense_metadata(start, end, 2000, 64, 5))


def test_what_it_runs_is_what_was_compiled_for_its_architecture() -> None:
    binary = cache.get(METADATA[True], ARCH)
    module = parse(binary.ptx)
    assert module.target == ARCH
    program = Program(module, module.entries[binary.symbol])
    assert program.device is B200


def test_kernels_of_hopper_alone_are_an_error_for_blackwell() -> None:
    problem = parse_problem("dense fp8 S=2 N=70 H=8 D=32")
    with pytest.raises(compiler.CompileError, match="wgmma"):
        BLACKWELL.warmup(problem, torch.device("cpu"))


def test_what_cannot_be_left_out_is_an_error() -> None:
    with pytest.raises(ValueError, match="ignore has RACE"), scheduled(ignore=[Kind.RACE]):
        pass
