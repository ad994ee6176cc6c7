"""What the instructions of tensor memory may count on: how far a warp's have seen others.

A thread's products and copies to tensor memory work for it as a party of `mqa.emulator.order` whose
time is their number; so do a warp's loads and its stores. What a barrier tells counts for
instructions of tensor memory only after `tcgen05.fence::after_thread_sync`. A load or store that
was waited for is told to others only after `tcgen05.fence::before_thread_sync`; so is that products
and copies were issued, which suffices for those that the tensor pipe keeps in order by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from mqa.emulator.machine import Operation
from mqa.emulator.order import Order, Seen, Use, View, merge
from mqa.emulator.reports import Kind

if TYPE_CHECKING:
    from mqa.emulator.warp import Warp

TensorPipe = Literal["isa", "in-order"]
TENSOR_PIPES: tuple[TensorPipe, ...] = ("isa", "in-order")
PIPED = ("mma", "cp")
"""What goes through the tensor pipe of a CTA, or of a pair of them."""


class Piece(NamedTuple):
    """What tells whether the tensor pipe keeps an operation behind another one."""

    what: str
    """mma, cp, ld or st."""
    accumulator: tuple[int, ...] = ()
    """Of a product: place and shape."""

    def follows(self, first: Piece, pipe: TensorPipe) -> bool:
        """Whether this one is done only after `first`, which was issued before."""
        if self.what not in PIPED or first.what not in PIPED:
            return False
        if pipe == "in-order" or (first.what, self.what) == ("cp", "mma"):
            return True
        return first == self and self.what == "mma"


class Ledger:
    """Of a cluster: what its parties are for."""

    def __init__(self, order: Order, pipe: TensorPipe) -> None:
        self.order, self.pipe = order, pipe
        self.pieces: dict[tuple[int, int], Piece] = {}
        """Products and copies by their party and time."""
        self.issued: dict[int, int] = {}
        """By the party of a thread's products and copies: that of their being issued."""
        self.waited: dict[int, int] = {}
        """By the party of a warp's loads, or stores: that of their being waited for."""
        self.behind: dict[int, Seen] = {}
        """By the party of a thread's products and copies: those of others that are done before."""


class Flow:
    """Loads, or stores, of a warp, or products and copies of a thread."""

    def __init__(self, ledger: Ledger | None, also: dict[int, int] | None) -> None:
        self.time = 0
        self.open: list[Operation] = []
        """Those that nobody waited for yet."""
        self.party = self.other = 0
        if ledger is not None and also is not None:
            self.party, self.other = ledger.order.new_party(), ledger.order.new_party()
            also[self.party] = self.other


class Issuer:
    """What a warp's instructions of tensor memory have seen, and which are under way."""

    def __init__(self, warp: Warp) -> None:
        self.warp, machine = warp, warp.cta.machine
        self.ledger = ledger_of(warp)
        self.view = View(self.ledger.order) if self.ledger is not None else None
        self.strict = machine.checks.look_for(Kind.TENSOR_FENCE)
        waited = self.ledger.waited if self.ledger is not None else None
        self.loads, self.stores = Flow(self.ledger, waited), Flow(self.ledger, waited)
        self.waited = {"ld": 0, "st": 0}
        """Times of the last load and store that the warp waited for."""
        self._pipes: dict[int, Flow] = {}
        self.handed: Seen = {}
        """What fences before a barrier told: relaxed arrivals pass it on too."""

    def pipe(self, lane: int) -> Flow:
        """Products and copies that a thread issued."""
        if lane not in self._pipes:
            ledger = self.ledger
            self._pipes[lane] = Flow(ledger, ledger.issued if ledger is not None else None)
        return self._pipes[lane]

    def issue(self, flow: Flow, piece: Piece, operation: Operation) -> None:
        flow.time += 1
        operation.time = flow.time
        flow.open = [one for one in flow.open if not one.done or piece.what not in PIPED]
        flow.open.append(operation)
        if self.ledger is not None and self.view is not None and piece.what in PIPED:
            self.ledger.pieces[flow.party, flow.time] = piece
            self.view.saw(flow.other, flow.time)
            self._tell(flow.other, flow.time)

    def _tell(self, party: int, time: int) -> None:
        """Where no fence is asked for, what it would tell is told at once."""
        if not self.strict and self.warp.view is not None:
            self.warp.view.saw(party, time)

    def over(self, what: str) -> None:
        """The warp waited for its loads, or its stores."""
        flow = self.loads if what == "ld" else self.stores
        flow.open = []
        self.waited[what] = flow.time
        if self.view is not None and self.warp.view is not None:
            self.view.saw(flow.party, flow.time)
            self.warp.view.saw(flow.other, flow.time)
            self._tell(flow.party, flow.time)

    def before_sync(self) -> None:
        view = self.warp.view
        if view is None:
            return
        self.handed = {flow.other: flow.time for flow in self._pipes.values()}
        self.handed[self.loads.party] = self.waited["ld"]
        self.handed[self.stores.party] = self.waited["st"]
        view.acquire(self.handed)

    def after_sync(self) -> None:
        if self.view is not None and self.warp.view is not None:
            self.view.acquire(self.warp.view.seen)
            self.view.acquire(self.warp.heard)

    def judge(self, use: Use, piece: Piece, party: int) -> Kind | None:
        """What is wrong if this warp's operation, one of that party, meets that use; None where it
        comes after."""
        ledger, view, ordinary = self.ledger, self.view, self.warp.view
        assert ledger is not None
        assert view is not None
        assert ordinary is not None
        if view.seen.get(use.party, 0) >= use.time:
            return None
        told = ordinary.seen.get(use.party, 0) >= use.time
        first = ledger.pieces.get((use.party, use.time))
        if first is not None and piece.follows(first, ledger.pipe):
            issued = ledger.issued[use.party]
            if view.seen.get(issued, 0) >= use.time:
                before = ledger.behind.setdefault(party, {})
                merge(before, {**ledger.behind.get(use.party, {}), use.party: use.time})
                return None
            told = told or ordinary.seen.get(issued, 0) >= use.time
        waited = ledger.waited.get(use.party, 0)
        if told or (waited and ordinary.seen.get(waited, 0) >= use.time):
            return Kind.TENSOR_FENCE if self.strict else None
        return Kind.RACE

    def known(self, use: Use) -> bool:
        """Whether what is done now comes after that use, were all fences there."""
        ordinary = self.warp.view
        if ordinary is None or self.ledger is None:
            return True
        waited = self.ledger.waited.get(use.party, 0)
        return any(
            party and ordinary.seen.get(party, 0) >= use.time for party in (use.party, waited)
        ) or (self.view is not None and self.view.seen.get(use.party, 0) >= use.time)


def ledger_of(warp: Warp) -> Ledger | None:
    """That of the warp's cluster; None where order is not looked at."""
    cluster, machine = warp.cta.cluster, warp.cta.machine
    if cluster.order is None:
        return None
    if cluster.tensor is None:
        cluster.tensor = Ledger(cluster.order, machine.tensor_pipe)
    found: Ledger = cluster.tensor
    return found


def issuer_of(warp: Warp) -> Issuer:
    if warp.tensor is None:
        warp.tensor = Issuer(warp)
    found: Issuer = warp.tensor
    return found


def check_pipe(given: str) -> None:
    """Raise ValueError unless there is such a pipe."""
    if given not in TENSOR_PIPES:
        raise ValueError(f"tensor_pipe={given!r}, expected one of {', '.join(TENSOR_PIPES)}")
