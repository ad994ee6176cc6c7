import importlib
import importlib.metadata
import importlib.util
import importlib.metadata
import json

import pytest
import torch

from mqa.problem import parse
from mqa.testing import corpus

BACKENDS = importlib.import_module("mqa.backends")  # mqa.backends is the public function.
SMALL_DENSE = "dense fp8 S=3 N=40 H=4 D=32"
SMALL_PAGED = "paged mxfp4 B=2 next_n=2 H=4 D=32 P=16 blocks=8 columns=3 L=48 clean=1"


def test_check_of_the_smoke_suite_passes(run):
    result = run("check")
    assert result.exit_code == 0, result.output
    assert "24 cases passed" in result.stdout
    assert "0 bits" in result.stdout
    assert "of bound" in result.stdout


def test_check_report_has_versions_machine_and_every_case(run, tmp_path):
    path = tmp_path / "new" / "report.json"
    result = run("check", SMALL_DENSE, SMALL_PAGED + " regime=exact", "--report", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    # As installed: torch.__version__ may name a build beside it.
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["machine"]["cores"] >= 1
    assert (report["device"], report["suite"]) == ("cpu", None)
    assert (report["passed"], report["failed"], report["refused"]) == (2, 0, 0)
    dense, paged = report["cases"]
    assert dense["problem"] == SMALL_DENSE
    assert dense["status"] == "passed"
    assert 0 <= dense["worst"] <= 1
    assert paged["worst"] is None
    assert paged["backend"] == "reference"


@pytest.mark.parametrize("regime", ["exact", "bounded"])
def test_check_prints_a_line_that_replays_a_failure(run, more_backends, tmp_path, regime):
    line = f"dense fp8 S=3 N=40 H=4 D=32 regime={regime} windows=full seed=2"
    line = str(parse(line + (" out=bfloat16" if regime == "bounded" else "")))
    path = tmp_path / "report.json"
    result = run("check", line, SMALL_PAGED, "--backend", "broken", "--report", str(path))
    assert result.exit_code == 1
    assert f'mqa check "{line}" --backend broken' in result.stdout
    assert "row 0, column 0" in result.stdout
    report = json.loads(path.read_text())
    assert [case["status"] for case in report["cases"]] == ["failed", "passed"]


def test_a_backend_that_raises_fails_the_case(run, more_backends):
    result = run("check", SMALL_DENSE, "--backend", "crashing")
    assert result.exit_code == 1
    assert "failed: RuntimeError: launch failed:; illegal address" in result.stdout


def test_many_failures_are_cut_short(run, more_backends):
    lines = [f"{SMALL_DENSE} regime=exact seed={seed}" for seed in range(2, 24)]
    result = run("check", *lines, "--backend", "crashing")
    assert "and 2 more" in result.stdout


def test_a_backend_that_refuses_everything_checked_nothing(run, error_line, more_backends):
    result = run("check", f"{SMALL_DENSE} regime=exact", "--backend", "choosy", "--device", "cpu")
    assert "nothing was checked" in error_line(result)
    assert "H=4 is not 99" in result.stderr
    assert "0 bits" not in result.stdout
    result = run("check", SMALL_DENSE, "--backend", "choosy")
    assert "--backend choosy: needs a GPU that nobody has: buy one" in error_line(result, 1)


def test_a_backend_that_writes_around_out_fails(run, monkeypatch):
    class Sloppy(BACKENDS.Reference):
        name = "sloppy"

        def dense(self, call, out):
            super().dense(call, out)
            out.as_strided((1,), (1,), out.storage_offset() + out.shape[1]).zero_()

    monkeypatch.setattr(BACKENDS, "BACKENDS", (Sloppy(),))
    result = run("check", SMALL_DENSE + " out_stride=56x1 seed=1")
    assert result.exit_code == 1
    assert "around the entries of out=" in result.stdout


def test_a_backend_with_another_dtype_fails(run, monkeypatch):
    monkeypatch.setattr("mqa.cli.verdict._run", lambda case, name: torch.zeros(3, 40).double())
    result = run("check", SMALL_DENSE)
    assert result.exit_code == 1
    assert "got torch.float64, wanted torch.float32" in result.stdout


def test_suites_are_the_corpora_in_both_regimes(run, tmp_path):
    report = tmp_path / "report.json"
    assert run("check", "--suite", "smoke", "--report", str(report)).exit_code == 0
    checked = [parse(entry["problem"]) for entry in json.loads(report.read_text())["cases"]]
    assert {problem.regime for problem in checked} == {"exact", "bounded"}
    assert len(checked) == 2 * len(corpus("smoke"))


def test_a_report_that_cannot_be_written_is_noticed_first(run, tmp_path):
    (tmp_path / "file").write_text("")
    result = run("check", "--suite", "all", "--report", str(tmp_path / "file" / "report.json"))
    assert result.exit_code == 1
    assert "cannot write" in result.stderr
    assert result.stdout == ""


def test_check_writes_a_table_that_can_be_sent(run, more_backends, tmp_path):
    path = tmp_path / "check.md"
    line = f"{SMALL_DENSE} regime=exact seed=2"
    result = run("check", line, SMALL_PAGED, "--backend", "broken", "--table", str(path))
    assert result.exit_code == 1
    page = path.read_text("utf-8")
    assert "- kernels: " in page
    assert "| fp8 | dense | exact | 1 | 0 | 0 | - |" in page
    assert f"- failed: {parse(line)}: " in page
