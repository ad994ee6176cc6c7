"""Schedules: every task done, fresh ones balanced, any contents safe."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mqa
from mqa.reference import schedule
from mqa.reference.schedule import Group

SMS = st.sampled_from([1, 2, 3, 7, 78, 132, 148, 152, 1000])
LENS = st.one_of(
    st.just(0), st.integers(0, 3), st.integers(250, 260), st.integers(0, 5000), st.just(10**6)
)


@st.composite
def paged_batches(draw: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    next_n = draw(st.integers(1, 20))
    batch = draw(st.integers(0, 40))
    size = batch * next_n
    lens = torch.tensor(draw(st.lists(LENS, min_size=size, max_size=size)), dtype=torch.int32)
    if next_n > 1:
        return lens.view(batch, next_n), None
    if draw(st.booleans()):
        return lens.view(batch, 1), None
    runs = draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch))
    return lens, torch.tensor(runs, dtype=torch.int32)


@st.composite
def dense_batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int]:
    rows = draw(st.integers(0, 60))
    tokens = draw(st.integers(0, 3000))
    bound = st.integers(-5, tokens + 5)
    sides = [draw(st.lists(bound, min_size=rows, max_size=rows)) for _ in range(2)]
    start, end = (torch.tensor(side, dtype=torch.int32) for side in sides)
    return start, end, tokens, draw(st.sampled_from([1, 8, 64, 128, 512, 600]))


def every_task(groups: list[Group]) -> list[tuple[int, int]]:
    return [(group.first, split) for group in groups for split in range(group.tasks)]


def assert_fresh(cuts: Tensor, groups: list[Group], num_sms: int, unit: int) -> None:
    """Sorted, each task once, balanced within the heaviest task."""
    assert cuts.shape == (num_sms + 1, 2)
    assert cuts.dtype == torch.int32
    pairs = [tuple(cut) for cut in cuts.tolist()]
    assert pairs == sorted(pairs)
    done = schedule.tasks(cuts, groups)
    assert list(chain.from_iterable(done)) == every_task(groups)
    rows = {group.first: unit * group.rows if group.tasks else 0 for group in groups}
    total = sum(1 + unit * group.rows * group.tasks for group in groups)
    heaviest = max((unit * g.rows + 1 for g in groups if g.tasks), default=1)
    # Empty groups have a place too: an SM walks over them.
    places = [group._replace(tasks=max(group.tasks, 1)) for group in groups]
    for sm in schedule.tasks(cuts, places):
        weight = sum(rows[first] + (split == 0) for first, split in sm)
        assert weight <= -(-total // num_sms) + heaviest


@given(batch=paged_batches(), num_sms=SMS)
def test_fresh_paged_schedules(batch: tuple[Tensor, Tensor | None], num_sms: int) -> None:
    lens, indices = batch
    cuts = mqa.get_paged_mqa_logits_metadata(lens, 64, num_sms, indices)
    assert_fresh(cuts, schedule.paged_groups(lens, indices), num_sms, 64)


@given(batch=dense_batches(), num_sms=SMS)
def test_fresh_dense_schedules(batch: tuple[Tensor, Tensor, int, int], num_sms: int) -> None:
    cuts = schedule.dense_metadata(*batch, num_sms)
    assert_fresh(cuts, schedule.dense_groups(*batch), num_sms, 1)


@given(
    batch=paged_batches(),
    cuts=st.lists(
        st.tuples(*[st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 30)] * 2), min_size=2
    ),
)
def test_any_contents_do_every_task_at_least_once(
    batch: tuple[Tensor, Tensor | None], cuts: list[tuple[int, int]]
) -> None:
    groups = schedule.paged_groups(*batch)
    done = schedule.tasks(torch.tensor(cuts, dtype=torch.int64).int(), groups)
    assert len(done) == len(cuts) - 1
    assert set(chain.from_iterable(done)) == set(every_task(groups))
    done = schedule.tasks(torch.tensor(sorted(cuts), dtype=torch.int64).int(), groups)
    assert list(chain.from_iterable(done)) == every_task(groups)


@given(batch=paged_batches(), other=paged_batches(), num_sms=SMS)
def test_a_foreign_schedule_does_every_task_once(
    batch: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None], num_sms: int
) -> None:
    groups = schedule.paged_groups(*batch)
    done = schedule.tasks(schedule.paged_metadata(other[0], num_sms, other[1]), groups)
    assert list(chain.from_iterable(done)) == every_task(groups)


def adversarial() -> dict[str, tuple[Tensor, Tensor | None]]:
    many = 32768
    one_request = torch.zeros(4096, dtype=torch.int32)
    huge = torch.zeros(1000, 1, dtype=torch.int32)
    huge[617] = 10**7
    return {
        "all zero": (torch.zeros(many, 1, dtype=torch.int32), None),
        "one huge": (huge, None),
        "one request of 4096 rows": (torch.arange(1, 4097, dtype=torch.int32), one_request),
        "4096 speculative rows": (torch.arange(1, 4097, dtype=torch.int32).view(1, 4096), None),
        "32768 requests": (torch.arange(many, dtype=torch.int32).view(many, 1) % 5000, None),
        "32768 by fours": (torch.arange(4 * many, dtype=torch.int32).view(many, 4) % 999, None),
        "nothing": (torch.zeros(0, 1, dtype=torch.int32), None),
    }


@pytest.mark.parametrize("name", adversarial())
@pytest.mark.parametrize("num_sms", [1, 132, 5000])
def test_adversarial_lengths_are_balanced(name: str, num_sms: int) -> None:
    lens, indices = adversarial()[name]
    cuts = schedule.paged_metadata(lens, num_sms, indices)
    groups = schedule.paged_groups(lens, indices)
    assert_fresh(cuts, groups, num_sms, 64)


def test_groups_of_a_paged_batch() -> None:
    lens = torch.full((2, 11), 300, dtype=torch.int32)
    lens[0, 3] = 600
    assert schedule.paged_groups(lens) == [
        Group(0, 8, 3),
        Group(8, 3, 2),
        Group(11, 8, 2),
        Group(19, 3, 2),
    ]


def test_groups_of_a_varlen_batch_end_at_runs_and_multiples_of_8() -> None:
    indices = torch.tensor([5] * 3 + [2] * 11 + [5] * 4, dtype=torch.int32)
    lens = torch.tensor([0, 0, 0, *range(11), 0, 257, -4, 1], dtype=torch.int32)
    assert schedule.paged_groups(lens, indices) == [
        Group(0, 3, 0),
        Group(3, 5, 1),
        Group(8, 6, 1),
        Group(14, 2, 2),
        Group(16, 2, 1),
    ]


def test_groups_of_a_dense_call() -> None:
    """Query blocks of 512 // 64 = 8 rows; splits count from the smallest start / 4 * 4."""
    start = torch.tensor([7, 99, 50] + [0] * 6 + [300, -3], dtype=torch.int32)
    end = torch.tensor([263, 99, 2] + [0] * 6 + [10**6, 9], dtype=torch.int32)
    assert schedule.dense_groups(start, end, 1000, 64) == [Group(0, 8, 2), Group(1, 3, 4)]


