"""Kernels for Blackwell of the installed `nvidia-cutlass` package multiply matrices.

Matrices hold small integers and scales are powers of two, so that sums are exact, and the product
is numpy's. Nothing here knows how the kernels do it. They lean on what hardware mostly does; what
that is stands in `MENDS`, as what has to be put into their PTX.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from tutorials import BLACKWELL, HERE, Array, Launch, Source, Tutorial, compiled, example, launch

from mqa.emulator import EmulationError, Kind

# nvcc takes a minute for what they share.
pytestmark = [pytest.mark.no_cover, pytest.mark.slow]

FENCES = "fence.proxy.async.shared::cta;\ntcgen05.fence::before_thread_sync;\n"
MENDS = {
    "waits for loads": (r"(tcgen05\.ld\.[^;]*;)", r"\1\ntcgen05.wait::ld.sync.aligned;"),
    "barriers known": (r"(mbarrier\.init[^;]*;)", r"\1\nfence.mbarrier_init.release.cluster;"),
    "warps together": (r"DONE:\s*\}", "DONE:\nbar.sync 0;\n}"),
    "fences": (r"(bar\.sync\s+0;)", rf"{FENCES}\1\ntcgen05.fence::after_thread_sync;"),
}
"""Loads of tensor memory are not waited for. Copies use barriers that only __syncthreads made
known. Warps wait for phases of mbarriers and for nothing else, so that one that is late by two
phases waits for ever. And there are no fences but for those of TMA's stores."""


def mended(ptx: str, but: Iterable[str] = ()) -> str:
    """PTX with all mends but these."""
    for name, (pattern, replacement) in MENDS.items():
        if name not in but:
            ptx, count = re.subn(pattern, replacement, ptx)
            assert count, name
    return ptx


@pytest.fixture(scope="module")
def tutorials(tmp_path_factory: pytest.TempPathFactory) -> Tutorial:
    first = example("cute/tutorial/blackwell/01_mma_sm100.cu")
    what = Source(HERE / "foreign" / "blackwell.cu", BLACKWELL, (first.parent,))
    return compiled(tmp_path_factory, "blackwell", what)


def recorded(
    tutorials: Tutorial, folder: Path, number: int, m: int, n: int, k: int
) -> tuple[Launch, Array, Array]:
    """A launch with the matrix it will write, [M, N], and the product that has to be there."""
    found = launch(tutorials, folder, number, m, n, k)
    d, a, b, _ = found.memory.values()
    first, second = (x.view(np.float16).reshape(-1, k).astype(np.float64) for x in (a, b))
    assert set(np.unique(first)) == set(np.unique(second)) == {-1, 0, 1}
    return found, d.view(np.float32).reshape(m, n), first @ second.T


CLUSTERS = {1: (1, 1, 1), 2: (1, 1, 1), 3: (4, 4, 1), 4: (4, 4, 1), 5: (4, 4, 1)}
TILE = {number: (128, 256) if number < 3 else (512, 1024) for number in CLUSTERS}
"""Rows and columns of D of a cluster."""
RUNS = [
    pytest.param(number, schedule, marks=[] if quick else pytest.mark.slow)
    for number, schedule, quick in (
        (1, "eager", True),
        (1, "hunt", False),
        (2, "eager", False),
        (2, "hunt", True),
        (3, "eager", True),
        (3, "hunt", False),
        (4, "eager", False),
        (4, "hunt", False),
        (5, "eager", True),
        (5, "hunt", False),
    )
]


@pytest.mark.parametrize(("number", "schedule"), RUNS)
def test_tutorials_multiply(
    tutorials: Tutorial, tmp_path: Path, number: int, schedule: str
) -> None:
    """With all checks. Tutorials with a cluster of 16 CTAs have one, others a grid of 2 by 2."""
    rows, columns = TILE[number]
    repeats = 2 if number < 3 else 1
    shape = repeats * rows, repeats * columns, 192
    found, got, want = recorded(tutorials, tmp_path, number, *shape)
    assert found.cluster == CLUSTERS[number]
    assert len(found.maps) == {1: 0, 5: 4}.get(number, 2)
    assert not np.array_equal(got, want)
    options = {"schedule": schedule, "seed": 3, "tensor_pipe": "in-order", "checks": True}
    summary = found.run(mended(tutorials.ptx), **options)
    assert np.array_equal(got, want)
    if number > 1:
        # What CTA 0 gets of A and B for 64 elements along K; with a pair, what both get.
        size = (128 + 256) * 128 if number < 4 else 2 * (128 + 128) * 128
        name = "TmaBytes" if number == 2 else "tma_transaction_bytes"
        assert f"{name}: {size}\n" in summary.printed


@pytest.mark.parametrize(
    ("number", "schedule", "missing", "kind", "opcode"),
    [
        (1, "eager", ["waits for loads"], Kind.PENDING_REGISTER, "mul.f32"),
        (1, "eager", ["fences"], Kind.PROXY_FENCE, "tcgen05.mma"),
        (2, "hunt", ["fences"], Kind.TENSOR_FENCE, "tcgen05.ld"),
        (2, "eager", ["barriers known", "fences"], Kind.BARRIER, "cp.async.bulk.tensor"),
        (2, "eager", ["warps together"], Kind.DEADLOCK, ""),
    ],
)
def test_they_are_reported_without_a_mend(
    tutorials: Tutorial,
    tmp_path: Path,
    number: int,
    schedule: str,
    missing: list[str],
    kind: Kind,
    opcode: str,
) -> None:
    found, _, _ = recorded(tutorials, tmp_path, number, 128, 256, 192)
    ptx = mended(tutorials.ptx, but=missing)
    with pytest.raises(EmulationError) as caught:
        found.run(ptx, schedule=schedule, seed=3, tensor_pipe="in-order")
    assert caught.value.report.kind is kind
    assert caught.value.report.instruction.startswith(opcode)


