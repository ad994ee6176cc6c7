"""GPUs from compute capability 8.0 on, by what all of them have: a problem becomes a plan.

The kernels are `csrc/portable/`: products of a warp, in float16 or bfloat16, ordinary loads and
stores. So tensors may have any strides and lie at any address, pages may have any size and there
may be any number of heads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mqa.cuda import driver, targets
from mqa.cuda.covering import covering
from mqa.cuda.dense import DenseFacts, dense_arguments
from mqa.cuda.gpu import Gpu
from mqa.cuda.metadata import PORTABLE_METADATA
from mqa.cuda.operands import CXX, ELEMENTS, HEAD_DIMS, row_bytes
from mqa.cuda.paged import PagedFacts, paged_arguments
from mqa.cuda.plan import WARP, Kernel, Plan, Struct
from mqa.cuda.storage import Member, laid_out, parts_of
from mqa.problem import LOGITS_DTYPES, Format, Problem

DENSE, PAGED = "mqa::portable::dense", "mqa::portable::paged"
WARPS = 8
THREADS = WARPS * WARP
COLUMNS = 128
"""Of a block: rows times heads, or 128 heads of one row at a time."""
HEADS = (8, 16, 32, 64, COLUMNS)
MANY_HEADS = 256
"""Stands in a kernel's name for all head counts above those."""
MOST_SHARED_BYTES = 99 * 1024
"""Of a CTA on GPUs of compute capability 8.6, 8.9 and 12.x, which have the least."""
_CONVERTS = 89
"""Compute capability, times 10, from which on E4M3 becomes float16 by an instruction."""
_WEIGHTS = COLUMNS * 4
_REST = 512
"""Cuts, rows and the piece at hand."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a kernel is compiled for, and its shared memory."""

    elements: str
    heads: int
    """Padded: one of `HEADS`, or `MANY_HEADS`."""
    dim: int

    @property
    def slot_tokens(self) -> int:
        """Keys that a warp has at once."""
        return 32 if row_bytes(self.elements, self.dim) == 256 else 64

    @property
    def shared_bytes(self) -> int:
        """Queries in 16 bits, then of each warp keys and their scales, then the rest."""
        keys = WARPS * self.slot_tokens * (row_bytes(self.elements, self.dim) + 4)
        return COLUMNS * self.dim * 2 + keys + _WEIGHTS + _REST


@functools.cache
def storage(sizes: Sizes) -> tuple[Member, ...]:
    """`Tiling::Storage` of `csrc/portable/storage.cuh`, member by member."""
    block = COLUMNS // min(sizes.heads, COLUMNS)
    return laid_out(
        (
            ("k", sizes.slot_tokens * row_bytes(sizes.elements, sizes.dim), WARPS, 16),
            ("q", COLUMNS * sizes.dim * 2, 1, 16),
            ("scales", sizes.slot_tokens * 4, WARPS, 16),
            ("weights", _WEIGHTS, 1, 4),
            ("rows", 16, block, 16),
            ("cuts", 8 * WARPS + 2 * 8, 1, 8),
            ("block", 4, 1, 4),
            ("found", 12, 1, 4),
        )
    )


def padded(heads: int) -> int:
    """The head count that a kernel is compiled for."""
    return next((some for some in HEADS if heads <= some), MANY_HEADS)


@functools.cache
def kernel(name: str, sizes: Sizes, logits: str) -> Kernel:
    numbers = (sizes.heads, sizes.dim, CXX[logits], sizes.shared_bytes)
    arguments = (f"mqa::portable::{sizes.elements}", *map(str, numbers))
    return Kernel("portable/score.cuh", name, arguments, portable=True)


@functools.lru_cache(maxsize=4096)
def dense_plan(facts: DenseFacts) -> Plan:
    """The launch of `mqa::portable::dense` for a call with these facts."""
    return _plan(DENSE, facts, dense_arguments(facts, _q_pointers(facts), "kv"))


