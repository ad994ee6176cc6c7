"""Count what the math loops of the Blackwell kernels issue, and write docs/pipes/sm100.json.

    python tools/count_pipes.py           # needs nvdisasm: the package nvidia-cuda-nvdisasm has it

Each kernel is compiled as `mqa.cuda.compiler` does it and disassembled. The loop that is counted
is the one with most packed multiply-adds, on its longest way round (`tools/sass.py`), which stores
every logit under its window test. Clocks a pair follow from published rates: 128 FMA lanes, of
which a packed instruction and an integer multiply-add take two, 64 ALU lanes, 128 lanes issued. A
low count is not a speed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).parent)]

from mqa.cli import machine  # noqa: E402
from mqa.cuda import cache, compiler, sm100, sm100_tiles  # noqa: E402
from pipeline_model import ALU_LANES, COUNTS, ELEMENTS, FMA_LANES, HEADS  # noqa: E402
from sass import Flow, Instruction, parse  # noqa: E402

ARCH = "sm_100f"
ISSUE_LANES = 128
PACKAGE = "nvidia-cuda-nvdisasm"
_PACKED_ADD, _LOAD, _SHARED_LOAD, _STORE = "FFMA2", "LDTM", "LDS", "STG"
_FMA = {
    **dict.fromkeys(("FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2"), 1),
    **dict.fromkeys(("FFMA2", "FADD2", "FMUL2", "IMAD"), 2),
}
"""Lanes of the FMA pipe by opcode."""
_ELSEWHERE = {
    *("LDTM", "LDS", "LDC", "LDG", "LDL", "STG", "STS", "STL", "SHFL"),  # memory
    *("BRA", "BSSY", "BSYNC", "CALL", "EXIT", "RET", "NOP", "WARPSYNC", "YIELD"),  # control
    *("BAR", "DEPBAR", "ELECT", "FENCE", "SYNCS"),
    *("MUFU", "R2UR", "S2R", "S2UR", "VOTE"),
}
"""Opcodes of other pipes. Uniform ones, whose names begin with U, are issued alone; those that are
not known are taken for the ALU's."""


def math_loop(code: list[Instruction]) -> list[Instruction]:
    """The longest way round the loop with most packed multiply-adds. Raises ValueError where there
    is none, or where a loop inside has some that this way does not pass."""
    flow = Flow(code)
    loop = max(flow.loops, key=lambda one: _count(flow.own(one), _PACKED_ADD), default=None)
    if loop is None or not _count(flow.own(loop), _PACKED_ADD):
        raise ValueError("no loop has packed multiply-adds")
    if any(_count(flow.own(one), _PACKED_ADD) for one in flow.inside(loop)):
        raise ValueError("a loop inside the math loop has packed multiply-adds too")
    return flow.longest_way(loop)


def elements(loop: Iterable[Instruction]) -> int:
    """Dots that a thread takes from tensor memory, one for each pair and head."""
    loads = (re.search(r"\.x(\d+)", one.name) for one in loop if one.opcode == _LOAD)
    return sum(int(width[1]) if width else 1 for width in loads)


def clocks(loop: list[Instruction], heads: int) -> dict[str, float]:
    """Clocks a pair by unit. Raises ValueError unless each pair is stored once."""
    pairs = elements(loop) / heads
    if not pairs or _count(loop, _STORE) != pairs:
        raise ValueError(f"{_count(loop, _STORE)} stores for {pairs:g} pairs, expected one each")
    counts = Counter(one.opcode for one in loop)
    alu = (n for opcode, n in counts.items() if opcode not in _FMA and not _is_elsewhere(opcode))
    lanes = {
        "fma": sum(lanes * counts[opcode] for opcode, lanes in _FMA.items()) / FMA_LANES,
        "alu": sum(alu) / ALU_LANES,
        "issue": len(loop) / ISSUE_LANES,
    }
    return {unit: round(value / pairs, 4) for unit, value in lanes.items()}


def _is_elsewhere(opcode: str) -> bool:
    return opcode in _ELSEWHERE or opcode.startswith("U")


def _count(code: Iterable[Instruction], opcode: str) -> int:
    return sum(one.opcode == opcode for one in code)


def disassembler() -> str:
    """nvdisasm: of its package, else on PATH, else in $CUDA_HOME/bin. Raises FileNotFoundError."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(PACKAGE) or ():
            if file.stem == "nvdisasm":
                return str(file.locate())
    folders = [os.environ.get("PATH", ""), os.path.join(os.environ.get("CUDA_HOME", ""), "bin")]
    program = shutil.which("nvdisasm", path=os.pathsep.join(folders))
    if program is None:
        raise FileNotFoundError(
            f"nvdisasm is neither on PATH nor in $CUDA_HOME/bin; the package {PACKAGE} has it"
        )
    return program


def disassembled(image: bytes) -> str:
    """The text of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [disassembler(), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def count(kind: str, heads: int, dim: int = 128, logits: str = "float32") -> dict[str, Any]:
    """A dense kernel's entry: clocks and loads from shared memory a pair, instructions a head of a
    pair, spilled bytes."""
    t = sm100_tiles.dense_tiles(heads, dim, ELEMENTS[kind])
    binary = cache.get(sm100.kernel(sm100.DENSE, t, logits), ARCH)
    loop, usage = math_loop(parse(disassembled(binary.image))), compiler.usage(binary)
    return {
        **{"format": kind, "H": heads, "D": dim},
        **clocks(loop, heads),
        "shared_loads": round(_count(loop, _SHARED_LOAD) * heads / elements(loop), 4),
        "instructions_per_element": round(len(loop) / elements(loop), 3),
        "spilled_bytes": usage and usage.spill_bytes,
    }


def main() -> None:
    report = {
        "arch": ARCH,
        "nvrtc": machine.installed("nvidia-cuda-nvrtc"),
        "how": "longest way round the math loop, waits passing at once, by `tools/count_pipes.py`",
        "kernels": [count(kind, heads) for kind in ELEMENTS for heads in HEADS],
    }
    COUNTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
