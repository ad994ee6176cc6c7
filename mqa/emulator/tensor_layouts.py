"""What Blackwell's tensor unit reads from bits: descriptors, and the layouts of tensor memory.

Nothing here is shared with what hosts or kernels encode. Sources are the tables of the PTX ISA 9.0,
chapter "TensorCore 5th Generation Family Instructions", and where it has only figures CuTe's layout
algebra, against which tests compare each function. No hardware confirmed them.

Lanes, columns and registers of functions are relative to an address in tensor memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from mqa.emulator.floats import Array
from mqa.emulator.reports import Finding, Kind

LANES, COLUMNS = 128, 512
"""Of tensor memory, in cells of 32 bits."""
QUARTER = 32
"""Lanes that a warp reaches: those of its number modulo 4."""
CHUNK = 16
"""Bytes of shared memory that stay together under every swizzle."""
_SPANS = {0: 0, 2: 128, 4: 64, 6: 32}
"""Bytes of a swizzled row, by the three bits of a descriptor."""
_KNOWN_BITS = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 7 << 46 | 7 << 49 | 1 << 52 | 7 << 61


def _refuse(bits: int, width: int, why: str) -> NoReturn:
    raise Finding(Kind.DESCRIPTOR, f"{bits:#0{width // 4 + 2}x} {why}")


@dataclass(frozen=True)
class SharedDescriptor:
    """Where an operand lies in shared memory, in bytes."""

    start: int
    leading: int
    """Offset that the ISA calls leading dimension byte offset."""
    stride: int
    """Offset that it calls stride dimension byte offset."""
    span: int
    """Bytes of a swizzled row; 0 without a swizzle."""


@functools.lru_cache(maxsize=4096)
def shared_descriptor(bits: int) -> SharedDescriptor:
    """Decode 64 bits. Raises a finding where they are none of SM100, or of a form not modelled."""
    if bits & ~_KNOWN_BITS:
        _refuse(bits, 64, "has bits that no field has")
    if bits >> 46 & 7 != 1:
        _refuse(bits, 64, f"has {bits >> 46 & 7} in bits 48:46, where Blackwell's have 1")
    if bits >> 49 & 7:
        _refuse(bits, 64, "has a base offset, which is not modelled")
    if bits >> 52 & 1:
        _refuse(bits, 64, "has an absolute leading offset, which is not modelled")
    swizzle = bits >> 61 & 7
    if swizzle not in _SPANS:
        _refuse(bits, 64, f"has swizzle {swizzle}, expected one of 0, 2, 4, 6")
    start, leading, stride = ((bits >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    return SharedDescriptor(start, leading, stride, _SPANS[swizzle])


def swizzled(places: Array, span: int) -> Array:
    """Where a byte goes: in a line of 128 bytes, 16-byte chunks change places by the number of the
    line. `places` are absolute shared addresses."""
    lines = {0: 0, 32: 1, 64: 3, 128: 7}[span]
    moved: Array = places ^ (places >> 7 & lines) << 4
    return moved


def chunks_along(at: SharedDescriptor, rows: int, row_bytes: int = 32) -> Array:
    """Shared address of each 16-byte chunk of each row of a K-major operand, [rows, chunks]."""
    row, chunk = np.arange(rows)[:, None], np.arange(row_bytes // CHUNK)
    linear = at.start + row // 8 * at.stride
    if at.span == 0:
        return linear + row % 8 * CHUNK + chunk * at.leading
    return swizzled(linear + row % 8 * at.span + chunk * CHUNK, at.span)


def chunks_over(at: SharedDescriptor, rows: int, depth: int, per_chunk: int) -> Array:
    """Shared address of each `per_chunk` rows of an operand whose rows' dimension is contiguous,
    for each of its `depth` elements along K, [depth, rows / per_chunk].

    The two offsets change their roles with the swizzle: without it `per_chunk` rows on is the
    stride and 8 elements along K the leading offset; with it a span on is the leading offset, and 8
    elements along K the stride.
    """
    k, group = np.arange(depth)[:, None], np.arange(rows // per_chunk)
    if at.span == 0:
        return at.start + k % 8 * CHUNK + k // 8 * at.leading + group * at.stride
    inside, repeat = group % (at.span // CHUNK), group // (at.span // CHUNK)
    linear = at.start + k % 8 * at.span + k // 8 * at.stride
    return swizzled(linear + inside * CHUNK + repeat * at.leading, at.span)


@functools.lru_cache(maxsize=4096)
def chunks_of(bits: int, rows: int, row_bytes: int = 32) -> Array:
    """`chunks_along` of a descriptor of Blackwell."""
    return chunks_along(shared_descriptor(bits), rows, row_bytes)


@functools.lru_cache(maxsize=4096)
def chunks_across(bits: int, rows: int, depth: int, per_chunk: int) -> Array:
    """`chunks_over` of a descriptor of Blackwell."""
    return chunks_over(shared_descriptor(bits), rows, depth, per_chunk)


_NARROW = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _NARROW,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _NARROW,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
"""Operands' types by kind and by their code in an instruction descriptor."""
_SUMS = {"f16": (0, 1), "tf32": (1,), "f8f6f4": (0, 1), "i8": (2,)}
"""Codes of the sums' type that a kind takes."""
BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
_DENSE_BITS = 7 << 3 | 0xFFFF << 7 | 0x3F << 17 | 0x1F << 24
_SCALED_BITS = 3 << 4 | 0x7F << 7 | 3 << 15 | 0x7F << 17 | 3 << 27 | 3 << 29


