"""The portable kernels as an A100 would run them, through the public functions: what they compute
and what changes nothing. Plans are in tests/cuda/test_portable_plan.py."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import MARKS
from paged_cases import in_pages, paged_line, pool, used_tokens
from schedule_contents import CONTENTS
from torch import Tensor

import mqa
from mqa import devices
from mqa.cuda.portable import ELEMENTS
from mqa.emulator import scheduled
from mqa.emulator.backend import PORTABLE_EMULATED
from mqa.emulator.scheduler import SCHEDULES
from mqa.problem import DenseProblem, PagedProblem, Problem, parse
from mqa.reference import schedule
from mqa.testing import (
    BOUNDED_FAULTS,
    Case,
    accumulators,
    assert_bitwise,
    assert_logits,
    flagged_fraction,
    guards_intact,
    logits,
    make_case,
)
from mqa.testing.faults import DETECTED
from mqa.testing.strategies import dense_problems, paged_problems

pytestmark = MARKS
NAME = "portable-emulated"
FORMATS = tuple(ELEMENTS)
NAN_CODE = 0x7F
"""As every byte of q, k or a cache: NaN in E4M3, and twice in bfloat16."""
QUICK = {
    "dense fp8 S=9 N=300 H=24 D=64 clean=1 windows=random sms=2",
    "paged fp8 B=2 next_n=3 H=5 D=64 P=3 blocks=90 columns=33 L=97 clean=1",
    "dense mxfp8 S=5 N=70 H=24 D=64 windows=random q_off=3 kv_off=5 w_off=4",
    "dense mxfp4 S=2 N=70 H=130 D=32 out=bfloat16",
    "paged mxfp4 B=5 next_n=1 H=32 D=128 P=48 blocks=40 columns=3 L=140 varlen=1 lens=random",
}
LINES = (
    *sorted(QUICK),
    "dense bf16 S=5 N=150 H=24 D=128 windows=random q_off=2 kv_off=6",
    "dense bf16 S=3 N=90 H=130 D=32 M=91 windows=random q_stride=10000x70x2 kv_stride=70x2",
    "dense bf16 S=9 N=300 H=8 D=64 windows=random sms=3",
    "paged bf16 B=2 next_n=3 H=5 D=64 P=3 blocks=90 columns=33 L=97 cache_stride=301 cache_off=6",
    "paged bf16 B=2 next_n=2 H=24 D=128 P=64 blocks=9 columns=3 L=150 clean=1 lens=random",
    "dense fp8 S=7 N=260 H=1 D=32 windows=random",
    "dense fp8 S=5 N=300 H=8 D=128 M=301 out=float16 weights=bfloat16 windows=random",
    "dense fp8 S=5 N=90 H=64 D=128 q_stride=40000x300x2 kv_stride=300x2 q_off=3 kv_off=5",
    "dense fp8 S=5 N=90 H=100 D=128 kv_stride=132 kv_off=4 kv_scale_stride=3 kv_scale_off=4",
    "dense fp8 S=3 N=300 H=128 D=32 windows=packed start_stride=2 end_stride=3 out_off=4",
    "dense mxfp8 S=3 N=90 H=5 D=32 M=91 windows=random q_stride=700x41x2 q_scale_stride=90x3",
    "dense mxfp8 S=3 N=90 H=130 D=128 weights=bfloat16",
    "dense mxfp8 S=5 N=140 H=64 D=128 windows=random q_off=3 kv_off=5 w_off=4",
    "dense mxfp4 S=3 N=90 H=24 D=64 M=91 windows=random kv_stride=33 kv_off=1",
    "dense mxfp4 S=35 N=300 H=16 D=128 windows=random sms=3",
    "paged fp8 B=2 next_n=2 H=64 D=128 P=1 blocks=99 columns=97 L=97 clean=1 lens=random",
    "paged fp8 B=3 next_n=1 H=130 D=64 P=64 blocks=9 columns=2 L=128 clean=1 lens=random",
    "paged fp8 B=2 next_n=9 H=8 D=32 P=256 blocks=4 columns=2 L=300 lens=ramp clean=1 sms=3",
    "paged fp8 B=2 next_n=2 H=16 D=128 P=7 blocks=60 columns=30 L=200 cache_stride=999 cache_off=5",
    "paged fp8 B=17 next_n=1 H=100 D=64 P=48 blocks=20 columns=4 L=97 varlen=1 clean=1 lens=random",
    "paged mxfp8 B=2 next_n=4 H=16 D=64 P=16 blocks=11 columns=4 L=60 lens_rank=1",
    "paged mxfp8 B=2 next_n=2 H=64 D=128 P=48 blocks=11 columns=4 L=180 q_stride=20001x10000x140",
    "paged mxfp8 B=2 next_n=3 H=128 D=32 P=64 blocks=9 columns=3 L=150 clean=1 lens=ramp",
    "paged mxfp4 B=3 next_n=2 H=1 D=64 P=3 blocks=200 columns=60 L=170 table_stride=70x1 clean=1",
    "paged mxfp4 B=3 next_n=2 H=24 D=32 P=256 blocks=5 columns=1 L=256 lens=random w_stride=70x2",
)
SMALL: dict[str, Any] = {"heads": (8, 5), "head_dims": (64, 96), "outs": ("float32",)}
"""Choices of which few kernels are compiled: all else is drawn."""
ONE_QUICK = [
    pytest.param(format, marks=pytest.mark.slow if number else ())
    for number, format in enumerate(FORMATS)
]
FEW = settings(max_examples=max(4, settings.default.max_examples // 16))


def case_of(line: str | Problem) -> Case:
    return make_case(parse(line) if isinstance(line, str) else line)


def model_of(case: Case, *, sure: bool = True) -> Any:
    """How the emulator sums dots, to the bit; not `sure`: with room for what hardware may do."""
    if case.problem.regime == "exact":
        return accumulators.EXACT
    found = getattr(accumulators, PORTABLE_EMULATED.accumulator(case.problem.format))
    return dataclasses.replace(found, model=dataclasses.replace(found.model, confirmed=sure))


def call(case: Case, **changes: Any) -> Tensor:
    """The public call of a case, without a schedule, with some arguments changed, over NaN."""
    dense = isinstance(case.problem, DenseProblem)
    function = mqa.fp8_fp4_mqa_logits if dense else mqa.fp8_fp4_paged_mqa_logits
    given = case.kwargs | {"schedule_meta": None} | changes
    out = case.new_out()[: len(given["weights"])]
    if given.get("max_seqlen_k") or len(out) != len(case.tensors["w"]):
        width = given.get("max_seqlen_k") or case.problem.width
        out = torch.full((len(given["weights"]), width), torch.nan, dtype=given["logits_dtype"])
    return function(**given, backend=NAME, out=out)


def check(line: str | Problem) -> None:
    """Right logits, written over NaN, and nothing written around them."""
    case = case_of(line)
    out = case.new_out()
    options = {"schedule_meta": case.stale_schedule()} if case.problem.sms else {}
    case.run(backend=NAME, out=out, **options)
    assert_logits(case, out, model_of(case))
    assert guards_intact(out)


@pytest.mark.parametrize(
    "line", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in LINES]
)
def test_logits_are_bitwise_the_definition_and_the_sums_of_the_model(line: str) -> None:
    with scheduled("hunt", seed=len(line)):
        check(f"{line} regime=exact")
    check(line)


def test_cases_have_every_kind_of_size() -> None:
    problems = [parse(line) for line in LINES]
    assert {problem.H for problem in problems} >= {1, 5, 8, 24, 64, 100, 128, 130}
    pages = {problem.P for problem in problems if isinstance(problem, PagedProblem)}
    assert pages >= {1, 3, 48, 64, 256}
    pairs = {(problem.format, problem.D) for problem in problems}
    assert pairs == {*itertools.product(FORMATS, (32, 64, 128))}


@pytest.mark.parametrize("format", ONE_QUICK)
def test_a_dot_has_the_bits_of_its_model_and_of_no_other(format: str) -> None:
    """With one head, and weights and scales of one, a logit is the relu of a dot."""
    case = case_of(f"dense {format} S=30 N=64 H=1 D=128 windows=full seed=1")
    for ones in (case.tensors["w"], case.data.weights):
        ones[:] = 1
    if format == "fp8":
        for ones in (case.tensors["kv_scale"], case.data.key_scale):
            ones[:] = 1
    got, right = call(case), model_of(case)
    assert_bitwise(got, logits(case, right).values)
    hopper = dataclasses.replace(right.model, k=16, bits=25)
    wrong = [right.model, dataclasses.replace(right, model=hopper)]
    if format in ("fp8", "mxfp8"):
        wrong.append(dataclasses.replace(right, in_turn=True))
    for model in wrong:
        with pytest.raises(AssertionError, match="entries differ in bits"):
            assert_bitwise(got, logits(case, model).values)


def drawn(problem: Problem, how: str, seed: int) -> None:
    if any(PORTABLE_EMULATED.reasons_against(problem, torch.device("cpu"))):
        with pytest.raises(mqa.BackendUnavailableError):
            case_of(problem).run(backend=NAME)
        return
    with scheduled(how, seed=seed):
        check(problem)


@FEW
@given(
    problem=dense_problems(
        **SMALL, max_rows=7, max_keys=200, accepted_by=lambda problem: problem.sms <= 7
    ),
    seed=st.integers(0, 99),
    how=st.sampled_from(SCHEDULES),
)
def test_drawn_dense_problems_agree(problem: DenseProblem, seed: int, how: str) -> None:
    drawn(problem, how, seed)


@FEW
@given(
    problem=paged_problems(
        **SMALL,
        page_sizes=(1, 3, 48, 64, 256),
        max_batch=3,
        max_next_n=9,
        max_keys=200,
        accepted_by=lambda problem: problem.sms <= 7,
    ),
    seed=st.integers(0, 99),
    how=st.sampled_from(SCHEDULES),
)
def test_drawn_paged_problems_agree(problem: PagedProblem, seed: int, how: str) -> None:
    drawn(problem, how, seed)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("H", [1, 2, 7, 9, 17, 33, 65, 127, 129, 256, 300])
def test_any_number_of_heads(format: str, H: int) -> None:
    with scheduled("hunt", seed=H):
        check(f"dense {format} S=4 N=150 H={H} D=64 windows=random regime=exact")
        check(paged_line(48, 150, f"next_n=2 H={H} D=64 lens=ramp regime=exact", format=format))


@pytest.mark.parametrize("how", SCHEDULES)
def test_every_schedule_and_seed_gives_the_same_bits(how: str) -> None:
    case = case_of("dense fp8 S=5 N=300 H=24 D=64 windows=random seed=2 sms=2")
    cuts = case.stale_schedule()
    want = call(case, schedule_meta=cuts)
    with scheduled(how, seed=3) as launches:
        assert_bitwise(call(case, schedule_meta=cuts), want)
    assert len(launches) == 1


@pytest.mark.parametrize(
    ("contents", "paged"),
    [
        pytest.param(
            contents,
            paged,
            marks=pytest.mark.slow if (number, paged) not in ((0, False), (8, True)) else (),
        )
        for (number, contents), paged in itertools.product(enumerate(CONTENTS), (False, True))
    ],
)
def test_contents_of_a_schedule_do_not_change_bits(contents: str, paged: bool) -> None:
    line = "dense fp8 S=25 N=300 H=24 D=64 windows=random seed=1"
    case = case_of(paged_line(48, 300, "next_n=1 H=24 D=64 clean=1 lens=random", B=3))
    case = case if paged else case_of(line)
    t, want = case.tensors, call(case)
    if paged:
        fresh = schedule.paged_metadata(t["lens"], 3)
    else:
        fresh = schedule.dense_metadata(t["start"], t["end"], 300, 24, 3)
    assert_bitwise(call(case, schedule_meta=CONTENTS[contents](fresh).contiguous()), want)


@pytest.mark.parametrize("line", [
    "dense fp8 S=300 N=300 H=24 D=64 windows=empty regime=exact seed=6",
    paged_line(48, 130, "next_n=1 H=24 D=64 clean=1 lens=random regime=exact seed=6", B=40),
])  # fmt: skip
def test_ctas_share_a_call_without_a_schedule(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(line)
    if "dense" in line:
        for row in (0, 1, 9, 299):
            case.tensors["start"][row], case.tensors["end"][row] = row % 5, 300 - row % 9
    monkeypatch.setattr(devices, "_num_sms", {case.device: 3})
    with scheduled("random", seed=3):
        assert_bitwise(call(case), case.run(backend="reference"))


@pytest.mark.parametrize(
    ("format", "H"),
    [
        pytest.param(format, H, marks=() if (format, H) == ("fp8", 24) else pytest.mark.slow)
        for format, H in itertools.product(FORMATS, (1, 24, 130))
    ],
)
def test_a_row_has_the_same_bits_in_every_company(format: str, H: int) -> None:
    """Alone, among others, compressed, in pages, with bfloat16 weights, wherever its window is."""
    case = case_of(f"dense {format} S=8 N=200 H={H} D=64 weights=bfloat16 windows=full seed=3")
    t = case.tensors
    want = call(case)
    assert_bitwise(call(case, weights=t["w"].float()), want)
    assert_bitwise(call(case, max_seqlen_k=200), want)
    low, high = torch.full((8,), 67, dtype=torch.int32), torch.full((8,), 197, dtype=torch.int32)
    part = call(case, cu_seq_len_k_start=low, cu_seq_len_k_end=high)
    assert_bitwise(part[:, 67:197], want[:, 67:197])
    for rows in (slice(0, 1), slice(3, 8)):
        q = (t["q"][rows], t["q_scale"][rows]) if "q_scale" in t else t["q"][rows]
        windows = {f"cu_seq_len_k_{side}": t[side][rows] for side in ("start", "end")}
        assert_bitwise(call(case, q=q, weights=t["w"][rows], **windows), want[rows])
    for P, next_n in ((3, 1), (48, 2), (256, 8)):
        got = mqa.fp8_fp4_paged_mqa_logits(**in_pages(case, P, next_n), backend=NAME)
        assert_bitwise(got, want, replay=f"{P} {next_n}")


def test_empty_inverted_and_ragged_windows() -> None:
    case = case_of("dense fp8 S=8 N=300 H=24 D=64 windows=full regime=exact")
    want = call(case)
    start = torch.tensor([0, 40, -9, 299, 5, 7, 128, 127], dtype=torch.int32)
    end = torch.tensor([0, 39, 1, 900, 6, 7, 256, 129], dtype=torch.int32)
    got = call(case, cu_seq_len_k_start=start, cu_seq_len_k_end=end)
    n = torch.arange(300)
    inside = (n >= start[:, None]) & (n < end[:, None])
    assert_bitwise(got, torch.where(inside, want, -torch.inf))
    assert call(case, cu_seq_len_k_start=start, cu_seq_len_k_end=start).eq(-torch.inf).all()


def test_nothing_to_score_still_cleans() -> None:
    assert call(case_of("dense fp8 S=3 N=0 H=24 D=64 M=9")).eq(-torch.inf).all()
    line = "B=2 next_n=2 H=24 D=64 P=48 blocks=0 columns=2 L=9 clean=1"
    assert call(case_of(f"paged fp8 {line}")).eq(-torch.inf).all()


def test_bad_block_ids_read_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(paged_line(48, 200, "next_n=1 H=24 D=64 clean=1 lens=full seed=5", B=2))
    monkeypatch.setattr("mqa.values.blocks_exist", lambda *_: None)
    want, table = call(case).clone(), case.tensors["table"]
    for request, column, number in (
        (0, 1, -1),
        (1, 0, 2**31 - 1),
        (1, 3, len(case.tensors["cache"])),
    ):
        table[request, column] = number
        want[request, column * 48 : min(column * 48 + 48, 200)] = 0.0
    assert_bitwise(call(case), want)


@pytest.mark.parametrize("format", FORMATS)
def test_nan_reaches_what_uses_it_and_nothing_else(format: str) -> None:
    case = case_of(f"dense {format} S=6 N=260 H=24 D=64 windows=random seed=4")
    t, want = case.tensors, call(case)
    n = torch.arange(260)
    inside = (n >= t["start"][:, None]) & (n < t["end"][:, None])
    poisoned = torch.zeros_like(inside)
    first, second, *_ = inside.sum(1).argsort(descending=True).tolist()
    t["w"][first, 3] = torch.nan
    poisoned[first] = inside[first]
    for token in (0, 127, 128, 259):
        if format == "fp8":
            t["kv_scale"][token] = torch.nan
        elif format == "bf16":
            t["kv"][token, 63] = torch.nan
        else:
            t["kv_scale"].view(torch.uint8).view(260, 4)[token, 1] = 0xFF
        poisoned[:, token] |= inside[:, token]
    if format == "bf16":
        t["q"][second, 23, 62] = -torch.nan
        poisoned[second] |= inside[second]
    elif format != "mxfp4":  # E2M1 has no NaN.
        for token, dim, code in ((131, 5, 0x7F), (64, 63, 0xFF), (65, 0, 0x7F), (70, 34, 0xFF)):
            t["kv"].view(torch.uint8)[token, dim] = code
            poisoned[:, token] |= inside[:, token]
        t["q"].view(torch.uint8)[second, 23, 62] = 0xFF
        poisoned[second] |= inside[second]
    if format.startswith("mx"):
        t["q_scale"].view(torch.uint8).view(6, 24, 4)[second, 11, 1] = 0xFF
        poisoned[second] |= inside[second]
    assert poisoned.any()
    assert (inside & ~poisoned).any()
    assert_bitwise(call(case), torch.where(poisoned, torch.nan, want))


@pytest.mark.parametrize("format", ONE_QUICK)
def test_a_row_is_untouched_by_nan_in_all_that_it_does_not_use(format: str) -> None:
    case = case_of(paged_line(48, 200, "next_n=2 H=24 D=64 clean=1 seed=5", B=2, format=format))
    t = case.tensors
    t["lens"].copy_(torch.tensor([[33, 131], [190, 60]]))
    want = call(case)
    assert not want.isnan().any()
    codes, scales = (None, None) if format == "bf16" else pool(case)
    t["lens"][0, 0] = t["lens"][1, 0] = t["lens"][1, 1] = 0  # one row, of 131 tokens, is left
    unused = ~used_tokens(case)
    if codes is None or scales is None:
        t["cache"][:, :, 0][unused] = torch.nan
    else:
        codes[unused], scales[unused] = NAN_CODE, (torch.nan if format == "fp8" else -1)
    others = torch.tensor([0, 2, 3])
    t["q"].view(torch.uint8).view(4, 24, -1)[others] = NAN_CODE
    t["w"][others] = torch.nan
    if "q_scale" in t:
        t["q_scale"].view(4, 24)[others] = -1
    got = call(case)
    assert_bitwise(got[1:2], want[1:2])
    assert got[others].eq(-torch.inf).all()


@pytest.mark.parametrize("format", ONE_QUICK)
def test_the_zero_plateau_is_plus_zero(format: str) -> None:
    """All dots at most 0: exactly +0.0, whatever the signs of the weights."""
    case = case_of(f"dense {format} S=3 N=150 H=24 D=64 windows=full seed=4")
    q, k = (case.tensors[name].view(torch.uint8) for name in ("q", "kv"))
    assert (call(case) != 0).float().mean() > 0.2
    if format == "mxfp4":
        q &= 0x77
        k |= 0x88
    elif format == "bf16":
        case.tensors["q"].abs_()
        case.tensors["kv"].copy_(-case.tensors["kv"].abs())
    else:
        q &= 0x7F
        k |= 0x80
        q[q == NAN_CODE], k[k == 0xFF] = 0x38, 0xB8
    w = case.tensors["w"]
    for weights in (w, -w.abs(), (-w.abs()).bfloat16()):
        assert_bitwise(call(case, weights=weights), torch.zeros(3, 150))


def test_codes_at_the_ends_of_e4m3_are_decoded() -> None:
    one = torch.ones(1, 8)
    start, end = torch.tensor([0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    for code, value in ((0x7E, 448.0), (0xFE, -448.0), (0x01, 2.0**-9), (0x81, -(2.0**-9))):
        q = torch.full((1, 8, 32), code, dtype=torch.uint8).view(torch.float8_e4m3fn)
        got = mqa.fp8_fp4_mqa_logits(q, (q[:, 0], one[:, 0]), one, start, end, backend=NAME)
        assert got.item() == value * value * 32 * 8


@pytest.mark.parametrize("format", ONE_QUICK)
def test_a_fault_fed_to_a_kernel_is_flagged(format: str) -> None:
    for name in ("none", "head", "weights", "dims", "scale"):
        case = case_of(f"dense {format} S=5 N=60 H=24 D=64 windows=full seed=7")
        t, model = case.tensors, model_of(case, sure=False)
        if name == "head":
            t["w"][:, -1] = 0
        elif name == "weights":
            t["w"][:, :2] = t["w"][:, :2].flip(1)
        elif name == "dims":
            q = t["q"] if format == "bf16" else t["q"].view(torch.uint8)
            q[..., :2] = q[..., :2].flip(-1)
        elif name == "scale" and format == "bf16":
            t["kv"].copy_(t["kv"].roll(1, 0))
        elif name == "scale":
            t["kv_scale"].copy_(t["kv_scale"].roll(1))
        share = flagged_fraction(case, call(case), model)
        assert share == 0 if name == "none" else share >= DETECTED, name


@pytest.mark.slow
@pytest.mark.parametrize("fault", BOUNDED_FAULTS, ids=[fault.name for fault in BOUNDED_FAULTS])
@pytest.mark.parametrize("format", FORMATS)
def test_bounded_cases_show_every_fault_on_every_seed(format: str, fault: Any) -> None:
    for seed in range(8):
        case = case_of(f"dense {format} S=8 N=40 H=64 D=128 windows=full seed={seed}")
        model = model_of(case, sure=False)
        share = flagged_fraction(case, fault.logits(case, model), model)
        assert share >= DETECTED, (seed, share)


INT32 = torch.int32


def windows(kind: str, rows: int, keys: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    start = torch.randint(-5, keys + 9, (rows,), generator=draw, dtype=INT32)
    end = torch.randint(-5, keys + 9, (rows,), generator=draw, dtype=INT32)
    return (start, start.clone()) if kind == "empty" else (start, end)


@pytest.mark.parametrize("H", [1, 2, 24, 129, 1000])
def test_dense_schedules_are_those_of_the_definition(H: int) -> None:
    for kind, rows, parts in (("ragged", 37, 5), ("ragged", 1, 3), ("empty", 70, 4)):
        start, end = windows(kind, rows, 5000)
        out = torch.full((parts + 1, 2), -7, dtype=INT32)
        with scheduled("hunt", seed=H):
            PORTABLE_EMULATED.dense_metadata(start, end, 5000, H, out)
        assert torch.equal(out, schedule.dense_metadata(start, end, 5000, H, parts))


@pytest.mark.slow
@pytest.mark.parametrize("H", [1, 24, 600])
def test_dense_schedules_of_many_rounds(H: int) -> None:
    """One CTA weighs 4096 groups at a time, and weighs them again for the cuts."""
    start, end = windows("ragged", 4500 if H == 600 else 9000, 3000)
    out = torch.full((133, 2), -7, dtype=INT32)
    PORTABLE_EMULATED.dense_metadata(start, end, 3000, H, out)
    assert torch.equal(out, schedule.dense_metadata(start, end, 3000, H, 132))


@pytest.mark.parametrize("kind", ["next_n=1", "next_n=3", "next_n=9", "varlen", "empty"])
def test_paged_schedules_are_those_of_the_definition(kind: str) -> None:
    draw = torch.Generator().manual_seed(2)
    next_n = int(kind.partition("=")[2] or 1)
    lens = torch.randint(0, 3000, (90, next_n), generator=draw, dtype=INT32)
    if kind == "empty":
        lens.zero_()
    indices = torch.randint(0, 20, (90,), generator=draw, dtype=INT32).sort()[0]
    given = indices if kind == "varlen" else None
    out = torch.full((8, 2), -7, dtype=INT32)
    with scheduled("hunt", seed=next_n):
        PORTABLE_EMULATED.paged_metadata(lens, given, out)
    assert torch.equal(out, schedule.paged_metadata(lens, 7, given))


def test_warmup_names_the_kernels_of_a_problem() -> None:
    problem = parse("paged fp8 B=1 next_n=1 H=5 D=64 P=3 blocks=1 columns=1 L=3")
    names = PORTABLE_EMULATED.warmup(problem, torch.device("cpu"))
    assert any("paged<mqa::portable::Fp8, 8, 64" in name for name in names)
    assert any("PagedMetadata" in name for name in names)
