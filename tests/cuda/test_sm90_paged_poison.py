"""On Hopper NaN in a paged call goes exactly where it is used, and the zero plateau is +0.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import HEADS, PAGE_SIZES, VARIANTS, paged_line, pool, seen, used_tokens
from torch import Tensor

from mqa.testing import Case, assert_bitwise

pytestmark = pytest.mark.gpu
NAN_CODE = 0x7F
TOKENS = (0, 7, 8, 37, 127, 128, 255, 256, 300, 511)
ROWS = (1, 2, 8, 9)


def poison_case(sm90: Any, H: int, next_n: int, P: int = 64, lens: str = "random") -> Case:
    return sm90.case(paged_line(P, 640, f"next_n={next_n} H={H} D=64 lens={lens} seed=4"))


@pytest.mark.parametrize("P", PAGE_SIZES)
@pytest.mark.parametrize("H", HEADS)
def test_tails_and_unused_pages_are_never_used(sm90: Any, H: int, P: int) -> None:
    """A case has NaN there; zeros and large numbers give the same bits."""
    for next_n in ROWS:
        case = poison_case(sm90, H, next_n, P)
        want = sm90.call(case)
        assert not want.isnan().any()
        codes, scales = pool(case)
        used = used_tokens(case)
        assert not used.all()
        for code, scale in ((0, 0.0), (0x7E, 1e30)):
            codes[~used], scales[~used] = code, scale
            assert_bitwise(sm90.call(case), want, replay=case.problem)


@pytest.mark.parametrize("next_n", ROWS)
@pytest.mark.parametrize("how", ["value", "scale"])
@pytest.mark.parametrize("H", HEADS)
def test_a_nan_token_reaches_its_own_column_only(sm90: Any, H: int, how: str, next_n: int) -> None:
    """Of the rows of its request that see it."""
    for P, lens in ((8, "full"), (64, "random"), (256, "ramp")):
        case = poison_case(sm90, H, next_n, P, lens)
        want, (codes, scales) = sm90.call(case), pool(case)
        longest, at = (int(n) for n in case.tensors["lens"].amax(1).max(0))
        request = slice(at * next_n, (at + 1) * next_n)
        poisoned = torch.zeros_like(want, dtype=torch.bool)
        for n in {n for n in (*TOKENS, longest - 1) if 0 <= n < longest}:
            page = int(case.tensors["table"][at, n // P])
            if how == "value":
                codes[page, n % P, 5] = NAN_CODE
            else:
                scales[page, n % P] = torch.nan
            poisoned[request, n] = seen(case)[request, n]
        assert poisoned.any()
        got = sm90.call(case)
        assert_bitwise(got, torch.where(poisoned, torch.nan, want), replay=case.problem)


@pytest.mark.parametrize("name", ["q", "w"])
@pytest.mark.parametrize("next_n", ROWS)
@pytest.mark.parametrize("H", HEADS)
def test_a_nan_of_a_row_reaches_that_row_only(sm90: Any, H: int, next_n: int, name: str) -> None:
    for row in {0, 1, next_n - 1, next_n, 2 * next_n + next_n // 2}:
        case = poison_case(sm90, H, next_n, lens="full")
        want = sm90.call(case)
        if name == "w":
            case.tensors["w"][row, H - 3] = torch.nan
        else:
            q = case.tensors["q"].view(torch.uint8).flatten(0, 1)
            q[row, H - 3, 7] = NAN_CODE
        want[row] = torch.nan
        assert_bitwise(sm90.call(case), want)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("next_n", ROWS)
@pytest.mark.parametrize("H", HEADS)
def test_a_row_is_untouched_by_nan_in_all_that_it_does_not_use(
    sm90: Any, H: int, next_n: int, clean: bool
) -> None:
    """Everything but one row, which sees 251 tokens: other rows, other tokens, other pages."""
    case = poison_case(sm90, H, next_n, lens="full")
    t, row = case.tensors, next_n + next_n // 2
    t["lens"].view(-1)[row] = 251
    want = sm90.call(case)[row : row + 1].clone()
    alone = t["lens"].clone()
    alone.fill_(0)
    alone.view(-1)[row] = 251
    others = torch.arange(3 * next_n, device=sm90.device) != row
    t["q"].view(torch.uint8).flatten(0, 1)[others] = NAN_CODE
    t["w"][others] = torch.nan
    codes, scales = pool(case)
    before, t["lens"][:] = t["lens"].clone(), alone
    unused = ~used_tokens(case)
    codes[unused], scales[unused] = NAN_CODE, torch.nan
    for lens in (alone, before):
        got = sm90.call(case, context_lens=lens, clean_logits=clean)[row : row + 1]
        assert_bitwise(got[:, :251], want[:, :251])
        if clean:
            assert (got[:, 251:] == -torch.inf).all()


def without_positive_dots(case: Case) -> Tensor:
    """Queries at least 0 and keys at most 0, some -0.0; returns the weights."""
    q, (k, _) = case.tensors["q"].view(torch.uint8), pool(case)
    q &= 0x7F
    k |= 0x80
    q[q == NAN_CODE], k[k == 0xFF] = 0x38, 0xB8
    k[:, ::5] = 0x80
    return case.tensors["w"]


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("H", "next_n", "D"), VARIANTS)
def test_the_zero_plateau_is_plus_zero(
    sm90: Any, H: int, next_n: int, D: int, out: torch.dtype
) -> None:
    """All dots at most 0: exactly +0.0, whatever the signs of the weights."""
    case = sm90.case(paged_line(64, 600, f"next_n={next_n} H={H} D={D} lens=random seed=4"))
    assert (sm90.call(case)[seen(case)] != 0).float().mean() > 0.2
    w = without_positive_dots(case)
    want = torch.where(seen(case), 0.0, -torch.inf).to(out)
    for weights in (w, -w.abs(), w.abs(), (-w.abs()).bfloat16()):
        assert_bitwise(sm90.call(case, weights=weights, logits_dtype=out), want)


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("H", HEADS)
def test_every_invalid_entry_of_a_cleaned_result_is_minus_infinity(
    sm90: Any, H: int, out: str
) -> None:
    for at, lens in enumerate(("random", "ramp", "zero")):
        for next_n in ROWS:
            facts = (
                f"next_n={next_n} H={H} D=64 lens={lens} out={out} clean=1 lens_rank={1 + at % 2}"
            )
            case = sm90.case(paged_line(64, 301, facts, B=30))
            outside = torch.from_numpy(~sm90.valid(case))
            for cuts in (None, sm90.metadata(case)):
                got = sm90.run(case, out=case.new_out(), schedule_meta=cuts).cpu()
                assert (got[outside] == -torch.inf).all()
                assert not got.isnan().any()
