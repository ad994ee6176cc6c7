"""Dense FP8 logits on Hopper are those of the definition and the oracle, in every variant."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import mqa
from mqa.problem import LOGITS_DTYPES, WEIGHTS_DTYPES, DenseProblem
from mqa.reference import definition
from mqa.testing import Case, assert_bitwise, guards_intact, read_corpus
from mqa.testing.strategies import dense_problems

pytestmark = pytest.mark.gpu
HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)
PAIRS = list(itertools.product(HEADS, HEAD_DIMS))
FEW = ((1, 1), (5, 63), (17, 700))
MANY = ((64, 4100), (300, 1000))
MANY_OF = ((8, 32), (16, 128), (32, 64), (64, 128), (128, 32))
"""Every pair of H and D is tried at few rows, these at many."""
CORPUS = Path(__file__).parents[1] / "corpus" / "all.txt"
DENSE_FP8 = [
    problem
    for problem in read_corpus(CORPUS)
    if isinstance(problem, DenseProblem) and problem.format == "fp8"
]


def variants(case: Case, longest: int) -> Iterator[Case]:
    """The same data for every logits dtype, weights dtype, clean or not, full or compressed."""
    for out, weights, clean, M in itertools.product(
        LOGITS_DTYPES, WEIGHTS_DTYPES, (True, False), (0, longest)
    ):
        facts = {"out": out, "weights": weights, "clean": clean, "M": M}
        w = case.tensors["w"].to(getattr(torch, weights))  # Exact: integers up to 8 times 2^c.
        yield dataclasses.replace(
            case,
            problem=dataclasses.replace(case.problem, **facts),
            tensors={**case.tensors, "w": w},
        )


def defined(case: Case, M: int) -> Tensor:
    """The definition's logits in float64, where in the exact regime nothing is rounded."""
    t = case.tensors
    inputs = (t["q"], None, t["kv"], t["kv_scale"], t["w"], t["start"], t["end"])
    return definition.dense(*inputs, max_seqlen_k=M)


@pytest.mark.parametrize(("H", "D"), PAIRS)
def test_every_variant_is_the_definition_rounded_once(sm90: Any, H: int, D: int) -> None:
    for at, (S, N) in enumerate(FEW + MANY if (H, D) in MANY_OF else FEW):
        windows = ("full", "random", "packed", "random", "causal")[at]
        line = f"dense fp8 S={S} N={N} H={H} D={D} regime=exact windows={windows} seed={H + D}"
        case = sm90.case(line)
        longest = max(1, int(case.data.lengths().max()))
        wants = {M: defined(case, M) for M in {0, longest}}
        for variant in variants(case, longest):
            problem, want = variant.problem, wants[variant.problem.M]
            out = variant.new_out()
            sm90.run(variant, out=out)
            where = None if problem.clean else want.isfinite().cpu().numpy()
            rounded = definition.round_once(want, out.dtype)
            assert_bitwise(out, rounded, where=where, replay=problem)
            assert guards_intact(out)


BOUNDED = (
    "S=1 N=300 windows=full",
    "S=17 N=260 M=260 weights=bfloat16 out=bfloat16 clean=0 windows=packed",
    "S=9 N=513 out=float16 windows=full",
    "S=37 N=300 weights=bfloat16 sms=132 windows=random",
    "S=5 N=100 M=41 out=bfloat16 windows=causal",
)


@pytest.mark.parametrize(("H", "D"), PAIRS)
def test_bounded_logits_are_within_the_derived_tolerance(sm90: Any, H: int, D: int) -> None:
    for facts in BOUNDED:
        sm90.check(f"dense fp8 H={H} D={D} {facts} seed={H + D}")


@pytest.mark.parametrize("problem", DENSE_FP8, ids=str)
def test_corpus_lines_are_right_or_refused(sm90: Any, problem: DenseProblem) -> None:
    if sm90.accepts(problem):
        sm90.check(problem)
        return
    with pytest.raises(mqa.BackendUnavailableError, match=sm90.backend.name):
        sm90.run(sm90.case(problem))


@settings(max_examples=150)
@given(problem=dense_problems(formats=("fp8",), heads=HEADS, head_dims=HEAD_DIMS))
def test_drawn_problems_are_right_unless_their_layout_is_refused(
    sm90: Any, problem: DenseProblem
) -> None:
    if sm90.accepts(problem):
        sm90.check(problem)
    else:
        assert problem.layout, "nothing else can be in the way"


SEVERAL_BLOCKS = dense_problems(
    formats=("fp8",),
    regimes=("exact",),
    heads=HEADS,
    head_dims=HEAD_DIMS,
    max_rows=140,
    max_keys=1300,
    layouts=False,
)


@settings(max_examples=40)
@given(problem=SEVERAL_BLOCKS)
def test_drawn_problems_of_several_blocks_are_right(sm90: Any, problem: DenseProblem) -> None:
    sm90.check(problem)


@pytest.mark.parametrize("out", LOGITS_DTYPES)
@pytest.mark.parametrize("facts", ["S=3 N=257", "S=1 N=1", "S=0 N=9", "S=2 N=0", "S=2 N=9 M=1025"])
def test_a_fresh_result_has_rows_of_whole_kibibytes(sm90: Any, facts: str, out: str) -> None:
    case = sm90.case(f"dense fp8 H=16 D=64 {facts} out={out}")
    got = sm90.run(case)
    step = 1024 // got.element_size()
    assert got.shape == (case.problem.rows, case.problem.width)
    assert got.stride() == (max(1, -(-case.problem.width // step)) * step, 1)
    sm90.judge(case, got)


@pytest.mark.parametrize("facts", ["S=0 N=5", "S=0 N=0", "S=3 N=0", "S=0 N=5 M=3", "S=0 N=0 M=3"])
def test_results_without_entries_are_legal(sm90: Any, facts: str) -> None:
    for sms in (0, 132):
        assert sm90.run(sm90.case(f"dense fp8 H=64 D=128 {facts} sms={sms}")).numel() == 0


def test_empty_kv_is_cleaned(sm90: Any) -> None:
    for S, M, sms in ((1, 1, 0), (3, 7, 0), (3, 7, 67), (300, 1025, 0)):
        case = sm90.case(f"dense fp8 S={S} N=0 H=64 D=128 M={M} windows=random sms={sms}")
        got = sm90.run(case, out=case.new_out())
        assert (got == -torch.inf).all()
