"""The GPU suites from the command line to tables, JSON and pictures."""

import dataclasses
import json
import re

import pytest
import torch

import mqa
from mqa.cli import bench_gpu, machine, plots
from mqa.cli.bench_gpu import Options, measure_suite, selected, show
from mqa.cli.console import Stop
from mqa.cli.gpu import host, measure, peers
from mqa.cli.gpu.calls import Unsupported
from mqa.cli.gpu.rows import GROUPS
from mqa.cli.gpu.tables import interval, microseconds, tables
from mqa.cli.gpu.windows import causal


@pytest.fixture
def small(stand, monkeypatch):
    """A machine with one GPU, whose ceilings are known without measuring."""
    monkeypatch.setattr(bench_gpu, "measure_ceilings", lambda device: (dict(stand.CEILINGS), {}))
    monkeypatch.setattr(machine, "gpus", lambda: [{"name": "Abacus 200"}])
    return Options("hopper", rounds=2)


def test_suite_goes_on_after_a_row_that_fails(stand, small):
    peer = peers.NoPeer("the peer cannot be imported")
    report = measure_suite(small, stand.ROWS, stand.Cpu(), peer)
    failed = [row["name"] for row in report["rows"] if "failure" in row]
    assert failed == ["a row of main", "a row of few rows", "a row of paged"]
    assert report["rows"][0]["failure"] == "PeerMissing: the peer cannot be imported"
    assert report["peer"] == {"name": "no peer", "version": None}
    assert tables(report)[-1].title == "failed"


def test_report_tables_and_picture(stand, small, tmp_path, capsys):
    files = tmp_path / "numbers" / "gpu.json", tmp_path / "gpu.png"
    options = dataclasses.replace(small, json=files[0], plot=files[1])
    report = measure_suite(options, stand.ROWS, stand.Cpu(), stand.OtherMqa())
    assert not [row for row in report["rows"] if "failure" in row], report["rows"]
    assert report["rounds"] == 2
    assert report["settings"]["l2_times"] == 4
    assert {"driver", "cuda", "torch", "mqa", "cuda-bindings"} <= set(report["versions"])
    assert [table.title for table in tables(report)][1:] == list(GROUPS.values())
    for table in tables(report):
        assert {len(row) for row in table.rows} == {len(table.columns)}
    show(report, options)
    told = capsys.readouterr()
    assert "a row of main" in told.out
    assert "a row of main: 1.000 [1.000, 1.000]" in told.err
    written = json.loads(files[0].read_text())
    assert written["command"] == ["mqa", "bench", "--suite", "hopper", "--rounds", "2"]
    assert str(tmp_path) not in files[0].read_text()
    assert tables(written) == tables(report)
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_a_row_that_is_left_out_says_why(stand, small, monkeypatch, capsys):
    def refuse(party, where):
        raise Unsupported("no such format here")

    monkeypatch.setattr(measure, "backend_of", refuse)
    monkeypatch.setattr(bench_gpu, "backend_of", refuse)
    rows = [stand.row["paged formats"]]
    report = measure_suite(small, rows, stand.Cpu(), stand.OtherMqa())
    assert report["rows"][0]["left_out"] == "no such format here"
    assert "a row of paged formats: left out: no such format here" in capsys.readouterr().err
    assert report["warm_up"]["variants"] == 0


def test_long_ratios_are_drawn_too_and_none_is_an_error(stand, small, tmp_path):
    report = measure_suite(
        small, stand.ROWS[:3], stand.Cpu([29e-3, 1e-3, 1e-3, 29e-3]), stand.OtherMqa()
    )
    plots.draw_groups(tmp_path / "long.png", report, mark="a mark")
    assert b"a mark" in (tmp_path / "long.png").read_bytes()
    with pytest.raises(ValueError, match="no row"):
        plots.draw_groups(tmp_path / "none.png", report | {"rows": report["rows"][1:2]})


def test_a_picture_of_nothing_stops_after_the_report_is_written(stand, small, tmp_path):
    options = dataclasses.replace(small, json=tmp_path / "gpu.json", plot=tmp_path / "gpu.png")
    report = measure_suite(options, stand.ROWS[1:2], stand.Cpu(), stand.OtherMqa())
    with pytest.raises(Stop, match="--plot: no row of this report"):
        show(report, options)
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def test_cells_keep_three_digits():
    assert interval({"median": 1.2345, "low": 1.2, "high": 1.25}) == "1.234 [1.200, 1.250]"
    assert interval({"median": 29.04, "low": 27.7, "high": 31.4}) == "29.0 [27.7, 31.4]"
    assert [microseconds(s) for s in (7.891e-6, 85.26e-6, 8.274e-3)] == ["7.89", "85.3", "8274"]


def test_host_suite_reports_microseconds_a_call(stand, small, monkeypatch):
    monkeypatch.setattr(host, "PROBLEM", stand.party(causal(2, 16)))
    monkeypatch.setattr(host, "CALLS", 2)
    monkeypatch.setattr(host, "ADDRESSES", 3)
    monkeypatch.setattr(torch, "compile", lambda fullgraph: lambda function: function)
    options = Options("host", rounds=1)
    report = measure_suite(options, selected(options), stand.Cpu(), stand.OtherMqa())
    assert [row["name"] for row in report["rows"]] == list(host.HOST_ROWS)
    for row in report["rows"]:
        assert row["warm_seconds"] > 0, row
        assert row["addresses"] == 3
        assert "failure" not in row
    report["rows"].append({"name": "abacus", "failure": "no beads"})
    (table,) = tables(report)
    assert table.rows[-1] == ("abacus", "failed", "no beads")


