"""MXFP8 and MXFP4 logits on Hopper are those of the definition and the oracle, dense and paged."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mx_cases import FORMATS, HEAD_DIMS, HEADS, KINDS, NEXT_N, mx_line, short_dtype
from paged_cases import PAGE_SIZES

import mqa
from mqa.problem import WEIGHTS_DTYPES, DenseProblem, Problem
from mqa.reference import definition
from mqa.testing import Case, assert_bitwise, guards_intact, read_corpus
from mqa.testing.oracle import logits
from mqa.testing.strategies import dense_problems, paged_problems

pytestmark = pytest.mark.gpu
CORPUS = Path(__file__).parents[1] / "corpus" / "all.txt"
LINES = [problem for problem in read_corpus(CORPUS) if problem.format in FORMATS]


def variants(case: Case, lengths: tuple[int, ...] = (0,)) -> Iterator[Case]:
    """The same data for two logits dtypes, both weights dtypes, clean or not, and, of a dense
    case, with these values of M."""
    problem = case.problem
    outs = ("float32", short_dtype(problem.format, problem.H, problem.D))
    for out, weights, clean, M in itertools.product(outs, WEIGHTS_DTYPES, (True, False), lengths):
        facts = {"out": out, "weights": weights, "clean": clean} | ({"M": M} if M else {})
        w = case.tensors["w"].to(getattr(torch, weights))  # Exact: integers up to 8 times 2^c.
        yield dataclasses.replace(
            case,
            problem=dataclasses.replace(problem, **facts),
            tensors={**case.tensors, "w": w},
        )


def dense_shapes(H: int) -> Iterator[str]:
    """Few rows and many: more than two blocks of 512 columns, more tokens than a ring holds."""
    many = 2 * (512 // H) + 3
    yield "S=1 N=1 windows=full"
    yield "S=5 N=63 windows=random"
    yield "S=17 N=700 windows=packed"
    yield "S=3 N=2600 windows=full"
    yield f"S={many} N=900 windows=random"
    yield f"S={many} N=600 windows=causal"


@pytest.mark.parametrize("next_n", [1, 2, 4, 8])
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("format", FORMATS)
def test_long_requests_go_round_the_ring_of_stages(
    sm90: Any, format: str, D: int, next_n: int
) -> None:
    for sms in (1, 3):
        facts = f"next_n={next_n} H=64 D={D} sms={sms} lens=random regime=exact seed={sms}"
        sm90.check(mx_line(format, 64, 9000, facts, B=2))


@pytest.mark.parametrize(("format", "H", "D"), KINDS)
def test_every_dense_variant_is_the_definition_rounded_once(
    sm90: Any, format: str, H: int, D: int
) -> None:
    for facts in dense_shapes(H):
        case = sm90.case(f"dense {format} H={H} D={D} regime=exact seed={H + D} {facts}")
        t, longest = case.tensors, max(1, int(case.data.lengths().max()))
        inputs = (t["q"], t["q_scale"], t["kv"], t["kv_scale"], t["w"], t["start"], t["end"])
        wants = {M: definition.dense(*inputs, max_seqlen_k=M) for M in {0, longest}}
        for variant in variants(case, (0, longest)):
            problem, want = variant.problem, wants[variant.problem.M]
            out = variant.new_out()
            sm90.run(variant, out=out)
            where = None if problem.clean else want.isfinite().cpu().numpy()
            rounded = definition.round_once(want, out.dtype)
            assert_bitwise(out, rounded, where=where, replay=problem)
            assert guards_intact(out)


@pytest.mark.parametrize("next_n", NEXT_N)
@pytest.mark.parametrize(("format", "H", "D"), KINDS)
def test_every_paged_variant_is_the_definition_rounded_once(
    sm90: Any, format: str, H: int, D: int, next_n: int
) -> None:
    P = PAGE_SIZES[(next_n + H // 8 + D // 64) % 6]
    for rank, tokens in ((1, 597), (2, 131)):
        facts = f"next_n={next_n} H={H} D={D} lens_rank={rank} lens=random regime=exact clean=1"
        case = sm90.case(mx_line(format, P, tokens, f"{facts} seed={next_n}"))
        want = logits(case)
        for variant in variants(case):
            if next_n != 8 and variant.problem.out != "float32":
                continue
            out = variant.new_out()
            sm90.run(variant, out=out)
            where = None if variant.problem.clean else want.valid
            assert_bitwise(out, want.values, where=where, replay=variant.problem)
            assert guards_intact(out)


@pytest.mark.parametrize("P", PAGE_SIZES)
@pytest.mark.parametrize("H", HEADS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_page_size_serves_every_number_of_rows(
    sm90: Any, format: str, H: int, P: int
) -> None:
    for at, next_n in enumerate(NEXT_N):
        facts = f"next_n={next_n} H={H} D={HEAD_DIMS[at % 2]} regime=exact seed={at}"
        lens = ("full", "random", "ramp")[at % 3]
        more = f"lens={lens} clean={at % 2}"
        sm90.check(mx_line(format, P, 520 + next_n, f"{facts} {more}", B=2))


@pytest.mark.parametrize("lens_rank", [1, 2])
@pytest.mark.parametrize(("format", "H", "D"), KINDS)
def test_varlen_batches_are_right(sm90: Any, format: str, H: int, D: int, lens_rank: int) -> None:
    for at, P in enumerate(PAGE_SIZES[lens_rank - 1 :: 2]):
        facts = f"next_n=1 H={H} D={D} varlen=1 lens_rank={lens_rank} regime=exact lens=random"
        sm90.check(mx_line(format, P, 280, f"{facts} clean={at % 2} seed={at}", B=29))


BOUNDED = (
    "dense {} S=1 N=300 windows=full",
    "dense {} S=13 N=260 M=260 weights=bfloat16 out={} clean=0 windows=packed",
    "dense {} S=11 N=300 weights=bfloat16 sms=132 windows=random",
    "paged {} B=2 next_n=1 P=64 blocks=12 columns=5 L=300 out={} lens=full clean=1",
    "paged {} B=2 next_n=2 P=8 blocks=70 columns=33 L=260 weights=bfloat16 lens=random",
    "paged {} B=1 next_n=4 P=256 blocks=3 columns=2 L=313 lens=ramp lens_rank=1",
    "paged {} B=1 next_n=9 P=32 blocks=9 columns=4 L=100 lens=random clean=1 sms=132",
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("format", "H", "D"), KINDS)
def test_bounded_logits_are_within_the_derived_tolerance(
    sm90: Any, format: str, H: int, D: int, seed: int
) -> None:
    """Several seeds: of four one moves the scales of q and k to both ends of their range."""
    short = short_dtype(format, H, D)
    for line in BOUNDED[seed % 2 :: 2]:
        seeds = f"seed={H + D + 10 * seed}"
        sm90.check(f"{line.format(format, short)} H={H} D={D} {seeds}")


@pytest.mark.parametrize("problem", LINES, ids=str)
def test_corpus_lines_are_right_or_refused(sm90: Any, problem: Problem) -> None:
    if sm90.accepts(problem):
        sm90.check(problem)
        return
    with pytest.raises(mqa.BackendUnavailableError, match=sm90.backend.name):
        sm90.run(sm90.case(problem))


DRAWN: dict[str, Any] = {"heads": HEADS, "head_dims": HEAD_DIMS, "outs": ("float32",)}


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=60)
@given(data=st.data())
def test_drawn_dense_problems_are_right_unless_their_layout_is_refused(
    sm90: Any, format: Any, data: st.DataObject
) -> None:
    problem = data.draw(dense_problems(formats=(format,), **DRAWN))
    if sm90.accepts(problem):
        sm90.check(problem)
    else:
        assert problem.layout, "nothing else can be in the way"


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=60)
@given(data=st.data())
def test_drawn_paged_problems_are_right(sm90: Any, format: Any, data: st.DataObject) -> None:
    problem = data.draw(
        paged_problems(formats=(format,), **DRAWN, page_sizes=PAGE_SIZES, max_batch=3, max_next_n=9)
    )
    assert sm90.accepts(problem), "no layout that is drawn is in the way"
    sm90.check(problem)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=25)
@given(data=st.data())
def test_drawn_exact_problems_of_several_blocks_are_right(
    sm90: Any, format: Any, data: st.DataObject
) -> None:
    exact = {"formats": (format,), "regimes": ("exact",), "layouts": False, **DRAWN}
    dense = dense_problems(**exact, max_rows=100, max_keys=1000)
    pages = {"page_sizes": PAGE_SIZES, "max_batch": 10, "max_next_n": 20}
    sm90.check(data.draw(st.one_of(dense, paged_problems(**exact, **pages, max_keys=900))))


@pytest.mark.parametrize("format", FORMATS)
def test_results_without_entries_or_tokens_are_legal(sm90: Any, format: str) -> None:
    for facts in ("S=0 N=5", "S=0 N=0", "S=3 N=0", "S=0 N=5 M=3"):
        case = sm90.case(f"dense {format} H=64 D=128 {facts}")
        assert sm90.run(case).numel() == 0
    for facts in ("S=3 N=0 M=7", "S=70 N=0 M=1025"):
        case = sm90.case(f"dense {format} H=64 D=128 windows=random {facts}")
        assert (sm90.run(case, out=case.new_out()) == -torch.inf).all()
    for sizes in ("B=0 columns=2 blocks=5", "B=3 columns=2 blocks=0", "B=3 columns=0 blocks=4"):
        line = f"paged {format} {sizes} next_n=2 H=64 D=128 P=64 L=99 clean=1 lens=zero"
        case = sm90.case(line)
        assert (sm90.run(case, out=case.new_out()) == -torch.inf).all()


def test_mx_is_run_by_default(sm90: Any) -> None:
    for format, page_size in itertools.product(FORMATS, (None, 64)):
        found = mqa.supports(64, 128, format, page_size=page_size, device=sm90.device)
        assert found.backend == sm90.backend.name
        refused = mqa.supports(64, 32, format, page_size=page_size, device=sm90.device)
        assert any("D=32" in reason for reason in refused.reasons[sm90.backend.name])


def test_the_corpus_has_lines_that_are_run() -> None:
    dense = [isinstance(line, DenseProblem) for line in LINES if line.D in HEAD_DIMS]
    assert any(dense)
    assert not all(dense)
