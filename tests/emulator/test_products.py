"""wgmma of every type, operands in shared memory and in registers, K or rows contiguous.

Operands are small whole numbers, whose sums are exact in every type, so that numpy's product of
integers says what has to come out. Where bytes lie is computed here, from the ISA's formulas.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from ptx_kernels import Array, kernel

from mqa.emulator import EmulationError, Kind, run
from mqa.emulator.scheduler import SCHEDULES
from mqa.emulator.units import FORMS, OPCODES, round_half, wrap
from mqa.emulator.wgmma import Whole, _decoded, multiply

RANDOM = np.random.default_rng(7)
ROWS, COLUMNS = 64, 16
KINDS = {"e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "tf32": 4}
"""Bytes of an element."""
THREADS = np.arange(128)


def encoded(values: Array, kind: str) -> Array:
    """Bytes of whole numbers in a type, [rows, 32]."""
    import torch

    floats = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "f16": torch.float16}
    floats |= {"bf16": torch.bfloat16, "tf32": torch.float32}
    if kind in floats:
        given = torch.from_numpy(values.astype(np.float32)).to(floats[kind])
        return given.view(torch.uint8).numpy().reshape(len(values), -1)
    return values.astype(np.int8 if kind == "s8" else np.uint8).view(np.uint8)


def by_rows(data: Array) -> Array:
    """K-major with a swizzle of 32 bytes: rows beside each other, 16-byte halves exchanged in
    every second line of 128 bytes."""
    place = np.arange(data.size)
    image = np.zeros(data.size, np.uint8)
    image[place ^ (place >> 3 & 16)] = data.reshape(-1)
    return image


def by_columns(data: Array) -> Array:
    """Rows contiguous, 16-bit elements, no swizzle: groups of 8 K, in them of 8 rows, then K."""
    elements = np.ascontiguousarray(data).view(np.uint16)
    groups = elements.reshape(len(data) // 8, 8, 2, 8).transpose(2, 0, 3, 1)
    return np.ascontiguousarray(groups).view(np.uint8).reshape(-1)


def in_registers(data: Array) -> Array:
    """A as four words of each thread, [4, 128]."""
    register, byte = np.arange(4)[:, None, None], np.arange(4)
    thread = THREADS[:, None]
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)
    column = 4 * (thread % 4) + byte + 16 * (register // 2)
    return np.ascontiguousarray(data[row, column]).view(np.uint32)[..., 0]


@dataclass(frozen=True)
class Product:
    """One form of the instruction."""

    types: str
    from_registers: bool = False
    across: tuple[bool, bool] = (False, False)

    def __str__(self) -> str:
        where = "registers" if self.from_registers else "shared"
        return f"{self.types}-{where}-{''.join('kr'[x] for x in self.across)}"

    @property
    def kinds(self) -> tuple[str, str, str]:
        sums, a, b = self.types.removesuffix(".satfinite").split(".")
        return sums, a, b

    @property
    def registers(self) -> int:
        return COLUMNS // (4 if self.kinds[0] == "f16" else 2)

    def text(self) -> str:
        """Loads images of A and B, adds the product to accumulators of ones, stores them."""
        sums, a, _ = self.kinds
        dests = ", ".join(f"%r{20 + i}" for i in range(self.registers))
        source = "{%r10, %r11, %r12, %r13}" if self.from_registers else "%rd20"
        majors = [int(x) for x in self.across][self.from_registers :] if KINDS[a] == 2 else []
        rest = [] if sums == "s32" else [1, 1]
        trailing = "".join(f", {x}" for x in (*rest, *majors))
        depth = 32 // KINDS[a]
        opcode = f"wgmma.mma_async.sync.aligned.m64n{COLUMNS}k{depth}.{self.types}"
        one = {"f32": "0x3f800000", "f16": "0x3c003c00", "s32": "1"}[sums]
        body = "".join(
            [
                COPY,
                descriptor("%rd20", "%rd8", ROWS, across=self.across[0]),
                descriptor("%rd21", "%rd9", COLUMNS, across=self.across[1]),
                *(f"mov.b32 %r{20 + i}, {one};\n" for i in range(self.registers)),
                "wgmma.fence.sync.aligned;\n",
                f"setp.eq.u32 %p3, 0, 0;\n{opcode} {{{dests}}}, {source}, %rd21, %p3{trailing};\n",
                "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n",
                *(f"st.global.b32 [%rd19+{512 * i}], %r{20 + i};\n" for i in range(self.registers)),
            ]
        )
        return kernel(body, 3, shared=SHARED)

    def operands(self, a: Array, b: Array) -> tuple[Array, Array, Array]:
        """Images of shared memory, A's first, and A's words for registers."""
        _, first, second = self.kinds
        data = encoded(a, first), encoded(b, second)
        images = [
            (by_columns if across else by_rows)(x)
            for x, across in zip(data, self.across, strict=True)
        ]
        return images[0], images[1], in_registers(data[0])

    def sums(self, out: Array) -> Array:
        """Values of D from registers [registers, 128]."""
        kind = self.kinds[0]
        if kind == "f16":
            pairs = np.ascontiguousarray(out.T).view(np.float16).T
        else:
            pairs = out.view(np.float32 if kind == "f32" else np.int32)
        register, thread = np.arange(COLUMNS // 2)[:, None], THREADS
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
        column = 8 * (register // 4) + 2 * (thread % 4) + register % 2
        found = np.zeros((ROWS, COLUMNS))
        found[row, column] = pairs
        return found


COPY = f"""
mov.u64 %rd8, tiles;
add.s64 %rd9, %rd8, {ROWS * 32};
mul.wide.u32 %rd10, %r0, 4;
add.s64 %rd19, %rd0, %rd10;
add.s64 %rd11, %rd1, %rd10;
add.s64 %rd12, %rd8, %rd10;
mov.u32 %r1, 0;
COPY: ld.global.u32 %r2, [%rd11];
st.shared.u32 [%rd12], %r2;
add.s64 %rd11, %rd11, 512;
add.s64 %rd12, %rd12, 512;
add.u32 %r1, %r1, 1;
setp.lt.u32 %p1, %r1, {(ROWS + COLUMNS) * 32 // 512};
@%p1 bra COPY;
fence.proxy.async.shared::cta;
bar.sync 0;
add.s64 %rd13, %rd2, %rd10;
ld.global.b32 %r10, [%rd13];
ld.global.b32 %r11, [%rd13+512];
ld.global.b32 %r12, [%rd13+1024];
ld.global.b32 %r13, [%rd13+1536];
"""
SHARED = f".shared .align 1024 .b8 tiles[{(ROWS + COLUMNS) * 32}];"


def descriptor(to: str, base: str, rows: int, *, across: bool) -> str:
    """PTX that makes the descriptor of a tile at a shared address."""
    if across:
        fields = rows * 16 >> 4 << 16 | 128 >> 4 << 32
    else:
        fields = 256 >> 4 << 32 | 3 << 62
    return f"shr.u64 {to}, {base}, 4;\nor.b64 {to}, {to}, {fields:#x};\n"


def forms() -> list[Product]:
    found = [Product(types, held) for types in OPCODES for held in (False, True)]
    for types in OPCODES:
        if types.split(".")[1] in ("f16", "bf16"):
            majors = itertools.product((False, True), repeat=2)
            found += [Product(types, across=x) for x in majors if any(x)]
            found.append(Product(types, from_registers=True, across=(False, True)))
    return found


PRODUCTS = forms()
TEXTS = [product.text() for product in PRODUCTS]


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_a_product_of_whole_numbers_is_exact(product: Product) -> None:
    _, first, second = product.kinds
    depth = 32 // KINDS[first]
    a, b = (
        RANDOM.integers(0 if kind == "u8" else -3, 4, (rows, depth))
        for kind, rows in ((first, ROWS), (second, COLUMNS))
    )
    image_a, image_b, words = product.operands(a, b)
    out = np.zeros((product.registers, 128), np.uint32)
    run(
        product.text(),
        "k",
        1,
        128,
        [out, np.concatenate([image_a, image_b]), words],
        schedule="lazy",
    )
    assert np.array_equal(product.sums(out), a @ b.T + 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("types", ["f32.bf16.bf16", "f16.f16.f16"])
def test_registers_of_any_32_bits_own_sums_and_pass_them_on(types: str, schedule: str) -> None:
    """Moved to .f32 and back before the wait, of which only the last register is stored."""
    product = Product(types)
    moves = "mov.b32 %f9, %r20;\nmov.f32 %f10, %f9;\nmov.b32 %r60, %f10;\n"
    wait = "wgmma.wait_group.sync.aligned 0;\n"
    text = product.text().replace(wait, moves + wait)
    text = text.replace("[%rd19+0], %r20", "[%rd19+0], %r60")
    a, b = (RANDOM.integers(-3, 4, (rows, 16)) for rows in (ROWS, COLUMNS))
    image_a, image_b, words = product.operands(a, b)
    out = np.zeros((product.registers, 128), np.uint32)
    args = [out, np.concatenate([image_a, image_b]), words]
    run(text, "k", 1, 128, args, schedule=schedule, seed=1)
    assert np.array_equal(product.sums(out), a @ b.T + 1)


@pytest.mark.parametrize(
    ("left_out", "kind"),
    [
        ("wgmma.fence.sync.aligned;\n", Kind.PRODUCT_FENCE),
        ("fence.proxy.async.shared::cta;\n", Kind.PROXY_FENCE),
    ],
)
def test_fences_that_are_left_out_are_found_unless_they_are_not_looked_for(
    left_out: str, kind: Kind
) -> None:
    product = Product("f32.f16.f16")
    a, b = (RANDOM.integers(-3, 4, (rows, 16)) for rows in (ROWS, COLUMNS))
    image_a, image_b, words = product.operands(a, b)
    out = np.zeros((product.registers, 128), np.uint32)
    args = [out, np.concatenate([image_a, image_b]), words]
    text = product.text().replace(left_out, "")
    with pytest.raises(EmulationError) as caught:
        run(text, "k", 1, 128, args)
    assert caught.value.report.kind is kind
    run(text, "k", 1, 128, args, ignore=[kind])
    assert np.array_equal(product.sums(out), a @ b.T + 1)
    with pytest.raises(
        ValueError,
        match="ignore has RACE, expected PRODUCT_FENCE, PROXY_FENCE, TENSOR_FENCE, "
        "UNFINISHED alone",
    ):
        run(text, "k", 1, 128, args, ignore=[kind, Kind.RACE])


def test_an_assembler_takes_these_kernels(assembles: Any) -> None:
    assembles(TEXTS)


def codes(kind: str, rows: int) -> Array:
    """Bytes of numbers of a type, [rows, 32], not so large that sums overflow."""
    raw = RANDOM.integers(0, 256, (rows, 32), np.uint8)
    raw[:, KINDS[kind] - 1 :: KINDS[kind]] &= 0xBF
    return raw


@pytest.mark.parametrize("name", [x for x, form in FORMS.items() if form.model is not None])
def test_any_numbers_are_summed_as_the_model_of_their_type_says(name: str) -> None:
    form = FORMS[name]
    a, b = codes(form.a, ROWS), codes(form.b, 24)
    first, second = _decoded(a.tobytes(), ROWS, form.a), _decoded(b.tobytes(), 24, form.b)
    start = round_half(RANDOM.normal(size=(ROWS, 24)))
    assert form.model is not None
    got = multiply(first, second, start, name)
    assert np.array_equal(got, form.model.dots(first.values, second.values, start))
    if form.sums == "f16":
        assert np.array_equal(got, round_half(got))


def test_float16_sums_are_rounded_to_nearest_even_once() -> None:
    a, b = np.zeros((ROWS, 16), np.float16), np.zeros((8, 16), np.float16)
    a[:, :3], b[:, :3] = [2048, 1, 2.0**-12], 1
    first, second = (_decoded(x.tobytes(), len(x), "f16") for x in (a, b))
    # 2048 + 1 is halfway between two float16 values, and the small term decides.
    assert (multiply(first, second, None, "f16 of f16") == 2050).all()
    assert (multiply(first, second, None, "f16") == 2049 + 2.0**-12).all()


def test_integer_sums_wrap_or_saturate() -> None:
    sums = np.array([2.0**31 - 1, 2.0**31, -(2.0**31) - 1, 5.0])
    assert wrap(sums, saturates=False).tolist() == [2**31 - 1, -(2**31), 2**31 - 1, 5]
    assert wrap(sums, saturates=True).tolist() == [2**31 - 1, 2**31 - 1, -(2**31), 5]


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [("bf16", 2.0**70, np.inf), ("f16 of f16", 2.0**8, np.inf), ("f16", 2.0**8, 2.0**20)],
)
def test_sums_beyond_the_largest_number_are_infinite(
    name: str, value: float, wanted: float
) -> None:
    form = FORMS[name]
    a, b = (encoded(np.full((rows, 16), value), form.a) for rows in (ROWS, 8))
    first, second = _decoded(a.tobytes(), ROWS, form.a), _decoded(b.tobytes(), 8, form.b)
    assert form.model is not None
    # The short way, for sums that need no rounding, is not taken where one may be too large.
    assert (Whole().with_products(first, second, form.model) is None) == np.isinf(wanted)
    assert (multiply(first, second, None, name).astype(np.float32) == wanted).all()


UNSTORED = """setp.ne.u32 %p4, %r1, 4;
setp.ne.or.u32 %p4, %r0, 0, %p4;
@%p4 st.shared.u32 [%rd12], %r2;
and.b32 %r3, %r0, 3;
setp.ne.u32 %p5, %r3, 0;
"""
"""All words of both tiles are stored but the first one of B. Columns 0 and 1 of D come from it, of
which every fourth thread has elements."""


@pytest.mark.parametrize(
    ("types", "across"),
    [("f32.e4m3.e4m3", False), *itertools.product(("f32.f16.f16", "f16.f16.f16"), (False, True))],
)
def test_sums_with_what_was_never_written_must_not_be_stored(types: str, across: bool) -> None:
    product = Product(types, across=(across, across))
    assert "st.shared.u32 [%rd12], %r2;\n" in COPY
    text = product.text().replace("st.shared.u32 [%rd12], %r2;\n", UNSTORED)
    image = np.zeros((ROWS + COLUMNS) * 32, np.uint8)
    args = [np.zeros((product.registers, 128), np.uint32), image, np.zeros((4, 128), np.uint32)]
    run(text.replace("st.global", "@%p5 st.global"), "k", 1, 128, args, schedule="hunt")
    with pytest.raises(EmulationError, match=rf"tiles \+ {ROWS * 32} .* read by wgmma") as caught:
        run(text, "k", 1, 128, args, schedule="hunt")
    assert caught.value.report.kind is Kind.UNWRITTEN
