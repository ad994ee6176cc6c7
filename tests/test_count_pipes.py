"""Counting of math loops in disassembled kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

LISTING = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
.L_x_1:
        /*0010*/              @!P0 BRA `(.L_x_4) ;
.L_x_2:
        /*0020*/                   FADD2 R4, R2.F32x2.HI_LO, |R2|.F32x2.HI_LO ;
        /*0030*/                   FMNMX.NAN R6, R6, RZ, !PT ;
        /*0040*/                   FFMA2 R8, R4.F32x2.HI_LO, UR4.F32x2.HI_LO, R8.F32x2.HI_LO ;
        /*0050*/                   FFMA2 R8, R6.F32x2.HI_LO, UR6.F32x2.HI_LO, R8.F32x2.HI_LO ;
        /*0060*/                   IMAD.WIDE R10, R3, 0x4, R10 ;
        /*0070*/             @P1   ISETP.GE.AND P0, PT, R3, UR5, PT ;
        /*0080*/             @P0   BRA `(.L_x_2) ;
        /*0090*/                   FFMA2 R8, R6.F32x2.HI_LO, UR6.F32x2.HI_LO, R8.F32x2.HI_LO ;
        /*00a0*/                   BRA `(.L_x_1) ;
.L_x_4:
        /*00b0*/                   EXIT ;
"""


@pytest.fixture(scope="module")
def counter(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("count_pipes")


def test_the_shortest_loop_with_half_of_the_work_is_counted(counter: ModuleType) -> None:
    loop = counter.math_loop(counter.parse(LISTING))
    assert [one.opcode for one in loop] == [
        *("FADD2", "FMNMX", "FFMA2", "FFMA2", "IMAD", "ISETP", "BRA")
    ]


def test_clocks_a_pair_follow_from_lanes(counter: ModuleType) -> None:
    """Two multiply-adds of two heads are four elements: half a pair of 8 heads."""
    loop = counter.math_loop(counter.parse(LISTING))
    assert counter.clocks(loop, heads=8) == {
        "fma": (2 + 4 + 2) / 128 / 0.5,
        "alu": 2 / 64 / 0.5,
        "issue": pytest.approx(7 / 128 / 0.5, abs=1e-4),
    }


def test_a_listing_without_such_a_loop_is_refused(counter: ModuleType) -> None:
    with pytest.raises(ValueError, match="no loop has half of the 0"):
        counter.math_loop(counter.parse("/*0000*/ EXIT ;"))


def test_without_a_disassembler_that_is_said(
    counter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(FileNotFoundError, match="nvdisasm is neither on PATH"):
        counter.disassembled(b"")