def test_where_fences_are_not_looked_for_the_first_needs_waits_alone(
    tutorials: Tutorial, tmp_path: Path
) -> None:
    found, got, want = recorded(tutorials, tmp_path, 1, 128, 256, 128)
    ptx = mended(tutorials.ptx, but=[name for name in MENDS if name != "waits for loads"])
    ignored = (Kind.PROXY_FENCE, Kind.TENSOR_FENCE)
    found.run(ptx, tensor_pipe="in-order", ignore=ignored, checks=True)
    assert np.array_equal(got, want)


# ---- products with block scales ----

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([0, 1, 2, 3, 4, 0.5, 1.5, 16])
E4M3_CODES = np.array([0x00, 0x38, 0x40, 0x44, 0x48, 0x30, 0x3C, 0x58], np.uint8)
PER_SCALE = 32


def fill_8_bits(memory: Array, rows: int, random: np.random.Generator) -> Array:
    """Write elements, and return what they are worth, [rows, K]."""
    which = random.integers(0, 8, (rows, len(memory) // rows))
    negative = random.integers(0, 2, which.shape, np.uint8)
    memory[:] = (E4M3_CODES[which] | negative << 7).ravel()
    found: Array = E4M3[which] * np.where(negative, -1, 1)
    return found


def fill_4_bits(memory: Array, rows: int, random: np.random.Generator) -> Array:
    code = random.integers(0, 16, (rows, 2 * len(memory) // rows), np.uint8)
    memory[:] = (code[:, ::2] | code[:, 1::2] << 4).ravel()
    found: Array = E2M1[code & 7] * np.where(code & 8, -1, 1)
    return found


def fill_scales(memory: Array, rows: int, random: np.random.Generator) -> Array:
    """In tiles of 128 rows and 4 scales, where 32 rows are 16 bytes apart."""
    code = random.integers(125, 130, (rows, len(memory) // rows), np.uint8)
    tiles = code.reshape(rows // 128, 4, 32, -1, 4)
    memory[:] = tiles.transpose(0, 3, 2, 1, 4).ravel()
    found: Array = np.exp2(code.astype(np.float64) - 127).repeat(PER_SCALE, axis=1)
    return found


Fill = Callable[[Array, int, np.random.Generator], Array]
FILLS: dict[int, Fill] = {8: fill_8_bits, 4: fill_4_bits}
KINDS = [pytest.param(bits, marks=pytest.mark.slow) for bits in (8, 4)]
"""nvcc takes a minute for each."""
SHAPE = 256, 256, 512


@pytest.fixture(scope="module")
def block_scaled(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[int, Tutorial]:
    """Bits of an element, and CUTLASS's kernel for them."""
    bits = int(request.param)
    what = Source(HERE / "foreign/block_scaled.cu", BLACKWELL, (), (f"MQA_BITS={bits}",))
    return bits, compiled(tmp_path_factory, f"block_scaled{bits}", what)


def scaled_launch(block_scaled: tuple[int, Tutorial], folder: Path) -> tuple[Launch, Array, Array]:
    bits, program = block_scaled
    m, n, _ = SHAPE
    found = launch(program, folder, *SHAPE)
    a, b, scales_a, scales_b, d = found.memory.values()
    random = np.random.default_rng(bits)
    first = FILLS[bits](a, m, random) * fill_scales(scales_a, m, random)
    second = FILLS[bits](b, n, random) * fill_scales(scales_b, n, random)
    return found, d.view(np.float32).reshape(m, n), first @ second.T


WAITS = [name for name in MENDS if name != "waits for loads"]


@pytest.mark.parametrize("block_scaled", KINDS, indirect=True)
@pytest.mark.parametrize("schedule", ["eager", "hunt"])
def test_products_with_block_scales_are_right(
    block_scaled: tuple[int, Tutorial], tmp_path: Path, schedule: str
) -> None:
    """Two CTAs, each of which makes two tiles of D, from a ring of two stages."""
    found, got, want = scaled_launch(block_scaled, tmp_path)
    assert int(np.prod(found.grid)) == 2
    ptx = mended(block_scaled[1].ptx, but=WAITS)
    options = {"schedule": schedule, "seed": 3, "tensor_pipe": "in-order"}
    found.run(ptx, checks=True, ignore=[Kind.TENSOR_FENCE], **options)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("block_scaled", KINDS[:1], indirect=True)
@pytest.mark.parametrize(
    ("pipe", "ignored", "waits", "kind", "opcode"),
    [
        ("in-order", (Kind.TENSOR_FENCE,), False, Kind.PENDING_REGISTER, "mul.f32"),
        ("in-order", (), True, Kind.TENSOR_FENCE, "tcgen05.ld"),
        ("isa", (Kind.TENSOR_FENCE,), True, Kind.RACE, "tcgen05.cp"),
    ],
)
def test_they_lean_on_hardware(
    block_scaled: tuple[int, Tutorial],
    tmp_path: Path,
    pipe: str,
    ignored: tuple[Kind, ...],
    waits: bool,
    kind: Kind,
    opcode: str,
) -> None:
    """Only the last of the loads of a tile is waited for, no fences are at barriers, and scales are
    copied over those that a product before still reads."""
    found, _, _ = scaled_launch(block_scaled, tmp_path)
    ptx = mended(block_scaled[1].ptx, but=WAITS) if waits else block_scaled[1].ptx
    with pytest.raises(EmulationError) as caught:
        found.run(ptx, schedule="hunt", seed=3, tensor_pipe=pipe, ignore=ignored)
    assert caught.value.report.kind is kind
    assert caught.value.report.instruction.startswith(opcode)
