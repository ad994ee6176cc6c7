"""An entry becomes a program: each instruction bound once to a Python function.

Instructions that touch registers alone are bound by `mqa.emulator.alu` and joined to runs, which a
warp executes without looking at anything else. The others are steps: branches, exits, and effects
that take a warp and a mask of its threads, and return what to wait for, if anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mqa.emulator import alu, batches, clocks, forms, grammar
from mqa.emulator.alu import ALU, Binder, Function, Registers, fail
from mqa.emulator.batches import Batched
from mqa.emulator.device import device_of
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
    PtxError,
    Register,
    Symbol,
    Vector,
)

from mqa.emulator.warp import merged

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


def key_of(opcode: str) -> str | None:
    """The name under which an opcode is known, of `ALU`, `EFFECTS` or `Program.CONTROL`."""
    parts = opcode.split(".")
    if parts[0] in Program.CONTROL or parts[0] in ALU:
        return parts[0]
    starts = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((start for start in starts if start in EFFECTS), None)


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction that may do more than change registers."""

    effect: Effect
    predicate: tuple[int, bool] | None
    target: int = -1
    exits: bool = False
    targets: tuple[int, ...] = ()
    """Of a branch by an index."""
    index: Callable[[Warp], Any] | None = None
    more: int = 0
    """Instructions after this one that the effect executes too."""


class Run(NamedTuple):
    """Instructions that touch registers alone."""

    functions: tuple[Function, ...]
    dests: tuple[tuple[int, ...], ...]
    """Registers that each writes."""
    end: int
    """The instruction after."""
    batched: Batched | None
    """All of them at once, for whole warps."""
    touched: frozenset[int]
    """Registers that they read or write."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the variables of an entry lie."""

    symbols: dict[str, int]
    params: int
    """Bytes of parameters."""
    static_shared: int
    """Bytes of shared memory before the dynamic part."""
    local: int
    spaces: dict[str, str]
    """State spaces of these variables."""
    initial: tuple[tuple[int, bytes], ...]
    """Of module-scope variables: address in the constant window, and bytes."""


