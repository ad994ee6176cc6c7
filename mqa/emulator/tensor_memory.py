"""Tensor memory of a CTA: who owns which columns, what cells hold, and who used them last.

A cell has 32 bits; poison at the start and after each allocation. Uses are kept for 16 lanes of a
column at a time, the smallest part that an instruction takes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mqa.emulator.floats import Array
from mqa.emulator.machine import Operation
from mqa.emulator.order import Use
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.tensor_layouts import COLUMNS, LANES, QUARTER
from mqa.emulator.tensor_order import Issuer, Piece
from mqa.emulator.wgmma import Whole

if TYPE_CHECKING:
    from mqa.emulator.machine import Cta

POISON = np.uint32(0xFFFFFFFF)
HALF = 16
"""Lanes of a part."""
HALVES = LANES // HALF
ALL_LANES = (1 << HALVES) - 1
LEAST_COLUMNS = 32
_NEVER = 1
"""Number of the origin of cells that were never written."""


class Region(NamedTuple):
    """Cells that an instruction uses."""

    halves: int
    """Mask of half quarters of the lanes, equally far from each other."""
    first: int
    end: int
    """Columns [first, end)."""

    def meets(self, other: Region) -> bool:
        columns = self.first < other.end and other.first < self.end
        return columns and self.halves & other.halves != 0

    @property
    def parts(self) -> tuple[slice, slice]:
        """Index of an array [half quarters, columns]."""
        return _slice(self.halves), slice(self.first, self.end)

    def __str__(self) -> str:
        lanes = ", ".join(f"{low}-{high}" for low, high in _runs(self.halves))
        one = self.end - self.first == 1
        columns = f"column {self.first}" if one else f"columns {self.first}-{self.end - 1}"
        return f"lanes {lanes}, {columns} of tensor memory"


@functools.cache
def _slice(mask: int) -> slice:
    bits = [i for i in range(HALVES) if mask >> i & 1]
    step = bits[1] - bits[0] if len(bits) > 1 else 1
    return slice(bits[0], bits[-1] + 1, step)


def _runs(mask: int) -> list[tuple[int, int]]:
    """First and last lane of each run of a mask of half quarters."""
    runs: list[tuple[int, int]] = []
    for i in range(HALVES):
        if mask >> i & 1:
            if runs and runs[-1][1] == i * HALF - 1:
                runs[-1] = runs[-1][0], (i + 1) * HALF - 1
            else:
                runs.append((i * HALF, (i + 1) * HALF - 1))
    return runs


def place_of(address: int) -> tuple[int, int]:
    """Lane and column that an address names."""
    return address >> 16, address & 0xFFFF


class TensorOperation(Operation):
    """Something asynchronous that uses tensor memory."""

    def __init__(self, name: str, issuer: Issuer, piece: Piece) -> None:
        super().__init__(name, self.compute)
        self.issuer, self.piece = issuer, piece
        self.told = issuer.warp.where()
        self.party = 0
        self.regions: list[tuple[TensorMemory, Region, bool]] = []
        self._numbers: dict[int, int] = {}

    def compute(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """It uses tensor memory no more."""
        for memory, region, writes in self.regions:
            memory.release(self, region, writes=writes)

    def takes(self, memory: TensorMemory, region: Region, *, writes: bool) -> None:
        """It will use these cells."""
        memory.acquire(self, region, writes=writes)
        self.regions.append((memory, region, writes))
        if not self.place:
            self.place = str(region)

    def order(self) -> None:
        """Look whether its uses come after those of others. It has its time."""
        for memory, region, writes in self.regions:
            memory.order(self, region, writes=writes)
        for memory, region, writes in self.regions:
            memory.record(self, region, writes=writes)

    def number(self, before: int) -> int:
        """The set of uses with this one, less those before it; `before` is 0 for a write."""
        if before not in self._numbers:
            view = self.issuer.view
            assert view is not None
            use = Use(self.party, self.time, self.told)
            self._numbers[before] = view.with_use(before, use)
        return self._numbers[before]


class TensorMemory:
    """128 lanes of 512 columns, and what is allocated of them."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.cells = np.full((LANES, COLUMNS), POISON, np.uint32)
        self.spoiled = np.full((LANES, COLUMNS), _NEVER, np.uint16)
        """Number of the origin of what came from bytes that were never written, 0 for others."""
        self.origins = ["", ""]
        self.allocations: dict[int, int] = {}
        """Columns of each, by the first."""
        self.live = np.zeros(COLUMNS, bool)
        self.most = COLUMNS
        """Columns that an allocation may have: as many as the one before."""
        self.relinquished = False
        self.asked: dict[int, int] = {}
        """Of allocations of a pair that the other CTA did not come to yet: columns by warp."""
        self.granted: dict[int, int] = {}
        """Of those that it came to: first columns."""
        self.writes = np.zeros((HALVES, COLUMNS), np.uint32)
        self.reads = np.zeros((HALVES, COLUMNS), np.uint32)
        """Sets of uses: the last write, and the reads since."""
        self.in_flight: list[tuple[Region, bool, TensorOperation]] = []
        self.pipe: list[TensorOperation] = []
        """Products and copies to tensor memory that are not done."""
        self.wholes: dict[tuple[int, ...], tuple[Region, Whole]] = {}
        """Of accumulators whose sums are known to have few bits."""

    @property
    def _checked(self) -> bool:
        return self.cta.machine.checks.any

    def told(self, region: Region) -> str:
        return f"{region} of CTA {self.cta.index}"

    def allocate(self, first: int, columns: int) -> None:
        region = Region(ALL_LANES, first, first + columns)
        self.allocations[first] = columns
        self.live[first : region.end] = True
        self.cells[:, first : region.end] = POISON
        self.spoiled[:, first : region.end] = _NEVER
        self.writes[region.parts] = self.reads[region.parts] = 0
        self.changed(region)
        self.most = columns

    def may_allocate(self, columns: int) -> None:
        """Raise a finding unless the CTA may ask for so many columns now."""
        if columns & (columns - 1) or not LEAST_COLUMNS <= columns <= COLUMNS:
            raise Finding(
                Kind.TENSOR_MEMORY,
                f"{columns} columns, expected a power of two from {LEAST_COLUMNS} to {COLUMNS}",
            )
        if self.relinquished and self._checked:
            raise Finding(
                Kind.TENSOR_MEMORY,
                f"CTA {self.cta.index} allocates after tcgen05.relinquish_alloc_permit",
            )
        if columns > self.most and self._checked:
            raise Finding(
                Kind.TENSOR_MEMORY,
                f"{columns} columns, more than the {self.most} of the allocation before",
            )

    def free(self, address: int, columns: int, issuer: Issuer) -> None:
        lane, first = place_of(address)
        have = self.allocations.get(first) if lane == 0 else None
        if have != columns:
            owned = ", ".join(f"{at:#x} of {size} columns" for at, size in self.allocations.items())
            raise Finding(
                Kind.TENSOR_MEMORY,
                f"{columns} columns from {address:#x} are freed, which CTA {self.cta.index} did "
                f"not allocate so (it has {owned or 'none'})",
            )
        region = Region(ALL_LANES, first, first + columns)
        for other, _, user in self.in_flight:
            if region.meets(other) and self._checked:
                raise Finding(Kind.RACE, f"{self.told(other)}: freed, and in flight is {user}")
        self._check_free(region, issuer)
        del self.allocations[first]
        self.live[first : region.end] = False

    def _check_free(self, region: Region, issuer: Issuer) -> None:
        """Raise a finding unless all uses come before. Fences are not asked for: who frees uses
        nothing."""
        for uses, done in ((self.writes, "written"), (self.reads, "read")):
            for use in self._uses(uses, region, issuer):
                if not issuer.known(use):
                    where = self._where(uses, region, use, issuer)
                    raise Finding(
                        Kind.RACE,
                        f"{where} is freed, and nothing orders that after it was {done} by "
                        f"{use.what}",
                    )

    def leave(self) -> None:
        """The CTA ends."""
        if self.allocations and self._checked:
            owned = ", ".join(
                str(Region(ALL_LANES, first, first + size))
                for first, size in self.allocations.items()
            )
            raise Finding(Kind.TENSOR_MEMORY, f"CTA {self.cta.index} ends and did not free {owned}")

    def check(self, region: Region, what: str) -> None:
        """Raise a finding unless the columns are there, and allocated."""
        if region.first < 0 or region.end > COLUMNS:
            raise Finding(Kind.TENSOR_MEMORY, f"{what} uses {region}, which has {COLUMNS} columns")
        if self._checked and not self.live[region.first : region.end].all():
            free = region.first + int(np.argmin(self.live[region.first : region.end]))
            raise Finding(
                Kind.TENSOR_MEMORY,
                f"{what} uses {self.told(region)}, whose column {free} is not allocated",
            )

    def acquire(self, user: TensorOperation, region: Region, *, writes: bool) -> None:
        """Raise a finding unless an operation may use these cells while others are in flight."""
        self.check(region, user.name)
        if user.issuer.view is None and self._checked:
            pipe = self.cta.machine.tensor_pipe
            for other, also, flying in self.in_flight:
                busy = region.meets(other) and (writes or also)
                if busy and not user.piece.follows(flying.piece, pipe):
                    raise Finding(
                        Kind.RACE,
                        f"{self.told(other)} is {'written' if writes else 'read'} by {user.told}, "
                        f"and in flight is {flying.told}",
                    )
        self.in_flight.append((region, writes, user))

    def release(self, user: TensorOperation, region: Region, *, writes: bool) -> None:
        self.in_flight = [one for one in self.in_flight if one[2] is not user]

    def changed(self, region: Region, *, but: tuple[int, ...] = ()) -> None:
        """Cells are written; `but` names the accumulator that keeps what is known of it."""
        if self.wholes:
            self.wholes = {
                key: known
                for key, known in self.wholes.items()
                if key == but or not known[0].meets(region)
            }

    def _uses(self, uses: Array, region: Region, issuer: Issuer) -> list[Use]:
        if issuer.ledger is None:
            return []
        part = uses[region.parts]
        first = int(part.flat[0])
        numbers = [first] if np.count_nonzero(part != first) == 0 else np.unique(part).tolist()
        known = issuer.ledger.order.uses
        return [use for number in numbers for use in known[number]]

    def order(self, user: TensorOperation, region: Region, *, writes: bool) -> None:
        """Raise a finding unless an operation's use comes after those of others."""
        before = ([(self.reads, "read")] if writes else []) + [(self.writes, "written")]
        for uses, done in before:
            for use in self._uses(uses, region, user.issuer):
                kind = user.issuer.judge(use, user.piece, user.party)
                if kind is not None:
                    where = self._where(uses, region, use, user.issuer)
                    does = "written" if writes else "read"
                    why = "nothing orders that"
                    if kind is Kind.TENSOR_FENCE:
                        why = f"{_missing(use, user.issuer)} to order that"
                    raise Finding(
                        kind,
                        f"{where} is {does} by {user.told}, and {why} after it was {done} by "
                        f"{use.what}",
                    )

    def record(self, user: TensorOperation, region: Region, *, writes: bool) -> None:
        if user.issuer.view is None:
            return
        if writes:
            self.writes[region.parts] = user.number(0)
            self.reads[region.parts] = 0
            return
        old = self.reads[region.parts]
        fresh = old.copy()
        for number in np.unique(old).tolist():
            fresh[old == number] = user.number(number)
        self.reads[region.parts] = fresh

    def _where(self, uses: Array, region: Region, use: Use, issuer: Issuer) -> str:
        """The part of a region that has that use."""
        assert issuer.ledger is not None
        part, known = uses[region.parts], issuer.ledger.order.uses
        bad = [number for number in np.unique(part).tolist() if use in known[number]]
        rows, columns = np.nonzero(np.isin(part, bad))
        halves = np.arange(HALVES)[region.parts[0]][np.unique(rows)]
        mask = int(np.bitwise_or.reduce(1 << halves))
        found = Region(
            mask, region.first + int(columns.min()), region.first + int(columns.max()) + 1
        )
        return self.told(found)

    def spoil(self, lanes: Array, columns: Array, origin: str) -> None:
        """What is there came from what was never written."""
        if origin not in self.origins:
            self.origins.append(origin)
        self.spoiled[lanes, columns] = self.origins.index(origin)

    def origin(self, lane: int, column: int) -> str:
        """Where what a spoiled cell holds came from."""
        number = int(self.spoiled[lane, column])
        here = f"lane {lane}, column {column} of tensor memory of CTA {self.cta.index}"
        return here if number == _NEVER else self.origins[number]


def _missing(use: Use, issuer: Issuer) -> str:
    """Which fence is not there."""
    ordinary = issuer.warp.view
    if ordinary is not None and ordinary.seen.get(use.party, 0) >= use.time:
        return "no tcgen05.fence::after_thread_sync came"
    if issuer.ledger is not None and use.party in issuer.ledger.waited:
        return "no tcgen05.fence::before_thread_sync came there"
    return "no tcgen05.fence::after_thread_sync came"


def quarter_of(warp: int) -> int:
    """First of the lanes that a warp reaches by loads and stores."""
    return warp % 4 * QUARTER


def tensor_memory(cta: Cta) -> TensorMemory:
    if cta.tensor is None:
        cta.tensor = TensorMemory(cta)
    found: TensorMemory = cta.tensor
    return found
