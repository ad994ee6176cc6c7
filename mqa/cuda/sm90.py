"""Hopper: a dense FP8 problem becomes a plan. The kernels are `csrc/sm90/`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mqa import devices
from mqa.cuda import driver
from mqa.cuda.plan import WARP, Barrier, Kernel, Plan, Scalar, Struct
from mqa.cuda.tensor_map import ADDRESS_BYTES, TensorMap
from mqa.prepared import Launch
from mqa.problem import LOGITS_DTYPES, DenseProblem, Format, Problem
from mqa.validate import DenseCall, PagedCall

HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)

MATH_WARPS = 16
THREADS = MATH_WARPS * WARP + 128
BLOCK_COLUMNS = 512
"""Columns (row, head) of a query block: its rows times H."""
TILE_ROWS = 64
FILL_BYTES = 8192
FEEDING_WARPS = 3
_CXX = {"float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half"}


@dataclass(frozen=True, slots=True)
class DenseTiles:
    """Shared memory of the dense kernel: two query blocks and a ring of key stages."""

    heads: int
    dim: int
    stage_rows: int
    stages: int

    @property
    def block(self) -> int:
        """Rows of a query block."""
        return BLOCK_COLUMNS // self.heads

    @property
    def q_bytes(self) -> int:
        return BLOCK_COLUMNS * self.dim

    @property
    def k_bytes(self) -> int:
        return self.stage_rows * self.dim

    @property
    def shared_bytes(self) -> int:
        """sizeof(SharedStorage), member by member."""
        rings = 2 * self.q_bytes + self.stages * self.k_bytes
        scales = self.stages * self.stage_rows * 4
        per_block = 2 * (BLOCK_COLUMNS * 4 + self.block * 16 + 16 + 4 * 16)
        barriers = 8 * (2 * 2 + 2 * self.stages)
        cuts = 8 * (THREADS // WARP) + 2 * 8 + FEEDING_WARPS * 2 * 8
        return _aligned(rings + FILL_BYTES + scales + per_block + barriers + cuts, 1024)


@functools.cache
def tiles(heads: int, dim: int) -> DenseTiles:
    """What measured best (see docs/performance.md)."""
    return DenseTiles(heads, dim, 128 if dim == 128 else 512, 4)


@dataclass(frozen=True, slots=True)
class DenseFacts:
    """All that a dense launch depends on, addresses and values aside. Strides in elements."""

    rows: int
    tokens: int
    width: int
    heads: int
    dim: int
    logits: str
    bf16_weights: bool
    compressed: bool
    clean: bool
    parts: int
    """CTAs: those of the schedule, else the device's SMs."""
    scheduled: bool
    q_strides: tuple[int, int]
    """Of heads, of rows."""
    k_stride: int
    k_scale_stride: int
    weights_strides: tuple[int, int]
    schedule_strides: tuple[int, int]
    start_stride: int
    end_stride: int
    logits_stride: int


@functools.cache
def dense_kernel(tiles: DenseTiles, logits: str) -> Kernel:
    numbers = (tiles.stages, tiles.stage_rows, tiles.shared_bytes)
    arguments = (tiles.heads, tiles.dim, _CXX[logits], *numbers)
    return Kernel("sm90/dense_fp8.cuh", "mqa::sm90::dense_fp8", tuple(map(str, arguments)))


@functools.lru_cache(maxsize=4096)
def dense_plan(facts: DenseFacts) -> Plan:
    """The launch of `csrc/sm90/dense_fp8.cuh` for a call with these facts."""
    t = tiles(facts.heads, facts.dim)
    heads, dim = facts.heads, facts.dim
    q_shape, half = (dim, heads, facts.rows), t.block // 2
    # Without tokens nothing is loaded, but a map has no empty dimension.
    k_shape, k_stride = (dim, max(facts.tokens, 1)), facts.k_stride if facts.tokens else dim
    maps = (
        TensorMap("q", "UINT8", 1, q_shape, facts.q_strides, (dim, heads, half), swizzle=dim),
        TensorMap(
            "kv", "UINT8", 1, k_shape, (k_stride,), (dim, min(t.stage_rows, 256)), swizzle=dim
        ),
    )
    return Plan(
        dense_kernel(t, facts.logits),
        grid=facts.parts,
        threads=THREADS,
        shared_bytes=t.shared_bytes,
        maps=maps,
        struct=_dense_arguments(facts),
        barriers=_barriers(t),
    )


