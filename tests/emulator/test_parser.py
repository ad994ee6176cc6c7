"""The parser reads what NVRTC and inline assembly write, and names the line of what it can't."""

from __future__ import annotations

import pytest

from mqa.emulator.parser import (
    Address,
    Immediate,
    Negated,
    Pair,
    PtxError,
    Register,
    Symbol,
    Vector,
    parse,
)
from ptx_kernels import HEADER, kernel


def instructions(body: str) -> list[object]:
    entry = parse(kernel(body, 0)).entries["k"]
    return [instruction.operands for instruction in entry.instructions[1:-1]]


def test_operands_have_every_form() -> None:
    (operands,) = instructions("x.y {%r1,%r2}, [%rd3, {%r4, -5}], %r6|%p1, !%p2, 0f3F800000, _;")
    vector, address, pair, negated, literal, sink = operands  # type: ignore[misc]
    assert isinstance(vector, Vector)
    assert len(vector.parts) == 2
    assert isinstance(address, Address)
    assert address.coordinates[1] == Immediate(-5)
    assert isinstance(pair, Pair)
    assert isinstance(negated, Negated)
    assert literal == Immediate(0x3F800000, 32)
    assert sink == Symbol("_")


def test_addresses_have_offsets_of_both_signs() -> None:
    operands = instructions("ld.u32 %r1, [%rd1+-64];ld.u32 %r1, [%rd1 + 0x10];")
    assert [address.offset for _, address in operands] == [-64, 16]  # type: ignore[attr-defined]


def test_registers_and_labels_belong_to_their_braces() -> None:
    body = """
    { .reg .pred p; LOOP: setp.eq.u32 p, %r1, 0; @p bra LOOP; }
    { .reg .pred p; LOOP: setp.eq.u32 p, %r2, 0;
      @!p bra LOOP; }
    """
    entry = parse(kernel(body, 0)).entries["k"]
    first, back, second, again = entry.instructions[1:-1]
    assert (back.target, again.target) == (1, 3)
    assert isinstance(first.operands[0], Register)
    assert first.operands[0] != second.operands[0]


def test_source_lines_come_from_loc() -> None:
    body = ".loc 1 7 3, function_name $L__info, inlined_at 1 2 3\nmov.u32 %r1, 5;"
    module = parse(kernel(body, 0) + '\n.file 1 "/a/b.cuh"\n.section .debug_str\n{\n.b8 1,2\n}\n')
    assert module.entries["k"].instructions[1].source == (1, 7)
    assert module.files == {1: "/a/b.cuh"}


def test_variables_have_spaces_sizes_and_contents() -> None:
    text = (
        HEADER + ".global .align 4 .u32 a[2] = {1, 0x10};\n.extern .shared .align 1024 .b8 s[];\n"
    )
    variables = parse(text).variables
    assert variables["a"].initial == b"\1\0\0\0\x10\0\0\0"
    assert (variables["s"].space, variables["s"].align, variables["s"].size) == ("shared", 1024, 0)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("mov.u32 %r1, %zz3;\nadd.s32 %r1, %q2, 1;", "register %zz3 is not declared"),
        ("bra NOWHERE;", "label NOWHERE is not defined"),
        ("add.s32 %r999, %r1, 1;", "register %r999 is not declared"),
    ],
)
def test_errors_name_the_line_and_what_is_wrong(body: str, said: str) -> None:
    with pytest.raises(PtxError, match=said) as caught:
        parse(kernel(body, 0))
    assert "PTX line 19" in str(caught.value)


def test_text_that_ends_early_is_an_error() -> None:
    with pytest.raises(PtxError, match="not closed"):
        parse(kernel("", 0).rsplit("}", 1)[0])
    with pytest.raises(PtxError, match="expected ';'"):
        parse(HEADER + ".reg .b32 %r1")


def test_declarations_need_no_blank_before_the_type() -> None:
    module = parse(kernel(".reg.b16 low, high;\nmov.b32 {low, high}, %r1;\n", 0))
    declared = {register.name: register.type for register in module.entries["k"].registers}
    assert declared["low"] == declared["high"] == "b16"
