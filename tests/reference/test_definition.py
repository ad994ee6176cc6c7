"""The definition against plain Python loops over exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mqa.problem import FORMATS, MX_FORMATS, DenseProblem, PagedProblem, parse
from mqa.reference import definition
from mqa.testing import Case, assert_bitwise, make_case, round_once, to_tensor
from mqa.testing import logits as oracle_logits


def e4m3(code: int) -> Fraction:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    value = Fraction(mantissa + 8 * (exponent > 0), 8) * Fraction(2) ** (max(exponent, 1) - 7)
    return -value if sign else value


def e2m1(nibble: int) -> Fraction:
    value = Fraction((0, 1, 2, 3, 4, 6, 8, 12)[nibble & 7], 2)
    return -value if nibble & 8 else value


def token(values: torch.Tensor, scale: int | None) -> list[Fraction]:
    """Elements of one stored row, times their block scales."""
    if values.dtype == torch.bfloat16:
        return [Fraction(value) for value in values.tolist()]
    stored = values.view(torch.uint8).tolist()
    if values.dtype == torch.float8_e4m3fn:
        plain = [e4m3(code) for code in stored]
    else:
        plain = [e2m1(nibble) for byte in stored for nibble in (byte & 15, byte >> 4)]
    if scale is None:
        return plain
    codes = (scale & 0xFFFFFFFF).to_bytes(4, "little")
    return [x * Fraction(2) ** (codes[d // 32] - 127) for d, x in enumerate(plain)]


def looped(q: list[list[Fraction]], k: list[Fraction], weights: list[float]) -> Fraction:
    total = Fraction(0)
    for head, w in zip(q, weights, strict=True):
        dot = sum((a * b for a, b in zip(head, k, strict=True)), Fraction(0))
        total += Fraction(w) * max(dot, Fraction(0))
    return total


def defined(case: Case) -> torch.Tensor:
    t = case.tensors
    if isinstance(case.problem, DenseProblem):
        names = ("q", "q_scale", "kv", "kv_scale", "w", "start", "end")
        return definition.dense(*(t.get(name) for name in names), case.problem.M)
    assert isinstance(case.problem, PagedProblem)
    names = ("q", "q_scale", "cache", "w", "lens", "table")
    inputs = (t.get(name) for name in names)
    return definition.paged(*inputs, case.problem.L, t.get("indices"))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("M", [0, 9])
def test_definition_equals_loops_over_fractions(fmt: str, M: int) -> None:
    problem = parse(f"dense {fmt} S=4 N=9 H=3 D=64 M={M} windows=random regime=exact seed=3")
    case = make_case(problem)
    t, got = case.tensors, defined(case)
    mx = fmt in MX_FORMATS
    for s in range(4):
        low, high = (min(max(int(t[side][s]), 0), 9) for side in ("start", "end"))
        q = [token(t["q"][s, h], int(t["q_scale"][s, h]) if mx else None) for h in range(3)]
        want = [-math.inf] * got.shape[1]
        for n in range(low, high):
            k = token(t["kv"][n], int(t["kv_scale"][n]) if mx else None)
            value = looped(q, k, t["w"][s].tolist())
            if fmt == "fp8":
                value *= Fraction(float(t["kv_scale"][n]))
            want[n - low if M else n] = float(value)
        assert got[s].tolist() == want


@pytest.mark.parametrize(
    "line",
    [
        "dense fp8 S=7 N=50 H=4 D=32 windows=random",
        "dense mxfp4 S=7 N=50 H=4 D=96 windows=packed M=50",
        "dense bf16 S=7 N=50 H=3 D=96 windows=packed M=50",
        "paged bf16 B=4 next_n=3 H=2 D=33 P=7 blocks=40 columns=9 L=60 clean=1 lens=random",
        "paged fp8 B=4 next_n=3 H=2 D=32 P=7 blocks=40 columns=9 L=60 clean=1 lens=random",
        "paged mxfp8 B=4 next_n=3 H=2 D=64 P=7 blocks=40 columns=9 L=60 clean=1 lens_rank=1",
        "paged mxfp4 B=9 next_n=1 H=2 D=64 P=7 blocks=80 columns=9 L=60 clean=1 varlen=1",
    ],
)
def test_definition_equals_the_oracle(line: str) -> None:
    case = make_case(parse(f"{line} regime=exact seed=5"))
    assert case.problem.clean
    assert_bitwise(
        definition.round_once(defined(case), torch.float32), oracle_logits(case).values, replay=line
    )


@pytest.mark.parametrize(("P", "D"), [(7, 33), (1, 3), (3, 1), (5, 6)])
def test_pages_of_odd_sizes(P: int, D: int) -> None:
    """The scales of such a page begin at no multiple of 4."""
    line = f"paged fp8 B=2 next_n=1 H=3 D={D} P={P} blocks=9 columns=2 L={2 * P} clean=1"
    for lens in ("full", "ramp"):
        case = make_case(parse(f"{line} lens={lens} regime=exact"))
        case.tensors["lens"].clamp_(max=P)
        want = definition.round_once(defined(case), torch.float32)
        assert_bitwise(case.run(), want, replay=line)


@pytest.mark.parametrize("flush", [False, True])
def test_subnormal_bf16_elements_have_their_values(flush: bool) -> None:
    q = torch.tensor([0x0001, -0x7FFF, 0x007F, 0], dtype=torch.int16).view(torch.bfloat16)
    k = torch.tensor([0x7F00, 0x7E80, 0x7F00, 0x7F00], dtype=torch.int16).view(torch.bfloat16)
    window = torch.zeros(1).int(), torch.ones(1).int()
    torch.set_flush_denormal(flush)
    try:
        got = definition.dense(q.view(1, 1, 4), None, k.view(1, 4), None, torch.ones(1, 1), *window)
    finally:
        torch.set_flush_denormal(False)
    assert got.item() == 2.0**-133 * (2.0**127 - 2.0**126 + 127 * 2.0**127)


def test_scales_are_exponents_for_every_code() -> None:
    """The definition stays right outside the range that float32 backends guarantee."""
    q = torch.tensor([[[0x38] * 32]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    window = torch.zeros(1).int(), torch.ones(1).int()
    for code in range(255):
        for other in (0, 127, 254):
            scales = (torch.tensor([n]).int() for n in (code, other))
            got = definition.dense(
                q, next(scales).view(1, 1), q[0], next(scales), torch.ones(1, 1), *window
            )
            assert got.item() == math.ldexp(32, code - 127 + other - 127)


def test_scale_code_255_is_nan() -> None:
    q = torch.ones(1, 1, 64).to(torch.float8_e4m3fn)
    window = torch.zeros(1).int(), torch.ones(1).int()
    one = torch.tensor([0x7F7F7F7F]).int()
    for scale, nan in ((0x7F7F7FFF, True), (0x7F7FFF7F, True), (0x7FFF7F7F, False)):
        k_scale = torch.tensor([scale]).int()
        got = definition.dense(q, one.view(1, 1), q[0], k_scale, torch.ones(1, 1), *window)
        assert bool(got.isnan()) is nan


HAZARDS = [
    1 + 2.0**-8 + 2.0**-40,  # bfloat16: float32 first would lose the last term and tie to even
    1 + 2.0**-11 + 2.0**-40,  # float16
    1 + 3 * 2.0**-8 - 2.0**-40,
    2.0**-133 + 2.0**-160,  # subnormal bfloat16
    2.0**-24 * 1.5 + 2.0**-60,  # subnormal float16
    65519.99999999,
    65520.0,
    3.3961775292304601e38,
    3.4e38,
    -0.0,
    2.0**-200,
    -(2.0**-200),
    math.inf,
    -math.inf,
    math.nan,
]


@pytest.mark.parametrize("value", HAZARDS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_hazards_round_once(value: float, sign: int, name: str) -> None:
    check_rounding(sign * value, name)


@given(
    value=st.one_of(st.floats(), st.floats(width=32), st.floats(-70000, 70000)),
    name=st.sampled_from(["float32", "bfloat16", "float16"]),
)
@example(value=1 + 2.0**-8 + 2.0**-40, name="bfloat16")
def test_any_float_rounds_once(value: float, name: str) -> None:
    check_rounding(value, name)


def check_rounding(value: float, name: str) -> None:
    got = definition.round_once(torch.tensor([[value]], dtype=torch.float64), getattr(torch, name))
    assert_bitwise(got, to_tensor(round_once(np.array([[value]]), name), name))
    if name != "bfloat16":  # numpy has no bfloat16, and rounds the others once itself
        with np.errstate(over="ignore"):
            want = np.array([[value]]).astype(name)
        assert_bitwise(got, torch.from_numpy(want))


def test_every_bfloat16_rounds_to_itself() -> None:
    codes = np.arange(65536, dtype=np.uint16)
    values = torch.from_numpy((codes.astype(np.uint32) << 16).view(np.float32)).double()
    got = definition.round_once(values, torch.bfloat16)
    same = torch.from_numpy(got.view(torch.uint16).numpy() == codes)
    assert (same | values.isnan()).all()
