"""Which forms of an instruction are legal: types, sizes of registers, operands, modifiers.

Checked before an instruction is bound, so that one that is malformed is an error that names it, and
is never executed as something else.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from mqa.emulator.alu import fail, storage
from mqa.emulator.device import DEVICES, number_of
from mqa.emulator.parser import (
    BYTES,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
)

_SIGNED = {"s16", "s32", "s64"}
_WHOLE = _SIGNED | {"u16", "u32", "u64"}
_HALVES = {"f16", "bf16", "f16x2", "bf16x2"}
_FLOATS = {"f32", "f64"}
_BITS = {"b16", "b32", "b64"}
_SHORTS = {"u16x2", "s16x2"}
_TYPES: dict[str, set[str]] = {
    "add": _WHOLE | _FLOATS | _HALVES | _SHORTS | {"f32x2"},
    **dict.fromkeys(("sub", "mul"), _WHOLE | _FLOATS | _HALVES | {"f32x2"}),
    **dict.fromkeys(("max", "min"), _WHOLE | _FLOATS | _HALVES | _SHORTS),
    **dict.fromkeys(("mad", "rem"), _WHOLE),
    "fma": _FLOATS | _HALVES | {"f32x2"},
    **dict.fromkeys(("rcp", "sqrt", "rsqrt", "copysign", "testp"), _FLOATS),
    "lg2": {"f32"},
    "sin": {"f32"},
    "cos": {"f32"},
    "ex2": {"f32"} | _HALVES,
    "tanh": {"f32"} | _HALVES,
    "sad": _WHOLE,
    **dict.fromkeys(("div",), _WHOLE | _FLOATS),
    **dict.fromkeys(("abs", "neg"), _SIGNED | _FLOATS | _HALVES),
    **dict.fromkeys(("and", "or", "xor", "not"), _BITS | {"pred"}),
    "shl": _BITS,
    "shr": _BITS | _WHOLE,
    "setp": _BITS | _WHOLE | _FLOATS | _HALVES,
    "selp": _BITS | _WHOLE | _FLOATS,
    **dict.fromkeys(("popc", "clz", "brev", "bfi"), _BITS - {"b16"}),
    **dict.fromkeys(("bfind", "bfe"), _WHOLE - {"u16", "s16"}),
    **dict.fromkeys(("prmt", "lop3", "shf"), _BITS - {"b16", "b64"}),
    "cvta": {"u64"},
    "mov": _BITS | _WHOLE | _FLOATS | {"pred"},
}
_SHAPES = {
    **dict.fromkeys(("add", "sub", "mul", "max", "min", "div", "rem", "and", "or", "xor"), "ttt"),
    **dict.fromkeys(("abs", "neg", "not", "brev", "cvta", "mov"), "tt"),
    **dict.fromkeys(("mad", "fma", "prmt", "sad"), "tttt"),
    **dict.fromkeys(("rcp", "sqrt", "rsqrt", "lg2", "sin", "cos", "ex2", "tanh"), "tt"),
    "copysign": "ttt",
    "testp": "pt",
    **dict.fromkeys(("shl", "shr"), "ttu"),
    **dict.fromkeys(("popc", "clz", "bfind"), "ut"),
    "setp": "ptt",
    "selp": "tttp",
    "bfi": "tttuu",
    "bfe": "ttuu",
    "lop3": "ttttu",
    "shf": "tttu",
}
"""Operands: t of the instruction's type, w twice as wide, u of 32 bits, h of 16, p a predicate."""
_ROUNDINGS = {"rn", "rz", "rm", "rp"}
_INEXACT = {"f32": ("approx", "full"), "f64": ()}
"""Divisions that the ISA lets differ from the nearest value."""
_MIXED = {"add": "tht", "sub": "tht", "fma": "thht"}
"""Sums of float32 with terms or factors of another type, which stands last."""
_WIDE = {"mul": "wtt", "mad": "wttw"}
_ORDERED = {"lt", "le", "gt", "ge"}
_WITH_NAN = {"equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"}
_SPACES = {"shared", "shared::cta", "shared::cluster"}
_SCOPES = {"cta", "cluster", "gpu", "sys"}
_MBARRIER = _SPACES | _SCOPES | {"b64", "acquire", "release", "relaxed"}
_HINT = {"L2::cache_hint"}
_ANY = range(16)
_BARRIERS = ("bar", "barrier", "bar.cta", "barrier.cta")
_RULES: dict[str, tuple[Iterable[int], set[str] | None]] = {
    "ld": ((2, 3), None),
    "st": ((2, 3), None),
    "atom": ((3, 4, 5), None),
    "red": ((2, 3), None),
    "st.async": ((3,), None),
    "st.bulk": ((3,), None),
    "red.async": ((3,), None),
    "prefetch": ((1,), {"global", "local", "L1", "L2", "tensormap", "param", "const"}),
    "prefetchu": ((1,), {"L1"}),
    "discard": ((2,), {"global", "L2"}),
    "applypriority": ((2,), {"global", "L2::evict_normal"}),
    "mapa": ((3,), {"shared::cluster", "u32", "u64"}),
    "getctarank": ((2,), {"shared::cluster", "u32", "u64"}),
    "dp4a": ((4,), None),
    "dp2a": ((4,), None),
    "vabsdiff4": ((4,), None),
    "fns": ((4,), {"b32"}),
    "isspacep": ((2,), {"global", "local", "const", "param", "shared", *_SPACES}),
    "match.any.sync": ((3,), {"b32", "b64"}),
    "match.all.sync": ((3,), {"b32", "b64"}),
    "trap": ((0,), set()),
    "brkpt": ((0,), set()),
    "call": (_ANY, {"uni"}),
    "mbarrier.init": ((2,), _MBARRIER - {"acquire", "release", "relaxed"}),
    "mbarrier.inval": ((1,), _MBARRIER - {"acquire", "release", "relaxed"}),
    "mbarrier.arrive": ((2, 3), _MBARRIER | {"expect_tx", "noComplete"}),
    "mbarrier.arrive_drop": ((2, 3), _MBARRIER | {"expect_tx", "noComplete"}),
    "mbarrier.pending_count": ((2,), {"b64"}),
    "mbarrier.expect_tx": ((2,), _MBARRIER),
    "mbarrier.complete_tx": ((2,), _MBARRIER),
    "mbarrier.try_wait": ((3, 4), _MBARRIER | {"parity"}),
    "mbarrier.test_wait": ((3,), _MBARRIER | {"parity"}),
    **{f"{name}.sync": ((1, 2), {"aligned"}) for name in _BARRIERS},
    **{f"{name}.arrive": ((2,), {"aligned"}) for name in _BARRIERS},
    **{
        f"{name}.red": ((3, 4), {"aligned", "popc", "and", "or", "u32", "pred"})
        for name in _BARRIERS
    },
    "bar.warp.sync": ((1,), set()),
    "barrier.cluster.arrive": ((0,), {"aligned", "release", "relaxed"}),
    "barrier.cluster.wait": ((0,), {"aligned", "acquire"}),
    "fence": (
        (0,),
        {"sc", "acq_rel", "acquire", "release", *_SCOPES, "mbarrier_init", "proxy", "alias"}
        | {"async", "async::generic", "global", *_SPACES}
        | {"sync_restrict::shared::cta", "sync_restrict::shared::cluster"},
    ),
    "membar": ((0,), {"cta", "gl", "sys"}),
    "griddepcontrol": ((0,), None),
    "nanosleep": ((1,), {"u32"}),
    "setmaxnreg": ((1,), {"inc", "dec", "sync", "aligned", "u32"}),
    "elect.sync": ((2,), set()),
    "shfl.sync": ((5,), {"up", "down", "bfly", "idx", "b32"}),
    "vote.sync": ((3,), {"any", "all", "uni", "ballot", "pred", "b32"}),
    "activemask": ((1,), {"b32"}),
    "redux.sync": ((3,), None),
    "wgmma.mma_async.sync.aligned": (range(4, 9), None),
    "wgmma.fence.sync.aligned": ((0,), set()),
    "wgmma.commit_group.sync.aligned": ((0,), set()),
    "wgmma.wait_group.sync.aligned": ((1,), set()),
    "tcgen05.alloc": (
        (2,),
        {"cta_group::1", "cta_group::2", "sync", "aligned", "shared::cta", "b32"},
    ),
    "tcgen05.dealloc": ((2,), {"cta_group::1", "cta_group::2", "sync", "aligned", "b32"}),
    "tcgen05.relinquish_alloc_permit": (
        (0,),
        {"cta_group::1", "cta_group::2", "sync", "aligned"},
    ),
    "tcgen05.mma": (range(5, 9), None),
    "tcgen05.cp": ((2,), None),
    "tcgen05.ld": ((2, 3), None),
    "tcgen05.st": ((2, 3), None),
    "tcgen05.wait::ld": ((0,), {"sync", "aligned"}),
    "tcgen05.wait::st": ((0,), {"sync", "aligned"}),
    "tcgen05.fence::before_thread_sync": ((0,), set()),
    "tcgen05.fence::after_thread_sync": ((0,), set()),
    "tcgen05.commit": ((1, 2), None),
    "mma.sync.aligned": ((4,), None),
    "ldmatrix.sync.aligned": ((2,), None),
    "cp.async.ca": ((3, 4, 5), None),
    "cp.async.cg": ((3, 4, 5), None),
    "cp.async.mbarrier.arrive": ((1,), {"noinc", "b64", *_SPACES}),
    "cp.async.commit_group": ((0,), set()),
    "cp.async.wait_group": ((1,), set()),
    "cp.async.wait_all": ((0,), set()),
    "cp.async.bulk": (range(3, 7), None),
    "cp.async.bulk.tensor": (range(2, 6), None),
    "cp.async.bulk.commit_group": ((0,), set()),
    "cp.async.bulk.wait_group": ((1,), {"read"}),
    "cp.async.bulk.prefetch": (
        (1, 2, 3),
        {"L2", "global", "tensor", "tile", *(f"{rank}d" for rank in range(1, 6))} | _HINT,
    ),
    "cp.reduce.async.bulk": ((3, 4), None),
    "cp.reduce.async.bulk.tensor": ((2, 3), None),
    "bra": ((1,), {"uni"}),
    "brx": ((2,), {"idx", "uni"}),
    "ret": ((0,), {"uni"}),
    "exit": ((0,), set()),
}
"""How many operands there are, and all modifiers that may stand behind the name; None where the
instruction's own binder looks at them."""


