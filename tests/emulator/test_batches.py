"""Instructions executed at once give what they give one after the other."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from ptx_kernels import kernel

from mqa.emulator import batches
from mqa.emulator.floats import fma_f32, rounds_once
from mqa.emulator.parser import parse
from mqa.emulator.program import Program, Run

BINARY = ("add.f32", "sub.f32", "mul.f32", "max.f32", "min.f32", "max.NaN.f32", "min.NaN.f32")
VALUES = np.array([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 3e38, 1e-38, 1e-45], np.float32)
HALF_WAY = np.float32(1 + 2**-12)


def straight(lines: list[str]) -> Run:
    """Instructions as one run."""
    return named(lines)[0]


def program_of(lines: list[str], read: str = r"%(?:f|r|rd)\d+", target: str = "sm_90a") -> Program:
    """The run, and stores of registers after it."""
    kinds = {"f": "f32", "r": "b32", "rd": "b64"}
    found = sorted(set(re.findall(read, " ".join(lines))))
    stores = [f"st.global.{kinds[x.strip('%0123456789')]} [%rd63], {x};" for x in found]
    body = ["bra GO;", "GO:", *lines, "bra END;", "END:", *stores]
    module = parse(kernel("\n".join(body), 0, target=target))
    return Program(module, module.entries["k"])


def named(lines: list[str]) -> tuple[Run, list[str]]:
    """The run, and the names of the registers that it is given."""
    program = program_of(lines)
    (run,) = (run for run in program.runs.values() if len(run.functions) == len(lines))
    return run, [register.name for register in program.entry.registers]


def drawn(rng: np.random.Generator, length: int) -> list[str]:
    """Random instructions on few registers, so that they depend on each other in every way."""
    lines = []
    for _ in range(length):
        d, a, b, c = (f"%f{i}" for i in rng.integers(0, 40, 4))
        kind = rng.integers(0, 10)
        if kind < 4:
            lines.append(f"fma.rn.f32 {d}, {a}, {b}, {c};")
        elif kind < 7:
            lines.append(f"{rng.choice(BINARY)} {d}, {a}, {b};")
        elif kind < 8:
            lines.append(f"abs.f32 {d}, {a};")
        elif kind < 9:
            lines.append(f"mov.f32 {d}, {a};")
        else:
            lines.append(f"setp.lt.f32 %p1, {a}, {b};\n@%p1 neg.f32 {d}, {c};")
    return "\n".join(lines).split("\n")


def registers(rng: np.random.Generator, count: int, *, special: bool) -> list[Any]:
    values: list[Any] = [rng.normal(size=32).astype(np.float32) for _ in range(count)]
    if special:
        values = [np.where(rng.random(32) < 0.1, rng.choice(VALUES, 32), x) for x in values]
    return values


@pytest.mark.parametrize("special", [False, True])
def test_random_runs_give_the_same_at_once(special: bool) -> None:
    at_once = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        run = straight(drawn(rng, 60))
        assert run.batched is not None
        start = registers(rng, 400, special=special)
        one, other = start.copy(), start.copy()
        with np.errstate(all="ignore"):
            for function in run.functions:
                function(one)
            done = run.batched(other)
        at_once += done
        expected = one if done else start
        for x, y in zip(expected, other, strict=True):
            np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))
    assert special or at_once > 30


def test_a_chain_of_sums_gives_the_same_at_once() -> None:
    lines = [f"max.NaN.f32 %f{40 + i}, %f{i}, %f39;" for i in range(32)]
    lines += [f"fma.rn.f32 %f{100 + i % 4}, %f{40 + i}, %f{i}, %f{100 + i % 4};" for i in range(32)]
    run, rng = straight(lines), np.random.default_rng(5)
    assert run.batched is not None
    one = registers(rng, 400, special=False)
    other = one.copy()
    for function in run.functions:
        function(one)
    assert run.batched(other)
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_sum_that_float64_would_round_twice_is_left_to_the_instruction() -> None:
    lines = [f"fma.rn.f32 %f{40 + i}, %f0, %f1, %f{2 + i};" for i in range(10)]
    run, names = named(lines)
    assert run.batched is not None
    values: list[Any] = [np.full(32, 2.0**-60, np.float32) for _ in range(300)]
    factors = [index for index, name in enumerate(names) if name in ("%f0", "%f1")]
    for index in factors:
        values[index] = np.full(32, HALF_WAY, np.float32)
    before = values.copy()
    assert not run.batched(values)
    assert all(x is y for x, y in zip(values, before, strict=True))
    exact = np.float64(HALF_WAY) * np.float64(HALF_WAY) + 2.0**-60
    assert not rounds_once([np.full((1, 32), exact)])
    one, tiny = np.full(32, HALF_WAY, np.float32), np.full(32, 2.0**-60, np.float32)
    assert fma_f32(one, one, tiny)[0] != np.float32(exact)


def test_zeros_and_large_sums_round_once() -> None:
    assert rounds_once([np.array([0.0, -0.0, 1e300, np.inf, np.nan, 1.5])])
    assert not rounds_once([np.array([1.5, 1e-40])])


def test_short_runs_are_left_as_they_are() -> None:
    assert straight(["add.f32 %f1, %f2, %f3;"] * 3).batched is None
    assert batches.batched([], [], lambda register: True) is None


PACKED = [f"mov.b64 %rd{i}, {{%f{2 * i}, %f{2 * i + 1}}};" for i in range(16)]


def same_at_once(run: Run, values: list[Any]) -> bool:
    """Whether the run was executed at once, which gave what one after the other gives."""
    assert run.batched is not None
    one, other = values.copy(), values.copy()
    with np.errstate(all="ignore"):
        for function in run.functions:
            function(one)
        done = run.batched(other)
    for x, y in zip(one if done else values, other, strict=True):
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))
    return done


def drawn_packed(rng: np.random.Generator, length: int) -> list[str]:
    """Packed sums between others, and what packs and unpacks them."""
    lines = list(PACKED)
    for _ in range(length):
        d, a, b, c = (f"%rd{i}" for i in rng.integers(0, 24, 4))
        kind = rng.integers(0, 8)
        if kind < 3:
            lines.append(f"fma.rn.f32x2 {d}, {a}, {b}, {c};")
        elif kind < 5:
            lines.append(f"{rng.choice(('add', 'mul', 'sub'))}.rn.f32x2 {d}, {a}, {b};")
        elif kind < 6:
            low, high = rng.integers(0, 40, 2)
            lines.append(f"mov.b64 {d}, {{%f{low}, %f{high}}};")
        elif kind < 7:
            low, high = rng.choice(40, 2, replace=False)
            lines.append(f"mov.b64 {{%f{low}, %f{high}}}, {a};")
        else:
            d, a, b, c = (f"%f{i}" for i in rng.integers(0, 40, 4))
            lines.append(f"fma.rn.f32 {d}, {a}, {b}, {c};")
    return lines


def packed_run(lines: list[str], read: str = r"%(?:f|r|rd)\d+") -> tuple[Run, list[Any]]:
    program = program_of(lines, read, "sm_100f")
    (run,) = (run for run in program.runs.values() if len(run.functions) == len(lines))
    rng = np.random.default_rng(len(lines))
    values: list[Any] = []
    for dtype in program.binder.types:
        numbers = rng.normal(size=(32, max(dtype.itemsize // 4, 1))).astype(np.float32)
        values.append(numbers.view(dtype)[:, 0] if dtype.itemsize >= 4 else np.zeros(32, dtype))
    return run, values


def test_random_runs_of_packed_sums_give_the_same_at_once() -> None:
    at_once = 0
    for seed in range(40):
        at_once += same_at_once(*packed_run(drawn_packed(np.random.default_rng(seed), 50 + seed)))
    assert at_once > 30


def test_packed_sums_are_executed_at_once() -> None:
    """A head's sum: packs are one step, products one, and sums one for each of the chain."""
    lines = [
        *PACKED,
        *(f"fma.rn.f32x2 %rd{40 + i % 2}, %rd{i}, %rd30, %rd{40 + i % 2};" for i in range(16)),
    ]
    run, values = packed_run(lines)
    assert same_at_once(run, values)
    assert run.batched is not None
    assert len(run.batched._steps) == 1 + 1 + 8


