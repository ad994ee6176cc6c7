"""MX calls on Hopper in CUDA graphs, with dependent launch, and after a warmup."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graph_tools import refill
from mx_cases import FORMATS, mx_line, short_dtype
from torch import Tensor

import mqa
from mqa.problem import PagedProblem
from mqa.testing import Case, assert_bitwise

pytestmark = pytest.mark.gpu
DENSE = (
    "S=50 N=700 H=64 D=128 windows=random",
    "S=2 N=900 H=32 D=64 windows=random weights=bfloat16 M=900",
    "S=40 N=600 H=16 D=128 windows=random clean=0",
)
PAGED = (
    (64, 700, "next_n=1 H=64 D=128 clean=1 lens=random"),
    (16, 500, "next_n=2 H=64 D=64 lens=random"),
    (8, 600, "next_n=9 H=128 D=64 weights=bfloat16 clean=1 lens=random"),
    (128, 500, "next_n=1 H=8 D=64 clean=1 lens=random varlen=1"),
)
CAPTURED = [
    f"{line} regime=exact"
    for format in FORMATS
    for line in (
        *(f"dense {format} {facts}" for facts in DENSE),
        f"dense {format} S=40 N=600 H=8 D=64 out={short_dtype(format, 8, 64)} windows=random",
        *(mx_line(format, P, tokens, facts, B=9) for P, tokens, facts in PAGED),
    )
]

FRESH_PROCESS = """
import json, sys

import torch

import mqa
from mqa.cuda import compiler, driver
from mqa.problem import parse
from mqa.testing import assert_bitwise, make_case

backend, *lines = sys.argv[1:]
cases = [make_case(parse(line), "cuda") for line in lines]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = cases[0].run(backend=backend)
captured.fill_(torch.nan)
graph.replay()
torch.cuda.synchronize()
assert_bitwise(captured, cases[0].run(backend=backend))
found = []
for case in cases[1:]:
    problem = case.problem
    facts = {"page_size": getattr(problem, "P", None), "device": "cuda", "backend": backend}
    names = mqa.warmup(problem.H, problem.D, problem.format, **facts)
    warm = compiler.compilations(), driver.loads()
    case.run(backend=backend)
    found.append({"names": names, "warm": warm, "after": (compiler.compilations(), driver.loads())})
sys.stdout.write(json.dumps(found))
"""


def test_a_first_call_may_be_captured_and_calls_after_a_warmup_load_nothing(sm90: Any) -> None:
    lines = [line for line in CAPTURED if "out=" not in line][::2]
    command = [sys.executable, "-c", FRESH_PROCESS, sm90.backend.name, *lines]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    for facts in json.loads(found.stdout):
        assert facts["names"]
        assert facts["after"] == facts["warm"]


def fresh_metadata(case: Case) -> Tensor:
    t, problem = case.tensors, case.problem
    if isinstance(problem, PagedProblem):
        return mqa.get_paged_mqa_logits_metadata(t["lens"], problem.P, 132, t.get("indices"))
    return mqa.get_mqa_logits_metadata(t["start"], t["end"], problem.N, problem.H)


@pytest.mark.parametrize("line", CAPTURED)
def test_captured_calls_replay_with_other_contents(sm90: Any, line: str) -> None:
    """With a schedule made in the graph, with one that goes stale, and with none."""
    cases = [sm90.case(f"{line} seed={seed}") for seed in (2, 6, 10)]
    first = sm90.case(f"{line} seed=2")
    given = sm90.metadata(first)
    outs = [first.new_out() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = fresh_metadata(first)
        for out, cuts in zip(outs, (made, given, None), strict=True):
            first.run(backend=sm90.backend.name, out=out, schedule_meta=cuts)
    for at, case in enumerate(cases):
        refill(first, case)
        if at == 2:
            given.random_(-(2**31), 2**31 - 1)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(made, fresh_metadata(case))
        eager = sm90.run(case, out=case.new_out())
        sm90.judge(case, eager)
        where = None if case.problem.clean else sm90.valid(case)
        for out in outs:
            assert_bitwise(out, eager, where=where, replay=case.problem)


@pytest.fixture
def dependent_launch(sm90: Any) -> Iterator[None]:
    mqa.set_pdl(True, sm90.device)
    yield
    mqa.set_pdl(False, sm90.device)


@pytest.mark.parametrize("line", [line for line in CAPTURED if "clean=0" not in line])
def test_dependent_launch_waits_for_what_was_launched_before(
    sm90: Any, line: str, dependent_launch: None
) -> None:
    """Inputs written just before, by kernels; the same result written over and over."""
    line = line if "dense" in line or "clean=1" in line else f"{line} clean=1"
    cases = [sm90.case(f"{line} seed={seed}") for seed in (2, 6)]
    mqa.set_pdl(False, sm90.device)
    wants = [sm90.run(case, out=case.new_out()) for case in cases]
    mqa.set_pdl(True, sm90.device)
    first, shared = sm90.case(f"{line} seed=2"), cases[0].new_out()
    results = []
    for at in range(12):
        refill(first, cases[at % 2])
        for name in ("q_scale", "w"):  # Once more, by kernels: copies are none.
            first.tensors[name].zero_()
            torch.mul(cases[at % 2].tensors[name], 1, out=first.tensors[name])
        cuts = fresh_metadata(first) if at % 3 else None
        # Without the guard, which would wait for what was launched before.
        first.run(backend=sm90.backend.name, out=shared, schedule_meta=cuts)
        results.append(shared.clone())
    for at, got in enumerate(results):
        assert_bitwise(got, wants[at % 2], replay=cases[at % 2].problem)