def check(at: Instruction, key: str) -> None:
    """Raise PtxError unless the instruction, which is known as `key`, has a legal form."""
    if key in _RULES:
        counts, known = _RULES[key]
        if len(at.operands) not in counts:
            fail(at, f"{len(at.operands)} operands, expected {_listed(counts)}")
        for modifier in at.opcode[len(key) :].split(".")[1:]:
            if known is not None and modifier not in known:
                fail(at, f"modifier .{modifier} is not modelled")
    elif key == "cvt":
        _check_conversion(at)
    elif key == "set":
        _check_set(at)
    elif key == "createpolicy":
        if len(at.operands) not in (1, 2) or at.parts[-1] != "b64" or len(at.parts) < 4:
            fail(at, "expected a form, .b64, a result and perhaps a fraction")
    else:
        _check_arithmetic(at, key)


class Need(NamedTuple):
    """What a target has to be for forms of an opcode."""

    form: str
    """Regular expression of what stands behind the opcode's first word."""
    target: str
    operands: int | None = None
    """Where their number tells the form."""


EIGHTY_SIX, EIGHTY_NINE, NINETY, LATER = (f"sm_{n} or later" for n in (86, 89, 90, 100))
FAMILY = "sm_100a, sm_100f or later"
NEEDS: dict[str, tuple[Need, ...]] = {
    "wgmma": (Need("", "sm_90a"),),
    "setmaxnreg": (Need("", f"sm_90a, {FAMILY}"),),
    "tcgen05": (
        Need(r".*kind::i8", "sm_100a"),
        Need(r".*(scale_vec|shift)", "sm_100a, sm_103a"),
        Need("", FAMILY),
    ),
    **dict.fromkeys(
        ("add", "sub"),
        (
            Need(r".*f32x2", LATER),
            Need(r".*f32\.b?f16", LATER),
            Need(r".*(bf16|[su]16x2)", NINETY),
        ),
    ),
    "mul": (Need(r".*f32x2", LATER), Need(r".*bf16", NINETY)),
    "fma": (Need(r".*f32x2", LATER), Need(r".*f32\.b?f16", LATER)),
    **dict.fromkeys(
        ("max", "min"),
        (
            Need(r".*f32", LATER, 4),
            Need(r".*([su]16x2|relu)", NINETY),
            Need(r".*(xorsign|abs)", EIGHTY_SIX),
        ),
    ),
    **dict.fromkeys(("set", "setp", "ex2", "tanh"), (Need(r".*bf16", NINETY),)),
    "cvt": (
        Need(r".*(e2m1|e2m3|e3m2|ue8m0)x2", FAMILY),
        Need(r".*r[nz]\..*satfinite\.tf32", LATER),
        Need(r".*r[nz]\..*tf32", NINETY),
        Need(r".*\.bf16\.(?!f32)", NINETY),
        Need(r".*\.(?!f32\.)\w+\.bf16\Z", NINETY),
        Need(r".*(e4m3|e5m2)x2", EIGHTY_NINE),
    ),
    "redux": (Need(r".*f32", FAMILY),),
    "ld": (
        Need(r".*(v8\.|v4\.[busf]64)", LATER),
        Need(r".*L2::evict_", LATER),
        Need(r".*cluster", NINETY),
    ),
    "st": (
        Need(r".*(v8\.|v4\.[busf]64)", LATER),
        Need(r".*L2::evict_", LATER),
        Need(r"\.bulk", LATER),
        Need(r".*cluster", NINETY),
    ),
    **dict.fromkeys(("atom", "red"), (Need(r".*(cluster|bf16|\.v[248]\.)", NINETY),)),
    "mbarrier": (
        Need(r".*(try_wait|expect_tx|complete_tx|relaxed|cluster)", NINETY),
        Need(r"\.arrive(?!.*noComplete)", NINETY, 3),
    ),
    "cp": (
        Need(r".*cp_mask", LATER),
        Need(r".*cta_group::", FAMILY),
        Need(r"\.(async\.bulk|reduce)", NINETY),
    ),
    "fence": (Need(r".*(async|cluster|mbarrier_init)", NINETY),),
    **dict.fromkeys(("barrier", "isspacep"), (Need(r".*cluster", NINETY),)),
    "prefetch": (Need(r".*tensormap", NINETY),),
    **dict.fromkeys(("mapa", "getctarank", "elect", "griddepcontrol"), (Need("", NINETY),)),
}
"""By the first word of the opcode; others are those of every target from sm_80 on."""
TARGETS = (
    *(f"sm_{number}" for number in DEVICES),
    "sm_90a",
    *(f"sm_{number}{suffix}" for number in (100, 103) for suffix in "af"),
)
_CLUSTER_REGISTERS = ("%cluster", "%ncluster", "%is_explicit_cluster")


