"""The Hopper kernel for dense schedules gives the cut points of the definition, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mqa
from mqa.reference import schedule

pytestmark = pytest.mark.gpu
INT32 = torch.iinfo(torch.int32)
HEADS = (1, 3, 8, 16, 24, 32, 64, 128, 512, 513, 5000)
KEYS = (0, 1, 255, 256, 257, 4100, 65536, 2**20, INT32.max)
KINDS = ("causal", "random", "any", "empty", "inverted", "one row", "falling", "sparse", "full")


def windows(kind: str, rows: int, keys: int, seed: int) -> tuple[Tensor, Tensor]:
    """int32 starts and ends [rows] on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def between(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (rows,), generator=generator)

    row, zero = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    start, end = between(-9, min(keys + 9, INT32.max)), between(-9, min(keys + 9, INT32.max))
    seen = {
        "causal": (zero, keys - rows + row + 1),
        "random": (torch.minimum(start, end), torch.maximum(start, end)),
        "any": (between(INT32.min, INT32.max), between(INT32.min, INT32.max)),
        "empty": (start, start),
        "inverted": (torch.maximum(start, end), torch.minimum(start, end)),
        "one row": (zero, torch.where(row == seed % max(rows, 1), keys, 0)),
        "falling": (keys - row, keys - row // 2),
        "sparse": (start, torch.where(between(0, 99) == 0, end, start)),
        "full": (zero, zero + keys),
    }[kind]
    low, high = (bound.clamp(INT32.min, INT32.max).int() for bound in seen)
    return low, high


def assert_same_cuts(sm90: Any, start: Tensor, end: Tensor, N: int, H: int, sms: int) -> None:
    want = schedule.dense_metadata(start, end, N, H, sms)
    on_device = start.to(sm90.device), end.to(sm90.device)
    with sm90.num_sms(sms), sm90.guard():
        got = mqa.get_mqa_logits_metadata(*on_device, N, H)
    assert got.dtype == torch.int32
    assert got.is_contiguous()
    assert torch.equal(got.cpu(), want)


@settings(max_examples=300)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.one_of(st.integers(0, 70), st.integers(0, 5000)),
    keys=st.sampled_from(KEYS),
    heads=st.sampled_from(HEADS),
    sms=st.integers(1, 200),
    seed=st.integers(0, 2**16),
)
def test_drawn_windows_give_the_cuts_of_the_definition(
    sm90: Any, kind: str, rows: int, keys: int, heads: int, sms: int, seed: int
) -> None:
    assert_same_cuts(sm90, *windows(kind, rows, keys, seed), keys, heads, sms)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 31, 33, 1023, 1025, 4099, 32768, 40000])
def test_batches_of_any_size_give_the_cuts_of_the_definition(
    sm90: Any, rows: int, kind: str
) -> None:
    bounds = windows(kind, rows, 65536, rows)
    for heads, sms in ((1, 4), (2, 132), (8, 200), (64, 132), (128, 1), (513, 78)):
        assert_same_cuts(sm90, *bounds, 65536, heads, sms)


@pytest.mark.parametrize("sms", range(1, 201))
def test_any_number_of_sms_gives_the_cuts_of_the_definition(sm90: Any, sms: int) -> None:
    for rows, heads in ((77, 64), (1000, 128)):
        assert_same_cuts(sm90, *windows("random", rows, 9000, sms), 9000, heads, sms)


def test_more_sms_than_a_block_has_threads_are_legal(sm90: Any) -> None:
    for sms in (1023, 1024, 1025, 5000, 70000):
        assert_same_cuts(sm90, *windows("random", 300, 9000, sms), 9000, 64, sms)


@pytest.mark.parametrize("strides", [(2, 2), (3, 1), (0, 1), (1, 0), (7, 5)])
def test_strided_windows_give_the_same_cuts(sm90: Any, strides: tuple[int, int]) -> None:
    for rows in (1, 300, 4099):
        dense = windows("random", rows, 9000, 3)
        views = []
        for bound, stride in zip(dense, strides, strict=True):
            memory = torch.full((rows * stride + 2,), -77, dtype=torch.int32, device=sm90.device)
            views.append(memory.as_strided((rows,), (stride,), 1))
            if stride:
                views[-1].copy_(bound.to(sm90.device))
        want = schedule.dense_metadata(*(view.cpu() for view in views), 9000, 64, 132)
        with sm90.num_sms(132), sm90.guard():
            got = mqa.get_mqa_logits_metadata(*views, 9000, 64)
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize(("stride", "offset"), [(2, 0), (2, 1), (3, 0), (3, 1), (9, 3)])
def test_out_is_filled_and_nothing_around_it(sm90: Any, stride: int, offset: int) -> None:
    start, end = windows("random", 300, 9000, 5)
    on_device = start.to(sm90.device), end.to(sm90.device)
    for sms in (1, 67, 132):
        memory = torch.full(((sms + 2) * stride + 9,), -77, dtype=torch.int32, device=sm90.device)
        out = memory.as_strided((sms + 1, 2), (stride, 1), offset)
        with sm90.num_sms(sms), sm90.guard():
            got = mqa.get_mqa_logits_metadata(*on_device, 9000, 64, out=out)
        assert got.data_ptr() == out.data_ptr()
        assert torch.equal(out.cpu(), schedule.dense_metadata(start, end, 9000, 64, sms))
        out.fill_(-77)
        assert (memory == -77).all()


def test_twenty_repeats_give_the_same_cuts(sm90: Any) -> None:
    start, end = (bound.to(sm90.device) for bound in windows("random", 4099, 9000, 1))
    want = mqa.get_mqa_logits_metadata(start, end, 9000, 8)
    for _ in range(20):
        assert torch.equal(mqa.get_mqa_logits_metadata(start, end, 9000, 8), want)
