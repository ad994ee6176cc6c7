"""What the Hopper suite times: windows, rows, inputs."""

import numpy as np
import pytest
import torch

from mqa.cli.gpu.graphs import Turn
from mqa.cli.gpu.inputs import draw, rotation
from mqa.cli.gpu.rows import GROUPS, MQA, PEER
from mqa.cli.gpu.suite import hopper_rows
from mqa.cli.gpu.windows import Windows, causal, halves, one_row, packed
from mqa.reference import schedule


def test_causal_rows_are_the_last_tokens():
    windows = causal(3, 10)
    assert windows.start.tolist() == [0, 0, 0]
    assert windows.end.tolist() == [8, 9, 10]
    assert (windows.rows, windows.pairs, windows.longest) == (3, 27, 10)


def test_packed_requests_see_their_own_tokens_only():
    windows = packed([(2, 2), (1, 5), (3, 4)])
    assert windows.start.tolist() == [0, 0, 2, 7, 7, 7]
    assert windows.end.tolist() == [1, 2, 7, 9, 10, 11]
    assert windows.keys == 11


def test_context_parallel_halves_are_the_ends_of_the_prompt():
    windows = halves(4, 100)
    assert windows.start.tolist() == [0] * 4
    assert windows.end.tolist() == [1, 2, 99, 100]


def test_one_row_leaves_the_others_empty():
    windows = one_row(5, 7, 3)
    assert (windows.end - windows.start).tolist() == [0, 0, 0, 7, 0]


@pytest.mark.parametrize("heads", [512, 128, 64])
@pytest.mark.parametrize(
    "windows",
    [
        causal(19, 50),
        packed([(7, 30), (9, 9), (2, 61)]),
        one_row(20, 33, 9),
        Windows(np.array([5, 6, 9]), np.array([4, 6, 8]), 10),
    ],
)
def test_hull_is_what_a_kernel_with_one_stretch_a_block_scores(windows, heads):
    total, block = 0, schedule.query_block(heads)
    for first in range(0, windows.rows, block):
        rows = range(first, min(first + block, windows.rows))
        seen = [s for s in rows if windows.start[s] < windows.end[s]]
        if seen:
            low = min(windows.start[s] for s in seen)
            total += len(rows) * (max(windows.end[s] for s in seen) - (low - low % 4))
    assert windows.hull(heads) == total
    assert windows.hull(512) >= windows.pairs


def test_suite_has_the_rows_that_were_promised():
    rows = hopper_rows()
    assert {row.group for row in rows} == set(GROUPS)
    assert len({(row.group, row.name) for row in rows}) == len(rows)
    main = [row for row in rows if row.group == "main"]
    assert len(main) == 18
    for row in main:
        assert (row.other.who, row.ours.who) == (PEER, MQA)
        assert row.other.call == row.ours.call
        assert not row.ours.call.clean
    cleaning = next(row for row in rows if row.group == "cleaning").ours.windows
    assert (cleaning.rows, cleaning.keys, cleaning.longest) == (8192, 65536, 8192)
    assert cleaning.pairs < cleaning.rows * cleaning.keys / 8
    scheduled = [row for row in rows if row.group == "ragged"]
    assert all(row.ours.call.schedule == "fresh" for row in scheduled)
    assert {row.ours.windows.rows for row in scheduled} == {16256, 2048, 1024}


def test_only_and_quick_choose_rows():
    assert [row.group for row in hopper_rows("^few rows: 16×")] == ["few rows"] * 2
    assert any("65536" in row.name for row in hopper_rows("main"))
    quick = hopper_rows("main", quick=True)
    assert len(quick) == 12
    assert not any("8192×65536" in row.name for row in quick)


def test_inputs_rotate_through_four_times_the_cache(stand):
    party = stand.party(stand.SMALL)
    size = draw(party, torch.Generator()).nbytes
    assert size == 3 * 4 * 32 + 40 * 32 + 40 * 4 + 3 * 4 * 4 + 2 * 3 * 4
    assert len(rotation(party, stand.Cpu.where, 1)) == 3
    assert len(rotation(party, stand.Cpu.where, size)) == 4
    assert len(rotation(party, stand.Cpu.where, 1 << 40)) == 64
    first, second, _ = rotation(party, stand.Cpu.where, 1)
    assert not torch.equal(first.q.float(), second.q.float())
    assert (
        draw(stand.party(stand.SMALL, weights="bfloat16"), torch.Generator()).w.dtype
        == torch.bfloat16
    )


def test_turns_go_round_from_where_they_start():
    seen = []
    turn = Turn([lambda index=index: seen.append(index) for index in range(3)], first=1)
    for _ in range(4):
        turn()
    assert seen == [1, 2, 0, 1]
