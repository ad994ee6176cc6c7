"""When Hopper is chosen, what it refuses and why, and what a process compiles and loads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mqa
from mqa.testing import assert_bitwise

pytestmark = pytest.mark.gpu
SetEnv = Callable[[str, str], None]
PAGED = "paged fp8 B=2 next_n=2 H=64 D=64 blocks=9 columns=3"
FIRST = "dense fp8 S=40 N=900 H=64 D=128 windows=random seed=3"

FRESH_PROCESS = """
import json, random, sys

import torch

import mqa
from mqa.cuda import compiler, driver
from mqa.problem import parse
from mqa.testing import assert_bitwise, make_case

backend, line = sys.argv[1:]
case = make_case(parse(line), "cuda")
t, problem = case.tensors, case.problem
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    cuts = mqa.get_mqa_logits_metadata(t["start"], t["end"], problem.N, problem.H)
    captured = case.run(backend=backend, schedule_meta=cuts)
captured.fill_(torch.nan)
cuts.fill_(-1)
graph.replay()
torch.cuda.synchronize()
assert_bitwise(captured, case.run(backend=backend))
assert torch.equal(cuts, mqa.get_mqa_logits_metadata(t["start"], t["end"], problem.N, problem.H))


def counters():
    return compiler.compilations(), driver.loads()


