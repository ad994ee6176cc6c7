import importlib
import importlib.metadata
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
import torch

import mqa
from mqa import config
from mqa.cli import apart, machine
from mqa.cli.apart import Apart
from mqa.cli.console import Stop
from mqa.cli.verdict import Outcome
from mqa.cuda import compiler
from mqa.errors import CompileError
from mqa.problem import parse
from mqa.testing import accumulators, corpus

BACKENDS = importlib.import_module("mqa.backends")  # mqa.backends is the public function.
SMALL_DENSE = "dense fp8 S=3 N=40 H=4 D=32"
SMALL_PAGED = "paged mxfp4 B=2 next_n=2 H=4 D=32 P=16 blocks=8 columns=3 L=48 clean=1"


def test_check_of_the_smoke_suite_passes(run):
    result = run("check")
    assert result.exit_code == 0, result.output
    assert "28 cases passed" in result.stdout
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


def _stand_in(problem, device, backend, ran):
    """A judge in the process of its own: what it does is told by the problem's seed."""
    if problem.seed == 1:
        os._exit(11)
    if problem.seed == 2:
        time.sleep(600)
    if problem.seed == 5:
        ran()
        time.sleep(1.5)
    if problem.seed == 3:
        raise RuntimeError("CUDA error: an illegal memory access")
    if problem.seed == 4:
        raise Stop("no such thing")
    return Outcome(problem, str(os.getpid()), "passed", None, "", 0.5)


def _with_seed(seed):
    return parse(f"{SMALL_DENSE} seed={seed}")


def test_a_case_that_takes_its_process_with_it_costs_no_other_case():
    with Apart(torch.device("cpu"), "abacus", 30.0, judge=_stand_in) as judge:
        first = judge(_with_seed(0))
        assert first.passed
        assert first.backend != str(os.getpid())
        died = judge(_with_seed(1))
        assert (died.status, died.backend) == ("failed", "abacus")
        assert died.detail == "its process ended with exit code 11"
        second = judge(_with_seed(0))
        assert second.backend != first.backend
        told = judge(_with_seed(3))
        assert told.detail == "RuntimeError: CUDA error: an illegal memory access"
        with pytest.raises(Stop, match="no such thing"):
            judge(_with_seed(4))
        assert judge(_with_seed(0)).backend == second.backend
        assert judge.lost == 1
        judge._seconds = 0.5
        assert judge(_with_seed(5)).passed  # the oracle takes its time
        hung = judge(_with_seed(2))
        assert hung.detail == "no result after 0.5 s: its process was ended"
        assert 0.5 <= hung.seconds < 30
        assert judge.lost == 2
        process = judge._process
    assert not process.is_alive()


def test_a_process_whose_device_is_gone_is_replaced(monkeypatch):
    ours, theirs = multiprocessing.Pipe()
    monkeypatch.setattr(apart, "answers", lambda device: device.type != "cuda")
    ours.send(_with_seed(0))
    ours.send(_with_seed(3))
    ours.close()
    answers = []
    monkeypatch.setattr(apart.signal, "signal", lambda *_: None)
    monkeypatch.setattr(theirs, "send", answers.append, raising=False)
    apart._serve(theirs, _stand_in, torch.device("cuda"), None)
    assert [answer and (answer[0].status, answer[1]) for answer in answers] == [
        None,
        ("passed", False),
        ("failed", False),
    ]


