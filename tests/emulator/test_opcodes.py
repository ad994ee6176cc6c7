"""Every opcode that the emulator knows stands in the PTX of a test, and so does each mode of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_isa
import test_mma
import test_products
import test_sm100_alu
import test_sm100_forms
import test_tcgen05
import test_tcgen05_pairs
import test_tensor_copies

from mqa.emulator import (
    alu,
    memory_access,
    mma,
    narrow,
    numbers,
    reductions,
    remote,
    special,
    sync,
    tcgen05_mma,
    units,
)
from mqa.emulator.tensor_layouts import COPIES, FRAGMENTS
from mqa.emulator.program import EFFECTS, Program, key_of

HERE = Path(__file__).resolve().parent
_INSTRUCTION = re.compile(
    r"(?:^|[;{}:])\s*(?:@!?\S+\s+)?([a-z]\w*(?:\.[\w:]+)*)\s*(?=[\s\[;{%]|\Z)"
)


def strings() -> Iterator[str]:
    """Texts of string literals in tests, docstrings left out, "%" where a format has a value."""
    for file in sorted({*HERE.glob("*.py")} - {HERE / "test_malformed.py"}):
        tree = ast.parse(file.read_text())
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (x.value if isinstance(x, ast.Constant) else "%" for x in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and id(node) not in said:
                yield str(node.value)


@pytest.fixture(scope="module")
def written() -> set[str]:
    """Opcodes with modifiers."""
    made = [case.body for case in test_isa.CASES] + test_products.TEXTS
    made += [test_tensor_copies.reduce_text(*x) for x in test_tensor_copies.GLOBAL]
    made += [test_tensor_copies.cluster_reduce_text(*x) for x in test_tensor_copies.SHARED_CASES]
    made += test_tcgen05.texts()
    made += [test_mma.product(*form) for form in test_mma.FORMS] + test_mma.LOADS
    made += [test_tcgen05_pairs.pair_text(256), test_tcgen05_pairs.scaled_pair_text()]
    made += [case.body for case in test_sm100_forms.CASES] + test_sm100_alu.TEXTS
    made += [test_sm100_forms.reduce_text(name, kind) for name, kind, _ in test_sm100_forms.REDUCED]
    return {found for text in (*strings(), *made) for found in _INSTRUCTION.findall(text)}


def modes() -> Iterator[str]:
    """Opcodes with one modifier each that decides what they do."""
    yield from (f"setp.{name}" for name in alu._COMPARE)
    yield from (f"atom.{name}" for name in memory_access._ATOMIC)
    yield from (f"redux.sync.{name}" for name in sync._REDUCE)
    yield from (f"cvt.{to}.{source}" for to, source in narrow.CONVERSIONS)
    yield from (f"cvt.{rounding}" for rounding in numbers.TO_INTEGER)
    yield from (f"testp.{name}" for name in special.TESTS)
    yield from (f"red.async.{name}" for name in sorted(set().union(*remote._REDUCED.values())))
    for rounding in ("rn", "rz", "rm", "rp"):
        yield from (f"{name}.{rounding}.f32" for name in ("add", "sub", "mul", "fma", "div"))
        yield from (f"{name}.{rounding}.f32x2" for name in ("add", "sub", "mul", "fma"))
        yield from (f"{name}.{rounding}.f32" for name in ("rcp", "sqrt"))
    yield from ("redux.sync.max.f32", "redux.sync.min.abs.NaN.f32", "st.async", "st.bulk")
    yield from (f"shfl.sync.{mode}" for mode in ("idx", "up", "down", "bfly"))
    yield from (f"vote.sync.{mode}" for mode in ("any", "all", "uni", "ballot"))
    for known, space in ((reductions.GLOBAL, "global"), (reductions.SHARED, "shared::cluster")):
        for kind, names in known.items():
            yield from (f"cp.reduce.async.bulk.{space}.{name}.{kind}" for name in names)
    yield from (f"wgmma.mma_async.{types}" for types in units.OPCODES)
    for depth in mma.DEPTHS:
        yield from (f"mma.sync.m16n8k{depth}.row.col.{types}" for types in mma.TYPES)
    yield from (f"ldmatrix.sync.m8n8.{count}.shared.b16" for count in mma._MATRICES)
    yield from ("ldmatrix.sync.m8n8.x4.trans.shared.b16", "cp.async.ca.L2::cache_hint")
    yield from ("bfe.s32", "bfe.u32", "bfi.b32")
    yield from (f"tcgen05.mma.kind::{kind}" for kind in tcgen05_mma._KINDS)
    yield from (
        f"tcgen05.mma.kind::{kind}.block_scale{spelled and '.'}{spelled}"
        for kind, spelled in tcgen05_mma._BLOCKS
    )
    yield from (f"tcgen05.cp.{shape}" for shape in COPIES)
    for shape in FRAGMENTS:
        yield from (f"tcgen05.{what}.{shape}" for what in ("ld", "st"))
    yield from (
        "tcgen05.ld.pack::16b",
        "tcgen05.st.unpack::16b",
        "tcgen05.mma.collector::a::discard",
    )
    for what in ("alloc", "dealloc", "relinquish_alloc_permit", "mma", "cp", "commit"):
        yield from (f"tcgen05.{what}.cta_group::{group}" for group in (1, 2))


@pytest.mark.parametrize("name", sorted({*alu.ALU, *EFFECTS, *Program.CONTROL}))
def test_an_opcode_stands_in_the_ptx_of_a_test(written: set[str], name: str) -> None:
    assert name in {key_of(opcode) for opcode in written}


@pytest.mark.parametrize("mode", sorted(modes()))
def test_a_mode_of_an_opcode_stands_in_the_ptx_of_a_test(written: set[str], mode: str) -> None:
    name, *wanted = mode.split(".")
    parts = [opcode.split(".") for opcode in written if opcode.split(".")[0] == name]
    assert any(_in_order(wanted, opcode[1:]) for opcode in parts)


def _in_order(wanted: list[str], modifiers: list[str]) -> bool:
    """Whether modifiers have those wanted, in their order, perhaps others between."""
    rest = iter(modifiers)
    return all(word in rest for word in wanted)