@functools.cache
def families(target: str) -> frozenset[str]:
    """What a module's target has of the targets that `NEEDS` names; "sm_80" for each that is
    modelled, and nothing for others."""
    if target not in TARGETS:
        return frozenset()
    number, suffix = number_of(target), target[-1] if target[-1] in "af" else ""
    found = {f"sm_{n} or later" for n in (86, 89, 90, 100) if n <= number} | {"sm_80"}
    if number == 90 and suffix:
        found |= {"sm_90a", f"sm_90a, {FAMILY}"}
    elif suffix:
        found |= {FAMILY, f"sm_90a, {FAMILY}"}
        found |= {"sm_100a, sm_103a", target} if suffix == "a" else set()
    return frozenset(found)


def check_target(at: Instruction, target: str) -> None:
    """Raise PtxError if the instruction is none of the module's target."""
    known = families(target)
    for need in NEEDS.get(at.parts[0], ()):
        if need.operands not in (None, len(at.operands)):
            continue
        rest = at.opcode[len(at.parts[0]) :]
        if need.target not in known and re.match(need.form, rest):
            fail(at, f"needs {need.target}, .target is {target}")
    if NINETY in known:
        return
    for operand in at.operands:
        if isinstance(operand, Symbol) and operand.name.startswith(_CLUSTER_REGISTERS):
            fail(at, f"{operand.name} needs {NINETY}, .target is {target}")


