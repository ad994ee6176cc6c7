"""The problems that `mqa check --suite` runs: drawn, but the same on every machine."""

from __future__ import annotations

import dataclasses
import random

from mqa.problem import (
    FORMATS,
    LENS,
    LOGITS_DTYPES,
    REGIMES,
    WEIGHTS_DTYPES,
    WINDOWS,
    DenseProblem,
    Format,
    PagedProblem,
    Problem,
)

SUITES = {"smoke": 2, "ci": 16, "all": 100}
"""Name, and how many dense and how many paged problems it has of each format and regime."""

_HEADS = (1, 2, 8, 16, 32, 64, 128)
_HEAD_DIMS = (32, 64, 96, 128)
_PAGES = (1, 16, 31, 32, 64)
_NEXT_N = (1, 1, 2, 3, 5)


def suite(name: str) -> list[Problem]:
    """The problems of a suite; a longer suite begins each kind with those of a shorter one.

    Raises KeyError for an unknown name.
    """
    problems: list[Problem] = []
    for fmt in FORMATS:
        for regime in REGIMES:
            count = range(SUITES[name])
            problems += [_dense(fmt, regime, number) for number in count]
            problems += [_paged(fmt, regime, number) for number in count]
    return problems


def _dense(fmt: Format, regime: str, number: int) -> DenseProblem:
    """Number 0 is the shape that engines run; the others vary everything."""
    if number == 0:
        return DenseProblem(fmt, S=8, N=260, H=64, D=128, regime=regime)
    draw = random.Random(f"dense {fmt} {regime} {number}")
    keys = draw.choice((1, 3, 130, 257, 513, draw.randint(4, 700)))
    return DenseProblem(
        fmt,
        S=draw.randint(1, 17),
        N=keys,
        H=draw.choice(_HEADS),
        D=draw.choice(_HEAD_DIMS),
        M=draw.choice((0, 0, draw.randint(1, keys + 5))),
        weights=draw.choice(WEIGHTS_DTYPES),
        out=draw.choice(LOGITS_DTYPES),
        clean=draw.random() < 0.8,
        sms=draw.choice((0, 1, 132)),
        regime=regime,
        windows=draw.choice(WINDOWS[:-1] if number % 8 else WINDOWS[-1:]),
        seed=number,
    )


def _paged(fmt: Format, regime: str, number: int) -> PagedProblem:
    if number == 0:
        plain = PagedProblem(fmt, B=2, next_n=2, H=64, D=128, P=64, blocks=8, columns=4, L=256)
        return dataclasses.replace(plain, clean=True, regime=regime)
    draw = random.Random(f"paged {fmt} {regime} {number}")
    page, varlen = draw.choice(_PAGES), draw.random() < 0.25
    columns = draw.randint(1, max(1, 400 // page))
    batch = draw.randint(1, 9 if varlen else 4)
    return PagedProblem(
        fmt,
        B=batch,
        next_n=1 if varlen else draw.choice(_NEXT_N),
        H=draw.choice(_HEADS),
        D=draw.choice(_HEAD_DIMS),
        P=page,
        blocks=draw.randint(columns, batch * columns + 3),
        columns=columns,
        L=columns * page + draw.choice((0, 0, -1, 7)),
        weights=draw.choice(WEIGHTS_DTYPES),
        out=draw.choice(LOGITS_DTYPES),
        clean=draw.random() < 0.7,
        lens_rank=draw.choice((1, 2)),
        varlen=varlen,
        sms=draw.choice((0, 1, 132)),
        regime=regime,
        lens=draw.choice(LENS[:-1] if number % 8 else LENS[-1:]),
        seed=number,
    )
