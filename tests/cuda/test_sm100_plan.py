"""The Blackwell backend without a GPU: what it refuses, what a launch follows from, its kernels."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compact_paths import HOPPER_ONLY, PATHS
from torch import Tensor

from mqa import devices, validate
from mqa.backends import BACKENDS, choose
from mqa.cuda import (
    compiler,
    driver,
    metadata,
    operands,
    sm100,
    sm100_tiles,
    storage,
    targets,
    variants,
)
from mqa.cuda.covering import covering
from mqa.cuda.plan import MAX_SHARED_BYTES, WARP, Barrier, Kernel, Plan
from mqa.cuda.sm100 import SM100
from mqa.cuda.sm100_tiles import TENSOR_COLUMNS, TILE_ROWS, Tiles, dense_tiles, paged_tiles
from mqa.formats.kv_cache import SCALE_BYTES
from mqa.problem import LOGITS_DTYPES, DenseProblem, parse
from mqa.reference.schedule import GROUP
from mqa.testing import accumulators, make_case

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FORMATS = (*sm100.MODELS,)
SIZES = "blocks=20 columns=3 L=99"
DENSE = "dense fp8 S=9 N=40 H=64 D=128"
PAGED = f"paged fp8 B=3 next_n=2 H=64 D=128 P=64 {SIZES}"
SHAPES = [
    (format, H, D)
    for format in FORMATS
    for H, D in itertools.product(operands.HEADS, operands.head_dims(format))
]
ELEMENTS = operands.ELEMENTS
EVERY_TILES = sorted(
    {
        tiles
        for format, H, D in SHAPES
        for rows in range(1, GROUP + 1)
        for tiles in (
            dense_tiles(H, D, ELEMENTS[format]),
            paged_tiles(H, D, rows, ELEMENTS[format]),
        )
    },
    key=str,
)


def reasons(line: str, device: torch.device = GPU) -> list[str]:
    return [*SM100.reasons_against(parse(line), device)]


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the compute capability of the GPU that torch sees."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "unavailable", lambda: None)

    def change(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, minor))

    return change


@pytest.mark.parametrize("minor", [0, 3])
def test_gpus_of_capability_10_get_this_backend_and_kernels_of_the_family(
    capability: Any, minor: int
) -> None:
    capability(10, minor)
    assert targets.architecture(GPU) == "sm_100f"
    for line in (DENSE, PAGED, DENSE.replace("fp8", "mxfp4"), PAGED.replace("fp8", "mxfp8")):
        assert reasons(line) == []
        assert choose(parse(line), GPU).name == "sm100"
    assert SM100.unusable_here() is None
    assert SM100.schedules_on(GPU)
    assert not SM100.schedules_on(CPU)


def test_gpus_of_other_capabilities_get_another(capability: Any) -> None:
    for major, minor in ((8, 0), (9, 0), (11, 0), (12, 0)):
        capability(major, minor)
        assert reasons(DENSE) == [f"needs compute capability 10.x, cuda:0 has {major}.{minor}"]
        assert targets.architecture(GPU) == f"sm_{major}{minor}a"
        assert not SM100.schedules_on(GPU)
    capability(9, 0)
    assert choose(parse(DENSE), GPU).name == "sm90"
    assert reasons(DENSE, CPU) == ["needs a CUDA device of compute capability 10.x, this is cpu"]


@pytest.mark.parametrize(
    ("arch", "runs_on"),
    [
        ("sm_100a", {(10, 0)}),
        ("sm_103a", {(10, 3)}),
        ("sm_100f", {(10, 0), (10, 3)}),
        ("sm_103f", {(10, 3)}),
        ("sm_90a", set()),
    ],
)
def test_an_architecture_may_be_asked_for_where_it_runs(
    capability: Any, setenv: Any, arch: str, runs_on: set[tuple[int, int]]
) -> None:
    setenv("MQA_ARCH", arch)
    for found in ((10, 0), (10, 3)):
        capability(*found)
        assert targets.architecture(GPU) == arch
        said = f"MQA_ARCH={arch} does not run on compute capability {found[0]}.{found[1]}"
        assert reasons(DENSE) == ([] if found in runs_on else [said])


def test_kernels_of_the_family_are_those_of_its_gpus() -> None:
    for arch in ("sm_100a", "sm_103a"):
        assert variants.kernels(arch) == variants.kernels("sm_100f")
    with pytest.raises(ValueError, match=r"sm_100a, sm_100f, .*sm_103a, .*sm_90a$"):
        variants.kernels("sm_120a")


def test_the_best_backend_is_asked_first() -> None:
    names = [backend.name for backend in BACKENDS]
    assert names[0] == "sm100"
    emulated = BACKENDS[names.index("sm100-emulated")]
    assert SM100.by_default
    assert not emulated.by_default
    assert choose(parse(DENSE), CPU).name == "reference"
    for line in (DENSE, PAGED):
        assert [*emulated.reasons_against(parse(line), CPU)] == []
        assert len([*emulated.reasons_against(parse(line), GPU)]) == 1


def test_what_the_kernels_do_has_no_reason_against_it(capability: Any) -> None:
    capability(10, 0)
    for format, H, D in SHAPES:
        assert reasons(f"dense {format} S=9 N=40 H={H} D={D} M=50 out=float16") == []
        for P in operands.PAGE_SIZES:
            sizes = f"H={H} D={D} P={P} {SIZES}"
            assert reasons(f"paged {format} B=3 next_n=9 {sizes} lens_rank=1") == []
            assert reasons(f"paged {format} B=3 next_n=1 {sizes} varlen=1 clean=1") == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (DENSE.replace("H=64", "H=24"), "H=24 is not one of 8, 16, 32, 64, 128"),
        (DENSE.replace("D=128", "D=96"), "D=96 is not one of 32, 64, 128"),
        (DENSE.replace("fp8", "mxfp8").replace("D=128", "D=32"), "D=32 is not one of 64, 128"),
        (f"{DENSE} q_off=8", "q is 8 bytes off a multiple of 16"),
        (f"{DENSE} kv_stride=136", "kv is not rows of 128 contiguous bytes at multiples of 16"),
        (PAGED.replace("P=64", "P=24"), "P=24 is not one of 8, 16, 32, 64, 128, 256"),
        (f"{PAGED} cache_stride=8456", "pages of cache overlap, or do not begin at"),
        (f"{PAGED} q_stride=32768x8192x128x1", "q has 32768 from one request to the next"),
    ],
)
def test_each_thing_that_the_kernels_cannot_do_is_one_reason(
    capability: Any, line: str, words: str
) -> None:
    capability(10, 0)
    (reason,) = reasons(line)
    assert reason.startswith(words)


def test_each_format_has_the_model_of_its_instruction() -> None:
    models = {format: SM100.accumulator(format) for format in FORMATS}
    assert models == {
        "fp8": "BLACKWELL_FP8",
        "mxfp8": "BLACKWELL_MXFP8",
        "mxfp4": "BLACKWELL_MXFP4",
    }
    assert all(hasattr(accumulators, model) for model in models.values())


DENSE_NAMES = (
    "q",
    "kv",
    "weights",
    "cu_seq_len_k_start",
    "cu_seq_len_k_end",
    "clean_logits",
    "max_seqlen_k",
    "logits_dtype",
    "schedule_meta",
)
PAGED_NAMES = (
    "q",
    "kv_cache",
    "weights",
    "context_lens",
    "block_table",
    "schedule_meta",
    "max_context_len",
    "clean_logits",
    "logits_dtype",
    "indices",
)
"""Arguments of the checks, in order."""


def call_and_plan(line: str, sms: int = 148) -> tuple[Any, Tensor, Plan]:
    """A legal call of a problem on CPU tensors, its result, and what a launch of it would be."""
    case = make_case(parse(line))
    out = case.new_out()
    kwargs = case.kwargs
    if case.problem.sms:
        kwargs = kwargs | {"schedule_meta": case.stale_schedule()}
    dense = isinstance(case.problem, DenseProblem)
    names = DENSE_NAMES if dense else PAGED_NAMES
    check = validate.dense if dense else validate.paged
    call = check(*(kwargs.get(name) for name in names), out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "_num_sms", {CPU: sms})
        plan = (SM100.plan_dense if dense else SM100.plan_paged)(call, out)
    return call, out, plan


def scalars(plan: Plan) -> dict[str, float]:
    return {scalar.name: scalar.value for scalar in plan.struct.scalars}


def test_a_dense_call_becomes_a_plan() -> None:
    _, _, plan = call_and_plan(f"{DENSE} M=50 clean=0 out=float16 weights=bfloat16")
    tiles = dense_tiles(64, 128)
    assert (plan.grid, plan.threads) == (148, sm100_tiles.THREADS)
    assert plan.kernel == sm100.kernel(sm100.DENSE, tiles, "float16")
    assert plan.kernel.arguments[:4] == ("mqa::sm100::Fp8", "64", "128", "__half")
    q, k = plan.maps
    assert (q.shape, q.strides, q.swizzle) == ((128, 64, 9), (128, 64 * 128), 128)
    assert (k.shape, k.strides, k.swizzle) == ((128, 40), (128,), 128)
    values = scalars(plan)
    assert (values["rows"], values["tokens"], values["width"]) == (9, 40, 50)
    assert (values["clean"], values["compressed"], values["weights_are_bf16"]) == (0, 1, 1)
    assert "schedule" not in plan.tensors


@pytest.mark.parametrize("line", [DENSE, PAGED])
def test_a_schedule_sets_the_number_of_ctas(line: str) -> None:
    call, _, plan = call_and_plan(f"{line} sms=7")
    assert plan.grid == 7
    assert "schedule" in plan.tensors
    assert scalars(plan)["schedule_row_stride"] == call.schedule.stride(0)


@pytest.mark.parametrize(("format", "row"), [("fp8", 128), ("mxfp8", 128), ("mxfp4", 64)])
@pytest.mark.parametrize("line", [DENSE, PAGED])
def test_q_comes_by_its_map_and_its_scales_by_their_address(
    format: str, row: int, line: str, launched: Any
) -> None:
    call, out, plan = call_and_plan(line.replace("fp8", format))
    dense = line == DENSE
    keys = "kv" if dense else "cache"
    assert [map.tensor for map in plan.maps] == ["q", keys]
    assert all(map.shape[0] == map.box[0] == map.swizzle == row for map in plan.maps)
    (SM100.dense if dense else SM100.paged)(call, out)
    bound = launched[0]
    assert [name for name, _ in bound] == [*plan.tensors]
    assert [at for name, at in bound if name == "q"] == [call.q.data_ptr()]
    scales = [at for name, at in bound if name == "q_scale"]
    assert scales == ([] if call.q_scale is None else [call.q_scale.data_ptr()])
    for name, tensor in (("w", call.weights), ("out", out)):
        assert dict(bound)[name] == tensor.data_ptr()
    assert dict(bound)[keys] == (call.k if dense else call.kv_cache).data_ptr()
    values = scalars(plan)
    assert values["q_row_stride"] == 64 * row
    assert values["q_scale_row_stride"] == (0 if format == "fp8" else 64)


def test_plain_fp8_calls_are_prepared_and_calls_with_scales_are_not(launched: Any) -> None:
    for format in FORMATS:
        call, out, plan = call_and_plan(DENSE.replace("fp8", format))
        again = SM100.dense(call, out)
        assert (again is None) == (format != "fp8")
        if format == "fp8":
            assert plan.tensors == ("q", "kv", "kv_scale", "w", "start", "end", "", "out")
    assert SM100.dense(call_and_plan("dense fp8 S=9 N=0 H=64 D=128 M=8")[0], out) is None
    assert len(launched) == 4


@pytest.mark.parametrize("count", [0, 1])
def test_few_tokens_or_pages_have_a_legal_map(count: int) -> None:
    _, _, plan = call_and_plan(f"dense mxfp4 S=9 N={count} H=64 D=128 M=8")
    assert (plan.maps[1].shape, plan.maps[1].strides) == ((64, 1), (64,))
    few = PAGED.replace("blocks=20", f"blocks={count}").replace("L=99", "L=9")
    _, _, plan = call_and_plan(few)
    assert (plan.maps[1].shape, plan.maps[1].strides) == ((128, 64, 1), (128, 64 * 132))


@pytest.mark.parametrize("tiles", EVERY_TILES, ids=str)
def test_tiles_fit_into_shared_memory_tensor_memory_and_instructions(tiles: Tiles) -> None:
    assert tiles.shared_bytes <= MAX_SHARED_BYTES
    assert tiles.tensor_columns <= TENSOR_COLUMNS
    # An instruction has 16 to 256 columns in steps of 16; a set is whole rows.
    assert tiles.pass_columns in (64, 128, 192, 256)
    assert tiles.columns == (512 if tiles.passes > 1 else tiles.pass_columns)
    assert sum(tiles.strips) * 64 == tiles.columns
    assert tiles.block * tiles.heads == tiles.columns
    assert tiles.groups % tiles.sets == 0
    # A place is always the same warpgroups', that take tiles in turn.
    assert tiles.slots % (tiles.groups // tiles.sets) == 0
    assert tiles.slots >= 2
    assert tiles.stages >= 4


def test_a_group_gets_the_fewest_columns_that_hold_it() -> None:
    for (format, H, D), rows in itertools.product(SHAPES, range(1, GROUP + 1)):
        tiles = paged_tiles(H, D, rows, ELEMENTS[format])
        most = sm100_tiles.most_columns(H, ELEMENTS[format])
        assert tiles.block >= rows or tiles.columns == most
        assert tiles.columns <= most
        fewer = [c for c in (64, 128) if c < tiles.columns and c >= H and c >= rows * H]
        assert not fewer


def test_sizes_are_those_of_the_kernels(tmp_path: Path) -> None:
    lines = [
        f"static_assert({name} == {value});"
        for name, value in {
            "kThreads": sm100_tiles.THREADS,
            "kTileRows": TILE_ROWS,
            "kTensorColumns": TENSOR_COLUMNS,
            "kScaleBytes": sm100_tiles.SCALE_BYTES,
            "kScaleColumns": sm100_tiles.SCALE_COLUMNS,
            "kMathWarps": storage.MATH_WARPS,
            "kFeedingWarps": storage.FEEDING_WARPS,
            "sizeof(FillStorage)": storage.FILL_BYTES,
            **{f"k{name}Warp": warps for name, warps in warps_of_roles().items()},
        }.items()
    ]
    for t in EVERY_TILES:
        sizes = f"{t.elements}, {t.heads}, {t.dim}, float, {t.stages}, {t.columns}"
        equal = {
            f"sizeof(Tiling<{sizes}>::Storage)": t.shared_bytes,
            f"Tiling<{sizes}>::kSlots": t.slots,
            f"Tiling<{sizes}>::kBlock": t.block,
            f"Tiling<{sizes}>::kQBoxRows": t.q_box_rows,
            f"Tiling<{sizes}>::kGroups": t.groups,
            f"Tiling<{sizes}>::kReaderWarps": t.sets * 4 if t.passes == 1 else 0,
            f"Tiling<{sizes}>::kPasses": t.passes,
            f"Tiling<{sizes}>::kSums": t.sums,
            f"Tiling<{sizes}>::kAligned": t.aligned,
            f"Tiling<{sizes}>::kReadAgain": t.read_again,
        }
        if t.passes > 1:
            readers = ((f"Tiling<{sizes}>::readers_of({i})", 4 * n) for i, n in enumerate(t.strips))
            equal |= dict(readers)
        lines += [f'static_assert({name} == {size}, "{name}");' for name, size in equal.items()]
    source = tmp_path / "sizes.cuh"
    body = "\n".join(["namespace mqa::sm100 {", *lines, "__global__ void sizes() {}", "}\n"])
    source.write_text(f'#include "sm100/score/storage.cuh"\n{body}')
    compiler.compile_kernel(Kernel(str(source), "mqa::sm100::sizes"), "sm_100f")


def warps_of_roles() -> dict[str, int]:
    """First warps by the names of the kernels' constants."""
    names = {"multiply": "Mma"}
    return {
        names.get(role.name, role.name.capitalize()): role.warps.start
        for role in sm100_tiles.ROLES
        if role.name not in ("math", "idle")
    }


