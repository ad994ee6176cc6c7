"""The reference against the oracle, over the whole product of what a dense call can ask for.

One draw of data serves all 24 variants of a shape (weights and output dtype, full or compressed,
cleaned or not), so that the product is affordable.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from numpy.typing import NDArray

import mqa
from mqa.problem import FORMATS, DenseProblem, PagedProblem, Problem, parse
from mqa.testing import (
    EXACT,
    FLOAT32,
    Case,
    OracleResult,
    assert_bitwise,
    assert_logits,
    assert_within,
    logits,
    make_case,
    read_corpus,
    tolerance,
)
from mqa.testing.strategies import dense_problems, paged_problems

HEADS = (1, 8, 16, 32, 64, 128)
SMALL = ((0, 5), (3, 0), (1, 1), (5, 3), (17, 260))
LARGE = ((129, 4100),)
OUTS = (torch.float32, torch.bfloat16, torch.float16)
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def compress(
    full: NDArray[np.generic], case: Case, width: int, fill: object
) -> NDArray[np.generic]:
    """Move each row's window to column 0 of `width`."""
    assert isinstance(case.problem, DenseProblem)
    start, end = (case.tensors[side].clamp(0, case.problem.N).tolist() for side in ("start", "end"))
    moved = np.full((full.shape[0], width), fill, dtype=full.dtype)
    for row, (low, high) in enumerate(zip(start, end, strict=True)):
        if low < high:
            moved[row, : high - low] = full[row, low:high]
    return moved


def check_variants(case: Case) -> None:
    exact = case.problem.regime == "exact"
    result = logits(case, EXACT if exact else FLOAT32)
    t, width = case.tensors, case.problem.width + 3
    q = (t["q"], t["q_scale"]) if "q_scale" in t else t["q"]
    variants = itertools.product(
        OUTS, (torch.float32, torch.bfloat16), (False, True), (False, True)
    )
    for out, weights, compressed, clean in variants:
        got = mqa.fp8_fp4_mqa_logits(
            q,
            (t["kv"], t.get("kv_scale")),
            t["w"].to(weights),
            t["start"],
            t["end"],
            clean,
            width if compressed else 0,
            out,
        )
        replay = f"{case.problem} with {out} {weights} compressed={compressed} clean={clean}"
        compare(got, result, case, NAMES[out], compressed=compressed, clean=clean, replay=replay)


def compare(
    got: torch.Tensor,
    result: OracleResult,
    case: Case,
    out: str,
    *,
    compressed: bool,
    clean: bool,
    replay: str,
) -> None:
    want, valid, bound = result.values, result.valid, tolerance(result, out)
    if compressed:
        width = got.shape[1]
        want, valid = compress(want, case, width, -np.inf), compress(valid, case, width, False)
        bound = compress(bound, case, width, 0.0)
    where = None if clean else valid
    if case.problem.regime == "exact":
        assert_bitwise(got, want, where=where, replay=replay)
    else:
        assert_within(got, want, bound, where=where, replay=replay)


def shapes() -> list[object]:
    large = [pytest.param(shape, marks=pytest.mark.slow) for shape in LARGE]
    return [*SMALL, *large]


@pytest.mark.parametrize("shape", shapes(), ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("H", HEADS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("regime", ["exact", "bounded"])
def test_every_variant_agrees_with_the_oracle(
    regime: str, fmt: str, H: int, D: int, shape: tuple[int, int]
) -> None:
    S, N = shape
    seed = H + D + N
    line = f"dense {fmt} S={S} N={N} H={H} D={D} weights=bfloat16 regime={regime}"
    check_variants(make_case(parse(f"{line} windows=random seed={seed}")))


def corpus_problems(name: str) -> list[Problem]:
    import pathlib

    return read_corpus(pathlib.Path(__file__).parents[1] / "corpus" / f"{name}.txt")


@pytest.mark.parametrize("problem", corpus_problems("ci"), ids=str)
def test_corpus_agrees_with_the_oracle(problem: Problem) -> None:
    case = make_case(problem)
    assert_logits(case, case.run())


@pytest.mark.slow
@pytest.mark.parametrize("problem", corpus_problems("all"), ids=str)
def test_whole_corpus_agrees_with_the_oracle(problem: Problem) -> None:
    case = make_case(problem)
    assert_logits(case, case.run())


@given(problem=dense_problems())
def test_drawn_dense_problems_agree(problem: DenseProblem) -> None:
    case = make_case(problem)
    assert_logits(case, case.run())


@given(problem=paged_problems())
def test_drawn_paged_problems_agree(problem: PagedProblem) -> None:
    case = make_case(problem)
    assert_logits(case, case.run())


@given(problem=dense_problems(heads=(1, 2, 5, 64), max_rows=40, max_keys=600, layouts=False))
def test_drawn_problems_of_several_tiles_agree(problem: DenseProblem) -> None:
    case = make_case(problem)
    assert_logits(case, case.run())


@pytest.mark.parametrize("D", [1, 3, 17, 200])
@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_any_head_dim_without_block_scales(fmt: str, D: int) -> None:
    for regime in ("exact", "bounded"):
        case = make_case(parse(f"dense {fmt} S=5 N=40 H=3 D={D} regime={regime}"))
        assert_logits(case, case.run())


@pytest.mark.parametrize("H", [5, 100, 300])
def test_any_number_of_heads(H: int) -> None:
    for fmt in FORMATS:
        case = make_case(parse(f"dense {fmt} S=19 N=300 H={H} D=32 windows=random"))
        assert_logits(case, case.run())
