"""Hopper: a problem becomes a plan. The kernels are `csrc/sm90/`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mqa import devices
from mqa.cuda import driver
from mqa.cuda.plan import WARP, Kernel, Plan, Scalar, Struct, divisor
from mqa.cuda.sm90_paged import (
    PAGE_SIZES,
    groups_of_request,
    paged_addresses,
    paged_facts,
    paged_kernels,
    paged_plan,
)
from mqa.cuda.sm90_tiles import (
    CXX,
    ELEMENTS,
    HEAD_DIMS,
    HEADS,
    MX_DIMS,
    OWN_COLUMNS,
    ROLES,
    THREADS,
    Tiles,
    barriers,
    in_turn,
    k_swizzle,
    no_q,
    q_addresses,
    q_pointers,
    q_scalars,
    row_bytes,
    shared_parts,
    strides,
)
from mqa.cuda.tensor_map import ADDRESS_BYTES, TensorMap
from mqa.formats.kv_cache import SCALE_BYTES
from mqa.prepared import Launch
from mqa.problem import LOGITS_DTYPES, Format, PagedProblem, Problem
from mqa.validate import DenseCall, PagedCall


@functools.cache
def tiles(heads: int, dim: int, elements: str = "Fp8") -> Tiles:
    """What measured best (see docs/performance.md)."""
    if elements == "Fp8":
        return Tiles(heads, dim, 128 if dim == 128 else 512, 4)
    return in_turn(heads, dim, OWN_COLUMNS, elements)


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
    elements: str = "Fp8"
    q_scale_strides: tuple[int, int] = (0, 0)


@functools.cache
def dense_kernel(tiles: Tiles, logits: str) -> Kernel:
    first = (str(tiles.heads), str(tiles.dim), CXX[logits], str(tiles.stages))
    rows, last = str(tiles.stage_rows), str(tiles.shared_bytes)
    if not tiles.converted:
        return Kernel("sm90/dense_fp8.cuh", "mqa::sm90::dense_fp8", (*first, rows, last))
    arguments = (f"mqa::sm90::{tiles.elements}", *first, rows, str(tiles.columns), last)
    return Kernel("sm90/converted.cuh", "mqa::sm90::dense_converted", arguments)


def dense_kernels(heads: int, dim: int, logits: str, elements: str = "Fp8") -> dict[Kernel, int]:
    """Those that a call may reach, and their dynamic shared memory."""
    t = tiles(heads, dim, elements)
    return {dense_kernel(t, logits): t.shared_bytes}


@functools.lru_cache(maxsize=4096)
def dense_plan(facts: DenseFacts) -> Plan:
    """The launch of `csrc/sm90/dense_fp8.cuh` or `converted.cuh` for a call with these facts."""
    t = tiles(facts.heads, facts.dim, facts.elements)
    heads, dim = facts.heads, facts.dim
    q_shape, q_box = (dim, heads, facts.rows), (dim, heads, t.q_box_rows)
    # Without tokens nothing is loaded, but a map has no empty dimension.
    row = t.row_bytes
    k_shape, k_stride = (row, max(facts.tokens, 1)), facts.k_stride if facts.tokens else row
    q = TensorMap("q", "UINT8", 1, q_shape, facts.q_strides, q_box, swizzle=dim)
    k_box = (row, min(t.stage_rows, 256))
    k = TensorMap("kv", "UINT8", 1, k_shape, (k_stride,), k_box, swizzle=k_swizzle(t))
    maps = (k,) if t.converted else (q, k)
    return Plan(
        dense_kernel(t, facts.logits),
        grid=facts.parts,
        threads=THREADS,
        shared_bytes=t.shared_bytes,
        maps=maps,
        struct=_dense_arguments(facts, t),
        # 1 arrival, and the scales' bytes too, where these come in bulk.
        barriers=barriers(t, 1 + WARP, t.k_bytes),
        roles=ROLES,
        parts=shared_parts(t),
    )


def _dense_arguments(facts: DenseFacts, t: Tiles) -> Struct:
    """DenseArguments, field by field."""
    schedule = "schedule" if facts.scheduled else ""
    return Struct(
        ("kv_scale", "w", "start", "end", schedule, "out", *q_pointers(t)),
        (
            *no_q(t),
            Scalar("k_scale_stride", "q", facts.k_scale_stride),
            *q_scalars(facts.q_strides, facts.q_scale_strides),
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


METADATA_CTAS = 8
METADATA_THREADS = 1024
METADATA = tuple(
    Kernel("sm90/metadata.cuh", "mqa::sm90::metadata", (f"mqa::sm90::{kind}",))
    for kind in ("DenseMetadata", "PagedMetadata")
)
"""For dense and for paged calls."""


@functools.lru_cache(maxsize=1024)
def dense_metadata_plan(
    rows: int,
    tokens: int,
    block: int,
    parts: int,
    start_stride: int,
    end_stride: int,
    out_stride: int,
) -> Plan:
    """The launch of `csrc/sm90/metadata.cuh` for a dense schedule: one cluster."""
    scalars = (
        Scalar("start_stride", "q", start_stride),
        Scalar("end_stride", "q", end_stride),
        Scalar("cuts_stride", "q", out_stride),
        Scalar("rows", "i", rows),
        Scalar("tokens", "i", tokens),
        Scalar("block", "i", block),
        Scalar("parts", "i", parts),
    )
    struct = Struct(("start", "end", "out"), scalars)
    return Plan(METADATA[0], METADATA_CTAS, METADATA_THREADS, 0, (), struct)


@functools.lru_cache(maxsize=1024)
def paged_metadata_plan(
    requests: int,
    next_n: int,
    parts: int,
    lens_strides: tuple[int, int],
    indices_stride: int | None,
    out_stride: int,
) -> Plan:
    """The launch of `csrc/sm90/metadata.cuh` for a paged schedule; None: no indices."""
    scalars = (
        Scalar("lens_request_stride", "q", lens_strides[0]),
        Scalar("lens_row_stride", "q", lens_strides[1]),
        Scalar("indices_stride", "q", indices_stride or 0),
        Scalar("cuts_stride", "q", out_stride),
        Scalar("requests", "i", requests),
        *divisor("next_n", next_n),
        *divisor("groups_of_request", groups_of_request(next_n)),
        Scalar("parts", "i", parts),
    )
    struct = Struct(("lens", "" if indices_stride is None else "indices", "out"), scalars)
    return Plan(METADATA[1], METADATA_CTAS, METADATA_THREADS, 0, (), struct)


def dense_cuts_plan(
    start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, out: Tensor
) -> Plan:
    """The launch that writes the cut points of these windows to `out`."""
    rows, parts = start.shape[0], out.shape[0] - 1
    block = max(1, OWN_COLUMNS // num_heads)
    strides = (start.stride(0), end.stride(0), out.stride(0))
    return dense_metadata_plan(rows, num_kv_tokens, block, parts, *strides)


def paged_cuts_plan(context_lens: Tensor, indices: Tensor | None, out: Tensor) -> Plan:
    """The launch that writes the cut points of these lens, [B, next_n] or [B], to `out`."""
    requests, next_n = context_lens.shape if context_lens.dim() == 2 else (len(context_lens), 1)
    row_stride = context_lens.stride(1) if context_lens.dim() == 2 else 0
    return paged_metadata_plan(
        requests,
        next_n,
        out.shape[0] - 1,
        (context_lens.stride(0), row_stride),
        None if indices is None else indices.stride(0),
        out.stride(0),
    )


class Hopper:
    """A backend of GPUs of compute capability 9.0, for `elements`, by format."""

    def __init__(self, name: str, elements: dict[Format, str], *, by_default: bool) -> None:
        self._name, self.elements, self._by_default = name, elements, by_default

    @property
    def name(self) -> str:
        return self._name

    @property
    def by_default(self) -> bool:
        return self._by_default

    def reasons_against(self, problem: Problem, device: torch.device) -> Iterator[str]:
        yield from _device_reasons(device)
        yield from self.problem_reasons(problem)

    def problem_reasons(self, problem: Problem) -> Iterator[str]:
        """Reasons that hold on every device, and for an emulator of one."""
        if problem.format not in self.elements:
            known = ", ".join(self.elements)
            yield f"format={problem.format} is not among its kernels, only {known}"
        if problem.H not in HEADS:
            yield f"H={problem.H} is not one of {', '.join(map(str, HEADS))}"
        dims = HEAD_DIMS if problem.format == "fp8" else MX_DIMS
        if problem.D not in dims:
            yield f"D={problem.D} is not one of {', '.join(map(str, dims))}"
        if isinstance(problem, PagedProblem) and problem.P not in PAGE_SIZES:
            yield f"P={problem.P} is not one of {', '.join(map(str, PAGE_SIZES))}"
        yield from _layout_reasons(problem)

    def unusable_here(self) -> str | None:
        if not torch.cuda.is_available():
            return "needs an NVIDIA GPU of compute capability 9.0; torch finds no CUDA device"
        device = torch.device("cuda", torch.cuda.current_device())
        return "; ".join(_device_reasons(device)) or None

    def plan_dense(self, call: DenseCall, out: Tensor) -> Plan:
        return dense_plan(dense_facts(call, out, self.elements[call.problem.format]))

    def plan_paged(self, call: PagedCall, out: Tensor) -> Plan:
        return paged_plan(paged_facts(call, out, self.elements[call.problem.format]))

    def plan_dense_cuts(
        self, start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, out: Tensor
    ) -> Plan:
        return dense_cuts_plan(start, end, num_kv_tokens, num_heads, out)

    def plan_paged_cuts(self, context_lens: Tensor, indices: Tensor | None, out: Tensor) -> Plan:
        return paged_cuts_plan(context_lens, indices, out)

    def dense(self, call: DenseCall, out: Tensor) -> Launch | None:
        elements = self.elements[call.problem.format]
        launcher = driver.launcher(self.plan_dense(call, out), out.device)
        launcher.launch(dense_addresses(call, out, elements))
        return launcher.launch if call.problem.N and elements == "Fp8" else None

    def paged(self, call: PagedCall, out: Tensor) -> None:
        elements = self.elements[call.problem.format]
        launcher = driver.launcher(self.plan_paged(call, out), out.device)
        launcher.launch(paged_addresses(call, out, elements))

    def dense_metadata(
        self, start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, out: Tensor
    ) -> None:
        plan = self.plan_dense_cuts(start, end, num_kv_tokens, num_heads, out)
        addresses = (start.data_ptr(), end.data_ptr(), out.data_ptr())
        driver.launcher(plan, out.device).launch(addresses)

    def paged_metadata(self, context_lens: Tensor, indices: Tensor | None, out: Tensor) -> None:
        plan = self.plan_paged_cuts(context_lens, indices, out)
        where = 0 if indices is None else indices.data_ptr()
        addresses = (context_lens.data_ptr(), where, out.data_ptr())
        driver.launcher(plan, out.device).launch(addresses)

    def schedules_on(self, device: torch.device) -> bool:
        return not any(_device_reasons(device))

    def accumulator(self, format: Format) -> str:
        return ACCUMULATORS[self.elements[format]]

    def warmup(self, problem: Problem, device: torch.device) -> tuple[str, ...]:
        kernels = self.kernels_of(problem)
        for kernel, size in kernels.items():
            driver.load(kernel, device, size)
        return tuple(map(str, kernels))

    def kernels_of(self, problem: Problem) -> dict[Kernel, int]:
        """Those that calls of a configuration may reach, and their dynamic shared memory."""
        paged = isinstance(problem, PagedProblem)
        facts = (problem.H, problem.D, problem.out, self.elements[problem.format])
        scoring = paged_kernels(*facts) if paged else dense_kernels(*facts)
        return scoring | {METADATA[paged]: 0}


def dense_facts(call: DenseCall, out: Tensor, elements: str = "Fp8") -> DenseFacts:
    """What the launch for `call` depends on."""
    problem, schedule = call.problem, call.schedule
    row = row_bytes(elements, problem.D)
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
        q_strides=(call.q.stride(1), call.q.stride(0) if problem.S > 1 else problem.H * row),
        k_stride=call.k.stride(0) if problem.N > 1 else row,
        k_scale_stride=call.kv_scale.stride(0),
        weights_strides=strides(call.weights),
        schedule_strides=(0, 0) if schedule is None else strides(schedule),
        start_stride=call.start.stride(0),
        end_stride=call.end.stride(0),
        logits_stride=out.stride(0),
        elements=elements,
        q_scale_strides=(0, 0) if call.q_scale is None else strides(call.q_scale),
    )


def dense_addresses(call: DenseCall, out: Tensor, elements: str = "Fp8") -> tuple[int, ...]:
    """Addresses of `dense_plan(...).tensors`."""
    q, first, last = q_addresses(call, elements)
    return (
        *first,
        call.k.data_ptr() if call.problem.N else q,
        call.kv_scale.data_ptr(),
        call.weights.data_ptr(),
        call.start.data_ptr(),
        call.end.data_ptr(),
        0 if call.schedule is None else call.schedule.data_ptr(),
        out.data_ptr(),
        *last,
    )


def kernels(*, every: bool = False) -> tuple[Kernel, ...]:
    """Kernels that a call can reach: all, or a set in which every two values of a choice meet."""
    scoring = [kernel for elements in ACCUMULATORS for kernel in _kernels_of(elements, every=every)]
    return (*METADATA, *scoring)


def _kernels_of(elements: str, *, every: bool) -> Iterator[Kernel]:
    dims = HEAD_DIMS if elements in ("Fp8", "Fp8Accurate") else MX_DIMS
    kind = (*ACCUMULATORS,).index(elements)
    for h, d, logits in itertools.product(HEADS, dims, LOGITS_DTYPES):
        facts = (h, d, logits, elements)
        dense, paged = [*dense_kernels(*facts)], [*paged_kernels(*facts)]
        number = HEADS.index(h) + dims.index(d)
        one_paged = paged[dims.index(d) % len(paged)]
        if every:
            yield from (*dense, *paged)
        # A Latin square: each pair of heads and dim once, each logits dtype with all of them.
        elif (number + kind + LOGITS_DTYPES.index(logits)) % len(LOGITS_DTYPES):
            continue
        elif elements == "Fp8":
            yield from (*dense, one_paged)
        # The converted formats share their code: each with every H, dense or paged, in turn.
        elif (number + kind) % len(dims) == 0:
            yield (*dense, one_paged)[HEADS.index(h) // 2 % 2]


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
    layout, heads = dict(problem.layout), problem.H
    stored = row_bytes(ELEMENTS[problem.format], problem.D)
    paged = isinstance(problem, PagedProblem)
    for tensor in ("q", "cache" if paged else "kv"):
        for offset in layout.get(f"{tensor}_off", ()):
            yield f"{tensor} is {offset} bytes off a multiple of {ADDRESS_BYTES}"
    if isinstance(problem, PagedProblem):
        sizes: tuple[int, ...] = (problem.B, problem.next_n, heads, stored)
        yield from _cache_reasons(problem, stored, layout.get("cache_stride", ()))
    else:
        sizes = (problem.S, heads, stored)
        yield from _row_reasons("kv", (problem.N, stored), layout.get("kv_stride", ()))
    yield from _row_reasons("q", sizes, layout.get("q_stride", ()))
    for tensor, row in (("q", heads * stored), ("q_scale", heads)):
        # Strides of inner dimensions may be left out.
        request, *inner = layout.get(f"{tensor}_stride", (sizes[1] * row,))
        if paged and min(sizes[:2]) > 1 and request != sizes[1] * (*inner, row)[0]:
            yield (
                f"{tensor} has {request} from one request to the next, expected next_n times "
                f"its row, {sizes[1] * (*inner, row)[0]}, as in {tensor}.contiguous()"
            )


def _row_reasons(tensor: str, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[str]:
    """Of a tensor whose last dimension is a row for the copy engine."""
    dim = sizes[-1]
    inner = strides[-1] if len(strides) == len(sizes) else 1
    steps = [step for size, step in zip(sizes[:-1], strides, strict=False) if size > 1]
    if inner != 1 or any(step % ADDRESS_BYTES or step < dim for step in steps):
        yield f"{tensor} is not rows of {dim} contiguous bytes at multiples of {ADDRESS_BYTES}"


def _cache_reasons(problem: PagedProblem, stored: int, strides: tuple[int, ...]) -> Iterator[str]:
    bytes_of_page = problem.P * (stored + SCALE_BYTES)
    page = strides[0] if strides and problem.blocks > 1 else bytes_of_page
    if page % ADDRESS_BYTES or page < bytes_of_page:
        yield f"pages of cache overlap, or do not begin at multiples of {ADDRESS_BYTES} bytes"


ACCUMULATORS = {
    "Fp8": "HOPPER_FP8",
    "Mxfp8": "HOPPER_E4M3_IN_BF16",
    "Mxfp4": "HOPPER_E2M1_IN_BF16",
    "Fp8Accurate": "HOPPER_E4M3_IN_BF16",
}
"""How each kind of elements is summed: a name in `mqa.testing.accumulators`."""
SM90 = Hopper("sm90", ELEMENTS, by_default=True)
SM90_ACCURATE = Hopper("sm90-accurate", {"fp8": "Fp8Accurate"}, by_default=False)
"""FP8 by way of bfloat16, whose sums keep float32's bits: for validation."""