def test_roles_share_out_all_warps() -> None:
    warps = [warp for role in sm100_tiles.ROLES for warp in role.warps]
    assert warps == [*range(sm100_tiles.THREADS // WARP)]


def counts_of_the_source() -> dict[str, str]:
    """What the kernel initialises each barrier with."""
    files = ("score/feed.cuh", "sm100/score/kernel.cuh")
    text = "".join((compiler.sources() / name).read_text() for name in files)
    found = re.findall(r"mbarrier_init\(ptx::shared_address\(&shared\.(\w+)\S*\),\s*(.*?)\);", text)
    return {name: " ".join(count.split()) for name, count in found}


def test_barriers_count_what_the_kernel_initialises_them_with() -> None:
    dense = (DENSE.replace("fp8", format) for format in FORMATS)
    for line in (*dense, PAGED, PAGED.replace("fp8", "mxfp8")):
        _, _, plan = call_and_plan(line)
        scaled = "mx" in line
        tiles = (dense_tiles if "dense" in line else lambda *of: paged_tiles(*of[:2], 2, of[2]))(
            64, 128, ELEMENTS[line.split()[1]]
        )
        values = {
            "ptx::kWarpArrivals": "1",
            "kWarpSize": str(WARP),
            "Tiling::kActiveWarps": str(4 * tiles.groups),
            "Tiling::kReaderWarps": str(4 * tiles.sets if tiles.passes == 1 else 0),
            "Tiling::kScaled": str(int(scaled)),
        }
        counts = counts_of_the_source()
        # By the source of keys: bulk copies count bytes, cp.async arrives for each lane.
        assert counts.pop("k_arrivals", None) is None
        assert counts.pop("k_full") == "k_arrivals"
        if not scaled:
            del counts["scales_full"]
        assert counts.pop("sums_empty") == "Tiling::readers_of(i) * ptx::kWarpArrivals"
        passes = [one.arrivals for one in plan.barriers if one.name == "sums_empty"]
        assert passes == ([4 * n for n in tiles.strips] if tiles.passes > 1 else [])
        barriers = {one.name: one for one in plan.barriers if one.name != "sums_empty"}
        for name, text in counts.items():
            for constant, value in values.items():
                text = text.replace(constant, value)
            assert barriers[name].arrivals == eval(text, {}), name
        assert barriers.keys() == {*counts, "k_full"}
        q, k = plan.maps
        assert barriers["q_full"].bytes == tiles.q_bytes == tiles.block // q.box[2] * q.box_bytes
        pages = TILE_ROWS // k.box[1]
        if "dense" in line:
            assert barriers["k_full"] == Barrier("k_full", 1 + WARP, k.box_bytes)
        else:
            scales = TILE_ROWS * SCALE_BYTES
            assert barriers["k_full"] == Barrier("k_full", 1, pages * k.box_bytes + scales)


def test_the_kernels_to_compile_cover_every_pair_of_choices() -> None:
    every, some = (dict.fromkeys(sm100.kernels(every=e)[2:]) for e in (True, False))
    assert some.keys() < every.keys()
    choices = [{facts(kernel) for kernel in kernels} for kernels in (every, some)]
    shapes = {(ELEMENTS[format], str(H), str(D)) for format, H, D in SHAPES}
    assert {choice[:3] for choice in choices[0]} == shapes
    for first, second in itertools.combinations(range(5), 2):
        pairs = [{(choice[first], choice[second]) for choice in of} for of in choices]
        assert pairs[0] == pairs[1]


def facts(kernel: Kernel) -> tuple[str, ...]:
    """Format, H, D, logits dtype, dense or paged."""
    format, heads, dim, logits, *_ = kernel.arguments
    return format.rpartition("::")[2], heads, dim, logits, kernel.name


def test_the_kernels_to_compile_are_few_and_each_is_there_once() -> None:
    assert len(sm100.kernels()) <= 60
    for kernels in (sm100.kernels(), sm100.kernels(every=True)):
        assert set(metadata.METADATA) < set(kernels)
        assert len(set(kernels)) == len(kernels)
    assert variants.kernels("sm_100f", every=True) == sm100.kernels(every=True)


def test_a_covering_set_has_every_pair_and_leaves_out_what_adds_none() -> None:
    combinations = {(a, b, c): (a, b, c) for a in "xyz" for b in "pq" for c in "uv"}
    chosen = covering(combinations)
    assert len(chosen) < 8
    for first, second in itertools.combinations(range(3), 2):
        wanted = {(name[first], name[second]) for name in combinations}
        assert {(name[first], name[second]) for name in chosen} == wanted
    assert covering({}) == ()
    assert covering({"one": (1, 2), "two": (1, 2)}) == ("one",)


@pytest.mark.parametrize(("format", "H", "D"), SHAPES[::4])
def test_a_warmup_loads_all_that_a_call_of_the_configuration_can_reach(
    monkeypatch: pytest.MonkeyPatch, format: str, H: int, D: int
) -> None:
    loaded: dict[Kernel, int] = {}
    monkeypatch.setattr(driver, "load", lambda kernel, _, size: loaded.update({kernel: size}))
    sizes = f"H={H} D={D} P=64 {SIZES} out=bfloat16"
    names = SM100.warmup(parse(f"paged {format} B=1 next_n=1 {sizes}"), GPU)
    assert [*map(str, loaded)] == [*names]
    calls = [f"B=1 next_n={n}" for n in (*range(1, 10), 20)] + ["B=5 next_n=1 varlen=1"]
    plans = [call_and_plan(f"paged {format} {call} {sizes}")[2] for call in calls]
    reached = {plan.kernel: plan.shared_bytes for plan in plans}
    assert loaded == reached | {metadata.METADATA[1]: 0}
    assert reached.keys() <= {*sm100.kernels(every=True)}
    loaded.clear()
    for logits in LOGITS_DTYPES:
        line = f"dense {format} S=9 N=40 H={H} D={D} out={logits}"
        _, _, plan = call_and_plan(line)
        SM100.warmup(parse(line), GPU)
        assert loaded == {plan.kernel: plan.shared_bytes, metadata.METADATA[0]: 0}
        loaded.clear()


def test_what_a_sanitizer_runs_there_is_all_that_this_backend_takes() -> None:
    paths = [path for path in PATHS if not any(word in path for word in HOPPER_ONLY)]
    assert 70 < len(paths) < len(PATHS)
    for path in paths:
        assert [*SM100.problem_reasons(parse(f"{path} regime=exact seed=3"))] == []
