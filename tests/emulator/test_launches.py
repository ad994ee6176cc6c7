"""What a launch asks for, and variables of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ptx_kernels import HEADER, Array, kernel

from mqa.emulator import EmulationError, Kind, run
from mqa.emulator.parser import PtxError

NONE = kernel("", 0)
NUMBERS = f"""{HEADER}.visible .entry k(.param .u64 to, .param .f32 x, .param .f64 y,
  .param .u32 n, .param .s16 s)
{{
.reg .b32 %r<4>; .reg .f32 %f<2>; .reg .f64 %fd<2>; .reg .b64 %rd<2>;
ld.param.u64 %rd0, [to]; ld.param.f32 %f0, [x]; ld.param.f64 %fd0, [y]; ld.param.u32 %r0, [n];
ld.param.s16 %r1, [s]; cvt.rn.f32.f64 %f1, %fd0;
st.global.f32 [%rd0], %f0; st.global.f32 [%rd0+4], %f1;
st.global.u32 [%rd0+8], %r0; st.global.u32 [%rd0+12], %r1; ret;
}}
"""


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"block": (1, 1, 128)}, r"block=\(1, 1, 128\), expected 1 to \(1024, 1024, 64\)"),
        ({"block": (-1, -32)}, r"block=\(-1, -32, 1\), expected"),
        ({"grid": (1, 70000)}, r"grid=\(1, 70000, 1\), expected 1 to \(2147483647, 65535, 65535\)"),
        ({"grid": (1, 1, 1, 5)}, "4 dimensions, expected 1 to 3"),
        ({"grid": ()}, "0 dimensions, expected 1 to 3"),
        ({"cluster": (-1, -1)}, r"cluster=\(-1, -1, 1\), expected"),
        ({"smem_bytes": -16}, "smem_bytes=-16, expected 0 or more"),
    ],
)
def test_a_launch_that_no_gpu_takes_is_an_error(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(NONE, "k", **{"grid": 1, "block": 32, "args": [], **asked})


def test_a_kernel_that_requires_a_cluster_gets_no_other() -> None:
    text = NONE.replace("\n)\n{", "\n)\n.reqnctapercluster 2\n{")
    run(text, "k", 4, 32, [])
    with pytest.raises(ValueError, match="which the kernel requires"):
        run(text, "k", 4, 32, [], cluster=4)


@pytest.mark.parametrize("wrap", [lambda x: x, np.float32, np.float64])
def test_numbers_become_what_the_parameter_is(wrap: Callable[[int], Any]) -> None:
    out = np.zeros(4, np.uint32)
    run(NUMBERS, "k", np.int64(1), 1, [out, wrap(3), wrap(3), np.uint32(7), -2])
    assert out[:2].view(np.float32).tolist() == [3, 3]
    assert out[2:].tolist() == [7, 2**32 - 2]


@pytest.mark.parametrize(
    ("number", "said"),
    [(1.5, "n=1.5, expected a whole number"), (1 << 32, "n=4294967296, expected a number of 32")],
)
def test_numbers_that_do_not_fit_are_errors(number: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(NUMBERS, "k", 1, 1, [np.zeros(4, np.uint32), 0.0, 0.0, number, 0])


def variable(declared: str, body: str) -> Array:
    out = np.zeros(1, np.uint32)
    text = kernel(f"{body}\nst.global.u32 [%rd0], %r9;", 1).replace(HEADER, HEADER + declared)
    run(text, "k", 1, 1, [out])
    return out


@pytest.mark.parametrize(
    ("declared", "bits"),
    [
        (".global .f32 v = 1.5;\n", 0x3FC00000),
        (".global .align 4 .u32 v[2] = {010, 9};\n", 8),
        (".const .f32 v = 0f40000000;\n", 0x40000000),
    ],
)
def test_variables_begin_as_they_are_declared(declared: str, bits: int) -> None:
    space = declared.split()[0]
    assert variable(declared, f"ld{space}.u32 %r9, [v];")[0] == bits


def test_nothing_lies_between_variables() -> None:
    declared = ".global .u32 v;\n.global .align 16 .u32 w;\n"
    with pytest.raises(EmulationError) as caught:
        variable(declared, "ld.global.u32 %r9, [v+4];")
    assert caught.value.report.kind is Kind.OUT_OF_BOUNDS


@pytest.mark.parametrize("value", ["generic(w)", "w", "{w, w}", "{{1}, {2, 3}}"])
def test_initial_values_that_are_not_modelled_are_errors_where_they_are_used(value: str) -> None:
    declared = f".global .u32 w;\n.global .u64 v[4] = {value};\n"
    assert variable(declared, "mov.u32 %r9, 4;")[0] == 4
    with pytest.raises(PtxError, match="the initial value of v is not modelled"):
        variable(declared, "ld.global.u32 %r9, [v];")
