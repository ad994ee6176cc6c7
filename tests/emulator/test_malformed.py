"""What is malformed, or not modelled, is an error that names it and its line."""

from __future__ import annotations

import pytest
from ptx_kernels import HEADER, kernel

from mqa.emulator import PtxError, grammar, run
from mqa.emulator.alu import ALU
from mqa.emulator.program import EFFECTS, Program

SHORT = {
    "$TMMA": "tcgen05.mma",
    "$FILL": "collector::a::fill",
    "$CAST": "shared::cluster.multicast::cluster",
    "$TILE": "cp.async.bulk.tensor",
    "$TX": "mbarrier::complete_tx::bytes",
    "$WARP": "mma.sync.aligned",
    "$A": "{%r1,%r2,%r3,%r4}",
    "$MMA": "wgmma.mma_async.sync.aligned",
    "$D": "{%f1,%f2,%f3,%f4}",
    "$IN": "shared::cluster.global",
    "$OUT": "global.shared::cta",
}
LINE = 19
TOGETHER = [
    # What ptxas refuses since modifiers or operands do not go together.
    ("add.s32 %r1, %r2, %f1;", "operand %f1 is a float, and the type is .s32"),
    ("mov.u32 %r1, 0f3F800000;", "operand 0f3F800000 is a float"),
    ("mov.f32 %f1, 1;", "operand 1 is no float"),
    ("max.NaN.u32 %r1, %r2, %r3;", ".NaN is no modifier of .u32"),
    ("ld.global.f16 %rs1, [%rd1];", "type .f16 is no type of it"),
    ("ld.global.u32 %rs1, [%rd1];", "register %rs1 is declared .b16"),
    ("ld.global.u32 %f1, [%rd1];", "register %f1 is declared .f32"),
    ("st.global.u32 [%rd1], %rs1;", "register %rs1 is declared .b16"),
    ("ld.global.pred %p1, [%rd1];", "type .pred is no type of it"),
    ("ld.global.shared.u32 %r1, [%rd1];", "expected one state space"),
    ("ld.global.v2.v4.u32 {%r1,%r2}, [%rd1];", "expected one "),
    ("ld.volatile.relaxed.gpu.global.u32 %r1, [%rd1];", "expected one memory order"),
    ("ld.relaxed.global.u32 %r1, [%rd1];", ".relaxed needs a scope"),
    ("ld.global.gpu.u32 %r1, [%rd1];", "scope .gpu needs a memory order"),
    ("ld.release.gpu.global.u32 %r1, [%rd1];", ".release is no memory order of it"),
    ("st.acquire.gpu.global.u32 [%rd1], %r1;", ".acquire is no memory order of it"),
    ("ld.global.wb.u32 %r1, [%rd1];", ".wb is no cache operator of it"),
    ("ld.shared.nc.u32 %r1, [%rd1];", ".nc stands in ld.global alone"),
    ("st.const.u32 [%rd1], %r1;", "state space .const is not written"),
    ("ld.global.u32 %r1, [%r2];", "address %r2 is declared .b32, expected 64 bits"),
    ("atom.global.add.u32 %rd1, [%rd1], %r2;", "register %rd1 is declared .b64"),
    ("red.acquire.gpu.global.add.u32 [%rd1], %r1;", ".acquire is no memory order of it"),
    ("red.global.exch.b32 [%rd1], %r1;", ".exch gives a result"),
    ("shf.l.b32 %r1, %r2, %r3, %r4;", "these modifiers do not go together"),
    ("bar.sync 16;", "barrier 16, expected 0 to 15"),
    ("bar.sync 1, 63;", "63 threads, expected a multiple of 32"),
    ("bar.sync.aligned 1;", ".aligned is no modifier of bar"),
    ("match.any.sync.b32 %r1|%p1, %r2, -1;", "expected one result"),
    ("shfl.sync.up.b32 %r1, %r2, %rs1, 0, -1;", "register %rs1 is declared .b16, expected 32 bits"),
    ("fence.sc;", "these modifiers do not go together"),
    ("fence.async.proxy;", "these modifiers do not go together"),
    ("membar;", "these modifiers do not go together"),
    ("mbarrier.init.shared [%r1], %r2;", "expected .b64 at the end"),
    (
        "mbarrier.arrive.shared.b64 %rd1, [%r1], %rd2;",
        "register %rd2 is declared .b64, expected 32 bits",
    ),
    ("mbarrier.arrive.release.b64 %rd1, [%rd2];", ".release needs a scope"),
    ("mbarrier.arrive.noComplete.expect_tx.b64 %rd1, [%rd2], 1;", "exclude each other"),
    (
        "mbarrier.test_wait.shared.b64 %p1, [%r1], %r2;",
        "register %r2 is declared .b32, expected 64 bits",
    ),
    ("cp.async.cg.shared.global [%r1], [%rd1], 4;", "4 bytes, expected 16 with .cg"),
    ("cp.async.ca.global.shared [%r1], [%rd1], 16;", "expected .shared and .global, in this order"),
    ("cp.async.bulk.$IN [%r1], [%rd1], 16, [%r2];", "expected one way to tell that it is done"),
    ("cp.async.bulk.$IN.$TX [%r1], [%rd1], 16, [%r2], %rd3;", "5 operands, expected 4"),
    ("$TILE.2d.$OUT [%rd1, {%r2, %r3}], [%r4];", "expected one way to tell that it is done"),
    ("setmaxnreg.dec.aligned.u32 40;", "expected .sync.aligned"),
    ("wgmma.wait_group.sync.aligned -1;", "-1 groups, expected 0 or more"),
]
"""Of the text in the kernel."""
CASES = [
    ("add.s32 %r1, %r2;", "2 operands, expected 3"),
    ("add.s32 %r1, %r2, %r3, %r4;", "4 operands, expected 3"),
    ("add.b32 %r1, %r2, %r3;", "type .b32 is not modelled"),
    ("add.s32 %r1, %r2, %rd3;", "register %rd3 is declared .b64, expected 32 bits"),
    ("add.s32 5, %r2, %r3;", "result 5 is no register"),
    ("add %r1, %r2, %r3;", "expected a type"),
    ("add.s32 %r1, %r2, [%rd1];", "operand [%rd1] is not a value of type u32"),
    ("add.s32 %r1, %r2, {%r1,%r2};", "operand {%r1, %r2} is not a value of type u32"),
    ("add.s32 %r1, %r2, label;", "operand label is not a value of type u32"),
    ("and.s32 %r1, %r2, %r3;", "type .s32 is not modelled"),
    ("and.f32 %f1, %f2, %f3;", "type .f32 is not modelled"),
    ("shl.s32 %r1, %r2, %r3;", "type .s32 is not modelled"),
    ("mul.s32 %r1, %r2, %r3;", "expected one of .lo, .hi and .wide"),
    ("mul.lo.f32 %f1, %f2, %f3;", "expected none of .lo, .hi and .wide"),
    ("rem.f32 %f1, %f2, %f3;", "type .f32 is not modelled"),
    ("fma.f32 %f1, %f2, %f3, %f4;", "expected how to round"),
    ("cvt.s32.f32 %r1, %f1;", "expected how to round to an integer"),
    ("cvt.s32 %r1, %f1;", "expected two types"),
    ("cvt.rn.e5m2x2.f32 %rs1, %f1, %f2;", "modifiers ['rn'] are not modelled"),
    ("cvt.rz.satfinite.e4m3x2.f32 %rs1, %f1, %f2;", "are not modelled"),
    ("cvt.rn.satfinite.e2m3x2.f16x2 %rs1, %r1;", "this conversion is not modelled"),
    ("cvt.rn.satfinite.e4m3x4.f32 %r1, {%f1,%f2,%f3,%f4}, %r2;", "3 operands, expected 2"),
    ("cvt.rs.f16x2.f32 %r1, %f1, %f2, %r2;", "4 operands, expected 3"),
    ("cvt.rm.bf16x2.f32 %r1, %f1, %f2;", "modifiers ['rm'] are not modelled"),
    ("cvt.f32.s32 %f1, %r1;", "expected how to round"),
    ("cvt.f16.f32 %rs1, %f1;", "modifiers [] are not modelled"),
    ("cvt.rz.f32.s64 %f1, %rd1;", "this conversion is not modelled"),
    ("cvt.ftz.f64.f16 %fd1, %rs1;", "this conversion is not modelled"),
    ("add.rn.sat.f32x2 %rd1, %rd2, %rd3;", "this form is not modelled"),
    ("add.rn.rz.f32 %f1, %f2, %f3;", "this form is not modelled"),
    ("add.sat.bf16x2 %r1, %r2, %r3;", "this form is not modelled"),
    ("add.f32.bf16 %f1, %f2, %f3;", "register %f2 is declared .f32, expected 16 bits"),
    ("mul.f32.bf16 %f1, %rs2, %f3;", "register %f1 is declared .f32, expected 16 bits"),
    ("fma.rn.f32x2 %rd1, %rd2, %r3, %rd4;", "register %r3 is declared .b32, expected 64 bits"),
    ("max.f32x2 %rd1, %rd2, %rd3;", "type .f32x2 is not modelled"),
    ("max.abs.f32 %f1, %f2, %f3;", "this form is not modelled"),
    ("max.relu.u32 %r1, %r2, %r3;", "modifier .relu is not modelled"),
    ("max.bf16 %rs1, %rs2, %rs3, %rs4;", "4 operands, expected 3"),
    ("rcp.f32 %f1, %f2;", "expected how to round"),
    ("rsqrt.rn.f32 %f1, %f2;", "expected .approx"),
    ("ex2.approx.bf16 %rs1, %rs2;", "this form is not modelled"),
    ("tanh.rn.f32 %f1, %f2;", "this form is not modelled"),
    ("testp.odd.f32 %p1, %f1;", "modifier .odd is not modelled"),
    ("set.lt.f32 %r1, %f1, %f2;", "expected a comparison and two types"),
    ("set.lt.u64.f32 %rd1, %f1, %f2;", "types .u64.f32 are not modelled"),
    ("set.lt.f32.f16x2 %f1, %r1, %r2;", "types .f32.f16x2 are not modelled"),
    ("dp2a.s32.s32 %r1, %r2, %r3, %r4;", "expected .lo or .hi of dp2a alone"),
    ("vabsdiff4.s32.s32.s32 %r1, %r2, %r3, %r4;", "this form is not modelled"),
    ("setp.s32 %p1, %r1, %r2;", "comparison .(none) of .s32 is not modelled"),
    ("setp.zz.s32 %p1, %r1, %r2;", "comparison .zz of .s32 is not modelled"),
    ("setp.ls.s32 %p1, %r1, %r2;", "comparison .ls of .s32 is not modelled"),
    ("setp.lt.s32 %r1, %r1, %r2;", "register %r1 is declared .b32, expected a predicate"),
    ("setp.lt.f16x2 %p1, %r1, %r2;", "expected a pair of results"),
    ("selp.b32 %r1, %r2, %r3, %r4;", "register %r4 is declared .b32, expected a predicate"),
    ("mov.b32 %r1, {%rs1, %rs2, %rs3};", "{%rs1, %rs2, %rs3} are no parts of 32 bits"),
    ("mov.b64 %rd1, {%rs1, %rs2};", "{%rs1, %rs2} are no parts of 64 bits"),
    ("mov.u32 %r1, %globaltimer_lo;", "special register %globaltimer_lo is not modelled"),
    ("add.u32 %r1, %clock, %r2;", "clocks are read by mov alone"),
    ("mov.u64 %rd1, %clock;", "%clock is read as .u32"),
    ("mov.f32 %f1, %clock;", "%clock is read as .u32"),
    ("mov.u32 %r1, %nosuch;", "special register %nosuch is not modelled"),
    ("mov.u32 %r1, nosuch;", "operand nosuch is not a value of type u32"),
    ("mov.u32 %r1, 0x;", "operand 0x is not a value of type u32"),
    ("mov.u32 %r1, 12abc;", "operand 12abc is not a value of type u32"),
    ("mov.f32 %f1, 0f3F80;", "operand 0f3F80 is not a value of type f32"),
    ("lop3.b32 %r1, %r2, %r3, %r4, %r5;", "the table has to be a number"),
    ("addc.u32 %r1, %r2, %r3;", "this instruction is not modelled"),
    ("clusterlaunchcontrol.try_cancel.async [%r1], [%r2];", "this instruction is not modelled"),
    ("brx.idx %r1, nosuch;", "nosuch is no list of branch targets"),
    ("@%r1 add.s32 %r1, %r2, %r3;", "add.s32: register %r1 is declared .b32, no predicate"),
    ("@5 add.s32 %r1, %r2, %r3;", "predicate '5' is no register"),
    ("bra %r1;", "label %r1 is not defined"),
    ("bra;", "label  is not defined"),
    ("ld.global.u32 %r1, %rd1;", "%rd1 is no address"),
    ("ld.global.u32 %r1, [%rd1;", "'[%rd1' is not closed"),
    ("ld.global.u32 %r1, [%rd1+];", "%rd1+ is not declared"),
    ("ld.global.u32 %r1;", "1 operands, expected 2 or 3"),
    ("ld.global.q32 %r1, [%rd1];", "type .q32 is not modelled"),
    ("ld.global.v2.u32 %r1, [%rd1];", "expected 2 registers, got 1"),
    ("ld.global.v4.u32 {%r1,%r2}, [%rd1];", "expected 4 registers, got 2"),
    ("ld.param.u32 %r1, [nosuch];", "nosuch is not declared"),
    ("ld.shared.u32 [%rd1], %r1;", "result [%rd1] is no register"),
    ("st.global.v2.u32 [%rd1], {%r1,%r2,%r3};", "expected 2 registers, got 3"),
    ("st.global [%rd1], %r1;", "type .global is not modelled"),
    ("st %r1;", "1 operands, expected 2 or 3"),
    ("atom.global.cas.b32 %r1, [%rd1], %r2;", "3 operands, expected 4"),
    ("atom.global.add.s64 %rd1, [%rd2], %rd3;", "this form is not modelled"),
    ("atom.global.mul.u32 %r1, [%rd2], %r3;", "this form is not modelled"),
    ("atom.global.add.f16 %rs1, [%rd2], %rs3;", "expected .noftz"),
    ("atom.shared.add.v2.f32 {%f1,%f2}, [%rd2], {%f3,%f4};", "this form is not modelled"),
    ("atom.global.add.v2.f32 {%f1,%f2}, [%rd2], {%f3};", "expected 2 registers"),
    ("st.async.mmio.release.sys.global.b32 [%rd1], %r1, [%r2];", "this form is not modelled"),
    ("red.async.relaxed.cluster.add.u32 [%r1], %r2, [%r3];", "this form is not modelled"),
    ("st.bulk.weak.shared::cta [%rd1], 64, 1;", "this form is not modelled"),
    ("ld.shared.v8.u32 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%r9];", "expected at most 16 bytes"),
    ("atom.add %r1, [%rd1], %r2;", "this form is not modelled"),
    ("red.global.add.v8.f32 [%rd1], {%f1,%f2};", "this form is not modelled"),
    ("redux.sync.add.f32 %f1, %f2, -1;", "this reduction is not modelled"),
    ("shfl.sync.b32 %r1, %r2, 1, 31, -1;", "expected one of .up, .down, .bfly and .idx, and .b32"),
    ("shfl.sync.left.b32 %r1, %r2, 1, 31, -1;", "modifier .left is not modelled"),
    ("shfl.sync.idx.b32 %r1, %r2, 1, 31;", "4 operands, expected 5"),
    ("vote.sync.none.pred %p1, %p2, -1;", "modifier .none is not modelled"),
    ("redux.sync.add.b32 %r1, %r2, -1;", "this reduction is not modelled"),
    ("redux.sync.mul.u32 %r1, %r2, -1;", "this reduction is not modelled"),
    ("elect.sync %r1, -1;", "expected a pair of results"),
    ("bar.sync;", "bar.sync: 0 operands, expected 1 or 2"),
    ("bar.sync 0, 32, 5;", "3 operands, expected 1 or 2"),
    ("bar.red.xor.pred %p1, 0, %p2;", "modifier .xor is not modelled"),
    ("bar.arrive 0;", "1 operands, expected 2"),
    ("setmaxnreg.sync.aligned.u32 40;", "expected .inc or .dec"),
    ("setmaxnreg.inc.sync.aligned.u32 %r1;", "%r1 has to be a number"),
    ("mbarrier.init.b64 [%rd1];", "1 operands, expected 2"),
    ("mbarrier.arrive.multicast.b64 _, [%rd1];", "modifier .multicast is not modelled"),
    (
        "mbarrier.try_wait.parity.relaxed.gpu.frob.b64 %p1, [%rd1], 0;",
        "modifier .frob is not modelled",
    ),
    ("mbarrier.try_wait.b64 %r1, [%rd1], 0;", "%r1 is no predicate"),
    ("fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;", "2 operands, expected 0"),
    ("fence.frob;", "fence.frob: modifier .frob is not modelled"),
    ("cp.async.ca.shared.global [%r1], [%rd1], 5;", "5 bytes, expected 4, 8 or 16"),
    ("cp.async.ca.shared.global [%r1], [%rd1], %r3;", "%r3 has to be a number"),
    ("cp.async.ca.shared.global [%r1], [%rd1], 4, %r2, %rd2;", "5 operands, expected 3 or 4"),
    ("cp.async.ca.shared.global.L2::cache_hint [%r1], [%rd1], 4;", "3 operands, expected 4 or 5"),
    ("cp.async.zz.shared.global [%r1], [%rd1], 4;", "this instruction is not modelled"),
    ("cp.async.wait_group %r1;", "%r1 has to be a number"),
    ("cp.async.bulk.frob.global [%r1], [%rd1], 16, [%r2];", "this form is not modelled"),
    (
        "cp.async.bulk.$IN.$TX.multicast::cluster [%r1], [%rd1], 16, [%r2];",
        "4 operands are too few",
    ),
    ("cp.async.bulk.$IN.$TX [%r1], [%rd1], 16;", "3 operands are too few"),
    ("$TILE.6d.$IN.$TX [%r1], [%rd1, {1}], [%r2];", "expected 1d to 5d, got 6d"),
    ("$TILE.2d.$IN.$TX [%r1], [%rd1, {1}], [%r2];", "expected a tensor map and 2 coordinates"),
    ("$TILE.2d.$IN.im2col.$TX [%r1], [%rd1, {1,2}], [%r2];", "this form is not modelled"),
    ("$TILE.2d.$IN.tile::gather4.$TX [%r1], [%rd1, {1,2}], [%r2];", "this form is not modelled"),
    ("$TILE [%r1];", "1 operands, expected 2 or 3 or 4 or 5"),
    (
        "cp.reduce.async.bulk.$OUT.bulk_group.add.f16 [%rd1], [%r1], 16;",
        "expected .noftz, which says that subnormal numbers stay",
    ),
    (
        "cp.reduce.async.bulk.$OUT.bulk_group.inc.u64 [%rd1], [%r1], 16;",
        "this form is not modelled",
    ),
    (
        "cp.reduce.async.bulk.tensor.2d.$OUT.mul.bulk_group [%rd1, {1,2}], [%r1];",
        "this form is not modelled",
    ),
    ("cp.async.bulk.wait_group %r1;", "%r1 has to be a number"),
    (
        "$MMA.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3}, %rd1, %rd2, %p1, 1, 1, 0, 0;",
        "expected 4 registers of the accumulator",
    ),
    (
        "$MMA.m64n8k16.f32.bf16.bf16 $D, %rd1, %rd2, %p1, 1, 1;",
        "trailing operands [1, 1], expected 2 signs and 2 majors",
    ),
    (
        "$MMA.m64n8k16.f32.bf16.bf16 $D, %rd1, %rd2, %p1, 2, 1, 0, 0;",
        "trailing operands [2, 1, 0, 0], expected 2 signs",
    ),
    (
        "$MMA.m64n8k16.f32.bf16.bf16 $D, %rd1, %rd2, %p1, 1, 1, 0, 2;",
        "trailing operands [1, 1, 0, 2], expected 2 signs",
    ),
    (
        "$MMA.m64n8k32.f32.e4m3.e4m3 $D, %rd1, %rd2, %p1, 1, 1, 0, 0;",
        "trailing operands [1, 1, 0, 0], expected 2 signs and 0",
    ),
    ("$MMA.m64n12k32.f32.e4m3.e4m3 $D, %rd1, %rd2, %p1, 1, 1;", "shape m64n12k32 is none of e4m3"),
    ("$MMA.m64n8k16.f32.e4m3.e4m3 $D, %rd1, %rd2, %p1, 1, 1;", "shape m64n8k16 is none of e4m3"),
    (
        "$MMA.m64n40k32.s32.s8.s8 {%r1,%r2,%r3,%r4}, %rd1, %rd2, %p1;",
        "shape m64n40k32 is none of s32.s8.s8",
    ),
    ("$MMA.m64n8k16.f32.f8.f8 $D, %rd1, %rd2, %p1, 1, 1;", "these types are not modelled"),
    (
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 $D, %rd1, %rd2, %r1, 0, %p1;",
        "this instruction is not modelled",
    ),
    ("$MMA {%f1};", "1 operands, expected 4 or 5 or 6 or 7 or 8"),
    ("wgmma.wait_group.sync.aligned %r1;", "expected a number of groups"),
    ("$WARP.m16n8k16.row.row.f32.f16.f16.f32 $D, $A, {%r5,%r6}, $D;", "and .row.col"),
    (
        "$WARP.m16n8k32.row.col.s32.s8.s8.s32 $A, $A, {%r5,%r6}, $A;",
        "expected .m16n8k8 or .m16n8k16",
    ),
    ("$WARP.m16n8k8.row.col.f32.tf32.tf32.f32 $D, $A, {%r5,%r6}, $D;", "f32.tf32.tf32.f32 are not"),
    ("$WARP.m16n8k8.row.col.f32.f16.f16.f32 $D, $A, {%r5}, $D;", "expected 2 registers in braces"),
    ("$WARP.m16n8k16.row.col.f32.f16.f16.f32 $D, $A, {%r5,%rd6}, $D;", "%rd6 is declared .b64"),
    ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1,%r2}, [%r5];", "expected .m8n8"),
    ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1,%rs2}, [%r5];", "%rs2 is declared .b16"),
    ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r5], {%r1};", "this instruction is not modelled"),
    (
        "tcgen05.shift.cta_group::1.down [%r1];",
        "this instruction is not modelled",
    ),
    ("$TMMA.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;", ".ws is not modelled"),
    ("$TMMA.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r3], %r2, %p1;", ".sp is not modelled"),
    ("$TMMA.cta_group::1.kind::f64 [%r1], %rd1, %rd2, %r2, %p1;", "kind::f64 is not modelled"),
    ("$TMMA.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;", "expected .cta_group::1 or .cta_group::2"),
    ("$TMMA.cta_group::1.kind::f16.ashift [%r1], [%r3], %rd2, %r2, %p1;", "modifier .ashift"),
    ("$TMMA.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, {%r3}, %p1;", "1 words of lanes"),
    ("$TMMA.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1, 16;", "expected 0 to 15"),
    ("$TMMA.cta_group::1.kind::f8f6f4 [%r1], %rd1, %rd2, %r2, %p1, 1;", "operands are too many"),
    ("$TMMA.cta_group::1.kind::mxf4 [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1;", ".block_scale"),
    (
        "$TMMA.cta_group::1.kind::mxf4nvf4.block_scale [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1;",
        "blocks of scales [] are none of kind::mxf4nvf4",
    ),
    (
        "$TMMA.cta_group::1.kind::mxf4.block_scale.block16 [%r1], %rd1, %rd2, %r2, [%r3], [%r4];",
        "blocks of scales ['block16'] are none of kind::mxf4",
    ),
    (
        "$TMMA.cta_group::1.kind::f16 [%rd1], %rd1, %rd2, %r2, %p1;",
        "register %rd1 is declared .b64",
    ),
    ("$TMMA.cta_group::1.kind::f16 [0], %rd1, %rd2, %r2, %p1;", "expected an address of tensor"),
    ("$TMMA.cta_group::1.kind::f16 [%r1], %r9, %rd2, %r2, %p1;", "register %r9 is declared .b32"),
    ("$TMMA.cta_group::1.kind::f16 [%r1], %rd1, %r9, %r2, %p1;", "register %r9 is declared .b32"),
    (
        "$TMMA.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %rd3, %p1;",
        "register %rd3 is declared .b64",
    ),
    ("$TMMA.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %f3, %p1;", "register %f3 is declared .f32"),
    ("$TMMA.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %r3;", "expected .pred"),
    (
        "$TMMA.cta_group::1.kind::f16.$FILL.$FILL [%r1], %rd1, %rd2, %r2, %p1;",
        "expected one collector usage",
    ),
    (
        "$TMMA.cta_group::1.kind::mxf4.block_scale [%r1], %rd1, %rd2, %r2, [%rd3], [%r4], %p1;",
        "register %rd3 is declared .b64",
    ),
    ("tcgen05.cp.cta_group::1.128x256b [%r1], %r2;", "register %r2 is declared .b32"),
    ("tcgen05.cp.cta_group::1.128x256b [%rd1], %rd2;", "register %rd1 is declared .b64"),
    ("tcgen05.ld.sync.aligned.32x32b.x1.b32 %r1, [%r2];", "expected registers in braces"),
    ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, _}, [%r2];", "expected registers"),
    ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r1}, [%r2];", "register %r1 stands there twice"),
    ("tcgen05.ld.sync.aligned.32x32b.x01.b32 {%r1}, [%r2];", "count 1, expected a power"),
    ("tcgen05.st.sync.aligned.32x32b.x2.b32 [%r2], {1, 2};", "expected registers"),
    ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%rd2], {%r1};", "register %rd2 is declared .b64"),
    ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 48;", "48 columns, expected"),
    ("tcgen05.alloc.cta_group::1.sync.shared::cta.b32 [%r1], 32;", "expected .aligned"),
    ("tcgen05.dealloc.cta_group::1.aligned.b32 %r1, 32;", "expected .sync"),
    ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %rd1, 32;", "register %rd1 is declared .b64"),
    ("tcgen05.relinquish_alloc_permit.cta_group::1.aligned;", "expected .sync"),
    ("tcgen05.wait::ld;", "expected .sync"),
    (
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster [%r1];",
        "expected .b64 at the end",
    ),
    (
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.$CAST.b64 [%r1], 3;",
        "expected a register of 16 bits",
    ),
    ("tcgen05.cp.cta_group::1.4x256b [%r1], %rd1;", "shape .4x256b is not modelled"),
    ("tcgen05.cp.cta_group::1.32x128b [%r1], %rd1;", "shape .32x128b is not modelled"),
    (
        "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%r1], %rd1;",
        "shape .128x256b.b8x16.b4x16_p64 is not modelled",
    ),
    (
        "tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32 {%f1, %f2}, %f3, [%r1];",
        "expected .b32",
    ),
    ("tcgen05.ld.sync.aligned.32x32b.x3.b32 {%r1, %r2, %r3}, [%r4];", "count 3, expected a power"),
    ("tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r1}, [%r4];", "expected a power of two up to 32"),
    ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1}, [%r4];", "1 registers, expected 2"),
    ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%rd1, %rd2}, [%r4];", "register %rd1 has to have 32"),
    ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r1}, [%r4];", "2 operands, expected 3"),
    ("tcgen05.st.sync.aligned.32x32b.x1.pack::16b.b32 [%r4], {%r1};", "modifier .pack::16b"),
    ("tcgen05.commit.cta_group::1.b64 [%r1];", "expected .mbarrier::arrive::one"),
    ("tcgen05.alloc.sync.aligned.shared::cta.b32 [%r1], 32;", "expected .cta_group::1 or"),
    ("call (%r1), foo, (%r2);", "function foo is not modelled"),
    ("call.uni printf, (%r1);", "function printf is not modelled"),
    ("mapa.u16 %rs1, %rs2, %r1;", "modifier .u16 is not modelled"),
    ("match.any.sync %r1, %r2, -1;", "expected another modifier than 'sync'"),
    ("tex.2d.v4.f32.f32 $D, [%rd1, {%f1,%f2}];", "this instruction is not modelled"),
    (".reg .b32;", "'.reg .b32' declares no registers known"),
    (".reg .q32 %x<4>;", "'.reg .q32 %x<4>' declares no registers known"),
    (".reg .b32 %x<y>;", "'.reg .b32 %x<y>' declares no registers known"),
    (".frob 5;", "'.frob 5' is no declaration known"),
    (".shared .b8;", "'.shared .b8' is no declaration known"),
    (".shared .align x .b8 a[4];", "'.shared .align x .b8 a[4]' has no alignment known"),
    (".local .b8 a[z];", "'.local .b8 a[z]' is no declaration known"),
    (")", "is no instruction"),
    ("x: y: z", "z: this instruction is not modelled"),
    ("add.s32 %r1 %r2 %r3;", "register %r1 %r2 %r3 is not declared"),
    (", , ;", "', ,' is no instruction"),
    ("%r1 = 5;", "'%r1 = 5' is no instruction"),
    ("mov.u32 %r1, %r2", "special register %r2"),
    ("!;", "'!' is no instruction"),
    ("add.s32 %r1, %r2, !%r3;", "operand !%r3 is not a value of type u32"),
    ("add.s32 %r1, %r2, !5;", "'!5' negates what is no register"),
    ("add.s32 %r1|%r2|%r3, %r2, %r3;", "register %r1|%r2|%r3 is not declared"),
    (".version", "'.version' is malformed"),
    (".loc", "'.loc' is malformed"),
    (".file", "'.file' is malformed"),
    (".maxntid x", "'.maxntid x' is malformed"),
]
"""Text, and what the error says of it."""