@functools.cache
def _barriers(t: DenseTiles) -> tuple[Barrier, ...]:
    return (
        Barrier("q_full", 2 + WARP, t.q_bytes),
        Barrier("q_empty", MATH_WARPS),
        # 1 arrival, and the scales' bytes too, where the scales come in bulk.
        Barrier("k_full", 1 + WARP, t.k_bytes),
        Barrier("k_empty", MATH_WARPS),
    )


def _dense_arguments(facts: DenseFacts) -> Struct:
    """DenseArguments, field by field."""
    schedule = "schedule" if facts.scheduled else ""
    return Struct(
        ("kv_scale", "w", "start", "end", schedule, "out"),
        (
            Scalar("k_scale_stride", "q", facts.k_scale_stride),
            Scalar("weights_row_stride", "q", facts.weights_strides[0]),
            Scalar("weights_head_stride", "q", facts.weights_strides[1]),
            Scalar("schedule_row_stride", "q", facts.schedule_strides[0]),
            Scalar("schedule_column_stride", "q", facts.schedule_strides[1]),
            Scalar("start_stride", "q", facts.start_stride),
            Scalar("end_stride", "q", facts.end_stride),
            Scalar("logits_stride", "q", facts.logits_stride),
            Scalar("rows", "i", facts.rows),
            Scalar("tokens", "i", facts.tokens),
            Scalar("width", "i", facts.width),
            Scalar("weights_are_bf16", "?", facts.bf16_weights),
            Scalar("compressed", "?", facts.compressed),
            Scalar("clean", "?", facts.clean),
        ),
    )


METADATA = Kernel("sm90/dense_metadata.cuh", "mqa::sm90::dense_metadata")
METADATA_THREADS = 512


@functools.lru_cache(maxsize=1024)
def metadata_plan(
    rows: int,
    tokens: int,
    block: int,
    parts: int,
    start_stride: int,
    end_stride: int,
    out_stride: int,
) -> Plan:
    """The launch of `csrc/sm90/dense_metadata.cuh`: a CTA for each cut point."""
    scalars = (
        Scalar("start_stride", "q", start_stride),
        Scalar("end_stride", "q", end_stride),
        Scalar("cuts_stride", "q", out_stride),
        Scalar("rows", "i", rows),
        Scalar("tokens", "i", tokens),
        Scalar("block", "i", block),
    )
    return Plan(
        METADATA, parts + 1, METADATA_THREADS, 0, (), Struct(("start", "end", "out"), scalars)
    )


