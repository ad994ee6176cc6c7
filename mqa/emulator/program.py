"""An entry becomes a program: each instruction bound once to a Python function.

Instructions that touch registers alone are bound by `mqa.emulator.alu` and joined to runs, which a
warp executes without looking at anything else. The others are steps: branches, exits, and effects
that take a warp and a mask of its threads, and return what to wait for, if anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mqa.emulator import alu
from mqa.emulator.alu import ALU, Binder, Function, Registers, fail
from mqa.emulator.memory import CONST_START, PARAM_START, SHARED_START
from mqa.emulator.parser import (
    BYTES,
    Address,
    Data,
    Entry,
    Immediate,
    Instruction,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
)

if TYPE_CHECKING:
    from mqa.emulator.warp import Wait, Warp

Effect = Callable[["Warp", int], "Wait | None"]
EFFECTS: dict[str, Callable[[Binder, Instruction], Effect]] = {}
"""By the start of an opcode; the longest that fits counts."""
CARRIES: dict[str, tuple[int, ...]] = {}
"""Numbers of the operands that decide nothing: the effect carries them elsewhere."""


def effect(*names: str, carries: tuple[int, ...] = ()) -> Callable[[Any], Any]:
    """Register the binder of opcodes that begin so."""

    def register(function: Any) -> Any:
        for name in names:
            EFFECTS[name] = function
            CARRIES[name] = carries
        return function

    return register


Run = tuple[tuple[Function, ...], tuple[tuple[int, ...], ...], int, frozenset[int]]
"""Functions, what each writes, the instruction after them, and all registers they touch."""


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction that may do more than change registers."""

    effect: Effect
    predicate: tuple[int, bool] | None
    target: int = -1
    exits: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the variables of an entry lie."""

    symbols: dict[str, int]
    params: int
    """Bytes of parameters."""
    static_shared: int
    """Bytes of shared memory before the dynamic part."""
    local: int
    initial: tuple[tuple[int, bytes], ...]
    """Of module-scope variables: address in the constant window, and bytes."""


def _up(value: int, align: int) -> int:
    return -(-value // align) * align


def _lay_out(module: Module, entry: Entry) -> Layout:
    symbols: dict[str, int] = {}
    ends = {"param": PARAM_START, "shared": SHARED_START, "local": 0, "global": CONST_START}
    initial = []

    def place(data: Data, space: str) -> None:
        symbols[data.name] = _up(ends[space], data.align)
        ends[space] = symbols[data.name] + data.size

    for param in entry.params:
        place(param, "param")
    variables = (*entry.variables.values(), *module.variables.values())
    dynamic = [data for data in variables if data.space == "shared" and data.size == 0]
    for data in variables:
        if data in dynamic:
            continue
        space = "global" if data.space == "const" else data.space
        place(data, space)
        if space == "global":
            initial.append((symbols[data.name], data.initial.ljust(data.size, b"\0")))
    for data in dynamic:
        symbols[data.name] = _up(ends["shared"], data.align)
    static = max((symbols[data.name] for data in dynamic), default=ends["shared"])
    sizes = ends["param"] - PARAM_START, static - SHARED_START, ends["local"]
    return Layout(symbols, *sizes, tuple(initial))


class Program:
    """An entry, ready to be executed by warps."""

    def __init__(self, module: Module, entry: Entry) -> None:
        # They register what they bind.
        from mqa.emulator import engines, memory_access, sync, wgmma  # noqa: F401

        self.module, self.entry = module, entry
        self.layout = _lay_out(module, entry)
        self.binder = Binder(entry.registers, self.layout.symbols)
        self.instructions = entry.instructions
        self.sources = [_registers_of(i) for i in self.instructions]
        self.grain = min((4, *(_shared_bytes(i) for i in self.instructions)))
        """Bytes of the smallest access that may be one of shared memory."""
        self.steps: list[Any] = []
        self.deciding: dict[int, tuple[tuple[Register, ...], tuple[Register, ...]]] = {}
        """The predicate of an instruction that is no arithmetic, and operands that decide."""
        self.runs: dict[int, Run] = {}
        for i, instruction in enumerate(self.instructions):
            self.steps.append(self._bind(i, instruction))
        self.steps.append(Step(_nothing, None, exits=True))
        self._join_runs()

    def place(self, index: int) -> tuple[int, str, str]:
        """PTX line, opcode and CUDA source line of an instruction."""
        if index >= len(self.instructions):
            return 0, "end", ""
        at = self.instructions[index]
        return at.line, at.opcode, self._source(at.source or (0, 0))

    def callers(self, index: int) -> tuple[str, ...]:
        """Source lines that call the functions that an instruction is in, innermost first."""
        if index >= len(self.instructions):
            return ()
        return tuple(map(self._source, self.instructions[index].callers))

    def told(self, index: int) -> str:
        """An instruction as reports tell it, with the names of files alone."""
        line, opcode, source = self.place(index)
        sources = [name.rpartition("/")[2] for name in (source, *self.callers(index)) if name]
        return f"{opcode} at PTX line {line}" + "".join(f", {name}" for name in sources[:3])

    def _source(self, place: tuple[int, int]) -> str:
        file, line = place
        return f"{self.module.files[file]}:{line}" if file in self.module.files else ""

    def _bind(self, index: int, at: Instruction) -> Step | Function:
        predicate = self._predicate(at)
        base = at.parts[0]
        self.deciding[index] = (_guard(at), ())
        if base == "bra":
            return Step(_nothing, predicate, target=at.target)
        if base in ("ret", "exit"):
            return Step(_nothing, predicate, exits=True)
        if base in ALU:
            function = ALU[base](self.binder, at)
            return function if predicate is None else self._guarded(at, function, predicate)
        parts = at.opcode.split(".")
        for length in range(len(parts), 0, -1):
            name = ".".join(parts[:length])
            found = EFFECTS.get(name)
            if found is not None:
                self.deciding[index] = (_guard(at), _registers_of(at, CARRIES[name]))
                return Step(found(self.binder, at), predicate)
        fail(at, "this instruction is not modelled")

    def _predicate(self, at: Instruction) -> tuple[int, bool] | None:
        if at.predicate is None:
            return None
        negated = isinstance(at.predicate, Negated)
        register = at.predicate.register if isinstance(at.predicate, Negated) else at.predicate
        return register.index, negated

    def _guarded(
        self, at: Instruction, function: Function, predicate: tuple[int, bool]
    ) -> Function:
        places = _dests(at)
        holds, negated = predicate

        def run(values: Registers) -> None:
            which = ~values[holds] if negated else values[holds]
            before = [values[place] for place in places]
            function(values)
            for place, old in zip(places, before, strict=True):
                values[place] = np.where(which, values[place], old)

        return run

    def _join_runs(self) -> None:
        """Runs end at labels, so that a fragment can be found where another one goes by."""
        start = 0
        count = len(self.instructions)
        while start < count:
            if isinstance(self.steps[start], Step):
                start += 1
                continue
            end = start + 1
            while end < count and not isinstance(self.steps[end], Step):
                if end in self.entry.starts:
                    break
                end += 1
            dests = tuple(_dests(at) for at in self.instructions[start:end])
            touched = {place for places in dests for place in places}
            for i in range(start, end):
                touched |= {register.index for register in self.sources[i]}
                touched |= {register.index for register in self.deciding[i][0]}
            self.runs[start] = (tuple(self.steps[start:end]), dests, end, frozenset(touched))
            start = end


def _nothing(warp: Warp, mask: int) -> None:
    return None


def _guard(at: Instruction) -> tuple[Register, ...]:
    if at.predicate is None:
        return ()
    return (at.predicate.register if isinstance(at.predicate, Negated) else at.predicate,)


def _shared_bytes(at: Instruction) -> int:
    """Bytes of each element of an access that may be one of shared memory, else many."""
    if at.parts[0] not in ("ld", "st", "atom", "red"):
        return 16
    spaces = {"global", "local", "param", "const"}.intersection(at.parts)
    return BYTES.get(at.parts[-1], 16) if not spaces else 16


def _registers_of(at: Instruction, without: tuple[int, ...] = ()) -> tuple[Register, ...]:
    """All that an instruction names but what it only writes, and these operands."""
    found: list[Register] = []

    def visit(operand: Operand) -> None:
        if isinstance(operand, Register):
            found.append(operand)
        elif isinstance(operand, Vector):
            for part in operand.parts:
                visit(part)
        elif isinstance(operand, Negated):
            visit(operand.register)
        elif isinstance(operand, Address):
            visit(operand.base)
            for part in operand.coordinates:
                visit(part)

    reads_first = at.parts[0] in ("bar", "barrier")
    for i, operand in enumerate(at.operands):
        if (i > 0 or reads_first or isinstance(operand, Address)) and i not in without:
            visit(operand)
    return tuple(found)


def _dests(at: Instruction) -> tuple[int, ...]:
    """Registers that an instruction of the arithmetic units writes."""
    first = at.operands[0]
    parts: tuple[Operand, ...] = (first,)
    if isinstance(first, Vector):
        parts = first.parts
    elif isinstance(first, Pair):
        parts = (first.first, first.second)
    return tuple(part.index for part in parts if isinstance(part, Register))


def addresses(b: Binder, operand: Operand, at: Instruction, kind: str) -> Callable[[Warp], Any]:
    """Reader of an address operand: 32 addresses, int64."""
    if not isinstance(operand, Address):
        fail(at, f"{operand} is no address")
    base, offset = operand.base, operand.offset
    if isinstance(base, Symbol) and base.name not in b.symbols:
        fail(at, f"{base.name} is not declared")
    if not isinstance(base, Register):
        known = b.symbols[base.name] if isinstance(base, Symbol) else base.value
        fixed = np.full(alu.LANES, known + offset, np.int64)
        return lambda warp: fixed
    wide = b.types[base.index].itemsize == 8
    place, cast = b.source(base, "u64" if wide else "u32", at)

    def read(warp: Warp) -> Any:
        value = warp.registers[place]
        value = cast(value) if cast else value
        value = value.view(np.int64) if wide else value.astype(np.int64)
        return value + offset if offset else value

    return read


def values(b: Binder, operand: Operand, kind: str, at: Instruction) -> Callable[[Warp], Any]:
    """Reader of a value operand."""
    place, cast = b.source(operand, kind, at)
    if cast is None:
        return lambda warp: warp.registers[place]
    return lambda warp: cast(warp.registers[place])


def number(operand: Operand, at: Instruction) -> int:
    """An operand that has to be a literal."""
    if not isinstance(operand, Immediate):
        fail(at, f"{operand} has to be a number")
    return operand.value
