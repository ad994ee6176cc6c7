"""Kernels compile to what they were written for: nothing spilled, no tensor-core work in series."""

from __future__ import annotations

import functools
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from mqa.cli.machine import usable_cores
from mqa.cuda import cache, compiler, sm90_tiles, sm100, sm100_tiles, variants
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import MAX_SHARED_BYTES, Kernel
from mqa.errors import CompileError

ARCHITECTURES = tuple(arch for arch in variants.REGISTRY if arch != "sm_80")
"""Portable kernels, which are for many, are compiled in test_portable_compile.py."""
SOME = [(arch, kernel) for arch in ARCHITECTURES for kernel in variants.kernels(arch)]
SOME += [("sm_100a", kernel) for kernel in sm100.kernels()]
OTHERS = [
    (arch, kernel)
    for arch in ARCHITECTURES
    for kernel in variants.kernels(arch, every=True)
    if (arch, kernel) not in SOME
]
MULTIPROCESSOR_REGISTERS = 64 * 1024
THREADS = {"sm90": sm90_tiles.THREADS, "sm100": sm100_tiles.THREADS}
"""Of kernels that score, by the folder of their source."""


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
        threads = THREADS[kernel.source.partition("/")[0]]
        assert usage.registers == MULTIPROCESSOR_REGISTERS // threads // 8 * 8
        assert usage.shared_bytes + int(kernel.arguments[-1]) <= MAX_SHARED_BYTES
    if arch.startswith("sm_100"):
        allocations = re.findall(r"tcgen05\.alloc\S+ \[%\w+\], (\w+);", binary.ptx)
        assert len(allocations) == ("mqa::sm100" in kernel.name)
        # All that the launch may have: a kernel has an SM to itself.
        assert allocations in ([], [str(sm100_tiles.TENSOR_COLUMNS)])


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
