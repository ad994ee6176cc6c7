"""Kernels compile to what they were written for: nothing spilled, no tensor-core work in series."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest

from mqa.cli.machine import usable_cores
from mqa.cuda import cache, compiler, sm90, variants
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Kernel
from mqa.errors import CompileError

SOME = [(arch, kernel) for arch in variants.REGISTRY for kernel in variants.kernels(arch)]
OTHERS = [
    (arch, kernel)
    for arch in variants.REGISTRY
    for kernel in variants.kernels(arch, every=True)
    if (arch, kernel) not in SOME
]
MULTIPROCESSOR_REGISTERS = 64 * 1024


@functools.cache
def compiled(*, every: bool) -> dict[tuple[str, Kernel], Binary | CompileError]:
    """Kernels from the cache, else the compiler, which runs on several threads at a time."""

    def get(variant: tuple[str, Kernel]) -> Binary | CompileError:
        arch, kernel = variant
        try:
            return cache.get(kernel, arch)
        except CompileError as error:
            return error

    wanted = OTHERS if every else SOME
    with ThreadPoolExecutor(usable_cores()) as pool:
        return dict(zip(wanted, pool.map(get, wanted), strict=True))


def check(arch: str, kernel: Kernel, *, every: bool) -> None:
    binary = compiled(every=every)[arch, kernel]
    if isinstance(binary, CompileError):
        raise binary
    assert compiler.findings(binary.log) == []
    usage = compiler.usage(binary)
    assert usage is not None
    assert usage.spill_bytes == 0
    if "setmaxnreg" in binary.ptx:
        # It hands out what the launch got. A launch that got less would wait for ever.
        assert usage.registers == MULTIPROCESSOR_REGISTERS // sm90.THREADS // 8 * 8


@pytest.mark.parametrize(("arch", "kernel"), SOME, ids=str)
def test_a_kernel_of_the_covering_set_has_no_findings(arch: str, kernel: Kernel) -> None:
    check(arch, kernel, every=False)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "kernel"), OTHERS, ids=str)
def test_any_other_kernel_has_no_findings(arch: str, kernel: Kernel) -> None:
    check(arch, kernel, every=True)


def test_no_architecture_has_more_kernels_to_compile_than_ci_has_time_for() -> None:
    for arch in variants.REGISTRY:
        assert len(variants.kernels(arch)) <= 60
