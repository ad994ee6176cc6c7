"""Paged rows: what their times are held against, what is not timed, what is left out."""

import dataclasses
import types

import pytest
import torch

import mqa
from mqa.cli.gpu import calls, judge, measure
from mqa.cli.gpu.calls import Unsupported
from mqa.cli.gpu.graphs import Prepared
from mqa.cli.gpu.rows import Alone, Call, Comparison, Limit, Metadata
from mqa.cli.gpu.tables import tables
from mqa.cli.gpu.windows import batch, causal, drawn, ending


def _measured(stand, row, ticks=(1e-3,), ceilings=None):
    device = stand.Cpu(ticks)
    return measure.measure(row, device, stand.OtherMqa(), 2, ceilings or stand.CEILINGS)


def test_paged_row_says_how_fast_the_cache_is_read(stand):
    entry = _measured(stand, stand.PAGED_AGAINST_PEER, (2e-6, 1e-6, 1e-6, 2e-6))
    assert entry["errors"]["each other"] == 0
    assert entry["read_rate"] == pytest.approx(2 * 130 * 36 / 1e-6)
    assert entry["share_of_read"] == pytest.approx(entry["read_rate"] / 4.5e12)
    assert entry["limit"] == {"at_least": 0.98}
    assert entry["held"] is True
    sizes = {name: entry["ours"][name] for name in ("B", "next_n", "page", "L", "tokens")}
    assert sizes == {"B": 2, "next_n": 3, "page": 64, "L": 130, "tokens": 260}


def test_a_small_kernel_runs_just_before_where_the_row_says_so(stand, monkeypatch):
    device, events = stand.Cpu(), []
    monkeypatch.setattr(device, "keep_busy", lambda: events.append("busy"))
    number = types.SimpleNamespace(fill_=lambda value: events.append("kernel"))
    monkeypatch.setattr(measure.torch, "zeros", lambda *size, device: number)
    measure._after_kernel(device)()
    assert events == ["busy", "kernel"]


@pytest.mark.parametrize(
    ("limit", "held"),
    [
        (Limit("at_least", 1.9), True),
        (Limit("at_least", 2.1), False),
        (Limit("at_most", 2.1), True),
        (Limit("at_most", 1.9), False),
    ],
)
def test_a_limit_holds_if_the_whole_interval_does(stand, limit, held):
    row = dataclasses.replace(stand.PAGED_AGAINST_PEER, limit=limit)
    entry = _measured(stand, row, (2e-3, 1e-3, 1e-3, 2e-3))
    assert entry["held"] is held
    report = {"suite": "hopper", "ceilings": {}, "peer": {"name": "peer"}, "rows": [
        {"group": "paged", "name": "row"} | entry]}  # fmt: skip
    cell = f"{'≥' if limit.sense == 'at_least' else '≤'} {limit.value}"
    assert tables(report)[1].rows[0][4] == (cell if held else f"{cell}, missed")


def test_one_end_of_the_interval_misses_the_limit(stand):
    row = dataclasses.replace(stand.PAGED_AGAINST_PEER, limit=Limit("at_least", 1.5))
    entry = _measured(stand, row, (2e-3, 1e-3, 1e-3, 1.3e-3))
    assert entry["ratio"]["median"] > 1.5
    assert entry["held"] is False
    report = {"suite": "hopper", "ceilings": {}, "peer": {"name": "peer"}, "rows": [
        {"group": "paged", "name": "row"} | entry]}  # fmt: skip
    assert tables(report)[1].rows[0][4] == "≥ 1.5, missed by an end of the interval"


def test_pages_and_dense_are_held_against_each_other(stand):
    entry = _measured(stand, stand.row["paged rows"])
    assert entry["errors"]["each other"] < 1e-6
    assert (entry["other"]["B"], entry["ours"]["S"]) == (1, 40)


@pytest.mark.parametrize(("fill", "stretch"), [(4e12, 1.0), (1.24e7, 10.0)])
def test_cleaning_may_take_as_long_as_the_fill(stand, fill, stretch):
    """2 rows of 50 tokens of 200: 1200 bytes of -inf, at the slow rate ten times the call."""
    plain = stand.party(batch(2, 1, 50, 205))
    clean = stand.party(batch(2, 1, 50, 205), clean=True)
    row = Comparison("paged rows", "cleaned", clean, plain, Limit("at_most", 1.1))
    entry = _measured(stand, row, (1e-5,), {"fill": fill})
    assert entry["fill_seconds"] == pytest.approx(2 * 155 * 4 / fill)
    assert entry["limit"] == {"at_most": pytest.approx(1.1 * stretch)}
    assert "each other" not in entry["errors"]


