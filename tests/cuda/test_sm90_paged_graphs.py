"""Paged Hopper calls in CUDA graphs, with dependent launch, and on streams of several threads."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from graph_tools import dependent_launch, free, refill
from paged_cases import paged_line
from torch import Tensor

import mqa
from mqa.testing import Case, assert_bitwise

pytestmark = pytest.mark.gpu

CAPTURED = [
    paged_line(64, 700, "next_n=1 H=64 D=128 clean=1 lens=random", B=20),
    paged_line(16, 500, "next_n=2 H=64 D=64 out=bfloat16 lens=random", B=9),
    paged_line(8, 900, "next_n=9 H=128 D=32 weights=bfloat16 clean=1 lens=random", B=3),
    paged_line(128, 800, "next_n=1 H=8 D=64 out=float16 clean=1 lens=random varlen=1", B=50),
    paged_line(256, 1500, "next_n=1 H=32 D=128 lens=random lens_rank=1", B=2),
]
INPUTS = ("w", "lens", "table")

FRESH_PROCESS = """
import sys

import torch

import mqa
from mqa.problem import parse
from mqa.testing import assert_bitwise, make_case

backend, line = sys.argv[1:]
case = make_case(parse(line), "cuda")
lens, P = case.tensors["lens"], case.problem.P
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    cuts = mqa.get_paged_mqa_logits_metadata(lens, P, 132)
    captured = case.run(backend=backend, schedule_meta=cuts)
captured.fill_(torch.nan)
cuts.fill_(-1)
graph.replay()
torch.cuda.synchronize()
assert_bitwise(captured, case.run(backend=backend))
assert torch.equal(cuts, mqa.get_paged_mqa_logits_metadata(lens, P, 132))
"""


def test_the_first_call_of_a_process_may_be_captured(sm90: Any) -> None:
    command = [sys.executable, "-c", FRESH_PROCESS, sm90.backend.name, f"{CAPTURED[0]} seed=3"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr[-3000:]


def where_valid(sm90: Any, case: Case) -> Any:
    return None if case.problem.clean else sm90.valid(case)


@pytest.mark.parametrize("line", CAPTURED)
def test_captured_calls_replay_with_other_contents(sm90: Any, line: str) -> None:
    """With a schedule made in the graph, with one that goes stale, and with none."""
    cases = [sm90.case(f"{line} seed={seed}") for seed in (2, 6, 10)]
    first = sm90.case(f"{line} seed=2")
    problem, t = first.problem, first.tensors
    given = sm90.metadata(first)
    outs = [first.new_out() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = mqa.get_paged_mqa_logits_metadata(t["lens"], problem.P, 132, t.get("indices"))
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
        u = case.tensors
        fresh = mqa.get_paged_mqa_logits_metadata(u["lens"], problem.P, 132, u.get("indices"))
        assert torch.equal(made, fresh)
        eager = sm90.run(case, out=case.new_out())
        sm90.judge(case, eager)
        for out in outs:
            assert_bitwise(out, eager, where=where_valid(sm90, case), replay=case.problem)


def test_a_captured_call_may_allocate_its_result(sm90: Any) -> None:
    case = sm90.case(f"{CAPTURED[0]} seed=4")
    want = sm90.call(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.run(backend=sm90.backend.name)
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    assert_bitwise(got, want)


@pytest.mark.parametrize("line", CAPTURED)
def test_dependent_launch_does_not_change_bits(sm90: Any, line: str) -> None:
    case = sm90.case(line)
    outs = [case.new_out() for _ in range(6)]
    cuts = sm90.metadata(case)
    for meta in (None, cuts):
        for out in outs:
            out.fill_(torch.nan)
        sm90.run(case, out=outs[0], schedule_meta=meta)
        with dependent_launch(sm90.device):
            for out in outs[1:]:
                free(sm90).run(case, out=out, schedule_meta=meta)
            again = free(sm90).metadata(case)
        assert torch.equal(again, cuts)
        for out in outs[1:]:
            assert_bitwise(out, outs[0], where=where_valid(sm90, case), replay=line)


@pytest.mark.parametrize("line", [line for line in CAPTURED if "clean=1" in line])
def test_dependent_launch_waits_for_what_was_launched_before(sm90: Any, line: str) -> None:
    """Inputs and schedule written just before, the same result and cuts written over and over."""
    cases = [sm90.case(f"{line} seed={seed}") for seed in (2, 6, 10, 14)]
    wants = [sm90.run(case, out=case.new_out()) for case in cases]
    first, shared = sm90.case(f"{line} seed=2"), cases[0].new_out()
    results = []
    with dependent_launch(sm90.device):
        for at in range(24):
            refill(first, cases[at % 4])
            for name in INPUTS:  # Once more, by kernels: copies are none.
                first.tensors[name].zero_()
                torch.mul(cases[at % 4].tensors[name], 1, out=first.tensors[name])
            cuts = free(sm90).metadata(first)
            free(sm90).run(first, out=shared, schedule_meta=cuts if at % 3 else None)
            results.append(shared.clone())
    for at, got in enumerate(results):
        assert_bitwise(got, wants[at % 4], replay=cases[at % 4].problem)


def test_threads_with_streams_and_sms_of_their_own_do_not_disturb_each_other(sm90: Any) -> None:
    cases = [sm90.case(f"{line} seed=5") for line in (CAPTURED[0], CAPTURED[2])]
    wants = [sm90.call(case) for case in cases]
    torch.cuda.synchronize()

    def work(at: int) -> list[Tensor]:
        case, results = cases[at], []
        lens, P = case.tensors["lens"], case.problem.P
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(50):
                sms = 1 + 60 * at + turn
                mqa.set_num_sms(sms, sm90.device)
                cuts = mqa.get_paged_mqa_logits_metadata(lens, P, sms)
                meta = cuts if turn % 2 else None
                results.append(case.run(backend=sm90.backend.name, schedule_meta=meta))
            torch.cuda.current_stream().synchronize()
        return results

    with sm90.num_sms(mqa.get_num_sms(sm90.device)), ThreadPoolExecutor(2) as pool:
        for want, results in zip(wants, pool.map(work, range(2)), strict=True):
            for got in results:
                assert_bitwise(got, want)
