"""Instructions of tensor memory, each form of each: what products are, and where cells go."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from ptx_kernels import Array
from tensor_kernels import (
    COMMIT,
    LEADING,
    OUT,
    STRIDE,
    WAIT,
    descriptor,
    executed,
    placed,
    stored,
    tensor_kernel,
)

from mqa.emulator.scheduler import SCHEDULES
from mqa.testing import accumulators
from mqa.testing._codes import E2M1, E4M3
from mqa.testing.accumulators import FusedTruncating

RANDOM = np.random.default_rng(7)
N = 16
A, B, SCALES = 0, 4096, 4096 + 32 * N
"""Where operands lie in the image."""


def small(mantissa_bits: int, bias: int, codes: Array) -> Array:
    """Values of formats without NaN, from the definition of their fields."""
    codes, one = codes.astype(np.int64), 1 << mantissa_bits
    bits = 6 if mantissa_bits + bias in (4, 5) else 4
    sign = np.where(codes >> bits - 1, -1.0, 1.0)
    field = codes & (1 << bits - 1) - 1
    exponent, mantissa = field >> mantissa_bits, field & one - 1
    normal = (1 + mantissa / one) * 2.0 ** (exponent - bias)
    return sign * np.where(exponent == 0, mantissa / one * 2.0 ** (1 - bias), normal)


@dataclass(frozen=True)
class Elements:
    """Rows of an operand: bytes as they lie in shared memory, and values."""

    rows: Array
    values: Array


def bits6(codes: Array) -> Array:
    """16 elements of 6 bits in the first 12 of 16 bytes."""
    places = np.zeros((len(codes), codes.shape[1] // 16, 128), np.uint8)
    for j, bit in itertools.product(range(16), range(6)):
        places[:, :, 6 * j + bit] = codes[:, j::16] >> bit & 1
    return np.packbits(places, axis=-1, bitorder="little").reshape(len(codes), -1)


def elements(kind: str, rows: int, *, packed: bool = False) -> Elements:
    """Random ones, 32 bytes a row."""
    if kind in ("f16", "bf16", "tf32"):
        values = RANDOM.normal(size=(rows, 8 if kind == "tf32" else 16)).astype(np.float32)
        if kind == "f16":
            half = values.astype(np.float16)
            return Elements(half, half.astype(np.float64))
        low = 0xFFFF if kind == "bf16" else 0x1FFF
        cut = (values.view(np.uint32) & np.uint32(~low & 0xFFFFFFFF)).view(np.float32)
        rows_of = (cut.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else values
        return Elements(rows_of, cut.astype(np.float64))
    if kind in ("u8", "s8"):
        whole = (
            RANDOM.integers(0, 256, (rows, 32))
            .astype(np.uint8)
            .view(f"{kind[0]}1".replace("s", "i"))
        )
        return Elements(whole, whole.astype(np.float64))
    if kind in ("e4m3", "e5m2"):
        top = {"e4m3": 0x7E, "e5m2": 0x7B}[kind]
        codes = RANDOM.integers(0, top + 1, (rows, 32)) | RANDOM.integers(0, 2, (rows, 32)) << 7
        codes = codes.astype(np.uint8)
        if kind == "e4m3":
            return Elements(codes, E4M3[codes])
        return Elements(codes, (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float64))
    if kind in ("e2m3", "e3m2"):
        codes = RANDOM.integers(0, 64, (rows, 32)).astype(np.uint8)
        values = small(3, 1, codes) if kind == "e2m3" else small(2, 3, codes)
        return Elements(bits6(codes), values)
    codes = RANDOM.integers(0, 16, (rows, 64 if packed else 32)).astype(np.uint8)
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    if packed:
        return Elements(pairs, E2M1[codes])
    padded = np.full((rows, 2, 16), 0xAA, np.uint8)
    padded[:, :, :8] = pairs.reshape(rows, 2, 8)
    return Elements(padded.reshape(rows, 32), E2M1[codes])


FORMATS = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
LEAST = {"e4m3": -6, "e5m2": -14, "e2m3": 0, "e3m2": -2, "e2m1": 0}
MINUS, PLUS = "setp.ne.u32 %p5, %r0, %r0;\n", "setp.eq.u32 %p5, %r0, %r0;\n"


def idesc(kind: str, a: str, b: str, *, rows: int = 128, sums: int = 1, more: int = 0) -> int:
    """Of the fields of the ISA's table, for `N` columns."""
    if kind.startswith("mx"):
        codes = (FORMATS[a], FORMATS[b]) if kind == "mxf8f6f4" else (1, 1)
        return codes[0] << 7 | codes[1] << 10 | N >> 3 << 17 | rows >> 4 << 24 | more
    codes = {
        "f16": ({"f16": 0, "bf16": 1}.get(a), {"f16": 0, "bf16": 1}.get(b)),
        "tf32": (2, 2),
        "f8f6f4": (FORMATS.get(a), FORMATS.get(b)),
        "i8": ({"u8": 0, "s8": 1}.get(a), {"u8": 0, "s8": 1}.get(b)),
    }[kind]
    return sums << 4 | codes[0] << 7 | codes[1] << 10 | N >> 3 << 17 | rows >> 4 << 24 | more


