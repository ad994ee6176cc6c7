"""The suite of portable kernels: its rows, what they are held against, who computes each side."""

import importlib

import pytest
import torch

from mqa.cli import bench_gpu, machine
from mqa.cli.bench_gpu import Options, measure_suite, selected
from mqa.cli.console import Stop
from mqa.cli.gpu.bounds import floors
from mqa.cli.gpu.calls import Unsupported, backend_of
from mqa.cli.gpu.rows import PORTABLE_GROUPS
from mqa.cli.gpu.suite import portable_rows
from mqa.cli.gpu.tables import tables
from mqa.cuda import targets


@pytest.fixture
def options(stand, monkeypatch):
    """A machine with one GPU, whose ceilings are known, and backends of these names on its CPU."""
    module = importlib.import_module("mqa.backends")

    class Named(module.Reference):
        by_default = True

        def __init__(self, name):
            self.name = name

    named = (Named("sm90"), Named("portable"), module.REFERENCE)
    monkeypatch.setattr(module, "BACKENDS", named)
    monkeypatch.setattr(bench_gpu, "measure_ceilings", lambda device: (dict(stand.CEILINGS), {}))
    monkeypatch.setattr(machine, "gpus", lambda: [{"name": "Abacus 200"}])
    monkeypatch.setattr(targets, "portable", lambda device: "compute_80")
    return Options("portable", rounds=2)


def test_rows_hold_portable_kernels_against_hoppers_and_the_fallback():
    rows = portable_rows()
    assert [row.group for row in rows] == [
        *["portable dense"] * 5,
        *["portable paged"] * 6,
        *["portable fallback"] * 11,
    ]
    for row in rows:
        assert row.ours.call.by == "portable"
        assert row.other.call.by == ("reference" if "fallback" in row.group else "sm90")
    limits = [row.limit.value if row.limit else None for row in rows]
    assert limits == [0.25, *[None] * 10, *[20.0] * 11]
    assert {row.rounds for row in rows} == {0, 3}
    assert [row.name for row in portable_rows("^portable paged")] == [
        "fp8 B=64 next_n=1 tokens=65536",
        "fp8 B=64 next_n=1 tokens=8192",
        "fp8 B=256 next_n=1 tokens=8192",
        "mxfp8 B=64 next_n=1 tokens=65536",
        "mxfp4 B=64 next_n=1 tokens=65536",
        "bf16 B=64 next_n=1 tokens=65536",
    ]


def test_each_side_is_computed_by_the_backend_that_it_names(stand, options):
    def party(windows, by, **call):
        return stand.party(windows, by=by, **call)

    rows = [
        stand.comparison(
            "portable dense", party(stand.SMALL, "sm90"), party(stand.SMALL, "portable")
        ),
        stand.comparison(
            "portable paged",
            party(stand.PAGED, "sm90", schedule="fresh"),
            party(stand.PAGED, "portable", schedule="fresh"),
        ),
        stand.comparison(
            "portable fallback",
            party(stand.SMALL, "reference"),
            party(stand.SMALL, "portable"),
            rounds=3,
        ),
    ]
    device = stand.Cpu((1e-3, 4e-3, 4e-3, 1e-3))
    report = measure_suite(options, rows, device, stand.OtherMqa())
    dense, paged, fallback = report["rows"]
    assert (dense["other"]["backend"], dense["ours"]["backend"]) == ("sm90", "portable")
    assert dense["ratio"]["median"] == 0.25
    assert dense["errors"]["each other"] == 0
    assert paged["share_of_read"] > 0
    assert fallback["other"]["backend"] == "reference"
    assert len(device.events) > 0
    assert report["settings"]["arch"] == "compute_80"
    found = tables(report)
    assert [table.title for table in found][1:] == list(PORTABLE_GROUPS.values())
    assert found[1].rows[0][:4] == (
        "a row of portable dense",
        "1000",
        "4000",
        "0.250 [0.250, 0.250]",
    )
    assert found[1].rows[0][4] == "–"


def test_a_row_of_few_rounds_has_as_many_sets_of_the_other_party(stand, options):
    class Counting(stand.Cpu):
        captured = 0

        def capture(self, work):
            self.captured += 1
            return super().capture(work)

    sides = (stand.party(stand.SMALL, by=by) for by in ("reference", "portable"))
    device, row = Counting(), stand.comparison("portable fallback", *sides, rounds=2)
    (entry,) = measure_suite(options, [row], device, stand.OtherMqa())["rows"]
    assert (entry["sets"], device.captured) == (3, 3 + 2)


def test_a_backend_that_is_not_for_this_gpu_leaves_its_rows_out(stand, options, monkeypatch):
    module = importlib.import_module("mqa.backends")
    here = (module.SM90, *module.BACKENDS[1:])
    monkeypatch.setattr(module, "BACKENDS", here)
    plain = stand.party(stand.SMALL, by="portable")
    row = stand.comparison("portable dense", stand.party(stand.SMALL, by="sm90"), plain)
    with pytest.raises(Unsupported, match="sm90: needs a CUDA device of compute capability 9"):
        backend_of(row.other, torch.device("cpu"))
    (entry,) = measure_suite(options, [row], stand.Cpu(), stand.OtherMqa())["rows"]
    assert "sm90: needs a CUDA device" in entry["left_out"]


def test_products_of_portable_kernels_are_of_16_bits(stand):
    own, portable = (
        stand.party(stand.SMALL, heads=64, dim=128, by=name) for name in ("sm90", "portable")
    )
    assert (floors(own, 9)["tensor"], floors(portable, 9)["tensor"]) == (2.0, 4.0)


def test_no_floor_of_portable_kernels_is_known_but_on_hopper(stand, options):
    party = stand.party(stand.SMALL, by="portable")
    for major in (8, 10, 12):
        assert floors(party, major) == {}
    device = stand.Cpu()
    device.major = 12
    row = stand.comparison("portable fallback", stand.party(stand.SMALL, by="reference"), party)
    (entry,) = measure_suite(options, [row], device, stand.OtherMqa())["rows"]
    assert entry["ours"]["share_of_floor"] is None


def test_there_is_no_picture_of_it(tmp_path):
    with pytest.raises(Stop, match="--plot: --suite portable has no picture"):
        selected(Options("portable", plot=tmp_path / "x.png"))
    with pytest.raises(Stop, match="no row of suite portable matches"):
        selected(Options("portable", only="blackwell"))