@functools.lru_cache(maxsize=4096)
def paged_plan(facts: PagedFacts) -> Plan:
    """The launch of `mqa::portable::paged` for a call with these facts."""
    return _plan(PAGED, facts, paged_arguments(facts, _q_pointers(facts)))


def _q_pointers(facts: DenseFacts | PagedFacts) -> tuple[str, str]:
    return "q", "q_scale" if facts.elements.startswith("Mx") else ""


def _plan(name: str, facts: DenseFacts | PagedFacts, struct: Struct) -> Plan:
    sizes = Sizes(facts.elements, padded(facts.heads), facts.dim)
    return Plan(
        kernel(name, sizes, facts.logits),
        grid=facts.parts,
        threads=THREADS,
        shared_bytes=sizes.shared_bytes,
        maps=(),
        struct=struct,
        parts=parts_of(storage(sizes)),
    )


def model(format: Format, capability: int, arch: str) -> str:
    """How a GPU of a compute capability (times 10) sums dot products of a format, by what was
    compiled for `arch`: a name in `mqa.testing.accumulators`."""
    unit = "HOPPER_MMA" if capability >= 90 else "AMPERE"
    shifted = format == "fp8" and targets.number(arch) < _CONVERTS
    return f"{unit}_{'E4M3_SHIFTED_IN_F16' if shifted else _MODELS[format]}"


class Portable(Gpu):
    """The backend of GPUs that have no kernels of their own, and on others of what these lack."""

    capability = "8.0 or newer"
    metadata = PORTABLE_METADATA

    def takes(self, major: int, minor: int) -> bool:
        return 10 * major + minor >= targets.FIRST_PORTABLE

    def misfit(self, device: torch.device) -> str | None:
        misfit = targets.portable_misfit(device)
        # Each call asks, so the target is looked up again only where the answer may be no.
        if misfit is not None or driver.unavailable() is not None or driver.assembles():
            return misfit
        return driver.ptx_misfit(targets.portable(device))

    def problem_reasons(self, problem: Problem) -> Iterator[str]:
        if problem.D not in HEAD_DIMS:
            yield f"D={problem.D} is not one of {', '.join(map(str, HEAD_DIMS))}"

    def dense_plan(self, facts: DenseFacts) -> Plan:
        return dense_plan(facts)

    def paged_plan(self, facts: PagedFacts) -> Plan:
        return paged_plan(facts)

    def scoring_kernels(
        self, heads: int, dim: int, logits: str, elements: str, *, paged: bool
    ) -> dict[Kernel, int]:
        sizes = Sizes(elements, padded(heads), dim)
        return {kernel(PAGED if paged else DENSE, sizes, logits): sizes.shared_bytes}

    def accumulator_of(self, format: Format, arch: str | None) -> str:
        if arch is not None:
            return model(format, targets.number(arch), arch)
        major, minor = torch.cuda.get_device_capability()
        return model(format, 10 * major + minor, targets.portable(torch.cuda.current_device()))


@functools.cache
def kernels(*, every: bool = False) -> tuple[Kernel, ...]:
    """Kernels that a call can reach: all, or a set in which every two values of a choice meet."""
    choices = itertools.product(
        (DENSE, PAGED), ELEMENTS.values(), (*HEADS, MANY_HEADS), HEAD_DIMS, LOGITS_DTYPES
    )
    scoring = {
        kernel(name, Sizes(elements, heads, dim), logits): (name, elements, heads, dim, logits)
        for name, elements, heads, dim, logits in choices
    }
    return (*PORTABLE_METADATA, *(scoring if every else covering(scoring)))


_MODELS: dict[Format, str] = {
    "fp8": "E4M3_IN_F16",
    "mxfp8": "E4M3_IN_BF16",
    "mxfp4": "E2M1_IN_BF16",
    "bf16": "BF16_IN_CHUNKS",
}
PORTABLE = Portable("portable", ELEMENTS, {}, by_default=True)
