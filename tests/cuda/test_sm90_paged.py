"""Paged FP8 logits on Hopper are those of the oracle, in every variant."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from paged_cases import HEAD_DIMS, HEADS, PAGE_SIZES, as_runs, paged_line

import mqa
from mqa.problem import LOGITS_DTYPES, WEIGHTS_DTYPES, PagedProblem
from mqa.testing import Case, assert_bitwise, guards_intact, read_corpus
from mqa.testing.oracle import logits
from mqa.testing.strategies import paged_problems

pytestmark = pytest.mark.gpu
PAIRS = [*itertools.product(HEADS, HEAD_DIMS)]
CORPUS = Path(__file__).parents[1] / "corpus" / "all.txt"
PAGED_FP8 = [
    problem
    for problem in read_corpus(CORPUS)
    if isinstance(problem, PagedProblem) and problem.format == "fp8"
]


def variants(case: Case) -> Iterator[Case]:
    """The same data for every logits dtype, weights dtype, clean or not."""
    for out, weights, clean in itertools.product(LOGITS_DTYPES, WEIGHTS_DTYPES, (True, False)):
        facts = {"out": out, "weights": weights, "clean": clean}
        w = case.tensors["w"].to(getattr(torch, weights))  # Exact: integers up to 8 times 2^c.
        problem = dataclasses.replace(case.problem, **facts)
        yield dataclasses.replace(case, problem=problem, tensors={**case.tensors, "w": w})


@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 20])
@pytest.mark.parametrize(("H", "D"), PAIRS)
def test_every_variant_is_the_definition_rounded_once(
    sm90: Any, H: int, D: int, next_n: int
) -> None:
    P = PAGE_SIZES[(next_n + H // 8 + D // 32) % 6]
    for rank, tokens in ((1, 597), (2, 131)):
        facts = f"next_n={next_n} H={H} D={D} lens_rank={rank} lens=random regime=exact clean=1"
        case = sm90.case(paged_line(P, tokens, f"{facts} seed={next_n}"))
        want = logits(case)
        for variant in variants(case):
            out = variant.new_out()
            sm90.run(variant, out=out)
            where = None if variant.problem.clean else want.valid
            assert_bitwise(out, want.values, where=where, replay=variant.problem)
            assert guards_intact(out)


@pytest.mark.parametrize("P", PAGE_SIZES)
@pytest.mark.parametrize("H", HEADS)
def test_every_page_size_serves_every_number_of_rows(sm90: Any, H: int, P: int) -> None:
    for at, next_n in enumerate((1, 2, 4, 8, 9, 17)):
        facts = f"next_n={next_n} H={H} D={HEAD_DIMS[at % 3]} regime=exact seed={at}"
        for lens in ("full", "random", "ramp"):
            sm90.check(paged_line(P, 520 + next_n, f"{facts} lens={lens} clean={at % 2}", B=2))


@pytest.mark.parametrize("next_n", [2, 8, 9, 20, 33, 70])
@pytest.mark.parametrize("H", HEADS)
def test_runs_of_any_length_share_the_pages_of_their_longest_row(
    sm90: Any, H: int, next_n: int
) -> None:
    for at, lens in enumerate(("full", "random", "ramp")):
        facts = f"next_n={next_n} H={H} D=64 lens={lens} regime=exact clean=1 seed={at}"
        case = sm90.case(paged_line(PAGE_SIZES[at + 1], 300, facts, B=4))
        want = logits(case).values
        assert_bitwise(sm90.call(case, **as_runs(case)), want, replay=case.problem)


@pytest.mark.parametrize("lens_rank", [1, 2])
@pytest.mark.parametrize(("H", "D"), PAIRS)
def test_varlen_batches_are_right(sm90: Any, H: int, D: int, lens_rank: int) -> None:
    for at, P in enumerate(PAGE_SIZES):
        facts = f"next_n=1 H={H} D={D} varlen=1 lens_rank={lens_rank} regime=exact lens=random"
        more = f"clean={at % 2} out={LOGITS_DTYPES[at % 3]} seed={at}"
        sm90.check(paged_line(P, 280, f"{facts} {more}", B=41))


BOUNDED = (
    (64, 300, "next_n=1 lens=full clean=1"),
    (8, 260, "next_n=2 weights=bfloat16 out=bfloat16 lens=random"),
    (256, 513, "next_n=4 out=float16 lens=ramp lens_rank=1"),
    (32, 300, "next_n=8 weights=bfloat16 sms=132 lens=random clean=1"),
    (16, 100, "next_n=9 out=bfloat16 lens=random clean=1"),
    (128, 1300, "next_n=1 varlen=1 lens=random"),
)


@pytest.mark.parametrize(("H", "D"), PAIRS)
def test_bounded_logits_are_within_the_derived_tolerance(sm90: Any, H: int, D: int) -> None:
    for P, tokens, facts in BOUNDED:
        sm90.check(paged_line(P, tokens, f"H={H} D={D} {facts} seed={H + D}", B=2))


@pytest.mark.parametrize("problem", PAGED_FP8, ids=str)
def test_corpus_lines_are_right_or_refused(sm90: Any, problem: PagedProblem) -> None:
    if sm90.accepts(problem):
        sm90.check(problem)
        return
    with pytest.raises(mqa.BackendUnavailableError, match=sm90.backend.name):
        sm90.run(sm90.case(problem))


DRAWN = {"formats": ("fp8",), "heads": HEADS, "head_dims": HEAD_DIMS, "page_sizes": PAGE_SIZES}


@settings(max_examples=150)
@given(problem=paged_problems(**DRAWN, max_next_n=9, max_keys=300))
def test_drawn_problems_are_right(sm90: Any, problem: PagedProblem) -> None:
    assert sm90.accepts(problem), "no layout that is drawn is in the way"
    sm90.check(problem)


@settings(max_examples=40)
@given(
    problem=paged_problems(
        **DRAWN, regimes=("exact",), max_batch=20, max_next_n=20, max_keys=1300, layouts=False
    )
)
def test_drawn_problems_of_many_groups_are_right(sm90: Any, problem: PagedProblem) -> None:
    sm90.check(problem)


INPUTS = (
    "cache_stride=9216",
    "lens_stride=7x3 lens_off=4",
    "lens_stride=0",
    "table_stride=20x3 table_off=12",
    "w_stride=129 w_off=4",
    "w_stride=131 w_off=6 weights=bfloat16",
    "w_stride=0",
    "q_stride=65536x32768x256",
    "out=bfloat16 out_off=2 out_stride=301",
    "out_off=12 out_stride=333",
)


@pytest.mark.parametrize("layout", INPUTS)
def test_strided_and_offset_tensors_are_right(sm90: Any, layout: str) -> None:
    for H, clean in ((8, 1), (64, 0), (128, 1)):
        facts = f"next_n=2 H={H} D=128 lens=random regime=exact clean={clean} seed=6"
        sm90.check(paged_line(64, 301, f"{facts} {layout}"))


@pytest.mark.parametrize("out", LOGITS_DTYPES)
@pytest.mark.parametrize("L", [1, 255, 257])
def test_a_fresh_result_has_rows_of_whole_kibibytes(sm90: Any, L: int, out: str) -> None:
    case = sm90.case(paged_line(64, L, f"next_n=2 H=16 D=64 out={out}"))
    got = sm90.run(case)
    step = 1024 // got.element_size()
    assert got.shape == (6, L)
    assert got.stride() == (-(-L // step) * step, 1)
    sm90.judge(case, got)
