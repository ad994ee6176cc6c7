"""Memory: allocations of the host as global memory, and shared, local, parameter and constant.

Every byte belongs to a buffer with exact bounds. Shared memory also keeps, for each byte, whether
it was written and which warp wrote it last without a proxy fence after, for each 4 bytes how many
asynchronous operations read and write them now, and who used it last (`mqa.emulator.order`).
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mqa.emulator.order import Use, Users, View
from mqa.emulator.reports import Finding, Kind

if TYPE_CHECKING:
    from mqa.emulator.warp import Warp

Array = npt.NDArray[Any]

SHARED_START = 1024
"""First address of a CTA's shared memory: with 0 a forgotten base would pass."""
RANK_SHIFT = 24
"""A CTA's rank in its cluster stands in these bits of a shared address and above."""
_FIRST_RANK = 2
"""What stands there for rank 0, so that a rank's parity is bit 24, as on hardware; 0 is one's own
CTA, of whatever rank."""
PARAM_START = 256
CONST_START = 1 << 20
WINDOWS = {
    "global": 0,
    "shared": 1 << 60,
    "local": 2 << 60,
    "param": 3 << 60,
    "const": 4 << 60,
}
"""Where the address spaces begin in generic addresses; hosts give none that large."""
POISON = 0xFF
"""NaN in every float format."""


def rank_of(address: int) -> int | None:
    """Rank in its cluster of the CTA that a shared address names; None for one's own."""
    code = address >> RANK_SHIFT
    return code - _FIRST_RANK if code else None


def ranked(rank: Any, address: Any) -> Any:
    """The shared address of the same place in the CTA of that rank, for numbers and arrays."""
    return rank + _FIRST_RANK << RANK_SHIFT | address & (1 << RANK_SHIFT) - 1


