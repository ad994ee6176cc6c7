"""The machine code of a kernel, as `nvdisasm -c` writes it: loops, and the longest way round one.

Where a loop's blocks branch, the longest way is taken; a predicated instruction is always issued.
Of a loop inside, one round is taken, or none if there is a way past it: so a wait that spins is
taken to pass at once, whether the compiler repeats it in place or out of line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

_LINE = re.compile(r"/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"\.L_x_\d+")
_BRANCHES, _ENDS = {"BRA", "BRX", "JMP"}, {"EXIT", "RET"}


@dataclass(frozen=True)
class Instruction:
    name: str
    """With what follows its points, such as LDTM.x32."""
    targets: tuple[int, ...] = ()
    """Of a branch: the places of the instructions that it may go to."""
    falls: bool = True
    """Whether the next instruction may follow it."""

    @property
    def opcode(self) -> str:
        return self.name.partition(".")[0]


def parse(text: str) -> list[Instruction]:
    """The instructions of a disassembly of one kernel."""
    labels: dict[str, int] = {}
    found: list[tuple[str, list[str], bool]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(found)
        elif one := _LINE.search(line):
            guard, name, operands = one.groups()
            opcode = name.partition(".")[0]
            branches = opcode in _BRANCHES
            # A branch has its predicate in front, or as an operand before the label.
            tested = guard or (opcode == "BRA" and operands.strip()[:1] != "`")
            falls = bool(tested) or not (branches or opcode in _ENDS)
            found.append((name, _TARGET.findall(operands) if branches else [], falls))
    return [
        Instruction(name, tuple(labels[target] for target in targets), falls)
        for name, targets, falls in found
    ]


@dataclass(frozen=True)
class Loop:
    """Blocks by their first instructions."""

    head: int
    ends: frozenset[int]
    """Those that go back to the head."""
    body: frozenset[int]


class Flow:
    """Blocks of instructions, and what follows what."""

    def __init__(self, code: list[Instruction]) -> None:
        after = {i + 1 for i, one in enumerate(code) if one.targets or not one.falls}
        firsts = sorted({0, *(t for one in code for t in one.targets), *after} - {len(code)})
        spans = zip(firsts, [*firsts[1:], len(code)], strict=True)
        self.blocks = {first: code[first:end] for first, end in spans}
        self._after = {first: self._successors(first) for first in firsts}
        self._before: dict[int, list[int]] = defaultdict(list)
        self._backwards: list[int] = []
        """Blocks, each behind all that follow it but for ways back."""
        self.loops = sorted(self._find_loops(), key=lambda loop: len(loop.body))

    def _successors(self, first: int) -> list[int]:
        block = self.blocks[first]
        end = first + len(block)
        # Behind the last instruction of all there is nothing, though it may not say so.
        falls = block[-1].falls and end in self.blocks
        return [*block[-1].targets, *([end] if falls else ())]

    def _find_loops(self) -> Iterator[Loop]:
        ends = defaultdict(set)
        for block, head in self._ways_back():
            ends[head].add(block)
        for block in self._backwards:
            for one in self._after[block]:
                self._before[one].append(block)
        for head, lasts in ends.items():
            body = _reached(lasts, lambda block, head=head: self._before[block] * (block != head))
            if head == 0 or 0 not in body:  # Else it is entered elsewhere too and no loop.
                yield Loop(head, frozenset(lasts), frozenset(body))

    def _ways_back(self) -> Iterator[tuple[int, int]]:
        """From a block to one on the way to it from the entry."""
        open_ = {0: True}
        stack = [(0, iter(self._after[0]))]
        while stack:
            block, rest = stack[-1]
            for one in rest:
                if one not in open_:
                    open_[one] = True
                    stack.append((one, iter(self._after[one])))
                    break
                if open_[one]:
                    yield block, one
            else:
                open_[block] = False
                self._backwards.append(block)
                stack.pop()

    def inside(self, loop: Loop) -> list[Loop]:
        return [one for one in self.loops if one.head != loop.head and one.body < loop.body]

    def own(self, loop: Loop) -> list[Instruction]:
        """Its instructions that are in no loop inside."""
        blocks = loop.body.difference(*(one.body for one in self.inside(loop)))
        return [one for block in sorted(blocks) for one in self.blocks[block]]

    def longest_way(self, loop: Loop) -> list[Instruction]:
        """The instructions of one way round."""
        body = set(loop.body)
        for one in self.inside(loop):
            if self._goes_round(loop, body - one.body):
                body -= one.body
        best: dict[int, list[Instruction]] = {}
        for block in self._backwards:
            ways = [best[one] for one in self._after[block] if one in best and one != loop.head]
            ways += [[]] * (block in loop.ends)
            if block in body and ways:
                best[block] = self.blocks[block] + max(ways, key=len)
        return best[loop.head]

    def _goes_round(self, loop: Loop, body: set[int]) -> bool:
        reached = _reached([loop.head], lambda block: body.intersection(self._after[block]))
        return not loop.ends.isdisjoint(reached)


def _reached(first: Iterable[int], after: Callable[[int], Iterable[int]]) -> set[int]:
    reached: set[int] = set()
    waiting = list(first)
    while waiting:
        block = waiting.pop()
        if block not in reached:
            reached.add(block)
            waiting += after(block)
    return reached
