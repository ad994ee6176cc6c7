"""On Hopper NaN goes exactly where it is used, and the zero plateau is +0.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mqa
from mqa.testing import Case, assert_bitwise

pytestmark = pytest.mark.gpu
HEADS = (8, 16, 32, 64, 128)
NAN_CODE = 0x7F
TOKENS = (0, 37, 127, 128, 255, 256, 300, 302)


def poison_case(sm90: Any, H: int, S: int = 40, windows: str = "random", more: str = "") -> Case:
    return sm90.case(f"dense fp8 S={S} N=303 H={H} D=64 windows={windows} seed=4 {more}")


def inside(case: Case) -> Tensor:
    """[S, N]: position n is in the window of row s."""
    t = case.tensors
    position = torch.arange(case.problem.N, device=case.device)
    return (position >= t["start"][:, None]) & (position < t["end"][:, None])


def assert_nan_exactly(got: Tensor, want: Tensor, poisoned: Tensor) -> None:
    """NaN where poisoned, the bits of `want` elsewhere."""
    assert poisoned.any()
    assert not poisoned.all()
    assert_bitwise(got, torch.where(poisoned, torch.nan, want))


def compress(case: Case, full: Tensor, M: int) -> Tensor:
    """What the compressed result of width M holds, from the full one."""
    start = case.tensors["start"].clamp(min=0)[:, None]
    column = torch.arange(M, device=full.device) + start
    seen = (column < case.tensors["end"][:, None]) & (column < full.shape[1])
    got = full.gather(1, column.clamp(max=full.shape[1] - 1))
    return torch.where(seen, got, -torch.inf)


@pytest.mark.parametrize("S", [3, 40])
@pytest.mark.parametrize("how", ["value", "scale"])
@pytest.mark.parametrize("H", HEADS)
def test_a_nan_token_reaches_its_own_column_only(sm90: Any, H: int, how: str, S: int) -> None:
    case = poison_case(sm90, H, S, "random" if S == 40 else "causal")
    want = sm90.call(case)
    poisoned = torch.zeros_like(want, dtype=torch.bool)
    for n in TOKENS:
        if how == "value":
            case.tensors["kv"].view(torch.uint8)[n, 5] = NAN_CODE
        else:
            case.tensors["kv_scale"][n] = torch.nan
        poisoned[:, n] = inside(case)[:, n]
    got = sm90.call(case)
    assert_nan_exactly(got, want, poisoned)
    assert_bitwise(sm90.call(case, max_seqlen_k=303), compress(case, got, 303))


@pytest.mark.parametrize("name", ["q", "w"])
@pytest.mark.parametrize("H", HEADS)
def test_a_nan_of_a_row_reaches_that_row_only(sm90: Any, H: int, name: str) -> None:
    for row in (0, 1, 2, 3, 6, 7, 20, 31):
        case = poison_case(sm90, H, windows="full")
        want = sm90.call(case)
        if name == "w":
            case.tensors["w"][row, H - 3] = torch.nan
        else:
            case.tensors["q"].view(torch.uint8)[row, H - 3, 7] = NAN_CODE
        poisoned = torch.zeros_like(want, dtype=torch.bool)
        poisoned[row] = True
        assert_nan_exactly(sm90.call(case), want, poisoned)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("S", [2, 40])
@pytest.mark.parametrize("H", HEADS)
def test_rows_are_untouched_by_nan_outside_their_windows_and_in_other_rows(
    sm90: Any, H: int, S: int, clean: bool
) -> None:
    """Everything that row 1 does not use is NaN: all other rows, and every token but 61 .. 250."""
    case = poison_case(sm90, H, S, "full")
    t = case.tensors
    t["start"][1], t["end"][1] = 61, 251
    want = sm90.call(case)[1:2, 61:251].clone()
    others = torch.arange(S, device=case.device) != 1
    position = torch.arange(303, device=case.device)
    outside = (position < 61) | (position >= 251)
    t["q"].view(torch.uint8)[others] = NAN_CODE
    t["w"][others] = torch.nan
    t["kv"].view(torch.uint8)[outside] = NAN_CODE
    t["kv_scale"][outside] = torch.nan
    full = sm90.call(case, clean_logits=clean)
    assert_bitwise(full[1:2, 61:251], want)
    compressed = sm90.call(case, clean_logits=clean, max_seqlen_k=303)
    assert_bitwise(compressed[1:2, :190], want)
    if clean:
        assert (full[1, :61] == -torch.inf).all()
        assert (full[1, 251:] == -torch.inf).all()
        assert (compressed[1, 190:] == -torch.inf).all()


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("H", HEADS)
def test_the_zero_plateau_is_plus_zero(sm90: Any, H: int, out: torch.dtype) -> None:
    """All dots at most 0: exactly +0.0, whatever the signs of the weights."""
    case = poison_case(sm90, H, windows="full")
    q, k = (case.tensors[name].view(torch.uint8) for name in ("q", "kv"))
    q &= 0x7F
    k |= 0x80
    q[q == NAN_CODE], k[k == 0xFF] = 0x38, 0xB8
    k[7:9] = 0x80  # -0.0
    w = case.tensors["w"]
    for weights in (w, -w.abs(), w.abs(), (-w.abs()).bfloat16()):
        for rows in (slice(None), slice(5, 6), slice(8, 11)):
            got = sm90.call(case, rows, weights=weights[rows], logits_dtype=out)
            assert_bitwise(got, torch.zeros_like(got))


def test_entries_with_a_positive_dot_do_not_become_zero(sm90: Any) -> None:
    case = poison_case(sm90, 8, windows="full")
    assert (sm90.call(case) != 0).float().mean() > 0.2


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("M", [0, 301])
@pytest.mark.parametrize("H", HEADS)
def test_every_invalid_entry_of_a_cleaned_result_is_minus_infinity(
    sm90: Any, H: int, M: int, out: str
) -> None:
    for windows in ("random", "packed", "empty"):
        case = poison_case(sm90, H, windows=windows, more=f"out={out} M={M}")
        outside = torch.from_numpy(~sm90.valid(case))
        for cuts in (None, sm90.metadata(case)):
            got = sm90.run(case, out=case.new_out(), schedule_meta=cuts).cpu()
            assert (got[outside] == -torch.inf).all()
            assert not got.isnan().any()


def test_windows_longer_than_max_seqlen_k_are_cut(sm90: Any) -> None:
    case = poison_case(sm90, 64, windows="full")
    want = sm90.call(case)
    for M in (1, 100, 299):
        assert_bitwise(sm90.call(case, max_seqlen_k=M), want[:, :M])


def test_codes_at_the_ends_of_e4m3_are_decoded(sm90: Any) -> None:
    one = torch.ones(1, 8, device=sm90.device)
    start, end = (torch.tensor([n], dtype=torch.int32, device=sm90.device) for n in (0, 1))
    for code, value in ((0x7E, 448.0), (0xFE, -448.0), (0x01, 2.0**-9), (0x81, -(2.0**-9))):
        q = torch.full((1, 8, 32), code, dtype=torch.uint8, device=sm90.device)
        k = q[:, 0].view(torch.float8_e4m3fn)
        got = mqa.fp8_fp4_mqa_logits(
            q.view(torch.float8_e4m3fn), (k, one[:, 0]), one, start, end, backend=sm90.backend.name
        )
        assert got.item() == value * value * 32 * 8
