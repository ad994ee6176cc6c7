"""On Hopper a row's bits are the same dense and paged, in any batch, group and page size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from paged_cases import HEAD_DIMS, HEADS, PAGE_SIZES, VARIANTS, as_runs, in_pages, paged_line, seen
from torch import Tensor

import mqa
from mqa.testing import Case, assert_bitwise

pytestmark = pytest.mark.gpu
S, N = 72, 1300


@dataclass(frozen=True)
class Scored:
    """A dense case whose windows begin at 0, and its logits."""

    case: Case
    whole: Tensor

    def pages(self, P: int, next_n: int) -> dict[str, Any]:
        return in_pages(self.case, P, next_n)


@pytest.fixture(scope="module", params=HEADS)
def scored(sm90: Any, request: pytest.FixtureRequest) -> Scored:
    D = HEAD_DIMS[HEADS.index(request.param) % 3]
    case = sm90.case(f"dense fp8 S={S} N={N} H={request.param} D={D} windows=random seed=1")
    case.tensors["start"].zero_()
    case.tensors["end"].clamp_(0, N)
    return Scored(case, sm90.call(case))


def paged(sm90: Any, arguments: dict[str, Any], **changes: Any) -> Tensor:
    with sm90.guard():
        return mqa.fp8_fp4_paged_mqa_logits(
            **(arguments | {"backend": sm90.backend.name} | changes)
        )


@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36, 72])
@pytest.mark.parametrize("P", PAGE_SIZES)
def test_paged_logits_are_the_dense_ones(sm90: Any, scored: Scored, P: int, next_n: int) -> None:
    arguments = scored.pages(P, next_n)
    assert_bitwise(paged(sm90, arguments), scored.whole)
    got = paged(sm90, arguments, max_context_len=N - 77)
    assert_bitwise(got, scored.whole[:, : N - 77])


@pytest.mark.parametrize("length", [1, 3, 8, 11, 40])
@pytest.mark.parametrize("P", PAGE_SIZES)
def test_varlen_logits_are_the_dense_ones(sm90: Any, scored: Scored, P: int, length: int) -> None:
    arguments = scored.pages(P, 1)
    row = torch.arange(S, device=sm90.device)
    for indices in (row // length, (row + 5) // length % 2):
        got = paged(sm90, arguments, indices=indices.int())
        assert_bitwise(got, scored.whole)


@pytest.mark.parametrize("next_n", [1, 3, 8, 24])
def test_requests_scored_apart_have_the_same_bits(sm90: Any, scored: Scored, next_n: int) -> None:
    arguments = scored.pages(64, next_n)
    names = ("q", "context_lens", "block_table")
    B = S // next_n
    for first, last in ((0, 1), (B - 1, B), (B // 2, B // 2 + 1), (1, B)):
        part = {name: arguments[name][first:last] for name in names}
        rows = slice(first * next_n, last * next_n)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            got = paged(
                sm90, arguments | part, weights=arguments["weights"][rows], logits_dtype=dtype
            )
            assert_bitwise(got, scored.whole[rows].to(dtype))


def test_requests_have_the_same_bits_at_any_place_of_a_batch(sm90: Any, scored: Scored) -> None:
    arguments = scored.pages(32, 2)
    order = torch.randperm(36, generator=torch.Generator().manual_seed(1)).to(sm90.device)
    for index in (order, order[:5], torch.full((40,), 17, device=sm90.device)):
        rows = (2 * index[:, None] + torch.arange(2, device=sm90.device)).flatten()
        q = arguments["q"].view(torch.uint8)[index].view(arguments["q"].dtype)
        changes = {
            "q": q,
            "weights": arguments["weights"][rows],
            "context_lens": arguments["context_lens"][index],
            "block_table": arguments["block_table"][: len(index)]
            if len(index) <= 36
            else arguments["block_table"][:1].expand(len(index), -1),
        }
        assert_bitwise(paged(sm90, arguments, **changes), scored.whole[rows])


@pytest.mark.parametrize(("H", "next_n", "D"), VARIANTS)
def test_lens_of_other_rows_do_not_change_bits(sm90: Any, H: int, next_n: int, D: int) -> None:
    case = sm90.case(paged_line(64, 900, f"next_n={next_n} H={H} D={D} seed=3", B=4))
    whole, lens = sm90.call(case), case.tensors["lens"]
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        drawn = torch.randint(0, 901, lens.shape, generator=generator)
        lens.copy_(drawn)
        assert_bitwise(sm90.call(case), torch.where(seen(case), whole, -torch.inf))


@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("H", HEADS)
def test_weights_dtype_clean_and_out_do_not_change_bits(sm90: Any, H: int, D: int) -> None:
    for next_n in (1, 2, 8):
        facts = f"next_n={next_n} H={H} D={D} weights=bfloat16 lens=full seed=9"
        case = sm90.case(paged_line(64, 900, facts))
        want = sm90.call(case)
        assert_bitwise(sm90.call(case, weights=case.tensors["w"].float()), want)
        assert_bitwise(sm90.call(case, clean_logits=False), want)
        assert_bitwise(sm90.call(case, **as_runs(case)), want)
        for stride in (900, 901, 1024):
            out = torch.full((3 * next_n, stride), torch.nan, device=sm90.device)[:, :900]
            assert_bitwise(sm90.call(case, out=out), want)


@pytest.mark.parametrize(("H", "next_n", "D"), VARIANTS)
def test_twenty_repeats_have_the_same_bits(sm90: Any, H: int, next_n: int, D: int) -> None:
    facts = f"next_n={next_n} H={H} D={D} lens=random seed=3"
    case = sm90.case(paged_line(16, 1500, facts, B=40))
    want, cuts = sm90.call(case), sm90.metadata(case)
    for _ in range(20):
        for meta in (None, cuts):
            assert_bitwise(sm90.call(case, schedule_meta=meta), want)
