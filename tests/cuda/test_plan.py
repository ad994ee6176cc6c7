"""Plans agree with the kernels: argument structs byte for byte, barriers role by role."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqa.cuda import compiler, dense, metadata, paged, sm90, sm90_paged, sm90_tiles, storage
from mqa.cuda.plan import WARP, Barrier, Kernel, Plan, Scalar, Struct, divisor
from mqa.cuda.tensor_map import TensorMap
from mqa.formats.kv_cache import SCALE_BYTES
from mqa.reference import schedule

FACTS = dense.DenseFacts(
    rows=9,
    tokens=40,
    width=41,
    heads=64,
    dim=128,
    logits="float32",
    bf16_weights=False,
    compressed=True,
    clean=True,
    parts=132,
    scheduled=True,
    q_strides=(128, 8192),
    k_stride=144,
    k_scale_stride=3,
    weights_strides=(65, 1),
    schedule_strides=(2, 1),
    start_stride=5,
    end_stride=6,
    logits_stride=256,
)
PAGED_FACTS = paged.PagedFacts(
    requests=9,
    next_n=1,
    heads=64,
    dim=128,
    page_rows=64,
    pages=40,
    columns=5,
    width=300,
    logits="float32",
    bf16_weights=False,
    clean=True,
    last_only=False,
    varlen=True,
    parts=132,
    scheduled=True,
    q_strides=(128, 8192),
    page_stride=9216,
    weights_strides=(65, 1),
    lens_strides=(3, 1),
    table_strides=(7, 1),
    indices_stride=2,
    schedule_strides=(2, 1),
    logits_stride=512,
)
DENSE, PAGED = sm90.dense_plan(FACTS), sm90_paged.paged_plan(PAGED_FACTS)
CONVERTED = (
    sm90.dense_plan(dataclasses.replace(FACTS, elements="Mxfp8")),
    sm90_paged.paged_plan(dataclasses.replace(PAGED_FACTS, elements="Mxfp4")),
)
DENSE_METADATA = metadata.dense_metadata_plan(9, 40, 8, 132, 5, 6, 2)
PAGED_METADATA = metadata.paged_metadata_plan(9, 1, 132, (3, 1), 2, 4)
FIELDS = {"kv_scale": "k_scale", "w": "weights", "out": "logits"}
"""Names of tensors that the kernel's struct calls otherwise."""
TYPES = {"q": "int64_t", "i": "int32_t", "I": "uint32_t", "f": "float", "?": "bool"}
SIZES = {"q": 8, "p": 8, "i": 4, "I": 4, "f": 4, "?": 1}


def assertions(name: str, layout: Struct, fields: dict[str, str]) -> Iterator[str]:
    """C++ that compiles if struct `name` lies in memory as `layout` says."""
    yield f"static_assert(sizeof({name}) == {layout.layout.size}, {name!r});".replace("'", '"')
    at = 0
    for tensor in layout.pointers:
        field = fields.get(tensor, tensor)
        yield f'static_assert(OFFSET({name}, {field}) == {at}, "{field}");'
        yield f'static_assert(sizeof({name}::{field}) == 8, "{field}");'
        at += 8
    for scalar in layout.scalars:
        field, member = scalar.name, f"decltype({name}::{scalar.name})"
        yield f'static_assert(OFFSET({name}, {field}) == {at}, "{field}");'
        if scalar.code == "p":
            yield f'static_assert(cuda::std::is_pointer_v<{member}>, "{field}");'
        else:
            same = f"cuda::std::is_same_v<{member}, {TYPES[scalar.code]}>"
            yield f'static_assert({same}, "{field}");'
        at += SIZES[scalar.code]


def compiles(tmp_path: Path, *lines: str) -> None:
    """Raise CompileError unless these lines compile behind the kernels' headers."""
    source = tmp_path / "agrees.cuh"
    names = ("sm90/dense_fp8", "sm90/paged_fp8", "score/metadata")
    sources = (f'"{name}.cuh"' for name in names)
    head = [f"#include {name}" for name in ("<cuda/std/type_traits>", *sources)]
    # How the front end of NVRTC spells offsetof, whose macro is no constant there.
    head.append("#define OFFSET(type, field) __INTADDR__(&(((type*)0)->field))")
    body = ["namespace mqa::sm90 {", *lines, "__global__ void agrees() {}", "}"]
    source.write_text("\n".join([*head, *body, ""]))
    compiler.compile_kernel(Kernel(str(source), "mqa::sm90::agrees"), "sm_90a")


