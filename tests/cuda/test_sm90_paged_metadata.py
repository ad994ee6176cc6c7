"""The Hopper kernel for paged schedules gives the cut points of the definition, bit for bit."""

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
KINDS = ("random", "any", "zero", "one row", "sparse", "full", "short", "around a split")


def lens_of(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """int32 lens on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.Size(shape).numel()

    def between(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (rows,), generator=generator)

    zero, far = torch.zeros(rows, dtype=torch.int64), between(-9, 9000)
    lens = {
        "random": far,
        "any": between(INT32.min, INT32.max),
        "zero": zero,
        "one row": torch.where(torch.arange(rows) == seed % max(rows, 1), INT32.max, 0),
        "sparse": torch.where(between(0, 99) == 0, far, 0),
        "full": zero + 65536,
        "short": between(0, 2),
        "around a split": 256 * between(0, 3) + between(-1, 1),
    }[kind]
    return lens.int().view(shape)


def indices_of(rows: int, longest: int, seed: int) -> Tensor:
    """int32 [rows] of runs of up to `longest` equal values; values come back."""
    generator = torch.Generator().manual_seed(seed)
    cut = torch.randint(0, longest, (rows,), generator=generator) == 0
    return (cut.long().cumsum(0) % 5).int()


def assert_same_cuts(sm90: Any, lens: Tensor, sms: int, indices: Tensor | None = None) -> None:
    """`lens` and `indices` on the device, whatever their strides."""
    on_host = None if indices is None else indices.cpu()
    want = schedule.paged_metadata(lens.cpu(), sms, on_host)
    with sm90.guard():
        got = mqa.get_paged_mqa_logits_metadata(lens, 64, sms, indices)
    assert got.dtype == torch.int32
    assert got.is_contiguous()
    assert torch.equal(got.cpu(), want)


@settings(max_examples=300)
@given(
    kind=st.sampled_from(KINDS),
    requests=st.one_of(st.integers(0, 70), st.integers(0, 3000)),
    next_n=st.one_of(st.none(), st.integers(1, 20)),
    sms=st.one_of(st.integers(1, 200), st.integers(1, 5000)),
    seed=st.integers(0, 2**16),
)
def test_drawn_lens_give_the_cuts_of_the_definition(
    sm90: Any, kind: str, requests: int, next_n: int | None, sms: int, seed: int
) -> None:
    shape = (requests,) if next_n is None else (requests, next_n)
    assert_same_cuts(sm90, lens_of(kind, shape, seed).to(sm90.device), sms)


@settings(max_examples=200)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.one_of(st.integers(0, 70), st.integers(0, 5000)),
    longest=st.sampled_from((1, 2, 5, 20, 1000)),
    rank=st.sampled_from((1, 2)),
    sms=st.integers(1, 5000),
    seed=st.integers(0, 2**16),
)
def test_drawn_runs_give_the_cuts_of_the_definition(
    sm90: Any, kind: str, rows: int, longest: int, rank: int, sms: int, seed: int
) -> None:
    lens = lens_of(kind, (rows,) if rank == 1 else (rows, 1), seed).to(sm90.device)
    assert_same_cuts(sm90, lens, sms, indices_of(rows, longest, seed).to(sm90.device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("requests", [0, 1, 33, 1025, 4096, 8191, 32768, 32769, 40000])
def test_batches_of_any_size_give_the_cuts_of_the_definition(
    sm90: Any, requests: int, kind: str
) -> None:
    for next_n, sms in ((1, 132), (2, 200), (9, 78)):
        lens = lens_of(kind, (requests, next_n), requests).to(sm90.device)
        assert_same_cuts(sm90, lens, sms)
    lens = lens_of(kind, (requests,), requests).to(sm90.device)
    for longest in (1, 6, 50):
        indices = indices_of(requests, longest, requests).to(sm90.device)
        assert_same_cuts(sm90, lens, 132, indices)


@pytest.mark.parametrize("first", range(1, 202, 25))
def test_any_number_of_sms_gives_the_cuts_of_the_definition(sm90: Any, first: int) -> None:
    for sms in range(first, first + 25):
        for shape in ((77, 2), (1000,), (40, 17)):
            assert_same_cuts(sm90, lens_of("random", shape, sms).to(sm90.device), sms)


def test_more_sms_than_a_cluster_has_threads_are_legal(sm90: Any) -> None:
    lens = lens_of("random", (300, 2), 1).to(sm90.device)
    for sms in (1023, 1024, 1025, 5000, 8193, 70000):
        assert_same_cuts(sm90, lens, sms)


def spread(values: Tensor, strides: tuple[int, ...], device: torch.device) -> Tensor:
    """The values on the device, with these strides; constant where a stride is 0."""
    steps = zip(values.shape, strides, strict=True)
    span = 2 + sum((size - 1) * stride for size, stride in steps)
    memory = torch.full((span,), 77, dtype=torch.int32, device=device)
    view = memory.as_strided(values.shape, strides, 1)
    if 0 not in strides:
        view.copy_(values)
    return view


@pytest.mark.parametrize("strides", [(3, 1), (7, 2), (1, 300), (0, 1), (3, 0), (0, 0), (5,), (0,)])
def test_strided_lens_give_the_same_cuts(sm90: Any, strides: tuple[int, ...]) -> None:
    shape = (300, 3)[: len(strides)]
    lens = spread(lens_of("random", shape, 3), strides, sm90.device)
    assert_same_cuts(sm90, lens, 132)


@pytest.mark.parametrize("stride", [0, 2, 5])
def test_strided_indices_give_the_same_cuts(sm90: Any, stride: int) -> None:
    indices = spread(indices_of(300, 6, 3), (stride,), sm90.device)
    for shape, strides in (((300,), (2,)), ((300, 1), (3, 99))):
        lens = spread(lens_of("random", shape, 3), strides, sm90.device)
        assert_same_cuts(sm90, lens, 132, indices)


@pytest.mark.parametrize(("stride", "offset"), [(2, 0), (2, 1), (3, 0), (3, 1), (9, 3)])
def test_out_is_filled_and_nothing_around_it(sm90: Any, stride: int, offset: int) -> None:
    lens = lens_of("random", (300, 2), 5)
    on_device = lens.to(sm90.device)
    for sms in (1, 67, 132, 2000):
        memory = torch.full(((sms + 2) * stride + 9,), -77, dtype=torch.int32, device=sm90.device)
        out = memory.as_strided((sms + 1, 2), (stride, 1), offset)
        with sm90.guard():
            got = mqa.get_paged_mqa_logits_metadata(on_device, 64, sms, out=out)
        assert got.data_ptr() == out.data_ptr()
        assert torch.equal(out.cpu(), schedule.paged_metadata(lens, sms))
        out.fill_(-77)
        assert (memory == -77).all()


def test_twenty_repeats_give_the_same_cuts(sm90: Any) -> None:
    lens = lens_of("random", (40000, 1), 1).to(sm90.device)
    want = mqa.get_paged_mqa_logits_metadata(lens, 64, 132)
    for _ in range(20):
        assert torch.equal(mqa.get_paged_mqa_logits_metadata(lens, 64, 132), want)