def _aligned(size: int, step: int) -> int:
    return -(-size // step) * step


class Hopper:
    """The backend `sm90`: dense FP8 on GPUs of compute capability 9.0."""

    name = "sm90"
    by_default = True

    def reasons_against(self, problem: Problem, device: torch.device) -> Iterator[str]:
        yield from _device_reasons(device)
        if not isinstance(problem, DenseProblem):
            yield "paged calls are not among its kernels"
        if problem.format != "fp8":
            yield f"format={problem.format} is not among its kernels, only fp8"
        if problem.H not in HEADS:
            yield f"H={problem.H} is not one of {', '.join(map(str, HEADS))}"
        if problem.D not in HEAD_DIMS:
            yield f"D={problem.D} is not one of {', '.join(map(str, HEAD_DIMS))}"
        yield from _layout_reasons(problem)

    def unusable_here(self) -> str | None:
        if not torch.cuda.is_available():
            return "needs an NVIDIA GPU of compute capability 9.0; torch finds no CUDA device"
        device = torch.device("cuda", torch.cuda.current_device())
        return "; ".join(_device_reasons(device)) or None

    def dense(self, call: DenseCall, out: Tensor) -> Launch | None:
        launcher = driver.launcher(dense_plan(dense_facts(call, out)), out.device)
        launcher.launch(dense_addresses(call, out))
        return launcher.launch if call.problem.N else None

    def paged(self, call: PagedCall, out: Tensor) -> None:
        raise AssertionError("a paged problem has reasons against sm90")

    def dense_metadata(
        self, start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, out: Tensor
    ) -> None:
        rows, parts = start.shape[0], out.shape[0] - 1
        block = max(1, BLOCK_COLUMNS // num_heads)
        strides = (start.stride(0), end.stride(0), out.stride(0))
        plan = metadata_plan(rows, num_kv_tokens, block, parts, *strides)
        addresses = (start.data_ptr(), end.data_ptr(), out.data_ptr())
        driver.launcher(plan, out.device).launch(addresses)

    def schedules_on(self, device: torch.device) -> bool:
        return not any(_device_reasons(device))

    def accumulator(self, format: Format) -> str:
        return "HOPPER_FP8"

    def warmup(self, problem: Problem, device: torch.device) -> tuple[str, ...]:
        kernels = (dense_kernel(tiles(problem.H, problem.D), problem.out), METADATA)
        shared = (tiles(problem.H, problem.D).shared_bytes, 0)
        for kernel, size in zip(kernels, shared, strict=True):
            driver.load(kernel, device, size)
        return tuple(map(str, kernels))


def dense_facts(call: DenseCall, out: Tensor) -> DenseFacts:
    """What the launch for `call` depends on."""
    problem, schedule = call.problem, call.schedule
    return DenseFacts(
        rows=problem.S,
        tokens=problem.N,
        width=problem.width,
        heads=problem.H,
        dim=problem.D,
        logits=problem.out,
        bf16_weights=problem.weights == "bfloat16",
        compressed=problem.compressed,
        clean=problem.clean,
        parts=problem.sms or devices.get_num_sms(out.device),
        scheduled=schedule is not None,
        # The stride of a dimension of size 1 means nothing, and may be anything.
        q_strides=(call.q.stride(1), call.q.stride(0) if problem.S > 1 else problem.H * problem.D),
        k_stride=call.k.stride(0) if problem.N > 1 else problem.D,
        k_scale_stride=call.kv_scale.stride(0),
        weights_strides=_strides(call.weights),
        schedule_strides=(0, 0) if schedule is None else _strides(schedule),
        start_stride=call.start.stride(0),
        end_stride=call.end.stride(0),
        logits_stride=out.stride(0),
    )


def dense_addresses(call: DenseCall, out: Tensor) -> tuple[int, ...]:
    """Addresses of `dense_plan(...).tensors`."""
    q = call.q.data_ptr()
    return (
        q,
        call.k.data_ptr() if call.problem.N else q,
        call.kv_scale.data_ptr(),
        call.weights.data_ptr(),
        call.start.data_ptr(),
        call.end.data_ptr(),
        0 if call.schedule is None else call.schedule.data_ptr(),
        out.data_ptr(),
    )


def kernels(*, every: bool = False) -> tuple[Kernel, ...]:
    """Kernels that a call can reach: all, or a set in which every two values of a choice meet."""
    choices = [(h, d, logits) for h in HEADS for d in HEAD_DIMS for logits in LOGITS_DTYPES]
    chosen = [
        (h, d, logits)
        for h, d, logits in choices
        if every
        # A Latin square: each pair of heads and dim once, each logits dtype with all of them.
        or (HEADS.index(h) + HEAD_DIMS.index(d) + LOGITS_DTYPES.index(logits)) % 3 == 0
    ]
    return (METADATA, *(dense_kernel(tiles(h, d), logits) for h, d, logits in chosen))


def _strides(tensor: Tensor) -> tuple[int, int]:
    first, second = tensor.stride()
    return first, second


def _device_reasons(device: torch.device) -> Iterator[str]:
    if device.type != "cuda":
        yield f"needs a CUDA device of compute capability 9.0, this is {device}"
    elif not torch.cuda.is_available():
        yield "needs a CUDA device of compute capability 9.0; torch finds none here"
    elif (capability := torch.cuda.get_device_capability(device)) != (9, 0):
        yield f"needs compute capability 9.0, {device} has {capability[0]}.{capability[1]}"
    elif (missing := driver.unavailable()) is not None:
        yield missing


def _layout_reasons(problem: Problem) -> Iterator[str]:
    """What the copy engine cannot address. The texts tell no strides, which may depend on S: each
    would be a new reason."""
    for name, values in problem.layout:
        if name in ("q_off", "kv_off"):
            tensor = name.removesuffix("_off")
            yield f"{tensor} is {values[0]} bytes off a multiple of {ADDRESS_BYTES}"
        contiguous = {
            "q_stride": (problem.H * problem.D, problem.D, 1),
            "kv_stride": (problem.D, 1),
        }
        if name in contiguous:
            *steps, inner = (*values, *contiguous[name][len(values) :])
            if inner != 1 or any(step % ADDRESS_BYTES or step < problem.D for step in steps):
                tensor = name.removesuffix("_stride")
                yield f"{tensor} is not rows of {problem.D} contiguous bytes at multiples of 16"


SM90 = Hopper()
