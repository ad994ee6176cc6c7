"""The portable backend without a GPU: which calls it takes, and what it would launch for them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import portable_cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mqa
from mqa.backends import choose, scheduler
from mqa.cuda import compiler, driver, metadata, portable, variants
from mqa.cuda.dense import dense_addresses
from mqa.cuda.operands import HEAD_DIMS
from mqa.cuda.plan import Kernel, Plan
from mqa.cuda.portable import PORTABLE
from mqa.emulator.backend import PORTABLE_EMULATED
from mqa.problem import FORMATS, Format, parse
from mqa.testing import Case, accumulators, corpus, make_case

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
DENSE = "dense fp8 S=9 N=40 H=64 D=128"
PAGED = "paged fp8 B=3 next_n=2 H=64 D=128 P=64 blocks=20 columns=3 L=99"
STRANGE_DENSE = (
    "q_stride=40000x300x2 q_off=3",
    "kv_stride=300x2 kv_off=5",
    "kv_scale_stride=3 kv_scale_off=4",
    "w_stride=70x2 w_off=4 start_stride=2 end_stride=0 out_stride=77 out_off=4",
)
STRANGE_PAGED = (
    "q_stride=60000x30000x300x2 q_off=3",
    "q_stride=70000x30000x300x2",
    "cache_stride=9001 cache_off=5",
    "table_stride=7x2 lens_stride=5x2 w_stride=70x2",
)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the compute capability of the GPU that torch sees."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "unavailable", lambda: None)
    monkeypatch.setattr(compiler, "architectures", lambda: (80, 86, 89, 90, 100, 120))

    def change(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))

    return change


def reasons(line: str, device: torch.device = GPU) -> list[str]:
    return [*PORTABLE.reasons_against(parse(line), device)]


def scalars(plan: Plan) -> dict[str, float]:
    return {scalar.name: scalar.value for scalar in plan.struct.scalars}


@pytest.mark.parametrize(
    ("found", "first"),
    [((8, 0), "portable"), ((8, 9), "portable"), ((9, 0), "sm90"), ((12, 1), "portable")],
)
def test_gpus_without_kernels_of_their_own_get_it(
    capability: Any, found: tuple[int, int], first: str
) -> None:
    capability(*found)
    assert choose(parse(DENSE), GPU).name == first
    assert choose(parse(DENSE), GPU, "portable") is PORTABLE
    assert PORTABLE.schedules_on(GPU)


def test_it_takes_what_hoppers_kernels_do_not(capability: Any) -> None:
    capability(9, 0)
    for change in (("H=64", "H=24"), ("D=128", "D=128 q_off=8")):
        assert choose(parse(DENSE.replace(*change)), GPU).name == "portable"
    assert choose(parse(PAGED.replace("P=64", "P=48")), GPU).name == "portable"
    with pytest.raises(mqa.BackendUnavailableError, match="D=96 is not one of 32, 64, 128"):
        choose(parse(DENSE.replace("D=128", "D=96")), GPU, "portable")


def test_older_gpus_and_the_cpu_are_told_what_it_needs(capability: Any) -> None:
    capability(7, 5)
    assert reasons(DENSE) == ["needs compute capability 8.0 or newer, cuda:0 has 7.5"]
    assert reasons(DENSE, CPU) == [
        "needs a CUDA device of compute capability 8.0 or newer, this is cpu"
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_sizes_strides_and_addresses_are_no_reason(capability: Any, format: str) -> None:
    capability(8, 0)
    for H, D in itertools.product((1, 5, 24, 64, 100, 128, 130, 1000), HEAD_DIMS):
        assert reasons(f"dense {format} S=9 N=40 H={H} D={D} sms=7") == []
        for P in (1, 3, 48, 64, 256, 1000):
            rows = f"paged {format} B=3 next_n=1 H={H} D={D} P={P} blocks=20 columns=3 L=99"
            assert reasons(f"{rows} varlen=1") == []
    for layout in STRANGE_DENSE:
        assert reasons(f"dense {format} S=9 N=40 H=64 D=128 {layout}") == []
    for layout in STRANGE_PAGED:
        assert reasons(f"{PAGED.replace('fp8', format)} {layout}") == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (DENSE.replace("D=128", "D=256"), "D=256 is not one of 32, 64, 128"),
        (PAGED.replace("D=128", "D=96"), "D=96 is not one of 32, 64, 128"),
    ],
)
def test_what_it_does_not_do_is_a_reason(capability: Any, line: str, words: str) -> None:
    capability(8, 0)
    (found,) = reasons(line)
    assert words in found


def planned(line: str) -> tuple[Case, Plan, Any]:
    """A case, the plan of its call, and the addresses that the plan would be launched with."""
    case = make_case(parse(line))
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "mqa.emulator.backend.execute", lambda plan, tensors, _: found.append((plan, tensors))
        )
        options = {"schedule_meta": case.stale_schedule()} if case.problem.sms else {}
        case.run(backend="portable-emulated", **options)
    ((plan, tensors),) = found
    return case, plan, tensors


@pytest.mark.skipif(compiler.unavailable() is not None, reason="the emulator needs NVRTC")
@pytest.mark.parametrize(("format", "row"), [("fp8", 128), ("mxfp8", 128), ("mxfp4", 64)])
def test_a_dense_call_becomes_a_plan(format: Format, row: int) -> None:
    case, plan, tensors = planned(f"dense {format} S=9 N=40 H=24 D=128 sms=7")
    elements = portable.ELEMENTS[format]
    shared = portable.Sizes(elements, 32, 128).shared_bytes
    names = (f"mqa::portable::{elements}", "32", "128", "float", str(shared))
    assert (plan.kernel.source, plan.kernel.name) == ("portable/score.cuh", "mqa::portable::dense")
    assert plan.kernel.arguments == names
    assert plan.kernel.portable
    assert (plan.grid, plan.threads, plan.shared_bytes, plan.maps) == (7, 256, shared, ())
    scale = "q_scale" if format != "fp8" else ""
    inputs = ("kv_scale", "w", "start", "end", "schedule", "out", "kv", "q", scale)
    assert plan.tensors == inputs
    assert tensors["kv"].data_ptr() == case.tensors["kv"].data_ptr()
    values = scalars(plan)
    assert (values["heads"], values["k_row_stride"], values["k_dim_stride"]) == (24, row, 1)
    expected = (24 * row, row, 1)
    assert (values["q_row_stride"], values["q_head_stride"], values["q_dim_stride"]) == expected


@pytest.mark.skipif(compiler.unavailable() is not None, reason="the emulator needs NVRTC")
def test_a_paged_call_becomes_a_plan() -> None:
    _, plan, _ = planned(PAGED.replace("P=64", "P=48").replace("H=64", "H=130"))
    assert plan.kernel.name == "mqa::portable::paged"
    assert plan.kernel.arguments[:3] == ("mqa::portable::Fp8", "256", "128")
    assert plan.tensors == ("cache", "w", "lens", "table", "", "", "out", "q", "")
    values = scalars(plan)
    assert (values["heads"], values["page.value"]) == (130, 48)
    assert values["page_stride"] == 48 * 132
    assert values["q_dim_stride"] == 1


@pytest.mark.skipif(compiler.unavailable() is not None, reason="the emulator needs NVRTC")
def test_any_strides_reach_the_plan() -> None:
    _, plan, _ = planned(f"{DENSE} q_stride=40000x300x2 kv_stride=300x2")
    values = scalars(plan)
    assert (values["q_row_stride"], values["q_head_stride"], values["q_dim_stride"]) == (
        40000,
        300,
        2,
    )
    assert (values["k_row_stride"], values["k_dim_stride"]) == (300, 2)
    _, plan, _ = planned(f"{PAGED} q_stride=70000x30000x300x2 cache_stride=9001")
    values = scalars(plan)
    assert (values["q_request_stride"], values["q_scale_request_stride"]) == (70000, 0)
    assert (values["q_row_stride"], values["q_head_stride"], values["q_dim_stride"]) == (
        30000,
        300,
        2,
    )
    assert values["page_stride"] == 9001


@given(heads=st.integers(1, 5000))
def test_heads_are_padded_to_a_block_or_taken_128_at_a_time(heads: int) -> None:
    found = portable.padded(heads)
    assert found in (8, 16, 32, 64, 128, 256)
    assert heads <= found or found == portable.MANY_HEADS
    assert not any(heads <= some < found for some in portable.HEADS)


def test_shared_memory_is_what_every_gpu_has() -> None:
    for elements, heads, dim in itertools.product(
        portable.ELEMENTS.values(), (*portable.HEADS, portable.MANY_HEADS), HEAD_DIMS
    ):
        sizes = portable.Sizes(elements, heads, dim)
        assert sizes.shared_bytes % 16 == 0
        assert sizes.shared_bytes <= portable.MOST_SHARED_BYTES
    assert portable.Sizes("Fp8", 64, 128).shared_bytes == 101376
    assert portable.Sizes("Mxfp4", 64, 128).shared_bytes == 101376 - 8 * 64 * 64


@pytest.mark.skipif(compiler.unavailable() is not None, reason="needs NVRTC")
def test_shared_memory_is_laid_out_as_the_kernels_have_it(tmp_path: Path) -> None:
    lines = []
    for elements, heads, dim in (("Fp8", 8, 128), ("Mxfp4", 24, 32), ("Bf16", 130, 128)):
        sizes = portable.Sizes(elements, portable.padded(heads), dim)
        tiling = f"Tiling<{elements}, {sizes.heads}, {dim}, float>::Storage"
        members = portable.storage(sizes)
        lines += [
            f"static_assert(__INTADDR__(&((({tiling}*)0)->{one.name})) == {one.offset});\n"
            f"static_assert(sizeof({tiling}::{one.name}) == {one.size * one.number});"
            for one in members
        ]
        end = members[-1].offset + members[-1].size
        assert end <= sizes.shared_bytes
        lines.append(f"static_assert(sizeof({tiling}) - {end} < 16);")
    source = tmp_path / "agrees.cuh"
    body = ["namespace mqa::portable {", *lines, "__global__ void agrees() {}", "}", ""]
    source.write_text("\n".join(['#include "portable/storage.cuh"', *body]))
    compiler.compile_kernel(Kernel(str(source), "mqa::portable::agrees"), "sm_80")


def test_its_kernels_are_those_of_every_architecture() -> None:
    every = set(portable.kernels(every=True))
    assert set(portable.kernels()) < every
    assert set(metadata.PORTABLE_METADATA) < every
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121", "compute_80"):
        assert set(variants.kernels(arch, every=True)) == every
    assert not every & set(variants.kernels("sm_90a", every=True))
    assert all(kernel.portable for kernel in every)
    for chosen in itertools.product(portable.ELEMENTS.values(), HEAD_DIMS):
        assert any(
            kernel.arguments[0].endswith(chosen[0]) and kernel.arguments[2] == str(chosen[1])
            for kernel in portable.kernels()
            if kernel not in metadata.PORTABLE_METADATA
        )


@pytest.mark.parametrize(("line", "kind"), [(DENSE, 0), (PAGED, 1)])
def test_warmup_loads_what_a_call_needs(
    capability: Any, monkeypatch: pytest.MonkeyPatch, line: str, kind: int
) -> None:
    capability(8, 6)
    loaded: dict[Any, int] = {}
    monkeypatch.setattr(driver, "load", lambda kernel, _, size: loaded.update({kernel: size}))
    names = PORTABLE.warmup(parse(line), GPU)
    assert {*map(str, loaded)} == {*names}
    assert loaded[metadata.PORTABLE_METADATA[kind]] == 0
    assert len(loaded) == 2


@pytest.mark.parametrize(("page_size", "kind"), [(None, 0), (48, 1)])
def test_a_warmup_on_hopper_loads_the_schedules_that_hopper_computes(
    capability: Any, monkeypatch: pytest.MonkeyPatch, page_size: int | None, kind: int
) -> None:
    """Calls that `sm90` does not take get this backend, and schedules of the best one."""
    capability(9, 0)
    loaded: list[Kernel] = []
    monkeypatch.setattr(driver, "load", lambda kernel, *_: loaded.append(kernel))
    names = mqa.warmup(48, 128, "fp8", page_size=page_size, device="cuda:0")
    assert {*map(str, loaded)} == {*names}
    assert metadata.METADATA[kind] in loaded
    assert any(name.startswith("mqa::portable") for name in names)
    schedules = scheduler(GPU).warmup_schedules(parse((DENSE, PAGED)[kind]), GPU)
    assert schedules == (str(metadata.METADATA[kind]),)


def test_a_launch_gets_the_addresses_of_its_tensors(
    capability: Any, launched: list[list[tuple[str, int]]]
) -> None:
    capability(8, 0)
    case = make_case(parse(f"{DENSE} sms=3"))
    out = case.new_out()
    call = mqa.validate.dense(
        case.tensors["q"],
        (case.tensors["kv"], case.tensors["kv_scale"]),
        case.tensors["w"],
        case.tensors["start"],
        case.tensors["end"],
        True,
        0,
        torch.float32,
        case.stale_schedule(),
        out,
    )
    # What was launched is no launch of prepared calls, whose addresses come in another order.
    assert PORTABLE.dense(call, out) is None
    ((*bound,),) = launched
    plan = PORTABLE.plan_dense(call, out)
    assert [address for _, address in bound] == [*dense_addresses(call, out, plan)]
    assert dict(bound)["kv"] == call.k.data_ptr()
    assert dict(bound)["q"] == call.q.data_ptr()


def test_the_corpus_is_all_and_what_the_tests_run() -> None:
    beyond = [parse(line) for line in (*portable_cases.LINES, *portable_cases.EVERY)]
    assert corpus("portable") == [*corpus("all"), *beyond]
    reached = {kernel for problem in beyond for kernel in PORTABLE.kernels_of(problem)}
    wanted = itertools.product(
        (portable.DENSE, portable.PAGED),
        PORTABLE.elements.values(),
        (*portable.HEADS, portable.MANY_HEADS),
        HEAD_DIMS,
    )
    for name, elements, heads, dim in wanted:
        about = (f"mqa::portable::{elements}", str(heads), str(dim))
        assert any((one.name, one.arguments[:3]) == (name, about) for one in reached), about


def test_schedules_are_made_by_one_cta() -> None:
    start = end = torch.zeros(9, dtype=torch.int32)
    out = torch.zeros((8, 2), dtype=torch.int32)
    plan = PORTABLE.plan_dense_cuts(start, end, 40, 64, out)
    assert (plan.kernel, plan.grid, plan.threads) == (metadata.PORTABLE_METADATA[0], 1, 1024)
    plan = PORTABLE.plan_paged_cuts(start, None, out)
    assert (plan.kernel, plan.grid, plan.threads) == (metadata.PORTABLE_METADATA[1], 1, 1024)


def test_sums_are_those_of_the_hardware(capability: Any, setenv: Any) -> None:
    assert PORTABLE_EMULATED.accumulator("fp8") == "AMPERE_E4M3_SHIFTED_IN_F16"
    assert PORTABLE_EMULATED.accumulator("mxfp4") == "AMPERE_E2M1_IN_BF16"
    for found, fp8 in (
        ((8, 6), "AMPERE_E4M3_SHIFTED_IN_F16"),
        ((8, 9), "AMPERE_E4M3_IN_F16"),
        ((9, 0), "HOPPER_MMA_E4M3_IN_F16"),
    ):
        capability(*found)
        assert PORTABLE.accumulator("fp8") == fp8
    setenv("MQA_PORTABLE_ARCH", "compute_80")
    assert PORTABLE.accumulator("fp8") == "HOPPER_MMA_E4M3_SHIFTED_IN_F16"
    assert PORTABLE.accumulator("mxfp8") == "HOPPER_MMA_E4M3_IN_BF16"
    for format in PORTABLE.elements:
        assert hasattr(accumulators, PORTABLE.accumulator(format))
