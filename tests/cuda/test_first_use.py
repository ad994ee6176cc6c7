"""What a process or a thread does first on such a GPU may be anything of this library."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import mqa
from mqa.testing import assert_bitwise

pytestmark = pytest.mark.gpu

FIRST = {
    "a warmup": 'mqa.warmup(64, 128, "fp8", device="cuda")',
    "a warmup of a device by number": 'mqa.warmup(64, 128, "fp8", device="cuda:0")',
    "a question": 'assert "sm" in mqa.supports(64, 128, "fp8", device="cuda:0").backend',
    "a list": "assert {x.name for x in mqa.backends() if x.usable} & {'sm90', 'sm100'}",
    "dependent launch": 'mqa.set_pdl(True); mqa.warmup(8, 32, "fp8", device="cuda")',
}
THEN = """
import torch
rows = torch.arange(9, dtype=torch.int32, device="cuda")
cuts = mqa.get_mqa_logits_metadata(rows * 0, rows, 40, 64)
assert cuts.shape == (mqa.get_num_sms() + 1, 2)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.usefixtures("sm90")
def test_a_process_may_begin_with(first: str) -> None:
    command = [sys.executable, "-c", f"import mqa\n{first}\n{THEN}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_thread_may_begin_with_a_launch(sm90: Any) -> None:
    """With nothing to allocate, nothing else makes the thread known to the device."""
    case = sm90.case("dense fp8 S=40 N=900 H=64 D=128 windows=random seed=3")
    want = sm90.run(case)
    out = torch.empty(40, 1024, device=sm90.device)[:, :900]
    failures: list[BaseException] = []

    def launch() -> None:
        try:
            case.run(backend=sm90.backend.name, out=out)
        except RuntimeError as error:
            failures.append(error)

    try:
        for pdl in (False, True):
            mqa.set_pdl(pdl, sm90.device)
            launch()  # remembered from now on
            out.fill_(torch.nan)
            torch.cuda.synchronize()
            thread = threading.Thread(target=launch)
            thread.start()
            thread.join()
            torch.cuda.synchronize()
            assert not failures
            assert_bitwise(out, want)
    finally:
        mqa.set_pdl(False, sm90.device)
