"""A warp: 32 threads that share an instruction where they can.

Threads at one instruction are a fragment. Where a branch divides them the fragment is split, and
fragments that meet at an instruction become one again. The fragment furthest behind goes first,
so they meet where control flow meets; one that waits, or that had its turns, lets others go, also
those ahead of it.
An instruction for the whole warp, or for a mask of threads, waits for the fragments that it needs.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mqa.emulator.alu import LANES, Pending, Registers
from mqa.emulator.floats import Array
from mqa.emulator import taint
from mqa.emulator.order import View
from mqa.emulator.reports import Finding, Kind

if TYPE_CHECKING:
    from mqa.emulator.batches import Batched
    from mqa.emulator.machine import Cta
    from mqa.emulator.program import Program

FULL = (1 << LANES) - 1
_TURNS = 256
"""Steps after which a fragment lets its sisters go."""


@functools.lru_cache(maxsize=4096)
def lanes(mask: int) -> Array:
    """Which threads a mask has, as an array of 32 booleans."""
    return np.array([bool(mask >> i & 1) for i in range(LANES)])


def mask_of(which: Array) -> int:
    """The reverse of `lanes`."""
    return int.from_bytes(np.packbits(which, bitorder="little").tobytes(), "little")


class Wait(ABC):
    """What a fragment waits for."""

    retry = False
    """Whether the instruction is executed again, else it is done when the wait is over."""

    @property
    def label(self) -> str:
        """What it waits for, short: the same whenever it is waited for again."""
        return type(self).__name__

    @abstractmethod
    def ready(self) -> bool: ...

    def over(self, warp: Warp) -> None:  # noqa: B027
        """The fragment goes on after the instruction."""

    def unless_ready(self, warp: Warp) -> Wait | None:
        """The wait, or None and what follows it."""
        if not self.ready():
            return self
        self.over(warp)
        return None

    def gave_up(self) -> bool:
        """Whether it has a time limit, and that is over."""
        return False

    @abstractmethod
    def __str__(self) -> str: ...


class Sisters(Wait):
    """Other threads of the warp have to come to the same instruction."""

    retry = True
    label = "threads of the warp"

    def __init__(self, warp: Warp, fragment: Fragment, needed: int, *, anywhere: bool) -> None:
        self.warp, self.fragment, self.needed, self.anywhere = warp, fragment, needed, anywhere

    def same(self, other: Sisters) -> bool:
        """Whether both are the barrier of the same threads, wherever they stand."""
        return self.anywhere and other.anywhere and self.needed == other.needed

    def ready(self) -> bool:
        needed = self.needed & ~self.warp.exited
        here = self.fragment.mask
        if self.anywhere:
            for other in self.warp.fragments:
                if isinstance(other.wait, Sisters) and other.wait.same(self):
                    here |= other.mask
        return here & needed == needed

    def __str__(self) -> str:
        missing = self.needed & ~self.warp.exited & ~self.fragment.mask
        return f"threads {missing:#010x} of its warp"


class Fragment:
    """Threads of a warp at one instruction."""

    __slots__ = ("mask", "pc", "rounds", "turns", "wait")

    def __init__(self, pc: int, mask: int, rounds: int = 0) -> None:
        self.pc, self.mask, self.rounds = pc, mask, rounds
        self.turns = 0
        """Since it let its sisters go the last time."""
        self.wait: Wait | None = None

    @property
    def place(self) -> tuple[int, int]:
        """The lowest goes first."""
        return self.rounds, self.pc


class Warp:
    """Registers and fragments of 32 threads."""

    def __init__(self, cta: Cta, index: int, threads: int, program: Program) -> None:
        self.cta, self.index, self.program = cta, index, program
        mask = (1 << threads) - 1
        self.exited = FULL & ~mask
        self.fragments = [Fragment(0, mask)]
        self.current = self.fragments[0]
        self.registers: Registers = program.binder.fresh()
        self.counts = 0
        """Instructions executed."""
        self.executed: list[int] = cta.machine.executed
        self.budgets = 0
        """How often setmaxnreg changed its budget."""
        self.bulk: dict[int, list[Any]] = {}
        """Bulk stores of a thread: groups, the last one open."""
        self.new_barriers: list[Any] = []
        """Initialised, and not yet made known to asynchronous engines."""
        self.stores = self.copied = 0
        """Bulk stores and cp.async so far."""
        self.copies: list[Any] = []
        """cp.async operations of no group."""
        self.copy_groups: list[tuple[int, list[Any]]] = []
        """How many it had issued by then, and those of them that were not known to be done."""
        self.fenced: dict[int, int] = {}
        """What it had seen at its last fence: a relaxed arrival after that tells it."""
        self.fenced_inits = 0
        self.heard: dict[int, int] = {}
        """What relaxed waits found: it counts from the next fence on, that of tensor memory too."""
        self.fenced_products = False
        """Whether wgmma.fence came since the last wait for products."""
        self.open_products: list[Any] = []
        """wgmma of the group that is not committed yet."""
        self.product_groups: list[list[Any]] = []
        self.tensor: Any = None
        """What `mqa.emulator.tensor_order` keeps."""
        self.max_registers = 0
        self.cluster_wait: Wait | None = None
        """Of an arrival at the cluster barrier that no wait followed yet."""
        self.given_up: Wait | None = None
        order = cta.cluster.order
        self.view = View(order) if order is not None else None
        """What it has seen of others."""
        self.tainted: dict[int, taint.Taint] = {}
        """Registers that hold what was never written."""
        self.unwritten: Array | None = None
        """Of the last load: which threads met such bytes."""
        self.local_taint: Array | None = None
        """Bytes of local memory that hold such values, or nothing yet, [threads, bytes]."""
        self.copy_party = order.new_party() if order is not None else 0
        self.store_party = order.new_party() if order is not None else 0
        self.init_party = order.new_party() if order is not None else 0
        """Those of its cp.async, of its bulk stores, and of its initialisations of mbarriers."""
        self.inits = 0

    def place(self) -> str:
        """The instruction that it is at."""
        return self.program.told(self.current.pc)

    def where(self) -> str:
        return f"warp {self.index} of CTA {self.cta.index} ({self.place()})"

    @property
    def done(self) -> bool:
        return not self.fragments

    def runnable(self) -> bool:
        return any(f.wait is None or f.wait.ready() for f in self.fragments)

    def run(self, budget: int) -> int:
        """Execute up to `budget` instructions that others can see; how many were."""
        recorder = self.cta.machine.recorder
        advance: Callable[[Fragment, int], int] = self._advance
        if recorder is not None:
            advance = functools.partial(recorder.follow, self, self._advance)
        steps = 0
        while steps < budget:
            fragment = self._next()
            if fragment is None:
                break
            steps += advance(fragment, budget - steps)
        return steps

    def _next(self) -> Fragment | None:
        """The fragment furthest behind of those that can go on."""
        able = [f for f in self.fragments if f.wait is None or f.wait.ready()]
        if not able:
            return None
        chosen = min(able, key=lambda fragment: fragment.place) if len(able) > 1 else able[0]
        wait, chosen.wait = chosen.wait, None
        self.given_up = wait
        if isinstance(wait, Sisters) and wait.anywhere:
            self._release(wait)
        elif wait is not None and not wait.retry:
            wait.over(self)
            self._pass(chosen)
        return chosen

    def _pass(self, fragment: Fragment) -> None:
        """The instruction that a fragment waited at is done."""
        self.executed[fragment.pc] += 1
        self.counts += 1
        fragment.pc += 1

    def _release(self, wait: Sisters) -> None:
        """All threads of a warp barrier are there, at whatever instruction: they go on."""
        self._pass(wait.fragment)
        for other in self.fragments:
            theirs = other.wait
            if isinstance(theirs, Sisters) and theirs.same(wait):
                other.wait = None
                self._pass(other)

    def _advance(self, fragment: Fragment, budget: int) -> int:
        """Let a fragment go on until it waits, ends, meets a sister, or had its turns."""
        program, steps, turns = self.program, 0, 0
        self.current = fragment
        while steps < budget:
            run = program.runs.get(fragment.pc)
            if run is not None:
                self.executed[fragment.pc] += 1
                if self.tainted and not self.tainted.keys().isdisjoint(run.touched):
                    self._run_tainted(fragment, *run[:3])
                else:
                    self._run_simple(fragment, *run[:4])
                if fragment.wait is not None:
                    return steps
            elif (step := program.steps[fragment.pc]).target >= 0:
                self._branch(fragment, step)
            elif step.exits:
                if self._exit(fragment, step):
                    return steps + 1
            else:
                steps += 1
                if not self._effect(fragment, step):
                    return steps
            turns += 1
            if turns % _TURNS == 0:
                steps += 1
            if len(self.fragments) > 1 and (self._merge(fragment) or self._had_turns(fragment)):
                return steps + 1
        return steps

    def _had_turns(self, fragment: Fragment) -> bool:
        """Whether a fragment should let its sisters go, wherever they are: it may wait for them."""
        fragment.turns += 1
        if fragment.turns < _TURNS:
            return False
        fragment.turns = 0
        fragment.rounds += 1
        return True

    def _effect(self, fragment: Fragment, step: Any) -> bool:
        """Execute an instruction that others can see; whether the fragment goes on."""
        mask = fragment.mask
        if self.tainted:
            self._decide(fragment, step)
        if step.predicate is not None:
            mask &= self._holds(step.predicate)
        try:
            wait = step.effect(self, mask) if mask else None
        except (TypeError, AttributeError):
            if not self._explain_pending(fragment):
                raise
            return fragment.wait is None and self._effect(fragment, step)
        if wait is not None:
            fragment.wait = wait
            return False
        if step.more:
            for _ in range(step.more):
                self._pass(fragment)
        self.executed[fragment.pc] += 1
        self.counts += 1
        fragment.pc += 1
        return True

    def _run_simple(
        self,
        fragment: Fragment,
        functions: Any,
        dests: Any,
        end: int,
        batched: Batched | None = None,
    ) -> None:
        """Execute instructions that touch registers alone, up to `end`."""
        values = self.registers
        function = None
        try:
            if fragment.mask | self.exited == FULL:
                if batched is None or not batched(values):
                    for function in functions:
                        function(values)
            else:
                which = lanes(fragment.mask)
                for function, places in zip(functions, dests, strict=True):
                    before = [values[place] for place in places]
                    function(values)
                    for place, old in zip(places, before, strict=True):
                        values[place] = merged(which, values[place], old)
        except (TypeError, AttributeError, Finding):
            done = next(i for i, f in enumerate(functions) if f is function)
            fragment.pc += done
            if not self._explain_pending(fragment):
                raise
            self.counts += done
            rest = functions[done:], dests[done:], end
            if fragment.wait is None:
                self._run_simple(fragment, *rest)
            else:
                if fragment.pc not in self.program.runs:
                    self.executed[fragment.pc] = self.executed[self.program.divide(fragment.pc)]
                self.executed[fragment.pc] -= 1  # counted when it goes on
            return
        self.counts += len(functions)
        fragment.pc = end

    def _run_tainted(self, fragment: Fragment, functions: Any, dests: Any, end: int) -> None:
        """The same where registers hold what was never written."""
        which = lanes(fragment.mask)
        for function, places in zip(functions, dests, strict=True):
            at = self.program.instructions[fragment.pc]
            carried = taint.carried(self, at, self.program.sources[fragment.pc])
            self._run_simple(fragment, (function,), (places,), fragment.pc + 1)
            for place in places:
                taint.put(self, place, carried, which)
        fragment.pc = end

    def _decide(self, fragment: Fragment, step: Any) -> None:
        """Raise a finding if what was never written decides what an instruction does."""
        guard, operands = self.program.deciding[fragment.pc]
        mask = fragment.mask
        taint.decides(self, guard, lanes(mask))
        if step.predicate is not None:
            mask &= self._holds(step.predicate)
        taint.decides(self, operands, lanes(mask))

    def _explain_pending(self, fragment: Fragment) -> bool:
        """Raise a finding if the instruction used a register that is pending.

        Without checks the fragment waits for the operation, and then gets the register. Whether
        there were any.
        """
        found = False
        for register in self.program.sources[fragment.pc]:
            held = self.registers[register.index]
            if not isinstance(held, Pending):
                continue
            if self.cta.machine.checks.any:
                what = f"{register.name} belongs to {held.operation}"
                raise Finding(Kind.PENDING_REGISTER, what) from None
            for owned in held.owned():
                wait = owned.operation.settle(self, owned)  # type: ignore[attr-defined]
                fragment.wait = fragment.wait or wait
            found = True
        return found

    def _holds(self, predicate: tuple[int, bool]) -> int:
        """Mask of the threads whose predicate holds."""
        place, negated = predicate
        mask = mask_of(self.registers[place])
        return ~mask & FULL if negated else mask

    def _branch(self, fragment: Fragment, step: Any) -> None:
        taken = fragment.mask
        self.executed[fragment.pc] += 1
        self.counts += 1
        if self.tainted and (step.predicate is not None or step.targets):
            self._decide(fragment, step)
        if step.predicate is not None:
            taken &= self._holds(step.predicate)
        if step.targets and taken:
            self._divide(fragment, step, taken)
            return
        if taken == fragment.mask:
            fragment.pc = step.target
            return
        fragment.pc += 1
        if taken:
            fragment.mask &= ~taken
            self._split_off(step.target, taken, fragment.rounds)

    def _divide(self, fragment: Fragment, step: Any, taken: int) -> None:
        """Threads go where their index says; the fragment itself goes with some."""
        index = step.index(self)
        chosen = index[lanes(taken)]
        if int(chosen.max()) >= len(step.targets):
            raise Finding(
                Kind.OUT_OF_BOUNDS, f"index {int(chosen.max())} of {len(step.targets)} targets"
            )
        goes = [(step.targets[i], mask_of(index == i) & taken) for i in set(chosen.tolist())]
        if stays := fragment.mask & ~taken:
            goes.append((fragment.pc + 1, stays))
        fragment.pc, fragment.mask = goes[0]
        for place, mask in goes[1:]:
            self._split_off(place, mask, fragment.rounds)

    def _split_off(self, pc: int, mask: int, rounds: int) -> None:
        """Threads go elsewhere, perhaps to where others are."""
        for other in self.fragments:
            if other.pc == pc and (other.wait is None or other.wait.retry):
                other.mask |= mask
                other.wait = None
                return
        self.fragments.append(Fragment(pc, mask, rounds))

    def _exit(self, fragment: Fragment, step: Any) -> bool:
        """Whether the whole fragment ended."""
        gone = fragment.mask
        self.executed[fragment.pc] += 1
        self.counts += 1
        if step.predicate is not None:
            if self.tainted:
                self._decide(fragment, step)
            gone &= self._holds(step.predicate)
        self.exited |= gone
        fragment.mask &= ~gone
        if gone:
            self.cta.threads_left(self)
        if fragment.mask == 0:
            self.fragments.remove(fragment)
            return True
        fragment.pc += 1
        return False

    def _merge(self, fragment: Fragment) -> bool:
        """Whether the fragment should let others go: it met one, or is ahead of one."""
        for other in self.fragments:
            meets = other is not fragment and other.pc == fragment.pc
            if meets and (other.wait is None or other.wait.retry):
                other.mask |= fragment.mask
                other.wait = None
                other.rounds = min(other.rounds, fragment.rounds)
                self.fragments.remove(fragment)
                self.current = other
                return True
        return any(f.wait is None and f.place < fragment.place for f in self.fragments)

    def part(self, mask: int) -> None:
        """The fragment goes on with these threads; the others come to its instruction anew."""
        fragment = self.current
        rest = fragment.mask & ~mask
        if rest:
            fragment.mask = mask
            self.fragments.append(Fragment(fragment.pc, rest, fragment.rounds))

    def gives_up(self) -> bool:
        """Whether the wait that the fragment just had came to its time limit."""
        before, self.given_up = self.given_up, None
        return before is not None and before.gave_up()

    def needs(self, mask: int, needed: int, *, anywhere: bool = False) -> Wait | None:
        """A wait for sisters unless all threads of `needed` that live are in `mask`.

        Raises a finding where those missing stand at the instruction and do not take part.
        """
        missing = needed & ~self.exited & ~mask
        if missing == 0:
            return None
        if missing & ~self.current.mask == 0 and not anywhere:
            raise Finding(
                Kind.DIVERGENCE,
                f"threads {missing:#010x} of warp {self.index} are expected here, and do "
                "not take part: their predicate is false",
            )
        return Sisters(self, self.current, needed, anywhere=anywhere)

    def write(self, place: int, value: Any, mask: int) -> None:
        """Set a register in the threads of a mask."""
        if self.tainted:
            taint.put(self, place, None, lanes(mask))
        if mask | self.exited == FULL:
            self.registers[place] = value
        else:
            self.registers[place] = merged(lanes(mask), value, self.registers[place])


def merged(which: Array, new: Any, old: Any) -> Any:
    """`new` in those threads, `old` in the others."""
    if new is old:
        return new
    if isinstance(new, Pending) or isinstance(old, Pending):
        if which.all():
            return new
        if not which.any():
            return old
        raise Finding(Kind.PENDING_REGISTER, "a part of the threads writes or moves it")
    return np.where(which, new, old)