def _listed(counts: Iterable[int]) -> str:
    return " or ".join(map(str, counts))


def _check_arithmetic(at: Instruction, key: str) -> None:
    """One type decides what operands have to be."""
    _, *rest = at.parts
    kind = rest.pop() if rest else ""
    if kind not in _TYPES[key]:
        fail(at, f"type .{kind} is not modelled" if kind else "expected a type")
    if key in _MIXED and rest[-1:] == ["f32"] and kind in ("f16", "bf16"):
        kind, shape = str(rest.pop()), _MIXED[key]
    else:
        shape = _WIDE[key] if "wide" in rest else _SHAPES[key]
    _check_mode(at, key, rest, kind)
    if key == "setp" and {"and", "or", "xor"} & set(rest):
        shape += "p"
    if key in ("max", "min") and kind == "f32" and len(at.operands) == 4:
        shape += "t"
    if len(at.operands) != len(shape):
        fail(at, f"{len(at.operands)} operands, expected {len(shape)}")
    for operand in at.operands if "wide" not in rest else ():
        _check_class(at, operand, kind)
    size = BYTES[kind]
    sizes = {"t": size, "w": 2 * size, "u": 4, "h": 2, "p": 0}
    for operand, letter in zip(at.operands, shape, strict=True):
        wanted = 0 if letter == "t" and kind == "pred" else sizes[letter]
        for part in (operand.first, operand.second) if isinstance(operand, Pair) else (operand,):
            _check_size(at, part, wanted)