def test_equal_instructions_give_equal_rows_at_once() -> None:
    lines = [f"add.f32 %f{40 + i}, %f0, %f1;" for i in range(9)]
    lines += [f"fma.rn.f32 %f{60 + i}, %f0, %f1, %f{40 + i % 3};" for i in range(9)]
    lines += [f"fma.rn.f32 %f{80 + i}, %f0, %f1, %f{60 + i};" for i in range(9)]
    run, _ = named(lines)
    assert same_at_once(run, registers(np.random.default_rng(3), 400, special=False))
    lines = [f"mov.b64 %rd{8 + i}, {{%f0, %f{1 + i % 2}}};" for i in range(12)]
    lines += [f"fma.rn.f32x2 %rd{30 + i}, %rd8, %rd9, %rd8;" for i in range(12)]
    assert same_at_once(*packed_run(lines))


def drawn_with_casts(rng: np.random.Generator, length: int) -> list[str]:
    """Float arithmetic in registers without a type too, moves between them, and chains of sums
    whose links others may read or write."""
    lines = list(PACKED)
    for _ in range(length):
        d, a, b = (f"%{rng.choice(('f', 'r'))}{i}" for i in rng.integers(0, 24, 3))
        match rng.integers(0, 8):
            case 0 | 1:
                lines.append(f"{rng.choice(BINARY)} {d}, {a}, {b};")
            case 2:
                lines.append(f"abs.f32 {d}, {a};")
            case 3 | 4:
                lines.append(f"mov.b32 {d}, {a};")
            case 5:
                low, high = rng.choice(24, 2, replace=False)
                lines.append(f"mov.b64 {{%r{low}, %r{high}}}, %rd{rng.integers(0, 16)};")
            case 6:
                lines.append(f"mov.b64 %rd{rng.integers(0, 16)}, {{{a}, {b}}};")
            case 7:
                links = 30 + rng.permutation(8)[: rng.integers(4, 9)]
                factor = f"%rd{rng.integers(0, 16)}, %rd{rng.integers(0, 16)}"
                before = f"%rd{rng.integers(0, 16)}"
                for link in (*links, rng.integers(0, 38)):
                    lines.append(f"fma.rn.f32x2 %rd{link}, {factor}, {before};")
                    before = f"%rd{rng.choice((link, rng.integers(0, 38)), p=(0.9, 0.1))}"
    return lines


