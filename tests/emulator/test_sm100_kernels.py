"""The kernels of Blackwell, emulated, through the public functions: what they compute and what
changes nothing. Named hunts are in test_hunts.py, plans in tests/cuda/test_sm100_plan.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blackwell_cases import line_for
from compact_paths import HOPPER_ONLY, PATHS
from drawn import right_or_refused
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import HEADS, in_pages, paged_line, pool, seen, used_tokens
from schedule_contents import CONTENTS
from torch import Tensor

import mqa
from mqa import devices
from mqa.cuda import compiler, sm100
from mqa.cuda.metadata import METADATA
from mqa.cuda.plan import Kernel
from mqa.emulator import scheduled
from mqa.emulator.backend import SM100_EMULATED
from mqa.emulator.scheduler import SCHEDULES
from mqa.problem import DenseProblem, PagedProblem, Problem, parse
from mqa.reference import schedule
from mqa.testing import (
    BOUNDED_FAULTS,
    Accumulator,
    Case,
    accumulators,
    assert_bitwise,
    assert_logits,
    flagged_fraction,
    guards_intact,
    make_case,
)
from mqa.testing.faults import DETECTED
from mqa.testing.strategies import dense_problems, paged_problems

pytestmark = pytest.mark.skipif(
    compiler.unavailable() is not None, reason="NVRTC is missing, which compiles the kernels"
)
NAME, FORMATS = "sm100-emulated", (*sm100.MODELS,)
SOME = [kernel for kernel in sm100.kernels() if kernel not in METADATA]
EVERY = [kernel for kernel in sm100.kernels(every=True) if kernel not in (*METADATA, *SOME)]
STEP = 12
"""Kernels of a slow test."""
NAN_CODE = 0x7F
SMALL: dict[str, Any] = {
    "heads": (64,),
    "head_dims": (64,),
    "outs": ("float32",),
    "accepted_by": lambda problem: problem.sms <= 7,
}
"""Choices of which few kernels are compiled, and not many CTAs emulated: all else is drawn."""
FEW = settings(max_examples=max(5, settings.default.max_examples // 8))


def case_of(line: str | Problem) -> Case:
    return make_case(parse(line) if isinstance(line, str) else line)


def model_of(case: Case) -> Accumulator:
    if case.problem.regime == "exact":
        return accumulators.EXACT
    return accumulators.named(SM100_EMULATED.accumulator(case.problem.format))


def run(case: Case, **changes: Any) -> Tensor:
    """The public call of a case with some arguments changed."""
    dense = isinstance(case.problem, DenseProblem)
    function = mqa.fp8_fp4_mqa_logits if dense else mqa.fp8_fp4_paged_mqa_logits
    return over_nan(function, **(case.kwargs | {"schedule_meta": None} | changes))


def over_nan(function: Callable[..., Tensor], **given: Any) -> Tensor:
    """A call that writes over NaN: memory of an earlier result could hold what is expected."""
    width = given["max_context_len"] if "max_context_len" in given else given["max_seqlen_k"]
    shape = len(given["weights"]), width or len(given["kv"][0])
    out = torch.full(shape, torch.nan, dtype=given.get("logits_dtype", torch.float32))
    return function(**given, backend=NAME, out=out)


def check(line: str | Problem) -> None:
    """Right logits, written over NaN, and nothing written around them."""
    case = case_of(line)
    out = case.new_out()
    case.run(backend=NAME, out=out)
    assert_logits(case, out, model_of(case))
    assert guards_intact(out)


def launched(line: str, seed: int) -> str:
    """Hunts for mistakes in a case and checks its logits; the name of its kernel."""
    with scheduled("hunt", seed=seed) as launches:
        check(line)
    (launch,) = launches
    return launch.kernel


@pytest.mark.no_cover
@pytest.mark.parametrize("kernel", SOME, ids=str)
def test_a_kernel_of_the_covering_set_is_bitwise_the_definition(kernel: Kernel) -> None:
    number = SOME.index(kernel)
    assert launched(line_for(kernel, number, "exact"), number) == str(kernel)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(EVERY), STEP))
def test_every_other_kernel_is_bitwise_the_definition_and_within_tolerance(first: int) -> None:
    for number, kernel in enumerate(EVERY[first : first + STEP], first):
        assert launched(line_for(kernel, number, "exact"), number) == str(kernel)
        check(line_for(kernel, number, "bounded"))


@pytest.mark.no_cover
@pytest.mark.parametrize("kernel", SOME[::2], ids=str)
def test_a_kernel_is_within_the_tolerance_of_its_accumulator_model(kernel: Kernel) -> None:
    check(line_for(kernel, SOME.index(kernel), "bounded"))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", SOME, ids=str)
@pytest.mark.parametrize("seed", range(100, 108))
def test_kernels_are_within_tolerance_on_more_data(kernel: Kernel, seed: int) -> None:
    check(line_for(kernel, seed, "bounded"))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("H", [8, 64])
def test_sizes_off_every_tile(fmt: str, H: int) -> None:
    line = f"dense {fmt} S=129 N=4100 H={H} D=128 sms=3 regime=exact windows=random"
    with scheduled("random", seed=H):
        check(line)


@FEW
@given(
    problem=dense_problems(**SMALL, max_rows=9, max_keys=300),
    seed=st.integers(0, 99),
    how=st.sampled_from(SCHEDULES),
)
def test_drawn_dense_problems_agree(problem: DenseProblem, seed: int, how: str) -> None:
    right_or_refused(SM100_EMULATED, problem, how, seed, check)


@FEW
@given(
    problem=paged_problems(
        **SMALL, page_sizes=(8, 16, 32, 64, 128, 256), max_batch=3, max_next_n=5, max_keys=300
    ),
    seed=st.integers(0, 99),
    how=st.sampled_from(SCHEDULES),
)
def test_drawn_paged_problems_agree(problem: PagedProblem, seed: int, how: str) -> None:
    right_or_refused(SM100_EMULATED, problem, how, seed, check)


@pytest.mark.parametrize("P", [8, 16, 32, 64, 128, 256])
def test_every_page_size(P: int) -> None:
    fmt = FORMATS[P.bit_length() % 3]
    check(paged_line(P, 290, "next_n=1 H=64 D=64 lens=random regime=exact", B=2, format=fmt))


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in PATHS if not any(word in path for word in HOPPER_ONLY)]
)
def test_every_compact_path(path: str) -> None:
    """What a sanitizer goes through on a GPU."""
    with scheduled("hunt", seed=len(path)):
        check(f"{path} regime=exact seed=3")


@pytest.mark.parametrize("next_n", [1, 2, 3, 9])
def test_requests_of_few_and_many_rows(next_n: int) -> None:
    """With 128 heads and block scales a group is several blocks, of which some may be empty."""
    facts = f"next_n={next_n} H=128 D=64 clean=1 lens=ramp regime=exact"
    check(paged_line(64, 150, facts, format="mxfp8"))


@pytest.mark.slow
@pytest.mark.parametrize("H", HEADS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_requests_of_any_number_of_rows(fmt: str, H: int) -> None:
    for next_n in range(1, 11):
        facts = f"next_n={next_n} H={H} D=64 clean=1 lens=random regime=exact seed={next_n}"
        with scheduled("hunt", seed=next_n):
            check(paged_line(32, 150, facts, format=fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_empty_inverted_and_ragged_windows(fmt: str) -> None:
    case = case_of(f"dense {fmt} S=8 N=300 H=64 D=64 windows=full regime=exact")
    want = run(case)
    start = torch.tensor([0, 40, -9, 299, 5, 7, 128, 127], dtype=torch.int32)
    end = torch.tensor([0, 39, 1, 900, 6, 7, 256, 129], dtype=torch.int32)
    got = run(case, cu_seq_len_k_start=start, cu_seq_len_k_end=end)
    n = torch.arange(300)
    inside = (n >= start[:, None]) & (n < end[:, None])
    assert_bitwise(got, torch.where(inside, want, -torch.inf))
    empty = run(case, cu_seq_len_k_start=start, cu_seq_len_k_end=start)
    assert empty.eq(-torch.inf).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_nothing_to_score_still_cleans(fmt: str) -> None:
    assert run(case_of(f"dense {fmt} S=3 N=0 H=64 D=64 M=9")).eq(-torch.inf).all()
    line = "B=2 next_n=2 H=64 D=64 P=16 blocks=0 columns=2 L=9 clean=1"
    assert run(case_of(f"paged {fmt} {line}")).eq(-torch.inf).all()


@pytest.mark.no_cover
@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", pytest.param("mxfp4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", SCHEDULES)
def test_every_schedule_and_seed_gives_the_same_bits(fmt: str, how: str) -> None:
    case = case_of(f"dense {fmt} S=5 N=290 H=64 D=64 windows=random seed=2 sms=2")
    cuts = case.stale_schedule()
    want = run(case, schedule_meta=cuts)
    with scheduled(how, seed=FORMATS.index(fmt)) as launches:
        assert_bitwise(run(case, schedule_meta=cuts), want)
    assert len(launches) == 1


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("fmt", "H"),
    [
        pytest.param(fmt, H, marks=() if (fmt, H) == ("mxfp8", 64) else pytest.mark.slow)
        for fmt, H in itertools.product(FORMATS, HEADS)
    ],
)
def test_a_row_has_the_same_bits_in_every_company(fmt: str, H: int) -> None:
    """Alone, among others, compressed, in pages, with bfloat16 weights, wherever its window is."""
    case = case_of(f"dense {fmt} S=8 N=200 H={H} D=64 weights=bfloat16 windows=full seed=3")
    t = case.tensors
    want = run(case)
    assert_bitwise(run(case, weights=t["w"].float()), want)
    assert_bitwise(run(case, max_seqlen_k=200), want)
    low, high = torch.full((8,), 67, dtype=torch.int32), torch.full((8,), 197, dtype=torch.int32)
    part = run(case, cu_seq_len_k_start=low, cu_seq_len_k_end=high)
    assert_bitwise(part[:, 67:197], want[:, 67:197])
    for rows in (slice(0, 1), slice(3, 8)):
        q = t["q"][rows] if fmt == "fp8" else (t["q"][rows], t["q_scale"][rows])
        windows = {f"cu_seq_len_k_{side}": t[side][rows] for side in ("start", "end")}
        assert_bitwise(run(case, q=q, weights=t["w"][rows], **windows), want[rows])
    for P, next_n in ((8, 1), (64, 2), (256, 8)):
        got = over_nan(mqa.fp8_fp4_paged_mqa_logits, **in_pages(case, P, next_n))
        assert_bitwise(got, want, replay=f"{P} {next_n}")


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("contents", "paged"),
    [
        pytest.param(contents, paged, marks=pytest.mark.slow if (number + paged) % 2 else ())
        for (number, contents), paged in itertools.product(enumerate(CONTENTS), (False, True))
    ],
)
def test_contents_of_a_schedule_do_not_change_bits(contents: str, paged: bool) -> None:
    line = "dense fp8 S=9 N=290 H=64 D=64 windows=random seed=1"
    case = case_of(paged_line(64, 290, "next_n=1 H=64 D=64 clean=1 lens=random", B=3))
    case = case if paged else case_of(line)
    t, want = case.tensors, run(case)
    if paged:
        fresh = schedule.paged_metadata(t["lens"], 3)
    else:
        fresh = schedule.dense_metadata(t["start"], t["end"], 290, 64, 3)
    got = run(case, schedule_meta=CONTENTS[contents](fresh).contiguous())
    assert_bitwise(got, want)


def shared_by_three(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a schedule three CTAs find their parts themselves, as a GPU's SMs do."""
    monkeypatch.setattr(devices, "_num_sms", {case.device: 3})
    with scheduled("random", seed=3) as launches:
        got = run(case)
    counts = launches[0].opcodes.items()
    assert sum(n for opcode, n in counts if opcode.startswith("tcgen05.dealloc")) == 3
    assert_bitwise(got, case.run(backend="reference"))