def test_host_rows_of_paged_and_mx_calls_make_these(stand, monkeypatch):
    monkeypatch.setattr(host, "PROBLEM", stand.party(causal(2, 16)))
    monkeypatch.setattr(host, "CALLS", 1)
    monkeypatch.setattr(host, "ADDRESSES", 1)
    seen = []

    def noting(name):
        compute = getattr(mqa, name)

        def noted(q, *arguments, **options):
            cuts = options.get("schedule_meta", arguments[4] if len(arguments) > 4 else None)
            seen.append((name, q[1] is not None, cuts is not None))
            return compute(q, *arguments, **options)

        monkeypatch.setattr(mqa, name, noted)

    dense, paged = "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"
    for name in (dense, paged):
        noting(name)
    wanted = {
        "mqa, out= and schedule_meta": (dense, False, True),
        "mqa, mxfp8, out=": (dense, True, False),
        "mqa, paged, out=": (paged, False, False),
        "mqa, paged, out= and schedule_meta": (paged, False, True),
        "mqa, paged mxfp8, out= and schedule_meta": (paged, True, True),
    }
    for name, call in wanted.items():
        seen.clear()
        host.measure_host(name, stand.Cpu(), stand.OtherMqa(), chunks=1)
        assert set(seen) == {call}, name


def test_a_new_size_each_call_never_repeats_one(stand, monkeypatch):
    """As many sizes as calls, none of them that of the other rows."""
    monkeypatch.setattr(host, "PROBLEM", stand.party(causal(2, 16)))
    monkeypatch.setattr(host, "CALLS", 5)
    monkeypatch.setattr(host, "ADDRESSES", 3)
    seen, compute = [], mqa.fp8_fp4_mqa_logits

    def noted(*arguments):
        result = compute(*arguments)
        seen.append(result.shape[1])
        return result

    monkeypatch.setattr(mqa, "fp8_fp4_mqa_logits", noted)
    name = "mqa, a new N each call"
    entry = host.measure_host(name, stand.Cpu(), stand.OtherMqa(), chunks=2)
    assert seen == list(range(17, 17 + 3 + 2 * 2 * 5))
    assert 0 < entry["warm_seconds"] < 1


def test_reports_name_the_code_they_measured(stand, small, monkeypatch):
    monkeypatch.setattr(machine, "kernels", lambda: "0123456789ab")
    for commit in ("abc-dirty", None):
        monkeypatch.setattr(machine, "commit", lambda commit=commit: commit)
        versions = measure_suite(small, [], stand.Cpu(), stand.OtherMqa())["versions"]
        assert versions["kernels"] == "0123456789ab"
        assert versions.get("commit") == commit
        assert ("commit" in versions) is (commit is not None)


@pytest.mark.parametrize(
    ("arguments", "words", "exit_code"),
    [
        (["--suite", "hopper"], "--suite hopper: needs a GPU", 1),
        (["--suite", "host"], "--suite host: needs a GPU", 1),
        (["--suite", "hopper", "--only", "("], "--only '('", 2),
        (["--suite", "hopper", "--only", "abacus"], "no row of suite hopper matches", 2),
        (["--suite", "host", "--only", "abacus"], "no row of suite host matches", 2),
        (["--suite", "host", "--rounds", "0"], "rounds", 2),
        (["--suite", "hopper", "dense fp8 S=3 N=40 H=4 D=32"], "takes no problem lines", 2),
        (["--suite", "host", "--plot", "x.png"], "--suite host has no picture", 2),
        (["--only", "main"], "--table are for --suite hopper, blackwell, portable, host", 2),
        (["--table", "x.md"], "--table are for --suite hopper, blackwell, portable, host", 2),
        (["--quick"], "--only, --quick and --table are for", 2),
        (["--suite", "blackwell", "--only", "abacus"], "no row of suite blackwell matches", 2),
    ],
)
def test_wrong_arguments_are_told(run, error_line, monkeypatch, arguments, words, exit_code):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert words in error_line(run("bench", *arguments), exit_code)


def test_command_line_reaches_the_suite(stand, run, small, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bench_gpu, "Gpu", lambda where: stand.Cpu())
    monkeypatch.setattr(bench_gpu, "find_peer", stand.OtherMqa)
    monkeypatch.setattr(bench_gpu, "hopper_rows", lambda only, quick: stand.ROWS[:1])
    files = ("--json", str(tmp_path / "gpu.json"), "--plot", str(tmp_path / "gpu.png"))
    result = run("bench", "--suite", "hopper", "--only", "main", "--quick", *files)
    assert result.exit_code == 0, result.output
    assert re.search(r"a row of main.*1\.000 \[1\.000, 1\.000\]", result.stdout)
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["command"][4:] == ["--only", "main", "--quick"]
    assert report["rounds"] == 10
    assert report["versions"]["mqa"] == mqa.__version__