def test_metadata_is_held_against_its_limit(stand):
    row = stand.row["paged metadata"]
    for extra, held in ((4e-6, True), (6e-6, False)):
        entry = _measured(stand, row, (3e-6, 3e-6 + extra, 3e-6 + extra, 3e-6))
        assert entry["extra_seconds"] == pytest.approx(extra)
        assert (entry["limit_seconds"], entry["held"]) == (5e-6, held)
    assert "held" not in _measured(stand, stand.row["metadata"])


@pytest.mark.parametrize("varlen", [True, False])
def test_a_paged_schedule_unlike_the_reference_is_not_timed(stand, monkeypatch, varlen):
    row = Metadata("paged metadata", "B=9", drawn(9, 1, 900), 4, varlen=varlen)
    _measured(stand, row)
    make = mqa.get_paged_mqa_logits_metadata

    def spoilt(lens, page, sms, indices, out=None):
        return make(lens + 256, page, sms + 1, indices)[:-1]

    monkeypatch.setattr(mqa, "get_paged_mqa_logits_metadata", spoilt)
    with pytest.raises(judge.WrongResult, match="differs from that of the reference"):
        _measured(stand, row)


def test_indices_join_rows_to_requests(stand, monkeypatch):
    seen, make = [], mqa.get_paged_mqa_logits_metadata

    def noted(lens, page, sms, indices, out=None):
        seen.append(indices)
        return make(lens, page, sms, indices, out=out)

    monkeypatch.setattr(mqa, "get_paged_mqa_logits_metadata", noted)
    _measured(stand, stand.row["paged metadata"])
    assert seen[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_a_call_alone_is_judged_and_held_against_its_limit(stand):
    row = stand.row["paged empty"]
    entry = _measured(stand, row, (3e-6, 14e-6, 14e-6, 3e-6))
    assert (entry["limit_seconds"], entry["held"]) == (15e-6, True)
    assert entry["errors"]["ours"] < 1e-3
    assert (entry["ours"]["B"], entry["ours"]["schedule"]) == (9, "random")
    assert _measured(stand, row, (3e-6, 16e-6, 16e-6, 3e-6))["held"] is False


def test_a_wrong_call_alone_is_not_timed(stand, monkeypatch):
    monkeypatch.setattr(Prepared, "error", lambda self: judge._judged(1.0, Call(), "everyone"))
    with pytest.raises(judge.WrongResult, match="everyone"):
        _measured(stand, Alone("paged empty", "row", stand.party(ending(3, 9, 9)), 1.0))


def test_formats_that_no_backend_takes_are_left_out_and_nothing_is_drawn(stand, monkeypatch):
    def refuse(party, where):
        if party.call.format != "fp8":
            raise Unsupported("sm90: format=mxfp4 is not among its kernels")

    monkeypatch.setattr(measure, "backend_of", refuse)
    monkeypatch.setattr(measure, "rotation", lambda *_: pytest.fail("inputs were drawn"))
    row = stand.row["paged formats"]
    entry = _measured(stand, row)
    assert entry == {"left_out": "sm90: format=mxfp4 is not among its kernels"}
    report = {"suite": "hopper", "ceilings": {}, "rows": [
        {"group": "paged formats", "name": "row"} | entry]}  # fmt: skip
    assert [table.title for table in tables(report)] == [
        "ceilings measured in the same run", "left out",
    ]  # fmt: skip
    assert tables(report)[-1].rows == (("paged formats: row", entry["left_out"]),)


def test_fp8_that_no_backend_takes_fails(stand, monkeypatch):
    def refuse(party, where):
        raise Unsupported("no kernels today")

    monkeypatch.setattr(measure, "backend_of", refuse)
    with pytest.raises(Unsupported, match="no kernels today"):
        _measured(stand, stand.PAGED_AGAINST_PEER)


def test_backends_are_asked_about_pages_and_formats(stand, monkeypatch):
    asked = []
    found = types.SimpleNamespace(backend="sm90", reasons={})
    monkeypatch.setattr(calls.mqa, "supports", lambda **facts: asked.append(facts) or found)
    party = stand.party(batch(1, 1, 9), format="mxfp8")
    assert calls.backend_of(party, torch.device("cuda")) == "sm90"
    assert (asked[0]["page_size"], asked[0]["format"]) == (64, "mxfp8")
    assert stand.party(causal(1, 9)).variant()["page_size"] is None


def test_mx_formats_have_the_floor_of_bfloat16(stand):
    ours = _measured(stand, stand.row["paged formats"])
    assert ours["ours"]["floor_clocks"]["tensor"] == 2 * ours["other"]["floor_clocks"]["tensor"]
