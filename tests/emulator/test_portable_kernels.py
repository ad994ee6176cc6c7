"""The portable kernels as an A100 would run them, through the public functions: what they compute
and what changes nothing. Plans are in tests/cuda/test_portable_plan.py."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from drawn import right_or_refused
from mutants import MARKS
from paged_cases import paged_line
from portable_cases import (
    FORMATS,
    LINES,
    QUICK,
    QUICK_IN_LINE,
    Runner,
    bad_block_ids_read_as_zeros,
    infinities_do_what_the_definition_says,
    nan_elsewhere_does_not_matter,
    nan_reaches_what_uses_it,
    plateau_is_plus_zero,
    same_bits_in_every_company,
    windows_of_every_kind,
)
from schedule_contents import CONTENTS
from torch import Tensor

import mqa
from mqa import devices
from mqa.cuda.operands import HEAD_DIMS
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
)
from mqa.testing.faults import DETECTED
from mqa.testing.strategies import dense_problems, paged_problems

pytestmark = MARKS
NAME = "portable-emulated"
INT32 = torch.int32
RUN = Runner(NAME, torch.device("cpu"), nullcontext)
SMALL: dict[str, Any] = {"heads": (8, 5), "head_dims": (64, 96), "outs": ("float32",)}
"""Choices of which few kernels are compiled: all else is drawn."""
ONE_QUICK = [
    pytest.param(format, marks=pytest.mark.slow if number else ())
    for number, format in enumerate(FORMATS)
]
FEW = settings(max_examples=max(4, settings.default.max_examples // 16))


def model_of(case: Case, *, sure: bool = True) -> Any:
    """How the emulator sums dots, to the bit; not `sure`: with room for what hardware may do."""
    if case.problem.regime == "exact":
        return accumulators.EXACT
    found = accumulators.named(PORTABLE_EMULATED.accumulator(case.problem.format))
    return dataclasses.replace(found, model=dataclasses.replace(found.model, confirmed=sure))


def check(line: str | Problem) -> None:
    """Right logits, written over NaN, and nothing written around them."""
    case = RUN.case(line)
    out = case.new_out()
    options = {"schedule_meta": case.stale_schedule()} if case.problem.sms else {}
    case.run(backend=NAME, out=out, **options)
    assert_logits(case, out, model_of(case))
    assert guards_intact(out)


@pytest.mark.parametrize(
    "line",
    [pytest.param(x, marks=() if x in QUICK | QUICK_IN_LINE else pytest.mark.slow) for x in LINES],
)
def test_logits_are_bitwise_the_definition_and_the_sums_of_the_model(line: str) -> None:
    with scheduled("hunt", seed=len(line)):
        check(f"{line} regime=exact")
    check(line)


def test_cases_have_every_kind_of_size() -> None:
    problems = [parse(line) for line in LINES]
    assert {problem.H for problem in problems} >= {1, 5, 8, 24, 64, 100, 128, 130}
    paged = [problem for problem in problems if isinstance(problem, PagedProblem)]
    assert {problem.P for problem in paged} >= {1, 3, 48, 64, 256}
    pairs = {(problem.format, problem.D) for problem in problems}
    assert pairs == {*itertools.product(FORMATS, (32, 64, 128))}
    rounds = {one.format for one in paged if one.P == 64 and one.L > 1024 and one.sms == 1}
    assert rounds == {*FORMATS}


@pytest.mark.parametrize("format", ONE_QUICK)
def test_a_dot_has_the_bits_of_its_model_and_of_no_other(format: str) -> None:
    """With one head, and weights and scales of one, a logit is the relu of a dot."""
    case = RUN.case(f"dense {format} S=30 N=64 H=1 D=128 windows=full seed=1")
    for ones in (case.tensors["w"], case.data.weights):
        ones[:] = 1
    if format == "fp8":
        for ones in (case.tensors["kv_scale"], case.data.key_scale):
            ones[:] = 1
    got, right = RUN.call(case), model_of(case)
    assert_bitwise(got, logits(case, right).values)
    hopper = dataclasses.replace(right.model, k=16, bits=25)
    wrong = [right.model, dataclasses.replace(right, model=hopper)]
    if format in ("fp8", "mxfp8"):
        wrong.append(dataclasses.replace(right, in_turn=True))
    for model in wrong:
        with pytest.raises(AssertionError, match="entries differ in bits"):
            assert_bitwise(got, logits(case, model).values)


@FEW
@given(
    problem=dense_problems(
        **SMALL, max_rows=7, max_keys=200, accepted_by=lambda problem: problem.sms <= 7
    ),
    seed=st.integers(0, 99),
    how=st.sampled_from(SCHEDULES),
)
def test_drawn_dense_problems_agree(problem: DenseProblem, seed: int, how: str) -> None:
    right_or_refused(PORTABLE_EMULATED, problem, how, seed, check)


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
    right_or_refused(PORTABLE_EMULATED, problem, how, seed, check)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("H", [1, 2, 7, 9, 17, 33, 65, 127, 129, 256, 300])
def test_any_number_of_heads(format: str, H: int) -> None:
    with scheduled("hunt", seed=H):
        check(f"dense {format} S=4 N=150 H={H} D=64 windows=random regime=exact")
        check(paged_line(48, 150, f"next_n=2 H={H} D=64 lens=ramp regime=exact", format=format))


@pytest.mark.parametrize("how", SCHEDULES)
def test_every_schedule_and_seed_gives_the_same_bits(how: str) -> None:
    case = RUN.case("dense fp8 S=5 N=300 H=24 D=64 windows=random seed=2 sms=2")
    cuts = case.stale_schedule()
    want = RUN.call(case, schedule_meta=cuts)
    with scheduled(how, seed=3) as launches:
        assert_bitwise(RUN.call(case, schedule_meta=cuts), want)
    assert len(launches) == 1


@pytest.mark.parametrize(
    ("contents", "paged"),
    [
        pytest.param(
            contents,
            paged,
            marks=pytest.mark.slow if (number, paged) != (8, True) else (),
        )
        for (number, contents), paged in itertools.product(enumerate(CONTENTS), (False, True))
    ],
)
def test_contents_of_a_schedule_do_not_change_bits(contents: str, paged: bool) -> None:
    line = "dense fp8 S=25 N=300 H=24 D=64 windows=random seed=1"
    case = RUN.case(paged_line(48, 300, "next_n=1 H=24 D=64 clean=1 lens=random", B=3))
    case = case if paged else RUN.case(line)
    t, want = case.tensors, RUN.call(case)
    if paged:
        fresh = schedule.paged_metadata(t["lens"], 3)
    else:
        fresh = schedule.dense_metadata(t["start"], t["end"], 300, 24, 3)
    assert_bitwise(RUN.call(case, schedule_meta=CONTENTS[contents](fresh).contiguous()), want)


@pytest.mark.parametrize("line", [
    "dense fp8 S=300 N=300 H=24 D=64 windows=empty regime=exact seed=6",
    paged_line(48, 130, "next_n=1 H=24 D=64 clean=1 lens=random regime=exact seed=6", B=40),
])  # fmt: skip
def test_ctas_share_a_call_without_a_schedule(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = RUN.case(line)
    if "dense" in line:
        for row in (0, 1, 9, 299):
            case.tensors["start"][row], case.tensors["end"][row] = row % 5, 300 - row % 9
    monkeypatch.setattr(devices, "_num_sms", {case.device: 3})
    with scheduled("random", seed=3):
        assert_bitwise(RUN.call(case), case.run(backend="reference"))


@pytest.mark.parametrize(
    ("format", "H"),
    [
        pytest.param(format, H, marks=() if (format, H) == ("fp8", 24) else pytest.mark.slow)
        for format, H in itertools.product(FORMATS, (1, 24, 130))
    ],
)
def test_a_row_has_the_same_bits_in_every_company(format: str, H: int) -> None:
    same_bits_in_every_company(RUN, format, H)


def test_empty_inverted_and_ragged_windows() -> None:
    windows_of_every_kind(RUN, 24)


@pytest.mark.parametrize(
    ("format", "D"),
    [
        pytest.param(
            format,
            D,
            marks=() if D == 128 or (format, D) == ("fp8", 32) else pytest.mark.slow,
        )
        for format, D in itertools.product(FORMATS, HEAD_DIMS)
    ],
)
def test_nan_reaches_what_uses_it_and_nothing_else(format: str, D: int) -> None:
    nan_reaches_what_uses_it(RUN, format, D)


@pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(f"sm_{n}", marks=pytest.mark.slow) for n in (89, 120))]
)
def test_newer_gpus_have_an_instruction_for_e4m3(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PORTABLE_EMULATED, "_arch", arch)
    assert PORTABLE_EMULATED.accumulator("fp8").endswith("_E4M3_IN_F16")
    check("dense fp8 S=3 N=130 H=24 D=64 windows=random seed=3")
    nan_reaches_what_uses_it(RUN, "fp8", 64)


@pytest.mark.parametrize("P", [48, 64])
@pytest.mark.parametrize("format", ONE_QUICK)
def test_a_row_is_untouched_by_nan_in_all_that_it_does_not_use(format: str, P: int) -> None:
    nan_elsewhere_does_not_matter(RUN, format, P)


@pytest.mark.parametrize(
    "H", [24, pytest.param(5, marks=pytest.mark.slow), pytest.param(130, marks=pytest.mark.slow)]
)
def test_infinities_do_what_the_definition_says(H: int) -> None:
    infinities_do_what_the_definition_says(RUN, H)


@pytest.mark.parametrize("format", ONE_QUICK)
def test_the_zero_plateau_is_plus_zero(format: str) -> None:
    plateau_is_plus_zero(RUN, format)


def test_nothing_to_score_still_cleans() -> None:
    assert RUN.call(RUN.case("dense fp8 S=3 N=0 H=24 D=64 M=9")).eq(-torch.inf).all()
    line = "B=2 next_n=2 H=24 D=64 P=48 blocks=0 columns=2 L=9 clean=1"
    assert RUN.call(RUN.case(f"paged fp8 {line}")).eq(-torch.inf).all()


@pytest.mark.parametrize("P", [48, 64])
@pytest.mark.parametrize("format", ONE_QUICK)
def test_bad_block_ids_read_as_zeros(format: str, P: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqa.values.blocks_exist", lambda *_: None)
    bad_block_ids_read_as_zeros(RUN, format, P)


def test_a_page_may_have_more_than_2_to_the_31_bytes() -> None:
    """Of which only the first tokens are touched: their scales lie behind all others' values."""
    P, H, D = 2**24 + 64, 8, 128
    cache = torch.empty(1, P, 1, D + 4, dtype=torch.uint8)
    stored = cache.view(-1)
    stored[: 3 * D] = 0x38
    stored[P * D :][:12].view(torch.float32).copy_(torch.tensor([1.0, 2.0, 3.0]))
    q = stored[:D].repeat(H).view(1, 1, H, D).view(torch.float8_e4m3fn)
    lens, table = torch.tensor([[3]], dtype=INT32), torch.zeros(1, 1, dtype=INT32)
    weights = torch.ones(1, H)
    got = mqa.fp8_fp4_paged_mqa_logits(q, cache, weights, lens, table, None, 3, backend=NAME)
    assert got.tolist() == [[H * D * 1.0, H * D * 2.0, H * D * 3.0]]


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
        case = RUN.case(f"dense {format} S=5 N=60 H=24 D=64 windows=full seed=7")
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
        share = flagged_fraction(case, RUN.call(case), model)
        assert share == 0 if name == "none" else share >= DETECTED, name


@pytest.mark.slow
@pytest.mark.parametrize("fault", BOUNDED_FAULTS, ids=[fault.name for fault in BOUNDED_FAULTS])
@pytest.mark.parametrize("format", FORMATS)
def test_bounded_cases_show_every_fault_on_every_seed(format: str, fault: Any) -> None:
    for seed in range(8):
        case = RUN.case(f"dense {format} S=8 N=40 H=64 D=128 windows=full seed={seed}")
        if fault.applies(case.data):
            model = model_of(case, sure=False)
            share = flagged_fraction(case, fault.logits(case, model), model)
            assert share >= DETECTED, (seed, share)


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
