"""Small PTX kernels for tests of tensor memory: an image of shared memory comes from the host, one
thread multiplies, and warps store what tensor memory holds."""

from __future__ import annotations

from typing import Any

import numpy as np
from ptx_kernels import Array, kernel

from mqa.emulator import run

THREADS = 128
LEADING, STRIDE = 128, 256
"""Of operands without a swizzle: 8 rows of 16 bytes, then the 16 bytes behind them."""

_START = """
mov.u32 %r1, image;
mov.u32 %r2, bar;
mov.u32 %r3, slot;
shr.u32 %r4, %r0, 5;
setp.eq.u32 %p1, %r4, 0;
setp.eq.u32 %p2, %r0, 0;
mov.u32 %r50, %cluster_ctarank;
@%p2 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p2 fence.mbarrier_init.release.cluster;
mul.lo.u32 %r51, %r50, {bytes};
cvt.u64.u32 %rd20, %r51;
add.s64 %rd21, %rd1, %rd20;
mul.lo.u32 %r52, %r0, 4;
COPY: setp.ge.u32 %p3, %r52, {bytes};
@%p3 bra COPIED;
cvt.u64.u32 %rd22, %r52;
add.s64 %rd23, %rd21, %rd22;
ld.global.u32 %r53, [%rd23];
add.u32 %r54, %r1, %r52;
st.shared.u32 [%r54], %r53;
add.u32 %r52, %r52, {step};
bra COPY;
COPIED: bar.warp.sync 0xffffffff;
fence.proxy.async.shared::cta;
@%p1 tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r3], {columns};
@%p1 tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
{sync}
tcgen05.fence::after_thread_sync;
ld.shared.u32 %r5, [%r3];
shl.b32 %r6, %r4, 21;
add.u32 %r7, %r5, %r6;
"""
"""Then %r1, %r2 and %r3 are addresses of the image, a barrier and the slot of an address; %r4 is
the warp, %r5 the address of tensor memory and %r7 that of the warp's lanes in it; %p1 is warp 0,
%p2 thread 0 and %r50 the rank in the cluster."""
_SYNC = {1: "bar.sync 0;", 2: "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"}
_END = """
tcgen05.fence::before_thread_sync;
{sync}
@%p1 tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r5, {columns};
"""
WAIT = """WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], 0;
@!%p4 bra WAIT;
tcgen05.fence::after_thread_sync;
"""
COMMIT = "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];\n"


def tensor_kernel(
    body: str,
    *,
    image: int,
    columns: int = 64,
    group: int = 1,
    target: str = "sm_100a",
    end: str = _END,
    threads: int = THREADS,
) -> str:
    """Parameters are the output, and the image of `image` bytes of each CTA."""
    sync = _SYNC[group]
    start = _START.format(bytes=image, group=group, columns=columns, sync=sync, step=4 * threads)
    finish = end.format(group=group, columns=columns, sync=sync)
    shared = (
        f".shared .align 1024 .b8 image[{max(image, 16)}];\n.shared .align 8 .b64 bar;\n"
        ".shared .align 4 .b32 slot;"
    )
    return kernel(start + body + finish, 2, shared=shared, target=target)


def descriptor(offset: int, register: str = "%rd10", *, fields: int | None = None) -> str:
    """PTX that makes a descriptor of an operand at that place of the image."""
    if fields is None:
        fields = 1 << 46 | STRIDE >> 4 << 32 | LEADING >> 4 << 16
    return (
        f"add.u32 %r55, %r1, {offset};\nshr.u32 %r55, %r55, 4;\ncvt.u64.u32 {register}, %r55;\n"
        f"or.b64 {register}, {register}, {fields:#x};\n"
    )


def placed(rows: Array) -> Array:
    """Bytes of K-major rows of 32 bytes as they lie without a swizzle."""
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows) // 8, 8, 2, 16)
    return np.ascontiguousarray(data.transpose(0, 2, 1, 3)).ravel()


def stored(columns: int, offset: int = 0, *, wait: str = "tcgen05.wait::ld.sync.aligned;") -> str:
    """PTX by which all warps store their lanes of so many columns: out[lane, column]."""
    names = [f"%r{60 + i}" for i in range(columns)]
    text = (
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{', '.join(names)}}}, [%r7+{offset}];\n"
    )
    text += f"{wait}\n" + OUT.format(bytes=4 * columns)
    return text + "".join(
        f"st.global.u32 [%rd31+{4 * i}], {name};\n" for i, name in enumerate(names)
    )


OUT = """mad.lo.u32 %r57, %r50, 128, %r0;
mul.wide.u32 %rd30, %r57, {bytes};
add.s64 %rd31, %rd0, %rd30;
"""


def executed(
    text: str,
    image: Array,
    out: Array,
    *,
    ctas: int = 1,
    threads: int = THREADS,
    **how: Any,
) -> Array:
    cluster = ctas if ctas > 1 else None
    run(text, "k", ctas, threads, [out, image], cluster=cluster, **how)
    return out