def test_argument_structs_are_those_of_the_kernels(tmp_path: Path) -> None:
    compiles(
        tmp_path,
        *assertions("DenseArguments", DENSE.struct, FIELDS),
        *assertions("PagedArguments", PAGED.struct, FIELDS),
        *assertions("DenseArguments", CONVERTED[0].struct, FIELDS | {"": "k"}),
        *assertions("PagedArguments", CONVERTED[1].struct, FIELDS),
        *assertions("DenseMetadata", DENSE_METADATA.struct, {"out": "cuts"}),
        *assertions("PagedMetadata", PAGED_METADATA.struct, {"out": "cuts"}),
    )


@pytest.mark.parametrize(
    ("name", "plan", "fields"),
    [
        ("DenseArguments", DENSE, FIELDS),
        ("PagedArguments", PAGED, FIELDS),
        ("DenseMetadata", DENSE_METADATA, {"out": "cuts"}),
        ("PagedMetadata", PAGED_METADATA, {"out": "cuts"}),
    ],
)
def test_a_struct_that_disagrees_does_not_compile(
    tmp_path: Path, name: str, plan: Plan, fields: dict[str, str]
) -> None:
    first, second, *rest = plan.struct.scalars
    swapped = Struct(plan.struct.pointers, (second, first, *rest))
    with pytest.raises(compiler.CompileError, match="static assertion failed"):
        compiles(tmp_path, *assertions(name, swapped, fields))


def test_constants_are_those_of_the_kernels(tmp_path: Path) -> None:
    equal = {
        "kThreads": sm90.THREADS,
        "kMathWarps": storage.MATH_WARPS,
        "kFeedingWarps": storage.FEEDING_WARPS,
        "kTileRows": sm90_tiles.TILE_ROWS,
        "sizeof(FillStorage)": storage.FILL_BYTES,
        "128 * kMathGroups": sm90.OWN_COLUMNS,
        "kMetadataThreads": metadata.THREADS,
        "kMetadataCtas": metadata.CTAS,
        "kGroupRows": schedule.GROUP,
        "kScheduleSplit": schedule.SPLIT,
        "kWarpSize": WARP,
    }
    lines = (f'static_assert({name} == {value}, "{name}");' for name, value in equal.items())
    compiles(tmp_path, *lines)


def test_a_struct_is_pointers_then_scalars_without_gaps_and_padded_to_8_bytes() -> None:
    scalars = (Scalar("a", "q", -1), Scalar("b", "i", 2), Scalar("c", "?", 1))
    layout = Struct(("x", ""), scalars).layout
    assert layout.size == 2 * 8 + 8 + 4 + 4
    words = ("0100000000000000", "0200000000000000", "ffffffffffffffff", "03000000", "01000000")
    assert layout.pack(1, 2, -1, 3, True).hex() == "".join(words)


INT32 = st.integers(1, 2**31 - 1)


