"""The Blackwell suite: shapes beside reported figures, floors of that chip, files to send."""

import dataclasses
import importlib
import json

import pytest
import torch

from mqa.backends import BackendStatus
from mqa.cli import bench_gpu, machine
from mqa.cli.bench_gpu import Options, measure_suite, selected, show
from mqa.cli.gpu.bounds import floors
from mqa.cli.gpu.peers import NoPeer
from mqa.cli.gpu.rows import BLACKWELL_GROUPS, MQA, PEER, Comparison, Metadata, Reported
from mqa.cli.gpu.suite import blackwell_rows
from mqa.cli.gpu.tables import tables

FORMATS = {"fp8", "mxfp8", "mxfp4"}


@pytest.fixture
def small(stand, monkeypatch):
    """A machine with one GPU, whose ceilings are known without measuring."""
    monkeypatch.setattr(bench_gpu, "measure_ceilings", lambda device: (dict(stand.CEILINGS), {}))
    monkeypatch.setattr(machine, "gpus", lambda: [{"name": "Abacus 200"}])
    return Options("blackwell", rounds=2)


def _small_rows(stand):
    """A row of each table, as the suite has it but for its sizes."""
    told = Reported(412e-6, "GB200, 152 SMs")
    plain, clean = stand.party(stand.SMALL), stand.party(stand.SMALL, clean=True)
    return [
        stand.comparison("complete", plain, clean, reported=told),
        stand.comparison("compressed", plain, stand.party(stand.SMALL, compressed=True)),
        stand.comparison("formats", plain, stand.party(stand.SMALL, format="mxfp8")),
        stand.comparison("cleaning", clean, plain),
        stand.comparison("variants", stand.party(stand.SMALL, compressed=True), plain),
        stand.comparison("sizes", plain, stand.party(stand.SMALL, heads=8)),
        Metadata("schedules", "B=2", stand.PAGED, 4, reported=told),
        stand.comparison("peer", stand.party(stand.SMALL, PEER), plain),
    ]


def test_every_format_has_every_reported_shape_with_its_figure():
    rows = blackwell_rows("^complete: ")
    shapes = {(2048, 8192), (2048, 32768), (8192, 65536)}
    assert {(row.ours.windows.rows, row.ours.windows.keys) for row in rows} == shapes
    assert {row.ours.call.format for row in rows} == FORMATS
    assert all(row.ours.call.clean and not row.other.call.clean for row in rows)
    told = {row.name: row.reported for row in rows if row.reported}
    assert told["mxfp4 8192×65536 H=64 D=128"] == Reported(2969e-6, "GB200, 152 SMs")
    assert told["mxfp8 2048×32768 H=64 D=128"].seconds == 412e-6
    assert "mxfp8 2048×8192 H=64 D=128" not in told
    assert {row.ours.H for row in rows} == {32, 64}
    (one,) = blackwell_rows("^complete: mxfp8 2048×32768 H=64 D=128")
    assert one.ours.windows.end[[0, -1]].tolist() == [32768 - 2048, 32767]


def test_tables_names_and_formats_of_the_suite():
    rows = blackwell_rows()
    assert {row.group for row in rows} == set(BLACKWELL_GROUPS)
    assert len({(row.group, row.name) for row in rows}) == len(rows)
    for group in set(BLACKWELL_GROUPS) - {"schedules", "formats", "compressed"}:
        members = [row for row in rows if row.group == group]
        assert {row.ours.call.format for row in members} == FORMATS, group
    assert len(blackwell_rows("^formats: mxfp4, paged")) == 7
    told = {row.name: row.reported.seconds for row in blackwell_rows("^compressed|^formats: mxfp8")}
    assert told["2048×32768 H=64 D=128"] == 1097e-6
    assert told["mxfp8, 16×65536 H=32 D=128"] == 257e-6
    (none,) = blackwell_rows("^variants: fp8.*no schedule")
    assert (none.other.call.schedule, none.ours.call.schedule) == ("", "fresh")
    quick = blackwell_rows(quick=True)
    assert not any("8192×65536" in row.name for row in quick)


@pytest.mark.parametrize(("kind", "tensor"), [("fp8", 1.0), ("mxfp8", 1.0), ("mxfp4", 0.5)])
def test_floors_of_blackwell(stand, kind, tensor):
    party = stand.party(stand.SMALL, heads=64, dim=128, format=kind)
    assert floors(party, 10) == {
        "tensor": tensor,
        "epilogue": pytest.approx(2 / 3),
        "tensor memory": 0.5,
    }
    assert floors(party, 9)["tensor"] == (2.0 if kind == "fp8" else 4.0)


