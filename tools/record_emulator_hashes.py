"""Record what the kernels compute on a GPU, for the emulator to be compared with.

    python tools/record_emulator_hashes.py --out tests/emulator/recorded.json

Runs each line of tests/emulator/recorded.txt on a backend and writes a hash of its inputs and one
of its logits, with what computed them. tests/emulator/test_recorded.py emulates the same lines and
compares. Inputs are drawn on the CPU, the same on every machine; their hash tells whether they
were. `--backend sm100` records on a Blackwell GPU; `--backend sm90-emulated` and `sm100-emulated`
are dry runs that need no GPU. Needs no installed `mqa`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import mqa  # noqa: E402
from mqa.backends import BACKENDS  # noqa: E402
from mqa.cuda import compiler  # noqa: E402
from mqa.problem import DenseProblem, PagedProblem, Problem, parse  # noqa: E402
from mqa.testing import Case, make_case  # noqa: E402

LINES = ROOT / "tests" / "emulator" / "recorded.txt"
VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
ACCURATE = "accurate "
METADATA = "metadata "
PARTS = (7, 132)
BACKENDS_RECORDED = ("sm90", "sm100", "sm90-emulated", "sm100-emulated")


def read_lines(path: Path = LINES) -> list[str]:
    """The lines of a list, without comments and empty ones."""
    text = (line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines())
    return [line for line in text if line]


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's elements in order, as bytes; all NaNs of floats count as one."""
    values = tensor.detach().cpu()
    if values.dtype in (torch.float32, torch.float16, torch.bfloat16):
        values = torch.where(values.isnan(), torch.nan, values)
    size = values.element_size()
    raw = values.contiguous().view(VIEWS[size]).numpy()
    return hashlib.sha256(np.ascontiguousarray(raw).tobytes()).hexdigest()


def input_digest(case: Case) -> str:
    """Of all inputs of a case by name, as a kernel gets them."""
    whole = hashlib.sha256()
    for name, tensor in sorted(case.tensors.items()):
        values = tensor.detach().cpu().contiguous()
        whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        whole.update(values.view(VIEWS[values.element_size()]).numpy().tobytes())
    return whole.hexdigest()


def results(line: str, case: Case, backend: str) -> Iterator[Tensor]:
    """What a line asks for: logits, or schedules for some numbers of SMs."""
    if not line.startswith(METADATA):
        out = case.run(backend=backend)
        if not case.problem.clean:  # the rest is whatever the memory held
            inside = torch.from_numpy(case.data.inside()).to(out.device)
            out = torch.where(inside, out, torch.zeros_like(out))
        yield out
        return
    chosen = next(one for one in BACKENDS if one.name == backend)
    problem, t = case.problem, case.tensors
    for parts in PARTS:
        cuts = torch.full((parts + 1, 2), -7, dtype=torch.int32, device=case.device)
        if isinstance(problem, DenseProblem):
            chosen.dense_metadata(t["start"], t["end"], problem.N, problem.H, cuts)
        else:
            chosen.paged_metadata(t["lens"], t.get("indices"), cuts)
        yield cuts


def run_line(line: str, backend: str, device: str) -> tuple[Case, list[Tensor]]:
    """The case of a line, and what a backend makes of it."""
    if line.startswith(ACCURATE):
        backend = backend.replace("sm90", "sm90-accurate")
    case = make_case(problem_of(line), device)
    return case, list(results(line, case, backend))


def problem_of(line: str) -> Problem:
    return parse(line.removeprefix(ACCURATE).removeprefix(METADATA))


def hashes(inputs: str, outputs: list[Tensor]) -> dict[str, str]:
    """What is recorded of a line."""
    whole = hashlib.sha256("".join(map(digest, outputs)).encode())
    return {"inputs": inputs, "logits": whole.hexdigest()}


def record_line(line: str, backend: str, device: str) -> dict[str, str]:
    inputs = input_digest(make_case(problem_of(line)))
    _, outputs = run_line(line, backend, device)
    return hashes(inputs, outputs)


def record(lines: list[str], backend: str, device: str) -> dict[str, Any]:
    """The whole report."""
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "backend": backend,
        "machine": machine,
        "versions": {
            "mqa": mqa.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nvrtc": ".".join(map(str, compiler.release())),
            "numpy": np.__version__,
        },
        "kernels": compiler.sources_digest(),
        "lines": {line: record_line(line, backend, device) for line in lines},
    }


def kernel_names(lines: list[str]) -> set[str]:
    """The kernels that lines run."""
    from mqa.cuda.metadata import METADATA as METADATA_KERNELS
    from mqa.emulator import backend

    found: set[str] = set()
    original = backend.execute
    try:
        backend.execute = lambda plan, tensors, arch: found.add(str(plan.kernel))  # type: ignore[assignment]
        for line in lines:
            name = "sm90-accurate-emulated" if line.startswith(ACCURATE) else "sm90-emulated"
            problem = problem_of(line)
            if line.startswith(METADATA):
                found.add(str(METADATA_KERNELS[isinstance(problem, PagedProblem)]))
            else:
                make_case(problem).run(backend=name)
    finally:
        backend.execute = original
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--backend", default="sm90", choices=BACKENDS_RECORDED)
    parser.add_argument("--lines", type=Path, default=LINES, help="what to run, a line each")
    given = parser.parse_args(arguments)
    device = "cpu" if given.backend.endswith("emulated") else "cuda"
    report = record(read_lines(given.lines), given.backend, device)
    given.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    sys.stdout.write(f"{len(report['lines'])} lines on {report['machine']}: {given.out}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
