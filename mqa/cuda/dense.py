"""A dense call becomes what its launch depends on: the same for every architecture.

`DenseArguments` is that of `csrc/score/dense.cuh`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mqa import devices
from mqa.cuda.operands import byte_stride, q_nulls, q_scalars, row_bytes, scale_bytes, strides
from mqa.cuda.plan import Plan, Scalar, Struct
from mqa.validate import DenseCall


@dataclass(frozen=True, slots=True)
class DenseFacts:
    """All that a dense launch depends on, addresses and values aside. Strides in elements, those of
    q and k in bytes."""

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


def dense_arguments(facts: DenseFacts, q_pointers: tuple[str, ...]) -> Struct:
    """DenseArguments, field by field. `q_pointers`: names of q and its scales if the kernel reads
    them itself, empty for one of them that it does not, nothing for both."""
    schedule = "schedule" if facts.scheduled else ""
    kv_scale = "kv_scale" if scale_bytes(facts.elements) else ""
    return Struct(
        (kv_scale, "w", "start", "end", schedule, "out", *q_pointers),
        (
            *q_nulls(q_pointers),
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
        q_strides=(
            byte_stride(call.q, 1),
            byte_stride(call.q, 0) if problem.S > 1 else problem.H * row,
        ),
        k_stride=byte_stride(call.k, 0) if problem.N > 1 else row,
        k_scale_stride=0 if call.kv_scale is None else call.kv_scale.stride(0),
        weights_strides=strides(call.weights),
        schedule_strides=(0, 0) if schedule is None else strides(schedule),
        start_stride=call.start.stride(0),
        end_stride=call.end.stride(0),
        logits_stride=out.stride(0),
        elements=elements,
        q_scale_strides=(0, 0) if call.q_scale is None else strides(call.q_scale),
    )


def dense_addresses(call: DenseCall, out: Tensor, plan: Plan) -> tuple[int, ...]:
    """Addresses of `plan.tensors`."""
    q = call.q.data_ptr()
    found = {
        "": 0,
        "q": q,
        "q_scale": 0 if call.q_scale is None else call.q_scale.data_ptr(),
        "kv": call.k.data_ptr() if call.problem.N else q,
        "kv_scale": 0 if call.kv_scale is None else call.kv_scale.data_ptr(),
        "w": call.weights.data_ptr(),
        "start": call.start.data_ptr(),
        "end": call.end.data_ptr(),
        "schedule": 0 if call.schedule is None else call.schedule.data_ptr(),
        "out": out.data_ptr(),
    }
    return tuple(found[name] for name in plan.tensors)
