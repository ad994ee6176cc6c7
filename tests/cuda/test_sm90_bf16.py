"""Logits of bfloat16 on Hopper: on a GPU, and of the same kernels emulated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mx_cases import assert_paged_alike
from paged_cases import HEAD_DIMS, HEADS, PAGE_SIZES, VARIANTS, paged_line, seen, used_tokens
from torch import Tensor

import mqa
from mqa.problem import LOGITS_DTYPES, WEIGHTS_DTYPES, DenseProblem, PagedProblem
from mqa.reference import definition
from mqa.testing import (
    BOUNDED_FAULTS,
    EXACT_FAULTS,
    Case,
    Fault,
    assert_bitwise,
    flagged_fraction,
    guards_intact,
)
from mqa.testing.faults import DETECTED
from mqa.testing.strategies import dense_problems, paged_problems


def quick(*shapes: Any) -> list[Any]:
    """The first two shapes, and the others for whoever has more time: each is a kernel to compile
    and to emulate."""
    rest = (pytest.param(*shape, marks=pytest.mark.slow) for shape in shapes[2:])
    return [*shapes[:2], *rest]


SPREAD = quick((64, 128), (8, 32), (8, 128), (16, 64), (32, 32), (128, 64))
TWO = [SPREAD[0], pytest.param(8, 32, marks=pytest.mark.slow)]
PAIRS = [*itertools.product(HEADS, HEAD_DIMS)]
PAGED = ((32, 8, 32), (16, 8, 128), (128, 1, 32), *VARIANTS)
ON_GPU = pytest.mark.parametrize(
    "bf16", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True
)
N = 150
SMALL: dict[str, Any] = {"formats": ("bf16",), "heads": (64,), "head_dims": (128,)}
"""Choices of which few kernels are compiled: all else is drawn."""


def dense_case(bf16: Any, H: int, D: int, S: int = 12, facts: str = "windows=full") -> Case:
    return bf16.case(f"dense bf16 S={S} N={N} H={H} D={D} seed=4 {facts}")


def defined(case: Case) -> Tensor:
    t = case.tensors
    inputs = (t["q"], None, t["kv"], None, t["w"], t["start"], t["end"])
    return definition.round_once(definition.dense(*inputs), torch.float32)


# ---- the definition ------------------------------------------------------------------------------


@pytest.mark.parametrize(("H", "D"), SPREAD)
def test_exact_dense_logits_are_the_definition(bf16: Any, H: int, D: int) -> None:
    for at, sizes in enumerate(("S=1 N=1", "S=11 N=200", "S=3 N=300", "S=0 N=5", "S=3 N=0")):
        weights, windows = WEIGHTS_DTYPES[at % 2], ("full", "random", "packed")[at % 3]
        line = f"dense bf16 {sizes} H={H} D={D} regime=exact windows={windows} seed={H + at}"
        bf16.check(f"{line} weights={weights}")
        bf16.check(f"{line} weights={weights} clean=0 M=305 out_off=4 out_stride=311")


@ON_GPU
@pytest.mark.parametrize(("H", "D"), PAIRS)
def test_every_dense_kernel_is_right_on_a_gpu(bf16: Any, H: int, D: int) -> None:
    for at, out in enumerate(LOGITS_DTYPES):
        facts = f"H={H} D={D} out={out} windows=random seed={at} weights={WEIGHTS_DTYPES[at % 2]}"
        bf16.check(f"dense bf16 S=70 N=700 {facts} regime=exact")
        bf16.check(f"dense bf16 S=3 N=2600 {facts} regime=exact M=2600 clean=0")
        bf16.check(f"dense bf16 S=7 N=200 {facts}")


@pytest.mark.parametrize(
    ("H", "next_n", "D"), quick((64, 2, 128), (8, 1, 32), (8, 1, 64), (16, 8, 128), (64, 2, 32))
)
def test_exact_paged_logits_are_the_definition(bf16: Any, H: int, next_n: int, D: int) -> None:
    for at, P in enumerate(PAGE_SIZES):
        lens = f"lens={('full', 'random', 'ramp')[at % 3]} lens_rank={1 + at % 2}"
        facts = f"next_n={next_n} H={H} D={D} regime=exact seed={at} {lens} clean={at // 2 % 2}"
        bf16.check(paged_line(P, 280 + at, facts, B=2, format="bf16"))


@ON_GPU
@pytest.mark.parametrize(("H", "next_n", "D"), PAGED)
def test_every_width_of_a_group_is_right_on_a_gpu(bf16: Any, H: int, next_n: int, D: int) -> None:
    for at, P in enumerate(PAGE_SIZES):
        out, rank = LOGITS_DTYPES[at % 3], 1 + at % 2
        facts = f"next_n={next_n} H={H} D={D} out={out} lens_rank={rank} clean={at % 2} seed={at}"
        bf16.check(paged_line(P, 430 + at, f"{facts} lens=random regime=exact", format="bf16"))
        bf16.check(paged_line(P, 200, f"{facts} lens=random", B=2, format="bf16"))


@pytest.mark.parametrize("P", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_varlen_batches_and_many_rows_of_a_request_are_right(bf16: Any, P: int) -> None:
    facts = "H=64 D=128 regime=exact lens=random clean=1"
    bf16.check(paged_line(P, 150, f"next_n=1 varlen=1 {facts} sms=3", B=13, format="bf16"))
    bf16.check(paged_line(P, 150, f"next_n=9 {facts}", B=2, format="bf16"))


@pytest.mark.parametrize("next_n", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_long_requests_go_round_the_ring_of_stages(bf16: Any, next_n: int) -> None:
    facts = f"next_n={next_n} H=64 D=128 sms=1 lens=random regime=exact"
    bf16.check(paged_line(64, 1500, facts, B=2, format="bf16"))


@pytest.mark.parametrize(("H", "D"), SPREAD)
def test_bounded_logits_are_within_the_derived_tolerance(bf16: Any, H: int, D: int) -> None:
    """Of an accumulator that is modelled bit for bit; seeds of which one moves the exponents of q
    and k to both ends of their range."""
    for seed in (1, 3, 7, 11):
        bf16.check(f"dense bf16 S=3 N=100 H={H} D={D} windows=full seed={seed}")


@settings(max_examples=15)
@given(problem=dense_problems(**SMALL, outs=("float32",), accepted_by=lambda one: one.sms < 8))
def test_drawn_problems_are_right_unless_their_layout_is_refused(
    bf16: Any, problem: DenseProblem
) -> None:
    if bf16.accepts(problem):
        bf16.check(problem)
    else:
        assert problem.layout, "nothing else can be in the way"


@settings(max_examples=12)
@given(data=st.data())
def test_drawn_paged_problems_are_right(bf16: Any, data: st.DataObject) -> None:
    sizes = {"page_sizes": PAGE_SIZES, "max_batch": 3, "max_next_n": 2, "outs": ("float32",)}
    few = paged_problems(**SMALL, **sizes, accepted_by=lambda one: one.sms < 8)
    problem: PagedProblem = data.draw(few)
    assert bf16.accepts(problem), "no layout that is drawn is in the way"
    bf16.check(problem)


# ---- the same promises as others' ----------------------------------------------------------------


@pytest.mark.parametrize(("H", "D"), TWO)
def test_bits_do_not_depend_on_pages_neighbours_or_schedules(bf16: Any, H: int, D: int) -> None:
    case = dense_case(bf16, H, D, 16)
    want, cuts = bf16.call(case), bf16.metadata(case, 3)
    assert_paged_alike(bf16, case, want)
    rows = [bf16.call(case, slice(row, row + 5)) for row in range(0, 16, 5)]
    assert_bitwise(torch.cat(rows), want)
    garbage = torch.randint(-9, 99, cuts.shape, generator=torch.Generator().manual_seed(1)).int()
    for meta in (cuts, cuts.flip(0), garbage.to(bf16.device)):
        assert_bitwise(bf16.call(case, schedule_meta=meta), want)


def test_rows_that_lie_apart_give_the_same_bits(bf16: Any) -> None:
    apart = "kv_stride=136 q_stride=9216x144 w_stride=70 w_off=4 start_stride=2 end_off=4"
    want = bf16.call(dense_case(bf16, 64, 128))
    assert_bitwise(bf16.call(dense_case(bf16, 64, 128, facts=f"windows=full {apart}")), want)
    line = paged_line(16, 150, "next_n=2 H=64 D=128 lens=random seed=5 clean=1", format="bf16")
    pages = bf16.case(line), bf16.case(f"{line} cache_stride=2056 table_stride=40")
    assert_bitwise(*map(bf16.call, pages))


@pytest.mark.parametrize(("H", "D"), TWO)
def test_nan_reaches_the_entries_that_use_it_and_no_others(bf16: Any, H: int, D: int) -> None:
    case = dense_case(bf16, H, D)
    t, want = case.tensors, bf16.call(case)
    for dim in range(0, D, 3):
        t["kv"][dim + 1, dim] = torch.nan
        want[:, dim + 1] = torch.nan
    t["q"][9, H - 3, D - 5] = torch.nan
    t["w"][5, H - 1] = torch.nan
    want[9] = want[5] = torch.nan
    assert_bitwise(bf16.call(case), want)
    assert_paged_alike(bf16, case, want)


def test_what_a_row_does_not_use_may_be_nan(bf16: Any) -> None:
    """All other rows, and every token outside the window of row 1."""
    case = dense_case(bf16, 64, 128)
    t = case.tensors
    t["start"][1], t["end"][1] = 61, 131
    want = bf16.call(case)[1:2, 61:131].clone()
    others, position = torch.arange(12) != 1, torch.arange(N)
    for name, where in (("q", others), ("w", others), ("kv", (position < 61) | (position > 130))):
        t[name][where.to(bf16.device)] = torch.nan
    full = bf16.call(case)
    assert_bitwise(full[1:2, 61:131], want)
    assert (full[1, :61] == -torch.inf).all()
    assert (full[1, 131:] == -torch.inf).all()


def test_unused_pages_and_tails_of_pages_are_never_used(bf16: Any) -> None:
    """A case has NaN there; infinities and zeros give the same bits."""
    line = paged_line(32, 150, "next_n=2 H=64 D=128 lens=random seed=4 clean=1", format="bf16")
    case = bf16.case(line)
    want, used = bf16.call(case), used_tokens(case)
    assert not used.all()
    assert not want.isnan().any()
    assert_bitwise((want != -torch.inf).float(), seen(case).float())
    for filler in (0.0, torch.inf):
        case.tensors["cache"].squeeze(2)[~used] = filler
        assert_bitwise(bf16.call(case), want)


@pytest.mark.parametrize(("H", "D"), TWO)
def test_infinities_do_what_the_definition_says(bf16: Any, H: int, D: int) -> None:
    case = dense_case(bf16, H, D, facts="windows=full regime=exact")
    t = case.tensors
    for n in range(0, N, 7):
        t["kv"][n, n % D] = torch.inf if n % 2 else -torch.inf
    t["q"][:6].abs_()
    t["q"][0, 0, 7] = t["q"][4, :, 9] = torch.inf
    t["q"][1, :, 14] = 0
    t["w"][2, -1] = 0
    got, want = bf16.call(case), defined(case)
    for kind in (torch.isinf, torch.isnan, torch.isfinite):
        assert kind(want).any()
    assert_bitwise(got, want)


@pytest.mark.parametrize(("H", "D"), TWO)
def test_the_zero_plateau_is_plus_zero(bf16: Any, H: int, D: int) -> None:
    case = dense_case(bf16, H, D)
    assert (bf16.call(case) != 0).float().mean() > 0.2
    case.tensors["q"].abs_()
    case.tensors["kv"].abs_().neg_()
    for weights in (case.tensors["w"], -case.tensors["w"].abs()):
        got = bf16.call(case, weights=weights)
        assert_bitwise(got, torch.zeros_like(got))


@pytest.mark.parametrize("fault", BOUNDED_FAULTS, ids=lambda fault: fault.name)
def test_bounded_cases_show_the_faults(bf16: Any, fault: Fault) -> None:
    for seed in range(3):
        case = bf16.case(f"dense bf16 S=6 N=60 H=64 D=128 windows=full seed={seed}")
        if fault.applies(case.data):
            model = bf16.model_of("bf16")
            share = flagged_fraction(case, fault.logits(case, model), model)
            assert share >= DETECTED, (fault.name, seed)
    case = bf16.case("dense bf16 S=6 N=60 H=64 D=128 windows=full regime=exact")
    for exact in EXACT_FAULTS:
        assert not exact.applies(case.data) or flagged_fraction(case, exact.logits(case)) > DETECTED


def test_faults_fed_to_the_kernels_are_flagged(bf16: Any) -> None:
    case = bf16.case("dense bf16 S=6 N=60 H=64 D=128 windows=full seed=2")
    model, q = bf16.model_of("bf16"), case.tensors["q"].clone()
    assert flagged_fraction(case, bf16.run(case), model) == 0
    for dims in ((0, 1), (5, 127), (63, 64)):
        case.tensors["q"].copy_(q)
        case.tensors["q"][..., list(dims)] = q[..., list(dims[::-1])]
        assert flagged_fraction(case, bf16.run(case), model) >= DETECTED, dims


def test_an_out_of_any_stride_is_filled_and_nothing_around_it(bf16: Any) -> None:
    for facts in ("out_off=4 out_stride=161 clean=0", "out=bfloat16 out_off=2 out_stride=159"):
        case = dense_case(bf16, 64, 128, facts=f"windows=random {facts}")
        out = case.new_out()
        assert bf16.run(case, out=out) is out
        assert guards_intact(out)


@ON_GPU
def test_it_is_what_a_hopper_gpu_runs_by_default(bf16: Any) -> None:
    for H, D, page_size in itertools.product(HEADS, HEAD_DIMS, (None, 64)):
        found = mqa.supports(H, D, "bf16", page_size=page_size, device=bf16.device)
        assert found.backend == "sm90"
        assert found.reasons["sm90-accurate"]
    names = mqa.warmup(64, 128, "bf16", page_size=64, device=bf16.device)
    assert len(names) > 1
    assert all("Bf16" in name for name in names[:-1])