class Buffer:
    """Bytes [start, end) of an address space, seen as arrays of any element size."""

    def __init__(self, name: str, data: Array, start: int, end: int, origin: int) -> None:
        self.name, self.start, self.end, self.origin = name, start, end, origin
        self.data = data
        self._views = {
            size: data[: len(data) // size * size].view(f"u{size}") for size in (1, 2, 4, 8)
        }
        self.allowed: Array | None = None
        """Where a tensor has gaps: which bytes are its own."""

    def view(self, size: int) -> Array:
        """Element i begins at address origin + i * size."""
        return self._views[size]

    def check(self, addresses: Array, size: int, what: str) -> None:
        """Raise a finding unless all accesses of `size` bytes are aligned and inside."""
        if np.count_nonzero(addresses & (size - 1)):
            bad = int(addresses[(addresses & (size - 1)) != 0][0])
            raise Finding(Kind.MISALIGNED, f"{what} of {size} bytes at {bad:#x}, in {self.name}")
        low, high = int(addresses.min()), int(addresses.max())
        if low < self.start or high + size > self.end:
            bad = low if low < self.start else high
            raise Finding(Kind.OUT_OF_BOUNDS, f"{what} of {size} bytes at {self._relative(bad)}")
        if self.allowed is not None:
            for byte in range(size):
                inside = self.allowed[addresses - self.start + byte]
                if not inside.all():
                    bad = int(addresses[~inside][0])
                    raise Finding(
                        Kind.OUT_OF_BOUNDS,
                        f"{what} of {size} bytes between rows, {self._relative(bad)}",
                    )

    def owns(self, address: int) -> bool:
        """Whether that byte is one of the buffer's own."""
        inside = self.start <= address < self.end
        return inside and (self.allowed is None or bool(self.allowed[address - self.start]))

    def _relative(self, address: int) -> str:
        size = self.end - self.start
        return f"byte {address - self.start} of {self.name}, which has {size}"


def words_of(chunks: Array) -> Array:
    """Index of the 4-byte words of 16-byte chunks, in their order; offsets in bytes."""
    return ((chunks.ravel() >> 2)[:, None] + np.arange(4)).ravel()


def host_buffer(name: str, address: int, size: int) -> Buffer:
    """Memory of the host in place. It has to outlive the buffer."""
    origin = address & -16
    length = (address + size - origin + 15) // 16 * 16
    raw = (ctypes.c_uint8 * length).from_address(origin)
    return Buffer(name, np.ctypeslib.as_array(raw), address, address + size, origin)


def own_buffer(name: str, size: int, start: int) -> Buffer:
    """Memory of the emulator's own, poisoned."""
    data = np.full((size + 15) // 16 * 16, POISON, np.uint8)
    return Buffer(name, data, start, start + size, start)


class Global:
    """All that a kernel may reach through global addresses."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._starts: list[int] = []
        self._last: Buffer | None = None

    def add(self, name: str, address: int, size: int, allowed: Array | None = None) -> None:
        """Allow accesses to `size` bytes. The same memory may be added under several names."""
        buffer = host_buffer(name, address, size)
        buffer.allowed = allowed
        self.add_buffer(buffer)

    def add_buffer(self, buffer: Buffer) -> None:
        place = bisect.bisect(self._starts, buffer.start)
        self._starts.insert(place, buffer.start)
        self._buffers.insert(place, buffer)

    def find(self, address: int) -> Buffer:
        """The allocation that an address belongs to."""
        last = self._last
        if last is not None and last.owns(address):
            return last
        before = gap = None
        for buffer in self._buffers[: bisect.bisect(self._starts, address)]:
            if buffer.owns(address):
                self._last = buffer
                return buffer
            if address < buffer.end:
                gap = gap or buffer  # rows of another tensor may lie in it
            before = buffer
        if gap is not None:
            return gap
        where = "no allocation is near"
        if before is not None:
            where = f"{address - before.end} bytes past the end of {before.name}"
        raise Finding(Kind.OUT_OF_BOUNDS, f"global address {address:#x}: {where}")

    def range(self, address: int, size: int, what: str) -> Array:
        """Bytes of a copy, all in one allocation."""
        buffer = self.find(address)
        buffer.check(np.array([address]), 1, what)
        buffer.check(np.array([address + size - 1]), 1, what)
        if buffer.allowed is not None and not buffer.allowed[address - buffer.start :][:size].all():
            raise Finding(Kind.OUT_OF_BOUNDS, f"{what} covers bytes between rows of {buffer.name}")
        first = address - buffer.origin
        return buffer.data[first : first + size]


@dataclass(frozen=True, slots=True)
class Checks:
    """What is reported, of all that a kernel could go on after."""

    any: bool = True
    """Without, the kernel goes on as it mostly would on hardware."""
    order: bool = True
    """Whether accesses are looked at that nothing orders, whenever they happen."""
    ignored: frozenset[Kind] = frozenset()
    """What alone is not reported."""

    def look_for(self, kind: Kind) -> bool:
        return self.any and kind not in self.ignored


class Shared(Buffer):
    """Shared memory of a CTA.

    `names` are those of its parts, by their first address, in order. `grain` is the size of the
    smallest accesses that a kernel makes.
    """

    def __init__(
        self,
        size: int,
        checks: Checks,
        grain: int = 4,
        names: Sequence[tuple[int, str]] = (),
    ) -> None:
        size = (size + 15) // 16 * 16
        self.checks = checks
        self._names = names
        self.users = Users(size, grain, self._relative_offset) if checks.order else None
        data = np.full(size, POISON, np.uint8)
        super().__init__("shared memory", data, SHARED_START, SHARED_START + size, SHARED_START)
        self.written = Buffer("", np.zeros(size, np.uint8), 0, size, 0)
        self.dirty = Buffer("", np.zeros(size, np.uint8), 0, size, 0)
        self.reading = np.zeros(size // 4, np.int16)
        self.writing = np.zeros(size // 4, np.int16)
        self.combining = np.zeros(size // 4, np.int16)
        """Of the writing ones, those that others may combine with."""
        self.in_flight: list[tuple[Any, bool, str]] = []
        """Of each asynchronous operation: its words, whether it writes, and what it is."""
        self._dirty_pages: dict[int, set[int]] = {}

    def load(self, addresses: Array, size: int, count: int, by: Warp) -> list[Array]:
        """`count` consecutive elements from each address.

        Bytes never written read as poison: compilers load early what they may not use at all.
        """
        self.check(addresses, size * count, "load")
        offsets = addresses - self.start
        first = offsets // size
        view = self._views[size]
        if self.in_flight and self.checks.any:
            self._no_race(self.writing, addresses, "read while it is written", size * count)
        if self.users is not None and by.view is not None:
            key, joined = by.current.pc, by.view.joined
            self.users.read(
                self.users.of_accesses(offsets, size * count),
                by.view,
                lambda number: joined(number, by.where, key),
                "by a load",
            )
        by.unwritten = self.unwritten(addresses, size * count) if self.checks.any else None
        return [view[first + i] for i in range(count)]

    def unwritten(self, addresses: Array, size: int) -> Array | None:
        """Which of these aligned accesses meet bytes that were never written; None if none does."""
        first = (addresses - self.start) // size
        if size <= 8:
            bad: Array = self.written.view(size)[first] != (1 << 8 * size) - 1
        else:
            bad = self.written.view(8).reshape(-1, size // 8)[first] != (1 << 64) - 1
        if not np.count_nonzero(bad):
            return None
        return bad if size <= 8 else np.any(bad, axis=1)

    def spoil(self, addresses: Array, size: int) -> None:
        """What was stored there came from bytes that were never written."""
        self.written.data[(addresses - self.start)[:, None] + np.arange(size)] = 0

    def store(self, addresses: Array, size: int, values: list[Array], by: Warp) -> None:
        """Ordinary stores of consecutive elements, by lanes of one warp."""
        self.check(addresses, size * len(values), "store")
        warp = by.index
        if self.users is not None and by.view is not None:
            self.users.write(
                self.users.of_accesses(addresses - self.start, size * len(values)),
                by.view,
                by.view.joined(0, by.where, by.current.pc),
                "by a store",
            )
        if self.in_flight and self.checks.any:
            what = "written by a store while it is"
            self._no_race(self.writing, addresses, f"{what} written", size * len(values))
            self._no_race(self.reading, addresses, f"{what} read", size * len(values))
        first = (addresses - self.start) // size
        view, written, dirty = self._views[size], self.written.view(size), self.dirty.view(size)
        mark = int.from_bytes(bytes([warp + 1]) * size, "little")
        for i, value in enumerate(values):
            view[first + i] = value
            written[first + i] = (1 << 8 * size) - 1
            dirty[first + i] = mark
        pages = self._dirty_pages.setdefault(warp + 1, set())
        low, high = int(first.min()) * size, int(first.max()) * size
        pages.update(range(low >> 12, (high >> 12) + 1))

    def _no_race(self, users: Array, addresses: Array, what: str, size: int) -> None:
        first, last = addresses - self.start, addresses - self.start + size - 1
        busy = users[first >> 2] + users[(first + last) >> 3] + users[last >> 2]
        if np.count_nonzero(busy):
            bad = int(addresses[busy != 0][0])
            user = self._user_of((bad - self.start) >> 2)
            raise Finding(Kind.RACE, f"{self._relative(bad)} is {what} by {user}")

    def fence(self, warp: int) -> None:
        """A proxy fence: what the warp wrote, or others wrote and told, may be read by engines."""
        for mark in (warp + 1, _TOLD):
            self._remark(mark, 0)

    def tell(self, warp: int) -> None:
        """The warp arrived at a barrier: a fence of another one covers its writes too."""
        pages = self._dirty_pages.get(warp + 1)
        if pages:
            self._dirty_pages.setdefault(_TOLD, set()).update(pages)
            self._remark(warp + 1, _TOLD)

    def _remark(self, old: int, new: int) -> None:
        for page in self._dirty_pages.pop(old, ()):
            part = self.dirty.data[page << 12 : (page + 1) << 12]
            part[part == old] = new

    def acquire(
        self,
        words: Any,
        user: str,
        *,
        writes: bool,
        proxy: bool = True,
        poison: bool = False,
        combines: bool = False,
    ) -> None:
        """The asynchronous operation `user` will read or write these 4-byte words.

        `proxy`: it does so by the asynchronous proxy. `poison`: it may read what was never written,
        as products do whose columns nobody uses. `combines`: it changes what is there, and others
        that do may come in between.
        """
        if self.checks.any:
            self._no_clash(words, user, writes=writes, combines=combines)
        if proxy and self.checks.look_for(Kind.PROXY_FENCE):
            self._fenced(words, writes=writes)
        if (combines or not writes) and not poison and self.checks.any:
            written = self.written.view(4)
            if np.count_nonzero(written[words] != 0xFFFFFFFF):
                raise Finding(Kind.UNWRITTEN, self._first(words, written != 0xFFFFFFFF))
        users = self.writing if writes else self.reading
        users[words] += 1
        self.combining[words] += combines
        self.in_flight.append((words, writes, user))

    def order(self, words: Any, view: View | None, party: int, time: int, user: str) -> None:
        """Asynchronous reads of these words come after what `view` saw, and end by that time."""
        if self.users is not None and view is not None:
            use = Use(party, time, user)
            index = self.users.of_words(words)
            self.users.read(index, view, lambda number: view.with_use(number, use), f"by {user}")

    def order_write(self, words: Any, view: View | None, party: int, time: int, user: str) -> None:
        """The same for writes."""
        if self.users is not None and view is not None:
            number = view.order.number(Use(party, time, user))
            self.users.write(self.users.of_words(words), view, number, f"by {user}")

    def order_change(self, words: Any, view: View | None, party: int, time: int, user: str) -> None:
        """The same for those that combine what they bring with what is there."""
        if self.users is not None and view is not None:
            self.users.combine(
                self.users.of_words(words), view, Use(party, time, user), f"by {user}"
            )

    def release(self, words: Any, *, writes: bool, combines: bool = False) -> None:
        users = self.writing if writes else self.reading
        users[words] -= 1
        self.combining[words] -= combines
        self.in_flight = [one for one in self.in_flight if one[0] is not words]
        if writes:
            self.written.view(4)[words] = 0xFFFFFFFF

    def soil(self, words: Any, warp: int) -> None:
        """An asynchronous copy of the ordinary proxy wrote these words."""
        self.dirty.view(4)[words] = (warp + 1) * 0x01010101
        pages = np.unique(words >> 10).tolist()
        self._dirty_pages.setdefault(warp + 1, set()).update(pages)

    def _no_clash(self, words: Any, user: str, *, writes: bool, combines: bool) -> None:
        """Raise a finding unless an asynchronous operation may use these words now."""
        if not self.in_flight:
            return
        busy = self.writing + self.reading if writes else self.writing
        busy = busy - self.combining if combines else busy
        if np.count_nonzero(busy[words]):
            places = np.arange(len(busy))[words].ravel()
            place = int(places[busy[places] != 0][0])
            raise Finding(
                Kind.RACE,
                f"{self._first(words, busy)} is {'written' if writes else 'read'} by {user}, and "
                f"in flight is {self._user_of(place)}",
            )

    def _user_of(self, place: int) -> str:
        """Operations in flight that use a word."""
        found = []
        for words, writes, user in self.in_flight:
            if place in np.arange(len(self.reading))[words]:
                found.append(f"{user}, which {'writes' if writes else 'reads'} it")
        return "; ".join(dict.fromkeys(found))

    def _fenced(self, words: Any, *, writes: bool) -> None:
        dirty = self.dirty.view(4)
        if np.count_nonzero(dirty[words]):
            where = self._first(words, dirty)
            raise Finding(Kind.PROXY_FENCE, f"{where} is {'written' if writes else 'read'}")

    def _first(self, words: Any, marks: Array) -> str:
        places = np.arange(len(marks))[words].ravel()
        place = int(places[marks[places] != 0][0])
        return self._relative_offset(4 * place)

    def _relative_offset(self, offset: int) -> str:
        return self._relative(self.start + offset)

    def _relative(self, address: int) -> str:
        name = self.name_of(address)
        if not name:
            return super()._relative(address)
        return f"{name} (byte {address - self.start} of shared memory)"

    def told(self, address: int) -> str:
        """An address as reports tell it."""
        return self._relative(address)

    def name_of(self, address: int) -> str:
        """The part that an address lies in, and how far; empty where parts have no names."""
        place = bisect.bisect(self._names, address, key=lambda part: part[0]) - 1
        if place < 0:
            return ""
        start, name = self._names[place]
        return f"{name} + {address - start}" if address > start else name

    def words(self, address: int, size: int) -> slice:
        """Index of the words of a range, for asynchronous operations."""
        self.check(np.array([address]), 1, "asynchronous access")
        self.check(np.array([address + size - 1]), 1, "asynchronous access")
        first = (address - self.start) // 4
        return slice(first, first + size // 4)


_TOLD = 0xFE
