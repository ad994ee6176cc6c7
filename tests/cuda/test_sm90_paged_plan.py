"""Paged calls of the Hopper backend without a GPU: what launches follow from, which kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from mqa import devices, validate
from mqa.cuda import driver, metadata, operands, paged, sm90, sm90_paged, sm90_tiles
from mqa.cuda.plan import MAX_SHARED_BYTES, Kernel, Plan, divisor
from mqa.cuda.sm90 import SM90
from mqa.problem import parse
from mqa.reference.schedule import GROUP
from mqa.testing import Case, make_case
from mqa.validate import PagedCall

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SIZES = "blocks=20 columns=3 L=99"
LINE = f"paged fp8 B=3 next_n=2 H=64 D=128 P=64 {SIZES}"
RUNS = f"paged fp8 B=5 next_n=1 H=64 D=128 P=64 {SIZES} varlen=1"
SHAPES = [*itertools.product(operands.HEADS, operands.HEAD_DIMS)]
ROWS = range(1, GROUP + 1)


def call_of(case: Case) -> tuple[PagedCall, torch.Tensor]:
    """The call of a case on CPU tensors, and its result."""
    out = case.new_out()
    schedule = case.stale_schedule() if case.problem.sms else None
    kwargs = case.kwargs | {"schedule_meta": schedule}
    names = ("q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta")
    more = ("max_context_len", "clean_logits", "logits_dtype", "indices")
    return validate.paged(*(kwargs[name] for name in names + more), out), out


def plan_of(line: str, sms: int = 132) -> tuple[PagedCall, Plan]:
    """The call of a problem, and what a launch of it would be."""
    call, out = call_of(make_case(parse(line)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "_num_sms", {CPU: sms})
        facts = paged.paged_facts(call, out)
    plan = sm90_paged.paged_plan(facts)
    assert sm90_paged.paged_plan(facts) is plan
    assert len(paged.paged_addresses(call, out, plan)) == len(plan.tensors)
    return call, plan


def scalars(plan: Plan) -> dict[str, float]:
    return {scalar.name: scalar.value for scalar in plan.struct.scalars}


def divided(name: str, value: int) -> dict[str, float]:
    """What stands in a struct for a number that the kernel divides by."""
    return {scalar.name: scalar.value for scalar in divisor(name, value)}


def test_a_plain_call_becomes_a_plan() -> None:
    _, plan = plan_of(LINE)
    tiles = sm90_paged.paged_tiles(64, 128, 2)
    assert (plan.grid, plan.threads) == (132, sm90.THREADS)
    assert plan.kernel == sm90_paged.paged_kernel(tiles, "float32")
    assert plan.shared_bytes == tiles.shared_bytes
    q, cache = plan.maps
    assert (q.shape, q.strides, q.swizzle) == ((128, 64, 6), (128, 64 * 128), 128)
    assert q.box == (128, 64, 1)
    assert (cache.shape, cache.strides) == ((128, 64, 20), (128, 64 * 132))
    assert (cache.box, cache.swizzle) == ((128, 64, 1), 128)
    assert plan.tensors == ("q", "cache", "cache", "w", "lens", "table", "", "", "out")
    assert scalars(plan) == {
        "q": 0,
        "q_scale": 0,
        "page_stride": 64 * 132,
        "q_row_stride": 64 * 128,
        "q_head_stride": 128,
        "q_dim_stride": 1,
        "q_request_stride": 2 * 64 * 128,
        "q_scale_row_stride": 0,
        "q_scale_head_stride": 0,
        "q_scale_request_stride": 0,
        "weights_row_stride": 64,
        "weights_head_stride": 1,
        "lens_request_stride": 2,
        "lens_row_stride": 1,
        "table_row_stride": 3,
        "table_column_stride": 1,
        "indices_stride": 0,
        "schedule_row_stride": 0,
        "schedule_column_stride": 0,
        "logits_stride": 99,
        "rows": 6,
        "requests": 3,
        **divided("next_n", 2),
        **divided("groups_of_request", 1),
        **divided("table_lines", 1),
        "limit": 99,
        "pages": 20,
        "page_shift": 6,
        **divided("page", 64),
        "heads": 64,
        "width": 99,
        "groups_of_part": 3 / 132,
        "last_only": 0,
        "weights_are_bf16": 0,
        "clean": 0,
    }


def test_a_converted_call_reads_q_and_its_scales_itself() -> None:
    for fmt, stored, elements in (("mxfp8", 128, "Mxfp8"), ("mxfp4", 64, "Mxfp4")):
        case = make_case(parse(LINE.replace("fp8", fmt)))
        kwargs, out = case.kwargs, case.new_out()
        names = ("q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta")
        more = ("max_context_len", "clean_logits", "logits_dtype", "indices")
        call = validate.paged(*(kwargs.get(name) for name in names + more), out)
        facts = paged.paged_facts(call, out, elements)
        plan = sm90_paged.paged_plan(facts)
        (cache,) = plan.maps
        assert cache.shape == (stored, 64, 20)
        assert cache.swizzle == (128 if stored == 128 else 0)
        tensors = ("cache", "cache", "w", "lens", "table", "", "", "out", "q", "q_scale")
        assert plan.tensors == tensors
        bound = dict(zip(plan.tensors, paged.paged_addresses(call, out, plan), strict=True))
        assert call.q_scale is not None
        assert (bound["q"], bound["q_scale"]) == (call.q.data_ptr(), call.q_scale.data_ptr())
        values = scalars(plan)
        assert (values["q_row_stride"], values["q_head_stride"]) == (64 * stored, stored)
        assert (values["q_scale_row_stride"], values["q_scale_head_stride"]) == (64, 1)
        assert plan.kernel.name == "mqa::sm90::paged_converted"


def test_strides_and_flags_of_a_call_reach_the_plan() -> None:
    layout = "cache_stride=9216 w_stride=70x1 lens_stride=7x3 table_stride=50x4 out_stride=177"
    _, plan = plan_of(f"{LINE} {layout} clean=1 weights=bfloat16 out=float16")
    assert plan.maps[1].strides == (128, 9216)
    assert plan.kernel.arguments[2] == "__half"
    expected = {
        "page_stride": 9216,
        "weights_row_stride": 70,
        "lens_request_stride": 7,
        "lens_row_stride": 3,
        "table_row_stride": 50,
        "table_column_stride": 4,
        "logits_stride": 177,
        "weights_are_bf16": 1,
        "clean": 1,
    }
    values = scalars(plan)
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("line", "row_stride"),
    [
        ("paged fp8 B=3 next_n=2 q_stride=40960x20480", 20480),
        ("paged fp8 B=3 next_n=1 q_stride=20480", 20480),
        ("paged fp8 B=1 next_n=4 q_stride=90000x20480", 20480),
        ("paged fp8 B=1 next_n=1 q_stride=90000x90000", 64 * 128),
    ],
)
def test_rows_of_q_are_those_of_requests_one_after_another(line: str, row_stride: int) -> None:
    _, plan = plan_of(f"{line} H=64 D=128 P=64 {SIZES}")
    assert plan.maps[0].strides == (128, row_stride)


def test_lens_of_rank_one_are_those_of_last_rows() -> None:
    _, plan = plan_of(f"{LINE} lens_rank=1 lens_stride=3")
    values = scalars(plan)
    assert (values["last_only"], values["next_n.value"]) == (1, 2)
    assert (values["lens_request_stride"], values["lens_row_stride"]) == (3, 0)


def test_varlen_calls_have_indices_and_room_for_whole_groups() -> None:
    for line in (RUNS, f"{RUNS} lens_rank=1"):
        _, plan = plan_of(f"{line} indices_stride=3")
        assert "indices" in plan.tensors
        assert scalars(plan)["indices_stride"] == 3
        tiles = sm90_paged.paged_tiles(64, 128, GROUP)
        assert plan.kernel == sm90_paged.paged_kernel(tiles, "float32")


@pytest.mark.parametrize("next_n", [1, 2, 3, 7, 8, 9, 20])
def test_the_kernel_is_one_for_groups_of_the_calls_rows(next_n: int) -> None:
    _, plan = plan_of(LINE.replace("next_n=2", f"next_n={next_n}"))
    tiles = sm90_paged.paged_tiles(64, 128, min(next_n, GROUP))
    assert plan.kernel == sm90_paged.paged_kernel(tiles, "float32")


def test_a_schedule_sets_the_number_of_ctas() -> None:
    call, plan = plan_of(f"{LINE} sms=7")
    assert plan.grid == 7
    assert "schedule" in plan.tensors
    assert call.schedule is not None
    assert scalars(plan)["schedule_row_stride"] == call.schedule.stride(0)
    assert scalars(plan)["schedule_column_stride"] == call.schedule.stride(1)


@pytest.mark.parametrize(
    ("columns", "L", "limit"),
    [(3, 99, 99), (3, 500, 192), (1, 64, 64), (0, 9, 0), (2**26, 2**31 - 1, 2**31 - 1)],
)
def test_lens_are_limited_by_the_result_and_by_the_table(columns: int, L: int, limit: int) -> None:
    sizes = {"columns": columns, "width": L}
    call, out = call_of(make_case(parse(LINE)))
    facts = paged.paged_facts(call, out)
    fields = {name: getattr(facts, name) for name in facts.__slots__} | sizes
    assert scalars(sm90_paged.paged_plan(paged.PagedFacts(**fields)))["limit"] == limit


@pytest.mark.parametrize("blocks", [0, 1])
def test_few_pages_have_a_legal_map(blocks: int, launched: Any) -> None:
    call, plan = plan_of(LINE.replace("blocks=20", f"blocks={blocks}").replace("L=99", "L=9"))
    assert (plan.maps[1].shape, plan.maps[1].strides) == ((128, 64, 1), (128, 64 * 132))
    assert scalars(plan)["pages"] == blocks
    SM90.paged(call, torch.empty(6, 9))
    cache = call.kv_cache.data_ptr() if blocks else call.q.data_ptr()
    assert [at for name, at in launched[0] if name == "cache"] == [cache, cache]


@pytest.mark.parametrize(("H", "D"), SHAPES)
def test_tiles_hold_a_group_and_fit_into_shared_memory_and_boxes(H: int, D: int) -> None:
    for rows, P in itertools.product(ROWS, operands.PAGE_SIZES):
        tiles = sm90_paged.paged_tiles(H, D, rows)
        assert tiles.shared_bytes <= MAX_SHARED_BYTES
        assert tiles.columns in (64, 128, 256, 512)
        # Where stages are taken in turn, a place of the ring is always the same warpgroups'.
        assert tiles.stages % (4 // tiles.sets) == 0
        assert tiles.block * H == tiles.columns
        assert tiles.block >= rows or tiles.columns == sm90.OWN_COLUMNS
        assert tiles.stage_rows % sm90_tiles.TILE_ROWS == 0
        facts = f"next_n={rows} H={H} D={D} P={P} blocks=9 columns=2 L=5"
        _, plan = plan_of(f"paged fp8 B=1 {facts}")
        assert plan.kernel.arguments[-1] == str(plan.shared_bytes)
        assert tiles.stage_rows % plan.maps[1].box[1] == 0
        assert P % plan.maps[1].box[1] == 0


@pytest.mark.parametrize(("H", "D"), SHAPES)
def test_a_warmup_loads_all_that_a_call_of_the_configuration_can_reach(
    monkeypatch: pytest.MonkeyPatch, H: int, D: int
) -> None:
    loaded: dict[Kernel, int] = {}
    monkeypatch.setattr(driver, "load", lambda kernel, _, size: loaded.update({kernel: size}))
    facts = f"H={H} D={D} P=64 {SIZES} out=bfloat16"
    names = SM90.warmup(parse(f"paged fp8 B=1 next_n=1 {facts}"), GPU)
    assert [*map(str, loaded)] == [*names]
    calls = [f"B=1 next_n={n}" for n in (*ROWS, 9, 20)] + ["B=5 next_n=1 varlen=1"]
    plans = [plan_of(f"paged fp8 {call} {facts}")[1] for call in calls]
    reached = {plan.kernel: plan.shared_bytes for plan in plans}
    assert loaded == reached | {metadata.METADATA[1]: 0}
    assert str(metadata.METADATA[1]) == "mqa::score::metadata<mqa::score::PagedMetadata>"
    assert reached.keys() <= {*sm90.kernels(every=True)}


def test_launches_bind_each_tensor_to_its_address(launched: Any) -> None:
    for line in (LINE, f"{LINE} sms=7 clean=1", RUNS):
        call, out = call_of(make_case(parse(line)))
        SM90.paged(call, out)
        wanted = [
            ("q", call.q),
            ("cache", call.kv_cache),
            ("cache", call.kv_cache),
            ("w", call.weights),
            ("lens", call.context_lens),
            ("table", call.block_table),
            ("indices", call.indices),
            ("schedule", call.schedule),
            ("out", out),
        ]
        expected = [("", 0) if t is None else (name, t.data_ptr()) for name, t in wanted]
        assert launched.pop() == expected


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [((9, 4), (5, 1), (9, 4, 5, 1)), ((9,), (2,), (9, 1, 2, 0)), ((9, 1), (2, 7), (9, 1, 2, 7))],
)
def test_metadata_is_one_launch_of_one_cluster(
    monkeypatch: pytest.MonkeyPatch, shape: Any, strides: Any, expected: tuple[int, ...]
) -> None:
    plans: list[Plan] = []
    made = metadata.paged_metadata_plan
    keep = lambda *facts: plans.append(made(*facts)) or plans[-1]  # noqa: E731
    monkeypatch.setattr(metadata, "paged_metadata_plan", keep)
    monkeypatch.setattr(driver, "launcher", lambda plan, _: SimpleLaunch())
    lens = torch.zeros(99, dtype=torch.int32).as_strided(shape, strides)
    SM90.paged_metadata(lens, None, torch.zeros(133, 3, dtype=torch.int32)[:, :2])
    (plan,) = plans
    assert plan.kernel == metadata.METADATA[1]
    assert (plan.grid, plan.threads) == (metadata.CTAS, metadata.THREADS)
    assert plan.shared_bytes == 0
    requests, next_n, *lens_strides = expected
    assert scalars(plan) == {
        "lens_request_stride": lens_strides[0],
        "lens_row_stride": lens_strides[1],
        "indices_stride": 0,
        "cuts_stride": 3,
        "requests": requests,
        **divided("next_n", next_n),
        **divided("groups_of_request", -(-next_n // GROUP)),
        "parts": 132,
    }


class SimpleLaunch:
    def launch(self, addresses: tuple[int, ...]) -> None:
        assert addresses[1] == 0, "there are no indices"


def test_schedules_bind_lens_indices_and_cuts(launched: Any) -> None:
    lens, indices, out = (torch.zeros(9, 2, dtype=torch.int32) for _ in range(3))
    SM90.paged_metadata(lens[:, 1], indices[:, 0], out)
    SM90.paged_metadata(lens, None, out)
    at = lens.data_ptr()
    cuts = ("out", out.data_ptr())
    assert launched == [
        [("lens", at + 4), ("indices", indices.data_ptr()), cuts],
        [("lens", at), ("", 0), cuts],
    ]
