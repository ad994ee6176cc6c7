"""On Hopper offsets into q, k and the result may exceed 2**31: RAMP data, known right values.

q and k are all 1.0, the weights of row s are 2**(s mod 7) / (H * D) and the scale of token n is
n mod 2**20 + 1, so the logit is (n mod 2**20 + 1) * 2**(s mod 7), exactly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mqa

pytestmark = pytest.mark.gpu
GUARD = 12345.0


def ramp(device: torch.device, S: int, N: int, H: int, D: int) -> dict[str, Any]:
    """The arguments of a call whose windows are [s mod 3, N - s mod 5)."""
    row = torch.arange(S, device=device)
    token = torch.arange(N, device=device)
    q = torch.full((S, H, D), 0x38, dtype=torch.uint8, device=device)
    k = torch.full((N, D), 0x38, dtype=torch.uint8, device=device)
    weights = (torch.exp2(row % 7) / (H * D)).unsqueeze(1).repeat(1, H)
    return {
        "q": q.view(torch.float8_e4m3fn),
        "kv": (k.view(torch.float8_e4m3fn), (token % 2**20 + 1).float()),
        "weights": weights,
        "cu_seq_len_k_start": (row % 3).int(),
        "cu_seq_len_k_end": (N - row % 5).int(),
    }


def assert_ramp_row(got: Tensor, row: int, N: int, *, compressed: bool = False) -> None:
    """A float32 row of the result, cleaned; as many columns as it has."""
    column = torch.arange(got.shape[0], device=got.device) + (row % 3 if compressed else 0)
    valid = (column >= row % 3) & (column < N - row % 5)
    value = (column % 2**20 + 1) * 2.0 ** (row % 7)
    assert torch.equal(got, torch.where(valid, value, -torch.inf).to(got.dtype)), row


def rows_around(S: int, *middle: int) -> list[int]:
    return sorted({row % S for row in (0, 1, *middle, S - 2, S - 1)})


@pytest.mark.parametrize("M", [0, 65600])
def test_results_of_more_than_8_gib_are_right(sm90: Any, M: int) -> None:
    S, N = 33000, 65541
    kwargs = ramp(sm90.device, S, N, 8, 32)
    with sm90.guard():
        got = mqa.fp8_fp4_mqa_logits(**kwargs, max_seqlen_k=M, backend=sm90.backend.name)
    assert got.stride(0) * S > 2**31
    for row in rows_around(S, 32639, 32640, 32641, 32767, 32768):
        assert_ramp_row(got[row], row, N, compressed=M > 0)
    assert int((got > 0).sum()) == sum(N - row % 5 - row % 3 for row in range(S))
    row = torch.arange(S, device=got.device)
    for column in (5, 40000):
        token = column + (row % 3 if M else 0) + 1
        assert torch.equal(got[:, column], (token * torch.exp2(row % 7)).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clean", [True, False])
def test_out_rows_far_apart_are_written_and_nothing_between(
    sm90: Any, clean: bool, dtype: torch.dtype
) -> None:
    S, N, stride = 9, 303, 2**28 + 5
    memory = torch.empty((S - 1) * stride + N + 99, dtype=dtype, device=sm90.device)
    around = [memory[max(0, s * stride + 1 - 64) : s * stride + 1 + N + 64] for s in range(S)]
    for zone in around:
        zone.fill_(GUARD)
    out = memory.as_strided((S, N), (stride, 1), 1)
    kwargs = ramp(sm90.device, S, N, 64, 128)
    for sms in (0, 67):
        cuts = torch.zeros(sms + 1, 2, dtype=torch.int32, device=sm90.device) if sms else None
        options = {"schedule_meta": cuts, "logits_dtype": dtype, "clean_logits": clean}
        with sm90.guard():
            mqa.fp8_fp4_mqa_logits(**kwargs, **options, out=out, backend=sm90.backend.name)
        for row, zone in enumerate(around):
            lead = 1 if row == 0 else 64
            assert (zone[:lead] == GUARD).all()
            assert (zone[lead + N :] == GUARD).all()
            if clean:
                assert_ramp_row(zone[lead : lead + N], row, N)
            else:
                window = slice(lead + row % 3, lead + N - row % 5)
                want = torch.arange(row % 3, N - row % 5, device=zone.device) + 1
                assert torch.equal(zone[window], (want * 2.0 ** (row % 7)).to(dtype))


def test_k_of_more_than_2_gib_is_read(sm90: Any) -> None:
    S, N = 2, 2**24 + 84
    kwargs = ramp(sm90.device, S, N, 8, 128)
    with sm90.guard():
        got = mqa.fp8_fp4_mqa_logits(**kwargs, backend=sm90.backend.name)
    for row in range(S):
        assert_ramp_row(got[row], row, N)


def test_q_of_more_than_2_gib_is_read(sm90: Any) -> None:
    S, N = 2**17 + 28, 9
    kwargs = ramp(sm90.device, S, N, 128, 128)
    with sm90.guard():
        got = mqa.fp8_fp4_mqa_logits(**kwargs, backend=sm90.backend.name)
    for row in rows_around(S, 2**17 - 1, 2**17):
        assert_ramp_row(got[row], row, N)
    total = sum(2.0 ** (row % 7) for row in range(S))
    assert float(got[:, 3].double().sum()) == total * 4