def test_a_device_is_unfit_once_it_raises(monkeypatch):
    def gone(device):
        raise RuntimeError("an illegal memory access")

    assert apart.answers(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    assert not apart.answers(torch.device("cuda", 0))


def test_on_a_gpu_cases_are_judged_apart_until_too_many_are_lost(run, monkeypatch, tmp_path):
    steps = []

    class Losing:
        def __init__(self, device, backend, seconds):
            steps.append("judging")
            assert (device, backend, seconds) == (torch.device("cuda"), None, 7.0)
            self.lost = 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __call__(self, problem):
            self.lost += 1
            return Outcome(problem, "sm100", "failed", None, "no result", 7.0)

    check = importlib.import_module("mqa.cli.check")
    monkeypatch.setattr(check, "Apart", Losing)
    monkeypatch.setattr(check, "_compile_ahead", lambda *facts: steps.append(facts))
    monkeypatch.setattr(check, "_MOST_LOST", 2)
    monkeypatch.setattr(check, "usable_device", torch.device)
    monkeypatch.setattr(machine, "summary", lambda device: {"device": "Abacus"})
    files = tmp_path / "check.json", tmp_path / "check.md"
    lines = [f"{SMALL_DENSE} seed={seed}" for seed in range(5)]
    options = ("--device", "cuda", "--timeout", "7")
    result = run("check", *lines, *options, "--report", str(files[0]), "--table", str(files[1]))
    assert result.exit_code == 1
    given_up = "not checked: 3 cases, after 2 that took their process with them"
    assert given_up in result.stdout
    report = json.loads(files[0].read_text())
    assert (report["failed"], report["not_checked"], len(report["cases"])) == (2, 3, 2)
    assert report["command"] == ["mqa", "check", *lines, *options]
    assert steps == [([parse(line) for line in lines], torch.device("cuda"), None), "judging"]
    page = files[1].read_text("utf-8")
    assert f"- {given_up}" in page
    assert "- command: mqa check 'dense fp8 S=3" in page


def test_on_a_gpu_kernels_are_compiled_before_cases_are_judged(monkeypatch, tmp_path):
    check = importlib.import_module("mqa.cli.check")
    portable = next(one for one in BACKENDS.BACKENDS if one.name == "portable")
    compiled, gpu = [], torch.device("cuda")

    def choose(problem, device, backend):
        if problem.D == 64:
            raise mqa.BackendUnavailableError("not here")
        return BACKENDS.REFERENCE if problem.D == 32 else portable

    monkeypatch.setattr(check, "choose", choose)
    monkeypatch.setattr(check.targets, "of", lambda kernel, device: "sm_86")
    monkeypatch.setattr(check, "compile_all", lambda *facts: compiled.append(facts))
    monkeypatch.setattr(config, "cache_dir", lambda: tmp_path)
    problems = [parse(f"dense fp8 S=3 N=40 H=4 D={D}") for D in (32, 64, 128)]
    check._compile_ahead([*problems, problems[-1]], gpu, "portable")
    ((kernels, name, folder, jobs),) = compiled
    assert kernels == list(portable.kernels_of(problems[-1]))
    assert (name, folder, jobs) == ("sm_86", tmp_path, machine.usable_cores())
    check._compile_ahead(problems, torch.device("cpu"), None)
    check._compile_ahead(problems[:2], gpu, None)
    monkeypatch.setattr(machine, "writable", lambda folder: False)
    check._compile_ahead(problems, gpu, None)
    assert len(compiled) == 1


def test_a_compiler_that_breaks_does_not_end_the_run(monkeypatch, tmp_path):
    check = importlib.import_module("mqa.cli.check")
    portable = next(one for one in BACKENDS.BACKENDS if one.name == "portable")

    def broken(*_):
        raise RuntimeError("NVRTC failed")

    monkeypatch.setattr(check, "choose", lambda *_: portable)
    monkeypatch.setattr(check.targets, "of", lambda kernel, device: "sm_86")
    monkeypatch.setattr(check, "compile_all", broken)
    monkeypatch.setattr(config, "cache_dir", lambda: tmp_path)
    check._compile_ahead([parse(SMALL_DENSE)], torch.device("cuda"), None)


def test_the_report_is_there_while_cases_run(run, monkeypatch, tmp_path):
    path, seen = tmp_path / "report.json", []
    check = importlib.import_module("mqa.cli.check")
    real = check.judge_problem

    def judge(problem, device, backend):
        seen.append(len(json.loads(path.read_text())["cases"]) if path.exists() else 0)
        return real(problem, device, backend)

    monkeypatch.setattr(check, "judge_problem", judge)
    assert run("check", SMALL_DENSE, SMALL_PAGED, "--report", str(path)).exit_code == 0
    assert seen == [0, 1]
    assert json.loads(path.read_text())["not_checked"] == 0


def test_errors_in_reports_name_no_folder_of_this_machine(run, monkeypatch, tmp_path):
    folders = {"csrc": compiler.sources(), "python": Path(sys.prefix), "~": Path("~").expanduser()}

    class Uncompiled(BACKENDS.Reference):
        name = "uncompiled"

        def dense(self, call, out):
            raise CompileError(" ".join(f"-I{folder}/x" for folder in folders.values()))

    monkeypatch.setattr(BACKENDS, "BACKENDS", (Uncompiled(),))
    path = tmp_path / "report.json"
    assert run("check", SMALL_DENSE, "--report", str(path)).exit_code == 1
    report = json.loads(path.read_text())
    assert report["cases"][0]["detail"] == "CompileError: -Icsrc/x -Ipython/x -I~/x"
    assert str(tmp_path) not in path.read_text()


def test_a_judge_says_when_the_device_is_through():
    seen = []

    class Noted(accumulators.Float32AnyOrder):
        def dots(self, q, k):
            seen.append("oracle")
            return super().dots(q, k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulators, "FLOAT32", Noted())
        outcome = apart.judge_problem(
            parse(SMALL_DENSE), torch.device("cpu"), "reference", lambda: seen.append("ran")
        )
    assert outcome.passed
    assert seen[0] == "ran"
    assert "oracle" in seen
