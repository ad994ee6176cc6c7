"""The GPU suites: which rows there are, and which of them are asked for."""

from __future__ import annotations

import re

from collections.abc import Iterable

from mqa.cli.gpu.blackwell_rows import BLACKWELL
from mqa.cli.gpu.dense_rows import DENSE, LONG
from mqa.cli.gpu.paged_rows import PAGED
from mqa.cli.gpu.portable_rows import PORTABLE
from mqa.cli.gpu.rows import Comparison, Row


def hopper_rows(only: str | None = None, *, quick: bool = False) -> list[Row]:
    """The Hopper suite; `only` keeps rows whose "group: name" matches, `quick` drops the longest.

    Raises re.error if `only` is no regular expression.
    """
    return _chosen((row for group in (*DENSE, *PAGED) for row in group()), only, quick=quick)


def blackwell_rows(only: str | None = None, *, quick: bool = False) -> list[Row]:
    """The same of the Blackwell suite."""
    return _chosen((row for group in BLACKWELL for row in group()), only, quick=quick)


def portable_rows(only: str | None = None, *, quick: bool = False) -> list[Row]:
    """The same of the suite of portable kernels."""
    return _chosen((row for group in PORTABLE for row in group()), only, quick=quick)


def _chosen(every: Iterable[Row], only: str | None, *, quick: bool) -> list[Row]:
    wanted = re.compile(only or "")
    rows = [row for row in every if wanted.search(f"{row.group}: {row.name}")]
    return [row for row in rows if not (quick and _long(row))]


def _long(row: Row) -> bool:
    return isinstance(row, Comparison) and row.ours.windows.pairs > LONG[0] * LONG[1] // 4
