"""On Hopper offsets of paged calls may exceed 2**31: RAMP data, known right values.

q and keys are all 1.0, the weights of row r are 2**(r mod 7) / (H * D) and the scale of token n of
a page p is p * 1000 + n + 1, so the logit is that times 2**(r mod 7), exactly.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import mqa

pytestmark = pytest.mark.gpu
GUARD = 12345.0


def ramp_pool(device: torch.device, blocks: int, P: int, D: int, stride: int) -> Tensor:
    """[blocks, P, 1, D + 4] with this stride of pages; only the pages are written."""
    size = P * (D + 4)
    memory = torch.empty((blocks - 1) * stride + size, dtype=torch.uint8, device=device)
    flat = memory.as_strided((blocks, size), (stride, 1))
    flat[:, : P * D] = 0x38
    page, token = torch.arange(blocks, device=device), torch.arange(P, device=device)
    scales = (page[:, None] * 1000.0 + token + 1).float()
    flat[:, P * D :] = scales.view(torch.uint8)
    return memory.as_strided((blocks, P, 1, D + 4), (stride, D + 4, D + 4, 1))


def ramp_rows(device: torch.device, B: int, next_n: int, H: int, D: int) -> dict[str, Tensor]:
    rows = B * next_n
    q = torch.full((B, next_n, H, D), 0x38, dtype=torch.uint8, device=device)
    weight = torch.exp2(torch.arange(rows, device=device) % 7) / (H * D)
    return {"q": q.view(torch.float8_e4m3fn), "weights": weight[:, None].repeat(1, H)}


def ramp_values(table: Tensor, P: int, width: int) -> Tensor:
    """[B, width] logits before the row's factor 2**(r mod 7)."""
    position = torch.arange(width, device=table.device)
    return (table[:, position // P] * 1000.0 + position % P + 1).float()


def factors(rows: int, device: torch.device) -> Tensor:
    return torch.exp2(torch.arange(rows, device=device) % 7)[:, None]


def test_pages_far_apart_are_read(sm90: Any) -> None:
    """Strides of pages above 2**31 bytes: a pool that is a view of a larger one."""
    ids = torch.tensor([[2, 0, 1], [1, 2, 0]], dtype=torch.int32, device=sm90.device)
    options = {"clean_logits": True, "backend": sm90.backend.name}
    shapes = ((8, 1, 128), (64, 2, 64), (64, 8, 128))
    for P, (H, next_n, D) in itertools.product((8, 64, 256), shapes):
        width = 3 * P - 3
        cache = ramp_pool(sm90.device, 3, P, D, 2**31 + 4096)
        rows = ramp_rows(sm90.device, 2, next_n, H, D)
        lens = torch.full((2, next_n), width, dtype=torch.int32, device=sm90.device)
        with sm90.guard():
            got = mqa.fp8_fp4_paged_mqa_logits(
                rows["q"], cache, rows["weights"], lens, ids, None, width, **options
            )
        values = ramp_values(ids, P, width).repeat_interleave(next_n, 0)
        assert torch.equal(got, values * factors(2 * next_n, sm90.device)), (P, H, next_n, D)
        del cache


def test_pools_of_more_than_2_gib_are_read(sm90: Any) -> None:
    blocks, P, D, H = 2**16 + 9, 256, 128, 8
    cache = ramp_pool(sm90.device, blocks, P, D, P * (D + 4))
    assert cache.numel() > 2**31
    ids = [[blocks - 1, 0, 63550], [63549, blocks - 2, 63551]]  # Page 63550 spans byte 2**31.
    table = torch.tensor(ids, dtype=torch.int32, device=sm90.device)
    rows = ramp_rows(sm90.device, 2, 1, H, D)
    lens = torch.full((2,), 768, dtype=torch.int32, device=sm90.device)
    with sm90.guard():
        got = mqa.fp8_fp4_paged_mqa_logits(
            rows["q"], cache, rows["weights"], lens, table, None, 768, backend=sm90.backend.name
        )
    values = cache.view(blocks, -1)[table.long()][..., P * D :].contiguous().view(torch.float32)
    assert torch.equal(got, values.flatten(1) * factors(2, sm90.device))


@pytest.mark.parametrize("next_n", [1, 2, 3, 8])
@pytest.mark.parametrize(("P", "D"), [(8, 32), (16, 64), (64, 64), (64, 128), (256, 128)])
def test_long_requests_go_round_the_ring_of_stages(sm90: Any, P: int, D: int, next_n: int) -> None:
    """While memory is busy and pages come in any order. A warpgroup that took the end of one use of
    a stage for that of the next once made such calls hang or fail, and short ones not."""
    B, L, H, device = 40, 16384 + 37, 64, sm90.device
    pages = -(-L // P)
    cache = ramp_pool(device, B * pages, P, D, P * (D + 4))
    scales = torch.arange(B * pages * P, device=device).remainder(4099).float()
    cache.view(B * pages, -1)[:, P * D :] = scales.view(torch.uint8).view(B * pages, -1)
    table = torch.randperm(B * pages, device=device).int().view(B, pages)
    rows = ramp_rows(device, B, next_n, H, D)
    lens = torch.full((B, next_n), L, dtype=torch.int32, device=device)
    position = torch.arange(L, device=device)
    token = table[:, position // P].long() * P + position % P
    want = token.remainder(4099).float().repeat_interleave(next_n, 0) * factors(B * next_n, device)
    for sms in (7, 132):
        cuts = mqa.get_paged_mqa_logits_metadata(lens, P, sms)
        for _ in range(3):
            with sm90.guard():
                got = mqa.fp8_fp4_paged_mqa_logits(
                    rows["q"], cache, rows["weights"], lens, table, cuts, L,
                    backend=sm90.backend.name,
                )  # fmt: skip
            assert torch.equal(got, want)


def test_results_of_more_than_8_gib_are_right(sm90: Any) -> None:
    B, L, P, H, D = 33000, 65541, 256, 8, 32
    device = sm90.device
    cache = ramp_pool(device, 257, P, D, P * (D + 4))
    table = torch.arange(257, dtype=torch.int32, device=device).expand(B, -1)
    row = torch.arange(B, device=device)
    lens = torch.where(row % 100 == 99, L - row % 5, row % 3).int()
    rows = ramp_rows(device, B, 1, H, D)
    options = {"clean_logits": True, "backend": sm90.backend.name}
    with sm90.guard():
        got = mqa.fp8_fp4_paged_mqa_logits(
            rows["q"], cache, rows["weights"], lens, table, None, L, **options
        )
    assert got.stride(0) * B > 2**31
    values, position = ramp_values(table[:1], P, L)[0], torch.arange(L, device=device)
    for at in (0, 1, 2, 99, 32699, 32767, 32768, 32799, 32999):
        want = torch.where(position < lens[at], values * 2.0 ** (at % 7), -torch.inf)
        assert torch.equal(got[at], want), at
    assert int((got > 0).sum()) == int(lens.long().sum())


@pytest.mark.parametrize(
    ("clean", "dtype"), [(True, torch.bfloat16), (False, torch.float16), (True, torch.float32)]
)
def test_out_rows_far_apart_are_written_and_nothing_between(
    sm90: Any, clean: bool, dtype: torch.dtype
) -> None:
    B, L, stride, P, D = 9, 303, 2**28 + 5, 64, 64
    device = sm90.device
    memory = torch.empty((B - 1) * stride + L + 99, dtype=dtype, device=device)
    around = [memory[max(0, r * stride + 1 - 64) : r * stride + 1 + L + 64] for r in range(B)]
    out = memory.as_strided((B, L), (stride, 1), 1)
    cache = ramp_pool(device, 5, P, D, P * (D + 4))
    table = torch.arange(5, dtype=torch.int32, device=device).expand(B, -1)
    lens = (L - 5 * torch.arange(B, device=device)).int()[:, None]
    rows = ramp_rows(device, B, 1, 64, D)
    values = ramp_values(table[:1], P, L)[0]
    options = {"clean_logits": clean, "logits_dtype": dtype, "out": out}
    for zone in around:
        zone.fill_(GUARD)
    with sm90.guard():
        mqa.fp8_fp4_paged_mqa_logits(
            rows["q"], cache, rows["weights"], lens, table, None, L, backend=sm90.backend.name,
            **options,
        )  # fmt: skip
    for row, zone in enumerate(around):
        lead, length = 1 if row == 0 else 64, L - 5 * row
        assert (zone[:lead] == GUARD).all()
        assert (zone[lead + L :] == GUARD).all()
        got, rest = zone[lead : lead + length], zone[lead + length : lead + L]
        assert torch.equal(got, (values[:length] * 2.0 ** (row % 7)).to(dtype))
        assert not clean or (rest == -torch.inf).all()


def test_q_of_more_than_2_gib_is_read(sm90: Any) -> None:
    B, L, device = 2**17 + 28, 9, sm90.device
    cache = ramp_pool(device, 2, 16, 128, 16 * 132)
    table = torch.arange(2, dtype=torch.int32, device=device)[1:].expand(B, 1)
    rows = ramp_rows(device, B, 1, 128, 128)
    lens = torch.full((B,), L, dtype=torch.int32, device=device)
    with sm90.guard():
        got = mqa.fp8_fp4_paged_mqa_logits(
            rows["q"], cache, rows["weights"], lens, table, None, L, backend=sm90.backend.name
        )
    assert torch.equal(got, ramp_values(table[:1], 16, L) * factors(B, device))
