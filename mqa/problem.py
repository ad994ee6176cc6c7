"""What one call computes, without its data: frozen facts with a one-line form.

    dense fp8 S=512 N=8192 H=32 D=128 out=float32 seed=7 w_stride=100 kv_scale_off=4
    paged mxfp4 B=4 next_n=2 H=64 D=128 P=64 blocks=40 columns=9 L=576 lens=random
    dense bf16 S=64 N=4100 H=8 D=128 regime=exact

`str(problem)` and `parse` round-trip. A problem made from a real call says what its tensors look
like; the last group of fields (regime, windows or lens, seed) says how `mqa.testing.make_case`
draws data for it, so that a line in a failure report, in a corpus file or on the command line
replays the same bits everywhere.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Format: TypeAlias = Literal["fp8", "mxfp8", "mxfp4", "bf16"]
MX_FORMATS: tuple[Format, ...] = ("mxfp8", "mxfp4")
"""Those whose q and k have block scales."""
QUANTIZED_FORMATS: tuple[Format, ...] = ("fp8", *MX_FORMATS)
"""Those whose keys have scales."""
FORMATS: tuple[Format, ...] = (*QUANTIZED_FORMATS, "bf16")
WEIGHTS_DTYPES = ("float32", "bfloat16")
LOGITS_DTYPES = ("float32", "bfloat16", "float16")
MX_HEAD_DIMS = (32, 64, 96, 128)
"""Whole blocks of 32 elements, at most four: one int32 holds their scales."""
REGIMES = ("bounded", "exact")
WINDOWS = ("causal", "full", "random", "packed", "empty")
LENS = ("full", "random", "ramp", "zero")

Layout: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""Departures from contiguous, 16-byte-aligned tensors: (`<tensor>_stride`, strides in elements)
and (`<tensor>_off`, (address mod 16,)), sorted. Strides of trailing dimensions may be left out of
a line: those are contiguous."""


@dataclass(frozen=True, slots=True)
class DenseProblem:
    """`S` query tokens against `N` KV tokens; `M` is max_seqlen_k (0: full [S, N] result)."""

    format: Format
    S: int
    N: int
    H: int
    D: int
    M: int = 0
    weights: str = "float32"
    out: str = "float32"
    clean: bool = True
    sms: int = 0
    """SMs that a given schedule is for; 0: no schedule given."""
    layout: Layout = ()
    regime: str = "bounded"
    windows: str = "causal"
    seed: int = 0

    @property
    def rows(self) -> int:
        return self.S

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.M or self.N

    @property
    def compressed(self) -> bool:
        return self.M > 0

    def __str__(self) -> str:
        return _format("dense", self)


@dataclass(frozen=True, slots=True)
class PagedProblem:
    """`B` requests of `next_n` query tokens each over a cache of `blocks` pages of `P` tokens.

    `columns` is the width of the block table, `L` is max_context_len. With `varlen` the batch
    entries are single tokens that an `indices` tensor joins to requests.
    """

    format: Format
    B: int
    next_n: int
    H: int
    D: int
    P: int
    blocks: int
    columns: int
    L: int
    weights: str = "float32"
    out: str = "float32"
    clean: bool = False
    lens_rank: int = 2
    varlen: bool = False
    sms: int = 0
    layout: Layout = ()
    regime: str = "bounded"
    lens: str = "full"
    seed: int = 0

    @property
    def rows(self) -> int:
        return self.B * self.next_n

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.L

    @property
    def compressed(self) -> bool:
        return False

    def __str__(self) -> str:
        return _format("paged", self)


Problem: TypeAlias = DenseProblem | PagedProblem

