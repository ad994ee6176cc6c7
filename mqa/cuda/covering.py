"""Few of many combinations, in which every two values of different choices still meet."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def covering(combinations: Mapping[Name, tuple[Hashable, ...]]) -> tuple[Name, ...]:
    """Names of combinations (a value of each choice) such that every pair of values that some
    combination has is in one of these. The same for the same mapping: always the next is the first
    of those that have the most pairs which none before had."""
    pairs = {name: frozenset(_pairs(values)) for name, values in combinations.items()}
    left = frozenset[object]().union(*pairs.values())
    chosen = []
    while left:
        best = max(pairs, key=lambda name: len(pairs[name] & left))
        chosen.append(best)
        left -= pairs[best]
    return tuple(chosen)


def _pairs(values: tuple[Hashable, ...]) -> Iterator[object]:
    return itertools.combinations(enumerate(values), 2)
