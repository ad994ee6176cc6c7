"""Equal instructions of a run that do not depend on each other, executed at once.

A run of instructions that touch registers alone is cut into levels by who needs whose result.
Instructions of a level that do the same become one call on the rows of a block, [instructions,
32]. A chain of `fma` becomes one exact product of all its factors, and a sum a level. A register
that nobody reads elsewhere is written only if a step takes it from there.

Blocks are for the common case. Where it does not hold (a register that an asynchronous operation
owns, a sum whose second rounding might mislead) the registers are put back, and the caller executes
one instruction after the other, which is right always and knows where an error is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from mqa.emulator import floats, rounding
from mqa.emulator.alu import FORMULAS, LANES, Casts, Formula, Function, Registers, copied
from mqa.emulator.floats import Array
from mqa.emulator.reports import Finding

_FEWEST = 4
"""Rows from which on a block takes less time than its instructions."""
_SUMS: dict[Any, int] = {floats.fma_f32: LANES, rounding.PAIR_FMA: 2 * LANES}
"""Sums of products, and how many float32 values a row of operands has."""

Blocks = list[Any]
Reader = Callable[[Registers, Blocks], Array]
Key = tuple[Any, Casts, tuple[np.dtype[Any], ...]]
"""What instructions that become one call have in common: a function, its casts, and how sources are
held."""
MicroStep = Callable[[Registers, Blocks], None]
Version = tuple[int, int]
"""A register, and how often the run has written it before."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """What of an instruction matters here."""

    function: Function
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(slots=True)
class _Node:
    """An instruction with the versions of registers that it reads and writes."""

    function: Function
    formula: Formula | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    operands: tuple[Version, ...] = ()
    """Copies are taken for what they are copies of, if that lasts."""
    held: tuple[np.dtype[Any], ...] = ()
    result: Version = (-1, 0)
    more: tuple[Version, ...] = ()
    level: int = 0
    factors_level: int = 0
    """Of an fma: when its product can be formed."""

    @property
    def key(self) -> Key | None:
        return self.formula and (self.formula.function, self.formula.casts, self.held)


class Batched:
    """A run as micro-steps."""

    def __init__(self, steps: Sequence[MicroStep], blocks: int, totals: Sequence[int]) -> None:
        self._steps, self._blocks, self._totals = steps, blocks, totals

    def __call__(self, values: Registers) -> bool:
        """Execute the run; False, and nothing has happened, where it has to go step by step."""
        saved = values.copy()
        blocks: Blocks = [None] * self._blocks
        try:
            for step in self._steps:
                step(values, blocks)
        except (TypeError, AttributeError, Finding):
            values[:] = saved
            return False
        if self._totals and not floats.rounds_once([blocks[i] for i in self._totals]):
            values[:] = saved
            return False
        return True


def batched(
    run: Sequence[Instruction], types: Sequence[np.dtype[Any]], outside: Callable[[int], bool]
) -> Batched | None:
    """The run in blocks; None where it has no equal instructions to speak of.

    `types` are those in which registers are held. `outside` says whether an instruction that is not
    in the run may read a register.
    """
    if len(run) < 2 * _FEWEST:
        return None
    nodes = _nodes(run, types)
    compiler = _Compiler(nodes, _needed(nodes, outside))
    return compiler.compile() if compiler.pays else None


def _nodes(run: Sequence[Instruction], types: Sequence[np.dtype[Any]]) -> list[_Node]:
    last = Counter(place for at in run for place in at.writes)
    versions: dict[int, int] = defaultdict(int)
    written: dict[int, int] = defaultdict(lambda: -1)
    read: dict[int, int] = defaultdict(lambda: -1)
    same: dict[Version, Version] = {}
    nodes = []
    for at in run:
        node = _Node(at.function, _formula(at.function), at.reads, at.writes)
        if (formula := node.formula) is not None:
            sources = ((place, versions[place]) for place in formula.sources)
            node.operands = tuple(same.get(source, source) for source in sources)
            node.held = tuple(types[place] for place in formula.sources)
            factors = formula.sources[:2]
            node.factors_level = max((written[place] + 1 for place in factors), default=0)
        before = [written[place] for place in (*at.reads, *at.writes)]
        before += [read[place] for place in at.writes]
        node.level = max(before, default=-1) + 1
        for place in at.reads:
            read[place] = max(read[place], node.level)
        for place in at.writes:
            versions[place] += 1
            written[place] = node.level
        if formula is not None:
            node.result = (formula.to, versions[formula.to])
            node.more = tuple((place, versions[place]) for place in formula.more)
            place, version = node.operands[0] if node.operands else (-1, 0)
            if formula.function is copied and formula.casts is None and version == last[place]:
                same[node.result] = place, version
        nodes.append(node)
    return nodes


def _needed(nodes: list[_Node], outside: Callable[[int], bool]) -> set[int]:
    """Registers that may be read after the run: elsewhere, or where it begins again."""
    written = set[int]()
    needed = set[int]()
    for node in nodes:
        needed.update(place for place in node.reads if place not in written)
        written.update(node.writes)
    return needed | {place for place in written if outside(place)}


def _formula(function: Function) -> Formula | None:
    found = FORMULAS.get(function)
    if found is None or (found.function in _SUMS and found.casts is not None):
        return None
    known = found.function in _SUMS or found.function in rounding.ELEMENTWISE
    return found if known or found.function is copied else None


def _is_sum(node: _Node) -> bool:
    return node.formula is not None and node.formula.function in _SUMS


def _chains(nodes: list[_Node]) -> dict[int, list[_Node]]:
    """Chains of sums that have no equals at their levels, by the identity of each of their nodes.

    All of a chain are executed when the last one is. So nobody else in the run may read or write
    the registers of the others, nor write the first addend's later.
    """
    uses = Counter(place for node in nodes for place in node.reads)
    writes = Counter(place for node in nodes for place in node.writes)
    alone = Counter((node.level, node.key) for node in nodes)
    sums = {node.result: node for node in nodes if _is_sum(node)}
    chains: dict[int, list[_Node]] = {}
    for node in sums.values():
        if alone[node.level, node.key] > 1:
            continue
        place, version = addend = node.operands[2]
        before = chains.get(id(sums.get(addend)))
        if (
            before is not None
            and place in node.reads
            and before[-1].key == node.key
            and uses[place] == writes[place] == 1
        ):
            before.append(node)
            chains[id(node)] = before
        elif version == writes[place]:
            chains[id(node)] = [node]
    return {key: chain for key, chain in chains.items() if len(chain) >= _FEWEST}


@dataclass(slots=True)
class _Compiler:
    nodes: list[_Node]
    needed: set[int]
    """Registers whose last values are taken from there."""
    kept: list[dict[int, Any]] = field(default_factory=list)
    """What registers get, one for each step that has results: rows of a block, or `_Copy`."""
    blocks: int = 0
    rows: dict[Version, tuple[int, int]] = field(default_factory=dict)
    """Block and row where a version of a register stands."""
    gathered: dict[tuple[Version, ...], int] = field(default_factory=dict)
    totals: list[int] = field(default_factory=list)

    @property
    def pays(self) -> bool:
        groups: dict[Any, int] = defaultdict(int)
        for node in self.nodes:
            if node.formula is not None and node.formula.function is not copied:
                level = 0 if _is_sum(node) else node.level
                groups[level, node.key] += 1
        return max(groups.values(), default=0) >= 2 * _FEWEST

    def compile(self) -> Batched:
        levels: dict[int, list[_Node]] = defaultdict(list)
        products: dict[int, dict[Any, list[_Node]]] = defaultdict(lambda: defaultdict(list))
        for node in self.nodes:
            levels[node.level].append(node)
            if node.formula is not None and _is_sum(node):
                products[node.factors_level][node.formula.function].append(node)
        steps: list[MicroStep] = []
        chains = _chains(self.nodes)
        for level in range(max(levels) + 1):
            steps += [self._product(group) for group in products[level].values()]
            groups: dict[Key | None, list[_Node]] = defaultdict(list)
            for node in levels[level]:
                chain = chains.get(id(node))
                if chain is None:
                    groups[node.key].append(node)
                elif node is chain[-1]:
                    steps.append(self._chain(chain))
            for key, group in groups.items():
                steps += self._group(key, group)
        self._drop_unread()
        return Batched(steps, self.blocks, self.totals)

    def _drop_unread(self) -> None:
        for kept in reversed(self.kept):
            for place in kept.keys() - self.needed:
                del kept[place]
            self.needed.update(one.source for one in kept.values() if isinstance(one, _Copy))

    def _new_block(self) -> int:
        self.blocks += 1
        return self.blocks - 1

    def _group(self, key: Key | None, group: list[_Node]) -> Iterable[MicroStep]:
        if key is not None and key[0] in _SUMS:
            yield self._sum(self._aligned(group, 2))
        elif key is not None and key[0] is copied:
            yield self._copies(group)
        elif key is None or len(group) < _FEWEST:
            for node in group:
                self.needed.update(node.reads)
                yield _alone(node.function)
        else:
            yield self._elementwise(*key[:2], group)

    def _copies(self, group: list[_Node]) -> MicroStep:
        copies = {node.result[0]: _copy_of(node) for node in group}
        self.kept.append(copies)

        def step(values: Registers, blocks: Blocks) -> None:
            for to, (source, plain, alone) in copies.items():
                value = values[source]
                if plain and type(value) is np.ndarray:
                    values[to] = value
                else:
                    alone(values)

        return step

    def _aligned(self, group: list[_Node], operand: int) -> list[_Node]:
        """In the order in which an operand's rows stand already, if they do."""
        return sorted(group, key=lambda node: self.rows.get(node.operands[operand], (-1, 0)))

    def _elementwise(self, function: Any, casts: Casts, group: list[_Node]) -> MicroStep:
        count = len(group[0].operands)
        readers = [self._reader([node.operands[i] for node in group]) for i in range(count)]
        if group[0].more:
            return self._cut(_with_casts(function, casts), readers[0], group)
        function = _with_casts(function, casts)
        store = self._results([node.result for node in group])

        def step(values: Registers, blocks: Blocks) -> None:
            store(values, blocks, function(*[read(values, blocks) for read in readers]))

        return step

    def _cut(self, function: Any, reader: Reader, group: list[_Node]) -> MicroStep:
        """Results of an instruction are rows of as many blocks."""
        results = zip(*((node.result, *node.more) for node in group), strict=True)
        stores = [self._results(versions) for versions in results]

        def step(values: Registers, blocks: Blocks) -> None:
            found = function(reader(values, blocks))
            for store, part in zip(stores, found, strict=True):
                store(values, blocks, part)

        return step

    def _product(self, nodes: list[_Node]) -> MicroStep:
        """Exact products of the factors, in the order in which sums take them."""
        ordered = sorted(nodes, key=lambda node: node.level)
        one, other = (self._reader([node.operands[i] for node in ordered]) for i in range(2))
        block = self._new_block()
        for row, node in enumerate(ordered):
            self.rows[_product_of(node)] = (block, row)
        width = _width(nodes)

        def step(values: Registers, blocks: Blocks) -> None:
            factors = (read(values, blocks).view(np.float32) for read in (one, other))
            product = np.multiply(*factors, dtype=np.float64)
            blocks[block] = _rows(product.reshape(-1, width), len(ordered))

        return step

    def _sum(self, group: list[_Node]) -> MicroStep:
        product = self._reader([_product_of(node) for node in group])
        addend = self._reader([node.operands[2] for node in group])
        total = self._new_block()
        self.totals.append(total)
        store = self._results([node.result for node in group])
        dtype = np.dtype(np.float32 if _width(group) == LANES else np.uint64)

        def step(values: Registers, blocks: Blocks) -> None:
            given = addend(values, blocks).view(np.float32)
            blocks[total] = exact = product(values, blocks) + given
            store(values, blocks, exact.astype(np.float32).view(dtype))

        return step

    def _chain(self, chain: list[_Node]) -> MicroStep:
        """Sums of which each is the addend of the next one."""
        product = self._reader([_product_of(node) for node in chain])
        addend = self._reader([chain[0].operands[2]])
        total = self._new_block()
        self.totals.append(total)
        kept = {node.result[0]: row for row, node in enumerate(chain)}
        self.kept.append(kept)
        dtype = np.dtype(np.float32 if _width(chain) == LANES else np.uint64)

        def step(values: Registers, blocks: Blocks) -> None:
            blocks[total] = exact = product(values, blocks).copy()
            given = addend(values, blocks).view(np.float32).reshape(-1)
            sums = []
            for row in exact:
                row += given
                given = row.astype(np.float32)
                sums.append(given)
            for place, row in kept.items():
                values[place] = sums[row].view(dtype)

        return step

    def _results(self, versions: Sequence[Version]) -> Callable[[Registers, Blocks, Array], None]:
        """What puts the rows of a result into a block for these, and into registers."""
        block = self._new_block()
        self.rows.update((version, (block, row)) for row, version in enumerate(versions))
        kept = {place: row for row, (place, _) in enumerate(versions)}
        self.kept.append(kept)

        def store(values: Registers, blocks: Blocks, out: Array) -> None:
            blocks[block] = rows = _rows(out, len(versions))
            for place, row in kept.items():
                values[place] = rows[row]

        return store

    def _reader(self, wanted: list[Version]) -> Reader:
        """Rows of a block where they stand in one in this order, else gathered from registers."""
        places = [place for place, _ in wanted]
        known = [self.rows.get(version) for version in wanted]
        if known[0] is not None:
            block, first = known[0]
            if known == [(block, first + i) for i in range(len(known))]:
                part = slice(first, first + len(known))
                return lambda values, blocks: blocks[block][part]
            if _is_product(wanted[0]):
                return self._picked(known)
        self.needed.update(places)
        if len(set(wanted)) == 1:
            (place,) = set(places)
            return lambda values, blocks: values[place]
        return self._gathering(wanted, places)

    def _picked(self, known: list[Any]) -> Reader:
        """Products that stand apart: no register holds them."""
        return lambda values, blocks: np.stack([blocks[block][row] for block, row in known])

    def _gathering(self, wanted: list[Version], places: list[int]) -> Reader:
        key = tuple(wanted)
        if key in self.gathered:
            kept = self.gathered[key]
            return lambda values, blocks: blocks[kept]
        block = self.gathered[key] = self._new_block()
        take = itemgetter(*places)

        def gather(values: Registers, blocks: Blocks) -> Array:
            rows: Array = np.concatenate(take(values)).reshape(-1, LANES)
            blocks[block] = rows
            return rows

        return gather


