"""Counting of math loops in disassembled kernels."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from types import ModuleType

import pytest

LISTING = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R9 ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R9 ;
        /*0040*/              @!P0 BRA `(.L_x_6) ;
.L_x_3:
        /*0050*/                   LDTM.x4 R4, tmem[UR6] ;
        /*0060*/                   FADD2 R4, R2.F32x2.HI_LO, |R2|.F32x2.HI_LO ;
        /*0070*/                   FMNMX.NAN R6, R6, RZ, !PT ;
        /*0080*/                   FFMA2 R8, R4.F32x2.HI_LO, UR4.F32x2.HI_LO, R8.F32x2.HI_LO ;
        /*0090*/                   FFMA2 R8, R6.F32x2.HI_LO, UR6.F32x2.HI_LO, R8.F32x2.HI_LO ;
        /*00a0*/                   BRA.U UP0, `(.L_x_4) ;
        /*00b0*/                   IMAD.WIDE R10, R3, 0x4, R10 ;
        /*00c0*/                   UIADD3 UR8, UPT, UPT, UR8, 0x1, URZ ;
        /*00d0*/                   BRA `(.L_x_5) ;
.L_x_4:
        /*00e0*/                   IADD3 R10, PT, PT, R10, 0x4, RZ ;
.L_x_5:
        /*00f0*/             @P1   STG.E desc[UR10][R10.64], R8 ;
        /*0100*/              @P0  BRA `(.L_x_2) ;
        /*0110*/                   FFMA2 R8, R6.F32x2.HI_LO, UR6.F32x2.HI_LO, R8.F32x2.HI_LO ;
        /*0120*/                   BRA `(.L_x_1) ;
.L_x_6:
        /*0130*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R9 ;
        /*0140*/              @!P0 BRA `(.L_x_6) ;
        /*0150*/                   BRA `(.L_x_3) ;
.L_x_7:
        /*0160*/                   BRA `(.L_x_7);
        /*0170*/                   NOP ;
"""


@pytest.fixture(scope="module")
def counter(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("count_pipes")


def test_the_loop_with_most_work_is_counted_on_its_longest_way(counter: ModuleType) -> None:
    """Its wait passes at once, though it spins out of line."""
    loop = counter.math_loop(counter.parse(LISTING))
    assert [one.opcode for one in loop] == [
        *("SYNCS", "BRA", "LDTM", "FADD2", "FMNMX", "FFMA2", "FFMA2"),
        *("BRA", "IMAD", "UIADD3", "BRA", "STG", "BRA"),
    ]


def test_a_wait_that_spins_in_place_is_counted_once(counter: ModuleType) -> None:
    """All of the larger loop, where the smaller one has no work."""
    listing = LISTING.replace("`(.L_x_2)", "`(.L_x_1)")
    assert [one.opcode for one in counter.math_loop(counter.parse(listing))][:4] == [
        *("SYNCS", "BRA", "SYNCS", "BRA")
    ]


def test_clocks_a_pair_follow_from_lanes(counter: ModuleType) -> None:
    """4 dots are a pair of 4 heads."""
    loop = counter.math_loop(counter.parse(LISTING))
    assert counter.elements(loop) == 4
    assert counter.clocks(loop, heads=4) == {
        "fma": (2 + 2 * 2 + 2) / 128,
        "alu": pytest.approx(1 / 64, abs=1e-4),
        "issue": pytest.approx(13 / 128, abs=1e-4),
    }


def test_what_is_not_known_is_taken_for_the_alu(counter: ModuleType) -> None:
    loop = counter.math_loop(counter.parse(LISTING.replace("UIADD3 UR8", "ABACUS R8")))
    assert counter.clocks(loop, heads=4)["alu"] == pytest.approx(2 / 64, abs=1e-4)


def test_a_way_that_does_not_store_each_pair_is_refused(counter: ModuleType) -> None:
    loop = counter.math_loop(counter.parse(LISTING))
    with pytest.raises(ValueError, match="1 stores for 2 pairs, expected one each"):
        counter.clocks(loop, heads=2)


def test_a_listing_without_such_a_loop_is_refused(counter: ModuleType) -> None:
    with pytest.raises(ValueError, match="no loop has packed multiply-adds"):
        counter.math_loop(counter.parse("/*0000*/ EXIT ;"))
    inside = LISTING.replace("@P1   STG.E desc[UR10][R10.64], R8", "@P2   BRA `(.L_x_3)")
    more = inside.replace(".L_x_2:\n", ".L_x_2:\n" + "/*0030*/ FFMA2 R0, R0, R0, R0 ;\n" * 3)
    with pytest.raises(ValueError, match="a loop inside the math loop"):
        counter.math_loop(counter.parse(more))


def test_without_a_disassembler_that_is_said(
    counter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(FileNotFoundError, match="the package nvidia-cuda-nvdisasm has it"):
        counter.disassembled(b"")
