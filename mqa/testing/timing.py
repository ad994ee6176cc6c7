"""Comparing two implementations' speed so that drift, throttling and order cancel out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Work = Callable[[], object]
Timer = Callable[[Work], float]
"""Runs the work once and returns how long it took, in seconds."""


@dataclass(frozen=True)
class Ratio:
    """Time of `a` over time of `b`: below 1, `a` is faster."""

    median: float
    low: float
    """5 % of the pairs have a smaller ratio."""
    high: float
    """5 % of the pairs have a larger one."""
    a_seconds: float
    """Median time of `a`."""
    b_seconds: float
    rounds: int

    def __str__(self) -> str:
        return (
            f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}] "
            f"({self.a_seconds * 1e6:.1f} / {self.b_seconds * 1e6:.1f} us, {self.rounds} pairs)"
        )


def wall_clock(work: Work) -> float:
    """Seconds of one call, by `time.perf_counter`. A timer for CPU work."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def interleaved(
    a: Work,
    b: Work,
    *,
    rounds: int = 40,
    before: Work | None = None,
    timer: Timer = wall_clock,
) -> Ratio:
    """Time `a` and `b` alternately, `rounds` pairs in one process; the ratio is taken pair by pair.

    The order changes from pair to pair, and each pair starts with an untimed run of the one that
    goes first. `before` runs, untimed, ahead of every timed run (say, to rotate inputs or flush a
    cache). `timer` measures one run; a timer for a GPU would replay a captured graph between two
    events. Raises ValueError unless rounds >= 1; what `a` or `b` raises passes through.
    """
    if rounds < 1:
        raise ValueError(f"interleaved: rounds={rounds}, expected at least 1")
    seconds = np.empty((rounds, 2))
    for pair in range(rounds):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        (a, b)[order[0]]()
        for party in order:
            if before is not None:
                before()
            seconds[pair, party] = timer((a, b)[party])
    low, median, high = np.percentile(seconds[:, 0] / seconds[:, 1], (5, 50, 95))
    a_seconds, b_seconds = np.median(seconds, axis=0)
    return Ratio(float(median), float(low), float(high), float(a_seconds), float(b_seconds), rounds)