def test_tables_show_reported_figures_and_a_page_can_be_sent(
    stand, small, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("MQA_NVRTC_OPTIONS", "-DMQA_CLEANING=kBeside")
    files = tmp_path / "blackwell.json", tmp_path / "blackwell.md"
    options = dataclasses.replace(small, json=files[0], table=files[1])
    device = stand.Cpu((1e-3, 5e-4, 5e-4, 1e-3))
    report = measure_suite(options, _small_rows(stand), device, stand.OtherMqa())
    assert not [row for row in report["rows"] if "failure" in row], report["rows"]
    assert [table.title for table in tables(report)][1:] == list(BLACKWELL_GROUPS.values())
    show(report, options)
    assert f"table: {files[1]}" in capsys.readouterr().out
    page = files[1].read_text("utf-8")
    assert "- GPU: Abacus 200" in page
    assert "- compiled for: sm_100f" in page
    assert "- NVRTC options: -DMQA_CLEANING=kBeside" in page
    assert "- command: mqa bench --suite blackwell --rounds 2" in page
    (line,) = (line for line in page.splitlines() if line.startswith("| a row of complete"))
    assert line.startswith(
        "| a row of complete | 1000 | 500.0 | 2.000 [2.000, 2.000] | 412.0 (GB200"
    )
    assert "| a row of formats | 1000 | – | 500.0 |" in page
    written = json.loads(files[0].read_text())
    assert written["rows"][0]["reported"] == {"seconds": 412e-6, "who": "GB200, 152 SMs"}
    assert written["settings"]["nvrtc_options"] == ["-DMQA_CLEANING=kBeside"]


def test_rows_after_the_gpu_is_gone_are_given_up(stand, small, tmp_path, monkeypatch):
    def broken(inputs, call):
        raise RuntimeError("an illegal memory access")

    peer, files = stand.OtherMqa(), (tmp_path / "bench.json", tmp_path / "bench.md")
    monkeypatch.setattr(peer, "work", broken)
    plain = stand.party(stand.SMALL)
    rows = [
        stand.comparison("peer", stand.party(stand.SMALL, PEER), plain),
        stand.comparison("variants", stand.party(stand.SMALL, compressed=True), plain),
    ]
    options = dataclasses.replace(small, json=files[0], table=files[1])
    report = measure_suite(options, rows, stand.Cpu(), peer)
    assert len(report["rows"]) == 2
    assert "given_up" not in report
    monkeypatch.setattr(bench_gpu, "answers", lambda device: False)
    report = measure_suite(options, rows, stand.Cpu(), peer)
    assert [row["failure"] for row in report["rows"]] == ["RuntimeError: an illegal memory access"]
    show(report, options)
    told = "the GPU is gone; rows not run: 1"
    assert f"- {told}" in files[1].read_text("utf-8")
    assert json.loads(files[0].read_text())["given_up"] == told


def _on_a_gpu(stand, monkeypatch, peer):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bench_gpu, "_unusable", lambda suite: "")
    monkeypatch.setattr(bench_gpu, "Gpu", lambda where: stand.Cpu())
    monkeypatch.setattr(bench_gpu, "find_peer", lambda: peer)
    monkeypatch.setattr(bench_gpu, "blackwell_rows", lambda only, quick: _small_rows(stand))


@pytest.mark.parametrize("installed", [True, False])
def test_a_peer_has_rows_where_it_is_installed_alone(
    stand, run, small, monkeypatch, tmp_path, installed
):
    _on_a_gpu(stand, monkeypatch, stand.OtherMqa() if installed else NoPeer("no deep_gemm here"))
    path = tmp_path / "blackwell.json"
    result = run("bench", "--suite", "blackwell", "--quick", "--json", str(path))
    assert result.exit_code == 0, result.output
    groups = {row["group"] for row in json.loads(path.read_text())["rows"]}
    assert groups == set(BLACKWELL_GROUPS) - (set() if installed else {"peer"})
    assert ("without rows against a peer: no deep_gemm here" in result.stderr) is not installed


def test_without_such_a_gpu_the_backend_says_why(run, error_line, monkeypatch):
    reason = "needs an NVIDIA GPU of compute capability 10.x; this one has 9.0"
    found = (BackendStatus("sm100", usable=False, reason=reason),)
    monkeypatch.setattr(bench_gpu.mqa, "backends", lambda: found)
    assert f"--suite blackwell: {reason}" in error_line(run("bench", "--suite", "blackwell"), 1)


def test_the_suite_is_pictured_against_the_peer(stand, small, tmp_path):
    options = dataclasses.replace(small, plot=tmp_path / "blackwell.png")
    rows = [
        row for row in _small_rows(stand) if isinstance(row, Comparison) and row.group == "peer"
    ]
    assert rows[0].ours.who == MQA
    show(measure_suite(options, rows, stand.Cpu(), stand.OtherMqa()), options)
    assert (tmp_path / "blackwell.png").read_bytes().startswith(b"\x89PNG")
    assert selected(options)


def test_check_runs_where_the_named_backend_does(run, error_line, monkeypatch):
    module = importlib.import_module("mqa.backends")
    check = importlib.import_module("mqa.cli.check")

    class Gpus(module.Reference):
        name, reason = "sm100", None

        def schedules_on(self, device):
            return device.type == "cuda"

        def unusable_here(self):
            return self.reason

    backend = Gpus()
    monkeypatch.setattr(module, "BACKENDS", (backend, module.REFERENCE))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert check._device_of("sm100") == torch.device("cuda", 1)
    assert check._device_of("reference") == torch.device("cpu")
    for named, where in (("", "cuda:1"), ("sm100", "cuda:1"), ("reference", "cpu")):
        monkeypatch.setattr(check.config, "backend_name", lambda named=named: named or None)
        assert check._device_of(None) == torch.device(where)
    monkeypatch.setattr(Gpus, "reason", "needs compute capability 10.x, this one has 9.0")
    told = error_line(run("check", "--backend", "sm100"), 1)
    assert "--backend sm100: needs compute capability 10.x, this one has 9.0" in told
