"""PTX text becomes a module: data, entries, and instructions with resolved registers.

Takes what NVRTC emits and what inline assembly adds: scopes with registers and labels of their
own, several statements a line, statements over several lines. Types come from opcodes, since a
register may be declared without one (`.b32`).
"""

from __future__ import annotations

import bisect
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

BYTES = {
    f"{kind}{bits}": bits // 8
    for kind, sizes in {"b": (8, 16, 32, 64), "u": (8, 16, 32, 64), "s": (8, 16, 32, 64)}.items()
    for bits in sizes
} | {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f16x2": 4, "bf16x2": 4, "pred": 1}
BYTES |= {"f32x2": 8, "s16x2": 4, "u16x2": 4, "tf32": 4}
"""Size of a value of each type; a predicate counts as one."""


class PtxError(ValueError):
    """PTX that is malformed or not modelled; names the line."""


@dataclass(frozen=True, slots=True)
class Register:
    """A virtual register; scopes are resolved, so `index` tells registers apart."""

    index: int
    name: str
    type: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Immediate:
    value: int
    """Bits of a float literal, else the number."""
    float_bits: int = 0
    """Width of a float literal: 32 or 64; 0 for an integer."""

    def __str__(self) -> str:
        digits = f"{self.value:0{self.float_bits // 4}X}"
        prefix = {0: "", 32: "0f", 64: "0d"}[self.float_bits]
        return prefix + digits if prefix else str(self.value)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A special register, a label or the address of a variable."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Vector:
    parts: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"{{{', '.join(map(str, self.parts))}}}"


@dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`: two results."""

    first: Operand
    second: Operand

    def __str__(self) -> str:
        return f"{self.first}|{self.second}"


@dataclass(frozen=True, slots=True)
class Negated:
    """`!p`."""

    register: Register

    def __str__(self) -> str:
        return f"!{self.register}"


@dataclass(frozen=True, slots=True)
class Address:
    """`[base+offset]`, or `[base, {c0, c1}]` of a tensor copy."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()

    def __str__(self) -> str:
        offset = f"{self.offset:+}" if self.offset else ""
        inner = f", {Vector(self.coordinates)}" if self.coordinates else ""
        return f"[{self.base}{offset}{inner}]"


Operand = Register | Immediate | Symbol | Vector | Pair | Negated | Address


@dataclass(slots=True)
class Instruction:
    opcode: str
    operands: tuple[Operand, ...]
    predicate: Register | Negated | None
    line: int
    source: tuple[int, int] | None
    """File number and line of the CUDA source, from `.loc`."""
    target: int = -1
    """Of a branch: index of the instruction it goes to."""
    targets: tuple[int, ...] = ()
    """Of a branch by an index: all that it may go to."""
    callers: tuple[tuple[int, int], ...] = ()
    """Likewise, where functions are called that were inlined, innermost first."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The opcode and its modifiers; .relu may stand behind the type, and is moved before it."""
        parts = self.opcode.split(".")
        if parts[-1] == "relu" and len(parts) > 2:
            parts[-2:] = "relu", parts[-2]
        return tuple(parts)


@dataclass(slots=True)
class Data:
    """A variable."""

    name: str
    space: str
    align: int
    size: int
    initial: bytes | None = b""
    """None where it is not modelled."""
    type: str = ""


@dataclass(slots=True)
class Entry:
    """A kernel."""

    name: str
    params: tuple[Data, ...]
    instructions: list[Instruction] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    variables: dict[str, Data] = field(default_factory=dict)
    """Shared and local variables of its own."""
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Launch bounds, such as `maxntid`."""
    starts: set[int] = field(default_factory=set)
    """Instructions that a label stands before."""


@dataclass(slots=True)
class Module:
    target: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)
    variables: dict[str, Data] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)


class _Scope:
    """Registers and labels between two braces."""

    def __init__(self, outer: _Scope | None) -> None:
        self.outer = outer
        self.declared: dict[str, str] = {}
        self.ranges: dict[str, tuple[int, str]] = {}
        self.known: dict[str, Register] = {}
        self.labels: dict[str, int] = {}
        self.lists: dict[str, tuple[str, ...]] = {}
        """Of `.branchtargets`: labels by the list's own."""

    def chain(self) -> Iterator[_Scope]:
        scope: _Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_MOST_CALLERS = 16
_LINE_DIRECTIVES = {"version", "target", "address_size", "file", "loc", "maxntid", "reqntid"}
_LINE_DIRECTIVES |= {"minnctapersm", "maxnreg", "explicitcluster", "reqnctapercluster"}
_LINE_DIRECTIVES |= {"maxclusterrank"}
_LAUNCH_DIRECTIVES = {"maxntid", "reqntid", "minnctapersm", "maxnreg", "reqnctapercluster"}
_VARIABLE = re.compile(
    r"(?:\.(?:extern|visible|weak|common)\s+)*\.(global|shared|const|local|param)\b"
    r"(?P<rest>[^=]*)(?:=(?P<initial>.*))?\Z",
    re.DOTALL,
)
_NAME_AND_SIZE = re.compile(r"(?<![.\w$%])([\w$%]+)\s*((?:\[\s*\d*\s*\]\s*)*)\Z")
_NAME = re.compile(r"[\w$%]+\Z")
_REGISTERS = re.compile(r"\.reg\s*\.(\w+)\s+(.*)", re.DOTALL)
_RANGE = re.compile(r"(.*?)<(\d+)>\Z")
_NUMBERED = re.compile(r"(.*?)(\d+)\Z")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})\Z|0[dD]([0-9a-fA-F]{16})\Z")
_DECIMAL = re.compile(r"-?\d+\.\d*(?:[eE][+-]?\d+)?\Z")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?\Z")
_OCTAL = re.compile(r"-?0[0-7]+\Z")
_OFFSET = re.compile(r"(.+?)\s*\+\s*(-?\s*(?:0[xX][0-9a-fA-F]+|\d+))\Z|(.+?)\s*-\s*(\d+)\Z")


def parse(text: str) -> Module:
    """Parse PTX. Raises PtxError naming the line of what it does not understand."""
    return _Parser(text).run()


class _Parser:
    def __init__(self, text: str) -> None:
        blank = re.compile(r"[^\n]+")
        self.text = _COMMENT.sub(lambda found: blank.sub(" ", found[0]), text)
        self.at = 0
        self.newlines = [found.start() for found in re.finditer("\n", self.text)]
        self.module = Module()
        self.entry: Entry | None = None
        self.scope: _Scope | None = None
        self.source: tuple[int, int] | None = None
        self.callers: tuple[tuple[int, int], ...] = ()
        self.called_at: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
        """Of the lines seen last: where the function is called that they are in."""
        self.branches: list[tuple[Instruction, _Scope]] = []
        self.label = ""
        """The last one."""

    def run(self) -> Module:
        while self._skip_blanks():
            self._item()
        if self.scope is not None:
            self._fail("the body of an entry is not closed")
        return self.module

    def _fail(self, message: str) -> None:
        raise PtxError(f"PTX line {self._line()}: {message}")

    def _line(self) -> int:
        return bisect.bisect_left(self.newlines, self.at) + 1

    def _skip_blanks(self) -> bool:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.at < len(self.text)

    def _take(self, end: str) -> str:
        """Text up to `end`, which is passed too."""
        found = self.text.find(end, self.at)
        if found < 0:
            self._fail(f"expected {end!r} before the end")
        taken = self.text[self.at : found]
        self.at = found + len(end)
        return taken

    def _item(self) -> None:
        text, at = self.text, self.at
        if text[at] == "{":
            self.at += 1
            self.scope = _Scope(self.scope)
        elif text[at] == "}":
            self.at += 1
            self._close()
        elif text[at] == ";":
            self.at += 1
        elif text[at] == ".":
            self._directive()
        elif label := _LABEL.match(text, at):
            self.at = label.end()
            self._label(label[1])
        else:
            line = self._line()
            self._instruction(self._take(";").strip(), line)

    def _close(self) -> None:
        if self.scope is None:
            self._fail("'}' without '{'")
            return
        self.scope = self.scope.outer
        if self.scope is None:
            self._resolve_branches()
            self.entry = None

    def _label(self, name: str) -> None:
        if self.scope is None or self.entry is None:
            self._fail(f"label {name} outside an entry")
            return
        self.label = name
        self.scope.labels[name] = len(self.entry.instructions)
        self.entry.starts.add(len(self.entry.instructions))

    def _resolve_branches(self) -> None:
        for at, scope in self.branches:
            if at.parts[0] == "bra":
                at.target = _place_of(at, scope, ", ".join(map(str, at.operands)))
                continue
            named = str(at.operands[-1]) if at.operands else ""
            listed = next((s.lists[named] for s in scope.chain() if named in s.lists), None)
            if listed is None:
                raise PtxError(f"PTX line {at.line}: {named} is no list of branch targets")
            at.targets = tuple(_place_of(at, scope, name) for name in listed)
        self.branches.clear()

    def _directive(self) -> None:
        name = re.compile(r"\.(\w+)").match(self.text, self.at)
        word = name[1] if name else ""
        if word in _LINE_DIRECTIVES:
            found = self.text.find("\n", self.at)
            end = len(self.text) if found < 0 else found
            text = self.text[self.at : end]
            try:
                self._line_directive(word, text)
            except (IndexError, ValueError):
                self._fail(f"{text.strip()!r} is malformed")
            self.at = end
        elif word == "section":
            self._take("}")
        elif word in ("pragma", "alias"):
            self._take(";")
        elif word == "branchtargets":
            names = self._take(";").split(maxsplit=1)[1:]
            if self.scope is None or not names:
                self._fail(".branchtargets names no labels of an entry")
            elif self.scope is not None:
                self.scope.lists[self.label] = tuple(x.strip() for x in names[0].split(","))
        elif word == "reg":
            self._registers(self._take(";"))
        else:
            self._declaration()

    def _line_directive(self, word: str, text: str) -> None:
        if word == "version":
            float(text.split()[1])
        elif word == "target":
            self.module.target = text.split()[1].rstrip(",")
        elif word == "file":
            number, path = text.split(maxsplit=2)[1:]
            self.module.files[int(number)] = path.split('"')[1]
        elif word == "loc":
            self._source_line(text)
        elif word in _LAUNCH_DIRECTIVES and self.entry is not None:
            self.entry.directives[word] = tuple(
                int(x) for x in text.split(maxsplit=1)[1].split(",")
            )

    def _source_line(self, text: str) -> None:
        """Where a function is inlined, the line of the call is told too, and that one before."""
        place, _, call = text.partition("inlined_at")
        file, line = map(int, place.split()[1:3])
        self.callers = ()
        if call:
            at = int(call.split()[0]), int(call.split()[1])
            self.callers = (at, *self.called_at.get(at, ()))[:_MOST_CALLERS]
        self.source = (file, line)
        self.called_at[file, line] = self.callers

    def _registers(self, text: str) -> None:
        if self.scope is None:
            self._fail(".reg outside an entry")
            return
        found = _REGISTERS.match(text.strip())
        kind, names = (found[1], found[2]) if found else ("", "")
        for name in (part.strip() for part in names.split(",")):
            ranged = _RANGE.match(name)
            if kind not in BYTES or not _NAME.match(ranged[1].strip() if ranged else name):
                self._fail(f"{text.strip()!r} declares no registers known")
            if ranged:
                self.scope.ranges[ranged[1].strip()] = (int(ranged[2]), kind)
            else:
                self.scope.declared[name] = kind

    def _declaration(self) -> None:
        head = re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.(entry|func)\b")
        found = head.match(self.text, self.at)
        if found is None:
            self._variable(self._take(";"))
            return
        if found[1] == "func":
            self._function()
            return
        self.at = found.end()
        name = self._take("(").strip()
        params = [self._described(text) for text in self._take(")").split(",") if text.strip()]
        self.entry = Entry(name, tuple(params))
        self.module.entries[name] = self.entry

    def _function(self) -> None:
        """One that is declared elsewhere. Calls of it say whether it is modelled."""
        found = self.text.find("{", self.at)
        declared = self._take(";")
        if not declared.startswith(".extern") or 0 <= found < self.at:
            self._fail(".func: functions that are called are not modelled")

    def _variable(self, text: str) -> None:
        data = self._described(text)
        if self.entry is None:
            self.module.variables[data.name] = data
            return
        if data.space == "param":
            data = self._of_call(data)
        self.entry.variables[data.name] = data

    def _of_call(self, data: Data) -> Data:
        """A parameter of a call lies in the caller's local memory, at the place of those of the
        same name: each call has its own."""
        before = self.entry.variables.get(data.name, data) if self.entry is not None else data
        align, size = max(data.align, before.align), max(data.size, before.size)
        return Data(data.name, "local", align, size)

    def _described(self, text: str) -> Data:
        found = _VARIABLE.match(text.strip())
        rest = found["rest"].split() if found else []
        named = _NAME_AND_SIZE.search(found["rest"].strip()) if found else None
        kind = next((word[1:] for word in rest if word[1:] in BYTES), None)
        if found is None or named is None or kind is None:
            raise PtxError(f"PTX line {self._line()}: {text.strip()!r} is no declaration known")
        align = BYTES[kind]
        if ".align" in rest:
            given = (*rest, "")[rest.index(".align") + 1]
            if not given.isdigit():
                raise PtxError(f"PTX line {self._line()}: {text.strip()!r} has no alignment known")
            align = int(given)
        size = BYTES[kind]
        for extent in re.findall(r"\[\s*(\d*)\s*\]", named[2]):
            size *= int(extent or 0)
        initial = _initial(found["initial"], kind)
        if initial is not None and size == 0:
            size = len(initial)  # [] has what its initial value has
        return Data(named[1], found[1], align, size, initial, kind)

    def _instruction(self, text: str, line: int) -> None:
        if self.entry is None or self.scope is None:
            raise PtxError(f"PTX line {line}: {text!r} outside an entry")
        predicate: Register | Negated | None = None
        try:
            if text.startswith("@"):
                guard, text = text[1:].split(maxsplit=1)
                operand = self._operand(guard)
                if not isinstance(operand, Register | Negated):
                    raise PtxError(f"predicate {guard!r} is no register")
                predicate = operand
            opcode, operands = _split_opcode(text)
            parsed = tuple(self._operand(part) for part in _split(operands))
        except PtxError as error:
            raise PtxError(f"PTX line {line}: {error}") from None
        instruction = Instruction(
            opcode, parsed, predicate, line, self.source, callers=self.callers
        )
        if instruction.parts[0] in ("bra", "brx"):
            self.branches.append((instruction, self.scope))
        self.entry.instructions.append(instruction)

    def _operand(self, text: str) -> Operand:
        text = text.strip()
        closing = {"{": "}", "(": ")", "[": "]"}.get(text[:1], "")
        if not text.endswith(closing):
            raise PtxError(f"{text!r} is not closed")
        if text.startswith(("{", "(")):
            return Vector(tuple(self._operand(part) for part in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text[1:-1].strip())
        if text.startswith("!"):
            register = self._operand(text[1:])
            if not isinstance(register, Register):
                raise PtxError(f"{text!r} negates what is no register")
            return Negated(register)
        if text.count("|") == 1:
            first, second = text.split("|")
            return Pair(self._operand(first), self._operand(second))
        return _literal(text) or self._register(text) or Symbol(text)

    def _address(self, text: str) -> Address:
        inner = _split(text)
        coordinates: tuple[Operand, ...] = ()
        if len(inner) > 1:
            vector = self._operand(inner[1])
            coordinates = vector.parts if isinstance(vector, Vector) else (vector,)
        offset, name = 0, inner[0].strip()
        moved = _OFFSET.match(name)
        if moved:
            name = (moved[1] or moved[3]).strip()
            offset = int(moved[2].replace(" ", ""), 0) if moved[1] else -int(moved[4])
        base = self._operand(name)
        if not isinstance(base, Register | Symbol | Immediate):
            raise PtxError(f"address {text!r} has no base known")
        return Address(base, offset, coordinates)

    def _register(self, name: str) -> Register | None:
        if self.scope is None or self.entry is None:
            return None
        for scope in self.scope.chain():
            if name in scope.known:
                return scope.known[name]
            kind = scope.declared.get(name)
            numbered = _NUMBERED.match(name)
            if kind is None and numbered and numbered[1] in scope.ranges:
                count, ranged = scope.ranges[numbered[1]]
                kind = ranged if int(numbered[2]) < count else None
            if kind is not None:
                register = Register(len(self.entry.registers), name, kind)
                self.entry.registers.append(register)
                scope.known[name] = register
                return register
        if name.startswith("%") and _NUMBERED.match(name) and name != "%clock64":
            raise PtxError(f"register {name} is not declared")
        return None


def _place_of(at: Instruction, scope: _Scope, name: str) -> int:
    place = next((s.labels[name] for s in scope.chain() if name in s.labels), None)
    if place is None:
        raise PtxError(f"PTX line {at.line}: label {name} is not defined")
    return place


def _split_opcode(text: str) -> tuple[str, str]:
    """Opcode and operands, which need no blank between before a brace."""
    found = re.match(r"([\w.:]+)\s*(.*)\Z", text, re.DOTALL)
    if found is None:
        raise PtxError(f"{text!r} is no instruction")
    return found[1], found[2]


def _split(text: str) -> list[str]:
    """At commas outside braces and brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if text[start:].strip():
        parts.append(text[start:])
    return parts


def _literal(text: str) -> Immediate | None:
    found = _FLOAT.match(text)
    if found:
        return Immediate(int(found[1] or found[2], 16), 32 if found[1] else 64)
    if _INTEGER.match(text):
        digits = text.rstrip("U")
        octal = _OCTAL.match(digits)
        return Immediate(int(digits, 8 if octal else 0))
    if _DECIMAL.match(text):
        return Immediate(int.from_bytes(struct.pack("<d", float(text)), "little"), 64)
    return None


def _as_kind(literal: Immediate, kind: str) -> int:
    """Bits of a number as a value of a type."""
    if literal.float_bits == 64 and kind == "f32":
        value = struct.unpack("<d", struct.pack("<Q", literal.value))[0]
        return int.from_bytes(struct.pack("<f", value), "little")
    if literal.float_bits == 32 and kind == "f64":
        value = struct.unpack("<f", struct.pack("<I", literal.value))[0]
        return int.from_bytes(struct.pack("<d", value), "little")
    return literal.value


def _initial(text: str | None, kind: str) -> bytes | None:
    """Of a variable: numbers in one row; None for all else, as addresses of others."""
    if text is None:
        return b""
    values = []
    if "{" in text.strip()[1:]:
        return None
    for part in re.findall(r"[^\s,{}]+", text):
        literal = _literal(part)
        if literal is None:
            return None
        values.append(_as_kind(literal, kind))
    size = BYTES[kind]
    mask = (1 << 8 * size) - 1
    return b"".join(struct.pack("<Q", value & mask)[:size] for value in values)
