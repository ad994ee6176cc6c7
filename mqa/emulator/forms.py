"""What modifiers and operands of memory accesses, barriers and copies may stand together.

`mqa.emulator.grammar` knows which modifiers an instruction takes; here is which of them exclude or
need each other, so that what ptxas refuses is not executed as something near to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mqa.emulator.alu import fail, storage
from mqa.emulator.parser import (
    BYTES,
    Address,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Register,
    Vector,
)

_SPACES = {"global", "shared", "shared::cta", "shared::cluster", "local", "param", "const"}
_SCOPES = {"cta", "cluster", "gpu", "sys"}
_ORDERS = {"weak", "volatile", "relaxed", "acquire", "release", "acq_rel"}
_VECTORS = {"v2", "v4", "v8"}
_OWN = {
    "ld": {"weak", "volatile", "relaxed", "acquire"},
    "st": {"weak", "volatile", "relaxed", "release"},
    "atom": {"relaxed", "acquire", "release", "acq_rel"},
    "red": {"relaxed", "release"},
}
"""Memory orders that an access can have."""
_CACHES = {"ld": {"ca", "cg", "cs", "lu", "cv"}, "st": {"wb", "cg", "cs", "wt"}}
_CACHE_NAMES = _CACHES["ld"] | _CACHES["st"]
_FENCE = re.compile(
    r"fence(\.sc|\.acq_rel|\.acquire|\.release)?\.(cta|cluster|gpu|sys)"
    r"|fence\.(acquire|release)\.sync_restrict::shared::(cta|cluster)\.cluster"
    r"|fence\.mbarrier_init\.release\.cluster"
    r"|fence\.proxy\.(alias|async(\.global|\.shared::cta|\.shared::cluster)?)"
    r"|fence\.proxy\.async::generic\.(acquire|release)"
    r"\.sync_restrict::shared::(cta|cluster)\.cluster"
    r"|membar\.(cta|gl|sys)"
)
_SHF = re.compile(r"shf\.[lr]\.(wrap|clamp)\.b32")
_CP_ASYNC = re.compile(
    r"cp\.async\.c[ag]\.shared(::cta)?\.global(?!.*(L2::\d+B.*){2})"
    r"(\.L2::(cache_hint|64B|128B|256B)){0,2}"
)


def check(at: Instruction, key: str) -> None:
    """Raise PtxError if modifiers or operands of an instruction do not go together."""
    for start, rule in _RULES.items():
        if key == start or key.startswith(f"{start}."):
            rule(at)
            return


def _one_of(at: Instruction, names: set[str], what: str) -> str:
    """The one modifier of these that an instruction has, "" for none."""
    found = [part for part in at.parts[1:] if part in names]
    if len(found) > 1:
        fail(at, f"expected one {what}, got .{' and .'.join(found)}")
    return found[0] if found else ""


def _order(at: Instruction, legal: set[str]) -> None:
    order = _one_of(at, _ORDERS, "memory order")
    if order and order not in legal:
        fail(at, f".{order} is no memory order of it")
    needs_scope = order not in ("", "weak", "volatile")
    scope = _one_of(at, _SCOPES, "scope")
    if needs_scope and not scope:
        fail(at, f".{order} needs a scope")
    if scope and not needs_scope and at.parts[0] in ("ld", "st", "mbarrier"):
        fail(at, f"scope .{scope} needs a memory order")


def _access(at: Instruction) -> None:
    name = at.parts[0]
    space = _one_of(at, _SPACES, "state space")
    _order(at, _OWN[name])
    _one_of(at, _VECTORS, "size of vectors")
    cache = _one_of(at, _CACHE_NAMES, "cache operator")
    if cache and cache not in _CACHES.get(name, ()):
        fail(at, f".{cache} is no cache operator of it")
    if "nc" in at.parts and (name != "ld" or space != "global"):
        fail(at, ".nc stands in ld.global alone")
    if name != "ld" and (space == "const" or (space == "param" and name != "st")):
        fail(at, f"state space .{space} is not written")
    if name == "red" and at.parts[-2] == "exch":
        fail(at, ".exch gives a result, expected atom")
    for operand in at.operands:
        if isinstance(operand, Address):
            _pointer(at, operand, space)
        else:
            _registers(at, operand, at.parts[-1], exact=name in ("atom", "red"))


def _pointer(at: Instruction, operand: Address, space: str) -> None:
    base = operand.base
    if space in ("", "global") and isinstance(base, Register) and BYTES[base.type] != 8:
        fail(at, f"address {base.name} is declared .{base.type}, expected 64 bits")


def _registers(at: Instruction, operand: Operand, kind: str, *, exact: bool) -> None:
    """Registers of an access are as wide as its type, or wider where it converts."""
    if kind not in BYTES or "L2::cache_hint" in at.parts:
        return
    if kind == "pred" or (kind in ("f16", "bf16", "f16x2", "bf16x2") and not exact):
        fail(at, f"type .{kind} is no type of it")
    for part in operand.parts if isinstance(operand, Vector) else (operand,):
        if not isinstance(part, Register) or part.type == "pred":
            continue
        size = storage(part.type).itemsize
        if size < BYTES[kind] or (exact and size != BYTES[kind]):
            fail(at, f"register {part.name} is declared .{part.type}, and the type is .{kind}")
        if kind[0] in "us" and part.type in ("f32", "f64"):
            fail(at, f"register {part.name} is declared .{part.type}, and the type is .{kind}")


def _wide(at: Instruction, operand: Operand, size: int) -> None:
    if isinstance(operand, Register) and (
        operand.type == "pred" or storage(operand.type).itemsize != size
    ):
        fail(at, f"register {operand.name} is declared .{operand.type}, expected {8 * size} bits")


def _mbarrier(at: Instruction) -> None:
    what = at.parts[1]
    if at.parts[-1] != "b64":
        fail(at, "expected .b64 at the end")
    waits = what in ("try_wait", "test_wait")
    _order(at, {"acquire", "relaxed"} if waits else {"release", "relaxed"})
    if "noComplete" in at.parts and "expect_tx" in at.parts:
        fail(at, ".noComplete and .expect_tx exclude each other")
    if waits and len(at.operands) > 2:
        _wide(at, at.operands[2], 4 if "parity" in at.parts else 8)
    elif what.startswith("arrive"):
        _wide(at, at.operands[0], 8)
        for count in at.operands[2:]:
            _wide(at, count, 4)


def _barrier(at: Instruction) -> None:
    if at.parts[0] == "bar" and "aligned" in at.parts:
        fail(at, ".aligned is no modifier of bar")
    first = 1 if "red" in at.parts else 0
    which = at.operands[first] if len(at.operands) > first else None
    if isinstance(which, Immediate) and not 0 <= which.value < 16:
        fail(at, f"barrier {which}, expected 0 to 15")
    count = at.operands[first + 1] if len(at.operands) > first + 1 + first else None
    if isinstance(count, Immediate) and (count.value % 32 or not 0 < count.value <= 1024):
        fail(at, f"{count} threads, expected a multiple of 32")


def _cp_async(at: Instruction) -> None:
    if not _CP_ASYNC.fullmatch(at.opcode):
        fail(at, "expected .shared and .global, in this order")
    size = at.operands[2]
    if at.parts[2] == "cg" and isinstance(size, Immediate) and size.value != 16:
        fail(at, f"{size} bytes, expected 16 with .cg")
    *rest, last = at.operands[3:] or (None,)
    hint = "L2::cache_hint" in at.parts
    if len(rest) + (last is not None) - hint not in (0, 1):
        fail(at, f"{len(at.operands)} operands, expected {3 + hint} or {4 + hint}")
    if hint and last is not None:
        _wide(at, last, 8)


def _bulk(at: Instruction) -> None:
    hint, cast = "L2::cache_hint" in at.parts, "multicast::cluster" in at.parts
    loads = "mbarrier::complete_tx::bytes" in at.parts
    if loads == ("bulk_group" in at.parts):
        fail(at, "expected one way to tell that it is done: an mbarrier or .bulk_group")
    if cast and not {"shared::cluster", "global"} <= set(at.parts):
        fail(at, "a multicast goes from .global to .shared::cluster")
    expected = 2 + loads + ("tensor" not in at.parts) + cast + hint + ("cp_mask" in at.parts)
    if len(at.operands) != expected:
        fail(at, f"{len(at.operands)} operands, expected {expected}")


def _whole(at: Instruction) -> None:
    for operand in at.operands:
        if isinstance(operand, Immediate) and operand.value < 0:
            fail(at, f"{operand} groups, expected 0 or more")


def _nothing(at: Instruction) -> None:
    return


def _matches(pattern: re.Pattern[str]) -> Callable[[Instruction], None]:
    def rule(at: Instruction) -> None:
        if not pattern.fullmatch(at.opcode):
            fail(at, "these modifiers do not go together")

    return rule


def _shuffle(at: Instruction) -> None:
    for operand in at.operands[1:]:
        _wide(at, operand, 4)


def _match_any(at: Instruction) -> None:
    if isinstance(at.operands[0], Pair):
        fail(at, "expected one result")


def _setmaxnreg(at: Instruction) -> None:
    if not {"sync", "aligned"} <= set(at.parts):
        fail(at, "expected .sync.aligned")


def _sizes(at: Instruction, operand: Operand, size: int) -> None:
    """Registers of an operand, and of an address the one that it is formed from, have one size."""
    parts = operand.parts if isinstance(operand, Vector) else (operand,)
    for part in parts:
        _wide(at, part.base if isinstance(part, Address) else part, size)


def _tensor_address(at: Instruction, operand: Operand) -> None:
    """Tensor memory is addressed by registers of 32 bits."""
    if not isinstance(operand, Address) or not isinstance(operand.base, Register):
        fail(at, f"{operand}, expected an address of tensor memory in a register")
    _sizes(at, operand, 4)


def _whole_warp(at: Instruction) -> None:
    """What a warp does together says so."""
    for part in ("sync", "aligned"):
        if part not in at.parts:
            fail(at, f"expected .{part}")


def _tensor_columns(at: Instruction) -> None:
    _whole_warp(at)
    if not at.operands:
        return
    where, count = at.operands
    if not isinstance(where, Address):
        _sizes(at, where, 4)
    _sizes(at, count, 4)
    if isinstance(count, Immediate) and count.value not in (32, 64, 128, 256, 512):
        fail(at, f"{count} columns, expected a power of two from 32 to 512")


def _tensor_move(at: Instruction) -> None:
    _whole_warp(at)
    loads = at.parts[1] == "ld"
    _tensor_address(at, at.operands[1 if loads else 0])
    registers = at.operands[0 if loads else -1]
    if not isinstance(registers, Vector):
        fail(at, f"{registers}, expected registers in braces")
    found = [isinstance(part, Register) for part in registers.parts]
    if not (all(found) if loads else any(found)):
        fail(at, f"{registers}, expected registers")
    for i, part in enumerate(registers.parts if loads else ()):
        if part in registers.parts[:i]:
            fail(at, f"register {part} stands there twice")


def _tensor_copy(at: Instruction) -> None:
    _tensor_address(at, at.operands[0])
    _sizes(at, at.operands[1], 8)


def _tensor_commit(at: Instruction) -> None:
    if at.parts[-1] != "b64":
        fail(at, "expected .b64 at the end")
    for mask in at.operands[1:]:
        if not isinstance(mask, Register):
            fail(at, f"{mask}, expected a register of 16 bits")
        _sizes(at, mask, 2)


def _tensor_product(at: Instruction) -> None:
    d, a, b, descriptor, *rest = at.operands
    _tensor_address(at, d)
    if isinstance(a, Address):
        _tensor_address(at, a)
    else:
        _sizes(at, a, 8)
    _sizes(at, b, 8)
    _sizes(at, descriptor, 4)
    if isinstance(descriptor, Register) and descriptor.type == "f32":
        fail(at, f"register {descriptor.name} is declared .f32")
    for operand in rest:
        if isinstance(operand, Vector):
            _sizes(at, operand, 4)
        elif isinstance(operand, Address):
            _tensor_address(at, operand)
        elif isinstance(operand, Register) and operand.type != "pred":
            fail(at, f"register {operand.name} is declared .{operand.type}, expected .pred")
    if len([part for part in at.parts if part.startswith("collector::")]) > 1:
        fail(at, "expected one collector usage")


_RULES: dict[str, Callable[[Instruction], None]] = {
    **dict.fromkeys(("st.async", "red.async", "st.bulk", "bar.warp", "barrier.cluster"), _nothing),
    **dict.fromkeys(("ld", "st", "atom", "red"), _access),
    **dict.fromkeys(("fence", "membar"), _matches(_FENCE)),
    "shf": _matches(_SHF),
    **dict.fromkeys(("mbarrier.pending_count", "mbarrier.inval"), _nothing),
    "mbarrier": _mbarrier,
    **dict.fromkeys(("bar", "barrier"), _barrier),
    **dict.fromkeys(("cp.async.ca", "cp.async.cg"), _cp_async),
    **dict.fromkeys(("mma.sync.aligned", "ldmatrix.sync.aligned"), _nothing),
    **dict.fromkeys(("cp.async.bulk.wait_group", "cp.async.wait_group"), _whole),
    "wgmma.wait_group": _whole,
    **dict.fromkeys(("cp.async.bulk.commit_group", "cp.async.bulk.prefetch"), _nothing),
    **dict.fromkeys(("cp.async.bulk", "cp.reduce.async.bulk"), _bulk),
    "setmaxnreg": _setmaxnreg,
    "shfl.sync": _shuffle,
    "match.any": _match_any,
    **dict.fromkeys(("tcgen05.wait::ld", "tcgen05.wait::st"), _whole_warp),
    **dict.fromkeys(
        ("tcgen05.alloc", "tcgen05.dealloc", "tcgen05.relinquish_alloc_permit"), _tensor_columns
    ),
    **dict.fromkeys(("tcgen05.ld", "tcgen05.st"), _tensor_move),
    "tcgen05.cp": _tensor_copy,
    "tcgen05.commit": _tensor_commit,
    "tcgen05.mma": _tensor_product,
}
"""By the start of an opcode; the first that fits counts."""
