"""What paged rows are made of: windows, limits, inputs, schedules, and when a result is right."""

import numpy as np
import pytest
import torch

import mqa
from mqa.cli.gpu import judge
from mqa.cli.gpu.calls import call_mqa, schedule_of
from mqa.cli.gpu.inputs import draw
from mqa.cli.gpu.rows import MQA, PEER, Call
from mqa.cli.gpu.suite import hopper_rows
from mqa.cli.gpu.windows import Batch, batch, causal, drawn, ending
from mqa.problem import FORMATS
from mqa.reference import schedule


def _draw(party):
    return draw(party, torch.Generator().manual_seed(0))


def _paged(group):
    return [row for row in hopper_rows() if row.group == group]


def test_rows_of_a_batch_are_the_last_tokens_of_their_request():
    windows = batch(2, 3, 10)
    assert windows.lens.tolist() == [[8, 9, 10]] * 2
    assert (windows.rows, windows.pairs, windows.keys, windows.tokens) == (6, 54, 10, 20)
    assert batch(1, 1, 10, 99).keys == 99
    assert batch(1, 7, 7).end.tolist() == causal(7, 7).end.tolist()


def test_only_the_last_request_of_an_ending_batch_has_tokens():
    windows = ending(4, 9, 100)
    assert windows.lens.tolist() == [[0], [0], [0], [9]]
    assert (windows.keys, windows.tokens, ending(4, 0, 100).tokens) == (100, 9, 0)


def test_drawn_lens_are_any_and_the_same_each_time():
    lens = drawn(500, 2, 3).lens
    assert set(lens.flatten().tolist()) == {0, 1, 2, 3}
    assert (lens == drawn(500, 2, 3).lens).all()


def test_suite_has_the_paged_rows_that_were_promised():
    rows = _paged("paged")
    sizes = {
        (row.ours.windows.rows, row.ours.windows.next_n, row.ours.windows.keys) for row in rows
    }
    assert sizes == {(8, 1, 32768), (128, 2, 8192), (64, 1, 65536), (256, 1, 8192), (512, 2, 8192),
                     (64, 1, 8192), (1, 1, 65536)}  # fmt: skip
    for row in rows:
        assert (row.other.who, row.ours.who) == (PEER, MQA)
        assert row.other.call == row.ours.call == Call(schedule="fresh")
        assert (row.ours.H, row.ours.D, row.ours.windows.page) == (64, 128, 64)
        assert row.after_kernel == (row.ours.windows.rows == 1)
    assert sorted(row.limit.value for row in rows) == [0.98] * 5 + [1.12, 1.2]


def test_each_row_beyond_the_peer_has_its_limit():
    found = {
        group: [(row.limit.sense, row.limit.value) for row in _paged(group)]
        for group in ("paged rows", "paged formats")
    }
    assert found == {
        "paged rows": [("at_most", value) for value in (1.7, 3.2, 1.3, 1.1)],
        "paged formats": [
            ("at_least", 0.9), ("at_least", 1.4), ("at_most", 2.3), ("at_most", 2.3),
        ],
    }  # fmt: skip
    assert [row.at_most for row in _paged("paged metadata")] == [5e-6, 5e-6, 8e-6]
    assert [row.at_most for row in _paged("paged empty")] == [15e-6] * 12
    kinds = {row.ours.call.schedule for row in _paged("paged empty")}
    assert kinds == {"fresh", "stale", "reversed", "random"}


def test_kv_bytes_count_values_and_scales(stand):
    windows = batch(2, 3, 100)
    sizes = {kind: stand.party(windows, dim=128, format=kind).kv_bytes for kind in FORMATS}
    assert sizes == {
        "fp8": 200 * 132, "mxfp8": 200 * 132, "mxfp4": 200 * 68, "bf16": 200 * 256
    }  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_pages_hold_the_data_of_the_dense_call(stand, kind):
    """Only the place differs: one request's logits are the same bits through pages."""
    pages, dense = (
        _draw(stand.party(windows, format=kind)) for windows in (batch(1, 70, 70), causal(70, 70))
    )
    assert pages.table.shape == (1, 2)
    assert torch.equal(pages.q.flatten(0, 1).view(torch.uint8), dense.q.view(torch.uint8))
    results = [call_mqa(inputs, Call(clean=True))() for inputs in (pages, dense)]
    assert torch.equal(*results)


def test_requests_have_pages_of_their_own_in_no_order(stand):
    windows = Batch(np.zeros(3, np.int64), np.array([130, 0, 64]), 200, 1)
    inputs = _draw(stand.party(windows))
    assert inputs.k.shape == (4, 64, 1, 36)
    used = [*inputs.table[0, :3].tolist(), inputs.table[2, 0].item()]
    assert sorted(used) == [0, 1, 2, 3]
    assert used != [0, 1, 2, 3]
    assert inputs.table.shape == (3, 4)
    assert inputs.lens.tolist() == [[130], [0], [64]]
    assert _draw(stand.party(ending(2, 0, 9))).k.shape == (1, 64, 1, 36)


def test_many_numbers_are_quantised_part_by_part(stand, monkeypatch):
    monkeypatch.setattr("mqa.cli.gpu.inputs._CHUNK", 5 * 4 * 32)
    inputs = _draw(stand.party(causal(12, 40), format="mxfp8"))
    assert inputs.q.shape == (12, 4, 32)
    assert inputs.q_scale.shape == (12, 4)
    assert inputs.k_scale.shape == (40,)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_right_paged_result_is_within_the_limit(stand, kind, clean):
    call = Call(clean=clean, format=kind, logits="bfloat16")
    inputs = _draw(stand.party(batch(40, 2, 70, 99), format=kind))
    assert judge.assert_defined(call_mqa(inputs, call)(), inputs, call) < 2e-3


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [(199, 69, "difference to the definition"), (0, 98, "entries outside the windows are not")],
)
def test_a_wrong_paged_result_is_told(stand, row, column, message):
    """The row that sees most is always among those that are compared."""
    call, inputs = Call(clean=True), _draw(stand.party(ending(200, 70, 99)))
    result = call_mqa(inputs, call)().clone()
    result[row, column] += 1e3
    result[row, column].nan_to_num_(0.0, neginf=0.0)
    with pytest.raises(judge.WrongResult, match=message):
        judge.assert_defined(result, inputs, call)


@pytest.mark.parametrize("kind", ["fresh", "stale", "reversed", "random"])
def test_schedules_are_what_their_name_says(stand, monkeypatch, kind):
    monkeypatch.setattr(mqa, "get_num_sms", lambda device=None: 8)
    inputs = _draw(stand.party(ending(9, 70, 3000)))
    cuts = schedule_of(inputs, Call(schedule=kind))
    assert (cuts.shape, cuts.dtype) == ((9, 2), torch.int32)
    fresh = schedule.paged_metadata(inputs.lens, 8)
    stale = schedule.paged_metadata(torch.full_like(inputs.lens, 3000), 8)
    expected = {"fresh": fresh, "stale": stale, "reversed": fresh.flip(0)}
    if kind in expected:
        assert torch.equal(cuts, expected[kind])
    else:
        assert bool((cuts[:, 0] < 9).all() & (cuts >= 0).all())
        assert not torch.equal(cuts, fresh)
