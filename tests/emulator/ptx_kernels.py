"""Small PTX kernels for tests: one warp loads operands, does something, and stores results."""

from __future__ import annotations

from typing import Any

import numpy as np

from mqa.emulator import run

Array = np.ndarray[Any, Any]


def header(target: str) -> str:
    return f".version 9.0\n.target {target}\n.address_size 64\n"


HEADER = header("sm_90a")
REGISTERS = """
.reg .pred %p<16>;
.reg .b16 %rs<32>;
.reg .b32 %r<256>;
.reg .f32 %f<160>;
.reg .b64 %rd<64>;
.reg .f64 %fd<16>;
"""


def kernel(body: str, params: int, *, shared: str = "", target: str = "sm_90a") -> str:
    """A kernel `k` with 8-byte parameters; %rd<i> holds parameter i, %r0 the thread's number."""
    names = ",\n".join(f".param .u64 p{i}" for i in range(params))
    loads = "".join(f"ld.param.u64 %rd{i}, [p{i}];\n" for i in range(params))
    start = f"{REGISTERS}\n{shared}\n{loads}\nmov.u32 %r0, %tid.x;\n"
    return f"{header(target)}.visible .entry k(\n{names}\n)\n{{\n{start}{body}\nret;\n}}\n"


def applied(body: str, inputs: list[Array], result: Any, target: str = "sm_90a") -> str:
    """The kernel of `apply`: parameters are the inputs, then where `out` is stored."""
    text, out = "", np.dtype(result)
    for i, array in enumerate(inputs):
        size = array.dtype.itemsize
        name = _register(array.dtype, 40 // size + i if size > 4 else 20 + i)
        text += f"mul.wide.u32 %rd50, %r0, {size};\nadd.s64 %rd51, %rd{i}, %rd50;\n"
        text += f"ld.global.{_kind(array.dtype)} {name}, [%rd51];\n"
        body = body.replace(f"in{i}", name)
    name, count = _register(out, 12), len(inputs)
    text += body.replace("out", name)
    text += f"mul.wide.u32 %rd52, %r0, {out.itemsize};\nadd.s64 %rd53, %rd{count}, %rd52;\n"
    text += f"st.global.{_kind(out)} [%rd53], {name};\n"
    return kernel(text, count + 1, target=target)


def apply(
    body: str, inputs: list[Array], result: Any, *, threads: int = 32, target: str = "sm_90a"
) -> Array:
    """Registers %r/%f/... named in0, in1, ... are loaded from arrays, `out` is stored.

    `body` says in0, in1 and out; their registers follow from the dtypes.
    """
    out = np.zeros(threads, result)
    run(applied(body, inputs, result, target), "k", 1, threads, [*inputs, out])
    return out


def _register(dtype: np.dtype[Any], number: int) -> str:
    kind = {"float32": "f", "float64": "fd"}.get(dtype.name)
    return f"%{kind or {2: 'rs', 4: 'r', 8: 'rd'}[dtype.itemsize]}{number}"


def _kind(dtype: np.dtype[Any]) -> str:
    if dtype.name in ("float32", "float64"):
        return f"f{8 * dtype.itemsize}"
    return f"u{8 * dtype.itemsize}"
