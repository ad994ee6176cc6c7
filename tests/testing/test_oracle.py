"""The oracle and the case maker against plain loops over Fractions that read the tensors' bytes."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from mqa.problem import DenseProblem, PagedProblem, parse
from mqa.testing import EXACT, FLOAT32, Case, logits, make_case

DENSE = [
    "dense fp8 S=3 N=5 H=2 D=32 windows=random seed=1",
    "dense fp8 S=4 N=9 H=3 D=32 M=9 windows=random seed=2 weights=bfloat16 w_stride=7 w_off=6",
    "dense mxfp8 S=3 N=6 H=2 D=64 windows=packed seed=3 kv_stride=81 kv_off=5 kv_scale_stride=2",
    "dense mxfp4 S=2 N=5 H=2 D=128 M=3 windows=full seed=4 start_stride=3 q_stride=150x70",
    "dense mxfp4 S=2 N=5 H=2 D=96 windows=random seed=6 regime=exact start_stride=0",
    "dense mxfp8 S=2 N=5 H=1 D=32 seed=7 regime=exact",
    "dense bf16 S=3 N=9 H=2 D=33 M=9 windows=random seed=3 kv_stride=40 kv_off=6",
    "dense bf16 S=3 N=9 H=2 D=64 windows=packed seed=8 regime=exact q_stride=150x70",
]
PAGED = [
    "paged fp8 B=2 next_n=3 H=2 D=32 P=3 blocks=7 columns=2 L=6 lens=random lens_rank=1 seed=1",
    "paged fp8 B=2 next_n=2 H=2 D=32 P=1 blocks=9 columns=4 L=9 lens=ramp cache_stride=48 seed=2",
    "paged mxfp8 B=9 next_n=1 H=1 D=64 P=2 blocks=30 columns=3 L=5 lens=random varlen=1 seed=3",
    "paged mxfp4 B=2 next_n=1 H=2 D=64 P=4 blocks=1 columns=2 L=8 clean=1 table_stride=5 seed=4",
    "paged mxfp4 B=2 next_n=4 H=2 D=32 P=5 blocks=3 columns=1 L=4 regime=exact lens_stride=6x1",
    "paged bf16 B=2 next_n=2 H=2 D=33 P=3 blocks=7 columns=2 L=6 lens=random cache_stride=104",
]


def raw(tensor: Tensor) -> np.ndarray:
    """The tensor's elements as unsigned integers."""
    words = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()]
    return tensor.contiguous().view(words).numpy()


def elements(fmt: str, octets: np.ndarray) -> list[float]:
    if fmt == "bf16":
        return octets.view(ml_dtypes.bfloat16).astype(float).tolist()
    if fmt != "mxfp4":
        return octets.view(ml_dtypes.float8_e4m3fn).astype(float).tolist()
    nibbles = [n for byte in octets.tolist() for n in (byte & 15, byte >> 4)]
    return np.array(nibbles, np.uint8).view(ml_dtypes.float4_e2m1fn).astype(float).tolist()


