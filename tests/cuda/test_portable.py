"""The portable backend on a GPU: as it is compiled for it, and as the code of compute capability
8.0 that its driver assembles, which is what an A100 would run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_tools import dependent_launch, free, refill
from portable_cases import (
    FORMATS,
    EVERY,
    LINES,
    Runner,
    bad_block_ids_read_as_zeros,
    infinities_do_what_the_definition_says,
    nan_elsewhere_does_not_matter,
    nan_reaches_what_uses_it,
    own_schedule,
    plateau_is_plus_zero,
    same_bits_in_every_company,
    windows_of_every_kind,
)
from schedule_contents import CONTENTS

import mqa
from mqa import config
from mqa.cli.machine import usable_cores
from mqa.cuda import cache, targets
from mqa.cuda.operands import HEAD_DIMS
from mqa.cuda.portable import PORTABLE
from mqa.problem import parse
from mqa.reference import schedule
from mqa.testing import assert_bitwise, guards_intact, read_corpus

pytestmark = pytest.mark.gpu
CORPUS = Path(__file__).parents[1] / "corpus" / "ci.txt"
CAPTURED = (
    "dense fp8 S=50 N=700 H=24 D=128 windows=random",
    "dense mxfp4 S=300 N=500 H=5 D=64 windows=random M=500 out=bfloat16",
    "dense bf16 S=3 N=2000 H=130 D=32 windows=random weights=bfloat16 clean=0",
    "paged fp8 B=9 next_n=2 H=64 D=128 P=48 blocks=200 columns=20 L=900 lens=random clean=1",
    "paged mxfp8 B=40 next_n=1 H=24 D=64 P=3 blocks=999 columns=50 L=140 varlen=1 lens=random",
)


@pytest.fixture(scope="module", params=["", "compute_80"], ids=["own", "compute_80"])
def portable(request: Any, harness_of: Any) -> Iterator[Any]:
    """A harness of the backend, with what its kernels are compiled for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MQA_PORTABLE_ARCH", request.param)
        config.reload()
        harness = harness_of("portable")
        compile_at_once([*EVERY, *LINES, *CAPTURED], targets.portable(harness.device))
        yield harness
    config.reload()


@pytest.fixture
def runner(portable: Any) -> Runner:
    return Runner("portable", portable.device, portable.guard)


