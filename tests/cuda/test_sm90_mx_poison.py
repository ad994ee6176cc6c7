"""On Hopper NaN of MX elements and scales goes exactly where it is used, and the zero plateau is
+0.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mx_cases import (
    FORMATS,
    HEADS,
    NAN_CODES,
    NAN_SCALE,
    SPREAD,
    assert_paged_alike,
    mx_line,
    poison_dim,
    scale_bytes,
    short_dtype,
)
from paged_cases import PAGE_SIZES, pool, seen, used_tokens
from torch import Tensor

from mqa.testing import Case, assert_bitwise

pytestmark = pytest.mark.gpu
N = 303
TOKENS = (0, 1, 37, 63, 64, 127, 128, 255, 256, 300, 302)


def dense_case(sm90: Any, format: str, H: int, D: int, S: int = 40) -> Case:
    return sm90.case(f"dense {format} S={S} N={N} H={H} D={D} windows=full seed=4")


def assert_nan_exactly(sm90: Any, case: Case, want: Tensor, poisoned: Tensor) -> None:
    """NaN where poisoned, the bits of `want` elsewhere, dense and from pages."""
    assert poisoned.any()
    assert not poisoned.all()
    expected = torch.where(poisoned, torch.nan, want)
    assert_bitwise(sm90.call(case), expected, replay=case.problem)
    assert_paged_alike(sm90, case, expected)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("H", HEADS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_nan_scale_of_a_token_reaches_its_own_column_only(
    sm90: Any, format: str, H: int, D: int
) -> None:
    for block in range(D // 32):
        case = dense_case(sm90, format, H, D)
        want = sm90.call(case)
        poisoned = torch.zeros_like(want, dtype=torch.bool)
        for n in TOKENS:
            scale_bytes(case.tensors["kv_scale"])[n, block] = NAN_SCALE
            poisoned[:, n] = True
        assert_nan_exactly(sm90, case, want, poisoned)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("H", HEADS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_nan_scale_of_a_head_reaches_its_own_row_only(
    sm90: Any, format: str, H: int, D: int
) -> None:
    case = dense_case(sm90, format, H, D)
    want = sm90.call(case)
    poisoned = torch.zeros_like(want, dtype=torch.bool)
    for at, row in enumerate((0, 3, 6, 7, 8, 20, 31, 39)):
        scale_bytes(case.tensors["q_scale"])[row, (7 * at + 1) % H, at % (D // 32)] = NAN_SCALE
        poisoned[row] = True
    assert_nan_exactly(sm90, case, want, poisoned)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("H", [8, 64, 128])
def test_a_nan_element_reaches_its_own_row_or_column_only(sm90: Any, H: int, D: int) -> None:
    """At every dim of some token, and at every dim of some row."""
    case = dense_case(sm90, "mxfp8", H, D)
    want = sm90.call(case)
    poisoned = torch.zeros_like(want, dtype=torch.bool)
    for dim in range(D):
        poison_dim(case.tensors["kv"], (2 * dim,), dim)
        poisoned[:, 2 * dim] = True
    assert_nan_exactly(sm90, case, want, poisoned)
    case = dense_case(sm90, "mxfp8", H, D, S=2 * D)
    want = sm90.call(case)
    poisoned = torch.zeros_like(want, dtype=torch.bool)
    for dim in range(D):
        poison_dim(case.tensors["q"], (2 * dim, (5 * dim + 3) % H), dim)
        poisoned[2 * dim] = True
    assert_nan_exactly(sm90, case, want, poisoned)


def fill_with_nan(format: str, codes: Tensor, scales: Tensor, where: Tensor) -> None:
    """Elements, where the format has such, and scales."""
    if format == "mxfp8":
        codes.view(torch.uint8)[where] = NAN_CODES[0]
    scales[where] = -1


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("S", [2, 40])
@pytest.mark.parametrize("H", HEADS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_dense_row_is_untouched_by_nan_in_all_that_it_does_not_use(
    sm90: Any, format: str, H: int, S: int, clean: bool
) -> None:
    """Everything that row 1 does not use is NaN: all other rows, and every token but 61 .. 250."""
    case = dense_case(sm90, format, H, 64, S)
    t = case.tensors
    t["start"][1], t["end"][1] = 61, 251
    want = sm90.call(case)[1:2, 61:251].clone()
    others = torch.arange(S, device=sm90.device) != 1
    position = torch.arange(N, device=sm90.device)
    fill_with_nan(format, t["q"], t["q_scale"], others)
    t["w"][others] = torch.nan
    fill_with_nan(format, t["kv"], t["kv_scale"], (position < 61) | (position >= 251))
    full = sm90.call(case, clean_logits=clean)
    assert_bitwise(full[1:2, 61:251], want)
    compressed = sm90.call(case, clean_logits=clean, max_seqlen_k=N)
    assert_bitwise(compressed[1:2, :190], want)
    if clean:
        assert (full[1, :61] == -torch.inf).all()
        assert (full[1, 251:] == -torch.inf).all()


@pytest.mark.parametrize(("format", "H", "next_n", "D"), SPREAD)
def test_page_tails_and_unused_pages_are_never_used(
    sm90: Any, format: str, H: int, next_n: int, D: int
) -> None:
    """A case has NaN there; zeros and large numbers give the same bits."""
    for P in PAGE_SIZES[H // 16 % 2 :: 2]:
        case = sm90.case(mx_line(format, P, 600, f"next_n={next_n} H={H} D={D} lens=random seed=4"))
        want = sm90.call(case)
        assert not want.isnan().any()
        codes, scales = pool(case)
        used = used_tokens(case)
        assert not used.all()
        for code, scale in ((0, 0), (0x7E, 0x7E7E7E7E)):
            codes[~used], scales[~used] = code, scale
            assert_bitwise(sm90.call(case), want, replay=case.problem)


@pytest.mark.parametrize(("format", "H", "next_n", "D"), SPREAD)
def test_a_paged_row_is_untouched_by_nan_in_all_that_it_does_not_use(
    sm90: Any, format: str, H: int, next_n: int, D: int
) -> None:
    """Everything but one row, which sees 251 tokens: other rows, other tokens, other pages."""
    case = sm90.case(mx_line(format, 64, 640, f"next_n={next_n} H={H} D={D} lens=full seed=4"))
    t, row = case.tensors, next_n + next_n // 2
    t["lens"].view(-1)[row] = 251
    want = sm90.call(case)[row : row + 1, :251].clone()
    before = t["lens"].clone()
    t["lens"].zero_()
    t["lens"].view(-1)[row] = 251
    others = torch.arange(3 * next_n, device=sm90.device) != row
    fill_with_nan(format, t["q"].flatten(0, 1), t["q_scale"].flatten(0, 1), others)
    t["w"][others] = torch.nan
    fill_with_nan(format, *pool(case), ~used_tokens(case))
    for lens in (t["lens"], before):
        got = sm90.call(case, context_lens=lens)[row : row + 1]
        assert_bitwise(got[:, :251], want)
        assert (got[:, 251:] == -torch.inf).all()


def without_positive_dots(case: Case, codes: Tensor) -> None:
    """Queries at least 0 and keys at most 0, some -0.0."""
    q, k = case.tensors["q"].view(torch.uint8), codes.view(torch.uint8)
    sign = 0x88 if case.problem.format == "mxfp4" else 0x80
    q &= 0xFF - sign
    k |= sign
    if case.problem.format == "mxfp8":
        q[q == NAN_CODES[0]], k[k == NAN_CODES[1]] = 0x38, 0xB8
    k[..., ::5] = sign


@pytest.mark.parametrize(("format", "H", "next_n", "D"), SPREAD)
def test_the_zero_plateau_is_plus_zero(sm90: Any, format: str, H: int, next_n: int, D: int) -> None:
    """All dots at most 0: exactly +0.0, whatever the signs of the weights."""
    paged = sm90.case(mx_line(format, 64, 600, f"next_n={next_n} H={H} D={D} lens=random seed=4"))
    dense = dense_case(sm90, format, H, D)
    for case in (paged, dense):
        valid = seen(case) if case is paged else torch.ones(40, N, device=sm90.device).bool()
        assert (sm90.call(case)[valid] != 0).float().mean() > 0.2
        without_positive_dots(case, pool(case)[0] if case is paged else case.tensors["kv"])
        w = case.tensors["w"]
        for weights in (w, -w.abs(), w.abs(), (-w.abs()).bfloat16()):
            for name in ("float32", short_dtype(format, H, D))[: 1 + (case is dense)]:
                out = getattr(torch, name)
                want = torch.where(valid, 0.0, -torch.inf).to(out)
                assert_bitwise(sm90.call(case, weights=weights, logits_dtype=out), want)


@pytest.mark.parametrize(("format", "H", "next_n", "D"), SPREAD)
def test_every_invalid_entry_of_a_cleaned_result_is_minus_infinity(
    sm90: Any, format: str, H: int, next_n: int, D: int
) -> None:
    shape = f"H={H} D={D} seed=4 clean=1"
    pages = [
        mx_line(format, 64, 301, f"next_n={next_n} {shape} lens={lens}", B=20)
        for lens in ("random", "zero")
    ]
    rows = [
        f"dense {format} S=40 N={N} {shape} windows={windows} M={M}"
        for windows, M in (("random", 0), ("packed", 301), ("empty", 0))
    ]
    for line in pages + rows:
        case = sm90.case(line)
        outside = torch.from_numpy(~sm90.valid(case))
        for cuts in (None, sm90.metadata(case)):
            got = sm90.run(case, out=case.new_out(), schedule_meta=cuts).cpu()
            assert (got[outside] == -torch.inf).all()
            assert not got.isnan().any()
