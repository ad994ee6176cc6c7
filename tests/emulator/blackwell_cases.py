"""Problems that reach a given kernel of Blackwell."""

from __future__ import annotations

from mqa.cuda import sm100
from mqa.cuda.operands import CXX, ELEMENTS, PAGE_SIZES
from mqa.cuda.plan import Kernel
from mqa.cuda.sm100_tiles import paged_tiles
from mqa.problem import WINDOWS
from mqa.reference.schedule import GROUP

FORMATS = {elements: format for format, elements in ELEMENTS.items()}
LOGITS = {cxx: name for name, cxx in CXX.items()}
OTHERS = ("", "weights=bfloat16", "sms=2", "weights=bfloat16 sms=3")
LENS = ("random", "ramp", "full")


def line_for(kernel: Kernel, number: int, regime: str) -> str:
    """A small problem whose call launches `kernel`; `number` chooses what it leaves open."""
    elements, heads, dim, logits, _, columns, _ = kernel.arguments
    format, H = FORMATS[elements.rpartition("::")[2]], int(heads)
    sizes = f"H={H} D={dim} out={LOGITS[logits]}"
    facts = f"{OTHERS[number % len(OTHERS)]} clean={number % 3 % 2} regime={regime} seed={number}"
    if kernel.name == sm100.DENSE:
        rows = int(columns) // H + 1 + number % 2
        tokens = (133, 70, 260, 131)[number % 4]
        longest = (0, tokens + 5, 0)[number % 3]
        windows = WINDOWS[number % len(WINDOWS)]
        windows = "random" if windows == "empty" else windows
        return f"dense {format} S={rows} N={tokens} M={longest} {sizes} {facts} windows={windows}"
    reach = [
        rows
        for rows in range(1, GROUP + 1)
        if paged_tiles(H, int(dim), rows, ELEMENTS[format]).columns == int(columns)
    ]
    rows = reach[number * 3 % len(reach)]
    page = PAGE_SIZES[number % len(PAGE_SIZES)]
    table = -(-150 // page)
    pages = f"P={page} blocks={2 * table + 3} columns={table} L=150"
    rank = 1 + number % 2
    lens = LENS[number % len(LENS)]
    return f"paged {format} B=2 next_n={rows} {pages} lens_rank={rank} {sizes} {facts} lens={lens}"