def test_empty_groups_are_shared_out() -> None:
    lens = torch.zeros(32768, dtype=torch.int32)
    lens[-1] = 256
    cuts = schedule.paged_metadata(lens, 132)
    assert (cuts[:, 0].diff() <= -(-(32768 + 64) // 132) + 2).all()
    small = torch.tensor([0, 0, 0, 0, 0, 0], dtype=torch.int32)
    assert schedule.paged_metadata(small, 3).tolist() == [[0, 0], [2, 0], [4, 0], [6, 0]]


def test_a_long_request_among_empty_ones_is_split() -> None:
    """Its 32 tasks weigh 2049 of 34816: a share of 264 is 4 of them."""
    lens = torch.zeros(32768, dtype=torch.int32)
    lens[-1] = 8192
    cuts = schedule.paged_metadata(lens, 132)
    done = schedule.tasks(cuts, schedule.paged_groups(lens))
    assert max(map(len, done)) <= 5
    assert sum(map(bool, done)) >= 7


def test_heavy_batches_for_many_sms_do_not_overflow() -> None:
    """65536 times the total is beyond 2^63."""
    lens = torch.full((32768, 8), 2**31 - 1, dtype=torch.int32)
    cuts = schedule.paged_metadata(lens, 65536)
    assert cuts[-1].tolist() == [32768 * 8, 0]
    assert cuts[1::2, 1].unique().tolist() == [2**22]


def test_cut_points_of_a_small_batch() -> None:
    """Two groups of weights 1 + 64·2·3 and 1 + 64·1·2: cuts at weights 0, 171, 342 and 514."""
    lens = torch.tensor([600, 700, 0, 0], dtype=torch.int32)
    indices = torch.tensor([0, 0, 1, 2], dtype=torch.int32)
    lens[2] = 400
    groups = schedule.paged_groups(lens[:3], indices[:3])
    assert groups == [Group(0, 2, 3), Group(2, 1, 2)]
    cuts = schedule.paged_metadata(lens[:3], 3, indices[:3])
    assert cuts.tolist() == [[0, 0], [0, 2], [2, 0], [3, 0]]
    assert schedule.tasks(cuts, groups) == [[(0, 0), (0, 1)], [(0, 2)], [(2, 0), (2, 1)]]