@dataclass(frozen=True)
class InstructionDescriptor:
    """What a product multiplies, of 32 bits."""

    kind: str
    rows: int
    """M, of both CTAs in a pair."""
    columns: int
    """N."""
    a: str
    b: str
    sums: str
    """f32, f16 or s32."""
    negate_a: bool
    negate_b: bool
    across_a: bool
    """Whether the rows' dimension of A is the contiguous one (MN-major, "transposed")."""
    across_b: bool
    saturates: bool
    scale: str
    """Type of block scales, ue8m0 or ue4m3; empty without."""
    a_id: int
    """First byte of a word of scales that this product uses."""
    b_id: int

    @property
    def depth(self) -> int:
        """K, elements of an operand's row."""
        return {"f16": 16, "tf32": 8, "mxf4": 64, "mxf4nvf4": 64}.get(self.kind, 32)


@functools.lru_cache(maxsize=4096)
def instruction_descriptor(bits: int, kind: str, ctas: int = 1) -> InstructionDescriptor:
    """Decode 32 bits for `tcgen05.mma.cta_group::<ctas>.kind::<kind>`.

    Raises a finding where they ask for what the kind has not.
    """
    scaled = kind in BLOCK_SCALED
    if bits & 4:
        _refuse(bits, 32, "is of a sparse product, which is not modelled")
    unknown = bits & ~(_SCALED_BITS if scaled else _DENSE_BITS)
    if kind in ("mxf4", "mxf4nvf4"):
        unknown |= bits & (3 << 15 | 1 << 12)
    if unknown:
        _refuse(bits, 32, f"has bits {unknown:#x}, which no field of kind::{kind} has")
    codes = bits >> 7 & 7, bits >> 10 & 7
    types = _TYPES[kind]
    for code, name in zip(codes, "AB", strict=True):
        if code not in types:
            _refuse(bits, 32, f"has type {code} of {name}, which kind::{kind} has not")
    # The block-scaled kinds keep two bits of M, a multiple of 128, where others keep five.
    rows, columns = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
    _check_shape(bits, kind, rows, columns, ctas)
    a_id, b_id = (bits >> 29 & 3, bits >> 4 & 3) if scaled else (0, 0)
    _check_ids(bits, kind, a_id, b_id)
    negate_a, negate_b, across_a, across_b = (bool(bits >> bit & 1) for bit in (13, 14, 15, 16))
    return InstructionDescriptor(
        kind=kind,
        rows=rows,
        columns=columns,
        a=types[codes[0]],
        b=types[codes[1]],
        sums="f32" if scaled else _sums(bits, kind),
        negate_a=negate_a,
        negate_b=negate_b,
        across_a=across_a,
        across_b=across_b,
        saturates=not scaled and bool(bits >> 3 & 1),
        scale=("ue8m0" if bits >> 23 & 1 else "ue4m3") if scaled else "",
        a_id=a_id,
        b_id=b_id,
    )


def _sums(bits: int, kind: str) -> str:
    code = bits >> 4 & 3
    types = bits >> 7 & 7, bits >> 10 & 7
    if code not in _SUMS[kind] or bits >> 6 & 1:
        _refuse(bits, 32, f"has sums of type {bits >> 4 & 7}, which kind::{kind} has not")
    if kind == "f16" and (types[0] != types[1] or (code == 0 and types != (0, 0))):
        _refuse(bits, 32, f"has operands {types} and sums {code}, which do not go together")
    if bits >> 3 & 1 and kind != "i8":
        _refuse(bits, 32, f"saturates, which kind::{kind} does not")
    return ("f16", "f32", "s32")[code]


def _check_shape(bits: int, kind: str, rows: int, columns: int, ctas: int) -> None:
    """Raise a finding unless a kind has such a product."""
    scaled = kind in BLOCK_SCALED
    legal = {1: (128,) if scaled else (64, 128), 2: (256,) if scaled else (128, 256)}[ctas]
    if scaled and ctas == 2:
        legal = (128, 256)
    step = 8 if ctas == 1 else 16
    if kind == "i8":
        step = (8 if columns in (8, 24) else 16) if ctas == 1 else 32
    if rows not in legal or columns % step or not step <= columns <= 256:
        _refuse(
            bits,
            32,
            f"has M = {rows} and N = {columns}, expected M in {legal} and N up to 256 in steps of "
            f"{step} for kind::{kind} and cta_group::{ctas}",
        )