@given(value=INT32 | st.sampled_from([1, 2, 3, 2**30 + 1, 2**31 - 1]), quotient=INT32, rest=INT32)
def test_a_divisor_divides_every_number_below_2_to_the_31(
    value: int, quotient: int, rest: int
) -> None:
    _, multiplier, shift = (scalar.value for scalar in divisor("next_n", value))
    assert 0 < multiplier < 2**32
    assert 0 <= shift < 64
    multiple = quotient % (2**31 // value + 1) * value
    for n in (0, multiple - 1, multiple, multiple + rest % value, rest, 2**31 - 1):
        if 0 <= n < 2**31:
            assert n * int(multiplier) >> int(shift) == n // value


def test_tensors_are_those_of_maps_then_of_the_struct() -> None:
    maps = tuple(TensorMap(name, "UINT8", 1, (32,), (), (32,)) for name in ("q", "k"))
    plan = Plan(Kernel("k.cuh", "k"), 1, 32, 0, maps, Struct(("w", "", "out"), ()))
    assert plan.tensors == ("q", "k", "w", "", "out")
    assert DENSE.tensors[:2] == ("q", "kv")
    assert set(DENSE.tensors[2:]) == {"kv_scale", "w", "start", "end", "schedule", "out"}
    # The cache by its map for values, by its address for scales.
    assert PAGED.tensors[:3] == ("q", "cache", "cache")
    assert set(PAGED.tensors[3:]) == {"w", "lens", "table", "indices", "schedule", "out"}
    assert DENSE_METADATA.tensors == ("start", "end", "out")
    assert PAGED_METADATA.tensors == ("lens", "indices", "out")


def test_a_kernel_is_named_as_cxx_spells_it() -> None:
    assert str(Kernel("k.cuh", "a::k", ("64", "float"))) == "a::k<64, float>"
    assert str(Kernel("k.cuh", "a::k")) == "a::k"


def arrivals_of_roles() -> dict[str, set[int]]:
    """Who arrives how often at each barrier of the dense kernel, added up from its roles."""
    expect_tx, rows_lane, weights_warp, math_lanes = 1, 1, WARP, storage.MATH_WARPS
    return {
        "q_full": {expect_tx + rows_lane + weights_warp},
        "q_empty": {math_lanes},
        # Scales at any address or stride come by the load warp's cp.async, others in bulk.
        "k_full": {expect_tx, expect_tx + WARP},
        "k_empty": {math_lanes},
        # The warp that finds the range, and the one that initialises the other barriers.
        "range_known": {2},
        "loading": {1},
    }


def table_of_the_kernel() -> dict[str, set[int]]:
    """The arrivals in the table of barriers at the top of the kernel's source."""
    source = (compiler.sources() / DENSE.kernel.source).read_text()
    rows = re.findall(
        r"^//   ([qk]_\w+|range_known|loading) .*?((?:\d+ or )?\d+)   \w+", source, re.MULTILINE
    )
    return {name: {int(n) for n in numbers.split(" or ")} for name, numbers in rows}


def test_barriers_count_what_the_roles_of_the_kernel_do() -> None:
    tiles = sm90.tiles(FACTS.heads, FACTS.dim)
    barriers = {barrier.name: barrier for barrier in DENSE.barriers}
    assert table_of_the_kernel() == arrivals_of_roles()
    assert {name: barrier.arrivals for name, barrier in barriers.items()} == {
        name: max(counts) for name, counts in arrivals_of_roles().items()
    }
    q, k = DENSE.maps
    assert barriers["q_full"] == Barrier("q_full", 34, 2 * q.box_bytes)
    boxes = tiles.stage_rows // k.box[1]
    assert barriers["k_full"].bytes == boxes * k.box_bytes == tiles.k_bytes


def test_barriers_of_paged_calls_count_a_page_or_a_stage_at_a_time() -> None:
    """Values and scales come a page at a time, by one thread that arrives once a stage."""
    cases = ((64, 8, 8, 16), (64, 1, 256, 4), (128, 1, 64, 4), (8, 1, 128, 4), (64, 4, 16, 8))
    for heads, next_n, page_rows, readers in cases:
        facts = dataclasses.replace(
            PAGED_FACTS, heads=heads, next_n=next_n, page_rows=page_rows, varlen=False
        )
        plan = sm90_paged.paged_plan(facts)
        tiles = sm90_paged.paged_tiles(heads, facts.dim, next_n)
        barriers = {barrier.name: barrier for barrier in plan.barriers}
        q, k = plan.maps
        boxes = tiles.block // q.box[2]
        assert barriers["q_full"] == Barrier("q_full", 34, boxes * q.box_bytes)
        assert barriers["q_empty"].arrivals == 16
        assert barriers["k_empty"].arrivals == readers
        pages = tiles.stage_rows // k.box[1]
        scales = tiles.stage_rows * SCALE_BYTES
        assert barriers["k_full"] == Barrier("k_full", 1, pages * k.box_bytes + scales)
