"""The reference on CUDA tensors: same values, no host reads, graphs, cuts instead of errors."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import mqa
from mqa.problem import DenseProblem, PagedProblem, Problem, parse
from mqa.reference import schedule
from mqa.testing import Case, assert_bitwise, assert_logits, guards_intact, make_case, read_corpus
from mqa.testing.strategies import dense_problems, paged_problems

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CORPUS = Path(__file__).parent / "corpus"
SetEnv = Callable[[str, str], None]
Guard = Callable[[], contextlib.AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def _reference(setenv: SetEnv) -> None:
    setenv("MQA_BACKEND", "reference")


def run(case: Case, guard: Guard, **options: Any) -> Tensor:
    options = {"schedule_meta": case.stale_schedule() if case.problem.sms else None} | options
    with guard():
        return case.run(**options)


def check(problem: Problem, guard: Guard) -> None:
    case = make_case(problem, CUDA)
    out = case.new_out()
    run(case, guard, out=out)
    assert_logits(case, out)
    assert guards_intact(out)


@pytest.mark.parametrize("problem", read_corpus(CORPUS / "all.txt"), ids=str)
def test_corpus_agrees_with_the_oracle(problem: Problem, no_host_reads: Guard) -> None:
    check(problem, no_host_reads)


@settings(max_examples=150)
@given(problem=dense_problems())
def test_drawn_dense_problems_agree(problem: DenseProblem, no_host_reads: Guard) -> None:
    check(problem, no_host_reads)


@settings(max_examples=150)
@given(problem=paged_problems())
def test_drawn_paged_problems_agree(problem: PagedProblem, no_host_reads: Guard) -> None:
    check(problem, no_host_reads)


@settings(max_examples=100)
@given(problem=dense_problems(max_rows=300, max_keys=2000, layouts=False))
def test_drawn_problems_of_several_blocks_agree(
    problem: DenseProblem, no_host_reads: Guard
) -> None:
    check(problem, no_host_reads)


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("H", [1, 3, 64])
def test_a_row_has_the_same_bits_however_it_is_scored(fmt: str, H: int) -> None:
    """Row and window ranges, compressed, paged at any page size and next_n."""
    line = f"dense {fmt} S=64 N=1500 H={H} D=64 windows=full seed=3"
    case = make_case(parse(line), CUDA)
    t = case.tensors
    scale = t.get("q_scale")

    def dense(rows: slice = slice(None), low: int = 0, high: int = 1500, M: int = 0) -> Tensor:
        count = t["w"][rows].shape[0]
        window = (torch.full((count,), n, dtype=torch.int32, device=CUDA) for n in (low, high))
        q = (t["q"][rows], None if scale is None else scale[rows])
        return mqa.fp8_fp4_mqa_logits(
            q, (t["kv"], t["kv_scale"]), t["w"][rows], *window, max_seqlen_k=M
        )

    whole = dense()
    for rows in (slice(0, 1), slice(3, 4), slice(5, 20), slice(63, 64)):
        assert_bitwise(dense(rows), whole[rows], replay=line)
    for low, high in ((0, 1), (255, 700), (1400, 1500)):
        assert_bitwise(dense(low=low, high=high)[:, low:high], whole[:, low:high], replay=line)
        part = dense(low=low, high=high, M=800)
        assert_bitwise(part[:, : high - low], whole[:, low:high], replay=line)
        assert (part[:, high - low :] == -torch.inf).all()
    for P, next_n in ((1, 1), (64, 4), (7, 64)):
        paged = paged_call(case, P, next_n)
        assert_bitwise(paged, whole, replay=f"{line} P={P} next_n={next_n}")
    for _ in range(20):
        assert_bitwise(dense(), whole)


def paged_call(case: Case, P: int, next_n: int) -> Tensor:
    """A dense case with full windows, its KV tokens in pages."""
    t, problem = case.tensors, case.problem
    assert isinstance(problem, DenseProblem)
    N, blocks, stored = problem.N, -(-problem.N // P), t["kv"].shape[1]
    values = torch.zeros(blocks * P, stored, dtype=torch.uint8, device=CUDA)
    scale = torch.zeros(blocks * P, dtype=t["kv_scale"].dtype, device=CUDA)
    values[:N], scale[:N] = t["kv"].view(torch.uint8), t["kv_scale"]
    element = torch.uint8 if problem.format == "mxfp4" else torch.float8_e4m3fn
    cache = mqa.formats.pack_kv_cache(
        values.view(blocks, P, stored).view(element), scale.view(blocks, P)
    )
    B = problem.S // next_n
    q_scale = t["q_scale"].view(B, next_n, -1) if "q_scale" in t else None
    return mqa.fp8_fp4_paged_mqa_logits(
        (t["q"].view(B, next_n, *t["q"].shape[1:]), q_scale),
        cache,
        t["w"],
        torch.full((B, next_n), N, dtype=torch.int32, device=CUDA),
        torch.arange(blocks, dtype=torch.int32, device=CUDA).expand(B, -1),
        None,
        N,
    )


SWITCHES: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "tf32": (
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "float64": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "default device": (
        lambda: torch.set_default_device("cpu"),
        lambda: torch.set_default_device(None),
    ),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_of_torch_do_not_change_bits(switch: str) -> None:
    on, off = SWITCHES[switch]
    for fmt in ("fp8", "mxfp8"):
        case = make_case(parse(f"dense {fmt} S=64 N=1500 H=64 D=128 windows=random seed=3"), CUDA)
        want = case.run()
        on()
        try:
            got = case.run()
        finally:
            off()
        assert_bitwise(got, want)
    with torch.autocast("cuda", dtype=torch.float16):
        assert_bitwise(case.run(), want)


CAPTURED = [
    "dense fp8 S=70 N=900 H=64 D=128 windows=random",
    "dense mxfp8 S=70 N=900 H=8 D=64 windows=random M=900 out=bfloat16",
    "dense mxfp4 S=3 N=900 H=8 D=64 windows=random weights=bfloat16",
    "paged fp8 B=9 next_n=2 H=64 D=128 P=64 blocks=200 columns=9 L=570 clean=1",
    "paged mxfp8 B=9 next_n=1 H=8 D=64 P=16 blocks=400 columns=40 L=640 varlen=1 clean=1",
    "paged mxfp4 B=9 next_n=2 H=8 D=64 P=16 blocks=800 columns=40 L=640 lens_rank=1 clean=1",
]


def replayed(line: str, seed: int) -> str:
    return f"{line} seed={seed}" + (" lens=random" if line.startswith("paged") else "")


@pytest.mark.parametrize("line", CAPTURED)
def test_captured_calls_replay_with_other_contents(line: str) -> None:
    cases = [make_case(parse(replayed(line, seed)), CUDA) for seed in (2, 6, 10)]
    first = cases[0]
    t = first.tensors

    def everything() -> tuple[Tensor, Tensor]:
        if "start" in t:
            cuts = mqa.get_mqa_logits_metadata(t["start"], t["end"], 900, 64)
        else:
            cuts = mqa.get_paged_mqa_logits_metadata(t["lens"], 64, 132, t.get("indices"))
        return cuts, first.run(schedule_meta=cuts)

    torch.cuda.current_blas_handle()  # torch can't make it during a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuts, logits = everything()
    for case in cases:
        for name, tensor in case.tensors.items():
            t[name].copy_(tensor)
        logits.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_logits(case, logits)
        eager_cuts, eager = everything()
        assert torch.equal(cuts, eager_cuts)
        assert_bitwise(logits, eager)


def test_formats_can_be_captured() -> None:
    x = torch.randn(8, 16, 128, device=CUDA)

    def everything() -> list[Tensor]:
        f = mqa.formats
        fp8, mxfp8, mxfp4 = f.quantize_fp8(x), f.quantize_mxfp8(x), f.quantize_mxfp4(x)
        cache = f.pack_kv_cache(*fp8)
        back = [f.dequantize_fp8(*fp8), f.dequantize_mxfp8(*mxfp8), f.dequantize_mxfp4(*mxfp4)]
        unpacked = f.dequantize_fp8(*f.unpack_kv_cache(cache, "fp8"))
        return [*back, cache.float().flatten(0, 1).flatten(1), unpacked]

    everything()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = everything()
    x.copy_(torch.randn_like(x) * 3)
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(replayed, everything(), strict=True):
        assert torch.equal(got, want)


def test_metadata_is_that_of_the_cpu(no_host_reads: Guard) -> None:
    generator = torch.Generator().manual_seed(1)
    for batch, next_n in ((0, 1), (1, 1), (257, 3), (32768, 1), (12896, 4)):
        lens = torch.randint(-3, 9000, (batch, next_n), generator=generator).int()
        indices = torch.randint(0, 3, (batch,), generator=generator).int()
        for runs in (None, indices) if next_n == 1 else (None,):
            on_gpu = [None if x is None else x.to(CUDA) for x in (lens, runs)]
            with no_host_reads():
                cuts = mqa.get_paged_mqa_logits_metadata(on_gpu[0], 64, 132, on_gpu[1])
            assert torch.equal(cuts.cpu(), schedule.paged_metadata(lens, 132, runs))
    for rows in (0, 1, 4099):
        start, end = torch.randint(-9, 5000, (2, rows), generator=generator).int()
        cuts = schedule.dense_metadata(start.to(CUDA), end.to(CUDA), 4500, 64, 132)
        assert torch.equal(cuts.cpu(), schedule.dense_metadata(start, end, 4500, 64, 132))


def cut_case(guard: Guard, lens: list[list[int]], table: list[list[int]], L: int) -> Tensor:
    case = make_case(
        parse("paged fp8 B=2 next_n=2 H=4 D=32 P=8 blocks=9 columns=3 L=24 clean=1"), CUDA
    )
    kwargs = case.kwargs | {"schedule_meta": None, "max_context_len": L}
    kwargs["context_lens"] = torch.tensor(lens, dtype=torch.int32, device=CUDA)
    kwargs["block_table"] = torch.tensor(table, dtype=torch.int32, device=CUDA)
    with guard():
        return mqa.fp8_fp4_paged_mqa_logits(**kwargs)


def test_lens_are_cut_and_bad_blocks_read_as_zeros(no_host_reads: Guard) -> None:
    table = [[0, 1, 2], [3, 4, 5]]
    right = cut_case(no_host_reads, [[24, 20], [0, 8]], table, 24)
    assert_bitwise(cut_case(no_host_reads, [[99, 20], [-7, 8]], table, 24), right)
    assert_bitwise(cut_case(no_host_reads, [[24, 20], [0, 8]], table, 20), right[:, :20])
    assert_bitwise(cut_case(no_host_reads, [[24, 20], [0, 8]], table, 40)[:, :24], right)
    assert (cut_case(no_host_reads, [[99, 99], [99, 99]], table, 40)[:, 24:] == -torch.inf).all()
    for bad in (-1, 9, 2**31 - 1, -(2**31)):
        got = cut_case(no_host_reads, [[24, 20], [0, 8]], [[0, bad, 2], [3, bad, bad]], 24)
        wanted = right.clone()
        wanted[:2, 8:16] = 0
        assert_bitwise(got, wanted)


def test_windows_are_cut_at_max_seqlen_k(no_host_reads: Guard) -> None:
    case = make_case(parse("dense fp8 S=9 N=300 H=4 D=32 windows=full"), CUDA)
    with no_host_reads():
        got = mqa.fp8_fp4_mqa_logits(**case.kwargs | {"max_seqlen_k": 100})
    assert_bitwise(got, case.run()[:, :100])


def test_empty_kv_is_cleaned(no_host_reads: Guard) -> None:
    for line in (
        "dense fp8 S=3 N=0 H=4 D=32 M=7",
        "paged fp8 B=2 next_n=1 H=4 D=32 P=8 blocks=0 columns=0 L=7 lens=zero clean=1",
        "paged mxfp4 B=2 next_n=1 H=4 D=32 P=8 blocks=0 columns=3 L=7 lens=zero clean=1",
    ):
        case = make_case(parse(line), CUDA)
        out = torch.zeros(case.problem.rows, 7, device=CUDA)
        assert (run(case, no_host_reads, out=out) == -torch.inf).all()


def test_debugging_checks_values_and_not_while_capturing(setenv: SetEnv) -> None:
    case = make_case(parse("dense fp8 S=9 N=300 H=4 D=32 windows=full"), CUDA)
    setenv("MQA_DEBUG", "1")
    with pytest.raises(ValueError, match="max_seqlen_k=100"):
        mqa.fp8_fp4_mqa_logits(**case.kwargs | {"max_seqlen_k": 100})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mqa.fp8_fp4_mqa_logits(**case.kwargs | {"max_seqlen_k": 100})
    paged = make_case(parse("paged fp8 B=2 next_n=1 H=4 D=32 P=8 blocks=9 columns=3 L=24"), CUDA)
    paged.tensors["table"].fill_(9)
    with pytest.raises(IndexError, match="block_table"):
        paged.run()


@pytest.mark.parametrize(
    "line",
    [
        "dense fp8 S=2000 N=8192 H=64 D=128",
        "dense mxfp4 S=500 N=8192 H=64 D=128 M=8192",
        "dense fp8 S=1 N=65536 H=64 D=128",
        "paged mxfp8 B=64 next_n=1 H=64 D=128 P=64 blocks=9000 columns=128 L=8192",
    ],
)
def test_extra_memory_is_bounded(line: str, no_host_reads: Guard) -> None:
    case = make_case(parse(line), CUDA)
    problem = case.problem
    out = torch.empty(problem.rows, problem.width, device=CUDA)
    case.run(out=out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(case, no_host_reads, out=out)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 16 << 20, f"{extra / 2**20:.1f} MiB"


def test_threads_on_streams_of_their_own() -> None:
    cases = [
        make_case(parse(f"dense fp8 S=40 N=900 H=8 D=64 windows=random seed={n}"), CUDA)
        for n in range(2)
    ]
    wants = [case.run() for case in cases]
    torch.cuda.synchronize()
    failed: list[AssertionError] = []

    def work(case: Case, want: Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                got = case.run()
                torch.cuda.current_stream().synchronize()
                try:
                    assert_bitwise(got, want)
                except AssertionError as error:
                    failed.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, wants, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_operators_and_compile_on_a_gpu() -> None:
    case = make_case(parse("dense fp8 S=9 N=300 H=4 D=32 windows=random"), CUDA)
    t = case.tensors
    inputs = (t["q"], None, t["kv"], t["kv_scale"], t["w"], t["start"], t["end"])
    options = (True, 0, torch.float32, None, None)
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.mqa.mqa_logits.default, (*inputs, *options), test_utils=tests)
    want = case.run()
    compiled = torch.compile(lambda: case.run() * 2, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(), want * 2)


def test_sms_of_a_device() -> None:
    count = torch.cuda.get_device_properties(0).multi_processor_count
    assert mqa.get_num_sms() == count
    mqa.set_num_sms(7)
    start = torch.zeros(3, dtype=torch.int32, device=CUDA)
    assert mqa.get_mqa_logits_metadata(start, start, 9, 64).shape == (8, 2)
    mqa.set_num_sms(count)


@pytest.fixture
def _choice_by_default(setenv: SetEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend is named, and nobody was warned yet."""
    monkeypatch.setattr(importlib.import_module("mqa.backends"), "_warned", set())
    setenv("MQA_BACKEND", "")
    setenv("MQA_FALLBACK", "warn")


@pytest.mark.usefixtures("_choice_by_default")
def test_the_fallback_warns_on_a_gpu() -> None:
    case = make_case(parse("dense fp8 S=9 N=300 H=4 D=96"), CUDA)
    with pytest.warns(mqa.FallbackWarning, match="portable: D=96 is not one of 32, 64, 128"):
        case.run()
    case.run()


@pytest.mark.usefixtures("_choice_by_default")
def test_paged_calls_fall_back_and_say_why() -> None:
    case = make_case(parse("paged fp8 B=2 next_n=1 H=64 D=96 P=24 blocks=9 columns=3 L=70"), CUDA)
    with pytest.warns(mqa.FallbackWarning, match="portable: D=96 is not one of 32, 64, 128"):
        case.run()
    case.run()