def full(text: str) -> str:
    for short, meant in SHORT.items():
        text = text.replace(short, meant)
    return text


def error_of(text: str) -> str:
    body = kernel(text, 0, shared=".shared .align 16 .b8 shared[64];")
    assert body.splitlines()[LINE - 1] == text.splitlines()[0]
    with pytest.raises(PtxError) as caught:
        run(body, "k", 1, 128, [])
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"), CASES + TOGETHER, ids=[text for text, _ in CASES + TOGETHER]
)
def test_an_instruction_that_is_none_is_an_error_with_its_line(text: str, said: str) -> None:
    message = error_of(full(text))
    assert message.startswith(f"PTX line {LINE}: ")
    assert said in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADER + "add.s32 %r1, %r1, %r1;", "PTX line 4: 'add.s32 %r1, %r1, %r1' outside an entry"),
        (HEADER + "LABEL: ", "PTX line 4: label LABEL outside an entry"),
        (HEADER + "}", "PTX line 4: '}' without '{'"),
        (HEADER + ".func f() { ret; }", "PTX line 4: .func: functions"),
        (HEADER + ".visible .entry k(", "PTX line 4: expected ')'"),
        (HEADER + ".visible .entry k(.param .q8 x) { ret; }", "PTX line 4: '.param .q8 x'"),
        (HEADER + ".visible .entry k()\n{\nret;", "the body of an entry is not closed"),
        (HEADER + ".global .u32 a[", "PTX line 4: expected ';'"),
        (".version x\n", "PTX line 1: '.version x' is malformed"),
        (".version 9.0\n.target\n", "PTX line 2: '.target' is malformed"),
    ],
)
def test_a_module_that_is_malformed_is_an_error_with_its_line(text: str, said: str) -> None:
    with pytest.raises(PtxError) as caught:
        run(text, "k", 1, 32, [])
    assert said in str(caught.value)