def _check_set(at: Instruction) -> None:
    """A comparison's result as a value: of 32 bits, or as wide as the halves compared."""
    if len(at.parts) < 4:
        fail(at, "expected a comparison and two types")
    to, kind = at.parts[-2:]
    halves = {"u32", "s32", "f32", kind} if kind in _HALVES else {"u32", "s32", "f32"}
    if kind in ("f16", "bf16"):
        halves |= {"u16", "s16"}
    if to not in halves or kind not in _TYPES["setp"]:
        fail(at, f"types .{to}.{kind} are not modelled")
    if kind.endswith("x2") and to == "f32":
        fail(at, f"types .{to}.{kind} are not modelled")
    rest = list(at.parts[1:-2])
    _check_mode(at, "setp", rest, kind)
    joins = [x for x in rest[1:] if x != "ftz"]
    if len(joins) > 1 or not {"and", "or", "xor"}.issuperset(joins):
        fail(at, f"modifiers {joins} are not modelled")
    if len(at.operands) != 3 + len(joins):
        fail(at, f"{len(at.operands)} operands, expected {3 + len(joins)}")
    sizes = (BYTES[to], BYTES[kind], BYTES[kind], 0)
    for operand, size in zip(at.operands, sizes, strict=False):
        _check_size(at, operand, size)