def _check_ids(bits: int, kind: str, a_id: int, b_id: int) -> None:
    """Raise a finding unless a kind has such scales."""
    if kind in ("mxf8f6f4", "mxf4") and not bits >> 23 & 1:
        _refuse(bits, 32, f"has scales of UE4M3, kind::{kind} has those of UE8M0")
    allowed = {"mxf4": (0, 2), "mxf4nvf4": (0, 2)}.get(kind, (0, 1, 2, 3))
    if a_id not in allowed or b_id not in allowed:
        _refuse(bits, 32, f"has scale ids {a_id} and {b_id}, expected of {allowed}")


@functools.lru_cache(maxsize=256)
def places_of_sums(rows: int, columns: int, ctas: int = 1) -> tuple[Array, Array, Array]:
    """CTA of the pair, lane and column of each element of D, three arrays [rows, columns].

    One column holds one element, of whatever type. 64 rows of one CTA leave the upper half of each
    quarter of the lanes alone; 128 rows of a pair are 64 in each CTA, whose right half of the
    columns stands in the lanes from 64 on.
    """
    row, column = np.indices((rows, columns))
    per_cta = rows // ctas
    cta, row = row // per_cta, row % per_cta
    if per_cta == LANES:
        return cta, row, column
    if ctas == 1:
        return cta, row % 16 + row // 16 * QUARTER, column
    half = columns // 2
    return cta, row + column // half * per_cta, column % half


@functools.lru_cache(maxsize=64)
def places_of_scales(rows: int, *, parted: bool = False) -> tuple[Array, Array]:
    """Lanes and column of the word with four scales of each row, [rows, copies] and [rows].

    All quarters of the lanes hold the same. `parted` is the layout of B's for 128 rows of a pair of
    CTAs: two quarters hold the first half of the rows, and the others the second half.
    """
    row, quarters = np.arange(rows), np.arange(0, LANES, QUARTER)
    if not parted:
        return row[:, None] % QUARTER + quarters, row // QUARTER
    half = rows // 2
    within, first = row % half, row // half * 2 * QUARTER
    return (within % QUARTER + first)[:, None] + quarters[:2], within // QUARTER


def scales_of(kind: str, per: int, first: int) -> tuple[int, ...]:
    """Bytes of a word of scales that a product uses, in the order of K: one for each `per`
    elements."""
    count = {"mxf8f6f4": 32}.get(kind, 64) // per
    return tuple(range(first, first + count))


FRAGMENTS = {"32x32b": (1, 128), "16x64b": (1, 128), "16x128b": (2, 64), "16x256b": (4, 32),
             "16x32bx2": (1, 128)}  # fmt: skip
"""Of tcgen05.ld and st: registers of a thread for `.x1`, and the largest count."""


@functools.lru_cache(maxsize=128)
def fragment(shape: str, count: int, offset: int = 0) -> tuple[Array, Array]:
    """Lane and column of each register of each thread, two arrays [registers, 32].

    `offset` is the second half's of `16x32bx2`, in columns.
    """
    per, _ = FRAGMENTS[shape]
    register, thread = np.indices((per * count, 32))
    if shape == "32x32b":
        return thread, register
    if shape == "16x64b":
        return thread // 4 + 8 * (thread & 1), 2 * register + (thread >> 1 & 1)
    if shape == "16x128b":
        return thread // 4 + 8 * (register & 1), 4 * (register >> 1) + (thread & 3)
    if shape == "16x256b":
        lane = thread // 4 + 8 * (register >> 1 & 1)
        return lane, 8 * (register >> 2) + 2 * (thread & 3) + (register & 1)
    return thread % 16, register + thread // 16 * offset


COPIES = {
    "128x256b": (128, 32),
    "128x128b": (128, 16),
    "64x128b.warpx2::02_13": (64, 16),
    "64x128b.warpx2::01_23": (64, 16),
    "32x128b.warpx4": (32, 16),
}
"""Of tcgen05.cp: rows, and bytes of a row. `4x256b` is left out: no source tells its lanes."""


@functools.cache
def lanes_of_copy(shape: str) -> Array:
    """Lanes that each row goes to, [rows, copies]; 4 bytes of a row fill a column."""
    rows, _ = COPIES[shape]
    row = np.arange(rows)[:, None]
    if rows == LANES:
        return row
    if shape.endswith("01_23"):
        return row % QUARTER + row // QUARTER * 2 * QUARTER + np.arange(2) * QUARTER
    return row + np.arange(0, LANES, rows)