def test_every_opcode_has_a_grammar() -> None:
    known = {*ALU, *EFFECTS, *Program.CONTROL}
    assert known == {*grammar._RULES, *grammar._TYPES, "cvt", "set", "createpolicy"}
    assert set(grammar._TYPES) == set(grammar._SHAPES)


@pytest.mark.parametrize("name", sorted({*ALU, *EFFECTS}))
def test_an_unknown_modifier_of_any_opcode_is_an_error(name: str) -> None:
    """It is named, or the whole opcode is, whatever else is wrong."""
    opcode = f"{name}.frobnicate"
    message = error_of(f"{opcode} %r1, [%rd1], %r2, %r3;")
    assert message.startswith(f"PTX line {LINE}: {opcode}: ")


@pytest.mark.parametrize("count", [0, 17])
@pytest.mark.parametrize("name", sorted({*ALU, *EFFECTS} - {"call"}))
def test_too_few_and_too_many_operands_of_any_opcode_are_an_error(name: str, count: int) -> None:
    takes = grammar._RULES[name][0] if name in grammar._RULES else ()
    if count in takes:
        count = 1
    kind = ".f32" if name == "fma" else ".s32"
    opcode = name if name in grammar._RULES else f"{name}{kind}"
    message = error_of(f"{opcode} {', '.join(['%r1'] * count)};")
    assert message.startswith(f"PTX line {LINE}: {opcode}: ")