def some_call(H, D, dtype):
    S, N = random.choice((0, 1, 2, 3, 9, 40, 300)), random.randrange(3000)
    q = torch.randn(S, H, D, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(N, D, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(N + 1, device="cuda")[random.choice((0, 1)) :][:N]
    weights = torch.randn(S, H + random.choice((0, 3)), device="cuda")[:, :H]
    bounds = torch.randint(0, N + 1, (S, 2), device="cuda").int()
    window = bounds.amin(1), bounds[:, 1]
    cuts = mqa.get_mqa_logits_metadata(*window, N, H) if random.randrange(2) else None
    out = torch.empty(S, N + 1, dtype=dtype, device="cuda")[:, random.choice((0, 1)) :][:, :N]
    options = {"logits_dtype": dtype, "schedule_meta": cuts}
    if random.randrange(2):
        options["out"] = out
    mqa.fp8_fp4_mqa_logits(q, (k, scale), weights, *window, backend=backend, **options)


random.seed(1)
found = []
for H, D, dtype in ((8, 32, torch.float16), (32, 64, torch.bfloat16), (128, 128, torch.float32)):
    before = counters()
    names = mqa.warmup(H, D, "fp8", logits_dtype=dtype, device="cuda", backend=backend)
    warm = counters()
    for _ in range(167):
        some_call(H, D, dtype)
    torch.cuda.synchronize()
    again = mqa.warmup(H, D, "fp8", logits_dtype=dtype, device="cuda", backend=backend)
    facts = {"names": names, "before": before, "warm": warm, "after": counters(), "again": again}
    found.append(facts)
sys.stdout.write(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fresh_process(sm90: Any) -> subprocess.CompletedProcess[str]:
    """A process whose first call is captured in a graph, and that then warms up for others."""
    command = [sys.executable, "-c", FRESH_PROCESS, sm90.backend.name, FIRST]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_first_call_of_a_process_may_be_captured(fresh_process: Any) -> None:
    assert fresh_process.returncode == 0, fresh_process.stderr[-3000:]


def test_calls_after_a_warmup_compile_and_load_nothing(fresh_process: Any) -> None:
    assert fresh_process.returncode == 0, fresh_process.stderr[-3000:]
    for facts in json.loads(fresh_process.stdout):
        assert facts["names"]
        assert facts["warm"][1] > facts["before"][1], "the warmup loaded nothing"
        assert facts["after"] == facts["warm"]
        assert facts["again"] == facts["names"]


def test_hopper_is_the_default_and_no_fallback_is_needed(sm90: Any, setenv: SetEnv) -> None:
    setenv("MQA_FALLBACK", "error")
    for page_size in (None, 64):
        found = mqa.supports(64, 128, "fp8", page_size=page_size, device=sm90.device)
        assert found.backend == sm90.backend.name
    status = {status.name: status for status in mqa.backends()}[sm90.backend.name]
    assert status.usable
    assert not status.reason
    lines = [f"{FIRST} {facts}" for facts in ("", "M=901 out=bfloat16", "sms=132")]
    lines += [f"{FIRST} weights=bfloat16 clean=0 out=float16", f"{PAGED} P=64 L=99 sms=132"]
    for line in lines:
        case = sm90.case(line)
        meta = case.stale_schedule() if case.problem.sms else None
        by_name = sm90.run(case, schedule_meta=meta)
        by_default = case.run(schedule_meta=meta)
        where = None if case.problem.clean else sm90.valid(case)
        assert_bitwise(by_default, by_name, where=where)


def test_the_environment_can_name_hopper(sm90: Any, setenv: SetEnv) -> None:
    case = sm90.case(FIRST)
    want = sm90.run(case)
    setenv("MQA_BACKEND", sm90.backend.name)
    assert_bitwise(case.run(), want)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("dense fp8 S=3 N=40 H=24 D=64", "H=24"),
        ("dense fp8 S=3 N=40 H=1 D=64", "H=1"),
        ("dense fp8 S=3 N=40 H=64 D=64 q_off=8", r"\bq\b"),
        ("dense fp8 S=3 N=40 H=64 D=64 q_stride=4104", r"\bq\b"),
        ("dense fp8 S=3 N=40 H=64 D=64 kv_off=4", r"\bkv\b"),
        ("dense fp8 S=3 N=40 H=64 D=64 kv_stride=72", r"\bkv\b"),
        (f"{PAGED} P=24 L=70", "P=24"),
        (f"{PAGED} P=64 L=99 q_off=8", r"\bq\b"),
        (f"{PAGED} P=64 L=99 q_stride=20480x4096x64x1", "q has 20480 from one request"),
        (f"{PAGED} P=64 L=99 cache_off=4", r"\bcache\b"),
        (f"{PAGED} P=64 L=99 cache_stride=4360", "pages of cache"),
    ],
)
def test_what_hopper_cannot_do_is_refused_with_a_reason_and_the_portable_backend_does_it(
    sm90: Any, setenv: SetEnv, line: str, reason: str
) -> None:
    setenv("MQA_FALLBACK", "error")
    case = sm90.case(line)
    with pytest.raises(mqa.BackendUnavailableError, match=f"(?m)^ +{sm90.backend.name} .*{reason}"):
        sm90.run(case)
    where = None if case.problem.clean else sm90.valid(case)
    assert_bitwise(case.run(), case.run(backend="portable"), where=where)


@pytest.mark.parametrize("line", ["dense fp8 S=3 N=40 H=64 D=96", f"{PAGED} P=64 L=99"])
def test_what_no_kernel_can_do_is_refused_with_every_reason_and_falls_back(
    sm90: Any, setenv: SetEnv, line: str
) -> None:
    setenv("MQA_FALLBACK", "error")
    case = sm90.case(line.replace("D=64", "D=96"))
    for name in (sm90.backend.name, "portable"):
        with pytest.raises(mqa.BackendUnavailableError, match=f"{name}: .*D=96"):
            case.run()
    setenv("MQA_FALLBACK", "silent")
    where = None if case.problem.clean else sm90.valid(case)
    assert_bitwise(case.run(), case.run(backend="reference"), where=where)


def test_other_kinds_of_call_are_refused_with_a_reason(sm90: Any) -> None:
    for heads, dims, options in (
        (64, 128, {"page_size": 24}),
        (24, 128, {}),
        (64, 96, {}),
        (64, 96, {"page_size": 64}),
    ):
        found = mqa.supports(heads, dims, "fp8", device=sm90.device, **options)
        assert found.reasons[sm90.backend.name]
    for fmt in ("mxfp8", "mxfp4"):
        assert mqa.supports(64, 32, fmt, device=sm90.device).reasons[sm90.backend.name]
    assert mqa.supports(64, 128, "fp8", device="cpu").reasons[sm90.backend.name]


def test_extra_memory_is_small(sm90: Any) -> None:
    for S, N in ((2000, 8192), (1, 65536)):
        case = sm90.case(f"dense fp8 S={S} N={N} H=8 D=32")
        out = case.new_out()
        sm90.run(case, out=out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sm90.run(case, out=out)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= 1 << 20
