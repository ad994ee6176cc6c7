"""On Hopper a row's bits depend on nothing but the row: not on its neighbours or the work split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mqa.problem import DenseProblem
from mqa.testing import Case, assert_bitwise
from mqa.testing.strategies import dense_problems

pytestmark = pytest.mark.gpu
HEADS = (8, 16, 32, 64, 128)
SPREAD = [
    "dense fp8 S=300 N=1500 H=8 D=128 windows=random seed=1",
    "dense fp8 S=300 N=1500 H=16 D=32 windows=packed seed=2",
    "dense fp8 S=300 N=1500 H=32 D=64 windows=random seed=3",
    "dense fp8 S=300 N=1500 H=64 D=128 windows=random seed=4",
    "dense fp8 S=300 N=1500 H=64 D=64 windows=causal seed=5",
    "dense fp8 S=300 N=1500 H=128 D=128 windows=random seed=6",
]


@dataclass(frozen=True)
class Scored:
    """A case and the logits of all its rows: on their own windows, and on all 1500 tokens."""

    case: Case
    whole: Tensor
    full: Tensor


@pytest.fixture(scope="module", params=SPREAD)
def scored(sm90: Any, request: pytest.FixtureRequest) -> Scored:
    case = sm90.case(request.param)
    everything = windows(case, 300, 0, 1500)
    return Scored(case, sm90.call(case), sm90.call(case, **everything))


def windows(case: Case, rows: int, low: int, high: int) -> dict[str, Tensor]:
    """The arguments that give some rows the window [low, high)."""
    start, end = (
        torch.full((rows,), n, dtype=torch.int32, device=case.device) for n in (low, high)
    )
    return {"cu_seq_len_k_start": start, "cu_seq_len_k_end": end}


def in_pieces(sm90: Any, case: Case, first: int, last: int, step: int) -> Tensor:
    """Rows first .. last - 1 of the result, scored `step` at a time."""
    cuts = range(first, last, step)
    return torch.cat([sm90.call(case, slice(row, min(row + step, last))) for row in cuts])


@pytest.mark.parametrize("step", [1, 2, 3, 5, 16, 64, 129])
def test_rows_scored_apart_have_the_same_bits(sm90: Any, scored: Scored, step: int) -> None:
    for first, last in ((0, 300), (1, 300), (7, 161)):
        got = in_pieces(sm90, scored.case, first, last, step)
        assert_bitwise(got, scored.whole[first:last], replay=scored.case.problem)


def test_a_row_has_the_same_bits_at_any_place_of_a_batch(sm90: Any, scored: Scored) -> None:
    """Rows in another order, and one row repeated."""
    t = scored.case.tensors
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1)).to(sm90.device)
    for index in (order, order[:11], torch.full((40,), 77, device=sm90.device)):
        rows = {
            "q": t["q"].view(torch.uint8)[index].view(t["q"].dtype),
            "weights": t["w"][index],
            "cu_seq_len_k_start": t["start"][index],
            "cu_seq_len_k_end": t["end"][index],
        }
        got = sm90.call(scored.case, **rows)
        assert_bitwise(got, scored.whole[index], replay=scored.case.problem)


WINDOWS = [(0, 1), (0, 4), (1, 255), (255, 257), (300, 700), (511, 1500), (1499, 1500)]


@pytest.mark.parametrize("count", [1, 3, 300])
def test_any_window_scored_alone_has_the_same_bits(sm90: Any, scored: Scored, count: int) -> None:
    case, line = scored.case, scored.case.problem
    t, rows = case.tensors, slice(100, 100 + count) if count < 300 else slice(0, 300)
    for low, high in WINDOWS:
        want, window = scored.full[rows, low:high], windows(case, count, low, high)
        part = sm90.call(case, rows, **window)
        assert_bitwise(part[:, low:high], want, replay=line)
        compressed = sm90.call(case, rows, **window, max_seqlen_k=1600)
        assert_bitwise(compressed[:, : high - low], want, replay=line)
        # The same tokens as a tensor of their own: at another place in a tile.
        kv = t["kv"][low:high], t["kv_scale"][low:high]
        moved = sm90.call(case, rows, kv=kv, **windows(case, count, 0, high - low))
        assert_bitwise(moved, want, replay=line)


@settings(max_examples=60)
@given(
    problem=dense_problems(
        formats=("fp8",),
        heads=HEADS,
        head_dims=(32, 64, 128),
        max_rows=70,
        max_keys=900,
        outs=("float32",),
        layouts=False,
    ),
    data=st.data(),
)
def test_drawn_row_ranges_have_the_same_bits(
    sm90: Any, problem: DenseProblem, data: st.DataObject
) -> None:
    case = sm90.case(problem)
    whole = sm90.call(case)
    low = data.draw(st.integers(0, problem.S))
    high = data.draw(st.integers(low, problem.S))
    assert_bitwise(sm90.call(case, slice(low, high)), whole[low:high], replay=problem)


@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("H", HEADS)
def test_compressed_weights_dtype_and_out_do_not_change_bits(sm90: Any, H: int, D: int) -> None:
    case = sm90.case(f"dense fp8 S=70 N=900 H={H} D={D} weights=bfloat16 windows=full seed=9")
    t, whole = case.tensors, sm90.call(case)
    for rows in (slice(None), slice(0, 1), slice(9, 12)):
        want = whole[rows]
        assert_bitwise(sm90.call(case, rows, weights=t["w"][rows].float()), want)
        assert_bitwise(sm90.call(case, rows, max_seqlen_k=900), want)
        assert_bitwise(sm90.call(case, rows, max_seqlen_k=1001)[:, :900], want)
        assert_bitwise(sm90.call(case, rows, clean_logits=False), want)
        for stride in (900, 901, 1024):
            out = torch.full((70, stride), torch.nan, device=sm90.device)[rows, :900]
            assert_bitwise(sm90.call(case, rows, out=out), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("H", HEADS)
def test_short_logits_are_the_float32_ones_rounded(sm90: Any, H: int, dtype: torch.dtype) -> None:
    case = sm90.case(f"dense fp8 S=40 N=900 H={H} D=64 windows=random seed=9")
    assert_bitwise(sm90.call(case, logits_dtype=dtype), sm90.call(case).to(dtype))


@pytest.mark.parametrize("rows", [slice(0, 1), slice(7, 11), slice(0, 300)])
def test_twenty_repeats_have_the_same_bits(sm90: Any, scored: Scored, rows: slice) -> None:
    want, cuts = scored.whole[rows], sm90.metadata(scored.case)
    for _ in range(20):
        for meta in (None, cuts):
            got = sm90.call(scored.case, rows, schedule_meta=meta)
            assert_bitwise(got, want, replay=scored.case.problem)