def _up(value: int, align: int) -> int:
    return -(-value // align) * align


def _lay_out(module: Module, entry: Entry) -> Layout:
    symbols: dict[str, int] = {}
    spaces = {data.name: data.space for data in entry.params}
    ends = {"param": PARAM_START, "shared": SHARED_START, "local": 0, "global": CONST_START}
    initial = []

    def place(data: Data, space: str) -> None:
        symbols[data.name] = _up(ends[space], data.align)
        ends[space] = symbols[data.name] + data.size

    for param in entry.params:
        place(param, "param")
    variables = (*entry.variables.values(), *module.variables.values())
    spaces.update((data.name, data.space) for data in variables)
    dynamic = [data for data in variables if data.space == "shared" and data.size == 0]
    for data in variables:
        if data in dynamic:
            continue
        space = "global" if data.space == "const" else data.space
        place(data, space)
        if space == "global":
            initial.append((symbols[data.name], (data.initial or b"").ljust(data.size, b"\0")))
    for data in dynamic:
        symbols[data.name] = _up(ends["shared"], data.align)
    static = max((symbols[data.name] for data in dynamic), default=ends["shared"])
    sizes = ends["param"] - PARAM_START, static - SHARED_START, ends["local"]
    return Layout(symbols, *sizes, spaces, tuple(initial))


def _check_initial(module: Module, entry: Entry) -> None:
    """Raise PtxError if an instruction names a variable whose initial value is not modelled."""
    unknown = {name for name, data in module.variables.items() if data.initial is None}
    for at in entry.instructions if unknown else ():
        for operand in at.operands:
            named = operand.base if isinstance(operand, Address) else operand
            if isinstance(named, Symbol) and named.name in unknown:
                fail(at, f"the initial value of {named} is not modelled")


class Program:
    """An entry, ready to be executed by warps."""

    CONTROL = ("bra", "brx", "ret", "exit")
    """Opcodes that change where a warp goes on, and nothing else."""

    def __init__(self, module: Module, entry: Entry) -> None:
        # They register what they bind.
        from mqa.emulator import calls, engines, memory_access, reductions, special  # noqa: F401
        from mqa.emulator import mma, remote, sync, tcgen05, tcgen05_mma, wgmma  # noqa: F401

        if not grammar.families(module.target):
            known = ", ".join(grammar.TARGETS)
            raise PtxError(f".target is {module.target or '(none)'}, expected one of {known}")
        self.module, self.entry = module, entry
        self.device = device_of(module.target)
        if not self.device.clusters and "reqnctapercluster" in entry.directives:
            raise PtxError(f".reqnctapercluster needs {grammar.NINETY}, .target is {module.target}")
        _check_initial(module, entry)
        self.layout = _lay_out(module, entry)
        self.binder = Binder(entry.registers, self.layout.symbols, self.layout.spaces)
        self.binder.target = module.target
        self.binder.ranked = any(_names_pairs(at) for at in entry.instructions)
        self.instructions = entry.instructions
        self.sources = [_registers_of(i) for i in self.instructions]
        self.named = _named(self.instructions)
        """Where each register is named first and last."""
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
        if not any(at.parts[0] in ("wgmma", "tcgen05") for at in self.instructions):
            mma.join(self.steps, self.entry.starts)  # else registers may be pending

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
        key, predicate = key_of(at.opcode), self._predicate(at)
        if key is None:
            fail(at, "this instruction is not modelled")
        grammar.check(at, key)
        carried = CARRIES.get(key, ())
        operands = _registers_of(at, carried) if key in EFFECTS or key == "brx" else ()
        self.deciding[index] = _guard(at), operands
        try:
            bound = self._bind_known(at, key, predicate)
            forms.check(at, key)
        except IndexError:
            fail(at, f"{len(at.operands)} operands are too few")
        except KeyError as error:
            fail(at, f"expected another modifier than {error}")
        grammar.check_target(at, self.module.target)
        return bound

    def _bind_known(
        self, at: Instruction, key: str, predicate: tuple[int, bool] | None
    ) -> Step | Function:
        if key == "bra":
            return Step(_nothing, predicate, target=at.target)
        if key == "brx":
            index = values(self.binder, at.operands[0], "u32", at)
            return Step(_nothing, predicate, at.targets[0], targets=at.targets, index=index)
        if key in self.CONTROL:
            return Step(_nothing, predicate, exits=True)
        if clocks.reads_clock(at):
            return Step(clocks.clock(self.binder, at), predicate)
        if key in ALU:
            function = ALU[key](self.binder, at)
            return function if predicate is None else self._guarded(at, function, predicate)
        return Step(EFFECTS[key](self.binder, at), predicate)

    def _predicate(self, at: Instruction) -> tuple[int, bool] | None:
        if at.predicate is None:
            return None
        negated = isinstance(at.predicate, Negated)
        register = at.predicate.register if isinstance(at.predicate, Negated) else at.predicate
        if register.type != "pred":
            fail(at, f"register {register.name} is declared .{register.type}, no predicate")
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
                values[place] = merged(which, values[place], old)

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
            self.runs[start] = self._run(start, end)
            start = end

    def divide(self, place: int) -> int:
        """Let a run end before an instruction, where another one begins; where it began."""
        start = max(first for first in self.runs if first <= place)
        end = self.runs[start].end
        self.runs[start], self.runs[place] = self._run(start, place), self._run(place, end)
        return start

    def _run(self, start: int, end: int) -> Run:
        dests = tuple(_dests(at) for at in self.instructions[start:end])
        parts, touched = [], set[int]()
        for place, writes in zip(range(start, end), dests, strict=True):
            predicate = self._predicate(self.instructions[place])
            reads = [register.index for register in self.sources[place]]
            if predicate is not None:
                reads += [predicate[0], *writes]
            parts.append(batches.Instruction(self.steps[place], tuple(reads), writes))
            touched.update(reads, writes)
        functions = tuple(self.steps[start:end])
        types = self.binder.types

        def outside(register: int) -> bool:
            first, last = self.named[register]
            return first < start or last >= end

        batched = batches.batched(parts, types, outside)
        return Run(functions, dests, end, batched, frozenset(touched))


def _nothing(warp: Warp, mask: int) -> None:
    return None


def _guard(at: Instruction) -> tuple[Register, ...]:
    if at.predicate is None:
        return ()
    return (at.predicate.register if isinstance(at.predicate, Negated) else at.predicate,)


def _names_pairs(at: Instruction) -> bool:
    """Whether a copy may tell the other CTA of its pair, which kernels name by a bit of the rank in
    the addresses of their own variables."""
    return at.parts[:4] == ("cp", "async", "bulk", "tensor") and "cta_group::2" in at.parts


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

    reads_first = at.parts[0] in ("bar", "barrier", "brx") and "red" not in at.parts
    for i, operand in enumerate(at.operands):
        if (i > 0 or reads_first or isinstance(operand, Address)) and i not in without:
            visit(operand)
    return tuple(found)


def _named(instructions: Sequence[Instruction]) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for place, at in enumerate(instructions):
        guard = [register.index for register in _guard(at)]
        dests = _dests(at) if at.operands else ()
        for register in (*dests, *guard, *(one.index for one in _registers_of(at))):
            found[register] = found.get(register, (place, place))[0], place
    return found


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
