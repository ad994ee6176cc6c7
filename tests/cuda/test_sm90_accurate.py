"""`sm90-accurate`: FP8 logits on Hopper whose sums keep float32's bits, for who asks by name."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from mx_cases import assert_paged_alike
from paged_cases import HEAD_DIMS, HEADS, PAGE_SIZES, VARIANTS, paged_line
from torch import Tensor

import mqa
from mqa.problem import LOGITS_DTYPES, WEIGHTS_DTYPES, DenseProblem
from mqa.reference import definition
from mqa.testing import Case, assert_bitwise
from mqa.testing.strategies import dense_problems

pytestmark = pytest.mark.gpu
PAIRS = [*itertools.product(HEADS, HEAD_DIMS)]
PAGED = ((32, 8, 32), (16, 8, 128), (128, 1, 32), *VARIANTS)
CODES = (0x7F, 0xFF)
DENSE_SHAPES = ("S=1 N=1", "S=17 N=700", "S=3 N=2600", "S=70 N=300")


@pytest.mark.parametrize(("H", "D"), PAIRS)
def test_exact_dense_logits_are_the_definition(accurate: Any, H: int, D: int) -> None:
    for at, sizes in enumerate(DENSE_SHAPES):
        windows = ("full", "random", "full", "packed")[at]
        facts = f"{sizes} H={H} D={D} regime=exact windows={windows} seed={H + at}"
        weights = WEIGHTS_DTYPES[at % 2]
        accurate.check(f"dense fp8 {facts} weights={weights}")
        accurate.check(
            f"dense fp8 {facts} weights={weights} clean=0 M=700 out_off=4 out_stride=711"
        )


@pytest.mark.parametrize(("H", "D"), [(8, 32), (32, 64), (64, 128)])
@pytest.mark.parametrize("out", LOGITS_DTYPES[1:])
def test_exact_short_logits_are_the_definition(accurate: Any, H: int, D: int, out: str) -> None:
    accurate.check(f"dense fp8 S=17 N=500 H={H} D={D} out={out} regime=exact windows=random seed=3")


@pytest.mark.parametrize(("H", "next_n", "D"), PAGED)
def test_exact_paged_logits_are_the_definition(accurate: Any, H: int, next_n: int, D: int) -> None:
    for at, P in enumerate(PAGE_SIZES):
        facts = f"next_n={next_n} H={H} D={D} regime=exact seed={at}"
        lens = (
            f"lens={('full', 'random', 'ramp')[at % 3]} lens_rank={1 + at % 2} clean={at // 2 % 2}"
        )
        accurate.check(paged_line(P, 430 + at, f"{facts} {lens}", B=2))


@pytest.mark.parametrize(("H", "D"), PAIRS)
def test_bounded_logits_are_within_the_derived_tolerance(accurate: Any, H: int, D: int) -> None:
    """Of an accumulator that is modelled bit for bit, so nothing is left open of a dot."""
    for seed in (1, 2):
        accurate.check(f"dense fp8 S=7 N=200 H={H} D={D} windows=full seed={seed}")


@pytest.mark.parametrize(("H", "next_n", "D"), PAGED)
def test_bounded_paged_logits_are_within_the_derived_tolerance(
    accurate: Any, H: int, next_n: int, D: int
) -> None:
    facts = f"next_n={next_n} H={H} D={D} lens=random clean=1 seed=5"
    accurate.check(paged_line(32, 200, facts, B=1 + 4 // next_n))


@settings(max_examples=40)
@given(
    problem=dense_problems(formats=("fp8",), heads=(8, 64), head_dims=HEAD_DIMS, outs=("float32",))
)
def test_drawn_problems_are_right_unless_their_layout_is_refused(
    accurate: Any, problem: DenseProblem
) -> None:
    if accurate.accepts(problem):
        accurate.check(problem)
    else:
        assert problem.layout, "nothing else can be in the way"


# ---- closer to the definition --------------------------------------------------------------------


def cancelling(accurate: Any, H: int, D: int) -> Case:
    """Dots whose large terms cancel in pairs of dims; the first pair of each 16 dims is small and
    adds up."""
    case = accurate.case(f"dense fp8 S=9 N=200 H={H} D={D} windows=full seed=5")
    generator = torch.Generator().manual_seed(H + D)
    large = (torch.arange(D // 2) % 8 != 0).float()
    for name, sign in (("q", 1.0), ("kv", -1.0)):
        shape = (*case.tensors[name].shape[:-1], D // 2)
        first = torch.rand(shape, generator=generator) * (347 * large + 0.5) + (99.5 * large + 0.5)
        second = torch.where(large > 0, sign, 1.0) * first
        pairs = torch.stack((first, second), -1).flatten(-2)
        case.tensors[name].copy_(pairs.to(torch.float8_e4m3fn))
    case.tensors["w"].abs_()
    case.tensors["kv_scale"].fill_(1.0)
    return case


def defined(case: Case) -> Tensor:
    t = case.tensors
    inputs = (t["q"], None, t["kv"], t["kv_scale"], t["w"], t["start"], t["end"])
    return definition.dense(*inputs)


@pytest.mark.parametrize(("H", "D"), [(8, 32), (64, 64), (64, 128), (128, 128)])
def test_sums_that_cancel_are_much_closer_to_the_definition(
    sm90: Any, accurate: Any, H: int, D: int
) -> None:
    """Terms up to 2^17.6 leave dots of a few units: beside the largest term 13 bits show nothing
    of these, 25 bits all."""
    case = cancelling(accurate, H, D)
    want = defined(case)
    assert (want > 0).all()
    plain, better = (((b.call(case).double() - want).abs() / want).max() for b in (sm90, accurate))
    assert better < 2.0**-16
    assert plain > 0.5


def test_bounded_data_is_closer_to_the_definition_too(sm90: Any, accurate: Any) -> None:
    case = accurate.case("dense fp8 S=20 N=300 H=64 D=128 windows=full seed=6")
    want = defined(case)
    errors = [(backend.call(case).double() - want).abs().sum() for backend in (sm90, accurate)]
    assert errors[0] > 64 * errors[1]


# ---- the same promises as others' ----------------------------------------------------------------


@pytest.mark.parametrize(("H", "D"), [(8, 128), (16, 64), (32, 128), (64, 32), (128, 64)])
def test_bits_do_not_depend_on_pages_neighbours_or_schedules(accurate: Any, H: int, D: int) -> None:
    case = accurate.case(f"dense fp8 S=72 N=900 H={H} D={D} windows=full seed=9")
    want, cuts = accurate.call(case), accurate.metadata(case)
    assert_paged_alike(accurate, case, want)
    for step in (1, 5, 33):
        rows = [accurate.call(case, slice(row, row + step)) for row in range(0, 72, step)]
        assert_bitwise(torch.cat(rows), want)
    garbage = torch.randint(-9, 99, cuts.shape, generator=torch.Generator().manual_seed(1)).int()
    for meta in (None, cuts, cuts.flip(0), garbage.to(accurate.device)):
        for _ in range(5):
            assert_bitwise(accurate.call(case, schedule_meta=meta), want)


@pytest.mark.parametrize(("H", "D"), [(8, 32), (64, 128), (128, 64)])
def test_nan_reaches_the_entries_that_use_it_and_no_others(accurate: Any, H: int, D: int) -> None:
    case = accurate.case(f"dense fp8 S=64 N=303 H={H} D={D} windows=full seed=4")
    t, want = case.tensors, accurate.call(case)
    for dim in range(0, D, 3):
        t["kv"].view(torch.uint8)[2 * dim + 1, dim] = CODES[dim % 2]
        want[:, 2 * dim + 1] = torch.nan
    t["kv_scale"][300] = torch.nan
    want[:, 300] = torch.nan
    t["q"].view(torch.uint8)[9, H - 3, D - 5] = CODES[0]
    t["w"][33, H - 1] = torch.nan
    want[9] = want[33] = torch.nan
    assert_bitwise(accurate.call(case), want)
    assert_paged_alike(accurate, case, want)


@pytest.mark.parametrize(("H", "D"), [(8, 32), (64, 128), (128, 64)])
def test_the_zero_plateau_is_plus_zero(accurate: Any, H: int, D: int) -> None:
    case = accurate.case(f"dense fp8 S=64 N=303 H={H} D={D} windows=full seed=4")
    q, k = (case.tensors[name].view(torch.uint8) for name in ("q", "kv"))
    q &= 0x7F
    k |= 0x80
    q[q == CODES[0]], k[k == CODES[1]] = 0x38, 0xB8
    got = accurate.call(case)
    assert_bitwise(got, torch.zeros_like(got))
    assert_paged_alike(accurate, case, got)


# ---- by name only --------------------------------------------------------------------------------


def test_it_is_never_chosen_by_default(sm90: Any, accurate: Any, setenv: Any) -> None:
    assert not accurate.backend.by_default
    for H, D, page_size in itertools.product(HEADS, HEAD_DIMS, (None, 64)):
        found = mqa.supports(H, D, "fp8", page_size=page_size, device=sm90.device)
        assert found.backend == sm90.backend.name
        assert accurate.backend.name not in found.reasons
    case = cancelling(accurate, 64, 128)
    assert_bitwise(sm90.call(case, backend=None), sm90.call(case))
    by_name = accurate.call(case)
    assert np.any(sm90.call(case).cpu().numpy() != by_name.cpu().numpy())
    setenv("MQA_BACKEND", accurate.backend.name)
    assert_bitwise(accurate.call(case, backend=None), by_name)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_it_refuses_mx_formats(accurate: Any, format: str) -> None:
    for line in (
        f"dense {format} S=3 N=40 H=64 D=128",
        paged_line(64, 99, "next_n=2 H=64 D=128", format=format),
    ):
        case = accurate.case(line)
        assert not accurate.accepts(case.problem)
        with pytest.raises(mqa.BackendUnavailableError, match=f"format={format}"):
            accurate.run(case)
    found = mqa.supports(64, 128, format, device=accurate.device)
    assert found.reasons[accurate.backend.name]


def test_a_warmup_by_name_loads_its_kernels(accurate: Any) -> None:
    options = {"device": accurate.device, "backend": accurate.backend.name}
    names = mqa.warmup(64, 128, "fp8", page_size=64, **options)
    assert all("Fp8Accurate" in name for name in names[:-1])
    assert len(names) > 1