def mma(opcode: str, bits: int, *, a: str = "%rd10", scales: str = "", tail: str = "") -> str:
    return (
        f"mov.u32 %r10, {bits:#x};\n"
        f"@%p2 {opcode} [%r5], {a}, %rd11, %r10, {scales}{tail and tail + ', '}%p5;\n"
    )


def twice(opcode: str, bits: int, **more: Any) -> str:
    """D = A B, then D = A B + D."""
    first = descriptor(A) + descriptor(B, "%rd11") + MINUS + mma(opcode, bits, **more)
    return first + PLUS + mma(opcode, bits, **more) + COMMIT + WAIT


DENSE = [
    ("f16", "f16", "f16", 1, accumulators.BLACKWELL_F16),
    ("f16", "bf16", "bf16", 1, accumulators.BLACKWELL_BF16),
    ("tf32", "tf32", "tf32", 1, accumulators.BLACKWELL_TF32),
    *(
        (
            "f8f6f4",
            a,
            b,
            1,
            FusedTruncating(25, 32, min_exponent=LEAST[a], k_min_exponent=LEAST[b]),
        )
        for a, b in itertools.product(FORMATS, FORMATS)
    ),
]


@pytest.mark.parametrize(
    ("kind", "a", "b", "sums", "model"), DENSE, ids=[f"{k}-{a}-{b}" for k, a, b, _, _ in DENSE]
)
def test_products_are_those_of_the_model(
    kind: str, a: str, b: str, sums: int, model: FusedTruncating
) -> None:
    left, right = elements(a, 128), elements(b, N)
    text = dense_text(kind, a, b)
    image = np.concatenate([placed(left.rows), placed(right.rows)])
    got = executed(text, image, np.zeros((128, N), np.float32), schedule="hunt", seed=1)
    want = model.dots(left.values, right.values)
    assert (got == model.dots(left.values, right.values, want)).all()
    assert np.count_nonzero(got) > N * 100


def dense_text(kind: str, a: str, b: str, sums: int = 1, **more: Any) -> str:
    opcode = f"tcgen05.mma.cta_group::1.kind::{kind}"
    body = twice(opcode, idesc(kind, a, b, sums=sums, **more))
    return tensor_kernel(body + stored(N), image=SCALES)


