"""Threads of a warp access several tensors and address spaces by one instruction."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import Array, kernel

from mqa.emulator import EmulationError, Kind, run

SHARED = ".shared .align 16 .b8 cells[512];\n.local .align 8 .b8 own[16];\n"
PICK = """
mul.wide.u32 %rd9, %r0, 4;
mov.u64 %rd10, cells;
add.s64 %rd10, %rd10, %rd9;
setp.lt.u32 %p1, %r0, 16;
selp.b64 %rd11, %rd1, %rd2, %p1;
add.s64 %rd11, %rd11, %rd9;
"""
STORE = "add.s64 %rd12, %rd0, %rd9;\nst.global.u32 [%rd12], %r9;\n"
FIRST, SECOND = np.arange(32, dtype=np.uint32), np.arange(100, 132, dtype=np.uint32)
WANTED = np.where(FIRST < 16, FIRST, SECOND)


def result(body: str, *tensors: Array) -> Array:
    out = np.zeros(32, np.uint32)
    text = kernel(PICK + body + STORE, 1 + len(tensors), shared=SHARED)
    run(text, "k", 1, 32, [out, *tensors], schedule="hunt")
    return out


@pytest.mark.parametrize(
    "body",
    [
        "ld.global.u32 %r9, [%rd11];\n",
        "ld.u32 %r9, [%rd11];\n",
        (
            "cvt.u32.u64 %r8, %rd10;\ncp.async.ca.shared.global [%r8], [%rd11], 4;\n"
            "cp.async.wait_all;\nld.shared.u32 %r9, [%r8];\n"
        ),
    ],
)
def test_threads_load_from_several_tensors(body: str) -> None:
    assert (result(body, FIRST.copy(), SECOND.copy()) == WANTED).all()


def test_threads_store_to_several_tensors() -> None:
    first, second = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    result("mov.u32 %r9, 0;\nst.global.u32 [%rd11], %r0;\n", first, second)
    assert (first + second == FIRST).all()
    assert not second[:16].any()
    assert not first[16:].any()


def test_one_of_several_tensors_has_bounds_of_its_own() -> None:
    with pytest.raises(EmulationError) as caught:
        result("ld.global.u32 %r9, [%rd11];\n", FIRST.copy(), SECOND[:20].copy())
    assert caught.value.report.kind is Kind.OUT_OF_BOUNDS


def test_rows_of_two_tensors_may_take_turns_in_memory() -> None:
    both = np.arange(64, dtype=np.uint32).reshape(8, 2, 4)
    body = """
    and.b32 %r1, %r0, 3;
    shr.u32 %r2, %r0, 2;
    mad.lo.u32 %r1, %r2, 8, %r1;
    mul.wide.u32 %rd11, %r1, 4;
    add.s64 %rd13, %rd1, %rd11;
    add.s64 %rd11, %rd2, %rd11;
    ld.global.u32 %r9, [%rd11];
    ld.global.u32 %r8, [%rd13];
    sub.u32 %r9, %r9, %r8;
    """
    assert (result(body, both[:, 0], both[:, 1]) == 4).all()


@pytest.mark.parametrize("order", ["%rd14, %rd11", "%rd11, %rd14"])
@pytest.mark.parametrize("space", ["shared", "local"])
def test_generic_addresses_lie_in_several_spaces(space: str, order: str) -> None:
    body = f"""
    mov.u64 %rd15, own;
    {"mov.u64 %rd10, %rd15;" if space == "local" else ""}
    mov.u32 %r8, 7;
    st.{space}.u32 [%rd10], %r8;
    cvta.{space}.u64 %rd14, %rd10;
    selp.b64 %rd16, {order}, %p1;
    ld.u32 %r9, [%rd16];
    add.u32 %r9, %r9, 1;
    st.u32 [%rd16], %r9;
    ld.u32 %r9, [%rd16];
    """
    first = FIRST.copy()
    own = (FIRST < 16) == (order == "%rd14, %rd11")
    assert (result(body, first, first) == np.where(own, 8, FIRST + 1)).all()
    assert (first == np.where(own, FIRST, FIRST + 1)).all()


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (
            "mov.u64 %rd3, 0xf000000000000010;\nld.u32 %r9, [%rd3];\n",
            Kind.OUT_OF_BOUNDS,
            "generic address 0xf000000000000010 is in no address space",
        ),
        (
            "mov.u64 %rd3, own;\nst.local.u32 [%rd3+2], %r0;\n",
            Kind.MISALIGNED,
            "access of 4 bytes at byte 2 of local memory",
        ),
        (
            "mov.u64 %rd3, own;\nld.local.u32 %r9, [%rd3+16];\n",
            Kind.OUT_OF_BOUNDS,
            "access of 4 bytes at byte 16 of 16 of local memory",
        ),
        (
            "mov.u64 %rd3, own;\nld.local.u32 %r9, [%rd3+8];\n",
            Kind.UNWRITTEN,
            "byte 8 of local memory",
        ),
    ],
)
def test_wrong_addresses_are_found(body: str, kind: Kind, said: str) -> None:
    with pytest.raises(EmulationError) as caught:
        result(body + "mov.u32 %r8, %r9;\n", FIRST.copy(), SECOND.copy())
    assert caught.value.report.kind is kind
    assert said in str(caught.value)
