"""Instructions are counted once each: by warp, by role, by opcode, by kind."""

from __future__ import annotations

import re

import pytest
import torch
from ptx_kernels import kernel

from mqa.cuda import compiler
from mqa.cuda.sm90_tiles import ROLES, THREADS
from mqa.cuda.storage import MATH_WARPS
from mqa.emulator import run, scheduled
from mqa.emulator.backend import SM90_EMULATED
from mqa.emulator.scheduler import SCHEDULES
from mqa.emulator.summary import class_of

LOOP = """
mov.u32 %r1, 0;
LOOP: add.u32 %r1, %r1, 1;
shl.b32 %r2, %r0, 2;
bar.sync 0;
setp.lt.u32 %p1, %r1, 5;
@%p1 bra LOOP;
setp.lt.u32 %p2, %r0, 32;
@%p2 fma.rn.f32 %f1, %f2, %f3, %f4;
@%p2 bra DONE;
bar.warp.sync 0xffffffff;
DONE:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_instructions_are_those_that_warps_issued(schedule: str) -> None:
    summary = run(kernel(LOOP, 0), "k", 3, 64, [], schedule=schedule, seed=1)
    # Around the loop: mov of %tid.x and of 0, setp, fma, bra, ret; one bar.warp.sync by one warp.
    assert summary.instructions == {0: 3 * (5 * 5 + 6), 1: 3 * (5 * 5 + 7)}
    assert summary.opcodes == {
        "add.u32": 30,
        "bar.sync": 30,
        "bar.warp.sync": 3,
        "bra": 36,
        "fma.rn.f32": 6,
        "mov.u32": 12,
        "ret": 6,
        "setp.lt.u32": 36,
        "shl.b32": 30,
    }
    assert summary.classes["integer"] == 60
    assert summary.classes["branches"] == 42
    assert sum(summary.classes.values()) == sum(summary.instructions.values())
    assert summary.kernel == "k"


def test_a_kernel_without_roles_has_none() -> None:
    assert run(kernel("", 0), "k", 1, 32, []).roles == {}


@pytest.mark.skipif(compiler.unavailable() is not None, reason="NVRTC is missing")
def test_no_roles_are_made_up_for_the_metadata_kernels() -> None:
    ends, out = torch.tensor([64, 90], dtype=torch.int32), torch.empty((3, 2), dtype=torch.int32)
    with scheduled() as launches:
        SM90_EMULATED.dense_metadata(torch.zeros_like(ends), ends, 90, 64, out)
    (summary,) = launches
    assert summary.roles == {}
    assert "metadata" in summary.kernel


def test_roles_are_those_of_the_kernels() -> None:
    text = (compiler.sources() / "score/storage.cuh").read_text()
    found = dict(re.findall(r"k(\w+)Warp = kMathWarps(?: \+ (\d))?", text))
    starts = {name.lower(): MATH_WARPS + int(more or 0) for name, more in found.items()}
    assert starts == {role.name: role.warps.start for role in ROLES[1:]}
    assert ROLES[0].warps == range(MATH_WARPS)
    assert [warp for role in ROLES for warp in role.warps] == list(range(THREADS // 32))


def test_kinds_of_opcodes() -> None:
    kinds = {
        "ld.shared.v4.f32": "shared memory",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "shared memory",
        "st.global.f32": "other memory",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "mma",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile": "asynchronous copies",
        "mbarrier.try_wait.parity.shared::cta.b64": "mbarriers",
        "max.NaN.f32": "floating point",
        "mad.lo.s32": "integer",
        "fence.proxy.async.shared::cta": "barriers and fences",
        "mov.b64": "moves",
    }
    assert {opcode: class_of(opcode) for opcode in kinds} == kinds