_KINDS: dict[str, type[DenseProblem] | type[PagedProblem]] = {
    "dense": DenseProblem,
    "paged": PagedProblem,
}
_CHOICES: dict[str, tuple[object, ...]] = {
    "weights": WEIGHTS_DTYPES,
    "out": LOGITS_DTYPES,
    "regime": REGIMES,
    "windows": WINDOWS,
    "lens": LENS,
    "lens_rank": (1, 2),
}
_POSITIVE = ("H", "D", "P", "next_n")
TENSORS = {
    "dense": ("q", "q_scale", "kv", "kv_scale", "w", "start", "end", "out"),
    "paged": ("q", "q_scale", "cache", "w", "lens", "table", "indices", "out"),
}


def parse(line: str) -> Problem:
    """The problem that a one-line form names.

    Raises ValueError naming the first word that is unknown, repeated or out of range, or the
    fields that are missing.
    """
    words = line.split()
    if len(words) < 2 or words[0] not in _KINDS:
        raise ValueError(f"problem={line!r}, expected 'dense <format> ...' or 'paged <format> ...'")
    kind, fmt = words[:2]
    if fmt not in FORMATS:
        raise ValueError(f"problem: format={fmt!r}, expected one of {', '.join(FORMATS)}")
    fields = {f.name: f for f in dataclasses.fields(_KINDS[kind])}
    values: dict[str, Any] = {}
    layout: dict[str, tuple[int, ...]] = {}
    for word in words[2:]:
        name, equals, text = word.partition("=")
        if not equals or name in values or name in layout:
            raise ValueError(f"problem: {word!r}, expected name=value, each name once")
        if _is_layout(kind, name):
            layout[name] = tuple(_integer(name, part) for part in text.split("x"))
        elif name in fields and name not in ("format", "layout"):
            values[name] = _value(name, text, fields[name].type)
        else:
            raise ValueError(f"problem: unknown field {name!r} for {kind}; has {', '.join(fields)}")
    missing = [
        f.name
        for f in fields.values()
        if f.default is dataclasses.MISSING and f.name != "format" and f.name not in values
    ]
    if missing:
        raise ValueError(f"problem={line!r}: missing {', '.join(missing)}")
    problem = _KINDS[kind](format=fmt, layout=tuple(sorted(layout.items())), **values)
    _assert_possible(problem)
    return problem


def _format(kind: str, problem: Problem) -> str:
    words = [kind, problem.format]
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        if field.name in ("format", "layout") or value == field.default:
            continue
        words.append(f"{field.name}={int(value) if isinstance(value, bool) else value}")
    words += [f"{name}={'x'.join(map(str, numbers))}" for name, numbers in problem.layout]
    return " ".join(words)


def _assert_possible(problem: Problem) -> None:
    """Fields that exclude each other."""
    if problem.format in MX_FORMATS and problem.D not in MX_HEAD_DIMS:
        raise ValueError(f"problem: D={problem.D}, expected one of {MX_HEAD_DIMS} for MX formats")
    if isinstance(problem, PagedProblem) and problem.varlen and problem.next_n != 1:
        raise ValueError(f"problem: varlen=1 with next_n={problem.next_n}, expected next_n=1")


def _is_layout(kind: str, name: str) -> bool:
    tensor, _, aspect = name.rpartition("_")
    return aspect in ("stride", "off") and tensor in TENSORS[kind]


def _value(name: str, text: str, annotation: object) -> object:
    if annotation == "str":
        choices = _CHOICES[name]
        if text not in choices:
            raise ValueError(f"problem: {name}={text!r}, expected one of {choices}")
        return text
    number = _integer(name, text)
    if annotation == "bool":
        if number > 1:
            raise ValueError(f"problem: {name}={text!r}, expected 0 or 1")
        return bool(number)
    if name in _POSITIVE and number == 0:
        raise ValueError(f"problem: {name}=0, expected at least 1")
    if name in _CHOICES and number not in _CHOICES[name]:
        raise ValueError(f"problem: {name}={text!r}, expected one of {_CHOICES[name]}")
    return number


def _integer(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"problem: {name}={text!r}, expected a non-negative integer")
    return int(text)
