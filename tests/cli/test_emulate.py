"""`mqa emulate` says that a problem is right, or what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mqa.cuda import cache, compiler

SMALL = "dense fp8 S=2 N=70 H=8 D=32 regime=exact"


def test_an_unknown_schedule_is_an_error(run: Any) -> None:
    result = run("emulate", SMALL, "--schedule", "late")
    assert result.exit_code == 2
    assert "expected one of eager, lazy, random, hunt" in result.stderr


@pytest.mark.skipif(compiler.unavailable() is not None, reason="NVRTC is missing")
def test_a_problem_is_run_and_instructions_are_counted(run: Any) -> None:
    result = run("emulate", SMALL, "--schedule", "hunt", "--seed", "3")
    assert result.exit_code == 0
    assert "as the oracle says, schedule=hunt seed=3" in result.stdout
    counts = {}
    for line in result.stdout.splitlines()[2:]:
        *name, count = line.split()
        if count.isdigit():
            counts[" ".join(name)] = int(count)
    (total,) = re.findall(r": (\d+) instructions of 20 warps", result.stdout)
    roles = {name: counts.pop(name) for name in ("math", "load", "rows", "weights", "clean")}
    assert sum(roles.values()) == sum(counts.values()) == int(total)
    assert {"wgmma", "mbarriers", "floating point"} <= counts.keys()


@pytest.mark.skipif(compiler.unavailable() is not None, reason="NVRTC is missing")
def test_kernels_of_another_gpu_are_run_by_the_name_of_their_backend(run: Any) -> None:
    result = run("emulate", SMALL, "--backend", "sm100-emulated")
    assert result.exit_code == 0
    assert re.search(r"mqa::sm100::dense<.*: \d+ instructions of 2\d warps", result.stdout)
    assert {"multiply", "math"} <= {line.split()[0] for line in result.stdout.splitlines()[1:]}


def test_a_backend_that_is_not_emulated_is_named(run: Any) -> None:
    result = run("emulate", SMALL, "--backend", "sm90")
    assert result.exit_code == 2
    assert "expected one of sm100-emulated, sm90-emulated" in result.stderr


@pytest.mark.skipif(compiler.unavailable() is not None, reason="NVRTC is missing")
def test_a_timeline_is_written(run: Any, tmp_path: Path, error_line: Any) -> None:
    path = tmp_path / "timeline.json"
    assert run("emulate", SMALL, "--trace", str(path)).exit_code == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert "warp 16 load" in {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    nowhere = tmp_path / "missing" / "timeline.json"
    assert f"--trace {nowhere}" in error_line(run("emulate", SMALL, "--trace", str(nowhere)), 1)


@pytest.mark.skipif(compiler.unavailable() is not None, reason="NVRTC is missing")
def test_a_problem_that_has_no_kernel_says_why(run: Any) -> None:
    result = run("emulate", "dense fp8 S=2 N=70 H=8 D=96")
    assert result.exit_code == 1
    assert "D=96 is not one of" in result.stderr
    result = run("emulate", "dense bf16 S=2 N=70 H=8 D=32", "--backend", "sm100-emulated")
    assert result.exit_code == 1
    assert "format=bf16 is not among its kernels" in result.stderr


@pytest.mark.skipif(compiler.unavailable() is not None, reason="NVRTC is missing")
def test_what_is_looked_for_can_be_said(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mqa.emulator import executor

    asked = []
    looked_for = executor.How.looked_for
    monkeypatch.setattr(
        executor.How, "looked_for", lambda how: asked.append(looked_for(how)) or asked[-1]
    )
    for option, schedule in (("--checks", "eager"), ("--no-checks", "hunt")):
        assert run("emulate", SMALL, "--schedule", schedule, option).exit_code == 0
    assert [(one.any, one.order) for one in asked] == [(True, True), (False, False)]


@pytest.mark.skipif(compiler.unavailable() is not None, reason="NVRTC is missing")
def test_a_kernel_that_does_not_compile_is_told_without_a_traceback(
    run: Any, setenv: Any, tmp_path: Path
) -> None:
    setenv("MQA_NVRTC_OPTIONS", "-DMQA_CLEANING=kNever")
    cache.forget()
    try:
        result = run("emulate", SMALL)
    finally:
        cache.forget()
    assert result.exit_code == 1
    assert result.stderr.startswith("mqa: cannot compile mqa::")
    assert 'has no member "kNever"' in result.stderr
