"""Count what the math loops of the Blackwell kernels issue, and write docs/pipes/sm100.json.

    python tools/count_pipes.py           # needs nvdisasm: on PATH, or in $CUDA_HOME/bin

Each kernel is compiled as `mqa.cuda.compiler` does it and disassembled. The loop that is counted
is the shortest one with at least half of the packed multiply-adds; waits are taken to pass
at once. Clocks a pair follow from published rates: 128 FMA lanes, of which a packed instruction and
an integer multiply-add take two, 64 ALU lanes, 128 lanes issued. A low count is not a speed.
"""

from __future__ import annotations

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
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).parent)]

from mqa.cli import machine  # noqa: E402
from mqa.cuda import compiler, sm100, sm100_tiles  # noqa: E402
from pipeline_model import ALU_LANES, COUNTS, ELEMENTS, FMA_LANES, HEADS  # noqa: E402

ARCH = "sm_100f"
ISSUE_LANES = 128
_PACKED_ADD = "FFMA2"
_FMA = {"FFMA": 1, "FADD": 1, "FMUL": 1, "FFMA2": 2, "FADD2": 2, "FMUL2": 2, "IMAD": 2}
"""Lanes of the FMA pipe by opcode."""
_ALU = {
    *("FMNMX", "FMNMX3", "FSEL", "FSETP", "IADD", "IADD3", "IABS", "ISETP", "LEA", "LOP3", "PLOP3"),
    *("PRMT", "SEL", "SHF", "VIADD", "VIADDMNMX", "VIMNMX"),
}
_LINE = re.compile(r"/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


class Instruction(NamedTuple):
    opcode: str
    """Without what follows its first point."""
    target: int | None
    """Of a branch: the index of the instruction that it goes to."""


def parse(text: str) -> list[Instruction]:
    """The instructions of a disassembly by `nvdisasm -c`."""
    labels: dict[str, int] = {}
    found: list[tuple[str, str | None]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(found)
        elif one := _LINE.search(line):
            target = _TARGET.search(one[3]) if one[2].startswith("BRA") else None
            found.append((one[2].partition(".")[0], target and target[1]))
    return [Instruction(opcode, labels.get(name or "")) for opcode, name in found]


def math_loop(code: list[Instruction]) -> list[Instruction]:
    """The shortest loop with at least half of the packed multiply-adds. Raises ValueError if there
    is none."""
    half = _adds(code) / 2
    back = ((one.target, i + 1) for i, one in enumerate(code) if one.target is not None)
    loops = [code[first:end] for first, end in back if first < end]
    busy = [loop for loop in loops if half and _adds(loop) >= half]
    if not busy:
        raise ValueError(f"no loop has half of the {int(2 * half)} packed multiply-adds")
    return min(busy, key=len)


def _adds(code: Iterable[Instruction]) -> int:
    return sum(one.opcode == _PACKED_ADD for one in code)


def clocks(loop: list[Instruction], heads: int) -> dict[str, float]:
    """Clocks a pair by unit: a packed multiply-add is two heads of a pair, of one thread."""
    counts = Counter(one.opcode for one in loop)
    pairs = 2 * counts[_PACKED_ADD] / heads
    lanes = {
        "fma": sum(lanes * counts[opcode] for opcode, lanes in _FMA.items()) / FMA_LANES,
        "alu": sum(counts[opcode] for opcode in _ALU) / ALU_LANES,
        "issue": len(loop) / ISSUE_LANES,
    }
    return {unit: round(value / pairs, 4) for unit, value in lanes.items()}


def disassembled(image: bytes) -> str:
    """The text of a cubin. Raises FileNotFoundError where there is no nvdisasm."""
    folders = [os.environ.get("PATH", ""), os.path.join(os.environ.get("CUDA_HOME", ""), "bin")]
    program = shutil.which("nvdisasm", path=os.pathsep.join(folders))
    if program is None:
        raise FileNotFoundError("nvdisasm is neither on PATH nor in $CUDA_HOME/bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [program, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def count(kind: str, heads: int, dim: int = 128) -> dict[str, Any]:
    """A dense kernel's entry: clocks a pair, instructions a head element, spilled bytes."""
    t = sm100_tiles.dense_tiles(heads, dim, ELEMENTS[kind])
    binary = compiler.compile_kernel(sm100.kernel(sm100.DENSE, t, "float32"), ARCH)
    loop = math_loop(parse(disassembled(binary.image)))
    elements, usage = 2 * _adds(loop), compiler.usage(binary)
    return {
        **{"format": kind, "H": heads, "D": dim},
        **clocks(loop, heads),
        "instructions_per_element": round(len(loop) / elements, 3),
        "spilled_bytes": usage and usage.spill_bytes,
    }


def main() -> None:
    report = {
        "sources": machine.kernels(),
        "arch": ARCH,
        "nvrtc": machine.installed("nvidia-cuda-nvrtc"),
        "how": "one way round the math loop, waits passing at once, by `tools/count_pipes.py`",
        "kernels": [count(kind, heads) for kind in ELEMENTS for heads in HEADS],
    }
    COUNTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
