"""Products of a warp and loads of their operands: where elements lie, what sums are, who takes
part, and what is found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ptx_kernels import Array, kernel
from test_isa import values_of

from mqa.emulator import EmulationError, Kind, PtxError, mma, run
from mqa.emulator.executor import _load
from mqa.emulator.scheduler import SCHEDULES
from mqa.emulator.units import HalfSums
from mqa.testing.accumulators import AMPERE_BF16, HOPPER_MMA_BF16

RANDOM = np.random.default_rng(17)
FORMS = [(types, depth) for types in mma.TYPES for depth in mma.DEPTHS]
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def registers(name: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"%{name}{first + i}" for i in range(count)) + "}"


def counts(types: str, depth: int) -> tuple[int, int, int]:
    """Registers of A, of B, and of C and D."""
    return depth // 4, depth // 8, 4 if types.startswith("f32") else 2


def product(types: str, depth: int, d: int = 30, a: int = 10, b: int = 14, c: int = 16) -> str:
    of_a, of_b, sums = counts(types, depth)
    shape = f"mma.sync.aligned.m16n8k{depth}.row.col.{types}"
    return (
        f"{shape} {registers('r', d, sums)}, {registers('r', a, of_a)}, {registers('r', b, of_b)}, "
        f"{registers('r', c, sums)};\n"
    )


def product_text(types: str, depth: int, target: str = "sm_80", before: str = "") -> str:
    """A, B and C come as registers, [registers, 32], from parameters 1 to 3."""
    of_a, of_b, sums = counts(types, depth)
    body = "mul.wide.u32 %rd20, %r0, 4;\n"
    for place in range(4):
        body += f"add.s64 %rd{place}, %rd{place}, %rd20;\n"
    for pointer, first, count in ((1, 10, of_a), (2, 14, of_b), (3, 16, sums)):
        for i in range(count):
            body += f"ld.global.b32 %r{first + i}, [%rd{pointer}+{128 * i}];\n"
    body += before + product(types, depth)
    for i in range(sums):
        body += f"st.global.b32 [%rd0+{128 * i}], %r{30 + i};\n"
    return kernel(body, 4, target=target)


def halves(values: Array, kind: str) -> Array:
    """Bits of values that the format has, as uint16."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def loop_of_a(matrix: Array) -> Array:
    """Registers of A by the ISA's formulas: element i of a lane."""
    found = np.zeros((matrix.shape[1] // 4, 32, 2), np.uint16)
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(matrix.shape[1] // 2):
            row = group if i in (0, 1, 4, 5) else group + 8
            column = thread * 2 + (i & 1) + (8 if i >= 4 else 0)
            found[i // 2, lane, i % 2] = matrix[row, column]
    return found.view(np.uint32)[..., 0]


def loop_of_b(matrix: Array) -> Array:
    """Registers of B, whose matrix is [K, 8]."""
    found = np.zeros((matrix.shape[0] // 8, 32, 2), np.uint16)
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(matrix.shape[0] // 4):
            found[i // 2, lane, i % 2] = matrix[thread * 2 + (i & 1) + (8 if i >= 2 else 0), group]
    return found.view(np.uint32)[..., 0]


def loop_of_c(matrix: Array, *, half: bool) -> Array:
    """Registers of C: float32 values, or pairs of float16 values."""
    values = np.zeros((4, 32), matrix.dtype)
    for lane in range(32):
        for i in range(4):
            values[i, lane] = matrix[(lane >> 2) + (0 if i < 2 else 8), lane % 4 * 2 + (i & 1)]
    if not half:
        return values.astype(np.float32).view(np.uint32)
    pairs = values.astype(np.float16).view(np.uint16).reshape(2, 2, 32)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1)).view(np.uint32)[..., 0]


def multiply(
    types: str, a: Array, b: Array, c: Array, target: str = "sm_80", **how: object
) -> Array:
    """Registers of D of a [16, K] by b [8, K] and c [16, 8]."""
    kind, half = types.split(".")[1], types.startswith("f16")
    out = np.zeros((2 if half else 4, 32), np.uint32)
    given = [
        loop_of_a(halves(a, kind)),
        loop_of_b(halves(b, kind).T),
        loop_of_c(c, half=half),
    ]
    run(product_text(types, a.shape[1], target), "k", 1, 32, [out, *given], **how)  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("types", "depth"), FORMS)
def test_a_warp_multiplies(types: str, depth: int, target: str) -> None:
    a, b = (RANDOM.integers(-8, 9, (rows, depth)).astype(np.float64) for rows in (16, 8))
    c = RANDOM.integers(-200, 201, (16, 8)).astype(np.float64)
    got = multiply(types, a, b, c, target)
    assert np.array_equal(got, loop_of_c(a @ b.T + c, half=types.startswith("f16")))


def test_places_are_those_of_the_worked_examples() -> None:
    """Of the ISA's figures: register and half of elements of a few lanes."""
    row, k = mma.places_of_a(16)
    of_a = {(0, 0, 0): (0, 0), (0, 0, 1): (0, 1), (1, 0, 0): (8, 0), (2, 0, 0): (0, 8)}
    of_a |= {(3, 31, 1): (15, 15), (0, 5, 0): (1, 2), (1, 30, 1): (15, 5), (2, 4, 1): (1, 9)}
    for place, element in of_a.items():
        assert (row[place], k[place]) == element
    column, k = mma.places_of_b(16)
    of_b = {(0, 0, 0): (0, 0), (1, 0, 0): (0, 8), (0, 5, 1): (1, 3), (1, 31, 1): (7, 15)}
    for place, element in of_b.items():
        assert (column[place], k[place]) == element
    row, column = mma.places_of_d()
    of_d = {(0, 0): (0, 0), (1, 0): (0, 1), (2, 0): (8, 0), (3, 31): (15, 7), (0, 5): (1, 2)}
    for place, element in of_d.items():
        assert (row[place], column[place]) == element


@pytest.mark.parametrize(("target", "model"), [("sm_80", AMPERE_BF16), ("sm_90", HOPPER_MMA_BF16)])
def test_sums_are_those_of_the_accumulator_model(target: str, model: object) -> None:
    bits = [RANDOM.integers(0x3C00, 0x4300, (rows, 16), np.uint16) for rows in (16, 8)]
    a, b = ((x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in bits)
    a[::2] *= -1
    c = RANDOM.normal(size=(16, 8)).astype(np.float32).astype(np.float64)
    want = model.dots(a, b, c)  # type: ignore[attr-defined]
    got = multiply("f32.bf16.bf16.f32", a, b, c, target)
    assert np.array_equal(got, loop_of_c(want, half=False))
    assert not np.array_equal(want, a @ b.T + c)


KINDS_OF_VALUES: list[Callable[[tuple[int, int]], Array]] = [
    lambda shape: RANDOM.integers(-4, 5, shape) * 1.0,
    lambda shape: RANDOM.integers(-4, 5, shape) * 2.0 ** RANDOM.integers(-12, 12, shape),
    lambda shape: RANDOM.normal(size=shape) * 2.0 ** RANDOM.integers(-3, 4),
    lambda shape: np.where(RANDOM.random(shape) < 0.5, 0.0, -0.0),
    lambda shape: RANDOM.integers(-8, 9, shape) * 2.0 ** RANDOM.choice([-130, -24]),
    lambda shape: RANDOM.integers(-8, 9, shape) * 2.0 ** RANDOM.choice([10, 60, 120]),
    lambda shape: RANDOM.choice([1.0, 2.0, np.inf, -np.inf], shape, p=[0.5, 0.48, 0.01, 0.01]),
]
"""Small numbers, wide ranges, numbers that are cut, zeros, subnormals, large ones, infinities."""


@pytest.mark.parametrize("kind", range(len(KINDS_OF_VALUES)))
@pytest.mark.parametrize("types", mma.TYPES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_sums_of_all_values_are_those_of_the_model(types: str, kind: int, target: str) -> None:
    half, name = types.startswith("f16"), types.split(".")[1]
    model = mma.model_of(target, name)
    model = HalfSums(model.bits, model.k, model.min_exponent) if half else model
    for other in range(len(KINDS_OF_VALUES)):
        with np.errstate(over="ignore", invalid="ignore"):
            a, b, c = (
                values_of(halves(KINDS_OF_VALUES[which](shape), name), name)
                for which, shape in ((kind, (16, 16)), (other, (8, 16)), (kind, (16, 8)))
            )
            c = c.astype(np.float16).astype(np.float64) if half else c
            want = loop_of_c(model.dots(a, b, c), half=half)
        got = multiply(types, a, b, c, target)
        dtype = np.float16 if half else np.float32
        assert np.array_equal(got.view(dtype), want.view(dtype), equal_nan=True)
        assert not np.signbit(got.view(dtype)[got.view(dtype) == 0]).any()


def test_eight_products_at_a_time_on_ampere_and_sixteen_on_hopper() -> None:
    """2^24 and what is added in the second half of K: the first sum has been cut by then."""
    a, b, c = np.zeros((16, 16)), np.ones((8, 16)), np.zeros((16, 8))
    a[0, 0], a[0, 1], a[0, 15] = 2.0**24, 1, 1
    for target, want in (("sm_80", 2.0**24), ("sm_89", 2.0**24), ("sm_90", 2.0**24 + 2)):
        got = multiply("f32.bf16.bf16.f32", a, b, c, target).view(np.float32)
        assert got[0, 0] == want


def test_float16_sums_are_rounded_to_nearest_after_each_step() -> None:
    a, b = RANDOM.normal(size=(16, 16)), RANDOM.normal(size=(8, 16))
    a, b = (x.astype(np.float16).astype(np.float64) for x in (a, b))
    c = RANDOM.normal(size=(16, 8)).astype(np.float16).astype(np.float64)
    want = HalfSums(24, 8, -14).dots(a, b, c)
    assert np.array_equal(multiply("f16.f16.f16.f16", a, b, c), loop_of_c(want, half=True))
    assert not np.array_equal(want, (a @ b.T + c).astype(np.float16))


def test_nan_and_infinities_stay_in_their_rows_and_columns() -> None:
    a, b, c = np.ones((16, 16)), np.ones((8, 16)), np.zeros((16, 8))
    a[3, 2], b[5, 7], a[4, 0] = np.nan, np.inf, 0
    want = np.where(np.isnan(a @ b.T), np.nan, a @ b.T)
    got = multiply("f32.bf16.bf16.f32", a, b, c).view(np.float32)
    expected = loop_of_c(want, half=False).view(np.float32)
    assert np.array_equal(got, expected, equal_nan=True)
    assert (got.view(np.uint32)[np.isnan(got)] == 0x7FFFFFFF).all()


CHAINED = """
mul.wide.u32 %rd20, %r0, 4;
add.s64 %rd21, %rd1, %rd20;
ld.global.b32 %r10, [%rd21];
ld.global.b32 %r11, [%rd21+128];
ld.global.b32 %r14, [%rd21+256];
ld.global.b32 %r15, [%rd21+384];
mov.f32 %f0, 0f00000000;
mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
mov.f32 %f4, %f0; mov.f32 %f5, %f0; mov.f32 %f6, %f0; mov.f32 %f7, %f0;
$MMA {%f0, %f1, %f2, %f3}, {%r10, %r11}, {%r14}, {%f0, %f1, %f2, %f3};
$MMA {%f4, %f5, %f6, %f7}, {%r10, %r11}, {%r15}, {%f4, %f5, %f6, %f7};
$MMA {%f0, %f1, %f2, %f3}, {%r10, %r11}, {%r15}, {%f0, %f1, %f2, %f3};
$MMA {%f0, %f1, %f2, %f3}, {%r11, %r10}, {%r14}, {%f4, %f5, %f6, %f7};
$MMA {%f4, %f5, %f6, %f7}, {%r11, %r10}, {%r15}, {%f4, %f5, %f6, %f7};
add.s64 %rd22, %rd0, %rd20;
""".replace("$MMA", "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32")
for _i in range(8):
    CHAINED += f"st.global.f32 [%rd22+{128 * _i}], %f{_i};\n"


def test_products_that_need_each_other_are_formed_in_order() -> None:
    a = RANDOM.integers(-3, 4, (16, 8)).astype(np.float64)
    b, other = (RANDOM.integers(-3, 4, (8, 8)).astype(np.float64) for _ in range(2))
    swapped = np.concatenate([a[8:], a[:8]])
    given = np.concatenate(
        [loop_of_a(halves(a, "bf16")), *(loop_of_b(halves(x.T, "bf16")) for x in (b, other))]
    )
    out = np.zeros((8, 32), np.uint32)
    done = run(kernel(CHAINED, 2, target="sm_80"), "k", 1, 32, [out, given])
    assert done.opcodes["mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32"] == 5
    assert sum(done.opcodes.values()) == sum(done.instructions.values())
    want = [a @ other.T + swapped @ b.T, a @ other.T + swapped @ other.T]
    assert np.array_equal(out, np.concatenate([loop_of_c(x, half=False) for x in want]))


def test_equal_factors_with_other_terms_have_sums_of_their_own() -> None:
    """Two products of the same A and B, which nothing keeps apart but C and D."""
    one, other = (product("f32.bf16.bf16.f32", 16, d=d, c=c) for d, c in ((30, 16), (40, 20)))
    body = "".join(f"mov.b32 %r{i}, 0x3F803F80;\n" for i in range(10, 16))
    body += "".join(f"mov.b32 %r{i}, {0 if i < 20 else 0x40000000};\n" for i in range(16, 24))
    body += one + other + "st.global.b32 [%rd0], %r30;\nst.global.b32 [%rd0+4], %r40;\n"
    out = np.zeros(2, np.float32)
    run(kernel(body, 1, target="sm_80"), "k", 1, 32, [out])
    assert out.tolist() == [16, 18]


@pytest.mark.parametrize("seed", range(6))
def test_products_formed_together_give_what_one_after_the_other_gives(seed: int) -> None:
    """Of few registers, so that they need each other in all ways."""
    random = np.random.default_rng(seed)
    body = "".join(f"cvt.rn.f32.u32 %f{i}, %r0;\n" for i in range(8))
    body += "".join(f"mov.b32 %r{i}, {random.integers(0x3F80, 0x4080)};\n" for i in range(10, 14))
    opcode = "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32"
    lines = []
    for _ in range(12):
        d, c = (registers("f", 4 * random.integers(2), 4) for _ in range(2))
        a, b = (
            registers("r", 10 + random.integers(2), 2),
            registers("r", 12 + random.integers(2), 1),
        )
        lines.append(f"{opcode} {d}, {a}, {b}, {c};\n")
    stores = "mul.wide.u32 %rd20, %r0, 4;\nadd.s64 %rd21, %rd0, %rd20;\n"
    stores += "".join(f"st.global.f32 [%rd21+{128 * i}], %f{i};\n" for i in range(8))
    found = []
    for between in ("", "bar.warp.sync 0xffffffff;\n"):
        out = np.zeros((8, 32), np.float32)
        run(kernel(body + between.join(lines) + stores, 1, target="sm_80"), "k", 1, 32, [out])
        found.append(out)
    assert np.array_equal(*found)
    assert np.isfinite(found[0]).all()


def test_all_threads_take_part() -> None:
    types = "f32.bf16.bf16.f32"
    for before, said in (
        ("setp.lt.u32 %p1, %r0, 31;\n@%p1 ", "do not take part: their predicate is false"),
        ("setp.eq.u32 %p1, %r0, 5;\n@%p1 exit;\n", "ended or never were"),
    ):
        args = [np.zeros((4, 32), np.uint32) for _ in range(4)]
        for schedule in SCHEDULES:
            with pytest.raises(EmulationError) as caught:
                run(product_text(types, 16, before=before), "k", 1, 32, args, schedule=schedule)
            assert caught.value.report.kind is Kind.DIVERGENCE
            assert said in str(caught.value)
    with pytest.raises(EmulationError) as caught:
        run(product_text(types, 16), "k", 1, 31, args)
    assert caught.value.report.kind is Kind.DIVERGENCE


def test_threads_in_both_branches_wait_for_each_other_for_ever() -> None:
    one = product("f32.bf16.bf16.f32", 16)
    body = f"setp.lt.u32 %p1, %r0, 9;\n@%p1 bra LESS;\n{one}bra DONE;\nLESS: {one}DONE:\n"
    with pytest.raises(EmulationError) as caught:
        run(kernel(body, 0, target="sm_80"), "k", 1, 32, [])
    assert caught.value.report.kind is Kind.DEADLOCK


# ---- ldmatrix ----

FILL = """
mov.u64 %rd8, tile;
cvt.u32.u64 %r8, %rd8;
mul.wide.u32 %rd20, %r0, 16;
add.s64 %rd21, %rd8, %rd20;
add.s64 %rd22, %rd1, %rd20;
ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd22];
{store} [%rd21], {%r20, %r21, %r22, %r23};
{sync}
shl.b32 %r9, %r0, 4;
add.u32 %r9, %r9, %r8;
xor.b32 %r9, %r9, 48;
"""
TILE = ".shared .align 16 .b8 tile[512];"


def loaded_text(
    opcode: str, *, store: str = "st.shared.v4.b32", at: str = "%r9", after: str = "", threads=32
) -> str:
    """Each thread stores 16 bytes, thread i gives the row that thread i ^ 3 stored."""
    count = int(opcode.split(".x")[1][0])
    body = FILL.replace("{store}", store).replace("{sync}", "bar.sync 0;")
    body += f"{after}\nmov.u64 %rd9, tile;\ncvta.shared.u64 %rd10, %rd9;\ncvt.u64.u32 %rd11, %r9;\n"
    body += "cvta.shared.u64 %rd11, %rd11;\n"
    body += f"{opcode} {registers('r', 30, count)}, [{at}];\n"
    body += "mul.wide.u32 %rd23, %r0, 4;\nadd.s64 %rd24, %rd0, %rd23;\n"
    for i in range(count):
        body += f"st.global.b32 [%rd24+{128 * i}], %r{30 + i};\n"
    return kernel(body, 2, shared=TILE, target="sm_80")


def ldmatrix(text: str, count: int, **how: object) -> tuple[Array, Array]:
    """Registers, and the rows that threads stored, uint16 [32, 8]."""
    rows = RANDOM.integers(0, 2**16, (32, 8), np.uint16)
    out = np.zeros((count, 32), np.uint32)
    run(text, "k", 1, 32, [out, rows], **how)  # type: ignore[arg-type]
    return out, rows


LOADS = [
    f"ldmatrix.sync.aligned.m8n8.x{count}{across}{space}.b16"
    for count in (1, 2, 4)
    for across in ("", ".trans")
    for space in (".shared", ".shared::cta", "")
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("opcode", LOADS)
def test_lanes_get_pairs_of_rows_or_of_columns(opcode: str, schedule: str) -> None:
    across, count = ".trans" in opcode, int(opcode.split(".x")[1][0])
    text = loaded_text(opcode, at="%r9" if "shared" in opcode else "%rd11")
    got, rows = ldmatrix(text, count, schedule=schedule)
    given = rows[np.arange(32) ^ 3]
    for j in range(count):
        for lane in range(32):
            pair = []
            for i in range(2):
                r, c = lane // 4, lane % 4 * 2 + i
                pair.append(int(given[8 * j + (c if across else r), r if across else c]))
            assert got[j, lane] == pair[0] | pair[1] << 16


X4 = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
MISTAKES: dict[str, tuple[Kind, str, Callable[[], str]]] = {
    "a row off 16 bytes": (
        Kind.MISALIGNED,
        "of 16 bytes at",
        lambda: loaded_text(X4, after="add.u32 %r9, %r9, 8;"),
    ),
    "a row past the end": (
        Kind.OUT_OF_BOUNDS,
        "load of 16 bytes at",
        lambda: loaded_text(X4, after="add.u32 %r9, %r9, 64;"),
    ),
    "bytes that nobody wrote": (
        Kind.UNWRITTEN,
        "tile + 498",
        lambda: loaded_text(X4).replace(
            "st.shared.v4.b32 [", "setp.ne.u32 %p1, %r0, 31;\n@%p1 st.shared.v4.b32 ["
        ).replace(
            "bar.sync 0;", "add.s64 %rd30, %rd8, 496;\nst.shared.b16 [%rd30], %rs1;\nbar.sync 0;"
        ),
    ),
    "a generic address of global memory": (
        Kind.OUT_OF_BOUNDS,
        "not in shared memory",
        lambda: loaded_text("ldmatrix.sync.aligned.m8n8.x4.b16", at="%rd1"),
    ),
    "some threads alone": (
        Kind.DIVERGENCE,
        "do not take part",
        lambda: loaded_text(X4).replace(X4, f"setp.lt.u32 %p1, %r0, 8;\n@%p1 {X4}"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_loads_are_found(name: str) -> None:
    kind, said, text = MISTAKES[name]
    for schedule in SCHEDULES:
        with pytest.raises(EmulationError) as caught:
            ldmatrix(text(), 4, schedule=schedule)
        assert caught.value.report.kind is kind
        assert said in str(caught.value)


def test_rows_that_a_load_of_fewer_matrices_leaves_out_may_be_anywhere() -> None:
    text = loaded_text(
        X4.replace("x4", "x2"), after="setp.ge.u32 %p1, %r0, 16;\n@%p1 mov.u32 %r9, 3;"
    )
    got, rows = ldmatrix(text, 2)
    assert got[0, 0] == rows[3].view(np.uint32)[0]


def test_what_was_never_written_goes_through_products_to_its_sums_alone() -> None:
    """Row 0 of A is not written: storing sums of other rows is no mistake, and of it is one."""
    types, x4 = "f32.bf16.bf16.f32", X4
    load = f"{x4} {registers('r', 10, 4)}, [%r9];\n"
    start = FILL.replace("{store}", "setp.ne.u32 %p1, %r0, 3;\n@%p1 st.shared.v4.b32")
    body = start.replace("{sync}", "bar.sync 0;") + load
    body += "".join(f"mov.b32 %r{i}, 0;\n" for i in range(14, 20)) + product(types, 16)
    for row, stores in ((1, "setp.ge.u32 %p2, %r0, 4;\n@%p2 "), (0, "")):
        text = body + f"{stores}st.global.b32 [%rd0], %r30;\nst.global.b32 [%rd0], %r33;\n"
        args = [np.zeros(32, np.uint32), np.zeros((32, 8), np.uint16)]
        if row:
            run(kernel(text, 2, shared=TILE, target="sm_80"), "k", 1, 32, args)
            continue
        with pytest.raises(EmulationError) as caught:
            run(kernel(text, 2, shared=TILE, target="sm_80"), "k", 1, 32, args)
        assert caught.value.report.kind is Kind.UNWRITTEN
        assert "%r30 decides, and comes from tile + 48" in str(caught.value)


SPOILED = {
    # A register of lane 8, which holds group 2: lanes that get sums with it, by register of D.
    "%r10": {30: range(8, 12), 31: range(8, 12)},
    "%r11": {32: range(8, 12), 33: range(8, 12)},
    "%r14": {30: range(1, 32, 4), 32: range(1, 32, 4)},
    "%r15": {30: range(1, 32, 4), 32: range(1, 32, 4)},
    "%r17": {31: range(8, 9)},
}


@pytest.mark.parametrize("register", SPOILED)
def test_a_term_that_was_never_written_spoils_its_sums_alone(register: str) -> None:
    """A's row, B's column, C's element."""
    zeros = "".join(f"mov.b32 %r{i}, 0;\n" for i in range(10, 20))
    load = f"setp.eq.u32 %p1, %r0, 8;\n@%p1 ld.shared.b32 {register}, [tile];\n"
    body = zeros + load + product("f32.bf16.bf16.f32", 16)
    for sums in range(30, 34):
        bad = SPOILED[register].get(sums, ())
        mask = sum(1 << lane for lane in bad)
        select = f"shr.b32 %r5, {~mask & 0xFFFFFFFF}, %r0;\nand.b32 %r5, %r5, 1;\n"
        select += "setp.ne.u32 %p2, %r5, 0;\n@%p2 "
        store = f"st.global.b32 [%rd0], %r{sums};\n"
        args = [np.zeros(1, np.uint32)]
        run(kernel(body + select + store, 1, shared=TILE, target="sm_80"), "k", 1, 32, args)
        for lane in bad:
            one = f"setp.eq.u32 %p2, %r0, {lane};\n@%p2 "
            with pytest.raises(EmulationError) as caught:
                run(kernel(body + one + store, 1, shared=TILE, target="sm_80"), "k", 1, 32, args)
            assert caught.value.report.kind is Kind.UNWRITTEN


REFUSED = [
    (
        "mma.sync.aligned.m16n8k16.row.row.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, "
        "{%r5,%r6}, {%f1,%f2,%f3,%f4};"
    ),
    (
        "mma.sync.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, "
        "{%r5,%r6}, {%f1,%f2,%f3,%f4};"
    ),
    (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f16 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, "
        "{%r5,%r6}, {%r7,%r8};"
    ),
    (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2}, {%r5}, "
        "{%f1,%f2,%f3,%f4};"
    ),
    (
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2}, %r5, "
        "{%f1,%f2,%f3,%f4};"
    ),
    (
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%rd1,%rd2}, {%r5}, "
        "{%f1,%f2,%f3,%f4};"
    ),
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 %r1, [%r5];",
    "ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r1,%r2,%r3}, [%r5];",
    "ldmatrix.sync.m8n8.x4.shared.b16 {%r1,%r2,%r3,%r4}, [%r5];",
    "ldmatrix.sync.aligned.m8n8.x4.shared::cluster.b16 {%r1,%r2,%r3,%r4}, [%r5];",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%rd1,%rd2,%rd3,%rd4}, [%r5];",
    "cp.async.cg.shared.global [%r1], [%rd1], 16, %r2, %rd2;",
    "cp.async.cg.shared.global.L2::cache_hint [%r1], [%rd1], 16;",
    "cp.async.cg.shared::cluster.global [%r1], [%rd1], 16;",
]
TAKEN = [
    (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,_}, {%r1,%r2,%r3,0}, "
        "{%r5,%r6}, {0f00000000,%f0,%f1,%f2};"
    ),
    "ldmatrix.sync.aligned.m8n8.x4.shared.trans.b16 {%f1,%f2,_,%f4}, [%rd5+16];",
    "cp.async.ca.shared.global [%r1], [%rd1], 8, !%p1;",
    "cp.async.ca.shared.global [%r1], [%rd1], 16, 12;",
    "cp.async.cg.shared.global.L2::256B [%r1], [%rd1], 16, %r2;",
    "cp.async.cg.shared.global.L2::cache_hint [%r1], [%rd1], 16, %rd2;",
    "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%r1], [%rd1], 16, %p1, %rd2;",
    "cp.async.cg.shared::cta.global.L2::64B.L2::cache_hint [%r1], [%rd1], 16, %r2, %rd2;",
]


@pytest.mark.parametrize("text", REFUSED)
def test_forms_that_are_none_are_errors(text: str) -> None:
    with pytest.raises(PtxError, match=text.split()[0]):
        run(kernel(text, 0, target="sm_80"), "k", 1, 32, [])


def test_ptxas_says_the_same_of_forms(assembles: Callable[[list[str]], None]) -> None:
    texts = [kernel(text, 0, target=target) for text in TAKEN for target in TARGETS[:1]]
    texts += [product_text(*form, target=target) for form in FORMS for target in TARGETS]
    texts += [loaded_text(load, at="%r9" if "shared" in load else "%rd11") for load in LOADS]
    for text in texts:
        _load(text, "k")
    assembles([text for text in texts if TILE not in text])
    for target in TARGETS:
        assembles([text.replace("sm_80", target) for text in texts if TILE in text])
    for text in REFUSED:
        with pytest.raises(AssertionError):
            assembles([kernel(text, 0, target="sm_80")])
