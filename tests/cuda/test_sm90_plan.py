"""The Hopper backend without a GPU: what it refuses, what launches follow from, which kernels."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from mqa import devices, validate
from mqa.cuda import compiler, dense, driver, metadata, operands, sm90, sm90_tiles, variants
from mqa.cuda.plan import MAX_SHARED_BYTES, Kernel
from mqa.cuda.sm90 import SM90, SM90_ACCURATE
from mqa.cuda.sm90_paged import paged_tiles
from mqa.problem import LOGITS_DTYPES, parse
from mqa.testing import make_case

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LINE = "dense fp8 S=9 N=40 H=64 D=128"
SHAPES = [*itertools.product(operands.HEADS, operands.HEAD_DIMS)]


def reasons(line: str, device: torch.device = GPU) -> list[str]:
    return [*SM90.reasons_against(parse(line), device)]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("facts", ["", "M=50 clean=0", "out=float16 weights=bfloat16 sms=7"])
def test_what_the_kernels_do_has_no_reason_against_it(facts: str) -> None:
    for H, D in SHAPES:
        assert reasons(f"dense fp8 S=9 N=40 H={H} D={D} {facts}") == []
    for layout in (
        "kv_stride=144",
        "w_stride=65x1 w_off=4",
        "kv_scale_off=4",
        "kv_scale_stride=2",
        "start_stride=2 end_stride=0",
        "out_stride=41 out_off=4",
    ):
        assert reasons(f"{LINE} {layout} {facts}") == []


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("dense fp8 S=9 N=40 H=24 D=128", "H=24 is not one of 8, 16, 32, 64, 128"),
        ("dense fp8 S=9 N=40 H=64 D=96", "D=96 is not one of 32, 64, 128"),
        ("dense mxfp8 S=9 N=40 H=64 D=32", "D=32 is not one of 64, 128"),
        ("dense mxfp4 S=9 N=40 H=64 D=96", "D=96 is not one of 64, 128"),
        (f"{LINE} q_off=8", "q is 8 bytes off a multiple of 16"),
        (f"{LINE} kv_off=1", "kv is 1 bytes off a multiple of 16"),
        (f"{LINE} q_stride=8200", "q is not rows of 128 contiguous bytes at multiples of 16"),
        (f"{LINE} kv_stride=136", "kv is not rows of 128 contiguous bytes at multiples of 16"),
        (f"{LINE} kv_stride=64", "kv is not rows of 128 contiguous bytes at multiples of 16"),
        (f"{LINE} kv_stride=256x2", "kv is not rows of 128 contiguous bytes at multiples of 16"),
    ],
)
def test_each_thing_that_the_kernels_cannot_do_is_one_reason(line: str, words: str) -> None:
    (reason,) = reasons(line)
    assert reason.startswith(words)


@pytest.mark.usefixtures("hopper")
def test_the_accurate_backend_takes_fp8_alone_and_only_by_name() -> None:
    assert not SM90_ACCURATE.by_default
    for H, D in SHAPES:
        problem = parse(f"dense fp8 S=9 N=40 H={H} D={D}")
        assert [*SM90_ACCURATE.reasons_against(problem, GPU)] == []
    for fmt in ("mxfp8", "mxfp4"):
        problem = parse(f"dense {fmt} S=9 N=40 H=64 D=128")
        assert [*SM90.reasons_against(problem, GPU)] == []
        (reason,) = SM90_ACCURATE.reasons_against(problem, GPU)
        assert reason == f"format={fmt} is not among its kernels, only fp8"


@pytest.mark.usefixtures("hopper")
def test_all_reasons_are_told_at_once() -> None:
    assert len(reasons("dense mxfp8 S=9 N=40 H=24 D=96 q_off=8 kv_off=4 q_stride=9999")) == 5


def test_devices_that_are_no_hopper_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons(LINE, CPU) == ["needs a CUDA device of compute capability 9.0, this is cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reasons(LINE) == ["needs a CUDA device of compute capability 9.0; torch finds none here"]
    assert "torch finds no CUDA device" in str(SM90.unusable_here())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for capability in ((8, 0), (8, 9), (9, 1), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        words = f"needs compute capability 9.0, cuda:0 has {capability[0]}.{capability[1]}"
        assert reasons(LINE) == [words]
        assert SM90.unusable_here() == words
        assert not SM90.schedules_on(GPU)
    assert not SM90.schedules_on(CPU)


@pytest.mark.usefixtures("hopper")
def test_what_launches_need_is_a_reason_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert SM90.unusable_here() is None
    assert SM90.schedules_on(GPU)
    monkeypatch.setattr(driver, "unavailable", lambda: "no driver: install one")
    assert reasons(LINE) == ["no driver: install one"]
    assert SM90.unusable_here() == "no driver: install one"
    assert not SM90.schedules_on(GPU)


def facts_and_plan(line: str, sms: int = 132) -> tuple[Any, dense.DenseFacts, Any]:
    """A legal call of the problem on CPU tensors, and what a launch of it would be."""
    case = make_case(parse(line))
    out = case.new_out()
    schedule = case.stale_schedule() if case.problem.sms else None
    kwargs = case.kwargs | {"schedule_meta": schedule}
    names = ("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end", "clean_logits")
    more = ("max_seqlen_k", "logits_dtype", "schedule_meta")
    call = validate.dense(*(kwargs[name] for name in names + more), out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "_num_sms", {CPU: sms})
        facts = dense.dense_facts(call, out)
    plan = sm90.dense_plan(facts)
    assert dense.dense_addresses(call, out, plan)[-1] == out.data_ptr()
    return call, facts, plan


def scalars(plan: Any) -> dict[str, int]:
    return {scalar.name: scalar.value for scalar in plan.struct.scalars}


def test_a_plain_call_becomes_a_plan() -> None:
    _, facts, plan = facts_and_plan(LINE)
    assert (plan.grid, plan.threads) == (132, sm90.THREADS)
    assert plan.kernel == sm90.dense_kernel(sm90.tiles(64, 128), "float32")
    assert plan.shared_bytes == sm90.tiles(64, 128).shared_bytes
    q, k = plan.maps
    assert (q.shape, q.strides, q.swizzle) == ((128, 64, 9), (128, 64 * 128), 128)
    assert (k.shape, k.strides, k.swizzle) == ((128, 40), (128,), 128)
    values = scalars(plan)
    assert (values["rows"], values["tokens"], values["width"]) == (9, 40, 40)
    assert (values["clean"], values["compressed"], values["weights_are_bf16"]) == (1, 0, 0)
    assert "schedule" not in plan.tensors
    assert sm90.dense_plan(facts) is plan


def test_strides_and_flags_of_a_call_reach_the_plan() -> None:
    layout = "kv_stride=144 kv_scale_stride=3 w_stride=70x1 start_stride=2 end_stride=0"
    options = "M=50 clean=0 weights=bfloat16 out=float16 out_stride=77"
    _, _, plan = facts_and_plan(f"{LINE} {layout} {options}")
    assert plan.maps[1].strides == (144,)
    assert plan.kernel.arguments[2] == "__half"
    expected = {
        "k_scale_stride": 3,
        "weights_row_stride": 70,
        "weights_head_stride": 1,
        "start_stride": 2,
        "end_stride": 0,
        "logits_stride": 77,
        "width": 50,
        "weights_are_bf16": 1,
        "compressed": 1,
        "clean": 0,
    }
    values = scalars(plan)
    assert {name: values[name] for name in expected} == expected


def test_a_schedule_sets_the_number_of_ctas() -> None:
    call, _, plan = facts_and_plan(f"{LINE} sms=7")
    assert plan.grid == 7
    assert "schedule" in plan.tensors
    assert scalars(plan)["schedule_row_stride"] == call.schedule.stride(0)
    assert scalars(plan)["schedule_column_stride"] == call.schedule.stride(1)


@pytest.mark.parametrize("N", [0, 1])
def test_few_tokens_have_a_legal_map(N: int) -> None:
    _, _, plan = facts_and_plan(f"dense fp8 S=9 N={N} H=64 D=128 M=8")
    assert (plan.maps[1].shape, plan.maps[1].strides) == ((128, 1), (128,))
    assert scalars(plan)["tokens"] == N


def test_without_tokens_nothing_is_prepared_and_every_address_is_one(launched: Any) -> None:
    call, _, _ = facts_and_plan("dense fp8 S=9 N=0 H=64 D=128 M=8")
    assert SM90.dense(call, torch.empty(9, 8)) is None
    assert dict(launched[0])["kv"] == call.q.data_ptr()


@pytest.mark.parametrize(("H", "D"), SHAPES)
def test_tiles_fit_into_shared_memory_and_maps_into_boxes(H: int, D: int) -> None:
    tiles = sm90.tiles(H, D)
    assert tiles.shared_bytes <= MAX_SHARED_BYTES
    assert tiles.block * H == sm90.OWN_COLUMNS
    assert tiles.stage_rows % sm90_tiles.TILE_ROWS == 0
    for logits in LOGITS_DTYPES:
        _, _, plan = facts_and_plan(f"dense fp8 S=9 N=40 H={H} D={D} out={logits}")
        assert plan.kernel.arguments[-1] == str(plan.shared_bytes)


def test_shared_bytes_are_those_of_the_kernels_storage(tmp_path: Path) -> None:
    every = {
        tiles
        for elements, (H, D), rows in itertools.product(sm90.ACCUMULATORS, SHAPES, range(1, 9))
        for tiles in (sm90.tiles(H, D, elements), paged_tiles(H, D, rows, elements))
        if D > 32 or not elements.startswith("Mx")
    }
    assert {tiles.columns for tiles in every} == {64, 128, 256, 512}
    lines = []
    for t in every:
        sizes = f"{t.elements}, {t.heads}, {t.dim}, float, {t.stages}, {t.stage_rows}, {t.columns}"
        size = f"sizeof(Tiling<{sizes}>::Storage)"
        lines.append(f'static_assert({size} == {t.shared_bytes}, "{sizes}");')
    source = tmp_path / "bytes.cuh"
    body = "\n".join(["namespace mqa::sm90 {", *lines, "__global__ void bytes() {}", "}\n"])
    source.write_text(f'#include "sm90/score/storage.cuh"\n{body}')
    compiler.compile_kernel(Kernel(str(source), "mqa::sm90::bytes"), "sm_90a")


def choices(kernels: tuple[Kernel, ...], name: str) -> set[tuple[int, int, str]]:
    scoring = (kernel.arguments for kernel in kernels if kernel.name.endswith(name))
    return {(int(heads), int(dim), logits) for heads, dim, logits, *_ in scoring}


@pytest.mark.parametrize("name", ["dense_fp8", "paged_fp8"])
def test_the_kernels_to_compile_cover_every_pair_of_choices(name: str) -> None:
    every, some = choices(sm90.kernels(every=True), name), choices(sm90.kernels(), name)
    cxx = {operands.CXX[name] for name in LOGITS_DTYPES}
    assert every == {(*shape, logits) for shape in SHAPES for logits in cxx}
    assert some < every
    for first, second in itertools.combinations(range(3), 2):
        pairs = [{(choice[first], choice[second]) for choice in set_} for set_ in (every, some)]
        assert pairs[0] == pairs[1]


def test_the_kernels_to_compile_are_few_and_each_is_there_once() -> None:
    assert len(sm90.kernels()) <= 60
    for kernels in (sm90.kernels(), sm90.kernels(every=True)):
        assert set(metadata.METADATA) < set(kernels)
        assert len(set(kernels)) == len(kernels)
    assert variants.kernels("sm_90a", every=True) == sm90.kernels(every=True)


def test_a_warmup_loads_the_kernels_of_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, int]] = []
    load = lambda kernel, _, size: loaded.append((str(kernel), size))  # noqa: E731
    monkeypatch.setattr(driver, "load", load)
    names = SM90.warmup(parse("dense fp8 S=1 N=1 H=32 D=64 out=bfloat16"), GPU)
    assert [name for name, _ in loaded] == [*names]
    scoring, schedules = loaded
    assert scoring[0].startswith("mqa::sm90::dense_fp8<32, 64, __nv_bfloat16, ")
    assert scoring[1] == sm90.tiles(32, 64).shared_bytes
    assert schedules == ("mqa::score::metadata<mqa::score::DenseMetadata>", 0)


def test_dense_metadata_is_one_launch_of_one_cluster() -> None:
    plan = metadata.dense_metadata_plan(9, 4096, 8, 132, 1, 2, 3)
    assert plan.kernel == metadata.METADATA[0]
    assert (plan.grid, plan.threads) == (metadata.CTAS, metadata.THREADS)
    assert plan.shared_bytes == 0
    assert scalars(plan) == {
        "start_stride": 1,
        "end_stride": 2,
        "cuts_stride": 3,
        "rows": 9,
        "tokens": 4096,
        "block": 8,
        "parts": 132,
    }


def test_launches_bind_each_tensor_to_its_address(launched: Any) -> None:
    for line in (LINE, f"{LINE} sms=7"):
        call, _, _ = facts_and_plan(line)
        out = torch.empty(9, 40)
        again = SM90.dense(call, out)
        assert again is not None
        again(dense.dense_addresses(call, out, SM90.plan_dense(call, out)))
        wanted = {
            "q": call.q.data_ptr(),
            "kv": call.k.data_ptr(),
            "kv_scale": call.kv_scale.data_ptr(),
            "w": call.weights.data_ptr(),
            "start": call.start.data_ptr(),
            "end": call.end.data_ptr(),
            "out": out.data_ptr(),
        }
        schedule = call.schedule
        wanted |= {"": 0} if schedule is None else {"schedule": schedule.data_ptr()}
        assert [dict(seen) for seen in launched] == [wanted, wanted]
        launched.clear()


def test_schedules_bind_windows_and_cuts(launched: Any) -> None:
    start, end, out = (torch.zeros(9, 2, dtype=torch.int32) for _ in range(3))
    SM90.dense_metadata(start[:, 0], end[:, 1], 40, 64, out)
    (seen,) = launched
    at_end = end.data_ptr() + 4
    assert dict(seen) == {"start": start.data_ptr(), "end": at_end, "out": out.data_ptr()}