def _check_mode(at: Instruction, key: str, rest: list[str], kind: str) -> None:
    whole = kind in _WHOLE
    if key in ("mul", "mad") and whole != bool({"lo", "hi", "wide"} & set(rest)):
        fail(at, f"expected {'one' if whole else 'none'} of .lo, .hi and .wide")
    if "NaN" in rest and kind not in _HALVES | {"f32"}:
        fail(at, f".NaN is no modifier of .{kind}")
    if key == "fma" and not _ROUNDINGS & set(rest):
        fail(at, "expected how to round")
    if key == "div" and kind in _FLOATS and not {*_ROUNDINGS, *_INEXACT[kind]} & set(rest):
        fail(at, "expected how to round")
    if key in ("rcp", "sqrt") and not {*_ROUNDINGS, "approx"} & set(rest):
        fail(at, "expected how to round")
    if key in ("rsqrt", "lg2", "sin", "cos") and "approx" not in rest:
        fail(at, "expected .approx")
    relu = rest == ["relu"] and kind in ("s32", "s16x2")
    if key in ("max", "min") and kind in _WHOLE | _SHORTS and rest and not relu:
        fail(at, f"modifier .{rest[0]} is not modelled")
    if key in ("add", "sub", "div") and (whole or kind in _SHORTS) and rest:
        fail(at, f"modifier .{rest[0]} is not modelled")
    if key == "setp":
        name = rest[0] if rest else "(none)"
        legal = {"eq", "ne"}
        if kind not in _BITS:
            legal = legal | _ORDERED
        if kind[0] == "u":
            legal = legal | {"lo", "ls", "hi", "hs"}
        if kind in _FLOATS | _HALVES:
            legal = legal | _WITH_NAN
        if name not in legal:
            fail(at, f"comparison .{name} of .{kind} is not modelled")


def _check_class(at: Instruction, operand: Operand, kind: str) -> None:
    """Floats and whole numbers do not stand for each other, unless the type is of bits alone."""
    given = operand.type if isinstance(operand, Register) else ""
    number = isinstance(operand, Immediate)
    of_floats = bool(isinstance(operand, Immediate) and operand.float_bits)
    if kind in _WHOLE and (given in _FLOATS or of_floats):
        fail(at, f"operand {operand} is a float, and the type is .{kind}")
    if kind in _FLOATS and at.parts[0] != "setp" and number and not of_floats:
        fail(at, f"operand {operand} is no float, and the type is .{kind}")


def _check_size(at: Instruction, operand: Operand, size: int) -> None:
    """Registers have the size of the type, 0 for predicates."""
    register = operand.register if isinstance(operand, Negated) else operand
    if not isinstance(register, Register):
        if isinstance(register, Symbol) and register.name.startswith("%") and size == 0:
            fail(at, f"{register.name} is no predicate")
        return
    have = 0 if register.type == "pred" else storage(register.type).itemsize
    if have != size:
        wanted = f"{8 * size} bits" if size else "a predicate"
        fail(at, f"register {register.name} is declared .{register.type}, expected {wanted}")


def _check_conversion(at: Instruction) -> None:
    """Registers of a conversion may be wider than its types."""
    if len(at.parts) < 3:
        fail(at, "expected two types")
    *_, to, source = at.parts
    pairs = {f"{name}x2": 2 for name in ("e4m3", "e5m2", "e2m3", "e3m2", "ue8m0")}
    pairs |= {"e2m1x2": 1, "f16x2": 4, "bf16x2": 4}
    count = 3 if to.endswith("x2") and source == "f32" else 2
    if len(at.operands) != count:
        fail(at, f"{len(at.operands)} operands, expected {count}")
    for operand, kind in zip(at.operands, (to, source, source), strict=False):
        size = pairs.get(kind) or BYTES.get(kind)
        if isinstance(operand, Register) and size is not None:
            have = 0 if operand.type == "pred" else storage(operand.type).itemsize
            if have < size:
                fail(at, f"register {operand.name} is declared .{operand.type}, too narrow")
