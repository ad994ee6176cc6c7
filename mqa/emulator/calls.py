"""Calls of functions that CUDA's runtime has on the device: printf, and failed assertions.

Their parameters are variables of the caller, which lie in its local memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mqa.emulator.alu import Binder, fail
from mqa.emulator.floats import Array
from mqa.emulator.memory import WINDOWS
from mqa.emulator.memory_access import load, store
from mqa.emulator.parser import Address, Instruction, Operand, Symbol, Vector
from mqa.emulator.program import Effect, addresses, effect
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.warp import lanes

if TYPE_CHECKING:
    from mqa.emulator.warp import Warp

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d*))?"
    r"(?P<length>hh|h|ll|l|j|z|t|L)?(?P<kind>[diouxXcspaAeEfFgG%])"
)
_WIDE = ("ll", "l", "j", "z", "t")


@effect("call")
def call(b: Binder, at: Instruction) -> Effect:
    named = next((x.name for x in at.operands if isinstance(x, Symbol)), "")
    given = at.operands[-1]
    if named not in _FUNCTIONS or not isinstance(given, Vector):
        fail(at, f"function {named or at.operands[0]} is not modelled")
    result = at.operands[0].parts[0] if isinstance(at.operands[0], Vector) else None
    return _FUNCTIONS[named](b, at, given.parts, result)


def _assertion(
    b: Binder, at: Instruction, given: tuple[Operand, ...], result: Operand | None
) -> Effect:
    message, file, line, *_ = (addresses(b, _there(x, at), at, "b64") for x in given)

    def run(warp: Warp, mask: int) -> None:
        lane = int(np.flatnonzero(lanes(mask))[0])
        texts = [_text(warp, _parameter(warp, x, 8, lane)) for x in (message, file)]
        where = f"{texts[1]}:{_parameter(warp, line, 4, lane)}"
        raise Finding(Kind.TRAP, f"assertion {texts[0]!r} of {where} by threads {mask:#010x}")

    return run


def _printf(
    b: Binder, at: Instruction, given: tuple[Operand, ...], result: Operand | None
) -> Effect:
    """Texts go to the launch's summary, thread after thread."""
    form, values = (addresses(b, _there(x, at), at, "b64") for x in given)
    where = addresses(b, _there(result, at), at, "b32")

    def run(warp: Warp, mask: int) -> None:
        for lane in np.flatnonzero(lanes(mask)).tolist():
            text = _text(warp, _parameter(warp, form, 8, lane))
            values_at = _parameter(warp, values, 8, lane)
            told, count = _formatted(warp, text, values_at, lane)
            warp.cta.machine.printed.append(told)
            place = where(warp)[:1]
            store(warp, "local", place, 4, [np.array([count], np.uint32)], 1 << lane)
            if warp.local_taint is not None:
                warp.local_taint[lane, int(place[0]) :][:4] = False

    return run


_FUNCTIONS: dict[str, Callable[..., Effect]] = {"__assertfail": _assertion, "vprintf": _printf}
"""By name: of a call, its parameters and its result."""


def _there(operand: Operand | None, at: Instruction) -> Address:
    if not isinstance(operand, Symbol):
        fail(at, f"{operand} is no parameter")
    return Address(operand)


def _parameter(warp: Warp, where: Callable[[Warp], Array], size: int, lane: int) -> int:
    (bits,) = load(warp, "local", where(warp)[:1], size, 1, 1 << lane)
    return int(bits[0])


def _text(warp: Warp, address: int) -> str:
    """A string of the module, to its end or that of its variable."""
    if address >> 60 == WINDOWS["const"] >> 60:
        address -= WINDOWS["const"]
    buffer = warp.cta.machine.memory.find(address)
    raw = buffer.data[address - buffer.origin :].tobytes()
    return raw.split(b"\0")[0].decode(errors="replace")


def _formatted(warp: Warp, text: str, address: int, lane: int) -> tuple[str, int]:
    """What printf makes of a format and of values that lie at an address, and how many it took."""
    taken, at = 0, address

    def take(size: int) -> int:
        nonlocal taken, at
        at = -(-at // size) * size
        (bits,) = load(warp, "", np.array([at]), size, 1, 1 << lane)
        taken, at = taken + 1, at + size
        return int(bits[0])

    def one(found: re.Match[str]) -> str:
        if found["kind"] == "%":
            return "%"
        stars = {name: take(4) for name in ("width", "precision") if found[name] == "*"}
        width = str(stars.get("width", found["width"] or ""))
        precision = found["precision"]
        after = "" if precision is None else f".{stars.get('precision', precision)}"
        return _converted(warp, found, f"%{found['flags']}{width}{after}", take)

    return _CONVERSION.sub(one, text), taken


def _converted(warp: Warp, found: re.Match[str], start: str, take: Callable[[int], int]) -> str:
    kind = found["kind"]
    if kind in "aAeEfFgG":
        value = float(np.array(take(8), np.uint64).view(np.float64))
        return value.hex() if kind in "aA" else f"{start}{kind}" % value
    if kind == "s":
        return f"{start}s" % _text(warp, take(8))
    if kind == "p":
        return f"{start}s" % hex(take(8))
    if kind == "c":
        return f"{start}c" % chr(take(4) & 0xFF)
    size = 8 if found["length"] in _WIDE else 4
    bits = take(size)
    if kind in "di" and bits >> 8 * size - 1:
        bits -= 1 << 8 * size
    return f"{start}{'d' if kind in 'diu' else kind}" % bits
