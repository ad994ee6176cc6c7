"""Calls of bfloat16 on Hopper without a GPU: what is refused, and what launches follow from."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from mqa import validate
from mqa.cuda import operands, sm90
from mqa.cuda.dense import dense_addresses
from mqa.cuda.paged import paged_addresses
from mqa.cuda.plan import MAX_SHARED_BYTES, Barrier, Plan
from mqa.cuda.sm90 import SM90, SM90_ACCURATE
from mqa.cuda.sm90_paged import paged_tiles
from mqa.cuda.sm90_tiles import TILE_ROWS
from mqa.cuda.sm100 import SM100
from mqa.problem import parse
from mqa.testing import make_case

GPU = torch.device("cuda", 0)
DENSE = "dense bf16 S=9 N=40 H=64 D=128"
SIZES = "blocks=20 columns=3 L=99"
PAGED = f"paged bf16 B=3 next_n=2 H=64 D=128 P=64 {SIZES}"
SHAPES = [*itertools.product(operands.HEADS, operands.HEAD_DIMS)]


def reasons(line: str) -> list[str]:
    return [*SM90.problem_reasons(parse(line))]


def test_what_the_kernels_do_has_no_reason_against_it() -> None:
    for H, D in SHAPES:
        assert reasons(f"dense bf16 S=9 N=40 H={H} D={D} M=50") == []
        for P in operands.PAGE_SIZES:
            assert reasons(f"paged bf16 B=3 next_n=9 H={H} D={D} P={P} {SIZES}") == []
    for layout in ("kv_stride=136", "q_stride=9216x144", "w_stride=65 w_off=4"):
        assert reasons(f"{DENSE} {layout}") == []
    for layout in ("cache_stride=8200", "q_stride=16384x8192x128", "table_stride=7x2"):
        assert reasons(f"{PAGED} {layout}") == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (DENSE.replace("H=64", "H=24"), "H=24 is not one of 8, 16, 32, 64, 128"),
        (DENSE.replace("D=128", "D=96"), "D=96 is not one of 32, 64, 128"),
        (PAGED.replace("P=64", "P=4"), "P=4 is not one of 8, 16, 32, 64, 128, 256"),
        (f"{DENSE} q_off=8", "q is 8 bytes off a multiple of 16"),
        (f"{DENSE} kv_off=2", "kv is 2 bytes off a multiple of 16"),
        (f"{DENSE} kv_stride=132", "kv is not rows of 256 contiguous bytes at multiples of 16"),
        (f"{DENSE} kv_stride=64", "kv is not rows of 256 contiguous bytes at multiples of 16"),
        (f"{DENSE} q_stride=8196", "q is not rows of 256 contiguous bytes at multiples of 16"),
        (f"{PAGED} cache_stride=8196", "pages of cache overlap, or do not begin at multiples of"),
        (f"{PAGED} cache_stride=8184", "pages of cache overlap, or do not begin at multiples of"),
        (f"{PAGED} q_stride=32768x8192x128", "q has 32768 from one request to the next, expected"),
    ],
)
def test_each_thing_that_the_kernels_cannot_do_is_one_reason(line: str, words: str) -> None:
    (reason,) = reasons(line)
    assert reason.startswith(words)


@pytest.mark.parametrize("backend", [SM100, SM90_ACCURATE], ids=lambda backend: backend.name)
def test_backends_without_kernels_for_it_say_so(backend: Any) -> None:
    for line in (DENSE, PAGED, f"{PAGED} cache_stride=8200"):
        (reason,) = backend.problem_reasons(parse(line))
        assert reason.startswith("format=bf16 is not among its kernels, only fp8")


def plan_of(line: str) -> tuple[Any, Plan, dict[str, int]]:
    """A legal call on CPU tensors, its plan, and the addresses of the plan's tensors."""
    case = make_case(parse(line))
    out, kwargs = case.new_out(), case.kwargs | {"schedule_meta": None}
    if line.startswith("dense"):
        call: Any = validate.dense(
            *(kwargs[name] for name in ("q", "kv", "weights")),
            *(kwargs[f"cu_seq_len_k_{end}"] for end in ("start", "end")),
            *(kwargs[name] for name in ("clean_logits", "max_seqlen_k", "logits_dtype")),
            None,
            out,
        )
        plan = SM90.plan_dense(call, out)
        addresses = dense_addresses(call, out, plan)
    else:
        names = ("q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta")
        more = ("max_context_len", "clean_logits", "logits_dtype", "indices")
        call = validate.paged(*(kwargs[name] for name in names + more), out)
        plan = SM90.plan_paged(call, out)
        addresses = paged_addresses(call, out, plan)
    return call, plan, dict(zip(plan.tensors, addresses, strict=True))


def scalars(plan: Plan) -> dict[str, int]:
    return {scalar.name: scalar.value for scalar in plan.struct.scalars}


def barrier(plan: Plan, name: str) -> Barrier:
    return next(one for one in plan.barriers if one.name == name)


def test_a_dense_call_has_no_scales_and_keys_in_two_panels() -> None:
    call, plan, bound = plan_of(f"{DENSE} kv_stride=136 q_stride=9216x144")
    assert "kv_scale" not in bound
    assert (bound["q"], bound[""]) == (call.q.data_ptr(), 0)
    (k,) = plan.maps
    assert (k.shape, k.strides, k.box, k.swizzle) == ((256, 40), (272,), (128, 64), 128)
    values = scalars(plan)
    assert (values["q_row_stride"], values["q_head_stride"]) == (18432, 288)
    assert values["k_scale_stride"] == 0
    assert barrier(plan, "k_full") == Barrier("k_full", 1, 64 * 256)
    assert plan.kernel.name == "mqa::sm90::dense_converted"


@pytest.mark.parametrize(("D", "panel", "swizzle"), [(32, 64, 0), (64, 128, 128), (128, 128, 128)])
def test_a_paged_call_counts_values_alone(D: int, panel: int, swizzle: int) -> None:
    call, plan, bound = plan_of(f"{PAGED.replace('D=128', f'D={D}')} cache_stride=8200")
    assert (bound["cache"], bound["q"]) == (call.kv_cache.data_ptr(), call.q.data_ptr())
    (cache,) = plan.maps
    assert (cache.shape, cache.strides) == ((2 * D, 64, 20), (2 * D, 16400))
    assert (cache.box, cache.swizzle) == ((panel, 64, 1), swizzle)
    assert scalars(plan)["page_stride"] == 16400
    assert barrier(plan, "k_full") == Barrier("k_full", 1, 16384)


@pytest.mark.parametrize(("H", "D"), SHAPES)
def test_tiles_fit_into_shared_memory_and_stages_are_alike(H: int, D: int) -> None:
    groups = (paged_tiles(H, D, rows, "Bf16") for rows in range(1, 9))
    for tiles in (sm90.tiles(H, D, "Bf16"), *groups):
        assert tiles.shared_bytes <= MAX_SHARED_BYTES
        assert tiles.k_bytes == 16384
        assert tiles.stage_rows % TILE_ROWS == 0
        assert tiles.stages % 4 == 0


def test_the_covering_set_has_dense_and_paged_kernels_of_every_number_of_heads() -> None:
    chosen = [kernel for kernel in sm90.kernels() if "mqa::sm90::Bf16" in kernel.arguments]
    assert [int(kernel.arguments[1]) for kernel in chosen] == [*operands.HEADS]
    assert {kernel.name for kernel in chosen} == {
        f"mqa::sm90::{kind}_converted" for kind in ("dense", "paged")
    }
