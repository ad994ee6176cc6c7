"""What the rows of the GPU suites are made of: parties, comparisons, limits, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from mqa.cli.gpu.windows import Batch, Windows
from mqa.cuda.operands import ELEMENTS, row_bytes, scale_bytes
from mqa.problem import Format

PEER = "peer"
MQA = "mqa"
GROUPS = {
    "main": "against the peer, causal windows, uncleaned",
    "variants": "ours against ours",
    "few rows": "few query rows against the peer, uncleaned",
    "cleaning": "cleaning where most entries lie outside the windows",
    "ragged": "uneven windows with a schedule, against the even case",
    "sizes": "other heads and head dims, against H=64 D=128",
    "metadata": "the schedule, against a kernel that writes one number",
    "paged": "paged, against the peer, FP8, H=64 D=128, pages of 64, uncleaned",
    "paged rows": "paged, ours against ours, FP8, H=64 D=128",
    "paged formats": "MX formats against FP8, both ours, H=64 D=128",
    "paged metadata": "the paged schedule, against a kernel that writes one number",
    "paged empty": "paged calls of 32768 requests with nothing to do, against the same kernel",
}
"""Tables of the Hopper suite, in order."""
BLACKWELL_GROUPS = {
    "complete": "complete calls, cleaned, beside what others report",
    "compressed": "FP8, compressed against full, both ours, beside what others report",
    "formats": "MX formats against FP8, both ours, beside what others report of FP8",
    "cleaning": "cleaning where most entries lie outside the windows",
    "variants": "ours against ours, dense calls of 2048×32768",
    "sizes": "other heads and head dims, against H=64 D=128 of the same format",
    "schedules": "schedules, against a kernel that writes one number",
    "peer": "against the peer, uncleaned, H=64 D=128",
}
PORTABLE_GROUPS = {
    "portable dense": "portable kernels against Hopper's own, causal windows, uncleaned",
    "portable paged": "the same, paged, H=64 D=128, pages of 64, uncleaned",
    "portable fallback": "portable kernels against the reference, plain PyTorch on the same GPU",
}
GROUPS_OF = {"hopper": GROUPS, "blackwell": BLACKWELL_GROUPS, "portable": PORTABLE_GROUPS}

ScheduleKind = Literal["", "fresh", "stale", "reversed", "random"]
"""Cut points: none, those of the call, of other lens, its own in reverse, any in its range."""


@dataclass(frozen=True)
class Call:
    """Options of a call. One over a `Batch` is paged, and never compressed."""

    clean: bool = False
    compressed: bool = False
    logits: str = "float32"
    weights: str = "float32"
    schedule: ScheduleKind = ""
    format: Format = "fp8"
    by: str = ""
    """Name of our backend that computes it; none: the best one that can."""


@dataclass(frozen=True, eq=False)
class Party:
    """One side of a comparison; `who` is PEER or MQA, `label` what a table calls it."""

    who: str
    label: str
    windows: Windows
    H: int
    D: int
    call: Call

    @property
    def kv_bytes(self) -> int:
        """Values and scales of the KV tokens."""
        elements = ELEMENTS[self.call.format]
        return self.windows.tokens * (row_bytes(elements, self.D) + scale_bytes(elements))

    def variant(self) -> dict[str, Any]:
        """What a kernel is picked by, as `mqa.supports` and `mqa.warmup` take it."""
        return {
            "num_heads": self.H,
            "head_dim": self.D,
            "format": self.call.format,
            "page_size": self.windows.page if isinstance(self.windows, Batch) else None,
            "weights_dtype": getattr(torch, self.call.weights),
            "logits_dtype": getattr(torch, self.call.logits),
            "clean": self.call.clean,
            "compressed": self.call.compressed,
        }


@dataclass(frozen=True)
class Limit:
    """What a ratio has to be; it holds if the whole interval is on the right side."""

    sense: Literal["at_least", "at_most"]
    value: float


@dataclass(frozen=True)
class Reported:
    """What somebody else measured of a row's shape: for orientation, not a party."""

    seconds: float
    who: str
    """GPU and, where it is known, library."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Ratio = time of `other` over time of `ours`."""

    group: str
    name: str
    other: Party
    ours: Party
    limit: Limit | None = None
    after_kernel: bool = False
    """Whether a small kernel, which triggers no dependents, runs just before each timed replay."""
    reported: Reported | None = None
    rounds: int = 0
    """Pairs; 0: as many as the suite's other rows."""

    @property
    def parties(self) -> tuple[Party, ...]:
        return self.other, self.ours


@dataclass(frozen=True, eq=False)
class Alone:
    """A call for its own time, which has to be `at_most` seconds."""

    group: str
    name: str
    ours: Party
    at_most: float

    @property
    def parties(self) -> tuple[Party, ...]:
        return (self.ours,)


@dataclass(frozen=True, eq=False)
class Metadata:
    """The schedule of calls over these windows, dense or paged; `varlen` joins rows to requests.

    What it takes beyond the shortest kernel has to be `at_most` seconds, if given.
    """

    group: str
    name: str
    windows: Windows
    H: int
    varlen: bool = False
    at_most: float | None = None
    reported: Reported | None = None

    @property
    def parties(self) -> tuple[Party, ...]:
        return ()


Row = Comparison | Alone | Metadata