def test_random_runs_with_casts_and_chains_give_the_same_at_once() -> None:
    at_once = 0
    for seed in range(60):
        lines = drawn_with_casts(np.random.default_rng(seed), 30 + seed)
        at_once += same_at_once(*packed_run(lines))
    assert at_once > 40


def test_a_chain_that_nobody_else_reads_is_one_step() -> None:
    chain = [f"fma.rn.f32x2 %rd{31 + i}, %rd{i}, %rd30, %rd{30 + i};" for i in range(16)]
    run, values = packed_run([*PACKED, *chain])
    assert same_at_once(run, values)
    assert run.batched is not None
    assert len(run.batched._steps) == 1 + 1 + 1


@pytest.mark.parametrize(
    "other",
    [
        "mov.b64 %rd50, %rd38;",
        "mov.b64 {%f50, %f51}, %rd38;",
        "add.rn.f32x2 %rd38, %rd0, %rd1;",
        "add.rn.f32x2 %rd30, %rd0, %rd1;",
    ],
)
@pytest.mark.parametrize("at", [1, 8, 9, 16])
def test_a_chain_waits_for_nobody_who_reads_or_writes_its_registers(other: str, at: int) -> None:
    chain = [f"fma.rn.f32x2 %rd{31 + i}, %rd{i}, %rd29, %rd{30 + i};" for i in range(16)]
    assert same_at_once(*packed_run([*PACKED, *chain[:at], other, *chain[at:]]))


def test_a_chain_may_go_through_copies() -> None:
    """Which others read too, and which have to be right in the end."""
    lines = list(PACKED)
    for i in range(12):
        lines.append(f"fma.rn.f32x2 %rd{20 + i}, %rd{i}, %rd16, %rd{36 + i};")
        lines.append(f"mov.b64 %rd{37 + i}, %rd{20 + i};")
    assert same_at_once(*packed_run(lines))


def test_relus_of_registers_without_a_type_are_executed_at_once() -> None:
    """As NVRTC writes them: views of dots, their relu, and its bits packed."""
    lines = [f"mov.b32 %r{50 + i}, %f{i};" for i in range(16)]
    lines += [f"max.NaN.f32 %r{70 + i}, %r{50 + i}, %r40;" for i in range(16)]
    lines += [f"mov.b32 %r{90 + i}, %r{70 + i};" for i in range(16)]
    lines += [f"mov.b64 %rd{i}, {{%r{90 + 2 * i}, %r{91 + 2 * i}}};" for i in range(8)]
    lines += [f"mov.b64 {{%r{110 + 2 * i}, %r{111 + 2 * i}}}, %rd{i};" for i in range(8)]
    run, values = packed_run(lines)
    assert same_at_once(run, values)
    assert run.batched is not None
    assert len(run.batched._steps) == 5


def test_registers_that_nobody_reads_elsewhere_are_written_only_if_it_takes_them() -> None:
    """Even ones are stored after the run, and others may be read where it begins again."""
    read = r"%(?:f|r|rd)\d*[02468]\b"
    unwritten = 0
    for seed in range(40):
        lines = drawn_with_casts(np.random.default_rng(seed), 40 + seed)
        run, values = packed_run(lines, read)
        names = [register.name for register in program_of(lines, read, "sm_100f").entry.registers]
        assert run.batched is not None
        one, other = values.copy(), values.copy()
        with np.errstate(all="ignore"):
            for function in run.functions:
                function(one)
            if not run.batched(other):
                continue
        for name, x, y, before in zip(names, one, other, values, strict=False):
            if re.fullmatch(read, name) or reads_first(lines, name):
                np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))
            elif x is not before:
                unwritten += y is before
    assert unwritten > 100


def reads_first(lines: list[str], name: str) -> bool:
    """Whether a register is read before it is written."""
    for line in lines:
        _, to, rest = re.fullmatch(r"(\S+) (\{.*?\}|\S+), (.*);", line).groups()
        if name in re.findall(r"%\w+", rest):
            return True
        if name in re.findall(r"%\w+", to):
            return False
    return False
