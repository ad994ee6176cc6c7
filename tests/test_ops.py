"""The public functions as callers use them: results' layout, out=, compile, operators, settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mqa
from mqa.problem import parse
from mqa.testing import Case, assert_bitwise, assert_logits, make_case

DENSE = [
    "dense fp8 S=5 N=300 H=8 D=64 windows=random",
    "dense mxfp8 S=5 N=300 H=3 D=32 M=300 out=bfloat16",
    "dense mxfp4 S=5 N=30 H=8 D=128 weights=bfloat16 out=float16",
    "dense bf16 S=5 N=300 H=3 D=48 windows=random out=bfloat16",
]
PAGED = [
    "paged fp8 B=3 next_n=2 H=8 D=64 P=16 blocks=30 columns=9 L=140 lens=random clean=1",
    "paged mxfp8 B=3 next_n=1 H=8 D=64 P=16 blocks=30 columns=9 L=140 lens=random varlen=1 clean=1",
    "paged mxfp4 B=3 next_n=2 H=8 D=64 P=16 blocks=30 columns=9 L=140 lens_rank=1 clean=1",
    "paged bf16 B=3 next_n=2 H=8 D=64 P=16 blocks=30 columns=9 L=140 clean=1 cache_stride=1032",
]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def operator_arguments(case: Case) -> tuple[Any, ...]:
    """The arguments of `torch.ops.mqa.*` for a case."""
    t, problem, dtype = case.tensors, case.problem, case.out_dtype
    scale = t.get("q_scale")
    if hasattr(problem, "S"):
        inputs = (t["q"], scale, t["kv"], t.get("kv_scale"), t["w"], t["start"], t["end"])
        return (*inputs, problem.clean, problem.M, dtype, None, None)
    inputs = (t["q"], scale, t["cache"], t["w"], t["lens"], t["table"], None)
    return (*inputs, problem.L, problem.clean, dtype, t.get("indices"), None)


def operator(case: Case, suffix: str = "") -> Any:
    name = "mqa_logits" if hasattr(case.problem, "S") else "paged_mqa_logits"
    return getattr(torch.ops.mqa, name + suffix).default


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("S", "N"), [(0, 5), (1, 5), (3, 256), (2, 257), (3, 512), (2, 513), (3, 0), (0, 0)]
)
def test_row_stride_is_the_smallest_multiple_of_1024_bytes(S: int, N: int, out: str) -> None:
    result = make_case(parse(f"dense fp8 S={S} N={N} H=2 D=32 out={out}")).run()
    assert result.shape == (S, N)
    stride = max(1, -(-N * BYTES[out] // 1024)) * 1024
    assert result.stride() == (stride // BYTES[out], 1)
    result.fill_(1)  # writable


def test_row_stride_of_paged_results() -> None:
    for L in (0, 1, 256, 257):
        case = make_case(
            parse(f"paged fp8 B=2 next_n=2 H=2 D=32 P=16 blocks=99 columns=40 L={L} lens=zero")
        )
        assert case.run().stride() == (max(1, -(-L // 256)) * 256, 1)


@pytest.mark.parametrize("line", DENSE + PAGED)
def test_out_is_filled_and_returned(line: str) -> None:
    case = make_case(parse(line))
    out = torch.full((case.problem.rows, case.problem.width), torch.nan, dtype=case.out_dtype)
    got = case.run(out=out)
    assert got is out
    assert_bitwise(got, case.run())


@pytest.mark.parametrize("line", DENSE + PAGED)
@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("offset", [0, 1])
def test_nothing_but_the_result_is_written(line: str, pad: int, offset: int) -> None:
    case = make_case(parse(line))
    rows, width = case.problem.rows, case.problem.width
    stride = width + pad
    storage = torch.full((offset + (rows + 2) * stride,), 7, dtype=case.out_dtype)
    out = storage.as_strided((rows, width), (stride, 1), offset + stride)
    case.run(out=out)
    assert_bitwise(out, case.run())
    out.fill_(7)
    assert (storage == 7).all()


@pytest.mark.parametrize("line", DENSE + PAGED)
def test_operators_pass_opcheck(line: str) -> None:
    case = make_case(parse(line))
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if case.problem.format in (
        "mxfp4",
        "bf16",
    ):  # comparing float8 tensors on a CPU is beyond this one
        tests.append("test_schema")
    torch.library.opcheck(operator(case), operator_arguments(case), test_utils=tests)
    out = torch.zeros(case.problem.rows, case.problem.width, dtype=case.out_dtype)
    inputs = (*operator_arguments(case), out)
    torch.library.opcheck(operator(case, "_out"), inputs, test_utils=tests)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_operators_pass_opcheck_for_few_rows(rows: int) -> None:
    case = make_case(parse(f"dense mxfp4 S={rows} N=40 H=2 D=32"))
    torch.library.opcheck(operator(case), operator_arguments(case))


def test_metadata_operators_pass_opcheck() -> None:
    start, end = torch.zeros(9, dtype=torch.int32), torch.arange(9, dtype=torch.int32)
    torch.library.opcheck(torch.ops.mqa.mqa_logits_metadata.default, (start, end, 9, 64, 5))
    lens = torch.arange(12, dtype=torch.int32)
    inputs = (lens, 64, 5, lens // 3)
    torch.library.opcheck(torch.ops.mqa.paged_mqa_logits_metadata.default, inputs)


@pytest.mark.parametrize("line", DENSE + PAGED)
def test_compiles_to_one_graph(line: str) -> None:
    case = make_case(parse(line))
    want = case.run()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(out: Tensor) -> tuple[Tensor, Tensor]:
        case.run(out=out)
        return case.run(), out

    got, filled = compiled(torch.zeros(case.problem.rows, case.problem.width, dtype=case.out_dtype))
    assert got.stride() == want.stride()
    assert_bitwise(got, want)
    assert_bitwise(filled, want)


def test_keys_alone_compile_too() -> None:
    case = make_case(parse("dense bf16 S=5 N=30 H=3 D=48"))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(k: Tensor) -> Tensor:
        return mqa.fp8_fp4_mqa_logits(**case.kwargs | {"kv": k})

    assert_bitwise(compiled(case.tensors["kv"]), case.run())


def test_metadata_compiles_to_one_graph() -> None:
    start, end = torch.zeros(9, dtype=torch.int32), torch.arange(9, dtype=torch.int32) * 100
    lens = torch.arange(12, dtype=torch.int32) * 50

    def both(out: Tensor) -> tuple[Tensor, Tensor]:
        mqa.get_paged_mqa_logits_metadata(lens, 64, 3, out=out)
        return mqa.get_mqa_logits_metadata(start, end, 900, 64), out

    want = both(torch.zeros(4, 2, dtype=torch.int32))
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(torch.zeros(4, 2, dtype=torch.int32)), want, strict=True):
        assert torch.equal(got, wanted)


def test_compiles_with_dynamic_sizes() -> None:
    compiled = torch.compile(mqa.fp8_fp4_mqa_logits, fullgraph=True, dynamic=True, backend="eager")
    for S, N in ((3, 40), (5, 300), (9, 77)):
        case = make_case(parse(f"dense fp8 S={S} N={N} H=4 D=32"))
        t = case.tensors
        got = compiled(t["q"], (t["kv"], t["kv_scale"]), t["w"], t["start"], t["end"])
        assert_bitwise(got, case.run())


def test_exports() -> None:
    case = make_case(parse("dense fp8 S=3 N=40 H=4 D=32"))

    class Indexer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, scale: Tensor, *rest: Tensor) -> Tensor:
            return mqa.fp8_fp4_mqa_logits(q, (k, scale), *rest)

    t = case.tensors
    inputs = (t["q"], t["kv"], t.get("kv_scale"), t["w"], t["start"], t["end"])
    exported = torch.export.export(Indexer(), inputs)
    assert "mqa.mqa_logits.default" in exported.graph_module.code
    assert_bitwise(exported.module()(*inputs), case.run())


def test_fake_tensors_and_transforms_see_operators() -> None:
    case = make_case(parse("dense fp8 S=3 N=40 H=4 D=32"))
    with FakeTensorMode() as mode:
        t = {name: mode.from_tensor(tensor) for name, tensor in case.tensors.items()}
        fake = mqa.fp8_fp4_mqa_logits(
            t["q"], (t["kv"], t["kv_scale"]), t["w"], t["start"], t["end"], backend="reference"
        )
    assert type(fake).__name__ == "FakeTensor"
    assert fake.shape == (3, 40)
    assert fake.stride() == (256, 1)


WRONG_WHEN_TRACED: list[dict[str, Any]] = [
    {"clean_logits": 4096},
    {"clean_logits": torch.ones(())},
    {"weights": torch.ones(3, 3)},
    {"cu_seq_len_k_end": torch.ones(3, dtype=torch.int64)},
    {"kv": (torch.ones(40, 64).to(torch.float8_e4m3fn), torch.ones(40))},
    {"kv": (torch.ones(40, 32).to(torch.float8_e4m3fn), torch.ones(5))},
    {"max_seqlen_k": -5},
    {"backend": "nope"},
    {"out": torch.ones(3, 39)},
]


@pytest.mark.parametrize("change", WRONG_WHEN_TRACED, ids=lambda change: next(iter(change)))
def test_what_eager_calls_reject_traced_ones_reject(change: dict[str, Any]) -> None:
    case = make_case(parse("dense fp8 S=3 N=40 H=4 D=32 seed=2"))
    arguments = case.kwargs | change
    with pytest.raises((TypeError, ValueError)):
        mqa.fp8_fp4_mqa_logits(**arguments)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises((TypeError, ValueError)):
        mqa.fp8_fp4_mqa_logits(**arguments)

    @torch.compile(fullgraph=True, backend="eager")
    def compiled() -> Tensor:
        return mqa.fp8_fp4_mqa_logits(**arguments)

    with pytest.raises(Exception, match=r"expected"):
        compiled()


@pytest.mark.parametrize("name", ["q", "kv"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda tensor: None, "=None"),
        (lambda tensor: (tensor,), "=(torch.bfloat16 tensor"),
        (lambda tensor: (tensor, None, None), "=(torch.bfloat16 tensor"),
        (lambda tensor: (1, None), "[0]=1"),
        (lambda tensor: (tensor, 3), "[1]=3"),
    ],
)
def test_what_is_no_pair_is_named_where_it_is_traced_too(
    name: str, wrong: Callable[[Tensor], object], words: str
) -> None:
    case = make_case(parse("dense bf16 S=3 N=40 H=4 D=32"), "meta")
    tensor = case.tensors[name]
    with pytest.raises(
        TypeError, match=re.escape(f"{name}{words}") + ".*, expected a torch.Tensor"
    ):
        mqa.fp8_fp4_mqa_logits(**case.kwargs | {name: wrong(tensor)})


@pytest.mark.parametrize("line", DENSE + PAGED)
def test_meta_tensors_give_meta_results(line: str) -> None:
    case = make_case(parse(line), "cpu")
    moved = {name: tensor.to("meta") for name, tensor in case.tensors.items()}
    got = dataclasses.replace(case, tensors=moved).run()
    want = case.run()
    assert got.is_meta
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


def test_one_special_tensor_is_enough() -> None:
    case = make_case(parse("dense fp8 S=3 N=40 H=4 D=32 seed=2"))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(case.tensors["q"])
    got = mqa.fp8_fp4_mqa_logits(**case.kwargs | {"q": fake})
    assert type(got).__name__ == "FakeTensor"


def test_the_default_device_does_not_matter() -> None:
    for line in DENSE + PAGED:
        case = make_case(parse(line))
        want = case.run()
        lens = torch.arange(12, dtype=torch.int32)
        with torch.device("meta"):
            got = case.run()
            cuts = mqa.get_paged_mqa_logits_metadata(lens, 64, 7, lens // 3)
            more = mqa.get_mqa_logits_metadata(lens, lens * 9, 99, 64)
        assert_bitwise(got, want)
        assert (cuts.device.type, more.device.type) == ("cpu", "cpu")


def test_results_need_no_gradient_and_modes_do_not_matter() -> None:
    case = make_case(parse("dense fp8 S=3 N=40 H=4 D=32"))
    want = case.run()
    for mode in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with mode:
            assert_bitwise(case.run(), want)
            assert_bitwise(case.run(out=torch.empty(3, 40)), want)


def test_scales_with_a_singleton_and_a_cache_without() -> None:
    case = make_case(parse("dense fp8 S=3 N=40 H=4 D=32"))
    t = case.tensors
    window = (t["w"], t["start"], t["end"])
    got = mqa.fp8_fp4_mqa_logits(t["q"], (t["kv"], t["kv_scale"].unsqueeze(1)), *window)
    assert_bitwise(got, case.run())
    case = make_case(parse(PAGED[0]))
    squeezed = case.kwargs | {"kv_cache": case.tensors["cache"].squeeze(2), "schedule_meta": None}
    assert_bitwise(mqa.fp8_fp4_paged_mqa_logits(**squeezed), case.run())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float4_e2m1fn_x2])
def test_packed_fp4_under_any_of_its_dtypes(dtype: torch.dtype) -> None:
    case = make_case(parse("dense mxfp4 S=3 N=40 H=4 D=32"))
    t = case.tensors
    q, k = t["q"].view(torch.uint8).view(dtype), t["kv"].view(torch.uint8).view(dtype)
    got = mqa.fp8_fp4_mqa_logits(
        (q, t["q_scale"]), (k, t["kv_scale"]), t["w"], t["start"], t["end"]
    )
    assert_bitwise(got, case.run())


def test_empty_kv_is_cleaned() -> None:
    for line in (
        "dense fp8 S=3 N=0 H=4 D=32 M=7",
        "paged fp8 B=2 next_n=1 H=4 D=32 P=8 blocks=0 columns=0 L=7 lens=zero clean=1",
        "paged mxfp4 B=2 next_n=1 H=4 D=32 P=8 blocks=0 columns=3 L=7 lens=zero clean=1",
    ):
        case = make_case(parse(line))
        assert (case.run(out=torch.zeros(case.problem.rows, 7)) == -torch.inf).all()


def test_schedules_follow_the_number_of_sms() -> None:
    start, end = torch.zeros(9, dtype=torch.int32), torch.full((9,), 900, dtype=torch.int32)
    try:
        assert mqa.get_num_sms("cpu") == 1
        assert mqa.get_mqa_logits_metadata(start, end, 900, 64).shape == (2, 2)
        mqa.set_num_sms(7, "cpu")
        cuts = mqa.get_mqa_logits_metadata(start, end, 900, 64)
        assert cuts.shape == (8, 2)
        out = torch.zeros(8, 2, dtype=torch.int32)
        assert mqa.get_mqa_logits_metadata(start, end, 900, 64, out=out) is out
        assert torch.equal(out, cuts)
    finally:
        mqa.set_num_sms(1, "cpu")


def test_exact_regime_example_is_right() -> None:
    case = make_case(parse("dense fp8 S=5 N=40 H=8 D=64 regime=exact seed=7"))
    assert_logits(case, case.run())
