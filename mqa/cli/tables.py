"""Tables of a report, as text cells: for the terminal and for Markdown files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class TextTable:
    """A title, the names of the columns and the cells, a list a row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def rich_table(table: TextTable, *, words: int = 1, bad: Collection[int] = ()) -> Table:
    """For the terminal: the first `words` columns to the left, numbers to the right, rows `bad` in
    red."""
    rich = Table(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        rich.add_column(column, justify="left" if index < words else "right", overflow="fold")
    for index, row in enumerate(table.rows):
        rich.add_row(*row, style="bold red" if index in bad else None)
    return rich


def markdown(table: TextTable) -> str:
    """Title, empty line, table."""
    columns = [_cell(column) for column in table.columns]
    rule = ["---", *["---:"] * (len(columns) - 1)]
    rows = [columns, rule, *([_cell(cell) for cell in row] for row in table.rows)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"**{table.title[0].upper()}{table.title[1:]}**", "", *lines, ""])


def markdown_page(
    title: str, facts: Mapping[str, object], tables: Sequence[TextTable], notes: Sequence[str] = ()
) -> str:
    """What somebody can send beside a JSON report: a title, facts that are known, tables, notes."""
    known = [f"- {name}: {value}" for name, value in facts.items() if value not in (None, "")]
    parts = [f"# {title}\n", *(f"{line}" for line in known), "", *map(markdown, tables)]
    return "\n".join([*parts, *(f"- {note}" for note in notes)]).rstrip() + "\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
