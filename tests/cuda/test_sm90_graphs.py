"""Hopper calls in CUDA graphs, with dependent launch, and on streams of several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from graph_tools import dependent_launch, free, refill
from torch import Tensor

import mqa
from mqa.testing import Case, assert_bitwise

pytestmark = pytest.mark.gpu

CAPTURED = [
    "dense fp8 S=50 N=700 H=64 D=128 windows=random",
    "dense fp8 S=300 N=500 H=8 D=64 windows=random M=500 out=bfloat16",
    "dense fp8 S=2 N=2000 H=32 D=32 windows=random weights=bfloat16",
    "dense fp8 S=1 N=2000 H=128 D=64 windows=random out=float16 clean=0",
    "dense fp8 S=40 N=900 H=16 D=128 windows=random clean=0",
]


def logits_of(sm90: Any, case: Case, out: Tensor, cuts: Tensor | None) -> None:
    """The call alone, without a guard: what a graph captures."""
    case.run(backend=sm90.backend.name, out=out, schedule_meta=cuts)


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
        made = mqa.get_mqa_logits_metadata(t["start"], t["end"], problem.N, problem.H)
        for out, cuts in zip(outs, (made, given, None), strict=True):
            logits_of(sm90, first, out, cuts)
    for at, case in enumerate(cases):
        refill(first, case)
        if at == 2:
            given.random_(-(2**31), 2**31 - 1)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(made, sm90.metadata(case))
        eager = sm90.run(case, out=case.new_out())
        sm90.judge(case, eager)
        where = None if problem.clean else sm90.valid(case)
        for out in outs:
            assert_bitwise(out, eager, where=where, replay=case.problem)


def test_a_captured_call_may_allocate_its_result(sm90: Any) -> None:
    case = sm90.case("dense fp8 S=70 N=900 H=64 D=128 windows=random seed=4")
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
        where = None if case.problem.clean else sm90.valid(case)
        for out in outs[1:]:
            assert_bitwise(out, outs[0], where=where, replay=line)


@pytest.mark.parametrize("line", [line for line in CAPTURED if "clean=0" not in line])
def test_dependent_launch_waits_for_what_was_launched_before(sm90: Any, line: str) -> None:
    """Inputs and schedule written just before, the same result and cuts written over and over."""
    cases = [sm90.case(f"{line} seed={seed}") for seed in (2, 6, 10, 14)]
    wants = [sm90.run(case, out=case.new_out()) for case in cases]
    first, shared = sm90.case(f"{line} seed=2"), cases[0].new_out()
    results = []
    with dependent_launch(sm90.device):
        for at in range(24):
            refill(first, cases[at % 4])
            for name in ("start", "end", "w"):  # Once more, by kernels: copies are none.
                first.tensors[name].zero_()
                torch.mul(cases[at % 4].tensors[name], 1, out=first.tensors[name])
            cuts = free(sm90).metadata(first)
            free(sm90).run(first, out=shared, schedule_meta=cuts if at % 3 else None)
            results.append(shared.clone())
    for at, got in enumerate(results):
        assert_bitwise(got, wants[at % 4], replay=cases[at % 4].problem)


def test_threads_with_streams_and_sms_of_their_own_do_not_disturb_each_other(sm90: Any) -> None:
    lines = ("S=40 N=900 H=8 D=64", "S=3 N=4000 H=64 D=128")
    cases = [sm90.case(f"dense fp8 {line} windows=random seed=5") for line in lines]
    wants = [sm90.call(case) for case in cases]
    torch.cuda.synchronize()

    def work(at: int) -> list[Tensor]:
        case, results = cases[at], []
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(50):
                mqa.set_num_sms(1 + 60 * at + turn, sm90.device)
                t, problem = case.tensors, case.problem
                cuts = mqa.get_mqa_logits_metadata(t["start"], t["end"], problem.N, problem.H)
                meta = cuts if turn % 2 else None
                results.append(case.run(backend=sm90.backend.name, schedule_meta=meta))
            torch.cuda.current_stream().synchronize()
        return results

    with sm90.num_sms(mqa.get_num_sms(sm90.device)), ThreadPoolExecutor(2) as pool:
        for want, results in zip(wants, pool.map(work, range(2)), strict=True):
            for got in results:
                assert_bitwise(got, want)
