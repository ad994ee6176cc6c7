"""The Hopper suite: which rows there are, and which of them are asked for."""

from __future__ import annotations

import re

from mqa.cli.gpu.dense_rows import DENSE, LONG
from mqa.cli.gpu.paged_rows import PAGED
from mqa.cli.gpu.rows import Comparison, Row


def hopper_rows(only: str | None = None, *, quick: bool = False) -> list[Row]:
    """The suite; `only` keeps rows whose "group: name" matches, `quick` drops the longest.

    Raises re.error if `only` is no regular expression.
    """
    wanted = re.compile(only or "")
    every = (row for group in (*DENSE, *PAGED) for row in group())
    rows = [row for row in every if wanted.search(f"{row.group}: {row.name}")]
    return [row for row in rows if not (quick and _long(row))]


def _long(row: Row) -> bool:
    return isinstance(row, Comparison) and row.ours.windows.pairs > LONG[0] * LONG[1] // 4
