"""What a module's target has: its instructions and its GPU, and what ptxas says of the first."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from ptx_kernels import kernel
from test_sm100_forms import COUNTED, EIGHT, FOUR

from mqa.emulator import PtxError, device, grammar, run
from mqa.emulator.device import resident_ctas
from mqa.emulator.executor import _load

MOVED = ".shared::cluster.global.mbarrier::complete_tx::bytes"
D, A = "{%f1,%f2,%f3,%f4}", "{%r1,%r2,%r3,%r4}"
NEEDED = {
    grammar.LATER: [
        "add.rn.f32x2 %rd1, %rd2, %rd3;",
        "sub.f32x2 %rd1, %rd2, %rd3;",
        "mul.rz.ftz.f32x2 %rd1, %rd2, %rd3;",
        "fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;",
        "add.f32.bf16 %f1, %rs1, %f2;",
        "sub.f32.f16 %f1, %rs1, %f2;",
        "fma.rn.f32.f16 %f1, %rs1, %rs2, %f2;",
        "max.f32 %f1, %f2, %f3, %f4;",
        "min.NaN.abs.f32 %f1, %f2, %f3, %f4;",
        "cvt.rn.satfinite.tf32.f32 %r1, %f1;",
        f"ld.global.v8.b32 {EIGHT}, [%rd1];",
        f"st.global.v4.b64 [%rd1], {FOUR};",
        f"ld.global.L2::evict_last.v4.b64 {FOUR}, [%rd1];",
        f"st.global.L2::evict_last.v4.b64 [%rd1], {FOUR};",
        "st.bulk.weak.shared::cta [%rd1], 64, 0;",
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r1], 16, %rs1;",
    ],
    grammar.FAMILY: [
        "cvt.rn.satfinite.e2m3x2.f32 %rs1, %f1, %f2;",
        "cvt.rn.f16x2.e3m2x2 %r1, %rs1;",
        "cvt.rp.satfinite.ue8m0x2.f32 %rs1, %f1, %f2;",
        "redux.sync.max.abs.f32 %f1, %f2, -1;",
        f"cp.async.bulk.tensor.2d{MOVED}.cta_group::1 [%r1], [%rd1, {{%r2,%r3}}], [%r4];",
        "tcgen05.fence::before_thread_sync;",
    ],
    "sm_100a": ["tcgen05.mma.cta_group::1.kind::i8 [%r1], %rd1, %rd2, %r2, %p1;"],
    "sm_100a, sm_103a": [
        f"tcgen05.mma.cta_group::1.kind::{kind} [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1;"
        for kind in (
            "mxf8f6f4.block_scale.scale_vec::1X",
            "mxf4.block_scale.scale_vec::2X",
            "mxf4nvf4.block_scale.scale_vec::4X",
        )
    ],
    f"sm_90a, {grammar.FAMILY}": ["setmaxnreg.dec.sync.aligned.u32 40;"],
    "sm_90a": ["wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"],
    grammar.NINETY: [
        "add.rn.bf16x2 %r1, %r2, %r3;",
        "sub.bf16 %rs1, %rs2, %rs3;",
        "mul.rn.bf16x2 %r1, %r2, %r3;",
        "add.u16x2 %r1, %r2, %r3;",
        "max.s16x2 %r1, %r2, %r3;",
        "min.relu.s32 %r1, %r2, %r3;",
        "set.lt.u32.bf16x2 %r1, %r2, %r3;",
        "setp.lt.bf16 %p1, %rs1, %rs2;",
        "ex2.approx.ftz.bf16x2 %r1, %r2;",
        "tanh.approx.bf16 %rs1, %rs2;",
        "cvt.rn.tf32.f32 %r1, %f1;",
        "cvt.rn.bf16.s32 %rs1, %r1;",
        "cvt.rn.f16.bf16 %rs1, %rs2;",
        "cvt.f64.bf16 %fd1, %rs2;",
        "cvt.rzi.s32.bf16 %r1, %rs2;",
        "ld.shared::cluster.u32 %r1, [%r2];",
        "ld.relaxed.cluster.global.u32 %r1, [%rd1];",
        "st.shared::cluster.u32 [%r2], %r1;",
        "st.release.cluster.global.u32 [%rd1], %r1;",
        f"st.async.weak.shared::cluster.{COUNTED}.v4.b32 [%r1], {A}, [%r5];",
        f"atom.global.add.v4.f32 {D}, [%rd1], {D};",
        "atom.global.add.noftz.bf16x2 %r1, [%rd1], %r2;",
        "atom.relaxed.cluster.global.add.u32 %r1, [%rd1], %r2;",
        "red.global.add.v2.f32 [%rd1], {%f1,%f2};",
        f"red.async.relaxed.cluster.shared::cluster.{COUNTED}.add.u32 [%r1], %r2, [%r3];",
        "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;",
        "mbarrier.try_wait.shared.b64 %p1, [%r1], %rd1;",
        "mbarrier.arrive.shared.b64 %rd1, [%r1], %r2;",
        "mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1], 16;",
        "mbarrier.arrive.relaxed.cta.shared.b64 %rd1, [%r1];",
        "mbarrier.arrive.shared::cluster.b64 _, [%r1];",
        "mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 16;",
        "mbarrier.complete_tx.shared.b64 [%r1], 16;",
        "mbarrier.test_wait.relaxed.cta.shared.b64 %p1, [%r1], %rd1;",
        f"cp.async.bulk{MOVED} [%r1], [%rd1], 16, [%r2];",
        f"cp.async.bulk.tensor.2d{MOVED} [%r1], [%rd1, {{%r2,%r3}}], [%r4];",
        "cp.async.bulk.commit_group;",
        "cp.async.bulk.wait_group 0;",
        "cp.async.bulk.prefetch.L2.global [%rd1], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r1], 16;",
        "fence.acq_rel.cluster;",
        "fence.proxy.async.shared::cta;",
        "fence.mbarrier_init.release.cluster;",
        "barrier.cluster.arrive.aligned;",
        "barrier.cluster.wait.aligned;",
        "isspacep.shared::cluster %p1, %rd1;",
        "prefetch.tensormap [%rd1];",
        "mapa.shared::cluster.u32 %r1, %r2, %r3;",
        "getctarank.shared::cluster.u32 %r1, %r2;",
        "elect.sync %r1|%p1, -1;",
        "griddepcontrol.wait;",
        "mov.u32 %r1, %cluster_ctarank;",
        "mov.u32 %r1, %nclusterid.x;",
    ],
    grammar.EIGHTY_NINE: [
        "cvt.rn.f16x2.e4m3x2 %r1, %rs1;",
        "cvt.rn.relu.f16x2.e5m2x2 %r1, %rs1;",
        "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;",
        "cvt.rn.satfinite.e5m2x2.f16x2 %rs1, %r1;",
    ],
    grammar.EIGHTY_SIX: [
        "max.xorsign.abs.f32 %f1, %f2, %f3;",
        "min.xorsign.abs.bf16x2 %r1, %r2, %r3;",
    ],
    "sm_80": [
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {D}, {A}, {{%r5,%r6}}, {D};",
        f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {A}, [%r5];",
        "cp.async.cg.shared.global.L2::128B [%r1], [%rd1], 16, %r2;",
        "cp.async.ca.shared.global [%r1], [%rd1], 4, %p1;",
        "cp.async.commit_group;",
        "cp.async.wait_group 1;",
        "cp.async.wait_all;",
        "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];",
        "mbarrier.init.shared.b64 [%r1], 1;",
        "mbarrier.arrive.shared.b64 _, [%r1];",
        "mbarrier.arrive_drop.noComplete.shared.b64 %rd1, [%r1], 2;",
        "mbarrier.test_wait.parity.acquire.cta.shared.b64 %p1, [%r1], 0;",
        "barrier.cta.red.popc.u32 %r1, 0, %p1;",
        "cvt.rna.satfinite.tf32.f32 %r1, %f1;",
        "cvt.rn.satfinite.f16x2.f32 %r1, %f1, %f2;",
        "cvt.rn.relu.bf16x2.f32 %r1, %f1, %f2;",
        "cvt.rz.bf16.f32 %rs1, %f1;",
        "cvt.f32.bf16 %f1, %rs1;",
        "fma.rp.ftz.f32 %f1, %f2, %f3, %f4;",
        "fma.rn.relu.bf16x2 %r1, %r2, %r3, %r4;",
        "max.NaN.bf16x2 %r1, %r2, %r3;",
        "neg.bf16x2 %r1, %r2;",
        "tanh.approx.f16x2 %r1, %r2;",
        "bfe.s32 %r1, %r2, 8, %r3;",
        "redux.sync.add.u32 %r1, %r2, -1;",
        "ld.acquire.gpu.global.u32 %r1, [%rd1];",
        f"ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {A}, [%rd1];",
        "atom.global.add.noftz.f16x2 %r1, [%rd1], %r2;",
        "fence.acquire.gpu;",
        "createpolicy.fractional.L2::evict_first.b64 %rd1, 1.0;",
        "mov.u32 %r1, %dynamic_smem_size;",
    ],
}


def alone(text: str, target: str) -> str:
    return kernel(text, 0, target=target).replace(".entry k(\n\n)", ".entry k() .maxntid 128, 1, 1")


@pytest.mark.parametrize("target", grammar.TARGETS)
def test_a_target_has_its_instructions_alone(target: str) -> None:
    for need, texts in NEEDED.items():
        for text in texts:
            if need in grammar.families(target):
                _load(alone(text, target), "k")
                continue
            with pytest.raises(PtxError) as caught:
                _load(alone(text, target), "k")
            assert f"needs {need}, .target is {target}" in str(caught.value)


def refused_by_ptxas(texts: list[str], target: str, folder: Path) -> list[str]:
    """Those of these instructions that it names in an error; each is a kernel's only one."""
    header, parts = "", []
    for i, text in enumerate(texts):
        header, body = re.split(r"(?=\.visible)", alone(text, target), maxsplit=1)
        parts.append(body.replace(".entry k(", f".entry k{i}("))
    file = folder / "all.ptx"
    file.write_text(header + "".join(parts))
    command = ["ptxas", "-O0", f"-arch={target}", "-o", str(folder / "all.cubin"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = file.read_text().splitlines()
    named = {lines[int(n) - 1] for n in re.findall(r"line (\d+); (?:error|fatal)", done.stderr)}
    assert bool(named) == bool(done.returncode), done.stderr
    return [text for text in texts if text in named]


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("target", grammar.TARGETS)
def test_ptxas_says_the_same_of_targets(target: str, tmp_path: Path) -> None:
    known = grammar.families(target)
    has = [text for need, texts in NEEDED.items() for text in texts if need in known]
    lacks = [text for need, texts in NEEDED.items() for text in texts if need not in known]
    assert refused_by_ptxas(has, target, tmp_path) == []
    assert refused_by_ptxas(lacks, target, tmp_path) == lacks


def test_every_need_is_asked_about() -> None:
    """Each row of the table is what refuses some instruction here."""
    for name, needs in grammar.NEEDS.items():
        for need in needs:
            texts = [text for text in NEEDED[need.target] if re.match(rf"{name}\b", text)]
            assert any(re.match(need.form, text.split()[0][len(name) :]) for text in texts), need


def test_targets_that_are_not_modelled_are_errors() -> None:
    for target in ("sm_75", "sm_80a", "compute_90", "sm_110", "sm_120a"):
        with pytest.raises(PtxError, match=rf"\.target is {target}, expected one of sm_80, sm_86"):
            run(kernel("ret;", 0, target=target), "k", 1, 32, [])


@pytest.mark.parametrize(
    ("target", "sms", "shared_kib"),
    [
        ("sm_80", 108, 163),
        ("sm_86", 82, 99),
        ("sm_87", 16, 163),
        ("sm_89", 128, 99),
        ("sm_90", 132, 227),
        ("sm_90a", 132, 227),
        ("sm_100", 148, 227),
        ("sm_100f", 148, 227),
        ("sm_103a", 148, 227),
        ("sm_120", 170, 99),
        ("sm_121", 48, 99),
    ],
)
def test_a_target_has_its_gpu(target: str, sms: int, shared_kib: int) -> None:
    out = np.zeros(1, np.uint32)
    text = kernel("mov.u32 %r1, %nsmid;\nst.global.u32 [%rd0], %r1;\n", 1, target=target)
    run(text, "k", 1, 1, [out], smem_bytes=shared_kib * 1024)
    assert out[0] == sms
    most = shared_kib * 1024
    with pytest.raises(ValueError, match=f"{most + 1} bytes of shared memory, expected at most"):
        run(text, "k", 1, 1, [out], smem_bytes=most + 1)


@pytest.mark.parametrize(
    ("target", "threads", "shared_kib", "each"),
    [
        ("sm_80", 32, 0, 32),
        ("sm_80", 256, 40, 4),
        ("sm_86", 32, 0, 16),
        ("sm_86", 256, 0, 6),
        ("sm_89", 32, 0, 24),
        ("sm_89", 1024, 0, 1),
        ("sm_120", 128, 49, 2),
    ],
)
def test_as_many_ctas_are_resident_as_an_sm_of_it_holds(
    target: str, threads: int, shared_kib: int, each: int
) -> None:
    program = _load(kernel("ret;", 0, target=target), "k")
    resident = resident_ctas(program, threads, shared_kib * 1024)
    assert resident == each * device.device_of(target).sms


def test_gpus_before_hopper_have_no_clusters() -> None:
    text = kernel("ret;", 0, target="sm_89")
    with pytest.raises(ValueError, match="RTX 4090 has no clusters"):
        run(text, "k", 2, 32, [], cluster=2)
    with pytest.raises(PtxError, match="reqnctapercluster needs sm_90 or later"):
        run(text.replace("\n)\n{", "\n)\n.reqnctapercluster 2, 1, 1\n{"), "k", 2, 32, [])
    run(kernel("ret;", 0, target="sm_120"), "k", 2, 32, [], cluster=2)