class _Copy(NamedTuple):
    source: int
    plain: bool
    """No cast is needed."""
    alone: Function
    """Copies what an asynchronous operation owns too."""


def _copy_of(node: _Node) -> _Copy:
    assert node.formula is not None
    return _Copy(node.formula.sources[0], node.formula.casts is None, node.function)


def _width(nodes: list[_Node]) -> int:
    """float32 values of a row of these sums, which are all of one kind."""
    formula = nodes[0].formula
    assert formula is not None
    return _SUMS[formula.function]


def _rows(out: Array, count: int) -> Array:
    """As many rows as there are instructions: those that all have equal operands give one."""
    if out.ndim == 2 and len(out) == count:
        return out
    return np.ascontiguousarray(np.broadcast_to(out, (count, out.shape[-1])))


def _with_casts(function: Any, casts: Casts) -> Any:
    if casts is None:
        return function
    out, *ins = casts

    def converted(*given: Array) -> Any:
        result = function(*(cast(x) if cast else x for cast, x in zip(ins, given, strict=True)))
        if out is None:
            return result
        return [out(part) for part in result] if isinstance(result, list) else out(result)

    return converted


def _product_of(node: _Node) -> Version:
    """Stands for the product of an fma, which no register holds."""
    place, version = node.result
    return -1 - place, version


def _is_product(version: Version) -> bool:
    return version[0] < 0


def _alone(function: Function) -> MicroStep:
    return lambda values, blocks: function(values)
