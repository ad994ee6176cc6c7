"""A row's bits depend on nothing but the row: not on its neighbours, the cut, torch's switches."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mqa
from mqa.problem import FORMATS, DenseProblem, parse
from mqa.testing import Case, assert_bitwise, make_case
from mqa.testing.strategies import dense_problems

SPREAD = [
    "dense fp8 S=40 N=700 H=64 D=128 windows=random seed=1",
    "dense fp8 S=40 N=700 H=1 D=64 windows=random seed=2",
    "dense mxfp8 S=40 N=700 H=1 D=128 windows=random seed=3",
    "dense mxfp8 S=40 N=700 H=16 D=64 windows=random seed=7",
    "dense mxfp4 S=40 N=700 H=3 D=128 windows=random seed=5",
    "dense mxfp4 S=40 N=700 H=128 D=32 windows=random seed=11",
    "dense bf16 S=40 N=700 H=3 D=50 windows=random seed=3",
    "dense mxfp8 S=40 N=700 H=7 D=128 windows=random seed=3",
    "dense fp8 S=40 N=700 H=5 D=33 windows=random seed=6",
]
FEW_TILES = [
    f"dense {fmt} S=40 N={N} H={H} D={D} windows=full seed=3"
    for fmt, N, H, D in (
        ("mxfp8", 200, 7, 128),
        ("fp8", 200, 7, 128),
        ("fp8", 256, 3, 33),
        ("fp8", 90, 2, 129),
        ("fp8", 256, 6, 17),
        ("mxfp4", 100, 5, 64),
        ("mxfp4", 300, 9, 32),
        ("mxfp8", 256, 10, 96),
        ("fp8", 256, 11, 2),
        ("fp8", 256, 12, 1),
        ("fp8", 250, 1, 7),
    )
]


def call(case: Case, rows: slice = slice(None), **changes: Any) -> Tensor:
    """The dense call of a case on some of its rows."""
    t = case.tensors
    scale = None if "q_scale" not in t else t["q_scale"][rows]
    arguments = {
        "q": (t["q"][rows], scale),
        "kv": (t["kv"], t.get("kv_scale")),
        "weights": t["w"][rows],
        "cu_seq_len_k_start": t["start"][rows],
        "cu_seq_len_k_end": t["end"][rows],
    }
    return mqa.fp8_fp4_mqa_logits(**(arguments | changes))


@pytest.mark.parametrize("line", SPREAD)
def test_any_row_range_scored_alone_gives_the_same_bits(line: str) -> None:
    case = make_case(parse(line))
    whole = call(case)
    for low, high in ((0, 1), (3, 4), (0, 15), (5, 21), (17, 40), (39, 40)):
        assert_bitwise(call(case, slice(low, high)), whole[low:high], replay=line)


@pytest.mark.parametrize("line", FEW_TILES)
def test_rows_scored_alone_give_the_same_bits_for_any_shape(line: str) -> None:
    """One row against one tile is the smallest batch of products, where libraries differ most."""
    case = make_case(parse(line))
    whole = call(case)
    for row in range(40):
        for count in (1, 2):
            with threads(count):
                assert_bitwise(call(case, slice(row, row + 1)), whole[row : row + 1], replay=line)


@pytest.mark.parametrize("line", SPREAD)
@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 255), (255, 257), (300, 700), (511, 600)])
def test_any_window_range_scored_alone_gives_the_same_bits(line: str, low: int, high: int) -> None:
    case = make_case(parse(line.replace("random", "full")))
    whole = call(case)
    start, end = (torch.full((40,), n, dtype=torch.int32) for n in (low, high))
    part = call(case, cu_seq_len_k_start=start, cu_seq_len_k_end=end)
    assert_bitwise(part[:, low:high], whole[:, low:high], replay=line)
    compressed = call(case, cu_seq_len_k_start=start, cu_seq_len_k_end=end, max_seqlen_k=800)
    assert_bitwise(compressed[:, : high - low], whole[:, low:high], replay=line)
    # The same tokens as a tensor of their own: at another place in a tile.
    t = case.tensors
    moved = call(
        case,
        kv=(t["kv"][low:high], t["kv_scale"][low:high] if "kv_scale" in t else None),
        cu_seq_len_k_end=torch.full((40,), high - low, dtype=torch.int32),
    )
    assert_bitwise(moved, whole[:, low:high], replay=line)


@given(problem=dense_problems(max_rows=40, max_keys=600, outs=("float32",)), data=st.data())
def test_drawn_row_ranges_give_the_same_bits(problem: DenseProblem, data: st.DataObject) -> None:
    case = make_case(problem)
    whole = call(case)
    low = data.draw(st.integers(0, problem.S))
    high = data.draw(st.integers(low, problem.S))
    assert_bitwise(call(case, slice(low, high)), whole[low:high], replay=problem)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("H", [1, 64])
def test_paged_dense_compressed_and_weights_dtype_give_the_same_bits(fmt: str, H: int) -> None:
    N = 600
    case = make_case(parse(f"dense {fmt} S=20 N={N} H={H} D=64 weights=bfloat16 windows=full"))
    t = case.tensors
    dense = call(case)
    assert_bitwise(call(case, weights=t["w"].float()), dense)
    assert_bitwise(call(case, max_seqlen_k=N), dense)
    stored = t["kv"].shape[1]
    for P in (1, 7, 64, 256, 1000):
        blocks = -(-N // P)
        item = t["kv"].element_size()
        values = torch.zeros(blocks * P, stored * item, dtype=torch.uint8)
        values[:N], scale = t["kv"].view(torch.uint8), None
        if "kv_scale" in t:
            scale = torch.zeros(blocks * P, dtype=t["kv_scale"].dtype)
            scale[:N] = t["kv_scale"]
            scale = scale.view(blocks, P)
        element = torch.uint8 if fmt == "mxfp4" else t["kv"].dtype
        pages = values.view(blocks, P, stored * item).view(element)
        cache = mqa.formats.pack_kv_cache(pages, scale)
        for next_n in (1, 4, 20):
            B = 20 // next_n
            rows = (B, next_n)
            paged = mqa.fp8_fp4_paged_mqa_logits(
                (
                    t["q"].view(*rows, *t["q"].shape[1:]),
                    t["q_scale"].view(*rows, H) if "q_scale" in t else None,
                ),
                cache,
                t["w"],
                torch.full(rows, N, dtype=torch.int32),
                torch.arange(blocks, dtype=torch.int32).expand(B, -1),
                None,
                N,
            )
            assert_bitwise(paged, dense, replay=f"{case.problem} P={P} next_n={next_n}")


@pytest.mark.parametrize("line", SPREAD)
def test_twenty_repeats_and_a_given_schedule_give_the_same_bits(line: str) -> None:
    case = make_case(parse(line))
    want = call(case)
    for _ in range(20):
        assert_bitwise(call(case), want)
    cuts = mqa.get_mqa_logits_metadata(case.tensors["start"], case.tensors["end"], 700, 64)
    assert_bitwise(call(case, schedule_meta=cuts), want)
    assert_bitwise(call(case, schedule_meta=torch.full((9, 2), -77, dtype=torch.int32)), want)


@pytest.mark.parametrize("line", SPREAD)
@pytest.mark.parametrize("nbytes", [1 << 20, 3 << 20, 1 << 30])
def test_the_memory_bound_does_not_change_bits(line: str, nbytes: int, setenv: Any) -> None:
    case = make_case(parse(line))
    want = call(case)
    setenv("MQA_REFERENCE_BYTES", str(nbytes))
    assert_bitwise(call(case), want)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(name)
    yield
    assert torch.get_float32_matmul_precision() == name, "the call changed the switch"
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def flush_denormal() -> Iterator[None]:
    torch.set_flush_denormal(True)
    yield
    assert torch.tensor(2.0**-100) * 2.0**-40 == 0, "the call changed the switch"
    torch.set_flush_denormal(False)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SWITCHES = {
    "one thread": lambda: threads(1),
    "two threads": lambda: threads(2),
    "three threads": lambda: threads(3),
    "matmul precision high": lambda: matmul_precision("high"),
    "matmul precision medium": lambda: matmul_precision("medium"),
    "flush denormal": flush_denormal,
    "no grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "deterministic algorithms": deterministic,
}


def subnormal_case() -> Case:
    """Products and sums that are subnormal, where a flushed one would show."""
    case = make_case(parse("dense mxfp8 S=40 N=300 H=8 D=64 windows=full"))
    for name in ("q_scale", "kv_scale"):
        codes = torch.randint(44, 62, (*case.tensors[name].shape, 4), dtype=torch.uint8)
        case.tensors[name].copy_(codes.view(torch.int32).squeeze(-1))
    return case


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_of_torch_do_not_change_bits(switch: str) -> None:
    torch.manual_seed(5)
    for case in (*(make_case(parse(line)) for line in SPREAD), subnormal_case()):
        want = call(case)
        with SWITCHES[switch]():
            got = call(case)
        assert_bitwise(got, want, replay=case.problem)


def test_the_subnormal_case_has_subnormals() -> None:
    torch.manual_seed(5)
    logits = call(subnormal_case())
    subnormal = (logits != 0) & (logits.abs() < 2.0**-126)
    assert subnormal.float().mean() > 0.1


FLUSHING_FROM_THE_START = """
import torch
torch.set_flush_denormal({flush})
torch.ones(1 << 20).mul_(2)  # starts the worker threads, which keep the mode
import mqa
q = torch.ones(40, 8, 64).to(torch.float8_e4m3fn)
scale = torch.full((40, 8), 0x39393939, dtype=torch.int32)
k_scale = torch.full((300,), 0x36363636, dtype=torch.int32)
k = torch.ones(300, 64).to(torch.float8_e4m3fn)
window = torch.zeros(40, dtype=torch.int32), torch.full((40,), 300, dtype=torch.int32)
logits = mqa.fp8_fp4_mqa_logits((q, scale), (k, k_scale), torch.full((40, 8), 0.75), *window)
print(logits.view(torch.int32).unique().tolist())
"""


def test_worker_threads_that_flush_do_not_change_bits() -> None:
    """A flag set before torch's first parallel operation lives on in its worker threads."""
    printed = [
        subprocess.run(
            [sys.executable, "-c", FLUSHING_FROM_THE_START.format(flush=flush)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for flush in (False, True)
    ]
    assert printed[0] == printed[1]
    assert printed[0] != "[0]\n"


@pytest.mark.parametrize("H", [8, 16, 24, 40, 64, 104, 128])
@pytest.mark.parametrize("D", [16, 32, 48, 64, 96, 128, 208])
def test_no_place_in_a_batch_of_products_is_special(H: int, D: int) -> None:
    """The property of `torch.bmm` that batch invariance rests on, at every place of a tile, for the
    padded sizes."""
    generator = torch.Generator().manual_seed(H * D)

    def spread(*shape: int) -> Tensor:
        exponent = torch.randint(-12, 13, shape, generator=generator)
        return torch.randn(shape, generator=generator) * torch.exp2(exponent.float())

    heads, key, weights = spread(H, D), spread(D), spread(1, H)
    tile = key.expand(256, D).contiguous()
    want = None
    for count in (2, 3, 7, 16, 32, 64):
        for workers in (1, 2):
            with threads(workers):
                dots = torch.bmm(
                    heads.expand(count, H, D).contiguous(), tile.expand(count, 256, D).mT
                )
                sums = torch.bmm(weights.expand(count, 1, H).contiguous(), dots.relu())
            want = sums[0, 0, 0] if want is None else want
            assert_bitwise(sums.flatten(0, 1), want.expand(count, 256).contiguous())
