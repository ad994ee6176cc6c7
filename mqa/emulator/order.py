"""What happens before what in a cluster, and who used shared memory last.

A party is a warp or what works for it: an asynchronous engine, or a phase of an mbarrier, whose
number counts as its time. Each warp knows of every party how far it has seen it. Barriers carry
that knowledge from those that arrive to those that wait. Two uses of the same bytes, one of them a
write, have to be ordered so; otherwise they race, in whatever order they happened to run.

The threads of a warp count as one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mqa.emulator.floats import Array
from mqa.emulator.reports import Finding, Kind

Seen = dict[int, int]
"""How far each party was seen."""


class Use(NamedTuple):
    """That somebody used bytes, at a time of its own; `what` tells who and where."""

    party: int
    time: int
    what: str


def merge(into: Seen, other: Seen) -> None:
    """Know what `other` knows too."""
    for party, time in other.items():
        if time > into.get(party, 0):
            into[party] = time


class Order:
    """The parties of a cluster, and sets of uses by their numbers; number 0 is none."""

    def __init__(self) -> None:
        self.parties = 0
        self.uses: list[tuple[Use, ...]] = [()]
        self.combining: set[int] = set()
        """Sets of uses that combine what they bring with what is there."""
        self._places: dict[Any, Seen] = {}
        """Known to those who use a place by atomic or volatile operations."""

    def new_party(self) -> int:
        self.parties += 1
        return self.parties

    def number(self, *uses: Use) -> int:
        self.uses.append(uses)
        return len(self.uses) - 1

    def hear(self, view: View, places: list[Any]) -> None:
        """Atomic and volatile operations of one place come one after the other."""
        for place in dict.fromkeys(places):
            view.acquire(self._places.setdefault(place, {}))

    def tell(self, view: View, places: list[Any]) -> None:
        for place in dict.fromkeys(places):
            merge(self._places[place], view.seen)
        view.begin_anew()


class View:
    """What a party has seen. Its own time goes on with each release."""

    def __init__(self, order: Order) -> None:
        self.order, self.party, self.time = order, order.new_party(), 1
        self.seen: Seen = {self.party: 1}
        self._before: set[int] = {0}
        """Sets of uses that were found to come before."""
        self._joined: dict[tuple[int, Any], int] = {}

    def release(self, into: Seen) -> None:
        """Tell what this party did and saw."""
        merge(into, self.seen)
        self.begin_anew()

    def begin_anew(self) -> None:
        self.time += 1
        self.seen[self.party] = self.time
        self._joined.clear()

    def acquire(self, known: Seen) -> None:
        merge(self.seen, known)

    def saw(self, party: int, time: int) -> None:
        if time > self.seen.get(party, 0):
            self.seen[party] = time

    def unordered(self, numbers: Array) -> Use | None:
        """A use in one of these sets that does not come before what this party does now."""
        first = int(numbers.flat[0]) if numbers.size else 0
        if first in self._before and np.count_nonzero(numbers != first) == 0:
            return None
        for number in set(numbers.ravel().tolist()):
            use = self.later(number)
            if use is not None:
                return use
        return None

    def later(self, number: int) -> Use | None:
        """A use in that set that does not come before what this party does now."""
        if number not in self._before:
            for use in self.order.uses[number]:
                if self.seen.get(use.party, 0) < use.time:
                    return use
            self._before.add(number)
        return None

    def joined(self, number: int, what: Callable[[], str], key: int) -> int:
        """The set with a use by this party now, at instruction `key`, less those before it."""
        found = self._joined.get((number, key))
        if found is None:
            others = self.order.uses[number]
            if any(use.party == self.party and use.time == self.time for use in others):
                found = number
            else:
                mine = Use(self.party, self.time, what())
                found = self.order.number(*self._later(others), mine)
            self._joined[number, key] = found
        return found

    def with_use(self, number: int, use: Use) -> int:
        """The set with a use by somebody who works for this party."""
        others = self._later(self.order.uses[number])
        return self.order.number(*(other for other in others if other.party != use.party), use)

    def _later(self, uses: tuple[Use, ...]) -> list[Use]:
        return [use for use in uses if self.seen.get(use.party, 0) < use.time]


class Users:
    """Of each few bytes of a shared memory: the last write, and the reads since."""

    def __init__(self, size: int, grain: int, named: Callable[[int], str]) -> None:
        self.grain, self._named = grain, named
        self.writes = np.zeros(size // grain, np.uint32)
        self.reads = np.zeros(size // grain, np.uint32)

    def of_words(self, words: Any) -> Any:
        """Index of the bytes of 4-byte words, given as a slice or as numbers."""
        parts = 4 // self.grain
        if parts == 1:
            return words
        if isinstance(words, slice):
            return slice(words.start * parts, words.stop * parts)
        return (words[:, None] * parts + np.arange(parts)).ravel()

    def of_accesses(self, offsets: Array, size: int) -> Array:
        """Index of the bytes of aligned accesses."""
        parts = size // self.grain
        first = offsets // self.grain
        return first if parts == 1 else (first[:, None] + np.arange(parts)).ravel()

    def read(self, index: Any, view: View, number_of: Callable[[int], int], what: str) -> None:
        """Somebody reads; `number_of` gives the set of readers with it."""
        self._check(self.writes, index, view, f"read {what}", "written by")
        old = self.reads[index]
        if not old.size:
            return
        first = int(old.flat[0])
        if np.count_nonzero(old != first) == 0:
            new = number_of(first)
            if new != first:
                self.reads[index] = new
            return
        fresh = old.copy()
        for number in set(old.ravel().tolist()):
            fresh[old == number] = number_of(number)
        self.reads[index] = fresh

    def write(self, index: Any, view: View, number: int, what: str) -> None:
        """Somebody writes, which is the use of that number."""
        self._check(self.writes, index, view, f"written {what}", "written by")
        self._check(self.reads, index, view, f"written {what}", "read by")
        self.writes[index] = number
        self.reads[index] = 0

    def left(self, seen: Seen, own: set[int], order: Order) -> Use | None:
        """A use by others than these parties that was not seen."""
        for number in {*self.writes.tolist(), *self.reads.tolist()}:
            for use in order.uses[number]:
                if use.party not in own and seen.get(use.party, 0) < use.time:
                    return use
        return None

    def combine(self, index: Any, view: View, use: Use, what: str) -> None:
        """Somebody changes what is there, as others may at the same time."""
        combining = view.order.combining
        old = self.writes[index]
        plain = ~np.isin(old, list(combining))
        places = np.arange(len(self.writes))[index].ravel()
        self._check(self.writes, places[plain.ravel()], view, f"written {what}", "written by")
        self._check(self.reads, index, view, f"written {what}", "read by")
        fresh = old.copy()
        for number in set(old.ravel().tolist()):
            others = view.order.uses[number] if number in combining else ()
            fresh[old == number] = new = view.order.number(*others, use)
            combining.add(new)
        self.writes[index] = fresh
        self.reads[index] = 0

    def _check(self, numbers: Array, index: Any, view: View, what: str, before: str) -> None:
        used = numbers[index]
        use = view.unordered(used)
        if use is None:
            return
        places = np.arange(len(numbers))[index].ravel()
        bad = [place for place in places if use in view.order.uses[numbers[place]]]
        raise Finding(
            Kind.RACE,
            f"{self._named(int(min(bad)) * self.grain)} is {what}, and nothing orders that after "
            f"it was {before} {use.what}",
        )
