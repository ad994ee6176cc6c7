"""A row: judged first, then timed, then held against floors and bounds."""

import numpy as np
import pytest
import torch

import mqa
from mqa.cli.gpu import judge
from mqa.cli.gpu.calls import Unsupported, backend_of, call_mqa
from mqa.cli.gpu.inputs import draw
from mqa.cli.gpu.measure import measure
from mqa.cli.gpu.rows import Call
from mqa.cli.gpu.windows import Windows


def _judged(stand, call, spoil=lambda result: None):
    inputs = draw(stand.party(stand.SMALL, weights=call.weights), torch.Generator())
    result = call_mqa(inputs, call)().clone()
    spoil(result)
    return judge.assert_defined(result, inputs, call)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_right_result_is_within_the_limit(stand, clean, compressed, dtype):
    call = Call(clean, compressed, dtype, weights="bfloat16")
    assert _judged(stand, call) < judge._LIMIT[dtype]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda result: result[1].mul_(1.01), "difference to the definition is 0.00"),
        (lambda result: result[1, 5].fill_(torch.nan), "is nan"),
        (lambda result: result[0, -1].fill_(0.0), "1 entries outside the windows are not -inf"),
    ],
)
def test_a_wrong_result_is_told(stand, spoil, message):
    with pytest.raises(judge.WrongResult, match=message):
        _judged(stand, Call(clean=True), spoil)


def test_entries_outside_the_windows_may_be_anything_unless_cleaned(stand):
    assert _judged(stand, Call(), lambda result: result[0, -1].fill_(torch.nan)) < 1e-3


def test_nothing_valid_is_no_error_but_something_out_of_nothing_is(stand):
    empty = Windows(np.zeros(3, np.int64), np.zeros(3, np.int64), 40)
    inputs = draw(stand.party(empty), torch.Generator())
    assert judge.assert_agree(torch.ones(3, 40), torch.zeros(3, 40), inputs, Call()) == 0
    inputs = draw(stand.party(stand.SMALL), torch.Generator())
    with pytest.raises(judge.WrongResult, match="inf"):
        judge.assert_agree(torch.ones(3, 40), torch.zeros(3, 40), inputs, Call())


def test_each_timed_run_comes_after_others_and_none_sees_its_inputs_again_soon(stand):
    device = stand.Cpu()
    measure(stand.AGAINST_PEER, device, stand.OtherMqa(), 2, stand.CEILINGS)
    timed = device.events[device.events.index("busy") - 1 :]
    assert timed == ["replay", *["busy", "timed"] * 2] * 2 + ["free"]


def test_row_against_the_peer_says_times_rates_and_errors(stand):
    device = stand.Cpu([2e-3, 1e-3, 1e-3, 2e-3])
    entry = measure(stand.AGAINST_PEER, device, stand.OtherMqa(), 2, stand.CEILINGS)
    assert entry["ratio"]["median"] == pytest.approx(2.0)
    assert entry["errors"]["each other"] == 0
    ours = entry["ours"]
    assert ours["pairs"] == stand.SMALL.pairs == 38 + 39 + 40
    assert ours["tflops"] == pytest.approx(2 * 4 * 32 * stand.SMALL.pairs / 1e-3 / 1e12)
    assert ours["clocks_per_pair"] == pytest.approx(1e-3 * 1e9 * 10 / stand.SMALL.pairs)
    assert ours["floor_clocks"] == {"tensor": 2 * 4 * 32 / 8192, "epilogue": 4 / 64}
    assert ours["backend"] == "reference"
    assert entry["other"]["clocks_per_pair"] == pytest.approx(2 * ours["clocks_per_pair"])


def test_a_peer_that_is_wrong_is_not_timed(stand):
    device = stand.Cpu()
    with pytest.raises(judge.WrongResult, match="limit"):
        measure(stand.AGAINST_PEER, device, stand.OtherMqa(error=1e3), 2, stand.CEILINGS)
    assert "timed" not in device.events


def test_ragged_rows_have_a_limit_from_the_even_case(stand):
    row = stand.ROWS[4]
    entry = measure(row, stand.Cpu([4e-3]), stand.OtherMqa(), 1, stand.CEILINGS)
    share = row.ours.windows.hull(4) / row.other.windows.hull(4)
    assert entry["limit_seconds"] == pytest.approx(4e-3 * share + 5e-6)
    assert entry["of_limit"] == pytest.approx(4e-3 / entry["limit_seconds"])


def test_cleaning_is_held_against_the_fill_rate(stand):
    entry = measure(stand.ROWS[3], stand.Cpu([3e-3, 1e-3]), stand.OtherMqa(), 1, {"fill": 4e3})
    assert entry["fill_seconds"] == pytest.approx(3 * 40 * 4 / 4e3)
    assert entry["outside_seconds"] == pytest.approx(3 * 4 / 4e3)
    assert entry["extra_seconds"] == pytest.approx(2e-3)


def test_other_sizes_are_held_against_the_even_rate(stand):
    entry = measure(stand.ROWS[5], stand.Cpu([3e-3, 2e-3]), stand.OtherMqa(), 1, stand.CEILINGS)
    assert entry["rate_over_even"] == pytest.approx(1.5 * 8 * 32 / 8192)


def test_a_schedule_unlike_the_reference_is_not_timed(stand, monkeypatch):
    wrong = torch.ones(2, 2, dtype=torch.int32)
    monkeypatch.setattr(mqa, "get_mqa_logits_metadata", lambda *sizes, out=None: wrong)
    with pytest.raises(judge.WrongResult, match="differs from that of the reference"):
        measure(stand.ROWS[6], stand.Cpu(), stand.OtherMqa(), 1, stand.CEILINGS)


def test_a_gpu_that_would_fall_back_to_the_reference_is_refused(stand):
    with pytest.raises(Unsupported, match="no CUDA backend takes fp8 H=3 D=32"):
        backend_of(stand.party(stand.SMALL, heads=3), torch.device("cuda"))