@pytest.mark.parametrize("kind", ["f16", "f8f6f4"])
def test_sums_of_float16_are_rounded_to_nearest_even(kind: str) -> None:
    a = "f16" if kind == "f16" else "e2m3"
    left, right = elements(a, 128), elements(a, N)
    image = np.concatenate([placed(left.rows), placed(right.rows)])
    got = executed(dense_text(kind, a, a, 0), image, np.zeros((128, N), np.uint32))
    sums = (got & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
    exact = left.values @ right.values.T
    with np.errstate(over="ignore"):
        want = exact.astype(np.float16).astype(np.float64)
        want = (exact + want).astype(np.float16).astype(np.float64)
    bound = np.maximum(np.abs(want), np.abs(left.values) @ np.abs(right.values).T) * 2.0**-10
    same = (sums == want) | (np.abs(sums - want) <= bound)
    assert same.all()
    assert (sums == want).mean() > 0.95


@pytest.mark.parametrize(("a", "b"), [("u8", "u8"), ("u8", "s8"), ("s8", "u8"), ("s8", "s8")])
def test_products_of_integers_are_exact(a: str, b: str) -> None:
    left, right = elements(a, 128), elements(b, N)
    image = np.concatenate([placed(left.rows), placed(right.rows)])
    got = executed(dense_text("i8", a, b, 2), image, np.zeros((128, N), np.int32))
    assert (got == 2 * left.values @ right.values.T).all()


def test_64_rows_lie_in_the_lower_half_of_each_quarter() -> None:
    left, right = elements("bf16", 64), elements("bf16", N)
    image = np.zeros(SCALES, np.uint8)
    image[: 64 * 32], image[B:] = placed(left.rows), placed(right.rows)
    text = dense_text("f16", "bf16", "bf16", rows=64)
    got = executed(text, image, np.zeros((128, N), np.float32), checks=False)
    model = accumulators.BLACKWELL_BF16
    want = model.dots(left.values, right.values)
    want = model.dots(left.values, right.values, want)
    rows = [lane for lane in range(128) if lane % 32 < 16]
    assert (got[rows] == want).all()
    assert np.isnan(np.delete(got, rows, axis=0)).all()  # poison


def test_signs_of_a_and_b_are_changed() -> None:
    left, right = elements("e4m3", 128), elements("e4m3", N)
    image = np.concatenate([placed(left.rows), placed(right.rows)])
    plain, minus, both = (
        executed(
            dense_text("f8f6f4", "e4m3", "e4m3", more=more), image, np.zeros((128, N), np.float32)
        )
        for more in (0, 1 << 13, 3 << 13)
    )
    assert (minus == -plain).all()
    assert (both == plain).all()


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_operands_with_contiguous_rows_are_transposed(kind: str) -> None:
    """Without a swizzle 16 bytes of rows on is the stride, 8 along K the leading offset."""
    left, right = elements(kind, 128), elements(kind, N)
    name = "f16" if kind == "bf16" else "f8f6f4"

    def across(rows: Array) -> Array:
        per = 16 // rows.itemsize
        depth = rows.shape[1]
        image = np.zeros((len(rows) // per, depth // 8, 8, per), rows.dtype)
        for row, k in itertools.product(range(len(rows)), range(depth)):
            image[row // per, k // 8, k % 8, row % per] = rows[row, k]
        return image.view(np.uint8).ravel()

    depth = left.rows.shape[1]
    fields = 1 << 46 | (depth * 16 >> 4) << 32 | 128 >> 4 << 16
    body = descriptor(A, fields=fields) + descriptor(B, "%rd11", fields=fields) + MINUS
    body += mma(f"tcgen05.mma.cta_group::1.kind::{name}", idesc(name, kind, kind, more=3 << 15))
    text = tensor_kernel(body + COMMIT + WAIT + stored(N), image=SCALES)
    image = np.concatenate([across(left.rows), across(right.rows)])
    got = executed(text, image, np.zeros((128, N), np.float32))
    model = accumulators.BLACKWELL_BF16 if kind == "bf16" else accumulators.BLACKWELL_FP8
    assert (got == model.dots(left.values, right.values)).all()


COPY_A = "@%p2 tcgen05.cp.cta_group::1.128x256b [%r11], %rd10;\n"


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_in_tensor_memory(schedule: str, kind: str) -> None:
    left, right = elements(kind, 128), elements(kind, N)
    name = "f16" if kind == "bf16" else "f8f6f4"
    fields = 1 << 46 | STRIDE >> 4 << 32 | LEADING >> 4 << 16
    body = descriptor(A, fields=fields) + descriptor(B, "%rd11") + MINUS
    body += f"add.u32 %r11, %r5, 32;\n{COPY_A}"
    opcode = f"tcgen05.mma.cta_group::1.kind::{name}.collector::a::discard"
    body += mma(opcode, idesc(name, kind, kind), a="[%r11]")
    text = tensor_kernel(body + COMMIT + WAIT + stored(N), image=SCALES)
    image = np.concatenate([placed(left.rows), placed(right.rows)])
    got = executed(text, image, np.zeros((128, N), np.float32), schedule=schedule, seed=2)
    model = accumulators.BLACKWELL_BF16 if kind == "bf16" else accumulators.BLACKWELL_FP8
    assert (got == model.dots(left.values, right.values)).all()


def test_64_rows_of_a_in_tensor_memory_lie_as_their_sums_do() -> None:
    left, right = elements("bf16", 64), elements("bf16", N)
    rows = np.zeros((128, 16), np.uint16)
    rows[[lane for lane in range(128) if lane % 32 < 16]] = left.rows
    body = descriptor(A) + descriptor(B, "%rd11") + MINUS + f"add.u32 %r11, %r5, 32;\n{COPY_A}"
    opcode = "tcgen05.mma.cta_group::1.kind::f16"
    body += mma(opcode, idesc("f16", "bf16", "bf16", rows=64), a="[%r11]")
    text = tensor_kernel(body + COMMIT + WAIT + stored(N), image=SCALES)
    image = np.concatenate([placed(rows), placed(right.rows)])
    got = executed(text, image, np.zeros((128, N), np.float32), checks=False)
    want = accumulators.BLACKWELL_BF16.dots(left.values, right.values)
    assert (got[[lane for lane in range(128) if lane % 32 < 16]] == want).all()


def test_lanes_that_are_disabled_keep_what_they_hold() -> None:
    left, right = elements("bf16", 128), elements("bf16", N)
    image = np.concatenate([placed(left.rows), placed(right.rows)])
    bits, opcode = idesc("f16", "bf16", "bf16"), "tcgen05.mma.cta_group::1.kind::f16"
    words = (0x80000001, 0, 0xFFFF0000, 5)
    body = descriptor(A) + descriptor(B, "%rd11") + MINUS + mma(opcode, bits) + PLUS
    body += "".join(f"mov.u32 %r{20 + i}, {word:#x};\n" for i, word in enumerate(words))
    body += mma(opcode, bits, tail="{%r20, %r21, %r22, %r23}") + COMMIT + WAIT + stored(N)
    got = executed(tensor_kernel(body, image=SCALES), image, np.zeros((128, N), np.float32))
    model = accumulators.BLACKWELL_BF16
    once = model.dots(left.values, right.values)
    again = model.dots(left.values, right.values, once)
    off = np.array([words[lane // 32] >> lane % 32 & 1 for lane in range(128)], bool)
    assert (got == np.where(off[:, None], once, again)).all()


@pytest.mark.parametrize("kind", ["f16", "tf32"])
def test_d_is_divided_by_a_power_of_two_before_it_is_added(kind: str) -> None:
    a = "bf16" if kind == "f16" else "tf32"
    left, right = elements(a, 128), elements(a, N)
    image = np.concatenate([placed(left.rows), placed(right.rows)])
    bits, opcode = idesc(kind, a, a), f"tcgen05.mma.cta_group::1.kind::{kind}"
    body = descriptor(A) + descriptor(B, "%rd11") + MINUS + mma(opcode, bits) + PLUS
    body += mma(opcode, bits).replace("%p5;", "%p5, 3;") + COMMIT + WAIT + stored(N)
    got = executed(tensor_kernel(body, image=SCALES), image, np.zeros((128, N), np.float32))
    model = accumulators.BLACKWELL_BF16 if kind == "f16" else accumulators.BLACKWELL_TF32
    once = model.dots(left.values, right.values)
    assert (got == model.dots(left.values, right.values, once / 8)).all()


SCALED = [
    ("mxf8f6f4", "", 32, "ue8m0", "e4m3", "e4m3"),
    ("mxf8f6f4", ".block32", 32, "ue8m0", "e5m2", "e2m1"),
    ("mxf8f6f4", ".scale_vec::1X", 32, "ue8m0", "e2m1", "e2m3"),
    ("mxf8f6f4", "", 32, "ue8m0", "e3m2", "e4m3"),
    ("mxf4", "", 32, "ue8m0", "e2m1", "e2m1"),
    ("mxf4", ".block32", 32, "ue8m0", "e2m1", "e2m1"),
    ("mxf4", ".scale_vec::2X", 32, "ue8m0", "e2m1", "e2m1"),
    ("mxf4nvf4", ".block16", 16, "ue4m3", "e2m1", "e2m1"),
    ("mxf4nvf4", ".scale_vec::4X", 16, "ue8m0", "e2m1", "e2m1"),
    ("mxf4nvf4", ".block32", 32, "ue4m3", "e2m1", "e2m1"),
    ("mxf4nvf4", ".scale_vec::2X", 32, "ue8m0", "e2m1", "e2m1"),
]
COPY_SCALES = """add.u32 %r11, %r5, 32;
add.u32 %r12, %r5, 36;
@%p2 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r11], %rd12;
@%p2 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r12], %rd13;
"""
SCALE_FIELDS = 1 << 46 | 128 >> 4 << 32


def scaled_text(kind: str, spelled: str, bits: int, *, swap: str = "") -> str:
    opcode = f"tcgen05.mma.cta_group::1.kind::{kind}.block_scale{spelled}"
    body = descriptor(SCALES, "%rd12", fields=SCALE_FIELDS)
    body += descriptor(SCALES + 512, "%rd13", fields=SCALE_FIELDS) + COPY_SCALES
    body += twice(opcode, bits, scales="[%r11], [%r12], ")
    return tensor_kernel(body + swap + stored(N), image=SCALES + 1024)


def tile(codes: Array) -> Array:
    """512 bytes of the scales of up to 128 rows, four each: byte 16 (r % 32) + 4 (r / 32) + b."""
    image = np.full(512, 0x7F, np.uint8)
    for r, b in itertools.product(range(len(codes)), range(4)):
        image[r % 32 * 16 + r // 32 * 4 + b] = codes[r, b]
    return image


def scale_codes(kind: str, rows: int) -> Array:
    low, high = (118, 136) if kind == "ue8m0" else (0x20, 0x50)
    return RANDOM.integers(low, high, (rows, 4)).astype(np.uint8)


def factors(codes: Array, kind: str) -> Array:
    return 2.0 ** (codes.astype(np.float64) - 127) if kind == "ue8m0" else E4M3[codes]


def scaled_cases() -> Iterator[tuple[Any, ...]]:
    for case in SCALED:
        count = {"mxf8f6f4": 32}.get(case[0], 64) // case[2]
        for id in range(0, 5 - count, count):
            yield (*case, id)


@pytest.mark.parametrize(("kind", "spelled", "per", "scale", "a", "b", "id"), list(scaled_cases()))
def test_block_scaled_products(
    kind: str, spelled: str, per: int, scale: str, a: str, b: str, id: int
) -> None:
    """The whole way of scales: bytes of shared memory, copies, words, ids."""
    packed = kind != "mxf8f6f4"
    left, right = (elements(x, rows, packed=packed) for x, rows in ((a, 128), (b, N)))
    codes = scale_codes(scale, 128), scale_codes(scale, N)
    other = (id + 1) % 4 if not packed else (2 - id if per == 32 else 0)
    more = id << 29 | other << 4 | (scale == "ue8m0") << 23
    image = np.concatenate([placed(left.rows), placed(right.rows), *map(tile, codes)])
    text = scaled_text(kind, spelled, idesc(kind, a, b, more=more))
    got = executed(text, image, np.zeros((128, N), np.float32), schedule="hunt", seed=3)
    count = left.values.shape[1] // per
    x, y = (
        one.values * np.repeat(factors(code, scale)[:, first : first + count], per, axis=1)
        for one, code, first in ((left, codes[0], id), (right, codes[1], other))
    )
    model: Any = accumulators.BLACKWELL_MXFP4 if packed else accumulators.BLACKWELL_MXFP8
    once = model.dots(x, y)
    want = model.dots(x, y, once)
    unit = 2.0**-22 * (np.abs(x) @ np.abs(y).T)
    assert (np.abs(got - want) <= unit).all()
    assert (got == want).mean() > 0.99


CELLS = 256
NAMES = ", ".join(f"%r{60 + i}" for i in range(32))
FILL = "".join(
    "".join(f"add.u32 %r{60 + i}, %r58, {first + i};\n" for i in range(32))
    + f"add.u32 %r59, %r7, {first};\n"
    + f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r59], {{{NAMES}}};\n"
    for first in range(0, CELLS, 32)
)
FILLED = f"mul.lo.u32 %r58, %r0, 65539;\n{FILL}tcgen05.wait::st.sync.aligned;\n"
"""Cell (lane, column) holds 65539 lane + column."""


def cell(lane: int, column: int) -> int:
    return (65539 * lane + column) & 0xFFFFFFFF


def place(shape: str, t: int, r: int, half: int) -> tuple[int, int]:
    """Lane and column of register r of thread t, as the ISA's figures have them."""
    return {
        "32x32b": (t, r),
        "16x64b": (t // 4 + 8 * (t & 1), 2 * r + (t >> 1 & 1)),
        "16x128b": (t // 4 + 8 * (r & 1), 4 * (r >> 1) + (t & 3)),
        "16x256b": (t // 4 + 8 * (r >> 1 & 1), 8 * (r >> 2) + 2 * (t & 3) + (r & 1)),
        "16x32bx2": (t % 16, r + (half if t >= 16 else 0)),
    }[shape]


REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
COUNTS = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32, "16x32bx2": 128}
MOVES = [
    (shape, 1 << power, packs)
    for shape, most in COUNTS.items()
    for power in range(most.bit_length())
    for packs in (False, True)
    if (1 << power) * REGISTERS[shape] <= 64 or power % 2
]
MOVES = [
    (shape, count, packs)
    for shape, count, packs in MOVES
    if max(place(shape, 31, count * REGISTERS[shape] - 1, 0)) * (2 if packs else 1) < CELLS - 1
    and (shape != "16x32bx2" or count <= (32 if packs else 64))  # halves lie apart
]


def moved(shape: str, count: int, *, packs: bool, loads: bool) -> str:
    """All registers are loaded and stored, or the numbers of registers and threads are stored."""
    total = count * REGISTERS[shape]
    names = ", ".join(f"%r{60 + i}" for i in range(total))
    half = ", 64" if shape == "16x32bx2" else ""
    address = "[%r56]" if shape != "32x32b" else "[%r7]"
    text = "add.u32 %r56, %r7, 1048576;\n"  # 16 lanes on
    if loads:
        form = f"{shape}.x{count}{'.pack::16b' if packs else ''}.b32"
        text += f"tcgen05.ld.sync.aligned.{form} {{{names}}}, {address}{half};\n"
        text += "tcgen05.wait::ld.sync.aligned;\n" + OUT.format(bytes=4 * total)
        return text + "".join(f"st.global.u32 [%rd31+{4 * i}], %r{60 + i};\n" for i in range(total))
    form = f"{shape}.x{count}{'.unpack::16b' if packs else ''}.b32"
    text += "".join(f"add.u32 %r{60 + i}, %r58, {7 * i};\n" for i in range(total))
    text += f"tcgen05.st.sync.aligned.{form} {address}{half}, {{{names}}};\n"
    return text + "tcgen05.wait::st.sync.aligned;\n" + stored(128, 0)


def move_text(shape: str, count: int, *, packs: bool, loads: bool) -> str:
    body = FILLED + moved(shape, count, packs=packs, loads=loads)
    return tensor_kernel(body, image=0, columns=CELLS)


def first_lane(shape: str) -> int:
    return 0 if shape == "32x32b" else 16


@pytest.mark.parametrize(("shape", "count", "packs"), MOVES)
def test_loads_take_the_cells_of_the_isa(shape: str, count: int, packs: bool) -> None:
    total = count * REGISTERS[shape]
    text = move_text(shape, count, packs=packs, loads=True)
    got = executed(text, np.zeros(4, np.uint8), np.zeros((128, total), np.uint32))
    want = np.zeros_like(got)
    for thread, r in itertools.product(range(128), range(total)):
        lane, column = place(shape, thread % 32, r, 32 if packs else 64)
        lane += thread // 32 * 32 + first_lane(shape)
        if packs:
            pair = [cell(lane, 2 * column + i) & 0xFFFF for i in (0, 1)]
            want[thread, r] = pair[0] | pair[1] << 16
        else:
            want[thread, r] = cell(lane, column)
    assert (got == want).all()


@pytest.mark.parametrize(("shape", "count", "packs"), MOVES)
def test_stores_change_the_cells_of_the_isa(shape: str, count: int, packs: bool) -> None:
    text = move_text(shape, count, packs=packs, loads=False)
    got = executed(text, np.zeros(4, np.uint8), np.zeros((128, 128), np.uint32))
    want = np.array([[cell(lane, column) for column in range(CELLS)] for lane in range(128)])
    for thread, r in itertools.product(range(128), range(count * REGISTERS[shape])):
        lane, column = place(shape, thread % 32, r, 32 if packs else 64)
        lane += thread // 32 * 32 + first_lane(shape)
        value = (65539 * thread + 7 * r) & 0xFFFFFFFF
        if packs:
            want[lane, 2 * column], want[lane, 2 * column + 1] = value & 0xFFFF, value >> 16
        else:
            want[lane, column] = value
    assert (got == want[:, :128]).all()


COPIES = {
    "128x256b": (128, 32, lambda row: (row,)),
    "128x128b": (128, 16, lambda row: (row,)),
    "64x128b.warpx2::02_13": (64, 16, lambda row: (row, row + 64)),
    "64x128b.warpx2::01_23": (
        64,
        16,
        lambda row: (row + row // 32 * 32, row + 32 + row // 32 * 32),
    ),
    "32x128b.warpx4": (32, 16, lambda row: (row, row + 32, row + 64, row + 96)),
}


def copy_text(shape: str) -> str:
    body = descriptor(0) + f"@%p2 tcgen05.cp.cta_group::1.{shape} [%r5], %rd10;\n"
    return tensor_kernel(body + COMMIT + WAIT + stored(8), image=4096, columns=32)


@pytest.mark.parametrize("shape", COPIES)
@pytest.mark.parametrize("schedule", ["eager", "hunt"])
def test_copies_fill_the_lanes_of_the_isa(schedule: str, shape: str) -> None:
    rows, row_bytes, lanes_of = COPIES[shape]
    image = RANDOM.integers(0, 256, 4096).astype(np.uint8)
    got = executed(
        copy_text(shape), image, np.zeros((128, 8), np.uint32), schedule=schedule, checks=False
    )
    want = np.full((128, 8), 0xFFFFFFFF, np.uint32)
    for row, chunk in itertools.product(range(rows), range(row_bytes // 16)):
        start = row // 8 * STRIDE + row % 8 * 16 + chunk * LEADING
        for lane in lanes_of(row):
            want[lane, 4 * chunk : 4 * chunk + 4] = image[start : start + 16].view(np.uint32)
    assert (got == want).all()


def texts() -> Iterator[str]:
    for kind, a, b, sums, _ in DENSE[:4]:
        yield dense_text(kind, a, b, sums)
    yield dense_text("i8", "u8", "s8", 2)
    for kind, spelled, _, scale, a, b in SCALED:
        yield scaled_text(kind, spelled, idesc(kind, a, b, more=(scale == "ue8m0") << 23))
    yield from (copy_text(shape) for shape in COPIES)
    for shape, count, packs in MOVES[::3]:
        yield from (move_text(shape, count, packs=packs, loads=loads) for loads in (False, True))


def test_an_assembler_takes_these_kernels(assembles: Any) -> None:
    assembles(list(texts()))
