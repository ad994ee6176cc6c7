r"""Every path of the Hopper kernels on compact shapes, to be run under a sanitizer.

    for tool in memcheck synccheck initcheck; do
        compute-sanitizer --tool $tool --error-exitcode 9 python tests/cuda/sanitize_sm90.py
    done
    MQA_NVRTC_OPTIONS=-DMQA_EVERY_LANE_ARRIVES \
        compute-sanitizer --tool racecheck --error-exitcode 9 python tests/cuda/sanitize_sm90.py

Each tensor gets an allocation of its own, exactly as long as what it holds, so that memcheck sees a
read behind the last element. Results are written over NaN: what a kernel leaves out shows without
initcheck, which would take what bulk stores wrote for uninitialised. Words as arguments choose the
paths that have them all. Exits with the failures, if any.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

import mqa
from mqa.problem import DenseProblem, parse
from mqa.reference import schedule
from mqa.testing import assert_logits, guards_intact, make_case

BACKEND, DEVICE = "sm90", "cuda"
MANY, FEW = "S=20 N=700", "S=2 N=700"
PATHS = (
    *(f"{MANY} H={H} D=64 windows=random" for H in (8, 16, 32, 64, 128)),
    *(f"{FEW} H={H} D=128 windows=full" for H in (8, 16, 32, 64, 128)),
    *(f"{size} H=64 D={D} windows=packed" for size in (MANY, FEW) for D in (32, 64, 128)),
    f"{MANY} H=32 D=128 out=bfloat16 out_off=2 out_stride=701 windows=random",
    f"{FEW} H=32 D=128 out=float16 out_off=6 out_stride=703 windows=random",
    f"{MANY} H=64 D=128 out_off=4 out_stride=701 clean=0 windows=random",
    f"{MANY} H=64 D=128 M=333 windows=random",
    f"{FEW} H=16 D=64 M=701 clean=0 out=bfloat16 out_off=2 windows=random",
    f"{MANY} H=8 D=32 weights=bfloat16 w_stride=13 w_off=2 kv_scale_off=4 windows=random",
    f"{FEW} H=8 D=32 kv_stride=48 kv_scale_stride=3 kv_scale_off=12 start_stride=2 windows=random",
    f"{MANY} H=64 D=128 windows=empty",
    "S=7 N=0 H=64 D=128 M=5",
    "S=7 N=3 H=64 D=128 windows=full",
    "S=1 N=1 H=128 D=32 windows=full",
    *(f"{size} H=64 D=128 sms={sms} windows=random" for size in (MANY, FEW) for sms in (1, 67)),
)


def check(problem: DenseProblem, *, fresh: bool = False) -> None:
    """The logits of a problem, without a schedule unless it asks for a stale or `fresh` one."""
    case = make_case(problem, DEVICE)
    t = case.tensors
    cuts = None
    if fresh:
        cuts = mqa.get_mqa_logits_metadata(t["start"], t["end"], problem.N, problem.H)
        sms = mqa.get_num_sms(DEVICE)
        want = schedule.dense_metadata(t["start"].cpu(), t["end"].cpu(), problem.N, problem.H, sms)
        if not torch.equal(cuts.cpu(), want):
            raise AssertionError(f"cut points differ\nreplay: {problem}")
    out = case.new_out()
    got = case.run(backend=BACKEND, out=out, schedule_meta=cuts)
    assert_logits(case, got)
    if not guards_intact(out):
        raise AssertionError(f"something around the result was written\nreplay: {problem}")


def failures(paths: Iterable[str]) -> Iterator[str]:
    for path, pdl in itertools.product(paths, (False, True)):
        mqa.set_pdl(pdl, DEVICE)
        problem = parse(f"dense fp8 {path} regime=exact seed=3")
        try:
            check(problem, fresh=pdl)
        except AssertionError as error:
            yield str(error)


if __name__ == "__main__":
    wanted = [path for path in PATHS if all(word in path for word in sys.argv[1:])]
    sys.exit("\n\n".join(failures(wanted)) or (None if wanted else "no such path"))
