r"""Every path of the kernels on compact shapes, to be run under a sanitizer on a GPU of theirs.

    for tool in "memcheck --report-api-errors no" synccheck initcheck; do
        compute-sanitizer --tool $tool --error-exitcode 9 python tests/cuda/sanitize.py
    done
    MQA_NVRTC_OPTIONS=-DMQA_EVERY_LANE_ARRIVES \
        compute-sanitizer --tool racecheck --error-exitcode 9 python tests/cuda/sanitize.py

Importing cuda.bindings asks the driver for functions of later releases, which memcheck would report
as errors of the API; those of launches raise.

Each tensor gets an allocation of its own, exactly as long as what it holds, so that memcheck sees a
read behind the last element. Results are written over NaN: what a kernel leaves out shows without
initcheck, which would take what bulk stores wrote for uninitialised. Words as arguments choose the
paths that have them all, `portable` those of the portable kernels, also with
MQA_PORTABLE_ARCH=compute_80. Exits with the failures, if any.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

from compact_paths import ACCURATE, HOPPER_ONLY, PATHS
from portable_cases import LINES, own_schedule

import mqa
from mqa.problem import PagedProblem, Problem, parse
from mqa.reference import schedule
from mqa.testing import Case, assert_logits, guards_intact, make_case

BACKENDS_OF, DEVICE = {9: "sm90", 10: "sm100"}, "cuda"
"""By major compute capability; others have the portable backend alone."""
PORTABLE = "portable"


def made_schedule(case: Case, backend: str, sms: int) -> Tensor:
    """By the portable kernels for their own paths: public calls would get those of this GPU."""
    t, problem = case.tensors, case.problem
    if backend == PORTABLE:
        return own_schedule(case, sms, nullcontext)
    if isinstance(problem, PagedProblem):
        return mqa.get_paged_mqa_logits_metadata(t["lens"], problem.P, sms, t.get("indices"))
    return mqa.get_mqa_logits_metadata(t["start"], t["end"], problem.N, problem.H)


def fresh_schedule(case: Case, backend: str) -> Tensor:
    """Cut points of the case for all SMs, which must be those of the definition."""
    t, problem, sms = case.tensors, case.problem, mqa.get_num_sms(DEVICE)
    cuts = made_schedule(case, backend, sms)
    host = {name: tensor.cpu() for name, tensor in t.items() if name not in ("q", "kv", "cache")}
    if isinstance(problem, PagedProblem):
        want = schedule.paged_metadata(host["lens"], sms, host.get("indices"))
    else:
        want = schedule.dense_metadata(host["start"], host["end"], problem.N, problem.H, sms)
    if not torch.equal(cuts.cpu(), want):
        raise AssertionError(f"cut points differ\nreplay: {problem}")
    return cuts


def check(problem: Problem, backend: str, *, fresh: bool = False) -> None:
    """The logits of a problem, without a schedule unless it asks for a stale or `fresh` one."""
    case = make_case(problem, DEVICE)
    cuts = fresh_schedule(case, backend) if fresh else None
    out = case.new_out()
    got = case.run(backend=backend, out=out, schedule_meta=cuts)
    assert_logits(case, got)
    if not guards_intact(out):
        raise AssertionError(f"something around the result was written\nreplay: {problem}")


def failures(paths: Iterable[str], usual: str) -> Iterator[str]:
    for path, pdl in itertools.product(paths, (False, True)):
        mqa.set_pdl(pdl, DEVICE)
        named = [name for name in (ACCURATE, PORTABLE) if path.startswith(name)]
        backend, line = (named or [usual])[0], path.removeprefix("".join(named))
        problem = parse(f"{line} regime=exact seed=3")
        try:
            check(problem, backend, fresh=pdl)
        except AssertionError as error:
            yield str(error)


if __name__ == "__main__":
    major, _ = torch.cuda.get_device_capability(DEVICE)
    usual = BACKENDS_OF.get(major, PORTABLE)
    own = [path for path in PATHS if major == 9 or not any(word in path for word in HOPPER_ONLY)]
    paths = [*(own if major in BACKENDS_OF else ()), *(f"{PORTABLE} {line}" for line in LINES)]
    wanted = [path for path in paths if all(word in path for word in sys.argv[1:])]
    found = failures(wanted, usual)
    sys.exit("\n\n".join(found) or (None if wanted else "no such path"))
