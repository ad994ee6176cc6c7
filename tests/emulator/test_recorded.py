"""The emulator gives what the oracle says, and bit for bit what a GPU gave.

Lines of recorded.txt reach every kernel of the covering set, those of recorded_every.txt every
kernel. They are hunted for races too, each with a seed of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mqa.cuda import compiler
from mqa.cuda.metadata import METADATA
from mqa.cuda.plan import Kernel
from mqa.cuda.sm90 import kernels
from mqa.emulator import scheduled
from mqa.emulator.backend import SM90_ACCURATE_EMULATED, SM90_EMULATED
from mqa.problem import DenseProblem, parse
from mqa.reference import schedule
from mqa.testing import Case, accumulators, assert_logits, make_case

FOLDER = Path(__file__).parent
LINES = [
    line.strip()
    for line in (FOLDER / "recorded.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]
PARTS = (7, 132)
RECORDED = FOLDER / "recorded.json"
EVERY, EVERY_STEP = FOLDER / "recorded_every.json", 20
EVERY_LINES = list(json.loads(EVERY.read_text())["lines"])
needs_nvrtc = pytest.mark.skipif(
    compiler.unavailable() is not None, reason="NVRTC is missing, which compiles the kernels"
)


@pytest.fixture(scope="module")
def recorder(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("record_emulator_hashes")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    if not RECORDED.is_file():
        pytest.skip(f"{RECORDED.name} is missing, which tools/record_emulator_hashes.py writes")
    return json.loads(RECORDED.read_text())


def seldom(line: str) -> bool:
    """What `make test` leaves out: of three dense and three paged kernels for FP8 with the same
    heads two, for each number of heads others; of those that convert two thirds; and every other
    line with bounded sums."""
    kind, format, *facts = line.split()
    if kind == "metadata":
        return False
    if "regime=exact" not in facts:
        return LINES.index(line) % 2 == 1
    heads, dim = (int(_field(facts, key)).bit_length() for key in "HD")
    if format != "fp8" or kind == "accurate":
        return (heads + dim) % 3 != 0
    return (heads + dim + (kind == "paged")) % 3 != 0


def recordable(chosen: tuple[Kernel, ...]) -> set[str]:
    """Names of kernels. Of those for bfloat16 only the covering set has been recorded on a GPU."""
    return {str(kernel) for kernel in chosen if "mqa::sm90::Bf16" not in kernel.arguments}


def _field(facts: list[str], key: str) -> str:
    return next(fact for fact in facts if fact.startswith(f"{key}=")).partition("=")[2]


@needs_nvrtc
@pytest.mark.no_cover
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=f"{i}", marks=pytest.mark.slow if seldom(line) else ())
        for i, line in enumerate(LINES)
    ],
)
def test_a_line_is_what_the_oracle_and_the_gpu_say(line: str, recorder: ModuleType) -> None:
    drawn = recorder.input_digest(make_case(recorder.problem_of(line)))
    with scheduled("hunt", seed=LINES.index(line)):
        case, outputs = recorder.run_line(line, "sm90-emulated", "cpu")
    if line.startswith("metadata"):
        for got, want in zip(outputs, wanted_schedules(case), strict=True):
            assert torch.equal(got, want)
    else:
        backend = SM90_ACCURATE_EMULATED if line.startswith("accurate") else SM90_EMULATED
        model = accumulators.named(backend.accumulator(case.problem.format))
        assert_logits(case, outputs[0], model)
    if RECORDED.is_file():
        known = json.loads(RECORDED.read_text())
        got = recorder.hashes(recorder.input_digest(case), outputs)
        assert got["inputs"] == drawn, "the call changed its inputs"
        assert got["inputs"] == known["lines"][line]["inputs"], (
            "the inputs differ from those of the recording: the generator changed, not a kernel"
        )
        assert got["logits"] == known["lines"][line]["logits"], (
            f"differs from {known['machine']}, kernels {known['kernels'][:12]}"
        )


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(EVERY_LINES), EVERY_STEP))
def test_every_kernel_gives_what_it_gave_on_the_gpu(first: int, recorder: ModuleType) -> None:
    known = json.loads(EVERY.read_text())["lines"]
    for number, line in enumerate(EVERY_LINES[first : first + EVERY_STEP], first):
        with scheduled("hunt", seed=number):
            assert recorder.record_line(line, "sm90-emulated", "cpu") == known[line], line


@pytest.mark.slow
def test_the_other_lines_reach_every_scoring_kernel(recorder: ModuleType) -> None:
    assert recorder.read_lines(FOLDER / "recorded_every.txt") == EVERY_LINES
    every = recordable(kernels(every=True)) - set(map(str, METADATA))
    assert recorder.kernel_names(EVERY_LINES) >= every


def wanted_schedules(case: Case) -> list[Tensor]:
    problem, t = case.problem, case.tensors
    if isinstance(problem, DenseProblem):
        facts = (t["start"], t["end"], problem.N, problem.H)
        return [schedule.dense_metadata(*facts, parts) for parts in PARTS]
    return [schedule.paged_metadata(t["lens"], parts, t.get("indices")) for parts in PARTS]


def test_the_recording_is_of_these_lines(recorded: dict[str, Any]) -> None:
    assert recorded["backend"] == "sm90"
    assert list(recorded["lines"]) == LINES


def test_the_lines_reach_every_kernel_of_the_covering_set(recorder: ModuleType) -> None:
    assert recorder.kernel_names(LINES) >= set(map(str, kernels()))


def test_digests_tell_values_apart_and_take_every_nan_as_one(recorder: ModuleType) -> None:
    digest = recorder.digest
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ones = torch.ones(6, dtype=dtype)
        assert digest(ones) == digest(torch.ones(12, dtype=dtype)[::2])
        assert digest(ones) != digest(-ones)
        assert digest(ones * 0) != digest(-ones * 0)
        nan = ones * torch.nan
        assert digest(nan) == digest(-nan)
        assert digest(nan) != digest(ones)


def test_input_digests_see_every_tensor(recorder: ModuleType) -> None:
    case = make_case(parse("dense mxfp8 S=3 N=9 H=8 D=64"))
    before = recorder.input_digest(case)
    assert before == recorder.input_digest(make_case(case.problem))
    for name, tensor in case.tensors.items():
        raw = tensor.view(torch.uint8)
        raw[(0,) * raw.dim()] += 1
        assert recorder.input_digest(case) != before, name
        raw[(0,) * raw.dim()] -= 1
    assert recorder.input_digest(case) == before


@needs_nvrtc
@pytest.mark.parametrize("backend", ["sm90-emulated", "sm100-emulated"])
def test_a_dry_run_writes_a_report(recorder: ModuleType, tmp_path: Path, backend: str) -> None:
    lines, out = tmp_path / "lines.txt", tmp_path / "report.json"
    wanted = ["dense fp8 S=3 N=40 H=64 D=128 clean=0 out=bfloat16 regime=exact", LINES[-1]]
    lines.write_text("\n".join(["# two", *wanted]))
    recorder.main(["--backend", backend, "--lines", str(lines), "--out", str(out)])
    report = json.loads(out.read_text())
    assert list(report["lines"]) == wanted
    assert len(report["kernels"]) == 64
    assert report["versions"]["torch"] == torch.__version__
    again = recorder.record_line(wanted[0], backend, "cpu")
    assert report["lines"][wanted[0]] == again
