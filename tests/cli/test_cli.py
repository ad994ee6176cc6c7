import re
import importlib
import importlib.metadata
import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import mqa
from mqa import cli
from mqa.cli import console

ROOT = Path(mqa.__file__).resolve().parent.parent
SMALL_DENSE = "dense fp8 S=3 N=40 H=4 D=32"
SMALL_PAGED = "paged mxfp4 B=2 next_n=2 H=4 D=32 P=16 blocks=8 columns=3 L=48 clean=1"


@pytest.mark.parametrize(
    "command", ["demo", "doctor", "check", "explain", "emulate", "bench", "compile"]
)
def test_help_of_each_command_has_examples(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"  mqa {command}" in result.stdout
    assert "Example" in result.stdout


def test_every_example_of_compile_names_kernels(run):
    """`--list` shows what each would compile."""
    lines = run("compile", "--help").stdout.splitlines()
    examples = [line for line in lines if line.startswith("  ") and "mqa compile --" in line]
    assert len(examples) == 5
    for example in examples:
        result = run(*shlex.split(example)[1:], "--list")
        assert result.exit_code == 0, result.output
        assert "mqa::" in result.stdout


def test_without_a_command_the_help_is_shown(run):
    result = run()
    assert result.exit_code == 0
    assert "doctor" in result.stdout
    assert "Usage: mqa" in result.stdout


def test_version_is_shown(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"mqa-logits {mqa.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "dense fp8 S=1"], "missing N"),
        (["explain", "nonsense"], "'nonsense'"),
        (["explain", SMALL_DENSE, "--device", "abacus"], "'abacus'"),
        (["explain", SMALL_DENSE, "--device", "meta"], "'meta'"),
        (["explain", SMALL_DENSE, "--device", "cuda:99"], "no such GPU"),
        (["explain", SMALL_DENSE, "--device", "a100"], "or sm80 and the like"),
        (["check", SMALL_DENSE, "sparse fp8"], "'sparse fp8'"),
        (["check", SMALL_DENSE, "--backend", "abacus"], "backend='abacus'"),
        (["check", SMALL_DENSE + " q_stride=1x1x1"], "q_stride"),
        (["check", "--suite", "huge"], "'huge'"),
        (["bench", "--suite", "huge"], "'huge'"),
        (["bench", SMALL_DENSE + " M=7"], "M=7"),
        (["bench", SMALL_PAGED + " lens=random"], "lens=random"),
        (["bench", "dense mxfp8 S=3 N=40 H=4 D=40", "--no-memory"], "D=40"),
        (["bench", "--rounds", "0"], "rounds"),
        (["demo", "--dims", "40", "--rows", "4", "--tokens", "128"], "40"),
        (["demo", "--colour", "red"], "--colour"),
        (["dance"], "dance"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(run, error_line, arguments, words):
    assert words in error_line(run(*arguments))


def test_without_rich_one_line_says_what_to_install(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rich" else find_spec(name)
    )
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err == f"mqa: rich missing: {cli.INSTALL}\n"


@pytest.mark.parametrize("arguments", [["demo"], ["bench", SMALL_DENSE, "--plot", "x.png"]])
def test_without_matplotlib_a_picture_is_refused_before_any_work(
    run, error_line, monkeypatch, arguments
):
    monkeypatch.setattr(console.importlib.util, "find_spec", lambda name: None)
    assert cli.INSTALL in error_line(run(*arguments), exit_code=1)


def test_main_runs_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mqa", "explain", SMALL_DENSE, "--device", "cpu"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert re.search(r"reference +can run it", capsys.readouterr().out)


def test_ctrl_c_ends_with_130_and_no_report(run, monkeypatch, tmp_path):
    def interrupted(problem, device, backend):
        raise KeyboardInterrupt

    monkeypatch.setattr("mqa.cli.check.judge_problem", interrupted)
    result = run("check", SMALL_DENSE, "--report", str(tmp_path / "report.json"))
    assert result.exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_a_process_leaves_no_traceback(run, tmp_path):
    script = """if True:
        import mqa.cli, mqa.cli.check, os, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        mqa.cli.check.judge_problem = lambda *_: os.kill(os.getpid(), signal.SIGINT)
        mqa.cli.main()
    """
    command = [sys.executable, "-c", script, "check", "--report", "report.json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_before_the_command_runs_is_130_too(monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mqa.cli.app.app", interrupted)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 130


def test_as_a_module_it_is_the_same_command(run, tmp_path):
    command = [sys.executable, "-m", "mqa", "explain", SMALL_DENSE, "--device", "cpu"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert re.search(rb"reference +can run it", done.stdout)


def test_a_file_that_cannot_be_written_is_one_line(run, error_line, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    report = blocked / "report.json"
    result = run("check", SMALL_DENSE, "--report", str(report))
    assert f"cannot write {report}" in error_line(result, exit_code=1)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "picture.png"
    path.write_text("old")

    def half_way(temporary):
        temporary.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(console.Stop, match="No space left"):
        console.write_whole(path, half_way)
    assert [entry.name for entry in tmp_path.iterdir()] == ["picture.png"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("command", [("explain", SMALL_DENSE), ("bench", "--suite", "hopper")])
def test_a_variable_that_is_wrong_is_one_line(run, error_line, setenv, command):
    setenv("MQA_ARCH", "blackwell")
    told = "MQA_ARCH='blackwell', expected an architecture such as sm_100f or sm_103a"
    assert told in error_line(run(*command))