def vector(fmt: str, octets: np.ndarray, scale: int | None) -> list[Fraction]:
    values = [Fraction(value) for value in elements(fmt, octets)]
    if scale is None:
        return values
    return [v * Fraction(2) ** ((scale >> i // 32 * 8 & 255) - 127) for i, v in enumerate(values)]


def weights_of(case: Case, row: int) -> list[Fraction]:
    return [Fraction(w) for w in case.tensors["w"][row].float().tolist()]


def logit(case: Case, row: int, key: list[Fraction], scale: Fraction) -> Fraction:
    problem, q = case.problem, raw(case.tensors["q"])
    q = q.reshape(problem.rows, problem.H, -1)
    q_scale = case.tensors.get("q_scale")
    total = Fraction(0)
    for head, weight in enumerate(weights_of(case, row)):
        packed = None if q_scale is None else int(raw(q_scale).reshape(-1, problem.H)[row, head])
        query = vector(problem.format, q[row, head], packed)
        total += weight * max(sum(a * b for a, b in zip(query, key, strict=True)), Fraction(0))
    return total * scale


def dense_entries(case: Case) -> Iterator[tuple[int, int, Fraction]]:
    problem: Any = case.problem
    assert isinstance(problem, DenseProblem)
    kv, scales = raw(case.tensors["kv"]), case.tensors.get("kv_scale")
    for row in range(problem.S):
        start, end = int(case.tensors["start"][row]), int(case.tensors["end"][row])
        for n in range(min(max(start, 0), problem.N), min(max(end, 0), problem.N)):
            fp8 = problem.format == "fp8"
            packed = None if fp8 or scales is None else int(raw(scales)[n])
            scale = Fraction(float(scales[n])) if fp8 and scales is not None else Fraction(1)
            key = vector(problem.format, kv[n], packed)
            column = n - max(start, 0) if problem.M else n
            yield row, column, logit(case, row, key, scale)


def paged_entries(case: Case) -> Iterator[tuple[int, int, Fraction]]:
    problem = case.problem
    assert isinstance(problem, PagedProblem)
    size = problem.D // 2 if problem.format == "mxfp4" else problem.D
    lens = case.tensors["lens"]
    for row in range(problem.rows):
        b, j = divmod(row, problem.next_n)
        count = int(lens[b]) - problem.next_n + j + 1 if lens.ndim == 1 else int(lens[b, j])
        for n in range(count):
            page = case.tensors["cache"][int(case.tensors["table"][b, n // problem.P])].flatten()
            token, at = n % problem.P, problem.P * size + n % problem.P * 4
            if problem.format == "bf16":
                key = vector("bf16", raw(page)[token * size :][:size], None)
                yield row, n, logit(case, row, key, Fraction(1))
                continue
            octets, tail = page[token * size :][:size].numpy(), page[at : at + 4].numpy().tobytes()
            fp8 = problem.format == "fp8"
            key = vector(problem.format, octets, None if fp8 else int.from_bytes(tail, "little"))
            scale = Fraction(float(np.frombuffer(tail, "<f4")[0])) if fp8 else Fraction(1)
            yield row, n, logit(case, row, key, scale)


@pytest.mark.parametrize("line", DENSE + PAGED)
def test_oracle_equals_plain_loops_over_the_tensors(line: str) -> None:
    case = make_case(parse(line))
    result = logits(case, EXACT)
    entries = dense_entries(case) if line.startswith("dense") else paged_entries(case)
    seen = np.zeros_like(result.valid)
    for row, column, want in entries:
        seen[row, column] = True
        got = Fraction(float(result.values[row, column]))
        # Where block exponents lie far apart even float64 rounds a sum.
        slack = Fraction(float(result.magnitude[row, column])) / 2**40
        assert abs(got - want) <= (0 if case.problem.regime == "exact" else slack)
    np.testing.assert_array_equal(result.valid, seen)
    outside = result.values[~seen]
    assert (np.isneginf(outside) if case.problem.clean else np.isnan(outside)).all()


def test_blocks_of_rows_and_keys_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(parse("dense mxfp8 S=9 N=60 H=4 D=64 M=40 windows=random seed=5"))
    whole = logits(case, FLOAT32)
    monkeypatch.setattr("mqa.testing.oracle._BLOCK_ELEMENTS", 4 * 7 * 2)
    parts = logits(case, FLOAT32)
    np.testing.assert_array_equal(whole.valid, parts.valid)
    np.testing.assert_allclose(whole.values, parts.values, rtol=1e-12)
    np.testing.assert_allclose(whole.dot_error, parts.dot_error, rtol=1e-12)


def test_plateau_is_positive_zero_for_any_sign_of_the_weights() -> None:
    case = make_case(parse("dense fp8 S=40 N=40 H=1 D=64 windows=full seed=3"))
    result = logits(case, FLOAT32)
    flat = result.values[result.plateau]
    assert len(flat) > 100
    assert (flat == 0).all()
    assert not np.signbit(flat).any()
