"""The portable kernels compile for every GPU that they are for, within what the least one has."""

from __future__ import annotations

import itertools

import pytest

from mqa.cuda import cache, compiler, metadata, portable
from mqa.cuda.plan import Kernel

pytestmark = pytest.mark.skipif(compiler.unavailable() is not None, reason="needs NVRTC")
ARCHITECTURES = (
    *("sm_80", "sm_86", "sm_89", "sm_90"),
    *("sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
)
SOME = portable.kernels()
QUICK_STEP = 4 * len(ARCHITECTURES)
MULTIPROCESSOR_REGISTERS = 64 * 1024


def check(arch: str, kernel: Kernel) -> None:
    """Nothing spilled, and no more shared memory than any of these GPUs gives a CTA."""
    binary = cache.get(kernel, arch)
    assert compiler.findings(binary.log) == []
    usage = compiler.usage(binary)
    assert usage is not None
    assert usage.spill_bytes == 0
    assert ".reqnctapercluster" not in binary.ptx
    schedule = kernel in metadata.PORTABLE_METADATA
    threads = metadata.THREADS if schedule else portable.THREADS
    assert usage.registers <= min(MULTIPROCESSOR_REGISTERS // threads, 255)
    dynamic = 0 if schedule else int(kernel.arguments[-1])
    assert usage.shared_bytes + dynamic <= (48 * 1024 if schedule else portable.MOST_SHARED_BYTES)


COVERED = [
    (ARCHITECTURES[(at + shift) % len(ARCHITECTURES)], kernel)
    for shift, (at, kernel) in itertools.product(range(len(ARCHITECTURES)), enumerate(SOME))
]


@pytest.mark.parametrize(
    ("arch", "kernel"),
    [
        pytest.param(*pair, marks=() if number % QUICK_STEP == 0 else pytest.mark.slow)
        for number, pair in enumerate(COVERED)
    ],
    ids=str,
)
def test_a_kernel_of_the_covering_set_has_no_findings(arch: str, kernel: Kernel) -> None:
    check(arch, kernel)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel", [kernel for kernel in portable.kernels(every=True) if kernel not in SOME], ids=str
)
def test_any_other_kernel_has_no_findings_for_the_oldest_and_the_newest(kernel: Kernel) -> None:
    for arch in ("sm_80", "sm_89", "sm_120"):
        check(arch, kernel)


def test_every_kernel_is_compiled_for_every_architecture() -> None:
    assert {*COVERED} == {*itertools.product(ARCHITECTURES, SOME)}