def compile_at_once(lines: list[str], arch: str) -> None:
    """What the tests would compile one by one: on all cores, of which each worker of xdist has one.
    Workers begin at different kernels, and find in the cache what others have compiled."""
    kernels = list(dict.fromkeys(k for line in lines for k in PORTABLE.kernels_of(parse(line))))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = len(kernels) * worker // workers
    with ThreadPoolExecutor(max(usable_cores() // workers, 1)) as pool:
        list(pool.map(lambda kernel: cache.get(kernel, arch), kernels[first:] + kernels[:first]))


@pytest.mark.parametrize("regime", ["exact", "bounded"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_choice_is_right(portable: Any, format: str, regime: str) -> None:
    for line in EVERY:
        if line.split()[1] == format:
            portable.check(f"{line} regime={regime}")


@pytest.mark.parametrize("line", LINES)
def test_sizes_strides_and_addresses_of_every_kind(portable: Any, line: str) -> None:
    for regime, clean in itertools.product(("exact", "bounded"), (0, 1)):
        given = line.replace(" clean=1", "")
        portable.check(f"{given} regime={regime} clean={clean}")


def test_the_corpus(portable: Any) -> None:
    problems = [problem for problem in read_corpus(CORPUS) if portable.accepts(problem)]
    assert len(problems) > 50
    compile_at_once([str(problem) for problem in problems], targets.portable(portable.device))
    for problem in problems:
        portable.check(problem)


@pytest.mark.parametrize("H", [24, 64])
@pytest.mark.parametrize("S", [1, 129])
def test_sizes_off_every_tile(portable: Any, S: int, H: int) -> None:
    for N in (1, 2, 3, 63, 65, 127, 511, 513, 4100):
        portable.check(f"dense fp8 S={S} N={N} H={H} D=128 windows=full regime=exact")


@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("format", FORMATS)
def test_nan_reaches_what_uses_it(runner: Runner, format: str, D: int) -> None:
    nan_reaches_what_uses_it(runner, format, D)


@pytest.mark.parametrize("P", [48, 64])
@pytest.mark.parametrize("format", FORMATS)
def test_nan_elsewhere_does_not_matter(runner: Runner, format: str, P: int) -> None:
    nan_elsewhere_does_not_matter(runner, format, P)


@pytest.mark.parametrize("P", [48, 64])
@pytest.mark.parametrize("format", FORMATS)
def test_bad_block_ids_read_as_zeros(runner: Runner, format: str, P: int) -> None:
    bad_block_ids_read_as_zeros(runner, format, P)


@pytest.mark.parametrize("H", [5, 24, 130])
def test_infinities_do_what_the_definition_says(runner: Runner, H: int) -> None:
    infinities_do_what_the_definition_says(runner, H)


@pytest.mark.parametrize("format", FORMATS)
def test_the_zero_plateau_is_plus_zero(runner: Runner, format: str) -> None:
    plateau_is_plus_zero(runner, format)


@pytest.mark.parametrize("H", [5, 24, 130])
def test_windows(runner: Runner, H: int) -> None:
    windows_of_every_kind(runner, H)


@pytest.mark.parametrize("H", [5, 24, 130])
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_in_every_company(runner: Runner, format: str, H: int) -> None:
    same_bits_in_every_company(runner, format, H)


@pytest.mark.parametrize("line", CAPTURED)
def test_twenty_launches_give_the_same_bits(portable: Any, line: str) -> None:
    case = portable.case(line)
    want = portable.run(case, out=case.new_out())
    where = None if case.problem.clean else portable.valid(case)
    for sms in range(1, 200, 10):
        with portable.num_sms(sms):
            assert_bitwise(portable.run(case, out=case.new_out()), want, where=where)


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("line", CAPTURED)
def test_contents_of_a_schedule_do_not_change_bits(portable: Any, line: str, contents: str) -> None:
    case = portable.case(line)
    want = portable.run(case, out=case.new_out())
    where = None if case.problem.clean else portable.valid(case)
    for parts in (1, 67, 132, 300):
        fresh = own_schedule(case, parts, portable.guard).cpu()
        cuts = CONTENTS[contents](fresh).to(portable.device)
        out = case.new_out()
        portable.run(case, out=out, schedule_meta=cuts)
        assert_bitwise(out, want, where=where, replay=f"{line} {contents} {parts}")
        assert guards_intact(out)


@pytest.mark.parametrize("H", [1, 2, 24, 64, 129, 1000])
def test_dense_schedules_are_those_of_the_definition(portable: Any, H: int) -> None:
    for rows, keys in ((1, 300), (37, 5000), (5000, 20000), (70000, 100)):
        draw = torch.Generator().manual_seed(rows)
        start, end = torch.randint(-9, keys + 9, (2, rows), generator=draw, dtype=torch.int32)
        for low in (start, end):
            out = torch.full((133, 2), -7, dtype=torch.int32, device=portable.device)
            on_device = low.to(portable.device), end.to(portable.device)
            with portable.guard():
                PORTABLE.dense_metadata(*on_device, keys, H, out)
            assert torch.equal(out.cpu(), schedule.dense_metadata(low, end, keys, H, 132))


@pytest.mark.parametrize("next_n", [0, 1, 2, 9])
def test_paged_schedules_are_those_of_the_definition(portable: Any, next_n: int) -> None:
    """0: runs of equal indices."""
    for requests in (1, 90, 4000, 33000):
        draw = torch.Generator().manual_seed(requests)
        lens = torch.randint(-5, 70000, (requests, max(next_n, 1)), generator=draw).int()
        indices = torch.randint(0, requests, (requests,), generator=draw).int().sort()[0]
        given = None if next_n else indices
        out = torch.full((133, 2), -7, dtype=torch.int32, device=portable.device)
        on_device = [None if x is None else x.to(portable.device) for x in (lens, given)]
        with portable.guard():
            PORTABLE.paged_metadata(*on_device, out)
        assert torch.equal(out.cpu(), schedule.paged_metadata(lens, 132, given))


@pytest.mark.parametrize("line", CAPTURED)
def test_captured_calls_replay_with_other_contents(portable: Any, line: str) -> None:
    cases = [portable.case(f"{line} seed={seed}") for seed in (2, 6, 10)]
    first = portable.case(f"{line} seed=2")
    stale = own_schedule(first, 132, portable.guard)
    outs = [first.new_out() for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out, cuts in zip(outs, (stale, None), strict=True):
            first.run(backend="portable", out=out, schedule_meta=cuts)
    for case in cases:
        refill(first, case)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for out in outs:
            portable.judge(case, out)
        stale.random_(-(2**31), 2**31 - 1)


@pytest.mark.parametrize("line", CAPTURED)
def test_dependent_launch_waits_for_what_was_launched_before(portable: Any, line: str) -> None:
    """Code for compute capability 8.0 cannot, and is not launched so that it would have to."""
    cases = [portable.case(f"{line} seed={seed}") for seed in (2, 6, 10, 14)]
    wants = [portable.run(case, out=case.new_out()) for case in cases]
    first, shared, results = portable.case(f"{line} seed=2"), cases[0].new_out(), []
    with dependent_launch(portable.device):
        for at in range(24):
            refill(first, cases[at % 4])
            for name in ("w", "end", "lens"):  # Once more, by kernels: copies are none.
                if name in first.tensors:
                    first.tensors[name].zero_()
                    torch.mul(cases[at % 4].tensors[name], 1, out=first.tensors[name])
            cuts = own_schedule(first, 132, free(portable).guard)
            free(portable).run(first, out=shared, schedule_meta=cuts if at % 3 else None)
            results.append(shared.clone())
    where = None if cases[0].problem.clean else portable.valid(cases[0])
    for at, got in enumerate(results):
        if where is None:
            assert_bitwise(got, wants[at % 4], replay=cases[at % 4].problem)
        else:
            portable.judge(cases[at % 4], got)


def test_offsets_past_2_to_the_31_are_right(portable: Any) -> None:
    """Of k in bytes and of the result in entries: all dots are H * D, scales tell tokens apart."""
    S, N, H, D = 9, 2**28 + 77, 5, 32
    ones = torch.full((N, D), 0x38, dtype=torch.uint8, device=portable.device)
    k, q = ones.view(torch.float8_e4m3fn), ones[: S * H].view(S, H, D).view(torch.float8_e4m3fn)
    token = torch.arange(N, device=portable.device)
    scale = (token % 4093 + 1).float()
    start = torch.arange(S, device=portable.device, dtype=torch.int32) * 3
    end = N - start
    weights = torch.ones(S, H, device=portable.device)
    with portable.guard():
        got = mqa.fp8_fp4_mqa_logits(q, (k, scale), weights, start, end, backend="portable")
    assert got.stride(0) * S > 2**31
    for row in range(S):
        inside = (token >= 3 * row) & (token < N - 3 * row)
        assert torch.equal(got[row], torch.where(inside, scale * H * D, -torch.inf))


def test_pages_past_2_to_the_31_bytes_are_right(portable: Any) -> None:
    blocks, P, H, D = 260000, 64, 5, 128
    cache = torch.full((blocks, P, 1, D + 4), 0x38, dtype=torch.uint8, device=portable.device)
    flat = cache.view(blocks, -1)[:, P * D :].view(torch.float32)
    flat.copy_((torch.arange(blocks, device=portable.device) % 4093 + 1).float()[:, None])
    numbers = (0, blocks - 1, 130000, 254200, 7, blocks - 2)
    table = torch.tensor([numbers], dtype=torch.int32, device=portable.device)
    q = cache.view(-1)[: H * D].view(1, 1, H, D).view(torch.float8_e4m3fn).clone()
    lens = torch.tensor([[6 * P - 3]], dtype=torch.int32, device=portable.device)
    weights = torch.ones(1, H, device=portable.device)
    with portable.guard():
        got = mqa.fp8_fp4_paged_mqa_logits(
            q, cache, weights, lens, table, None, 6 * P, clean_logits=True, backend="portable"
        )
    scales = torch.tensor(numbers).repeat_interleave(P) % 4093 + 1
    assert torch.equal(got[0, : 6 * P - 3].cpu(), (scales * H * D).float()[: 6 * P - 3])
    assert got[0, 6 * P - 3 :].eq(-torch.inf).all()