@pytest.mark.parametrize("S", [20, 280])
def test_ctas_share_a_dense_call_without_a_schedule(
    S: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warp looks at up to 32 groups of 8 rows, all threads together at more."""
    case = case_of(f"dense fp8 S={S} N=300 H=64 D=64 windows=empty regime=exact seed=6")
    for row in (0, 1, 9, S - 1):
        case.tensors["start"][row], case.tensors["end"][row] = row % 5, 300 - row % 9
    shared_by_three(case, monkeypatch)


@pytest.mark.parametrize("B", [20, 150])
def test_ctas_share_a_paged_call_without_a_schedule(
    B: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than 128 groups the empty ones at the ends are left out first."""
    facts = "next_n=1 H=64 D=64 clean=1 lens=full regime=exact seed=6"
    case = case_of(paged_line(64, 130, facts, B=B))
    lens = case.tensors["lens"]
    lens[: B // 2] = lens[B // 2 + 5 :] = 0
    lens[B // 2 + 1], lens[B // 2 + 3] = 0, 1
    shared_by_three(case, monkeypatch)


@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_reaches_what_uses_it_and_nothing_else(fmt: str) -> None:
    case = case_of(f"dense {fmt} S=6 N=260 H=64 D=64 windows=random seed=4")
    t, want = case.tensors, run(case)
    n = torch.arange(260)
    inside = (n >= t["start"][:, None]) & (n < t["end"][:, None])
    poisoned = torch.zeros_like(inside)
    row = int(inside.sum(1).argmax())
    t["w"][row, 3] = torch.nan
    poisoned[row] = inside[row]
    for token in (0, 127, 128, 259):
        if fmt == "fp8":
            t["kv_scale"][token] = torch.nan
        else:
            t["kv_scale"].view(torch.uint8).view(260, 4)[token, 1] = 0xFF
        poisoned[:, token] |= inside[:, token]
    if fmt != "mxfp4":  # E2M1 has no NaN.
        t["kv"].view(torch.uint8)[131, 5] = NAN_CODE
        poisoned[:, 131] |= inside[:, 131]
    assert poisoned.any()
    assert (inside & ~poisoned).any()
    assert_bitwise(run(case), torch.where(poisoned, torch.nan, want))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_is_untouched_by_nan_in_all_that_it_does_not_use(fmt: str) -> None:
    case = case_of(paged_line(16, 200, "next_n=2 H=64 D=64 clean=1 seed=5", B=2, format=fmt))
    t = case.tensors
    t["lens"].copy_(torch.tensor([[33, 131], [190, 60]]))
    want = run(case)
    assert not want.isnan().any()
    codes, scales = pool(case)
    t["lens"][0, 0] = t["lens"][1, 0] = t["lens"][1, 1] = 0  # one row, of 131 tokens, is left
    unused = ~used_tokens(case)
    codes[unused], scales[unused] = NAN_CODE, (torch.nan if fmt == "fp8" else -1)
    for name in ("q", "q_scale", "w"):
        if name not in t:
            continue
        rows = t[name].view(torch.uint8) if name == "q" else t[name]
        rows = rows.view(4, *rows.shape[1 if name == "w" else 2 :])
        others = torch.tensor([0, 2, 3])
        rows[others] = {"q": NAN_CODE, "q_scale": -1, "w": torch.nan}[name]
    got = run(case)
    assert_bitwise(got[1:2], want[1:2])
    assert got[[0, 2, 3]].eq(-torch.inf).all()


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_scale_bytes_past_the_head_dim_are_ignored(fmt: str) -> None:
    case = case_of(f"dense {fmt} S=4 N=30 H=64 D=64 windows=full")
    want = run(case)
    for name in ("q_scale", "kv_scale"):
        scale = case.tensors[name]
        scale.view(torch.uint8).view(*scale.shape, 4)[..., 2:] = 0xFF
    assert_bitwise(run(case), want)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("paged", [False, True])
def test_the_zero_plateau_is_plus_zero(fmt: str, paged: bool) -> None:
    """All dots at most 0: exactly +0.0, whatever the signs of the weights."""
    if paged:
        case = case_of(paged_line(64, 150, "next_n=1 H=64 D=64 clean=1", B=2, format=fmt))
        k, valid = pool(case)[0], seen(case)
    else:
        case = case_of(f"dense {fmt} S=3 N=150 H=64 D=64 windows=full seed=4")
        k, valid = case.tensors["kv"].view(torch.uint8), torch.ones(3, 150, dtype=torch.bool)
    assert (run(case)[valid] != 0).float().mean() > 0.2
    q = case.tensors["q"].view(torch.uint8)
    if fmt == "mxfp4":
        q &= 0x77
        k |= 0x88
    else:
        q &= 0x7F
        k |= 0x80
        q[q == NAN_CODE], k[k == 0xFF] = 0x38, 0xB8
    want = torch.where(valid, 0.0, -torch.inf)
    w = case.tensors["w"]
    for weights in (w, -w.abs(), (-w.abs()).bfloat16()):
        assert_bitwise(run(case, weights=weights), want)


@pytest.mark.no_cover
@pytest.mark.parametrize("fault", BOUNDED_FAULTS, ids=[fault.name for fault in BOUNDED_FAULTS])
@pytest.mark.parametrize("fmt", FORMATS)
def test_bounded_cases_show_every_fault_on_every_seed(fmt: str, fault: Any) -> None:
    for seed in range(8):
        case = case_of(f"dense {fmt} S=8 N=40 H=64 D=128 windows=full seed={seed}")
        model = model_of(case)
        share = flagged_fraction(case, fault.logits(case, model), model)
        assert share >= DETECTED, (seed, share)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_fault_fed_to_a_kernel_is_flagged(fmt: str) -> None:
    for name in ("head", "weights", "dims", "scale"):
        case = case_of(f"dense {fmt} S=5 N=60 H=64 D=64 windows=full seed=7")
        t, model = case.tensors, model_of(case)
        if name == "head":
            assert flagged_fraction(case, run(case), model) == 0
            t["w"][:, -1] = 0
        elif name == "weights":
            t["w"][:, :2] = t["w"][:, :2].flip(1)
        elif name == "dims":
            q = t["q"].view(torch.uint8)
            q[..., :2] = q[..., :2].flip(-1)
        else:
            t["kv_scale"].copy_(t["kv_scale"].roll(1))
        assert flagged_fraction(case, run(case), model) >= DETECTED, name


def test_the_backend_makes_schedules() -> None:
    start, end = torch.zeros(20, dtype=torch.int32), torch.arange(0, 4000, 200, dtype=torch.int32)
    out = torch.empty((4, 2), dtype=torch.int32)
    SM100_EMULATED.dense_metadata(start, end, 4000, 64, out)
    assert torch.equal(out, schedule.dense_metadata(start, end, 4000, 64, 3))
    lens = torch.arange(0, 4000, 100, dtype=torch.int32)
    SM100_EMULATED.paged_metadata(lens, None, out)
    assert torch.equal(out, schedule.paged_metadata(lens, 3))


def test_the_lines_reach_every_kernel_that_they_are_for() -> None:
    for number, kernel in enumerate((*SOME, *EVERY)):
        problem = parse(line_for(kernel, number, "exact"))
        assert kernel in SM100_EMULATED._backend.kernels_of(problem)
