"""A paged call becomes what its launch depends on: the same for every architecture.

`PagedArguments` is that of `csrc/score/paged.cuh`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mqa import devices
from mqa.cuda.operands import byte_stride, nulls, q_scalars, row_bytes, scale_bytes, strides
from mqa.cuda.plan import Plan, Scalar, Struct, divisor
from mqa.reference.schedule import GROUP
from mqa.validate import PagedCall

LINE_ENTRIES = 32
"""Of a block table, in 128 bytes."""
_INT32_MAX = 2**31 - 1


def groups_of_request(next_n: int) -> int:
    """Groups that the rows of a request are cut into."""
    return -(-next_n // GROUP)


@dataclass(frozen=True, slots=True)
class PagedFacts:
    """All that a paged launch depends on, addresses and values aside. Strides in elements, those of
    q and of pages in bytes."""

    requests: int
    next_n: int
    heads: int
    dim: int
    page_rows: int
    pages: int
    columns: int
    """Of the block table."""
    width: int
    logits: str
    bf16_weights: bool
    clean: bool
    last_only: bool
    """Lens are [B]."""
    varlen: bool
    parts: int
    scheduled: bool
    q_strides: tuple[int, int]
    """Of heads, of rows."""
    page_stride: int
    weights_strides: tuple[int, int]
    lens_strides: tuple[int, int]
    table_strides: tuple[int, int]
    indices_stride: int
    schedule_strides: tuple[int, int]
    logits_stride: int
    elements: str = "Fp8"
    q_scale_strides: tuple[int, int] = (0, 0)
    q_dim_stride: int = 1
    request_strides: tuple[int, int] = (0, 0)
    """Of q in bytes, of its scales, from request to request."""

    @property
    def group_rows(self) -> int:
        """Most rows of a group."""
        return GROUP if self.varlen else min(self.next_n, GROUP)


def paged_arguments(facts: PagedFacts, q_pointers: tuple[str, ...]) -> Struct:
    """PagedArguments, field by field; `q_pointers` as in `dense_arguments`."""
    indices = "indices" if facts.varlen else ""
    schedule = "schedule" if facts.scheduled else ""
    per_request = groups_of_request(facts.next_n)
    more = (
        ("q_dim_stride", facts.q_dim_stride),
        ("q_request_stride", facts.request_strides[0]),
    )
    limit = min(facts.width, facts.columns * facts.page_rows, _INT32_MAX)
    return Struct(
        ("cache", "w", "lens", "table", indices, schedule, "out", *q_pointers),
        (
            *nulls(("q", "q_scale"), q_pointers),
            Scalar("page_stride", "q", facts.page_stride),
            *q_scalars(facts.q_strides, more, facts.q_scale_strides),
            Scalar("q_scale_request_stride", "q", facts.request_strides[1]),
            Scalar("weights_row_stride", "q", facts.weights_strides[0]),
            Scalar("weights_head_stride", "q", facts.weights_strides[1]),
            Scalar("lens_request_stride", "q", facts.lens_strides[0]),
            Scalar("lens_row_stride", "q", facts.lens_strides[1]),
            Scalar("table_row_stride", "q", facts.table_strides[0]),
            Scalar("table_column_stride", "q", facts.table_strides[1]),
            Scalar("indices_stride", "q", facts.indices_stride),
            Scalar("schedule_row_stride", "q", facts.schedule_strides[0]),
            Scalar("schedule_column_stride", "q", facts.schedule_strides[1]),
            Scalar("logits_stride", "q", facts.logits_stride),
            Scalar("rows", "i", facts.requests * facts.next_n),
            Scalar("requests", "i", facts.requests),
            *divisor("next_n", facts.next_n),
            *divisor("groups_of_request", per_request),
            *divisor("table_lines", max(-(-limit // (facts.page_rows * LINE_ENTRIES)), 1)),
            Scalar("limit", "i", limit),
            Scalar("pages", "i", facts.pages),
            Scalar("page_shift", "i", facts.page_rows.bit_length() - 1),
            *divisor("page", facts.page_rows),
            Scalar("heads", "i", facts.heads),
            Scalar("width", "i", facts.width),
            Scalar("groups_of_part", "f", facts.requests * per_request / facts.parts),
            Scalar("last_only", "?", facts.last_only),
            Scalar("weights_are_bf16", "?", facts.bf16_weights),
            Scalar("clean", "?", facts.clean),
        ),
    )


def paged_facts(call: PagedCall, out: Tensor, elements: str = "Fp8") -> PagedFacts:
    """What the launch for `call` depends on."""
    problem, schedule, indices = call.problem, call.schedule, call.indices
    rows = problem.B * problem.next_n
    lens = call.context_lens
    # The stride of a dimension of size 1 means nothing, and may be anything.
    dimension = 1 if problem.next_n > 1 else 0
    row = row_bytes(elements, problem.D)
    scale = call.q_scale
    return PagedFacts(
        requests=problem.B,
        next_n=problem.next_n,
        heads=problem.H,
        dim=problem.D,
        page_rows=problem.P,
        pages=problem.blocks,
        columns=problem.columns,
        width=problem.L,
        logits=problem.out,
        bf16_weights=problem.weights == "bfloat16",
        clean=problem.clean,
        last_only=problem.lens_rank == 1,
        varlen=problem.varlen,
        parts=problem.sms or devices.get_num_sms(out.device),
        scheduled=schedule is not None,
        q_strides=(
            byte_stride(call.q, 2),
            byte_stride(call.q, dimension) if rows > 1 else problem.H * row,
        ),
        page_stride=(
            byte_stride(call.kv_cache, 0)
            if problem.blocks > 1
            else problem.P * (row + scale_bytes(elements))
        ),
        weights_strides=strides(call.weights),
        lens_strides=(lens.stride(0), lens.stride(1) if lens.dim() == 2 else 0),
        table_strides=strides(call.block_table),
        indices_stride=0 if indices is None else indices.stride(0),
        schedule_strides=(0, 0) if schedule is None else strides(schedule),
        logits_stride=out.stride(0),
        elements=elements,
        q_scale_strides=(0, 0) if scale is None else (scale.stride(dimension), scale.stride(2)),
        q_dim_stride=byte_stride(call.q, 3),
        request_strides=(byte_stride(call.q, 0), 0 if scale is None else scale.stride(0)),
    )


def paged_addresses(call: PagedCall, out: Tensor, plan: Plan) -> tuple[int, ...]:
    """Addresses of `plan.tensors`."""
    q = call.q.data_ptr()
    found = {
        "": 0,
        "q": q,
        "q_scale": 0 if call.q_scale is None else call.q_scale.data_ptr(),
        "cache": call.kv_cache.data_ptr() if call.problem.blocks else q,
        "w": call.weights.data_ptr(),
        "lens": call.context_lens.data_ptr(),
        "table": call.block_table.data_ptr(),
        "indices": 0 if call.indices is None else call.indices.data_ptr(),
        "schedule": 0 if call.schedule is None else call.schedule.data_ptr(),
        "out": out.data_ptr(),
    }
    return tuple(found[name] for name in plan.tensors)
