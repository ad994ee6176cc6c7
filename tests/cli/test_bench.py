import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from mqa.cli import bench as bench_module
from mqa.cli import console, contenders, machine, memory, plots
from mqa.problem import parse
from mqa.testing import make_case

SMALL_DENSE = "dense fp8 S=3 N=40 H=4 D=32"
SMALL_PAGED = "paged mxfp4 B=2 next_n=2 H=4 D=32 P=16 blocks=8 columns=3 L=48 clean=1"


@pytest.fixture
def small_square(monkeypatch):
    monkeypatch.setattr(contenders, "SQUARE", 64)


def test_bench_writes_numbers_and_a_picture(run, small_square, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_module, "measure", lambda problem, name: 3 << 20)
    monkeypatch.setattr(machine, "load", lambda: 99.0)
    numbers, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    wanted = ("--rounds", "2", "--json", str(numbers), "--plot", str(picture))
    result = run("bench", SMALL_DENSE, SMALL_PAGED, *wanted)
    assert result.exit_code == 0, result.output
    assert "3, 3 MiB" in result.stdout
    assert "note: other work runs here (load 99.0)" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(numbers.read_text())
    assert report["rounds"] == 2
    assert {"command", "date", "versions", "machine"} <= set(report)
    dense, paged = report["results"]
    assert dense["flops"] == 2 * 4 * 32 * (38 + 39 + 40)
    assert dense["result_bytes"] == 3 * 40 * 4
    assert paged["peak_memory_bytes"] == {"mqa": 3 << 20, "einsum": 3 << 20}
    assert [one["name"] for one in dense["contenders"]] == ["einsum", "sgemm"]
    ratio = dense["contenders"][0]["ratio"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]


def test_bench_refuses_to_time_things_that_disagree(run, error_line, monkeypatch):
    wrong = torch.ones(3, 40)
    monkeypatch.setattr(bench_module, "einsum", lambda case: lambda: wrong)
    result = run("bench", SMALL_DENSE, "--no-memory")
    assert "differ by" in error_line(result, exit_code=1)


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "mxfp4", "bf16"])
@pytest.mark.parametrize(
    "shape",
    [
        "dense {} S=3 N=40 H=4 D=64",
        SMALL_PAGED.replace("mxfp4", "{}"),
        SMALL_PAGED + " lens_rank=1",
    ],
)
def test_einsum_fallback_agrees_with_ours(run, fmt, shape):
    case = make_case(dataclasses.replace(parse(shape.format(fmt)), out="float32"))
    torch.testing.assert_close(contenders.einsum(case)(), case.run(), rtol=1e-4, atol=1e-4)


def test_memory_of_the_einsum_shows_its_temporaries():
    problem = parse("dense fp8 S=16 N=8192 H=32 D=32")
    temporary = 16 * 8192 * 32 * 4
    assert memory.measure(problem, "einsum") > temporary


def test_memory_is_measured_in_this_process_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory", SMALL_PAGED, "mqa"])
    memory.main()
    assert json.loads(capsys.readouterr().out)["bytes"] >= 0
    monkeypatch.setattr(memory, "_STATUS", Path("/nowhere"))
    assert memory.peak_growth(parse(SMALL_DENSE), "sgemm") >= 0


def test_memory_tells_why_its_process_failed():
    with pytest.raises(console.Stop, match="KeyError: 'abacus'"):
        memory.measure(parse(SMALL_DENSE), "abacus")


def test_pooling_keeps_the_largest_of_a_short_group_too():
    pooled = plots._pool(torch.arange(5.0)[None].double().numpy(), 2)
    assert pooled.tolist() == [[1.0, 3.0, 4.0]]
