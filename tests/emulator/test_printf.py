"""Kernels print, and stop at breakpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_kernels import HEADER, kernel

from mqa.emulator import EmulationError, Kind, run
from mqa.emulator.parser import parse


def text_of(name: str, text: str) -> str:
    codes = [*text.encode(), 0]
    return f".global .align 1 .b8 {name}[{len(codes)}] = {{{', '.join(map(str, codes))}}};\n"


DECLARED = ".extern .func (.param .b32 result) vprintf (.param .b64 a, .param .b64 b);\n"
DECLARED += text_of("word", "key")
BODY = """
.local .align 8 .b8 values[32];
mov.u64 %rd1, values;
cvta.local.u64 %rd2, %rd1;
mov.u64 %rd3, form;
cvta.global.u64 %rd3, %rd3;
setp.gt.u32 %p1, %r0, 1;
@%p1 bra DONE;
STORES
{
.param .b64 param0;
st.param.b64 [param0], %rd3;
.param .b64 param1;
st.param.b64 [param1], %rd2;
.param .b32 retval0;
call.uni (retval0), vprintf, (param0, param1);
ld.param.b32 %r9, [retval0];
}
mul.wide.u32 %rd5, %r0, 4;
add.s64 %rd5, %rd5, %rd0;
st.global.u32 [%rd5], %r9;
DONE:
"""
NUMBERS = "add.s32 %r1, %r0, -3;\nst.local.u32 [values], %r1;\nst.local.u32 [values+4], %r0;\n"
WIDE = "mov.b64 %rd6, -5;\nst.local.u32 [values], %r0;\nst.local.u64 [values+8], %rd6;\n"
FLOAT = (
    "mov.b64 %rd6, 0d3FF8000000000000;\nst.local.u64 [values], %rd6;\nst.local.u32 [values+8], 6;\n"
)
WORD = "mov.u64 %rd6, word;\ncvta.global.u64 %rd6, %rd6;\nst.local.u64 [values], %rd6;\n"
STAR = "st.local.u32 [values], 5;\nst.local.u32 [values+4], %r0;\n"


def printing(form: str, stores: str) -> str:
    """Threads 0 and 1 print."""
    declared = HEADER + DECLARED + text_of("form", form)
    return kernel(BODY.replace("STORES", stores), 1).replace(HEADER, declared)


@pytest.mark.parametrize(
    ("form", "stores", "told", "count"),
    [
        ("%d of %u\n", NUMBERS, "-3 of 0\n-2 of 1\n", 2),
        ("<%x|%5d>", NUMBERS, "<fffffffd|    0><fffffffe|    1>", 2),
        ("%d: %lld\n", WIDE, "0: -5\n1: -5\n", 2),
        ("%d: %llx;", WIDE, "0: fffffffffffffffb;1: fffffffffffffffb;", 2),
        ("%.3f %c|", FLOAT.replace(", 6;", ", 65;"), "1.500 A|1.500 A|", 2),
        ("%e and %i%%\n", FLOAT, "1.500000e+00 and 6%\n" * 2, 2),
        ("[%6s]", WORD, "[   key]" * 2, 1),
        ("[%*d]", STAR, "[    0][    1]", 2),
        ("nothing\n", "", "nothing\nnothing\n", 0),
    ],
)
def test_what_threads_print_is_in_the_summary(
    form: str, stores: str, told: str, count: int
) -> None:
    returned = np.full(32, -1, np.int32)
    summary = run(printing(form, stores), "k", 1, 32, [returned])
    assert summary.printed == told
    assert returned.tolist() == [count] * 2 + [-1] * 30


def test_parameters_of_calls_are_as_large_as_the_largest_of_their_name() -> None:
    body = "{\n.param .b64 param0;\n}\n{\n.param .b32 param0;\n}\n{\n.param .b16 param0;\n}\n"
    (entry,) = parse(kernel(body, 0)).entries.values()
    data = entry.variables["param0"]
    assert (data.space, data.size, data.align) == ("local", 8, 8)


def test_a_breakpoint_ends_a_launch() -> None:
    with pytest.raises(EmulationError) as caught:
        run(kernel("brkpt;", 0), "k", 1, 32, [])
    assert caught.value.report.kind is Kind.TRAP
    assert caught.value.report.instruction == "brkpt"


def test_lines_are_those_of_the_text_where_comments_come_before() -> None:
    text = kernel("// a comment that is long\nmov.u32 %r1, 1; // another\ntrap;\n", 0)
    with pytest.raises(EmulationError) as caught:
        run("// one\n" + text, "k", 1, 32, [])
    lines = ("// one\n" + text).splitlines()
    assert lines[caught.value.report.ptx_line - 1] == "trap;"


def test_an_assembler_takes_these_kernels(assembles: Any) -> None:
    declared = DECLARED + text_of("form", "%d\n")
    stores = [NUMBERS, WIDE, FLOAT, WORD, STAR]
    assembles(
        [kernel(BODY.replace("STORES", x), 1).replace(HEADER, HEADER + declared) for x in stores],
        declared,
    )
